"""Adding and removing of items: all items are checked and embedded before any is stored; writes run one at a time."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sfumato.data.images import POINTER
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.candidates import GalleryRecords
from sfumato.search.collection import GaussianCollection
from sfumato.search.folder import writers_lock
from sfumato.search.stores.protocol import StoreInUseError
from sfumato.serve.decoding import Message, Task, message_of
from sfumato.serve.embedding import usable
from sfumato.serve.problems import Refusal, busy, wrong
from sfumato.serve.schemas import AddRequest, AddResponse, DeleteResponse, NewItem
from sfumato.serve.searching import decoded
from sfumato.serve.service import Service
from sfumato.serve.settings import GalleryName, ServedGallery
from sfumato.workflows.index import remove_items

Done = TypeVar("Done")

_STORED = Task("stored", {}, message_of)
_LONGEST = 2000  # characters of a payload field that an image file names itself
_LOG = logging.getLogger("sfumato.serve")


class Writer:
    """Writes to the galleries of a service, one write at a time."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "write")
        self._going = set[asyncio.Task[Any]]()
        self._optimised = {served: served.written for served in service.sources.galleries.values()}

    async def add(self, wanted: AddRequest) -> AddResponse:
        """Check all items, and store them. When it returns, items and images survive the death of the process."""
        gallery, items, where = wanted.gallery, wanted.items, f"body.items.{{}}.{wanted.gallery.removesuffix('s')}"
        served, collection = self._writable(gallery)
        self._check(gallery, items)
        places = [where.format(i) for i in range(len(items))]
        embedder, files = self.service.embedder, list[tuple[dict[str, str], bytes]]()
        if gallery == "images":
            given = zip([one.image or "" for one in items], places, strict=True)
            images = await self.service.threads.run(lambda: [decoded(image, place) for image, place in given])
            async with embedder.checked_images(images, places):
                rows = await embedder.embed_images(images, places)
                if served.uploads is not None:
                    copies = await embedder.decoders.all(_STORED, images)
                    files = [_as_stored(one) for one in usable(copies, places)]
        else:
            embedder.refuse_features("text", places)
            rows = await embedder.embed_texts([one.text or "" for one in items], places)

        def store() -> tuple[AddResponse, int]:
            collection.begin_writing()
            ids = [one.id for one in items]
            there = collection.get(ids)
            before = _images_in(served, there)
            payloads = [one.payload | ({} if one.text is None else {"text": one.text}) for one in items]
            for id, payload, (fields, file) in zip(ids, payloads, files, strict=False):  # Texts have no files.
                payload |= {name: value for name, value in fields.items() if name not in payload}
                if served.uploads is not None:
                    payload[POINTER] = served.uploads.write(id, file)
            new = {payload[POINTER] for payload in payloads if POINTER in payload}
            # If this fails, the new files stay: the store may have kept the records, and a repetition uses the same
            # names.
            collection.upsert(GaussianEmbedding.cat(rows), ids, payloads=payloads)
            _forget_images(served, before - new)
            created = len(items) - len(there.ids)
            return AddResponse(gallery=gallery, stored=len(items), created=created, n=collection.size), len(items)

        return await self._alone(served, collection, store)

    async def delete(self, gallery: GalleryName, ids: Sequence[str]) -> DeleteResponse:
        """Remove items and their uploaded images."""
        served, collection = self._writable(gallery)

        def remove() -> tuple[DeleteResponse, int]:
            distinct = list(dict.fromkeys(ids))
            images = _images_in(served, collection.get(distinct)) if served.uploads is not None else set[str]()
            removed = remove_items(collection, distinct)
            _forget_images(served, images)
            return DeleteResponse(gallery=gallery, deleted=removed, n=collection.size), removed

        return await self._alone(served, collection, remove)

    async def close(self) -> None:
        """Wait for running writes, then optimise the stores."""
        while self._going:
            await asyncio.wait(self._going)
        for served in self.service.sources.galleries.values():
            await self._optimise(served)
        self._thread.shutdown(wait=False)

    def _writable(self, gallery: GalleryName) -> tuple[ServedGallery, GaussianCollection]:
        served = self.service.sources.gallery(gallery)
        if served.writable is None:
            way = "build a collection with `sfumato index RUN ... --out FOLDER` and serve that"
            raise Refusal(409, f"The gallery of {gallery} is in memory and cannot be changed; {way}", code="index")
        return served, served.writable

    def _check(self, gallery: GalleryName, items: Sequence[NewItem]) -> None:
        most, errors, seen = self.service.settings.max_batch, list[tuple[str, str]](), set[str]()
        if len(items) > most:
            raise Refusal(422, f"{len(items)} items are more than the limit of {most}; send fewer at a time")
        wanted = "image" if gallery == "images" else "text"
        for i, one in enumerate(items):
            where = f"body.items.{i}"
            if (one.image is None) == (wanted == "image"):
                errors.append((where, f"a gallery of {gallery} takes items with {wanted}"))
            if one.id in seen:
                errors.append((f"{where}.id", "occurs twice in this request"))
            if one.text is not None and "text" in one.payload:
                errors.append((f"{where}.payload.text", "is set from the text of the item; leave it out"))
            if hidden := next((name for name in one.payload if name.startswith("_")), ""):
                reason = "is a name that the service reserves, as all that begin with _; choose another"
                errors.append((f"{where}.payload.{hidden}", reason))
            seen.add(one.id)
        if errors:
            raise wrong(*errors, before="Nothing was stored: ")

    async def _alone(
        self, served: ServedGallery, collection: GaussianCollection, work: Callable[[], tuple[Done, int]]
    ) -> Done:
        """Run a write when no other runs. A caller who leaves before it starts cancels it; later it is completed.

        work: returns the response, and the number of written items. It holds a lock that all services of a collection
        share: else one could remove the image of a replaced record that another one has just written anew. A write
        whose caller left while others held the lock is not made: the caller may have written something newer through
        another service meanwhile.
        """
        wanted = True
        shared = os.access(collection.folder, os.W_OK)
        lock = writers_lock(collection.folder, self.service.settings.timeout) if shared else contextlib.nullcontext()

        def among_services() -> tuple[Done, int]:
            with lock:
                if not wanted:  # The caller has gone.
                    raise asyncio.CancelledError
                return work()

        async def locked() -> Done:
            async with self._lock:
                written = 0
                try:
                    response, written = await asyncio.get_running_loop().run_in_executor(self._thread, among_services)
                    return response
                finally:
                    self.service.changed(served, written)
                    if served.written - self._optimised[served] >= (most := self.service.settings.optimise_after):
                        self._begin(self._optimise(served, least=most))

        try:
            return await asyncio.shield(self._begin(locked()))
        except asyncio.CancelledError:
            wanted = False
            raise
        except ValueError as error:
            raise Refusal(422, f"Nothing was stored: {error}") from error
        except StoreInUseError as error:
            _LOG.error("nothing was written: %s", error)
            detail = "Another process writes to this collection: send writes to that one, or end it and try again"
            raise Refusal(409, detail, code="other-writer") from error
        except (UserError, OSError) as error:
            _LOG.error("the store failed: %s", error)
            way = "Send the same request again to complete it; the log of the service has the reason"
            raise busy(f"The store failed. {way}", 5, code="store-failed") from error

    async def _optimise(self, served: ServedGallery, *, least: int = 1) -> None:
        """Optimise the store if enough items were written; during this, writes wait and searches do not."""
        async with self._lock:
            collection, written = served.writable, served.written
            if collection is not None and written - self._optimised[served] >= least:
                self._optimised[served] = written
                try:
                    await asyncio.get_running_loop().run_in_executor(self._thread, collection.optimise)
                except (UserError, OSError) as error:
                    _LOG.error("the store could not be optimised; searches stay correct but slower: %s", error)

    def _begin(self, work: Coroutine[None, None, Done]) -> "asyncio.Task[Done]":
        task = asyncio.get_running_loop().create_task(work)
        self._going.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._going.discard(task)
        if not task.cancelled():
            task.exception()  # Retrieved, so that asyncio does not report it as lost.


def _as_stored(answer: Message) -> tuple[dict[str, str], bytes]:
    """The payload fields that an image file names itself, and the bytes to store."""
    fields = {str(name): str(text)[:_LONGEST].replace("\0", " ") for name, text in answer[0]["fields"].items()}
    return fields, answer[1]


def _images_in(served: ServedGallery, items: GalleryRecords) -> set[str]:
    """Names of the uploaded images of these items."""
    return {payload[POINTER] for payload in items.payloads if POINTER in payload and served.uploads is not None}


def _forget_images(served: ServedGallery, names: set[str]) -> None:
    """Remove files that no record names any more; a file that cannot be removed is ignored."""
    for name in names:
        if served.uploads is not None:
            with contextlib.suppress(OSError, ValueError):
                served.uploads.remove(name)
