"""Studies of a model and its data, and the pages about them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli.common import AsJson, Device, ModelName, app, no_run, parse_names, print_result
from sfumato.errors import UserError


@app.command()
def analyse(
    model: ModelName,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="with --data: section.key=value ..., e.g. data.path=my.jsonl")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="a recipe (path or name) whose data to analyse; a run has its own")
    ] = None,
    split: Annotated[str, typer.Option(help="split of the data")] = "test",
    only: Annotated[
        str | None,
        typer.Option(help="some of corruption,sets,words,map; default all that the model and the data allow"),
    ] = None,
    uncertainty: Annotated[
        str, typer.Option(help="of corruption and words, e.g. log_det, or any other that `sfumato trust` lists")
    ] = "total_variance",
    corrupted: Annotated[int, typer.Option(min=1, help="corruption: items to corrupt in each way")] = 200,
    pairs: Annotated[int, typer.Option(min=3, help="sets: pairs of pictures to mix and to erase in part")] = 100,
    bins: Annotated[int, typer.Option(min=1, help="words: bins of uncertainty")] = 10,
    corpus: Annotated[
        str, typer.Option(help="words: what they are weighed against: the captions of their bin, or of the split")
    ] = "bin",
    method: Annotated[str, typer.Option(help="map: pca, or with the extra analysis: tsne")] = "pca",
    items: Annotated[int, typer.Option(min=2, help="map: most images, and most texts")] = 200,
    bootstrap: Annotated[int, typer.Option(min=0, help="resamples of the confidence intervals")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="of everything random")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="folder to write; default analysis-SPLIT in the run's folder, with --data here")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Do the studies of the papers on any model: damage against uncertainty, mixed and erased pictures, words, a map; and a page.

    corruption: does uncertainty rise as pictures are erased or blurred and words dropped? sets: do mixtures of pictures lie between
    their parts, and erased ones grow? words: which go with certainty, and which with doubt? map: images and texts as areas in a plane.
    What lies in the folder of the studies asked for is replaced.
    """
    from sfumato import __version__
    from sfumato.models.build import choose_device
    from sfumato.models.embed import RetrievalModel
    from sfumato.models.export import load_model
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.models.run import RECIPE, load_run
    from sfumato.reports.analysis_page import write_analyses
    from sfumato.reports.console import print_analyses
    from sfumato.studies.analyse import AnalysisOptions, analyse_model, known_studies

    options = AnalysisOptions(
        uncertainty=uncertainty, n_corrupted=corrupted, n_pairs=pairs, n_bins=bins, corpus=corpus, method=method,
        n_mapped=items, n_resamples=bootstrap, seed=seed,
    )  # fmt: skip
    studies = None if only is None else known_studies(parse_names(only))
    folder, chosen = out or Path(f"analysis-{split}"), choose_device(device)
    if data is not None:
        config, name = load_recipe(find_recipe(data), overrides or []).data, Path(model).name
        retrieval_model: RetrievalModel = load_model(model, device=chosen)
    elif overrides:
        raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
    elif (Path(model) / RECIPE).is_file():
        retrieval_model = run = load_run(model, device=chosen)
        config, name, folder = run.recipe.data, run.recipe.name or run.folder.name, out or run.folder / folder
    else:
        raise no_run(model, "analyse")
    found = analyse_model(retrieval_model, config, split, studies=studies, options=options, name=name)
    page = write_analyses(found, folder, __version__)
    if as_json:
        print(json.dumps(found.to_json() | {"out": str(folder)}, ensure_ascii=False))
        return
    print_analyses(found.to_json())
    print(f"to look at: {page}")


