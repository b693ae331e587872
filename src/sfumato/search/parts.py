"""Embeddings of a collection of any size: a folder of parts, written by independent jobs and read as one.

manifest.json                 what was embedded, by which model, in how many sections
part-000003.safetensors       the items of section 3: means, log variances, ids, payloads, and what was left out
part-000003-0001.safetensors  those that did not fit into it
job-1-of-3.json               what job 1 of 3 has done, or that it has not finished
.section-000003.lock          locked by the process that embeds section 3

Section s belongs to job s mod N, and nothing in a part depends on N. Several processes may do one job: the lock of a
section is the system's, which drops it when the process dies. Every part is also a file for
:func:`~sfumato.gaussian.load_embeddings`. A part is there whole or not at all.
"""

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from sfumato.errors import UserError, refuse_newer
from sfumato.files import write_atomically, write_json
from sfumato.gaussian import EMBEDDINGS_FORMAT, GaussianEmbedding, check_finite, load_embeddings
from sfumato.ids import check_ids

MANIFEST = "manifest.json"
_FORMAT = "sfumato-parts-1"
_JOB = re.compile(r"job-(\d+)-of-(\d+)\.json")
_LEFTOVER = re.compile(r"\.(?:part|section)-(\d+).*\.(?:tmp|lock)")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_FEW = 5


@dataclass(frozen=True)
class PartsManifest:
    """The manifest of a folder of parts; the first seven fields identify the collection, others may differ by job."""

    modality: str  # "images" or "texts"
    model: str  # digest of the model
    kind: str  # kind of the source: "folder", "manifest", "shards" or "texts"
    n: int  # number of entries that the source lists
    digest: str  # digest of that list
    part_size: int  # maximum number of items in a part
    sections: int  # number of sections
    model_source: str  # folder or name of the model; "home" in the file
    path: str  # path of the source
    distance: str  # name of the model's distance

    @property
    def identity(self) -> str:
        """Digest that identifies the collection; every part carries it."""
        return hashlib.sha256(json.dumps(_pinned(self)).encode()).hexdigest()


@dataclass(frozen=True)
class PartName:
    """The name of a part."""

    section: int  # number of its section
    number: int = 0  # number within the section, from 0

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"part-{self.section:06d}{f'-{self.number:04d}' if self.number else ''}.safetensors"


@dataclass(frozen=True)
class PartMetadata:
    """The metadata of a part."""

    collection: str  # :attr:`PartsManifest.identity` of its collection
    n: int  # number of embeddings
    parts: int  # number of parts of its section
    problems: list[dict[str, str]]  # {"place", "reason"} of the items that were left out


