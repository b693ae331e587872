"""Bad inputs by the thousand at every entrance: each is refused in one clear line, or taken; nothing else happens.

    python benchmarks/bad_inputs.py [--inputs 10000] [--only NAME ...] [--seed 0] [--json PATH]

Valid samples are spoiled at random (benchmarks/spoiling.py): cut, damaged, values of another type, NaN and huge
numbers, deep nesting, other encodings, paths that climb, line breaks in ids, files that are missing or are folders.
Half of the damage to an index gets checksums that fit, as a stranger could make them.

    manifest     JSONL, CSV and Parquet manifests, read and listed
    shards       tar files, read and listed, and patterns of their names
    embeddings   .npy, .safetensors and .parquet files with log variances and ids
    recipe       TOML recipes and changes from the command line
    index        folders of an index, opened and searched
    collection   folders of a collection with its embedded store, opened and searched
    run          run folders and exported models, loaded and used
    checkpoint   the state that training resumes from, and files of torch.save

A refusal is a UserError, ValueError or OSError raised by this package, in a line without control characters, or an item
in the list of problems. The rest is unexpected: errors of other types or of other packages, messages that nobody can
read, inputs that take ten seconds of the processor, warnings of torch or numpy, processes that end. Each entrance runs
in a process of its own, whose resident memory is measured after a tenth of the inputs and at the end. Exits with 1 if
something is unexpected or memory grows.
"""

import argparse
import contextlib
import csv
import ctypes
import gc
import hashlib
import io
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import command_parser, write_json
from safetensors.torch import save_file
from service_world import WORDS, noise, picture
from spoiling import STRINGS, any_value, as_json, spoil_bytes, spoil_folder, spoil_safetensors, spoil_text, spoil_value

from sfumato.data.feature_tables import read_embeddings
from sfumato.data.images import Problems
from sfumato.data.manifest import read_manifest
from sfumato.data.shards import expand_shards, read_shards
from sfumato.encoders.processors import train_tokenizer
from sfumato.errors import UserError, explain_os_error, printable
from sfumato.files import LAST, MODEL, RECIPE
from sfumato.gaussian import save_embeddings
from sfumato.models.build import Assets, build_loss, build_model, load_state, save_state
from sfumato.models.pretrained_tensors import read_checkpoint
from sfumato.models.recipe import Recipe, load_recipe, recipe_files, save_recipe
from sfumato.models.run import load_model, save_assets
from sfumato.search.collection import GaussianCollection
from sfumato.search.searcher import open_gallery
from sfumato.workflows.export import export_run

D, LIMIT, LONGEST = 8, 10.0, 120.0
"""Dimensions of the samples, and the seconds that an input may take: of the processor, and with waiting."""

PACKAGE = str(Path(sys.modules["sfumato"].__file__ or "").parent)

_UNREADABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a message must not hold. Lines of a list are fine."""


@dataclass
class Outcome:
    """What became of the inputs of an entrance.

    Attributes:
        refused, accepted: numbers of inputs.
        unexpected: a line for each other input.
        slowest: seconds of the processor.
        growth_mb: of the resident memory between a tenth of the inputs and the end.
    """

    refused: int = 0
    accepted: int = 0
    unexpected: list[str] = field(default_factory=list)
    slowest: float = 0.0
    growth_mb: float = 0.0

    @property
    def inputs(self) -> int:
        """Number of all inputs."""
        return self.refused + self.accepted + len(self.unexpected)

    def figures(self) -> dict[str, Any]:
        """For a JSON file: the kinds of the unexpected with their numbers, and the first of each."""
        kinds = Counter(line.partition(" | ")[0] for line in self.unexpected)
        first = [next(line for line in self.unexpected if line.startswith(kind)) for kind in kinds]
        numbers = {"inputs": self.inputs, "refused": self.refused, "accepted": self.accepted}
        numbers |= {"unexpected": len(self.unexpected)}
        return {**numbers, "slowest_s": self.slowest, "growth_mb": self.growth_mb, "kinds": kinds, "first": first}


class Entrance(ABC):
    """One way into the package.

    Args:
        folder: new; of the valid samples and the spoiled one.
        chance: source of randomness.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.valid, self.spoiled = folder / "valid", folder / "spoiled"
        self.valid.mkdir(parents=True)
        self.make()

    @abstractmethod
    def make(self) -> None:
        """Write the valid samples."""

    @abstractmethod
    def spoil(self) -> None:
        """Damage the fresh copy of the samples in `self.spoiled`."""

    @abstractmethod
    def take(self) -> Problems | None:
        """Read `self.spoiled`; returns the list of problems, if there is one."""

    def renew(self) -> None:
        """A fresh copy of the samples."""
        shutil.rmtree(self.spoiled, ignore_errors=True)
        shutil.copytree(self.valid, self.spoiled)


