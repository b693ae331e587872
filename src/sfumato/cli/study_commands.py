"""The commands that study a model or its data: analyse, crops, zeroshot, audit, referee; and report, a page."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from sfumato.cli.common import (
    AsJson,
    Bootstrap,
    DataOverrides,
    DataRecipe,
    Device,
    ModelName,
    Seed,
    Split,
    Uncertainty,
    app,
    is_run,
    open_model_on_data,
    parse_names,
    print_result,
)
from sfumato.cli.outputs import check_out_file, check_out_folder
from sfumato.errors import UserError

if TYPE_CHECKING:
    from sfumato.data.captioned import Labelled
    from sfumato.gaussian import ScalarUncertainty
    from sfumato.models.model import Model
    from sfumato.studies.zeroshot import ZeroShotReport

Corrupted = Annotated[int, typer.Option(min=1, help="corruption: number of items to corrupt in each way.")]
SetPairs = Annotated[int, typer.Option(min=3, help="sets: number of pairs of images to mix, and to erase in part.")]
WordBins = Annotated[int, typer.Option(min=1, help="words: number of bins of uncertainty.")]
WordCorpus = Annotated[
    str, typer.Option(help="words: captions that a word is compared with: those of its bin, or of the whole split.")
]
MapMethod = Annotated[str, typer.Option(help="map: pca, or tsne (needs the extra analysis).")]
MapItems = Annotated[int, typer.Option(min=2, help="map: largest number of images, and of texts.")]


@app.command()
def analyse(
    model: ModelName,
    overrides: DataOverrides = None,
    data: DataRecipe = None,
    split: Split = "test",
    only: Annotated[
        str | None,
        typer.Option(
            help=(
                "Studies, separated by commas: corruption,sets,words,map. Default: all that the model and the data"
                " allow."
            )
        ),
    ] = None,
    uncertainty: Annotated[
        str,
        typer.Option(help="corruption and words: estimator, e.g. log_det; `sfumato trust RUN --details` lists them."),
    ] = "total_variance",
    corrupted: Corrupted = 200,
    pairs: SetPairs = 100,
    bins: WordBins = 10,
    corpus: WordCorpus = "bin",
    method: MapMethod = "pca",
    items: MapItems = 200,
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write. Default: analysis-SPLIT, in the run's folder or, with --data, in the current one."
        ),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Repeat studies of the papers on any model, with a page.

    corruption: does uncertainty rise when images are erased or blurred and words dropped? sets: do mixtures of two
    images lie between them, and do erased images become less certain? words: which go with low and with high
    uncertainty? map: images and texts as ellipses in a plane. Earlier results of the same studies in the folder are
    replaced.
    """
    from sfumato import __version__
    from sfumato.charts import require_matplotlib
    from sfumato.reports.console import print_analyses
    from sfumato.reports.study_pages import write_analyses
    from sfumato.studies.analyse import AnalysisOptions, analyse_model, known_studies

    require_matplotlib()
    options = AnalysisOptions(
        uncertainty=uncertainty, n_corrupted=corrupted, n_pairs=pairs, n_bins=bins, corpus=corpus, method=method,
        n_mapped=items, n_resamples=bootstrap, seed=seed,
    )  # fmt: skip
    studies = None if only is None else known_studies(parse_names(only))
    opened = open_model_on_data(model, data, overrides, split, device, purpose="analyse")
    split = opened.split
    folder = opened.folder(out, f"analysis-{split}")
    check_out_folder(folder)
    found = analyse_model(opened.model, opened.data, split, studies=studies, options=options, name=opened.name)
    page = write_analyses(found, folder, __version__)
    if as_json:
        print(json.dumps(found.to_json() | {"out": str(folder)}, ensure_ascii=False))
        return
    print_analyses(found.to_json())
    print(f"page: {page}")


