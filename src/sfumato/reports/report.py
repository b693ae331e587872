"""Pages as self-contained HTML: of a model's retrieval (figures, uncertainty, calibration, results), and of an audit.

The first depends on no models, recipes or image folders. Its inputs are embeddings, the ground truth, captions, and a
function that returns the bytes of an image. The number of displayed items is bounded, so that the page's size does not
grow with the data. What the command of the audit prints stands here, too.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sfumato import __version__, ids
from sfumato.charts import data_url, render_page, require_matplotlib
from sfumato.data.images import FileImage, Problems, thumbnail
from sfumato.data.sources import DataConfig
from sfumato.distances import get_distance
from sfumato.distances.distance import Distance
from sfumato.errors import counted
from sfumato.evaluation.pair_scores import NEIGHBOURS
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval, table_rows
from sfumato.files import RECIPE, write_atomically, write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.tiles import MatchingLogits
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import N_BINS, wilson_interval
from sfumato.models.embed import embed_split, load_split
from sfumato.models.model import Model
from sfumato.models.run import Run
from sfumato.reports import report_charts, tables
from sfumato.reports.report_charts import DirectionResult
from sfumato.reports.tables import DIRECTIONS, MISSING, clipped, percent, print_wrapped, probability, signed
from sfumato.search.exact import rank_relevant
from sfumato.workflows.audit import Audit, varied

_METRICS = ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")


@dataclass(frozen=True)
class Report:
    """A page and its main figures."""

    html: str  # the page, which needs no other file
    evaluation: Evaluation  # of both directions by the model's own distance
    calibration: dict[str, dict[str, Any]]
    mistakes: dict[str, dict[str, int]]

    def to_json(self) -> dict[str, Any]:
        """The figures as plain numbers, lists and dictionaries, without the page."""
        return {"evaluation": self.evaluation.to_json(), "calibration": self.calibration, "mistakes": self.mistakes}


def make_report(data: report_charts.ReportData) -> Report:
    """Evaluate, and write the page."""
    require_matplotlib()
    evaluation, directions = _evaluate(data)
    calibration, panels = report_charts.calibration_panels(data, directions)
    thumbnails = report_charts.Thumbnails(data)
    mistakes, shown_mistakes = report_charts.wrong_first_results(directions, thumbnails)
    points = evaluation.uncertainty is None
    deciles = [] if points else [report_charts.recall_by_uncertainty(one, evaluation) for one in directions]
    values = {
        "data": data, "evaluation": evaluation, "points": points, "calibrated": data.calibration is not None,
        "headline": [_recall(direction) for direction in directions], "deciles": deciles, "signed": signed,
        "summary": _summary(evaluation, calibration, mistakes, directions), "correlation": evaluation.multiplicity,
        "rows": [_table_row(name.replace("->", "→"), metrics) for name, metrics in table_rows(evaluation)],
        "histogram": None if points else report_charts.variance_histogram(data), "mistakes": mistakes,
        "calibration": calibration, "calibration_panels": panels, "n_bins": N_BINS,
        "extremes": [] if points else report_charts.uncertain_queries(directions, thumbnails),
        "shown_mistakes": [group | {"name": DIRECTIONS[group["key"]]} for group in shown_mistakes],
    }  # fmt: skip
    return Report(render_page("report.html.j2", values), evaluation, calibration, mistakes)


def _evaluate(data: report_charts.ReportData) -> tuple[Evaluation, list[DirectionResult]]:
    """The evaluation, and both directions with the ranks that it computed."""
    found: dict[str, np.ndarray] = {}

    def rank(
        queries: GaussianEmbedding, gallery: GaussianEmbedding, relevance: Relevance, distance: str | Distance
    ) -> np.ndarray:
        """Ranks of all true items; the ranks of the two complete directions are kept."""
        ranks = rank_relevant(queries, gallery, relevance, distance)
        return found.setdefault(get_distance(distance).direction, ranks) if len(found) < 2 else ranks

    evaluation = evaluate_retrieval(
        data.images, data.texts, data.relevance, distance=data.distance, text_kinds=data.text_kinds, rank=rank
    )
    return evaluation, [report_charts.direction_result(data, d, found[d]) for d in ids.DIRECTIONS]


def _recall(direction: DirectionResult) -> dict[str, str]:
    right = direction.first_is_right
    right = right[~np.isnan(right)]
    low, high = wilson_interval(float(right.mean()), len(right))
    recall, interval = percent(float(right.mean())), f"{low:.1%} to {high:.1%}"
    return {"name": DIRECTIONS[direction.key], "recall": recall, "interval": interval, "n": f"{len(right):,}"}


_Figures = Mapping[str, Mapping[str, Any]]


def _summary(
    evaluation: Evaluation, calibration: _Figures, mistakes: _Figures, directions: Sequence[DirectionResult]
) -> list[str]:
    """A short summary in sentences, derived from the figures."""
    sentences = []
    for direction in directions:
        metrics, counts = getattr(evaluation, direction.key), direction.ground_truth.counts
        chance = float(np.mean(counts[counts > 0])) / max(direction.gallery.n, 1)
        side, other = ("images", "texts") if direction.key == "i2t" else ("texts", "images")
        first = f"{metrics['recall@1']:.1%} of {metrics['n_queries']:,} {side} have a true match as their first result"
        among = f"among {direction.gallery.n:,} {other} (chance: {chance:.2%})"
        sentences.append(f"{first} {among}, {metrics['recall@10']:.1%} within the first ten.")
    for direction in directions:
        if evaluation.uncertainty is not None:
            sentences.append(_meaning_of_variance(direction, evaluation))
    version = "after" if "after" in calibration["pairs"] else "before"
    which = "Calibrated match probabilities" if version == "after" else "Match probabilities without calibration"
    gaps = []
    for d in directions:
        own = calibration[d.key][version]
        gaps.append(f"{own['ece']:.1%} ({DIRECTIONS[d.key]}; perfect probabilities: {own['ece_of_perfect']:.1%})")
    sentences.append(f"{which} are off by {' and '.join(gaps)} on average at first results.")
    plausible = sum(m["plausible"] for m in mistakes.values())
    if wrong := sum(m["wrong"] for m in mistakes.values()):
        found = f"Of {wrong:,} wrong first results, {plausible:,} have a match probability of one half or more"
        sentences.append(f"{found}; the most probable ones are shown below.")
    return sentences


def _meaning_of_variance(direction: DirectionResult, evaluation: Evaluation) -> str:
    """The meaning of the correlation of uncertainty and success in words; the threshold is two standard errors."""
    assert evaluation.uncertainty is not None
    correlation = evaluation.uncertainty[direction.key]["spearman"]
    side = "images" if direction.key == "i2t" else "texts"
    if correlation is None:
        return f"All {side} have the same result, so their total variance cannot show which fail."
    n = int((direction.ground_truth.totals > 0).sum())
    figure = f"Spearman {signed(correlation)} over {n:,} {side}"
    if abs(correlation) < 2 / math.sqrt(max(n, 1)):
        return f"Total variance does not show which {side} fail ({figure}, within chance)."
    strength = "clearly" if abs(correlation) > 0.2 else "slightly"
    start = f"{side.capitalize()} with a larger total variance fail {strength}"
    if correlation < 0:
        return f"{start} more often, as expected of an uncertainty ({figure})."
    return f"{start} less often here ({figure}): do not read total variance as uncertainty about the result."


def _table_row(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    rank, n = metrics.get("median_rank"), metrics.get("n_queries")
    counts = [MISSING if rank is None else f"{rank:g}", MISSING if n is None else f"{n:,}"]
    return {"name": name, "cells": [percent(metrics.get(m)) for m in _METRICS] + counts}


def report_model(loaded: Model, data: DataConfig, split: str, out: Path, *, name: str, run: Run | None) -> Report:
    """Evaluate a model on a split of some data and write a page about it; with a run, its recipe too."""
    problems = Problems()
    prepared = load_split(loaded.model, data, split, problems)
    pairs = prepared.data
    images, texts = (e.to("cpu") for e in embed_split(loaded.model, prepared))
    report = make_report(report_charts.ReportData(
        model=name, split=split, images=images, texts=texts, relevance=pairs.relevance(), distance=loaded.distance,
        logits=(loaded.logit_scale, loaded.logit_bias), calibration=loaded.calibration, captions=pairs.texts,
        image_names=pairs.image_ids, thumbnail=lambda i: thumbnail(pairs.images[i]), text_kinds=pairs.text_kinds,
        learnt_logits=None if run is None else _learnt_logits(run),
        recipe="" if run is None else (run.folder / RECIPE).read_text(encoding="utf-8"),
        notes=_notes(len(problems), loaded.model.image.processor.reads), version=__version__,
    ))  # fmt: skip
    write_atomically(out, report.html)
    return report


def _notes(left_out: int, features: str) -> list[str]:
    notes = [f"{left_out} items could not be used and were left out."] if left_out else []
    return notes + ([f"The images are {features}: there are no image files to show."] if features else [])


def _learnt_logits(run: Run) -> tuple[float, float] | None:
    """Scale and bias of the loss if it learns both; without a bias its scores are not probabilities."""
    logits = getattr(run.loss, "logits", None)
    learns_both = isinstance(logits, MatchingLogits) and logits.logit_bias.requires_grad
    return run.loss.match_logits() if learns_both else None


PAIRS, MISSING_PAIRS, AUDIT_PAGE, AUDIT_FIGURES = "pairs.csv", "missing.csv", "audit.html", "audit.json"

_SHOWN_TEXTS = 4


def write_audit(audit: Audit, folder: Path, top: int, version: str) -> dict[str, Any]:
    """Write all pairs to pairs.csv and missing.csv, and the first of each to the page and audit.json."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs, missing, figures = audit.pair_rows(), audit.missing_rows(), audit.to_json(top)
    sources = zip(audit.data.image_ids, audit.data.images, strict=True)
    files = {name: source.location for name, source in sources if isinstance(source, FileImage)}
    for name, rows in ((PAIRS, pairs), (MISSING_PAIRS, missing)):
        write_atomically(folder / name, _csv([row | {"image_file": files.get(row["image"])} for row in rows]))
    write_atomically(folder / AUDIT_PAGE, _audit_page(audit, figures, version))
    write_json(folder / AUDIT_FIGURES, figures)
    return figures


