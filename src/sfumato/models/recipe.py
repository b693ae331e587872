"""Recipes: all settings of a run in one TOML file, checked before the run starts.

A recipe is complete and strict: an unknown key is an error that names the nearest one. Overrides have the form
``section.key=value`` and pass the same checks; the resolved recipe is saved beside every checkpoint.
"""

import difflib
import functools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator

from sfumato.data.feature_tables import resolved_table
from sfumato.data.sources import DataConfig
from sfumato.encoders.encoder_protocol import ImageEncoderConfig, TextEncoderConfig
from sfumato.encoders.registry import ENCODERS
from sfumato.errors import UserError, did_you_mean
from sfumato.files import LAST, MODEL, RECIPE, recipe_folder, write_atomically
from sfumato.ids import Side
from sfumato.imports import HOW, import_own, load_plugins
from sfumato.models import sections


class Recipe(sections.Section):
    """A complete run."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    prefer: str = ""
    """recipe of the package that `sfumato train` takes instead where its pre-trained weights are cached or can be
    downloaded; none if empty"""
    imports: tuple[str, ...] = ()
    """files (.py, relative to the recipe) or modules that register losses, distances and others of your own; `sfumato
    train` imports them"""
    data: DataConfig = DataConfig()
    model: sections.ModelConfig = Field(default_factory=sections.ModelConfig)
    loss: sections.LossSection = Field({"name": "pcmepp"}, validate_default=True)
    augment: sections.AugmentConfig = sections.AugmentConfig()
    optim: sections.OptimConfig = sections.OptimConfig()
    train: sections.TrainConfig = sections.TrainConfig()
    variance_stage: sections.VarianceStageConfig = sections.VarianceStageConfig()

    @model_validator(mode="before")
    @classmethod
    def _unknown_loss(cls, values: Any, info: ValidationInfo) -> Any:
        """The recipe of a run is read without the code of its loss; that of a frozen model without any loss."""
        of_run = bool((info.context or {}).get("of_run"))
        loss = values.get("loss") if isinstance(values, dict) and (values.get("imports") or of_run) else None
        if isinstance(loss, dict) and isinstance(loss.get("name"), str):
            model = values.get("model")
            frozen = of_run and isinstance(model, dict) and model.get("identity") is True
            if frozen or loss["name"] not in sections.losses():
                return values | {"loss": sections.UnknownLossConfig.model_validate(loss)}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        self.loss.check(self.model, self.data)
        self.variance_stage.check(self.model, self.data, self.loss)
        self.model.check_inputs(self.data)
        self.augment.check(self.model)
        self.optim.check(self.model, self.train.epochs)
        self.train.check()
        return self


_SIDES: dict[Any, Side] = {ImageEncoderConfig: "image", TextEncoderConfig: "text"}

_TAG_KEYS = ("loss.name", "model.image.kind", "model.text.kind")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, own: bool = False) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: a TOML file.
        overrides: each "section.key=value". Values are TOML (``loss.alpha=0.01``), bare words are strings. Another
            loss.name or model.image.kind resets that section to its defaults.
        own: import the files and modules that its key ``imports`` names. Their code is executed, but never that of a
            run's own recipe, because a run may come from elsewhere.

    Returns:
        The recipe.

    Raises:
        UserError: the file is missing or not TOML, or a key or value is wrong; the message names the nearest right key.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no recipe at {path}; `sfumato recipes` lists those that come with the package")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # A number of 5,000 digits is a ValueError of Python itself.
        raise UserError(f"{path}: not a valid TOML file: {error}") from error
    # Overrides that reset a section are applied first, regardless of their position.
    for override in sorted(overrides, key=lambda o: o.partition("=")[0].strip() not in _TAG_KEYS):
        _apply(values, override)
    load_plugins()
    names, of_run = values.get("imports", []), is_of_run(path)
    if own and not of_run and isinstance(names, list) and all(isinstance(name, str) for name in names):
        import_own(names, path.parent)
        values["imports"] = [str((path.parent / n).resolve()) if n.endswith(".py") else n for n in names]
    return check_recipe(values, f"{path} with its overrides" if overrides else str(path), of_run=of_run)


def is_of_run(path: Path) -> bool:
    """Whether a recipe is that of a run, in its folder."""
    return path.name == RECIPE and any((path.parent / name).exists() for name in (MODEL, LAST))


_GONE: tuple[tuple[str, str, Any], ...] = (
    ("augment.mix_whole", "", False), ("data.held_out_style", "", "fluent3d"), ("data.noise_file", "", ""),
    ("data.noise_seed", "", 0), ("data.shuffle_buffer", "", 10_000), ("loss.inclusion_scale", "prolip", 1000.0),
    ("loss.match_weight", "pcme", 2.0), ("loss.match_weight", "pcmepp", 2.0), ("loss.seed", "pcme", 0),
    ("loss.soft_margin", "daa", False), ("loss.soft_margin", "pvse", False), ("loss.soft_margin", "triplet", False),
    ("loss.temperature", "daa", 0.02), ("model.image.architecture", "resnet", "resnet-50"),
    ("model.image.blocks", "clip", None), ("model.image.depths", "resnet", None),
    ("model.image.in_memory", "clip", False), ("model.image.in_memory", "efficientnet", True),
    ("model.image.in_memory", "resnet", False), ("model.image.pretrained", "efficientnet", True),
    ("model.image.variance_start", "", "random"), ("model.image.width", "resnet", 64), ("model.normalize", "", True),
    ("model.text.blocks", "clip", None), ("model.text.variance_start", "", "random"),
    ("optim.first_stage_schedule_epochs", "", 0), ("optim.step_factor", "", 0.1), ("train.save_steps", "", 0),
    ("variance_stage.n_gallery", "", 5000), ("variance_stage.sides", "", "both"), ("variance_stage.whiten", "", True),
    ("variance_stage.without_own", "", False),
)  # fmt: skip
"""Keys that runs of former versions state, the encoder or loss that had them ("" for all), and their value now."""


def without_gone(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a run's recipe without keys whose value is always the same now; changed in place."""
    for key, kind, value in _GONE:
        *parts, name = key.split(".")
        section: Any = values
        for one in parts:
            section = section.get(one) if isinstance(section, dict) else None
        held = isinstance(section, dict) and name in section
        if not held or kind not in ("", section.get("kind"), section.get("name")):
            continue
        if section[name] != value:
            raise UserError(f"{key}={section[name]!r}: this key is gone, its value is always {value!r} now")
        del section[name]
    return values


