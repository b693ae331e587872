"""The model and the galleries of a service (of images, of texts, or both), and the location of the images."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from sfumato.data.problems import Problems
from sfumato.encoders.dual import DualEncoder
from sfumato.encoders.regions import uses_regions
from sfumato.errors import UserError
from sfumato.models.galleries import GalleryPart, build_index, load_retrieval_model, open_gallery
from sfumato.models.run import RECIPE, Run, load_run
from sfumato.models.splits import embed_split, load_split, load_splits
from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection
from sfumato.search.gallery import Gallery
from sfumato.serve.image_files import FolderImages, Images, SplitImages, UploadedImages
from sfumato.serve.schemas import GalleryName


@dataclass(eq=False)
class ServedGallery:
    """A gallery with its images.

    Attributes:
        gallery: the gallery.
        images: images of its items; None if there are none, or their location is unknown.
        version: number of writes by this service.
        written: number of items that this service has stored or removed.
    """

    gallery: Gallery
    images: Images | None = None
    version: int = 0
    written: int = 0

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
    """The model and the galleries of a service.

    Attributes:
        model: embeds the queries and new items.
        name: name of the model, for display.
        galleries: galleries by the kind of their items.

    Raises:
        UserError: the galleries differ in their dimensions or their distance.
    """

    model: DualEncoder
    name: str
    galleries: dict[GalleryName, ServedGallery] = field(default_factory=dict)

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
    """Open the model and the galleries for `sfumato serve`.

    Args:
        path: folder of an index, a collection or a run. For a run, a split of its data is embedded now, images and
            texts.
        texts: an additional index or collection of texts.
        run: folder or name of the model, if it has moved since the index was built.
        store: store URL of a collection at `path`, if the store has moved.
        split: split of a run; "test" if None.
        device: device of the model.

    Returns:
        The sources, open.

    Raises:
        UserError: something is missing or does not fit together.
    """
    if (path / RECIPE).is_file():
        if store is not None or (run is not None and texts is None):
            raise UserError(f"{path} is a run; --run and --store are for an index, leave them out")
        served = _from_run(load_run(path, device=device), path, split or "test", images_alone=texts is not None)
    else:
        if split is not None:
            raise UserError(f"--split needs a run, but {path} is not a run")
        served = _from_gallery(path, run, store)
        served.model.to(device)
    if texts is None:
        return served
    beside = open_gallery(texts)
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
        return Sources(served.model, served.name, {**served.galleries, "texts": ServedGallery(beside)})
    except UserError:
        beside.close()
        served.close()
        raise


def kind(gallery: Gallery) -> GalleryName:
    """The kind of the items of a gallery.

    Args:
        gallery: the gallery.

    Returns:
        "images" or "texts".
    """
    return "images" if gallery.scorer.direction == "t2i" else "texts"


def _from_gallery(folder: Path, run: str | None, store: str | None) -> Sources:
    gallery = open_gallery(folder, store)
    try:
        retrieval_model = load_retrieval_model(gallery, folder, run)
        if retrieval_model.distance != gallery.distance:
            raise UserError(
                f"{folder} is ranked by {gallery.distance}, but the model {retrieval_model.source} by"
                f" {retrieval_model.distance}; give the model that the index was built with"
            )
        location = str(run or gallery.metadata["run"])
        shown = kind(gallery) == "images" and not uses_regions(retrieval_model.model)
        served = ServedGallery(gallery, _images(gallery, location) if shown else None)
        return Sources(retrieval_model.model, Path(location).name, {kind(gallery): served})
    except BaseException:
        gallery.close()
        raise


def _images(gallery: Gallery, run: str) -> Images | None:
    """The images named by the metadata of a gallery; for a collection also the folder of new images."""
    source = gallery.metadata.get("pictures") or {}
    found: Images | None = None
    if "folder" in source:
        found = FolderImages(Path(source["folder"]))
    elif "split" in source and (Path(run) / RECIPE).is_file():
        splits = load_splits(load_run(run).recipe.data, Problems())
        if (data := splits.get(source["split"])) is not None:
            found = SplitImages(dict(zip(data.image_ids, data.images, strict=True)))
    if isinstance(gallery, GaussianCollection):
        return UploadedImages(gallery.folder / UPLOADED_IMAGES, found)
    return found


def _from_run(run: Run, folder: Path, split: str, *, images_alone: bool) -> Sources:
    prepared = load_split(run.model, run.recipe.data, split)
    images, texts = embed_split(run.model, prepared)
    data = prepared.data
    sources: dict[GalleryName, GalleryPart] = {
        "images": GalleryPart(images, data.image_ids, images={"split": split}),
        "texts": GalleryPart(texts, data.text_ids, data.texts),
    }
    shown = SplitImages(dict(zip(data.image_ids, data.images, strict=True)))
    files = None if uses_regions(run.model) else shown
    galleries: dict[GalleryName, ServedGallery] = {
        name: ServedGallery(build_index(run, source, model_source=folder), files if name == "images" else None)
        for name, source in sources.items()
        if name == "images" or not images_alone
    }
    return Sources(run.model, folder.name, galleries)
