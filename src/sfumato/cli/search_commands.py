"""The commands around a gallery: index, delete, copy, search, serve."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sfumato.cli import common
from sfumato.cli.common import AsJson, command, flag, print_result, problems_suffix, rare, word, writing
from sfumato.errors import UserError, as_typed, counted, need, say
from sfumato.files import check_gallery, is_gone, is_model
from sfumato.serve import check_address

if TYPE_CHECKING:
    from sfumato.models.model import Model
    from sfumato.search.answer import SearchOptions


@dataclass(frozen=True)
class IndexFlags:
    """What is indexed, and where."""

    data: str | None = flag(
        None,
        "Folder of images with its subfolders, a manifest (.jsonl, .csv, .parquet), Karpathy's .json, COCO's own"
        " captions (.json), or .tar archives. It becomes a collection: --add adds more, --sync follows its files,"
        " sfumato delete removes items. No model is needed. Or .parquet files of embeddings, see RowEmbedder.",
        metavar="FOLDER",
    )
    images: Path | None = flag(
        None,
        "Folder of images with its subfolders; for a model of embeddings, these. With --sync, the place of a moved"
        " folder: NEW or OLD=NEW.",
    )
    split: str | None = flag(None, "Or, for a run, the images of this split of its data; all for all splits.")
    texts: Path | None = flag(None, "Or a file with one text per line, to be searched by image.")
    store: str | None = flag(
        None,
        "Vector store: file: (the default, in the folder), file:?engine=hnsw, milvus:PATH.db,"
        " milvus+http://host:19530/NAME, postgresql://user@host/database?table=NAME. compress=int8 (hnsw, milvus), half"
        " or binary (postgresql://...?index=hnsw) chooses the vectors by which it finds candidates.",
        metavar="URL",
    )
    add: bool = flag(False, "Add to the collection that --out holds already.", "--add")
    sync: bool = flag(False, "Follow the folders of a collection: new, changed, moved, deleted files.", "--sync")
    force: bool = flag(False, "With --sync, delete items even if they are most.", "--force")
    exclude: list[str] | None = flag(
        None,
        "Shell pattern of paths below the folder that are not indexed, e.g. private or '*.png'; repeatable, and kept"
        " for --add and --sync ('' forgets those before). A folder with a file .nomedia is not indexed either.",
        metavar="PATTERN",
    )
    no_ocr: bool = flag(
        False, "Do not read the text in photographs, which the extra ocr does if it is installed.", "--no-ocr"
    )

    def check(self, out: Path) -> None:
        """Refuse what does not go together, and a folder that holds something else, before anything is embedded."""
        from sfumato.search.folder import is_collection, is_unfinished, refuse_index

        place = None if self.sync or self.embedded else self.images
        given = (self.data, place, self.split, self.texts, self.sync or None)
        if sum(s is not None for s in given) != 1:
            raise UserError("give one of --data FOLDER, --images FOLDER, --split NAME, --texts FILE, --sync")
        if self.exclude and not self.sync and (self.as_data().data is None or self.embedded):
            raise UserError("--exclude goes with --data and --sync; it is about files of images")
        if (self.add or self.sync) and self.store is not None:
            raise UserError("--add and --sync write to the store of the collection; leave --store out")
        collection = is_collection(out)
        if (self.add or self.sync) and not collection:
            refuse_index(out)
            raise UserError(f"there is no collection in {out} to add to; make one without --add")
        if self.sync:
            return
        if not self.add and collection and (self.data is None or not is_unfinished(out)):
            raise UserError(f"{out} holds a collection already; add to it with --add, or give another --out")
        common.check_out_folder(out, ours=lambda f: collection or all(p.is_dir() for p in f.glob("[!.]*")))

    @property
    def embedded(self) -> bool:
        """Whether the data are embeddings already."""
        from sfumato.workflows.index import is_embedded

        return self.data is not None and is_embedded(self.data)

    def as_data(self) -> "IndexFlags":
        """The same, with an added folder of images as data."""
        added = self.add and self.data is None and self.images is not None and self.images.is_dir()
        return replace(self, data=str(self.images), images=None) if added else self

    def model(self, out: Path) -> str:
        """The model where none is named."""
        from sfumato.models.run import SMALL, default_model
        from sfumato.search.folder import is_unfinished
        from sfumato.search.searcher import open_gallery

        if self.add or self.sync or is_unfinished(out):
            with open_gallery(out, unfinished=True) as collection:
                run = str(collection.metadata["run"])
            if is_gone(run):
                raise UserError(f"the model of {out} is not at {run}; name it first: sfumato index MODEL --out {out}")
            return run
        name, why = (SMALL, "") if self.data is None else default_model()
        if why:
            say(why)
        return name


@command()
def index(
    *,
    model: str | None = word(
        None,
        "Folder or name of a model: a run, small (of the package), or a CLIP or SigLIP of the hub. Default: with --add"
        " and --sync that of the collection, with --data a CLIP where one is cached or can be downloaded; else small.",
        "MODEL",
    ),
    out: Path = flag(..., "Folder of the collection."),
    given: IndexFlags,
    as_json: AsJson = False,
) -> None:
    """Fill a collection of embedded images or texts, to search in."""
    from sfumato.data.images import Problems
    from sfumato.models.model import Model
    from sfumato.models.run import load_model, load_run
    from sfumato.workflows.index import check_new, embed_source, embedded_parts, fill_collection, training_note

    named = (given.data, given.images, given.split, given.texts, given.sync)
    if not any(named) and model and Path(model).is_dir() and not is_model(model):
        made = as_typed("sfumato", "index", "--data", model, "--out", out)
        raise UserError(f"{model}: give what to index. To index this folder of images: {made}")
    given.check(out)
    model, given = model or given.model(out), given.as_data()
    embedded = given.embedded
    if (given.data is not None or given.sync) and not embedded:
        return _index_data(load_model(model, device="auto"), out, given, as_json)
    load = load_run if given.split is not None else load_model
    retrieval_model: Model = load(model, device="auto")
    store = None if given.add else given.store or "file:"
    if store is not None:
        with writing(out):
            check_new(out, retrieval_model.distance, store)
    out.parent.mkdir(parents=True, exist_ok=True)
    if embedded:
        sources, problems = embedded_parts(retrieval_model, str(given.data), given.images), Problems()
    else:
        sources, problems = embed_source(retrieval_model, images=given.images, split=given.split, texts=given.texts)
    with writing(out), fill_collection(retrieval_model, sources, out, store) as collection:
        n, note = len(collection), training_note(collection)
        url, direction = collection.store.url, collection.scorer.direction
    result = {"out": str(out), "n": n, "store": url, "problems": len(problems), "note": note}
    items = counted(n, "image" if direction == "t2i" else "text")
    print_result(result, as_json, f"{items} in {url}: {out}" + problems_suffix(problems))
    if note and not as_json:
        say(note)


def _index_data(model: "Model", out: Path, given: IndexFlags, as_json: bool) -> None:
    """Fill a collection from a person's files, or bring it in step with them."""
    from sfumato.data.photographs import reads_text
    from sfumato.search.folder import is_collection
    from sfumato.workflows.index import check_new
    from sfumato.workflows.own_folder import add_data, index_data, move_sources, sync_data

    store, exclude, ocr = given.store or "file:", given.exclude or [], reads_text() and not given.no_ocr
    with writing(out):
        if given.sync:
            if given.images is not None:
                move_sources(out, [str(given.images)])
            n, done = sync_data(model, out, force=given.force, exclude=exclude, ocr=ocr)
        elif given.add:
            n, done = add_data(model, given.data or "", out, exclude, ocr=ocr)
        else:
            if not is_collection(out):
                check_new(out, model.distance, store)
            n, done = index_data(model, given.data or "", out, store, exclude, ocr=ocr)
    result = {"out": str(out), "n": n, "model": model.source, **done.to_json()}
    line = f"{counted(n, 'image')} in the collection, by the model {model.source}: {out} ({done.line})"
    print_result(result, as_json, line + problems_suffix(done.problems))
    if done.note and not as_json:
        say(done.note)


