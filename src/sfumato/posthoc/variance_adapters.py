"""Networks that give frozen embeddings a variance in every dimension: PFE, PCME++ and ProLIP.

The means stay the unit embeddings, so ranking by them stays that of the frozen model. The three differ in their loss.

PFE sees matching pairs alone, and only the sum of the two variances of a pair: a level may go from one modality to the
other. PCME++ and ProLIP see all pairs, and there a total variance acts as the prior of a match (as under csd in every
model): among items with one match each, a noisy item needs a small variance to keep its match likely, and may come out
as certain. Measure a method on held-out queries before its numbers are trusted.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.calibration.platt import fit_logits
from sfumato.distances import squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import PCMEPPLoss, PCMEPPOptions, ProLIPLoss, ProLIPOptions, prolip_loss, vib_loss
from sfumato.posthoc.adapter_method import LossOfRows, MLPMethod
from sfumato.posthoc.adapter_networks import (
    MIN_PAIRS,
    AdapterTraining,
    PairBatches,
    checked_items,
    mlp,
    scaled_inputs,
    start_at,
)
from sfumato.posthoc.method import FrozenPairs, Side, point_variance, unit

Units = Literal["unit", "raw"]
"""The embeddings that an adapter works on: of unit length, or as the frozen model gives them."""

_N_LOGITS = 1024
"""Number of pairs that give the first scale and bias of match logits."""

PROLIP_BOTTLENECK = 1e-5
"""Published weight of ProLIP's information bottleneck in an adapter."""


