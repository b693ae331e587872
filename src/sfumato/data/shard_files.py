"""Tar files of the webdataset layout: which files a pattern means, and the samples and images in one of them.

A sample is a run of members with one key (the name up to its first dot): KEY.jpg, .jpeg, .png or .webp, and KEY.txt or
KEY.json with "caption" or "text". Other members are passed over. Images are not decoded here, nothing is ever
unpickled, and only local files are opened. The tar files are read with tarfile and not with the webdataset library,
because that library ends a shard without a message at the first damaged header, and runs the shell commands that it
finds in names of shards.
"""

import glob
import itertools
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sfumato.errors import UserError

SHARD_IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
"""Endings of the members that are images."""

_REMOTE = re.compile(r"pipe:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # key.ending, as the webdataset library has it
_MOST_NAMES = 1_000_000

# What tarfile raises on damaged headers.
_DAMAGED = (tarfile.TarError, ValueError, TypeError, LookupError, OverflowError, MemoryError, RecursionError)


class ShardError(Exception):
    """A shard as a whole cannot be read now: it is missing, the disk or the network fails, or it is cut short.

    Args:
        shard: path of the shard.
        reason: why it cannot be read.
    """

    def __init__(self, shard: str | Path, reason: str) -> None:
        super().__init__(f"{shard}: {reason}")
        self.shard, self.reason = str(shard), reason


@dataclass(frozen=True)
class ShardSample:
    """An image and its caption.

    Attributes:
        key: "path/of/shard.tar!key", different for every sample.
        image: the bytes of the file, not decoded.
        text: the caption, not empty.
    """

    key: str
    image: bytes
    text: str


def expand_shards(spec: str) -> list[str]:
    """The files that a shard pattern names.

    Args:
        spec: a folder of .tar files, one file, or a pattern: ``data/cc3m-{00000..00331}.tar`` with any number of ranges
            and lists in braces, or a glob with ``*``, ``?``, ``[...]`` and ``**``, of which the .tar files count.

    Returns:
        Local paths, each once, in natural order (2 before 10).

    Raises:
        UserError: a remote address or a command, a pattern that cannot be read, files that do not exist, or nothing
            found.
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
                f"shards {spec!r}: {len(missing)} of {len(plain)} do not exist, the first {missing[0]};"
                " to take those that do, use a glob: * instead of {...}"
            )
        found = plain + [file for name in globs for file in glob.glob(name, recursive=True) if file.endswith(".tar")]
    if not found:
        raise UserError(
            f"shards {spec!r}: found no .tar file; give a folder, a glob, or a pattern such as"
            f" cc3m-{{00000..00331}}.tar"
        )
    return sorted(set(found), key=lambda name: (_natural(name), name))


@dataclass(frozen=True, slots=True)
class ShardImage:
    """The position of a sample's image in its shard; the sample needs no caption.

    Attributes:
        key: of the sample; different for every one that is usable.
        member: name of the image's member.
        offset: position of its first byte in the file.
        size: number of its bytes.
        error: what is wrong with the sample, or with the file from here on; "" if nothing is.
    """

    key: str
    member: str = ""
    offset: int = 0
    size: int = 0
    error: str = ""


def list_shard(shard: str | Path) -> list[ShardImage]:
    """The images of a shard in its order, from the headers alone: no image is read.

    Args:
        shard: a local tar file.

    Returns:
        One for every sample, and one for every damaged range; at least one.

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
                image = next((ending for ending in SHARD_IMAGE_ENDINGS if ending in endings), None)
                if key in seen:
                    found.append(ShardImage(key, error="the key occurs before in this shard"))
                elif image is None:
                    found.append(ShardImage(key, error=f"no image: there is only .{', .'.join(endings)}"))
                elif endings.count(image) > 1:
                    found.append(ShardImage(key, error=f".{image} occurs twice"))
                else:
                    seen.add(key)
                    member = members[endings.index(image)][2]
                    found.append(ShardImage(key, member.name, member.offset_data, member.size))
    except OSError as error:
        raise ShardError(shard, f"cannot be read: {error.strerror or error}") from error
    if cut:
        raise ShardError(shard, cut[0])
    if not found:
        bad("no sample in it")
    return found


def read_shard(shard: str, mine: slice, bad: Callable[[str, str], None]) -> Iterator[ShardSample]:
    """The usable samples among those that a slice of a shard selects.

    Args:
        shard: a local tar file.
        mine: which of its samples to read.
        bad: receives (location, reason) of what cannot be used.

    Yields:
        The samples.
    """
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
    """The members of a tar file, also behind damage; ``bad`` receives (reason, whether the end is missing)."""
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
    """Read image and caption of a group; a ValueError names what is missing."""
    members: dict[str, tarfile.TarInfo] = {}
    for _, ending, member in group:
        if ending in members:
            raise ValueError(f".{ending} occurs twice")
        members[ending] = member

    def read(ending: str) -> bytes:
        file.seek(members[ending].offset_data)
        return file.read(members[ending].size)

    image = next((ending for ending in SHARD_IMAGE_ENDINGS if ending in members), None)
    if image is None:
        raise ValueError(f"no image: there is only .{', .'.join(members)}")
    if "txt" in members:
        text = _decoded(read("txt"))
    elif "json" in members:
        text = _caption_of_json(read("json"))
    else:
        raise ValueError("no caption: there is neither .txt nor .json")
    if not text.strip():
        raise ValueError("the caption is empty")
    return ShardSample(location, read(image), text.strip())


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
