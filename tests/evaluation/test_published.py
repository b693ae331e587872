"""PretrainedModel figures are those of the papers: each row stands there, and tables that tell the same agree."""

import re

import pytest

from sfumato.evaluation.compare import published_rows

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
    for row in published_rows(table=table):
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
    assert len(published_rows(table=table)) == FIGURES[table][0]


def test_columns_stand_under_their_heads(lines):
    heads = "mAP@R R-P R@1 R@1 1K R@1 5K R@1"
    for table in FIGURES:
        columns = list(published_rows(table=table)[0].figures)
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
    return {(row.backbone, row.method): row.figures for row in published_rows(table=table)}


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
    assert len(published_rows()) == len(published_rows("coco")) == sum(n for n, _ in FIGURES.values())
    assert all(0 <= v <= 100 for r in published_rows() for name, v in r.figures.items() if name != "rsum")
    with pytest.raises(ValueError, match=r"no figures for table 'C.6'; known: 1, 2, 4, C.7"):
        published_rows(table="C.6")
    with pytest.raises(ValueError, match="no figures for benchmark 'cub'; known: coco"):
        published_rows("cub")
    with pytest.raises(ValueError, match="no figures for direction 'i2t'; known: both"):
        published_rows(table="1", direction="i2t")
