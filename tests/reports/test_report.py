"""Pages, charts, tables and summaries: they agree with figures computed otherwise; nothing breaks out or fetches."""

import html.parser
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import scipy
import torch
from support.charts import undrawn
from support.pictures import png
from support.words import folded

from sfumato import Calibration, GaussianEmbedding, GaussianIndex, PairData, Relevance, csd_matrix, match_probability
from sfumato.charts import FIRST, INK, Chart
from sfumato.evaluation.hits import HitFigures
from sfumato.evaluation.trust import DirectionTrust, TrustReport
from sfumato.metrics.bootstrap import Interval
from sfumato.metrics.reliability import expected_calibration_error
from sfumato.models.calibrate import calibrate_split
from sfumato.reports.evaluation import print_trust_summary
from sfumato.reports.report import make_report
from sfumato.reports.report_charts import MISTAKES, RESULTS, SHOWN, ReportData
from sfumato.reports.tables import print_table, print_wrapped

EVIL = '<script>alert("x")</script> & <img src=x onerror=alert(1)>'
VOID = {"meta", "img", "br"}


def scene(n=13, m=29, d=5, seed=0, **changes):
    random = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, d, generator=random)
    owner = 1 + torch.arange(m - 1) % (n - 1)
    near = torch.cat([mean[owner], torch.zeros(1, d)]) + 0.6 * torch.randn(m, d, generator=random)
    images = GaussianEmbedding(mean, torch.randn(n, d, generator=random) - 3)
    texts = GaussianEmbedding(near, torch.randn(m, d, generator=random) - 2)
    pairs = np.stack([owner.numpy(), np.arange(m - 1)], 1)
    values = {
        "model": "a model", "split": "test", "images": images, "texts": texts,
        "relevance": Relevance.from_pairs(*pairs.T, n_queries=n, n_gallery=m), "distance": "csd", "logits": (1.5, 2.0),
        "calibration": Calibration(1.5, 2.0, 0.1), "learnt_logits": (0.7, 2.5),
        "captions": [f"caption {i}" for i in range(m)], "image_names": [f"picture-{i}.png" for i in range(n)],
        "thumbnail": lambda position: png((position % 256, 40, 90)),
    }  # fmt: skip
    return ReportData(**(values | changes))


undrawn_report = undrawn()(make_report)
truth = lambda data: torch.from_numpy(np.asarray(data.relevance.to_dense())) > 0


