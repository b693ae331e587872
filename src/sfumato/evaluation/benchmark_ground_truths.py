"""Ground truths of the benchmarks on emoji, Flickr and CUB Captions; those on COCO are in coco_ground_truths."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sfumato.data.emoji import Style, load_emoji
from sfumato.errors import UserError
from sfumato.evaluation.coco_ground_truths import read_karpathy_ground_truth
from sfumato.evaluation.ground_truth import GroundTruth, ground_truth_from_data, relevance_from_table


def emoji(split: str = "test", *, held_out_style: Style = "fluent3d") -> GroundTruth:
    """The ground truth of the emoji data set: names, tags, subgroups and groups, many to many.

    Args:
        split: "train", "val", "test" or "style".
        held_out_style: drawing style of the split "style", see :func:`~sfumato.data.emoji.load_emoji`.

    Returns:
        The ground truth "emoji".

    Raises:
        ValueError: the split is unknown.
    """
    splits = load_emoji(held_out_style=held_out_style)
    if split not in splits:
        raise ValueError(f"emoji: unknown split {split!r}; known: {', '.join(splits)}")
    return replace(ground_truth_from_data(splits[split], name="emoji"), source=f"emoji, {split}")


def flickr30k(path: str | Path, *, split: str = "test") -> GroundTruth:
    """Flickr30k from Karpathy's dataset_flickr30k.json: 1,000 test images with 5,000 captions.

    Args:
        path: of the JSON file.
        split: "train", "val" or "test".

    Returns:
        The ground truth "flickr30k"; see :func:`~sfumato.evaluation.coco_ground_truths.read_karpathy_ground_truth`.
    """
    return read_karpathy_ground_truth(path, split=split, name="flickr30k")


def flickr8k(path: str | Path, *, split: str = "test") -> GroundTruth:
    """Flickr8k from Karpathy's dataset_flickr8k.json: 1,000 test images with 5,000 captions.

    Args:
        path: of the JSON file.
        split: "train", "val" or "test".

    Returns:
        The ground truth "flickr8k"; see :func:`~sfumato.evaluation.coco_ground_truths.read_karpathy_ground_truth`.
    """
    return read_karpathy_ground_truth(path, split=split, name="flickr8k")


def cub_captions(
    captions: str | Path,
    *,
    classes: str | Path | Iterable[str] | None = None,
    only: str | Path | Iterable[str] | None = None,
    without: str | Path | Iterable[str] | None = None,
    images: str | Path | None = None,
    name: str = "cub",
) -> GroundTruth:
    """CUB Captions: an image and a text match if they show and describe the same class of birds.

    The unseen split is ``classes="testclasses.txt"``, 50 of the 200 classes. The seen split is
    ``classes="trainvalclasses.txt", only="seen_test_images.txt"``, 150 classes; ten images of that list are of unseen
    classes. Training takes the same 150 classes ``without`` those images.

    Args:
        captions: folder of CLASS/IMAGE.txt with one caption per line, as in the public data (text_c10); other files are
            ignored.
        classes: those to keep, as names or as a file with one per line; None keeps all.
        only: images to keep, as "CLASS/IMAGE.jpg" or as a file with one per line; None keeps all.
        without: images to leave out, likewise.
        images: folder of CLASS/IMAGE.jpg; if given, every image must be there.
        name: of the ground truth.

    Returns:
        The ground truth. Image ids are "CLASS/IMAGE.jpg", text ids "CLASS/IMAGE.jpg#LINE" with lines from 0; both
        sorted.

    Raises:
        UserError: a folder, file, class, image or its captions are missing.
    """
    root = Path(captions)
    if not root.is_dir():
        raise UserError(f"there is no folder of captions {root}")
    chosen = sorted(p.name for p in root.iterdir() if p.is_dir()) if classes is None else _names(classes)
    keep = None if only is None else set(_names(only))
    drop = set() if without is None else set(_names(without))
    counts: dict[str, int] = {}
    class_of_image: list[int] = []
    present = set()
    for number, bird in enumerate(sorted(set(chosen))):
        if not (root / bird).is_dir():
            raise UserError(f"{root}: there is no class {bird}; expected the captions of CUB-200-2011")
        for path in sorted((root / bird).glob("*.txt")):
            image = f"{bird}/{path.stem}.jpg"
            present.add(image)
            if (keep is not None and image not in keep) or image in drop:
                continue
            if images is not None and not (Path(images) / image).is_file():
                raise UserError(f"{images}: image {image} is missing; its captions are {path}")
            counts[image] = _n_captions(path)
            class_of_image.append(number)
    if keep is not None and (lost := sorted(keep - present)) and len(lost) == len(keep):
        raise UserError(f"{root}: none of the {len(keep)} images of only= is in these classes, for instance {lost[0]}")
    if not counts:
        raise UserError(f"{root}: found no captions CLASS/IMAGE.txt for this choice of classes and images")
    text_ids = tuple(f"{image}#{i}" for image, n in counts.items() for i in range(n))
    class_of_text = np.repeat(class_of_image, list(counts.values()))
    match = np.array(class_of_image)[:, None] == class_of_text
    i2t, t2i = relevance_from_table(match), relevance_from_table(match.T)
    return GroundTruth(name, tuple(counts), text_ids, i2t, t2i, source=str(root))


def _n_captions(path: Path) -> int:
    """Number of captions in a file, at least 1."""
    try:
        n = sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the captions {path}: {error}") from error
    if not n:
        raise UserError(f"{path}: no captions; expected one per line")
    return n


def _names(given: str | Path | Iterable[str]) -> list[str]:
    """The given names, or the lines of a file of names."""
    if not isinstance(given, str | Path):
        return list(given)
    try:
        lines = Path(given).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the list {given}: {error}") from error
    return [line.strip() for line in lines if line.strip()]
