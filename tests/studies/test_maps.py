"""The map against numpy, draws and scikit-learn itself."""

import math
import sys

import numpy as np
import pytest
import torch

from sfumato import GaussianEmbedding
from sfumato.errors import UserError
from sfumato.metrics.relevance import Relevance
from sfumato.studies.maps import FAMILIES, map_items


def split(n=30, per=3, d=6, seed=0):
    """n images with texts of their own near them."""
    random = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, d, generator=random) * torch.tensor([3.0, 2, 1, 0.5, 0.5, 0.1])[:d]
    near = mean.repeat_interleave(per, 0) + 0.3 * torch.randn(n * per, d, generator=random)
    images = GaussianEmbedding(mean, torch.randn(n, d, generator=random) - 2)
    texts = GaussianEmbedding(near, torch.randn(n * per, d, generator=random) - 1)
    owner = np.repeat(np.arange(n), per)
    return images, texts, Relevance.from_pairs(owner, np.arange(n * per), n_queries=n, n_gallery=n * per)


def test_ellipses_are_the_covariance_of_projected_draws():
    images, texts, ground_truth = split()
    found = map_items(images, texts, ground_truth, n=1000)
    both = GaussianEmbedding.cat([images, texts])
    mean = both.mean.double().numpy()
    axes = np.linalg.svd(mean - mean.mean(0))[2][:2].T
    places = np.array([(item.x, item.y) for item in found.items])
    axes *= np.sign(((mean - mean.mean(0)) @ axes * places).sum(0))
    np.testing.assert_allclose(places, (mean - mean.mean(0)) @ axes, atol=1e-5)
    draws, z = 20_000, 5  # Five standard errors of a variance, sqrt(2 / draws) of it each.
    sample = both[:5].sample(draws, generator=torch.Generator().manual_seed(1)).double().numpy() @ axes
    for drawn, item in zip(sample, found.items, strict=False):
        turn = np.array([[math.cos(item.angle), -math.sin(item.angle)], [math.sin(item.angle), math.cos(item.angle)]])
        said = turn @ np.diag([item.a**2, item.b**2]) @ turn.T
        np.testing.assert_allclose(np.cov(drawn.T), said, atol=z * math.sqrt(2 / draws) * item.a**2)
    assert found.explained == pytest.approx(
        np.square(np.linalg.svd(mean - mean.mean(0))[1][:2]) / np.square(mean - mean.mean(0)).sum()
    )
    variance = both.var.double().sum(1).tolist()
    assert [item.total_variance for item in found.items] == pytest.approx(variance, rel=1e-6)


def test_a_large_split_is_sampled_with_texts_of_the_shown_images():
    images, texts, ground_truth = split()
    first, again, other = (map_items(images, texts, ground_truth, n=8, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    sides = [[item.index for item in first.items if item.side == side] for side in ("image", "text")]
    assert [len(s) for s in sides] == [8, 8] and all(s == sorted(set(s)) for s in sides)
    assert {t // 3 for t in sides[1]} <= set(sides[0])


def test_families_are_images_with_the_texts_that_match_them_alone():
    images, texts, ground_truth = split(n=7)
    pairs = np.concatenate(
        [np.stack([ground_truth.query_of_item, ground_truth.indices], 1), [[1, 0]]]
    )  # The first text is true of two.
    shared = Relevance.from_pairs(*pairs.T, n_queries=7, n_gallery=21)
    found = map_items(images, texts, shared, n=50, seed=6)
    of = {(item.side, item.index): item.family for item in found.items}
    first = [of["image", i] for i in range(7)]
    assert sorted(f for f in first if f is not None) == [0, 1, 2, 3, 4] and FAMILIES == 5
    assert [of["text", t] for t in range(21)] == [None, *[first[t // 3] for t in range(1, 21)]]
    assert first != sorted(first, key=lambda f: (f is None, f))  # A random choice, not the first of the data.


def test_tsne_is_scikit_learns_and_areas_are_in_proportion_to_variances():
    manifold = pytest.importorskip("sklearn.manifold", reason="the extra analysis is not installed")
    images, texts, ground_truth = split(n=10)
    found = map_items(images, texts, ground_truth, method="tsne", seed=4)
    both = GaussianEmbedding.cat([images, texts])
    expected = manifold.TSNE(2, perplexity=13.0, init="pca", random_state=4).fit_transform(both.mean.double().numpy())
    np.testing.assert_allclose([(item.x, item.y) for item in found.items], expected, rtol=1e-5)
    area = np.array([math.pi * item.a * item.b for item in found.items])
    share = area / both.total_variance.double().numpy()
    np.testing.assert_allclose(share, share[0], rtol=1e-5)
    assert area[0] > 0 and found.explained is None


def test_tsne_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(UserError, match=r"pip install 'sfumato\[analysis\]'"):
        map_items(*split(), method="tsne")


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_points_have_places_and_no_areas(method):
    pytest.importorskip("sklearn", reason="the extra analysis is not installed")
    images, texts, ground_truth = split(n=8)
    found = map_items(
        GaussianEmbedding.point(images.mean), GaussianEmbedding.point(texts.mean), ground_truth, method=method
    )
    assert all(item.a == item.b == item.total_variance == 0 for item in found.items)
    assert len({(item.x, item.y) for item in found.items}) == 32


def test_bad_input_is_named():
    images, texts, ground_truth = split()
    with pytest.raises(ValueError, match="one of pca, tsne, got 'umap'"):
        map_items(images, texts, ground_truth, method="umap")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        map_items(images, texts, ground_truth, n=0)
    with pytest.raises(ValueError, match="2 items are too few for a map"):
        map_items(images, texts, ground_truth, n=1)
    with pytest.raises(ValueError, match="6 dimensions, texts 5"):
        map_items(images, split(d=5)[1], ground_truth)
