"""Runs with the towers of PCME: what they need from outside they need once, and what rests in which stage."""

import shutil

import numpy as np
import pytest
import torch
from support.raising import raises
from support.tiny_models import tiny_resnet
from support.toy import assert_same_runs, fit_until, make_toy

from sfumato import fit, load_recipe
from sfumato.encoders.scratch import WordEncoder
from sfumato.errors import UserError
from sfumato.models.process_group import ProcessGroup
from sfumato.models.run import load_run
from sfumato.training import saving
from sfumato.training import step as learner
from sfumato.training.step import DivergedError, build_optimiser, set_learning_rate

GRU = 'model.text={ kind = "gru", width = 3, hidden = 8, bidirectional = true }'
RED, SOME = [0.5, -0.25, 1.0], [2.0, 4.0, 8.0]


def vectors_file(folder):
    path = folder / "glove.3d.txt"
    path.write_text("".join(f"{word} {' '.join(map(str, v))}\n" for word, v in (("red", RED), ("some", SOME))))
    return path


def test_a_run_needs_its_file_of_word_vectors_once_and_refuses_what_has_no_effect(tmp_path, capsys):
    toy, path = make_toy(tmp_path), vectors_file(tmp_path)
    changes = [GRU, f"model.text.vectors={path}", "model.text.freeze=true", "train.epochs=1", "train.ema_decay=0.5"]
    fit(load_recipe(toy, changes), tmp_path / "run")
    # Twelve words: six colours, four shapes, "a", "in", "some".
    assert f"2 of 13 words of the training texts start from {path}" in capsys.readouterr().err
    path.unlink()
    model = load_run(tmp_path / "run").model
    id_of = model.text.processor.tokenizer.token_to_id
    vectors = model.text.encoder.words.weight
    torch.testing.assert_close(vectors[[id_of("red"), id_of("some")]], torch.tensor([RED, SOME]), rtol=0, atol=0)
    stage = "optim.first_stage_epochs"
    points = ["model.local_attention=true", "model.embeddings=2", "model.variance=false", "loss.beta=0"]
    for overrides, message in (
        ([f"{stage}=3"], f"{stage}=3 leaves no epoch of train.epochs=3 for the second stage"),
        ([f"{stage}=1", "optim.freeze_image_epochs=1"], "leave out optim.freeze_image_epochs"),
        (points, "leave out model.local_attention"),
        (["model.image.kind=frozen", "augment.erase=0.2"], "augment.erase changes pixels"),
        (["model.text.kind=frozen", "augment.drop_words=0.2"], "augment.drop_words changes the texts"),
    ):  # fmt: skip
        raises(UserError, message, load_recipe, toy, overrides)


def test_several_processes_average_running_statistics_and_no_word_vectors(monkeypatch):
    """(3 x + 3) / 3 in the place of a sum over three processes."""
    monkeypatch.setattr(ProcessGroup, "total", lambda process_group, value: 3 * value + 3)
    model = torch.nn.ModuleDict({"words": WordEncoder(9, 4, 3, freeze=True), "norm": torch.nn.BatchNorm1d(4)})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ProcessGroup(0, 3, torch.device("cpu")).average_buffers(model)
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert "words.words.weight" in before and changed == {"norm.running_mean", "norm.running_var"}


def pcme(folder, *overrides):
    """A small PCME: residual network, two-way GRU from files, local attention, and two stages, the first one epoch."""
    tiny_resnet(folder / "resnet")
    return load_recipe(
        make_toy(folder),
        [
            f'model.image={{ kind = "resnet", weights = "{folder / "resnet"}", size = 32, augment = "none" }}', GRU,
            f"model.text.vectors={vectors_file(folder)}", "model.pooling=average", "model.local_attention=true",
            "loss.name=pcme", "optim.name=adamp", "optim.lr=1e-2", "optim.warmup_epochs=0",
            "optim.first_stage_epochs=1", "augment.erase=0.2", "augment.drop_words=0.1", *overrides,
        ],
    )  # fmt: skip


