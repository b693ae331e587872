"""NCR against slow loops, numbers worked by hand, scikit-learn's mixture, and a training on pairs known to be wrong."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from papers.methods.ncr import NCRLoss, NCROptions, Pairs, fit_mixture, posterior, soft_margin
from sfumato.gaussian import GaussianEmbedding


def batch(n=5, m=7, d=3, seed=0):
    """Unit means, and labels of which an image has two texts and the last texts have no image."""
    random = torch.Generator().manual_seed(seed)
    image, text = (
        GaussianEmbedding.point(functional.normalize(torch.randn(k, d, generator=random, dtype=torch.float64), dim=1))
        for k in (n, m)
    )
    match = torch.eye(n, m, dtype=torch.float64)
    match[0, n] = 1
    return image, text, match


def slow_pairs(distance, match, margin):
    """(losses, nearest texts, nearest images) of the listed pairs, by loops."""
    n, m = match.shape
    losses, texts, images = [], [], []
    for i, t in [(i, t) for i in range(n) for t in range(m) if match[i, t] >= 0.5]:
        own = distance[i][t]
        other_texts = [distance[i][j] for j in range(m) if match[i, j] == 0]
        other_images = [distance[k][t] for k in range(n) if match[k, t] == 0]
        sides = other_texts, other_images
        losses.append(sum(sum(max(0, margin + own - other) for other in side) / len(side) for side in sides))
        texts.append(min(other_texts))
        images.append(min(other_images))
    return losses, texts, images


def test_the_soft_margin_of_numbers_worked_by_hand():
    found = soft_margin(torch.tensor([0.0, 0.5, 1.0]), 0.2, 10.0)
    assert found.tolist() == pytest.approx([0, 0.2 * (math.sqrt(10) - 1) / 9, 0.2], abs=1e-7)
    assert found[1] < 0.1, "below the linear margin"


def test_pairs_are_those_of_loops():
    image, text, match = batch()
    distance = torch.cdist(image.mean, text.mean).square()
    losses, texts, images = slow_pairs(distance.tolist(), match, 0.4)
    pairs = Pairs(distance, match)
    assert pairs.losses(0.4).tolist() == pytest.approx(losses)
    assert [side.tolist() for side in pairs.nearest()] == [pytest.approx(texts), pytest.approx(images)]
    gaps = [(a + b) / 2 - own for a, b, own in zip(texts, images, pairs.own.tolist(), strict=True)]
    best = max(gaps)  # A tenth of six pairs is one.
    assert best > 0 > min(gaps)
    assert pairs.predicted().tolist() == pytest.approx([min(max(gap / best, 0), 1) for gap in gaps])


def test_the_mixture_is_that_of_scikit_learn():
    mixture = pytest.importorskip("sklearn.mixture")
    random = np.random.default_rng(0)
    values = np.concatenate([random.normal(0.2, 0.05, 700), random.normal(0.6, 0.15, 300)])
    floor = 1e-4 * np.ptp(values) ** 2
    other = mixture.GaussianMixture(2, random_state=0, tol=1e-9, max_iter=500, reg_covar=floor).fit(values[:, None])
    found = fit_mixture(torch.from_numpy(values), n_steps=500)
    order = np.argsort(other.means_[:, 0])
    theirs = [part.ravel()[order] for part in (other.weights_, other.means_, other.covariances_)]
    np.testing.assert_allclose(found.numpy(), theirs, rtol=1e-4)
    clean = posterior(torch.from_numpy(values), found)[:, 0].numpy()
    np.testing.assert_allclose(clean, other.predict_proba(values[:, None])[:, order[0]], atol=1e-4)
    shifted = fit_mixture(torch.from_numpy(3 * values + 1), n_steps=500)
    np.testing.assert_allclose(posterior(torch.from_numpy(3 * values + 1), shifted)[:, 0].numpy(), clean, atol=1e-9)


@pytest.mark.parametrize("values", [[0.5] * 8, [0.0, 1.0], [0.1, 0.1, 0.1, 9.0]])
def test_a_mixture_of_few_or_equal_losses_is_finite(values):
    found = fit_mixture(torch.tensor(values))
    assert found.isfinite().all() and (found[2] > 0).all() and found[1, 0] <= found[1, 1]
    torch.testing.assert_close(posterior(torch.tensor(values), found).sum(1), torch.ones(len(values)))


@pytest.mark.parametrize("epoch", [5, 10])
def test_the_loss_after_the_warm_up_is_that_of_loops(epoch):
    image, text, match = batch(d=4)
    loss = NCRLoss(NCROptions(margin=0.3, base=5.0))
    warm = loss(image, text, match, epoch=0)
    distance = torch.cdist(image.mean, text.mean).square()
    losses, texts, images = slow_pairs(distance.tolist(), match, 0.3)
    losses = torch.tensor(losses, dtype=torch.float64)
    assert float(warm.total) == pytest.approx(float(losses.mean()))

    latest = torch.tensor([0.4, 0.5, 0.6, 1.3, 1.5])
    loss.remembered[:6], loss.remembered[6:11] = torch.nan, latest
    found = loss(image, text, match, epoch=epoch)
    clean = posterior(losses, fit_mixture(torch.cat([losses, latest])))[:, 0].tolist()
    pairs, expected = Pairs(distance, match), 0.0
    counted = [p for p in range(6) if clean[p] > 0.5 or epoch == 10]
    for p in counted:
        own, w, d = float(pairs.predicted()[p]), clean[p], float(pairs.own[p])
        margin = (5.0 ** (w + (1 - w) * own if w > 0.5 else own) - 1) / 4 * 0.3
        expected += (max(0, margin + d - texts[p]) + max(0, margin + d - images[p])) / len(counted)
    assert float(found.total) == pytest.approx(expected, rel=1e-5)
    assert 0 < found.stats["clean"] < 1, "the scene has pairs of both kinds"


def test_only_the_latest_losses_are_remembered():
    image, text, match = batch()
    loss = NCRLoss(NCROptions(warmup_epochs=2, memory=8))
    first = Pairs(torch.cdist(image.mean, -text.mean).square(), match).losses(0.4)
    last = Pairs(torch.cdist(image.mean, text.mean).square(), match).losses(0.4)
    loss(image, GaussianEmbedding.point(-text.mean), match, epoch=0)
    loss(image, text, match, epoch=1)
    torch.testing.assert_close(loss.remembered.double(), torch.cat([last, first[:2]]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("epoch", [0, 12])
def test_gradients_are_those_of_differences(epoch, monkeypatch):
    image, text, match = batch()
    loss = NCRLoss()
    clean = torch.tensor([0.9, 0.1, 0.6, 0.4, 0.8, 0.2], dtype=torch.float64)
    monkeypatch.setattr(loss, "divided", lambda losses: clean)  # What it divides by has no gradient.
    monkeypatch.setattr(Pairs, "predicted", lambda pairs: clean.flip(0))

    def total(x, y):
        return loss(GaussianEmbedding.point(x), GaussianEmbedding.point(y), match, epoch=epoch).total

    x, y = image.mean.clone().requires_grad_(), text.mean.clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (x, y), atol=1e-4)
