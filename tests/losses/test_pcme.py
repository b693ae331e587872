"""PCME's loss against loops and the released numbers, where floats run out, and its random samples."""

import dataclasses
import itertools
import json
import math
import zlib

import pytest
import torch
from safetensors.torch import load_file
from support import references
from support.batches import MATCH, batch

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import PairBlock, loss_of_block, vib_loss
from sfumato.losses.pcme import PCMELoss, PCMEOptions, pcme_loss
from sfumato.matching import match_probability_distance


def noise(n=4, m=6, s=3, d=5):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(k, s, d, generator=generator, dtype=torch.float64) for k in (n, m))


samples = lambda e, values: e.mean[:, None] + e.var.sqrt()[:, None] * values


@pytest.mark.parametrize("isotropic", [False, True])
def test_every_term_is_its_loop(isotropic):
    pair, eps = batch(), noise()
    if isotropic:
        pair = [GaussianEmbedding(e.mean, e.log_var[:, :1].expand_as(e.log_var)) for e in pair]
    image, text = (samples(e, z).tolist() for e, z in zip(pair, eps, strict=True))
    options, given = PCMEOptions(beta=0.3, uniformity_weight=0.7), {"logit_scale": 3.0, "logit_bias": 4.0, "noise": eps}
    output = pcme_loss(*pair, MATCH, options, **given)
    expected = 2 * references.pcme(image, text, MATCH.tolist(), 3, 4)
    assert float(output.terms["match"]) == pytest.approx(expected, rel=1e-12)
    joint = uniformity_by_loops([t for e in pair for t in (e.mean, e.log_var)], eps)
    assert float(output.terms["uniformity"]) == pytest.approx(0.7 * float(joint), rel=1e-12)
    torch.testing.assert_close(output.terms["vib"], 0.3 * sum(vib_loss(e) for e in pair))
    compressed = pcme_loss(*pair, MATCH, dataclasses.replace(options, sigmoid="compressed"), **given).terms["match"]
    assert float(compressed) == pytest.approx(2 * references.pcme(image, text, MATCH.tolist(), 6, 8), rel=1e-12)
    assert abs(float(compressed) - expected) > 0.01


@pytest.mark.parametrize("distance, label, expected", [(100.0, 1.0, 995.0), (0.0, 0.0, 50.0)])
def test_neither_logarithm_underflows(distance, label, expected):
    """p = exp(-995) and 1 - p = exp(-50) are 0 in float32."""
    bias = 5.0 if label else 50.0
    mean = torch.zeros(1, 3), torch.tensor([[distance, 0.0, 0.0]])
    leaf = mean[1].clone().requires_grad_()
    image, text = GaussianEmbedding.point(mean[0]), GaussianEmbedding.point(leaf)
    options, match = PCMEOptions(beta=0), torch.full((1, 1), label)
    output = pcme_loss(image, text, match, options, logit_scale=10.0, logit_bias=bias)
    assert float(output.total.detach()) == pytest.approx(2 * expected)
    output.total.backward()
    assert torch.isfinite(leaf.grad).all()


def test_samples_follow_the_step():
    loss = PCMELoss().double()
    first = loss(*batch(), MATCH).total
    assert loss(*batch(), MATCH).total == first
    loss.advance()
    second = loss(*batch(), MATCH).total
    assert second != first
    resumed = PCMELoss().double()
    resumed.load_state_dict(loss.state_dict())
    assert resumed(*batch(), MATCH).total == second


