"""Source "cub": CUB Captions, where every image of a class of birds matches every caption of the class.

The images are those of CUB-200-2011, the captions ten for each image, in a file beside them in another folder
(text_c10), and the splits lists of classes for zero-shot learning. Groups of images are classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from sfumato.data.captioned import hashed_split
from sfumato.data.images import FileImage, Problems
from sfumato.data.pairs import PairData
from sfumato.errors import UserError

TrainPairs = Literal["class", "own"]


class CubOptions(BaseModel):
    """Section ``data.options`` of the source "cub"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    captions: str = Field("text_c10", description="folder of CLASS/IMAGE.txt; relative to data.path, or absolute")
    lists: str = Field(
        "splits",
        description="folder of trainvalclasses.txt, testclasses.txt, trainclasses1.txt to valclasses3.txt and"
        " seen_test_images.txt; relative to data.path, or absolute",
    )
    fold: Literal[0, 1, 2, 3] = Field(
        0,
        description="0: train on the 150 classes of the benchmark; 1, 2, 3: train on 100 of them and validate on the"
        " other 50, to choose hyper-parameters",
    )
    classes: tuple[str, ...] = Field(
        (),
        description="read these classes alone, e.g. 192.Downy_Woodpecker, and divide their images into train, val and"
        " test by a hash of their ids; lists and fold have no effect",
    )
    train_pairs: TrainPairs = Field(
        "class",
        description="training pairs. class: every image with every caption of its class; own: every image with its own"
        " captions, for data.positives=sampled, which makes all pairs of a class in a batch matches",
    )


@dataclass(frozen=True)
class _Bird:
    id: str
    image: FileImage
    group: int
    captions: tuple[str, ...]


def read_cub(
    root: str | Path,
    problems: Problems,
    options: CubOptions | None = None,
    *,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> dict[str, PairData]:
    """Read CUB Captions.

    Papers: Reed et al., CVPR 2016 (the captions); Xian et al., CVPR 2017 (the classes); Chun et al., CVPR 2021 (the
    benchmark).
    """
    root, options = Path(root), options or CubOptions()
    for folder in (root / "images", root / options.captions):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; expected images/CLASS/IMAGE.jpg and CLASS/IMAGE.txt")
    if options.classes:
        chosen = {"": list(options.classes)}
    else:
        lists = root / options.lists
        train = "trainvalclasses" if options.fold == 0 else f"trainclasses{options.fold}"
        chosen = {"train": _lines(lists / f"{train}.txt"), "test": _lines(lists / "testclasses.txt")}
        if options.fold:
            chosen["val"] = _lines(lists / f"valclasses{options.fold}.txt")
        seen = set(_lines(lists / "seen_test_images.txt"))
    number = {bird: i for i, bird in enumerate(sorted({bird for birds in chosen.values() for bird in birds}))}
    found: dict[str, list[_Bird]] = {}
    for name, birds in chosen.items():
        for bird in sorted(set(birds)):
            for one in _birds(root, options.captions, bird, number[bird], problems):
                if options.classes:
                    split = hashed_split(one.id, val_fraction, test_fraction)
                else:
                    split = "seen" if name == "train" and one.id in seen else name
                found.setdefault(split, []).append(one)
    if not found:
        raise UserError(f"{root} holds no usable pair of image and caption:\n{problems.summary()}")
    return {name: _split(own, name == "train" and options.train_pairs == "own") for name, own in found.items()}


def _birds(root: Path, captions: str, bird: str, group: int, problems: Problems) -> list[_Bird]:
    """The usable images of a class."""
    folder = root / "images" / bird
    if not folder.is_dir():
        raise UserError(f"there is no class {bird} in {root / 'images'}; expected those of CUB-200-2011")
    usable = []
    for path in sorted(folder.glob("*.jpg")):
        text = root / captions / bird / f"{path.stem}.txt"
        try:
            lines = [line.strip() for line in text.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            problems.add(path, f"captions {text} cannot be read: {error}")
            continue
        if lines:
            usable.append(_Bird(f"{bird}/{path.name}", FileImage(path), group, tuple(lines)))
        else:
            problems.add(path, f"captions {text} are empty")
    return usable


def _split(birds: Sequence[_Bird], own_pairs: bool) -> PairData:
    of_image = np.array([one.group for one in birds], dtype=np.int64)
    counts = [len(one.captions) for one in birds]
    image_of_text = np.repeat(np.arange(len(birds)), counts)
    if own_pairs:
        pairs = np.stack([image_of_text, np.arange(len(image_of_text))], axis=1)
    else:
        of_text = of_image[image_of_text]
        blocks = (np.meshgrid(np.flatnonzero(of_image == g), np.flatnonzero(of_text == g)) for g in np.unique(of_image))
        pairs = np.concatenate([np.stack([images.ravel(), texts.ravel()], axis=1) for images, texts in blocks])
    return PairData(
        tuple(one.id for one in birds),
        tuple(one.image for one in birds),
        tuple(f"{one.id}#{k}" for one in birds for k in range(len(one.captions))),
        tuple(caption for one in birds for caption in one.captions),
        ("caption",) * len(image_of_text),
        pairs,
        of_image,
    )


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the list {path}: {error}; data.options.lists is the folder of the splits of Xian et al., CVPR"
            " 2017, which the code of PCME has in datasets/annotations/cub"
        ) from error
    return [line.strip() for line in lines if line.strip()]
