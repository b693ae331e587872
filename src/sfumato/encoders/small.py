"""Small encoders that learn from pixels and word pieces on a CPU, in minutes."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from sfumato.encoders.features import Inputs, TokenFeatures


class SmallImageEncoder(nn.Module):
    """A residual network of four stages: (n, 3, s, s) uint8 pixels -> (n, (s/16)^2, 8 w) token features.

    Args:
        width: w, channels of the first stage.

    Attributes:
        resting: beginnings of the names of parameters that rest while the image network does: none, for nothing is pre-trained.
    """

    resting: tuple[str, ...] = ()

    def __init__(self, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [_convolution(3, width, kernel=5, stride=2)]
        for channels in (width, 2 * width, 4 * width):
            stages += [_convolution(channels, 2 * channels, stride=2), _Residual(2 * channels)]
        self.stages = nn.Sequential(*stages)
        self.channels = 8 * width

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features without a mask. float pixels (augmented ones) are taken as they are, in [0, 1]."""
        pixels = inputs.values
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        maps = self.stages((pixels - 0.5).mul(2).contiguous(memory_format=torch.channels_last))
        return TokenFeatures(maps.flatten(2).transpose(1, 2).float())


class SmallTextEncoder(nn.Module):
    """Embedded word pieces and their neighbours: (n, t) ids -> (n, t, w) token features.

    Args:
        vocabulary: number of word pieces; 0 is the unknown one.
        width: w.
        dropout: share of features dropped while training.

    Attributes:
        resting: beginnings of the names of parameters that rest while the text network does: none, for nothing is pre-trained.
    """

    resting: tuple[str, ...] = ()

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.neighbours = nn.Conv1d(width, width, kernel_size=3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.channels = width

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features and the mask."""
        embedded = self.embedding(inputs.values)
        if inputs.mask is not None:
            embedded = embedded * inputs.mask.unsqueeze(-1)
        context = self.neighbours(embedded.transpose(1, 2)).transpose(1, 2)
        return TokenFeatures(self.dropout(self.norm(embedded + nn.functional.gelu(context))), inputs.mask)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Word pieces from texts: lower case, without accents, split at spaces and punctuation; the same texts give the same pieces.

    The pieces are all single characters, then the most frequent words, then the most frequent word endings, so that an unseen
    word falls into a known beginning, ending, or characters. (The library's own trainers break ties at random: two equal runs
    would differ.)

    Args:
        texts: the training texts.
        vocabulary: largest number of pieces.

    Raises:
        ValueError: the characters alone are more than that.
    """
    tokenizer = splitting_at_words(Tokenizer(models.WordPiece(unk_token="[UNK]")))
    words = count_words(tokenizer, texts)
    endings: Counter[str] = Counter()
    for word, count in words.items():
        endings.update({f"##{word[i:]}": count for i in range(1, len(word))})
    letters = sorted({letter for word in words for letter in word})
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    if len(pieces) > vocabulary:
        raise ValueError(
            f"train_tokenizer: {len(pieces)} single characters do not fit into {vocabulary} pieces; raise model.text.vocabulary"
        )
    for counts in (words, endings):
        ranked = sorted(
            (piece for piece in counts if counts[piece] > 1 or counts is words), key=lambda p: (-counts[p], p)
        )
        pieces += ranked[: vocabulary - len(pieces)]
    tokenizer.model = models.WordPiece({p: i for i, p in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]")
    return tokenizer


def splitting_at_words(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, reading lower case without accents, split at spaces and punctuation."""
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def count_words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """How often each word, as :func:`splitting_at_words` has it, occurs in the texts."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(w for w, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)))
    return words


def add_begin_and_end(tokenizer: Tokenizer, max_tokens: int) -> Tokenizer:
    """The same tokenizer with a begin and an end token around every text, which it cuts to max_tokens with both of them."""
    tokenizer.add_special_tokens(["[BOS]", "[EOS]"])
    ends = [(piece, tokenizer.token_to_id(piece)) for piece in ("[BOS]", "[EOS]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=ends)
    tokenizer.enable_truncation(max_tokens)
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
