"""A folder of images, one command, nothing to train: index --data, --add, delete, by the model of the package."""

import json
import math
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from support.pictures import write_tar
from support.scripts import ROOT
from support.tiny_models import tiny_clip
from support.words import folded

from sfumato import GaussianCollection, GaussianEmbedding, load, load_index
from sfumato.data import photographs
from sfumato.models import run
from sfumato.models.run import PACKAGED, SMALL
from sfumato.search import searcher
from sfumato.search.answer import SearchOptions, TextQuery
from sfumato.search.folder import is_unfinished
from sfumato.search.searcher import with_facts
from sfumato.search.stores.protocol import parse_where
from sfumato.workflows import own_folder
from sfumato.workflows.index import calibrate_by_captions

pytestmark = pytest.mark.usefixtures("windows")  # What is open is in use.
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


def test_a_folder_is_indexed_searched_grows_and_shrinks(sfumato, tmp_path, pictures, monkeypatch):
    (tmp_path / "small").mkdir()  # A folder of the model's name is another thing.
    monkeypatch.chdir(tmp_path)
    out, more = tmp_path / "mine", draw(tmp_path / "else" / "holiday", "yellow", "orange")
    made = sfumato.json("index", "--data", pictures, "--out", out)
    assert made["n"] == 6 and made["problems"] == 1
    (found,) = sfumato.json("search", out, "a plain red picture", "-k", 6, "--duplicates", "show")
    assert {hit["id"] for hit in found["hits"]} == {*(f"{c}.png" for c in COLOURS), "inner/red.png"}
    assert found["calibrated"] and 0 <= found["expected_matches"] <= 6
    assert not any("duplicates" in hit for hit in found["hits"])
    (folded,) = sfumato.json("search", out, "red")
    (same,) = (hit for hit in folded["hits"] if hit.get("duplicates"))
    assert {same["id"], *same["duplicates"]} == {"red.png", "inner/red.png"} and len(folded["hits"]) == 5
    assert "  +1 nearly the same" in sfumato("search", out, "red")[1]
    for n, said in ((25, None), (40, None), (150, "The model reads only the beginning of this text")):
        (found,) = sfumato.json("search", out, " ".join(["red"] * n))
        assert (found["warning"] or "None").startswith(str(said)), n
    assert "no parts of a probability here" in sfumato("search", out, "--id", "red.png", "--why")[1]
    Image.new("RGB", (400, 300), "red").save(pictures / "inner" / "red.png")  # The larger stands for both.
    sfumato.json("index", "--data", pictures / "inner", "--add", "--out", out)
    (larger,) = (hit for hit in sfumato.json("search", out, "red")[0]["hits"] if hit.get("duplicates"))
    assert (larger["id"], larger["duplicates"]) == ("inner/red.png", ["red.png"])
    assert 1 / larger["match_probability"] == pytest.approx(1 + math.exp(-sum(larger["why"].values())), rel=1e-6)
    assert sfumato.json("index", "--data", more, "--add", "--out", out)["n"] == 8
    assert sfumato.json("index", "--data", more, "--add", "--out", out)["n"] == 8
    assert sfumato.json("index", "--data", draw(pictures / "inner", "pink"), "--add", "--out", out)["n"] == 9
    index = load_index(out)
    hits = {hit.id: hit for hit in index.search("yellow", 9)}
    for folder, name in (("holiday", "yellow"), ("inner", "pink")):
        assert hits[f"{folder}/{name}.png"].payload["folder"] == folder
    assert all(index.image_of(hit) is not None for hit in hits.values())
    index.gallery.close()
    status, gone, _ = sfumato("delete", out, "red.png", "holiday/orange.png", "nothing.png", "--json")
    assert status == 2 and json.loads(gone) == {"deleted": 2, "unknown": ["nothing.png"]}
    status, gone, said = sfumato("delete", out, "INNER/*", "inner/*k.png", "inner/re[d].png", "--json")
    assert (status, json.loads(gone)) == (2, {"deleted": 1, "unknown": ["INNER/*", "inner/re[d].png"]})
    assert "inner/*k.png: 1 item fits" in said and (pictures / "red.png").exists()
    (found,) = sfumato.json("search", out, "red", "-k", 9)
    assert len(found["hits"]) == 6 and "red.png" not in {hit["id"] for hit in found["hits"]}


