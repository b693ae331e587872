"""Encoders of every kind keep the written protocol, also one from outside the package and folders of graphs."""

import json
from typing import Literal
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from pydantic import Field, PositiveInt
from support import graphs
from support.graphs import LENGTH, MEAN, OF_PIXELS, OF_WORDS, RANDOM, SIZE, STD, WORDS, D, dump, of_images
from support.pictures import encoded
from support.raising import raises
from support.tiny_models import import_open_clip, tiny_architecture, tiny_open_clip, tiny_resnet
from support.toy import make_toy
from tokenizers import Tokenizer, models, pre_tokenizers

from sfumato.data.image_decoding import encode_png
from sfumato.encoders.backbones import foreign_towers
from sfumato.encoders.encoder_protocol import ImageEncoderConfig, TextEncoderConfig
from sfumato.encoders.frozen import FrozenImageConfig, FrozenTextConfig
from sfumato.encoders.heads import TokenFeatures
from sfumato.encoders.joint import joint_backbone
from sfumato.encoders.package_weights import is_open_clip, pretrained_tokenizer
from sfumato.encoders.processors import PixelProcessor, TokenProcessor
from sfumato.encoders.registry import ENCODERS, encoder_entry, encoder_section, register_encoder
from sfumato.encoders.scratch import Encoder, SmallImageConfig, SmallTextConfig
from sfumato.errors import UserError
from sfumato.models.build import Assets, build_model, fresh_tokenizer
from sfumato.models.embed import evaluate_run
from sfumato.models.model import model_digest
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


def test_an_encoder_from_outside_trains_evaluates_embeds_and_is_exported(registered, tmp_path):
    settings = ["model.image.kind=toy", "model.image.width=6", "model.text.kind=toy", "train.epochs=1"]
    recipe = load_recipe(make_toy(tmp_path), settings)
    assert type(recipe.model.image) is ToyImageConfig and recipe.model.image.width == 6
    fit(recipe, run := tmp_path / "run")
    assert load_recipe(run / "recipe.toml") == recipe
    assert (run / "encoders.json").read_text().split() == ["{", '"image":', "{", '"rows":', "24", "}", "}"]
    loaded = load_run(run)
    assert isinstance(loaded.model.image.encoder, ToyImageEncoder)
    assert 0 < evaluate_run(loaded, "test")[0].rsum <= 6
    exported, texts = load_model(export_run(run, tmp_path / "out")), ["a red circle", "blue"]
    assert torch.equal(loaded.model.embed_texts(texts).mean, exported.model.embed_texts(texts).mean)


def test_sections_and_registrations_that_do_not_fit_are_refused(registered, tmp_path):
    recipe, toy = make_toy(tmp_path), ["model.image.kind=toy", "model.text.kind=toy"]
    for override, message in (
        ("model.image.widht=3", r"unknown key 'model.image.widht'; did you mean 'model.image.width'\?"),
        ("model.image.size=1", r"model.image.size: Input should be greater than or equal to 2 \(got 1\)"),
        ("model.image.width=101", "model.image.width=101 is too much for a toy"),
        ("optim.freeze_image_epochs=1", "model.image with kind='toy' starts from random weights"),
    ):
        raises(UserError, message, load_recipe, recipe, [*toy, override])
    for arguments, message in (
        (("sound", "toy", ToyImageConfig), "unknown side 'sound'; expected 'image' or 'text'"),
        (("image", "clip", ToyImageConfig), "the image side has an encoder of kind 'clip' already"),
        (("text", "new", ToyImageConfig), "ToyImageConfig must be a subclass of TextEncoderConfig"),
        (("image", "new", ToyImageConfig), "kind of ToyImageConfig has the default 'toy', expected 'new'"),
    ):
        raises(ValueError, message, register_encoder, *arguments, build_toy_image)
    assert "new" not in ENCODERS["image"] | ENCODERS["text"]
    known = ", ".join(sorted(ENCODERS["image"]))
    raises(ValueError, f"unknown kind of image encoder 'gru'; known: {known}", encoder_entry, "image", "gru")
    message = "got a SmallTextConfig, which is not the config class of the image side of 'small'"
    raises(ValueError, message, encoder_section, "image", SmallTextConfig())
    section = SmallImageConfig(width=3)
    assert encoder_section("image", section) is section
    for value, message in (
        ("small", "model.image: Input should be a valid dictionary"), ({"size": 32}, "model.image: needs its 'kind'"),
        ({"kind": "smal"}, "model.image.kind: unknown 'smal'; did you mean 'small'"),
        ({"kind": 7}, f"model.image.kind: unknown '7'; known: {known}"),
        ({"kind": ["small"]}, "model.image.kind: unknown"),
    ):  # fmt: skip
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


