"""Runs of one recipe with several seeds: what they may differ in, and what is refused beside each other."""

import difflib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from sfumato.errors import UserError, as_typed
from sfumato.models.recipe import BOOKKEEPING, Recipe, differing_keys, load_recipe, recipe_values
from sfumato.models.run import MODEL, RECIPE

WITHOUT_EFFECT = ("name", "prefer", "train.threads", "train.device", *BOOKKEEPING)
"""Keys that name a run or say where it was trained, but not how."""

SEED = "train.seed"

_NAMED = 5
"""Number of differing keys that a message names."""

_TAGS = (".name", ".kind")
"""Ends of keys that decide which other keys their section has."""


@dataclass(frozen=True)
class SavedRun:
    """A run folder of which only the recipe is read."""

    folder: Path
    recipe: Recipe

    def weights(self) -> str:
        """A hash of the weights in the file, which equal trainings share."""
        path = self.folder / MODEL
        if not path.is_file():
            raise UserError(
                f"{self.folder} has no weights: its training has not finished an epoch; run the same `sfumato train`"
                " again, or leave it out"
            )
        digest = hashlib.blake2b(digest_size=8)
        with path.open("rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))  # The header holds the epoch and its score, too.
            while block := file.read(2**20):
                digest.update(block)
        return digest.hexdigest()


def read_runs(folders: Iterable[str | Path]) -> list[SavedRun]:
    """The recipes of runs that differ from each other; a run that is given twice is refused."""
    runs: list[SavedRun] = []
    places: dict[Path, Path] = {}
    weights: dict[str, Path] = {}
    for folder in map(Path, folders):
        if not (folder / RECIPE).is_file():
            raise UserError(f"{folder} is not a run folder (no {RECIPE} in it)")
        run = SavedRun(folder, load_recipe(folder / RECIPE))
        if (other := places.setdefault(folder.resolve(), folder)) is not folder:
            raise UserError(f"{other} and {folder} are the same run; give it once")
        if (other := weights.setdefault(run.weights(), folder)) is not folder:
            raise UserError(
                f"{other} and {folder} have equal weights, so they are one run and not two; leave one of them out"
            )
        runs.append(run)
    return runs


def different_keys(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys in which two recipes differ, but for the seed and what has no effect on the weights."""
    found = differing_keys(first, second)
    return {key: values for key, values in found.items() if key not in (SEED, *WITHOUT_EFFECT)}


def without_followers(keys: Iterable[str]) -> list[str]:
    """The keys without those of a section whose name or kind is among them: another loss has other keys."""
    keys = list(keys)
    sections = [key.rpartition(".")[0] + "." for key in keys if key.endswith(_TAGS)]
    return [key for key in keys if key.endswith(_TAGS) or not key.startswith(tuple(sections))]


def check_seeds(runs: Sequence[SavedRun], keys: Sequence[str] | None = None) -> None:
    """Refuse runs whose mean would not be one over seeds; ``keys`` are those that a table groups them by."""
    for first, second in combinations(runs, 2):
        if differing := different_keys(first.recipe, second.recipe):
            decisive = without_followers(differing)
            named = [f"{key} ({_shown(differing[key][0])}, {_shown(differing[key][1])})" for key in decisive[:_NAMED]]
            rest = f", and {len(decisive) - _NAMED} more keys" if len(decisive) > _NAMED else ""
            group = "--group " + ",".join([*(keys or ()), *decisive[:_NAMED]])
            way_out = f"give each its row: {group}"
            if keys is None:
                folders = " ".join(as_typed("--runs", run.folder) for run in runs)
                way_out = f"for a table with a row for each: sfumato table {folders} {group}"
            raise UserError(
                f"{first.folder} and {second.folder} differ in more than {SEED}, so their mean is not one over seeds:"
                f" {', '.join(named)}{rest}; {way_out}"
            )
        if (seed := first.recipe.train.seed) == second.recipe.train.seed:
            raise UserError(
                f"{first.folder} and {second.folder} have the same recipe and the same {SEED}={seed}, so they are not"
                " two seeds; leave one of them out"
            )


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def group_runs(runs: Sequence[SavedRun], keys: Sequence[str]) -> dict[tuple[Any, ...], list[SavedRun]]:
    """The runs by their values of some keys, in the order of the runs; a value is None where a recipe lacks the key."""
    values = [recipe_values(run.recipe) for run in runs]
    known = sorted(set().union(*values)) if values else []
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise UserError(
                f"--group {key}: no recipe of these runs has this key"
                + (f"; did you mean {near[0]!r}?" if near else "; `cat RUN/recipe.toml` shows them")
            )
    groups: dict[tuple[Any, ...], list[SavedRun]] = {}
    for run, own in zip(runs, values, strict=True):
        label = tuple(tuple(v) if isinstance(v := own.get(key), list) else v for key in keys)
        groups.setdefault(label, []).append(run)
    for members in groups.values():
        check_seeds(members, keys)
    return groups
