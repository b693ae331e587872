import itertools

import numpy as np
import pytest
from support.pictures import encoded

from papers.uncertainty.damage import (
    IMAGE_CORRUPTIONS,
    TEXT_CORRUPTIONS,
    blur,
    drop_words,
    erase_squares,
    replace_letters,
    unknown_words,
)
from sfumato.data.image_decoding import decode_image


def picture():
    return encoded(np.random.default_rng(0).integers(0, 100, (24, 40, 3)).astype(np.uint8))


def test_erased_squares_are_the_stated_share_and_grow():
    data = picture()
    clean, before = decode_image(data, None), np.zeros((24, 40), bool)
    for fraction in (0.0, 0.1, 0.25, 0.5, 1.0):
        pixels = decode_image(erase_squares(data, fraction, (3, 7)), None)
        grey = (pixels == 128).all(0)
        assert grey.mean() == pytest.approx(round(fraction * 64) / 64) and (grey | ~before).all()
        assert (pixels[:, ~grey] == clean[:, ~grey]).all()
        # Whole squares of 3 x 5 pixels.
        assert set(np.unique(grey.reshape(8, 3, 8, 5).mean((1, 3)))) <= {0.0, 1.0}
        before = grey
    assert erase_squares(data, 0.5, (3, 7)) == erase_squares(data, 0.5, (3, 7)) != erase_squares(data, 0.5, (3, 8))


def test_blur_is_that_of_the_shorter_side_and_takes_detail_away():
    data = picture()
    assert (decode_image(blur(data, 0.0), None) == decode_image(data, None)).all()
    variation = [
        np.abs(np.diff(decode_image(blur(data, r), None).astype(float), axis=2)).mean() for r in (0, 0.02, 0.05, 0.2)
    ]
    assert variation == sorted(variation, reverse=True) and variation[-1] < 0.1 * variation[0]
    # An edge: a radius of 0.1 of 24 pixels is a Gaussian of 2.4, whose slope in the middle is 1 / (2.4 sqrt(2 pi)).
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[:, 20:] = 240
    soft = decode_image(blur(encoded(pixels), 0.1), None)[0, 12].astype(float)
    assert soft[20] - soft[19] == pytest.approx(240 / (2.4 * np.sqrt(2 * np.pi)), rel=0.1)


def test_words_go_one_after_another_in_a_random_order_and_one_stays():
    text = "a small  dog runs over the green field"
    words = text.split()
    kept = [drop_words(text, fraction, (1, 5)).split() for fraction in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert [len(k) for k in kept] == [8, 6, 5, 3, 2, 1] and kept[0] == words
    for more, fewer in itertools.pairwise(kept):
        assert set(fewer) <= set(more) and fewer == [w for w in more if w in fewer]
    assert drop_words("dog", 1.0, (0,)) == "dog" and drop_words("", 0.5, (0,)) == ""
    assert len({drop_words(text, 0.6, (seed,)) for seed in range(20)}) > 5


def test_letters_become_other_letters_and_nothing_else_changes():
    text = "Zebra's 2 coats, café"
    letters = [i for i, c in enumerate(text) if c.isascii() and c.isalpha()]
    before = set()
    for fraction in (0.0, 0.1, 0.5, 1.0):
        worse = replace_letters(text, fraction, (2, 4))
        assert len(worse) == len(text)
        changed = {i for i, (a, b) in enumerate(zip(text, worse, strict=True)) if a != b}
        assert len(changed) == int(fraction * len(letters) + 0.5) and before <= changed <= set(letters)
        assert all(worse[i].isalpha() and worse[i].lower() != text[i].lower() for i in changed)
        before = changed


def test_the_registries_run_at_every_strength():
    for c in IMAGE_CORRUPTIONS.values():
        made = [c.apply(picture(), s, (0, 1)) for s in c.strengths]
        assert len(set(made)) == len(made) and list(c.strengths) == sorted(c.strengths)
    for c in TEXT_CORRUPTIONS.values():
        text = "two brown dogs play with a ball"
        made = [c.apply(text, s, (0, 1)) for s in c.strengths]
        assert len({text, *made}) == len(made) + 1 and c.suits(text)
    assert not TEXT_CORRUPTIONS["dropped_words"].suits("fox") and not TEXT_CORRUPTIONS["wrong_letters"].suits("8 9")


def test_unknown_words_take_the_place_of_words_one_after_another():
    text = "a small  dog runs over the green field"
    words, before, last = text.split(), set(), []
    for fraction, n in ((0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)):
        worse = unknown_words(text, fraction, (2, 9)).split()
        changed = {i for i, (a, b) in enumerate(zip(words, worse, strict=True)) if a != b}
        assert len(changed) == n and before <= changed and [len(w) for w in worse] == [len(w) for w in words]
        assert fraction < 1 or not set(words) & set(worse)
        # What was replaced before stays what it became.
        assert all(worse[i] == last[i] for i in before)
        before, last = changed, worse
    assert unknown_words("fox", 0.5, (0,)) != "fox" and unknown_words("", 1.0, (0,)) == ""
