"""One step and averages of weights: gradients through the model, whole or piece by piece; what diverges is told."""

import re

import pytest
import torch
from safetensors.torch import load_file
from support.toy import assert_same_tensors, log_of, make_toy
from torch import nn

from sfumato import LOSSES, GaussianEmbedding, GaussianHead, evaluate_retrieval, load_recipe
from sfumato.data.transforms import plan_mixing
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.feature_rows import FeatureInput
from sfumato.encoders.heads import HeadOptions, TokenFeatures
from sfumato.encoders.scratch import SmallImageEncoder
from sfumato.losses.pcmepp import PCMEPPOptions
from sfumato.models.build import DualEncoder, Tower
from sfumato.models.embed import load_split
from sfumato.models.process_group import alone
from sfumato.models.run import load_run
from sfumato.training import loop, saving
from sfumato.training import step as learner
from sfumato.training import validation as after_module
from sfumato.training.step import DivergedError, TrainBatch, WeightAverage, averaged, forward_backward

N = 7
saved_model = lambda path: {k.removeprefix("model/"): v for k, v in load_file(path).items() if k.startswith("model/")}
state = lambda model: {name: value.detach().clone() for name, value in model.state_dict().items()}
PIECES = {1: (1,) * 7, 3: (3, 3, 1), 50: (7,)}
assert_same = lambda first, second: torch.testing.assert_close(first, second, rtol=0, atol=0)
random_case = lambda: (build(dropout=0.4, token_dropout=0.6), LOSSES["pcmepp"]().double())


class PatchEncoder(nn.Module):
    channels = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, self.channels, 4, stride=4)

    def forward(self, inputs):
        pixels = inputs.values.to(self.patches.weight.dtype)
        return TokenFeatures(self.patches(pixels).flatten(2).transpose(1, 2))


def build(*, variance=True, dropout=0.0, token_dropout=0.0, image=None):
    torch.manual_seed(0)
    encoders = [FeatureInput(6, dropout) if image is None else image, FeatureInput(6, dropout)]
    options = HeadOptions(variance=variance, init_total_variance=0.5)
    towers = (Tower(None, e, GaussianHead(6, 8, options), token_dropout=token_dropout) for e in encoders)
    return DualEncoder(*towers).double().train()


def labels(n=N):
    match = torch.eye(n)
    match[0, n - 1], match[n // 2, 0] = 1, 0.6
    return match


def batch(n=N, process_group=None, seed=5):
    """The pairs of a process, of at most eight."""
    generator, own, match = torch.Generator().manual_seed(seed), (process_group or alone()).part(n), labels(n)
    image, text = (torch.randn(n, t, 6, generator=generator, dtype=torch.float64) for t in (4, 5))
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2, 5, 4, 2, 3]).unsqueeze(1)
    return TrainBatch(Inputs(image[own]), Inputs(text[own], mask[own]), lambda _: (match[own], match.T[own]))


def gradients(model, loss):
    """By name; a parameter that the loss does not reach counts as 0."""
    named = [*model.named_parameters(), *loss.named_parameters()]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def plain(model, loss, data, *, epoch=5, sizes=(N,)):
    """(loss, gradients) of one backward pass through the model, which sees the batch in pieces of these sizes."""
    pairs, start = [], 0
    for size in sizes:
        piece = slice(start, start + size)
        pairs.append(model(data.images[piece], data.texts[piece]))
        start += size
    image, text = (GaussianEmbedding.cat([pair[side] for pair in pairs]) for side in (0, 1))
    output = loss(image, text, data.labels(alone())[0], epoch=epoch)
    output.total.backward()
    return output, gradients(model, loss)


