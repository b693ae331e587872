"""Galleries of a model: built in memory; collections are filled, copied and opened.

Other programs may compute embeddings batch by batch, on as many machines as they have: :class:`RowEmbedder` is the
function that they call for each batch of rows; they write its rows to Parquet files, and `sfumato index --data FILES`
fills a gallery from these, a batch at a time.
"""

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.fits import KNOWN_TEXTS
from sfumato.data.emoji import emoji_names
from sfumato.data.feature_tables import vectors_of
from sfumato.data.images import DIGEST, FileImage, MemoryImage, Problems
from sfumato.data.pairs import PairData
from sfumato.data.splits import WORDINGS
from sfumato.encoders.processors import EmbeddingProcessor
from sfumato.errors import UserError, counted, first_line, need, progress_bar, say
from sfumato.files import RECIPE, write_atomically
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.ids import Direction, check_ids, fits_pattern, plain_id
from sfumato.models import embed, run
from sfumato.models.calibrate import calibrate_split, describe_calibration, some_positions
from sfumato.models.embed import embedding_steps, encode_each, load_splits
from sfumato.models.model import Model, model_digest
from sfumato.search.collection import GaussianCollection
from sfumato.search.exact import gallery_centre, lifted_dim
from sfumato.search.folder import check_empty, is_collection
from sfumato.search.gallery import FEWEST_CAPTIONED, NO_PROBABILITIES, Gallery
from sfumato.search.index import GaussianIndex, copy_gallery
from sfumato.search.searcher import open_gallery
from sfumato.search.stores.protocol import closed_if_it_fails, own_or_anchored, scheme

_MOST_CAPTIONED = 1_000
"""Largest number of images whose captions calibrate a model."""


@dataclass(frozen=True, eq=False)
class GalleryPart:
    """Embedded images or texts for a gallery, all of them or a part."""

    embeddings: GaussianEmbedding  # (n, d)
    ids: Sequence[str]  # n distinct ids
    texts: Sequence[str] | None = None  # n texts if the gallery is of texts; None if it is of images
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)  # name -> n texts to store beside the images
    images: Mapping[str, str] = field(default_factory=dict)

    @property
    def direction(self) -> Direction:
        """Direction of the queries that the model was trained for."""
        return "t2i" if self.texts is None else "i2t"

    @property
    def payload(self) -> dict[str, Sequence[str]]:
        """The data stored beside the embeddings: the texts, or the kept values of the images and the names of emoji."""
        if self.texts is not None:
            return {"text": self.texts}
        names = emoji_names() if all("/" in i for i in self.ids) else {}
        labels = [names.get(i.split("/")[0], "") for i in self.ids]
        return {**self.kept, **({"label": labels} if all(labels) else {})}


def build_index(model: Model, source: GalleryPart) -> GaussianIndex:
    """An index in memory with the model's distance, its calibration and the source of the model."""
    return GaussianIndex.build(source.embeddings, source.ids, payload=source.payload, **_settings(model, source))


def create_collection(
    model: Model, like: GalleryPart, folder: str | Path, store: str = "store", *, texts: bool = False
) -> GaussianCollection:
    """Create an empty collection for the embeddings of a model; with texts these are evidence for its searches."""
    settings, centre = _settings(model, like), gallery_centre(like.embeddings)
    made = GaussianCollection.create(folder, store, d=like.embeddings.d, centre=centre, texts=texts, **settings)
    if (own := _folder_of(model)) is not None and (own / KNOWN_TEXTS).exists():
        write_atomically(made.folder / KNOWN_TEXTS, (own / KNOWN_TEXTS).read_bytes())
    return made


def embed_source(
    model: Model, *, images: Path | None = None, split: str | None = None, texts: Path | None = None
) -> tuple[Iterator[GalleryPart], Problems]:
    """Embed the items of a gallery; exactly one of images, split and texts must be given."""
    if images is not None and isinstance(model.model.image.processor, EmbeddingProcessor):
        embeddings, ids, problems = embed.embed_table(model, str(images))
        source = GalleryPart(embeddings, ids)
    elif images is not None:
        embeddings, ids, problems = embed.embed_folder(model, images)
        source = GalleryPart(embeddings, ids, images={"folder": str(images.resolve())})
    elif texts is not None:
        lines, ids, problems = embed.read_lines(texts)
        source = GalleryPart(model.model.embed_texts(lines), ids, lines)
    else:
        assert isinstance(model, run.Run) and split is not None, "a split is of a run's data"
        embeddings, ids, problems = embed.embed_split_images(model, model.recipe.data, split)
        source = GalleryPart(embeddings, ids, images={"split": split})
    return iter([source]), problems


