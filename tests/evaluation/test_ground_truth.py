import csv
import json
import sys

import numpy as np
import pytest
import torch
from data.test_sources import coco_write
from evaluation.test_benchmarks import evaluated
from support.fixtures import SHARED
from support.raising import raises

from sfumato import GaussianEmbedding, GroundTruth, Relevance, load_emoji, read_ground_truth, read_ground_truths
from sfumato.data.coco import coco_image_id
from sfumato.errors import UserError
from sfumato.evaluation import benchmark_ground_truths as benchmarks
from sfumato.evaluation.benchmark_ground_truths import eccv_caption, pmrp, read_coco, read_karpathy_ground_truth
from sfumato.evaluation.embedded_input import measure, told_apart
from sfumato.evaluation.ground_truth import ground_truth_from_data, ground_truth_from_pairs, in_folds, in_folds_of
from sfumato.evaluation.protocols import EmbeddedSet, Scores

listed = lambda images, pairs: json.dumps({"images": images, "texts": ["x"], "pairs": pairs})


def shared(*parts):
    path = SHARED.joinpath("data", *parts)
    if not path.exists():
        pytest.skip(f"no {path}; set SFUMATO_SHARED to the folder that holds data/")
    return path


def matches(ground_truth):
    rows = {}
    images, texts = ground_truth.image_ids, ground_truth.text_ids
    sides = ("i2t", ground_truth.i2t, images, texts), ("t2i", ground_truth.t2i, texts, images)
    for side, relevance, queries, gallery in sides:
        rows[side] = {q: set() for q in queries}
        for i, j in zip(relevance.query_of_item, relevance.indices, strict=True):
            rows[side][queries[i]].add(gallery[j])
    return rows["i2t"], rows["t2i"]


def test_pairs_make_both_directions_and_folds_are_consecutive_images():
    images, texts = list("abcdefghij"), [f"{c}{k}" for c in "abcdefghij" for k in (0, 1)]
    texts = texts[1:] + texts[:1]
    pairs = [(text[0], text) for text in texts]
    folded = lambda pairs, n=5: in_folds(ground_truth_from_pairs("all", images, texts, pairs), n, name="folded")
    ground_truth = folded(pairs)
    assert ground_truth.name == "folded" and len(ground_truth.folds) == 5
    assert [texts[i] for i in ground_truth.folds[0][1]] == ["a1", "b0", "b1", "a0"]
    assert ground_truth.folds[3][0].tolist() == [6, 7]
    raises(ValueError, "10 images cannot be divided into 3 equal folds", folded, pairs, 3)
    raises(ValueError, "text 'a1' does not belong to the images of exactly one fold", folded, [*pairs, ("j", "a1")])
    raises(ValueError, "text 'a0' does not belong", folded, pairs[:-1])
    data = load_emoji()["test"]
    for ground_truth in (benchmarks.emoji(), ground_truth_from_data(data, name="mine")):
        assert ground_truth.image_ids == data.image_ids and ground_truth.text_ids == data.text_ids
        assert ground_truth.i2t.indices.tolist() == data.relevance().indices.tolist()
    assert len(benchmarks.emoji("style").image_ids) > len(data.images)
    raises(ValueError, "unknown split 'dev'; known: train, val, test, style", benchmarks.emoji, "dev")
    ground_truth = ground_truth_from_pairs("mine", ["b", "a"], [7, "x", 8], [("a", 7), ("b", "x"), ("a", 8), ("a", 7)])
    assert matches(ground_truth) == ({"b": {"x"}, "a": {"7", "8"}}, {"7": {"a"}, "x": {"b"}, "8": {"a"}})
    assert ground_truth.with_metrics("recall@3").metrics == ("recall@3",)
    with pytest.raises(ValueError, match="mine: pair 1 names text 'y', which is not among the text ids"):
        ground_truth_from_pairs("mine", ["a"], ["x"], [("a", "x"), ("a", "y")])
    one, other = Relevance.from_lists([[0], [1]], n_gallery=3), Relevance.from_lists([[0], [1], []], n_gallery=2)
    images, texts = ("a", "b"), ("x", "y", "z")
    GroundTruth("t", images, texts, one, other)
    with pytest.raises(ValueError, match="t2i is 2 by 3, but there are 2 images and 3 texts; expected 3 by 2"):
        GroundTruth("t", images, texts, one, one)
    raises(ValueError, "text id 'x' occurs more than once", GroundTruth, "t", images, ("x", "y", "x"), one, other)
    raises(ValueError, "unknown metric 'recall'", GroundTruth, "t", images, texts, one, other, ("recall",))
    with pytest.raises(ValueError, match=r"fold 0 needs distinct text positions below 3"):
        GroundTruth("t", images, texts, one, other, folds=((np.array([0]), np.array([3])),))


