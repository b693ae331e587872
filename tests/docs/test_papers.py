"""The page of the papers and the recipes' headers are what recipes/tables make of them, and name what exists."""

import re
from pathlib import Path

import papers

from sfumato.evaluation.papers import paper_items

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts" / "papers.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", PAGE)


def test_every_option_is_one_of_its_command(sfumato):
    for code in CODE:
        if code.startswith("sfumato ") and "--" in code:
            words = code.split()
            command = words[1:3] if words[1] == "evaluate" else words[1:2]
            known = sfumato(*command, "--help")[1]
            assert all(option in known for option in words if option.startswith("--")), code


def test_the_page_and_the_headers_are_those_of_the_tables():
    """`python scripts/papers.py` writes them again."""
    assert not [path.name for path, text in papers.written() if path.read_text(encoding="utf-8") != text]


def test_the_page_has_every_item_and_links_to_results_that_exist():
    commands = [item.to_json()["command"] for item in paper_items().values()]
    assert all(f"`{command}`" in PAGE for command in commands if command)
    for page, anchor in re.findall(r"\]\(\.\./results/([\w-]+\.md)(?:#([\w-]+))?\)", PAGE):
        text = (ROOT / "docs" / "results" / page).read_text(encoding="utf-8")
        headings = [re.sub(r"[^\w\s-]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)]
        assert not anchor or anchor in headings, f"{page}#{anchor}"
