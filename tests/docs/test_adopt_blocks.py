"""The lines of the guide with sentence-transformers and open_clip run, on models that were taught two colours."""

import re
from pathlib import Path

import pytest
from support.tiny_models import architecture_of, import_open_clip, taught_clip, taught_open_clip, two_colours

from sfumato.models.run import load_model

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "adopt.md").read_text(encoding="utf-8")


def block_with(word):
    [block] = [b for b in re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE) if word in b]
    return block


def run_block(block, folder, monkeypatch, capsys):
    monkeypatch.setenv("SFUMATO_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    exec(block, {})
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_lines_with_sentence_transformers_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    taught_clip(tmp_path / "model", two_colours(tmp_path))
    block = block_with("SentenceTransformer").replace('"clip-ViT-B-32"', '"model"')
    assert run_block(block, tmp_path, monkeypatch, capsys).count(".png") == 3
    assert load_model(tmp_path / "runs" / "adopted-st").calibration.logit_scale > 0


def test_the_lines_with_open_clip_run(tmp_path, monkeypatch, capsys):
    import_open_clip()
    taught = taught_open_clip(tmp_path / "model", two_colours(tmp_path))
    block = block_with("open_clip").replace('"ViT-B-32", "laion2b_s34b_b79k"', '"local-dir:model"')
    block = block.replace('("ViT-B-32", clip)', f'("{architecture_of(taught)}", clip)')
    assert run_block(block, tmp_path, monkeypatch, capsys).count(".png") == 3
