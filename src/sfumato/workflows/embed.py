"""Embedding of collections of any size in independent, resumable jobs with bounded memory.

Worker threads read, decode and resize; this thread runs the encoder and writes the parts. Threads, because Pillow
decodes and resizes without the interpreter's lock: they were faster than processes (docs/guides/ingest.md). The content
of a part depends only on the listing and the model, not on the number of jobs or workers, or on where an earlier job
stopped.
"""

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
from typing import Any, TypeVar

import torch

from sfumato.data.images import Problem, Problems
from sfumato.data.listings import Entry, Listing
from sfumato.data.shards import ShardError
from sfumato.encoders.processors import available_cpus
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import id_error
from sfumato.models.embed import embedding_steps, encode_each, model_digest
from sfumato.models.model import Model
from sfumato.progress import progress_bar
from sfumato.search.parts import PartMetadata, PartName, PartsManifest, begin, read_metadata, write_job, write_part

T = TypeVar("T")
R = TypeVar("R")

_ENOUGH_TO_JUDGE = 1000
_FEW_UNREAD = 10
_UNFINISHED = re.compile(r"\.part-(\d+).*\.tmp")


@dataclass(frozen=True)
class Ingested:
    """The result of a job."""

    out: Path  # folder of the parts
    job: int  # number of this job, from 0
    of: int  # number of jobs
    n: int  # number of embeddings in the job's parts
    new: int  # number of these embeddings that this job computed
    parts: int  # number of the job's parts
    seconds: float  # time of computing the new embeddings in seconds, without loading the model
    problems: Problems  # the items left out of the job's parts, in the order of the listing

    @property
    def per_second(self) -> float | None:
        """Embeddings per second; None if there was nothing to do."""
        return self.new / self.seconds if self.new else None

    def to_json(self) -> dict[str, Any]:
        """The figures, with the number of problems instead of their list."""
        return {
            **{key: getattr(self, key) for key in ("job", "of", "n", "new", "parts", "seconds", "per_second")},
            "out": str(self.out),
            "problems": len(self.problems),
        }


def embed_collection(
    model: Model,
    listing: Listing,
    out: str | Path,
    *,
    job: int = 0,
    of: int = 1,
    workers: int | None = None,
    batch_size: int = 64,
    max_problem_fraction: float = 0.01,
) -> Ingested:
    """Embed one job's part of a collection into a folder of parts, or continue where an earlier job stopped.

    Jobs are independent: each writes the parts of its sections, number ``job``, ``job + of``, ... A part that exists is
    not made again. Any number of jobs gives the same parts, bit for bit if the encoder is deterministic (a CPU with
    equal threads); another ``batch_size`` or device changes embeddings by rounding.

    Items that cannot be used are left out, listed in the part, and reported again by a job that finds the part made. If
    a whole shard cannot be read, its part is not written; the other parts are written, and then the job ends with an
    error. Memory holds the listing, the embeddings of one or two parts and the decoded images of three batches,
    whatever the collection's size.
    """
    workers = available_cpus() if workers is None else workers
    if of < 1 or not 0 <= job < of:
        raise ValueError(f"embed_collection: job must be in [0, of), got {job} of {of}")
    for name, value in (("workers", workers), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"embed_collection: {name} must be at least 1, got {value}")
    tower = model.model.image if listing.modality == "images" else model.model.text
    prepare, encode = embedding_steps(tower, listing.modality)
    out = Path(out)
    manifest = _manifest(model, listing)
    begin(out, manifest)
    write_job(out, job, of, {"finished": False})
    _remove_unfinished(out, job, of)
    state = _JobState(listing, out, manifest.identity, job, of, max_problem_fraction)
    in_shards = listing.kind == "shards"
    start, there = time.perf_counter(), state.usable
    try:
        title = f"embedding {'shards' if in_shards else listing.modality}"
        prepared = in_threads(state.tasks(), partial(_prepared, prepare), workers, ahead=2 * max(batch_size, workers))
        with progress_bar(title, state.left) as advance, closing(prepared) as ready:
            for (name, parts), group in itertools.groupby(ready, key=lambda item: (item[0].name, item[0].parts)):
                state.write()  # The last part is written only after the last check of the problems.
                for batch in _batches(group, batch_size, state):
                    state.add(*encode_each(encode, batch, state.leave_out))
                    advance(0 if in_shards else len(batch))
                state.finish(name, parts)
                advance(1 if in_shards and name.number == parts - 1 else 0)
        state.judge(end=not state.unread)
        state.write()
        if state.unread:
            raise UserError(_unread_shards(state))
    finally:
        problems = state.all_problems()
        problems.write(out / (f"problems-{job}-of-{of}.jsonl" if of > 1 else "problems.jsonl"))
    seconds = time.perf_counter() - start
    done = Ingested(out, job, of, state.usable, state.usable - there, len(state.problems_of), seconds, problems)
    write_job(out, job, of, {"finished": True, **done.to_json(), "workers": workers, "batch_size": batch_size})
    return done


