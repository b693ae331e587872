"""Set algebra: figures worked by hand, and images that are mixed and erased as stated."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato import GaussianEmbedding
from sfumato.data.image_decoding import decode_image
from sfumato.studies.sets import ERASED, MADE, SIZE, ImageSets, choose_pairs, draw_pair, measure_sets, mix_images


def gaussians(*rows):
    """Each row is (x, y, variance of x, variance of y)."""
    values = torch.tensor(rows, dtype=torch.float64)
    return GaussianEmbedding(values[:, :2], values[:, 2:].log())


def sets(**changes):
    parts = {
        "first": gaussians((0, 0, 1, 1), (1, 1, 1, 1)),
        "second": gaussians((4, 0, 0.2, 0.2), (1, 5, 1, 1)),
        # Beside the middle, narrow; then beyond the second part, wide.
        "mixup": gaussians((2, 1, 1.21, 0.25), (1, 6, 4, 4)),
        "cutmix": gaussians((0, 0, 1, 1), (1, 5, 1, 1)),
        "erased_first": gaussians((1, 0, 4, 1), (1, 1, 0.5, 0.5)),
        "erased_second": gaussians((4, 2, 9, 9), (1, 5, 2, 2)),
    }
    return ImageSets(np.array([[0, 1], [2, 3]]), parts | changes, gaussians((2, 0, 1, 1), (1, 3, 1, 1)))


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
    found = measure_sets(sets(), n_resamples=0)
    mixup = {name: interval.value for name, interval in found.mixes["mixup"].items()}
    assert found.n == 2 and mixup["more_uncertain"] == 0.5  # 1.46 against 2 and 0.4; 8 against 2 and 2.
    assert mixup["variance_ratio"] == pytest.approx(math.sqrt(1.46 / math.sqrt(2 * 0.4) * 8 / 2))
    assert mixup["between"] == 0.5 and mixup["off_line"] == pytest.approx((1 / 4 + 0) / 2)
    # Twice the deviation along the line: 2.2 reaches both ends, 2 away, and one deviation would not; 4 reaches the
    # second part, 1 away, but not the first, 5 away, which twice the variance, 8, would.
    assert mixup["covers"] == (1 + 0.5) / 2
    first = [included((0, 0, 1, 1), (2, 1, 1.21, 0.25)), included((4, 0, 0.2, 0.2), (2, 1, 1.21, 0.25))]
    assert first == [False, True] and included((1, 1, 1, 1), (1, 6, 4, 4)) and included((1, 5, 1, 1), (1, 6, 4, 4))
    assert mixup["includes"] == (0.5 + 1) / 2
    # A mixture that is one of its parts: as certain as they are, on the line, at its end.
    cutmix = {name: interval.value for name, interval in found.mixes["cutmix"].items()}
    assert cutmix["more_uncertain"] == cutmix["between"] == cutmix["off_line"] == 0
    assert cutmix["covers"] == 0.5 and cutmix["variance_ratio"] == pytest.approx(math.sqrt(2 / math.sqrt(2 * 0.4)))
    assert cutmix["includes"] == (0.5 + 0) / 2  # The narrow second part; nothing is included in its equal.
    other = {name: interval.value for name, interval in found.mixes["other"].items()}
    assert other["between"] == other["covers"] == 1 and other["off_line"] == 0


def test_figures_of_erased_pictures_are_those_worked_by_hand():
    erased = {name: interval.value for name, interval in measure_sets(sets(), n_resamples=0).erased.items()}
    assert erased["more_uncertain"] == 3 / 4
    assert erased["variance_ratio"] == pytest.approx((5 / 2 * 18 / 0.4 * 0.5 * 2) ** 0.25)
    assert erased["moved"] == pytest.approx((1 / 4 + 2 / 4 + 0 + 0) / 4)
    assert erased["includes"] == 3 / 4


def test_pairs_are_resampled_and_equal_means_left_out():
    some = sets()
    interval = measure_sets(some, n_resamples=200).mixes["mixup"]["more_uncertain"]
    assert (interval.low, interval.high) == (0, 1)
    same = sets(second=gaussians((0, 0, 1, 1), (1, 5, 1, 1)))
    assert measure_sets(same, n_resamples=0).n == 1
    with pytest.raises(ValueError, match="no pair has two different means"):
        measure_sets(sets(second=some.embeddings["first"]))
    with pytest.raises(ValueError, match="are points"):
        measure_sets(sets(mixup=GaussianEmbedding.point(some.embeddings["mixup"].mean)))
    with pytest.raises(ValueError, match="expected 2 embeddings"):
        sets(mixup=gaussians((0, 0, 1, 1)))


def test_a_pair_is_drawn_in_the_plane_of_its_six_means():
    drawn = draw_pair(sets(), 0)
    items = {item["name"]: item for item in drawn["items"]}
    assert tuple(items) == MADE and sum(drawn["explained"]) == pytest.approx(1)
    # Two dimensions on a plane: turned only, so distances and areas stay.
    assert math.dist(*[(items[n]["x"], items[n]["y"]) for n in ("first", "second")]) == pytest.approx(4)
    for name, (vx, vy) in {"mixup": (1.21, 0.25), "erased_second": (9, 9), "erased_first": (4, 1)}.items():
        assert items[name]["a"] == pytest.approx(math.sqrt(max(vx, vy)))
        assert items[name]["b"] == pytest.approx(math.sqrt(min(vx, vy)))
        assert items[name]["total_variance"] == pytest.approx(vx + vy)


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
        made = {
            name: decode_image(data, None).astype(int)
            for name, data in mix_images(picture(0), picture(1), (seed,)).items()
        }
        assert tuple(sorted(made)) == tuple(sorted(MADE))
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
