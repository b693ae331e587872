"""The base class of encoders, and those trained from scratch: small (pixels and subword tokens), and gru (whole words).

small trains on a CPU in minutes. gru is the text encoder of VSE++, VSRN and PCME, a recurrent network over words. The
words are those of the training texts. Their vectors are learnt, or start from a file of GloVe; that file is needed only
when a run begins.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sfumato.encoders import encoder_protocol as protocol
from sfumato.encoders import processors
from sfumato.encoders.heads import TokenFeatures, padded
from sfumato.errors import UserError, say


class Encoder(nn.Module):
    """A torch module from a batch of inputs to token features: trained from scratch and without blocks by default."""

    channels: int  # c of the token features; each subclass sets it
    local_channels: int | None = None  # width of ``TokenFeatures.local``; None if local attention reads the same tokens
    pretrained: bool = False
    __call__: Callable[..., TokenFeatures]

    @property
    def description(self) -> dict[str, Any] | None:
        """JSON values that rebuild the encoder without pre-trained weights; run folders keep them in encoders.json.

        None if the section of the recipe is enough.
        """
        return None

    def fit(self, store: protocol.Store) -> None:
        """Compute constants, such as a whitening, from the training inputs; called once before training.

        Args:
            store: inputs of the training split.
        """

    def prepared(self, store: protocol.Store) -> protocol.Store:
        """The inputs of the training split in the form that costs least at every step.

        Args:
            store: inputs of the training split.

        Returns:
            The same inputs, or inputs that this encoder takes for them.
        """
        return store

    def freezes(self, parameter: str) -> bool:
        """Whether a parameter does not change while the encoder is frozen.

        Args:
            parameter: name of the parameter in the encoder, or of a module followed by a dot.

        Returns:
            True for pre-trained parameters that affect the mean: all but ``variance_*``, which are new.
        """
        return self.pretrained and not parameter.startswith("variance_")

    def blocks_from_top(self, parameter: str) -> int:
        """The number of a parameter's block, for layer-wise decay of the learning rate.

        Args:
            parameter: name of the parameter in the encoder.

        Returns:
            1 in the last block, 2 in the block below, and so on; 0 outside of the blocks.
        """
        return 0


Built = tuple[protocol.Processor, Encoder]
"""One side of a model: the processor of its items, and the encoder above it."""


class StandardisedPixels(nn.Module):
    """(n, 3, h, w) pixels, uint8 or in [0, 1], in units of the mean and standard deviation of each channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(tuple(values)).view(3, 1, 1), persistent=False)

    @property
    def description(self) -> dict[str, list[float]]:
        """JSON values."""
        return {f"pixel_{name}": buffer.flatten().tolist() for name, buffer in self.named_buffers()}

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = pixels.to(self.mean.dtype) / 255 if pixels.dtype == torch.uint8 else pixels
        return (pixels - self.mean) / self.std


class SmallImageConfig(protocol.ImageEncoderConfig):
    """A small convolutional network that learns from pixels."""

    kind: Literal["small"] = "small"
    size: int = Field(64, ge=16, description="side of the square images in pixels")
    width: PositiveInt = Field(48, description="channels of the first stage; each later stage has twice as many")
    augment: bool = True
    """change training images at random: rotations, crops, mirror images, colours"""

    @property
    def augment_mode(self) -> protocol.AugmentMode:
        """The type of random augmentation of training images."""
        return "style" if self.augment else "none"


class SmallTextConfig(protocol.TextEncoderConfig):
    """A small network over subword tokens, whose vocabulary is learnt from the training texts."""

    kind: Literal["small"] = "small"
    vocabulary: PositiveInt = 4000
    """largest number of subword tokens; they include all single characters"""
    width: PositiveInt = Field(256, description="channels of the token features")
    max_tokens: PositiveInt = Field(64, description="largest number of tokens of a text; longer texts are cut")
    dropout: float = Field(0.1, ge=0, lt=1, description="fraction of the token features dropped while training")


