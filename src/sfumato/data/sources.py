"""Sources of data: section ``data`` of a recipe, and SOURCES, the registry of what ``data.source`` can name.

A source is a function that reads the splits of some data, see :class:`ReadSource`. The package brings ten; another is
registered with :func:`register_source` and then works in every recipe.

The source "datasets" is here, too: images with captions in the format of the Hugging Face package datasets, a folder of
``save_to_disk``, a folder of Parquet files, or a name on the hub.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError, field_validator, model_validator

from sfumato.data import manifest
from sfumato.data.coco import CocoOptions, read_coco_captions, read_karpathy
from sfumato.data.emoji import EmojiOptions, load_emoji
from sfumato.data.images import Problems, image_files
from sfumato.data.layouts import CubOptions, read_cub, read_embedding_pairs, read_scan
from sfumato.data.pairs import EpochOver, EqualTexts, PairData, Positives, SourceItem
from sfumato.data.shards import expand_shards, read_shards
from sfumato.data.splits import parse_part
from sfumato.errors import UserError, did_you_mean, expected_columns, first_line, need
from sfumato.imports import claim_name

_CAPTIONS = ("captions", "caption", "texts", "text", "sentences")
_IDS = ("id", "image_id", "img_id", "imgid", "cocoid")
_BLOCK = 1_000


class DatasetOptions(BaseModel):
    """The columns of a data set; what is left out is found by its type or name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str = Field("", description="column of the images; by default the only one of images")
    captions: str = Field("", description=f"column of the captions; by default {', '.join(_CAPTIONS)}")
    id: str = Field("", description=f"column of the ids of images; by default {', '.join(_IDS)}, or the file's name")
    name: str = Field("", description="configuration of a data set of the hub that has several")


@dataclass(frozen=True)
class RowImage:
    """The encoded image of a row, read when it is needed."""

    id: str
    rows: Any = field(repr=False, compare=False)  # the data set with this column alone, not decoded
    number: int = field(compare=False)
    location: str = field(compare=False)

    def read_bytes(self) -> bytes:
        """The bytes in the row, or of the file that it names."""
        [value] = self.rows[self.number].values()
        if value is None or (value["bytes"] is None and not value["path"]):
            raise OSError(f"{self.location}: no image")
        return bytes(value["bytes"]) if value["bytes"] is not None else Path(value["path"]).read_bytes()


