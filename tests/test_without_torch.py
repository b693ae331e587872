"""The road of a person who searches, where torch is not installed, and where it is and nothing may load it."""

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import graphs
from support.hub import Hub, Repository
from support.raising import raises
from support.toy import make_toy

import sfumato
from sfumato import load
from sfumato.workflows.export import export_run

ABSENT = 'raise ModuleNotFoundError("No module named {0!r}", name="{0}")\n'
WATCH = """import atexit, sys
atexit.register(lambda: "torch" in sys.modules and print("TORCH WAS LOADED", file=sys.stderr))
"""
SCORES = """import numpy as np, sfumato
rng = np.random.default_rng(0)
label = rng.random((300, 10)) < .2
score = label + rng.standard_normal(label.shape)
groups = np.repeat(np.arange(300), 10)
score, label = score.ravel(), label.ravel()
p = sfumato.ScoreCalibrator().fit(score, label, groups=groups).predict_proba(score, groups=groups)
assert abs(p[:, 1].mean() - label.mean()) < .02
e = sfumato.GaussianEmbedding(rng.standard_normal((5, 3)), np.zeros((5, 3)))
d = sfumato.csd_matrix(e, e)
assert np.allclose(sfumato.match_probability(d, 1, 7), 1 / (1 + np.exp(d - 7)))
print(sfumato.load_index("collection").search("a red circle", k=3))
"""


