"""Answers of a service to embedded queries: what a request may ask, and the answer of the library as a response."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import quote

import torch

from sfumato.calibration.query_scores import NEAR
from sfumato.data.images import handed_out
from sfumato.evaluation.judgements import ShownHit, sample_hits
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.answer import Answer as Found
from sfumato.search.answer import GuaranteeError, Hit, QueryInfo, SearchOptions, check_native
from sfumato.serve.problems import Refusal
from sfumato.serve.queries import Asked
from sfumato.serve.schemas import (
    Answer,
    ConformalSet,
    Drawn,
    GalleryInfo,
    GalleryName,
    RequestOptions,
    ResultRecord,
    VerdictText,
)
from sfumato.serve.sources import ServedGallery, Sources

RISKS, COVERAGES = (0.5, 0.3, 0.2, 0.1, 0.05), (0.5, 0.8, 0.9, 0.95)
"""Usual values. The service reports which of them the calibration can guarantee."""

N_LOOKED_AT = 200
"""Items that stand for a gallery, for the fields that it has."""


@dataclass(frozen=True)
class Search:
    """An embedded query and how to search by it."""

    asked: Asked  # the query, without its bytes
    query: GaussianEmbedding  # (1, d) its embedding
    gallery: GalleryName
    k: int  # number of hits
    options: SearchOptions

    def is_like(self, other: "Search") -> bool:
        """Whether both can be searched at once."""
        return (self.gallery, self.k, self.options) == (other.gallery, other.k, other.options)


def refuse_guarantees(served: ServedGallery, asked: Sequence[Asked], wanted: RequestOptions) -> None:
    """Refuse guarantees that the calibration cannot give; other errors of a search are internal errors."""
    gallery, given = served.gallery, {n: getattr(wanted, n) for n in ("abstain", "coverage", "min_probability")}
    try:
        check_native(given, gallery.scorer.direction, [one.is_native(served) for one in asked])
        if wanted.min_probability is not None and not gallery.calibrated:
            raise GuaranteeError("min_probability", "needs a calibration, and this gallery has none", "leave it out")
        wanted.of_search().check(gallery.scorer.direction, [])
        if wanted.coverage is not None:
            gallery.scorer.radius(wanted.coverage)
        if wanted.abstain is not None:
            gallery.scorer.check_risk(wanted.abstain)
    except GuaranteeError as error:
        raise Refusal(422, str(error), errors=[(error.option, error.reason)]) from error
    except ValueError as error:
        raise Refusal(422, str(error)) from error


def search_together(searches: Sequence[Search], sources: Sources) -> list[Answer | Exception]:
    """Answer the searches of several requests; those with the same options are searched at once."""
    alike = list[list[int]]()
    for i, one in enumerate(searches):
        same = next((places for places in alike if one.is_like(searches[places[0]])), None)
        if same is None:
            alike.append([i])
        else:
            same.append(i)
    results: dict[int, Answer | Exception] = {}
    for places in alike:
        try:
            results |= dict(zip(places, _answers([searches[i] for i in places], sources), strict=True))
        except Exception as error:
            results |= dict.fromkeys(places, error)
    return [results[i] for i in range(len(searches))]


def _answers(searches: Sequence[Search], sources: Sources) -> list[Answer]:
    """The answers to searches with the same options."""
    first, asked = searches[0], [one.asked for one in searches]
    searcher, served = sources.searcher(first.gallery), sources.galleries[first.gallery]
    known = iter(searcher.about([one.text for one in asked if one.text is not None]))
    about = [QueryInfo(one.name, native=one.is_native(served)) if one.text is None else next(known) for one in asked]
    found = searcher.closest(GaussianEmbedding.cat([one.query for one in searches]), about, first.k, first.options)
    return [_answer(served, first.options, one.kind, answer) for one, answer in zip(asked, found, strict=True)]


def _answer(
    served: ServedGallery, options: SearchOptions, kind: Literal["text", "image", "id"], found: Found
) -> Answer:
    words, whole = None, None
    if found.verdict is not None:
        words = VerdictText(kind=found.verdict.kind, text=found.verdict.text)
    if found.conformal_set is not None and options.coverage is not None:
        hits = [_hit(served, hit, found.calibrated) for hit in found.conformal_set]
        whole = ConformalSet(coverage=options.coverage, complete=not found.conformal_set_cut, hits=hits)
    same = (
        "query", "distance", "target", "calibrated", "expected_matches", "nothing_probability", "hidden", "note",
        "suggestion", "warning", "abstained",
    )  # fmt: skip
    return Answer(
        **{name: getattr(found, name) for name in same},
        kind=kind,
        total_variance=found.uncertainty,
        verdict=words,
        hits=[_hit(served, hit, found.calibrated) for hit in found],
        conformal_set=whole,
    )


def check_payloads(payloads: Iterable[Mapping[str, str]], max_bytes: int, number: str = "max_results") -> None:
    """Refuse a response that would be large by its payloads; the number of its items is limited before."""
    total = 0
    for payload in payloads:
        total += sum(len(name) + len(value) for name, value in payload.items())
        if total > max_bytes:
            reason = f"the payloads of the response have more than {max_bytes} bytes; ask for fewer items"
            raise Refusal(422, f"Too large: {reason}", errors=[(number, reason)])


def info_of(served: ServedGallery) -> GalleryInfo:
    """Describe a gallery."""
    some, scorer = served.gallery.sample(N_LOOKED_AT), served.gallery.scorer
    return GalleryInfo(
        n=0,
        writable=served.writable is not None,
        pictures=served.images is not None,
        calibrated=served.gallery.calibrated,
        risks=[r for r in RISKS if _can_guarantee(partial(scorer.check_risk, r))],
        coverages=[c for c in COVERAGES if _can_guarantee(partial(scorer.radius, c))],
        fields=sorted({name for payload in some.payloads for name in handed_out(payload)}),
    )


def calibrated_probability(served: ServedGallery) -> float | None:
    """Mean probability of the first hits of held-out queries; None in a gallery of another size, within 25 %."""
    fit, size = served.gallery.scorer.of_hits, served.gallery.size
    if fit is None or not served.gallery.calibrated or not size or abs(math.log2(size / fit.scores.n_gallery)) > NEAR:
        return None
    if fit.hits is not None:
        return float(torch.from_numpy(-fit.hits.nearest).double().sigmoid().mean())
    return float(fit.probability(fit.scores.nearest, n_gallery=fit.scores.n_gallery).double().mean())


def image_path(served: ServedGallery, id: str, payload: Mapping[str, str]) -> str | None:
    """Path of the image of an item at this service."""
    known = served.images is not None and served.images.has(id, payload)
    return f"/v1/pictures/{quote(id)}" if known else None


def item_path(id: str, gallery: GalleryName) -> str:
    """Path of an item at this service."""
    return f"/v1/items/{quote(id)}" + (f"?gallery={gallery}" if gallery != "images" else "")


def _hit(served: ServedGallery, hit: Hit, calibrated: bool) -> ResultRecord:
    return ResultRecord(
        id=hit.id,
        rank=hit.rank,
        distance=hit.distance,
        match_probability=hit.match_probability if calibrated else None,
        total_variance=hit.uncertainty,
        payload=handed_out(hit.payload),
        picture=image_path(served, hit.id, hit.payload),
        best_text=hit.best_text,
        duplicates=list(hit.duplicates),
    )


_N_ASKED, _UNSURE = 10, (0.1, 0.9)
"""Hits of an answer that people are asked about, and the probabilities between which a verdict tells most."""


def with_questions(answer: Answer) -> Answer:
    """An answer with the hits that people should judge, drawn with known probabilities."""
    known = answer.verdict is not None and answer.verdict.kind != "unfamiliar"
    ranked = [ShownHit(answer.query, hit.id, hit.rank, hit.match_probability) for hit in answer.hits]
    unsure = [one for one in ranked if known and _UNSURE[0] <= (one.probability or 0) <= _UNSURE[1]]
    drawn = {one.id: Drawn(why=one.why, weight=one.weight) for one in sample_hits(unsure, _N_ASKED)}
    return answer.model_copy(
        update={"hits": [hit.model_copy(update={"to_judge": drawn.get(hit.id)}) for hit in answer.hits]}
    )


def _can_guarantee(guarantee: Callable[[], object]) -> bool:
    try:
        return guarantee() != float("inf")
    except ValueError:
        return False
