"""Laplace on the projections: curvature, evidence and predictions against released numbers and dense matrices."""

import math

import pytest
import torch
from posthoc.fixtures import fixture
from safetensors.torch import save_file
from torch.autograd.functional import jacobian
from torch.nn import functional

from sfumato.distances import csd_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.posthoc.curvature import kronecker_factors, summed_curvature
from sfumato.posthoc.evidence import best_prior_precision, log_evidence
from sfumato.posthoc.laplace import LaplaceProjections, ProjectionPosterior, cosine_moments, probit_softmax
from sfumato.posthoc.method import FrozenPairs

SIDES = {"image": ("img", "txt"), "text": ("txt", "img")}
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-6)]


def normal(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(found, wanted, rtol=1e-10, atol=0.0):
    """Also in units of the largest value: a sum has the rounding of its terms, which may cancel."""
    single = torch.float32 in (found.dtype, wanted.dtype)
    atol = max(atol, (1e-6 if single else 1e-14) * float(wanted.detach().abs().max()))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, check_dtype=False)


# ---------------------------------------------------------------- curvature
def dense_curvature(sources, targets, scale, bias):
    """Source by source from the Jacobian that autograd finds."""
    y = functional.normalize(targets, dim=1)
    total = torch.zeros(y.shape[1], y.shape[1], dtype=y.dtype)
    for x in sources:
        logits = lambda x: scale * y @ x / x.norm() + (bias or 0.0)
        j, z = jacobian(logits, x), logits(x)
        p = z.softmax(0) if bias is None else z.sigmoid()
        middle = torch.diag(p) - torch.outer(p, p) if bias is None else torch.diag(p * (1 - p))
        total += j.T @ middle @ j
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
    monkeypatch.setattr("sfumato.posthoc.curvature._MAX_ENTRIES", 40)
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
    for name, batch in (("divisible", None), ("remainder", cases["batch_size_remainder"])):
        a, b = kronecker_factors(*inputs, logit_scale=scale, class_batch=cases["num_classes"], official_batch=batch)
        close(a.to(dtype), t[f"clip/{name}/A_{own}"], rtol)
        wanted = t[f"clip/{name}/B_{own}"]
        close(b.to(dtype), wanted, rtol, rounding(wanted, dtype, scale))
    assert not torch.allclose(t[f"clip/divisible/B_{own}"], t[f"clip/remainder/B_{own}"])


@pytest.mark.parametrize("dtype, rtol", DTYPES)
@pytest.mark.parametrize("side", SIDES)
def test_parity_siglip_factors(side, dtype, rtol):
    described, t = fixture("bayesvlm_factors")
    own, other = SIDES[side]
    scale, bias = float(t["inputs/sl_logit_scale"].exp()), float(t["inputs/sl_logit_bias"])
    inputs = [t[f"inputs/{name}"].to(dtype) for name in (f"sl_{own}_emb", f"{own}_act", f"sl_{other}_emb")]
    a, b = kronecker_factors(
        *inputs, logit_scale=scale, logit_bias=bias, bias_column=True, class_batch=described["cases"]["num_classes"]
    )
    close(a.to(dtype), t[f"siglip/A_{own}"], rtol)
    close(b.to(dtype), t[f"siglip/B_{own}"], rtol, rounding(t[f"siglip/B_{own}"], dtype, scale))
    if side == "image":
        rows = t["siglip/indices"]
        classes = described["cases"]["num_classes"]
        found = [
            summed_curvature(inputs[0][rows], targets, logit_scale=scale, logit_bias=bias).to(dtype)
            for targets in (inputs[2][:classes], inputs[2])
        ]
        # Released for one class batch or for all targets: the nearer is meant.
        nearer = min(found, key=lambda h: float((h - t["siglip/H"]).abs().max()))
        close(nearer, t["siglip/H"], rtol, rounding(t["siglip/H"], dtype, scale))


