"""Make the model `small` of the package from Flickr8k: features of its captions, a run, and the exported folder.

python scripts/make_small.py --json dataset_flickr8k.json --images images.npy --work FOLDER [--seed 0]

images.npy holds EfficientNet-Lite0's averaged features of the images at 224 pixels, a row an image of the JSON. Only
the split train is trained on; val chooses the epoch and fits the probabilities. The result replaces
src/sfumato/models/packaged/small, but for its README.md.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from make_encoders import Graph
from onnx import TensorProto
from safetensors.torch import load_file, save_file

from sfumato.encoders.backbones import GRAPHS, text_backbone
from sfumato.files import CONFIG, RECIPE, WEIGHTS, read_json, write_json
from sfumato.ids import Side
from sfumato.models.model import model_digest
from sfumato.models.recipe import Recipe, find_recipe, load_recipe, save_recipe
from sfumato.models.run import PACKAGED, SMALL, load_model
from sfumato.training.loop import fit
from sfumato.workflows.export import export_run

LAYERS = (0, 2, 4, 6)
IMAGE = {"kind": "frozen", "backbone": "efficientnet-lite0", "grid": 1, "whiten": 0}
TEXT = {"kind": "frozen", "backbone": "minilm-l6-v2", "max_tokens": 64, "pooled": True, "layers": LAYERS, "whiten": 0}


def caption_features(path: Path) -> np.ndarray:
    """MiniLM's layers side by side, averaged over tokens, of all captions in the order of the JSON."""
    texts = [s["raw"] for image in json.loads(path.read_text("utf-8"))["images"] for s in image["sentences"]]
    backbone = text_backbone("minilm-l6-v2", pooled=True, layers=LAYERS)
    order, found = sorted(range(len(texts)), key=lambda i: len(texts[i])), np.zeros((len(texts), 384 * 4), np.float16)
    for start in range(0, len(order), 64):  # Texts of like length need little padding.
        rows = order[start : start + 64]
        found[rows] = np.concatenate(backbone([texts[i] for i in rows]))
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    texts = given.work / "texts.npy"
    if not texts.exists():
        np.save(texts, caption_features(given.json))
    paths = [f"data.images={given.images}", f"data.texts={texts}", f"data.path={given.json}"]
    recipe = load_recipe(find_recipe("small"), [*paths, f"train.seed={given.seed}"])
    run = given.work / f"run-{given.seed}"
    fit(recipe, run)
    write(recipe, run)


def write(recipe: Recipe, run: Path) -> None:
    """Export a run on features as a model that computes them from images and texts, in half precision."""
    with tempfile.TemporaryDirectory() as temporary:
        frozen, exported = Path(temporary) / "frozen", Path(temporary) / "exported"
        _as_frozen(recipe, run, frozen)
        export_run(frozen, exported)
        weights = exported / WEIGHTS
        half = {k: v.half() if v.dtype == torch.float32 else v for k, v in load_file(weights).items()}
        save_file(half, weights, {"format": "pt"})
        config = read_json(exported / CONFIG)
        write_json(exported / CONFIG, {**config, "digest": model_digest(load_model(exported, trainable=True).model)})
        for side, name in GRAPHS.items():
            write_head(exported / name, side)
        for name in (CONFIG, WEIGHTS, *GRAPHS.values(), "calibration.json", "calibration.safetensors"):
            shutil.copy(exported / name, PACKAGED / SMALL / name)


def write_head(path: Path, side: Side) -> None:
    """Features and their mask -> mean and log variance, with the numbers of the weights beside the graph."""
    graph, weights = Graph(), path.parent / WEIGHTS
    add, one, two = graph.add, np.array([1]), np.array([2])

    def of(name: str) -> str:
        return graph.stored(weights, f"{side}.{name}")

    def linear(x: str, name: str) -> str:
        return add("Gemm", x, of(f"{name}.weight"), of(f"{name}.bias"), transB=1)

    present = add("Unsqueeze", add("Cast", "mask", to=TensorProto.FLOAT), two)
    total = add("ReduceSum", add("Mul", "features", present), one, keepdims=0)
    average = add("Div", total, add("ReduceSum", present, one, keepdims=0))
    x = add("Mul", add("Sub", average, of("encoder.centre")), of("encoder.projection"))
    hidden = add(
        "LayerNormalization", linear(x, "head.hidden.0"), *map(of, ("head.hidden.1.weight", "head.hidden.1.bias"))
    )
    mean = add("Add", linear(x, "head.mean.linear"), linear(add("Gelu", hidden), "head.hidden.4"))
    add("LpNormalization", mean, axis=1, p=2, name="mean")
    add("Identity", linear(x, "head.log_var.linear"), name="log_var")
    channels, dim = (
        len(load_file(weights)[f"{side}.{name}"]) for name in ("encoder.centre", "head.log_var.linear.bias")
    )
    graph.save(
        path, {"features": ["n", "t", channels], "mask": ["n", "t"]}, {key: ["n", dim] for key in ("mean", "log_var")}
    )


def _as_frozen(recipe: Recipe, run: Path, frozen: Path) -> None:
    """A copy of a run whose encoders are the frozen networks that its features came from."""
    shutil.copytree(run, frozen)
    sides = recipe.model.model_dump() | {"image": IMAGE, "text": TEXT}
    data = recipe.data.model_copy(update={"source": "karpathy", "images": "", "texts": ""})
    changed = {"model": type(recipe.model).model_validate(sides), "data": data}
    save_recipe(recipe.model_copy(update=changed), frozen / RECIPE)
    (frozen / "encoders.json").write_text("{}")


if __name__ == "__main__":
    main()