class VarianceAdapter(MLPMethod):
    """Base of the adapters: a network for each modality, from frozen embeddings to what makes their variances."""

    published: ClassVar[AdapterTraining] = AdapterTraining((1024, 1024, 1024), 200, 2048, 5e-4, "adamw", 1e-4)

    def __init__(self, image: nn.Sequential, text: nn.Sequential, *, units: Units = "unit") -> None:
        if units not in get_args(Units):
            raise ValueError(f"{self.name}: unknown units {units!r}; known: {', '.join(get_args(Units))}")
        super().__init__((image, text))
        self.units: Units = units

    @property
    def options(self) -> dict[str, Any]:
        """See :attr:`AdapterMethod.options`."""
        return {"units": self.units}

    @staticmethod
    @abstractmethod
    def log_variance(output: Tensor) -> Tensor:
        """Log variances from the output of a network. output (n, d) -> (n, d)."""

    @staticmethod
    @abstractmethod
    def output_at(variance: float) -> float:
        """The output of a network that means a variance."""

    @classmethod
    def _fit(
        cls,
        pairs: FrozenPairs,
        loss_of: Callable[[GaussianEmbedding, GaussianEmbedding, Tensor], Tensor],
        parameters: Iterable[nn.Parameter],
        *,
        seed: int,
        training: AdapterTraining | None,
        units: Units = "unit",
        rowwise: bool = False,
    ) -> Self:
        """Train both networks; the loss gets images, texts and labels, or matching rows and no labels."""
        training = training or cls.default
        raw = [pairs.embeddings(side) for side in cls.sides]
        means = [(unit(x) if units == "unit" else x).float() for x in raw]
        inputs = [scaled_inputs(x).float() for x in raw] if units == "unit" else means

        def start(side: Side, network: nn.Sequential) -> None:
            # A total variance of the squared length of an embedding at first.
            mean = means[cls.sides.index(side)]
            start_at(network, cls.output_at(float(mean.square().mean())))

        def loss(method: Self, batches: PairBatches) -> LossOfRows:
            def loss_of_rows(rows: Tensor) -> Tensor:
                if rowwise:
                    (i, t), match = batches.index[rows].T, torch.empty(0)
                else:
                    i, t, match = batches.items(rows)
                image, text = (
                    GaussianEmbedding(mean[k], cls.log_variance(network(x[k])))
                    for network, x, mean, k in zip(method.networks.values(), inputs, means, (i, t), strict=True)
                )
                return loss_of(image, text, match)

            return loss_of_rows

        return cls._trained(
            pairs,
            lambda: mlp(pairs.d, training.widths, pairs.d),
            start,
            loss,
            options={"units": units},
            seed=seed,
            training=training,
            parameters=parameters,
        )

    @torch.no_grad()
    def variance(self, side: Side, x: Tensor) -> Tensor:
        """The variances of items in the units of the fit. x (n, d) -> (n, d)."""
        network = self.network(side)
        x = checked_items(self.name, side, x, network)
        return self.log_variance(network(scaled_inputs(x) if self.units == "unit" else x)).exp()

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed`; unit embeddings as means, variances in their squared units."""
        var = self.variance(side, x)
        return point_variance(x, var if self.units == "unit" else var / x.to(var).square().sum(1, keepdim=True))

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; the mean variance over dimensions."""
        return self.variance(side, queries).mean(1)


class _LogVarianceAdapter(VarianceAdapter):
    """The network gives the log variance itself."""

    @staticmethod
    def log_variance(output: Tensor) -> Tensor:
        return output

    @staticmethod
    def output_at(variance: float) -> float:
        return float(torch.tensor(variance).log())


def pfe_loss(image: GaussianEmbedding, text: GaussianEmbedding) -> Tensor:
    """The mutual likelihood of matching pairs, mean over pairs of sum[(m_i - m_t)^2 / (v_i + v_t) + log(v_i + v_t)].

    Paper: Shi and Jain, "Probabilistic face embeddings", ICCV 2019.

    image, text (n, d).
    """
    var = image.var + text.var
    return ((image.mean - text.mean).square() / var + var.log()).sum(1).mean()


class PFEAdapter(VarianceAdapter):
    """Variances = softplus(network) that explain the distance between the two embeddings of a pair.

    Paper: Shi and Jain, "Probabilistic face embeddings", ICCV 2019; as an adapter in the AsymVLM repository.
    """

    name = "pfe"
    summary = "mean variance that explains the distances of matching pairs, squared units of unit embeddings"
    published = AdapterTraining((1024, 1024, 1024), 200, 2048, 1e-3, "sgd", 0.0)

    @classmethod
    def fit(
        cls, pairs: FrozenPairs, *, seed: int = 0, units: Units = "unit", training: AdapterTraining | None = None
    ) -> Self:
        """Train on the pairs."""

        def loss_of(image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor) -> Tensor:
            return pfe_loss(image, text)

        return cls._fit(pairs, loss_of, [], seed=seed, training=training, units=units, rowwise=True)

    @staticmethod
    def log_variance(output: Tensor) -> Tensor:
        """See :meth:`VarianceAdapter.log_variance`: the logarithm of softplus."""
        return functional.softplus(output).clamp_min(torch.finfo(output.dtype).tiny).log()

    @staticmethod
    def output_at(variance: float) -> float:
        """See :meth:`VarianceAdapter.output_at`."""
        return float(torch.tensor(variance, dtype=torch.float64).expm1().log())


def first_logits(pairs: FrozenPairs, *, seed: int) -> tuple[float, float]:
    """Scale and bias of the match logits that fit the first csd, when every item has a total variance of 1.

    The published starts, 5 and 5 or 10 and -10 in ProLIP's way of writing, are far from those of a frozen model, whose
    cosines lie close together. The variances would do the work of the bias: they vanish, or measure the batch size.

    Returns (logit_scale, logit_bias).
    """
    batches = PairBatches(pairs)
    rows = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed))[:_N_LOGITS]
    images, texts, match = batches.items(rows)
    points = (GaussianEmbedding.point(unit(x)) for x in (pairs.images[images], pairs.texts[texts]))
    try:
        return fit_logits(squared_l2_matrix(*points) + 2, match)
    except ValueError:
        return 5.0, 5.0


class PCMEPPAdapter(_LogVarianceAdapter):
    """Log variances by the match loss of PCME++ on csd, without pseudo-positives and bottleneck.

    Scale and bias of the match logits are learnt, from :func:`first_logits` or, as published, from 5 and 5.

    Paper: Chun, ICLR 2024, arXiv 2305.18171; as an adapter in the AsymVLM repository.
    """

    name = "pcmepp"
    summary = "mean variance learnt by the match loss of PCME++, squared units of unit embeddings"

    @classmethod
    def fit(
        cls,
        pairs: FrozenPairs,
        *,
        seed: int = 0,
        logits: tuple[float, float] | None = None,
        training: AdapterTraining | None = None,
    ) -> Self:
        """Train on the pairs."""
        scale, bias = logits or first_logits(pairs.at_least(MIN_PAIRS, cls.name), seed=seed)
        options = PCMEPPOptions(alpha=0.0, beta=0.0, logit_scale=scale, logit_bias=bias)
        loss = PCMEPPLoss(options).to(pairs.images.device)
        return cls._fit(
            pairs, lambda i, t, m: loss(i, t, m).total, list(loss.parameters()), seed=seed, training=training
        )


class ProLIPAdapter(_LogVarianceAdapter):
    """Log variances by the pairwise sigmoid loss of ProLIP.

    By default scale and bias of the logits are learnt, from :func:`first_logits`. With ``frozen_scale`` they stay 1 and
    0, as in the AsymVLM repository; then the variance is the only way to lower the logits of the negatives, and its
    level measures the batch size: half the total variance of a pair grows to about log(batch - 1).

    Paper: Chun et al., "Probabilistic language-image pre-training", ICLR 2025; as an adapter in the AsymVLM repository,
    which does not say its optimiser apart from the others.
    """

    name = "prolip"
    summary = "mean variance learnt by the sigmoid loss of ProLIP, squared units of unit embeddings"

    @classmethod
    def fit(
        cls,
        pairs: FrozenPairs,
        *,
        seed: int = 0,
        frozen_scale: bool = False,
        logits: tuple[float, float] | None = None,
        training: AdapterTraining | None = None,
    ) -> Self:
        """Train on the pairs."""
        if frozen_scale:
            return cls._fit(pairs, released_prolip_loss, [], seed=seed, training=training)
        scale, bias = logits or first_logits(pairs.at_least(MIN_PAIRS, cls.name), seed=seed)
        options = ProLIPOptions(beta=PROLIP_BOTTLENECK, logit_scale=scale, logit_bias=bias)
        loss = ProLIPLoss(options).to(pairs.images.device)
        return cls._fit(
            pairs, lambda i, t, m: loss(i, t, m).total, list(loss.parameters()), seed=seed, training=training
        )


def released_prolip_loss(image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor) -> Tensor:
    """ProLIP's loss with scale 1 and bias 0, and the released bottleneck, which halves the log variances.

    Source: the ProLIP adapter of the AsymVLM repository.

    image (n, d), text (m, d), match (n, m).
    """
    # On unit means a scale of 1/2 and a bias of 1 on csd are ProLIP's scale 1 and bias 0.
    matched = prolip_loss(image, text, match, ProLIPOptions(beta=0.0), logit_scale=0.5, logit_bias=1.0).total
    halved = [vib_loss(GaussianEmbedding(x.mean, x.log_var / 2)) for x in (image, text)]
    return matched + PROLIP_BOTTLENECK * (halved[0] + halved[1])