@app.command()
def crops(
    model: ModelName,
    regions: Annotated[
        Path, typer.Option(help="Boxes with phrases, in the format of Visual Genome's region_descriptions.json.")
    ],
    images: Annotated[
        Path, typer.Option(help="Folder of the images, ID.jpg or ID.png; its VG_100K and VG_100K_2 are searched too.")
    ],
    thresholds: Annotated[
        str, typer.Option(help="Largest areas of a box, as fractions of its image, separated by commas.")
    ] = "0.1,0.2,0.3,0.4,0.5",
    sample: Annotated[int, typer.Option(min=1, help="Number of images, chosen at random.")] = 2000,
    uncertainty: Annotated[
        str, typer.Option(help="Estimator: total_variance, log_det or geometric_std.")
    ] = "total_variance",
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write. Default: crops, in the run's folder or, for other models, in the current one."
        ),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare crops of one thing with crops of two.

    Measures their uncertainty, and how often each finds its own caption. In each image, A is the largest box below a
    threshold, B a box that overlaps little with A, and C the crop around both.
    """
    from sfumato import __version__
    from sfumato.charts import require_matplotlib
    from sfumato.models.load import load_model
    from sfumato.models.run import choose_device
    from sfumato.reports.console import print_crops
    from sfumato.reports.study_pages import write_crops
    from sfumato.studies.crops import study_crops

    require_matplotlib()
    try:
        fractions = [float(fraction) for fraction in parse_names(thresholds)]
    except ValueError:
        raise UserError(f"--thresholds {thresholds}: expected fractions with commas between, e.g. 0.1,0.3") from None
    folder = out or (Path(model) if is_run(model) else Path()) / "crops"
    check_out_folder(folder)
    study, examples, problems = study_crops(
        load_model(model, device=choose_device(device)), regions, images, name=Path(model).resolve().name,
        thresholds=fractions, sample=sample, uncertainty=uncertainty, n_resamples=bootstrap, seed=seed,
    )  # fmt: skip
    page = write_crops(study, examples, problems, folder, __version__)
    if as_json:
        print(json.dumps(study.to_json() | {"out": str(folder)}, ensure_ascii=False))
        return
    print_crops(study.to_json())
    print(f"page: {page}")


LabelledFolder = Annotated[Path | None, typer.Option(help="Folder of images, ROOT/CLASS/IMAGE.jpg.")]
EmojiClasses = Annotated[
    str | None, typer.Option(help="Or the emoji set, with the classes of this level: group or subgroup.")
]
EmojiStyle = Annotated[str, typer.Option(help="With --emoji: drawing style, noto, twemoji or fluent3d.")]
LabelledRecipe = Annotated[
    str | None,
    typer.Option(
        metavar="RECIPE",
        help="Or a recipe (path or name). Each image of its data must have one text, the name of its class.",
    ),
]
Templates = Annotated[
    Path | None, typer.Option(help="File of templates, one per line, with {} for the class. Default: the 80 of CLIP.")
]
Classes = Annotated[
    Path | None,
    typer.Option(
        help="File of all classes, one per line: the folder (group, text), a tab, the name. Default: the folders'"
        " names."
    ),
]
Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        help="How many prompts to keep: none, global, per-class or oracle, or several with commas. Default:"
        " global,per-class.",
    ),
]
ChooseOn = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Folder in the layout of --images, to choose the number of prompts on. Default: half of the images of"
            " each class."
        )
    ),
]
Pooling = Annotated[str, typer.Option(help="How a class's prompts are joined: mixture, or unit as in CLIP.")]
ZeroshotPublished = Annotated[
    bool, typer.Option("--published", help="Show the paper's figures for ImageNet beside the own ones.")
]
ZeroshotDistance = Annotated[str | None, typer.Option(help="Distance to classify by. Default: the model's own.")]


@app.command()
def zeroshot(
    model: ModelName,
    overrides: DataOverrides = None,
    images: LabelledFolder = None,
    emoji: EmojiClasses = None,
    style: EmojiStyle = "fluent3d",
    data: LabelledRecipe = None,
    split: Split = "test",
    templates: Templates = None,
    classes: Classes = None,
    filters: Filters = None,
    choose_on: ChooseOn = None,
    pooling: Pooling = "mixture",
    distance: ZeroshotDistance = None,
    published: ZeroshotPublished = False,
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for zeroshot.json, prompts.csv and charts. Default: not written.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Classify images without training, by prompts.

    The prompts are class names in templates. Measures the gain of keeping only the most certain prompts.
    """
    from sfumato.data.captioned import read_class_folder, read_class_names
    from sfumato.models.embed import file_endings
    from sfumato.models.load import load_model
    from sfumato.models.run import choose_device
    from sfumato.studies.zeroshot import evaluate_zeroshot, read_templates

    if sum(source is not None for source in (images, emoji, data)) != 1:
        raise UserError("give one of --images FOLDER, --emoji group or subgroup, and --data RECIPE")
    if overrides and data is None:
        raise UserError(f"{overrides[0]!r} changes a recipe, but no recipe is given; add --data RECIPE")
    if choose_on is not None and images is not None and choose_on.resolve() == images.resolve():
        raise UserError("--choose-on is also the folder that is evaluated; give another folder, or use --filter oracle")
    if out is not None:
        check_out_folder(out)
    prompts = read_templates(templates)
    names = read_class_names(classes) if classes is not None else None
    retrieval_model = load_model(model, device=choose_device(device))
    labelled = _labelled_images(retrieval_model, images, emoji, style, data, overrides, split, names)
    others = None
    if choose_on is not None:
        known = dict(zip(labelled.keys, labelled.classes, strict=True))
        others = read_class_folder(choose_on, known, endings=file_endings(retrieval_model.model))
    report = evaluate_zeroshot(
        retrieval_model, labelled, prompts, filters=filters or ("global", "per-class"),
        choose_on=others, pooling=pooling, distance=distance, n_resamples=bootstrap, seed=seed,
    )  # fmt: skip
    _show_zeroshot(report, out, published, as_json)


