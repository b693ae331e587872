"""The commands that study a model, its data and several runs: audit, report, table."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfumato.cli.common import (
    UNCERTAINTY,
    AsJson,
    DataOverrides,
    DataRecipe,
    Device,
    ModelName,
    OnData,
    check_out_file,
    check_out_folder,
    command,
    flag,
    is_run,
    open_model_on_data,
    parse_names,
    print_result,
    rare,
    word,
)
from sfumato.errors import UserError, need

if TYPE_CHECKING:
    from sfumato.gaussian import ScalarUncertainty


@command()
def audit(
    model: ModelName,
    overrides: DataOverrides = None,
    data: DataRecipe = None,
    split: str | None = flag(None, "Split of the data. Default: test; with --cross-fit train."),
    parts: int = flag(
        0, "Audit train in K parts, each by a model trained on the others; 0: by the model.", "--cross-fit", metavar="K"
    ),
    top: int = flag(100, "Number of pairs of each kind on the page and in audit.json.", min=0),
    parquet: bool = flag(False, "Also write the tables as Parquet, with the file of each image.", "--parquet"),
    out: Path | None = flag(None, "Folder to write. Default: audit-SPLIT in the run's folder, with --data here."),
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find pairs of a data set that may be wrong or missing.

    Writes listed pairs that are probably wrong, and unlisted pairs that probably match, to tables and a page.
    """
    from sfumato import __version__
    from sfumato.reports.audit import AUDIT_PAGE, print_audit, write_audit
    from sfumato.workflows.audit import audit_model, cross_fit

    if parts and split not in (None, "train"):
        raise UserError(f"--cross-fit audits the split train only; leave --split {split} out")
    if parts and not is_run(model):
        raise UserError(f"--cross-fit needs a run folder, whose recipe it trains with; {model} is not a run folder")
    if parquet:
        with need("parquet", "--parquet needs pyarrow"):
            import pyarrow.parquet  # noqa: F401
    split = split or ("train" if parts else "test")
    opened = open_model_on_data(model, data, overrides, split, device, purpose="audit")
    split = opened.split
    folder = opened.folder(out, f"audit-{split}")
    check_out_folder(folder)
    if parts and opened.run is not None:
        result = cross_fit(opened.run, opened.data, parts, folder)
    else:
        name = Path(model).resolve().name if opened.run is not None else opened.name
        result = audit_model(opened.model, opened.data, split, name=name, seen=opened.same_data and split == "train")
    figures = write_audit(result, folder, top, __version__, parquet=parquet)
    if as_json:
        return print(json.dumps(figures | {"out": str(folder)}))
    print_audit(figures)
    print(f"page: {folder / AUDIT_PAGE}")
    if parquet:
        print(f"tables: {folder / 'pairs.parquet'}, {folder / 'missing.parquet'}")


