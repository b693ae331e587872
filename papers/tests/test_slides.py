"""The talk's tables against its printed numbers, and its drawings against formulas and loops."""

import math

import pytest
import torch

from papers.benchmarks import slides


def test_the_tables_have_the_printed_numbers():
    pytest.importorskip("eccv_caption")
    assert [row[1:] for row in slides.false_negatives().rows] == [
        ["1,332 (×1.00)", "6,305 (×1.00)"],
        ["1,895 (×1.42)", "8,906 (×1.41)"],
        ["11,279 (×8.47)", "22,550 (×3.58)"],
    ]
    printed = [["100.0", "100.0", "11.1"], ["0.0", "100.0", "68.6"], ["0.0", "100.0", "2.2"], ["0.0", "0.0", "14.1"]]
    assert [row[1:4] for row in slides.preference().rows] == printed


@pytest.mark.parametrize("positive", [True, False])
def test_the_exact_weights_are_those_of_the_mean_probability(positive):
    logit = torch.tensor([[-3.0, 0.5], [2.0, -1.0]])
    found = slides.sample_weights(logit, positive=positive)
    s = [1 / (1 + math.exp(-x if positive else x)) for x in logit.flatten().tolist()]
    assert found["exact"].flatten().tolist() == pytest.approx([x / sum(s) for x in s])
    assert all(float(weight.sum()) == pytest.approx(1) for weight in found.values())
    assert int(found["one instance"].argmax()) == int(found["printed"].argmax()) == (2 if positive else 0)
    far = slides.sample_weights(logit.abs() * (-20 if positive else 20), positive=positive)
    torch.testing.assert_close(far["printed"], far["exact"], atol=1e-6, rtol=1e-4)  # Eq. 5 is this limit.


def test_the_gradients_of_the_match_loss_saturate_on_the_right_side():
    distance = torch.tensor([0.1, 1.0, 2.5])
    found = slides.saturation(distance)
    s = [1 / (1 + math.exp(5 * d - 5)) for d in distance.tolist()]
    assert found["match"].tolist() == pytest.approx([5 * (1 - x) for x in s], rel=1e-4)
    assert found["no match"].tolist() == pytest.approx([-5 * x for x in s], rel=1e-4)


def test_the_drawings_are_written(tmp_path, shared):
    image = pytest.importorskip("PIL.Image")
    coco = shared / "data" / "tiny_coco" / "tiny_coco"
    slides.draw_plausible(tmp_path, coco / "annotations" / "instances_val2017.json", coco / "val2017")
    drawn = (tmp_path / "plausible.svg").read_text(encoding="utf-8")
    assert all(text in drawn for text in ("two or more: 71%", "ζ = 0: 0.25 others", "ζ = 2: 6.00 others"))
    slides.draw_weights(tmp_path)
    slides.draw_saturation(tmp_path)
    slides.animate_toy(tmp_path / "toy.gif", "wasserstein2", updates=21)
    assert {path.name for path in tmp_path.iterdir()} > {"weights.png", "saturation.svg", "toy.gif"}
    with image.open(tmp_path / "toy.gif") as gif:
        assert gif.n_frames == 3
