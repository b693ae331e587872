"""A copy of a gallery by another model: it follows the first one, compares both, and takes its place."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from support.serving import add, collected, embedded, new_item, picture, served
from support.words import folded

from sfumato.models.model import Model
from sfumato.models.recipe import load_recipe
from sfumato.models.run import load_run
from sfumato.search.collection import GaussianCollection
from sfumato.serve.answering import open_sources
from sfumato.training.loop import fit
from sfumato.workflows import copy as copy_module
from sfumato.workflows.copy import copy_by_model, point
from sfumato.workflows.index import GalleryPart, delete_items


@pytest.fixture(scope="module")
def models(toy, tmp_path_factory):
    """Two runs of the same data."""
    other = tmp_path_factory.mktemp("other") / "run"
    fit(load_recipe(toy / "toy.toml", ["train.epochs=1", "train.seed=7"]), other)
    return SimpleNamespace(old=toy / "run", new=other)


def make(models, toy, folder):
    """A collection of the toy's images with captions, by the old model, behind a link."""
    run = load_run(models.old)
    part = embedded(run, toy / "data")
    words = [f"a picture of {i}" for i in part.ids]
    collected(run, GalleryPart(part.embeddings, part.ids, kept={"captions": words}, images=part.images), folder / "old")
    (folder / "live").symlink_to("old")
    return folder / "live"


@pytest.fixture
def live(models, toy, tmp_path):
    return make(models, toy, tmp_path)


def content(folder):
    with GaussianCollection.open(folder) as collection:
        return {
            i: (dict(payload), records.embeddings.mean[k], records.embeddings.log_var[k])
            for records in collection.scan()
            for k, (i, payload) in enumerate(zip(records.ids, records.payloads, strict=True))
        }


def agrees(found, folder, model: Model):
    """Every item has the payload of the first collection, and the embedding that the model gives its image."""
    first = content(folder)
    assert found.keys() == first.keys()
    ids = sorted(found)
    with served(open_sources(folder)) as client:
        images = [client.get(f"/v1/pictures/{i}").content for i in ids]
    wanted = model.embed_images(images)
    for row, i in enumerate(ids):
        assert found[i][0] == first[i][0]
        torch.testing.assert_close(found[i][1], wanted.mean[row], atol=1e-5, rtol=1e-4)


def test_a_copy_follows_and_takes_the_place(models, live, tmp_path):
    new = load_run(models.new)
    with served(open_sources(live)) as client:
        assert add(client, "one", "two").status_code == 201
        n = client.get("/v1/info").json()["galleries"]["images"]["n"]
    done = copy_by_model(live, tmp_path / "new", "file:", new)
    assert (done.n, done.embedded, done.deleted, done.switched) == (n, n, 0, False)
    agrees(content(tmp_path / "new"), live, new)
    assert live.resolve() == tmp_path / "old"

    with served(open_sources(live)) as client:  # One more, one less, one replaced.
        client.post("/v1/items", json={"items": [new_item("three"), new_item("one", "green")]})
        client.delete("/v1/items/two")
    done = copy_by_model(live, tmp_path / "new", "file:", new, switch=True)
    assert (done.n, done.embedded, done.deleted, done.switched) == (n, 2, 1, True)
    assert live.is_symlink() and live.resolve() == tmp_path / "new" and os.readlink(live) == "new"
    agrees(content(live), tmp_path / "old", new)
    with served(open_sources(live)) as client:
        assert client.get("/v1/pictures/one").content == client.get("/v1/pictures/one").content != picture("red")
        assert client.get("/v1/info").json()["model"] == "run"

    done = copy_by_model(live, tmp_path / "old", "file:", load_run(models.old), switch=True)  # the way back
    assert (done.embedded, done.deleted) == (0, 0) and live.resolve() == tmp_path / "old"


def test_what_was_deleted_does_not_come_back_with_its_folder(models, live, toy, tmp_path):
    """The folder of the images still has it; only the collection knows that it was removed."""
    with GaussianCollection.open(live) as collection:
        collection.keep({"sources": [{"path": str(toy / "data"), "kind": "folder", "root": str(toy / "data")}]})
    copy_by_model(live, tmp_path / "new", "file:", load_run(models.new))
    delete_items(live, ["000.png"])
    assert copy_by_model(live, tmp_path / "new", "file:", load_run(models.new)).deleted == 1
    with GaussianCollection.open(tmp_path / "new") as collection:
        assert collection.metadata["removed"] == ["000.png"]


def test_a_folder_that_was_added_later_is_known_to_the_copy(models, live, toy, tmp_path):
    new = load_run(models.new)
    copy_by_model(live, tmp_path / "new", "file:", new)
    sources = [{"path": str(toy / "data"), "kind": "folder", "root": str(toy / "data")}]
    with GaussianCollection.open(live) as collection:
        collection.keep({"sources": sources, "removed": ["a"]})
    with GaussianCollection.open(tmp_path / "new") as collection:
        collection.keep({"removed": ["b"]})
    copy_by_model(live, tmp_path / "new", "file:", new)
    with GaussianCollection.open(tmp_path / "new") as collection:
        assert collection.metadata["sources"] == sources and collection.metadata["removed"] == ["a", "b"]


