"""Results of single queries in memory and as Parquet or CSV, and comparisons of runs: over seeds, query by query, and
with the figures of published tables.
"""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.distances import Distance, get_distance
from sfumato.errors import UserError, need
from sfumato.evaluation.benchmarks import BenchmarkRanks, EmbeddedSet
from sfumato.evaluation.embedded_input import Measured
from sfumato.evaluation.ground_truth import RECALLS
from sfumato.evaluation.papers import DEFAULT_TABLES, STRATEGY_TABLES, PublishedRow, own_figures, published_rows
from sfumato.evaluation.protocols import EvaluationOptions
from sfumato.evaluation.strategies import (
    STRATEGY_SETS,
    StrategyResult,
    choose_strategies,
    distance_of_score,
    evaluate_strategies,
)
from sfumato.files import write_atomically
from sfumato.matching import MATCH_PROBABILITY
from sfumato.metrics.bootstrap import Interval, bootstrap, mean_statistic
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import UNLISTED

_CHUNK = 2**22
"""Number of random signs in memory at once."""


# ---------------------------------------------------------------- single queries
COMPARED = ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")
"""Metrics of single queries that are compared; larger is better."""

PER_QUERY_ENDINGS = (".parquet", ".csv")
"""Endings of the files of single queries."""

_KEYS = {"truth": "ground_truth", "direction": "direction", "query": "query", "group": "group"}
"""Attribute of :class:`PerQuery` by name of the column on disk."""
_METRICS = (*COMPARED, "best_rank")


@dataclass(frozen=True, eq=False)
class PerQuery:
    """Metrics of single queries, one row for each ground truth, direction and query that has a relevant item."""

    ground_truth: np.ndarray  # (r,) names of ground truths; ground truth, direction and query are the key of a row
    direction: np.ndarray  # (r,) "i2t" or "t2i"
    query: np.ndarray  # (r,) ids
    group: np.ndarray
    figures: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        for name, values in self.columns().items():
            if values.shape != self.query.shape:
                raise ValueError(f"PerQuery: column {name} has {len(values)} rows, query has {len(self.query)}")
        seen = set()
        for key in self.keys():
            if key in seen:
                raise ValueError(f"PerQuery: {query_name(key)} occurs twice")
            seen.add(key)

    def __len__(self) -> int:
        return len(self.query)

    def keys(self) -> list[tuple[str, str, str]]:
        """List the keys. Returns (ground truth, direction, query)."""
        return list(zip(self.ground_truth.tolist(), self.direction.tolist(), self.query.tolist(), strict=True))

    def columns(self) -> dict[str, np.ndarray]:
        """List the columns. Returns (r,)."""
        return {name: getattr(self, attribute) for name, attribute in _KEYS.items()} | self.figures

    def select(self, index: np.ndarray) -> "PerQuery":
        """Choose rows. index (k,)."""
        columns = self.columns()
        return _from_columns({name: values[index] for name, values in columns.items()})


def _from_columns(columns: Mapping[str, np.ndarray]) -> PerQuery:
    keys = {attribute: columns[name] for name, attribute in _KEYS.items()}
    figures = {name: values for name, values in columns.items() if name not in _KEYS}
    return PerQuery(**keys, figures=figures)


def query_name(key: tuple[str, str, str]) -> str:
    """Name a row in a message."""
    return f"query {key[2]!r} ({key[0]}, {key[1]})"


