"""`sfumato evaluate` of a run against a benchmark, on a dozen synthetic images in Karpathy's layout."""

import csv
import json

import numpy as np
import pytest
import torch
from support.pictures import encoded, write_tar
from support.raising import raises
from support.words import folded, too_wide

from sfumato import find_recipe, fit, load_recipe
from sfumato.distances.distance import seeded_samples
from sfumato.models.embed import embed_for_evaluation
from sfumato.models.run import load_run

RECIPE = """
name = "birds"
[data]
source = "karpathy"
path = "{folder}/dataset_flickr8k.json"
images = "{folder}/images.tar"
[model]
dim = 4
image = {{ kind = "small", size = 16, width = 2 }}
text = {{ kind = "small", vocabulary = 60, width = 4, max_tokens = 8 }}
[loss]
name = "pcme"
n_samples = 3
sigmoid = "compressed"
[train]
epochs = 1
batch_size = 8
threads = 1
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder, random, entries = tmp_path_factory.mktemp("benchmark"), np.random.default_rng(0), []
    for k in range(36):
        sentences = [{"sentid": 10 * k + j, "raw": f"bird {k} seen {j} times"} for j in range(2)]
        entries.append({"filename": f"{k}.png", "split": ("test", "val", "train")[k // 12], "sentences": sentences})
    pixels = lambda: random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    write_tar(folder / "images.tar", {entry["filename"]: encoded(pixels()) for entry in entries})
    (folder / "dataset_flickr8k.json").write_text(json.dumps({"images": entries}))
    (folder / "birds.toml").write_text(RECIPE.format(folder=folder))
    fit(load_recipe(folder / "birds.toml"), folder / "run")
    return folder


@pytest.fixture
def evaluate(work, sfumato):
    """The figures of the run that a command prints."""
    return lambda *arguments: sfumato.json("evaluate", "run", work / "run", *arguments)


@pytest.fixture
def flickr(work):
    return "--benchmark", "flickr8k", "--annotations", work / "dataset_flickr8k.json"


def test_a_run_against_a_benchmark_is_the_same_run_on_its_split(work, sfumato, evaluate, flickr):
    own = evaluate()
    for data in ((), ("--data", work / "birds.toml")):
        found = evaluate(*data, *flickr)
        for direction in ("i2t", "t2i"):
            for recall in ("recall@1", "recall@5", "recall@10"):
                assert found["truths"]["flickr8k"][direction][recall] == own[direction][recall]
    assert found["truths"]["flickr8k"]["rsum"] == own["rsum"] and found["uncertainty"]["flickr8k"] == own["uncertainty"]
    assert json.loads((work / "run" / "benchmark-flickr8k-test-csd.json").read_text())["truths"] == found["truths"]
    out = sfumato.printed("evaluate", "run", work / "run", *flickr, "--metrics", "map@r", "--split", "val")
    assert "flickr8k" in out and "map@r" in out and (work / "run" / "benchmark-flickr8k-val-csd.json").is_file()
    out = sfumato.printed("evaluate", "run", work / "run", *flickr)
    words = folded(out)
    assert "recall@1 of ten groups of queries, from the most certain" in words and "flickr8k image -> text: " in words
    assert "mean total variance: images" in words and not too_wide(out, work)
    # The split of the benchmark may have another name than that of the data.
    renamed = json.loads((work / "dataset_flickr8k.json").read_text())
    for entry in renamed["images"]:
        entry["split"] = {"test": "val", "val": "test"}.get(entry["split"], entry["split"])
    (work / "renamed.json").write_text(json.dumps(renamed))
    assert evaluate(*flickr[:3], work / "renamed.json", "--benchmark-split", "val")["truths"] == found["truths"]


def test_what_does_not_fit_is_refused_before_anything_is_embedded(work, sfumato, flickr, monkeypatch):
    monkeypatch.setattr("sfumato.models.embed.embed_split", None)
    (work / "other.json").write_text((work / "dataset_flickr8k.json").read_text().replace(".png", ".jpg"))
    absent = "12 of the 12 images of the benchmark flickr8k are not among the 12 images that were embedded"
    for arguments, message in (
        ((*flickr[:3], work / "other.json"), absent),
        (("--benchmark", "cub", "--annotations", work), "with a further --annotations the folder of the public"),
        (("--annotations", work), "--annotations belongs to a benchmark; add --benchmark NAME"),
        (("--metrics", "map@r"), "--metrics belongs to a benchmark"),
        (("--samples", 5), "csd needs none. Leave --samples out"),
        (("--uncertainty", "entropy"), "known: total_variance, geometric_std, log_det"),
    ):
        assert message in folded(sfumato.refused("evaluate", "run", work / "run", *arguments))


def test_ranking_by_match_probability_takes_the_logits_of_the_run(work, sfumato, evaluate, tmp_path, capsys):
    found = evaluate("--distance", "match_probability")
    assert found["distance"] == "match_probability"
    assert found["samples"] == {"n": 3, "seed": 0}, "the number of the training"
    assert (work / "run" / "evaluation-test-match_probability.json").is_file()
    message = "unknown distance 'elkk'.*nearest_of_K.*; or match_probability"
    raises(ValueError, message, load_run(work / "run").ranking_distance, "elkk")
    points = (work / "birds.toml").read_text().replace('"pcme"', '"triplet"')
    points = points.replace('n_samples = 3\nsigmoid = "compressed"\n', "")
    (tmp_path / "point.toml").write_text(points)
    fit(load_recipe(tmp_path / "point.toml"), tmp_path / "point")
    capsys.readouterr()
    said = sfumato.refused("evaluate", "run", tmp_path / "point", "--distance", "match_probability")
    assert "match_probability needs logits that were learnt on distances of samples" in said


def test_samples_at_test_time_are_chosen_with_their_seed(work, evaluate, flickr):
    run = load_run(work / "run")
    embedded, logits = embed_for_evaluation(run, run.recipe.data, "test"), run.loss.logits
    scale, bias = (2 * x.item() for x in (logits.logit_scale, logits.logit_bias))
    a = seeded_samples(embedded.images, 5, seed=4, side="image")
    b = seeded_samples(embedded.texts, 5, seed=4, side="text")
    scores = {"average_l2": [[-torch.cdist(x, y).mean() for y in b] for x in a]}
    scores["match_probability"] = [[torch.sigmoid(bias - scale * torch.cdist(x, y)).mean() for y in b] for x in a]
    for name, table in scores.items():
        p = torch.tensor(table)
        hit = (p.argmax(1) // 2 == torch.arange(12)).double().mean()
        rank = (p.T[range(24), torch.arange(24) // 2][:, None] < p.T).sum(1) + 1
        wanted = ("--samples", 5, "--seed", 4, "--distance", name)
        found, of_benchmark = evaluate(*wanted), evaluate(*wanted, *flickr)
        assert found["samples"] == of_benchmark["samples"] == {"n": 5, "seed": 4}
        assert found["i2t"]["recall@1"] == pytest.approx(float(hit))
        assert found["t2i"]["mean_rank"] == pytest.approx(float(rank.double().mean()))
        assert of_benchmark["truths"]["flickr8k"]["i2t"]["recall@5"] == found["i2t"]["recall@5"]


def test_recall_and_single_queries_by_another_uncertainty(work, sfumato, evaluate, flickr, tmp_path):
    run = load_run(work / "run")
    embedded = embed_for_evaluation(run, run.recipe.data, "test")
    log_det = embedded.texts.log_var.sum(1)
    found = evaluate(*flickr, "--uncertainty", "log_det", "--per-query", tmp_path / "q.csv")
    assert found["uncertainty_measure"] == "log_det"
    bins = found["uncertainty"]["flickr8k"]["t2i"]["bins"]
    parts = np.array_split(log_det.sort().values.double().numpy(), 10)
    assert [b["uncertainty"] for b in bins] == pytest.approx([p.mean() for p in parts], rel=1e-5)
    with (tmp_path / "q.csv").open() as file:
        rows = {row["query"]: float(row["uncertainty"]) for row in csv.DictReader(file) if row["direction"] == "t2i"}
    assert list(rows.values()) == pytest.approx([log_det[embedded.text_ids.index(q)].item() for q in rows])
    words = folded(sfumato.printed("evaluate", "run", work / "run", "--uncertainty", "log_det"))
    assert "from the most certain to the least (by log volume)" in words


def scan_folder(folder, order):
    """12 images with 5 captions each: region features and captions in SCAN's layout, annotations in another order."""
    random = np.random.default_rng(1)
    captions = [[f"word{i} {word} thing" for word in ("a", "one", "some", "this", "that")] for i in range(20)]
    for part, chosen in (("train", range(20)), ("dev", range(4)), ("test", range(10))):
        np.save(folder / f"{part}_ims.npy", random.standard_normal((len(chosen), 2, 4)).astype(np.float32))
        (folder / f"{part}_caps.txt").write_text("".join(f"{c}\n" for i in chosen for c in captions[i]))
    images = []
    for i in order:
        sentences = [{"sentid": 5000 - 10 * i + k, "raw": c} for k, c in enumerate(captions[i])]
        images.append({"filename": f"COCO_val2014_{900 + i:012d}.jpg", "split": "test", "sentences": sentences})
    (folder / "dataset_coco.json").write_text(json.dumps({"images": images}))


