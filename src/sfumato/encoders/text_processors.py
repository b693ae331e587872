"""Text processors: tokenizers learnt from the data, and the conversion of texts to token ids."""

import html
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from sfumato.encoders.encoder_protocol import Item, OnError, Progress
from sfumato.encoders.features import RaggedStore, Store
from sfumato.errors import UserError


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn subword tokens: lower case, without accents, split at spaces and punctuation.

    The tokens are all single characters, then the most frequent words, then the most frequent word endings. An unseen
    word is split into known tokens, if necessary into characters. The same texts always give the same tokens. (The
    trainers of the library ``tokenizers`` break ties at random: two equal runs would differ.)

    Args:
        texts: the training texts.
        vocabulary: largest number of tokens.

    Returns:
        The tokenizer; id 0 is the unknown token "[UNK]".

    Raises:
        ValueError: the single characters alone are more than the vocabulary.

    Example:
        >>> train_tokenizer(["a red dog", "a red cat"], 40).encode("a red dogcat").tokens
        ['a', 'red', 'dog', '##c', '##a', '##t']
    """
    tokenizer = splitting_at_words(Tokenizer(models.WordPiece(unk_token="[UNK]")))
    words = count_words(tokenizer, texts)
    endings: Counter[str] = Counter()
    for word, count in words.items():
        endings.update({f"##{word[i:]}": count for i in range(1, len(word))})
    letters = sorted({letter for word in words for letter in word})
    tokens = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    if len(tokens) > vocabulary:
        raise ValueError(
            f"train_tokenizer: {len(tokens)} single characters do not fit into a vocabulary of {vocabulary} tokens;"
            " raise model.text.vocabulary"
        )
    for counts in (words, endings):
        ranked = sorted(
            (token for token in counts if counts[token] > 1 or counts is words), key=lambda t: (-counts[t], t)
        )
        tokens += ranked[: vocabulary - len(tokens)]
    tokenizer.model = models.WordPiece({t: i for i, t in enumerate(dict.fromkeys(tokens))}, unk_token="[UNK]")
    return tokenizer


def splitting_at_words(tokenizer: Tokenizer) -> Tokenizer:
    """Make a tokenizer read lower case without accents, split at spaces and punctuation.

    Args:
        tokenizer: is changed in place.

    Returns:
        The same tokenizer.
    """
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def count_words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """Count the words of some texts.

    Args:
        tokenizer: splits texts at words, see :func:`splitting_at_words`.
        texts: the texts.

    Returns:
        The number of occurrences of each word.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(w for w, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)))
    return words


