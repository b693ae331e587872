"""What a notebook and a terminal show: short lines, hits with images and bars in escaped HTML, and plots."""

import base64
import io
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from support.lazy import Lazy
from support.raising import raises

import sfumato
from sfumato.data.images import MemoryImage
from sfumato.errors import UserError
from sfumato.reports.tables import print_search
from sfumato.search.answer import UNFAMILIAR, Answer, Hit, fits_verdict, verdict

pyplot = Lazy("matplotlib.pyplot", "the extra report is not installed")


@pytest.fixture(autouse=True)
def _no_window():
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


CLEAR = verdict(1.6, 0.9)


def answer(n=3, calibrated=True, query="a <b>dog</b> & cat", found=CLEAR, **values):
    labels = [{"label": 'a "label" <x>'} if i else {} for i in range(n)]
    hits = tuple(Hit(f"<i>{i}.png", i + 1, 0.5 + i, 0.9 / (i + 1), 0.1, label) for i, label in enumerate(labels))
    said = found if calibrated or found.kind == "unfamiliar" else None
    total = 1.6 if calibrated else None
    return Answer(query, "csd", calibrated, 0.1, hits, expected_matches=total, verdict=said, **values)


@pytest.mark.parametrize("probabilities, expected, nothing, kind, said", [
    ([0.9, 0.8, 0.6, 0.2], 12.3, 0.1, "many", "matches: about 12; 2 of the 3 results above 50% should be right"),
    ([0.9, 0.8], 3.0, 0.0, "few", "A few matches: about 3"),
    ([0.9, 0.8], 1.9, 0.0, "few", "A few matches: about 2"),
    ([0.9, 0.4], 2.9, 0.0, "clear", "One clear match"),
    ([0.7, 0.4], 2.9, 0.0, "few", "A likely match: the first result is right with a probability of 70%"),
    ([0.49, 0.4], 30.0, 0.4, "unsure", "No likely match: the first result is right with a probability of 49%"),
    ([0.24], 0.2, 0.5, "nothing", "Nothing here shows this"),
    ([0.26], 0.2, 0.5, "unsure", "No likely match: the first result is right with a probability of 26%"),
    ([0.5], 0.7, 0.5, "few", "A likely match: the first result is right with a probability of 50%"),
    # By distance the most probable result need not be the first.
    ([0.1, 0.7], 1.2, 0.0, "few", "A likely match: the most probable result is right with a probability of 70%"),
])  # fmt: skip
def test_what_is_said_of_a_list(probabilities, expected, nothing, kind, said):
    found = fits_verdict(probabilities, expected, nothing)
    assert found.kind == kind and found.text.endswith(said)
    if kind == "nothing":
        unjudged = fits_verdict(probabilities, expected, nothing, 0.5)
        assert unjudged.kind == "unsure" and unjudged.text.endswith("and 50% of the images have no captions")
        assert fits_verdict(probabilities, expected, nothing, 1).text.endswith("and no image has captions")
        assert fits_verdict(probabilities, expected, nothing, 0.1).kind == "nothing"


@pytest.mark.parametrize(
    "probabilities, expected, kind, said",
    [
        ([0.8, 0.7, 0.6, 0.2], 23.0, "few", "Likely matches: 2 of the 3 results above 50% should be right"),
        ([0.9] * 8, 23.0, "few", "Likely matches: 7 of the 8 results above 50% should be right"),
        ([0.8, 0.7], 12.0, "few", "Likely matches: both results above 50% should be right"),
        ([0.8, 0.4], 12.0, "few", "A likely match: the first result is right with a probability of 80%"),
        ([0.9, 0.4], 2.9, "few", "A likely match: the first result is right with a probability of 90%"),
        ([0.9, 0.2], 12.0, "clear", "One clear match; 71% of the images have no captions"),
        (
            [0.4, 0.3], 9.0, "unsure",
            "Not sure: 71% of the images have no captions, and without them the numbers are often too low",
        ),
    ],
)  # fmt: skip
def test_the_number_of_matches_is_not_said_where_most_items_have_no_texts(probabilities, expected, kind, said):
    found = fits_verdict(probabilities, expected, 0.0, 0.71)
    assert (found.kind, found.text) == (kind, said)
    assert kind != "few" or "about 23" in fits_verdict(probabilities, 23.0, 0.0, 0.7).text


