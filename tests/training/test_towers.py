"""Runs with the towers of PCME: what they need from outside they need once, and what rests in which stage."""

import numpy as np
import pytest
import torch
from toy import make_toy

from sfumato.errors import UserError
from sfumato.training.config import load_recipe
from sfumato.training.export import export_run, load_exported
from sfumato.training.loop import fit
from sfumato.training.run import load_run

GRU = 'model.text={ kind = "gru", width = 3, hidden = 8, bidirectional = true }'
RED, SOME = [0.5, -0.25, 1.0], [2.0, 4.0, 8.0]


def vectors_file(folder):
    path = folder / "glove.3d.txt"
    path.write_text("".join(f"{word} {' '.join(map(str, v))}\n" for word, v in (("red", RED), ("some", SOME))))
    return path


def test_a_run_needs_its_file_of_word_vectors_once(tmp_path, capsys):
    toy, path = make_toy(tmp_path), vectors_file(tmp_path)
    recipe = load_recipe(
        toy, [GRU, f"model.text.vectors={path}", "model.text.freeze=true", "train.epochs=1", "train.ema_decay=0.5"]
    )
    fit(recipe, tmp_path / "run")
    # Twelve words: six colours, four shapes, "a", "in", "some".
    assert f"2 of 13 words of the training texts start from {path}" in capsys.readouterr().err
    path.unlink()
    model = load_run(tmp_path / "run").model
    id_of = model.text.reader.tokenizer.token_to_id
    vectors = model.text.encoder.words.weight
    torch.testing.assert_close(vectors[[id_of("red"), id_of("some")]], torch.tensor([RED, SOME]), rtol=0, atol=0)
    exported = load_exported(export_run(tmp_path / "run", tmp_path / "given"))
    texts = ["a red circle", "some nonsense"]
    np.testing.assert_array_equal(exported.model.embed_texts(texts).mean, model.embed_texts(texts).mean)
    assert str(tmp_path) not in (tmp_path / "given" / "config.json").read_text()


def test_word_vectors_that_learn_start_from_the_file(tmp_path):
    toy, path = make_toy(tmp_path), vectors_file(tmp_path)
    fit(load_recipe(toy, [GRU, f"model.text.vectors={path}", "train.epochs=1"]), tmp_path / "run")
    model = load_run(tmp_path / "run").model
    red = model.text.encoder.words.weight[model.text.reader.tokenizer.token_to_id("red")]
    assert 0 < (red - torch.tensor(RED)).abs().max() < 0.1


def test_files_of_word_vectors_that_do_not_fit_stop_before_training(tmp_path):
    toy, path = make_toy(tmp_path), vectors_file(tmp_path)
    with pytest.raises(UserError, match="3 numbers behind the word, but model.text.width=300"):
        fit(load_recipe(toy, ["model.text.kind=gru", f"model.text.vectors={path}"]), tmp_path / "run")
    with pytest.raises(UserError, match="model.text.freeze is for word vectors from a file"):
        load_recipe(toy, ["model.text.kind=gru", "model.text.freeze=true"])
