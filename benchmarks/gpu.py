"""What a GPU does with PCME++: training steps, the match loss, exact search and COCO's metrics, in at most 8 minutes.

    python benchmarks/gpu.py [--json PATH] [--scale 1.0] [--rounds 5] [--device cuda]
                             [--parts steps loss search metrics]

It needs nothing but the repository: weights are random, images are JPEG files of COCO's size that it draws, and texts,
embeddings and truths are random too. --scale shrinks batches, galleries and the data set; a tenth is for a processor.

    steps    ViT-B/32 and B/16, a batch of 128, in bfloat16 and in float16: images a second with batches that are there
             and with images that are read, decoded and cropped meanwhile; the loss's share; peak memory
    loss     PCME++'s loss forwards and backwards beside the same terms in ten lines ("naive"), 512 to 16,384 pairs
    search   the ten closest of 1,000,000 items of 512 dimensions by csd, by one product and distances in float64 of the
             candidates, beside FAISS on the GPU where it is installed, and the bare product with its ten largest
    metrics  recall, R-Precision and mAP@R of 5,000 images and 25,000 captions in both directions

A form takes turns with what stands beside it; times are medians, on the clock.
"""

import argparse
import functools
import io
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from exact_search import by_product, unit
from match_loss import peak_mb
from measuring import command_parser, in_turns, write_json
from pcme_step import build_model
from PIL import Image
from suite import commit, machine
from torch import Tensor
from torch.nn import functional
from towers import inputs

from sfumato.data.image_decoding import decode_image
from sfumato.distances import get_distance
from sfumato.encoders.processors import ImageFileStore
from sfumato.evaluation.protocols import evaluate_retrieval
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions
from sfumato.metrics.relevance import Relevance
from sfumato.models.process_group import alone
from sfumato.models.sections import OptimConfig
from sfumato.search.exact import LiftedGallery, lift_gallery
from sfumato.training.batches import prefetch
from sfumato.training.step import TrainBatch, build_optimiser, clip_gradients, forward_backward


class Bench:
    """The device, and the sizes at a scale."""

    def __init__(self, device: str, scale: float, rounds: int) -> None:
        self.device, self.scale, self.rounds = torch.device(device), scale, rounds
        self.cuda = self.device.type == "cuda"

    def size(self, n: int) -> int:
        """A size of the full benchmark at this scale."""
        return max(8, round(n * self.scale))

    def seconds(self, forms: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median seconds of forms that take turns; the first turn does not count."""
        taken = in_turns(forms, self.rounds, self._clock)
        return {name: statistics.median(several) for name, several in taken.items()}

    def peak(self, run: Callable[[], object]) -> float:
        """MB at the height of a call, with what was there before: of the GPU, or of the process."""
        if not self.cuda:
            peak_mb(reset=True)
            run()
            return peak_mb()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) / 2**20

    def _clock(self) -> float:
        """Seconds, when the device has done all that was asked."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def drawn_images(n: int) -> ImageFileStore:
    """JPEG files of 640 x 480 smooth random pixels in memory; 64 of them, again and again."""
    random, files = np.random.default_rng(0), []
    for _ in range(min(n, 64)):
        file, coarse = io.BytesIO(), random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    items = [functools.partial(files.__getitem__, i % len(files)) for i in range(n)]
    return ImageFileStore(items, 224, functools.partial(decode_image, size=224))


def steps(bench: Bench, backbone: str, on_gpu: torch.dtype) -> dict[str, Any]:
    """Training steps of PCME++ on CLIP's towers with random weights; on a processor in float32."""
    torch.manual_seed(0)
    precision = on_gpu if bench.cuda else torch.float32
    n = bench.size(128)
    model = build_model(argparse.Namespace(towers="clip", dim=1024), backbone).to(bench.device)
    loss = PCMEPPLoss().to(bench.device)
    optimiser = build_optimiser(model, loss, OptimConfig(name="adamp", lr=1e-5))
    scaler = torch.amp.GradScaler(bench.device.type, enabled=precision == torch.float16)
    group, store, trained = alone(bench.device), drawn_images(n), [*model.parameters(), *loss.parameters()]
    texts, match, order = inputs("text", n), torch.eye(n), np.arange(n)

    def batch(seed: int) -> TrainBatch:
        return TrainBatch(store.training_batch(order, [seed]), texts, lambda _: (match, match))

    def step(one: TrainBatch) -> None:
        optimiser.zero_grad(set_to_none=True)
        forward_backward(model, loss, one, group, epoch=0, precision=precision, scaler=scaler)
        scaler.unscale_(optimiser)
        clip_gradients(trained, 2.0)
        scaler.step(optimiser)
        scaler.update()

    there, read = batch(0), prefetch(batch(seed) for seed in range(bench.rounds + 1))
    leaves = embeddings(n, 1024, bench.device)
    forms = {
        "step": lambda: step(there),
        "step_with_reading": lambda: step(next(read)),
        "reading": lambda: batch(0),
        "loss": lambda: loss_step(loss, leaves, match.to(bench.device)),
    }
    taken, peak = bench.seconds(forms), bench.peak(forms["step"])
    read.close()
    return {
        "backbone": backbone, "precision": str(precision).removeprefix("torch."), "batch": n, "seconds": taken,
        "images_a_second": n / taken["step"], "images_a_second_with_reading": n / taken["step_with_reading"],
        "share_of_loss": taken["loss"] / taken["step"], "peak_mb": peak,
    }  # fmt: skip


def embeddings(n: int, d: int, device: torch.device) -> list[Tensor]:
    """Means and log variances of images, then of texts, as leaves."""
    generator = torch.Generator().manual_seed(0)
    raw = [torch.randn(n, d, generator=generator) for _ in range(4)]
    values = [functional.normalize(raw[0]), raw[1] / 10 - 8, functional.normalize(raw[2]), raw[3] / 10 - 8]
    return [value.to(device).requires_grad_() for value in values]


def loss_step(loss: PCMEPPLoss, leaves: list[Tensor], match: Tensor) -> None:
    """PCME++'s loss forwards and backwards."""
    loss(GaussianEmbedding(*leaves[:2]), GaussianEmbedding(*leaves[2:]), match).total.backward()


def naive_step(loss: PCMEPPLoss, leaves: list[Tensor], match: Tensor) -> None:
    """The same terms in a few lines, for one match a row."""
    (x, a), (y, b), options = leaves[:2], leaves[2:], loss.options
    squared = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    distance = squared + a.exp().sum(1)[:, None] + b.exp().sum(1)
    logit = loss.logits.logit_bias - loss.logits.logit_scale * distance
    entropy = functional.binary_cross_entropy_with_logits
    total = 2 * entropy(logit, match)
    near = distance.detach()
    for limit in (near.diagonal()[:, None], near.diagonal()):
        total = total + options.alpha * entropy(logit, torch.where(near <= limit, 1.0, match))
    for mean, log_var in ((x, a), (y, b)):
        total = total - options.beta * (1 + log_var - mean.square() - log_var.exp()).mean() / 2
    total.backward()


def losses(bench: Bench, pairs: int) -> dict[str, Any]:
    """The loss beside its naive form: time, memory and the difference of their gradients."""
    n = bench.size(pairs)
    loss, leaves = PCMEPPLoss(PCMEPPOptions(alpha=0.1)).to(bench.device), embeddings(n, 512, bench.device)
    match, gradients = torch.eye(n, device=bench.device), []

    def run(step: Callable[[PCMEPPLoss, list[Tensor], Tensor], None]) -> None:
        for leaf in leaves:
            leaf.grad = None
        step(loss, leaves, match)

    forms = {"loss": lambda: run(loss_step), "naive": lambda: run(naive_step)}
    taken, peaks = bench.seconds(forms), dict[str, float]()
    for name, form in forms.items():
        peaks[name] = bench.peak(form)
        gradients.append(torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]))
    apart, ratio = (gradients[0] - gradients[1]).norm() / gradients[1].norm(), taken["loss"] / taken["naive"]
    return {"pairs": n, "seconds": taken, "of_naive": ratio, "peak_mb": peaks, "gradients_apart": float(apart)}