class Manifests(Entrance):
    """Manifests of the three formats, with three images."""

    def make(self) -> None:
        """See :meth:`Entrance.make`."""
        for i in range(3):
            (self.valid / f"{i}.png").write_bytes(picture())
        rows = [{"image": f"{i}.png", "captions": ["a", f"b {i}"], "split": "train", "id": f"x{i}"} for i in range(3)]
        self.rows = [{**row, "caption_ids": [f"{i}a", f"{i}b"]} for i, row in enumerate(rows)]

    def spoil(self) -> None:
        """See :meth:`Entrance.spoil`."""
        chance, rows = self.chance, self.rows
        for _ in range(chance.choice((0, 1, 1, 3))):
            rows = spoil_value(rows, chance)
        rows = rows if isinstance(rows, list) else [rows]
        kind = chance.choice(("jsonl", "csv", "parquet", "jsonl", "csv", "other"))
        data = {"jsonl": self._jsonl, "csv": self._csv, "parquet": self._parquet, "other": self._jsonl}[kind](rows)
        if chance.random() < 0.4:
            data = spoil_bytes(data, chance)
        self.path = self.spoiled / (f"m.{kind}" if kind != "other" else chance.choice(("m.txt", "m", "m.jsonl.gz")))
        self.path.write_bytes(data)

    def _jsonl(self, rows: list[Any]) -> bytes:
        return b"\n".join(as_json(row, self.chance) for row in rows)

    def _csv(self, rows: list[Any]) -> bytes:
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, list(self.rows[0]), extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            cells = row.items() if isinstance(row, dict) else ()
            writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in cells})
        return file.getvalue().encode("utf-8", "surrogatepass")

    def _parquet(self, rows: list[Any]) -> bytes:
        import pyarrow
        import pyarrow.parquet

        file = io.BytesIO()
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)]), file)
        except (pyarrow.ArrowException, UnicodeError, OverflowError, TypeError, ValueError, AttributeError):
            return self._csv(rows)  # What pyarrow cannot hold.
        return file.getvalue()

    def take(self) -> Problems | None:
        """See :meth:`Entrance.take`."""
        problems = Problems()
        read_manifest(self.path, problems)
        return problems


class Shards(Entrance):
    """A tar file of three samples, and patterns."""

    def make(self) -> None:
        """See :meth:`Entrance.make`."""
        self.members: dict[str, bytes] = {}
        for i in range(3):
            self.members |= {f"{i}.png": picture(), f"{i}.txt": b"a caption", f"{i}.json": b'{"caption": "another"}'}

    def spoil(self) -> None:
        """See :meth:`Entrance.spoil`."""
        chance, members = self.chance, dict(self.members)
        name = chance.choice(list(members))
        if name.endswith("json"):
            members = {key: data for key, data in members.items() if not key.endswith(".txt")}
            members[name] = as_json(spoil_value({"caption": "a", "text": "b"}, chance), chance)
        else:
            members[name] = spoil_bytes(members[name], chance)
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=chance.choice((0, 1, 2))) as tar:
            for key, data in members.items():
                member = tarfile.TarInfo(key)
                member.size = len(data)
                if key == name and chance.random() < 0.4:
                    self._member(member)
                try:
                    tar.addfile(member, io.BytesIO(data))
                except (ValueError, OSError, UnicodeError):  # What this format of tar cannot hold.
                    continue
        data = file.getvalue()
        self.path = self.spoiled / "s.tar"
        self.path.write_bytes(spoil_bytes(data, chance) if chance.random() < 0.6 else data)
        self.pattern = str(self.path)
        if chance.random() < 0.2:
            parts = ("{0..9}", "{00..31}", "{a,b}", "{0..999999}", "{", "}", "*", "?", "[", "**/", "{9..0}", "{,}", "s")
            self.pattern = str(self.spoiled / "".join(chance.choices((*parts, *STRINGS), k=chance.randint(1, 5))))

    def _member(self, member: tarfile.TarInfo) -> None:
        chance = self.chance
        kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE, b"Z")
        if chance.random() < 0.5:
            member.type, member.linkname = chance.choice(kinds), chance.choice(STRINGS)
        else:
            member.name = chance.choice(STRINGS) + chance.choice((".png", ".txt", ".json", ""))

    def take(self) -> Problems | None:
        """See :meth:`Entrance.take`."""
        problems = Problems()
        for shard in expand_shards(self.pattern):
            read_shards([shard], problems)
        return problems


