"""Train and evaluate recipes over several seeds, and print one line for each with means and standard deviations.

    python benchmarks/methods.py emoji-infonce emoji-pcmepp [--seeds 0 1 2] [--split style] [--set section.key=value]
                                 [--out runs/methods] [--json PATH]

Runs that are finished are not repeated, an interrupted one is resumed. Figures in per cent, except correlations and
ranks. What training took stands below them: every run has a process of its own, whose processor time and largest memory
are its alone. Of these the processor time suffers least from other work on the machine; a resumed run has neither.
"""

import argparse
import hashlib
import json
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sfumato.evaluation.compare import main_figures, over_seeds
from sfumato.models.embed import evaluate_run
from sfumato.models.recipe import Recipe, find_recipe, load_recipe
from sfumato.models.run import LAST, RECIPE, load_run
from sfumato.training.loop import fit

COST = "cost.json"
"""In a run's folder: what training took."""


def train(recipe: Recipe, folder: Path) -> None:
    """Train to the end; what it took goes beside the run."""
    fresh = not (folder / LAST).exists()
    busy = time.process_time()
    seconds = fit(recipe, folder)["seconds"]
    cost: dict[str, float | None] = {"seconds": seconds, "processor seconds": None, "peak memory in MB": None}
    if fresh:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cost |= {
            "processor seconds": time.process_time() - busy,
            "peak memory in MB": peak / (2**20 if sys.platform == "darwin" else 1024),
        }
    (folder / COST).write_text(json.dumps(cost) + "\n")


def train_apart(recipe: Recipe, folder: Path) -> dict[str, float | None]:
    """Train in a new process, unless that was done before; what it took."""
    if not ((folder / COST).exists() and load_recipe(folder / RECIPE) == recipe):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(train, recipe, folder).result()
    cost: dict[str, float | None] = json.loads((folder / COST).read_text())
    return cost


def evaluate(folder: Path, split: str) -> dict[str, Any]:
    """The evaluation of a finished run, from its folder if it is there already."""
    written = sorted(folder.glob(f"evaluation-{split}-*.json"))
    path = written[0] if written else evaluate_run(load_run(folder), split)[1]
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+", help="names or paths of recipes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", default="test")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table: dict[str, dict[str, Any]] = {}
    for name in options.recipes:
        results = []
        for seed in options.seeds:
            recipe = load_recipe(find_recipe(name), [*options.overrides, f"train.seed={seed}"])
            changed = (
                hashlib.sha256("\n".join(options.overrides).encode()).hexdigest()[:8] if options.overrides else "plain"
            )
            folder = options.out / f"{recipe.name}-{changed}-{seed}"
            cost = train_apart(recipe, folder)
            result = evaluate(folder, options.split)
            ranks = {f"{direction} median rank": result[direction]["median_rank"] for direction in ("t2i", "i2t")}
            results.append(main_figures(result) | ranks | cost)
        summary = over_seeds(results)
        table[name] = {key: asdict(value) for key, value in summary.items()}
        print(f"{name} ({options.split}, {len(options.seeds)} seeds)")
        for key, value in summary.items():
            print(f"  {key:<24}{value!s:>15}", flush=True)
        if options.json:  # After every row, so that an interrupted table is not lost.
            about = {"split": options.split, "seeds": options.seeds, "changes": options.overrides, "table": table}
            options.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
