"""Whole words and a recurrent network over them: the texts of VSE++, VSRN and PCME.

Words are those of the training texts; their vectors are learnt, or start from a file of GloVe, which is needed no more once the
run has begun.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sfumato.encoders.features import Inputs, TokenFeatures
from sfumato.encoders.small import count_words, splitting_at_words
from sfumato.errors import UserError

States = Literal["final", "all"]
"""What is made of a text: the state in which each direction ends, or the states at all of its words."""


def word_tokenizer(texts: Iterable[str], *, min_count: int = 1) -> Tokenizer:
    """Whole words from texts: lower case, without accents, split at spaces and punctuation, which are words too.

    Args:
        texts: the training texts; the same ones give the same vocabulary, whatever their order.
        min_count: how often a word must occur in them to have an id of its own.

    Returns:
        Ids by falling frequency, 0 for all unknown words ("[UNK]").

    Raises:
        ValueError: min_count is less than 1.
    """
    if min_count < 1:
        raise ValueError(f"word_tokenizer: min_count must be at least 1, got {min_count}")
    tokenizer = splitting_at_words(Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")))
    counts = count_words(tokenizer, texts)
    words = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
    tokenizer.model = models.WordLevel({w: i for i, w in enumerate(["[UNK]", *words])}, unk_token="[UNK]")
    return tokenizer


def read_word_vectors(path: str | Path, tokenizer: Tokenizer, width: int) -> dict[int, np.ndarray]:
    """The vectors that a text file of GloVe, or of fastText, has for the words of a vocabulary.

    Args:
        path: a line for each word: the word, and its numbers behind it, with spaces between them. It is read line by line.
        tokenizer: whose words are looked for, as they stand.
        width: how many numbers a vector must have.

    Returns:
        id -> (width,) float32 of the words found.

    Raises:
        UserError: the file is missing, of another form or width, or has none of the words.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"no word vectors at {path}; nlp.stanford.edu/projects/glove has them, e.g. glove.6B.300d.txt in glove.6B.zip"
        )
    wanted = {word.encode(): i for word, i in tokenizer.get_vocab().items() if i > 0}
    found: dict[int, np.ndarray] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            word = line.partition(b" ")[0]
            if number > 2 and word not in wanted:
                continue
            fields = line.split()
            if number == 1 and len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
                continue  # The head of a file of fastText: number of words, width.
            if len(fields) > width + 1 and number > 2:
                continue  # A few words of GloVe 840B have spaces within; the first part of one is not that word.
            vector = _vector(path, number, fields, width)
            if word in wanted:
                found.setdefault(wanted[word], vector)
    if not found:
        raise UserError(f"{path} has a vector for none of the {len(wanted)} words of the training texts")
    return found


def _vector(path: Path, number: int, fields: list[bytes], width: int) -> np.ndarray:
    """The numbers behind a word."""
    try:
        vector = np.array([float(field) for field in fields[1:]], dtype=np.float32)
    except ValueError as error:
        raise UserError(f"{path}, line {number}: not a word and its numbers ({error}){_UNPACKED}") from error
    if len(vector) < 2:
        raise UserError(f"{path}, line {number}: a word and its numbers expected, got {len(fields)} fields{_UNPACKED}")
    if len(vector) != width:
        raise UserError(
            f"{path}, line {number}: {len(vector)} numbers behind the word, but model.text.width={width}; give the file of that"
            f" width, or set model.text.width={len(vector)} if all lines have as many"
        )
    if not np.isfinite(vector).all():
        raise UserError(f"{path}, line {number}: a number behind the word is not finite; the file is damaged")
    return vector


_UNPACKED = "; is it the text file of GloVe, unpacked?"


class WordEncoder(nn.Module):
    r"""Word vectors and a GRU: (n, t) ids -> (n, 1, c) final states, or (n, t, c) states of all words.

    The final state of the direction that reads forwards is that at an item's last word, of the one that reads backwards that at
    its first word: where each has read the whole text. What is padded behind a text changes nothing. (PCME's code takes both
    at the last word, where the backward one has read that word alone.)

    Args:
        vocabulary: number of words; 0 is the unknown one.
        width: of the word vectors.
        hidden: width of the GRU, in each direction.
        bidirectional: read backwards too; c is hidden, or twice that.
        states: "final" or "all".
        variance_gru: a second GRU on the same word vectors, without a parameter in common, for the log variance.
        freeze: the word vectors never learn.
        pretrained: the word vectors are to start from a file, and rest while the text network does.

    Attributes:
        channels: c of the token features.
        local_channels: width of the features for local attention, the word vectors.
        resting: beginnings of the names of parameters that rest while the text network does: word vectors from a file.

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
        if freeze:  # No parameter, so that nothing can let it learn again.
            weight = self.words.weight.detach()
            del self.words.weight
            self.words.register_buffer("weight", weight)
        self.mean_gru = nn.GRU(width, hidden, batch_first=True, bidirectional=bidirectional)
        own = nn.GRU(width, hidden, batch_first=True, bidirectional=bidirectional) if variance_gru else None
        self.variance_gru = own
        self.states = states
        self.resting: tuple[str, ...] = ("words.",) if pretrained else ()
        self.channels, self.local_channels = 2 * hidden if bidirectional else hidden, width

    @torch.no_grad()
    def set_vectors(self, vectors: dict[int, np.ndarray]) -> None:
        """Put these in place of the random ones: id -> (width,)."""
        for i, vector in vectors.items():
            self.words.weight[i] = torch.from_numpy(vector)

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features, and word vectors for local attention. Words must stand at the left of each row."""
        words = self.words(inputs.values)
        n, t = inputs.values.shape
        lengths = torch.full((n,), t) if inputs.mask is None else inputs.mask.sum(1).cpu()
        mean = self._read(self.mean_gru, words, lengths)
        log_var = None if self.variance_gru is None else self._read(self.variance_gru, words, lengths)
        return TokenFeatures(mean, inputs.mask if self.states == "all" else None, log_var, words, inputs.mask)

    def _read(self, gru: nn.GRU, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        states, final = gru(packed)
        if self.states == "final":
            ended: Tensor = final.transpose(0, 1).flatten(1).unsqueeze(1)
            return ended
        every: Tensor = pad_packed_sequence(states, batch_first=True, total_length=words.shape[1])[0]
        return every