@pytest.mark.parametrize("ids", ["of captions", "of images", "none"])
def test_a_run_on_scans_features_meets_cocos_ids_by_their_order(tmp_path, sfumato, ids):
    scan_folder(tmp_path, range(10) if ids == "none" else (3, 9, 0, 1, 8, 2, 7, 4, 6, 5))
    if ids != "none":
        times = 5 if ids == "of captions" else 1
        (tmp_path / "test_ids.txt").write_text("".join(f"{900 + i}\n" * times for i in range(10)))
    small = (
        f"data.path={tmp_path}", "model.image.channels=4", "model.image.graph_layers=1", "model.dim=4",
        "model.text.hidden=4", "model.text.width=4", "model.text.min_count=1", "train.epochs=1", "train.batch_size=20",
    )  # fmt: skip
    fit(load_recipe(find_recipe("coco-vsrn"), small), tmp_path / "run")
    own = sfumato.json("evaluate", "run", tmp_path / "run")
    wanted = "--benchmark", "coco", "--annotations", tmp_path / "dataset_coco.json"
    status, out, err = sfumato("evaluate", "run", tmp_path / "run", *wanted, "--json")
    assert status == 0 and "they take those of coco_5k, in their order" in err
    truths = json.loads(out)["truths"]
    for side in ("i2t", "t2i"):
        assert {truths["coco_5k"][side][m] == own[side][m] for m in ("recall@1", "recall@5", "recall@10")} == {True}
    (tmp_path / "test_ids.txt").write_text("".join(f"{905 + i}\n" for i in range(10)))
    assert "are not among the 10 images" in folded(sfumato.refused("evaluate", "run", tmp_path / "run", *wanted))
