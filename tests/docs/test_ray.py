"""The recipe of the guide for Ray Data, as printed, against `sfumato index --images`."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.models.run import load_model
from sfumato.search.collection import GaussianCollection
from sfumato.workflows.index import embed_source

pytestmark = pytest.mark.engine
pytest.importorskip("ray", reason="needs Ray: pip install 'ray[data]'")
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "ingest.md"
printed = lambda language: GUIDE.read_text(encoding="utf-8").split(f"```{language}\n")[1].partition("```")[0]


def test_the_recipe_as_printed_gives_what_the_command_gives(tmp_path, sfumato, monkeypatch):
    chance = np.random.default_rng(3)
    for k in range(70):  # More than one batch.
        path = tmp_path / "pictures" / f"{'a' if k % 3 else 'b'}" / f"{k:03d}.{'png' if k % 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = chance.integers(0, 256, (3, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((50 + k, 64), Image.Resampling.BICUBIC).save(path)
    (tmp_path / "recipe.py").write_text(printed("python"))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as short:  # Ray's sockets lie below it.
        environment = {**os.environ, "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH"))))
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "recipe.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.chdir(tmp_path)
    sfumato.printed(*shlex.split(printed("bash"))[1:], "--store", "file:")
    (part,), _ = embed_source(load_model("small"), images=tmp_path / "pictures")
    with GaussianCollection.open(tmp_path / "gallery") as collection:
        assert len(collection) == len(part.ids) == 70
        found = collection.get(part.ids)
        assert list(found.ids) == part.ids
        # Another order of the items in a batch moves an embedding by rounding, and so does what the store keeps.
        torch.testing.assert_close(found.embeddings.mean, part.embeddings.mean, rtol=1e-5, atol=1e-5)
        spread = found.embeddings.total_variance
        torch.testing.assert_close(spread, part.embeddings.total_variance, rtol=1e-5, atol=1e-5)
