"""What the commands share: the application, options that several take, and how results are told."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sfumato.errors import UserError

app = typer.Typer(
    name="sfumato",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Image-text search and matching that knows what it does not know.",
)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value ..., e.g. train.epochs=10 loss.alpha=0.01")
]
ModelName = Annotated[
    str, typer.Argument(help="folder of a run, of an exported or published model, or a name on the Hugging Face hub")
]
Device = Annotated[str, typer.Option(help="where to compute: auto, cpu, cuda, mps")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]

TIMEOUT_MINUTES = 30.0
"""Longest wait of a process that evaluates for another one."""


def print_result(result: dict[str, Any], as_json: bool, line: str) -> None:
    """A result for people, or as JSON."""
    print(json.dumps(result) if as_json else line)


def parse_names(listed: str) -> list[str]:
    """What stands between commas."""
    return [name.strip() for name in listed.split(",") if name.strip()]


def no_run(model: str, wanted: str) -> UserError:
    """Why a model without a recipe needs --data."""
    from sfumato.models.run import RECIPE

    if not Path(model).exists():
        return UserError(
            f"there is no folder {model}; of a model on the hub say what to {wanted}: --data RECIPE data.path=..."
        )
    return UserError(
        f"{model} is not a run folder (no {RECIPE} in it); say what to {wanted}: --data RECIPE data.path=..."
    )


def say_speed(per_second: float | None) -> str:
    """Items a second, for the end of a line."""
    return f"; {per_second:.1f} a second" if per_second else ""


def say_left_out(problems: Any) -> str:
    """What was left out and why, for the end of a line."""
    return f"; {len(problems)} left out:\n{problems.summary()}" if len(problems) else ""
