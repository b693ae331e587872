"""What the hardest negative of a triplet loss does in training: distances, and whether it is a true match.

    python -m papers.benchmarks.hardest_negatives RECIPE [section.key=value ...] [--without-unlisted]

Trains the recipe and prints for every epoch, in its last batches and in both directions: the mean distance of an anchor
to its own item, to the hardest negative of the batch and to all others; how often that hardest negative is a match that
the data have and the batch does not list; the norm of the mean of all unit means (1: all in one place); the standard
deviation of the total variance of images and of texts. --without-unlisted leaves such matches out of the negatives.
"""

import argparse
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.data.pairs import PairBatch
from sfumato.losses.base import LossOutput, PairBlock
from sfumato.losses.triplet import TripletLoss, hinges
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.training.batches import IndexedBatches
from sfumato.training.loop import fit
from sfumato.training.step import TrainBatch

EVERY = 6
"""Steps between two batches that are looked at."""


class Watch:
    """The batches of a training run as they come to the loss."""

    def __init__(self, without_unlisted: bool) -> None:
        self.without_unlisted, self.true, self.step = without_unlisted, torch.zeros(0, 0), 0
        self.seen: dict[str, list[float]] = defaultdict(list)

    def batch(self, batches: IndexedBatches, batch: PairBatch, *arguments: Any) -> TrainBatch:
        """A batch, prepared ahead; when its labels are asked for, its step has come."""
        made = BATCH(batches, batch, *arguments)
        true = torch.from_numpy(batches.sampler.data.match(batch.image_index, batch.text_index)) > 0

        def labels(process_group: Any) -> tuple[Tensor, Tensor]:
            self.true = true
            return made.labels(process_group)

        return replace(made, labels=labels)

    def part(self, loss: TripletLoss, block: PairBlock, counts: Tensor, epoch: int | None) -> LossOutput:
        """The hinges of a batch, looked at before."""
        self.step += 1
        distances = block.distances(loss.distance)
        listed = (block.match_i2t >= 0.5, block.match_t2i >= 0.5)
        unlisted = [true & ~own for true, own in zip((self.true, self.true.T), listed, strict=True)]
        if self.step % EVERY == 0:
            with torch.no_grad():
                self._look(block, distances, listed, unlisted)
        if self.without_unlisted:
            first, second = (d.masked_fill(other, torch.inf) for d, other in zip(distances, unlisted, strict=True))
            distances = (first, second)
        return hinges(distances, (block.match_i2t, block.match_t2i), counts[0], loss.options, epoch)

    def _look(self, block: PairBlock, distances: Any, listed: Any, unlisted: Any) -> None:
        for name, d, own, other in zip(("i2t", "t2i"), distances, listed, unlisted, strict=True):
            hardest = d.masked_fill(own, torch.inf).min(dim=1)
            for what, value in (
                ("own", d[own].mean()), ("hardest", hardest.values.mean()), ("others", d[~own].mean()),
                ("hardest is true", other[torch.arange(len(d)), hardest.indices].float().mean()),
            ):  # fmt: skip
                self.seen[f"{name} {what}"].append(float(value))
        for name, e in (("images", block.image), ("texts", block.text)):
            self.seen[f"{name} in one place"].append(float(functional.normalize(e.mean, dim=-1).mean(0).norm()))
            self.seen[f"{name} sd of total variance"].append(float(e.total_variance.std()))

    def epoch(self, line: Mapping[str, Any]) -> None:
        """Print the figures of an epoch."""
        figures = ", ".join(f"{name} {np.mean(values[-8:]):.3g}" for name, values in self.seen.items())
        print(f"epoch {line['epoch'] + 1}: {figures}", flush=True)
        self.seen.clear()


BATCH = IndexedBatches._batch


def main() -> None:
    """Parse the arguments, train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--without-unlisted", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/hardest"))
    options = parser.parse_intermixed_args()
    watch = Watch(options.without_unlisted)
    shutil.rmtree(options.out, ignore_errors=True)
    with (
        mock.patch.object(IndexedBatches, "_batch", lambda *a: watch.batch(*a)),
        mock.patch.object(
            TripletLoss, "part", lambda loss, block, counts, epoch=None: watch.part(loss, block, counts, epoch)
        ),
    ):
        result = fit(load_recipe(find_recipe(options.recipe), options.overrides), options.out, on_epoch=watch.epoch)
    print(f"best validation score {result['best_score']:.4f}")


if __name__ == "__main__":
    main()
