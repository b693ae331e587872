"""Models in memory are written as folders that embed the same. With sentence-transformers in an environment:
env/bin/pip install -c constraints.txt -e '.[backbones]' pytest sentence-transformers"""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from support.tiny_models import architecture_of, taught_open_clip, tiny_clip, tiny_open_clip, two_colours

import sfumato
from sfumato.encoders.joint import save_model_object
from sfumato.errors import UserError
from sfumato.workflows.export import export_run


class Encoding(torch.nn.Module):
    """What a SentenceTransformer does, by transformers alone; ``factor`` is a setting that its folder does not have."""

    def __init__(self, folder, factor=1.0):
        transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")
        super().__init__()
        self.network = transformers.CLIPModel.from_pretrained(folder).eval()
        kinds = transformers.AutoImageProcessor, transformers.AutoTokenizer
        self.parts = [kind.from_pretrained(folder) for kind in kinds]
        self.factor = factor

    @torch.inference_mode()
    def encode(self, items):
        if isinstance(items[0], Image.Image):
            found = self.network.get_image_features(**self.parts[0](images=items, return_tensors="pt"))
        else:
            tokens = self.parts[1](items, padding=True, truncation=True, max_length=12, return_tensors="pt")
            found = self.network.get_text_features(tokens["input_ids"], tokens["attention_mask"])
        scale = 1.0 if isinstance(items[0], Image.Image) else self.factor
        return scale * np.asarray(getattr(found, "pooler_output", found))

    def save_pretrained(self, folder):
        for part in (self.network, *self.parts):
            part.save_pretrained(folder)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))


def adopted_object(model, encode, manifest, folder):
    adopted = sfumato.adopt_encoders(model, manifest, folder / "run")
    assert adopted.retrieval.t2i["recall@1"] > 0.3 > 10 * adopted.retrieval.chance["t2i"]["recall@1"]
    expected = torch.nn.functional.normalize(torch.as_tensor(encode(["red blue 1"])), dim=1)
    export_run(folder / "run", folder / "exported")
    shutil.move(folder / "run", folder / "elsewhere")
    for place in ("elsewhere", "exported"):
        loaded = sfumato.load(folder / place)
        found = torch.as_tensor(loaded.embed_texts(["red blue 1"]).mean)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert loaded.calibrated and loaded.embed_images([manifest.parent / "photos/1.png"]).n == 1
    card = (folder / "exported" / "README.md").read_text()
    assert "in this folder: `encoder`" in card and str(folder) not in card
    assert str(folder) not in (folder / "exported" / "config.json").read_text()


@pytest.mark.slow
def test_an_object_that_encodes_is_adopted(tmp_path, taught):
    model = Encoding(shutil.copytree(taught[1], tmp_path / "model"))
    shutil.rmtree(tmp_path / "model")
    adopted_object(model, model.encode, taught[0], tmp_path)


@pytest.mark.slow
def test_a_sentence_transformer_is_adopted(tmp_path, taught):
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = package.SentenceTransformer(str(shutil.copytree(taught[1], tmp_path / "model")))
    shutil.rmtree(tmp_path / "model")
    adopted_object(model, model.encode, taught[0], tmp_path)


def test_a_model_of_open_clip_is_adopted(tmp_path):
    manifest = two_colours(tmp_path)
    taught = taught_open_clip(tmp_path / "model", manifest)
    model, _, tokenizer = tiny_open_clip(tmp_path / "other")
    name = architecture_of(taught)
    from safetensors.torch import load_file

    model.load_state_dict(load_file(taught / "open_clip_model.safetensors"))
    shutil.rmtree(taught)
    shutil.rmtree(tmp_path / "other")
    adopted_object((name, model), lambda texts: model.encode_text(tokenizer(texts)).detach(), manifest, tmp_path)
    with pytest.raises(UserError, match="open_clip does not make the architecture 'ViT-B-33'"):
        save_model_object(("ViT-B-33", model), tmp_path / "copy")
    with pytest.raises(UserError, match="open_clip does not make a Linear"):
        save_model_object((name, torch.nn.Linear(2, 2)), tmp_path / "copy")


def test_settings_that_the_folder_does_not_have_are_refused(tmp_path):
    tiny_clip(tmp_path / "model")
    with pytest.raises(UserError, match="the text side of this model embeds otherwise.*sfumato.adopt"):
        save_model_object(Encoding(tmp_path / "model", factor=1.1), tmp_path / "copy")


@pytest.mark.parametrize("model", [3, object(), torch.nn.Linear(2, 2), ("a", "b"), (torch.nn.Linear(2, 2), "name")])
def test_other_objects_are_named(tmp_path, model):
    with pytest.raises(TypeError, match=rf"got a {type(model).__name__}; expected its name or folder, a Sentence"):
        save_model_object(model, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
