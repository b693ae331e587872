"""What a run writes while it trains: its state, from which it resumes; its log; and figures for trackers.

Trackers are TensorBoard, Weights & Biases and MLflow. Each package is configured by its own means:
``WANDB_MODE=offline``, ``WANDB_PROJECT``, ``MLFLOW_TRACKING_URI``.
"""

import json
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.errors import need, say
from sfumato.files import LAST, write_atomically
from sfumato.models.build import load_state, save_state
from sfumato.models.embed import PreparedSplit
from sfumato.models.process_group import ProcessGroup
from sfumato.models.recipe import Recipe, leaves
from sfumato.models.run import LOG, PROBLEMS
from sfumato.training.batches import Batches, IndexedBatches, ShardBatches
from sfumato.training.step import Learner

_SECONDS_BETWEEN_SAVES = 15.0
"""Epochs that end sooner after the last saved one are not saved; an interrupted run repeats them bit for bit."""


@dataclass
class EpochPart:
    """The part of an epoch that is done."""

    epoch: int
    step: int = 0  # number of steps
    sums: Counter[str] = field(default_factory=Counter)  # of the quantities measured at its steps
    counts: Counter[str] = field(default_factory=Counter)  # number of steps that measured them
    seconds: float = 0.0

    def add(self, measured: dict[str, float], *, seconds: float) -> None:
        """Add what a step measured."""
        self.step, self.seconds = self.step + 1, seconds
        self.sums.update(measured)
        self.counts.update(measured.keys())

    def means(self) -> dict[str, float]:
        """The mean of each quantity over the steps that measured it."""
        return {name: value / self.counts[name] for name, value in self.sums.items()}


@dataclass(frozen=True)
class TrainingData:
    """What a run reads."""

    batches: Batches
    val: PreparedSplit | None  # chooses the best weights
    val_split: str  # its name
    wordings: PairData | None  # texts of the training images that the training leaves out
    problems: Problems

    @property
    def indexed(self) -> IndexedBatches | None:
        """The batches, if their pairs are all known."""
        return self.batches if isinstance(self.batches, IndexedBatches) else None


@dataclass
class Training:
    """A run during training."""

    recipe: Recipe
    folder: Path
    process_group: ProcessGroup
    learner: Learner
    data: TrainingData
    best_score: float = -math.inf
    best_epoch: int = -1
    began_at: float = field(default_factory=time.monotonic)
    saved_at: float = -math.inf
    end: bool = False  # The process was told to end.


def resume(training: Training) -> EpochPart:
    """Load the state of an interrupted run, if there is one; return the next epoch, and what of it is done."""
    done, folder, epochs = EpochPart(0), training.folder, training.recipe.train.epochs
    if (folder / LAST).exists():
        state = load_state(folder / LAST, training.learner.state, training.learner.optimiser)
        training.best_score, training.best_epoch = state["best_score"], state["best_epoch"]
        if state.get("scaler"):
            training.learner.scaler.load_state_dict(state["scaler"])
        done = EpochPart(state["epoch"] + 1)
        if part := state.get("part"):
            done = EpochPart(**part | {"sums": Counter(part["sums"]), "counts": Counter(part["counts"])})
        if isinstance(training.data.batches, ShardBatches) and training.process_group.main:
            for location, reason in state.get("problems", ()):
                training.data.batches.stream.skip(location, reason)
        within = f"in epoch {done.epoch + 1} of {epochs}, after step {done.step:,} of {len(training.data.batches):,}"
        after = f"after epoch {done.epoch} of {epochs}"
        say("all epochs are done" if done.epoch >= epochs else f"resuming {within if done.step else after}")
    if training.process_group.main:
        _forget_after(folder / LOG, done.epoch)
    if training.recipe.train.compile:
        training.learner.model.image.encoder.compile()
        training.learner.model.text.encoder.compile()
    if training.data.indexed is not None:
        training.data.indexed.prepare(training.learner.model)
    return done


