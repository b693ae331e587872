"""The kind "clip" as a whole, and ProLIP's [UNC] token before its blocks.

The log variance comes from the output of that token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sfumato.encoders.clip import (
    ClipImageConfig,
    ClipImageEncoder,
    ClipTextConfig,
    ClipTextEncoder,
    clip_image_encoder,
    clip_text_encoder,
)
from sfumato.encoders.encoder_protocol import (
    BuildContext,
    Encoder,
)
from sfumato.encoders.features import Inputs, TokenFeatures
from sfumato.encoders.processors import (
    ImageFileProcessor,
    PixelProcessor,
    TokenProcessor,
)


class _UncTokenEncoder(Encoder):
    """An encoder and the [UNC] token before its blocks."""

    pretrained = True

    encoder: ClipImageEncoder | ClipTextEncoder

    def __init__(self, encoder: ClipImageEncoder | ClipTextEncoder, released: bool) -> None:
        super().__init__()
        if len(encoder.variance_blocks):
            raise ValueError(
                f"{type(self).__name__}: the encoder has {len(encoder.variance_blocks)} variance blocks, expected none:"
                " the [UNC] token replaces them; build it with variance_blocks=0"
            )
        self.encoder, self.released = encoder, released
        self.channels, self.depth = encoder.channels, encoder.depth
        self.variance_token = nn.Parameter(torch.randn(encoder.channels) * encoder.channels**-0.5)

    def blocks_from_top(self, parameter: str) -> int:
        return self.encoder.blocks_from_top(parameter.removeprefix("encoder."))

    @property
    def description(self) -> dict[str, Any]:
        """JSON values that rebuild the encoder below without weights, see :mod:`sfumato.encoders.clip`."""
        return self.encoder.description


class UncTokenImageEncoder(_UncTokenEncoder):
    """A vision transformer with an [UNC] token: (n, 3, s, s) pixels -> features for mean and log variance.

    The mean's features are the class token (CLIP's only) and the patches: a head with pooling "first" takes the class
    token, as published. The features of the log variance are the single [UNC] token, which no pooling changes.
    """

    encoder: ClipImageEncoder

    def __init__(self, encoder: ClipImageEncoder, *, released: bool = False) -> None:
        super().__init__(encoder, released)
        self.size = encoder.size

    def forward(self, inputs: Inputs, *, patches: Tensor | None = None) -> TokenFeatures:
        """Token features without a mask. patches (k,)."""
        embedded = self.encoder.embed(inputs)
        if patches is not None:
            before = self.encoder.embeddings.num_positions - self.encoder.embeddings.num_patches
            embedded = torch.cat([embedded[:, :before], embedded[:, before:][:, patches]], 1)
        unc = self.variance_token.expand(len(embedded), 1, -1)
        tokens = self.encoder.tokens(torch.cat([unc, embedded], 1), None).mean
        unc, mean = tokens[:, :1], tokens[:, 1:]
        return TokenFeatures(self.encoder.norm_out(mean) if self.released else mean, None, unc)


class UncTokenTextEncoder(_UncTokenEncoder):
    """A text transformer with an [UNC] token after the text's own tokens: (n, t) token ids -> token features."""

    encoder: ClipTextEncoder

    def __init__(self, encoder: ClipTextEncoder, *, released: bool = False) -> None:
        super().__init__(encoder, released)
        self.causal, self.max_tokens = encoder.causal and not released, encoder.max_tokens
        self.class_token = nn.Parameter(torch.randn(self.channels) * self.channels**-0.5) if released else None

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of texts. inputs (n, t)."""
        mask = inputs.mask
        if self.released:
            if inputs.values.shape[1] != self.max_tokens or not (mask is None or bool(mask.all())):
                raise ValueError(
                    "UncTokenTextEncoder: the released weights attend to their padding: expected texts padded to"
                    f" {self.max_tokens} tokens, all of them in the mask, got {tuple(inputs.values.shape)}"
                )
            mask = None
        extra = [token for token in (self.variance_token, self.class_token) if token is not None]
        embedded = self.encoder.embeddings(inputs.values)
        embedded = torch.cat([embedded, *(token.expand(len(embedded), 1, -1) for token in extra)], 1)
        tokens = self.encoder.tokens(
            embedded, None, causal=self.causal and mask is None, attention=_attention(mask, len(extra), self.causal)
        ).mean
        text, unc, last = tokens[:, : -len(extra)], tokens[:, -len(extra), None], tokens[:, -1:]
        if self.released:
            return TokenFeatures(last)
        if self.class_token is not None:  # As the paper says it: the log variance from [UNC].
            return TokenFeatures(last, None, unc)
        return TokenFeatures(text, mask, unc)


def _attention(mask: Tensor | None, extra: int, causal: bool) -> Tensor | None:
    """(n, t) mask of the text -> (n, 1, t' or 1, t') bool with the extra tokens at the end, which all may see."""
    if mask is None:
        return None
    seen = torch.nn.functional.pad(mask, (0, extra), value=True)[:, None, None]
    if not causal:
        return seen
    length = seen.shape[-1]
    return seen & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()


def build_clip_image(
    config: ClipImageConfig, context: BuildContext
) -> tuple[PixelProcessor | ImageFileProcessor, ClipImageEncoder | UncTokenImageEncoder]:
    """Build the image side of kind "clip". Returns (processor, encoder)."""
    encoder = clip_image_encoder(config, description=context.description, variance=context.variance)
    processor = (PixelProcessor if config.in_memory else ImageFileProcessor)(encoder.size, fit=config.fit)
    return processor, UncTokenImageEncoder(encoder) if config.variance_token and context.variance else encoder


def build_clip_text(
    config: ClipTextConfig, context: BuildContext
) -> tuple[TokenProcessor, ClipTextEncoder | UncTokenTextEncoder]:
    """Build the text side of kind "clip". Returns (processor, encoder)."""
    tokenizer = context.need_tokenizer(config.kind)
    encoder = clip_text_encoder(
        config, vocabulary=tokenizer.get_vocab_size(), description=context.description, variance=context.variance
    )
    processor = TokenProcessor(tokenizer, min(config.max_tokens or encoder.max_tokens, encoder.max_tokens))
    return processor, UncTokenTextEncoder(encoder) if config.variance_token and context.variance else encoder
