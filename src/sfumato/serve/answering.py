"""The model and the galleries of a service, and the conversion of embedded queries to answers with guarantees."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote

import numpy as np
import torch

from sfumato.calibration.query_scores import NEAR
from sfumato.data.images import Images, SplitImages, UploadedImages, handed_out
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.feature_rows import EmbeddingProcessor, features_read
from sfumato.errors import UserError
from sfumato.evaluation.judgements import ShownHit, sample_hits
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.run import RECIPE, Run, load_run
from sfumato.models.split import embed_split, load_split
from sfumato.progress import say
from sfumato.search.answer import Answer as Found
from sfumato.search.answer import Hit
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import Gallery
from sfumato.search.options import NATIVE, GuaranteeError, QueryInfo, QueryKind, TextQuery, check_native
from sfumato.search.options import SearchOptions as Options
from sfumato.search.stores.protocol import Filter
from sfumato.serve.schemas import (
    Answer,
    ConformalSet,
    Drawn,
    GalleryInfo,
    GalleryName,
    Modality,
    Refusal,
    ResultRecord,
    SearchOptions,
    VerdictText,
)
from sfumato.workflows import index

_LOG = logging.getLogger("sfumato.serve")


@dataclass(eq=False)
class ServedGallery:
    """A gallery with its images."""

    gallery: Gallery  # the gallery
    images: Images | None = None  # images of its items; None if there are none, or their location is unknown
    version: int = 0  # number of writes by this service
    written: int = 0  # number of items that this service has stored or removed

    @property
    def writable(self) -> GaussianCollection | None:
        """The collection that can be written; None if the gallery is an index."""
        return self.gallery if isinstance(self.gallery, GaussianCollection) else None

    @property
    def uploads(self) -> UploadedImages | None:
        """The folder where new images are stored; None if they cannot be stored."""
        return self.images if isinstance(self.images, UploadedImages) else None


@dataclass(frozen=True, eq=False)
class Sources:
    """The model and the galleries of a service."""

    model: DualEncoder  # embeds the queries and new items
    name: str  # name of the model, for display
    galleries: dict[GalleryName, ServedGallery] = field(default_factory=dict)  # galleries by the kind of their items
    unfamiliar: Callable[[Sequence[str]], list[bool]] = lambda texts: [False] * len(texts)

    def __post_init__(self) -> None:
        for what in ("d", "distance"):
            found = {name: getattr(served.gallery, what) for name, served in self.galleries.items()}
            if len(set(found.values())) > 1:
                raise UserError(f"the galleries differ in {what}, {found}; serve two galleries of one model")

    @property
    def distance(self) -> str:
        """Name of the distance of all galleries."""
        return next(iter(self.galleries.values())).gallery.distance

    @property
    def d(self) -> int:
        """Dimensions of all galleries."""
        return next(iter(self.galleries.values())).gallery.d

    def close(self) -> None:
        """Close the stores."""
        for served in self.galleries.values():
            served.gallery.close()


def open_sources(
    path: Path,
    *,
    texts: Path | None = None,
    run: str | None = None,
    store: str | None = None,
    split: str | None = None,
    device: torch.device | str = "cpu",
) -> Sources:
    """Open the model and the galleries for `sfumato serve`."""
    if (path / RECIPE).is_file():
        if store is not None or (run is not None and texts is None):
            raise UserError(f"{path} is a run; --run and --store are for an index, leave them out")
        served = _from_run(load_run(path, device=device), path, split or "test", images_alone=texts is not None)
    else:
        if split is not None:
            raise UserError(f"--split needs a run, but {path} is not a run")
        served = _from_gallery(path, run, store)
        for one in served.galleries.values():
            if note := index.missing_note(one.gallery):
                say(note)
        served.model.to(device)
    if texts is None:
        return served
    beside = index.open_gallery(texts)
    models = {str(served.gallery.metadata.get("run", "")) for served in served.galleries.values()} | {
        str(beside.metadata.get("run", ""))
    }
    try:
        if kind(beside) != "texts" or "texts" in served.galleries:
            raise UserError(
                f"--texts {texts}: give an index of texts there, and an index of images as the first argument"
            )
        if len(models) > 1 and run is None:
            raise UserError(
                f"the galleries were made by different models, {' and '.join(sorted(models))}; if they are the same"
                " model in a new location, give the location with --run"
            )
        return replace(served, galleries={**served.galleries, "texts": ServedGallery(beside)})
    except UserError:
        beside.close()
        served.close()
        raise


def kind(gallery: Gallery) -> GalleryName:
    """The kind of the items of a gallery."""
    return "images" if gallery.scorer.direction == "t2i" else "texts"


def _from_gallery(folder: Path, run: str | None, store: str | None) -> Sources:
    gallery = index.open_gallery(folder, store)
    try:
        retrieval_model = index.load_retrieval_model(gallery, folder, run)
        if retrieval_model.distance != gallery.distance:
            raise UserError(
                f"{folder} is ranked by {gallery.distance}, but the model {retrieval_model.source} by"
                f" {retrieval_model.distance}; give the model that the index was built with"
            )
        location = str(run or gallery.metadata["run"])
        shown = kind(gallery) == "images" and not features_read(retrieval_model.model.image)
        served = ServedGallery(gallery, index.item_images(gallery, location) if shown else None)
        judge = retrieval_model.unfamiliar_texts
        return Sources(retrieval_model.model, Path(location).name, {kind(gallery): served}, judge)
    except BaseException:
        gallery.close()
        raise


def _from_run(run: Run, folder: Path, split: str, *, images_alone: bool) -> Sources:
    prepared = load_split(run.model, run.recipe.data, split)
    images, texts = embed_split(run.model, prepared)
    data = prepared.data
    sources: dict[GalleryName, index.GalleryPart] = {
        "images": index.GalleryPart(images, data.image_ids, images={"split": split}),
        "texts": index.GalleryPart(texts, data.text_ids, data.texts),
    }
    shown = SplitImages(dict(zip(data.image_ids, data.images, strict=True)))
    files = None if features_read(run.model.image) else shown
    galleries: dict[GalleryName, ServedGallery] = {
        name: ServedGallery(index.build_index(run, source), files if name == "images" else None)
        for name, source in sources.items()
        if name == "images" or not images_alone
    }
    return Sources(run.model, folder.name, galleries, run.unfamiliar_texts)


RISKS, COVERAGES = (0.5, 0.3, 0.2, 0.1, 0.05), (0.5, 0.8, 0.9, 0.95)
"""Usual values. The service reports which of them the calibration can guarantee."""

N_LOOKED_AT = 200
"""Items that stand for a gallery, for the fields that it has."""


@dataclass(frozen=True)
class Asked:
    """A query."""

    kind: Literal["text", "image", "id"]  # what the query is; of a vector, its modality
    name: str  # name of the query in the answer: the text, the name of the image file or of the vector, or the id
    where: str  # its location in the request, e.g. "body.queries.0.text"
    text: str = ""  # the text, for kind "text"
    also: tuple[str, ...] = ()  # further texts that a hit should fit
    without: tuple[str, ...] = ()  # texts that a hit should not fit
    image: bytes = b""  # the bytes of the image file, for kind "image"
    vector: bytes | None = None  # float32 numbers as bytes, for a vector of kind "text" or "image"; None for others

    @property
    def query(self) -> TextQuery:
        """The texts of kind "text"."""
        return TextQuery(self.text, self.also, self.without)

    def is_native(self, gallery: Gallery) -> bool:
        """Whether the calibration of a gallery was fitted on such queries."""
        return self.kind == native(gallery) and self.query.is_one


def without_bytes(asked: Asked) -> Asked:
    """A query after its embedding, for a queue."""
    return replace(asked, image=b"", vector=None)


@dataclass(frozen=True)
class Search:
    """An embedded query and how to search by it."""

    asked: Asked  # the query, :func:`without_bytes`
    query: GaussianEmbedding  # (1, d) its embedding
    options: SearchOptions  # options of the search
    max_set: int  # largest number of items in a conformal set


def native(gallery: Gallery) -> QueryKind:
    """The kind of queries that a gallery is calibrated for."""
    return NATIVE[gallery.scorer.direction]


def refuse_guarantees(gallery: Gallery, asked: Sequence[Asked], options: SearchOptions) -> None:
    """Refuse guarantees that the calibration cannot give; other errors of a search are internal errors."""
    wanted = {name: getattr(options, name) for name in ("abstain", "coverage", "min_probability")}
    try:
        check_native(wanted, gallery.scorer.direction, [one.is_native(gallery) for one in asked])
        if options.min_probability is not None and not gallery.calibrated:
            raise GuaranteeError("min_probability", "needs a calibration, and this gallery has none", "leave it out")
        search_options(options, wanted_filter(options), 1).check(gallery.scorer.direction, [])
        if options.coverage is not None:
            gallery.scorer.radius(options.coverage)
        if options.abstain is not None:
            gallery.scorer.check_risk(options.abstain)
    except GuaranteeError as error:
        raise Refusal(422, str(error), errors=[(error.option, error.reason)]) from error
    except ValueError as error:
        raise Refusal(422, str(error)) from error


def answered(
    served: ServedGallery,
    asked: Sequence[Asked],
    queries: GaussianEmbedding,
    options: SearchOptions,
    *,
    max_set: int,
    unfamiliar: Sequence[bool] | None = None,
) -> list[Answer]:
    """Search by several queries with the same options. queries (n, d)."""
    gallery, wanted = served.gallery, wanted_filter(options)
    strange = [False] * len(asked) if unfamiliar is None else unfamiliar
    about = [
        QueryInfo(one.name, one.query if one.text else None, one.is_native(gallery), odd)
        for one, odd in zip(asked, strange, strict=True)
    ]
    how = search_options(options, wanted, max_set)
    answers = gallery.search(queries, options.max_results, how, about)
    return [_answer(served, options, *values) for values in zip(asked, answers, strict=True)]


def search_options(options: SearchOptions, filter: Filter | None, max_set: int) -> Options:
    """How the gallery searches."""
    return Options(
        min_probability=options.min_probability,
        coverage=options.coverage,
        max_risk=options.abstain,
        max_set=max_set,
        filter=filter,
        duplicates=options.duplicates,
        order=options.order,
        target=options.target,
    )


def wanted_filter(options: SearchOptions) -> Filter | None:
    """The filter of a search."""
    given = options.filter
    if given is None or (not given.where and not given.ranges and given.max_total_variance is None):
        return None
    where = {name: tuple(values) for name, values in given.where.items()}
    if hidden := sorted(name for name in (*where, *given.ranges) if name.startswith("_")):
        raise Refusal(422, f"a filter of {hidden[0]!r}: fields that begin with _ are hidden; leave it out")
    return Filter(where, given.max_total_variance, given.ranges)


def _answer(served: ServedGallery, options: SearchOptions, asked: Asked, found: Found) -> Answer:
    words, whole = None, None
    if found.verdict is not None:
        words = VerdictText(kind=found.verdict.kind, text=found.verdict.text)
    if found.conformal_set is not None and options.coverage is not None:
        hits = [_hit(served, hit, found.calibrated) for hit in found.conformal_set]
        whole = ConformalSet(coverage=options.coverage, complete=not found.conformal_set_cut, hits=hits)
    return Answer(
        query=found.query,
        kind=asked.kind,
        distance=found.distance,
        target=found.target,
        calibrated=found.calibrated,
        total_variance=found.uncertainty,
        expected_matches=found.expected_matches,
        nothing_probability=found.nothing_probability,
        hidden=found.hidden,
        verdict=words,
        note=found.note,
        abstained=found.abstained,
        hits=[_hit(served, hit, found.calibrated) for hit in found],
        conformal_set=whole,
    )


def search_together(
    searches: Sequence[Search],
    served_of: Callable[[GalleryName], ServedGallery],
    unfamiliar_of: Callable[[Sequence[str]], list[bool]],
) -> list[Answer | Exception]:
    """Answer the searches of several requests; those with the same options are searched at once."""
    alike: dict[tuple[str, int], list[int]] = {}
    for i, one in enumerate(searches):
        alike.setdefault((one.options.model_dump_json(exclude={"queries"}), one.max_set), []).append(i)
    results: dict[int, Answer | Exception] = {}
    for places in alike.values():
        options, some = searches[places[0]].options, [searches[i] for i in places]
        queries = GaussianEmbedding.cat([one.query for one in some])
        try:
            served, asked = served_of(options.gallery), [one.asked for one in some]
            # Other kinds of queries have the text "", which has no word.
            judged = unfamiliar_of([" ".join(one.query.wanted) for one in asked])
            most = searches[places[0]].max_set
            answers = answered(served, asked, queries, options, max_set=most, unfamiliar=judged)
            results |= dict(zip(places, answers, strict=True))
        except Exception as error:
            results |= dict.fromkeys(places, error)
    return [results[i] for i in range(len(searches))]


def check_payloads(payloads: Iterable[Mapping[str, str]], max_bytes: int, number: str = "max_results") -> None:
    """Refuse a response that would be large by its payloads; the number of its items is limited before."""
    total = 0
    for payload in payloads:
        total += sum(len(name) + len(value) for name, value in payload.items())
        if total > max_bytes:
            reason = f"the payloads of the response have more than {max_bytes} bytes; ask for fewer items"
            raise Refusal(422, f"Too large: {reason}", errors=[(number, reason)])


def info_of(served: ServedGallery) -> GalleryInfo:
    """Describe a gallery."""
    some, scorer = served.gallery.sample(N_LOOKED_AT), served.gallery.scorer
    return GalleryInfo(
        n=0,
        writable=served.writable is not None,
        pictures=served.images is not None,
        calibrated=served.gallery.calibrated,
        risks=[r for r in RISKS if _can_guarantee(partial(scorer.check_risk, r))],
        coverages=[c for c in COVERAGES if _can_guarantee(partial(scorer.radius, c))],
        fields=sorted({name for payload in some.payloads for name in handed_out(payload)}),
    )


def calibrated_probability(served: ServedGallery) -> float | None:
    """Mean probability of the first hits of held-out queries; None in a gallery of another size, within 25 %."""
    fit, size = served.gallery.scorer.of_hits, served.gallery.size
    if fit is None or not served.gallery.calibrated or not size or abs(math.log2(size / fit.scores.n_gallery)) > NEAR:
        return None
    if fit.hits is not None:
        return float(torch.from_numpy(-fit.hits.nearest).double().sigmoid().mean())
    return float(fit.probability(fit.scores.nearest, n_gallery=fit.scores.n_gallery).double().mean())


def image_path(served: ServedGallery, id: str, payload: Mapping[str, str]) -> str | None:
    """Path of the image of an item at this service."""
    known = served.images is not None and served.images.has(id, payload)
    return f"/v1/pictures/{quote(id)}" if known else None


def item_path(id: str, gallery: GalleryName) -> str:
    """Path of an item at this service."""
    return f"/v1/items/{quote(id)}" + (f"?gallery={gallery}" if gallery != "images" else "")


def _hit(served: ServedGallery, hit: Hit, calibrated: bool) -> ResultRecord:
    return ResultRecord(
        id=hit.id,
        rank=hit.rank,
        distance=hit.distance,
        match_probability=hit.match_probability if calibrated else None,
        total_variance=hit.uncertainty,
        payload=handed_out(hit.payload),
        picture=image_path(served, hit.id, hit.payload),
        best_text=hit.best_text,
        duplicates=list(hit.duplicates),
    )


_N_ASKED, _UNSURE = 10, (0.1, 0.9)
"""Hits of an answer that people are asked about, and the probabilities between which a verdict tells most."""


def with_questions(answer: Answer) -> Answer:
    """An answer with the hits that people should judge, drawn with known probabilities."""
    known = answer.verdict is not None and answer.verdict.kind != "unfamiliar"
    ranked = [ShownHit(answer.query, hit.id, hit.rank, hit.match_probability) for hit in answer.hits]
    unsure = [one for one in ranked if known and _UNSURE[0] <= (one.probability or 0) <= _UNSURE[1]]
    drawn = {one.id: Drawn(why=one.why, weight=one.weight) for one in sample_hits(unsure, _N_ASKED)}
    return answer.model_copy(
        update={"hits": [hit.model_copy(update={"to_judge": drawn.get(hit.id)}) for hit in answer.hits]}
    )


def _can_guarantee(guarantee: Callable[[], object]) -> bool:
    try:
        return guarantee() != float("inf")
    except ValueError:
        return False


@dataclass(frozen=True)
class VectorSide:
    """The vectors of one modality."""

    modality: Modality  # what they are embeddings of
    channels: int | None  # c numbers of a vector; None if the model cannot be searched by one
    reads: bool = False
    normalize: bool = False  # whether means are scaled to unit length, as the model does
    reason: str = ""  # why the model cannot be searched by one; "" if it can

    def error(self, vector: np.ndarray) -> str:
        """What is wrong with a vector. vector (k,)."""
        if len(vector) != self.channels:
            what = "an image" if self.modality == "image" else "a text"
            return f"has {len(vector)} numbers, expected the {self.channels} of an embedding of {what}"
        if len(bad := np.flatnonzero(~np.isfinite(vector))):
            return f"number {bad[0]} (from 0) is {vector[bad[0]]} in float32, expected finite numbers"
        if not vector.any():
            return "holds zeros alone, which have no direction; expected a number other than 0"
        length = float(np.linalg.norm(vector.astype(np.float64)))
        if not 1e-12 <= length <= 1e18:  # Within which float32 can scale it to unit length.
            return f"has the Euclidean length {length:.3g}, expected 1e-12 to 1e+18"
        return ""

    def points(self, vectors: Sequence[np.ndarray]) -> GaussianEmbedding:
        """Vectors as embeddings in the space of the gallery. Returns (n, d)."""
        mean = torch.from_numpy(np.stack(vectors))
        return GaussianEmbedding.point(torch.nn.functional.normalize(mean, dim=1) if self.normalize else mean)


def vector_sides(model: DualEncoder, d: int) -> dict[Modality, VectorSide]:
    """The vectors that a model can be searched by."""
    towers = zip(get_args(Modality), (model.text, model.image), strict=True)
    return {name: _side(tower, name, d) for name, tower in towers}


def _side(tower: Tower, modality: Modality, d: int) -> VectorSide:
    head = tower.head
    if isinstance(tower.processor, EmbeddingProcessor):
        return VectorSide(modality, tower.processor.channels, reads=True)
    if head.log_var is None and head.offset is None and head.dim == d:
        return VectorSide(modality, d, normalize=head.normalize)
    more = "with a variance, which a vector has not" if head.log_var is not None else "as more than one vector"
    reason = f"this model embeds each {modality} {more}; search by the {modality} itself, or by an item"
    return VectorSide(modality, None, reason=reason)
