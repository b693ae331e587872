"""AsymVLM: texts as distributions on the unit sphere, images as points.

A network on text embeddings gives a concentration kappa, and as published also a new direction. A text matches an image
by the likelihood of the image. Images have no uncertainty.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding
from sfumato.posthoc.adapter_networks import (
    MIN_PAIRS,
    AdapterTraining,
    PairBatches,
    checked_items,
    initialise,
    mlp,
    mlp_of,
    network_state,
    own_randomness,
    scaled_inputs,
    start_at,
    train,
    weights_of,
)
from sfumato.posthoc.method import (
    FrozenPairs,
    PosthocMethod,
    Side,
    check_embeddings,
    check_side,
    pack_options,
    unit,
    unpack_options,
)
from sfumato.posthoc.spherical import Distribution, check_distribution, log_likelihoods, mean_length

KAPPA_FLOOR = 1e-3
"""Smallest concentration: a network output of exactly 0 has no direction."""

_FIRST_LOG_KAPPA = 4.6  # kappa 100, the factor of the cosine in CLIP's logits


def asymvlm_loss(log_likelihood: Tensor, match: Tensor, temperature: Tensor | float) -> Tensor:
    """Mean of the cross-entropies of rows and of columns of temperature * log likelihood.

    Args:
        log_likelihood: (n, m), rows are images.
        match: (n, m) 1 for a match, else 0; several matches share a row's or column's target equally.
        temperature: factor of the log likelihoods.

    Returns:
        () loss in nats.
    """
    logits, losses = temperature * log_likelihood, []
    for z, labels in ((logits, match), (logits.T, match.T)):
        target = labels / labels.sum(1, keepdim=True).clamp_min(1)
        losses.append(-(target * z.log_softmax(1)).sum(1).mean())
    return (losses[0] + losses[1]) / 2


class AsymVLM(PosthocMethod):
    r"""Concentrations of texts.

    With ``keep_mean`` the network learns kappa alone, and a text is the Gaussian about its unit embedding with total
    variance 1 - R^2, that of the distribution about its own mean; R is its mean length. Ranking stays that of the
    frozen model. Without it, as published, the direction mu is learnt again: a text is mean = R mu with the same
    variance, csd to a unit image is E ||X - x||^2 = 2 - 2 R mu . x exactly, and retrieval differs from that of the
    frozen model. Images are points in both.

    Args:
        network: from scaled text embeddings to log kappa (n, 1), or without keep_mean to eta = kappa mu (n, d).
        distribution: see :data:`~sfumato.posthoc.spherical.Distribution`.
        keep_mean: whether the direction is the frozen one.

    Paper: Ju et al., "Exploiting the asymmetric uncertainty structure of pre-trained VLMs on the unit hypersphere",
    2025.
    """

    name = "asymvlm"
    summary = "1 / kappa of a text, the inverse concentration on the sphere; images have none"
    per_item = True
    sides = ("text",)
    default: ClassVar[AdapterTraining] = AdapterTraining()
    published: ClassVar[AdapterTraining] = AdapterTraining((1024, 1024, 1024), 200, 2048, 1e-2, "sgd", 5e-4)

    def __init__(self, network: nn.Module, *, distribution: Distribution = "vmf", keep_mean: bool = True) -> None:
        check_distribution(distribution)
        self.network, self.keep_mean = network.eval(), keep_mean
        self.distribution: Distribution = distribution

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
        """Train the text network on the pairs.

        Args:
            pairs: at least 32.
            seed: of the initial weights and the order of the pairs.
            distribution: see :data:`~sfumato.posthoc.spherical.Distribution`.
            keep_mean: False learns the direction too, as published.
            training: ``cls.default`` if None; ``cls.published`` is the paper's, and takes hours on a CPU.

        Returns:
            The fitted method.
        """
        training = training or cls.default
        check_distribution(distribution)
        batches = PairBatches(pairs.at_least(MIN_PAIRS, cls.name))
        generator = torch.Generator().manual_seed(seed)
        with own_randomness():
            network = mlp(pairs.d, training.widths, 1 if keep_mean else pairs.d)
        initialise(network, generator)
        if keep_mean:
            last = network[-1]
            assert isinstance(last, nn.Linear)
            start_at(last, _FIRST_LOG_KAPPA)
        network.to(pairs.texts.device)
        images, texts = unit(pairs.images).float(), scaled_inputs(pairs.texts).float()
        temperature = nn.Parameter(torch.ones((), device=texts.device))
        method = cls(network, distribution=distribution, keep_mean=keep_mean)

        def loss_of(rows: Tensor) -> Tensor:
            i, t, match = batches.items(rows)
            direction, kappa = method._concentration(texts[t])
            return asymvlm_loss(log_likelihoods(images[i], direction, kappa, distribution), match, temperature)

        train([*network.parameters(), temperature], loss_of, len(batches), training, generator=generator)
        return method

    def _concentration(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """((n, d) directions, (n,) concentrations) of scaled text embeddings."""
        out = self.network(scaled)
        if self.keep_mean:
            return functional.normalize(scaled, dim=1), out.squeeze(1).exp().clamp_min(KAPPA_FLOOR)
        return direction_and_kappa(out)

    @torch.no_grad()
    def concentration(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The distributions of texts.

        Args:
            x: (n, d) raw text embeddings.

        Returns:
            ((n, d) directions mu, (n,) concentrations kappa).
        """
        return self._concentration(scaled_inputs(checked_items(self.name, "text", x, self.network)))

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
        """See :meth:`PosthocMethod.uncertainty`; 1 / kappa of texts.

        Raises:
            ValueError: the queries are images, which have none.
        """
        check_side(side)
        if side == "image":
            raise ValueError("asymvlm: images are points and have no uncertainty; ask for texts")
        return self.concentration(queries)[1].reciprocal()

    def state(self) -> dict[str, Tensor]:
        """See :meth:`PosthocMethod.state`."""
        options = {"distribution": self.distribution, "keep_mean": self.keep_mean}
        return {**network_state({"text": self.network}), "options": pack_options(options)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """See :meth:`PosthocMethod.from_state`."""
        return cls(mlp_of(weights_of(state, "text", cls.name), cls.name), **unpack_options(state, cls.name))


def direction_and_kappa(eta: Tensor) -> tuple[Tensor, Tensor]:
    """Split eta = kappa mu.

    Args:
        eta: (n, d) outputs of the network.

    Returns:
        ((n, d) unit directions mu, (n,) concentrations of at least KAPPA_FLOOR).
    """
    kappa = eta.norm(dim=1).clamp_min(KAPPA_FLOOR)
    return functional.normalize(eta, dim=1), kappa