class SmallImageEncoder(Encoder):
    """A residual network of four stages: (n, 3, s, s) uint8 pixels -> (n, (s/16)^2, 8 w) token features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [_convolution(3, width, kernel=5, stride=2)]
        for channels in (width, 2 * width, 4 * width):
            stages += [_convolution(channels, 2 * channels, stride=2), _Residual(2 * channels)]
        self.stages = nn.Sequential(*stages)
        self.channels = 8 * width

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
        """Token features of images. inputs (n, 3, s, s)."""
        pixels = inputs.values
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        maps = self.stages((pixels - 0.5).mul(2).contiguous(memory_format=torch.channels_last))
        return TokenFeatures(maps.flatten(2).transpose(1, 2).float())


class SmallTextEncoder(Encoder):
    """Embedded subword tokens and their neighbours: (n, t) ids -> (n, t, w) token features."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.neighbours = nn.Conv1d(width, width, kernel_size=3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.channels = width

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
        """Token features of texts. inputs (n, t) -> (n, t, w)."""
        mask = torch.ones_like(inputs.values, dtype=torch.bool) if inputs.mask is None else inputs.mask
        embedded = self.embedding(inputs.values[mask])
        # The convolution as one product for present tokens only: most texts are much shorter than the longest.
        wide = functional.pad(padded(embedded, mask), (0, 0, 1, 1))
        if torch.onnx.is_in_onnx_export():  # ONNX has no unfold.
            around = torch.stack([wide[:, :-2], wide[:, 1:-1], wide[:, 2:]], -1)[mask]
        else:
            around = wide.unfold(1, 3, 1)[mask]  # (k, w, 3)
        context = functional.linear(around.flatten(1), self.neighbours.weight.flatten(1), self.neighbours.bias)
        features = self.dropout(self.norm(embedded + functional.gelu(context)))
        return TokenFeatures(padded(features, mask), inputs.mask)


def build_small_image(config: SmallImageConfig, context: protocol.BuildContext) -> Built:
    """Build the image side of kind "small". Returns (processor, encoder)."""
    return processors.PixelProcessor(config.size), SmallImageEncoder(config.width)


def build_small_text(config: SmallTextConfig, context: protocol.BuildContext) -> Built:
    """Build the text side of kind "small". Returns (processor, encoder)."""
    tokenizer = context.need_tokenizer(config.kind)
    encoder = SmallTextEncoder(processors.vocabulary_size(tokenizer), config.width, config.dropout)
    return processors.TokenProcessor(tokenizer, config.max_tokens), encoder


