"""Ground truths of the benchmarks: on COCO (5K, 1K, CxC, RPC2, ECCV Caption, PMRP), emoji, Flickr and CUB Captions.

Karpathy's split files are read here too.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sfumato.data.coco import coco_image_id, karpathy_entries
from sfumato.data.emoji import Style, load_emoji
from sfumato.data.layouts import read_list
from sfumato.errors import UserError
from sfumato.evaluation import ground_truth
from sfumato.evaluation.ground_truth import GroundTruth, in_folds, in_folds_of, read_lists, relevance_from_table
from sfumato.files import read_json
from sfumato.ids import first_twice
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import RECALLS

_MAX_OUTSIDE = 0.01
"""Largest fraction of positives outside of the gallery; above it the files belong to another benchmark."""


def eccv_caption(folder: str | Path | None = None) -> dict[str, GroundTruth]:
    """Read the ground truths of the ``eccv_caption`` package: COCO 5K and 1K, CxC, RPC2 and ECCV Caption.

    The package's files are read, but its code is never run. CxC has more positives than COCO and 24,972 text queries.
    Its positives are the 35,585 pairs that people rated 3 or higher: 29 of COCO's own 25,000 pairs are rated lower and
    are not among them, and 28 captions have no positive. RPC2 is R-Precision on CxC's pairs added to COCO's own, 35,614
    (Pishdad et al., 4.1 and 4.3), and under another name on CxC's alone. In the folds of COCO 1K only positives of the
    same fold count. ECCV Caption has 1,261 image queries and 1,332 text queries; two texts among its positives are not
    in the gallery, so they count as relevant but can never be found.
    """
    root = _installed() if folder is None else Path(folder)
    five = _coco_of_package(root)
    ground_truths = _with_folds(five, root / "coco_test_ids.npy")
    cxc = _from_lists(root, "cxc", five, RECALLS)
    of_rpc2 = {"rpc2": _union(cxc, five), "rpc2_cxc": cxc}
    of_rpc2 = {name: replace(one, name=name, metrics=("r_precision",)) for name, one in of_rpc2.items()}
    ground_truths |= {"cxc": cxc} | of_rpc2
    for name in ("cxc", *of_rpc2):
        ground_truths[f"{name}_1k"] = in_folds_of(ground_truths["coco_1k"], ground_truths[name], name=f"{name}_1k")
    ground_truths["eccv"] = _from_lists(root, "eccv", five, ("map@r", "r_precision", *RECALLS))
    if (root / "pm_image_to_caption.json").is_file():
        listed = _from_lists(root, "pm", five, ("r_precision",))
        ground_truths["pmrp_eccv_caption"] = replace(listed, name="pmrp_eccv_caption")
    return ground_truths


def _coco_of_package(root: Path) -> GroundTruth:
    """COCO 5K by the id lists of the package."""
    try:
        texts = tuple(str(int(i)) for i in np.load(root / "coco_test_ids.npy", allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read the caption ids {root / 'coco_test_ids.npy'}: {error}") from error
    own_path = root / "original_caption_to_image.json"
    own = read_lists(own_path)
    missing = [text for text in texts if len(own.get(text, [])) != 1]
    if missing:
        raise UserError(f"{own_path}: caption {missing[0]} has {len(own.get(missing[0], []))} images, expected one")
    images = tuple(dict.fromkeys(own[text][0] for text in texts))
    pairs = ((own[text][0], text) for text in texts)
    return ground_truth.ground_truth_from_pairs("coco_5k", images, texts, pairs, metrics=RECALLS, source=str(root))


def _union(first: GroundTruth, second: GroundTruth) -> GroundTruth:
    """The matches of both, of ground truths with the same ids."""

    def both(a: Relevance, b: Relevance) -> Relevance:
        pairs = np.concatenate([a.query_of_item, b.query_of_item]), np.concatenate([a.indices, b.indices])
        return Relevance.from_pairs(*pairs, n_queries=a.n_queries, n_gallery=a.n_gallery, n_outside=a.n_outside)

    return replace(first, i2t=both(first.i2t, second.i2t), t2i=both(first.t2i, second.t2i))


def _installed() -> Path:
    spec = importlib.util.find_spec("eccv_caption")
    if spec is None or not spec.submodule_search_locations:
        missing = "the id lists of CxC and ECCV Caption are in the package eccv_caption, which is not installed"
        way = 'Install it with pip install "sfumato[benchmarks]", or name the folder of its JSON files'
        raise UserError(f"{missing}. {way}")
    return Path(spec.submodule_search_locations[0]) / "data"


def _from_lists(root: Path, prefix: str, base: GroundTruth, metrics: tuple[str, ...]) -> GroundTruth:
    sides = []
    both = base.image_ids, base.text_ids
    for what, other, (queries, gallery) in (("image", "caption", both), ("caption", "image", both[::-1])):
        path = root / f"{prefix}_{what}_to_{other}.json"
        listed = read_lists(path)
        columns, rows = {x: j for j, x in enumerate(gallery)}, {q: i for i, q in enumerate(queries)}
        if unknown := [query for query in listed if query not in rows]:
            raise UserError(f"{path}: {what} {unknown[0]} is not among the {len(queries)} {what}s of the benchmark")
        index: list[list[int]] = [[] for _ in queries]
        outside = np.zeros(len(queries), np.int64)
        for query, items in listed.items():
            found = [columns[item] for item in dict.fromkeys(items) if item in columns]
            index[rows[query]], outside[rows[query]] = found, len(dict.fromkeys(items)) - len(found)
        if outside.sum() > _MAX_OUTSIDE * sum(map(len, listed.values())):
            raise UserError(f"{path}: {outside.sum()} of its positives are not in the gallery; of another benchmark?")
        sides.append(Relevance.from_lists(index, n_gallery=len(gallery), n_outside=outside if outside.any() else None))
    return GroundTruth(prefix, base.image_ids, base.text_ids, sides[0], sides[1], metrics, source=str(root))


# ---------------------------------------------------------------- Karpathy's split files
def read_karpathy_ground_truth(
    path: str | Path, *, split: str = "test", name: str, coco_ids: bool = False, captions_per_image: int | None = None
) -> GroundTruth:
    """Read a split of dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json; no image is needed."""
    images: list[str] = []
    pairs: list[tuple[str, str]] = []
    for entry in karpathy_entries(path):
        if (mistake := entry.mistake or "no sentences" * (not entry.sentences)) and entry.split in (split, ""):
            raise UserError(f"{entry.location}: malformed entry: {mistake}")
        if entry.split != split:
            continue
        image = coco_image_id(entry.filename) if coco_ids else entry.filename
        images.append(image)
        pairs += [(image, sentence) for sentence, _ in entry.sentences[:captions_per_image]]
    if not pairs:
        raise UserError(f"{path}: the split {split!r} has no image with captions")
    texts = [text for _, text in pairs]
    for what, ids in (("filename", images), ("sentid", texts)):
        if (twice := first_twice(ids)) is not None:
            raise UserError(f"{path}: {what} {twice} occurs more than once in the split {split!r}")
    return ground_truth.ground_truth_from_pairs(name, images, texts, pairs, metrics=RECALLS, source=f"{path}, {split}")


def read_coco(path: str | Path, *, split: str = "test") -> dict[str, GroundTruth]:
    """Read COCO 5K and 1K from Karpathy's dataset_coco.json."""
    five = read_karpathy_ground_truth(path, split=split, name="coco_5k", coco_ids=True, captions_per_image=5)
    return _with_folds(five, path)


