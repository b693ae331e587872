"""An ablation of distances: a model is trained with each distance and evaluated with all of them.

The runs differ only in loss.distance and train.seed: initial logits, learning rate and bottleneck are those of the
recipe. Ranking by another distance needs no further training.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.distances import DISTANCES, get_distance
from sfumato.errors import UserError
from sfumato.evaluation.compare import OverSeeds, main_figures, over_seeds
from sfumato.files import read_json, write_json
from sfumato.models.embed import embed_for_evaluation, evaluate_run
from sfumato.models.recipe import Recipe, check_recipe, load_recipe
from sfumato.models.run import LOG, MODEL, RECIPE, load_run
from sfumato.progress import say
from sfumato.training.loop import fit
from sfumato.training.step import DivergedError

_VARIANTS = ("wasserstein2_root", "wasserstein2_printed", "kl_reversed")

ABLATED = tuple(d.name for d in DISTANCES.values() if not d.sampled and d.name not in _VARIANTS)
"""The distances that are compared by default: all closed forms but three variants of one paper."""


@dataclass(frozen=True)
class Ablation:
    """The figures of every distance."""

    recipe: str  # name of the recipe
    split: str  # the evaluated split
    seeds: tuple[int, ...]  # train.seed of the runs of each distance
    cells: dict[str, dict[str, dict[str, OverSeeds]]]
    failed: dict[str, str]  # {"DISTANCE-SEED": reason} of runs that diverged; they are in no cell

    def to_json(self) -> dict[str, Any]:
        """The ablation as JSON values."""
        return asdict(self)


def ablate(
    recipe: Recipe,
    folder: str | Path,
    *,
    trained: Sequence[str] = ABLATED,
    retrieved: Sequence[str] = ABLATED,
    n_seeds: int = 1,
    split: str = "test",
    device: torch.device | str = "cpu",
) -> Ablation:
    """Train with each distance, rank by each, and write ablation-SPLIT.json beside the runs FOLDER/DISTANCE-SEED.

    A finished run of the same recipe is reused, and an interrupted run is resumed. Figures that exist in its folder are
    not computed again.
    """
    _check(recipe, trained, "train")
    _check(recipe, retrieved, "retrieve")
    seeds = tuple(range(recipe.train.seed, recipe.train.seed + n_seeds))
    recipes = {(name, seed): _with(recipe, name, seed) for seed in seeds for name in trained}
    folder = Path(folder)
    figures: dict[str, list[dict[str, dict[str, float | None]]]] = {name: [] for name in trained}
    failed: dict[str, str] = {}
    for (name, seed), one in recipes.items():
        run = folder / f"{name}-{seed}"
        try:
            if finished(run, one):
                say(f"{run}: trained already")
            else:
                say(f"{run}: training")
                fit(one, run)
            figures[name].append(_figures(run, split, retrieved, device))
        except DivergedError as error:
            say(f"{run}: {error}")
            failed[run.name] = str(error)
    cells = {
        name: {by: over_seeds([result[by] for result in results]) for by in retrieved} if results else {}
        for name, results in figures.items()
    }
    ablation = Ablation(recipe.name, split, seeds, cells, failed)
    write_json(ablation_file(folder, split), ablation.to_json())
    return ablation


def ablation_file(folder: Path, split: str) -> Path:
    """The file into which :func:`ablate` writes its figures."""
    return folder / f"ablation-{split}.json"


def _check(recipe: Recipe, names: Sequence[str], what: str) -> None:
    if not names:
        raise UserError(f"no distance to {what} with; known: {', '.join(DISTANCES)}")
    for i, name in enumerate(names):
        if get_distance(name).sampled:
            raise UserError(f"{name} is sampled, so no two rankings are equal; leave it out of --{what}")
        if name in names[:i]:
            raise UserError(f"--{what} names {name} twice")
    if not recipe.model.variance:
        raise UserError(
            f"{recipe.name} has model.variance=false: for points, csd, wasserstein2 and squared_l2 are the same and the"
            " other distances are undefined; choose a recipe with variances"
        )
    if recipe.loss.name == "pcme":
        raise UserError("the loss pcme compares samples and ignores loss.distance; give loss.name=pcmepp, or another")


def _with(recipe: Recipe, distance: str, seed: int) -> Recipe:
    values = recipe.model_dump(mode="json", exclude_none=True)
    values["loss"]["distance"], values["train"]["seed"] = distance, seed
    return check_recipe(values, f"{recipe.name} with loss.distance={distance}")


def finished(folder: Path, recipe: Recipe) -> bool:
    """Whether all epochs of exactly this recipe are done; :func:`fit` handles every other case."""
    if not all((folder / name).is_file() for name in (RECIPE, LOG, MODEL)):
        return False
    epochs = len((folder / LOG).read_text(encoding="utf-8").splitlines())
    return load_recipe(folder / RECIPE) == recipe and epochs == recipe.train.epochs


def _figures(
    folder: Path, split: str, retrieved: Sequence[str], device: torch.device | str
) -> dict[str, dict[str, float | None]]:
    """The main figures for each distance; files in the folder that are not older than the weights are reused."""
    files = {name: folder / f"evaluation-{split}-{name}.json" for name in retrieved}
    written = (folder / MODEL).stat().st_mtime_ns
    if missing := [n for n, file in files.items() if not file.is_file() or file.stat().st_mtime_ns < written]:
        run = load_run(folder, device=device)
        embedded = embed_for_evaluation(run, run.recipe.data, split)
        for name in missing:
            evaluate_run(run, split, name, embedded=embedded)
    return {name: main_figures(read_json(file)) for name, file in files.items()}
