"""Embedding collections of any size: bounded memory, resumable, in as many independent jobs as there are machines.

Worker threads read, decode and resize; this thread runs the encoder and writes the parts. Threads, because Pillow decodes and resizes
without the interpreter's lock: they were faster than processes with these readers (docs/guides/ingest.md). What a part holds depends on
the listing and the model alone, never on the number of jobs or workers, or on where an earlier job stopped.
"""

import hashlib
import itertools
import os
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer

from sfumato.data.listings import Entry, Listing, list_folder, list_manifest, list_shards, list_texts
from sfumato.data.manifest import PICTURE_ENDINGS
from sfumato.data.problems import Problem, Problems
from sfumato.data.region_features import REGION_ENDINGS, regions_from_bytes
from sfumato.data.shards import ShardError
from sfumato.data.transforms import check_image, decode_image
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.features import PixelStore, RaggedStore
from sfumato.encoders.processors import FrozenProcessor, ImageFileProcessor, PixelProcessor, processors
from sfumato.encoders.regions import RegionProcessor, stacked, uses_regions
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.progress import progress_bar
from sfumato.search.parts import Embedded, PartAbout, PartName, begin, read_about, write_job, write_part

PART_SIZE = 4096
"""Most items of a part, if nothing else is said: what a job that is killed has to do again."""

_ENOUGH_TO_JUDGE = 1000
_FEW_UNREAD = 10
_UNFINISHED = re.compile(r"\.part-(\d+).*\.tmp")


class Embedder(Protocol):
    """A dual encoder and the name of its distance: a run, or a published model."""

    @property
    def model(self) -> DualEncoder:
        """Images and texts to Gaussians."""
        ...

    @property
    def distance(self) -> str:
        """Name of the distance between them."""
        ...


@dataclass(frozen=True)
class Ingested:
    """What a job has done.

    Attributes:
        out: folder of the parts.
        job, of: number of this job, from 0, and how many there are.
        n: embeddings in the job's parts.
        new: those of them that were made now.
        parts: number of the job's parts.
        seconds: that making them took, without loading the model.
        problems: what is left out of the job's parts, in the order of the listing.
    """

    out: Path
    job: int
    of: int
    n: int
    new: int
    parts: int
    seconds: float
    problems: Problems

    @property
    def per_second(self) -> float | None:
        """Embeddings made in a second; None if there was nothing to do."""
        return self.new / self.seconds if self.new else None

    def to_json(self) -> dict[str, Any]:
        """The figures, without the list of problems."""
        return {
            **{key: getattr(self, key) for key in ("job", "of", "n", "new", "parts", "seconds", "per_second")},
            "out": str(self.out),
            "problems": len(self.problems),
        }


