"""The commands that study a model, its data and the papers: analyse, audit, report, table."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfumato.cli.common import (
    INSTANCES,
    UNCERTAINTY,
    AsJson,
    Bootstrap,
    DataOverrides,
    DataRecipe,
    Device,
    ModelName,
    OnData,
    Seed,
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
    from sfumato.evaluation.papers import PaperItem
    from sfumato.gaussian import ScalarUncertainty


@command()
def analyse(
    on: OnData,
    only: str | None = flag(
        None,
        "Studies, separated by commas: corruption,sets,words,map; by default those that model and data allow. Or"
        " zeroshot, with settings as zeroshot.emoji=group or zeroshot.images=FOLDER (a wrong one lists them).",
    ),
    uncertainty: str = flag(
        "total_variance", "corruption, words: estimator; `sfumato trust RUN --details` lists them."
    ),
    corrupted: int = rare(200, "corruption: number of items to corrupt in each way.", min=1),
    pairs: int = rare(100, "sets: number of pairs of images to mix, and to erase in part.", min=3),
    bins: int = rare(10, "words: number of bins of uncertainty.", min=1),
    corpus: str = rare("bin", "words: captions that a word is compared with: those of its bin, or of the whole split."),
    method: str = rare("pca", "map: pca, or tsne (needs the extra analysis)."),
    items: int = rare(200, "map: largest number of images, and of texts.", min=2),
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    out: Path | None = flag(None, "Folder to write. Default: analysis-SPLIT in the run's folder, with --data here."),
    as_json: AsJson = False,
) -> None:
    """Repeat studies of the papers on any model, with a page.

    corruption: does uncertainty rise when images are erased or blurred and words dropped? sets: do mixtures of two
    images lie between them, and do erased images become less certain? words: which go with low and with high
    uncertainty? map: images and texts as ellipses in a plane. zeroshot: images classified by prompts of class names,
    and the gain of keeping only the most certain prompts. Earlier results of the same studies in the folder are
    replaced.
    """
    from sfumato import __version__
    from sfumato.charts import require_matplotlib
    from sfumato.models.run import choose_device, load_model
    from sfumato.reports.studies import print_analyses, write_analyses
    from sfumato.studies.analyse import AnalysisOptions, analyse_model, known_studies
    from sfumato.studies.zeroshot import ZeroShotOptions

    require_matplotlib()
    settings = [override for override in on.overrides or [] if override.startswith("zeroshot.")]
    options = AnalysisOptions(
        uncertainty=uncertainty, n_corrupted=corrupted, n_pairs=pairs, n_bins=bins, corpus=corpus, method=method,
        n_mapped=items, n_resamples=bootstrap, seed=seed, zeroshot=ZeroShotOptions.read(settings),
    )  # fmt: skip
    studies = known_studies(parse_names(only)) if only else None
    if settings and "zeroshot" not in (studies or ()):
        raise UserError(f"{settings[0]} is for the study zeroshot; add --only zeroshot")
    if studies == ("zeroshot",) and on.data is None and not is_run(on.model):
        model, data, split, name = load_model(on.model, device=choose_device(on.device)), None, "", Path(on.model).name
        folder = out or Path("analysis-zeroshot")
    else:
        opened = replace(on, overrides=[one for one in on.overrides or [] if one not in settings]).open("analyse")
        model, data, split, name = opened.model, opened.data, opened.split, opened.name
        folder = opened.folder(out, f"analysis-{split}")
    check_out_folder(folder)
    found = analyse_model(model, data, split, studies=studies, options=options, name=name)
    page = write_analyses(found, folder, __version__)
    if as_json:
        return print(json.dumps(found.to_json() | {"out": str(folder)}, ensure_ascii=False))
    print_analyses(found.to_json())
    print(f"page: {page}")


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
    from sfumato.reports.studies import AUDIT_PAGE, print_audit, write_audit
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
    analyses: bool = flag(
        False, "For a run: first do the studies of `sfumato analyse` that are missing.", "--analyses"
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
    if on.data is not None and analyses:
        raise UserError(
            "--analyses needs a run on its own data; for other data run `sfumato analyse`, which writes a page"
        )
    opened = on.open("report on")
    split = opened.split
    path = opened.folder(out, f"report-{split}.html")
    check_out_file(path)
    if opened.own_run is not None:
        page, path = report_run(opened.own_run, split, out, analyses=analyses, uncertainty=measure)
    else:
        page = report_model(opened.model, opened.data, split, path, name=opened.name, uncertainty=measure)
    size = path.stat().st_size
    result: dict[str, Any] = {"out": str(path), "bytes": size, **page.to_json()}
    print_result(result, as_json, f"a page of {size / 1e6:.1f} MB: {path}")


@dataclass(frozen=True)
class PaperFlags:
    """How a table of a paper is shown or repeated."""

    listed: bool = flag(False, "List all tables and figures with their state and what they need.", "--list")
    data: str | None = flag(
        None,
        "Data: coco, flickr30k, cub, flickr8k, emoji, a Karpathy JSON, a manifest or a folder. Default: the paper's.",
    )
    published: bool = flag(False, "Show the paper's figures; nothing is trained.", "--published")
    instances: list[Path] | None = rare(None, INSTANCES)


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
    name: str | None = word(None, 'Table or figure, e.g. "PCME++ 3" or "PCME++ Fig. 3"; with --vary a recipe.', "ID"),
    overrides: list[str] | None = word(
        None,
        "Change to all recipes, e.g. train.epochs=5, or a study's setting, e.g. toy.seed=1. A wrong one lists them.",
        "SECTION.KEY=VALUE",
    ),
    of_paper: PaperFlags,
    seeds: int = flag(1, "Number of runs of each row, with the following seeds.", min=1),
    runs: list[Path] | None = flag(
        None,
        "Folder of the runs; finished ones are reused. Without ID: the runs of a table, e.g. --runs runs/*.",
        show_default="runs/tables",
    ),
    of_runs: RunsFlags,
    out: Path | None = flag(
        None,
        "Folder for the table in JSON, Markdown and LaTeX, or for the figure's images.",
        show_default="for a paper's, tables/",
    ),
    device: Device = "auto",
    latex: bool = flag(False, "Print the table as LaTeX, for the package booktabs.", "--latex"),
    as_json: AsJson = False,
) -> None:
    """Make a table of your runs, or repeat one of the papers.

    With --runs RUN ... --group KEYS: methods by metrics, mean and deviation over seeds, and what is best. --vary
    KEY=V,V RECIPE trains the runs first. ID repeats a table or figure of the papers: trains the runs that are
    missing, evaluates them, and prints ours beside published. The same command goes on where it was interrupted.
    """
    from sfumato.evaluation.papers import find_item, paper_items
    from sfumato.reports.papers import print_items, print_published

    if _is_of_runs(name, runs, of_runs):
        if wrong := _first_given({"--list": of_paper.listed} | _named(of_paper, "data published instances")):
            raise UserError(f"{wrong} is for tables of the papers; leave it out")
        _table_of_runs(name, [*(overrides or [])], runs, of_runs, seeds, out, device, latex, as_json)
        return
    if of_paper.listed or name is None:
        if as_json:
            print(json.dumps([item.to_json() for item in paper_items().values()], ensure_ascii=False))
        else:
            print_items(paper_items())
        return
    if wrong := _first_given(_named(of_runs, "distance metrics split") | {"a second --runs": len(runs or []) > 1}):
        raise UserError(f"{wrong} is for tables of runs; leave it out")
    item = find_item(name)
    if of_paper.published:
        print(json.dumps(item.rows, ensure_ascii=False)) if as_json else print_published(item)
        return
    if latex and item.draw:
        raise UserError(f"{item.id} is a figure; leave --latex out")
    where = runs[0] if runs else _RUNS
    made, lines, folder = _table_of_paper(item, [*(overrides or [])], of_paper, where, out, seeds, device)
    if as_json:
        print(json.dumps(made, ensure_ascii=False))
    elif latex:
        print((folder / "table.tex").read_text(encoding="utf-8"), end="")
    else:
        lines()
        print(f"written to {folder}")


def _table_of_paper(
    item: "PaperItem", overrides: list[str], flags: PaperFlags, runs: Path, out: Path | None, seeds: int, device: str
) -> tuple[dict[str, Any], Callable[[], None], Path]:
    """Make and write a table or figure of a paper: its JSON values, what prints it, and its folder."""
    from sfumato.charts import require_matplotlib
    from sfumato.models.run import choose_device
    from sfumato.reports import papers
    from sfumato.studies import figure_numbers, paper_tables

    item, changes = paper_tables.with_settings(item, overrides)
    chosen, instances = paper_tables.choose_data(item, flags.data, changes), tuple(flags.instances or ())
    if instances and not (item.plausible and chosen.name == "coco"):
        raise UserError("--instances is for PMRP on COCO; leave it out")
    folder = (out or Path("tables")) / _folder_name(item.id)
    check_out_folder(folder)
    make: Any = figure_numbers.make_figure if item.draw else paper_tables.make_table
    if item.draw:
        require_matplotlib()
    made = make(item, chosen, runs, n_seeds=seeds, instances=instances, device=choose_device(device))
    (papers.write_figure if item.draw else papers.write_table)(made, folder)
    show = (lambda: papers.print_figure(made)) if item.draw else papers.paper_table(made).show
    return made.to_json(), show, folder


_RUNS = Path("runs/tables")


def _named(flags: PaperFlags | RunsFlags, keys: str) -> dict[str, Any]:
    return {f"--{key}": getattr(flags, key) for key in keys.split()}


def _first_given(options: dict[str, Any]) -> str | None:
    return next((name for name, value in options.items() if value), None)


def _is_of_runs(name: str | None, runs: list[Path] | None, flags: RunsFlags) -> bool:
    """Whether a table of runs is wanted. Of `--runs A B C`, which a shell makes of a pattern, B stands as the ID."""
    return bool(flags.group or flags.vary or (runs and (name is None or Path(name).exists())))


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
        folders, notes = find_runs([*(runs or [_RUNS]), *filter(None, [name]), *words])
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


def _folder_name(id: str) -> str:
    """E.g. pcmepp-fig-3 of "PCME++ Fig. 3"."""
    return re.sub(r"[^a-z0-9]+", "-", id.lower().replace("+", "p")).strip("-")