def per_query_table(ranks: BenchmarkRanks, uncertainty: Mapping[str, Mapping[str, float]] | None = None) -> PerQuery:
    """Make the table of single queries of one evaluation."""
    parts: list[PerQuery] = []
    for name, both in ranks.items():
        for direction, of in both.items():
            ids, figures = of.per_query(_METRICS if all(p.depth is None for p in of.parts) else None)
            if "best_rank" in figures:
                best = figures["best_rank"]
                figures["best_rank"] = np.where(best >= UNLISTED, np.where(np.isinf(best), np.inf, np.nan), best)
            missing = np.full(len(ids), np.nan)
            own = (uncertainty or {}).get(direction)
            values = missing if own is None else np.array([own.get(i, math.nan) for i in ids], float)
            columns = {metric: figures.get(metric, missing) for metric in _METRICS} | {"uncertainty": values}
            groups = [group for part in of.parts for group in _groups(part.relevance, part.queries)]
            names = of.ground_truth.image_ids if direction == "i2t" else of.ground_truth.text_ids
            parts.append(
                PerQuery(
                    np.full(len(ids), name), np.full(len(ids), direction), _strings(ids),
                    _strings([names[g] for g in groups]), columns,
                )
            )  # fmt: skip
    if not parts:
        raise ValueError("per_query_table: there is no ground truth")
    columns_of = [part.columns() for part in parts]
    return _from_columns({name: np.concatenate([c[name] for c in columns_of]) for name in columns_of[0]})


def queries_by_image(ranks: BenchmarkRanks) -> PerQuery:
    """The table of single queries of one ground truth; the queries of an image are one group in both directions.

    Images with the same texts are one image. A text of several images goes with the first of them.
    """
    table = per_query_table(ranks)
    (both,) = ranks.values()
    truth = next(iter(both.values())).ground_truth
    images = table.direction == "i2t"
    group = dict(zip(table.query[images].tolist(), table.group[images].tolist(), strict=True))
    first: dict[str, str] = {}
    for i, image in enumerate(truth.image_ids):
        for text in truth.i2t.indices[truth.i2t.indptr[i] : truth.i2t.indptr[i + 1]]:
            first.setdefault(truth.text_ids[text], group.get(image, image))
    names = [
        group[query] if direction == "i2t" else first[query]
        for direction, query in zip(table.direction.tolist(), table.query.tolist(), strict=True)
    ]
    return replace(table, group=_strings(names))


RSUM = "rsum"

BOTH = "both"
"""The direction of the rows of :func:`with_rsum`."""


def with_rsum(table: PerQuery) -> PerQuery:
    """The table, and below it what each query adds to the rsum of both directions: its mean over these rows is rsum."""
    weight = np.zeros(len(table))
    for direction in ("i2t", "t2i"):
        chosen = table.direction == direction
        weight[chosen] = len(table) / max(1, int(chosen.sum()))
    nothing = np.full(len(table), np.nan)
    rsum = weight * sum(table.figures[name] for name in RECALLS)
    names = _strings([f"{d} {q}" for d, q in zip(table.direction.tolist(), table.query.tolist(), strict=True)])
    figures = {name: np.concatenate([table.figures[name], nothing]) for name in COMPARED}
    return PerQuery(
        np.concatenate([table.ground_truth] * 2),
        np.concatenate([table.direction, np.full(len(table), BOTH)]),
        np.concatenate([table.query, names]),
        np.concatenate([table.group] * 2),
        figures | {RSUM: np.concatenate([nothing, rsum])},
    )


def mean_per_query(tables: Sequence[PerQuery]) -> PerQuery:
    """The mean of each query over several runs."""
    same = [table.select(_aligned(tables[0], table)) for table in tables]
    figures = {name: np.mean([table.figures[name] for table in same], axis=0) for name in tables[0].figures}
    return replace(tables[0], figures=figures)


def _strings(values: Sequence[str]) -> np.ndarray:
    return np.array(values, dtype=np.str_) if len(values) else np.empty(0, np.str_)


def _groups(relevance: Relevance, queries: np.ndarray) -> list[int]:
    """For each query that has a relevant item, the first query of the part with the same relevant items."""
    first: dict[bytes, int] = {}
    outside = relevance.totals - relevance.counts
    groups = []
    for i in np.flatnonzero(relevance.totals > 0):
        items = relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]
        # Items outside of the gallery are unknown, so a query that has some is a group of its own.
        key = items.tobytes() if not outside[i] else b"outside %d" % i
        groups.append(first.setdefault(key, int(queries[i])))
    return groups


# ---------------------------------------------------------------- files


