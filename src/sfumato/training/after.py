"""What follows the epochs of a run: which weights are kept, and what else a recipe asks for."""

import contextlib

import numpy as np

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.conditional import N_REFERENCE
from sfumato.data.splits import WORDINGS
from sfumato.files import write_atomically
from sfumato.models.calibrate import calibrate_split
from sfumato.models.run import CALIBRATION, MODEL, TRAINED, TRAINING_CALIBRATION, WORDS, image_digest
from sfumato.models.split import Sides, embed_split, prepare_split
from sfumato.models.state import load_state, save_state
from sfumato.models.unfamiliar import remember_words
from sfumato.progress import say
from sfumato.training.saving import Training
from sfumato.training.variance_stage import teach_variances


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
