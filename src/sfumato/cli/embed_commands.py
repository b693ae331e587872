"""The commands that write features, embeddings and models to files: regions, embed, export, adopt."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sfumato.cli.common import (
    AsJson,
    Device,
    ModelName,
    RunFolder,
    Seed,
    check_out_file,
    check_out_folder,
    command,
    flag,
    parse_names,
    print_result,
    problems_suffix,
    speed_suffix,
    word,
    writing,
)
from sfumato.errors import UserError, as_typed


@command()
def regions(
    data: Annotated[str, word("Recipe (path or name) that names the images.", "RECIPE")],
    overrides: Annotated[
        list[str] | None,
        word("Changes to the recipe, e.g. data.path=my.jsonl.", "SECTION.KEY=VALUE"),
    ] = None,
    out: Annotated[Path, flag("Folder to write: new, or empty.")] = Path("regions"),
    backbone: Annotated[
        str, flag("Frozen model: efficientnet-lite0, a name on the hub, or a local transformers folder.")
    ] = "efficientnet-lite0",
    size: Annotated[int | None, flag("Side of the images, in pixels. Default: the backbone's own.")] = None,
    grid: Annotated[
        int | None, flag("Average a convolutional map to GRID x GRID regions. Default: all its cells.")
    ] = None,
    layout: Annotated[
        str, flag("scan: one file per split. manifest: one file per image, for any number of captions.")
    ] = "scan",
    splits: Annotated[
        str | None, flag("Splits of the data, separated by commas, e.g. train,val. Default: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write images as region features of a frozen backbone.

    A model with model.image.kind=regions is trained from them.
    """
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.workflows.regions import MANIFEST, regions_of_images

    config = load_recipe(find_recipe(data), overrides or []).data
    check_out_folder(out)
    chosen = None if splits is None else parse_names(splits)
    shapes, problems = regions_of_images(config, out, backbone, size=size, grid=grid, layout=layout, splits=chosen)
    result = {"out": str(out), "splits": shapes, "problems": len(problems)}
    line = "\n".join(f"{name}: {n} x {r} x {c}" for name, (n, r, c) in shapes.items())
    channels = next(iter(shapes.values()))[2]
    path = out / MANIFEST if layout == "manifest" else out
    keys = f"data.source={layout}", f"data.path={path}", "model.image.kind=regions", f"model.image.channels={channels}"
    command = as_typed("sfumato", "train", "RECIPE", *keys)
    print_result(result, as_json, f"{line}\nto train from them: {command}" + problems_suffix(problems))


@dataclass(frozen=True)
class EmbedFlags:
    """What is embedded, and how the work is divided."""

    images: Annotated[Path | None, flag("Folder of images, with all its subfolders.")] = None
    manifest: Annotated[
        Path | None, flag("Or a .jsonl, .csv or .parquet file with a column image and, optionally, id.")
    ] = None
    shards: Annotated[
        str | None, flag("Or webdataset shards: a folder, a glob, or a pattern such as 'a-{000..009}.tar'.")
    ] = None
    texts: Annotated[Path | None, flag("Or a file with one text per line.")] = None
    shard: Annotated[
        str | None,
        flag("Do job I of N jobs, from 0/N to N-1/N. Default: 0/1, under torchrun RANK/WORLD_SIZE.", metavar="I/N"),
    ] = None
    workers: Annotated[int | None, flag("Number of threads that decode. Default: the number of processors.", min=1)] = (
        None
    )
    batch: Annotated[int, flag("Number of items that the encoder takes at a time.", min=1)] = 64
    part_size: Annotated[int, flag("Largest number of items per part; the same in all jobs.", min=1)] = 4096
    max_problem_share: Annotated[
        float,
        flag(
            "Stop when more than this fraction of a job's items, and more than three, are unusable.",
            "--max-problem-fraction",
            "--max-problem-share",
            min=0,
            max=1,
        ),
    ] = 0.01