def test_what_is_excluded_is_counted_kept_for_later_and_taken_back(sfumato, tmp_path):
    folder, out = draw(tmp_path / "photos", *COLOURS), tmp_path / "mine"
    for inner in ("private/deep", "old/thumbs", "old/e\u0301te"):
        draw(folder / inner, "red")
    (folder / "private" / ".nomedia").touch()
    excluded = "--exclude", "thumbs", "--exclude", "bl*", "--exclude", "*.gif"
    printed = folded(sfumato.printed("index", "--data", folder, "--out", out, *excluded))
    told = "4 images excluded: ", "thumbs 1", "bl* 2", "*.gif 0", ".nomedia 1"
    assert all(part in printed for part in told) and "hidden" not in printed
    inside = {"red.png", "green.png", "white.png", "old/e\u0301te/red.png"}
    assert ids(out).keys() == inside
    draw(folder / "later" / "thumbs", "pink")
    done = sfumato.json("index", "--sync", "--out", out, "--exclude", "old/\u00e9te")
    assert (done["n"], done["deleted"], done["excluded"]) == (3, 1, 6) and ids(out).keys() < inside
    assert sfumato.json("index", "--data", folder / "later", "--add", "--out", out)["n"] == 3
    (folder / "private" / ".nomedia").unlink()
    assert sfumato.json("index", "--sync", "--out", out, "--exclude", "")["n"] == 9
    assert "go" in sfumato.refused("index", "--images", folder, "--out", tmp_path / "a", "--exclude", "x")
    draw(draw(folder / "in [1]", "red") / "deep" / "skip", "red")
    assert sfumato.json("index", "--data", folder / "in [1]", "--add", "--exclude", "skip", "--out", out)["n"] == 10
    (folder / ".nomedia").touch()
    for command in (("index", "--data", folder), ("train", "own-pictures", f"data.path={folder}")):
        assert "11 images excluded: .nomedia 11" in sfumato(*command, "--out", tmp_path / command[0])[2]


def test_a_search_is_filtered_and_misspelt_words_and_scripts_are_said(sfumato, tmp_path, pictures, monkeypatch):
    monkeypatch.setattr(searcher, "e5", lambda: None)
    own = draw(tmp_path / "pictures", *COLOURS)
    draw(own / "inner", "red")
    index = load(SMALL).index(own)
    index.gallery.payload["path"] = index.gallery.ids
    index.save(tmp_path / "mine")
    names = sfumato.json("search", tmp_path / "mine", "red", "--where", "path>=c", "--where", "path<red")
    assert {hit["id"] for hit in names[0]["hits"]} == {"green.png", "inner/red.png"}
    printed = folded(sfumato.printed("search", tmp_path / "mine", "red", "--where", "place=Paris"))
    assert "no item has a field 'place'; the fields are path" in printed
    assert "probability" not in printed.partition("matches expected")[2].partition("right:")[0]
    for words, message in (
        (("--where", "beach"), "expected FIELD=VALUE"),
        (("--where", "date>=may"), "expected a date"),
        (("--where", "path=red.png", "--coverage", 0.9), "leave out the filter"),
    ):
        assert message in sfumato.refused("search", tmp_path / "mine", "red", *words)
    (plain,) = index.search_items(["red.png"], 9, SearchOptions(filter=parse_where(["path<h"])))
    assert {hit.id for hit in plain} == {hit.id for hit in index.search("red", 9, where=["path<h"])}
    index = load(SMALL).index(pictures)
    index.gallery.payload["captions"] = ("a plain orange square",) * len(index)
    index.save(tmp_path / "misspelt")
    asked = "search", tmp_path / "misspelt", "an ornage sqaure", "dog", "собака в снегу"
    printed, answers = sfumato.printed(*asked), sfumato.json(*asked)
    assert printed.count("did you mean: an orange square") == 1
    assert printed.count("hardly any words in Cyrillic script") == 1
    assert [one["suggestion"] for one in answers] == ["an orange square", None, None]
    assert [one["warning"] is None for one in answers] == [True, True, False]
    assert "understand 'no': give what should not be seen as --without" in index.search("a square, no circle").warning
    assert answers[0]["query"] == "an ornage sqaure" and index.search("красный").warning == answers[2]["warning"]


