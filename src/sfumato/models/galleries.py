"""Galleries made with a model: building and opening an index or a collection, searching it, and saying how sure the answer is."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sfumato.data.emoji import emoji_names
from sfumato.data.problems import Problems
from sfumato.direction import Direction
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import RetrievalModel, embed_folder, embed_split_images, read_lines
from sfumato.models.export import load_model
from sfumato.models.ingest import model_digest
from sfumato.models.pretrained import PretrainedModel
from sfumato.models.run import Run
from sfumato.progress import progress_bar
from sfumato.search.collection import GaussianCollection, check_empty
from sfumato.search.copies import copy_gallery
from sfumato.search.gallery import Gallery, SearchRecord
from sfumato.search.index import GaussianIndex
from sfumato.search.lifting import gallery_centre, lifted_dim
from sfumato.search.parts import read_manifest, read_parts
from sfumato.search.stores.store_url import anchored, scheme
from sfumato.search.verdict import verdict


@dataclass(frozen=True, eq=False)
class Source:
    """What shall be searched among, embedded, or a part of it.

    Attributes:
        embeddings: (n, d).
        ids: n distinct ids.
        texts: n texts, if it is texts; otherwise None, and it is pictures.
        kept: by name, n texts to keep beside the pictures.
        pictures: where these are: {"folder": path that the ids start at}, {"split": of the run's data}, or {} if nobody knows.
    """

    embeddings: GaussianEmbedding
    ids: Sequence[str]
    texts: Sequence[str] | None = None
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def direction(self) -> Direction:
        """Of the queries that the model was trained for."""
        return "t2i" if self.texts is None else "i2t"

    @property
    def payload(self) -> dict[str, Sequence[str]]:
        """What is stored beside the items: the texts, or what is kept with the pictures and the names of embedded emoji."""
        if self.texts is not None:
            return {"text": self.texts}
        names = emoji_names() if all("/" in i for i in self.ids) else {}
        labels = [names.get(i.split("/")[0], "") for i in self.ids]
        return {**self.kept, **({"label": labels} if all(labels) else {})}


def build_index(
    retrieval_model: RetrievalModel, source: Source, *, home: str | Path, engine: str = "exact"
) -> GaussianIndex:
    """An index that knows the model's distance, its calibration, and where the model is.

    Args:
        matcher: what made the embeddings.
        source: what to index.
        home: folder or hub name of the model.
        engine: see :meth:`GaussianIndex.build`.
    """
    return GaussianIndex.build(
        source.embeddings,
        source.ids,
        distance=retrieval_model.distance,
        engine=engine,
        logit_scale=retrieval_model.logit_scale,
        logit_bias=retrieval_model.logit_bias,
        payload=source.payload,
        calibration=retrieval_model.calibration,
        direction=source.direction,
        metadata=_about(retrieval_model, home, source),
    )


def create_collection(
    retrieval_model: RetrievalModel, like: Source, folder: str | Path, store: str = "store", *, home: str | Path
) -> GaussianCollection:
    """An empty collection for what a model embeds.

    Args:
        matcher: the model.
        like: some of what will be kept, all of it or a first part: vectors are relative to its centre.
        folder, store: see :meth:`GaussianCollection.create`.
        home: folder or hub name of the model.
    """
    return GaussianCollection.create(
        folder,
        store,
        d=like.embeddings.d,
        distance=retrieval_model.distance,
        centre=gallery_centre(like.embeddings),
        logit_scale=retrieval_model.logit_scale,
        logit_bias=retrieval_model.logit_bias,
        calibration=retrieval_model.calibration,
        direction=like.direction,
        metadata=_about(retrieval_model, home, like),
    )


def embed_source(
    retrieval_model: RetrievalModel,
    *,
    images: Path | None = None,
    split: str | None = None,
    texts: Path | None = None,
    parts: Path | None = None,
) -> tuple[Iterator[Source], Problems]:
    """Embed what shall be searched among; exactly one of these.

    Args:
        matcher: the model; for a split a run.
        images: folder of pictures.
        split: of the run's data.
        texts: file of texts.
        parts: folder that :func:`~sfumato.models.ingest.embed_collection` has written with the same model.

    Returns:
        (what is to be indexed, one after the other; what was left out).

    Raises:
        UserError: it is not there, not whole, or nothing in it can be used.
    """
    if parts is not None:
        return _embedded_parts(retrieval_model, parts), Problems()
    if images is not None:
        embeddings, ids, problems = embed_folder(retrieval_model, images)
        source = Source(embeddings, ids, pictures={"folder": str(images.resolve())})
    elif texts is not None:
        lines, ids, problems = read_lines(texts)
        source = Source(retrieval_model.model.embed_texts(lines), ids, lines)
    else:
        assert isinstance(retrieval_model, Run) and split is not None, "a split is of a run's data"
        embeddings, ids, problems = embed_split_images(retrieval_model, retrieval_model.recipe.data, split)
        source = Source(embeddings, ids, pictures={"split": split})
    return iter([source]), problems


def _embedded_parts(retrieval_model: RetrievalModel, folder: Path) -> Iterator[Source]:
    """What jobs of `sfumato embed` have written, part by part; refused at once if another model did."""
    about, parts = read_manifest(folder), read_parts(folder)
    if about.model != model_digest(retrieval_model.model):
        raise UserError(f"{folder} holds embeddings by another model, {about.home}; give that one, or embed again")
    pictures = {"folder": about.path} if about.kind == "folder" else {}

    def sources() -> Iterator[Source]:
        for ids, embeddings, payloads in parts:
            kept = {name: [payload[name] for payload in payloads] for name in payloads[0]}
            if about.modality == "texts":
                yield Source(embeddings, ids, kept["text"])
            else:
                yield Source(embeddings, ids, kept=kept, pictures=pictures)

    return sources()


def whole(sources: Iterable[Source]) -> Source:
    """All of it in memory.

    Raises:
        UserError: there is nothing.
    """
    parts = list(sources)
    if not parts:
        raise UserError("there is nothing to index: no item could be embedded")
    first = parts[0]
    return Source(
        GaussianEmbedding.cat([part.embeddings for part in parts]),
        [i for part in parts for i in part.ids],
        None if first.texts is None else [text for part in parts for text in part.texts or ()],
        {name: [value for part in parts for value in part.kept[name]] for name in first.kept},
        first.pictures,
    )


def fill_collection(
    retrieval_model: RetrievalModel, sources: Iterator[Source], folder: Path, store: str | None, *, home: str | Path
) -> GaussianCollection:
    """Store what was embedded: in a new collection, or without a store in the one that is there.

    Args:
        matcher: the model.
        sources: what to store, one after the other.
        folder: of the collection.
        store: URL; a relative path starts at the current folder, no path at all means in the collection's folder.
        home: folder or hub name of the model.

    Returns:
        The collection, open.

    Raises:
        UserError: there is no collection, or one already, or it is of another model or kind, or there is nothing to store.
    """
    first = next(sources, None)
    if first is None:
        raise UserError("there is nothing to index: no item could be embedded")
    if store is None:
        if not GaussianCollection.is_one(folder):
            raise UserError(
                f"there is no collection in {folder} to add to; make one with --store, or of an index with sfumato copy"
            )
        collection = GaussianCollection.open(folder, unfinished=True)
        about = _about(retrieval_model, home, first)
        if collection.metadata.get("model") != about["model"] or collection.scorer.direction != first.direction:
            collection.close()
            raise UserError(
                f"{folder} holds what the model of {collection.metadata.get('run')} embedded; add only more of the same kind by the same model"
            )
        start = _below(collection.metadata.get("pictures") or {}, first.pictures, folder)
    else:
        collection, start = create_collection(retrieval_model, first, folder, own_or_anchored(store), home=home), ""
    stored = 0
    try:
        with collection.filling("it was interrupted while being filled; index the same again with --add"):
            for source in itertools.chain([first], sources):
                ids = [start + i for i in source.ids]
                with progress_bar(f"storing, after {stored}", len(ids)) as advance:
                    collection.upsert(source.embeddings, ids, source.payload, progress=advance)
                stored += len(ids)
            collection.optimise()
    except BaseException:
        collection.close()
        raise
    return collection


def _below(kept: Mapping[str, str], added: Mapping[str, str], folder: Path) -> str:
    """What ids of added pictures start with, so that they are found where a collection's pictures are.

    Raises:
        UserError: they lie elsewhere.
    """
    if kept == added:
        return ""
    if "folder" in kept and "folder" in added and Path(added["folder"]).is_relative_to(kept["folder"]):
        return Path(added["folder"]).relative_to(kept["folder"]).as_posix() + "/"
    where = kept.get("folder") or f"the {kept['split']} split" if kept else "nowhere in particular"
    raise UserError(
        f"the pictures of {folder} lie in {where}, and those to be added in {added.get('folder') or added or 'an unknown place'}: they could"
        " not be shown; put them below that folder, or index them into a collection of their own"
    )


def check_new(folder: Path, distance: str, store: str) -> None:
    """Refuse what no collection can be made with, before anything is embedded for it.

    Raises:
        UserError: the folder holds something, or no store has such a URL.
        ValueError: the distance does not lift.
    """
    check_empty(folder)
    lifted_dim(1, distance)
    scheme(store)


def own_or_anchored(store: str) -> str:
    """A store's URL from the command line as a collection keeps it: "file:" is a folder in the collection's own, others start here."""
    path, mark, query = store.removeprefix("file:").partition("?")
    return f"store{mark}{query}" if not path else anchored(store, Path.cwd())


def copy_index(folder: str | Path, out: str | Path, store: str, *, source_store: str | None = None) -> tuple[str, int]:
    """Copy an index or a collection into a new collection.

    Args:
        folder: what :func:`open_gallery` opens.
        out: folder of the copy.
        store: URL as for :func:`fill_collection`.
        source_store: of a collection, if it has moved.

    Returns:
        (URL of the new store, number of items in it).
    """
    with (
        contextlib.closing(open_gallery(folder, source_store)) as gallery,
        progress_bar("copying", len(gallery)) as advance,
        copy_gallery(gallery, out, own_or_anchored(store), progress=advance) as copied,
    ):
        return copied.store.url, len(copied)


def _about(retrieval_model: RetrievalModel, home: str | Path, source: Source) -> dict[str, Any]:
    return {
        "run": str(Path(home).resolve()) if Path(home).exists() else str(home),
        "model": model_digest(retrieval_model.model),
        "calibrated": retrieval_model.calibrated,
        "pictures": dict(source.pictures),
    }


def search_index(
    folder: Path,
    texts: Sequence[str],
    pictures: Sequence[Path],
    *,
    k: int,
    run: str | Path | None = None,
    store: str | None = None,
    min_probability: float | None = None,
    coverage: float | None = None,
    max_risk: float | None = None,
) -> list[dict[str, Any]]:
    """Search a saved index by texts and pictures with the model that it was built with.

    Args:
        folder: of the index.
        texts, pictures: the queries.
        k: number of hits of each.
        run: folder or name of the model, if it has moved.
        store: of a collection, if it has moved.
        min_probability, coverage, max_risk: see :meth:`Gallery.search`; for queries of the other kind than the items only.

    Returns:
        For each query :func:`describe`'s dictionary, texts first.

    Raises:
        UserError: the model is not where it was, a picture cannot be used, or a picture shall keep a promise about texts.
        ValueError: see :meth:`Gallery.search`.
    """
    with contextlib.closing(open_gallery(folder, store)) as gallery:
        native, foreign = ("texts", pictures) if gallery.scorer.direction == "t2i" else ("pictures", texts)
        if foreign and not (min_probability is coverage is max_risk is None):
            raise UserError(
                f"a least probability, a coverage and a risk are known of {native} as queries of this index, not of others; search by"
                f" {native} alone, or leave them out"
            )
        loaded = load_retrieval_model(gallery, folder, run)
        results = []
        if texts:
            queries = loaded.model.embed_texts(texts)
            results += describe(
                gallery, texts, queries, k, min_probability=min_probability, coverage=coverage, max_risk=max_risk
            )
        for path in pictures:
            if not path.is_file():
                raise UserError(f"there is no picture {path}")
            try:
                query = loaded.model.embed_images([path.read_bytes()])
            except ValueError as error:
                raise UserError(f"{path}: {error}") from error
            results += describe(
                gallery, [str(path)], query, k, min_probability=min_probability, coverage=coverage, max_risk=max_risk
            )
    # The logits were fitted on pairs of a picture and a text: between two of a kind they are a guess.
    guesses = range(len(texts), len(results)) if native == "texts" else range(len(texts))
    return [r | {"calibrated": False} if i in guesses else r for i, r in enumerate(results)]


def open_gallery(folder: str | Path, store: str | None = None) -> Gallery:
    """Open what `sfumato index` has written: an index, or a collection in a vector store.

    Args:
        folder: of the one or the other.
        store: of a collection, if it has moved; a URL as for :func:`fill_collection`.

    Raises:
        ValueError: it is damaged.
        UserError: there is neither, the store cannot be opened, or an index was given one.
    """
    if GaussianCollection.is_one(folder):
        return GaussianCollection.open(folder, None if store is None else own_or_anchored(store))
    if not is_gallery(folder):
        raise UserError(f"{folder} holds neither an index nor a collection; make one with sfumato index")
    if store is not None:
        raise UserError(f"{folder} is an index in a file, without a store; leave --store out")
    return GaussianIndex.load(folder)


def is_gallery(folder: str | Path) -> bool:
    """Whether there is an index or a collection in a folder, damaged or not."""
    return (Path(folder) / "manifest.json").is_file()


def load_retrieval_model(gallery: Gallery, folder: str | Path, run: str | Path | None = None) -> PretrainedModel:
    """The model that a gallery was made with.

    Args:
        gallery: it.
        folder: where it came from, for the message.
        run: folder or name of the model, if it has moved.

    Raises:
        UserError: the model is not where it was, or is another one.
    """
    home = str(run or gallery.metadata.get("run", ""))
    if not home or (Path(home).is_absolute() and not Path(home).exists()):
        raise UserError(f"the model that {folder} was built with is not at {home}; say where it is with --run")
    loaded = load_model(home)
    # Indices of before do not know their model.
    if gallery.metadata.get("model", digest := model_digest(loaded.model)) != digest:
        raise UserError(
            f"{folder} was built with another model than {home} is now: their distances mean nothing to each other; say where its own is"
            " with --run, or build it again"
        )
    return loaded


def describe(
    index: Gallery,
    names: Sequence[str],
    queries: GaussianEmbedding,
    k: int,
    *,
    min_probability: float | None = None,
    coverage: float | None = None,
    max_risk: float | None = None,
) -> list[dict[str, Any]]:
    """Search and say how sure the answer is.

    Args:
        index: to search in.
        names: of the queries.
        queries: their embeddings.
        k, min_probability, coverage, max_risk: see :meth:`Gallery.search`.

    Returns:
        For each query {"query", "distance" (its name), "calibrated" (whether the probabilities were fitted on held-out pairs),
        "uncertainty" (total variance), "expected_matches" (sum of the match probabilities over the whole index), "abstained" (whether it is
        better not answered; null if no risk was asked for), "verdict" (a sentence), "hits": [{"id", "distance", "match_probability",
        "uncertainty", and the payload}], "conformal_set": as the hits, all items within the radius of the coverage; null if none was asked for}.
    """
    found = index.search(queries, k, min_probability=min_probability, coverage=coverage, max_risk=max_risk)
    return [
        {
            "query": name,
            "distance": index.distance,
            "calibrated": index.calibrated,
            "uncertainty": result.uncertainty,
            "expected_matches": expected,
            "abstained": result.abstained,
            "verdict": verdict(expected, result.best_probability, result.abstained).text,
            "hits": [_hit(h) for h in result],
            "conformal_set": None if result.conformal_set is None else [_hit(h) for h in result.conformal_set],
        }
        for name, result, expected in zip(names, found, index.expected_matches(queries), strict=True)
    ]


def _hit(hit: SearchRecord) -> dict[str, Any]:
    return {
        "id": hit.id,
        "distance": hit.distance,
        "match_probability": hit.match_probability,
        "uncertainty": hit.uncertainty,
        **hit.payload,
    }
