"""`python -m papers runs`: tables with tests, grids, comparisons, retrieval strategies and published figures."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from papers.commands import app
from sfumato.cli.common import AsJson, OnData, check_out_folder, command, flag, parse_names, rare, word
from sfumato.cli.evaluate_commands import BenchmarkFlags

if TYPE_CHECKING:
    from papers.runs.table import RunsTable, TableOptions

runs = typer.Typer(help="Compare runs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(runs, name="runs")


@dataclass(frozen=True)
class TableFlags:
    """What a table of runs shows, and where it goes."""

    metrics: str | None = flag(
        None, "Columns, with commas. A wrong one lists them.", show_default="rsum,t2i.recall@1,i2t.recall@1"
    )
    distance: str | None = flag(
        None, "Distances that runs are ranked by, with commas. Default: each run's own.", metavar="NAMES"
    )
    split: str = flag("test", "Split that runs are measured on.")
    out: Path | None = flag(None, "Folder for the table in JSON, Markdown and LaTeX.")
    latex: bool = flag(False, "Print the table as LaTeX, for the package booktabs.", "--latex")
    as_json: AsJson = False

    def options(self) -> "TableOptions":
        """What the table shows; refuses, before the work, what it cannot show."""
        from papers.runs.table import TableOptions, check_metrics
        from sfumato.workflows.evaluation import METRICS

        metrics, distances = (tuple(parse_names(names or "")) for names in (self.metrics, self.distance))
        check_metrics(metrics)
        if self.out is not None:
            check_out_folder(self.out)
        return TableOptions(metrics or METRICS, distances, self.split)

    def show(self, made: "RunsTable") -> None:
        """Print and write the table."""
        from papers.runs.printed import print_runs_table, runs_latex, write_runs_table

        if self.out is not None:
            write_runs_table(made, self.out)
        if self.as_json:
            print(json.dumps(made.to_json(), ensure_ascii=False))
        elif self.latex:
            print(runs_latex(made), end="")
        else:
            print_runs_table(made)


@command(runs)
def table(
    *,
    runs: list[Path] = word(..., "Folders of runs.", "RUN"),
    group: str = flag("", "Keys of the recipe, with commas, whose values name the rows.", metavar="KEYS"),
    flags: TableFlags,
) -> None:
    """Make a table of runs that says what is best.

    Methods by metrics, mean and deviation over seeds. The best figure of a column is marked if it differs from that of
    every other row, by a paired randomisation test over the queries. `sfumato evaluate table` has the means alone.
    """
    from papers.runs.table import table_of_runs
    from sfumato.models.run import choose_device

    options = flags.options()
    flags.show(table_of_runs(runs, parse_names(group), options, device=choose_device()))


@command(runs)
def grid(
    *,
    recipe: str = word(..., "Recipe (path or name).", "RECIPE"),
    overrides: list[str] | None = word(None, "Changes to it, e.g. train.epochs=5.", "SECTION.KEY=VALUE"),
    vary: list[str] = flag(..., "Train with each value, and make the table; repeatable.", metavar="KEY=V,V"),
    seeds: int = flag(1, "Number of runs of each row, with the following seeds.", min=1),
    runs: Path = flag(Path("runs/tables"), "Folder of the runs; finished ones are reused."),
    flags: TableFlags,
) -> None:
    """Train a recipe with all combinations of values, and make a table of the runs."""
    from papers.runs.grid import plan_grid, read_vary, table_of_grid
    from sfumato.models.run import choose_device

    options, values = flags.options(), read_vary(vary)
    recipes = plan_grid(recipe, overrides or [], values, seeds)
    flags.show(table_of_grid(recipes, tuple(values), runs, options, device=choose_device()))


@command(runs)
def compare(
    first: Path = word(..., "File of single queries, of sfumato evaluate ... --per-query.", "FILE"),
    second: Path = word(..., "Another one, of the same queries.", "FILE"),
    bootstrap: int = flag(2000, "Number of resamples.", min=1),
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations query by query: differences (second - first), intervals and a paired test."""
    from papers.runs.paired import compare_per_query, read_per_query
    from papers.runs.printed import print_differences

    found = compare_per_query(read_per_query(first), read_per_query(second), n_resamples=bootstrap)
    if as_json:
        return print(json.dumps({"differences": [one.to_json() for one in found]}))
    print_differences(found, f"{second}, compared with {first} (other)")


