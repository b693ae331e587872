"""How many photographs a sentence means: against the formula in loops, and against people's counts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.stats import spearmanr

from sfumato.calibration import fits
from sfumato.calibration.fits import multiplicity
from sfumato.encoders.package_weights import sentence_vectors

TEXTS = {"a man riding a wave on a surfboard": 8, "a purple giraffe plays chess with a robot": 8, "a red bus": 3}


def by_loops(vector, n_words):
    known = load_file(Path(fits.__file__).with_name("multiplicity.safetensors"))
    cosines, own = [], vector.astype(float) @ known["axes"].astype(float)
    for row in known["captions"].astype(float):
        cosines.append(float(own @ row) / math.sqrt((own @ own) * (row @ row)))
    near = sorted(cosines, reverse=True)
    numbers = [n_words, near[0], sum(near[:10]) / 10, sum(near[:100]) / 100]
    numbers += [math.log(sum(math.exp(k * (c - 1)) for c in cosines)) for k in (8, 15, 20, 30, 40)]
    numbers = [min(4, max(-4, (v - c) / s)) for v, c, s in zip(numbers, known["centre"], known["spread"], strict=True)]
    log = float(known["mean"][0])
    for caption, cosine, weight in zip(known["numbers"].astype(float), cosines, known["weights"], strict=True):
        product, square = numbers @ caption, ((numbers - caption) ** 2).sum()
        value = 0.3 * product / 9 + 0.5 * math.exp(-0.3 * square / 9) + 0.8 * math.exp(2 * cosine - 2)
        log += float(weight) * value
    return math.exp(log)


def test_it_is_the_formula_and_a_usual_sentence_means_more():
    vectors, n_words = sentence_vectors(list(TEXTS)), np.array([*TEXTS.values()])
    found = multiplicity(vectors, n_words)
    assert found == pytest.approx([by_loops(*each) for each in zip(vectors, n_words.tolist(), strict=True)], rel=5e-3)
    assert found[0] > 100 > 5 > found[1]


def test_it_follows_the_number_of_images_that_people_found(shared):
    rows = [json.loads(line) for line in (shared / "data/pqpp/validation.jsonl").read_text("utf-8").splitlines()[:300]]
    texts, counts = zip(*((row["caption"], len(row["relevant"])) for row in rows), strict=True)
    found = multiplicity(sentence_vectors(list(texts)), np.array([len(text.split()) for text in texts]))
    assert spearmanr(found, counts).statistic > 0.65  # .704; of all 2,000 .717.
