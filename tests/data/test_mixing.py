"""Mixing against loops over pixels and labels; what is drawn against its stated frequencies."""

import numpy as np
import pytest
import scipy
import torch

from sfumato.data.transforms import MixPlan, plan_mixing, smooth_match

SIZE = (7, 10)


def plan(n=9, seed=0, size=SIZE, **options):
    return plan_mixing(n, size=size, generator=torch.Generator().manual_seed(seed), **options)


def pixels(n=9, size=SIZE, seed=1):
    return torch.randint(0, 256, (n, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def loop(plan, values):
    out = values.double().clone()
    for i in range(len(plan)):
        top, bottom, left, right = plan.box[i].tolist()
        other, fraction = values[plan.partner[i]].double(), plan.own_fraction[i].item()
        for y in range(values.shape[2]):
            for x in range(values.shape[3]):
                if not plan.cut[i]:
                    out[i, :, y, x] = fraction * values[i, :, y, x].double() + (1 - fraction) * other[:, y, x]
                elif top <= y < bottom and left <= x < right:
                    out[i, :, y, x] = other[:, y, x]
    return out


@pytest.mark.parametrize("options", [{"mixup_alpha": 0.0}, {"cutmix_alpha": 0.0}, {"choice": "element"}])
def test_pictures_are_the_loops(options):
    drawn = plan(fraction=0.8, seed=3, **options)
    mixed = drawn.own_fraction < 1
    assert mixed.any() and not mixed.all()
    images = pixels()
    for values in (images, images.float() / 255, (images.double() / 255)):
        out = drawn.apply(values)
        assert out.dtype == torch.float32 and out.min() >= 0 and out.max() <= 1
        torch.testing.assert_close(out.double(), loop(drawn, images.double() / 255), rtol=0, atol=1e-6)
        assert torch.equal(out[~mixed], (images.float() / 255)[~mixed])
    assert images.equal(pixels()), "the input is left alone"


def test_partner_is_the_flip_or_oneself_and_plans_of_several_processes_join():
    for n in (0, 1, 2, 9, 12):
        drawn = plan(n, fraction=1.0, seed=5)
        mixed = drawn.own_fraction < 1
        assert drawn.partner.dtype == torch.int64 and drawn.own_fraction.dtype == torch.float32 and len(drawn) == n
        assert drawn.apply(pixels(n)).shape == (n, 3, *SIZE)
        for i in range(n):
            assert drawn.partner[i] == (n - 1 - i if mixed[i] else i)
            assert mixed[i] or not drawn.cut[i]
    assert drawn.own_fraction.max() < 1
    assert plan(9, fraction=1.0, seed=5).own_fraction[4] == 1, "the middle of an odd batch is its own partner"
    plans = [plan(4, seed=0, fraction=1.0), plan(0, seed=7), plan(5, seed=1, fraction=1.0)]
    joint = MixPlan.cat(plans)
    assert torch.equal(joint.partner[4:], plans[2].partner + 4) and len(joint) == 9
    images = pixels()
    torch.testing.assert_close(joint.apply(images), torch.cat([plans[0].apply(images[:4]), plans[2].apply(images[4:])]))
    match = torch.rand(9, 6)
    torch.testing.assert_close(joint.match(match), torch.cat([plans[0].match(match[:4]), plans[2].match(match[4:])]))


def test_share_of_a_cut_picture_is_the_area_that_is_left():
    """Counted in the picture: what is still black of a black picture whose partner is white; clipping happens."""
    drawn = plan(400, fraction=1.0, mixup_alpha=0.0, seed=2)
    images = torch.zeros(400, 3, *SIZE, dtype=torch.uint8)
    images[200:] = 255
    own = (drawn.apply(images) == (images.float() / 255)).float().mean((1, 2, 3))
    torch.testing.assert_close(own, drawn.own_fraction)
    touches = (drawn.box[:, [0, 2]] == 0) | (drawn.box[:, [1, 3]] == torch.tensor(SIZE))
    clipped = touches.any(1) & drawn.cut
    assert clipped.any()
    # As drawn before clipping, the mean share of Beta(2, 2) would be 1/2; clipped boxes leave more.
    assert drawn.own_fraction[drawn.cut].mean() > 0.6


def test_labels_are_the_loop_and_keep_duplicate_captions_and_are_smoothed():
    """Images 0 and 2 share a group, so 0 also matches text 2; a text that matches both images of a mix keeps its 1."""
    drawn = MixPlan(torch.tensor([2, 1, 2]), torch.tensor([0.3, 1.0, 1.0]), torch.zeros(3, 4, dtype=torch.int64), SIZE)
    match = torch.tensor([[1, 0, 1, 0.5], [0, 1, 0, 0], [0, 0, 1, 1.0]], dtype=torch.float64)
    mixed = drawn.match(match)
    own, partner = drawn.own_fraction.tolist(), drawn.partner.tolist()
    expected = [
        [own[i] * match[i, j].item() + (1 - own[i]) * match[partner[i], j].item() for j in range(4)] for i in range(3)
    ]
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, torch.tensor(expected, dtype=torch.float64))
    assert mixed[0, 2] == 1 and mixed[1:].equal(match[1:])
    # The released code writes lambda on the diagonal and the rest at the partner: the pair (0, 2) falls from 1 to 0.7.
    released = torch.eye(3, 4, dtype=torch.float64) * 0.3
    released[0, 2] = 0.7
    assert (mixed[0] - released[0]).abs().max() > 0.2
    assert drawn.match(match.round().bool()).dtype == torch.float32
    rectangular = plan(9, fraction=1.0).match(torch.rand(9, 4))
    assert rectangular.shape == (9, 4)
    match = torch.tensor([[0.0, 0.5, 1.0]])
    torch.testing.assert_close(smooth_match(match, 0.1), torch.tensor([[0.1, 0.5, 0.9]]))
    assert smooth_match(match, 0.0).equal(match)
    # Twice e off and e short of 1, the other usual convention, is something else.
    assert not torch.allclose(smooth_match(match, 0.1), match * (1 - 0.1) + 0.1 / 2)


def test_the_parts_of_a_batch_share_its_choice_of_mixup_or_cutmix():
    """Otherwise 64 batches in three parts of which some image is mixed would agree with a probability of 2^-128."""
    kinds = set()
    for batch in range(64):
        seed, parts = 1000 * batch, []
        for part in range(3):
            common = torch.Generator().manual_seed(seed)
            parts.append(plan(16, seed + part, (8, 8), fraction=1.0, choice_generator=common))
        kinds.add(kind := bool(parts[0].cut.any()))
        assert [bool(part.cut.any()) for part in parts] == [kind] * 3
        alone = plan(16, seed, (8, 8), fraction=1.0)
        for name in ("partner", "own_fraction", "box"):
            assert getattr(alone, name).equal(getattr(parts[0], name))  # A single process mixes as before.
        assert not parts[0].own_fraction.equal(parts[1].own_fraction)
    assert kinds == {True, False}


def test_frequencies_are_those_stated():
    """Binomial and Kolmogorov-Smirnov tests at 1e-4 each, with a fixed seed."""
    n = 20_000
    drawn = plan(n, choice="element", size=(64, 48), cutmix_probability=0.3)
    mixed = (drawn.own_fraction < 1).numpy()
    # Empty boxes unmix under 1 in 100,000 of the cut ones: those with lambda above 1 - (2 / 48)^2.
    assert scipy.stats.binomtest(int(mixed.sum()), n, 0.25).pvalue > 1e-4
    assert scipy.stats.binomtest(int(drawn.cut.sum()), int(mixed.sum()), 0.3).pvalue > 1e-4
    blends = drawn.own_fraction.numpy()[mixed & ~drawn.cut.numpy()]
    assert scipy.stats.kstest(blends, scipy.stats.beta(2, 2).cdf).pvalue > 1e-4
    assert scipy.stats.kstest(blends, scipy.stats.beta(1, 1).cdf).pvalue < 1e-9
    batches = np.array([plan(40, fraction=1.0, seed=seed).cut.sum() for seed in range(400)])
    assert set(np.unique(batches)) <= set(range(0, 41)) and np.all((batches == 0) | (batches > 30))
    assert scipy.stats.binomtest(int((batches > 0).sum()), 400, 0.5).pvalue > 1e-4
    for off in ("mixup_alpha", "cutmix_alpha"):  # The released code then mixes every picture.
        drawn = plan(4000, size=(64, 48), choice="element", **{off: 0.0})
        mixed = int((drawn.own_fraction < 1).sum())
        assert scipy.stats.binomtest(mixed, 4000, 0.25).pvalue > 1e-4
        assert int(drawn.cut.sum()) == (mixed if off == "mixup_alpha" else 0)


def test_areas_that_are_left_have_the_mean_of_a_slow_loop():
    """Within 5 standard errors; sides by the area without its root, and areas before clipping, are farther than 20."""
    random, h, w = np.random.default_rng(0), 64, 48

    def area(root, clipped):
        side = (1 - random.beta(2, 2)) ** (0.5 if root else 1.0)
        y, x, dy, dx = random.integers(h), random.integers(w), int(h * side) // 2, int(w * side) // 2
        if not clipped:
            return 1 - 4 * dy * dx / (h * w)
        return 1 - (min(y + dy, h) - max(y - dy, 0)) * (min(x + dx, w) - max(x - dx, 0)) / (h * w)

    drawn = plan(20_000, fraction=1.0, mixup_alpha=0.0, size=(h, w))
    ours = drawn.own_fraction.double().numpy()

    def gap(**options):
        slow = np.array([area(**options) for _ in range(20_000)])
        return abs(ours.mean() - slow.mean()) / np.sqrt((ours.var() + slow.var()) / 20_000)

    assert gap(root=True, clipped=True) < 5
    assert gap(root=False, clipped=True) > 20 and gap(root=True, clipped=False) > 20
