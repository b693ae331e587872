"""Features of another model as inputs: regions of images, with an encoder that reasons over them, and embeddings.

Paper: Li et al., "Visual Semantic Reasoning for Image-Text Matching" (VSRN), ICCV 2019; its log variances: Pishdad et
al., "Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations". Of embeddings only the heads are
trained; the number of their channels is that of the data, and a run stores it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from sfumato.data.transforms import drop_regions
from sfumato.encoders import encoder_protocol as protocol
from sfumato.encoders.encoder_protocol import Item, OnError, Progress, Read
from sfumato.encoders.frozen import FrozenImageConfig, FrozenTextConfig, frozen_processor
from sfumato.encoders.heads import TokenFeatures
from sfumato.encoders.processors import EmbeddingProcessor, FeatureProcessor
from sfumato.encoders.scratch import Built, Encoder

_FITTED, _BLOCK = 50_000, 1024
"""Largest number of items that fit a whitening, and of those read at a time."""


_LARGEST_COPY = 2 * 2**30
"""Bytes."""


_SMALLEST = 1e-8
"""Variance below which a channel or component counts as constant."""


class FeatureInput(Encoder):
    """The encoder after a frozen backbone: whitening and dropout of its features, without trained parameters."""

    centre: torch.Tensor
    projection: torch.Tensor

    def __init__(self, channels: int, dropout: float, *, whiten: int | None = None) -> None:
        super().__init__()
        if whiten is not None and whiten > channels:
            raise ValueError(f"whiten={whiten}: the features have {channels} channels; give at most as many, or 0")
        self.channels, self._received, self._whiten = whiten or channels, channels, whiten
        if whiten is not None:
            self.register_buffer("centre", torch.zeros(channels))
            self.register_buffer("projection", torch.ones(channels) if whiten == 0 else torch.eye(channels)[:, :whiten])
        self.dropout = nn.Dropout(dropout)

    @torch.no_grad()
    def fit(self, store: protocol.Store) -> None:
        """Fit the whitening, on at most 50,000 items."""
        if self._whiten is None:
            return
        chosen = np.unique(np.linspace(0, len(store) - 1, min(len(store), _FITTED)).astype(np.int64))
        count, total = 0, torch.zeros(self._received, dtype=torch.float64)
        products = torch.zeros((self._received,) * (2 if self._whiten else 1), dtype=torch.float64)
        for start in range(0, len(chosen), _BLOCK):
            inputs = store.batch(chosen[start : start + _BLOCK]).to("cpu")
            tokens = inputs.values.flatten(0, 1) if inputs.mask is None else inputs.values[inputs.mask]
            tokens = tokens.double()
            count, total = count + len(tokens), total + tokens.sum(0)
            products += tokens.T @ tokens if self._whiten else tokens.square().sum(0)
        mean = total / count
        if self._whiten:
            values, vectors = torch.linalg.eigh(products / count - mean.outer(mean))
            floor = (values[-1] * 1e-6).clamp_min(_SMALLEST)
            projection = vectors[:, -self._whiten :] / values[-self._whiten :].maximum(floor).sqrt()
        else:
            variance = products / count - mean.square()
            projection = variance.maximum((variance.max() * 1e-6).clamp_min(_SMALLEST)).rsqrt()
        self.centre.copy_(mean)
        self.projection.copy_(projection)

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
        """The features of the backbone. inputs (n, t, c) -> (n, t, channels)."""
        values = inputs.values
        if self._whiten is not None and values.shape[-1] == self._received:
            values = self._whitened(values)
        return TokenFeatures(self.dropout(values), inputs.mask)

    def _whitened(self, values: Tensor) -> Tensor:
        centred = values - self.centre
        return centred @ self.projection if self._whiten else centred * self.projection

    @torch.no_grad()
    def prepared(self, store: protocol.Store) -> protocol.Store:
        """Whitened once instead of at every step."""
        if not self._whiten or self.channels == self._received or not isinstance(store, protocol.RaggedStore):
            return store
        lengths = store.lengths
        if int(lengths.sum()) * self.channels * 2 > _LARGEST_COPY:
            return store
        rows = np.empty((int(lengths.sum()), self.channels), np.float16)
        offsets = np.cumsum(lengths) - lengths
        for start in range(0, len(store), _BLOCK):
            inputs = store.batch(np.arange(start, min(start + _BLOCK, len(store)))).to(self.centre.device)
            whitened = self._whitened(inputs.values)
            part = whitened.flatten(0, 1) if inputs.mask is None else whitened[inputs.mask]
            rows[offsets[start] : offsets[start] + len(part)] = part.half().cpu().numpy()
        return protocol.RaggedStore(rows, offsets, lengths)


class RegionImageConfig(protocol.ImageEncoderConfig):
    """Region features made by another model: VSRN, or VSE-infinity on regions.

    The data are data.source=scan, or a manifest whose images are .npy files.
    """

    from_pixels: ClassVar[bool] = False
    reads_regions: ClassVar[bool] = True
    drops_tokens: ClassVar[bool] = True

    kind: Literal["regions"] = "regions"
    channels: PositiveInt = Field(2048, description="channels of the features")
    width: PositiveInt | None = Field(None, description="channels of the layers above them; model.dim if left out")
    graph_layers: int = Field(4, ge=0, description="number of layers of reasoning between the regions of an image")
    recurrent: bool = True
    """take the last state of a GRU over the regions as the only token; false: model.pooling pools the regions"""
    variance_layers: bool = True
    """use separate graph layers and a separate GRU for the log variance; false: it uses those of the mean"""

    def check(self, section: str) -> None:
        useless = self.changed("width", "variance_layers")
        if useless and not self.graph_layers and not self.recurrent:
            where = f"{section}.graph_layers=0 and recurrent=false, where the regions go to the head unchanged"
            raise ValueError(f"{section}.{max(useless)} has no effect with {where}; leave it out")


class RegionStore:
    """Region features that stay on disk: a batch reads only its own items."""

    def __init__(self, items: Sequence[protocol.Item], processor: "RegionProcessor") -> None:
        self.items, self.processor = items, processor

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: np.ndarray) -> protocol.Inputs:
        """The features at some positions. index (n,) -> (n, r, c)."""
        found = []
        for position in index.tolist():
            try:
                found.append(self.processor.prepare(self.items[position]()))
            except (ValueError, OSError) as error:
                reason = f"the features at position {position} can no longer be read: {error}"
                way = "Check that the file is unchanged and that its disk is mounted"
                raise OSError(f"{reason}. They were readable when the data were checked. {way}") from error
        return self.processor.stack(found).batch(np.arange(len(found)))


class RegionProcessor(FeatureProcessor):
    """Checks region features once and leaves them on disk; each batch is read when it is needed."""

    reads: ClassVar[str] = "region features"

    def read(self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None) -> Read:
        """Every item is read once, and none is kept."""
        kept = protocol.usable(items, lambda _, item: self.prepare(item()), progress=progress, on_error=on_error)
        return RegionStore([items[i] for i in kept], self), kept


class GraphLayer(nn.Module):
    r"""A residual layer of reasoning between the regions of an image.

        relation_ij = <theta(v_i), phi(v_j)> / r,    v_i <- v_i + BatchNorm(out(sum_j relation_ij g(v_j)))

    r is the number of regions that are not masked; masked regions have no influence, including on the batch statistics.
    A single region has no batch statistics: in training it is normalised by the running statistics, which then do not
    change. The weight and bias of the norm start at 0, as in the released code, so that the layer starts as the
    identity.

    Paper: Li et al., ICCV 2019, equations 1 and 2. The relations have no softmax, as in the paper and its code.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        nn.init.zeros_(self.norm.weight)

    def forward(self, regions: Tensor, mask: Tensor) -> Tensor:
        """One layer of reasoning. regions (n, r, width), mask (n, r) -> (n, r, width)."""
        count = mask.sum(1).to(regions.dtype).view(-1, 1, 1)
        relation = self.theta(regions) @ self.phi(regions).transpose(1, 2) / count
        moved = self.out(relation.masked_fill(~mask.unsqueeze(1), 0) @ self.g(regions))
        normal = self._normalised(moved[mask])
        return regions + torch.zeros_like(moved, dtype=normal.dtype).index_put((mask,), normal)

    def _normalised(self, rows: Tensor) -> Tensor:
        norm = self.norm
        if len(rows) != 1:
            return norm(rows)
        return functional.batch_norm(rows, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)


