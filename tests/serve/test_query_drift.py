"""The service compares queries with those of the calibration: which ones it counts, and where it says they differ."""

import logging
from dataclasses import replace

import pytest
import torch
from support.serving import embedded, in_base64, picture, read_only, served

from sfumato.calibration.calibrator import Calibration, QueryScores
from sfumato.distances import csd_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.run import load_run
from sfumato.serve.answering import ServedGallery, Sources
from sfumato.workflows.index import build_index

WARNING = "Queries differ from those of the calibration (images, last 200 queries, D = "
NOTE = "Recent queries differ from those of the calibration: its guarantees may not hold"


class PlacedTexts(torch.nn.Module):
    """A model whose text "like N" lies near image N of a gallery, and "far N" far from all."""

    def __init__(self, model, images):
        super().__init__()
        self.inner, self.images = model, images
        self.image, self.text = model.image, model.text

    def embed_images(self, *arguments, **options):
        return self.inner.embed_images(*arguments, **options)

    def embed_texts(self, texts):
        rows = [self._placed(*text.split()) if " " in text else self.images.mean[0] for text in texts]
        return GaussianEmbedding(torch.stack(rows), self.images.log_var[:1].expand(len(texts), -1))

    def _placed(self, kind, number):
        spread = self.images.mean.std(0)
        noise = torch.randn(self.images.d, generator=torch.Generator().manual_seed(int(number)))
        return self.images.mean[int(number) % self.images.n] + spread * (0.3 * noise + (5 if kind == "far" else 0))


@pytest.fixture
def watched(run, data):
    """New sources for every test, because a monitor remembers; calibrated on 500 texts "like N"."""
    loaded, images = load_run(run), embedded(load_run(run), data)
    model = PlacedTexts(loaded.model, images.embeddings)
    texts = model.embed_texts([f"like {i}" for i in range(500)])
    beside = csd_matrix(images.embeddings, images.embeddings).argsort(1)[:, :12]
    match = torch.zeros(48, 48).scatter(1, beside, 1.0)[torch.arange(500) % 48]
    distance = csd_matrix(texts, images.embeddings)
    fitted = Calibration.fit(distance, match, t2i=QueryScores.fit(distance, match))
    index = build_index(replace(loaded, calibration=fitted), images)
    return Sources(model, "placed", {"images": ServedGallery(index)})


def ask(client, kind, start, n, **options):
    """The answers to n texts, 50 in a request."""
    answers = []
    for i in range(start, start + n, 50):
        queries = [{"text": f"{kind} {j}"} for j in range(i, min(i + 50, start + n))]
        answer = client.post("/v1/search", json={"queries": queries, "max_results": 1, **options})
        assert answer.status_code == 200, answer.text
        answers += answer.json()["answers"]
    return answers


def state_of(client):
    return client.get("/v1/info").json()["galleries"]["images"]["queries"]


def lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_queries_like_those_of_the_calibration_are_no_drift(watched, caplog):
    with served(watched) as client, caplog.at_level(logging.INFO, logger="sfumato.serve"):
        answers = ask(client, "like", 1000, 1000, abstain=0.5)
        state = state_of(client)
    assert state["window"] == 200 and state["n_windows"] == state["n_queries"] // 200 >= 4
    assert not state["differs"] and state["statistic"] < 0.15 and state["p_value"] > 0.05
    assert not any(answer["queries_differ"] or NOTE in answer["verdict"]["text"] for answer in answers)
    assert not lines(caplog, logging.WARNING)


