"""GaussianCollection: items that come and go, kept in a vector store, searched as exactly as the store's engine brings candidates.

A folder says what the vectors mean (distance, centre, logits, calibration, model) and, in one line, where they are:

    FOLDER/manifest.json     settings and the store's URL      FOLDER/data-xxxx/     the centre and the calibration

The folder is small and is written once; the store can be a folder inside of it or a cluster. Distances, and so the order, are
computed anew from the lifted vectors of the candidates; of these, equally far ones are ordered by id.
"""

import contextlib
import hashlib
import json
import math
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.direction import Direction
from sfumato.errors import UserError
from sfumato.files import sync_folder, write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.atomic_folder import load_folder, save_folder
from sfumato.search.gallery import Answers, Found, Gallery, Items, with_margin
from sfumato.search.lifting import lift_gallery, lift_queries, lifted_dim, lowered, query_constant
from sfumato.search.stores.protocol import Filter, Records, VectorStore
from sfumato.search.stores.store_url import anchored, create_store, open_store, without_password

_KIND = "sfumato-collection-1"
_CENTRE, _CALIBRATION, _UNFINISHED = "centre.safetensors", "calibration.json", "unfinished.txt"
_PICTURES = "pictures"
"""Folder of the pictures that a service has been given, in the collection's own."""
_BATCH = 2048
"""Items of one upsert of the store, at most."""
_COUNTED_SECONDS = 5.0
"""Other processes may write; to count a million items anew for every query would take longer than to search them."""
_SURELY, _SAMPLE = 300, 20_000
"""expected_matches adds up the closest items of a query one by one, and estimates the rest from a sample."""


