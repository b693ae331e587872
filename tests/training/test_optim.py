"""How far a step goes: groups, learning rates, freezing, schedule and clipping against tables worked by hand."""

import itertools
import math

import pytest
import torch
from support.toy import log_of, make_toy

pytest.importorskip("tokenizers", reason="the extra backbones is not installed")

from sfumato import LOSSES, GaussianHead
from sfumato.encoders.clip import ClipImageConfig, ClipTextConfig, clip_image_encoder, clip_text_encoder
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.feature_rows import RegionEncoder
from sfumato.encoders.scratch import Encoder, SmallImageEncoder, SmallTextEncoder, WordEncoder
from sfumato.models.build import DualEncoder, Tower
from sfumato.models.recipe import check_recipe, load_recipe
from sfumato.models.sections import OptimConfig
from sfumato.training import loop, step


def clip_model(image_blocks=3, text_blocks=2, *, variance_blocks=1):
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    of_image = {"model_type": "clip_vision_model", "patch_size": 4, "image_size": 8}
    of_text = {"model_type": "clip_text_model", "vocab_size": 20, "max_position_embeddings": 6, "pad_token_id": 0}
    of_text |= {"bos_token_id": None, "eos_token_id": None}
    described = {"backbone": of_image | shape | {"num_hidden_layers": image_blocks}}
    described |= {"pixel_mean": (0.5,) * 3, "pixel_std": (0.5,) * 3}
    image = clip_image_encoder(ClipImageConfig(variance_blocks=variance_blocks), description=described)
    described = {"backbone": of_text | shape | {"num_hidden_layers": text_blocks}}
    text = clip_text_encoder(ClipTextConfig(variance_blocks=variance_blocks), description=described)
    return DualEncoder(Tower(None, image, GaussianHead(8, 5)), Tower(None, text, GaussianHead(8, 5)))


def options_of(optimiser, parameter):
    """(learning rate, weight decay) of a parameter, which must lie in exactly one group."""
    (group,) = [g for g in optimiser.param_groups if any(p is parameter for p in g["params"])]
    return group["lr"], group["weight_decay"]


of_fc1 = lambda factors: {f"{block}.mlp.fc1.weight": factor for block, factor in factors.items()}
# Image, text, variance blocks -> factors of the multiplier of a side, with layer_decay = 0.7.
TABLE = {
    (3, 2, 1): {
        "image": {
            "embeddings.class_embedding": 1, "embeddings.position_embedding.weight": 1, "norm_in.weight": 1,
            "shared_blocks.0.mlp.fc1.weight": 0.343, "shared_blocks.1.mlp.fc1.bias": 0.49,
            **{f"{name}_blocks.0.self_attn.q_proj.weight": 0.7 for name in ("mean", "variance")},
        },
        "text": {
            "embeddings.token_embedding.weight": 1, "norm_out.weight": 1, "shared_blocks.0.layer_norm1.weight": 0.49,
            "mean_blocks.0.layer_norm1.weight": 0.7, "variance_blocks.0.mlp.fc2.weight": 0.7,
        },
    },
    (12, 24, 1): {
        "image": of_fc1({"shared_blocks.0": 0.013841287201, "shared_blocks.10": 0.49, "mean_blocks.0": 0.7}),
        "text": of_fc1({
            "shared_blocks.0": 0.000191581231380566, "shared_blocks.22": 0.49, "variance_blocks.0": 0.7,
        }),
    },
    (4, 2, 2): {
        "image": of_fc1({
            "shared_blocks.0": 0.2401, "shared_blocks.1": 0.343, "mean_blocks.0": 0.49, "mean_blocks.1": 0.7,
            "variance_blocks.0": 0.49, "variance_blocks.1": 0.7,
        }),
        "text": {"mean_blocks.0.mlp.fc1.weight": 0.49},
    },
}  # fmt: skip
MULTIPLIERS = {"image": 0.5, "text": 0.1}


def test_learning_rates_are_counted_from_the_top_whatever_the_depth_and_the_schedule_is_the_table():
    multipliers = {f"{side}_lr_multiplier": multiplier for side, multiplier in MULTIPLIERS.items()}
    config = OptimConfig(lr=1.0, layer_decay=0.7, logits_lr_multiplier=20, **multipliers)
    for (depths, sides), kind in itertools.product(TABLE.items(), ("adamw", "adamp")):
        table = {"image.head.mean.linear.weight": 1.0, "text.head.log_var.linear.bias": 1.0}
        for side, factors in sides.items():
            table |= {f"{side}.encoder.{name}": MULTIPLIERS[side] * factor for name, factor in factors.items()}
        model, loss = clip_model(*depths[:2], variance_blocks=depths[2]), LOSSES["pcmepp"]()
        optimiser = step.build_optimiser(model, loss, config.model_copy(update={"name": kind}))
        got = {name: options_of(optimiser, model.get_parameter(name))[0] for name in table}
        assert got == pytest.approx(table, rel=1e-12, abs=0), depths
        assert [options_of(optimiser, p)[0] for p in loss.parameters()] == [20, 20]
        # The released code counts from 12 for every depth: of 24 blocks the last would have 0.7^-11 times the rate.
        assert max(g["lr"] for g in optimiser.param_groups if g["lr"] != 20) == 1.0
    for options, epochs, table in SCHEDULES:
        config = OptimConfig(**options)
        got = {progress: step.learning_rate_factor(progress, config, epochs=epochs) for progress in table}
        assert got == pytest.approx(table, abs=1e-12), options


