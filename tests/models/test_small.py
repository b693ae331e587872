"""The model of the package by onnxruntime against its heads in torch, and without torch at all."""

import subprocess
import sys

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


def test_it_needs_no_torch_and_other_models_say_that_they_do(tmp_path):
    """In a process that cannot import torch."""
    (tmp_path / "dog.png").write_bytes(load_emoji()["val"].images[0].read_bytes())
    (tmp_path / "recipe.toml").touch()
    code = f"""
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(name)
sys.meta_path.insert(0, Without())
from sfumato.errors import UserError
from sfumato.models.run import default_model, load_model
model = load_model(default_model()[0])
found = model.probability(["a dog"], [{str(tmp_path / "dog.png")!r}])
print(*found.shape, model.unfamiliar_texts(["qwxz"]), "torch" in sys.modules)
for other in ({str(tmp_path)!r}, "someone/model"):
    try:
        load_model(other)
    except UserError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == [
        "1 1 [False] False",
        *(line for line in found[1:] if line.endswith("pip install 'sfumato[train]'")),
    ]
    assert len(found) == 3
