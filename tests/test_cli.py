"""Commands as a user meets them: exit status, files, JSON, and what a bad input prints."""

import json
import math
import os
import re
import shlex
import shutil

import numpy as np
import pytest
import safetensors.torch
import typer
from support.charts import undrawn
from support.raising import failing
from support.words import folded, too_wide

from sfumato import GaussianCollection, cli
from sfumato.files import available_cores
from sfumato.workflows.evaluation import trust_model


@pytest.fixture(scope="module")
def work(toy, tmp_path_factory):
    """A copy of the toy that tests may change: data, a recipe and a trained run."""
    folder = shutil.copytree(toy, tmp_path_factory.mktemp("cli") / "work")
    for recipe in (folder / "toy.toml", folder / "run" / "recipe.toml"):
        recipe.write_text(recipe.read_text().replace(str(toy), str(folder)))
    return folder


@pytest.fixture
def run(work, tmp_path):
    return shutil.copytree(work / "run", tmp_path / "run")


def helps(command, path=()):
    if commands := getattr(command, "commands", None):
        for name, below in commands.items():
            yield from helps(below, (*path, name))
    else:
        yield path, command


def test_help_fits_the_screen_and_all_of_it_can_be_had(sfumato):
    first, everything = sfumato.printed("--help"), sfumato.printed("--help-all")
    assert first.count("\n") <= 24 and not too_wide(first) and sfumato()[1] in ("", first)
    root = typer.main.get_command(cli.app)
    for out in (first, everything):
        assert set(re.findall(r"^(?:[a-z]+)? +([a-z]+)  ", out, re.MULTILINE)) == set(root.commands)
    for path, command in helps(root):
        options = [param for param in command.params if param.param_type_name == "option" and param.help]
        shown = sfumato(*path, "--help")[1]
        assert len(re.findall(r"^  -", shown, re.MULTILINE)) <= 15, path
        rare = [param for param in options if param.hidden]
        assert all(param.opts[0] + " " not in shown for param in rare)
        if rare:
            everything = sfumato(*path, "--help-all")[1]
            assert all(param.opts[0] in everything for param in options), path


def test_evaluate_prints_a_table_and_the_same_figures_of_an_export_and_a_recipe(work, sfumato, tmp_path):
    out = sfumato.printed("evaluate", "run", work / "run")
    rsum, meaning = "RSUM: sum of recall@1, @5 and @10 of both directions", "−1 is good"
    for words in ("image -> text", "recall@1", "by chance", rsum, "csd: closed-form sampled", meaning):
        assert words in folded(out)
    assert not too_wide(out, work)
    written = json.loads((work / "run" / "evaluation-test-csd.json").read_text())
    assert sfumato.json("evaluate", "run", work / "run") == written
    # Two captions for each image; two images of one shape and colour share theirs.
    assert (written["n_images"], written["n_texts"]) == (13, 24) and 0 <= written["i2t"]["recall@1"] <= 1
    assert sfumato.json("export", work / "run", tmp_path / "out")["bytes"] > 10_000
    data, of_run = ("--data", work / "toy.toml"), sfumato.json("evaluate", "run", work / "run")
    for model in ((work / "run",), (work / "run", *data), (tmp_path / "out", *data, "data.test_fraction=0.25")):
        assert sfumato.json("evaluate", "run", *model) == of_run
    more = sfumato.json("evaluate", "run", tmp_path / "out", *data, "data.val_fraction=0", "data.test_fraction=0.5")
    assert more["n_images"] > 1.5 * of_run["n_images"]
    shutil.copytree(work / "data", tmp_path / "elsewhere")
    assert sfumato.json("evaluate", "run", work / "run", f"data.path={tmp_path / 'elsewhere'}") == of_run


@pytest.mark.slow
def test_report_of_a_run_and_of_a_model_elsewhere(work, sfumato, tmp_path):
    result, page = sfumato.json("report", work / "run"), (work / "run" / "report-test.html").read_text()
    assert result["out"] == str(work / "run" / "report-test.html") and result["bytes"] == len(page.encode()) < 3_000_000
    assert result["evaluation"] == sfumato.json("evaluate", "run", work / "run")
    for shown in ("data:image/webp;base64,", "warmup_epochs", "before calibration"):
        assert shown in page
    out_file = tmp_path / "page.html"
    with undrawn():
        out = sfumato.printed("report", work / "run", "--split", "val", "--out", out_file)
        assert str(out_file) in out and "“val”" in out_file.read_text()
        sfumato("export", work / "run", tmp_path / "moved")
        data = "--data", work / "toy.toml", "data.test_fraction=0.25"
        moved = sfumato.json("report", tmp_path / "moved", *data, "--out", out_file)
        assert moved["evaluation"] == result["evaluation"]
        assert "moved on “test”" in out_file.read_text() and "warmup_epochs" not in out_file.read_text()


@pytest.fixture
def files(tmp_path):
    """Embeddings of three images and six texts of some other model, a truth and ranked lists."""
    random = np.random.default_rng(0)
    mean = random.normal(size=(3, 4)) * np.array([[1.0], [5.0], [0.3]])
    np.save(tmp_path / "i.npy", mean)
    np.save(tmp_path / "t.npy", np.repeat(mean, 2, 0) + random.normal(size=(6, 4)))
    (tmp_path / "truth.csv").write_text("image,text\n" + "".join(f"i{j // 2},t{j}\n" for j in range(6)))
    of_images = {f"i{i}": [f"t{j}" for j in range(5, -1, -1)] for i in range(3)}
    lists = {"i2t": of_images, "t2i": {f"t{j}": ["i1", "i0", "i2"] for j in range(6)}}
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    return tmp_path


def test_evaluate_embeddings_scores_and_ranked_lists_of_another_model(files, sfumato, tmp_path):
    truth = ("--truth", files / "truth.csv")
    embedded = ("evaluate", "files", "--images", files / "i.npy", "--texts", files / "t.npy", *truth)
    printed = folded(sfumato.printed(*embedded))
    for words in ("by csd", "truth RSUM", "closed-form sampled distance", "images 3, texts 6"):
        assert words in printed
    found = sfumato.json(*embedded, "--score", "dot", "--metrics", "recall@2,map@r")
    assert found["score"] == "dot"
    assert set(found["truths"]["truth"]["i2t"]) == {"recall@2", "map@r", "n_queries", "n_without_positives"}
    np.save(tmp_path / "scores.npy", np.load(files / "i.npy") @ np.load(files / "t.npy").T)
    scores = ("evaluate", "files", "--scores", tmp_path / "scores.npy", "--scores-are", "similarity", *truth)
    status, out, err = sfumato(*scores)
    assert status == 0 and "rows or columns" in err
    assert "rows: images, in the order of the ground truth; columns: texts" in folded(out)
    assert sfumato.json(*scores)["truths"]["truth"] == sfumato.json(*embedded, "--score", "dot")["truths"]["truth"]
    found = sfumato.json("evaluate", "files", "--ranked", files / "lists.json", *truth)["truths"]["truth"]
    # Images find t5 first, which is i2's; i1 finds its own at ranks 3 and 4, i0 at 5 and 6. Texts find i1 first.
    assert found["i2t"]["recall@1"] == pytest.approx(1 / 3) and found["i2t"]["median_rank"] == 3
    assert found["t2i"]["recall@1"] == pytest.approx(1 / 3) and found["t2i"]["mean_rank"] == 2


def test_trust_prints_tables_and_writes_json(work, sfumato, monkeypatch):
    monkeypatch.chdir(work)
    measured = {}  # Once for each way to print it.

    def once(model, data, split):
        return measured[split] if split in measured else measured.setdefault(split, trust_model(model, data, split))

    monkeypatch.setattr("sfumato.workflows.evaluation.trust_model", once)
    out = sfumato.printed("trust", "run")
    assert len(out.splitlines()) <= 12 and not too_wide(out, work)
    # A toy of three epochs ranks by chance, or has too few queries.
    assert "rely on nothing" in folded(out) or "too few to exclude" in folded(out)
    assert all(word in out for word in ("recall@1", "chance", "--details"))
    out = sfumato.printed("trust", work / "run", "--details")
    for word in ("Brier", "text -> image", "image -> text", "AUROC", "Are the probabilities of hits right?"):
        assert word in folded(out)
    words = {"nearest_mean": "distance of means", "match_entropy": "entropy, all items", "text_misses": "text misses"}
    for name, title in (words | {"misses": "misses in 10"}).items():
        assert re.search(rf"^{title} ", out, re.MULTILINE), "in words"
        assert f"[{name}]" in out, "with a legend"
    assert not too_wide(out, work)
    written = json.loads((work / "run" / "trust-test.json").read_text())
    assert sfumato.json("trust", work / "run") == written and set(written["directions"]) == {"t2i", "i2t"}
    assert any(0 < direction["recall"]["value"] < 1 for direction in written["directions"].values())
    for direction in written["directions"].values():
        level = {name: interval["value"] for name, interval in direction["precision"].items()}
        assert 0 <= level["true"] <= level["perfect"] <= 1 and 0 < level["chance"] < level["perfect"]
        some_wrong = {"wrong_auroc", "deciles"} if 0 < direction["recall"]["value"] < 1 else set()
        for name, figures in direction["estimators"].items():
            assert name in written["estimators"] and {"wrong_aurc", *some_wrong} <= set(figures)
            # Two captions for each picture: no multiplicity, but captions that agree or do not.
            assert "caption_distance" in figures and "multiplicity" not in figures


def test_a_collection_in_a_store_is_filled_searched_added_to_and_copied(work, sfumato, tmp_path):
    out, again, half = (tmp_path / name for name in ("collection", "again", "half"))
    every = [file.name for file in sorted((work / "data").glob("*.png"))]

    def index(names, folder, *options):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(work / "data" / name, folder)
        return sfumato.json("index", work / "run", "--images", folder, "--out", *options)

    assert index(every[:20], half, out, "--store", "file:")["n"] == 20 and (out / "store").exists()
    assert index(every[20:30], half / "more", out, "--add")["n"] == 30
    ids = {h["id"] for h in sfumato.json("search", out, "a red circle", "-k", 99, "--duplicates", "show")[0]["hits"]}
    assert ids == {*every[:20], *(f"more/{name}" for name in every[20:30])}
    shutil.rmtree(half / "more")
    assert index(every[20:], half, out, "--add")["n"] == 58, "those that were there are replaced"
    with GaussianCollection.open(out) as collection:
        assert collection.delete([f"more/{name}" for name in every[20:30]]) == 10
    sfumato.printed("copy", out, again, "--store", f"file:{tmp_path}/elsewhere?engine=flat")
    texts = "a red circle", "some bar in blue"
    assert sfumato.json("search", again, *texts) == sfumato.json("search", out, *texts)


def test_indices_of_images_and_of_texts_are_searched_in_words(work, sfumato, tmp_path):
    folder = tmp_path / "index"
    said = sfumato.printed("index", work / "run", "--images", work / "data", "--store", "file:", "--out", folder)
    assert "48 images in" in folded(said)
    words = folded(sfumato.printed("search", folder, "--image", work / "data" / "000.png", "-k", 3))
    assert "probabilities are not calibrated for such queries" in words and "000.png" in words
    assert "matches expected" not in words and "%" not in words and "right: a match" not in words
    words = folded(sfumato.printed("search", folder, "a red circle", "-k", 3))
    assert "matches expected" in words and "%" in words
    assert "right: a match, a pair like those that the data list" in words
    lines = tmp_path / "lines.txt"
    lines.write_text("a red circle\n\nsome bar in blue\na green square\n")
    out = tmp_path / "texts"
    said = folded(sfumato.printed("index", work / "run", "--texts", lines, "--out", out))
    assert "3 texts in" in said and "lines.txt:2: empty line" in said
    options = "--image", work / "data" / "000.png", "-k", 2, "--min-probability", 0
    [result] = sfumato.json("search", out, *options)
    assert result["calibrated"] and {h["id"] for h in result["hits"]} <= {"1", "3", "4"}
    assert {h["text"] for h in result["hits"]} <= set(lines.read_text().split("\n"))
    assert not sfumato.json("search", out, "a text")[0]["calibrated"]
    assert "works only with queries by image" in sfumato.refused("search", out, "a text", "--min-probability", 0.5)


def test_embeddings_and_queries_by_another_model_are_refused(work, run, sfumato, tmp_path):
    images, stored = ("--images", work / "data"), tmp_path / "stored"
    sfumato.printed("index", run, *images, "--out", stored)
    changed = shutil.copytree(run, tmp_path / "other")
    weights = changed / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    with safetensors.safe_open(weights, framework="pt") as file:
        about = file.metadata()
    name = next(n for n, t in tensors.items() if t.is_floating_point() and t.numel() > 1)
    safetensors.torch.save_file(tensors | {name: tensors[name] + 1}, weights, metadata=about)
    err = sfumato.refused("search", stored, "a red circle", "--run", changed)
    assert "was built with another model than" in err
    err = sfumato.refused("index", changed, *images, "--add", "--out", stored)
    assert "add only embeddings of the same kind by the same model" in err
    for url in (f"file:{stored}/store", "file:"):
        sfumato.printed("search", stored, "a red circle", "--store", url)


def test_calibrate_again_and_search_by_its_promises(work, run, sfumato, tmp_path):
    read = lambda: json.loads((run / "calibration.json").read_text())
    before, told, after = read(), sfumato.json("calibrate", run, "--split", "test"), read()
    assert told["split"] == after["about"]["split"] == "test" != before["about"]["split"]
    assert told["t2i"]["coverage"]["0.8"]["radius"] <= told["t2i"]["coverage"]["0.9"]["radius"]
    assert told["t2i"]["n_queries"] == len(after["t2i"]["closest_match"])
    words = folded(sfumato.printed("calibrate", run))
    assert all(word in words for word in ("text -> image", "all within distance", "coverage 90%"))
    assert read() == before, "the same as after training"
    sfumato.printed("index", run, "--images", work / "data", "--out", tmp_path / "index")
    asked = ("search", tmp_path / "index", "a red circle", "-k", 2, "--coverage", 0.8, "--min-probability", 0.001)
    [result] = sfumato.json(*asked)
    assert result["abstained"] is None and len(result["hits"]) <= 2
    assert max(hit["distance"] for hit in result["conformal_set"]) <= told["t2i"]["coverage"]["0.8"]["radius"] * 3
    assert len(result["conformal_set"]) >= len(result["hits"])
    assert "conformal set of the requested coverage:" in folded(sfumato.printed(*asked))


def test_no_confident_match_and_the_way_out_without_a_calibration(work, run, sfumato, tmp_path):
    calibration = json.loads((run / "calibration.json").read_text())
    near, far = [i / 1e6 for i in range(200)], [200.0] * 200
    calibration["t2i"] |= {"closest_match": [*near, *far], "farthest_match": [*near, *far], "group": []}
    calibration["t2i"]["closest_other"] = [*far, *[2e-4 + i / 1e6 for i in range(199)], 100.0]
    (run / "calibration.json").write_text(json.dumps(calibration))
    sfumato.printed("index", run, "--images", work / "data", "--out", tmp_path / "index")
    for risk, abstained in ((0.2, True), (0.6, False)):
        asked = ("search", tmp_path / "index", "a red circle", "--abstain", risk)
        assert sfumato.json(*asked)[0]["abstained"] is abstained
        assert ("No confident match: an answer would exceed the risk" in folded(sfumato.printed(*asked))) is abstained
    (run / "calibration.json").unlink()
    index = "index", run, "--images", work / "data", "--out", tmp_path / "plain"
    sfumato.printed(*index)
    err = sfumato.refused("search", tmp_path / "plain", "a red circle", "--coverage", "0.9")
    assert "sfumato calibrate RUN" in err and "build the index again" in err
    # A calibration without held-out queries has probabilities and no guarantees.
    plain = {"logit_scale": 2.0, "logit_bias": 1.0, "t2i": None, "i2t": None, "conditional": {}, "hits": {}}
    (run / "calibration.json").write_text(json.dumps(calibration | plain | {"reference": {}}))
    assert "holds a collection already; add to it with --add" in sfumato.refused(*index)
    shutil.rmtree(tmp_path / "plain")
    sfumato.printed(*index)
    hit = sfumato.json("search", tmp_path / "plain", "a red circle")[0]["hits"][0]
    assert hit["match_probability"] == pytest.approx(1 / (1 + math.exp(2 * hit["distance"] - 1)), rel=1e-4)
    err = sfumato.refused("search", tmp_path / "plain", "a red circle", "--abstain", "0.2")
    assert "no scores of held-out queries" in err and "sfumato calibrate RUN" in err
    (run / "calibration.json").write_text("{}")
    err = sfumato.refused("index", run, "--images", work / "data", "--out", tmp_path / "x")
    assert "calibration.json: " in err and "calibrate again" in err


