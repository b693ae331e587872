"""InfoNCE and ProLIP against slow loops, the loss of CLIP, and the numbers of released code."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from support import references
from support.batches import MATCH, batch
from support.parity import released_inclusion_loss

from sfumato import DISTANCES, GaussianEmbedding, InfoNCELoss, ProLIPLoss, infonce_loss, prolip_loss
from sfumato.losses.base import vib_loss
from sfumato.losses.contrastive import InfoNCEOptions, ProLIPOptions, inclusion_losses, inclusion_test


@pytest.mark.parametrize("distance", ["squared_l2", "csd", "bhattacharyya"])
def test_infonce_is_the_loops(distance):
    image, text = batch()
    pairs = DISTANCES[distance].matrix(image, text)
    for match in (MATCH, MATCH * torch.tensor([1.0, 0, 1, 1]).unsqueeze(1)):
        value = infonce_loss(image, text, match, InfoNCEOptions(distance=distance), logit_scale=1.7).total
        assert value.item() == pytest.approx(references.infonce(pairs.tolist(), match.tolist(), 1.7), rel=1e-12)


@pytest.mark.parametrize("free", [True, False])
def test_only_a_free_scale_moves_as_the_released_temperature(free):
    """The released code learns tau in softmax(tau * cos); tau is twice our scale, so half its learning rate is ours."""
    image, other = (e.mean for e in batch(5, 5, dtype=torch.float32))
    pair = (image, image + other / 5)
    image, text = (GaussianEmbedding.point(torch.nn.functional.normalize(mean, dim=1)) for mean in pair)
    tau = torch.nn.Parameter(torch.ones(()))
    loss = InfoNCELoss(InfoNCEOptions(logit_scale=0.5, free_scale=free))
    theirs = torch.optim.Adam([tau], lr=0.1, eps=1e-12)
    ours = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], lr=0.05, eps=1e-12)
    ground_truth = torch.arange(5)
    for _ in range(20):
        logits = tau * image.mean @ text.mean.T
        rows, columns = (torch.nn.functional.cross_entropy(x, ground_truth) for x in (logits, logits.T))
        for optimiser, total in ((theirs, (rows + columns) / 2), (ours, loss(image, text, torch.eye(5)).total)):
            optimiser.zero_grad()
            total.backward()
            optimiser.step()
    assert abs(tau.item() - 1) > 0.5 and not loss.logits.logit_bias.requires_grad
    assert (2 * loss.logits.logit_scale.item() == pytest.approx(tau.item(), abs=1e-4)) == free


NOTHING_ELSE = ProLIPOptions(beta=0.0, inclusion_weight=0.0)


def test_prolip_is_the_loops():
    image, text = batch()
    options = ProLIPOptions(beta=0.3, inclusion_weight=0.2)
    output = prolip_loss(image, text, MATCH, options, logit_scale=1.5, logit_bias=0.7)
    sides = [list(zip(e.mean.tolist(), e.var.tolist(), strict=True)) for e in (image, text)]
    logits = [[0.7 - 1.5 * references.csd(*i, *t) for t in sides[1]] for i in sides[0]]
    expected = {
        "match": 24 * references.mean_cross_entropy(logits, MATCH.tolist()) / 5,
        "vib": 0.3 * sum(references.vib(e.mean.tolist(), e.var.tolist()) for e in (image, text)),
    }
    values = []
    for i, j in [(0, 0), (0, 4), (1, 1), (2, 2), (2, 5), (3, 3)]:  # labels of 0.5 and more; (3, 5) has 0.3
        test = inclusion_test(image[i : i + 1], text[j : j + 1]).squeeze(0).tolist()
        values.append(sum(max(0, -1000 * v) + math.log1p(math.exp(-1000 * abs(v))) for v in test) / 5)
    expected["inclusion"] = 0.2 * sum(values) / 6
    for name, value in expected.items():
        assert output.terms[name].item() == pytest.approx(value, rel=1e-12)
    assert output.total.item() == pytest.approx(sum(expected.values()), rel=1e-12)


def test_inclusion_is_of_images_in_texts_and_of_matches_only():
    image, text = batch()
    options = ProLIPOptions(beta=0.0, inclusion_weight=1.0)
    term = lambda a, b, match: prolip_loss(a, b, match, options, logit_scale=2.0, logit_bias=1.0)
    one_hot = torch.eye(4, 6)
    inside = inclusion_losses(image, text[:4]).mean()
    output = term(image, text, one_hot)
    torch.testing.assert_close(output.terms["inclusion"], inside)
    stats = ProLIPLoss(options).double()(image, text, one_hot).stats
    assert stats["included"].item() == pytest.approx((image.log_var < text[:4].log_var).double().mean().item())
    assert (term(text, image, one_hot.T).terms["inclusion"] - inside).abs() > 1e-3
    torch.testing.assert_close(term(text, image, one_hot.T).terms["match"], output.terms["match"])
    nothing = term(image, text, torch.zeros(4, 6))
    assert nothing.terms["inclusion"] == 0 and torch.isfinite(nothing.total)


def released_total(case, leaves):
    """Weighted terms: ours, with the released inclusion (none above 1e5) and bottleneck of halved log variances."""
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
    settings = case.get("inclusion_loss_scale", 1000), case.get("inclusion_loss_eps", -10)
    if case.get("siglip_lambda"):
        points = [GaussianEmbedding.point(e.mean) for e in (image, text)]
        terms["siglip"] = case["siglip_lambda"] * ppcl(*points, torch.tensor(8.0), torch.tensor(-7.0))
    if case.get("inclusion_alpha"):
        loss = 0 * image.mean.sum() if case["negative_only"] else released_inclusion_loss(image, text, *settings)
        terms["inclusion"] = (0 if loss > 1e5 else case["inclusion_alpha"]) * loss
    if case["masked"]:
        for side, whole in (("img", image), ("txt", text)):
            masked = of(f"masked_{side}")
            loss = released_inclusion_loss(whole[: masked.n], masked, *settings)
            terms[f"{side}_inclusion"] = case["inclusion_alpha_occ"] * loss
    if case["vib_beta"]:
        halved = [GaussianEmbedding(e.mean, e.log_var / 2) for e in (image, text)]
        terms["vib"] = case["vib_beta"] * sum(vib_loss(e) for e in halved)
    return terms


def test_parity_with_the_released_loss(shared):
    about = json.loads((shared / "parity" / "prolip" / "loss.json").read_text())
    tensors = load_file(shared / "parity" / "prolip" / "loss.safetensors")
    assert len(about["cases"]) > 10
    for name, case in about["cases"].items():
        inputs = {key: value for key, value in tensors.items() if key.startswith("inputs/")}
        leaves = {key.removeprefix("inputs/"): value.double().requires_grad_() for key, value in inputs.items()}

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
