"""Estimators against slow loops and on data with a known truth; probabilities of hits."""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from support.batches import MATCHING, TEXTS, M, N, scene
from support.raising import raises
from support.texts import said_of_text

from sfumato import DISTANCES, ESTIMATORS, Estimator, Relevance, estimate_uncertainty, measure_trust, register_estimator
from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.logits import PairLogits
from sfumato.calibration.query_scores import QueryScores
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.evaluation import estimators as module
from sfumato.evaluation.estimators import Matching, usable_estimators
from sfumato.evaluation.hits import hit_figures, measure_hits, without_nearest
from sfumato.evaluation.trust import described
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.reliability import calibration_error_by_chance, expected_calibration_error, log_loss


@cache
def by_loops_of_text(text):
    log_number, precision = said_of_text(sentence_vectors([text])[0], len(text.split()))
    return {"text_misses": 1 - min(1, max(0, precision)), "text_multiplicity": math.exp(log_number)}


def by_loops(query, gallery, text, scale=1.3, bias=2.0, left_out=()):
    mean, var = query.mean[0].double().tolist(), query.var[0].double().tolist()
    rows = zip(gallery.mean.double().tolist(), gallery.var.double().tolist(), strict=True)
    items = [row for j, row in enumerate(rows) if j not in left_out]
    means = [sum((a - b) ** 2 for a, b in zip(mean, m, strict=True)) for m, _ in items]
    csd = [gap + sum(var) + sum(v) for gap, (_, v) in zip(means, items, strict=True)]
    logit = [bias - scale * x for x in csd]
    sigmoid = lambda x: 1 / (1 + math.exp(-x))

    def entropy(logits):
        total = sum(math.exp(x) for x in logits)
        return -sum(math.exp(x) / total * math.log(math.exp(x) / total) for x in logits)

    order = sorted(range(len(items)), key=lambda j: csd[j])
    return {
        "total_variance": sum(var), "expected_matches": sum(sigmoid(x) for x in logit), "match_entropy": entropy(logit),
        "top1_mismatch": 1 - sigmoid(max(logit)), "margin": logit[order[1]] - logit[order[0]],
        "nearest_mean": min(means), "expected_misses": 1 - sum(sigmoid(logit[j]) for j in order[:10]) / 10,
    } | by_loops_of_text(text)  # fmt: skip


def test_every_estimator_is_its_loop():
    queries, gallery = scene()
    found = estimate_uncertainty(queries, gallery, MATCHING, texts=TEXTS)
    assert set(found) == set(ESTIMATORS)
    for i in range(N):
        loops = by_loops(queries[i : i + 1], gallery, TEXTS[i])
        assert set(loops) == set(ESTIMATORS), "an estimator without its slow loop, or a loop without its estimator"
        for name, value in loops.items():
            assert found[name][i] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    for name, estimator in ESTIMATORS.items():
        assert estimator.name == name and found[name].shape == (N,) and found[name].dtype == float
        np.testing.assert_array_equal(estimator(queries, gallery, MATCHING, TEXTS), found[name])
        assert estimator.kind in ("aleatoric", "epistemic", "both") and estimator.formula and estimator.cost
    as_array = estimate_uncertainty(queries, gallery, MATCHING, texts=np.array(TEXTS))
    assert as_array.keys() == found.keys() and all((as_array[name] == found[name]).all() for name in found)
    without = [name for name, e in ESTIMATORS.items() if not e.needs_texts]
    assert list(estimate_uncertainty(queries, gallery, MATCHING)) == without and "text_misses" not in without
    given = {"estimators": ESTIMATORS}, {"texts": TEXTS[1:]}
    for message, options in zip(("text_misses needs texts, got none", "12 texts for 13 queries"), given, strict=True):
        raises(ValueError, message, estimate_uncertainty, queries, gallery, MATCHING, **options)


LARGEST = lambda block: block.queries.var.amax(1)
TOY = Estimator("largest_variance", "largest variance of the query", "aleatoric", "n d", LARGEST, False)


@pytest.fixture
def toy():
    register_estimator(TOY)
    yield TOY
    del ESTIMATORS[TOY.name]


