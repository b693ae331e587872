"""A loaded model and a gallery that knows its model: embed, search and match in one line each.

The commands search with the same objects, so that a program and `sfumato search --json` give the same numbers.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Union, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sfumato.api.answers import SearchAnswer, answer_queries
from sfumato.api.reliability_plot import Reliability
from sfumato.data.images import (
    ImageInput,
    Images,
    ImageSource,
    MemoryImage,
    Problems,
    SplitImages,
    image_sources,
    unreadable,
    vector_file,
)
from sfumato.direction import Direction
from sfumato.distances import get_distance
from sfumato.encoders.feature_rows import EmbeddingProcessor, features_read
from sfumato.errors import UserError, as_typed, counted
from sfumato.evaluation.hits import first_hits
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_probability
from sfumato.metrics.reliability import N_BINS
from sfumato.models.calibrate import some_positions
from sfumato.models.embed import embed_folder, embed_split, load_splits, no_split_error, prepare_split
from sfumato.models.pretrained import PretrainedModel
from sfumato.models.recipe import load_recipe
from sfumato.models.run import RECIPE, choose_device
from sfumato.models.unfamiliar import unfamiliar_texts
from sfumato.progress import say
from sfumato.search.gallery import Gallery, SearchRecord
from sfumato.search.guarantees import NATIVE, GuaranteeError, check_native
from sfumato.search.index import GaussianIndex
from sfumato.workflows.export import load_model
from sfumato.workflows.index import (
    GalleryPart,
    build_index,
    is_gallery,
    item_images,
    load_retrieval_model,
    open_gallery,
)

Modality = Literal["texts", "images"]

OneQuery = Union[str, "os.PathLike[str]", bytes, Image.Image]
"""A single query: a text, or an image by its path (a :class:`~pathlib.Path`), its bytes or as a Pillow image."""

_MOST_MEASURING = 3_000

_OPTIONS = {"max_risk": "max_risk (--abstain)"}
"""Options that the command has under another name."""

_DIRECTION: dict[Modality, Direction] = {"texts": "t2i", "images": "i2t"}


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
    ) -> "Searcher":
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
        ids, features = _ids(ids, names), features_read(self.retrieval_model.model.image)
        searcher = self._searcher(GalleryPart(self.embed_images(images), ids), engine)
        sources = image_sources(images, "index", features=features)
        return searcher if features else replace(searcher, given_images=dict(zip(ids, sources, strict=True)))

    def index_texts(
        self, texts: Sequence[str], ids: Sequence[str] | None = None, *, engine: str = "exact"
    ) -> "Searcher":
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

    def _searcher(self, part: GalleryPart, engine: str) -> "Searcher":
        gallery = build_index(self.retrieval_model, part, model_source=self.source, engine=engine)
        return Searcher(gallery, self.source, self)


def _ids(ids: Sequence[str] | None, default: Sequence[object]) -> list[str]:
    return [str(i) for i in default] if ids is None else list(ids)


@dataclass(eq=False)
class Searcher:
    """A gallery that knows its model, so that texts and images search it; :func:`load_index` opens one.

    Attributes:
        gallery: the index or the collection.
        source: its folder; of a gallery in memory, the source of its model.
        model: its model; loaded when the first query needs it.
        run: folder or name of the model, if it has moved.
        given_images: images by id, of a gallery in memory that was made from them.
    """

    gallery: Gallery
    source: str
    _model: LoadedModel | None = field(default=None, repr=False)
    run: str | None = None
    given_images: Mapping[str, ImageSource] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.gallery)

    def __repr__(self) -> str:
        items = "images" if self.native == "texts" else "texts"
        state = "calibrated" if self.gallery.calibrated else "not calibrated"
        return f"Searcher({len(self)} {items}, {self.gallery.distance}, {state}, {self.source!r})"

    def __enter__(self) -> "Searcher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the files and connections of a collection."""
        self.gallery.close()

    @cached_property
    def model(self) -> LoadedModel:
        """The model that the gallery was made with."""
        if self._model is not None:
            return self._model
        loaded = load_retrieval_model(self.gallery, self.source, self.run)
        return LoadedModel(loaded, str(self.run or self.gallery.metadata["run"]))

    @property
    def native(self) -> Modality:
        """The kind of queries that its probabilities are calibrated for: "texts" in a gallery of images."""
        return "texts" if NATIVE[self.gallery.scorer.direction] == "text" else "images"

    @overload
    def search(
        self,
        queries: OneQuery,
        k: int = 10,
        *,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
    ) -> SearchAnswer: ...

    @overload
    def search(
        self,
        queries: Sequence[Any] | np.ndarray | GaussianEmbedding,
        k: int = 10,
        *,
        modality: Modality | None = None,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
    ) -> list[SearchAnswer]: ...

    def search(
        self,
        queries: OneQuery | Sequence[Any] | np.ndarray | GaussianEmbedding,
        k: int = 10,
        *,
        modality: Modality | None = None,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
    ) -> SearchAnswer | list[SearchAnswer]:
        """The k closest items of a text or an image, or of each of several.

        Args:
            queries: a text; an image, as a :class:`~pathlib.Path`, the bytes of its file or a Pillow image; a list of
                texts, or of images (also arrays of uint8 pixels); or (n, d) embeddings. For a model that reads
                features, a list or an array of them in place of what it has no encoder for.
            k: number of hits; all items if the gallery is smaller.
            modality: what embeddings or features are of; None: :attr:`native`. Not with texts and images themselves.
            min_probability: leave out hits with a lower match probability.
            coverage: also return the set of items that holds a match with at least this probability.
            max_risk: largest fraction of answers with a wrong first hit; less certain queries are marked.

        Returns:
            One answer for a single text or image; for a list, an array or embeddings, a list of n answers.

        Raises:
            UserError: the model is missing, a text is empty, an image cannot be used, or a guarantee is asked for
                queries other than :attr:`native`.
            TypeError: a query has another type, or texts and images are mixed.
            ValueError: see :meth:`Gallery.search`.
        """
        single = isinstance(queries, str | os.PathLike | bytes | Image.Image)
        asked: Any = [queries] if single else queries
        kind = self._modality(asked) or modality or self.native
        if modality not in (None, kind):
            raise TypeError(f"search: the queries are {kind}; leave out modality={modality!r}")
        wanted = {"min_probability": min_probability, "coverage": coverage, "max_risk": max_risk}
        self._check_native(wanted, [kind])
        judged = None
        if isinstance(asked, GaussianEmbedding):
            names, query = [str(i) for i in range(asked.n)], asked
        elif kind == "texts":
            names = _names(asked, "text")
            if any(not name.strip() for name in names):
                raise UserError("a text to search for is empty; leave it out")
            query = self.model.embed_texts(list(asked))
            judged = unfamiliar_texts(self.model.retrieval_model, names)
        else:
            query = self.model.embed_images(asked)
            names = _names(asked, "image")
        answers = answer_queries(
            self.gallery, names, query, k, direction=_DIRECTION[kind], min_probability=min_probability,
            coverage=coverage, max_risk=max_risk, unfamiliar=judged,
        )  # fmt: skip
        answers = [answer.with_images(self.image_of) for answer in answers]
        return answers[0] if single else answers

    def search_items(self, ids: Sequence[str], k: int = 10) -> list[SearchAnswer]:
        """The k closest items of items of the gallery itself, by distance alone; the model is not loaded.

        Args:
            ids: n ids.
            k: number of hits.

        Returns:
            n answers, not calibrated.

        Raises:
            UserError: there is no such item.
        """
        found = self.gallery.get(ids)
        if missing := [i for i in ids if i not in found.ids]:
            raise UserError(
                f"{self.source} has no item {missing[0]!r} to search by; ids are those that a search returns"
            )
        rows = torch.tensor([found.ids.index(i) for i in ids], dtype=torch.long)
        answers = answer_queries(self.gallery, ids, found.embeddings[rows], k)
        return [answer.with_images(self.image_of) for answer in answers]

    def image_of(self, hit: SearchRecord) -> ImageSource | None:
        """The image of a hit, if the gallery knows where its images are.

        Args:
            hit: a hit of this gallery.

        Returns:
            Its image; None for a text, for features, and for an image that is gone.
        """
        data = None if self._images is None else self._images.read(hit.id, hit.payload)
        return None if data is None else MemoryImage(hit.id, data)

    @cached_property
    def _images(self) -> Images | None:
        if self.given_images is not None:
            return SplitImages(self.given_images)
        with contextlib.suppress(UserError):  # The data have moved: a search goes on without its images.
            return item_images(self.gallery, self.run or self.gallery.metadata.get("run", ""))
        return None

    def save(self, folder: str | Path) -> None:
        """Write an index, for :func:`load_index` and `sfumato search`. An existing index is replaced.

        Args:
            folder: made if it does not exist.

        Raises:
            TypeError: it is a collection, which is in its store already.
            ValueError: see :meth:`GaussianIndex.save`.
        """
        if not isinstance(self.gallery, GaussianIndex):
            raise TypeError(f"save: {self.source} is a collection and stores itself; copy it with copy_gallery")
        self.gallery.save(folder)

    def _modality(self, queries: Any) -> Modality | None:
        """What queries are of; None if they do not say, as the files of a model that reads embeddings of both sides."""
        found = _modality(queries)
        return None if found == "images" and features_read(self.model.retrieval_model.model.text) else found

    def _check_native(self, wanted: Mapping[str, float | None], asked: Iterable[str | None]) -> None:
        """Refuse guarantees for queries of other kinds than :attr:`native`; None is neither text nor image."""
        options = {_OPTIONS.get(name, name): value for name, value in wanted.items()}
        kinds = ["item" if kind is None else kind.removesuffix("s") for kind in asked]
        try:
            check_native(options, self.gallery.scorer.direction, kinds)
        except GuaranteeError as error:
            raise UserError(str(error)) from error


