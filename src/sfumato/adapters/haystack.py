"""Components of Haystack: a retriever of a gallery's answers, and one that makes scores of documents probabilities."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sfumato.adapters import calibrated, fields_of, text_of
from sfumato.calibration.score_lists import ScoreCalibrator
from sfumato.errors import need
from sfumato.search.searcher import Searcher

with need("haystack", "sfumato.adapters.haystack needs haystack-ai"):
    from haystack import Document, component


@component
class SfumatoRetriever:
    """The hits of a gallery as documents; the score is the match probability. `meta` has what is known of each."""

    def __init__(
        self, searcher: Searcher, *, k: int = 10, min_probability: float | None = None, where: Sequence[str] = ()
    ) -> None:
        self.searcher, self.k, self.min_probability, self.where = searcher, k, min_probability, where

    @component.output_types(documents=list[Document], verdict=str, verdict_kind=str | None)
    def run(self, query: str) -> dict[str, Any]:
        """The documents, and the verdict of the answer, which may have none."""
        answer = self.searcher.search(query, self.k, min_probability=self.min_probability, where=self.where)
        rows = ((hit, fields_of(hit, answer)) for hit in answer)
        documents = [Document(id=hit.id, content=text_of(hit), meta=m, score=m["match_probability"]) for hit, m in rows]
        kind = None if answer.verdict is None else answer.verdict.kind
        return {"documents": documents, "verdict": answer.sentence, "verdict_kind": kind}


@component
class CalibratedScores:
    """Documents of any retriever, their scores replaced by match probabilities, which stand in `meta` too.

    It needs whole lists: place it behind a retriever of as many documents as the calibrator was fitted on.
    """

    def __init__(self, calibrator: ScoreCalibrator, *, k: int | None = None, min_probability: float = 0.0) -> None:
        self.calibrator, self.k, self.min_probability = calibrator, k, min_probability

    @component.output_types(documents=list[Document], nothing_probability=float)
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """The documents, and the probability that none matches."""
        scores = [document.score for document in documents]
        kept, nothing = calibrated(self.calibrator, scores, self.k, self.min_probability)
        said = [(documents[i], p, {**documents[i].meta, "match_probability": p}) for i, p in kept]
        found = [replace(document, score=p, meta=meta) for document, p, meta in said]
        return {"documents": found, "nothing_probability": nothing}
