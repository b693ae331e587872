"""A loaded model and a gallery with its model: the numbers of the commands, for every way to give an image."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from support.raising import raises
from support.references import csd

import sfumato
from sfumato import RecallByUncertainty, load_index
from sfumato.errors import UserError
from sfumato.models.embed import embed_split, evaluate_run, load_split
from sfumato.models.run import load_run
from sfumato.search.answer import SearchOptions
from sfumato.workflows.export import export_run


@pytest.fixture(scope="module")
def model(toy):
    return sfumato.load(toy / "run")


equal = lambda a, b: torch.equal(a.mean, b.mean) and torch.equal(a.log_var, b.log_var)


def test_every_way_to_give_an_image_is_the_same_and_probabilities_are_those_of_the_distance_by_loops(toy, model):
    paths = sorted((toy / "data").glob("*.png"))[:3]
    expected, pixels = model.embed_images(paths), [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    as_tensors, mixed = [torch.from_numpy(p.copy()) for p in pixels], [str(paths[0]), paths[1].read_bytes(), pixels[2]]
    for images in ([Image.open(path) for path in paths], np.stack(pixels), as_tensors, mixed):
        assert equal(model.embed_images(images), expected)
    assert not equal(model.embed_images(paths[::-1]), expected)
    grey = pixels[0][..., 0]
    assert equal(model.embed_images([grey]), model.embed_images([np.repeat(grey[..., None], 3, 2)]))
    texts, images = ["a red circle", "some bar in blue"], sorted((toy / "data").glob("*.png"))[:3]
    x, y, run = model.embed_texts(texts), model.embed_images(images), load_run(toy / "run")
    assert run.distance == "csd"
    found, stated = model.probability(texts, images), model.probability(x, y, match_fraction=0.5)
    assert found.shape == (2, 3)
    prior = run.calibration.match_fraction
    for i in range(2):
        for j in range(3):
            a, b = ((e.mean[k].double().tolist(), e.log_var[k].double().exp().tolist()) for e, k in ((x, i), (y, j)))
            logit = run.logit_bias - run.logit_scale * csd(*a, *b)
            assert found[i, j].item() == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-4)
            balanced = logit - np.log(prior / (1 - prior))
            assert stated[i, j].item() == pytest.approx(1 / (1 + np.exp(-balanced)), rel=1e-4)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK", "I;16", "F"])
def test_a_pillow_image_of_any_mode_is_read_as_its_file_and_turned_upright(model, tmp_path, mode):
    values = (np.random.default_rng(1).random((20, 30, 4)) * 255).astype(np.uint8)
    if mode in ("I;16", "F"):
        array = values[..., 0].astype(np.uint16) * 200 if mode == "I;16" else values[..., 0] / 3.0
        image = Image.fromarray(array.astype(np.float32) if mode == "F" else array)
    else:
        image = Image.fromarray(values, "RGBA").convert(mode)
    path = tmp_path / ("x.tiff" if mode in ("CMYK", "F") else "x.png")
    image.save(path)
    assert equal(model.embed_images([image]), model.embed_images([path]))
    if mode == "L":
        one = np.asarray(image)
        assert equal(model.embed_images([one[..., None]]), model.embed_images([one])), "one channel"
    if mode == "RGB":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path, exif=exif)
        assert equal(model.embed_images([Image.open(path)]), model.embed_images([path]))
        assert not equal(model.embed_images([image]), model.embed_images([path]))


def test_wrong_images_are_named(toy, model, tmp_path):
    good = toy / "data" / "000.png"
    (tmp_path / "bad.png").write_bytes(b"no image")
    for images, error, message in (
        (good, TypeError, "expected a list of images"), ("x.png", TypeError, "expected a list of images"),
        (Image.open(good), TypeError, "expected a list of images"), ([], ValueError, "got no images"),
        ([good, tmp_path / "bad.png"], UserError, f"{tmp_path / 'bad.png'}: not an image"),
        ([tmp_path / "none.png"], UserError, f"there is no image {tmp_path / 'none.png'}"),
        ([good, b"x"], UserError, "image 1: not an image"), ([good, 7], TypeError, "image 1 is a int; expected a path"),
        ([np.zeros((3, 8, 8), np.uint8)], ValueError, r"image 0 has pixels of shape \(3, 8, 8\) in uint8; expected"),
        ([np.zeros((8, 8, 3))], ValueError, "in float64; expected"),
        (np.zeros((8, 8, 3), np.uint8), ValueError, r"a batch of one is \(1, 8, 8, 3\)"),
    ):  # fmt: skip
        raises(error, message, model.embed_images, images)
    raises(TypeError, "expected a list of them", model.embed_texts, "a dog")
    raises(ValueError, "got no texts", model.embed_texts, [])
    raises(TypeError, "text 1 is a int", model.embed_texts, ["a", 3])


def test_python_and_the_command_line_agree_to_the_last_digit(toy, sfumato, tmp_path):
    folder, pictures = tmp_path / "index", [toy / "data" / "001.png", toy / "data" / "000.png"]
    sfumato.printed("index", toy / "run", "--images", toy / "data", "--out", folder)
    texts, options = ["a red circle", "asdfgh qwrtz"], ("--min-probability", 0.01, "--coverage", 0.9)
    by_command = sfumato.json("search", folder, *texts, "-k", 4, *options)
    flags = [value for picture in pictures for value in ("--image", picture)]
    foreign = sfumato.json("search", folder, *flags, "--id", "010.png", "-k", 3)
    with load_index(folder) as index:
        found = index.search(texts, k=4, min_probability=0.01, coverage=0.9, duplicates="fold")
        assert json.loads(json.dumps([answer.to_json() for answer in found])) == by_command
        others = index.search(pictures, 3, duplicates="fold")
        others += index.search_items(["010.png"], 3, SearchOptions(duplicates="fold"))
        assert [answer.to_json() for answer in others] == foreign
        one = index.search("a red circle", k=4)
        assert one.to_json()["hits"] == index.search(["a red circle"], k=4)[0].to_json()["hits"] and len(one) == 4
        assert [hit.id for hit in one] == [hit.id for hit in one.hits] and one[0].rank == 1
        by_gallery = index.gallery.search(index.model.embed_texts(texts), 4)
    assert [answer.uncertainty for answer in found] == [result.uncertainty for result in by_gallery]
    for answer in by_command:
        assert answer["calibrated"] and answer["verdict"] and answer["expected_matches"] > 0
        assert all(hit["match_probability"] > 0 for hit in answer["hits"] + answer["conformal_set"])
    assert len(foreign) == 3 and all(len(answer["hits"]) == 3 for answer in foreign)
    for answer in foreign:
        assert answer["calibrated"] is False and answer["verdict"] is answer["expected_matches"] is None
        assert {hit["match_probability"] for hit in answer["hits"]} == {None}


def test_galleries_of_texts_ids_of_images_and_queries_of_every_kind(toy, model):
    paths = sorted((toy / "data").glob("*.png"))[:3]
    assert model.index(paths).gallery.ids == tuple(path.as_posix() for path in paths)
    assert model.index([Image.open(path) for path in paths]).gallery.ids == ("0", "1", "2")
    assert model.index(paths, ["a", "b", "c"]).gallery.ids == ("a", "b", "c")
    assert model.index(model.embed_images(paths), ids=["a", "b", "c"]).gallery.ids == ("a", "b", "c")
    raises(ValueError, "leave ids out", model.index, toy / "data", ["a"])
    raises(ValueError, "got 2 ids for 3 embeddings", model.index, paths, ["a", "b"])
    index = model.index_texts(["a red circle", "some bar in blue", "a green square"])
    answer = index.search(toy / "data" / "000.png", k=2)
    assert index.native == "images" and answer.calibrated and answer.query == str(toy / "data" / "000.png")
    assert {hit.payload["text"] for hit in answer} <= {"a red circle", "some bar in blue", "a green square"}
    assert not index.search("a circle").calibrated
    index, path = model.index(toy / "data"), toy / "data" / "000.png"
    assert len(index) == 48 and "48 images" in repr(index) and "LoadedModel(" in repr(model)
    pixels, by_path = np.asarray(Image.open(path).convert("RGB")), index.search(path, k=3)
    assert by_path[0].id == "000.png" and not by_path.calibrated
    for query in (path.read_bytes(), Image.open(path)):
        assert [hit.distance for hit in index.search(query, k=3)] == [hit.distance for hit in by_path]
    assert [hit.distance for hit in index.search([pixels], k=3)[0]] == [hit.distance for hit in by_path]
    embedded = model.embed_texts(["a red circle"])
    [by_embedding] = index.search(embedded, k=3)
    assert by_embedding.hits == index.search("a red circle", k=3).hits and by_embedding.calibrated
    assert not index.search(embedded, k=3, modality="images")[0].calibrated
    raises(TypeError, "mix texts and images", index.search, ["a text", path])
    raises(TypeError, "got a int; expected a text", index.search, 7)
    raises(ValueError, "got no queries", index.search, [])
    raises(UserError, "has no words", index.search, " ")
    raises(TypeError, "the queries are texts; leave out modality", index.search, ["a dog"], modality="images")
    raises(UserError, "works only with queries by text", index.search, path, coverage=0.9)
    raises(UserError, "has no item 'nothing'", index.search_items, ["nothing"])


def test_a_query_of_several_texts(toy, model, sfumato, tmp_path):
    index = model.index(toy / "data")
    wanted, other = "a red circle on a plain white ground beside a", "small blue square that is filled with blue"
    a, b, c = model.embed_texts([wanted, other, "green"]).numpy().mean.astype(float)
    items, mean = index.gallery, a / 2 + b / 2 - c / 2
    mean *= np.linalg.norm(a) / np.linalg.norm(mean)
    order = ((items.embeddings.mean - mean) ** 2).sum(1) + items.embeddings.total_variance.astype(float)
    answer = index.search(wanted, 9, also=[other], without=["green"])
    assert [hit.id for hit in answer] == [items.ids[j] for j in order.argsort()[:9]]
    assert answer.query == f"{wanted} and {other} without green" and not answer.calibrated
    few = index.search("red", 5, also=["circle"])
    assert few.hits == index.search("red circle", 5).hits and few.query == "red and circle" and few.calibrated
    index.save(tmp_path / "index")
    (printed,) = sfumato.json("search", tmp_path / "index", "red", "--without", "a circle")
    without = index.search("red", without=["a circle"], duplicates="fold")
    assert [hit["id"] for hit in printed["hits"]] == [hit.id for hit in without]
    assert [hit.id for hit in without] != [hit.id for hit in index.search("red")]
    raises(UserError, "beside texts to search for", index.search, toy / "data" / "000.png", without=["red"])
    raises(UserError, "has no words", index.search, "red", also=[" "])
    raises(UserError, "works only with queries by text", index.search, "red", without=["blue"], coverage=0.9)
    told = sfumato.refused("search", tmp_path / "index", "--id", "000.png", "--without", "red")
    assert "leave out --image and --id" in told


def test_nearly_equal_images_are_folded(tmp_path):
    mean = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    mean = torch.cat([mean, mean[:5] + 0.02, mean[:3] - 0.02, mean[:1].repeat(30, 1)])
    items = sfumato.GaussianEmbedding(mean, torch.full_like(mean, -4.0))
    ids, query = [f"{i:02}" for i in range(len(mean))], sfumato.GaussianEmbedding(mean[:1] + 0.1, items.log_var[:1])
    index, total = sfumato.GaussianIndex.build(items, ids), ((mean[:, None] - mean[None]) ** 2).sum(2).double()
    fold, limit, hits = SearchOptions(duplicates="fold"), 0.09 * float(total.mean()), {}
    for i in (int(hit.id) for hit in index.search(query, len(mean))[0]):
        near = [j for j in hits if total[i, j] <= limit]
        hits.setdefault(near[0] if near else i, []).append(i)
    expected = [(f"{i:02}", tuple(f"{j:02}" for j in group[1:])) for i, group in hits.items()]
    assert len(expected) == 40 and len(expected[0][1]) == 32
    with sfumato.GaussianCollection.create(tmp_path / "c", d=6, logit_scale=1.0, logit_bias=0.0) as collection:
        collection.upsert(items, ids)
        for gallery in (index, collection):
            (answer,) = gallery.search(query, 25, fold)
            assert {hit.id: set(hit.duplicates) for hit in answer} == {i: set(own) for i, own in expected[:25]}
            assert [hit.rank for hit in answer] == list(range(1, 26))
            (plain,) = gallery.search(query, 25)
            assert not any(hit.duplicates for hit in plain)
    texts = sfumato.GaussianIndex.build(items, ids, direction="i2t")
    assert texts.search(query, 9, fold) == texts.search(query, 9)


def test_galleries_are_saved_opened_and_shown_with_images(toy, model, tmp_path):
    model.index(toy / "data").save(tmp_path / "index")
    raises(UserError, r"holds a collection; open it with sfumato.load_index", sfumato.load, tmp_path / "index")
    raises(UserError, r"is a run, not an index; index images with", sfumato.load_index, toy / "run")
    raises(UserError, "holds no collection", sfumato.load_index, tmp_path)
    moved = sfumato.load_index(tmp_path / "index", run=tmp_path / "gone")
    raises(UserError, "is not at .*gone; give its folder", moved.search, "a dog")
    assert len(moved.search_items(["000.png"], 2)[0]) == 2, "by an item no model is needed"
    paths = sorted((toy / "data").glob("*.png"))[:3]
    saved, given = sfumato.load_index(tmp_path / "index"), model.index([Image.open(path) for path in paths])
    for index, n in ((saved, 4), (given, 3), (model.index(paths), 3), (model.index(model.embed_images(paths)), 0)):
        assert index.search("a red circle", k=4)._repr_html_().count("data:image/webp;base64") == n
    [hit] = [hit for hit in given.search("a red circle") if hit.id == "1"]
    pixels = np.asarray(Image.open(io.BytesIO(given.image_of(hit).read_bytes())).convert("RGB"))
    assert np.array_equal(pixels, np.asarray(Image.open(paths[1]).convert("RGB")))
    assert "data:image" not in model.index_texts(["a red circle"]).search(paths[0])._repr_html_()


def test_the_reliability_and_recall_of_a_run_are_those_of_its_first_hits(toy, model, tmp_path):
    run = load_run(toy / "run")
    prepared = load_split(run.model, run.recipe.data, "test")
    images, texts = embed_split(run.model, prepared)
    right = prepared.data.relevance().to_dense()
    index = sfumato.GaussianIndex.build(images, prepared.data.image_ids, calibration=run.calibration)
    hits = [result[0] for result in index.search(texts, 1)]
    n, found = len(hits), model.reliability("test", n_bins=3)
    assert found.n == n and sum(b["count"] for b in found.curve) == n
    assert found.mean_probability == pytest.approx(np.mean([hit.match_probability for hit in hits]), rel=1e-5)
    positions = [prepared.data.image_ids.index(hit.id) for hit in hits]
    assert found.rate == pytest.approx(np.mean([right[i, j] for j, i in enumerate(positions)]))
    raises(UserError, "has no split 'none'; it has train", model.reliability, "none")
    export_run(toy / "run", tmp_path / "exported")
    raises(UserError, "is not a run and has no data of its own", sfumato.load(tmp_path / "exported").reliability)
    evaluation, path = evaluate_run(load_run(toy / "run"), "test")
    for direction in ("t2i", "i2t"):
        found = model.recall_by_uncertainty("test", direction=direction)
        assert found == RecallByUncertainty(**evaluation.uncertainty[direction])
        assert found == RecallByUncertainty(**json.loads(path.read_text())["uncertainty"][direction])
    assert len(model.recall_by_uncertainty(n_bins=3, uncertainty="log_det").bins) == 3
