r"""AsymVLM: texts as von Mises-Fisher distributions on the unit sphere, images as points.

A network on text embeddings gives a concentration kappa; the direction mu stays that of the frozen text, where the
published network learns it again and so changes the ranking. A text matches an image by the likelihood of the image,
log p(x) = kappa mu . x + ln c(kappa). Images have no uncertainty.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from papers.posthoc.adapters import AdapterMethod, AdapterTraining, Networks, PairBatches, mlp, scaled_inputs
from papers.posthoc.method import FrozenPairs, unit
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side

KAPPA_FLOOR = 1e-3
"""Smallest concentration."""

_FIRST_LOG_KAPPA = 4.6  # kappa 100, the factor of the cosine in CLIP's logits

_TERMS = 512


def log_normaliser(kappa: Tensor, d: int) -> Tensor:
    r"""ln c(kappa) up to a constant: the approximation of the released code, with r = (d - 1) / 2 and r' = (d + 1) / 2:

        r/2 log(r + sqrt(r^2 + k^2)) - sqrt(r^2 + k^2)/2 + r/2 log(r + sqrt(r'^2 + k^2)) - sqrt(r'^2 + k^2)/2

    It exceeds the exact value by a constant within 0.1, for kappa up to 3000 and d from 10 to 768.

    Paper: Ju et al., "Exploiting the asymmetric uncertainty structure of pre-trained VLMs on the unit hypersphere",
    2025 (AsymVLM).
    """
    r = (d - 1) / 2
    near, far = ((x * x + kappa.square()).sqrt() for x in (r, r + 1))
    return r / 2 * ((r + near).log() + (r + far).log()) - (near + far) / 2


def mean_length(kappa: Tensor, d: int) -> Tensor:
    r"""The length R of the mean of the distribution; E ||X - mean||^2 = 1 - R^2.

    I_{d/2}(kappa) / I_{d/2-1}(kappa), by its continued fraction.
    """
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


def log_likelihoods(points: Tensor, direction: Tensor, kappa: Tensor) -> Tensor:
    """Log likelihoods of all points under all distributions. points (n, d), direction (m, d), kappa (m,) -> (n, m)."""
    return points @ direction.T * kappa + log_normaliser(kappa, points.shape[1])


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

    A text is the Gaussian about its unit embedding with total variance 1 - R^2, that of the distribution about its own
    mean; R is its mean length. Ranking stays that of the frozen model.

    Paper: Ju et al., "Exploiting the asymmetric uncertainty structure of pre-trained VLMs on the unit hypersphere",
    2025.
    """

    name = "asymvlm"
    summary = "1 / kappa of a text, the inverse concentration on the sphere; images have none"
    sides = ("text",)
    published: ClassVar[AdapterTraining] = AdapterTraining((1024, 1024, 1024), 200, 2048, 1e-2, "sgd", 5e-4)

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0, training: AdapterTraining | None = None) -> Self:
        """Train the text network on the pairs."""
        training = training or cls.default
        images, texts = unit(pairs.images).float(), scaled_inputs(pairs.texts).float()
        temperature = nn.Parameter(torch.ones((), device=texts.device))

        def build(side: Side) -> nn.Module:
            return mlp(pairs.d, training.widths, 1, start=_FIRST_LOG_KAPPA)

        def loss(networks: Networks, batches: PairBatches, rows: Tensor) -> Tensor:
            i, t, match = batches.items(rows)
            direction, kappa = functional.normalize(texts[t], dim=1), _concentration(networks["text"], texts[t])
            return asymvlm_loss(log_likelihoods(images[i], direction, kappa), match, temperature)

        return cls(cls.train(pairs, build, loss, seed=seed, training=training, parameters=[temperature]))

    @torch.no_grad()
    def concentration(self, x: Tensor) -> Tensor:
        """(n,) concentrations of texts. x (n, d)."""
        return _concentration(self.networks["text"], self.inputs(x))

    def variance(self, side: Side, x: Tensor) -> Tensor:
        """See :meth:`AdapterMethod.variance`."""
        return self.embed(side, x).var

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed` and the class; variances in squared units of unit embeddings."""
        if side == "image":
            return GaussianEmbedding.point(unit(x))
        kappa = self.concentration(x)
        length = mean_length(kappa, x.shape[1]).unsqueeze(1)
        log_var = ((1 - length.square()) / x.shape[1]).log().expand_as(x)
        return GaussianEmbedding(unit(x).to(kappa.dtype), log_var.to(kappa.dtype))

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; 1 / kappa of texts."""
        return self.concentration(queries).reciprocal()


def _concentration(network: nn.Module, scaled: Tensor) -> Tensor:
    """(n,) concentrations of scaled text embeddings."""
    concentration: Tensor = network(scaled)
    return concentration.squeeze(1).exp().clamp_min(KAPPA_FLOOR)
