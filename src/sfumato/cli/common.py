"""What commands share: options, messages, and the resolution of model, data, overrides, split and device."""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sfumato.errors import UserError, as_typed
from sfumato.progress import say


class _Commands(TyperGroup):
    """Lists the commands in the order of a first use; groups would otherwise come last."""

    def list_commands(self, ctx: Any) -> list[str]:
        first = ("train", "evaluate")
        return sorted(super().list_commands(ctx), key=lambda name: first.index(name) if name in first else len(first))


class Verbs(TyperGroup):
    """A command with sub-verbs. Without one, it says in one line which is meant and how to write it."""

    def meant(self, command: str, arguments: list[str]) -> str:
        """The line, for a command with arguments but no verb; a group that knows more about them overrides it."""
        verbs = ", ".join(self.commands)
        return f"write {as_typed('sfumato', command, 'VERB', *arguments)}, where VERB is one of {verbs}"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse arguments without a verb."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            near = difflib.get_close_matches(args[0], self.commands, n=1) if args else []
            if near and not Path(args[0]).exists():
                command = as_typed("sfumato", ctx.info_name, near[0], *args[1:])
                raise UserError(f"unknown {args[0]!r}; did you mean: {command}")
            raise UserError(self.meant(str(ctx.info_name), list(args)))
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def values(self, arguments: list[str]) -> list[str]:
        """The arguments that are neither options nor the values of options."""
        options = [p for verb in self.commands.values() for p in verb.params if getattr(p, "is_flag", False)]
        flags = {name for option in options for name in option.opts}
        return [
            value
            for before, value in zip(["", *arguments], arguments, strict=False)
            if not value.startswith("-") and (not before.startswith("-") or "=" in before or before in flags)
        ]


app = typer.Typer(
    name="sfumato",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Image-text search and matching that knows what it does not know.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from sfumato import __version__

        print(f"sfumato {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""


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
        help="Folder of a run or of an exported or published model, file of a released checkpoint, or name on the"
        " Hugging Face hub.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
DataRecipe = Annotated[
    str | None,
    typer.Option(metavar="RECIPE", help="Recipe (path or name) that names the data. Default: the data of the run."),
]
DataOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="With --data: changes to that recipe, e.g. data.path=my.jsonl. Without it: where the data of the run are"
        " now.",
    ),
]
Split = Annotated[str, typer.Option(help="Split of the data.")]
Uncertainty = Annotated[
    str,
    typer.Option(
        help="Uncertainty of queries: total_variance (PCME++), geometric_std (PCME) or log_det (probabilistic VSE++)."
    ),
]
Bootstrap = Annotated[
    int, typer.Option(min=0, help="Number of bootstrap resamples for the confidence intervals; 0 for no intervals.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or mps.")]