def test_images_that_trained_a_model_are_not_asked(models, live, tmp_path, monkeypatch):
    with GaussianCollection.open(live) as collection:
        for records in collection.scan():
            payloads = [{**payload, "_digest": i} for i, payload in zip(records.ids, records.payloads, strict=True)]
            collection.upsert(records.embeddings, records.ids, payloads=payloads)
    known = set(sorted(content(live))[:20])
    monkeypatch.setattr(copy_module, "trained_digests", lambda folder: known if folder == models.new else set())
    compared = copy_by_model(live, tmp_path / "new", "file:", load_run(models.new)).compared
    assert (compared.n, compared.trained) == (48, 20)
    monkeypatch.setattr(copy_module, "_FEWEST", 28)
    compared = copy_by_model(live, tmp_path / "new", "file:", load_run(models.new)).compared
    assert (compared.n, compared.trained) == (28, 0)


def test_an_index_is_copied_and_the_copy_goes_on(sfumato, models, toy, tmp_path):
    sfumato.printed("index", models.old, "--images", toy / "data", "--out", tmp_path / "index")
    new = load_run(models.new)
    assert copy_by_model(tmp_path / "index", tmp_path / "new", "file:", new).embedded == 48
    assert copy_by_model(tmp_path / "index", tmp_path / "new", "file:", new).embedded == 0


def test_an_interrupted_copy_goes_on(models, live, tmp_path, monkeypatch):
    upsert, calls = GaussianCollection.upsert, []

    def dies(self, embeddings, ids, *more, **options):
        if calls:
            raise KeyboardInterrupt
        calls.append(ids)
        upsert(self, embeddings[:20], ids[:20], payloads=options["payloads"][:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(GaussianCollection, "upsert", dies)
    with pytest.raises(KeyboardInterrupt):
        copy_by_model(live, tmp_path / "new", "file:", load_run(models.new))
    monkeypatch.undo()
    with pytest.raises(Exception, match="interrupted; run the same command again"):
        GaussianCollection.open(tmp_path / "new")
    done = copy_by_model(live, tmp_path / "new", "file:", load_run(models.new))
    assert done.embedded == done.n - 20
    agrees(content(tmp_path / "new"), live, load_run(models.new))


def test_both_are_compared_on_the_captions(models, live, tmp_path, toy):
    """Against distances by a loop over captions and images, and the calibration's own probabilities."""
    old, new = load_run(models.old), load_run(models.new)
    compared = copy_by_model(live, tmp_path / "new", "file:", new).compared
    first = content(live)
    ids = sorted(first)
    firsts, rates = [], []
    for model, folder in ((old, live), (new, tmp_path / "new")):
        found, texts = content(folder), model.embed_texts([first[i][0]["captions"] for i in ids])
        nearest = []
        for q in range(len(ids)):
            distance = [
                float(((texts.mean[q] - found[i][1]) ** 2 + texts.log_var[q].exp() + found[i][2].exp()).sum())
                for i in ids
            ]
            nearest.append(ids[distance.index(min(distance))])
        firsts.append(nearest)
        rates.append(sum(a == b for a, b in zip(nearest, ids, strict=True)) / len(ids))
    assert compared.n == len(ids)
    assert [one.rate for one in compared.figures] == pytest.approx(rates)
    assert compared.same_first == pytest.approx(sum(a == b for a, b in zip(*firsts, strict=True)) / len(ids))
    assert compared.said == pytest.approx(tuple(one.mean_probability for one in compared.figures))


def test_images_that_are_gone_are_left_out_and_many_stop_the_switch(models, live, tmp_path):
    with served(open_sources(live)) as client:
        add(client, *(f"new-{i}" for i in range(5)))
    for path in [p for p in (tmp_path / "old" / "pictures").rglob("*") if p.is_file()][:1]:
        path.unlink()
    new = load_run(models.new)
    done = copy_by_model(live, tmp_path / "new", "file:", new)
    assert len(done.problems) == 1 and done.n == len(content(live)) - 1
    for path in [p for p in (tmp_path / "old" / "pictures").rglob("*") if p.is_file()]:
        path.unlink()
    with pytest.raises(Exception, match=r"5 of \d+ items cannot be embedded, and would be missing"):
        copy_by_model(live, tmp_path / "other", "file:", new, switch=True)
    assert live.resolve() == tmp_path / "old"


def test_the_command(sfumato, models, live, tmp_path):
    out = tmp_path / "new"
    shown = folded(sfumato.printed("copy", live, out, "--model", models.new))
    assert "48 items in" in shown and "48 captions of the items" in shown and "with --switch takes the copy" in shown
    (tmp_path / "queries.txt").write_text("red\nblue\n")
    found = sfumato.printed("copy", live, out, "--model", models.new, "--queries", tmp_path / "queries.txt", "--json")
    found = json.loads(found)
    assert found["n"] == 48 and found["embedded"] == 0 and found["compared"]["n"] == 2
    assert found["compared"]["figures"] is None and not found["switched"]
    assert "live points to" in folded(sfumato.printed("copy", live, out, "--model", models.new, "--switch"))

    def refused(*arguments):
        status, _, err = sfumato(*map(str, arguments))
        assert status == 2
        return folded(err)

    assert "is by the model" in refused("copy", live, tmp_path / "again", "--model", models.new)
    assert "symbolic link" in refused("copy", tmp_path / "old", out, "--model", models.new, "--switch")
    assert "points to" in refused("copy", live, out, "--model", models.old, "--switch")
    assert "go with --model" in refused("copy", live, tmp_path / "x", "--switch")
    collected(load_run(models.old), embedded(load_run(models.old), models.old.parent / "data"), tmp_path / "stranger")
    assert "is not a copy of this gallery" in refused("copy", live, tmp_path / "stranger", "--model", models.old)


def test_a_link_is_pointed_in_one_step(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "live").symlink_to("a")
    point(tmp_path / "live", tmp_path / "b")
    assert (tmp_path / "live").resolve() == tmp_path / "b"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "live"}
