"""ENCODERS: every kind keeps the written protocol, and a kind from outside the package works like one of ours."""

from typing import Literal

import pytest
import torch
from pydantic import Field, PositiveInt
from support.raising import raises
from support.tiny_models import tiny_architecture, tiny_resnet
from support.toy import make_toy
from tokenizers import Tokenizer, models, pre_tokenizers

from sfumato.encoders.encoder_protocol import ImageEncoderConfig, TextEncoderConfig
from sfumato.encoders.heads import TokenFeatures
from sfumato.encoders.processors import PixelProcessor, TokenProcessor
from sfumato.encoders.scratch import Encoder, SmallImageConfig, SmallTextConfig
from sfumato.encoders.towers import ENCODERS, encoder_entry, encoder_section, register_encoder
from sfumato.errors import UserError
from sfumato.models.build import Assets, build_model, fresh_tokenizer
from sfumato.models.embed import evaluate_run
from sfumato.models.recipe import check_recipe, load_recipe, save_recipe
from sfumato.models.run import load_model, load_run
from sfumato.training.loop import fit
from sfumato.workflows.export import export_run


class ToyImageConfig(ImageEncoderConfig):
    kind: Literal["toy"] = "toy"
    size: int = Field(8, ge=2, description="side of the square images in pixels")
    width: PositiveInt = Field(5, description="channels of the token features")

    def check(self, section):
        if self.width > 100:
            raise ValueError(f"{section}.width={self.width} is too much for a toy; give at most 100")


class ToyImageEncoder(Encoder):
    """(n, 3, s, s) pixels -> (n, s, width): a token for each row."""

    def __init__(self, size, width):
        super().__init__()
        self.rows, self.channels = torch.nn.Linear(3 * size, width), width

    @property
    def description(self):
        return {"rows": self.rows.in_features}

    def forward(self, inputs):
        pixels = inputs.values.float() / (255 if inputs.values.dtype == torch.uint8 else 1)
        return TokenFeatures(self.rows(pixels.transpose(1, 2).flatten(2)))


build_toy_image = lambda config, context: (PixelProcessor(config.size), ToyImageEncoder(config.size, config.width))


class ToyTextConfig(TextEncoderConfig):
    kind: Literal["toy"] = "toy"
    width: PositiveInt = 4


class ToyTextEncoder(Encoder):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.letters, self.channels = torch.nn.Embedding(vocabulary, width), width

    def forward(self, inputs):
        return TokenFeatures(self.letters(inputs.values), inputs.mask)


def build_toy_text(config, context):
    tokenizer = context.need_tokenizer(config.kind)
    return TokenProcessor(tokenizer, 40), ToyTextEncoder(tokenizer.get_vocab_size(), config.width)


def toy_tokenizer(config, texts):
    letters = ["?", *sorted({letter for text in texts for letter in text})]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


@pytest.fixture
def registered():
    register_encoder("image", "toy", ToyImageConfig, build_toy_image)
    register_encoder("text", "toy", ToyTextConfig, build_toy_text, tokenizer=toy_tokenizer)
    yield
    for kinds in ENCODERS.values():
        kinds.pop("toy", None)


def toy_recipe(folder, *overrides):
    settings = ["model.image.kind=toy", "model.image.width=6", "model.text.kind=toy", "train.epochs=1", *overrides]
    return load_recipe(make_toy(folder), settings)


def test_an_encoder_from_outside_trains_evaluates_embeds_and_is_exported(registered, tmp_path):
    recipe = toy_recipe(tmp_path)
    assert type(recipe.model.image) is ToyImageConfig and recipe.model.image.width == 6
    run = tmp_path / "run"
    fit(recipe, run)
    assert load_recipe(run / "recipe.toml") == recipe
    assert (run / "encoders.json").read_text().split() == ["{", '"image":', "{", '"rows":', "24", "}", "}"]
    loaded = load_run(run)
    assert isinstance(loaded.model.image.encoder, ToyImageEncoder)
    result, _ = evaluate_run(loaded, "test")
    assert 0 < result.rsum <= 6
    exported = load_model(export_run(run, tmp_path / "out"))
    texts = ["a red circle", "blue"]
    assert torch.equal(loaded.model.embed_texts(texts).mean, exported.model.embed_texts(texts).mean)


