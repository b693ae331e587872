"""The service behind its routes: searches and look-ups in threads, and refusals of invalid requests.

Reads continue during a write.
"""

import asyncio
import base64
import io
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from PIL import Image

from sfumato import __version__
from sfumato.data.images import handed_out
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.candidates import GalleryRecords
from sfumato.search.stores.protocol import StoreBase
from sfumato.serve.answering import (
    Search,
    calibrated_probability,
    check_payloads,
    image_path,
    info_of,
    refuse_guarantees,
    search_together,
    with_questions,
)
from sfumato.serve.decoding import Task, Threads, message_of
from sfumato.serve.embedding import Batcher, submitted
from sfumato.serve.health import StoreHealth
from sfumato.serve.metrics import Metrics
from sfumato.serve.problems import Refusal
from sfumato.serve.queries import Asked, Queries, checked
from sfumato.serve.schemas import (
    Answer,
    GalleryInfo,
    GalleryName,
    Info,
    Item,
    ItemList,
    Limits,
    RequestOptions,
    SearchResponse,
)
from sfumato.serve.settings import Rights, Settings
from sfumato.serve.sources import ServedGallery, Sources

Done = TypeVar("Done")

_LOG = logging.getLogger("sfumato.serve")


class Service:
    """The state and the operations behind the routes of `create_app`."""

    def __init__(self, sources: Sources, settings: Settings) -> None:
        self.sources, self.settings, self.metrics = sources, settings, Metrics()
        self.queries = Queries(sources, settings, self.metrics)
        self.embedder = self.queries.embedder
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

    async def search(self, asked: Sequence[Asked], options: RequestOptions) -> SearchResponse:
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
        how = options.of_search(self._max_set(len(asked), options))
        if not options.abstain is options.coverage is options.min_probability is None:
            await self.in_thread(refuse_guarantees, served, asked, options)
        rows = await self.queries.embedded(asked, served.gallery, self.in_thread)
        name, k = options.gallery, options.max_results
        searches = [Search(one.light, row, name, k, how) for one, row in zip(asked, rows, strict=True)]
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

    def _max_set(self, n: int, options: RequestOptions) -> int:
        """Largest conformal set of each of n queries, so that the response stays within its number of items."""
        most, left = self.settings.max_records, self.settings.max_records - n * options.max_results
        if left < 0:
            reason = f"{n} queries with {options.max_results} results each are more than the limit of {most} in all"
            raise Refusal(422, f"max_results: {reason}; send fewer at a time", errors=[("max_results", reason)])
        return min(self.settings.max_results, max(1, left // n))

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

    async def info(self, rights: Rights) -> Info:
        """Describe the service."""
        return Info(
            version=__version__,
            model=self.sources.name,
            distance=self.sources.distance,
            dimensions=self.sources.d,
            query_kinds=self.queries.kinds(),
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

    def _search(self, searches: list[Search]) -> list[Answer | Exception]:
        answers = search_together(searches, self.sources)
        for i, (one, answer) in enumerate(zip(searches, answers, strict=True)):
            if isinstance(answer, Answer):
                self._count(one, answer)
                if one.asked.text and answer.target == "fits" and self.settings.judgements is not None:
                    answers[i] = with_questions(answer)
        return answers

    def _count(self, search: Search, answer: Answer) -> None:
        """Count an abstention, and what is said of a first hit among all items."""
        options = search.options
        if answer.abstained is not None:
            self.metrics.abstention(search.gallery, answer.abstained)
        by_probability = answer.target == "listed" or options.order == "fits"
        first = answer.hits[0].match_probability if answer.calibrated and answer.hits and by_probability else None
        if first is not None and options.min_probability is None and options.filter is None:
            self.metrics.first_hit(search.gallery, answer.target, first)

    async def _warm_up(self) -> None:
        """Embed one text and one image and make one search; then the service is ready."""
        file = io.BytesIO()
        Image.new("RGB", (64, 64), "white").save(file, "PNG")
        try:
            model = self.sources.model
            for health in self._stores.values():
                await self.in_thread(health.start)
            queries = await self.embedder.embed_images([model.image.processor.blank() or file.getvalue()])
            queries += await self.embedder.embed_texts([model.text.processor.blank() or "ready"])
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