def test_eccv_caption_has_the_published_numbers():
    ground_truths = eccv_caption(shared("coco5k_text"))
    names = ["coco_5k", "coco_1k", "cxc", "rpc2", "rpc2_cxc", "cxc_1k", "rpc2_1k", "rpc2_cxc_1k", "eccv"]
    assert list(ground_truths) == names
    expected = {
        "coco_5k": ((5000, 25000), (25000, 25000)), "cxc": ((5000, 35585), (24972, 35585)),
        "rpc2": ((5000, 35614), (25000, 35614)), "rpc2_cxc": ((5000, 35585), (24972, 35585)),
        "eccv": ((1261, 22550), (1332, 11279)),
    }  # fmt: skip
    for name, sides in expected.items():
        both = ground_truths[name].i2t, ground_truths[name].t2i
        for relevance, (queries, positives) in zip(both, sides, strict=True):
            assert ((relevance.totals > 0).sum(), relevance.totals.sum()) == (queries, positives), name
    assert ground_truths["eccv"].i2t.n_outside.sum() == 2 and ground_truths["eccv"].t2i.n_outside is None
    for image in ("575916", "421999"):
        assert ground_truths["eccv"].i2t.n_outside[ground_truths["eccv"].image_ids.index(image)] == 1
    assert ground_truths["coco_5k"].image_ids[:3] == ("391895", "60623", "483108")
    assert ground_truths["coco_5k"].text_ids[:2] == ("770337", "771687")
    assert [len(images) for images, _ in ground_truths["coco_1k"].folds] == [1000] * 5
    assert (ground_truths["coco_1k"].folds[4][1] == np.arange(20000, 25000)).all()
    assert ground_truths["rpc2"].metrics == ground_truths["rpc2_cxc_1k"].metrics == ("r_precision",)
    listed = json.loads(shared("coco5k_text", "cxc_image_to_caption.json").read_text())
    assert matches(ground_truths["cxc"])[0] == {image: set(map(str, texts)) for image, texts in listed.items()}
    assert [ground_truths[name].name for name in ("cxc", "eccv", "rpc2")] == ["cxc", "eccv", "rpc2"]
    cxc, own, rated = ground_truths["cxc"], ground_truths["coco_5k"], {}
    with shared("coco5k_text", "cxc_sits_test.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            rated[coco_image_id(row["image"]), row["caption"].rpartition(":")[2]] = float(row["agg_score"])
    positives, pairs = ({(i, t) for i, texts in matches(one)[0].items() for t in texts} for one in (cxc, own))
    assert positives == {pair for pair, score in rated.items() if score >= 3} and len(positives) == 35_585
    assert len(pairs - positives) == 29 and max(rated[pair] for pair in pairs - positives) == 2.99
    # The paper: 10,614 pairs more, "added to the original 25,000".
    union = {(i, t) for i, texts in matches(ground_truths["rpc2"])[0].items() for t in texts}
    assert union == positives | pairs and len(union) == 25_000 + 10_614


def test_rpc2_is_of_both_and_folds_leave_out_what_a_ground_truth_lacks(tmp_path):
    to_caption = {"1": [10, 11], "2": [21, 10], "3": [30, 31], "4": [40, 41], "5": [50, 51]}
    to_image = {str(c): [c // 10] for c in (11, 21, 30, 31, 40, 41, 50, 51)} | {"10": [1, 2]}
    both = eccv_caption(small_eccv(tmp_path, cxc_image_to_caption=to_caption, cxc_caption_to_image=to_image))
    assert matches(both["rpc2"])[0]["2"] == {"20", "21", "10"} and matches(both["rpc2"])[1]["20"] == {"2"}
    assert matches(both["rpc2_cxc"]) == matches(both["cxc"])
    assert matches(both["cxc"])[0]["2"] == {"21", "10"} and matches(both["cxc"])[1]["20"] == set()
    base = ground_truth_from_pairs("base", list("abcd"), list("ABCD"), list(zip("abcd", "ABCD", strict=True)))
    folded = in_folds(base, 2, name="base_half")
    path = instances(tmp_path / "instances.json", {1: [1, 2], 2: [2], 3: [], 4: [1, 2]})
    numbered = ground_truth_from_pairs("n", list("1234"), list("ABCD"), list(zip("1234", "ABCD", strict=True)))
    found = pmrp([path], numbered, in_folds(numbered, 2, name="half"))
    assert list(found) == ["pmrp@0", "pmrp@1", "pmrp@2", "pmrp_1k@0", "pmrp_1k@1", "pmrp_1k@2"]
    assert {one.averaged_as for one in found.values()} == {"pmrp", "pmrp_1k"}
    for name in ("pmrp_1k@0", "pmrp_1k@1"):
        assert [(i.tolist(), t.tolist()) for i, t in found[name].folds] == [([0, 1], [0, 1]), ([2], [2])]
    found_folds = [(i.tolist(), t.tolist()) for i, t in in_folds_of(folded, base, name="x").folds]
    assert found_folds == [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    # Image 1 matches A and B with one difference, and D of the other fold, which does not count in its own.
    scores = np.array([[1.0, 2, 9, 3], [2, 1, 9, 0], [0, 0, 9, 0], [9, 8, 9, 1]])
    figures = evaluated(Scores(scores, better="larger"), list("1234"), list("ABCD"), found.values())
    assert figures["pmrp@0"]["i2t"]["r_precision"] == np.mean([1 / 2, 0, 1 / 2])  # 1: B, D. 2: A. 4: A, B.
    assert figures["pmrp_1k@0"]["i2t"]["r_precision"] == np.mean([np.mean([0, 0]), 1])
    assert figures["pmrp_1k@1"]["i2t"]["r_precision"] == np.mean([np.mean([1, 1]), 1])
    assert figures["pmrp_1k"]["i2t"]["r_precision"] == np.mean([0.5, 1, 1])


def small_eccv(folder, **changes):
    """Files of the package's layout with 5 images and 10 captions; image i has captions 10 i and 10 i + 1."""
    own = {str(10 * i + k): [i] for i in range(1, 6) for k in (0, 1)}
    files = {
        "original_caption_to_image": own,
        "cxc_image_to_caption": {str(i): [10 * i, 10 * i + 1, 10 * (i % 5 + 1)] for i in range(1, 6)},
        "cxc_caption_to_image": own | {"10": [1, 5]}, "eccv_image_to_caption": {"2": [20, 30]},
        "eccv_caption_to_image": {"51": [1, 2, 3]}, **changes,
    }  # fmt: skip
    np.save(folder / "coco_test_ids.npy", np.array([int(c) for c in own]))
    for name, value in files.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            (folder / f"{name}.json").write_text(text)
    return folder


def test_the_installed_package_is_read_but_not_run(tmp_path, monkeypatch):
    package = tmp_path / "eccv_caption"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('run')")
    small_eccv(package / "data", pm_image_to_caption={"1": [10]}, pm_caption_to_image={"10": [1, 2]})
    monkeypatch.syspath_prepend(tmp_path)
    ground_truths = eccv_caption()
    i2t, t2i = matches(ground_truths["eccv"])
    assert i2t["2"] == {"20", "30"} and t2i["51"] == {"1", "2", "3"}
    assert (ground_truths["eccv"].i2t.totals > 0).sum() == 1
    assert matches(ground_truths["pmrp_eccv_caption"])[1]["10"] == {"1", "2"} and "eccv_caption" not in sys.modules


@pytest.mark.parametrize(("changes", "message"), [
    ({"cxc_image_to_caption": None}, r"cannot read .*cxc_image_to_caption\.json"),
    ({"eccv_caption_to_image": "{"}, r"eccv_caption_to_image\.json: not usable JSON"),
    ({"eccv_caption_to_image": '{"51": [1], "51": [2]}'}, r"key '51' occurs more than once"),
    ({"eccv_caption_to_image": {"51": [1.5]}}, r"'51' holds \[1\.5\]; expected a list"),
    ({"eccv_caption_to_image": {"99": [1]}}, "caption 99 is not among the 10 captions"),
    ({"eccv_image_to_caption": {"1": [10, 999]}}, "1 of its positives are not in the gallery"),
    ({"original_caption_to_image": {"10": [1, 2]}}, "caption 10 has 2 images, expected one"),
    ({"original_caption_to_image": []}, "found list; expected an object"),
])  # fmt: skip
def test_damaged_files_are_named(tmp_path, changes, message):
    raises(UserError, message, eccv_caption, small_eccv(tmp_path, **changes))
    raises(UserError, r"coco_test_ids\.npy", eccv_caption, tmp_path / "elsewhere")


def entry(name, split, *sentids):
    return {"filename": name, "split": split, "sentences": [{"sentid": s, "raw": "."} for s in sentids]}


def test_karpathy_splits_without_any_image(tmp_path):
    entries = [entry("a.jpg", "test", 5, 3), entry("b.jpg", "val", 4), entry("c.jpg", "test", 9)]
    path = coco_write(tmp_path, entries)
    ground_truth = read_karpathy_ground_truth(path, name="flickr30k")
    assert ground_truth.name == "flickr30k" and ground_truth.image_ids == ("a.jpg", "c.jpg")
    assert ground_truth.text_ids == ("5", "3", "9")
    assert matches(ground_truth)[1] == {"5": {"a.jpg"}, "3": {"a.jpg"}, "9": {"c.jpg"}}
    assert read_karpathy_ground_truth(path, split="val", name="flickr8k").image_ids == ("b.jpg",)
    entries = [entry(f"COCO_val2014_{i + 391895:012d}.jpg", "test", *range(10 * i, 10 * i + 7)) for i in range(5)]
    found = read_coco(coco_write(tmp_path, entries))
    assert found["coco_5k"].text_ids == tuple(str(10 * i + k) for i in range(5) for k in range(5))
    assert found["coco_5k"].image_ids[0] == "391895" and len(found["coco_1k"].folds) == 5
    assert len(read_karpathy_ground_truth(path, name="flickr8k").text_ids) == 35
    coco_write(tmp_path, entries[:4])
    raises(UserError, r"dataset\.json: coco_1k: 4 images cannot be divided into 5 equal folds", read_coco, path)


FIRST = "COCO_val2014_000000000001.jpg"
PAIRS = [(FIRST, "1a"), (FIRST, "1b"), ("2", "2a"), ("3", "3a"), ("4", "4a")]
CAPTIONS = ground_truth_from_pairs("captions", [FIRST, "2", "3", "4"], ["1a", "1b", "2a", "3a", "4a"], PAIRS)


def instances(path, classes):
    annotations = [{"image_id": i, "category_id": c} for i, own in classes.items() for c in own]
    path.write_text(json.dumps({"images": [{"id": i} for i in classes], "annotations": annotations}))
    return path


def test_pmrp_by_hand_and_what_it_cannot_know(tmp_path):
    # Classes {1, 2}, {2}, {3}, none: the first two differ in one class, the others in three and two.
    path = instances(tmp_path / "instances.json", {1: [1, 2, 2], 2: [2], 3: [3], 4: []})
    ground_truths, first = pmrp([path], CAPTIONS, in_folds(CAPTIONS, 1, name="whole")), FIRST
    assert matches(ground_truths["pmrp@0"])[0] == {first: {"1a", "1b"}, "2": {"2a"}, "3": {"3a"}}
    assert matches(ground_truths["pmrp@1"])[0] == {first: {"1a", "1b", "2a"}, "2": {"1a", "1b", "2a"}, "3": {"3a"}}
    two = {"1a": {first, "2"}, "1b": {first, "2"}, "2a": {first, "2", "3"}, "3a": {"2", "3"}}
    assert matches(ground_truths["pmrp@2"])[1] == two
    path = instances(tmp_path / "instances.json", {1: [1], 2: [2], 3: [3]})
    raises(UserError, "image 4 of captions is not among its images", pmrp, [path], CAPTIONS, CAPTIONS)
    two = ground_truth_from_pairs("two", ["1", "2"], ["x"], [("1", "x"), ("2", "x")])
    raises(ValueError, "text 'x' does not belong to exactly one image", pmrp, [path], two, two)
    path.write_text('{"images": [{"id": 1}], "annotations": [{"image_id": 1}]}')
    message = r"annotations\[0\]: expected an object with image_id and category_id"
    raises(UserError, message, pmrp, [path], CAPTIONS, CAPTIONS)
    path.write_text('{"images": []}')
    raises(UserError, "not COCO's instance annotations", pmrp, [path], CAPTIONS, CAPTIONS)


def test_birds_match_by_class_in_the_public_lists(tmp_path):
    for bird, n in (("001.Wren", 2), ("002.Owl", 1), ("003.Kite", 2)):
        (tmp_path / bird).mkdir()
        for i in range(n):
            (tmp_path / bird / f"{bird[4:]}_{i}.txt").write_text(f"a {bird}\nit sings\n\n")
            (tmp_path / bird / f"{bird[4:]}_{i}.h5").write_text("features")
    (tmp_path / "classes.txt").write_text("001.Wren\n002.Owl\n003.Kite\n")
    ground_truth = benchmarks.cub_captions(tmp_path, classes=tmp_path / "classes.txt")
    assert ground_truth.image_ids[:3] == ("001.Wren/Wren_0.jpg", "001.Wren/Wren_1.jpg", "002.Owl/Owl_0.jpg")
    assert ground_truth.text_ids[:3] == ("001.Wren/Wren_0.jpg#0", "001.Wren/Wren_0.jpg#1", "001.Wren/Wren_1.jpg#0")
    birds_of = lambda ids: np.array([one.split("/")[0] for one in ids])
    expected = birds_of(ground_truth.image_ids)[:, None] == birds_of(ground_truth.text_ids)
    assert (ground_truth.i2t.to_dense() == expected).all() and (ground_truth.t2i.to_dense() == expected.T).all()
    lists = tmp_path / "lists"
    lists.mkdir()
    classes = {"test": "002.Owl", "trainval": "001.Wren\n003.Kite", "train": "001.Wren", "val": "003.Kite"}
    for name, text in classes.items():
        (lists / f"{name}classes{'2' * (name in ('train', 'val'))}.txt").write_text(text)
    (lists / "seen_test_images.txt").write_text("001.Wren/Wren_1.jpg\n002.Owl/Owl_0.jpg\n003.Kite/Kite_0.jpg\n")
    expected = {
        "test": ["002.Owl/Owl_0.jpg"],  # An unseen class, whatever the list of seen test images says.
        "seen": ["001.Wren/Wren_1.jpg", "003.Kite/Kite_0.jpg"],
        "train": ["001.Wren/Wren_0.jpg", "003.Kite/Kite_1.jpg"],
    }
    expected |= {"train2": expected["train"][:1], "val2": expected["train"][1:]}
    for split, images in expected.items():
        (found,) = read_ground_truths("cub", annotations=tmp_path, classes=lists, split=split)
        assert list(found.image_ids) == images and found.name == ("cub" if split == "test" else f"cub_{split}")
    (named,) = read_ground_truths("cub", annotations=tmp_path, classes=lists / "trainvalclasses.txt")
    assert len(named.image_ids) == 4
    for arguments, message in (
        ({}, r"the folder of the public lists \(testclasses.txt.*--split chooses \(test, seen, "),
        ({"classes": lists, "split": "val"}, "CUB has no split 'val'; known: test, seen, train, train1, val1"),
        ({"classes": lists, "split": "val1"}, r"cannot read the list .*valclasses1\.txt"),
        ({"classes": lists / "testclasses.txt", "split": "seen"}, "needs the folder of the class lists"),
    ):
        raises(UserError, message, read_ground_truths, "cub", annotations=tmp_path, **arguments)
    raises(UserError, "classes belongs to the benchmark cub", read_ground_truths, "emoji", classes=lists)


@pytest.mark.parametrize(("name", "content"), [
    ("t.json", '{"images": ["a", "b"], "texts": [1, 2, 3], "pairs": [["a", 1], ["a", 3], ["b", 2]]}'),
    ("t.json", '{"a": [1, 3], "b": ["2"]}'), ("t.csv", "\ufeffimage,note,text\na,x,1\na,,3\nb,,2\n"),
])  # fmt: skip
def test_own_truths_in_three_layouts(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    ground_truth = read_ground_truth(tmp_path / name, metrics=["recall@1"])
    assert matches(ground_truth)[0] == {"a": {"1", "3"}, "b": {"2"}}
    assert ground_truth.name == "t" and ground_truth.metrics == ("recall@1",) and ground_truth.source.endswith(name)
    (tmp_path / "t.json").write_text('{"a": [1], "b": []}')
    without = read_ground_truth(tmp_path / "t.json", name="other")
    assert (without.name, without.image_ids, without.i2t.counts.tolist()) == ("other", ("a", "b"), [1, 0])


@pytest.mark.parametrize(("name", "content", "message"), [
    ("t.json", listed(["a"], [["a", "y"]]), r"t\.json: t: pair 0 names text 'y'"),
    ("t.json", listed(["a", "a"], [["a", "x"]]), "image 'a' is listed more than once"),
    ("t.json", listed("a", []), "images must be a list"),
    ("t.json", listed(["a"], [["a"]]), r"pairs\[0\]: found \['a'\]"),
    ("t.json", listed(["a"], {}), "pairs must be a list"),
    ("t.json", listed(["a"], []), "no image matches any text"),
    ("t.json", '{"a": 1}', "'a' holds 1; expected a list"), ("t.json", "[]", "found list"),
    ("t.json", "{", "not usable JSON"),
    ("t.csv", "picture,text\na,b\n", r"t\.csv:1: the columns are picture, text; expected image and text"),
    ("t.csv", "image,text\na,b\n,c\n", r"t\.csv:3: image or text is empty"),
    ("t.csv", "image,text\na,b,c\n", r"t\.csv:2: more values than columns"),
    ("t.csv", 'image,text\na,"b\n', "not CSV"), ("t.csv", "", r"the columns are \(none\)"),
    ("t.txt", "", r"must be a \.json or \.csv file, got '\.txt'"),
])  # fmt: skip
def test_bad_truths_of_ones_own(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    raises(UserError, message, read_ground_truth, tmp_path / name)


def test_one_call_gives_every_figure_of_cocos_tables(tmp_path):
    annotations = instances(tmp_path / "instances.json", {1: [1, 2], 2: [2], 3: [3], 4: [1, 2], 5: [4]})
    truths = read_ground_truths("coco", **told_apart("coco", [annotations, small_eccv(tmp_path)]))
    raises(UserError, "--annotations .* are of one kind", told_apart, "coco", [tmp_path, annotations, tmp_path])
    ids = truths[0].image_ids, (*truths[0].text_ids, "0")
    sides = [GaussianEmbedding(*torch.randn(2, len(own), 3, generator=torch.Generator().manual_seed(0))) for own in ids]
    found = measure(EmbeddedSet(*sides, *ids, truths))
    of_cxc = {f"{name}{folds}" for name in ("cxc", "rpc2", "rpc2_cxc") for folds in ("", "_1k")}
    of_pmrp = {f"{name}{zeta}" for name in ("pmrp", "pmrp_1k") for zeta in ("", "@0", "@1", "@2")}
    assert set(found.figures) == {"coco_5k", "coco_1k", "eccv"} | of_cxc | of_pmrp
    for side, n in (("i2t", 5), ("t2i", 10)):
        whole, folded = (found.figures[name][side] for name in ("coco_5k", "coco_1k"))
        assert whole["n_queries"] == folded["n_queries"] == n and whole["recall@1"] < folded["recall@1"] == 1
        whole, folded = (found.uncertainty[name][side]["bins"] for name in ("coco_5k", "coco_1k"))
        assert [b["count"] for b in whole] == [b["count"] for b in folded] and sum(b["count"] for b in folded) == n
        assert {b["recall"] for b in folded} == {1} != {b["recall"] for b in whole}
