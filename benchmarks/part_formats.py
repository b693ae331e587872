"""One part of an embedded collection in several file formats: time to write, time to read, size.

    python benchmarks/part_formats.py [--items 10000] [--d 512] [--json FILE]

Contents are compared after every read. Parquet and Arrow need the extra `parquet`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import torch

from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding, load_embeddings, save_embeddings

Rows = tuple[list[str], np.ndarray, np.ndarray]


def table(ids: list[str], embeddings: GaussianEmbedding) -> Any:
    columns = {"id": pa.array(ids)}
    for name, values in (("mean", embeddings.mean), ("log_var", embeddings.log_var)):
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.numpy().reshape(-1)), embeddings.d)
    return pa.table(columns)


def rows_of(found: Any, d: int) -> Rows:
    means, log_vars = (
        np.concatenate([chunk.flatten().to_numpy() for chunk in found[name].chunks]).reshape(-1, d)
        for name in ("mean", "log_var")
    )
    return found["id"].to_pylist(), means, log_vars


def write_parquet(path: Path, ids: list[str], embeddings: GaussianEmbedding, compression: str) -> None:
    buffer = pa.BufferOutputStream()
    parquet.write_table(table(ids, embeddings), buffer, compression=compression, use_dictionary=False)
    write_atomically(path, buffer.getvalue().to_pybytes())


def read_safetensors(path: Path) -> Rows:
    embeddings, ids = load_embeddings(path)
    return list(ids or ()), embeddings.mean.numpy(), embeddings.log_var.numpy()


def measure(
    write: Callable[[Path], None], read: Callable[[Path], Rows], expected: Rows, repeats: int
) -> dict[str, float]:
    """Medians in milliseconds, and megabytes."""
    written, took = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "part"
            start = time.perf_counter()
            write(path)
            middle = time.perf_counter()
            ids, means, log_vars = read(path)
            end = time.perf_counter()
            assert ids == expected[0] and (means == expected[1]).all() and (log_vars == expected[2]).all()
            written.append(middle - start)
            took.append(end - middle)
            size = path.stat().st_size / 1e6
    return {"write_ms": 1e3 * statistics.median(written), "read_ms": 1e3 * statistics.median(took), "mb": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    mean, log_var = (torch.randn(arguments.items, arguments.d, generator=generator) for _ in range(2))
    embeddings = GaussianEmbedding(torch.nn.functional.normalize(mean, dim=1), log_var - 6)
    ids = [f"folder/{i:08d}.jpg" for i in range(arguments.items)]
    expected = ids, embeddings.mean.numpy(), embeddings.log_var.numpy()
    formats: dict[str, tuple[Callable[[Path], None], Callable[[Path], Rows]]] = {
        "safetensors": (lambda path: save_embeddings(path, embeddings, ids), read_safetensors),
        "parquet zstd": (
            lambda path: write_parquet(path, ids, embeddings, "zstd"),
            lambda path: rows_of(parquet.read_table(path), arguments.d),
        ),
        "parquet": (
            lambda path: write_parquet(path, ids, embeddings, "none"),
            lambda path: rows_of(parquet.read_table(path), arguments.d),
        ),
        "arrow": (
            lambda path: feather.write_feather(table(ids, embeddings), path, compression="uncompressed"),
            lambda path: rows_of(feather.read_table(path), arguments.d),
        ),
    }
    results = {name: measure(*pair, expected, arguments.repeats) for name, pair in formats.items()}
    for name, row in results.items():
        print(f"{name:14} write {row['write_ms']:6.0f} ms  read {row['read_ms']:6.0f} ms  {row['mb']:6.2f} MB")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
