"""Images with classes: of folders in ImageNet's layout, emoji with groups, or data whose texts are classes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np

from sfumato.data.emoji import EmojiClasses, Style, emoji_classes, load_emoji
from sfumato.data.image_decoding import IMAGE_ENDINGS, spelt
from sfumato.data.images import FileImage, ImageSource
from sfumato.data.pairs import PairData
from sfumato.errors import UserError
from sfumato.models.embed import read_lines


@dataclass(frozen=True, eq=False)
class Labelled:
    """n images, each of one of c classes."""

    sources: tuple[ImageSource, ...]  # n of them
    ids: tuple[str, ...]  # n distinct ids
    labels: np.ndarray  # (n,) class numbers
    keys: tuple[str, ...]  # c distinct keys, the names of the classes in the source
    classes: tuple[str, ...]  # c names of the classes in a prompt; a class may have no image


def read_class_names(path: Path) -> dict[str, str]:
    """Read the names of classes from a text file."""
    lines, numbers, _ = read_lines(path)
    tab = any("\t" in line for line in lines)
    names: dict[str, str] = {}
    for number, line in zip(numbers, lines, strict=True):
        key, _, name = line.partition("\t" if tab else " ")
        if not key.strip() or not name.strip():
            raise UserError(f"{path}:{number}: expected a class, a tab and its name, got {line!r}")
        if key.strip() in names:
            raise UserError(f"{path}:{number}: the class {key.strip()!r} occurred before")
        names[key.strip()] = name.strip()
    return names


def read_class_folder(
    root: Path, names: Mapping[str, str] | None = None, *, endings: Collection[str] = IMAGE_ENDINGS
) -> Labelled:
    """Read images from one folder for each class, with its subfolders."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}")
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise UserError(f"no folders in {root}; expected one for each class, as in {root}/CLASS/image.jpg")
    files = [(f, p) for f in folders for p in sorted(f.rglob("*")) if p.suffix.lower() in endings and p.is_file()]
    if not files:
        raise UserError(f"no images in the folders of {root} (looked for {spelt(endings)})")
    ids = [p.relative_to(root).as_posix() for _, p in files]
    names = names or {f.name: f.name.replace("_", " ") for f in folders}
    return _labelled([FileImage(p) for _, p in files], ids, [f.name for f, _ in files], names, str(root))


def emoji_labelled(kind: str, *, style: str = "fluent3d", names: Mapping[str, str] | None = None) -> Labelled:
    """The emoji of one drawing style, with their group or subgroup as class."""
    if kind not in get_args(EmojiClasses):
        raise UserError(f"the classes of the emoji set are {' and '.join(get_args(EmojiClasses))}, got {kind!r}")
    of = emoji_classes(cast(EmojiClasses, kind))
    data = load_emoji(held_out_style=cast(Style, style))["style"]
    keys = [of[i.split("/")[0]] for i in data.image_ids]
    return _labelled(data.images, data.image_ids, keys, names or {k: k for k in sorted(set(of.values()))}, "emoji")


def data_labelled(data: PairData, names: Mapping[str, str] | None = None, *, where: str = "the data") -> Labelled:
    """Labelled images from data with one text for each image, the name of its class."""
    texts: list[set[str]] = [set() for _ in data.image_ids]
    for image, text in data.pairs:
        texts[image].add(data.texts[text])
    if (bad := next((i for i, own in enumerate(texts) if len(own) != 1), None)) is not None:
        raise UserError(
            f"{where}: image {data.image_ids[bad]} has {len(texts[bad])} texts; expected one each, its class"
        )
    keys = [next(iter(own)) for own in texts]
    return _labelled(data.images, data.image_ids, keys, names or {k: k for k in sorted(set(keys))}, where)


def _labelled(
    sources: Sequence[ImageSource], ids: Sequence[str], keys: Sequence[str], names: Mapping[str, str], where: str
) -> Labelled:
    number = {key: c for c, key in enumerate(names)}
    if (unknown := next((key for key in keys if key not in number), None)) is not None:
        raise UserError(
            f"{where}: there is no name for the class {unknown!r}; the first that have one:"
            f" {', '.join(list(names)[:5])}"
        )
    labels = np.array([number[key] for key in keys], np.int64)
    return Labelled(tuple(sources), tuple(ids), labels, tuple(names), tuple(names.values()))
