"""Against the numbers of the released implementations; shapes and names come from the fixtures."""

import hashlib
import re
from functools import cache

import numpy as np
import pytest
from evaluation.test_benchmarks import evaluated
from support.fixtures import SHARED
from support.parity import fixture
from support.raising import raises

from sfumato.evaluation.benchmark_ground_truths import eccv_caption
from sfumato.evaluation.protocols import Lists, Scores
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import relevant_ranks, retrieval_metrics

COCO = SHARED / "data" / "coco5k_text"
DIRECTIONS = ("i2t", "t2i")


@pytest.mark.parametrize("kind", ["csd_sims", "cosine_sims", "matching_prob_sims"])
def test_parity_pcmepp_validation(kind):
    described, tensors = fixture("pcmepp_eval")
    n, m = tensors[f"out/{kind}"].shape
    relevance = Relevance.from_pairs(np.arange(m) // (m // n), np.arange(m), n_queries=n, n_gallery=m)
    distance = -tensors[f"out/{kind}"]
    sides = {"i2t": (distance, relevance), "t2i": (distance.T.contiguous(), relevance.transpose())}
    for direction, (block, ground_truth) in sides.items():
        ranks = relevant_ranks(block, ground_truth)
        best = np.minimum.reduceat(ranks, ground_truth.indptr[:-1])
        np.testing.assert_array_equal(best, tensors[f"ranks/{kind}/{direction}"].numpy())
        ours, official = retrieval_metrics(ranks, ground_truth), described["metrics"][kind][direction]
        for k in (1, 5, 10):
            assert 100 * ours[f"recall@{k}"] == pytest.approx(official[f"r{k}"], abs=1e-10)
        assert ours["mean_rank"] == pytest.approx(official["meanr"], abs=1e-12)
        assert np.floor(ours["median_rank"]) == official["medr"]


@cache
def coco():
    """The official figures, float32 scores of images by captions, and the ground truths; ids in the scores' order."""
    if not COCO.is_dir():
        pytest.skip(f"no id lists in {COCO}; set SFUMATO_SHARED")
    described, tensors = fixture("eccv_metrics")
    ground_truths = eccv_caption(COCO)
    images, captions = ground_truths["coco_5k"].image_ids, ground_truths["coco_5k"].text_ids
    for ids, what in ((images, "image"), (captions, "caption")):
        digest = hashlib.sha256(np.array(ids, dtype="<i8").tobytes()).hexdigest()
        assert digest == described["recipe"][f"{what}_ids_sha256_int64_le"]
    embeddings = [tensors[f"{side}_embeddings"].float() for side in ("image", "caption")]
    return described, embeddings, ground_truths, images, captions


@cache
def coco_scores():
    image, text = coco()[1]
    return image @ text.T


def check(official, result):
    names = {"r1": "recall@1", "r5": "recall@5", "r10": "recall@10", "map_at_r": "map@r", "rprecision": "r_precision"}
    for key, both in official.items():
        ground_truth, metric = re.fullmatch(r"(coco_1k|coco_5k|cxc|eccv)_(\w+)", key).groups()
        for direction in DIRECTIONS:
            found = result[ground_truth][direction][names[metric]]
            assert found == pytest.approx(both[direction], rel=4e-16), (key, direction)


@pytest.mark.slow
def test_parity_scores():
    described, _, ground_truths, images, captions = coco()
    result = evaluated(Scores(coco_scores().numpy(), better="larger"), images, captions, ground_truths.values())
    official = described["metrics_full_ranking"]
    assert len(official) == 14
    check(official, result)
    queries = {d: [result[name][d]["n_queries"] for name in ("cxc", "eccv")] for d in DIRECTIONS}
    assert queries == {"i2t": [5000, 1261], "t2i": [24972, 1332]}
    recalls = [official[f"coco_1k_{k}"][d] for k in ("r1", "r5", "r10") for d in DIRECTIONS]
    assert result["coco_1k"]["rsum"] == pytest.approx(sum(recalls), rel=1e-15)


@pytest.mark.slow
def test_parity_ranked_lists():
    described, _, ground_truths, images, captions = coco()
    scores, lists = coco_scores(), []
    for side, queries, gallery in ((scores, images, captions), (scores.T, captions, images)):
        best = np.array(gallery, np.int64)[side.topk(250, dim=1).indices.numpy()]
        lists.append(dict(zip(map(int, queries), best, strict=True)))
    folded, *others = (ground_truths[name] for name in ("coco_1k", "coco_5k", "cxc", "eccv"))
    official = described["metrics_lists_truncated_to_500"]  # Half of that decides every figure already.
    of_folds = {name: value for name, value in official.items() if name.startswith("coco_1k")}
    assert len(of_folds) == 3
    check(of_folds, evaluated(Lists(*lists), images, captions, [folded]))
    lists = [{query: row[:50] for query, row in side.items()} for side in lists]
    # Here the official package counts what is left of a fold: less than there is from recall@5 of captions on.
    shortened = described["metrics_lists_truncated_to_50"]
    assert shortened["coco_1k_r5"]["t2i"] < described["metrics_full_ranking"]["coco_1k_r5"]["t2i"]
    message = r"coco_1k, i2t: the list of '\d+' holds \d of 5000 items, but recall@"
    raises(ValueError, message, evaluated, Lists(*lists), images, captions, [folded])
    # Lists of 50 are enough for all others: no query of ECCV Caption has more positives.
    official = {name: v for name, v in described["metrics_full_ranking"].items() if not name.startswith("coco_1k")}
    check(official, evaluated(Lists(*lists), images, captions, others))
