"""A model given away is the one that was trained, also by the hub; models and embeddings of others are adopted."""

import io
import json
import math
import re
import shlex
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from data.test_embedding_files import write_csv
from PIL import Image
from safetensors.torch import load_file, save_file
from support import graphs
from support.hub import ANN, BOB, Hub, Repository
from support.processes import Started, command
from support.raising import failing, raises
from support.tiny_models import WORDS, made_by_hand, taught_clip, tiny_clip, two_colours
from support.words import folded, too_wide

import sfumato.workflows.adopt as adopting
from sfumato import Calibration, adopt
from sfumato.errors import UserError
from sfumato.models.model import model_digest
from sfumato.models.run import load_model, load_run
from sfumato.search.searcher import open_gallery
from sfumato.workflows.adopt import ADOPTED, METHODS, adopt_encoders
from sfumato.workflows.export import export_run, without_folders

TEXTS = ["a red circle", "some bar in blue", "never seen before"]


@pytest.fixture(scope="module")
def run(toy):
    return toy / "run"


def assert_embeds_alike(ours, theirs, toy):
    for name, items in (("embed_texts", TEXTS), ("embed_images", [next((toy / "data").glob("*.png")).read_bytes()])):
        a, b = (getattr(model, name)(items) for model in (ours, theirs))
        assert torch.equal(a.mean, b.mean) and torch.equal(a.log_var, b.log_var)