class Shell:
    def __init__(self, folder: Path, modules: dict[str, str]) -> None:
        self.folder, own = folder, folder / "modules"
        own.mkdir()
        for name, code in modules.items():
            (own / f"{name}.py").write_text(code)
        source = str(Path(sfumato.__file__).parents[1])
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(own), source)), "COLUMNS": "100"}

    def start(self, *arguments, **options):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, **options)

    def __call__(self, *arguments, status=0):
        process = self.start("-m", "sfumato", *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == status and "Traceback" not in printed, (arguments, printed)
        assert "TORCH WAS LOADED" not in printed, arguments
        return printed


@pytest.fixture(scope="module", params=["absent", "not loaded"])
def shell(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("road")
    make_toy(folder, n_each=2)
    (folder / "data").rename(folder / "pictures")
    absent = {name: ABSENT.format(name) for name in ("torch", "adamp")}
    return Shell(folder, absent if request.param == "absent" else {"sitecustomize": WATCH})


def test_the_whole_road(shell):
    folder = shell.folder
    shell("index", "--data", "pictures", "--out", "collection")
    assert json.loads(shell("search", "collection", "a red circle", "-k", "3", "--json"))
    by_image = shell("search", "collection", "--image", sorted((folder / "pictures").glob("*.png"))[0], "-k", "3")
    assert "000.png" in by_image
    more = folder / "more"
    more.mkdir()
    (more / "new.png").write_bytes((folder / "pictures" / "001.png").read_bytes())
    assert "(1 new)" in shell("index", "--data", "more", "--add", "--out", "collection")
    (folder / "pictures" / "late.png").write_bytes((folder / "pictures" / "001.png").read_bytes())
    shell("index", "--sync", "--out", "collection")
    shell("delete", "collection", "late.png")
    shell("copy", "collection", "copied")
    (folder / "scores.py").write_text(SCORES)
    process = shell.start("scores.py", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "TORCH" not in printed, printed


def test_an_exported_run_answers_as_the_run_does(shell, toy):
    folder = shell.folder
    export_run(toy / "run", folder / "exported", graphs=True)
    shell("index", "exported", "--images", "pictures", "--out", "of-graphs")
    found = json.loads(shell("search", "of-graphs", "a red circle", "-k", "3", "--json"))[0]["hits"]
    expected = load(toy / "run").index(folder / "pictures").search("a red circle", k=3)
    assert [hit["id"] for hit in found] == [hit.id for hit in expected]
    np.testing.assert_allclose([hit["distance"] for hit in found], [hit.distance for hit in expected], rtol=1e-4)


def test_graphs_of_the_hub_and_of_two_folders(shell, tmp_path):
    files = lambda folder: {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    graphs.transformers_js(tmp_path / "clip")
    graphs.fastembed(tmp_path / "halves")
    (tmp_path / "clip" / "onnx" / "model_q4.onnx").write_bytes(b"not needed")
    folder, of_halves = lambda name: name.replace("/", "-"), ("--images", "pictures", "--out", "own")
    index = lambda name, **status: shell("index", name, "--images", "pictures", "--out", folder(name), **status)
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        for name, place in (("clip", "clip"), ("vision", "halves/vision"), ("text", "halves/text")):
            hub.repositories[f"ann/{name}"] = Repository()
            hub.repositories[f"ann/{name}"].commit(files(tmp_path / place), "made")
        own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        for key, value in (own | {"HF_HUB_DISABLE_XET": "1"}).items():
            patch.setitem(shell.environment, key, value)
        for name in ("ann/clip", "ann/vision+ann/text"):
            assert " images in " in index(name) and ".png" in shell("search", folder(name), "a red dog", "-k", "50")
        shell("adopt", "ann/vision+ann/text", "--data", graphs.fitting_pairs(tmp_path / "pairs"), "--out", "run-of-two")
        shell("index", "run-of-two", "--split", "all", "--out", "of-adopted")
        assert not any(path.endswith("model_q4.onnx") for _, path, _ in hub.requests)
        assert "not there" in index("ann/none", status=2)
        patch.setitem(shell.environment, "HF_HUB_OFFLINE", "1")
        assert ".png" in shell("search", "ann-clip", "a red dog", "-k", "50"), "from the cache"
        found = json.loads(shell("search", "of-adopted", "a red dog", "--json"))[0]["hits"]
        assert 0 < found[0]["match_probability"] < 1, "adopted, from the cache"
        relative = os.path.relpath(tmp_path / "halves/vision", shell.folder)
        shell("index", f"{relative}+{tmp_path}/halves/text", *of_halves)
        answers = [json.loads(shell("search", name, "a dog", "--json")) for name in ("own", "ann-vision+ann-text")]
        assert answers[0][0]["hits"] == answers[1][0]["hits"]
        shutil.rmtree(tmp_path / "halves")
        assert "is not at" in shell("search", "own", "a dog", status=2)


def test_the_service(shell):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if not (shell.folder / "collection").exists():
        shell("index", "--data", "pictures", "--out", "collection")
    with (shell.folder / "log.txt").open("w") as log:
        process = shell.start("-m", "sfumato", "serve", "collection", "--port", port, stdout=log, stderr=log)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
    try:
        for _ in range(240):
            try:
                if client.get("/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, (shell.folder / "log.txt").read_text()
            time.sleep(0.25)
        answer = client.get("/v1/search", params={"q": "a red circle", "max_results": 3})
        assert answer.status_code == 200 and len(answer.json()["answers"][0]["hits"]) == 3, answer.text
        image = base64.b64encode((shell.folder / "pictures" / "000.png").read_bytes()).decode()
        answer = client.post("/v1/search", json={"queries": [{"image": image}], "max_results": 1})
        assert answer.status_code == 200, answer.text
        assert client.get("/").status_code == 200
    finally:
        process.terminate()
        process.wait(60)
    assert "TORCH WAS LOADED" not in (shell.folder / "log.txt").read_text()


def test_arrays_are_adopted_searched_calibrated_and_evaluated_and_runs_of_other_engines_scored(shell):
    rng, folder = np.random.default_rng(0), shell.folder
    images = rng.standard_normal((300, 8)).astype(np.float32)
    np.save(folder / "of-images.npy", images)
    np.save(folder / "of-texts.npy", texts := images + 0.5 * rng.standard_normal((300, 8)).astype(np.float32))
    np.save(folder / "query.npy", texts[7])
    files = ("--images", "of-images.npy", "--texts", "of-texts.npy")
    shell("adopt", *files, "--out", "adopted")
    shell("index", "adopted", "--split", "all", "--out", "of-arrays")
    found = json.loads(shell("search", "of-arrays", "query.npy", "-k", "3", "--json"))[0]["hits"]
    assert found[0]["id"] == "7" and 0 < found[0]["match_probability"] <= 1
    assert "t2i" in json.loads(shell("calibrate", "adopted", "--json"))
    result = json.loads(shell("evaluate", "run", "adopted", "--json"))
    assert result["t2i"]["recall@1"] > 0.5 and (folder / "adopted" / "evaluation-test-squared_l2.json").is_file()
    assert "emoji-demo" in shell("recipes")

    (folder / "truth.csv").write_text("image,text\n" + "".join(f"{i},{i}\n" for i in range(300)))
    assert "recall@1" in shell("evaluate", "files", *files, "--truth", "truth.csv")
    rows = [f"q{i // 10} Q0 {i % 10} 1 {score:.4f} x" for i, score in enumerate(rng.random(1000))]
    (folder / "engine.run").write_text("\n".join(rows) + "\n")
    verdicts = [f"q{i // 10} 0 {i % 10} {int(rng.random() < 0.3)}" for i in range(1000)]
    (folder / "verdicts.qrels").write_text("\n".join(verdicts) + "\n")
    shell("calibrate", "--run", "engine.run", "--qrels", "verdicts.qrels", "--out", "scores.json")
    shell("score", "--run", "engine.run", "--calibrator", "scores.json", "--out", "scored.jsonl")
    assert len((folder / "scored.jsonl").read_text().splitlines()) == 100


def test_what_needs_torch_says_how_to_get_it_and_an_error_of_another_kind_stays(shell, monkeypatch):
    if "torch" not in {path.stem for path in (shell.folder / "modules").iterdir()}:
        pytest.skip("torch is there")
    (shell.folder / "run").mkdir()
    (shell.folder / "run" / "recipe.toml").touch()
    index = "--images", "pictures", "--out", "other"
    trained = (("index", model, *index) for model in ("run", "someone/model"))
    for arguments in (("demo",), ("train", "emoji-pixels", "--out", "new"), *trained):
        assert re.search(r'pip install "sfumato\[train\]"', shell(*arguments, status=2)), arguments
    (shell.folder / "loss.py").write_text("import sfumato\nsfumato.PCMEPPLoss\n")
    process = shell.start("loss.py", stderr=subprocess.PIPE)
    assert 'sfumato.PCMEPPLoss needs torch: pip install "sfumato[train]"' in process.communicate()[1]
    monkeypatch.setattr(sfumato, "_load", lambda name: (_ for _ in ()).throw(ModuleNotFoundError("x", name="x")))
    raises(ModuleNotFoundError, "x", sfumato.__getattr__, "Model")