@command()
def delete(
    folder: Path = word(..., "Folder of a collection.", "COLLECTION"),
    ids: list[str] = word(..., "Ids of items, as a search shows them, or shell patterns of ids: 'beach/*'.", "ID"),
    as_json: AsJson = False,
) -> None:
    """Delete items from a collection; the files stay."""
    check_gallery(folder)
    from sfumato.workflows.index import delete_items

    n, unknown = delete_items(folder, ids)
    left_out = f"; not in it (ids are as searches print them): {', '.join(unknown)}" if unknown else ""
    print_result({"deleted": n, "unknown": unknown}, as_json, f"{counted(n, 'item')} deleted from {folder}{left_out}")
    if unknown:
        raise SystemExit(2)


@command()
def copy(
    folder: Path = word(..., "Folder of a collection.", "INDEX"),
    out: Path = word(..., "Folder of the copy: new, or empty.", "OUT"),
    store: str = flag("file:", "Store of the copy, as for sfumato index.", metavar="URL"),
    source_store: str | None = flag(None, "URL of the store. Default: the one it was built with.", metavar="URL"),
    as_json: AsJson = False,
) -> None:
    """Copy a collection into another store."""
    check_gallery(folder)
    from sfumato.workflows.index import copy_index

    common.check_out_folder(out)
    with writing(out):
        url, n = copy_index(folder, out, store, source_store=source_store)
    print_result({"out": str(out), "store": url, "items": n}, as_json, f"{counted(n, 'item')} copied to {url}: {out}")


