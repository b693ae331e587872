"""Every method learns a small world; the recipes of the papers' data and the overrides in their headers train."""

import itertools
import json
import re
import shlex
from itertools import takewhile

import numpy as np
import pytest
import torch
from data.test_sources import make_cub
from PIL import Image
from safetensors.torch import load_file
from support.lazy import Lazy
from support.tiny_models import tiny_resnet

from sfumato.encoders.clip import ARCHITECTURES
from sfumato.encoders.heads import GaussianHead, HeadOptions, TokenFeatures
from sfumato.models.build import build_loss
from sfumato.models.recipe import find_recipe, load_recipe, recipe_files
from sfumato.training.loop import fit

transformers = Lazy("transformers", "the extra backbones is not installed")
WORDS = ("red", "green", "blue", "circle", "square", "dog", "on", "the", "grass")
RECIPES = [name for name in recipe_files() if name.startswith(("coco-", "cub-"))]
inline = lambda values: "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"


def lines_of(name):
    text = recipe_files()[name].read_text(encoding="utf-8").splitlines()
    lines = [line[4:] for line in takewhile(lambda line: line.startswith("#"), text) if re.match(r"#   \S", line)]
    return [(name,), *((name, *shlex.split(line)) for line in lines if not re.search("weights=|swa_epochs", line))]


CASES: dict[str, list[list[str]]] = {}
DONE: set[str] = set()
for _name, *_line in itertools.chain.from_iterable(map(lines_of, RECIPES)):
    CASES.setdefault(_name, []).append(_line)


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
    line = next(line for line in CASES["cub-pcme"] if any("classes=" in word for word in line))
    nine = list(load_recipe(find_recipe("cub-pcme"), line).data.options["classes"])
    lists = {"testclasses": range(6, 9), "trainvalclasses": range(6)}
    for k in range(1, 4):
        lists |= {f"trainclasses{k}": range(4), f"valclasses{k}": range(4, 6)}
    make_cub(folder / "cub", nine, lists, [f"{nine[0]}/{nine[0][-1]}1.jpg"])
    (folder / "scan").mkdir()
    np.save(folder / "scan" / "train_ims.npy", random.normal(size=(4, 6, 12)).astype(np.float32))
    (folder / "scan" / "train_caps.txt").write_text("".join(f"{text}\n" for texts in captions for text in texts))
    tiny_resnet(folder / "resnet")
    (folder / "glove.txt").write_text("".join(f"{w} {' '.join(map(str, random.normal(size=3)))}\n" for w in WORDS[:6]))
    return folder


def small(recipe, folder):
    image, text = recipe.model.image, recipe.model.text
    sections = {
        "clip": {"kind": "clip", "architecture": "ViT-Ti/16", "size": 16},
        "resnet": {"kind": "resnet", "weights": str(folder / "resnet"), "size": 32},
        "regions": {"kind": "regions", "channels": 12}, "frozen": {"kind": "small", "size": 16, "width": 2},
    }  # fmt: skip
    own = {"resnet": ("fit", "augment"), "regions": ("graph_layers", "recurrent", "variance_layers")}
    picture = sections[image.kind] | {key: getattr(image, key) for key in own.get(image.kind, ())}
    if text.kind == "clip":
        words = {"kind": "clip", "architecture": "ViT-Ti/16", "max_tokens": 8}
    elif text.kind in ("frozen", "small"):
        words = {"kind": "small", "vocabulary": 80, "width": 4, "max_tokens": 8}
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
        *(f"model.{side}={inline(values)}" for side, values in (("image", picture), ("text", words))), *data,
        "model.dim=6", *(["model.hidden=3"] if recipe.model.hidden else []),
        *(["train.swa_epochs=1"] if recipe.train.swa_epochs else []),
        *(["model.init_total_variance=6"] if recipe.model.variance_bounds else []),
        *(["model.mlp_width=3"] if recipe.model.mlp_width else []),
        *([] if one_stage else ["optim.first_stage_epochs=1"]), f"optim.freeze_image_epochs={int(frozen)}",
        "train.epochs=2", "train.batch_size=20", "train.threads=1",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_recipe_and_every_line_of_its_header_trains(world, tmp_path, name, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "ViT-Ti/16", {"image": (24, 2, 3), "text": (24, 2, 3)})
    path = find_recipe(name)
    for number, line in enumerate(CASES[name]):
        recipe = load_recipe(path, [*line, *small(load_recipe(path, line), world)])
        values = recipe.model_dump_json(exclude={"name"})
        kind = re.sub(r"\d+(\.\d+)?(e-?\d+)?", lambda number: str(float(number[0]) > 0), values)
        if kind in DONE:  # It differs only in the sizes of numbers, and no other line of the package would run.
            continue
        DONE.add(kind)
        fit(recipe, tmp_path / str(number))
        log = [json.loads(row) for row in (tmp_path / str(number) / "log.jsonl").read_text().splitlines()]
        finite = all(np.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in log)
        weights = load_file(tmp_path / str(number) / "model.safetensors").values()
        assert finite and len(log) == 2 and all(torch.isfinite(value).all() for value in weights), line


