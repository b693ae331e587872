"""What commands share: how flags are made and shown, messages, checks of outputs, and the model with its data."""

import dataclasses
import functools
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from sfumato.errors import UserError, disk_cause, say
from sfumato.files import RECIPE

_GROUPS = {
    "start": "demo index search serve mcp",
    "models": "train adopt calibrate export recipes",
    "measure": "evaluate trust score audit report",
    "data": "copy delete",
}
"""The groups of the help and their commands."""


class _Commands(TyperGroup):
    """The help fits one screen: a line a command, in groups."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the groups."""
        formatter.write(f"Usage: sfumato [--version] COMMAND ...  (COMMAND --help)\n{self.help}\n\n")
        for group, listed in _GROUPS.items():
            names = listed.split()
            for name, heading in zip(names, [group, *[""] * len(names)], strict=False):
                formatter.write(f"{heading:<9}{name:<11}{self.commands[name].get_short_help_str(60)}\n")


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with all that it leaves out at first."""
    if wanted:
        for param in ctx.command.params:
            if getattr(param, "help", None):
                param.hidden = False  # type: ignore[attr-defined]
        print(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, typer.Option("--help-all", callback=_help_all, is_eager=True, help="Show rare options, too.")]


def flag(
    default: Any,
    help: str,
    *names: str,
    metavar: str | None = None,
    min: float | None = None,
    max: float | None = None,
    hidden: bool = False,
    show_default: bool | str = True,
) -> Any:
    """An option of a command; its default is ... if it must be given, and in an annotation."""
    return typer.Option(
        default, *names, help=help, metavar=metavar, min=min, max=max, hidden=hidden, show_default=show_default
    )


rare = functools.partial(flag, hidden=True)
"""An option that --help leaves out and --help-all shows."""


def word(default: Any, help: str, metavar: str) -> Any:
    """An argument of a command."""
    return typer.Argument(default, help=help, metavar=metavar)


_IMPORT = "Python file (or module) of yours that registers losses, distances, methods ...; it is executed. Repeatable."


def command(of: typer.Typer | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command; of a parameter whose type is a dataclass, every field is an option."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        parts: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
        taken: list[tuple[str, Any, Any]] = []
        for name, parameter in inspect.signature(function).parameters.items():
            if name in parts:
                own = get_type_hints(parts[name], include_extras=True)
                fields = inspect.signature(parts[name]).parameters
                taken += [(field, own[field], one.default) for field, one in fields.items()]
            else:
                taken.append((name, hints[name], parameter.default))
        if not any("--import" in (getattr(default, "param_decls", None) or ()) for _, _, default in taken):
            taken.append(("imports", list[str] | None, rare(None, _IMPORT, "--import", metavar="FILE")))
        taken.append(("help_all", HelpAll, False))

        @functools.wraps(function)
        def call(**given: Any) -> None:
            given.pop("help_all", None)
            if names := given.pop("imports", None):
                from sfumato.imports import import_given

                import_given(names)
            for name, part in parts.items():
                given[name] = part(**{field.name: given.pop(field.name) for field in dataclasses.fields(part)})
            function(**given)

        call.__annotations__ = {name: hint for name, hint, _ in taken}
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind, default=value, annotation=hint) for name, hint, value in taken]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return (of or app).command()(call)

    return register


app = typer.Typer(
    name="sfumato", cls=_Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Image-text search and matching that knows what it does not know.",
)  # fmt: skip


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
    help_all: HelpAll = False,
) -> None:
    """Options of all commands."""


_MODEL = "Folder of a run or of a model, file of a released checkpoint, or name on the Hugging Face hub."
_QUERIES = "Queries of the probabilities: planted (each has a match in the gallery) or independent (some have none)."

ModelName = Annotated[str, word(..., _MODEL, "MODEL")]
Split = Annotated[str, flag(..., "Split of the data.")]
Population = Annotated[str, flag(..., _QUERIES)]
AsJson = Annotated[bool, flag(..., "Print the result as JSON.", "--json")]


def print_result(result: dict[str, Any], as_json: bool, line: str) -> None:
    """Print a result as JSON, or as text."""
    print(json.dumps(result) if as_json else line)


def parse_names(listed: str) -> list[str]:
    """Split a list of names at its commas."""
    return [name.strip() for name in listed.split(",") if name.strip()]


def problems_suffix(problems: Any) -> str:
    """What was left out and why, as the end of a line."""
    left_out = f"; {problems.left_out} left out" if problems.left_out else ""
    return "" if problems.is_empty else f"{left_out}:\n{problems.summary()}"


if TYPE_CHECKING:
    from sfumato.data.sources import DataConfig
    from sfumato.models.model import Model
    from sfumato.models.run import Device, Run


@dataclass(frozen=True)
class OnData:
    """The flags that name a model and its data."""

    model: ModelName
    overrides: list[str] | None = word(
        None, "Changes to --data, e.g. data.path=my.jsonl; without it, where the run's data are.", "SECTION.KEY=VALUE"
    )
    data: str | None = flag(None, "Recipe (path or name) that names the data. Default: the run's.", metavar="RECIPE")
    split: Split = "test"

    def open(self, purpose: str, *, split: str = "", device: "Device" = "auto") -> "ModelOnData":
        """Load the model and find its data; with a split, that one instead of the flag's."""
        from sfumato.models.recipe import find_recipe, load_recipe
        from sfumato.models.run import load_model, load_run

        split, overrides = split or self.split, self.overrides or []
        if self.data is not None:
            config = load_recipe(find_recipe(self.data), overrides).data
            run = load_run(self.model, device=device) if is_run(self.model) else None
            model = load_model(self.model, device=device) if run is None else run
            return ModelOnData(model, config, split, Path(self.model).name, run, own_data=False)
        if not is_run(self.model):
            found = f"{self.model} is not a run folder (no {RECIPE} in it)"
            raise UserError(f"{found}; another model needs data to {purpose}: --data RECIPE data.path=...")
        if wrong := [override for override in overrides if not override.startswith("data.")]:
            raise UserError(f"{wrong[0]!r} does not change the data of {self.model}; give data.KEY=VALUE")
        moved = load_recipe(Path(self.model) / RECIPE, overrides).data if overrides else None
        run = load_run(self.model, device=device)
        name = run.recipe.name or run.folder.name
        if moved is None:
            split = _split_that_is_there(run.recipe.data, split)
            return ModelOnData(run, run.recipe.data, split, name, run, own_data=True)
        paths = {name: getattr(moved, name) for name in ("path", "val_path", "images", "texts")}
        own = run.recipe.data.model_copy(update=paths)
        run = replace(run, recipe=run.recipe.model_copy(update={"data": moved}))
        return ModelOnData(run, moved, split, name, run, own_data=own == moved)


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
    return (Path(model) / RECIPE).is_file()


