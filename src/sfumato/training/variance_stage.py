"""The variance stage: after training, the total variance of an item learns what a teacher says of it.

Under csd a total variance acts as the prior of a match and can mean nothing else (docs/concepts/uncertainty.md). So the
stage is for models that rank by means, and changes variances alone. What is costly to compute for a query, because it
looks at a gallery, thereby becomes one number of the query itself, also for queries that the training never saw.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.calibration.platt import fit_logits
from sfumato.data.pairs import PairData
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.encoder_protocol import Store
from sfumato.errors import UserError
from sfumato.evaluation.estimators import ESTIMATORS, Matching, estimate_uncertainty
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.ids import Direction
from sfumato.metrics.bootstrap import spearman
from sfumato.metrics.relevance import Relevance
from sfumato.models.sections import VarianceStageConfig
from sfumato.progress import progress_bar, say
from sfumato.search.exact import distance_blocks
from sfumato.training.step import clip_gradients


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
    if partners.ndim != 2 or item.shape != partner.shape or item.ndim != 1:
        raise ValueError(
            f"match_dispersion: partners must be (n, d), item and partner (p,); got {tuple(partners.shape)},"
            f" {tuple(item.shape)} and {tuple(partner.shape)}"
        )
    if shrinkage < 0:
        raise ValueError(f"match_dispersion: shrinkage must not be negative, got {shrinkage}")
    w = partners.detach().to(accumulation_dtype(partners.dtype))
    if whiten:
        w = w - w.mean(0)
        value, vector = torch.linalg.eigh(w.T @ w / len(w))
        value = value.clamp(min=0) + shrinkage * value.clamp(min=0).mean()
        w = w @ vector / value.clamp(min=torch.finfo(w.dtype).tiny).sqrt()
    w = functional.normalize(w, dim=1)
    count = torch.bincount(item, minlength=n_items)
    centre = w.new_zeros(n_items, w.shape[1]).index_add_(0, item, w[partner]) / count.clamp(min=1)[:, None]
    dispersion = (1 - centre.square().sum(1)).clamp(min=0)
    return torch.where(count > 0, dispersion, 0), count


def dispersion_loss(log_var: Tensor, dispersion: Tensor, *, floor: float = 0.02) -> Tensor:
    r"""A proper scoring rule of the total variance, minimal if every log_var is log((dispersion + floor) / d).

        mean over items and dimensions of [ (dispersion + floor) / (d var) + log_var ] / 2

    Apart from a constant it is the negative log-likelihood of an item's matches under a Gaussian around their own
    centre with the same variance in every dimension.

    log_var (n, d), dispersion (n,).
    """
    if log_var.ndim != 2 or dispersion.shape != log_var.shape[:1]:
        raise ValueError(
            "dispersion_loss: log_var must be (n, d) and dispersion (n,), got"
            f" {tuple(log_var.shape)} and {tuple(dispersion.shape)}"
        )
    if not floor > 0:
        raise ValueError(
            f"dispersion_loss: floor must be positive, got {floor}; the best variance of a single match would be 0"
        )
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
    image, text = (tower.embed(store) for tower, store in zip((model.image, model.text), stores, strict=True))
    relevance = data.relevance()
    sides: dict[str, tuple[Tower, Store, GaussianEmbedding, GaussianEmbedding, Relevance, Direction]] = {
        "images": (model.image, stores[0], image, text, relevance, "i2t"),
        "texts": (model.text, stores[1], text, image, relevance.transpose(), "t2i"),
    }
    for name, (tower, store, items, partners, matches, direction) in sides.items():
        taught = teacher_values(config, items, partners, matches, direction, logits=logits, seed=seed)
        index = np.flatnonzero(matches.counts > 0)
        if float(taught[index].max() - taught[index].min()) < _SAME:
            say(f"variances of {name} stay as they are: {config.teacher} is the same for all, as with a single match")
            continue
        rank = fit_variance_stage(tower, store, taught, index, config, seed=seed)
        say(f"variances of {len(index)} {name} fitted to {config.teacher}: rank correlation {rank:.3f}")


def teacher_values(
    config: VarianceStageConfig,
    items: GaussianEmbedding,
    partners: GaussianEmbedding,
    matches: Relevance,
    direction: Direction,
    *,
    logits: tuple[float, float] | None = None,
    seed: int = 0,
) -> Tensor:
    """What the teacher says of every item, as a total variance in [0, 1].

    The dispersion is what it is. Of the number of listed or expected matches it is the logarithm. All others than the
    dispersion are scaled so that 0 and 1 are their quantiles .01 and .99, and cut there.

    items (n, d), partners (m, d) -> (n,).
    """
    if config.teacher == "dispersion":
        item, partner = (torch.from_numpy(index) for index in (matches.query_of_item, matches.indices))
        return match_dispersion(partners.mean, item, partner, items.n)[0]
    if config.teacher == "listed_matches":
        values = np.log(np.maximum(matches.counts, 1))
    else:
        values = _estimated(config, items, partners, matches, direction, logits, seed)
    low, high = np.quantile(values[matches.counts > 0], (0.01, 0.99))
    scaled = (values - low) / (high - low) if high > low else np.zeros(len(values))
    return torch.from_numpy(np.clip(scaled, 0, 1)).float()


def _estimated(
    config: VarianceStageConfig,
    items: GaussianEmbedding,
    partners: GaussianEmbedding,
    matches: Relevance,
    direction: Direction,
    logits: tuple[float, float] | None,
    seed: int,
) -> np.ndarray:
    """(n,) values of the estimator, over a random gallery of partners."""
    estimator = ESTIMATORS.get(config.teacher)
    if estimator is None or not estimator.needs_gallery or estimator.needs_variance:
        known = [name for name, e in ESTIMATORS.items() if e.needs_gallery and not e.needs_variance]
        raise UserError(
            f"unknown variance_stage.teacher {config.teacher!r}; known: dispersion, listed_matches, {', '.join(known)}"
        )
    random = np.random.default_rng([seed, items.n])
    chosen = np.sort(random.permutation(partners.n)[:_N_GALLERY])
    gallery, known_matches = partners[torch.from_numpy(chosen)], matches.select_gallery(chosen)
    calibrating = np.sort(random.permutation(items.n)[:_N_CALIBRATING])
    try:
        scale, bias = logits or _logits(items, gallery, known_matches, calibrating, direction)
        values = estimate_uncertainty(
            items,
            gallery,
            Matching("squared_l2", scale, bias, direction),
            estimators={estimator.name: estimator},
            seed=seed,
        )[estimator.name]
    except ValueError as error:
        raise UserError(f"variance_stage.teacher={config.teacher!r} cannot be computed: {error}") from error
    return np.log(np.maximum(values, 1e-9)) if config.teacher == "expected_matches" else values


def _logits(
    items: GaussianEmbedding, gallery: GaussianEmbedding, matches: Relevance, chosen: np.ndarray, direction: Direction
) -> tuple[float, float]:
    """Match logits of the pairs of some items with the gallery."""
    distance = Matching("squared_l2", direction=direction).oriented_distance
    found = torch.cat([block for _, block in distance_blocks(items[torch.from_numpy(chosen)], gallery, distance)])
    return fit_logits(found, torch.from_numpy(matches.select_queries(chosen).to_dense()))


def fit_variance_stage(
    tower: Tower, store: Store, taught: Tensor, index: np.ndarray, config: VarianceStageConfig, *, seed: int
) -> float:
    """Fit a tower's log variances to given total variances of items; its means do not change by a bit.

    taught (n,), index (k,).
    """
    head = tower.head
    branches = [head.log_var, head.log_var_hidden, head.log_var_local, head.log_var_norm]
    learnt = [p for branch in branches if branch is not None for p in branch.parameters()]
    if not learnt:
        raise ValueError(
            "fit_variance_stage: the tower has no log variance to fit; build the model with model.variance=true"
        )
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
            loss = dispersion_loss(head.log_variance(tokens), wanted, floor=config.floor)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            clip_gradients(learnt, _LARGEST_GRADIENT)
            optimiser.step()
            advance(1)
    optimiser.zero_grad(set_to_none=True)
    tower.train(training)
    total_variance = tower.embed(store, index).total_variance
    return spearman(total_variance.numpy(), taught[torch.from_numpy(index)].numpy())
