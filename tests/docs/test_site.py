"""The site lists every page, every experiment states its origin, and nothing is fetched from elsewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
EXPERIMENTS = [page for page in PAGES if page.startswith("experiments/") and not page.endswith("index.md")]
GUIDES = [page for page in PAGES if page.startswith("guides/") and not page.endswith("index.md")]


def read(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_navigation_lists_every_page_once():
    listed = re.findall(r"^\s+- (?:[\w ,]+: )?([\w/-]+\.md)$", CONFIG, flags=re.MULTILINE)
    assert sorted(listed) == PAGES


def test_the_theme_fetches_no_fonts():
    assert re.search(r"^  font: false", CONFIG, flags=re.MULTILINE)
    assert "http" not in re.sub(r"#.*", "", CONFIG)


@pytest.mark.parametrize("page", EXPERIMENTS)
def test_an_experiment_states_date_commit_machine_and_result_and_stands_in_the_index(page):
    lines = [line for line in read(page).splitlines() if line]
    assert lines[0].startswith("# ") and lines[1] == "| date | commit | machine |"
    date, commit, machine = (cell.strip() for cell in lines[3].strip("|").split("|"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date) and commit and machine
    assert any(line.startswith("**Result.** ") for line in lines[4:7])
    title, index = lines[0][2:], read("experiments/index.md")
    assert f"| [{title}]({Path(page).name}) | {date.replace('-', '‑')} |" in index


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_states_when_not_to_use_a_thing(page):
    assert re.search(r"^## When not to", read(page), flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_wrapped(page):
    fenced, long = False, []
    for line in read(page).splitlines():
        fenced ^= line.startswith("```")
        if not fenced and len(line) > 120 and not line.startswith(("|", "    ", "![")):
            long.append(line)
    assert not long