def embed_collection(
    retrieval_model: Embedder,
    listing: Listing,
    out: str | Path,
    *,
    job: int = 0,
    of: int = 1,
    workers: int | None = None,
    batch_size: int = 64,
    max_problem_share: float = 0.01,
    home: str | Path = "",
) -> Ingested:
    """Embed one job's share of a collection into a folder of parts, or go on where an earlier one stopped.

    Jobs need not know of each other: each writes the parts of its sections, number ``job``, ``job + of``, ... A part that is there is
    not made again. Any number of jobs gives the same parts, to the bit where the encoder computes a batch to the same bits each time
    (a CPU with equal threads); another ``batch_size`` or device changes embeddings by rounding.

    What cannot be used is left out, listed in the part, and reported again by a job that finds the part made. A shard that cannot be
    read as a whole is no such thing: its part is not written, the others are, and then the job ends with an error. Memory holds the
    embeddings of a part or two and the decoded pictures of three batches, whatever the size of the collection, beside the listing.

    Args:
        matcher: whose model embeds, on the device where it is.
        listing: what to embed; see :mod:`sfumato.data.listings`.
        out: folder of the parts, made if it is not there; all jobs of a collection share it. Read it with
            :func:`sfumato.search.parts.read_parts`.
        job: number of this job, in [0, of).
        of: number of jobs.
        workers: threads that read and decode; None for as many as this process has processors.
        batch_size: items that the encoder takes at a time.
        max_problem_share: largest tolerated share of unusable items among this job's; up to three are never too many. Looked at from
            the first thousand items on, and at the end; the part that makes it too large is not written.
        home: folder or name of the model, to be kept with the embeddings.

    Returns:
        What was done. problems.jsonl (of several jobs problems-JOB-of-OF.jsonl) and job-JOB-of-OF.json in ``out`` say the same.

    Raises:
        UserError: ``out`` holds embeddings of something else, too much is unusable, nothing can be used, or a shard could not be read.
        ValueError: a number is out of its range.
        OSError: ``out`` cannot be written to.

    Example:
        >>> from sfumato.data.listings import list_folder
        >>> from sfumato.search.parts import read_parts
        >>> from sfumato.models.export import load_model
        >>> done = embed_collection(load_model("runs/mine"), list_folder("pictures", part_size=4096), "out")  # doctest: +SKIP
        >>> for ids, embeddings, payloads in read_parts("out"): ...  # doctest: +SKIP
    """
    workers = processors() if workers is None else workers
    if of < 1 or not 0 <= job < of:
        raise ValueError(f"embed_collection: job must be in [0, of), got {job} of {of}")
    for name, value in (("workers", workers), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"embed_collection: {name} must be at least 1, got {value}")
    out = Path(out)
    digest = model_digest(retrieval_model.model)
    embedded = Embedded(
        listing.modality, digest, listing.kind, listing.n, listing.digest, listing.part_size, listing.sections,
        home=str(Path(home).resolve()) if home and Path(home).exists() else str(home),
        path=os.path.abspath(listing.path) if os.path.exists(listing.path) else listing.path,
        distance=retrieval_model.distance,
    )  # fmt: skip
    begin(out, embedded)
    write_job(out, job, of, {"finished": False})
    _remove_unfinished(out, job, of)
    share = _Share(listing, out, embedded.identity, job, of, max_problem_share)
    tower = retrieval_model.model.image if listing.modality == "images" else retrieval_model.model.text
    prepare, encode = embedding_steps(tower, listing.modality)
    in_shards = listing.kind == "shards"
    start, there = time.perf_counter(), share.usable
    try:
        title = f"embedding {'shards' if in_shards else listing.modality}"
        prepared = _in_threads(share.tasks(), prepare, workers, ahead=2 * max(batch_size, workers))
        with progress_bar(title, share.left) as advance, closing(prepared) as ready:
            for (name, parts), group in itertools.groupby(ready, key=lambda item: (item[0].name, item[0].parts)):
                share.write()  # Only now: the last part waits for the last judgement.
                for batch in _batches(group, batch_size, share):
                    share.add(*_encoded(encode, batch, share))
                    advance(0 if in_shards else len(batch))
                share.finish(name, parts)
                advance(1 if in_shards and name.number == parts - 1 else 0)
        share.judge(end=not share.unread)
        share.write()
        if share.unread:
            listed = "\n".join(f"  {shard}: {reason}" for shard, reason in sorted(share.unread.items())[:_FEW_UNREAD])
            more = len(share.unread) - _FEW_UNREAD
            raise UserError(
                f"{len(share.unread)} of {listing.n} shards could not be read, and their parts are not written; see to them, and start"
                f" the same command again, which does what is missing:\n{listed}"
                + (f"\n  ... and {more} more" if more > 0 else "")
            )
    finally:
        problems = share.all_problems()
        problems.write(out / (f"problems-{job}-of-{of}.jsonl" if of > 1 else "problems.jsonl"))
    seconds = time.perf_counter() - start
    done = Ingested(out, job, of, share.usable, share.usable - there, len(share.problems_of), seconds, problems)
    write_job(out, job, of, {"finished": True, **done.to_json(), "workers": workers, "batch_size": batch_size})
    return done