@dataclass(frozen=True)
class Asked:
    """What is searched for, and which results are shown."""

    query: list[str] | None = word(None, "Texts to search for.", "TEXT")
    image: list[Path] | None = flag(None, "Image to search for; may be given several times.")
    item: list[str] | None = flag(None, "Search by this item of the index; may be given several times.", "--id")
    k: int = flag(10, "Number of results per query.", "-k", min=1)
    min_probability: float | None = flag(None, "Leave out results with a smaller match probability, e.g. 0.5.")
    coverage: float | None = flag(
        None,
        "Add the conformal set, by distance alone: it holds a listed match for this fraction of queries like those of"
        " the calibration, e.g. 0.9.",
    )
    abstain: float | None = flag(
        None,
        "Largest fraction of answers, by distance alone, whose first result may be no listed match, e.g. 0.1; other"
        " queries get no answer.",
        metavar="RISK",
    )
    also: list[str] | None = flag(None, "Further text that a result should fit, too; repeatable.", metavar="TEXT")
    without: list[str] | None = flag(
        None, "Text that a result should not fit; repeatable. Such results have no probabilities.", metavar="TEXT"
    )
    duplicates: str = flag("fold", "fold: images nearly the same as one above are counted there; show: all.")
    order: str | None = rare(None, "Order where items have texts: fits, by probability (default); or distance.")
    target: str = rare("fits", "Evidence of a search by text: fits, the texts of items, too; listed, distance alone.")
    where: list[str] | None = flag(
        None,
        "Only items that fit, e.g. folder=beach or 'date>=2024-06' (=, >=, <=, >, <; quote it); repeatable. Several"
        " values of a field are alternatives; several fields must all fit.",
        metavar="FIELD=VALUE",
    )

    def options(self) -> "SearchOptions":
        """How to search."""
        from sfumato.search.answer import SearchOptions
        from sfumato.search.stores.protocol import parse_where

        choices: dict[str, Any] = {"duplicates": self.duplicates, "order": self.order or "fits", "target": self.target}
        return SearchOptions(
            min_probability=self.min_probability, coverage=self.coverage, max_risk=self.abstain,
            filter=parse_where(self.where) if self.where else None, **choices,
        )  # fmt: skip


@command()
def search(
    *,
    folder: Path = word(..., "Folder of a collection.", "INDEX"),
    asked: Asked,
    run: str | None = rare(None, "Folder or name of the model. Default: where it was for the index.", metavar="MODEL"),
    store: str | None = flag(None, "URL of the store, with search options. Default: as it was built.", metavar="URL"),
    why: bool = flag(False, "Below each result of a text the parts of its probability, in log odds.", "--why"),
    as_json: AsJson = False,
) -> None:
    """Search a collection by text, image or item.

    Prints ids with match probabilities; --json has distances and uncertainties, too.
    """
    if not asked.query and not asked.image and not asked.item:
        raise UserError("nothing to search for: give a text, --image FILE or --id ITEM")
    if (asked.also or asked.without) and (asked.image or asked.item):
        raise UserError("--also and --without stand beside a text to search for; leave out --image and --id")
    if asked.order == "fits" and asked.target == "listed":
        raise UserError("--target listed orders by distance; leave out --order fits, or take --target fits")
    check_gallery(folder)
    from sfumato.reports.tables import print_match_meaning, print_search
    from sfumato.search.answer import TextQuery
    from sfumato.workflows.search import search_index

    also, without = tuple(asked.also or ()), tuple(asked.without or ())
    queries = [TextQuery(text, also, without) for text in asked.query or []], asked.image or [], asked.item or []
    answers = search_index(folder, queries, asked.k, asked.options(), run=run, store=store)
    results = [answer.to_json() for answer in answers]
    if as_json:
        return print(json.dumps(results, ensure_ascii=False))
    for result in results:
        print_search(result, why=why)
    print_match_meaning(results)