def fill_collection(
    model: Model, sources: Iterator[GalleryPart], folder: Path, store: str | None
) -> GaussianCollection:
    """Store embedded items in a new collection, or, if store is None, in an existing one."""
    if (first := next(sources, None)) is None:
        raise UserError("there is nothing to index: no item could be embedded")
    if store is None:
        collection = GaussianCollection.open(folder, unfinished=True)
        check_same(collection, model, first.direction)
        _check_images(collection, first.images)
    else:
        collection = create_collection(model, first, folder, own_or_anchored(store))
    stored, trained = 0, 0 if store is not None else collection.metadata.get("trained", 0)
    way_out = "it was interrupted while being filled; run the same command again with --add"
    with closed_if_it_fails(collection), collection.filling(way_out):
        for source in itertools.chain([first], sources):
            there = {*collection.get(source.ids).ids}
            trained += n_trained(model, [i for i in source.ids if i not in there], source.images)
            with progress_bar(f"storing, after {stored}", len(source.ids)) as advance:
                collection.upsert(source.embeddings, source.ids, source.payload, progress=advance)
            stored += len(source.ids)
        collection.optimise()
        collection.keep({"trained": trained})
    return collection


def copy_index(folder: str | Path, out: str | Path, store: str, *, source_store: str | None = None) -> tuple[str, int]:
    """Copy a collection into a new one. Returns (URL of the new store, number of items in it)."""
    with (
        contextlib.closing(open_gallery(folder, source_store)) as gallery,
        progress_bar("copying", len(gallery)) as advance,
        copy_gallery(gallery, out, own_or_anchored(store), progress=advance) as copied,
    ):
        return copied.store.url, len(copied)


def delete_items(folder: Path, ids: Sequence[str]) -> tuple[int, list[str]]:
    """Delete the items with some ids, or that fit shell patterns; first it says how many fit.

    Returns their number, and the ids and patterns without an item.
    """
    if not is_collection(folder):
        raise UserError(f"{folder} is no collection, so nothing can be deleted; sfumato index --data makes one")
    with GaussianCollection.open(folder) as collection:
        known, unknown = set(collection.get(list(dict.fromkeys(ids))).ids), list[str]()
        for pattern in [i for i in dict.fromkeys(ids) if i not in known]:
            fit: set[str] = set()
            if not {*"*?"}.isdisjoint(pattern):  # "photo[1].jpg" is a usual name.
                fit = {i for records in collection.store.scan() for i in records.ids if fits_pattern(i, pattern)}
            if fit:
                say(f"{pattern}: {counted(len(fit), 'item')} fit{'s' * (len(fit) == 1)}")
            unknown += [] if fit else [pattern]
            known |= fit
        return remove_items(collection, sorted(known)), unknown


def remove_items(collection: GaussianCollection, ids: Sequence[str]) -> int:
    """Delete items of a collection. Their files stay, and a synchronisation leaves them out."""
    if collection.metadata.get("sources"):
        with contextlib.suppress(OSError):  # A service may not write to the folder.
            collection.keep(lambda now: {"removed": sorted({*now.get("removed", []), *ids})})
    return collection.delete(ids)


def check_same(collection: GaussianCollection, model: Model, direction: Direction) -> None:
    """Refuse to add embeddings by another model or of another kind; the collection is closed."""
    if collection.metadata.get("model") != model_digest(model.model) or collection.scorer.direction != direction:
        collection.close()
        found = f"{collection.folder} holds embeddings by the model of {collection.metadata.get('run')}"
        raise UserError(f"{found}; add only embeddings of the same kind by the same model")


def _check_images(collection: GaussianCollection, added: Mapping[str, Any]) -> None:
    """Refuse images that are elsewhere than those of the collection, since they could not be shown."""
    kept = collection.metadata.get("pictures") or {}
    if kept != added:
        places = [p.get("folder") or (f"the {p['split']} split" if p else "an unknown folder") for p in (kept, added)]
        found = f"the images of {collection.folder} are in {places[0]}, and those of the new items in {places[1]}"
        way = "add the folder itself with --data, or index them into another collection"
        raise UserError(f"{found}: the new images could not be shown; {way}")


def check_new(folder: Path, distance: str, store: str) -> None:
    """Check the arguments of a new collection before anything is embedded."""
    check_empty(folder)
    lifted_dim(1, distance)
    scheme(store)


