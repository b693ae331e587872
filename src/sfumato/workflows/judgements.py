"""People's verdicts: on the hits of an index, which they measure and refine, and on lists of other search engines.

Files of other engines are in the formats of TREC. A run has a line for each hit, `QUERY Q0 ITEM RANK SCORE TAG`; qrels
a line for each judged pair, `QUERY 0 ITEM GRADE`. Queries and items of a run stay as they are written. To find them in
qrels, percent-encoding is read, as that of GET /v1/judgements?format=qrels.
"""

import contextlib
import copy
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from sfumato.arrays import sigmoid, some_rows
from sfumato.calibration.fits import N_FOLDS, FitsCalibration, JudgedHits
from sfumato.calibration.score_lists import ScoreCalibrator
from sfumato.errors import UserError
from sfumato.evaluation import judgements
from sfumato.evaluation.hits import HitFigures, hit_figures
from sfumato.files import write_atomically
from sfumato.ids import first_twice
from sfumato.search.answer import Hit, SearchOptions, TextQuery
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import FITS
from sfumato.search.searcher import Searcher, with_facts
from sfumato.search.texts import item_texts, word_stems
from sfumato.workflows.search import load_index

_DEEP = 1_000
"""Number of hits of a query in which judged items are looked for."""


Hits = dict[tuple[str, str], Hit]
"""Hits by query and id."""


def find_hits(searcher: Searcher, queries: Sequence[str], k: int) -> tuple[list[judgements.ShownHit], Hits, str]:
    """Search by texts for what people judge: the hits as shown and as found, and the target of the answers."""
    if searcher.native != "texts":
        raise UserError(f"{searcher.source} holds texts; give an index of images, whose hits a text describes or not")
    shown, hit, target = list[judgements.ShownHit](), Hits(), "fits"
    for answer in searcher.search(list(queries), k):
        target = answer.target
        for one in answer:
            p = one.match_probability if answer.calibrated else None
            shown.append(judgements.ShownHit(answer.query, one.id, one.rank, p))
            hit[answer.query, one.id] = one
    return shown, hit, target


@dataclass(frozen=True)
class Judged:
    """Hits of an index against verdicts."""

    k: int  # number of hits of each query
    judges: int
    not_found: int  # number of judged pairs that are not among the hits
    figures: judgements.JudgedFigures


def evaluate_index(folder: Path, path: Path, k: int, *, run: str | None = None, store: str | None = None) -> Judged:
    """Measure the first k hits of the judged queries by verdicts."""
    verdicts = judgements.read_verdicts(path)
    with contextlib.closing(load_index(folder, run=run, store=store)) as searcher:
        shown, hit, target = find_hits(searcher, list(dict.fromkeys(one.query for one in verdicts)), k)
    own = [one for one in verdicts if one.target == target]
    lost = {one.pair for one in own} - set(hit)
    return Judged(k, len({one.judge for one in own}), len(lost), judgements.judged_figures(shown, own))


@dataclass(frozen=True)
class Refined:
    """What verdicts changed about the probabilities of an index."""

    changed: tuple[str, ...]  # kinds of items whose logits changed: "with texts", "without texts"
    n: int  # number of judged hits
    n_queries: int
    not_found: int  # number of judged pairs that are not among the hits, or whose query is not plain
    judged: float  # fraction of the first hits of the judged queries that anybody judged
    before: judgements.JudgedFigures  # with the packaged constants
    after: judgements.JudgedFigures  # each query with the verdicts on the others


KINDS = {"hit_with": "items with texts", "hit_without": "items without texts"}


class NotRefinedError(UserError):
    """Verdicts cannot refine these probabilities."""


def refine_index(folder: Path, path: Path) -> Refined:
    """Refine the calibration of target "fits" by the verdicts of a file, and keep it with the collection."""
    verdicts = [one for one in judgements.read_verdicts(path) if one.target == "fits"]
    if not verdicts:
        raise UserError(f'{path} holds no verdicts of target "fits"; judge hits with sfumato serve --judgements')
    with contextlib.closing(load_index(folder)) as searcher:
        return refine(searcher, verdicts)