SPHERICAL = "model.init_total_variance=16", "loss.distance=kl", "model.covariance=spherical-one"
METHODS = {
    "pcmepp": ("emoji-pcmepp",), "infonce": ("emoji-infonce",), "vse++": ("emoji-vsepp",),
    "probabilistic vse++ by kl, spherical": ("emoji-probabilistic-vsepp", *SPHERICAL),
    "pcmepp with infonce": ("emoji-pcmepp", "loss.infonce_weight=1"),
    "pcme": ("emoji-pcme", "loss.uniformity_weight=0.01", "loss.n_samples=2"), "pvse": ("emoji-pvse",),
    "daa": ("emoji-vseinf", "data.graded=true", "loss.name=daa", "loss.sum_epochs=2"),
    "prolip": ("emoji-pcmepp", "loss.name=prolip", "loss.inclusion_weight=1e-7"),
}  # fmt: skip


def small_world(n, seed):
    """Images and texts of n hidden things of 6 numbers: 3 tokens of 12 channels each, off the origin, with noise."""
    generator = torch.Generator().manual_seed(seed)
    things = torch.randn(n, 1, 6, generator=generator)
    fixed = torch.Generator().manual_seed(0)
    sides = []
    for _ in ("image", "text"):
        channels, offset = torch.randn(6, 12, generator=fixed), torch.randn(12, generator=fixed)
        sides.append(TokenFeatures(things @ channels + offset + 0.3 * torch.randn(n, 3, 12, generator=generator)))
    return sides


@pytest.mark.parametrize("method", METHODS)
def test_a_method_learns_a_small_world(method):
    name, *changes = METHODS[method]
    recipe = load_recipe(find_recipe(name), ["model.dim=16", *changes])
    torch.manual_seed(0)
    of_recipe = ("mlp", "variance", "init_total_variance", "covariance", "variance_bounds", "embeddings")
    options = {key: getattr(recipe.model, key) for key in (*of_recipe, "local_attention")}
    heads = [GaussianHead(12, 16, HeadOptions(pooling="average", **options)) for _ in ("image", "text")]
    loss = build_loss(recipe)
    optimiser = torch.optim.Adam([p for part in (*heads, loss) for p in part.parameters()], lr=2e-2)
    for step in range(60):
        image, text = (head(side) for head, side in zip(heads, small_world(32, 1 + step), strict=True))
        optimiser.zero_grad()
        loss(image, text, torch.eye(32), epoch=step // 12).total.backward()
        optimiser.step()
    with torch.no_grad():
        distance = loss.distance.matrix(*(head(side) for head, side in zip(heads, small_world(200, 0), strict=True)))
    own = torch.arange(200)
    assert min((distance.argmin(dim) == own).float().mean() for dim in (0, 1)) > 0.6
