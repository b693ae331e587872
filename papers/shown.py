"""Values with their intervals as texts, and tables as Markdown and as files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.files import write_atomically, write_json
from sfumato.reports.tables import Table, is_number, number


@dataclass(frozen=True)
class Shown:
    """A value with its interval, as text."""

    value: str  # the value
    interval: str = ""  # "low to high"; empty if there is none

    def __str__(self) -> str:
        return f"{self.value} ({self.interval})" if self.interval else self.value


def interval(found: Mapping[str, Any], show: Callable[[Any], str] = number) -> Shown:
    """A value with its confidence interval, as text."""
    value, low, high = (found[key] for key in ("value", "low", "high"))
    return Shown(show(value), f"{show(low)} to {show(high)}" if all(map(is_number, (value, low, high))) else "")


def markdown(table: Table) -> str:
    """The rows in Markdown, without title and notes."""
    rule = ["---", *["---:"] * (len(table.headings) - 1)]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (table.headings, rule, *table.rows)]
    return "\n".join(f"| {line} |" for line in lines).replace("|  |", "| |")


def write_files(table: Table, folder: Path, values: Mapping[str, Any], tex: str) -> list[Path]:
    """Write table.json, table.md and table.tex; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", values)
    write_atomically(folder / "table.md", "\n".join([table.title, "", markdown(table), "", *table.notes, ""]))
    write_atomically(folder / "table.tex", tex)
    return [folder / f"table.{ending}" for ending in ("json", "md", "tex")]
