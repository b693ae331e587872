"""Post-hoc uncertainties of frozen models: every method and baseline, three data sets, two models each, three seeds.

    python -m papers.benchmarks.referee WORK [--data FOLDER] [--seeds 0 1 2] [--only MODEL ...] [--json FILE]
        [--adapters {short,long}] [--methods NAME ...]

emoji: heads on EfficientNet-Lite0 and MiniLM, a fifth of the wordings held out; splits test and wordings. flickr8k:
heads on precomputed features, recipe `embeddings`. coco-captions: nothing is trained; the first caption of an image
searches for its four others by MiniLM, last or third layer, and the seed decides who is in train, val and test. Heads
are trained by InfoNCE and by triplets with semi-hard negatives.

Models and figures are kept in WORK, so that the command resumes. FOLDER has flickr8k/ and coco5k_text/ and is
$SFUMATO_SHARED/data unless given. A file of --json in place of WORK (benchmarks/results/referee.json) is printed, and
nothing is computed. --adapters long fits the methods that train a network alone, for their published number of epochs.

--methods fits some methods alone, beside those that WORK has already.
"""

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from papers.posthoc import METHODS
from papers.posthoc.contestants import contestants
from papers.posthoc.frozen_model import FrozenCorruption, FrozenModel, FrozenSplit, freeze, last_layer, layer_inputs
from papers.posthoc.referee import RefereeOptions, adapter_epochs, referee_model
from papers.posthoc.referee_tables import referee_summary, referee_tables
from papers.uncertainty.corruption import corrupted_inputs
from sfumato.data.image_inputs import regions_to_bytes
from sfumato.data.images import Problems
from sfumato.encoders.backbones import text_backbone
from sfumato.errors import UserError
from sfumato.files import write_atomically
from sfumato.metrics.bootstrap import spearman
from sfumato.models.build import DualEncoder
from sfumato.models.embed import load_splits
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import Run, load_run
from sfumato.training.loop import fit

TRIPLET = ['loss={name="triplet",mining="semi-hard",margin=0.4}', "optim.logits_lr_multiplier=1"]
EMOJI_TEXT = 'model.text={kind="frozen",layers=[0,1,2,3,4,5,6],max_tokens=32,pooled=true,whiten=512}'
EMOJI = ["data.options.held_out_wordings=0/5", EMOJI_TEXT, "optim.text_lr_multiplier=1", "train.epochs=25"]
FLICKR8K = {"images": "efflite0_224_fp16.npy", "texts": "minilm_l6_v2_fp16.npy", "path": "dataset_flickr8k.json"}

LAYERS = (3, 6)
"""Layers of MiniLM that are frozen models of captions; 6 is the last one."""

N_CORRUPTED = 100
"""Queries of either side that are corrupted in each way."""

ADAPTER_EPOCHS = 4
"""Passes over the pairs of an adapter; half of the default, so that the table takes less than two hours."""


ADAPTERS = tuple(adapter_epochs(1))
"""What --adapters long fits, beside a constant."""


def adapter_options(kind: str) -> dict[str, dict[str, Any]]:
    """How the networks are trained: "short" for the table, "long" for the published epochs, batches and optimisers with
    the small networks of the table."""
    if kind == "short":
        return adapter_epochs(ADAPTER_EPOCHS)
    methods: dict[str, Any] = {name: METHODS[name] for name in ADAPTERS}
    return {name: {"training": replace(m.published, widths=m.default.widths)} for name, m in methods.items()}


def trained(
    work: Path, name: str, recipe: str, changes: list[str], tests: tuple[str, ...], seed: int
) -> tuple[Run, FrozenModel]:
    """Heads of a recipe, trained unless they are there."""
    run = work / "runs" / f"{name}-seed{seed}"
    if not (run / "model.safetensors").exists():
        fit(load_recipe(find_recipe(recipe), [*changes, f"train.seed={seed}"]), run)
    loaded = load_run(run)
    return loaded, freeze(loaded, loaded.recipe.data, tests, name=name, n_corrupted=N_CORRUPTED, seed=seed)


def emoji(work: Path, data: Path, seed: int, *, loss: str) -> FrozenModel:
    changes = [*EMOJI, *([*TRIPLET, "optim.lr=1.5e-3"] if loss == "triplet" else [])]
    return trained(work, f"emoji-{loss}", "emoji-infonce", changes, ("test", "wordings"), seed)[1]


