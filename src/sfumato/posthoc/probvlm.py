r"""ProbVLM: a generalised Gaussian in every dimension around the reconstruction of a frozen embedding.

A network gives mu, 1/alpha and beta. The density of an element x of the embedding is
beta / (2 alpha Gamma(1/beta)) exp(-(|mu - x| / alpha)^beta), its variance alpha^2 Gamma(3/beta) / Gamma(1/beta).
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding
from sfumato.posthoc.adapter_method import AdapterMethod, LossOfRows
from sfumato.posthoc.adapter_networks import (
    AdapterTraining,
    PairBatches,
    checked_items,
    load_weights,
    own_randomness,
    scaled_inputs,
    start_at,
)
from sfumato.posthoc.method import FrozenPairs, Side, point_variance

LossForm = Literal["power", "product"]
"""The printed negative log-likelihood, or the released one with a product in place of the power."""

TextOrder = Literal["variance", "inverted"]
"""Texts by their variance, or by its inverse as the released code sorts them."""

VarianceForm = Literal["exact", "clipped"]
"""The variance of the density, or the released one of shifted and clipped parameters."""

T1, T2, CROSS = 1.0, 0.05, 1e-4
"""Published weights of the absolute error, of the likelihood, and of the terms across modalities."""

_EPS, _SMALLEST, _LARGEST = 1e-4, 1e-4, 1e3


class GeneralisedGaussian(NamedTuple):
    """The outputs of the network."""

    mean: Tensor  # (n, d) mu
    one_over_alpha: Tensor  # (n, d) inverse of the scale
    beta: Tensor  # (n, d) shape; 2 is a normal distribution, 1 a Laplace distribution


def generalised_gaussian_loss(found: GeneralisedGaussian, target: Tensor, *, form: LossForm = "power") -> Tensor:
    r"""Negative log-likelihood of each element, without log 2.

        (|mu - x| / alpha)^beta - log(beta / alpha) + lgamma(1 / beta)

    1e-4 is added to 1/alpha and beta, and the first term is clamped to [1e-4, 1e3], as in the released code.

    Paper: Upadhyay et al., "ProbVLM: probabilistic adapter for frozen vision-language models", ICCV 2023, Eq. 3.

    target (n, d) -> (n, d).
    """
    if form not in get_args(LossForm):
        raise ValueError(f"unknown form of the loss {form!r}; known: {', '.join(get_args(LossForm))}")
    inverse, beta = found.one_over_alpha + _EPS, found.beta + _EPS
    scaled = (found.mean - target).abs() * inverse
    if form == "product":
        residual = scaled * beta
    else:
        # A logarithm, because the derivative of 0^beta is infinite for beta < 1.
        residual = (beta * scaled.clamp_min(torch.finfo(scaled.dtype).tiny).log()).exp()
    return residual.clamp(_SMALLEST, _LARGEST) - inverse.log() - beta.log() + torch.lgamma(1 / beta)


def probvlm_loss(
    image: GeneralisedGaussian,
    text: GeneralisedGaussian,
    targets: tuple[Tensor, Tensor],
    *,
    form: LossForm = "power",
    t1: float = T1,
    t2: float = T2,
    cross: float = CROSS,
) -> Tensor:
    """The loss of matching rows: each modality explains itself and, weakly, the other. targets (n, d)."""

    def one(found: GeneralisedGaussian, target: Tensor) -> Tensor:
        error = (found.mean - target).abs().mean()
        return t1 * error + t2 * generalised_gaussian_loss(found, target, form=form).mean()

    own = one(image, targets[0]) + one(text, targets[1])
    return own + cross * (one(image, targets[1]) + one(text, targets[0])) if cross else own


def generalised_gaussian_variance(found: GeneralisedGaussian, *, form: VarianceForm = "exact") -> Tensor:
    """The variance of every element, alpha^2 Gamma(3 / beta) / Gamma(1 / beta). Returns (n, d)."""
    if form not in get_args(VarianceForm):
        raise ValueError(f"unknown form of the variance {form!r}; known: {', '.join(get_args(VarianceForm))}")
    inverse, beta = found.one_over_alpha, found.beta
    if form == "clipped":
        inverse = (1 / (inverse + 1e-5)).clamp(1e-4, 5).reciprocal()
        beta = (beta + 0.1).clamp(0.1, 5)
    return (torch.lgamma(3 / beta) - torch.lgamma(1 / beta) - 2 * inverse.log()).exp()


def dropout_uncertainty(
    passes: GeneralisedGaussian, *, official: bool = False, form: VarianceForm = "clipped"
) -> tuple[Tensor, Tensor]:
    """Aleatoric and epistemic variance from passes with dropout. passes (k, n, d)."""
    own = generalised_gaussian_variance(passes, form=form)
    spread = passes.mean.var(0)
    return own.mean(0), (own.flatten(0, 1).var(0) * spread).sqrt() if official else spread


class ProbVLMNetwork(nn.Module):
    """The adapter of one modality: h = x + MLP(x), and a head for each of mu, 1/alpha and beta."""

    def __init__(
        self, d: int, *, width: int = 256, head_width: int | None = None, dropout: float = 0.0, relu: bool = False
    ) -> None:
        super().__init__()
        inner, self.relu = head_width or d, relu
        self.mod = nn.Sequential(
            nn.Linear(d, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, d),
        )
        self.block_mu, self.block_alpha, self.block_beta = (
            nn.Sequential(nn.Linear(d, inner), nn.ReLU(), nn.Linear(inner, d)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> GeneralisedGaussian:
        """The distributions of embeddings. x (n, d)."""
        return self.heads(x + self.mod(x))

    def heads(self, h: Tensor) -> GeneralisedGaussian:
        """The distributions from the hidden features. h (n, d)."""
        inverse, beta = self.block_alpha(h), self.block_beta(h)
        positive = functional.relu if self.relu else functional.softplus
        return GeneralisedGaussian(self.block_mu(h), positive(inverse), positive(beta))


class ProbVLM(AdapterMethod[ProbVLMNetwork]):
    """The variances of generalised Gaussians. The means stay the frozen unit embeddings, not mu.

    Both modalities are scaled to length sqrt(d) for the networks, and variances back to unit length. (The released
    training has unit images times 100 and unit texts.)

    Paper: Upadhyay et al., "ProbVLM: probabilistic adapter for frozen vision-language models", ICCV 2023.
    """

    name = "probvlm"
    summary = "mean variance of the generalised Gaussian around the embedding, squared units of unit embeddings"
    default: ClassVar[AdapterTraining] = AdapterTraining((256,), 6, 512, 1e-3, "adam", 0.0)
    published: ClassVar[AdapterTraining] = AdapterTraining((256,), 100, 64, 1e-4, "adam", 0.0)
    network_options = ("relu",)

    def __init__(
        self,
        image: ProbVLMNetwork,
        text: ProbVLMNetwork,
        *,
        variance_form: VarianceForm = "exact",
        text_order: TextOrder = "variance",
    ) -> None:
        for what, value, known in (
            ("variance", variance_form, get_args(VarianceForm)),
            ("text_order", text_order, get_args(TextOrder)),
        ):
            if value not in known:
                raise ValueError(f"{self.name}: unknown {what} {value!r}; known: {', '.join(known)}")
        super().__init__((image, text))
        self.relu = image.relu
        self.variance_form: VarianceForm = variance_form
        self.text_order: TextOrder = text_order

    @property
    def options(self) -> dict[str, Any]:
        """See :attr:`AdapterMethod.options`."""
        return {"variance_form": self.variance_form, "text_order": self.text_order, "relu": self.relu}

    @classmethod
    def fit(
        cls,
        pairs: FrozenPairs,
        *,
        seed: int = 0,
        loss: LossForm = "power",
        variance: VarianceForm = "exact",
        text_order: TextOrder = "variance",
        t1: float = T1,
        t2: float = T2,
        head_width: int | None = 128,
        dropout: float = 0.0,
        training: AdapterTraining | None = None,
    ) -> Self:
        """Train on the pairs."""
        training = training or cls.default
        if len(training.widths) != 1 or not 0 <= dropout < 1:
            raise ValueError(f"{cls.name}: needs one width and a dropout in [0, 1), got {training.widths}, {dropout}")
        inputs = [scaled_inputs(pairs.embeddings(side)).float() for side in cls.sides]

        def start(side: Side, network: ProbVLMNetwork) -> None:
            for head in (network.block_alpha, network.block_beta):
                start_at(head, math.log(math.expm1(1.0)))  # A Laplace distribution of scale 1.

        def loss_of(method: Self, batches: PairBatches) -> LossOfRows:
            def loss_of_rows(rows: Tensor) -> Tensor:
                image, text = (x[k] for x, k in zip(inputs, batches.index[rows].T, strict=True))
                found = method.network("image")(image), method.network("text")(text)
                return probvlm_loss(*found, (image, text), form=loss, t1=t1, t2=t2)

            return loss_of_rows

        return cls._trained(
            pairs,
            lambda: ProbVLMNetwork(pairs.d, width=training.widths[0], head_width=head_width, dropout=dropout),
            start,
            loss_of,
            options={"variance_form": variance, "text_order": text_order},
            seed=seed,
            training=training,
        )

    @torch.no_grad()
    def distribution(self, side: Side, x: Tensor) -> GeneralisedGaussian:
        """The generalised Gaussians of items, in the units of the networks: unit length times sqrt(d). x (n, d)."""
        network = self.network(side)
        found: GeneralisedGaussian = network(scaled_inputs(checked_items(self.name, side, x, network)))
        return found

    def variance(self, side: Side, x: Tensor) -> Tensor:
        """The variances of items. x (n, d) -> (n, d)."""
        return generalised_gaussian_variance(self.distribution(side, x), form=self.variance_form) / x.shape[1]

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed`; unit embeddings as means, variances in their squared units."""
        return point_variance(x, self.variance(side, x))

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; mean variance over dimensions, of texts inverted on demand."""
        mean = self.variance(side, queries).mean(1)
        return mean.reciprocal() if side == "text" and self.text_order == "inverted" else mean

    @torch.no_grad()
    def dropout_variance(
        self, side: Side, x: Tensor, *, n_passes: int = 15, dropout: float = 0.3, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Aleatoric and epistemic variance from passes with dropout; use an adapter that was trained with dropout.

        x (n, d).
        """
        if n_passes < 2 or not 0 < dropout < 1:
            raise ValueError(f"{self.name}: needs two passes and a dropout in (0, 1), got {n_passes} and {dropout}")
        network = self.network(side)
        scaled = scaled_inputs(checked_items(self.name, side, x, network))
        found = []
        with own_randomness():
            torch.manual_seed(seed)
            for _ in range(n_passes):
                hidden = functional.dropout(network.mod[:4](scaled), dropout)
                found.append(network.heads(scaled + network.mod[5](hidden)))
        passes = GeneralisedGaussian(*(torch.stack(parts) for parts in zip(*found, strict=True)))
        own, spread = dropout_uncertainty(passes, form=self.variance_form)
        return own / x.shape[1], spread / x.shape[1]

    @classmethod
    def read_network(cls, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> ProbVLMNetwork:
        """See :meth:`AdapterMethod.read_network`."""
        return probvlm_network(weights, relu=options["relu"])


def probvlm_network(weights: Mapping[str, Tensor], *, relu: bool = False) -> ProbVLMNetwork:
    """An adapter with given weights, also those of the released code."""
    if not {"mod.0.weight", "block_mu.0.weight"} <= set(weights):
        raise ValueError(f"probvlm: these are no weights of an adapter: {', '.join(sorted(weights))}")
    first, head = weights["mod.0.weight"], weights["block_mu.0.weight"]
    with own_randomness():
        network = ProbVLMNetwork(first.shape[1], width=len(first), head_width=len(head), relu=relu).to(first.dtype)
    load_weights(network, weights, "probvlm")
    return network.eval()
