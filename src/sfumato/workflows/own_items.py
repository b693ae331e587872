"""The images of what a person named, a folder, a manifest, archives or a data set, listed without being read."""

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sfumato.data import images
from sfumato.data.coco import coco_images, json_kind, read_coco_captions, read_karpathy
from sfumato.data.feature_tables import EmbeddingRow
from sfumato.data.image_decoding import spelt
from sfumato.data.images import FileImage, Images, ImageSource, Problems, image_files
from sfumato.data.manifest import COLUMNS, MANIFEST_SUFFIXES, manifest_items
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.data.photographs import describe_image, file_fields, names_in, sidecars
from sfumato.data.shards import expand_shards, read_shards
from sfumato.data.sources import is_dataset_folder, read_dataset
from sfumato.errors import UserError
from sfumato.files import RECIPE, read_json, relative_name
from sfumato.ids import fits_pattern, plain_id
from sfumato.models.embed import load_splits, split_names
from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection
from sfumato.search.gallery import Gallery

NamesOf = Callable[[Path], Mapping[str, str]]
"""The names in a folder, see :func:`names_in`."""


@dataclass(frozen=True)
class Source:
    """A place that items come from."""

    path: str  # absolute; of archives as it was given
    kind: str  # "folder", "manifest", "karpathy", "coco", "datasets" or "shards"
    root: str  # folder that the images lie in
    begin: str = ""  # beginning of the ids of its items
    exclude: Sequence[str] = ()  # patterns of paths below the root that are not wanted

    def to_json(self) -> dict[str, Any]:
        """As it is kept; earlier versions know no patterns."""
        return {name: value for name, value in vars(self).items() if value or name != "exclude"}

    def moved(self, root: str) -> "Source":
        """The same source with another root."""
        path = self.path
        if os.path.isabs(path) and Path(path).is_relative_to(self.root):
            path = str(Path(root, Path(path).relative_to(self.root)))
        return replace(self, root=root, path=path)

    def excluding(self, patterns: Sequence[str], below: str = "") -> "Source":
        """The same source without what fits these patterns below a part of it, too; "" forgets those before it."""
        every = [*self.exclude, *(one and glob.escape(below) + one for one in patterns)]
        every += [f"{glob.escape(below)}*/{one}" for one in patterns if one and below and "/" not in one]
        forgotten = len(every) - every[::-1].index("") if "" in every else 0
        return replace(self, exclude=list(dict.fromkeys(every[forgotten:])))


def named_source(data: str) -> Source:
    """The source that a user named."""
    path = Path(data)
    if path.is_dir():
        packed = "shards" if any(path.glob("*.tar")) else "datasets" if is_dataset_folder(path) else ""
        kind = packed if packed and not image_files(path) else "folder"
        return Source(str(path.resolve()), kind, str(path.resolve()))
    suffix = path.suffix.lower()
    if suffix == ".tar" or "{" in data or "*" in data:
        return Source(os.path.abspath(data), "shards", str(Path(expand_shards(data)[0]).resolve().parent))
    if not path.is_file():
        raise UserError(f"there is no folder or file {data}")
    if suffix not in (*MANIFEST_SUFFIXES, ".json"):
        lists = f"a manifest ({', '.join(MANIFEST_SUFFIXES)}), the .json of COCO or Flickr in Karpathy's layout or of"
        known = f"{lists} COCO's own captions, .tar archives, or a folder of the package datasets"
        raise UserError(f"{data} is a file; expected a folder of images, {known}")
    if suffix == ".json" and json_kind(read_json(path)) == "coco":
        return Source(str(path.resolve()), "coco", str(coco_images(path)))
    kind = "karpathy" if suffix == ".json" else "manifest"
    return Source(str(path.resolve()), kind, str(path.resolve().parent))


def sources_of(gallery: Gallery) -> list[Source]:
    """The sources of the images of a gallery."""
    folder = (gallery.metadata.get("pictures") or {}).get("folder")
    known = gallery.metadata.get("sources", [vars(Source(folder, "folder", folder))] if folder else [])
    return [Source(**one) for one in known]


