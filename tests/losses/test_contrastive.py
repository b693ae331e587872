"""Contrastive losses and PCME against slow loops, integrals, the loss of CLIP, and the numbers of released code."""

import dataclasses
import itertools
import math
import re
import zlib

import pytest
import scipy
import torch
from support import references
from support.batches import MATCH, batch
from support.parity import fixture, released_inclusion_loss, released_inclusion_test, released_log_inclusion

from sfumato import DISTANCES, GaussianEmbedding, InfoNCELoss, ProLIPLoss, infonce_loss, prolip_loss
from sfumato.encoders.heads import GPO
from sfumato.losses.base import PairBlock, loss_of_block, vib_loss
from sfumato.losses.contrastive import InfoNCEOptions, ProLIPOptions, inclusion_losses, inclusion_test, log_inclusion
from sfumato.losses.pcme import PCMELoss, PCMEOptions, pcme_loss
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions, pcmepp_loss, pseudo_positives
from sfumato.matching import match_logit, match_probability_distance

inclusion_loss = lambda *sides, **options: inclusion_losses(*sides, **options).mean()
gaussians = lambda tensors: [GaussianEmbedding(tensors[f"mean{k}"], tensors[f"log_var{k}"]) for k in (1, 2)]
samples = lambda e, values: e.mean[:, None] + e.var.sqrt()[:, None] * values


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
    every = inclusion_losses(image[rows], text[columns]).mean()
    torch.testing.assert_close(term(image, text, MATCH).terms["inclusion"], every)
    nothing = term(image, text, torch.zeros(4, 6))
    assert nothing.terms["inclusion"] == 0 and torch.isfinite(nothing.total)


def released_total(case, leaves):
    """Weighted terms: ours, with the released inclusion (none above 1e5) and bottleneck of halved log variances."""
    of = lambda side: GaussianEmbedding(leaves[f"{side}_mean"], leaves[f"{side}_log_var"])
    image, text = of("img"), of("txt")
    n = image.n
    match = torch.zeros(n, n) if case["negative_only"] else torch.eye(n)
    bare = ProLIPOptions(beta=0.0, inclusion_weight=0.0)

    def ppcl(image, text, scale, bias):
        # The stored means are unit in float32 only: a bias for every pair makes the two logits equal for any means.
        norms = [e.mean.square().sum(1) for e in (image, text)]
        bias = bias + scale * (norms[0].unsqueeze(1) + norms[1]) / 2
        return prolip_loss(image, text, match, bare, logit_scale=scale / 2, logit_bias=bias).total

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


def test_parity_with_the_released_loss():
    about, tensors = fixture("prolip/loss")
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
    generator = torch.Generator().manual_seed(seed)
    draw = lambda scale: scale * torch.randn(7, 5, generator=generator, dtype=torch.float64)
    return GaussianEmbedding(draw(0.6), draw(1.5) - 2), GaussianEmbedding(draw(0.6), draw(1.5) - 2)


def test_log_inclusion_is_the_integral_its_loss_the_loops_and_the_released_form_differs():
    x, y = pairs()
    exact = integrated(x, y)
    torch.testing.assert_close(log_inclusion(x, y), exact, rtol=1e-9, atol=1e-9)
    assert torch.equal((exact - integrated(y, x)).sign(), (y.log_var - x.log_var).sign())
    for scale in (0.7, 10.0):
        loop = [math.log1p(math.exp(-scale * value)) for row in inclusion_test(x, y).tolist() for value in row]
        assert inclusion_loss(x, y, scale=scale).item() == pytest.approx(sum(loop) / len(loop), rel=1e-12)
    narrow, wide = (GaussianEmbedding(x.mean, x.log_var + k) for k in (-1, 1))
    assert inclusion_loss(narrow, wide) < 1e-9 < 100 < inclusion_loss(wide, narrow)
    exact = exact - integrated(y, x)
    torch.testing.assert_close(inclusion_test(x, y), exact, rtol=1e-8, atol=1e-8)
    expected = exact + (y.log_var - x.log_var) / 2
    torch.testing.assert_close(released_inclusion_test(x, y, eps=0.0), expected, rtol=1e-8, atol=1e-8)
    shifted = GaussianEmbedding(x.mean + (x.log_var / 2).exp(), x.log_var)
    released = lambda a, b: released_log_inclusion(a, b, eps=-10.0)
    moved = [(test(shifted, y) - test(x, y)).abs().median() for test in (log_inclusion, released)]
    assert moved[0] > 0.1 and moved[1] == pytest.approx(moved[0].item() * math.exp(-10), rel=1e-6)


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
    loss = lambda a, b, c, d: inclusion_loss(GaussianEmbedding(a, b), GaussianEmbedding(c, d), scale=0.5)
    assert torch.autograd.gradcheck(loss, [t.requires_grad_() for t in (x.mean, x.log_var, y.mean, y.log_var)])
    half = log_inclusion(x.to(torch.bfloat16), y.to(torch.bfloat16))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), log_inclusion(x, y), rtol=0.05, atol=0.05)


