"""A million items in a store: time to write and to index, memory, disk, and recall with queries of both modalities.

    python benchmarks/scale.py FLICKR8K [--items 100000 300000 1000000] [--stores URL ...] [--json FILE]
    python benchmarks/scale.py FLICKR8K --compressed --items 200000 --json benchmarks/results/compressed.json

FLICKR8K as for own_folder.py. The items are 512 wide and in clusters: each is an image of the training split, as
`small` embeds it, moved by parts of two differences between an image and its nearest one, and turned from 256 to 512
dimensions, with noise; it has a caption, a tag and a year. The lifted vectors of csd have 513 numbers. Queries are 500
images and 500 texts of the test split: texts lie apart from the images. Recall is of the ten nearest of all items in
float64 after a float32 product found 64 candidates.

A store is a URL with {} for its folder, as in "file:{}?engine=hnsw", or a server of store_servers.py with options, as
in "milvus?index=HNSW&ef=512". Each size of each store runs in two processes of its own, one that writes and indexes and
one that searches, so that the peak of memory is theirs; that of the programs alone is subtracted. The memory of a
server is what it holds after each step; it is started again before the searches. "index, MB" is the size of the index
file, of the index in PostgreSQL, and the memory of a Milvus server that searches less that of an empty one. "queries a
second" is of 256 queries at once; "p99 of 16" is of single queries of 16 clients, threads of one process.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from match_loss import peak_mb
from measuring import command_parser, of_process, write_json
from own_folder import Split
from store_servers import SERVERS, LocalServer, family_memory
from torch.nn.functional import normalize

from sfumato.search.stores.protocol import Records, create_store, open_store

STORES = ("file:{}?engine=hnsw", "milvus?index=HNSW&m=32&ef=512")
COMPRESSED = (
    *(f"file:{{}}?engine=hnsw&compress={word}" for word in ("none", "int8")),
    *(f"postgresql?index=hnsw&m=32&ef_search=512&compress={word}" for word in ("none", "half", "binary")),
    "milvus?index=HNSW&m=32&ef=512",
    *(f"milvus?index=IVF_FLAT&nlist=512&nprobe=64&compress={word}" for word in ("none", "int8")),
)
D, BATCH, NOISE, VARIANCE = 512, 10_000, 0.02, (0.06, 0.05)
N_QUERIES, K, CANDIDATES = 500, 10, 64


class World:
    """Items and queries; the same numbers always give the same items."""

    def __init__(self, file: Path) -> None:
        known = torch.load(file, weights_only=True)
        self.image, self.step, self.turn, self.queries = (known[n] for n in ("image", "step", "turn", "queries"))
        self.captions = file.with_suffix(".txt").read_text("utf-8").splitlines()

    @staticmethod
    def make(flickr8k: Path, file: Path) -> None:
        """Embed the photographs once."""
        train, test = (Split(flickr8k, name) for name in ("train", "test"))
        image, generator = train.images.mean.float(), torch.Generator().manual_seed(0)
        nearest = torch.cdist(image, image).fill_diagonal_(torch.inf).argmin(1)
        turn = torch.linalg.qr(torch.randn(D, image.shape[1], generator=generator)).Q.T
        texts = test.model.embed_texts([own[0] for own in test.captions[:N_QUERIES]]).tensors().mean
        both = torch.cat([test.images.mean[-N_QUERIES:], texts]).float() @ turn
        queries = torch.cat([both, torch.zeros(len(both), 1)], dim=1)
        torch.save({"image": image, "step": image - image[nearest], "turn": turn, "queries": queries}, file)
        file.with_suffix(".txt").write_text("\n".join(own[0] for own in train.captions), "utf-8")

    def batches(self, n: int) -> Iterator[Records]:
        """n items."""
        for start in range(0, n, BATCH):
            generator, m = torch.Generator().manual_seed(start), min(BATCH, n - start)
            row = torch.randint(len(self.image), (3, m), generator=generator)
            moved = 0.5 * torch.rand((2, m, 1), generator=generator) * self.step[row[1:]]
            mean = normalize(self.image[row[0]] + moved.sum(0), dim=1) @ self.turn
            mean += NOISE / D**0.5 * torch.randn(m, D, generator=generator)
            variance = VARIANCE[0] + VARIANCE[1] * torch.rand(m, generator=generator)
            about = [
                {"captions": self.captions[i], "tags": f"tag {i % 100}", "date": f"{2000 + i % 25}"} for i in row[0]
            ]
            ids = tuple(f"{i:09}" for i in range(start, start + m))
            vectors = torch.cat([mean, variance.sqrt().unsqueeze(1)], dim=1)
            yield Records(ids, vectors.numpy(), variance.numpy(), tuple(about))

    def nearest(self, n: int) -> list[list[int]]:
        """The true K nearest of n items to each query."""
        bound = torch.full((len(self.queries), CANDIDATES), torch.inf)
        place, vectors = torch.zeros_like(bound, dtype=torch.long), torch.zeros(*bound.shape, D + 1)
        for start, batch in zip(range(0, n, BATCH), self.batches(n), strict=True):
            own = torch.from_numpy(batch.vectors)
            lower = own.square().sum(1) - 2 * self.queries @ own.T
            near, row = lower.topk(CANDIDATES, largest=False)
            bound, best = torch.cat([bound, near], 1).topk(CANDIDATES, largest=False)
            place = torch.cat([place, row + start], 1).gather(1, best)
            wide = best.unsqueeze(2).expand(-1, -1, D + 1)
            vectors = torch.cat([vectors, own[row]], 1).gather(1, wide)
        exact = (vectors.double() - self.queries.double().unsqueeze(1)).square().sum(2)
        return place.gather(1, exact.topk(K, largest=False).indices).tolist()


def written(world: World, url: str, n: int) -> dict[str, float]:
    """Store n items and build the index."""
    before, began = peak_mb(), time.perf_counter()
    store = create_store(url, D + 1, "scale")
    for batch in world.batches(n):
        store.upsert(batch)
    stored = time.perf_counter()
    store.optimise()
    indexed = time.perf_counter()
    store.close()
    return {"store, s": stored - began, "index, s": indexed - stored, "memory to write, MB": peak_mb() - before}


def searched(world: World, url: str, n: int) -> dict[str, float]:
    """Search it, one query at a time and many at once."""
    truth, before = json.loads(Path(f"truth-{n}.json").read_text()), peak_mb()
    store = open_store(url)
    store.search(world.queries[:1], K)

    def one(query: Any) -> tuple[float, list[int]]:
        began = time.perf_counter()
        (found,) = store.search(query, K)
        return time.perf_counter() - began, [int(i) for i in found.ids]

    alone = [one(query) for query in world.queries.split(1)]
    with ThreadPoolExecutor(16) as clients:
        together = list(clients.map(one, world.queries.split(1)))
    began = time.perf_counter()
    store.search(world.queries[:256], K)
    many = time.perf_counter() - began
    store.close()
    recall = [len({*found} & {*right}) / K for (_, found), right in zip(alone, truth, strict=True)]
    p50, p99 = np.quantile([seconds for seconds, _ in alone], [0.5, 0.99])
    return {
        "recall, images": float(np.mean(recall[:N_QUERIES])),
        "recall, texts": float(np.mean(recall[N_QUERIES:])),
        "p50, ms": 1000 * float(p50),
        "p99, ms": 1000 * float(p99),
        "p99 of 16, ms": 1000 * float(np.quantile([seconds for seconds, _ in together], 0.99)),
        "queries a second": 256 / many,
        "memory to search, MB": peak_mb() - before,
    }


def size(folder: Path) -> float:
    """MB of the files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


