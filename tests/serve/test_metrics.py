"""What the service measures of its answers: probabilities of first hits, those of the calibration, and abstentions."""

from dataclasses import replace

import pytest
import torch
from support.serving import embedded, in_base64, picture, read_only, served

from sfumato.calibration.calibrator import Calibration, QueryScores
from sfumato.distances import csd_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.run import load_run
from sfumato.serve.settings import ServedGallery, Sources
from sfumato.workflows.index import build_index


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
    """Sources calibrated on 500 texts "like N"."""
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


def test_a_gallery_of_another_size_than_the_calibration_expects_nothing(run, data):
    with served(read_only(run, data)) as client:  # Calibrated on galleries of 48: there are nine texts.
        text = client.get("/metrics").text
    assert 'sfumato_calibrated_probability{gallery="images"}' in text
    assert 'sfumato_calibrated_probability{gallery="texts"}' not in text