def _with_folds(five: GroundTruth, path: str | Path) -> dict[str, GroundTruth]:
    """COCO 5K, and the five folds of COCO 1K."""
    try:
        return {"coco_5k": five, "coco_1k": in_folds(five, name="coco_1k")}
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


# ---------------------------------------------------------------- PMRP
_ZETAS = (0, 1, 2)
"""Numbers of classes in which an image and a text may differ."""


def pmrp(instances: Sequence[Path], captions: GroundTruth, folded: GroundTruth) -> dict[str, GroundTruth]:
    """Plausible Match R-Precision (PMRP) from COCO's instance annotations.

    An image and a text match if the set of object classes of the image differs from that of the text's own image in at
    most zeta classes. Images without any instance, and their texts, are left out of the queries and the gallery. The
    paper averages R-Precision over zeta = 0, 1, 2, of all items and in the folds of another ground truth.

    Paper: Chun et al., CVPR 2021, C.1.
    """
    if (captions.t2i.counts != 1).any():
        text = captions.text_ids[int(np.flatnonzero(captions.t2i.counts != 1)[0])]
        raise ValueError(f"pmrp: text {text!r} does not belong to exactly one image of {captions.name}")
    code = _class_table(captions, instances)
    kept_images = np.flatnonzero(code.any(1))
    position = np.full(len(code), -1)
    position[kept_images] = np.arange(len(kept_images))
    image_of_text = position[captions.t2i.indices]
    kept_texts = np.flatnonzero(image_of_text >= 0)
    image_of_text, code = image_of_text[kept_texts], code[kept_images]
    size = code.sum(1)
    difference = size[:, None] + size - 2 * (code @ code.T)
    ground_truths = {}
    image_ids = tuple(captions.image_ids[i] for i in kept_images)
    text_ids = tuple(captions.text_ids[i] for i in kept_texts)
    source = ", ".join(map(str, instances))
    for zeta in _ZETAS:
        name = f"pmrp@{zeta}"
        t2i = relevance_from_table(difference <= zeta).select_queries(image_of_text)
        listed = t2i.transpose(), t2i, ("r_precision",)
        ground_truths[name] = GroundTruth(name, image_ids, text_ids, *listed, averaged_as="pmrp", source=source)
    for zeta in _ZETAS:
        name = f"pmrp_1k@{zeta}"
        ground_truths[name] = in_folds_of(folded, ground_truths[f"pmrp@{zeta}"], name=name, averaged_as="pmrp_1k")
    return ground_truths


