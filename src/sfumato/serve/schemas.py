"""Requests, responses and problems (RFC 9457) as pydantic models; the API documentation is made from them."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

from fastapi import UploadFile
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, Json, model_validator
from starlette.exceptions import HTTPException

from sfumato.ids import id_error
from sfumato.serve.settings import MOST, Rights

GalleryName = Literal["images", "texts"]
Modality = Literal["text", "image"]
ItemId = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$", description="id of an item")]


def _new_id(id: str) -> str:
    if error := id_error(id):
        raise ValueError(error)
    return id


NewId = Annotated[str, Field(min_length=1, max_length=512, description="id of the item"), AfterValidator(_new_id)]
Text = Annotated[
    str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]*[^\s\x00][^\x00]*$", description="any text")
]
Short = Annotated[str, Field(max_length=2000, pattern=r"^[^\x00]*$")]
Payload = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00]*$")],
        Annotated[str, Field(max_length=2000, pattern=r"^[^\x00]*$")],
    ],
    Field(max_length=32, description="texts that searches return with the item"),
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Query(_Model):
    """A query: exactly one of text, image and id."""

    text: Text | None = None
    image: str | None = Field(None, description="an image file in base64; bare files go to /v1/search/image")
    id: ItemId | None = Field(None, description="id of an item of the gallery, to find similar items")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.text, self.image, self.id)) != 1:
            raise ValueError("give exactly one of text, image and id")
        return self


class ItemFilter(_Model):
    """Which items a search may find."""

    where: Annotated[dict[Short, Annotated[list[Short], Field(max_length=100)]], Field(max_length=16)] = Field(
        {}, description="by payload field, the allowed values"
    )
    max_uncertainty: float | None = Field(None, ge=0, description="largest total variance of an item")


class _Options(_Model):
    """Options that JSON, forms and links have in common."""

    gallery: GalleryName = Field("images", description="gallery to search")
    max_results: int = Field(10, ge=1, description="number of results, up to the limit of the service")
    min_probability: float | None = Field(
        None, ge=0, le=1, description="leave out results with a lower match probability"
    )
    abstain: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="report whether to abstain, so that at most this fraction of the answers is wrong",
    )
    coverage: float | None = Field(
        None, gt=0, lt=1, description="also return the set of items that holds a match with at least this probability"
    )
    position: bool = Field(False, description="also return the position of the query on the map of the gallery")


class SearchOptions(_Options):
    """Options of every search."""

    filter: ItemFilter | None = None


class SearchRequest(SearchOptions):
    """One or several queries, searched together."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"queries": [{"text": "a red bird"}], "max_results": 5}]})

    queries: list[Query] = Field(min_length=1, max_length=MOST, description="up to the limit of the service")


class VectorQuery(_Model):
    """A query by an embedding that was made elsewhere."""

    # Values that are not finite come through, for a refusal that names the query.
    vector: Annotated[list[Annotated[float, Field(strict=True, allow_inf_nan=True)]], FailFast()] = Field(
        description="the embedding; `query_kinds` of `/v1/info` has its length"
    )
    modality: Modality = Field("text", description="what it is the embedding of")
    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")] | None = Field(
        None, description="name of the query in the answer; `vector 1` and so on if left out"
    )


