"""Against the numbers of the released implementations; shapes and names come from the fixtures."""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sfumato.distances import csd_matrix, squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_probability
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import relevant_ranks, retrieval_metrics

SHARED = Path(os.environ.get("SFUMATO_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))
COCO = SHARED / "data" / "coco5k_text"
DIRECTIONS = ("i2t", "t2i")


def fixture(name):
    folder = SHARED / "parity"
    if not (folder / f"{name}.json").is_file():
        pytest.skip(f"no {name} in {folder}; set SFUMATO_SHARED to the folder of the reference values")
    described = json.loads((folder / f"{name}.json").read_text())
    tensors = load_file(folder / f"{name}.safetensors")
    for key, expected in described["tensors"].items():
        assert list(tensors[key].shape) == expected["shape"], key
    return described, tensors


def ranks_both_ways(distance, relevance):
    """Ranks of i2t from rows and of t2i from columns."""
    other = relevance.transpose()
    return {
        "i2t": (relevant_ranks(distance, relevance), relevance),
        "t2i": (relevant_ranks(distance.T.contiguous(), other), other),
    }


# ---------------------------------------------------------------- validation of PCME++


@pytest.mark.parametrize("kind", ["csd_sims", "cosine_sims", "matching_prob_sims"])
def test_parity_pcmepp_validation(kind):
    described, tensors = fixture("pcmepp_eval")
    n, m = tensors[f"out/{kind}"].shape
    relevance = Relevance.from_pairs(np.arange(m) // (m // n), np.arange(m), n_queries=n, n_gallery=m)
    for direction, (ranks, truth) in ranks_both_ways(-tensors[f"out/{kind}"], relevance).items():
        best = np.minimum.reduceat(ranks, truth.indptr[:-1])
        np.testing.assert_array_equal(best, tensors[f"ranks/{kind}/{direction}"].numpy())
        ours, official = retrieval_metrics(ranks, truth), described["metrics"][kind][direction]
        for k in (1, 5, 10):
            assert 100 * ours[f"recall@{k}"] == pytest.approx(official[f"r{k}"], abs=1e-10)
        assert ours["mean_rank"] == pytest.approx(official["meanr"], abs=1e-12)
        assert np.floor(ours["median_rank"]) == official["medr"]


def test_parity_pcmepp_scores_come_from_our_distances():
    _, tensors = fixture("pcmepp_eval")
    image, text = (
        GaussianEmbedding(tensors[f"inputs/{s}_mean"].double(), tensors[f"inputs/{s}_log_var"].double())
        for s in ("img", "txt")
    )
    # The official score takes 2 - 2 cos, which is the squared distance of means of length 1 only up to float32's rounding.
    torch.testing.assert_close(-csd_matrix(image, text), tensors["out/csd_sims"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(1 - squared_l2_matrix(image, text) / 2, tensors["out/cosine_sims"], rtol=1e-6, atol=1e-6)
    samples = [tensors[f"inputs/{s}_samples"].double() for s in ("img", "txt")]
    distance = torch.cdist(
        samples[0].flatten(0, 1), samples[1].flatten(0, 1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    scale, bias = tensors["inputs/negative_scale"].double(), tensors["inputs/shift"].double()
    # exp(x) / (exp(x) + exp(-x)) is sigmoid(2 x); the official score sums over the pairs of samples.
    s = samples[0].shape[1]
    summed = match_probability(distance, 2 * scale, 2 * bias).view(len(image), s, len(text), s).sum((1, 3))
    torch.testing.assert_close(summed, tensors["out/matching_prob_sims"], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- COCO 1K/5K, CxC, ECCV


@cache
def coco():
    """Distances, names of images and captions in the order of the fixture, and the official figures."""
    if not COCO.is_dir():
        pytest.skip(f"no id lists in {COCO}; set SFUMATO_SHARED")
    described, tensors = fixture("eccv_metrics")
    captions = np.load(COCO / "coco_test_ids.npy").tolist()
    own = {int(c): v[0] for c, v in json.loads((COCO / "original_caption_to_image.json").read_text()).items()}
    images = list(dict.fromkeys(own[c] for c in captions))
    assert (
        captions[:6] == described["recipe"]["first_caption_ids"]
        and images[:3] == described["recipe"]["first_image_ids"]
    )
    distance = -(tensors["image_embeddings"].float() @ tensors["caption_embeddings"].float().T)
    pairs = Relevance.from_lists(
        [[i] for i in (images.index(own[c]) for c in captions[::5]) for _ in range(5)], n_gallery=len(images)
    )
    return described["metrics_full_ranking"], distance, images, captions, pairs.transpose()


def check(official, prefix, direction, metrics, names):
    for ours, theirs in names.items():
        assert metrics[ours] == pytest.approx(official[f"{prefix}_{theirs}"][direction], abs=1e-12), (
            prefix,
            direction,
            theirs,
        )


RECALLS = {"recall@1": "r1", "recall@5": "r5", "recall@10": "r10"}


def test_parity_coco_5k_and_1k():
    official, distance, _, _, own = coco()
    for direction, (ranks, truth) in ranks_both_ways(distance, own).items():
        check(official, "coco_5k", direction, retrieval_metrics(ranks, truth), RECALLS)
    folds = {direction: [] for direction in DIRECTIONS}
    for f in range(5):
        rows, columns = np.arange(1000) + 1000 * f, np.arange(5000) + 5000 * f
        block = distance[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        for direction, pair in ranks_both_ways(block, own.select_queries(rows).select_gallery(columns)).items():
            folds[direction].append(retrieval_metrics(*pair))
    for direction, results in folds.items():
        means = {name: float(np.mean([r[name] for r in results])) for name in RECALLS}
        check(official, "coco_1k", direction, means, RECALLS)


@pytest.mark.parametrize("truth", ["cxc", "eccv"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_parity_cxc_and_eccv(truth, direction):
    official, distance, images, captions, _ = coco()
    file = {"i2t": "image_to_caption", "t2i": "caption_to_image"}[direction]
    queries, gallery = (images, captions) if direction == "i2t" else (captions, images)
    listed = {int(q): v for q, v in json.loads((COCO / f"{truth}_{file}.json").read_text()).items()}
    # Annotated items that are not in the gallery count among the relevant ones: they stand behind it, infinitely far.
    missing = sorted({item for items in listed.values() for item in items} - set(gallery))
    place = {item: j for j, item in enumerate([*gallery, *missing])}
    rows = [i for i, q in enumerate(queries) if q in listed]
    relevance = Relevance.from_lists([[place[item] for item in listed[queries[i]]] for i in rows], n_gallery=len(place))
    block = (distance if direction == "i2t" else distance.T)[rows]
    block = torch.cat([block, torch.full((len(rows), len(missing)), torch.inf)], dim=1)
    result = retrieval_metrics(relevant_ranks(block, relevance), relevance)
    names = RECALLS | ({"map@r": "map_at_r", "r_precision": "rprecision"} if truth == "eccv" else {})
    check(official, truth, direction, result, names)
    assert result["n_queries"] == {"cxci2t": 5000, "cxct2i": 24972, "eccvi2t": 1261, "eccvt2i": 1332}[truth + direction]