def check_recipe(values: dict[str, Any], where: str, *, of_run: bool = False) -> Recipe:
    """Check the values of a recipe."""
    values = without_gone(values) if of_run else values
    try:
        return Recipe.model_validate(values, context={"of_run": of_run})
    except ValidationError as error:
        raise UserError(f"{where}: " + "\n  ".join(map(_explain, error.errors()))) from error


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a resolved recipe as TOML, with all defaults."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    write_atomically(path, tomli_w.dumps({key: value for key, value in values.items() if value or key != "imports"}))


def absolute_data(config: DataConfig) -> DataConfig:
    """The same data with absolute paths, so that they are found from any folder."""
    table = resolved_table if config.source == "embeddings" else _absolute
    update = {name: _absolute(getattr(config, name)) for name in ("path", "val_path")}
    update |= {name: table(getattr(config, name)) for name in ("images", "texts") if getattr(config, name)}
    return config.model_copy(update=update)


def absolute_recipe(recipe: Recipe) -> Recipe:
    """The same recipe with absolute paths, as it is saved in a run folder."""
    sides: dict[str, Any] = {}
    for side, section in (("image", recipe.model.image), ("text", recipe.model.text)):
        paths = {key: _absolute(getattr(section, key)) for key in section.path_fields if getattr(section, key)}
        sides[side] = section.model_copy(update=paths)
    start = recipe.train.start
    train = recipe.train if start == "small" else recipe.train.model_copy(update={"start": _absolute(start)})
    model = recipe.model.model_copy(update=sides)
    return recipe.model_copy(update={"data": absolute_data(recipe.data), "model": model, "train": train})


