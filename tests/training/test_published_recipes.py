"""Recipes of published runs, and their overrides, train two steps on data of the shape of COCO, Flickr30k and CUB.

Towers and sizes are tiny; losses, heads, augmentation and optimisers are those of the recipe. Overrides that name other
pre-trained weights do not run, and of those that differ only in a number one does.
"""

import json
import re
import shlex
from itertools import takewhile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sfumato.models.recipe import find_recipe, load_recipe, recipe_files
from sfumato.training.loop import fit

transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")

WORDS = ("red", "green", "blue", "circle", "square", "dog", "on", "the", "grass")
RECIPES = [name for name in recipe_files() if name.startswith(("coco-", "cub-"))]


def cases(name):
    """A recipe as it is, and with the override lines of its header."""
    text = recipe_files()[name].read_text(encoding="utf-8").splitlines()
    lines = [line[4:] for line in takewhile(lambda line: line.startswith("#"), text) if re.match(r"#   \S", line)]
    kinds = {re.sub(r"=[-+.\de]+(?= |$)", "=number", line): shlex.split(line) for line in lines}
    return [[], *(words for line, words in kinds.items() if "weights=" not in line and "swa_epochs" not in line)]


CASES = [(name, line) for name in RECIPES for line in cases(name)]
NINE = [line for name, line in CASES if any("classes=" in word for word in line)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """COCO in Karpathy's form, Flickr30k likewise, CUB, SCAN's regions, a residual network, CLIP and word vectors."""
    folder, random = tmp_path_factory.mktemp("world"), np.random.default_rng(0)
    captions = [[" ".join(random.choice(WORDS, 5)) for _ in range(5)] for _ in range(4)]
    for data, subfolder in (("coco", "train2014"), ("flickr30k", "")):
        (folder / data / subfolder).mkdir(parents=True)
        entries = []
        for k in range(4):
            pixels = random.integers(0, 255, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / data / subfolder / f"{k}.jpg")
            sentences = [{"sentid": 5 * k + i, "raw": text} for i, text in enumerate(captions[k])]
            entry = {"filename": f"{k}.jpg", "split": "restval" if k else "train", "sentences": sentences}
            entries.append(entry | ({"filepath": subfolder} if subfolder else {}))
        (folder / f"dataset_{data}.json").write_text(json.dumps({"images": entries, "dataset": data}))
    make_cub(folder / "cub", random)
    (folder / "scan").mkdir()
    np.save(folder / "scan" / "train_ims.npy", random.normal(size=(4, 6, 12)).astype(np.float32))
    (folder / "scan" / "train_caps.txt").write_text("".join(f"{text}\n" for texts in captions for text in texts))
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    transformers.ResNetModel(config).save_pretrained(folder / "resnet")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "resnet")
    (folder / "glove.txt").write_text("".join(f"{w} {' '.join(map(str, random.normal(size=3)))}\n" for w in WORDS[:6]))
    return folder


def make_cub(folder, random):
    """The nine classes that the recipe names, with two images of two captions each."""
    (nine,) = (list(load_recipe(find_recipe("cub-pcme"), line).data.options["classes"]) for line in NINE)
    for name in nine:
        for part in ("images", "text_c10"):
            (folder / part / name).mkdir(parents=True)
        for k in range(2):
            pixels = random.integers(0, 255, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{k}.jpg")
            (folder / "text_c10" / name / f"{k}.txt").write_text("a red bird\nthe blue dog\n")
    (folder / "splits").mkdir()
    lists = {"testclasses": nine[6:], "trainvalclasses": nine[:6]}
    for k in range(1, 4):
        lists |= {f"trainclasses{k}": nine[:4], f"valclasses{k}": nine[4:6]}
    for name, classes in lists.items():
        (folder / "splits" / f"{name}.txt").write_text("\n".join(classes))
    (folder / "splits" / "seen_test_images.txt").write_text(f"{nine[0]}/1.jpg")


def small(recipe, folder):
    """Overrides that shrink a recipe to two steps, of one epoch each, on the data of the folder."""
    image, text = recipe.model.image, recipe.model.text
    sections = {
        "clip": {"kind": "clip", "architecture": "ViT-Ti/16", "size": 16, "blocks": 2},
        "resnet": {"kind": "resnet", "weights": str(folder / "resnet"), "size": 32},
        "regions": {"kind": "regions", "channels": 12},
    }
    own = {"clip": (), "resnet": ("fit", "augment"), "regions": ("graph_layers", "recurrent", "variance_layers")}[
        image.kind
    ]
    picture = sections[image.kind] | {key: getattr(image, key) for key in own}
    if text.kind == "clip":
        words = {"kind": "clip", "architecture": "ViT-Ti/16", "blocks": 2, "max_tokens": 8}
    else:
        keys = ("bidirectional", "variance_gru", "freeze")
        words = {"kind": "gru", "width": 3, "hidden": 6, **{key: getattr(text, key) for key in keys}}
        words |= {"vectors": str(folder / "glove.txt")} if text.vectors else {}
    regions, one_stage = image.kind == "regions", recipe.optim.first_stage_epochs == 0
    name = "flickr30k" if "flickr30k" in recipe.data.path else "coco"
    data = [f"data.path={folder / 'scan'}"]
    if recipe.data.source == "cub":
        data = [f"data.path={folder / 'cub'}"]
    elif not regions:
        data = [f"data.path={folder / f'dataset_{name}.json'}", f"data.images={folder / name}"]
    frozen = image.kind == "resnet" and one_stage and recipe.optim.freeze_image_epochs > 0
    return [
        *(f"model.{side}={inline(values)}" for side, values in (("image", picture), ("text", words))),
        *data,
        "model.dim=6",
        *(["model.init_total_variance=6"] if recipe.model.variance_bounds else []),
        *(["model.mlp_width=3"] if recipe.model.mlp_width else []),
        *([] if one_stage else ["optim.first_stage_epochs=1"]),
        f"optim.freeze_image_epochs={int(frozen)}",
        "train.epochs=2",
        "train.batch_size=20",
        "train.threads=1",
    ]


def inline(values):
    text = {True: "true", False: "false"}
    return (
        "{ "
        + ", ".join(
            f"{k} = {text.get(v, json.dumps(v)) if isinstance(v, bool) else json.dumps(v)}" for k, v in values.items()
        )
        + " }"
    )


@pytest.mark.parametrize(("name", "line"), CASES, ids=[f"{name} {' '.join(line)}".strip() for name, line in CASES])
def test_two_steps(world, tmp_path, name, line):
    path = find_recipe(name)
    recipe = load_recipe(path, line)
    fit(load_recipe(path, [*line, *small(recipe, world)]), tmp_path / "run")
    log = [json.loads(row) for row in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(log) == 2 and all(np.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in log)
    assert all(torch.isfinite(value).all() for value in load_file(tmp_path / "run" / "model.safetensors").values())
