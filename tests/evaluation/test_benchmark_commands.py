"""`sfumato evaluate` of a run against a benchmark, on a dozen synthetic images in Karpathy's layout."""

import csv
import json

import numpy as np
import pytest
import torch
from support.pictures import encoded, write_tar
from support.words import folded, too_wide

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
LOSS_OF_POINTS = """
[loss]
name = "triplet"
[train]
epochs = 1
batch_size = 8
threads = 1
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    from sfumato import cli

    folder, random = tmp_path_factory.mktemp("benchmark"), np.random.default_rng(0)
    entries = []
    for k in range(36):
        sentences = [{"sentid": 10 * k + j, "raw": f"bird {k} seen {j} times"} for j in range(2)]
        entries.append({"filename": f"{k}.png", "split": ("test", "val", "train")[k // 12], "sentences": sentences})
    pixels = lambda: random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    write_tar(folder / "images.tar", {entry["filename"]: encoded(pixels()) for entry in entries})
    (folder / "dataset_flickr8k.json").write_text(json.dumps({"images": entries}))
    (folder / "birds.toml").write_text(RECIPE.format(folder=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sfumato", "train", str(folder / "birds.toml"), "--out", str(folder / "run")])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert not stop.value.code
    return folder


def test_a_run_against_a_benchmark_is_the_same_run_on_its_split(work, sfumato):
    wanted = ("--benchmark", "flickr8k", "--annotations", work / "dataset_flickr8k.json")
    own = json.loads(sfumato("evaluate", "run", work / "run", "--json")[1])
    for command in (
        ("run", work / "run"), 
        ("run", work / "run", "--data", work / "birds.toml"),
    ):  # fmt: skip
        status, out, err = sfumato("evaluate", *command, *wanted, "--json")
        assert status == 0, err
        found = json.loads(out)
        for direction in ("i2t", "t2i"):
            for recall in ("recall@1", "recall@5", "recall@10"):
                assert found["truths"]["flickr8k"][direction][recall] == own[direction][recall]
    assert found["truths"]["flickr8k"]["rsum"] == own["rsum"] and found["uncertainty"]["flickr8k"] == own["uncertainty"]
    assert json.loads((work / "run" / "benchmark-flickr8k-test-csd.json").read_text())["truths"] == found["truths"]
    status, out, _ = sfumato("evaluate", "run", work / "run", *wanted, "--metrics", "map@r", "--split", "val")
    assert status == 0 and "flickr8k" in out and "map@r" in out
    assert (work / "run" / "benchmark-flickr8k-val-csd.json").is_file()
    status, out, _ = sfumato("evaluate", "run", work / "run", *wanted)
    words = folded(out)
    assert "recall@1 of ten groups of queries, from the most certain" in words and "flickr8k image -> text: " in words
    assert "mean total variance: images" in words and not too_wide(out, work)


def test_what_does_not_fit_is_refused_before_anything_is_embedded(work, sfumato, monkeypatch):
    monkeypatch.setattr("sfumato.models.embed.embed_split", None)
    wanted = ("--benchmark", "flickr8k", "--annotations", work / "dataset_flickr8k.json")
    (work / "other.json").write_text((work / "dataset_flickr8k.json").read_text().replace(".png", ".jpg"))
    for arguments, message in (
        (
            (*wanted[:3], work / "other.json"),
            "12 of the 12 images of the benchmark flickr8k are not among the 12 images that were embedded",
        ),
        (("--benchmark", "cub", "--annotations", work), "with a further --annotations the folder of the public"),
        (("--annotations", work), "--annotations belongs to a benchmark; add --benchmark NAME"),
        (("--metrics", "map@r"), "--metrics belongs to a benchmark"),
    ):
        status, out, err = sfumato("evaluate", "run", work / "run", *arguments)
        assert (status, out) == (2, "") and message in err


def test_the_split_of_the_benchmark_may_have_another_name_than_that_of_the_data(work, sfumato):
    renamed = json.loads((work / "dataset_flickr8k.json").read_text())
    for entry in renamed["images"]:
        entry["split"] = {"test": "val", "val": "test"}.get(entry["split"], entry["split"])
    (work / "renamed.json").write_text(json.dumps(renamed))
    wanted = ("evaluate", "run", work / "run", "--json", "--benchmark", "flickr8k", "--annotations")
    whole = json.loads(sfumato(*wanted, work / "dataset_flickr8k.json")[1])
    assert (
        json.loads(sfumato(*wanted, work / "renamed.json", "--benchmark-split", "val")[1])["truths"] == whole["truths"]
    )


def test_ranking_by_match_probability_takes_the_logits_of_the_run(work, sfumato):
    status, out, err = sfumato("evaluate", "run", work / "run", "--distance", "match_probability", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["distance"] == "match_probability"
    assert (work / "run" / "evaluation-test-match_probability.json").is_file()
    with pytest.raises(ValueError, match="unknown distance 'elkk'.*nearest_of_K.*; or match_probability"):
        load_run(work / "run").ranking_distance("elkk")


def test_samples_at_test_time_are_chosen_with_their_seed(work, sfumato):
    run = load_run(work / "run")
    embedded = embed_for_evaluation(run, run.recipe.data, "test")
    logits = run.loss.logits
    scale, bias = (2 * x.item() for x in (logits.logit_scale, logits.logit_bias))
    a = seeded_samples(embedded.images, 5, seed=4, side="image")
    b = seeded_samples(embedded.texts, 5, seed=4, side="text")
    scores = {
        "match_probability": [[torch.sigmoid(bias - scale * torch.cdist(x, y)).mean() for y in b] for x in a],
        "average_l2": [[-torch.cdist(x, y).mean() for y in b] for x in a],
    }
    wanted = ("evaluate", "run", work / "run", "--samples", 5, "--seed", 4, "--json")
    benchmark = ("--benchmark", "flickr8k", "--annotations", work / "dataset_flickr8k.json")
    for name, table in scores.items():
        p = torch.tensor(table)
        hit = (p.argmax(1) // 2 == torch.arange(12)).double().mean()
        rank = (p.T[range(24), torch.arange(24) // 2][:, None] < p.T).sum(1) + 1
        status, out, err = sfumato(*wanted, "--distance", name)
        assert status == 0, err
        found = json.loads(out)
        assert found["samples"] == {"n": 5, "seed": 4}
        assert found["i2t"]["recall@1"] == pytest.approx(float(hit))
        assert found["t2i"]["mean_rank"] == pytest.approx(float(rank.double().mean()))
        found_again = json.loads(sfumato(*wanted, *benchmark, "--distance", name)[1])
        assert found_again["samples"] == {"n": 5, "seed": 4}
        assert found_again["truths"]["flickr8k"]["i2t"]["recall@5"] == found["i2t"]["recall@5"]
    own = json.loads(sfumato("evaluate", "run", work / "run", "--distance", "match_probability", "--json")[1])
    assert own["samples"] == {"n": 3, "seed": 0}, "the number of the training"
    status, out, err = sfumato("evaluate", "run", work / "run", "--samples", 5)
    assert (status, out) == (2, "") and "csd needs none. Leave --samples out" in " ".join(err.split())
    status, out, err = sfumato(*wanted, "--distance", "match_probability", "--samples", 0)
    assert status == 2 and "--samples" in err


def test_recall_and_single_queries_by_another_uncertainty(work, sfumato, tmp_path):
    run = load_run(work / "run")
    embedded = embed_for_evaluation(run, run.recipe.data, "test")
    log_det = embedded.texts.log_var.sum(1)
    wanted = ("--benchmark", "flickr8k", "--annotations", work / "dataset_flickr8k.json", "--uncertainty", "log_det")
    status, out, err = sfumato("evaluate", "run", work / "run", *wanted, "--per-query", tmp_path / "q.csv", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["uncertainty_measure"] == "log_det"
    bins = found["uncertainty"]["flickr8k"]["t2i"]["bins"]
    parts = np.array_split(log_det.sort().values.double().numpy(), 10)
    assert [b["uncertainty"] for b in bins] == pytest.approx([p.mean() for p in parts], rel=1e-5)
    with (tmp_path / "q.csv").open() as file:
        rows = {row["query"]: float(row["uncertainty"]) for row in csv.DictReader(file) if row["direction"] == "t2i"}
    assert list(rows.values()) == pytest.approx([log_det[embedded.text_ids.index(q)].item() for q in rows])
    plain = json.loads(sfumato("evaluate", "run", work / "run", "--uncertainty", "geometric_std", "--json")[1])
    assert plain["uncertainty_measure"] == "geometric_std"
    expected = torch.exp(embedded.texts.log_var.mean(1) / 2).sort().values.double().numpy()
    shown = [b["uncertainty"] for b in plain["uncertainty"]["t2i"]["bins"]]
    assert shown == pytest.approx([p.mean() for p in np.array_split(expected, 10)], rel=1e-5)
    words = " ".join(sfumato("evaluate", "run", work / "run", "--uncertainty", "log_det")[1].split())
    assert "from the most certain to the least (by log volume)" in words
    status, out, err = sfumato("evaluate", "run", work / "run", "--uncertainty", "entropy")
    assert (status, out) == (2, "") and "known: total_variance, geometric_std, log_det" in err


def test_a_model_without_logits_has_no_match_probability(work, sfumato, tmp_path):
    (tmp_path / "point.toml").write_text((work / "birds.toml").read_text().partition("[loss]")[0] + LOSS_OF_POINTS)
    status, _, err = sfumato("train", tmp_path / "point.toml", "--out", tmp_path / "point")
    assert status == 0, err
    status, _, err = sfumato("evaluate", "run", tmp_path / "point", "--distance", "match_probability")
    assert status == 2 and "match_probability needs logits that were learnt on distances of samples" in err
