"""What a service is given: its limits and keys, and the model with the galleries that it serves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from sfumato.data.image_decoding import MAX_PIXELS
from sfumato.data.images import Images, UploadedImages
from sfumato.encoders.encoder_protocol import TwoTowers
from sfumato.errors import UserError, say
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.run import load_retrieval_model
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import Gallery
from sfumato.search.searcher import Searcher, open_gallery
from sfumato.serve.problems import Refusal
from sfumato.workflows.own_items import item_images, missing_note

GalleryName = Literal["images", "texts"]

Rights = Literal["read", "write"]
"""What a caller may do; who may write may also read."""

MOST = 1024
"""Longest list in a request; the limit of a service is at most this."""


@dataclass(frozen=True)
class Capacity:
    """Limits and sizes of a service; `sfumato serve --set NAME=VALUE` changes them."""

    max_upload_mb: float = 10.0  # largest size of an image file, in megabytes
    max_pixels: int = 40_000_000  # largest number of pixels in all images of a request
    max_batch: int = 64  # largest number of queries or new items in a request
    max_results: int = 1000  # largest number of results per query and of items per conformal set
    batch_size: int = 32  # largest number of texts or images that are embedded together
    batch_window_ms: float = 2.0  # longest wait for a batch to fill, in milliseconds
    max_records: int = 20_000  # largest number of results and items of conformal sets in a response
    byte_budget_mb: float = 128.0  # largest size of all requests in memory, in megabytes; 64 KiB of each are free
    pixel_budget: int = 120_000_000  # largest number of pixels in the images of all requests at work
    decode_timeout: float = 10.0  # longest time to decode an image, in seconds of the processor
    decode_memory_mb: int = 1300  # memory of a process that decodes images, in megabytes
    queue: int = 256  # largest number of texts or images that wait; further requests are refused
    timeout: float = 30.0  # longest time for a request to arrive, in seconds; the answer may take the same time
    threads: int = 0  # number of threads per computation; 0: one with torch, else that of the cores
    workers: int = 2  # number of searches at the same time
    drain: float = 5.0  # time to go on answering after SIGTERM while /readyz says 503, in seconds
    grace: int = 30  # time to finish requests after that, in seconds


_MAY_BE_0 = {"batch_window_ms", "drain", "threads"}


def parse_limits(given: Sequence[str]) -> dict[str, Any]:
    """The values of NAME=VALUE."""
    kinds: dict[str, type[int | float]] = {one.name: type(getattr(Capacity, one.name)) for one in fields(Capacity)}
    found: dict[str, Any] = {}
    for one in given:
        name, _, value = one.partition("=")
        if name not in kinds:
            near = get_close_matches(name, kinds, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"--set {one}: no limit is called {name!r}; {hint}known: {', '.join(kinds)}")
        try:
            found[name] = kinds[name](value)
        except ValueError:
            what = "a whole number" if kinds[name] is int else "a number"
            raise UserError(f"--set {one}: expected {what}, e.g. --set {name}={getattr(Capacity, name)}") from None
    return found


@dataclass(frozen=True)
class Settings(Capacity):
    """The limits of a service, and who may use it."""

    max_requests: int = 128  # simultaneous requests to /v1/, counted when their bodies have arrived
    max_response_bytes: int = 16_000_000  # of all payloads in a response
    optimise_after: int = 10_000  # written items after which a store is optimised while the service runs
    keys: tuple[str, ...] = field(default=(), repr=False)  # they permit everything
    reading_keys: tuple[str, ...] = field(default=(), repr=False)  # everything but writes; without keys none is needed
    read_only: bool = False  # refuse every write, with any key
    no_metadata: bool = False  # give no image file out as it is, but copies
    judgements: Path | None = None  # file of people's verdicts; they cannot be given without
    hosts: tuple[str, ...] = ()  # accepted names in the Host header; any if empty

    def __post_init__(self) -> None:
        for one in fields(self):
            value, kind = getattr(self, one.name), type(one.default)
            if kind is int and value < (one.name not in _MAY_BE_0):
                raise UserError(f"serve: {one.name} must be at least 1, got {value}")
            if kind is float and not (value > 0 or (value == 0 and one.name in _MAY_BE_0)):
                raise UserError(f"serve: {one.name} must be positive, got {value}")
        if self.max_pixels > MAX_PIXELS:
            raise UserError(f"serve: max_pixels must be at most {MAX_PIXELS}, got {self.max_pixels}")
        if self.max_batch > MOST:
            raise UserError(f"serve: max_batch must be at most {MOST}, got {self.max_batch}")
        if self.queue < self.max_batch:
            why = "else a request with max_batch queries could never be accepted"
            raise UserError(f"serve: queue must be at least max_batch, got {self.queue} and {self.max_batch}; {why}")
        if any(len(key) < 8 or not key.isascii() for key in self.all_keys):
            way = "make one with `openssl rand -hex 32`"
            raise UserError(f"serve: an API key must be at least 8 ASCII characters; {way}")
        if set(self.keys) & set(self.reading_keys):
            raise UserError("serve: an API key is given both for reading and for writing; give it once")

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Every API key; empty if none is needed."""
        return self.keys + self.reading_keys

    @property
    def max_upload_bytes(self) -> int:
        """Largest image file in bytes."""
        return int(self.max_upload_mb * 1_000_000)

    @property
    def max_body_bytes(self) -> int:
        """Largest request in bytes: an image of the largest size in base64, and 64 KiB for the rest."""
        return self.max_upload_bytes * 4 // 3 + 65_536


