"""Write what is said of the papers' rows elsewhere: README's list, the verdicts on tables, the headers of recipes.

    python -m papers.pages

Their numbers come from papers/tables. Only the parts between the marks are replaced.
"""

import posixpath
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from papers.tables.items import PaperItem, paper_items
from papers.tables.rows import PAPERS, STATES, Row, paper_rows

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "papers" / "README.md"
VERDICTS = [ROOT / "papers" / "docs" / name for name in ("tables.md", "items.md")]
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


def listed() -> str:
    """The rows of the papers in Markdown: of each paper those of a state together."""
    lines: list[str] = []
    for paper, name in PAPERS.items():
        rows = [row for row in paper_rows() if row.paper == paper]
        lines += [f"### {name}", ""]
        for state in STATES:
            if own := [row for row in rows if row.state == state]:
                lines += [f"**{state}** ({len(own)})", "", *map(_bullet, own), ""]
    return "\n".join(lines)


def _bullet(row: Row) -> str:
    number = row.id.removeprefix(f"{row.paper} ")
    number = f"Table {number}" if re.fullmatch(r"(\w\.|v1 )?\d+", number) else number
    page = f" ([page]({posixpath.normpath(f'docs/{row.results}')}))" if row.figure else ""
    title = "" if row.title == number else f": {row.title.split('; ')[0]}"
    return f"- {number}{title}" + "".join(f". {text}" for text in (row.figure, row.reason) if text) + page


def anchors(text: str) -> dict[str, str]:
    """The sections of a page by their anchors, each with those below it."""
    parts = re.split(r"^(#+) (.+)\n", text, flags=re.MULTILINE)[1:]
    found: dict[str, str] = {}
    for k in range(0, len(parts), 3):
        end = next((j for j in range(k + 3, len(parts), 3) if len(parts[j]) <= len(parts[k])), len(parts))
        anchor = re.sub(r"[^\w\s-]", "", parts[k + 1].lower()).replace(" ", "-")
        found[anchor] = "\n".join(parts[k + 1 : end])
    return found


def verdict(claim: str, section: str) -> str:
    """ "Confirmed" if what is claimed of the published columns of a section's table also holds in ours.

    A claim is "COLUMN: ROW > ROW ≈ ROW", several with "; " between.
    """
    holds = True
    for part in claim.split("; "):
        column, _, chain = part.partition(": ")
        rows = re.split(r" ([>≈]) ", chain)
        ours, published = _columns(section, column)
        for a, relation, b in zip(rows[::2], rows[1::2], rows[2::2], strict=False):
            if not _related(published[a], relation, published[b]):
                raise ValueError(f"the paper does not say {a} {relation} {b} in {column}")
            holds &= _related(ours[a], relation, ours[b])
    return "Confirmed" if holds else "Not confirmed"


def _columns(section: str, column: str) -> list[dict[str, list[float]]]:
    """Our figures and the published ones of a column by row, each with its deviation if it has one."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    k = next(line for line in lines if column in line).index(column)
    rows = {line[0]: line[k : k + 2] for line in lines if len(line) > k + 1 and re.search(r"\d", line[k])}
    texts = [{row: cells[side].replace("\N{MINUS SIGN}", "-") for row, cells in rows.items()} for side in (0, 1)]
    return [{row: [float(v) for v in re.findall(r"-?[\d.]+", text)] for row, text in side.items()} for side in texts]


def _related(a: list[float], relation: str, b: list[float]) -> bool:
    """Whether a value is ahead of another by more than both deviations, or within them and one per cent."""
    noise = sum(a[1:2] + b[1:2])
    if relation == ">":
        return a[0] - b[0] > noise
    return abs(a[0] - b[0]) <= max(noise, 0.01 * max(abs(a[0]), abs(b[0])))


def with_verdicts(text: str) -> str:
    """A page with the verdict before each claim, `**Confirmed** \\`COLUMN: ROW > ROW\\``."""

    def judged(section: str) -> str:
        return re.sub(
            r"\*\*(?:Not confirmed|Confirmed)\*\* `([^`]+)`",
            lambda found: f"**{verdict(found[1], section)}** `{found[1]}`",
            section,
        )

    return "".join(map(judged, re.split(r"^(?=## )", text, flags=re.MULTILINE)))


def written() -> Iterable[tuple[Path, str]]:
    """Each file with what it has to hold."""
    page = PAGE.read_text(encoding="utf-8")
    yield PAGE, re.sub(r"(<!-- rows -->).*?(<!-- end -->)", rf"\1\n\n{listed()}\n\2", page, flags=re.DOTALL)
    for path in VERDICTS:
        yield path, with_verdicts(path.read_text(encoding="utf-8"))
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