@pytest.mark.parametrize("sigmoid, factor", [("plain", 1), ("compressed", 2)])
def test_its_logits_as_a_function_of_csd_are_near_its_own_probability(sigmoid, factor):
    """The sampled probability at csd 1.2 with learnt a = 36 and b = 36.3; a and b themselves on csd are far off."""
    a, b, d = 36.0, 36.3, 512
    loss = PCMELoss(PCMEOptions(logit_scale=a, logit_bias=b, sigmoid=sigmoid))
    scale, bias = loss.match_logits()
    assert bias / scale == pytest.approx((b / a) ** 2, rel=1e-5)  # Where a match is as likely as not.
    for options in (PCMEOptions(logit_bias=-1.0), PCMEOptions(distance="wasserstein2")):
        assert PCMELoss(options).match_logits() is None
    wrong, right = [], []
    for csd in (0.9, 0.96, 1.0, 1.0167, 1.05, 1.1, 1.2):
        variance = 0.01
        mean = torch.zeros(1, d, dtype=torch.float64), torch.zeros(1, d, dtype=torch.float64)
        mean[1][0, 0] = math.sqrt(csd - 2 * variance)
        pair = [GaussianEmbedding(m, torch.full_like(m, math.log(variance / d))) for m in mean]
        sampled = match_probability_distance(factor * a, factor * b, n_samples=100)
        true = sampled.matrix(*pair, generator=torch.Generator().manual_seed(0)).neg().exp().item()
        wrong.append(abs(true - 1 / (1 + math.exp(factor * (a * csd - b)))))
        right.append(abs(true - 1 / (1 + math.exp(scale * csd - bias))))
    assert max(right) < 0.05 and max(wrong) > 0.15, (right, wrong)
    if sigmoid == "plain":
        assert true == pytest.approx(0.045, abs=0.005)
        assert 1 / (1 + math.exp(scale * 1.2 - bias)) == pytest.approx(0.037, abs=0.001)
        assert 1 / (1 + math.exp(a * 1.2 - b)) == pytest.approx(0.0010, abs=0.0002)


def uniformity_by_loops(leaves, eps):
    """The logarithm of the mean over all pairs of two different samples, one pair after the other."""
    image_mean, image_log_var, text_mean, text_log_var = leaves
    sides = (image_mean, image_log_var, eps[0]), (text_mean, text_log_var, eps[1])
    vectors = []
    for mean, log_var, noise in sides:
        vectors += [m + (v / 2).exp() * one for m, v, own in zip(mean, log_var, noise, strict=True) for one in own]
    exponents = [-2 * (x - y).square().sum() for i, x in enumerate(vectors) for y in vectors[:i]]
    return torch.stack(exponents).logsumexp(0) - math.log(len(exponents))


@pytest.mark.parametrize("max_pairs", [1000, 7])
@pytest.mark.parametrize("total_variance", [0.01, 0.1, 1, 8, 64, 512])
def test_uniformity_in_float32_is_the_loop_in_float64(total_variance, max_pairs):
    """A sum that includes each sample with itself is right for small variances only: exp(-2 * 1024) beside 1 is 0."""
    d = 512
    generator = torch.Generator().manual_seed(7)
    means = [torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=1) for n in (4, 6)]
    log_vars = [math.log(total_variance / d) + torch.randn(n, d, generator=generator) / 2 for n in (4, 6)]
    leaves = [t.requires_grad_() for pair in zip(means, log_vars, strict=True) for t in pair]
    image, text = GaussianEmbedding(*leaves[:2]), GaussianEmbedding(*leaves[2:])
    loss = PCMELoss(PCMEOptions(beta=0, uniformity_weight=1, n_samples=3))
    block = PairBlock.whole(image, text, MATCH.float(), "test")
    value = loss_of_block(loss, block, max_pairs=max_pairs).terms["uniformity"]
    value.backward()
    exact = [t.detach().double().requires_grad_() for t in leaves]
    generator = torch.Generator().manual_seed(zlib.crc32(b"0 0"))
    eps = [torch.randn((n, 3, d), generator=generator).double() for n in (4, 6)]
    expected = uniformity_by_loops(exact, eps)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    for ours, theirs in zip(leaves, exact, strict=True):
        assert float(theirs.grad.norm()) > 0
        relatively_equal(ours.grad.double(), theirs.grad, 1e-4)


def parity(shared):
    path = shared / "parity" / "pcme_mc_loss.json"
    return json.loads(path.read_text())["cases"], load_file(path.with_suffix(".safetensors"))


def relatively_equal(actual, expected, rtol):
    """Compares a gradient as a whole: no element is excused because it is small."""
    assert float((actual - expected).norm() / expected.norm()) < rtol


