"""The commands of the guides are run as they are printed, in their order, against the services that the guide means."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.serving import Process, calibration, collected, embedded

from sfumato.models.run import load_run
from sfumato.search.index import copy_gallery
from sfumato.workflows.index import GalleryPart

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "guides" / "serve.md"
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def commands(text):
    return [line.strip() for line in text.splitlines() if re.match(r"(    )?\S*(curl|python3) .*127\.0\.0\.1", line)]


def section(text, heading):
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / ".curlrc").write_text('fail-with-body\nsilent\nshow-error\nnoproxy = "*"\nmax-time = 30\n')
    return folder


def shell(command, home, port):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    line = ["bash", "-c", f"set -o pipefail; {command.replace('127.0.0.1:8000', f'127.0.0.1:{port}')}"]
    environment = {**os.environ, "PATH": path, "HOME": str(home), "CURL_HOME": str(home)}
    done = subprocess.run(line, cwd=home, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def service(run, data, tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("served"), load_run(run)
    pictures = folder / "pictures"
    for i, path in enumerate(sorted(data.glob("*.png"))[:12]):
        target = pictures / ("1F98A/fluent3d" if i == 0 else f"{i}.png")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target.with_suffix(".png"))
    images = embedded(model, pictures)
    ids = [one.removesuffix(".png") if "1F98A" in one else one for one in images.ids]
    os.rename(pictures / "1F98A/fluent3d.png", pictures / "1F98A/fluent3d")
    images = replace(images, ids=ids, kept={"place": ["wood" if i % 2 else "zoo" for i in range(len(ids))]})
    words = [f"a {c} {s}" for c in ("red", "green", "blue") for s in ("circle", "square", "cross")]
    texts = GalleryPart(model.model.embed_texts(words), [f"text {i}" for i in range(len(words))], words)
    model = replace(model, calibrated=True, calibration=calibration(texts.embeddings, images.embeddings))
    galleries = (collected(model, part, folder / name) for part, name in ((images, "images"), (texts, "texts")))
    process = Process(next(galleries), next(galleries), "--judgements", folder / "verdicts.jsonl")
    yield process
    process.end(signal.SIGTERM)


def test_the_commands_of_the_guide(service, home):
    text = GUIDE.read_text(encoding="utf-8")
    vectors, told = commands(section(text, "Search by vector")), {}
    for command in commands(text):
        if command not in vectors:
            told[command] = shell(command, home, service.client.base_url.port)
    assert len(told) >= 14
    files = [command for command in told if " -o " in command]
    assert not any(told.pop(command) for command in files)
    told = {command: json.loads(answer) for command, answer in told.items()}
    found = [one for command, answer in told.items() if "search" in command for one in answer["answers"]]
    assert all(told.values()) and all(one["hits"] for one in found)
    with Image.open(home / "small.png") as small:
        assert 0 < max(small.size) <= 64
    created = next(answer for command, answer in told.items() if "place" in command and "items" in command)
    gone = next(answer for command, answer in told.items() if "/v1/items/delete" in command)
    assert created["created"] == gone["deleted"] == 1


def test_the_commands_about_vectors_and_no_other_page_has_some_that_nobody_runs(vector_run, adopted, tmp_path, home):
    text = section(GUIDE.read_text(encoding="utf-8"), "Search by vector")
    copy_gallery(adopted.galleries["images"].gallery, tmp_path / "index").close()
    np.save(home / "vector.npy", np.load(vector_run.parent / "texts.npy")[0])
    process = Process(tmp_path / "index")
    try:
        port = process.client.base_url.port
        info, searched = (json.loads(shell(command, home, port)) for command in commands(text))
        assert info["query_kinds"]["vector"] == {"text": 5, "image": 6} and searched["answers"][0]["hits"]
    finally:
        process.end(signal.SIGTERM)
    others = [path for path in DOCS.rglob("*.md") if path != GUIDE]
    assert [path for path in others if commands(path.read_text(encoding="utf-8"))] == []