@command()
def embed(
    *,
    model: ModelName,
    out: Annotated[
        Path,
        flag("Folder for the parts; an incomplete one is continued. Or, for few items, one file NAME.safetensors."),
    ],
    given: EmbedFlags,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Embed any number of images or texts, with their ids.

    The result is a folder of parts; after a crash the same command continues it. N jobs, on one machine or several, can
    write into the same folder.
    """
    from sfumato.data.listings import list_source
    from sfumato.errors import counted
    from sfumato.models.embed import file_endings
    from sfumato.models.load import load_model
    from sfumato.models.run import choose_device
    from sfumato.search.parts import MANIFEST
    from sfumato.workflows.embed import embed_collection, which_job

    if out.suffix == ".safetensors":
        if given.manifest or given.shards or given.shard or (given.images is None) == (given.texts is None):
            raise UserError(
                f"{out} is one file, which takes only --images FOLDER or --texts FILE; for other options"
                f" give a folder, --out {out.stem}"
            )
        result, line = _embed_one_file(model, out, given.images, given.texts, device)
        print_result(result, as_json, line)
        return
    check_out_folder(out, ours=lambda folder: (folder / MANIFEST).is_file())
    job, of = which_job(given.shard)
    loaded = load_model(model, device=choose_device(device, int(os.environ.get("LOCAL_RANK", "0"))))
    listing = list_source(
        images=given.images, manifest=given.manifest, shards=given.shards, texts=given.texts, part_size=given.part_size,
        endings=file_endings(loaded.model),
    )  # fmt: skip
    done = embed_collection(
        loaded, listing, out, job=job, of=of, workers=given.workers, batch_size=given.batch,
        max_problem_fraction=given.max_problem_share,
    )  # fmt: skip
    made = f"{counted(done.n, 'embedding')} in {counted(done.parts, 'part')}"
    line = f"job {job}/{of}: {made}, {done.new:,} of them new: {out}"
    print_result(done.to_json(), as_json, line + speed_suffix(done.per_second) + problems_suffix(done.problems))


def _embed_one_file(
    model: str, out: Path, images: Path | None, texts: Path | None, device: str
) -> tuple[dict[str, Any], str]:
    """Embed a folder of images or a file of texts into one file; returns the result and a line about it."""
    import time

    from sfumato.errors import counted
    from sfumato.gaussian import save_embeddings
    from sfumato.models.embed import embed_folder, embed_lines
    from sfumato.models.load import load_model
    from sfumato.models.run import choose_device

    check_out_folder(out.parent)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_out_file(out)
    loaded = load_model(model, device=choose_device(device))
    start = time.perf_counter()
    embeddings, ids, problems = embed_folder(loaded, images) if images else embed_lines(loaded, texts or Path())
    per_second = embeddings.n / (time.perf_counter() - start)
    save_embeddings(out, embeddings, ids)
    result = {
        "out": str(out), "n": embeddings.n, "d": embeddings.d, "problems": len(problems), "per_second": per_second
    }  # fmt: skip
    line = f"{counted(embeddings.n, 'embedding')} of {embeddings.d} dimensions: {out}"
    return result, line + speed_suffix(per_second) + problems_suffix(problems)


@command()
def export(
    run: RunFolder,
    out: Annotated[Path, word("Folder to write: new, or empty.", "OUT")],
    as_json: AsJson = False,
) -> None:
    """Export a run's model in the layout of the Hugging Face hub.

    Writes the weights, config.json and a model card with scores.
    """
    from sfumato.workflows.export import export_run

    check_out_folder(out)
    with writing(out):
        written = export_run(run, out)
    size = sum(file.stat().st_size for file in written.iterdir())
    print_result({"out": str(written), "bytes": size}, as_json, f"exported {size / 1e6:.1f} MB: {written}")


@dataclass(frozen=True)
class Frozen:
    """A frozen model with its data, or its embeddings."""

    model: Annotated[
        str | None,
        word(
            "Hub name or folder of a CLIP or SigLIP model of transformers, or open_clip:ARCHITECTURE/TAG; with"
            " --data. Or give --images and --texts.",
            "MODEL",
        ),
    ] = None
    data: Annotated[
        str | None,
        flag(
            "With MODEL: a manifest (.csv, .jsonl, .parquet), a folder of images with .txt files, or a"
            " Karpathy JSON beside its images.",
            metavar="PATH",
        ),
    ] = None
    images: Annotated[
        str | None,
        flag(
            "Embeddings of images: .npy, .safetensors (FILE:NAME), .parquet, or a folder of such files.", metavar="FILE"
        ),
    ] = None
    texts: Annotated[str | None, flag("Embeddings of texts by the same model, as --images.", metavar="FILE")] = None
    pairs: Annotated[
        str | None,
        flag(
            "True pairs: columns image and text (rows or ids), optionally split and caption. Default: row i of"
            " the images with row i of the texts.",
            metavar="FILE",
        ),
    ] = None


@dataclass(frozen=True)
class AdoptFlags:
    """How the probabilities are fitted and measured."""

    method: Annotated[
        str,
        flag(
            "What the probability of a hit is computed from: distance, nearest (also the nearest items),"
            " reference (also reference queries), or auto, which tries all and keeps the best."
        ),
    ] = "auto"
    val_fraction: Annotated[
        float, flag("Fraction of the images that calibrate, if the pairs have no split.", min=0.01, max=0.98)
    ] = 0.5
    test_fraction: Annotated[
        float, flag("Fraction of the images that measure, if the pairs have no split.", min=0, max=0.98)
    ] = 0.3
    queries: Annotated[
        str,
        flag(
            "Queries that probabilities are for. planted: every query has a match in the gallery; independent:"
            " some have none."
        ),
    ] = "planted"
    max_queries: Annotated[
        int,
        flag(
            "Largest number of images, and of texts, of the split val that are queries of the fit. More take longer.",
            min=1,
        ),
    ] = 1500
    force: Annotated[bool, flag("Replace an adopted model in the folder.", "--force")] = False
    seed: Seed = 0


@command()
def adopt(
    *,
    frozen: Frozen,
    out: Annotated[Path, flag("Folder of the adopted model: new, or empty.")] = Path("runs/adopted"),
    given: AdoptFlags,
    as_json: AsJson = False,
) -> None:
    """Give a frozen model calibrated probabilities.

    The model is named, or given by its embeddings. No network is trained and the ranking stays. The folder is a run:
    index, serve, evaluate, trust, audit and report take it. Search its index.
    """
    from sfumato.reports.console import print_adopted
    from sfumato.workflows.adopt import adopt as adopt_embeddings
    from sfumato.workflows.adopt import adopt_encoders

    options = {name: value for name, value in vars(given).items() if name != "queries"} | {"population": given.queries}
    check_out_folder(out)
    with writing(out):
        if frozen.model and frozen.data and frozen.images is frozen.texts is frozen.pairs is None:
            adopted = adopt_encoders(frozen.model, frozen.data, out, **options)
        elif frozen.model is frozen.data is None and frozen.images and frozen.texts:
            adopted = adopt_embeddings(frozen.images, frozen.texts, frozen.pairs, out, **options)
        else:
            raise UserError("give MODEL with --data, or --images and --texts with the embeddings of a model")
    if as_json:
        print(json.dumps(adopted.to_json()))
        return
    print_adopted(adopted)
    print(f"{out} is a run; next:")
    print("  " + as_typed("sfumato", "index", out, "--split", "all", "--out", f"{out}-index"))
    print("  " + as_typed("sfumato", "serve", f"{out}-index"))
