"""A loss, a distance and an estimator of one's own; `--import mymethod.py` makes them known."""

from dataclasses import dataclass

from torch.nn import functional

import sfumato
from sfumato.losses import LossOptions, option


@dataclass(frozen=True)
class MarginOptions(LossOptions):
    """The keys of the recipe's section [loss]; distance is one of them."""

    margin: float = option(1.5, "distance from which on a pair that does not match costs nothing", gt=0)
    weight: float = option(0.5, "weight of the margin", ge=0)
    logit_scale: float = option(5.0, "initial scale of the match logits; it is learnt", gt=0)
    logit_bias: float = option(5.0, "initial bias of the match logits; it is learnt")


def margin_loss(image, text, match, options):
    """(n, d) and (m, d) embeddings, (n, m) labels -> the terms of the loss, which sum to it."""
    distance = sfumato.get_distance(options.distance).matrix(image, text)
    logit = options.logit_bias - options.logit_scale * distance
    too_near = (1 - match) * (options.margin - distance).clamp(min=0)
    return {
        "match": functional.binary_cross_entropy_with_logits(logit, match),
        "margin": options.weight * too_near.mean(),
    }


def l1_means(x, y):
    """Sum of the absolute differences of the means; the sides broadcast against each other."""
    return (x.mean - y.mean).abs().sum(-1)


def top2_gap(block):
    """Minus the gap between the two nearest items of each query, (q,): larger is less certain."""
    nearest = block.distance.topk(2, dim=1, largest=False).values
    return nearest[:, 0] - nearest[:, 1]


sfumato.register_loss("margin", margin_loss, MarginOptions)
sfumato.register_distance("l1_means", l1_means)
sfumato.register_estimator(
    sfumato.Estimator("top2_gap", "minus the gap between the two nearest items", "both", "n m", top2_gap)
)
