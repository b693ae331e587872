"""CLIP, SigLIP and residual networks against the unchanged transformers: values, training and folders.
The [UNC] token: where it looks, what it leaves alone; its released weights are in test_hub.py."""

import copy
import json

import pytest
import torch
from support.lazy import Lazy
from support.raising import raises
from support.tiny_models import tiny_resnet

from sfumato.encoders import clip
from sfumato.encoders.clip import ClipImageConfig, ClipImageEncoder, ClipTextConfig, ClipTextEncoder
from sfumato.encoders.convolutional import ResNetImageConfig, resnet_encoder
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.heads import POOLINGS, GaussianHead, HeadOptions
from sfumato.errors import UserError

transformers = Lazy("transformers", "the extra backbones is not installed")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
IMAGE = {
    "clip 8/24": ("clip", {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24}),
    "clip 8/16, gelu": (
        "clip",
        {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16, "hidden_act": "gelu"},
    ),
    "siglip 8/24": ("siglip", {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 24}),
}
TEXT = {
    "clip": ("clip", {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}),
    "clip, gelu": ("clip", {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "hidden_act": "gelu"}),
    "siglip": ("siglip", {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3}),
}
CASES = [("image", case) for case in IMAGE] + [("text", case) for case in TEXT]


def plain(kind, side, dtype=torch.float64, seed=0, **options):
    """A tower as transformers builds it, its norms and biases random too, so that one too many or too few shows."""
    name = {"clip": "CLIP", "siglip": "Siglip"}[kind] + {"image": "Vision", "text": "Text"}[side]
    model, config = (getattr(transformers, name + ending) for ending in ("Model", "Config"))
    own = {"patch_size": 8} if side == "image" else {"vocab_size": 30, "max_position_embeddings": 9, "pad_token_id": 0}
    torch.manual_seed(seed)
    built = model(config(intermediate_size=20, **own, **options)).to(dtype).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return built


def image_encoder(backbone, **options):
    dtype, config = next(backbone.parameters()).dtype, ClipImageConfig(**options)
    return ClipImageEncoder(copy.deepcopy(backbone), config, pixel_mean=MEAN, pixel_std=STD).to(dtype).eval()


def text_encoder(backbone, **options):
    encoder = ClipTextEncoder(copy.deepcopy(backbone), ClipTextConfig(**options))
    return encoder.to(next(backbone.parameters()).dtype).eval()


def clip_image_encoder(weights="", *, description=None, **options):
    return clip.clip_image_encoder(ClipImageConfig(weights=weights, **options), description=description)


def clip_text_encoder(weights="", *, description=None, **options):
    return clip.clip_text_encoder(ClipTextConfig(weights=weights, **options), description=description)


def pixels(n=3, size=24, dtype=torch.float64, seed=1):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def before_last_norm(backbone, values):
    seen = []
    with torch.no_grad(), backbone.encoder.layers[-1].register_forward_hook(lambda _, __, out: seen.append(out)):
        backbone(values)
    return seen[0]


