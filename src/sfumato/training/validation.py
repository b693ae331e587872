"""Validation: the figures of a split after an epoch, the score by which the best weights are chosen, and reports."""

from typing import Any

from sfumato.distances import Distance
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.gaussian import check_finite
from sfumato.metrics.relevance import Relevance
from sfumato.models.process_group import ProcessGroup
from sfumato.models.run import CALIBRATION, LOG, read_log
from sfumato.models.split import PreparedSplit, Sides
from sfumato.training.saving import Training
from sfumato.training.step import DivergedError


def validate(
    embedded: Sides, split: PreparedSplit, distance: Distance, select: str, process_group: ProcessGroup
) -> tuple[Evaluation, float]:
    """Evaluate the embeddings of a split, and compute the score by which the best epoch is chosen."""
    relevance = split.data.relevance()
    for side, embeddings in zip(("image", "text"), embedded, strict=True):
        try:
            check_finite(embeddings, f"validation, {side}s")
        except ValueError as error:
            raise DivergedError(f"{error}; lower optim.lr or lengthen optim.warmup_epochs") from error
    evaluation = evaluate_retrieval(
        *embedded, relevance, distance=distance.name, text_kinds=split.data.text_kinds, rank=process_group.rank_relevant
    )
    if selected_by(select, relevance) == "map@r":
        return evaluation, (evaluation.i2t["map@r"] + evaluation.t2i["map@r"]) / 2
    return evaluation, evaluation.rsum


def selected_by(select: str, relevance: Relevance) -> str:
    """The metric by which the best epoch is chosen."""
    many = relevance.transpose().counts.max() > 1
    return "map@r" if select == "map@r" or (select == "auto" and many) else "rsum"


def figures_of(evaluation: Evaluation, score: float) -> dict[str, float]:
    """What the log has of a validation."""
    directions = {"i2t": evaluation.i2t, "t2i": evaluation.t2i}
    return {f"val/{d}/{name}": value for d, metrics in directions.items() for name, value in metrics.items()} | {
        "val/rsum": evaluation.rsum,
        "val/chance_rsum": evaluation.chance_rsum,
        "val/above_chance": evaluation.above_chance,
        "val/score": score,
    }


def epoch_line(line: dict[str, Any], epochs: int, val_split: str) -> str:
    """What is printed of an epoch."""
    text = f"epoch {line['epoch'] + 1}/{epochs}  loss {line['loss']:.4f}"
    if "val/score" in line:
        i2t, t2i = line["val/i2t/recall@1"], line["val/t2i/recall@1"]
        text += (
            f"  {val_split} recall@1 i2t {i2t:.1%} t2i {t2i:.1%}, rsum {line['val/rsum'] * 100:.1f} of 600"
            f" ({line['val/chance_rsum'] * 100:.1f} by chance)"
        )
        if line["val/score"] != line["val/rsum"]:
            text += f", map@r {line['val/score']:.1%}"
        if not line["val/above_chance"]:
            text += ": not above chance yet"
    return text


def result_of(training: Training) -> dict[str, Any]:
    """What :func:`sfumato.training.loop.fit` returns."""
    config, val = training.recipe.train, training.data.val
    return {
        "run": str(training.folder),
        "epochs": config.epochs,
        "best_epoch": training.best_epoch,
        "best_score": None if val is None else training.best_score,
        "selected_by": None if val is None else selected_by(config.select, val.data.relevance()),
        "parameters": sum(p.numel() for p in training.learner.model.parameters()),
        "calibrated": (training.folder / CALIBRATION).exists(),
        "problems": len(training.data.problems),
        "seconds": round(sum(line["seconds"] for line in read_log(training.folder / LOG)), 1),
    }
