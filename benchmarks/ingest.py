"""Embedding a folder of JPEG files, from the disk to parts, against the bare encoder on prepared tensors.

    python benchmarks/ingest.py [--pictures 300] [--workers 1 2] [--threads 1] [--batch 32] [--repeats 3] [--device cpu]
                                [--encoder efficientnet|clip] [--json PATH]

The pictures are 640 x 480, of the size of COCO's in bytes too (about 80 to 160 kB). The encoder is EfficientNet-Lite0
at 224 pixels with a Gaussian head (extra ``offline``), or CLIP ViT-B/32 (extra ``backbones``), both with random
weights: they change no time. The forms take turns in one process, and a ratio is of one round: pictures a second of the
whole way, over those of the bare encoder; the median over the rounds, and that of the best rounds, which a busy machine
disturbs least. Milliseconds of processor time a picture, of all threads, do not depend on who else is at work. Beside
it, decoding and resizing alone in threads and in processes.
"""

import argparse
import io
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from sfumato.data.image_decoding import decode_image
from sfumato.data.listings import list_folder
from sfumato.encoders.clip import ClipImageConfig, clip_image_encoder
from sfumato.encoders.convolutional import EfficientNetEncoder
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.feature_input import FeatureInput
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.processors import PixelProcessor
from sfumato.workflows.embed import embed_collection

SIDE, DIM = 224, 512


def make_pictures(folder: Path, n: int) -> None:
    """n JPEG files of smooth colours with a grain, which compress as photographs do."""
    random = np.random.default_rng(0)
    for k in range(n):
        coarse = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC)).astype(np.int16)
        pixels = (pixels + random.integers(-20, 21, pixels.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{k:05d}.jpg", quality=90)


def build(encoder_name: str, device: str) -> Any:
    """A matcher with random weights, whose text side is never used."""
    torch.manual_seed(0)
    encoder: Any = (
        EfficientNetEncoder(pretrained=False)
        if encoder_name == "efficientnet"
        else clip_image_encoder(ClipImageConfig(architecture="ViT-B/32"))
    )
    processor = PixelProcessor(SIDE)
    model = DualEncoder(
        Tower(processor, encoder, GaussianHead(encoder.channels, DIM)),
        Tower(processor, FeatureInput(3, 0.0), GaussianHead(3, DIM)),
    )
    return SimpleNamespace(model=model.to(device).eval(), distance="csd")


def seconds(run: Callable[[], Any]) -> float:
    """That one run takes."""
    return both_seconds(run)[0]


def both_seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """That one run takes: by the clock, and of the processors, all threads together."""
    start, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - busy


def decode_rate(kind: str, workers: int, data: list[bytes]) -> float:
    """Pictures a second that threads or processes decode and hand over."""
    pool: Executor = (
        ThreadPoolExecutor(workers)
        if kind == "threads"
        else ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("forkserver"))
    )
    with pool:
        list(pool.map(partial(decode_image, size=SIDE), data[: 4 * workers]))  # Processes take their time to start.
        return len(data) / seconds(lambda: list(pool.map(partial(decode_image, size=SIDE), data)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=1, help="of the encoder on a CPU")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--encoder", choices=("efficientnet", "clip"), default="efficientnet")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    retrieval_model = build(options.encoder, options.device)
    forms = ["bare", *(f"{workers} workers" for workers in options.workers)]
    rates: dict[str, list[float]] = {form: [] for form in forms}
    busy: dict[str, list[float]] = {form: [] for form in forms}
    decoding: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "pictures"
        folder.mkdir()
        make_pictures(folder, options.pictures)
        data = [path.read_bytes() for path in sorted(folder.iterdir())]
        for kind in ("threads", "processes"):
            for workers in options.workers:
                decoding[f"{kind} {workers}"] = decode_rate(kind, workers, data)
        tower = retrieval_model.model.image
        store, _ = tower.processor.read([partial(io.BytesIO.getvalue, io.BytesIO(item)) for item in data])
        tower.embed(store, np.arange(options.batch), batch_size=options.batch)
        listing = list_folder(folder, part_size=128)

        def whole(out: Path, workers: int) -> None:
            embed_collection(retrieval_model, listing, out, workers=workers, batch_size=options.batch)

        for repeat in range(options.repeats):
            runs: list[Callable[[], Any]] = [lambda: tower.embed(store, batch_size=options.batch)]
            runs += [partial(whole, Path(temporary) / f"out-{repeat}-{w}", w) for w in options.workers]
            for form, run in zip(forms, runs, strict=True):
                clock, processors = both_seconds(run)
                rates[form].append(options.pictures / clock)
                busy[form].append(1000 * processors / options.pictures)
    results = {
        name: {
            "per_second": statistics.median(values),
            "of_bare": statistics.median(a / b for a, b in zip(values, rates["bare"], strict=True)),
            "best_of_bare": max(values) / max(rates["bare"]),
            "cpu_ms": statistics.median(busy[name]),
            "rounds": values,
        }
        for name, values in rates.items()
    }
    mean_kb = statistics.mean(map(len, data)) / 1000
    print(
        f"{options.pictures} pictures of 640 x 480, {mean_kb:.0f} kB; {options.encoder}, batch {options.batch},"
        f" {options.threads} threads of the encoder, {options.device}; load {os.getloadavg()[0]:.1f}"
    )
    for name, rate in decoding.items():
        print(f"decoding alone, {name:<12} {rate:8.1f} a second")
    for name, result in results.items():
        print(
            f"{name:<12} {result['per_second']:8.1f} a second  {result['of_bare']:.3f} x, of the best rounds"
            f" {result['best_of_bare']:.3f} x; {result['cpu_ms']:.1f} ms of processors a picture"
        )
    if options.json:
        record = vars(options) | {
            "json": None,
            "picture_kb": mean_kb,
            "decoding_per_second": decoding,
            "results": results,
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
