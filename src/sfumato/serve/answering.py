"""Conversion of embedded queries to answers, with the guarantees that the calibration can give."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import quote

import torch

from sfumato.gaussian import GaussianEmbedding
from sfumato.search.gallery import Gallery, SearchRecord
from sfumato.search.stores.protocol import Filter
from sfumato.search.verdict import verdict
from sfumato.serve.image_files import handed_out
from sfumato.serve.schemas import (
    Answer,
    ConformalSet,
    Ellipse,
    GalleryInfo,
    GalleryName,
    Position,
    Refusal,
    ResultRecord,
    SearchOptions,
    VerdictText,
)
from sfumato.serve.served import ServedGallery, kind
from sfumato.studies.maps import Projection

RISKS, COVERAGES = (0.5, 0.3, 0.2, 0.1, 0.05), (0.5, 0.8, 0.9, 0.95)
"""Usual values. The service reports which of them the calibration can guarantee."""

_LOOKED_AT = 200


@dataclass(frozen=True)
class Asked:
    """A query.

    Attributes:
        kind: what the query is.
        name: name of the query in the answer: the text, the name of the image file, or the id.
        where: its location in the request, e.g. "body.queries.0.text".
        text: the text, for kind "text".
        image: the bytes of the image file, for kind "image".
    """

    kind: Literal["text", "image", "id"]
    name: str
    where: str
    text: str = ""
    image: bytes = b""


@dataclass(frozen=True)
class Search:
    """An embedded query and how to search by it.

    Attributes:
        asked: the query.
        query: (1, d) its embedding.
        options: options of the search.
    """

    asked: Asked
    query: GaussianEmbedding
    options: SearchOptions


def native(gallery: Gallery) -> str:
    """The kind of queries that a gallery is calibrated for.

    Args:
        gallery: the gallery.

    Returns:
        "text" for a gallery of images, "image" for one of texts.
    """
    return "text" if kind(gallery) == "images" else "image"


def check_guarantees(gallery: Gallery, asked: Sequence[Asked], options: SearchOptions) -> None:
    """Refuse guarantees that the calibration cannot give; other errors of a search are internal errors.

    Args:
        gallery: where to search.
        asked: the queries.
        options: options of the search.

    Raises:
        Refusal: 422, if a guarantee is requested for queries of another kind than :func:`native`, or the calibration
            cannot give it.
    """
    wanted = native(gallery)
    for name in ("abstain", "coverage", "min_probability"):
        if getattr(options, name) is not None and any(one.kind != wanted for one in asked):
            raise Refusal(
                422,
                f"{name} works only with queries by {wanted} among the {kind(gallery)}, because the calibration was"
                " fitted on"
                f" those. Search by {wanted} alone, or leave out {name}",
                errors=[(name, f"works only with queries by {wanted}")],
            )
    try:
        if options.coverage is not None:
            gallery.scorer.radius(options.coverage)
        if options.abstain is not None:
            gallery.scorer.abstains(torch.zeros(1), options.abstain, len(gallery))
    except ValueError as error:
        raise Refusal(422, str(error)) from error


def answered(
    served: ServedGallery,
    asked: Sequence[Asked],
    queries: GaussianEmbedding,
    options: SearchOptions,
    *,
    max_set: int,
    plane: Projection | None = None,
) -> list[Answer]:
    """Search by several queries with the same options.

    Args:
        served: the gallery to search.
        asked: n queries.
        queries: (n, d) their embeddings.
        options: checked by :func:`check_guarantees`.
        max_set: largest number of items in a conformal set.
        plane: projection of the map, if the positions of the queries are wanted.

    Returns:
        n answers.
    """
    gallery, given, wanted = served.gallery, options.filter, None
    if given is not None:
        wanted = Filter({name: tuple(values) for name, values in given.where.items()}, given.max_uncertainty)
    results = gallery.search(
        queries,
        options.max_results,
        min_probability=options.min_probability,
        coverage=options.coverage,
        max_risk=options.abstain,
        max_set=max_set,
        filter=wanted,
    )
    expected_matches = gallery.expected_matches(queries)
    positions: list[Position | None] = [None] * len(asked)
    if plane is not None:
        positions = [Position(**ellipse_of(one).model_dump(), version=plane.version) for one in plane.ellipses(queries)]
    answers = []
    for one, result, expected, position in zip(asked, results, expected_matches, positions, strict=True):
        words, whole = verdict(expected, result.best_probability, result.abstained), None
        if result.conformal_set is not None and options.coverage is not None:
            whole = ConformalSet(
                coverage=options.coverage,
                complete=not result.conformal_set_cut,
                hits=[_record(served, record) for record in result.conformal_set],
            )
        answers.append(
            Answer(
                query=one.name,
                kind=one.kind,
                distance=gallery.distance,
                calibrated=gallery.calibrated and one.kind == native(gallery),
                uncertainty=result.uncertainty,
                expected_matches=expected,
                verdict=VerdictText(kind=words.kind, text=words.text),
                abstained=result.abstained,
                hits=[_record(served, record) for record in result],
                conformal_set=whole,
                position=position,
            )
        )
    return answers


def search_together(
    searches: Sequence[Search],
    served_of: Callable[[GalleryName], ServedGallery],
    plane_of: Callable[[GalleryName], Projection | None],
    *,
    max_set: int,
) -> list[Answer | Exception]:
    """Answer the searches of several requests; those with the same options are searched at once.

    Args:
        searches: n searches.
        served_of: gallery by name.
        plane_of: projection of the map by name of the gallery.
        max_set: largest number of items in a conformal set.

    Returns:
        n answers; an exception in place of an answer for a search that failed.
    """
    alike: dict[str, list[int]] = {}
    for i, one in enumerate(searches):
        alike.setdefault(one.options.model_dump_json(exclude={"queries"}), []).append(i)
    results: dict[int, Answer | Exception] = {}
    for places in alike.values():
        options, some = searches[places[0]].options, [searches[i] for i in places]
        queries = GaussianEmbedding.cat([one.query for one in some])
        try:
            plane = plane_of(options.gallery) if options.position else None
            served, asked = served_of(options.gallery), [one.asked for one in some]
            answers = answered(served, asked, queries, options, max_set=max_set, plane=plane)
            results |= dict(zip(places, answers, strict=True))
        except Exception as error:
            results |= dict.fromkeys(places, error)
    return [results[i] for i in range(len(searches))]


def info_of(served: ServedGallery) -> GalleryInfo:
    """Describe a gallery.

    Args:
        served: the gallery.

    Returns:
        The description, with n = 0 for the caller to fill in.
    """
    some, scorer = served.gallery.sample(_LOOKED_AT), served.gallery.scorer
    return GalleryInfo(
        n=0,
        writable=served.writable is not None,
        pictures=served.images is not None,
        calibrated=served.gallery.calibrated,
        risks=[r for r in RISKS if _can_guarantee(partial(scorer.abstains, torch.zeros(1), r, 1))],
        coverages=[c for c in COVERAGES if _can_guarantee(partial(scorer.radius, c))],
        fields=sorted({name for payload in some.payloads for name in handed_out(payload)}),
    )


def image_path(served: ServedGallery, id: str, payload: Mapping[str, str]) -> str | None:
    """Path of the image of an item at this service.

    Args:
        served: gallery of the item.
        id: id of the item.
        payload: payload of the item.

    Returns:
        The path; None if the item is known to have no image.
    """
    known = served.images is not None and served.images.has(id, payload)
    return f"/v1/pictures/{quote(id)}" if known else None


def ellipse_of(values: tuple[float, float, float, float, float]) -> Ellipse:
    """Name the values of an ellipse.

    Args:
        values: (x, y, a, b, angle).

    Returns:
        The ellipse.
    """
    x, y, a, b, angle = values
    return Ellipse(x=x, y=y, a=a, b=b, angle=angle)


def _record(served: ServedGallery, record: SearchRecord) -> ResultRecord:
    return ResultRecord(
        id=record.id, rank=record.rank, distance=record.distance, match_probability=record.match_probability,
        uncertainty=record.uncertainty, payload=handed_out(record.payload),
        picture=image_path(served, record.id, record.payload),
    )  # fmt: skip


def _can_guarantee(guarantee: Callable[[], object]) -> bool:
    try:
        return guarantee() != float("inf")
    except ValueError:
        return False
