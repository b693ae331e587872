"""Every figure of the papers that has runs is drawn from tiny ones."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from papers.tables.drawn import DRAWN, figure_lines, write_figure
from papers.tables.figure_numbers import KINDS, Figure, make_figure
from papers.tables.items import find_item, paper_items
from papers.tables.paper_tables import TableData, choose_data
from papers.tests.tables import tiny_figures

SMALL = (*tiny_figures.SMALL, "model.dim=32")

FIGURES = [item.id for item in paper_items().values() if item.draw]

ELSEWHERE = {"PCME Fig. E.3", "PCME++ Fig. C.2", "PVSE++ 4", "PVSE++ Fig. 2", "PCME++ Fig. A.1"}
"""Figures that need COCO's instances, or labelled images: below, from made-up numbers. Of crops and the toy study: with
their studies."""


def check(figure, folder):
    """The files of a figure, and that its words have no undefined number."""
    paths = write_figure(figure, folder)
    assert [path.name for path in paths] == ["figure.json", "figure.png", "figure.svg"]
    with Image.open(paths[1]) as image:
        pixels = np.asarray(image.convert("L"))
    assert min(pixels.shape) > 300 and (pixels < 200).mean() > 0.002
    texts = [e.text or "" for e in ET.parse(paths[2]).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert texts and not any(word in " ".join(texts) for word in ("nan", "mathdefault", "None"))
    stored = json.loads(paths[0].read_text(encoding="utf-8"))
    assert stored["id"] == figure.item.id and stored["source"] and stored["numbers"]
    lines = figure_lines(figure)
    assert len(lines) >= 2 and "nan" not in " ".join(lines) and "None" not in " ".join(lines)
    return stored, texts


def test_every_kind_of_the_data_is_computed_and_drawn():
    assert set(DRAWN) < set(KINDS) == {item.draw for item in paper_items().values() if item.draw}


@pytest.mark.parametrize("id", [id for id in FIGURES if id not in ELSEWHERE])
def test_every_figure_is_drawn_from_tiny_runs(id, pictures, tmp_path):
    item = find_item(id)
    given = (str(pictures / "dataset_flickr8k.json"), (f"data.images={pictures / 'images'}", *SMALL))
    data = choose_data(item, *(given if item.runs else (None, ())))
    figure = make_figure(item, data, pictures / "runs")
    stored, texts = check(figure, tmp_path / "out")
    assert set(stored["runs"]) == set(item.runs) and any(item.id in text for text in texts)
    if item.runs:
        assert not stored["same_data"] and stored["data"] == "Flickr8k" and stored["overrides"] == list(data.overrides)
    if "VSE∞" in item.runs:
        assert any(line.startswith("VSE∞: ") and line.endswith("points") for line in figure_lines(figure))
        assert "VSE∞: points" in texts


def made_up(id, numbers):
    item = find_item(id)
    return Figure(item, TableData("coco", "COCO"), 1, {row: () for row in item.runs}, numbers, {})


def test_pmrp_and_prompts_are_drawn(tmp_path):
    curve = [{"x": float(z), "value": 40.0 + z, "low": 39.0 + z, "high": 41.0 + z} for z in range(3)]
    panel = {"name": "i2t", "x": "tolerance ζ", "y": "PMRP", "look": "marked", "series": {"PVSE": curve, "PCME": curve}}
    _, texts = check(made_up("PCME Fig. E.3", {"panels": [panel, panel | {"name": "t2i"}]}), tmp_path / "pmrp")
    assert {"tolerance ζ", "PMRP, %", "PVSE", "image → text"} <= set(texts)
    kept = {"images": "reported", "top1": [0.2, 0.4, 0.3], "random_top1": [0.1, 0.2, 0.3], "best_k": [1, None, 2]}
    figure = made_up("PCME++ Fig. C.2", {"classes": 3, "n_images": 9, "kept": kept})
    check(figure, tmp_path / "prompts")
    (line,) = [line for line in figure_lines(figure) if line.startswith("top-1")]
    assert "30.0% with all 3 prompts, at best 40.0% with the 2 most certain (20.0%" in line