InstanceFiles = Annotated[
    list[Path] | None, typer.Option(help="COCO's instances_*.json, to add PMRP; may be given several times.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

TIMEOUT_MINUTES = 30.0
"""Longest time that one process of an evaluation waits for another one, in minutes."""


def print_result(result: dict[str, Any], as_json: bool, line: str) -> None:
    """Print a result as JSON, or as text."""
    print(json.dumps(result) if as_json else line)


def parse_names(listed: str) -> list[str]:
    """Split a list of names at its commas."""
    return [name.strip() for name in listed.split(",") if name.strip()]


def speed_suffix(per_second: float | None) -> str:
    """Items per second, as the end of a line."""
    return f"; {per_second:.1f} a second" if per_second else ""


def problems_suffix(problems: Any) -> str:
    """What was left out and why, as the end of a line."""
    return f"; {len(problems)} left out:\n{problems.summary()}" if len(problems) else ""


if TYPE_CHECKING:
    import torch

    from sfumato.data.sources import DataConfig
    from sfumato.models.model import Model
    from sfumato.models.run import Run


@dataclass(frozen=True, eq=False)
class ModelOnData:
    """A model and a split of data."""

    model: "Model"  # the loaded model
    data: "DataConfig"  # where the split comes from
    split: str  # name of the split
    name: str  # of the model, for titles
    run: "Run | None"  # the model as a run; None for exported and published models
    own_data: bool  # whether the data are those of the run's own recipe, without --data

    @property
    def own_run(self) -> "Run | None":
        """The run, if it is evaluated on its own data; results are then written into its folder."""
        return self.run if self.own_data else None

    @property
    def same_data(self) -> bool:
        """Whether the data are those that the run was trained on, by whatever recipe they are named."""
        from sfumato.models.recipe import absolute_data

        own = None if self.run is None else absolute_data(self.run.recipe.data)
        # The pairs of embeddings may be in no file.
        here = absolute_data(self.data)
        return own is not None and (here.source, here.path, here.texts) == (own.source, own.path, own.texts)

    def folder(self, out: Path | None, name: str) -> Path:
        """Where results go."""
        return out or (self.own_run.folder if self.own_run is not None else Path()) / name


def is_run(model: str | Path) -> bool:
    """Whether a name is the folder of a run."""
    from sfumato.models.run import RECIPE

    return (Path(model) / RECIPE).is_file()


def open_model_on_data(
    model: str,
    data: str | None,
    overrides: Sequence[str] | None,
    split: str,
    device: "str | torch.device",
    *,
    purpose: str = "use",
) -> ModelOnData:
    """Load a model and find its data."""
    from sfumato.models.load import load_model
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.models.run import RECIPE, choose_device, load_run

    if data is None and not is_run(model):
        raise _no_run(model, purpose)
    config = moved = None
    if data is not None:
        config = load_recipe(find_recipe(data), list(overrides or [])).data
    elif overrides:
        if wrong := [override for override in overrides if not override.startswith("data.")]:
            raise UserError(f"{wrong[0]!r} does not change the data of {model}; give data.KEY=VALUE")
        moved = load_recipe(Path(model) / RECIPE, list(overrides)).data
    chosen = choose_device(device) if isinstance(device, str) else device
    if not is_run(model):
        assert config is not None
        return ModelOnData(load_model(model, device=chosen), config, split, Path(model).name, None, own_data=False)
    run = load_run(model, device=chosen)
    if moved is not None:
        paths = {name: getattr(moved, name) for name in ("path", "val_path", "images", "texts", "noise_file")}
        own = run.recipe.data.model_copy(update=paths)
        run = replace(run, recipe=run.recipe.model_copy(update={"data": moved}))
        return ModelOnData(run, moved, split, run.recipe.name or run.folder.name, run, own_data=own == moved)
    if config is not None:
        return ModelOnData(run, config, split, Path(model).name, run, own_data=False)
    split = _split_that_is_there(run.recipe.data, split)
    return ModelOnData(run, run.recipe.data, split, run.recipe.name or run.folder.name, run, own_data=True)


def _split_that_is_there(config: "DataConfig", split: str) -> str:
    """The split, or, if it is test and all images train, the split of the texts that training left out."""
    from sfumato.data.images import Problems
    from sfumato.data.splits import WORDINGS
    from sfumato.models.embed import load_splits

    if split == "test" and config.held_out_wordings:
        splits = load_splits(config, Problems())
        if "test" not in splits and WORDINGS in splits:
            say(
                f"all images train, so there is no split test: measured on {WORDINGS}, the texts that training left out"
            )
            return WORDINGS
    return split


def _no_run(model: str, purpose: str) -> UserError:
    from sfumato.models.run import RECIPE

    command = as_typed("sfumato", "evaluate", "model", model) + " " if purpose.startswith("evaluate") else ""
    way = f"{command}--data RECIPE data.path=..."
    if not Path(model).exists():
        return UserError(f"there is no folder {model}; a model on the hub needs data to {purpose}: {way}")
    return UserError(f"{model} is not a run folder (no {RECIPE} in it); another model needs data to {purpose}: {way}")
