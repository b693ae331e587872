"""Features and embeddings of whole collections, and models to give away."""

import os
from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli.common import AsJson, Device, ModelName, app, parse_names, print_result, say_left_out, say_speed
from sfumato.errors import UserError


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
    from sfumato.models.extract_regions import MANIFEST, regions_of_images
    from sfumato.models.recipe import find_recipe, load_recipe

    config = load_recipe(find_recipe(data), overrides or []).data
    chosen = None if splits is None else parse_names(splits)
    shapes, problems = regions_of_images(config, out, backbone, size=size, grid=grid, layout=layout, splits=chosen)
    result = {"out": str(out), "splits": shapes, "problems": len(problems)}
    line = "\n".join(f"{name}: {n} x {r} x {c}" for name, (n, r, c) in shapes.items())
    channels = next(iter(shapes.values()))[2]
    path = out / MANIFEST if layout == "manifest" else out
    keys = f"data.source={layout} data.path={path} model.image.kind=regions model.image.channels={channels}"
    print_result(result, as_json, f"{line}\nto train from them: sfumato train RECIPE {keys}" + say_left_out(problems))


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

    from sfumato.data.listings import list_source
    from sfumato.gaussian import save_embeddings
    from sfumato.models.build import choose_device
    from sfumato.models.embed import embed_folder, embed_lines
    from sfumato.models.embedding_steps import file_endings
    from sfumato.models.export import load_model
    from sfumato.models.ingest import embed_collection, which_job

    if out.suffix != ".safetensors":
        job, of = which_job(shard)
        loaded = load_model(model, device=choose_device(device, int(os.environ.get("LOCAL_RANK", "0"))))
        listing = list_source(
            images=images, manifest=manifest, shards=shards, texts=texts, part_size=part_size,
            endings=file_endings(loaded.model),
        )  # fmt: skip
        done = embed_collection(
            loaded, listing, out, job=job, of=of, workers=workers, batch_size=batch,
            max_problem_fraction=max_problem_share, model_source=model,
        )  # fmt: skip
        line = f"job {job}/{of}: {done.n} embeddings in {done.parts} parts, {done.new} of them new: {out}"
        print_result(done.to_json(), as_json, line + say_speed(done.per_second) + say_left_out(done.problems))
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
    line = f"{embeddings.n} embeddings of {embeddings.d} dimensions: {out}" + say_speed(per_second)
    print_result(result, as_json, line + say_left_out(problems))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    out: Annotated[Path, typer.Argument(help="folder to write: new, or empty")],
    as_json: AsJson = False,
) -> None:
    """Write a run's model in the layout of the Hugging Face hub: weights, config.json and a model card with its scores."""
    from sfumato.models.export import export_run

    written = export_run(run, out)
    size = sum(file.stat().st_size for file in written.iterdir())
    print_result({"out": str(written), "bytes": size}, as_json, f"exported {size / 1e6:.1f} MB: {written}")
