import json
from math import comb

import numpy as np
import pytest
import scipy
import torch
from support.raising import raises
from support.references_metrics import csd_by_loops, metrics_by_definition

from sfumato import DISTANCES, GaussianEmbedding, Relevance
from sfumato.errors import UserError
from sfumato.evaluation.protocols import EvaluationOptions, evaluate_retrieval, table_rows

N, M, D = 23, 31, 4
KINDS = ["name"] * 23 + ["tag"] * 6 + ["rumour"] * 2


def scene(seed=0):
    """Each image has its own name; tags match about a third of the images; rumours match nothing."""
    random, ground_truth = np.random.default_rng(seed), np.zeros((N, M), bool)
    ground_truth[np.arange(N), np.arange(N)] = True
    ground_truth[:, 23:29] = random.random((N, 6)) < 0.3
    ground_truth[0, 23:29] = True
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(N, D, generator=generator)
    text = torch.cat([image, torch.randn(M - N, D, generator=generator)]) + 0.8 * torch.randn(M, D, generator=generator)
    log_vars = [torch.randn(n, D, generator=generator) - 1 for n in (N, M)]
    relevance = Relevance.from_pairs(*np.nonzero(ground_truth), n_queries=N, n_gallery=M)
    return GaussianEmbedding(image, log_vars[0]), GaussianEmbedding(text, log_vars[1]), relevance, ground_truth


def assert_metrics(ours, distance, ground_truth):
    for name, value in metrics_by_definition(distance, [np.flatnonzero(row) for row in ground_truth]).items():
        assert ours[name] == pytest.approx(value, abs=1e-12), name


def test_every_figure_by_loops():
    images, texts, relevance, ground_truth = scene()
    csd = csd_by_loops(images.mean.numpy(), images.var.numpy(), texts.mean.numpy(), texts.var.numpy())
    for name, distance in (("csd", csd), ("kl", DISTANCES["kl"].matrix(images, texts).numpy())):
        result = evaluate_retrieval(images, texts, relevance, text_kinds=KINDS, distance=name)
        assert (result.distance, result.n_images, result.n_texts) == (name, N, M)
        assert_metrics(result.i2t, distance, ground_truth)
        assert_metrics(result.t2i, distance.T, ground_truth.T)
        for kind in ("name", "tag"):
            columns = [j for j, k in enumerate(KINDS) if k == kind]
            assert_metrics(result.t2i_by_kind[kind], distance.T[columns], ground_truth.T[columns])
            assert_metrics(result.i2t_by_kind[kind], distance[:, columns], ground_truth[:, columns])
    assert result.t2i["n_queries"] == 29 and result.t2i["n_without_positives"] == 2
    assert result.rsum == pytest.approx(sum(d[f"recall@{k}"] for d in (result.i2t, result.t2i) for k in (1, 5, 10)))
    assert list(result.t2i_by_kind) == list(result.i2t_by_kind) == ["name", "tag"]
    assert result.total_variance["text"] == pytest.approx(float(texts.var.sum(1).mean()), rel=1e-5)
    text = json.dumps(result.to_json(), allow_nan=False)
    assert json.loads(text)["i2t"]["recall@1"] == result.i2t["recall@1"]
    assert [name for name, _ in table_rows(result)] == [
        "image -> text", "text -> image", "image -> name", "image -> tag", "name -> image", "tag -> image",
    ]  # fmt: skip


