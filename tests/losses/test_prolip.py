"""ProLIP against slow loops, its published logit, and the numbers of its released code."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from support import references
from support.batches import MATCH, batch

from sfumato.distances import csd_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.inclusion import inclusion_loss, inclusion_test
from sfumato.losses import PairBlock, ProLIPOptions, loss_of_block, vib_loss
from sfumato.losses.prolip import ProLIPLoss, prolip_loss

NOTHING_ELSE = ProLIPOptions(beta=0.0, inclusion_weight=0.0)


def test_prolip_is_the_loops():
    image, text = batch()
    output = prolip_loss(
        image,
        text,
        MATCH,
        ProLIPOptions(beta=0.3, inclusion_weight=0.2, inclusion_scale=4.0),
        logit_scale=1.5,
        logit_bias=0.7,
    )
    sides = [list(zip(e.mean.tolist(), e.var.tolist(), strict=True)) for e in (image, text)]
    logits = [[0.7 - 1.5 * references.csd(*i, *t) for t in sides[1]] for i in sides[0]]
    expected = {
        "match": 24 * references.mean_cross_entropy(logits, MATCH.tolist()) / 5,
        "vib": 0.3 * sum(references.vib(e.mean.tolist(), e.var.tolist()) for e in (image, text)),
    }
    values = []
    for i, j in [(0, 0), (0, 4), (1, 1), (2, 2), (2, 5), (3, 3)]:  # labels of 0.5 and more; (3, 5) has 0.3
        test = inclusion_test(image[i : i + 1], text[j : j + 1]).squeeze(0).tolist()
        values.append(sum(math.log1p(math.exp(-4.0 * value)) for value in test) / 5)
    expected["inclusion"] = 0.2 * sum(values) / 6
    for name, value in expected.items():
        assert output.terms[name].item() == pytest.approx(value, rel=1e-12)
    assert output.total.item() == pytest.approx(sum(expected.values()), rel=1e-12)


def published(image, text, scale, bias):
    """Summed over all pairs, label +1 on the diagonal and -1 elsewhere, divided by n; nothing of ours in it."""
    total = 0.0
    for i in range(image.n):
        for j in range(text.n):
            dot = sum(a * b for a, b in zip(image.mean[i].tolist(), text.mean[j].tolist(), strict=True))
            variance = sum(image.var[i].tolist()) + sum(text.var[j].tolist())
            logit = scale * (dot - 0.5 * variance) + bias
            total += math.log1p(math.exp(-logit if i == j else logit))
    return total / image.n


def test_on_unit_means_the_logit_is_the_published_one():
    image, text = batch(5, 5)
    image, text = (GaussianEmbedding(e.mean / e.mean.norm(dim=1, keepdim=True), e.log_var) for e in (image, text))
    right = published(image, text, scale=6.0, bias=-4.0)

    def ours(scale, bias, distance="csd"):
        options = dataclasses.replace(NOTHING_ELSE, distance=distance)
        return prolip_loss(image, text, torch.eye(5), options, logit_scale=scale, logit_bias=bias).total.item()

    assert ours(3.0, 2.0) == pytest.approx(right, rel=1e-12)
    for wrong in (
        ours(6.0, -4.0),
        ours(6.0, 2.0),
        ours(3.0, -4.0),
        ours(3.0, 2.0, distance="squared_l2"),
        ours(3.0, 2.0) / 5,
        2 * ours(3.0, 2.0),
    ):
        assert abs(wrong - right) > 1e-2
    long = [GaussianEmbedding(2 * e.mean, e.log_var) for e in (image, text)]
    assert (
        abs(published(*long, 6.0, -4.0) - prolip_loss(*long, torch.eye(5), logit_scale=3.0, logit_bias=2.0).total) > 0.1
    )


def test_inclusion_is_of_images_in_texts_and_of_matches_only():
    image, text = batch()
    options = ProLIPOptions(beta=0.0, inclusion_weight=1.0, inclusion_scale=3.0)
    term = lambda a, b, match: prolip_loss(a, b, match, options, logit_scale=2.0, logit_bias=1.0)
    one_hot = torch.eye(4, 6)
    inside = inclusion_loss(image, text[:4], scale=3.0)
    output = term(image, text, one_hot)
    torch.testing.assert_close(output.terms["inclusion"], inside)
    stats = ProLIPLoss(options).double()(image, text, one_hot).stats
    assert stats["included"].item() == pytest.approx((image.log_var < text[:4].log_var).double().mean().item())
    assert (term(text, image, one_hot.T).terms["inclusion"] - inside).abs() > 1e-3
    torch.testing.assert_close(term(text, image, one_hot.T).terms["match"], output.terms["match"])
    nothing = term(image, text, torch.zeros(4, 6))
    assert nothing.terms["inclusion"] == 0 and torch.isfinite(nothing.total)


def test_points_have_a_match_term():
    image, text = (GaussianEmbedding.point(e.mean) for e in batch())
    output = prolip_loss(image, text, MATCH, ProLIPOptions(beta=0), logit_scale=2.0, logit_bias=1.0)
    assert set(output.terms) == {"match"} and torch.isfinite(output.total)


@pytest.mark.parametrize("max_pairs", [1, 7, 12])
def test_blocks_add_up_with_inclusion(max_pairs):
    loss = ProLIPLoss(ProLIPOptions(inclusion_weight=0.3, inclusion_scale=2.0, beta=0.1)).double()
    results = []
    for limit in (1000, max_pairs):
        image, text = batch()
        leaves = [t.requires_grad_() for e in (image, text) for t in (e.mean, e.log_var)]
        output = loss_of_block(loss, PairBlock.whole(image, text, MATCH, "test"), max_pairs=limit)
        loss.zero_grad()
        output.total.backward()
        results.append([output.total, *output.terms.values(), *output.stats.values()])
        results[-1] += [t.grad.clone() for t in (*leaves, *loss.parameters())]
    for whole, blocks in zip(*results, strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-10, atol=1e-12, check_dtype=False)


def test_module_starts_at_scale_10_and_bias_minus_10():
    loss, (image, text) = ProLIPLoss().double(), batch(5, 5)
    image, text = (GaussianEmbedding(e.mean / e.mean.norm(dim=1, keepdim=True), e.log_var) for e in (image, text))
    output = loss(image, text, torch.eye(5))
    assert output.terms["match"].item() == pytest.approx(published(image, text, 10.0, -10.0), rel=1e-6)
    assert set(output.terms) == {"match", "vib"}
    assert output.terms["vib"].item() == pytest.approx(1e-4 * (vib_loss(image) + vib_loss(text)).item())
    output.total.backward()
    assert loss.logits.log_logit_scale.grad.abs() > 0 and loss.logits.logit_bias.grad.abs() > 0


def released_total(case, leaves):
    """Name -> weighted term, from our functions, and with the three deviations that make it the released loss: its form
    of inclusion, its bottleneck of halved log variances, and no inclusion at all where that exceeds 1e5."""
    of = lambda side: GaussianEmbedding(leaves[f"{side}_mean"], leaves[f"{side}_log_var"])
    image, text = of("img"), of("txt")
    n = image.n
    match = torch.zeros(n, n) if case["negative_only"] else torch.eye(n)

    def ppcl(image, text, scale, bias):
        # The stored means are unit in float32 only: a bias for every pair makes the two logits equal for any means.
        norms = [e.mean.square().sum(1) for e in (image, text)]
        bias = bias + scale * (norms[0].unsqueeze(1) + norms[1]) / 2
        return prolip_loss(image, text, match, NOTHING_ELSE, logit_scale=scale / 2, logit_bias=bias).total

    terms = {"ppcl": case.get("ppcl_lambda", 1.0) * ppcl(image, text, leaves["logit_scale"], leaves["logit_bias"])}
    settings = {"scale": case.get("inclusion_loss_scale", 1000), "released_eps": case.get("inclusion_loss_eps", -10)}
    if case.get("siglip_lambda"):
        points = [GaussianEmbedding.point(e.mean) for e in (image, text)]
        terms["siglip"] = case["siglip_lambda"] * ppcl(*points, torch.tensor(8.0), torch.tensor(-7.0))
    if case.get("inclusion_alpha"):
        value = prolip_loss(
            image,
            text,
            match,
            ProLIPOptions(
                beta=0.0,
                inclusion_weight=case["inclusion_alpha"],
                inclusion_scale=settings["scale"],
                released_eps=settings["released_eps"],
            ),
            logit_scale=1.0,
            logit_bias=0.0,
        ).terms["inclusion"]
        terms["inclusion"] = 0 * value if value > 1e5 * case["inclusion_alpha"] else value
    if case["masked"]:
        for side, whole in (("img", image), ("txt", text)):
            masked = of(f"masked_{side}")
            terms[f"{side}_inclusion"] = case["inclusion_alpha_occ"] * inclusion_loss(
                whole[: masked.n], masked, **settings
            )
    if case["vib_beta"]:
        halved = [GaussianEmbedding(e.mean, e.log_var / 2) for e in (image, text)]
        terms["vib"] = case["vib_beta"] * sum(vib_loss(e) for e in halved)
    return terms


def test_parity_with_the_released_loss(shared):
    """All terms, totals and gradients of all cases to 1e-10."""
    about = json.loads((shared / "parity" / "prolip" / "loss.json").read_text())
    tensors = load_file(shared / "parity" / "prolip" / "loss.safetensors")
    assert len(about["cases"]) > 10
    for name, case in about["cases"].items():
        leaves = {
            key.removeprefix("inputs/"): value.double().requires_grad_()
            for key, value in tensors.items()
            if key.startswith("inputs/")
        }

        def close(ours, key, name=name):
            stored = tensors[f"case/{name}/{key}"]
            torch.testing.assert_close(ours, stored, rtol=1e-10, atol=1e-13, msg=lambda text: f"{name} {key}: {text}")

        terms = released_total(case, leaves)
        assert set(terms) == set(case["terms"]), name
        for term, value in terms.items():
            close(value, term)
        total = torch.stack(list(terms.values())).sum()
        close(total, "loss")
        total.backward()
        for key in (k.split("/grad/")[1] for k in tensors if k.startswith(f"case/{name}/grad/")):
            close(leaves[key].grad, f"grad/{key}")


def test_parity_of_the_logits_and_the_bottleneck_that_is_none(shared):
    tensors = load_file(shared / "parity" / "prolip" / "loss.safetensors")
    sides = {s: [tensors[f"inputs/{s}_{what}"].double() for what in ("mean", "log_var")] for s in ("img", "txt")}
    unit = {s: GaussianEmbedding(torch.nn.functional.normalize(mean), log_var) for s, (mean, log_var) in sides.items()}
    scale, bias = tensors["inputs/logit_scale"].double(), tensors["inputs/logit_bias"].double()
    logits = (bias + scale) - scale / 2 * csd_matrix(unit["img"], unit["txt"])
    torch.testing.assert_close(logits, tensors["ppcl/logits"], rtol=1e-6, atol=1e-6)
    for side, (mean, log_var) in sides.items():
        torch.testing.assert_close(vib_loss(GaussianEmbedding(mean, log_var / 2)), tensors[f"kl/{side}"])
        assert (vib_loss(GaussianEmbedding(mean, log_var)) - tensors[f"kl/{side}"]).abs() > 0.1
