"""One page about how a model finds: figures, uncertainty, calibration, and what it retrieved, as self-contained HTML.

It knows embeddings, the truth, captions, and pictures as functions that return the bytes of a file; nothing of models, recipes or
where pictures lie. Everything that is shown is bounded in number, so that the page's size does not grow with the data.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np
import torch
from torch import Tensor

from sfumato.direction import Direction
from sfumato.distances import Distance, get_distance
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval, table_rows
from sfumato.evaluation.trust_report import FIGURES
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_probability
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import brier_score, expected_calibration_error, reliability_curve, wilson_interval
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.reports.analysis_views import analysis_views
from sfumato.reports.drawing import Axes, clipped, data_address, log_ticks, round_steps, round_top, signed
from sfumato.search.exact import distance_blocks, rank_relevant, top_k

SHOWN = 4
"""Most and least uncertain queries of each side that are shown."""

HITS = 5
"""Results shown of each of them."""

MISTAKES = 6
"""Wrong but plausible results shown in each direction."""

PICTURES = 4 * SHOWN * HITS + 6 * MISTAKES
"""No page holds more pictures than this."""

_PAIRS = 4_000_000
_BINS = 10
_QUANTILES = (("least", 0.0), ("tenth", 0.1), ("median", 0.5), ("nine tenths", 0.9), ("most", 1.0))
_METRICS = ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")
_NAMES = {"i2t": "image → text", "t2i": "text → image"}


@dataclass(frozen=True, eq=False)
class ReportData:
    """What a page is made of.

    Attributes:
        model, split: names for the title.
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        relevance: image -> true texts.
        distance: the model's; what is ranked by.
        logits: (scale, bias) of the match probabilities.
        calibrated: whether these were fitted on held-out pairs.
        learnt_logits: (scale, bias) that the loss has learnt in training, to compare with; None if there are none.
        captions: (m,) the texts.
        text_kinds: (m,) kinds for a breakdown; None for none.
        picture_names: (n,) ids of the pictures.
        picture: the bytes of a small WebP, PNG or JPEG file of the picture at a position; None where it cannot be read.
        others: evaluations of the same split by other distances, as :meth:`Evaluation.to_json` gives them.
        trust: what estimators of uncertainty are worth, as `sfumato trust` writes it.
        analyses: by name, what studies found, as `sfumato analyse` writes it.
        analysis_picture: the bytes of a picture that a study names; None where it is gone.
        recipe: the text of the recipe.
        log: of training, one dictionary for each epoch.
        notes: sentences about what was left out.
        version: of the program that made the page.
    """

    model: str
    split: str
    images: GaussianEmbedding
    texts: GaussianEmbedding
    relevance: Relevance
    distance: str
    logits: tuple[float, float]
    calibrated: bool
    captions: Sequence[str]
    picture_names: Sequence[str]
    picture: Callable[[int], bytes | None]
    learnt_logits: tuple[float, float] | None = None
    text_kinds: Sequence[str] | None = None
    others: Sequence[Mapping[str, Any]] = ()
    trust: Mapping[str, Any] | None = None
    analyses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    analysis_picture: Callable[[str], bytes | None] = lambda name: None
    recipe: str = ""
    log: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    version: str = ""

    def __post_init__(self) -> None:
        for name, side, n in (
            ("captions", "texts", self.texts.n),
            ("picture_names", "images", self.images.n),
            *((("text_kinds", "texts", self.texts.n),) if self.text_kinds is not None else ()),
        ):
            if len(getattr(self, name)) != n:
                raise ValueError(f"ReportData: got {len(getattr(self, name))} {name} for {n} {side}; give one for each")


@dataclass(frozen=True)
class Report:
    """A page and its main figures.

    Attributes:
        html: the page; it asks for no other file.
        evaluation: of both directions by the model's own distance.
        calibration: of all pairs ("pairs") and of each query's first hit ("i2t", "t2i"): "n", "matches" (share that is
            right) and, before and after calibration, "ece" and "brier".
        mistakes: by direction, "n" queries, those whose first hit is "wrong", and those of them with a match probability of at
            least one half, "plausible".
    """

    html: str
    evaluation: Evaluation
    calibration: dict[str, dict[str, Any]]
    mistakes: dict[str, dict[str, int]]

    def to_json(self) -> dict[str, Any]:
        """The figures as plain numbers, lists and dictionaries; without the page."""
        return {
            "evaluation": self.evaluation.to_json(),
            "calibration": self.calibration,
            "mistakes": self.mistakes,
        }


@dataclass(frozen=True, eq=False)
class _Direction:
    """What was found in one direction.

    Attributes:
        key: "i2t" or "t2i".
        queries, gallery: embeddings.
        truth: query -> true gallery items.
        ranks: (p,) of the true items.
        hits, distances: (n, HITS) positions and distances of the closest.
    """

    key: Direction
    queries: GaussianEmbedding
    gallery: GaussianEmbedding
    ground_truth: Relevance
    ranks: np.ndarray
    hits: np.ndarray
    distances: Tensor

    def true_items(self, query: int) -> np.ndarray:
        """Positions of a query's true items, the best-ranked first."""
        start, stop = self.ground_truth.indptr[query : query + 2]
        items: np.ndarray = self.ground_truth.indices[start:stop][np.argsort(self.ranks[start:stop], kind="stable")]
        return items

    @property
    def first_is_right(self) -> np.ndarray:
        """(n,) 1 where the first hit is true, 0 where not, NaN for queries without a true item."""
        return per_query_metrics(self.ranks, self.ground_truth)["recall@1"]