class Embeddings(Entrance):
    """Files of embeddings with log variances and ids."""

    def make(self) -> None:
        """See :meth:`Entrance.make`."""
        import pyarrow
        import pyarrow.parquet

        made, ids = noise(5, D), [f"id {i}" for i in range(5)]
        np.save(self.valid / "mean.npy", made.mean.numpy())
        np.save(self.valid / "log_var.npy", made.log_var.numpy())
        np.save(self.valid / "ids.npy", np.array(ids))
        (self.valid / "ids.txt").write_text("\n".join(ids), encoding="utf-8")
        (self.valid / "ids.json").write_text(json.dumps(ids), encoding="utf-8")
        save_embeddings(self.valid / "own.safetensors", made, ids)
        save_file({"mean": made.mean, "log_var": made.log_var}, self.valid / "foreign.safetensors")
        pyarrow.parquet.write_table(pyarrow.table({"v": list(made.mean.numpy())}), self.valid / "v.parquet")

    def spoil(self) -> None:
        """See :meth:`Entrance.spoil`."""
        chance = self.chance
        self.means = chance.choice(("mean.npy", "mean.npy", "own.safetensors", "foreign.safetensors", "v.parquet"))
        self.log_var = "log_var.npy" if chance.random() < 0.3 and self.means != "own.safetensors" else None
        self.ids = chance.choice((None, "ids.npy", "ids.txt", "ids.json"))
        name = chance.choice([one for one in (self.means, self.log_var, self.ids) if one])
        path = self.spoiled / name
        if path.suffix == ".npy" and chance.random() < 0.5:
            path.write_bytes(self._npy(name))
        elif path.suffix == ".safetensors" and chance.random() < 0.7:
            spoil_safetensors(path, chance)
        elif name == "ids.json" and chance.random() < 0.7:
            path.write_bytes(as_json(spoil_value(json.loads(path.read_text()), chance), chance))
        else:
            path.write_bytes(spoil_bytes(path.read_bytes(), chance))
        if chance.random() < 0.05:
            self.means += chance.choice((":v", ":mean", ":nope", ":", ":../x", ":a\nb"))

    def _npy(self, name: str) -> bytes:
        """A .npy file with a header that holds something else."""
        chance = self.chance
        descr = chance.choice(("<f4", ">f4", "<f8", "<f2", "|O", "<i8", "|S3", "<U7", "<c8", "|V4", "<M8[s]", "f4,f4"))
        shapes = (
            (5, D), (10**12, D), (0, D), (5, 0), (5,), (), (-1, D), (2**40, 2**40), (5, D, 1), (5 * D,), (10**30,),
        )  # fmt: skip
        text = repr({"descr": descr, "fortran_order": chance.random() < 0.3, "shape": chance.choice(shapes)})
        if chance.random() < 0.4:
            parts = (
                "{", "(" * 200, "-" * 5000, "[" * 3000, "1" * 5000, "'a':", "{[]:1}", "\\", "(1,)*9", "\0", "é", ",",
            )  # fmt: skip
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(parts) + text[at + chance.choice((0, 1, 5)) :]
        made = text.encode("latin-1", "replace") + b"\n"
        version = chance.choice(((1, 0), (2, 0), (3, 0), (9, 9)))
        size = len(made).to_bytes(2 if version[0] == 1 else 4, "little") if len(made) < 65_536 else b"\xff\xff"
        body = np.full((5, D), chance.choice((0.5, float("nan"), float("inf"), 1e38)), np.float32).tobytes()
        return b"\x93NUMPY" + bytes(version) + size + made + body

    def take(self) -> Problems | None:
        """See :meth:`Entrance.take`."""
        ids, log_var = self.ids and self.spoiled / self.ids, self.log_var and self.spoiled / self.log_var
        found, _ = read_embeddings(self.spoiled / self.means, ids=ids, log_var=log_var)
        float(found.mean.sum())
        return None


