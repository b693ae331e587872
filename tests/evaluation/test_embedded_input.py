"""Embeddings and ranked lists from files against truths: what is read, what must fit, and what is asked for beside."""

import json

import numpy as np
import pytest
import torch
from support.evaluating import evaluate_benchmarks, evaluate_ranked_lists
from support.raising import raises

from sfumato.errors import UserError
from sfumato.evaluation.benchmarks import EmbeddedSet
from sfumato.evaluation.compare import More, more_results, per_query_table, read_per_query
from sfumato.evaluation.embedded_input import (
    Files,
    measure,
    measure_files,
    measure_lists,
    read_embedded_set,
    read_ground_truths,
)
from sfumato.evaluation.papers import common_figures
from sfumato.gaussian import GaussianEmbedding, save_embeddings

N, M, D = 6, 12, 3


@pytest.fixture
def folder(tmp_path):
    """Embeddings as arrays and as a file, ids, a ground truth: text j belongs to image j // 2; rows are shuffled."""
    random = np.random.default_rng(0)
    mean = random.normal(size=(N, D))
    text = np.repeat(mean, 2, 0) + 0.8 * random.normal(size=(M, D))
    log_var = random.normal(size=(M, D)) - 1
    images, texts = [f"i{i}" for i in range(N)], [f"t{j}" for j in range(M)]
    pairs = [[images[j // 2], texts[j]] for j in range(M)]
    (tmp_path / "truth.json").write_text(json.dumps({"images": images, "texts": texts, "pairs": pairs}))
    np.save(tmp_path / "i.npy", mean)
    np.save(tmp_path / "t.npy", np.float32(text))
    np.save(tmp_path / "t_log_var.npy", log_var)
    order = random.permutation(M)
    np.save(tmp_path / "shuffled.npy", np.float32(text)[order])
    (tmp_path / "shuffled.txt").write_text("".join(f"{texts[j]}\n" for j in order))
    save_embeddings(
        tmp_path / "ours.safetensors",
        GaussianEmbedding(torch.from_numpy(text[order]), torch.from_numpy(log_var[order])),
        [texts[j] for j in order],
    )
    return tmp_path


def test_rows_without_ids_are_in_the_order_of_the_truth(folder):
    ground_truths = read_ground_truths(ground_truth=folder / "truth.json")
    plain = read_embedded_set(f"{folder}/i.npy", f"{folder}/t.npy", ground_truths)
    assert plain.text_ids == ground_truths[0].text_ids and plain.uncertainty() is None
    # float64 images and float32 texts meet in float64.
    assert plain.images.dtype == plain.texts.dtype == torch.float64
    shuffled = read_embedded_set(
        f"{folder}/i.npy", f"{folder}/shuffled.npy", ground_truths, text_ids=folder / "shuffled.txt"
    )
    assert measure(plain).figures == measure(shuffled).figures
    wrong = read_embedded_set(f"{folder}/i.npy", f"{folder}/shuffled.npy", ground_truths)
    assert measure(wrong).figures != measure(plain).figures
    expected = evaluate_benchmarks(
        plain.images, plain.texts, plain.image_ids, plain.text_ids, ground_truths, distance="csd"
    )
    assert measure(plain).figures == expected


def test_log_variances_from_a_file_are_those_of_a_file_of_ours(folder):
    ground_truths = read_ground_truths(ground_truth=folder / "truth.json")
    a = read_embedded_set(f"{folder}/i.npy", f"{folder}/t.npy", ground_truths, text_log_var=folder / "t_log_var.npy")
    b = read_embedded_set(f"{folder}/i.npy", f"{folder}/ours.safetensors", ground_truths)
    assert b.text_ids != a.text_ids and measure(a).figures == measure(b).figures != measure(a, "squared_l2").figures
    expected = dict(zip(a.text_ids, np.exp(np.load(folder / "t_log_var.npy")).sum(1), strict=True))
    for found in (a, b):
        assert found.uncertainty()["t2i"] == pytest.approx(expected, rel=1e-5)
        assert set(found.uncertainty()["i2t"].values()) == {0.0}


def test_half_precision_is_widened(folder):
    np.save(folder / "half.npy", np.float16(np.load(folder / "i.npy")))
    found = read_embedded_set(
        f"{folder}/half.npy", f"{folder}/t.npy", read_ground_truths(ground_truth=folder / "truth.json")
    )
    assert found.images.dtype == torch.float32


def test_cocos_file_names_find_their_uncertainty():
    point = GaussianEmbedding(torch.zeros(1, 2), torch.zeros(1, 2))
    names = EmbeddedSet(point, point, ("COCO_val2014_000000391895.jpg",), ("7",), ())
    assert names.uncertainty()["i2t"] == {"391895": 2.0, "COCO_val2014_000000391895.jpg": 2.0}


def test_lists_are_measured_as_they_are(folder):
    ground_truths = read_ground_truths(ground_truth=folder / "truth.json", metrics=["recall@1", "r_precision"])
    embedded = read_embedded_set(f"{folder}/i.npy", f"{folder}/t.npy", ground_truths)
    distance = torch.cdist(embedded.images.mean, embedded.texts.mean)
    images, texts = ground_truths[0].image_ids, ground_truths[0].text_ids
    lists = {
        "i2t": {images[i]: [texts[j] for j in row[:3]] for i, row in enumerate(distance.argsort(1).tolist())},
        "t2i": {texts[j]: [images[i] for i in row[:2]] for j, row in enumerate(distance.T.argsort(1).tolist())},
    }
    (folder / "lists.json").write_text(json.dumps(lists))
    found = measure_lists(folder / "lists.json", ground_truths)
    assert found.figures == evaluate_ranked_lists(lists["i2t"], lists["t2i"], images, texts, ground_truths)
    assert found.figures == measure(embedded, "squared_l2").figures and found.score == "lists"
    more = More(per_query=folder / "q.csv", compared_with="x")
    results = more_results(found, None, more, per_query_table(found.ranks))
    assert {d.metric for d in results.differences} == {"recall@1", "r_precision"}
    assert np.isnan(read_per_query(folder / "q.csv").figures["recall@10"]).all()
    with pytest.raises(UserError, match="ranked lists and scores are already ranked; strategies need embeddings"):
        more_results(found, None, More(strategies="csd"))
    with pytest.raises(ValueError, match="recall@5 needs 5"):
        measure_lists(
            folder / "lists.json", read_ground_truths(ground_truth=folder / "truth.json", metrics=["recall@5"])
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not usable JSON"),
        ("[]", "found list"),
        ('{"i2t": {}}', "found i2t"),
        ('{"i2t": {}, "t2i": {"a": 1}}', "t2i is not an object of lists"),
    ],
)
def test_files_that_are_no_lists(folder, content, message):
    (folder / "lists.json").write_text(content)
    with pytest.raises(UserError, match=message):
        measure_lists(folder / "lists.json", read_ground_truths(ground_truth=folder / "truth.json"))


def test_more_is_only_what_was_asked_for(folder):
    embedded = read_embedded_set(
        f"{folder}/i.npy", f"{folder}/ours.safetensors", read_ground_truths(ground_truth=folder / "truth.json")
    )
    measured = measure(embedded)
    assert not More().anything and more_results(measured, embedded, More()).to_json() == {}
    other = per_query_table(measure(embedded, "squared_l2").ranks)
    more = More(strategies="mean", per_query=folder / "q.csv", compared_with="other")
    result = more_results(measured, embedded, more, other).to_json()
    assert list(result) == ["strategies", "per_query", "comparison"]
    # A single strategy is what single queries are of: by means alone it is the other run.
    assert all(d["difference"] == 0 and d["p_value"] == 1 for d in result["comparison"]["differences"])
    assert result["strategies"]["mean"]["truths"] == measure(embedded, "squared_l2").figures
    result = more_results(measured, embedded, More(compared_with="other"), other).to_json()
    assert any(d["difference"] != 0 for d in result["comparison"]["differences"])
    assert {d["metric"] for d in result["comparison"]["differences"]} == {
        "recall@1", "recall@5", "recall@10", "r_precision", "map@r"
    }  # fmt: skip
    json.dumps(result, allow_nan=False)
    with pytest.raises(UserError, match="no published table has figures of truth"):
        more_results(measured, embedded, More(published=True))


def test_figures_in_the_form_of_the_published_ones():
    figures = {
        "coco_1k": {"i2t": {"recall@1": 0.5}, "t2i": {"recall@1": 0.25}, "rsum": 5.0},
        "eccv": {"i2t": {"map@r": 0.1, "r_precision": 0.2}, "t2i": {"map@r": 0.3}},
        "mine": {"i2t": {"recall@1": 1.0}, "t2i": {"recall@1": 1.0}, "rsum": 6.0},
    }
    found = common_figures(figures)
    assert found == pytest.approx({"eccv map@r": 20.0, "coco_1k recall@1": 37.5, "rsum": 500.0})
    assert common_figures(figures, "t2i") == pytest.approx({"eccv map@r": 30.0, "coco_1k recall@1": 25.0})


def test_mistakes_are_named(folder, tmp_path):
    ground_truths = read_ground_truths(ground_truth=folder / "truth.json")
    for arguments in ({}, {"benchmark": "coco", "ground_truth": folder / "truth.json"}):
        raises(UserError, r"either --truth FILE or --benchmark NAME \(coco, flickr30k", read_ground_truths, **arguments)
    raises(UserError, "unknown benchmark 'cocoa'; known: coco", read_ground_truths, "cocoa")
    for name, wanted in (("flickr8k", "dataset_flickr8k.json"), ("cub", "the folder of captions")):
        with pytest.raises(UserError, match=f"--benchmark {name} is read from {wanted}; name it with --annotations"):
            read_ground_truths(name)
    with pytest.raises(UserError, match="--instances belongs to --benchmark coco"):
        read_ground_truths("emoji", instances=[folder / "x.json"])
    with pytest.raises(ValueError, match="unknown metric 'recal@1'"):
        read_ground_truths(ground_truth=folder / "truth.json", metrics=["recal@1"])
    with pytest.raises(
        UserError, match=r"12 image embeddings without ids for a ground truth \(truth\) of 6 images; give --image-ids"
    ):
        read_embedded_set(f"{folder}/t.npy", f"{folder}/t.npy", ground_truths)
    np.save(folder / "wide.npy", np.zeros((M, D + 1)))
    with pytest.raises(ValueError, match=r"i.npy has 3 dimensions, .*wide.npy has 4"):
        read_embedded_set(f"{folder}/i.npy", f"{folder}/wide.npy", ground_truths)
    for nothing in (
        Files(),
        Files(images="x.npy"),
        Files(texts="x.npy"),
        Files(ranked=folder / "l.json", images="x.npy", texts="y.npy"),
        Files(ranked=folder / "l.json", images="x.npy"),
    ):
        raises(UserError, "give a model, or --images and --texts, or --ranked", measure_files, nothing)
    with pytest.raises(UserError, match="leave out --score and the log variances"):
        measure_files(Files(ranked=folder / "l.json", ground_truth=folder / "truth.json"), "csd")
    raises(UserError, "name at most one strategy", More, strategies="mean,csd", per_query=folder / "x.csv")
    raises(UserError, "must be a .parquet or .csv file", More, per_query=folder / "x.txt")
    raises(UserError, "the folder .*nowhere does not exist", More, per_query=folder / "nowhere" / "x.csv")
    assert Files(text_log_var=folder, ranked=folder).given() == ["--text-log-var", "--ranked"]


def test_named_benchmarks(shared):
    found = read_ground_truths("coco", annotations=shared / "data" / "coco5k_text", metrics=["recall@1"])
    names = ["coco_5k", "coco_1k", "cxc", "rpc2", "rpc2_cxc", "cxc_1k", "rpc2_1k", "rpc2_cxc_1k", "eccv"]
    assert [t.name for t in found] == names and {t.metrics for t in found} == {("recall@1",)}
    with pytest.raises(UserError, match="for --split val name Karpathy's file with --annotations dataset_coco.json"):
        read_ground_truths("coco", annotations=shared / "data" / "coco5k_text", split="val")
    assert read_ground_truths("emoji", split="val")[0].name == "emoji"
