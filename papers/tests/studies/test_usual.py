"""Words, set algebra and the map: worked by hand, against numpy, draws and scikit-learn, and degenerate galleries."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from support.raising import raises

from papers.studies.usual import (
    ERASED,
    FAMILIES,
    MADE,
    SIZE,
    choose_pairs,
    draw_pair,
    fit_map,
    map_items,
    measure_sets,
    mix_images,
    tf_idf,
    words_by_uncertainty,
)
from sfumato import GaussianEmbedding
from sfumato.data.image_decoding import decode_image
from sfumato.metrics.relevance import Relevance

UNCERTAINTY = np.array([0.4, 0.1, 0.3, 0.2])
CAPTIONS = [["a cat", "A dog sits"], ["a red dog"], ["Dog, dog!"], ["a dog", "the red cat-runs"]]


def table(**options):
    bins = words_by_uncertainty(UNCERTAINTY, CAPTIONS, n_bins=2, **options)
    return [[(w["word"], w["n"], round(w["weight"], 4)) for w in one["words"]] for one in bins], bins


def test_the_printed_weight_counts_captions_of_the_bin():
    words, bins = table()
    # First bin: "a red dog", "a dog", "the red cat-runs": three words in 2 of 3. (1 + ln 2) ln(3 / 2) = 1.69315 *
    # 0.40547. Second: "Dog, dog!" counts once, so dog is in 2 of 3 as is a; cat and sits are in one.
    assert words[0] == [("a", 2, 0.6865), ("dog", 2, 0.6865), ("red", 2, 0.6865)] and words[1] == words[0][:2]
    keys = ("n_items", "n_captions", "low", "high", "mean", "words_per_caption")
    assert [b[k] for b in bins for k in keys] == pytest.approx([2, 3, 0.1, 0.2, 0.15, 3, 2, 3, 0.3, 0.4, 0.35, 7 / 3])


def test_against_the_split_rare_words_elsewhere_come_first():
    words, _ = table(corpus="split")
    # Six captions in all: red in 2 of them, a in 4, dog in 4. (1 + ln 2) ln 3 = 1.8601; (1 + ln 2) ln(6 / 4) = 0.6865.
    assert words[0] == [("red", 2, 1.8601), ("a", 2, 0.6865), ("dog", 2, 0.6865)]
    assert words[1] == words[0][1:] and table(corpus="split", top=1)[0][0] == words[0][:1]


def test_weights_of_frequent_words_and_bins_of_equal_size():
    [one] = words_by_uncertainty(np.zeros(3), [["the cat"], ["the cat"], ["the dog"]], n_bins=1)
    assert [w["word"] for w in one["words"]] == ["cat"] and tf_idf(3, 3, 3) == 0
    # The weight is greatest where n is sqrt(N / e): 6 of 100.
    captions = [[" ".join(f"w{n}" for n in range(1, 101) if i < n)] for i in range(100)]
    [one] = words_by_uncertainty(np.zeros(100), captions, n_bins=1)
    assert one["words"][0]["word"] == "w6"
    bins = words_by_uncertainty(np.zeros(11), [[f"x{i} x"] for i in range(11)], n_bins=3)
    assert [b["n_items"] for b in bins] == [4, 4, 3]


def gaussians(*rows):
    """Each row is (x, y, variance of x, variance of y)."""
    values = torch.tensor(rows, dtype=torch.float64)
    return GaussianEmbedding(values[:, :2], values[:, 2:].log())


SETS = {
    "first": gaussians((0, 0, 1, 1), (1, 1, 1, 1)),
    "second": gaussians((4, 0, 0.2, 0.2), (1, 5, 1, 1)),
    # Beside the middle, narrow; then beyond the second part, wide.
    "mixup": gaussians((2, 1, 1.21, 0.25), (1, 6, 4, 4)),
    "cutmix": gaussians((0, 0, 1, 1), (1, 5, 1, 1)),
    "erased_first": gaussians((1, 0, 4, 1), (1, 1, 0.5, 0.5)),
    "erased_second": gaussians((4, 2, 9, 9), (1, 5, 2, 2)),
    "other": gaussians((2, 0, 1, 1), (1, 3, 1, 1)),
}


def included(inner, outer):
    """Whether inner is included in outer by ProLIP's integral, on a grid, averaged over two dimensions."""
    grid = np.linspace(-40, 40, 200_001)
    logs = []
    for k in (0, 1):
        p, q = (
            np.exp(-((grid - one[k]) ** 2) / (2 * one[k + 2])) / math.sqrt(2 * math.pi * one[k + 2])
            for one in (inner, outer)
        )
        logs.append(math.log(np.trapezoid(p * p * q, grid)) - math.log(np.trapezoid(q * q * p, grid)))
    return sum(logs) > 0


