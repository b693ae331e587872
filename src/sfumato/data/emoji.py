"""The emoji data set of the package: 1,911 concepts in three drawing styles, with names and tags written by people.

Its ground truth is known and many-to-many: a name matches one concept, a tag matches all concepts with this tag, and a
subgroup or group matches tens to hundreds of concepts. Training uses two drawing styles of all concepts. Validation and
test use the third style, on disjoint parts of the concepts. Wordings and concepts can be held out of training too, so
that a figure can be that of new words and new things. Licences and sources lie beside the data in ``emoji_set``;
scripts/build_emoji.py rebuilds it.
"""

import json
import zipfile
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, field_validator

from sfumato.data.images import LazyImage
from sfumato.data.pairs import PairData, normal_wording
from sfumato.data.splits import parse_part
from sfumato.ids import uniform_hash

Style = Literal["noto", "twemoji", "fluent3d"]
EmojiClasses = Literal["group", "subgroup"]

KINDS = ("name", "tag", "subgroup", "group")
"""Kinds of texts, from the narrowest to the widest."""


_SUBGROUPS = {
    **{f"food-{kind}": f"{kind} food" for kind in ("prepared", "asian", "sweet")},
    **{f"{kind}-other": f"other {kind}s" for kind in ("place", "plant")},
    **{f"other-{kind}": f"other {kind}s" for kind in ("object", "symbol")},
    **{key: key.replace("-", " & ") for key in ("sky-weather", "arts-crafts", "light-video", "book-paper")},
    **{"place-map": "map", "transport-sign": "transport sign"},
}