def print_audit(figures: Mapping[str, Any], shown: int = 5) -> None:
    """Print the figures of an audit."""
    nouns = {"images": "image", "texts": "text", "pairs": "listed pair"}
    sizes = [counted(figures[f"n_{name}"], noun) for name, noun in nouns.items()]
    others = [f"--split {name} ({counted(n, 'image')})" for name, n in figures["other_splits"].items()]
    elsewhere = f". Others are checked with {' or '.join(others)}" if others else ""
    checked = f"the split {figures['split']}: {', '.join(sizes)}, by {figures['distance']} of {figures['model']}"
    print_wrapped(f"checked {checked}{elsewhere}")
    for sentence in wrong_pairs(figures):
        print_wrapped(sentence, indent=2)
    print()
    suspects = figures["pairs"][:shown]
    texts = [[row["image"], clipped(row["text"]), clipped(row["better_text"] or MISSING)] for row in suspects]
    rows = [[_suspicion(row["wrong_probability"]), *own] for row, own in zip(suspects, texts, strict=True)]
    of_all = [row["wrong_probability"] for row in figures["pairs"]]
    if of_all and all(p is not None and p < _UNSUSPICIOUS for p in of_all):
        some = figures["n_pairs"] > len(of_all)
        pairs = f"each of the {counted(len(of_all), 'least certain pair')}" if some else "every listed pair"
        below = f"is wrong with a probability below {_UNSUSPICIOUS:.0%}"
        found = f"nothing is suspicious: {pairs} {below}; {PAIRS} has all pairs, the least certain first"
        print_wrapped(found, indent=2)
    else:
        title = f"the most suspicious listed pairs, by distance minus that of the {NEIGHBOURS} closest unlisted items"
        tables.print_table(title, ["wrong", "image", "text", "closest unlisted text"], rows, left=2, running=(2, 3))
    first = "closest" if all(row["match_probability"] is None for row in figures["missing"]) else "most probable"
    missing = figures["missing"][:shown]
    rows = [[probability(row["match_probability"]), row["image"], clipped(row["text"])] for row in missing]
    print()
    title = f"unlisted pairs that may match, the {first} of {counted(figures['candidates'], 'candidate')}"
    tables.print_table(title, ["match", "image", "text"], rows, left=2, running=(2,))
    for note in figures["notes"]:
        print_wrapped(note)


