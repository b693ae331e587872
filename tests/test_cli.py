"""Commands as a user meets them: exit status, files, JSON, and what a bad input prints."""

import json
import math
import os
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import typer
from support.charts import undrawn
from support.toy import make_toy
from support.words import folded, too_wide

from sfumato import cli, load, load_embeddings
from sfumato.cli.common import Verbs
from sfumato.errors import UserError, explain_os_error
from sfumato.search.collection import GaussianCollection
from sfumato.search.parts import read_parts


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with data, a recipe and a trained run."""
    folder = tmp_path_factory.mktemp("cli")
    recipe = make_toy(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["sfumato", "train", str(recipe), "train.epochs=2", "--out", str(folder / "run"), "--json"]
        )
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert not stop.value.code
    return folder


def helps(command, path=()):
    """The words of every command below one, with the command."""
    if commands := getattr(command, "commands", None):
        for name, below in commands.items():
            yield from helps(below, (*path, name))
    else:
        yield path, command


def test_help_fits_the_screen_and_all_of_it_can_be_had(sfumato):
    first, everything = (sfumato(*given)[1] for given in (["--help"], ["--help-all"]))
    assert first.count("\n") <= 24 and not too_wide(first) and sfumato()[1] in ("", first)
    studies = {"analyse"}
    root = typer.main.get_command(cli.app)
    for out, expected in ((first, set(root.commands) - studies), (everything, set(root.commands))):
        assert set(re.findall(r"^(?:[a-z]+)? +([a-z]+)  ", out, re.MULTILINE)) == expected
    for path, command in helps(root):
        options = [param for param in command.params if param.param_type_name == "option" and param.help]
        shown = sfumato(*path, "--help")[1]
        assert len(re.findall(r"^  -", shown, re.MULTILINE)) <= 15, path
        rare = [param for param in options if param.hidden]
        assert all(param.opts[0] + " " not in shown for param in rare)
        if rare:
            everything = sfumato(*path, "--help-all")[1]
            assert all(param.opts[0] in everything for param in options), path


def test_a_study_without_a_command_is_told(sfumato):
    for name in ("ablate", "crops", "toy", "zeroshot"):
        status, out, err = sfumato(name, "x", "--json")
        assert status == 2 and not out and folded(err).startswith(f"sfumato: {name} is a study of `sfumato ")


def test_evaluate_prints_a_table_and_writes_json(work, sfumato):
    status, out, _ = sfumato("evaluate", "run", work / "run")
    words = folded(out)
    assert status == 0 and "image -> text" in words and "recall@1" in words and "by chance" in words
    for meaning in ("RSUM: sum of recall@1, @5 and @10 of both directions", "csd: closed-form sampled", "−1 is good"):
        assert meaning in words
    assert not too_wide(out, work)
    written = json.loads((work / "run" / "evaluation-test-csd.json").read_text())
    status, out, _ = sfumato("evaluate", "run", work / "run", "--json")
    assert json.loads(out) == written
    # Two captions for each image; two images of one shape and colour share theirs.
    assert (written["n_images"], written["n_texts"]) == (13, 24) and 0 <= written["i2t"]["recall@1"] <= 1


def test_evaluate_without_a_verb_names_the_command_that_is_meant(work, files, sfumato, tmp_path):
    """One line and status 2; the command in it does what was meant, once its capitals are filled in."""
    assert sfumato("export", work / "run", tmp_path / "out")[0] == 0
    torch.save({"model": {}}, tmp_path / "released.pth")
    truth, data = ("--truth", files / "truth.csv"), ("--data", work / "toy.toml")
    embeddings = ("--images", files / "i.npy", "--texts", files / "t.npy")
    capitals = {"RECIPE": work / "toy.toml", "TEXTS": files / "t.npy", "TRUTH": files / "truth.csv"}
    both = tmp_path / "both"
    both.mkdir()
    shutil.copy(files / "i.npy", both / "image_vectors.npy")
    shutil.copy(files / "t.npy", both / "text_vectors.npy")
    moved = ("--images", both / "image_vectors.npy", "--texts", both / "text_vectors.npy")
    for given, meant in (
        ((work / "run", "--distance", "wasserstein2"), ("run", work / "run", "--distance", "wasserstein2")),
        (("--split", "val", "--json", work / "run"), ("run", "--split", "val", "--json", work / "run")),
        ((work / "run", *data), ("model", work / "run", *data)),
        ((tmp_path / "out",), ("model", tmp_path / "out", "--data", "RECIPE")),
        ((*data, tmp_path / "out"), ("model", *data, tmp_path / "out")),
        ((tmp_path / "released.pth",), ("model", tmp_path / "released.pth", "--data", "RECIPE")),
        (("openai/some-clip",), ("model", "openai/some-clip", "--data", "RECIPE")),
        (
            (files / "i.npy", "--score", "dot"),
            ("files", *embeddings[:2], "--texts", "TEXTS", "--truth", "TRUTH", "--score", "dot"),
        ),
        ((both,), ("files", *moved, "--truth", "TRUTH")),
        ((files / "lists.json",), ("files", "--ranked", files / "lists.json", "--truth", "TRUTH")),
        ((*embeddings, *truth), ("files", *embeddings, *truth)),
        (("rum", work / "run"), ("run", work / "run")),
    ):
        status, out, err = sfumato("evaluate", *given)
        assert status == 2 and not out and err.count("\n") == 1 and err.startswith("sfumato: "), err
        words = shlex.split(err.partition("sfumato evaluate ")[2])
        assert words == [str(word) for word in meant]
        if {"openai/some-clip", tmp_path / "released.pth"}.isdisjoint(given):
            status, out, _ = sfumato(
                "evaluate", *[capitals.get(word, word) for word in words if word != "--json"], "--json"
            )
            assert status == 0 and json.loads(out)["n_images"] > 0


def test_evaluate_of_nothing_names_all_three(work, sfumato, tmp_path):
    three = (
        "sfumato evaluate run RUN",
        "sfumato evaluate model MODEL --data RECIPE",
        "sfumato evaluate files --images",
    )
    (tmp_path / "empty").mkdir()
    assert sfumato("index", work / "run", "--split", "val", "--out", tmp_path / "index")[0] == 0
    for given, says in (
        ((), "say what to evaluate"),
        (("--json",), "say what to evaluate"),
        ((tmp_path / "empty",), "holds neither a run, nor a model, nor embeddings"),
        ((tmp_path / "index",), "is an index"),
        (("nowhere",), "nowhere is neither a file nor a folder"),
        (("emoji-demo",), "sfumato train emoji-demo --out RUN; then sfumato evaluate run RUN"),
        ((work / "toy.toml",), "is a recipe, which has to be trained first: sfumato train"),
        ((work / "run", "--images", "x.npy"), "--images is an option for embedding files"),
        (("--ranked", "x.json", "--data", "emoji-demo"), "--data needs a model"),
    ):
        status, out, err = sfumato("evaluate", *given)
        assert status == 2 and not out and err.count("\n") == 1 and says in err, err
        assert all(way in err for way in three) or "recipe" in err or "--" in str(given)
    status, out, _ = sfumato("evaluate", "--help")
    assert status == 0 and all(re.search(rf"^ +{verb} ", out, re.MULTILINE) for verb in ("run", "model", "files"))


def test_every_command_with_verbs_says_which_is_meant():
    groups = [group.typer_instance.info.cls for group in cli.app.registered_groups]
    assert groups and all(issubclass(group, Verbs) for group in groups)
    plain = typer.Typer(cls=Verbs)
    for verb in ("one", "two"):
        plain.command(verb)(lambda: None)
    command = typer.main.get_command(plain)
    for given, says in (
        ([], "write sfumato both VERB, where VERB is one of one, two"),
        (["a b"], "write sfumato both VERB 'a b', where VERB is one of one, two"),
        (["tow", "x"], "unknown 'tow'; did you mean: sfumato both two x"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            command.make_context("both", given)


def test_a_run_and_the_recipe_of_its_data_give_the_same_figures(work, sfumato):
    """MODEL alone, and with --data: trust and evaluate resolve both in one way."""
    quick = ("--bootstrap", 5, "--corrupted", 0, "--json")
    reports = [
        json.loads(sfumato("trust", work / "run", *data, *quick)[1]) for data in ((), ("--data", work / "toy.toml"))
    ]
    assert reports[0] == reports[1]
    evaluations = [
        json.loads(sfumato("evaluate", *arguments, "--json")[1])
        for arguments in (
            ("run", work / "run"),
            ("model", work / "run"),
            ("model", work / "run", "--data", work / "toy.toml"),
        )
    ]
    assert evaluations[0] == evaluations[1] == evaluations[2]


def test_evaluate_by_another_distance(work, sfumato):
    status, out, _ = sfumato("evaluate", "run", work / "run", "--split", "val", "--distance", "wasserstein2", "--json")
    assert status == 0 and json.loads(out)["distance"] == "wasserstein2"
    assert (work / "run" / "evaluation-val-wasserstein2.json").exists()


def test_report_of_a_run_and_of_a_model_elsewhere(work, sfumato, tmp_path):
    """The page is in its place, agrees with evaluate, and shows the run's recipe, curves and other evaluations."""
    assert sfumato("evaluate", "run", work / "run", "--distance", "squared_l2", "--json")[0] == 0
    status, out, _ = sfumato("report", work / "run", "--json")
    result = json.loads(out)
    page = (work / "run" / "report-test.html").read_text()
    assert status == 0 and result["out"] == str(work / "run" / "report-test.html")
    assert result["bytes"] == len(page.encode()) < 3_000_000
    assert result["evaluation"] == json.loads(sfumato("evaluate", "run", work / "run", "--json")[1])
    for shown in ("data:image/webp;base64,", "squared_l2", "training loss", "warmup_epochs", "before calibration"):
        assert shown in page
    out_file = tmp_path / "page.html"
    with undrawn():
        status, out, _ = sfumato("report", work / "run", "--split", "val", "--out", out_file)
        assert status == 0 and str(out_file) in out and "“val”" in out_file.read_text()
        sfumato("export", work / "run", tmp_path / "moved")
        arguments = "--data", work / "toy.toml", "data.test_fraction=0.25", "--out", out_file, "--json"
        status, out, _ = sfumato("report", tmp_path / "moved", *arguments)
        assert status == 0 and json.loads(out)["evaluation"] == result["evaluation"]
        assert "moved on “test”" in out_file.read_text() and "training loss" not in out_file.read_text()
        status, out, _ = sfumato("report", work / "run", "--uncertainty", "log_det", "--out", out_file, "--json")
        assert status == 0 and json.loads(out)["evaluation"]["uncertainty_measure"] == "log_det"
        status, _, err = sfumato("report", work / "run", "--uncertainty", "entropy")
        assert status == 2 and "known: total_variance, geometric_std, log_det" in err