def _absolute(path: str) -> str:
    """An absolute path to what exists; patterns such as a-{0..9}.tar where their folder does."""
    known = os.path.exists(path) or (any(c in path for c in "*?[{") and os.path.isdir(os.path.dirname(path) or "."))
    return os.path.abspath(path) if path and known else path


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The value of each key, e.g. of loss.alpha."""
    return dict(leaves(recipe.model_dump(mode="json")))


BOOKKEEPING = ("train.timeout_minutes", "train.tracker", "train.save_minutes")
"""Keys that change nothing of what is trained."""


def differing_keys(saved: Recipe, given: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys in which two recipes differ."""
    first, second = recipe_values(saved), recipe_values(given)
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested sections with their keys, such as train.epochs."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"override {override!r}: expected section.key=value, e.g. train.epochs=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except (ValueError, RecursionError) as error:
        raise UserError(f"override {override!r}: the value cannot be read: {error}") from error
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"override {override!r}: {part!r} is a value, not a section")
        values = inner
    if key in _TAG_KEYS and values.get(parts[-1]) != value:
        values.clear()  # The options of the old loss or encoder do not apply to another one.
    values[parts[-1]] = value


def _explain(item: Any) -> str:
    # The location has the name of a loss ("pcmepp"), which is a tag of a union and no key of the file.
    path = [str(part) for part in item["loc"]]
    of_loss = sections.losses() if path[:1] == ["loss"] else {}
    shown = ".".join(part for i, part in enumerate(path) if not (part in of_loss and i > 0))
    if item["type"] == "extra_forbidden":
        known = _keys()
        close = functools.partial(difflib.get_close_matches, n=1, cutoff=0.5)
        near = close(shown, known) or close(path[-1], [k.rsplit(".", 1)[-1] for k in known])
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        return f"unknown key {shown!r}; {hint}"
    if item["type"] == "union_tag_invalid":
        known_tags = sorted(re.findall(r"'([^']+)'", item["ctx"]["expected_tags"]))
        key, tag = f"{shown}.{item['ctx']['discriminator'].strip(chr(39))}", item["ctx"]["tag"]
        own = f"; {HOW}" if path[-1] == "loss" else ""
        hint = did_you_mean(tag, known_tags, f"known: {', '.join(known_tags)}{own}")
        return f"{key}: unknown {tag!r}; {hint}"
    if item["type"] == "union_tag_not_found":
        return f"{shown}: needs its {item['ctx']['discriminator']}, which determines the other keys"
    message = item["msg"].removeprefix("Value error, ")
    given = "" if not shown or item["type"] == "missing" else f" (got {item['input']!r})"
    return f"{shown or 'recipe'}: {message}{given}"


def _keys(model: type[BaseModel] = Recipe, prefix: str = "") -> set[str]:
    return {prefix + name for name, _ in _fields(model)} | {
        key for name, parts in _fields(model) for section in parts for key in _keys(section, f"{prefix}{name}.")
    }


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, list[type[BaseModel]]]]:
    for name, field in model.model_fields.items():
        if field.annotation in _SIDES:
            yield name, [entry.config for entry in ENCODERS[_SIDES[field.annotation]].values()]
            continue
        if field.annotation is sections.LossConfig:
            yield name, [sections.loss_config(key, loss.Options) for key, loss in sections.losses().items()]
            continue
        options = [field.annotation, *get_args(field.annotation)]
        yield name, [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]


def recipe_files() -> dict[str, Traversable]:
    """The recipes of the package, or in a checkout of its folder ``recipes``."""
    files = sorted((f for f in recipe_folder().iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name.removesuffix(".toml"): f for f in files}


def find_recipe(name: str) -> Path:
    """The path of a recipe.

    Args:
        name: a path, or the name of a recipe that comes with the package.

    Returns:
        The path.

    Raises:
        UserError: there is neither such a file nor such a name.
    """
    if Path(name).is_file():
        return Path(name)
    known = recipe_files()
    if name not in known:
        hint = did_you_mean(name, known, "`sfumato recipes` lists them")
        raise UserError(f"no recipe {name!r}: neither a file nor one that comes with the package; {hint}")
    return Path(str(known[name]))


def recipe_summary(file: Traversable) -> str:
    """The short description of a recipe."""
    return file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").strip()