MEASURES = {  # by the formulas of the three papers
    "total_variance": lambda log_var: np.exp(log_var).sum(1),
    "geometric_std": lambda log_var: np.exp(log_var / 2).prod(1) ** (1 / D),
    "log_det": lambda log_var: np.log(np.array([np.linalg.det(np.diag(v)) for v in np.exp(log_var)])),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_recall_is_binned_by_the_uncertainty_of_the_paper_that_is_asked_for(measure):
    images, texts, relevance, ground_truth = scene(6)
    distance = csd_by_loops(images.mean.numpy(), images.var.numpy(), texts.mean.numpy(), texts.var.numpy())
    result = evaluate_retrieval(images, texts, relevance, uncertainty=measure)
    assert result.uncertainty_measure == measure
    for name, embeddings, d, t in (("i2t", images, distance, ground_truth), ("t2i", texts, distance.T, ground_truth.T)):
        has = t.any(1)
        hit = t[np.arange(len(t)), d.argmin(1)][has]
        values = MEASURES[measure](embeddings.log_var.double().numpy())[has]
        parts, found = np.array_split(np.argsort(values), 10), result.uncertainty[name]
        assert [b["recall"] for b in found["bins"]] == pytest.approx([hit[p].mean() for p in parts])
        assert [b["uncertainty"] for b in found["bins"]] == pytest.approx([values[p].mean() for p in parts], rel=1e-4)
        assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(values, hit).statistic)
        recalls = [hit[p].mean() for p in parts]
        assert found["correlation"] == pytest.approx(scipy.stats.pearsonr(range(10), recalls).statistic)
    expected = scipy.stats.spearmanr(values, ground_truth.sum(0)[has]).statistic
    assert result.multiplicity["all"] == pytest.approx(expected) and result.multiplicity["n_texts"] == 29
    assert -1 <= result.multiplicity["balanced"] <= 1


def test_points_and_one_to_one_truth_leave_out_what_has_no_meaning():
    images, texts, relevance, _ = scene(6)
    message = "unknown uncertainty 'entropy'; known: total_variance, geometric_std"
    raises(ValueError, message, evaluate_retrieval, images, texts, relevance, uncertainty="entropy")
    raises(UserError, "--samples 0: give at least 1", EvaluationOptions, 0)
    images, texts, relevance, _ = scene(4)
    result = evaluate_retrieval(GaussianEmbedding.point(images.mean), texts, relevance, uncertainty="log_det")
    assert {b["uncertainty"] for b in result.uncertainty["i2t"]["bins"]} == {None}
    assert result.uncertainty["i2t"]["correlation"] is result.uncertainty["i2t"]["spearman"] is None
    assert result.uncertainty["t2i"]["correlation"] is not None
    json.dumps(result.to_json(), allow_nan=False)
    images, texts, _, _ = scene(3)
    names, one_to_one = texts[: images.n], Relevance.from_lists([[i] for i in range(N)], n_gallery=N)
    points = evaluate_retrieval(GaussianEmbedding.point(images.mean), GaussianEmbedding.point(names.mean), one_to_one)
    assert points.uncertainty is points.multiplicity is None and points.total_variance == {"image": 0.0, "text": 0.0}
    spread = evaluate_retrieval(images, names, one_to_one, text_kinds=["name"] * N)
    assert spread.uncertainty is not None and spread.multiplicity is None
    assert spread.t2i_by_kind == {} and spread.i2t_by_kind == {}


def test_what_ranks_no_better_than_chance_is_told_apart():
    """False alarms: a random model passes three deviations of either direction with a probability of about 1 in 400."""
    generator = torch.Generator().manual_seed(0)
    relevance = Relevance.from_lists([[2 * i, 2 * i + 1] for i in range(60)], n_gallery=120)
    images, texts = (GaussianEmbedding.point(torch.randn(n, 8, generator=generator)) for n in (60, 120))
    random = evaluate_retrieval(images, texts, relevance)
    assert not random.above_chance
    assert random.chance_rsum == pytest.approx(
        sum(1 - comb(118, k) / comb(120, k) for k in (1, 5, 10)) + sum(k / 60 for k in (1, 5, 10))
    )
    near = GaussianEmbedding.point(images.mean.repeat_interleave(2, 0) + torch.randn(120, 8, generator=generator))
    assert evaluate_retrieval(images, near, relevance).above_chance
    # Among eight images every recall@10 is 1; recall@1 tells.
    few = Relevance.from_lists([[i] for i in range(8)], n_gallery=8)
    assert evaluate_retrieval(images[:8], images[:8], few).above_chance
    assert not evaluate_retrieval(images[:8], texts[:8], few).above_chance
