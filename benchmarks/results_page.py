"""The tables of papers/docs/methods.md, from files of papers/benchmarks/methods.py.

    python benchmarks/results_page.py

The files are benchmarks/results/family-NAME.json; papers/benchmarks/methods.py writes them with --json.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

from performance_page import RESULTS, ROOT, table

PAGE = ROOT / "papers" / "docs" / "methods.md"

METHODS = {
    "infonce": "InfoNCE",
    "pcmepp": "PCME++",
    "mean-only": "PCME++, means alone",
    "pcme": "PCME: sampled distances",
    "probabilistic-vsepp": "probabilistic VSE++: triplets of Gaussians",
    "vse0": "VSE0: triplets with all negatives",
    "vsepp": "VSE++: triplets with the hardest negative",
    "semihard": "triplets with semi-hard negatives",
    "triplet": "VSE++ after VSE0",
    "vseinf": "VSE∞: triplets, GPO, two-layer heads",
    "daa": "DAA",
    "pvse": "PVSE: several embeddings an item",
}
"""The end of a recipe's name -> the method."""

COLUMNS = {
    "flickr8k": {
        "RSUM (of 600)": "rsum",
        "image→text recall@1": "i2t recall@1",
        "text→image recall@1": "t2i recall@1",
        "recall@10": "t2i recall@10",
    },
    "emoji": {
        "text→image recall@1": "t2i recall@1",
        "names": "name2i recall@1",
        "image→name recall@1": "i2name recall@1",
        "text→image R-Precision": "t2i r_precision",
    },
}
"""Family -> heading of a column -> name of the figure."""

TITLES = {
    "flickr8k": "Flickr8k, test split: 1,000 images, 5,000 captions",
    "emoji": "Emoji, unseen style, test split: 1,496 images, 4,488 texts",
}

BEGIN = "<!-- Written by benchmarks/results_page.py from benchmarks/results, up to the next comment: do not edit. -->"
END = "<!-- The end of what benchmarks/results_page.py writes. -->"


def load(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """A family's results; None if they were not made."""
    path = folder / f"family-{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def method(recipe: str) -> str:
    return METHODS[recipe.split("-", 1)[1]]


def cell(row: dict[str, Any], figure: str) -> str:
    """Mean ± deviation with one digit; a dash where the figure is undefined."""
    found = row["figures"].get(figure)
    if not found:
        return "–"
    return f"{found['mean']:.1f}" + (f" ± {found['deviation']:.1f}" if found["deviation"] is not None else "")


def section(name: str, result: dict[str, Any]) -> str:
    """A family as a chapter of the page."""
    columns = COLUMNS[name]
    rows = sorted(result["table"].items(), key=lambda row: -row[1]["figures"][next(iter(columns.values()))]["mean"])
    header, lines = ["method", "recipe", *columns, "learning rate", "seconds", "of the processor"], []
    for recipe, row in rows:
        seconds = [f"{row['figures'][key]['mean']:.0f}" for key in ("seconds", "processor seconds")]
        figures = [cell(row, figure) for figure in columns.values()]
        lines.append([method(recipe), f"`{recipe}`", *figures, f"{row['learning rate']:g}", *seconds])
    chance = rows[0][1]["chance"]
    by_chance = [f"{chance[figure]:.1f}" if figure in chance else "–" for figure in columns.values()]
    lines.append(["by chance", "", *by_chance, "", "", ""])
    epochs = sorted({row["epochs"] for _, row in rows})
    about = textwrap.fill(
        f"{', '.join(map(str, epochs))} epochs, seeds {', '.join(map(str, result['seeds']))}; learning rates"
        f" {', '.join(f'{rate:g}' for rate in result['rates'])} times that of the recipe, commit {result['commit']},"
        f" {result['date']}. Seconds of training: mean over the seeds, one thread a run.",
        120,
    )
    methods = table(header, lines, set(range(2, len(header))))
    return f"## {TITLES[name]}\n\n```bash\n{result['command']}\n```\n\n{methods}\n{about}\n"


def page(results: dict[str, dict[str, Any]], text: str) -> str:
    """The page in Markdown; its text outside the two comments stays."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    sections = "\n".join(section(name, result) for name, result in results.items())
    return f"{before}{BEGIN}\n\n{sections}\n{END}{after}"


def all_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The families that were run, by name."""
    return {name: found for name in COLUMNS if (found := load(name, folder))}


def main() -> None:
    PAGE.write_text(page(all_results(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
