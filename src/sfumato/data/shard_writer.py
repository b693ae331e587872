"""Writing a split as webdataset shards."""

import io
import itertools
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from sfumato.data.pairs import PairData
from sfumato.data.problems import Problems
from sfumato.errors import UserError
from sfumato.files import sync_folder


def write_shards(
    data: PairData, folder: str | Path, *, per_shard: int = 1000, problems: Problems | None = None
) -> list[Path]:
    """Write a split as shards: one sample for every pair, in order, so an image with five captions occurs five times.

    The images keep their bytes; KEY.txt is the caption, and KEY.json has the ids of image and text. The same split
    gives the same bytes. The folder appears when everything is written, or not at all.

    Args:
        data: the split; JPEG, PNG and WEBP images.
        folder: a new or empty folder; its parents are made.
        per_shard: samples in a shard; fewer in the last.
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
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"cannot write shards to {folder}: it exists and is not an empty folder; give a new one, or remove it"
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
            raise UserError(f"cannot write shards to {folder}: the data has no pair with a usable image")
        sync_folder(unfinished)
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    return [folder / name for name in names]


def _members_of_pairs(data: PairData, problems: Problems | None) -> Iterator[dict[str, bytes]]:
    """For every pair with a usable image its members, name -> content."""
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
