"""What the calibration of an emoji run is worth: probabilities, conformal sets and abstention on unseen queries.

    python benchmarks/calibration.py RUN [--halves 200] [--json FILE]

The run's calibration is fitted on split "val": concepts drawn in a style that training never saw. Split "test" holds
other concepts in the same style, in a gallery four times as large: its queries are like those of val, its gallery is
not. Random halves of "style" (all concepts of that style) are exchangeable by construction: one half of the queries
calibrates, the other is tested, both in one gallery. Split "train" has seen styles: calibrating on it breaks the
condition, and shows what the promises are worth then.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import command_parser, write_json
from torch import Tensor

from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.logits import N_NEAREST, PairLogits
from sfumato.calibration.query_scores import N_STEPS, QueryScores
from sfumato.distances import get_distance
from sfumato.ids import Direction
from sfumato.matching import match_probability
from sfumato.metrics.reliability import expected_calibration_error
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import Run, load_run

LEVELS = (0.8, 0.9, 0.95)
RISKS = (0.5, 0.3, 0.2, 0.1)
PRECISIONS = (0.3, 0.5, 0.8)
DIRECTIONS: tuple[Direction, ...] = ("i2t", "t2i")


def pairs_of(run: Run, split: str) -> tuple[Tensor, Tensor]:
    """(n, m) distances of all images and texts of a split, and whether they match."""
    prepared = load_split(run.model, run.recipe.data, split)
    images, texts = embed_split(run.model, prepared)
    match = prepared.data.match(np.arange(images.n), np.arange(texts.n))
    return get_distance(run.distance).matrix(images, texts), torch.from_numpy(match).bool()


def calibrated(run: Run, split: str) -> Calibration:
    """Fitted on a split."""
    prepared = load_split(run.model, run.recipe.data, split)
    return calibrate_split(embed_split(run.model, prepared), prepared.data, run.distance, split=split)


def probabilities(run: Run, fitted: Calibration, distance: Tensor, match: Tensor) -> dict[str, Any]:
    """Calibration errors over all pairs; of the size of the gallery, that of the images."""
    found = {
        "before": match_probability(distance, *(run.loss.match_logits() or (1.0, 0.0))),
        "platt": fitted.probability(distance),
        "platt, gallery size": fitted.of("t2i").probability(distance, n_gallery=len(distance)),
    }
    label = match.flatten().float()
    return {
        name: {
            "expected_calibration_error": expected_calibration_error(p.flatten(), label, binning="width"),
            "expected_matches_over_true": float(p.double().sum() / match.sum()),
        }
        for name, p in found.items()
    }


def sets(calibration: Calibration, direction: Direction, distance: Tensor, match: Tensor) -> dict[str, Any]:
    """Coverage and size of conformal sets of queries that have a match."""
    has = match.any(1)
    distance, match = distance[has], match[has]
    result: dict[str, Any] = {"n_queries": len(distance)}
    for level in LEVELS:
        values: dict[str, float] = {}
        for contains in ("any", "all"):
            inside = distance <= calibration.of(direction).conformal_radius(1 - level, contains=contains)
            held = (inside & match).any(1) if contains == "any" else (inside | ~match).all(1)
            values |= {
                contains: float(held.double().mean()),
                f"size {contains}": float(inside.sum(1).double().median()),
            }
        result[str(level)] = values
    return result


def answers(calibration: Calibration, direction: Direction, distance: Tensor, match: Tensor) -> dict[str, Any]:
    """Risk and share of answered queries, in a gallery of the size that distance has; precision above thresholds."""
    has = match.any(1)
    distance, match = distance[has], match[has]
    nearest, place = distance.topk(min(N_NEAREST, distance.shape[1]), largest=False)
    right = match.gather(1, place[:, None])[:, 0]
    n = distance.shape[1]
    result: dict[str, Any] = {"risk of answering all": float((~right).double().mean())}
    for risk in RISKS:
        try:
            answered = ~calibration.of(direction).abstains(nearest, risk, n_gallery=n)
        except ValueError:
            continue
        values = {"answered": float(answered.double().mean()), "risk": float((~right[answered]).double().mean())}
        result[f"risk {risk}"] = values
    for precision in PRECISIONS:
        try:
            limit = calibration.of(direction).threshold(precision)
        except ValueError:
            continue
        above = calibration.of(direction).hit_probability(distance.double(), nearest, n_gallery=n) > limit
        some = above.any(1)
        each = (above & match).sum(1)[some] / above.sum(1)[some]
        result[f"precision {precision}"] = {
            "answered": float(some.double().mean()),
            "precision": float(each.double().mean()),
        }
    return result


def halves(scores: QueryScores, n_halves: int) -> dict[str, Any]:
    """Random halves of the queries of one gallery: means over the splits, and how often a promised risk is broken."""
    columns = [np.array(c) for c in (scores.closest_match, scores.farthest_match, scores.closest_other)]
    right = columns[0] < columns[2]
    nearest = scores.nearest
    random = np.random.default_rng(0)
    coverage: dict[str, list[float]] = {f"{c} {level}": [] for c in ("any", "all") for level in LEVELS}
    risks: dict[str, list[tuple[float, float]]] = {str(risk): [] for risk in RISKS}
    for _ in range(n_halves):
        order = random.permutation(len(nearest))
        ours, new = order[: len(order) // 2], order[len(order) // 2 :]
        lists = [tuple(c[ours].tolist()) for c in columns]
        half = QueryScores(scores.n_gallery, 0, 1.0, 0.0, lists[0], lists[1], lists[2], (0.0,) * N_STEPS)
        calibration = DirectionCalibration(PairLogits(1.0, 0.0, 0.5), half)
        for level in LEVELS:
            any_radius = calibration.conformal_radius(1 - level)
            all_radius = calibration.conformal_radius(1 - level, contains="all")
            coverage[f"any {level}"].append(float((columns[0][new] <= any_radius).mean()))
            coverage[f"all {level}"].append(float((columns[1][new] <= all_radius).mean()))
        for risk in RISKS:
            try:
                answered = ~calibration.abstains(torch.from_numpy(nearest[new]), risk).numpy()
            except ValueError:
                answered = np.zeros(len(new), bool)
            wrong = float((~right[new][answered]).mean()) if answered.any() else math.nan
            risks[str(risk)].append((float(answered.mean()), wrong))
    result: dict[str, Any] = {
        f"coverage {name}": {"mean": float(np.mean(v)), "std": float(np.std(v))} for name, v in coverage.items()
    }
    for name, pairs in risks.items():
        answered_share, wrong_share = np.array(pairs).T
        result[f"risk {name}"] = {
            "answered": float(answered_share.mean()),
            "risk": float(np.nanmean(wrong_share)) if np.isfinite(wrong_share).any() else None,
            "broken": float((np.nan_to_num(wrong_share) > float(name)).mean()),
        }
    return result


def main() -> None:
    """See the module."""
    parser = command_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--halves", type=int, default=200)
    arguments = parser.parse_args()
    run = load_run(arguments.run)
    own, seen = (calibrated(run, split) for split in ("val", "train"))
    result: dict[str, Any] = {}
    for split in ("val", "test"):
        distance, match = pairs_of(run, split)
        result[f"probabilities, {split}"] = probabilities(run, own, distance, match)
        for direction in DIRECTIONS:
            d, y = (distance, match) if direction == "i2t" else (distance.T, match.T)
            if split == "test":
                result[f"{direction}: sets of val on test"] = sets(own, direction, d, y)
                result[f"{direction}: answers of val on test"] = answers(own, direction, d, y)
                result[f"{direction}: sets of seen styles on test"] = sets(seen, direction, d, y)
                result[f"{direction}: answers of seen styles on test"] = answers(seen, direction, d, y)
    distance, match = pairs_of(run, "style")
    for direction in DIRECTIONS:
        d, y = (distance, match) if direction == "i2t" else (distance.T, match.T)
        result[f"{direction}: random halves"] = halves(QueryScores.fit(d, y, growth=0.0), arguments.halves)
    show(result)
    write_json(arguments.json, result)


def show(result: dict[str, Any]) -> None:
    """All figures, a line each."""
    for name, values in result.items():
        print(name)
        for key, value in values.items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {'-' if v is None else f'{v:.5g}'}" for k, v in value.items())
            print(f"  {key}: {value}")


if __name__ == "__main__":
    main()
