"""The second stage of training: log variances learn the dispersion of an item's matches; the rest is frozen."""

import math

import numpy as np
import torch
from torch import Tensor

from sfumato.encoders.dual import Tower
from sfumato.encoders.features import Store
from sfumato.losses import dispersion_loss
from sfumato.metrics.uncertainty import spearman
from sfumato.models.recipe_sections import VarianceStageConfig
from sfumato.progress import progress_bar
from sfumato.training.optim import clip_gradients

_LARGEST_GRADIENT = 2.0


def fit_variance_stage(
    tower: Tower, store: Store, dispersion: Tensor, index: np.ndarray, config: VarianceStageConfig, *, seed: int
) -> float:
    """Fit a tower's log variances to the dispersions of items; its means do not change by a bit.

    Args:
        tower: a tower with variances; its training mode is restored afterwards.
        store: its training inputs.
        dispersion: (n,) of all items, >= 0, in squared units of the means.
        index: (k,) positions of the items to learn from.
        config: section ``spread`` of the recipe.
        seed: of the order of the items.

    Returns:
        Rank correlation of total variance with dispersion over the k items; NaN if all are equal.

    Raises:
        ValueError: the tower has no variances.
    """
    branches = [tower.head.log_var, tower.head.log_var_local, tower.head.log_var_norm]
    learnt = [p for branch in branches if branch is not None for p in branch.parameters()]
    if not learnt:
        raise ValueError(
            "fit_variance_stage: the tower has no log variance to fit; build the model with model.variance=true"
        )
    training, device = tower.training, next(tower.parameters()).device
    tower.eval()  # No dropout and no running statistics: only log variances change.
    random = np.random.default_rng([seed, len(index)])
    optimiser = torch.optim.Adam(learnt, lr=config.lr)
    batches = math.ceil(len(index) / config.batch_size)
    steps = config.epochs * batches
    with progress_bar("fitting variances", steps) as advance:
        for step in range(steps):
            if step % batches == 0:
                order = random.permutation(index)
            chosen = order[step % batches :: batches]
            for group in optimiser.param_groups:
                group["lr"] = config.lr * min(1.0, (step + 1) / batches) * (1 + math.cos(math.pi * step / steps)) / 2
            with torch.no_grad():
                tokens = tower.encoder(store.batch(chosen).to(device)).float()
            loss = dispersion_loss(
                tower.head.log_variance(tokens), dispersion[torch.from_numpy(chosen)].to(device), floor=config.floor
            )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            clip_gradients(learnt, _LARGEST_GRADIENT)
            optimiser.step()
            advance(1)
    optimiser.zero_grad(set_to_none=True)
    tower.train(training)
    total_variance = tower.embed(store, index).total_variance
    return spearman(total_variance.numpy(), dispersion[torch.from_numpy(index)].numpy())