@command()
def report(
    on: OnData,
    out: Path | None = flag(
        None, "HTML file to write. Default: report-SPLIT.html in the run's folder, with --data here."
    ),
    uncertainty: str = flag("total_variance", UNCERTAINTY),
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about a model.

    It shows figures, uncertainty, calibration, and right and wrong results with their images.
    """
    from sfumato.charts import require_matplotlib
    from sfumato.evaluation.protocols import EvaluationOptions
    from sfumato.reports.report import report_model, report_run

    require_matplotlib()
    measure = EvaluationOptions(uncertainty=cast("ScalarUncertainty", uncertainty)).uncertainty
    opened = on.open("report on")
    split = opened.split
    path = opened.folder(out, f"report-{split}.html")
    check_out_file(path)
    if opened.own_run is not None:
        page, path = report_run(opened.own_run, split, out, uncertainty=measure)
    else:
        page = report_model(opened.model, opened.data, split, path, name=opened.name, uncertainty=measure)
    size = path.stat().st_size
    result: dict[str, Any] = {"out": str(path), "bytes": size, **page.to_json()}
    print_result(result, as_json, f"a page of {size / 1e6:.1f} MB: {path}")


@dataclass(frozen=True)
class RunsFlags:
    """What makes a table of runs instead of one of a paper."""

    group: str | None = flag(
        None,
        "Table of the runs of --runs: keys of the recipe, with commas, whose values name the rows.",
        metavar="KEYS",
    )
    vary: list[str] | None = flag(
        None, "Train RECIPE (the first word) with each value, and make the table; repeatable.", metavar="KEY=V,V"
    )
    metrics: str | None = flag(
        None,
        "Columns of a table of runs, with commas. A wrong one lists them.",
        show_default="rsum,t2i.recall@1,i2t.recall@1",
    )
    distance: str | None = flag(
        None, "Distances that runs are ranked by, with commas. Default: each run's own.", metavar="NAMES"
    )
    split: str | None = rare(None, "Split that runs are measured on. Default: test.")


@command()
def table(
    *,
    name: str | None = word(None, "Folder of a run; with --vary a recipe.", "RUN"),
    overrides: list[str] | None = word(
        None, "More runs; with --vary changes to the recipe, e.g. train.epochs=5.", "RUN or SECTION.KEY=VALUE"
    ),
    seeds: int = flag(1, "Number of runs of each row of --vary, with the following seeds.", min=1),
    runs: list[Path] | None = flag(
        None, "Runs of the table, e.g. --runs runs/*; with --vary the folder to train in.", show_default="runs/tables"
    ),
    of_runs: RunsFlags,
    out: Path | None = flag(None, "Folder for the table in JSON, Markdown and LaTeX."),
    device: Device = "auto",
    latex: bool = flag(False, "Print the table as LaTeX, for the package booktabs.", "--latex"),
    as_json: AsJson = False,
) -> None:
    """Make a table of your runs.

    Methods by metrics, mean and deviation over seeds, and what is best. --vary KEY=V,V RECIPE trains the runs first.
    The same command goes on where it was interrupted.
    """
    _table_of_runs(name, [*(overrides or [])], runs, of_runs, seeds, out, device, latex, as_json)


_RUNS = Path("runs/tables")


def _table_of_runs(
    name: str | None,
    words: list[str],
    runs: list[Path] | None,
    flags: RunsFlags,
    seeds: int,
    out: Path | None,
    device: str,
    latex: bool,
    as_json: bool,
) -> None:
    """Make a table of runs that are there, or of a grid."""
    from sfumato.models.run import choose_device
    from sfumato.reports.runs_tables import print_runs_table, runs_latex, write_runs_table
    from sfumato.workflows.table import (
        METRICS,
        TableOptions,
        check_metrics,
        find_runs,
        plan_grid,
        read_vary,
        table_of_grid,
        table_of_runs,
    )

    keys = parse_names(flags.group or "")
    metrics, distances = (tuple(parse_names(names or "")) for names in (flags.metrics, flags.distance))
    options = TableOptions(metrics or METRICS, distances, flags.split or "test")
    check_metrics(options.metrics)
    if out is not None:
        check_out_folder(out)
    if flags.vary:
        grid = read_vary(flags.vary)
        if name is None or keys or len(runs or []) > 1:
            raise UserError(
                "--vary trains one recipe into one folder: sfumato table RECIPE --vary KEY=V,V [--runs FOLDER]"
            )
        recipes = plan_grid(name, words, grid, seeds)
        made = table_of_grid(recipes, tuple(grid), runs[0] if runs else _RUNS, options, device=choose_device(device))
    else:
        if seeds > 1:
            raise UserError("--seeds is the number of runs to train; the runs of --runs have their seeds, leave it out")
        folders, notes = find_runs([*(runs or ([] if name else [_RUNS])), *filter(None, [name]), *words])
        made = table_of_runs(folders, keys, options, notes=notes, device=choose_device(device))
    if out is not None:
        write_runs_table(made, out)
    if as_json:
        return print(json.dumps(made.to_json(), ensure_ascii=False))
    if latex:
        return print(runs_latex(made), end="")
    print_runs_table(made)
    if out is not None:
        print(f"written to {out}")