def search(bench: Bench, batch: int) -> dict[str, Any]:
    """Exact search by csd beside FAISS and the bare product."""
    generator = torch.Generator().manual_seed(0)
    gallery = unit(bench.size(1_000_000), 512, 0, generator).to(bench.device)
    queries = unit(batch, 512, 0, generator).to(bench.device)
    centre = torch.zeros(512, device=bench.device)
    vectors = lift_gallery(gallery, "csd", centre=centre)
    lifted = LiftedGallery.of(vectors, "csd", centre)
    forms: dict[str, Callable[[], object]] = {
        "exact": lambda: by_product(lifted, queries, gallery),
        "product": lambda: (queries.mean @ gallery.mean.T).topk(10),
    }
    if bench.cuda:
        try:
            import faiss

            flat = faiss.GpuIndexFlatL2(faiss.StandardGpuResources(), 513)
            flat.add(vectors.cpu().numpy())
            wanted = functional.pad(queries.mean, (0, 1)).cpu().numpy()
            forms["faiss"] = lambda: flat.search(wanted, 10)
        except (ImportError, AttributeError):
            print("FAISS for GPUs is not installed")
    taken = bench.seconds(forms)
    ratios = {f"of_{name}": taken["exact"] / taken[name] for name in taken if name != "exact"}
    return {"items": gallery.n, "queries": batch, "seconds": taken, **ratios}


def metrics(bench: Bench) -> dict[str, Any]:
    """All metrics of both directions, and how much of their time the distances take."""
    n = bench.size(5_000)
    generator = torch.Generator().manual_seed(0)
    images, texts = (unit(m, 512, 0, generator).to(bench.device) for m in (n, 5 * n))
    relevance = Relevance.from_lists(np.arange(5 * n).reshape(n, 5).tolist(), n_gallery=5 * n)
    matrix = get_distance("csd").matrix
    forms = {
        "metrics": lambda: evaluate_retrieval(images, texts, relevance),
        "distances": lambda: [matrix(images, texts), matrix(texts, images)],
    }
    return {"images": n, "texts": 5 * n, "seconds": bench.seconds(forms)}


def main() -> None:
    """Measure, print each figure as it is there, write JSON."""
    parser = command_parser(__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each form")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    options = parser.parse_args()
    bench, start = Bench(options.device, options.scale, options.rounds), time.perf_counter()
    record: dict[str, Any] = {"device": options.device, "scale": options.scale, "commit": commit(), **machine()}
    for part in options.parts:
        record[part] = []
        for arguments in PARTS[part][1]:
            record[part].append(PARTS[part][0](bench, *arguments))
            print(f"{time.perf_counter() - start:6.0f} s  {part}: {json.dumps(record[part][-1])}", flush=True)
            write_json(options.json, record)


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], list[tuple[Any, ...]]]] = {
    "steps": (steps, [(b, p) for b in ("ViT-B/32", "ViT-B/16") for p in (torch.bfloat16, torch.float16)]),
    "loss": (losses, [(512,), (2048,), (8192,), (16384,)]),
    "search": (search, [(1,), (256,)]),
    "metrics": (metrics, [()]),
}

if __name__ == "__main__":
    main()
