"""The service behind its routes: its start and end, its state, and its items and images.

Reads continue during a write.
"""

import asyncio
import base64
import io
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sfumato import __version__
from sfumato.arrays import set_threads, sigmoid
from sfumato.calibration.query_scores import NEAR
from sfumato.data.images import handed_out
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.candidates import GalleryRecords
from sfumato.search.stores.protocol import StoreBase
from sfumato.serve.decoding import Task, Threads, message_of
from sfumato.serve.embedding import Embedder
from sfumato.serve.monitoring import Metrics, StoreHealth
from sfumato.serve.problems import Refusal, wrong
from sfumato.serve.schemas import GalleryInfo, Info, Item, ItemList, Limits
from sfumato.serve.searching import Searches, check_payloads, image_path
from sfumato.serve.settings import GalleryName, Rights, ServedGallery, Settings, Sources

_LOG = logging.getLogger("sfumato.serve")

RISKS, COVERAGES = (0.5, 0.3, 0.2, 0.1, 0.05), (0.5, 0.8, 0.9, 0.95)
"""Usual values. The service reports which of them the calibration can guarantee."""

N_LOOKED_AT = 200
"""Items that stand for a gallery, for the fields that it has."""


class Service:
    """The state and the operations behind the routes of `create_app`."""

    def __init__(self, sources: Sources, settings: Settings) -> None:
        self.sources, self.settings, self.metrics = sources, settings, Metrics()
        self.ready = asyncio.Event()
        self.failed: str | None = None
        self.draining = False  # It was asked to stop, and answers what still comes for a while.
        self.threads = Threads(settings.workers, "search", partial(set_threads, settings.threads))
        self.embedder = Embedder(sources, settings, self.metrics)
        self.searches = Searches(sources, self.metrics, self.embedder, self.threads)
        self._infos: dict[GalleryName, tuple[int, Mapping[str, Any], GalleryInfo]] = {}
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
        self.searches.waiting.start()
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
        await self.searches.waiting.close()
        await asyncio.get_running_loop().run_in_executor(None, self.threads.pool.shutdown)
        self.sources.close()

    async def image(self, id: str, size: int | None) -> tuple[bytes, str]:
        """The image of an item. Returns (bytes, media type)."""

        def read() -> bytes:
            served = self.sources.gallery("images")
            data: bytes | None = None
            for _ in range(2):  # The image may be replaced between reading the record and the file.
                found = self._items(served, [id])
                if data is None and served.images and found.ids:
                    data = served.images.read(id, found.payloads[0])
            if data is None:
                raise Refusal(404, "There is no such item, or it has no image")
            return data

        data = await self.threads.run(read)
        try:
            options = {"size": size, "copied": self.settings.no_metadata}
            answer, smaller = await self.embedder.decoders.run(Task("shown", options, message_of), data)
        except ValueError as error:
            raise Refusal(404, f"The image of this item can no longer be shown: it {error}") from error
        return smaller or data, str(answer["type"])

    async def file(self, id: str) -> Path | None:
        """The file of an item as it lies on the disk, if it has one of its own and files are given out."""
        served = self.sources.gallery("images")
        found = await self.threads.run(self._items, served, [id])
        if self.settings.no_metadata or served.images is None or not found.ids:
            return None
        return await self.threads.run(served.images.path, id, found.payloads[0])

    async def item(self, id: str, gallery: GalleryName) -> Item:
        """An item by id."""
        served = self.sources.gallery(gallery)
        items = await self.threads.run(self._items, served, [id])
        if not items.ids:
            raise Refusal(404, f"There is no item {id!r} among the {gallery}")
        return _as_items(served, items)[0]

    async def items(self, gallery: GalleryName, cursor: str | None, limit: int) -> ItemList:
        """Items in the order of their ids."""
        served, after = self.sources.gallery(gallery), "" if cursor is None else _id_of(cursor)

        def read() -> ItemList:
            ids = served.gallery.ids_after(after, limit + 1)
            more = len(ids) > limit
            items = served.gallery.get(ids[:limit])
            check_payloads(items.payloads, self.settings.max_response_bytes, "limit")
            after_these = base64.urlsafe_b64encode(ids[limit - 1].encode()).decode().rstrip("=") if more else None
            return ItemList(gallery=gallery, items=_as_items(served, items), next_cursor=after_these)

        return await self.threads.run(read)

    async def info(self, rights: Rights) -> Info:
        """Describe the service."""
        return Info(
            version=__version__,
            model=self.sources.name,
            distance=self.sources.distance,
            dimensions=self.sources.d,
            query_kinds=self.embedder.kinds(),
            rights=rights,
            galleries={name: await self.threads.run(self._info_of, name, rights) for name in self.sources.galleries},
            judgements=self.settings.judgements is not None and rights == "write",
            limits=Limits(**{name: getattr(self.settings, name) for name in Limits.model_fields}),
        )

    async def measured(self) -> bytes:
        """The metrics of the service."""
        galleries = self.sources.galleries if self.ready.is_set() else {}  # Nothing here may wait for a store.
        images = self.embedder.decoding + len(self.embedder.images)
        values: dict[str, Mapping[str, float | None]] = {
            "waiting": {"text": len(self.embedder.texts), "image": images, "search": len(self.searches.waiting)},
            "items": {name: served.gallery.size for name, served in galleries.items()},
            "store_up": {name: not health.problem for name, health in self._stores.items()},
            "calibrated_probability": {name: calibrated_probability(one) for name, one in galleries.items()},
        }
        return self.metrics.text(values, self.ready.is_set() and not self.store_problem)

    def changed(self, served: ServedGallery, items: int) -> None:
        """Record a write to a gallery."""
        served.version += 1
        served.written += items

    def _info_of(self, name: GalleryName, rights: Rights) -> GalleryInfo:
        served = self.sources.gallery(name)
        served.gallery.follow()
        kept, settings = self._infos.get(name), served.gallery.metadata  # Another object whenever they have changed.
        if kept is None or kept[0] != served.version or kept[1] is not settings:
            self._infos[name] = kept = served.version, settings, info_of(served)
        info = kept[2]
        return info.model_copy(update={"n": served.gallery.size, "writable": info.writable and rights == "write"})

    @staticmethod
    def _items(served: ServedGallery, ids: list[str]) -> GalleryRecords:
        return served.gallery.get([i for i in ids if 0 < len(i) <= 512 and "\0" not in i])

    async def _warm_up(self) -> None:
        """Embed one text and one image and make one search; then the service is ready."""
        file = io.BytesIO()
        Image.new("RGB", (64, 64), "white").save(file, "PNG")
        try:
            model = self.sources.model
            for health in self._stores.values():
                await self.threads.run(health.start)
            queries = await self.embedder.embed_images([model.image.processor.blank() or file.getvalue()], ["image"])
            queries += await self.embedder.embed_texts([model.text.processor.blank() or "ready"], ["text"])
            rows = GaussianEmbedding.cat(queries)
            for served in self.sources.galleries.values():
                await self.threads.run(served.gallery.search, rows, 1)
                await self.threads.run(served.gallery.expected_matches, rows)
            self.ready.set()
        except Exception as error:
            self.failed = str(error) or type(error).__name__
            _LOG.exception("warming up failed: the service will not become ready")


def _as_items(served: ServedGallery, items: GalleryRecords) -> list[Item]:
    rows = zip(items.ids, items.embeddings.total_variance.tolist(), items.payloads, strict=True)
    return [Item(id=i, total_variance=u, payload=handed_out(p), picture=image_path(served, i, p)) for i, u, p in rows]


def _id_of(cursor: str) -> str:
    """The id in a cursor."""
    try:
        id = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        id = ""
    if not id or "\0" in id:
        reason = "is no cursor of this service; send the next_cursor of an answer, or none to begin"
        raise wrong(("query.cursor", reason))
    return id


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
        return float(sigmoid(-fit.hits.nearest.astype(np.float64)).mean())
    return float(fit.probability(fit.scores.nearest, n_gallery=fit.scores.n_gallery).mean())


def _can_guarantee(guarantee: Callable[[], object]) -> bool:
    try:
        return guarantee() != float("inf")
    except ValueError:
        return False
