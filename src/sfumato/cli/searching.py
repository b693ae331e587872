"""Indices, collections, search and the service."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli.common import AsJson, Device, ModelName, app, print_result, say_left_out
from sfumato.errors import UserError


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
    from sfumato.models.build import choose_device
    from sfumato.models.embed import RetrievalModel
    from sfumato.models.export import load_model
    from sfumato.models.galleries import build_index, check_new, embed_source, fill_collection, whole
    from sfumato.models.run import load_run
    from sfumato.search.index import check_settings

    if sum(source is not None for source in (images, split, texts, embeddings)) != 1:
        raise UserError("give one of --images FOLDER, --split NAME, --texts FILE and --embeddings FOLDER")
    if engine is not None and (store is not None or add):
        raise UserError(
            "the engine of a store is part of its URL, e.g. --store 'file:?engine=hnsw'; leave --engine out"
        )
    if add and store is not None:
        raise UserError("the collection knows its store; leave --store out with --add")
    retrieval_model: RetrievalModel = (load_run if split is not None else load_model)(
        model, device=choose_device(device)
    )
    if store is not None:
        check_new(out, retrieval_model.distance, store)
    elif not add:
        check_settings(retrieval_model.distance, engine or "exact")
    out.parent.mkdir(parents=True, exist_ok=True)
    sources, problems = embed_source(retrieval_model, images=images, split=split, texts=texts, parts=embeddings)
    if store is None and not add:
        source, engine = whole(sources), engine or "exact"
        build_index(retrieval_model, source, model_source=model, engine=engine).save(out)
        n, kept = len(source.ids), {"engine": engine}
        line = f"indexed ({engine})"
        direction = source.direction
    else:
        with fill_collection(retrieval_model, sources, out, store, model_source=model) as collection:
            n, kept = len(collection), {"store": collection.store.url}
            line, direction = f"in {collection.store.url}", collection.answers.direction
    what = "pictures" if direction == "t2i" else "texts"
    result = {"out": str(out), "n": n, **kept, "problems": len(problems)}
    print_result(result, as_json, f"{n} {what} {line}: {out}" + say_left_out(problems))


@app.command()
def copy(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="folder of an index or a collection")],
    out: Annotated[Path, typer.Argument(help="folder of the copy: new, or empty")],
    store: Annotated[str, typer.Option(help="where its items go, as for sfumato index")] = "file:",
    source_store: Annotated[str | None, typer.Option(help="where the items are, if they have moved")] = None,
    as_json: AsJson = False,
) -> None:
    """Copy an index or a collection into another store: a snapshot, or the move from a laptop to a cluster."""
    from sfumato.models.galleries import copy_index

    url, n = copy_index(folder, out, store, source_store=source_store)
    print_result({"out": str(out), "store": url, "items": n}, as_json, f"{n} items copied to {url}: {out}")


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
    from sfumato.models.gallery_search import search_index
    from sfumato.reports.console import print_search

    if not query and not image:
        raise UserError("nothing to search for: give a text, or --image FILE")
    if any(not text.strip() for text in query or []):
        raise UserError("a text to search for is empty; leave it out")
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
    from sfumato.models.build import choose_device
    from sfumato.serve.app import create_app
    from sfumato.serve.served import open_sources
    from sfumato.serve.server import check_address, check_host, check_names, hosts_of, run_app

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
