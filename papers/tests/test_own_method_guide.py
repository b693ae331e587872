"""The guide "Your own method", run as it stands, with a small model, few epochs and few resamples."""

import re
import shlex
from pathlib import Path

import pytest

from sfumato import imports
from sfumato.distances import DISTANCES
from sfumato.evaluation.estimators import ESTIMATORS
from sfumato.losses import LOSSES

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "own-method.md").read_text(encoding="utf-8")
TINY = [
    "train.epochs=2", "train.threads=1", "model.dim=16", "model.image.size=16", "model.image.width=4",
    "model.text.vocabulary=200", "model.text.width=16", "optim.warmup_epochs=0",
]  # fmt: skip
QUICK = {"train": TINY, "referee": ["--absent", "20", "--corrupted", "0", "--bootstrap", "20"]}
NAMES = ((LOSSES, "margin"), (DISTANCES, "l1_means"), (ESTIMATORS, "top2_gap"))


def forget(monkeypatch):
    """As in another process."""
    for table, name in NAMES:
        table.pop(name, None)
    monkeypatch.setattr(imports, "_digests", {})
    monkeypatch.setattr(imports, "_given", {})


@pytest.mark.slow
def test_the_commands_run_in_their_order(tmp_path, sfumato, papers, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymethod.py").write_text(re.search(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)[1])
    printed = {}
    for block in re.findall(r"^```bash\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            beside = line.startswith("python -m papers ")
            words = shlex.split(line, comments=True)[3 if beside else 1 :]
            words += QUICK.get(words[0], [])
            forget(monkeypatch)
            printed[words[0], words[1]] = (papers if beside else sfumato).printed(*words)
    forget(monkeypatch)
    assert "top2_gap" in printed["trust", "runs/own/margin-0"].replace(" ", "_")
    assert "top2_gap" in printed["referee", "runs/own/margin-0"]
    assert "l1_means" in printed["evaluate", "run"] and "1F" in printed["search", "runs/margin-index"]
