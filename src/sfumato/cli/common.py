"""What the commands share: the application, options that several commands take, and how results are printed."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """Lists the commands in the order of a first use; groups would otherwise come last."""

    def list_commands(self, ctx: Any) -> list[str]:
        first = ("train", "evaluate")
        return sorted(super().list_commands(ctx), key=lambda name: first.index(name) if name in first else len(first))


app = typer.Typer(
    name="sfumato",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Image-text search and matching that knows what it does not know.",
)

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Path of a recipe, or name of a recipe of the package.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Changes to the recipe, e.g. train.epochs=10 loss.alpha=0.01."),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a run, folder of an exported or published model, or name of a model on the Hugging Face hub.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
DataRecipe = Annotated[
    str | None,
    typer.Option(metavar="RECIPE", help="Recipe (path or name) whose data to use. Default: the data of the run."),
]
DataOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="With --data: changes to that recipe, e.g. data.path=my.jsonl."),
]
Split = Annotated[str, typer.Option(help="Split of the data.")]
Bootstrap = Annotated[
    int, typer.Option(min=0, help="Number of bootstrap resamples for the confidence intervals; 0 for no intervals.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

TIMEOUT_MINUTES = 30.0
"""Longest time that one process of an evaluation waits for another one, in minutes."""


def print_result(result: dict[str, Any], as_json: bool, line: str) -> None:
    """Print a result as JSON, or as text.

    Args:
        result: plain values.
        as_json: whether to print JSON.
        line: the text otherwise.
    """
    print(json.dumps(result) if as_json else line)


def parse_names(listed: str) -> list[str]:
    """Split a list of names at its commas.

    Args:
        listed: names with commas between them.

    Returns:
        The names, without empty ones.
    """
    return [name.strip() for name in listed.split(",") if name.strip()]


def speed_suffix(per_second: float | None) -> str:
    """Items per second, as the end of a line.

    Args:
        per_second: the rate; None if it is not known.

    Returns:
        The text.
    """
    return f"; {per_second:.1f} a second" if per_second else ""


def problems_suffix(problems: Any) -> str:
    """What was left out and why, as the end of a line.

    Args:
        problems: :class:`~sfumato.data.problems.Problems`.

    Returns:
        The text; empty without problems.
    """
    return f"; {len(problems)} left out:\n{problems.summary()}" if len(problems) else ""
