"""The extras of the command `evaluate`: strategies, single queries, comparison with another run, published rows."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sfumato.errors import UserError
from sfumato.evaluation.compare import Difference, PublishedRow, common_figures, compare_per_query, published_rows
from sfumato.evaluation.embedded_input import EmbeddedSet, Measured
from sfumato.evaluation.per_query import PerQuery, check_per_query_path, per_query_table, write_per_query
from sfumato.evaluation.strategies import StrategyResult, choose_strategies, evaluate_strategies


@dataclass(frozen=True)
class More:
    """The requested extras beside the figures.

    Attributes:
        strategies: "all", or names of STRATEGIES with commas between them.
        engine: of the strategies with FAISS.
        candidates: number of items that FAISS finds for re-ranking.
        per_query: file for the results of single queries.
        compared_with: name of the other run; None for no comparison.
        published: whether to add the rows of published tables.
        n_resamples: number of resamples of the comparison.

    Raises:
        ValueError: a strategy is unknown.
        UserError: single queries of several strategies are wanted at once, or their file has an unknown ending.
    """

    strategies: str | None = None
    engine: str = "ivf"
    candidates: int = 100
    per_query: Path | None = None
    compared_with: str | None = None
    published: bool = False
    n_resamples: int = 2000

    def __post_init__(self) -> None:
        chosen = choose_strategies(self.strategies) if self.strategies is not None else []
        if len(chosen) > 1 and (self.per_query or self.compared_with):
            raise UserError("single queries can be written and compared for one ranking; name at most one strategy")
        if self.per_query:
            check_per_query_path(self.per_query)
            if not self.per_query.parent.is_dir():
                raise UserError(f"cannot write {self.per_query}: the folder {self.per_query.parent} does not exist")

    @property
    def anything(self) -> bool:
        """Whether there is any extra."""
        return bool(self.strategies is not None or self.per_query or self.compared_with or self.published)


@dataclass(frozen=True, eq=False)
class MoreResults:
    """The results of :class:`More`.

    Attributes:
        strategies: by name.
        per_query: the file that was written.
        compared_with: name of the other run.
        differences: this run minus the other, for the metrics that each ground truth reports; positive is better than
            the other.
        published: rows of published tables that share figures with this evaluation.
        own: the figures of this evaluation in the form of the published ones.
    """

    strategies: dict[str, StrategyResult]
    per_query: Path | None
    compared_with: str | None
    differences: list[Difference]
    published: list[PublishedRow]
    own: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values.

        Returns:
            Plain values of the extras that were wanted.
        """
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
    measured: Measured, embedded: EmbeddedSet | None, more: More, other: PerQuery | None = None
) -> MoreResults:
    """Compute the extras.

    Args:
        measured: the evaluation.
        embedded: the embeddings that were evaluated; None for ranked lists, which have no strategies.
        more: the extras that are wanted.
        other: table of single queries of the run to compare with.

    Returns:
        The extras.

    Raises:
        UserError: strategies are wanted of ranked lists, or no published table has these figures.
        ValueError: the other run has different queries, or an option does not fit.
    """
    strategies: dict[str, StrategyResult] = {}
    ranks, figures = measured.ranks, measured.figures
    if more.strategies is not None:
        if embedded is None:
            raise UserError("ranked lists are already ranked; strategies need embeddings")
        strategies = evaluate_strategies(
            embedded.images, embedded.texts, embedded.image_ids, embedded.text_ids, embedded.ground_truths,
            choose_strategies(more.strategies), engine=more.engine, candidates=more.candidates,
        )  # fmt: skip
        if len(strategies) == 1:
            (only,) = strategies.values()
            ranks, figures = only.ranks, only.figures
    differences: list[Difference] = []
    if more.per_query or other is not None:
        table = per_query_table(ranks, None if embedded is None else embedded.uncertainty())
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
    if more.published:
        own = common_figures(figures)
        tables = ("C.7",) if strategies else ("1",)
        rows = [row for table in tables for row in published_rows(table=table) if own.keys() & row.figures.keys()]
        if not rows:
            raise UserError(
                f"no published table has figures of {', '.join(figures)}; there are tables for --benchmark coco, with"
                " CxC and ECCV Caption"
            )
    return MoreResults(strategies, more.per_query, more.compared_with, differences, rows, own)
