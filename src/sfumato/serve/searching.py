"""Searches of requests: what is asked is read, embedded and searched by, and the library's answers become responses."""

import base64
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import numpy as np

from sfumato.data.images import handed_out
from sfumato.errors import UserError
from sfumato.evaluation.judgements import ShownHit, sample_hits
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.answer import NATIVE, GuaranteeError, Hit, QueryInfo, SearchOptions, TextQuery, check_native
from sfumato.search.answer import Answer as Found
from sfumato.search.searcher import combined, with_facts
from sfumato.serve import schemas
from sfumato.serve.decoding import Threads
from sfumato.serve.embedding import Batcher, Embedder
from sfumato.serve.monitoring import Metrics
from sfumato.serve.problems import Refusal, wrong
from sfumato.serve.schemas import Answer, Drawn, Modality, Query, QueryKind, SearchFields
from sfumato.serve.settings import GalleryName, ServedGallery, Sources


@dataclass(frozen=True, eq=False)
class Asked:
    """A query as it was read."""

    kind: QueryKind  # what the query is; of a vector, its modality
    name: str  # name of the query in the answer: the text, the name of the image file or of the vector, or the id
    where: str  # its location in the request, e.g. "body.queries.0.text"
    text: TextQuery | None = None  # the text, for kind "text"
    image: bytes = b""  # the bytes of the image file, for kind "image"
    vector: np.ndarray | None = None  # (c,) float32 numbers, for a vector of kind "text" or "image"

    def is_native(self, served: ServedGallery) -> bool:
        """Whether the calibration of a gallery was fitted on such queries."""
        return self.kind == NATIVE[served.gallery.scorer.direction] and (self.text is None or self.text.is_one)


def asked_by(query: Query, i: int) -> Asked:
    """The query of a request by its number."""
    where = f"body.queries.{i}"
    if query.text is not None:
        return asked_text(query.text, query.also, query.without, f"{where}.text")
    if query.id is not None:
        return Asked("id", query.id, f"{where}.id")
    if query.vector is not None:
        with np.errstate(over="ignore"):  # What float32 cannot hold is refused as infinite.
            vector = np.asarray(query.vector, np.float32)
        return Asked(query.modality, query.name or f"vector {i + 1}", f"{where}.vector", vector=vector)
    image = decoded(query.image or "", f"{where}.image")
    return Asked("image", query.name or f"image {i + 1}", f"{where}.image", image=image)


def asked_text(text: str, also: Sequence[str], without: Sequence[str], where: str) -> Asked:
    """A query by text."""
    try:
        query = TextQuery(text, tuple(also), tuple(without))
    except UserError as error:
        raise wrong((where, str(error))) from error
    return Asked("text", query.name, where, query)


