"""Drawings of studies: ellipses in one scale, turned the right way, and enlarged by round numbers alone."""

import math

import numpy as np
import pytest
from reports.test_report import EVIL, Checker, picture, scene

from sfumato.reports.analysis_views import analysis_views, interval
from sfumato.reports.drawing import Axes, Plane, magnification, place_marks
from sfumato.reports.report import make_report


def corner(ellipse, degrees):
    """A point of an SVG ellipse, after its turn."""
    at, turn = math.radians(degrees), math.radians(ellipse["turn"])
    x, y = ellipse["rx"] * math.cos(at), ellipse["ry"] * math.sin(at)
    return (
        ellipse["cx"] + x * math.cos(turn) - y * math.sin(turn),
        ellipse["cy"] + x * math.sin(turn) + y * math.cos(turn),
    )


def test_a_plane_keeps_shapes_and_turns_with_the_hand_of_the_drawing():
    ellipses = [(0.0, 0.0, 0.5, 0.1, math.pi / 6), (10.0, 2.0, 0.0, 0.0, 0.0), (3.0, 5.0, 1.0, 1.0, 0.0)]
    plane = Plane(ellipses, width=400, height=300)
    drawn = [plane.ellipse(e) for e in ellipses]
    scale = (drawn[1]["cx"] - drawn[0]["cx"]) / 10
    assert (drawn[0]["cy"] - drawn[2]["cy"]) / 5 == pytest.approx(scale, rel=0.01)  # Up is up.
    assert drawn[0]["rx"] == pytest.approx(0.5 * scale, abs=0.01) and drawn[0]["ry"] == pytest.approx(
        0.1 * scale, abs=0.01
    )
    # The end of the long half axis lies up and to the right of the centre.
    x, y = corner(drawn[0], 0)
    assert (x - drawn[0]["cx"], drawn[0]["cy"] - y) == pytest.approx(
        (scale * 0.5 * math.cos(math.pi / 6), scale * 0.5 * math.sin(math.pi / 6)), abs=0.1
    )
    for e in drawn:
        for degrees in range(0, 360, 10):
            x, y = corner(e, degrees)
            assert -0.5 <= x <= 400.5 and -0.5 <= y <= 300.5
    larger = Plane(ellipses, width=400, height=300, reach=2).ellipse(ellipses[2])
    assert larger["rx"] > drawn[2]["rx"] and larger["rx"] == larger["ry"]


def test_a_plane_of_one_place_is_drawn_in_the_middle():
    assert Plane([(7.0, 7.0, 0.0, 0.0, 0.0)] * 3).ellipse((7.0, 7.0, 0.0, 0.0, 0.0))["cx"] == 360
    assert Plane([]).width == 720


@pytest.mark.parametrize(
    ("long", "factor"),
    [(0.2, 1), (0.11, 1), (0.1, 1), (0.04, 2), (0.02, 5), (0.019, 5), (0.01, 10), (0.0007, 100), (0.0, 1)],
)
def test_ellipses_are_enlarged_by_round_numbers(long, factor):
    ellipses = [(float(x), 0.0, long, 0.0, 0.0) for x in np.linspace(0, 1, 20)]
    assert magnification(ellipses, 0.1) == factor
    assert magnification([], 0.1) == 1


def test_intervals_and_undefined_means_have_words():
    assert interval({"value": None, "low": None, "high": None})["text"] == "–"
    assert interval({"value": -0.5, "low": None, "high": None})["text"] == "−0.50"
    assert interval({"value": 0.00312, "low": 0.0031, "high": 0.0032})["text"] == "0.00312 (0.0031 to 0.0032)"


def test_a_curve_without_intervals_or_change_is_drawn():
    mean = [{"value": 2.0, "low": None, "high": None}] * 2
    figures = {f: mean[0] for f in ("spearman", "rises", "monotone", "auroc")}
    curve = {"n": 3, "strengths": [0, 0.5], "mean": mean, "recall": [1.0, 0.5], **figures}
    undefined = curve | {"mean": [{"value": None, "low": None, "high": None}] * 2}
    study = {"uncertainty": "log_det", "sides": {"image": {"erased": curve}, "text": {"wrong_letters": undefined}}}
    view = analysis_views({"corruption": study}, lambda name: None)["corruption"]
    assert [c["name"] for c in view["charts"]] == ["erased pictures"] and len(view["rows"]) == 2
    assert not view["charts"][0]["chart"]["whiskers"]


