"""The rows of the papers: all are listed, and a state is what the data, the pages and the tests say."""

import re
import shlex
from pathlib import Path

import pytest

from papers.pages import VERDICTS, anchors, with_verdicts
from papers.studies.toy import PUBLISHED_RATIO
from papers.tables.items import data_sets, find_item, paper_items
from papers.tables.rows import STATES, paper_rows
from sfumato.models.recipe import find_recipe, load_recipe

ROOT = Path(__file__).resolve().parents[3]
ROWS, ITEMS = paper_rows(), paper_items()

LOSSES = {
    **dict.fromkeys(("VSE∞", "VSE++", "VSE0", "VSRN"), "triplet"), "DAA": "daa", "InfoNCE": "infonce", "PVSE": "pvse",
    "PCME++": "pcmepp", "Match probability by PCME": "pcme", "PCME": "pcme",
}  # fmt: skip
"""The loss of each method; the first name that a row begins with decides."""


def test_every_row_of_the_specification_is_listed_once(shared, papers):
    text = (shared / "spec" / "rows.md").read_text(encoding="utf-8")
    wanted = set(re.findall(r"^\| ([A-D]\d+) ", text, re.MULTILINE))
    assert len(wanted) == 126 and {row.row for row in ROWS} == wanted
    listed = papers.json("list")
    assert papers.json("table") == listed
    assert len({row["id"] for row in listed}) == len(listed) == len(ROWS)
    for row in listed:
        assert {"id", "paper", "title", "state", "command", "needs", "figure", "reason"} <= row.keys()
        assert row["state"] in STATES and (row["figure"] is not None) == (row["state"] == "works"), row["id"]
    shown = papers("list")[1]
    assert all(f" {state}: {meaning[:9]}" in " ".join(shown.split()) for state, meaning in STATES.items())
    for item in ITEMS.values():
        assert find_item(item.id.replace("Fig.", "figure").lower()).id == item.id


def test_a_state_has_its_evidence():
    """A page whose section names the row and holds its figures, a test that exists, or a reason in one line."""
    for row in ROWS:
        if row.state == "works":
            page, _, anchor = row.results.partition("#")
            text = (ROOT / "papers" / "docs" / page).read_text(encoding="utf-8")
            section = anchors(text)[anchor] if anchor else text
            for value in re.findall(r"(?<![\w.])[−+]?\d*\.\d+", row.headline[1]):
                assert value.lstrip("−+") in section, (row.id, value)
            assert row.id in section or row.id not in ITEMS, f"{row.results} does not name it"
            assert not row.ran or data_sets()[row.ran].title.split()[-2:][0] in text, row.id
        elif row.state != "ready":
            assert row.reason and "\n" not in row.reason, row.id
        assert row.state in ("missing", "published only") or row.command, row.id
        if row.test:
            file, _, name = row.test.partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), row.test


@pytest.mark.parametrize("item", [item for item in ITEMS.values() if item.runs], ids=lambda item: item.id)
def test_a_row_is_run_by_its_own_method_on_all_data(item):
    """VSE∞ pools by GPO and mines the hardest negatives; a figure about PCME's sigma is drawn of PCME."""
    for data in item.data_sets:
        for label, run in ((label, item.run_of(label, data)) for label in item.labels):
            if not run:
                continue
            recipe, *overrides = shlex.split(run)
            loaded = load_recipe(find_recipe(recipe), overrides)
            name = next((name for name in LOSSES if item.name_on(label, "").startswith(name)), "")
            assert not name or loaded.loss.name == LOSSES[name], (label, run)
            if name == "VSE∞":
                assert (loaded.loss.mining, loaded.model.pooling) == ("hardest", "gpo"), (label, run)
            if item.paper == "PCME" and "uncertainty" in item.options:
                assert loaded.loss.name == "pcme" and item.options["uncertainty"] != "total_variance", (label, run)


def test_a_verdict_is_computed_from_both_columns():
    """Beyond both deviations in ours; a claim that the paper does not make is refused."""
    page = "## T\n\n| row | RSUM | published |\n| --- | ---: | ---: |\n"
    page += "| a | 5.0 ± 0.4 | 20.0 |\n| b, c | 4.5 ± 0.2 | 10 |\n| d | −1.0 ± 0 | 10.05 |\n\n"
    for claim, word in (("a > d", ""), ("a > b, c", "Not "), ("b, c ≈ d", "Not "), ("a > d; RSUM: b, c ≈ d", "Not ")):
        found = with_verdicts(f"{page}- **Confirmed** `RSUM: {claim}`.")
        assert found == f"{page}- **{word}Confirmed** `RSUM: {claim}`.".replace("Not C", "Not c")
    with pytest.raises(ValueError, match="the paper does not say b, c > d in RSUM"):
        with_verdicts(f"{page}- **Confirmed** `RSUM: b, c > d`.")
    text = "".join(path.read_text(encoding="utf-8") for path in VERDICTS)
    assert not re.search(r"\*\*(Confirmed|Not confirmed|As published)\*\*(?! `)", text), "a verdict without its claim"


def test_a_published_figure_beside_ours_is_of_the_same_method():
    """Each stands in a row of that method in the published table that its section names; so do those of the list."""
    checked, wrong = 0, []
    for path in sorted((ROOT / "papers" / "docs").glob("*.md")):
        for section in re.split(r"^#+ (?=[A-Z])", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            items = [i for i in ITEMS.values() if i.rows and re.search(rf"(?<!\w){re.escape(i.id)}(?!\w)", section)]
            columns, method = [], ""
            for line in re.findall(r"^\|(.*)\|$", section, re.MULTILINE):
                cells = [cell.strip() for cell in line.split("|")]
                if "published" in line:
                    columns = [k for k, cell in enumerate(cells) if cell.startswith("published")]
                method = cells[0] or method
                for value in [cells[k].replace("−", "-") for k in columns if re.search(r"\d", cells[k])]:
                    checked += 1
                    rows = [(f"match loss with {name}", {"": ratio}) for name, ratio in PUBLISHED_RATIO.items()]
                    rows += [(i.name_on(label, ""), figures) for i in items for label, figures in i.rows.items()]
                    same = [f for n, f in rows if n == method] or [f for n, f in rows if _is(n, method)]
                    if not any(float(value) in figures.values() for figures in same):
                        wrong.append((path.name, method, value))
    assert checked > 150 and wrong == []
    for row in ROWS:
        if row.id in ITEMS and ITEMS[row.id].rows and row.headline:
            printed = {value for figures in ITEMS[row.id].rows.values() for value in figures.values()}
            assert {float(v) for v in re.findall(r"-?\d+\.\d+", row.headline[2].replace("−", "-"))} <= printed, row.id


def _is(published: str, ours: str) -> bool:
    """Whether a published row, `PCME++ (ours), 20% noise`, has the method of ours, `PCME++` or `NCR, one network`."""
    return re.split(r"[†,]| \(", published)[0] == ours.split(", ")[0]
