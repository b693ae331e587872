"""The training loop: one readable function, resumable to the bit.

Everything random in an epoch follows from (seed, epoch), so that the state after an epoch is all that resuming needs.
"""

import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import torch

from sfumato.data.folds import parse_part, without_part
from sfumato.data.grading import Grades
from sfumato.data.noise import apply_noise, load_noise, save_noise, shuffle_pairs
from sfumato.data.pairs import PairData, PairSampler
from sfumato.data.problems import Problems
from sfumato.data.shard_files import expand_shards
from sfumato.data.shards import ShardStream
from sfumato.data.sources import DataConfig
from sfumato.distances import Distance
from sfumato.encoders.dual import DualEncoder
from sfumato.errors import UserError
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.losses import MatchLoss, match_dispersion
from sfumato.models.build import Assets, build_loss, build_model, choose_device, fresh_tokenizer
from sfumato.models.calibrate import calibrate_split
from sfumato.models.process_group import ProcessGroup, alone, join_process_group
from sfumato.models.recipe import Recipe, load_recipe, save_recipe
from sfumato.models.run import (
    CALIBRATION,
    ENCODERS,
    LAST,
    LOG,
    MODEL,
    NOISE,
    PROBLEMS,
    RECIPE,
    TOKENIZER,
    learnt_logits,
    load_assets,
    load_state,
    save_assets,
    save_state,
)
from sfumato.models.splits import PreparedSplit, embed_split, load_splits, prepare_split
from sfumato.progress import progress_bar, say
from sfumato.training.batches import Augmentation, Batches, IndexedBatches, ShardBatches, epoch_seed, prefetch
from sfumato.training.optim import (
    WeightAverage,
    averaged,
    build_optimiser,
    clip_gradients,
    freeze_for_epoch,
    learning_rate_factor,
    set_learning_rate,
)
from sfumato.training.step import DivergedError, forward_backward
from sfumato.training.variance_stage import fit_variance_stage

_LOCK = ".lock"
_VOCABULARY_TEXTS = 100_000


@dataclass
class _Best:
    score: float = -math.inf
    epoch: int = -1


@dataclass
class _EpochLog:
    """Means over the steps of an epoch."""

    sums: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    def add(self, values: dict[str, float]) -> None:
        self.steps += 1
        for key, value in values.items():
            self.sums[key] = self.sums.get(key, 0.0) + value

    def means(self) -> dict[str, float]:
        return {key: value / self.steps for key, value in self.sums.items()}