def test_parity_damped_inverses():
    described, t = fixture("bayesvlm_factors")
    cov = described["cases"]["cov"]
    for prefix, bias in (("clip", False), ("siglip", True)):
        for own in ("img", "txt"):
            group = "clip/divisible" if prefix == "clip" else "siglip"
            a, b = t[f"{group}/A_{own}"], t[f"{group}/B_{own}"]
            posterior = ProjectionPosterior(a, b, cov[f"lambda_{own}"], cov[f"n_{own}"], "split", bias)
            hidden = t[f"inputs/{own}_act"]
            ones = torch.cat([hidden, torch.ones(len(hidden), 1, dtype=hidden.dtype)], 1) if bias else hidden
            inverse_a, inverse_b = (t[f"{prefix}/cov/{own}_{f}_inv"] for f in "AB")
            wanted = ((ones @ inverse_a) * ones).sum(1, keepdim=True) * inverse_b.diagonal()
            close(posterior.variance(hidden), wanted)


# ---------------------------------------------------------------- evidence
@pytest.mark.parametrize("tag", ["img", "txt"])
@pytest.mark.parametrize("n", [1, 10])
def test_parity_evidence(tag, n):
    _, t = fixture("bayesvlm_evidence")
    a, b = (torch.linalg.eigvalsh(t[f"inputs/{f}_{tag}"]) for f in "AB")
    norm, grid = float(t[f"inputs/W_{tag}"].square().sum()), t["inputs/lambda"]
    known = {
        f"{tag}/n{n}/official": ("split", "official"),
        f"ours/{tag}/n{n}": ("split", "corrected"),
        f"ours/exact/{tag}/n{n}": ("exact", "corrected"),
    }
    for prefix, (damping, form) in known.items():
        options = {"pseudo_data": float(n), "damping": damping, "form": form}
        close(log_evidence(grid, a, b, norm, **options), t[f"{prefix}/evidence"])
        best = best_prior_precision(a, b, norm, **options)
        name = "lambda_stationary" if form == "official" else "lambda_opt"
        assert best == pytest.approx(float(t[f"{prefix}/{name}"]), rel=1e-10)
        around = torch.tensor([0.99, 1.0, 1.01], dtype=torch.float64) * best
        assert log_evidence(around, a, b, norm, **options).argmax() == 1
    official = best_prior_precision(a, b, norm, pseudo_data=float(n), form="official")
    assert official == pytest.approx(float(t[f"{tag}/n{n}/official/lambda_opt"]), rel=1e-5)  # Adam in float32


def test_the_evidence_is_that_of_dense_determinants():
    a, b = (x @ x.T for x in (normal(3, 3, seed=1), normal(2, 2, seed=2)))
    values, n, norm = torch.tensor([0.3, 2.0], dtype=torch.float64), 4.0, 1.7
    eigenvalues = torch.linalg.eigvalsh(a), torch.linalg.eigvalsh(b)
    for damping in ("split", "exact"):
        wanted = []
        for value in values:
            parts = [n**0.5 * x + value**0.5 * torch.eye(len(x), dtype=torch.float64) for x in (a, b)]
            precision = (
                torch.kron(*parts)
                if damping == "split"
                else n * torch.kron(a, b) + value * torch.eye(6, dtype=torch.float64)
            )
            wanted.append(-value * norm / 2 + 3 * value.log() - torch.logdet(precision) / 2)
        close(log_evidence(values, *eigenvalues, norm, pseudo_data=n, damping=damping), torch.stack(wanted))


def test_evidence_errors():
    zero = torch.zeros(3)
    with pytest.raises(ValueError, match="no maximum"):
        best_prior_precision(zero, zero, 1.0)
    with pytest.raises(ValueError, match="unknown damping 'none'; known: split, exact"):
        best_prior_precision(zero, zero, 1.0, damping="none")
    with pytest.raises(ValueError, match="split damping only"):
        best_prior_precision(zero, zero, 1.0, damping="exact", form="official")


