"""Encoders of ProLIP: an additional token [UNC], whose last features give the log variance, replaces variance blocks.

The transformers below are those of :mod:`sfumato.encoders.clip`, built without variance blocks. A token's embedding and
its position code are only used as a sum, so an extra token is one vector here, and its position in the sequence has no
effect.

The released weights were trained by code that differs from its paper in two places: the image mean passes the last norm
twice, and the text's log variance is a linear map of the projected text mean, with or without [UNC]. ``released=True``
does the same, for these weights only. Paper: Chun et al., "Probabilistic Language-Image Pre-Training", ICLR 2025, arXiv
2410.18857.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sfumato.encoders.clip_transformers import ClipImageEncoder, ClipTextEncoder
from sfumato.encoders.encoder_protocol import EncoderModule
from sfumato.encoders.features import Inputs, TokenFeatures


class _UncTokenEncoder(EncoderModule):
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
        """See :class:`~sfumato.encoders.encoder_protocol.Encoder`."""
        return self.encoder.blocks_from_top(parameter.removeprefix("encoder."))

    @property
    def description(self) -> dict[str, Any]:
        """JSON values that rebuild the encoder below without weights, see :mod:`sfumato.encoders.clip`."""
        return self.encoder.description


class UncTokenImageEncoder(_UncTokenEncoder):
    """A vision transformer with an [UNC] token: (n, 3, s, s) pixels -> features for mean and log variance.

    The mean's features are the class token (CLIP's only) and the patches: a head with pooling "first" takes the class
    token, as published. The features of the log variance are the single [UNC] token, which no pooling changes.

    Args:
        encoder: built with ``variance_blocks=0``, and ``final_norm=True`` as published; its layers are taken over.
        released: pass the mean's features through the last norm twice, as the released weights expect.

    Raises:
        ValueError: the encoder has variance blocks.
    """

    encoder: ClipImageEncoder

    def __init__(self, encoder: ClipImageEncoder, *, released: bool = False) -> None:
        super().__init__(encoder, released)
        self.size = encoder.size

    def forward(self, inputs: Inputs, *, patches: Tensor | None = None) -> TokenFeatures:
        """Token features without a mask.

        Args:
            inputs: n images.
            patches: (k,) numbers of the patches to use, row by row from 0; the others are left out. All if None.

        Returns:
            Features (n, t, c) for the mean and (n, 1, c) for the log variance.
        """
        embedded = self.encoder.embed(inputs)
        if patches is not None:
            before = self.encoder.embeddings.num_positions - self.encoder.embeddings.num_patches
            embedded = torch.cat([embedded[:, :before], embedded[:, before:][:, patches]], 1)
        unc = self.variance_token.expand(len(embedded), 1, -1)
        tokens = self.encoder.tokens(torch.cat([unc, embedded], 1), None).mean
        unc, mean = tokens[:, :1], tokens[:, 1:]
        return TokenFeatures(self.encoder.norm_out(mean) if self.released else mean, None, unc)


class UncTokenTextEncoder(_UncTokenEncoder):
    """A text transformer with an [UNC] token after the text's own tokens: (n, t) token ids -> token features.

    Args:
        encoder: built with ``variance_blocks=0``; its layers are taken over.
        class_token: append a class token after [UNC], whose features alone are the mean's, (n, 1, c), as published.
            Without one the mean's features are the text's tokens: a head with pooling "last" takes CLIP's end token.
        causal: each token attends only to the tokens before it, so that [UNC] sees the text but not the other way
            round. None: as the encoder was pre-trained.
        released: as the released weights expect: a class token, every token sees all of them, padding included, and the
            log variance has no features of its own. Texts must come padded to the full length then, all of it in the
            mask.

    Raises:
        ValueError: the encoder has variance blocks.
    """

    encoder: ClipTextEncoder

    def __init__(
        self,
        encoder: ClipTextEncoder,
        *,
        class_token: bool = False,
        causal: bool | None = None,
        released: bool = False,
    ) -> None:
        super().__init__(encoder, released)
        self.causal = False if released else encoder.causal if causal is None else causal
        self.max_tokens = encoder.max_tokens
        self.class_token = (
            nn.Parameter(torch.randn(self.channels) * self.channels**-0.5) if class_token or released else None
        )

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of texts.

        Args:
            inputs: (n, t) token ids and their mask.

        Returns:
            Features for the mean, (n, t, c) of the text with the mask of the inputs, or (n, 1, c) of the class token;
            and (n, 1, c) for the log variance.

        Raises:
            ValueError: released, and the texts do not have the full length.
        """
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
        if self.class_token is not None:
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
