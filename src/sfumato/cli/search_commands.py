"""The commands around a gallery: index, copy, search, serve."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli.common import AsJson, Device, ModelName, app, print_result, problems_suffix
from sfumato.cli.outputs import check_out_folder, writing
from sfumato.errors import UserError
from sfumato.progress import say

ImagesToIndex = Annotated[
    Path | None,
    typer.Option(
        help="Folder of images, with all its subfolders; for a model that reads embeddings, a file or folder of them."
    ),
]
SplitToIndex = Annotated[
    str | None, typer.Option(help="Or, for a run, the images of this split of its data; all for all splits.")
]
TextsToIndex = Annotated[Path | None, typer.Option(help="Or a file with one text per line, to be searched by image.")]
EmbeddingsToIndex = Annotated[Path | None, typer.Option(help="Or a folder that sfumato embed has written.")]
IndexEngine = Annotated[
    str | None,
    typer.Option(
        help=(
            "Engine of an index: exact, hnsw or ivf. All but exact need the extra faiss. Default: exact. Not"
            " with --store."
        )
    ),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Fill a collection in a vector store instead, where items can be added and deleted: file: (in the folder),"
        " file:?engine=hnsw, milvus:PATH.db, milvus+http://host:19530/NAME, postgresql://user@host/database?table=NAME,"
        " redis://host:6379/0?means=PATH.",
    ),
]


@app.command()
def index(
    model: ModelName,
    out: Annotated[Path, typer.Option(help="Folder of the index or the collection.")],
    images: ImagesToIndex = None,
    split: SplitToIndex = None,
    texts: TextsToIndex = None,
    embeddings: EmbeddingsToIndex = None,
    engine: IndexEngine = None,
    store: StoreUrl = None,
    add: Annotated[bool, typer.Option("--add", help="Add to the collection that --out holds already.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an index that --out holds already.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Build an index, or fill a collection in a vector store."""
    from sfumato.errors import counted
    from sfumato.models.load import load_model
    from sfumato.models.model import Model
    from sfumato.models.run import choose_device, load_run
    from sfumato.search.index import check_settings
    from sfumato.workflows.index import build_index, check_new, embed_source, fill_collection, training_note, whole

    _check_index_options((images, split, texts, embeddings), engine, store, add)
    _check_index_folder(out, store is not None, add, force)
    load = load_run if split is not None else load_model
    retrieval_model: Model = load(model, device=choose_device(device))
    if store is not None:
        with writing(out):
            check_new(out, retrieval_model.distance, store)
    elif not add:
        check_settings(retrieval_model.distance, engine or "exact")
    out.parent.mkdir(parents=True, exist_ok=True)
    sources, problems = embed_source(retrieval_model, images=images, split=split, texts=texts, parts=embeddings)
    if store is None and not add:
        source, engine = whole(sources), engine or "exact"
        gallery = build_index(retrieval_model, source, engine=engine)
        with writing(out):
            gallery.save(out)
        n, note, kept, direction = len(source.ids), training_note(gallery), {"engine": engine}, source.direction
        line = f"indexed ({engine})"
    else:
        with writing(out), fill_collection(retrieval_model, sources, out, store) as collection:
            n, note = len(collection), training_note(collection)
            kept, direction = {"store": collection.store.url}, collection.scorer.direction
        line = f"in {kept['store']}"
    result = {"out": str(out), "n": n, **kept, "problems": len(problems), "note": note}
    items = counted(n, "image" if direction == "t2i" else "text")
    print_result(result, as_json, f"{items} {line}: {out}" + problems_suffix(problems))
    if note and not as_json:
        say(note)


def _check_index_options(sources: tuple[object, ...], engine: str | None, store: str | None, add: bool) -> None:
    if sum(source is not None for source in sources) != 1:
        raise UserError("give one of --images FOLDER, --split NAME, --texts FILE and --embeddings FOLDER")
    if engine is not None and (store is not None or add):
        raise UserError(
            "the engine of a store is part of its URL, e.g. --store 'file:?engine=hnsw'; leave --engine out"
        )
    if add and store is not None:
        raise UserError("--add writes to the store of the collection; leave --store out")