def read_keys(file: Path | None, environment: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """API keys of a file, or of the environment. Returns (keys that permit everything, keys that permit reading)."""
    if file is None:
        lines = [environment or ""]
    else:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--api-key-file {file}: cannot be read: {error}") from error
    keys: dict[Rights, list[str]] = {"write": [], "read": []}
    for line in filter(None, map(str.strip, lines)):
        scope, colon, key = line.partition(":")
        if colon and scope == "read":
            keys["read"].append(key.strip())
        else:
            keys["write"].append(key.strip() if colon and scope == "write" else line)
    if file is not None and not any(keys.values()):
        raise UserError(f"--api-key-file {file}: holds no key; write one with `openssl rand -hex 32 > {file}`")
    return tuple(keys["write"]), tuple(keys["read"])


@dataclass(eq=False)
class ServedGallery:
    """A gallery with its images."""

    gallery: Gallery  # the gallery
    images: Images | None = None  # images of its items; None if there are none, or their location is unknown
    version: int = 0  # number of writes by this service
    written: int = 0  # number of items that this service has stored or removed

    @property
    def writable(self) -> GaussianCollection | None:
        """The collection that can be written; None if the gallery is in memory."""
        return self.gallery if isinstance(self.gallery, GaussianCollection) else None

    @property
    def uploads(self) -> UploadedImages | None:
        """The folder where new images are stored; None if they cannot be stored."""
        return self.images if isinstance(self.images, UploadedImages) else None


@dataclass(frozen=True, eq=False)
class Sources:
    """The model and the galleries of a service."""

    model: TwoTowers  # embeds the queries and new items
    name: str  # name of the model, for display
    galleries: dict[GalleryName, ServedGallery] = field(default_factory=dict)  # galleries by the kind of their items
    unfamiliar_texts: Callable[[Sequence[str]], list[bool]] = lambda texts: [False] * len(texts)

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

    def gallery(self, name: GalleryName) -> ServedGallery:
        """A gallery by name."""
        if name not in self.galleries:
            raise Refusal(404, f"This service has no gallery of {name}; it has {', '.join(self.galleries)}")
        return self.galleries[name]

    def searcher(self, name: GalleryName) -> Searcher:
        """A gallery that knows the model."""
        return Searcher(self.galleries[name].gallery, "this service", lambda: self)

    def embed_texts(self, texts: Sequence[Any]) -> GaussianEmbedding:
        """Embed texts. Returns (n, d)."""
        return self.model.embed_texts(texts)

    def embed_images(self, images: Sequence[Any]) -> GaussianEmbedding:
        """Embed images. Returns (n, d)."""
        return self.model.embed_images(images)

    def close(self) -> None:
        """Close the stores."""
        for served in self.galleries.values():
            served.gallery.close()


def open_sources(
    path: Path, texts: Path | None = None, *, run: str | None = None, store: str | None = None, device: Any = "cpu"
) -> Sources:
    """Open the model and the galleries for `sfumato serve`."""
    gallery = open_gallery(path, store)
    opened: list[Gallery] = [gallery]
    try:
        loaded = load_retrieval_model(gallery, path, run, device=device)
        location = str(run or gallery.metadata["run"])
        shown = kind(gallery) == "images" and not loaded.model.image.processor.reads
        galleries = {kind(gallery): ServedGallery(gallery, item_images(gallery, location) if shown else None)}
        if note := missing_note(gallery):
            say(note)
        if texts is not None:
            opened.append(beside := open_gallery(texts))
            if kind(beside) != "texts" or kind(gallery) == "texts":
                first = "a collection of images as the first argument"
                raise UserError(f"{texts}: give a collection of texts there, and {first}")
            models = {str(one.metadata.get("run", "")) for one in opened}
            if len(models) > 1 and run is None:
                made = f"the galleries were made by different models, {' and '.join(sorted(models))}"
                raise UserError(f"{made}; if they are the same model in a new location, give the location with --run")
            galleries["texts"] = ServedGallery(beside)
        return Sources(loaded.model, Path(location).name, galleries, loaded.unfamiliar_texts)
    except BaseException:
        for one in opened:
            one.close()
        raise


def kind(gallery: Gallery) -> GalleryName:
    """The kind of the items of a gallery."""
    return "images" if gallery.scorer.direction == "t2i" else "texts"
