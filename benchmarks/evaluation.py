"""COCO 5K, COCO 1K, CxC and ECCV Caption from 5,000 x 25,000 embeddings: time on top of the distances, and peak memory.

The embeddings are seeded, near their own image, with variances; the truths are those of the ``eccv_caption`` package,
whose own metrics run too where it is installed: it takes ranked lists as dictionaries, so that sorting and making these
counts as its time. Each form runs in a process of its own. Time on top of the distances is measured within each call:
whatever is not spent in the product that makes the blocks.

    embeddings rank embeddings: the distances of both directions and every metric of every truth
    scores     rank a score matrix from a NumPy file that is mapped, not read
    official   eccv_caption from the same scores

    python benchmarks/evaluation.py [--json PATH] [--folder FOLDER] [--d 512] [--distance csd] [--threads 2]
                                    [--repeats 3]

--folder holds the JSON files of the package where it is not installed. Exits with 1 if the metrics take longer than 1 s
on top of the distances or the process more than 1 GB, or if a figure differs from the official one by more than
rounding.
"""

import argparse
import importlib
import importlib.util
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from match_loss import peak_mb
from measuring import command_parser, of_process, write_json
from torch import Tensor

from sfumato.distances import get_distance
from sfumato.evaluation import protocols
from sfumato.evaluation.benchmark_ground_truths import eccv_caption
from sfumato.evaluation.benchmarks import Source, rank
from sfumato.evaluation.benchmarks import figures as figures_of
from sfumato.evaluation.ground_truth import GroundTruth
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.exact import distance_blocks

SECONDS, MEGABYTES, ROUNDING = 1.0, 1024.0, 1e-12
NAMES = {"r1": "recall@1", "r5": "recall@5", "r10": "recall@10", "map_at_r": "map@r", "rprecision": "r_precision"}
BENCHMARKS = ("coco_5k", "coco_1k", "cxc", "eccv")


def synthetic(ground_truth: GroundTruth, d: int, seed: int) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    """Unit means, captions about as far from their image as a good model leaves them; total variances about 0.3."""
    generator = torch.Generator().manual_seed(seed)
    n, m = len(ground_truth.image_ids), len(ground_truth.text_ids)
    image = torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=1)
    text = image[torch.from_numpy(ground_truth.t2i.indices)] + 4 * torch.randn(m, d, generator=generator) / d**0.5
    log_vars = [torch.randn(k, d, generator=generator) / 2 + torch.log(torch.tensor(0.3 / d)) for k in (n, m)]
    text = torch.nn.functional.normalize(text, dim=1)
    return GaussianEmbedding(image, log_vars[0]), GaussianEmbedding(text, log_vars[1])


class Clock:
    """Seconds spent in making blocks, by a generator that stands in for distance_blocks."""

    def __init__(self) -> None:
        self.seconds, self.cpu = 0.0, 0.0

    def blocks(self, *arguments: Any, **options: Any) -> Iterator[tuple[int, Tensor]]:
        """The blocks of distance_blocks."""
        made = distance_blocks(*arguments, **options)
        while True:
            start, cpu = time.perf_counter(), time.process_time()
            block = next(made, None)
            self.seconds += time.perf_counter() - start
            self.cpu += time.process_time() - cpu
            if block is None:
                return
            yield block


