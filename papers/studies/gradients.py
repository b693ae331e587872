"""What a change of each pair's distance does to the losses: figure A.3 of the PCME++ paper."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.contrastive import InfoNCEOptions, infonce_loss
from sfumato.losses.pcmepp import PCMEPPOptions, pcmepp_loss
from sfumato.losses.triplet import TripletOptions, triplet_loss

PAIRS = 8
"""Number of images, and of texts, whose pairs' gradients are compared."""


def study_gradients(*, seed: int, noise: float, scale: float, bias: float) -> dict[str, Any]:
    """Of points near their match: what a change of each pair's distance does to the losses.

    Panel (d): image 2 lies at text 3, an unlisted match, and becomes a pseudo-positive; image 0 is half of image 1.
    `disturbed` counts the pairs of other images whose derivative changes when image 0 is mixed.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.eye(PAIRS, dtype=torch.float64)
    image = text + noise * torch.randn(PAIRS, PAIRS, generator=generator, dtype=torch.float64)
    match = torch.eye(PAIRS, dtype=torch.float64)
    plain = PCMEPPOptions(distance="squared_l2", alpha=0.0, beta=0.0)
    losses: dict[str, Callable[[GaussianEmbedding, GaussianEmbedding, Tensor], Any]] = {
        "triplet, hardest negative": triplet_loss,
        "triplet, all negatives": partial(triplet_loss, options=TripletOptions(mining="sum")),
        "InfoNCE": partial(infonce_loss, options=InfoNCEOptions(), logit_scale=scale),
        "match loss of PCME++": partial(pcmepp_loss, options=plain, logit_scale=scale, logit_bias=bias),
    }
    unlisted, mixed, soft = image.clone(), image.clone(), match.clone()
    unlisted[2], mixed[0], soft[0, :2] = image[3], image[:2].mean(0), 0.5
    pseudo = PCMEPPOptions(distance="squared_l2", alpha=1.0, beta=0.0)

    def gradients(loss: Callable[..., Any], image: Tensor, labels: Tensor) -> Tensor:
        return pair_gradients(lambda x, y: loss(x, y, labels).total, image, text)

    matrices = {name: gradients(loss, image, match) for name, loss in losses.items()}
    changes = {name: gradients(loss, mixed, soft) - matrices[name] for name, loss in losses.items()}
    raised = partial(pcmepp_loss, options=pseudo, logit_scale=scale, logit_bias=bias)
    matrices["pseudo-positive"] = gradients(raised, unlisted, match)
    matrices["mixed image"] = gradients(losses["match loss of PCME++"], mixed, soft)
    return {
        "matrices": {name: matrix.tolist() for name, matrix in matrices.items()},
        "disturbed": {name: int((change[1:].abs() > 1e-14).sum()) for name, change in changes.items()},
    }


def pair_gradients(
    loss: Callable[[GaussianEmbedding, GaussianEmbedding], Tensor], image: Tensor, text: Tensor
) -> Tensor:
    r"""(n, m) derivatives of a loss of points by the squared L2 distance of each pair.

    The gradient of image i is the sum over j of d loss / d distance(i, j) times 2 (image_i - text_j). With m = d texts
    in general position this determines them.
    """
    leaf = image.clone().requires_grad_()
    loss(GaussianEmbedding.point(leaf), GaussianEmbedding.point(text)).backward()
    assert leaf.grad is not None
    system = 2 * (image.unsqueeze(2) - text.T)  # (n, d, m)
    return torch.linalg.solve(system, leaf.grad)
