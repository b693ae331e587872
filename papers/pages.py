"""Write what is said of the papers' tables elsewhere: papers/docs/papers.md and the headers of the recipes.

    python -m papers.pages

Both come from papers/tables, so that they cannot disagree. Only the parts between the marks are replaced.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from papers.tables.items import PaperItem, paper_items

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "papers" / "docs" / "papers.md"
RECIPES = ROOT / "recipes"

HEAD = "# Rows of the papers' tables, by papers/pages.py. `python -m papers table ID --published` has the headings:"
FOOT = "# End of the rows."


def figures(item: PaperItem, label: str) -> str:
    """The published figures of a row in the order of the columns, as they are printed."""
    row = item.rows.get(label, {})
    digits = 2 if any(round(value, 1) != value for row in item.rows.values() for value in row.values()) else 1
    return " ".join(
        "-" if name not in row else f"{row[name]:g}" if 0 < abs(row[name]) < 0.01 else f"{row[name]:.{digits}f}"
        for name in item.columns
    )


def header(recipe: str) -> list[str]:
    """The generated part of a recipe's header; empty if no table has the recipe."""
    lines: list[str] = []
    for item in paper_items().values():
        rows = [(label, run.split(" ", 1)) for label, run in item.runs.items() if run.split()[0] == recipe]
        if not rows:
            continue
        lines += wrapped(f"{item.id}, {item.about}.")
        for variant in item.variants:
            lines += ["# Each with:", f"#   {variant}"]
        for label, words in rows:
            published = figures(item, label)
            alone = "" if len(words) > 1 else ", as it is"
            lines += wrapped(f"{label}{alone}" + (f": {published}" if published else ""))
            lines += [f"#   {change}" for change in words[1:]]
    return [HEAD, *lines, FOOT] if lines else []


def wrapped(text: str) -> list[str]:
    """Comment lines."""
    return textwrap.wrap(
        text, 120, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


def with_header(recipe: str, text: str) -> str:
    """A recipe's text with its generated part, which stands above `name =`."""
    text = re.sub(rf"^{re.escape(HEAD)}\n(#.*\n)*?{re.escape(FOOT)}\n", "", text, flags=re.MULTILINE)
    made = "".join(f"{line}\n" for line in header(recipe))
    return re.sub(r"^name = ", lambda found: f"{made}{found[0]}", text, count=1, flags=re.MULTILINE)


def page_part(paper: str) -> str:
    """The table of a paper's tables and figures in Markdown."""
    lines = ["| item | what it shows | command | state |", "| --- | --- | --- | --- |"]
    for item in paper_items().values():
        if item.paper == paper:
            about, own = item.about.replace("|", "\\|"), item.to_json()["command"]
            command = f"`{own}`" if own else "–"
            lines.append(f"| {title(item)} | {about} | {command} | {state(item)} |")
    notes = [f"{title(item)}: {item.note}" for item in paper_items().values() if item.paper == paper and item.note]
    if notes:
        lines += ["", *textwrap.wrap(" ".join(notes), 120, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines)


def title(item: PaperItem) -> str:
    """Of a table or figure in its paper."""
    return item.number if item.number.startswith("Fig.") else f"Table {item.number}"


def state(item: PaperItem) -> str:
    """Whether it was run, with a link."""
    if item.results:
        return f"[run]({item.results})"
    able = [name for name in item.data_sets if name != item.benchmark]
    return "; ".join([item.state, *([", ".join(f"`{name}`" for name in able)] if able else [])])


def with_parts(text: str) -> str:
    """The page with the generated part of each paper."""

    def part(found: re.Match[str]) -> str:
        return f"<!-- made from papers/tables: {found[1]} -->\n\n{page_part(found[1])}\n\n<!-- end -->"

    return re.sub(r"<!-- made from papers/tables: (.+?) -->.*?<!-- end -->", part, text, flags=re.DOTALL)


def written() -> Iterable[tuple[Path, str]]:
    """Each file with what it has to hold."""
    yield PAGE, with_parts(PAGE.read_text(encoding="utf-8"))
    for path in sorted(RECIPES.glob("*.toml")):
        yield path, with_header(path.stem, path.read_text(encoding="utf-8"))


def main() -> None:
    """Write the files that differ."""
    for path, text in written():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
