"""Writers that are killed, and readers beside a writer: the steps kill and readers of `benchmarks/stores.py`."""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from store_engines import Engine, open_engine

from sfumato.search.stores.protocol import Records


def step_writer(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write until killed; each acknowledged write is a line."""
    store, run, step = open_engine(engine, folder, 3, create=False), options.seed, 0
    chance = random.Random(run)
    print("open", flush=True)
    while True:
        n = chance.randint(1, 60)
        ids = chance.sample(range(500), n)
        vectors = torch.tensor([[i, run, step] for i in ids], dtype=torch.float32)
        note = {"run": str(run), "step": str(step)}
        store.upsert(Records(tuple(f"i{i}" for i in ids), vectors, torch.zeros(n), (note,) * n))
        print("put", run, step, *ids, flush=True)
        if step % 4 == 3:
            gone = chance.sample(range(500), 20)
            store.delete([f"i{i}" for i in gone])
            print("gone", run, step, *gone, flush=True)
        if step % 6 == 5:
            store.optimise()
        step += 1


def step_kill(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    open_engine(engine, folder, 3, create=True).close()
    chance = random.Random(7)
    expected: dict[str, tuple[int, int] | None] = {}
    result = {"kills": 0, "acknowledged": 0, "not_opened": 0, "lost": 0, "torn": 0, "reopen_s": 0.0}
    for run in range(options.kills):
        with _writer(engine, folder, options, run) as (child, lines):
            time.sleep(chance.uniform(0.05, 1.5))
            os.killpg(child.pid, signal.SIGKILL)
        for line in lines:
            kind, at, step, *ids = line.split()
            expected |= {f"i{i}": (int(at), int(step)) if kind == "put" else None for i in ids}
        result["kills"] += 1
        result["acknowledged"] += len(lines)
        start = time.perf_counter()
        try:
            store = open_engine(engine, folder, 3, create=False)
            stored = dict(_stamps(store))
        except Exception as error:
            print(f"{engine}: does not open after kill {run}: {type(error).__name__}: {error}", file=sys.stderr)
            result["not_opened"] += 1
            return result
        result["reopen_s"] = max(result["reopen_s"], time.perf_counter() - start)
        store.close()
        _compare(expected, stored, result)
        expected = dict(stored)
    return result


def _compare(
    expected: dict[str, tuple[int, int] | None], stored: dict[str, tuple[int, int]], result: dict[str, Any]
) -> None:
    """Count what was lost and what is torn; the one write that was under way may be there as a whole, or not at all."""
    ahead = {key: stored.get(key) for key in stored.keys() | expected if stored.get(key) != expected.get(key)}
    latest = max((stamp for stamp in expected.values() if stamp), default=(-1, 0))
    stamps = set(ahead.values())
    if stamps in (set(), {None}):  # nothing, or a delete that was not acknowledged
        return
    stamp = next(iter(stamps))
    if len(stamps) > 1 or stamp is None or stamp <= latest:
        result["lost"] += 1
    elif {f"i{i}" for i in _batch_of(*stamp)} != set(ahead):
        result["torn"] += 1


def _batch_of(run: int, step: int) -> list[int]:
    """The ids of a writer's batch."""
    chance = random.Random(run)
    for at in range(step + 1):
        ids = chance.sample(range(500), chance.randint(1, 60))
        if at % 4 == 3 and at < step:
            chance.sample(range(500), 20)
    return ids


def _stamps(store: Engine) -> Iterator[tuple[str, tuple[int, int]]]:
    """Id and (run, step) of all items; vector and payload of each must agree, and no id may occur twice."""
    seen = set[str]()
    for part in store.scan():
        for key, vector, note in zip(part.ids, part.vectors.tolist(), part.payloads, strict=True):
            stamp = int(note["run"]), int(note["step"])
            if vector != [float(key[1:]), *map(float, stamp)] or key in seen:
                raise ValueError(f"item {key} is torn: {vector}, {note}")
            seen.add(key)
            yield key, stamp


@contextlib.contextmanager
def _writer(
    engine: str, folder: Path, options: argparse.Namespace, run: int
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A writing process that has opened the store, and its acknowledgements; the block must end the process."""
    command = child_command(engine, "writer", folder, options, f"--seed={run}")
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    if child.stdout.readline() != "open\n":
        raise RuntimeError(f"{engine}: the writer did not start")
    lines: list[str] = []
    out = child.stdout
    thread = threading.Thread(target=lambda: lines.extend(line for line in out if line.endswith("\n")))
    thread.start()
    yield child, lines
    child.wait()
    thread.join()
    out.close()


def step_readers(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    open_engine(engine, folder, 3, create=True).close()
    seen, told, problem = 0, 0, ""
    with _writer(engine, folder, options, 1) as (child, lines):
        try:
            store = open_engine(engine, folder, 3, create=False)
            end = time.monotonic() + 5
            while time.monotonic() < end and child.poll() is None:
                told = len(lines)
                acknowledged = {f"i{i}": line.startswith("put") for line in lines[:told] for i in line.split()[3:]}
                steps = {i: int(line.split()[2]) for line in lines[:told] for i in line.split()[3:]}
                stored = dict(_stamps(store))
                late = [i for i, there in acknowledged.items() if there and stored.get(i, (1, -1))[1] < steps[i[1:]]]
                # What was deleted meanwhile is not missing.
                gone = {f"i{i}" for line in list(lines)[told:] if line.startswith("gone") for i in line.split()[3:]}
                if missing := [i for i in late if i not in gone and i in stored]:
                    problem = f"an old version of {missing[0]}"
                    break
                seen += 1
                time.sleep(0.05)
            problem = problem or ("" if child.poll() is None else "the writer died")
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return {"reads": seen, "writes_meanwhile": told, "problem": problem}


def child_command(engine: str, step: str, folder: Path, options: argparse.Namespace, *more: str) -> list[str]:
    """A step in a process of its own."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("stores.py")),
        "--work",
        step,
        "--engines",
        engine,
        "--folder",
        str(folder),
    ]
    return [*command, "--items", str(options.items), "--d", str(options.d), "--kills", str(options.kills), *more]
