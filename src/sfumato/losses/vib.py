"""The variational information bottleneck term: it keeps variances from collapsing to 0."""

from torch import Tensor

from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.losses.base import PairShare


def vib_loss(x: GaussianEmbedding) -> Tensor:
    r"""KL divergence to the standard normal, averaged over embeddings and dimensions.

        vib = -1/2 mean(1 + log_var - mean^2 - exp(log_var))

    The divergence KL(x || N(0, I)) sums over d; this divides it by d, as the published code does.

    Args:
        x: (n, d) embeddings with positive variances; infinite for points.

    Returns:
        () value >= 0 in nats per dimension.

    Example:
        >>> vib_loss(GaussianEmbedding(torch.ones(1, 4), torch.zeros(1, 4)))
        tensor(0.5000)

    Paper: Chun 2024, section 2.3 (Oh et al., "Modeling uncertainty with hedged instance embedding", 2019).
    """
    return vib_sums(x).mean() / x.d


def vib_sums(x: GaussianEmbedding) -> Tensor:
    """(n,) KL divergences of the embeddings to the standard normal, in nats."""
    dtype = accumulation_dtype(x.dtype)
    mean, log_var = x.mean.to(dtype), x.log_var.to(dtype)
    return (mean.square() + log_var.expm1() - log_var).sum(-1) / 2


def vib_of_share(share: PairShare) -> Tensor:
    """() what a share adds to the sum of :func:`vib_loss` of the batch's images and of its texts."""
    image = vib_sums(share.image).sum() / (share.images.n * share.images.d)
    return image + vib_sums(share.text).sum() / (share.texts.n * share.texts.d)
