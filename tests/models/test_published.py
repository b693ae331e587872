"""Published models against what the released implementations computed, with randomised norms and biases."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.raising import raises

pytest.importorskip("tokenizers", reason="the extra backbones is not installed")

from support.pictures import encoded, noise
from tokenizers import Tokenizer, models, pre_tokenizers

from sfumato.data.transforms import IMAGENET_MEAN
from sfumato.encoders.clip import CLIP_MEAN, CLIP_STD
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.errors import UserError
from sfumato.models.pretrained import load_pretrained, pcmepp_hub, pcmepp_training, prolip_hub

# Relative as well as absolute: some values of the reference data exceed 10.
SINGLE, DOUBLE = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 0, "atol": 1e-9}


def no_tokenizer(name):
    def find():
        raise AssertionError(f"nobody asked for {name}")

    return find


@pytest.fixture(scope="module")
def parity(shared):
    folder = shared / "parity"
    if not (folder / "hf_pcmepp").is_dir():
        pytest.skip(f"no reference data of published models in {folder}")
    return folder


def clip_vision(model):
    encoder = model.image.encoder
    return getattr(encoder, "encoder", encoder)


def embed(model, values, dtype=torch.float32, lengths=None):
    model = model.to(dtype).eval()
    clip_vision(model).pixels.mean.zero_()
    clip_vision(model).pixels.std.fill_(1)
    ids = values["inputs/token_ids"]
    lengths = ids.argmax(1) + 1 if lengths is None else lengths
    mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    with torch.no_grad():
        tokens = model.image.encoder(Inputs(values["inputs/pixel_values"].to(dtype)))
        image, text = model.image.head(tokens), model.text(Inputs(ids, mask))
    sides = {"image": image, "text": text}
    return {f"{side}_{part}": getattr(e, part) for side, e in sides.items() for part in ("mean", "log_var")}


def assert_same(ours, values, name, tolerance, suffix=""):
    stored = {key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")}
    compared = [key for key in ours if key + suffix * key.endswith("mean") in stored]
    for key in compared:
        official = stored[key + suffix * key.endswith("mean")]
        assert official.dtype == ours[key].dtype, key
        torch.testing.assert_close(ours[key], official, **tolerance, msg=lambda text, key=key: f"{name}/{key}: {text}")
    assert len(compared) == (2 if name == "masked" else 4), f"{name}: only {compared} compared"


def assert_released(model, values, name="out", tolerance=SINGLE, dtype=torch.float32, lengths=None):
    assert_same(embed(model, values, dtype, lengths), values, name, tolerance)
    model.image.head.normalize = model.text.head.normalize = False
    assert_same(embed(model, values, dtype, lengths), values, name, tolerance, suffix="_raw")


def built(layout, dtype=torch.float32):
    layout.model.to(dtype).load_state_dict(layout.state)
    return layout.model.eval()


def stored(folder):
    config = json.loads((folder / "config.json").read_text())
    return folder, config, load_file(folder / "model.safetensors"), load_file(folder / "io.safetensors")


@pytest.fixture(scope="module")
def pcmepp(parity):
    return stored(parity / "hf_pcmepp")


@pytest.fixture(scope="module")
def prolip(parity):
    return stored(parity / "prolip")


def test_parity_pcmepp_hub(pcmepp):
    folder, config, tensors, values = pcmepp
    published = load_pretrained(folder)
    assert not published.model.training and published.distance == "csd" and "PCME++" in published.kind
    logits = tuple(values[f"out/{name}"].item() for name in ("negative_scale", "shift"))
    assert (published.logit_scale, published.logit_bias) == logits
    assert_same(embed(published.model, values), values, "out", SINGLE)
    assert_released(published.model, values, "out64", DOUBLE, torch.float64)
    # The longer config, and the other activation.
    longer = {**config, "cast_dtype": None, "output_dict": False, "quick_gelu": False}
    plain = embed(built(pcmepp_hub(longer, tensors, no_tokenizer, "x")), values)
    assert_same(plain, values, "out", SINGLE)
    quick = built(pcmepp_hub({**longer, "quick_gelu": True}, tensors, no_tokenizer, "x"))
    assert_released(quick, values, "quick_gelu")


def test_parity_prolip(prolip):
    folder, config, tensors, values = prolip
    n, context = values["inputs/token_ids"].shape
    lengths, published = torch.full((n,), context), load_pretrained(folder)
    # That these logits of csd are those of its loss is tested in losses/test_contrastive.py.
    scale, bias = (values[f"out64/logit_{name}"].item() for name in ("scale", "bias"))
    assert (published.logit_scale, published.logit_bias) == pytest.approx((scale / 2, bias + scale), rel=1e-12)
    # Classes: mean over templates of unit means, scaled to unit length, and mean of the variances.
    with torch.no_grad():
        texts = published.model.text(Inputs(values["zeroshot/token_ids"]))
    classes = (values["zeroshot/class_mean"].shape[1], -1)
    mean = torch.nn.functional.normalize(texts.mean.unflatten(0, classes).mean(1), dim=-1)
    torch.testing.assert_close(mean.T, values["zeroshot/class_mean"], **SINGLE)
    torch.testing.assert_close(texts.var.unflatten(0, classes).mean(1).T, values["zeroshot/class_var"], **SINGLE)
    assert_released(published.model, values, lengths=lengths)
    exact = built(prolip_hub(config, tensors, no_tokenizer, "x"), torch.float64)
    assert_released(exact, values, "out64", DOUBLE, torch.float64, lengths)
    quick = built(prolip_hub({**config, "quick_gelu": True}, tensors, no_tokenizer, "x"))
    assert_same(embed(quick, values, lengths=lengths), values, "quick_gelu", SINGLE)
    # As it was meant it is another model: one norm instead of two on the image mean, a text log variance from [UNC].
    model = load_pretrained(folder).model
    model.image.encoder.released = model.text.encoder.released = False
    meant = embed(model, values, lengths=lengths)
    for name, differs in (("image_mean", True), ("image_log_var", False), ("text_mean", False), ("text_log_var", True)):
        difference = (meant[name] - values[f"out/{name}"]).abs().max()
        assert difference > 1e-2 if differs else difference < 1e-4, name


@pytest.fixture(scope="module")
def towers(parity):
    values = load_file(parity / "pcmepp_towers.safetensors")
    state = {key.removeprefix("state/"): value for key, value in values.items() if key.startswith("state/")}
    config = json.loads((parity / "pcmepp_towers.json").read_text())["config"]
    return state, values, (config["vision_heads"], config["text_heads"])


def training_model(state, heads, dtype=torch.float32, **options):
    return built(pcmepp_training(options, state, no_tokenizer, "x", heads=heads), dtype)


def test_parity_pcmepp_training(towers):
    state, values, heads = towers
    model = training_model(state, heads)
    torch.testing.assert_close(model.image.encoder.pixels.mean.flatten(), torch.tensor(IMAGENET_MEAN))
    assert type(model.image.processor).__name__ == "BilinearProcessor"
    assert_same(embed(model, values, lengths=values["inputs/lengths"]), values, "out", SINGLE)
    raw = training_model(state, heads, model={"no_imgnorm": True, "no_txtnorm": True})
    raw = embed(raw, values, torch.float64, values["inputs/lengths"])
    # The released code divides by |x| + 1e-8, we by |x|: apart from that they agree to rounding.
    for side in ("image", "text"):
        norm = raw[f"{side}_mean"].norm(dim=1, keepdim=True)
        torch.testing.assert_close(raw[f"{side}_mean"] / (norm + 1e-8), values[f"out64/{side}_mean"], **DOUBLE)
        torch.testing.assert_close(raw[f"{side}_log_var"], values[f"out64/{side}_log_var"], **DOUBLE)
        torch.testing.assert_close(raw[f"{side}_mean"].float(), values[f"out/{side}_mean_raw"], **SINGLE)
    unit = embed(training_model(state, heads), values, torch.float64, values["inputs/lengths"])
    assert_same(unit, values, "out64", {"rtol": 0, "atol": 1e-8})


def test_parity_pcmepp_training_of_other_layers(towers):
    state, values, heads = towers
    with_norm = dict(state)
    for name in ("img_enc.image_std_ln", "txt_enc.text_std_ln"):
        dim = len(state["txt_enc.linear.bias"])
        with_norm |= {f"{name}.weight": torch.full((dim,), 0.01), f"{name}.bias": torch.zeros(dim)}
    ours = embed(training_model(with_norm, heads), values, lengths=values["inputs/lengths"])
    for side in ("image", "text"):
        torch.testing.assert_close(ours[f"{side}_log_var"], values[f"out_sigma_ln/{side}_log_var"], **SINGLE)
        torch.testing.assert_close(ours[f"{side}_mean"], values[f"out/{side}_mean"], **SINGLE)
    plain = {key: value for key, value in state.items() if "gpool" not in key}
    ours = embed(training_model(plain, heads), values, lengths=values["inputs/lengths"])
    assert_same(ours, values, "out_no_gpo", SINGLE)
    left_out = ("std", "uncertainty", "prob_", "criterion.")
    baseline = {key: value for key, value in state.items() if not any(word in key for word in left_out)}
    layout = pcmepp_training({}, baseline | {"criterion.tau": torch.ones(())}, no_tokenizer, "x", heads=heads)
    ours = embed(built(layout), values, lengths=values["inputs/lengths"])
    assert ours["image_log_var"].isneginf().all() and (layout.logit_scale, layout.logit_bias) == (1, 0)
    torch.testing.assert_close(ours["image_mean"], values["out/image_mean"], **SINGLE)
    torch.testing.assert_close(ours["text_mean"], values["out/text_mean"], **SINGLE)


def fits_whole(layout, config, shapes):
    with torch.device("meta"):
        built = layout(config, {key: torch.empty(shape) for key, shape in shapes.items()}, no_tokenizer, "x")
        built.model.load_state_dict(built.state)
    return sum(p.numel() for p in built.model.parameters())


def test_full_size(parity):
    pcmepp, prolip = (json.loads((parity / f / "full_size_keys.json").read_text()) for f in ("hf_pcmepp", "prolip"))
    assert len(pcmepp["tensors"]) == 354 == pcmepp["n_tensors"] and len(prolip["tensors"]) == 311 == prolip["n_tensors"]
    # Three logits are not the model's; the four projections have biases here, which are 0.
    parameters = fits_whole(pcmepp_hub, pcmepp["config"], pcmepp["tensors"])
    assert parameters == pcmepp["n_parameters"] - 3 + 4 * pcmepp["config"]["embed_dim"]
    # Two logits are not the model's; the image projection has a bias; three tokens were added to their position codes.
    parameters = fits_whole(prolip_hub, prolip["config"], prolip["tensors"])
    width, dim = prolip["config"]["vision_cfg"]["width"], prolip["config"]["embed_dim"]
    assert parameters == prolip["n_parameters"] - 2 + dim - width - 2 * prolip["config"]["text_cfg"]["width"]
    about = json.loads((parity / "pcmepp_full_size_keys.json").read_text())
    shapes = {"ViT-B/32": about["ViT-B/32"], "ViT-B/16": about["ViT-B/32"] | about["ViT-B/16_changes"]}
    shapes["ViT-L/14"] = {key: large(key, shape) for key, shape in about["ViT-B/32"].items()}
    for key, shape in list(shapes["ViT-L/14"].items()):
        if key.startswith("img_enc.backbone.transformer.resblocks."):
            stem, _, rest = key.removeprefix("img_enc.backbone.transformer.resblocks.").partition(".")
            shapes["ViT-L/14"][f"img_enc.backbone.transformer.resblocks.{int(stem) + 12}.{rest}"] = shape
    assert about["ViT-L/14_examples"].items() <= shapes["ViT-L/14"].items()
    for name, official in shapes.items():
        assert len(official) == about["n_tensors"][name]
        assert fits_whole(pcmepp_training, {}, official) == about["n_parameters"][name] - 2


def large(key, shape):
    wider = {768: 1024, 2304: 3072, 3072: 4096} if key.startswith("img_enc") else {512: 768, 1536: 2304, 2048: 3072}
    special = {"img_enc.backbone.positional_embedding": [257, 1024], "img_enc.backbone.conv1.weight": [1024, 3, 14, 14]}
    return special.get(key, [wider.get(size, size) for size in shape])


@pytest.fixture
def state(towers):
    return {key: value.clone() for key, value in towers[0].items()}


def test_a_lightning_checkpoint_a_bare_state_dict_and_safetensors_are_the_same_model(state, tmp_path):
    save_file(state, tmp_path / "plain.safetensors")
    torch.save(state, tmp_path / "plain.pth")
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "parallel.pt")
    inside = {key.replace("enc.", "enc.module.", 1): value for key, value in state.items()}
    checkpoint = {"state_dict": inside, "epoch": 24, "hyper_parameters": {"opt": {"model": {"embed_size": 3}}}}
    torch.save(checkpoint, tmp_path / "last.ckpt")
    names = ("plain.safetensors", "plain.pth", "parallel.pt", "last.ckpt")
    first, *others = (load_pretrained(tmp_path / name) for name in names)
    assert first.source.endswith("plain.safetensors") and first.kind == "PCME++ training, last weights"
    logits = tuple(state[f"criterion.{name}"].item() for name in ("negative_scale", "shift"))
    for other in others:
        torch.testing.assert_close(other.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)
        assert (other.logit_scale, other.logit_bias) == logits


def test_averaged_weights_are_taken_and_settings_of_the_run_honoured(state, tmp_path):
    averaged = {f"swa_{key.replace('.', '.module.', 1)}": value + 0.5 for key, value in state.items()}
    counts = {f"swa_{part}.n_averaged": torch.tensor(3) for part in ("img_enc", "txt_enc", "criterion")}
    torch.save({"state_dict": state | averaged | counts}, tmp_path / "swa.ckpt")
    torch.save(state, tmp_path / "last.pt")
    average, last = load_pretrained(tmp_path / "swa.ckpt"), load_pretrained(tmp_path / "last.pt")
    scale = state["criterion.negative_scale"].item()
    assert (average.logit_scale, last.logit_scale) == (scale + 0.5, scale) and "averaged" in average.kind
    shifted, plain = average.model.state_dict(), last.model.state_dict()
    assert all(torch.equal(shifted[key], plain[key] + 0.5) for key in plain)
    torch.save({"state_dict": state | averaged | {key: torch.tensor(0) for key in counts}}, tmp_path / "early.ckpt")
    assert load_pretrained(tmp_path / "early.ckpt").logit_scale == scale
    options = {"model": {"no_imgnorm": True}, "criterion": {"name": "pcmepp", "prob_distance": "wdist"}}
    torch.save({"state_dict": state, "hyper_parameters": {"opt": options}}, tmp_path / "run.ckpt")
    published = load_pretrained(tmp_path / "run.ckpt")
    assert published.distance == "wasserstein2"
    assert not published.model.image.head.normalize and published.model.text.head.normalize
    options["criterion"] = {"name": "pcme"}
    torch.save({"state_dict": state, "hyper_parameters": {"opt": options}}, tmp_path / "run.ckpt")
    raises(UserError, "PCME's loss", load_pretrained, tmp_path / "run.ckpt")


def test_wrong_tensors_are_counted_and_the_first_ones_named(state, tmp_path, pcmepp, prolip):
    del state["txt_enc.linear.bias"]
    state["img_enc.extra"] = torch.ones(1)
    state["criterion.shift"] = torch.ones(2)
    torch.save(state, tmp_path / "wrong.pt")
    error = raises(UserError, "3 tensors do not fit", load_pretrained, tmp_path / "wrong.pt")
    named = ("linear.bias' is missing", "'img_enc.extra' is left over", "'criterion.shift' is (2,), expected (1,)")
    assert all(part in str(error.value) for part in named)
    for (_, config, tensors, _), layout in ((pcmepp, pcmepp_hub), (prolip, prolip_hub)):
        with pytest.raises(UserError, match=r"1 tensors do not fit.*'visual.proj' is missing"):
            layout(config, {k: v for k, v in tensors.items() if k != "visual.proj"}, no_tokenizer, "x")
        larger = {**config, "vision_cfg": {**config["vision_cfg"], "layers": config["vision_cfg"]["layers"] + 1}}
        raises(UserError, r"12 tensors do not fit.*is missing; and 9 more", layout, larger, tensors, no_tokenizer, "x")


def test_configurations_that_cannot_be_loaded(pcmepp, prolip, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    raises(UserError, r"no model\.safetensors", load_pretrained, tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    for config, message in (
        ('{"model_type": "clip"}', "not that of a PCME"),
        ('{"vision_cfg": {"layers": 12}, "text_cfg": {}}', "has no variances"),
        ('{"sfumato": "0.1.0"}', "load it with sfumato.load"), ("[1]", "holds a list, expected an object"),
        ("{", "not valid JSON"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(config)
        raises(UserError, message, load_pretrained, tmp_path)
    width, dim = pcmepp[1]["vision_cfg"]["width"], prolip[1]["embed_dim"]
    uneven = next(k for k in range(2, width) if width % (width // k))
    for layout, (_, config, tensors, _), section, change, message in (
        (pcmepp_hub, pcmepp, "vision_cfg", {"global_average_pool": True}, "global_average_pool is True; only models"),
        (pcmepp_hub, pcmepp, "vision_cfg", {"head_width": uneven}, r": width \d+ cannot be divided among \d+ heads"),
        (pcmepp_hub, pcmepp, "vision_cfg", {"layers": "many"}, ".layers must be a positive whole number, got 'many'"),
        (prolip_hub, prolip, "text_cfg", {"no_causal_mask": False}, ".no_causal_mask is False; only models with True"),
        (prolip_hub, prolip, "text_cfg", {"width": 2 * dim}, f".width {2 * dim} is not embed_dim {dim}"),
        (prolip_hub, prolip, "text_cfg", {"tokenizer_kwargs": {"clean": "soap"}}, "unknown cleaning of texts 'soap'"),
    ):
        changed = {**config, section: {**config[section], **change}}
        raises(UserError, message, layout, changed, tensors, no_tokenizer, "x")


def words_tokenizer(vocabulary, special):
    pieces = {f"w{i}": i for i in range(vocabulary) if i not in special.values()} | special
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_padding(pad_id=5)
    tokenizer.enable_truncation(2)
    return tokenizer


@pytest.mark.parametrize("kind", ["pcmepp", "prolip"])
def test_models_embed_words(kind, request, tmp_path):
    folder, config, *_ = request.getfixturevalue(kind)
    vocabulary, context = (config["text_cfg"][key] for key in ("vocab_size", "context_length"))
    texts, long = [[7, 8, 9], [4]], list(range(10, vocabulary - 2))
    assert len(long) > context, "the last text is cut"
    words = ["W7 w8  w9", "w4", " ".join(f"w{i}" for i in long)]
    if kind == "pcmepp":
        begin, end = vocabulary - 2, vocabulary - 1
        tokenizer = words_tokenizer(vocabulary, {"<|startoftext|>": begin, "<|endoftext|>": end})
        model = load_pretrained(folder, tokenizer=tokenizer).model
        rows = [[begin, *text, end] for text in (*texts, long[: context - 2])]
        mask, padding = torch.arange(context) < torch.tensor([[len(row)] for row in rows]), 0
        assert tokenizer.truncation["max_length"] == 2, "the caller's tokenizer stays as it was"
    else:
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        words_tokenizer(vocabulary, {"</s>": 1}).save(str(tmp_path / "tokenizer.json"))
        model, words[0] = load_pretrained(tmp_path).model, "W7, w8! w9"
        rows, mask, padding = [[*text, 1] for text in (*texts, long[: context - 1])], None, 1
    expected = model.text(Inputs(torch.tensor([row + [padding] * (context - len(row)) for row in rows]), mask))
    ours = model.embed_texts(words)
    torch.testing.assert_close(ours.mean, expected.mean, **SINGLE)
    torch.testing.assert_close(ours.log_var, expected.log_var, **SINGLE)


def test_the_tokenizer_must_belong_to_the_model_and_pictures_need_none(pcmepp, prolip):
    folder, config, *_ = pcmepp
    vocabulary = config["text_cfg"]["vocab_size"]
    empty = Tokenizer(models.WordLevel({"<|startoftext|>": 0, "<|endoftext|>": 1}, unk_token="<|endoftext|>"))
    with pytest.raises(UserError, match=f"the tokenizer has 2 tokens; the model expects {vocabulary}"):
        load_pretrained(folder, tokenizer=empty).model.embed_texts(["a"])
    with pytest.raises(UserError, match=r"none of them '<\|startoftext\|>'"):
        load_pretrained(folder, tokenizer=words_tokenizer(vocabulary, {})).model.embed_texts(["a"])
    folder, config, *_ = prolip
    size = config["vision_cfg"]["image_size"]
    model = load_pretrained(folder).model
    pixels = noise(size + 7, size)
    crop = torch.from_numpy(pixels[:, 4 : 4 + size].copy()).permute(2, 0, 1)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.embed_images([encoded(pixels)]).mean, model.image(Inputs(crop)).mean, **SINGLE)
    folder, config, *_ = pcmepp
    size = config["vision_cfg"]["image_size"]
    model = load_pretrained(folder).model
    data, image = encoded(noise(50, 37)), Image.fromarray(noise(50, 37))
    ours = model.embed_images([data])
    module = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    processor = module.CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size=size, image_mean=CLIP_MEAN, image_std=CLIP_STD
    )
    prepared = torch.from_numpy(processor(image)["pixel_values"][0]).unsqueeze(0)
    model.image.encoder.pixels.mean.zero_()
    model.image.encoder.pixels.std.fill_(1)
    with torch.no_grad():
        torch.testing.assert_close(ours.mean, model.image(Inputs(prepared.float())).mean, **SINGLE)
    raises(UserError, r"no tokenizer.json beside the weights.*openai/clip-vit-base-patch16", model.embed_texts, ["a"])
