"""`python -m papers analyse` on tiny runs: files, JSON, page, and messages where variances or items are missing."""

import io
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from reports.test_report import Checker
from support.charts import undrawn
from support.raising import failing, raises
from support.toy import make_toy
from support.words import folded

from papers.studies.analyse import AT_CHANCE, AnalysisOptions, analyse_model
from papers.studies.usual import MADE, choose_pairs, measure_sets, read_mixed_images
from papers.uncertainty.damage import IMAGE_CORRUPTIONS, TEXT_CORRUPTIONS
from sfumato.errors import UserError
from sfumato.models.embed import load_split
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_run
from sfumato.training.loop import fit

QUICK = ("--corrupted", 5, "--pairs", 4, "--bins", 3, "--bootstrap", 20, "--items", 10)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyse")
    recipe = make_toy(folder)
    fit(load_recipe(recipe, ["train.epochs=1"]), folder / "run")
    fit(load_recipe(recipe, ["train.epochs=1", "model.variance=false", "loss.beta=0"]), folder / "points")
    return folder


@pytest.fixture
def run(work, tmp_path):
    """A copy that a test may fill."""
    return shutil.copytree(work / "run", tmp_path / "run")


def test_all_studies_are_printed_written_and_drawn(run, papers):
    status, out, err = papers("analyse", run, *QUICK)
    assert status == 0
    said = "does damage raise total_variance?", "mixtures of two images, 4 pairs", "words of texts", "principal"
    assert not [words for words in said if words not in folded(out)]
    folder = run / "analysis-test"
    files = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("corruption", "sets", "words", "map")}
    assert all(f["split"] == "test" and f["model"] == "toy" and f["study"] == name for name, f in files.items())
    assert [len(files["words"]["sides"][side]) for side in ("image", "text")] == [3, 3]
    assert files["map"]["above_chance"] is False and AT_CHANCE in err  # One epoch.
    assert len(files["map"]["items"]) == 20 and files["sets"]["n"] == 4
    curves = files["corruption"]["sides"]
    assert list(curves["image"]) == ["erased", "blurred"]
    assert list(curves["text"]) == ["dropped_words", "unknown_words", "wrong_letters"]
    page = (folder / "analysis.html").read_text()
    checked = Checker(page)
    assert checked.tags.count("img") == 4 * 6 and checked.ids == ["corruption", "sets", "words", "map"]
    assert not re.search(r"https?://|\bNone\b|\bnan\b", re.sub(r'src="data:[^"]*"', "", page)) and len(page) < 300_000
    assert len(re.findall(r"<title>(?:A|B|M|C|A′|B′): ", page)) == 4 * 6
    assert len(re.findall(r"<title>(?:image of|text) “", page)) == 20

    printed = papers.json("analyse", run, *QUICK)
    again = {name: json.loads((folder / f"{name}.json").read_text()) for name in files}
    assert again == files and printed["out"] == str(folder)
    assert all(printed[name].items() <= files[name].items() for name in files)


@undrawn()
def test_queries_are_corrupted_as_stated(run, papers):
    """The same items at all strengths, embedded again; by hand at the greatest."""
    papers("analyse", run, "--only", "corruption", "--corrupted", 6, "--bootstrap", 0, "--seed", 4)
    found = json.loads((run / "analysis-test" / "corruption.json").read_text())["sides"]
    loaded = load_run(run)
    data = load_split(loaded.model, loaded.recipe.data, "test").data
    chosen = {n: np.sort(np.random.default_rng([4, 2]).permutation(n)[:6]) for n in (len(data.texts), len(data.images))}
    texts, images = chosen.values()
    letters, erased = TEXT_CORRUPTIONS["wrong_letters"], IMAGE_CORRUPTIONS["erased"]
    misspelt = [letters.apply(data.texts[i], 0.75, (4, int(i))) for i in texts]
    covered = [erased.apply(data.images[i].read_bytes(), 0.9, (4, int(i))) for i in images]
    for side, name, embedded in (
        ("text", "wrong_letters", loaded.model.embed_texts(misspelt)),
        ("image", "erased", loaded.model.embed_images(covered)),
    ):
        assert found[side][name]["n"] == 6
        assert found[side][name]["mean"][-1]["value"] == pytest.approx(float(embedded.total_variance.mean()), rel=1e-4)


