"""Averages of weights: plain and moving means by hand, and runs that validate and keep them, for both towers."""

import pytest
import torch
from safetensors.torch import load_file
from support.toy import log_of, make_toy

from sfumato import GaussianHead, evaluate_retrieval, load_recipe
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.feature_rows import FeatureInput
from sfumato.encoders.scratch import SmallImageEncoder
from sfumato.encoders.towers import DualEncoder, Tower
from sfumato.models.embed import load_split
from sfumato.models.run import load_run
from sfumato.training import loop, saving
from sfumato.training import step as learner
from sfumato.training import validation as after_module
from sfumato.training.step import WeightAverage, averaged


def build():
    """An image tower with batch norms, whose buffers are averaged too, and a text tower."""
    torch.manual_seed(0)
    encoders = SmallImageEncoder(2), FeatureInput(6, 0.0)
    return DualEncoder(*(Tower(None, encoder, GaussianHead(encoder.channels, 4)) for encoder in encoders))


state = lambda model: {name: value.detach().clone() for name, value in model.state_dict().items()}


def wander(model, seed):
    """Other weights, and running statistics that have seen another batch."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        sides = torch.rand(5, 3, 16, 16, generator=generator), torch.randn(5, 3, 6, generator=generator)
        model.train()(*map(Inputs, sides))
    return state(model)


average_state = lambda average: dict(zip(average.names, average.values(), strict=True))


def assert_mean(got, snapshots, weights):
    """Weighted means of the snapshots in float64; whole numbers are the last ones'."""
    assert got.keys() == snapshots[-1].keys()
    for name, value in got.items():
        if value.is_floating_point():
            expected = sum(w * s[name].double() for w, s in zip(weights, snapshots, strict=True))
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6, msg=name)
        else:
            assert torch.equal(value, snapshots[-1][name]), name


def test_the_moving_average_and_an_anchor_by_hand():
    """Values 0, then 11, 12, -1: kept shares min(decay, 1/11), min(decay, 2/12), min(decay, 3/13)."""
    model = torch.nn.Linear(1, 1, bias=False)

    def follow(decay):
        model.weight.data.fill_(0.0)
        average, got = WeightAverage(model, decay), []
        for value in (11.0, 12.0, -1.0):
            model.weight.data.fill_(value)
            average.update(model)
            got.append(average.values()[0].item())
        return got

    # 11 - 11/11 = 10; 10/6 + 12 * 5/6 = 35/3; (35/3) * 3/13 - 10/13 = 25/13
    assert follow(0.9) == pytest.approx([10, 35 / 3, 25 / 13], rel=1e-6)
    # 10; 10 * 0.15 + 12 * 0.85 = 11.7; 11.7 * 0.15 - 0.85 = 0.905
    assert follow(0.15) == pytest.approx([10, 11.7, 0.905], rel=1e-6)
    # 11 * 0.95 = 10.45; 10.45 * 0.05 + 12 * 0.95 = 11.9225; 11.9225 * 0.05 - 0.95 = -0.353875
    assert follow(0.05) == pytest.approx([10.45, 11.9225, -0.353875], rel=1e-5)
    model.weight.data.fill_(4.0)
    average, plain = WeightAverage(model, None, 0.75), WeightAverage(model, None)
    for value in (8.0, 16.0):
        model.weight.data.fill_(value)
        average.update(model)
        plain.update(model)
    assert (average.kept()[0].item(), plain.kept()[0].item()) == (6.0, 12.0)
    with averaged(model, average):
        assert model.weight.item() == 6.0
    assert model.weight.item() == 16.0 and average.values()[0].item() == 12.0
    assert "start" not in "".join(average.state_dict()), "a resumed run takes it from its model again"


def test_a_model_has_its_average_inside_and_its_own_weights_outside():
    model = build()
    average = WeightAverage(model, None)
    first = wander(model, 1)
    average.update(model)
    own = wander(model, 2)
    with averaged(model, average):
        assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    with pytest.raises(KeyError), averaged(model, average):
        raise KeyError
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    for nothing in (None, WeightAverage(build(), None)):
        with averaged(model, nothing):
            assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