@app.command()
def crops(
    model: ModelName,
    regions: Annotated[Path, typer.Option(help="boxes with phrases, as Visual Genome's region_descriptions.json")],
    images: Annotated[
        Path, typer.Option(help="folder of the pictures: ID.jpg or .png, there or in VG_100K and VG_100K_2 below")
    ],
    thresholds: Annotated[
        str, typer.Option(help="largest area of a box, as shares of its picture's")
    ] = "0.1,0.2,0.3,0.4,0.5",
    sample: Annotated[int, typer.Option(min=1, help="pictures, at random")] = 2000,
    uncertainty: Annotated[str, typer.Option(help="total_variance, log_det, geometric_std")] = "total_variance",
    bootstrap: Annotated[int, typer.Option(min=0, help="resamples of the confidence intervals")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="of the sample and the resamples")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="folder to write; default crops in the run's folder, of other models here")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare crops of one thing with crops of two: uncertainties, and how often each finds its own caption; with a page.

    Of each picture A is its largest box below a threshold, B one that overlaps little with it, C the crop around both.
    """
    from sfumato import __version__
    from sfumato.models.build import choose_device
    from sfumato.models.export import load_model
    from sfumato.models.run import RECIPE
    from sfumato.reports.console import print_crops
    from sfumato.reports.crop_page import write_crops
    from sfumato.studies.crop_study import study_crops

    try:
        shares = [float(share) for share in parse_names(thresholds)]
    except ValueError:
        raise UserError(f"--thresholds {thresholds}: expected shares with commas between, e.g. 0.1,0.3") from None
    study, examples, problems = study_crops(
        load_model(model, device=choose_device(device)), regions, images, name=Path(model).resolve().name,
        thresholds=shares, sample=sample, uncertainty=uncertainty, n_resamples=bootstrap, seed=seed,
    )  # fmt: skip
    folder = out or (Path(model) if (Path(model) / RECIPE).is_file() else Path()) / "crops"
    page = write_crops(study, examples, problems, folder, __version__)
    if as_json:
        print(json.dumps(study.to_json() | {"out": str(folder)}, ensure_ascii=False))
        return
    print_crops(study.to_json())
    print(f"to look at: {page}")


@app.command()
def zeroshot(
    model: ModelName,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="with --data: section.key=value ..., e.g. data.path=my.csv")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="folder of pictures, as ROOT/CLASS/picture.jpg")] = None,
    emoji: Annotated[str | None, typer.Option(help="or the emoji set, by group or subgroup")] = None,
    style: Annotated[str, typer.Option(help="of the emoji: noto, twemoji, fluent3d")] = "fluent3d",
    data: Annotated[
        str | None, typer.Option(help="or a recipe (path or name) with data whose only text of a picture is its class")
    ] = None,
    split: Annotated[str, typer.Option(help="split of that data")] = "test",
    templates: Annotated[
        Path | None, typer.Option(help="file of templates, one a line with {} for the class; default the 80 of CLIP")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="file of all classes, a line each: folder (group, text), a tab, its name")
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", help="none, global, per-class, oracle, several times; default global and per-class"),
    ] = None,
    choose_on: Annotated[
        Path | None,
        typer.Option(help="folder like --images to choose on how many prompts to keep; default half of each class"),
    ] = None,
    pooling: Annotated[str, typer.Option(help="of a class's prompts: mixture, or unit as CLIP does")] = "mixture",
    distance: Annotated[str | None, typer.Option(help="closest by this instead of the model's own")] = None,
    bootstrap: Annotated[int, typer.Option(min=0, help="resamples of the confidence intervals")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="of everything random")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for zeroshot.json and prompts.csv")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Classify pictures by class names in templates, and measure what keeping only the most certain prompts is worth."""
    from sfumato.data.labelled import emoji_labelled, read_class_folder, read_class_names
    from sfumato.models.build import choose_device
    from sfumato.models.embedding_steps import file_endings
    from sfumato.models.export import load_model
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.studies.prompts import read_templates
    from sfumato.studies.zeroshot import evaluate_zeroshot, labelled_split

    if sum(source is not None for source in (images, emoji, data)) != 1:
        raise UserError("give one of --images FOLDER, --emoji group or subgroup, and --data RECIPE")
    if overrides and data is None:
        raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
    worded = read_templates(templates)
    names = read_class_names(classes) if classes is not None else None
    retrieval_model = load_model(model, device=choose_device(device))
    endings = file_endings(retrieval_model.model)
    if images is not None:
        pictures = read_class_folder(images, names, endings=endings)
    elif emoji is not None:
        pictures = emoji_labelled(emoji, style=style, names=names)
    else:
        pictures = labelled_split(load_recipe(find_recipe(data or ""), overrides or []).data, split, names)
    others = None
    if choose_on is not None:
        if images is not None and choose_on.resolve() == images.resolve():
            raise UserError("--choose-on is what is reported on; K chosen there is --filter oracle")
        others = read_class_folder(choose_on, dict(zip(pictures.keys, pictures.classes, strict=True)), endings=endings)
    report = evaluate_zeroshot(
        retrieval_model, pictures, worded, filters=filters or ("global", "per-class"),
        choose_on=others, pooling=pooling, distance=distance, n_resamples=bootstrap, seed=seed,
    )  # fmt: skip
    if out is not None:
        report.write(out)
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
        return
    print(report.table())
    if out is not None:
        print(f"written to {out}")