class GaussianCollection(Gallery):
    """Make one with :meth:`create` or :meth:`open`; close it, or use it as a context manager.

    One process writes at a time; others may search meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        store: VectorStore,
        *,
        d: int,
        distance: str,
        centre: Tensor,
        answers: Answers,
        about: dict[str, Any],
    ) -> None:
        self.folder, self.store, self.distance, self.about = folder, store, distance, about
        self._d, self.centre, self._answers = d, centre, answers
        self._drawn: _Drawn | None = None
        self._drawing = threading.Lock()
        self._changed = 0  # items written or removed by this process
        self._counted = (-1, -math.inf, 0)  # after how many changes, when, and how many items there were

    @classmethod
    def create(
        cls,
        folder: str | Path,
        store: str = "store",
        *,
        d: int,
        distance: str = "csd",
        centre: Tensor | None = None,
        logit_scale: float = 5.0,
        logit_bias: float = 5.0,
        calibration: Calibration | None = None,
        direction: Direction = "t2i",
        about: Mapping[str, Any] | None = None,
    ) -> "GaussianCollection":
        """Make an empty collection.

        Args:
            folder: for the settings; new or empty.
            store: URL of a new store, see sfumato.search.stores.store_url; a relative path starts at the folder. A password in it is used,
                but not kept: to open the collection again it comes from the environment.
            d: dimensions of the embeddings.
            distance: one of LIFTED_DISTANCES.
            centre: (d,) that vectors are relative to, about the mean of the means to come; the origin if None.
            logit_scale, logit_bias: of the match probabilities; take the model's, calibrated.
            calibration: of the model, by the same distance; takes the place of logit_scale and logit_bias.
            direction: of the queries, "t2i" for texts that search among images.
            about: JSON values to keep with the collection.

        Raises:
            UserError: the folder holds something, or the store cannot be made.
            ValueError: the distance does not lift, or the centre is not (d,).
        """
        folder = Path(folder)
        check_empty(folder)
        if calibration is not None:
            logit_scale, logit_bias = calibration.logit_scale, calibration.logit_bias
        centre = torch.zeros(d) if centre is None else centre.detach().cpu().float()
        if centre.shape != (d,):
            raise ValueError(f"GaussianCollection: centre must have shape ({d},), got {tuple(centre.shape)}")
        fingerprint = f"sfumato {distance} {d} {secrets.token_hex(8)}"
        made = create_store(anchored(store, folder), lifted_dim(d, distance), fingerprint)
        settings = {
            "store": without_password(store),
            "fingerprint": fingerprint,
            "d": d,
            "distance": distance,
            "logit_scale": logit_scale,
            "logit_bias": logit_bias,
            "direction": direction,
            "calibration": calibration is not None,
            "about": json.loads(json.dumps(dict(about or {}), allow_nan=False)),
        }

        def write(data: Path) -> None:
            save_file({"centre": centre.contiguous()}, data / _CENTRE)
            if calibration is not None:
                calibration.save(data / _CALIBRATION)

        try:
            ours = tuple(p.name for p in folder.iterdir()) if folder.exists() else ()
            save_folder(folder, _KIND, settings, write, beside=ours)
        except BaseException:
            made.close()
            raise
        answers = Answers(logit_scale, logit_bias, calibration, direction)
        return cls(folder, made, d=d, distance=distance, centre=centre, answers=answers, about=dict(settings["about"]))

    @classmethod
    def open(cls, folder: str | Path, store: str | None = None, *, unfinished: bool = False) -> "GaussianCollection":
        """Open a collection.

        Args:
            folder: of the settings.
            store: URL of the store, if it has moved, or to give options of searching.
            unfinished: open also what :meth:`filling` was interrupted in.

        Raises:
            FileNotFoundError: there is no such folder, or no collection in it.
            ValueError: the folder is damaged or holds something else.
            UserError: the store cannot be opened, or holds other vectors, or not all that it should.
        """
        folder = Path(folder)
        if not unfinished and (folder / _UNFINISHED).is_file():
            raise UserError(f"{folder} is not whole: {(folder / _UNFINISHED).read_text(encoding='utf-8').strip()}")

        def read(data: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], Tensor, Calibration | None]:
            calibration = Calibration.load(data / _CALIBRATION) if settings["calibration"] else None
            return settings, load_file(data / _CENTRE)["centre"], calibration

        settings, centre, calibration = load_folder(folder, _KIND, read)
        opened = open_store(anchored(store or settings["store"], folder))
        if opened.fingerprint != settings["fingerprint"]:
            opened.close()
            raise UserError(
                f"{opened.url} holds the vectors of another collection than {folder}; say where its own are with --store, or build"
                " it again"
            )
        answers = Answers(settings["logit_scale"], settings["logit_bias"], calibration, settings["direction"])
        return cls(
            folder,
            opened,
            d=settings["d"],
            distance=settings["distance"],
            centre=centre,
            answers=answers,
            about=settings["about"],
        )

    @staticmethod
    def is_one(folder: str | Path) -> bool:
        """Whether a folder holds a collection, whole or not."""
        try:
            return bool(json.loads((Path(folder) / "manifest.json").read_bytes())["kind"] == _KIND)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def __enter__(self) -> "GaussianCollection":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the store."""
        self.store.close()

    @contextlib.contextmanager
    def filling(self, way_out: str) -> Iterator[None]:
        """While the block runs, and after it has died, the collection says that it is not whole, and what to do about it."""
        write_atomically(self.folder / _UNFINISHED, way_out + "\n")
        yield
        (self.folder / _UNFINISHED).unlink()
        sync_folder(self.folder)

    @property
    def answers(self) -> Answers:
        """What probabilities and promises come from."""
        return self._answers

    @property
    def d(self) -> int:
        """Dimensions of the embeddings."""
        return self._d

    def __len__(self) -> int:
        return self.store.count()

    @property
    def size(self) -> int:
        """Number of items, counted anew after every write of this process and every few seconds."""
        changed, when, n = self._counted
        if changed != self._changed or time.monotonic() > when + _COUNTED_SECONDS:
            changed, n = self._changed, len(self)
            self._counted = changed, time.monotonic(), n
        return n

    @torch.no_grad()
    def upsert(
        self,
        embeddings: GaussianEmbedding,
        ids: Sequence[str],
        payload: Mapping[str, Sequence[str]] | None = None,
        *,
        payloads: Sequence[Mapping[str, str]] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Add items, or replace those that have these ids; what this call has done survives the death of everything.

        Args:
            embeddings: (n, d); any floating dtype and device.
            ids: n distinct strings.
            payload: by name, n texts to hand out with the hits.
            payloads: instead, a dictionary for each item, not all of the same names.
            progress: called with the number of items just stored.

        Raises:
            ValueError: sizes do not fit, an id is empty or occurs twice, or a number is not finite; nothing was stored.
            UserError: the store cannot be reached or written; a repetition completes it.
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
            raise ValueError(
                f"GaussianCollection: {embeddings.n} embeddings, {len(ids)} ids and payloads of {lengths or [embeddings.n]};"
                " expected as many of each"
            )
        if embeddings.n == 0:
            return
        self.checked(embeddings)
        embeddings = embeddings.detach().to("cpu")
        records = Records(
            tuple(ids),
            lift_gallery(embeddings, self.distance, centre=self.centre),
            embeddings.total_variance.float(),
            tuple(payloads),
        )
        for start in range(0, len(records), _BATCH):
            part = records.take(range(start, min(start + _BATCH, len(records))))
            self.store.upsert(part)
            self._changed += len(part)
            if progress:
                progress(len(part))

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items.

        Returns:
            How many of these ids were there.
        """
        removed = self.store.delete(ids)
        self._changed += removed
        return removed

    def closest(self, queries: GaussianEmbedding, k: int, filter: Filter | None = None) -> list[Found]:
        """See :class:`Gallery`."""
        return [found.first(k) for found in self._candidates(queries, with_margin(k), filter)]

    def within(self, queries: GaussianEmbedding, radius: float, *, most: int | None = None) -> list[Found]:
        """See :class:`Gallery`; found by a scan of the store, whatever its engine would bring."""
        found = [Found((), torch.empty(0), torch.empty(0), ())] * queries.n
        for records in self.store.scan():
            distance = self._distances(queries, records, products=True)
            # Products round by about 1e-6 of the largest distance.
            near = distance <= radius + 1e-5 * distance.abs().amax(1, keepdim=True)
            for i in near.any(1).nonzero().flatten().tolist():
                chosen = records.take(near[i].nonzero().flatten().tolist())
                exact = self._distances(queries[i : i + 1], chosen)[0]
                inside = (exact <= radius).nonzero().flatten()
                part = chosen.take(inside.tolist())
                found[i] = _ordered(
                    found[i].ids + part.ids,
                    torch.cat([found[i].distance, exact[inside]]),
                    torch.cat([found[i].uncertainty, part.uncertainty]),
                    (*found[i].payloads, *part.payloads),
                ).first(sys.maxsize if most is None else most)
        return found

    @torch.no_grad()
    def expected_matches(self, queries: GaussianEmbedding) -> list[float]:
        """Sum of the match probabilities over the collection for each query: how many of its items should match.

        Up to 20,000 items it is the sum over them all. Of more, the closest 300 are added up, and the others estimated, without
        bias, from a sample of 20,000: a scan of the store at the first call, and again when a hundredth of the items has changed.
        """
        queries, n = self.checked(queries), self.size
        if n == 0:
            return [0.0] * queries.n
        drawn = self._sampled(_SAMPLE)
        sample = drawn.records
        rest = self._distances(queries, sample, products=True)
        probability = self.answers.match_probability(rest, n)
        if len(sample) >= n and drawn.changed == self._changed:
            return probability.sum(1).tolist()
        totals = []
        place = {i: j for j, i in enumerate(sample.ids)}
        for row, near in zip(probability, self._candidates(queries, _SURELY, None), strict=True):
            counted = [place[i] for i in near.ids if i in place]
            outside = float(row.sum() - row[counted].sum())
            share = max(0, n - len(near.ids)) / max(1, len(sample) - len(counted))
            totals.append(float(self.answers.match_probability(near.distance, n).sum()) + share * outside)
        return totals

    def items(self, ids: Sequence[str]) -> Items:
        """Those of these items that are there, in the order asked for."""
        return self._items(self.store.get(ids))

    def sample(self, n: int) -> Items:
        """At most n items, drawn evenly and the same each time as long as few change; a few less when some have gone since."""
        return self._items(self.store.get(self._sampled(n).records.ids[:n]))

    def scan(self, batch: int = 4096) -> Iterator[Items]:
        """All items, each once, in batches."""
        for records in self.store.scan(batch):
            yield self._items(records)

    def optimise(self) -> None:
        """Build what makes searching fast; searches are right without it."""
        self.store.optimise()

    def _candidates(self, queries: GaussianEmbedding, c: int, filter: Filter | None) -> list[Found]:
        """What the store brings for each query, with distances computed anew, closest first, equal ones by id."""
        return [
            _ordered(
                records.ids, self._distances(queries[i : i + 1], records)[0], records.uncertainty, records.payloads
            )
            for i, records in enumerate(self.store.search(self._lifted(queries), c, filter))
        ]

    def _lifted(self, queries: GaussianEmbedding) -> Tensor:
        return lift_queries(queries, self.distance, centre=self.centre)

    def _distances(self, queries: GaussianEmbedding, records: Records, *, products: bool = False) -> Tensor:
        """(n, c) distances: from differences, without the cancellation of an expanded product, or by products, which are faster."""
        mode = "use_mm_for_euclid_dist" if products else "donot_use_mm_for_euclid_dist"
        squared = torch.cdist(self._lifted(queries), records.vectors, compute_mode=mode).square()
        return squared + query_constant(queries, self.distance).unsqueeze(1)

    def _items(self, records: Records) -> Items:
        embeddings = lowered(records.vectors, records.uncertainty, self.distance, self.centre)
        return Items(records.ids, embeddings, records.payloads)

    def _sampled(self, n: int) -> "_Drawn":
        """At least min(n, all) records drawn evenly, kept until a hundredth of the collection has changed."""
        with self._drawing:
            size, changed, drawn = self.size, self._changed, self._drawn
            if drawn is None or len(drawn.records) < min(n, size) or 100 * drawn.moved(size, changed) > size:
                drawn = _Drawn(size, changed, _evenly(self.store.scan(), max(n, _SAMPLE), self.store.dim))
                self._drawn = drawn
            return drawn


@dataclass(frozen=True, eq=False)
class _Drawn:
    """A sample, and the state of the collection when it was begun."""

    size: int
    changed: int
    records: Records

    def moved(self, size: int, changed: int) -> int:
        """How many items have come, gone or been replaced since, as far as is known."""
        return max(changed - self.changed, abs(size - self.size))


def check_empty(folder: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        UserError: it does.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists already; give a new or empty folder (sfumato index --add adds to a collection)"
        )


def _ordered(
    ids: tuple[str, ...], distance: Tensor, uncertainty: Tensor, payloads: tuple[Mapping[str, str], ...]
) -> Found:
    """Items closest first, equally close ones by id."""
    values = distance.tolist()
    order = sorted(range(len(ids)), key=lambda j: (values[j], ids[j]))
    return Found(tuple(ids[j] for j in order), distance[order], uncertainty[order], tuple(payloads[j] for j in order))


def copy_gallery(
    source: Gallery, folder: str | Path, store: str = "store", *, progress: Callable[[int], None] | None = None
) -> GaussianCollection:
    """The same items in a new collection, with the pictures that a service was given: a snapshot, or the move to another store.

    Args:
        source: an index, or a collection; of a collection the vectors are copied bit by bit.
        folder, store: see :meth:`GaussianCollection.create`.
        progress: called with the number of items just copied.

    Raises:
        UserError: the folder holds something, or the store cannot be made.
        ValueError: the distance does not lift, so that no store can keep it.
    """
    answers = source.answers
    copy = GaussianCollection.create(
        folder,
        store,
        d=source.d,
        distance=source.distance,
        centre=source.centre,
        logit_scale=answers.logit_scale,
        logit_bias=answers.logit_bias,
        calibration=answers.calibration,
        direction=answers.direction,
        about=source.about,
    )
    try:
        with copy.filling(f"a copy was interrupted; remove it (and {copy.store.url}) and copy again"):
            if isinstance(source, GaussianCollection):
                if (source.folder / _PICTURES).is_dir():
                    shutil.copytree(source.folder / _PICTURES, copy.folder / _PICTURES)
                for records in source.store.scan(_BATCH):
                    copy.store.upsert(records)
                    if progress:
                        progress(len(records))
            else:
                for items in source.scan(_BATCH):
                    copy.upsert(items.embeddings, items.ids, payloads=items.payloads, progress=progress)
            copy.optimise()
    except BaseException:
        copy.close()
        raise
    return copy


def _evenly(batches: Iterator[Records], n: int, e: int) -> Records:
    """The n records whose ids have the smallest digests: an even sample, whatever the order that they come in."""
    kept, digests = Records.none(e), list[bytes]()
    for batch in batches:
        new = [hashlib.blake2b(i.encode(), digest_size=8).digest() for i in batch.ids]
        last = digests[-1] if len(digests) == n else b"\xff" * 9
        if not (low := [i for i, digest in enumerate(new) if digest < last]):
            continue
        part = batch.take(low)
        both = Records(
            kept.ids + part.ids,
            torch.cat([kept.vectors, part.vectors]),
            torch.cat([kept.uncertainty, part.uncertainty]),
            kept.payloads + part.payloads,
        )
        digests += [new[i] for i in low]
        order = sorted(range(len(digests)), key=digests.__getitem__)[:n]
        kept, digests = both.take(order), [digests[i] for i in order]
    return kept