IDS = torch.randint(1, 30, (4, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("side", "case"), CASES)
def test_features_are_those_of_the_whole_tower_and_the_log_variance_has_its_own_last_blocks_and_no_norm(side, case):
    kind, options = (IMAGE if side == "image" else TEXT)[case]
    backbone, values, mask = plain(kind, side, **options), IDS, torch.ones_like(IDS, dtype=torch.bool)
    build, given, other = text_encoder, IDS, copy.deepcopy(backbone)
    if side == "image":
        build, values, mask = image_encoder, pixels(size=options["image_size"]), None
        mean, std = (torch.tensor(v).to(values).view(3, 1, 1) for v in (MEAN, STD))
        given = (values - mean) / std
    encoder = build(backbone, variance_blocks=2)
    with torch.no_grad():
        for parameter in encoder.variance_blocks.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for block, place in zip(encoder.variance_blocks, other.encoder.layers[-2:], strict=True):
            place.load_state_dict(block.state_dict())
        features, alone = encoder(Inputs(values, mask)), build(backbone, variance_blocks=0)(Inputs(values))
        whole, last = backbone(given), before_last_norm(backbone, given)
    torch.testing.assert_close(features.log_var, before_last_norm(other, given))
    assert (features.log_var - features.mean).abs().max() > 0.1
    assert features.mask is mask and alone.mask is alone.log_var is None
    torch.testing.assert_close(alone.mean, features.mean)
    if side == "text":
        torch.testing.assert_close(features.mean, whole.last_hidden_state)
        return
    torch.testing.assert_close(features.mean, last)
    with torch.no_grad():
        normed = build(backbone, final_norm=True)(Inputs(values)).mean
    # CLIP's tower norms the class token for its pooler only, SigLIP's all tokens of its last hidden state.
    torch.testing.assert_close(normed, backbone.post_layernorm(last))
    torch.testing.assert_close(*((normed[:, 0], whole.pooler_output) if kind == "clip" else (normed, whole[0])))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_features_of_a_model_of_both_sides_saved_to_a_folder(kind, tmp_path):
    vision = plain(kind, "image", torch.float32, **IMAGE["clip 8/24"][1])
    words = plain(kind, "text", torch.float32, **TEXT["clip"][1])
    name = {"clip": "CLIP", "siglip": "Siglip"}[kind]
    model, config = (getattr(transformers, name + ending) for ending in ("Model", "Config"))
    both = model(config(text_config=words.config.to_dict(), vision_config=vision.config.to_dict()))
    both.vision_model.load_state_dict(vision.state_dict())
    both.text_model.load_state_dict(words.state_dict())
    both.save_pretrained(tmp_path)
    image, text = clip_image_encoder(str(tmp_path), final_norm=True).eval(), clip_text_encoder(str(tmp_path)).eval()
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    if kind == "siglip":
        mean = std = (0.5,) * 3
    whole = (torch.arange(3 * 3 * 24 * 24).view(3, 3, 24, 24) * 7 % 256).to(torch.uint8)
    values = (whole / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        expected = vision.post_layernorm(before_last_norm(vision, values))
        torch.testing.assert_close(image(Inputs(whole)).mean, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(text(Inputs(IDS)).mean, words(IDS).last_hidden_state, rtol=1e-5, atol=1e-5)
    assert text.causal == (kind == "clip")


def test_each_side_saved_alone_and_in_half_precision_learns_in_float32(tmp_path):
    image = plain("clip", "image", torch.float32, **IMAGE["clip 8/24"][1])
    text = plain("siglip", "text", torch.float32, **TEXT["siglip"][1])
    image.half().save_pretrained(tmp_path / "image")
    text.bfloat16().save_pretrained(tmp_path / "text")
    for encoder, values, backbone in (
        (clip_image_encoder(str(tmp_path / "image")), pixels(dtype=torch.float32), image),
        (clip_text_encoder(str(tmp_path / "text")), IDS, text),
    ):
        assert {p.dtype for p in encoder.parameters()} == {torch.float32}
        features = encoder(Inputs(values))
        assert features.mean.dtype == features.log_var.dtype == torch.float32
        (features.mean.sum() + features.log_var.sum()).backward()
        stored = backbone.encoder.layers[-1].mlp.fc1.weight
        assert torch.equal(encoder.mean_blocks[0].mlp.fc1.weight.to(stored), stored)
    # A folder that asks for eager attention, which leaves the mask to its caller, is causal all the same.
    backbone = plain("clip", "text", torch.float32, **TEXT["clip"][1])
    backbone.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "eager"}))
    assert transformers.CLIPTextModel.from_pretrained(tmp_path).config._attn_implementation == "eager"
    with torch.no_grad():
        ours = clip_text_encoder(str(tmp_path)).eval()(Inputs(IDS)).mean
        torch.testing.assert_close(ours, backbone(IDS).last_hidden_state, rtol=1e-5, atol=1e-5)


