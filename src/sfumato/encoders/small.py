"""Small encoders that learn from pixels and word pieces on a CPU, in minutes."""

from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn

from sfumato.encoders.features import Inputs


class SmallImageEncoder(nn.Module):
    """A residual network of four stages: (n, 3, s, s) uint8 pixels -> (n, (s/16)^2, 8 w) token features.

    Args:
        width: w, channels of the first stage.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [_convolution(3, width, kernel=5, stride=2)]
        for channels in (width, 2 * width, 4 * width):
            stages += [_convolution(channels, 2 * channels, stride=2), _Residual(2 * channels)]
        self.stages = nn.Sequential(*stages).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.channels = 8 * width

    def forward(self, inputs: Inputs) -> tuple[Tensor, None]:
        """Token features and no mask. float pixels (augmented ones) are taken as they are, in [0, 1]."""
        pixels = inputs.values
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        maps = self.stages((pixels - 0.5).mul(2).contiguous(memory_format=torch.channels_last))
        return maps.flatten(2).transpose(1, 2).float(), None


class SmallTextEncoder(nn.Module):
    """Embedded word pieces and their neighbours: (n, t) ids -> (n, t, w) token features.

    Args:
        vocabulary: number of word pieces; 0 is the unknown one.
        width: w.
        dropout: share of features dropped while training.
    """

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.neighbours = nn.Conv1d(width, width, kernel_size=3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.channels = width

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Token features and the mask."""
        embedded = self.embedding(inputs.values)
        if inputs.mask is not None:
            embedded = embedded * inputs.mask.unsqueeze(-1)
        context = self.neighbours(embedded.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.norm(embedded + nn.functional.gelu(context))), inputs.mask


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Word pieces learnt from texts: lower case, without accents, split at spaces and punctuation.

    Args:
        texts: the training texts.
        vocabulary: largest number of pieces; every single character of the texts is one, so nothing common is unknown.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(sorted(texts), trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Ids of each text, at most max_tokens, at least one (the unknown piece for a text that has none)."""
    return [encoding.ids[:max_tokens] or [0] for encoding in tokenizer.encode_batch(list(texts))]


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            _convolution(channels, channels),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def _convolution(channels_in: int, channels_out: int, *, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )
