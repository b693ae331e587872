"""Embedding of collections of any size by any number of processes, resumable, with bounded memory.

A process claims a section before it embeds it, so no two embed the same one; the claim of a process that dies is free
at once. Worker threads read, decode and resize; this thread runs the encoder and writes the parts. Threads, because
Pillow decodes and resizes without the interpreter's lock: they were faster than processes (docs/guides/ingest.md). The
content of a part depends only on the listing and the model, not on the number of jobs or workers, or on where an
earlier job stopped.
"""

import itertools
import os
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock

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
from sfumato.search.parts import (
    PartMetadata,
    PartName,
    PartsManifest,
    alone_in,
    begin,
    claim,
    read_metadata,
    remove_leftovers,
    write_job,
    write_part,
)

T = TypeVar("T")
R = TypeVar("R")

_ENOUGH_TO_JUDGE = 1000
_FEW_UNREAD = 10
_FIGURES = ("job", "of", "n", "new", "parts", "elsewhere", "seconds", "per_second")


@dataclass(frozen=True)
class Ingested:
    """The result of a job."""

    out: Path  # folder of the parts
    job: int  # number of this job, from 0
    of: int  # number of jobs
    n: int  # number of embeddings in the job's parts
    new: int  # number of these embeddings that this job computed
    parts: int  # number of the job's parts
    elsewhere: int  # number of the job's sections that other processes were still embedding
    seconds: float  # time of computing the new embeddings in seconds, without loading the model
    problems: Problems  # the items left out of the job's parts, in the order of the listing

    @property
    def per_second(self) -> float | None:
        """Embeddings per second; None if there was nothing to do."""
        return self.new / self.seconds if self.new else None

    def to_json(self) -> dict[str, Any]:
        """The figures, with the number of problems instead of their list."""
        return {**{key: getattr(self, key) for key in _FIGURES}, "out": str(self.out), "problems": len(self.problems)}


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

    A job writes the parts of its sections, number ``job``, ``job + of``, ... Any number of processes may do the same
    job: each claims one section after the other. A part that exists is not made again. Any number of jobs and processes
    gives the same parts, bit for bit if the encoder is deterministic (a CPU with equal threads); another ``batch_size``
    or device changes embeddings by rounding.

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
    state = _JobState(listing, out, manifest.identity, job, of, max_problem_fraction)
    in_shards = listing.kind == "shards"
    start = time.perf_counter()
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
        state.release()
        remove_leftovers(out, job, of)
        with alone_in(out):
            problems = state.all_problems()
            problems.write(out / (f"problems-{job}-of-{of}.jsonl" if of > 1 else "problems.jsonl"))
    seconds = time.perf_counter() - start
    elsewhere = len(state.elsewhere)
    done = Ingested(out, job, of, state.usable, state.new, len(state.problems_of), elsewhere, seconds, problems)
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
    new: int = 0
    left: int = 0
    problems: Problems = field(default_factory=Problems)
    problems_of: dict[tuple[int, int], list[Problem]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    elsewhere: set[int] = field(default_factory=set)  # sections that other processes are embedding

    def __post_init__(self) -> None:
        self._todo: list[int] = []
        self._claims: dict[int, tuple[FileLock, set[int]]] = {}  # by section, with the numbers of its missing parts
        self._waiting: tuple[PartName, Callable[[], None]] | None = None
        self._reset()
        for section in range(self.job, self.listing.sections, self.of):
            if not _whole(self._look(section)):
                self._todo.append(section)
                in_list = min(self.listing.part_size, self.listing.n - section * self.listing.part_size)
                self.left += 1 if self.listing.kind == "shards" else in_list

    def _look(self, section: int) -> dict[int, PartMetadata]:
        """The parts of a section by number, if the first is there; those that another process has made are counted."""
        first = self._there(section, 0)
        found = {number: self._there(section, number) for number in range(first.parts if first else 0)}
        there = {number: about for number, about in found.items() if about is not None}
        for number, about in there.items():
            if (section, number) not in self.problems_of:
                self.usable += about.n
                self.problems_of[section, number] = [Problem.from_json(problem) for problem in about.problems]
                self.problems.items += self.problems_of[section, number]
        return there

    def _there(self, section: int, number: int) -> PartMetadata | None:
        name = PartName(section, number)
        about = read_metadata(self.out, name)
        if about is not None and about.collection != self.identity:
            raise UserError(f"{self.out / name.file} belongs to another collection; remove it, or give another --out")
        return about

    def tasks(self) -> Iterator[_Task]:
        """The items of the missing parts; a section is claimed and listed just before it is processed."""
        for section in self._todo:
            yield from self._tasks_of(section)
        for section in sorted(self.elsewhere):  # Again, because the process that had it may have died.
            yield from self._tasks_of(section)

    def _tasks_of(self, section: int) -> Iterator[_Task]:
        size, lock = self.listing.part_size, claim(self.out, section)
        if lock is None:
            self.elsewhere.add(section)
            return
        self.elsewhere.discard(section)
        self._claims[section] = lock, set()
        there = self._look(section)
        if _whole(there):
            self._finished(section)
            return
        try:
            entries = self.listing.entries(section)
        except ShardError as error:
            self.unread[error.shard] = error.reason
            return
        parts = -(-len(entries) // size)
        if changed := next((about.parts for about in there.values() if about.parts != parts), 0):
            raise UserError(
                f"section {section} of {self.listing.path} has changed: it had {changed} parts, and now has {parts};"
                " embed the collection into another --out"
            )
        missing = [number for number in range(parts) if number not in there]
        self._claims[section][1].update(missing)
        for number in missing:
            for entry in entries[number * size : (number + 1) * size]:
                yield _Task(PartName(section, number), parts, entry)

    def _finished(self, section: int) -> None:
        """Give back the claim of a section whose parts are all there."""
        self._claims.pop(section)[0].release()

    def release(self) -> None:
        """Give back the claims of unfinished sections, so that other processes can embed them."""
        for section in list(self._claims):
            self._finished(section)

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
        self.new -= len(self._entries)
        del self.problems.items[len(self.problems) - len(self._left_out) :]
        self._reset()
        self._given_up = True

    def add(self, entries: Sequence[Entry], embeddings: Sequence[GaussianEmbedding]) -> None:
        """Add the embeddings of some items to the current part."""
        self._entries += entries
        self._embeddings += embeddings
        self.usable += len(entries)
        self.new += len(entries)

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
        self._waiting = name, lambda: write_part(self.out, name, about, embeddings, ids, payloads)
        self._reset()

    def write(self) -> None:
        """Write the finished part, if there is one."""
        if self._waiting is None:
            return
        name, write = self._waiting
        write()
        self._waiting = None
        missing = self._claims[name.section][1]
        missing.discard(name.number)
        if not missing:
            self._finished(name.section)

    def judge(self, *, end: bool = False) -> None:
        """Raise an error when too many items are unusable."""
        total = self.usable + len(self.problems)
        if end and self.of == 1 and not self.usable and not self.elsewhere:
            raise UserError(f"none of {total} {self.listing.modality} can be used:\n{self.problems.summary()}")
        if end or total >= _ENOUGH_TO_JUDGE:
            self.problems.check(self.usable, self.max_problem_fraction, setting="--max-problem-fraction ")

    def all_problems(self) -> Problems:
        """All problems in the order of the listing, with those that other processes have found meanwhile."""
        for section in list(self.elsewhere):
            if _whole(self._look(section)):
                self.elsewhere.discard(section)
        result = Problems()
        result.items = [problem for _, part in sorted(self.problems_of.items()) for problem in part] + self._left_out
        return result

    def _reset(self) -> None:
        self._entries: list[Entry] = []
        self._embeddings: list[GaussianEmbedding] = []
        self._left_out: list[Problem] = []
        self._given_up = False


def _whole(there: Mapping[int, PartMetadata]) -> bool:
    """Whether these are all parts of a section."""
    return bool(there) and len(there) == there[0].parts


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
