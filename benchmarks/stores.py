"""Embedded vector stores against each other: exactness, kill -9, time, memory, size on disk, size of what they need.

The engines are in `store_engines.py`. Each step of each engine runs in a process of its own on one processor core:

    install     MB of packages that sfumato alone does not need, and seconds that the import takes after torch and numpy
    exact       fraction of queries whose top 10 ids are those of a scan in float64: of 20,000 lifted vectors, with and
                without a filter, after 2,000 were replaced and 1,000 deleted, and of vectors far from the origin, where
                ||x||^2 - 2<x, q> cancels in float32
    fill        seconds to store --items x (--d + 1) vectors in batches of 2048, and to optimise; MB on disk; memory
    search      milliseconds of the first search after opening, and per call of 1 and 20 queries, k=10, with and without
                a filter
    write       milliseconds of one upsert of one item, and forced writes (fsync and the like) of each, by strace
    kill        writers killed by SIGKILL at random moments: stores that did not open again, kills after which an
                acknowledged write was missing or changed, and kills after which a batch was there in part
    readers     whether a second process reads what was acknowledged while the first one writes

    python benchmarks/stores.py --items 100000 --d 512 --kills 20 --json stores.json [--engines lancedb] [--steps kill]

Memory is what the process holds beyond its start, without the pages of files that the system may drop: RssAnon, sampled
each 5 ms. LanceDB waits for itself for ever if LANCE_IO_THREADS is 1; so threads are limited by processor affinity.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exactness import synthetic
from packaging.requirements import Requirement
from store_engines import MODULES, PACKAGES, Engine, LanceEngine, open_engine
from store_faults import child_command, step_kill, step_readers, step_writer
from torch import Tensor

from sfumato.search.stores.protocol import Filter, Records

K, BATCH, SMALL = 10, 2048, 20_000
STEPS = ("install", "exact", "fill", "search", "write", "kill", "readers")
SECONDS = 1200
"""That a step of an engine may take."""


def payload(i: int) -> dict[str, str]:
    return {"tenth": str(i % 10), "path": f"images/{i:08d}.jpg"}


def records(vectors: np.ndarray, first: int) -> Records:
    """Items first, first + 1, ...; the last coordinate of a lifted vector is the square root of the total variance."""
    numbers = range(first, first + len(vectors))
    lifted = torch.from_numpy(np.array(vectors))
    return Records(tuple(map(str, numbers)), lifted, lifted[:, -1].square(), tuple(payload(i) for i in numbers))


def truth(vectors: np.ndarray, queries: Tensor, allowed: np.ndarray) -> list[list[str]]:
    """Ids of the nearest of the allowed rows, by differences in float64."""
    nearest = []
    for query in queries.double().numpy():
        distance = np.concatenate(
            [np.square(vectors[i : i + 8192].astype(np.float64) - query).sum(1) for i in range(0, len(vectors), 8192)]
        )
        rows = allowed.nonzero()[0]
        nearest.append([str(i) for i in rows[np.argsort(distance[rows], kind="stable")[:K]]])
    return nearest


def filter_of(uncertainty: np.ndarray) -> tuple[Filter, np.ndarray]:
    """A filter that a tenth of the items fits, and which they are."""
    bound = float(np.median(uncertainty))
    inside = (uncertainty <= bound) & np.isin(np.arange(len(uncertainty)) % 10, (3, 7))
    return Filter({"tenth": ("3", "7")}, bound), inside


def agreement(engine: Engine, queries: Tensor, wanted: list[list[str]], filter: Filter | None = None) -> float:
    """Fraction of queries whose ids are all right, whatever their order among equals."""
    found = [set(part.ids) for size in (1, len(queries) - 1) for part in _search(engine, queries, size, filter)]
    return sum(a == set(b) for a, b in zip(found, wanted, strict=True)) / len(wanted)


def _search(engine: Engine, queries: Tensor, size: int, filter: Filter | None) -> list[Records]:
    """The first query alone, then the others together."""
    return engine.search(queries[:1] if size == 1 else queries[1:], K, filter)


def lifted_data(items: int, d: int, seed: int = 0) -> tuple[np.ndarray, Tensor]:
    """(m, d + 1) vectors of a gallery and (20, d + 1) of queries."""
    data = synthetic(items, d, 20, "large", seed)
    vectors = torch.cat([data.mean - data.centre, data.total_variance.sqrt().unsqueeze(1)], 1)
    return vectors.numpy(), torch.cat([data.queries - data.centre, torch.zeros(20, 1)], 1)


class Memory(contextlib.AbstractContextManager["Memory"]):
    """Peak of a process's anonymous memory while the block runs, in MB above its start."""

    def __enter__(self) -> "Memory":
        self._start = self._peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak_mb = (max(self._peak, self._now()) - self._start) / 1e6

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, self._now())

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        found = re.search(r"RssAnon:\s*(\d+)", status)
        return 1024 * int(found[1]) if found else 0


