"""Retrieval metrics over batches: equal to the evaluation of the whole to the bit, alone and over processes."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.processes import process_group
from support.raising import raises

from sfumato import RetrievalMetrics
from sfumato.evaluation.protocols import evaluate_retrieval
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance

N, PER, D = 23, 3, 5
M = N * PER


def data(dtype=torch.float32):
    """Images, texts of which text j belongs to image j // PER, and the relevance of all of them."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(N, D, generator=generator)
    text = mean.repeat_interleave(PER, 0) + 0.8 * torch.randn(M, D, generator=generator)
    images = GaussianEmbedding(mean.to(dtype), (torch.randn(N, D, generator=generator) - 1).to(dtype))
    texts = GaussianEmbedding(text.to(dtype), (torch.randn(M, D, generator=generator) - 1).to(dtype))
    relevance = Relevance.from_pairs(np.arange(M) // PER, np.arange(M), n_queries=N, n_gallery=M)
    return images, texts, relevance


def batches(size, first=0, last=N):
    """(positions of images, positions of their texts) of each batch."""
    for start in range(first, last, size):
        own = np.arange(start, min(start + size, last))
        yield own, (own[:, None] * PER + np.arange(PER)).flatten()


def updated(metrics, size, first=0, last=N, *, relevance=False):
    images, texts, whole = data()
    for i, t in batches(size, first, last):
        own = {"pairs": [(j // PER, j) for j in t.tolist()]}
        if relevance:
            own = {"relevance": whole.to_dense()[np.ix_(i, t)]}
        metrics.update(images[torch.from_numpy(i)], texts[torch.from_numpy(t)], image_ids=i, text_ids=t, **own)
    return metrics


@pytest.mark.parametrize("distance", ["csd", "wasserstein2", "average_l2"])
@pytest.mark.parametrize("size", [1, 7, N])
def test_batches_are_the_whole_to_the_bit(distance, size):
    images, texts, relevance = data()
    whole = evaluate_retrieval(images, texts, relevance, distance=distance)
    assert whole.i2t["recall@1"] not in (0, 1)
    metrics = RetrievalMetrics(distance=distance)
    assert updated(metrics, size).compute() == whole == updated(RetrievalMetrics(distance=distance), size).compute()
    assert updated(RetrievalMetrics(distance=distance), size, relevance=True).compute() == whole
    metrics.update(images[:2], texts[:2], image_ids=[0, 1], text_ids=["0", "1"], pairs=[])
    assert metrics.compute() == whole, "items that come again count once"
    assert repr(metrics) == f"RetrievalMetrics({distance!r}, 23 images, 69 texts)"


def test_rows_of_a_batch_belong_together_and_an_image_comes_with_each_of_its_captions():
    images, texts, relevance = data()
    metrics = RetrievalMetrics()
    for j in torch.arange(M).split(10):  # As a loader of captions has them: an image stands in several batches.
        metrics.update(images[j // PER], texts[j], image_ids=j // PER, text_ids=j)
    assert metrics.compute() == evaluate_retrieval(images, texts, relevance)


def test_sides_may_come_separately_and_a_table_or_a_relevance_says_what_matches():
    images, texts, relevance = data()
    metrics = RetrievalMetrics(uncertainty="log_det")
    metrics.update(images, image_ids=range(N))
    metrics.update(texts=texts, text_ids=range(M), pairs=((j // PER, j) for j in range(M)))
    whole = evaluate_retrieval(images, texts, relevance, uncertainty="log_det")
    assert metrics.compute() == whole != evaluate_retrieval(images, texts, relevance)
    metrics.reset()
    for table in (relevance, torch.from_numpy(relevance.to_dense())):
        metrics.update(images, texts, image_ids=range(N), text_ids=range(M), relevance=table)
    assert metrics.compute() == whole


def test_what_is_kept_has_no_gradient():
    mean = torch.eye(4, requires_grad=True)
    metrics = RetrievalMetrics()
    point = GaussianEmbedding(mean, torch.zeros(4, 4))
    metrics.update(point, point, image_ids=range(4), text_ids=range(4))
    assert not metrics._images.joined.mean.requires_grad and metrics.compute().i2t["recall@1"] == 1


def test_mistakes_are_named_and_add_nothing():
    images, texts, _ = data()
    metrics, of = RetrievalMetrics(), images[:3]
    raises(ValueError, "there are 0 images and 0 texts; call update", metrics.compute)
    three = {"image_ids": range(3), "text_ids": range(3)}
    raises(ValueError, "got 2 image_ids for 3 images", metrics.update, of, of, image_ids=range(2), text_ids=range(3))
    raises(ValueError, "got 0 text_ids for 3 texts", metrics.update, of, of, image_ids=range(3))
    raises(TypeError, "texts are of type Tensor; .* GaussianEmbedding.point", metrics.update, of, of.mean, **three)
    raises(ValueError, "pairs or relevance, not both", metrics.update, of, of, **three, pairs=[], relevance=np.eye(3))
    raises(
        ValueError, r"relevance is \(2, 2\); expected \(3, 3\)", metrics.update, of, of, **three, relevance=np.eye(2)
    )
    four = {"image_ids": range(3), "text_ids": range(4)}
    raises(ValueError, "3 images and 4 texts; say what matches", metrics.update, of, texts[:4], **four)
    metrics.update(of, of, **three)
    again = "the text id '0' came before with another embedding. Ids are those of the data"
    raises(ValueError, again, metrics.update, images[3:6], images[3:6], image_ids=range(3, 6), text_ids=range(3))
    raises(ValueError, "image id '9' came before", metrics.update, images[:2], image_ids=[9, 9])
    wide = GaussianEmbedding.point(torch.zeros(1, D + 1))
    raises(ValueError, "images of d=6, torch.float32 after d=5", metrics.update, wide, image_ids=[9])
    assert repr(metrics) == "RetrievalMetrics('csd', 3 images, 3 texts)"
    metrics.update(pairs=[(0, "gone")])
    raises(ValueError, "names the text 'gone', which never came", metrics.compute)
    raises(ValueError, "unknown distance", RetrievalMetrics, distance="csdd")


def _in_a_group(bounds, path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    metrics = updated(RetrievalMetrics(), 4, *bounds[rank])
    if rank == 0:  # Of the next process too, as a sampler that fills its last batch.
        images, texts, _ = data()
        metrics.update(images[:1], texts[:1], image_ids=[0], text_ids=[0])
    with open(f"{path}.{rank}", "w") as file:
        json.dump(metrics.compute().to_json(), file)
    dist.destroy_process_group()


@pytest.mark.parametrize("bounds", [((0, 11), (11, N)), ((0, N), (0, 0)), ((0, 15), (8, N))])
def test_processes_together_have_the_figures_of_the_whole(bounds, tmp_path):
    started = process_group(2, _in_a_group, bounds, str(tmp_path / "figures"))
    ends = [one.finish() for one in started]
    assert all(code == 0 for code, _ in ends), ends
    whole = json.loads(json.dumps(evaluate_retrieval(*data()).to_json()))
    for rank in range(2):
        assert json.loads((tmp_path / f"figures.{rank}").read_text()) == whole


def test_against_torchmetrics():
    retrieval = pytest.importorskip("torchmetrics.retrieval", reason="torchmetrics is no dependency")
    images, texts, relevance = data()
    ours = updated(RetrievalMetrics(distance="squared_l2"), 5).compute()
    # Positive scores: the classes of torchmetrics 1.9 find nothing among negative ones.
    scores, match = 9 - torch.cdist(images.mean, texts.mean), torch.from_numpy(relevance.to_dense())
    sides = {"i2t": (ours.i2t, scores, match), "t2i": (ours.t2i, scores.T, match.T)}
    for found, score, target in sides.values():
        index = torch.arange(len(score))[:, None].expand_as(score).flatten()
        for k in (1, 5, 10):  # Ours is whether a match is among the first k, theirs which fraction of the matches.
            name = "RetrievalHitRate" if target is match else "RetrievalRecall"
            theirs = getattr(retrieval, name)(top_k=k)(score.flatten(), target.flatten(), indexes=index)
            assert float(theirs) == pytest.approx(found[f"recall@{k}"], abs=1e-6)
        theirs = retrieval.RetrievalRPrecision()(score.flatten(), target.flatten(), indexes=index)
        assert float(theirs) == pytest.approx(found["r_precision"], abs=1e-6)
