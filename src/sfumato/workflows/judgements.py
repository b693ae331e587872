"""People's verdicts on the hits of an index measure its probabilities and refine them."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.calibration.fits import N_FOLDS, FitsCalibration, JudgedHits
from sfumato.errors import UserError
from sfumato.evaluation.judgements import (
    JudgedFigures,
    Judgement,
    PairVerdict,
    ShownHit,
    judged_figures,
    pair_verdicts,
    read_verdicts,
)
from sfumato.search.answer import Hit
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import FITS
from sfumato.search.searcher import Searcher
from sfumato.search.texts import item_texts, word_stems
from sfumato.workflows.search import load_index

_DEEP = 1_000
"""Number of hits of a query in which judged items are looked for."""


@dataclass(frozen=True, eq=False)
class Found:
    """The hits of some queries."""

    shown: list[ShownHit]
    hit: dict[tuple[str, str], Hit]  # by query and id
    target: str

    def first(self, k: int) -> list[ShownHit]:
        """The first k of each query."""
        return [one for one in self.shown if one.rank <= k]


def find_hits(searcher: Searcher, queries: Sequence[str], k: int) -> Found:
    """Search by texts for what people judge."""
    if searcher.native != "texts":
        raise UserError(f"{searcher.source} holds texts; give an index of images, whose hits a text describes or not")
    shown, hit, target = list[ShownHit](), dict[tuple[str, str], Hit](), "fits"
    for answer in searcher.search(list(queries), k):
        target = answer.target
        for one in answer:
            p = one.match_probability if answer.calibrated else None
            shown.append(ShownHit(answer.query, one.id, one.rank, p))
            hit[answer.query, one.id] = one
    return Found(shown, hit, target)


@contextlib.contextmanager
def _opened(folder: Path, run: str | None, store: str | None) -> Iterator[Searcher]:
    with contextlib.closing(load_index(folder, run=run, store=store)) as searcher:
        yield searcher


def _of_target(path: Path, target: str) -> list[Judgement]:
    """The verdicts of a file on one target."""
    if own := [one for one in read_verdicts(path) if one.target == target]:
        return own
    raise UserError(f'{path} holds no verdicts of target "{target}"; judge hits with sfumato serve --judgements')


@dataclass(frozen=True)
class Judged:
    """Hits of an index against verdicts."""

    k: int  # number of hits of each query
    judges: int
    not_found: int  # number of judged pairs that are not among the hits
    figures: JudgedFigures

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return vars(self) | {"figures": self.figures.to_json()}


def evaluate_index(
    folder: Path, path: Path, *, k: int = 10, run: str | None = None, store: str | None = None, n_resamples: int = 1000
) -> Judged:
    """Measure the first k hits of the judged queries by verdicts."""
    verdicts = read_verdicts(path)
    with _opened(folder, run, store) as searcher:
        found = find_hits(searcher, list(dict.fromkeys(one.query for one in verdicts)), k)
    own = [one for one in verdicts if one.target == found.target]
    lost = {one.pair for one in own} - set(found.hit)
    figures = judged_figures(found.shown, own, n_resamples=n_resamples)
    return Judged(k, len({one.judge for one in own}), len(lost), figures)


@dataclass(frozen=True)
class Refined:
    """What verdicts changed about the probabilities of an index."""

    changed: tuple[str, ...]  # kinds of items whose logits changed: "with texts", "without texts"
    n: int  # number of judged hits
    n_queries: int
    not_found: int  # number of judged pairs that are not among the hits
    judged: float  # fraction of the first hits of the judged queries that anybody judged
    before: JudgedFigures  # with the packaged constants
    after: JudgedFigures  # each query with the verdicts on the others

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return vars(self) | {"before": self.before.to_json(), "after": self.after.to_json()}


KINDS = {"hit_with": "items with texts", "hit_without": "items without texts"}


class NotRefinedError(UserError):
    """Verdicts cannot refine these probabilities."""


def refine_index(folder: Path, path: Path) -> Refined:
    """Refine the calibration of target "fits" by the verdicts of a file, and keep it with the collection."""
    verdicts = _of_target(path, "fits")
    with _opened(folder, None, None) as searcher:
        return refine(searcher, verdicts)


def refine(searcher: Searcher, verdicts: Sequence[Judgement], *, k: int = 10, seed: int = 0) -> Refined:
    """Refine the calibration of target "fits" by verdicts, and keep it with the collection; searches may go on.

    The packaged constants are where it starts, always: it takes all verdicts, those of before too.
    """
    gallery = searcher.gallery
    if not isinstance(gallery, GaussianCollection) or gallery.texts is None:
        raise NotRefinedError(
            f'{searcher.source} has no probabilities of target "fits", which verdicts refine; make a collection of the'
            " images with sfumato index --data FOLDER"
        )
    plain = copy.copy(gallery)  # With the packaged constants; the store is the same.
    plain.metadata = {name: value for name, value in gallery.metadata.items() if name != FITS}
    packaged = FitsCalibration.packaged()
    queries = list(dict.fromkeys(one.query for one in verdicts))
    found = find_hits(replace(searcher, gallery=plain), queries, min(gallery.size, _DEEP))
    known = {one.pair: one for one in found.shown}
    pairs = [one for one in pair_verdicts(verdicts) if (one.query, one.id) in known]
    if not pairs:
        raise NotRefinedError(
            f"none of the items that were judged is among the hits of {searcher.source}; give its own verdicts"
        )
    hits = _judged_hits(pairs, found, queries)
    changes = packaged.corrections(hits, seed=seed)
    gallery.keep({FITS: packaged.refined(hits, seed=seed).to_json() if changes else None})
    p = hits.logit.sigmoid()
    rows = [known[one.query, one.id] for one in pairs]
    after = _cross_fitted(packaged, hits, seed).sigmoid().tolist()
    first = found.first(k)
    return Refined(
        changed=tuple(KINDS[name] for name in changes),
        n=len(pairs),
        n_queries=len({one.query for one in pairs}),
        not_found=len({one.pair for one in verdicts}) - len(pairs),
        judged=len({one.pair for one in first} & {hit.pair for hit in rows}) / len(first),
        before=judged_figures([replace(h, probability=q) for h, q in zip(rows, p.tolist(), strict=True)], verdicts),
        after=judged_figures([replace(h, probability=q) for h, q in zip(rows, after, strict=True)], verdicts),
    )


def _judged_hits(pairs: Sequence[PairVerdict], found: Found, queries: Sequence[str]) -> JudgedHits:
    numbers = {query: i for i, query in enumerate(queries)}
    columns = [
        (numbers[one.query], len(word_stems(one.query)), hit.match_probability, item_texts(hit.payload) != [],
         one.yes, one.weight)
        for one in pairs for hit in [found.hit[one.query, one.id]]
    ]  # fmt: skip
    query, n_words, p, has_texts, yes, weight = (torch.tensor(values) for values in zip(*columns, strict=True))
    return JudgedHits(query, n_words, torch.logit(p.double(), eps=1e-12), has_texts, yes.double(), weight.double())


def _cross_fitted(fits: FitsCalibration, hits: JudgedHits, seed: int) -> torch.Tensor:
    """(k,) logits of hits, each corrected by the verdicts on other queries."""
    queries, group = hits.query.unique(return_inverse=True)
    fold = torch.from_numpy(np.random.default_rng(seed).permutation(len(queries)) % N_FOLDS)[group]
    logit = hits.logit.clone()
    for k in fold.unique().tolist():
        changes = fits.corrections(hits.some(fold != k), seed=seed)
        logit[fold == k] = fits.corrected_logits(changes, hits.some(fold == k))
    return logit
