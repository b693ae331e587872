"""What an epoch is worth, which weights are kept, and what follows the epochs: calibration, words, variances."""

import contextlib
from typing import Any

import numpy as np

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.conditional import N_REFERENCE
from sfumato.data.splits import WORDINGS
from sfumato.distances.distance import Distance
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.files import write_atomically
from sfumato.gaussian import check_finite
from sfumato.metrics.relevance import Relevance
from sfumato.models.build import load_state, save_state
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import PreparedSplit, Sides, embed_split, prepare_split
from sfumato.models.model import remember_words
from sfumato.models.process_group import ProcessGroup
from sfumato.models.run import CALIBRATION, LOG, MODEL, TRAINED, TRAINING_CALIBRATION, WORDS, image_digest, read_log
from sfumato.progress import say
from sfumato.training.saving import Training
from sfumato.training.step import DivergedError
from sfumato.training.variance_stage import teach_variances


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


def keep_weights(training: Training, epoch: int, score: float) -> None:
    """Keep the present weights if they are the best by the recipe's choice."""
    config = training.recipe.train
    # Averaged weights are not compared with earlier weights that were not averaged.
    first_mean = epoch >= config.epochs - config.swa_epochs > training.best_epoch
    if score > training.best_score or first_mean or config.select == "last":
        training.best_score, training.best_epoch = score, epoch
        if training.process_group.main:
            save_state(training.folder / MODEL, training.learner.weights, None, {"epoch": epoch, "score": score})


def after_training(training: Training) -> None:
    """Load the weights that are kept, and run the hooks that the recipe and its data turn on."""
    data, group = training.data, training.process_group
    if data.val is None:
        _keep_last_weights(training)
    if data.indexed is not None and group.main:
        _remember_items(training)
    second_stage = training.recipe.variance_stage.epochs
    if data.val is None and not second_stage:
        return
    group.wait()
    about = load_state(training.folder / MODEL, training.learner.weights)
    group.wait()  # Before the first process writes it again.
    calibration = _calibrate(training) if data.val is not None else None
    if data.wordings is not None:
        _calibrate_training(training)
    if second_stage and not about.get("variance_stage"):
        _fit_variances(training, calibration)
        if group.main:
            save_state(training.folder / MODEL, training.learner.weights, None, about | {"variance_stage": True})
    group.wait()


def _keep_last_weights(training: Training) -> None:
    """Keep the weights of the last epoch, as no validation chooses among them."""
    say(
        "no validation split: the last weights are kept, and match probabilities are not calibrated."
        " For a validation split, raise data.val_fraction; with shards, give data.val_path; with cub,"
        " data.options.fold"
    )
    with training.learner.averaged():
        if training.process_group.main:
            about = {"epoch": training.recipe.train.epochs - 1}
            save_state(training.folder / MODEL, training.learner.weights, None, about)


def _remember_items(training: Training) -> None:
    """Write what is known of the training texts' words, and the digests of the training images."""
    assert training.data.indexed is not None
    model, data = training.learner.model, training.data.indexed.sampler.data
    remember_words(model, data.texts, training.folder / WORDS)
    if not model.image.processor.reads:
        write_atomically(training.folder / TRAINED, "".join(f"{image_digest(image)}\n" for image in data.images))


def _calibrate(training: Training) -> Calibration | None:
    """Calibrate on the validation split, in the first process, and write calibration.json into the run folder."""
    assert training.data.val is not None
    learner, val = training.learner, training.data.val
    embedded = embed_split(learner.model, val, training.process_group)
    if not training.process_group.main:
        return None
    name, split = learner.loss.distance.name, training.data.val_split
    try:
        calibration = calibrate_split(embedded, val.data, name, split=split, reference=_reference(training))
    except ValueError as error:
        say(f"match probabilities are not calibrated: {error}")
        return None
    calibration.save(training.folder / CALIBRATION)
    return calibration


def _calibrate_training(training: Training) -> None:
    """Calibrate a gallery of the training images on the texts that the training left out."""
    assert training.data.wordings is not None
    learner, group = training.learner, training.process_group
    prepared = prepare_split(learner.model, training.data.wordings, training.data.problems, WORDINGS, group)
    embedded = embed_split(learner.model, prepared, group)
    if group.main:
        path = training.folder / TRAINING_CALIBRATION
        path.unlink(missing_ok=True)  # Of the weights before, if the run was extended.
        with contextlib.suppress(ValueError):  # Too few texts: such a gallery has the probabilities of other images.
            calibrate_split(embedded, prepared.data, learner.loss.distance.name, split=WORDINGS).save(path)


def _reference(training: Training) -> Sides | None:
    """Some embedded training items, the reference queries of the calibration; None of a stream."""
    batches, model = training.data.indexed, training.learner.model
    if batches is None:
        return None
    random = np.random.default_rng(training.recipe.train.seed)
    image, text = (
        tower.embed(store, np.sort(random.permutation(len(store))[:N_REFERENCE]))
        for tower, store in ((model.image, batches.images), (model.text, batches.texts))
    )
    return image, text


def _fit_variances(training: Training, calibration: Calibration | None) -> None:
    """Run the variance stage, equal on all processes. It changes no distance, so the calibration stays valid."""
    batches, recipe, model = training.data.indexed, training.recipe, training.learner.model
    assert batches is not None  # The recipe was checked for this.
    if training.process_group.main:
        teach_variances(
            model,
            (batches.images, batches.texts),
            batches.sampler.data,
            recipe.variance_stage,
            logits=None if calibration is None else (calibration.logit_scale, calibration.logit_bias),
            seed=recipe.train.seed,
        )
    training.process_group.copy_from_main(model)
