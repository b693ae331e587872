"""Texts as token ids, as the published models have them."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from sfumato.encoders.processors import CLEANINGS, SpecialTokenProcessor, TokenProcessor


@pytest.mark.parametrize(
    ("text", "whitespace", "lower", "canonicalize"),
    [
        ("  A\tred\n\nDOG. ", "A red DOG.", "a red dog.", "a red dog"),
        ("it's a_b (really)!", "it's a_b (really)!", "it's a_b (really)!", "its a b really"),
        ("fish &amp;amp; chips", "fish & chips", "fish & chips", "fish chips"),
        ("Größe – 5 m²", "Größe – 5 m²", "größe – 5 m²", "größe – 5 m²"), ("?!", "?!", "?!", ""),
    ],
)  # fmt: skip
def test_cleaning(text, whitespace, lower, canonicalize):
    assert CLEANINGS["whitespace"](text) == whitespace and CLEANINGS["lower"](text) == lower
    assert CLEANINGS["canonicalize"](text) == canonicalize


def processor(tokenizer, **options):
    defaults = {"vocabulary": 10, "max_tokens": 5, "begin": "<b>", "end": "<e>", "pad_to_max": False}
    return SpecialTokenProcessor(lambda: tokenizer, **{**defaults, "clean": str.lower, **options})


@pytest.fixture
def tokenizer():
    tokenizer = Tokenizer(models.WordLevel({"<e>": 1, "<b>": 2, "a": 3, "b": 4, "c": 5, "?": 6}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def ids(processor, *texts):
    store, kept = processor.read([lambda t=t: t for t in texts])
    inputs = store.batch(kept)
    return [row[mask].tolist() for row, mask in zip(inputs.values, inputs.mask, strict=True)]


def test_begin_and_end_survive_cutting_padding_and_texts_that_spell_them(tokenizer):
    texts = ("A b", "a b c", "a b c a b c", "", "x")
    assert ids(processor(tokenizer), *texts) == [[2, 3, 4, 1], [2, 3, 4, 5, 1], [2, 3, 4, 5, 1], [2, 1], [2, 6, 1]]
    assert ids(processor(tokenizer, begin=""), *texts[:3]) == [[3, 4, 1], [3, 4, 5, 1], [3, 4, 5, 3, 1]]
    assert ids(processor(tokenizer, pad_to_max=True), "a", "a b c a") == [[2, 3, 1, 1, 1], [2, 3, 4, 5, 1]]
    assert ids(processor(tokenizer), "a <e> b") == [[2, 3, 1]]
    asked = []

    def find():
        asked.append(1)
        return tokenizer

    lazy = processor(tokenizer)
    lazy.find = find
    assert not asked
    ids(lazy, "a")
    ids(lazy, "b")
    assert len(asked) == 1


def clip_like(*, lower=True):
    """The first ids of CLIP's tokenizer: visible bytes in order, alone and at the end of a word; no merges."""
    letters = [*map(chr, range(ord("!"), ord("~") + 1))]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *([normalizers.Lowercase()] if lower else [])])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_clips_mask_is_the_released_one_which_no_text_has():
    """The released code takes encoder["M"], whose comment says index 44; "m" as a word would be an ordinary word."""
    tokenizer = clip_like()
    words = TokenProcessor(tokenizer, 9)
    assert words.mask_id == 44 == tokenizer.token_to_id("M") and words.forbidden == (44,)
    assert 44 not in tokenizer.encode("M MAM I AM").ids and tokenizer.token_to_id("m</w>") in tokenizer.encode("M").ids
    assert TokenProcessor(clip_like(lower=False), 9).mask_id is None, "with capital letters M is a part of words"
    tokenizer.add_special_tokens(["[MASK]"])
    assert TokenProcessor(tokenizer, 9).mask_id == tokenizer.token_to_id("[MASK]")
    letters = Tokenizer(models.WordLevel({"M": 0, "m": 1, "<unk>": 2}, unk_token="<unk>"))
    letters.normalizer = normalizers.Lowercase()
    assert TokenProcessor(letters, 9).mask_id == 2, "not a tokenizer of CLIP's form"


TEXTS = ["A Dog, abc!  x", "", "don't " * 9, "abcdog\n42"]


def test_ids_are_those_of_transformers_tokenizers_of_clip_and_t5():
    transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!'"
    merges, special = [("a", "b"), ("ab", "c</w>"), ("d", "o"), ("do", "g</w>")], ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*letters, *(f"{c}</w>" for c in letters), *("".join(m) for m in merges), *special]
    theirs = transformers.CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    told = {"vocabulary": len(pieces), "max_tokens": 12, "begin": special[0], "end": special[1]}
    ours = processor(theirs.backend_tokenizer, **told, clean=CLEANINGS["lower"])
    assert ids(ours, *TEXTS) == theirs(TEXTS, truncation=True, max_length=12)["input_ids"]
    pieces = ["<pad>", "</s>", "<unk>", "▁a", "▁dog", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    vocabulary = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    theirs = transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0, pad_token="</s>")
    told = {"vocabulary": len(pieces), "max_tokens": 12, "begin": "", "end": "</s>", "pad_to_max": True}
    ours = processor(theirs.backend_tokenizer, **told, clean=CLEANINGS["canonicalize"])
    cleaned = [CLEANINGS["canonicalize"](text) for text in TEXTS]
    assert ids(ours, *TEXTS) == theirs(cleaned, truncation=True, padding="max_length", max_length=12)["input_ids"]
