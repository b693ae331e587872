"""Answers and calibrated scores as documents of LangChain, LlamaIndex and Haystack.

One file a package, which imports it: `sfumato.adapters.langchain`, `.llama_index` and `.haystack`.
Here is what they share: what a document says of a hit, and the probabilities of a list of scores.
"""

from collections.abc import Sequence
from typing import Any

from sfumato.calibration.score_lists import ScoreCalibrator
from sfumato.data.images import handed_out
from sfumato.search.answer import Answer, Hit


def text_of(hit: Hit) -> str:
    """The text of an item that fits the query best, else its text, label or id."""
    return hit.best_text or hit.name


def fields_of(hit: Hit, answer: Answer) -> dict[str, Any]:
    """Metadata of a document: the payload, and what is known of the hit. No probability if it is not calibrated."""
    kind = None if answer.verdict is None else answer.verdict.kind
    p = hit.match_probability if answer.calibrated else None
    found = {"id": hit.id, "distance": hit.distance, "match_probability": p}
    return {**handed_out(hit.payload), **found, "verdict": answer.sentence, "verdict_kind": kind}


def calibrated(
    calibrator: ScoreCalibrator, scores: Sequence[float], k: int | None, min_probability: float
) -> tuple[list[tuple[int, float]], float]:
    """Positions and probabilities of the k hits of one list that reach the least one, and that of no match at all."""
    if not len(scores):
        return [], 1.0
    found = calibrator.predict_proba(scores)[:, 1]
    best = sorted(range(len(scores)), key=lambda i: -found[i])[:k]
    kept = [(i, float(found[i])) for i in best if found[i] >= min_probability]
    return kept, float(calibrator.nothing_matches(scores)[0])
