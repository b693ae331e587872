"""Published figures are those of the papers: each row stands there, and tables that tell the same agree."""

import re

import pytest

from sfumato.evaluation.papers import published_rows

FIGURES = {  # of each table: rows, and figures of a whole row
    "1": (23, 7), "2": (14, 7), "4": (7, 7), "C.7": (5, 7),
    "C.8": (20, 6), "C.9": (18, 6), "C.10": (20, 6), "C.11": (20, 6)
}  # fmt: skip
MARKS = (  # how the paper's text, made from HTML, writes a method
    ("VSE∞", "VSE\\infty"),
    ("μ", "μ𝜇\\muitalic_μ"),
    ("σ", "σ𝜎\\sigmaitalic_σ"),
    ("Mean only)", "Meany only)"),
    ("†", "{}^{\\dagger}start_FLOATSUPERSCRIPT † end_FLOATSUPERSCRIPT"),
)


@pytest.fixture(scope="module")
def lines(shared):
    """The paper, standard errors taken out, white space evened."""
    (paper,) = (shared / "papers").glob("000_*.txt")
    text = re.sub(r"\s*\((±plus-or-minus\\pm±[\d.]+|\\cdot)\)", "", paper.read_text(encoding="utf-8"))
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]


def part(lines, table):
    """The lines from a table's caption to the next one's."""
    start = next(i for i, line in enumerate(lines) if line.startswith(f"Table {table}:"))
    after = (i for i in range(start + 1, len(lines)) if lines[i].startswith("Table ") and lines[i].find(":") < 12)
    return lines[start : next(after, start + 60)]


@pytest.mark.parametrize("table", FIGURES)
def test_every_row_stands_in_its_table_of_the_paper(table, lines):
    """In their order: method and figures of a line, the backbone at the head of its block of lines."""
    place, there = 0, part(lines, table)
    for row in published_rows(table=table, paper="PCME++"):
        method = row.method.split(", ")[0]
        for ours, theirs in MARKS:
            method = method.replace(ours, theirs)
        printed = [f"{v:.2f}".removesuffix("0") if round(v, 1) != v else f"{v:.1f}" for v in row.figures.values()]
        whole = ["-"] * (FIGURES[table][1] - len(printed)) + printed
        wanted = re.compile(rf"(^|.* ){re.escape(method)}( L/14)? {re.escape(' '.join(whole))}$")
        found = [i for i in range(place, len(there)) if wanted.match(there[i])]
        assert found, row
        place = found[0] + 1
        if table not in ("2", "4", "C.7"):
            head = next(line for line in reversed(there[:place]) if line.startswith("ViT-"))
            assert head.startswith(row.backbone), row
        if table == "2":
            head = next(line for line in reversed(there[:place]) if re.match(r"\d\d% ", line))
            assert row.method.endswith(f", {head[:3]} noise"), row
    assert len(published_rows(table=table, paper="PCME++")) == FIGURES[table][0]


def test_columns_stand_under_their_heads(lines):
    heads = "mAP@R R-P R@1 R@1 1K R@1 5K R@1"
    for table in FIGURES:
        columns = list(published_rows(table=table, paper="PCME++")[0].figures)
        if table in ("C.8", "C.9"):
            assert any("R@5 R@10 1K R@5 1K R@10 5K R@5 5K R@10" in line for line in part(lines, table))
            names = [f"{t} recall@{k}" for t in ("cxc", "coco_1k", "coco_5k") for k in (5, 10)]
        else:
            rsum = "" if table in ("C.10", "C.11") else " RSUM"
            assert any(line.endswith(heads + rsum) for line in part(lines, table))
            names = ["eccv map@r", "eccv r_precision", "eccv recall@1", "cxc recall@1", "coco_1k recall@1",
                     "coco_5k recall@1", *(["rsum"] if rsum else [])]  # fmt: skip
        assert columns == names, table


def by_method(table):
    return {(row.backbone, row.method): row.figures for row in published_rows(table=table, paper="PCME++")}


R1 = [f"{t} recall@1" for t in ("eccv", "cxc", "coco_1k", "coco_5k")]
THE_PAPERS_OWN = {  # table 1 is not the mean of C.10 and C.11, by up to 1.15 points
    ("ViT-B/32", "VSE∞"): [*R1, "rsum"],
    ("ViT-B/32", "P2RM"): R1,
    ("ViT-B/32", "PCME++ (μ only)"): R1[1:],
    ("ViT-L/14", "PCME++"): [R1[0], R1[1], R1[3]],
}