def test_a_registered_estimator_is_measured_like_the_others(toy):
    queries, gallery = scene(10)
    expected = queries.var.max(1).values.numpy()
    np.testing.assert_array_equal(estimate_uncertainty(queries, gallery, MATCHING)[toy.name], expected)
    assert usable_estimators(queries, gallery)[toy.name] is toy
    assert described(usable_estimators())[toy.name]["estimates"] == toy.formula
    # Each query is at its true item, except those with a large largest variance, which are at another item.
    items = GaussianEmbedding.point(gallery.mean)
    wrong = queries.var.amax(1, keepdim=True) > queries.var.amax(1).median()
    clear = GaussianEmbedding(torch.where(wrong, items.mean[-1], items.mean[:N]), queries.log_var)
    ground_truth, chosen = Relevance.from_lists([[i] for i in range(N)], n_gallery=M), usable_estimators(items)
    figures = measure_trust(clear, items, ground_truth, MATCHING, estimators=chosen, n_resamples=0).estimators
    assert figures[toy.name]["wrong_auroc"].value == 1 > figures["total_variance"]["wrong_auroc"].value
    assert register_estimator(toy) is toy  # The place that took the name may define it again.
    for change, message in (
        ({"function": ESTIMATORS["total_variance"].function}, "there is an estimator 'largest_variance' already"),
        ({"name": "largest variance"}, "'largest variance' is not an identifier"),
        ({"kind": "model"}, "unknown kind 'model'; known: aleatoric, epistemic, both"),
    ):
        raises(ValueError, message, register_estimator, replace(toy, **change))


def test_items_that_are_left_out_are_as_good_as_not_there_and_blocks_are_small(monkeypatch):
    queries, gallery = scene(1)
    seen, block = [], module.Block
    monkeypatch.setattr(module, "Block", lambda *given: seen.append(len(given[2])) or block(*given))
    read, predict = [], module.images_and_precision
    monkeypatch.setattr(module, "images_and_precision", lambda v, n: read.append(len(n)) or predict(v, n))
    nearest = DISTANCES["csd"].matrix(queries, gallery).argmin(1).tolist()
    lists = [[], [0], [3, 4, 5], *[[j] for j in nearest[3:]]]
    without = Relevance.from_lists(lists, n_gallery=M)
    found = estimate_uncertainty(queries, gallery, MATCHING, texts=TEXTS, without=without, memory_mb=M / 2**16)
    assert max(seen) == 4 and sum(seen) == N and read == seen, "the texts of a block are read once"
    whole = estimate_uncertainty(queries, gallery, MATCHING, texts=TEXTS)
    for i in range(N):
        for name, value in by_loops(queries[i : i + 1], gallery, TEXTS[i], left_out=lists[i]).items():
            assert found[name][i] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    for name, estimator in ESTIMATORS.items():
        if estimator.needs_gallery:
            assert (found[name][3:] != whole[name][3:]).all(), name
        else:
            np.testing.assert_allclose(found[name], whole[name], rtol=1e-4, err_msg=name)  # In float32.


def test_kl_goes_from_image_to_text_in_both_directions_and_points_need_no_gallery():
    queries, gallery = (GaussianEmbedding.point(x.mean) for x in scene(7))
    found = estimate_uncertainty(queries, gallery, MATCHING)
    assert (found["total_variance"] == 0).all() and all(not np.isnan(values).any() for values in found.values())
    needy = {"needy": replace(TOY, name="needy", needs_variance=True)}
    assert usable_estimators(queries, gallery, estimators=ESTIMATORS | needy, texts=TEXTS) == ESTIMATORS
    with pytest.raises(ValueError, match="needy needs variances, got points"):
        estimate_uncertainty(queries, gallery, MATCHING, estimators=needy)
    queries, gallery = scene(8)
    chosen = {name: e for name, e in ESTIMATORS.items() if not e.needs_gallery}
    alone = estimate_uncertainty(queries, gallery[:0], MATCHING, estimators=chosen, texts=TEXTS)
    whole = estimate_uncertainty(queries, gallery, MATCHING, texts=TEXTS)
    assert len(chosen) == 3 and all((alone[name] == whole[name]).all() for name in chosen)
    assert all(v.shape == (0,) for v in estimate_uncertainty(queries[:0], gallery, MATCHING, texts=[]).values())
    images, texts = scene(4)
    matrix = DISTANCES["kl"].matrix(images, texts)
    assert not torch.allclose(matrix.T, DISTANCES["kl"].matrix(texts, images))
    chosen = {"margin": ESTIMATORS["margin"]}
    for queries, gallery, first, distance in ((images, texts, "i2t", matrix), (texts, images, "t2i", matrix.T)):
        found = estimate_uncertainty(queries, gallery, Matching("kl", 1.0, 0.0, first), estimators=chosen)
        best = distance.topk(2, largest=False).values
        expected = best[:, 0] - best[:, 1]
        np.testing.assert_allclose(found["margin"], expected.numpy(), rtol=1e-4, atol=1e-5)


