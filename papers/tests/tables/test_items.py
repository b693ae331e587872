"""Published figures are those of the papers: each row stands there, and tables that tell the same agree."""

import re

import pytest
from support.raising import raises

from papers.tables.items import common_figures, own_figures, published_rows

ROWS = {  # of each table
    "PCME++ 1": 23, "PCME++ 2": 14, "PCME++ 4": 7, "PCME++ C.7": 5, "PCME++ C.8": 20, "PCME++ C.9": 18,
    "PCME++ C.10": 20, "PCME++ C.11": 20, "PCME++ v1 3": 6, "PCME++ v1 4": 3,
    "PCME++ 3": 6, "PCME++ 5": 6, "PCME++ C.1": 12, "PCME++ C.2": 6, "PCME++ C.3": 5, "PCME++ C.4": 7, "PCME++ C.5": 8,
    "PCME++ C.6": 3, "PCME++ v1 6": 6, "PCME 1": 7, "PCME 2": 6, "PCME 3": 6, "PCME D.1": 4, "PCME D.2": 3,
    "PCME D.3": 5, "PCME E.1": 9, "PCME E.2": 9, "PCME E.3": 9, "PCME E.4": 10, "PCME E.5": 10, "PVSE++ 1": 10,
    "PVSE++ 2": 8, "PVSE++ 3": 8, "PVSE++ 4": 2, "PVSE++ 5": 27, "PVSE++ 6": 4, "PVSE++ 7": 2, "PVSE++ 8": 2,
}  # fmt: skip
PAPERS = {"PCME++ v1": "002_*.txt", "PCME++": "000_*.txt", "PVSE++": "001_*.txt", "PCME": "004_*.txt"}
TWO_DECIMALS = re.compile(r"PCME\+\+ (5|v1 6)|PVSE\+\+ [78]|PCME (1|D\.[13]|E\.[123])")


def as_printed(row):
    if row.item.id == "PCME++ C.5":
        *first, rho = row.figures.values()
        return [f"{v:.1f}" if v > 1e-3 else "2e-4" for v in first] + [f"{rho:.2f}".removesuffix("0")]
    if TWO_DECIMALS.fullmatch(row.item.id):
        return [f"{v:.2f}" for v in row.figures.values()]
    return [f"{v:.2f}" if round(v, 1) != v else f"{v:.1f}" for v in row.figures.values()]


@pytest.mark.parametrize("table", ROWS)
def test_every_row_stands_in_its_paper_in_order(table, shared):
    """As a run of digits, because the texts lose the borders of cells, and marks of the rows."""
    rows = published_rows(table)
    assert len(rows) == ROWS[table]
    first = next(name for name in PAPERS if table.startswith(f"{name} "))
    (paper,) = (shared / "papers").glob(PAPERS[first])
    text = re.sub(r"\s*\((±plus-or-minus\\pm±[\d.]+|\\cdot)\)", "", paper.read_text(encoding="utf-8"))
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


def by_method(table):
    return {(row.backbone, row.method): row.figures for row in published_rows(f"PCME++ {table}")}


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
    assert len(published_rows()) == sum(ROWS.values())
    figures = [figure for row in published_rows() for figure in row.figures.items()]
    assert all(0 <= value <= 100 for name, value in figures if not name.endswith(("rsum", "log_sigma")))
    assert published_rows("PCME E.1") == published_rows("E.1")
    assert {row.item.paper for row in published_rows("1")} == {"PCME", "PCME++", "PVSE++"}
    raises(ValueError, r"no figures for table 'C.12'; known: 1, 2, 3, 4, 5, C.1", published_rows, "C.12")
    raises(ValueError, "no figures for table 'PCME C.3'; known: PCME.. 1, PCME.. 2", published_rows, "PCME C.3")


def test_figures_in_the_form_of_the_published_ones_and_the_correlation_of_both_directions():
    figures = {
        "coco_1k": {"i2t": {"recall@1": 0.5}, "t2i": {"recall@1": 0.25}, "rsum": 5.0},
        "eccv": {"i2t": {"map@r": 0.1, "r_precision": 0.2}, "t2i": {"map@r": 0.3}},
        "mine": {"i2t": {"recall@1": 1.0}, "t2i": {"recall@1": 1.0}, "rsum": 6.0},
    }
    found = common_figures(figures)
    assert found == pytest.approx({"eccv map@r": 20.0, "coco_1k recall@1": 37.5, "rsum": 500.0})
    assert common_figures(figures, "t2i") == pytest.approx({"eccv map@r": 30.0, "coco_1k recall@1": 25.0})
    sides = {"i2t": {"correlation": -0.5}, "t2i": {"correlation": -0.9}}
    truths = {"pmrp_1k": {"i2t": {"r_precision": 0.25}, "t2i": {"r_precision": 0.5}}}
    found = own_figures(truths, {"coco_1k": sides}, {"image": 2.0, "text": 4.0})
    assert found["minus_rho"] == pytest.approx(0.7) and found["total_variance"] == 3
    assert found["i2t pmrp_1k r_precision"] == 25 and "minus_rho" not in own_figures(truths)
