"""`python -m papers table` and `list`: the papers' tables and figures repeated, and all their rows."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from papers.commands import app
from sfumato.cli.common import AsJson, check_out_folder, command, flag, word
from sfumato.errors import UserError

_OVERRIDES = (
    "Change to all recipes, e.g. train.epochs=5, or a study's setting, e.g. toy.seed=1. A wrong one lists them."
)


@dataclass(frozen=True)
class RepeatFlags:
    """How a table or figure is repeated and shown."""

    data: str | None = flag(
        None,
        "Data: coco, flickr30k, cub, flickr8k, emoji, a Karpathy JSON, a manifest or a folder. Default: the paper's.",
    )
    seeds: int = flag(1, "Number of runs of each row, with the following seeds.", min=1)
    runs: Path = flag(Path("runs/tables"), "Folder of the runs; finished ones are reused.")
    instances: list[Path] | None = flag(None, "COCO's instances_*.json, to add PMRP; may be given several times.")
    published: bool = flag(False, "Show the paper's figures; nothing is trained.", "--published")
    out: Path = flag(Path("tables"), "Folder for the table in JSON, Markdown and LaTeX, or for the figure's images.")
    latex: bool = flag(False, "Print the table as LaTeX, for the package booktabs.", "--latex")
    as_json: AsJson = False


@command(app)
def table(
    *,
    name: str | None = word(None, 'Table or figure, e.g. "PCME++ 3" or "PCME++ Fig. 3".', "ID"),
    overrides: list[str] | None = word(None, _OVERRIDES, "SECTION.KEY=VALUE"),
    flags: RepeatFlags,
) -> None:
    """Repeat a table or a figure of the papers.

    Trains the runs that are missing, evaluates them, and prints ours beside published. The same command goes on where
    it was interrupted.
    """
    if name is None:
        return list_rows(flags.as_json)
    from papers.tables import drawn, figure_numbers, paper_tables, printed
    from papers.tables.items import find_item
    from sfumato.charts import require_matplotlib
    from sfumato.models.run import choose_device

    item = find_item(name)
    if flags.latex and item.draw:
        raise UserError(f"{item.id} is a figure; leave --latex out")
    if flags.published:
        return print(json.dumps(item.rows, ensure_ascii=False)) if flags.as_json else printed.print_published(item)
    item, changes = paper_tables.with_settings(item, overrides or [])
    chosen, instances = paper_tables.choose_data(item, flags.data, changes), tuple(flags.instances or ())
    if instances and not (item.plausible and chosen.name == "coco"):
        raise UserError("--instances is for PMRP on COCO; leave it out")
    folder = flags.out / re.sub(r"[^a-z0-9]+", "-", item.id.lower().replace("+", "p")).strip("-")
    check_out_folder(folder)
    if item.draw:
        require_matplotlib()
    repeated: Any = figure_numbers.make_figure if item.draw else paper_tables.make_table
    made = repeated(item, chosen, flags.runs, n_seeds=flags.seeds, instances=instances, device=choose_device())
    (drawn.write_figure if item.draw else printed.write_table)(made, folder)
    if flags.as_json:
        return print(json.dumps(made.to_json(), ensure_ascii=False))
    if flags.latex:
        return print((folder / "table.tex").read_text(encoding="utf-8"), end="")
    drawn.print_figure(made) if item.draw else printed.paper_table(made).show()
    print(f"written to {folder}")


@app.command("list")
def list_rows(as_json: AsJson = False) -> None:
    """List every system, table, figure and idea of the papers, with its state and figure."""
    from papers.tables.rows import paper_rows, print_rows

    rows = paper_rows()
    return print(json.dumps([row.to_json() for row in rows], ensure_ascii=False)) if as_json else print_rows(rows)
