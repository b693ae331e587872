"""Charts: inline SVG that fetches nothing, escapes what users wrote, and has its titles on the right shapes."""

import re
import xml.etree.ElementTree as ET

from reports.test_report import EVIL

from sfumato.charts import FIRST, INK, Chart

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
