"""PCME++ with von Mises-Fisher densities on the unit sphere, by the same closed-form distance (appendix D).

    sfumato train papers/methods/flickr8k-vmf.toml

The unit mean of an item is the direction, and exp(-log variance, averaged over dimensions) the concentration: where it
is large, the density is that of the isotropic Gaussian. The expected squared distance of two such densities is

    csd = ||A_x x - A_y y||^2 + (1 - A_x^2) + (1 - A_y^2) = 2 - 2 A_x A_y <x, y>,   A in (0, 1) of the concentration

so the distance of an uncertain item to anything is near 2. Laplace densities need no training of their own: csd reads
their variances, 2 scale^2, as it reads those of Gaussians. The same holds for full covariances, of which it reads the
trace alone.
"""

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import sfumato
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOptions, LossOutput, option
from sfumato.losses.pcmepp import PCMEPPOptions, pcmepp_loss

_DENSITIES = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "densities.py"))


@dataclass(frozen=True)
class VonMisesFisherOptions(LossOptions):
    """The keys of section [loss]."""

    distance: str = option("csd_vmf", "csd of von Mises-Fisher densities; also the one that ranks")
    alpha: float = option(0.0, "weight of the pseudo-positives", ge=0)
    logit_scale: float = option(5.0, "initial scale of the match logits; it is learnt", gt=0)
    logit_bias: float = option(5.0, "initial bias of the match logits; it is learnt")


def densities(e: GaussianEmbedding) -> GaussianEmbedding:
    """Gaussians with the csd of the densities that unit means and log variances stand for."""
    concentration = (-e.log_var.double().mean(1)).exp()
    made: GaussianEmbedding = _DENSITIES["von_mises_fisher"](e.mean, concentration)
    return made.to(e.dtype)


def csd_vmf(x: Any, y: Any) -> Tensor:
    """2 - 2 A_x A_y <x, y>; the sides broadcast against each other."""
    lengths = []
    for side in (x, y):
        d, concentration = side.mean.shape[-1], (-side.log_var.double().mean(-1)).exp()
        lengths.append(_DENSITIES["bessel_ratio"](concentration, d).to(side.mean.dtype))
    return 2 - 2 * lengths[0] * lengths[1] * (x.mean * y.mean).sum(-1)


def vmf_loss(image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, options: Any) -> LossOutput:
    """The match loss of PCME++ on the densities. image (n, d), text (m, d), match (n, m)."""
    plain = PCMEPPOptions(distance="csd", alpha=options.alpha, beta=0.0)
    logits = {"logit_scale": options.logit_scale, "logit_bias": options.logit_bias}
    return pcmepp_loss(densities(image), densities(text), match, plain, **logits)


sfumato.register_distance("csd_vmf", csd_vmf, points="refused")
sfumato.register_loss("vmf", vmf_loss, VonMisesFisherOptions)
