"""Eight more estimators of uncertainty of the papers, beside those of the package.

Importing this module registers them: `sfumato trust RUN --details --import papers/uncertainty/estimators.py` measures
all, and so do the studies here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sfumato.evaluation.estimators import ESTIMATORS as ESTIMATORS
from sfumato.evaluation.estimators import NEAREST, Block, Estimator, entropy, register_estimator
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.contrastive import inclusion_test, log_inclusion
from sfumato.matching import match_logit
from sfumato.reports.tables import WORDS

WORDS |= {
    "sample_spread": "sample distance",
    "self_mismatch": "mismatch with itself",
    "match_entropy_top10": "entropy, 10 nearest",
    "knn_distance": "distance to 10 items",
    "inclusion": "includes its hits",
    "not_included": "outside of its hits",
}

N_SAMPLES = 8
"""Samples per query of the sampled estimators, as in PCME++'s appendix A.3."""


def sample_distances(block: Block) -> Tensor:
    """(b, p) squared distances between all p pairs of N_SAMPLES samples of each query.

    All queries share the same noise. Two queries therefore differ only by their variances, and the size of a block does
    not change the result.
    """
    generator = torch.Generator().manual_seed(block.seed)
    noise = torch.randn(N_SAMPLES, block.queries.d, generator=generator).to(block.queries.device)
    first, second = torch.triu_indices(N_SAMPLES, N_SAMPLES, 1, device=noise.device)
    return block.queries.var.float() @ (noise[first] - noise[second]).square().T


def mean_over_nearest(block: Block, function: Callable[[GaussianEmbedding, GaussianEmbedding], Tensor]) -> Tensor:
    """The mean of a function of (item, query) over the nearest items and over dimensions. Returns (b,)."""
    index = block.nearest[1]
    k = index.shape[1]
    rows = torch.arange(len(index), device=index.device).repeat_interleave(k)
    return function(block.gallery[index.flatten()], block.queries[rows]).mean(1).view(-1, k).mean(1)


def _self_mismatch(block: Block) -> Tensor:
    squared = sample_distances(block)
    distance = squared.sqrt() if block.matching.distance == "average_l2" else squared
    return torch.sigmoid(-match_logit(distance.double(), block.matching.logit_scale, block.matching.logit_bias)).mean(1)


def _match_entropy_top10(block: Block) -> Tensor:
    return entropy(block.nearest_logit)


MORE: dict[str, Estimator] = {
    estimator.name: register_estimator(estimator)
    for estimator in (
        Estimator(
            "log_det",
            "sum of the query's log variances, the log of its squared volume (Pishdad et al., 3.3)",
            "aleatoric", "n d", lambda block: block.queries.log_det, needs_gallery=False,
        ),
        Estimator(
            "geometric_std",
            "geometric mean of the query's standard deviations (Chun et al. 2021, 3.2.1); same order as log_det",
            "aleatoric", "n d", lambda block: block.queries.geometric_std, needs_gallery=False,
        ),
        Estimator(
            "sample_spread",
            f"mean distance between two of {N_SAMPLES} samples of the query",
            "aleatoric", f"n d {N_SAMPLES * (N_SAMPLES - 1) // 2}, no sample is stored",
            lambda block: sample_distances(block).sqrt().mean(1),
            needs_gallery=False,
        ),
        Estimator(
            "self_mismatch",
            f"mean probability that two of {N_SAMPLES} samples of the query do not match (PCME)",
            "aleatoric", "as sample_spread", _self_mismatch, needs_gallery=False,
        ),
        Estimator(
            "match_entropy_top10",
            f"entropy, in nats, of the softmax of the match logits over the {NEAREST} nearest items",
            "both", f"n m for the best {NEAREST}", _match_entropy_top10,
        ),
        Estimator(
            "knn_distance",
            f"mean distance to the {NEAREST} nearest items",
            "epistemic", f"n m for the best {NEAREST}", lambda block: block.nearest[0].mean(1),
        ),
        Estimator(
            "inclusion",
            f"log inclusion of the {NEAREST} nearest items in the query minus that of the query in them (ProLIP)",
            "aleatoric", f"n d {NEAREST}", lambda block: mean_over_nearest(block, inclusion_test), needs_variance=True,
        ),
        Estimator(
            "not_included",
            f"negated mean log inclusion of the query in its {NEAREST} nearest items: high if none covers it",
            "epistemic", f"n d {NEAREST}",
            lambda block: -mean_over_nearest(block, lambda item, query: log_inclusion(query, item)),
            needs_variance=True,
        ),
    )
}  # fmt: skip
"""The eight by name."""