def refine(searcher: Searcher, verdicts: Sequence[judgements.Judgement], *, k: int = 10, seed: int = 0) -> Refined:
    """Refine the calibration of target "fits" by verdicts, and keep it with the collection; searches may go on.

    The packaged constants are where it starts, always: it takes all verdicts, those of before too.
    """
    gallery = searcher.gallery
    if not isinstance(gallery, GaussianCollection) or gallery.texts is None:
        lacking = f'{searcher.source} has no probabilities of target "fits", which verdicts refine'
        raise NotRefinedError(f"{lacking}; make a collection of the images with sfumato index --data FOLDER")
    plain = copy.copy(gallery)  # With the packaged constants; the store is the same.
    plain.metadata = {name: value for name, value in gallery.metadata.items() if name != FITS}
    packaged = FitsCalibration.packaged()
    packaged_searcher, queries = replace(searcher, gallery=plain), list(dict.fromkeys(one.query for one in verdicts))
    shown, hit, _ = find_hits(packaged_searcher, queries, min(gallery.size, _DEEP))
    queries = _plain(packaged_searcher, queries)
    shown = [one for one in shown if one.query in queries]
    known = {one.pair: one for one in shown}
    pairs = [one for one in judgements.pair_verdicts(verdicts) if one.pair in known]
    if not pairs:
        others = f"none of the items that were judged is among the hits of {searcher.source}"
        raise NotRefinedError(f"{others} in plain English, without time and place; give its own verdicts")
    hits = _judged_hits(pairs, hit, queries)
    changes = packaged.corrections(hits, seed=seed)
    gallery.keep({FITS: packaged.refined(hits, seed=seed).to_json() if changes else None})
    rows = [known[one.pair] for one in pairs]
    before, after = (
        judgements.judged_figures([replace(h, probability=p) for h, p in zip(rows, own, strict=True)], verdicts)
        for own in (sigmoid(hits.logit).tolist(), sigmoid(_cross_fitted(packaged, hits, seed)).tolist())
    )
    first = [one for one in shown if one.rank <= k]
    return Refined(
        changed=tuple(KINDS[name] for name in changes),
        n=len(pairs),
        n_queries=len({one.query for one in pairs}),
        not_found=len({one.pair for one in verdicts}) - len(pairs),
        judged=len({one.pair for one in first} & {hit.pair for hit in rows}) / len(first),
        before=before,
        after=after,
    )


def _plain(searcher: Searcher, queries: Sequence[str]) -> list[str]:
    """The queries whose probabilities are by the constants that verdicts refine, and by nothing else."""
    texts = [with_facts(TextQuery(query), searcher.gallery, SearchOptions()) for query in queries]
    known = zip(queries, texts, searcher.about(texts), strict=True)
    return [query for query, text, one in known if not any(text.facts) and not (one.text and one.text.across)]


def _judged_hits(pairs: Sequence[judgements.PairVerdict], found: Hits, queries: Sequence[str]) -> JudgedHits:
    numbers = {query: i for i, query in enumerate(queries)}
    columns = [
        (numbers[one.query], len(word_stems(one.query)), hit.match_probability, item_texts(hit.payload) != [],
         one.yes, one.weight)
        for one in pairs for hit in [found[one.pair]]
    ]  # fmt: skip
    query, n_words, p, has_texts, yes, weight = (np.array(values) for values in zip(*columns, strict=True))
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return JudgedHits(query, n_words, np.log(p / (1 - p)), has_texts, yes.astype(float), weight.astype(float))


def _cross_fitted(fits: FitsCalibration, hits: JudgedHits, seed: int) -> np.ndarray:
    """(k,) logits of hits, each corrected by the verdicts on other queries."""
    queries, group = np.unique(hits.query, return_inverse=True)
    fold = (np.random.default_rng(seed).permutation(len(queries)) % N_FOLDS)[group]
    logit = hits.logit.copy()
    for k in np.unique(fold).tolist():
        changes = fits.corrections(some_rows(hits, fold != k), seed=seed)
        logit[fold == k] = fits.corrected_logits(changes, some_rows(hits, fold == k))
    return logit


_FOLDS = 5


@dataclass(frozen=True, eq=False)
class RankedLists:
    """The hits of a run, in the order of the file."""

    query: list[str]
    item: list[str]
    score: np.ndarray  # (n,)

    @classmethod
    def read(cls, path: Path) -> "RankedLists":
        """Read a run."""
        rows = [_row(path, number, line) for number, line in judgements.numbered_lines(path)]
        if not rows:
            raise UserError(f"{path} holds no hit; expected lines QUERY Q0 ITEM RANK SCORE TAG")
        query, item, score = (list(column) for column in zip(*rows, strict=True))
        if twice := first_twice(zip(query, item, strict=True)):
            raise UserError(f"{path}: item {twice[1]!r} is twice among the hits of {twice[0]!r}; keep one of them")
        return cls(query, item, np.array(score))

    @property
    def groups(self) -> np.ndarray:
        """(n,) the number of the query of each hit."""
        number = {query: i for i, query in enumerate(dict.fromkeys(self.query))}
        return np.array([number[query] for query in self.query])

    def labels(self, qrels: Path, unjudged: str) -> np.ndarray:
        """(n,) 1 for a match, 0 for none, NaN where nobody judged and that is unknown; queries of the qrels alone."""
        found = {one.pair: float(one.yes) for one in judgements.read_qrels(qrels)}
        queries = {query for query, _ in found}
        other = 0.0 if unjudged == "no" else math.nan
        pairs = [(unquote(query), unquote(item)) for query, item in zip(self.query, self.item, strict=True)]
        return np.array([found.get(pair, other if pair[0] in queries else math.nan) for pair in pairs])


