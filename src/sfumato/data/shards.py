"""Webdataset shards: tar files of pictures with captions, read as a shuffled stream that never ends, for large-scale training.

A sample is a run of members with one key (the name up to its first dot): KEY.jpg, .jpeg, .png or .webp, and KEY.txt or KEY.json
with "caption" or "text". Other members are passed over. What the pictures show is not looked at here, nothing is ever unpickled,
and only local files are opened. The tar files are read with tarfile and not with the webdataset library, because that one ends a
shard without a word at the first damaged header, and runs the shell commands that it finds in the names of shards.
"""

import contextlib
import glob
import hashlib
import io
import itertools
import json
import os
import re
import secrets
import shutil
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from sfumato.data.images import MemoryImage
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.data.problems import Problems
from sfumato.errors import UserError
from sfumato.files import sync_folder

SHARD_IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
"""Endings of the members that are pictures."""

_REMOTE = re.compile(r"pipe:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # key.ending, as the webdataset library has it
_MOST_NAMES = 1_000_000
_ENOUGH_TO_JUDGE = 1000

# What tarfile raises on headers that are damaged in one place or another.
_DAMAGED = (tarfile.TarError, ValueError, TypeError, LookupError, OverflowError, MemoryError, RecursionError)


class ShardError(Exception):
    """A shard as a whole cannot be read, at this moment at least: it is gone, the disk or network fails, or it is cut short."""

    def __init__(self, shard: str | Path, reason: str) -> None:
        super().__init__(f"{shard}: {reason}")
        self.shard, self.reason = str(shard), reason


@dataclass(frozen=True)
class ShardSample:
    """A picture and its caption.

    Attributes:
        key: "path/of/shard.tar!key": where it is, and different for every sample.
        picture: the bytes of the file, not decoded.
        text: the caption, not empty.
    """

    key: str
    picture: bytes
    text: str


@dataclass(frozen=True)
class ShardBatch:
    """b samples.

    Attributes:
        keys: b keys, as in :class:`ShardSample`.
        pictures: b encoded pictures.
        texts: b captions.
    """

    keys: list[str]
    pictures: list[bytes]
    texts: list[str]


class ShardStream:
    """Draws the batches of an epoch from shards, the same for the same seed, epoch and process.

    In an epoch the shards are dealt out among the processes, in another way in each epoch; where there are fewer shards than
    processes, the samples of each shard are. So no two processes ever see one sample in an epoch. Each process reads its part in
    passes: the shards in a random order, then their samples through a shuffle buffer, every sample once. When an epoch is longer
    than the data, another pass follows, in another order; when it is shorter, it ends within the first. For even parts there should
    be many more shards than processes.

    Args:
        shards: local tar files, see :func:`expand_shards`; the same list in every process.
        batch_size: samples in a batch of this process.
        seed: of everything random.
        samples_per_epoch: samples in an epoch, of all processes together; what does not fill a batch in each is left out.
        rank, world: number of this process, and how many there are.
        shuffle_buffer: samples held in memory to draw from; 1 keeps the order within a shard.
        problems: receives what cannot be used, once each; a new list if None.
        max_problem_fraction: largest tolerated share of it, looked at after the first thousand samples and after every pass.

    Raises:
        ValueError: there are no shards, a number is out of its range, or an epoch has no batch.
    """

    def __init__(
        self,
        shards: Sequence[str | Path],
        *,
        batch_size: int,
        seed: int,
        samples_per_epoch: int,
        rank: int = 0,
        world: int = 1,
        shuffle_buffer: int = 1000,
        problems: Problems | None = None,
        max_problem_fraction: float = 0.01,
    ) -> None:
        if not shards:
            raise ValueError("ShardStream: got no shards")
        for name, value in (("batch_size", batch_size), ("world", world), ("shuffle_buffer", shuffle_buffer)):
            if value < 1:
                raise ValueError(f"ShardStream: {name} must be at least 1, got {value}")
        if not 0 <= rank < world:
            raise ValueError(f"ShardStream: rank must be in [0, world), got {rank} of {world}")
        if samples_per_epoch < batch_size * world:
            raise ValueError(
                f"ShardStream: an epoch of {samples_per_epoch} samples has no batch of {batch_size} for each of {world}"
                f" processes; samples_per_epoch must be at least {batch_size * world}"
            )
        self.shards = [str(shard) for shard in shards]
        self.batch_size, self.seed, self.samples_per_epoch = batch_size, seed, samples_per_epoch
        self.rank, self.world, self.shuffle_buffer = rank, world, shuffle_buffer
        self.problems = Problems() if problems is None else problems
        self.max_problem_fraction = max_problem_fraction
        self._noted: set[tuple[str, str]] = set()
        self._usable = 0

    def __len__(self) -> int:
        return self.samples_per_epoch // (self.batch_size * self.world)

    def batches(self, epoch: int) -> Generator[ShardBatch, None, None]:
        """The batches of an epoch: ``len(self)`` of them, in every process, each of ``batch_size`` samples.

        Raises:
            UserError: too much is unusable (the message lists it), or there is nothing usable for this process.
        """
        with contextlib.closing(self.samples(epoch)) as samples:
            for _ in range(len(self)):
                part = list(itertools.islice(samples, self.batch_size))
                yield ShardBatch([s.key for s in part], [s.picture for s in part], [s.text for s in part])

    def samples(self, epoch: int) -> Generator[ShardSample, None, None]:
        """The samples that the batches of an epoch are made of, without an end.

        For who decodes before batching: take samples until a batch is full, and pass over those that :meth:`skip` is called for.

        Raises:
            UserError: as :meth:`batches`.
        """
        everything = np.arange(len(self.shards))
        by_shard = len(self.shards) >= self.world
        dealt = np.random.default_rng([self.seed, epoch, 0]).permutation(everything)
        own = dealt[self.rank :: self.world] if by_shard else everything
        for number in itertools.count():
            random = np.random.default_rng([self.seed, epoch, 1 + self.rank, number])
            found = 0
            for sample in _shuffled(self._read(epoch, random.permutation(own), by_shard), self.shuffle_buffer, random):
                found += 1
                yield sample
            self.problems.check(self._usable, self.max_problem_fraction)
            if not found:
                raise UserError(
                    f"process {self.rank} of {self.world} found no usable sample in {len(own)} shards, the first {self.shards[own[0]]};"
                    f" a sample is KEY.jpg, .jpeg, .png or .webp with KEY.txt or KEY.json:\n{self.problems.summary()}"
                )

    def skip(self, key: str, reason: str) -> None:
        """Note a sample that turns out to be unusable, because its picture cannot be decoded, say.

        It stays in the stream, which depends on nothing but seed, epoch and process, and is noted once.

        Args:
            key: of the sample.
            reason: what is wrong with it.

        Raises:
            UserError: too much is unusable; the message lists it.
        """
        if (key, reason) not in self._noted:
            self._noted.add((key, reason))
            self.problems.add(key, reason)
            if self._usable + len(self.problems) >= _ENOUGH_TO_JUDGE:
                self.problems.check(self._usable, self.max_problem_fraction)

    def _read(self, epoch: int, order: Iterable[int], by_shard: bool) -> Iterator[ShardSample]:
        for position in order:
            # Another process begins in every shard and epoch: small shards serve all, and none keeps its samples for ever.
            first = (self.rank + epoch - position) % self.world
            mine = slice(None) if by_shard else slice(first, None, self.world)
            for sample in _read_shard(self.shards[position], mine, self.skip):
                self._usable += 1
                yield sample


def expand_shards(spec: str) -> list[str]:
    """The shards that a user means.

    Args:
        spec: a folder of .tar files, one file, or a pattern: ``data/cc3m-{00000..00331}.tar`` with any number of ranges and lists
            in braces, or a glob with ``*``, ``?``, ``[...]`` and ``**``, of which the .tar files count.

    Returns:
        Local paths, each once, in natural order (2 before 10).

    Raises:
        UserError: a remote address or a command, a pattern that cannot be read, files that do not exist, or nothing found.
    """
    if _REMOTE.match(spec):
        raise UserError(
            f"shards {spec!r}: addresses and commands are not opened; download the shards, and name their folder"
        )
    path = os.path.expanduser(spec)
    if os.path.isdir(path):
        found = glob.glob(os.path.join(glob.escape(path), "*.tar"))
    elif os.path.isfile(path):
        found = [path]
    else:
        names = _braces(path)
        globs = [name for name in names if any(sign in name for sign in "*?[")]
        plain = [name for name in names if name not in set(globs)]
        missing = [name for name in plain if not os.path.isfile(name)]
        if missing:
            raise UserError(
                f"shards {spec!r}: {len(missing)} of {len(plain)} do not exist, the first {missing[0]}; to take those that do, use a"
                " glob: * instead of {...}"
            )
        found = plain + [file for name in globs for file in glob.glob(name, recursive=True) if file.endswith(".tar")]
    if not found:
        raise UserError(
            f"shards {spec!r}: found no .tar file; give a folder, a glob, or a pattern such as cc3m-{{00000..00331}}.tar"
        )
    return sorted(set(found), key=lambda name: (_natural(name), name))


def write_shards(
    data: PairData, folder: str | Path, *, per_shard: int = 1000, problems: Problems | None = None
) -> list[Path]:
    """Write a split as shards: a sample for every pair, in order, so a picture with five captions is there five times.

    The pictures keep their bytes; KEY.txt is the caption, and KEY.json names the ids of image and text. The same split gives
    the same bytes. The folder appears when all is written, or not at all.

    Args:
        data: the split; JPEG, PNG and WEBP pictures.
        folder: a new or empty folder; its parents are made.
        per_shard: samples in a shard; fewer in the last.
        problems: receives pictures that cannot be read or are in another format, which are left out; without it they raise.

    Returns:
        The shards: shard-00000.tar, ...

    Raises:
        UserError: the folder is not empty, or there is nothing to write.
        ValueError: per_shard is less than 1; a picture has another format.
        OSError: a picture cannot be read.
    """
    folder = Path(folder)
    if per_shard < 1:
        raise ValueError(f"write_shards: per_shard must be at least 1, got {per_shard}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"cannot write shards to {folder}: it is there and not an empty folder; give a new one, or remove it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    unfinished.mkdir()
    try:
        samples = _members_of_pairs(data, problems)
        names: list[str] = []
        while part := list(itertools.islice(samples, per_shard)):
            names.append(f"shard-{len(names):05d}.tar")
            _write_shard(unfinished / names[-1], part)
        if not names:
            raise UserError(f"cannot write shards to {folder}: the data hold no pair with a usable picture")
        sync_folder(unfinished)
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    return [folder / name for name in names]


def read_shards(shards: Sequence[str | Path], problems: Problems) -> PairData:
    """All samples of some shards as a split, to validate on: encoded pictures in memory, each once with all its captions.

    Args:
        shards: local tar files, see :func:`expand_shards`.
        problems: receives what cannot be used.
    """
    pictures: dict[bytes, MemoryImage] = {}
    captions: dict[bytes, list[str]] = {}
    for shard in shards:
        for sample in _read_shard(str(shard), slice(None), problems.add):
            digest = hashlib.sha256(sample.picture).digest()
            pictures.setdefault(digest, MemoryImage(sample.key, sample.picture))
            if sample.text not in captions.setdefault(digest, []):
                captions[digest].append(sample.text)
    images = list(pictures.values())
    return make_pair_data([image.location for image in images], images, [captions[digest] for digest in pictures])


@dataclass(frozen=True, slots=True)
class ShardImage:
    """Where the picture of a sample lies in its shard, captions or not.

    Attributes:
        key: of the sample; different for every one that is usable.
        member: name of the picture's member.
        offset, size: of its bytes in the file.
        error: what is wrong with the sample, or with the file from here on; "" if nothing is.
    """

    key: str
    member: str = ""
    offset: int = 0
    size: int = 0
    error: str = ""


def list_shard(shard: str | Path) -> list[ShardImage]:
    """The pictures of a shard in its order, by its headers alone: no picture is read.

    Args:
        shard: a local tar file.

    Returns:
        One for every sample, and one for every damaged place; at least one.

    Raises:
        ShardError: it cannot be opened or read, or is cut short, as while it is being copied.
    """
    found: list[ShardImage] = []
    cut: list[str] = []

    def bad(reason: str, cut_short: bool = False) -> None:
        found.append(ShardImage("", error=reason))
        if cut_short:
            cut.append(reason)

    seen: set[str] = set()
    try:
        with open(shard, "rb") as file:
            for key, group in itertools.groupby(_named(_members(file, bad)), key=lambda member: member[0]):
                members = list(group)
                endings = [ending for _, ending, _ in members]
                picture = next((ending for ending in SHARD_IMAGE_ENDINGS if ending in endings), None)
                if key in seen:
                    found.append(ShardImage(key, error="the key occurs before in this shard"))
                elif picture is None:
                    found.append(ShardImage(key, error=f"no picture: there is only .{', .'.join(endings)}"))
                elif endings.count(picture) > 1:
                    found.append(ShardImage(key, error=f".{picture} occurs twice"))
                else:
                    seen.add(key)
                    member = members[endings.index(picture)][2]
                    found.append(ShardImage(key, member.name, member.offset_data, member.size))
    except OSError as error:
        raise ShardError(shard, f"cannot be read: {error.strerror or error}") from error
    if cut:
        raise ShardError(shard, cut[0])
    if not found:
        bad("no sample in it")
    return found


def _read_shard(shard: str, mine: slice, bad: Callable[[str, str], None]) -> Iterator[ShardSample]:
    """The usable ones among the samples of a shard that a slice of them picks."""
    try:
        with open(shard, "rb") as file:
            members = _named(_members(file, lambda reason, _: bad(shard, reason)))
            groups = ((key, list(group)) for key, group in itertools.groupby(members, key=lambda member: member[0]))
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


def _members(file: IO[bytes], bad: Callable[[str, bool], None]) -> Iterator[tarfile.TarInfo]:
    """The members of a tar file. After a damaged place the next header is searched, block by block.

    What is wrong is told as (reason, whether the end of the file is missing).
    """
    size = os.fstat(file.fileno()).st_size
    try:
        tar = tarfile.TarFile(fileobj=file, ignore_zeros=True)
        if tar.next() is None:
            raise ValueError("it has no members")
    except _DAMAGED as error:
        return bad(f"not an uncompressed tar file: {error}", size == 0)
    position, damaged, ended = 0, False, False
    while position < size:
        file.seek(position)
        if not any(file.read(tarfile.BLOCKSIZE)):
            ended = True
            position += tarfile.BLOCKSIZE
            continue
        file.seek(position)
        try:
            member = tarfile.TarInfo.fromtarfile(tar)
            if member.size < 0 or tar.offset <= position:
                raise ValueError("a negative size")
        except _DAMAGED as error:
            if not damaged:
                bad(f"damaged at byte {position}: {error}; what is there is lost", not ended and file.tell() >= size)
            damaged = True
            position += tarfile.BLOCKSIZE
            continue
        damaged, ended, position = False, False, tar.offset
        if member.offset_data + member.size > size:
            return bad(f"cut short: ends within {member.name}", True)
        yield member
    if not ended and not damaged:
        bad("cut short: the mark of the end is missing, and maybe members before it", True)


def _named(members: Iterable[tarfile.TarInfo]) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """(key, ending in lower case, member) of the files that can belong to a sample."""
    for member in members:
        parts = _MEMBER.fullmatch(member.name)
        if parts and member.isreg() and not member.issparse():
            yield parts[1], parts[2].lower(), member


def _sample(file: IO[bytes], location: str, group: list[tuple[str, str, tarfile.TarInfo]]) -> ShardSample:
    """Read the members of a group that matter; a ValueError says what is missing."""
    members: dict[str, tarfile.TarInfo] = {}
    for _, ending, member in group:
        if ending in members:
            raise ValueError(f".{ending} occurs twice")
        members[ending] = member

    def read(ending: str) -> bytes:
        file.seek(members[ending].offset_data)
        return file.read(members[ending].size)

    picture = next((ending for ending in SHARD_IMAGE_ENDINGS if ending in members), None)
    if picture is None:
        raise ValueError(f"no picture: there is only .{', .'.join(members)}")
    if "txt" in members:
        text = _decoded(read("txt"))
    elif "json" in members:
        text = _caption_of_json(read("json"))
    else:
        raise ValueError("no caption: there is neither .txt nor .json")
    if not text.strip():
        raise ValueError("the caption is empty")
    return ShardSample(location, read(picture), text.strip())


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
    text = (values.get("caption") or values.get("text")) if isinstance(values, dict) else None
    if not isinstance(text, str):
        raise ValueError('no caption: the .json has no string "caption" or "text"')
    try:
        text.encode()  # JSON can spell halves of characters, which no tokenizer takes.
    except UnicodeEncodeError as error:
        raise ValueError(f"the caption is not valid Unicode: {error.reason}") from error
    return text


def _shuffled(samples: Iterator[ShardSample], size: int, random: np.random.Generator) -> Iterator[ShardSample]:
    """Each sample once: one of ``size`` at random takes its turn whenever another comes in."""
    buffer = list(itertools.islice(samples, size))
    for sample in samples:
        place = int(random.integers(size))
        yield buffer[place]
        buffer[place] = sample
    for place in random.permutation(len(buffer)):
        yield buffer[place]


def _braces(pattern: str) -> list[str]:
    """``a{1..3}b`` and ``a{x,y}b``, any number of them, spelt out; a leading zero asks for a fixed width."""
    brace = re.search(r"\{([^{}]*)\}", pattern)
    if brace is None:
        return [pattern]
    limits = re.fullmatch(r"(\d+)\.\.(\d+)", brace[1], re.ASCII)
    if limits:
        first, last = int(limits[1]), int(limits[2])
        padded = any(limit.startswith("0") and len(limit) > 1 for limit in limits.groups())
        width = max(map(len, limits.groups())) if padded else 1
        if not first <= last < first + _MOST_NAMES:
            raise UserError(f"shards {pattern!r}: {brace[0]} must count upwards, to at most {_MOST_NAMES} names")
        values = [f"{number:0{width}d}" for number in range(first, last + 1)]
    elif "," in brace[1]:
        values = brace[1].split(",")
    else:
        raise UserError(f"shards {pattern!r}: cannot read {brace[0]}; expected a range {{00..31}} or a list {{a,b}}")
    return [name for value in values for name in _braces(pattern[: brace.start()] + value + pattern[brace.end() :])]


def _natural(name: str) -> list[str | int]:
    """Text and numbers in turn, so that names of one pattern sort by number."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))]


def _members_of_pairs(data: PairData, problems: Problems | None) -> Iterator[dict[str, bytes]]:
    """For every pair with a usable picture its members, name -> content."""
    last, picture, ending = -1, b"", ""
    for number, (image, text) in enumerate(data.pairs.tolist()):
        if image != last:
            last, ending = image, ""
            try:
                picture = data.images[image].read_bytes()
                ending = _ending(picture)
            except (OSError, ValueError) as error:
                if problems is None:
                    raise
                problems.add(data.images[image].location, str(error))
        if ending:
            ids = {"image_id": data.image_ids[image], "text_id": data.text_ids[text]}
            yield {
                f"{number:09d}.{ending}": picture,
                f"{number:09d}.txt": data.texts[text].encode(),
                f"{number:09d}.json": json.dumps(ids, ensure_ascii=False).encode(),
            }


def _ending(picture: bytes) -> str:
    if picture.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if picture.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if picture.startswith(b"RIFF") and picture[8:12] == b"WEBP":
        return "webp"
    raise ValueError("neither JPEG nor PNG nor WEBP, which shards are made of; convert it first")


def _write_shard(path: Path, samples: Iterable[dict[str, bytes]]) -> None:
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, content in itertools.chain.from_iterable(sample.items() for sample in samples):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        file.flush()
        os.fsync(file.fileno())
