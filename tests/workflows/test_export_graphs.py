"""Exported runs embed as they do, as weights and as ONNX graphs; those that cannot be graphs are refused."""

import json

import numpy as np
import pytest
from support.raising import raises
from support.tiny_models import assert_alike, made_by_hand, tiny_architecture, tiny_clip

from sfumato import adopt
from sfumato.data.image_decoding import encode_png
from sfumato.errors import UserError
from sfumato.models.model import model_digest
from sfumato.models.run import load_model, load_run
from sfumato.workflows import export
from sfumato.workflows.export import export_run
from sfumato.workflows.search import load

RNG = np.random.default_rng(1)
IMAGES = [encode_png(RNG.integers(0, 256, (3, *size), np.uint8)) for size in ((40, 70), (33, 33), (120, 50))]
TEXTS = ["a Red circle", "", "some bar in blue " * 30, "never seen before, a red one"]
SMALL = {"kind": "small", "size": 16, "width": 4}, {"kind": "small", "vocabulary": 60, "width": 16}
FROZEN = {"kind": "frozen", "grid": 3}, {"kind": "frozen", "layers": [0, 2], "whiten": 0}
CLIP = {"kind": "clip", "architecture": "ViT-Ti/16"}
UNC = {**CLIP, "size": 32, "variance_token": True}, {**CLIP, "vocabulary": 60, "max_tokens": 12, "variance_token": True}
CASES = {
    "gpo": (FROZEN, {"mlp": True, "variance_hidden": 8, "variance_norm": True}),
    "offset": (FROZEN, {"pooling": "max", "item_offset": True, "covariance": "spherical-average"}),
    "token": (SMALL, {"pooling": "token", "covariance": "spherical-one", "variance_bounds": [1e-6, 1.0]}),
    "local": (SMALL, {"local_attention": True}),
    "words": ((SMALL[0], {"kind": "gru", "hidden": 8, "states": "all"}), {"hidden": 8}),
    "unc": (UNC, {"pooling": "token"}), "clip": ([{**side, "variance_token": False} for side in UNC], {}),
    "points": (SMALL, {"variance": False, "item_offset": True, "loss": {"name": "infonce"}}),
    **{"joint": ("clip", {"pooling": "average"}), "siglip": ("siglip", {})},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_graphs_embed_as_torch_does(case, tmp_path, monkeypatch):
    tiny_architecture(monkeypatch)
    sides, heads = CASES[case]
    if isinstance(sides, str):
        tiny_clip(tmp_path / "of", sides)
        sides = [{"kind": "frozen", "backbone": str(tmp_path / "of"), "projected": True}] * 2
    folder = made_by_hand(tmp_path / "run", {"dim": 8, "image": sides[0], "text": sides[1], **heads})
    out, plain = export_run(folder, tmp_path / "out", graphs=True), load_model(export_run(folder, tmp_path / "plain"))
    run, graphs = load_run(folder), load_model(out)
    assert_alike(run.embed_texts(TEXTS).numpy(), plain.embed_texts(TEXTS))
    assert_alike(run.embed_images(IMAGES).numpy(), plain.embed_images(IMAGES))
    assert_alike(graphs.embed_images(IMAGES), run.embed_images(IMAGES))
    assert_alike(graphs.embed_texts(TEXTS), run.embed_texts(TEXTS))
    assert model_digest(graphs.model) == model_digest(run.model), "galleries of either are valid"
    for ours, theirs in ((graphs.model.image, run.model.image), (graphs.model.text, run.model.text)):
        for name in ("dim", "variances", "has_offset", "normalize"):
            assert getattr(ours, name) == getattr(theirs, name), name
    config, card = json.loads((out / "config.json").read_text()), (out / "README.md").read_text()
    assert 0 < config["largest_difference"] <= 1e-5 and str(tmp_path) not in json.dumps(config) + card
    assert "`pip install sfumato`" in card and not (out / "model.safetensors").exists()


def test_embeddings_are_exported_and_the_command_says_the_difference(toy, tmp_path, sfumato):
    images, texts = RNG.standard_normal((2, 300, 6)).astype(np.float32)
    adopted = adopt(images, texts + 9 * images, None, tmp_path / "run")
    graphs = load(export_run(tmp_path / "run", tmp_path / "out", graphs=True))
    np.testing.assert_allclose(graphs.embed_images(images).mean, adopted.embed_images(images).mean, atol=1e-6)
    assert graphs.calibration == adopted.calibration
    assert 0 < sfumato.json("export", toy / "run", tmp_path / "toy", "--onnx")["largest_difference"] < 1e-5


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(toy, tmp_path, monkeypatch):
    made = {
        "gru": ({"kind": "gru", "hidden": 8}, "text side, of kind 'gru', cannot be written as an ONNX graph"),
        "bert": ({"kind": "frozen", "backbone": str(tmp_path / "clip")}, "clip, which cannot be written as"),
    }  # fmt: skip
    tiny_clip(tmp_path / "clip")
    for name, (text, message) in made.items():
        folder = made_by_hand(tmp_path / name, {"dim": 8, "image": SMALL[0], "text": text})
        raises(UserError, message, export_run, folder, tmp_path / "out", graphs=True)
    monkeypatch.setattr(export, "TOLERANCE", 1e-12)
    raises(UserError, r"otherwise than torch, by .* \(1e-12", export_run, toy / "run", tmp_path / "out", graphs=True)
    assert not (tmp_path / "out").exists()