def list_source(
    *,
    images: Path | None = None,
    manifest: Path | None = None,
    shards: str | None = None,
    texts: Path | None = None,
    part_size: int = PART_SIZE,
    endings: frozenset[str] = PICTURE_ENDINGS,
) -> Listing:
    """The listing of the one source that is given.

    Args:
        images, manifest, shards, texts: see :func:`~sfumato.data.listings.list_folder`, ``list_manifest``, ``list_shards`` and
            ``list_texts``.
        part_size: most items of a part.
        endings: of the files of a folder that count; see :func:`file_endings`.

    Raises:
        UserError: none is given, or several, or it cannot be read.
        ValueError: part_size is less than 1.
    """
    if sum(source is not None for source in (images, manifest, shards, texts)) != 1:
        raise UserError("give one of --images FOLDER, --manifest FILE, --shards PATTERN and --texts FILE")
    if images is not None:
        return list_folder(images, part_size=part_size, endings=endings)
    if manifest is not None:
        return list_manifest(manifest, part_size=part_size)
    if shards is not None:
        return list_shards(shards, part_size=part_size)
    return list_texts(texts or Path(), part_size=part_size)


def file_endings(model: DualEncoder) -> frozenset[str]:
    """Endings of the files that a model embeds as images: pictures, or region features."""
    return REGION_ENDINGS if uses_regions(model) else PICTURE_ENDINGS


def which_job(shard: str | None) -> tuple[int, int]:
    """The job that "I/N" means, I counted from 0; without it RANK of WORLD_SIZE as torchrun sets them, else 0 of 1.

    Raises:
        UserError: it is not of this form, or I is not in [0, N).
    """
    if shard is None:
        shard = f"{os.environ.get('RANK', '0')}/{os.environ['WORLD_SIZE']}" if "WORLD_SIZE" in os.environ else "0/1"
    found = re.fullmatch(r"(\d+)/(\d+)", shard, re.ASCII)
    if not found or not int(found[1]) < int(found[2]):
        raise UserError(f"--shard {shard}: expected I/N with I from 0 to N - 1, as in 0/8, ..., 7/8")
    return int(found[1]), int(found[2])