@undrawn()
def test_report_and_trust_give_first_hits_one_calibration_error(work, sfumato, tmp_path):
    report = json.loads(sfumato("report", work / "run", "--out", tmp_path / "page.html", "--json")[1])["calibration"]
    trust = json.loads(sfumato("trust", work / "run", "--bootstrap", 0, "--json")[1])["hits"]["served"]
    first = [hits for hits in trust if hits["hits"] == 1]
    assert {hits["direction"] for hits in first} == {"t2i", "i2t"}
    for hits in first:
        mine = report[hits["direction"]]
        assert mine["n"] == hits["n"] and mine["matches"] == pytest.approx(hits["rate"])
        assert mine["after"]["ece"] == pytest.approx(hits["ece"], abs=1e-6) and hits["ece"] > 0
        assert mine["after"]["ece_of_perfect"] == pytest.approx(hits["ece_by_chance"], abs=1e-6)
    model = load(work / "run")
    for hits in first:
        assert model.reliability(direction=hits["direction"]).ece == pytest.approx(hits["ece"], abs=1e-6)


def test_a_run_is_evaluated_where_its_data_are_now(work, sfumato, tmp_path):
    (work / "data").rename(work / "elsewhere")
    try:
        assert sfumato("evaluate", "run", work / "run", "--json")[0] == 2
        status, out, err = sfumato("evaluate", "run", work / "run", f"data.path={work / 'elsewhere'}", "--json")
        assert status == 0, err
    finally:
        (work / "elsewhere").rename(work / "data")
    assert json.loads(out)["i2t"] == json.loads(sfumato("evaluate", "run", work / "run", "--json")[1])["i2t"]


