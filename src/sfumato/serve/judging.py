"""People's verdicts on the hits of a service: kept in a file, summed up, and used to refine the probabilities."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator

from sfumato.calibration.fits import N_FOLDS
from sfumato.errors import UserError, counted
from sfumato.evaluation import judgements
from sfumato.evaluation.judgements import JudgedFigures, Judgement, JudgementFile, ShownHit, merged, now, qrels_of
from sfumato.search.answer import Target
from sfumato.serve.problems import WORD, Model, Refusal, busy, example, wrong
from sfumato.serve.schemas import ItemId, Text
from sfumato.serve.service import Service
from sfumato.serve.settings import MOST, ServedGallery
from sfumato.workflows.judgements import NotRefinedError, Refined, refine

Done = TypeVar("Done")

_LOG = logging.getLogger("sfumato.serve")


_Name = Annotated[str, Field(min_length=1, max_length=100, pattern=WORD)]


WEB, CHOSEN = "web", "chosen"
"""The judge and the group of a hit where a request names none."""


class NewJudgement(Model):
    """A person's verdict on a hit of a search by text."""

    query: Text = Field(description="the text that was searched by")
    id: ItemId
    yes: bool | None = Field(description="whether the text describes the item; null takes the verdict back")
    probability: float | None = Field(
        None, ge=0, le=1, description="match probability beside the hit; null if there was none"
    )
    weight: float = Field(1.0, ge=1, le=1_000_000, description="one over the probability that the hit was drawn")
    why: _Name = Field(CHOSEN, description="group that the hit was drawn from; `chosen` if the judge chose it")


class JudgementsRequest(Model):
    """Verdicts of one judge; all of them are kept, or none. Of two on one pair the later counts."""

    model_config = example({"judgements": [{"query": "a red bird", "id": "birds/red.jpg", "yes": True}]})

    judge: _Name = Field(WEB, description="name of the judge; only verdicts of this name are replaced or taken back")
    judgements: list[NewJudgement] = Field([], max_length=MOST, description="the verdicts")
    use: bool = Field(
        False,
        description="whether to refine the probabilities by all verdicts then, as `sfumato calibrate INDEX --judgements"
        " FILE` does",
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.judgements or self.use):
            raise ValueError("give judgements, or use")
        return self


class Figure(Model):
    """A figure with its 95 % interval over queries."""

    model_config = ConfigDict(from_attributes=True)  # It is that of the library.

    value: float | None = Field(description="the figure")
    low: float | None = Field(description="lower end of the interval; null if it cannot be computed")
    high: float | None = Field(description="upper end of the interval; null if it cannot be computed")


class JudgementsUsed(Model):
    """What the verdicts changed about the probabilities of later searches."""

    changed: list[str] = Field(description="kinds of items whose probabilities changed; none if no change is better")
    n: int = Field(description="judged hits that were used")
    queries: int = Field(description="number of their queries")
    not_found: int = Field(description="judged pairs that are not among the hits")
    before: Figure = Field(description="calibration error with the packaged constants")
    after: Figure = Field(description="calibration error now, each query with the verdicts on the others")
    text: str = Field(description="the same for people")


class JudgementsResponse(Model):
    """What has been stored durably."""

    kept: int = Field(description="number of verdicts that are new or replaced")
    removed: int = Field(description="number of verdicts that were there and are taken back or replaced")
    n: int = Field(description="verdicts in the file now, of all judges")
    used: JudgementsUsed | None = Field(description="what `use` changed; null without it")


class JudgementsSummary(Model):
    """What the verdicts say. The figures are of hits beside which a probability stood; null without such hits.

    Of more than 20,000 hits a random part is taken.
    """

    n: int = Field(description="verdicts, of all judges")
    judges: int = Field(description="number of judges")
    queries: int = Field(description="number of judged queries")
    precision: Figure | None = Field(description="fraction of judged hits that people say yes to")
    said: Figure | None = Field(description="mean probability that stood beside them")
    calibration_error: Figure | None = Field(description="mean gap of probability and verdict, in equal bins")
    calibration_error_by_chance: float | None = Field(description="what perfect probabilities would show")
    given: dict[str, bool] = Field(description="verdicts of the judge on the query of the request, by id")


