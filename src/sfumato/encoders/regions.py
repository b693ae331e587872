"""Region features: a reader that leaves them on disk, and an encoder that reasons over the graph of a picture's regions.

Paper: Li et al., "Visual Semantic Reasoning for Image-Text Matching" (VSRN), ICCV 2019; its log variances: Pishdad et al.,
"Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations".
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from sfumato.data.augment import drop_tokens
from sfumato.data.region_features import regions_from_bytes, regions_to_bytes
from sfumato.encoders.dual import DualEncoder
from sfumato.encoders.features import Inputs, RaggedStore, TokenFeatures
from sfumato.encoders.processors import Item, OnError, Progress


class RegionStore:
    """Region features that stay where they are: a batch reads its items only.

    Args:
        items: for each picture, a function that returns the bytes of its .npy file; called every time it is needed.
        channels: c of the features.
    """

    def __init__(self, items: Sequence[Item], channels: int) -> None:
        self.items, self.channels = items, channels

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: np.ndarray) -> Inputs:
        """The (n, r, c) features at (n,) positions, padded with 0 to the most regions of the batch, and their (n, r) mask.

        Raises:
            OSError: an item can no longer be read; the message names its position.
        """
        found = []
        for position in index.tolist():
            try:
                found.append(regions_from_bytes(_bytes(self.items[position]), self.channels))
            except (ValueError, OSError) as error:
                raise OSError(
                    f"the features at position {position} can no longer be read: {error}. They could when the data were"
                    " checked; has the file changed, or its disk gone?"
                ) from error
        return stacked(found, self.channels).batch(np.arange(len(found)))


class RegionProcessor:
    """Checks region features once and leaves them where they are, to be read batch by batch.

    Args:
        channels: c of the features.
    """

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[RegionStore, np.ndarray]:
        """See :class:`sfumato.encoders.processors.Processor`; every item is read once, and none is kept."""
        kept = []
        for position, item in enumerate(items):
            try:
                regions_from_bytes(_bytes(item), self.channels)
                kept.append(position)
            except (ValueError, OSError) as error:
                if on_error is None:
                    raise
                on_error(position, error)
            if progress:
                progress(1)
        return RegionStore([items[i] for i in kept], self.channels), np.array(kept, dtype=np.int64)


def stacked(features: Sequence[np.ndarray], channels: int) -> RaggedStore:
    """n arrays of (r, c) features, r as it comes -> a store of them in memory."""
    lengths = np.array([len(f) for f in features], dtype=np.int64)
    rows = np.concatenate(features) if len(features) else np.empty((0, channels), np.float32)
    return RaggedStore(rows, np.cumsum(lengths) - lengths, lengths)


class GraphLayer(nn.Module):
    r"""A residual layer of reasoning between the regions of a picture.

        relation_ij = <theta(v_i), phi(v_j)> / r,    v_i <- v_i + BatchNorm(out(sum_j relation_ij g(v_j)))

    r counts the regions that are there; what the mask hides has no influence, on the batch statistics neither. A single region has
    no statistics: while training it is normalised by the running ones, and these stay as they are. The weight and bias
    of the norm start at 0, as in the released code, so that the layer starts as the identity.

    Args:
        width: channels of v and of theta, phi and g.

    Paper: Li et al., ICCV 2019, equations 1 and 2. The relations have no softmax, in the paper as in the code.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        nn.init.zeros_(self.norm.weight)

    def forward(self, regions: Tensor, mask: Tensor) -> Tensor:
        """(n, r, width) regions and their (n, r) mask -> (n, r, width); what is masked stays as it was."""
        count = mask.sum(1).to(regions.dtype).view(-1, 1, 1)
        relation = self.theta(regions) @ self.phi(regions).transpose(1, 2) / count
        moved = self.out(relation.masked_fill(~mask.unsqueeze(1), 0) @ self.g(regions))
        normal = self._normalised(moved[mask])
        return regions + torch.zeros_like(moved, dtype=normal.dtype).index_put((mask,), normal)

    def _normalised(self, rows: Tensor) -> Tensor:
        norm = self.norm
        if len(rows) != 1:
            return norm(rows)  # type: ignore[no-any-return]
        return functional.batch_norm(rows, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)