def timed(function: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    """Result and medians: seconds, and those that are not spent in making blocks, by the wall and by the processor.

    Other work on the machine stretches the wall's, not the processor's. One call before warms up.
    """
    result, rows = function(), []
    for _ in range(repeats):
        clock = Clock()
        with patch.object(protocols, "distance_blocks", clock.blocks):
            start, cpu = time.perf_counter(), time.process_time()
            result = function()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        rows.append(
            {"seconds": seconds, "on_top_seconds": seconds - clock.seconds, "on_top_cpu_seconds": cpu - clock.cpu}
        )
    return result, {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def official(scores: np.ndarray, ground_truth: GroundTruth) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Figures and seconds of the official package: sorting, its dictionaries, its metrics."""
    metrics = importlib.import_module("eccv_caption").Metrics()
    images, captions = (np.array(ids, np.int64) for ids in (ground_truth.image_ids, ground_truth.text_ids))
    seconds, lists = {"sort": 0.0, "dictionaries": 0.0, "metrics": 0.0}, []
    for rows, queries, gallery in ((scores, images, captions), (scores.T, captions, images)):
        start = time.perf_counter()
        order = [np.argsort(row, kind="stable").astype(np.int32) for row in rows]
        seconds["sort"] += time.perf_counter() - start
        start = time.perf_counter()
        shared = gallery.tolist()  # One number for each id: a list of its own for every query is several times larger.
        lists.append({int(q): [shared[j] for j in row] for q, row in zip(queries, order, strict=True)})
        seconds["dictionaries"] += time.perf_counter() - start
    start = time.perf_counter()
    targets = ("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_map_at_r")
    found = metrics.compute_all_metrics(*lists, target_metrics=targets, Ks=(1, 5, 10), verbose=False)
    found |= metrics.compute_all_metrics(*lists, target_metrics=("eccv_recalls",), Ks=(1, 5, 10), verbose=False)
    seconds["metrics"] = time.perf_counter() - start
    return found, seconds


def measure(what: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One form, in this process."""
    torch.set_num_threads(arguments.threads)
    ground_truths = eccv_caption(arguments.folder)
    chosen = [ground_truths[name] for name in BENCHMARKS]
    whole, scores = ground_truths["coco_5k"], folder / "scores.npy"
    images, texts = synthetic(whole, arguments.d, 0)
    if what == "write":
        stored = np.lib.format.open_memmap(scores, "w+", np.float32, (images.n, texts.n))
        for start in range(0, images.n, 500):
            stored[start : start + 500] = get_distance(arguments.distance).matrix(images[start : start + 500], texts)
        return {}
    before = peak_mb(reset=True)
    if what == "official":
        figures, parts = official(np.load(scores, mmap_mode="r"), whole)
        return {"seconds": sum(parts.values()), "parts": parts, "peak_mb": peak_mb(), "figures": figures}
    source: Source = protocols.Embeddings(images, texts, arguments.distance)
    if what == "scores":
        source = protocols.Scores(np.load(scores, mmap_mode="r"), "smaller")
    ranked = source, whole.image_ids, whole.text_ids, chosen
    figures, seconds = timed(lambda: figures_of(rank(*ranked)), arguments.repeats)
    return {**seconds, "peak_mb": peak_mb(), "extra_mb": peak_mb() - before, "figures": figures}


def largest_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, int]:
    """Largest gap to the official figures, and how many of them were compared."""
    gaps = []
    for key, both in theirs.items():
        for benchmark in BENCHMARKS:
            metric = NAMES.get(key.removeprefix(f"{benchmark}_"))
            if key.startswith(benchmark) and metric:
                gaps += [abs(ours[benchmark][direction][metric] - value) for direction, value in both.items()]
    return max(gaps), len(gaps)


def parsed() -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="JSON files of eccv_caption, where it is not installed")
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--distance", default="csd")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs=2, metavar=("FORM", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure each form in its own process, print a table, write JSON."""
    arguments = parsed()
    if arguments.only:
        print(json.dumps(measure(arguments.only[0], arguments, Path(arguments.only[1]))))
        return 0
    installed = importlib.util.find_spec("eccv_caption") is not None
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        forms = ["write", "embeddings", "scores"]
        for form in forms + (["official"] if installed else []):
            results[form] = of_process([sys.executable, __file__, *sys.argv[1:], "--only", form, folder])
    del results["write"]
    on_top, cpu, peak = (results["embeddings"][name] for name in ("on_top_seconds", "on_top_cpu_seconds", "peak_mb"))
    print(f"{'form':11} {'seconds':>8} {'peak MB':>8}")
    for form, row in results.items():
        print(f"{form:11} {row['seconds']:8.2f} {row['peak_mb']:8.0f}")
    print(
        f"\nmetrics on top of the distances: {on_top:.2f} s, {cpu:.2f} s of the processor (goal {SECONDS:g});"
        f" peak {peak:.0f} MB (goal {MEGABYTES:g})"
    )
    failed = on_top > SECONDS or peak > MEGABYTES
    summary: dict[str, Any] = {"on_top_seconds": on_top, "on_top_cpu_seconds": cpu, "peak_mb": peak}
    if "official" in results:
        gap, compared = largest_difference(results["scores"]["figures"], results["official"]["figures"])
        ratio = results["official"]["seconds"] / results["scores"]["seconds"]
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in results["official"]["parts"].items())
        print(f"official: {parts}; {ratio:.0f} x the time of scores; largest of {compared} differences {gap:.1e}")
        failed |= gap > ROUNDING
        summary |= {"official_ratio": ratio, "largest_difference": gap, "compared": compared}
    else:
        print("official: not measured; pip install eccv_caption")
    settings = {
        k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if k not in ("json", "only")
    }
    settings |= {"torch": torch.__version__, "numpy": np.__version__, "machine": platform.machine()}
    write_json(arguments.json, {"settings": settings, **summary, "forms": results})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
