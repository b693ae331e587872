"""The command that repeats the tables and figures of the papers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli.common import AsJson, Device, InstanceFiles, app
from sfumato.cli.outputs import check_out_folder
from sfumato.errors import UserError

if TYPE_CHECKING:
    from sfumato.evaluation.papers import PaperItem
    from sfumato.studies.paper_tables import TableData


@app.command()
def table(
    name: Annotated[
        str | None, typer.Argument(metavar="ID", help='Table or figure, e.g. "PCME++ 3" or "PCME++ Fig. 3".')
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION.KEY=VALUE", help="Change to the recipes of all rows, e.g. data.path=... or train.epochs=5."
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List all tables and figures with their state and what they need.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data to repeat it on: coco, flickr30k, cub, flickr8k or emoji (which comes with the package), a"
            " dataset_*.json in Karpathy's layout, a manifest, or a folder of images. Default: the paper's."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each row, with the following seeds.")] = 1,
    published: Annotated[
        bool, typer.Option("--published", help="Show the paper's figures; nothing is trained.")
    ] = False,
    instances: InstanceFiles = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs; finished ones are reused.")] = Path("runs/tables"),
    out: Annotated[
        Path | None, typer.Option(help="Folder for the table in JSON, Markdown and LaTeX, or for the figure's images.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Repeat a table or a figure of the papers.

    Trains the runs that are missing, evaluates them, and prints ours beside published. The same command goes on where
    it was interrupted.
    """
    from sfumato.evaluation.papers import find_item, paper_items
    from sfumato.reports.paper_files import print_items, print_published
    from sfumato.studies.paper_tables import choose_data

    if listed or name is None:
        if as_json:
            print(json.dumps([item.to_json() for item in paper_items().values()], ensure_ascii=False))
        else:
            print_items(paper_items())
        return
    item = find_item(name)
    if published:
        print(json.dumps(item.rows, ensure_ascii=False)) if as_json else print_published(item)
        return
    chosen = choose_data(item, data, overrides or [])
    if instances and not (item.plausible and chosen.name == "coco"):
        raise UserError("--instances is for PMRP on COCO; leave it out")
    folder = (out or Path("tables")) / _folder_name(item.id)
    check_out_folder(folder)
    write = _write_figure if item.draw else _write_table
    made, lines = write(item, chosen, runs, folder, seeds, tuple(instances or ()), device)
    if as_json:
        print(json.dumps(made, ensure_ascii=False))
    else:
        lines()
        print(f"written to {folder}")


_Written = tuple[dict[str, Any], Callable[[], None]]
"""The JSON values of what was made, and what prints it."""


def _write_table(
    item: "PaperItem", data: "TableData", runs: Path, folder: Path, seeds: int, instances: tuple[Path, ...], device: str
) -> _Written:
    from sfumato.models.run import choose_device
    from sfumato.reports.paper_files import print_paper_table, write_table
    from sfumato.studies.paper_tables import make_table

    made = make_table(item, data, runs, n_seeds=seeds, instances=instances, device=choose_device(device))
    write_table(made, folder)
    return made.to_json(), lambda: print_paper_table(made)


def _write_figure(
    item: "PaperItem", data: "TableData", runs: Path, folder: Path, seeds: int, instances: tuple[Path, ...], device: str
) -> _Written:
    from sfumato.charts import require_matplotlib
    from sfumato.models.run import choose_device
    from sfumato.reports.paper_figures import print_figure, write_figure
    from sfumato.studies.figure_numbers import make_figure

    require_matplotlib()
    made = make_figure(item, data, runs, n_seeds=seeds, instances=instances, device=choose_device(device))
    write_figure(made, folder)
    return made.to_json(), lambda: print_figure(made)


def _folder_name(id: str) -> str:
    """E.g. pcmepp-fig-3 of "PCME++ Fig. 3"."""
    return re.sub(r"[^a-z0-9]+", "-", id.lower().replace("+", "p")).strip("-")
