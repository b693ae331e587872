"""Does the uncertainty of a text or an image follow the number of its matches that people know? All estimators.

    python -m papers.benchmarks.uncertainty_multiplicity WORK --data FOLDER [--seeds 0 1 2] [--only MODEL ...]
        [--posthoc 4] [--json FILE] [--plot FILE.png]
    python -m papers.benchmarks.uncertainty_multiplicity FILE.json [--page] [--plot FILE.png]

FOLDER has flickr8k/ (dataset_flickr8k.json, images_128.tar, the features of its images and captions),
flickr8k_judgements/ (crowd.csv) and coco5k_text/ (captions, ECCV Caption, CxC). Runs and the numbers of every query are
kept in WORK, so that the command resumes. --posthoc N fits the post-hoc methods on the means of the PCME++ runs,
adapters in N epochs; 0 leaves them out. FILE.json prints the tables of a file of --json again,
and --page writes them into papers/docs/uncertainty.md.
uncertainty_scenes.py has the queries.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from papers.benchmarks.referee import about
from papers.benchmarks.uncertainty_scenes import (
    KIND_OF,
    MODELS,
    POSTHOC,
    Scene,
    Scores,
    emoji_scenes,
    flickr8k_scenes,
    of_model,
    of_posthoc,
    resampled_together,
    trained,
)
from papers.benchmarks.uncertainty_tables import FIGURES, PAGE, TAKEN_OUT, page, plot, tables
from sfumato.files import write_atomically
from sfumato.metrics.bootstrap import (
    Interval,
    Statistic,
    auroc_statistic,
    balanced_spearman,
    bootstrap,
    decile_statistic,
    percentile_interval,
    resampled_balanced_spearman,
    spearman,
    spearman_statistic,
)
from sfumato.metrics.reliability import RecallByUncertainty


def measure(scene: Scene, scores: Mapping[str, Sequence[np.ndarray]], n_resamples: int) -> dict[str, Any]:
    """By name the figures, means over seeds, with intervals over queries; each seed's; and ten bins."""
    counts = scene.counts
    own = {name: [x[scene.rows] for x in seeds] for name, seeds in scores.items()}
    statistics = {f"{name}/all": mean_of([spearman_statistic(x, counts) for x in own[name]]) for name in own}
    for figure, baseline in TAKEN_OUT.items():
        statistics |= {
            f"{name}/{figure}": mean_of([partial_statistic(x, counts, own[baseline][0]) for x in own[name]])
            for name in own
            if baseline in own and name != baseline
        }
    found = bootstrap(statistics, len(counts), n_resamples=n_resamples, groups=scene.groups)
    if counts.min() > 0 and counts.max() >= 16:
        for name, seeds in own.items():
            value = fmean(balanced_spearman(x, counts) for x in seeds)
            each = {str(k): x for k, x in enumerate(seeds)}
            resampled = resampled_balanced_spearman(each, counts, n_resamples=n_resamples)
            found[f"{name}/balanced"] = percentile_interval(value, np.mean([*resampled.values()], axis=0))
    undefined = Interval(None, None, None)
    return {
        name: {figure: vars(found.get(f"{name}/{figure}", undefined)) for figure in FIGURES}
        | {"seeds": [spearman(x, counts) for x in own[name]], "deciles": deciles(own[name], counts)}
        for name in own
    }


def partial_statistic(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> Statistic:
    """The rank correlation of x and y with the ranks of z taken out of both, as a statistic."""
    of_xy, of_xz, of_yz = (spearman_statistic(a, b) for a, b in ((x, y), (x, z), (y, z)))

    def statistic(counts: np.ndarray) -> np.ndarray:
        xy, xz, yz = of_xy(counts), of_xz(counts), of_yz(counts)
        return np.asarray((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)))

    return statistic


def deciles(scores: Sequence[np.ndarray], counts: np.ndarray) -> list[float]:
    """The mean number of matches in ten bins of ascending uncertainty, mean over seeds."""
    orders = [np.array_split(np.argsort(x, kind="stable"), 10) for x in scores]
    found: list[float] = np.mean([[counts[part].mean() for part in order] for order in orders], axis=0).tolist()
    return found