class Judging:
    """The file of verdicts of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lock = asyncio.Lock()  # Else those who wait for the file would hold all threads.
        self._file = JudgementFile(service.settings.judgements or "")

    async def keep(self, wanted: JudgementsRequest) -> JudgementsResponse:
        """Keep verdicts, all or none, and take others back. When it returns, they survive the death of the process."""

        def keep(served: ServedGallery) -> JudgementsResponse:
            _check_ids(served, wanted)
            own = {(one.query, one.id): one for one in wanted.judgements}
            new = [
                Judgement(
                    one.query, one.id, int(one.yes), wanted.judge, now(), one.why, one.probability, one.weight,
                    _target(served),
                )
                for one in own.values()
                if one.yes is not None
            ]  # fmt: skip
            before, after = self._file.change(
                lambda kept: [*(one for one in kept if one.judge != wanted.judge or one.pair not in own), *new]
            )
            for one in new:
                if one.probability is not None:
                    self.service.metrics.judged(one.target, one.why != CHOSEN, bool(one.yes), one.probability)
            removed = len(before) + len(new) - len(after)
            return JudgementsResponse(kept=len(new), removed=removed, n=len(after), used=None)

        kept = await self._run(keep)
        return kept.model_copy(update={"used": await self._use()}) if wanted.use else kept

    async def summary(self, query: str | None, judge: str, *, measured: bool = True) -> JudgementsSummary:
        """What the verdicts say, and those of a judge on a query."""

        def read(served: ServedGallery) -> JudgementsSummary:
            own = self._verdicts(served)
            given = merged(one for one in own if (one.query, one.judge) == (query, judge))
            figures = _figures(merged(own)) if measured else None
            names = "precision", "said", "calibration_error", "calibration_error_by_chance"
            return JudgementsSummary(
                n=len(own),
                judges=len({one.judge for one in own}),
                queries=len({one.query for one in own}),
                given={one.id: bool(one.yes) for one in given},
                **{name: getattr(figures, name, None) for name in names},
            )

        return await self._run(read)

    async def qrels(self) -> str:
        """The verdicts as TREC qrels."""
        return await self._run(lambda served: qrels_of(self._verdicts(served)))

    async def _use(self) -> JudgementsUsed:
        """Refine the probabilities by all verdicts; searches use the result at once."""

        def refined(served: ServedGallery) -> JudgementsUsed:
            if not (verdicts := self._verdicts(served)):
                raise Refusal(422, "There are no verdicts to use yet; judge some results first")
            try:
                found = refine(self.service.sources.searcher("images"), verdicts)
            except NotRefinedError as error:
                raise Refusal(422, str(error)) from error
            self.service.changed(served, 0)
            was, is_now = (Figure.model_validate(one.calibration_error) for one in (found.before, found.after))
            counts = {"n": found.n, "queries": found.n_queries, "not_found": found.not_found}
            about: dict[str, Any] = {"changed": list(found.changed), "text": _in_words(found), **counts}
            return JudgementsUsed(before=was, after=is_now, **about)

        return await self._run(refined)

    def _verdicts(self, served: ServedGallery) -> list[Judgement]:
        return [one for one in self._file.read() if one.target == _target(served)]

    async def _run(self, work: Callable[[ServedGallery], Done]) -> Done:
        """Run work on the file of verdicts and the gallery, in a thread."""
        served = self.service.sources.gallery("images")
        if self.service.settings.judgements is None:
            reason = "it was started without --judgements; start it with --judgements FILE"
            raise Refusal(409, f"This service keeps no verdicts: {reason}", code="no-judgements")
        async with self._lock:
            try:
                return await self.service.threads.run(work, served)
            except (UserError, OSError) as error:
                _LOG.error("verdicts could not be read or written: %s", error)
                detail = "The file of verdicts cannot be read or written; the log of the service has the reason"
                raise busy(detail, 5, code="store-failed") from error


def _target(served: ServedGallery) -> Target:
    """What probabilities of searches by text are of."""
    return "listed" if served.gallery.texts is None else "fits"


_MOST_HITS = 20_000
"""Hits that figures are of."""


def _figures(own: list[Judgement]) -> JudgedFigures | None:
    """What verdicts say about the hits beside which a probability stood."""
    shown = {one.pair: ShownHit(*one.pair, 0, one.probability) for one in own if one.probability is not None}
    pairs = shown if len(shown) <= _MOST_HITS else random.Random(0).sample([*shown], _MOST_HITS)
    some = {pair: shown[pair] for pair in pairs}
    return judgements.judged_figures([*some.values()], [one for one in own if one.pair in some]) if some else None


def _check_ids(served: ServedGallery, wanted: JudgementsRequest) -> None:
    """Refuse verdicts on items that are not there; those on items that are gone may be taken back."""
    there = set(served.gallery.get(list({one.id for one in wanted.judgements})).ids)
    errors = [
        (f"body.judgements.{i}.id", f"there is no item {one.id!r}")
        for i, one in enumerate(wanted.judgements)
        if one.yes is not None and one.id not in there
    ]
    if errors:
        raise wrong(*errors, before="Nothing was stored: ")


def _in_words(found: Refined) -> str:
    """What verdicts changed, in one sentence."""
    judged = f"{counted(found.n, 'verdict')} on {counted(found.n_queries, 'search', 'searches')}"
    before, after = (100 * (one.calibration_error.value or 0) for one in (found.before, found.after))
    if found.changed:
        was = f"were off by {before:.0f} percentage points as packaged, and are off by {after:.0f} now"
        return f"Used {judged}: the probabilities of these results {was}."
    return f"Nothing changed: {judged} show no clearly better change. It takes verdicts on at least {N_FOLDS} searches."