def _manifest(model: Model, listing: Listing) -> PartsManifest:
    source = str(Path(model.source).resolve()) if model.source and Path(model.source).exists() else model.source
    return PartsManifest(
        modality=listing.modality,
        model=model_digest(model.model),
        kind=listing.kind,
        n=listing.n,
        digest=listing.digest,
        part_size=listing.part_size,
        sections=listing.sections,
        model_source=source,
        path=os.path.abspath(listing.path) if os.path.exists(listing.path) else listing.path,
        distance=model.distance,
    )


def _unread_shards(state: "_JobState") -> str:
    listed = "\n".join(f"  {shard}: {reason}" for shard, reason in sorted(state.unread.items())[:_FEW_UNREAD])
    more = len(state.unread) - _FEW_UNREAD
    return (
        f"{len(state.unread)} of {state.listing.n} shards could not be read, and their parts are not written; repair"
        f" them, then run the same command again to write the missing parts:\n{listed}"
        + (f"\n  ... and {more} more" if more > 0 else "")
    )


def which_job(shard: str | None) -> tuple[int, int]:
    """The job that "I/N" means. Returns (number of the job, number of jobs)."""
    if shard is None:
        shard = f"{os.environ.get('RANK', '0')}/{os.environ['WORLD_SIZE']}" if "WORLD_SIZE" in os.environ else "0/1"
    found = re.fullmatch(r"(\d+)/(\d+)", shard, re.ASCII)
    if not found or not int(found[1]) < int(found[2]):
        raise UserError(f"--shard {shard}: expected I/N with I from 0 to N - 1, as in 0/8, ..., 7/8")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class _Task:
    """An item that is being processed."""

    name: PartName
    parts: int
    entry: Entry


