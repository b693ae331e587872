"""The embedded store beside SQLite with FAISS: exactness, time, memory, size on disk.

    fill        seconds to store --items x (--d + 1) vectors in batches of 2048, and to optimise; MB on disk; memory
    search      milliseconds of the first search after opening, and per call of 1 and 20 queries, k=10, with and without
                a filter; fraction of queries whose top 10 ids are those of a scan in float64
    write       milliseconds of one upsert of one item, new and replaced

    python benchmarks/stores.py --items 100000 --d 512 --json stores.json [--engines sfumato] [--steps search]

Each step of each engine runs in a process of its own on one processor core: `sfumato` is the store of `file:` URLs, and
`sqlite-faiss` a prototype without locks and messages: records in SQLite, FAISS's flat index over all vectors in memory.
Commit 318328e has Milvus Lite, LanceDB, sqlite-vec and plain products beside them; kills and readers beside a writer
are tested (tests/support/stores_contract.py). Memory is what the process holds beyond its start, without the pages of
files that the system may drop: RssAnon, sampled each 5 ms.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import sqlite3
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
from measuring import command_parser, write_json
from torch import Tensor

from sfumato.search.stores.protocol import Filter, Records, create_store, open_store

K, BATCH = 10, 2048
STEPS = ("fill", "search", "write")
MODULES = {"sfumato": "sqlite3", "sqlite-faiss": "faiss"}
"""By engine, the module that is imported for it."""

SECONDS = 1200
"""That a step of an engine may take."""


class SqliteFaiss:
    """Records in SQLite, and FAISS's flat index of all vectors in memory, read again after a write."""

    def __init__(self, folder: Path, dim: int, create: bool) -> None:
        self._dim, self._version = dim, -1
        self._db = sqlite3.connect(folder / "store.sqlite", isolation_level=None)
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA mmap_size={2**40}")
        if create:
            self._db.execute("PRAGMA journal_mode=WAL")
            columns = "id TEXT NOT NULL UNIQUE, uncertainty REAL NOT NULL, payload TEXT NOT NULL"
            self._db.execute(f"CREATE TABLE items (position INTEGER PRIMARY KEY AUTOINCREMENT, {columns})")
            self._db.execute("CREATE TABLE vectors (row INTEGER PRIMARY KEY, vector BLOB NOT NULL)")

    def upsert(self, records: Records) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        old = "SELECT position FROM items WHERE id IN (SELECT value FROM json_each(?))"
        for table, key in (("vectors", "row"), ("items", "position")):
            self._db.execute(f"DELETE FROM {table} WHERE {key} IN ({old})", (json.dumps(records.ids),))
        for i, id in enumerate(records.ids):
            row = id, float(records.uncertainty[i]), json.dumps(dict(records.payloads[i]))
            position = self._db.execute("INSERT INTO items (id, uncertainty, payload) VALUES (?, ?, ?)", row).lastrowid
            vector = np.asarray(records.vectors[i], np.float32).tobytes()
            self._db.execute("INSERT INTO vectors (row, vector) VALUES (?, ?)", (position, vector))
        self._db.execute("COMMIT")

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        faiss: Any = importlib.import_module("faiss")
        version = self._db.total_changes + self._db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self._version, self._index = version, faiss.IndexIDMap(faiss.IndexFlatL2(self._dim))
            cursor = self._db.execute("SELECT row, vector FROM vectors ORDER BY row")
            while rows := cursor.fetchmany(8192):
                flat = np.frombuffer(b"".join([row[1] for row in rows]), dtype=np.float32)
                self._index.add_with_ids(flat.reshape(-1, self._dim), np.array([row[0] for row in rows]))
        parameters = None
        if filter is not None:
            selected = faiss.IDSelectorBatch(self._positions(filter))
            parameters = faiss.SearchParameters(sel=selected)
        found = self._index.search(queries.numpy(), k, params=parameters)[1]
        return [self._fetch(row[row >= 0].tolist()) for row in found]

    def _positions(self, filter: Filter) -> np.ndarray:
        conditions, values = ["uncertainty <= ?"], list[Any]([filter.max_uncertainty or 1e30])
        for name, texts in filter.where.items():
            inside = "SELECT 1 FROM json_each(payload) WHERE key = ? AND atom IN (SELECT value FROM json_each(?))"
            conditions.append(f"EXISTS ({inside})")
            values += [name, json.dumps(list(texts))]
        sql = f"SELECT position FROM items WHERE {' AND '.join(conditions)}"
        return np.fromiter((row[0] for row in self._db.execute(sql, values)), dtype=np.int64)

    def _fetch(self, positions: list[int]) -> Records:
        sql = "SELECT position, id, uncertainty, payload, vector FROM items JOIN vectors ON row = position"
        listed = f"{sql} WHERE position IN (SELECT value FROM json_each(?))"
        by_position = {row[0]: row[1:] for row in self._db.execute(listed, (json.dumps(positions),))}
        found = [by_position[p] for p in positions]
        flat = np.frombuffer(b"".join(row[3] for row in found), dtype=np.float32).copy()
        return Records(
            tuple(row[0] for row in found),
            flat.reshape(-1, self._dim),
            np.array([row[1] for row in found], np.float32),
            tuple(json.loads(row[2]) for row in found),
        )

    def optimise(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._db.close()


def open_engine(name: str, folder: Path, dim: int, *, create: bool) -> Any:
    """An engine with its files in a folder, which is empty if a collection is made."""
    if name == "sqlite-faiss":
        return SqliteFaiss(folder, dim, create)
    url = f"file:{folder}/store"
    return create_store(url, dim, "benchmark") if create else open_store(url)


def payload(i: int) -> dict[str, str]:
    return {"tenth": str(i % 10), "path": f"images/{i:08d}.jpg"}


def records(vectors: np.ndarray, first: int) -> Records:
    """Items first, first + 1, ...; the last coordinate of a lifted vector is the square root of the total variance."""
    numbers = range(first, first + len(vectors))
    lifted = np.array(vectors)
    return Records(tuple(map(str, numbers)), lifted, lifted[:, -1] ** 2, tuple(payload(i) for i in numbers))


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


def agreement(engine: Any, queries: Tensor, wanted: list[list[str]], filter: Filter | None = None) -> float:
    """Fraction of queries whose ids are all right, whatever their order among equals."""
    parts = [*engine.search(queries[:1], K, filter), *engine.search(queries[1:], K, filter)]
    found = [set(part.ids) for part in parts]
    return sum(a == set(b) for a, b in zip(found, wanted, strict=True)) / len(wanted)


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
        found = re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())
        return 1024 * int(found[1]) if found else 0