def test_sections_and_registrations_that_do_not_fit_are_refused(registered, tmp_path):
    recipe, toy = make_toy(tmp_path), ["model.image.kind=toy", "model.text.kind=toy"]
    for override, message in (
        ("model.image.widht=3", r"unknown key 'model.image.widht'; did you mean 'model.image.width'\?"),
        ("model.image.size=1", r"model.image.size: Input should be greater than or equal to 2 \(got 1\)"),
        ("model.image.width=101", "model.image.width=101 is too much for a toy"),
        ("optim.freeze_image_epochs=1", "model.image with kind='toy' starts from random weights"),
        ("optim.layer_decay=0.5", "optim.layer_decay needs the blocks of a clip encoder"),
    ):
        raises(UserError, message, load_recipe, recipe, [*toy, override])
    cases = [
        (("sound", "toy", ToyImageConfig), "unknown side 'sound'; expected 'image' or 'text'"),
        (("image", "toy", ToyImageConfig), "the image side has an encoder of kind 'toy' already"),
        (("image", "clip", ToyImageConfig), "the image side has an encoder of kind 'clip' already"),
        (("text", "new", ToyImageConfig), "ToyImageConfig must be a subclass of TextEncoderConfig"),
        (("image", "new", ToyImageConfig), "kind of ToyImageConfig has the default 'toy', expected 'new'"),
    ]
    for arguments, message in cases:
        raises(ValueError, message, register_encoder, *arguments, build_toy_image)
    assert "new" not in ENCODERS["image"] | ENCODERS["text"]
    known = ", ".join(sorted(ENCODERS["image"]))
    raises(ValueError, f"unknown kind of image encoder 'gru'; known: {known}", encoder_entry, "image", "gru")
    message = "got a SmallTextConfig, which is not the config class of the image side of 'small'"
    raises(ValueError, message, encoder_section, "image", SmallTextConfig())
    section = SmallImageConfig(width=3)
    assert encoder_section("image", section) is section
    for value, message in (
        ("small", "model.image: Input should be a valid dictionary"),
        ({"size": 32}, "model.image: needs its 'kind'"),
        ({"kind": "smal"}, "model.image.kind: unknown 'smal'; did you mean 'small'"),
        ({"kind": 7}, f"model.image.kind: unknown '7'; known: {known}"),
        ({"kind": ["small"]}, "model.image.kind: unknown"),
    ):
        raises(UserError, message, check_recipe, {"name": "x", "model": {"image": value}}, "here")
    save_recipe(load_recipe(recipe, toy), tmp_path / "r.toml")
    del ENCODERS["image"]["toy"]
    raises(UserError, "model.image.kind: unknown 'toy'; known: clip, .*, small$", load_recipe, tmp_path / "r.toml")


KINDS = [(side, kind) for side, kinds in ENCODERS.items() for kind in kinds]
SMALL = {"clip": {"architecture": "ViT-Ti/16"}, "resnet": {"size": 32}, "efficientnet": {"size": 32}, "frozen": {}}
DATA = {
    "regions": {"source": "scan", "path": "."},
    "embeddings": {"source": "embeddings", "images": "images.npy", "texts": "texts.npy"},
}


@pytest.mark.parametrize(("side", "kind"), KINDS)
def test_every_kind_builds_an_encoder_that_keeps_the_protocol(side, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path))
    if kind in ("clip", "resnet"):
        pytest.importorskip("transformers", reason="the extra backbones is not installed")
    if kind == "efficientnet":
        pytest.importorskip("efficientnet_lite_pytorch", reason="the extra offline is not installed")
    section = {"kind": kind, **SMALL.get(kind, {})}
    tiny_architecture(monkeypatch)
    if kind == "resnet":
        tiny_resnet(tmp_path / "resnet")
        section["weights"] = str(tmp_path / "resnet")
    sides = dict.fromkeys(("image", "text"), section) if kind == "embeddings" else {side: section}
    recipe = check_recipe({"name": "x", "data": DATA.get(kind, {}), "model": sides}, "here")
    entry = ENCODERS[side][kind]
    assert type(getattr(recipe.model, side)) is entry.config and entry.config.model_fields["kind"].default == kind
    tokenizer = fresh_tokenizer(recipe.model, ["a red dog", "a blue cat"])
    assert (tokenizer is None) == (entry.tokenizer is None if side == "text" else kind == "embeddings")
    from_data = {key: {"channels": 3} for key in sides} if kind == "embeddings" else {}
    encoder = getattr(build_model(recipe.model, Assets(tokenizer, from_data)), side).encoder
    assert isinstance(encoder, Encoder) and encoder.channels > 0
    assert (encoder.description is not None) == entry.config.needs_description
    names = [name for name, _ in encoder.named_parameters()]
    assert (max(map(encoder.blocks_from_top, names), default=0) > 0) == entry.config.has_blocks
    if side == "image" and names:  # Above frozen features there is no parameter to freeze.
        assert any(map(encoder.freezes, names)) == getattr(recipe.model, side).starts_pretrained
