"""Top-1 distance, margins and the whitened norm, against the released numbers and against slow loops."""

import pytest
import torch
from support.raising import raises
from torch.nn import functional

from papers.posthoc.closed_forms import (
    AdversarialMargin,
    CosineMargin,
    Top1Distance,
    WhitenedNorm,
    Whitening,
    fit_hit_logits,
    shortest_change,
)
from papers.posthoc.method import FrozenPairs
from papers.tests.posthoc.fixtures import fixture, items
from sfumato.matching import match_probability

DIRECTIONS = ("t2i", "i2t")
SIDE = {"t2i": "text", "i2t": "image"}


def uclip(direction):
    described, t = fixture("uclip_confidence")
    text, image = t["inputs/txt"][0], t["inputs/img"][0]
    return described, t, *((text, image) if direction == "t2i" else (image, text))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_parity_top1_and_margins(direction, dtype, rtol):
    _, t, queries, gallery = uclip(direction)
    q, g, side = queries.to(dtype), gallery.to(dtype), SIDE[direction]

    def same(found, wanted, summands=1.0):
        """Differences of cosines may cancel: float32 rounds relative to what is subtracted."""
        atol = 0.0 if dtype == torch.float64 else 1e-6 * float(summands)
        torch.testing.assert_close(found, wanted.to(dtype), rtol=rtol, atol=atol)

    same(1 - Top1Distance().uncertainty(side, q, g), t[f"top1similarity/{direction}"])
    same(-CosineMargin().uncertainty(side, q, g), t[f"ours/margin/{direction}"])
    same(-AdversarialMargin().uncertainty(side, q, g), t[f"ours/exact_unit/{direction}"])
    unit = functional.normalize(g, dim=1)
    same(shortest_change(q, unit), t[f"ours/exact/{direction}"], queries.norm(dim=1).max())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_released_steps_find_no_shorter_change(direction):
    """The released search steps towards the runner-up; the exact length is at most that of its finest path."""
    described, t, q, g = uclip(direction)
    exact = shortest_change(q, functional.normalize(g, dim=1))
    assert (exact <= t[f"adversarial_fine_raw/{direction}"] + described["cases"]["fine"]["step_size"]).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_parity_duplicates_have_no_margin(direction):
    _, t = fixture("uclip_confidence")
    q, g = (t["dup/txt"], t["dup/img"]) if direction == "t2i" else (t["dup/img"], t["dup/txt"])
    for dtype in (torch.float64, torch.float32, torch.float16):
        exact = AdversarialMargin().uncertainty(SIDE[direction], q.to(dtype), g.to(dtype))
        assert torch.isfinite(exact).all()
        zero = t[f"dup/lin_f64/{direction}"] < 1e-12
        assert zero.any() and (exact[zero].abs() < 1e-6).all() and (exact[~zero] < -1e-4).all()


def test_parity_whitening():
    _, t = fixture("wclip")
    own = Whitening.fit(t["inputs/train"], shrinkage=0)
    close = lambda found, wanted, rtol=1e-10: torch.testing.assert_close(found, wanted, rtol=rtol, atol=0)
    close(own.mean, t["plain/mean"])
    close(own.whitened(t["inputs/test"]).square().sum(1), t["plain/sq_norm"])
    close(own.whitened(t["inputs/test"]).square().sum(1), t["ours/mahalanobis_sq"])
    columns = own.whitened(t["inputs/train"]).flip(1)
    close(columns.abs(), t["plain/whitened"].abs(), rtol=1e-8)
    found = Whitening.fit(t["corr/train"], shrinkage=0).whitened(t["corr/test"]).square().sum(1)
    close(found, t["ours/corr/mahalanobis_sq"], rtol=1e-9)


