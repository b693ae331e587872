"""TF-IDF words per bin against a table worked by hand."""

import numpy as np
import pytest

from sfumato.studies.words import tf_idf, words_by_uncertainty

UNCERTAINTY = np.array([0.4, 0.1, 0.3, 0.2])
CAPTIONS = [["a cat", "A dog sits"], ["a red dog"], ["Dog, dog!"], ["a dog", "the red cat-runs"]]


def table(**options):
    bins = words_by_uncertainty(UNCERTAINTY, CAPTIONS, n_bins=2, **options)
    return [[(w.word, w.n, round(w.weight, 4)) for w in one.words] for one in bins], bins


def test_the_printed_weight_counts_captions_of_the_bin():
    words, bins = table()
    # First bin: "a red dog", "a dog", "the red cat-runs": three words in 2 of 3. (1 + ln 2) ln(3 / 2) = 1.69315 *
    # 0.40547.
    assert words[0] == [("a", 2, 0.6865), ("dog", 2, 0.6865), ("red", 2, 0.6865)]
    # Second: "Dog, dog!" counts once, so dog is in 2 of 3 as is a; cat and sits are in one.
    assert words[1] == [("a", 2, 0.6865), ("dog", 2, 0.6865)]
    assert [(b.n_items, b.n_captions, b.low, b.high) for b in bins] == [(2, 3, 0.1, 0.2), (2, 3, 0.3, 0.4)]
    assert [b.mean for b in bins] == pytest.approx([0.15, 0.35])
    assert [b.words_per_caption for b in bins] == pytest.approx([9 / 3, 7 / 3])


def test_against_the_split_rare_words_elsewhere_come_first():
    words, _ = table(corpus="split")
    # Six captions in all: red in 2 of them, a in 4, dog in 4. (1 + ln 2) ln 3 = 1.8601; (1 + ln 2) ln(6 / 4) = 0.6865.
    assert words[0] == [("red", 2, 1.8601), ("a", 2, 0.6865), ("dog", 2, 0.6865)]
    assert words[1] == [("a", 2, 0.6865), ("dog", 2, 0.6865)]
    assert table(corpus="split", top=1)[0][0] == [("red", 2, 1.8601)]


def test_a_word_of_every_caption_has_no_weight():
    [one] = words_by_uncertainty(np.zeros(3), [["the cat"], ["the cat"], ["the dog"]], n_bins=1)
    assert [w.word for w in one.words] == ["cat"] and tf_idf(3, 3, 3) == 0


def test_as_printed_words_of_a_middling_frequency_come_first():
    """The weight is greatest where n is sqrt(N / e): 6 of 100."""
    captions = [[" ".join(f"w{n}" for n in range(1, 101) if i < n)] for i in range(100)]
    [one] = words_by_uncertainty(np.zeros(100), captions, n_bins=1)
    assert one.words[0].word == "w6"


def test_bins_are_of_equal_size_and_equal_uncertainties_keep_their_order():
    bins = words_by_uncertainty(np.zeros(11), [[f"x{i} x"] for i in range(11)], n_bins=3)
    assert [b.n_items for b in bins] == [4, 4, 3]


@pytest.mark.parametrize(
    ("uncertainty", "options", "says"),
    [
        (np.arange(4.0), {"n_bins": 5}, "4 items are too few for 5 bins"),
        (np.arange(4.0), {"n_bins": 0}, "at least 1, got 0 and 12"),
        (np.arange(4.0), {"corpus": "all"}, "one of bin, split, got 'all'"),
        (np.arange(3.0), {}, r"shape \(3,\) for 4 items"),
        (np.array([0, 1, np.nan, 2]), {}, "expected one number without NaN for each"),
    ],
)
def test_bad_input_is_named(uncertainty, options, says):
    with pytest.raises(ValueError, match=says):
        words_by_uncertainty(uncertainty, CAPTIONS, **options)