def recalls(
    scores: Mapping[str, Sequence[np.ndarray]], hits: Sequence[np.ndarray], groups: np.ndarray, n_resamples: int
) -> dict[str, Any]:
    """By name recall@1 in ten bins, their correlation and the AUROC of wrong first hits, means over seeds."""
    found: dict[str, Any] = {}
    for name, seeds in scores.items():
        seeds = [*seeds] * (len(hits) if len(seeds) == 1 else 1)
        pairs = list(zip(seeds, hits, strict=True))
        known = ~np.isnan(hits[0])
        statistics = {
            "bins": mean_of([decile_statistic(x[known], hit[known]) for x, hit in pairs]),
            "auroc": mean_of([auroc_statistic(x[known], 1 - hit[known]) for x, hit in pairs]),
        }
        figures = bootstrap(statistics, int(known.sum()), n_resamples=n_resamples, groups=groups[known])
        bins = [[b["recall"] for b in RecallByUncertainty.of(x, hit).bins] for x, hit in pairs]
        found[name] = {key: vars(value) for key, value in figures.items()}
        found[name]["recall"] = np.mean(bins, axis=0).tolist()
    return found


def mean_of(statistics: Sequence[Statistic]) -> Statistic:
    """The mean of statistics, of one a seed."""
    return lambda counts: np.asarray(np.mean([statistic(counts) for statistic in statistics], axis=0))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the page shows."""
    work, data = options.work, options.data
    report: dict[str, Any] = {"commit": about()["commit"], "seeds": options.seeds, "scenes": {}, "recall": {}}
    for family in ("emoji", "flickr8k"):
        names = [name for name in options.only if name.startswith(family)]
        if not names:
            continue
        run = trained(work, data, names[0], options.seeds[0])
        scenes, trivial = emoji_scenes(run) if family == "emoji" else flickr8k_scenes(run, work, data)
        models = {name: [of_model(work, data, name, seed) for seed in options.seeds] for name in names}
        hits = dict(models)
        for name in [name for name in names if name in POSTHOC and options.posthoc]:
            seeds = [of_posthoc(work, data, name, seed, options.posthoc) for seed in options.seeds]
            models[f"{name} + post-hoc"] = seeds
        for scene, what in scenes.items():
            scores = of_kind(KIND_OF[scene], trivial, models)
            print(f"{scene}: {len(what.rows)} queries, {len(scores)} numbers of each", flush=True)
            counts = what.counts
            report["scenes"][scene] = {
                "n": len(counts), "mean": float(counts.mean()), "largest": float(counts.max()),
                "none": int((counts == 0).sum()), "scores": measure(what, scores, options.resamples),
            }  # fmt: skip
        for kind in ("text", "image"):
            groups = resampled_together(run, kind)
            for name, seeds in hits.items():
                scores = of_kind(kind, trivial, {name: seeds})
                found = recalls(scores, [seed[f"{kind}/hit"] for seed in seeds], groups, options.resamples)
                report["recall"][f"{name}, {kind}"] = {key.removeprefix(f"{name}: "): v for key, v in found.items()}
    return report


def of_kind(kind: str, trivial: Scores, models: Mapping[str, list[Scores]]) -> dict[str, list[np.ndarray]]:
    """The scores of a kind by "MODEL: NAME", one array a seed, without those that are infinite."""
    found = {f"baseline: {k.split('/')[1]}": [v] for k, v in trivial.items() if k.startswith(f"{kind}/")}
    for name, seeds in models.items():
        for key in [k for k in seeds[0] if k.startswith(f"{kind}/") and not k.endswith("/hit")]:
            found[f"{name}: {key.split('/')[1]}"] = [seed[key] for seed in seeds]
    return {name: seeds for name, seeds in found.items() if np.isfinite(seeds[0]).all()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--posthoc", type=int, default=4, help="epochs of adapters; 0: no post-hoc methods")
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", action="store_true", help="write the tables into papers/docs/uncertainty.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.work.is_file():
        report = json.loads(options.work.read_text(encoding="utf-8"))
    else:
        report = json.loads(json.dumps(measured(options)), parse_float=lambda text: float(f"{float(text):.4g}"))
        if options.json:
            write_atomically(options.json, json.dumps(report, separators=(",", ":")) + "\n")
    for title, text in tables(report).items():
        print(f"## {title}\n\n{text}\n")
    if options.page:
        write_atomically(PAGE, page(report, PAGE.read_text(encoding="utf-8")))
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    main()
