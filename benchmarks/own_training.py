"""What training on own photographs adds to the model `small`, and what photographs lose that it has not seen.

python benchmarks/own_training.py FLICKR8K --texts texts.npy --work FOLDER --json FILE [--n 400 1000] [--draws 3]

FLICKR8K holds dataset_flickr8k.json, efflite0_224_fp16.npy (a row a photograph) and minilm_l6_v2_fp16.npy (a row a
caption); scripts/make_small.py writes texts.npy. Four captions of each own photograph are given, the fifth is asked.
New photographs are 600 of which training saw nothing: among themselves, and 20 at a time among the own.

`small` has seen the training split. So 400 own photographs are of the test split, 1,000 of test and validation; 3,000
are half of the training split, with a base that the other half trained; for 6,000, all of it, the validation split
trained the base.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from sfumato import load
from sfumato.arrays import Array
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import RaggedStore
from sfumato.models.model import Model
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import SMALL, load_run
from sfumato.training.loop import fit

NEW, AMONG, WEIGHT = 600, 20, 0.8
ANCHORS = (0.95, 0.9, 0.8, 0.7, 0.5, 0.0)
EMBEDDINGS = ["data.source=embeddings", 'model.image={kind="embeddings",whiten=0}']
EMBEDDINGS += ['model.text={kind="embeddings",whiten=0}']
BEFORE = ["train.start=", "train.anchor=0", "model.hidden=512", "loss.logit_scale=5", "loss.logit_bias=5"]


class Bench:
    """Features, splits and the work folder."""

    def __init__(self, flickr8k: Path, texts: Path, work: Path) -> None:
        images = json.loads((flickr8k / "dataset_flickr8k.json").read_text("utf-8"))["images"]
        self.split = np.array([image["split"] for image in images])
        self.files = {
            "images": flickr8k / "efflite0_224_fp16.npy",
            "layers": texts,
            "last": flickr8k / "minilm_l6_v2_fp16.npy",
        }
        self.rows = {name: np.load(path, mmap_mode="r") for name, path in self.files.items()}
        self.work = work

    def train(
        self,
        recipe: str,
        out: str,
        splits: dict[str, np.ndarray],
        n_captions: int,
        *changes: str,
        texts: str = "layers",
    ) -> Path:
        """A run on the first captions of some photographs; made once."""
        folder = self.work / out
        folder.mkdir(parents=True, exist_ok=True)
        pairs = folder.with_suffix(".csv")
        with pairs.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "text", "split"])
            for name, images in splits.items():
                writer.writerows([i, 5 * i + c, name] for i in images for c in range(n_captions))
        paths = [f"data.images={self.files['images']}", f"data.texts={self.files[texts]}", f"data.path={pairs}"]
        fit(load_recipe(find_recipe(recipe), [*EMBEDDINGS, *paths, "train.threads=1", *changes]), folder)
        return folder

    def distance(self, model: Model, queries: np.ndarray, items: np.ndarray, texts: str = "layers") -> Array:
        """From the fifth captions of some photographs to others."""
        text = model.model.text.embed(_store(self.rows[texts][5 * queries + 4]))
        image = model.model.image.embed(_store(self.rows["images"][items]))
        return get_distance(model.distance).matrix(text, image)

    def captions(self, queries: np.ndarray, items: np.ndarray) -> Tensor:
        """Minus the maximum and the mean of the cosines of MiniLM with the four captions."""
        asked = normalize(torch.from_numpy(self.rows["last"][5 * queries + 4].astype(np.float32)), dim=1)
        rows = (5 * items[:, None] + np.arange(4)).ravel()
        own = normalize(torch.from_numpy(self.rows["last"][rows].astype(np.float32)), dim=1)
        cosine = (asked @ own.T).view(len(queries), len(items), 4)
        return -(cosine.amax(2) + cosine.mean(2))


def anchored(start: Model, run: Model, recipes: float, anchor: float) -> Model:
    """A run with another anchor than its recipe's."""
    models: tuple[Any, Any] = (start.model, run.model)
    first, kept = (one.state_dict() for one in models)
    model = load_run(run.source)
    weight = (1 - anchor) / (1 - recipes)
    model.model.load_state_dict({name: value.lerp(kept[name], weight) for name, value in first.items()})
    return model


