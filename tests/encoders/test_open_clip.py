"""Models of open_clip: the features are open_clip's own; names and folders that cannot be loaded are named."""

import io

import torch
from PIL import Image
from support.raising import raises
from support.tiny_models import import_open_clip, tiny_open_clip

from sfumato.encoders.frozen import FrozenImageConfig, FrozenTextConfig
from sfumato.encoders.joint import joint_backbone
from sfumato.encoders.package_weights import is_open_clip
from sfumato.errors import UserError


def test_features_are_those_of_open_clip(tmp_path):
    model, preprocess, tokenizer = tiny_open_clip(tmp_path / "model")
    image, text = joint_backbone(str(tmp_path / "model"), "image"), joint_backbone(str(tmp_path / "model"), "text")
    picture = Image.effect_noise((40, 30), 90).convert("RGB")
    file = io.BytesIO()
    picture.save(file, "PNG")
    captions = ["a red square", "blue " * 30]
    with torch.inference_mode():
        of_image, of_texts = model.encode_image(preprocess(picture)[None]), model.encode_text(tokenizer(captions))
    assert image.channels == text.channels == 8
    torch.testing.assert_close(torch.from_numpy(image([file.getvalue()])[0]), of_image)
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
    monkeypatch.setattr("sfumato.encoders.joint.hub_reachable", lambda: False)
    for name in ("open_clip:ViT-B-32/laion2b_s34b_b79k", "hf-hub:nobody/nothing"):
        raises(UserError, "no connection to the hub.*Give a local folder", joint_backbone, name, "image")
    tiny_open_clip(tmp_path / "model")
    weights = tmp_path / "model" / "open_clip_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    raises(UserError, "cannot load .*model", joint_backbone, str(tmp_path / "model"), "text")
    weights.rename(tmp_path / "model" / "open_clip_pytorch_model.bin")
    raises(UserError, "other weights are pickles", joint_backbone, str(tmp_path / "model"), "text")