def test_figures_of_mixtures_are_those_worked_by_hand():
    found = measure_sets(SETS, n_resamples=0)
    mixup, cutmix, other = (
        {name: interval["value"] for name, interval in found["mixes"][kind].items()}
        for kind in ("mixup", "cutmix", "other")
    )
    assert found["n"] == 2 and mixup["more_uncertain"] == 0.5  # 1.46 against 2 and 0.4; 8 against 2 and 2.
    assert mixup["variance_ratio"] == pytest.approx(math.sqrt(1.46 / math.sqrt(2 * 0.4) * 8 / 2))
    assert mixup["between"] == 0.5 and mixup["off_line"] == pytest.approx((1 / 4 + 0) / 2)
    # Twice the deviation along the line: 2.2 reaches both ends, 2 away, and one deviation would not; 4 reaches the
    # second part, 1 away, but not the first, 5 away, which twice the variance, 8, would.
    assert mixup["covers"] == (1 + 0.5) / 2
    first = [included((0, 0, 1, 1), (2, 1, 1.21, 0.25)), included((4, 0, 0.2, 0.2), (2, 1, 1.21, 0.25))]
    assert first == [False, True] and included((1, 1, 1, 1), (1, 6, 4, 4)) and included((1, 5, 1, 1), (1, 6, 4, 4))
    assert mixup["includes"] == (0.5 + 1) / 2
    # A mixture that is one of its parts: as certain as they are, on the line, at its end.
    assert cutmix["more_uncertain"] == cutmix["between"] == cutmix["off_line"] == 0
    assert cutmix["covers"] == 0.5 and cutmix["variance_ratio"] == pytest.approx(math.sqrt(2 / math.sqrt(2 * 0.4)))
    assert cutmix["includes"] == (0.5 + 0) / 2  # The narrow second part; nothing is included in its equal.
    assert other["between"] == other["covers"] == 1 and other["off_line"] == 0
    erased = {name: interval["value"] for name, interval in found["erased"].items()}
    assert erased["more_uncertain"] == erased["includes"] == 3 / 4
    assert erased["variance_ratio"] == pytest.approx((5 / 2 * 18 / 0.4 * 0.5 * 2) ** 0.25)
    assert erased["moved"] == pytest.approx((1 / 4 + 2 / 4 + 0 + 0) / 4)


def test_pairs_are_resampled_and_equal_means_left_out():
    interval = measure_sets(SETS, n_resamples=200)["mixes"]["mixup"]["more_uncertain"]
    assert (interval["low"], interval["high"]) == (0, 1)
    assert measure_sets(SETS | {"second": gaussians((0, 0, 1, 1), (1, 5, 1, 1))}, n_resamples=0)["n"] == 1
    raises(ValueError, "no pair has two different means", measure_sets, SETS | {"second": SETS["first"]})


def test_a_pair_is_drawn_in_the_plane_of_its_six_means():
    drawn = draw_pair(SETS, 0)
    items = {item["name"]: item for item in drawn["items"]}
    assert tuple(items) == MADE and sum(drawn["explained"]) == pytest.approx(1)
    # Two dimensions on a plane: turned only, so distances and areas stay.
    assert math.dist(*[(items[n]["x"], items[n]["y"]) for n in ("first", "second")]) == pytest.approx(4)
    for name, (vx, vy) in {"mixup": (1.21, 0.25), "erased_second": (9, 9), "erased_first": (4, 1)}.items():
        found = [items[name][key] for key in ("a", "b", "total_variance")]
        assert found == pytest.approx([math.sqrt(max(vx, vy)), math.sqrt(min(vx, vy)), vx + vy])


