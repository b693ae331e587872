"""Mixing and token augmentation: values against loops, what is drawn against its stated frequencies."""

import numpy as np
import pytest
import scipy
import torch

from sfumato.data.transforms import MixPlan, augment_token_ids, drop_regions, drop_tokens, plan_mixing, smooth_match

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


def test_partner_is_the_flip_or_oneself_and_the_share_of_a_cut_picture_the_area_that_is_left():
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


def test_labels_are_the_loop_and_the_parts_of_a_batch_share_its_choice_of_mixup_or_cutmix():
    """Images 0 and 2 share a group, so 0 also matches text 2; a text that matches both images of a mix keeps its 1."""
    drawn = MixPlan(torch.tensor([2, 1, 2]), torch.tensor([0.3, 1.0, 1.0]), torch.zeros(3, 4, dtype=torch.int64), SIZE)
    match = torch.tensor([[1, 0, 1, 0.5], [0, 1, 0, 0], [0, 0, 1, 1.0]], dtype=torch.float64)
    mixed = drawn.match(match)
    own, partner = drawn.own_fraction.tolist(), drawn.partner.tolist()
    pair = lambda i, j: own[i] * match[i, j].item() + (1 - own[i]) * match[partner[i], j].item()
    expected = [[pair(i, j) for j in range(4)] for i in range(3)]
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, torch.tensor(expected, dtype=torch.float64))
    assert mixed[0, 2] == 1 and mixed[1:].equal(match[1:])
    assert drawn.match(match.round().bool()).dtype == torch.float32
    assert plan(9, fraction=1.0).match(torch.rand(9, 4)).shape == (9, 4)
    match = torch.tensor([[0.0, 0.5, 1.0]])
    torch.testing.assert_close(smooth_match(match, 0.1), torch.tensor([[0.1, 0.5, 0.9]]))
    assert smooth_match(match, 0.0).equal(match)
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


def test_frequencies_are_those_stated_and_areas_that_are_left_have_the_mean_of_a_slow_loop():
    """Binomial and Kolmogorov-Smirnov tests at 1e-4 each, with a fixed seed."""
    n = 20_000
    drawn = plan(n, choice="element", size=(64, 48), cutmix_probability=0.3)
    mixed = (drawn.own_fraction < 1).numpy()
    # Empty boxes unmix under 1 in 100,000 of the cut ones: those with lambda above 1 - (2 / 48)^2.
    assert scipy.stats.binomtest(int(mixed.sum()), n, 0.25).pvalue > 1e-4
    assert scipy.stats.binomtest(int(drawn.cut.sum()), int(mixed.sum()), 0.3).pvalue > 1e-4
    blends = drawn.own_fraction.numpy()[mixed & ~drawn.cut.numpy()]
    assert scipy.stats.kstest(blends, scipy.stats.beta(2, 2).cdf).pvalue > 1e-4
    batches = np.array([plan(40, fraction=1.0, seed=seed).cut.sum() for seed in range(400)])
    assert set(np.unique(batches)) <= set(range(0, 41)) and np.all((batches == 0) | (batches > 30))
    assert scipy.stats.binomtest(int((batches > 0).sum()), 400, 0.5).pvalue > 1e-4
    for off in ("mixup_alpha", "cutmix_alpha"):  # The released code then mixes every picture.
        drawn = plan(4000, size=(64, 48), choice="element", **{off: 0.0})
        mixed = int((drawn.own_fraction < 1).sum())
        assert scipy.stats.binomtest(mixed, 4000, 0.25).pvalue > 1e-4
        assert int(drawn.cut.sum()) == (mixed if off == "mixup_alpha" else 0)
    random, h, w = np.random.default_rng(0), 64, 48

    def area():
        side = (1 - random.beta(2, 2)) ** 0.5
        y, x, dy, dx = random.integers(h), random.integers(w), int(h * side) // 2, int(w * side) // 2
        return 1 - (min(y + dy, h) - max(y - dy, 0)) * (min(x + dx, w) - max(x - dx, 0)) / (h * w)

    drawn = plan(20_000, fraction=1.0, mixup_alpha=0.0, size=(h, w))
    ours = drawn.own_fraction.double().numpy()
    slow = np.array([area() for _ in range(20_000)])
    assert abs(ours.mean() - slow.mean()) < 5 * np.sqrt((ours.var() + slow.var()) / 20_000)