def write_per_query(path: str | Path, table: PerQuery) -> None:
    """Write a table atomically as Parquet or CSV. Undefined metrics are empty."""
    path = Path(path)
    check_per_query_path(path)
    columns = table.columns()
    if path.suffix == ".parquet":
        arrow, parquet = _pyarrow()
        arrays = {
            name: arrow.array(values.tolist(), arrow.string())
            if name in _KEYS
            else arrow.array(values, arrow.float64(), from_pandas=True)
            for name, values in columns.items()
        }
        sink = io.BytesIO()
        parquet.write_table(arrow.table(arrays), sink)
        write_atomically(path, sink.getvalue())
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    # repr of a float is the shortest text that reads back as the same number.
    shown = [
        values.tolist() if name in _KEYS else ["" if math.isnan(v) else repr(v) for v in values.tolist()]
        for name, values in columns.items()
    ]
    writer.writerows(zip(*shown, strict=True))
    write_atomically(path, text.getvalue())


def check_per_query_path(path: Path) -> None:
    """Check before the computation that :func:`write_per_query` can write this file."""
    if path.suffix not in PER_QUERY_ENDINGS:
        raise UserError(
            f"{path}: results of single queries must be a .parquet or .csv file, got {path.suffix or 'no ending'}"
        )
    if path.suffix == ".parquet":
        _pyarrow()


def read_per_query(path: str | Path) -> PerQuery:
    """Read a file of :func:`write_per_query`."""
    path = Path(path)
    check_per_query_path(path)
    if not path.is_file():
        raise UserError(
            f"there are no results of single queries at {path}; write them with `sfumato evaluate ... --per-query`"
        )
    columns = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    if lacking := [name for name in _KEYS if name not in columns]:
        raise UserError(f"{path}: no column {lacking[0]!r}; expected {', '.join(_KEYS)} and metrics")
    figures = {}
    for name in columns.keys() - set(_KEYS):
        try:
            figures[name] = np.array([math.nan if v in (None, "") else float(v) for v in columns[name]], float)
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: column {name!r} holds a value that is not a number ({error})") from error
    try:
        return _from_columns({name: _strings([str(v) for v in columns[name]]) for name in _KEYS} | figures)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    arrow, parquet = _pyarrow()
    try:
        columns: dict[str, list[Any]] = parquet.read_table(io.BytesIO(path.read_bytes())).to_pydict()
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a complete Parquet file ({error})") from error
    return columns