_VAGUE = 0.5
"""Width of the interval of the fraction of wrong pairs from which the fraction is not stated."""


def wrong_pairs(figures: Mapping[str, Any]) -> list[str]:
    """Sentences on how many listed pairs are wrong; none without a calibration.

    The expected number and the number of pairs that are more likely wrong than right differ: a wrong pair that looks
    nearly right has a small probability, and is expected without being named.
    """
    fraction, n = figures["wrong_share"], figures["n_pairs"]
    if fraction is None:
        return []
    low, high = figures["wrong_share_interval"]
    if high - low > _VAGUE:
        between = f"between {percent(low, 0)} and {percent(high, 0)}"
        return [f"how many are wrong cannot be estimated from these pairs: {between}"]
    suspects = figures["suspects"]
    more = f"{suspects:,} of them {'is' if suspects == 1 else 'are'} more likely wrong than right"
    interval = f"95% interval {percent(low)} to {percent(high)}"
    about = f"about {round(fraction * n):,} of {n:,} are wrong: {percent(fraction)} by their distances ({interval})"
    return [about, more if suspects else "no single pair is more likely wrong than right"]


_UNSUSPICIOUS = 0.01
"""Probability of being wrong below which a pair is not called suspicious."""


def _suspicion(value: float | None) -> str:
    """A probability with the digits that rank small ones; a dash without a calibration."""
    if value is None or value >= _UNSUSPICIOUS:
        return probability(value)
    return f"{value:.2%}" if value >= 1e-4 else "<0.01%"


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    if rows:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file.getvalue()