class RegionReasoning(nn.Module):
    """A linear map of every region to unit length, graph layers, unit length again, and if wanted a GRU over them."""

    def __init__(self, channels: int, width: int, *, layers: int, recurrent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, width)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.graph = nn.ModuleList(GraphLayer(width) for _ in range(layers))
        self.gru = nn.GRU(width, width, batch_first=True) if recurrent else None

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Reason over regions. features (n, r, c), mask (n, r) -> (n, r, width)."""
        regions = functional.normalize(self.linear(features), dim=-1)
        for layer in self.graph:
            regions = layer(regions, mask)
        regions = functional.normalize(regions, dim=-1)
        if self.gru is None:
            return regions
        # The mask may have gaps: move the existing regions to the front, in their order.
        order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        regions = regions.gather(1, order.unsqueeze(-1).expand_as(regions))
        packed = pack_padded_sequence(regions, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        return self.gru(packed)[1][-1].unsqueeze(1)


class RegionEncoder(Encoder):
    """The image side of VSRN for points or Gaussians: (n, r, c) -> token features.

    Without layers and without the GRU the regions go to the head unchanged, as in the region branch of VSE-infinity.
    """

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

        def reasoning() -> RegionReasoning:
            return RegionReasoning(channels, width, layers=layers, recurrent=recurrent)

        self.mean = None if plain else reasoning()
        self.variance_layers = reasoning() if variance and not plain else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
        """Token features of region features. inputs (n, r, c) -> (n, r, width)."""
        if (mask := inputs.mask) is None:
            mask = torch.ones(inputs.values.shape[:2], dtype=torch.bool, device=inputs.values.device)
        if self.training and self.region_dropout:
            mask = drop_regions(mask, rate=self.region_dropout)
        features = self.dropout(inputs.values)
        if self.mean is None:
            return TokenFeatures(features, mask)
        mean = self.mean(features, mask)
        log_var = None if self.variance_layers is None else self.variance_layers(features, mask)
        return TokenFeatures(mean, None if self.recurrent else mask, log_var)


def build_regions(config: RegionImageConfig, context: protocol.BuildContext) -> Built:
    """Build the image side of kind "regions". Returns (processor, encoder)."""
    return RegionProcessor(config.channels), RegionEncoder(
        config.channels, config.width or context.dim, layers=config.graph_layers, recurrent=config.recurrent,
        variance=context.variance and config.variance_layers, dropout=context.feature_dropout,
        region_dropout=context.token_dropout,
    )  # fmt: skip


class EmbeddingInput(FeatureInput):
    """The encoder of embeddings: one token each, whitened and with dropout, without trained parameters."""

    @property
    def description(self) -> dict[str, Any]:
        """The number of channels of the data."""
        return {"channels": self._received}


def build_embeddings(config: protocol.EncoderConfig, context: protocol.BuildContext) -> Built:
    """Build a side of kind "embeddings". Returns (processor, encoder)."""
    if context.description is None:
        raise ValueError("an encoder of kind 'embeddings' has the channels of its data; none are given")
    channels = context.description["channels"]
    encoder = EmbeddingInput(channels, context.feature_dropout, whiten=dict(config)["whiten"])
    return EmbeddingProcessor(channels), encoder


def build_frozen(config: FrozenImageConfig | FrozenTextConfig, context: protocol.BuildContext) -> Built:
    """Build a side of kind "frozen". Returns (processor, encoder)."""
    processor = frozen_processor(config, context.cache)
    return processor, FeatureInput(processor.backbone.channels, context.feature_dropout, whiten=config.whiten)
