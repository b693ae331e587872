"""Training, and what a model is worth: figures, distances, estimators of uncertainty."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sfumato.cli.common import (
    TIMEOUT_MINUTES,
    AsJson,
    Device,
    ModelName,
    Overrides,
    app,
    no_run,
    parse_names,
    print_result,
)
from sfumato.errors import UserError


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="path of a recipe, or the name of one that comes with the package")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run; default runs/NAME-OF-THE-RECIPE")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model as a recipe says; an interrupted run in the same folder is resumed."""
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.progress import first_process
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
    print_result(
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

    from sfumato.evaluation.compare import main_figures, over_seeds
    from sfumato.evaluation.embedded_input import Files, measure, measure_files
    from sfumato.evaluation.more_results import More, more_results
    from sfumato.evaluation.per_query import PER_QUERY_ENDINGS, per_query_table, read_per_query
    from sfumato.models.build import choose_device
    from sfumato.models.embed import embed_for_evaluation, evaluate_model, evaluate_run
    from sfumato.models.export import load_model
    from sfumato.models.process_group import join_process_group
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.models.run import RECIPE, load_run
    from sfumato.progress import say
    from sfumato.reports.console import print_evaluation, print_measured, print_more, print_over_seeds

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
    with join_process_group(partial(choose_device, device), TIMEOUT_MINUTES) as process_group:
        if compare is not None and not a_file:
            if not (Path(compare) / RECIPE).is_file():
                raise UserError(f"--compare {compare}: neither a run folder nor a file of single queries")
            run = load_run(compare, device=process_group.device)
            embedded_other, other_distance = (
                embed_for_evaluation(run, run.recipe.data, split, process_group=process_group),
                run.distance,
            )
        if data is not None:
            config, retrieval_model = (
                load_recipe(find_recipe(data), overrides or []).data,
                load_model(model, device=process_group.device),
            )
            if more.anything:
                embedded = embed_for_evaluation(retrieval_model, config, split, process_group=process_group)
            result = evaluate_model(
                retrieval_model, config, split, distance, process_group=process_group, embedded=embedded
            )
        elif overrides:
            raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
        elif (Path(model) / RECIPE).is_file():
            run = load_run(model, device=process_group.device)
            if more.anything:
                embedded = embed_for_evaluation(run, run.recipe.data, split, process_group=process_group)
            result, path = evaluate_run(run, split, distance, process_group=process_group, embedded=embedded)
            for folder in seeds or ():
                results.append(
                    evaluate_run(
                        load_run(folder, device=process_group.device), split, distance, process_group=process_group
                    )[0]
                )
        else:
            raise no_run(model, "evaluate it on")
    if not process_group.main:
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
    from sfumato.models.build import choose_device
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.reports.console import print_ablation
    from sfumato.training.ablation import ABLATED, ablate, ablation_file

    resolved = load_recipe(find_recipe(recipe), overrides or [])
    folder = out or Path("runs") / f"ablation-{resolved.name}"
    names = ABLATED if trained is None else parse_names(trained)
    result = ablate(
        resolved, folder, trained=names, retrieved=names if retrieved is None else parse_names(retrieved),
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
    from sfumato.models.build import choose_device
    from sfumato.models.export import load_model
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.models.run import RECIPE, load_run
    from sfumato.models.trust_run import trust_model, trust_run
    from sfumato.reports.console import print_trust

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
        raise no_run(model, "measure it on")
    if as_json:
        print(json.dumps(report.to_json()))
        return
    print_trust(report, f"{model} on {split}, by {report.distance}")
    if path is not None:
        print(f"written to {path}")
