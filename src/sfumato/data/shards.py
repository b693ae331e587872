"""Webdataset shards: naming, reading and writing of the tar files."""

import glob
import io
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.errors import UserError
from sfumato.files import is_unused, new_folder

SHARD_IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
"""Endings of the members that are images."""

_REMOTE = re.compile(r"pipe:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)

_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # key.ending, as in the webdataset library

_MOST_NAMES, _LONGEST = 300_000, 4096


# What tarfile raises on damaged headers.
_DAMAGED = (tarfile.TarError, ValueError, TypeError, LookupError, OverflowError, MemoryError, RecursionError)


@dataclass(frozen=True)
class ShardSample:
    """An image and its caption."""

    key: str  # "path/of/shard.tar!key", different for every sample
    image: bytes  # the bytes of the file, not decoded
    text: str  # the caption, not empty


def expand_shards(spec: str) -> list[str]:
    """The files that a shard pattern names."""
    if _REMOTE.match(spec):
        raise UserError(
            f"shards {spec!r}: addresses and commands are not opened; download the shards, and name their folder"
        )
    path = os.path.expanduser(spec)
    if "\0" in path or re.search("[\ud800-\udc7f\udd00-\udfff]", path):
        raise UserError(f"shards {spec!r}: holds a character that no file name can hold; remove it")
    if os.path.isdir(path):
        found = glob.glob(os.path.join(glob.escape(path), "*.tar"))
    elif os.path.isfile(path):
        found = [path]
    else:
        names = _braces(path)
        globs = [name for name in names if any(sign in name for sign in "*?[")]
        plain = [name for name in names if name not in set(globs)]
        globs = [name for name in globs if len(name) < _LONGEST]  # Python keeps each compiled pattern in memory.
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
    size = os.fstat(file.fileno()).st_size
    try:
        tar = tarfile.TarFile(fileobj=file, ignore_zeros=True)
        if tar.next() is None:
            raise ValueError("it has no members")
    except _DAMAGED as error:
        return bad(f"not an uncompressed tar file: {error}")
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
                bad(f"damaged at byte {position}: {error}; the samples there are lost")
            damaged = True
            position += tarfile.BLOCKSIZE
            continue
        damaged, ended, position = False, False, tar.offset
        if member.offset_data + member.size > size:
            return bad(f"cut short: ends within {member.name}")
        yield member
    if not ended and not damaged:
        bad("cut short: the end mark is missing; members before it may be missing too")


_Group = list[tuple[str, tarfile.TarInfo]]


def _groups(file: IO[bytes], bad: Callable[[str], None]) -> Iterator[tuple[str, _Group]]:
    """(key, members) of the samples, a member with its ending in lower case; without what can belong to no sample."""
    named = ((_MEMBER.fullmatch(member.name), member) for member in _members(file, bad))
    usable = ((parts[1], parts[2].lower(), m) for parts, m in named if parts and m.isreg() and not m.issparse())
    for key, group in itertools.groupby(usable, key=lambda member: member[0]):
        yield key, [(ending, member) for _, ending, member in group]


def _image(group: _Group) -> tarfile.TarInfo:
    """The member of a sample that is its image; a ValueError says why there is none."""
    endings = [ending for ending, _ in group]
    image = next((ending for ending in SHARD_IMAGE_ENDINGS if ending in endings), None)
    if image is None:
        raise ValueError(f"no image: there is only .{', .'.join(endings)}")
    if endings.count(image) > 1:
        raise ValueError(f".{image} occurs twice")
    return group[endings.index(image)][1]


def _sample(file: IO[bytes], location: str, group: _Group) -> ShardSample:
    """Read image and caption of a group; a ValueError names what is missing."""
    members = dict(group)
    if len(members) < len(group):
        twice = Counter(ending for ending, _ in group).most_common(1)[0][0]
        raise ValueError(f".{twice} occurs twice")

    def read(member: tarfile.TarInfo) -> bytes:
        file.seek(member.offset_data)
        return file.read(member.size)

    image = _image(group)
    if "txt" in members:
        text = _decoded(read(members["txt"]))
    elif "json" in members:
        text = _caption_of_json(read(members["json"]))
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
        text.encode()  # JSON can contain lone surrogates, which no tokenizer accepts.
    except UnicodeEncodeError as error:
        raise ValueError(f"the caption is not valid Unicode: {error.reason}") from error
    return text


def _braces(pattern: str) -> list[str]:
    """``a{1..3}b`` and ``a{x,y}b``, any number of them, spelt out; a leading zero asks for a fixed width."""
    found, left = list[str](), [pattern]
    while left:
        name = left.pop()
        brace = re.search(r"\{([^{}]*)\}", name)
        if brace is None:
            found.append(name)
            continue
        values = _between(brace[1], pattern)
        if len(found) + len(left) + len(values) > _MOST_NAMES:
            raise UserError(f"shards {pattern!r}: stands for more than {_MOST_NAMES} names; give a folder or a glob")
        left += [name[: brace.start()] + value + name[brace.end() :] for value in reversed(values)]
    return found


def _between(text: str, pattern: str) -> list[str]:
    """The values that the text between two braces stands for."""
    limits = re.fullmatch(r"(\d{1,20})\.\.(\d{1,20})", text, re.ASCII)
    if limits:
        first, last = int(limits[1]), int(limits[2])
        padded = any(limit.startswith("0") and len(limit) > 1 for limit in limits.groups())
        width = max(map(len, limits.groups())) if padded else 1
        if not first <= last < first + _MOST_NAMES:
            raise UserError(f"shards {pattern!r}: {{{text}}} must count upwards, to at most {_MOST_NAMES} names")
        return [f"{number:0{width}d}" for number in range(first, last + 1)]
    if "," in text:
        return text.split(",")
    raise UserError(f"shards {pattern!r}: cannot read {{{text}}}; expected a range {{00..31}} or a list {{a,b}}")


def _natural(name: str) -> list[str | int]:
    """The alternating text and numbers of a name, so that names of one pattern sort by number."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))]


def write_shards(
    data: PairData, folder: str | Path, *, per_shard: int = 1000, problems: Problems | None = None
) -> list[Path]:
    """Write a split as shards: one sample for every pair, in order, so an image with five captions occurs five times.

    The images keep their bytes; KEY.txt is the caption, and KEY.json has the ids of image and text. The same split
    gives the same bytes. The folder is written completely or not at all.

    Args:
        data: the split; JPEG, PNG and WEBP images.
        folder: a new or empty folder; its parents are made.
        per_shard: samples in a shard; the last shard may have fewer.
        problems: receives images that cannot be read or are in another format, which are left out; they raise if None.

    Returns:
        The shards: shard-00000.tar, ...

    Raises:
        UserError: the folder is not empty, or there is nothing to write.
        ValueError: per_shard is less than 1; an image has another format.
        OSError: an image cannot be read.
    """
    folder = Path(folder)
    if per_shard < 1:
        raise ValueError(f"write_shards: per_shard must be at least 1, got {per_shard}")
    if not is_unused(folder):
        raise UserError(
            f"cannot write shards to {folder}: it exists and is not an empty folder; give a new one, or remove it"
        )
    with new_folder(folder) as unfinished:
        samples = _members_of_pairs(data, problems)
        names: list[str] = []
        while part := list(itertools.islice(samples, per_shard)):
            names.append(f"shard-{len(names):05d}.tar")
            _write_shard(unfinished / names[-1], part)
        if not names:
            raise UserError(f"cannot write shards to {folder}: the data has no pair with a usable image")
    return [folder / name for name in names]


def _members_of_pairs(data: PairData, problems: Problems | None) -> Iterator[dict[str, bytes]]:
    """The members of every pair with a usable image, as name -> content."""
    last, content, ending = -1, b"", ""
    for number, (image, text) in enumerate(data.pairs.tolist()):
        if image != last:
            last, ending = image, ""
            try:
                content = data.images[image].read_bytes()
                ending = _ending(content)
            except (OSError, ValueError) as error:
                if problems is None:
                    raise
                problems.add(data.images[image].location, str(error))
        if ending:
            ids = {"image_id": data.image_ids[image], "text_id": data.text_ids[text]}
            yield {
                f"{number:09d}.{ending}": content,
                f"{number:09d}.txt": data.texts[text].encode(),
                f"{number:09d}.json": json.dumps(ids, ensure_ascii=False).encode(),
            }


def _ending(image: bytes) -> str:
    if image.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if image.startswith(b"RIFF") and image[8:12] == b"WEBP":
        return "webp"
    raise ValueError("neither JPEG nor PNG nor WEBP, the formats of shards; convert it first")


def _write_shard(path: Path, samples: Iterable[dict[str, bytes]]) -> None:
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, content in itertools.chain.from_iterable(sample.items() for sample in samples):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        file.flush()
        os.fsync(file.fileno())
