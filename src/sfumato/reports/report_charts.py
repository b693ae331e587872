"""The data of a report, its charts, and the retrieved examples that it shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.arrays import as_numpy
from sfumato.calibration.calibrator import Calibration, QueryContext, Scorer
from sfumato.charts import CARD, FAINT, FIRST, INK, SECOND, Chart, data_url, draw_curve
from sfumato.distances import get_distance
from sfumato.evaluation.protocols import Evaluation
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Direction
from sfumato.matching import match_probability
from sfumato.metrics import reliability
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.reports.tables import DIRECTIONS, clipped, digits, percent, probability, signed
from sfumato.search.exact import distance_blocks, top_k

RESULTS = 5
"""Results that are kept of each query."""


@dataclass(frozen=True, eq=False)
class ReportData:
    """The input data of a report page."""

    model: str  # name of the model, for the title
    split: str  # name of the split, for the title
    images: GaussianEmbedding  # (n, d) embeddings
    texts: GaussianEmbedding  # (m, d) embeddings
    relevance: Relevance  # image -> texts that truly match
    distance: str  # name of the model's distance; results are ranked by it
    logits: tuple[float, float]
    calibration: Calibration | None  # of the model, fitted on held-out pairs; None if it is not calibrated
    captions: Sequence[str]  # (m,) the texts
    image_names: Sequence[str]  # (n,) ids of the images
    thumbnail: Callable[[int], bytes | None]
    learnt_logits: tuple[float, float] | None = None
    text_kinds: Sequence[str] | None = None  # (m,) kinds for a breakdown; None for none
    recipe: str = ""  # the text of the run's recipe
    notes: Sequence[str] = ()  # sentences about omitted parts
    version: str = ""  # of the program that makes the page

    def scorer(self, direction: Direction) -> Scorer:
        """What gives the results of one direction their probabilities, as searches do."""
        return Scorer(*self.logits, self.calibration, direction)


@dataclass(frozen=True, eq=False)
class DirectionResult:
    """The search results of one direction."""

    key: Direction  # "i2t" or "t2i"
    queries: GaussianEmbedding  # (n, d) embeddings
    gallery: GaussianEmbedding  # (m, d) embeddings
    ground_truth: Relevance  # query -> gallery items that truly match
    ranks: np.ndarray  # (p,) ranks of these items, from 0
    closest: np.ndarray  # (n, RESULTS) positions of the closest items
    distances: np.ndarray  # (n, RESULTS) their distances
    context: QueryContext  # what their probabilities depend on beside the distance
    probabilities: np.ndarray  # (n, RESULTS) their match probabilities, as a search in this gallery shows them

    def true_items(self, query: int) -> np.ndarray:
        """The true items of a query, the best-ranked first."""
        start, stop = self.ground_truth.indptr[query : query + 2]
        return self.ground_truth.indices[start:stop][np.argsort(self.ranks[start:stop], kind="stable")]

    def best_rank(self, query: int) -> int:
        """The rank of a query's best-ranked true item."""
        return int(self.ranks[slice(*self.ground_truth.indptr[query : query + 2])].min()) + 1

    @property
    def first_is_right(self) -> np.ndarray:
        """(n,) 1 where the first result is true, 0 where not, NaN for queries without a true item."""
        return per_query_metrics(self.ranks, self.ground_truth)["recall@1"]


def direction_result(data: ReportData, direction: Direction, ranks: np.ndarray) -> DirectionResult:
    """Search in one direction. ranks (p,)."""
    queries, gallery = (data.images, data.texts) if direction == "i2t" else (data.texts, data.images)
    ground_truth = data.relevance if direction == "i2t" else data.relevance.transpose()
    scorer = data.scorer(direction)
    nearest = max(RESULTS, scorer.n_nearest)
    distances, closest = top_k(queries, gallery, nearest, get_distance(data.distance).for_direction(direction))
    distances, closest, rows = as_numpy(distances), as_numpy(closest), np.arange(queries.n)
    context = scorer.context(distances, queries, lambda columns: gallery[closest[rows, columns]])
    distances, shown = distances[:, :RESULTS], closest[:, :RESULTS]
    probabilities = scorer.match_probability(distances, gallery.n, context)
    return DirectionResult(direction, queries, gallery, ground_truth, ranks, shown, distances, context, probabilities)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


_PAIRS = 4_000_000

_QUANTILES = (("least", 0.0), ("tenth", 0.1), ("median", 0.5), ("nine tenths", 0.9), ("most", 1.0))