def model_digest(model: DualEncoder) -> str:
    """Of a model's weights and of the settings of its readers and heads; where it lies and computes does not matter."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for part in (model.image.processor, model.image.head, model.text.processor, model.text.head):
        digest.update(type(part).__name__.encode())
        known = {"backbone": part.backbone.fingerprint} if isinstance(part, FrozenProcessor) else vars(part)
        for key, value in sorted(known.items()):
            if key.startswith("_") or key in ("training", "workers"):
                continue
            if isinstance(value, Tokenizer):
                digest.update(value.to_str().encode())
            elif isinstance(value, int | str):
                digest.update(f"{key}={value}".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Task:
    """An item on its way."""

    name: PartName
    parts: int
    entry: Entry


@dataclass
class _Share:
    """What one job has to do, and has done."""

    listing: Listing
    out: Path
    identity: str
    job: int
    of: int
    max_problem_share: float
    usable: int = 0
    left: int = 0
    problems: Problems = field(default_factory=Problems)
    problems_of: dict[tuple[int, int], list[Problem]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._todo: list[tuple[int, dict[int, PartAbout]]] = []
        self._waiting: Callable[[], None] | None = None
        self._reset()
        for section in range(self.job, self.listing.sections, self.of):
            first = self._there(section, 0)
            there = {0: first} if first else {}
            for number in range(1, first.parts if first else 1):
                if about := self._there(section, number):
                    there[number] = about
            for number, about in there.items():
                self.usable += about.n
                self.problems_of[section, number] = [Problem(**problem) for problem in about.problems]
                self.problems.items += self.problems_of[section, number]
            if first is None or len(there) < first.parts:
                self._todo.append((section, there))
                in_list = min(self.listing.part_size, self.listing.n - section * self.listing.part_size)
                self.left += 1 if self.listing.kind == "shards" else in_list

    def _there(self, section: int, number: int) -> PartAbout | None:
        name = PartName(section, number)
        about = read_about(self.out, name)
        if about is not None and about.collection != self.identity:
            raise UserError(f"{self.out / name.file} belongs to another collection; remove it, or give another --out")
        return about

    def tasks(self) -> Iterator[_Task]:
        """The items of the parts that are missing; a section is listed when its turn comes."""
        size = self.listing.part_size
        for section, there in self._todo:
            try:
                entries = self.listing.entries(section)
            except ShardError as error:
                self.unread[error.shard] = error.reason
                continue
            parts = -(-len(entries) // size)
            if changed := next((about.parts for about in there.values() if about.parts != parts), 0):
                raise UserError(
                    f"section {section} of {self.listing.path} has changed: it had {changed} parts, and now has {parts}; embed the"
                    " collection into another --out"
                )
            for number in range(parts):
                if number not in there:
                    for entry in entries[number * size : (number + 1) * size]:
                        yield _Task(PartName(section, number), parts, entry)

    def leave_out(self, entry: Entry, error: Exception) -> None:
        """Note an item that cannot be used."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.problems.add(entry.place, reason or type(error).__name__)
        self._left_out.append(self.problems.items[-1])
        self.judge()

    def give_up(self, error: ShardError) -> None:
        """Leave the part that is being made unwritten."""
        self.unread[error.shard] = error.reason
        self.usable -= len(self._entries)
        del self.problems.items[len(self.problems) - len(self._left_out) :]
        self._reset()
        self._given_up = True

    def add(self, entries: Sequence[Entry], embeddings: Sequence[GaussianEmbedding]) -> None:
        """Take the embeddings of some items into the part that is being made."""
        self._entries += entries
        self._embeddings += embeddings
        self.usable += len(entries)

    def finish(self, name: PartName, parts: int) -> None:
        """The part is made, unless it was given up; it is written by the next :meth:`write`."""
        if self._given_up:
            self._reset()
            return
        embeddings = GaussianEmbedding.cat(self._embeddings or [GaussianEmbedding.point(torch.empty(0, 0))])
        left_out = [{"place": problem.place, "reason": problem.reason} for problem in self._left_out]
        about = PartAbout(self.identity, embeddings.n, parts, left_out)
        ids, payloads = [entry.id for entry in self._entries], [entry.payload for entry in self._entries]
        self.problems_of[name.section, name.number] = self._left_out
        self._waiting = lambda: write_part(self.out, name, about, embeddings, ids, payloads)
        self._reset()

    def write(self) -> None:
        """Write the part that waits, if one does."""
        if self._waiting is not None:
            self._waiting()
        self._waiting = None

    def judge(self, *, end: bool = False) -> None:
        """Stop when too much is unusable."""
        total = self.usable + len(self.problems)
        if end and self.of == 1 and not self.usable:
            raise UserError(f"none of {total} {self.listing.modality} can be used:\n{self.problems.summary()}")
        if end or total >= _ENOUGH_TO_JUDGE:
            self.problems.check(self.usable, self.max_problem_share, setting="--max-problem-share ")

    def all_problems(self) -> Problems:
        """In the order of the listing."""
        result = Problems()
        result.items = [problem for _, part in sorted(self.problems_of.items()) for problem in part] + self._left_out
        return result

    def _reset(self) -> None:
        self._entries: list[Entry] = []
        self._embeddings: list[GaussianEmbedding] = []
        self._left_out: list[Problem] = []
        self._given_up = False


