"""The training loop: one readable function, resumable to the bit.

Everything random in an epoch follows from (seed, epoch), so that the state after an epoch is all that resuming needs.
"""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch

from sfumato.data.pairs import PairData, PairSampler
from sfumato.data.problems import Problems
from sfumato.data.transforms import augment
from sfumato.distances import Distance
from sfumato.encoders.dual import DualEncoder, Item
from sfumato.encoders.features import Inputs, Store
from sfumato.encoders.small import train_tokenizer
from sfumato.errors import UserError
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.files import write_atomically, write_json
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.losses import LossOutput, MatchLoss
from sfumato.matching import fit_logits, match_probability
from sfumato.metrics.calibration import expected_calibration_error
from sfumato.progress import progress_bar, say
from sfumato.search.ranking import distance_blocks
from sfumato.training.average import WeightAverage, averaged
from sfumato.training.build import build_loss, build_model, choose_device, load_splits
from sfumato.training.checkpoint import load_state, save_state
from sfumato.training.config import Recipe, SmallImageConfig, SmallTextConfig, load_recipe, save_recipe
from sfumato.training.optim import build_optimiser, clip_gradients, learning_rate_factor, set_learning_rate
from sfumato.training.run import CALIBRATION, LAST, LOG, MODEL, PROBLEMS, RECIPE, TOKENIZER, Run, load_tokenizer

_LOCK = ".lock"
_CALIBRATION_PAIRS = 4_000_000


class DivergedError(ArithmeticError):
    """A term of the loss or the gradient is NaN or infinite; the message says which, and when."""


@dataclass(frozen=True)
class PreparedSplit:
    """A split whose images and texts are ready to be fed to the towers.

    Attributes:
        data: the usable items.
        images, texts: their inputs, in the same order.
    """

    data: PairData
    images: Store
    texts: Store


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

    Args:
        recipe: the complete recipe.
        folder: the run's; made if missing. A run of another recipe in it is refused.

    Returns:
        {"run", "epochs", "best_epoch", "best_score", "parameters", "problems", "seconds"}; seconds are those of all epochs.

    Raises:
        UserError: the folder holds a run of another recipe, or the data cannot be used.
        DivergedError: a term of the loss is NaN or infinite.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / _LOCK, timeout=0):
            return _fit(recipe, folder)
    except filelock.Timeout as error:
        raise UserError(
            f"another process is training in {folder}; wait for it, or give another folder with --out"
        ) from error


