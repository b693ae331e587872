"""A run on data of COCO's shape, measured as the papers' tables ask: 100 synthetic images, 500 real captions."""

import json

import numpy as np
import pytest
from support.pictures import encoded, write_tar
from support.words import folded

RECIPE = """
name = "coco"
[data]
source = "karpathy"
path = "{folder}/dataset_coco.json"
images = "{folder}/images.tar"
[model]
dim = 4
image = {{ kind = "small", size = 16, width = 2 }}
text = {{ kind = "small", vocabulary = 80, width = 4, max_tokens = 8 }}
[loss]
name = "pcme"
[train]
epochs = 1
batch_size = 32
threads = 1
"""


LISTS = [f"{kind}_{way}.json" for kind in ("cxc", "eccv") for way in ("image_to_caption", "caption_to_image")]


@pytest.fixture(scope="module")
def work(shared, tmp_path_factory):
    """Annotations of COCO's first 100 test images, images in a tar, invented instances, a run that hardly learnt."""
    whole, folder = shared / "data" / "coco5k_text", tmp_path_factory.mktemp("coco")
    texts = (whole / "testall_caps.txt").read_text(encoding="utf-8").splitlines()[:500]
    ids = np.load(whole / "coco_test_ids.npy")[:500]
    own = json.loads((whole / "original_caption_to_image.json").read_text())
    own = {str(identity): own[str(identity)] for identity in ids.tolist()}
    images: dict[int, list[dict[str, object]]] = {}
    for text, identity in zip(texts, ids.tolist(), strict=True):
        images.setdefault(own[str(identity)][0], []).append({"sentid": identity, "raw": text})
    coco = folder / "annotations"
    coco.mkdir()
    np.save(coco / "coco_test_ids.npy", ids)
    (coco / "original_caption_to_image.json").write_text(json.dumps(own))
    known = {*map(str, images), *own}
    for name in LISTS:
        lists = {
            q: [x for x in items if str(x) in known] for q, items in json.loads((whole / name).read_text()).items()
        }
        (coco / name).write_text(json.dumps({q: items for q, items in lists.items() if q in known and items}))
    entries = [
        {"filename": f"COCO_val2014_{image:012d}.jpg", "split": "test", "sentences": sentences}
        for image, sentences in images.items()
    ]
    # A sixth caption, as ten of the real images have one: it belongs to no benchmark.
    entries[0]["sentences"] = [*entries[0]["sentences"], {"sentid": 0, "raw": "one too many"}]
    for k in range(48):
        part = "train" if k < 40 else "val"
        sentences = [{"sentid": 10**7 + k, "raw": texts[k]}]
        entries.append({"filename": f"COCO_train2014_{k:012d}.jpg", "split": part, "sentences": sentences})
    (folder / "dataset_coco.json").write_text(json.dumps({"images": entries}))
    random = np.random.default_rng(0)
    pixels = lambda: random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    write_tar(folder / "images.tar", {entry["filename"]: encoded(pixels()) for entry in entries})
    classes = {image: random.choice(80, random.integers(3, 6), replace=False).tolist() for image in images}
    annotations = [{"image_id": image, "category_id": c} for image, chosen in classes.items() for c in chosen]
    (folder / "instances.json").write_text(
        json.dumps({"images": [{"id": image} for image in images], "annotations": annotations})
    )
    (folder / "coco.toml").write_text(RECIPE.format(folder=folder))
    return folder, coco