class Recipes(Entrance):
    """The recipes of the package."""

    def make(self) -> None:
        """See :meth:`Entrance.make`."""
        for name, file in recipe_files().items():
            (self.valid / f"{name}.toml").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")

    def renew(self) -> None:
        """See :meth:`Entrance.renew`."""
        shutil.rmtree(self.spoiled, ignore_errors=True)
        self.spoiled.mkdir()
        self.path = self.spoiled / "recipe.toml"
        shutil.copy(self.chance.choice(sorted(self.valid.iterdir())), self.path)

    def _value(self) -> str:
        chance = self.chance
        odd = ("", "1979-05-27", "07:32:00", "[" * 2000, "{a = 1}", "0x" + "f" * 50, "inf", "nan", "1e400", "9" * 5000)
        if chance.random() < 0.3:
            return chance.choice(odd)
        return json.dumps(any_value(chance), ensure_ascii=chance.random() < 0.5)

    def spoil(self) -> None:
        """See :meth:`Entrance.spoil`."""
        chance = self.chance
        if chance.random() < 0.7:
            spoil_text(self.path, chance, self._value)
        else:
            self.path.write_bytes(spoil_bytes(self.path.read_bytes(), chance))
        keys = ("train.epochs", "loss.name", "model.image.kind", "data.path", "loss", "a.b.c", "", "model.dim", "name")
        number = chance.choice((0, 0, 0, 1, 2))
        self.overrides = [chance.choice(keys) + chance.choice("==,") + self._value() for _ in range(number)]

    def take(self) -> Problems | None:
        """See :meth:`Entrance.take`."""
        load_recipe(self.path, self.overrides)
        return None