def test_what_cannot_be_done_is_said(sfumato, tmp_path, pictures):
    (tmp_path / "manifest.json").touch()
    for words, message in (
        (("index", "--data", tmp_path / "none", "--out", tmp_path / "a"), "there is no folder"),
        (("index", "--data", pictures / "notes.txt", "--out", tmp_path / "a"), "notes.txt is a file"),
        (("index", "--data", pictures, "--images", pictures, "--out", tmp_path / "a"), "give one of"),
        (("index", "--data", pictures, "--add", "--out", tmp_path / "a"), "there is no collection"),
        (("index", "--sync", "--out", tmp_path / "a"), "there is no collection"),
        (("index", "--sync", "--data", pictures, "--out", tmp_path / "a"), "give one of"),
        (("delete", pictures, "red.png"), "holds no collection"),
        (("search", tmp_path, "red", "--order", "distances"), "order must be fits or distance, got 'distances'"),
        (("search", tmp_path, "red", "--target", "listed", "--order", "fits"), "--target listed orders by distance"),
        (("search", tmp_path, "red", "--duplicates", "hide"), "duplicates must be show or fold, got 'hide'"),
    ):
        assert message in sfumato.refused(*words)


def ids(folder):
    with GaussianCollection.open(folder, unfinished=True) as collection:
        return {i: p for records in collection.store.scan() for i, p in zip(records.ids, records.payloads, strict=True)}


@pytest.mark.slow
def test_a_collection_follows_its_files(sfumato, tmp_path):
    folder, out = draw(tmp_path / "photos", *COLOURS), tmp_path / "mine"
    (folder / "red.txt").write_text("a strawberry jam\n")
    (folder / "blue.txt").write_bytes(b"\xff\xfe broken")
    made = sfumato.json("index", "--data", folder, "--out", out)
    assert (made["n"], made["new"], made["with_texts"], made["problems"]) == (5, 5, 1, 1)
    fits, closest, listed = (
        sfumato.json("search", out, "black strawberries", "-k", 5, *more)[0]
        for more in ((), ("--order", "distance"), ("--target", "listed"))
    )
    assert fits["target"] == "fits" and fits["hits"][0]["best_text"] == "a strawberry jam"
    assert not [name for name in fits["hits"][0] if name.startswith("_")]
    by_id = lambda one: {hit["id"]: hit["match_probability"] for hit in one["hits"]}
    assert [*by_id(closest)] == [*by_id(listed)] != [*by_id(fits)] and by_id(fits) == by_id(closest) != by_id(listed)
    before = ids(out)
    (folder / "later").mkdir()
    (folder / "red.png").rename(folder / "later" / "red.png")
    (folder / "red.txt").unlink()
    (folder / "green.png").unlink()
    draw(folder, "pink")
    (folder / "white.txt").write_text("a polar bear\n")
    done = sfumato.json("index", "--sync", "--out", out)
    assert {k: done[k] for k in ("n", "new", "changed", "moved", "unchanged", "deleted")} == {
        "n": 5, "new": 1, "changed": 1, "moved": 1, "unchanged": 2, "deleted": 1,
    }  # fmt: skip
    after = ids(out)
    assert set(after) == {"later/red.png", "blue.png", "white.png", "black.png", "pink.png"}
    moved = after["later/red.png"]
    assert moved["_digest"] == before["red.png"]["_digest"] and "captions" not in moved
    sfumato.json("delete", out, "pink.png")
    assert sfumato.json("index", "--sync", "--out", out)["n"] == 4  # What was deleted stays so,
    assert sfumato.json("index", "--data", folder, "--add", "--out", out)["n"] == 5  # until it is added again.
    assert sfumato.json("index", "--sync", "--out", out)["n"] == 5
    sfumato.json("delete", out, "pink.png")
    moved = folder.rename(tmp_path / "elsewhere")
    assert "--images NEW" in sfumato.refused("index", "--sync", "--out", out) and len(ids(out)) == 4
    assert sfumato.json("search", out, "bear", "-k", 1)[0]["hits"][0]["id"] == "white.png"
    assert sfumato.json("index", "--sync", "--images", moved, "--out", out)["unchanged"] == 4
    with load_index(out) as index:
        assert all(index.image_of(hit) is not None for hit in index.search("bear", 4))
    assert sfumato.json("index", "--sync", "--out", out)["unchanged"] == 4


