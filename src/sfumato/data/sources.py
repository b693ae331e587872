"""Sources of data: section ``data`` of a recipe, and SOURCES, the registry of what ``data.source`` can name.

A source is a function that reads the splits of some data, see :class:`ReadSource`. The package brings ten; another is
registered with :func:`register_source` and then works in every recipe.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from sfumato.data.coco import CocoOptions, read_coco_captions, read_karpathy
from sfumato.data.emoji import EmojiOptions, load_emoji
from sfumato.data.hub_datasets import DatasetOptions, read_dataset
from sfumato.data.images import Problems
from sfumato.data.layouts import CubOptions, read_cub, read_embedding_pairs, read_scan
from sfumato.data.manifest import MANIFEST_SUFFIXES, read_image_folder, read_manifest
from sfumato.data.pairs import EpochOver, EqualTexts, PairData, Positives
from sfumato.data.shards import expand_shards, read_shards
from sfumato.data.splits import parse_part
from sfumato.errors import UserError
from sfumato.imports import claim_name

Inputs = Literal["images", "regions", "either", "embeddings"]
"""What a source has for a model to look at: encoded images, region features, one or the other, or embeddings on both
sides."""


class DataConfig(BaseModel):
    """Section ``data`` of a recipe: the data, and the sampling of its batches."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    source: str = "emoji"
    """name in SOURCES: emoji, manifest, folder, karpathy, coco, shards, datasets, scan, cub, embeddings, or a
    registered source"""
    path: str = ""
    """manifest (.jsonl, .csv, .parquet), image folder, Karpathy JSON, COCO's captions_*.json or a folder of them
    (coco), folder of region features (scan), folder of CUB-200-2011, the training shards (folder, glob or braces:
    cc3m-{00000..00331}.tar), or a folder or hub name for the package datasets; embeddings: the pairs (.csv, .jsonl,
    .json, .parquet), row i with row i without it; not used by emoji"""
    val_path: str = Field("", description="shards: the validation shards, read as a whole; none by default")
    samples_per_epoch: PositiveInt = Field(1_000_000, description="shards: number of pairs per epoch")
    images: str = ""
    """manifest, karpathy, coco: folder of the images; by default the folder of data.path, or for coco the folder above
    it if it is named annotations. karpathy, coco: also an uncompressed .tar file. embeddings: those of the images
    (.npy, .safetensors, .parquet, or a folder of shards; a.npy+b.npy puts channels side by side)"""
    texts: str = Field("", description="embeddings: those of the texts, as data.images")
    epoch_over: EpochOver = "images"
    """what an epoch visits once: each image with one of its texts, or each pair. groups: batches with one image of each
    group, or class, as many as texts fill"""
    positives: Positives = "listed"
    """the matches of a batch: all pairs that the data lists, or only the pairs that were sampled"""
    equal_texts: EqualTexts = "merged"
    """equally worded texts of several images. merged: one text, which matches all of these images; separate: each text
    matches its own image only, as in the official protocols of COCO and Flickr. Case and white space make no
    difference"""
    graded: bool = False
    """label of a pair that is not listed: half the TF-IDF cosine of its text with the texts of its image, from 0 to
    1/2; false: 0"""
    kind_weights: dict[str, NonNegativeFloat] = Field(default={})
    """relative frequency of each kind of text in a batch; by default texts are sampled uniformly"""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """fraction of the images for validation, if the data names no splits"""
    test_fraction: float = Field(0.1, ge=0, lt=1)
    """fraction of the images for the test, if the data names no splits"""
    noise_rate: float = Field(0.0, ge=0, le=1)
    """fraction of the training pairs that get a wrong image: noisy correspondence, the same for every train.seed"""
    leave_out: str = ""
    """I/K, e.g. 0/2: train without part I of K equal parts of the training images, as `sfumato audit --cross-fit K`
    does"""
    held_out_wordings: str = ""
    """I/K, e.g. 0/5: train without part I of K of each image's texts, and fit the probabilities of galleries with the
    training images on these; split wordings has them. emoji: see data.options"""
    max_problem_fraction: float = Field(0.01, ge=0, le=1)
    """stop if a larger fraction of the training and validation images is unusable; up to three unusable images never
    stop a run"""
    options: dict[str, Any] = Field(
        default={}, description="options of emoji, coco, cub, datasets, or a source from outside"
    )

    @model_validator(mode="before")
    @classmethod
    def _manifest_by_its_suffix(cls, values: Any) -> Any:
        """The source of a recipe for a folder, where the path names a manifest."""
        folder = isinstance(values, dict) and values.get("source") == "folder"
        if folder and Path(str(values.get("path", ""))).suffix.lower() in MANIFEST_SUFFIXES:
            return values | {"source": "manifest"}
        return values

    @field_validator("source")
    @classmethod
    def _known(cls, name: str) -> str:
        get_source(name)
        return name

    @model_validator(mode="after")
    def _consistent(self) -> "DataConfig":
        source = get_source(self.source)
        if source.needs_path and not self.path:
            raise ValueError(f"data.path must name the {self.source} to read, e.g. data.path=my/data")
        embeddings = source.inputs == "embeddings"
        if embeddings and not (self.images and self.texts):
            raise ValueError(
                "data.source='embeddings' needs data.images and data.texts, e.g. data.images=images.npy"
                " data.texts=texts.npy"
            )
        if self.texts and not embeddings:
            raise ValueError(f"data.texts is for data.source=embeddings, not {self.source!r}; leave it out")
        for part in filter(None, (self.leave_out, self.held_out_wordings)):
            parse_part(part)
        if source.streamed:
            needs_all = {
                "noise_rate": self.noise_rate,
                "graded": self.graded,
                "leave_out": self.leave_out,
                "held_out_wordings": self.held_out_wordings,
            }
            if wrong := next((name for name, given in needs_all.items() if given), None):
                raise ValueError(
                    f"data.{wrong} needs all pairs in memory, but data.source={self.source!r} is read as a stream;"
                    " leave it out, or take another source"
                )
        source.check_options(self.source, self.options)
        return self


ReadSource = Callable[[DataConfig, Problems], dict[str, PairData]]
"""Reads the splits of some data, from section ``data`` of the recipe, whose options have passed the source's own model.

The problems receive every item that cannot be used, which is then left out. Training needs the split "train", and takes
"val" for validation if it is there; other names are free. A UserError says that the data is missing, or that nothing in
it can be used, and what to do.
"""


@dataclass(frozen=True)
class Source:
    """An entry of SOURCES."""

    read: ReadSource  # reads the splits
    options: type[BaseModel] | None = None
    needs_path: bool = True  # whether ``data.path`` must be given
    inputs: Inputs = "images"
    streamed: bool = False

    def check_options(self, name: str, values: Mapping[str, Any]) -> None:
        """Check ``data.options`` against the model of the source."""
        if self.options is None:
            if values:
                raise ValueError(f"data.options: data.source={name!r} takes no options; leave out {min(values)}")
            return
        try:
            self.options.model_validate(values)
        except ValidationError as error:
            wrong = (f"data.options.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ValueError("; ".join(wrong)) from error


def register_source(
    name: str,
    read: ReadSource,
    *,
    options: type[BaseModel] | None = None,
    needs_path: bool = False,
    inputs: Inputs = "images",
) -> None:
    """Make a source known, so that ``data.source = "NAME"`` works in a recipe of this process."""
    claim_name("source", name, SOURCES, read)
    SOURCES[name] = Source(read, options, needs_path, inputs)


def get_source(name: str) -> Source:
    """The entry of a name."""
    if name not in SOURCES:
        near = get_close_matches(name, SOURCES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown source {name!r}; {hint}known: {', '.join(SOURCES)}")
    return SOURCES[name]


def _fractions(config: DataConfig) -> dict[str, float]:
    return {"val_fraction": config.val_fraction, "test_fraction": config.test_fraction}


def _emoji(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    options = EmojiOptions.model_validate(config.options)
    return load_emoji(**options.model_dump())


def _manifest(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    return read_manifest(_existing(config), problems, image_root=config.images or None, **_fractions(config))


def _karpathy(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    path = _existing(config)
    return read_karpathy(path, config.images or path.parent, problems)


def _coco(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    year = CocoOptions.model_validate(config.options).year
    return read_coco_captions(
        _existing(config), problems, images=config.images or None, year=year, **_fractions(config)
    )


def _shards(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    return {"val": read_shards(expand_shards(config.val_path), problems)} if config.val_path else {}


def _cub(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    options = CubOptions.model_validate(config.options)
    return read_cub(_existing(config), problems, options, **_fractions(config))


def _datasets(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    columns: dict[str, Any] = DatasetOptions.model_validate(config.options).model_dump()
    return read_dataset(config.path, problems, **columns | _fractions(config))


def _embeddings(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    pairs = _existing(config) if config.path else None
    return read_embedding_pairs(config.images, config.texts, problems, pairs=pairs, **_fractions(config))


def _existing(config: DataConfig) -> Path:
    path = Path(config.path)
    if not path.exists():
        raise UserError(
            f"data.path: there is no {path}"
            + ("" if path.is_absolute() else f" in the current folder ({Path.cwd()})")
            + "; say where the data are with data.path=..."
        )
    return path


SOURCES: dict[str, Source] = {
    "emoji": Source(_emoji, EmojiOptions, needs_path=False),
    "manifest": Source(_manifest, inputs="either"),
    "folder": Source(lambda c, problems: read_image_folder(_existing(c), problems, **_fractions(c))),
    "karpathy": Source(_karpathy),
    "coco": Source(_coco, CocoOptions),
    "shards": Source(_shards, streamed=True),
    "scan": Source(lambda c, problems: read_scan(_existing(c), problems), inputs="regions"),
    "cub": Source(_cub, CubOptions),
    "datasets": Source(_datasets, DatasetOptions),
    "embeddings": Source(_embeddings, needs_path=False, inputs="embeddings"),
}
"""Sources of data by name."""