def _in_threads(
    tasks: Iterable[_Task], prepare: Callable[[bytes | str], Any], workers: int, *, ahead: int
) -> Generator[tuple[_Task, Any], None, None]:
    """(task, what was prepared or the exception) in order; at most ``ahead`` are begun before one is asked for."""

    def work(task: _Task) -> Any:
        try:
            return prepare(task.entry.read())
        except (ValueError, OSError, MemoryError, ShardError) as error:
            return error

    begun: deque[tuple[_Task, Future[Any]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="ingest")
    try:
        for task in tasks:
            begun.append((task, pool.submit(work, task)))
            if len(begun) >= ahead:
                first, future = begun.popleft()
                yield first, future.result()
        while begun:
            first, future = begun.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(group: Iterable[tuple[_Task, Any]], size: int, share: _Share) -> Iterator[list[tuple[Entry, Any]]]:
    """The usable items of a part, ``size`` at a time; no more of them once its shard cannot be read."""
    batch: list[tuple[Entry, Any]] = []
    for task, value in group:
        if isinstance(value, ShardError):
            share.give_up(value)
            return
        if isinstance(value, Exception):
            share.leave_out(task.entry, value)
            continue
        batch.append((task.entry, value))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _encoded(
    encode: Callable[[list[Any]], GaussianEmbedding], batch: Sequence[tuple[Entry, Any]], share: _Share
) -> tuple[list[Entry], list[GaussianEmbedding]]:
    """The items that have an embedding, and the embeddings; one that spoils a batch is found by asking for each alone."""
    entries = [entry for entry, _ in batch]
    try:
        embeddings = encode([value for _, value in batch])
    except (ValueError, OSError) as error:
        if len(batch) == 1:
            share.leave_out(entries[0], error)
            return [], []
        alone = [_encoded(encode, [item], share) for item in batch]
        return [e for found, _ in alone for e in found], [e for _, found in alone for e in found]
    wrong = ~embeddings.mean.isfinite() | embeddings.log_var.isnan() | embeddings.log_var.isposinf()
    if (rows := wrong.any(1)).any():
        for row in rows.nonzero()[:, 0].tolist():
            share.leave_out(entries[row], ValueError("its embedding holds NaN or infinity"))
        entries, embeddings = [e for e, bad in zip(entries, rows.tolist(), strict=True) if not bad], embeddings[~rows]
    return entries, [embeddings] if entries else []


def embedding_steps(
    tower: Tower, modality: str
) -> tuple[Callable[[bytes | str], Any], Callable[[list[Any]], GaussianEmbedding]]:
    """What workers do with an item, and what the encoder does with a batch of such; frozen backbones without their disk cache.

    Args:
        tower: of images or texts.
        modality: "images" or "texts".

    Returns:
        (from the bytes of a picture, or a text, to what the encoder takes; from a list of n of these to (n, d) embeddings).
    """
    processor = tower.processor
    if isinstance(processor, FrozenProcessor):
        backbone = processor.backbone

        def features(values: list[Any]) -> GaussianEmbedding:
            found = backbone(values)
            lengths = np.array([len(item) for item in found], dtype=np.int64)
            store = RaggedStore(np.concatenate(found), np.cumsum(lengths) - lengths, lengths)
            return tower.embed(store, batch_size=len(values))

        return _checked if modality == "images" else _same, features

    if isinstance(processor, RegionProcessor):
        channels = processor.channels

        def regions(values: list[Any]) -> GaussianEmbedding:
            return tower.embed(stacked(values, channels), batch_size=len(values))

        return partial(_regions, channels), regions

    def texts(values: list[Any]) -> GaussianEmbedding:
        store, _ = processor.read([partial(_same, value) for value in values])
        return tower.embed(store, batch_size=len(values))

    def pixels(values: list[Any]) -> GaussianEmbedding:
        return tower.embed(PixelStore(torch.from_numpy(np.stack(values))), batch_size=len(values))

    def decoded(data: bytes | str) -> Any:
        assert isinstance(data, bytes)
        if isinstance(processor, PixelProcessor | ImageFileProcessor):
            return decode_image(data, processor.size, fit=processor.fit)
        store, _ = processor.read([lambda: data])
        return store.batch(np.zeros(1, np.int64)).values[0].numpy()

    return (_same, texts) if modality == "texts" else (decoded, pixels)


def _regions(channels: int, data: bytes | str) -> np.ndarray:
    assert isinstance(data, bytes)
    return regions_from_bytes(data, channels)


def _checked(data: bytes | str) -> bytes | str:
    assert isinstance(data, bytes)
    check_image(data)
    return data


def _same(data: bytes | str) -> bytes | str:
    return data


def _remove_unfinished(out: Path, job: int, of: int) -> None:
    """What this job was writing when it was killed."""
    for path in out.iterdir():
        if (found := _UNFINISHED.fullmatch(path.name)) and int(found[1]) % of == job:
            path.unlink(missing_ok=True)
