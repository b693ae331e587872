"""A loaded model, and a gallery opened with its model: embed, search and match in one line each.

The commands search with the same objects, so that a program and `sfumato search --json` give the same numbers.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.data.images import ImageInput, Problems, SplitImages, image_sources, unreadable, vector_file
from sfumato.direction import Direction
from sfumato.distances import get_distance
from sfumato.encoders.dual import DualEncoder
from sfumato.encoders.feature_rows import EmbeddingProcessor, features_read
from sfumato.errors import UserError, as_typed, counted
from sfumato.evaluation.hits import first_hits
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_probability
from sfumato.metrics.reliability import N_BINS
from sfumato.metrics.reliability_plot import Reliability
from sfumato.models.calibrate import some_positions
from sfumato.models.embed import embed_folder, embed_split, load_splits, no_split_error, prepare_split
from sfumato.models.pretrained import PretrainedModel
from sfumato.models.recipe import load_recipe
from sfumato.models.run import RECIPE, choose_device
from sfumato.models.unfamiliar import unfamiliar_texts
from sfumato.progress import say
from sfumato.search.answer import Answer
from sfumato.search.guarantees import check_native
from sfumato.search.searcher import Searcher
from sfumato.workflows.export import load_model
from sfumato.workflows.index import (
    GalleryPart,
    build_index,
    is_gallery,
    item_images,
    load_retrieval_model,
    open_gallery,
)

_MOST_MEASURING = 3_000


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that embeds, matches and builds galleries; :func:`load` makes one.

    Attributes:
        retrieval_model: the encoders with their distance, logits and calibration.
        source: folder or name that it was loaded from.
    """

    retrieval_model: PretrainedModel
    source: str

    def __repr__(self) -> str:
        found = self.retrieval_model
        state = "calibrated" if found.calibrated else "not calibrated"
        return f"LoadedModel({self.source!r}, {found.distance}, {state})"

    @property
    def model(self) -> DualEncoder:
        """The encoders."""
        return self.retrieval_model.model

    def unfamiliar_texts(self, texts: Sequence[str]) -> list[bool]:
        """Which texts have words that the model hardly knows.

        Args:
            texts: n texts.

        Returns:
            n times True or False.
        """
        return unfamiliar_texts(self.retrieval_model, texts)

    @property
    def calibrated(self) -> bool:
        """Whether its probabilities were fitted on held-out pairs."""
        return self.retrieval_model.calibrated

    def embed_images(self, images: Sequence[ImageInput], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed images.

        Args:
            images: n paths, bytes of image files, Pillow images or arrays of uint8 pixels, also mixed; of a model that
                reads features, n arrays of them, or .npy files.
            batch_size: number of images at a time.

        Returns:
            (n, d) embeddings on the CPU.

        Raises:
            UserError: an image is missing or cannot be read; the message has its path or its number.
            TypeError: images is a single one, or one has another type.
            ValueError: there are none, or an array has another shape or dtype.
        """
        tower = self.retrieval_model.model.image
        sources = image_sources(images, "embed_images", features=features_read(tower))
        if not sources:
            raise ValueError("embed_images: got no images, expected at least one")
        errors: list[UserError] = []
        store, _ = tower.processor.read(
            [source.read_bytes for source in sources],
            on_error=lambda i, error: errors.append(unreadable(sources[i], error)),
        )
        if errors:
            raise errors[0]
        return tower.embed(store, batch_size=batch_size)

    def embed_texts(self, texts: Sequence[Any], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed texts.

        Args:
            texts: n texts; of a model that reads embeddings, n vectors (c,), or n .npy files by path or bytes.
            batch_size: number of texts at a time.

        Returns:
            (n, d) embeddings on the CPU.

        Raises:
            UserError: the model has no encoder for texts.
            TypeError: texts is a single one, or one is no text.
            ValueError: there are none.
        """
        if isinstance(texts, str):
            raise TypeError(f"embed_texts: got one string {texts!r}, expected a list of them: [{texts!r}]")
        texts, reads = list(texts), features_read(self.retrieval_model.model.text)
        if not texts:
            raise ValueError("embed_texts: got no texts, expected at least one")
        for i, text in enumerate(texts):
            if reads and isinstance(text, str):
                raise UserError(
                    f"this model reads {reads} and has no encoder for texts such as {text[:40]!r}; give an array of"
                    " them, or search an index by an item: Searcher.search_items"
                )
            if reads and isinstance(text, os.PathLike):
                texts[i] = Path(text).read_bytes()
            elif reads and not isinstance(text, bytes):
                texts[i] = vector_file(text, f"embed_texts: text {i}", reads)
            elif not reads and not isinstance(text, str):
                raise TypeError(f"embed_texts: text {i} is a {type(text).__name__}, expected a string")
        return self.retrieval_model.model.embed_texts(texts, batch_size=batch_size)

    def probability(
        self,
        texts: Sequence[Any] | GaussianEmbedding,
        images: Sequence[ImageInput] | GaussianEmbedding,
        *,
        match_fraction: float | None = None,
    ) -> Tensor:
        """Probability that each text matches each image, by their distance alone.

        It is that of a random pair at this distance. A search among images gives other probabilities: it also knows
        the size of its gallery and the other items near the query.

        Args:
            texts: n texts, or their embeddings.
            images: m images, or their embeddings.
            match_fraction: fraction of matches among pairs like these, in (0, 1): 0.5 if half of them match. None
                takes the fraction of the calibration, where every text was paired with every image. A model without a
                calibration knows none.

        Returns:
            (n, m) probabilities in [0, 1]; not calibrated unless :attr:`calibrated`.

        Raises:
            ValueError: match_fraction is outside of (0, 1), or the model has no calibration for it; see also
                :meth:`embed_texts` and :meth:`embed_images`.
        """
        found = self.retrieval_model
        query = texts if isinstance(texts, GaussianEmbedding) else self.embed_texts(texts)
        items = images if isinstance(images, GaussianEmbedding) else self.embed_images(images)
        distance = get_distance(found.distance).for_direction("t2i").matrix(query, items)
        if found.calibration is not None:
            return found.calibration.probability(distance, match_fraction=match_fraction)
        if match_fraction is not None:
            raise ValueError(
                "probability: match_fraction needs a calibration, and this model has none; calibrate it on held-out"
                " pairs (sfumato calibrate RUN), or leave match_fraction out"
            )
        return match_probability(distance, found.logit_scale, found.logit_bias)

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
        found = self.retrieval_model
        if not (Path(self.source) / RECIPE).is_file():
            raise UserError(
                f"{self.source} is not a run and has no data of its own; use Reliability.of(probability, match)"
            )
        if found.calibration is None:
            raise UserError(
                f"{self.source} has no calibration; make one: {as_typed('sfumato', 'calibrate', self.source)}"
            )
        config, problems = load_recipe(Path(self.source) / RECIPE, saved=True).data, Problems()
        splits = load_splits(config, problems)
        if split not in splits:
            raise no_split_error(config, split, splits)
        data = splits[split].keep_images(some_positions(len(splits[split].image_ids), _MOST_MEASURING, 0))
        prepared = prepare_split(found.model, data, problems, split)
        embedded = embed_split(found.model, prepared)
        hits = first_hits(
            found.calibration,
            get_distance(found.distance).matrix(*embedded),
            torch.from_numpy(prepared.data.relevance().to_dense()).float(),
            direction,
            embedded=embedded,
            population=found.calibration.metadata.get("queries", "planted"),
        )
        return Reliability.of(hits.probability, hits.match, n_bins=n_bins)

    def index(
        self,
        images: "str | os.PathLike[str] | Sequence[ImageInput] | GaussianEmbedding",
        ids: Sequence[str] | None = None,
        *,
        engine: str = "exact",
    ) -> Searcher:
        """A gallery of images in memory, to search by text.

        Args:
            images: a folder of images with its subfolders, of which unusable ones are left out and reported; or m
                images as for :meth:`embed_images`; or their embeddings.
            ids: m distinct strings. None takes the paths, relative to the folder if one was given; the row numbers of
                images without a path. Not with a folder.
            engine: see :meth:`GaussianIndex.build`.

        Returns:
            The gallery. :meth:`Searcher.save` writes it for :func:`load_index` and `sfumato search`.

        Raises:
            UserError: an image, or all of a folder, cannot be used.
            ValueError: see :meth:`GaussianIndex.build`.
        """
        if isinstance(images, str | os.PathLike):
            if ids is not None:
                raise ValueError("index: the ids of a folder are the paths of its images; leave ids out")
            folder = Path(images)
            embeddings, names, problems = embed_folder(self.retrieval_model, folder)
            if len(problems):
                say(f"{counted(len(problems), 'image')} left out:\n{problems.summary()}")
            return self._searcher(GalleryPart(embeddings, names, images={"folder": str(folder.resolve())}), engine)
        if isinstance(images, GaussianEmbedding):
            return self._searcher(GalleryPart(images, _ids(ids, range(images.n))), engine)
        names = [Path(i).as_posix() if isinstance(i, str | os.PathLike) else str(k) for k, i in enumerate(images)]
        part, features = GalleryPart(self.embed_images(images), _ids(ids, names)), features_read(self.model.image)
        sources = image_sources(images, "index", features=features)
        given = None if features else SplitImages(dict(zip(part.ids, sources, strict=False)))
        return self._searcher(part, engine, given)

    def index_texts(self, texts: Sequence[str], ids: Sequence[str] | None = None, *, engine: str = "exact") -> Searcher:
        """A gallery of texts in memory, to search by image.

        Args:
            texts: m texts.
            ids: m distinct strings; row numbers if None.
            engine: see :meth:`GaussianIndex.build`.

        Returns:
            The gallery.

        Raises:
            ValueError: see :meth:`embed_texts` and :meth:`GaussianIndex.build`.
        """
        part = GalleryPart(self.embed_texts(texts), _ids(ids, range(len(texts))), list(texts))
        return self._searcher(part, engine)

    def _searcher(self, part: GalleryPart, engine: str, given: SplitImages | None = None) -> Searcher:
        gallery = build_index(self.retrieval_model, part, model_source=self.source, engine=engine)
        return Searcher(gallery, self.source, lambda: self, lambda: given or item_images(gallery, self.source))


def _ids(ids: Sequence[str] | None, default: Sequence[object]) -> list[str]:
    return [str(i) for i in default] if ids is None else list(ids)


def load(source: str | Path, *, device: torch.device | str = "cpu") -> LoadedModel:
    """Load a model: a run, an adopted or an exported model, or a published one.

    Args:
        source: its folder or file, or its name on the Hugging Face hub.
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
        raise UserError(f"{source} holds an index or a collection; open it with sfumato.load_index({str(source)!r})")
    chosen = choose_device(device) if isinstance(device, str) else device
    return LoadedModel(load_model(source, device=chosen), str(source))


def load_index(folder: str | Path, *, run: str | Path | None = None, store: str | None = None) -> Searcher:
    """Open an index or a collection together with its model.

    Args:
        folder: what `sfumato index` or :meth:`Searcher.save` has written.
        run: folder or name of the model, if it has moved.
        store: URL of a collection's store, if it has moved.

    Returns:
        The gallery. Close it, or use it as a context manager, if it is a collection. The model is loaded when the
        first query needs it.

    Raises:
        UserError: there is no gallery; a search raises it if the model is missing or has changed.
        ValueError: the gallery is damaged.
    """
    if (Path(folder) / RECIPE).is_file():
        raise UserError(
            f"{folder} is a run, not an index; index images with sfumato.load({str(folder)!r}).index(images), or"
            f" with `{as_typed('sfumato', 'index', folder, '--split', 'all', '--out', f'{folder}-index')}`"
        )
    gallery = open_gallery(folder, store)
    source = str(run or gallery.metadata.get("run", ""))

    def open_model() -> LoadedModel:
        return LoadedModel(load_retrieval_model(gallery, folder, run), source)

    return Searcher(gallery, str(folder), open_model, lambda: item_images(gallery, source))


def search_index(
    folder: Path,
    texts: Sequence[str],
    images: Sequence[Path],
    *,
    k: int,
    ids: Sequence[str] = (),
    run: str | Path | None = None,
    store: str | None = None,
    min_probability: float | None = None,
    coverage: float | None = None,
    max_risk: float | None = None,
) -> list[Answer]:
    """Search a saved index by texts and images with the model that it was built with, or by its own items."""
    with contextlib.closing(load_index(folder, run=run, store=store)) as searcher:
        guarantees = {"min_probability": min_probability, "coverage": coverage, "max_risk": max_risk}
        foreign = images if searcher.native == "texts" else texts
        check_native(guarantees, searcher.gallery.scorer.direction, [not foreign and not ids])
        answers: list[Answer] = []
        if texts:
            queries = _vector_files(searcher.model.model, texts)
            answers += searcher.search(queries, k, modality="texts", **guarantees)
        if images:
            answers += searcher.search(list(images), k, modality="images", **guarantees)
        if ids:
            answers += searcher.search_items(ids, k)
    return answers


def _vector_files(model: DualEncoder, texts: Sequence[str]) -> list[str] | list[Path]:
    """The texts; for a model without an encoder for texts, the .npy files that they must be."""
    tower = model.text
    if not features_read(tower):
        return list(texts)
    for path in texts:
        if path.endswith(".npy") and not Path(path).is_file():
            raise UserError(f"there is no file {path}")
        if not Path(path).is_file():
            raise UserError(
                f"this index is of a model that reads embeddings, which has no encoder for {path!r}: give a .npy file"
                " of one vector instead of a text, or search by an item with --id"
            )
        if isinstance(processor := tower.processor, EmbeddingProcessor):
            try:
                values = processor.features(Path(path).read_bytes())
            except ValueError as error:
                raise UserError(f"{path}: {error}") from error
            if not values.any():
                raise UserError(f"{path}: holds zeros alone; give an embedding")
    return [Path(path) for path in texts]
