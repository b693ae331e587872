"""SizeAugment: what is left against what must be kept, token by token; how much goes against slow draws."""

import numpy as np
import scipy
import torch

from sfumato.data.transforms import augment_token_ids, drop_regions, drop_tokens

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
    """Share of its tokens that one item loses, drawn one by one."""
    p = random.random()
    return np.mean([p > rate and random.random() < rate * p for _ in range(tokens)])


def test_tokens_dropped_are_as_many_as_in_a_slow_loop():
    """Kolmogorov-Smirnov and binomial tests at 1e-4 with a fixed seed; the tempting wrong rules are below 1e-9."""
    random = np.random.default_rng(0)
    slow = np.array([slow_fraction(random, 0.2, 300) for _ in range(1500)])
    kept = drop_tokens(torch.ones(1500, 300, dtype=torch.bool), generator=generator())
    ours = 1 - kept.double().mean(1).numpy()
    assert scipy.stats.ks_2samp(ours, slow).pvalue > 1e-4
    assert scipy.stats.binomtest(int((ours > 0).sum()), 1500, 0.8).pvalue > 1e-4
    whole_rate = np.array([random.binomial(300, 0.2) / 300 if random.random() > 0.2 else 0 for _ in range(1500)])
    other_side = np.array([random.binomial(300, 0.2 * p) / 300 if p < 0.2 else 0 for p in random.random(1500)])
    for wrong in (whole_rate, other_side):
        assert scipy.stats.ks_2samp(ours, wrong).pvalue < 1e-9


def test_regions_are_dropped_with_the_stated_probability_each():
    """Binomial and chi-squared tests at 1e-4. The rule for tokens would drop 9.6 %, 1,000 standard errors away."""
    kept = drop_regions(torch.ones(5000, 36, dtype=torch.bool), rate=0.2, generator=generator())
    assert scipy.stats.binomtest(int((~kept).sum()), 5000 * 36, 0.2).pvalue > 1e-4
    of_item = np.bincount((~kept).sum(1).numpy(), minlength=37)
    expected = scipy.stats.binom.pmf(np.arange(37), 36, 0.2)
    common = 5000 * expected > 5
    expected = expected[common] * of_item[common].sum() / expected[common].sum()
    assert scipy.stats.chisquare(of_item[common], expected).pvalue > 1e-4
    assert drop_regions(torch.tensor([[True, False]] * 50), rate=0.99, generator=generator()).sum() == 50
    assert drop_regions(kept, rate=0.0).equal(kept) and not (drop_regions(kept, rate=0.5) & ~kept).any()


def test_one_token_always_stays_and_none_comes_back():
    """At rate 0.9 an item of two tokens would often lose both; which one stays is a coin. Binomial test at 1e-4."""
    mask = torch.zeros(20_000, 5, dtype=torch.bool)
    mask[:, 1] = mask[:, 3] = True
    kept = drop_tokens(mask, rate=0.9, generator=generator())
    assert kept.any(1).all() and not (kept & ~mask).any()
    single = kept.sum(1) == 1
    assert single.sum() > 1000
    assert scipy.stats.binomtest(int(kept[single][:, 1].sum()), int(single.sum()), 0.5).pvalue > 1e-4
    assert not drop_tokens(torch.zeros(3, 5, dtype=torch.bool)).any()


def test_rate_zero_and_the_seeds():
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


def test_texts_keep_their_ends_their_order_and_a_word():
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


def test_a_text_that_would_lose_all_keeps_one_word_as_it_was():
    """Four words are all deleted with probability 0.4^4; only then is a word its own, as all others are changed."""
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
    n = 700 * 30
    deleted = int(mask.sum() - new_mask.sum())
    masked, drawn = int((new_ids == MASK).sum()), new_ids[(new_ids >= 10) & (new_ids < 60)]
    for count, fraction in ((deleted, 0.2 * 0.4), (masked, 0.2 * 0.5), (len(drawn), 0.2 * 0.1)):
        assert scipy.stats.binomtest(count, n, fraction).pvalue > 1e-4
        for wrong in (0.2, 0.8 * 0.4, 0.4 * 0.1):
            assert scipy.stats.binomtest(count, n, wrong).pvalue < 1e-9
    assert scipy.stats.chisquare(torch.bincount(drawn, minlength=60)[10:].numpy()).pvalue > 1e-4
    ids, mask = texts([23] * 2000, 23)
    dropped, kept = augment(ids, mask, mask_id=None, rate=0.1, masked=0.0, replaced=0.0)
    words = [row[m].tolist()[1:-2] for row, m in zip(dropped, kept, strict=True)]
    assert all(set(w) <= set(range(FIRST_WORD, FIRST_WORD + 20)) and w == sorted(set(w)) for w in words)
    assert scipy.stats.binomtest(2000 * 20 - sum(map(len, words)), 2000 * 20, 0.1).pvalue > 1e-4