def test_a_random_start_is_that_of_the_whole_tower():
    """CLIP's own start, not torch's for a bare layer: biases 0, norms 1, the stated deviations of its weights."""
    width, layers = 64, 3
    options = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2, "image_size": 16}
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(intermediate_size=4 * width, patch_size=8, **options)
    encoder = ClipImageEncoder(transformers.CLIPVisionModel(config), ClipImageConfig(variance_blocks=2))
    (block, second), own = encoder.variance_blocks, encoder.mean_blocks[0]
    assert not torch.equal(block.mlp.fc1.weight, second.mlp.fc1.weight)
    assert not torch.equal(block.mlp.fc1.weight, own.mlp.fc1.weight)
    for name, parameter in block.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "norm" in name:
            assert parameter.eq(1).all(), name
    for layer, expected in (
        (block.self_attn.q_proj, width**-0.5 * (2 * layers) ** -0.5), (block.self_attn.out_proj, width**-0.5),
        (block.mlp.fc2, width**-0.5 * (2 * layers) ** -0.5), (block.mlp.fc1, (2 * width) ** -0.5),
    ):  # fmt: skip
        # 4096 weights or more: the deviation is known to about 1 %.
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("size", [16, 24, 40])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_position_codes_are_interpolated_to_another_size(kind, size, tmp_path):
    backbone = plain(kind, "image", torch.float32, **IMAGE["clip 8/24"][1])
    backbone.save_pretrained(tmp_path)
    encoder = clip_image_encoder(str(tmp_path), size=size, final_norm=True).eval()
    codes, before = encoder.embeddings.position_embedding.weight, backbone.embeddings.position_embedding.weight
    extra = int(kind == "clip")
    grid = before[extra:].detach().T.reshape(1, -1, 3, 3)
    side = size // 8
    expected = torch.nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    assert codes.shape == (side**2 + extra, 16) and codes.requires_grad and encoder.size == size
    torch.testing.assert_close(codes[extra:], expected[0].flatten(1).T)
    assert torch.equal(codes[:extra], before[:extra])
    if size == 24:
        assert torch.equal(codes, before)
    values = pixels(size=size, dtype=torch.float32)
    with torch.no_grad():
        whole = backbone(encoder.pixels(values), interpolate_pos_encoding=True).last_hidden_state
        ours = encoder(Inputs(values)).mean
    torch.testing.assert_close(ours, backbone.post_layernorm(whole) if kind == "clip" else whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("side", "case", "size"), [*((*case, None) for case in CASES), ("image", "clip 8/24", 40)])
def test_an_encoder_is_built_again_from_its_description(side, case, size, tmp_path):
    kind, options = (IMAGE if side == "image" else TEXT)[case]
    plain(kind, side, torch.float32, **options).save_pretrained(tmp_path)
    if side == "image":
        build, settings, changes = clip_image_encoder, {"final_norm": True, "variance_blocks": 2}, {"size": size}
    else:
        build, settings, changes = clip_text_encoder, {"variance_blocks": 1}, {}
    first = build(str(tmp_path), **settings, **changes).eval()
    second = build(description=json.loads(json.dumps(first.description)), **settings).eval()
    inputs = Inputs(pixels(size=first.size, dtype=torch.float32) if side == "image" else IDS)
    assert second.description == first.description and str(second) == str(first)
    with torch.no_grad():
        expected = first(inputs)
        assert (second(inputs).mean - expected.mean).abs().max() > 0.01
        second.load_state_dict(first.state_dict())
        features = second(inputs)
    assert torch.equal(features.mean, expected.mean) and torch.equal(features.log_var, expected.log_var)
    if side == "image":
        assert second.size == (size or options["image_size"])
    else:
        assert second.max_tokens == 9 and second.causal == (kind == "clip")


def test_towers_without_weights_have_clips_shapes_and_what_is_no_resnet_is_refused(tmp_path):
    """The defaults are those of transformers, which are ViT-B/32's; without memory."""
    with torch.device("meta"):
        image, text = clip_image_encoder(variance_blocks=0, final_norm=True), clip_text_encoder(variance_blocks=0)
        whole = transformers.CLIPVisionModel(transformers.CLIPVisionConfig())
        words = transformers.CLIPTextModel(transformers.CLIPTextConfig())
        large = clip_image_encoder(architecture="ViT-L/14", size=336, activation="gelu", variance_blocks=2)
    for ours, theirs in ((image, whole), (text, words)):
        assert sorted(p.shape for p in ours.parameters()) == sorted(p.shape for p in theirs.parameters())
    assert (text.max_tokens, image.size) == (77, 224)
    assert large.embeddings.position_embedding.weight.shape == (24 * 24 + 1, 1024)
    activations = [type(one.shared_blocks[0].mlp.activation_fn) for one in (image, large)]
    assert activations[0] is type(whole.encoder.layers[0].mlp.activation_fn) is not activations[1]
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    raises(UserError, "model.image.weights must name a ResNet", resnet_encoder, ResNetImageConfig())
    message = "a model of type 'vit'; kind 'resnet' takes type 'resnet' only"
    raises(UserError, message, resnet_encoder, ResNetImageConfig(weights=str(tmp_path)))