def of_distance(scale, bias):
    pairs = PairLogits(scale, bias, 0.1)
    fit = DirectionCalibration(pairs, QueryScores.fit(torch.eye(3), torch.eye(3), growth=1.0))
    return Calibration(**vars(pairs), i2t=fit, t2i=fit)


def pairs(n=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    distance = 3.5 + torch.randn(n, n, generator=generator)
    return distance, torch.bernoulli(torch.sigmoid(2 - 2 * distance), generator=generator)


@pytest.mark.parametrize(("direction", "population"), [("t2i", "planted"), ("i2t", "independent")])
def test_a_loop_over_queries_has_the_same_figures(direction, population):
    distance, match = pairs(n=40)
    measured = measure_hits(of_distance(2.0, 2.0), distance, match, sizes=(), population=population)
    [figures] = [one for one in measured if (one.direction, one.hits) == (direction, 10)]
    p, y, beside = [], [], match.bool().any(0)
    asked = (distance[:, beside], match[:, beside]) if direction == "i2t" else (distance.T, match.T)
    for d, own in zip(*asked, strict=True):
        if own.any() or population == "independent":
            order = d.argsort()[:10]
            p += torch.sigmoid(2 - 2 * d[order]).tolist()
            y += own[order].tolist()
    p, y = np.array(p), np.array(y)
    assert figures.n == len(p) and figures.n_gallery == 40
    assert figures.rate == pytest.approx(y.mean()) and figures.mean_probability == pytest.approx(p.mean(), abs=1e-6)
    slow = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    assert figures.log_loss == pytest.approx(slow, abs=1e-5)
    assert figures.brier_skill == pytest.approx(1 - np.mean((p - y) ** 2) / (y.mean() * (1 - y.mean())), abs=1e-5)
    higher = p[y == 1][:, None] - p[y == 0][None, :]
    assert figures.auroc == pytest.approx((higher > 0).mean() + (higher == 0).mean() / 2, abs=1e-6)
    error = expected_calibration_error(torch.from_numpy(p), torch.from_numpy(y))
    assert figures.ece == pytest.approx(error, abs=1e-6)
    assert figures.ece_by_chance == pytest.approx(calibration_error_by_chance(torch.from_numpy(p)), abs=1e-6)


def test_sizes_populations_errors_by_chance_and_verdicts_of_few_and_of_many_queries():
    distance, match = pairs(n=120)
    calibration = of_distance(2.0, 2.0)
    planted = measure_hits(calibration, distance, match, sizes=(30, 60, 5000), n_galleries=2)
    every = [*itertools.product(("t2i", "i2t"), (30, 60, 120), (1, 10))]
    assert [(f.direction, f.n_gallery, f.hits) for f in planted] == every
    every = measure_hits(calibration, distance, match, sizes=(30,), population="independent")
    assert every[0].n > planted[0].n and every[0].rate < planted[0].rate and without_nearest(calibration) == calibration
    p = torch.rand(3000, generator=torch.Generator().manual_seed(1)).double()
    drawn = (torch.bernoulli(p, generator=torch.Generator().manual_seed(s)) for s in range(200, 230))
    mean = np.mean([expected_calibration_error(p, match, binning="count") for match in drawn])
    assert calibration_error_by_chance(p) == pytest.approx(float(mean), abs=0.002)
    assert calibration_error_by_chance(p[:60]) > 3 * calibration_error_by_chance(p)
    assert log_loss(torch.tensor([0.5, 0.25]), torch.tensor([1, 0])) == pytest.approx(-(np.log(0.5) + np.log(0.75)) / 2)
    raises(ValueError, "log_loss", log_loss, torch.zeros(0), torch.zeros(0))
    few = [verdict_of(36, 0.0, seed) for seed in range(20)]
    assert few.count("too few") >= 16
    assert [verdict_of(3000, off, 1) for off in (0.0, 0.1, 0.25)] == ["holds", "rough", "misleads"]
    wrong = [verdict_of(150, 0.1, seed) for seed in range(40)]
    assert wrong.count("holds") <= 4  # At most 5 % by the rule.


def verdict_of(n, off, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.sigmoid(2 * torch.randn(n, generator=generator).double() + 0.8)
    true = torch.where(p > 0.5, p - off, p + off)
    return hit_figures(p.numpy(), torch.bernoulli(true, generator=generator).numpy(), "t2i", n, 1).verdict