@contextmanager
def opened(form: str, folder: Path) -> Iterator[tuple[str, LocalServer | None]]:
    """The URL of a store in a folder, and its server."""
    name, _, options = form.partition("?")
    if name not in SERVERS:
        yield form.format(folder), None
        return
    server = SERVERS[name](folder)
    server.start()
    try:
        yield f"{server.url}{'&' if '?' in server.url else '?'}{options}", server
    finally:
        server.kill()


def index_of(url: str, folder: Path) -> float:
    """MB of the index of a store in a folder or in PostgreSQL."""
    if url.startswith("file:"):
        return sum(file.stat().st_size for file in folder.glob("index-*")) / 1e6
    import psycopg

    with psycopg.connect(url.partition("?")[0]) as connection:
        query = "SELECT sum(pg_relation_size(indexrelid)) FROM pg_index WHERE indrelid = 'soak'::regclass"
        [(found,)] = connection.execute(f"{query} AND NOT indisprimary").fetchall()
        return float(found) / 1e6


def measured(form: str, n: int, work: Path, folder: Path, flickr8k: Path) -> dict[str, float]:
    """The figures of a store of n items in a new folder."""
    figures = dict[str, float]()
    with opened(form, folder) as (url, server):
        empty = 0.0 if server is None else family_memory(server.pid)
        for step in ("write", "search"):
            if server is not None and step == "search":
                server.kill()
                server.start()
            figures |= of_process([sys.executable, __file__, str(flickr8k), "--step", step, url, str(n)], cwd=work)
            if server is not None:
                figures[f"memory to {step}, MB"] = family_memory(server.pid)
        milvus = url.startswith("milvus")
        figures["index, MB"] = figures["memory to search, MB"] - empty if milvus else index_of(url, folder)
    return figures | {"disk, MB": size(folder)}


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("--items", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--stores", nargs="+", default=STORES)
    parser.add_argument("--compressed", action="store_true", help="stores with each compression instead")
    parser.add_argument("--step", nargs=3, metavar=("WHAT", "URL", "N"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        what, url, n = given.step
        return print(json.dumps({"write": written, "search": searched}[what](World(Path("world.pt")), url, int(n))))
    result: dict[str, Any] = {"dim": D, "stores": {}}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        folder.chmod(0o755)  # PostgreSQL may run as the user nobody.
        World.make(given.flickr8k, folder / "world.pt")
        for n in given.items:
            (folder / f"truth-{n}.json").write_text(json.dumps(World(folder / "world.pt").nearest(n)))
            for i, form in enumerate(COMPRESSED if given.compressed else given.stores):
                figures = measured(form, n, folder, folder / f"{n}-{i}", given.flickr8k)
                result["stores"].setdefault(form.replace("{}", ""), {})[str(n)] = figures
                print(form, n, json.dumps(figures), flush=True)
                write_json(given.json, result)


if __name__ == "__main__":
    main()