def test_one_command_gives_every_figure_of_the_tables(work, sfumato):
    folder, coco = work
    assert sfumato("train", folder / "coco.toml", "--out", folder / "run")[0] == 0
    wanted = ("--benchmark", "coco", "--annotations", coco)
    instances = ("--annotations", folder / "instances.json")
    status, out, err = sfumato("evaluate", "run", folder / "run", *wanted, *instances, "--json")
    assert status == 0, err
    found = json.loads(out)
    for name, metrics in {
        "coco_1k": {"recall@1", "recall@5", "recall@10"}, "coco_5k": {"recall@1"}, "cxc": {"recall@1"},
        "eccv": {"map@r", "r_precision", "recall@1"}, "pmrp": {"r_precision"}, "pmrp_1k": {"r_precision"},
        "rpc2": {"r_precision"}, "rpc2_1k": {"r_precision"}, "cxc_1k": {"recall@1"}, "rpc2_cxc": {"r_precision"},
        "rpc2_cxc_1k": {"r_precision"},
    }.items():  # fmt: skip
        for direction in ("i2t", "t2i"):
            assert metrics <= set(found["truths"][name][direction]), name
    assert (found["n_images"], found["n_texts"]) == (100, 501)
    queries = {name: [found["truths"][name][side]["n_queries"] for side in ("i2t", "t2i")] for name in found["truths"]}
    assert queries["coco_1k"] == queries["coco_5k"] == queries["rpc2"] == [100, 500]
    listed = [len(json.loads((coco / name).read_text())) for name in LISTS]
    assert [*queries["cxc"], *queries["eccv"]] == listed and queries["rpc2_cxc"] == queries["cxc"] and listed[2] > 9
    assert json.loads((folder / "run" / "benchmark-coco-test-csd.json").read_text()) == found
    assert (found["samples"], found["uncertainty_measure"]) == (None, "total_variance")
    # Figure 3: ten bins over the images and over the captions, each ranked in its fold.
    for direction, n in (("i2t", 100), ("t2i", 500)):
        figure = found["uncertainty"]["coco_1k"][direction]
        assert [b["count"] for b in figure["bins"]] == [n // 10] * 10
        recalls = [b["recall"] for b in figure["bins"]]
        assert np.mean(recalls) == pytest.approx(found["truths"]["coco_1k"][direction]["recall@1"])
        assert figure["correlation"] == pytest.approx(np.corrcoef(range(10), recalls)[0, 1])


def scan_folder(folder, order):
    """12 images with 5 captions each: region features and captions in SCAN's layout, annotations in another order."""
    random = np.random.default_rng(1)
    captions = [[f"word{i} {word} thing" for word in ("a", "one", "some", "this", "that")] for i in range(20)]
    for part, chosen in (("train", range(20)), ("dev", range(4)), ("test", range(10))):
        np.save(folder / f"{part}_ims.npy", random.standard_normal((len(chosen), 2, 4)).astype(np.float32))
        (folder / f"{part}_caps.txt").write_text("".join(f"{c}\n" for i in chosen for c in captions[i]))
    images = [
        {
            "filename": f"COCO_val2014_{900 + i:012d}.jpg",
            "split": "test",
            "sentences": [{"sentid": 5000 - 10 * i + k, "raw": c} for k, c in enumerate(captions[i])],
        }
        for i in order
    ]
    (folder / "dataset_coco.json").write_text(json.dumps({"images": images}))


@pytest.mark.parametrize("ids", ["of captions", "of images", "none"])
def test_a_run_on_scans_features_meets_cocos_ids_by_their_order(tmp_path, sfumato, ids):
    """The benchmark's own pairs are the split's, so that its figures are those of the split."""
    scan_folder(tmp_path, range(10) if ids == "none" else (3, 9, 0, 1, 8, 2, 7, 4, 6, 5))
    if ids != "none":
        times = 5 if ids == "of captions" else 1
        (tmp_path / "test_ids.txt").write_text("".join(f"{900 + i}\n" * times for i in range(10)))
    small = (
        f"data.path={tmp_path}", "model.image.channels=4", "model.image.graph_layers=1", "model.dim=4",
        "model.text.hidden=4", "model.text.width=4", "model.text.min_count=1", "train.epochs=1", "train.batch_size=20",
    )  # fmt: skip
    status, _, err = sfumato("train", "coco-vsrn", *small, "--out", tmp_path / "run")
    assert status == 0, err
    own = json.loads(sfumato("evaluate", "run", tmp_path / "run", "--json")[1])
    wanted = "--benchmark", "coco", "--annotations", tmp_path / "dataset_coco.json"
    status, out, err = sfumato("evaluate", "run", tmp_path / "run", *wanted, "--json")
    assert status == 0 and "they take those of coco_5k, in their order" in err
    truths = json.loads(out)["truths"]
    for side in ("i2t", "t2i"):
        assert {truths["coco_5k"][side][m] == own[side][m] for m in ("recall@1", "recall@5", "recall@10")} == {True}
    (tmp_path / "test_ids.txt").write_text("".join(f"{905 + i}\n" for i in range(10)))
    status, _, err = sfumato("evaluate", "run", tmp_path / "run", *wanted)
    assert status == 2 and "are not among the 10 images" in folded(err)