@app.command()
def report(
    model: ModelName,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="with --data: section.key=value ..., e.g. data.path=my.jsonl")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="a recipe (path or name) whose data to report on; a run has its own")
    ] = None,
    split: Annotated[str, typer.Option(help="split of the data")] = "test",
    out: Annotated[
        Path | None, typer.Option(help="the HTML file; default report-SPLIT.html in the run's folder, with --data here")
    ] = None,
    analyses: Annotated[
        bool,
        typer.Option(
            "--analyses",
            help="of a run: do first those studies of `sfumato analyse` that are missing or of other weights; all done are shown",
        ),
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write one HTML page: figures, uncertainty, calibration, and with pictures what was found, right and wrong."""
    from sfumato import __version__
    from sfumato.models.build import choose_device
    from sfumato.models.export import load_model
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.models.run import RECIPE, load_run
    from sfumato.reports.analysis_page import read_studies, write_analyses
    from sfumato.reports.model_report import report_model, report_run
    from sfumato.studies.analyse import analyse_model

    chosen = choose_device(device)
    if data is not None:
        if analyses:
            raise UserError("--analyses goes with a run on its own data; with --data, `sfumato analyse` writes a page")
        config = load_recipe(find_recipe(data), overrides or []).data
        path = out or Path(f"report-{split}.html")
        page = report_model(load_model(model, device=chosen), config, split, path, name=Path(model).name)
    elif overrides:
        raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
    elif (Path(model) / RECIPE).is_file():
        run = load_run(model, device=chosen)
        if analyses:
            folder, name = run.folder / f"analysis-{split}", run.recipe.name or run.folder.name
            found = analyse_model(run, run.recipe.data, split, name=name, earlier=read_studies(folder))
            if found.studies:
                write_analyses(found, folder, __version__)
        page, path = report_run(run, split, out)
    else:
        raise no_run(model, "report on")
    size = path.stat().st_size
    result = {"out": str(path), "bytes": size, **page.to_json()}
    print_result(result, as_json, f"a page of {size / 1e6:.1f} MB: {path}")


@app.command()
def audit(
    run: Annotated[
        str, typer.Option(metavar="MODEL", help="folder of a run, of an exported or published model, or a hub name")
    ],
    data: Annotated[
        str | None, typer.Argument(help="a recipe (path or name) whose data to audit; none for the run's own")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="with DATA: section.key=value ..., e.g. data.path=my.jsonl")
    ] = None,
    split: Annotated[str | None, typer.Option(help="split of the data; default test, with --cross-fit train")] = None,
    parts: Annotated[
        int,
        typer.Option("--cross-fit", metavar="K", help="audit train in K parts, each by a model trained on the others"),
    ] = 0,
    top: Annotated[int, typer.Option(min=0, help="pairs of either kind on the page and in audit.json")] = 100,
    out: Annotated[
        Path | None, typer.Option(help="folder to write; default audit-SPLIT in the run's folder, with DATA here")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find listed pairs that are probably wrong and unlisted ones that probably match: tables, and a page with the pictures."""
    from sfumato import __version__
    from sfumato.models.build import choose_device
    from sfumato.models.export import load_model
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.models.run import RECIPE, load_run
    from sfumato.reports.audit_page import PAGE, summary, write_audit
    from sfumato.studies.audit import audit_model, cross_fit

    if parts and split not in (None, "train"):
        raise UserError(f"--cross-fit audits the split train, which it trains on in parts; leave --split {split} out")
    split = split or ("train" if parts else "test")
    config = None if data is None else load_recipe(find_recipe(data), overrides or []).data
    folder = out or (Path(run) if data is None else Path()) / f"audit-{split}"
    if (Path(run) / RECIPE).is_file():
        trained = load_run(run, device=choose_device(device))
        home, config = trained.recipe.data, config or trained.recipe.data
        own = (config.source, config.path) == (home.source, home.path)
        if parts:
            result = cross_fit(trained, config, parts, folder)
        else:
            name = Path(run).resolve().name
            result = audit_model(trained, config, split, name=name, seen=own and split == "train")
    elif parts:
        raise UserError(f"--cross-fit trains as a run was trained, and {run} is no run folder")
    elif config is None:
        raise no_run(run, "audit")
    else:
        result = audit_model(load_model(run, device=choose_device(device)), config, split, name=Path(run).name)
    figures = write_audit(result, folder, top, __version__)
    print_result(figures | {"out": str(folder)}, as_json, f"{summary(figures)}\nto look at: {folder / PAGE}")


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    split: Annotated[str, typer.Option(help="split of its data, none that it was trained on")] = "val",
    method: Annotated[str, typer.Option(help="platt, or with the extra calibration: isotonic")] = "platt",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Calibrate a run again: match probabilities, thresholds, abstention and conformal sets, into its calibration.json."""
    from sfumato.models.build import choose_device
    from sfumato.models.calibrate import calibrate_run, describe_calibration
    from sfumato.reports.console import print_calibration

    result = describe_calibration(calibrate_run(run, split, method=method, device=choose_device(device)))
    if as_json:
        print(json.dumps(result))
        return
    print_calibration(result)
    print("written to calibration.json; build indices again, so that they know of it")