def begin(folder: str | Path, manifest: PartsManifest) -> None:
    """Make the folder, or continue in one that holds the same collection."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST).exists():
        write_json(folder / MANIFEST, {"format": _FORMAT, **_renamed(asdict(manifest), "model_source", "home")})
    there = read_manifest(folder)
    differs = {
        "another model": there.model != manifest.model,
        f"--part-size {there.part_size}": there.part_size != manifest.part_size,
        f"other data, {there.n} items of the {there.kind} {there.path}": (
            (there.modality, there.kind, there.n, there.digest)
            != (manifest.modality, manifest.kind, manifest.n, manifest.digest)
        ),
    }
    if wrong := [name for name, different in differs.items() if different]:
        made = f" ({there.model_source})" if differs["another model"] else ""
        raise UserError(
            f"{folder} holds embeddings with {', '.join(wrong)}{made}; give another --out, or remove that folder"
        )


def read_manifest(folder: str | Path) -> PartsManifest:
    """Read the manifest of a folder of parts."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} is no folder of embeddings (no {MANIFEST} in it); write one with `sfumato embed`")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        refuse_newer(str(folder), found := values.pop("format"), _FORMAT)
        if found != _FORMAT:
            raise ValueError("another format")
        return PartsManifest(**_renamed(values, "home", "model_source"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged, or not a part of a folder of embeddings ({error})") from error


def claim(folder: str | Path, section: int) -> FileLock | None:
    """Lock a section for this process; None if another one has it. Without locks in the file system it is free."""
    lock = FileLock(Path(folder) / f".section-{section:06d}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return lock


@contextlib.contextmanager
def alone_in(folder: str | Path) -> Iterator[None]:
    """Wait for other processes that write the list of problems."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(FileLock(Path(folder) / ".problems.lock"))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def remove_leftovers(folder: str | Path, job: int, of: int) -> None:
    """Remove locks, and the unfinished files of killed processes, of a job's sections whose parts are all there.

    Those of other sections stay: who has opened a lock would hold another one than who makes it anew.
    """
    for path in Path(folder).iterdir():
        found = _LEFTOVER.fullmatch(path.name)
        if found and int(found[1]) % of == job and is_complete(folder, int(found[1])):
            path.unlink(missing_ok=True)


def is_complete(folder: str | Path, section: int) -> bool:
    """Whether all parts of a section are there."""
    first = read_metadata(folder, PartName(section))
    return first is not None and all(read_metadata(folder, PartName(section, n)) for n in range(1, first.parts))


def write_part(
    folder: str | Path,
    name: PartName,
    about: PartMetadata,
    embeddings: GaussianEmbedding,
    ids: Sequence[str],
    payloads: Sequence[Mapping[str, str]],
) -> None:
    """Write a part, atomically; the same arguments give the same bytes."""
    check_finite(embeddings, name.file)
    check_ids(ids, name.file)
    if not len(ids) == len(payloads) == embeddings.n == about.n or len(set(ids)) != len(ids):
        raise ValueError(
            f"{name.file}: got {embeddings.n} embeddings, {len(ids)} ids of which {len(set(ids))} distinct, and"
            f" {len(payloads)} payloads, for {about.n} items; give one distinct id and one payload for each"
        )
    tensors = {key: getattr(embeddings, key).detach().cpu().float().contiguous() for key in ("mean", "log_var")}
    texts = {"ids": list(ids), "payloads": [dict(payload) for payload in payloads], "about": asdict(about)}
    # As tensors, because the format limits its header to 100 MB and does not keep its order.
    tensors |= {key: _bytes(value) for key, value in texts.items()}
    write_atomically(Path(folder) / name.file, safetensors_bytes(tensors, {"format": EMBEDDINGS_FORMAT}))


def read_metadata(folder: str | Path, name: PartName) -> PartMetadata | None:
    """The metadata of a part, without reading its embeddings."""
    path = Path(folder) / name.file
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return PartMetadata(**_value(file.get_tensor("about")))
    except (SafetensorError, ValueError, TypeError):
        return None


def read_parts(folder: str | Path) -> Iterator[tuple[list[str], GaussianEmbedding, list[dict[str, str]]]]:
    """The parts of a collection one after the other, in the order of its source, in the memory of one part.

    Args:
        folder: folder written by jobs of ``sfumato embed``.

    Returns:
        An iterator over (ids, embeddings, payloads); parts without a usable item are left out.

    Raises:
        UserError: raised at once, before the first part: it is not a folder of parts, or parts are missing; the message
            names them.
        ValueError: raised during iteration: a part is damaged.
    """
    folder = Path(folder)
    names = check_complete(folder)

    def parts() -> Iterator[tuple[list[str], GaussianEmbedding, list[dict[str, str]]]]:
        for name in names:
            embeddings, ids = load_embeddings(folder / name.file)
            if ids:
                with safe_open(folder / name.file, framework="pt") as file:
                    yield ids, embeddings, _value(file.get_tensor("payloads"))

    return parts()


def check_complete(folder: str | Path) -> list[PartName]:
    """All parts of a collection, in the order of its source."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    identity = manifest.identity
    names: list[PartName] = []
    missing: list[PartName] = []
    for section in range(manifest.sections):
        first = read_metadata(folder, PartName(section))
        for number in range(first.parts if first else 1):
            name = PartName(section, number)
            about = read_metadata(folder, name) if number else first
            if about is not None and about.collection != identity:
                raise UserError(f"{folder / name.file} belongs to another collection; remove it and embed again")
            (missing if about is None else names).append(name)
    if missing:
        of = _jobs(folder)
        jobs = sorted({name.section % of for name in missing})
        shown = ", ".join(
            name.file.removesuffix(".safetensors") + (f" of job {name.section % of}/{of}" if of > 1 else "")
            for name in missing[:_FEW]
        )
        more = f" and {len(missing) - _FEW} more" if len(missing) > _FEW else ""
        again = f" with --shard {jobs[0]}/{of}" if of > 1 and len(jobs) == 1 else ""
        if len(jobs) > 1:
            again = f" with --shard I/{of} for I = {', '.join(map(str, jobs))}, or once without --shard"
        raise UserError(
            f"{folder} is not complete, {len(missing)} of {len(names) + len(missing)} parts or more are missing:"
            f" {shown}{more}; run the same `sfumato embed` again{again}, to write the missing parts"
        )
    return names


def write_job(folder: str | Path, job: int, of: int, figures: Mapping[str, Any]) -> None:
    """Write the result of a job, or a note that it has started."""
    write_json(Path(folder) / f"job-{job}-of-{of}.json", {"job": job, "of": of, **figures})


def _jobs(folder: Path) -> int:
    """Number of jobs in the latest run."""
    found = [(path.stat().st_mtime, match) for path in folder.iterdir() if (match := _JOB.fullmatch(path.name))]
    return int(max(found, key=lambda item: item[0])[1][2]) if found else 1


def _pinned(manifest: PartsManifest) -> list[Any]:
    values = asdict(manifest)
    return [values[key] for key in ("modality", "model", "kind", "n", "digest", "part_size", "sections")]


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, ensure_ascii=False).encode()), dtype=torch.uint8)


def _value(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def _renamed(values: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in values.items()}