def _check_index_folder(out: Path, new_collection: bool, add: bool, force: bool) -> None:
    """Refuse a folder that cannot be written or holds something else, before anything is embedded."""
    from sfumato.search.collection import GaussianCollection
    from sfumato.workflows.index import is_gallery

    collection = GaussianCollection.is_one(out)
    if add and not collection:
        raise UserError(
            f"there is no collection in {out} to add to; make one with --store, or copy an index with sfumato copy"
        )
    if not add and collection:
        raise UserError(f"{out} holds a collection already; add to it with --add, or give another folder with --out")
    if not add and not new_collection and not force and is_gallery(out):
        raise UserError(f"{out} holds an index already; replace it with --force, or give another folder with --out")
    check_out_folder(out, ours=lambda folder: is_gallery(folder) or all(p.is_dir() for p in folder.glob("[!.]*")))


@app.command()
def copy(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of an index or a collection.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the copy: new, or empty.")],
    store: Annotated[str, typer.Option(metavar="URL", help="Store of the copy, as for sfumato index.")] = "file:",
    source_store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of the collection's store. Default: the URL that it was built with."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy an index or a collection into another store."""
    from sfumato.errors import counted
    from sfumato.workflows.index import copy_index

    check_out_folder(out)
    with writing(out):
        url, n = copy_index(folder, out, store, source_store=source_store)
    print_result({"out": str(out), "store": url, "items": n}, as_json, f"{counted(n, 'item')} copied to {url}: {out}")


MinProbability = Annotated[
    float | None, typer.Option(help="Leave out results with a smaller match probability, e.g. 0.5.")
]
Coverage = Annotated[
    float | None,
    typer.Option(
        help="Add the conformal set of this coverage, e.g. 0.9: it holds a match for this fraction of queries like"
        " those of the calibration."
    ),
]
Risk = Annotated[
    float | None,
    typer.Option(
        metavar="RISK",
        help=(
            "Largest fraction of answers with a wrong first result, e.g. 0.1. Less certain queries get no"
            " confident match."
        ),
    ),
]


@app.command()
def search(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of an index or a collection.")],
    query: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts to search for.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Image to search for; may be given several times.")] = None,
    item: Annotated[
        list[str] | None, typer.Option("--id", help="Item of the index to search by; may be given several times.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of results per query.")] = 10,
    min_probability: MinProbability = None,
    coverage: Coverage = None,
    abstain: Risk = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder or name of the model. Default: where it was for the index."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=(
                "URL of the collection's store, e.g. with other search options. Default: the URL that it was built"
                " with."
            ),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search an index or a collection by text, image or item.

    Prints ids, distances, match probabilities and uncertainties.
    """
    from sfumato.api.loaded import search_index
    from sfumato.reports.console import print_match_meaning, print_search

    if not query and not image and not item:
        raise UserError("nothing to search for: give a text, --image FILE or --id ITEM")
    if any(not text.strip() for text in query or []):
        raise UserError("a text to search for is empty; leave it out")
    answers = search_index(
        folder, query or [], image or [], k=k, ids=item or [], run=run, store=store, min_probability=min_probability,
        coverage=coverage, max_risk=abstain,
    )  # fmt: skip
    results = [answer.to_json() for answer in answers]
    if as_json:
        print(json.dumps(results, ensure_ascii=False))
        return
    for result in results:
        print_search(result)
    print_match_meaning(results)


TextGallery = Annotated[
    Path | None, typer.Option(metavar="INDEX", help="Also serve this index of texts, to be searched by image.")
]
MovedModel = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Folder or name of the model. Default: where it was for the index.")
]
MovedStore = Annotated[
    str | None,
    typer.Option(metavar="URL", help="URL of the collection's store. Default: the URL that it was built with."),
]
ServedSplit = Annotated[
    str | None, typer.Option(help="For a run: split of its data to embed and serve. Default: test.")
]
Host = Annotated[str, typer.Option(help="Address to listen at. Addresses that other machines can reach require a key.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for any free one.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File of accepted API keys, one per line; read:KEY may not write. Default: the variable SFUMATO_API_KEY."
    ),
]
NoKey = Annotated[
    bool, typer.Option("--no-key", help="Listen to a network without a key; requires --allowed-host as well.")
]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Refuse every write, with any key.")]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(help="Host name that clients may use, besides this machine's own; may be given several times."),
]
MaxUpload = Annotated[float, typer.Option(help="Largest size of an image file, in megabytes.")]
MaxPixels = Annotated[int, typer.Option(help="Largest number of pixels in all images of a request.")]
MaxBatch = Annotated[int, typer.Option(help="Largest number of queries or new items in a request.")]
MaxResults = Annotated[int, typer.Option(help="Largest number of results per query and of items per conformal set.")]
ServedBatch = Annotated[int, typer.Option(help="Largest number of texts or images that are embedded together.")]
BatchWindow = Annotated[float, typer.Option(help="Longest wait for a batch to fill, in milliseconds.")]
Queue = Annotated[int, typer.Option(help="Largest number of texts or images that wait; further requests are refused.")]
PixelBudget = Annotated[int, typer.Option(help="Largest number of pixels in the images of all requests at work.")]
DecodeTimeout = Annotated[float, typer.Option(help="Longest time to decode an image, in seconds.")]
DecodeMemory = Annotated[int, typer.Option(help="Memory of a process that decodes images, in megabytes.")]
ByteBudget = Annotated[int, typer.Option(help="Largest size of all requests in memory, in megabytes.")]
MaxRecords = Annotated[int, typer.Option(help="Largest number of results and items of conformal sets in a response.")]
Timeout = Annotated[
    float, typer.Option(help="Longest time for a request to arrive, in seconds. The answer may take the same time.")
]
Threads = Annotated[int, typer.Option(help="Number of threads per computation.")]
SearchWorkers = Annotated[int, typer.Option(help="Number of searches at the same time.")]
Grace = Annotated[int, typer.Option(min=0, help="Time to finish requests after SIGTERM, in seconds.")]


@app.command()
def serve(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_INDEX", help="Folder of an index, a collection or a run.")],
    texts: TextGallery = None,
    run: MovedModel = None,
    store: MovedStore = None,
    split: ServedSplit = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: KeyFile = None,
    no_key: NoKey = False,
    read_only: ReadOnly = False,
    allowed_host: AllowedHost = None,
    max_upload_mb: MaxUpload = 10.0,
    max_pixels: MaxPixels = 40_000_000,
    max_batch: MaxBatch = 64,
    max_results: MaxResults = 1000,
    batch_size: ServedBatch = 32,
    batch_window_ms: BatchWindow = 2.0,
    max_records: MaxRecords = 20_000,
    byte_budget_mb: ByteBudget = 128,
    pixel_budget: PixelBudget = 120_000_000,
    decode_timeout: DecodeTimeout = 10.0,
    decode_memory_mb: DecodeMemory = 1300,
    queue: Queue = 256,
    timeout: Timeout = 30.0,
    threads: Threads = 1,
    workers: SearchWorkers = 2,
    grace: Grace = 30,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log a line for every request.")] = False,
    device: Device = "auto",
) -> None:
    """Serve a web page and an HTTP interface for searching.

    Items can be added to and deleted from a collection.
    """
    from sfumato.serve.settings import Settings, read_keys, require_extra

    require_extra()
    from sfumato.models.run import choose_device
    from sfumato.serve.answering import open_sources
    from sfumato.serve.app import create_app
    from sfumato.serve.server import check_address, check_host, check_names, hosts_of, run_app

    keys, reading_keys = read_keys(api_key_file, os.environ.get("SFUMATO_API_KEY"))
    check_host(host, keys + reading_keys, no_key)
    settings = Settings(
        batch_size=batch_size, batch_window=batch_window_ms / 1000, max_waiting=queue, max_batch=max_batch,
        max_results=max_results, max_upload_bytes=int(max_upload_mb * 1_000_000), max_pixels=max_pixels,
        pixel_budget=pixel_budget, decode_timeout=decode_timeout, decode_memory_bytes=decode_memory_mb * 1_000_000,
        max_records=max_records, byte_budget=byte_budget_mb * 1_000_000, timeout=timeout,
        threads=threads, workers=workers, keys=keys, reading_keys=reading_keys, read_only=read_only,
        hosts=hosts_of(host, allowed_host or []),
    )  # fmt: skip
    check_names(host, settings)
    check_address(host, port)
    sources = open_sources(source, texts=texts, run=run, store=store, split=split, device=choose_device(device))
    run_app(create_app(sources, settings), host=host, port=port, grace=grace, access_log=access_log)
