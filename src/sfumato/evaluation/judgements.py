"""People's verdicts on hits: files of them, samples to ask about, and what they say about a search.

A verdict says whether a person finds that a query describes an item. An item that nobody judged is unknown, never
wrong. Hits are asked about with known probabilities; with the inverse as weight, a few verdicts estimate without bias
what verdicts on all hits would say.

Verdicts are kept as JSON lines, with who judged, when, and why the hit was shown. TREC qrels, which other programs
read, have neither; there queries and items are percent-encoded, so that no second file is needed.
"""

import hashlib
import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from filelock import FileLock

from sfumato.errors import UserError
from sfumato.files import read_utf8, write_atomically
from sfumato.metrics.bootstrap import Interval, Statistic, bootstrap, mean_statistic, on_all
from sfumato.metrics.reliability import N_BINS, calibration_error_statistic

IMPORTED = "imported"
"""Why a verdict of a qrels file was given, and the judge where none is named."""

RANKS = (1, 3, 10)
"""Last ranks of the strata; hits below the last are one more."""

PROBABILITIES = (0.1, 0.5, 0.9)
"""Limits of the strata by probability."""

_VERDICTS_A_BIN = 10


@dataclass(frozen=True)
class _Pair:
    """A query with an item."""

    query: str
    id: str  # of the item

    @property
    def pair(self) -> tuple[str, str]:
        """Query and item."""
        return self.query, self.id


@dataclass(frozen=True)
class Judgement(_Pair):
    """A person's verdict on a hit."""

    yes: int  # 1: the query describes the item, 0: it does not
    judge: str
    when: str  # time, ISO 8601
    why: str  # stratum that the hit was sampled from
    probability: float | None = None  # that stood beside the hit; None if there was none
    weight: float = 1.0  # one over the probability that the hit was sampled
    target: str = "fits"

    def time(self) -> datetime:
        """When it was; in UTC, if it does not say."""
        found = datetime.fromisoformat(self.when)
        return found if found.tzinfo else found.replace(tzinfo=UTC)

    @cached_property
    def line(self) -> str:
        """As it stands in a file."""
        return json.dumps({name: getattr(self, name) for name in _NAMES}, ensure_ascii=False) + "\n"


_NAMES = [field.name for field in fields(Judgement)]


def now() -> str:
    """The time of a verdict that is given now."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _checked(values: Any) -> Judgement:
    if not isinstance(values, dict):
        raise ValueError(f"got {type(values).__name__}, expected an object")
    if missing := [name for name in ("query", "id", "yes", "judge", "when", "why") if name not in values]:
        raise ValueError(f"{missing[0]!r} is missing")
    if unknown := sorted(values.keys() - _NAMES):
        raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(_NAMES)}")
    found = Judgement(**values)
    for name in ("query", "id", "judge", "when", "why", "target"):
        if not isinstance(text := getattr(found, name), str) or not text.strip():
            raise ValueError(f"{name} is {text!r}, expected a text")
    if type(found.yes) is not int or found.yes not in (0, 1):
        raise ValueError(f"yes is {found.yes!r}, expected 0 or 1")
    if found.probability is not None and not (_is_number(found.probability) and 0 <= found.probability <= 1):
        raise ValueError(f"probability is {found.probability!r}, expected null or a number between 0 and 1")
    if not _is_number(found.weight) or not found.weight > 0:
        raise ValueError(f"weight is {found.weight!r}, expected a positive number")
    found.time()  # A ValueError names what is no time.
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers."""
    return [(n, line) for n, line in enumerate(read_utf8(path).split("\n"), 1) if line.strip()]


