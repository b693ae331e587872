"""PCME++, the bottleneck and GPO against slow loops and the numbers of the released code, pseudo-positives by hand."""

import re

import pytest
import torch
from support import references
from support.batches import MATCH, batch
from support.parity import fixture

from sfumato import DISTANCES, GaussianEmbedding
from sfumato.encoders.heads import GPO
from sfumato.losses.base import vib_loss
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions, pcmepp_loss, pseudo_positives
from sfumato.matching import match_logit, match_probability_distance


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
    image, text = batch(dtype=torch.float32)
    for _ in range(5):
        optimiser.zero_grad()
        loss(image, text, 1 - MATCH.float()).total.backward()
        optimiser.step()
        assert loss.logits.logit_scale >= 0  # It may underflow to 0, where the loss is constant, and never turns over.
    with pytest.raises(ValueError, match="logit_scale must be above 0, got 0"):
        PCMEPPLoss(PCMEPPOptions(logit_scale=0))


def test_vib_by_hand_its_guard_and_its_overflow():
    assert vib_loss(GaussianEmbedding(torch.ones(1, 4), torch.zeros(1, 4))).item() == pytest.approx(0.5)
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
    match = torch.ones(1, 1)
    output = PCMEPPLoss(PCMEPPOptions(distance="squared_l2", alpha=0, beta=1.0))(image, text, match)
    output.total.backward()
    assert output.stats["vib_ignored"] == 1 and torch.isfinite(output.total)
    assert log_var.grad.tolist() == [[0.0, 0.0]]


OUR_DISTANCE = {"csd": "csd", "wdist": "wasserstein2"}


def run_case(case, tensors, dtype):
    """The loss of a case; (output, its inputs as leaves, scale, bias)."""
    names, inputs = ("img_mean", "img_log_var", "txt_mean", "txt_log_var"), f"inputs/{case['group']}"
    leaves = {name: tensors[f"{inputs}/{name}"].to(dtype).clone().requires_grad_() for name in names}
    scale = torch.tensor(case["negative_scale"], dtype=dtype, requires_grad=True)
    bias = torch.tensor(case["shift"], dtype=dtype, requires_grad=True)
    image = GaussianEmbedding(leaves["img_mean"], leaves["img_log_var"])
    text = GaussianEmbedding(leaves["txt_mean"], leaves["txt_log_var"])
    distance, match = OUR_DISTANCE[case["prob_distance"]], tensors[f"inputs/{case['group']}/matched"]
    options = PCMEPPOptions(distance=distance, alpha=case["smoothness_alpha"], beta=case["vib_beta"])
    output = pcmepp_loss(image, text, match, options, logit_scale=scale, logit_bias=bias)
    return output, leaves, scale, bias, image, text


def official_counts(distance, match):
    """What the released code counts, entries at most as far as the row's own match less one a row, without and with the
    entries whose order rounding decides (equal embeddings in a batch)."""
    own = distance.gather(1, match.max(1, keepdim=True).indices)
    return [int((distance <= own + slack).sum()) - len(distance) for slack in (-1e-12 * own, 1e-12 * own)]


def _close(ours, stored, name):
    torch.testing.assert_close(
        ours, stored.reshape(ours.shape), rtol=1e-10, atol=1e-13, msg=lambda text: f"{name}: {text}"
    )


def test_parity_pcmepp_loss():
    about, tensors = fixture("pcmepp_loss")
    assert about["cases"]
    for name, case in about["cases"].items():
        value = lambda key, name=name: tensors[f"case/{name}/{key}"]
        close = lambda a, b, name=name: _close(a, b, name)
        output, leaves, scale, bias, image, text = run_case(case, tensors, torch.float64)
        close(output.total, value("loss"))
        close(output.terms["match"], 2 * value("match_bce"))
        match = tensors[f"inputs/{case['group']}/matched"].double()
        distance = DISTANCES[OUR_DISTANCE[case["prob_distance"]]].matrix(image, text)
        close(match_logit(distance, scale, bias), value("logits"))
        if case["smoothness_alpha"]:
            both = value("pp_bce_i2t") + value("pp_bce_t2i")
            close(output.terms["pseudo_positive"], case["smoothness_alpha"] * both)
            for direction, d, m in (("i2t", distance, match), ("t2i", distance.T, match.T)):
                close(pseudo_positives(d, m), value(f"pp_labels_{direction}"))
                official = int(value(f"n_pseudo_gts_{direction}"))
                fewest, most = official_counts(d, m)
                assert fewest <= official <= most, name
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
            mask = torch.arange(features.shape[1]) < lengths.unsqueeze(1)
            pooled = gpo(features, mask)
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


gaussians = lambda tensors: [GaussianEmbedding(tensors[f"mean{k}"], tensors[f"log_var{k}"]) for k in (1, 2)]


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
