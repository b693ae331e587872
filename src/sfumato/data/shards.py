"""Source "shards": tar files in the layout of webdataset, named, and read as a stream or as a whole."""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from sfumato.data.images import MemoryImage, Problems
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.errors import UserError, say
from sfumato.ids import first_twice, natural_key

SHARD_IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
"""Endings of the members that are images."""

_REMOTE = re.compile(r"pipe:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)

_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # key.ending, as in the webdataset library

_MOST_NAMES = 300_000


# What tarfile raises on damaged headers.
_DAMAGED = (tarfile.TarError, ValueError, TypeError, LookupError, OverflowError, MemoryError, RecursionError)


@dataclass(frozen=True)
class ShardSample:
    """An image and its caption."""

    key: str  # "path/of/shard.tar!key", different for every sample
    image: bytes  # the bytes of the file, not decoded
    text: str  # the caption; "" where there is none
    fault: str = ""  # why there is none


def expand_shards(spec: str) -> list[str]:
    """The files that a shard pattern names."""
    if _REMOTE.match(spec):
        raise UserError(f"shards {spec!r}: addresses and commands are not opened; download them, and name the folder")
    path = os.path.expanduser(spec)
    if os.path.isdir(path):
        found = glob.glob(os.path.join(glob.escape(path), "*.tar"))
    elif os.path.isfile(path):
        found = [path]
    else:
        names = _braces(path)
        globs = [name for name in names if any(sign in name for sign in "*?[")]
        plain = [name for name in names if name not in set(globs)]
        if missing := [name for name in plain if not os.path.isfile(name)]:
            absent = f"{len(missing)} of {len(plain)} do not exist, the first {missing[0]}"
            raise UserError(f"shards {spec!r}: {absent}; to take those that do, use a glob: * instead of {{...}}")
        found = plain + [file for name in globs for file in glob.glob(name, recursive=True) if file.endswith(".tar")]
    if not found:
        ways = "a folder, a glob, or a pattern such as cc3m-{00000..00331}.tar"
        raise UserError(f"shards {spec!r}: found no .tar file; give {ways}")
    return sorted(set(found), key=lambda name: (natural_key(name), name))


def read_shard(shard: str, mine: slice, bad: Callable[[str, str], None]) -> Iterator[ShardSample]:
    """Read the usable samples in a slice of a shard."""
    try:
        with open(shard, "rb") as file:
            groups = _groups(file, lambda reason: bad(shard, reason))
            for key, group in itertools.islice(groups, mine.start, mine.stop, mine.step):
                location = f"{shard}!{key}"
                try:
                    sample = _sample(file, location, group)
                except ValueError as error:
                    bad(location, str(error))
                else:
                    yield sample
    except OSError as error:
        bad(shard, f"cannot be read: {error.strerror or error}")


def _members(file: IO[bytes], bad: Callable[[str], None]) -> Iterator[tarfile.TarInfo]:
    """The members of a tar file, also after damage; ``bad`` receives reasons."""
    size, position = os.fstat(file.fileno()).st_size, 0
    try:
        tar = tarfile.TarFile(fileobj=file, ignore_zeros=True)
        for member in tar:
            if member.size < 0 or tar.offset <= member.offset:
                raise ValueError("a negative size")
            if _has_content(file, position, member.offset):
                bad(f"damaged at byte {position}; the samples there are lost")
            position = tar.offset
            if member.offset_data + member.size > size:
                return bad(f"cut short: ends within {member.name}")
            yield member
    except _DAMAGED as error:
        what = f"damaged after byte {position}" if position else "not an uncompressed tar file"
        return bad(f"{what}: {error}")
    if not position:
        bad("not an uncompressed tar file: it has no members")
    elif _has_content(file, position, size):
        bad(f"damaged at byte {position}; the samples there are lost")
    elif size - position < tarfile.BLOCKSIZE:
        bad("cut short: the end mark is missing; members before it may be missing too")


def _has_content(file: IO[bytes], start: int, end: int) -> bool:
    """Whether a part of a file has a byte that is not 0."""
    file.seek(start)
    return any(any(file.read(min(_PART, end - at))) for at in range(start, end, _PART))


_PART = 1 << 20


_Group = list[tuple[str, tarfile.TarInfo]]


def _groups(file: IO[bytes], bad: Callable[[str], None]) -> Iterator[tuple[str, _Group]]:
    """(key, members) of the samples, a member with its ending in lower case; without what can belong to no sample."""
    named = ((_MEMBER.fullmatch(member.name), member) for member in _members(file, bad))
    usable = ((parts[1], parts[2].lower(), m) for parts, m in named if parts and m.isreg() and not m.issparse())
    for key, group in itertools.groupby(usable, key=lambda member: member[0]):
        yield key, [(ending, member) for _, ending, member in group]


def _sample(file: IO[bytes], location: str, group: _Group) -> ShardSample:
    """Read image and caption of a group; a ValueError names what is missing."""
    members = dict(group)
    if len(members) < len(group):
        raise ValueError(f".{first_twice(ending for ending, _ in group)} occurs twice")

    def read(member: tarfile.TarInfo) -> bytes:
        file.seek(member.offset_data)
        return file.read(member.size)

    if (image := next((ending for ending in SHARD_IMAGE_ENDINGS if ending in members), None)) is None:
        raise ValueError(f"no image: there is only .{', .'.join(members)}")
    text, fault = "", _NO_CAPTION
    try:
        if "txt" in members:
            text = _decoded(read(members["txt"])).strip()
        elif "json" in members:
            text = _caption_of_json(read(members["json"])).strip()
    except ValueError as error:
        fault = str(error)
    return ShardSample(location, read(members[image]), text, "" if text else fault)


_NO_CAPTION = "no caption"


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption is not UTF-8: {error.reason} at byte {error.start}") from error


def _caption_of_json(data: bytes) -> str:
    try:
        values = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the .json cannot be read: {error}") from error
    text = (values.get("caption") or values.get("text") or "") if isinstance(values, dict) else None
    if not isinstance(text, str):
        raise ValueError('the .json has no string "caption" or "text"')
    try:
        text.encode()  # JSON can contain lone surrogates, which no tokenizer accepts.
    except UnicodeEncodeError as error:
        raise ValueError(f"the caption is not valid Unicode: {error.reason}") from error
    return text


def _braces(pattern: str) -> list[str]:
    """``a{1..3}b`` and ``a{x,y}b``, any number of them, spelt out; a leading zero asks for a fixed width."""
    found, left = list[str](), [pattern]
    while left:
        name = left.pop()
        if (brace := re.search(r"\{([^{}]*)\}", name)) is None:
            found.append(name)
            continue
        values = _between(brace[1], pattern)
        if len(found) + len(left) + len(values) > _MOST_NAMES:
            raise UserError(f"shards {pattern!r}: stands for more than {_MOST_NAMES} names; give a folder or a glob")
        left += [name[: brace.start()] + value + name[brace.end() :] for value in reversed(values)]
    return found


def _between(text: str, pattern: str) -> list[str]:
    """The values that the text between two braces stands for."""
    if limits := re.fullmatch(r"(\d{1,20})\.\.(\d{1,20})", text, re.ASCII):
        first, last = int(limits[1]), int(limits[2])
        padded = any(limit.startswith("0") and len(limit) > 1 for limit in limits.groups())
        width = max(map(len, limits.groups())) if padded else 1
        if not first <= last < first + _MOST_NAMES:
            raise UserError(f"shards {pattern!r}: {{{text}}} must count upwards, to at most {_MOST_NAMES} names")
        return [f"{number:0{width}d}" for number in range(first, last + 1)]
    if "," in text:
        return text.split(",")
    raise UserError(f"shards {pattern!r}: cannot read {{{text}}}; expected a range {{00..31}} or a list {{a,b}}")


class ShardStream:
    """The batches of an epoch from shards, the same for the same seed, epoch and process.

    In each epoch the shards are assigned to the processes again. If there are fewer shards than processes, the samples
    of each shard are divided among them. No two processes ever see one sample in an epoch. Each process reads its part
    in passes: the shards in a random order, then their samples through a shuffle buffer, every sample once. If an epoch
    is longer than the data, another pass follows, in another order; if it is shorter, it ends within the first. The
    parts are even if there are many more shards than processes.
    """

    def __init__(
        self,
        shards: Sequence[str | Path],
        *,
        batch_size: int,
        seed: int,
        samples_per_epoch: int,
        rank: int = 0,
        n_processes: int = 1,
        shuffle_buffer: int = 10_000,
        problems: Problems | None = None,
        max_problem_fraction: float = 0.01,
    ) -> None:
        if not shards:
            raise ValueError("ShardStream: got no shards")
        if samples_per_epoch < batch_size * n_processes:
            found = f"has no batch of {batch_size} for each of {n_processes} processes"
            least = f"samples_per_epoch must be at least {batch_size * n_processes}"
            raise ValueError(f"ShardStream: an epoch of {samples_per_epoch} samples {found}; {least}")
        self.shards = [str(shard) for shard in shards]
        self.batch_size, self.seed, self.samples_per_epoch = batch_size, seed, samples_per_epoch
        self.rank, self.n_processes, self.shuffle_buffer = rank, n_processes, shuffle_buffer
        self.problems = Problems() if problems is None else problems
        self.max_problem_fraction = max_problem_fraction
        self._noted: set[tuple[str, str]] = set()
        self._usable = 0

    def __len__(self) -> int:
        return self.samples_per_epoch // (self.batch_size * self.n_processes)

    def batches(self, epoch: int) -> Generator[list[ShardSample], None, None]:
        """The batches of an epoch: ``len(self)`` of them, in every process, each of ``batch_size`` samples."""
        with contextlib.closing(self.samples(epoch)) as samples:
            for _ in range(len(self)):
                yield list(itertools.islice(samples, self.batch_size))

    def samples(self, epoch: int) -> Generator[ShardSample, None, None]:
        """An endless iterator over the samples of an epoch.

        Use it to decode before batching: take samples until a batch is full, and leave out the samples reported to
        :meth:`skip`.
        """
        everything = np.arange(len(self.shards))
        by_shard = len(self.shards) >= self.n_processes
        shuffled = np.random.default_rng([self.seed, epoch, 0]).permutation(everything)
        own = shuffled[self.rank :: self.n_processes] if by_shard else everything
        for number in itertools.count():
            random = np.random.default_rng([self.seed, epoch, 1 + self.rank, number])
            found = 0
            for sample in _shuffled(self._read(epoch, random.permutation(own), by_shard), self.shuffle_buffer, random):
                found += 1
                yield sample
            self.problems.check(self._usable, self.max_problem_fraction)
            if not found:
                none = f"process {self.rank} of {self.n_processes} found no usable sample in {len(own)} shards"
                form = "a sample is KEY.jpg, .jpeg, .png or .webp with KEY.txt or KEY.json"
                raise UserError(f"{none}, the first {self.shards[own[0]]}; {form}:\n{self.problems.summary()}")

    def skip(self, key: str, reason: str) -> None:
        """Record a sample that turns out to be unusable, for instance because its image cannot be decoded.

        It stays in the stream, which depends on seed, epoch and process alone, and is recorded once.
        """
        if (key, reason) in self._noted:
            return
        self._noted.add((key, reason))
        if reason == _NO_CAPTION:
            if not self.problems.notes:
                say(f"{key} has no caption; samples without one are not used, and end in problems.jsonl")
            self.problems.note(key, reason)
        else:
            self.problems.add(key, reason)
            if self._usable + len(self.problems) >= _ENOUGH_TO_JUDGE:
                self.problems.check(self._usable, self.max_problem_fraction)

    def _read(self, epoch: int, order: Iterable[int], by_shard: bool) -> Iterator[ShardSample]:
        for position in order:
            # The first process rotates with shard and epoch, so all processes get small shards, and samples change
            # process.
            first = (self.rank + epoch - position) % self.n_processes
            mine = slice(None) if by_shard else slice(first, None, self.n_processes)
            for sample in read_shard(self.shards[position], mine, self.skip):
                if sample.fault:
                    self.skip(sample.key, sample.fault)
                else:
                    self._usable += 1
                    yield sample


def read_shards(shards: Sequence[str | Path], problems: Problems) -> PairData:
    """All samples of some shards as a split, for validation: encoded images in memory, each once with all its captions.

    Args:
        shards: local tar files, see :func:`~sfumato.data.shards.expand_shards`.
        problems: receives what cannot be used, and images without captions.

    Returns:
        The split; ids are "path/of/shard.tar!key".
    """
    images: dict[bytes, MemoryImage] = {}
    captions: dict[bytes, list[str]] = {}
    for shard in shards:
        for sample in read_shard(str(shard), slice(None), problems.add):
            digest = hashlib.sha256(sample.image).digest()
            images.setdefault(digest, MemoryImage(sample.key, sample.image))
            if sample.fault not in ("", _NO_CAPTION):
                problems.remark(sample.key, sample.fault)
            if sample.text not in captions.setdefault(digest, []) and sample.text:
                captions[digest].append(sample.text)
    sources = [image for digest, image in images.items() if captions[digest]]
    bare = [image for digest, image in images.items() if not captions[digest]]
    problems.bare |= {image.location: (image.location, image) for image in bare}
    problems.captioned += len(sources)
    return make_pair_data([source.location for source in sources], sources, [*filter(None, captions.values())])


def _shuffled(samples: Iterator[ShardSample], size: int, random: np.random.Generator) -> Iterator[ShardSample]:
    """Yield each sample once: whenever a sample enters the buffer, a random one of ``size`` samples leaves it."""
    buffer = list(itertools.islice(samples, size))
    for sample in samples:
        position = int(random.integers(size))
        yield buffer[position]
        buffer[position] = sample
    for position in random.permutation(len(buffer)):
        yield buffer[position]


_ENOUGH_TO_JUDGE = 1000
