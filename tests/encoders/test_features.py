"""The feature cache: content-addressed, resumable after any cut, and honest about items that fail."""

import hashlib

import numpy as np
import pytest
from support.raising import raises

from sfumato.encoders.frozen import FeatureCache, cached_features


class Counting:
    """A backbone that turns a text into as many tokens as it has letters, and counts what it was asked for."""

    channels = 3
    fingerprint = "counting"

    def __init__(self):
        self.asked = []

    def __call__(self, items):
        if "bad" in items:
            raise ValueError("cannot decode")
        self.asked += items
        return [np.full((len(i), 3), len(i), np.float16) for i in items]


reading = lambda *texts: [lambda t=t: t for t in texts]


def test_items_are_computed_once_by_content_and_read_back_in_order(tmp_path):
    backbone = Counting()
    store, kept = cached_features(backbone, reading("ab", "c", "ab", "defg"), tmp_path, batch_size=2)
    assert sorted(backbone.asked) == ["ab", "c", "defg"]
    assert kept.tolist() == [0, 1, 2, 3] and store.lengths.tolist() == [2, 1, 2, 4]
    again = Counting()
    store, _ = cached_features(again, reading("defg", "c", "new"), tmp_path, batch_size=2)
    assert again.asked == ["new"]
    batch = store.batch(np.array([0, 1])).to("cpu")
    assert batch.values.shape == (2, 4, 3) and batch.mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert batch.values[0].eq(4).all() and batch.values[1, 0].eq(1).all() and batch.values[1, 1:].eq(0).all()


def test_bad_items_are_told_and_left_out(tmp_path):
    def gone():
        raise FileNotFoundError("gone")

    told, items = {}, [*reading("ab", "bad", "c", "bad"), gone]
    tell = lambda i, error: told.update({i: str(error)})
    store, kept = cached_features(Counting(), items, tmp_path, on_error=tell)
    assert kept.tolist() == [0, 2] and len(store) == 2
    assert told.pop(3).startswith("the same content as another item") and told == {1: "cannot decode", 4: "gone"}
    raises(ValueError, "cannot decode", cached_features, Counting(), reading("bad"), tmp_path)


@pytest.mark.parametrize("file", ["rows.f16", "index.bin"])
@pytest.mark.parametrize("cut", [1, 5, 7])
def test_a_writer_that_died_loses_only_its_tail(tmp_path, file, cut):
    cached_features(Counting(), reading("ab", "c", "defg"), tmp_path, batch_size=1)
    path = next(tmp_path.glob(f"*/{file}"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = Counting()
    store, _ = cached_features(again, reading("ab", "c", "defg", "hi"), tmp_path, batch_size=1)
    assert set(again.asked) <= {"defg", "hi"} and "hi" in again.asked
    for position, length in enumerate((2, 1, 4, 2)):
        values = store.batch(np.array([position])).to("cpu").values
        assert values.shape == (1, length, 3) and values.eq(length).all()


def test_records_cut_or_of_another_fingerprint_never_come_back_with_others(tmp_path):
    cached_features(Counting(), reading("ab", "defg"), tmp_path, batch_size=1)
    path = next(tmp_path.glob("*/rows.f16"))
    path.write_bytes(path.read_bytes()[: 2 * 3 * 3])
    cached_features(Counting(), reading("hijklmn"), tmp_path)
    store, _ = cached_features(Counting(), reading("defg"), tmp_path)
    assert store.batch(np.array([0])).to("cpu").values.eq(4).all()
    FeatureCache(tmp_path, "a", 3).append([hashlib.sha256(b"x").digest()], [np.zeros((1, 3))])
    assert FeatureCache(tmp_path, "b", 3).known() == {}
    assert len(FeatureCache(tmp_path, "a", 3).known()) == 1
    raises(ValueError, "holds a cache of other features", FeatureCache, tmp_path, "a", 4)