# ---------------------------------------------------------------- predictions
def predicted(kind, damping="split"):
    """The method with the fixture's factors, its inputs, and the values."""
    described, t = fixture("bayesvlm_predict")
    cases, siglip = described["cases"], kind == "siglip"
    factors = {}
    for own in ("img", "txt"):
        n, value = cases[f"n_{own}"], cases[f"lambda_{own}"]
        for f in "AB":
            inverse = torch.linalg.inv(t[f"inputs/{kind}/{own}_{f}_inv"])
            factors[f"{f}_{own}"] = (inverse - value**0.5 * torch.eye(len(inverse), dtype=torch.float64)) / n**0.5
    prefix = "sl_" if siglip else ""
    method = LaplaceProjections.from_factors(
        factors,
        logit_scale=float(t[f"inputs/{prefix}logit_scale"].exp()),
        logit_bias=float(t["inputs/sl_logit_bias"]) if siglip else None,
        prior_precision=(cases["lambda_img"], cases["lambda_txt"]),
        pseudo_data=cases["n_img"],
        damping=damping,
        bias_column=siglip,
    )
    embeddings = [t[f"inputs/{prefix}test_{own}_emb"] for own in ("img", "txt")]
    return method, embeddings, [t[f"inputs/test_{own}_act"] for own in ("img", "txt")], t


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_parity_predictions(kind):
    method, (images, texts), (image_hidden, text_hidden), t = predicted(kind)
    close(method.image.variance(image_hidden), t[f"{kind}/img_var"])
    close(method.text.variance(text_hidden), t[f"{kind}/txt_var"])
    hidden = {"image_hidden": image_hidden, "text_hidden": text_hidden}
    mean, variance = method.logits(images, texts, official=True, **hidden)
    close(mean, t[f"{kind}/mean"])
    close(variance, t[f"{kind}/var"])
    close(1 / (1 + math.pi / 8 * variance).sqrt(), t[f"{kind}/kappa"])
    close(probit_softmax(mean, variance), t[f"{kind}/probit"])
    with_bias, full = method.logits(images, texts, covariance="full", **hidden)
    close(full, t[f"ours/{kind}/full_var"])
    close(with_bias, t["ours/siglip/mean_with_bias"] if kind == "siglip" else mean)


def test_parity_normalised_gaussians_and_exact_damping():
    method, (images, texts), (image_hidden, text_hidden), t = predicted("clip")
    image, text = method.embed("image", images, hidden=image_hidden), method.embed("text", texts, hidden=text_hidden)
    close(csd_matrix(image, text), t["ours/clip/csd_normalised"])
    close(csd_matrix(image, text), 2 - 2 * t["clip/mean"] / method.logit_scale)
    close(image.mean.square().sum(1) + image.total_variance, torch.ones(len(images)))
    exact = predicted("clip", damping="exact")[0]
    close(exact.image.variance(image_hidden), t["ours/clip/eigen_img_var"])
    close(exact.text.variance(text_hidden), t["ours/clip/eigen_txt_var"])
    assert (exact.image.variance(image_hidden) > method.image.variance(image_hidden)).all()


# ---------------------------------------------------------------- independent checks
def small_pairs(*, siglip=False, n=60, d=4, widths=(6, 5), dtype=torch.float64):
    """A small two-tower model whose pairs share a latent; hidden features of different widths."""
    latent = normal(n, 3, seed=10, dtype=dtype)
    hidden = [latent @ normal(3, p, seed=p, dtype=dtype) + 0.3 * normal(n, p, seed=20 + p, dtype=dtype) for p in widths]
    matrices = [normal(d, p, seed=30 + p, dtype=dtype) for p in widths]
    biases = [normal(d, seed=40 + k, dtype=dtype) if siglip else None for k in range(2)]
    images, texts = (h @ w.T + (0 if b is None else b) for h, w, b in zip(hidden, matrices, biases, strict=True))
    return FrozenPairs(
        images, texts, torch.arange(n).repeat(2, 1).T, 5.0, -2.0 if siglip else None, *hidden, *matrices, *biases
    )