def small_tokenizer(config: SmallTextConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a new text encoder of kind "small"."""
    return processors.train_tokenizer(texts, config.vocabulary)


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
    filters = nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(filters, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True))


States = Literal["final", "all"]
"""Token features of a text: the final state of each direction, or the states at all of its words."""


class WordTextConfig(protocol.TextEncoderConfig):
    """A GRU over whole words of the training texts."""

    path_fields: ClassVar[tuple[str, ...]] = ("vectors",)

    kind: Literal["gru"] = "gru"
    width: PositiveInt = Field(300, description="width of the word vectors")
    hidden: PositiveInt = Field(512, description="width of the GRU in each direction")
    bidirectional: bool = Field(False, description="read texts backwards too")
    states: States = "final"
    """token features. final: the final state of each direction; all: the states at all words"""
    min_count: PositiveInt = 1
    """number of times that a word must occur in the training texts to be in the vocabulary"""
    max_tokens: PositiveInt = Field(64, description="largest number of words of a text; longer texts are cut")
    vectors: str = ""
    """GloVe text file of word vectors to start from, read only when a run begins; none if empty"""
    freeze: bool = Field(False, description="keep the word vectors frozen; needs vectors")
    variance_gru: bool = Field(True, description="use a second GRU for the log variance only")

    def check(self, section: str) -> None:
        if self.freeze and not self.vectors:
            raise ValueError(f"{section}.freeze is for vectors from a file; give {section}.vectors, or leave it out")


def word_tokenizer(texts: Iterable[str], *, min_count: int = 1) -> Tokenizer:
    """Learn the vocabulary of whole words: lower case, without accents, split at spaces and punctuation marks.

    A punctuation mark is a word too.
    """
    if min_count < 1:
        raise ValueError(f"word_tokenizer: min_count must be at least 1, got {min_count}")
    tokenizer = processors.splitting_at_words(Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")))
    counts = processors.count_words(tokenizer, texts)
    words = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
    tokenizer.model = models.WordLevel({w: i for i, w in enumerate(["[UNK]", *words])}, unk_token="[UNK]")
    return tokenizer


def read_word_vectors(path: str | Path, tokenizer: Tokenizer, width: int) -> dict[int, np.ndarray]:
    """Read the vectors of a vocabulary's words from a text file of GloVe or fastText."""
    path = Path(path)
    if not path.is_file():
        source = "nlp.stanford.edu/projects/glove has them, e.g. glove.840B.300d.txt in glove.840B.zip"
        raise UserError(f"no word vectors at {path}; {source}")
    wanted = {word.encode(): i for word, i in tokenizer.get_vocab().items() if i > 0}
    found: dict[int, np.ndarray] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            word = line.partition(b" ")[0]
            if number > 2 and word not in wanted:
                continue
            fields = line.split()
            if number == 1 and len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
                continue  # The first line of a fastText file: number of words and width.
            if len(fields) > width + 1 and number > 2:
                continue  # A few words of GloVe 840B contain spaces; their first part is another word.
            vector = _vector(path, number, fields, width)
            if word in wanted:
                found.setdefault(wanted[word], vector)
    if not found:
        raise UserError(f"{path} has a vector for none of the {len(wanted)} words of the training texts")
    return found


def _vector(path: Path, number: int, fields: list[bytes], width: int) -> np.ndarray:
    """The vector in a line."""
    try:
        vector = np.array([float(field) for field in fields[1:]], dtype=np.float32)
        if len(vector) < 2:
            raise ValueError(f"got {len(fields)} fields")
    except ValueError as error:
        reason = f"expected a word and its numbers ({error}); is it the text file of GloVe, unpacked?"
        raise UserError(f"{path}, line {number}: {reason}") from error
    if len(vector) != width:
        found = f"{len(vector)} numbers after the word, but model.text.width={width}; give a file of that width"
        hint = f"set model.text.width={len(vector)} if all lines have as many"
        raise UserError(f"{path}, line {number}: {found}, or {hint}")
    if not np.isfinite(vector).all():
        raise UserError(f"{path}, line {number}: a number after the word is not finite; the file is damaged")
    return vector


class WordEncoder(Encoder):
    r"""Word vectors and a GRU: (n, t) ids -> (n, 1, c) final states, or (n, t, c) states of all words.

    The final state of the forward direction is the state at the last word, that of the backward direction the state at
    the first word: each depends on the whole text. Padding has no influence. (PCME's code takes both states at the last
    word, where the backward direction has read only that word.)

    Papers: Faghri et al., "VSE++", BMVC 2018 (one direction); Chun et al., "PCME", CVPR 2021 (two); Pishdad et al.,
    "Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations", section 4.2 (the second GRU).
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        hidden: int,
        *,
        bidirectional: bool = False,
        states: States = "final",
        variance_gru: bool = True,
        freeze: bool = False,
        pretrained: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        if freeze:  # A buffer instead of a parameter, so that no optimiser changes it.
            weight = self.words.weight.detach()
            del self.words.weight
            self.words.register_buffer("weight", weight)
        self.mean_gru = nn.GRU(width, hidden, batch_first=True, bidirectional=bidirectional)
        own = nn.GRU(width, hidden, batch_first=True, bidirectional=bidirectional) if variance_gru else None
        self.variance_gru = own
        self.states = states
        self.pretrained = pretrained
        self.channels, self.local_channels = 2 * hidden if bidirectional else hidden, width

    def freezes(self, parameter: str) -> bool:
        """Word vectors from a file; the GRUs are new."""
        return self.pretrained and parameter.startswith("words.")

    @torch.no_grad()
    def set_vectors(self, vectors: dict[int, np.ndarray]) -> None:
        """Replace word vectors."""
        for i, vector in vectors.items():
            self.words.weight[i] = torch.from_numpy(vector)

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
        """Token features of texts, and their word vectors for local attention. inputs (n, t) -> (n, 1, c)."""
        words = self.words(inputs.values)
        n, t = inputs.values.shape
        lengths = torch.full((n,), t) if inputs.mask is None else inputs.mask.sum(1).cpu()
        mean = self._read(self.mean_gru, words, lengths)
        log_var = None if self.variance_gru is None else self._read(self.variance_gru, words, lengths)
        return TokenFeatures(mean, inputs.mask if self.states == "all" else None, log_var, words, inputs.mask)

    def _read(self, gru: nn.GRU, words: Tensor, lengths: Tensor) -> Tensor:
        states, final = gru(pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False))
        if self.states == "final":
            return final.transpose(0, 1).flatten(1).unsqueeze(1)
        return pad_packed_sequence(states, batch_first=True, total_length=words.shape[1])[0]


def build_word_text(config: WordTextConfig, context: protocol.BuildContext) -> Built:
    """Build the text side of kind "gru". Returns (processor, encoder)."""
    tokenizer = context.need_tokenizer(config.kind)
    encoder = WordEncoder(
        processors.vocabulary_size(tokenizer), config.width, config.hidden, bidirectional=config.bidirectional,
        states=config.states, variance_gru=config.variance_gru and context.variance, freeze=config.freeze,
        pretrained=bool(config.vectors),
    )  # fmt: skip
    if config.vectors and not context.trained:
        vectors = read_word_vectors(config.vectors, tokenizer, config.width)
        encoder.set_vectors(vectors)
        known = tokenizer.get_vocab_size() - 1
        say(f"{len(vectors)} of {known} words of the training texts start from {config.vectors}")
    return processors.TokenProcessor(tokenizer, config.max_tokens), encoder


def words_of_texts(config: WordTextConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a new text encoder of kind "gru"."""
    return word_tokenizer(texts, min_count=config.min_count)