def test_pictures_are_used_once_and_never_with_their_own_group():
    groups = np.repeat(np.arange(10), 3)
    rows = choose_pairs(groups, 100, seed=1)
    assert 3 <= len(rows) <= 10 and len(set(rows.ravel().tolist())) == rows.size
    assert all(len({*groups[row]}) == 3 for row in rows)
    np.testing.assert_array_equal(rows[:4], choose_pairs(groups, 4, seed=1))
    assert not np.array_equal(rows[:4], choose_pairs(groups, 4, seed=2))
    assert choose_pairs(np.zeros(9, int), 5, seed=0).shape == (0, 3)


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 120, (SIZE, SIZE, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_pictures_are_mixed_in_halves_and_a_quarter_is_erased():
    boxes = set()
    for seed in range(12):
        made = {k: decode_image(v, None).astype(int) for k, v in mix_images(picture(0), picture(1), (seed,)).items()}
        assert sorted(made) == sorted(MADE)
        a, b = made["first"], made["second"]
        assert np.abs(made["mixup"] - (a + b) / 2).max() <= 0.5
        of_b = (made["cutmix"] == b).all(0) & (a != b).any(0)
        assert ((made["cutmix"] == a).all(0) | of_b).all() and of_b.mean() == pytest.approx(0.5, abs=0.001)
        rows, columns = np.flatnonzero(of_b.any(1)), np.flatnonzero(of_b.any(0))
        boxes.add((rows[0], rows[-1], columns[0], columns[-1]))
        for name, whole in (("erased_first", a), ("erased_second", b)):
            grey = (made[name] == 128).all(0)
            assert grey.mean() == ERASED == 0.25 and (made[name] == whole)[:, ~grey].all()
    assert boxes == {(0, 223, 0, 111), (0, 223, 112, 223), (0, 111, 0, 223), (112, 223, 0, 223)}


def items(mean, log_var=None):
    return GaussianEmbedding(mean, torch.full_like(mean, -2.0) if log_var is None else log_var)


def turned(e):
    """The covariance that an ellipse says."""
    turn = np.array([[math.cos(e["angle"]), -math.sin(e["angle"])], [math.sin(e["angle"]), math.cos(e["angle"])]])
    return turn @ np.diag([e["a"] ** 2, e["b"] ** 2]) @ turn.T


@pytest.fixture
def some():
    generator = torch.Generator().manual_seed(5)
    mean = torch.randn(40, 7, generator=generator) * torch.tensor([1.0, 5, 0.3, 2, 0.1, 0.5, 0.2]) + 3
    return items(mean, torch.randn(40, 7, generator=generator))


def test_axes_are_those_of_numpy(some):
    projection = fit_map(some)
    mean = some.mean.double().numpy()
    values, vectors = np.linalg.eigh(np.cov(mean, rowvar=False))
    for k in range(2):
        mine, theirs = projection.axes[:, k].numpy(), vectors[:, -1 - k]
        assert abs(mine @ theirs) == pytest.approx(1, abs=1e-12)
        assert mine[np.abs(mine).argmax()] > 0
        assert projection.explained[k] == pytest.approx(values[-1 - k] / values.sum(), rel=1e-12)
    torch.testing.assert_close(projection.axes.T @ projection.axes, torch.eye(2, dtype=torch.float64))
    x = np.array([(e["x"], e["y"]) for e in projection.ellipses(some)])
    np.testing.assert_allclose(x, (mean - mean.mean(0)) @ projection.axes.numpy(), atol=1e-12)
    torch.testing.assert_close(fit_map(items(-some.mean)).axes, projection.axes)  # signs say nothing of the data


def test_ellipses_are_the_eigen_decomposition(some):
    projection = fit_map(some)
    axes, var = projection.axes.numpy(), some.var.double().numpy()
    for row, e in zip(var, projection.ellipses(some), strict=True):
        covariance = axes.T @ np.diag(row) @ axes
        small, large = np.linalg.eigh(covariance)[0]
        assert (e["a"], e["b"]) == pytest.approx((math.sqrt(large), math.sqrt(small)), rel=1e-6)
        assert e["a"] != pytest.approx(large, rel=1e-3)  # a standard deviation, not a variance
        np.testing.assert_allclose(turned(e), covariance, rtol=1e-6, atol=1e-9)
        assert -math.pi / 2 < e["angle"] <= math.pi / 2 and e["total_variance"] == pytest.approx(row.sum())


def test_points_have_no_ellipse_and_equal_variances_are_circles(some):
    for e in fit_map(some).ellipses(GaussianEmbedding.point(some.mean)):
        assert e["a"] == e["b"] == e["angle"] == 0
    for e in fit_map(some).ellipses(GaussianEmbedding(some.mean, torch.full_like(some.mean, math.log(0.09)))):
        assert (e["a"], e["b"]) == pytest.approx((0.3, 0.3), rel=1e-5)


def test_degenerate_galleries():
    for n, d, equal in [(n, d, e) for n, d in ((1, 5), (2, 5), (9, 5), (3, 1), (1, 1), (4, 2)) for e in (False, True)]:
        mean = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
        mean = mean[:1].repeat(n, 1) if equal else mean
        projection = fit_map(items(mean))
        if equal or n == 1:
            assert projection.explained == (0, 0)
        elif n == 2 or d == 1:
            assert projection.explained == (pytest.approx(1), pytest.approx(0, abs=1e-12))
        else:
            assert 1 >= projection.explained[0] >= projection.explained[1] > 0
        for e in projection.ellipses(items(mean)):
            assert all(map(math.isfinite, e.values()))
            assert (e["a"], e["b"]) == pytest.approx((math.exp(-1), math.exp(-1) if d > 1 else 0))
            assert not equal or (e["x"], e["y"]) == pytest.approx((0, 0), abs=1e-6)


def split(n=30, per=3, d=6, seed=0):
    """n images with texts of their own near them."""
    random = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, d, generator=random) * torch.tensor([3.0, 2, 1, 0.5, 0.5, 0.1])[:d]
    near = mean.repeat_interleave(per, 0) + 0.3 * torch.randn(n * per, d, generator=random)
    images = GaussianEmbedding(mean, torch.randn(n, d, generator=random) - 2)
    texts = GaussianEmbedding(near, torch.randn(n * per, d, generator=random) - 1)
    owner = np.repeat(np.arange(n), per)
    return images, texts, Relevance.from_pairs(owner, np.arange(n * per), n_queries=n, n_gallery=n * per)