def missing_note(gallery: Gallery) -> str:
    """What to do about folders of images that are not there; "" if all are."""
    gone = [one.root for one in sources_of(gallery) if not os.path.isdir(one.root)]
    if not gone:
        return ""
    new = "NEW" if len(sources_of(gallery)) == 1 else f"{gone[0]}=NEW"
    return f"note: {', '.join(gone)} is not there, so its images cannot be shown; if it has moved, add --images {new}"


@dataclass(frozen=True)
class Item:
    """An image of a source, not read yet."""

    id: str
    file: str  # path below the root; "" in an archive
    stat: str  # size and time of its file and of those beside it; "" if unknown
    image: ImageSource = field(repr=False)
    given: Mapping[str, str]  # fields that the source has for it
    root: Path | None = None  # folder of a file whose texts beside it and folders are fields, too
    beside: Sequence[str] = ()  # names of the files of texts beside it
    shared: int = 0  # number of the first folders of its path that say nothing, as all images lie in them

    def fields(self, data: bytes, problems: Problems) -> dict[str, str]:
        """The fields of an image with this content."""
        if self.root is None:
            return {**describe_image(data), **self.given}
        own = file_fields(self.root, self.file, data, self.beside, problems.remark, self.shared)
        if (begin := self.id.removesuffix(self.file)) != self.id and begin:  # The name of a further source.
            own["folder"] = (begin + own.get("folder", "")).rstrip("/")
        return {**own, **self.given}


def list_items(source: Source, endings: frozenset[str], problems: Problems) -> list[Item]:
    """The images of a source that are wanted; nothing but names is read."""
    problems.excluded.update(dict.fromkeys(source.exclude, 0))
    names_of = functools.cache(names_in)
    if source.kind == "folder":
        names = image_files(Path(source.root), problems, endings=endings, exclude=source.exclude)
        return [_file_item(source, name, name, {}, names_of, 0) for name in names]
    found, wanted = _listed(source, problems, names_of), list[Item]()
    for item in found:
        path = item.file or item.id.removeprefix(source.begin)
        every = [path, *map(str, [*PurePosixPath(path).parents][:-1])]
        if why := next((one for one in source.exclude if any(fits_pattern(p, one) for p in every)), ""):
            problems.excluded[why] += 1
        else:
            wanted.append(item)
    return wanted


def _listed(source: Source, problems: Problems, names_of: NamesOf) -> list[Item]:
    """The images of a source that is no folder."""
    if source.kind == "manifest":
        return list(_manifest_items(source, problems, names_of))
    splits: dict[str, PairData] = {}
    try:
        if source.kind == "datasets":
            splits = read_dataset(source.path, problems)
        elif source.kind == "coco":
            splits = read_coco_captions(source.path, problems, images=source.root)
        elif source.kind == "karpathy":
            splits = read_karpathy(source.path, source.root, problems)
        else:
            splits = {"": read_shards(expand_shards(source.path), problems)}
    except UserError:  # No image has a caption.
        if not problems.bare:
            raise
    more = make_pair_data([*problems.bare], [image for _, image in problems.bare.values()], [[]] * len(problems.bare))
    problems.bare.clear()
    return [item for data in (*splits.values(), more) for item in _data_items(source, data)]


def some_items(source: Source, endings: frozenset[str], problems: Problems) -> list[Item]:
    """:func:`list_items`, of which there must be some."""
    items = list_items(source, endings, problems)
    if not items and not problems.left_out:
        others = "" if problems.is_empty else f":\n{problems.summary()}"
        raise UserError(f"no images in {source.path} (looked for {spelt(endings)}){others}")
    return items


def _file_item(source: Source, id: str, name: str, given: Mapping[str, str], names_of: NamesOf, shared: int) -> Item:
    path = Path(source.root, name)
    beside = sidecars(path.name, names_of(path.parent))
    stat = _stat_of(path, *beside)
    if given:  # What a manifest says may change without the file.
        stat += f" {hashlib.blake2b(json.dumps(given, sort_keys=True).encode(), digest_size=8).hexdigest()}"
    return Item(source.begin + id, name, stat, FileImage(path), given, Path(source.root), beside, shared)


