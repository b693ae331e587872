"""The demonstration with a tiny model: the whole way, and a page that needs nothing else."""

import json
import re

import numpy as np
import pytest
from markupsafe import escape
from support.words import folded

from sfumato import find_recipe, load_emoji, load_recipe
from sfumato.data.sources import SOURCES, Source
from sfumato.demo import draw_examples, run_demo
from sfumato.search.answer import MANY

TINY = ["model.image.kind=small", "model.image.size=16", "model.image.width=4", "model.dim=16"]
TINY += ['model.text={ kind = "small", width = 16 }', "train.epochs=1", "variance_stage.epochs=1"]


def read_every_fourth(config, problems):
    return {name: data.keep_images(np.arange(0, len(data.image_ids), 4)) for name, data in load_emoji().items()}


@pytest.mark.slow
def test_demo_makes_a_self_contained_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SOURCES, "emoji", Source(read_every_fourth, needs_path=False))
    pairs, _ = draw_examples(read_every_fourth(load_recipe(find_recipe("emoji-demo")).data, None)["style"])
    assert len(pairs) == 4
    result, printed = run_demo(tmp_path / "demo", TINY), folded(capsys.readouterr().out)
    for pair in pairs:
        assert all(query in printed for query in pair)
    assert "image -> name" in printed and "matches expected" in printed
    page = (tmp_path / "demo" / "index.html").read_text()
    assert not re.search(r"https?://|<script|<link|url\(", page), "a page that loads something from elsewhere"
    assert page.count("data:image/png;base64,") >= 12 * 2 * len(pairs)
    assert all(f"“{escape(query)}”" in page for pair in pairs for query in pair)
    assert "+nan" not in page and "None" not in page
    assert json.loads((tmp_path / "demo" / "run" / "evaluation-test-squared_l2.json").read_text()) == result["test"]
    assert [s["query"] for s in result["searches"]] == [q for pair in pairs for q in pair]
    assert all(len(s["hits"]) == 12 for s in result["searches"])
    again = run_demo(tmp_path / "demo", TINY)
    assert again["searches"] == result["searches"], "a finished demo is shown again, not trained again"


def test_examples_are_drawn_and_are_what_the_page_says():
    data = load_emoji()["style"]
    pairs, pictures = draw_examples(data)
    matches = {text: set() for text in data.texts}
    for image, text in data.pairs.tolist():
        matches[data.texts[text]].add(image)
    for vague, precise in pairs:
        assert len(matches[vague]) >= MANY and len(matches[precise]) == 1 and matches[precise] <= matches[vague]
    assert len(set(pictures)) == 4 and draw_examples(data) == (pairs, pictures)
    drawn = [draw_examples(data, n=40, seed=seed)[0] for seed in range(5)]
    assert len({pairs[0][0] for pairs in drawn}) > 3, "another seed draws other queries"
    assert all(re.search(r"\w", text) for pairs in drawn for pair in pairs for text in pair), "what a search refuses"