def _show_zeroshot(report: "ZeroShotReport", out: Path | None, published: bool, as_json: bool) -> None:
    """Write the files of a zero-shot classification, and print it."""
    from sfumato.progress import say
    from sfumato.reports.console import print_zeroshot, print_zeroshot_published
    from sfumato.reports.prompt_charts import write_prompt_charts
    from sfumato.studies.zeroshot import published_beside

    if out is not None:
        report.write(out)
        try:
            write_prompt_charts(report.prompts_kept, out)
        except UserError as error:
            say(f"no charts are written: {error}")
    beside = published_beside(report) if published else []
    if as_json:
        print(json.dumps(report.to_json() | ({"published": beside} if published else {}), ensure_ascii=False))
        return
    print_zeroshot(report)
    if published:
        print_zeroshot_published(beside)
    if out is not None:
        print(f"written to {out}")


def _labelled_images(
    retrieval_model: "Model",
    images: Path | None,
    emoji: str | None,
    style: str,
    data: str | None,
    overrides: list[str] | None,
    split: str,
    names: dict[str, str] | None,
) -> "Labelled":
    """The images to classify, from the one source that was given."""
    from sfumato.data.captioned import emoji_labelled, read_class_folder
    from sfumato.models.embed import file_endings
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.studies.zeroshot import labelled_split

    if images is not None:
        return read_class_folder(images, names, endings=file_endings(retrieval_model.model))
    if emoji is not None:
        return emoji_labelled(emoji, style=style, names=names)
    return labelled_split(load_recipe(find_recipe(data or ""), overrides or []).data, split, names)


AuditedModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a run, folder of an exported or published model, or name of a model on the hub.",
    ),
]
FormerModel = Annotated[str | None, typer.Option("--run", metavar="MODEL", hidden=True)]


def _audited(
    model: str | None, overrides: list[str] | None, data: str | None, run: str | None
) -> tuple[str, str | None, list[str]]:
    """(model, recipe of the data, overrides), also in the former spelling audit --run MODEL [RECIPE] [OVERRIDES]."""
    words = [word for word in (run, model, *(overrides or [])) if word is not None]
    if not words:
        raise UserError("name the model, e.g. sfumato audit runs/mine")
    model, words = words[0], words[1:]
    if words and data is None and "=" not in words[0]:
        data, words = words[0], words[1:]
    return model, data, words