def _store(rows: np.ndarray) -> RaggedStore:
    return RaggedStore(np.asarray(rows), np.arange(len(rows)), np.ones(len(rows), np.int64))


def hits(distance: Tensor, right: Tensor) -> float:
    """Fraction of the rows whose right column is the closest."""
    return float((distance.argmin(1) == right).double().mean())


def first_hits(distance: Any, own: np.ndarray, new: np.ndarray) -> dict[str, float]:
    """Of own photographs, of new ones among themselves, and of 20 new ones at a time among the own."""
    among = [new[k : k + AMONG] for k in range(0, NEW, AMONG)]
    n = len(own)
    to_own, to_new = distance(new, own), distance(new, new)
    found = []
    for k in range(len(among)):
        rows = slice(k * AMONG, (k + 1) * AMONG)
        found.append(hits(torch.cat([to_own[rows], to_new[rows, rows]], 1), n + torch.arange(AMONG)))
    return {
        "own": hits(distance(own, own), torch.arange(n)),
        "new": hits(to_new, torch.arange(len(new))),
        "new among own": float(np.mean(found)),
    }


def draw_of(bench: Bench, n: int, draw: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Own and new photographs, and the model to start from."""
    random = np.random.default_rng(draw)
    part = {name: random.permutation(np.flatnonzero(bench.split == name)) for name in ("train", "val", "test")}
    if n <= len(part["test"]) - NEW:
        return part["test"][:n], part["test"][n : n + NEW], SMALL
    if n <= 2 * len(part["test"]) - NEW:
        pool = random.permutation(np.concatenate([part["test"], part["val"]]))
        return pool[:n], pool[n : n + NEW], SMALL
    own, rest = part["train"][:n], part["train"][n:]
    base, val = (rest, {"val": part["val"]}) if len(rest) else (part["val"], {})
    run = bench.train("small", f"base-{n}-{draw}", {"train": base, **val}, 5, f"train.seed={draw}")
    return own, part["test"][:NEW], str(run)


def measure(bench: Bench, n: int, draw: int) -> dict[str, dict[str, float]]:
    """First hits of every road."""
    own, new, start = draw_of(bench, n, draw)
    seed = ["data.val_fraction=0", "data.test_fraction=0", f"train.seed={draw}"]
    run = bench.train("own-pictures", f"own-{n}-{draw}", {"train": own}, 4, *seed, f"train.start={start}")
    before = bench.train("own-pictures", f"new-{n}-{draw}", {"train": own}, 4, *seed, *BEFORE, texts="last")
    base, trained, fresh = load(start), load_run(run), load_run(before)
    others = {f"anchor {a:g}": anchored(base, trained, trained.recipe.train.anchor, a) for a in ANCHORS}

    def beside(model: Model) -> Any:
        return lambda q, i: bench.captions(q, i) + WEIGHT / 2 * bench.distance(model, q, i)

    roads = {
        "start": lambda q, i: bench.distance(base, q, i),
        "captions": bench.captions,
        "captions and start": beside(base),
        "trained": lambda q, i: bench.distance(trained, q, i),
        "captions and trained": beside(trained),
        "new heads": lambda q, i: bench.distance(fresh, q, i, "last"),
    }
    roads |= {name: lambda q, i, model=model: bench.distance(model, q, i) for name, model in others.items()}
    return {name: first_hits(road, own, new) for name, road in roads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--n", type=int, nargs="+", default=[400, 1000, 3000, 6000])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    bench = Bench(given.flickr8k, given.texts, given.work)
    result = json.loads(given.json.read_text("utf-8")) if given.json.exists() else {}
    for n in given.n:
        for draw in range(given.draws):
            found = result.setdefault(str(n), {})
            if str(draw) not in found:
                found[str(draw)] = measure(bench, n, draw)
                given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(n, draw, json.dumps(found[str(draw)]), flush=True)


if __name__ == "__main__":
    main()