def assert_same_gradients(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert max(g.abs().max() for g in expected.values()) > 1e-4


@pytest.mark.parametrize("variance", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_a_plain_backward_pass_whole_or_in_pieces(name, variance):
    points = {} if variance or name not in ("pcmepp", "prolip", "pcme") else {"beta": 0}
    make = lambda: (build(variance=variance), LOSSES[name](LOSSES[name].Options(**points)).double())
    output, expected = plain(*make(), batch())
    for micro_batch in (0, *PIECES):
        model, loss = make()
        measured = forward_backward(model, loss, batch(), alone(), epoch=5, micro_batch=micro_batch)
        assert_same_gradients(gradients(model, loss), expected)
    assert measured["loss"] == pytest.approx(float(output.total.detach()), rel=1e-9)
    for term, value in output.terms.items():
        assert measured[f"loss/{term}"] == pytest.approx(float(value.detach()), rel=1e-9)
    assert measured["positives_per_row"] == pytest.approx((N + 1.6) / N)
    for side, embedded in zip(("image", "text"), model(batch().images, batch().texts), strict=True):
        assert measured[f"total_variance/{side}"] == pytest.approx(float(embedded.total_variance.detach().mean()))
    late = LOSSES["pcmepp"](PCMEPPOptions(pseudo_positives_from=3)).double()
    for epoch in (2, 3):
        measured = forward_backward(build(), late, batch(), alone(), epoch=epoch)
        assert ("pseudo_positives_i2t" in measured) == (epoch == 3)


@pytest.mark.parametrize("micro_batch", PIECES)
def test_the_second_pass_repeats_the_random_draws_of_the_first(micro_batch):
    model, loss = random_case()
    torch.manual_seed(11)
    _, expected = plain(model, loss, batch(), sizes=PIECES[micro_batch])
    after = torch.rand(1)
    model, loss = random_case()
    torch.manual_seed(11)
    forward_backward(model, loss, batch(), alone(), epoch=5, micro_batch=micro_batch)
    assert torch.rand(1) == after, "the pieces take as many random numbers as one pass does"
    assert_same_gradients(gradients(model, loss), expected)


def test_no_more_than_a_piece_is_encoded_at_a_time_and_mixed_images_are_mixed_before():
    model, loss = random_case()
    seen = []
    model.image.register_forward_hook(lambda _, args, out: seen.append((len(args[0]), out.mean.requires_grad)))
    forward_backward(model, loss, batch(), alone(), epoch=5, micro_batch=3)
    assert seen == [(3, False), (3, False), (1, False), (3, True), (3, True), (1, True)]
    seen.clear()
    forward_backward(model, loss, batch(), alone(), epoch=5)
    assert seen == [(7, True)]
    make = lambda: (build(image=PatchEncoder()), LOSSES["pcmepp"]().double())
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8, generator=generator)
    plan = plan_mixing(N, size=(8, 8), generator=generator, fraction=1.0)
    assert (plan.own_fraction < 1).sum() >= 4
    match, texts = plan.match(labels()), batch().texts
    take = lambda _: (match, match.T)
    _, expected = plain(*make(), TrainBatch(Inputs(plan.apply(pixels)), texts, take))
    model, loss = make()
    forward_backward(model, loss, TrainBatch(Inputs(pixels), texts, take, plan), alone(), epoch=5)
    got = gradients(model, loss)
    for name in expected:  # The pixels are float32.
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


def test_bfloat16_is_for_encoders_and_the_linear_maps_of_heads():
    encoder = PatchEncoder()
    model, loss = build(image=encoder).float(), LOSSES["pcmepp"]()
    pixels = torch.rand(N, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    texts, seen = Inputs(batch().texts.values.float(), batch().texts.mask), []
    data = TrainBatch(Inputs(pixels), texts, lambda _: (labels(), labels().T))
    encoder.patches.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    model.image.head.register_forward_hook(lambda _, args, out: seen.append((out.mean.dtype, out.log_var.dtype)))
    forward_backward(model, loss, data, alone(), epoch=5)
    exact = gradients(model, loss)
    model.zero_grad()
    loss.zero_grad()
    forward_backward(model, loss, data, alone(), epoch=5, precision=torch.bfloat16)
    outputs = (torch.float32, torch.float32)
    assert seen == [torch.float32, outputs, torch.bfloat16, outputs]
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32
        assert (gradient - exact[name]).norm() / (exact[name].norm() + 1e-6) < 0.02, name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("micro_batch", [0, 3])
def test_nan_is_told_by_its_term_and_leaves_no_gradient(value, micro_batch):
    model, loss = build(), LOSSES["pcmepp"]().double()
    data = batch()
    data.images.values[2, 1, 3] = value
    with pytest.raises(DivergedError, match=r"the loss term '\w+' is nan;.* lower optim.lr, lengthen") as error:
        forward_backward(model, loss, data, alone(), epoch=5, micro_batch=micro_batch)
    assert re.search("'(\\w+)'", str(error.value))[1] in loss(*model(batch().images, batch().texts), labels()).terms
    assert all(p.grad is None for p in [*model.parameters(), *loss.parameters()])


def test_a_run_that_diverges_takes_no_half_step_and_keeps_its_last_epoch(tmp_path, monkeypatch):
    """An infinite gradient in epoch 2: weights and moments stay as before that step, the checkpoint is the first's."""
    recipe, folder = load_recipe(make_toy(tmp_path), ["train.epochs=2"]), tmp_path / "run"
    build_optimiser, parts, after = learner.build_optimiser, [], []

    def state():
        model, loss, optimiser = parts
        moments = [v for moments in optimiser.state_dict()["state"].values() for v in moments.values()]
        return [v.detach().clone() for v in [*model.parameters(), *loss.parameters(), *moments]]

    def spy(model, loss, config):
        parts[:] = [model, loss, build_optimiser(model, loss, config)]
        parts[2].register_step_post_hook(lambda *_: after.append(state()))
        return parts[2]

    def diverge(model, loss, *args, epoch, **options):
        measured = forward_backward(model, loss, *args, epoch=epoch, **options)
        if epoch == 1 and len(after) % 3 == 1:
            model.text.head.mean.linear.bias.grad[0] = float("inf")
        return measured

    monkeypatch.setattr(learner, "build_optimiser", spy)
    with monkeypatch.context() as patch:
        patch.setattr(learner, "forward_backward", diverge)
        with pytest.raises(DivergedError, match="epoch 2, step 2: the gradient is inf"):
            loop.fit(recipe, folder)
    assert len(after) == 4, "three steps in the first epoch, one in the second"
    assert all(map(torch.equal, state(), after[3])) and not all(map(torch.equal, after[3], after[2]))
    saved = load_file(folder / "last.safetensors")
    for name, value in zip(dict(parts[0].named_parameters()), after[2], strict=False):
        assert torch.equal(saved[f"model/{name}"], value), name


def test_the_encoders_are_compiled_when_asked_and_the_result_is_used(tmp_path, monkeypatch):
    compiled, calls = [], []

    def spy(function, **options):
        name = type(function.__self__).__name__
        compiled.append(name)

        def counted(*args, **kwargs):
            calls.append((name, torch.is_grad_enabled()))
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(torch, "compile", spy)
    recipe = make_toy(tmp_path)
    loop.fit(load_recipe(recipe, ["train.epochs=1"]), tmp_path / "plain")
    assert not compiled
    loop.fit(load_recipe(recipe, ["train.epochs=1", "train.compile=true"]), tmp_path / "compiled")
    assert compiled == ["SmallImageEncoder", "SmallTextEncoder"]
    assert {(name, training) for name in compiled for training in (True, False)} == set(calls)
    assert_same_tensors(*(tmp_path / run / "last.safetensors" for run in ("plain", "compiled")))


def average_build():
    torch.manual_seed(0)
    encoders = SmallImageEncoder(2), FeatureInput(6, 0.0)
    return DualEncoder(*(Tower(None, encoder, GaussianHead(encoder.channels, 4)) for encoder in encoders))


def wander(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        sides = torch.rand(5, 3, 16, 16, generator=generator), torch.randn(5, 3, 6, generator=generator)
        model.train()(*map(Inputs, sides))
    return state(model)


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
    model.weight.data.fill_(0.0)
    average, got = WeightAverage(model, 0.15), []
    for value in (11.0, 12.0, -1.0):
        model.weight.data.fill_(value)
        average.update(model)
        got.append(average.values()[0].item())
    # 11 - 11/11 = 10; 10 * 0.15 + 12 * 0.85 = 11.7; 11.7 * 0.15 - 0.85 = 0.905
    assert got == pytest.approx([10, 11.7, 0.905], rel=1e-6)
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
    model = average_build()
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
    for nothing in (None, WeightAverage(average_build(), None)):
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
    model = load_run(folder).model  # The score in the log is that of the averaged towers, recomputed from the folder.
    assert_same(state(model), validated[3])
    split = load_split(model, recipe.data, "val")
    evaluation = evaluate_retrieval(*loop.embed_split(model, split), split.data.relevance(), distance="csd")
    assert evaluation.rsum == pytest.approx(log_of(folder)[-1]["val/rsum"], abs=1e-9)


@pytest.mark.parametrize(
    "change, kept", [("train.select=auto", 1), ("train.select=last", 3), ("train.swa_epochs=2", 2)]
)
def test_the_epoch_that_is_kept(tmp_path, monkeypatch, change, kept):
    """Single weights from before the average do not compete with it: of the two averaged ones the first wins."""
    scores = [0.9, 0.8, 0.7, 0.6] if "swa" in change else [0.2, 0.6, 0.5, 0.1]
    validate, left = after_module.validate, iter(scores)
    monkeypatch.setattr(after_module, "validate", lambda *args: (validate(*args)[0], next(left)))
    recipe = load_recipe(make_toy(tmp_path), ["train.epochs=4", change])
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
