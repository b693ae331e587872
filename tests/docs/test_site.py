"""Every result of the site states its origin and stands once, and nothing is fetched from elsewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
RESULTS = [page for page in PAGES if page.startswith("results/") and not page.endswith("index.md")]
GUIDES = [page for page in PAGES if page.startswith("guides/") and not page.endswith("index.md")]
FIGURE = re.compile(r"(?<![\d.])\d{3}\.\d ± \d+\.\d")
read = lambda page: (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_pages_and_readme_answer_their_question_once_and_fetch_nothing():
    assert re.search(r"^  font: false", CONFIG, flags=re.MULTILINE)
    assert "http" not in re.sub(r"#.*", "", CONFIG)
    wanted = (r"^\*\*Answer\.\*\* ", "```bash", r"\b[0-9a-f]{7}\b", r"\b20\d\d-\d\d-\d\d\b")
    for page in RESULTS:
        text = read(page)
        title = text.splitlines()[0].removeprefix("# ")
        assert title.endswith("?") and f"| [{title}]({Path(page).name}) |" in read("results/index.md"), page
        assert not [one for one in wanted if not re.search(one, text, flags=re.MULTILINE)], page
    pages = {page: read(page) for page in PAGES if not page.startswith("project/")}
    found = [(figure, page) for page, text in pages.items() for figure in set(FIGURE.findall(text))]
    places = {figure: [page for one, page in found if one == figure] for figure, _ in found}
    assert {figure: where for figure, where in places.items() if len(where) > 1} == {}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Results")[2].partition("\n## ")[0]
    parts = [line for line in section.splitlines() if "](" in line and line.startswith("|")]
    parts.append(section.partition("Variances do not")[2])
    assert len(parts) > 5
    for part in parts:
        [page] = re.findall(r"\]\(((?:docs/results|papers/docs)/[\w-]+\.md)\)", part)
        shown, text = re.findall(r"(?<![\w.])\d*\.\d+(?: ± \d*\.\d+)?", part), read(f"../{page}")
        assert shown and [one for one in shown if not re.search(rf"(?<![\d.]){re.escape(one)}(?!\d)", text)] == []


def test_lines_are_wrapped_and_guides_state_when_not_to_use_a_thing():
    assert not [page for page in GUIDES if not re.search(r"^## When not to", read(page), flags=re.MULTILINE)]
    free = ("|", "    ", "![")
    unfenced = {page: "".join(read(page).split("\n```")[::2]) for page in PAGES}
    lines = [(page, line) for page, text in unfenced.items() for line in text.splitlines()]
    assert not [(page, line) for page, line in lines if len(line) > 120 and not line.startswith(free)]