def _fit(recipe: Recipe, folder: Path) -> dict[str, Any]:
    _claim(folder, recipe)
    device = choose_device(recipe.train.device)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    problems = Problems()
    splits = load_splits(recipe.data, problems)
    if "train" not in splits:
        raise UserError(f"the data has no split 'train'; it has {', '.join(splits)}")
    torch.manual_seed(recipe.train.seed)
    model = _fresh_model(recipe, folder, splits["train"]).to(device)
    loss = build_loss(recipe).to(device)
    train = prepare_split(model, splits["train"], problems, "train")
    val = prepare_split(model, splits["val"], problems, "val") if "val" in splits else None
    problems.write(folder / PROBLEMS)
    used = [split.data for split in (train, val) if split is not None]
    problems.check(sum(len(data.image_ids) for data in used), recipe.data.max_problem_share)

    config = recipe.train
    sampler = PairSampler(
        train.data,
        config.batch_size,
        config.seed,
        epoch_over=recipe.data.epoch_over,
        positives=recipe.data.positives,
        kind_weights=recipe.data.kind_weights or None,
    )
    optimiser = build_optimiser(model, loss, recipe.optim)
    average = WeightAverage(model, config.ema_decay) if config.ema_decay else None
    modules = {"model": model, "loss": loss} | ({"average": average} if average else {})
    start, best = 0, _Best()
    if (folder / LAST).exists():
        state = load_state(folder / LAST, modules, optimiser)
        start, best = state["epoch"] + 1, _Best(state["best_score"], state["best_epoch"])
        say(f"resuming after epoch {start} of {config.epochs}")
    _forget_after(folder / LOG, start)

    for epoch in range(start, config.epochs):
        torch.manual_seed(_epoch_seed(config.seed, epoch))
        started = time.monotonic()
        line = {"epoch": epoch, **_train_epoch(recipe, epoch, model, loss, train, sampler, optimiser, average, device)}
        last = epoch == config.epochs - 1
        if val is not None and (last or (epoch + 1) % config.evaluate_every == 0):
            with averaged(model, average):
                evaluation, score = validate(model, val, loss.distance, config.select)
                line |= _summary(evaluation, score)
                if score > best.score:
                    best = _Best(score, epoch)
                    save_state(folder / MODEL, {"model": model, "loss": loss}, None, {"epoch": epoch, "score": score})
        line["seconds"] = time.monotonic() - started
        _append_line(folder / LOG, line)
        save_state(
            folder / LAST, modules, optimiser, {"epoch": epoch, "best_score": best.score, "best_epoch": best.epoch}
        )
        say(_one_line(line, config.epochs))
    if val is None:
        say("no validation split: the last weights are kept, and match probabilities are not calibrated")
        with averaged(model, average):
            save_state(folder / MODEL, {"model": model, "loss": loss}, None, {"epoch": config.epochs - 1})
    else:
        load_state(folder / MODEL, {"model": model, "loss": loss})
        calibrate(model, val, loss, folder)
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
    split: PreparedSplit,
    sampler: PairSampler,
    optimiser: torch.optim.Optimizer,
    average: WeightAverage | None,
    device: torch.device,
) -> dict[str, Any]:
    """One pass over the data; the means of what was measured at its steps."""
    model.train()
    trained = [p for group in optimiser.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(_epoch_seed(recipe.train.seed, epoch, 1))
    augmented = isinstance(recipe.model.image, SmallImageConfig) and recipe.model.image.augment
    low = recipe.train.precision == "bfloat16"
    log = _EpochLog()
    with progress_bar(f"epoch {epoch + 1}/{recipe.train.epochs}", len(sampler)) as advance:
        for step, batch in enumerate(sampler.batches(epoch)):
            set_learning_rate(
                optimiser, learning_rate_factor(epoch + step / len(sampler), recipe.optim, epochs=recipe.train.epochs)
            )
            images, texts = split.images.batch(batch.image_index), split.texts.batch(batch.text_index)
            if augmented:
                images = Inputs(augment(images.values, generator=generator))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
                image, text = model(images.to(device), texts.to(device))
            output = loss(image, text, torch.from_numpy(batch.match).to(device), epoch=epoch)
            _check_terms(output, epoch, step)
            optimiser.zero_grad(set_to_none=True)
            output.total.backward()
            norm = clip_gradients(trained, recipe.optim.clip_norm)
            if not math.isfinite(norm):
                raise DivergedError(
                    f"epoch {epoch + 1}, step {step + 1}: the gradient is {norm}; lower optim.lr or lengthen optim.warmup_epochs"
                )
            optimiser.step()
            if average is not None:
                average.update(model)
            log.add(_measured(output, image, text, batch.match, norm))
            advance(1)
    logits = getattr(loss, "logits", None)
    learnt = (
        {}
        if logits is None
        else {"logit_scale": float(logits.logit_scale.detach()), "logit_bias": float(logits.logit_bias.detach())}
    )
    return {**log.means(), **learnt}


def prepare_split(model: DualEncoder, data: PairData, problems: Problems, name: str) -> PreparedSplit:
    """Read every image and text of a split for the model's towers; items that cannot be used are left out and reported."""
    items: list[Item] = [source.read_bytes for source in data.images]
    with progress_bar(f"reading {name} images", len(items)) as advance:
        images, kept = model.image.reader.read(
            items, progress=advance, on_error=lambda i, error: problems.add(data.images[i].place, str(error))
        )
    if len(kept) < len(items):
        data = data.keep_images(kept)
    if not len(data.image_ids) or not len(data.text_ids):
        raise UserError(f"split {name!r} has no usable pair left: {problems.summary()}")
    texts, _ = model.text.reader.read([_text(t) for t in data.texts])
    return PreparedSplit(data, images, texts)


def load_split(run: Run, name: str, problems: Problems | None = None) -> PreparedSplit:
    """A split of the data that a run was made on, ready for its model; problems are noted, and told on standard error.

    Raises:
        UserError: the data has no such split.
    """
    problems = Problems() if problems is None else problems
    splits = load_splits(run.recipe.data, problems)
    if name not in splits:
        raise UserError(f"the data of {run.folder} has no split {name!r}; it has {', '.join(splits)}")
    prepared = prepare_split(run.model, splits[name], problems, name)
    if len(problems):
        say(f"{len(problems)} items left out:\n{problems.summary()}")
    return prepared


def embed_split(model: DualEncoder, split: PreparedSplit) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    """Embeddings of the images and of the texts of a split."""
    return model.image.embed(split.images), model.text.embed(split.texts)


def validate(model: DualEncoder, split: PreparedSplit, distance: Distance, select: str) -> tuple[Evaluation, float]:
    """Evaluate a split; the score by which the best epoch is chosen, as TrainConfig.select says.

    Raises:
        DivergedError: an embedding is NaN or infinite.
    """
    relevance = split.data.relevance()
    embedded = embed_split(model, split)
    for side, embeddings in zip(("image", "text"), embedded, strict=True):
        try:
            check_finite(embeddings, f"validation, {side}s")
        except ValueError as error:
            raise DivergedError(f"{error}; lower optim.lr or lengthen optim.warmup_epochs") from error
    evaluation = evaluate_retrieval(*embedded, relevance, distance=distance.name, text_kinds=split.data.text_kinds)
    many = relevance.transpose().counts.max() > 1
    if select == "map@r" or (select == "auto" and many):
        return evaluation, (evaluation.i2t["map@r"] + evaluation.t2i["map@r"]) / 2
    return evaluation, evaluation.rsum


def calibrate(model: DualEncoder, split: PreparedSplit, loss: MatchLoss, folder: Path) -> None:
    """Fit match logits on the pairs of a held-out split and write them, with how well they fit, into the run folder.

    Of a large split as many images are taken, at random, as give _CALIBRATION_PAIRS pairs with all its texts.
    """
    images, texts = embed_split(model, split)
    most = max(1, _CALIBRATION_PAIRS // texts.n)
    chosen = np.sort(np.random.default_rng(0).permutation(images.n)[:most])
    blocks = distance_blocks(images[torch.from_numpy(chosen)], texts, loss.distance.name)
    distance = torch.cat([block for _, block in blocks])
    match = torch.from_numpy(split.data.match(chosen, np.arange(texts.n)))
    try:
        scale, bias = fit_logits(distance, match)
    except ValueError as error:
        say(f"match probabilities are not calibrated: {error}")
        return
    probability = match_probability(distance, scale, bias)
    write_json(
        folder / CALIBRATION,
        {
            "logit_scale": scale,
            "logit_bias": bias,
            "split": "val",
            "pairs": match.numel(),
            "share_of_matches": float(match.mean()),
            "expected_calibration_error": float(expected_calibration_error(probability.flatten(), match.flatten())),
        },
    )


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
    (folder / TOKENIZER).unlink(missing_ok=True)
    save_recipe(recipe, folder / RECIPE)


def _fresh_model(recipe: Recipe, folder: Path, train: PairData) -> DualEncoder:
    if isinstance(recipe.model.text, SmallTextConfig) and not (folder / TOKENIZER).exists():
        tokenizer = train_tokenizer(train.texts, recipe.model.text.vocabulary)
        write_atomically(folder / TOKENIZER, tokenizer.to_str(pretty=False))
    return build_model(recipe.model, load_tokenizer(folder, recipe))


def _check_terms(output: LossOutput, epoch: int, step: int) -> None:
    for name, term in output.terms.items():
        if not torch.isfinite(term):
            raise DivergedError(
                f"epoch {epoch + 1}, step {step + 1}: the loss term {name!r} is {float(term.detach())};"
                " lower optim.lr, lengthen optim.warmup_epochs, or lower model.init_total_variance"
            )


def _measured(
    output: LossOutput, image: GaussianEmbedding, text: GaussianEmbedding, match: np.ndarray, norm: float
) -> dict[str, float]:
    return {
        "loss": float(output.total.detach()),
        **{f"loss/{name}": float(term.detach()) for name, term in output.terms.items()},
        **{name: float(value) for name, value in output.stats.items()},
        "positives_per_row": float(match.sum() / len(match)),
        "total_variance/image": float(image.total_variance.detach().mean()),
        "total_variance/text": float(text.total_variance.detach().mean()),
        "gradient_norm": norm,
    }


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


def _epoch_seed(seed: int, epoch: int, stream: int = 0) -> int:
    return int(np.random.SeedSequence([seed, epoch, stream]).generate_state(1, np.uint64)[0] >> 1)


def _text(value: str) -> Item:
    return lambda: value