def read_dataset(
    path: str | Path,
    problems: Problems,
    *,
    image: str = "",
    captions: str = "",
    id: str = "",
    name: str = "",
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> dict[str, PairData]:
    """Read images with captions from a data set of the package datasets.

    Args:
        path: a folder of ``save_to_disk`` or of Parquet files, or a name on the Hugging Face hub.
        problems: receives rows without a caption, and images that occur in another split, too.
        image: column of the images; "" takes the only one of images.
        captions: column of the captions, each a string or a list of strings; "" takes captions, caption, texts, text or
            sentences.
        id: column of the ids; "" takes id, image_id, img_id, imgid or cocoid. Rows with one id are one image with
            several captions. Without such a column it is the name of the image's file, where rows of one name with
            other images get ids of their own; else the number of the row.
        name: configuration of a data set of the hub that has several.
        val_fraction: fraction of the images for "val", where the data set has neither several splits nor a column
            "split".
        test_fraction: the same for "test".

    Returns:
        split -> data. Images stay on disk, and are read when they are needed.

    Raises:
        UserError: the package or the data set is missing, a column cannot be found, or nothing is usable.
    """
    with need("datasets", "data sets of the Hugging Face hub need the package datasets"):
        import datasets
    splits = _loaded(datasets, str(path), name)
    named, seen = len(splits) > 1, dict[str, RowImage]()
    columns = _Columns.of(datasets, splits[min(splits)], str(path), (image, captions, id))

    def items() -> Iterator[SourceItem]:
        for split, rows in splits.items():
            where = f"{path}[{split}]" if split else str(path)
            yield from columns.items(datasets, rows, where, split if named else "", problems, seen)

    return manifest.splits_of_items(items(), Path(path), problems, val_fraction, test_fraction)


def is_dataset_folder(path: Path) -> bool:
    """Whether ``save_to_disk`` wrote a folder; or Parquet files are in it or its folder "data", and no images."""
    if not path.is_dir():
        return False
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return True
    return any(next(folder.glob("*.parquet"), None) for folder in (path, path / "data")) and not image_files(path)


def _loaded(datasets: Any, path: str, name: str) -> dict[str, Any]:
    """The splits of a data set by their names."""
    saved = any((Path(path) / file).is_file() for file in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, name or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        ways = "Give a folder of save_to_disk or of Parquet files, or a name on the hub with a network"
        raise UserError(f"cannot read the data set {path!r}: {first_line(error)}. {ways}") from error
    return dict(found) if isinstance(found, datasets.DatasetDict) else {"": found}


@dataclass(frozen=True)
class _Columns:
    image: str
    captions: str
    id: str  # "" for none
    split: str

    @classmethod
    def of(cls, datasets: Any, rows: Any, path: str, given: tuple[str, str, str]) -> "_Columns":
        features = rows.features
        for name in filter(None, given):
            if name not in features:
                raise UserError(f"{path}: {expected_columns(list(features), [name])}")
        images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
        image, captions, identity = given
        if not image and len(images) != 1:
            found = f"{len(images)} columns of images ({', '.join(images)})" if images else "no column of images"
            raise UserError(f"{path}: {found}, among {', '.join(features)}; name one: data.options.image=COLUMN")
        if image and image not in images:
            raise UserError(f"{path}: column {image} has {features[image]}, expected images")
        captions = captions or next((key for key in _CAPTIONS if key in features), "")
        if not captions:
            found = f"no column of captions ({', '.join(_CAPTIONS)}), but {', '.join(features)}"
            raise UserError(f"{path}: {found}; name it: data.options.captions=COLUMN")
        identity = identity or next((key for key in _IDS if key in features), "")
        return cls(image or images[0], captions, identity, "split" if "split" in features else "")

    def items(
        self, datasets: Any, rows: Any, location: str, split: str, problems: Problems, seen: dict[str, RowImage]
    ) -> Iterator[SourceItem]:
        """The usable rows of a split; ``seen`` has the first image of each file name."""
        encoded = rows.select_columns([self.image]).cast_column(self.image, datasets.Image(decode=False))
        said = [key for key in (self.captions, self.id, self.split, "caption_ids") if key in rows.features]
        others = rows.select_columns(said)
        for start in range(0, len(rows), _BLOCK):
            block = others[start : start + _BLOCK]
            names = itertools.repeat("") if self.id else _file_names(encoded, start)
            for number, (name, *values) in enumerate(zip(names, *block.values(), strict=False), start):
                row = dict(zip(said, values, strict=True))
                where = f"{location}:row {number}"
                own_id = f"{split or 'row'}-{number}"
                source = RowImage(str(row[self.id]) if self.id else name or own_id, encoded, number, where)
                if name and not _same_image(seen.setdefault(name, source), source):
                    source = replace(source, id=own_id)
                given = row[self.captions]
                texts = given if isinstance(given, list) else [given or ""]
                if not all(isinstance(text, str) for text in texts):
                    raise UserError(f"{where}: {self.captions} has {given!r}, expected a string or a list of strings")
                ids = row.get("caption_ids") or [""] * len(texts)
                usable = manifest.usable_captions(where, texts, problems)
                own = tuple((ids[k], text) for k, text in usable.items()) if len(ids) == len(texts) else ()
                part = manifest.canonical_split(str(row.get(self.split) or split))
                yield SourceItem(source.id, source, own, part, where)


def _same_image(first: RowImage, other: RowImage) -> bool:
    """Whether two rows of one file name have the same image: names without their folders may be equal by chance."""
    try:
        return first is other or first.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _file_names(encoded: Any, start: int) -> list[str]:
    """The names of the images' files in a block of rows, without their bytes; "" where there is none."""
    import pyarrow.compute

    [column] = encoded.with_format("arrow")[start : start + _BLOCK].columns
    paths = pyarrow.compute.struct_field(column, "path").to_pylist()
    return [Path(path).name if path else "" for path in paths]


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
    samples_per_epoch: int = Field(1_000_000, gt=0, description="shards: number of pairs per epoch")
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
    options: dict[str, Any] = Field(default={})
    """options of emoji, coco, cub, datasets, or a source from outside"""

    @model_validator(mode="before")
    @classmethod
    def _manifest_by_its_suffix(cls, values: Any) -> Any:
        """The source of a recipe for a folder, where the path names a manifest."""
        folder = isinstance(values, dict) and values.get("source") == "folder"
        if folder and Path(str(values.get("path", ""))).suffix.lower() in manifest.MANIFEST_SUFFIXES:
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
            raise ValueError("data.source='embeddings' needs data.images and data.texts, e.g. images.npy and texts.npy")
        if self.texts and not embeddings:
            raise ValueError(f"data.texts is for data.source=embeddings, not {self.source!r}; leave it out")
        for part in filter(None, (self.leave_out, self.held_out_wordings)):
            parse_part(part)
        if source.streamed:
            needs_all = ("noise_rate", "graded", "leave_out", "held_out_wordings")
            if wrong := next((name for name in needs_all if getattr(self, name)), None):
                why = f"needs all pairs in memory, but data.source={self.source!r} is read as a stream"
                raise ValueError(f"data.{wrong} {why}; leave it out, or take another source")
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
        hint = did_you_mean(name, SOURCES, "")
        raise ValueError(f"unknown source {name!r}; {hint and hint + ' '}known: {', '.join(SOURCES)}")
    return SOURCES[name]


def _fractions(config: DataConfig) -> dict[str, float]:
    return {"val_fraction": config.val_fraction, "test_fraction": config.test_fraction}


def _emoji(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    return load_emoji(**EmojiOptions.model_validate(config.options).model_dump())


def _manifest(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    return manifest.read_manifest(_existing(config), problems, image_root=config.images or None, **_fractions(config))


def _karpathy(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    path = _existing(config)
    return read_karpathy(path, config.images or path.parent, problems)


def _coco(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    year, images = CocoOptions.model_validate(config.options).year, config.images or None
    return read_coco_captions(_existing(config), problems, images=images, year=year, **_fractions(config))


def _shards(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    return {"val": read_shards(expand_shards(config.val_path), problems)} if config.val_path else {}


def _cub(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    fractions = config.val_fraction, config.test_fraction
    return read_cub(_existing(config), problems, CubOptions.model_validate(config.options), fractions)


def _datasets(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    columns: dict[str, Any] = DatasetOptions.model_validate(config.options).model_dump()
    return read_dataset(config.path, problems, **columns | _fractions(config))


def _embeddings(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    pairs, fractions = _existing(config) if config.path else None, (config.val_fraction, config.test_fraction)
    return read_embedding_pairs(config.images, config.texts, problems, pairs, fractions)


def _existing(config: DataConfig) -> Path:
    path = Path(config.path)
    if not path.exists():
        where = "" if path.is_absolute() else f" in the current folder ({Path.cwd()})"
        raise UserError(f"data.path: there is no {path}{where}; say where the data are with data.path=...")
    return path


SOURCES: dict[str, Source] = {
    "emoji": Source(_emoji, EmojiOptions, needs_path=False),
    "manifest": Source(_manifest, inputs="either"),
    "folder": Source(lambda c, problems: manifest.read_image_folder(_existing(c), problems, **_fractions(c))),
    "karpathy": Source(_karpathy),
    "coco": Source(_coco, CocoOptions),
    "shards": Source(_shards, streamed=True),
    "scan": Source(lambda c, problems: read_scan(_existing(c), problems), inputs="regions"),
    "cub": Source(_cub, CubOptions),
    "datasets": Source(_datasets, DatasetOptions),
    "embeddings": Source(_embeddings, needs_path=False, inputs="embeddings"),
}
"""Sources of data by name."""
