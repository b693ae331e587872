"""Source "datasets": images with captions in the format of the Hugging Face package datasets.

A folder of ``save_to_disk``, a folder of Parquet files, or a name on the hub.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sfumato.data.images import Problems, image_files
from sfumato.data.manifest import canonical_split, splits_of_items, usable_captions
from sfumato.data.pairs import PairData, SourceItem
from sfumato.errors import UserError, expected_columns, first_line, need

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
    items = (
        item
        for split, rows in splits.items()
        for item in columns.items(
            datasets, rows, f"{path}[{split}]" if split else str(path), split if named else "", problems, seen
        )
    )
    return splits_of_items(items, Path(path), problems, val_fraction, test_fraction)


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
        raise UserError(
            f"cannot read the data set {path!r}: {first_line(error)}. Give a folder of save_to_disk or of Parquet"
            " files, or a name on the hub with a network"
        ) from error
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
            raise UserError(
                f"{path}: {found}, expected one, among {', '.join(features)}; name it: data.options.image=COLUMN"
            )
        if image and image not in images:
            raise UserError(f"{path}: column {image} has {features[image]}, expected images")
        captions = captions or next((key for key in _CAPTIONS if key in features), "")
        if not captions:
            raise UserError(
                f"{path}: no column of captions ({', '.join(_CAPTIONS)}), but {', '.join(features)}; name it:"
                " data.options.captions=COLUMN"
            )
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
                usable = usable_captions(where, texts, problems)
                own = tuple((ids[k], text) for k, text in usable.items()) if len(ids) == len(texts) else ()
                yield SourceItem(source.id, source, own, canonical_split(str(row.get(self.split) or split)), where)


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
