"""A whole training step with PCME's sampled loss against one with PCME++'s, on the same towers: time and peak memory.

    python benchmarks/pcme_step.py [--towers clip|frozen] [--batch 32] [--dim 1024] [--samples 8] [--repeats 5]
                                   [--json PATH]

A step is what training does with a batch that is read: both towers forward, the loss, both backward, the gradients
clipped, the optimiser's update. PCME++ has csd, pseudo-positives and bottleneck; PCME as many draws of each embedding
as --samples says, and the bottleneck. "clip" is ViT-B/32 with blocks of the log variance's own, "frozen" heads on token
features as in the recipes of Flickr8k. The losses take turns in one process and train one model, so that their ratio is
of one run; peak memory, weights and moments included, comes from a process for each. Seconds are those of the
processors, which other work on the machine spoils less than the clock. "loss" is the loss alone, forward and backward.
Random weights: they change no time.

The PCME++ paper (section A.3) has 33 % more time for PCME with eight draws, on a V100, and 18 % more memory, on average
and with a higher peak that it gives no figure for.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from match_loss import peak_mb
from measuring import command_parser, in_turns, of_process, write_json
from towers import inputs as clip_inputs

from sfumato.encoders.clip import ClipImageConfig, ClipTextConfig, clip_image_encoder, clip_text_encoder
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.feature_rows import FeatureInput
from sfumato.encoders.heads import GaussianHead
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import MatchLoss
from sfumato.losses.pcme import PCMELoss, PCMEOptions
from sfumato.losses.pcmepp import PCMEPPLoss
from sfumato.models.build import DualEncoder, Tower
from sfumato.models.process_group import ProcessGroup, alone
from sfumato.models.sections import OptimConfig
from sfumato.training.step import TrainBatch, build_optimiser, clip_gradients, forward_backward

FORMS = ("pcmepp", "pcme")
IMAGE_CHANNELS, IMAGE_TOKENS, TEXT_CHANNELS, TEXT_TOKENS = 1280, 9, 384, 32


def build_model(options: argparse.Namespace, architecture: str = "ViT-B/32") -> DualEncoder:
    """Both towers with random weights, those of "clip" in an architecture."""
    torch.manual_seed(0)
    encoders: list[Any]
    if options.towers == "clip":
        own: Any = {"architecture": architecture}
        encoders = [clip_image_encoder(ClipImageConfig(**own)), clip_text_encoder(ClipTextConfig(**own))]
    else:
        encoders = [FeatureInput(channels, 0.2) for channels in (IMAGE_CHANNELS, TEXT_CHANNELS)]
    towers = [Tower(None, e, GaussianHead(e.channels, options.dim)) for e in encoders]  # type: ignore[arg-type]
    return DualEncoder(*towers).train()


def build_loss(form: str, options: argparse.Namespace) -> MatchLoss:
    """Either loss as its recipe has it."""
    return PCMEPPLoss() if form == "pcmepp" else PCMELoss(PCMEOptions(n_samples=options.samples))


def batch_of(options: argparse.Namespace) -> TrainBatch:
    """Pairs of random pictures and texts, or of their token features, each with a single match."""
    if options.towers == "clip":
        images, texts = clip_inputs("image", options.batch), clip_inputs("text", options.batch)
    else:
        generator = torch.Generator().manual_seed(0)
        images = Inputs(torch.randn(options.batch, IMAGE_TOKENS, IMAGE_CHANNELS, generator=generator))
        lengths = torch.randint(8, TEXT_TOKENS + 1, (options.batch, 1), generator=generator)
        lengths[0] = TEXT_TOKENS
        values = torch.randn(options.batch, TEXT_TOKENS, TEXT_CHANNELS, generator=generator)
        texts = Inputs(values, torch.arange(TEXT_TOKENS) < lengths)
    match = torch.eye(options.batch)
    return TrainBatch(images, texts, lambda _: (match, match))


def stepper(
    model: DualEncoder,
    loss: MatchLoss,
    optimiser: torch.optim.Optimizer,
    batch: TrainBatch,
    process_group: ProcessGroup,
) -> Callable[[], None]:
    """One step of training."""
    trained = [*model.parameters(), *loss.parameters()]

    def run() -> None:
        optimiser.zero_grad(set_to_none=True)
        forward_backward(model, loss, batch, process_group, epoch=0, precision=torch.float32)
        clip_gradients(trained, 2.0)
        optimiser.step()

    return run


def loss_alone(loss: MatchLoss, options: argparse.Namespace) -> Callable[[], None]:
    """The loss of embeddings that are there, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    sides = []
    for _ in "it":
        mean = torch.nn.functional.normalize(torch.randn(options.batch, options.dim, generator=generator))
        log_var = torch.full((options.batch, options.dim), -9.0)
        sides.append([x.requires_grad_() for x in (mean, log_var)])
    match = torch.eye(options.batch)

    def run() -> None:
        loss(GaussianEmbedding(*sides[0]), GaussianEmbedding(*sides[1]), match, epoch=0).total.backward()

    return run


def prepared(forms: tuple[str, ...], options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """A step with each of the losses, on one model with one optimiser."""
    model, losses = build_model(options), {form: build_loss(form, options) for form in forms}
    everything = torch.nn.ModuleList(losses.values())
    optimiser = build_optimiser(model, everything, OptimConfig(name="adamp", lr=1e-5))  # type: ignore[arg-type]
    batch, process_group = batch_of(options), alone(torch.device("cpu"))
    return {form: stepper(model, loss, optimiser, batch, process_group) for form, loss in losses.items()}


def peak(form: str, options: argparse.Namespace) -> float:
    """MB at the height of a step, the weights, gradients and moments among them."""
    run = prepared((form,), options)[form]
    run()
    peak_mb(reset=True)
    run()
    return peak_mb()


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--towers", choices=("clip", "frozen"), default="clip")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", choices=FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak(options.peak, options)))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--peak"]
    peaks = {form: of_process([*command, form]) for form in FORMS}
    losses = {form: loss_alone(build_loss(form, options), options) for form in FORMS}
    times = {
        "step": in_turns(prepared(FORMS, options), options.repeats, time.process_time),
        "loss": in_turns(losses, max(5, options.repeats), time.process_time),
    }
    print(
        f"{options.towers}, batch {options.batch}, d {options.dim}, {options.samples} draws,"
        f" {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    )
    results: dict[str, Any] = {"peak_mb": peaks, "peak_ratio": peaks["pcme"] / peaks["pcmepp"]}
    for what, taken in times.items():
        ratios = [b / a for a, b in zip(taken["pcmepp"], taken["pcme"], strict=True)]
        seconds = {form: statistics.median(t) for form, t in taken.items()}
        results[what] = {"seconds": seconds, "ratio": statistics.median(ratios), "ratios": ratios}
        print(
            f"{what:<5} pcmepp {seconds['pcmepp']:.4f} s, pcme {seconds['pcme']:.4f} s: {results[what]['ratio']:.3f} x"
            f" ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    print(f"peak  pcmepp {peaks['pcmepp']:.0f} MB, pcme {peaks['pcme']:.0f} MB: {results['peak_ratio']:.3f} x")
    write_json(options.json, vars(options) | {"json": None, "results": results, "torch": torch.__version__})


if __name__ == "__main__":
    main()