def spied_run(recipe, folder):
    after, validated = [], []
    save, embed = saving.save_state, loop.embed_split

    def spy_on_save(path, modules, optimiser, about):
        if path.name == "last.safetensors":
            after.append(state(modules["model"]))
        save(path, modules, optimiser, about)

    def spy_on_embed(model, *args):
        validated.append(state(model))
        return embed(model, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_state", spy_on_save)
        for module in (loop, after_module):
            patch.setattr(module, "embed_split", spy_on_embed)
        return loop.fit(recipe, folder), after, validated


saved_model = lambda path: {k.removeprefix("model/"): v for k, v in load_file(path).items() if k.startswith("model/")}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_validates_and_keeps_the_mean_of_its_last_epochs(tmp_path):
    toy, folder = make_toy(tmp_path), tmp_path / "run"
    recipe = load_recipe(toy, ["train.epochs=4", "train.swa_epochs=3", "train.select=last"])
    result, after, validated = spied_run(recipe, folder)
    # Four validations, and one more of what was kept, to calibrate it.
    assert len(after) == 4 and len(validated) == 5 and result["best_epoch"] == 3
    assert_same(validated[0], after[0])
    for epoch in (1, 2, 3):
        assert_mean(validated[epoch], after[1 : epoch + 1], [1 / epoch] * epoch)
    assert_same(validated[4], validated[3])
    assert_same(saved_model(folder / "model.safetensors"), validated[3])
    assert_same(saved_model(folder / "last.safetensors"), after[3])
    assert int(load_file(folder / "last.safetensors")["average/updates"]) == recipe.train.swa_epochs == 3
    for side in ("image", "text"):  # The released code averaged the texts only, and one epoch fewer.
        for name in (f"{side}.head.mean.linear.weight", f"{side}.head.log_var.linear.bias"):
            assert not torch.equal(validated[3][name], after[3][name]), name
    running = "image.encoder.stages.0.1.running_mean"
    assert not torch.equal(validated[3][running], after[3][running])
    # The score in the log is that of the averaged towers, recomputed from the folder.
    model = load_run(folder).model
    assert_same(state(model), validated[3])
    split = load_split(model, recipe.data, "val")
    evaluation = evaluate_retrieval(*loop.embed_split(model, split), split.data.relevance(), distance="csd")
    assert evaluation.rsum == pytest.approx(log_of(folder)[-1]["val/rsum"], abs=1e-9)


@pytest.mark.parametrize(
    ("scores", "changes", "kept"),
    [
        ([0.2, 0.6, 0.5, 0.1], ["train.select=auto"], 1),
        ([0.2, 0.6, 0.5, 0.1], ["train.select=last"], 3),
        # Single weights from before the average do not compete with it: of the two averaged ones the first wins.
        ([0.9, 0.8, 0.7, 0.6], ["train.swa_epochs=2"], 2),
    ],
)
def test_the_epoch_that_is_kept(tmp_path, monkeypatch, scores, changes, kept):
    validate, left = after_module.validate, iter(scores)
    monkeypatch.setattr(after_module, "validate", lambda *args: (validate(*args)[0], next(left)))
    recipe = load_recipe(make_toy(tmp_path), ["train.epochs=4", *changes])
    result, after, _ = spied_run(recipe, tmp_path / "run")
    assert (result["best_epoch"], result["best_score"]) == (kept, scores[kept])
    if recipe.train.swa_epochs == 0:
        assert_same(saved_model(tmp_path / "run" / "model.safetensors"), after[kept])


def test_the_moving_average_of_a_run_takes_in_every_step(tmp_path, monkeypatch):
    recipe = load_recipe(make_toy(tmp_path), ["train.epochs=2", "train.ema_decay=0.4", "train.select=last"])
    states, build_optimiser = [], learner.build_optimiser

    def spy(model, loss, config):
        states.append(state(model))
        optimiser = build_optimiser(model, loss, config)
        optimiser.register_step_post_hook(lambda *_: states.append(state(model)))
        return optimiser

    monkeypatch.setattr(learner, "build_optimiser", spy)
    loop.fit(recipe, tmp_path / "run")
    weights = [1.0]
    for count in range(1, len(states)):  # The limit of the decay is in the test by hand.
        kept = min(0.4, count / (count + 10))
        weights = [w * kept for w in weights] + [1 - kept]
    assert_mean(saved_model(tmp_path / "run" / "model.safetensors"), states, weights)