def seal(folder: Path) -> None:
    """Make the checksums of a folder of :mod:`sfumato.search.folder` fit what is in it, where that can be."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        for name, of in manifest["files"].items():
            held = (folder / manifest["data"] / name).read_bytes()
            of |= {"bytes": len(held), "sha256": hashlib.sha256(held).hexdigest()}
        manifest.pop("sha256", None)
        text = json.dumps(manifest, sort_keys=True, ensure_ascii=False).encode()
        manifest["sha256"] = hashlib.sha256(text).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return


class Collections(Entrance):
    """The folder of a collection with its embedded store."""

    def make(self) -> None:
        """See :meth:`Entrance.make`."""
        with GaussianCollection.create(self.valid, d=D) as made:
            ids = [f"i{i}" for i in range(20)]
            made.upsert(noise(20, D), ids, {"first": ["yes"] * 20})
            made.upsert(noise(3, D), ids[:3], {"first": ["no"] * 3})
            made.delete(ids[5:7])

    def spoil(self) -> None:
        """See :meth:`Entrance.spoil`."""
        spoil_folder(self.spoiled, self.chance)
        if self.chance.random() < 0.5:
            seal(self.spoiled)

    def take(self) -> Problems | None:
        """See :meth:`Entrance.take`."""
        gallery = open_gallery(self.spoiled)
        try:
            gallery.search(noise(2, gallery.d), k=3)
            gallery.get(["i1"])
        finally:
            gallery.close()
        return None


class Runs(Entrance):
    """A run folder and the model exported from it."""

    def make(self) -> None:
        """See :meth:`Entrance.make`."""
        make_run(self.valid / "run")
        export_run(self.valid / "run", self.valid / "exported")

    def spoil(self) -> None:
        """See :meth:`Entrance.spoil`."""
        self.path = self.spoiled / self.chance.choice(("run", "run", "exported"))
        recipe = self.path / RECIPE
        if recipe.exists() and self.chance.random() < 0.2:
            spoil_text(recipe, self.chance, lambda: json.dumps(any_value(self.chance)))
        else:
            spoil_folder(self.path, self.chance)

    def take(self) -> Problems | None:
        """See :meth:`Entrance.take`."""
        load_model(self.path).model.embed_texts(["a red bird"])
        return None


class Checkpoints(Entrance):
    """The state that training resumes from, and files of torch.save."""

    def make(self) -> None:
        """See :meth:`Entrance.make`."""
        self.model, self.loss, self.optimiser = make_run(self.valid / "run")
        torch.save({"state_dict": self.model.state_dict(), "epoch": 3}, self.valid / "saved.pt")
        torch.save({"a": torch.ones(3)}, self.valid / "old.pt", _use_new_zipfile_serialization=False)

    def spoil(self) -> None:
        """See :meth:`Entrance.spoil`."""
        self.path = self.spoiled / self.chance.choice(("saved.pt", "old.pt", f"run/{LAST}", f"run/{LAST}"))
        if self.path.suffix == ".safetensors" and self.chance.random() < 0.6:
            spoil_safetensors(self.path, self.chance)
        else:
            self.path.write_bytes(spoil_bytes(self.path.read_bytes(), self.chance))

    def take(self) -> Problems | None:
        """See :meth:`Entrance.take`."""
        if self.path.suffix == ".pt":
            read_checkpoint(self.path)
        else:
            load_state(self.path, {"model": self.model, "loss": self.loss}, self.optimiser)
        return None


def make_run(folder: Path) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    """A run folder of a model that was never trained, with a state to resume from."""
    folder.mkdir()
    encoders = {"image": {"kind": "small", "size": 16, "width": 4}, "text": {"kind": "small", "vocabulary": 200}}
    recipe = Recipe.model_validate({"name": "bad-inputs", "model": {"dim": D, **encoders}})
    tokenizer = train_tokenizer(WORDS, 200)
    model, loss = build_model(recipe.model, Assets(tokenizer, {})).eval(), build_loss(recipe)
    optimiser = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    for one in (*model.parameters(), *loss.parameters()):
        one.grad = torch.zeros_like(one)
    optimiser.step()
    modules: dict[str, torch.nn.Module] = {"model": model, "loss": loss}
    save_recipe(recipe, folder / RECIPE)
    save_assets(folder, tokenizer, model)
    save_state(folder / MODEL, modules, None, {"epoch": 1})
    save_state(folder / LAST, modules, optimiser, {"epoch": 1})
    return model, loss, optimiser


class TooLongError(BaseException):
    """An input took longer than the limit."""


def unclear(error: BaseException) -> str | None:
    """What is wrong with an error as the answer to a bad input; None if nothing is.

    Args:
        error: what reading has raised.

    Returns:
        The kind of fault.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    if isinstance(error, TooLongError):
        return f"no end within the limit at {where}"
    if not isinstance(error, UserError | ValueError | OSError):
        return f"{type(error).__name__} at {where}"
    message = printable(explain_os_error(error))  # As the command line prints it.
    explained = isinstance(error, OSError) and explain_os_error(error) != str(error)
    if not explained and (not ours or frames[-1] is not ours[-1]):
        return f"{type(error).__name__} of another package at {where}"
    return unreadable(message) and f"{unreadable(message)} at {where}"


def unreadable(message: str) -> str | None:
    """What is wrong with the text of a message; None if nothing is."""
    if found := _UNREADABLE.search(message):
        return f"a message with {found[0]!r}"
    return "a message of more than 5,000 characters" if len(message) > 5000 else None


