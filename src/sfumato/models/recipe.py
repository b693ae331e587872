"""Recipes: all settings of a run in one TOML file, checked before the run starts.

A recipe is complete and strict: an unknown key is an error that names the nearest one. Overrides have the form
``section.key=value`` and pass the same checks; the resolved recipe is saved beside every checkpoint.
"""

import difflib
import functools
import operator
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import tomli_w
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from sfumato.data.sources import DataConfig, get_source
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import ImageEncoderConfig, Side, TextEncoderConfig
from sfumato.encoders.encoder_registry import ENCODERS, encoder_entry
from sfumato.errors import UserError
from sfumato.files import write_atomically
from sfumato.losses import LOSSES, LossOptions
from sfumato.models.recipe_sections import AugmentConfig, ModelConfig, OptimConfig, TrainConfig, VarianceStageConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LossConfig(_Section):
    """The section of a loss: its name, and the options of the loss as keys."""

    name: str
    distance: str

    def options(self) -> LossOptions:
        """The options of the loss.

        Returns:
            The options, validated.
        """
        return LOSSES[self.name].options(**self.model_dump(exclude={"name"}))


def loss_config(name: str, options: type[LossOptions]) -> type[LossConfig]:
    """The section of a loss, made from its options: the same keys, defaults, descriptions and bounds.

    Args:
        name: of the loss in LOSSES.
        options: class of its options.

    Returns:
        A pydantic model; its key ``name`` accepts this name alone.
    """
    kinds = get_type_hints(options)
    keys: dict[str, Any] = {o.name: (kinds[o.name], Field(o.default, **o.metadata)) for o in fields(options)}
    keys["name"] = (Literal[name], name)
    summary = (options.__doc__ or name).partition("\n")[0]
    return create_model(options.__name__.replace("Options", "Config"), __base__=LossConfig, __doc__=summary, **keys)


LOSS_CONFIGS = {name: loss_config(name, entry.options) for name, entry in LOSSES.items()}
"""The section of every loss by its name."""


if TYPE_CHECKING:
    LossConfigs = LossConfig
else:
    LossConfigs = functools.reduce(operator.or_, LOSS_CONFIGS.values())


class Recipe(_Section):
    """A complete run."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: Annotated[LossConfigs, Field(discriminator="name")] = LOSS_CONFIGS["pcmepp"].model_validate({})
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    spread: VarianceStageConfig = VarianceStageConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        self._check_loss()
        self._check_variance_stage()
        self._check_inputs()
        self._check_augmentation()
        self._check_training()
        return self

    def _check_loss(self) -> None:
        """Refuse a loss that does not fit the model or the data."""
        distance = get_distance(self.loss.distance)
        if not self.model.variance and distance.needs_variance:
            raise ValueError(
                f"loss.distance={distance.name!r} needs variances, but model.variance=false; use csd or squared_l2"
            )
        beta: float = getattr(self.loss, "beta", 0.0)
        inclusion: float = getattr(self.loss, "inclusion_weight", 0.0)
        if not self.model.variance and beta:
            raise ValueError("loss.beta must be 0 when model.variance=false: the bottleneck of a point is infinite")
        if not self.model.variance and inclusion:
            raise ValueError("loss.inclusion_weight must be 0 when model.variance=false: points have no inclusion")
        if self.loss.name == "daa" and not self.data.graded:
            raise ValueError("loss.name='daa' learns from graded labels; set data.graded=true")
        if getattr(self.loss, "soft_margin", False) and not self.data.graded:
            raise ValueError("loss.soft_margin=true is for graded labels; set data.graded=true")
        self.model.check_variances()
        if self.model.embeddings != distance.embeddings:
            raise ValueError(
                f"model.embeddings={self.model.embeddings} does not fit loss.distance={distance.name!r}; with"
                " model.embeddings=2 use nearest_of_2, and with 1 any other"
            )

    def _check_variance_stage(self) -> None:
        """Refuse a second stage that cannot learn variances."""
        if self.spread.epochs and not self.model.variance:
            raise ValueError("spread.epochs must be 0 when model.variance=false: points have no variance to fit")
        if self.spread.epochs and get_source(self.data.source).streamed:
            raise ValueError("spread.epochs needs all pairs in memory, but shards are read as a stream; set it to 0")
        if self.spread.epochs and self.loss.distance != "squared_l2":
            raise ValueError(
                f"spread.epochs changes variances after training, and loss.distance={self.loss.distance!r} ranks by"
                " them; use squared_l2"
            )

    def _check_augmentation(self) -> None:
        """Refuse random changes that have nothing to change."""
        for key in ("mixed_share", "erase"):
            if dict(self.augment)[key] and not self.model.image.from_pixels:
                raise ValueError(
                    f"augment.{key} changes pixels, but model.image.kind={self.model.image.kind!r} reads features;"
                    " set it to 0"
                )
        if self.augment.drop_words and encoder_entry("text", self.model.text.kind).tokenizer is None:
            raise ValueError(
                "augment.drop_words changes the texts in each epoch, but frozen features are computed only once; set"
                " it to 0"
            )
        if self.augment.mixed_share and not (self.augment.mixup_alpha or self.augment.cutmix_alpha):
            raise ValueError("augment.mixed_share needs augment.mixup_alpha or augment.cutmix_alpha above 0")
        one_token = self.model.pooling in ("token", "first", "last")
        if self.augment.image_tokens and one_token and not self.model.image.drops_tokens:
            raise ValueError(
                f"augment.image_tokens drops tokens that model.pooling={self.model.pooling!r} does not use; set it to 0"
            )

    def _check_inputs(self) -> None:
        """Refuse encoders that cannot read the data, or whose sections contradict themselves."""
        self.model.image.check("model.image")
        self.model.text.check("model.text")
        regions = self.model.image.reads_regions
        inputs = get_source(self.data.source).inputs
        if regions and inputs == "images":
            raise ValueError(
                f"model.image.kind={self.model.image.kind!r} reads features, and data.source={self.data.source!r} has"
                " images; write their features with `sfumato regions` for data.source=scan, or set"
                " model.image.kind=frozen"
            )
        if inputs == "regions" and not regions:
            raise ValueError(
                f"data.source={self.data.source!r} has region features, which"
                f" model.image.kind={self.model.image.kind!r} does not read; set it to regions"
            )

    def _check_training(self) -> None:
        """Refuse settings of optimiser and schedule that have no effect or contradict each other."""
        if self.optim.layer_decay != 1 and not (self.model.image.has_blocks or self.model.text.has_blocks):
            raise ValueError(
                "optim.layer_decay needs the blocks of a clip encoder, but this model has none; leave it out"
            )
        if self.optim.freeze_image_epochs and not self.model.image.starts_pretrained:
            raise ValueError(
                f"optim.freeze_image_epochs={self.optim.freeze_image_epochs} freezes a pre-trained image encoder, and"
                f" the section model.image with kind={self.model.image.kind!r} starts from random weights; set it to 0"
            )
        if self.optim.first_stage_epochs >= self.train.epochs:
            raise ValueError(
                f"optim.first_stage_epochs={self.optim.first_stage_epochs} leaves no epoch of"
                f" train.epochs={self.train.epochs} for the second stage; give fewer"
            )
        if self.train.swa_epochs and self.train.ema_decay:
            raise ValueError("give either train.swa_epochs or train.ema_decay, not both")
        if self.train.swa_epochs > self.train.epochs:
            raise ValueError(f"train.swa_epochs={self.train.swa_epochs} is more than train.epochs={self.train.epochs}")


_SIDES: dict[Any, Side] = {ImageEncoderConfig: "image", TextEncoderConfig: "text"}
_TAG_KEYS = ("loss.name", "model.image.kind", "model.text.kind")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: a TOML file.
        overrides: each "section.key=value". Values are TOML (``loss.alpha=0.01``), bare words are strings. Another
            loss.name or model.image.kind resets that section to its defaults.

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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a valid TOML file: {error}") from error
    _use_new_names(values, str(path))
    # Overrides that reset a section are applied first, regardless of their position.
    for override in sorted(overrides, key=lambda o: o.partition("=")[0].strip() not in _TAG_KEYS):
        _apply(values, override)
    return check_recipe(values, f"{path} with its overrides" if overrides else str(path))


def check_recipe(values: dict[str, Any], where: str) -> Recipe:
    """Check the values of a recipe.

    Args:
        values: by section and key, as in the TOML file.
        where: name of the file for errors.

    Returns:
        The recipe.

    Raises:
        UserError: values are wrong; the message lists all of them.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise UserError(f"{where}: " + "\n  ".join(lines)) from error


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a resolved recipe as TOML, with all defaults.

    Args:
        recipe: the recipe.
        path: the file.
    """
    write_atomically(path, tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True)))


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = _new_name(key.strip())
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"override {override!r}: expected section.key=value, e.g. train.epochs=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"override {override!r}: {part!r} is a value, not a section")
        values = inner
    if key in _TAG_KEYS and values.get(parts[-1]) != value:
        values.clear()  # The options of the old loss or encoder do not apply to another one.
    values[parts[-1]] = value


def _old_names(model: type[BaseModel] | None = None, prefix: str = "") -> dict[str, str]:
    """Old key -> new key of every field that was renamed, by its AliasChoices."""
    found: dict[str, str] = {}
    model = model or Recipe
    for name, sections in _fields(model):
        alias = model.model_fields[name].validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else []
        found |= {f"{prefix}{old}": f"{prefix}{name}" for old in choices if old != name}
        for section in sections:
            found |= _old_names(section, f"{prefix}{name}.")
    return found


def _new_name(key: str) -> str:
    """The key under its new name, if it or a section above it was renamed."""
    for old, new in _old_names().items():
        if key == old or key.startswith(f"{old}."):
            key = new + key.removeprefix(old)
    return key


def _use_new_names(values: dict[str, Any], where: str) -> None:
    """Rename the old keys of a recipe, so that an override by either name replaces them."""
    for old, new in _old_names().items():
        *sections, last = old.split(".")
        inner: Any = values
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last in inner:
            canonical = new.rpartition(".")[2]
            if canonical in inner:
                raise UserError(f"{where}: {old} is the old name of {new}; both are given, leave {old} out")
            inner[canonical] = inner.pop(last)


def _explain(item: Any) -> str:
    # The location has the name of a loss ("pcmepp"), which is a tag of a union and no key of the file.
    path = [str(part) for part in item["loc"]]
    tags = {
        section.model_fields["name"].default
        for _, sections in _fields(Recipe)
        for section in sections
        if "name" in section.model_fields
    }
    shown = ".".join(part for i, part in enumerate(path) if not (part in tags and i > 0))
    if item["type"] == "extra_forbidden":
        known = (_keys() | _old_names().keys()) - {shown}
        near = difflib.get_close_matches(shown, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            path[-1], [k.rsplit(".", 1)[-1] for k in known], n=1, cutoff=0.5
        )
        return f"unknown key {shown!r}" + (
            f"; did you mean {_new_name(near[0])!r}?" if near else f"; known: {', '.join(sorted(_keys()))}"
        )
    if item["type"] == "union_tag_invalid":
        known_tags = sorted(re.findall(r"'([^']+)'", item["ctx"]["expected_tags"]))
        key, tag = f"{shown}.{item['ctx']['discriminator'].strip(chr(39))}", item["ctx"]["tag"]
        near = difflib.get_close_matches(tag, known_tags, n=1)
        return f"{key}: unknown {tag!r}; " + (
            f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known_tags)}"
        )
    if item["type"] == "union_tag_not_found":
        return f"{shown}: needs its {item['ctx']['discriminator']}, which determines the other keys"
    message = item["msg"].removeprefix("Value error, ")
    return f"{shown or 'recipe'}: {message}" + (
        "" if not shown or item["type"] == "missing" else f" (got {item['input']!r})"
    )


def _keys(model: type[BaseModel] = Recipe, prefix: str = "") -> set[str]:
    return {prefix + name for name, _ in _fields(model)} | {
        key for name, sections in _fields(model) for section in sections for key in _keys(section, f"{prefix}{name}.")
    }


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, list[type[BaseModel]]]]:
    for name, field in model.model_fields.items():
        if field.annotation in _SIDES:
            yield name, [entry.config for entry in ENCODERS[_SIDES[field.annotation]].values()]
            continue
        options = [field.annotation, *get_args(field.annotation)]
        yield name, [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]


def recipe_files() -> dict[str, Traversable]:
    """The recipes of the package, or in a checkout of its folder ``recipes``.

    Returns:
        name -> file, in the order of the names.
    """
    packaged = resources.files("sfumato") / "recipe_files"
    folder: Traversable = packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "recipes"
    return {
        f.name.removesuffix(".toml"): f
        for f in sorted(folder.iterdir(), key=lambda f: f.name)
        if f.name.endswith(".toml")
    }


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
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`sfumato recipes` lists them"
        raise UserError(f"no recipe {name!r}: neither a file nor one that comes with the package; {hint}")
    return Path(str(known[name]))


def recipe_summary(file: Traversable) -> str:
    """The short description of a recipe.

    Args:
        file: the recipe.

    Returns:
        Its first comment line.
    """
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").strip()
