"""Networks that give frozen embeddings a variance in every dimension: PFE, PCME++, ProLIP and ProbVLM.

The means stay the unit embeddings, so ranking by them stays that of the frozen model. The methods differ in their loss.

PFE sees matching pairs alone, and only the sum of the two variances of a pair: a level may go from one modality to the
other. PCME++ and ProLIP see all pairs, and there a total variance acts as the prior of a match (as under csd in every
model): among items with one match each, a noisy item needs a small variance to keep its match likely, and may come out
as certain. Measure a method on held-out queries before its numbers are trusted.

ProbVLM's network gives mu, 1/alpha and beta: a generalised Gaussian in every dimension around the reconstruction of the
embedding. The density of an element x is beta / (2 alpha Gamma(1/beta)) exp(-(|mu - x| / alpha)^beta), its variance
alpha^2 Gamma(3/beta) / Gamma(1/beta).
"""

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from papers.posthoc.adapters import MIN_PAIRS, AdapterMethod, AdapterTraining, Networks, PairBatches, mlp, scaled_inputs
from papers.posthoc.method import FrozenPairs, unit
from sfumato.calibration.logits import fit_logits
from sfumato.distances import squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side
from sfumato.losses.contrastive import ProLIPLoss, ProLIPOptions
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions

_N_LOGITS = 1024
"""Number of pairs that give the first scale and bias of match logits."""

PROLIP_BOTTLENECK = 1e-5
"""Published weight of ProLIP's information bottleneck in an adapter."""


class VarianceAdapter(AdapterMethod):
    """Base of the adapters whose networks give the log variance."""

    published: ClassVar[AdapterTraining] = AdapterTraining((1024, 1024, 1024), 200, 2048, 5e-4, "adamw", 1e-4)
    pairs_only: ClassVar[bool] = False  # whether the loss sees matching rows alone

    @staticmethod
    def log_variance(output: Tensor) -> Tensor:
        """Log variances from the output of a network. output (n, d) -> (n, d)."""
        return output

    @staticmethod
    def output_at(variance: float) -> float:
        """The output of a network that means a variance."""
        return float(torch.tensor(variance).log())

    @classmethod
    def _fit(
        cls,
        pairs: FrozenPairs,
        loss_of: Callable[[GaussianEmbedding, GaussianEmbedding, Tensor], Tensor],
        parameters: Iterable[nn.Parameter],
        *,
        seed: int,
        training: AdapterTraining | None,
    ) -> Self:
        """Train both networks; the loss gets images, texts and labels, or matching rows and no labels."""
        training = training or cls.default
        means = {side: unit(pairs.embeddings(side)).float() for side in cls.sides}
        inputs = {side: scaled_inputs(pairs.embeddings(side)).float() for side in cls.sides}

        def build(side: Side) -> nn.Module:
            return mlp(pairs.d, training.widths, pairs.d, start=cls.output_at(1 / pairs.d))  # A total variance of 1.

        def loss(networks: Networks, batches: PairBatches, rows: Tensor) -> Tensor:
            i, t, match = (*batches.index[rows].T, torch.empty(0)) if cls.pairs_only else batches.items(rows)
            image, text = (
                GaussianEmbedding(means[side][k], cls.log_variance(networks[side](inputs[side][k])))
                for side, k in zip(cls.sides, (i, t), strict=True)
            )
            return loss_of(image, text, match)

        networks = cls.train(pairs, build, loss, seed=seed, training=training, parameters=parameters)
        return cls(networks)

    @torch.no_grad()
    def variance(self, side: Side, x: Tensor) -> Tensor:
        """See :meth:`AdapterMethod.variance`."""
        return self.log_variance(self.networks[side](self.inputs(x))).exp()


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
    pairs_only = True

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0, training: AdapterTraining | None = None) -> Self:
        """Train on the pairs."""
        return cls._fit(pairs, lambda i, t, _: pfe_loss(i, t), [], seed=seed, training=training)

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


class PCMEPPAdapter(VarianceAdapter):
    """Log variances by the match loss of PCME++ on csd, without pseudo-positives and bottleneck.

    Scale and bias of the match logits are learnt, from :func:`first_logits`.

    Paper: Chun, ICLR 2024, arXiv 2305.18171; as an adapter in the AsymVLM repository.
    """

    name = "pcmepp"
    summary = "mean variance learnt by the match loss of PCME++, squared units of unit embeddings"

    @staticmethod
    def loss(scale: float, bias: float) -> nn.Module:
        """The loss module with the first logits."""
        return PCMEPPLoss(PCMEPPOptions(alpha=0.0, beta=0.0, logit_scale=scale, logit_bias=bias))

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0, training: AdapterTraining | None = None) -> Self:
        """Train on the pairs."""
        loss = cls.loss(*first_logits(pairs.at_least(MIN_PAIRS, cls.name), seed=seed)).to(pairs.images.device)
        return cls._fit(
            pairs, lambda i, t, m: loss(i, t, m).total, list(loss.parameters()), seed=seed, training=training
        )


class ProLIPAdapter(PCMEPPAdapter):
    """Log variances by the pairwise sigmoid loss of ProLIP; scale and bias as in :class:`PCMEPPAdapter`.

    The AsymVLM repository freezes scale and bias at 1 and 0. Then the variance is the only way to lower the logits of
    the negatives, and its level measures the batch size: half the total variance of a pair grows to about
    log(batch - 1).

    Paper: Chun et al., "Probabilistic language-image pre-training", ICLR 2025; as an adapter in the AsymVLM repository,
    which does not say its optimiser apart from the others.
    """

    name = "prolip"
    summary = "mean variance learnt by the sigmoid loss of ProLIP, squared units of unit embeddings"

    @staticmethod
    def loss(scale: float, bias: float) -> nn.Module:
        """See :meth:`PCMEPPAdapter.loss`."""
        return ProLIPLoss(ProLIPOptions(beta=PROLIP_BOTTLENECK, logit_scale=scale, logit_bias=bias))


