r"""AsymVLM: texts as distributions on the unit sphere, images as points.

A network on text embeddings gives a concentration kappa, and as published also a new direction mu, which changes the
ranking. A text matches an image by the likelihood of the image; images have no uncertainty.

    von Mises-Fisher:    log p(x) = kappa mu . x + ln c(kappa)
    power spherical:     log p(x) = kappa log(1 + mu . x) + ln c(kappa)
"""

import math
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from papers.posthoc.adapters import AdapterMethod, AdapterTraining, Networks, PairBatches, mlp, scaled_inputs
from papers.posthoc.method import FrozenPairs, unit
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side

Density = Literal["vmf", "power_spherical"]
"""Von Mises-Fisher, or power spherical."""

KAPPA_FLOOR = 1e-3
"""Smallest concentration."""

_FIRST_LOG_KAPPA = 4.6  # kappa 100, the factor of the cosine in CLIP's logits

_TERMS = 512


def log_normaliser(kappa: Tensor, d: int, density: Density) -> Tensor:
    r"""ln c(kappa): that of the power spherical exactly, that of von Mises-Fisher up to a constant.

    The latter is the approximation of the released code, with r = (d - 1) / 2 and r' = (d + 1) / 2:

        r/2 log(r + sqrt(r^2 + k^2)) - sqrt(r^2 + k^2)/2 + r/2 log(r + sqrt(r'^2 + k^2)) - sqrt(r'^2 + k^2)/2

    It exceeds the exact value by a constant within 0.1, for kappa up to 3000 and d from 10 to 768.

    Paper: Ju et al., "Exploiting the asymmetric uncertainty structure of pre-trained VLMs on the unit hypersphere",
    2025 (AsymVLM).
    """
    r = (d - 1) / 2
    if density == "power_spherical":
        a = r + kappa
        return torch.lgamma(a + r) - torch.lgamma(a) - (a + r) * math.log(2) - r * math.log(math.pi)
    near, far = ((x * x + kappa.square()).sqrt() for x in (r, r + 1))
    return r / 2 * ((r + near).log() + (r + far).log()) - (near + far) / 2


def mean_length(kappa: Tensor, d: int, density: Density) -> Tensor:
    r"""The length R of the mean of the distribution; E ||X - mean||^2 = 1 - R^2.

    kappa / (d - 1 + kappa) for the power spherical, I_{d/2}(kappa) / I_{d/2-1}(kappa) for von Mises-Fisher, by its
    continued fraction.
    """
    kappa = kappa.double()
    if density == "power_spherical":
        return kappa / (d - 1 + kappa)
    # I_v / I_{v-1} = 1 / (2 v / kappa + I_{v+1} / I_v), backwards from a large order. There the Riccati equation
    # R' = 1 - R^2 - 2 h R / kappa, h = v - 1/2, is solved with the R' of its solution for R' = 0.
    h = d / 2 + _TERMS - 0.5
    root = (h**2 + kappa.square()).sqrt()
    steady = 1 - h / (root * (root + h))
    ratio = kappa * steady / (h + (h**2 + kappa.square() * steady).sqrt())
    for k in range(_TERMS - 1, -1, -1):
        ratio = kappa / (2 * (d / 2 + k) + kappa * ratio)
    return ratio


def log_likelihoods(points: Tensor, direction: Tensor, kappa: Tensor, density: Density) -> Tensor:
    """Log likelihoods of all points under all distributions. points (n, d), direction (m, d), kappa (m,) -> (n, m)."""
    closeness = points @ direction.T
    if density == "power_spherical":  # The antipode has no likelihood; a bound keeps its logarithm finite.
        closeness = torch.log1p(closeness.clamp_min(-1 + torch.finfo(closeness.dtype).eps))
    return closeness * kappa + log_normaliser(kappa, points.shape[1], density)


def direction_and_kappa(eta: Tensor) -> tuple[Tensor, Tensor]:
    """Split eta = kappa mu, the output of the published network. eta (n, d)."""
    return functional.normalize(eta, dim=1), eta.norm(dim=1).clamp_min(KAPPA_FLOOR)


def gaussian_on_sphere(direction: Tensor, kappa: Tensor, density: Density) -> GaussianEmbedding:
    """mean = R mu, total variance = 1 - R^2: csd to a unit point x is E ||X - x||^2 = 2 - 2 R mu . x exactly."""
    d = direction.shape[1]
    length = mean_length(kappa, d, density).unsqueeze(1)
    log_var = ((1 - length.square()) / d).log().expand_as(direction)
    return GaussianEmbedding((length * direction).to(direction.dtype), log_var.to(direction.dtype))


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

    With `keep_mean` the network learns kappa alone: a text is the Gaussian about its unit embedding with the variance
    of :func:`gaussian_on_sphere`, and ranking stays that of the frozen model. A class of its own with keep_mean = False
    learns the direction again, as published: a text is that Gaussian itself, and the ranking is another one.

    Paper: Ju et al., "Exploiting the asymmetric uncertainty structure of pre-trained VLMs on the unit hypersphere",
    2025.
    """

    name = "asymvlm"
    summary = "1 / kappa of a text, the inverse concentration on the sphere; images have none"
    sides = ("text",)
    published: ClassVar[AdapterTraining] = AdapterTraining((1024, 1024, 1024), 200, 2048, 1e-2, "sgd", 5e-4)
    density: ClassVar[Density] = "vmf"
    keep_mean: ClassVar[bool] = True

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0, training: AdapterTraining | None = None) -> Self:
        """Train the text network on the pairs."""
        training = training or cls.default
        images, texts = unit(pairs.images).float(), scaled_inputs(pairs.texts).float()
        temperature = nn.Parameter(torch.ones((), device=texts.device))

        def build(side: Side) -> nn.Module:
            d_out, start = (1, _FIRST_LOG_KAPPA) if cls.keep_mean else (pairs.d, None)
            return mlp(pairs.d, training.widths, d_out, start=start)

        def loss(networks: Networks, batches: PairBatches, rows: Tensor) -> Tensor:
            i, t, match = batches.items(rows)
            direction, kappa = _concentration(networks["text"], texts[t])
            return asymvlm_loss(log_likelihoods(images[i], direction, kappa, cls.density), match, temperature)

        return cls(cls.train(pairs, build, loss, seed=seed, training=training, parameters=[temperature]))

    @torch.no_grad()
    def concentration(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """((n, d) directions, (n,) concentrations) of texts. x (n, d)."""
        return _concentration(self.networks["text"], self.inputs(x))

    def variance(self, side: Side, x: Tensor) -> Tensor:
        """See :meth:`AdapterMethod.variance`."""
        return self.embed(side, x).var

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed` and the class; variances in squared units of unit embeddings."""
        if side == "image":
            return GaussianEmbedding.point(unit(x))
        direction, kappa = self.concentration(x)
        learnt = gaussian_on_sphere(direction, kappa, self.density)
        return GaussianEmbedding(unit(x).to(kappa.dtype), learnt.log_var) if self.keep_mean else learnt

    def uncertainty(self, side: Side, x: Tensor, gallery: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; 1 / kappa of texts."""
        return self.concentration(x)[1].reciprocal()


def _concentration(network: nn.Module, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """((n, d) directions, (n,) concentrations) of scaled text embeddings; a network of one output gives ln kappa."""
    out: Tensor = network(scaled)
    if out.shape[1] > 1:
        return direction_and_kappa(out)
    return functional.normalize(scaled, dim=1), out.squeeze(1).exp().clamp_min(KAPPA_FLOOR)