def decoded(text: str, where: str) -> bytes:
    """The bytes of an image in base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise wrong((where, f"not base64: {error}")) from error


@dataclass(frozen=True, eq=False)
class _Search:
    """An embedded query and how to search by it."""

    asked: Asked
    query: GaussianEmbedding  # (1, d) its embedding
    how: tuple[GalleryName, int, SearchOptions]  # gallery, number of hits, options


class Searches:
    """Answers queries; those of several requests with the same options are searched at once."""

    def __init__(self, sources: Sources, metrics: Metrics, embedder: Embedder, threads: Threads) -> None:
        self.sources, self.metrics = sources, metrics
        self.settings = settings = embedder.settings
        self._embedder, self._threads = embedder, threads
        self.waiting: Batcher[_Search, Answer] = Batcher(
            self._search, threads.pool, size=settings.batch_size, window=0.0, workers=settings.workers,
            waiting=settings.max_requests * settings.max_batch, observe=metrics.batch.labels("search").observe,
        )  # fmt: skip

    async def search(self, asked: Sequence[Asked], wanted: SearchFields) -> schemas.SearchResponse:
        """Search by queries."""
        served, limits = self.sources.gallery(wanted.gallery), self.settings
        if len(asked) > limits.max_batch:
            reason = f"{len(asked)} queries are more than the limit of {limits.max_batch}; send fewer at a time"
            raise Refusal(422, reason)
        k = wanted.max_results
        if "max_results" not in wanted.model_fields_set:
            k = min(k, limits.max_results)
        if k > limits.max_results:
            raise wrong(("max_results", f"{k} is more than the limit of {limits.max_results}; ask for fewer"))
        options = wanted.of_search(self._max_set(len(asked), k))
        if not options.max_risk is options.coverage is options.min_probability is None:
            await self._threads.run(_refuse_guarantees, served, asked, options)
        if served.gallery.texts is not None:
            asked = await self._threads.run(_with_facts, served, asked, options)
        how = wanted.gallery, k, options
        with self._embedder.asking.taken(1):
            rows = await self._embedded(asked, served)
            found = await self.waiting.submit([_Search(a, row, how) for a, row in zip(asked, rows, strict=True)])
        if failed := [one for one in found if isinstance(one, BaseException)]:
            raise failed[0]
        answers = [one for one in found if not isinstance(one, BaseException)]
        sets = [one.conformal_set.hits for one in answers if one.conformal_set is not None]
        hits = itertools.chain.from_iterable([*(one.hits for one in answers), *sets])
        check_payloads((hit.payload for hit in hits), limits.max_response_bytes)
        return schemas.SearchResponse(gallery=wanted.gallery, answers=answers)

    def _max_set(self, n: int, k: int) -> int:
        """Largest conformal set of each of n queries, so that the response stays within its number of items."""
        most, left = self.settings.max_records, self.settings.max_records - n * k
        if left < 0:
            reason = f"{n} queries with {k} results each are more than the limit of {most} in all; send fewer at a time"
            raise wrong(("max_results", reason))
        return min(self.settings.max_results, max(1, left // n))

    async def _embedded(self, asked: Sequence[Asked], served: ServedGallery) -> list[GaussianEmbedding]:
        """(1, d) embedding of each query."""
        embedder, rows = self._embedder, dict[int, GaussianEmbedding]()
        ids = [i for i, one in enumerate(asked) if one.kind == "id"]
        images = [i for i, one in enumerate(asked) if one.kind == "image" and one.vector is None]
        texts = [(i, one.text) for i, one in enumerate(asked) if one.text is not None]
        if ids:
            items = await self._threads.run(served.gallery.get, list(dict.fromkeys(asked[i].name for i in ids)))
            if missing := [asked[i] for i in ids if asked[i].name not in items.ids]:
                told = f"There is no item {missing[0].name!r} to search by"
                raise Refusal(404, told, errors=[(one.where, "no such item") for one in missing])
            place = {one: j for j, one in enumerate(items.ids)}
            rows |= {i: items.embeddings[place[asked[i].name] : place[asked[i].name] + 1] for i in ids}
        if images:
            files, where = [asked[i].image for i in images], [asked[i].where for i in images]
            async with embedder.checked_images(files, where):
                rows |= dict(zip(images, await embedder.embed_images(files, where), strict=True))
        if texts:
            embedder.refuse_features("text", [asked[i].where for i, _ in texts])
            where = [asked[i].where for i, text in texts for _ in text.parts]
            parts = await embedder.embed_texts([part for _, text in texts for part in text.parts], where)
            whole = combined([text for _, text in texts], GaussianEmbedding.cat(parts))
            rows |= {i: whole[j : j + 1] for j, (i, _) in enumerate(texts)}
        vectors: dict[int, tuple[Modality, np.ndarray, str]] = {
            i: ("image" if one.kind == "image" else "text", one.vector, one.where)
            for i, one in enumerate(asked)
            if one.vector is not None
        }
        if vectors:
            rows |= dict(zip(vectors, await embedder.embed_vectors(list(vectors.values())), strict=True))
        return [rows[i].numpy().to(np.float32) for i in range(len(asked))]

    def _search(self, searches: list[_Search]) -> list[Answer]:
        """The answers to searches of several requests, in a thread."""
        answers: dict[int, Answer] = {}
        while left := [i for i in range(len(searches)) if i not in answers]:
            how = searches[left[0]].how
            places = [i for i in left if searches[i].how == how]
            answers |= dict(zip(places, self._alike([searches[i] for i in places], *how), strict=True))
        return [answers[i] for i in range(len(searches))]

    def _alike(self, searches: Sequence[_Search], gallery: GalleryName, k: int, options: SearchOptions) -> list[Answer]:
        """The answers to searches with the same options."""
        searcher, served = self.sources.searcher(gallery), self.sources.galleries[gallery]
        asked = [one.asked for one in searches]
        known = iter(searcher.about([one.text for one in asked if one.text is not None]))
        about = [
            QueryInfo(one.name, native=one.is_native(served)) if one.text is None else next(known) for one in asked
        ]
        found = served.gallery.search(GaussianEmbedding.cat([one.query for one in searches]), k, options, about)
        answers = []
        for one, answer in zip(asked, found, strict=True):
            self._count(gallery, options, answer)
            asks = one.text is not None and answer.target == "fits" and self.settings.judgements is not None
            answers.append(_answer(served, options, one.kind, answer, drawn_hits(answer) if asks else {}))
        return answers

    def _count(self, gallery: GalleryName, options: SearchOptions, answer: Found) -> None:
        """Count an abstention, and what is said of a first hit among all items."""
        if answer.abstained is not None:
            self.metrics.abstentions.labels(gallery, "yes" if answer.abstained else "no").inc()
        by_probability = answer.target == "listed" or options.order == "fits"
        whole = options.min_probability is None and options.filter is None
        if answer.calibrated and answer.hits and by_probability and whole:
            self.metrics.first_hits.labels(gallery, answer.target).observe(answer.hits[0].match_probability)


def _with_facts(served: ServedGallery, asked: Sequence[Asked], options: SearchOptions) -> list[Asked]:
    texts = (one.text and with_facts(one.text, served.gallery, options) for one in asked)
    return [replace(one, text=text) for one, text in zip(asked, texts, strict=True)]


def _refuse_guarantees(served: ServedGallery, asked: Sequence[Asked], options: SearchOptions) -> None:
    """Refuse guarantees that the calibration cannot give; other errors of a search are internal errors."""
    served.gallery.follow()
    scorer = served.gallery.scorer
    given = {"abstain": options.max_risk, "coverage": options.coverage, "min_probability": options.min_probability}
    try:
        check_native(given, scorer.direction, [one.is_native(served) for one in asked])
        if options.min_probability is not None and not served.gallery.calibrated:
            raise GuaranteeError("min_probability", "needs a calibration, and this gallery has none", "leave it out")
        options.check(scorer.direction, [])
        if options.coverage is not None:
            scorer.radius(options.coverage)
        if options.max_risk is not None:
            scorer.check_risk(options.max_risk)
    except GuaranteeError as error:
        raise Refusal(422, str(error), errors=[(error.option, error.reason)]) from error
    except ValueError as error:
        raise Refusal(422, str(error)) from error


_N_ASKED, _UNSURE = 10, (0.1, 0.9)
"""Hits of an answer that people are asked about, and the probabilities between which a verdict tells most."""


def drawn_hits(answer: Found) -> dict[str, Drawn]:
    """The hits that people should judge, by id, drawn with known probabilities."""
    if answer.verdict is None or answer.verdict.kind == "unfamiliar" or not answer.calibrated:
        return {}
    ranked = [ShownHit(answer.query, hit.id, hit.rank, hit.match_probability) for hit in answer.hits]
    unsure = [one for one in ranked if _UNSURE[0] <= (one.probability or 0) <= _UNSURE[1]]
    return {one.id: Drawn(why=one.why, weight=one.weight) for one in sample_hits(unsure, _N_ASKED)}


_SAME = (
    "query", "distance", "target", "calibrated", "expected_matches", "nothing_probability", "multiplicity", "hidden",
    "verdict", "note", "suggestion", "warning", "abstained",
)  # fmt: skip
"""Fields that an answer of the library and of the service have in common."""


def _answer(
    served: ServedGallery, options: SearchOptions, kind: QueryKind, found: Found, drawn: Mapping[str, Drawn]
) -> Answer:
    whole = None
    if found.conformal_set is not None and options.coverage is not None:
        hits = [_hit(served, hit, found.calibrated) for hit in found.conformal_set]
        whole = schemas.ConformalSet(coverage=options.coverage, complete=not found.conformal_set_cut, hits=hits)
    return Answer(
        **{name: getattr(found, name) for name in _SAME},
        kind=kind,
        total_variance=found.uncertainty,
        hits=[_hit(served, hit, found.calibrated, drawn.get(hit.id)) for hit in found],
        conformal_set=whole,
    )


def _hit(served: ServedGallery, hit: Hit, calibrated: bool, to_judge: Drawn | None = None) -> schemas.ResultRecord:
    return schemas.ResultRecord(
        **{name: getattr(hit, name) for name in ("id", "rank", "distance", "best_text")},
        match_probability=hit.match_probability if calibrated else None,
        total_variance=hit.uncertainty,
        payload=handed_out(hit.payload),
        picture=image_path(served, hit.id, hit.payload),
        to_judge=to_judge,
        duplicates=list(hit.duplicates),
        why=dict(hit.why) if calibrated else {},
    )


def check_payloads(payloads: Iterable[Mapping[str, str]], max_bytes: int, number: str = "max_results") -> None:
    """Refuse a response that would be large by its payloads; the number of its items is limited before."""
    total = 0
    for payload in payloads:
        total += sum(len(name) + len(value) for name, value in payload.items())
        if total > max_bytes:
            reason = f"the payloads of the response have more than {max_bytes} bytes; ask for fewer items"
            raise wrong((number, reason), before="Too large: ")


def image_path(served: ServedGallery, id: str, payload: Mapping[str, str]) -> str | None:
    """Path of the image of an item at this service."""
    known = served.images is not None and served.images.has(id, payload)
    return f"/v1/pictures/{quote(id)}" if known else None