def _settings(model: Model, source: GalleryPart) -> dict[str, Any]:
    """The distance and the direction of a gallery, its probabilities, and its metadata."""
    calibration, n_trained = choose_calibration(model, source.ids, source.images)
    fitted = model if calibration is None else calibration
    metadata = {"run": source_of(model), "model": model_digest(model.model), "calibrated": model.calibrated}
    metadata |= {"pictures": dict(source.images), "trained": n_trained}
    told = {"distance": model.distance, "direction": source.direction, "metadata": metadata}
    return told | {"logit_scale": fitted.logit_scale, "logit_bias": fitted.logit_bias, "calibration": calibration}


def source_of(model: Model) -> str:
    """Where a model was loaded from, from any folder."""
    own = _folder_of(model)
    return model.source if own is None else str(own.resolve())


def _folder_of(model: Model) -> Path | None:
    """The folder that a model was loaded from; None for the model of the package and for those of a hub."""
    folder = Path(model.source)
    return folder if model.source != run.SMALL and folder.exists() else None


def choose_calibration(model: Model, ids: Sequence[str], images: Mapping[str, str]) -> tuple[Calibration | None, int]:
    """The calibration of a gallery, and how many of its images trained the model.

    A run whose training left some texts out has two: one for images that it has not seen, and one for galleries in
    which at least half of the images are of the training.
    """
    trained, folder = n_trained(model, ids, images), _folder_of(model)
    fitted = run.load_calibration(folder, run.TRAINING_CALIBRATION) if trained and folder else None
    return (fitted if fitted is not None and 2 * trained >= len(ids) else model.calibration), trained


def n_trained(model: Model, ids: Sequence[str], images: Mapping[str, str]) -> int:
    """How many of the images trained the model; known by their content, wherever they lie."""
    folder = _folder_of(model)
    if not images or folder is None or not any(True for _ in getattr(model.model, "parameters", tuple)()):
        return 0
    if "split" not in images:
        known = run.trained_digests(folder)
        return sum(run.image_digest(FileImage(Path(images["folder"], i))) in known for i in ids) if known else 0
    with contextlib.suppress(UserError):  # The data are gone.
        from sfumato.models.recipe import load_recipe  # Runs need torch.

        train = load_splits(load_recipe(folder / RECIPE).data, Problems()).get("train")
        return 0 if train is None else len(set(ids).intersection(map(plain_id, train.image_ids)))
    return 0


def keep_trained(collection: GaussianCollection, model: Model) -> None:
    """Keep how many images of a collection trained a model; payloads have the digests of their files."""
    if known := run.trained_digests(Path(model.source)):
        payloads = (payload for records in collection.store.scan() for payload in records.payloads)
        collection.keep({"trained": sum(payload.get(DIGEST) in known for payload in payloads)})


def calibrate_by_captions(collection: GaussianCollection, model: Model) -> str:
    """Fit the probabilities of a model that has none on captions of the collection's own images; returns a note."""
    if collection.calibrated:
        return training_note(collection)
    scanned = (zip(records.ids, records.payloads, strict=True) for records in collection.store.scan())
    lines = {i: payload.get("captions", "").split("\n") for pairs in scanned for i, payload in pairs}
    captions = {i: [*filter(str.strip, lines[i])] for i in sorted(lines) if any(map(str.strip, lines[i]))}
    if len(captions) < FEWEST_CAPTIONED:
        return f"Note: {NO_PROBABILITIES} ({counted(len(captions), 'image')} with captions here)"
    found = collection.get([[*captions][j] for j in some_positions(len(captions), _MOST_CAPTIONED, 0)])
    texts = {text: j for j, text in enumerate(dict.fromkeys(text for i in found.ids for text in captions[i]))}
    pairs = np.array([(n, texts[text]) for n, i in enumerate(found.ids) for text in captions[i]])
    images, numbers = tuple(MemoryImage(i, b"") for i in found.ids), tuple(map(str, texts.values()))
    data = PairData(found.ids, images, numbers, tuple(texts), ("caption",) * len(texts), pairs)
    try:
        sides = found.embeddings, model.embed_texts([*texts])
        collection.calibrate(calibrate_split(sides, data, collection.distance, split="captions"))
    except (ValueError, UserError) as error:  # They do not say enough, or the model reads no texts.
        return f"the captions of {len(images):,} images do not calibrate {model.source}: {error}"
    fitted = f"The probabilities were fitted on {len(texts):,} captions of {len(images):,} of these images"
    return " ".join(filter(None, (f"{fitted}.", training_note(collection))))