def test_terms_left_out_pseudo_positives_by_hand_and_a_scale_that_never_turns():
    image, text = batch(dtype=torch.float32)
    full = PCMEPPLoss()(image, text, MATCH)
    assert set(full.terms) == {"match", "pseudo_positive", "vib"}
    for name, sides, match in (("i2t", (image, text), MATCH), ("t2i", (text, image), MATCH.T)):
        more = (pseudo_positives(DISTANCES["csd"].matrix(*sides), match) > match).sum()
        assert full.stats[f"pseudo_positives_{name}"] == more > 0
    points = GaussianEmbedding.point(image.mean), GaussianEmbedding.point(text.mean)
    bare = PCMEPPLoss(PCMEPPOptions(alpha=0, beta=0))(*points, MATCH)
    assert set(bare.terms) == {"match"} and torch.isfinite(bare.total)
    late = PCMEPPLoss(PCMEPPOptions(pseudo_positives_from=3))
    assert "pseudo_positive" not in late(image, text, MATCH, epoch=2).terms
    assert "pseudo_positive" in late(image, text, MATCH, epoch=3).terms
    assert "pseudo_positive" in late(image, text, MATCH).terms
    distance = torch.tensor([[3.0, 1.0, 3.0, 5.0], [2.0, 2.5, 0.5, 0.4]])
    match = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.7, 0.3, 0.0]])
    assert pseudo_positives(distance, 0 * match).eq(0).all(), "rows without a match"
    # Row 0: the truth lies at 3; column 1 is closer, column 2 ties. Row 1: the truth lies at 2.5; all are closer.
    assert pseudo_positives(distance, match).tolist() == [[1.0, 1.0, 1.0, 0.0], pytest.approx([0.7, 0.7, 0.7, 0.7])]
    loss = PCMEPPLoss(PCMEPPOptions(logit_scale=0.01))
    optimiser = torch.optim.SGD(loss.parameters(), lr=1e3)
    for _ in range(5):
        optimiser.zero_grad()
        loss(image, text, 1 - MATCH.float()).total.backward()
        optimiser.step()
        assert loss.logits.logit_scale >= 0  # It may underflow to 0, where the loss is constant, and never turns over.
    with pytest.raises(ValueError, match="logit_scale must be above 0, got 0"):
        PCMEPPLoss(PCMEPPOptions(logit_scale=0))


def test_vib_by_hand_its_guard_and_its_overflow():
    zeros = torch.zeros(3, 4)
    assert vib_loss(GaussianEmbedding(zeros, zeros)) == 0
    assert vib_loss(GaussianEmbedding(zeros, zeros + 1e-3)).item() == pytest.approx(1e-6 / 4, rel=2e-2)
    image, text = batch()
    assert vib_loss(image).item() == pytest.approx(references.vib(image.mean.tolist(), image.var.tolist()), rel=1e-12)
    wide = GaussianEmbedding(image.mean, torch.full_like(image.mean, 12.0))
    options = PCMEPPOptions(alpha=0, beta=1.0)
    output = PCMEPPLoss(options).double()(wide, text, MATCH)
    assert output.stats["vib_ignored"] == 1
    for same in (output, pcmepp_loss(wide, text, MATCH, options, logit_scale=1.0, logit_bias=1.0)):
        assert same.terms["vib"].item() == pytest.approx(vib_loss(text).item())
    log_var = torch.tensor([[89.0, 0.0]], requires_grad=True)  # exp(89) is more than float32 holds.
    image = GaussianEmbedding(torch.zeros(1, 2), log_var)
    text = GaussianEmbedding(torch.ones(1, 2), torch.zeros(1, 2))
    output = PCMEPPLoss(PCMEPPOptions(distance="squared_l2", alpha=0, beta=1.0))(image, text, torch.ones(1, 1))
    output.total.backward()
    assert output.stats["vib_ignored"] == 1 and torch.isfinite(output.total)
    assert log_var.grad.tolist() == [[0.0, 0.0]]


