"""The documents of papers: every page is listed, links and named tests exist, and results state their origin."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "papers" / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
README = (ROOT / "papers" / "README.md").read_text(encoding="utf-8")


def test_the_readme_lists_every_page_and_links_lead_somewhere():
    assert [name for name in PAGES if f"](docs/{name})" not in README] == []
    missing = []
    for folder, text in [(DOCS, text) for text in PAGES.values()] + [(DOCS.parent, README)]:
        for file, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)", text):
            page = text if not file else (folder / file).read_text("utf-8") if file.endswith(".md") else ""
            headings = re.findall(r"^#+ (.+)$", page, re.M)
            anchors = [re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings]
            if not (folder / file).exists() or (anchor and anchor not in anchors):
                missing.append(f"{file}#{anchor}")
    assert not missing


def test_a_page_that_answers_a_question_states_commands_commits_and_dates():
    wanted = (r"^\*\*Answer\.\*\* ", r"```bash", r"\b[0-9a-f]{7}\b", r"\b20\d\d-\d\d-\d\d\b")
    results = {name: text for name, text in PAGES.items() if text.splitlines()[0].endswith("?")}
    assert len(results) > 5
    for name, text in results.items():
        assert not [one for one in wanted if not re.search(one, text, flags=re.MULTILINE)], name


def test_tests_that_the_differences_name_exist():
    named = re.findall(r"`([\w/]*test_\w+\.py)::(\w+)`", PAGES["differences.md"])
    assert len(named) > 30
    places = (ROOT / "tests", ROOT / "papers" / "tests", ROOT)
    texts = {file: "".join((p / file).read_text("utf-8") for p in places if (p / file).exists()) for file, _ in named}
    assert not [f"{file}::{name}" for file, name in named if not re.search(rf"^def {name}\(", texts[file], re.M)]


def test_lines_are_wrapped():
    unfenced = {name: "".join(text.split("\n```")[::2]) for name, text in PAGES.items()}
    lines = [(name, line) for name, text in unfenced.items() for line in text.splitlines()]
    assert not [(name, line) for name, line in lines if len(line) > 120 and not line.startswith(("|", "    ", "!["))]