class EmojiOptions(BaseModel):
    """Section ``data.options`` of the source "emoji"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    held_out_wordings: str = ""
    """I/K, e.g. 0/5: train without part I of K of the wordings; split wordings has these alone"""
    held_out_concepts: str = ""
    """I/K, e.g. 0/10: train without part I of K of the concepts; split concepts has these alone"""

    @field_validator("held_out_wordings", "held_out_concepts")
    @classmethod
    def _part(cls, value: str) -> str:
        if value:
            parse_part(value)
        return value


def load_emoji(
    *,
    held_out_style: Style = "fluent3d",
    val_fraction: float = 0.2,
    held_out_wordings: str = "",
    held_out_concepts: str = "",
) -> dict[str, PairData]:
    """The splits of the emoji set.

    Equal wordings are one text: the tag "fox" and the name "fox" are one text, which matches all concepts with this tag
    or name. The kind of a text is its narrowest one, so that the name of every concept is a text of kind "name".

    Args:
        held_out_style: the drawing style of validation and test.
        val_fraction: fraction of the concepts in "val"; the rest are in "test". The split of a concept depends on its
            code point alone.
        held_out_wordings: part I/K of the texts that training lacks, or "". The K parts are alike in kinds of texts and
            in their numbers of matches.
        held_out_concepts: part I/K of the concepts that training lacks, with the texts that match nothing else, or "".

    Returns:
        "train": the two other styles, where groups are concepts; "val" and "test": the held-out style on disjoint
        concepts, with the texts that match at least one of them; "style": all concepts in the held-out style. With
        held_out_wordings "wordings": the split "test" with these texts alone. With held_out_concepts "concepts": these
        concepts in the held-out style. "val", "test" and "style" have everything that is held out too.

    Raises:
        ValueError: the style is unknown, the fraction is not in (0, 1), or a part is not I/K.

    Example:
        >>> splits = load_emoji(held_out_wordings="0/5")
        >>> set(splits["wordings"].texts) & set(splits["train"].texts)
        set()
    """
    if held_out_style not in get_args(Style):
        raise ValueError(f"load_emoji: unknown style {held_out_style!r}; known: {', '.join(get_args(Style))}")
    if not 0 < val_fraction < 1:
        raise ValueError(f"load_emoji: val_fraction must be between 0 and 1, got {val_fraction}")
    concepts = _concepts()
    texts, kinds, pairs = _texts(concepts)

    counts = np.bincount(pairs[:, 1])
    new_text, new_concept = np.zeros(len(texts), bool), np.zeros(len(concepts), bool)
    if held_out_wordings:  # Parts are alike: dealt within each kind and power of two of the number of matches.

        def order(t: int) -> Any:
            return kinds[t], int(counts[t]).bit_length(), uniform_hash("text " + texts[t])

        new_text = _dealt(len(texts), order, *parse_part(held_out_wordings))
    if held_out_concepts:
        parts = parse_part(held_out_concepts)
        new_concept = _dealt(len(concepts), lambda c: uniform_hash("concept " + concepts[c]["hexcode"]), *parts)

    def split(styles: list[str], chosen: list[int], kept: np.ndarray | None = None) -> PairData:
        drawn = [(c, style) for c in chosen for style in styles if style in concepts[c]["styles"]]
        own = np.array([c for c, _ in drawn])
        of_kept = pairs if kept is None else pairs[kept[pairs[:, 1]]]
        starts = np.searchsorted(of_kept[:, 0], np.arange(len(concepts) + 1))
        rows = [of_kept[starts[c] : starts[c + 1], 1] for c in own]
        ids = tuple(f"{concepts[c]['hexcode']}/{style}" for c, style in drawn)
        pictures = tuple(_picture(f"{style}/{concepts[c]['hexcode']}.png") for c, style in drawn)
        of_own = np.stack([np.repeat(np.arange(len(own)), [len(r) for r in rows]), np.concatenate(rows)], axis=1)
        everything = PairData(ids, pictures, tuple(texts), tuple(texts), tuple(kinds), of_own, own)
        return everything.keep_images(np.arange(len(own)))

    everyone = list(range(len(concepts)))
    val = [c for c in everyone if uniform_hash(concepts[c]["hexcode"]) < val_fraction]
    test = [c for c in everyone if uniform_hash(concepts[c]["hexcode"]) >= val_fraction]
    seen = [style for style in get_args(Style) if style != held_out_style]
    splits = {
        "train": split(seen, [c for c in everyone if not new_concept[c]], ~new_text),
        "val": split([held_out_style], val),
        "test": split([held_out_style], test),
        "style": split([held_out_style], everyone),
    }
    if held_out_wordings:
        splits["wordings"] = split([held_out_style], test, new_text)
    if held_out_concepts:
        splits["concepts"] = split([held_out_style], np.flatnonzero(new_concept).tolist())
    return splits


def emoji_names() -> dict[str, str]:
    """The name of every concept; image ids of the emoji set are "hexcode/style"."""
    return {c["hexcode"]: c["label"] for c in _concepts()}


def emoji_classes(kind: EmojiClasses) -> dict[str, str]:
    """The group, or subgroup, of every concept."""
    worded = {"group": _group_text, "subgroup": _subgroup_text}[kind]
    return {c["hexcode"]: worded(c[kind]) for c in _concepts()}


def _texts(concepts: list[dict[str, Any]]) -> tuple[list[str], list[str], np.ndarray]:
    """The distinct wordings, their kinds, and (p, 2) pairs of concept and text."""
    number: dict[str, int] = {}
    kinds: list[int] = []
    pairs = []
    for c, concept in enumerate(concepts):
        worded = [(0, concept["label"]), *((1, tag) for tag in concept["tags"])]
        worded += [(2, _subgroup_text(concept["subgroup"])), (3, _group_text(concept["group"]))]
        for kind, wording in worded:
            t = number.setdefault(normal_wording(wording), len(number))
            if t == len(kinds):
                kinds.append(kind)
            kinds[t] = min(kinds[t], kind)
            pairs.append((c, t))
    return list(number), [KINDS[k] for k in kinds], np.unique(np.array(pairs, dtype=np.int64), axis=0)


def _subgroup_text(key: str) -> str:
    first, _, rest = key.partition("-")
    if key in _SUBGROUPS:
        return _SUBGROUPS[key]
    if first in {"animal", "food", "plant", "place"} and rest:
        return rest.replace("-", " ")
    if first in {"face", "transport"} and rest:
        return f"{rest.replace('-', ' ')} {first}"
    return key.replace("-", " ")


def _group_text(key: str) -> str:
    return key.replace("-", " & ")


def _dealt(n: int, order: Callable[[int], Any], part: int, of: int) -> np.ndarray:
    """(n,) bool, every of-th of n items in an order, from the part on."""
    chosen = np.zeros(n, bool)
    chosen[sorted(range(n), key=order)[part::of]] = True
    return chosen


@cache
def _concepts() -> list[dict[str, Any]]:
    return list(json.loads((resources.files("sfumato.data") / "emoji_set" / "concepts.json").read_text("utf-8")))


@cache
def _archive() -> zipfile.ZipFile:
    return zipfile.ZipFile((resources.files("sfumato.data") / "emoji_set" / "pictures.zip").open("rb"))


def _picture(member: str) -> LazyImage:
    return LazyImage(f"{_archive().filename or 'archive'}!{member}", lambda: _archive().read(member))