def test_a_map_is_the_plane_of_all_and_a_large_split_is_sampled():
    images, texts, ground_truth = split()
    both = GaussianEmbedding.cat([images, texts])
    found, plane = map_items(images, texts, ground_truth, n=1000), fit_map(both)
    for item, ellipse in zip(found["items"], plane.ellipses(both), strict=True):
        assert ellipse.items() <= item.items()
    assert found["explained"] == list(plane.explained)
    first, again, other = (map_items(images, texts, ground_truth, n=8, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    sides = [[item["index"] for item in first["items"] if item["side"] == side] for side in ("image", "text")]
    assert [len(s) for s in sides] == [8, 8] and all(s == sorted(set(s)) for s in sides)
    assert {t // 3 for t in sides[1]} <= set(sides[0])  # Texts of the shown images.


def test_families_are_images_with_the_texts_that_match_them_alone():
    images, texts, ground_truth = split(n=7)
    pairs = np.concatenate(
        [np.stack([ground_truth.query_of_item, ground_truth.indices], 1), [[1, 0]]]
    )  # The first text is true of two.
    shared = Relevance.from_pairs(*pairs.T, n_queries=7, n_gallery=21)
    found = map_items(images, texts, shared, n=50, seed=6)
    of = {(item["side"], item["index"]): item["family"] for item in found["items"]}
    first = [of["image", i] for i in range(7)]
    assert sorted(f for f in first if f is not None) == [0, 1, 2, 3, 4] and FAMILIES == 5
    assert [of["text", t] for t in range(21)] == [None, *[first[t // 3] for t in range(1, 21)]]
    assert first != sorted(first, key=lambda f: (f is None, f))  # A random choice, not the first of the data.


def test_tsne_is_scikit_learns_and_areas_are_in_proportion_to_variances():
    manifold = pytest.importorskip("sklearn.manifold", reason="the extra analysis is not installed")
    images, texts, ground_truth = split(n=10)
    found = map_items(images, texts, ground_truth, method="tsne", seed=4)
    both = GaussianEmbedding.cat([images, texts])
    expected = manifold.TSNE(2, perplexity=13.0, init="pca", random_state=4).fit_transform(both.mean.double().numpy())
    np.testing.assert_allclose([(item["x"], item["y"]) for item in found["items"]], expected, rtol=1e-5)
    area = np.array([math.pi * item["a"] * item["b"] for item in found["items"]])
    fraction = area / both.total_variance.double().numpy()
    np.testing.assert_allclose(fraction, fraction[0], rtol=1e-5)
    assert area[0] > 0 and found["explained"] is None
    points = [GaussianEmbedding.point(e.mean) for e in (images, texts)]
    found = map_items(*points, ground_truth, method="tsne")["items"]
    assert {i["a"] for i in found} == {i["total_variance"] for i in found} == {0}
    assert len({(i["x"], i["y"]) for i in found}) == 40
