"""Workers of `sfumato embed` that are killed at random moments and replaced, against one that is left alone.

    python benchmarks/embedding_workers.py [--model small] [--shards 16] [--pictures 24] [--workers 3] [--kills 8]
                                           [--seed 0] [--json PATH]

The shards hold pictures of 64 pixels. Each worker is the command itself, in a process of its own, started without
--shard; all write into one folder. At random moments (by the seed) a worker gets SIGKILL, and a new one takes its
place. At the end the parts are compared with those of one uninterrupted command: ids, payloads, and embeddings within
1e-5. Printed: what is missing, twice or different, how many parts were written more than once (a part that is replaced
gets a new inode), and the seconds of both.
"""

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sfumato.search.parts import read_parts


def make_shards(folder: Path, shards: int, pictures: int) -> None:
    """Shards of pictures in plain colours, each another one."""
    chance = np.random.default_rng(0)
    folder.mkdir()
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for k in range(pictures):
                buffer = io.BytesIO()
                pixels = chance.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC).save(buffer, "PNG")
                member = tarfile.TarInfo(f"{k:05d}.png")
                member.size = buffer.getbuffer().nbytes
                buffer.seek(0)
                tar.addfile(member, buffer)


def worker(model: str, shards: Path, out: Path) -> "subprocess.Popen[bytes]":
    """The command, with a thread of its own for the encoder."""
    command = [sys.executable, "-m", "sfumato", "embed", model, "--shards", str(shards), "--out", str(out)]
    return subprocess.Popen(
        [*command, "--batch", "8", "--workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def seen_parts(out: Path, seen: dict[str, set[int]]) -> None:
    """Note the inodes of the parts that are there."""
    for path in out.glob("part-*") if out.exists() else ():
        seen.setdefault(path.name, set()).add(path.stat().st_ino)


def under_kills(options: argparse.Namespace, shards: Path, out: Path) -> dict[str, Any]:
    """Run workers, kill and replace some, until all are done."""
    chance, seen = random.Random(options.seed), dict[str, set[int]]()
    alive = [worker(options.model, shards, out) for _ in range(options.workers)]
    killed, failed, at_work = 0, 0, 0
    next_kill = time.monotonic() + chance.uniform(3, 6)
    while alive:
        time.sleep(0.02)
        seen_parts(out, seen)
        for one in [one for one in alive if one.poll() is not None]:
            failed += one.returncode != 0
            alive.remove(one)
        if alive and killed < options.kills and time.monotonic() > next_kill:
            one = alive.pop(chance.randrange(len(alive)))
            one.kill()
            killed += one.wait() == -9
            at_work += any(out.glob(".section-*.lock"))
            alive.append(worker(options.model, shards, out))
            next_kill = time.monotonic() + chance.uniform(0.5, 4)
    again = sum(len(inodes) > 1 for inodes in seen.values())
    return {"killed": killed, "killed_at_work": at_work, "failed": failed, "parts": len(seen), "parts_twice": again}


def content(out: Path) -> tuple[list[str], list[Any], torch.Tensor]:
    """(ids, payloads, numbers) of a folder of parts."""
    parts = list(read_parts(out))
    ids = [i for part in parts for i in part[0]]
    payloads = [payload for part in parts for payload in part[2]]
    return ids, payloads, torch.cat([torch.cat([part[1].mean, part[1].log_var], 1) for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--pictures", type=int, default=24, help="in a shard")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_shards(folder / "shards", options.shards, options.pictures)
        start = time.perf_counter()
        figures = under_kills(options, folder / "shards", folder / "killed")
        figures["seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        if worker(options.model, folder / "shards", folder / "alone").wait():
            raise SystemExit("the command that was left alone failed")
        figures["seconds_alone"] = time.perf_counter() - start
        ids, payloads, numbers = content(folder / "killed")
        expected_ids, expected_payloads, expected = content(folder / "alone")
    figures |= {
        "items": len(ids),
        "missing": len(set(expected_ids) - set(ids)),
        "twice": len(ids) - len(set(ids)),
        "other_payloads": sum(a != b for a, b in zip(payloads, expected_payloads, strict=True)),
        "largest_difference": float((numbers - expected).abs().max()),
        "equal_to_the_bit": torch.equal(numbers, expected),
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):<20} {value}")
    if options.json:
        record = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({**record, **figures}, indent=2) + "\n")
    if figures["missing"] or figures["twice"] or figures["failed"] or figures["largest_difference"] > 1e-5:
        raise SystemExit("items are missing, twice or different, or a worker failed")


if __name__ == "__main__":
    main()