def test_report_says_what_is_wrong(work, sfumato, tmp_path):
    for arguments, expected in (
        ((tmp_path,), "is not a run folder"),
        ((work / "run", "--split", "none"), "has no split 'none'"),
        ((work / "run", "data.path=x"), "there is no x"),
        ((work / "run", "--out", tmp_path / "missing" / "page.html"), "does not exist; create it first"),
    ):
        status, out, err = sfumato("report", *arguments)
        assert status == 2 and not out and expected in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_evaluate_a_run_with_everything_beside(work, sfumato, tmp_path):
    pytest.importorskip("faiss", reason="the extra faiss is not installed")
    plain = json.loads(sfumato("evaluate", "run", work / "run", "--json")[1])
    table = tmp_path / "q.csv"
    status, out, _ = sfumato("evaluate", "run", work / "run", "--per-query", table, "--json")
    result = json.loads(out)
    assert status == 0 and result.pop("per_query") == str(table) and result == plain
    assert len(table.read_text().splitlines()) == 1 + plain["n_images"] + plain["n_texts"]
    status, out, _ = sfumato("evaluate", "run", work / "run", "--strategies", "all", "--engine", "exact", "--json")
    strategies = json.loads(out)["strategies"]
    assert list(strategies) == ["mean", "wasserstein2", "csd", "faiss_mean", "faiss_rerank", "faiss_lifted"]
    for direction in ("i2t", "t2i"):
        csd, lifted = (strategies[name]["truths"]["test"][direction] for name in ("csd", "faiss_lifted"))
        assert csd["map@r"] == plain[direction]["map@r"] == lifted["map@r"] and "mean_rank" not in lifted
    other = ["evaluate", "run", work / "run", "--distance", "squared_l2", "--json", "--compare"]
    by_file, by_run = (json.loads(sfumato(*other, with_what)[1])["comparison"] for with_what in (table, work / "run"))
    means = json.loads(sfumato("evaluate", "run", work / "run", "--distance", "squared_l2", "--json")[1])
    for d in by_file["differences"]:
        assert d["first"] == pytest.approx(plain[d["direction"]][d["metric"]])
        assert d["second"] == pytest.approx(means[d["direction"]][d["metric"]])
    # A run is ranked by the distance that is asked for, as this one is.
    assert all(d["difference"] == 0 for d in by_run["differences"])
    status, out, _ = sfumato("evaluate", "run", work / "run", "--strategies", "csd,faiss_mean", "--engine", "exact")
    assert status == 0 and "FAISS (mean only)" in folded(out) and "image -> text" in folded(out)
    status, out, _ = sfumato("evaluate", "run", work / "run", "--compare", table)
    assert status == 0 and "compared with" in folded(out) and "+0.00" in out


@pytest.fixture
def files(tmp_path):
    """Embeddings of three images and six texts of some other model, a truth and ranked lists."""
    random = np.random.default_rng(0)
    mean = random.normal(size=(3, 4)) * np.array([[1.0], [5.0], [0.3]])
    np.save(tmp_path / "i.npy", mean)
    np.save(tmp_path / "t.npy", np.repeat(mean, 2, 0) + random.normal(size=(6, 4)))
    (tmp_path / "truth.csv").write_text("image,text\n" + "".join(f"i{j // 2},t{j}\n" for j in range(6)))
    lists = {
        "i2t": {f"i{i}": [f"t{j}" for j in range(5, -1, -1)] for i in range(3)},
        "t2i": {f"t{j}": ["i1", "i0", "i2"] for j in range(6)},
    }
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    return tmp_path


def test_evaluate_embeddings_of_another_model(files, sfumato):
    arguments = [
        "evaluate",
        "files",
        "--images",
        files / "i.npy",
        "--texts",
        files / "t.npy",
        "--truth",
        files / "truth.csv",
    ]
    images, texts = np.load(files / "i.npy"), np.load(files / "t.npy")
    lengths = [np.linalg.norm(x, axis=1) for x in (images, texts)]
    scores = {
        "dot": images @ texts.T,
        "cosine": images @ texts.T / lengths[0][:, None] / lengths[1],
        "csd": -((images[:, None] - texts) ** 2).sum(2),
    }
    recalls = []
    for score, expected in scores.items():
        status, out, _ = sfumato(*arguments, "--score", score, "--json")
        found = json.loads(out)
        assert status == 0 and (found["score"], found["n_images"], found["n_texts"]) == (score, 3, 6)
        hits = {"i2t": expected.argmax(1) // 2 == [0, 1, 2], "t2i": expected.argmax(0) == [0, 0, 1, 1, 2, 2]}
        recalls.append([found["truths"]["truth"][direction]["recall@1"] for direction in hits])
        assert recalls[-1] == [np.mean(hit) for hit in hits.values()]
    assert len({tuple(r) for r in recalls}) == 3, "the three scores must be told apart"
    status, out, _ = sfumato(*arguments)
    assert status == 0
    for words in ("by csd", "truth RSUM", "closed-form sampled distance", "images 3, texts 6"):
        assert words in folded(out)
    status, out, _ = sfumato(*arguments, "--metrics", "recall@2,map@r", "--json")
    assert set(json.loads(out)["truths"]["truth"]["i2t"]) == {"recall@2", "map@r", "n_queries", "n_without_positives"}


def test_evaluate_ranked_lists(files, sfumato):
    status, out, _ = sfumato(
        "evaluate", "files", "--ranked", files / "lists.json", "--truth", files / "truth.csv", "--json"
    )
    found = json.loads(out)["truths"]["truth"]
    assert status == 0
    # Images find t5 first, which is i2's; i1 finds its own at ranks 3 and 4, i0 at 5 and 6. Texts find i1 first.
    assert found["i2t"]["recall@1"] == pytest.approx(1 / 3) and found["i2t"]["median_rank"] == 3
    assert found["t2i"]["recall@1"] == pytest.approx(1 / 3) and found["t2i"]["mean_rank"] == 2
    lists = json.loads((files / "lists.json").read_text())
    lists["i2t"]["i0"] = lists["i2t"]["i0"][:3]
    (files / "lists.json").write_text(json.dumps(lists))
    status, out, err = sfumato("evaluate", "files", "--ranked", files / "lists.json", "--truth", files / "truth.csv")
    assert status == 2 and "too short" in err and out == ""


def test_every_official_figure_from_the_command_line(shared, sfumato, tmp_path):
    """The official package's values on its parity embeddings, to the last digits, by the plain dot product."""
    fixture, coco = shared / "parity" / "eccv_metrics", shared / "data" / "coco5k_text"
    official = json.loads(fixture.with_suffix(".json").read_text())["metrics_full_ranking"]
    captions = np.load(coco / "coco_test_ids.npy").tolist()
    own = {int(c): v[0] for c, v in json.loads((coco / "original_caption_to_image.json").read_text()).items()}
    images = list(dict.fromkeys(own[c] for c in captions))
    (tmp_path / "images.txt").write_text("".join(f"{i}\n" for i in images))
    status, out, _ = sfumato(
        "evaluate", "files", "--images", f"{fixture}.safetensors:image_embeddings",
        "--image-ids", tmp_path / "images.txt",
        "--texts", f"{fixture}.safetensors:caption_embeddings", "--text-ids", coco / "coco_test_ids.npy",
        "--benchmark", "coco", "--annotations", coco, "--score", "dot", "--published", "--json",
    )  # fmt: skip
    found = json.loads(out)
    names = {"r1": "recall@1", "r5": "recall@5", "r10": "recall@10", "map_at_r": "map@r", "rprecision": "r_precision"}
    checked = 0
    for name, values in official.items():
        ground_truth, _, metric = name.partition("_") if not name.startswith("coco") else (name[:7], "", name[8:])
        for direction, value in values.items():
            ours = found["truths"][ground_truth][direction][names[metric]]
            assert ours == pytest.approx(value, abs=1e-12), (name, direction)
            checked += 1
    assert status == 0 and checked == 2 * len(official) >= 28
    own_figures = found["published"]["own"]
    assert own_figures["eccv map@r"] == pytest.approx(50 * sum(official["eccv_map_at_r"].values()))
    assert own_figures["rsum"] == pytest.approx(
        100 * sum(v for k in (1, 5, 10) for v in official[f"coco_1k_r{k}"].values())
    )
    assert {(row["paper"], row["table"]) for row in found["published"]["rows"]} == {
        ("PCME++", "1"), ("PCME", "E.4"), ("PCME", "E.5"), ("PVSE++", "1"), ("PVSE++", "2")
    }  # fmt: skip
    assert own_figures["i2t coco_5k recall@1"] == pytest.approx(100 * official["coco_5k_r1"]["i2t"])


def test_evaluate_over_several_seeds(work, sfumato, tmp_path):
    runs = [work / "run", tmp_path / "other"]
    assert sfumato("train", work / "toy.toml", "train.epochs=1", "train.seed=7", "--out", runs[1])[0] == 0
    alone = [json.loads(sfumato("evaluate", "run", run, "--json")[1])["rsum"] * 100 for run in runs]
    status, out, _ = sfumato("evaluate", "run", runs[0], "--seeds", runs[1], "--json")
    rsum = json.loads(out)["rsum"]
    assert status == 0 and rsum["values"] == pytest.approx(alone)
    assert rsum["mean"] == pytest.approx(sum(alone) / 2)
    assert rsum["deviation"] == pytest.approx(abs(alone[0] - alone[1]) / 2**0.5)
    status, out, _ = sfumato("evaluate", "run", runs[0], "--seeds", runs[1])
    assert status == 0 and "csd, test, 2 runs" in folded(out) and " ± " in folded(out)
    status, _, err = sfumato("evaluate", "run", runs[0], "--seeds", runs[1], "--published")
    assert status == 2 and "--seeds needs runs on their own data" in err


def test_evaluate_on_the_data_of_a_recipe(work, sfumato, tmp_path):
    """A run, and the same model exported and moved away from its data, give the same figures."""
    status, out, _ = sfumato("evaluate", "run", work / "run", "--json")
    of_run = json.loads(out)
    status, out, _ = sfumato("export", work / "run", tmp_path / "out", "--json")
    assert status == 0 and json.loads(out)["bytes"] > 10_000
    assert {"model.safetensors", "config.json", "README.md", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }
    status, out, _ = sfumato(
        "evaluate", "model", tmp_path / "out", "--data", work / "toy.toml", "data.test_fraction=0.25", "--json"
    )
    assert status == 0 and json.loads(out) == of_run
    status, out, _ = sfumato(
        "evaluate",
        "model",
        tmp_path / "out",
        "--data",
        work / "toy.toml",
        "data.val_fraction=0",
        "data.test_fraction=0.5",
        "--json",
    )
    assert status == 0 and json.loads(out)["n_images"] > 1.5 * of_run["n_images"]


def test_exported_models_embed_index_and_search(work, sfumato, tmp_path):
    out, pictures = tmp_path / "out", work / "data"
    assert sfumato("export", work / "run", out)[0] == 0
    for model, name in ((work / "run", "run"), (out, "out")):
        assert sfumato("embed", model, "--images", pictures, "--out", tmp_path / f"{name}.safetensors")[0] == 0
    a, b = (load_embeddings(tmp_path / f"{name}.safetensors") for name in ("run", "out"))
    assert a[1] == b[1] and a[0].mean.equal(b[0].mean) and a[0].log_var.equal(b[0].log_var)
    assert sfumato("index", out, "--images", pictures, "--out", tmp_path / "index")[0] == 0
    status, printed, _ = sfumato("search", tmp_path / "index", "a red circle", "-k", 3, "--json")
    assert status == 0 and len(json.loads(printed)[0]["hits"]) == 3


def test_trust_prints_tables_and_writes_json(work, sfumato, monkeypatch):
    monkeypatch.chdir(work)
    status, out, _ = sfumato("trust", "run", "--bootstrap", 10)
    assert status == 0 and len(out.splitlines()) <= 12 and "erased" not in out
    written = json.loads((work / "run" / "trust-test.json").read_text())
    assert written["directions"]["t2i"]["corruptions"] == {}, "embedding them is what takes the time"
    # A toy of three epochs ranks by chance, or has too few queries.
    assert "rely on nothing" in folded(out) or "too few to exclude" in folded(out)
    for word in ("recall@1", "chance", "--details"):
        assert word in out
    assert not too_wide(out, work)
    status, out, _ = sfumato("trust", work / "run", "--bootstrap", 10, "--corrupted", 4, "--details")
    assert status == 0
    shown = ("Brier", "text -> image", "image -> text", "expected_matches", "AUROC", "erased", "dropped words")
    for word in (*shown, "rises", "calibration error"):
        assert word in folded(out)
    for name, title in (("knn_distance", "distance to 10 items"), ("match_entropy_top10", "entropy, 10 nearest")):
        assert re.search(rf"^{title} ", out, re.MULTILINE), "in words"
        assert out.count(name) == 1 and f"[{name}]" in out, "with a legend"
    assert not too_wide(out, work)
    written = json.loads((work / "run" / "trust-test.json").read_text())
    status, out, _ = sfumato("trust", work / "run", "--bootstrap", 10, "--corrupted", 4, "--json")
    assert json.loads(out) == written and set(written["directions"]) == {"t2i", "i2t"}
    assert set(written["directions"]["t2i"]["corruptions"]) == {"dropped_words", "unknown_words", "wrong_letters"}
    for direction in written["directions"].values():
        for name, figures in direction["estimators"].items():
            assert name in written["estimators"] and {"wrong_auroc", "wrong_aurc", "deciles"} <= set(figures)
            for interval in figures.values():
                # None if a resample has no query, or only queries, that found something.
                assert interval["low"] is None or interval["low"] <= interval["high"]
            # Two captions for each picture: no multiplicity, but captions that agree or do not.
            assert "caption_distance" in figures and "multiplicity" not in figures
    quick = ("--queries", "text", "--bootstrap", 10, "--corrupted", 4, "--json")
    status, out, _ = sfumato("trust", work / "run", "--seed", 1, *quick)
    other = json.loads(out)["directions"]["t2i"]
    assert other["recall"]["value"] == written["directions"]["t2i"]["recall"]["value"]
    assert other["corruptions"] != written["directions"]["t2i"]["corruptions"]


def test_trust_of_one_side_without_corruptions_on_the_data_of_a_recipe(work, sfumato, tmp_path):
    assert sfumato("export", work / "run", tmp_path / "out")[0] == 0
    quick = ("--queries", "text", "--bootstrap", 5, "--corrupted", 0, "--json")
    reports = [
        json.loads(sfumato("trust", *model, *quick)[1])
        for model in ((work / "run",), (tmp_path / "out", "--data", work / "toy.toml"))
    ]
    assert reports[0] == reports[1] and list(reports[0]["directions"]) == ["t2i"]
    assert reports[0]["directions"]["t2i"]["corruptions"] == {}
    status, out, _ = sfumato("trust", work / "run", "--split", "val", *quick)
    found = json.loads(out)
    assert status == 0 and (work / "run" / "trust-val.json").exists()
    assert (
        "predicted_miss" not in found["estimators"] and "fitted on val, the split that is measured" in found["notes"][0]
    )


def test_embed_images_and_texts(work, sfumato):
    (work / "data" / "broken.png").write_bytes(b"no")
    status, out, _ = sfumato(
        "embed", work / "run", "--images", work / "data", "--out", work / "images.safetensors", "--json"
    )
    result = json.loads(out)
    assert status == 0 and result["n"] == 48 and result["d"] == 16 and result["problems"] == 1
    (work / "data" / "broken.png").unlink()
    embeddings, ids = load_embeddings(work / "images.safetensors")
    assert embeddings.n == 48 and ids[0] == "000.png"
    (work / "lines.txt").write_text("a red circle\n\nsome bar in blue\n")
    status, out, _ = sfumato("embed", work / "run", "--texts", work / "lines.txt", "--out", work / "texts.safetensors")
    assert status == 0 and "2 embeddings of 16 dimensions" in folded(out) and "lines.txt:2: empty line" in folded(out)
    assert load_embeddings(work / "texts.safetensors")[1] == ["1", "3"]


def test_embed_into_a_folder_by_two_jobs(work, sfumato, tmp_path, monkeypatch):
    """One job by --shard, the other as torchrun starts it; together they hold what one file holds."""
    assert sfumato("embed", work / "run", "--images", work / "data", "--out", tmp_path / "one.safetensors")[0] == 0
    expected, ids = load_embeddings(tmp_path / "one.safetensors")
    arguments = "embed", work / "run", "--images", work / "data", "--out", tmp_path / "parts", "--part-size", 9
    status, out, _ = sfumato(*arguments, "--shard", "0/2", "--workers", 1, "--batch", 5, "--json")
    result = json.loads(out)
    assert status == 0 and (result["job"], result["of"], result["n"], result["parts"]) == (0, 2, 27, 3)
    assert result["per_second"] > 0
    with pytest.raises(UserError, match="3 of 6 parts or more are missing: part-000001 of job 1/2, part-000003 of job"):
        read_parts(tmp_path / "parts")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, out, _ = sfumato(*arguments)
    words = folded(out)
    assert status == 0 and "job 1/2: 21 embeddings in 3 parts, 21 of them new" in words and "a second" in words
    parts = list(read_parts(tmp_path / "parts"))
    assert [i for part in parts for i in part[0]] == ids
    torch.testing.assert_close(torch.cat([part[1].mean for part in parts]), expected.mean)
    monkeypatch.undo()
    status, out, _ = sfumato(*arguments)
    words = folded(out)
    assert status == 0 and "job 0/1: 48 embeddings in 6 parts, 0 of them new" in words and "a second" not in words


def test_embed_says_what_it_cannot_do(work, sfumato, tmp_path):
    assert sfumato("embed", work / "run", "--images", work / "data", "--out", tmp_path / "parts")[0] == 0
    (tmp_path / "lines.txt").write_text("a red circle\n")
    for arguments, expected in (
        (("--out", tmp_path / "parts"), "give one of --images FOLDER, --manifest FILE, --shards PATTERN and --texts"),
        (("--images", work / "data", "--texts", "x", "--out", tmp_path / "parts"), "give one of --images FOLDER"),
        (("--texts", tmp_path / "lines.txt", "--out", tmp_path / "parts"), "other data, 48 items of the folder"),
        (("--images", work / "data", "--out", tmp_path / "parts", "--part-size", 7), "with --part-size 4096"),
        (("--images", work / "data", "--out", tmp_path / "parts", "--shard", "2/2"), "expected I/N with I from 0 to N"),
        (("--shards", "no-{0..1}.tar", "--out", tmp_path / "parts"), "2 of 2 do not exist"),
        (("--manifest", "no.jsonl", "--out", tmp_path / "parts"), "there is no manifest no.jsonl"),
        (
            ("--manifest", "no.jsonl", "--out", tmp_path / "x.safetensors"),
            "is one file, which takes only --images FOLDER",
        ),
    ):
        status, out, err = sfumato("embed", work / "run", *arguments)
        assert status == 2 and not out and expected in err and "Traceback" not in err


@pytest.mark.parametrize("engine", ["exact", "hnsw", "ivf"])
def test_index_and_search(work, sfumato, engine):
    if engine != "exact":
        pytest.importorskip("faiss", reason="the extra faiss is not installed")
    folder = work / f"index-{engine}"
    status, out, _ = sfumato("index", work / "run", "--images", work / "data", "--engine", engine, "--out", folder)
    assert status == 0 and "48 images indexed" in folded(out)
    status, out, _ = sfumato("search", folder, "a red circle", "some bar in blue", "-k", 5, "--json")
    results = json.loads(out)
    assert [r["query"] for r in results] == ["a red circle", "some bar in blue"]
    for result in results:
        distances = [hit["distance"] for hit in result["hits"]]
        assert distances == sorted(distances) and len(distances) == 5
        assert all(0 <= hit["match_probability"] <= 1 and hit["uncertainty"] > 0 for hit in result["hits"])
        assert result["uncertainty"] > 0 and result["expected_matches"] > 0
    status, out, _ = sfumato("search", folder, "--image", work / "data" / "000.png", "-k", 3)
    words = folded(out)
    assert status == 0 and "probabilities are not calibrated for such queries" in words and "000.png" in words
    assert "matches expected" not in words and "%" not in words and "right: a match" not in words
    status, out, _ = sfumato("search", folder, "a red circle", "-k", 3)
    words = folded(out)
    assert status == 0 and "matches expected" in words and "%" in words
    assert "right: a match, a pair like those that the data list" in words


def test_a_collection_in_a_store_is_filled_searched_added_to_and_copied(work, sfumato, tmp_path):
    out, again = tmp_path / "collection", tmp_path / "again"
    pictures, half = work / "data", tmp_path / "half"
    half.mkdir()
    every = sorted(pictures.glob("*.png"))
    for file in every[:20]:
        shutil.copy(file, half)
    status, said, _ = sfumato("index", work / "run", "--images", half, "--store", "file:", "--out", out)
    assert status == 0 and "20 images in " in folded(said) and "collection/store" in said
    (half / "more").mkdir()
    for file in every[20:30]:
        shutil.copy(file, half / "more")
    status, said, _ = sfumato("index", work / "run", "--images", half / "more", "--add", "--out", out, "--json")
    assert status == 0 and json.loads(said)["n"] == 30
    ids = {h["id"] for h in json.loads(sfumato("search", out, "a red circle", "-k", 99, "--json")[1])[0]["hits"]}
    assert ids == {f.name for f in every[:20]} | {f"more/{f.name}" for f in every[20:30]}
    shutil.rmtree(half / "more")
    for file in every[20:]:
        shutil.copy(file, half)
    status, said, _ = sfumato("index", work / "run", "--images", half, "--add", "--out", out, "--json")
    assert status == 0 and json.loads(said)["n"] == 58, "those that were there are replaced"
    status, _, err = sfumato("index", work / "run", "--images", pictures, "--add", "--out", out)
    assert status == 2 and "could not be shown; move them below that folder" in folded(err)
    with GaussianCollection.open(out) as collection:
        assert collection.delete([f"more/{f.name}" for f in every[20:30]]) == 10
    assert sfumato("index", work / "run", "--images", pictures, "--out", tmp_path / "plain")[0] == 0
    assert sfumato("copy", out, again, "--store", f"file:{tmp_path}/elsewhere?engine=flat")[0] == 0
    assert sfumato("copy", tmp_path / "plain", tmp_path / "from-index")[0] == 0
    asked = ("a red circle", "some bar in blue", "-k", 5, "--json")
    answers = [
        json.loads(sfumato("search", f, *asked)[1]) for f in (tmp_path / "plain", out, again, tmp_path / "from-index")
    ]
    for other in answers[1:]:
        for a, b in zip(answers[0], other, strict=True):
            assert [h["id"] for h in a["hits"]] == [h["id"] for h in b["hits"]]
            assert a["expected_matches"] == pytest.approx(b["expected_matches"], rel=1e-3)
            for x, y in zip(a["hits"], b["hits"], strict=True):
                assert x["match_probability"] == pytest.approx(y["match_probability"], rel=1e-3)
    for arguments, message in (
        (("--images", half, "--store", "file:", "--out", out), "holds a collection already; add to it with --add"),
        (
            ("--images", half, "--add", "--out", tmp_path / "plain"),
            "there is no collection in",
        ),
        (("--images", half, "--add", "--store", "file:", "--out", out), "leave --store out"),
        (("--images", half, "--engine", "hnsw", "--store", "file:", "--out", tmp_path / "x"), "leave --engine out"),
        (("--images", half, "--store", "mongodb://h/x", "--out", tmp_path / "x"), "unknown kind 'mongodb'"),
        (("--images", half, "--split", "test", "--out", tmp_path / "x"), "give one of --images"),
    ):
        status, said, err = sfumato("index", work / "run", *arguments)
        assert status == 2 and message in err and not said and not (tmp_path / "x").exists()
    status, _, err = sfumato("search", tmp_path / "plain", "x", "--store", "file:elsewhere")
    assert status == 2 and "without a store; leave --store out" in err


def test_an_index_of_texts_is_searched_by_picture(work, sfumato, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("a red circle\n\nsome bar in blue\na green square\n")
    for out, store in ((tmp_path / "texts", ()), (tmp_path / "stored", ("--store", "file:"))):
        status, said, _ = sfumato("index", work / "run", "--texts", lines, "--out", out, *store)
        assert status == 0 and "3 texts in" in folded(said) and "lines.txt:2: empty line" in folded(said)
        picture = work / "data" / "000.png"
        status, said, _ = sfumato("search", out, "--image", picture, "-k", 2, "--min-probability", 0, "--json")
        [result] = json.loads(said)
        assert (
            status == 0
            and result["calibrated"]
            and {h["text"] for h in result["hits"]} <= set(lines.read_text().split("\n"))
        )
        assert {h["id"] for h in result["hits"]} <= {"1", "3", "4"}
        assert not json.loads(sfumato("search", out, "a text", "--json")[1])[0]["calibrated"]
        status, _, err = sfumato("search", out, "a text", "--min-probability", 0.5)
        assert status == 2 and "works only with queries by image" in err


def test_what_embed_has_written_is_indexed_part_by_part(work, sfumato, tmp_path):
    parts = tmp_path / "parts"
    assert sfumato("embed", work / "run", "--images", work / "data", "--out", parts, "--part-size", 16)[0] == 0
    assert sfumato("index", work / "run", "--embeddings", parts, "--out", tmp_path / "index")[0] == 0
    assert (
        sfumato("index", work / "run", "--embeddings", parts, "--out", tmp_path / "stored", "--store", "file:")[0] == 0
    )
    assert sfumato("index", work / "run", "--images", work / "data", "--out", tmp_path / "plain")[0] == 0
    found = [
        json.loads(sfumato("search", tmp_path / f, "a red circle", "--json")[1])[0]
        for f in ("plain", "index", "stored")
    ]
    assert (
        [h["id"] for h in found[0]["hits"]]
        == [h["id"] for h in found[1]["hits"]]
        == [h["id"] for h in found[2]["hits"]]
    )
    changed = tmp_path / "other"
    shutil.copytree(work / "run", changed)
    weights = changed / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    with safetensors.safe_open(weights, framework="pt") as file:
        about = file.metadata()
    name = next(n for n, t in tensors.items() if t.is_floating_point() and t.numel() > 1)
    safetensors.torch.save_file(tensors | {name: tensors[name] + 1}, weights, metadata=about)
    status, _, err = sfumato("index", changed, "--embeddings", parts, "--out", tmp_path / "x")
    assert status == 2 and "holds embeddings by another model" in err
    for folder in ("plain", "stored"):
        status, said, err = sfumato("search", tmp_path / folder, "a red circle", "--run", changed)
        assert status == 2 and "was built with another model than" in err and not said
    status, _, err = sfumato("index", changed, "--images", work / "data", "--add", "--out", tmp_path / "stored")
    assert status == 2 and "add only embeddings of the same kind by the same model" in err
    assert sfumato("search", tmp_path / "stored", "a red circle", "--store", f"file:{tmp_path}/stored/store")[0] == 0
    assert sfumato("search", tmp_path / "stored", "a red circle", "--store", "file:")[0] == 0


def test_calibrate_again_and_search_by_its_promises(work, sfumato, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(work / "run", run)
    before = json.loads((run / "calibration.json").read_text())
    status, out, _ = sfumato("calibrate", run, "--split", "test", "--json")
    told, after = json.loads(out), json.loads((run / "calibration.json").read_text())
    assert status == 0 and told["split"] == after["about"]["split"] == "test" != before["about"]["split"]
    assert told["t2i"]["coverage"]["0.8"]["radius"] <= told["t2i"]["coverage"]["0.9"]["radius"]
    assert told["t2i"]["n_queries"] == len(after["t2i"]["closest_match"])
    status, out, _ = sfumato("calibrate", run)
    words = folded(out)
    assert status == 0 and "text -> image" in words and "all within distance" in words and "coverage 90%" in words
    assert json.loads((run / "calibration.json").read_text()) == before, "the same as after training"
    assert sfumato("index", run, "--images", work / "data", "--out", tmp_path / "index")[0] == 0
    asked = ("search", tmp_path / "index", "a red circle", "-k", 2, "--coverage", 0.8, "--min-probability", 0.001)
    status, out, _ = sfumato(*asked, "--json")
    [result] = json.loads(out)
    assert status == 0 and result["abstained"] is None and len(result["hits"]) <= 2
    radius = max(hit["distance"] for hit in result["conformal_set"])
    assert radius <= told["t2i"]["coverage"]["0.8"]["radius"] * 3
    assert len(result["conformal_set"]) >= len(result["hits"])
    status, out, _ = sfumato(*asked)
    assert status == 0 and "conformal set of the requested coverage:" in folded(out)
    for asked, message in (
        (["a red circle", "--abstain", "0.0001"], "no limit has a risk of at most 0.0001"),
        (["a red circle", "--coverage", "90"], "coverage must be between 0 and 1, got 90"),
        (["--image", work / "data" / "000.png", "--coverage", "0.9"], "works only with queries by text"),
    ):
        status, out, err = sfumato("search", tmp_path / "index", *asked)
        assert status == 2 and message in err and out == ""


def test_no_confident_match(work, sfumato, tmp_path):
    """Held-out queries that were right when something was very close, and wrong beyond; one was far from everything."""
    run = tmp_path / "run"
    shutil.copytree(work / "run", run)
    calibration = json.loads((run / "calibration.json").read_text())
    near, far = [i / 1e6 for i in range(200)], [200.0] * 200
    calibration["t2i"] |= {"closest_match": [*near, *far], "farthest_match": [*near, *far]}
    calibration["t2i"]["group"] = []
    calibration["t2i"]["closest_other"] = [*far, *[2e-4 + i / 1e6 for i in range(199)], 100.0]
    (run / "calibration.json").write_text(json.dumps(calibration))
    assert sfumato("index", run, "--images", work / "data", "--out", tmp_path / "index")[0] == 0
    for risk, abstained in ((0.2, True), (0.6, False)):
        status, out, _ = sfumato("search", tmp_path / "index", "a red circle", "--abstain", risk, "--json")
        assert status == 0 and json.loads(out)[0]["abstained"] is abstained
        status, out, _ = sfumato("search", tmp_path / "index", "a red circle", "--abstain", risk)
        assert status == 0 and ("No confident match: an answer would exceed the risk" in folded(out)) is abstained


def test_without_a_calibration_the_way_out_is_named(work, sfumato, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(work / "run", run)
    (run / "calibration.json").unlink()
    assert sfumato("index", run, "--images", work / "data", "--out", tmp_path / "index")[0] == 0
    status, _, err = sfumato("search", tmp_path / "index", "a red circle", "--coverage", "0.9")
    assert status == 2 and "sfumato calibrate RUN" in err and "build the index again" in err
    # A calibration without held-out queries has probabilities and no guarantees.
    plain = {"logit_scale": 2.0, "logit_bias": 1.0, "t2i": None, "i2t": None, "conditional": {}, "hits": {}}
    values = json.loads((work / "run" / "calibration.json").read_text()) | plain | {"reference": {}}
    (run / "calibration.json").write_text(json.dumps(values))
    again = "index", run, "--images", work / "data", "--out", tmp_path / "index"
    status, _, err = sfumato(*again)
    assert status == 2 and "holds an index already; replace it with --force" in err
    assert sfumato(*again, "--force")[0] == 0
    status, out, _ = sfumato("search", tmp_path / "index", "a red circle", "--json")
    hit = json.loads(out)[0]["hits"][0]
    assert hit["match_probability"] == pytest.approx(1 / (1 + math.exp(2 * hit["distance"] - 1)), rel=1e-4)
    status, _, err = sfumato("search", tmp_path / "index", "a red circle", "--abstain", "0.2")
    assert status == 2 and "no scores of held-out queries" in err and "sfumato calibrate RUN" in err
    (run / "calibration.json").write_text("{}")
    status, _, err = sfumato("embed", run, "--images", work / "data", "--out", tmp_path / "x.safetensors")
    assert status == 2 and "calibration.json: " in err and "calibrate again" in err


def test_index_of_a_split(work, sfumato):
    status, out, _ = sfumato("index", work / "run", "--split", "val", "--out", work / "index-val", "--json")
    assert status == 0 and json.loads(out)["n"] > 0


def test_recipes_are_listed_and_shown(sfumato):
    status, out, _ = sfumato("recipes")
    assert status == 0 and "emoji-demo" in out and not too_wide(out)
    status, out, _ = sfumato("recipes", "emoji-demo")
    assert status == 0 and 'name = "emoji-demo"' in folded(out)


def test_who_interrupts_is_told_what_is_left(sfumato, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sfumato.models.recipe.recipe_files", interrupted)
    status, out, err = sfumato("recipes")
    assert status == 130 and not out and "interrupted. No file is incomplete" in err


BAD_INPUTS = [
    (["train", "nowhere.toml"], "no recipe 'nowhere.toml'"),
    (["train", "{recipe}", "train.epoch=3"], "unknown key 'train.epoch'; did you mean 'train.epochs'?"),
    (["train", "{recipe}", "train.epochs=no"], "with its overrides: train.epochs"),
    (["train", "{recipe}", "loss.name=daaa"], "loss.name: unknown 'daaa'; did you mean 'daa'?"),
    (["train", "{recipe}", "model.text.kind=9"], "known: clip, embeddings, frozen, gru, small"),
    (["train", "flickr8k-daas"], "did you mean 'flickr8k-daa'?"),
    (["train", "{recipe}", "train.device=abacus", "--out", "{new}"], "device 'abacus' is not available here"),
    (["train", "{recipe}", "data.path=nowhere", "--out", "{new}2"], "there is no nowhere"),
    (["evaluate", "run", "{data}"], "is not a run folder"),
    (["evaluate", "files"], "give a model, or --images and --texts, or --ranked"),
    (["evaluate", "files", "--images", "x.npy", "--texts", "y.npy"], "either --truth FILE or --benchmark NAME"),
    (
        ["evaluate", "files", "--images", "x.npy", "--texts", "y.npy", "--benchmark", "emoji"],
        "no embeddings at x.npy",
    ),
    (["evaluate", "files", "--ranked", "x.json", "--benchmark", "cocoa"], "unknown benchmark 'cocoa'"),
    (
        ["evaluate", "files", "--ranked", "x.json", "--benchmark", "emoji", "--compare", "{run}"],
        "with a file of single queries, .parquet",
    ),
    (["evaluate", "run", "{run}", "--strategies", "fiass"], "unknown strategy 'fiass'; known: all, pcme, mean"),
    (["evaluate", "run", "{run}", "--strategies", "all", "--per-query", "x.csv"], "name at most one strategy"),
    (["evaluate", "run", "{run}", "--per-query", "x.txt"], "must be a .parquet or .csv file"),
    (["evaluate", "run", "{run}", "--compare", "x.csv"], "no results of single queries at x.csv"),
    (["evaluate", "run", "{run}", "--compare", "{data}"], "neither a run folder nor a file of single queries"),
    (["evaluate", "run", "{run}", "--published"], "no published table has figures of test"),
    (
        ["evaluate", "run", "{run}", "train.epochs=3"],
        "'train.epochs=3' does not change the data of",
    ),
    (["evaluate", "run", "{run}", "--device", "abacus"], "'abacus' is not available"),
    (["evaluate", "model", "{data}"], "is not a run folder"),
    (
        ["evaluate", "model", "{run}", "train.epochs=3"],
        "'train.epochs=3' does not change the data of",
    ),
    (["trust", "{data}"], "is not a run folder"),
    (
        ["trust", "{run}", "train.epochs=3"],
        "'train.epochs=3' does not change the data of",
    ),
    (["trust", "{run}", "--split", "dev"], "has no split 'dev'; it has"),
    (["trust", "{run}", "--queries", "sounds"], "queries must be one of text, image, both, got 'sounds'"),
    (["export", "{data}", "{new}4"], "is not a run folder"),
    (["export", "{run}", "{data}"], "exists already; give a new or empty folder"),
    (["evaluate", "run", "{run}", "--split", "dev"], "has no split 'dev'; it has"),
    (["evaluate", "run", "{run}", "--distance", "cds"], "did you mean 'csd'?"),
    (["embed", "{run}", "--out", "x.safetensors"], "which takes only --images FOLDER or --texts FILE"),
    (["embed", "{run}", "--images", "nowhere", "--out", "x.safetensors"], "there is no folder nowhere"),
    (["index", "{run}", "--split", "val", "--engine", "magic", "--out", "{new}3"], "unknown engine 'magic'"),
    (["search", "{data}", "x"], "holds neither an index nor a collection"),
    (["search", "{data}"], "nothing to search for"),
    (["search", "{data}", "x", " "], "a text to search for is empty"),
    (["calibrate", "{data}"], "is not a run folder"),
    (["calibrate", "{run}", "--method", "magic"], "unknown method 'magic'; known: platt, isotonic"),
    (["calibrate", "{run}", "--split", "dev"], "has no split 'dev'"),
    (["recipes", "nothing"], "no recipe 'nothing'"),
]


def test_a_bad_input_is_one_clear_message_and_status_2(work, sfumato):
    places = {"recipe": work / "toy.toml", "run": work / "run", "data": work / "data", "new": work / "new"}
    wrong = []
    for arguments, message in BAD_INPUTS:
        status, out, err = sfumato(*[a.format(**places) for a in arguments])
        if not (
            status == 2 and message in err and out == "" and err.startswith("sfumato: ") and "Traceback" not in err
        ):
            wrong.append((arguments, status, out, err))
    assert not wrong


def test_a_damaged_run_is_told(work, sfumato, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    for file in (work / "run").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:100])
    status, _, err = sfumato("evaluate", "run", copy)
    assert status == 2 and "damaged" in err
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in sfumato("evaluate", "run", copy)[2]


def test_threads_start_sensibly(tmp_path):
    """A container's limit counts, a busy machine gets threads that wait passively, and what is set stays."""
    limit = tmp_path / "cpu.max"
    unlimited = cli.available_cores(tmp_path / "missing")
    for content, cores in (("max 100000", unlimited), ("100000 100000", 1), ("150000 100000", min(2, unlimited))):
        limit.write_text(content + "\n")
        assert cli.available_cores(limit) == cores
    free, busy, own = {}, {}, {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    many = os.cpu_count() or 1
    cli.set_threads(free, many, 0.1)
    cli.set_threads(busy, many - 1, 9.0)
    cli.set_threads(own, many - 1, 9.0)
    assert free == {} and busy == {"OMP_NUM_THREADS": str(many - 1), "OMP_WAIT_POLICY": "PASSIVE"}
    assert own == {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}


def test_a_message_of_ours_about_a_full_disk_keeps_its_path():
    message = "here/index: the disk is full; free some space, then run the same command again"
    assert explain_os_error(UserError(message)) == message
    assert explain_os_error(OSError(28, "No space left on device", "a/b")).startswith("a/b: the disk is full")


def test_a_model_without_parameters_is_not_called_trained(sfumato, work, tmp_path, monkeypatch):
    """A frozen model that is used as it is: `train` says that nothing was trained, and whether it is calibrated."""
    figures = {"best_score": None, "epochs": 1, "parameters": 0, "run": "there", "calibrated": True}
    monkeypatch.setattr("sfumato.training.loop.fit", lambda *_: figures)
    words = folded(sfumato("train", work / "toy.toml", "--out", tmp_path / "run")[1])
    assert "nothing was trained" in words and "calibrated on validation pairs" in words
    assert "0 parameters" not in words
