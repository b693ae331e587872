"""The PCME++ objective: match loss, pseudo-positives and information bottleneck."""

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOutput, MatchLoss, PairShare, vib_sums
from sfumato.losses.infonce import InfoNCELoss
from sfumato.matching import MatchingLogits, match_logit

VIB_LIMIT = 1e4
"""A bottleneck above this is left out of the step, as in the released code."""


def pseudo_positives(distance: Tensor, match: Tensor) -> Tensor:
    r"""Labels in which whatever is at least as close as a row's own match counts as a match too.

    Row i has its ground truth at the first column g of its largest label; every column j with distance_ij <= distance_ig
    takes that label, the others keep theirs. For the other direction pass the transposes.

    Args:
        distance: (n, m), smaller is closer.
        match: (n, m) labels in [0, 1].

    Returns:
        (n, m) labels >= match, without gradient.

    Paper: Chun 2024, section 2.3. Its pseudo-code compares along the wrong axis; the threshold belongs to the row.
    """
    label, ground_truth = match.detach().max(dim=1, keepdim=True)
    closer = distance.detach() <= distance.detach().gather(1, ground_truth)
    return torch.where(closer, label, match.detach())


def pcmepp_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    *,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    distance: str = "csd",
    alpha: float = 0.1,
    beta: float = 1e-4,
    match_weight: float = 2.0,
    vib_limit: float = VIB_LIMIT,
) -> LossOutput:
    r"""match_weight * match + alpha * (pseudo_i2t + pseudo_t2i) + beta * (vib_image + vib_text).

    The match and pseudo-positive terms are binary cross-entropies of the logits, averaged over all n * m pairs.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1], soft ones welcome.
        logit_scale: a > 0; initially 5 in the paper.
        logit_bias: b; initially 5.
        distance: name of any differentiable distance.
        alpha: weight of the pseudo-positive terms; 0 leaves them out.
        beta: weight of the information bottleneck; 0 leaves it out, as points need.
        match_weight: 2 as in the released code, which counts both directions; the paper prints 1.
        vib_limit: a bottleneck above this is left out of the step.

    Returns:
        Terms "match", "pseudo_positive", "vib"; stats "pseudo_positives_i2t" and "_t2i", the number of labels raised.

    Raises:
        ValueError: shapes do not fit, or the batch is empty.

    Example:
        >>> e = GaussianEmbedding(torch.eye(2), torch.full((2, 2), -9.0))
        >>> pcmepp_loss(e, e, torch.eye(2), logit_scale=5.0, logit_bias=5.0).terms["match"]
        tensor(0.0134)

    Paper: Chun, ICLR 2024, arXiv 2305.18171, Eq. 2 and 3, A.4.
    """
    share = PairShare.whole(image, text, match, "pcmepp_loss")
    counts = _counts(share, beta)
    return _part(
        share,
        counts,
        logit_scale=logit_scale,
        logit_bias=logit_bias,
        distance=distance,
        alpha=alpha,
        beta=beta,
        match_weight=match_weight,
        vib_limit=vib_limit,
    )


def _counts(share: PairShare, beta: float) -> Tensor:
    """Number of pairs, and with a bottleneck the sums of both modalities' divergences, whose size decides if they count."""
    values = [torch.tensor(float(share.match_i2t.numel()))]
    if beta:
        values += [vib_sums(x).detach().double().sum() for x in (share.image, share.text)]
    return torch.stack([value.double().to(share.match_i2t.device) for value in values])