def run_case(case, tensors, dtype):
    names, inputs = ("img_mean", "img_log_var", "txt_mean", "txt_log_var"), f"inputs/{case['group']}"
    leaves = {name: tensors[f"{inputs}/{name}"].to(dtype).clone().requires_grad_() for name in names}
    scale = torch.tensor(case["negative_scale"], dtype=dtype, requires_grad=True)
    bias = torch.tensor(case["shift"], dtype=dtype, requires_grad=True)
    image = GaussianEmbedding(leaves["img_mean"], leaves["img_log_var"])
    text = GaussianEmbedding(leaves["txt_mean"], leaves["txt_log_var"])
    distance, match = case["prob_distance"].replace("wdist", "wasserstein2"), tensors[f"{inputs}/matched"]
    options = PCMEPPOptions(distance=distance, alpha=case["smoothness_alpha"], beta=case["vib_beta"])
    output = pcmepp_loss(image, text, match, options, logit_scale=scale, logit_bias=bias)
    return output, leaves, scale, bias, DISTANCES[distance].matrix(image, text), image, text


def test_parity_pcmepp_loss():
    about, tensors = fixture("pcmepp_loss")
    assert about["cases"]
    for name, case in about["cases"].items():
        value = lambda key, name=name: tensors[f"case/{name}/{key}"]

        def close(ours, stored, name=name):
            exact = {"rtol": 1e-10, "atol": 1e-13, "msg": lambda said: f"{name}: {said}"}
            torch.testing.assert_close(ours, stored.reshape(ours.shape), **exact)

        output, leaves, scale, bias, distance, image, text = run_case(case, tensors, torch.float64)
        close(output.total, value("loss"))
        close(output.terms["match"], 2 * value("match_bce"))
        match = tensors[f"inputs/{case['group']}/matched"].double()
        close(match_logit(distance, scale, bias), value("logits"))
        if case["smoothness_alpha"]:
            both = value("pp_bce_i2t") + value("pp_bce_t2i")
            close(output.terms["pseudo_positive"], case["smoothness_alpha"] * both)
            for direction, d, m in (("i2t", distance, match), ("t2i", distance.T, match.T)):
                close(pseudo_positives(d, m), value(f"pp_labels_{direction}"))
                # Entries at most as far as the row's own match less one a row, without and with those whose order
                # rounding decides (equal embeddings in a batch).
                own = d.gather(1, m.max(1, keepdim=True).indices)
                fewest, most = (int((d <= own + slack).sum()) - len(d) for slack in (-1e-12 * own, 1e-12 * own))
                assert fewest <= int(value(f"n_pseudo_gts_{direction}")) <= most, name
        if case["vib_beta"] and "warnings" not in case:
            close(vib_loss(image), value("kl_img"))
            close(vib_loss(text), value("kl_txt"))
        output.total.backward()
        for key, leaf in leaves.items():
            close(leaf.grad, value(f"grad/{key}"))
        close(scale.grad, value("grad/negative_scale"))
        close(bias.grad, value("grad/shift"))
    for name, case in about["cases"].items():
        output, leaves, scale, bias, *_ = run_case(case, tensors, torch.float32)
        torch.testing.assert_close(output.total.double(), tensors[f"case/{name}/loss"], rtol=1e-6, atol=0)
        output.total.backward()
        for key, leaf in {**leaves, "negative_scale": scale, "shift": bias}.items():
            stored = tensors[f"case/{name}/grad/{key}"].reshape(leaf.shape)
            error = (leaf.grad.double() - stored).norm() / stored.norm()
            assert error < (1e-6 if key in leaves else 5e-6), f"{name}: gradient of {key} is off by {error:.1e}"


