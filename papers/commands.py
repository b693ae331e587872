"""The commands of `python -m papers`. The module commands of each folder registers its own; main imports them."""

import importlib
from typing import Annotated

import typer

from sfumato.cli import run
from sfumato.cli.common import flag

app = typer.Typer(help="Repeat and study the papers.", no_args_is_help=True, add_completion=False)


Bootstrap = Annotated[
    int, flag(..., "Number of bootstrap resamples for the confidence intervals; 0 for no intervals.", min=0)
]
Seed = Annotated[int, flag(..., "Seed of all random choices.", min=0)]

_FOLDERS = ("tables", "studies", "captions", "data", "multiplicity", "posthoc", "runs")


def main() -> None:
    """Entry point of `python -m papers`."""
    for folder in _FOLDERS:
        importlib.import_module(f"papers.{folder}.commands")
    run(app, "papers", "The same command continues where it stopped.")
