"""The model and the galleries of a service."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from sfumato.data.images import Images, UploadedImages
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.feature_rows import EmbeddingProcessor
from sfumato.errors import UserError, as_typed
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.run import RECIPE
from sfumato.progress import say
from sfumato.search.answer import NATIVE, QueryKind
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import Gallery
from sfumato.search.searcher import Searcher
from sfumato.serve.schemas import GalleryName, Modality
from sfumato.workflows import index


@dataclass(eq=False)
class ServedGallery:
    """A gallery with its images."""

    gallery: Gallery  # the gallery
    images: Images | None = None  # images of its items; None if there are none, or their location is unknown
    version: int = 0  # number of writes by this service
    written: int = 0  # number of items that this service has stored or removed

    @property
    def native(self) -> QueryKind:
        """The kind of queries that its calibration was fitted on."""
        return NATIVE[self.gallery.scorer.direction]

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

    def searcher(self, name: GalleryName) -> Searcher:
        """A gallery that knows the model."""
        return Searcher(self.galleries[name].gallery, "this service", lambda: self)

    def embed_texts(self, texts: Sequence[Any]) -> GaussianEmbedding:
        """Embed texts. Returns (n, d)."""
        return self.model.embed_texts(texts)

    def embed_images(self, images: Sequence[Any]) -> GaussianEmbedding:
        """Embed images. Returns (n, d)."""
        return self.model.embed_images(images)

    def unfamiliar_texts(self, texts: Sequence[str]) -> list[bool]:
        """Which texts have words that the model hardly knows."""
        return self.unfamiliar(texts)

    def close(self) -> None:
        """Close the stores."""
        for served in self.galleries.values():
            served.gallery.close()


def open_sources(
    path: Path,
    texts: Path | None = None,
    *,
    run: str | None = None,
    store: str | None = None,
    device: torch.device | str = "cpu",
) -> Sources:
    """Open the model and the galleries for `sfumato serve`."""
    if (path / RECIPE).is_file():
        made = as_typed("sfumato", "index", path, "--split", "test", "--out", f"{path}-index")
        raise UserError(f"{path} is a run; serve an index of it: {made}")
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
                f"{texts}: give a collection of texts there, and a collection of images as the first argument"
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
        shown = kind(gallery) == "images" and not retrieval_model.model.image.processor.reads
        served = ServedGallery(gallery, index.item_images(gallery, location) if shown else None)
        judge = retrieval_model.unfamiliar_texts
        return Sources(retrieval_model.model, Path(location).name, {kind(gallery): served}, judge)
    except BaseException:
        gallery.close()
        raise


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