def _stat_of(path: Path, *beside: str) -> str:
    """Size and time of a file and of files beside it."""
    parts = []
    for one in (path, *(path.with_name(name) for name in beside)):
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(one)
            parts.append(f"{found.st_size} {found.st_mtime_ns}")
    return " ".join(parts)


def _manifest_items(source: Source, problems: Problems, names_of: NamesOf) -> Iterator[Item]:
    """The rows of a manifest; rows of one image are joined, and columns that are texts become fields."""
    rows: dict[str, tuple[str, list[str], dict[str, str]]] = {}
    ids: dict[tuple[str, str], str] = {}  # that of each image, different from those of others
    for item, values in manifest_items(Path(source.path), Path(source.root), problems, captioned=False):
        own = {k: v for k, v in values.items() if k and k[0] != "_" and isinstance(v, str) and v and k not in COLUMNS}
        image = relative_name(os.path.join(source.root, values["image"]), source.root)  # Of an absolute path, too.
        id = plain_id(image if item.id == values["image"] else item.id)
        if (id, image) not in ids:
            ids[id, image] = new = next(n for k in itertools.count(1) if (n := id + f"-{k}" * (k > 1)) not in rows)
            rows[new] = image, [], own
            if new != id:
                problems.remark(item.location, f"the id {id!r} is that of {rows[id][0]}; {image} has the id {new!r}")
        rows[ids[id, image]][1].extend(text for _, text in item.texts)
    above = ""
    with contextlib.suppress(ValueError):  # Images on several drives of Windows.
        above = os.path.commonpath([os.path.dirname(image) for image, *_ in rows.values()] or [""])
    for id, (image, captions, own) in rows.items():
        given = own | ({"captions": "\n".join(captions)} if captions else {})
        yield _file_item(source, id, image, given, names_of, len(Path(above).parts))


def _data_items(source: Source, data: PairData) -> list[Item]:
    captions: dict[int, list[str]] = {}
    for image, text in data.pairs.tolist():
        captions.setdefault(image, []).append(data.texts[text])
    found = []
    for i, (id, image) in enumerate(zip(data.image_ids, data.images, strict=True)):
        path = image.path if isinstance(image, FileImage) else None
        name = relative_name(path, source.root) if path else ""
        stat = _stat_of(path or Path(image.location.split("!")[0]))
        found.append(Item(source.begin + plain_id(id), name, stat, image, {"captions": "\n".join(captions.get(i, []))}))
    return found


def item_images(gallery: Gallery, run: str | Path) -> Images | None:
    """The images of the items of a gallery: what its metadata name, and of a collection the uploaded ones."""
    source = gallery.metadata.get("pictures") or {}
    found: Images | None = None
    if "folder" in source:
        found = images.FolderImages(Path(source["folder"]))
    elif "split" in source and (Path(run) / RECIPE).is_file():
        from sfumato.models.recipe import load_recipe  # Runs need torch.

        problems = Problems()
        splits = load_splits(load_recipe(Path(run) / RECIPE).data, problems)
        parts = [splits[name] for name in split_names(splits, source["split"]) if name in splits]
        pairs = (pair for part in parts for pair in zip(part.image_ids, part.images, strict=True))
        by_id: dict[str, ImageSource] = {plain_id(i): image for i, image in pairs}
        by_id |= {plain_id(i): image for i, (_, image) in problems.bare.items()}
        if by_id and not any(isinstance(image, EmbeddingRow) for image in by_id.values()):
            found = images.SplitImages(by_id)
    if sources := sources_of(gallery):
        found = images.SourceImages([Path(one.root) for one in sources], found)
    if isinstance(gallery, GaussianCollection):
        return images.UploadedImages(gallery.folder / UPLOADED_IMAGES, found)
    return found