def make_report(data: ReportData) -> Report:
    """Evaluate, and write the page.

    Args:
        data: embeddings, truth, captions and pictures.

    Returns:
        The page and its figures.

    Raises:
        ValueError: sizes do not fit, or nothing matches.
    """
    found: dict[str, np.ndarray] = {}

    def rank(
        queries: GaussianEmbedding,
        gallery: GaussianEmbedding,
        relevance: Relevance,
        distance: str | Distance,
    ) -> np.ndarray:
        """Ranks of all true items; those of the two whole directions are kept."""
        ranks = rank_relevant(queries, gallery, relevance, distance)
        return found.setdefault(get_distance(distance).direction, ranks) if len(found) < 2 else ranks

    evaluation = evaluate_retrieval(
        data.images,
        data.texts,
        data.relevance,
        distance=data.distance,
        text_kinds=data.text_kinds,
        rank=rank,
    )
    directions = [
        _direction("i2t", data.images, data.texts, data.relevance, found["i2t"], data.distance),
        _direction("t2i", data.texts, data.images, data.relevance.transpose(), found["t2i"], data.distance),
    ]
    calibration, panels = _calibration(data, directions)
    mistakes, shown_mistakes = _mistakes(data, directions)
    pictures = _Pictures(data)
    points = evaluation.uncertainty is None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sfumato.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    html = environment.get_template("report.html.j2").render(
        data=data,
        evaluation=evaluation,
        points=points,
        calibrated=data.calibrated,
        headline=[_recall(direction) for direction in directions],
        summary=_summary(evaluation, calibration, mistakes, directions),
        tables=_tables(evaluation, data.others),
        deciles=[] if points else [_deciles(direction, evaluation) for direction in directions],
        histogram=None if points else _histogram(data),
        correlation=evaluation.multiplicity,
        calibration=calibration,
        calibration_panels=panels,
        extremes=[] if points else _extremes(data, directions, pictures),
        mistakes=mistakes,
        shown_mistakes=[
            {"key": key, "name": _NAMES[key], "rows": [_shown_mistake(data, pictures, key, m) for m in rows]}
            for key, rows in shown_mistakes.items()
        ],
        trust=_trust(data.trust),
        analyses=analysis_views(data.analyses, data.analysis_picture),
        curves=_curves(data.log),
        signed=signed,
    )
    return Report(html, evaluation, calibration, mistakes)