class RegionReasoning(nn.Module):
    """A linear map of every region to unit length, layers of the graph, unit length again, and if wanted a GRU that reads them all.

    Args:
        channels: c of the features.
        width: of everything that follows.
        layers: of the graph.
        recurrent: end in the last state of a GRU over the regions in their order; otherwise in the regions.
    """

    def __init__(self, channels: int, width: int, *, layers: int, recurrent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, width)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.graph = nn.ModuleList(GraphLayer(width) for _ in range(layers))
        self.gru = nn.GRU(width, width, batch_first=True) if recurrent else None

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """(n, r, c) features and their (n, r) mask -> (n, r, width), or (n, 1, width) from the GRU."""
        regions = functional.normalize(self.linear(features), dim=-1)
        for layer in self.graph:
            regions = layer(regions, mask)
        regions = functional.normalize(regions, dim=-1)
        if self.gru is None:
            return regions
        # What is there comes first, in its order: the mask may have holes.
        order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        regions = regions.gather(1, order.unsqueeze(-1).expand_as(regions))
        packed = pack_padded_sequence(regions, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        last: Tensor = self.gru(packed)[1][-1]
        return last.unsqueeze(1)


class RegionEncoder(nn.Module):
    """The image side of VSRN, a point or a Gaussian, or nothing but the regions themselves: (n, r, c) -> token features.

    Without layers and without the GRU the regions go to the head as they are, as in the region branch of VSE-infinity.

    Args:
        channels: c of the features.
        width: of the layers.
        layers: of the graph.
        recurrent: end in the last state of a GRU.
        variance: the log variance has all of these layers for itself, without sharing; else it starts from the mean's.
        dropout: share of the features dropped while training.
        region_dropout: rate of SizeAugment: regions dropped while training, see :func:`~sfumato.data.augment.drop_tokens`.

    Attributes:
        resting: beginnings of the names of parameters that rest while the image network does: none, for nothing is pre-trained.
    """

    resting: tuple[str, ...] = ()

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        layers: int = 4,
        recurrent: bool = True,
        variance: bool = False,
        dropout: float = 0.0,
        region_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        plain = not (layers or recurrent)
        self.recurrent, self.region_dropout = recurrent, region_dropout
        self.channels = channels if plain else width

        def layers_of_its_own() -> RegionReasoning:
            return RegionReasoning(channels, width, layers=layers, recurrent=recurrent)

        self.mean = None if plain else layers_of_its_own()
        self.variance_layers = layers_of_its_own() if variance and not plain else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features, and where they are still regions their mask."""
        mask = inputs.mask
        if mask is None:
            mask = torch.ones(inputs.values.shape[:2], dtype=torch.bool, device=inputs.values.device)
        if self.training and self.region_dropout:
            mask = drop_tokens(mask, rate=self.region_dropout)
        features = self.dropout(inputs.values)
        if self.mean is None:
            return TokenFeatures(features, mask)
        mean = self.mean(features, mask)
        log_var = None if self.variance_layers is None else self.variance_layers(features, mask)
        return TokenFeatures(mean, None if self.recurrent else mask, log_var)


def uses_regions(model: DualEncoder) -> bool:
    """Whether a model's images are region features, so that no picture can be given to it, nor shown."""
    return isinstance(model.image.processor, RegionProcessor)


def blank_features(model: DualEncoder) -> bytes | None:
    """Features of a single region of zeros, for a model that reads such; None for others."""
    processor = model.image.processor
    return (
        regions_to_bytes(np.zeros((1, processor.channels), np.float32))
        if isinstance(processor, RegionProcessor)
        else None
    )


def _bytes(item: Item) -> bytes:
    data = item()
    return data if isinstance(data, bytes) else data.encode()
