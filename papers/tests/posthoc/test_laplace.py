"""Laplace on the projections: curvature, evidence and predictions against released numbers and dense matrices."""

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.nn import functional

from papers.posthoc.laplace import (
    LaplaceProjections,
    ProjectionPosterior,
    best_prior_precision,
    kronecker_factors,
    summed_curvature,
)
from papers.tests.posthoc.fixtures import close, fixture, normal, small_pairs
from sfumato.distances import csd_matrix

SIDES = {"image": ("img", "txt"), "text": ("txt", "img")}
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-6)]


def dense_curvature(sources, targets, scale, bias):
    """Source by source from the Jacobian that autograd finds."""
    y = functional.normalize(targets, dim=1)
    total = torch.zeros(y.shape[1], y.shape[1], dtype=y.dtype)
    for x in sources:
        logits = lambda x: scale * y @ x / x.norm() + (bias or 0.0)
        j, p = jacobian(logits, x), logits(x).softmax(0) if bias is None else logits(x).sigmoid()
        total += j.T @ (torch.diag(p) - (torch.outer(p, p) if bias is None else torch.diag(p * p))) @ j
    return total


@pytest.mark.parametrize("bias", [None, -3.0])
@pytest.mark.parametrize("n, c, d", [(5, 7, 4), (1, 3, 6), (9, 2, 3)])
def test_the_curvature_is_that_of_dense_jacobians(bias, n, c, d):
    sources, targets = 3 * normal(n, d, seed=1), normal(c, d, seed=2) + 0.7
    found = summed_curvature(sources, targets, logit_scale=12.0, logit_bias=bias)
    close(found, dense_curvature(sources, targets, 12.0, bias), rtol=1e-8, atol=1e-10)
    assert torch.linalg.eigvalsh(found).min() > -1e-8


def test_the_curvature_does_not_depend_on_the_blocks(monkeypatch):
    sources, targets = normal(23, 5, seed=3), normal(17, 5, seed=4)
    whole = summed_curvature(sources, targets, logit_scale=9.0)
    monkeypatch.setattr("papers.posthoc.laplace._MAX_ENTRIES", 40)
    close(summed_curvature(sources, targets, logit_scale=9.0), whole)


def rounding(wanted, dtype, scale):
    """Of float32 inputs: the logit scale multiplies it, relative to the largest value."""
    return 0.0 if dtype == torch.float64 else 5e-7 * scale * float(wanted.abs().max())


@pytest.mark.parametrize("dtype, rtol", DTYPES)
@pytest.mark.parametrize("side", SIDES)
def test_parity_curvature_and_factors(side, dtype, rtol):
    described, t = fixture("bayesvlm_factors")
    cases, (own, other) = described["cases"], SIDES[side]
    scale = float(t["inputs/logit_scale"].exp())
    inputs = [t[f"inputs/{name}"].to(dtype) for name in (f"{own}_emb", f"{own}_act", f"{other}_emb")]
    if side == "image":
        first = inputs[0][: cases["batch"]], inputs[2][: cases["num_classes"]]
        found = summed_curvature(*first, logit_scale=scale).to(dtype)
        close(found, t["clip/H_infonce"], rtol, rounding(t["clip/H_infonce"], dtype, scale))
    a, b = kronecker_factors(*inputs, logit_scale=scale, class_batch=cases["num_classes"])
    close(a.to(dtype), t[f"clip/divisible/A_{own}"], rtol)
    wanted = t[f"clip/divisible/B_{own}"]
    close(b.to(dtype), wanted, rtol, rounding(wanted, dtype, scale))


@pytest.mark.parametrize("dtype, rtol", DTYPES)
@pytest.mark.parametrize("side", SIDES)
def test_parity_siglip_factors(side, dtype, rtol):
    described, t = fixture("bayesvlm_factors")
    (own, other), classes = SIDES[side], described["cases"]["num_classes"]
    scale, bias = float(t["inputs/sl_logit_scale"].exp()), float(t["inputs/sl_logit_bias"])
    inputs = [t[f"inputs/{name}"].to(dtype) for name in (f"sl_{own}_emb", f"{own}_act", f"sl_{other}_emb")]
    a, b = kronecker_factors(*inputs, logit_scale=scale, logit_bias=bias, bias_column=True, class_batch=classes)
    close(a.to(dtype), t[f"siglip/A_{own}"], rtol)
    close(b.to(dtype), t[f"siglip/B_{own}"], rtol, rounding(t[f"siglip/B_{own}"], dtype, scale))