def resting(state):
    """What rests in the first stage: the residual network, its running statistics too, and the word vectors."""
    names = [n for n in state if n.startswith("image.encoder.") or n == "text.encoder.words.weight"]
    assert len(names) > 20 and any(n.endswith("running_mean") for n in names)
    return names


def test_in_the_first_stage_backbone_and_word_vectors_rest_and_in_the_second_all_learn(tmp_path, monkeypatch):
    states, factors = [], []

    def spy_on_the_start(model, loss, config):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return build_optimiser(model, loss, config)

    def spy_on_the_end(path, modules, optimiser, about):
        if path.name == "last.safetensors":
            states.append({name: value.clone() for name, value in modules["model"].state_dict().items()})
            factors.append([])

    def spy_on_the_factor(optimiser, factor):
        (factors[-1] if factors else factors.append([]) or factors[0]).append(factor)
        set_learning_rate(optimiser, factor)

    monkeypatch.setattr(learner, "build_optimiser", spy_on_the_start)
    monkeypatch.setattr(saving, "save_state", spy_on_the_end)
    monkeypatch.setattr(learner, "set_learning_rate", spy_on_the_factor)
    fit(pcme(tmp_path, "data.val_fraction=0"), tmp_path / "run")
    start, first, second, third = states
    assert all(torch.equal(start[n], first[n]) for n in resting(start))
    learns = [n for n, p in start.items() if n not in resting(start) and p.is_floating_point()]
    assert {"text.encoder.mean_gru.weight_hh_l0", "image.head.log_var_local.attention.0.weight"} <= set(learns)
    assert not [n for n in learns if torch.equal(start[n], first[n])]
    still = [n for n in resting(start) if torch.equal(first[n], second[n]) and not n.endswith("num_batches_tracked")]
    assert not still and not torch.equal(second["text.encoder.words.weight"], third["text.encoder.words.weight"])
    steps = len(factors[0])
    assert [len(f) for f in factors[:3]] == [steps] * 3 and steps > 2
    cosine = lambda share: (1 + np.cos(np.pi * share)) / 2
    assert factors[0] == pytest.approx([cosine(k / 2 / steps) for k in range(steps)])  # As long as the second.
    assert factors[1] + factors[2] == pytest.approx([0.1 * cosine(k / 2 / steps) for k in range(2 * steps)])


def test_a_run_interrupted_between_its_stages_resumes_to_the_same_bits(tmp_path):
    recipe = pcme(tmp_path)
    fit(recipe, tmp_path / "whole")
    fit_until(recipe, tmp_path / "parts", lambda about: about["epoch"] == 0)
    shutil.rmtree(tmp_path / "resnet")
    (tmp_path / "glove.3d.txt").unlink()
    fit(recipe, tmp_path / "parts")
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


def test_without_a_validation_split_a_run_states_probabilities_of_csd(tmp_path):
    changes = "data.val_fraction=0", "train.epochs=2", "loss.logit_scale=15", "loss.logit_bias=15"
    fit(pcme(tmp_path, *changes), tmp_path / "run")
    run = load_run(tmp_path / "run")
    a, b = (float(getattr(run.loss.logits, name).detach()) for name in ("logit_scale", "logit_bias"))
    assert run.distance == "csd" and not run.calibrated
    assert (run.logit_scale, run.logit_bias) == pytest.approx((a**2 / (2 * b), b / 2))
    assert abs(run.logit_bias - b) > 5


def test_infonce_keeps_its_scale_below_the_largest_and_a_free_scale_that_crosses_zero_stops_the_run(tmp_path):
    toy = make_toy(tmp_path)
    given = ["loss.infonce_weight=1", "loss.infonce_scale=5", "loss.infonce_largest_scale=5.001"]
    fit(load_recipe(toy, [*given, "optim.logits_lr_multiplier=100", "train.epochs=2"]), tmp_path / "run")
    assert load_run(tmp_path / "run").loss.infonce.logits.logit_scale <= 5.0011
    recipe = load_recipe(toy, ["loss.free_scale=true", "optim.logits_lr_multiplier=1e4"])
    message = r"epoch 1, step \d+: the free scale of the match logits is -"
    raises(DivergedError, message, fit, recipe, tmp_path / "free")