def step_fill(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    vectors = np.load(options.data / "vectors.npy", mmap_mode="r")
    with Memory() as memory:
        store = open_engine(engine, folder, vectors.shape[1], create=True)
        start = time.perf_counter()
        for first in range(0, len(vectors), BATCH):
            store.upsert(records(vectors[first : first + BATCH], first))
        stored = time.perf_counter()
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
    """In a small store of 5,000 items."""
    vectors, _ = lifted_data(5000 + 60, options.d)
    store = open_engine(engine, folder, vectors.shape[1], create=True)
    store.upsert(records(vectors[:5000], 0))
    singles = [records(vectors[5000 + i : 5001 + i], 5000 + i) for i in range(60)]
    times = iter(singles[:40])
    new = _ms(lambda: store.upsert(next(times)), 40)
    again = iter(singles[:20])
    replaced = _ms(lambda: store.upsert(next(again)), 20)
    store.close()
    return {"upsert_one_ms": new, "replace_one_ms": replaced}


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
    with tempfile.TemporaryDirectory() as temporary:
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
                write_json(options.json, _about(options) | {"engines": results})
    return results


def child_command(engine: str, step: str, folder: Path, options: argparse.Namespace, *more: str) -> list[str]:
    """A step in a process of its own."""
    command = [sys.executable, __file__, "--work", step, "--engines", engine, "--folder", str(folder)]
    return [*command, "--items", str(options.items), "--d", str(options.d), *more]


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
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _about(options: argparse.Namespace) -> dict[str, Any]:
    settings = {"items": options.items, "d": options.d, "k": K, "batch": BATCH}
    return settings | {"python": platform.python_version(), "torch": torch.__version__, "load": os.getloadavg()[0]}


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--engines", nargs="+", choices=tuple(MODULES), default=list(MODULES))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--d", type=int, default=512, help="dimensions of the embeddings; lifted vectors have one more")
    for hidden in ("--work", "--folder", "--data"):
        parser.add_argument(hidden, type=str if hidden == "--work" else Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.work:
        measure(options)
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    work = {"fill": step_fill, "search": step_search, "write": step_write}
    print(json.dumps(work[options.work](options.engines[0], options.folder, options)))


if __name__ == "__main__":
    main()