@pytest.mark.parametrize("damping", ["split", "exact"])
def test_variances_are_those_of_the_dense_posterior(damping):
    """The covariance of W a with vec W from the inverse of the whole precision matrix."""
    a, b = (x @ x.T for x in (normal(4, 4, seed=1), normal(3, 3, seed=2)))
    n, value = 7.0, 2.5
    if damping == "split":
        precision = torch.kron(*(n**0.5 * x + value**0.5 * torch.eye(len(x), dtype=torch.float64) for x in (a, b)))
    else:
        precision = n * torch.kron(a, b) + value * torch.eye(12, dtype=torch.float64)
    posterior = ProjectionPosterior(a, b, value, n, damping)
    hidden = normal(5, 4, seed=3)
    for row, spectrum, diagonal in zip(hidden, posterior.spectrum(hidden), posterior.variance(hidden), strict=True):
        j = torch.kron(row.unsqueeze(0), torch.eye(3, dtype=torch.float64))  # f = J vec W, columns of W stacked
        covariance = j @ torch.linalg.inv(precision) @ j.T
        close(posterior.basis @ torch.diag(spectrum) @ posterior.basis.T, covariance, atol=1e-13)
        close(diagonal, covariance.diagonal())


@pytest.mark.parametrize("damping", ["split", "exact"])
@pytest.mark.parametrize("siglip", [False, True])
def test_the_moments_are_those_of_sampled_weights(damping, siglip):
    """Monte Carlo: weights from the posterior, inner products over the root mean squares of the lengths."""
    pairs = small_pairs(siglip=siglip)
    method = LaplaceProjections.fit(pairs, damping=damping)
    rows, draws = slice(0, 3), 200_000
    generator = torch.Generator().manual_seed(5)
    sampled = []
    for side in SIDES:
        own, x = method.posterior(side), pairs.embeddings(side)[rows]
        spectrum = own.spectrum(pairs.hidden(side)[rows])
        noise = torch.randn(draws, *spectrum.shape, generator=generator, dtype=torch.float64)
        sampled.append(x + (noise * spectrum.sqrt()) @ own.basis.T)
    scale = [s.square().sum(2).mean(0).sqrt() for s in sampled]
    inner = torch.einsum("sid,sjd->sij", *sampled) / torch.outer(*scale)
    hidden = {"image_hidden": pairs.image_hidden[rows], "text_hidden": pairs.text_hidden[rows]}
    mean, variance = method.logits(pairs.images[rows], pairs.texts[rows], covariance="full", **hidden)
    logit = 5.0 * inner + (-2.0 if siglip else 0.0)
    error = (logit.var(0) / draws).sqrt()
    assert ((logit.mean(0) - mean).abs() < 5 * error + 5e-3 * mean.abs()).all()
    close(logit.var(0), variance, rtol=0.03)
    z = (sampled[0].var(0) / method.image.variance(hidden["image_hidden"]) - 1) / math.sqrt(2 / draws)
    assert z.abs().max() < 5


def test_diagonal_moments_by_loops():
    image, text = (GaussianEmbedding(normal(n, 3, seed=s), normal(n, 3, seed=s + 1)) for n, s in ((4, 1), (5, 3)))
    mean, variance = cosine_moments(image, text)
    for i in range(4):
        for j in range(5):
            f, v, g, w = image.mean[i], image.var[i], text.mean[j], text.var[j]
            lengths = (f @ f + v.sum()) * (g @ g + w.sum())
            close(mean[i, j], f @ g / lengths.sqrt())
            close(variance[i, j], sum(v[k] * w[k] + f[k] ** 2 * w[k] + g[k] ** 2 * v[k] for k in range(3)) / lengths)


def test_the_means_point_as_the_frozen_embeddings():
    pairs = small_pairs()
    embedding = LaplaceProjections.fit(pairs).embed("image", pairs.images, hidden=pairs.image_hidden)
    close(functional.normalize(embedding.mean, dim=1), functional.normalize(pairs.images, dim=1))


def test_more_data_means_less_variance():
    pairs = small_pairs(n=400)
    few = FrozenPairs(*(pairs.images, pairs.texts, pairs.pairs[:20]), *list(vars(pairs).values())[3:])
    u = [LaplaceProjections.fit(p).uncertainty("image", pairs.images, hidden=pairs.image_hidden) for p in (few, pairs)]
    assert (u[1] < u[0]).all()