def _audit_page(audit: Audit, figures: Mapping[str, Any], version: str) -> str:
    data, listed, missing = audit.data, audit.listed, audit.missing
    relevance = data.relevance()
    of_text = relevance.transpose()

    @cache
    def picture(position: int) -> dict[str, Any] | None:
        if position < 0:
            return None
        content = thumbnail(data.images[position])
        return {"src": data_url(content) if content else None, "name": data.image_ids[position]}

    def texts(image: int, but: int) -> list[str]:
        """The other texts that are listed for an image."""
        own = relevance.indices[relevance.indptr[image] : relevance.indptr[image + 1]]
        return [clipped(data.texts[t]) for t in own if t != but][:_SHOWN_TEXTS]

    wrong, unlisted = [], []
    for k, row in zip(varied(listed, len(figures["pairs"])), figures["pairs"], strict=True):
        image, text = int(listed.image[k]), int(listed.text[k])
        beside = {"picture": picture(image), "better": picture(int(listed.better_image[k]))}
        wrong.append(row | beside | {"others": texts(image, text), "percent": probability(row["wrong_probability"])})
    for k, row in zip(varied(missing, len(figures["missing"])), figures["missing"], strict=True):
        image, text = int(missing.image[k]), int(missing.text[k])
        own = of_text.indices[of_text.indptr[text] : of_text.indptr[text + 1]]
        beside = {"picture": picture(image), "better": picture(int(own[0]) if len(own) else -1)}
        unlisted.append(row | beside | {"others": texts(image, text), "percent": probability(row["match_probability"])})
    values = {"figures": figures, "wrong": wrong, "unlisted": unlisted, "version": version}
    values["wrong_pairs"] = wrong_pairs(figures)
    return render_page("audit.html.j2", values)
