"""The service behind its routes: searches and look-ups in threads, and refusals of invalid requests.

Reads continue during a write.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image

from sfumato import __version__
from sfumato.data.images import handed_out
from sfumato.data.region_files import regions_to_bytes
from sfumato.encoders.feature_rows import blank_features, features_read
from sfumato.errors import first_line
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.candidates import GalleryRecords
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import Gallery
from sfumato.search.searcher import advice, combined
from sfumato.search.stores.protocol import StoreBase
from sfumato.serve.answering import (
    Asked,
    Search,
    ServedGallery,
    Sources,
    calibrated_probability,
    check_payloads,
    image_path,
    info_of,
    refuse_guarantees,
    search_together,
    vector_sides,
    wanted_filter,
    with_questions,
    without_bytes,
)
from sfumato.serve.embedding import HEADER, Batcher, Closed, Embedder, Task, Threads, message_of, submitted
from sfumato.serve.guard import Budget, Metrics
from sfumato.serve.schemas import (
    Answer,
    GalleryInfo,
    GalleryName,
    Info,
    Item,
    ItemList,
    Limits,
    QueryKinds,
    Refusal,
    SearchOptions,
    SearchResponse,
    busy,
)
from sfumato.serve.settings import Rights, Settings

Done = TypeVar("Done")

_LOG = logging.getLogger("sfumato.serve")


class Service:
    """The state and the operations behind the routes of `create_app`."""

    def __init__(self, sources: Sources, settings: Settings) -> None:
        self.sources, self.settings, self.metrics = sources, settings, Metrics()
        self.vector_sides = vector_sides(sources.model, sources.d)
        self.embedder = Embedder(sources.model, settings, self.metrics)
        self.pixels = Budget(settings.pixel_budget, "images to decode")
        self.ready = asyncio.Event()
        self.failed: str | None = None
        self.draining = False  # It was asked to stop, and answers what still comes for a while.
        self._threads = Threads(settings.workers, "search", partial(torch.set_num_threads, settings.threads))
        self.searches: Batcher[Search, Answer] = Batcher(
            self._search, self._threads.pool, size=settings.batch_size, window=0.0, workers=settings.workers,
            waiting=settings.max_requests * settings.max_batch, observe=self.metrics.batch("search"),
        )  # fmt: skip
        self._infos: dict[GalleryName, tuple[int, GalleryInfo]] = {}
        self._warming: asyncio.Task[None] | None = None
        collections = {name: served.writable for name, served in sources.galleries.items()}
        for collection in collections.values():
            if collection is not None and isinstance(collection.store, StoreBase):
                collection.store.waits_for_index = False  # Writes would wait, too.
        self._stores = {name: StoreHealth(name, one) for name, one in collections.items() if one is not None}

    @property
    def store_problem(self) -> str:
        """Why a store cannot be used now; "" if all stores answer."""
        return next((health.problem for health in self._stores.values() if health.problem), "")

    async def start(self) -> None:
        """Start the queues; warming up continues in the background."""
        self.embedder.start()
        self.searches.start()
        self._warming = asyncio.get_running_loop().create_task(self._warm_up())

    async def warmed(self) -> None:
        """Wait until the service is ready, or `failed` says why it will not be."""
        if self._warming is not None:
            await asyncio.wait([self._warming])

    async def stop(self) -> None:
        """Stop the queues and close the stores."""
        self.ready.clear()
        if self._warming is not None:
            self._warming.cancel()
        for health in self._stores.values():
            health.stop()
        await self.embedder.close()
        await self.searches.close()
        await asyncio.get_running_loop().run_in_executor(None, self._threads.pool.shutdown)
        self.sources.close()

    async def in_thread(self, work: Callable[..., Done], *arguments: object) -> Done:
        """Run work in a thread beside the event loop; it continues if the caller stops waiting."""
        return await self._threads.run(work, *arguments)

    def gallery(self, name: GalleryName) -> ServedGallery:
        """A gallery by name."""
        if name not in self.sources.galleries:
            raise Refusal(404, f"This service has no gallery of {name}; it has {', '.join(self.sources.galleries)}")
        return self.sources.galleries[name]

    async def search(self, asked: Sequence[Asked], options: SearchOptions) -> SearchResponse:
        """Search by queries."""
        served, limits = self.gallery(options.gallery), self.settings
        if len(asked) > limits.max_batch:
            raise Refusal(
                422, f"{len(asked)} queries are more than the limit of {limits.max_batch}; send fewer at a time"
            )
        if "max_results" not in options.model_fields_set:
            options = options.model_copy(update={"max_results": min(options.max_results, limits.max_results)})
        if options.max_results > limits.max_results:
            reason = f"{options.max_results} is more than the limit of {limits.max_results}; ask for fewer"
            raise Refusal(422, f"max_results: {reason}", errors=[("max_results", reason)])
        max_set = self._max_set(len(asked), options)
        if not options.abstain is options.coverage is options.min_probability is None:
            await self.in_thread(refuse_guarantees, served.gallery, asked, options)
        rows = await self._embedded(asked, served.gallery)
        searches = [Search(without_bytes(one), row, options, max_set) for one, row in zip(asked, rows, strict=True)]
        found = await submitted(self.searches, searches)
        answers = []
        for one in found:
            if isinstance(one, BaseException):
                raise one
            answers.append(one)
        sets = [one.conformal_set.hits for one in answers if one.conformal_set is not None]
        hits = itertools.chain.from_iterable([*(one.hits for one in answers), *sets])
        check_payloads((hit.payload for hit in hits), limits.max_response_bytes)
        return SearchResponse(gallery=options.gallery, answers=answers)

    def _max_set(self, n: int, options: SearchOptions) -> int:
        """Largest conformal set of each of n queries, so that the response stays within its number of items."""
        most, left = self.settings.max_records, self.settings.max_records - n * options.max_results
        if left < 0:
            reason = f"{n} queries with {options.max_results} results each are more than the limit of {most} in all"
            raise Refusal(422, f"max_results: {reason}; send fewer at a time", errors=[("max_results", reason)])
        return min(self.settings.max_results, max(1, left // n))

    def refuse_features(self, side: Literal["image", "text"], where: Sequence[str]) -> None:
        """Refuse the images or texts of a request if the model reads features instead of them."""
        model = self.sources.model
        features = features_read(model.image if side == "image" else model.text)
        if where and features:
            kinds = self.query_kinds()
            ways = " or ".join(way for way, there in (("by text", kinds.text), ("by vector", kinds.vector)) if there)
            ways = f"{ways} or by item".removeprefix(" or ")
            reason = f"{where[0]}: the model of this service reads {features}, not {side}s; search {ways}"
            raise Refusal(422, reason, errors=[(where[0], reason)])

    @contextlib.asynccontextmanager
    async def checked_images(self, images: Sequence[tuple[str, bytes]]) -> AsyncIterator[None]:
        """Check the image files of a request by their headers, and take their pixels from the budget of all requests.

        images (location in the request, bytes).
        """
        self.refuse_features("image", [where for where, _ in images])
        for where, data in images:
            if len(data) > (most := self.settings.max_upload_bytes):
                raise Refusal(413, f"{where}: {len(data)} bytes are more than the limit of {most}")
        headers = await self.embedder.decoders.all(HEADER, [data for _, data in images])
        total, limit = 0, self.settings.max_pixels
        for (where, _), found in zip(images, headers, strict=True):
            if isinstance(found, ValueError):
                raise Refusal(422, f"{where}: {found}", errors=[(where, str(found))])
            if isinstance(found, BaseException):
                raise found
            width, height = found[0]["width"], found[0]["height"]
            total += width * height
            if width * height > limit:
                reason = f"{width} x {height} are more pixels than the limit of {limit}; send a smaller copy"
                raise Refusal(413, f"{where}: {reason}")
            if total > limit:
                raise Refusal(
                    413,
                    f"{where}: with this image the request has {total} pixels, more than the limit of {limit} for all"
                    " images of a request; send fewer at a time, or smaller copies",
                )
        with self.pixels.taken(total):
            yield

    async def image(self, id: str, size: int | None) -> tuple[bytes, str]:
        """The image of an item. Returns (bytes, media type)."""

        def read() -> bytes:
            served = self.gallery("images")
            data: bytes | None = None
            for _ in range(2):  # The image may be replaced between reading the record and the file.
                found = self._items(served, [id])
                if data is None and served.images and found.ids:
                    data = served.images.read(id, found.payloads[0])
            if data is None:
                raise Refusal(404, "There is no such item, or it has no image")
            return data

        data = await self.in_thread(read)
        try:
            answer, smaller = await self.embedder.decoders.run(Task("shown", {"size": size}, message_of), data)
        except ValueError as error:
            raise Refusal(404, f"The image of this item can no longer be shown: it {error}") from error
        return smaller or data, str(answer["type"])

    async def item(self, id: str, gallery: GalleryName) -> Item:
        """An item by id."""
        served = self.gallery(gallery)
        items = await self.in_thread(self._items, served, [id])
        if not items.ids:
            raise Refusal(404, f"There is no item {id!r} among the {gallery}")
        (item,) = _as_items(served, items)
        return item

    async def items(self, gallery: GalleryName, cursor: str | None, limit: int) -> ItemList:
        """Items in the order of their ids."""
        served, after = self.gallery(gallery), "" if cursor is None else _id_of(cursor)

        def read() -> ItemList:
            ids = served.gallery.ids_after(after, limit + 1)
            more = len(ids) > limit
            items = served.gallery.get(ids[:limit])
            check_payloads(items.payloads, self.settings.max_response_bytes, "limit")
            return ItemList(
                gallery=gallery,
                items=_as_items(served, items),
                next_cursor=_cursor_of(ids[limit - 1]) if more else None,
            )

        return await self.in_thread(read)

    def query_kinds(self) -> QueryKinds:
        """The kinds of queries that the model can answer."""
        model, sides = self.sources.model, self.vector_sides
        return QueryKinds(
            text=not features_read(model.text),
            image=not features_read(model.image),
            id=True,
            vector={name: side.channels for name, side in sides.items() if side.channels is not None},
        )

    async def info(self, rights: Rights) -> Info:
        """Describe the service."""
        return Info(
            version=__version__,
            model=self.sources.name,
            distance=self.sources.distance,
            dimensions=self.sources.d,
            query_kinds=self.query_kinds(),
            rights=rights,
            galleries={name: await self.in_thread(self._info_of, name, rights) for name in self.sources.galleries},
            judgements=self.settings.judgements is not None and rights == "write",
            limits=Limits(**{name: getattr(self.settings, name) for name in Limits.model_fields}),
        )

    async def measured(self) -> bytes:
        """The metrics of the service."""
        galleries = self.sources.galleries if self.ready.is_set() else {}  # Nothing here may wait for a store.
        waiting = {
            "text": len(self.embedder.texts),
            "image": self.embedder.decoding + len(self.embedder.images),
            "search": len(self.searches),
        }
        stores: dict[str, bool] = {name: not health.problem for name, health in self._stores.items()}
        items: dict[str, int] = {name: served.gallery.size for name, served in galleries.items()}
        calibrated: dict[str, float | None]
        calibrated = {name: calibrated_probability(served) for name, served in galleries.items()}
        values: dict[str, Mapping[str, float | None]]
        values = {"waiting": waiting, "items": items, "store_up": stores, "calibrated_probability": calibrated}
        return self.metrics.text(values, self.ready.is_set() and all(stores.values()))

    def changed(self, served: ServedGallery, items: int) -> None:
        """Record a write to a gallery."""
        served.version += 1
        served.written += items

    def _info_of(self, name: GalleryName, rights: Rights) -> GalleryInfo:
        served = self.gallery(name)
        kept = self._infos.get(name)
        if kept is None or kept[0] != served.version:
            self._infos[name] = kept = served.version, info_of(served)
        return kept[1].model_copy(update={"n": served.gallery.size, "writable": kept[1].writable and rights == "write"})

    @staticmethod
    def _items(served: ServedGallery, ids: list[str]) -> GalleryRecords:
        return served.gallery.get([i for i in ids if 0 < len(i) <= 512 and "\0" not in i])

    async def _embedded(self, asked: Sequence[Asked], gallery: Gallery) -> list[GaussianEmbedding]:
        """(1, d) embedding of each query."""
        rows: dict[int, GaussianEmbedding] = {}
        by_kind = {
            k: [i for i, q in enumerate(asked) if q.kind == k and q.vector is None] for k in ("text", "image", "id")
        }
        if ids := by_kind["id"]:
            wanted = list(dict.fromkeys(asked[i].name for i in ids))
            items = await self.in_thread(gallery.get, wanted)
            place = {one: j for j, one in enumerate(items.ids)}
            if missing := [i for i in ids if asked[i].name not in place]:
                raise Refusal(
                    404,
                    f"There is no item {asked[missing[0]].name!r} to search by",
                    errors=[(asked[i].where, "no such item") for i in missing],
                )
            rows |= {i: items.embeddings[place[asked[i].name] : place[asked[i].name] + 1] for i in ids}
        if images := by_kind["image"]:
            async with self.checked_images([(asked[i].where, asked[i].image) for i in images]):
                found = await self.embedder.embed_images([asked[i].image for i in images])
            rows |= dict(zip(images, checked(found, [asked[i].where for i in images]), strict=True))
        if texts := by_kind["text"]:
            self.refuse_features("text", [asked[i].where for i in texts])
            parts = [(asked[i].where, part) for i in texts for part in asked[i].query.parts]
            found = await self.embedder.embed_texts([part for _, part in parts])
            embedded = GaussianEmbedding.cat(checked(found, [where for where, _ in parts]))
            whole = combined([asked[i].query for i in texts], embedded)
            rows |= {i: whole[k : k + 1] for k, i in enumerate(texts)}
        if vectors := [i for i, q in enumerate(asked) if q.vector is not None]:
            rows |= dict(zip(vectors, await self._embedded_vectors([asked[i] for i in vectors]), strict=True))
        return [rows[i].to(torch.float32) for i in range(len(asked))]

    async def _embedded_vectors(self, asked: Sequence[Asked]) -> list[GaussianEmbedding]:
        """(1, d) embedding of each query by vector."""
        values = [np.frombuffer(one.vector or b"", np.float32) for one in asked]
        sides = [self.vector_sides["image" if one.kind == "image" else "text"] for one in asked]
        found = [side.reason or side.error(vector) for side, vector in zip(sides, values, strict=True)]
        if wrong := [(one.where, error) for one, error in zip(asked, found, strict=True) if error]:
            first, error = wrong[0]
            raise Refusal(422, f"{first}: {error}", errors=wrong)
        rows: dict[int, GaussianEmbedding] = {}
        for modality, side in self.vector_sides.items():
            chosen = [i for i, one in enumerate(sides) if one is side]
            if chosen and side.reads:
                files = [regions_to_bytes(values[i].reshape(1, -1)) for i in chosen]
                embed = self.embedder.embed_texts if modality == "text" else self.embedder.embed_images
                rows |= dict(zip(chosen, checked(await embed(files), [asked[i].where for i in chosen]), strict=True))
            elif chosen:
                points = side.points([values[i] for i in chosen])
                rows |= {i: points[k : k + 1] for k, i in enumerate(chosen)}
        for i, one in enumerate(asked):
            if not (rows[i].mean.square().sum() + rows[i].total_variance).isfinite():
                expected = "expected numbers like the model's data"
                reason = f"the embedding of this vector by the model is not finite; {expected}"
                raise Refusal(422, f"{one.where}: {reason}", errors=[(one.where, reason)])
        return [rows[i] for i in range(len(asked))]

    def _search(self, searches: list[Search]) -> list[Answer | Exception]:
        answers = search_together(searches, self.gallery, self.sources.unfamiliar)
        for one, answer in zip(searches, answers, strict=True):
            if isinstance(answer, Answer):
                self._count(one.options, answer)
        return [self._advised(one, answer) for one, answer in zip(searches, answers, strict=True)]

    def _count(self, options: SearchOptions, answer: Answer) -> None:
        """Count an abstention, and what is said of a first hit among all items."""
        if answer.abstained is not None:
            self.metrics.abstention(options.gallery, answer.abstained)
        by_probability = answer.target == "listed" or options.order == "fits"
        first = answer.hits[0].match_probability if answer.calibrated and answer.hits and by_probability else None
        if first is not None and options.min_probability is None and wanted_filter(options) is None:
            self.metrics.first_hit(options.gallery, answer.target, first)

    def _advised(self, search: Search, answer: Answer | Exception) -> Answer | Exception:
        if isinstance(answer, Exception) or not search.asked.text:
            return answer
        gallery = self.gallery(search.options.gallery).gallery
        suggestion, warning = advice(search.asked.query, gallery, self.sources.model)
        answer = answer.model_copy(update={"suggestion": suggestion, "warning": warning})
        asks = answer.target == "fits" and self.settings.judgements is not None
        return with_questions(answer) if asks else answer

    async def _warm_up(self) -> None:
        """Embed one text and one image and make one search; then the service is ready."""
        file = io.BytesIO()
        Image.new("RGB", (64, 64), "white").save(file, "PNG")
        try:
            model = self.sources.model
            for health in self._stores.values():
                await self.in_thread(health.start)
            queries = await self.embedder.embed_images([blank_features(model.image) or file.getvalue()])
            queries += await self.embedder.embed_texts([blank_features(model.text) or "ready"])
            rows = GaussianEmbedding.cat(checked(queries, ["image", "text"]))
            if rows.d != self.sources.d:
                raise ValueError(
                    f"the model has {rows.d} dimensions and the galleries have {self.sources.d}; they were built with"
                    " another model"
                )
            for served in self.sources.galleries.values():
                await self.in_thread(served.gallery.search, rows, 1)
                await self.in_thread(served.gallery.expected_matches, rows)
            self.ready.set()
        except Exception as error:
            self.failed = str(error) or type(error).__name__
            _LOG.exception("warming up failed: the service will not become ready")


def _as_items(served: ServedGallery, items: GalleryRecords) -> list[Item]:
    return [
        Item(id=i, total_variance=u, payload=handed_out(payload), picture=image_path(served, i, payload))
        for i, u, payload in zip(items.ids, items.embeddings.total_variance.tolist(), items.payloads, strict=True)
    ]


def _cursor_of(id: str) -> str:
    return base64.urlsafe_b64encode(id.encode()).decode().rstrip("=")


def _id_of(cursor: str) -> str:
    """The id in a cursor."""
    try:
        id = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        id = ""
    if not id or "\0" in id:
        reason = "is no cursor of this service; send the next_cursor of an answer, or none to begin"
        raise Refusal(422, f"query.cursor: {reason}", errors=[("query.cursor", reason)])
    return id


def checked(found: Sequence[GaussianEmbedding | BaseException], where: Sequence[str]) -> list[GaussianEmbedding]:
    """Check that all embeddings could be computed."""
    if wrong := [(place, error) for place, error in zip(where, found, strict=True) if isinstance(error, BaseException)]:
        for _, error in wrong:
            if isinstance(error, Closed):
                raise busy("The service is shutting down", 5, code="not-ready")
            if not isinstance(error, ValueError | OSError):
                raise error
        first, error = wrong[0]
        raise Refusal(422, f"{first}: {error}", errors=[(place, str(error)) for place, error in wrong])
    return [one for one in found if isinstance(one, GaussianEmbedding)]


class StoreHealth:
    """Reads a record of the store every few seconds, and counts the items."""

    def __init__(self, name: str, collection: GaussianCollection, *, every: float = 5.0, patience: float = 5.0) -> None:
        self._name, self._collection, self._every, self._patience = name, collection, every, patience
        self._asked_at: float | None = None
        self._next_count = 0.0
        self._error = self._count_error = ""
        self._counter = threading.Thread()
        self._stopping = threading.Event()

    @property
    def problem(self) -> str:
        """Why the store cannot be used now; "" if it answers."""
        asked_at = self._asked_at
        if asked_at is not None and (waited := time.monotonic() - asked_at) > self._patience:
            return f"the store of the {self._name} has not answered for {waited:.0f} seconds"
        return f"the store of the {self._name} cannot be read" if self._error else ""

    def start(self) -> None:
        """Count the items, then go on in the background."""
        self._collection.recount()
        self._collection.counts_itself = False
        threading.Thread(target=self._watch, name=f"store of {self._name}", daemon=True).start()

    def stop(self) -> None:
        """End the thread, at once or as soon as the store answers."""
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.wait(self._every):
            error = self._look()
            if not self._stopping.is_set() and bool(error) != bool(self._error):
                if error:
                    _LOG.error("the store of the %s cannot be read: %s", self._name, error)
                else:
                    _LOG.info("the store of the %s answers again", self._name)
            self._error = error

    def _look(self) -> str:
        """Read a record; returns what went wrong, "" if nothing did. Another thread counts: a count may take long."""
        try:
            self._asked_at = time.monotonic()
            next(self._collection.scan(1), None)
        except Exception as error:
            return first_line(error)
        finally:
            self._asked_at = None
        if not self._counter.is_alive() and time.monotonic() >= self._next_count:
            self._counter = threading.Thread(target=self._count, name=threading.current_thread().name, daemon=True)
            self._counter.start()
        return self._count_error

    def _count(self) -> None:
        began = time.monotonic()
        try:
            self._collection.recount()
            self._count_error = ""
        except Exception as error:
            self._count_error = first_line(error)
        ended = time.monotonic()
        self._next_count = ended + 20 * (ended - began)