def _direction(
    key: Direction,
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    ground_truth: Relevance,
    ranks: np.ndarray,
    distance: str,
) -> _Direction:
    distances, hits = top_k(queries, gallery, HITS, get_distance(distance).for_direction(key))
    return _Direction(key, queries, gallery, ground_truth, ranks, hits.cpu().numpy(), distances.cpu())


# Figures and tables


def _recall(direction: _Direction) -> dict[str, str]:
    right = direction.first_is_right
    right = right[~np.isnan(right)]
    low, high = wilson_interval(float(right.mean()), len(right))
    return {
        "name": _NAMES[direction.key],
        "recall": f"{right.mean():.1%}",
        "interval": f"{low:.1%} to {high:.1%}",
        "n": f"{len(right):,}",
    }


def _summary(
    evaluation: Evaluation,
    calibration: Mapping[str, Mapping[str, Any]],
    mistakes: Mapping[str, Mapping[str, int]],
    directions: Sequence[_Direction],
) -> list[str]:
    """A few sentences that follow from the figures alone."""
    said = []
    for direction in directions:
        key, metrics = direction.key, getattr(evaluation, direction.key)
        chance = float(np.mean(direction.ground_truth.counts[direction.ground_truth.counts > 0])) / max(
            direction.gallery.n, 1
        )
        side, other = ("pictures", "texts") if key == "i2t" else ("texts", "pictures")
        said.append(
            f"{metrics['recall@1']:.1%} of {metrics['n_queries']:,} {side} have a true match as their first hit among"
            f" {direction.gallery.n:,} {other} (a blind guess: {chance:.2%}), {metrics['recall@10']:.1%} within the first ten."
        )
    for direction in directions:
        if evaluation.uncertainty is not None:
            said.append(_worth(direction, evaluation.uncertainty[direction.key]["spearman"]))
    version = "after" if "after" in calibration["pairs"] else "before"
    which = "Calibrated match probabilities" if version == "after" else "Match probabilities as the loss learnt them"
    gaps = [f"{calibration[d.key][version]['ece']:.1%} ({_NAMES[d.key]})" for d in directions]
    said.append(f"{which} of first hits are off by {' and '.join(gaps)} on average.")
    plausible = sum(m["plausible"] for m in mistakes.values())
    wrong = sum(m["wrong"] for m in mistakes.values())
    if wrong:
        said.append(
            f"Of {wrong:,} wrong first hits, {plausible:,} came with a match probability of one half or more;"
            " the most probable ones are shown below."
        )
    return said


def _worth(direction: _Direction, correlation: float | None) -> str:
    """What the correlation of total variance and success says, in words; two standard errors decide."""
    side = "pictures" if direction.key == "i2t" else "texts"
    if correlation is None:
        return f"Every one of the {side} fares alike, so their total variance cannot tell which fail."
    n = int((direction.ground_truth.totals > 0).sum())
    number = f"Spearman {signed(correlation)} over {n:,} {side}"
    if abs(correlation) < 2 / math.sqrt(max(n, 1)):
        return f"Total variance says next to nothing about which {side} fail ({number}, within chance)."
    strength = "clearly" if abs(correlation) > 0.2 else "slightly"
    if correlation < 0:
        return f"{side.capitalize()} with a larger total variance fail {strength} more often, as an uncertainty should ({number})."
    return (
        f"{side.capitalize()} with a larger total variance fail {strength} less often here ({number}): do not read it as a"
        " doubt about the result."
    )


