"""Train and evaluate recipes over several seeds, each at its best learning rate: the family table.

    python -m papers.benchmarks.methods emoji [--rates 0.5 1 2] [--seeds 0 1 2] [--split test] [--set section.key=value]
                                 [--jobs 1] [--out runs/methods] [--json PATH]

A name is a recipe or a family, see FAMILIES. With several --rates the recipe's learning rate is multiplied by each, and
the first seed's best validation score chooses: every method has the same budget, and the test split is opened once for
each seed at the chosen rate. Runs that are finished are not repeated, an interrupted one is resumed.

Figures in per cent, except correlations and ranks. What training took stands below them: every run has a process of its
own, whose processor time and largest memory are its alone. Of these the processor time suffers least from other work on
the machine; a resumed run has neither.
"""

import argparse
import datetime
import json
import multiprocessing
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from papers.runs.grid import run_folder
from sfumato.evaluation.benchmarks import COMPARED
from sfumato.files import LAST, RECIPE
from sfumato.metrics.retrieval import RECALLS
from sfumato.models.embed import evaluate_run
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_run
from sfumato.training.loop import fit
from sfumato.workflows.evaluation import over_seeds

COST = "cost.json"
"""In a run's folder: what training took."""

_METHODS = ("infonce", "pcmepp", "mean-only", "semihard", "vse0", "vsepp", "triplet", "probabilistic-vsepp", "pcme")

FAMILIES = {data: [f"{data}-{name}" for name in _METHODS] for data in ("emoji", "flickr8k")}
"""The recipes of one table: the same data, features, heads and epochs, and one method each. VSE-infinity, DAA, PVSE and
VSRN are missing: they pool or attend several tokens of an image, and these features have one."""


def train(name: str, overrides: list[str], folder: Path) -> None:
    """Train to the end; what it took goes beside the run."""
    recipe = load_recipe(find_recipe(name), overrides, own=True)
    fresh = not (folder / LAST).exists()
    busy = time.process_time()
    result = fit(recipe, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
    cost = {
        "seconds": result["seconds"],
        "processor seconds": time.process_time() - busy if fresh else None,
        "peak memory in MB": peak if fresh else None,
        "best validation score": result["best_score"],
        "best epoch": result["best_epoch"] + 1,
    }
    (folder / COST).write_text(json.dumps(cost) + "\n")


class Runs:
    """Finished and new runs in one folder.

    Args:
        out: the folder.
        overrides: of every recipe.
    """

    def __init__(self, out: Path, overrides: list[str]) -> None:
        self.out, self.overrides = out, overrides

    def cost(self, name: str, rate: float, seed: int) -> tuple[Path, dict[str, float]]:
        """The folder of a run, and what its training took; trained in a new process unless that was done before."""
        own_rate = load_recipe(find_recipe(name), self.overrides, own=True).optim.lr
        changes = [*self.overrides, f"optim.lr={rate * own_rate!r}", f"train.seed={seed}"]
        folder = run_folder(load_recipe(find_recipe(name), changes, own=True), self.out)
        if not (folder / COST).exists():
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                pool.submit(train, name, changes, folder).result()
        cost: dict[str, float] = json.loads((folder / COST).read_text())
        return folder, cost

    def row(self, name: str, rates: list[float], seeds: list[int], split: str) -> dict[str, Any]:
        """A method's learning rate, the validation scores that chose it, and its figures over the seeds."""
        scores = {rate: self.cost(name, rate, seeds[0])[1]["best validation score"] for rate in rates}
        best = max(scores, key=lambda rate: scores[rate])
        results = []
        for seed in seeds:
            folder, cost = self.cost(name, best, seed)
            result = evaluate(folder, split)
            ranks = {f"{direction} median rank": result[direction]["median_rank"] for direction in ("t2i", "i2t")}
            results.append(main_figures(result) | ranks | cost)
        recipe, summary = load_recipe(folder / RECIPE), over_seeds(results)
        return {
            "learning rate": recipe.optim.lr,
            "epochs": recipe.train.epochs,
            "validation scores": {f"{rate:g}": score for rate, score in scores.items()},
            "figures": {key: asdict(value) for key, value in summary.items()},
            "text": {key: str(value) for key, value in summary.items()},
        }


def main_figures(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Choose the figures that summarise several runs."""
    chosen: dict[str, float | None] = {
        f"{direction} {name}": 100 * result[direction][name] for direction in ("t2i", "i2t") for name in COMPARED
    }
    if "name" in result["i2t_by_kind"]:
        chosen |= {f"i2name {name}": 100 * result["i2t_by_kind"]["name"][name] for name in RECALLS}
    if "name" in result["t2i_by_kind"]:
        chosen["name2i recall@1"] = 100 * result["t2i_by_kind"]["name"]["recall@1"]
    chosen["rsum"] = 100 * result["rsum"]
    uncertainty, multiplicity = result["uncertainty"], result["multiplicity"]
    for direction in ("i2t", "t2i"):
        chosen[f"{direction} ten-bin correlation"] = uncertainty[direction]["correlation"] if uncertainty else None
    return chosen | {f"multiplicity {n}": multiplicity[n] if multiplicity else None for n in ("all", "balanced")}


def evaluate(folder: Path, split: str) -> dict[str, Any]:
    """The evaluation of a finished run, from its folder if it is there already."""
    written = sorted(folder.glob(f"evaluation-{split}-*.json"))
    path = written[0] if written else evaluate_run(load_run(folder), split)[1]
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+", help=f"names or paths of recipes; families: {', '.join(FAMILIES)}")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="multiples of a recipe's learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", default="test")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [recipe for name in options.recipes for recipe in FAMILIES.get(name, [name])]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {
        "command": f"python -m papers.benchmarks.methods {' '.join(sys.argv[1:])}",
        "split": options.split,
        "seeds": options.seeds,
        "rates": options.rates,
        "changes": [text for text in options.overrides if not text.startswith("data.")],
        "commit": commit or None,
        "date": datetime.date.today().isoformat(),
    }
    table: dict[str, dict[str, Any]] = {}
    runs, lock = Runs(options.out, options.overrides), threading.Lock()

    def one(name: str) -> None:
        row = runs.row(name, options.rates, options.seeds, options.split)
        with lock:
            table[name] = row
            print(f"{name} ({options.split}, {len(options.seeds)} seeds, learning rate {row['learning rate']:g})")
            for key, text in row["text"].items():
                print(f"  {key:<24}{text:>15}", flush=True)
            if options.json:  # After every row, so that an interrupted table is not lost.
                ordered = {name: table[name] for name in names if name in table}
                options.json.write_text(json.dumps({**about, "table": ordered}, indent=2) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, names))


if __name__ == "__main__":
    main()