@undrawn()
def test_the_other_picture_is_embedded_like_the_mixtures(run, papers):
    """As a PNG square of the mixtures' size, made here without the package's own decoder."""
    papers("analyse", run, *QUICK, "--only", "sets", "--seed", 1)
    found = json.loads((run / "analysis-test" / "sets.json").read_text())["mixes"]["other"]
    loaded = load_run(run)
    data = load_split(loaded.model, loaded.recipe.data, "test").data
    rows = choose_pairs(data.groups, 4, 1)
    made = [read_mixed_images(data.images, row, 1) for row in rows.tolist()]

    def other(prepare):
        parts = {name: loaded.model.embed_images([one[name] for one in made]) for name in MADE}
        parts["other"] = loaded.model.embed_images([prepare(data.images[i].read_bytes()) for i in rows[:, 2]])
        return {f: i["value"] for f, i in measure_sets(parts)["mixes"]["other"].items()}

    def square(content):
        file = io.BytesIO()
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        picture.resize((224, 224), Image.Resampling.BICUBIC).save(file, "PNG")
        return file.getvalue()

    expected = other(square)
    assert {f: i["value"] for f, i in found.items()} == pytest.approx(expected, rel=1e-5)
    # The files as they are give another figure.
    assert other(lambda content: content)["off_line"] != pytest.approx(expected["off_line"], rel=1e-4)


@undrawn()
def test_points_have_a_map_and_whatever_looks_at_the_gallery(work, papers, tmp_path):
    status, out, err = papers("analyse", work / "points", *QUICK, "--out", tmp_path / "found", "--json")
    plain, told = papers("analyse", work / "points", *QUICK, "--out", tmp_path / "again")[1:]
    assert (plain + told).count("sets is left out") == 1
    found = json.loads(out)
    assert status == 0 and "map" in found and not {"corruption", "sets", "words"} & set(found)
    assert len([n for n in found["notes"] if n != AT_CHANCE]) == 3 and "points" in err
    assert all(item["a"] == 0 for item in found["map"]["items"])
    options = "--only", "corruption,words", "--uncertainty", "top1_mismatch", "--out", tmp_path / "found"
    found = papers.json("analyse", work / "points", *QUICK, *options)
    assert found["corruption"]["uncertainty"] == found["words"]["uncertainty"] == "top1_mismatch"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{run}", "--uncertainty", "doubt"], "--uncertainty doubt: unknown; known: total_variance"),
        (["{run}", "--uncertainty", "text_misses"], "--uncertainty text_misses: unknown"),
        (["{run}", "--only", "words", "--bins", "100"], "too few for 100 bins"),
        (["{run}", "--pairs", "1"], "'--pairs': Input should be greater than or equal to 3"),
        (["{points}", "--only", "sets"], "are points, but set algebra needs variances"),
        (["{points}", "--only", "words"], "choose an --uncertainty that looks at the gallery: expected_matches"),
        (["{run}", "--split", "dev"], "has no split 'dev'"),
        (["{run}", "train.epochs=3"], "does not change the data of"),
        (["{data}"], "is not a run folder"),
        (["{run}", "--method", "tnse"], "--method tnse: unknown; known: pca, tsne"),
        (["{run}", "--corpus", "x"], "--corpus x: unknown; known: bin, split"),
        (["{run}", "--only", "map,algebra"], "unknown study 'algebra'; known: corruption, sets, words, map"),
    ],
)
def test_mistakes_are_one_line_and_status_two(work, papers, arguments, says):
    places = {name: work / name for name in ("run", "points", "data")}
    status, out, err = papers("analyse", *(a.format(**places) for a in arguments))
    assert status == 2 and out == "" and says in err and "Traceback" not in err
    assert not (work / "run" / "analysis-test").exists()


