"""A frozen model, adopted: its ranking stays to the last tie, its probabilities hold, and every command takes it."""

import csv
import io
import json
import math
import shlex

import numpy as np
import pytest
import torch
from PIL import Image
from support.raising import raises
from support.tiny_models import WORDS, tiny_clip
from support.words import folded, too_wide

import sfumato.workflows.adopt as adopting
from sfumato.calibration.calibrator import Calibration
from sfumato.errors import UserError
from sfumato.models.run import load_model, load_run
from sfumato.search.searcher import open_gallery
from sfumato.workflows.adopt import ADOPTED, METHODS, adopt, adopt_encoders

N, PER_IMAGE, C = 400, 3, 24


def frozen(seed=0, n=N, noise=0.35):
    """Images, captions of them, and images that are near many captions; raw lengths differ."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((n, C)) + 0.4
    texts = np.repeat(images / np.linalg.norm(images, axis=1, keepdims=True), PER_IMAGE, axis=0)
    texts = texts + noise * rng.standard_normal(texts.shape) * rng.uniform(0.3, 1.2, (len(texts), 1))
    pairs = [(i // PER_IMAGE, i) for i in range(len(texts))]
    return images.astype(np.float32), texts.astype(np.float32), pairs


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
    return adopt(*frozen(), tmp_path_factory.mktemp("adopt") / "run")


def test_embeddings_are_the_frozen_ones_and_rank_as_the_cosine_does(adopted):
    images, texts, _ = frozen()
    for embed, array in ((adopted.embed_images, images), (adopted.embed_texts, torch.from_numpy(texts))):
        found = embed(array)
        assert found.log_var.isneginf().all()
        torch.testing.assert_close(found.mean, torch.nn.functional.normalize(torch.as_tensor(array), dim=1))
    index = adopted.index(images)
    exact = texts[:200].astype(np.float64) @ images.astype(np.float64).T / np.linalg.norm(images, axis=1)
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :10]
    for found, order in zip(index.search(texts[:200], k=10), expected.tolist(), strict=True):
        assert [hit.id for hit in found] == [str(k) for k in order]
        p = [hit.match_probability for hit in found]
        assert p == sorted(p, reverse=True) and 0 <= p[-1] <= p[0] <= 1


@pytest.mark.slow
def test_a_given_method_is_taken_and_not_compared(tmp_path):
    for method, reads in (("distance", (False, False)), ("nearest", (True, False)), ("reference", (True, True))):
        options = {"method": method, "val_fraction": 0.4, "test_fraction": 0.1, "max_queries": 200}
        made = adopt(*frozen(n=600), tmp_path / method, **options)
        calibration = made.run.calibration
        assert (calibration.t2i.conditional is not None, calibration.t2i.reference is not None) == reads
        assert made.method == method and not made.comparison and made.n_queries == {"t2i": 200, "i2t": 200}


def test_auto_keeps_the_best_method_in_a_run_of_its_own_figures(adopted):
    assert set(adopted.comparison) <= set(METHODS) and adopted.method in adopted.comparison
    best = adopted.comparison[adopted.method]
    assert best.log_loss == min(found.log_loss for found in adopted.comparison.values())
    for found in adopted.comparison.values():
        assert found.worse.low <= found.worse.value <= found.worse.high
        assert found.worse.value == pytest.approx(found.log_loss - best.log_loss, abs=1e-9)
    run = load_run(adopted.run.folder)
    assert run.calibrated and run.distance == "squared_l2" and sum(p.numel() for p in run.model.parameters()) == 0
    written = json.loads((run.folder / ADOPTED).read_text())
    assert written["method"] == adopted.method and written["n_images"] == dict(adopted.n_images)
    assert sum(written["n_images"].values()) == N and written["hits"]["served"][0]["direction"] == "t2i"
    assert "AdoptedModel(" in repr(adopted) and "400 images" in repr(adopted)


@pytest.mark.slow
def test_every_command_takes_files(tmp_path, monkeypatch, sfumato):
    """The three commands of the guide, from the folder of the files; then from another folder."""
    images, texts, pairs = frozen()
    images[5, 2] = np.nan
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "texts.npy", texts.astype(np.float16))
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "text"), *pairs])
    monkeypatch.chdir(tmp_path)
    command = sfumato.printed
    files = ("--images", "images.npy", "--texts", "texts.npy", "--pairs", "pairs.csv")
    out = command("adopt", *files, "--out", "runs/my own", "--method", "distance")
    nexts = [shlex.split(line) for line in out.splitlines() if line.startswith("  sfumato ")]
    index = ["sfumato", "index", "runs/my own", "--split", "all", "--out", "runs/my own-index"]
    assert nexts == [index, ["sfumato", "serve", "runs/my own-index"]]
    out = command("adopt", *files)
    words = folded(out)
    assert "1 left out" in words and "kept" in words and "adopted is a run" in words
    assert not too_wide(out) and "of the split val" in words and "max_queries" not in out
    assert "images.npy[5]" in (tmp_path / "runs/adopted/problems.jsonl").read_text()
    assert "exists already" in sfumato.refused("adopt", *files)
    monkeypatch.chdir("/")
    run, index = tmp_path / "runs/adopted", tmp_path / "index"
    assert "399 images" in folded(command("index", run, "--split", "all", "--out", index))
    again = command("index", run, "--images", tmp_path / "images.npy", "--out", tmp_path / "index2")
    assert "399 images" in folded(again)
    with open_gallery(index) as first, open_gallery(tmp_path / "index2") as second:
        assert first.ids_after("", 500) == second.ids_after("", 500)
    np.save(tmp_path / "query.npy", texts[30])
    (found,) = sfumato.json("search", index, tmp_path / "query.npy", "-k", 2)
    assert found["calibrated"] and found["hits"][0]["id"] == "10"
    assert "probability of the first hit" in folded(command("trust", run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": np.ones((9, C + 1), np.float32)}, "24 channels and texts 25"),
        ({"images": np.ones((N, C), int)}, "floating"), ({"pairs": [(0, 0, 0)]}, "expected \\(p, 2\\)"),
        ({"pairs": None}, "400 rows and"), ({"pairs": [(0, 99_999)]}, "is not a row number"),
        ({"method": "best"}, "unknown method"), ({"population": "wild"}, "unknown queries"),
        ({"images": "nothing.npy"}, "nothing.npy"),
    ],
)  # fmt: skip
def test_mistakes_are_named(change, message, tmp_path):
    images, texts, pairs = frozen()
    given = {"images": images, "texts": texts, "pairs": pairs} | change
    raises(UserError, message, adopt, out=tmp_path / "run", **given)


@pytest.fixture
def photographs(tmp_path):
    rng, lines = np.random.default_rng(0), []
    (tmp_path / "photos").mkdir()
    for i in range(60):
        Image.fromarray(rng.integers(0, 255, (20, 24, 3), np.uint8)).save(tmp_path / f"photos/{i}.png")
        lines.append({"image": f"photos/{i}.png", "caption": f"{WORDS[i % 10]} {WORDS[(i * 7) % 10]} {i}"})
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def random_model(monkeypatch, tmp_path):
    """Random weights match nothing, so nothing could be fitted to them."""
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(adopting, "calibrate_split", lambda *args, **options: Calibration(2.0, 1.0, 0.1))


@pytest.mark.usefixtures("random_model")
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_model_by_its_folder_embeds_as_transformers_does(tmp_path, photographs, kind):
    model = tiny_clip(tmp_path / "model", kind)
    made = adopt_encoders(str(tmp_path / "model"), photographs, tmp_path / "run", method="distance", test_fraction=0)
    assert sum(made.n_images.values()) == 60 and made.run.calibration.logit_scale == 2
    run, captions = load_model(tmp_path / "run"), ["red square 3", "blue"]
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    padding = "max_length" if kind == "siglip" else True
    tokens = tokenizer(captions, padding=padding, max_length=12, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        features = model.get_text_features(**{k: v for k, v in tokens.items() if k != "token_type_ids"})
        data = (photographs.parent / "photos/4.png").read_bytes()
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
        pixels = processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt")
        image = model.get_image_features(**pixels)
    for found, expected in ((run.model.embed_texts(captions), features), (run.model.embed_images([data]), image)):
        expected = expected if isinstance(expected, torch.Tensor) else expected.pooler_output
        torch.testing.assert_close(found.mean, torch.nn.functional.normalize(expected, dim=1), atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("random_model")
def test_sentence_transformers_keep_their_model_in_a_folder_and_cocos_own_captions_are_told(tmp_path, photographs):
    tiny_clip(tmp_path / "st" / "0_CLIPModel")
    rows = [json.loads(line) for line in photographs.read_text().splitlines()]
    captions = [{"id": 100 + i, "image_id": i, "caption": row["caption"]} for i, row in enumerate(rows)]
    images, path = [{"id": i, "file_name": f"{i}.png"} for i in range(60)], tmp_path / "photos" / "mine.json"
    path.write_text(json.dumps({"images": images, "annotations": captions}))
    made = adopt_encoders(str(tmp_path / "st"), path, tmp_path / "run", method="distance", test_fraction=0)
    assert made.retrieval is None and made.run.recipe.model.dim == 8 and sum(made.n_images.values()) == 60
    assert (made.run.recipe.data.source, made.run.recipe.data.images) == ("coco", str(path.parent))


def test_models_and_data_that_cannot_be_adopted_are_named(tmp_path, photographs, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    tiny_clip(tmp_path / "model")
    with pytest.raises(UserError, match="does not bring the pairs"):
        adopt_encoders(str(tmp_path / "model"), photographs, tmp_path / "run", method="distance")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")
    with pytest.raises(UserError, match="no data at"):
        adopt_encoders("openai/clip-vit-base-patch32", tmp_path / "nothing.jsonl", tmp_path / "run")
    raises(UserError, "Give a local folder", adopt_encoders, "nobody/nothing-at-all", photographs, tmp_path / "run")
    config = transformers.BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    raises(UserError, "no joint embedding", adopt_encoders, str(tmp_path / "bert"), photographs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_splits_are_needed_and_large_ones_sampled(tmp_path, monkeypatch):
    images, texts, pairs = frozen(n=60)
    np.save(tmp_path / "i.npy", images)
    np.save(tmp_path / "t.npy", texts)
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "text", "split"), *[(*pair, "train") for pair in pairs]])
    with pytest.raises(UserError, match="no split 'val'"):
        adopt(tmp_path / "i.npy", tmp_path / "t.npy", tmp_path / "pairs.csv", tmp_path / "run")
    monkeypatch.setattr(adopting, "_MOST_CALIBRATING", 80)
    monkeypatch.setattr(adopting, "_MOST_MEASURING", 50)
    made = adopt(*frozen(), tmp_path / "run")
    assert made.retrieval.n_images == 50 and made.run.calibration.t2i.scores.n_gallery == 80


def test_folders_of_others_are_left_alone_and_a_failure_leaves_nothing(tmp_path):
    images, texts, _ = frozen(n=60)
    shuffled = [(int(i), t) for i, t in zip(np.random.default_rng(3).permutation(180) // 3, range(180), strict=True)]
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty"):
        raises(UserError, r"channels|calibrate|split", adopt, images, texts[:, :-1], shuffled, folder)
    assert not (tmp_path / "new").exists() and not list((tmp_path / "empty").iterdir())
    (tmp_path / "mine.txt").write_text("keep")
    np.save(tmp_path / "new.npy", frozen()[0])
    before = sorted(path.name for path in tmp_path.iterdir())
    for out in (tmp_path, tmp_path / "mine.txt"):
        raises(UserError, "exists already", adopt, *frozen(), out)
    raises(UserError, r"new\.npy lies in", adopt, tmp_path / "new.npy", *frozen()[1:], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_vectors_that_cannot_be_embedded_are_named(adopted, tmp_path, sfumato):
    for bad, message in ((np.ones(3), "embedding of 24"), (np.zeros(C), "zeros"), (np.full(C, math.inf), "infinity")):
        for embed in (adopted.embed_texts, adopted.embed_images):
            raises((UserError, ValueError), message, embed, [bad])
    with pytest.raises(UserError, match="this model reads embeddings and has no encoder for texts such as 'a dog'"):
        adopted.index(frozen()[0]).search("a dog")
    with pytest.raises(TypeError, match="image 0 is a Image, but this model reads embeddings"):
        adopted.embed_images([Image.new("RGB", (8, 8))])
    sfumato.printed("index", adopted.run.folder, "--split", "test", "--out", tmp_path / "index")
    np.save(tmp_path / "zero.npy", np.zeros(C, np.float32))
    np.save(tmp_path / "short.npy", np.ones(3, np.float32))
    for name, message in (("zero.npy", "zeros alone"), ("short.npy", "1 x 3 numbers"), ("no.npy", "there is no file")):
        told = sfumato.refused("search", tmp_path / "index", tmp_path / name)
        assert message in told and name in told