def fit(recipe: Recipe, folder: str | Path) -> dict[str, Any]:
    """Train as the recipe says, and resume where an interrupted run of the same recipe stopped.

    Started by torchrun, all its processes train the one model together; a batch is spread over them.

    Args:
        recipe: the complete recipe.
        folder: the run's; made if missing. A run of another recipe in it is refused.

    Returns:
        {"run", "epochs", "best_epoch", "best_score", "parameters", "problems", "seconds"}; seconds are those of all epochs.

    Raises:
        UserError: the folder holds a run of another recipe, or the data cannot be used.
        DivergedError: a term of the loss is NaN or infinite.
        PeerLostError: another process of the run has ended.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with join_process_group(partial(choose_device, recipe.train.device), recipe.train.timeout_minutes) as process_group:
        if not process_group.main:
            return _fit(recipe, folder, process_group)
        try:
            with filelock.FileLock(folder / _LOCK, timeout=0):
                return _fit(recipe, folder, process_group)
        except filelock.Timeout as error:
            raise UserError(
                f"another process is training in {folder}; wait for it, or give another folder with --out"
            ) from error


def _fit(recipe: Recipe, folder: Path, process_group: ProcessGroup) -> dict[str, Any]:
    if process_group.main:
        _claim(folder, recipe)
    process_group.wait()
    config = recipe.train
    if config.threads:
        torch.set_num_threads(config.threads)
    problems = Problems()
    splits = load_splits(recipe.data, problems)
    if "train" in splits:
        splits["train"] = _with_noise(recipe.data, splits["train"], folder, process_group)
        if recipe.data.leave_out:
            splits["train"] = without_part(splits["train"], *parse_part(recipe.data.leave_out))
    if recipe.data.source == "shards":
        _stream(recipe, Problems(), process_group)  # Refused on all processes alike, before any of them works.
    torch.manual_seed(config.seed)
    model = _model(recipe, folder, splits, process_group)
    loss = build_loss(recipe).to(process_group.device)
    val = prepare_split(model, splits["val"], problems, "val", process_group) if "val" in splits else None
    batches = _batches(recipe, model, splits, problems, process_group)
    if process_group.main:
        problems.write(folder / PROBLEMS)
    used = {"train": batches.sampler.data} if isinstance(batches, IndexedBatches) else {}
    used |= {"val": val.data} if val is not None else {}
    problems.check(sum(len(data.image_ids) for data in used.values()), recipe.data.max_problem_fraction)
    for name, data in used.items():
        say(f"{name}: {len(data.image_ids)} images, {len(data.text_ids)} texts")
    if len(problems):
        say(f"{len(problems)} items left out, listed in {folder / PROBLEMS}:\n{problems.summary(3)}")

    optimiser = build_optimiser(model, loss, recipe.optim)
    averages = config.ema_decay or config.swa_epochs
    average = WeightAverage(model, config.ema_decay or None) if averages else None
    modules = {"model": model, "loss": loss} | ({"average": average} if average else {})
    start, best = 0, _Best()
    if (folder / LAST).exists():
        state = load_state(folder / LAST, modules, optimiser)
        start, best = state["epoch"] + 1, _Best(state["best_score"], state["best_epoch"])
        say(f"resuming after epoch {start} of {config.epochs}" if start < config.epochs else "all epochs are done")
    if process_group.main:
        _forget_after(folder / LOG, start)
    if config.compile:
        model.image.encoder.compile()
        model.text.encoder.compile()

    for epoch in range(start, config.epochs):
        own = (process_group.rank,) if process_group.rank else ()
        torch.manual_seed(epoch_seed(config.seed, epoch, 0, *own))
        started = time.monotonic()
        model.train()
        freeze_for_epoch(model, epoch, recipe.optim)
        each_step = average if config.ema_decay else None
        line = {
            "epoch": epoch,
            **_train_epoch(recipe, epoch, model, loss, batches, optimiser, each_step, process_group),
        }
        process_group.average_buffers(model)
        if average is not None and epoch >= config.epochs - config.swa_epochs:
            average.update(model)
        last = epoch == config.epochs - 1
        if val is not None and (last or (epoch + 1) % config.evaluate_every == 0):
            with averaged(model, average):
                embedded = embed_split(model, val, process_group)
                evaluation, score = validate(embedded, val, loss.distance, config.select, process_group)
                line |= _summary(evaluation, score)
                # A mean of weights does not compete with single ones from before it.
                first_mean = epoch >= config.epochs - config.swa_epochs > best.epoch
                if score > best.score or first_mean or config.select == "last":
                    best = _Best(score, epoch)
                    if process_group.main:
                        about = {"epoch": epoch, "score": score}
                        save_state(folder / MODEL, {"model": model, "loss": loss}, None, about)
        line["seconds"] = time.monotonic() - started
        if process_group.main:
            problems.write(folder / PROBLEMS)
            _append_line(folder / LOG, line)
            about = {"epoch": epoch, "best_score": best.score, "best_epoch": best.epoch}
            save_state(folder / LAST, modules, optimiser, about)
        say(_one_line(line, config.epochs))
    if val is None:
        say(
            "no validation split: the last weights are kept, and match probabilities are not calibrated;"
            " if there are few images raise data.val_fraction; with shards give data.val_path"
        )
        with averaged(model, average):
            if process_group.main:
                save_state(folder / MODEL, {"model": model, "loss": loss}, None, {"epoch": config.epochs - 1})
    if val is not None or recipe.spread.epochs:
        process_group.wait()
        about = load_state(folder / MODEL, {"model": model, "loss": loss})
        process_group.wait()  # Before the first process writes it anew.
        if recipe.spread.epochs and not about.get("spread"):
            _fit_variances(recipe, model, batches, process_group)
            if process_group.main:
                save_state(folder / MODEL, {"model": model, "loss": loss}, None, about | {"spread": True})
    if val is not None:
        embedded = embed_split(model, val, process_group)
        if process_group.main:
            calibrate(embedded, val.data, loss, folder)
    process_group.wait()
    return {
        "run": str(folder),
        "epochs": config.epochs,
        "best_epoch": best.epoch,
        "best_score": best.score if val is not None else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "problems": len(problems),
        "seconds": round(sum(json.loads(line)["seconds"] for line in (folder / LOG).read_text().splitlines()), 1),
    }


def _train_epoch(
    recipe: Recipe,
    epoch: int,
    model: DualEncoder,
    loss: MatchLoss,
    batches: Batches,
    optimiser: torch.optim.Optimizer,
    average: WeightAverage | None,
    process_group: ProcessGroup,
) -> dict[str, Any]:
    """One pass over the data; the means of what was measured at its steps."""
    trained = [p for group in optimiser.param_groups for p in group["params"]]
    log = _EpochLog()
    with (
        progress_bar(f"epoch {epoch + 1}/{recipe.train.epochs}", len(batches)) as advance,
        closing(prefetch(batches.epoch(epoch))) as coming,
    ):
        for step, batch in enumerate(coming):
            progress = epoch + step / len(batches)
            set_learning_rate(optimiser, learning_rate_factor(progress, recipe.optim, epochs=recipe.train.epochs))
            optimiser.zero_grad(set_to_none=True)
            try:
                measured = forward_backward(
                    model,
                    loss,
                    batch,
                    process_group,
                    epoch=epoch,
                    low_precision=recipe.train.precision == "bfloat16",
                    micro_batch=recipe.train.micro_batch,
                )
            except DivergedError as error:
                raise DivergedError(f"epoch {epoch + 1}, step {step + 1}: {error}") from error
            norm = clip_gradients(trained, recipe.optim.clip_norm)
            if not math.isfinite(norm):
                raise DivergedError(
                    f"epoch {epoch + 1}, step {step + 1}: the gradient is {norm}; lower optim.lr or lengthen optim.warmup_epochs"
                )
            optimiser.step()
            if average is not None:
                average.update(model)
            log.add({**measured, "gradient_norm": norm})
            advance(1)
    logits = getattr(loss, "logits", None)
    learnt = (
        {}
        if logits is None
        else {"logit_scale": float(logits.logit_scale.detach()), "logit_bias": float(logits.logit_bias.detach())}
    )
    return {**log.means(), **learnt}


def _fit_variances(recipe: Recipe, model: DualEncoder, batches: Batches, process_group: ProcessGroup) -> None:
    """The second stage, the same on all processes: the log variances of either side learn the spread of its matches."""
    assert isinstance(batches, IndexedBatches)  # As the recipe was checked for.
    data, stores = batches.sampler.data, (batches.images, batches.texts)
    image, text = (tower.embed(store) for tower, store in zip((model.image, model.text), stores, strict=True))
    of_image, of_text = torch.from_numpy(data.pairs).T
    sides = {
        "images": (model.image, batches.images, text.mean, of_image, of_text),
        "texts": (model.text, batches.texts, image.mean, of_text, of_image),
    }
    for name, (tower, store, partners, item, partner) in sides.items():
        if recipe.spread.sides not in ("both", name):
            continue
        spread, count = match_dispersion(partners, item, partner, len(store), whiten=recipe.spread.whiten)
        if count.max() < 2:
            say(f"variances of {name} stay as they are: each has a single match, which has no spread")
            continue
        index = count.nonzero()[:, 0].numpy()
        rank = fit_variance_stage(tower, store, spread, index, recipe.spread, seed=recipe.train.seed)
        say(f"variances of {len(index)} {name} fitted to the spread of their matches: rank correlation {rank:.3f}")
    process_group.copy_from_main(model)


def _batches(
    recipe: Recipe, model: DualEncoder, splits: dict[str, PairData], problems: Problems, process_group: ProcessGroup
) -> Batches:
    """What the model is trained on, split "train" or a stream of shards."""
    augmentation = Augmentation(recipe, model, process_group)
    if recipe.data.source == "shards":
        stream = _stream(recipe, problems, process_group)
        return ShardBatches(stream, model, augmentation, process_group)
    if "train" not in splits:
        raise UserError(f"the data has no split 'train'; it has {', '.join(splits)}")
    train = prepare_split(model, splits["train"], problems, "train", process_group)
    sampler = PairSampler(
        train.data,
        recipe.train.batch_size,
        recipe.train.seed,
        epoch_over=recipe.data.epoch_over,
        positives=recipe.data.positives,
        kind_weights=recipe.data.kind_weights or None,
        grades=Grades(train.data) if recipe.data.graded else None,
    )
    return IndexedBatches(train.images, train.texts, sampler, augmentation, process_group)


def _with_noise(config: DataConfig, data: PairData, folder: Path, process_group: ProcessGroup) -> PairData:
    """The training pairs as noisy as the recipe says; which are, is kept in the run folder and read from there again."""
    if not (config.noise_rate or config.noise_file):
        return data
    path = folder / NOISE
    if process_group.main and not path.exists():
        if config.noise_file:
            image_of_pair = load_noise(config.noise_file, data)
        else:
            _, image_of_pair = shuffle_pairs(data, config.noise_rate, config.noise_seed)
        save_noise(path, image_of_pair)
    process_group.wait()
    return apply_noise(data, load_noise(path, data))


def validate(
    embedded: tuple[GaussianEmbedding, GaussianEmbedding],
    split: PreparedSplit,
    distance: Distance,
    select: str,
    process_group: ProcessGroup,
) -> tuple[Evaluation, float]:
    """Evaluate the embeddings of a split; the score by which the best epoch is chosen, as TrainConfig.select says.

    Raises:
        DivergedError: an embedding is NaN or infinite.
    """
    relevance = split.data.relevance()
    for side, embeddings in zip(("image", "text"), embedded, strict=True):
        try:
            check_finite(embeddings, f"validation, {side}s")
        except ValueError as error:
            raise DivergedError(f"{error}; lower optim.lr or lengthen optim.warmup_epochs") from error
    evaluation = evaluate_retrieval(
        *embedded, relevance, distance=distance.name, text_kinds=split.data.text_kinds, rank=process_group.rank_relevant
    )
    many = relevance.transpose().counts.max() > 1
    if select == "map@r" or (select == "auto" and many):
        return evaluation, (evaluation.i2t["map@r"] + evaluation.t2i["map@r"]) / 2
    return evaluation, evaluation.rsum


def calibrate(
    embedded: tuple[GaussianEmbedding, GaussianEmbedding], data: PairData, loss: MatchLoss, folder: Path
) -> None:
    """Calibrate on the embeddings of the validation split, and write calibration.json into the run folder."""
    try:
        calibration = calibrate_split(embedded, data, loss.distance.name, split="val", learnt=learnt_logits(loss))
    except ValueError as error:
        say(f"match probabilities are not calibrated: {error}")
        return
    calibration.save(folder / CALIBRATION)


def _claim(folder: Path, recipe: Recipe) -> None:
    """Check that the folder is ours to train in, and put the recipe there.

    Before the first checkpoint nothing is worth keeping, so that a run that failed for a wrong path can be started again.
    """
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)  # A writer that was killed.
    started = (folder / LAST).exists() or (folder / MODEL).exists()
    if not (folder / RECIPE).exists():
        if any(path.name != _LOCK for path in folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no run; give an empty or new folder with --out")
    elif started:
        if load_recipe(folder / RECIPE) != recipe:
            raise UserError(
                f"{folder} holds a run of another recipe (see {folder / RECIPE}); give another folder with --out, or delete that one"
            )
        return
    for name in (TOKENIZER, ENCODERS, NOISE):
        (folder / name).unlink(missing_ok=True)
    save_recipe(recipe, folder / RECIPE)


def _model(recipe: Recipe, folder: Path, splits: dict[str, PairData], process_group: ProcessGroup) -> DualEncoder:
    """A new model, equal on all processes, what it needs beside its weights put into the run folder; or that of a run before.

    The weights of the latter are still to be loaded.
    """
    if (folder / LAST).exists():
        return build_model(recipe.model, load_assets(folder, recipe), recipe.augment).to(process_group.device)
    if process_group.main:
        tokenizer = fresh_tokenizer(recipe.model, _training_texts(recipe, splits))
        model = build_model(recipe.model, Assets(tokenizer), recipe.augment)
        save_assets(folder, tokenizer, model)
    process_group.wait()
    if not process_group.main:
        model = build_model(recipe.model, load_assets(folder, recipe), recipe.augment)
    model = model.to(process_group.device)
    process_group.copy_from_main(model)
    return model


def _training_texts(recipe: Recipe, splits: dict[str, PairData]) -> Iterator[str]:
    """All of them, or as many of a stream as a vocabulary needs."""
    if recipe.data.source != "shards":
        yield from splits["train"].texts if "train" in splits else ()
        return
    stream = _stream(recipe, Problems(), alone())
    with closing(stream.samples(0)) as samples:
        yield from (s.text for s in itertools.islice(samples, min(_VOCABULARY_TEXTS, stream.samples_per_epoch)))


def _stream(recipe: Recipe, problems: Problems, process_group: ProcessGroup) -> ShardStream:
    paths = expand_shards(recipe.data.path)
    try:
        return ShardStream(
            paths,
            batch_size=max(1, recipe.train.batch_size // process_group.size),
            seed=recipe.train.seed,
            samples_per_epoch=recipe.data.samples_per_epoch,
            rank=process_group.rank,
            n_processes=process_group.size,
            shuffle_buffer=recipe.data.shuffle_buffer,
            problems=problems,
            max_problem_fraction=recipe.data.max_problem_fraction,
        )
    except ValueError as error:
        raise UserError(
            f"data.samples_per_epoch={recipe.data.samples_per_epoch}, train.batch_size={recipe.train.batch_size}: {error}"
        ) from error


def _summary(evaluation: Evaluation, score: float) -> dict[str, float]:
    directions = {"i2t": evaluation.i2t, "t2i": evaluation.t2i}
    return {f"val/{d}/{name}": value for d, metrics in directions.items() for name, value in metrics.items()} | {
        "val/rsum": evaluation.rsum,
        "val/score": score,
    }


def _one_line(line: dict[str, Any], epochs: int) -> str:
    text = f"epoch {line['epoch'] + 1}/{epochs}  loss {line['loss']:.4f}"
    if "val/score" in line:
        text += f"  val recall@1 i2t {line['val/i2t/recall@1']:.1%} t2i {line['val/t2i/recall@1']:.1%}  score {line['val/score']:.4f}"
    return text


def _append_line(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _forget_after(path: Path, epoch: int) -> None:
    """Drop log lines of epochs that will be run again, and a last line that was cut short."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    write_atomically(path, "".join(line for line in whole if json.loads(line)["epoch"] < epoch))