def save_epoch(training: Training, line: dict[str, Any]) -> None:
    """Log an epoch, and save the state after it, unless one has just been saved and more will come."""
    if not training.process_group.main:
        return
    with (training.folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    recent = time.monotonic() - training.saved_at < _SECONDS_BETWEEN_SAVES
    if line["epoch"] + 1 == training.recipe.train.epochs or not recent:
        _save(training, line["epoch"])


def save_part_if_due(training: Training, done: EpochPart) -> None:
    """Save the state within an epoch if its time has come, on all processes alike; end if told so."""
    config, group = training.recipe.train, training.process_group
    if done.step == len(training.data.batches):
        return
    waited = time.monotonic() - max(training.saved_at, training.began_at)
    by_time = group.main and 0 < 60 * config.save_minutes < waited
    by_time, end = group.total(torch.tensor([float(by_time), float(training.end)])).tolist()
    if by_time or end:
        _save(training, done.epoch - 1, part=vars(done))
    if end:
        say(f"ended by SIGTERM, saved after step {done.step:,} of epoch {done.epoch + 1}; the same command continues")
        raise SystemExit(128 + signal.SIGTERM)


def _save(training: Training, epoch: int, **part: dict[str, Any]) -> None:
    """Save what resuming needs after an epoch and a part of the next one."""
    if not training.process_group.main:
        return
    training.data.problems.write(training.folder / PROBLEMS)
    about = {"epoch": epoch, "best_score": training.best_score, "best_epoch": training.best_epoch, **part}
    if scaler := training.learner.scaler.state_dict():
        about["scaler"] = scaler
    if isinstance(training.data.batches, ShardBatches):  # The stream will not decode again what is done.
        about["problems"] = [(problem.location, problem.reason) for problem in training.data.problems.items]
    save_state(training.folder / LAST, training.learner.state, training.learner.optimiser, about)
    training.saved_at = time.monotonic()


@contextmanager
def told_to_end(training: Training) -> Iterator[None]:
    """Note SIGTERM, which clusters send before they kill; a second one ends the process at once."""

    def note(number: int, _: object) -> None:
        training.end = True
        signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _forget_after(path: Path, epoch: int) -> None:
    """Remove log lines of epochs that will be run again, and a truncated last line."""
    if not path.exists():
        return
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    write_atomically(path, "".join(line for line in whole if json.loads(line)["epoch"] < epoch))


OnEpoch = Callable[[Mapping[str, Any]], None]
"""Called with what log.jsonl has of an epoch: its number from 0, losses, logits, validation figures, seconds."""


@contextmanager
def tracked(name: str, recipe: Recipe, folder: Path) -> Iterator[OnEpoch]:
    """A function that gives an epoch's figures to a package, and ends its run afterwards."""
    with TRACKERS[name](recipe, folder) as write:
        numbers = (int, float)
        yield lambda line: write({k: float(v) for k, v in line.items() if isinstance(v, numbers)}, int(line["epoch"]))


_Write = Callable[[dict[str, float], int], Any]


def _settings(recipe: Recipe) -> dict[str, Any]:
    return dict(leaves(recipe.model_dump(mode="json", exclude_none=True)))


@contextmanager
def _tensorboard(recipe: Recipe, folder: Path) -> Iterator[_Write]:
    with need("tensorboard", "train.tracker=tensorboard needs tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(figures: dict[str, float], epoch: int) -> None:
            for key, value in figures.items():
                writer.add_scalar(key, value, epoch)
            writer.flush()

        yield write


@contextmanager
def _wandb(recipe: Recipe, folder: Path) -> Iterator[_Write]:
    with need("wandb", "train.tracker=wandb needs wandb"):
        import wandb
    with wandb.init(name=folder.name, dir=str(folder), config=_settings(recipe)) as run:
        yield lambda figures, epoch: run.log(figures, step=epoch)


@contextmanager
def _mlflow(recipe: Recipe, folder: Path) -> Iterator[_Write]:
    with need("mlflow", "train.tracker=mlflow needs mlflow"):
        import mlflow
    with mlflow.start_run(run_name=folder.name):
        mlflow.log_params({key: str(value)[:500] for key, value in _settings(recipe).items()})
        # It allows no @ in names, and in folders no loss beside loss/match.
        named = str.maketrans({"@": "_at_", "/": "."})
        yield lambda figures, epoch: mlflow.log_metrics({k.translate(named): v for k, v in figures.items()}, epoch)


TRACKERS: dict[str, Callable[[Recipe, Path], AbstractContextManager[_Write]]] = {
    "": lambda recipe, folder: nullcontext(lambda figures, epoch: None),
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
"""Trackers by the name that a recipe gives."""