@command(runs)
def strategies(
    *,
    on: OnData,
    names: str = flag(
        "all",
        "Strategies: all (those for large galleries), pcme (those of PCME's table E.1), or some of mean, wasserstein2,"
        " csd, faiss_mean, faiss_rerank, faiss_lifted, kl, js, elk, bhattacharyya, average_l2, match_probability.",
        "--strategies",
    ),
    engine: str = flag("ivf", "Engine of the FAISS strategies: ivf, hnsw or exact."),
    candidates: int = flag(100, "Number of candidates that FAISS returns to be re-ranked.", min=1),
    samples: int | None = rare(None, "Samples of an embedding for average_l2 and match_probability.", min=1),
    benchmark: BenchmarkFlags,
    as_json: AsJson = False,
) -> None:
    """Rank one model's embeddings by several strategies: tables C.7 of PCME++ and E.1 of PCME."""
    from papers.runs.printed import print_strategies
    from papers.runs.strategies import choose_strategies, evaluate_strategies
    from sfumato.evaluation.protocols import EvaluationOptions
    from sfumato.matching import MATCH_PROBABILITY
    from sfumato.models.embed import embed_for_evaluation

    chosen = choose_strategies(names)
    truths, opened = benchmark.read(on.split), on.open("evaluate it on")
    by_probability = any(one.distance == MATCH_PROBABILITY for one in chosen)
    embedded = embed_for_evaluation(opened.model, opened.data, opened.split, truths=truths)
    results = evaluate_strategies(
        embedded, chosen, engine=engine, candidates=candidates, evaluation=EvaluationOptions(samples),
        match_probability=opened.model.ranking_distance(MATCH_PROBABILITY) if by_probability else None,
    )  # fmt: skip
    if as_json:
        return print(json.dumps({name: one.to_json() for name, one in results.items()}))
    print_strategies(results)


@command(runs)
def published(
    figures: Path = word(..., "JSON of sfumato evaluate --benchmark, e.g. RUN/benchmark-coco-test-csd.json.", "FILE"),
    tables: str | None = flag(None, "Published tables, with commas, e.g. 'PCME++ C.3,PCME E.4'."),
    as_json: AsJson = False,
) -> None:
    """Show the papers' figures beside the own ones."""
    from papers.runs.published import beside_published, print_published, to_json

    rows, own = beside_published(figures, None if tables is None else parse_names(tables))
    if as_json:
        return print(json.dumps(to_json(rows, own), ensure_ascii=False))
    print_published(rows, own)


@command(app)
def eccv(
    *,
    runs: list[Path] = word(..., "Folders of runs on the same data; more models make a fairer pool.", "RUN"),
    judgements: Path | None = flag(
        None, "CSV with the columns image, caption_id, yes and no. Without: the pool alone."
    ),
    k: int = flag(5, "Number of candidates of every query by each model.", min=1),
    split: str = flag("test", "Split that is searched."),
    out: Path = flag(Path("eccv"), "Folder for pool.csv and the lists of matches in ECCV Caption's layout."),
    as_json: AsJson = False,
) -> None:
    """Make an ECCV Caption of one's own: models propose, people judge, and every model is measured on the matches."""
    from papers.runs import eccv as made

    check_out_folder(out)
    pool = made.read_pool(runs, split, k)
    judged = made.read_judgements(judgements, pool.data) if judgements else {}
    made.write_pool(pool, judged, out)
    if not judged:
        return print(json.dumps({"proposed": len(pool.proposed), "out": str(out)}) if as_json else f"pool: {out}")
    found = made.measure_pool(pool, judged)
    if as_json:
        return print(json.dumps(found | {"out": str(out)}, ensure_ascii=False))
    made.pool_table(found).show()
    print(f"written to {out}")