def test_too_few_items_are_refused_before_anything_is_embedded(run, papers, monkeypatch):
    monkeypatch.setattr("papers.studies.analyse.embed_split", failing(AssertionError("embedded")))
    err = papers.refused("analyse", run, "--only", "corruption,words", "--bins", "100")
    assert "too few for 100 bins of uncertainty; ask for fewer with --bins" in err
    loaded = load_run(run)
    for study, options, message in (
        ("sets", AnalysisOptions(n_pairs=2), "2 pairs of images are too few"),
        ("map", AnalysisOptions(n_mapped=1), "2 items are too few for a map, which needs 3; --items is 1"),
    ):
        given = loaded, loaded.recipe.data, "test"
        raises(UserError, message, analyse_model, *given, studies=[study], options=options)


@undrawn()
def test_the_page_keeps_earlier_studies_of_the_same_weights_and_split(run, papers):
    folder = run / "analysis-test"
    papers("analyse", run, *QUICK, "--only", "words", "--corpus", "split")
    before = (folder / "words.json").read_bytes()
    papers("analyse", run, *QUICK, "--only", "map")
    assert Checker((folder / "analysis.html").read_text()).ids == ["words", "map"]
    assert (folder / "words.json").read_bytes() == before and json.loads(before)["corpus"] == "split"
    # Another model's are left out.
    (folder / "words.json").write_text(before.decode().replace('"weights": "', '"weights": "0'))
    papers("analyse", run, *QUICK, "--only", "map")
    assert Checker((folder / "analysis.html").read_text()).ids == ["map"]


@undrawn()
def test_region_features_leave_what_needs_no_pictures(tmp_path, papers):
    data, words = tmp_path / "data", ("cat", "dog", "bus", "cup")
    data.mkdir()
    for name in ("train", "dev", "test"):
        regions = np.random.default_rng(len(name)).standard_normal((16, 3, 10))
        np.save(data / f"{name}_ims.npy", regions.astype(np.float32))
        lines = (f"a {words[k % 4]} and a {words[k // 4]}\n{words[k % 4]}, {words[k // 4]}\n" for k in range(16))
        (data / f"{name}_caps.txt").write_text("".join(lines))
    tiny = [
        "model.dim=8", "model.image.channels=10", "model.text.hidden=8", "model.text.width=6", "model.text.min_count=1",
        "train.epochs=1", "train.batch_size=8", "train.threads=1", "loss.sum_epochs=1", "model.init_total_variance=8",
    ]  # fmt: skip
    fit(load_recipe(find_recipe("flickr8k-probabilistic-vsrn"), [*tiny, f"data.path={data}"]), tmp_path / "run")
    status, out, err = papers("analyse", tmp_path / "run", *QUICK, "--json")
    found = json.loads(out)
    assert status == 0 and list(found["corruption"]["sides"]) == ["text"] and "sets" not in found
    assert {"words", "map"} <= set(found) and "this model reads region features" in err
    assert len([n for n in found["notes"] if n != AT_CHANCE]) == 2
    assert "set algebra needs image files" in papers.refused("analyse", tmp_path / "run", "--only", "sets")
    for number, (name, regions) in enumerate(zip(words[:2] * 2, np.load(data / "test_ims.npy")[:4], strict=True)):
        (tmp_path / "classes" / name).mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "classes" / name / f"{number}.npy", regions)
    chosen = "zeroshot", tmp_path / "run", f"zeroshot.images={tmp_path / 'classes'}", "--bootstrap", 0
    report = papers.json(*chosen, "--out", tmp_path / "out")["zeroshot"]["report"]
    assert report["n_images"] == 4 - report["n_chosen_on"] == 2