def in_percent(axis: "Axis") -> None:
    """Show the numbers of an axis, fractions, in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1))


def recall_by_uncertainty(direction: DirectionResult, evaluation: Evaluation) -> dict[str, Any]:
    """Recall@1 of the queries in ten parts, from the most to the least certain."""
    assert evaluation.uncertainty is not None
    found = evaluation.uncertainty[direction.key]
    bins, name = found["bins"], DIRECTIONS[direction.key]
    chart = Chart(f"Recall at 1 of ten groups by uncertainty, {name}: " + ", ".join(f"{b['recall']:.0%}" for b in bins))
    rows = []
    intervals = [reliability.wilson_interval(b["recall"], b["count"]) for b in bins]
    draw_recall_bins(chart.axes, [b["recall"] for b in bins], intervals)
    for i, (b, (low, high)) in enumerate(zip(bins, intervals, strict=True), 1):
        between, variance = f"{low:.1%} to {high:.1%}", digits(b["uncertainty"], 3)
        rows.append([str(i), variance, f"{b['count']:,}", percent(b["recall"]), between])
    counts = sorted({b["count"] for b in bins})
    return {
        "name": name, "chart": chart.svg(),
        "counts": f"n = {counts[0]:,}" if len(counts) == 1 else f"n = {counts[0]:,} to {counts[-1]:,}",
        "correlation": signed(found["correlation"]), "spearman": signed(found["spearman"]), "rows": rows,
    }  # fmt: skip


def draw_recall_bins(axes: "Axes", recall: Sequence[float], intervals: Sequence[tuple[float, float]]) -> None:
    """Bars of recall@1, fractions, from the most to the least certain group of queries."""
    places = range(1, len(recall) + 1)
    axes.bar(places, recall, width=0.72, color=FIRST, alpha=0.75)
    middle, half = ([(high + sign * low) / 2 for low, high in intervals] for sign in (1, -1))
    axes.errorbar(places, middle, half, color=INK, linewidth=1.2, linestyle="none")
    axes.set_xticks(places)
    axes.set_ylim(bottom=0)
    in_percent(axes.yaxis)
    axes.set(xlabel="ten groups of queries: most certain → least certain", ylabel="recall@1")


def variance_histogram(data: ReportData) -> dict[str, Any]:
    """Histogram of the total variances of both sides, on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    sides = {"images": data.images, "texts": data.texts}
    variance = {side: e.total_variance.double().cpu().numpy() for side, e in sides.items()}
    shown = {side: v[v > 0] for side, v in variance.items()}
    joined = np.concatenate(list(shown.values()))
    low, high = joined.min(), joined.max()  # Values that hardly differ stand in the middle.
    edges = np.geomspace(*((low, high) if high > 1.26 * low else (low / 1.12, high * 1.12)), 36)
    label = "; ".join(f"{side} median {digits(np.median(v), 3)}" for side, v in variance.items())
    chart = Chart(f"Histogram of total variance: {label}")
    for (side, v), colour, alpha in zip(shown.items(), (FIRST, SECOND), (0.75, 0.6), strict=True):
        fraction = np.histogram(v, edges)[0] / max(len(variance[side]), 1)
        chart.axes.bar(edges[:-1], fraction, np.diff(edges), align="edge", color=colour, alpha=alpha, label=side)
    chart.axes.set_xscale("log")
    chart.axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(4))
    chart.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    chart.axes.minorticks_off()
    in_percent(chart.axes.yaxis)
    chart.axes.set(xlabel="total variance (logarithmic)", ylabel="fraction of the items")
    chart.legend()
    both = list(variance.values())
    rows = [["number of items", *(f"{len(v):,}" for v in both)], ["mean", *(digits(v.mean(), 3) for v in both)]]
    rows += [[name, *(digits(np.quantile(v, q), 3) for v in both)] for name, q in _QUANTILES]
    return {"chart": chart.svg(), "rows": rows, "zeros": int(sum(len(v) for v in both) - len(joined))}


