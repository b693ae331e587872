"""Galleries made with a model: building and opening an index or a collection, searching it, and saying how sure the answer is."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sfumato.data.emoji import emoji_names
from sfumato.encoders.hub import Published
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import Gallery, SearchHit
from sfumato.search.index import GaussianIndex
from sfumato.search.verdict import verdict
from sfumato.training.export import load_model
from sfumato.training.inference import Matcher


def build_index(
    matcher: Matcher,
    embeddings: GaussianEmbedding,
    ids: Sequence[str],
    *,
    home: str | Path,
    engine: str = "exact",
    texts: Sequence[str] | None = None,
    pictures: Mapping[str, str] | None = None,
) -> GaussianIndex:
    """An index that knows the model's distance, its calibration, and where the model is.

    Args:
        matcher: what made the embeddings.
        embeddings: of pictures, for texts as queries, or of texts, for pictures.
        ids: theirs; the ids of embedded emoji bring their names along.
        home: folder or hub name of the model.
        engine: see :meth:`GaussianIndex.build`.
        texts: the texts, if it is texts that are indexed.
        pictures: where the pictures are: {"folder": path that the ids start at} or {"split": of the run's data}.
    """
    return GaussianIndex.build(
        embeddings,
        ids,
        distance=matcher.distance,
        engine=engine,
        logit_scale=matcher.logit_scale,
        logit_bias=matcher.logit_bias,
        queries_first=texts is not None,
        payload=item_payload(ids, texts),
        calibration=matcher.calibration,
        direction="t2i" if texts is None else "i2t",
        about=_about(matcher, home, pictures),
    )


def create_collection(
    matcher: Matcher,
    folder: str | Path,
    store: str = "store",
    *,
    d: int,
    centre: Tensor | None = None,
    home: str | Path,
    texts: bool = False,
    pictures: Mapping[str, str] | None = None,
) -> GaussianCollection:
    """An empty collection for what a model embeds.

    Args:
        matcher: the model.
        folder, store, d, centre: see :meth:`GaussianCollection.create`.
        home: folder or hub name of the model.
        texts: whether it is texts that will be kept, not pictures.
        pictures: see :func:`build_index`.
    """
    return GaussianCollection.create(
        folder,
        store,
        d=d,
        distance=matcher.distance,
        centre=centre,
        logit_scale=matcher.logit_scale,
        logit_bias=matcher.logit_bias,
        calibration=matcher.calibration,
        direction="i2t" if texts else "t2i",
        about=_about(matcher, home, pictures),
    )


def item_payload(ids: Sequence[str], texts: Sequence[str] | None = None) -> dict[str, Sequence[str]]:
    """What is stored beside items: the texts, or the names of embedded emoji, or nothing."""
    if texts is not None:
        return {"text": texts}
    names = emoji_names() if all("/" in i for i in ids) else {}
    labels = [names.get(i.split("/")[0], "") for i in ids]
    return {"label": labels} if all(labels) else {}


def _about(matcher: Matcher, home: str | Path, pictures: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "run": str(Path(home).resolve()) if Path(home).exists() else str(home),
        "calibrated": matcher.calibrated,
        "pictures": dict(pictures or {}),
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
        native, foreign = ("texts", pictures) if gallery.answers.direction == "t2i" else ("pictures", texts)
        if foreign and not (min_probability is coverage is max_risk is None):
            raise UserError(
                f"a least probability, a coverage and a risk are known of {native} as queries of this index, not of others; search by"
                f" {native} alone, or leave them out"
            )
        loaded = load_matcher(gallery, folder, run)
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
        store: of a collection, see :meth:`GaussianCollection.open`.

    Raises:
        FileNotFoundError: there is no folder, or nothing whole in it.
        ValueError: it is damaged.
        UserError: the store cannot be opened, or an index was given one.
    """
    if GaussianCollection.is_one(folder):
        return GaussianCollection.open(folder, store)
    if store is not None:
        raise UserError(f"{folder} is an index in a file, without a store; leave --store out")
    return GaussianIndex.load(folder)


def load_matcher(gallery: Gallery, folder: str | Path, run: str | Path | None = None) -> Published:
    """The model that a gallery was made with.

    Args:
        gallery: it.
        folder: where it came from, for the message.
        run: folder or name of the model, if it has moved.

    Raises:
        UserError: the model is not where it was.
    """
    home = str(run or gallery.about.get("run", ""))
    if not home or (Path(home).is_absolute() and not Path(home).exists()):
        raise UserError(f"the model that {folder} was built with is not at {home}; say where it is with --run")
    return load_model(home)


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
            "calibrated": bool(index.about.get("calibrated")),
            "uncertainty": result.uncertainty,
            "expected_matches": expected,
            "abstained": result.abstained,
            "verdict": verdict(expected, result.best_probability, result.abstained).text,
            "hits": [_hit(h) for h in result],
            "conformal_set": None if result.conformal_set is None else [_hit(h) for h in result.conformal_set],
        }
        for name, result, expected in zip(names, found, index.expected_matches(queries), strict=True)
    ]


def _hit(hit: SearchHit) -> dict[str, Any]:
    return {
        "id": hit.id,
        "distance": hit.distance,
        "match_probability": hit.match_probability,
        "uncertainty": hit.uncertainty,
        **hit.payload,
    }
