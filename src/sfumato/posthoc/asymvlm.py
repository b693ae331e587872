"""AsymVLM: texts as distributions on the unit sphere, images as points.

A network on text embeddings gives a concentration kappa, and as published also a new direction. A text matches an image
by the likelihood of the image. Images have no uncertainty.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding
from sfumato.posthoc.adapter_method import LossOfRows, MLPMethod
from sfumato.posthoc.adapter_networks import (
    AdapterTraining,
    PairBatches,
    checked_items,
    mlp,
    scaled_inputs,
    start_at,
)
from sfumato.posthoc.method import FrozenPairs, Side, check_embeddings, check_side, unit
from sfumato.posthoc.spherical import Distribution, check_distribution, log_likelihoods, mean_length

KAPPA_FLOOR = 1e-3
"""Smallest concentration: a network output of exactly 0 has no direction."""

_FIRST_LOG_KAPPA = 4.6  # kappa 100, the factor of the cosine in CLIP's logits


def asymvlm_loss(log_likelihood: Tensor, match: Tensor, temperature: Tensor | float) -> Tensor:
    """Mean of the cross-entropies of rows and of columns of temperature * log likelihood.

    log_likelihood (n, m), match (n, m).
    """
    logits, losses = temperature * log_likelihood, []
    for z, labels in ((logits, match), (logits.T, match.T)):
        target = labels / labels.sum(1, keepdim=True).clamp_min(1)
        losses.append(-(target * z.log_softmax(1)).sum(1).mean())
    return (losses[0] + losses[1]) / 2


class AsymVLM(MLPMethod):
    r"""Concentrations of texts.

    With ``keep_mean`` the network learns kappa alone, and a text is the Gaussian about its unit embedding with total
    variance 1 - R^2, that of the distribution about its own mean; R is its mean length. Ranking stays that of the
    frozen model. Without it, as published, the direction mu is learnt again: a text is mean = R mu with the same
    variance, csd to a unit image is E ||X - x||^2 = 2 - 2 R mu . x exactly, and retrieval differs from that of the
    frozen model. Images are points in both.

    Paper: Ju et al., "Exploiting the asymmetric uncertainty structure of pre-trained VLMs on the unit hypersphere",
    2025.
    """

    name = "asymvlm"
    summary = "1 / kappa of a text, the inverse concentration on the sphere; images have none"
    sides = ("text",)
    published: ClassVar[AdapterTraining] = AdapterTraining((1024, 1024, 1024), 200, 2048, 1e-2, "sgd", 5e-4)

    def __init__(self, network: nn.Sequential, *, distribution: Distribution = "vmf", keep_mean: bool = True) -> None:
        check_distribution(distribution)
        super().__init__((network,))
        self.keep_mean = keep_mean
        self.distribution: Distribution = distribution

    @property
    def options(self) -> dict[str, Any]:
        """See :attr:`AdapterMethod.options`."""
        return {"distribution": self.distribution, "keep_mean": self.keep_mean}

    @classmethod
    def fit(
        cls,
        pairs: FrozenPairs,
        *,
        seed: int = 0,
        distribution: Distribution = "vmf",
        keep_mean: bool = True,
        training: AdapterTraining | None = None,
    ) -> Self:
        """Train the text network on the pairs."""
        training = training or cls.default
        check_distribution(distribution)
        images, texts = unit(pairs.images).float(), scaled_inputs(pairs.texts).float()
        temperature = nn.Parameter(torch.ones((), device=texts.device))

        def start(side: Side, network: nn.Sequential) -> None:
            if keep_mean:
                start_at(network, _FIRST_LOG_KAPPA)

        def loss(method: Self, batches: PairBatches) -> LossOfRows:
            def loss_of_rows(rows: Tensor) -> Tensor:
                i, t, match = batches.items(rows)
                direction, kappa = method._concentration(texts[t])
                return asymvlm_loss(log_likelihoods(images[i], direction, kappa, distribution), match, temperature)

            return loss_of_rows

        return cls._trained(
            pairs,
            lambda: mlp(pairs.d, training.widths, 1 if keep_mean else pairs.d),
            start,
            loss,
            options={"distribution": distribution, "keep_mean": keep_mean},
            seed=seed,
            training=training,
            parameters=[temperature],
        )

    def _concentration(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """((n, d) directions, (n,) concentrations) of scaled text embeddings."""
        out = self.network("text")(scaled)
        if self.keep_mean:
            return functional.normalize(scaled, dim=1), out.squeeze(1).exp().clamp_min(KAPPA_FLOOR)
        return direction_and_kappa(out)

    @torch.no_grad()
    def concentration(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The distributions of texts. x (n, d)."""
        return self._concentration(scaled_inputs(checked_items(self.name, "text", x, self.network("text"))))

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed` and the class; variances in squared units of unit embeddings."""
        check_side(side)
        if side == "image":
            check_embeddings(x, self.name, "image embeddings")
            return GaussianEmbedding.point(unit(x))
        direction, kappa = self.concentration(x)
        length = mean_length(kappa, x.shape[1], self.distribution).double().unsqueeze(1)
        log_var = ((1 - length.square()) / x.shape[1]).log().expand_as(direction)
        mean = unit(x).to(direction.dtype) if self.keep_mean else length.to(direction.dtype) * direction
        return GaussianEmbedding(mean, log_var.to(direction.dtype))

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; 1 / kappa of texts."""
        check_side(side)
        if side == "image":
            raise ValueError("asymvlm: images are points and have no uncertainty; ask for texts")
        return self.concentration(queries)[1].reciprocal()


def direction_and_kappa(eta: Tensor) -> tuple[Tensor, Tensor]:
    """Split eta = kappa mu. eta (n, d)."""
    kappa = eta.norm(dim=1).clamp_min(KAPPA_FLOOR)
    return functional.normalize(eta, dim=1), kappa
