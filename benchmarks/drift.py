"""Does the monitor of a service find queries unlike those of the calibration, and only these?

    python benchmarks/drift.py RUN [RUN ...] [--windows 20] [--json FILE]

Each run of the emoji set has a calibration that was fitted on the split val. Queries search the images of the split
test, or its texts; galleries of other sizes are random parts of the images, searched by the texts with a match in them.
Figures are over all windows of all runs.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration.drift import DriftMonitor, largest_difference
from sfumato.calibration.query_scores import QueryScores
from sfumato.distances import get_distance
from sfumato.models.run import Run, load_run
from sfumato.models.split import embed_split, load_split
from sfumato.models.unfamiliar import nonsense

ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
PARTS = (90, 178, 356, 712)
"""Numbers of images of the smaller galleries; a quarter to twice those of the calibration."""


def key_runs(n: int, random: np.random.Generator) -> list[str]:
    """Runs of four to six neighbouring keys, two in a text."""

    def run() -> str:
        row = ROWS[random.integers(3)]
        start, length = random.integers(len(row) - 3), random.integers(4, 7)
        return row[start : start + length][:: random.choice([-1, 1])]

    return [f"{run()} {run()}" for _ in range(n)]


def sentences(n: int, random: np.random.Generator) -> list[str]:
    """Sentences of this documentation: English, and about no emoji."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(Path("docs").rglob("*.md"))]
    plain = [re.sub(r"[`*\[\]()#|]", " ", page) for page in pages]
    found = sorted({" ".join(one.split()) for page in plain for one in re.split(r"(?<=[.:])\s+", page)})
    words = [one for one in found if 5 <= len(one.split()) <= 15 and re.fullmatch(r"[\w ,'.:-]+", one)]
    return [words[i] for i in random.choice(len(words), n, replace=len(words) < n)]


def windows(scores: QueryScores, nearest: Tensor, n_gallery: int, n: int) -> Iterator[tuple[float, bool]]:
    """(D, alarm) of n fresh windows of these queries, in their order."""
    for part in nearest.split(DriftMonitor(scores).window)[:n]:
        monitor = DriftMonitor(scores)
        monitor.add(part.tolist(), n_gallery=n_gallery)
        if monitor.state.statistic is not None:
            yield monitor.state.statistic, monitor.state.differs


def row(scores: QueryScores, nearest: Tensor, n_gallery: int, n: int, name: str) -> dict[str, Any]:
    """The windows of one kind of queries, and the difference of all of them with and without the shift for the size."""
    found = list(windows(scores, nearest, n_gallery, n))
    values = nearest.double().numpy()
    return {
        "queries": name,
        "n_gallery": n_gallery,
        "windows": len(found),
        "alarms": sum(alarm for _, alarm in found),
        "mean_d": float(np.mean([d for d, _ in found])),
        "largest_d": float(np.max([d for d, _ in found])),
        "d_of_all": largest_difference(values, scores.nearest_in(n_gallery)),
        "d_without_shift": largest_difference(values, replace(scores, per_doubling=()).nearest_in(n_gallery)),
    }


def of_run(run: Run, n: int, seed: int) -> list[dict[str, Any]]:
    """The rows of a run."""
    random = np.random.default_rng(seed)
    prepared = load_split(run.model, run.recipe.data, "test")
    data, (images, texts) = prepared.data, embed_split(run.model, prepared)
    if run.calibration is None:
        raise SystemExit(f"{run.folder} has no calibration")
    scores = {direction: fit.scores for direction, fit in run.calibration.directions.items()}
    by_text, by_image = (get_distance(run.distance).for_direction(d) for d in ("t2i", "i2t"))
    distance = by_text.matrix(texts, images)
    match = torch.from_numpy(data.match(np.arange(images.n), np.arange(texts.n))).T.bool()
    order = torch.from_numpy(random.permutation(texts.n))
    like = distance.amin(1)[order]
    rows = [row(scores["t2i"], like, images.n, n, "texts of the split test")]
    for size in PARTS:
        part = torch.from_numpy(random.permutation(images.n)[:size])
        asked = order[match[order][:, part].any(1)]
        rows.append(row(scores["t2i"], distance[asked][:, part].amin(1), size, n, f"the same, {size} images"))
    of_images = by_image.matrix(images, texts).amin(1)[torch.from_numpy(random.permutation(images.n))]
    rows.append(row(scores["i2t"], of_images, texts.n, n, "images of the split test"))
    many = n * DriftMonitor(scores["t2i"]).window
    made_up = nonsense(2 * many, seed=seed + 1)
    kinds = {
        "random letters": made_up[::2],
        "made-up syllables": made_up[1::2],
        "neighbouring keys": key_runs(many, random),
        "English sentences of another subject": sentences(many, random),
    }
    other = {name: by_text.matrix(run.model.embed_texts(found), images).amin(1) for name, found in kinds.items()}
    for name, nearest in other.items():
        rows.append(row(scores["t2i"], nearest, images.n, n, name))
    for fraction in (0.25, 0.5):
        mixed = other["random letters"].clone()[: len(like)]
        kept = torch.from_numpy(random.random(len(mixed)) >= fraction)
        mixed[kept] = like[: len(mixed)][kept]
        rows.append(row(scores["t2i"], mixed, images.n, n, f"{fraction:.0%} random letters, the rest of the test"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [of_run(load_run(run), options.windows, seed) for seed, run in enumerate(options.runs)]
    print("| queries | gallery | windows | alarms | mean D | largest D | D of all | D without the shift |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for same in zip(*found, strict=True):
        total = dict(same[0])
        for key in ("windows", "alarms"):
            total[key] = sum(each[key] for each in same)
        for key in ("mean_d", "d_of_all", "d_without_shift"):
            total[key] = float(np.mean([each[key] for each in same]))
        total["largest_d"] = max(each["largest_d"] for each in same)
        rows.append(total)
        figures = " | ".join(f"{total[key]:.3f}" for key in ("mean_d", "largest_d", "d_of_all", "d_without_shift"))
        print(f"| {total['queries']} | {total['n_gallery']} | {total['windows']} | {total['alarms']} | {figures} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
