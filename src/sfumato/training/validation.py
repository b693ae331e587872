"""What an epoch is worth, which weights are kept, and what follows the epochs: calibration, words, the variance stage.

In the variance stage the total variance of an item learns what a teacher says of it. Under csd a total variance acts as
the prior of a match and can mean nothing else (docs/concepts/uncertainty.md). So the stage is for models that rank by
means, and changes variances alone. What is costly to compute for a query, because it looks at a gallery, thereby
becomes one number of the query itself, also for queries that the training never saw.
"""

import contextlib
import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.fits import KNOWN_TEXTS, N_KNOWN, in_bytes
from sfumato.calibration.logits import N_REFERENCE, fit_logits
from sfumato.data.pairs import PairData
from sfumato.data.splits import WORDINGS
from sfumato.distances.distance import Distance
from sfumato.encoders.encoder_protocol import Store
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.errors import UserError, progress_bar, say
from sfumato.evaluation.estimators import Matching, estimate_uncertainty, usable_estimators
from sfumato.evaluation.protocols import EmbeddedSplit, Evaluation, Query, evaluate_retrieval
from sfumato.files import CALIBRATION, MODEL, write_atomically
from sfumato.gaussian import Sides, accumulation_dtype, check_finite
from sfumato.metrics.bootstrap import spearman
from sfumato.metrics.relevance import Relevance
from sfumato.models.build import DualEncoder, Tower, load_state, save_state
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import PreparedSplit, embed_split, prepare_split
from sfumato.models.model import remember_words
from sfumato.models.process_group import ProcessGroup
from sfumato.models.run import LOG, TRAINED, TRAINING_CALIBRATION, WORDS, image_digest, read_log
from sfumato.models.sections import VarianceStageConfig
from sfumato.search.exact import distance_blocks
from sfumato.training.saving import Training
from sfumato.training.step import DivergedError, averaged, clip_gradients

_MEASURED = "efficientnet"
"""Runs on image features of this name keep known texts: a model on CLIP's knows more than what trained it here."""


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
    found = {f"val/{d}/{name}": value for d, metrics in directions.items() for name, value in metrics.items()}
    sums = {name: getattr(evaluation, name) for name in ("rsum", "chance_rsum", "above_chance")}
    return found | {f"val/{name}": value for name, value in sums.items()} | {"val/score": score}


def epoch_line(line: dict[str, Any], epochs: int, val_split: str) -> str:
    """What is printed of an epoch."""
    text = f"epoch {line['epoch'] + 1}/{epochs}  loss {line['loss']:.4f}"
    if "val/score" in line:
        i2t, t2i = line["val/i2t/recall@1"], line["val/t2i/recall@1"]
        rsum = f"rsum {line['val/rsum'] * 100:.1f} of 600 ({line['val/chance_rsum'] * 100:.1f} by chance)"
        text += f"  {val_split} recall@1 i2t {i2t:.1%} t2i {t2i:.1%}, {rsum}"
        if line["val/score"] != line["val/rsum"]:
            text += f", map@r {line['val/score']:.1%}"
        if not line["val/above_chance"]:
            text += ": not above chance yet"
    return text