LAYOUTS = graphs.immich, graphs.transformers_js, graphs.fastembed
immich, transformers_js, fastembed = (pytest.fixture(lambda tmp_path, make=make: make(tmp_path)) for make in LAYOUTS)
TEXTS = ["a red  dog", "the dog", "a red dog the dog the dog a dog"]


def picture(width=20, height=10):
    pixels = RANDOM.integers(0, 256, (3, height, width), np.uint8)
    return encode_png(pixels), Image.fromarray(pixels.transpose(1, 2, 0))


unit = lambda values: values / np.linalg.norm(values, axis=-1, keepdims=True)


def expected_image(image, squash=False):
    wide = SIZE if squash else 2 * SIZE
    resized = image.resize((wide, SIZE), Image.Resampling.BICUBIC)
    pixels = np.asarray(resized.crop(((wide - SIZE) // 2, 0, (wide + SIZE) // 2, SIZE)))
    return unit(((pixels / 255 - MEAN) / STD).transpose(2, 0, 1).reshape(-1) @ OF_PIXELS)


def expected_text(text, padded):
    ids = [*map(WORDS.index, text.split()[: LENGTH - 1]), 1]
    return unit(OF_WORDS[ids + [0] * (LENGTH - len(ids)) * padded].sum(0))


@pytest.mark.parametrize("layout", ["immich", "transformers_js", "fastembed"])
def test_a_folder_of_graphs_is_a_model_of_points(layout, request, tmp_path):
    folder = request.getfixturevalue(layout)
    model, (first, one), (second, other) = load_model(folder), picture(), picture()
    images, texts = model.embed_images([first, second]), model.embed_texts(TEXTS)
    assert isinstance(images.mean, np.ndarray) and np.isneginf(images.log_var).all() and not model.calibrated
    np.testing.assert_allclose(images.mean, [expected_image(one), expected_image(other)], atol=1e-5)
    np.testing.assert_allclose(texts.mean, [expected_text(text, layout == "immich") for text in TEXTS], atol=1e-5)
    for tower in (model.model.image, model.model.text):
        assert (tower.dim, tower.variances, tower.has_offset, tower.normalize) == (D, False, False, True)
    assert model.unfamiliar_texts(["red"]) == [False] and model.model.text.processor.pieces(["red", "a dog"]) == [1, 2]
    assert model_digest(model.model) == model_digest(load_model(folder).model)
    path = next(path for path in tmp_path.rglob("*model.onnx") if "vis" in str(path.relative_to(tmp_path)))
    of_images(path, "image" if layout == "immich" else "pixel_values", "embedding", "another")
    assert model_digest(model.model) != model_digest(load_model(folder).model)


def test_settings_are_followed(immich):
    found = load_model(immich).embed_texts(["A RED dog"])
    np.testing.assert_allclose(found.mean, [expected_text("a red dog", True)], atol=1e-5)
    path = immich / "visual" / "preprocess_cfg.json"
    settings, (data, image) = json.loads(path.read_text()), picture()
    dump(path, settings | {"resize_mode": "squash"})
    np.testing.assert_allclose(load_model(immich).embed_images([data]).mean[0], expected_image(image, True), atol=1e-5)
    of_images(immich / "visual" / "model.onnx", "image", "embedding", 1, uint8=True)  # It has mean and deviation.
    pixels = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).reshape(-1)
    np.testing.assert_allclose(load_model(immich).embed_images([data]).mean[0], unit(pixels @ OF_PIXELS), atol=1e-5)
    for wrong, message in (
        ({"interpolation": "bilinear"}, "resized by 'bilinear', not bicubic"), ({"resize_mode": "longest"}, "KeyError"),
    ):  # fmt: skip
        dump(path, settings | wrong)
        raises(UserError, message, load_model, immich)
    path.unlink()
    raises(UserError, "expected visual/model.onnx, .*, config.json, textual/tokenizer.json", load_model, immich)


def test_a_package_that_a_tokenizer_needs_is_named(monkeypatch, tmp_path):
    tokenizers = pytest.importorskip("transformers", reason="the extra backbones is not installed").AutoTokenizer
    needs = ImportError("\nIts tokenizer requires the SentencePiece library. Check out the instructions")
    monkeypatch.setattr(tokenizers, "from_pretrained", Mock(side_effect=needs))
    raises(UserError, "requires the SentencePiece library; install it", pretrained_tokenizer, str(tmp_path))


@pytest.mark.parametrize("kind, text", [("siglip", "a red dog"), ("clip", "A Red dog")])
def test_a_siglip_reads_lower_case_texts(kind, text, transformers_js):
    dump(transformers_js / "config.json", {"model_type": kind})
    assert load_model(transformers_js).model.text.processor.clean("A Red dog") == text


def test_a_damaged_graph_is_named_and_other_folders_are_none_of_these(transformers_js, tmp_path_factory):
    (transformers_js / "onnx" / "text_model.onnx").write_bytes(b"not a graph")
    model = load_model(transformers_js)
    raises(UserError, r"text_model.onnx: not a graph that onnxruntime reads", model.embed_texts, ["a"])
    assert model.embed_images([picture()[0]]).n == 1, "each is read when it is needed"
    none = tmp_path_factory.mktemp("none")
    assert foreign_towers([none]) is None
    message = r"graphs, but not the settings .* no .*model.onnx.*; expected test_\w+/model.onnx, none0/model.onnx"
    raises(UserError, message, load_model, f"{transformers_js}+{none}")


@pytest.mark.parametrize("device", ["cuda:1", "coreml", "openvino"])
def test_a_device_of_onnxruntime_is_taken_or_refused_with_those_that_are_there(device, transformers_js, monkeypatch):
    monkeypatch.setenv("SFUMATO_DEVICE", device)
    message = f"device '{device}': this model is computed by onnxruntime, which has cpu here. .*SFUMATO_DEVICE=cpu"
    for source in (transformers_js, "small"):
        assert load_model(source), "the processor by default"
        raises(UserError, message, load_model, source, device="auto")
    names = {"cuda:1": "CUDA", "coreml": "CoreML", "openvino": "OpenVINO"}
    there, given = ["CPUExecutionProvider", f"{names[device]}ExecutionProvider"], []
    session = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: there)

    def made(path, options, providers):
        given.append(providers)
        return session(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", made)
    for source, n in ((transformers_js, 1), ("small", 2)):  # small: the sentence encoder and the head.
        load_model(source, device="auto").embed_texts(["a dog"])
        options = {"device_id": "1"} if device == "cuda:1" else {}
        assert [given.pop() for _ in range(n)] == [[(there[1], options), "CPUExecutionProvider"]] * n and not given
    load_model(transformers_js, device="cpu").embed_texts(["a dog"])
    assert given == [["CPUExecutionProvider"]]


def test_features_are_those_of_open_clip(tmp_path):
    model, preprocess, tokenizer = tiny_open_clip(tmp_path / "model")
    image, text = joint_backbone(str(tmp_path / "model"), "image"), joint_backbone(str(tmp_path / "model"), "text")
    picture = Image.effect_noise((40, 30), 90).convert("RGB")
    captions = ["a red square", "blue " * 30]
    with torch.inference_mode():
        of_image, of_texts = model.encode_image(preprocess(picture)[None]), model.encode_text(tokenizer(captions))
    assert image.channels == text.channels == 8
    torch.testing.assert_close(torch.from_numpy(image([encoded(picture)])[0]), of_image)
    torch.testing.assert_close(torch.cat([torch.from_numpy(found) for found in text(captions)]), of_texts)
    assert image.fingerprint != text.fingerprint and "processor" in image.fingerprint
    assert text.pieces(["red", "photographically"])[0] == 1 < text.pieces(["photographically"])[0]
    half = joint_backbone(str(tmp_path / "model"), "text", precision="bfloat16")
    assert half.fingerprint != text.fingerprint
    torch.testing.assert_close(torch.tensor(half(captions)[0]), of_texts[:1], atol=0.05, rtol=0.05)


def test_names_and_models_of_open_clip_that_cannot_be_loaded(tmp_path, monkeypatch):
    assert is_open_clip("open_clip:ViT-B-32/laion2b_s34b_b79k") and is_open_clip("hf-hub:timm/ViT-B-16-SigLIP")
    assert not is_open_clip("openai/clip-vit-base-patch32") and not is_open_clip(str(tmp_path))
    (tmp_path / "open_clip_config.json").touch()
    assert is_open_clip(str(tmp_path))
    (tmp_path / "config.json").touch()  # The hub's laion models have the files of both; transformers needs no extra.
    assert not is_open_clip(str(tmp_path))
    for config in (FrozenImageConfig, FrozenTextConfig):
        assert config(backbone="hf-hub:a/b", projected=True).extras == {"open-clip"}
        assert config(backbone="openai/clip-vit-base-patch32").extras == {"backbones"}
    import_open_clip()
    monkeypatch.setattr("sfumato.encoders.package_weights.hub_reachable", lambda: False)
    for name in ("open_clip:ViT-B-32/laion2b_s34b_b79k", "hf-hub:nobody/nothing"):
        raises(UserError, "no connection to the hub.*Give a local folder", joint_backbone, name, "image")
    tiny_open_clip(tmp_path / "model")
    weights = tmp_path / "model" / "open_clip_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    raises(UserError, "cannot load .*model", joint_backbone, str(tmp_path / "model"), "text")
    weights.rename(tmp_path / "model" / "open_clip_pytorch_model.bin")
    raises(UserError, "other weights are pickles", joint_backbone, str(tmp_path / "model"), "text")
