"""Train and evaluate recipes over several seeds, and print one line for each with means and standard deviations.

    python benchmarks/methods.py emoji-infonce emoji-pcmepp [--seeds 0 1 2] [--split style] [--set section.key=value]
                                 [--out runs/methods] [--json PATH]

Runs that are finished are not repeated, an interrupted one is resumed. Figures in per cent, except correlations.
"""

import argparse
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sfumato.evaluation.compare import main_figures, over_seeds
from sfumato.recipes import find_recipe
from sfumato.training.config import load_recipe
from sfumato.training.inference import evaluate_run
from sfumato.training.loop import fit
from sfumato.training.run import load_run


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
            fit(recipe, folder)
            results.append(main_figures(evaluate(folder, options.split)))
        summary = over_seeds(results)
        table[name] = {key: asdict(value) for key, value in summary.items()}
        print(f"{name} ({options.split}, {len(options.seeds)} seeds)")
        for key, value in summary.items():
            print(f"  {key:<24}{value!s:>15}")
    if options.json:
        options.json.write_text(
            json.dumps({"split": options.split, "seeds": options.seeds, "table": table}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
