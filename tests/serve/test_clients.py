"""Clients that generators make from /openapi.json work: `make clients` installs the generators, and runs this.
The generators are those of the guide, in an environment of their own: the Python one needs another typer than ours."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serve.test_guide import GUIDE, section
from support.serving import KEY, served

from sfumato.serve.settings import open_sources

TOOLS = Path(__file__).parents[2] / "build" / "clients"
pytestmark = pytest.mark.skipif(
    not (TOOLS / "node_modules").exists(), reason="build/clients has no generators of clients: run make clients"
)


def blocks(language):
    text = section(GUIDE.read_text(encoding="utf-8"), "Clients")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def service(squares, tmp_path):
    folder = shutil.copytree(squares, tmp_path / "index")
    with served(open_sources(folder), keys=(KEY,), judgements=tmp_path / "verdicts.jsonl") as client:
        yield client


def run(folder, *words):
    path = os.pathsep.join(map(str, (TOOLS / "bin", Path(sys.executable).parent, os.environ["PATH"])))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder), "NO_PROXY": "*"}
    done = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "arning" not in done.stdout + done.stderr, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def generated(service, folder, which):
    (folder / "openapi.json").write_text(service.get("/openapi.json").text)
    (folder / "client.yaml").write_text(blocks("yaml")[0])
    (folder / "node_modules").symlink_to(TOOLS / "node_modules")
    for language, name in (("python", "search.py"), ("typescript", "search.mts")):
        example = (
            blocks(language)[0].replace("127.0.0.1:8000", service.base_url.netloc.decode()).replace('"KEY"', f'"{KEY}"')
        )
        (folder / name).write_text(example)
    (lines,) = (block for block in blocks("bash") if which in block)
    commands = [shlex.split(line, comments=True) for line in lines.splitlines()]
    return [run(folder, *words) for words in commands if words[0] not in ("curl", "pip", "npm")][-1]


def check_example(printed, service):
    (answer,) = service.get("/v1/search", params={"q": "an orange animal", "max_results": 3}).json()["answers"]
    assert [line.split()[0] for line in printed.splitlines()] == [hit["id"] for hit in answer["hits"]]


def test_a_python_client(service, tmp_path):
    check_example(generated(service, tmp_path, "openapi-python-client"), service)
    run(tmp_path, sys.executable, "-m", "mypy", "--strict", "search.py")


def test_a_typescript_client(service, tmp_path):
    check_example(generated(service, tmp_path, "openapi-typescript"), service)
