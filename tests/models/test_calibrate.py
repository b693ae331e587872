"""A split becomes a calibration: both directions, the right way round, and a part of a large split."""

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato import GaussianEmbedding, PairData, get_distance
from sfumato.calibration.calibrator import Calibration, QueryScores
from sfumato.data.images import MemoryImage
from sfumato.evaluation.hits import measure_hits
from sfumato.models.calibrate import calibrate_split


def pair_data(n_images, n_texts, pairs):
    """Images and texts that are named by their numbers."""
    names = tuple(str(i) for i in range(max(n_images, n_texts)))
    images, texts = tuple(MemoryImage(name, b"") for name in names[:n_images]), names[:n_texts]
    return PairData(names[:n_images], images, texts, texts, ("caption",) * n_texts, np.array(pairs))


def scene(n_images=30, n_texts=70, d=6):
    """Texts near the image of their number, some near another one that matches too."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(n_images, d, generator=generator)
    of = torch.arange(n_texts) % n_images
    texts = mean[of] + 0.5 * torch.randn(n_texts, d, generator=generator)
    log_var = [torch.randn(n, d, generator=generator) - 2 for n in (n_images, n_texts)]
    pairs = [(int(i), t) for t, i in enumerate(of)] + [((int(of[t]) + 1) % n_images, t) for t in range(0, 70, 5)]
    embedded = GaussianEmbedding(mean, log_var[0]), GaussianEmbedding(texts, log_var[1])
    return embedded, pair_data(n_images, n_texts, pairs)


@pytest.mark.parametrize("distance", ["csd", "kl"])
def test_it_is_the_fit_of_all_pairs(distance):
    embedded, data = scene()
    matrix = get_distance(distance).matrix(*embedded)
    match = torch.from_numpy(data.match(np.arange(30), np.arange(70)))
    got = calibrate_split(embedded, data, distance, split="val")
    i2t, t2i = QueryScores.fit(matrix, match, growth=0.0), QueryScores.fit(matrix.T, match.T)
    whole = Calibration.fit(matrix, match, i2t=i2t, t2i=t2i)
    assert (got.logit_scale, got.logit_bias) == pytest.approx((whole.logit_scale, whole.logit_bias), rel=1e-5)
    for direction in ("i2t", "t2i"):
        a, b = got.of(direction).scores, whole.of(direction).scores
        assert (a.n_gallery, a.growth, a.matches_per_query) == (b.n_gallery, b.growth, b.matches_per_query)
        np.testing.assert_allclose(a.closest_match, b.closest_match, rtol=1e-4)
        np.testing.assert_allclose(a.closest_other, b.closest_other, rtol=1e-4)
    # Fourteen of 70 texts have two matches: half of the gallery holds 1.2 / 2 of a text's, of those that have any left.
    assert 0 < got.t2i.scores.growth < 0.3 and got.i2t.scores.growth == 0
    assert got.metadata | {"split": "val", "distance": distance, "method": "platt", "pairs": 2100} == got.metadata


def crowded(n=160, seed=0, d=8):
    """Pairs of alike images, every other far from the rest: texts of lonely pairs have two candidates, others many."""
    generator = torch.Generator().manual_seed(seed)
    mean = 0.6 * torch.randn(n, d, generator=generator)
    mean[::2] += 6 * torch.nn.functional.normalize(torch.randn(n // 2, d, generator=generator), dim=1)
    texts = mean + 0.5 * torch.randn(n, d, generator=generator)
    log_var = torch.full((n, d), -4.0)
    embedded = GaussianEmbedding(mean, log_var), GaussianEmbedding(texts, log_var)
    return embedded, pair_data(n, n, [(i, i) for i in range(n)])


def test_first_hits_have_the_stated_probability_where_the_distance_alone_errs_and_the_population_is_kept():
    embedded, data = crowded()
    fitted = calibrate_split(embedded, data, "csd", split="val")
    assert all(fit.conditional and fit.hits for fit in (fitted.i2t, fitted.t2i))
    (images, texts), n = crowded(n=1200, seed=1)[0], 1200
    distance = get_distance("csd").for_direction("t2i").matrix(texts, images)
    nearest, place = distance.topk(50, largest=False)
    right = (place[:, 0] == torch.arange(n)).double()
    given = fitted.t2i.hit_probability(nearest[:, :1], nearest, n_gallery=n)[:, 0]
    alone = fitted.t2i.probability(nearest[:, 0], n_gallery=n)

    brier = lambda p: float((p.double() - right).square().mean())
    assert brier(given) < brier(alone) - 0.02
    assert abs(float(given.double().mean() - right.mean())) < 0.1  # a gallery 7 times as large
    # What is certified holds in a gallery of the size of the fit.
    (images, texts) = crowded(n=160, seed=2)[0]
    distance = get_distance("csd").for_direction("t2i").matrix(texts, images)
    nearest, place = distance.topk(50, largest=False)
    answered = ~fitted.t2i.abstains(nearest, 0.3, n_gallery=160)
    wrong = place[answered, 0] != torch.arange(160)[answered]
    assert answered.sum() > 50 and float(wrong.double().mean()) < 0.4
    both = {p: calibrate_split(embedded, data, "csd", split="val", population=p) for p in ("planted", "independent")}
    assert all(c.metadata["queries"] == p and c.t2i.conditional.population == p for p, c in both.items())
    distance = get_distance("csd").for_direction("t2i").matrix(embedded[1], embedded[0])[:, :80]
    nearest = distance.topk(50, largest=False).values
    p = {name: float(c.t2i.hit_probability(nearest[:, :1], nearest, n_gallery=80).mean()) for name, c in both.items()}
    assert p["independent"] < p["planted"]


def test_of_a_large_split_a_part_is_taken_and_images_without_a_text_do_not_stop_it():
    embedded, data = scene()
    got = calibrate_split(embedded, data, "csd", split="val", max_pairs=840, max_queries=25)
    assert got.metadata["pairs"] == 12 * 70
    assert (len(got.i2t.scores.nearest), got.i2t.scores.n_gallery) == (25, 70)
    assert (len(got.t2i.scores.nearest), got.t2i.scores.n_gallery) == (25, 30)
    again, other = (
        calibrate_split(embedded, data, "csd", split="val", max_pairs=840, max_queries=25, seed=seed) for seed in (0, 1)
    )
    assert got == again != other
    assert set(got.metadata["set_sizes"]) == {"i2t", "t2i"}
    few = data.pairs[data.pairs[:, 0] < 4]
    shared = PairData(data.image_ids, data.images, data.text_ids, data.texts, data.text_kinds, few)
    fitted = calibrate_split(embedded, shared, "csd", split="val")
    assert fitted.i2t.scores.matches_per_query > 0 and fitted.t2i.scores.n_gallery == 30
    fitted = calibrate_split(embedded, data, "csd", split="val")
    assert all(fit.conditional is fit.hits is None for fit in (fitted.i2t, fitted.t2i))
    distance = torch.tensor([[0.5, 1.0]])
    expected = fitted.t2i.probability(distance, n_gallery=9)
    assert torch.equal(fitted.t2i.hit_probability(distance, distance, n_gallery=9), expected)


def with_hubs(n, seed, d=24, n_hubs=20):
    """Images, some of which are near many texts without a match, and texts of the others; with a training set."""
    generator = torch.Generator().manual_seed(seed)

    def unit(*shape):
        return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=1)

    hubs = unit(n_hubs, d) * 0.4
    images = torch.cat([hubs, unit(n, d)])
    texts = torch.nn.functional.normalize(images[n_hubs:] + 0.3 * torch.randn(n, d, generator=generator), dim=1)
    data = pair_data(n + n_hubs, n, [(k + n_hubs, k) for k in range(n)])
    images, texts, training = (GaussianEmbedding.point(mean) for mean in (images, texts, unit(800, d)))
    return (images, texts), data, training


def test_reference_queries_tell_hubs_from_matches_and_too_few_are_left_out():
    embedded, data, training = with_hubs(500, 0)
    plain = calibrate_split(embedded, data, "squared_l2", split="val")
    seen = calibrate_split(embedded, data, "squared_l2", split="val", reference=(training, training))
    assert seen.t2i.reference and not plain.tensors()
    (images, texts), new, _ = with_hubs(500, 1)
    distance = get_distance("squared_l2").matrix(images, texts)
    match = torch.from_numpy(new.match(np.arange(images.n), np.arange(texts.n)))
    losses = {}
    for name, calibration in (("plain", plain), ("seen", seen)):
        figures = measure_hits(calibration, distance, match, embedded=(images, texts), sizes=())
        losses[name] = next(f.log_loss for f in figures if f.direction == "t2i" and f.hits == 1)
    assert losses["seen"] < losses["plain"] - 0.02
    raises(ValueError, "embedded", measure_hits, seen, distance, match, sizes=())
    embedded, data, training = with_hubs(120, 2)
    few = training[:150]
    assert not calibrate_split(embedded, data, "squared_l2", split="val", reference=(few, few)).tensors()