def test_table_1_is_the_mean_of_the_directions_and_rsum_the_sum_but_where_the_paper_disagrees_with_itself():
    """Five tables, as far as rounding goes: a figure in a wrong place would stand out."""
    both, first, others = by_method("1"), (by_method("C.10"), by_method("C.11")), (by_method("C.8"), by_method("C.9"))
    assert len(both) == 23 and len(set(both) & set(first[0]) & set(first[1])) == 20
    disagree: dict[tuple[str, str], list[str]] = {}
    for key in set(both) & set(first[0]):
        for name, value in first[0][key].items():
            if both[key][name] != pytest.approx((value + first[1][key][name]) / 2, abs=0.1001):
                disagree.setdefault(key, []).append(name)
        if key in others[1]:
            total = sum(side[key]["coco_1k recall@1"] for side in first)
            total += sum(side[key][f"coco_1k recall@{k}"] for side in others for k in (5, 10))
            if both[key]["rsum"] != pytest.approx(total, abs=0.3001):
                disagree.setdefault(key, []).append("rsum")
    assert disagree == THE_PAPERS_OWN


def test_rows_are_chosen_and_what_is_missing_is_told():
    assert {r.direction for r in published_rows(direction="t2i")} == {"t2i"}
    assert len(published_rows()) == sum(n for n, _ in FIGURES.values()) + sum(len(hand) for hand in BY_HAND.values())
    fractions = [
        (n, v) for r in published_rows() for n, v in r.figures.items() if not n.endswith(("rsum", "log_sigma"))
    ]
    assert all(0 <= v <= 100 for _, v in fractions)
    assert published_rows(table="PCME E.1") == published_rows(paper="PCME", table="E.1") == published_rows(table="E.1")
    assert {row.paper for row in published_rows(table="1")} == {"PCME", "PCME++", "PVSE++"}
    with pytest.raises(ValueError, match=r"no figures for table 'C.12'; known: 1, 2, 3, 4, 5, C.1"):
        published_rows(table="C.12")
    with pytest.raises(ValueError, match="no figures for table 'PCME C.3'; known: PCME.. 1, PCME.. 2"):
        published_rows(table="PCME C.3")
    with pytest.raises(
        ValueError, match="no figures for benchmark 'cxc'; known: coco, imagenet, cub, flickr30k, visual_genome"
    ):
        published_rows("cxc")
    with pytest.raises(ValueError, match="no figures for direction 'i2t'; known: both"):
        published_rows(table="PCME++ 1", direction="i2t")