def _class_table(captions: GroundTruth, paths: Sequence[Path]) -> np.ndarray:
    """(n, classes) 1 where an image of the ground truth has an instance of a class, else 0."""
    classes = _classes_of_images(paths)
    images = [coco_image_id(image) for image in captions.image_ids]
    for image in images:
        if image not in classes:
            raise UserError(f"{', '.join(map(str, paths))}: image {image} of {captions.name} is not among its images")
    known = {c: k for k, c in enumerate(sorted({c for image in images for c in classes[image]}))}
    table = np.zeros((len(images), len(known)), np.float32)
    for i, image in enumerate(images):
        table[i, [known[c] for c in classes[image]]] = 1
    return table


def _classes_of_images(paths: Sequence[Path]) -> dict[str, set[int]]:
    classes: dict[str, set[int]] = {}
    for path in paths:
        loaded = read_json(path, hook=ground_truth.distinct_keys)
        if not isinstance(loaded, dict) or not all(isinstance(loaded.get(k), list) for k in ("images", "annotations")):
            raise UserError(f"{path}: not COCO's instance annotations; expected lists under 'images' and 'annotations'")
        for what, key, others in (("images", "id", ()), ("annotations", "image_id", ("category_id",))):
            for number, entry in enumerate(loaded[what]):
                try:
                    classes.setdefault(str(int(entry[key])), set()).update(int(entry[other]) for other in others)
                except (KeyError, TypeError, ValueError) as error:
                    expected = " and ".join((key, *others))
                    raise UserError(f"{path}:{what}[{number}]: expected an object with {expected}") from error
    return classes


