"""A loaded model, and a gallery opened with its model: embed, search and match in one line each.

The commands search with the same objects, so that a program and `sfumato search --json` give the same numbers.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.data.image_inputs import ImageInput, image_sources
from sfumato.data.images import Images, Problems, SplitImages
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import TwoTowers
from sfumato.encoders.processors import EmbeddingProcessor
from sfumato.errors import UserError, as_typed, counted, say
from sfumato.files import RECIPE, is_gallery
from sfumato.gaussian import GaussianEmbedding, ScalarUncertainty
from sfumato.ids import Direction
from sfumato.metrics.reliability import N_BINS, RecallByUncertainty, Reliability
from sfumato.models.model import Model
from sfumato.models.run import load_model, load_retrieval_model
from sfumato.search.answer import Answer, SearchOptions, TextQuery
from sfumato.search.gallery import Gallery
from sfumato.search.searcher import Searcher, open_gallery

if TYPE_CHECKING:
    from sfumato.data.sources import DataConfig
    from sfumato.workflows.index import GalleryPart

_MOST_MEASURING = 3_000


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LoadedModel(Model):
    """A model that also builds galleries; :func:`load` makes one."""

    def reliability(self, split: str = "test", *, direction: Direction = "t2i", n_bins: int = N_BINS) -> Reliability:
        """How well the probabilities of first hits hold on a split of the run's own data.

        Args:
            split: one that neither trained nor calibrated it. Of more than 3,000 images a random part is taken.
            direction: "t2i" if texts search among images.
            n_bins: number of bins of the curve, each with equally many queries.

        Returns:
            The comparison; its ``plot()`` draws it.

        Raises:
            UserError: the model is no run, has no calibration, or its data have no such split.
        """
        from sfumato.evaluation.hits import first_hits
        from sfumato.models.calibrate import some_positions
        from sfumato.models.embed import embed_split, prepare_split, read_split

        config = self._own_data("Reliability.of(probability, match)")
        if self.calibration is None:
            command = as_typed("sfumato", "calibrate", self.source)
            raise UserError(f"{self.source} has no calibration; make one: {command}")
        problems = Problems()
        data = read_split(config, split, problems)
        data = data.keep_images(some_positions(len(data.image_ids), _MOST_MEASURING, 0))
        prepared = prepare_split(self.model, data, problems, split)
        embedded = embed_split(self.model, prepared)
        distance, match = get_distance(self.distance).matrix(*embedded), prepared.data.relevance().to_dense()
        population = self.calibration.metadata.get("queries", "planted")
        hits = first_hits(self.calibration, distance, match, direction, embedded=embedded, population=population)
        return Reliability.of(hits.probability, hits.match, n_bins=n_bins)

    def recall_by_uncertainty(
        self,
        split: str = "test",
        *,
        direction: Direction = "t2i",
        uncertainty: ScalarUncertainty = "total_variance",
        n_bins: int = 10,
    ) -> RecallByUncertainty:
        """Recall in groups of queries, from the most certain to the least, on a split of the run's own data.

        Args:
            split: name of the split; all of it is embedded.
            direction: "t2i" if texts search among images.
            uncertainty: the scalar uncertainty of the queries: total_variance, geometric_std or log_det.
            n_bins: number of groups of equal size.

        Returns:
            The groups; its ``plot()`` draws them.

        Raises:
            UserError: the model is no run, or its data have no such split.
        """
        from sfumato.evaluation.protocols import EmbeddedSplit
        from sfumato.models.embed import embed_split, load_split

        prepared = load_split(self.model, self._own_data("RecallByUncertainty.of(uncertainty, hit)"), split)
        query = EmbeddedSplit(*embed_split(self.model, prepared), prepared.data.relevance()).query(direction)
        values, hit = query.queries.uncertainty(uncertainty), query.first_hits(self.distance)
        return RecallByUncertainty.of(values, hit, n_bins=n_bins)

    def _own_data(self, otherwise: str) -> "DataConfig":
        path = Path(self.source) / RECIPE
        if not path.is_file():
            raise UserError(f"{self.source} is not a run and has no data of its own; use {otherwise}")
        from sfumato.models.recipe import load_recipe  # Runs need torch.

        return load_recipe(path).data

    def index(
        self,
        images: "str | os.PathLike[str] | Sequence[ImageInput] | GaussianEmbedding",
        ids: Sequence[str] | None = None,
    ) -> Searcher:
        """A gallery of images in memory, to search by text.

        Args:
            images: a folder of images with its subfolders, of which unusable ones are left out and reported; or m
                images as for :meth:`embed_images`; or their embeddings.
            ids: m distinct strings. None takes the paths, relative to the folder if one was given; the row numbers of
                images without a path. Not with a folder.

        Returns:
            The gallery. :meth:`Searcher.save` writes it for :func:`load_index` and `sfumato search`.

        Raises:
            UserError: an image, or all of a folder, cannot be used.
            ValueError: see :meth:`GaussianIndex.build`.
        """
        from sfumato.models.embed import embed_folder
        from sfumato.workflows.index import GalleryPart

        if isinstance(images, str | os.PathLike):
            if ids is not None:
                raise ValueError("index: the ids of a folder are the paths of its images; leave ids out")
            folder = Path(images)
            embeddings, names, problems = embed_folder(self, folder)
            if len(problems):
                say(f"{counted(len(problems), 'image')} left out:\n{problems.summary()}")
            return self._searcher(GalleryPart(embeddings, names, images={"folder": str(folder.resolve())}))
        if isinstance(images, GaussianEmbedding):
            return self._searcher(GalleryPart(images, _ids(ids, range(images.n))))
        names = [Path(i).as_posix() if isinstance(i, str | os.PathLike) else str(k) for k, i in enumerate(images)]
        part, features = GalleryPart(self.embed_images(images), _ids(ids, names)), self.model.image.processor.reads
        sources = image_sources(images, "index", features=features)
        return self._searcher(part, None if features else SplitImages(dict(zip(part.ids, sources, strict=False))))

    def index_texts(self, texts: Sequence[str], ids: Sequence[str] | None = None) -> Searcher:
        """A gallery of texts in memory, to search by image.

        Args:
            texts: m texts.
            ids: m distinct strings; row numbers if None.

        Returns:
            The gallery.

        Raises:
            ValueError: see :meth:`embed_texts` and :meth:`GaussianIndex.build`.
        """
        from sfumato.workflows.index import GalleryPart

        return self._searcher(GalleryPart(self.embed_texts(texts), _ids(ids, range(len(texts))), list(texts)))

    def _searcher(self, part: "GalleryPart", given: SplitImages | None = None) -> Searcher:
        from sfumato.workflows.index import build_index

        gallery = build_index(self, part)
        return Searcher(gallery, self.source, lambda: self, lambda: given or _images(gallery, self.source))


def _images(gallery: Gallery, run: str) -> Images | None:
    from sfumato.workflows.own_items import item_images  # here: it reads all kinds of data

    return item_images(gallery, run)


def _ids(ids: Sequence[str] | None, default: Sequence[object]) -> list[str]:
    return [str(i) for i in default] if ids is None else list(ids)


def load(source: str | Path, *, device: Any = "cpu") -> LoadedModel:
    """Load a model: a run, an adopted or an exported model, or a published one.

    Args:
        source: its folder or file, or its name on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION.
        device: "cpu", "cuda", "auto" ...

    Returns:
        The model in evaluation mode.

    Raises:
        UserError: there is no such model, or it is damaged.

    Example:
        >>> model = load("runs/mine")  # doctest: +SKIP
        >>> index = model.index("pictures")  # doctest: +SKIP
        >>> index.search("a dog", k=5)  # doctest: +SKIP
    """
    if is_gallery(source) and not (Path(source) / RECIPE).is_file():
        raise UserError(f"{source} holds a collection; open it with sfumato.load_index({str(source)!r})")
    found = load_model(source, device=device)
    return LoadedModel(**{f.name: getattr(found, f.name) for f in fields(LoadedModel)})


def load_index(folder: str | Path, *, run: str | Path | None = None, store: str | None = None) -> Searcher:
    """Open a collection together with its model.

    Args:
        folder: what `sfumato index` or :meth:`Searcher.save` has written.
        run: folder or name of the model, if it has moved.
        store: URL of a collection's store, if it has moved.

    Returns:
        The gallery. Close it, or use it as a context manager. The model is loaded when the
        first query needs it.

    Raises:
        UserError: there is no gallery; a search raises it if the model is missing or has changed.
        ValueError: the gallery is damaged.
    """
    if (Path(folder) / RECIPE).is_file():
        command = as_typed("sfumato", "index", folder, "--split", "all", "--out", f"{folder}-index")
        ways = f"index images with sfumato.load({str(folder)!r}).index(images), or with `{command}`"
        raise UserError(f"{folder} is a run, not an index; {ways}")
    gallery = open_gallery(folder, store)
    source = str(run or gallery.metadata.get("run", ""))
    open_model = functools.partial(load_retrieval_model, gallery, folder, run)
    return Searcher(gallery, str(folder), open_model, functools.partial(_images, gallery, source))


Queries = tuple[Sequence[TextQuery], Sequence[Path], Sequence[str]]
"""Texts and images to search for, and ids of the index's own items."""