def _tables(evaluation: Evaluation, others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [_table_row(name.replace("->", "→"), metrics) for name, metrics in table_rows(evaluation)]
    compared = []
    for result in [evaluation.to_json(), *others]:
        i2t, t2i, rsum = result.get("i2t"), result.get("t2i"), result.get("rsum")
        if isinstance(i2t, Mapping) and isinstance(t2i, Mapping):
            compared.append(
                {
                    "name": str(result.get("distance", "?")),
                    "own": result.get("distance") == evaluation.distance,
                    "cells": [_share(side.get(m)) for side in (i2t, t2i) for m in ("recall@1", "recall@10", "map@r")]
                    + [f"{100 * rsum:.1f}" if isinstance(rsum, int | float) else "–"],
                }
            )
    return {"own": own, "compared": compared if len(compared) > 1 else []}


def _table_row(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    rank, n = metrics.get("median_rank"), metrics.get("n_queries")
    return {
        "name": name,
        "cells": [_share(metrics.get(m)) for m in _METRICS]
        + ["–" if rank is None else f"{rank:g}", "–" if n is None else f"{n:,}"],
    }


def _deciles(direction: _Direction, evaluation: Evaluation) -> dict[str, Any]:
    assert evaluation.uncertainty is not None
    found = evaluation.uncertainty[direction.key]
    bins = [b | dict(zip(("low", "high"), wilson_interval(b["recall"], b["count"]), strict=True))
            for b in found["bins"]]  # fmt: skip
    axes = Axes((0.5, len(bins) + 0.5), (0.0, round_top(max(b["high"] for b in bins))))
    chart = axes.chart(
        x_ticks=[(i + 1, str(i + 1)) for i in range(len(bins))],
        y_ticks=[(v, f"{v:.0%}") for v in axes.y_steps()],
        x_label="tenth of the queries: most certain → least certain",
        y_label="recall@1",
        label=f"Recall at 1 by tenth of uncertainty, {_NAMES[direction.key]}: "
        + ", ".join(f"{b['recall']:.0%}" for b in bins),
    )
    width = 0.72 * (axes.x(2) - axes.x(1)) if len(bins) > 1 else 60
    for i, b in enumerate(bins, 1):
        title = f"tenth {i}: recall@1 {b['recall']:.1%} ({b['low']:.1%} to {b['high']:.1%}), {b['count']} queries, mean total variance {b['uncertainty']:.3g}"
        chart["bars"].append(axes.bar(i, b["recall"], width, "a", title))
        chart["whiskers"].append(axes.whisker(i, b["low"], b["high"]))
    counts = sorted({b["count"] for b in bins})
    return {
        "name": _NAMES[direction.key],
        "chart": chart,
        "counts": f"n = {counts[0]:,}" if len(counts) == 1 else f"n = {counts[0]:,} to {counts[-1]:,}",
        "correlation": signed(found["correlation"]),
        "spearman": signed(found["spearman"]),
        "rows": [
            [str(i), f"{b['uncertainty']:.3g}", f"{b['count']:,}", f"{b['recall']:.1%}", f"{b['low']:.1%} to {b['high']:.1%}"]
            for i, b in enumerate(bins, 1)
        ],
    }  # fmt: skip


def _histogram(data: ReportData) -> dict[str, Any]:
    """Both sides over one axis, logarithmic because sides and items differ by factors."""
    variance = {
        "images": data.images.total_variance.double().cpu().numpy(),
        "texts": data.texts.total_variance.double().cpu().numpy(),
    }
    positive = {side: np.log10(v[v > 0]) for side, v in variance.items()}
    joined = np.concatenate(list(positive.values()))
    low, high = joined.min(), joined.max()
    low, high = (low - 0.05, high + 0.05) if high - low < 0.1 else (low, high)
    edges = np.linspace(low, high, 36)
    shares = {side: np.histogram(v, edges)[0] / max(len(variance[side]), 1) for side, v in positive.items()}
    axes = Axes((low, high), (0.0, round_top(max(s.max() for s in shares.values()))))
    chart = axes.chart(
        x_ticks=log_ticks(low, high),
        y_ticks=[(v, f"{v:.0%}") for v in axes.y_steps()],
        x_label="total variance (logarithmic)",
        y_label="share of the items",
        label="Histogram of total variance: "
        + "; ".join(f"{side} median {np.median(v):.3g}" for side, v in variance.items()),
    )
    width = axes.x(float(edges[1])) - axes.x(float(edges[0])) - 0.6
    for side, colour in (("images", "a"), ("texts", "b")):
        for share, left, right in zip(shares[side], edges[:-1], edges[1:], strict=True):
            if share:
                title = f"{side}: {share:.1%} between {10**left:.3g} and {10**right:.3g}"
                chart["bars"].append(axes.bar((left + right) / 2, share, width, colour, title))
    chart["legend"] = [{"colour": "a", "name": "images"}, {"colour": "b", "name": "texts"}]
    both = list(variance.values())
    rows = [["number of items", *(f"{len(v):,}" for v in both)], ["mean", *(f"{v.mean():.3g}" for v in both)]]
    rows += [[name, *(f"{np.quantile(v, q):.3g}" for v in both)] for name, q in _QUANTILES]
    zeros = int(sum((v <= 0).sum() for v in variance.values()))
    return {"chart": chart, "rows": rows, "zeros": zeros}


# Calibration


def _calibration(
    data: ReportData, directions: Sequence[_Direction]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Figures and plots, of all pairs and of first hits."""
    n, m = data.images.n, data.texts.n
    chosen = np.sort(np.random.default_rng(0).permutation(n)[: max(1, _PAIRS // max(m, 1))])
    part = data.images[torch.from_numpy(chosen).to(data.images.device)]
    sets = {
        "pairs": (
            torch.cat([block.cpu() for _, block in distance_blocks(part, data.texts, data.distance)]).flatten(),
            torch.from_numpy(np.asarray(data.relevance.select_queries(chosen).to_dense())).flatten(),
        )
    }
    names = {"pairs": "every pair of a picture and a text"}
    for direction in directions:
        right = direction.first_is_right
        has = ~np.isnan(right)
        sets[direction.key] = direction.distances[torch.from_numpy(has), 0], torch.from_numpy(right[has])
        names[direction.key] = f"first hits, {_NAMES[direction.key]}"
    versions = {} if data.learnt_logits is None and data.calibrated else {"before": data.learnt_logits or data.logits}
    versions |= {"after": data.logits} if data.calibrated else {}
    figures: dict[str, dict[str, Any]] = {}
    panels = []
    for key, (distance, match) in sets.items():
        figures[key] = {"n": len(match), "matches": float(match.double().mean())}
        curves = {}
        for version, logits in versions.items():
            probability = match_probability(distance.double(), *logits)
            curves[version] = reliability_curve(probability, match, n_bins=_BINS)
            figures[key][version] = {
                "ece": expected_calibration_error(probability, match, n_bins=_BINS),
                "brier": brier_score(probability, match),
            }
        panels.append(
            {"key": key, "name": names[key], "chart": _reliability(curves, names[key]), "rows": _bin_rows(curves)}
        )
    return figures, panels


def _reliability(curves: Mapping[str, list[dict[str, Any]]], name: str) -> dict[str, Any]:
    axes = Axes((0.0, 1.0), (0.0, 1.0))
    ticks = [(v, f"{v:.0%}") for v in (0, 0.25, 0.5, 0.75, 1)]
    chart = axes.chart(
        x_ticks=ticks,
        y_ticks=ticks,
        x_label="match probability said",
        y_label="share that matches",
        label=f"Reliability of {name}: "
        + "; ".join(
            f"{version} calibration "
            + ", ".join(f"said {b['probability']:.0%} found {b['observed']:.0%}" for b in curve)
            for version, curve in curves.items()
        ),
    )
    chart["diagonal"] = [axes.x(0), axes.y(0), axes.x(1), axes.y(1)]
    most = max(b["count"] for curve in curves.values() for b in curve)
    for version, curve in curves.items():
        colour = "b" if version == "before" else "a"
        chart["lines"].append(axes.line([(b["probability"], b["observed"]) for b in curve], colour))
        for b in curve:
            low, high = wilson_interval(b["observed"], b["count"])
            whisker = axes.whisker(b["probability"], low, high)
            chart["whiskers"].append(whisker | {"colour": colour})
            radius = 2.5 + 4 * math.log1p(b["count"]) / math.log1p(most)
            title = f"{version} calibration: said {b['probability']:.1%}, found {b['observed']:.1%} ({low:.1%} to {high:.1%}) of {b['count']:,}"
            chart["dots"].append(axes.dot(b["probability"], b["observed"], radius, colour, title))
        chart["legend"].append({"colour": colour, "name": f"{version} calibration"})
    return chart


def _bin_rows(curves: Mapping[str, list[dict[str, Any]]]) -> list[list[str]]:
    return [
        [version, f"{b['probability']:.1%}", f"{b['observed']:.1%}", f"{b['count']:,}"]
        for version, curve in curves.items()
        for b in curve
    ]


# What was retrieved


class _Pictures:
    """Data addresses of pictures, each read once; those that cannot be read are None."""

    def __init__(self, data: ReportData) -> None:
        self._data, self._read = data, dict[int, str | None]()
        self._true = data.relevance

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position not in self._read:
            content = self._data.picture(position)
            self._read[position] = data_address(content) if content else None
        start, stop = self._true.indptr[position : position + 2]
        captions = [self._data.captions[t] for t in self._true.indices[start : min(stop, start + 1)]]
        name = str(self._data.picture_names[position])
        return {
            "src": self._read[position],
            "name": clipped(name, 60),
            "alt": f"picture {clipped(name, 60)}" + (f": {clipped(captions[0], 120)}" if captions else ""),
        }


def _extremes(data: ReportData, directions: Sequence[_Direction], pictures: _Pictures) -> list[dict[str, Any]]:
    """The most and the least uncertain queries of each side with their results."""
    shown = []
    for direction in directions:
        order = np.argsort(direction.queries.total_variance.cpu().numpy(), kind="stable")
        few = order[: min(SHOWN, len(order) // 2)]
        sides = [("most certain", few), ("least certain", order[::-1][: len(few)])]
        for word, chosen in sides:
            expected = _expected(data, direction, chosen)
            shown.append(
                {
                    "key": direction.key,
                    "word": word,
                    "queries": [
                        _answered(data, direction, pictures, int(q), e) for q, e in zip(chosen, expected, strict=True)
                    ],
                }
            )
    return shown


def _expected(data: ReportData, direction: _Direction, chosen: np.ndarray) -> list[float]:
    """Sum of the match probabilities of some queries over the gallery."""
    queries = direction.queries[torch.from_numpy(chosen.copy()).to(direction.queries.device)]
    blocks = distance_blocks(queries, direction.gallery, get_distance(data.distance).for_direction(direction.key))
    return [e for _, block in blocks for e in match_probability(block, *data.logits).sum(1).tolist()]


def _answered(
    data: ReportData, direction: _Direction, pictures: _Pictures, query: int, expected: float
) -> dict[str, Any]:
    true = direction.true_items(query)
    variance = float(direction.queries.total_variance[query])
    probability = match_probability(direction.distances[query], *data.logits).tolist()
    hits = []
    for item, distance, p in zip(
        direction.hits[query].tolist(), direction.distances[query].tolist(), probability, strict=True
    ):
        shown = pictures[item] if direction.key == "t2i" else {"text": clipped(data.captions[item])}
        hits.append(
            shown | {"true": item in true, "pct": _percent(p), "width": round(100 * p), "distance": f"{distance:#.3g}"}
        )
    best = (
        int(direction.ranks[slice(*direction.ground_truth.indptr[query : query + 2])].min()) + 1 if len(true) else None
    )
    return {
        "picture": pictures[query] if direction.key == "i2t" else None,
        "text": clipped(data.captions[query]) if direction.key == "t2i" else None,
        "kind": _kind(data, query) if direction.key == "t2i" else None,
        "variance": f"{variance:.3g}",
        "expected": f"{expected:.1f}" if expected < 10 else f"{expected:.0f}",
        "true": len(true),
        "rank": None if best is None else f"{best:,}",
        "hits": hits,
    }  # fmt: skip


def _mistakes(
    data: ReportData, directions: Sequence[_Direction]
) -> tuple[dict[str, dict[str, int]], dict[str, list[dict[str, Any]]]]:
    """How many first hits are wrong, and the most probable of them: one for each wrong item."""
    counts: dict[str, dict[str, int]] = {}
    shown: dict[str, list[dict[str, Any]]] = {}
    for direction in directions:
        right = direction.first_is_right
        wrong = np.flatnonzero(right == 0)
        probability = match_probability(direction.distances[:, 0].double(), *data.logits).numpy()
        counts[direction.key] = {
            "n": int((~np.isnan(right)).sum()),
            "wrong": len(wrong),
            "plausible": int((probability[wrong] >= 0.5).sum()),
        }
        # By distance, of which the probability is a falling function: probabilities near 1 round to ties.
        rows: list[dict[str, Any]] = []
        seen: set[int] = set()
        for query in wrong[np.argsort(direction.distances[wrong, 0].numpy(), kind="stable")].tolist():
            item = int(direction.hits[query, 0])
            if item not in seen and direction.ground_truth.counts[query]:
                seen.add(item)
                rows.append(
                    {"query": query, "item": item, "distance": float(direction.distances[query, 0]),
                     "probability": float(probability[query]), **_best_true(data, direction, query)}
                )  # fmt: skip
            if len(rows) == MISTAKES:
                break
        shown[direction.key] = rows
    return counts, shown


def _best_true(data: ReportData, direction: _Direction, query: int) -> dict[str, Any]:
    """The best-ranked true item of a query, its rank and its distance."""
    item = int(direction.true_items(query)[0])
    rank = int(direction.ranks[slice(*direction.ground_truth.indptr[query : query + 2])].min()) + 1
    one = direction.queries[query : query + 1]
    blocks = distance_blocks(one, direction.gallery, get_distance(data.distance).for_direction(direction.key))
    distance = float(next(block for _, block in blocks)[0, item])
    probability = float(match_probability(torch.tensor(distance), *data.logits))
    return {"true": item, "rank": rank, "true_distance": distance, "true_probability": probability}


def _shown_mistake(data: ReportData, pictures: _Pictures, key: str, row: Mapping[str, Any]) -> dict[str, Any]:
    common = {
        "distance": f"{row['distance']:#.3g}",
        "pct": _percent(row["probability"]),
        "width": round(100 * row["probability"]),
        "rank": f"{row['rank']:,}",
        "true_distance": f"{row['true_distance']:#.3g}",
        "true_pct": _percent(row["true_probability"]),
        "true_width": round(100 * row["true_probability"]),
    }
    if key == "t2i":
        return common | {
            "asked": clipped(data.captions[row["query"]]),
            "found": pictures[row["item"]],
            "true": pictures[row["true"]],
        }
    owner = data.relevance.transpose()
    start, stop = owner.indptr[row["item"] : row["item"] + 2]
    return common | {
        "asked": pictures[row["query"]],
        "found": clipped(data.captions[row["item"]]),
        "owner": pictures[int(owner.indices[start])] if stop > start else None,
        "true": clipped(data.captions[row["true"]]),
    }


# Trust and training


def _trust(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Tables of whatever `sfumato trust` wrote; parts of an unknown form are left out."""
    directions = (found or {}).get("directions")
    if found is None or not isinstance(directions, Mapping):
        return None
    about = found.get("estimators")
    tables = []
    for key, direction in directions.items():
        rows = direction.get("estimators") if isinstance(direction, Mapping) else None
        rows = {n: f for n, f in rows.items() if isinstance(f, Mapping)} if isinstance(rows, Mapping) else {}
        columns = list(dict.fromkeys(c for figures in rows.values() for c in figures))
        if not columns:
            continue
        tables.append(
            {
                "name": _NAMES.get(key, str(key)),
                "columns": [{"name": _spelt(c), "about": FIGURES.get(c, "")} for c in columns],
                "rows": [
                    {
                        "name": _spelt(n),
                        "about": _about(about, n),
                        "cells": [_interval(f.get(c)) for c in columns],
                    }
                    for n, f in rows.items()
                ],
                "n": direction.get("n_queries"),
            }
        )
    notes = found.get("notes")
    level = found.get("level")
    return {
        "tables": tables,
        "definitions": [
            {"name": c["name"], "about": c["about"]}
            for c in {c["name"]: c for t in tables for c in (*t["rows"], *t["columns"])}.values()
            if c["about"]
        ],
        "notes": [str(n) for n in notes] if isinstance(notes, list | tuple) else [],
        "level": f"{level:.0%}" if isinstance(level, int | float) else None,
    } if tables else None  # fmt: skip


def _spelt(name: str) -> str:
    return str(name).replace("_", " ").replace("auroc", "AUROC").replace("aurc", "AURC")


def _about(about: Any, name: str) -> str:
    known = about.get(name) if isinstance(about, Mapping) else None
    return str(known.get("estimates", "")) if isinstance(known, Mapping) else ""


def _interval(value: Any) -> dict[str, str]:
    """A number, or {"value", "low", "high"}, as text."""
    if isinstance(value, Mapping):
        low, high = (_plain(value.get(k)) for k in ("low", "high"))
        return {"value": _plain(value.get("value")), "interval": f"{low} to {high}" if "–" not in (low, high) else ""}
    return {"value": _plain(value), "interval": ""}


def _plain(value: Any) -> str:
    return f"{value:.2f}".replace("-", "−") if isinstance(value, int | float) and math.isfinite(value) else "–"


_CURVES: tuple[tuple[str, dict[str, str]], ...] = (
    ("training loss", {"loss": "a"}),
    ("recall@1 on the validation split", {"val/i2t/recall@1": "a", "val/t2i/recall@1": "b"}),
    ("mean total variance in training", {"total_variance/image": "a", "total_variance/text": "b"}),
)
_LINE_NAMES = {
    "loss": "loss",
    "val/i2t/recall@1": "image → text",
    "val/t2i/recall@1": "text → image",
    "total_variance/image": "images",
    "total_variance/text": "texts",
}


def _curves(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Training curves of what the log holds."""
    shown = []
    for name, keys in _CURVES:
        lines = {key: [(float(l["epoch"]) + 1, float(l[key])) for l in log if _number(l, key)] for key in keys}  # noqa: E741
        lines = {key: points for key, points in lines.items() if points}
        values = [v for points in lines.values() for _, v in points]
        if not values or max(values) <= 0:
            continue
        share = "recall" in name
        low = min(0.0, *values) if len(values) > 1 else 0.0
        epochs = [e for points in lines.values() for e, _ in points]
        axes = Axes((min(epochs) - 0.5, max(epochs) + 0.5), (low, round_top(max(values), 1.0 if share else 1e30)))
        chart = axes.chart(
            x_ticks=[(e, f"{e:g}") for e in round_steps(min(epochs), max(epochs), 6) if e == int(e)],
            y_ticks=[(v, f"{v:.0%}" if share else f"{v:.4g}") for v in axes.y_steps()],
            x_label="epoch",
            y_label="",
            label=f"{name} by epoch: "
            + "; ".join(f"{_LINE_NAMES[k]} from {p[0][1]:.3g} to {p[-1][1]:.3g}" for k, p in lines.items()),
        )
        for key, points in lines.items():
            chart["lines"].append(axes.line(points, keys[key]))
            if len(points) <= 20:
                chart["dots"] += [
                    axes.dot(e, v, 3, keys[key], f"epoch {e:g}: {v:.1%}" if share else f"epoch {e:g}: {v:.4g}")
                    for e, v in points
                ]
            chart["legend"].append({"colour": keys[key], "name": _LINE_NAMES[key]})
        shown.append({"name": name, "chart": chart})
    return shown


def _number(line: Mapping[str, Any], key: str) -> bool:
    return all(
        isinstance(line.get(k), int | float) and not isinstance(line.get(k), bool) and math.isfinite(line[k])
        for k in (key, "epoch")
    )


# Words


def _share(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, int | float) else "–"


def _percent(value: float) -> str:
    """Probabilities never round to a certainty that they do not have."""
    if value >= 0.995:
        return ">99%"
    return "<1%" if value < 0.005 else f"{value:.0%}"


def _kind(data: ReportData, text: int) -> str | None:
    """Of a text, where there are several kinds."""
    kinds = data.text_kinds
    return None if kinds is None or len(set(kinds)) < 2 else kinds[text]
