"""The commands that study a model, its data and several runs: audit, report, table."""

import json
from pathlib import Path
from typing import Any

from sfumato.cli.common import (
    AsJson,
    DataOverrides,
    DataRecipe,
    ModelName,
    OnData,
    Split,
    check_out_file,
    check_out_folder,
    command,
    flag,
    is_run,
    open_model_on_data,
    parse_names,
    print_result,
    word,
)
from sfumato.errors import UserError


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
    out: Path | None = flag(None, "Folder to write. Default: audit-SPLIT in the run's folder, with --data here."),
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
    split = split or ("train" if parts else "test")
    opened = open_model_on_data(model, data, overrides, split, purpose="audit")
    split = opened.split
    folder = opened.folder(out, f"audit-{split}")
    check_out_folder(folder)
    if parts and opened.run is not None:
        result = cross_fit(opened.run, opened.data, parts, folder)
    else:
        name = Path(model).resolve().name if opened.run is not None else opened.name
        result = audit_model(opened.model, opened.data, split, name=name, seen=opened.same_data and split == "train")
    figures = write_audit(result, folder, top, __version__)
    if as_json:
        return print(json.dumps(figures | {"out": str(folder)}))
    print_audit(figures)
    print(f"page: {folder / AUDIT_PAGE}")


@command()
def report(
    on: OnData,
    out: Path | None = flag(
        None, "HTML file to write. Default: report-SPLIT.html in the run's folder, with --data here."
    ),
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about a model.

    It shows figures, uncertainty, calibration, and right and wrong results with their images.
    """
    from sfumato.charts import require_matplotlib
    from sfumato.reports.report import report_model, report_run

    require_matplotlib()
    opened = on.open("report on")
    split = opened.split
    path = opened.folder(out, f"report-{split}.html")
    check_out_file(path)
    if opened.own_run is not None:
        page, path = report_run(opened.own_run, split, out)
    else:
        page = report_model(opened.model, opened.data, split, path, name=opened.name)
    size = path.stat().st_size
    result: dict[str, Any] = {"out": str(path), "bytes": size, **page.to_json()}
    print_result(result, as_json, f"a page of {size / 1e6:.1f} MB: {path}")


@command()
def table(
    runs: list[Path] = word(..., "Folders of runs, e.g. runs/*.", "RUN"),
    group: str = flag("", "Keys of the recipe, with commas, whose values name the rows.", metavar="KEYS"),
    metrics: str = flag(
        "", "Columns, with commas. A wrong one lists them.", show_default="rsum,t2i.recall@1,i2t.recall@1"
    ),
    split: Split = "test",
    latex: bool = flag(False, "Print the table as LaTeX, for the package booktabs.", "--latex"),
    as_json: AsJson = False,
) -> None:
    """Make a table of runs: mean and standard deviation over seeds.

    The runs of a row may differ in their seed alone; --group KEYS gives each value its row. Runs that were not
    evaluated on this split are evaluated first.
    """
    from sfumato.models.run import choose_device
    from sfumato.reports.runs import runs_latex, runs_table
    from sfumato.reports.tables import tex
    from sfumato.workflows.table import METRICS, table_of_runs

    keys, columns = parse_names(group), parse_names(metrics) or METRICS
    rows = table_of_runs(runs, keys, columns, split=split, device=choose_device())
    if as_json:
        return print(json.dumps([row.to_json(keys) for row in rows], ensure_ascii=False))
    if latex:
        return print(runs_latex(runs_table(rows, keys, f"Split {split}", tex)), end="")
    runs_table(rows, keys, f"split {split}").show()