def read_judgements(path: str | Path) -> list[Judgement]:
    """Read a file of :func:`write_judgements`."""
    found = []
    for number, line in numbered_lines(Path(path)):
        try:
            found.append(_checked(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: {error}; correct the line or delete it") from error
    return found


def write_judgements(path: str | Path, judgements: Iterable[Judgement]) -> None:
    """Write verdicts as JSON lines. A reader sees the old or the new file."""
    write_atomically(path, "".join(one.line for one in judgements))


class JudgementFile:
    """A file of verdicts, none if it does not exist yet. It is kept in memory, and read again if others change it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._kept: list[Judgement] = []
        self._seen: tuple[int, ...] = ()  # what the file was when it was read
        self._lock = threading.RLock()

    def read(self) -> list[Judgement]:
        """The verdicts."""
        with self._lock:
            if (there := self._now()) != self._seen:
                self._kept, self._seen = read_judgements(self.path) if there else [], there
            return self._kept

    def change(self, by: Callable[[list[Judgement]], Iterable[Judgement]]) -> tuple[list[Judgement], list[Judgement]]:
        """Replace the verdicts; others who change them wait. Returns (old, new)."""
        path = self.path
        if not path.parent.is_dir():
            raise UserError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
        with self._lock, FileLock(path.with_name(f".{path.name}.lock")):
            before = self.read()
            after = list(by(before))
            write_judgements(path, after)
            self._kept, self._seen = after, self._now()
        return before, after

    def _now(self) -> tuple[int, ...]:
        there = self.path.stat() if self.path.exists() else None
        return (there.st_ino, there.st_size, there.st_mtime_ns) if there else ()


def merged(*files: Iterable[Judgement]) -> list[Judgement]:
    """All verdicts; of those of one judge on one pair the latest, of equally late ones the last."""
    latest: dict[tuple[str, str, str], Judgement] = {}
    for one in (one for file in files for one in file):
        before = latest.get(key := (*one.pair, one.judge))
        if before is None or one.time() >= before.time():
            latest[key] = one
    return list(latest.values())


@dataclass(frozen=True)
class PairVerdict(_Pair):
    """What all judges say about one pair."""

    yes: float  # fraction of the judges who say yes
    weight: float  # mean of their weights


def pair_verdicts(judgements: Iterable[Judgement]) -> list[PairVerdict]:
    """The verdicts by pair, each judge with the latest."""
    by_pair = defaultdict[tuple[str, str], list[Judgement]](list)
    for one in merged(judgements):
        by_pair[one.pair].append(one)
    return [
        PairVerdict(*pair, sum(one.yes for one in own) / len(own), sum(one.weight for one in own) / len(own))
        for pair, own in by_pair.items()
    ]


_PLAIN = "/.,:;'()!?&=+@"


def qrels_of(judgements: Iterable[Judgement]) -> str:
    """TREC qrels, a line a pair: query, 0, item, and 1 if more than half of the judges say yes.

    Queries and items are percent-encoded, as a column has no spaces.
    """
    found = pair_verdicts(judgements)
    return "".join(f"{quote(one.query, _PLAIN)} 0 {quote(one.id, _PLAIN)} {int(one.yes > 0.5)}\n" for one in found)


def read_verdicts(path: str | Path) -> list[Judgement]:
    """The verdicts of a file: JSON lines or TREC qrels, by its first line."""
    lines = numbered_lines(Path(path))
    return read_qrels(path) if lines and not lines[0][1].lstrip().startswith("{") else read_judgements(path)


def read_qrels(path: str | Path) -> list[Judgement]:
    """The verdicts of a TREC qrels file. A relevance above 0 is yes, 0 is no, and below 0 nobody judged."""
    found, when = [], now()
    for number, line in numbered_lines(Path(path)):
        try:
            query, _, item, relevance = line.split()
            grade = int(relevance)
        except ValueError as error:
            expected = "four columns, QUERY 0 ITEM RELEVANCE, with a whole number at the end"
            where = f"{path}, line {number}: {line.strip()!r}"
            raise UserError(f"{where} is no line of TREC qrels; expected {expected}") from error
        if grade >= 0:
            found.append(Judgement(unquote(query), unquote(item), int(grade > 0), IMPORTED, when, IMPORTED))
    return found


@dataclass(frozen=True)
class ShownHit(_Pair):
    """A hit of a query, to be judged or judged."""

    rank: int
    probability: float | None = None
    why: str = ""  # stratum
    weight: float = 1.0  # one over the probability that it is sampled


def _rank_name(rank: int) -> str:
    """The name of the interval of ranks that holds a rank."""
    low = 1 + max((last for last in RANKS if last < rank), default=0)
    high = next((str(last) for last in RANKS if rank <= last), "")
    return f"rank {low}" if high == str(low) else f"rank {low}-{high}"


def _probability_name(p: float | None) -> str:
    """The name of the interval that holds a probability; nothing without one."""
    if p is None:
        return ""
    limits = (0.0, *PROBABILITIES, 1.0)
    low = max(i for i, limit in enumerate(limits[:-1]) if p >= limit)
    return f", probability {limits[low]:g}-{limits[low + 1]:g}"


def _strata(hits: Sequence[ShownHit], n: int) -> list[str]:
    """The stratum of each hit: by rank and probability, or coarser where a sample of n has not one for each."""
    ranks = [_rank_name(hit.rank) for hit in hits]
    both = [rank + _probability_name(hit.probability) for rank, hit in zip(ranks, hits, strict=True)]
    return next(names for names in (both, ranks, ["any"] * len(hits)) if len(set(names)) <= max(n, 1))


def _allocated(sizes: Mapping[str, int], n: int) -> dict[str, int]:
    """Numbers to sample, together n: one of each stratum at least, the rest by the root of the sizes.

    Paper: Bankier, "Power allocations", The American Statistician 1988.
    """
    taken = dict.fromkeys(sizes, 1)
    for _ in range(n - len(taken)):
        open_ones = [name for name, size in sizes.items() if taken[name] < size]
        if not open_ones:
            break
        taken[max(open_ones, key=lambda name: math.sqrt(sizes[name]) / taken[name])] += 1
    return taken


def _number(pair: tuple[str, str], seed: int, use: str) -> str:
    """A number that is fixed for a pair, and as good as random."""
    return hashlib.blake2b(json.dumps([*pair, seed, use]).encode(), digest_size=8).hexdigest()


def sample_hits(hits: Sequence[ShownHit], n: int, *, seed: int = 0) -> list[ShownHit]:
    """Draw n distinct hits by rank and probability, with their weights, in random order.

    Every hit has a probability above 0, that of its stratum, in which the draw is simple and without replacement. So
    the weighted mean over the sample is an unbiased estimate of the mean over all hits. The order is random, so that
    whoever stops early has judged a random part. The random numbers belong to the pairs: another draw with the same
    seed asks about nearly the same hits.

    Paper: Ohlsson, "Coordination of samples using permanent random numbers", 1995.
    """
    members = defaultdict[str, list[ShownHit]](list)
    for hit, name in zip(hits, _strata(hits, n), strict=True):
        members[name].append(hit)
    numbers = _allocated({name: len(own) for name, own in members.items()}, n)
    found = []
    for name, own in members.items():
        drawn = sorted(own, key=lambda hit: _number(hit.pair, seed, "draw"))[: numbers[name]]
        found += [replace(hit, why=name, weight=len(own) / numbers[name]) for hit in drawn]
    return sorted(found, key=lambda hit: _number(hit.pair, seed, "order"))


def condensed_ndcg(yes: Sequence[float]) -> float:
    """nDCG of the judged hits of a query in their order, as if the others were not there; nan without a yes.

    Papers: Järvelin and Kekäläinen, TOIS 2002; Sakai, "Alternatives to bpref", SIGIR 2007 (condensed lists).
    """
    gain, discount = np.asarray(yes, float), 1 / np.log2(np.arange(2, len(yes) + 2))
    best = float(np.sort(gain)[::-1] @ discount)
    return float(gain @ discount) / best if best > 0 else math.nan


@dataclass(frozen=True)
class JudgedFigures:
    """What verdicts say about hits, each figure with an interval over queries."""

    n: int  # number of judged hits
    n_queries: int  # number of their queries
    judged: float  # fraction of the hits up to the rank that anybody judged
    precision: Interval  # fraction of hits that people say yes to
    first: Interval  # the same of first hits
    ndcg: Interval  # of the judged hits of a query in their order, mean over queries with a yes
    said: Interval  # mean probability; None for all if the hits have none
    excess: Interval  # mean probability minus mean verdict
    calibration_error: Interval
    calibration_error_by_chance: float | None  # what perfect probabilities of these hits would show


_NONE = Interval(None, None, None)


def judged_figures(hits: Sequence[ShownHit], judgements: Iterable[Judgement], n_resamples: int = 1000) -> JudgedFigures:
    """Compare the hits of a search with verdicts. Hits that nobody judged are unknown and do not count.

    The means are weighted by one over the probability that a hit was sampled (Hajek 1971), nDCG is not.
    """
    verdicts = {one.pair: one for one in pair_verdicts(judgements)}
    known = [(hit, verdicts[hit.pair]) for hit in hits if hit.pair in verdicts]
    if not known:
        raise UserError("none of the hits was judged; judge some on the page of sfumato serve INDEX --judgements FILE")
    yes = np.array([one.yes for _, one in known])
    weight = np.array([one.weight for _, one in known])
    first = np.array([hit.rank == 1 for hit, _ in known])
    names = [hit.query for hit, _ in known]
    groups = np.unique(names, return_inverse=True)[1]
    ranked = defaultdict[str, list[tuple[int, float]]](list)
    for hit, one in known:
        ranked[hit.query].append((hit.rank, one.yes))
    ndcg = {query: condensed_ndcg([y for _, y in sorted(own)]) for query, own in ranked.items()}
    # The value of a query stands at its first row, so that a resample counts it once.
    row = {query: i for i, query in reversed(list(enumerate(names)))}
    at_first = np.array([row[query] == i and not math.isnan(ndcg[query]) for i, query in enumerate(names)])
    statistics = {
        "precision": mean_statistic(yes, weight),
        "first": mean_statistic(yes, weight * first),
        "ndcg": mean_statistic(np.nan_to_num([ndcg[query] for query in names]), at_first),
    }
    chance, said = None, [hit.probability for hit, _ in known]
    if (p := np.array([math.nan if q is None else q for q in said])).size and not np.isnan(p).any():
        statistics |= {"said": mean_statistic(p, weight), "excess": mean_statistic(p - yes, weight)}
        statistics["calibration_error"], chance = _calibration(p, yes, weight)
    found = bootstrap(statistics, len(known), n_resamples=n_resamples, groups=groups)
    found = dict.fromkeys(("said", "excess", "calibration_error"), _NONE) | found
    return JudgedFigures(len(known), len(ranked), len(known) / len(hits), **found, calibration_error_by_chance=chance)


def _calibration(p: np.ndarray, yes: np.ndarray, weight: np.ndarray) -> tuple[Statistic, float]:
    """The calibration error, and that of perfect probabilities; in bins of ten verdicts at least."""
    n_bins = max(1, min(N_BINS, len(p) // _VERDICTS_A_BIN))
    random = np.random.default_rng(0)
    outcomes = (random.random(len(p)) < p for _ in range(100))
    perfect = [on_all(calibration_error_statistic(p, one, weight, n_bins=n_bins), len(p)) for one in outcomes]
    return calibration_error_statistic(p, yes, weight, n_bins=n_bins), float(np.mean(perfect))