def training_note(gallery: Gallery) -> str:
    """What the probabilities of a gallery with training images are worth."""
    trained, n, calibration = gallery.metadata.get("trained", 0), len(gallery), gallery.scorer.calibration
    if not trained or calibration is None:
        return ""
    which = "All images trained the model" if trained >= n else gallery.note
    if calibration.metadata.get("split") != WORDINGS:
        fitted = f"{which}, and the probabilities were fitted on images that training left out"
        way = "Train with data.held_out_wordings=0/5 for probabilities that hold in such a gallery"
        return f"{fitted}: here they are a rough guide. {way}"
    found = describe_calibration(calibration)["t2i"]
    left_out = f"{found['n_queries']:,} captions that training left out"
    note = f"{which}. The probabilities are for new captions of training images: they were fitted on {left_out}"
    if (first := found.get("first_hit")) is not None:
        note += f", of which {first['rate']:.0%} find their image first (expected: {first['mean_probability']:.0%})"
    return note


_ROW_COLUMNS = {"id", "mean", "log_var", "model"}
_ROWS = 4096
"""Rows in memory at a time."""


class RowEmbedder:
    """A model as a function of a batch of rows, for Ray Data's `map_batches` and its like.

    A batch is a dictionary of columns: `id`, and `bytes` with image files or `text`. The result has the same columns
    without `bytes`, and `mean`, `log_var` and `model`. Rows that cannot be embedded are left out with a warning.
    """

    def __init__(self, model: str, *, modality: Literal["images", "texts"] = "images") -> None:
        loaded = run.load_model(model)
        self._column = "bytes" if modality == "images" else "text"
        tower = loaded.model.image if modality == "images" else loaded.model.text
        self._prepare, self._encode = embedding_steps(tower, modality)
        self._digest = model_digest(loaded.model)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Embed a batch."""
        if missing := {"id", self._column} - batch.keys():
            raise UserError(f"RowEmbedder: no column {' and '.join(sorted(missing))}; got {', '.join(batch)}")
        ready: list[tuple[int, Any]] = []
        for row, item in enumerate(batch[self._column]):
            try:
                ready.append((row, self._prepare(item)))
            except (ValueError, OSError, MemoryError) as error:
                self._leave_out(batch["id"][row], error)
        kept, rows = encode_each(self._encode, ready, lambda row, error: self._leave_out(batch["id"][row], error))
        found = GaussianEmbedding.cat(rows) if rows else GaussianEmbedding.point(np.empty((0, 0)))
        named = {name: [values[row] for row in kept] for name, values in batch.items() if name != "bytes"}
        numbers = vars(found.numpy())
        return named | {name: list(value) for name, value in numbers.items()} | {"model": [self._digest] * len(kept)}

    def _leave_out(self, id: str, error: Exception) -> None:
        warnings.warn(f"{id} is left out: {error}", stacklevel=2)


def is_embedded(data: str | Path) -> bool:
    """Whether a name is a Parquet file, or a folder of such files, with rows of :class:`RowEmbedder`."""
    path = Path(data)
    if path.suffix.lower() != ".parquet" and not (path.is_dir() and any(path.glob("*.parquet"))):
        return False
    return path.exists() and {"mean", "log_var"} <= set(_dataset(path).schema.names)


def embedded_parts(model: Model, data: str | Path, images: Path | None = None) -> Iterator[GalleryPart]:
    """The rows of Parquet files, some at a time; `images` is the folder in which the ids are paths of images."""
    table = _dataset(Path(data))
    if missing := _ROW_COLUMNS - set(table.schema.names):
        raise UserError(f"{data}: no column {' and '.join(sorted(missing))}; RowEmbedder writes them")
    digest, folder = model_digest(model.model), {} if images is None else {"folder": str(images.resolve())}

    def parts() -> Iterator[GalleryPart]:
        for batch in table.to_batches(batch_size=_ROWS):
            if not batch.num_rows:
                continue
            numbers = ("mean", "log_var")
            rows = batch.drop_columns(list(numbers)).to_pydict()
            if set(rows["model"]) != {digest}:
                raise UserError(f"{data} holds embeddings by another model; give that model, or embed again")
            check_ids(rows["id"], f"{data}")
            mean, log_var = (vectors_of([batch.column(name)], f"{data}: the vectors of {name}") for name in numbers)
            embeddings = GaussianEmbedding(mean.astype(np.float32), log_var.astype(np.float32))
            check_finite(embeddings, str(data))
            others = {name: values for name, values in rows.items() if name not in _ROW_COLUMNS}
            kept = {name: values for name, values in others.items() if all(isinstance(one, str) for one in values)}
            yield GalleryPart(embeddings, rows["id"], kept.pop("text", None), kept, folder)

    return parts()


def _dataset(path: Path) -> Any:
    with need("parquet", f"{path}: Parquet files need pyarrow"):
        import pyarrow
        import pyarrow.dataset
    try:
        return pyarrow.dataset.dataset(path, format="parquet")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a complete Parquet file ({first_line(error)})") from error
