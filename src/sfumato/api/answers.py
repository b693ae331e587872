"""Answers of a search with their certainty, as objects and as the plain values that `sfumato search --json` prints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sfumato.direction import Direction
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.gallery import Gallery, SearchRecord, Verdict, verdict


@dataclass(frozen=True)
class SearchAnswer:
    """The answer to one query. It iterates over its hits, closest first.

    Attributes:
        query: the text, the path or the number of the image, or the id of the item.
        distance: name of the distance of the gallery.
        calibrated: whether the probabilities were fitted on held-out pairs of this kind of query. If not, only the
            order and the distances mean something.
        uncertainty: total variance of the query.
        expected_matches: sum of the match probabilities over the whole gallery.
        abstained: whether the risk is too high to answer; None if no risk was given.
        verdict: the answer in one sentence.
        hits: the closest items. With min_probability there may be fewer than k, or none.
        conformal_set: the items that hold a match with the requested coverage; None if none was requested.
    """

    query: str
    distance: str
    calibrated: bool
    uncertainty: float
    expected_matches: float
    abstained: bool | None
    verdict: Verdict
    hits: tuple[SearchRecord, ...]
    conformal_set: tuple[SearchRecord, ...] | None = None

    def __iter__(self) -> Iterator[SearchRecord]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, index: int) -> SearchRecord:
        return self.hits[index]

    def __repr__(self) -> str:
        return "\n".join([f"SearchAnswer({self.summary})", *(f"  {_line(self, hit)}" for hit in self.hits)])

    @property
    def summary(self) -> str:
        """The query and the verdict in one line; without calibrated probabilities it says so instead."""
        if not self.calibrated:
            return f"{self.query!r}: by distance; match probabilities are not calibrated for such queries"
        return f"{self.query!r}: {self.verdict.text}; {self.expected_matches:.1f} matches expected"

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values.

        Returns:
            {"query", "distance", "calibrated", "uncertainty", "expected_matches", "abstained", "verdict" (a sentence),
            "hits": [{"id", "distance", "match_probability", "uncertainty", and the payload}], "conformal_set" (like
            hits; None without coverage)}.
        """
        return {
            "query": self.query,
            "distance": self.distance,
            "calibrated": self.calibrated,
            "uncertainty": self.uncertainty,
            "expected_matches": self.expected_matches,
            "abstained": self.abstained,
            "verdict": self.verdict.text,
            "hits": [_values(hit) for hit in self.hits],
            "conformal_set": None if self.conformal_set is None else [_values(hit) for hit in self.conformal_set],
        }


def answer_queries(
    gallery: Gallery,
    names: Sequence[str],
    queries: GaussianEmbedding,
    k: int,
    *,
    direction: Direction | None = None,
    min_probability: float | None = None,
    coverage: float | None = None,
    max_risk: float | None = None,
    unfamiliar: Sequence[bool] | None = None,
) -> list[SearchAnswer]:
    """Search a gallery, and describe the certainty of each answer.

    Args:
        gallery: gallery to search in.
        names: n names of the queries.
        queries: (n, d) embeddings.
        k: see :meth:`Gallery.search`.
        direction: of the queries; None if it is not one of the calibration, as with items that search among items.
        min_probability: see :meth:`Gallery.search`.
        coverage: see :meth:`Gallery.search`.
        max_risk: see :meth:`Gallery.search`.
        unfamiliar: for each query, whether it is a text that does not look like words; None for none.

    Returns:
        n answers.

    Raises:
        ValueError: see :meth:`Gallery.search`.
    """
    found = gallery.search(queries, k, min_probability=min_probability, coverage=coverage, max_risk=max_risk)
    # The logits were fitted on pairs of an image and a text: within one modality they are not calibrated.
    calibrated = gallery.calibrated and direction == gallery.scorer.direction
    return [
        SearchAnswer(
            name,
            gallery.distance,
            calibrated,
            result.uncertainty,
            expected,
            result.abstained,
            verdict(expected, result.best_probability, result.abstained, unfamiliar=strange),
            result.records,
            result.conformal_set,
        )
        for name, result, expected, strange in zip(
            names, found, gallery.expected_matches(queries), unfamiliar or [False] * len(names), strict=True
        )
    ]


def _values(hit: SearchRecord) -> dict[str, Any]:
    return {
        "id": hit.id,
        "distance": hit.distance,
        "match_probability": hit.match_probability,
        "uncertainty": hit.uncertainty,
        **hit.payload,
    }


def _line(answer: SearchAnswer, hit: SearchRecord) -> str:
    probability = f"{hit.match_probability:6.1%}  " if answer.calibrated else ""
    label = hit.payload.get("label") or hit.payload.get("text", "")
    return f"{probability}{answer.distance} {hit.distance:.4f}  {hit.id}" + (f"  {label}" if label else "")