def test_a_list_by_texts_has_one_sentence_and_a_line(capsys):
    found = replace(answer(4, found=fits_verdict([0.9, 0.45, 0.3], 8.2, 0.0)), target="fits", expected_matches=8.2)
    assert found.sentence == found.verdict.text == "Many matches: about 8"
    print_search(replace(found, hits=found.hits[:3], hidden=1).to_json())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["a", "Many", "90%", "----", "45%", "30%", "1"]
    escaped = replace(found[0], match_probability=0.001, payload={"label": "\x1b[31mred"})
    print_search(replace(found, hits=(escaped,)).to_json())
    assert capsys.readouterr().out.splitlines()[2:] == [r"      <1%  <i>0.png  \x1b[31mred"]
    print_search(replace(found, hits=(found[1], found[0])).to_json())  # By distance: without a line.
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["45%", "90%"]


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.images, self.widths = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.images += [values["src"]] if tag == "img" else []
        self.widths += re.findall(r"[ ;]width: ([\d.]+)%", values.get("style", ""))

    def handle_data(self, data):
        self.texts.append(" ".join(data.split()))


def test_a_page_has_escaped_texts_bars_and_small_images():
    page = Page(answer()._repr_html_())
    assert set(page.tags) == {"div", "strong", "br"}
    assert {"a <b>dog</b> & cat", "<i>0.png", 'a "label" <x>', "90%", "45%", "30%"} <= set(page.texts)
    assert page.widths == ["90.0", "45.0", "30.0"]
    assert any("One clear match; 1.6 matches expected" in text for text in page.texts)
    plain = Page(answer(calibrated=False)._repr_html_())
    assert not plain.widths and not any("%" in text for text in plain.texts)
    assert any("not calibrated for such queries" in text for text in plain.texts)
    assert "No item reaches this probability." in Page(answer(0)._repr_html_()).texts
    buffer, noise = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (600, 900, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    files = {"<i>0.png": buffer.getvalue(), "<i>1.png": b"no image"}
    found = answer(image_of=lambda hit: MemoryImage(hit.id, files[hit.id]) if hit.id in files else None)
    [image] = Page(found._repr_html_()).images
    data = base64.b64decode(image.removeprefix("data:image/webp;base64,"))
    assert len(data) < 15_000 and Image.open(io.BytesIO(data)).size == (144, 96)


@pytest.mark.parametrize("calibrated", [True, False])
def test_lines_and_plain_values_have_no_probabilities_that_are_not_calibrated(calibrated, capsys):
    lines = repr(answer(calibrated=calibrated)).splitlines()
    if calibrated:
        assert lines[0] == "Answer('a <b>dog</b> & cat': One clear match; 1.6 matches expected)"
        assert lines[1] == "   90%  csd 0.5000  <i>0.png" and lines[2].endswith('<i>1.png  a "label" <x>')
    else:
        assert "%" not in "".join(lines[1:])
    values = answer(calibrated=calibrated, conformal_set=answer().hits[:1]).to_json()
    assert (values["verdict"], values["expected_matches"]) == (("One clear match", 1.6) if calibrated else (None, None))
    given = [hit["match_probability"] for hit in values["hits"] + values["conformal_set"]]
    assert given == ([0.9, 0.45, 0.3, 0.9] if calibrated else [None] * 4)
    strange = answer(calibrated=calibrated, found=UNFAMILIAR)
    assert "hardly knows" in strange.to_json()["verdict"] and strange.sentence == strange.to_json()["verdict"]
    assert "expected" not in strange.sentence, "guesses have no number"
    print_search(strange.to_json())
    lines = capsys.readouterr().out
    assert "hardly knows" in lines and ("%" in lines) is ("matches expected" in lines) is calibrated


def test_a_reliability_curve_has_the_bins_of_loops():
    random = np.random.default_rng(0)
    p = random.random(1000)
    y = (random.random(1000) < p**2).astype(int)
    found, expected, order = sfumato.Reliability.of(p, y, n_bins=5), [], np.argsort(p)
    for part in np.array_split(order, 5):
        expected.append((p[part].mean(), y[part].mean(), len(part)))
    for b, (mean, rate, count) in zip(found.curve, expected, strict=True):
        assert (b["probability"], b["observed"], b["count"]) == (pytest.approx(mean), pytest.approx(rate), count)
    # The error has 15 bins, however many are drawn.
    parts = [[i for rank, i in enumerate(order) if rank * 15 // 1000 == b] for b in range(15)]
    ece = sum(abs(p[part].mean() - y[part].mean()) * len(part) for part in parts) / 1000
    assert ece != pytest.approx(sum(abs(a - b) * n for a, b, n in expected) / 1000, abs=1e-3)
    assert found.ece == pytest.approx(ece) and found.ece > 3 * found.ece_by_chance
    assert f"calibration error {ece:.3f}" in repr(found) and "1000 hits" in repr(found)
    axes = found.plot()
    line = axes.lines[1]
    assert line.get_xdata() == pytest.approx([a for a, _, _ in expected])
    assert line.get_ydata() == pytest.approx([b for _, b, _ in expected])
    assert [text.get_text() for text in axes.texts] == ["n = 200", "200", "200", "200", "200"]


def test_hits_are_drawn_as_bars_by_an_extra(monkeypatch):
    axes = answer().plot()
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.9, 0.45, 0.3])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["<i>0.png", 'a "label" <x>', 'a "label" <x>']
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first hit is at the top"
    assert axes.get_xlabel() == "match probability" and "One clear match" in axes.figure.get_suptitle()
    by_distance = answer(calibrated=False).plot()
    assert [bar.get_width() for bar in by_distance.patches] == pytest.approx([0.5, 1.5, 2.5])
    assert by_distance.get_xlabel() == "csd (smaller is closer)"
    _, mine = pyplot.subplots()
    assert answer().plot(mine) is mine and answer(0).plot() is not mine
    long = answer(1, query="/a/very/long/path/that/does/not/fit/into/the/title/dog.png").plot()
    assert "title/dog.png" in long.figure.get_suptitle() and "/a/very" not in long.figure.get_suptitle()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for drawn in (answer(), sfumato.Reliability.of(np.array([0.5]), np.array([1]))):
        raises(UserError, r'pip install "sfumato\[report\]"', drawn.plot)


def test_verdicts_at_both_sides_of_every_border():
    for expected, best, abstained, kind, said in (
        (212.4, 0.99, None, "many", "Many matches: about 212"), (7.0, 0.01, None, "many", "Many matches: about 7"),
        (6.9, 0.249, None, "unsure", "No clear match: the first result is right with a probability of 25%"),
        (4.4, 0.25, None, "few", "A few matches: about 4"), (3.0, 0.9, False, "few", "A few matches: about 3"),
        (2.9, 0.25, None, "few", "A possible match: the first result is right with a probability of 25%"),
        (2.9, 0.5, None, "few", "A likely match: the first result is right with a probability of 50%"),
        (2.0, 0.9, None, "few", "A likely match: the first result is right with a probability of 90%"),
        (1.9, 0.75, None, "clear", "One clear match"), (0.9, 0.749, None, "few", "with a probability of 75%"),
        (0.1, 0.0049, None, "unsure", "with a probability of less than 1%"),
        (0.1, 0.006, None, "unsure", "with a probability of 1%"),
        (2.4, 0.996, None, "few", "with a probability of more than 99%"),
        (212.4, 0.99, True, "abstained", "No confident match"),
    ):  # fmt: skip
        found = verdict(expected, best, abstained)
        assert found.kind == kind and said in found.text, (expected, best)
        empty = verdict(expected, best, abstained, empty_set=True)
        assert empty.kind in ("unsure", "abstained") and empty.text.startswith("No "), "no match beside an empty set"
