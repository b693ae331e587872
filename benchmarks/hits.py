"""The probabilities beside the hits of runs, in galleries of several sizes, beside those of the distance alone.

    python benchmarks/hits.py RUN [RUN ...] [--split test] [--sizes 100 356] [--json FILE]

Each run has a calibration that was fitted on another split. Figures are means over the runs.
"""

from dataclasses import asdict
from statistics import fmean
from typing import Any, get_args

import numpy as np
import torch
from measuring import command_parser, write_json

from sfumato.calibration.logits import Population
from sfumato.distances import get_distance
from sfumato.evaluation.hits import HitFigures, measure_hits, without_nearest
from sfumato.models.calibrate import calibrate_split, embed_reference
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import load_run

COLUMNS = ("rate", "mean_probability", "ece", "ece_by_chance", "log_loss", "brier_skill", "auroc")


def of_run(folder: str, split: str, sizes: list[int], population: Population) -> dict[str, list[HitFigures]]:
    """The figures of a run by the name of the probability."""
    run = load_run(folder)
    sides = {}
    for name in ("val", split):
        prepared = load_split(run.model, run.recipe.data, name)
        sides[name] = prepared.data, embed_split(run.model, prepared)
    data, (images, texts) = sides[split]
    distance = get_distance(run.distance).matrix(images, texts)
    match = torch.from_numpy(data.match(np.arange(images.n), np.arange(texts.n)))
    held_out, embedded = sides["val"]
    with_reference, fitted = (
        calibrate_split(embedded, held_out, run.distance, split="val", population=population, reference=reference)
        for reference in (embed_reference(run.model, run.recipe.data), None)
    )
    kinds = {
        "nearest items and reference queries": with_reference,
        "nearest items": fitted,
        "distance and size": without_nearest(fitted),
    }
    return {
        name: measure_hits(calibration, distance, match, embedded=(images, texts), sizes=sizes, population=population)
        for name, calibration in kinds.items()
    }


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--split", default="test")
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 356])
    parser.add_argument("--population", choices=get_args(Population), default="planted")
    options = parser.parse_args()
    found = [of_run(run, options.split, options.sizes, options.population) for run in options.runs]
    rows: list[dict[str, Any]] = []
    print(f"| direction | images | hits | probability | {' | '.join(COLUMNS)} |")
    print(f"| --- | ---: | ---: | --- | {' | '.join('---:' for _ in COLUMNS)} |")
    names = list(found[0])
    for i, first in enumerate(found[0][names[0]]):
        for name in names:
            figures = [asdict(run[name][i]) for run in found]
            means = {key: fmean(each[key] for each in figures) for key in COLUMNS}
            about = {"direction": first.direction, "images": first.n_gallery, "hits": first.hits, "by": name}
            rows.append(about | means)
            cells = " | ".join(f"{means[key]:.3f}" for key in COLUMNS)
            print(f"| {first.direction} | {first.n_gallery} | {first.hits} | {name} | {cells} |")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