def test_parity_gpo():
    about, tensors = fixture("gpo")
    groups = sorted({key.split("/")[1] for key in about["tensors"] if key.startswith("inputs/")})
    assert groups and any(key.startswith("out64/") and "/grad_state/" in key for key in tensors)
    for dtype, out, rtol, atol in ((torch.float64, "out64", 1e-10, 1e-12), (torch.float32, "out", 1e-6, 1e-6)):
        settings = about["hyper_parameters"]
        gpo = GPO(settings["d_pe"], settings["d_hidden"], settings["temperature"]).to(dtype)
        gpo.load_state_dict({key[6:]: value for key, value in tensors.items() if key.startswith("state/")})
        for group in groups:
            gpo.zero_grad()
            features = tensors[f"inputs/{group}/features"].to(dtype).clone().requires_grad_()
            lengths = tensors[f"inputs/{group}/lengths"]
            pooled = gpo(features, torch.arange(features.shape[1]) < lengths.unsqueeze(1))
            torch.testing.assert_close(pooled, tensors[f"{out}/{group}/pooled"], rtol=rtol, atol=atol)
            weights = tensors[f"{out}/{group}/weights"].squeeze(-1)
            torch.testing.assert_close(gpo.weights(lengths), weights, rtol=rtol, atol=atol)
            if out == "out64":
                (pooled * tensors[f"inputs/{group}/probe"].to(dtype)).sum().backward()
                torch.testing.assert_close(features.grad, tensors[f"out64/{group}/grad_features"], rtol=rtol, atol=atol)
                for key, parameter in gpo.named_parameters():
                    if (stored := tensors.get(f"out64/{group}/grad_state/{key}")) is not None:
                        near = 1e-10 if stored.dtype == torch.float64 else 1e-6
                        torch.testing.assert_close(parameter.grad, stored.to(dtype), rtol=near, atol=near / 100)


def test_parity_distances():
    _, tensors = fixture("distances")
    names = {"wasserstein2": "w2_squared", "kl": "kl_12", "kl_reversed": "kl_21", "js": "kl_sym", "elk": "neg_log_elk"}
    for name in ("csd", "bhattacharyya", *names):
        stored = tensors[names.get(name, name)]
        torch.testing.assert_close(DISTANCES[name].matrix(*gaussians(tensors)), stored, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "factor"), [("sigmoid_l2", 1.0), ("compressed_sigmoid_l2", 2.0)])
def test_parity_sampled_match_probability(kind, factor):
    """Means over 40 independent draws of 24 x 24 sample pairs within 6 standard errors of both sides together, for all
    pairs: a false alarm in about 1 of 50,000 fixtures of 35 pairs (Student's t with 39 degrees of freedom)."""
    about, tensors = fixture("distances")
    scale, bias = (float(re.search(rf"\b{x}=([\d.]+)", about["monte_carlo"]["kinds"][kind])[1]) for x in "ab")
    x, y = gaussians(tensors)
    generator = torch.Generator().manual_seed(0)
    distance = match_probability_distance(factor * scale, factor * bias, n_samples=24)
    draws = torch.stack([(-distance.matrix(x, y, generator=generator)).exp() for _ in range(40)])
    error = (draws.var(0) / len(draws) + tensors[f"mc/{kind}/stderr"].square()).sqrt()
    assert ((draws.mean(0) - tensors[f"mc/{kind}/mean"]) / error).abs().max() < 6


def test_every_term_is_its_loop():
    pair, generator = batch(), torch.Generator().manual_seed(1)
    eps = tuple(torch.randn(k, 3, 5, generator=generator, dtype=torch.float64) for k in (4, 6))
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