class VectorRequest(SearchOptions):
    """One or several embeddings, searched together."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"queries": [{"vector": [0.6, -0.8], "modality": "text"}], "max_results": 5}]}
    )

    queries: list[VectorQuery] = Field(min_length=1, max_length=MOST, description="up to the limit of the service")


class ResultRecord(_Model):
    """One item that a search found."""

    id: str
    rank: int = Field(description="1 is the closest")
    distance: float = Field(description="to the query, in the distance that the answer names; smaller is closer")
    match_probability: float | None = Field(description="null if the answer is not calibrated")
    uncertainty: float = Field(description="total variance of the item")
    payload: dict[str, str]
    picture: str | None = Field(description="path of its image at this service; null if there is none")


class ConformalSet(_Model):
    """Items that contain a match with at least the requested probability."""

    coverage: float
    complete: bool = Field(
        description="false if the set was cut at the limit of the service; then the coverage is not guaranteed"
    )
    hits: list[ResultRecord]


class VerdictText(_Model):
    """The answer in words."""

    kind: Literal["clear", "few", "many", "unsure", "abstained", "unfamiliar"]
    text: str


class Ellipse(_Model):
    """A Gaussian on the map: centre, half axes of one standard deviation, and angle of the first axis in radians."""

    x: float
    y: float
    a: float
    b: float
    angle: float


class Position(Ellipse):
    """The position of a query on the map."""

    version: str = Field(
        description="version of the map that the position belongs to; if you have another version, get the map again"
    )


class Answer(_Model):
    """The answer to one query."""

    query: str = Field(description="the text, the name of the image file or of the vector, or the id")
    kind: Literal["text", "image", "id"] = Field(description="of a vector, its modality")
    distance: str = Field(description="name of the distance, e.g. csd")
    calibrated: bool = Field(
        description="whether there are probabilities: the calibration was fitted on held-out pairs of this kind of"
        " query. Between two images or two texts, and without a calibration, there are none, and no verdict"
    )
    uncertainty: float = Field(description="total variance of the query")
    queries_differ: bool = Field(
        description="whether recent queries of this kind differ from those of the calibration; then probabilities and"
        " guarantees may not hold"
    )
    expected_matches: float | None = Field(
        description="sum of the match probabilities over the items that the filter accepts; estimated beyond 20,000"
        " items; null if the answer is not calibrated"
    )
    verdict: VerdictText | None = Field(
        description="null if the answer is not calibrated, unless the text does not look like words"
    )
    abstained: bool | None = Field(
        description="true if the query should not be answered; null if no risk was requested"
    )
    hits: list[ResultRecord]
    conformal_set: ConformalSet | None = Field(description="null if no coverage was requested")
    position: Position | None = Field(description="on the map; null if it was not requested")


class SearchResponse(_Model):
    """Answers in the order of the queries."""

    gallery: GalleryName
    answers: list[Answer]


class NewItem(_Model):
    """An item to add: a text to a gallery of texts, an image to a gallery of images."""

    id: NewId
    text: Text | None = None
    image: str | None = Field(None, description="an image file in base64; bare files go to /v1/items/image")
    payload: Payload = {}

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.text is None) == (self.image is None):
            raise ValueError("give either text or image")
        return self


class Item(_Model):
    """An item of a gallery."""

    id: str
    uncertainty: float = Field(description="total variance")
    payload: dict[str, str]
    picture: str | None = Field(description="path of its image at this service; null if there is none")


class AddRequest(_Model):
    """Items to add, or to replace if their ids exist; all of them or none."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"gallery": "texts", "items": [{"id": "caption-1", "text": "a red bird"}]}]}
    )

    gallery: GalleryName = "images"
    items: list[NewItem] = Field(min_length=1, max_length=MOST, description="up to the limit of the service")


class AddResponse(_Model):
    """What has been stored durably."""

    gallery: GalleryName
    stored: int
    n: int = Field(description="items in the gallery now")


