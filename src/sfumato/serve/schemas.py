"""Requests, responses and problems (RFC 9457) as pydantic models; the API documentation is made from them."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, FailFast, Field, model_validator

from sfumato.ids import check_id
from sfumato.search.answer import SearchOptions
from sfumato.search.stores.protocol import Filter, parse_where
from sfumato.serve.problems import NO_NUL, WORD, Model, Refusal, example
from sfumato.serve.settings import MOST, GalleryName, Rights

Modality = Literal["text", "image"]
QueryKind = Literal["text", "image", "id"]

ItemId = Annotated[str, Field(min_length=1, max_length=512, pattern=NO_NUL, description="id of an item")]


NewId = Annotated[str, Field(min_length=1, max_length=512, description="id of the item"), AfterValidator(check_id)]
Text = Annotated[str, Field(min_length=1, max_length=2000, pattern=WORD, description="any text")]
Short = Annotated[str, Field(max_length=2000, pattern=NO_NUL)]
Payload = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=100, pattern=NO_NUL)], Short],
    Field(max_length=32, description="texts that searches return with the item"),
]


_MOST_VARIANCE = Field(None, ge=0, description="largest total variance of an item")


_ALSO: Any = Field([], max_length=10, description="further texts that a hit should fit")
_WITHOUT: Any = Field([], max_length=10, description="texts that a hit should not fit; the answer is not calibrated")


class Query(Model):
    """A query: exactly one of text, image, id and vector."""

    text: Text | None = Field(None, description="any text")
    image: str | None = Field(None, description="an image file in base64")
    id: ItemId | None = Field(None, description="id of an item of the gallery, to find similar items")
    # Values that are not finite come through, for a refusal that names the query.
    vector: Annotated[list[Annotated[float, Field(strict=True, allow_inf_nan=True)]] | None, FailFast()] = Field(
        None,
        description="an embedding that was made elsewhere; `query_kinds` of `/v1/info` has its length. A model that"
        " reads embeddings takes those of the model that made them, another model of points its own; a model of"
        " Gaussians refuses vectors",
    )
    modality: Modality = Field("text", description="what a vector is the embedding of")
    name: Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL)] | None = Field(
        None, description="name of an image or a vector in the answer; `image 1`, `vector 1` and so on if left out"
    )
    also: list[Text] = _ALSO
    without: list[Text] = _WITHOUT

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.text, self.image, self.id, self.vector)) != 1:
            raise ValueError("give exactly one of text, image, id and vector")
        if (self.also or self.without) and self.text is None:
            raise ValueError("also and without stand beside a text to search for; leave them out")
        return self


class ItemFilter(Model):
    """Which items a search may find."""

    where: Annotated[dict[Short, Annotated[list[Short], Field(max_length=100)]], Field(max_length=16)] = Field(
        {}, description="by payload field, the allowed values; a folder stands for those below it, too"
    )
    ranges: Annotated[dict[Short, tuple[Short, Short]], Field(max_length=16)] = Field(
        {}, description='by payload field, [at least, below] in the order of code points; "" is an open end'
    )
    max_total_variance: float | None = _MOST_VARIANCE


class SearchFields(Model):
    """Options of a search that JSON and links have in common."""

    gallery: GalleryName = Field("images", description="gallery to search")
    max_results: int = Field(
        default_factory=lambda: 10,  # In the document it would be a default, which generated clients send.
        ge=1,
        description="number of results, up to the limit of the service; if left out 10, or the limit if that is less",
    )
    min_probability: float | None = Field(None, ge=0, le=1, description="leave out results of a lower probability")
    abstain: float | None = Field(
        None, gt=0, lt=1, description="report whether to abstain, so that at most this fraction of the answers is wrong"
    )
    coverage: float | None = Field(
        None, gt=0, lt=1, description="also return the set of items that holds a match with at least this probability"
    )
    duplicates: Literal["show", "fold"] = Field(
        "show", description="fold: of images nearly the same the largest is a hit, and the others are its duplicates"
    )
    order: Literal["fits", "distance"] = Field(
        "fits",
        description="of the hits of a text where items have texts. fits: the most probable; distance: the closest, with"
        " the same probabilities",
    )
    target: Literal["fits", "listed"] = Field(
        "fits", description="fits: texts of items are evidence in a search by text; listed: the distance alone"
    )

    def accepted(self) -> Filter:
        """Which items the search may find."""
        raise NotImplementedError

    def of_search(self, max_set: int) -> SearchOptions:
        """The options of the library."""
        accepted = self.accepted()
        if hidden := sorted(name for name in (*accepted.where, *accepted.ranges) if name.startswith("_")):
            raise Refusal(422, f"a filter of {hidden[0]!r}: fields that begin with _ are hidden; leave it out")
        same = {name: getattr(self, name) for name in ("min_probability", "coverage", "duplicates", "order", "target")}
        chosen = None if accepted == Filter() else accepted
        return SearchOptions(**same, max_risk=self.abstain, max_set=max_set, filter=chosen)


class SearchRequest(SearchFields):
    """One or several queries, searched together."""

    model_config = example({"queries": [{"text": "a red bird"}], "max_results": 5})

    filter: ItemFilter | None = Field(None, description="which items the search may find; all if null")
    queries: list[Query] = Field(min_length=1, max_length=MOST, description="up to the limit of the service")

    def accepted(self) -> Filter:
        """See :meth:`SearchFields.accepted`."""
        given = self.filter or ItemFilter()
        where = {name: tuple(values) for name, values in given.where.items()}
        return Filter(where, given.max_total_variance, given.ranges)


class Drawn(Model):
    """How a hit was drawn to be judged, for a verdict on it."""

    why: str = Field(description="group that it was drawn from")
    weight: float = Field(description="one over the probability that it was drawn")


class Item(Model):
    """An item of a gallery."""

    id: str = Field(description="id of the item")
    total_variance: float = Field(description="total variance of the item, the sum of its variances")
    payload: dict[str, str] = Field(description="texts that were stored with the item")
    picture: str | None = Field(
        description="path of its image below the address of this service; null if there is none"
    )


class ResultRecord(Item):
    """One item that a search found."""

    rank: int = Field(description="1 is the first")
    distance: float = Field(description="to the query, in the distance that the answer names; smaller is closer")
    match_probability: float | None = Field(description="null if the answer is not calibrated")
    best_text: str = Field("", description="the item's text with most of the query's words; empty without one")
    to_judge: Drawn | None = Field(
        None,
        description="where a verdict tells most: drawn from the hits with a probability of 10 % to 90 %, at most ten of"
        " an answer; null for others, and where the service keeps no verdicts",
    )
    duplicates: list[str] = Field([], description="ids of nearly the same images that are folded into it")
    why: dict[str, float] = Field(
        {},
        description="parts that add up to the log odds of match_probability, for target fits: image, texts, other"
        " results, query and, if it names some, time and place",
    )


class ConformalSet(Model):
    """Items that contain a match with at least the requested probability."""

    coverage: float = Field(description="the requested probability")
    complete: bool = Field(description="false if cut at the service's limit; the coverage is then not guaranteed")
    hits: list[ResultRecord] = Field(description="the items, the closest first")


class VerdictText(Model):
    """The answer in words."""

    model_config = ConfigDict(from_attributes=True)  # It is that of the library.

    kind: Literal["clear", "few", "many", "unsure", "nothing", "abstained", "unfamiliar"] = Field(
        description="for programs"
    )
    text: str = Field(description="for people")


class Answer(Model):
    """The answer to one query."""

    query: str = Field(description="the text, the name of the image file or of the vector, or the id")
    kind: QueryKind = Field(description="of a vector, its modality")
    distance: str = Field(description="name of the distance, e.g. csd")
    target: Literal["listed", "fits"] = Field(
        "listed",
        description="what the probabilities are of. `listed`: a pair like those of the data, by the distance alone."
        " `fits`: a person would say that the text describes the image, by the distance and the texts of the item",
    )
    calibrated: bool = Field(
        description="whether there are probabilities: the calibration was fitted on held-out pairs of this kind of"
        " query. Between two images or two texts, and without a calibration, there are none, and no verdict"
    )
    total_variance: float = Field(description="total variance of the query, the sum of its variances")
    expected_matches: float | None = Field(
        description="sum of the match probabilities over the items that the filter accepts; estimated beyond 20,000"
        " items; null if the answer is not calibrated"
    )
    nothing_probability: float | None = Field(
        None, description="probability that no item fits; null for the target `listed`, or if not calibrated"
    )
    multiplicity: float | None = Field(
        None,
        description="number of COCO's 123,287 images that people would find relevant, estimated from the text alone;"
        " null for the target `listed`, and for fewer than three words",
    )
    hidden: int = Field(0, description="number of hits that `min_probability` left out")
    verdict: VerdictText | None = Field(
        description="null if the answer is not calibrated, unless the model hardly knows the words of the text"
    )
    note: str = Field("", description="what a mix of training and other images means for the probabilities")
    suggestion: str | None = Field(None, description="the text with misspelt words replaced; null if none")
    warning: str | None = Field(None, description="what the model cannot read of the text; null if nothing")
    abstained: bool | None = Field(description="true if the query should not be answered; null without a risk")
    hits: list[ResultRecord] = Field(description="the closest first")
    conformal_set: ConformalSet | None = Field(description="null if no coverage was requested")


class SearchResponse(Model):
    """Answers in the order of the queries."""

    gallery: GalleryName = Field(description="gallery that was searched")
    answers: list[Answer] = Field(description="one for each query, in their order")


class NewItem(Model):
    """An item to add: a text to a gallery of texts, an image to a gallery of images."""

    id: NewId
    text: Text | None = Field(None, description="for a gallery of texts")
    image: str | None = Field(None, description="for a gallery of images, an image file in base64")
    payload: Payload = Field({}, description="texts that searches return with the item")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.text is None) == (self.image is None):
            raise ValueError("give either text or image")
        return self


class ItemList(Model):
    """Some items of a gallery, in the order of their ids (of the UTF-8 bytes)."""

    gallery: GalleryName = Field(description="gallery of the items")
    items: list[Item] = Field(description="the items")
    next_cursor: str | None = Field(description="cursor of the request for the items that follow; null if none do")


class AddRequest(Model):
    """Items to add, or to replace if their ids exist; all are checked before one is stored."""

    model_config = example({"gallery": "texts", "items": [{"id": "caption-1", "text": "a red bird"}]})

    gallery: GalleryName = Field("images", description="gallery to add to")
    items: list[NewItem] = Field(min_length=1, max_length=MOST, description="up to the limit of the service")


class AddResponse(Model):
    """What has been stored durably."""

    gallery: GalleryName = Field(description="gallery that was written to")
    stored: int = Field(description="number of items that were added or replaced")
    created: int = Field(description="number of those that did not exist before")
    n: int = Field(description="items in the gallery now")


class DeleteRequest(Model):
    """Items to remove."""

    model_config = example({"gallery": "images", "ids": ["birds/red.jpg"]})

    gallery: GalleryName = Field("images", description="gallery to remove from")
    ids: list[ItemId] = Field(min_length=1, max_length=MOST, description="ids of the items; unknown ones are skipped")


class DeleteResponse(Model):
    """What has been removed durably."""

    gallery: GalleryName = Field(description="gallery that was written to")
    deleted: int = Field(description="number of removed items")
    n: int = Field(description="items in the gallery now")


class GalleryInfo(Model):
    """A gallery of the service."""

    n: int = Field(description="number of items")
    writable: bool = Field(description="whether you may add and remove items: it is a collection, and you may write")
    pictures: bool = Field(description="whether the service shows images of its items")
    calibrated: bool = Field(description="whether queries of the other kind have calibrated probabilities")
    risks: list[float] = Field(description="usual values of abstain that the calibration can guarantee")
    coverages: list[float] = Field(description="usual values of coverage that the calibration can guarantee")
    fields: list[str] = Field(description="payload fields of its items")


class Limits(Model):
    """Limits; requests beyond them are refused."""

    max_batch: int = Field(description="queries, or new items, of a request")
    max_results: int = Field(description="results of a query, and items of a conformal set")
    max_upload_bytes: int = Field(description="size of an image file")
    max_pixels: int = Field(description="pixels of all images of a request together")


class QueryKinds(Model):
    """The kinds of queries that the model of the service can answer."""

    text: bool = Field(description="texts")
    image: bool = Field(description="image files")
    id: bool = Field(description="ids of items")
    vector: dict[Modality, int] = Field(description="by modality, the length of vectors; others are refused")


class Info(Model):
    """The service."""

    version: str = Field(description="of sfumato")
    model: str = Field(description="name of the model")
    distance: str = Field(description="name of the distance of all galleries, e.g. csd")
    dimensions: int = Field(description="of the embeddings")
    query_kinds: QueryKinds = Field(description="what can be searched by")
    rights: Rights = Field(description="what you may do, by your key; who may write may also read")
    galleries: dict[GalleryName, GalleryInfo] = Field(description="by the kind of their items")
    judgements: bool = Field(description="whether you may judge hits: the service keeps verdicts, and you may write")
    limits: Limits = Field(description="requests beyond them are refused")


class State(Model):
    """The state of the service: alive, or ready."""

    status: Literal["alive", "ready"] = Field(description="alive of /healthz, ready of /readyz")


def _conditions(texts: list[str]) -> list[str]:
    parse_where(texts)
    return texts


class TextSearch(SearchFields):
    """One text and the options of a search, as query parameters, which cannot be nested."""

    where: Annotated[list[Annotated[str, Field(max_length=2101, pattern=NO_NUL)]], AfterValidator(_conditions)] = Field(
        [],
        max_length=100,
        description="FIELD=VALUE that the payload must have, also with >=, <=, > and <, or FIELD:VALUE (exactly); may"
        " be repeated. Of the field date a part stands for its whole: date=2024-06",
    )
    max_total_variance: float | None = _MOST_VARIANCE
    q: Text = Field(description="the text to search by", examples=["a red bird"])
    also: list[Text] = _ALSO
    without: list[Text] = _WITHOUT

    def accepted(self) -> Filter:
        """See :meth:`SearchFields.accepted`."""
        return replace(parse_where(self.where), max_uncertainty=self.max_total_variance)