def test_round_trip(toy, run, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation-*.json"))
    out = export_run(run, tmp_path / "given" / "away")
    names = {"README.md", "calibration.json", "config.json", "model.safetensors", "tokenizer.json"}
    assert {p.name for p in out.iterdir()} == names and not list(out.parent.glob(".*"))
    card = (out / "README.md").read_text()
    assert "Not evaluated." in card and "fitted on held-out pairs" in card and "# toy" in card
    assert str(toy) not in card + (out / "config.json").read_text()
    trained, loaded = load_run(run), load_model(out)
    assert not loaded.model.training and loaded.calibrated is trained.calibrated is True
    assert (loaded.logit_scale, loaded.logit_bias) == (trained.logit_scale, trained.logit_bias)
    assert loaded.calibration == trained.calibration == load_model(run).calibration is not None
    assert loaded.distance == "csd" and "toy" in loaded.kind
    assert_embeds_alike(trained.model, loaded.model, toy)
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == trained.model.state_dict().keys(), "neither the loss nor the optimiser"
    assert (out / "model.safetensors").stat().st_size < (run / "last.safetensors").stat().st_size / 2
    monkeypatch.chdir(out := export_run(run, tmp_path / "out"))
    Image.new("RGB", (30, 20), "red").save("photo.jpg")
    exec(re.search(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)[1], {})
    values = [float(x) for x in re.findall(r"\d\.\d+(?:e-?\d+)?", capsys.readouterr().out)]
    assert len(values) == 2 and all(0 <= value <= 1 for value in values)


def test_pretrained_weights_are_inside_and_frozen_backbones_keep_their_name(toy, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    transformers.CLIPVisionModel(config).save_pretrained(tmp_path / "my-clip")
    image = {"kind": "clip", "weights": str(tmp_path / "my-clip")}
    folder = made_by_hand(tmp_path / "run", {"dim": 8, "image": image})
    out, trained = export_run(folder, tmp_path / "out"), load_run(folder)
    shutil.rmtree(tmp_path / "my-clip")
    assert_embeds_alike(trained.model, load_model(out).model, toy)
    assert str(tmp_path) not in (out / "config.json").read_text() + (out / "README.md").read_text()
    assert "my-clip" in (out / "README.md").read_text()
    image = {"kind": "frozen", "backbone": "efficientnet-lite0", "size": 32}
    folder = made_by_hand(tmp_path / "frozen", {"dim": 8, "image": image})
    out = export_run(folder, tmp_path / "given")
    assert not any("encoder" in key for key in load_file(out / "model.safetensors") if key.startswith("image."))
    assert "Frozen backbone, loaded by its name: `efficientnet-lite0`" in (out / "README.md").read_text()
    assert_embeds_alike(load_run(folder).model, load_model(out).model, toy)


def test_a_full_folder_is_left_alone_and_a_killed_export_leaves_nothing(run, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear")
    raises(UserError, "exists already", export_run, run, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    assert load_model(export_run(run, tmp_path / "empty")).calibrated
    raises(UserError, "is not a run folder", export_run, tmp_path / "full", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("sfumato.files.write_json", failing(KeyboardInterrupt()))
    raises(KeyboardInterrupt, None, export_run, run, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty"}


def test_folders_that_are_not_whole(run, tmp_path):
    out = export_run(run, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    newer = {**config, "sfumato": "9.9", "model": {**config["model"], "telepathy": True}}
    for change, message in (
        (newer, r"config.json of sfumato 9.9 does not fit this version.*telepathy"),
        ({k: v for k, v in config.items() if k != "distance"}, "distance: missing"),
    ):
        (out / "config.json").write_text(json.dumps(change))
        raises(UserError, message, load_model, out)
    (out / "config.json").write_text(json.dumps(config))
    for name in ("calibration.json", "tokenizer.json"):
        (out / name).unlink()
        raises(UserError, f"{name} is missing; the folder is incomplete", load_model, out)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, tmp_path / "foreign" / "model.safetensors")
    raises(UserError, r"not that of a PCME\+\+ or ProLIP model", load_model, tmp_path / "foreign")


@pytest.fixture
def hub():
    pytest.importorskip("huggingface_hub", reason="the extra backbones is not installed")
    with Hub() as hub:
        yield hub


@pytest.fixture
def environment(hub, tmp_path):
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ANN, "HF_HUB_OFFLINE": "0"}
    return own | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture
def call(environment):
    def run(*arguments, function=command, **changes):
        status, printed = Started(function, *arguments, env={**environment, **changes}).finish()
        assert environment["HF_TOKEN"] not in printed and "Traceback" not in printed, printed
        return status, folded(printed)

    return run


@pytest.fixture
def push(toy, hub, tmp_path_factory):
    def put(name, run=toy / "run", private=False):
        out = export_run(run, tmp_path_factory.mktemp("exported") / "model")
        files = {file.relative_to(out).as_posix(): file.read_bytes() for file in out.rglob("*") if file.is_file()}
        hub.repositories[name] = Repository(private)
        return hub.repositories[name].commit(files, "exported")

    return put


@pytest.fixture
def index(toy, call, tmp_path):
    return lambda name, **changes: call("index", name, "--images", toy / "data", "--out", tmp_path / "index", **changes)


def refused(result, *words):
    status, printed = result
    assert status == 2 and printed.count("sfumato: ") == 1, printed
    assert all(word in printed for word in words), printed


def pulled(source, picture, out):
    import sfumato

    model = sfumato.load(source)
    texts, images = model.embed_texts(TEXTS), model.embed_images([picture])
    found = {"texts": texts.mean, "texts_log_var": texts.log_var, "image": images.mean, "image_log_var": images.log_var}
    found["probability"] = torch.as_tensor(model.probability(TEXTS, [picture]))
    save_file({key: torch.as_tensor(value).contiguous() for key, value in found.items()}, out)
    if model.calibration is not None:
        model.calibration.save(Path(out).with_name("calibration.json"))


picture_of = lambda toy: str(next((toy / "data").glob("*.png")))


@pytest.mark.slow
def test_a_run_on_the_hub_is_pulled_to_the_bit(toy, hub, call, push, tmp_path):
    sha = push("ann/toy")
    pulled(toy / "run", picture_of(toy), tmp_path / "run.safetensors")
    # The second time it comes from the cache.
    for source, endpoint in (("ann/toy", hub.address), (f"ann/toy@{sha}", "http://127.0.0.1:9")):
        out = tmp_path / "pulled.safetensors"
        assert call(source, picture_of(toy), out, function=pulled, HF_ENDPOINT=endpoint) == (0, "")
        found, expected = load_file(out), load_file(tmp_path / "run.safetensors")
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
        assert Calibration.load(out.with_name("calibration.json")) == load_run(toy / "run").calibration


def test_what_cannot_be_pulled_is_one_line(hub, push, index):
    push("ann/mine", private=True)
    refused(index("ann/mine", HF_TOKEN=BOB), "not there, or private", "HF_TOKEN")
    push("ann/toy")
    repository, whole = hub.repositories["ann/toy"], hub.repositories["ann/toy"].files
    repository.commit({key: value for key, value in whole.items() if key != "tokenizer.json"}, "less")
    refused(index("ann/toy"), "tokenizer.json")
    refused(index("ann/toy@no-such"), "no such revision (404")


def test_a_killed_download_is_never_half_a_model(toy, hub, environment, call, push, index, tmp_path):
    push("ann/toy")
    environment["HF_HOME"] = str(tmp_path / "elsewhere")
    out, n = tmp_path / "pulled.safetensors", len(hub.requests)
    hub.cut = 100_000
    hub.held.clear()
    first = Started(pulled, "ann/toy", picture_of(toy), out, env=environment)
    while not any(path.endswith("model.safetensors") and m == "GET" for m, path, _ in hub.requests[n:]):
        assert first.running and time.sleep(0.02) is None
    time.sleep(0.2)
    first.kill()
    first.finish()
    refused(index("ann/toy", HF_HUB_OFFLINE="1"), "no copy in its cache")
    hub.cut = None
    hub.held.set()
    assert call("ann/toy", picture_of(toy), out, function=pulled)[0] == 0
    pulled(toy / "run", picture_of(toy), tmp_path / "run.safetensors")
    assert torch.equal(load_file(out)["image"], load_file(tmp_path / "run.safetensors")["image"])


def card_of(folder):
    _, metadata, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return pytest.importorskip("yaml").safe_load(metadata), text


def test_the_card_is_what_the_hub_reads(toy, tmp_path, sfumato):
    ModelCard = pytest.importorskip("huggingface_hub").ModelCard
    run = shutil.copytree(toy / "run", tmp_path / "run")
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace('name = "toy"', 'name = "1.0"'))
    sfumato.printed("evaluate", "run", run, "--split", "test")
    values, text = card_of(export_run(run, tmp_path / "out", license="apache-2.0"))
    assert values["library_name"] == "sfumato" and values["license"] == "apache-2.0" and "base_model" not in values
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.model_name == "1.0"
    evaluation = json.loads((run / "evaluation-test-csd.json").read_text())
    results = {result.metric_type: result for result in card.data.eval_results}
    recalls = {f"{way}_recall@{k}": evaluation[way][f"recall@{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10)}
    assert {name: found.metric_value for name, found in results.items()} == pytest.approx(recalls, abs=5e-5)
    assert {(r.dataset_split, r.task_type) for r in results.values()} == {("test", "image-text-retrieval")}
    calibration = load_run(run).calibration
    assert f"{calibration.metadata['pairs']} pairs of the split val, of which {calibration.match_fraction:.2%}" in text
    assert "Licence: apache-2.0" in text and str(toy) not in text
    row = " | ".join(f"{100 * value:.1f}" for value in (*recalls.values(), evaluation["rsum"]))
    assert f"| test | csd | {evaluation['n_images']} | {evaluation['n_texts']} | {row} |" in text


@pytest.mark.slow
def test_a_frozen_model_of_a_folder_and_reference_queries_arrive(hub, call, push, sfumato, tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    model, run, out = tmp_path / "model", tmp_path / "run", tmp_path / "pulled.safetensors"
    data = two_colours(tmp_path)
    taught_clip(model, data)
    for private in (".env", "training_args.bin", "optimizer.pt"):
        (model / private).write_bytes(b"private")
    sfumato.printed("adopt", model, "--data", data, "--out", run)
    picture = str(tmp_path / "new.png")  # Features of the others are cached; a batch of many rounds otherwise.
    Image.new("RGB", (20, 14), "red").save(picture)
    pulled(run, picture, tmp_path / "run.safetensors")
    calibration = Calibration.load(run / "calibration.json")
    push("ann/frozen", run)
    files = hub.repositories["ann/frozen"].files
    assert {"encoder/config.json", "encoder/model.safetensors"} <= files.keys() and b"private" not in files.values()
    assert ("calibration.safetensors" in files) == bool(calibration.tensors())
    assert str(tmp_path).encode() not in files["config.json"] + files["README.md"]
    shutil.rmtree(model)
    shutil.rmtree(run)
    assert call("ann/frozen", picture, out, function=pulled)[0] == 0
    found, expected = load_file(out), load_file(tmp_path / "run.safetensors")
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert Calibration.load(out.with_name("calibration.json")) == calibration


def test_cards_say_what_was_measured(tmp_path):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(300, 8, generator=generator)
    texts = images.repeat_interleave(2, 0) + 0.3 * torch.randn(600, 8, generator=generator)
    adopt(images.numpy(), texts.numpy(), [(i // 2, i) for i in range(600)], tmp_path / "run")
    values, text = card_of(export_run(tmp_path / "run", tmp_path / "out"))
    adopted = json.loads((tmp_path / "run" / "adopted.json").read_text())
    assert "license" not in values and "Licence: unknown" in text and "pipeline_tag" not in values
    metrics = {one["type"]: one["value"] for one in values["model-index"][0]["results"][0]["metrics"]}
    assert metrics["t2i_recall@1"] == round(adopted["retrieval"]["t2i"]["recall@1"], 4)
    [first] = [one for one in adopted["hits"]["served"] if (one["direction"], one["hits"]) == ("t2i", 1)]
    line = re.search(r"First hits of (\d+) held-out queries, text to image: (.*)", text)
    assert int(line[1]) == first["n"] and f"expected calibration error {first['ece']:.1%}" in line[2]
    assert "Frozen, not trained here" in text
    for name in ("openai/clip", "open_clip:ViT-B-32/laion2b", "hf-hub:timm/ViT", "efficientnet-lite0", "a/b+c/d"):
        assert without_folders(name) == name
    assert without_folders(str(tmp_path / "mine")) == "mine" and without_folders("/no/such/one") == "one"


N, PER_IMAGE, C = 400, 3, 24


def frozen(seed=0, n=N, noise=0.35):
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((n, C)) + 0.4
    texts = np.repeat(images / np.linalg.norm(images, axis=1, keepdims=True), PER_IMAGE, axis=0)
    texts = texts + noise * rng.standard_normal(texts.shape) * rng.uniform(0.3, 1.2, (len(texts), 1))
    return images.astype(np.float32), texts.astype(np.float32), [(i // PER_IMAGE, i) for i in range(len(texts))]


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
    return adopt(*frozen(), tmp_path_factory.mktemp("adopt") / "run")


def test_embeddings_are_the_frozen_ones_and_rank_as_the_cosine_does(adopted):
    images, texts, _ = frozen()
    for embed, array in ((adopted.embed_images, images), (adopted.embed_texts, torch.from_numpy(texts))):
        found = embed(array)
        assert np.isneginf(found.log_var).all()
        expected = torch.nn.functional.normalize(torch.as_tensor(array), dim=1)
        torch.testing.assert_close(torch.as_tensor(found.mean), expected)
    exact = texts[:200].astype(np.float64) @ images.astype(np.float64).T / np.linalg.norm(images, axis=1)
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :10]
    for found, order in zip(adopted.index(images).search(texts[:200], k=10), expected.tolist(), strict=True):
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
    run, by_torch = load_run(adopted.run.folder), load_run(adopted.run.folder, trainable=True)
    assert run.calibrated and run.distance == by_torch.distance == "squared_l2"
    assert not [*by_torch.model.parameters()] and model_digest(run.model) == model_digest(by_torch.model)
    assert_alike = partial(np.testing.assert_allclose, rtol=1e-6)
    assert_alike(run.embed_images(frozen()[0]).mean, by_torch.embed_images(frozen()[0]).mean)
    written = json.loads((run.folder / ADOPTED).read_text())
    assert written["method"] == adopted.method and written["n_images"] == dict(adopted.n_images)
    assert sum(written["n_images"].values()) == N and written["hits"]["served"][0]["direction"] == "t2i"
    assert "AdoptedModel(" in repr(adopted) and "400 images" in repr(adopted)


@pytest.mark.slow
def test_every_command_takes_files(tmp_path, monkeypatch, sfumato):
    images, texts, pairs = frozen()
    images[5, 2] = np.nan
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "texts.npy", texts.astype(np.float16))
    write_csv(tmp_path / "pairs.csv", pairs, ("image", "text"))
    monkeypatch.chdir(tmp_path)
    command, files = sfumato.printed, ("--images", "images.npy", "--texts", "texts.npy", "--pairs", "pairs.csv")
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
    said = folded(command("trust", run))
    level = r"precision at 10: \S+ \[\S+ \S+\] \(chance \S+\); \S+ predicted, \S+ in a perfect order"
    assert "probability of the first hit" in said and re.search(level, said), said


@pytest.mark.parametrize(("change", "message"), [
    ({"texts": np.ones((9, C + 1), np.float32)}, "24 channels and texts 25"),
    ({"images": np.ones((N, C), int)}, "floating"), ({"pairs": [(0, 0, 0)]}, "expected \\(p, 2\\)"),
    ({"pairs": None}, "400 rows and"), ({"pairs": [(0, 99_999)]}, "is not a row number"),
    ({"method": "best"}, "unknown method"), ({"population": "wild"}, "unknown queries"),
    ({"images": "nothing.npy"}, "nothing.npy"),
])  # fmt: skip
@pytest.mark.usefixtures("windows")  # The tables that an error refers to are open.
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
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(adopting, "calibrate_split", lambda *args, **options: Calibration(2.0, 1.0, 0.1))


@pytest.mark.usefixtures("random_model")
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_model_by_its_folder_embeds_as_transformers_does(tmp_path, photographs, kind):
    model = tiny_clip(tmp_path / "model", kind)
    made = adopt_encoders(str(tmp_path / "model"), photographs, tmp_path / "run", method="distance", test_fraction=0)
    assert sum(made.n_images.values()) == 60 and made.run.calibration.logit_scale == 2
    run, captions = load_model(tmp_path / "run"), ["red square 3", "Blue"]
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    # SigLIP was trained on lower-case texts, and on padding that is not masked.
    padding, given = ("max_length", ["red square 3", "blue"]) if kind == "siglip" else (True, captions)
    tokens = tokenizer(given, padding=padding, max_length=12, truncation=True, return_tensors="pt")
    mask = None if kind == "siglip" else tokens["attention_mask"]
    with torch.inference_mode():
        features = model.get_text_features(tokens["input_ids"], mask)
        data = (photographs.parent / "photos/4.png").read_bytes()
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
        pixels = processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt")
        image = model.get_image_features(**pixels)
    for found, expected in ((run.model.embed_texts(captions), features), (run.model.embed_images([data]), image)):
        expected = expected if isinstance(expected, torch.Tensor) else expected.pooler_output
        expected = torch.nn.functional.normalize(expected, dim=1)
        torch.testing.assert_close(torch.as_tensor(found.mean), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("random_model")
def test_graphs_are_adopted_under_their_absolute_path_and_exported(tmp_path, photographs, monkeypatch):
    model, items = graphs.immich(tmp_path / "model"), [(photographs.parent / "photos/4.png").read_bytes()]
    monkeypatch.chdir(tmp_path)
    adopt_encoders("model", photographs, tmp_path / "run", method="distance", test_fraction=0)
    export_run(tmp_path / "run", tmp_path / "exported")
    of_image, of_text = load_model(model).embed_images(items).mean, load_model(model).embed_texts(["a dog"]).mean
    monkeypatch.chdir("/")
    for place in ("run", "exported"):
        found = load_model(tmp_path / place)
        np.testing.assert_allclose(found.embed_images(items).mean, of_image, atol=1e-6)
        np.testing.assert_allclose(found.embed_texts(["a dog"]).mean, of_text, atol=1e-6)
        shutil.rmtree(model, ignore_errors=True)
    raises(UserError, "the frozen model is not at", load_model, tmp_path / "run")


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
    write_csv(tmp_path / "pairs.csv", [(*pair, "train") for pair in pairs])
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