def test_an_interrupted_filling_goes_on(tmp_path, monkeypatch):
    folder, out, model = draw(tmp_path / "photos", *COLOURS), tmp_path / "mine", load(SMALL)
    monkeypatch.setattr(own_folder, "_BATCH", 2)
    monkeypatch.setattr(own_folder, "_STORED", 2)
    upsert, calls = GaussianCollection.upsert, []

    def dies(self, *given, **named):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return upsert(self, *given, **named)

    monkeypatch.setattr(GaussianCollection, "upsert", dies)
    with pytest.raises(KeyboardInterrupt):
        own_folder.index_data(model, str(folder), out, "file:")
    assert len(ids(out)) == 2 and is_unfinished(out)
    n, done = own_folder.index_data(model, str(folder), out, "file:")
    assert (n, done.new, done.unchanged) == (5, 3, 2) and not is_unfinished(out)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):  # A whole collection stays open to readers.
        draw(folder, "grey", "navy", "teal")
        own_folder.add_data(model, str(folder), out)
    with load_index(out) as reader:
        assert len(reader) == 7 and len(reader.search("bear", 9).hits) == 7
    assert own_folder.sync_data(model, out)[1].new == 1


@pytest.mark.slow
def test_a_synchronisation_deletes_only_what_is_gone(sfumato, tmp_path):
    folder, out = draw(tmp_path / "photos"), tmp_path / "mine"
    for k in range(14):
        Image.new("RGB", (40, 30), (9 * k, 200 - 9 * k, 90)).save(folder / f"{k}.png")
    draw(folder / "inner", "red")
    sfumato.json("index", "--data", folder, "--out", out)
    with GaussianCollection.open(out) as collection:  # An item that is of no folder.
        collection.upsert(collection.get(["1.png"]).embeddings, ["own"], payloads=[{}])
    (tmp_path / "other").mkdir()
    told = sfumato.refused("index", "--sync", "--images", tmp_path / "other", "--out", out)
    assert "15 of 15 images are excluded, or not in" in told and len(ids(out)) == 16
    sfumato.json("index", "--sync", "--images", folder, "--out", out)
    os.utime(folder / "2.png")
    (folder / "3.png").unlink()
    (out / "unfinished.txt").write_text("interrupted\n")  # As a killed command leaves it.
    done = sfumato.json("index", "--data", folder, "--out", out)
    assert (done["n"], done["changed"], done["new"]) == (16, 1, 0)
    assert sfumato.json("index", "--sync", "--out", out)["deleted"] == 1 and "own" in ids(out)
    draw(tmp_path / "inner", "red")
    assert sfumato.json("index", "--data", tmp_path / "inner", "--add", "--out", out)["new"] == 1
    assert {"inner/red.png", "inner-2/red.png"} <= set(ids(out))
    (tmp_path / "inner" / "red.png").unlink()  # As where a disk is not mounted.
    assert f"{tmp_path / 'inner'} is empty now" in sfumato.refused("index", "--sync", "--out", out)
    shutil.rmtree(tmp_path / "inner")
    assert f"{tmp_path / 'inner'}=NEW; --force drops" in sfumato.refused("index", "--sync", "--out", out)
    assert sfumato.json("index", "--sync", "--force", "--out", out)["deleted"] == 1


