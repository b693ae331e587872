"""Queries of requests: read, checked within limits, and embedded."""

import base64
import binascii
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from sfumato.data.image_inputs import regions_to_bytes
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.answer import TextQuery
from sfumato.search.candidates import GalleryRecords
from sfumato.search.gallery import Gallery
from sfumato.search.searcher import combined
from sfumato.serve.bodies import Budget
from sfumato.serve.decoding import HEADER
from sfumato.serve.embedding import Closed, Embedder
from sfumato.serve.metrics import Metrics
from sfumato.serve.problems import Refusal, busy
from sfumato.serve.schemas import (
    Query,
    QueryKinds,
)
from sfumato.serve.settings import Settings
from sfumato.serve.sources import ServedGallery, Sources, vector_sides


@dataclass(frozen=True)
class Asked:
    """A query."""

    kind: Literal["text", "image", "id"]  # what the query is; of a vector, its modality
    name: str  # name of the query in the answer: the text, the name of the image file or of the vector, or the id
    where: str  # its location in the request, e.g. "body.queries.0.text"
    text: TextQuery | None = None  # the text, for kind "text"
    image: bytes = b""  # the bytes of the image file, for kind "image"
    vector: bytes | None = None  # float32 numbers as bytes, for a vector of kind "text" or "image"; None for others

    @property
    def light(self) -> "Asked":
        """The query without its bytes, which are not needed after its embedding."""
        return replace(self, image=b"", vector=None)

    def is_native(self, served: ServedGallery) -> bool:
        """Whether the calibration of a gallery was fitted on such queries."""
        return self.kind == served.native and (self.text is None or self.text.is_one)


class Queries:
    """Embeds the queries of requests, and checks their images, which share a budget of pixels."""

    def __init__(self, sources: Sources, settings: Settings, metrics: Metrics) -> None:
        self.model, self.settings = sources.model, settings
        self.vector_sides = vector_sides(sources.model, sources.d)
        self.embedder = Embedder(sources.model, settings, metrics)
        self.pixels = Budget(settings.pixel_budget, "images to decode")

    def kinds(self) -> QueryKinds:
        """The kinds of queries that the model can answer."""
        model, sides = self.model, self.vector_sides
        return QueryKinds(
            text=not model.text.processor.reads,
            image=not model.image.processor.reads,
            id=True,
            vector={name: side.channels for name, side in sides.items() if side.channels is not None},
        )

    def refuse_features(self, side: Literal["image", "text"], where: Sequence[str]) -> None:
        """Refuse the images or texts of a request if the model reads features instead of them."""
        model = self.model
        features = (model.image if side == "image" else model.text).processor.reads
        if where and features:
            kinds = self.kinds()
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

    async def embedded(
        self, asked: Sequence[Asked], gallery: Gallery, in_thread: Callable[..., Awaitable[GalleryRecords]]
    ) -> list[GaussianEmbedding]:
        """(1, d) embedding of each query."""
        rows: dict[int, GaussianEmbedding] = {}
        by_kind = {
            k: [i for i, q in enumerate(asked) if q.kind == k and q.vector is None] for k in ("text", "image", "id")
        }
        if ids := by_kind["id"]:
            items = await in_thread(gallery.get, list(dict.fromkeys(asked[i].name for i in ids)))
            if missing := [asked[i] for i in ids if asked[i].name not in items.ids]:
                told = f"There is no item {missing[0].name!r} to search by"
                raise Refusal(404, told, errors=[(one.where, "no such item") for one in missing])
            place = {one: j for j, one in enumerate(items.ids)}
            rows |= {i: items.embeddings[place[asked[i].name] : place[asked[i].name] + 1] for i in ids}
        if images := by_kind["image"]:
            async with self.checked_images([(asked[i].where, asked[i].image) for i in images]):
                found = await self.embedder.embed_images([asked[i].image for i in images])
            rows |= dict(zip(images, checked(found, [asked[i].where for i in images]), strict=True))
        if texts := by_kind["text"]:
            self.refuse_features("text", [asked[i].where for i in texts])
            forms = [one.text for one in asked if one.text is not None]
            where = [asked[i].where for i, form in zip(texts, forms, strict=True) for _ in form.parts]
            found = await self.embedder.embed_texts([part for form in forms for part in form.parts])
            whole = combined(forms, GaussianEmbedding.cat(checked(found, where)))
            rows |= {i: whole[k : k + 1] for k, i in enumerate(texts)}
        if vectors := [i for i, q in enumerate(asked) if q.vector is not None]:
            rows |= dict(zip(vectors, await self._by_vectors([asked[i] for i in vectors]), strict=True))
        return [rows[i].to(torch.float32) for i in range(len(asked))]

    async def _by_vectors(self, asked: Sequence[Asked]) -> list[GaussianEmbedding]:
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


def asked_by(query: Query, i: int) -> Asked:
    """The query of a request by its number."""
    where = f"body.queries.{i}"
    if query.text is not None:
        return asked_text(query.text, query.also, query.without, f"{where}.text")
    if query.id is not None:
        return Asked("id", query.id, f"{where}.id")
    if query.vector is not None:
        with np.errstate(over="ignore"):  # What float32 cannot hold is refused as infinite.
            vector = np.asarray(query.vector, np.float32).tobytes()
        return Asked(query.modality, query.name or f"vector {i + 1}", f"{where}.vector", vector=vector)
    image = decoded(query.image or "", f"{where}.image")
    return Asked("image", query.name or f"image {i + 1}", f"{where}.image", image=image)


def asked_text(text: str, also: Sequence[str], without: Sequence[str], where: str) -> Asked:
    """A query by text."""
    query = TextQuery(text, tuple(also), tuple(without))
    return Asked("text", query.name, where, query)


def decoded(text: str, where: str) -> bytes:
    """The bytes of an image in base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal(422, f"{where}: not base64", errors=[(where, f"not base64: {error}")]) from error