def step_install(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    extra = _needs(list(PACKAGES[engine])) - _needs(["sfumato"])
    code = (
        f"import time, torch, numpy; t = time.perf_counter(); import {MODULES[engine]}; print(time.perf_counter() - t)"
    )
    timed = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]
    seconds = min(timed)
    return {"import_s": seconds, "packages": sorted(extra), "mb": sum(map(_installed_mb, extra))}


def _needs(packages: list[str]) -> set[str]:
    """These packages and all that they need, without extras."""
    known, waiting = set[str](), list(packages)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in known:
            continue
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        known.add(name)
        parsed = map(Requirement, needed)
        waiting += [r.name for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return known


def _installed_mb(package: str) -> float:
    files = importlib.metadata.files(package) or []
    paths = (Path(str(file.locate())) for file in files)
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def step_exact(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    vectors, queries = lifted_data(SMALL, options.d)
    store = open_engine(engine, folder, vectors.shape[1], create=True)
    for start in range(0, SMALL, BATCH):
        store.upsert(records(vectors[start : start + BATCH], start))
    everything = np.ones(SMALL, dtype=bool)
    filter, inside = filter_of(vectors[:, -1] ** 2)
    result = {"plain": agreement(store, queries, truth(vectors, queries, everything))}
    result["filter"] = agreement(store, queries, truth(vectors, queries, inside), filter)
    vectors = vectors.copy()
    vectors[:2000] = vectors[2000:4000][::-1] * 1.01
    everything[5000:6000] = False
    store.upsert(records(vectors[:2000], 0))
    result["deleted"] = store.delete([str(i) for i in range(5000, 6000)])
    result["changed"] = agreement(store, queries, truth(vectors, queries, everything))
    store.optimise()
    result["optimised"] = agreement(store, queries, truth(vectors, queries, everything))
    store.close()
    (folder / "far").mkdir()
    far, asked = vectors + np.float32(100), queries + 100
    store = open_engine(engine, folder / "far", vectors.shape[1], create=True)
    for start in range(0, SMALL, BATCH):
        store.upsert(records(far[start : start + BATCH], start))
    result["far"] = agreement(store, asked, truth(far, asked, np.ones(SMALL, dtype=bool)))
    store.close()
    return result


def step_fill(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    vectors = np.load(options.data / "vectors.npy", mmap_mode="r")
    with Memory() as memory:
        store = open_engine(engine, folder, vectors.shape[1], create=True)
        start = time.perf_counter()
        for first in range(0, len(vectors), BATCH):
            store.upsert(records(vectors[first : first + BATCH], first))
        stored = time.perf_counter()
        if isinstance(store, LanceEngine):
            store.optimise(keep=0)  # no other process reads
        else:
            store.optimise()
        done = time.perf_counter()
        store.close()
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    return {"upsert_s": stored - start, "optimise_s": done - stored, "disk_mb": disk, "peak_mb": memory.peak_mb}


def step_search(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """After fill, in the same folder."""
    asked = torch.load(options.data / "queries.pt")
    queries, wanted, bound = asked["queries"], asked["truth"], asked["bound"]
    filter = Filter({"tenth": ("3", "7")}, bound)
    importlib.import_module(MODULES[engine])
    with Memory() as memory:
        store = open_engine(engine, folder, queries.shape[1], create=False)
        first = _ms(lambda: store.search(queries[:1], K), 1)
        result = {
            "first_ms": first,
            "one_ms": _ms(lambda: store.search(queries[:1], K), 9),
            "twenty_ms": _ms(lambda: store.search(queries, K), 5),
        }
        result["filter_first_ms"] = _ms(lambda: store.search(queries[:1], K, filter), 1)
        result["filter_one_ms"] = _ms(lambda: store.search(queries[:1], K, filter), 5)
    found = agreement(store, queries, wanted["all"])
    filtered = agreement(store, queries, wanted["filter"], filter)
    store.close()
    return result | {"peak_mb": memory.peak_mb, "exact": found, "filter_exact": filtered}


def _ms(run: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def step_write(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """In a small store of 5,000 items; forced writes are counted in a second process under strace."""
    vectors, _ = lifted_data(5000 + 60, options.d)
    store = open_engine(engine, folder, vectors.shape[1], create=True)
    store.upsert(records(vectors[:5000], 0))
    singles = [records(vectors[5000 + i : 5001 + i], 5000 + i) for i in range(60)]
    times = iter(singles[:40])
    new = _ms(lambda: store.upsert(next(times)), 40)
    again = iter(singles[:20])
    replaced = _ms(lambda: store.upsert(next(again)), 20)
    store.close()
    result = {"upsert_one_ms": new, "replace_one_ms": replaced}
    if shutil.which("strace"):
        counted = [_forced(engine, folder, options, n) for n in (5, 25)]
        result["forced_writes_each"] = (counted[1] - counted[0]) / 20
    return result


def _forced(engine: str, folder: Path, options: argparse.Namespace, n: int) -> int:
    """Forced writes of a process that opens the store and upserts n single items."""
    trace = folder.parent / "trace"
    command = ["strace", "-f", "-qq", "-e", "trace=fsync,fdatasync,msync,sync_file_range", "-o", str(trace)]
    subprocess.run(
        [*command, *child_command(engine, "singles", folder, options, f"--seed={n}")], check=True, timeout=600
    )
    return len(re.findall(r"\b(?:fsync|fdatasync|msync|sync_file_range)\(", trace.read_text()))


def step_singles(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    store = open_engine(engine, folder, options.d + 1, create=False)
    for i in range(options.seed):
        store.upsert(records(np.full((1, options.d + 1), i, dtype=np.float32), i))
    store.close()
    return {}


def prepare(folder: Path, items: int, d: int) -> None:
    """Vectors, queries and their float64 truth, for all engines."""
    vectors, queries = lifted_data(items, d)
    filter, inside = filter_of(vectors[:, -1] ** 2)
    np.save(folder / "vectors.npy", vectors)
    wanted = {"all": truth(vectors, queries, np.ones(items, dtype=bool)), "filter": truth(vectors, queries, inside)}
    torch.save({"queries": queries, "truth": wanted, "bound": filter.max_uncertainty}, folder / "queries.pt")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """By engine and step, the figures, or what went wrong."""
    results: dict[str, Any] = {engine: {} for engine in options.engines}
    with tempfile.TemporaryDirectory(dir=options.scratch) as temporary:
        data = Path(temporary)
        if {"fill", "search"} & set(options.steps):
            prepare(data, options.items, options.d)
        for step in options.steps:
            for engine in options.engines:
                folder = data / f"{engine}-{'fill' if step == 'search' else step}" / "files"
                folder.mkdir(parents=True, exist_ok=True)
                command = child_command(engine, step, folder, options, f"--data={data}")
                results[engine][step] = result = _figures(command)
                print(f"{step:8} {engine:14} {json.dumps(result)}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(_about(options) | {"engines": results}, indent=2) + "\n")
    return results


def _figures(command: list[str]) -> dict[str, Any]:
    """What a step has printed last."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {SECONDS} s"}
    if done.returncode:
        return {"failed": f"exit status {done.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _about(options: argparse.Namespace) -> dict[str, Any]:
    settings = {"items": options.items, "d": options.d, "kills": options.kills, "k": K, "batch": BATCH}
    return settings | {"python": platform.python_version(), "torch": torch.__version__, "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=tuple(MODULES), default=list(MODULES))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--d", type=int, default=512, help="dimensions of the embeddings; lifted vectors have one more")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure; the system's own if left out")
    parser.add_argument("--json", type=Path)
    for hidden in ("--work", "--folder", "--data"):
        parser.add_argument(hidden, type=str if hidden == "--work" else Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.work:
        measure(options)
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    work = {
        **{"install": step_install, "exact": step_exact, "fill": step_fill, "search": step_search, "write": step_write},
        **{"singles": step_singles, "writer": step_writer, "kill": step_kill, "readers": step_readers},
    }
    print(json.dumps(work[options.work](options.engines[0], options.folder, options)))


if __name__ == "__main__":
    main()
