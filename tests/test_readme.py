"""The README's blocks run, its commands exist, and the paths that it and the docs name are there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.toy import make_toy

from sfumato.cli import app
from sfumato.models.recipe import find_recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_python_blocks_run():
    assert blocks("python")
    for block in blocks("python"):
        subprocess.run([sys.executable, "-c", block], check=True, capture_output=True)


def test_the_block_about_stores_runs(tmp_path):
    [block] = blocks("python", (ROOT / "docs" / "stores.md").read_text(encoding="utf-8"))
    said = subprocess.run(
        [sys.executable, "-c", block], check=True, capture_output=True, text=True, cwd=tmp_path
    ).stdout
    assert said.count("\n") == 3 and said.count("'colour': 'red'") == 3


def test_shell_blocks_run(tmp_path):
    make_toy(tmp_path)
    shutil.move(tmp_path / "data", tmp_path / "pictures")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "sfumato"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sfumato "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    script = "".join(blocks("sh"))
    result = subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "matches expected" in result.stdout and "recall@1" in result.stdout


def test_commands_that_need_data_or_a_network_name_what_exists():
    stores = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")
    every = [*blocks("bash"), *blocks("bash", stores)]
    lines = [line for block in every for line in block.splitlines() if line and not line.startswith(("#", "pip "))]
    served = (ROOT / "src" / "sfumato" / "serve" / "app.py").read_text(encoding="utf-8")
    assert lines
    for line in lines:
        if line.startswith("curl "):
            assert f'"{re.search(r"127.0.0.1:8000(/[a-z0-9/]+)", line)[1]}"' in served, line
            continue
        command = line.split("sfumato ", 1)[1].split()
        assert command[0] in {c.callback.__name__ for c in app.registered_commands} | {
            g.name for g in app.registered_groups
        }
        if command[0] == "train":
            load_recipe(find_recipe(command[1]), shlex.split(" ".join(command[2:]), comments=True))


def test_tests_that_the_mathematics_name_exist():
    named = re.findall(r"`((?:[\w]+/)?test_\w+\.py)::(\w+)`", (ROOT / "docs" / "math.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert not missing


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"make (\w+)", "".join(blocks("console")))
    assert targets and all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


@pytest.mark.parametrize(
    "document",
    [
        *(
            "README.md",
            "CONTRIBUTING.md",
            "docs/decisions.md",
            "docs/math.md",
            "docs/log.md",
            "docs/trust.md",
            "docs/analysis.md",
        ),
        *(
            "docs/ingest.md",
            "docs/stores.md",
            "docs/service.md",
            "docs/calibration.md",
            "docs/audit.md",
            "docs/zeroshot.md",
        ),
    ],
)
def test_named_paths_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:src|tests|docs|recipes|benchmarks|scripts|losses|search|encoders|training|metrics|evaluation|data)/[\w./-]*)`",
        text,
    )
    named += [link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    places = (ROOT, ROOT / "src" / "sfumato", ROOT / "docs")
    missing = [path for path in named if not any((place / path).exists() for place in places)]
    assert not missing


def test_no_path_of_one_machine_and_no_foreign_folder():
    for path in [
        p
        for p in ROOT.rglob("*")
        if p.suffix in {".py", ".md", ".toml"} and not {".venv", "runs", ".git"} & set(p.parts)
    ]:
        if path != Path(__file__) and path.name != "NOTE_TO_HELPERS.md":
            assert not re.search(r"(?<![\w.])/(?:work|root|home)/", path.read_text(encoding="utf-8")), path
