"""The model of the package by onnxruntime against its heads in torch; without torch: tests/test_without_torch.py."""

import make_small
import numpy as np
import pytest
import torch

from sfumato.data.emoji import load_emoji
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.models.model import model_digest
from sfumato.models.run import HEADS, PACKAGED, SMALL, load_model


@pytest.fixture(scope="module")
def both():
    return load_model(SMALL), load_model(SMALL, trainable=True)


def close(found, expected):
    for name in ("mean", "log_var"):
        ours, theirs = getattr(found, name), getattr(expected, name).numpy()
        assert isinstance(ours, np.ndarray) and ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


def test_images_and_texts_are_embedded_as_by_torch(both):
    images = [image.read_bytes() for image in load_emoji()["val"].images[:5]]
    texts = ["a dog", "", "a red car in a street full of people " * 20, "Grüße 日本語 🦊", "?"]
    close(both[0].embed_images(images), both[1].embed_images(images))
    close(both[0].embed_texts(texts), both[1].embed_texts(texts))
    close(both[0].embed_texts(texts * 60), both[1].embed_texts(texts * 60))
    assert model_digest(both[0].model) == model_digest(both[1].model), "galleries of either are valid"
    found, expected = (one.probability(texts, images) for one in both)
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize("side", HEADS)
def test_a_head_averages_the_tokens_that_are_there(both, side):
    graph, module = (getattr(one.model, side) for one in both)
    channels, random = module.encoder.channels, np.random.default_rng(0)
    values = random.normal(2, 3, (4, 3, channels)).astype(np.float32)
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)
    for given in (Inputs(values, mask), Inputs(values)):
        with torch.no_grad():
            close(graph.batch(given), module.batch(given))
    assert (graph.dim, graph.variances) == (module.dim, True)
    assert (graph.normalize, graph.has_offset) == (module.normalize, module.has_offset)


@pytest.mark.parametrize(("side", "name"), HEADS.items())
def test_the_graphs_are_those_of_the_script(side, name, tmp_path):
    weights = PACKAGED / SMALL / "model.safetensors"
    (tmp_path / weights.name).write_bytes(weights.read_bytes())
    make_small.write_head(tmp_path / name, side)
    assert (tmp_path / name).read_bytes() == (PACKAGED / SMALL / name).read_bytes()