@pytest.mark.parametrize("m", [2, 3, 31, 32, 33, 700])
def test_the_shortest_change_is_that_of_all_items(m):
    queries, gallery = (functional.normalize(items(n, 5, s), dim=1) for n, s in ((50, 3), (m, 4)))
    gallery[-1] = gallery[0]
    wanted = []
    for q in queries:
        first = int((gallery @ q).argmax())
        planes = [float(q @ (gallery[first] - g)) / float((gallery[first] - g).norm() or 1) for g in gallery]
        wanted.append(min(v for j, v in enumerate(planes) if j != first))
    found = shortest_change(queries, gallery)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_the_visit_does_not_end_too_early():
    """A hundred items lie beside the best one, and the nearest plane is that of an item behind them, opposite to it."""
    q = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    first, far = ([c, sign * (1 - c * c) ** 0.5, 0.0] for c, sign in ((0.5, 1), (0.29, -1)))
    crowd = [[0.3, 0.95, 0.0009 * k] for k in range(100)]
    gallery = functional.normalize(torch.tensor([first, *crowd, far], dtype=torch.float64), dim=1)
    planes = (q @ (gallery[0] - gallery[1:]).T).squeeze(0) / (gallery[0] - gallery[1:]).norm(dim=1)
    assert int((gallery @ q[0]).argsort(descending=True)[-1]) == 101 and int(planes.argmin()) == 100
    torch.testing.assert_close(shortest_change(q, gallery), planes[-1:])


def test_uncertainties_do_not_depend_on_the_length_of_embeddings():
    q, g = items(7, 5, 7), items(11, 5, 8)
    for method in (Top1Distance(), CosineMargin(), AdversarialMargin()):
        torch.testing.assert_close(method.uncertainty("text", 3 * q, 0.1 * g), method.uncertainty("text", q, g))


def test_the_whitened_norm_is_the_distance_of_mahalanobis():
    pairs = FrozenPairs(items(40, 6, 1), items(40, 6, 2), torch.arange(40).repeat(2, 1).T)
    method = WhitenedNorm({side: Whitening.fit(pairs.embeddings(side), shrinkage=0) for side in SIDE.values()})
    x = pairs.texts
    inverse = torch.linalg.inv(torch.cov(x.T))
    wanted = torch.stack([(row - x.mean(0)) @ inverse @ (row - x.mean(0)) for row in x])
    torch.testing.assert_close(method.uncertainty("text", x), wanted)
    assert not torch.allclose(method.uncertainty("image", x), wanted)
    assert method.uncertainty("text", x).mean() == pytest.approx(x.shape[1] * (len(x) - 1) / len(x))


def test_shrinkage_makes_few_items_enough():
    few = items(4, 9, 9)
    raises(ValueError, "singular", Whitening.fit, few, shrinkage=0)
    own = Whitening.fit(few)
    covariance = 0.99 * torch.cov(few.T) + 0.01 * torch.cov(few.T).trace() / 9 * torch.eye(9)
    wanted = torch.linalg.inv(covariance)
    torch.testing.assert_close(own.vectors / own.values @ own.vectors.T, wanted)


def test_platt_scaling_of_an_uncertainty():
    u = torch.linspace(0, 1, 200)
    hit = (torch.rand(200, generator=torch.Generator().manual_seed(0)) > u).long()
    scale, bias = fit_hit_logits(u, hit)
    p = match_probability(u.double(), scale, bias)
    n_hits = int(hit.sum())
    targets = torch.where(hit > 0, (n_hits + 1) / (n_hits + 2), 1 / (200 - n_hits + 2)).double()
    # At the maximum of the likelihood both gradients vanish.
    assert float((p - targets).sum()) == pytest.approx(0, abs=1e-6)
    assert float(((p - targets) * u).sum()) == pytest.approx(0, abs=1e-6)
    separable = fit_hit_logits(u, (u < 0.5).long())
    assert all(torch.isfinite(torch.tensor(separable)))


def test_pairs_are_checked():
    x, index = items(4, 3, 1), torch.arange(4).repeat(2, 1).T
    raises(ValueError, r"texts must be \(n, 3\), got \(4, 2\)", FrozenPairs, x, x[:, :2], index)
    raises(ValueError, r"pairs name text 0 .. 4, but there are 4", FrozenPairs, x, x, torch.tensor([[0, 0], [0, 4]]))
    raises(ValueError, r"pairs must be \(p, 2\) integers", FrozenPairs, x, x, index.double())
    raises(ValueError, "row 2 of images is zero", FrozenPairs, x * (torch.arange(4) != 2).unsqueeze(1), x, index)
    raises(ValueError, r"image_hidden must be \(4, d\), got \(3, 3\)", FrozenPairs, x, x, index, image_hidden=x[:3])
