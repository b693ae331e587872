"""Embedding of batches and folders: what is left out, and the digest of a model."""

import io
import os

import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import encoded, noise
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from sfumato.encoders.feature_rows import FeatureInput
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.processors import ImageFileProcessor, PixelProcessor, TokenProcessor
from sfumato.encoders.scratch import SmallImageEncoder, SmallTextEncoder
from sfumato.encoders.towers import DualEncoder, Tower
from sfumato.models.embed import embed_folder, embedding_steps, encode_each
from sfumato.models.model import Model, model_digest


def tiny_model(seed=0, processor=None):
    torch.manual_seed(seed)
    image, text = SmallImageEncoder(4), SmallTextEncoder(2, 8, 0.0)
    tokens = TokenProcessor(Tokenizer(WordLevel({"[UNK]": 0, "red": 1}, unk_token="[UNK]")), 5)
    sides = (processor or PixelProcessor(16), image), (tokens, text)
    return DualEncoder(*(Tower(read, one, GaussianHead(one.channels, 7)) for read, one in sides)).eval()


numbered = lambda number, size=(21, 17): encoded(noise(*size, seed=number))


def test_the_digest_of_a_model_is_of_what_it_computes():
    model = tiny_model()
    digest = model_digest(model)
    assert digest == model_digest(tiny_model()) == model_digest(model.train())
    assert digest == model_digest(tiny_model(processor=PixelProcessor(16)))
    changes = {"seed": 1}, {"processor": PixelProcessor(17)}, {"processor": PixelProcessor(16, fit="crop")}
    assert digest not in [model_digest(tiny_model(**change)) for change in changes]
    model.image.head.normalize = False
    assert digest != model_digest(model)
    one, two = (tiny_model(processor=ImageFileProcessor(16)) for _ in range(2))
    assert model_digest(one) == model_digest(two) != digest


def test_an_item_that_spoils_its_batch_or_has_no_embedding_is_left_out():
    model, told, refused = tiny_model(), {}, []
    prepare, encode = embedding_steps(model.image, "images")
    values = [prepare(numbered(k)) for k in range(5)]
    forward = model.image.forward

    def spoilt(inputs):
        embedding = forward(inputs)
        for row, pixels in enumerate(inputs.values):
            if pixels.equal(torch.from_numpy(values[1])):
                refused.append(len(inputs))
                raise ValueError("a strange shape")
            if pixels.equal(torch.from_numpy(values[3])):
                embedding.mean[row, 0] = torch.nan
        return embedding

    model.image.forward = spoilt
    kept, rows = encode_each(encode, list(enumerate(values)), lambda k, error: told.update({k: str(error)}))
    assert refused == [5, 1], "in its batch, and alone"
    assert told == {1: "a strange shape", 3: "its embedding holds NaN or infinity"} and kept == [0, 2, 4]
    model.image.forward = forward
    torch.testing.assert_close(torch.cat([row.mean for row in rows]), encode([values[k] for k in kept]).mean)
    assert encode_each(encode, [], told.update) == ([], [])


class Colours:
    """A frozen backbone: one token for ten pixels of width."""

    channels, fingerprint = 3, "colours"

    def __call__(self, items):
        pictures = [np.asarray(Image.open(io.BytesIO(item)).convert("RGB"), np.float32) for item in items]
        return [p[:1, : p.shape[1] // 10].reshape(-1, 3).astype(np.float16) / 255 for p in pictures]


def test_batches_of_frozen_backbones_use_no_cache_and_give_what_a_folder_gives(tmp_path):
    for k, width in enumerate((20, 60, 30)):
        (tmp_path / f"{k}.png").write_bytes(numbered(k, (width, 20)))
    tower = Tower(FrozenProcessor(Colours(), tmp_path / "cache"), FeatureInput(3, 0.0), GaussianHead(3, 7))
    model = DualEncoder(tower, tiny_model().text).eval()
    prepare, encode = embedding_steps(tower, "images")
    found = encode([prepare((tmp_path / f"{k}.png").read_bytes()) for k in range(3)])
    assert not (tmp_path / "cache").exists()
    expected, ids, _ = embed_folder(Model(model=model, distance="csd", logit_scale=1.0, logit_bias=0.0), tmp_path)
    assert ids == ["0.png", "1.png", "2.png"]
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-6)


def test_names_that_are_no_ids_are_left_out_of_a_folder(tmp_path):
    for name in ("fine.png", "two\nlines.png", "tab\t.png"):
        (tmp_path / name).write_bytes(numbered(3))
    (tmp_path / "link.png").symlink_to(tmp_path / "fine.png")
    try:
        (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(numbered(3))
    except OSError:
        pytest.skip("this file system takes only Unicode")
    model = Model(model=tiny_model(), distance="csd", logit_scale=1.0, logit_bias=0.0)
    _, ids, problems = embed_folder(model, tmp_path)
    assert ids == ["fine.png", "link.png"]
    said = {p.reason.partition(" holds ")[0].partition(" (")[0] for p in problems.items}
    assert said == {r"the id 'two\nlines.png'", r"the id 'tab\t.png'", r"the id '\udcff.png' is not Unicode"}
