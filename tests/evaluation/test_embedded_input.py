"""Embeddings and ranked lists from files against truths: what is read, what must fit, and what is refused."""

import json

import numpy as np
import pytest
import torch
from support.evaluating import evaluate_benchmarks, evaluate_ranked_lists
from support.raising import raises

from sfumato import GaussianEmbedding, read_ground_truths, save_embeddings
from sfumato.errors import UserError
from sfumato.evaluation.benchmarks import per_query_table
from sfumato.evaluation.embedded_input import (
    Files,
    measure,
    measure_files,
    measure_lists,
    measure_scores,
    read_embedded_set,
)
from sfumato.evaluation.ground_truth import ground_truth_from_pairs
from sfumato.evaluation.protocols import EmbeddedSet

N, M, D = 6, 12, 3


@pytest.fixture
def folder(tmp_path):
    """Embeddings as arrays and as a file, ids, a ground truth: text j belongs to image j // 2; rows are shuffled."""
    random = np.random.default_rng(0)
    mean = random.normal(size=(N, D))
    text, log_var = np.repeat(mean, 2, 0) + 0.8 * random.normal(size=(M, D)), random.normal(size=(M, D)) - 1
    images, texts = [f"i{i}" for i in range(N)], [f"t{j}" for j in range(M)]
    pairs = [[images[j // 2], texts[j]] for j in range(M)]
    (tmp_path / "truth.json").write_text(json.dumps({"images": images, "texts": texts, "pairs": pairs}))
    np.save(tmp_path / "i.npy", mean)
    np.save(tmp_path / "t.npy", np.float32(text))
    np.save(tmp_path / "t_log_var.npy", log_var)
    order = random.permutation(M)
    np.save(tmp_path / "shuffled.npy", np.float32(text)[order])
    (tmp_path / "shuffled.txt").write_text("".join(f"{texts[j]}\n" for j in order))
    ours = GaussianEmbedding(text[order], log_var[order])
    save_embeddings(tmp_path / "ours.safetensors", ours, [texts[j] for j in order])
    return tmp_path


@pytest.fixture
def ground_truths(folder):
    return read_ground_truths(ground_truth=folder / "truth.json")


def test_rows_without_ids_are_in_the_order_of_the_truth_and_our_files_have_log_variances(folder, ground_truths):
    plain = read_embedded_set(f"{folder}/i.npy", f"{folder}/t.npy", ground_truths)
    assert plain.text_ids == ground_truths[0].text_ids and plain.uncertainty() is None
    # float64 images and float32 texts meet in float64.
    assert plain.images.dtype == plain.texts.dtype == np.float64
    files = f"{folder}/i.npy", f"{folder}/shuffled.npy", ground_truths
    shuffled, wrong = read_embedded_set(*files, text_ids=folder / "shuffled.txt"), read_embedded_set(*files)
    assert measure(plain).figures == measure(shuffled).figures != measure(wrong).figures
    ids = plain.image_ids, plain.text_ids
    assert measure(plain).figures == evaluate_benchmarks(plain.images, plain.texts, *ids, ground_truths, distance="csd")
    np.save(folder / "half.npy", np.float16(np.load(folder / "i.npy")))
    found = read_embedded_set(f"{folder}/half.npy", f"{folder}/t.npy", ground_truths)
    assert found.images.dtype == np.float32, "half precision is widened"
    points = read_embedded_set(f"{folder}/i.npy", f"{folder}/t.npy", ground_truths)
    found = read_embedded_set(f"{folder}/i.npy", f"{folder}/ours.safetensors", ground_truths)
    assert found.text_ids != points.text_ids and measure(found).figures != measure(points).figures
    assert measure(found, "squared_l2").figures == measure(points).figures
    expected = dict(zip(points.text_ids, np.exp(np.load(folder / "t_log_var.npy")).sum(1), strict=True))
    assert found.uncertainty()["t2i"] == pytest.approx(expected, rel=1e-5)
    assert set(found.uncertainty()["i2t"].values()) == {0.0} and points.uncertainty() is None


def test_lists_are_measured_as_they_are(folder):
    ground_truths = read_ground_truths(ground_truth=folder / "truth.json", metrics=["recall@1", "r_precision"])
    embedded = read_embedded_set(f"{folder}/i.npy", f"{folder}/t.npy", ground_truths)
    distance = torch.cdist(embedded.images.tensors().mean, embedded.texts.tensors().mean)
    images, texts = ground_truths[0].image_ids, ground_truths[0].text_ids
    lists = {
        "i2t": {images[i]: [texts[j] for j in row[:3]] for i, row in enumerate(distance.argsort(1).tolist())},
        "t2i": {texts[j]: [images[i] for i in row[:2]] for j, row in enumerate(distance.T.argsort(1).tolist())},
    }
    (folder / "lists.json").write_text(json.dumps(lists))
    found = measure_lists(folder / "lists.json", ground_truths)
    assert found.figures == evaluate_ranked_lists(lists["i2t"], lists["t2i"], images, texts, ground_truths)
    assert found.figures == measure(embedded, "squared_l2").figures and found.score == "lists"
    single = per_query_table(found.ranks)
    assert np.isnan(single["recall@10"]).all() and not np.isnan(single["r_precision"]).any()
    deeper = read_ground_truths(ground_truth=folder / "truth.json", metrics=["recall@5"])
    raises(ValueError, "recall@5 needs 5", measure_lists, folder / "lists.json", deeper)


def test_a_matrix_of_scores_is_the_ranking_by_it(folder, ground_truths, capsys):
    embedded = read_embedded_set(f"{folder}/i.npy", f"{folder}/t.npy", ground_truths)
    distance = torch.cdist(embedded.images.tensors().mean, embedded.texts.tensors().mean).square().numpy()
    expected = measure(embedded, "squared_l2").figures
    np.save(folder / "d.npy", distance)
    np.save(folder / "s.npy", np.float32(-distance))
    of_rows = measure_scores(folder / "d.npy", "distance", ground_truths)
    assert of_rows.figures == expected == measure_scores(folder / "s.npy", "similarity", ground_truths).figures
    assert of_rows.to_json()["ids"] == {k: "in the order of the ground truth" for k in ("images", "texts")}
    assert not capsys.readouterr().err
    assert measure_scores(folder / "d.npy", "similarity", ground_truths).figures != expected
    assert "are the scores a distance? --scores-are distance" in capsys.readouterr().err
    order = [ground_truths[0].text_ids.index(line) for line in (folder / "shuffled.txt").read_text().split()]
    np.save(folder / "shuffled.npy", distance[:, order])
    named = measure_scores(folder / "shuffled.npy", "distance", ground_truths, text_ids=folder / "shuffled.txt")
    assert named.figures == expected and named.ids["texts"] == str(folder / "shuffled.txt")
    assert measure_scores(folder / "shuffled.npy", "distance", ground_truths).figures != expected
    # Ties: the earlier item of the gallery is first, so only image 0, text 0 and text 1 are found at once.
    np.save(folder / "ties.npy", np.zeros((N, M), np.int8))
    tied = measure_scores(folder / "ties.npy", "similarity", ground_truths).figures["truth"]
    assert (tied["i2t"]["recall@1"], tied["t2i"]["recall@1"]) == (1 / N, 2 / M)


@pytest.mark.parametrize(
    ("scores", "kind", "message"),
    [
        (
            np.zeros((N, M)),
            None,
            "--scores-are similarity .larger is closer. or --scores-are distance .* found nothing",
        ),
        (np.zeros((N, M)), "cosine", "found 'cosine'"),
        (
            np.zeros((M, N)),
            "distance",
            "12 by 6, but there are 6 images .* expected 6 by 12.*texts by images: write it",
        ),
        (np.zeros((N, M + 1)), "distance", "6 by 13, but .* 12 texts .* expected 6 by 12, images by texts$"),
        (np.full((N, M), np.nan), "distance", "the score of image 0 and text 0 is NaN"),
        (np.zeros(N), "distance", "shape .6,. .* expected a matrix of numbers, images by texts"),
        (np.array([["a"]]), "distance", "type <U1; expected a matrix of numbers"),
    ],
)
def test_matrices_that_cannot_be_ranked(folder, ground_truths, scores, kind, message):
    np.save(folder / "scores.npy", scores)
    raises(UserError, message, measure_scores, folder / "scores.npy", kind, ground_truths)


def test_a_matrix_has_the_options_of_a_ranking_alone(folder):
    np.save(folder / "d.npy", np.zeros((N, M)))
    wanted = {"scores": folder / "d.npy", "scores_are": "distance", "ground_truth": folder / "truth.json"}
    measured, embedded = measure_files(Files(**wanted))
    assert embedded is None and measured.score == "distance matrix"
    truth, both = {"ground_truth": folder / "truth.json"}, {"images": "a.npy", "texts": "b.npy"}
    own = {"images": f"{folder}/i.npy", "texts": f"{folder}/t.npy"}
    nothing, lists = "give a model, or --images and --texts, or --ranked", {"ranked": folder / "l.json"}
    for files, score, message in (
        (wanted, "csd", "ranked as it is; leave out --score"),
        (wanted | lists, None, "or --scores; not several of them"), (wanted | both, None, "not several of them"),
        (wanted | {"scores": None}, None, "nothing to evaluate"),
        (truth | both | {"scores_are": "distance"}, None, "--scores-are belongs to a matrix of scores"),
        ({}, None, nothing), ({"images": "x.npy"}, None, nothing), ({"texts": "x.npy"}, None, nothing),
        (lists | both, None, nothing), (lists | {"images": "x.npy"}, None, nothing),
        (truth | lists, "csd", "leave out --score"),
        (truth | own, "match_probability", "match_probability needs the logits of a model"),
    ):  # fmt: skip
        raises(UserError, message, measure_files, Files(**files), score)


def test_numbers_and_padded_file_names_of_coco_are_one_image():
    point = GaussianEmbedding(torch.arange(3.0)[:, None], torch.zeros(3, 1))
    names = ("COCO_val2014_000000000042.jpg", "000000000007.jpg", "000000000139")
    truth = ground_truth_from_pairs("x", names, ["a", "b", "c"], zip(names, "abc", strict=True))
    found = measure(EmbeddedSet(point, point, ("42", "7", "139"), ("a", "b", "c"), (truth,)))
    assert found.figures["x"]["i2t"]["recall@1"] == 1 and found.uncertainty["x"]["i2t"]["bins"]
    assert EmbeddedSet(point[:1], point[:1], names[:1], ("7",), ()).uncertainty()["i2t"] == {"42": 1.0, names[0]: 1.0}
    turned = ground_truth_from_pairs("x", (42, 7, 139), ["a", "b", "c"], zip((42, 7, 139), "abc", strict=True))
    assert measure(EmbeddedSet(point, point, names, ("a", "b", "c"), (turned,))).figures == found.figures


def test_mistakes_are_named_and_benchmarks_known_by_name(folder, ground_truths, shared):
    truth = {"ground_truth": folder / "truth.json"}
    for arguments, message in (
        ({}, r"either --truth FILE or --benchmark NAME \(coco, flickr30k"),
        ({"benchmark": "coco"} | truth, "either --truth FILE"),
        ({"benchmark": "cocoa"}, "unknown benchmark 'cocoa'; known: coco"),
        ({"benchmark": "flickr8k"}, "flickr8k is read from dataset_flickr8k.json; name it with --annotations"),
        ({"benchmark": "cub"}, "cub is read from the folder of captions; name it with --annotations"),
        ({"benchmark": "emoji", "instances": [folder / "x.json"]}, "instances belongs to the benchmark coco"),
        ({"metrics": ["recal@1"]} | truth, "unknown metric 'recal@1'"),
    ):
        raises(ValueError if "metrics" in arguments else UserError, message, read_ground_truths, **arguments)
    np.save(folder / "wide.npy", np.zeros((M, D + 1)))
    counts = r"12 image embeddings without ids for a ground truth \(truth\) of 6 images; give --image-ids"
    raises(UserError, counts, read_embedded_set, f"{folder}/t.npy", f"{folder}/t.npy", ground_truths)
    sizes = r"i.npy has 3 dimensions, .*wide.npy has 4"
    raises(ValueError, sizes, read_embedded_set, f"{folder}/i.npy", f"{folder}/wide.npy", ground_truths)
    found = read_ground_truths("coco", annotations=shared / "data" / "coco5k_text", metrics=["recall@1"])
    names = ["coco_5k", "coco_1k", "cxc", "rpc2", "rpc2_cxc", "cxc_1k", "rpc2_1k", "rpc2_cxc_1k", "eccv"]
    assert [t.name for t in found] == names and {t.metrics for t in found} == {("recall@1",)}
    message = "for --split val name Karpathy's file with --annotations dataset_coco.json"
    folder = shared / "data" / "coco5k_text"
    raises(UserError, message, read_ground_truths, "coco", annotations=folder, split="val")
    assert read_ground_truths("emoji", split="val")[0].name == "emoji"
