"""CLIP-like models of a few thousand weights and photographs of two colours each, that they can be taught to match."""

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy, normalize

from sfumato.encoders.clip import ARCHITECTURES
from sfumato.models.build import Assets, build_loss, build_model, fresh_tokenizer, save_state
from sfumato.models.recipe import check_recipe, save_recipe
from sfumato.models.run import save_assets

WORDS = ["red", "green", "blue", "dark", "light", "square", "circle", "wide", "tall", "small"]
COLOURS = {
    "red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "dark": (20, 20, 20), "light": (240, 240, 240),
    "square": (230, 220, 40), "circle": (210, 40, 220), "wide": (40, 220, 220), "tall": (250, 140, 20),
    "small": (120, 80, 40),
}  # fmt: skip
"""A colour for each word: what the words mean in :func:`two_colours`."""


def assert_alike(found, expected):
    for name in ("mean", "log_var"):
        ours, theirs = getattr(found, name), getattr(expected, name).numpy()
        assert isinstance(ours, np.ndarray) and ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


def tiny_clip(folder, kind="clip"):
    transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", "<unk>", *WORDS, *map(str, range(100))])}
    text = {**sizes, "vocab_size": len(vocabulary), "max_position_embeddings": 12, "eos_token_id": 1, "bos_token_id": 1}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        model, processor = transformers.CLIPModel(config), transformers.CLIPImageProcessor
    else:
        config = transformers.SiglipConfig(text_config=text, vision_config=vision)
        model, processor = transformers.SiglipModel(config), transformers.SiglipImageProcessor
    model.save_pretrained(folder)
    size = {"shortest_edge": 16} if kind == "clip" else {"height": 16, "width": 16}
    crop = {"crop_size": {"height": 16, "width": 16}} if kind == "clip" else {}
    processor(size=size, **crop).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    return model.eval()


def tiny_resnet(folder, **processor):
    transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    model = transformers.ResNetModel(config)
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}, **processor).save_pretrained(folder)
    return model.eval()


def tiny_architecture(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "ViT-Ti/16", {"image": (48, 1, 3), "text": (48, 1, 3)})


def tiny_open_clip(folder):
    open_clip = import_open_clip()
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model_cfg = {
        "embed_dim": 8, "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model_cfg": model_cfg, "preprocess_cfg": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.25]}})
    (folder / "open_clip_config.json").write_text(text)
    source = f"local-dir:{folder}"
    model, _, preprocess = open_clip.create_model_and_transforms(source, load_weights=False)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return model.eval(), preprocess, open_clip.get_tokenizer(source)


def architecture_of(folder):
    open_clip, path = import_open_clip(), folder.parent / f"{folder.name}-architecture.json"
    path.write_text(json.dumps(json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]))
    open_clip.add_model_config(path)
    return path.stem


def made_by_hand(folder, model):
    recipe = check_recipe({"name": "by-hand", "loss": model.pop("loss", {"name": "pcmepp"}), "model": model}, "test")
    folder.mkdir()
    torch.manual_seed(0)
    tokenizer = fresh_tokenizer(recipe.model, ["a red circle", "some bar in blue"] * 3)
    made = build_model(recipe.model, Assets(tokenizer))
    save_recipe(recipe, folder / "recipe.toml")
    save_state(folder / "model.safetensors", {"model": made, "loss": build_loss(recipe)}, None, {})
    save_assets(folder, tokenizer, made)
    return folder


def import_open_clip():
    """The package; the test is skipped where it is not installed, or its torchvision is for another torch."""
    try:
        import open_clip
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"the extra open-clip is not installed: {error}")
    return open_clip


def two_colours(folder, n=300, seed=0):
    """A manifest of n photographs, the left half in one colour and the right half in another, and their captions."""
    rng, lines, pairs = np.random.default_rng(seed), [], list(itertools.permutations(COLOURS, 2))
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    for i in range(n):
        left, right = pairs[i % len(pairs)]
        pixels = np.concatenate([np.full((16, 8, 3), COLOURS[name], float) for name in (left, right)], axis=1)
        noisy = (pixels + rng.normal(0, 12, pixels.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"photos/{i}.png")
        lines.append({"image": f"photos/{i}.png", "caption": f"{left} {right} {i % 100}"})
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def teach(parameters, prepare, embed_images, embed_texts, manifest, steps=300):
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    images = prepare([Image.open(manifest.parent / line["image"]).convert("RGB") for line in lines])
    optimiser, generator = torch.optim.Adam(list(parameters), lr=1e-2), torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randperm(len(lines), generator=generator)[:64].tolist()
        a = normalize(embed_images(images[chosen]), dim=1)
        b = normalize(embed_texts([lines[i]["caption"] for i in chosen]), dim=1)
        scores, target = 20 * a @ b.T, torch.arange(len(chosen))
        loss = cross_entropy(scores, target) + cross_entropy(scores.T, target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return loss.item() / 2


def taught_clip(folder, manifest):
    import transformers

    model, processor = tiny_clip(folder), transformers.AutoImageProcessor.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def texts(batch):
        tokens = tokenizer(batch, padding=True, max_length=12, truncation=True, return_tensors="pt")
        return pooled(model.get_text_features(tokens["input_ids"], tokens["attention_mask"]))

    pooled = lambda found: found if isinstance(found, torch.Tensor) else found.pooler_output
    prepare = lambda batch: processor(images=batch, return_tensors="pt")["pixel_values"]
    teach(model.parameters(), prepare, lambda batch: pooled(model.get_image_features(batch)), texts, manifest)
    model.save_pretrained(folder)
    return folder


def taught_open_clip(folder, manifest):
    from safetensors.torch import save_file

    model, preprocess, tokenizer = tiny_open_clip(folder)
    prepare = lambda batch: torch.stack([preprocess(image) for image in batch])
    teach(model.parameters(), prepare, model.encode_image, lambda batch: model.encode_text(tokenizer(batch)), manifest)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder
