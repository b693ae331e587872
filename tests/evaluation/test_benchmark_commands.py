"""`sfumato evaluate` against benchmarks: of a run, of embeddings and of lists, on a dozen synthetic images."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluation.test_benchmarks import evaluated
from support.pictures import encoded, write_tar
from support.raising import raises
from support.words import folded, too_wide

from sfumato import GaussianEmbedding, find_recipe, fit, load_recipe, read_ground_truths, save_embeddings
from sfumato.distances.distance import seeded_samples
from sfumato.errors import UserError
from sfumato.evaluation import embedded_input
from sfumato.evaluation.benchmarks import per_query_table
from sfumato.evaluation.embedded_input import Files, measure, measure_files, measure_scores, read_embedded_set
from sfumato.evaluation.ground_truth import ground_truth_from_pairs
from sfumato.evaluation.protocols import EmbeddedSet, Embeddings, Lists
from sfumato.models.embed import embed_for_evaluation
from sfumato.models.run import load_run
from sfumato.reports.evaluation import print_measured

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


def test_ranking_by_match_probability_takes_the_logits_of_the_run(work, sfumato, evaluate, tmp_path, capsys, flickr):
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
    small = [f"data.path={tmp_path}", "model.dim=4", "train.epochs=1", "train.batch_size=20"]
    small += ["model.image.channels=4", "model.image.graph_layers=1"]
    small += ["model.text.hidden=4", "model.text.width=4", "model.text.min_count=1"]
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
    plain = read_embedded_set(Files(f"{folder}/i.npy", f"{folder}/t.npy"), ground_truths)
    assert plain.text_ids == ground_truths[0].text_ids and plain.uncertainty() is None
    assert plain.images.dtype == plain.texts.dtype == np.float64  # float64 images and float32 texts meet in float64.
    files = Files(f"{folder}/i.npy", f"{folder}/shuffled.npy")
    named, wrong = replace(files, text_ids=folder / "shuffled.txt"), read_embedded_set(files, ground_truths)
    shuffled = read_embedded_set(named, ground_truths)
    assert measure(plain).figures == measure(shuffled).figures != measure(wrong).figures
    ids = plain.image_ids, plain.text_ids
    given = Embeddings(plain.images, plain.texts, distance="csd")
    assert measure(plain).figures == evaluated(given, *ids, ground_truths)
    np.save(folder / "half.npy", np.float16(np.load(folder / "i.npy")))
    found = read_embedded_set(Files(f"{folder}/half.npy", f"{folder}/t.npy"), ground_truths)
    assert found.images.dtype == np.float32, "half precision is widened"
    found = read_embedded_set(Files(f"{folder}/i.npy", f"{folder}/ours.safetensors"), ground_truths)
    assert found.text_ids != plain.text_ids and measure(found).figures != measure(plain).figures
    assert measure(found, "squared_l2").figures == measure(plain).figures
    expected = dict(zip(plain.text_ids, np.exp(np.load(folder / "t_log_var.npy")).sum(1), strict=True))
    assert found.uncertainty()["t2i"] == pytest.approx(expected, rel=1e-5)
    assert set(found.uncertainty()["i2t"].values()) == {0.0}


def test_lists_are_measured_as_they_are(folder, capsys):
    ground_truths = read_ground_truths(ground_truth=folder / "truth.json", metrics=["recall@1", "r_precision"])
    embedded = read_embedded_set(Files(f"{folder}/i.npy", f"{folder}/t.npy"), ground_truths)
    distance = torch.cdist(embedded.images.tensors().mean, embedded.texts.tensors().mean)
    images, texts = ground_truths[0].image_ids, ground_truths[0].text_ids
    i2t = {images[i]: [texts[j] for j in row[:3]] for i, row in enumerate(distance.argsort(1).tolist())}
    t2i = {texts[j]: [images[i] for i in row[:2]] for j, row in enumerate(distance.T.argsort(1).tolist())}
    (folder / "lists.json").write_text(json.dumps({"i2t": i2t, "t2i": t2i}))
    found = embedded_input.measure_lists(folder / "lists.json", Files(), ground_truths)
    assert found.figures == evaluated(Lists(i2t, t2i), images, texts, ground_truths)
    assert found.figures == measure(embedded, "squared_l2").figures and found.score == "lists"
    single = per_query_table(found.ranks)
    assert np.isnan(single["recall@10"]).all() and not np.isnan(single["r_precision"]).any()
    mixed = read_ground_truths(ground_truth=folder / "truth.json", metrics=["recall@1", "recall@5", "r_precision"])
    assert embedded_input.measure_lists(folder / "lists.json", Files(), mixed).figures == found.figures
    assert "without recall@5: truth, i2t: the list of" in capsys.readouterr().err
    (folder / "one.json").write_text(json.dumps({"t2i": t2i}))
    one = embedded_input.measure_lists(folder / "one.json", Files(), mixed)
    assert one.figures == {"truth": {"t2i": found.figures["truth"]["t2i"]}}
    print_measured(one, "one direction")
    assert "t2i" in (printed := capsys.readouterr().out) and "i2t" not in printed
    deeper = read_ground_truths(ground_truth=folder / "truth.json", metrics=["recall@5"])
    raises(ValueError, "recall@5 needs 5", embedded_input.measure_lists, folder / "lists.json", Files(), deeper)


def test_a_matrix_of_scores_is_the_ranking_by_it(folder, ground_truths, capsys):
    embedded = read_embedded_set(Files(f"{folder}/i.npy", f"{folder}/t.npy"), ground_truths)
    distance = torch.cdist(embedded.images.tensors().mean, embedded.texts.tensors().mean).square().numpy()
    expected = measure(embedded, "squared_l2").figures
    np.save(folder / "d.npy", distance)
    np.save(folder / "s.npy", np.float32(-distance))
    distances, similarities = Files(scores_are="distance"), Files(scores_are="similarity")
    of_rows = measure_scores(folder / "d.npy", distances, ground_truths)
    assert of_rows.figures == expected == measure_scores(folder / "s.npy", similarities, ground_truths).figures
    assert of_rows.to_json()["ids"] == {k: "in the order of the ground truth" for k in ("images", "texts")}
    assert not capsys.readouterr().err
    assert measure_scores(folder / "d.npy", similarities, ground_truths).figures != expected
    assert "are the scores a distance? --scores-are distance" in capsys.readouterr().err
    order = [ground_truths[0].text_ids.index(line) for line in (folder / "shuffled.txt").read_text().split()]
    np.save(folder / "shuffled.npy", distance[:, order])
    named = measure_scores(folder / "shuffled.npy", replace(distances, text_ids=folder / "shuffled.txt"), ground_truths)
    assert named.figures == expected and named.ids["texts"] == str(folder / "shuffled.txt")
    assert measure_scores(folder / "shuffled.npy", distances, ground_truths).figures != expected
    # Ties: the earlier item of the gallery is first, so only image 0, text 0 and text 1 are found at once.
    np.save(folder / "ties.npy", np.zeros((N, M), np.int8))
    tied = measure_scores(folder / "ties.npy", similarities, ground_truths).figures["truth"]
    assert (tied["i2t"]["recall@1"], tied["t2i"]["recall@1"]) == (1 / N, 2 / M)


@pytest.mark.parametrize(("scores", "kind", "message"), [
    (np.zeros((N, M)), None, "--scores-are similarity .larger is .* or --scores-are distance .* found nothing"),
    (np.zeros((N, M)), "cosine", "found 'cosine'"),
    (np.zeros((M, N)), "distance", "12 by 6, but .* 6 images .* expected 6 by 12.*texts by images: write it"),
    (np.zeros((N, M + 1)), "distance", "6 by 13, but .* 12 texts .* expected 6 by 12, images by texts$"),
    (np.full((N, M), np.nan), "distance", "the score of image 0 and text 0 is NaN"),
    (np.zeros(N), "distance", "shape .6,. .* expected a matrix of numbers, images by texts"),
    (np.array([["a"]]), "distance", "type <U1; expected a matrix of numbers"),
])  # fmt: skip
def test_matrices_that_cannot_be_ranked(folder, ground_truths, scores, kind, message):
    np.save(folder / "scores.npy", scores)
    raises(UserError, message, measure_scores, folder / "scores.npy", Files(scores_are=kind), ground_truths)


def test_a_matrix_has_the_options_of_a_ranking_alone(folder):
    np.save(folder / "d.npy", np.zeros((N, M)))
    wanted = {"scores": folder / "d.npy", "scores_are": "distance", "ground_truth": folder / "truth.json"}
    measured, embedded = measure_files(Files(**wanted), None, split="test")
    assert embedded is None and measured.score == "distance matrix"
    truth, both = {"ground_truth": folder / "truth.json"}, {"images": "a.npy", "texts": "b.npy"}
    own = {"images": f"{folder}/i.npy", "texts": f"{folder}/t.npy"}
    nothing, lists = "give a model, or --images and --texts, or --ranked", {"ranked": folder / "l.json"}
    for files, score, message in (
        (wanted, "csd", "ranked as it is; leave out --score"), (truth | lists, "csd", "leave out --score"),
        (wanted | lists, None, "or --scores; not several of them"), (wanted | both, None, "not several of them"),
        (wanted | {"scores": None}, None, "nothing to evaluate"),
        (truth | both | {"scores_are": "distance"}, None, "--scores-are belongs to a matrix of scores"),
        *((given, None, nothing) for given in ({}, {"images": "x.npy"}, {"texts": "x.npy"})),
        *((lists | given, None, nothing) for given in (both, {"images": "x.npy"})),
        (truth | own, "match_probability", "match_probability needs the logits of a model"),
    ):  # fmt: skip
        raises(UserError, message, measure_files, Files(**files), score, split="test")


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
    raises(UserError, counts, read_embedded_set, Files(f"{folder}/t.npy", f"{folder}/t.npy"), ground_truths)
    sizes = r"i.npy has 3 dimensions, .*wide.npy has 4"
    raises(ValueError, sizes, read_embedded_set, Files(f"{folder}/i.npy", f"{folder}/wide.npy"), ground_truths)
    found = read_ground_truths("coco", annotations=shared / "data" / "coco5k_text", metrics=["recall@1"])
    names = ["coco_5k", "coco_1k", "cxc", "rpc2", "rpc2_cxc", "cxc_1k", "rpc2_1k", "rpc2_cxc_1k", "eccv"]
    assert [t.name for t in found] == names and {t.metrics for t in found} == {("recall@1",)}
    message = "for --split val name Karpathy's file with --annotations dataset_coco.json"
    folder = shared / "data" / "coco5k_text"
    raises(UserError, message, read_ground_truths, "coco", annotations=folder, split="val")
    assert read_ground_truths("emoji", split="val")[0].name == "emoji"
