"""The command line: reads arguments, calls the library, prints. Nothing is computed here.

Results go to standard output, progress to standard error. Exit status: 0 done, 1 the run failed (a diverged loss, a lost
process), 2 the user can mend it. Everything heavy is imported inside the commands, so that --help answers at once.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sfumato.errors import RunFailedError, UserError

app = typer.Typer(
    name="sfumato",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Image-text search and matching that knows what it does not know.",
)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value ..., e.g. train.epochs=10 loss.alpha=0.01")
]
ModelName = Annotated[
    str, typer.Argument(help="folder of a run, of an exported or published model, or a name on the Hugging Face hub")
]
Device = Annotated[str, typer.Option(help="where to compute: auto, cpu, cuda, mps")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]

_TIMEOUT_MINUTES = 30.0
"""Longest wait of a process that evaluates for another one."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="path of a recipe, or the name of one that comes with the package")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run; default runs/NAME-OF-THE-RECIPE")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model as a recipe says; an interrupted run in the same folder is resumed."""
    from sfumato.progress import first_process
    from sfumato.recipes import find_recipe
    from sfumato.training.config import load_recipe
    from sfumato.training.loop import fit

    resolved = load_recipe(find_recipe(recipe), overrides or [])
    result = fit(resolved, out or Path("runs") / resolved.name)
    if not first_process():
        return
    score = (
        ""
        if result["best_score"] is None
        else f", best epoch {result['best_epoch'] + 1} with score {result['best_score']:.4f}"
    )
    _print(
        result,
        as_json,
        f"trained {result['parameters']:,} parameters for {result['epochs']} epochs{score}: {result['run']}",
    )


@app.command()
def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(
            help="folder of a run, of an exported or published model, or a name on the Hugging Face hub;"
            " none with --images and --texts, or --ranked"
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="with --data: section.key=value ..., e.g. data.path=my.jsonl")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="a recipe (path or name) whose data to evaluate on; a run has its own")
    ] = None,
    split: Annotated[str, typer.Option(help="split of the data")] = "test",
    distance: Annotated[
        str | None,
        typer.Option(
            "--distance", "--score", help="rank by this instead of the model's own; of files also by cosine or dot"
        ),
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="embeddings of any model: .npy, .safetensors or FILE.safetensors:TENSOR")
    ] = None,
    texts: Annotated[str | None, typer.Option(help="the same of the texts")] = None,
    image_ids: Annotated[
        Path | None, typer.Option(help="their ids: .txt, .json or .npy; default those of the truth, in its order")
    ] = None,
    text_ids: Annotated[Path | None, typer.Option(help="the same of the texts")] = None,
    image_log_var: Annotated[Path | None, typer.Option(help=".npy of log variances; without any, points")] = None,
    text_log_var: Annotated[Path | None, typer.Option(help="the same of the texts")] = None,
    ranked: Annotated[
        Path | None, typer.Option(help='ranked lists instead, JSON: {"i2t": {image: [texts]}, "t2i": {text: [images]}}')
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="of files, what matches: .csv of image,text, or .json of {image: [texts]}")
    ] = None,
    benchmark: Annotated[str | None, typer.Option(help="or coco, flickr30k, flickr8k, cub, emoji")] = None,
    annotations: Annotated[Path | None, typer.Option(help="file or folder that the benchmark is read from")] = None,
    instances: Annotated[list[Path] | None, typer.Option(help="instances_*.json, which add PMRP to coco")] = None,
    metrics: Annotated[str | None, typer.Option(help="of files, e.g. recall@1,map@r instead of the truth's")] = None,
    strategies: Annotated[
        str | None,
        typer.Option(help="side by side: all, or some of mean,wasserstein2,csd,faiss_mean,faiss_rerank,faiss_lifted"),
    ] = None,
    engine: Annotated[str, typer.Option(help="of FAISS strategies: ivf, hnsw, flat, exact")] = "ivf",
    candidates: Annotated[int, typer.Option(min=1, help="that FAISS brings to be re-ranked")] = 100,
    per_query: Annotated[Path | None, typer.Option(help="write the results of single queries: .parquet, .csv")] = None,
    compare: Annotated[
        str | None, typer.Option(help="compare query by query with such a file, or with another run on this split")
    ] = None,
    seeds: Annotated[
        list[Path] | None,
        typer.Option(help="more runs of this recipe, several times: mean ± deviation over all of them"),
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="published figures beside")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model in both directions; of a run on its own data, writes evaluation-SPLIT-DISTANCE.json into its folder.

    Or evaluate embeddings of any model, or ranked lists, against a truth. Started by torchrun, processes share the work on a model.
    """
    from dataclasses import asdict
    from functools import partial

    from sfumato.console import print_evaluation, print_measured, print_more, print_over_seeds
    from sfumato.evaluation.compare import (
        PER_QUERY_ENDINGS,
        main_figures,
        over_seeds,
        per_query_table,
        read_per_query,
    )
    from sfumato.evaluation.embedded import Files, More, measure, measure_files, more_results
    from sfumato.progress import say
    from sfumato.recipes import find_recipe
    from sfumato.training.build import choose_device
    from sfumato.training.config import load_recipe
    from sfumato.training.distributed import join_world
    from sfumato.training.export import load_model
    from sfumato.training.inference import embed_for_evaluation, evaluate_model, evaluate_run
    from sfumato.training.run import RECIPE, load_run

    more = More(strategies, engine, candidates, per_query, compare, published)
    a_file = compare is not None and Path(compare).suffix in PER_QUERY_ENDINGS
    other = read_per_query(compare) if compare is not None and a_file else None
    files = Files(
        images, texts, image_ids, text_ids, image_log_var, text_log_var, ranked, truth, benchmark, annotations,
        tuple(instances or ()), metrics,
    )  # fmt: skip
    if seeds and (model is None or data is not None or more.anything):
        raise UserError("--seeds sums up runs on their own data: sfumato evaluate RUN --seeds RUN --seeds RUN")
    if model is None:
        if data is not None:
            raise UserError("--data goes with a model; files take --truth or --benchmark")
        if compare is not None and not a_file:
            raise UserError(
                f"--compare {compare}: files are compared with single queries, {' or '.join(PER_QUERY_ENDINGS)}"
            )
        where = None if device == "auto" else choose_device(device)
        measured, found = measure_files(files, distance, split=split, device=where)
        if ranked is None and not (image_ids and text_ids):
            say(
                "without --image-ids and --text-ids, and ids in the files, rows are taken in the order of the truth's ids"
            )
        extra = more_results(measured, found, more, other)
        if as_json:
            print(json.dumps(measured.to_json() | extra.to_json()))
            return
        print_measured(measured, str(ranked) if ranked else f"{images}, {texts}")
        print_more(extra)
        return
    if files.given():
        raise UserError(f"{files.given()[0]} goes without a model; a model is evaluated on its own data or with --data")
    path, embedded, embedded_other, results = None, None, None, []
    with join_world(partial(choose_device, device), _TIMEOUT_MINUTES) as world:
        if compare is not None and not a_file:
            if not (Path(compare) / RECIPE).is_file():
                raise UserError(f"--compare {compare}: neither a run folder nor a file of single queries")
            run = load_run(compare, device=world.device)
            embedded_other, other_distance = (
                embed_for_evaluation(run, run.recipe.data, split, world=world),
                run.distance,
            )
        if data is not None:
            config, matcher = (
                load_recipe(find_recipe(data), overrides or []).data,
                load_model(model, device=world.device),
            )
            if more.anything:
                embedded = embed_for_evaluation(matcher, config, split, world=world)
            result = evaluate_model(matcher, config, split, distance, world=world, embedded=embedded)
        elif overrides:
            raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
        elif (Path(model) / RECIPE).is_file():
            run = load_run(model, device=world.device)
            if more.anything:
                embedded = embed_for_evaluation(run, run.recipe.data, split, world=world)
            result, path = evaluate_run(run, split, distance, world=world, embedded=embedded)
            for folder in seeds or ():
                results.append(evaluate_run(load_run(folder, device=world.device), split, distance, world=world)[0])
        else:
            raise _no_run(model, "evaluate it on")
    if not world.main:
        return
    if results:
        summary = over_seeds([main_figures(one.to_json()) for one in [result, *results]])
        if as_json:
            print(json.dumps({name: asdict(value) for name, value in summary.items()}))
        else:
            print_over_seeds(summary, f"{result.distance}, {split}, {1 + len(results)} runs")
        return
    beside = None
    if embedded is not None:
        if embedded_other is not None:
            theirs = measure(embedded_other, distance or other_distance)
            other = per_query_table(theirs.ranks, embedded_other.uncertainty())
        beside = more_results(measure(embedded, result.distance), embedded, more, other)
    if as_json:
        print(json.dumps(result.to_json() | (beside.to_json() if beside else {})))
        return
    print_evaluation(result, f"{model} on {split}, by {result.distance}")
    if beside is not None:
        print_more(beside)
    if path is not None:
        print(f"written to {path}")