def calibration_panels(
    data: ReportData, directions: Sequence[DirectionResult]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The calibration of match probabilities, over all pairs and over first results."""
    calibrated = data.calibration is not None
    learnt = data.learnt_logits or (None if calibrated else data.logits)
    figures, panels = dict[str, dict[str, Any]](), []
    # All pairs, or a random part of very many, by their distance; and first results, with the probability of the hit.
    n, m = data.images.n, data.texts.n
    chosen = np.sort(np.random.default_rng(0).permutation(n)[: max(1, _PAIRS // max(m, 1))])
    blocks = distance_blocks(data.images[chosen], data.texts, data.distance)
    distance = np.concatenate([as_numpy(block) for _, block in blocks]).ravel()
    match = data.relevance.select_queries(chosen).to_dense().ravel()
    probability = data.scorer("t2i").match_probability(distance, n)
    sets = {"pairs": ("every pair of an image and a text", distance, probability, match)}
    for direction in directions:
        right = direction.first_is_right
        has = ~np.isnan(right)
        first, p = direction.distances[has, 0], direction.probabilities[has, 0]
        sets[direction.key] = (f"first results, {DIRECTIONS[direction.key]}", first, p, right[has])
    for key, (name, distance, fitted, match) in sets.items():
        figures[key] = {"n": len(match), "matches": float(match.mean())}
        versions = {} if learnt is None else {"before": match_probability(distance.astype(np.float64), *learnt)}
        versions |= {"after": fitted.astype(np.float64)} if calibrated else {}
        curves = {}
        for version, p in versions.items():
            # Of all pairs, bins with equally many would all lie near 0.
            curves[version] = reliability.reliability_curve(p, match, binning="width" if key == "pairs" else "count")
            ece, brier = reliability.expected_calibration_error(p, match), reliability.brier_score(p, match)
            figures[key][version] = {"ece": ece, "brier": brier}
            if key != "pairs":
                figures[key][version]["ece_of_perfect"] = reliability.calibration_error_by_chance(p)
        rows = []
        for version, curve in curves.items():
            rows += [[version, percent(b["probability"]), percent(b["observed"]), f"{b['count']:,}"] for b in curve]
        panels.append({"key": key, "name": name, "chart": _reliability_chart(curves, name).svg(), "rows": rows})
    return figures, panels


def _reliability_chart(curves: Mapping[str, list[dict[str, Any]]], name: str) -> Chart:
    said = []
    for version, curve in curves.items():
        pairs = [f"predicted {b['probability']:.0%} observed {b['observed']:.0%}" for b in curve]
        said.append(f"{version} calibration {', '.join(pairs)}")
    chart = Chart(f"Reliability of {name}: {'; '.join(said)}")
    axes = chart.axes
    axes.plot([0, 1], [0, 1], color=FAINT, linestyle=(0, (5, 5)), linewidth=1)
    most = max(b["count"] for curve in curves.values() for b in curve)
    for version, curve in curves.items():
        colour, line, face = (SECOND, (0, (4, 3)), CARD) if version == "before" else (FIRST, "-", FIRST)
        points = [{"x": b["probability"], "value": b["observed"], "low": b["low"], "high": b["high"]} for b in curve]
        dots = draw_curve(axes, points, colour, label=f"{version} calibration", line=line)
        for dot, b in zip(dots, curve, strict=True):
            dot.set(markersize=5 + 8 * np.log1p(b["count"]) / np.log1p(most), markerfacecolor=face)
    for axis in (axes.xaxis, axes.yaxis):
        in_percent(axis)
        axis.set_ticks([0, 0.25, 0.5, 0.75, 1])
    axes.set(xlabel="predicted match probability", ylabel="fraction that matches")
    chart.legend()
    return chart


SHOWN = 4
"""Most and least uncertain queries of each side that are shown."""

MISTAKES = 6
"""Wrong but plausible results shown in each direction."""


class Thumbnails:
    """Small images as data URLs; each image is read once."""

    def __init__(self, data: ReportData) -> None:
        self.data, self._read = data, dict[int, str | None]()

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position not in self._read:
            content = self.data.thumbnail(position)
            self._read[position] = data_url(content) if content else None
        texts = self.data.relevance.indices[slice(*self.data.relevance.indptr[position : position + 2])]
        name = clipped(str(self.data.image_names[position]), 60)
        caption = f": {clipped(self.data.captions[texts[0]], 120)}" if len(texts) else ""
        return {"src": self._read[position], "name": name, "alt": f"image {name}{caption}"}


def uncertain_queries(directions: Sequence[DirectionResult], thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """The most and the least uncertain queries of each side with their results."""
    shown = []
    for direction in directions:
        order = np.argsort(direction.queries.total_variance.cpu().numpy(), kind="stable")
        few = order[: min(SHOWN, len(order) // 2)]
        for word, chosen in (("most certain", few), ("least certain", order[::-1][: len(few)])):
            block, context = _distances(thumbnails.data, direction, chosen), direction.context[chosen]
            p = thumbnails.data.scorer(direction.key).match_probability(block, direction.gallery.n, context)
            expected = zip(chosen.tolist(), p.sum(1).tolist(), strict=True)
            queries = [_query(direction, thumbnails, query, number) for query, number in expected]
            shown.append({"key": direction.key, "word": word, "queries": queries})
    return shown


def _distances(data: ReportData, direction: DirectionResult, chosen: np.ndarray) -> np.ndarray:
    """(q, m) distances of some queries from the gallery."""
    distance = get_distance(data.distance).for_direction(direction.key)
    blocks = distance_blocks(direction.queries[chosen], direction.gallery, distance)
    return np.concatenate([as_numpy(block) for _, block in blocks])


def _query(direction: DirectionResult, thumbnails: Thumbnails, query: int, expected: float) -> dict[str, Any]:
    data, true, of_text = thumbnails.data, direction.true_items(query), direction.key == "t2i"
    found = direction.closest[query], direction.distances[query], direction.probabilities[query]
    results = []
    for item, distance, p in zip(*(values.tolist() for values in found), strict=True):
        shown = thumbnails[item] if of_text else {"text": clipped(data.captions[item])}
        results.append(shown | {"true": item in true, **_match(p, distance)})
    kinds = data.text_kinds
    return {
        "picture": None if of_text else thumbnails[query], "text": clipped(data.captions[query]) if of_text else None,
        "kind": kinds[query] if of_text and kinds is not None and len(set(kinds)) > 1 else None,
        "variance": f"{float(direction.queries[query : query + 1].total_variance):.3g}",
        "expected": f"{expected:.1f}" if expected < 10 else f"{expected:.0f}", "true": len(true),
        "rank": f"{direction.best_rank(query):,}" if len(true) else None, "results": results,
    }  # fmt: skip


def _match(p: float, distance: float) -> dict[str, Any]:
    """Probability and distance of a result, for the template."""
    return {"pct": probability(p), "width": round(100 * p), "distance": f"{distance:#.3g}"}


def wrong_first_results(
    directions: Sequence[DirectionResult], thumbnails: Thumbnails
) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """The counts of wrong first results, and the most probable of them, one for each wrong item."""
    counts, shown = dict[str, dict[str, int]](), []
    for direction in directions:
        right = direction.first_is_right
        wrong = np.flatnonzero(right == 0)
        probabilities, distances = direction.probabilities[:, 0], direction.distances[:, 0]
        plausible = int((probabilities[wrong] >= 0.5).sum())
        counts[direction.key] = {"n": int((~np.isnan(right)).sum()), "wrong": len(wrong), "plausible": plausible}
        rows, seen = list[dict[str, Any]](), set[int]()
        for query in wrong[np.lexsort((distances[wrong], -probabilities[wrong]))].tolist():
            item = int(direction.closest[query, 0])
            if item not in seen and direction.ground_truth.counts[query] and len(rows) < MISTAKES:
                seen.add(item)
                found = _match(float(probabilities[query]), float(distances[query]))
                rows.append(found | _wrong_result(direction, thumbnails, query, item))
        shown.append({"key": direction.key, "rows": rows})
    return counts, shown


def _wrong_result(direction: DirectionResult, thumbnails: Thumbnails, query: int, item: int) -> dict[str, Any]:
    """A query, its wrong first result, and its best-ranked true item with rank, distance and probability."""
    data, true, chosen = thumbnails.data, int(direction.true_items(query)[0]), np.array([query])
    distance, context = float(_distances(data, direction, chosen)[0, true]), direction.context[chosen]
    p = data.scorer(direction.key).match_probability(np.array([[distance]]), direction.gallery.n, context)
    values: dict[str, Any] = {f"true_{key}": value for key, value in _match(float(p[0, 0]), distance).items()}
    values["rank"] = f"{direction.best_rank(query):,}"
    if direction.key == "t2i":
        return values | {"asked": clipped(data.captions[query]), "found": thumbnails[item], "true": thumbnails[true]}
    owners = data.relevance.transpose()
    images = owners.indices[slice(*owners.indptr[item : item + 2])]
    texts = {"found": clipped(data.captions[item]), "true": clipped(data.captions[true])}
    owner = thumbnails[int(images[0])] if len(images) else None
    return values | {"asked": thumbnails[query], "owner": owner, **texts}
