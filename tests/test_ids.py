"""Ids that no gallery takes are refused at every door."""

import pytest
import torch
from support.raising import raises

from sfumato import GaussianCollection, GaussianEmbedding, GaussianIndex
from sfumato.ids import check_ids, id_error

GOOD = ("a", "birds/7 ü.jpg", "...", "./a.jpg", "../a.jpg", "a/..", "👩‍🎨", " ", 'it\'s "1"')
BAD = {
    "": "is empty", ".": "names a folder in paths", "..": "names a folder in paths",
    "a\nb": "holds a line break or another control character", "a\r": "holds a line break",
    "\ttab": "another control character", "nul\0": "another control character", "\x85": "another control character",
    "a\u2028b": "holds a line break", "\ud800": "is not Unicode",
}  # fmt: skip


def test_what_is_an_id():
    assert [id_error(id) for id in GOOD] == [""] * len(GOOD)
    for id, reason in BAD.items():
        assert reason in id_error(id) and repr(id) in id_error(id) and id_error(id).isprintable()
    check_ids(GOOD, "these")
    raises(ValueError, r"^these: row 2: the id 'x\\ny' holds a line break", check_ids, ["a", "b", "x\ny", "."], "these")


@pytest.mark.parametrize("id", [id for id in BAD if id and id.isascii() and "\0" not in id])
def test_every_door_names_the_id_and_its_row(tmp_path, id):
    embeddings, ids = GaussianEmbedding(torch.zeros(3, 4), torch.zeros(3, 4)), ["fine", id, "also fine"]
    told = rf"row 1: the id {id!r} ".replace("\\", "\\\\").replace(".", "\\.")
    raises(ValueError, "GaussianIndex: " + told, GaussianIndex.build, embeddings, ids)
    with GaussianCollection.create(tmp_path / "c", d=4) as made:
        raises(ValueError, "GaussianCollection: " + told, made.upsert, embeddings, ids)
        assert len(made) == 0
