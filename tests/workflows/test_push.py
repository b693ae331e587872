"""A run pushed to a stand-in of the hub and pulled again is the run, to the bit; what goes wrong is one line."""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.hub import NEW, READS, WRITES, Hub
from support.processes import Started, command
from support.tiny_models import taught_clip, two_colours
from support.words import folded

from sfumato.calibration.calibrator import Calibration
from sfumato.models.run import PACKAGED, SMALL, load_run
from sfumato.workflows.adopt import adopt
from sfumato.workflows.export import export_run
from sfumato.workflows.model_card import without_folders

pytest.importorskip("huggingface_hub", reason="the extra backbones is not installed")
yaml = pytest.importorskip("yaml", reason="comes with huggingface_hub")

TEXTS = ["a red circle", "some bar in blue", "never seen before"]
FILES = ["README.md", "calibration.json", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture
def environment(hub, tmp_path):
    return {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": WRITES,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


@pytest.fixture
def call(environment):
    """Runs a command in a process of its own, as the hub's client reads its settings once; (status, what it prints)."""

    def run(*arguments, function=command, **changes):
        status, printed = Started(function, *arguments, env={**environment, **changes}).finish()
        assert environment["HF_TOKEN"] not in printed and "Traceback" not in printed, printed
        return status, folded(printed)

    return run


@pytest.fixture
def push(toy, call):
    """Exports the toy run, or another, to a name on the hub."""
    return lambda *arguments, run=toy / "run", **changes: call("export", run, "--push", *arguments, **changes)


@pytest.fixture
def index(toy, call, tmp_path):
    """Indexes the toy pictures with a model by its name."""
    return lambda name, **changes: call("index", name, "--images", toy / "data", "--out", tmp_path / "index", **changes)


def refused(result, *words):
    status, printed = result
    assert status == 2 and printed.count("sfumato: ") == 1, printed
    assert all(word in printed for word in words), printed


def pulled(source, picture, out):
    """Loads a model by its name, and writes what it says of texts and a picture."""
    import sfumato

    model = sfumato.load(source)
    texts, images = model.embed_texts(TEXTS), model.embed_images([picture])
    found = {"texts": texts.mean, "texts_log_var": texts.log_var, "image": images.mean, "image_log_var": images.log_var}
    found["probability"] = torch.as_tensor(model.probability(TEXTS, [picture]))
    save_file({key: value.contiguous() for key, value in found.items()}, out)
    if model.calibration is not None:
        model.calibration.save(Path(out).with_name("calibration.json"))


def copy_of(run, folder):
    return Path(shutil.copytree(run, folder))


def picture_of(toy):
    return str(next((toy / "data").glob("*.png")))


def test_a_pushed_run_is_pulled_to_the_bit(toy, hub, call, push, tmp_path):
    status, printed = push("ann/toy")
    assert status == 0
    repository = hub.repositories["ann/toy"]
    sha, files, _ = repository.commits[0]
    assert f"{hub.address}/ann/toy, as commit {sha}" in printed and 'sfumato.load("ann/toy")' in printed
    assert sorted(files) == [".gitattributes", *FILES] and not repository.private
    assert len(repository.commits) == 2, "the first commit of a repository, and ours"
    with_token = {token for _, path, token in hub.requests if path.startswith(("/api/repos", "/api/models", "/ann"))}
    assert with_token == {WRITES}
    export_run(toy / "run", tmp_path / "same")
    for name in FILES[1:]:
        assert files[name] == (tmp_path / "same" / name).read_bytes()

    pulled(toy / "run", picture_of(toy), tmp_path / "run.safetensors")
    for source in ("ann/toy", f"ann/toy@{sha}"):
        out = tmp_path / "pulled.safetensors"
        assert call(source, picture_of(toy), out, function=pulled) == (0, "")
        found, expected = load_file(out), load_file(tmp_path / "run.safetensors")
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
        assert Calibration.load(out.with_name("calibration.json")) == load_run(toy / "run").calibration
    before = len(hub.requests)
    status, _ = call(f"ann/toy@{sha}", picture_of(toy), out, function=pulled, HF_ENDPOINT="http://127.0.0.1:9")
    assert status == 0 and len(hub.requests) == before, "the second time it comes from the cache"
    assert call("ann/toy", picture_of(toy), out, function=pulled, HF_HUB_OFFLINE="1")[0] == 0


def test_a_second_push_changes_what_changed(toy, hub, call, push, tmp_path):
    name = "toy"  # Without an owner it is that of the token.
    assert push(name)[0] == 0
    before, n = hub.repositories["ann/toy"].commits[0], len(hub.requests)
    status, printed = push(name, "--json")
    result = json.loads(printed[printed.index("{") :])
    assert status == 0 and result["commit"] == before[0] and result["changed"] is False
    assert len(hub.repositories["ann/toy"].commits) == 2 and not any(m == "PUT" for m, *_ in hub.requests[n:])
    changed, n = copy_of(toy / "run", tmp_path / "run"), len(hub.requests)
    for file in ("calibration.json", "calibration.safetensors"):  # With reference queries, which the toy lacks.
        shutil.copy(PACKAGED / SMALL / file, changed)
    assert push(name, run=changed)[0] == 0
    assert "calibration.safetensors" in hub.repositories["ann/toy"].files
    assert call("ann/toy", picture_of(toy), tmp_path / "pulled.safetensors", function=pulled)[0] == 0
    found, expected = (Calibration.load(folder / "calibration.json") for folder in (tmp_path, changed))
    assert found.to_json() == expected.to_json()
    assert all(torch.equal(found.tensors()[key], value) for key, value in expected.tensors().items())
    (changed / "calibration.json").unlink()
    status, _ = push(name, "--license", "mit", run=changed)
    _, files, _ = hub.repositories["ann/toy"].commits[0]
    assert status == 0 and len(hub.repositories["ann/toy"].commits) == 4
    assert sorted(files) == [".gitattributes", *[name for name in FILES if name != "calibration.json"]]
    assert b'license: "mit"' in files["README.md"] and b"not calibrated" in files["README.md"]
    assert len([m for m, *_ in hub.requests[n:] if m == "PUT"]) == 1, "the reference queries; the weights are the same"


def test_private_repositories(hub, push, index):
    assert push("ann/mine", "--private")[0] == 0 and hub.repositories["ann/mine"].private
    refused(index("ann/mine", HF_TOKEN=NEW), "not there, or private", "HF_TOKEN")
    assert push("ann/open")[0] == 0
    n = len(hub.repositories["ann/open"].commits)
    refused(push("ann/open", "--private"), "ann/open exists and is public", "leave --private out")
    assert len(hub.repositories["ann/open"].commits) == n


def test_refusals_of_the_hub_are_one_line(hub, push, call, toy, tmp_path):
    refused(push("ann/toy", HF_TOKEN=""), "no token", "hf auth login", "HF_TOKEN")
    refused(push("ann/toy", HF_TOKEN="hf_nobody"), "does not accept the token (401", "hf auth login")
    refused(push("toy", HF_TOKEN="hf_nobody"), "does not accept the token (401", "hf auth login")
    refused(push("ann/toy", HF_TOKEN=READS), "forbids it to this token (403", "write access to ann/toy")
    refused(push("bob/toy"), "forbids it to this token (403", "under the namespace 'bob'", "a name below your own")
    refused(push("ann/toy/more"), "has the form OWNER/NAME")
    refused(push("ann/toy", HF_ENDPOINT="http://127.0.0.1:9"), "no connection to the hub at http://127.0.0.1:9")
    refused(push("ann/toy", HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE is set")
    assert not hub.repositories and not (tmp_path / "out").exists()
    refused(call("export", toy / "run"), "give OUT, a folder, or --push OWNER/NAME")
    refused(push("ann/toy", run=tmp_path), "is not a run folder")
    assert not hub.repositories, "what cannot be exported is not pushed"


def test_without_the_client_of_the_hub_it_says_what_to_install(toy, monkeypatch, sfumato):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'sfumato[backbones]'" in folded(sfumato.refused("export", toy / "run", "--push", "ann/toy"))


def test_a_push_that_fails_leaves_nothing_half(hub, push, tmp_path, toy):
    out = tmp_path / "out"
    hub.refuse = lambda method, path: 503 if "/commit/" in path else None
    refused(
        push("ann/toy", run=f"{toy / 'run'}", HF_TOKEN=WRITES),
        "(503, the hub has a bad day with ***). Run the same command",
    )
    assert sorted(hub.repositories["ann/toy"].files) == [".gitattributes"]
    others = []

    def meanwhile(method, path):
        if "/preupload/" in path and not others:
            others.append(hub.repositories["ann/toy"].commit({".gitattributes": b"theirs"}, "meanwhile"))

    hub.refuse = meanwhile
    refused(push("ann/toy"), "A commit has happened since", "Run the same command again")
    assert hub.repositories["ann/toy"].commits[0][0] == others[0]
    refused(push("ann/toy", "--license", "mitt"), "no file was changed there", '"license" must be one of')
    assert sorted(hub.repositories["ann/toy"].files) == [".gitattributes"] and not out.exists()
    assert push("ann/toy", out)[0] == 0
    assert sorted(path.name for path in out.iterdir()) == FILES
    refused(push("ann/toy", out), "exists already")


def test_what_others_wrote_stays(hub, push):
    assert push("ann/toy")[0] == 0
    repository = hub.repositories["ann/toy"]
    theirs = {"README.md": b"# A", "config.json": b'{"model_type": "clip"}', "pytorch_model.bin": b"x"}
    repository.commit(theirs, "theirs")
    refused(push("ann/toy"), "holds files that sfumato did not write (README.md, config.json, pytorch_model.bin)")
    assert repository.files == theirs
    assert push("ann/toy", "--force")[0] == 0
    assert sorted(repository.files) == [*FILES[:-1], "pytorch_model.bin", "tokenizer.json"]
    repository.commit({**repository.files, "diary.txt": b"x"}, "beside a model of ours")
    assert push("ann/toy", "--license", "mit")[0] == 0 and repository.files["diary.txt"] == b"x"


def test_a_killed_download_is_never_half_a_model(toy, hub, environment, call, push, index, tmp_path):
    assert push("ann/toy")[0] == 0
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


def test_incomplete_repositories_say_what_lacks(hub, push, index):
    assert push("ann/toy")[0] == 0
    repository, whole = hub.repositories["ann/toy"], hub.repositories["ann/toy"].files
    for name in ("model.safetensors", "tokenizer.json", "calibration.json"):
        repository.commit({key: value for key, value in whole.items() if key != name}, "less")
        refused(index("ann/toy"), name)
    refused(index("ann/toy@no-such"), "no such revision (404")


def card_of(folder):
    """(metadata, text) of a model card."""
    _, metadata, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_the_card_is_what_the_hub_reads(toy, tmp_path, sfumato):
    from huggingface_hub import ModelCard

    run = copy_of(toy / "run", tmp_path / "run")
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace('name = "toy"', 'name = "1.0"'))
    sfumato.printed("evaluate", "run", run, "--split", "test")
    values, text = card_of(export_run(run, tmp_path / "out", license="apache-2.0"))
    assert values["library_name"] == "sfumato" and values["license"] == "apache-2.0" and "base_model" not in values
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.model_name == "1.0"
    evaluation = json.loads((run / "evaluation-test-csd.json").read_text())
    results = {result.metric_type: result for result in card.data.eval_results}
    assert len(results) == 6
    for way in ("i2t", "t2i"):
        for k in (1, 5, 10):
            found = results[f"{way}_recall@{k}"]
            assert found.metric_value == pytest.approx(evaluation[way][f"recall@{k}"], abs=5e-5)
            assert found.dataset_split == "test" and found.task_type == "image-text-retrieval"
    calibration = load_run(run).calibration
    assert f"{calibration.metadata['pairs']} pairs of the split val, of which {calibration.match_fraction:.2%}" in text
    assert "Licence: apache-2.0" in text and str(toy) not in text


def test_the_card_of_an_adopted_model_says_what_was_measured(tmp_path):
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


def test_the_pushed_card_loads_by_name(hub, push):
    assert push("ann/toy")[0] == 0
    card = hub.repositories["ann/toy"].files["README.md"].decode()
    assert "pip install 'sfumato[backbones]'" in card and "this folder" not in card
    assert 'load("ann/toy")' in card and "sfumato index ann/toy --images" in card


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
    assert push("ann/frozen", run=run)[0] == 0
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


def test_names_of_models_stay_and_folders_do_not(tmp_path):
    for name in ("openai/clip", "open_clip:ViT-B-32/laion2b", "hf-hub:timm/ViT", "efficientnet-lite0", "a/b+c/d"):
        assert without_folders(name) == name
    assert without_folders(str(tmp_path / "mine")) == "mine" and without_folders("/no/such/one") == "one"
