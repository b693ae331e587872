r"""AsymVLM: texts as distributions on the unit sphere, images as points.

A network on text embeddings gives a concentration kappa, and as published also a new direction mu. A text matches an
image by the likelihood of the image. Images have no uncertainty. The distributions of d dimensions are

    von Mises-Fisher:    log p(x) = kappa mu . x + ln c(kappa)
    power spherical:     log p(x) = kappa log(1 + mu . x) + ln c(kappa)
"""

import math
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from papers.posthoc.adapters import AdapterMethod, AdapterTraining, Networks, PairBatches, mlp, scaled_inputs
from papers.posthoc.method import FrozenPairs, unit
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side

Distribution = Literal["vmf", "power_spherical"]
"""von Mises-Fisher, or power spherical."""

KAPPA_FLOOR = 1e-3
"""Smallest concentration: a network output of exactly 0 has no direction."""

_FIRST_LOG_KAPPA = 4.6  # kappa 100, the factor of the cosine in CLIP's logits

_TERMS = 512


def log_normaliser(kappa: Tensor, d: int, distribution: Distribution) -> Tensor:
    r"""ln c(kappa): that of the power spherical exactly, that of von Mises-Fisher up to a constant.

    For von Mises-Fisher it is the approximation of the released code, with r = (d - 1) / 2 and r' = (d + 1) / 2:

        r/2 log(r + sqrt(r^2 + k^2)) - sqrt(r^2 + k^2)/2 + r/2 log(r + sqrt(r'^2 + k^2)) - sqrt(r'^2 + k^2)/2

    It exceeds the exact value by a constant within 0.1, for kappa up to 3000 and d from 10 to 768.

    Paper: Ju et al., "Exploiting the asymmetric uncertainty structure of pre-trained VLMs on the unit hypersphere",
    2025 (AsymVLM).
    """
    r = (d - 1) / 2
    if distribution == "vmf":
        near, far = ((x * x + kappa.square()).sqrt() for x in (r, r + 1))
        return r / 2 * ((r + near).log() + (r + far).log()) - (near + far) / 2
    a = r + kappa
    log_beta = torch.lgamma(a) - torch.lgamma(a + r)
    return -((a + r) * math.log(2) + log_beta + r * math.log(math.pi))


def mean_length(kappa: Tensor, d: int, distribution: Distribution) -> Tensor:
    r"""The length R of the mean of the distribution; E ||X - mean||^2 = 1 - R^2.

    I_{d/2}(kappa) / I_{d/2-1}(kappa) for von Mises-Fisher, by its continued fraction; kappa / (d - 1 + kappa) for the
    power spherical.
    """
    if distribution == "power_spherical":
        return kappa / (d - 1 + kappa)
    kappa = kappa.double()
    # I_v / I_{v-1} = 1 / (2 v / kappa + I_{v+1} / I_v), backwards from a large order. There the Riccati equation
    # R' = 1 - R^2 - 2 h R / kappa, h = v - 1/2, is solved with the R' of its solution for R' = 0.
    h = d / 2 + _TERMS - 0.5
    root = (h**2 + kappa.square()).sqrt()
    steady = 1 - h / (root * (root + h))
    ratio = kappa * steady / (h + (h**2 + kappa.square() * steady).sqrt())
    for k in range(_TERMS - 1, -1, -1):
        ratio = kappa / (2 * (d / 2 + k) + kappa * ratio)
    return ratio


def log_likelihoods(points: Tensor, direction: Tensor, kappa: Tensor, distribution: Distribution) -> Tensor:
    """Log likelihoods of all points under all distributions. points (n, d), direction (m, d), kappa (m,) -> (n, m)."""
    cosine = points @ direction.T
    normaliser = log_normaliser(kappa, points.shape[1], distribution)
    if distribution == "vmf":
        return cosine * kappa + normaliser
    # The antipode has no likelihood; a bound keeps its logarithm finite.
    return torch.log1p(cosine.clamp_min(-1 + torch.finfo(cosine.dtype).eps)) * kappa + normaliser


def direction_and_kappa(eta: Tensor) -> tuple[Tensor, Tensor]:
    """Split eta = kappa mu. eta (n, d)."""
    return functional.normalize(eta, dim=1), eta.norm(dim=1).clamp_min(KAPPA_FLOOR)


def asymvlm_loss(log_likelihood: Tensor, match: Tensor, temperature: Tensor | float) -> Tensor:
    """Mean of the cross-entropies of rows and of columns of temperature * log likelihood.

    log_likelihood (n, m), match (n, m).
    """
    logits, losses = temperature * log_likelihood, []
    for z, labels in ((logits, match), (logits.T, match.T)):
        target = labels / labels.sum(1, keepdim=True).clamp_min(1)
        losses.append(-(target * z.log_softmax(1)).sum(1).mean())
    return (losses[0] + losses[1]) / 2


class AsymVLM(AdapterMethod):
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

    def __init__(self, networks: Networks, *, distribution: Distribution = "vmf", keep_mean: bool = True) -> None:
        super().__init__(networks)
        self.keep_mean = keep_mean
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
        """Train the text network on the pairs."""
        if distribution not in get_args(Distribution):
            raise ValueError(f"unknown distribution {distribution!r}; known: {', '.join(get_args(Distribution))}")
        training = training or cls.default
        images, texts = unit(pairs.images).float(), scaled_inputs(pairs.texts).float()
        temperature = nn.Parameter(torch.ones((), device=texts.device))

        def build(side: Side) -> nn.Module:
            if keep_mean:
                return mlp(pairs.d, training.widths, 1, start=_FIRST_LOG_KAPPA)
            return mlp(pairs.d, training.widths, pairs.d)

        def loss(networks: Networks, batches: PairBatches, rows: Tensor) -> Tensor:
            i, t, match = batches.items(rows)
            direction, kappa = _concentration(networks["text"], texts[t], keep_mean)
            return asymvlm_loss(log_likelihoods(images[i], direction, kappa, distribution), match, temperature)

        networks = cls.train(pairs, build, loss, seed=seed, training=training, parameters=[temperature])
        return cls(networks, distribution=distribution, keep_mean=keep_mean)

    @torch.no_grad()
    def concentration(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """((n, d) directions, (n,) concentrations) of texts. x (n, d)."""
        return _concentration(self.networks["text"], scaled_inputs(self.inputs("text", x)), self.keep_mean)

    def variance(self, side: Side, x: Tensor) -> Tensor:
        """See :meth:`AdapterMethod.variance`."""
        return self.embed(side, x).var

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed` and the class; variances in squared units of unit embeddings."""
        self.check(side, x)
        if side == "image":
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
        self.check(side, queries)
        if side == "image":
            raise ValueError("asymvlm: images are points and have no uncertainty; ask for texts")
        return self.concentration(queries)[1].reciprocal()


def _concentration(network: nn.Module, scaled: Tensor, keep_mean: bool) -> tuple[Tensor, Tensor]:
    """((n, d) directions, (n,) concentrations) of scaled text embeddings."""
    out = network(scaled)
    if keep_mean:
        return functional.normalize(scaled, dim=1), out.squeeze(1).exp().clamp_min(KAPPA_FLOOR)
    return direction_and_kappa(out)