@dataclass
class _JobState:
    """The remaining and the finished work of one job."""

    listing: Listing
    out: Path
    identity: str
    job: int
    of: int
    max_problem_fraction: float
    usable: int = 0
    left: int = 0
    problems: Problems = field(default_factory=Problems)
    problems_of: dict[tuple[int, int], list[Problem]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._todo: list[tuple[int, dict[int, PartMetadata]]] = []
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
                self.problems_of[section, number] = [Problem.from_json(problem) for problem in about.problems]
                self.problems.items += self.problems_of[section, number]
            if first is None or len(there) < first.parts:
                self._todo.append((section, there))
                in_list = min(self.listing.part_size, self.listing.n - section * self.listing.part_size)
                self.left += 1 if self.listing.kind == "shards" else in_list

    def _there(self, section: int, number: int) -> PartMetadata | None:
        name = PartName(section, number)
        about = read_metadata(self.out, name)
        if about is not None and about.collection != self.identity:
            raise UserError(f"{self.out / name.file} belongs to another collection; remove it, or give another --out")
        return about

    def tasks(self) -> Iterator[_Task]:
        """The items of the missing parts; a section is listed just before it is processed."""
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
                    f"section {section} of {self.listing.path} has changed: it had {changed} parts, and now has"
                    f" {parts};"
                    " embed the collection into another --out"
                )
            for number in range(parts):
                if number not in there:
                    for entry in entries[number * size : (number + 1) * size]:
                        yield _Task(PartName(section, number), parts, entry)

    def leave_out(self, entry: Entry, error: Exception) -> None:
        """Record an unusable item."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.problems.add(entry.location, reason or type(error).__name__)
        self._left_out.append(self.problems.items[-1])
        self.judge()

    def give_up(self, error: ShardError) -> None:
        """Abandon the current part, so that it is not written."""
        self.unread[error.shard] = error.reason
        self.usable -= len(self._entries)
        del self.problems.items[len(self.problems) - len(self._left_out) :]
        self._reset()
        self._given_up = True

    def add(self, entries: Sequence[Entry], embeddings: Sequence[GaussianEmbedding]) -> None:
        """Add the embeddings of some items to the current part."""
        self._entries += entries
        self._embeddings += embeddings
        self.usable += len(entries)

    def finish(self, name: PartName, parts: int) -> None:
        """Finish the current part, unless it was abandoned; the next :meth:`write` writes it."""
        if self._given_up:
            self._reset()
            return
        embeddings = GaussianEmbedding.cat(self._embeddings or [GaussianEmbedding.point(torch.empty(0, 0))])
        left_out = [problem.to_json() for problem in self._left_out]
        about = PartMetadata(self.identity, embeddings.n, parts, left_out)
        ids, payloads = [entry.id for entry in self._entries], [entry.payload for entry in self._entries]
        self.problems_of[name.section, name.number] = self._left_out
        self._waiting = lambda: write_part(self.out, name, about, embeddings, ids, payloads)
        self._reset()

    def write(self) -> None:
        """Write the finished part, if there is one."""
        if self._waiting is not None:
            self._waiting()
        self._waiting = None

    def judge(self, *, end: bool = False) -> None:
        """Raise an error when too many items are unusable."""
        total = self.usable + len(self.problems)
        if end and self.of == 1 and not self.usable:
            raise UserError(f"none of {total} {self.listing.modality} can be used:\n{self.problems.summary()}")
        if end or total >= _ENOUGH_TO_JUDGE:
            self.problems.check(self.usable, self.max_problem_fraction, setting="--max-problem-fraction ")

    def all_problems(self) -> Problems:
        """All problems in the order of the listing."""
        result = Problems()
        result.items = [problem for _, part in sorted(self.problems_of.items()) for problem in part] + self._left_out
        return result

    def _reset(self) -> None:
        self._entries: list[Entry] = []
        self._embeddings: list[GaussianEmbedding] = []
        self._left_out: list[Problem] = []
        self._given_up = False


def _prepared(prepare: Callable[[bytes | str], Any], task: _Task) -> Any:
    """The prepared input of an item, or what is wrong with it."""
    try:
        item = task.entry.read()  # It says why an item without an id cannot be used.
        if error := id_error(task.entry.id):
            raise ValueError(error)
        return prepare(item)
    except (ValueError, OSError, MemoryError, ShardError) as error:
        return error


def in_threads(
    items: Iterable[T], work: Callable[[T], R], workers: int, *, ahead: int
) -> Generator[tuple[T, R], None, None]:
    """Yield (item, its result) in order; at most ``ahead`` items are started in advance."""
    begun: deque[tuple[T, Future[R]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="ingest")
    try:
        for item in items:
            begun.append((item, pool.submit(work, item)))
            if len(begun) >= ahead:
                first, future = begun.popleft()
                yield first, future.result()
        while begun:
            first, future = begun.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(group: Iterable[tuple[_Task, Any]], size: int, state: _JobState) -> Iterator[list[tuple[Entry, Any]]]:
    """The usable items of a part in batches of ``size``; it stops when the shard cannot be read."""
    batch: list[tuple[Entry, Any]] = []
    for task, value in group:
        if isinstance(value, ShardError):
            state.give_up(value)
            return
        if isinstance(value, Exception):
            state.leave_out(task.entry, value)
            continue
        batch.append((task.entry, value))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _remove_unfinished(out: Path, job: int, of: int) -> None:
    """Remove the unfinished files of an earlier run of this job that was killed."""
    for path in out.iterdir():
        if (found := _UNFINISHED.fullmatch(path.name)) and int(found[1]) % of == job:
            path.unlink(missing_ok=True)
