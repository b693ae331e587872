"""A grid of runs: a recipe with all combinations of some values, trained and compared in a table."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from papers.runs.table import RunsTable, TableOptions, table_of_runs
from sfumato.errors import UserError, say
from sfumato.files import MODEL, RECIPE
from sfumato.models.recipe import Recipe, absolute_recipe, find_recipe, load_recipe
from sfumato.models.run import LOG
from sfumato.training.loop import fit
from sfumato.training.step import DivergedError


def read_vary(given: Sequence[str]) -> dict[str, list[str]]:
    """The values of each KEY=VALUE,VALUE; commas within brackets do not divide."""
    grid: dict[str, list[str]] = {}
    for one in given:
        key, equals, text = one.partition("=")
        values = [value.strip() for value in re.split(r",(?![^\[]*\])", text)]
        if not equals or not all(values):
            raise UserError(f"--vary {one}: expected KEY=VALUE,VALUE, e.g. loss.alpha=0,0.1")
        if key.strip() in grid or key.strip() == "train.seed":
            why = "--seeds N gives the seeds" if key.strip() == "train.seed" else "give all values of a key at once"
            raise UserError(f"--vary {one}: {why}")
        grid[key.strip()] = values
    return grid


def plan_grid(recipe: str, overrides: Sequence[str], grid: Mapping[str, Sequence[str]], n_seeds: int) -> list[Recipe]:
    """The recipes of all combinations of values, each with its seeds."""
    planned: list[Recipe] = []
    for values in itertools.product(*grid.values()):
        changes = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        one = load_recipe(find_recipe(recipe), [*overrides, *changes], own=True)
        for seed in range(one.train.seed, one.train.seed + n_seeds):
            planned.append(one.model_copy(update={"train": one.train.model_copy(update={"seed": seed})}))
            if planned[-1] in planned[:-1]:
                raise UserError(f"--vary: {' '.join(changes)} is a recipe that is there already; give each value once")
    return planned


def table_of_grid(
    recipes: Sequence[Recipe],
    keys: Sequence[str],
    runs: Path,
    options: TableOptions,
    *,
    device: torch.device | str = "cpu",
) -> RunsTable:
    """Train the runs of a grid that are not finished, and make their table; a run that diverges is left out."""
    folders, failed = train_missing(recipes, runs)
    if not folders:
        raise UserError("all runs diverged:\n" + "\n".join(failed))
    return table_of_runs(folders, keys, options, notes=[f"Left out: {reason}." for reason in failed], device=device)


def run_folder(recipe: Recipe, runs: Path) -> Path:
    """The folder of a recipe's run: equal recipes of all tables share it."""
    values = recipe.model_dump(mode="json")
    seed = values["train"].pop("seed")
    for key in ("tracker", "save_minutes"):
        del values["train"][key]
    if not values["imports"]:  # Folders of versions without these keys stay those of the same recipes.
        del values["imports"]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return runs / f"{recipe.name}-{digest}-{seed}"


def train_missing(recipes: Sequence[Recipe], runs: Path) -> tuple[list[Path], list[str]]:
    """Train what is not finished, resume what was interrupted; the folders, and why others have none."""
    folders, failed = [], []
    for recipe in map(absolute_recipe, recipes):
        folder = run_folder(recipe, runs)
        try:
            if not finished(folder, recipe):
                say(f"{folder}: training")
                fit(recipe, folder)
            folders.append(folder)
        except DivergedError as error:
            failed.append(f"{folder.name}: {error}")
            say(failed[-1])
    return folders, failed


def finished(folder: Path, recipe: Recipe) -> bool:
    """Whether all epochs of exactly this recipe are done; :func:`fit` handles every other case."""
    if not all((folder / name).is_file() for name in (RECIPE, LOG, MODEL)):
        return False
    epochs = len((folder / LOG).read_text(encoding="utf-8").splitlines())
    return load_recipe(folder / RECIPE) == recipe and epochs == recipe.train.epochs