BEGIN, END, PAD, MASK = 1, 2, 0, 3
FIRST_WORD = 100  # ids below are special or drawn at random, those above tell where a token came from
generator = lambda seed=0: torch.Generator().manual_seed(seed)


def texts(lengths, t):
    """One begin, the words 100, 101, ... and two ends."""
    ids, mask = torch.full((len(lengths), t), PAD), torch.arange(t) < torch.tensor(lengths).unsqueeze(1)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.tensor([BEGIN, *range(FIRST_WORD, FIRST_WORD + length - 3), END, END])
    return ids, mask


def augment(ids, mask, **options):
    settings = {"special": (1, 2), "mask_id": MASK, "vocabulary_size": 1000, "generator": generator()}
    return augment_token_ids(ids, mask, **{**settings, **options})


def slow_fraction(random, rate, tokens):
    p = random.random()
    return np.mean([p > rate and random.random() < rate * p for _ in range(tokens)])


def test_tokens_dropped_are_as_many_as_in_a_slow_loop_and_regions_have_the_stated_probability():
    """Kolmogorov-Smirnov and binomial tests at 1e-4 with a fixed seed."""
    random = np.random.default_rng(0)
    slow = np.array([slow_fraction(random, 0.2, 300) for _ in range(1500)])
    kept = drop_tokens(torch.ones(1500, 300, dtype=torch.bool), generator=generator())
    ours = 1 - kept.double().mean(1).numpy()
    assert scipy.stats.ks_2samp(ours, slow).pvalue > 1e-4
    assert scipy.stats.binomtest(int((ours > 0).sum()), 1500, 0.8).pvalue > 1e-4
    kept = drop_regions(torch.ones(5000, 36, dtype=torch.bool), rate=0.2, generator=generator())
    assert scipy.stats.binomtest(int((~kept).sum()), 5000 * 36, 0.2).pvalue > 1e-4
    of_item = np.bincount((~kept).sum(1).numpy(), minlength=37)
    expected = scipy.stats.binom.pmf(np.arange(37), 36, 0.2)
    common = 5000 * expected > 5
    expected = expected[common] * of_item[common].sum() / expected[common].sum()
    assert scipy.stats.chisquare(of_item[common], expected).pvalue > 1e-4
    assert drop_regions(torch.tensor([[True, False]] * 50), rate=0.99, generator=generator()).sum() == 50
    assert drop_regions(kept, rate=0.0).equal(kept) and not (drop_regions(kept, rate=0.5) & ~kept).any()


def test_one_token_always_stays_none_comes_back_and_rate_zero_and_the_seeds():
    """At rate 0.9 an item of two tokens would often lose both; which one stays is a coin. Binomial test at 1e-4."""
    mask = torch.zeros(20_000, 5, dtype=torch.bool)
    mask[:, 1] = mask[:, 3] = True
    kept = drop_tokens(mask, rate=0.9, generator=generator())
    assert kept.any(1).all() and not (kept & ~mask).any()
    single = kept.sum(1) == 1
    assert single.sum() > 1000
    assert scipy.stats.binomtest(int(kept[single][:, 1].sum()), int(single.sum()), 0.5).pvalue > 1e-4
    assert not drop_tokens(torch.zeros(3, 5, dtype=torch.bool)).any()
    mask = torch.rand(40, 9, generator=generator(3)) < 0.8
    assert drop_tokens(mask, rate=0.0).equal(mask)
    assert drop_tokens(mask, generator=generator(5)).equal(drop_tokens(mask, generator=generator(5)))
    torch.manual_seed(7)
    one = drop_tokens(mask)
    torch.manual_seed(7)
    assert drop_tokens(mask).equal(one)
    assert not drop_tokens(mask).equal(one)
    ids, mask = torch.tensor([[7, BEGIN, 8, 9, END, 6]]), torch.tensor([[False, True, False, True, True, False]])
    new_ids, new_mask = augment(ids, mask, special=(1, 1), rate=0.0, pad_id=5)
    assert new_ids.tolist() == [[BEGIN, 9, END, 5, 5, 5]] and new_mask.tolist() == [[True] * 3 + [False] * 3]