def run(tensors, case, name):
    """(released total, {name in the fixture: leaf}) for hard labels; a released head is ln s, so log_var = 2 head."""
    group = f"inputs/{case['group']}"
    values = {key: tensors[f"{group}/{key}"] for key in ("img_mean", "img_head", "txt_mean", "txt_head")}
    values |= {key: torch.tensor(float(case[f"init_{key}"])) for key in ("negative_scale", "shift")}
    leaf = {key: value.double().requires_grad_() for key, value in values.items()}
    match = tensors[f"{group}/matched"]
    uniformity = case.get("uniform_lambda", 0)
    options = PCMEOptions(sigmoid="compressed", beta=0, uniformity_weight=uniformity / match.numel())
    logits = {"logit_scale": leaf["negative_scale"], "logit_bias": leaf["shift"]}
    image, text = (GaussianEmbedding(leaf[f"{side}_mean"], 2 * leaf[f"{side}_head"]) for side in ("img", "txt"))
    noise = (tensors[f"{group}/img_eps"], tensors[f"{group}/txt_eps"])
    return match.numel() * pcme_loss(image, text, match, options, **logits, noise=noise).total, leaf


def test_parity_of_values_and_gradients(shared):
    """Released sums over pairs and both directions; their bottleneck reads the head ln s as ln s^2."""
    cases, tensors = parity(shared)
    checked = 0
    for name, case in cases.items():
        if case.get("prob_distance") != "non_squared_l2" or case["pdist_fn"] != "iterative" or case["group"] == "soft":
            continue  # Squared distances, 1e-6 under the root, labels that scale the logit.
        total, leaf = run(tensors, case, name)
        if case["vib_beta"]:
            heads = [GaussianEmbedding(leaf[f"{k}_mean"], leaf[f"{k}_head"]) for k in ("img", "txt")]
            total = total + case["vib_beta"] * sum(vib_loss(e) for e in heads)
        torch.testing.assert_close(float(total.detach()), case["loss"], rtol=1e-9, atol=0)
        total.backward()
        for key, value in leaf.items():
            stored = tensors[f"{name}/grad/{key}"].reshape(value.shape)
            relatively_equal(value.grad, stored, 1e-9)
        checked += 1
    assert checked == 4


@pytest.mark.parametrize("name", ["plain", "vib", "vib_uniform", "coco15"])
def test_parity_of_the_original_in_all_terms_with_converted_weights(shared, name):
    """Over the number of pairs; samples are noise around their mean: the head has the bottleneck's gradient alone."""
    cases, tensors = parity(shared)
    name = f"pcme_case/{name}"
    case, group = cases[name], f"inputs/{cases[name]['group']}"
    leaf = {}
    for (ours, theirs), part in itertools.product((("image", "img"), ("caption", "txt")), ("samples", "head")):
        leaf[f"{ours}_{part}"] = tensors[f"{group}/{theirs}_{part}"].double().requires_grad_()
    a, b = (torch.tensor(float(case[f"init_{key}"]), dtype=torch.float64) for key in ("negative_scale", "shift"))
    leaf |= {"negative_scale": a.requires_grad_(), "shift": b.requires_grad_()}
    sides, noise = [], []
    for side in ("image", "caption"):
        z, head = leaf[f"{side}_samples"], leaf[f"{side}_head"]
        sides.append(GaussianEmbedding(z.mean(1), head))
        noise.append((z - z.mean(1, keepdim=True)) / (head / 2).exp().unsqueeze(1))
    match = tensors[f"{group}/matched"]
    beta = case["vib_beta"] * sides[0].d / match.shape[0]  # docs/concepts/losses.md has the rule.
    uniformity = case.get("uniform_lambda", 0) / match.numel()
    options = PCMEOptions(sigmoid="compressed", beta=beta, uniformity_weight=uniformity)
    output = pcme_loss(*sides, match, options, logit_scale=a, logit_bias=b, noise=tuple(noise))
    weighted = {"match": 1, "vib": options.beta, "uniformity": options.uniformity_weight}
    assert set(output.terms) == {key for key, weight in weighted.items() if weight}
    assert output.total.item() * match.numel() == pytest.approx(case["loss"], rel=1e-5)
    output.total.backward()
    compared = [key for key in leaf if f"{name}/grad/{key}" in tensors]
    assert len(compared) == (6 if case["vib_beta"] else 4)
    for key in compared:
        stored = tensors[f"{name}/grad/{key}"]
        relatively_equal(match.numel() * leaf[key].grad.reshape(stored.shape), stored, 1e-5)