@command()
def mcp(
    folder: Path = word(..., "Folder of a collection.", "INDEX"),
    run: str | None = rare(None, "Folder or name of the model. Default: where it was for the index.", metavar="MODEL"),
    store: str | None = rare(None, "URL of the store. Default: the one it was built with.", metavar="URL"),
    port: int | None = flag(
        None,
        "Answer over HTTP at this port of this machine, at /mcp. Default: over standard input and output.",
        min=1,
        max=65535,
    ),
) -> None:
    """Give agents tools to search a collection (MCP).

    Tools: search, show, facets and status. Nothing is written.
    """
    check_gallery(folder)
    from sfumato.serve.agents import make_server
    from sfumato.workflows.search import load_index

    server = make_server(load_index(folder, run=run, store=store))
    if port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", port=port)


@command()
def serve(
    *,
    folder: Path = word(..., "Folder of a collection.", "INDEX"),
    texts: Path | None = word(None, "Folder of a collection of texts beside it, to be searched by image.", "TEXTS"),
    images: list[str] | None = flag(
        None, "The folder of its images, if it has moved: NEW, or OLD=NEW. It is kept for the next time.", metavar="NEW"
    ),
    run: str | None = rare(None, "Folder or name of the model. Default: where it was for the index.", metavar="MODEL"),
    store: str | None = flag(None, "URL of the store. Default: the one it was built with.", metavar="URL"),
    host: str = flag("127.0.0.1", "Address to listen at. Addresses that other machines can reach require a key."),
    port: int = flag(8000, "Port to listen at; 0 for any free one.", min=0, max=65535),
    api_key_file: Path | None = flag(None, "API keys, one a line; read:KEY may not write. Default: SFUMATO_API_KEY."),
    no_key: bool = flag(False, "Listen to a network without a key; requires --allowed-host as well.", "--no-key"),
    read_only: bool = flag(False, "Refuse every write, with any key.", "--read-only"),
    no_metadata: bool = flag(False, "Give originals out without GPS, camera and other metadata.", "--no-metadata"),
    allowed_host: list[str] | None = flag(None, "Host name that clients may use beside this machine's; repeatable."),
    judgements: Path | None = flag(
        None, "File for people's verdicts on hits, made if it does not exist. Without it the page asks for none."
    ),
    access_log: bool = flag(False, "Log a line for every request.", "--access-log"),
    log_format: Literal["text", "json"] = rare("text", "Lines of the log: text, or json for one object a line."),
    limits: list[str] | None = rare(
        None, "Change a limit, e.g. timeout=60 or max_upload_mb=20; repeatable.", "--set", metavar="NAME=VALUE"
    ),
) -> None:
    """Serve a web page and an HTTP interface for searching.

    Items can be added to and deleted from a collection.
    """
    check_gallery(folder)
    check_address(host, port)
    from sfumato.evaluation.judgements import read_judgements
    from sfumato.workflows.own_folder import move_sources

    with need("serve", "the service needs FastAPI, uvicorn and prometheus-client"):
        from sfumato.serve import server
        from sfumato.serve.app import create_app
        from sfumato.serve.settings import Settings, open_sources, parse_limits, read_keys

    keys, reading_keys = read_keys(api_key_file, os.environ.get("SFUMATO_API_KEY"))
    if judgements is not None:
        common.check_out_file(judgements, option="--judgements")
        if judgements.exists():
            read_judgements(judgements)  # Before a model is loaded.
    settings = Settings(
        **parse_limits(limits or []), keys=keys, reading_keys=reading_keys, read_only=read_only,
        no_metadata=no_metadata, hosts=server.hosts_of(host, allowed_host or []), judgements=judgements,
    )  # fmt: skip
    server.check_host(host, settings, no_key)
    if images:
        move_sources(folder, images)
        say(f"the images of {folder} are looked for in {', '.join(images)} from now on")
    app = create_app(open_sources(folder, texts, run=run, store=store, device="auto"), settings)
    server.run_app(app, host=host, port=port, access_log=access_log, log_format=log_format)