BAD_INPUTS = {
    "train nowhere.toml": "no recipe 'nowhere.toml'",
    "train {recipe} train.device=abacus --out {tried}": "device 'abacus' is not available here",
    "train {recipe} data.path=nowhere --out {tried}": "there is no nowhere",
    "evaluate run {data}": "is not a run folder",
    "evaluate files": "give a model, or --images and --texts, or --ranked",
    "evaluate files --images x.npy --texts y.npy --benchmark emoji": "no embeddings at x.npy",
    "evaluate run {run} --per-query x.txt": "must be a .parquet or .csv file",
    "evaluate run {run} train.epochs=3": "'train.epochs=3' does not change the data of",
    "evaluate run {run} --split dev": "has no split 'dev'; it has",
    "report {run} --out {new}/page.html": "does not exist; create it first",
    "index {run} --images {data} --add --store file: --out {stored}": "leave --store out",
    "index {run} --images {data} --add --out {new}": "there is no collection in",
    "search {index} x": "index again: sfumato index RUN --images FOLDER --out NEW",
    "index {run} --images {data} --store file:?compress=int8 --out {new}": "has no option 'compress'",
    "index {run} --images {data} --split test --out {new}": "give one of --data FOLDER",
    "index {run} --out {new}": "give one of --data FOLDER",
    "index {data} --out {new}": "To index this folder of images: sfumato index --data ",
    "search {data}": "nothing to search for", "evaluate run {bare}": "tokenizer.json is missing",
}  # fmt: skip


def test_a_bad_input_is_one_clear_message_and_status_2(work, run, sfumato, tmp_path):
    places = {name: tmp_path / name for name in ("new", "tried", "stored", "index", "bare")}
    places |= {"recipe": work / "toy.toml", "run": run, "data": work / "data"}
    shutil.copytree(run, places["bare"])
    (places["bare"] / "tokenizer.json").unlink()
    sfumato.printed("index", run, "--images", work / "data", "--out", places["stored"])
    places["index"].mkdir()
    (places["index"] / "manifest.json").write_text('{"kind": "sfumato-index-1"}')
    wrong = []
    for line, message in BAD_INPUTS.items():
        err = sfumato.refused(*(word.format(**places) for word in shlex.split(line)))
        if message not in folded(err):
            wrong.append((line, err))
    assert not wrong and not places["new"].exists()


def test_threads_start_sensibly(tmp_path):
    limit, unlimited = tmp_path / "cpu.max", available_cores(tmp_path / "missing")
    for content, cores in (("max 100000", unlimited), ("100000 100000", 1), ("150000 100000", min(2, unlimited))):
        limit.write_text(content + "\n")
        assert available_cores(limit) == cores
    own, many = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}, os.cpu_count() or 1
    busy = {"OMP_NUM_THREADS": str(many - 1), "OMP_WAIT_POLICY": "PASSIVE"}
    for before, cores, busyness, after in (({}, many, 0.1, {}), ({}, many - 1, 9.0, busy), (dict(own), 1, 9.0, own)):
        cli.set_threads(before, cores, busyness)
        assert before == after


def test_recipes_interruptions_devices_and_frozen_models_are_told(sfumato, work, tmp_path, monkeypatch, run):
    figures = {"best_score": None, "epochs": 1, "parameters": 0, "run": "there", "calibrated": True}
    monkeypatch.setattr("sfumato.training.loop.fit", lambda *_: figures)
    words = folded(sfumato("train", work / "toy.toml", "--out", tmp_path / "run")[1])
    assert "nothing was trained" in words and "calibrated on validation pairs" in words and "0 parameters" not in words
    out = sfumato.printed("recipes")
    assert "emoji-demo" in out and not too_wide(out)
    assert 'name = "emoji-demo"' in folded(sfumato.printed("recipes", "emoji-demo"))
    monkeypatch.setenv("SFUMATO_DEVICE", "abacus")
    err = sfumato.refused("evaluate", "run", run)
    assert "device 'abacus' is not available here" in err and "SFUMATO_DEVICE=cpu" in err
    monkeypatch.setattr("sfumato.models.recipe.recipe_files", failing(KeyboardInterrupt()))
    status, out, err = sfumato("recipes")
    assert status == 130 and not out and "interrupted. No file is incomplete" in err