def result_of(training: Training) -> dict[str, Any]:
    """What :func:`sfumato.training.loop.fit` returns."""
    config, val = training.recipe.train, training.data.val
    return {
        **{"run": str(training.folder), "epochs": config.epochs, "best_epoch": training.best_epoch},
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
    kept = "the last weights are kept, and match probabilities are not calibrated"
    ways = "raise data.val_fraction; with shards, give data.val_path; with cub, data.options.fold"
    say(f"no validation split: {kept}. For a validation split, {ways}")
    with averaged(training.learner.model, training.learner.average):
        if training.process_group.main:
            about = {"epoch": training.recipe.train.epochs - 1}
            save_state(training.folder / MODEL, training.learner.weights, None, about)


def _remember_items(training: Training) -> None:
    """Write what is known of the training texts' words, vectors of some, and the digests of the training images."""
    assert training.data.indexed is not None
    model, data = training.learner.model, training.data.indexed.sampler.data
    remember_words(model, data.texts, training.folder / WORDS)
    measured = training.recipe.model.image.frozen_backbone.startswith(_MEASURED)
    if measured and not model.text.processor.reads and len(data.texts) >= N_KNOWN:
        chosen = np.random.default_rng(0).permutation(len(data.texts))[:N_KNOWN]
        vectors, file = sentence_vectors([data.texts[i] for i in chosen]), io.BytesIO()
        np.save(file, in_bytes(vectors))
        write_atomically(training.folder / KNOWN_TEXTS, file.getvalue())
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
    sides = (model.image, batches.images), (model.text, batches.texts)
    chosen = (np.sort(random.permutation(len(store))[:N_REFERENCE]) for _, store in sides)
    image, text = (tower.embed(store, rows) for (tower, store), rows in zip(sides, chosen, strict=True))
    return image, text


def _fit_variances(training: Training, calibration: Calibration | None) -> None:
    """Run the variance stage, equal on all processes. It changes no distance, so the calibration stays valid."""
    batches, recipe, model = training.data.indexed, training.recipe, training.learner.model
    assert batches is not None  # The recipe was checked for this.
    if training.process_group.main:
        teach_variances(
            model, (batches.images, batches.texts), batches.sampler.data, recipe.variance_stage,
            logits=None if calibration is None else (calibration.logit_scale, calibration.logit_bias),
            seed=recipe.train.seed,
        )  # fmt: skip
    training.process_group.copy_from_main(model)


def match_dispersion(
    partners: Tensor, item: Tensor, partner: Tensor, n_items: int, *, whiten: bool = True, shrinkage: float = 0.01
) -> tuple[Tensor, Tensor]:
    r"""The dispersion of each item's matches: the mean of 1 - cosine over all pairs of its matches.

        w = W (partners - their mean), scaled to unit length
        dispersion = 1 - ||mean of w over an item's matches||^2

    The pairs include each match with itself. So a single match has a dispersion of 0, k orthogonal matches have 1 -
    1/k, and copies of one match do not increase it. Whitening, W = covariance^(-1/2), makes unrelated items orthogonal.
    Without whitening, many near-duplicates count as little more than one match.

    partners (n, d), item (p,), partner (p,) -> (m,).
    """
    w = partners.detach().to(accumulation_dtype(partners.dtype))
    if whiten:
        w = w - w.mean(0)
        value, vector = torch.linalg.eigh(w.T @ w / len(w))
        value = value.clamp(min=0) + shrinkage * value.clamp(min=0).mean()
        w = w @ vector / value.clamp(min=torch.finfo(w.dtype).tiny).sqrt()
    w = functional.normalize(w, dim=1)
    count = torch.bincount(item, minlength=n_items)
    centre = w.new_zeros(n_items, w.shape[1]).index_add_(0, item, w[partner]) / count.clamp(min=1)[:, None]
    return torch.where(count > 0, (1 - centre.square().sum(1)).clamp(min=0), 0), count


def dispersion_loss(log_var: Tensor, dispersion: Tensor, *, floor: float = 0.02) -> Tensor:
    r"""A proper scoring rule of the total variance, minimal if every log_var is log((dispersion + floor) / d).

        mean over items and dimensions of [ (dispersion + floor) / (d var) + log_var ] / 2

    Apart from a constant it is the negative log-likelihood of an item's matches under a Gaussian around their own
    centre with the same variance in every dimension.

    log_var (n, d), dispersion (n,).
    """
    wanted = (dispersion + floor)[:, None] / log_var.shape[1]
    return (wanted * (-log_var).exp() + log_var).mean() / 2


_LARGEST_GRADIENT = 2.0
_SAME = 1e-6
"""Values of a teacher that differ by less are equal, up to rounding."""

_N_GALLERY = 5000
"""Largest number of items in the gallery of an estimator, drawn at random."""

_N_CALIBRATING = 500
"""Number of items whose pairs with the gallery calibrate the match logits of a teacher."""


def teach_variances(
    model: DualEncoder,
    stores: tuple[Store, Store],
    data: PairData,
    config: VarianceStageConfig,
    *,
    logits: tuple[float, float] | None = None,
    seed: int,
) -> None:
    """Fit the log variances of each side to what the teacher says of its training items. logits (scale, bias)."""
    towers = model.image, model.text
    images, texts = (tower.embed(store) for tower, store in zip(towers, stores, strict=True))
    split = EmbeddedSplit(images, texts, data.relevance())
    queries = split.query("i2t"), split.query("t2i")
    for name, tower, store, query in zip(("images", "texts"), towers, stores, queries, strict=True):
        taught = teacher_values(config, query, logits=logits, seed=seed)
        index = np.flatnonzero(query.relevance.counts > 0)
        if float(taught[index].max() - taught[index].min()) < _SAME:
            say(f"variances of {name} stay as they are: {config.teacher} is the same for all, as with a single match")
            continue
        rank = fit_variance_stage(tower, store, taught, index, config, seed=seed)
        say(f"variances of {len(index)} {name} fitted to {config.teacher}: rank correlation {rank:.3f}")


def teacher_values(
    config: VarianceStageConfig, query: Query, *, logits: tuple[float, float] | None = None, seed: int = 0
) -> Tensor:
    """What the teacher says of every query, as a total variance in [0, 1].

    The dispersion is what it is. Of the number of listed or expected matches it is the logarithm. All others than the
    dispersion are scaled so that 0 and 1 are their quantiles .01 and .99, and cut there. Returns (n,).
    """
    items, partners, matches = query.queries, query.gallery, query.relevance
    if config.teacher == "dispersion":
        item, partner = (torch.from_numpy(index) for index in (matches.query_of_item, matches.indices))
        return match_dispersion(partners.mean, item, partner, items.n)[0]
    if config.teacher == "listed_matches":
        values = np.log(np.maximum(matches.counts, 1))
    else:
        usable = {n: e for n, e in usable_estimators().items() if e.needs_gallery and not e.needs_variance}
        if (estimator := usable.get(config.teacher)) is None:
            known = ", ".join(("dispersion", "listed_matches", *usable))
            raise UserError(f"unknown variance_stage.teacher {config.teacher!r}; known: {known}")
        # Over a random gallery of partners; logits that are not given are fitted on some items with it.
        random = np.random.default_rng([seed, items.n])
        chosen = np.sort(random.permutation(partners.n)[:_N_GALLERY])
        gallery = partners[torch.from_numpy(chosen)]
        sampled = replace(query, gallery=gallery, relevance=matches.select_gallery(chosen))
        calibrating = np.sort(random.permutation(items.n)[:_N_CALIBRATING])
        try:
            scale, bias = logits or _logits(sampled, calibrating)
            matching, own = Matching("squared_l2", scale, bias, query.direction), {estimator.name: estimator}
            values = estimate_uncertainty(items, gallery, matching, estimators=own, seed=seed)[estimator.name]
        except ValueError as error:
            raise UserError(f"variance_stage.teacher={config.teacher!r} cannot be computed: {error}") from error
        values = np.log(np.maximum(values, 1e-9)) if config.teacher == "expected_matches" else values
    low, high = np.quantile(values[matches.counts > 0], (0.01, 0.99))
    scaled = (values - low) / (high - low) if high > low else np.zeros(len(values))
    return torch.from_numpy(np.clip(scaled, 0, 1)).float()


def _logits(query: Query, chosen: np.ndarray) -> tuple[float, float]:
    """Match logits of the pairs of some queries with the gallery."""
    distance = Matching("squared_l2", direction=query.direction).oriented_distance
    blocks = distance_blocks(query.queries[torch.from_numpy(chosen)], query.gallery, distance)
    found = torch.cat([block for _, block in blocks])
    return fit_logits(found, torch.from_numpy(query.relevance.select_queries(chosen).to_dense()))


def fit_variance_stage(
    tower: Tower, store: Store, taught: Tensor, index: np.ndarray, config: VarianceStageConfig, *, seed: int
) -> float:
    """Fit a tower's log variances to given total variances of items; its means do not change by a bit.

    taught (n,), index (k,).
    """
    head = tower.head
    branches = [head.log_var, head.log_var_hidden, head.log_var_local, head.log_var_norm]
    learnt = [p for branch in branches if branch is not None for p in branch.parameters()]
    training, device = tower.training, tower.device
    tower.eval()  # No running statistics, and dropout only inside of what learns.
    if head.log_var_hidden is not None:
        head.log_var_hidden.train()
    random = np.random.default_rng([seed, len(index)])
    optimiser = torch.optim.AdamW(learnt, lr=config.lr, weight_decay=config.weight_decay)
    batches = math.ceil(len(index) / config.batch_size)
    steps = config.epochs * batches
    with progress_bar("fitting variances", steps) as advance, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in range(steps):
            if step % batches == 0:
                order = random.permutation(index)
            chosen = order[step % batches :: batches]
            for group in optimiser.param_groups:
                group["lr"] = config.lr * min(1.0, (step + 1) / batches) * (1 + math.cos(math.pi * step / steps)) / 2
            with torch.no_grad():
                tokens = tower.encoder(store.batch(chosen).to(device)).float()
            wanted = taught[torch.from_numpy(chosen)].to(device)
            optimiser.zero_grad(set_to_none=True)
            dispersion_loss(head.log_variance(tokens), wanted, floor=config.floor).backward()
            clip_gradients(learnt, _LARGEST_GRADIENT)
            optimiser.step()
            advance(1)
    optimiser.zero_grad(set_to_none=True)
    tower.train(training)
    return spearman(tower.embed(store, index).total_variance.numpy(), taught[torch.from_numpy(index)].numpy())