@app.command()
def ablate(
    recipe: Annotated[str, typer.Argument(help="path of a recipe, or the name of one that comes with the package")],
    overrides: Overrides = None,
    trained: Annotated[
        str | None,
        typer.Option("--train", help="distances to train with, e.g. csd,wasserstein2; default all but draws"),
    ] = None,
    retrieved: Annotated[
        str | None, typer.Option("--retrieve", help="distances to rank by; default those of --train")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each, from the recipe's train.seed on")] = 1,
    split: Annotated[str, typer.Option(help="split to evaluate on")] = "test",
    out: Annotated[
        Path | None, typer.Option(help="folder of the runs; default runs/ablation-NAME-OF-THE-RECIPE")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare distances: train with each, rank by each; runs that are finished in the folder are taken as they are.

    The runs are OUT/DISTANCE-SEED; one that `sfumato train` has made there counts too.
    """
    from sfumato.console import print_ablation
    from sfumato.recipes import find_recipe
    from sfumato.training.ablation import ABLATED, ablate, ablation_file
    from sfumato.training.build import choose_device
    from sfumato.training.config import load_recipe

    resolved = load_recipe(find_recipe(recipe), overrides or [])
    folder = out or Path("runs") / f"ablation-{resolved.name}"
    names = ABLATED if trained is None else _names(trained)
    result = ablate(
        resolved, folder, trained=names, retrieved=names if retrieved is None else _names(retrieved),
        n_seeds=seeds, split=split, device=choose_device(device),
    )  # fmt: skip
    if as_json:
        print(json.dumps(result.to_json()))
        return
    print_ablation(result.cells, f"{resolved.name}, {split}, {seeds} {'seed' if seeds == 1 else 'seeds'}")
    for run, why in result.failed.items():
        print(f"{run}: {why}")
    print(f"written to {ablation_file(folder, split)}")


@app.command()
def trust(
    model: ModelName,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="with --data: section.key=value ..., e.g. data.path=my.jsonl")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="a recipe (path or name) whose data to measure on; a run has its own")
    ] = None,
    split: Annotated[str, typer.Option(help="split of the data")] = "test",
    queries: Annotated[str, typer.Option(help="whose uncertainties: text, image, both")] = "both",
    bootstrap: Annotated[int, typer.Option(min=0, help="resamples of the confidence intervals")] = 1000,
    corrupted: Annotated[int, typer.Option(min=0, help="queries to corrupt in each way; 0 for none")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="of everything random")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure what each estimator of uncertainty is worth; of a run on its own data, writes trust-SPLIT.json into its folder."""
    from sfumato.console import print_trust
    from sfumato.recipes import find_recipe
    from sfumato.training.build import choose_device
    from sfumato.training.config import load_recipe
    from sfumato.training.export import load_model
    from sfumato.training.run import RECIPE, load_run
    from sfumato.training.trust import trust_model, trust_run

    path, chosen = None, choose_device(device)
    options: dict[str, Any] = {
        "queries": queries, "n_resamples": bootstrap, "n_corrupted": corrupted, "seed": seed
    }  # fmt: skip
    if data is not None:
        config = load_recipe(find_recipe(data), overrides or []).data
        report = trust_model(load_model(model, device=chosen), config, split, **options)
    elif overrides:
        raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
    elif (Path(model) / RECIPE).is_file():
        report, path = trust_run(load_run(model, device=chosen), split, **options)
    else:
        raise _no_run(model, "measure it on")
    if as_json:
        print(json.dumps(report.to_json()))
        return
    print_trust(report, f"{model} on {split}, by {report.distance}")
    if path is not None:
        print(f"written to {path}")


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
    pairs: Annotated[int, typer.Option(min=1, help="sets: pairs of pictures to mix and to erase in part")] = 100,
    bins: Annotated[int, typer.Option(min=1, help="words: bins of uncertainty")] = 10,
    corpus: Annotated[
        str, typer.Option(help="words: what they are weighed against: the captions of their bin, or of the split")
    ] = "bin",
    method: Annotated[str, typer.Option(help="map: pca, or with the extra analysis: tsne")] = "pca",
    items: Annotated[int, typer.Option(min=1, help="map: most images, and most texts")] = 200,
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
    """
    from sfumato import __version__
    from sfumato.analysis.pages import write_analyses
    from sfumato.analysis.studies import AnalysisOptions, analyse_model
    from sfumato.console import print_analyses
    from sfumato.recipes import find_recipe
    from sfumato.training.build import choose_device
    from sfumato.training.config import load_recipe
    from sfumato.training.export import load_model
    from sfumato.training.inference import Matcher
    from sfumato.training.run import RECIPE, load_run

    options = AnalysisOptions(
        uncertainty=uncertainty, n_corrupted=corrupted, n_pairs=pairs, n_bins=bins, corpus=corpus, method=method,
        n_mapped=items, n_resamples=bootstrap, seed=seed,
    )  # fmt: skip
    folder, chosen = out or Path(f"analysis-{split}"), choose_device(device)
    if data is not None:
        config, name = load_recipe(find_recipe(data), overrides or []).data, Path(model).name
        matcher: Matcher = load_model(model, device=chosen)
    elif overrides:
        raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
    elif (Path(model) / RECIPE).is_file():
        matcher = run = load_run(model, device=chosen)
        config, name, folder = run.recipe.data, run.recipe.name or run.folder.name, out or run.folder / folder
    else:
        raise _no_run(model, "analyse")
    studies = None if only is None else _names(only)
    found = analyse_model(matcher, config, split, studies=studies, options=options, name=name)
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
    from sfumato.analysis.crop_pages import write_crops
    from sfumato.analysis.crop_study import study_crops
    from sfumato.console import print_crops
    from sfumato.training.build import choose_device
    from sfumato.training.export import load_model
    from sfumato.training.run import RECIPE

    try:
        shares = [float(share) for share in _names(thresholds)]
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
    from sfumato.prompts import read_templates
    from sfumato.recipes import find_recipe
    from sfumato.training.build import choose_device
    from sfumato.training.config import load_recipe
    from sfumato.training.export import load_model
    from sfumato.zeroshot import evaluate_zeroshot, labelled_split

    if sum(source is not None for source in (images, emoji, data)) != 1:
        raise UserError("give one of --images FOLDER, --emoji group or subgroup, and --data RECIPE")
    if overrides and data is None:
        raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
    worded = read_templates(templates)
    names = read_class_names(classes) if classes is not None else None
    if images is not None:
        pictures = read_class_folder(images, names)
    elif emoji is not None:
        pictures = emoji_labelled(emoji, style=style, names=names)
    else:
        pictures = labelled_split(load_recipe(find_recipe(data or ""), overrides or []).data, split, names)
    others = None
    if choose_on is not None:
        if images is not None and choose_on.resolve() == images.resolve():
            raise UserError("--choose-on is what is reported on; K chosen there is --filter oracle")
        others = read_class_folder(choose_on, dict(zip(pictures.keys, pictures.classes, strict=True)))
    report = evaluate_zeroshot(
        load_model(model, device=choose_device(device)), pictures, worded, filters=filters or ("global", "per-class"),
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
            "--analyses", help="of a run: do the studies of `sfumato analyse` first; those done are shown anyway"
        ),
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write one HTML page: figures, uncertainty, calibration, and with pictures what was found, right and wrong."""
    from sfumato import __version__
    from sfumato.analysis.pages import write_analyses
    from sfumato.analysis.studies import analyse_model
    from sfumato.recipes import find_recipe
    from sfumato.training.build import choose_device
    from sfumato.training.config import load_recipe
    from sfumato.training.export import load_model
    from sfumato.training.reporting import report_model, report_run
    from sfumato.training.run import RECIPE, load_run

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
            found = analyse_model(run, run.recipe.data, split, name=run.recipe.name or run.folder.name)
            write_analyses(found, run.folder / f"analysis-{split}", __version__)
        page, path = report_run(run, split, out)
    else:
        raise _no_run(model, "report on")
    size = path.stat().st_size
    result = {"out": str(path), "bytes": size, **page.to_json()}
    _print(result, as_json, f"a page of {size / 1e6:.1f} MB: {path}")


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
    from sfumato.audit.pages import PAGE, summary, write_audit
    from sfumato.audit.review import audit_model, cross_fit
    from sfumato.recipes import find_recipe
    from sfumato.training.build import choose_device
    from sfumato.training.config import load_recipe
    from sfumato.training.export import load_model
    from sfumato.training.run import RECIPE, load_run

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
        raise _no_run(run, "audit")
    else:
        result = audit_model(load_model(run, device=choose_device(device)), config, split, name=Path(run).name)
    figures = write_audit(result, folder, top, __version__)
    _print(figures | {"out": str(folder)}, as_json, f"{summary(figures)}\nto look at: {folder / PAGE}")


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    split: Annotated[str, typer.Option(help="split of its data, none that it was trained on")] = "val",
    method: Annotated[str, typer.Option(help="platt, or with the extra calibration: isotonic")] = "platt",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Calibrate a run again: match probabilities, thresholds, abstention and conformal sets, into its calibration.json."""
    from sfumato.console import print_calibration
    from sfumato.training.build import choose_device
    from sfumato.training.inference import calibrate_run, describe_calibration

    result = describe_calibration(calibrate_run(run, split, method=method, device=choose_device(device)))
    if as_json:
        print(json.dumps(result))
        return
    print_calibration(result)
    print("written to calibration.json; build indices again, so that they know of it")


@app.command()
def regions(
    data: Annotated[str, typer.Argument(help="a recipe (path or name) whose pictures to take")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value ..., e.g. data.path=my.jsonl")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder to write: new, or empty")] = Path("regions"),
    backbone: Annotated[
        str, typer.Option(help="efficientnet-lite0, a hub name, or a local transformers folder")
    ] = "efficientnet-lite0",
    size: Annotated[int | None, typer.Option(help="side of the pictures in pixels; default the backbone's own")] = None,
    grid: Annotated[int | None, typer.Option(help="average a convolutional map down to grid x grid regions")] = None,
    layout: Annotated[
        str, typer.Option(help="scan: one file a split; manifest: one a picture, for any number of captions")
    ] = "scan",
    splits: Annotated[str | None, typer.Option(help="of the data, e.g. train,val,test; default all")] = None,
    as_json: AsJson = False,
) -> None:
    """Write pictures as region features of a frozen backbone, to train from with model.image.kind=regions."""
    from sfumato.recipes import find_recipe
    from sfumato.training.config import load_recipe
    from sfumato.training.regions import regions_of_pictures

    config = load_recipe(find_recipe(data), overrides or []).data
    chosen = None if splits is None else _names(splits)
    shapes, problems = regions_of_pictures(config, out, backbone, size=size, grid=grid, layout=layout, splits=chosen)
    result = {"out": str(out), "splits": shapes, "problems": len(problems)}
    line = "\n".join(f"{name}: {n} x {r} x {c}" for name, (n, r, c) in shapes.items())
    _print(result, as_json, f"{line}\nwritten to {out}" + _left_out(problems))


@app.command()
def embed(
    model: ModelName,
    out: Annotated[
        Path, typer.Option(help="folder of parts to write or to go on in; of a few items NAME.safetensors, one file")
    ],
    images: Annotated[Path | None, typer.Option(help="folder of pictures, searched through")] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="or .jsonl, .csv or .parquet with a column image, and id if wanted")
    ] = None,
    shards: Annotated[
        str | None, typer.Option(help="or webdataset shards: a folder, a glob or a pattern such as 'a-{000..009}.tar'")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="or a text file, one text a line")] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="do job I of N, from 0/N to N-1/N; under torchrun default RANK/WORLD_SIZE"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="threads that decode; default as many as processors")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="items that the encoder takes at a time")] = 64,
    part_size: Annotated[int, typer.Option(min=1, help="most items of a part; the same in all jobs")] = 4096,
    max_problem_share: Annotated[
        float, typer.Option(min=0, max=1, help="stop when more of a job's items are unusable, and more than three")
    ] = 0.01,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Embed pictures or texts, however many, with ids: into a folder of parts that the same command continues after a crash.

    N jobs, on N machines if need be, write into the same folder without knowing of each other.
    """
    import time

    from sfumato.gaussian import save_embeddings
    from sfumato.training.build import choose_device
    from sfumato.training.export import load_model
    from sfumato.training.inference import embed_folder, embed_lines
    from sfumato.training.ingest import embed_collection, file_endings, list_source, which_job

    if out.suffix != ".safetensors":
        job, of = which_job(shard)
        loaded = load_model(model, device=choose_device(device, int(os.environ.get("LOCAL_RANK", "0"))))
        listing = list_source(
            images=images, manifest=manifest, shards=shards, texts=texts, part_size=part_size,
            endings=file_endings(loaded.model),
        )  # fmt: skip
        done = embed_collection(
            loaded, listing, out, job=job, of=of, workers=workers, batch_size=batch,
            max_problem_share=max_problem_share, home=model,
        )  # fmt: skip
        line = f"job {job}/{of}: {done.n} embeddings in {done.parts} parts, {done.new} of them new: {out}"
        _print(done.to_json(), as_json, line + _speed(done.per_second) + _left_out(done.problems))
        return
    if manifest or shards or shard or (images is None) == (texts is None):
        raise UserError(
            f"{out} is one file, for either --images FOLDER or --texts FILE; more goes into a folder, --out {out.stem}"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    loaded = load_model(model, device=choose_device(device))
    start = time.perf_counter()
    embeddings, ids, problems = embed_folder(loaded, images) if images else embed_lines(loaded, texts or Path())
    per_second = embeddings.n / (time.perf_counter() - start)
    save_embeddings(out, embeddings, ids)
    result = {
        "out": str(out), "n": embeddings.n, "d": embeddings.d, "problems": len(problems), "per_second": per_second
    }  # fmt: skip
    line = f"{embeddings.n} embeddings of {embeddings.d} dimensions: {out}" + _speed(per_second)
    _print(result, as_json, line + _left_out(problems))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    out: Annotated[Path, typer.Argument(help="folder to write: new, or empty")],
    as_json: AsJson = False,
) -> None:
    """Write a run's model in the layout of the Hugging Face hub: weights, config.json and a model card with its scores."""
    from sfumato.training.export import export_run

    written = export_run(run, out)
    size = sum(file.stat().st_size for file in written.iterdir())
    _print({"out": str(written), "bytes": size}, as_json, f"exported {size / 1e6:.1f} MB: {written}")


@app.command()
def index(
    model: ModelName,
    out: Annotated[Path, typer.Option(help="folder of the index")],
    images: Annotated[Path | None, typer.Option(help="folder of pictures, searched through")] = None,
    split: Annotated[str | None, typer.Option(help="or, of a run, the pictures of a split of its data")] = None,
    texts: Annotated[
        Path | None, typer.Option(help="or a file of texts, one a line, to be searched by picture")
    ] = None,
    embeddings: Annotated[Path | None, typer.Option(help="or a folder that sfumato embed has written")] = None,
    engine: Annotated[
        str | None, typer.Option(help="without --store: exact (default), or with the extra faiss flat, hnsw, ivf")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="keep the items in a vector store, where they can be added and deleted: file: (in the folder), file:?engine=hnsw,"
            " milvus:PATH.db, milvus+http://host:19530/NAME, postgresql://user@host/database?table=NAME, rerank:PATH,"
            " redis://host:6379/0?means=PATH"
        ),
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="add to the collection that --out holds already")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Build an index over pictures or texts, or fill a collection in a vector store."""
    from sfumato.search.index import check_settings
    from sfumato.training.build import choose_device
    from sfumato.training.export import load_model
    from sfumato.training.galleries import build_index, check_new, embed_source, fill_collection, whole
    from sfumato.training.inference import Matcher
    from sfumato.training.run import load_run

    if sum(source is not None for source in (images, split, texts, embeddings)) != 1:
        raise UserError("give one of --images FOLDER, --split NAME, --texts FILE and --embeddings FOLDER")
    if engine is not None and (store is not None or add):
        raise UserError(
            "the engine of a store is part of its URL, e.g. --store 'file:?engine=hnsw'; leave --engine out"
        )
    if add and store is not None:
        raise UserError("the collection knows its store; leave --store out with --add")
    matcher: Matcher = (load_run if split is not None else load_model)(model, device=choose_device(device))
    if store is not None:
        check_new(out, matcher.distance, store)
    elif not add:
        check_settings(matcher.distance, engine or "exact")
    out.parent.mkdir(parents=True, exist_ok=True)
    sources, problems = embed_source(matcher, images=images, split=split, texts=texts, parts=embeddings)
    if store is None and not add:
        source, engine = whole(sources), engine or "exact"
        build_index(matcher, source, home=model, engine=engine).save(out)
        n, kept = len(source.ids), {"engine": engine}
        line = f"indexed ({engine})"
        direction = source.direction
    else:
        with fill_collection(matcher, sources, out, store, home=model) as collection:
            n, kept = len(collection), {"store": collection.store.url}
            line, direction = f"in {collection.store.url}", collection.answers.direction
    what = "pictures" if direction == "t2i" else "texts"
    result = {"out": str(out), "n": n, **kept, "problems": len(problems)}
    _print(result, as_json, f"{n} {what} {line}: {out}" + _left_out(problems))


@app.command()
def copy(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="folder of an index or a collection")],
    out: Annotated[Path, typer.Argument(help="folder of the copy: new, or empty")],
    store: Annotated[str, typer.Option(help="where its items go, as for sfumato index")] = "file:",
    source_store: Annotated[str | None, typer.Option(help="where the items are, if they have moved")] = None,
    as_json: AsJson = False,
) -> None:
    """Copy an index or a collection into another store: a snapshot, or the move from a laptop to a cluster."""
    from sfumato.training.galleries import copy_index

    url, n = copy_index(folder, out, store, source_store=source_store)
    _print({"out": str(out), "store": url, "items": n}, as_json, f"{n} items copied to {url}: {out}")


@app.command()
def search(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="folder of an index")],
    query: Annotated[list[str] | None, typer.Argument(help="texts to search for")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="picture to search for; may be given several times")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="number of results")] = 10,
    min_probability: Annotated[float | None, typer.Option(help="leave out what is less likely to match")] = None,
    coverage: Annotated[
        float | None, typer.Option(help="give also the set of all that may match, e.g. 0.9: it holds a match as often")
    ] = None,
    abstain: Annotated[
        float | None,
        typer.Option(metavar="RISK", help="say when there is no confident match: at most this share is wrong"),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="folder or name of the model, if it has moved since the index was built")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="URL of a collection's store, if it has moved, or with other options of searching"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search an index by text or picture: ids, distances, match probabilities and uncertainties."""
    from sfumato.console import print_search
    from sfumato.training.galleries import search_index

    if not query and not image:
        raise UserError("nothing to search for: give a text, or --image FILE")
    results = search_index(
        folder,
        query or [],
        image or [],
        k=k,
        run=run,
        store=store,
        min_probability=min_probability,
        coverage=coverage,
        max_risk=abstain,
    )
    if as_json:
        print(json.dumps(results, ensure_ascii=False))
        return
    for result in results:
        print_search(result)


@app.command()
def serve(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_INDEX", help="folder of an index, a collection or a run")],
    texts: Annotated[
        Path | None,
        typer.Option(metavar="INDEX", help="a gallery of texts beside that of pictures, to be searched by picture"),
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="MODEL", help="folder or name of the model, if it has moved")
    ] = None,
    store: Annotated[str | None, typer.Option(help="URL of the collection's store, if it has moved")] = None,
    split: Annotated[str | None, typer.Option(help="of a run: embed this split of its data; test if left out")] = None,
    host: Annotated[
        str, typer.Option(help="address to listen at; others than this machine's own need a key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free one")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="file of keys that open the service, one a line; or SFUMATO_API_KEY")
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="listen to a network without a key all the same; then --allowed-host too")
    ] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="name that it may be called by, beside this machine's own; several times")
    ] = None,
    max_upload_mb: Annotated[float, typer.Option(help="size of a picture file at most")] = 10.0,
    max_pixels: Annotated[int, typer.Option(help="of all pictures of a request at most")] = 40_000_000,
    max_batch: Annotated[int, typer.Option(help="queries or new items of a request at most")] = 64,
    max_results: Annotated[int, typer.Option(help="hits of a query, and items of a conformal set, at most")] = 1000,
    batch_size: Annotated[int, typer.Option(help="texts or pictures embedded together at most")] = 32,
    batch_window_ms: Annotated[float, typer.Option(help="how long the first of them waits for others")] = 2.0,
    queue: Annotated[int, typer.Option(help="texts or pictures that wait at most; more are refused for now")] = 256,
    timeout: Annotated[float, typer.Option(help="seconds for a request to arrive, and again to be answered")] = 30.0,
    threads: Annotated[int, typer.Option(help="of one computation")] = 1,
    workers: Annotated[int, typer.Option(help="searches at the same time")] = 2,
    grace: Annotated[int, typer.Option(min=0, help="seconds to finish requests after SIGTERM")] = 30,
    access_log: Annotated[bool, typer.Option("--access-log", help="a line for every request")] = False,
    device: Device = "auto",
) -> None:
    """Serve a web page and an HTTP interface for searching, and of a collection for adding and removing."""
    from sfumato.serve.settings import Settings, read_keys, require_extra

    require_extra()
    from sfumato.serve.app import create_app
    from sfumato.serve.server import check_address, check_host, check_names, hosts_of, run_app
    from sfumato.serve.sources import open_sources
    from sfumato.training.build import choose_device

    keys = read_keys(api_key_file, os.environ.get("SFUMATO_API_KEY"))
    check_host(host, keys, no_key)
    settings = Settings(
        batch_size=batch_size,
        batch_window=batch_window_ms / 1000,
        max_waiting=queue,
        max_batch=max_batch,
        max_results=max_results,
        max_upload_bytes=int(max_upload_mb * 1_000_000),
        max_pixels=max_pixels,
        timeout=timeout,
        threads=threads,
        workers=workers,
        keys=keys,
        hosts=hosts_of(host, allowed_host or []),
    )
    check_names(host, settings)
    check_address(host, port)
    sources = open_sources(source, texts=texts, run=run, store=store, split=split, device=choose_device(device))
    run_app(create_app(sources, settings), host=host, port=port, grace=grace, access_log=access_log)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the run, the index and the page")] = Path("runs/demo"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value for the recipe, several times")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The whole way on the embedded emoji set: train, evaluate, index, search, and a page to look at."""
    from sfumato.demo import run_demo

    result = run_demo(out, overrides or [])
    if as_json:
        print(json.dumps(result, ensure_ascii=False))


@app.command()
def toy(
    seed: Annotated[int, typer.Option(help="of the samples and the batches")] = 0,
    out: Annotated[Path, typer.Option(help="folder for the picture and the animation")] = Path("runs/toy"),
    updates: Annotated[int, typer.Option(min=1, help="mini-batches that each method learns from")] = 500,
    as_json: AsJson = False,
) -> None:
    """The 2-D study of the PCME++ paper: variances of uncertain over certain samples, a picture and an animation."""
    from sfumato.toy import run_toy

    result = run_toy(out, seed=seed, updates=updates)
    if as_json:
        print(json.dumps(result))
        return
    print(f"mean variance of uncertain over certain samples, seed {seed}, {updates} updates")
    print(f"{'method':<18}{'certain':>9}{'uncertain':>11}{'ratio':>8}{'published':>11}")
    for method in result["ratio"]:
        values = (result[key][method] for key in ("certain", "uncertain", "ratio", "published_ratio"))
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        print(f"{method:<18}{cells[0]:>9}{cells[1]:>11}{cells[2]:>8}{cells[3]:>11}")
    print(f"picture: {result['picture']}\nanimation: {result['animation']}")


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="print this recipe")] = None) -> None:
    """List the recipes that come with the package, or print one."""
    from sfumato.recipes import find_recipe, recipe_files, recipe_summary

    if name:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
        return
    files = recipe_files()
    width = max(len(n) for n in files)
    for key, file in files.items():
        print(f"{key:<{width}}  {recipe_summary(file)}")


def main() -> None:
    """Entry point: errors that users can mend become one line and exit status 2."""
    debug = bool(os.environ.get("SFUMATO_DEBUG"))
    try:
        app(standalone_mode=True)
    except (UserError, ValueError, OSError) as error:
        if debug:
            raise
        print(f"sfumato: {error}", file=sys.stderr)
        sys.exit(2)
    except (RunFailedError, ArithmeticError) as error:
        if debug:
            raise
        print(f"sfumato: {error}", file=sys.stderr)
        sys.exit(1)


def _print(result: dict[str, Any], as_json: bool, line: str) -> None:
    print(json.dumps(result) if as_json else line)


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def _no_run(model: str, wanted: str) -> UserError:
    from sfumato.training.run import RECIPE

    if not Path(model).exists():
        return UserError(
            f"there is no folder {model}; of a model on the hub say what to {wanted}: --data RECIPE data.path=..."
        )
    return UserError(
        f"{model} is not a run folder (no {RECIPE} in it); say what to {wanted}: --data RECIPE data.path=..."
    )


def _speed(per_second: float | None) -> str:
    return f"; {per_second:.1f} a second" if per_second else ""


def _left_out(problems: Any) -> str:
    return f"; {len(problems)} left out:\n{problems.summary()}" if len(problems) else ""


if __name__ == "__main__":
    main()