def test_manifests_archives_and_folders_are_added_also_to_a_gallery_of_memory(sfumato, tmp_path):
    folder, out = draw(tmp_path / "photos", *COLOURS), tmp_path / "mine"
    rows = [{"image": "red.png", "captions": ["a tulip"], "id": "one", "place": "Delft"}, {"image": "blue.png"}]
    rows += [{"image": "green.png", "id": "one"}, {"image": "green.png", "id": "one", "caption": "grass"}]
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"captions": "no image"}\n')
    made = sfumato.json("index", "--data", folder / "list.jsonl", "--out", out)
    assert made["n"] == 3 and made["problems"] == 2
    kept = ids(out)
    assert kept.keys() == {"one", "blue.png", "one-2"} and kept["one-2"]["captions"] == "grass", "an id of its own"
    assert sfumato.json("index", "--sync", "--out", out)["unchanged"] == 3
    assert (kept["one"]["captions"], kept["one"]["place"], kept["one"]["_file"]) == ("a tulip", "Delft", "red.png")
    shard = write_tar(tmp_path / "shard.tar", {"k.png": (folder / "green.png").read_bytes(), "k.txt": b"a frog"})
    assert sfumato.json("index", "--data", shard, "--add", "--out", out)["n"] == 4
    (found,) = sfumato.json("search", out, "frog", "-k", 1)
    assert found["hits"][0]["captions"] == "a frog"
    with load_index(out) as index:
        hits = {hit.id: hit for hit in index.search("tulip", 3)}
        assert index.image_of(hits["one"]).read_bytes() == (folder / "red.png").read_bytes()
    dog = draw(tmp_path / "garden" / "dog", "red")
    draw(dog / "cat", "blue")
    rows = [{"image": str(dog / "red.png")}, {"image": f"../{tmp_path.name}/garden/dog/cat/blue.png"}]
    (tmp_path / "far.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sfumato.json("index", "--data", tmp_path / "far.jsonl", "--out", tmp_path / "far")
    assert {id: p["name"] for id, p in ids(tmp_path / "far").items()} == {
        "garden/dog/red.png": "red", "garden/dog/cat/blue.png": "cat blue",  # Of the folders that all share no word.
    }  # fmt: skip
    with load_index(tmp_path / "far") as index:
        assert all(index.image_of(hit) is not None for hit in index.search("tulip", 3))
    load(SMALL).index(draw(tmp_path / "album", "red", "blue")).save(tmp_path / "own")
    more = draw(tmp_path / "more", "green")
    (more / "green.txt").write_text("a meadow\n")
    assert sfumato.json("index", "--data", more, "--add", "--out", tmp_path / "own")["n"] == 3
    with load_index(tmp_path / "own") as index:
        answer = index.search("meadow", 3)
        assert {hit.id for hit in answer} == {"red.png", "blue.png", "more/green.png"}
        assert all(index.image_of(hit) is not None for hit in answer)


def test_words_of_time_and_place_say_which_photographs_are_meant(sfumato, tmp_path):
    folder = draw(tmp_path / "photos", "red", "green", "blue", "yellow")
    places = {"red": "Rome, Italy", "green": "New York, United States", "blue": "Rome, Italy", "yellow": ""}
    dates = {"red": "2021-07-04", "green": "2022-12-25", "blue": "2022", "yellow": ""}
    for name, facts in (("with", True), ("no", False)):
        rows = [
            {"image": str(folder / f"{c}.png"), "captions": "a dog on a lawn"}
            | ({"place": places[c], "date": dates[c]} if facts else {})
            for c in places
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sfumato.json("index", "--data", tmp_path / f"{name}.jsonl", "--out", tmp_path / name)

    def found(query, out="with"):
        (answer,) = sfumato.json("search", tmp_path / out, query, "-k", 4)
        assert answer["query"] == query
        for hit in answer["hits"]:
            p = hit["match_probability"]
            assert sum(hit["why"].values()) == pytest.approx(math.log(p / (1 - p)), abs=1e-6)
        return {hit["name"]: hit["match_probability"] for hit in answer["hits"]}

    assert found("dog") == found("dog", "no"), "what names no time or place is not changed"
    meant = {
        "dog, Rome": {"red", "blue"}, "dog in Rome 2021": {"red"}, "a dog in summer 2021": {"red"},
        "dog in the summer": {"red"}, "Dog, New York 2022": {"green"}, "dog 2022": {"green", "blue"},
        "dog at Christmas in New York": {"green"}, "dog on Sunday": {"red", "green"},
    }  # fmt: skip
    for query, names in meant.items():
        p = found(query)
        assert {name for name in p if p[name] > 0.3} == names and 0.05 < p["yellow"] < 0.3, query
    with load_index(tmp_path / "with") as index:
        for query in ("dog in 2020", "dog in York", "dog rome", "in Rome", "photo from Rome 2021", "rome without dog"):
            assert with_facts(one := TextQuery(query), index.gallery, SearchOptions()) is one
        there, none = (index.search(text).nothing_probability for text in ("dog in Rome", "dog in New York 2021"))
        assert there < 0.1 and none > 0.5
        index.gallery.n_sample, index.gallery.n_exact = 3, 1  # As above 20,000 items.
        found = {hit.payload["name"]: hit.match_probability for hit in index.search("dog in New York", 4)}
        assert found["green"] > 0.3 and all(p < 0.3 for name, p in found.items() if name != "green")
        assert index.search("a doog in Rome").suggestion == "a dog in Rome"
        for options in (SearchOptions(target="listed"), SearchOptions(max_risk=0.1)):
            assert with_facts(one := TextQuery("dog in Rome"), index.gallery, options) is one


def written(path, *lines, ground="white"):
    image = Image.new("RGB", (640, 480), ground)
    for row, line in enumerate(lines):
        ImageDraw.Draw(image).text((60, 90 + 110 * row), line, fill="black", font=ImageFont.load_default(70))
    image.save(path)


class Reader:
    """In the place of rapidocr: edges from black to white are text."""

    looked = []

    def __init__(self, params):
        pass

    def __call__(self, image, *, use_det, use_cls, use_rec):
        assert image.mode == "RGB" and use_det and use_cls == use_rec
        self.looked.append(image.size)
        has_text = np.ptp(np.asarray(image)) > 200 and len(image.getcolors(10**6)) > 2
        lines = {"txts": ("FRESH", "LEM0NS", "LEMONS", "1"), "scores": (0.99, 0.4, 0.9, 0.99)} if use_rec else {}
        return SimpleNamespace(boxes=[0] if has_text else None, **lines)


def test_text_in_photographs_is_read_and_found(sfumato, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", SimpleNamespace(RapidOCR=Reader, __spec__=True))
    photographs._reader.cache_clear()
    folder, out = draw(tmp_path / "photos", *COLOURS), tmp_path / "mine"
    written(folder / "market.png", "FRESH", "LEMONS")
    found_again(sfumato, folder, out)
    assert set(Reader.looked) == {(40, 30), (320, 240), (640, 480)}, "what has no text is looked at once"
    sfumato.json("index", "--data", folder, "--out", tmp_path / "not", "--no-ocr")
    assert all("ocr" not in own for own in ids(tmp_path / "not").values())
    monkeypatch.setattr(Reader, "__call__", lambda reader, image, **how: 1 / 0)
    failed = sfumato.json("index", "--data", folder, "--out", tmp_path / "failed")
    assert (failed["n"], failed["problems"]) == (6, 6) and "ocr" not in ids(tmp_path / "failed")["sign.png"]
    assert photographs._WORDY.search("東京") and not photographs._WORDY.search("1a 京")
    photographs._reader.cache_clear()


def found_again(sfumato, folder, out):
    """Search for what is written, also after the file has moved, which reads nothing again."""
    assert sfumato.json("index", "--data", folder, "--out", out)["n"] == 6
    assert ids(out)["market.png"]["ocr"] == "FRESH\nLEMONS" and "ocr" not in ids(out)["red.png"]
    (answer,) = sfumato.json("search", out, "fresh lemons")
    first = answer["hits"][0]
    assert first["id"] == "market.png" and first["match_probability"] > 0.8 and first["best_text"] == "FRESH, LEMONS"
    n_looks = len(Reader.looked)
    (folder / "market.png").rename(folder / "sign.png")
    assert sfumato.json("index", "--sync", "--out", out)["moved"] == 1
    assert ids(out)["sign.png"]["ocr"] == "FRESH\nLEMONS" and len(Reader.looked) == n_looks
    assert "texts (ocr)" in sfumato.printed("search", out, "fresh lemons", "--why")


@pytest.mark.slow
def test_the_real_reader_reads_text(sfumato, tmp_path):
    pytest.importorskip("rapidocr", reason="the extra ocr is not installed")
    folder = draw(tmp_path / "photos", *COLOURS)
    written(folder / "market.png", "FRESH", "LEMONS")
    found_again(sfumato, folder, tmp_path / "mine")


def test_the_model_of_the_package_is_what_its_card_says():
    folder = PACKAGED / SMALL
    assert sum(file.stat().st_size for file in folder.iterdir()) < 13e6
    model, card = load(SMALL), (folder / "README.md").read_text(encoding="utf-8")
    assert model.calibrated and model.source == SMALL
    for said in ("Flickr8k", "EfficientNet-Lite0", "MiniLM", "scripts/make_small.py"):
        assert said in card
    assert (ROOT / "scripts" / "make_small.py").exists()


def test_a_clip_is_taken_where_one_is_cached(sfumato, tmp_path, monkeypatch):
    folder, clip = draw(tmp_path / "photos", *COLOURS), tmp_path / "clip"
    tiny_clip(clip)
    (folder / "red.txt").write_text("a strawberry jam\n")
    monkeypatch.setattr(run, "where_weights_are", lambda name: "cache")
    monkeypatch.setattr(run, "CLIP", str(clip))
    assert run.default_model()[0] == str(clip) and "in the hub's cache" in run.default_model()[1]
    monkeypatch.setattr(run, "where_weights_are", lambda name: "")
    assert run.default_model() == (SMALL, "")
    made = sfumato.json("index", clip, "--data", folder, "--out", tmp_path / "mine")
    assert (made["n"], made["model"]) == (5, str(clip))
    (found,) = sfumato.json("search", tmp_path / "mine", "strawberry jam", "-k", 5)
    assert found["hits"][0]["id"] == "red.png" and found["target"] == "fits"
    assert not found["calibrated"] and found["hits"][0]["match_probability"] is None and "100 images" in found["note"]


def test_captions_of_a_hundred_images_calibrate_a_model_that_is_not(tmp_path):
    random = np.random.default_rng(0)
    means = random.normal(size=(400, 8)).astype(np.float32)

    def embed(texts):
        noise = random.normal(size=(len(texts), 8)).astype(np.float32)
        return GaussianEmbedding.point(means[[int(text.split()[1]) for text in texts]] + noise)

    model, metadata = SimpleNamespace(embed_texts=embed, source="a CLIP"), {"calibrated": False}
    made = GaussianCollection.create(tmp_path / "c", d=8, distance="squared_l2", metadata=metadata)
    running = GaussianCollection.open(tmp_path / "c")
    for n, told in ((99, "99 images with captions here"), (300, "600 captions of 300 of these images")):
        captions = [f"one {i}\nanother {i}" for i in range(n)]
        made.upsert(GaussianEmbedding.point(means[:n]), [*map(str, range(n))], {"captions": captions})
        assert told in calibrate_by_captions(made, model) and made.calibrated == (n == 300)
    with made, running, GaussianCollection.open(tmp_path / "c") as again:
        for one in (made, running, again):  # The standard error of the fraction is .03.
            first = [a[0] for a in one.search(embed([f"new {i}" for i in range(300)]), 1)]
            right = np.mean([hit.id == str(i) for i, hit in enumerate(first)])
            assert 0.2 < right < 0.9 and abs(np.mean([hit.match_probability for hit in first]) - right) < 0.08