def search_index(
    folder: Path, queries: Queries, k: int, options: SearchOptions, *, run: str | None, store: str | None
) -> list[Answer]:
    """Search a saved index by texts and images with the model that it was built with, or by its own items."""
    texts, images, ids = queries
    with contextlib.closing(load_index(folder, run=run, store=store)) as searcher:
        foreign = images if searcher.native == "texts" else texts
        options.check(searcher.gallery.scorer.direction, [not foreign and not ids])
        answers: list[Answer] = []
        if texts:
            answers += searcher.answers(_vector_files(searcher.model.model, texts), k, options, modality="texts")
        if images:
            answers += searcher.answers(list(images), k, options, modality="images")
        if ids:
            answers += searcher.search_items(ids, k, options)
    return answers


def _vector_files(model: TwoTowers, texts: Sequence[TextQuery]) -> list[TextQuery] | list[Path]:
    """The texts; for a model without an encoder for texts, the .npy files that they must be."""
    tower = model.text
    if not tower.processor.reads:
        return list(texts)
    if any(one.also or one.without for one in texts):
        raise UserError("search: also and without stand beside texts to search for; leave them out")
    paths = [one.text for one in texts]
    for path in paths:
        if path.endswith(".npy") and not Path(path).is_file():
            raise UserError(f"there is no file {path}")
        if not Path(path).is_file():
            found = f"this index is of a model that reads embeddings, which has no encoder for {path!r}"
            ways = "give a .npy file of one vector instead of a text, or search by an item with --id"
            raise UserError(f"{found}: {ways}")
        if isinstance(processor := tower.processor, EmbeddingProcessor):
            try:
                processor.prepare(Path(path).read_bytes())
            except ValueError as error:
                raise UserError(f"{path}: {error}") from error
    return [Path(path) for path in paths]
