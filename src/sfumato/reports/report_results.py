"""The results that a report shows: of the most and least uncertain queries, and wrong but plausible ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sfumato.distances import get_distance
from sfumato.matching import match_probability
from sfumato.reports.formatting import clipped, probability
from sfumato.reports.html_pages import data_url
from sfumato.reports.report_data import RESULTS, DirectionResult, ReportData
from sfumato.search.exact import distance_blocks

SHOWN = 4
"""Most and least uncertain queries of each side that are shown."""

MISTAKES = 6
"""Wrong but plausible results shown in each direction."""

IMAGES = 4 * SHOWN * RESULTS + 6 * MISTAKES
"""No page holds more images than this."""


class Thumbnails:
    """Small images as data URLs, each read once.

    Args:
        data: of the report.
    """

    def __init__(self, data: ReportData) -> None:
        self._data, self._read = data, dict[int, str | None]()

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position not in self._read:
            content = self._data.thumbnail(position)
            self._read[position] = data_url(content) if content else None
        texts = self._data.relevance.indices[slice(*self._data.relevance.indptr[position : position + 2])]
        name = clipped(str(self._data.image_names[position]), 60)
        caption = f": {clipped(self._data.captions[texts[0]], 120)}" if len(texts) else ""
        return {"src": self._read[position], "name": name, "alt": f"image {name}{caption}"}


def uncertain_queries(
    data: ReportData, directions: Sequence[DirectionResult], thumbnails: Thumbnails
) -> list[dict[str, Any]]:
    """The most and the least uncertain queries of each side with their results.

    Args:
        data: of the report.
        directions: what was found.
        thumbnails: the images.

    Returns:
        For the template: a group for each side and each end.
    """
    shown = []
    for direction in directions:
        order = np.argsort(direction.queries.total_variance.cpu().numpy(), kind="stable")
        few = order[: min(SHOWN, len(order) // 2)]
        for word, chosen in (("most certain", few), ("least certain", order[::-1][: len(few)])):
            expected = _expected_matches(data, direction, chosen)
            queries = [_query(data, direction, thumbnails, int(q), e) for q, e in zip(chosen, expected, strict=True)]
            shown.append({"key": direction.key, "word": word, "queries": queries})
    return shown


def _expected_matches(data: ReportData, direction: DirectionResult, chosen: np.ndarray) -> list[float]:
    """Sum of the match probabilities of some queries over the gallery."""
    queries = direction.queries[torch.from_numpy(chosen.copy()).to(direction.queries.device)]
    blocks = distance_blocks(queries, direction.gallery, get_distance(data.distance).for_direction(direction.key))
    return [e for _, block in blocks for e in match_probability(block, *data.logits).sum(1).tolist()]


def _query(
    data: ReportData, direction: DirectionResult, thumbnails: Thumbnails, query: int, expected: float
) -> dict[str, Any]:
    true, of_text = direction.true_items(query), direction.key == "t2i"
    distances = direction.distances[query]
    results = []
    for item, distance, p in zip(
        direction.closest[query].tolist(),
        distances.tolist(),
        match_probability(distances, *data.logits).tolist(),
        strict=True,
    ):
        shown = thumbnails[item] if of_text else {"text": clipped(data.captions[item])}
        results.append(shown | {"true": item in true, **_match(p, distance)})
    kinds = data.text_kinds
    return {
        "picture": None if of_text else thumbnails[query],
        "text": clipped(data.captions[query]) if of_text else None,
        "kind": kinds[query] if of_text and kinds is not None and len(set(kinds)) > 1 else None,
        "variance": f"{float(direction.queries.total_variance[query]):.3g}",
        "expected": f"{expected:.1f}" if expected < 10 else f"{expected:.0f}",
        "true": len(true),
        "rank": f"{direction.best_rank(query):,}" if len(true) else None,
        "results": results,
    }


def _match(p: float, distance: float) -> dict[str, Any]:
    """Probability and distance of a result, for the template."""
    return {"pct": probability(p), "width": round(100 * p), "distance": f"{distance:#.3g}"}


def wrong_first_results(
    data: ReportData, directions: Sequence[DirectionResult], thumbnails: Thumbnails
) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """How many first results are wrong, and the most probable of them, one for each wrong item.

    Args:
        data: of the report.
        directions: what was found.
        thumbnails: the images.

    Returns:
        (by direction the counts of :class:`~sfumato.reports.report.Report`, for the template a group each).
    """
    counts: dict[str, dict[str, int]] = {}
    shown = []
    for direction in directions:
        right = direction.first_is_right
        wrong = np.flatnonzero(right == 0)
        probabilities = match_probability(direction.distances[:, 0].double(), *data.logits).numpy()
        plausible = int((probabilities[wrong] >= 0.5).sum())
        counts[direction.key] = {"n": int((~np.isnan(right)).sum()), "wrong": len(wrong), "plausible": plausible}
        # By distance, of which the probability is a falling function: probabilities near 1 round to ties.
        rows: list[dict[str, Any]] = []
        seen: set[int] = set()
        for query in wrong[np.argsort(direction.distances[wrong, 0].numpy(), kind="stable")].tolist():
            item = int(direction.closest[query, 0])
            if item not in seen and direction.ground_truth.counts[query] and len(rows) < MISTAKES:
                seen.add(item)
                found = _match(float(probabilities[query]), float(direction.distances[query, 0]))
                rows.append(found | _wrong_result(data, direction, thumbnails, query, item))
        shown.append({"key": direction.key, "rows": rows})
    return counts, shown


def _wrong_result(
    data: ReportData, direction: DirectionResult, thumbnails: Thumbnails, query: int, item: int
) -> dict[str, Any]:
    """A query, its wrong first result, and its best-ranked true item with rank, distance and probability."""
    true = int(direction.true_items(query)[0])
    blocks = distance_blocks(
        direction.queries[query : query + 1],
        direction.gallery,
        get_distance(data.distance).for_direction(direction.key),
    )
    distance = float(next(block for _, block in blocks)[0, true])
    best = _match(float(match_probability(torch.tensor(distance), *data.logits)), distance)
    values: dict[str, Any] = {f"true_{key}": value for key, value in best.items()}
    values["rank"] = f"{direction.best_rank(query):,}"
    if direction.key == "t2i":
        return values | {
            "asked": clipped(data.captions[query]), "found": thumbnails[item], "true": thumbnails[true]
        }  # fmt: skip
    owners = data.relevance.transpose()
    images = owners.indices[slice(*owners.indptr[item : item + 2])]
    return values | {
        "asked": thumbnails[query],
        "found": clipped(data.captions[item]),
        "owner": thumbnails[int(images[0])] if len(images) else None,
        "true": clipped(data.captions[true]),
    }