def test_texts_keep_their_ends_their_order_and_a_word_as_it_was():
    lengths = [4, 5, 9, 30, 3, 12] * 50
    ids, mask = texts(lengths, 30)
    for rate in (0.2, 1.0):
        new_ids, new_mask = augment(ids, mask, rate=rate, vocabulary_size=FIRST_WORD + 50, forbidden=range(FIRST_WORD))
        assert new_ids.shape == ids.shape and new_ids.dtype == torch.int64 and new_mask.dtype == torch.bool
        for length, row, inside in zip(lengths, new_ids.tolist(), new_mask.tolist(), strict=True):
            left = sum(inside)
            assert inside == [True] * left + [False] * (30 - left) and row[left:] == [PAD] * (30 - left)
            assert row[0] == BEGIN and row[left - 2 : left] == [END, END]
            words = row[1 : left - 2]
            assert (len(words) >= 1) == (length > 3) and len(words) <= length - 3
            assert all(w == MASK or FIRST_WORD <= w < FIRST_WORD + 50 for w in words)
    own_ids, own_mask = augment(ids, mask, forbidden=range(4, 1000))  # Random ids are 0 to 3, the text's own above.
    for row, inside in zip(own_ids.tolist(), own_mask.tolist(), strict=True):
        words = [i for i, there in zip(row, inside, strict=True) if there and i >= FIRST_WORD]
        assert words == sorted(set(words))
    ids, mask = texts([7] * 20_000, 7)
    new_ids, new_mask = augment(ids, mask, rate=1.0, forbidden=range(4, 1000))
    own = (new_ids >= FIRST_WORD).sum(1)
    assert set(own.tolist()) == {0, 1}
    assert (new_mask.sum(1)[own == 1] == 4).all()
    assert scipy.stats.binomtest(int(own.sum()), 20_000, 0.4**4).pvalue > 1e-4
    counts = torch.bincount(new_ids[new_ids >= FIRST_WORD] - FIRST_WORD, minlength=4)
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_words_change_as_often_as_stated_or_are_dropped():
    """21,000 words, 30 a text: binomial tests at 1e-4 for each fraction, chi-squared for the random ids."""
    ids, mask = texts([33] * 700, 33)
    new_ids, new_mask = augment(ids, mask, forbidden=[*range(10), *range(60, 1000)])  # random ids are 10 to 59
    deleted = int(mask.sum() - new_mask.sum())
    masked, drawn = int((new_ids == MASK).sum()), new_ids[(new_ids >= 10) & (new_ids < 60)]
    for count, fraction in ((deleted, 0.2 * 0.4), (masked, 0.2 * 0.5), (len(drawn), 0.2 * 0.1)):
        assert scipy.stats.binomtest(count, 700 * 30, fraction).pvalue > 1e-4
    assert scipy.stats.chisquare(torch.bincount(drawn, minlength=60)[10:].numpy()).pvalue > 1e-4
    ids, mask = texts([23] * 2000, 23)
    dropped, kept = augment(ids, mask, mask_id=None, rate=0.1, masked=0.0, replaced=0.0)
    words = [row[m].tolist()[1:-2] for row, m in zip(dropped, kept, strict=True)]
    assert all(set(w) <= set(range(FIRST_WORD, FIRST_WORD + 20)) and w == sorted(set(w)) for w in words)
    assert scipy.stats.binomtest(2000 * 20 - sum(map(len, words)), 2000 * 20, 0.1).pvalue > 1e-4
