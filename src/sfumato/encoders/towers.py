"""The two towers of a model of torch."""

import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn

from sfumato.data.transforms import drop_tokens
from sfumato.encoders import feature_rows
from sfumato.encoders.encoder_protocol import BaseTower, BuildContext, Inputs, Processor, TwoTowers
from sfumato.encoders.frozen import FrozenImageConfig, FrozenProcessor, FrozenTextConfig, frozen_processor
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.scratch import Encoder
from sfumato.gaussian import GaussianEmbedding


def build_frozen(
    config: FrozenImageConfig | FrozenTextConfig, context: BuildContext
) -> tuple[FrozenProcessor, feature_rows.FeatureInput]:
    """Build a side of kind "frozen". Returns (processor, encoder)."""
    processor = frozen_processor(config, context.cache)
    channels = processor.backbone.channels
    return processor, feature_rows.FeatureInput(channels, context.feature_dropout, whiten=config.whiten)


class Tower(nn.Module, BaseTower):
    """One side of a model of torch: a processor of raw items, an encoder and a Gaussian head."""

    def __init__(
        self, processor: Processor, encoder: Encoder, head: GaussianHead, *, token_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.processor, self.encoder, self.head = processor, encoder, head
        self.token_dropout, self.dim = token_dropout, head.dim
        self.variances, self.has_offset = head.log_var is not None, head.offset is not None

    @property
    def normalize(self) -> bool:  # type: ignore[override]
        """Whether means have unit length."""
        return self.head.normalize

    @property
    def device(self) -> torch.device:
        """The device of its weights; the CPU if it has none."""
        return self.new_zeros(0).device

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros on the device of the weights, in their dtype; without weights in float32 on the CPU."""
        return next(itertools.chain(self.parameters(), self.buffers()), torch.empty(0)).new_zeros(shape)

    def forward(self, inputs: Inputs) -> GaussianEmbedding:
        """Embed a batch. Returns (n, d)."""
        tokens = self.encoder(inputs)
        if self.training and self.token_dropout:
            present = tokens.mask
            if present is None:
                present = torch.ones(tokens.mean.shape[:2], dtype=torch.bool, device=tokens.mean.device)
            tokens = replace(tokens, mask=drop_tokens(present, rate=self.token_dropout))
        return self.head(tokens.float())

    @torch.no_grad()
    def batch(self, inputs: Inputs) -> GaussianEmbedding:
        """Embed a batch in evaluation mode, on the CPU; the previous mode is restored afterwards."""
        training = self.training
        self.eval()
        found: GaussianEmbedding = self(inputs.to(self.device)).to("cpu")
        self.train(training)
        return found


class DualEncoder(nn.Module, TwoTowers):
    """The two towers of a model of torch."""

    image: Tower
    text: Tower
    digest = ""

    def __init__(self, image: Tower, text: Tower) -> None:
        super().__init__()
        self.image, self.text = image, text

    def forward(self, images: Inputs, texts: Inputs) -> tuple[GaussianEmbedding, GaussianEmbedding]:
        """Embed both sides of a batch.

        Args:
            images: n images.
            texts: m texts.

        Returns:
            (n, d) embeddings of the images and (m, d) embeddings of the texts.
        """
        return self.image(images), self.text(texts)
