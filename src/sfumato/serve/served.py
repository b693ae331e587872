"""What is served: a model, one gallery of images or texts or both, and where the pictures are."""

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
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import Gallery
from sfumato.serve.image_files import FolderPictures, Pictures, SplitPictures, UploadedPictures
from sfumato.serve.schemas import GalleryName


@dataclass(eq=False)
class Shelf:
    """A gallery with its pictures.

    Attributes:
        gallery: it.
        pictures: of its items; None if there are none, or nobody knows where.
        version: counts what this service has changed in it.
        written: items that it has stored or removed.
    """

    gallery: Gallery
    pictures: Pictures | None = None
    version: int = 0
    written: int = 0

    @property
    def writable(self) -> GaussianCollection | None:
        """The collection, if it is one."""
        return self.gallery if isinstance(self.gallery, GaussianCollection) else None

    @property
    def uploads(self) -> UploadedPictures | None:
        """Where new pictures go."""
        return self.pictures if isinstance(self.pictures, UploadedPictures) else None


@dataclass(frozen=True, eq=False)
class Sources:
    """What a service answers from.

    Attributes:
        model: embeds the queries, and what is added.
        name: of the model, for people.
        shelves: by kind of the items.

    Raises:
        UserError: the galleries differ in their dimensions or their distance.
    """

    model: DualEncoder
    name: str
    shelves: dict[GalleryName, Shelf] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in ("d", "distance"):
            found = {name: getattr(shelf.gallery, what) for name, shelf in self.shelves.items()}
            if len(set(found.values())) > 1:
                raise UserError(f"the galleries differ in {what}, {found}; serve two that one model has made")

    @property
    def distance(self) -> str:
        """Of all galleries."""
        return next(iter(self.shelves.values())).gallery.distance

    @property
    def d(self) -> int:
        """Of all galleries."""
        return next(iter(self.shelves.values())).gallery.d

    def close(self) -> None:
        """Let go of the stores."""
        for shelf in self.shelves.values():
            shelf.gallery.close()


def open_sources(
    path: Path,
    *,
    texts: Path | None = None,
    run: str | None = None,
    store: str | None = None,
    split: str | None = None,
    device: torch.device | str = "cpu",
) -> Sources:
    """Open what `sfumato serve` is given.

    Args:
        path: folder of an index, a collection or a run; of a run a split of its data is embedded now, pictures and texts.
        texts: an index or a collection of texts beside it.
        run: folder or name of the model, if it has moved since the index was built.
        store: of a collection at `path`, if it has moved.
        split: of a run; "test" if None.
        device: where the model goes.

    Raises:
        UserError: what is there does not fit together, or is not there.
    """
    if (path / RECIPE).is_file():
        if store is not None or (run is not None and texts is None):
            raise UserError(f"{path} is a run; --run and --store go with an index")
        served = _from_run(load_run(path, device=device), path, split or "test", images_alone=texts is not None)
    else:
        if split is not None:
            raise UserError(f"--split goes with a run, and {path} is none")
        served = _from_gallery(path, run, store)
        served.model.to(device)
    if texts is None:
        return served
    beside = open_gallery(texts)
    homes = {str(shelf.gallery.about.get("run", "")) for shelf in served.shelves.values()} | {
        str(beside.about.get("run", ""))
    }
    try:
        if kind(beside) != "texts" or "texts" in served.shelves:
            raise UserError(f"--texts {texts}: give an index of texts there, and one of pictures as the first argument")
        if len(homes) > 1 and run is None:
            raise UserError(
                f"the galleries were made by different models, {' and '.join(sorted(homes))}; if they are one that has moved, say where"
                " it is with --run"
            )
        return Sources(served.model, served.name, {**served.shelves, "texts": Shelf(beside)})
    except UserError:
        beside.close()
        served.close()
        raise


def kind(gallery: Gallery) -> GalleryName:
    """What its items are."""
    return "images" if gallery.answers.direction == "t2i" else "texts"


def _from_gallery(folder: Path, run: str | None, store: str | None) -> Sources:
    gallery = open_gallery(folder, store)
    try:
        retrieval_model = load_retrieval_model(gallery, folder, run)
        if retrieval_model.distance != gallery.distance:
            raise UserError(
                f"{folder} is ranked by {gallery.distance}, the model {retrieval_model.source} by {retrieval_model.distance}: not the one that it was"
                " built with"
            )
        home = str(run or gallery.about["run"])
        shown = kind(gallery) == "images" and not uses_regions(retrieval_model.model)
        shelf = Shelf(gallery, _pictures(gallery, home) if shown else None)
        return Sources(retrieval_model.model, Path(home).name, {kind(gallery): shelf})
    except BaseException:
        gallery.close()
        raise


def _pictures(gallery: Gallery, home: str) -> Pictures | None:
    """Where the index says that its pictures are, and for a collection where new ones go."""
    told = gallery.about.get("pictures") or {}
    found: Pictures | None = None
    if "folder" in told:
        found = FolderPictures(Path(told["folder"]))
    elif "split" in told and (Path(home) / RECIPE).is_file():
        splits = load_splits(load_run(home).recipe.data, Problems())
        if (data := splits.get(told["split"])) is not None:
            found = SplitPictures(dict(zip(data.image_ids, data.images, strict=True)))
    if isinstance(gallery, GaussianCollection):
        return UploadedPictures(gallery.folder / "pictures", found)
    return found


def _from_run(run: Run, folder: Path, split: str, *, images_alone: bool) -> Sources:
    prepared = load_split(run.model, run.recipe.data, split)
    images, texts = embed_split(run.model, prepared)
    data = prepared.data
    sources: dict[GalleryName, GalleryPart] = {
        "images": GalleryPart(images, data.image_ids, images={"split": split}),
        "texts": GalleryPart(texts, data.text_ids, data.texts),
    }
    shown = SplitPictures(dict(zip(data.image_ids, data.images, strict=True)))
    pictures = None if uses_regions(run.model) else shown
    shelves: dict[GalleryName, Shelf] = {
        name: Shelf(build_index(run, source, model_source=folder), pictures if name == "images" else None)
        for name, source in sources.items()
        if name == "images" or not images_alone
    }
    return Sources(run.model, folder.name, shelves)
