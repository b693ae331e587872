"""Search by vector: the answers of the library and of the command, which models take which vectors, and refusals."""

import json
from dataclasses import replace

import numpy as np
import pytest
from serve.test_service import same
from support import serving
from support.toy import make_toy

from sfumato import fit, load_recipe
from sfumato.models.run import load_run
from sfumato.search.answer import QueryInfo
from sfumato.search.index import copy_gallery
from sfumato.serve.embedding import vector_sides
from sfumato.serve.settings import ServedGallery, Sources
from sfumato.workflows.index import build_index


@pytest.fixture(scope="module")
def images(vector_run):
    return np.load(vector_run.parent / "images.npy")


@pytest.fixture(scope="module")
def texts(vector_run):
    return np.load(vector_run.parent / "texts.npy")


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    folder = tmp_path_factory.mktemp("points")
    changed = ["train.epochs=1", "model.variance=false", "loss.name=infonce"]
    fit(load_recipe(make_toy(folder), changed), folder / "run")
    run = load_run(folder / "run")
    part = serving.embedded(run, folder / "data")
    run = replace(
        run, calibration=serving.calibration(run.model.embed_texts(["a red circle", "a bar"]), part.embeddings)
    )
    return Sources(run.model, "points", {"images": ServedGallery(build_index(run, part))})


query = lambda vector, **rest: {"vector": np.asarray(vector).tolist(), **rest}


def test_vectors_of_both_modalities_find_what_the_library_and_the_command_find(
    vectors, adopted, vector_run, texts, tmp_path, sfumato, images
):
    index, queries = adopted.galleries["images"].gallery, adopted.model.embed_texts(serving.npy_rows(texts[[7]]))
    (answer,) = serving.search(vectors, query(texts[7], name="the seventh"), max_results=5)
    same(answer, index.search(queries, 5)[0])
    assert answer["query"] == "the seventh" and answer["kind"] == "text" and answer["calibrated"]
    np.save(tmp_path / "seven.npy", texts[7])
    copy_gallery(index, tmp_path / "index").close()
    status, out, err = sfumato("search", tmp_path / "index", tmp_path / "seven.npy", "-k", 5, "--json")
    assert status == 0, err
    (command,) = json.loads(out)
    assert command["verdict"] == answer["verdict"]["text"]
    for ours, theirs in zip(answer["hits"], command["hits"], strict=True):
        assert ours["id"] == theirs["id"]
        assert ours["match_probability"] == pytest.approx(theirs["match_probability"], abs=1e-6)
    asked = [query(images[3], modality="image"), query(texts[4]), query(images[5], modality="image")]
    answers = serving.search(vectors, *asked, max_results=3)
    model, index = adopted.model, adopted.galleries["images"].gallery
    photos, words = (
        model.embed_images(serving.npy_rows(images[[3, 5]])),
        model.embed_texts(serving.npy_rows(texts[[4]])),
    )
    for answer, row, native in zip(answers, (photos[:1], words, photos[1:]), (False, True, False), strict=True):
        same(answer, index.search(row, 3, about=[QueryInfo("", native=native)])[0])
    assert [a["query"] for a in answers] == ["vector 1", "vector 2", "vector 3"]
    assert [a["calibrated"] for a in answers] == [False, True, False]
    assert answers[0]["hits"][0]["id"] == "photo-3" and answers[0]["hits"][0]["distance"] == pytest.approx(0, abs=1e-5)
    (among,) = serving.search(vectors, asked[0], gallery="texts")
    assert among["calibrated"]


def test_a_model_of_points_takes_its_own_embeddings(points):
    row = points.model.embed_texts(["a red circle"])
    assert np.linalg.norm(row.mean) == pytest.approx(1, abs=1e-6)
    index = points.galleries["images"].gallery
    with serving.served(points) as client:
        kinds = client.get("/v1/info").json()["query_kinds"]
        assert kinds == {"text": True, "image": True, "id": True, "vector": {"text": 16, "image": 16}}
        once, thrice = serving.search(client, query(row.mean[0]), query(3 * row.mean[0]), max_results=5)
        written = client.post("/v1/search", json={"queries": [{"text": "a red circle"}], "max_results": 5}).json()
    same(once, index.search(row, 5)[0])
    for answer in (once, thrice):  # Scaled to unit length, as the model does.
        assert [h["id"] for h in answer["hits"]] == [h["id"] for h in written["answers"][0]["hits"]]
        ours, theirs = ([h["distance"] for h in one["hits"]] for one in (answer, written["answers"][0]))
        assert ours == pytest.approx(theirs, abs=1e-5)
    points.model.text.head.normalize = False  # A model without unit length keeps the length.
    (side,) = [side for side in vector_sides(points.model, 16).values() if side.modality == "text"]
    assert np.linalg.norm(side.points([np.full(16, 2.0, np.float32)]).mean) == pytest.approx(8)


