"""Images decoded batch by batch: the same pixels as alone, for any number of threads, and errors with positions.
Texts as token ids, as the published models have them."""

import io
import time

import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import encoded, noise
from support.raising import failing, raises
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from sfumato.data.image_decoding import decode_image
from sfumato.data.transforms import random_crop_box
from sfumato.encoders import processors
from sfumato.encoders.processors import BilinearProcessor, ImageFileProcessor, ImageFileStore, PixelProcessor

DATA = [encoded(noise(20 + i, 17, seed=i)) for i in range(12)]
ITEMS, INDEX = [lambda d=d: d for d in DATA], np.array([7, 0, 7, 11, 3])
file_store = lambda items, workers=2: ImageFileStore(items, 8, PixelProcessor(8).prepare, workers)


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_a_batch_is_each_picture_decoded_alone(fit):
    store, _ = ImageFileProcessor(8, fit=fit).read(ITEMS)
    batch = store.batch(INDEX).to("cpu")
    assert len(store) == 12 and len(batch) == 5 and batch.mask is None and batch.values.dtype == torch.uint8
    assert np.array_equal(batch.values.numpy(), np.stack([decode_image(DATA[i], 8, fit=fit) for i in INDEX]))
    assert store.batch(np.array([], np.int64)).to("cpu").values.shape == (0, 3, 8, 8)


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_a_training_batch_is_what_the_recipe_says_one_by_one(workers):
    late = np.random.default_rng(0)

    def slow(data):
        time.sleep(float(late.random()) * 0.01)
        return data

    batch = file_store([lambda d=d: slow(d) for d in DATA], workers).training_batch(INDEX, (5, 1, 9))
    flips = 0
    for place, position in enumerate(INDEX):
        random = np.random.default_rng([5, 1, 9, place])
        left, top, width, height = random_crop_box(random, 0.6)
        with Image.open(io.BytesIO(DATA[position])) as image:
            w, h = image.size
            part = image.crop((round(left * w), round(top * h), round((left + width) * w), round((top + height) * h)))
            pixels = np.asarray(part.resize((8, 8), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        if random.random() < 0.5:
            pixels, flips = pixels[..., ::-1], flips + 1
        assert np.array_equal(batch.values[place], pixels)
    assert 0 < flips < len(INDEX)


def test_a_picture_that_becomes_unreadable_is_named_and_bad_ones_are_left_out():
    store = file_store([*ITEMS[:3], failing(FileNotFoundError("gone.jpg")), lambda: DATA[0][:200]])
    assert len(store.batch(np.array([2, 1])).to("cpu")) == 2
    message = "the image at position {} can no longer be read: {}"
    raises(OSError, message.format(3, r"gone\.jpg"), store.batch, np.array([0, 3, 1]))
    raises(OSError, message.format(4, "cannot be decoded"), store.training_batch, np.array([4]), (0,))
    reads, told, done = [], {}, []

    def reading(position, data):
        def read():
            reads.append(position)
            if data is None:
                raise OSError("no such disk")
            return data

        return read

    data, processor = [DATA[0], b"<html>", DATA[1], None, DATA[2][:200], DATA[3]], ImageFileProcessor(8)
    items = [reading(i, d) for i, d in enumerate(data)]
    store, kept = processor.read(items, progress=done.append, on_error=lambda i, e: told.update({i: str(e)}))
    assert kept.tolist() == [0, 2, 5] and kept.dtype == np.int64 and len(store) == 3 and sum(done) == 6
    assert sorted(reads) == [0, 1, 2, 3, 4, 5] and list(told) == [1, 3, 4]
    assert "not an image" in told[1] and told[3] == "no such disk" and "cannot be decoded" in told[4]
    raises(ValueError, "not an image", processor.read, items)
    # What it keeps is what the reader that holds all pixels keeps, in the same order.
    pixels, also_kept = PixelProcessor(8).read(items, on_error=lambda i, e: None)
    assert kept.tolist() == also_kept.tolist()
    everything = np.arange(3)
    assert torch.equal(store.batch(everything).to("cpu").values, pixels.batch(everything).to("cpu").values)


def test_the_reader_of_nothing_and_of_more_than_one_part():
    processor = ImageFileProcessor(8)
    store, kept = processor.read([])
    assert len(store) == 0 and kept.tolist() == []
    bad = {0, 511, 512, 1299}
    items, told = [lambda i=i: b"" if i in bad else DATA[i % 12] for i in range(1300)], []
    store, kept = processor.read(items, on_error=lambda i, e: told.append(i))
    assert told == sorted(bad) and kept.tolist() == [i for i in range(1300) if i not in bad]
    assert np.array_equal(store.batch(np.array([1295])).to("cpu").values[0].numpy(), decode_image(DATA[1298 % 12], 8))


def bilinear_loops(picture, size):
    """(h, w, 3) -> (size, size, 3): the four neighbours of the source of each pixel's centre, at any scale."""
    height, width, _ = picture.shape
    out = np.empty((size, size, 3))
    for i in range(size):
        for j in range(size):
            y, x = (i + 0.5) * height / size - 0.5, (j + 0.5) * width / size - 0.5
            y, x = max(y, 0.0), max(x, 0.0)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
            v, u = y - top, x - left
            out[i, j] = (1 - v) * ((1 - u) * picture[top, left] + u * picture[top, right]) + v * (
                (1 - u) * picture[bottom, left] + u * picture[bottom, right]
            )
    return out


@pytest.mark.parametrize(("width", "height"), [(41, 23), (9, 30), (12, 12)])
def test_pictures_are_squashed_bilinearly_without_smoothing(width, height):
    picture = noise(width, height)
    store, kept = BilinearProcessor(12).read([lambda: encoded(picture)])
    ours = store.batch(kept).to("cpu").values[0].permute(1, 2, 0).numpy()
    assert ours.shape == (12, 12, 3) and ours.dtype == np.uint8
    assert np.abs(ours - bilinear_loops(picture.astype(np.float64), 12)).max() <= 0.5 + 1e-3


@pytest.mark.parametrize(("text", "whitespace", "lower", "canonicalize"), [
    ("  A\tred\n\nDOG. ", "A red DOG.", "a red dog.", "a red dog"),
    ("it's a_b (really)!", "it's a_b (really)!", "it's a_b (really)!", "its a b really"),
    ("fish &amp;amp; chips", "fish & chips", "fish & chips", "fish chips"),
    ("Größe – 5 m²", "Größe – 5 m²", "größe – 5 m²", "größe – 5 m²"), ("?!", "?!", "?!", ""),
])  # fmt: skip
def test_cleaning(text, whitespace, lower, canonicalize):
    assert processors.CLEANINGS["whitespace"](text) == whitespace and processors.CLEANINGS["lower"](text) == lower
    assert processors.CLEANINGS["canonicalize"](text) == canonicalize


def processor(tokenizer, **options):
    defaults = {"vocabulary": 10, "max_tokens": 5, "begin": "<b>", "end": "<e>", "pad_to_max": False}
    return processors.SpecialTokenProcessor(find=lambda: tokenizer, **{**defaults, "clean": str.lower, **options})


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
    options = {"vocabulary": 10, "max_tokens": 5, "begin": "", "end": "<e>", "pad_to_max": False, "clean": str.lower}
    raises(TypeError, "positional", processors.SpecialTokenProcessor, find, **options)
    raises(TypeError, "_tokenizer", processors.SpecialTokenProcessor, find=find, _tokenizer=tokenizer, **options)


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
    words = processors.TokenProcessor(tokenizer, 9)
    assert words.mask_id == 44 == tokenizer.token_to_id("M") and words.forbidden == (44,)
    assert 44 not in tokenizer.encode("M MAM I AM").ids and tokenizer.token_to_id("m</w>") in tokenizer.encode("M").ids
    assert processors.TokenProcessor(clip_like(lower=False), 9).mask_id is None, "with capitals M is a part of words"
    tokenizer.add_special_tokens(["[MASK]"])
    assert processors.TokenProcessor(tokenizer, 9).mask_id == tokenizer.token_to_id("[MASK]")
    letters = Tokenizer(models.WordLevel({"M": 0, "m": 1, "<unk>": 2}, unk_token="<unk>"))
    letters.normalizer = normalizers.Lowercase()
    assert processors.TokenProcessor(letters, 9).mask_id == 2, "not a tokenizer of CLIP's form"


def test_ids_are_those_of_transformers_tokenizers_of_clip_and_t5():
    texts = ["A Dog, abc!  x", "", "don't " * 9, "abcdog\n42"]
    transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!'"
    merges, special = [("a", "b"), ("ab", "c</w>"), ("d", "o"), ("do", "g</w>")], ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*letters, *(f"{c}</w>" for c in letters), *("".join(m) for m in merges), *special]
    theirs = transformers.CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    told = {"vocabulary": len(pieces), "max_tokens": 12, "begin": special[0], "end": special[1]}
    ours = processor(theirs.backend_tokenizer, **told, clean=processors.CLEANINGS["lower"])
    assert ids(ours, *texts) == theirs(texts, truncation=True, max_length=12)["input_ids"]
    pieces = ["<pad>", "</s>", "<unk>", "▁a", "▁dog", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    vocabulary = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    theirs = transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0, pad_token="</s>")
    told = {"vocabulary": len(pieces), "max_tokens": 12, "begin": "", "end": "</s>", "pad_to_max": True}
    ours = processor(theirs.backend_tokenizer, **told, clean=processors.CLEANINGS["canonicalize"])
    cleaned = [processors.CLEANINGS["canonicalize"](text) for text in texts]
    assert ids(ours, *texts) == theirs(cleaned, truncation=True, padding="max_length", max_length=12)["input_ids"]