def emoji(split: str = "test", *, held_out_style: Style = "fluent3d") -> GroundTruth:
    """The ground truth of the emoji data set: names, tags, subgroups and groups, many to many."""
    splits = load_emoji(held_out_style=held_out_style)
    if split not in splits:
        raise ValueError(f"emoji: unknown split {split!r}; known: {', '.join(splits)}")
    return replace(ground_truth.ground_truth_from_data(splits[split], name="emoji"), source=f"emoji, {split}")


CUB_SPLITS = ("test", "seen", "train", *(f"{part}{k}" for k in (1, 2, 3) for part in ("train", "val")))
"""Names of the splits of :func:`cub_split`."""


def cub_split(captions: Path, lists: Path, split: str = "test") -> GroundTruth:
    """A split of CUB Captions by the public lists of classes and images.

    Source: Xian, Schiele and Akata, "Zero-Shot Learning: the Good, the Bad and the Ugly", CVPR 2017, for the classes;
    Chun et al., CVPR 2021, 4.1.2 and tables E.2 (unseen) and E.3 (seen).
    """
    if split not in CUB_SPLITS:
        raise UserError(f"CUB has no split {split!r}; known: {', '.join(CUB_SPLITS)}")
    held_out = lists / "seen_test_images.txt"
    if split == "test":
        return cub_captions(captions, classes=lists / "testclasses.txt")
    if split == "seen":
        return cub_captions(captions, classes=lists / "trainvalclasses.txt", only=held_out, name="cub_seen")
    classes = "trainval" if split == "train" else split[:-1]
    path = lists / f"{classes}classes{split.removeprefix('train').removeprefix('val')}.txt"
    return cub_captions(captions, classes=path, without=held_out, name=f"cub_{split}")


def cub_captions(
    root: Path, *, classes: Path, only: Path | None = None, without: Path | None = None, name: str = "cub"
) -> GroundTruth:
    """CUB Captions: an image and a text match if they show and describe the same class of birds.

    The unseen split is ``classes="testclasses.txt"``, 50 of the 200 classes. The seen split is
    ``classes="trainvalclasses.txt", only="seen_test_images.txt"``, 150 classes; ten images of that list are of unseen
    classes. Training takes the same 150 classes ``without`` those images.
    """
    if not root.is_dir():
        raise UserError(f"there is no folder of captions {root}")
    chosen = sorted(set(read_list(classes)))
    keep = None if only is None else set(read_list(only))
    drop = set() if without is None else set(read_list(without))
    counts: dict[str, int] = {}
    class_of_image: list[int] = []
    present = set()
    for number, bird in enumerate(chosen):
        if not (root / bird).is_dir():
            raise UserError(f"{root}: there is no class {bird}; expected the captions of CUB-200-2011")
        for path in sorted((root / bird).glob("*.txt")):
            image = f"{bird}/{path.stem}.jpg"
            present.add(image)
            if (keep is not None and image not in keep) or image in drop:
                continue
            counts[image] = len(read_list(path, "the captions"))
            if not counts[image]:
                raise UserError(f"{path}: no captions; expected one per line")
            class_of_image.append(number)
    if keep and keep.isdisjoint(present):
        raise UserError(f"{root}: none of the {len(keep)} images of only= is in these classes, e.g. {min(keep)}")
    if not counts:
        raise UserError(f"{root}: found no captions CLASS/IMAGE.txt for this choice of classes and images")
    text_ids = tuple(f"{image}#{i}" for image, n in counts.items() for i in range(n))
    match = np.array(class_of_image)[:, None] == np.repeat(class_of_image, list(counts.values()))
    i2t, t2i = relevance_from_table(match), relevance_from_table(match.T)
    return GroundTruth(name, tuple(counts), text_ids, i2t, t2i, source=str(root))
