"""The probability of of a caption from texts alone, on people's scores of other captions: Crisscrossed Captions.

    python -m papers.benchmarks.coco_texts COCO5K [--json FILE]

COCO5K holds testall_caps.txt and testall_ids.txt (a caption and its image a line), coco_test_ids.npy (ids of captions)
and cxc_sits_test.csv (Parekh et al. 2021: caption, image, mean score of people from 0 to 5). There are no images: the
texts of an image are its captions without the one asked. 8,000 random pairs. A pair is right from a score of 3 on, the
limit of Crisscrossed Captions for retrieval; its authors asked for similarity, not for "describes".
"""

import argparse
import csv
import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from papers.captions.score import fits
from sfumato.metrics.bootstrap import auroc
from sfumato.metrics.reliability import expected_calibration_error

N_PAIRS, RIGHT = 8_000, 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coco5k", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    captions = (given.coco5k / "testall_caps.txt").read_text("utf-8").splitlines()
    images = [int(line) for line in (given.coco5k / "testall_ids.txt").read_text("utf-8").splitlines()]
    place = {int(i): k for k, i in enumerate(np.load(given.coco5k / "coco_test_ids.npy"))}
    own = defaultdict(list)
    for k, image in enumerate(images):
        own[image].append(k)
    with (given.coco5k / "cxc_sits_test.csv").open(encoding="utf-8") as file:
        rows = random.Random(0).sample(list(csv.DictReader(file)), N_PAIRS)
    asked = [place[int(row["caption"].rsplit(":", 1)[1])] for row in rows]
    shown = [int(row["image"].rsplit("_", 1)[1].removesuffix(".jpg")) for row in rows]
    texts = [[captions[k] for k in own[image] if k != i] for i, image in zip(asked, shown, strict=True)]
    p = torch.from_numpy(fits([captions[i] for i in asked], texts=texts))
    score = torch.tensor([float(row["agg_score"]) for row in rows])
    is_own = torch.tensor([images[i] == image for i, image in zip(asked, shown, strict=True)])
    result = {}
    for name, some in {"all": torch.ones_like(is_own), "own captions": is_own, "others": ~is_own}.items():
        said, right = p[some], (score[some] >= RIGHT).double()
        result[name] = {
            "n": len(said), "said": float(said.mean()), "right": float(right.mean()),
            "error": expected_calibration_error(said, right, n_bins=10), "AUROC": auroc(said.numpy(), right.numpy()),
        }  # fmt: skip
        print(name, json.dumps(result[name]))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