def add_begin_and_end(tokenizer: Tokenizer, max_tokens: int) -> Tokenizer:
    """Make a tokenizer put a begin and an end token around every text.

    Args:
        tokenizer: is changed in place.
        max_tokens: largest number of tokens of a text, with these two; longer texts are cut before the end token.

    Returns:
        The same tokenizer.
    """
    tokenizer.add_special_tokens(["[BOS]", "[EOS]"])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[BOS]", "[EOS]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=ends)
    tokenizer.enable_truncation(max_tokens)
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of texts.

    Args:
        tokenizer: splits the texts.
        texts: n texts.
        max_tokens: largest number of ids of a text; the rest is left out.

    Returns:
        For each text its ids, at least one: a text without any token becomes the unknown token.
    """
    return [encoding.ids[:max_tokens] or [0] for encoding in tokenizer.encode_batch(list(texts))]


class TokenProcessor:
    """Texts as the ids of their subword tokens.

    Args:
        tokenizer: the tokenizer that the model was trained with. A tokenizer that adds begin and end tokens cuts long
            texts itself, so that these tokens stay. A tokenizer for an encoder that attends to padding also pads.
        max_tokens: largest number of tokens; longer texts are cut.

    Attributes:
        special: number of begin tokens and number of end tokens of each text.
        mask_id: id of the token for a hidden word: the tokenizer's mask token, else its unknown token, else "m" as in
            PCME++'s code.
        forbidden: ids that are not words.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        empty = tokenizer.encode("")
        around = [i for i, present in zip(empty.ids, empty.attention_mask, strict=True) if present]
        self.special = len(around) // 2, len(around) - len(around) // 2
        known = (tokenizer.token_to_id(token) for token in ("[MASK]", "<mask>", "[UNK]", "m</w>", "<unk>"))
        self.mask_id = next((i for i in known if i is not None), 0)
        self.forbidden = tuple(sorted({self.mask_id, *around}))

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.encoder_protocol.Processor`."""
        store = RaggedStore.from_list(tokenize(self.tokenizer, [str(item()) for item in items], self.max_tokens))
        if progress:
            progress(len(items))
        return store, np.arange(len(items))


def single_spaces(text: str) -> str:
    """Replace HTML entities (also those escaped twice) by characters, and white space by single spaces.

    The released tokenizers also repair broken encodings with ftfy; here such texts are not changed.

    Args:
        text: any text.

    Returns:
        The cleaned text.

    Example:
        >>> single_spaces("  fish &amp;amp;  chips ")
        'fish & chips'
    """
    return " ".join(html.unescape(html.unescape(text)).split())


def lower(text: str) -> str:
    """:func:`single_spaces` in lower case.

    Args:
        text: any text.

    Returns:
        The cleaned text.
    """
    return single_spaces(text).lower()


def canonicalize(text: str) -> str:
    """Clean a text as in ProLIP's training: lower case without ASCII punctuation, with "_" as a space.

    Args:
        text: any text.

    Returns:
        The cleaned text.

    Example:
        >>> canonicalize("It's a_b (really)!")
        'its a b really'
    """
    return lower(single_spaces(text).replace("_", " ").translate(str.maketrans("", "", string.punctuation)))


CLEANINGS: dict[str, Callable[[str], str]] = {
    "whitespace": single_spaces,
    "lower": lower,
    "canonicalize": canonicalize,
}
"""Cleaning functions by the names that configurations of open_clip models use."""


class SpecialTokenProcessor:
    """Texts as the token ids of a pre-trained text transformer, with its begin and end tokens.

    Args:
        find: returns the tokenizer. It is called with the first text, so that images can be embedded without a
            tokenizer.
        vocabulary: number of tokens of the model. A tokenizer with more tokens, or with less than half as many, is
            refused.
        max_tokens: largest number of tokens with the begin and end tokens; a longer text loses its last words.
        begin: special token before a text; "" for none.
        end: special token behind a text.
        pad_to_max: fill every text up to max_tokens with the end token; the mask covers all of them.
        clean: function that is applied to each text first.
    """

    def __init__(
        self,
        find: Callable[[], Tokenizer],
        *,
        vocabulary: int,
        max_tokens: int,
        begin: str,
        end: str,
        pad_to_max: bool,
        clean: Callable[[str], str],
    ) -> None:
        self.find, self.clean = find, clean
        self.vocabulary, self.max_tokens, self.pad_to_max = vocabulary, max_tokens, pad_to_max
        self.begin, self.end = begin, end
        self._tokenizer: Tokenizer | None = None

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.encoder_protocol.Processor`.

        Raises:
            UserError: the tokenizer cannot be loaded, or belongs to another model.
        """
        if self._tokenizer is None:
            self._tokenizer = self._own(self.find())
        begin = [_id(self._tokenizer, self.begin)] if self.begin else []
        end = _id(self._tokenizer, self.end)
        ids = []
        texts = [self.clean(str(item())) for item in items]
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            # A text that contains the end token ends there, because the models use the first end token.
            words = encoding.ids[: encoding.ids.index(end)] if end in encoding.ids else encoding.ids
            text = [*begin, *words[: self.max_tokens - len(begin) - 1], end]
            ids.append(text + [end] * (self.max_tokens - len(text)) if self.pad_to_max else text)
        if progress:
            progress(len(items))
        return RaggedStore.from_list(ids), np.arange(len(items))

    def _own(self, tokenizer: Tokenizer) -> Tokenizer:
        """A copy of the tokenizer that neither pads nor truncates; a UserError if it belongs to another model."""
        size, known = tokenizer.get_vocab_size(), tokenizer.get_vocab()
        missing = [token for token in (self.begin, self.end) if token and token not in known]
        if missing or not self.vocabulary / 2 <= size <= self.vocabulary:
            without = f", none of them {missing[0]!r}" if missing else ""
            raise UserError(
                f"the tokenizer has {size} tokens{without}; the model expects {self.vocabulary}. Give the"
                " tokenizer.json that belongs to it"
            )
        own = Tokenizer.from_str(tokenizer.to_str())
        own.no_padding()
        own.no_truncation()
        return own


def _id(tokenizer: Tokenizer, token: str) -> int:
    return tokenizer.get_vocab()[token]
