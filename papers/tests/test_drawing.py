"""Ellipses: their shapes, their enlargement, and letters that stay apart."""

import math

import numpy as np
import pytest

from papers.drawing import Ellipse, ellipse_chart, letter_positions, magnification, write_drawing
from sfumato.charts import FIRST, new_axes


def corners(path, degrees):
    """Points of a drawn ellipse in pixels, up is up."""
    at = np.radians(degrees)
    return path.get_patch_transform().transform(np.stack([np.cos(at), np.sin(at)], -1))


def test_ellipses_keep_their_shapes_turn_anticlockwise_and_fit():
    shapes = [(0.0, 0.0, 0.5, 0.1, math.pi / 6), (10.0, 2.0, 0.0, 0.0, 0.0), (3.0, 5.0, 1.0, 1.0, 0.0)]
    chart = ellipse_chart([Ellipse(*shape, FIRST) for shape in shapes], "shapes", times=2.0, width=400, height=300)
    chart.svg()
    axes = chart.axes
    scale = np.diff(axes.transData.transform([(0, 0), (1, 0)])[:, 0])[0]
    assert np.diff(axes.transData.transform([(0, 0), (0, 1)])[:, 1])[0] == pytest.approx(scale, rel=1e-6)
    end, side = corners(axes.patches[0], [0, 90])
    assert end == pytest.approx((math.cos(math.pi / 6), 0.5))
    assert np.hypot(*side) == pytest.approx(0.2)
    low, high = axes.get_xlim(), axes.get_ylim()
    for patch in axes.patches:
        for x, y in corners(patch, range(0, 360, 10)):
            assert low[0] <= x <= low[1] and high[0] <= y <= high[1]


def test_ellipses_are_enlarged_by_round_numbers():
    factors = {0.2: 1, 0.11: 1, 0.1: 1, 0.04: 2, 0.02: 5, 0.019: 5, 0.01: 10, 0.0007: 100, 0.0: 1}
    for long, factor in factors.items():
        ellipses = [Ellipse(float(x), 0.0, long, 0.0, 0.0, FIRST) for x in np.linspace(0, 1, 20)]
        assert magnification(ellipses, 0.1) == factor, long
    assert magnification([], 0.1) == 1


def inside(ellipse, point):
    """Whether a point lies within an ellipse, in its own axes; an ellipse without size contains nothing."""
    dx, dy = point[0] - ellipse.x, point[1] - ellipse.y
    u = dx * math.cos(ellipse.angle) + dy * math.sin(ellipse.angle)
    v = dy * math.cos(ellipse.angle) - dx * math.sin(ellipse.angle)
    return ellipse.a > 0 and (u / ellipse.a) ** 2 + (v / max(ellipse.b, 1e-9)) ** 2 <= 1


def test_letters_of_one_place_stand_apart_and_outside():
    """Two ellipses at one place, a third far away: no letter on another, on a centre, or within an ellipse."""
    shapes = (0, 0, 0.3, 0.2, 0.4), (0.01, 0, 0.3, 0.3, 0), (4, 0, 0.4, 0.1, 0), (2, 3, 0, 0, 0)
    ellipses = [Ellipse(*map(float, shape), FIRST) for shape in shapes]
    letters = letter_positions(ellipses, 1.0)
    assert len(letters) == 4 and letter_positions([], 1.0) == []
    for k, letter in enumerate(letters):
        assert all(math.dist(letter, other) > 0.15 for other in letters[:k])
        assert all(math.dist(letter, (e.x, e.y)) > 0.15 for e in ellipses)
        assert not any(inside(e, letter) for e in ellipses)


def test_writing_a_figure_leaves_it_as_it_was(tmp_path):
    """Its layout too, which is found once for both files, and leaves room for the label."""
    from matplotlib import pyplot

    axes = new_axes(3, 2)
    axes.set_ylabel("label")
    figure = axes.figure
    canvas, engine = figure.canvas, figure.get_layout_engine()
    assert [path.name for path in write_drawing(figure, tmp_path, "drawn")] == ["drawn.png", "drawn.svg"]
    assert figure.canvas is canvas and figure.get_layout_engine() is engine and engine is not None
    assert axes.yaxis.label.get_window_extent().x0 >= 0
    pyplot.close(figure)