def limit(seconds: float, longest: float) -> None:
    """Send signals after seconds of the processor, and after seconds with waiting; 0 for none."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, longest)


def try_one(entrance: Entrance, outcome: Outcome) -> None:
    """Spoil the samples, read them, and note what becomes of it.

    Args:
        entrance: the entrance.
        outcome: is added to.
    """
    entrance.renew()
    entrance.spoil()
    began = time.process_time()
    limit(LIMIT, LONGEST)
    told: str | None
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            problems = entrance.take()
    except BaseException as error:
        limit(0, 0)
        if isinstance(error, KeyboardInterrupt):
            raise
        told, text, refused = unclear(error), str(error), True
    else:
        limit(0, 0)
        reasons = [f"{one.location}: {one.reason}" for one in problems.items] if problems else []
        told = next(filter(None, map(unreadable, reasons)), None)
        text, refused = "; ".join(reasons), bool(reasons)
        if warned and told is None:
            told, text = f"{warned[0].category.__name__} at {Path(warned[0].filename).name}", str(warned[0].message)
    outcome.slowest = max(outcome.slowest, time.process_time() - began)
    if told is not None:
        outcome.unexpected.append(f"{told} | {text[:300]!r}")
    elif refused:
        outcome.refused += 1
    else:
        outcome.accepted += 1


def resident_mb() -> float:
    """Resident MB of this process, without what is free."""
    gc.collect()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def try_all(name: str, folder: Path, inputs: int, seed: int) -> Outcome:
    """Bad inputs at an entrance of ENTRANCES.

    Args:
        name: of the entrance.
        folder: empty.
        inputs: number of inputs.
        seed: of the source of randomness.

    Returns:
        What became of them.
    """
    chance = random.Random(f"{name}-{seed}")

    def stop(*_: object) -> None:
        raise TooLongError

    before = [(one, signal.signal(one, stop)) for one in (signal.SIGALRM, signal.SIGPROF)]
    entrance, outcome, start = ENTRANCES[name](folder / name, chance), Outcome(), 0.0
    try:
        for i in range(inputs):
            if i == inputs // 10:
                start = resident_mb()
            try_one(entrance, outcome)
    finally:
        for one, handler in before:
            signal.signal(one, handler)
    outcome.growth_mb = resident_mb() - start
    return outcome


ENTRANCES: dict[str, Callable[[Path, random.Random], Entrance]] = {
    "manifest": Manifests, "shards": Shards, "embeddings": Embeddings, "recipe": Recipes,
    "collection": Collections, "run": Runs, "checkpoint": Checkpoints,
}  # fmt: skip
"""Entrances by name; benchmarks/faults.py has requests to the service."""

MOST_GROWTH = 20.0
"""MB by which the resident memory of a process may differ between two looks."""


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of an entrance, measured in a process of its own.

    Args:
        name: of the entrance.
        options: of the command line.

    Returns:
        The figures; of a process that has ended, how it did.
    """
    command = [sys.executable, __file__, "--inputs", str(options.inputs), "--seed", str(options.seed), "--inside", name]
    began = time.perf_counter()
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = {"seconds": round(time.perf_counter() - began, 1)}
    if found.returncode or not found.stdout:
        ended = f"the process ended with {found.returncode}"
        return {"inputs": 0, "refused": 0, "accepted": 0, "unexpected": 1, "kinds": {ended: 1}, **seconds}
    return {**json.loads(found.stdout.splitlines()[-1]), **seconds}


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="at each entrance")
    parser.add_argument("--only", nargs="+", choices=ENTRANCES, metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.inside:
        with tempfile.TemporaryDirectory() as folder:
            outcome = try_all(options.inside, Path(folder), options.inputs, options.seed)
        print(json.dumps(outcome.figures()))
        return 0
    about = {"benchmark": "bad_inputs", "python": platform.python_version(), "seed": options.seed}
    results: dict[str, Any] = {}
    print("entrance     inputs refused accepted unexpected slowest, s growth, MB")
    for name in options.only or ENTRANCES:
        one = results[name] = in_a_process(name, options)
        numbers = f"{one['inputs']:>6} {one['refused']:>7} {one['accepted']:>8} {one['unexpected']:>10}"
        print(f"{name:<12} {numbers} {one.get('slowest_s', 0):>10.2f} {one.get('growth_mb', 0):>10.1f}", flush=True)
        for kind, number in one["kinds"].items():
            print(f"    {number} x {kind}")
        write_json(options.json, {**about, "results": results})
    return int(any(one["unexpected"] or one["growth_mb"] > MOST_GROWTH for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
