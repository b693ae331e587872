"""Tokenizers that are learnt from the training texts: subword tokens, and what they share with whole words."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn subword tokens: lower case, without accents, split at spaces and punctuation.

    The tokens are all single characters, then the most frequent words, then the most frequent word endings. An unseen
    word is split into known tokens, if need be into characters. The same texts always give the same tokens. (The
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
        How often each word occurs.
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