def test_matrices_alone_decay_and_a_step_of_adamw_moves_every_parameter_as_far_as_its_rate_says():
    """AdamW's first step is p (1 - lr decay) - lr sign(g) for any size of g; lr includes the schedule's factor."""
    model, loss = clip_model(), LOSSES["pcmepp"]()
    optimiser = step.build_optimiser(model, loss, OptimConfig(lr=1e-2, layer_decay=0.5, weight_decay=0.1, eps=1e-16))
    everything = [*model.parameters(), *loss.parameters()]
    rates = [options_of(optimiser, p) for p in everything]
    for _ in range(3):  # What was set before does not compound.
        step.set_learning_rate(optimiser, 0.25)
    generator = torch.Generator().manual_seed(3)
    before = [p.detach().clone() for p in everything]
    for parameter in everything:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimiser.step()
    for parameter, (rate, decay), start in zip(everything, rates, before, strict=True):
        expected = start * (1 - 0.25 * rate * decay) - 0.25 * rate * parameter.grad.sign()
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6)
    optimiser = step.build_optimiser(model, loss, OptimConfig(weight_decay=0.3, layer_decay=0.7))
    held = [id(p) for g in optimiser.param_groups for p in g["params"]]
    assert sorted(held) == sorted(id(p) for p in everything) and len(set(held)) == len(held)
    assert {(p.ndim > 1, options_of(optimiser, p)[1]) for p in model.parameters()} == {(True, 0.3), (False, 0)}
    assert [options_of(optimiser, p)[1] for p in loss.parameters()] == [0, 0]


def test_pre_trained_parameters_of_each_side_are_frozen_in_its_epochs():
    cases = [
        (SmallTextEncoder(9, 4, 0.0), set()), (WordEncoder(9, 4, 3), set()),
        (WordEncoder(9, 4, 3, pretrained=True), {"words.weight"}), (clip_model().text.encoder, None),
        (clip_model().image.encoder, None), (SmallImageEncoder(2), set()), (RegionEncoder(5, 4, variance=True), set()),
    ]  # fmt: skip
    for encoder, expected in cases:
        names = {name for name, _ in encoder.named_parameters()}
        step.freeze_encoder(encoder, True)
        frozen = {name for name, p in encoder.named_parameters() if not p.requires_grad}
        assert frozen == ({n for n in names if not n.startswith("variance_")} if expected is None else expected)
        step.freeze_encoder(encoder, False)
        assert all(p.requires_grad for p in encoder.parameters())
    model = clip_model()
    names = "image.encoder.shared_blocks.0.mlp.fc1.weight", "text.encoder.shared_blocks.0.mlp.fc1.weight"
    for options, epoch, expected in (
        ({"freeze_image_epochs": 2}, 1, [False, True]), ({"freeze_image_epochs": 2}, 2, [True, True]),
        ({"first_stage_epochs": 1}, 0, [False, False]), ({"first_stage_epochs": 1}, 1, [True, True]),
    ):  # fmt: skip
        step.freeze_for_epoch(model, epoch, OptimConfig(**options))
        assert [model.get_parameter(name).requires_grad for name in names] == expected, options


class TwoNorms(Encoder):
    pretrained = True

    def __init__(self):
        super().__init__()
        self.norm, self.variance_layers = torch.nn.BatchNorm1d(3), torch.nn.Sequential(torch.nn.BatchNorm1d(3))

    def forward(self, x):
        return self.norm(x) + self.variance_layers(x)


def test_running_statistics_rest_with_their_network_and_go_on_where_layers_learn():
    def changed(encoder, inputs, *, frozen):
        encoder.train()
        step.freeze_encoder(encoder, frozen)
        before = {name: value.clone() for name, value in encoder.named_buffers()}
        encoder(inputs)
        return {n for n, value in encoder.named_buffers() if not torch.equal(before[n], value)}

    encoder, numbers = TwoNorms(), torch.randn(4, 3)
    own = {f"variance_layers.0.{name}" for name, _ in encoder.norm.named_buffers()}
    assert len(own) == 3 and changed(encoder, numbers, frozen=True) == own
    assert changed(encoder, numbers, frozen=False) == {name for name, _ in encoder.named_buffers()}
    small, pixels = SmallImageEncoder(4), Inputs(torch.rand(4, 3, 32, 32))
    assert any(n.endswith("running_mean") for n in changed(small, pixels, frozen=True))


