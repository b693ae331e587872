"""Which texts training leaves out, and the split that has them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.raising import raises

from sfumato.data.images import MemoryImage, Problems
from sfumato.data.pairs import make_pair_data, normal_wording
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS, hold_out_wordings, joined
from sfumato.errors import UserError
from sfumato.models.embed import load_splits, split_names


def photographs(numbers, captions):
    ids = [f"photo-{n}" for n in numbers]
    return make_pair_data(ids, [MemoryImage(i, b"") for i in ids], [captions(n) for n in numbers])


five = lambda n: [f"caption {k} of photo {n}" for k in range(5)]


def splits(captions=five):
    numbers = {"train": range(40), "val": range(40, 50), "test": range(50, 60)}
    return {name: photographs(own, captions) for name, own in numbers.items()}


def test_each_image_has_one_caption_of_five_left_out_and_the_parts_are_all_captions_each_once():
    found = hold_out_wordings(splits(), 0, 5)
    train, wordings = found["train"], found[WORDINGS]
    assert train.image_ids == splits()["train"].image_ids
    assert wordings.image_ids == train.image_ids + splits()["val"].image_ids
    assert np.bincount(train.pairs[:, 0]).tolist() == [4] * 40
    assert np.bincount(wordings.pairs[:, 0]).tolist() == [1] * 50
    assert not set(train.texts) & set(wordings.texts)
    assert found["val"].texts == splits()["val"].texts and found["test"].texts == splits()["test"].texts
    for data in (train, wordings):
        for image, text in data.pairs:
            assert data.texts[text].endswith(f"of {data.image_ids[image].replace('-', ' ')}")
    parts = [hold_out_wordings(splits(), part, 5)[WORDINGS].texts for part in range(5)]
    everything = sorted(itertools.chain.from_iterable(parts))
    assert everything == sorted(splits()["train"].texts + splits()["val"].texts)
    assert len({text.split()[1] for text in parts[0]}) > 1
    more = splits()
    more["train"] = photographs([*range(100, 107), *range(20), *range(30, 40)], five)
    before, after = (hold_out_wordings(data, 0, 5)[WORDINGS] for data in (splits(), more))
    of = [{data.image_ids[i]: data.texts[t] for i, t in data.pairs} for data in (before, after)]
    common = of[0].keys() & of[1].keys()
    assert len(common) == 40 and all(of[0][i] == of[1][i] for i in common)


def test_texts_of_several_images_or_an_only_caption():
    data = splits(lambda n: [*five(n), "A dog", "an  animal", "a photo"])
    for part in range(5):
        found = hold_out_wordings(data, part, 5)
        assert {"A dog", "an  animal", "a photo"} <= set(found["train"].texts)
        assert np.bincount(found[WORDINGS].pairs[:, 0]).tolist() == [1] * 50
    data = splits(lambda n: [f"the only caption of {n}"])
    assert hold_out_wordings(data, 0, 5) == data
    mixed = splits(lambda n: five(n)[: 1 + n % 2])
    found = hold_out_wordings(mixed, 0, 2)
    assert np.bincount(found["train"].pairs[:, 0]).tolist() == [1] * 40
    assert all(found[WORDINGS].image_ids[i].endswith(tuple("13579")) for i in found[WORDINGS].pairs[:, 0])
    data = splits(lambda n: [*five(n), f"A  dog {n % 3}"])
    for part in range(3):
        found = hold_out_wordings(data, part, 3, merged=False)
        trained = {normal_wording(text) for text in found["train"].texts}
        assert not trained & {normal_wording(text) for text in found[WORDINGS].texts}
    data = splits(lambda n: [f"tag {(n + k) % 10}" for k in range(5)] + ([f"only of {n}"] if n % 3 == 0 else []))
    dealt = [hold_out_wordings(data, part, 5) for part in range(5)]
    with_tag = [found for found in dealt if "tag 7" in found[WORDINGS].texts]
    assert len(with_tag) == 1
    (found,) = with_tag
    tag = found[WORDINGS].texts.index("tag 7")
    assert (found[WORDINGS].pairs[:, 1] == tag).sum() == 25, "it matches half of the images of train and of val"
    assert "tag 7" not in found["train"].texts


def manifest(tmp_path, **settings):
    lines = (f'{{"image": "{n}.png", "captions": ["one {n}", "two {n}", "three {n}"]}}' for n in range(60))
    for n in range(60):
        (tmp_path / f"{n}.png").write_bytes(b"")
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return DataConfig(source="manifest", path=str(tmp_path / "data.jsonl"), **settings)


def test_a_recipe_has_the_split_and_wrong_settings_are_refused(tmp_path):
    found = load_splits(manifest(tmp_path, held_out_wordings="0/3"), Problems())
    assert set(found) == {"train", "val", "test", WORDINGS}
    assert set(split_names(found, "all")) == {"train", "val", "test"}
    assert WORDINGS not in load_splits(manifest(tmp_path), Problems())
    alone = load_splits(manifest(tmp_path, held_out_wordings="0/3", val_fraction=0, test_fraction=0), Problems())
    assert len(alone[WORDINGS].image_ids) == len(alone["train"].image_ids) == 60
    raises(ValueError, "expected a part I/K", manifest, tmp_path, held_out_wordings="5/5")
    with pytest.raises(ValueError, match=r"data\.held_out_wordings needs all pairs in memory"):
        DataConfig(source="shards", path="x", held_out_wordings="0/5")
    twice = DataConfig(options={"held_out_wordings": "0/5"}, held_out_wordings="0/5")
    raises(UserError, "have a split 'wordings' already", load_splits, twice, Problems())
    first, second = (replace(data, groups=np.arange(len(data.image_ids)) // 2) for data in list(splits().values())[:2])
    both = joined(first, second)
    assert both.groups.tolist() == [*np.arange(40) // 2, *20 + np.arange(10) // 2]