def flickr8k(work: Path, data: Path, seed: int, *, loss: str) -> FrozenModel:
    files = [f"data.{key}={data / 'flickr8k' / name}" for key, name in FLICKR8K.items()]
    changes = [*files, *([*TRIPLET, "optim.lr=2e-3"] if loss == "triplet" else [])]
    loaded, model = trained(work, f"flickr8k-{loss}", "embeddings", changes, ("test",), seed)
    captions = load_splits(loaded.recipe.data, Problems())["test"].texts
    found = corrupted_captions(model, captions, seed, partial(of_text_head, loaded.model))
    notes = ("images are not corrupted: only their features are there",)
    return replace(model, corruptions=found, notes=notes)


def of_text_head(model: DualEncoder, features: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Raw embeddings and inputs of the last layer, of texts that a head reads as rows of a table."""
    layer = last_layer(model.text)
    assert layer is not None
    rows = features.astype(np.float32)[:, None]
    store, _ = model.text.processor.read([partial(regions_to_bytes, row) for row in rows])
    hidden = layer_inputs(model.text, store)
    return hidden @ layer[0].T + layer[1], hidden


def corrupted_captions(
    model: FrozenModel,
    captions: Sequence[str],
    seed: int,
    embed: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor | None]],
    layer: int = 6,
) -> tuple[FrozenCorruption, ...]:
    """Corrupted texts of split test, where the model reads features of MiniLM and not texts."""
    backbone, split = text_backbone("minilm-l6-v2", pooled=True, layers=(layer,)), model.tests["test"]
    assert len(captions) == len(split.texts)
    found = corrupted_inputs("text", captions, np.ones(len(captions), bool), N_CORRUPTED, seed)
    return tuple(
        FrozenCorruption.of(split, "text", c, lambda texts: embed(np.concatenate(backbone(texts)))) for c in found
    )


def embed_captions(work: Path, captions: list[str]) -> None:
    """Averages of the tokens of both layers, in one pass."""
    backbone = text_backbone("minilm-l6-v2", pooled=True, layers=LAYERS)
    order = np.argsort([len(caption) for caption in captions])
    found = np.concatenate([x for part in np.split(order, 100) for x in backbone([captions[k] for k in part])])
    for layer, values in zip(LAYERS, np.split(found[np.argsort(order)], len(LAYERS), axis=1), strict=True):
        np.save(work / f"minilm-layer{layer}.npy", values)


def coco_captions(work: Path, data: Path, seed: int, *, layer: int) -> FrozenModel:
    """The first caption of an image in place of the image, its other four as texts."""
    file = work / f"minilm-layer{layer}.npy"
    captions = (data / "coco5k_text" / "testall_caps.txt").read_text(encoding="utf-8").splitlines()
    if not file.exists():
        embed_captions(work, captions)
    embedded = torch.from_numpy(np.load(file)).float()
    ids = (data / "coco5k_text" / "testall_ids.txt").read_text().split()
    if not (len(ids) == len(embedded) == 25_000 and all(len(set(ids[k : k + 5])) == 1 for k in range(0, 25_000, 5))):
        counts = f"{len(ids):,} ids and {len(embedded):,} embedded captions"
        raise UserError(f"{data / 'coco5k_text'}: {counts}; expected 25,000 of each, five of an image after each other")
    images = torch.arange(0, 25_000, 5)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(seed))
    splits, texts = [], []
    for part in order.split([3000, 1000, 1000]):
        first = images[part.sort().values]
        others = (first[:, None] + torch.arange(1, 5)).flatten()
        pairs = np.stack([np.repeat(np.arange(len(first)), 4), np.arange(len(others))], axis=1)
        splits.append(FrozenSplit(embedded[first], embedded[others], pairs))
        texts.append([captions[k] for k in others.tolist()])
    model = FrozenModel(f"coco-captions-layer{layer}", splits[0], splits[1], {"test": splits[2]})
    found = corrupted_captions(model, texts[2], seed, lambda x: (torch.from_numpy(x).float(), None), layer)
    return replace(model, corruptions=found)


MODELS: dict[str, Callable[[Path, Path, int], FrozenModel]] = {
    "emoji-infonce": partial(emoji, loss="infonce"),
    "emoji-triplet": partial(emoji, loss="triplet"),
    "flickr8k-infonce": partial(flickr8k, loss="infonce"),
    "flickr8k-triplet": partial(flickr8k, loss="triplet"),
    "coco-captions-layer6": partial(coco_captions, layer=6),
    "coco-captions-layer3": partial(coco_captions, layer=3),
}


def about() -> dict[str, Any]:
    """Commit and machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True).stdout.strip()
    return {"commit": commit + ("+" if changed else ""), "cores": os.cpu_count(), "system": platform.system()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    shared = os.environ.get("SFUMATO_SHARED")
    parser.add_argument("--data", type=Path, default=Path(shared) / "data" if shared else Path("data"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--adapters", choices=("short", "long"), default="short")
    parser.add_argument("--methods", nargs="*", choices=contestants())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.work.is_file():
        return print_all(list(of_file(options.work).values()))
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    suffix, methods = ("", contestants()) if options.adapters == "short" else ("-long", ("constant", *ADAPTERS))
    methods = tuple(options.methods or methods)
    keys = [(name, seed) for seed in options.seeds for name in options.only]
    files = {(name, seed): options.work / f"{name}-seed{seed}{suffix}.json" for name, seed in keys}
    for (name, seed), path in files.items():
        model = MODELS[name](options.work, options.data, seed)
        chosen = RefereeOptions(methods, adapter_options(options.adapters), seed=seed)
        referee_model(model, chosen, path=path, about=about(), say=partial(print, flush=True))
    found = {key: json.loads(path.read_text()) for key, path in files.items() if path.exists()}
    found = {key: report for key, report in found.items() if set(methods) <= set(report["methods"])}
    if unfinished := [f"{name} seed {seed}" for name, seed in files if (name, seed) not in found]:
        print(f"Not finished, and left out: {', '.join(unfinished)}.\n")
    models = [[report for (model, _), report in found.items() if model == name] for name in options.only]
    print_all([reports for reports in models if reports])
    if options.json:
        reports = {f"{name}-seed{seed}": report for (name, seed), report in found.items()}
        lines = [f'"{key}": {compact(report)}' for key, report in reports.items()]
        write_atomically(options.json, "{\n" + ",\n".join(lines) + "\n}\n")


def compact(value: Any) -> str:
    """JSON in one line, numbers with four digits, without the recall of each bin."""
    digits = json.loads(
        json.dumps(value),
        parse_float=lambda text: float(f"{float(text):.4g}"),
        object_hook=lambda found: {k: v for k, v in found.items() if k != "recall" or not isinstance(v, list)},
    )
    return json.dumps(digits, separators=(",", ":"), ensure_ascii=False)


def of_file(path: Path) -> dict[str, list[dict[str, Any]]]:
    """{model: reports of its seeds} of a file that --json wrote."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key, report in json.loads(path.read_text(encoding="utf-8")).items():
        found.setdefault(re.sub(r"-seed\d+", "", key), []).append(report)
    return found


SHOWN = ("log_loss", "ece", "wrong_auroc", "wrong_gain", "count", "width", "absent_auroc", "ambiguity")
COSTS = ("recall_csd", "fit_seconds", "fit_megabytes", "ms_per_query", "query_megabytes", "megabytes")


def print_all(models: list[list[dict[str, Any]]]) -> None:
    """All tables; papers/docs/frozen-models.md shows some."""
    complete = [reports for reports in models if "constant" in reports[0]["methods"]]
    for figure, title in (
        ("skill", "Log loss of the first hit: fraction of the constant's that is saved"),
        ("wrong_auroc", "AUROC of wrong first hits"),
        ("count", "-S·R², ten bins of equal numbers"),
        ("width", "-S·R², ten bins of equal widths"),
    ):
        print(f"## {title}\n\n{referee_summary(complete, figure)}\n")
    print_hidden(models)
    for reports in models:
        print(f"## {reports[0]['model']}\n\n{referee_tables(reports, columns=(*SHOWN, *COSTS))}")


def print_hidden(models: list[list[dict[str, Any]]]) -> None:
    """How -S*R^2 and AUROC disagree, over all contestants, models, seeds, splits and directions that have both."""
    rows = [
        [figures["wrong_auroc"]["value"], *(figures["minus_s_r2"][b]["score"]["value"] for b in ("count", "width")),
         *(figures["minus_s_r2"]["count"]["score"][side] for side in ("low", "high"))]
        for reports in models for report in reports for method in report["methods"].values()
        for directions in method.get("tests", {}).values() for figures in directions.values()
    ]  # fmt: skip
    auroc, count, width, low, high = np.array([row for row in rows if None not in row]).T
    print(f"{len(auroc)} cells with both binnings.")
    print(f"-S·R² (count) >= .8 and AUROC < .65: {int(((count >= 0.8) & (auroc < 0.65)).sum())}")
    print(f"count and width differ by more than .3: {int((abs(count - width) > 0.3).sum())}")
    print(f"median width of the 95 % interval (count): {np.median(high - low):.2f}; largest {(high - low).max():.2f}")
    of_ranks = {name: spearman(auroc, values) for name, values in (("count", count), ("width", width))}
    print("Spearman with AUROC: " + ", ".join(f"{name} {value:.2f}" for name, value in of_ranks.items()) + "\n")


if __name__ == "__main__":
    main()
