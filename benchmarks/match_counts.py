"""Can a range be given for the number of true matches of a query, beside the expected number?

Two ranges of 90 % are compared with the true numbers on the test split, by the expected number. "Independent" is that
of independent matches with the probabilities of the search. "Held out" multiplies the expected number by the 5 % and
95 % quantiles of true over expected matches among the queries of the calibration's split with a like expected number,
in galleries of all its images, a half, a quarter and an eighth.

    sfumato demo
    python benchmarks/match_counts.py runs/demo/run
"""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.models.run import Run, load_run
from sfumato.models.split import embed_split, load_split
from sfumato.search.exact import distance_blocks
from sfumato.workflows.index import GalleryPart, build_index

EDGES = (0.0, 1.0, 2.0, 3.0, 7.0, 20.0, 60.0, float("inf"))
_Z = 1.645
_FEWEST = 20


def sums(
    run: Run, folder: Path, images: GaussianEmbedding, ids: list[str], texts: GaussianEmbedding
) -> tuple[Tensor, Tensor]:
    """(n,) expected number of matches of each text, and its variance if matches were independent."""
    index = build_index(run, GalleryPart(images, ids))
    parts = []
    for start, distance in distance_blocks(texts, index.embeddings, index.oriented_distance):
        some = texts[start : start + len(distance)]
        context = index.scorer.context(distance, some, lambda column: index.embeddings[column])
        p = index.scorer.match_probability(distance, len(index), context)
        parts.append(torch.stack([p.sum(1), (p * (1 - p)).sum(1)]))
    expected, variance = torch.cat(parts, dim=1)
    return expected, variance


def main() -> None:
    parser = argparse.ArgumentParser(description="ranges for the number of true matches")
    parser.add_argument("run", type=Path, help="run folder with the splits val and test")
    options = parser.parse_args()
    run, rng = load_run(options.run), np.random.default_rng(0)

    def of_split(split: str, n_parts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        prepared = load_split(run.model, run.recipe.data, split)
        images, texts = embed_split(run.model, prepared)
        data, found = prepared.data, []
        for n in n_parts:
            for part in np.array_split(rng.permutation(images.n), n):
                ids = [data.image_ids[i] for i in part]
                expected, variance = sums(run, options.run, images[torch.from_numpy(part)], ids, texts)
                true = torch.from_numpy(data.match(part, np.arange(texts.n)).sum(0))
                found.append(torch.stack([expected, variance, true])[:, true > 0])
        expected, variance, true = torch.cat(found, dim=1)
        return expected, variance, true

    expected, _, true = of_split("val", (1, 2, 4, 8))
    tested, variance, reached = of_split("test", (1,))
    print("| expected matches | texts | mean expected | mean true | independent | held out |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for low, high in pairwise(EDGES):
        known, new = (expected >= low) & (expected < high), (tested >= low) & (tested < high)
        e, t, spread = tested[new], reached[new], _Z * variance[new].sqrt()
        independent = (t >= (e - spread).floor()) & (t <= (e + spread).ceil())
        held_out = "too few"
        if int(known.sum()) >= _FEWEST:
            least, most = torch.quantile(true[known] / expected[known], torch.tensor([0.05, 0.95]))
            held_out = f"{((t / e >= least) & (t / e <= most)).float().mean():.2f}"
        cells = (int(new.sum()), f"{e.mean():.1f}", f"{t.mean():.1f}", f"{independent.float().mean():.2f}", held_out)
        print(f"| {low:g} to {high:g} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
