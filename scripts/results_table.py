"""Write docs/results/results.csv: every number in the tables of the pages of results, a row each.

    python scripts/results_table.py

Columns: page, section, row (first cell), column (header), value, deviation (after ±), unit or words beside it, and the
date, commit and seeds that the section states, or else what stands above the first one. On the page of speed they are
those of its table of runs. A cell with several numbers gives several rows; 1/205 is one number.
"""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
TABLE = RESULTS / "results.csv"
COLUMNS = ("page", "section", "row", "column", "value", "deviation", "beside", "date", "commit", "seeds")

_NUMBER = re.compile(
    r"(?<![\w.])([-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e-?\d+)?)(?:\s*±\s*([\d.]+))?"
    r"(?![\w.]*\d)"
)
_FRACTION = re.compile(r"(?<![\w.])1/(\d+)(?![\w.])")
_STATED = {
    "date": re.compile(r"\b(20\d\d-\d\d-\d\d)\b"),
    "commit": re.compile(r"commits? ([0-9a-f]{7,8})\b"),
    "seeds": re.compile(r"seeds? (\d(?:, \d)*(?: and \d)?)"),
}


def rows() -> Iterator[dict[str, str]]:
    """The rows, in the order of the pages."""
    for path in sorted(RESULTS.glob("*.md")):
        if path.name != "index.md":
            yield from _of_page(path.stem, path.read_text("utf-8").splitlines())


def _of_page(page: str, lines: list[str]) -> Iterator[dict[str, str]]:
    section, header, stated = "", list[str](), dict[str, str]()
    of_page: dict[str, str] | None = None
    runs = _runs(lines) if page == "speed" else {}
    for line in lines:
        if line.startswith("#"):
            section, header = line.lstrip("# "), []
            if line.startswith("## "):
                stated = of_page = stated if of_page is None else of_page
        elif not line.startswith("|"):
            header = []
            if line.startswith(("*20", "**Answer")):
                stated = {name: "".join(found.findall(line)[:1]) for name, found in _STATED.items()}
        elif not header:
            header = _cells(line)
        elif not set(line) <= set("|-: "):
            first, *cells = _cells(line)
            origin = runs.get(section) or runs.get(first) or stated
            about = {"page": page, "section": section, "row": first} | origin
            for column, cell in zip(header[1:], cells, strict=False):
                cell = _FRACTION.sub(lambda found: f"{1 / int(found[1]):.3g}", cell)
                for number in _NUMBER.finditer(cell):
                    if number[1]:
                        value = {"value": number[1].replace(",", "").replace("−", "-"), "deviation": number[2] or ""}
                        yield about | {"column": column, **value, "beside": cell.replace(number[0], "", 1).strip()}


def _runs(lines: list[str]) -> dict[str, dict[str, str]]:
    """Dates and commits of the sections, with † and without, by the table of runs, whose rows are in their order."""
    titles = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    rows = [_cells(line) for line in lines[lines.index("## Runs") :] if line.startswith("|")][2:]
    runs = [(title, {"date": row[2], "commit": row[1]}) for title, row in zip(titles, rows, strict=True)]
    return {name: run for title, run in runs for name in (title, title.removesuffix(" †"))}


def _cells(line: str) -> list[str]:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).replace("**", "").replace("`", "")
    return [cell.strip() for cell in plain.strip().removeprefix("|").removesuffix("|").split("|")]


def table() -> str:
    """The file."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows())
    return file.getvalue()


if __name__ == "__main__":
    TABLE.write_text(table(), "utf-8")