def test_pseudo_data_is_chosen_by_held_out_pairs():
    pairs = small_pairs()
    method = LaplaceProjections.fit(pairs)
    norms = tuple(float(w.square().sum()) for w in (pairs.image_projection, pairs.text_projection))
    tried = {n: LaplaceProjections.fit(pairs, pseudo_data=n) for n in (1.0, 10.0, 100.0)}
    best = min(tried, key=lambda n: tried[n].nlpd(pairs))
    chosen = method.choose_pseudo_data(pairs, norms, candidates=tuple(tried))
    assert chosen.image.pseudo_data == best
    assert chosen.image.prior_precision == pytest.approx(tried[best].image.prior_precision)
    # By hand: the mean over both directions of minus the log probability of the right partner.
    hidden = {"image_hidden": pairs.image_hidden, "text_hidden": pairs.text_hidden}
    mean, variance = method.logits(pairs.images, pairs.texts, **hidden)
    shrunk = mean / (1 + math.pi / 8 * variance).sqrt()
    target = torch.arange(len(shrunk))
    by_hand = (functional.cross_entropy(shrunk, target) + functional.cross_entropy(shrunk.T, target)) / 2
    assert method.nlpd(pairs) == pytest.approx(float(by_hand))


def test_factors_come_from_a_file_or_a_dict(tmp_path):
    pairs = small_pairs(siglip=True)
    method = LaplaceProjections.fit(pairs)
    factors = {name: x.contiguous() for name, x in method.state().items() if name != "options"}
    save_file(factors, tmp_path / "factors.safetensors")
    norms = tuple(
        float(sum(x.square().sum() for x in own))
        for own in (
            (pairs.image_projection, pairs.image_projection_bias),
            (pairs.text_projection, pairs.text_projection_bias),
        )
    )
    for source in (factors, tmp_path / "factors.safetensors"):
        read = LaplaceProjections.from_factors(
            source, logit_scale=5.0, logit_bias=-2.0, squared_norms=norms, bias_column=True
        )
        wanted = method.uncertainty("text", pairs.texts, hidden=pairs.text_hidden)
        close(read.uncertainty("text", pairs.texts, hidden=pairs.text_hidden), wanted)
    with pytest.raises(ValueError, match="the state has no 'B_txt'; it has A_img, A_txt, B_img"):
        del factors["B_txt"]
        LaplaceProjections.from_factors(factors, logit_scale=5.0, squared_norms=norms)
    with pytest.raises(ValueError, match="one of prior_precision and squared_norms"):
        LaplaceProjections.from_factors(factors, logit_scale=5.0)
    with pytest.raises(FileNotFoundError, match="no Kronecker factors"):
        LaplaceProjections.from_factors(tmp_path / "none", logit_scale=5.0, squared_norms=norms)
    (tmp_path / "bad").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="damaged"):
        LaplaceProjections.from_factors(tmp_path / "bad", logit_scale=5.0, squared_norms=norms)


def test_final_embeddings_alone_are_not_enough():
    pairs = small_pairs()
    bare = FrozenPairs(pairs.images, pairs.texts, pairs.pairs)
    with pytest.raises(
        ValueError, match="no image_hidden, text_hidden, logit_scale, image_projection, text_proj.*alone"
    ):
        LaplaceProjections.fit(bare)
    method = LaplaceProjections.fit(pairs)
    with pytest.raises(ValueError, match="pass hidden="):
        method.embed("image", pairs.images)
    with pytest.raises(ValueError, match=r"hidden must be \(60, 6\), got \(60, 5\)"):
        method.embed("image", pairs.images, hidden=pairs.text_hidden)
    with pytest.raises(ValueError, match="at least 16 pairs"):
        LaplaceProjections.fit(FrozenPairs(pairs.images, pairs.texts, pairs.pairs[:9]))


def test_a_layer_without_prior_precision_needs_no_matrix():
    pairs = small_pairs()
    bare = FrozenPairs(*list(vars(pairs).values())[:7])
    given = LaplaceProjections.fit(bare, prior_precision=(3.0, 4.0))
    assert (given.image.prior_precision, given.text.prior_precision) == (3.0, 4.0)
