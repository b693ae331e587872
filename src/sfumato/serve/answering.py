"""From queries, embedded, to answers on the wire: what may be asked of whom, and how sure the answer is."""

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
    Hit,
    Position,
    Refusal,
    Said,
    SearchOptions,
)
from sfumato.serve.served import ServedGallery, kind
from sfumato.studies.maps import Projection

RISKS, COVERAGES = (0.5, 0.3, 0.2, 0.1, 0.05), (0.5, 0.8, 0.9, 0.95)
"""The usual ones, of which the service says whether the calibration can vouch for them."""

_LOOKED_AT = 200


@dataclass(frozen=True)
class Asked:
    """A query: a text, the bytes of an image, or an id; with the name that the answer gives it, and its place in the request."""

    kind: Literal["text", "image", "id"]
    name: str
    where: str
    text: str = ""
    image: bytes = b""


@dataclass(frozen=True)
class Search:
    """An embedded query, (1, d), and how to search by it."""

    asked: Asked
    query: GaussianEmbedding
    options: SearchOptions


def native(gallery: Gallery) -> str:
    """The kind of queries that a gallery is calibrated for."""
    return "text" if kind(gallery) == "images" else "image"


def check_promises(gallery: Gallery, asked: Sequence[Asked], options: SearchOptions) -> None:
    """Refuse what nothing can vouch for, so that whatever the search itself raises is a mistake of ours.

    Raises:
        Refusal: 422, a promise about queries that are not native, or one that the calibration cannot keep.
    """
    wanted = native(gallery)
    for name in ("abstain", "coverage", "min_probability"):
        if getattr(options, name) is not None and any(one.kind != wanted for one in asked):
            raise Refusal(
                422,
                f"{name} is known of {wanted}s as queries of the {kind(gallery)}, not of other queries: nothing was calibrated on those."
                f" Search by {wanted} alone, or leave it out",
                errors=[(name, f"goes with queries by {wanted}")],
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
    """Search, all at once.

    Args:
        served: where.
        asked: n queries.
        queries: (n, d) their embeddings.
        options: checked by :func:`check_promises`.
        max_set: items of a conformal set at most.
        plane: of the map, if the places of the queries are wanted.
    """
    gallery, told, wanted = served.gallery, options.filter, None
    if told is not None:
        wanted = Filter({name: tuple(values) for name, values in told.where.items()}, told.max_uncertainty)
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
    places: list[Position | None] = [None] * len(asked)
    if plane is not None:
        places = [Position(**ellipse_of(one).model_dump(), version=plane.version) for one in plane.ellipses(queries)]
    answers = []
    for one, result, expected, place in zip(asked, results, expected_matches, places, strict=True):
        said, whole = verdict(expected, result.best_probability, result.abstained), None
        if result.conformal_set is not None and options.coverage is not None:
            whole = ConformalSet(
                coverage=options.coverage,
                complete=not result.conformal_set_cut,
                hits=[_hit(served, hit) for hit in result.conformal_set],
            )
        answers.append(
            Answer(
                query=one.name,
                kind=one.kind,
                distance=gallery.distance,
                calibrated=gallery.calibrated and one.kind == native(gallery),
                uncertainty=result.uncertainty,
                expected_matches=expected,
                verdict=Said(kind=said.kind, text=said.text),
                abstained=result.abstained,
                hits=[_hit(served, hit) for hit in result],
                conformal_set=whole,
                position=place,
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
    """What several requests ask, those with the same options at once; what goes wrong with some is in the place of their answers."""
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


def told_of(served: ServedGallery) -> GalleryInfo:
    """What a gallery can do; its size is for the caller to fill in."""
    some, answers = served.gallery.sample(_LOOKED_AT), served.gallery.scorer
    return GalleryInfo(
        n=0,
        writable=served.writable is not None,
        pictures=served.images is not None,
        calibrated=served.gallery.calibrated,
        risks=[r for r in RISKS if _vouches(partial(answers.abstains, torch.zeros(1), r, 1))],
        coverages=[c for c in COVERAGES if _vouches(partial(answers.radius, c))],
        fields=sorted({name for payload in some.payloads for name in handed_out(payload)}),
    )


def image_path(served: ServedGallery, id: str, payload: Mapping[str, str]) -> str | None:
    """Where this service shows the image of an item; None if it is known to have none."""
    known = served.images is not None and served.images.has(id, payload)
    return f"/v1/pictures/{quote(id)}" if known else None


def ellipse_of(values: tuple[float, float, float, float, float]) -> Ellipse:
    """(x, y, a, b, angle) by their names."""
    x, y, a, b, angle = values
    return Ellipse(x=x, y=y, a=a, b=b, angle=angle)


def _hit(served: ServedGallery, hit: SearchRecord) -> Hit:
    return Hit(
        id=hit.id, rank=hit.rank, distance=hit.distance, match_probability=hit.match_probability,
        uncertainty=hit.uncertainty, payload=handed_out(hit.payload), picture=image_path(served, hit.id, hit.payload),
    )  # fmt: skip


def _vouches(promise: Callable[[], object]) -> bool:
    try:
        return promise() != float("inf")
    except ValueError:
        return False
