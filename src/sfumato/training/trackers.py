"""Figures of a training, epoch by epoch, to TensorBoard, Weights & Biases or MLflow.

Each package is configured by its own means: ``WANDB_MODE=offline``, ``WANDB_PROJECT``, ``MLFLOW_TRACKING_URI``.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sfumato.errors import need
from sfumato.models.recipe import Recipe, leaves

OnEpoch = Callable[[Mapping[str, Any]], None]
"""Called with what log.jsonl has of an epoch: its number from 0, losses, logits, validation figures, seconds."""


@contextlib.contextmanager
def tracked(name: str, recipe: Recipe, folder: Path) -> Iterator[OnEpoch]:
    """A function that gives an epoch's figures to a package, and ends its run afterwards."""
    with TRACKERS[name](recipe, folder) as write:
        yield lambda line: write(
            {k: float(v) for k, v in line.items() if isinstance(v, int | float)}, int(line["epoch"])
        )


_Write = Callable[[dict[str, float], int], Any]


def _settings(recipe: Recipe) -> dict[str, Any]:
    return dict(leaves(recipe.model_dump(mode="json", exclude_none=True)))


@contextlib.contextmanager
def _tensorboard(recipe: Recipe, folder: Path) -> Iterator[_Write]:
    with need("tensorboard", "train.tracker=tensorboard needs tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(figures: dict[str, float], epoch: int) -> None:
            for key, value in figures.items():
                writer.add_scalar(key, value, epoch)
            writer.flush()

        yield write


@contextlib.contextmanager
def _wandb(recipe: Recipe, folder: Path) -> Iterator[_Write]:
    with need("wandb", "train.tracker=wandb needs wandb"):
        import wandb
    with wandb.init(name=folder.name, dir=str(folder), config=_settings(recipe)) as run:
        yield lambda figures, epoch: run.log(figures, step=epoch)


@contextlib.contextmanager
def _mlflow(recipe: Recipe, folder: Path) -> Iterator[_Write]:
    with need("mlflow", "train.tracker=mlflow needs mlflow"):
        import mlflow
    with mlflow.start_run(run_name=folder.name):
        mlflow.log_params({key: str(value)[:500] for key, value in _settings(recipe).items()})
        # It allows no @ in names, and in folders no loss beside loss/match.
        named = str.maketrans({"@": "_at_", "/": "."})
        yield lambda figures, epoch: mlflow.log_metrics({k.translate(named): v for k, v in figures.items()}, epoch)


TRACKERS: dict[str, Callable[[Recipe, Path], contextlib.AbstractContextManager[_Write]]] = {
    "": lambda recipe, folder: contextlib.nullcontext(lambda figures, epoch: None),
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
"""Trackers by the name that a recipe gives."""