def test_what_a_model_does_not_read_is_refused_with_the_way_out(client, vectors):
    assert client.get("/v1/info").json()["query_kinds"] == {"text": True, "image": True, "id": True, "vector": {}}
    told = serving.search(client, query(np.ones(16)), status=422)
    assert "embeds each text with a variance, which a vector has not" in told["detail"]
    assert told["errors"][0]["where"] == "body.queries.0.vector"
    told = serving.search(client, query(np.ones(16), modality="image"), status=422)
    assert "search by the image itself, or by an item" in told["detail"]
    assert vectors.get("/v1/info").json()["query_kinds"] == {
        "text": False, "image": False, "id": True, "vector": {"text": 5, "image": 6},
    }  # fmt: skip
    told = serving.problem(vectors.post("/v1/search", json={"queries": [{"text": "a dog"}]}), 422)
    assert "search by vector or by item" in told["detail"]
    told = serving.problem(vectors.post("/v1/search", **serving.by_image(serving.picture())), 422)
    assert "reads embeddings, not images; search by vector or by item" in told["detail"]


def test_what_is_wrong_with_a_vector_and_one_that_the_model_cannot_embed(vectors, tmp_path, texts):
    head = {"Content-Type": "application/json"}
    for vector, message in (
        ("[]", "has 0 numbers, expected the 5 of an embedding of a text"),
        ("[1, 2, 3, 4, 5, 6]", "has 6 numbers, expected the 5 of an embedding of a text"),
        ("[1, 2, 1e999, 4, 5]", "number 2 (from 0) is inf in float32, expected finite numbers"),
        ("[1, 2, 3, -1e39, 5]", "number 3 (from 0) is -inf in float32"), ("[0, 0, 0, 0, -0.0]", "holds zeros alone"),
        ("[1e-60, 0, 0, 0, 0]", "holds zeros alone"),
        ("[1e-20, 0, 0, 0, 0]", "has the Euclidean length 1e-20, expected 1e-12 to 1e+18"),
        ("[3e38, 3e38, 0, 0, 0]", "has the Euclidean length 4.24e+38, expected 1e-12 to 1e+18"),
        ('["1", 2, 3, 4, 5]', "Input should be a valid number"),
        ("[true, 2, 3, 4, 5]", "Input should be a valid number"),
        ("[1" + 400 * "0" + ", 2, 3, 4, 5]", "Input should be a valid number"), ("5", "Input should be a valid list"),
    ):  # fmt: skip
        body = f'{{"queries": [{{"vector": [1, 2, 3, 4, 5]}}, {{"vector": {vector}}}]}}'
        told = serving.problem(vectors.post("/v1/search", content=body, headers=head), 422)
        assert "body.queries.1.vector" in told["detail"] and message in told["detail"], vector
        (error,) = told["errors"]
        assert error["where"].startswith("body.queries.1.vector") and message in error["message"]
    row = query(np.ones(5))
    for query_, where in (({}, ""), ({"text": "a", **row}, ""), ({**row, "modality": "sound"}, ".modality")):
        told = serving.problem(vectors.post("/v1/search", json={"queries": [query_]}), 422)
        assert told["errors"][0]["where"] == f"body.queries.0{where}"
    told = serving.search(
        vectors, query(np.ones(6)), query(np.ones(5)), query(np.ones(5), modality="image"), status=422
    )
    assert [error["where"] for error in told["errors"]] == ["body.queries.0.vector", "body.queries.2.vector"]
    assert "expected the 6 of an embedding of a image" not in told["errors"][1]["message"]
    assert "expected the 6 of an embedding of an image" in told["errors"][1]["message"]
    run = serving.make_embedding_run(tmp_path, "train.epochs=1", "model.variance=true", "loss.name=pcmepp")
    with serving.served(serving.embedding_sources(run)) as client:
        (answer,) = serving.search(client, query(texts[3]))
        assert answer["total_variance"] > 0 and answer["calibrated"]
        huge = [1e17, -1e17, 1e17, 1e17, -1e17]
        told = [serving.search(client, query(texts[3]), query(sign * np.array(huge)), status=422) for sign in (1, -1)]
    message = "body.queries.1.vector: the embedding of this vector by the model is not finite"
    assert all(message in one["detail"] for one in told)