class Checker(html.parser.HTMLParser):
    """Fails on tags that are not closed in order, on scripts and handlers, and collects what a reader meets."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.alts, self.text, self.ids, self.links = [], [], [], [], [], []
        self.svg_ids, self.uses = [], []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        assert tag not in ("script", "link", "iframe", "object", "base", "form")
        assert not any(name.startswith("on") for name in values)
        self.tags.append(tag)
        if tag == "img":
            assert values["src"].startswith("data:image/") and values["alt"]
            self.alts.append(values["alt"])
        if tag == "svg":
            assert values["role"] == "img" and values["aria-label"]
        assert tag != "th" or values["scope"]
        if "id" in values:
            (self.svg_ids if "svg" in self.open else self.ids).append(values["id"])
        if tag == "a":
            self.links.append(values["href"])
        if tag == "use":
            self.uses.append(values["xlink:href"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_else():
    page = make_report(scene(recipe='name = "toy"')).html
    checked = Checker(page)
    assert not re.search(r"https?://|url\(|@import", page)
    assert page.startswith("<!doctype html>") and "None" not in page and "nan" not in page.lower().replace("nano", "")
    ids = checked.ids + checked.svg_ids
    assert len(ids) == len(set(ids)) and all(link[0] == "#" and link[1:] in checked.ids for link in checked.links)
    assert checked.uses and all(use[0] == "#" and use[1:] in checked.svg_ids for use in checked.uses)
    assert len(checked.alts) <= 4 * SHOWN * RESULTS + 6 * MISTAKES
    assert checked.tags.count("h1") == 1 and checked.tags.count("svg") == 2 + 1 + 3
    assert "name = &#34;toy&#34;" in page and "ECE after" in page
    data = scene()  # Intervals of recall are scipy's.
    distance, true = csd_matrix(data.images, data.texts), truth(data)
    for d, t in ((distance, true), (distance.T, true.T)):
        has = t.any(1)
        right = int(t[torch.arange(len(d)), d.argmin(1)][has].sum())
        other = scipy.stats.binomtest(right, int(has.sum())).proportion_ci(method="wilson")
        assert f"{other.low:.1%} to {other.high:.1%} (95%), {int(has.sum())} queries" in page


def test_what_users_wrote_cannot_become_markup():
    data = scene()
    kinds = [EVIL if i % 2 else "plain" for i in range(data.texts.n)]
    bad = {"captions": [EVIL] * data.texts.n, "text_kinds": kinds, "notes": [EVIL]}
    bad |= {"image_names": [f"{EVIL}{i}" for i in range(data.images.n)]}
    bad |= dict.fromkeys(("model", "split", "recipe", "version"), EVIL)
    checked = Checker(undrawn_report(scene(**bad)).html)
    assert sum(EVIL in text for text in checked.text) > 20
    gone = undrawn_report(scene(thumbnail=lambda i: None, image_names=[EVIL] * data.images.n)).html
    assert "img" not in Checker(gone).tags


def test_mistakes_and_calibration_are_as_loops_count_them():
    data = scene(seed=3)
    distance = csd_matrix(data.images, data.texts)
    report, ground_truth = undrawn_report(data), truth(data)
    for key, d, t in (("i2t", distance, ground_truth), ("t2i", distance.T, ground_truth.T)):
        judged = [i for i in range(len(d)) if t[i].any()]
        wrong = [d[i].min() for i in judged if not t[i, d[i].argmin()]]
        plausible = sum(float(match_probability(x, *data.logits)) >= 0.5 for x in wrong)
        assert report.mistakes[key] == {"n": len(judged), "wrong": len(wrong), "plausible": plausible}
        assert 0 < len(wrong) < len(judged)
    assert report.mistakes["i2t"]["n"] == data.images.n - 1 and report.mistakes["t2i"]["n"] == data.texts.n - 1
    data = scene(seed=1)
    distance = csd_matrix(data.images, data.texts).double()
    found, ground_truth = undrawn_report(data).calibration, truth(data).double()
    has = data.relevance.counts > 0
    first = distance.argmin(1)
    sets = {"pairs": (distance.flatten(), ground_truth.flatten())}
    sets["i2t"] = distance.amin(1)[has], ground_truth[torch.arange(len(first)), first][has]
    for key, (d, match) in sets.items():
        assert found[key]["n"] == len(d) and found[key]["matches"] == pytest.approx(match.mean().item())
        for version, logits in (("before", data.learnt_logits), ("after", data.logits)):
            p = match_probability(d, *logits)
            error = expected_calibration_error(p, match, n_bins=15)
            assert found[key][version]["ece"] == pytest.approx(error, abs=1e-6)
            assert found[key][version]["brier"] == pytest.approx((p - match).square().mean().item(), abs=1e-6)
    assert "before" not in undrawn_report(scene(learnt_logits=None)).calibration["pairs"]
    alone = undrawn_report(scene(calibration=None, learnt_logits=None))
    assert set(alone.calibration["pairs"]) == {"n", "matches", "before"}
    assert "not calibrated on held-out pairs" in alone.html


def test_the_most_uncertain_come_with_what_they_retrieved():
    texts = scene().texts
    log_var = texts.log_var.clone()
    log_var[7] = torch.tensor([3.0, -6.0, -6.0, -6.0, -6.0])  # The largest total variance, and no large volume.
    captions = [f"text number {i:03d}." for i in range(29)]
    data = scene(captions=captions, texts=GaussianEmbedding(texts.mean, log_var))
    page = undrawn_report(data).html
    part = page[page.index('id="extremes"') : page.index('id="mistakes"')]
    most = int(data.texts.total_variance.argmax())
    assert most == 7
    start = part.index(f"“text number {most:03d}.”", part.index("Texts it is least certain of"))
    card = part[start : part.index("</section>", start)]
    d = csd_matrix(data.images, data.texts)[:, most]
    order = d.argsort(stable=True)[:5].tolist()
    assert [int(i) for i in re.findall(r'alt="image picture-(\d+)\.png', card)] == order
    expected = match_probability(d, *data.logits).sum().item()
    assert f"total variance <b>{float(data.texts.total_variance[most]):.3g}</b>" in card
    assert (f"{expected:.1f}" if expected < 10 else f"{expected:.0f}") + " matches expected" in card
    ground_truth = data.relevance.to_dense()[:, most] > 0
    right = sum(ground_truth[i] for i in order)
    assert (card.count(">right<"), card.count(">wrong<")) == (right, 5 - right)


def test_words_about_the_uncertainty_follow_its_sign_and_few_points_or_a_perfect_model():
    data = scene(n=40, m=300, seed=5)
    right = truth(data).T[torch.arange(300), csd_matrix(data.images, data.texts).argmin(0)]
    sizes = torch.where(right, -12.0, -10.0) + 0.01 * torch.arange(300) / 300
    for sign, words in ((1, "fail clearly more often"), (-1, "fail clearly less often")):
        log_var = (sizes if sign > 0 else -22 - sizes)[:, None].expand(300, 5)
        page = undrawn_report(scene(n=40, m=300, seed=5, texts=GaussianEmbedding(data.texts.mean, log_var))).html
        assert f"Texts with a larger total variance {words}" in page
    chance = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)) - 10
    page = undrawn_report(scene(n=40, m=300, seed=5, texts=GaussianEmbedding(data.texts.mean, chance))).html
    assert "Total variance does not show which texts fail" in page
    data = scene()
    points = {side: GaussianEmbedding.point(getattr(data, side).mean) for side in ("images", "texts")}
    page = undrawn_report(scene(**points)).html
    Checker(page)
    assert "there is no uncertainty to look at" in page and 'id="extremes"' not in page
    mean = torch.eye(3, 4)
    perfect = {"captions": ["one", "two", "three"], "image_names": ["a", "b", "c"]}
    perfect["images"] = GaussianEmbedding(mean, torch.full((3, 4), -6.0) + mean)
    perfect["texts"] = GaussianEmbedding(mean, torch.full((3, 4), -5.0) - mean * torch.arange(3)[:, None])
    perfect["relevance"] = Relevance.from_lists([[0], [1], [2]], n_gallery=3)
    page = undrawn_report(scene(**perfect)).html
    Checker(page)
    assert page.count("Every first result is right.") == 2
    # It does not grow with the data.
    page = undrawn_report(scene(n=60, m=900, captions=["a very long caption " * 200] * 900)).html
    assert len(Checker(page).alts) <= 4 * SHOWN * RESULTS + 6 * MISTAKES and len(page) < 400_000
    assert page.count("found first") <= 2 * MISTAKES


def test_the_probabilities_of_results_are_those_of_searches():
    data = scene(n=150, m=600)
    images, texts = [f"i{k}" for k in range(150)], [f"t{k}" for k in range(600)]
    dense = data.relevance.to_dense() > 0
    given = tuple(images), (bytes,) * 150, tuple(texts), tuple(texts), ("caption",) * 600
    split = PairData(*given, np.argwhere(dense))
    calibration = calibrate_split((data.images, data.texts), split, "csd", split="val")
    logits = calibration.logit_scale, calibration.logit_bias
    data = replace(data, calibration=calibration, logits=logits)
    found = undrawn_report(data).calibration
    sides = ("t2i", data.texts, data.images, dense.T), ("i2t", data.images, data.texts, dense)
    for direction, queries, gallery, match in sides:
        names = [str(i) for i in range(gallery.n)]
        index = GaussianIndex.build(gallery, names, calibration=calibration, direction=direction)
        hits = [(query, found[0]) for query, found in enumerate(index.search(queries, k=1)) if match[query].any()]
        right = torch.tensor([float(match[query, int(hit.id)]) for query, hit in hits])
        p = torch.tensor([hit.match_probability for _, hit in hits])
        by_distance = match_probability(torch.tensor([hit.distance for _, hit in hits]), *logits)
        brier = found[direction]["after"]["brier"]
        assert brier == pytest.approx(float((p - right).square().mean()), abs=1e-6)
        assert brier < float((by_distance - right).square().mean()) - 0.005


def test_a_wide_table_is_continued_below_and_no_value_is_cut(capsys):
    rows = [[f"row{r}", *(f"{r}{k} [{r}.{k}01, {r}.{k}99]" for k in range(7))] for r in range(3)]
    print_table("a title", ["estimator", *(f"figure number {k}" for k in range(7))], rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and out.startswith("a title\n")
    for row in rows:
        assert all(out.count(value) == 1 for value in row[1:])
        assert out.count(row[0]) == out.count("estimator") > 1
    print_table("", ["name", "value"], [["a", "x" * 100]])
    assert "x" * 100 in capsys.readouterr().out
    words = [f"word{k}" for k in range(60)]
    print_table("", ["name", "n", "words"], [["a", "1", " ".join(words)]], running=[2])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and [w for w in out.split() if w.startswith("word")][1:] == words


@pytest.mark.parametrize("indent", [0, 4])
def test_paragraphs_are_wrapped_and_paths_stay_whole(indent, capsys):
    path = "/a" * 60
    print_wrapped(f"  written to {path} with some more words that do not fit into the line, whatever they say", indent)
    lines = capsys.readouterr().out.splitlines()
    assert path in [line.strip() for line in lines]
    assert lines[0].startswith("  w") and lines[-1].startswith(" " * indent + lines[-1].strip()[0])


CHANCE = 0.01
HITS = HitFigures("t2i", 100, 1, 1000, CHANCE, CHANCE, 0.004, 0.005, 0.01, 0.06, 0.06, 0.0, 0.5)
LEVELS = {"true": 0.234, "perfect": 0.41, "chance": 0.0123, "predicted": 0.305}
PRECISION = {name: Interval(value, value - 0.02, value + 0.02) for name, value in LEVELS.items()}
DIRECTION = DirectionTrust(
    n_queries=1000, n_gallery=100, recall=Interval(0.4, 0.37, 0.43), chance=CHANCE, above_chance=True,
    risk_best=Interval(0.3, 0.2, 0.4), right_pairs=Interval(0.9, 0.8, 0.95), n_out_of_gallery=0, estimators={},
    deciles={}, precision=PRECISION,
)  # fmt: skip
REPORT = TrustReport("test", "csd", True, 100, 1000, 1000, 0.95, 0, {}, {}, [], {"served": [HITS], "distance": [HITS]})


def said(capsys, **changes):
    print_trust_summary(replace(REPORT, directions={"t2i": replace(DIRECTION, **changes)}), "runs/a on test")
    return folded(capsys.readouterr().out)


def test_probabilities_that_hold_are_to_be_shown_and_a_model_at_chance_gets_no_advice_at_all(capsys):
    assert HITS.verdict == "holds"
    words = said(capsys)
    assert "; show it; it holds for queries" in words and "at chance" not in words
    assert "it holds" in said(capsys, recall=Interval(0.4, None, None)), "without resamples the value decides"
    words = said(capsys, above_chance=False, recall=Interval(0.01, 0.005, 0.015))
    assert "rely on nothing: the model does not rank better than chance here" in words
    assert "show it" not in words


@pytest.mark.parametrize("recall", [Interval(0.012, 0.008, 0.016), Interval(0.01, None, None), Interval(0.0, 0.0, 0.0)])
def test_first_hits_at_chance_are_named_instead_of_show_it(capsys, recall):
    words = said(capsys, recall=recall)
    assert "do not show it; the first hits are at chance" in words and "it holds" not in words
    assert "rely on nothing" not in words


def test_the_precision_at_10_and_what_foresees_it_best_are_said_where_logits_are_calibrated(capsys):
    spearman = {"margin": Interval(0.3, 0.2, 0.4), "text_misses": Interval(0.5, 0.4, 0.6)}
    estimators = {name: {"misses": interval} for name, interval in spearman.items()}
    words = said(capsys, estimators=estimators)
    assert "precision at 10: .23 [.21, .25] (chance .01); .30 predicted, .41 in a perfect order" in words
    assert "to foresee the precision at 10: text misses (Spearman .50 [.40, .60])" in words
    one_match = PRECISION | {"perfect": Interval(sum([0.1] * 12) / 12, 0.1, 0.1)}
    for precision in (one_match, {"true": PRECISION["true"], "perfect": PRECISION["perfect"]}, {}):
        assert "precision at 10" not in said(capsys, precision=precision)
    print_trust_summary(replace(REPORT, calibrated=False, directions={"t2i": DIRECTION}), "runs/a on test")
    assert "precision at 10" not in folded(capsys.readouterr().out)


def test_a_chart_is_one_element_without_references_to_elsewhere():
    chart = Chart(f"label {EVIL}")
    (line,) = chart.axes.plot([0, 1], [0.0996, 0.0984], "o-", color=FIRST, label="a $x$ < b")
    chart.hover(line, f"title {EVIL}")
    chart.axes.set_xlabel(EVIL)
    chart.legend()
    svg = chart.svg()
    root = ET.fromstring(str(svg).replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1))
    assert root.tag == "svg" and root.attrib["aria-label"] == f"label {EVIL}" and root.attrib["role"] == "img"
    assert not re.search(r"https?://|url\(|@import|<style|<script|<!DOCTYPE", svg)
    texts = [e.text for e in root.iter("text")]
    assert EVIL in texts and "a $x$ < b" in texts
    assert "0.0996" in texts or "0.0995" in texts, "ticks keep their digits"
    assert [e.text for e in root.iter("title")] == [f"title {EVIL}"]
    assert f"stroke: var(--sure, {FIRST})" in svg and f"var(--ink, {INK})" in svg and chart.svg() == svg
    ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
    link = "{http://www.w3.org/1999/xlink}href"
    assert {e.attrib[link][1:] for e in root.iter("use")} <= ids