@pytest.mark.parametrize("distance, label, expected", [(100.0, 1.0, 995.0), (0.0, 0.0, 50.0)])
def test_neither_logarithm_underflows(distance, label, expected):
    """p = exp(-995) and 1 - p = exp(-50) are 0 in float32."""
    leaf = torch.tensor([[distance, 0.0, 0.0]], requires_grad=True)
    image, text = GaussianEmbedding.point(torch.zeros(1, 3)), GaussianEmbedding.point(leaf)
    options, match = PCMEOptions(beta=0), torch.full((1, 1), label)
    output = pcme_loss(image, text, match, options, logit_scale=10.0, logit_bias=5.0 if label else 50.0)
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
    scale, bias = PCMELoss(PCMEOptions(logit_scale=a, logit_bias=b, sigmoid=sigmoid)).match_logits()
    assert bias / scale == pytest.approx((b / a) ** 2, rel=1e-5)  # Where a match is as likely as not.
    for options in (PCMEOptions(logit_bias=-1.0), PCMEOptions(distance="wasserstein2")):
        assert PCMELoss(options).match_logits() is None
    wrong, right = [], []
    for csd in (0.9, 0.96, 1.0, 1.0167, 1.05, 1.1, 1.2):
        variance, mean = 0.01, torch.zeros(2, 1, d, dtype=torch.float64)
        mean[1, 0, 0] = math.sqrt(csd - 2 * variance)
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
    vectors = []
    for mean, log_var, noise in ((image_mean, image_log_var, eps[0]), (text_mean, text_log_var, eps[1])):
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


def relatively_equal(actual, expected, rtol):
    """Compares a gradient as a whole: no element is excused because it is small."""
    assert float((actual - expected).norm() / expected.norm()) < rtol


def test_parity_of_values_and_gradients():
    """Released sums over pairs and both directions; a head is ln s, and their bottleneck reads it as ln s^2."""
    about, tensors = fixture("pcme_mc_loss")
    checked = 0
    for name, case in about["cases"].items():
        if case.get("prob_distance") != "non_squared_l2" or case["pdist_fn"] != "iterative" or case["group"] == "soft":
            continue  # Squared distances, 1e-6 under the root, labels that scale the logit.
        group = f"inputs/{case['group']}"
        values = {key: tensors[f"{group}/{key}"] for key in ("img_mean", "img_head", "txt_mean", "txt_head")}
        values |= {key: torch.tensor(float(case[f"init_{key}"])) for key in ("negative_scale", "shift")}
        leaf = {key: value.double().requires_grad_() for key, value in values.items()}
        match = tensors[f"{group}/matched"]
        uniformity = case.get("uniform_lambda", 0) / match.numel()
        options = PCMEOptions(sigmoid="compressed", beta=0, uniformity_weight=uniformity)
        given = {"logit_scale": leaf["negative_scale"], "logit_bias": leaf["shift"]}
        given["noise"] = tensors[f"{group}/img_eps"], tensors[f"{group}/txt_eps"]
        sides = (GaussianEmbedding(leaf[f"{side}_mean"], 2 * leaf[f"{side}_head"]) for side in ("img", "txt"))
        total = match.numel() * pcme_loss(*sides, match, options, **given).total
        if case["vib_beta"]:
            heads = [GaussianEmbedding(leaf[f"{k}_mean"], leaf[f"{k}_head"]) for k in ("img", "txt")]
            total = total + case["vib_beta"] * sum(vib_loss(e) for e in heads)
        torch.testing.assert_close(float(total.detach()), case["loss"], rtol=1e-9, atol=0)
        total.backward()
        for key, value in leaf.items():
            relatively_equal(value.grad, tensors[f"{name}/grad/{key}"].reshape(value.shape), 1e-9)
        checked += 1
    assert checked == 4


@pytest.mark.parametrize("name", ["plain", "vib", "vib_uniform", "coco15"])
def test_parity_of_the_original_in_all_terms_with_converted_weights(name):
    """Over the number of pairs; samples are noise around their mean: the head has the bottleneck's gradient alone."""
    about, tensors = fixture("pcme_mc_loss")
    case = about["cases"][name := f"pcme_case/{name}"]
    group = f"inputs/{case['group']}"
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