# Options, epochs, {epochs done: factor}.
COSINE, CONSTANT, STEP = ({"schedule": name, "warmup_epochs": 0} for name in ("cosine", "constant", "step"))
STEP["step_at"], HALVED = 0.6, {"first_stage_epochs": 4, "second_stage_factor": 0.5}
LATE = {"warmup_epochs": 2, "freeze_image_epochs": 2}
C, D = 0.8535533905932737, 0.14644660940672624  # (1 + cos(pi / 4)) / 2 and its complement
SCHEDULES = [
    (CONSTANT | {"warmup_epochs": 2}, 8, {0: 0.0, 0.25: 0.125, 1: 0.5, 2: 1.0, 7.9: 1.0}),
    (CONSTANT, 8, {0: 1.0, 4: 1.0}),
    (CONSTANT | LATE | {"freeze_image_epochs": 3}, 8, {0: 1.0, 2.9: 1.0, 3: 0.0, 3.5: 0.25, 4: 0.5, 5: 1.0, 7: 1.0}),
    (COSINE, 12, {0: 1.0, 3: C, 4: 0.75, 6: 0.5, 8: 0.25, 12: 0.0}),
    (COSINE | LATE, 12, {0: 1.0, 1.9: 1.0, 2: 0.0, 2.5: 0.25, 3: 0.5, 4: 1.0, 6: C, 8: 0.5, 10: D, 12: 0}),
    (COSINE | {"warmup_epochs": 9}, 6, {0: 0.0, 3: 1 / 3, 6: 2 / 3}),
    (STEP | {"warmup_epochs": 1}, 10, {0: 0.0, 0.5: 0.5, 1: 1.0, 5.99: 1.0, 6: 0.1, 9.9: 0.1}),
    (STEP | LATE | {"freeze_image_epochs": 5}, 10, {0: 1.0, 5: 0.0, 5.5: 0.25, 6: 0.05, 6.5: 0.075, 7: 0.1}),
    (COSINE | {"first_stage_epochs": 4}, 8, {0: 1.0, 1: C, 2: 0.5, 4: 0.1, 5: C / 10, 6: 0.05, 8: 0.0}),
    (COSINE | {"first_stage_epochs": 4}, 6, {0: 1.0, 1: C, 2: 0.5, 4: 0.1, 5: 0.05, 6: 0.0}),
    (STEP | HALVED | {"step_at": 0.5}, 10, {0: 1, 2.9: 1, 3: 0.1, 3.9: 0.1, 4: 0.5, 6.9: 0.5, 7: 0.05, 9: 0.05}),
]
own = {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.5, 3.9999999999: 0.0, 4: 0.0, 5: 0.25, 6: 0.5, 7: 0.25, 8: 0.0}
SCHEDULES.append((COSINE | HALVED | {"warmup_epochs": 2}, 8, own))
# cub-pcme: the first stage runs ten epochs of a cosine of 50, (1 + cos(pi/5)) / 2 at its end.
own = {0: 1.0, 5: 0.9755282581475768, 9.9999999999999: 0.9045084971874737, 10: 1.0, 35: 0.5, 60: 0.0}
SCHEDULES.append((COSINE | {"first_stage_epochs": 10, "second_stage_factor": 1.0}, 60, own))


def with_gradients(*gradients):
    parameters = [torch.nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def test_gradients_are_clipped_at_a_joint_norm_before_each_step(tmp_path, monkeypatch):
    for norm, given, measured, left in (
        (2.0, [[3.0, 0.0], [4.0]], 5, [[1.2, 0.0], [1.6]]),
        (2.0, [[1.2], [-1.5]], math.hypot(1.2, 1.5), [[1.2], [-1.5]]),
        (0.0, [[300.0], [400.0]], 500, [[300.0], [400.0]]),
    ):
        parameters = with_gradients(*given)
        assert step.clip_gradients(iter(parameters), norm) == pytest.approx(measured)
        for parameter, gradient in zip(parameters, left, strict=True):
            torch.testing.assert_close(parameter.grad, torch.tensor(gradient))
    assert step.clip_gradients(with_gradients([math.inf, 1.0]), 2.0) == math.inf
    assert math.isnan(step.clip_gradients(with_gradients([math.nan]), 0.0))
    recipe, norms = load_recipe(make_toy(tmp_path), ["train.epochs=2", "optim.clip_norm=0.01"]), []
    assert check_recipe({"name": "x"}, "here").optim.clip_norm == 2

    def spy(model, loss, config, build=step.build_optimiser):
        optimiser = build(model, loss, config)
        trained = [*model.parameters(), *loss.parameters()]
        squares = lambda: sum(p.grad.double().square().sum().item() for p in trained if p.grad is not None)
        optimiser.register_step_pre_hook(lambda *_: norms.append(math.sqrt(squares())))
        return optimiser

    monkeypatch.setattr(step, "build_optimiser", spy)
    loop.fit(recipe, tmp_path / "run")
    assert len(norms) >= 4 and norms == pytest.approx([0.01] * len(norms), rel=1e-3)
    assert all(line["gradient_norm"] > 0.05 for line in log_of(tmp_path / "run"))
