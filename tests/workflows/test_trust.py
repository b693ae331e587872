"""The benchmark of a run, taken apart: what it embeds, what it fits on which split, and what it resamples together."""

import numpy as np
import pytest

from sfumato import ESTIMATORS, get_distance
from sfumato.evaluation import trust as measures
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import load_run
from sfumato.search.exact import rank_relevant
from sfumato.workflows import trust
from sfumato.workflows.trust import trust_model


@pytest.fixture(scope="module")
def run(toy):
    return load_run(toy / "run")


@pytest.mark.slow
def test_captions_of_an_image_are_resampled_together_and_share_its_proxy(run, monkeypatch):
    seen, real = {}, measures.measure_trust

    def spy(queries, gallery, relevance, matching, **options):
        seen[matching.direction] = options | {"relevance": relevance}
        return real(queries, gallery, relevance, matching, **options)

    monkeypatch.setattr(trust, "measure_trust", spy)
    data = run.recipe.data.model_copy(update={"equal_texts": "separate"})
    trust_model(run, data, "test", n_resamples=0)
    texts, images = seen["t2i"], seen["i2t"]
    image_of = texts["relevance"].indices[texts["relevance"].indptr[:-1]].tolist()
    assert texts["groups"].tolist() == image_of and len(set(images["groups"].tolist())) == images["relevance"].n_queries
    for name in ("caption_distance", "caption_words"):
        np.testing.assert_array_equal(texts["proxies"][name], images["proxies"][name][image_of])
    assert np.ptp(images["proxies"]["caption_distance"]) > 0
    assert not texts["multiplicity"] and set(texts["estimators"]) == set(ESTIMATORS)
    trust_model(run, run.recipe.data, "test", n_resamples=0)
    shared, images = seen["t2i"], seen["i2t"]
    counts = shared["relevance"].counts
    assert (counts == 2).sum() == 2 and len(counts) == 24, "two equal captions are one text of two images each"
    assert not shared["multiplicity"] and len(shared["groups"]) == 24
    for text, image in enumerate(shared["groups"]):
        own = shared["relevance"].indices[shared["relevance"].indptr[text] :][: counts[text]]
        assert image == own[-1]
        assert shared["proxies"]["caption_distance"][text] == images["proxies"]["caption_distance"][image]


def test_probabilities_of_hits_are_those_that_a_search_shows(run):
    report = trust_model(run, run.recipe.data, "test", n_resamples=5)
    prepared = load_split(run.model, run.recipe.data, "test")
    queries, gallery = embed_split(run.model, prepared)
    distance, truth = get_distance(run.distance), prepared.data.relevance()
    missed = 1 - per_query_metrics(rank_relevant(queries, gallery, truth, distance), truth)["recall@1"]
    assert 0 < missed.mean() < 1
    of_images = {kind: [f for f in found if f.direction == "i2t"] for kind, found in report.hits.items()}
    served, alone = (next(f for f in of_images[kind] if f.hits == 1) for kind in ("served", "distance"))
    d = distance.matrix(queries, gallery).sort(dim=1).values
    p = run.calibration.i2t.hit_probability(d[:, :1], d[:, :50], n_gallery=gallery.n).double()
    assert served.n_gallery == served.n == len(missed) == queries.n
    assert served.mean_probability == pytest.approx(float(p.mean()), abs=1e-6)
    assert served.rate == alone.rate == pytest.approx(1 - missed.mean())
    error, of_constant = (p[:, 0].numpy() - (1 - missed)) ** 2, served.rate * (1 - served.rate)
    assert served.brier_skill == pytest.approx(1 - error.mean() / of_constant, abs=1e-6)


def test_splits_without_probabilities_of_hits_or_with_those_of_some_images(run, monkeypatch):
    def refuses(*args, **options):
        raise ValueError("the split cannot be halved")

    with monkeypatch.context() as patch:
        patch.setattr(trust, "cross_fitted", refuses)
        report = trust_model(run, run.recipe.data, "val", n_resamples=0)
    assert report.hits == {} and "the probabilities of hits are left out: the split cannot be halved" in report.notes
    monkeypatch.setattr(trust, "_HIT_IMAGES", 5)
    report = trust_model(run, run.recipe.data, "test", n_resamples=0)
    assert {f.n_gallery for f in report.hits["served"]} == {5}
    assert "the probabilities of hits are those among 5 random images" in report.notes
