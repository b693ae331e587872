"""Every addition of CONTRIBUTING, made in a copy of the package, works and passes the tests that its kind shares."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PART = re.compile(r"^- \*\*(?:An? )?([^*]+)\*\*: (.+?)(?=^- |^\n)", re.M | re.S)
PARTS = {name: " ".join(text.split()) for name, text in PART.findall((ROOT / "CONTRIBUTING.md").read_text())}
KINDS = ["distance", "loss", "encoder", "data source", "store", "estimator of uncertainty", "post-hoc method"]
KINDS += ["workflow and its command"]
SHARED = ("tests/test_distances.py", "tests/losses/test_shared.py", "papers/tests/posthoc/test_methods.py")
USED = """
import torch
from typer.testing import CliRunner
from PIL import Image
from sfumato.cli import app
from sfumato.data.images import Problems
from sfumato.data.sources import DataConfig, get_source
from sfumato.evaluation.estimators import ESTIMATORS, Matching
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.search.collection import GaussianCollection

keys = ["loss.name=mine", "loss.margin=2", "loss.distance=mine", "model.image.kind=mine", "model.image.size=32"]
recipe = load_recipe(find_recipe("emoji-pixels"), keys)
assert recipe.loss.margin == 2 and recipe.model.image.size == 32

x = GaussianEmbedding(torch.eye(4), torch.arange(16.0).view(4, 4))
assert ESTIMATORS["mine"](x, x, Matching("csd", 1.0, 0.0)).tolist() == x.var.amax(1).tolist()

Image.new("RGB", (9, 9), "red").save("red_car.jpg")
Image.new("RGB", (9, 9), "red").save("_.jpg")
problems = Problems()
config = DataConfig(source="mine", path=".", val_fraction=0, test_fraction=0)
(split,) = get_source("mine").read(config, problems).values()
assert list(split.texts) == ["red car"] and len(problems) == 1

with GaussianCollection.create("shop", "mine:shop", d=4, logit_scale=1.0, logit_bias=0.0) as made:
    made.upsert(x, list("abcd"))
    assert [found[0].id for found in made.search(GaussianEmbedding.point(x.mean), 1)] == list("aaaa")

result = CliRunner().invoke(app, ["peek", "shop", "-n", "1"])
assert result.stdout.strip() == '{"items": 4, "first": ["a"]}', result
"""


def enter(entry, registry, path, example, module):
    """Put an entry before the first of its kind in a registry, and import what it needs."""
    written = re.match(r'"mine": \w+$|[^(]*\(', entry)
    kind = r"\w+," if written is None else re.sub(r"\w+$", "", re.escape(written[0])).replace("mine", '[^"]+')
    source = path.read_text()
    at = re.compile(rf"^( +){kind}", re.M).search(source, re.search(rf"^{registry}\b", source, re.M).start())
    source = f"{source[: at.start()]}{at[1]}{entry},\n{source[at.start() :]}"
    names = [n.name for n in ast.parse(example).body if hasattr(n, "name") and re.search(rf"\b{n.name}\b", entry)]
    if names:
        imported = f"from {module} import {', '.join(names)}\nfrom sfumato"
        source = re.sub(r"^from sfumato", imported, source, count=1, flags=re.M)
    path.write_text(source)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    top, changed = tmp_path_factory.mktemp("package"), {}
    for name in ("src/sfumato", "papers", "recipes", "tests/support"):
        shutil.copytree(ROOT / name, top / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*SHARED, "tests/conftest.py"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, top / name)
    for part, text in PARTS.items():
        module, example = "", ""
        written = re.findall(r"`((?:src|papers)/\S+)`(?: gets)?[^`]*? like \[\S+\]\((\S+)\)", text)
        written += re.findall(r"`(src/\S+)` a command like \[\S+\]\((\S+)\)", text)
        for target, source in dict(written).items():
            example = (ROOT / source).read_text()
            with (top / target).open("a") as file:
                file.write("\n\n" + example)
            module = target.removeprefix("src/").removesuffix(".py").replace("/", ".")
        entries = re.findall(r"`([^`]+)` goes into `(\w+)` of `(\S+)`", text)
        for entry, registry, target in entries:
            enter(entry, registry, top / target, example, module)
        changed[part] = {*dict(written), *(target for *_, target in entries), *re.findall(r"`(tests/\S+)` gets", text)}
    with (top / "tests/support/references.py").open("a") as file:
        file.write((ROOT / "tests/additions/references.py").read_text())
    return top, changed


def run(top, *words):
    path = os.pathsep.join([str(top), str(top / "src"), str(top / "tests")])
    told = {"cwd": top, "env": os.environ | {"PYTHONPATH": path}, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *words], **told)


@pytest.mark.slow
def test_every_addition_is_at_most_three_edits_and_works(made):
    top, changed = made
    assert list(changed) == KINDS
    assert all(1 <= len(files) <= 3 for files in changed.values()), changed
    done = run(top, "-c", USED)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_additions_pass_the_tests_that_their_kind_shares(made):
    top, _ = made
    done = run(top, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "mine or Mine", *SHARED)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 10