class DeleteRequest(_Model):
    """Items to remove."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"gallery": "images", "ids": ["birds/red.jpg"]}]})

    gallery: GalleryName = "images"
    ids: list[ItemId] = Field(min_length=1, max_length=MOST)


class DeleteResponse(_Model):
    """What has been removed durably."""

    gallery: GalleryName
    deleted: int = Field(description="number of removed items")
    n: int = Field(description="items in the gallery now")


class QueryDrift(_Model):
    """How recent queries compare with those of the calibration, by the distance of their first hit."""

    window: int = Field(description="number of queries that are compared together")
    n_queries: int = Field(description="queries since the start, but for those with a filter and repeated ones")
    n_windows: int = Field(description="complete windows; the other values are of the last one")
    statistic: float | None = Field(description="largest difference of the distribution functions; null before")
    p_value: float | None = Field(description="of a difference that does not matter; null before")
    differs: bool = Field(description="whether probabilities and guarantees may not hold for these queries")


class GalleryInfo(_Model):
    """A gallery of the service."""

    n: int
    writable: bool = Field(description="whether you may add and remove items: it is a collection, and you may write")
    pictures: bool = Field(description="whether the service shows images of its items")
    calibrated: bool = Field(description="whether queries of the other kind have calibrated probabilities")
    risks: list[float] = Field(description="usual values of abstain that the calibration can guarantee")
    coverages: list[float] = Field(description="usual values of coverage that the calibration can guarantee")
    fields: list[str] = Field(description="payload fields of its items")
    queries: QueryDrift | None = Field(
        description="null without a calibration, or if it does not cover the size of the gallery"
    )


class Limits(_Model):
    """Limits; requests beyond them are refused."""

    max_batch: int
    max_results: int
    max_upload_bytes: int
    max_pixels: int


class QueryKinds(_Model):
    """The kinds of queries that the model of the service can answer."""

    text: bool = Field(description="texts")
    image: bool = Field(description="image files")
    id: bool = Field(description="ids of items")
    vector: dict[Modality, int] = Field(
        description="by modality, the length of the vectors of `/v1/search/vector`; a modality that is not listed is"
        " refused"
    )


class Info(_Model):
    """The service."""

    version: str
    model: str
    distance: str
    dimensions: int
    query_kinds: QueryKinds
    rights: Rights = Field(description="what you may do, by your key; who may write may also read")
    galleries: dict[GalleryName, GalleryInfo]
    limits: Limits


class MapPoint(Ellipse):
    """An item on the map."""

    id: str
    uncertainty: float
    payload: dict[str, str]
    picture: str | None


class Map(_Model):
    """The first two principal components of the means of a sample of the gallery, with the projected Gaussians."""

    gallery: GalleryName
    n: int = Field(description="items in the gallery")
    version: str = Field(
        description="version of the plane, which stays the same until a quarter of the items has changed"
    )
    explained: tuple[float, float] = Field(description="fractions of the variance of the means along the two axes")
    points: list[MapPoint]


class Invalid(_Model):
    """One error in a request."""

    where: str = Field(description='e.g. "body.queries.0.text"')
    message: str


class State(_Model):
    """The state of the service: alive, or ready."""

    status: Literal["alive", "ready"]


class SearchParameters(_Options):
    """The options of a search as query parameters or form fields, which cannot be nested."""

    where: list[Annotated[str, Field(max_length=2101, pattern=r"^[^\x00:]+:[^\x00]*$")]] = Field(
        [], max_length=100, description="FIELD:VALUE that the payload must have; may be repeated"
    )
    max_uncertainty: float | None = Field(None, ge=0, description="largest total variance of an item")

    def options(self) -> SearchOptions:
        """The same options as in JSON.

        Returns:
            The options.
        """
        where: dict[str, list[str]] = {}
        for pair in self.where:
            name, _, value = pair.partition(":")
            where.setdefault(name, []).append(value)
        wanted = None
        if where or self.max_uncertainty is not None:
            wanted = ItemFilter(where=where, max_uncertainty=self.max_uncertainty)
        flat = self.model_dump(exclude={"where", "max_uncertainty", "q", "image"}, exclude_unset=True)
        return SearchOptions(**flat, filter=wanted)


class TextSearch(SearchParameters):
    """One text and the options of a search."""

    q: Text = Field(examples=["a red bird"])


class ImageSearch(SearchParameters):
    """An image file and the options of a search, as a form."""

    image: UploadFile = Field(description="the image file")


class NewImage(_Model):
    """An image file to add, as a form."""

    id: NewId
    image: UploadFile = Field(description="the image file")
    payload: Json[Payload] = Field({}, description="a JSON object of texts that searches return with the item")


class Problem(_Model):
    """Why a request was refused, as RFC 9457 application/problem+json."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[Invalid] = []


PROBLEM = "application/problem+json"
_LONGEST, _MOST, _TOO_WRONG = 500, 20, 100


class Refusal(HTTPException):
    """The refusal of a request.

    Args:
        status: of HTTP.
        detail: the received value, the expected value and what to do.
        errors: (where, message) of each error.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.errors = tuple(errors)

    def response(self) -> Response:
        """The refusal as a response.

        Returns:
            The problem document.
        """
        problem = Problem(
            title=HTTPStatus(self.status_code).phrase,
            status=self.status_code,
            detail=_clean(self.detail),
            errors=[Invalid(where=_clean(where), message=_clean(message)) for where, message in self.errors[:_MOST]],
        )
        # ASCII, so that encoding cannot fail.
        return Response(json.dumps(problem.model_dump()), self.status_code, headers=self.headers, media_type=PROBLEM)


def busy(detail: str, seconds: int = 1) -> Refusal:
    """The refusal of a busy service.

    Args:
        detail: why.
        seconds: value of Retry-After.

    Returns:
        503.
    """
    return Refusal(503, detail, headers={"Retry-After": str(seconds)})


def invalid(errors: Sequence[Any], body: str = "body") -> Refusal:
    """The refusal of a request that pydantic finds invalid.

    Args:
        errors: of a ValidationError.
        body: name of the body in `where`.

    Returns:
        422, with the first errors; only their number if there are very many.
    """
    if len(errors) > _TOO_WRONG:
        return Refusal(422, f"The request is not valid: {body}: it has {len(errors)} errors")
    found = []
    for error in errors:
        root, *path = error["loc"]
        where = ".".join(str(part) for part in (body if root == "body" else root, *path))
        message = f"unknown field {path[-1]!r}" if error["type"] == "extra_forbidden" and path else str(error["msg"])
        found.append((where, message.removeprefix("Value error, ")))
    first = "; ".join(f"{where}: {message}" for where, message in found[:3])
    return Refusal(422, f"The request is not valid: {first}", errors=found)


def _clean(text: str) -> str:
    """A text shortened, and without characters that UTF-8 cannot encode."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
