"""Charts: inline SVG that fetches nothing, escapes what users wrote, and has its titles on the right shapes."""

import re
import xml.etree.ElementTree as ET

import pytest
from reports.test_report import EVIL

from sfumato.charts import (
    FIRST,
    INK,
    Chart,
    new_axes,
    require_matplotlib,
    write_drawing,
)
from sfumato.errors import UserError
from sfumato.reports.report import training_curves

LINK = "{http://www.w3.org/1999/xlink}href"


def parsed(svg):
    """The SVG as XML, with the name space that HTML knows by itself."""
    return ET.fromstring(str(svg).replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1))


def test_a_chart_is_one_element_without_references_to_elsewhere():
    chart = Chart(f"label {EVIL}")
    (line,) = chart.axes.plot([0, 1], [0.0996, 0.0984], "o-", color=FIRST, label="a $x$ < b")
    chart.hover(line, f"title {EVIL}")
    chart.axes.set_xlabel(EVIL)
    chart.legend()
    svg = chart.svg()
    root = parsed(svg)
    assert root.tag == "svg" and root.attrib["aria-label"] == f"label {EVIL}" and root.attrib["role"] == "img"
    assert not re.search(r"https?://|url\(|@import|<style|<script|<!DOCTYPE", svg)
    texts = [e.text for e in root.iter("text")]
    assert EVIL in texts and "a $x$ < b" in texts
    assert "0.0996" in texts or "0.0995" in texts, "ticks keep their digits"
    assert [e.text for e in root.iter("title")] == [f"title {EVIL}"]
    assert f"stroke: var(--sure, {FIRST})" in svg and f"var(--ink, {INK})" in svg and chart.svg() == svg
    ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
    assert {e.attrib[LINK][1:] for e in root.iter("use")} <= ids


def test_each_marker_of_a_collection_has_its_title():
    chart = Chart("dots")
    n = 40
    chart.hover(chart.axes.scatter(range(n), range(n), s=28), *(f"dot {k}" for k in range(n)))
    dots = [e for e in parsed(chart.svg()).iter("use") if e.find("title") is not None]
    assert [e.find("title").text for e in dots] == [f"dot {k}" for k in range(n)]
    positions = [float(e.attrib["x"]) for e in dots]
    assert positions == sorted(positions) and len(set(positions)) == n


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


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'sfumato\[report\]'"):
        require_matplotlib()


def test_training_curves_show_the_values_of_the_log():
    log = [{"epoch": e, "loss": 4.0 - e, "val/i2t/recall@1": 0.1 * e} for e in range(3)]
    loss, recall = training_curves(log)
    assert [e.text for e in parsed(loss["chart"]).iter("title")] == ["epoch 1: 4", "epoch 2: 3", "epoch 3: 2"]
    assert [e.text for e in parsed(recall["chart"]).iter("title")][1:] == ["epoch 2: 10.0%", "epoch 3: 20.0%"]
    assert training_curves([{"epoch": 0, "loss": 0.0}]) == []
