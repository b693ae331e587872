"""The embedded set: its truth against the metadata, its splits against what they promise, its pictures one by one."""

import json
import zipfile
from collections import Counter, defaultdict
from importlib import resources

import numpy as np
import pytest
from support.raising import raises

from sfumato.data.emoji import KINDS, emoji_names, load_emoji
from sfumato.data.image_decoding import decode_image
from sfumato.data.sources import DataConfig

FOLDER = resources.files("sfumato.data") / "emoji_set"


@pytest.fixture(scope="module")
def splits():
    return load_emoji()


@pytest.fixture(scope="module")
def concepts():
    return {c["hexcode"]: c for c in json.loads((FOLDER / "concepts.json").read_text("utf-8"))}


concept_of = lambda image_id: image_id.split("/")[0]


def test_styles_concepts_and_held_out_wordings_of_the_splits_depend_on_nothing_else(splits):
    parts = [load_emoji(held_out_wordings=f"{k}/5") for k in range(5)]
    times = Counter()
    for part in parts:
        new = set(part["wordings"].texts)
        assert not new & set(part["train"].texts) and len(part["train"].image_ids) == len(splits["train"].image_ids)
        assert part["test"].texts == splits["test"].texts and part["val"].texts == splits["val"].texts
        missing = set(splits["train"].texts) - set(part["train"].texts)
        assert new == missing & set(splits["test"].texts)
        times.update(missing)
    assert set(times) == set(splits["train"].texts) and set(times.values()) == {1}
    kinds = [Counter(part["wordings"].text_kinds) for part in parts]
    counts = [np.bincount(part["wordings"].pairs[:, 1]) for part in parts]
    for kind in KINDS:  # Parts are alike: a random deal would differ by more.
        assert max(k[kind] for k in kinds) - min(k[kind] for k in kinds) < 0.1 * sum(k[kind] for k in kinds) / 5 + 9
    assert max(map(len, counts)) - min(map(len, counts)) < 30
    styles = {name: {i.split("/")[1] for i in data.image_ids} for name, data in splits.items()}
    assert styles == {"train": {"noto", "twemoji"}, "val": {"fluent3d"}, "test": {"fluent3d"}, "style": {"fluent3d"}}
    val, test = ({concept_of(i) for i in splits[name].image_ids} for name in ("val", "test"))
    assert not val & test and val | test == {concept_of(i) for i in splits["style"].image_ids}
    assert set(load_emoji(val_fraction=0.1)["val"].image_ids) < set(splits["val"].image_ids)
    other = {concept_of(i) for i in load_emoji(held_out_style="noto")["val"].image_ids}
    assert {concept_of(i) for i in splits["val"].image_ids} <= other


def test_held_out_concepts_are_absent_in_all_styles_with_their_own_names_and_no_part_is_refused(splits):
    part = load_emoji(held_out_concepts="3/10")
    new = {concept_of(i) for i in part["concepts"].image_ids}
    assert 170 < len(new) < 200 and not new & {concept_of(i) for i in part["train"].image_ids}
    assert {i.split("/")[1] for i in part["concepts"].image_ids} == {"fluent3d"}
    everyone = {concept_of(i) for i in splits["train"].image_ids}
    missing = everyone - {concept_of(i) for i in part["train"].image_ids}
    assert new == missing & {concept_of(i) for i in splits["style"].image_ids} and 185 < len(missing) < 197
    names = {t for t, kind in zip(part["concepts"].texts, part["concepts"].text_kinds, strict=True) if kind == "name"}
    assert len(names - set(part["train"].texts)) > 100
    raises(ValueError, "expected a part I/K", load_emoji, held_out_wordings="5/5")
    with pytest.raises(ValueError, match=r"data\.options\.held_out_concepts: .*expected a part I/K"):
        DataConfig(options={"held_out_concepts": "10"})
    raises(ValueError, "unknown style 'apple'; known: noto, twemoji, fluent3d", load_emoji, held_out_style="apple")
    raises(ValueError, "val_fraction must be between 0 and 1, got 1", load_emoji, val_fraction=1)


def test_every_text_is_true_of_exactly_the_concepts_that_carry_it(splits, concepts):
    wordings = {"animals & nature": ("group", "animals-nature"), "fruit": ("subgroup", "food-fruit")}
    wordings |= {"smiling face": ("subgroup", "face-smiling"), "ground transport": ("subgroup", "transport-ground")}
    for data in (splits["val"], splits["test"]):
        shown = {concept_of(i) for i in data.image_ids}
        carriers, members, ground_truth = defaultdict(set), defaultdict(set), defaultdict(set)
        for code in shown:
            for wording in (concepts[code]["label"], *concepts[code]["tags"]):
                carriers[" ".join(wording.lower().split())].add(code)
            for key in ("subgroup", "group"):
                members[key, concepts[code][key]].add(code)
        for i, t in data.pairs.tolist():
            ground_truth[data.texts[t]].add(concept_of(data.image_ids[i]))
        assert carriers.keys() <= ground_truth.keys()
        for text, own in ground_truth.items():
            assert own >= carriers[text], text
            # A wording can be that of a group or subgroup as well: then whole ones of them are true besides.
            besides = own - carriers[text]
            for key in ("subgroup", "group"):
                wholes = [members[key, name] for name in {concepts[c][key] for c in besides}]
                besides = besides.difference(*(whole for whole in wholes if whole <= own))
            assert not besides, text
        for wording, key in wordings.items():
            assert ground_truth[wording] >= members[key] and members[key], wording
        kind = dict(zip(data.texts, data.text_kinds, strict=True))
        assert all(kind[emoji_names()[code].lower()] == "name" for code in shown)


def test_texts_are_distinct_pictures_decode_and_show_something_and_licences_lie_beside_them(splits):
    for data in splits.values():
        assert set(data.text_kinds) == set(KINDS)
        assert len(set(data.texts)) == len(data.texts) and all(t == t.strip().lower() and t for t in data.texts)
        assert set(data.pairs[:, 1]) == set(range(len(data.texts)))
        assert set(data.pairs[:, 0]) == set(range(len(data.image_ids)))
    with zipfile.ZipFile((FOLDER / "pictures.zip").open("rb")) as archive:
        assert archive.testzip() is None
        images = splits["train"].images + splits["style"].images
        members = {image.location.rpartition("!")[2] for image in images}
        assert members == {name for name in archive.namelist() if name.endswith(".png")}
    pixels = np.stack([decode_image(image.read_bytes(), None) for image in images[::10]])
    assert pixels.shape[1:] == (3, 64, 64) and pixels.min(axis=(1, 2, 3)).max() < 255
    assert (pixels < 240).any(1).mean() > 0.3
    attribution = (FOLDER / "ATTRIBUTION.md").read_text("utf-8")
    for style, licence in (
        ("noto", "Noto-Apache-2.0"), ("twemoji", "Twemoji-CC-BY-4.0"), ("fluent3d", "FluentEmoji-MIT"),
    ):  # fmt: skip
        assert f"`{style}/`" in attribution and f"licences/{licence}.txt" in attribution
        assert len((FOLDER / "licences" / f"{licence}.txt").read_text("utf-8")) > 500
    assert len((FOLDER / "licences" / "emojibase-MIT.txt").read_text("utf-8")) > 500
