"""Adding and removing items: everything is checked and embedded before anything is stored, and one write is at work at a time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.collection import GaussianCollection
from sfumato.serve.pictures import to_store
from sfumato.serve.problems import Refusal, busy
from sfumato.serve.schemas import AddResponse, DeleteResponse, GalleryName
from sfumato.serve.service import Service, good
from sfumato.serve.sources import Shelf

Done = TypeVar("Done")


@dataclass(frozen=True)
class New:
    """An item to store: the bytes of a picture file, or a text; with its place in the request."""

    id: str
    where: str
    picture: bytes | None = None
    text: str | None = None
    payload: Mapping[str, str] = field(default_factory=dict)


class Writer:
    """The one hand that writes.

    Args:
        service: whose galleries.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "write")
        self._going: set[asyncio.Task[int]] = set()

    async def add(self, gallery: GalleryName, items: Sequence[New]) -> AddResponse:
        """Store items; when this returns they survive the death of everything, pictures included.

        Raises:
            Refusal: one of them cannot be stored, and then none was; 503 if the store fails, and a repetition completes it.
        """
        shelf, collection = self._writable(gallery)
        self._check(gallery, shelf, items)
        pictures = [(f"{one.where}.image", one.picture) for one in items if one.picture is not None]
        formats = await self.service.check_pictures(pictures)
        if gallery == "images":
            found = await self.service.embedder.embed_pictures([data for _, data in pictures])
            rows = good(found, [where for where, _ in pictures])
        else:
            found = await self.service.embedder.embed_texts([one.text or "" for one in items])
            rows = good(found, [f"{one.where}.text" for one in items])

        def store() -> int:
            for one, kind in zip(items, formats, strict=False):  # A gallery of texts has no formats.
                if shelf.uploads is not None and one.picture is not None:
                    shelf.uploads.write(one.id, to_store(one.picture, kind))
            # A payload is stored as columns: items with the same fields go together.
            alike: dict[tuple[str, ...], list[int]] = {}
            payloads = [{**one.payload, "text": one.text} if one.text is not None else one.payload for one in items]
            for i, payload in enumerate(payloads):
                alike.setdefault(tuple(sorted(payload)), []).append(i)
            for names, places in alike.items():
                columns = {name: [payloads[i][name] for i in places] for name in names}
                embeddings = GaussianEmbedding.cat([rows[i] for i in places])
                collection.upsert(embeddings, [items[i].id for i in places], columns)
            return len(collection)

        n = await self._alone(shelf, store)
        return AddResponse(gallery=gallery, stored=len(items), n=n)

    async def delete(self, gallery: GalleryName, ids: Sequence[str]) -> DeleteResponse:
        """Remove items, and the pictures of theirs that were uploaded.

        Raises:
            Refusal: the gallery is read-only; 503 if the store fails.
        """
        shelf, collection = self._writable(gallery)
        removed = 0

        def remove() -> int:
            nonlocal removed
            removed = collection.delete(list(dict.fromkeys(ids)))
            for one in ids:
                if shelf.uploads is not None:
                    shelf.uploads.remove(one)
            return len(collection)

        n = await self._alone(shelf, remove)
        return DeleteResponse(gallery=gallery, deleted=removed, n=n)

    async def close(self) -> None:
        """Wait for the write at work."""
        if self._going:
            await asyncio.wait(self._going)
        self._thread.shutdown(wait=False)

    def _writable(self, gallery: GalleryName) -> tuple[Shelf, GaussianCollection]:
        shelf = self.service.shelf(gallery)
        if shelf.writable is None:
            raise Refusal(
                409,
                f"The gallery of {gallery} is an index in a file, which cannot be changed; build it as a collection, with `sfumato index"
                " RUN ... --store file: --out FOLDER`, and serve that",
            )
        return shelf, shelf.writable

    def _check(self, gallery: GalleryName, shelf: Shelf, items: Sequence[New]) -> None:
        most, errors, seen = self.service.settings.max_batch, list[tuple[str, str]](), set[str]()
        if len(items) > most:
            raise Refusal(422, f"{len(items)} items are more than the limit of {most}")
        wanted = "image" if gallery == "images" else "text"
        for one in items:
            if (one.picture is None) == (wanted == "image"):
                errors.append((one.where, f"a gallery of {gallery} takes items with {wanted}"))
            if one.id in seen:
                errors.append((f"{one.where}.id", "occurs twice in this request"))
            if one.text is not None and "text" in one.payload:
                errors.append((f"{one.where}.payload.text", "is the text of the item; leave it out"))
            seen.add(one.id)
        if errors:
            raise Refusal(422, f"Nothing was stored: {errors[0][0]}: {errors[0][1]}", errors=errors)

    async def _alone(self, shelf: Shelf, work: Callable[[], int]) -> int:
        """Done when no other write is; to its end, even if whoever asked has gone."""

        async def locked() -> int:
            async with self._lock:
                try:
                    return await asyncio.get_running_loop().run_in_executor(self._thread, work)
                finally:
                    self.service.changed(shelf)

        task = asyncio.get_running_loop().create_task(locked())
        self._going.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except ValueError as error:
            raise Refusal(422, f"Nothing was stored: {error}") from error
        except (UserError, OSError) as error:
            raise busy(f"The store failed, and the same request again will complete it: {error}", 5) from error

    def _forget(self, task: asyncio.Task[int]) -> None:
        self._going.discard(task)
        if not task.cancelled():
            task.exception()  # Seen, whether or not anybody still waits.
