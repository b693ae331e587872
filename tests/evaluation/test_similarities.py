"""Cosine and dot product of the means as scores to rank by."""

import numpy as np
import pytest
import torch
from support.references_metrics import metrics_by_definition

from sfumato.evaluation.benchmarks import figures, rank
from sfumato.evaluation.ground_truth import ground_truth_from_pairs
from sfumato.evaluation.protocols import SimilarityMatrix, ranked_by
from sfumato.gaussian import GaussianEmbedding

N, M, D = 40, 80, 4


def scene(seed):
    """Unnormalised means; images with one text or several."""
    random = np.random.default_rng(seed)
    mean = random.normal(size=(N, D))
    own = np.sort(np.concatenate([np.arange(N), random.integers(N, size=M - N)]))
    text = mean[own] + 0.7 * random.normal(size=(M, D))
    images, texts = (GaussianEmbedding.point(torch.from_numpy(x)) for x in (mean, text))
    names = [[f"{letter}{i}" for i in range(k)] for letter, k in (("i", N), ("t", M))]
    ground_truth = ground_truth_from_pairs("all", *names, [(f"i{i}", f"t{j}") for j, i in enumerate(own)])
    return images, texts, *names, ground_truth


def figures_by(score, images, texts, image_ids, text_ids, ground_truths):
    return figures(rank(ranked_by(score, images, texts), image_ids, text_ids, ground_truths))


def rows(relevance):
    return [relevance.indices[a:b].tolist() for a, b in zip(relevance.indptr[:-1], relevance.indptr[1:], strict=True)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_similarities_by_loops(dtype):
    images, texts, image_ids, text_ids, ground_truth = scene(2)
    images, texts = images.to(dtype), texts.to(dtype)
    a, b = images.mean.double().numpy(), texts.mean.double().numpy()
    dot = np.array([[sum(x * y for x, y in zip(p, q, strict=True)) for q in b] for p in a])
    lengths = np.sqrt((a**2).sum(1))[:, None] * np.sqrt((b**2).sum(1))
    found = {}
    for score, expected in (("dot", dot), ("cosine", dot / lengths)):
        matrix = SimilarityMatrix(images, texts, score)
        assert matrix.shape == (N, M)
        np.testing.assert_allclose(matrix[:].double().numpy(), expected, atol=2e-6)
        np.testing.assert_allclose(matrix[3:5, 7:9].double().numpy(), expected[3:5, 7:9], atol=2e-6)
        found_figures = figures_by(score, images, texts, image_ids, text_ids, [ground_truth])["all"]
        for direction, d, relevance in (("i2t", -expected, ground_truth.i2t), ("t2i", -expected.T, ground_truth.t2i)):
            for metric, value in metrics_by_definition(d, rows(relevance)).items():
                assert found_figures[direction][metric] == pytest.approx(value), (score, direction, metric)
        found[score] = found_figures["i2t"]["map@r"]
    found["mean"] = figures_by("squared_l2", images, texts, image_ids, text_ids, [ground_truth])["all"]["i2t"]["map@r"]
    assert len(set(found.values())) == 3, "on means of different lengths the three differ"