@app.command()
def audit(
    model: AuditedModel = None,
    overrides: DataOverrides = None,
    data: DataRecipe = None,
    former_model: FormerModel = None,
    split: Annotated[str | None, typer.Option(help="Split of the data. Default: test; with --cross-fit train.")] = None,
    parts: Annotated[
        int,
        typer.Option(
            "--cross-fit",
            metavar="K",
            help="Audit train in K parts, each by a model trained on the others; 0: no training, the model audits.",
        ),
    ] = 0,
    top: Annotated[int, typer.Option(min=0, help="Number of pairs of each kind on the page and in audit.json.")] = 100,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write. Default: audit-SPLIT, in the run's folder or, with --data, in the current one."
        ),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find pairs of a data set that are probably wrong or missing.

    Writes listed pairs that are probably wrong, and unlisted pairs that probably match, to tables and a page.
    """
    from sfumato import __version__
    from sfumato.reports.study_pages import AUDIT_PAGE, print_audit, write_audit
    from sfumato.workflows.audit import audit_model, cross_fit

    named, data, changes = _audited(model, overrides, data, former_model)
    if parts and split not in (None, "train"):
        raise UserError(f"--cross-fit audits the split train only; leave --split {split} out")
    if parts and not is_run(named):
        raise UserError(f"--cross-fit needs a run folder, whose recipe it trains with; {named} is not a run folder")
    split = split or ("train" if parts else "test")
    opened = open_model_on_data(named, data, changes, split, device, purpose="audit")
    split = opened.split
    folder = opened.folder(out, f"audit-{split}")
    check_out_folder(folder)
    if parts and opened.run is not None:
        result = cross_fit(opened.run, opened.data, parts, folder)
    else:
        name = Path(named).resolve().name if opened.run is not None else opened.name
        result = audit_model(opened.model, opened.data, split, name=name, seen=opened.same_data and split == "train")
    figures = write_audit(result, folder, top, __version__)
    if as_json:
        print(json.dumps(figures | {"out": str(folder)}))
        return
    print_audit(figures)
    print(f"page: {folder / AUDIT_PAGE}")


RefereedRuns = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="Folders of runs; each is a frozen model, and methods see its means."),
]
Methods = Annotated[
    str,
    typer.Option(help="Methods and baselines, separated by commas; all: every one of them. A wrong name lists them."),
]
Absent = Annotated[
    int,
    typer.Option(min=0, help="Largest number of queries whose matches are taken out of the gallery, per direction."),
]
AdapterEpochs = Annotated[
    int,
    typer.Option(min=0, help="Passes over the training pairs of the methods that train a network; 0: their default."),
]


CorruptedQueries = Annotated[
    int, typer.Option(min=0, help="Number of queries of either side to corrupt in each way; 0 for none.")
]


@app.command()
def referee(
    runs: RefereedRuns,
    methods: Methods = "all",
    split: Annotated[str, typer.Option(help="Splits to measure, separated by commas; not train or val.")] = "test",
    epochs: AdapterEpochs = 0,
    absent: Absent = 200,
    corrupted: CorruptedQueries = 100,
    bootstrap: Bootstrap = 200,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for RUN-seedN.json and .md. Default: referee-SPLIT in the folder of each run."),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare post-hoc uncertainties of a frozen model.

    Fits every method on the training pairs, calibrates it on validation, and measures it on the test split: will the
    first hit be wrong, how likely is it right, does nothing match, how many match? Prints a
    table for each direction, the smallest log loss of the first hit first; then whether damaged images and texts are
    noticed. Finished methods are not computed again.
    """
    from sfumato.models.run import choose_device, load_run
    from sfumato.progress import say
    from sfumato.reports.console_referee import print_referee
    from sfumato.reports.referee_tables import write_referee_tables
    from sfumato.studies.frozen_model import freeze
    from sfumato.studies.referee import RefereeOptions, adapter_epochs, referee_model, wanted_methods

    chosen = wanted_methods(parse_names(methods))
    options = RefereeOptions(
        methods=chosen, fit=adapter_epochs(epochs), n_resamples=bootstrap, n_absent=absent, seed=seed
    )
    reports = []
    for run in runs:
        if not is_run(run):
            raise UserError(f"{run} is not a run folder; the referee fits methods on the training split of a run")
        folder = out or run / f"referee-{split.replace(',', '-')}"
        check_out_folder(folder)
        loaded = load_run(run, device=choose_device(device))
        name = run.resolve().name
        tests = tuple(parse_names(split))
        model = freeze(loaded, loaded.recipe.data, tests, name=name, n_corrupted=corrupted, seed=seed)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-seed{seed}.json"
        report = referee_model(model, options, path=path, say=say)
        reports.append(report | {"out": str(path)})
        tables = path.with_suffix(".md")
        write_referee_tables(report, chosen, tables)
        if not as_json:
            print_referee(report, chosen)
            print(f"all figures: {tables} and {path}")
    if as_json:
        print(json.dumps(reports, ensure_ascii=False))


@app.command()
def report(
    model: ModelName,
    overrides: DataOverrides = None,
    data: DataRecipe = None,
    split: Split = "test",
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write. Default: report-SPLIT.html, in the run's folder or, with --data, in the current"
            " one."
        ),
    ] = None,
    analyses: Annotated[
        bool,
        typer.Option(
            "--analyses",
            help="For a run: first do the studies of `sfumato analyse` that are missing or were made with other"
            " weights.",
        ),
    ] = False,
    uncertainty: Uncertainty = "total_variance",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about a model.

    It shows figures, uncertainty, calibration, and right and wrong results with their images.
    """
    from sfumato.charts import require_matplotlib
    from sfumato.evaluation.protocols import EvaluationOptions
    from sfumato.reports.model_report import report_model, report_run

    require_matplotlib()
    measure = EvaluationOptions(uncertainty=cast("ScalarUncertainty", uncertainty)).uncertainty
    if data is not None and analyses:
        raise UserError(
            "--analyses needs a run on its own data; for other data run `sfumato analyse`, which writes a page"
        )
    opened = open_model_on_data(model, data, overrides, split, device, purpose="report on")
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
