"""Graded labels against a slow loop over words and against scikit-learn's TF-IDF."""

import math
import re

import numpy as np
import pytest
from support.pairs import many_to_many

from sfumato.data.images import FileImage
from sfumato.data.pairs import Grades, PairData, PairSampler, make_pair_data

CAPTIONS = [
    ["A dog runs on the grass.", "The brown dog, running; a DOG!"],
    ["Two men play chess", "chess players in a park", "x"],
    ["A dog and two men in the park"],
    ["?!"],
]


captioned = lambda: make_pair_data("abcd", [FileImage(name) for name in "abcd"], CAPTIONS)


def vectors(texts):
    words = [re.findall(r"\w\w+", text.lower()) for text in texts]
    holding = lambda word: sum(word in w for w in words)
    rows = []
    for own in words:
        row = {word: own.count(word) * (math.log((1 + len(texts)) / (1 + holding(word))) + 1) for word in own}
        length = math.sqrt(sum(v * v for v in row.values()))
        rows.append({word: v / length for word, v in row.items()})
    return rows


@pytest.mark.parametrize("data", [captioned(), many_to_many()], ids=["captions", "many to many"])
def test_grades_are_the_loop(data):
    rows = vectors(data.texts)
    images, texts = np.array([2, 0, 2, 3, 1]), np.array([5, 0, 3, 1, 6, 2, 0])
    grades = Grades(data)(images, texts)
    assert grades.shape == (5, 7) and grades.dtype == np.float32
    for i, image in enumerate(images):
        own = [t for j, t in data.pairs if j == image]
        for k, text in enumerate(texts):
            cosines = [sum(v * rows[text].get(word, 0) for word, v in rows[t].items()) for t in own]
            assert grades[i, k] == pytest.approx(sum(cosines) / max(len(own), 1), abs=1e-6)
    assert grades.max() > 0.3


def test_an_image_without_texts_shares_nothing_and_equal_captions_are_just_below_a_match():
    data = PairData(("a", "b"), (FileImage("a"),) * 2, ("x",), ("some words",), ("caption",), [[0, 0]])
    assert Grades(data)(np.array([0, 1]), np.array([0])).tolist() == [[pytest.approx(1)], [0]]
    assert Grades(data)(np.array([], int), np.array([0])).shape == (0, 1)
    data = make_pair_data("abcdefgh", [FileImage("x")] * 8, [[f"word{i // 2} and more"] for i in range(8)])
    batch = next(iter(PairSampler(data, 8, 0, grades=Grades(data)).batches(0)))
    twins = (batch.image_index[:, None] // 2 == batch.text_index // 2) & ~np.eye(8, dtype=bool)
    assert ((batch.match >= 0.5) == np.eye(8, dtype=bool)).all()
    assert twins.sum() == 8 and (batch.match[twins] > 0.4999).all()


@pytest.mark.parametrize("positives", ["listed", "sampled"])
def test_a_batch_keeps_its_matches_and_grades_the_rest_below_a_half(positives):
    data = captioned()
    samplers = [PairSampler(data, 4, 3, positives=positives, grades=grades) for grades in (None, Grades(data))]
    plain, graded = (next(iter(sampler.batches(0))) for sampler in samplers)
    assert np.array_equal(plain.image_index, graded.image_index)
    assert np.array_equal(graded.match >= 0.5, plain.match == 1)
    rest = graded.match[plain.match == 0]
    expected = Grades(data)(plain.image_index, plain.text_index)[plain.match == 0] / 2
    np.testing.assert_array_equal(rest, expected)
    assert 0 < rest.max() < 0.5
    rows, columns = np.array([2, 0]), np.array([3, 1, 2])
    np.testing.assert_array_equal(graded.labels(rows, columns), graded.match[rows][:, columns])
