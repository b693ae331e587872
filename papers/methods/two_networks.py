"""Two networks in one model, on embeddings of any model: heads of their own, their embeddings side by side.

    model.identity=true model.dim=1024 model.hidden=0 model.image={kind="two_networks"} model.text={kind="two_networks"}

NCR trains each by what the other thinks of the pairs. The distance of the whole embeddings, by which evaluation and
search rank, is the mean of the two networks' distances.
"""

from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import nn

from sfumato.encoders.encoder_protocol import BuildContext, Encoder, Inputs, Processor, Store, TokenFeatures
from sfumato.encoders.feature_rows import EmbeddingImageConfig, EmbeddingTextConfig, FeatureInput, build_embeddings
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.towers import register_encoder


class TwoNetworksImage(EmbeddingImageConfig):
    """Images that another model has embedded."""

    kind: Literal["two_networks"] = "two_networks"  # type: ignore[assignment]
    hidden: PositiveInt = Field(1024, description="width of the hidden layer of each network")


class TwoNetworksText(EmbeddingTextConfig):
    """Texts that another model has embedded."""

    kind: Literal["two_networks"] = "two_networks"  # type: ignore[assignment]
    hidden: PositiveInt = Field(1024, description="width of the hidden layer of each network")


class TwoNetworks(Encoder):
    """One token of two unit vectors; nothing but the features below is shared."""

    def __init__(self, features: FeatureInput, dim: int, hidden: int) -> None:
        super().__init__()
        self.features, self.channels = features, 2 * dim
        options = HeadOptions(pooling="average", hidden=hidden, variance=False)
        self.networks = nn.ModuleList(GaussianHead(features.channels, dim, options) for _ in range(2))

    @property
    def description(self) -> dict[str, Any] | None:
        return self.features.description

    def fit(self, store: Store) -> None:
        self.features.fit(store)

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """The two embeddings as one token. inputs (n, t, c) -> (n, 1, 2 d)."""
        both = torch.cat([network(self.features(inputs)).mean for network in self.networks], dim=1)
        return TokenFeatures(both.unsqueeze(1))


def build(config: Any, context: BuildContext) -> tuple[Processor, Encoder]:
    """Build a side: half of the model's dimensions for each network."""
    processor, features = build_embeddings(config, context)
    return processor, TwoNetworks(features, context.dim // 2, config.hidden)


register_encoder("image", "two_networks", TwoNetworksImage, build)
register_encoder("text", "two_networks", TwoNetworksText, build)