def _names(queries: Sequence[Any], noun: str) -> list[str]:
    """Texts and paths as they are, others by their number."""
    return [str(q) if isinstance(q, str | os.PathLike) else f"{noun} {i}" for i, q in enumerate(queries)]


def _modality(queries: Any) -> Modality | None:
    """What queries are of; None for embeddings and features, which do not say."""
    if isinstance(queries, GaussianEmbedding):
        return None
    if not isinstance(queries, Sequence | np.ndarray | Tensor):
        raise TypeError(
            f"search: got a {type(queries).__name__}; expected a text, a pathlib.Path or another image, a list of them,"
            " or a GaussianEmbedding"
        )
    found = {_kind(query) for query in queries}
    if len(found) > 1:
        raise TypeError("search: the queries mix texts and images; search for one kind at a time")
    if not found:
        raise ValueError("search: got no queries, expected at least one")
    return found.pop()


def _kind(query: Any) -> Modality | None:
    if isinstance(query, str):
        return "texts"
    floating = hasattr(query, "dtype") and str(query.dtype).rpartition(".")[2].startswith(("float", "bfloat"))
    return None if floating else "images"


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
    return Searcher(open_gallery(folder, store), str(folder), run=None if run is None else str(run))


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
) -> list[SearchAnswer]:
    """Search a saved index by texts and images with the model that it was built with, or by its own items."""
    with contextlib.closing(load_index(folder, run=run, store=store)) as searcher:
        guarantees = {"min_probability": min_probability, "coverage": coverage, "max_risk": max_risk}
        kinds: list[str | None] = ["texts"] * len(texts) + ["images"] * len(images) + [None] * len(ids)
        searcher._check_native(guarantees, kinds)
        answers: list[SearchAnswer] = []
        if texts:
            queries = _vector_files(searcher.model, texts)
            answers += searcher.search(queries, k, modality="texts", **guarantees)
        if images:
            answers += searcher.search(list(images), k, modality="images", **guarantees)
        if ids:
            answers += searcher.search_items(ids, k)
    return answers


def _vector_files(model: LoadedModel, texts: Sequence[str]) -> list[str] | list[Path]:
    """The texts; for a model without an encoder for texts, the .npy files that they must be."""
    tower = model.retrieval_model.model.text
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
