"""The retrieved examples of a report: uncertain queries, and wrong but plausible first results."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sfumato.charts import data_url
from sfumato.distances import get_distance
from sfumato.reports.report_charts import RESULTS, DirectionResult, ReportData
from sfumato.reports.tables import clipped, probability
from sfumato.search.exact import distance_blocks

SHOWN = 4
"""Most and least uncertain queries of each side that are shown."""

MISTAKES = 6
"""Wrong but plausible results shown in each direction."""

IMAGES = 4 * SHOWN * RESULTS + 6 * MISTAKES
"""No page holds more images than this."""


class Thumbnails:
    """Small images as data URLs; each image is read once."""

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
    """The most and the least uncertain queries of each side with their results."""
    shown = []
    for direction in directions:
        order = np.argsort(direction.queries.uncertainty(data.uncertainty).cpu().numpy(), kind="stable")
        few = order[: min(SHOWN, len(order) // 2)]
        for word, chosen in (("most certain", few), ("least certain", order[::-1][: len(few)])):
            expected = _expected_matches(data, direction, chosen)
            queries = [_query(data, direction, thumbnails, int(q), e) for q, e in zip(chosen, expected, strict=True)]
            shown.append({"key": direction.key, "word": word, "queries": queries})
    return shown


def _expected_matches(data: ReportData, direction: DirectionResult, chosen: np.ndarray) -> list[float]:
    """Sum of the match probabilities of some queries over the gallery."""
    index = torch.from_numpy(chosen.copy())
    queries = direction.queries[index.to(direction.queries.device)]
    distance = get_distance(data.distance).for_direction(direction.key)
    block = torch.cat([part.cpu() for _, part in distance_blocks(queries, direction.gallery, distance)])
    context = direction.context[index]
    found: list[float] = (
        data.scorer(direction.key).match_probability(block, direction.gallery.n, context).sum(1).tolist()
    )
    return found


def _query(
    data: ReportData, direction: DirectionResult, thumbnails: Thumbnails, query: int, expected: float
) -> dict[str, Any]:
    true, of_text = direction.true_items(query), direction.key == "t2i"
    distances = direction.distances[query]
    results = []
    for item, distance, p in zip(
        direction.closest[query].tolist(), distances.tolist(), direction.probabilities[query].tolist(), strict=True
    ):
        shown = thumbnails[item] if of_text else {"text": clipped(data.captions[item])}
        results.append(shown | {"true": item in true, **_match(p, distance)})
    kinds = data.text_kinds
    return {
        "picture": None if of_text else thumbnails[query],
        "text": clipped(data.captions[query]) if of_text else None,
        "kind": kinds[query] if of_text and kinds is not None and len(set(kinds)) > 1 else None,
        "variance": f"{float(direction.queries[query : query + 1].uncertainty(data.uncertainty)):.3g}",
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
    """The counts of wrong first results, and the most probable of them, one for each wrong item."""
    counts: dict[str, dict[str, int]] = {}
    shown = []
    for direction in directions:
        right = direction.first_is_right
        wrong = np.flatnonzero(right == 0)
        probabilities, distances = direction.probabilities[:, 0].numpy(), direction.distances[:, 0].numpy()
        plausible = int((probabilities[wrong] >= 0.5).sum())
        counts[direction.key] = {"n": int((~np.isnan(right)).sum()), "wrong": len(wrong), "plausible": plausible}
        rows: list[dict[str, Any]] = []
        seen: set[int] = set()
        for query in wrong[np.lexsort((distances[wrong], -probabilities[wrong]))].tolist():
            item = int(direction.closest[query, 0])
            if item not in seen and direction.ground_truth.counts[query] and len(rows) < MISTAKES:
                seen.add(item)
                found = _match(float(probabilities[query]), float(distances[query]))
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
    context = direction.context[torch.tensor([query])]
    p = data.scorer(direction.key).match_probability(torch.tensor([[distance]]), direction.gallery.n, context)
    best = _match(float(p), distance)
    values: dict[str, Any] = {f"true_{key}": value for key, value in best.items()}
    values["rank"] = f"{direction.best_rank(query):,}"
    if direction.key == "t2i":
        return values | {"asked": clipped(data.captions[query]), "found": thumbnails[item], "true": thumbnails[true]}
    owners = data.relevance.transpose()
    images = owners.indices[slice(*owners.indptr[item : item + 2])]
    return values | {
        "asked": thumbnails[query],
        "found": clipped(data.captions[item]),
        "owner": thumbnails[int(images[0])] if len(images) else None,
        "true": clipped(data.captions[true]),
    }
