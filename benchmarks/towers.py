"""A tower with a Gaussian head against its plain transformer: time and memory, forward and training step.

    python benchmarks/towers.py [--architecture ViT-B/32] [--batch 32] [--side image|text] [--repeats 5] [--json PATH]

The plain tower has the layers of transformers' CLIP (equal to the bit, tests/encoders/test_clip.py), its last norm, and
a projection of the class or end token to 1024 dimensions. Ours has one block more (the log variance's own), two linear
maps of all tokens and two generalised poolings. The forms take turns in one process, so that their ratio is of one run;
peak memory comes from a process for each. Random weights: they change no time.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from match_loss import peak_mb
from measuring import command_parser, in_turns, of_process, write_json
from torch import nn

from sfumato.arrays import Array
from sfumato.encoders.clip import ARCHITECTURES, ClipImageConfig, ClipTextConfig, clip_image_encoder, clip_text_encoder
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.heads import GaussianHead, TokenFeatures
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.build import Tower

DIM = 1024
FORMS = ("plain", "gaussian")
PASSES = ("forward", "step")


class Plain(nn.Module):
    """The transformer as it comes: class or end token, last norm, one projection."""

    def __init__(self, encoder: Any, image: bool) -> None:
        super().__init__()
        self.encoder, self.image = encoder, image
        self.projection = nn.Linear(encoder.channels, DIM, bias=False)

    def forward(self, inputs: Inputs) -> GaussianEmbedding:
        """The embeddings as points."""
        tokens: TokenFeatures = self.encoder(inputs)
        pooled = tokens.mean[:, 0] if self.image else tokens.mean[:, -1]
        return GaussianEmbedding.point(nn.functional.normalize(self.projection(pooled), dim=-1))


def build(form: str, side: str, architecture: str) -> nn.Module:
    """A tower with random weights."""
    options: Any = {"architecture": architecture, "variance_blocks": 0 if form == "plain" else 1}
    if side == "image":
        encoder: Any = clip_image_encoder(ClipImageConfig(final_norm=form == "plain", **options))
    else:
        encoder = clip_text_encoder(ClipTextConfig(**options))
    if form == "plain":
        return Plain(encoder, side == "image")
    return Tower(None, encoder, GaussianHead(encoder.channels, DIM))  # type: ignore[arg-type]


def inputs(side: str, batch: int) -> Inputs:
    """Random pictures, or texts of 8 to 77 tokens (as many in every run)."""
    generator = torch.Generator().manual_seed(0)
    if side == "image":
        return Inputs(torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8, generator=generator))
    lengths = torch.randint(8, 78, (batch, 1), generator=generator)
    lengths[0] = 77
    return Inputs(torch.randint(0, 49408, (batch, 77), generator=generator), torch.arange(77) < lengths)


def runner(tower: nn.Module, batch: Inputs, what: str) -> Callable[[], None]:
    """One forward pass without gradients, or one forward and backward pass and an optimiser's step."""
    optimiser = torch.optim.AdamW(tower.parameters(), lr=1e-5)

    def value() -> Array:
        embedding: GaussianEmbedding = tower(batch)
        means = embedding.mean[:, 0].sum()
        return means if embedding.log_var.isneginf().any() else means + embedding.total_variance.sum()

    def run() -> None:
        if what == "forward":
            with torch.inference_mode():
                value()
        else:
            optimiser.zero_grad(set_to_none=True)
            value().backward()
            optimiser.step()

    return run


def memory(form: str, what: str, options: argparse.Namespace) -> float:
    """MB that the passes need beside the weights (and, in training, gradients and moments, which have their size)."""
    tower = build(form, options.side, options.architecture)
    run = runner(tower, inputs(options.side, options.batch), what)
    run()
    peak_mb(reset=True)
    run()
    return peak_mb()


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), default="ViT-B/32")
    parser.add_argument("--side", choices=("image", "text"), default="image")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        form, what = options.memory
        print(json.dumps(memory(form, what, options)))
        return
    batch = inputs(options.side, options.batch)
    towers = {form: build(form, options.side, options.architecture) for form in FORMS}
    results: dict[str, Any] = {}
    for what in PASSES:
        times = in_turns({form: runner(tower, batch, what) for form, tower in towers.items()}, options.repeats)
        ratio = statistics.median(b / a for a, b in zip(times["plain"], times["gaussian"], strict=True))
        same = ["--architecture", options.architecture, "--side", options.side, "--batch", str(options.batch)]
        command = [sys.executable, __file__, *same, "--memory"]
        peaks = {form: of_process([*command, form, what]) for form in FORMS}
        results[what] = {
            "seconds": {form: statistics.median(t) for form, t in times.items()},
            "ratio": ratio,
            "peak_mb": peaks,
            "peak_ratio": peaks["gaussian"] / peaks["plain"],
        }
        seconds = results[what]["seconds"]
        print(
            f"{options.side} {options.architecture} batch {options.batch} {what:<8} plain {seconds['plain']:.3f} s,"
            f" gaussian {seconds['gaussian']:.3f} s ({options.batch / seconds['gaussian']:.0f} a second):"
            f" {ratio:.3f} x;"
            f" peak {peaks['plain']:.0f} and {peaks['gaussian']:.0f} MB: {results[what]['peak_ratio']:.3f} x"
        )
    parameters = {form: sum(p.numel() for p in tower.parameters()) for form, tower in towers.items()}
    print(f"parameters {parameters['plain']:,} and {parameters['gaussian']:,}; load {os.getloadavg()[0]:.1f}")
    about = {"json": None, "parameters": parameters, "torch": torch.__version__}
    write_json(options.json, vars(options) | about | {"results": results})


if __name__ == "__main__":
    main()