# Of each other table: the whole figures of every row as they were read from the paper by hand, first and last at least.
BY_HAND = {
    "PCME++ 3": [None] * 5 + ["40.1 49.7 83.1 56.8 75.4 55.1 537.0"],
    "PCME++ 5": ["31.85", "35.50", "30.43", "34.22", "34.22", "41.82"],
    "PCME++ C.1": ["37.4 47.5 76.7 45.8 67.0 43.8 511.1"] + [None] * 10 + ["42.1 50.8 88.8 65.9 81.8 64.3 554.7"],
    "PCME++ C.2": ["37.9 47.8 79.0 71.9 50.9 526.0"] + [None] * 4 + ["34.4 44.6 75.0 65.7 44.0 503.9"],
    "PCME++ C.3": ["40.2 49.8 83.1 56.5 75.1 54.8 536.0"] + [None] * 3 + ["40.2 49.9 82.5 54.5 73.7 52.6 531.9"],
    "PCME++ C.4": ["37.3 47.3 79.6 51.9 71.7 50.0 525.5"] + [None] * 5 + ["40.1 49.7 82.9 56.5 75.0 54.7 535.9"],
    "PCME++ C.5": [None] * 4 + ["40.1 49.7 83.1 56.8 75.4 55.1 537.0 7.1 0.94"] + [None] * 3,
    "PCME++ C.6": [None] * 2 + ["40.0 49.6 83.3 57.0 75.5 55.3 537.1"],
    "PCME++ v1 6": ["13.05", "13.41", "8.58", "9.33", "9.37", "14.75"],
    "PCME 1": ["24.70 25.64"] + [None] * 5 + ["26.28 26.77"],
    "PCME 2": ["22.4 44.2 22.6 32.7"] + [None] * 4 + ["26.3 46.9 26.8 35.2"],
    "PCME 3": ["40.3 41.8 29.3 30.1"] + [None] * 4 + ["45.0 46.0 34.1 34.4"],
    "PCME D.1": ["10.56 13.32 -13.01 -8.77", None, None, "10.65 13.84 -3.63 -3.64"],
    "PCME D.2": ["24.7 25.6", "25.7 26.0", "26.3 26.8"],
    "PCME D.3": ["25.60 25.85", "24.65 25.15", "25.01 25.52", "26.28 26.77", "23.81 24.58"],
    "PCME E.1": ["24.70 25.64"] + [None] * 7 + ["26.28 26.77"],
    "PCME E.2": ["22.35 44.19 22.57 32.71"] + [None] * 7 + ["26.28 46.92 26.77 35.22"],
    "PCME E.3": ["19.85 40.88 18.72 25.51"] + [None] * 7 + ["20.87 43.10 20.37 26.47"],
    "PCME E.4": ["64.6 90.0 95.7 52.0 84.3 92.0"] + [None] * 8 + ["45.1 68.8 91.6 96.7 46.0 54.6 86.3 93.8"],
    "PCME E.5": ["41.3 71.1 81.2 30.3 59.4 72.4"] + [None] * 8 + ["34.1 44.2 73.8 83.6 34.4 31.9 62.1 74.5"],
    "PVSE++ 1": [None] * 2
    + ["41.1 59.3 86.8 93.8 41.7 45.6 79.2 89.1 31.3 34.7 64.6 76.6 31.2 24.5 52.4 65.6"]
    + [None] * 4
    + ["45.8 73.8 94.4 97.9 46.7 61.3 89.2 95.2 34.2 51.1 80.1 89.4 34.5 38.8 69.1 80.2"]
    + [None] * 2,
    "PVSE++ 2": [None] * 5
    + ["50.5 74.5 94.9 98.2 55.2 62.3 89.7 95.4 34.5 53.1 82.6 91.1 37.7 40.9 71.5 82.4"]
    + [None] * 2,
    "PVSE++ 3": [None] * 2 + ["48.8 74.5 83.1 33.3 62.4 72.9"] + [None] * 4 + ["69.2 89.4 94.1 52.3 79.3 86.5"],
    "PVSE++ 4": ["59.7 66.0 74.8 54.0", "58.6 69.5 71.7 58.9"],
    "PVSE++ 5": ["57.2 86.5 94.0 43.9 78.1 88.9 448.6"] + [None] * 25 + ["77.3 97.1 98.7 63.7 91.2 96.0 524.0"],
    "PVSE++ 6": ["52.6 85.5 93.0 43.1 76.6 87.5 438.3", None, None, "75.5 96.7 98.8 62.4 90.7 96.3 520.4"],
    "PVSE++ 7": ["447.74 310.06 363.42", "452.70 317.02 372.48"],
    "PVSE++ 8": ["507.68 401.66 466.48", "510.76 405.02 468.96"],
}
PAPERS = {"PCME++ v1": "002_*.txt", "PCME++": "000_*.txt", "PVSE++": "001_*.txt", "PCME": "004_*.txt"}
TWO_DECIMALS = (
    "PCME++ 5",
    "PCME++ v1 6",
    "PCME 1",
    "PCME D.1",
    "PCME D.3",
    "PCME E.1",
    "PCME E.2",
    "PCME E.3",
    "PVSE++ 7",
    "PVSE++ 8",
)


def as_printed(row):
    if row.full_table == "PCME++ C.5":
        *first, rho = row.figures.values()
        return [f"{v:.1f}" if v > 1e-3 else "2e-4" for v in first] + [f"{rho:.2f}".removesuffix("0")]
    return [f"{v:.{2 if row.full_table in TWO_DECIMALS else 1}f}" for v in row.figures.values()]


@pytest.mark.parametrize("table", BY_HAND)
def test_rows_and_digits_of_the_other_tables_by_hand(table):
    found = [" ".join(as_printed(row)) for row in published_rows(table=table)]
    assert len(found) == len(BY_HAND[table])
    for figures, hand in zip(found, BY_HAND[table], strict=True):
        assert hand in (None, figures)


@pytest.mark.parametrize("table", BY_HAND)
def test_every_row_of_the_other_tables_stands_in_its_paper_in_order(table, shared):
    """As a run of digits, because the texts lose the borders of cells, and marks of the rows."""
    rows = published_rows(table=table)
    first = next(name for name in PAPERS if table.startswith(f"{name} "))
    (paper,) = (shared / "papers").glob(PAPERS[first])
    text = paper.read_text(encoding="utf-8")
    digits = re.sub(r"\\(underline|mathbf)\{[\d. ]+\}|[\s*-]", "", text)
    place = 0
    for row in rows:
        printed = as_printed(row)
        if table in ("PVSE++ 7", "PVSE++ 8"):
            assert all(digits.count(figure + "±") for figure in printed), row
            continue
        if row.method == "beta x 0":
            printed = printed[:7]  # Its total variance is a formula.
        place = digits.find("".join(printed).replace("-", ""), place)
        assert place >= 0, row