def test_what_users_wrote_cannot_become_markup():
    ellipse = {"x": 0.0, "y": 1.0, "a": 0.2, "b": 0.1, "angle": 0.3, "total_variance": 1.0}
    items = [
        ellipse | {"side": side, "index": 0, "id": EVIL, "label": EVIL, "family": f}
        for side in ("image", "text")
        for f in (0, None)
    ]
    value = {"value": 0.5, "low": 0.1, "high": 0.9}
    pair = {
        "items": [ellipse | {"name": "first", "picture": EVIL}, ellipse | {"name": "erased_first", "picture": EVIL, "x": 2.0}],
        "explained": [0.5, 0.5], "captions": [EVIL, EVIL],
    }  # fmt: skip
    told = {"mixes": {"more_uncertain": EVIL}, "erased": {"moved": EVIL}}
    one = {"mean": 1.0, "n_captions": 2, "words_per_caption": 1.0, "words": [{"word": EVIL, "n": 1, "weight": 1.0}]}
    found = {
        "map": {"method": "pca", "explained": [0.5, 0.2], "items": items},
        "sets": {"mixes": {"mixup": {"more_uncertain": value}}, "erased": {"moved": value}, "definitions": told, "shown": [pair],
                 "n": 3, "erased_share": 0.25},
        "words": {"uncertainty": EVIL, "corpus": "bin", "sides": {"image": [one]}},
    }  # fmt: skip
    for content in (None, picture(1)):
        page = make_report(scene(analyses=found, analysis_picture=lambda name, content=content: content)).html
        checked = Checker(page)
        assert {"map", "sets", "words"} <= set(checked.ids) and sum("<script>" in text for text in checked.text) > 6
        assert ("data:image/png" in page[page.index('id="sets"') : page.index('id="words"')]) == (content is not None)


def test_labels_of_one_place_stand_apart_and_outside():
    """Two pictures at one place, a third near the edge: no letter on another, on a dot, within its ellipse or cut."""
    shapes = [
        (0.0, 0.0, 0.3, 0.2, 0.4),
        (0.01, 0.0, 0.3, 0.3, 0.0),
        (4.0, 0.0, 0.4, 0.1, 0.0),
        (2.0, 3.0, 0.0, 0.0, 0.0),
    ]
    plane = Plane(shapes, width=380, height=300, margin=24)
    drawn = [plane.ellipse(e) for e in shapes]
    marks = place_marks(drawn, 380, 300)
    assert len(marks) == 4 and place_marks([], 380, 300) == []
    for k, (x, y) in enumerate(marks):
        assert 7 <= x <= 373 and 7 <= y <= 293
        assert all(abs(x - u) >= 15 or abs(y - v) >= 14 for u, v in marks[:k])
        assert all(math.hypot(x - e["cx"], y - e["cy"]) >= 9 for e in drawn)
        for e in drawn:  # The letter's middle, in the axes of the ellipse.
            turn = math.radians(e["turn"])
            dx, dy = x - e["cx"], y - e["cy"]
            u, v = dx * math.cos(turn) + dy * math.sin(turn), dy * math.cos(turn) - dx * math.sin(turn)
            assert (u / max(e["rx"], 0.1)) ** 2 + (v / max(e["ry"], 0.1)) ** 2 > 1.1


def test_a_letter_keeps_out_of_the_next_ellipse():
    """A point between a large disc and the middle of all, whose letter would lie within the disc, away from the middle."""
    shapes = [
        (-1.0, 0.0, 0.5, 0.5, 0.0),
        (-0.45, 0.0, 0.0, 0.0, 0.0),
        (2.0, 0.1, 0.1, 0.1, 0.0),
        (2.0, -0.9, 0.1, 0.1, 0.0),
    ]
    plane = Plane(shapes, width=380, height=300, margin=24)
    drawn = [plane.ellipse(e) for e in shapes]
    x, y = place_marks(drawn, 380, 300)[1]
    assert math.hypot(x - drawn[0]["cx"], y - drawn[0]["cy"]) > drawn[0]["rx"] + 7


@pytest.mark.parametrize(("tick", "left"), [("0.5", 54), ("0.0025", 63), ("0.00125", 70)])
def test_long_ticks_move_the_axis(tick, left):
    axes = Axes((0.0, 1.0), (0.0, 1.0))
    chart = axes.chart(x_ticks=[(0.0, "0")], y_ticks=[(0.0, "0"), (1.0, tick)], x_label="", y_label="y", label="")
    assert axes.left == axes.x(0.0) == chart["x_ticks"][0]["at"] == left


def test_a_column_has_one_precision():
    value = {
        f: {"value": v, "low": 0.0123, "high": 0.5} for f, v in zip("abcd", (0.0692, 0.54, 1.0, 0.004), strict=True)
    }
    mean = [{"value": v, "low": None, "high": None} for v in (0.003, 0.0228)]
    curve = {"n": 3, "strengths": [0, 0.5], "mean": mean, "recall": [1.0, 0.5]}
    curve |= dict(zip(("spearman", "rises", "monotone", "auroc"), value.values(), strict=True))
    study = {"uncertainty": "log_det", "sides": {"image": {"erased": curve}}}
    view = analysis_views({"corruption": study}, lambda name: None)["corruption"]
    assert [cell["text"] for cell in view["rows"][0][2:]] == [
        f"{v} (0.01 to 0.50)" for v in ("0.07", "0.54", "1.00", "0.00")
    ]
    assert [row[1] for row in view["charts"][0]["rows"]] == ["0.0030", "0.0228"]