def _split_that_is_there(config: "DataConfig", split: str) -> str:
    """The split, or, if it is test and all images train, the split of the texts that training left out."""
    from sfumato.data.images import Problems
    from sfumato.data.splits import WORDINGS
    from sfumato.models.embed import load_splits

    if split == "test" and config.held_out_wordings:
        splits = load_splits(config, Problems())
        if "test" not in splits and WORDINGS in splits:
            say(f"all images train: measured on {WORDINGS}, the texts that training left out")
            return WORDINGS
    return split


def check_out_folder(path: Path, *, ours: Callable[[Path], bool] | None = None, option: str = "--out") -> None:
    """Check that a folder can be written, or made with its parents."""
    if path.is_dir():
        found = next((p.name for p in sorted(path.iterdir()) if not p.name.startswith(".")), None)
        if ours is not None and found is not None and not ours(path):
            raise UserError(f"{option} {path}: the folder holds something else ({found}); give a new or empty one")
    elif path.exists():
        raise UserError(f"{option} {path} is a file; give a folder")
    _check_writable(path, path, option)


def check_out_file(path: Path, *, option: str = "--out") -> None:
    """Check that a file can be written."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; give the name of a file, e.g. {path / 'NAME'}{path.suffix}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist; create it first")
    _check_writable(path.parent, path, option)


def _check_writable(folder: Path, path: Path, option: str) -> None:
    """Try to make a file in a folder, or in the nearest one above it that exists."""
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir():
        raise UserError(f"{option} {path}: {above} is a file, so nothing can be made below it; give another folder")
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written: {disk_cause(error) or error.strerror}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the output in errors of the disk that name no file, and in those of libraries with classes of their own."""
    try:
        yield
    except Exception as error:
        if getattr(error, "filename", None) is not None or (cause := disk_cause(error)) is None:
            raise
        raise UserError(f"{path}: {cause}") from error
