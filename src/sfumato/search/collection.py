"""GaussianCollection: items in a vector store that can change; results are exact within the store's candidates.

The store returns candidates with their lifted vectors. The collection recomputes their distances and order; equal
distances are ordered by id. The settings are in a folder (search/folder.py), the store can be in it or be a cluster.
"""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.arrays import Array, as_numpy
from sfumato.calibration.calibrator import Calibration, Scorer
from sfumato.distances.distance import squared_l2_of_centred
from sfumato.encoders.package_weights import WIDTH
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Direction, check_ids, composed
from sfumato.search import folder as folders
from sfumato.search.candidates import Candidates, GalleryRecords, ItemCount, SampledItems, Sampler, with_margin
from sfumato.search.exact import LiftedGallery, lift_gallery, lift_queries, lifted_dim, lowered, query_constant, quiet
from sfumato.search.gallery import N_WHOLE, Gallery
from sfumato.search.stores import protocol
from sfumato.search.texts import ItemTexts, TextStore

UPLOADED_IMAGES = "pictures"
"""Name of the folder, inside that of the collection, for images that were uploaded to a service."""


class GaussianCollection(Gallery, contextlib.AbstractContextManager["GaussianCollection"]):
    """Items in a vector store. Make one with :meth:`create` or :meth:`open`; close it, or use it as a context manager.

    One process writes at a time; others may search meanwhile.

    Attributes:
        folder: folder of the settings.
        store: the vector store.
        texts: the vectors of the items' texts; None if its texts are no evidence.
        distance: name of the distance, one of LIFTED_DISTANCES.
        centre: (d,) point that vectors are relative to.
        metadata: JSON values that the builder keeps with the collection.
        n_exact: number of closest items that :meth:`expected_matches` sums exactly in a large collection.
        n_sample: number of items in the sample from which it estimates the rest of the sum.
        items: counts the items.
    """

    def __init__(
        self,
        folder: Path,
        store: protocol.VectorStore,
        texts: TextStore | None,
        settings: Mapping[str, Any],
        centre: np.ndarray,
        calibration: Calibration | None,
    ) -> None:
        self.folder, self.store, self.texts, self.centre = folder, store, texts, centre
        self.distance: str = settings["distance"]
        self._version = folders.version_of(folder)
        self._set(settings, calibration)
        self.n_exact, self.n_sample = 300, N_WHOLE
        self.items = ItemCount(store.count)
        self._sampler = Sampler(store, texts)

    @classmethod
    def create(
        cls,
        folder: str | Path,
        store: str = "store",
        *,
        d: int,
        distance: str = "csd",
        centre: Array | None = None,
        logit_scale: float = 5.0,
        logit_bias: float = 5.0,
        calibration: Calibration | None = None,
        direction: Direction = "t2i",
        metadata: Mapping[str, Any] | None = None,
        texts: bool = False,
    ) -> "GaussianCollection":
        """Make an empty collection.

        Args:
            folder: for the settings; new or empty.
            store: store URL of a new store, see :mod:`sfumato.search.stores.protocol`; a relative path starts at the
                folder. A password in it is used but not kept: when the collection is opened again it comes from the
                environment.
            d: dimensions of the embeddings.
            distance: one of LIFTED_DISTANCES.
            centre: (d,) point that vectors are relative to, approximately the mean of the means to be stored; the
                origin if None.
            logit_scale: a of the match logit b - a * distance; take the value of the calibrated model.
            logit_bias: b of the match logit.
            calibration: calibration of the model for the same distance; replaces the logits.
            direction: "t2i" for texts that search among images, "i2t" for images that search among texts.
            metadata: JSON values to keep with the collection.
            texts: whether captions, title, tags and name in the payloads are evidence for searches by text;
                their vectors are in a second store beside the first.

        Returns:
            The collection, open.

        Raises:
            UserError: the folder is not empty, or the store cannot be created.
            ValueError: the distance does not lift, or the centre is not (d,).
        """
        folder = Path(folder)
        folders.check_empty(folder)
        if calibration is not None:
            logit_scale, logit_bias = calibration.logit_scale, calibration.logit_bias
        centre = np.zeros(d, np.float32) if centre is None else as_numpy(centre).astype(np.float32)
        if centre.shape != (d,):
            raise ValueError(f"GaussianCollection: centre must have shape ({d},), got {tuple(centre.shape)}")
        fingerprint = f"sfumato {distance} {d} {secrets.token_hex(8)}"
        second = protocol.beside(store) if texts else None
        if texts and second is None:
            raise UserError(f"store {protocol.without_password(store)}: this kind of store has no second one for texts")
        settings = {
            "store": protocol.without_password(store), "fingerprint": fingerprint, "d": d, "distance": distance,
            "logit_scale": logit_scale, "logit_bias": logit_bias, "direction": direction, "texts": texts,
            "about": json.loads(json.dumps(dict(metadata or {}), allow_nan=False)),
        }  # fmt: skip
        with contextlib.ExitStack() as unless_it_fails:
            made = protocol.create_store(protocol.anchored(store, folder), lifted_dim(d, distance), fingerprint)
            unless_it_fails.enter_context(protocol.closed_if_it_fails(made))
            own = None
            if second is not None:
                texts_store = protocol.create_store(protocol.anchored(second, folder), WIDTH, f"{fingerprint} texts")
                unless_it_fails.enter_context(protocol.closed_if_it_fails(texts_store))
                own = TextStore(texts_store)
            folders.write_settings(folder, settings, centre, calibration)
        return cls(folder, made, own, settings, centre, calibration)

    @classmethod
    def open(cls, folder: str | Path, store: str | None = None, *, unfinished: bool = False) -> "GaussianCollection":
        """Open a collection.

        Args:
            folder: folder of the settings.
            store: store URL, if the store has moved or to give other search options.
            unfinished: also open a collection whose :meth:`filling` was interrupted.

        Returns:
            The collection.

        Raises:
            FileNotFoundError: there is no such folder, or no collection in it.
            ValueError: the folder is damaged or holds something else.
            UserError: the store cannot be opened, or holds other vectors, or lacks items; or the folder holds an index
                of an earlier version.
        """
        folder = Path(folder)
        if folder.is_symlink():  # What it points to may change while this is open.
            folder = folder.resolve()
        folders.refuse_index(folder)
        if not unfinished:
            folders.refuse_unfinished(folder)
        settings, centre, calibration = folders.read_settings(folder)
        opened = protocol.open_store(protocol.anchored(store or settings["store"], folder))
        with protocol.closed_if_it_fails(opened):
            if opened.fingerprint != settings["fingerprint"]:
                way = "give the store of this collection with --store, or build the collection again"
                raise UserError(f"{opened.url} holds the vectors of another collection, not those of {folder}; {way}")
            second = protocol.beside(store or settings["store"]) if settings.get("texts") else None
            texts = None if second is None else TextStore(protocol.open_store(protocol.anchored(second, folder)))
        return cls(folder, opened, texts, settings, centre, calibration)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _set(self, settings: Mapping[str, Any], calibration: Calibration | None) -> None:
        self.metadata: dict[str, Any] = dict(settings["about"])
        self._scorer = Scorer(settings["logit_scale"], settings["logit_bias"], calibration, settings["direction"])

    def follow(self) -> None:
        """Read the metadata and the calibration again if another process has changed them."""
        if (version := folders.version_of(self.folder)) not in (None, self._version):
            settings, _, calibration = folders.read_settings(self.folder)
            self._version = version
            self._set(settings, calibration)

    def keep(self, values: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Change values of the metadata; what other processes have changed meanwhile stays.

        Args:
            values: JSON values by name, or a function that makes them from the metadata as they are now; others stay.
        """
        self.metadata = folders.change_metadata(self.folder, values if callable(values) else lambda now: values)

    def calibrate(self, calibration: Calibration) -> None:
        """Give the hits probabilities, those of a calibration of its model on other data than the training.

        Args:
            calibration: for the distance of the collection.
        """
        self.metadata = folders.change_metadata(self.folder, lambda now: {"calibrated": True}, calibration)
        self._scorer = Scorer(calibration.logit_scale, calibration.logit_bias, calibration, self._scorer.direction)

    def close(self) -> None:
        """Close the store."""
        self.store.close()
        if self.texts is not None:
            self.texts.store.close()

    @contextlib.contextmanager
    def filling(self, way_out: str) -> Iterator[None]:
        """Mark a new collection as incomplete while the block runs; :meth:`open` refuses it if the block never ended.

        Args:
            way_out: advice to the user for an incomplete collection; one that was whole stays open to all.

        Yields:
            Nothing.

        Raises:
            StoreInUseError: another process writes to the store; the collection is not marked.
        """
        self.begin_writing()
        new = folders.is_unfinished(self.folder) or not len(self)
        with folders.marked_unfinished(self.folder, way_out) if new else contextlib.nullcontext():
            yield

    @property
    def scorer(self) -> Scorer:
        """Computes probabilities and guarantees from distances."""
        return self._scorer

    def __repr__(self) -> str:
        return f"GaussianCollection({self.contents}, {protocol.without_password(self.store.url)!r})"

    def __len__(self) -> int:
        return self.store.count()

    @property
    def size(self) -> int:
        """Number of items, which may be a few seconds old."""
        return self.items.value

    def begin_writing(self) -> None:
        """Acquire the write lock of a store that has one, as a write does; it is held until :meth:`close`.

        Raises:
            StoreInUseError: another process writes to the store.
            UserError: the store cannot be written to.
        """
        getattr(self.store, "begin_writing", lambda: None)()

    @quiet
    def upsert(
        self,
        embeddings: GaussianEmbedding,
        ids: Sequence[str],
        payload: Mapping[str, Sequence[str]] | None = None,
        *,
        payloads: Sequence[Mapping[str, str]] | None = None,
        batch: int = 2048,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Add items, or replace those with the same ids. When it returns, the items survive the death of the process.

        Args:
            embeddings: (n, d) embeddings; any floating dtype and device.
            ids: n distinct texts of one line, none of them "." or "..".
            payload: by field name, n texts that searches return with the items.
            payloads: instead of payload, one dictionary for each item; their fields may differ.
            batch: largest number of items per write of the store.
            progress: called with the number of items just stored.

        Raises:
            ValueError: sizes do not fit, an id is not a text of one line or occurs twice, or a number is not finite;
                nothing was stored.
            UserError: the store cannot be reached or written; the same call again completes the write.
        """
        if payloads is None:
            columns = payload or {}
            lengths = sorted({len(values) for values in columns.values()} - {embeddings.n})
            payloads = [] if lengths else [{n: v[i] for n, v in columns.items()} for i in range(embeddings.n)]
        elif payload is not None:
            raise ValueError("GaussianCollection: give payload or payloads, not both")
        else:
            lengths = [len(payloads)]
        if len(ids) != embeddings.n or len(payloads) != embeddings.n:
            found = f"{embeddings.n} embeddings, {len(ids)} ids and payloads of {lengths or [embeddings.n]}"
            raise ValueError(f"GaussianCollection: {found}; expected the same number of each")
        if embeddings.n == 0:
            return
        self.checked(embeddings)
        embeddings = embeddings.numpy()
        lifted = lift_gallery(embeddings, self.distance, centre=self.centre)
        uncertainty = embeddings.total_variance.astype(np.float32)
        records = protocol.Records(tuple(ids), lifted, uncertainty, tuple(map(composed, payloads)))
        check_ids(ids, "GaussianCollection")
        for start in range(0, len(records), batch):
            part = records.take(range(start, min(start + batch, len(records))))
            there = 0 if self.items.counts_itself else len(self.store.get(part.ids))
            with self.items.writing() as note:
                if self.texts is not None:  # First, so that a stored item has its texts.
                    self.texts.upsert(part.ids, part.payloads)
                self.store.upsert(part)
                note(len(part), len(part) - there)
            if progress:
                progress(len(part))

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items.

        Args:
            ids: ids of the items; unknown ones are skipped.

        Returns:
            Number of removed items.
        """
        with self.items.writing() as note:
            removed = self.store.delete(ids)
            note(removed, -removed)
            if self.texts is not None:
                self.texts.store.delete(ids)
        return removed

    def rename(self, old: str, new: str, payload: Mapping[str, str]) -> None:
        """Give an item another id and payload; its embedding stays.

        Args:
            old: its id.
            new: its id from now on; an item of this id is replaced.
            payload: texts by name, in place of those that it had.
        """
        records, payload = self.store.get([old]), composed(payload)
        with self.items.writing() as note:
            if self.texts is not None:
                self.texts.upsert([new], [payload])
            self.store.upsert(protocol.Records((new,), records.vectors, records.uncertainty, (payload,)))
            note(1, int(old != new))
        if old != new:
            self.delete([old])

    def closest(self, queries: GaussianEmbedding, k: int, filter: protocol.Filter | None = None) -> list[Candidates]:
        """See :meth:`Gallery.closest`; equal distances are ordered by id."""
        found = []
        for i, records in enumerate(self.store.search(self._lifted(queries), with_margin(k), filter)):
            (distance,) = self._distances(queries[i : i + 1], records)
            candidates = Candidates(records.ids, distance, records.uncertainty, records.payloads).ordered()
            found.append(self._with_closest(candidates, records).first(k))
        return found

    def within(self, queries: GaussianEmbedding, radius: float, *, most: int | None = None) -> list[Candidates]:
        """See :meth:`Gallery.within`; by a scan of the store, so it is exact for every engine."""
        found = [Candidates((), np.empty(0), np.empty(0), ())] * queries.n
        for records in self.store.scan():
            distance = self._distances(queries, records, products=True)
            # Products round by about 1e-6 of the largest distance.
            near = distance <= radius + 1e-5 * np.abs(distance).max(1, keepdims=True)
            for i in np.flatnonzero(near.any(1)).tolist():
                chosen = records.take(np.flatnonzero(near[i]).tolist())
                exact = self._distances(queries[i : i + 1], chosen)[0]
                inside = np.flatnonzero(exact <= radius)
                part = chosen.take(inside.tolist())
                both = found[i].joined(Candidates(part.ids, exact[inside], part.uncertainty, part.payloads))
                found[i] = both.ordered().first(most)
        return found

    def _sampled(self, n: int, filter: protocol.Filter | None) -> SampledItems:
        """It takes a scan of the store at the first call, and again when a hundredth of the items has changed."""
        taken = self._sampler.take(self.n_sample, self.items)
        records, texts, same = taken.records, taken.texts, taken.changed == self.items.changed
        if filter is not None:
            columns = zip(records.payloads, records.uncertainty.tolist(), strict=True)
            passing = [i for i, (payload, u) in enumerate(columns) if filter.accepts(payload, u)]
            records, texts = records.take(passing), None if texts is None else texts.take(passing)
            return self._sampled_items(records, texts, len(records) >= n and same)
        whole = len(records) >= n and same
        if whole not in taken.prepared:
            taken.prepared[whole] = self._sampled_items(records, texts, whole)
        return taken.prepared[whole]

    def _sampled_items(self, records: protocol.Records, texts: ItemTexts | None, whole: bool) -> SampledItems:
        """Records of a sample, prepared for distances by products."""

        def items(column: np.ndarray) -> GaussianEmbedding:
            return lowered(records.vectors[column], records.uncertainty[column], self.distance, self.centre)

        blocks = LiftedGallery.of(records.vectors, self.distance, self.centre).distance_blocks
        return SampledItems(records.ids, items, blocks, whole, records.uncertainty, records.payloads, texts)

    def count(self, filter: protocol.Filter) -> int:
        """See :meth:`Gallery.count`."""
        return self.store.count(filter)

    def get(self, ids: Sequence[str]) -> GalleryRecords:
        """See :meth:`Gallery.get`."""
        return self._gallery_records(self.store.get(ids))

    def sample(self, n: int, *, seed: int = 0) -> GalleryRecords:
        """See :meth:`Gallery.sample`. The sample stays the same while few items change; removed items are left out."""
        taken = self._sampler.take(max(n, self.n_sample), self.items, seed)
        return self._gallery_records(self.store.get(taken.records.ids[:n]))

    def ids_after(self, after: str, n: int) -> list[str]:
        """See :meth:`Gallery.ids_after`."""
        return self.store.ids_after(after, n)

    def optimise(self) -> None:
        """Build the search structures of the store, which make searches fast. Searches are correct without them."""
        self.store.optimise()
        if self.texts is not None:
            self.texts.store.optimise()

    def _with_closest(self, found: Candidates, records: protocol.Records) -> Candidates:
        """The candidates with the embedding of the closest, if the probabilities read it."""
        if self.scorer.reference is None or not found.ids:
            return found
        return replace(found, closest=self._embeddings(records.take([records.ids.index(found.ids[0])])))

    def _embeddings(self, records: protocol.Records) -> GaussianEmbedding:
        return lowered(records.vectors, records.uncertainty, self.distance, self.centre)

    def _lifted(self, queries: GaussianEmbedding) -> np.ndarray:
        return as_numpy(lift_queries(queries, self.distance, centre=self.centre))

    def _distances(self, queries: GaussianEmbedding, records: protocol.Records, products: bool = False) -> np.ndarray:
        """(n, c) distances, from differences without cancellation, or by matrix products, which are faster."""
        lifted, vectors = self._lifted(queries), records.vectors
        if products:
            squared = squared_l2_of_centred(lifted, vectors, (lifted**2).sum(1), (vectors**2).sum(1))
        else:
            squared = np.stack([((vectors - one) ** 2).sum(1) for one in lifted])
        return as_numpy(squared + query_constant(queries, self.distance)[:, None])

    def _gallery_records(self, records: protocol.Records) -> GalleryRecords:
        return GalleryRecords(records.ids, self._embeddings(records), records.payloads)
