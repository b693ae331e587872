"""Search in a gallery by texts and images with its model, and description of the certainty of each answer."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.galleries import load_retrieval_model, open_gallery
from sfumato.search.gallery import Gallery, SearchRecord
from sfumato.search.verdict import verdict


def search_index(
    folder: Path,
    texts: Sequence[str],
    images: Sequence[Path],
    *,
    k: int,
    run: str | Path | None = None,
    store: str | None = None,
    min_probability: float | None = None,
    coverage: float | None = None,
    max_risk: float | None = None,
) -> list[dict[str, Any]]:
    """Search a saved index by texts and images with the model that it was built with.

    Args:
        folder: of the index or collection.
        texts: the text queries.
        images: files of the image queries.
        k: number of results of each query.
        run: folder or name of the model, if it has moved.
        store: URL of a collection's store, if it has moved.
        min_probability: see :meth:`Gallery.search`; only for queries of the other modality than the gallery's.
        coverage: as min_probability.
        max_risk: as min_probability.

    Returns:
        For each query the dictionary of :func:`describe`, texts first.

    Raises:
        UserError: the model is missing, an image cannot be used, or a guarantee is asked for a modality without one.
        ValueError: see :meth:`Gallery.search`.
    """
    with contextlib.closing(open_gallery(folder, store)) as gallery:
        native, foreign = ("texts", images) if gallery.scorer.direction == "t2i" else ("images", texts)
        if foreign and not (min_probability is coverage is max_risk is None):
            raise UserError(
                f"this index has calibrated probabilities, coverages and risks for {native} as queries only;"
                f" search by"
                f" {native} alone, or leave these options out"
            )
        loaded = load_retrieval_model(gallery, folder, run)
        results = []
        if texts:
            queries = loaded.model.embed_texts(texts)
            results += describe(
                gallery, texts, queries, k, min_probability=min_probability, coverage=coverage, max_risk=max_risk
            )
        for path in images:
            if not path.is_file():
                raise UserError(f"there is no image {path}")
            try:
                query = loaded.model.embed_images([path.read_bytes()])
            except ValueError as error:
                raise UserError(f"{path}: {error}") from error
            results += describe(
                gallery, [str(path)], query, k, min_probability=min_probability, coverage=coverage, max_risk=max_risk
            )
    # The logits were fitted on pairs of an image and a text: within one modality they are not calibrated.
    uncalibrated = range(len(texts), len(results)) if native == "texts" else range(len(texts))
    return [r | {"calibrated": False} if i in uncalibrated else r for i, r in enumerate(results)]


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
    """Search a gallery, and describe the certainty of each answer.

    Args:
        index: gallery to search in.
        names: n names of the queries.
        queries: (n, d) embeddings.
        k: see :meth:`Gallery.search`.
        min_probability: see :meth:`Gallery.search`.
        coverage: see :meth:`Gallery.search`.
        max_risk: see :meth:`Gallery.search`.

    Returns:
        For each query {"query", "distance" (its name), "calibrated" (whether the probabilities were fitted on held-out
        pairs), "uncertainty" (total variance), "expected_matches" (sum of the match probabilities over the whole
        gallery), "abstained" (whether the risk is too high to answer; null without max_risk), "verdict" (a sentence),
        "hits": [{"id", "distance", "match_probability", "uncertainty", and the payload}], "conformal_set" (like hits,
        all items within the radius of the coverage; null without coverage)}.
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