def _row(path: Path, number: int, line: str) -> tuple[str, str, float]:
    try:
        query, _, item, _, score, _ = line.split()
        value = float(score)
    except ValueError:
        value, query, item = math.nan, "", ""
    if not math.isfinite(value):
        expected = "expected six columns, QUERY Q0 ITEM RANK SCORE TAG, with a number as SCORE"
        raise UserError(f"{path}, line {number}: {line.strip()[:80]!r} is no line of a TREC run; {expected}")
    return query, item, value


@dataclass(frozen=True)
class FittedLists:
    """What a calibrator was fitted on, and how good its probabilities are for queries that it was not fitted on."""

    queries: int
    judged: int  # hits with a label
    matches: int
    comparable: bool  # whether scores of different queries are used as such
    figures: tuple[HitFigures, ...]  # of the first hit, and of the first ten, each fold by a fit on the others
    note: str | None = None  # what is odd about the scores


def fit_lists(run: Path, qrels: Path, calibrator: ScoreCalibrator, *, unjudged: str = "no") -> FittedLists:
    """Fit a calibrator on a judged run."""
    hits = RankedLists.read(run)
    label = hits.labels(qrels, unjudged)
    known = ~np.isnan(label)
    if not known.any():
        raise UserError(f"{qrels} judges no query of {run}; are the queries named alike?")
    if not 0 < label[known].mean() < 1:
        which = "match" if label[known].all() else "match none"
        raise UserError(f"{run}: all judged hits {which}, by {qrels}; a fit needs hits that match and others")
    inside = np.isin(hits.groups, np.unique(hits.groups[known]))
    score, label, groups = hits.score[inside], label[inside], hits.groups[inside]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        figures = _held_out(calibrator, score, label, groups)
        calibrator.fit(score, label, groups=groups)
    n, note = len(np.unique(groups)), str(told[-1].message) if told else None
    return FittedLists(n, int(known.sum()), int(np.nansum(label)), calibrator.formula_.knots is not None, figures, note)


def _held_out(
    calibrator: ScoreCalibrator, score: np.ndarray, label: np.ndarray, groups: np.ndarray
) -> tuple[HitFigures, ...]:
    """Figures of the first hit and the first ten; nothing where a fold would lack matches."""
    queries = np.random.default_rng(0).permutation(np.unique(groups))
    p = np.full(len(score), np.nan)
    for k in range(_FOLDS):
        asked = np.isin(groups, queries[k::_FOLDS])
        others = label[~asked]
        if not 0 < np.nansum(others) < (~np.isnan(others)).sum():
            return ()
        made = copy.copy(calibrator).fit(score[~asked], others, groups=groups[~asked])
        if asked.any():
            p[asked] = made.predict_proba(score[asked], groups=groups[asked])[:, 1]
    order = np.lexsort((-p, groups))
    rank = np.empty(len(p), dtype=np.int64)
    rank[order] = np.arange(len(p)) - np.searchsorted(groups[order], groups[order])
    size = round(len(p) / len(queries))
    found = []
    for most in (1, 10):
        seen = (rank < most) & ~np.isnan(label)
        if not seen.any():
            return ()
        found.append(hit_figures(p[seen], label[seen], "t2i", size, most))
    return tuple(found)


def score_lists(run: Path, calibrator: ScoreCalibrator, out: Path) -> tuple[int, int, float]:
    """Write a run with probabilities. Returns (queries, hits, expected matches of all).

    As JSON lines, one a query, if the name ends with .jsonl; else as a TREC run whose scores are the probabilities.
    """
    hits = RankedLists.read(run)
    groups = hits.groups
    p = calibrator.predict_proba(hits.score, groups=groups)[:, 1]
    expected = calibrator.expected_matches(hits.score, groups=groups)
    nothing = calibrator.nothing_matches(hits.score, groups=groups)
    order = np.lexsort((-p, groups))
    bounds = np.searchsorted(groups[order], np.arange(len(expected) + 1))
    lines = []
    for q in range(len(expected)):
        rows = order[bounds[q] : bounds[q + 1]].tolist()
        name = hits.query[rows[0]]
        if out.suffix == ".jsonl":
            found = [
                {"id": hits.item[i], "score": float(hits.score[i]), "match_probability": float(p[i])} for i in rows
            ]
            whole = {"expected_matches": float(expected[q]), "nothing_probability": float(nothing[q])}
            lines.append(json.dumps({"query": name, **whole, "hits": found}, ensure_ascii=False))
        else:
            lines += [f"{name} Q0 {hits.item[i]} {rank} {p[i]:.9g} sfumato" for rank, i in enumerate(rows, 1)]
    write_atomically(out, "\n".join(lines) + "\n")
    return len(expected), len(p), float(expected.sum())