def test_other_queries_are_said_to_differ_once_and_no_longer_when_they_stop(watched, caplog):
    with served(watched) as client, caplog.at_level(logging.INFO, logger="sfumato.serve"):
        assert state_of(client) == {
            "window": 200, "n_queries": 0, "n_windows": 0, "statistic": None, "p_value": None, "differs": False,
        }  # fmt: skip
        assert "sfumato_drift_statistic{" not in client.get("/metrics").text
        ask(client, "far", 0, 650)
        (warning,) = lines(caplog, logging.WARNING)  # Three windows differ.
        state, metrics = state_of(client), client.get("/metrics").text
        plain, *guaranteed = (ask(client, "far", 9000, 1, **o)[0] for o in ({}, {"abstain": 0.5}, {"coverage": 0.9}))
        ask(client, "like", 2000, 500)
        (over,) = lines(caplog, logging.INFO)
        after = ask(client, "like", 3000, 1, abstain=0.5)[0]
    assert warning.startswith(WARNING) and "calibrate on queries like these" in warning
    assert state["differs"] and state["statistic"] > 0.8 and state["p_value"] < 1e-3
    for line in ("differs", "windows", "queries", "statistic", "p_value"):
        assert f'sfumato_drift_{line}{{gallery="images"}}' in metrics
    assert 'sfumato_drift_differs{gallery="images"} 1.0' in metrics
    assert plain["queries_differ"] and NOTE not in plain["verdict"]["text"]
    assert all(answer["queries_differ"] and answer["verdict"]["text"].endswith(NOTE) for answer in guaranteed)
    assert "no longer differ" in over and not after["queries_differ"] and NOTE not in after["verdict"]["text"]


def test_what_is_compared(watched):
    with served(watched) as client:
        ask(client, "like", 0, 40, min_probability=1.0, max_results=3)  # No results, and a closest item all the same.
        assert state_of(client)["n_queries"] == 40
        ask(client, "like", 0, 40)  # The same texts again, in the same window.
        ask(client, "like", 100, 40, filter={"max_total_variance": 1e9})
        id = watched.galleries["images"].gallery.ids[0]
        others = {"queries": [{"id": id}, {"image": in_base64(picture())}]}
        found = client.post("/v1/search", json=others).json()["answers"]
        assert state_of(client)["n_queries"] == 40 and not any(answer["queries_differ"] for answer in found)


def values(client):
    lines = (line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


def test_what_is_said_of_first_hits_stands_beside_what_the_calibration_expects(watched):
    with served(watched) as client:
        like = [answer["hits"][0]["match_probability"] for answer in ask(client, "like", 0, 300)]
        told, name = values(client), 'sfumato_first_hit_probability_{}{{gallery="images",target="listed"}}'
        ask(client, "like", 0, 20, min_probability=0.01)  # Neither a cut nor a filter, nor another kind of query.
        ask(client, "like", 0, 20, filter={"max_total_variance": 1e9})
        client.post("/v1/search", json={"queries": [{"image": in_base64(picture())}]})
        after = values(client)
        far = [answer["hits"][0]["match_probability"] for answer in ask(client, "far", 0, 300)]
        moved = values(client)
    count, total = name.format("count"), name.format("sum")
    assert told[count] == after[count] == 300 and told[total] == pytest.approx(sum(like), rel=1e-4)
    expected = told['sfumato_calibrated_probability{gallery="images"}']
    assert sum(like) / 300 == pytest.approx(expected, abs=0.05)
    assert moved[count] == 600 and moved[total] - told[total] == pytest.approx(sum(far), rel=1e-4)
    assert abs(sum(far) / 300 - expected) > 0.15
    half = 'sfumato_first_hit_probability_bucket{gallery="images",le="0.5",target="listed"}'
    assert told[half] == sum(p <= 0.5 for p in like)


def test_abstentions_are_counted(watched):
    with served(watched) as client:
        answers = [*ask(client, "like", 0, 30, abstain=0.5), *ask(client, "far", 0, 30, abstain=0.5)]
        ask(client, "like", 0, 30)
        text = client.get("/metrics").text
    abstained = sum(answer["abstained"] for answer in answers)
    assert 30 <= abstained < 60
    assert f'sfumato_abstentions_total{{abstained="yes",gallery="images"}} {float(abstained)}' in text
    assert f'sfumato_abstentions_total{{abstained="no",gallery="images"}} {float(60 - abstained)}' in text


def test_a_gallery_that_the_calibration_does_not_cover_has_no_state(run, data):
    sources = read_only(run, data)  # Calibrated on galleries of 48: nine texts are too few to compare.
    with served(sources) as client:
        client.post("/v1/search", json={"queries": [{"image": in_base64(picture())}], "gallery": "texts"})
        galleries, text = client.get("/v1/info").json()["galleries"], client.get("/metrics").text
    assert galleries["images"]["queries"] is not None and galleries["texts"]["queries"] is None
    assert 'sfumato_drift_queries{gallery="texts"}' not in text
    assert 'sfumato_calibrated_probability{gallery="texts"}' not in text