def _read_csv(path: Path) -> dict[str, list[Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            rows = list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not CSV in UTF-8 ({error})") from error
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise UserError(f"{path}:{number}: {len(row)} values for {len(header)} columns")
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def _pyarrow() -> tuple[Any, Any]:
    with need("parquet", "Parquet files need pyarrow", ", or use a name that ends in .csv"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow, pyarrow.parquet


# ---------------------------------------------------------------- two runs
@dataclass(frozen=True)
class Difference:
    """The difference of two runs in a metric on the same queries."""

    ground_truth: str  # its name
    direction: str  # "i2t" or "t2i"
    metric: str  # its name; larger is better
    n_queries: int  # number of queries that have it
    n_groups: int  # number of groups of queries that were resampled together
    first: float  # mean of the first run over queries
    second: float  # mean of the second run over queries
    difference: Interval  # second - first, with its bootstrap interval
    p_value: float

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("ground_truth", "difference")}
        gap = self.difference
        return {"truth": self.ground_truth} | plain | {"difference": gap.value, "low": gap.low, "high": gap.high}


def compare_per_query(
    first: PerQuery,
    second: PerQuery,
    *,
    metrics: Sequence[str] = COMPARED,
    n_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> list[Difference]:
    """Compare two runs query by query: bootstrap intervals of the difference, and a test by random swaps."""
    if n_resamples < 1:
        raise ValueError(f"compare_per_query: n_resamples must be at least 1, got {n_resamples}")
    second = second.select(_aligned(first, second))
    if (other := np.flatnonzero(first.group != second.group)).size:
        i = int(other[0])
        raise ValueError(
            f"compare_per_query: {query_name(first.keys()[i])} is in group {str(first.group[i])!r} of the first run and"
            f" in {str(second.group[i])!r} of the second; were they evaluated against the same ground truth?"
        )
    results = []
    sides = zip(first.ground_truth.tolist(), first.direction.tolist(), strict=True)
    for ground_truth, direction in dict.fromkeys(sides):
        chosen = np.flatnonzero((first.ground_truth == ground_truth) & (first.direction == direction))
        groups = np.unique(first.group[chosen], return_inverse=True)[1]
        pairs = {}
        for metric in metrics:
            if metric in first.figures and metric in second.figures:
                a, b = first.figures[metric][chosen], second.figures[metric][chosen]
                if np.isfinite(a).all() and np.isfinite(b).all():
                    pairs[metric] = (a, b)
        if not pairs:
            continue
        gaps = {metric: b - a for metric, (a, b) in pairs.items()}
        intervals = bootstrap(
            {metric: mean_statistic(gap) for metric, gap in gaps.items()},
            len(chosen), n_resamples=n_resamples, level=level, seed=seed, groups=groups,
        )  # fmt: skip
        p_values = swap_test(gaps, groups, n_resamples=n_resamples, seed=seed)
        results += [
            Difference(
                ground_truth, direction, metric, len(chosen), int(groups.max()) + 1,
                float(a.mean()), float(b.mean()), intervals[metric], p_values[metric],
            )
            for metric, (a, b) in pairs.items()
        ]  # fmt: skip
    if not results:
        raise ValueError(
            f"compare_per_query: no metric among {', '.join(metrics)} is defined for all queries of both runs"
        )
    return results


def swap_test(
    gaps: Mapping[str, np.ndarray], groups: np.ndarray, *, n_resamples: int = 2000, seed: int = 0
) -> dict[str, float]:
    """Paired randomisation test of the mean difference, with a random sign for every group of queries.

    Paper: Smucker, Allan and Carterette, "A comparison of statistical significance tests for information retrieval
    evaluation", CIKM 2007.

    groups (n,).
    """
    names = list(gaps)
    g = int(groups.max(initial=-1)) + 1
    sums = np.stack([np.bincount(groups, weights=gaps[name], minlength=g) for name in names], axis=1)
    total = sums.sum(0)
    # A group with a difference of 0 has no effect with either sign.
    sums = sums[(sums != 0).any(1)]
    random, extreme = np.random.default_rng(seed), np.zeros(len(names))
    step = max(1, _CHUNK // max(len(sums), 1))
    for start in range(0, n_resamples, step):
        b = min(step, n_resamples - start)
        bits = np.unpackbits(random.integers(256, size=(b, -(-len(sums) // 8)), dtype=np.uint8), axis=1)[:, : len(sums)]
        swapped = total - 2 * (bits.astype(float) @ sums)
        # The tolerance lets sums that differ by rounding count as equal.
        extreme += (np.abs(swapped) >= np.abs(total) - 1e-9 * np.abs(sums).sum(0)).sum(0)
    return {name: float((1 + count) / (n_resamples + 1)) for name, count in zip(names, extreme, strict=True)}


def _aligned(first: PerQuery, second: PerQuery) -> np.ndarray:
    """(r,) positions of the first table's rows in the second."""
    position = {key: i for i, key in enumerate(second.keys())}
    own = first.keys()
    if missing := next((key for key in own if key not in position), None):
        raise ValueError(f"compare_per_query: {query_name(missing)} is in the first run but not in the second")
    if len(position) != len(own):
        known = set(own)
        extra = next(key for key in position if key not in known)
        raise ValueError(f"compare_per_query: {query_name(extra)} is in the second run but not in the first")
    return np.array([position[key] for key in own], np.int64)


# ---------------------------------------------------------------- several seeds
@dataclass(frozen=True)
class OverSeeds:
    """A figure over several seeds."""

    mean: float  # of the values
    deviation: float | None  # their standard deviation (n - 1); None for a single value
    values: tuple[float, ...]  # in the order of the runs, without undefined ones

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.deviation is None else f"{self.mean:.2f} ± {self.deviation:.2f}"


def main_figures(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Choose the figures that summarise several runs."""
    chosen: dict[str, float | None] = {
        f"{direction} {name}": 100 * result[direction][name] for direction in ("t2i", "i2t") for name in COMPARED
    }
    if "name" in result["i2t_by_kind"]:
        chosen |= {f"i2name {name}": 100 * result["i2t_by_kind"]["name"][name] for name in RECALLS}
    if "name" in result["t2i_by_kind"]:
        chosen["name2i recall@1"] = 100 * result["t2i_by_kind"]["name"]["recall@1"]
    chosen["rsum"] = 100 * result["rsum"]
    uncertainty, multiplicity = result["uncertainty"], result["multiplicity"]
    for direction in ("i2t", "t2i"):
        chosen[f"{direction} ten-bin correlation"] = uncertainty[direction]["correlation"] if uncertainty else None
    return chosen | {f"multiplicity {n}": multiplicity[n] if multiplicity else None for n in ("all", "balanced")}


def over_seeds(results: Sequence[Mapping[str, float | None]]) -> dict[str, OverSeeds]:
    """Mean and standard deviation of every figure over several runs."""
    summary = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = tuple(float(value) for result in results if (value := result.get(name)) is not None)
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else None
            summary[name] = OverSeeds(statistics.mean(values), deviation, values)
    return summary


_SMOKE = (
    "--subset: figures of a part of a benchmark are not comparable with published ones, because recall is higher in a"
    " smaller gallery; leave --published and --published-tables out, or evaluate on the whole benchmark"
)


@dataclass(frozen=True)
class More:
    """The requested extras beside the figures."""

    strategies: str | None = None  # a name in STRATEGY_SETS, or names of STRATEGIES with commas between them
    engine: str = "ivf"  # of the strategies with FAISS
    candidates: int = 100  # number of items that FAISS finds for re-ranking
    per_query: Path | None = None  # file for the results of single queries
    compared_with: str | None = None  # name of the other run; None for no comparison
    published: bool = False  # whether to add the rows of published tables
    tables: str | None = None
    n_resamples: int = 2000  # number of resamples of the comparison
    options: EvaluationOptions = field(default_factory=EvaluationOptions)

    def __post_init__(self) -> None:
        chosen = choose_strategies(self.strategies) if self.strategies is not None else []
        if len(chosen) > 1 and (self.per_query or self.compared_with):
            raise UserError("single queries can be written and compared for one ranking; name at most one strategy")
        for table in self.chosen_tables:
            published_rows(table)
        if self.per_query:
            check_per_query_path(self.per_query)
            if not self.per_query.parent.is_dir():
                raise UserError(f"cannot write {self.per_query}: the folder {self.per_query.parent} does not exist")

    @property
    def chosen_tables(self) -> tuple[str, ...]:
        """The published tables to show, in this order; those without a common figure are left out later."""
        if self.tables is not None:
            return tuple(name.strip() for name in self.tables.split(",") if name.strip())
        if not self.published:
            return ()
        return DEFAULT_TABLES if self.strategies is None else STRATEGY_TABLES

    def check_subset(self) -> None:
        """Check, before the work, that no published figure stands beside those of a part of a benchmark."""
        if self.chosen_tables:
            raise UserError(_SMOKE)

    def check_samples(self, score: str | Distance) -> None:
        """Check that a number of samples has an effect."""
        if self.options.n_samples is None or score == MATCH_PROBABILITY:
            return
        names = choose_strategies(self.strategies) if self.strategies is not None else []
        by = [distance_of_score(score), *(get_distance(s.distance) for s in names if s.distance != MATCH_PROBABILITY)]
        if not self.needs_match_probability and not any(distance.sampled for distance in by if distance is not None):
            name = score if isinstance(score, str) else score.name
            raise UserError(
                f"--samples is for distances that are estimated from samples, average_l2 and {MATCH_PROBABILITY};"
                f" {name} needs none. Leave --samples out, or rank by one of these"
            )

    @property
    def needs_match_probability(self) -> bool:
        """Whether a strategy ranks by the match probability of the model."""
        chosen = choose_strategies(self.strategies) if self.strategies is not None else []
        return any(strategy.distance == MATCH_PROBABILITY for strategy in chosen)

    @property
    def anything(self) -> bool:
        """Whether there is any extra."""
        return bool(self.strategies is not None or self.per_query or self.compared_with or self.chosen_tables)


@dataclass(frozen=True, eq=False)
class MoreResults:
    """The results of :class:`More`."""

    strategies: dict[str, StrategyResult]  # by name
    per_query: Path | None  # the file that was written
    compared_with: str | None  # name of the other run
    differences: list[Difference]
    published: list[PublishedRow]  # rows of published tables that share figures with this evaluation
    own: dict[str, float]  # the figures of this evaluation, see :func:`~sfumato.evaluation.papers.own_figures`
    left_out: tuple[str, ...] = ()  # strategies of the wanted set that need FAISS, which is not installed

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        result: dict[str, Any] = {}
        if self.strategies:
            result["strategies"] = {
                name: {"label": one.strategy.label, "seconds": one.seconds, "truths": one.figures}
                for name, one in self.strategies.items()
            }
        if self.per_query:
            result["per_query"] = str(self.per_query)
        if self.compared_with:
            result["comparison"] = {"with": self.compared_with, "differences": [d.to_json() for d in self.differences]}
        if self.published:
            result["published"] = {"own": self.own, "rows": [asdict(row) for row in self.published]}
        return result


def more_results(
    measured: Measured,
    embedded: EmbeddedSet | None,
    more: More,
    other: PerQuery | None = None,
    *,
    match_probability: Distance | None = None,
) -> MoreResults:
    """Compute the extras."""
    strategies: dict[str, StrategyResult] = {}
    left_out: tuple[str, ...] = ()
    ranks, figures = measured.ranks, measured.figures
    if more.strategies is not None:
        if embedded is None:
            raise UserError("ranked lists and scores are already ranked; strategies need embeddings")
        chosen = choose_strategies(more.strategies)
        if more.strategies in STRATEGY_SETS and more.engine != "exact" and find_spec("faiss") is None:
            left_out = tuple(strategy.name for strategy in chosen if strategy.indexed is not None)
            chosen = [strategy for strategy in chosen if strategy.indexed is None]
        strategies = evaluate_strategies(
            embedded, chosen, match_probability=match_probability, engine=more.engine,
            candidates=more.candidates, evaluation=more.options,
        )  # fmt: skip
        if len(strategies) == 1:
            (only,) = strategies.values()
            ranks, figures = only.ranks, only.figures
    differences: list[Difference] = []
    if more.per_query or other is not None:
        table = per_query_table(ranks, None if embedded is None else embedded.uncertainty(more.options.uncertainty))
        if more.per_query:
            write_per_query(more.per_query, table)
        if other is not None:
            differences = [
                d
                for d in compare_per_query(other, table, n_resamples=more.n_resamples)
                if d.metric in next(iter(ranks[d.ground_truth].values())).ground_truth.metrics
            ]
    rows: list[PublishedRow] = []
    own: dict[str, float] = {}
    if more.chosen_tables:
        if measured.subset is not None:
            raise UserError(_SMOKE)
        own = own_figures(figures, measured.uncertainty, measured.total_variance, measure=measured.uncertainty_measure)
        rows = [
            row
            for table in more.chosen_tables
            for row in published_rows(table)
            if any(row.own_name(name) in own for name in row.figures)
        ]
        if not rows:
            raise UserError(
                f"no published table has figures of {', '.join(figures)} (looked in {', '.join(more.chosen_tables)});"
                " published figures can stand beside --benchmark coco, flickr30k and cub"
            )
    return MoreResults(strategies, more.per_query, more.compared_with, differences, rows, own, left_out)
