"""InfoNCE, ProLIP and inclusion against slow loops, integrals, the loss of CLIP, and the numbers of released code."""

import json
import math

import pytest
import scipy
import torch
from safetensors.torch import load_file
from support import references
from support.batches import MATCH, batch
from support.parity import released_inclusion_loss, released_inclusion_test, released_log_inclusion

from sfumato import DISTANCES, GaussianEmbedding, InfoNCELoss, ProLIPLoss, infonce_loss, prolip_loss
from sfumato.losses.base import vib_loss
from sfumato.losses.contrastive import InfoNCEOptions, ProLIPOptions, inclusion_losses, inclusion_test, log_inclusion


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
    rows, columns = (MATCH >= 0.5).nonzero(as_tuple=True)
    torch.testing.assert_close(
        term(image, text, MATCH).terms["inclusion"], inclusion_losses(image[rows], text[columns]).mean()
    )
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


inclusion_loss = lambda *sides, **options: inclusion_losses(*sides, **options).mean()


def density(t, mean, log_var):
    return math.exp(-((t - mean) ** 2) / (2 * math.exp(log_var)) - log_var / 2) / math.sqrt(2 * math.pi)


def integrated(x, y, powers=(2, 1)):
    """(n, d) logarithms of the integrals, one by one; the range holds all of the narrower one's mass and more."""
    values = []
    for m1, l1, m2, l2 in zip(*(e.flatten().tolist() for e in (x.mean, x.log_var, y.mean, y.log_var)), strict=True):
        peaks, widths = [m1, m2], [math.exp(l1 / 2), math.exp(l2 / 2)]
        low, high = min(peaks) - 12 * min(widths), max(peaks) + 12 * min(widths)
        f = lambda t, a=m1, b=l1, c=m2, d=l2: density(t, a, b) ** powers[0] * density(t, c, d) ** powers[1]
        near = [p + k * w for p in peaks for w in widths for k in (-4, -1, 0, 1, 4) if low < p + k * w < high]
        values.append(math.log(scipy.integrate.quad(f, low, high, points=near, limit=500, epsabs=0, epsrel=1e-12)[0]))
    return torch.tensor(values, dtype=torch.float64).reshape(x.mean.shape)


def pairs(seed=0):
    """Rows of two sides whose variances differ by up to e^6 either way."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda scale: scale * torch.randn(7, 5, generator=generator, dtype=torch.float64)
    return GaussianEmbedding(draw(0.6), draw(1.5) - 2), GaussianEmbedding(draw(0.6), draw(1.5) - 2)


def test_log_inclusion_is_the_integral_and_its_loss_the_loops():
    x, y = pairs()
    exact = integrated(x, y)
    torch.testing.assert_close(log_inclusion(x, y), exact, rtol=1e-9, atol=1e-9)
    assert torch.equal((exact - integrated(y, x)).sign(), (y.log_var - x.log_var).sign())
    for scale in (0.7, 10.0):
        loop = [math.log1p(math.exp(-scale * value)) for row in inclusion_test(x, y).tolist() for value in row]
        loss = inclusion_loss(x, y, scale=scale)
        assert loss.item() == pytest.approx(sum(loop) / len(loop), rel=1e-12)
    narrow, wide = (GaussianEmbedding(x.mean, x.log_var + k) for k in (-1, 1))
    assert inclusion_loss(narrow, wide) < 1e-9 < 100 < inclusion_loss(wide, narrow)


def test_tiny_variances_gradients_and_half_precision():
    mean = torch.tensor([[0.3, -0.2, 0.1, 0.0]])
    x = GaussianEmbedding(mean, torch.tensor([[-100.0, 60.0, -100.0, -160.0]]))
    y = GaussianEmbedding(mean + 1e-18, torch.tensor([[-98.0, -100.0, 60.0, -160.0]]))
    wide, leaf = [e.to(torch.float64) for e in (x, y)], x.log_var.clone().requires_grad_()
    value = log_inclusion(GaussianEmbedding(x.mean, leaf), y)
    torch.testing.assert_close(value.double(), log_inclusion(*wide), rtol=1e-5, atol=1e-6)
    value.sum().backward()
    assert torch.isfinite(leaf.grad).all() and not torch.isfinite((-x.log_var).exp()).all()
    x, y = (e[:2] for e in pairs())
    inputs = [t.requires_grad_() for t in (x.mean, x.log_var, y.mean, y.log_var)]
    loss = lambda a, b, c, d: inclusion_loss(GaussianEmbedding(a, b), GaussianEmbedding(c, d), scale=0.5)
    assert torch.autograd.gradcheck(loss, inputs)
    half = log_inclusion(x.to(torch.bfloat16), y.to(torch.bfloat16))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), log_inclusion(x, y), rtol=0.05, atol=0.05)


def test_the_released_form_differs_in_size_and_hardly_sees_the_means():
    x, y = pairs()
    exact = integrated(x, y) - integrated(y, x)
    torch.testing.assert_close(inclusion_test(x, y), exact, rtol=1e-8, atol=1e-8)
    expected = exact + (y.log_var - x.log_var) / 2
    torch.testing.assert_close(released_inclusion_test(x, y, eps=0.0), expected, rtol=1e-8, atol=1e-8)
    shifted = GaussianEmbedding(x.mean + (x.log_var / 2).exp(), x.log_var)
    released = lambda a, b: released_log_inclusion(a, b, eps=-10.0)
    moved = [(test(shifted, y) - test(x, y)).abs().median() for test in (log_inclusion, released)]
    assert moved[0] > 0.1 and moved[1] == pytest.approx(moved[0].item() * math.exp(-10), rel=1e-6)
