"""First hits in a folder of photographs with nothing trained: the model `small` on the test split of Flickr8k.

python benchmarks/own_folder.py FLICKR8K [--json FILE]

FLICKR8K holds dataset_flickr8k.json, efflite0_224_fp16.npy (features of the photographs at 224 pixels, a row an image),
minilm_l6_v2_fp16.npy (a row a caption) and images_128.tar (small copies). The query is the fifth caption.
"""

import argparse
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato import load
from sfumato.distances import get_distance
from sfumato.encoders.features import RaggedStore
from sfumato.gaussian import GaussianEmbedding

DRAWS = 3


def small_copies(path: Path) -> dict[str, bytes]:
    """The bytes of the files of an archive by name."""
    with tarfile.open(path) as archive:
        files = {Path(m.name).name: archive.extractfile(m) for m in archive if m.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def recalls(distance: torch.Tensor) -> dict[str, float]:
    """Recall@1 and @10 of a square matrix whose diagonal is right."""
    rank = (distance < distance.diagonal().unsqueeze(1)).sum(1)
    return {f"recall@{k}": float((rank < k).double().mean()) for k in (1, 10)}


def mean_and_deviation(found: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and standard deviation over draws."""
    return {key: [float(f([one[key] for one in found])) for f in (np.mean, np.std)] for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    images = json.loads((given.flickr8k / "dataset_flickr8k.json").read_text("utf-8"))["images"]
    rows = [i for i, image in enumerate(images) if image["split"] == "test"]
    captions = [[s["raw"] for s in images[i]["sentences"]] for i in rows]
    model = load("small")
    full = np.load(given.flickr8k / "efflite0_224_fp16.npy")[rows]
    store = RaggedStore(full, np.arange(len(rows)), np.ones(len(rows), np.int64))
    copies = small_copies(given.flickr8k / "images_128.tar")
    queries = model.embed_texts([own[4] for own in captions])
    sides: dict[str, GaussianEmbedding] = {
        "small, full images": model.model.image.embed(store),
        "small, copies of 128 pixels": model.embed_images([copies[images[i]["filename"]] for i in rows]),
    }
    csd = get_distance("csd").matrix
    distances = {name: csd(queries, side) for name, side in sides.items()}
    minilm = torch.from_numpy(np.load(given.flickr8k / "minilm_l6_v2_fp16.npy").astype(np.float32))
    minilm = torch.nn.functional.normalize(minilm, dim=1).view(len(images), 5, -1)[rows]
    cosine = torch.einsum("qd,ncd->qnc", minilm[:, 4], minilm[:, :4])
    distances["four captions by MiniLM, maximum (needs captions)"] = -cosine.amax(2)
    distances["four captions by MiniLM, maximum + mean (needs captions)"] = -(cosine.amax(2) + cosine.mean(2))
    result: dict[str, Any] = {}
    for name, distance in distances.items():
        draws = [random.Random(seed).sample(range(len(rows)), 400) for seed in range(DRAWS)]
        of_400 = mean_and_deviation([recalls(distance[draw][:, draw]) for draw in draws])
        result[name] = {"400": of_400, "1000": recalls(distance)}
        print(f"{name}: 400 photographs {of_400['recall@1'][0]:.3f} ± {of_400['recall@1'][1]:.3f} first,", end=" ")
        print(f"{of_400['recall@10'][0]:.3f} in ten; 1,000 {result[name]['1000']['recall@1']:.3f} first")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