# ---------------------------------------------------------------- ProbVLM
T1, T2, CROSS = 1.0, 0.05, 1e-4
"""Published weights of the absolute error, of the likelihood, and of the terms across modalities."""

_EPS, _SMALLEST, _LARGEST, _HEAD_WIDTH = 1e-4, 1e-4, 1e3, 128


class GeneralisedGaussian(NamedTuple):
    """The outputs of the network."""

    mean: Tensor  # (n, d) mu
    one_over_alpha: Tensor  # (n, d) inverse of the scale
    beta: Tensor  # (n, d) shape; 2 is a normal distribution, 1 a Laplace distribution


def generalised_gaussian_loss(found: GeneralisedGaussian, target: Tensor) -> Tensor:
    r"""Negative log-likelihood of each element, without log 2.

        (|mu - x| / alpha)^beta - log(beta / alpha) + lgamma(1 / beta)

    1e-4 is added to 1/alpha and beta, and the first term is clamped to [1e-4, 1e3], as in the released code, which has
    a product in place of the power.

    Paper: Upadhyay et al., "ProbVLM: probabilistic adapter for frozen vision-language models", ICCV 2023, Eq. 3.

    target (n, d) -> (n, d).
    """
    inverse, beta = found.one_over_alpha + _EPS, found.beta + _EPS
    scaled = (found.mean - target).abs() * inverse
    # A logarithm, because the derivative of 0^beta is infinite for beta < 1.
    residual = (beta * scaled.clamp_min(torch.finfo(scaled.dtype).tiny).log()).exp()
    return residual.clamp(_SMALLEST, _LARGEST) - inverse.log() - beta.log() + torch.lgamma(1 / beta)


def probvlm_loss(image: GeneralisedGaussian, text: GeneralisedGaussian, targets: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of matching rows: each modality explains itself and, weakly, the other. targets (n, d)."""

    def one(found: GeneralisedGaussian, target: Tensor) -> Tensor:
        error = (found.mean - target).abs().mean()
        return T1 * error + T2 * generalised_gaussian_loss(found, target).mean()

    own = one(image, targets[0]) + one(text, targets[1])
    return own + CROSS * (one(image, targets[1]) + one(text, targets[0]))


def generalised_gaussian_variance(found: GeneralisedGaussian) -> Tensor:
    """(n, d) variance of every element, alpha^2 Gamma(3 / beta) / Gamma(1 / beta)."""
    beta = found.beta
    return (torch.lgamma(3 / beta) - torch.lgamma(1 / beta) - 2 * found.one_over_alpha.log()).exp()


class ProbVLMNetwork(nn.Module):
    """The adapter of one modality: h = x + MLP(x), and a head for each of mu, 1/alpha and beta."""

    def __init__(self, d: int, *, width: int, head_width: int) -> None:
        super().__init__()
        # The released network has its dropout before the last layer.
        self.mod = nn.Sequential(
            nn.Linear(d, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Identity(), nn.Linear(width, d)
        )
        laplace = math.log(math.expm1(1.0))  # A Laplace distribution of scale 1.
        self.block_mu, self.block_alpha, self.block_beta = (
            mlp(d, [head_width], d, start=start) for start in (None, laplace, laplace)
        )

    def forward(self, x: Tensor) -> GeneralisedGaussian:
        """The distributions of embeddings. x (n, d)."""
        h = x + self.mod(x)
        inverse, beta = self.block_alpha(h), self.block_beta(h)
        return GeneralisedGaussian(self.block_mu(h), functional.softplus(inverse), functional.softplus(beta))


class ProbVLM(AdapterMethod):
    """The variances of generalised Gaussians. The means stay the frozen unit embeddings, not mu.

    Both modalities are scaled to length sqrt(d) for the networks, and variances back to unit length. (The released
    training has unit images times 100 and unit texts.)

    Paper: Upadhyay et al., "ProbVLM: probabilistic adapter for frozen vision-language models", ICCV 2023.
    """

    name = "probvlm"
    summary = "mean variance of the generalised Gaussian around the embedding, squared units of unit embeddings"
    default: ClassVar[AdapterTraining] = AdapterTraining((256,), 6, 512, 1e-3, "adam", 0.0)
    published: ClassVar[AdapterTraining] = AdapterTraining((256,), 100, 64, 1e-4, "adam", 0.0)

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0, training: AdapterTraining | None = None) -> Self:
        """Train on the pairs."""
        training = training or cls.default
        inputs = {side: scaled_inputs(pairs.embeddings(side)).float() for side in cls.sides}

        def build(side: Side) -> nn.Module:
            return ProbVLMNetwork(pairs.d, width=training.widths[0], head_width=_HEAD_WIDTH)

        def loss(networks: Networks, batches: PairBatches, rows: Tensor) -> Tensor:
            image, text = (inputs[s][k] for s, k in zip(cls.sides, batches.index[rows].T, strict=True))
            return probvlm_loss(networks["image"](image), networks["text"](text), (image, text))

        return cls(cls.train(pairs, build, loss, seed=seed, training=training))

    @torch.no_grad()
    def distribution(self, side: Side, x: Tensor) -> GeneralisedGaussian:
        """The generalised Gaussians of items, in the units of the networks: unit length times sqrt(d). x (n, d)."""
        return self.networks[side](self.inputs(x))

    def variance(self, side: Side, x: Tensor) -> Tensor:
        """See :meth:`AdapterMethod.variance`."""
        return generalised_gaussian_variance(self.distribution(side, x)) / x.shape[1]