def _part(
    share: PairShare,
    counts: Tensor,
    *,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    distance: str,
    alpha: float,
    beta: float,
    match_weight: float,
    vib_limit: float,
) -> LossOutput:
    i2t, t2i = share.distances(get_distance(distance))
    pairs = counts[0].to(i2t.dtype)
    match_i2t, match_t2i = share.match_i2t.to(i2t.dtype), share.match_t2i.to(i2t.dtype)
    logit = match_logit(i2t, logit_scale, logit_bias)
    terms = {"match": match_weight * _cross_entropy(logit, match_i2t) / pairs}
    stats: dict[str, Tensor] = {}
    if alpha:
        raised_i2t, raised_t2i = pseudo_positives(i2t, match_i2t), pseudo_positives(t2i, match_t2i)
        reverse = match_logit(t2i, logit_scale, logit_bias)
        terms["pseudo_positive"] = (
            alpha * (_cross_entropy(logit, raised_i2t) + _cross_entropy(reverse, raised_t2i)) / pairs
        )
        stats["pseudo_positives_i2t"] = (raised_i2t > match_i2t).sum()
        stats["pseudo_positives_t2i"] = (raised_t2i > match_t2i).sum()
    if beta:
        sizes = [x.n * x.d for x in (share.images, share.texts)]
        ignored = [counts[1 + k] / size > vib_limit for k, size in enumerate(sizes)]
        # What is ignored is not computed either: 0 times an infinite gradient would be NaN.
        kept = [
            vib_sums(GaussianEmbedding(x.mean.masked_fill(skip, 0), x.log_var.masked_fill(skip, 0))).sum() / size
            for x, skip, size in zip((share.image, share.text), ignored, sizes, strict=True)
        ]
        terms["vib"] = beta * (kept[0] + kept[1])
        own_part = share.match_i2t.numel() / pairs  # So that the shares of a batch count it once.
        stats["vib_ignored"] = torch.stack(ignored).sum() * own_part
    return LossOutput(torch.stack(list(terms.values())).sum(), terms, stats)


def _cross_entropy(logit: Tensor, label: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logit, label, reduction="sum")


class PCMEPPLoss(MatchLoss):
    """:func:`pcmepp_loss` with learnable logits, a start epoch for the pseudo-positives, and InfoNCE beside it if wished.

    Args:
        distance, alpha, beta, match_weight: see :func:`pcmepp_loss`.
        logit_scale, logit_bias: initial values of the learnable logits.
        pseudo_positives_from: first epoch (0-based) with the pseudo-positive terms. An untrained model is closer to
            nearly everything than to its truth, and early pseudo-positives flood the labels: docs/concepts/losses.md.
        infonce_weight: of :func:`~sfumato.losses.infonce.infonce_loss` on the means, as in large-scale pre-training; 0: none.
        infonce_scale: initial scale of that loss, which is learnt apart from the match logits.
    """

    def __init__(
        self,
        *,
        distance: str = "csd",
        alpha: float = 0.1,
        beta: float = 1e-4,
        match_weight: float = 2.0,
        logit_scale: float = 5.0,
        logit_bias: float = 5.0,
        pseudo_positives_from: int = 0,
        infonce_weight: float = 0.0,
        infonce_scale: float = 5.0,
    ) -> None:
        super().__init__(distance)
        self.logits = MatchingLogits(logit_scale, logit_bias)
        self.alpha, self.beta, self.match_weight = alpha, beta, match_weight
        self.pseudo_positives_from = pseudo_positives_from
        self.infonce_weight = infonce_weight
        self.infonce = InfoNCELoss(logit_scale=infonce_scale) if infonce_weight else None

    def counts(self, share: PairShare) -> Tensor:
        """See :class:`MatchLoss`."""
        own = _counts(share, self.beta)
        return own if self.infonce is None else torch.cat([self.infonce.counts(share), own])

    def part(self, share: PairShare, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`MatchLoss`."""
        early = epoch is not None and epoch < self.pseudo_positives_from
        output = _part(
            share,
            counts if self.infonce is None else counts[2:],
            logit_scale=self.logits.logit_scale,
            logit_bias=self.logits.logit_bias,
            distance=self.distance.name,
            alpha=0.0 if early else self.alpha,
            beta=self.beta,
            match_weight=self.match_weight,
            vib_limit=VIB_LIMIT,
        )
        if self.infonce is None:
            return output
        beside = self.infonce.part(share, counts[:2], epoch=epoch)
        terms = {f"infonce_{name}": self.infonce_weight * term for name, term in beside.terms.items()}
        return LossOutput(output.total + self.infonce_weight * beside.total, output.terms | terms, output.stats)
