"""What every loss shares: its result, its interface, and the checks of its inputs. No formula lives here."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor, nn

from sfumato.distances import Distance, get_distance
from sfumato.gaussian import GaussianEmbedding


@dataclass(frozen=True)
class LossOutput:
    """A loss and what it is made of.

    Attributes:
        total: () the number to minimise.
        terms: name -> () weighted term; they sum to total.
        stats: name -> () detached numbers worth logging (counts, scales), no part of the total.
    """

    total: Tensor
    terms: dict[str, Tensor]
    stats: dict[str, Tensor] = field(default_factory=dict)


class MatchLoss(nn.Module, ABC):
    """A loss over a batch of images and texts and the matrix of which pairs match.

    Subclasses hold their learnable logits, if any, and call one pure function.

    Args:
        distance: name in DISTANCES by which images and texts are compared.
    """

    def __init__(self, distance: str) -> None:
        super().__init__()
        self.distance: Distance = get_distance(distance)

    @abstractmethod
    def forward(
        self, image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, *, epoch: int | None = None
    ) -> LossOutput:
        """The loss of a batch.

        Args:
            image: (n, d) embeddings.
            text: (m, d) embeddings.
            match: (n, m) labels in [0, 1], rows are images.
            epoch: 0-based epoch, for losses that change after a warm-up; None means after every warm-up.
        """


def check_match(image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, who: str) -> Tensor:
    """match on the device of the images, after its checks."""
    if match.shape != (image.n, text.n):
        raise ValueError(
            f"{who}: match must have shape (images, texts) = ({image.n}, {text.n}), got {tuple(match.shape)}"
        )
    if image.n == 0 or text.n == 0:
        raise ValueError(f"{who}: got an empty batch of {image.n} images and {text.n} texts")
    if not ((match >= 0) & (match <= 1)).all():
        raise ValueError(
            f"{who}: match must lie in [0, 1], got values from {match.min():.4g} to {match.max():.4g};"
            " labels of -1 and 1 become (match + 1) / 2"
        )
    return match.to(device=image.device)