def test_parity_damped_inverses():
    described, t = fixture("bayesvlm_factors")
    cov = described["cases"]["cov"]
    for prefix, bias in (("clip", False), ("siglip", True)):
        for own in ("img", "txt"):
            group = "clip/divisible" if prefix == "clip" else "siglip"
            a, b = t[f"{group}/A_{own}"], t[f"{group}/B_{own}"]
            posterior = ProjectionPosterior(a, b, cov[f"lambda_{own}"], cov[f"n_{own}"], bias)
            hidden = t[f"inputs/{own}_act"]
            ones = torch.cat([hidden, torch.ones(len(hidden), 1, dtype=hidden.dtype)], 1) if bias else hidden
            inverse_a, inverse_b = (t[f"{prefix}/cov/{own}_{f}_inv"] for f in "AB")
            wanted = ((ones @ inverse_a) * ones).sum(1, keepdim=True) * inverse_b.diagonal()
            close(posterior.variance(hidden), wanted)


@pytest.mark.parametrize("tag", ["img", "txt"])
@pytest.mark.parametrize("n", [1, 10])
def test_parity_evidence(tag, n):
    _, t = fixture("bayesvlm_evidence")
    a, b = (torch.linalg.eigvalsh(t[f"inputs/{f}_{tag}"]) for f in "AB")
    norm, grid = float(t[f"inputs/W_{tag}"].square().sum()), t["inputs/lambda"]
    p, q = len(a), len(b)
    log_det_a, log_det_b = ((n**0.5 * x + grid[:, None].sqrt()).log().sum(1) for x in (a, b))
    common = -grid * norm / 2 + p * q / 2 * grid.log()
    close(common - (q * log_det_a + p * log_det_b) / 2, t[f"ours/{tag}/n{n}/evidence"])
    best = best_prior_precision(a, b, norm, pseudo_data=float(n))
    assert best == pytest.approx(float(t[f"ours/{tag}/n{n}/lambda_opt"]), rel=1e-10)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_parity_predictions(kind):
    """Variances of the raw embeddings, and csd of the Gaussians = 2 - 2 expected cosine."""
    described, t = fixture("bayesvlm_predict")
    cases, prefix = described["cases"], "sl_" if kind == "siglip" else ""
    posteriors, found = {}, []
    for side, (own, _) in SIDES.items():
        n, value = cases[f"n_{own}"], cases[f"lambda_{own}"]
        inverses = (torch.linalg.inv(t[f"inputs/{kind}/{own}_{f}_inv"]) for f in "AB")
        factors = ((x - value**0.5 * torch.eye(len(x), dtype=torch.float64)) / n**0.5 for x in inverses)
        posteriors[side] = ProjectionPosterior(*factors, value, n, kind == "siglip")
        close(posteriors[side].variance(t[f"inputs/test_{own}_act"]), t[f"{kind}/{own}_var"])
    for side, (own, _) in SIDES.items():
        x, hidden = t[f"inputs/{prefix}test_{own}_emb"], t[f"inputs/test_{own}_act"]
        found.append(LaplaceProjections(posteriors).embed(side, x, hidden=hidden))
        close(found[-1].mean.square().sum(1) + found[-1].total_variance, torch.ones(len(x)))
    if kind == "clip":
        close(csd_matrix(*found), t["ours/clip/csd_normalised"])
    close(csd_matrix(*found), 2 - 2 * t[f"{kind}/mean"] / float(t[f"inputs/{prefix}logit_scale"].exp()))


def test_variances_are_those_of_the_dense_posterior():
    """The covariance of W a with vec W from the inverse of the whole precision matrix."""
    a, b = (x @ x.T for x in (normal(4, 4, seed=1), normal(3, 3, seed=2)))
    n, value = 7.0, 2.5
    precision = torch.kron(*(n**0.5 * x + value**0.5 * torch.eye(len(x), dtype=torch.float64) for x in (a, b)))
    posterior, hidden = ProjectionPosterior(a, b, value, n), normal(5, 4, seed=3)
    for row, diagonal in zip(hidden, posterior.variance(hidden), strict=True):
        j = torch.kron(row.unsqueeze(0), torch.eye(3, dtype=torch.float64))  # f = J vec W, columns of W stacked
        close(diagonal, (j @ torch.linalg.inv(precision) @ j.T).diagonal())


def test_the_fit_is_that_of_its_parts():
    """One class batch of all pairs, the norm of matrix and bias, and a bias column."""
    for biased in (False, True):
        pairs = small_pairs(biased=biased)
        method = LaplaceProjections.fit(pairs)
        for side, other in (("image", "text"), ("text", "image")):
            matrix, bias = pairs.projections[side]
            a, b = kronecker_factors(
                pairs.embeddings(side), pairs.hidden(side), pairs.embeddings(other),
                logit_scale=5.0, logit_bias=pairs.logit_bias, bias_column=biased, class_batch=60,
            )  # fmt: skip
            norm = float(matrix.square().sum()) + (float(bias.square().sum()) if biased else 0.0)
            value = best_prior_precision(torch.linalg.eigvalsh(a), torch.linalg.eigvalsh(b), norm, pseudo_data=10.0)
            own = method.posteriors[side]
            close(own.activations, a)
            close(own.gradients, b, rtol=1e-8)
            assert own.prior_precision == pytest.approx(value) and own.pseudo_data == 10 and own.bias_column == biased