@pytest.mark.parametrize("side", ["image", "text"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_recomputed_activations_give_the_same_gradients(kind, side):
    """With dropout of the attention, whose draws must be repeated; and they are recomputed, in training only."""
    options = (IMAGE["clip 8/24"] if side == "image" else TEXT["clip"])[1] | {"attention_dropout": 0.3}
    backbone, build = plain(kind, side, **options), image_encoder if side == "image" else text_encoder
    values = Inputs(pixels() if side == "image" else IDS)
    kept, recomputed = build(backbone), build(backbone, checkpointing=True)
    recomputed.load_state_dict(kept.state_dict())
    gradients, calls = [], []
    for encoder in (kept, recomputed):
        count = []
        for block in (*encoder.shared_blocks, *encoder.mean_blocks, *encoder.variance_blocks):
            block.mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        torch.manual_seed(5)
        features = encoder.train()(values)
        weight = torch.randn(features.mean.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        (features.mean * weight + features.log_var * weight.flip(0)).sum().backward()
        gradients.append({name: p.grad for name, p in encoder.named_parameters() if p.grad is not None})
        with torch.no_grad():
            calls.append(len(count))
            encoder.eval()(values)
            calls.append(len(count) - calls[-1])
    assert calls == [4, 4, 8, 4] and gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 4 * 16
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=lambda text, name=name: f"{name}: {text}")
    assert max(g.abs().max() for g in gradients[0].values()) > 0.1


@pytest.mark.parametrize("normalised", [True, False])
def test_features_of_a_saved_model_are_its_last_map_of_standardised_pixels(tmp_path, normalised):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    plain = tiny_resnet(tmp_path, do_normalize=normalised, image_mean=list(mean), image_std=list(std))
    for buffer in plain.buffers():  # Running statistics other than those of a new network.
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    plain.save_pretrained(tmp_path)
    encoder = resnet_encoder(ResNetImageConfig(weights=str(tmp_path))).eval()
    values = (255 * pixels(2, 64)).to(torch.uint8)
    of_plain = values / 255
    if normalised:
        of_plain = (of_plain - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    maps, tokens = plain(of_plain).last_hidden_state, encoder(Inputs(values))
    assert tokens.mask is None and tokens.mean.shape == (2, maps.shape[2] * maps.shape[3], 8) and encoder.channels == 8
    for row in range(maps.shape[2]):
        for column in range(maps.shape[3]):
            torch.testing.assert_close(tokens.mean[:, row * maps.shape[3] + column], maps[:, :, row, column])
    torch.testing.assert_close(encoder(Inputs(values / 255)).mean, tokens.mean)
    again = resnet_encoder(ResNetImageConfig(weights="nobody looks it up"), description=encoder.description).eval()
    again.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(again(Inputs(values)).mean, tokens.mean, rtol=0, atol=0)
    assert again.description == encoder.description


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2}
OF_IMAGE = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "patch_size": 8}
UNC_IMAGE = {
    "backbone": SIZES | OF_IMAGE | {"image_size": 24}, "pixel_mean": (0.4, 0.5, 0.6), "pixel_std": (0.2, 0.3, 0.4)
}  # fmt: skip
OF_TEXT = {"model_type": "clip_text_model", "hidden_size": 12, "intermediate_size": 20, "vocab_size": 30}
OF_TEXT |= {"max_position_embeddings": 7, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
UNC_TEXT = {"backbone": SIZES | OF_TEXT}


def unc_image(**options):
    torch.manual_seed(0)
    inner = clip.clip_image_encoder(ClipImageConfig(variance_blocks=0, final_norm=True), description=UNC_IMAGE)
    return clip.UncTokenImageEncoder(inner, **options).eval()


def unc_text(**options):
    torch.manual_seed(0)
    inner = clip.clip_text_encoder(ClipTextConfig(variance_blocks=0), description=UNC_TEXT)
    return clip.UncTokenTextEncoder(inner, **options).eval()


PIXELS = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(1, 30, (4, 6), generator=torch.Generator().manual_seed(2))
MASK = torch.arange(6) < torch.tensor([6, 2, 3, 1]).unsqueeze(1)


def test_norms_of_the_image_mean_and_what_the_variance_token_moves():
    clean, released = unc_image(), unc_image(released=True)
    torch.nn.init.normal_(clean.encoder.norm_out.weight)
    torch.nn.init.normal_(clean.encoder.norm_out.bias)
    released.load_state_dict(clean.state_dict())
    once, twice = clean(Inputs(PIXELS)), released(Inputs(PIXELS))
    torch.testing.assert_close(twice.mean, clean.encoder.norm_out(once.mean))
    torch.testing.assert_close(twice.log_var, once.log_var)
    assert (twice.mean - once.mean).abs().max() > 0.1
    encoder = unc_image()
    before = encoder(Inputs(PIXELS))
    torch.nn.init.normal_(encoder.variance_token)
    after = encoder(Inputs(PIXELS))
    assert (after.log_var - before.log_var).abs().max() > 0.1 and (after.mean - before.mean).abs().max() > 1e-3
    names = [f"encoder.shared_blocks.{k}.mlp.fc1.weight" for k in (1, 0)] + ["encoder.embeddings.class_embedding"]
    assert [encoder.blocks_from_top(name) for name in (*names, "variance_token")] == [1, 2, 0, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_padding_has_no_influence_on_texts(causal):
    encoder = unc_text()
    encoder.causal = causal
    together, other_padding = encoder(Inputs(WORDS.masked_fill(~MASK, 0), MASK)), encoder(Inputs(WORDS, MASK))
    head = GaussianHead(12, 5, HeadOptions(pooling="last")).eval()
    torch.testing.assert_close(head(together).mean, head(other_padding).mean)
    torch.testing.assert_close(together.log_var, other_padding.log_var)
    for i, n in enumerate(MASK.sum(1).tolist()):
        alone = encoder(Inputs(WORDS[i : i + 1, :n], MASK[i : i + 1, :n]))
        torch.testing.assert_close(alone.log_var, together.log_var[i : i + 1])
        torch.testing.assert_close(head(alone).mean, head(together).mean[i : i + 1])


def test_a_causal_text_does_not_see_what_is_appended_and_as_released_it_fills_the_context():
    plain = clip.clip_text_encoder(ClipTextConfig(variance_blocks=0), description=UNC_TEXT).eval()
    encoder = clip.UncTokenTextEncoder(plain).eval()
    assert encoder.causal
    torch.testing.assert_close(encoder(Inputs(WORDS, MASK)).mean[MASK], plain(Inputs(WORDS, MASK)).mean[MASK])
    torch.testing.assert_close(encoder(Inputs(WORDS)).mean, plain(Inputs(WORDS)).mean)
    free = clip.UncTokenTextEncoder(plain).eval()
    free.causal = False
    assert (free(Inputs(WORDS, MASK)).mean - plain(Inputs(WORDS, MASK)).mean)[MASK].abs().max() > 1e-3
    encoder, whole = unc_text(released=True), torch.nn.functional.pad(WORDS, (0, 1), value=1)
    tokens = encoder(Inputs(whole))
    assert tokens.mean.shape == (4, 1, 12) and tokens.log_var is None
    raises(ValueError, "padded to 7 tokens", encoder, Inputs(WORDS))
    raises(ValueError, "all of them in the mask", encoder, Inputs(whole, torch.nn.functional.pad(MASK, (0, 1))))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_takes_the_variance_token_as_it_is(pooling):
    torch.manual_seed(0)
    head, tokens = GaussianHead(12, 5, HeadOptions(pooling=pooling)).eval(), unc_text()(Inputs(WORDS, MASK))
    torch.testing.assert_close(head(tokens).log_var, head.log_var.linear(tokens.log_var[:, 0]))
