"""Networks on frozen embeddings: losses, variances and distributions against released numbers; training."""

import math

import numpy as np
import pytest
import scipy
import torch
from support.raising import raises
from torch.nn import functional

from papers.posthoc import FrozenPairs, asymvlm, variance_adapters
from papers.posthoc.adapters import AdapterTraining, PairBatches, minimise, mlp, scaled_inputs
from papers.posthoc.asymvlm import AsymVLM, asymvlm_loss, direction_and_kappa, log_likelihoods, mean_length
from papers.posthoc.variance_adapters import (
    GeneralisedGaussian,
    PCMEPPAdapter,
    PFEAdapter,
    ProbVLM,
    ProbVLMNetwork,
    ProLIPAdapter,
    first_logits,
    generalised_gaussian_loss,
    generalised_gaussian_variance,
    pfe_loss,
    probvlm_loss,
)
from papers.tests.posthoc.fixtures import close, fixture
from sfumato.distances import csd_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import vib_loss
from sfumato.losses.contrastive import ProLIPOptions, prolip_loss
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions, pcmepp_loss

NAMES = {"vmf": "vmf", "psd": "power_spherical"}
FAST = AdapterTraining((24,), 30, 64, 3e-3)


def loaded(network, tensors, prefix):
    """A network with the weights of a fixture."""
    weights = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    network.double().load_state_dict(weights)
    return network


def loaded_mlp(tensors, prefix):
    keys = [key for key in tensors if key.startswith(prefix) and key.endswith("weight")]
    shapes = [tensors[key].shape for key in sorted(keys, key=lambda k: int(k.removeprefix(prefix).split(".")[0]))]
    return loaded(mlp(shapes[0][1], [s[0] for s in shapes[:-1]], shapes[-1][0]), tensors, prefix)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_parity_asymvlm_likelihood_and_loss(name, dtype, rtol):
    described, t = fixture("asymvlm")
    for temperature in described["cases"]["temperatures"]:
        eta, x = (t[f"inputs/{key}"].to(dtype).clone().requires_grad_() for key in ("eta", "x"))
        factor = torch.tensor(temperature, dtype=dtype, requires_grad=True)
        ll = log_likelihoods(functional.normalize(x, dim=1), *direction_and_kappa(eta), NAMES[name])
        close(ll, t[f"{name}/ll"].to(dtype), rtol)
        loss = asymvlm_loss(ll, torch.eye(len(x), dtype=dtype), factor)
        prefix = f"{name}/loss_t{temperature}"
        close(loss, t[prefix].to(dtype), rtol)
        loss.backward()
        # A softmax has the rounding of its logits, in nats: the larger they are, the coarser is float32.
        nats = temperature * float(ll.detach().abs().max())
        for key, found in (("eta", eta), ("x", x), ("temperature", factor)):
            wanted = t[f"{prefix}/grad_{key}"].to(dtype)
            close(found.grad, wanted, rtol, 2 * torch.finfo(dtype).eps * nats * float(wanted.abs().max()))
    points = functional.normalize(t["inputs/x_rect"], dim=1)
    close(log_likelihoods(points, *direction_and_kappa(t["inputs/eta"]), NAMES[name]), t[f"{name}/ll_rect"])
    direction, kappa = direction_and_kappa(loaded_mlp(t, "net/param/")(t["net/z_txt"]))
    close(direction, t[f"{name}/net/mu"])
    close(1 / kappa, t[f"{name}/net/uncertainty"])
    points = functional.normalize(t["inputs/x"], dim=1)
    close(log_likelihoods(points, direction, kappa, NAMES[name]), t[f"{name}/net/log_likelihood"])


def test_parity_normalisers_and_mean_lengths():
    described, t = fixture("asymvlm")
    kappa, spreads = t["ln_c/kappa"], described["cases"]["ln_c_spread"]
    assert spreads
    for name, wanted in spreads.items():
        d = int(name.removeprefix("d"))
        close(asymvlm.log_normaliser(kappa, d, "power_spherical"), t[f"ln_c/{name}/psd"])
        approximate, exact = asymvlm.log_normaliser(kappa, d, "vmf"), t[f"ours/ln_c/{name}/vmf_exact"]
        close(approximate, t[f"ln_c/{name}/vmf_approx"])
        spread = approximate - exact
        rounding = 1e-14 * float(exact.abs().max())
        assert float(spread.max() - spread.min()) == pytest.approx(wanted, rel=1e-9, abs=rounding), name
        for key, density in NAMES.items():
            close(mean_length(kappa, d, density), t[f"ours/moment/{name}/{key}"])


@pytest.mark.parametrize("name", NAMES)
def test_parity_csd_of_the_sphere(name):
    _, t = fixture("asymvlm")
    text = asymvlm.gaussian_on_sphere(*direction_and_kappa(t["inputs/eta"]), NAMES[name])
    image = GaussianEmbedding.point(functional.normalize(t["inputs/x"], dim=1))
    close(csd_matrix(image, text), t[f"ours/csd_unit/{name}"])


def test_mean_length_is_a_ratio_of_bessel_functions():
    kappa = np.array([1e-3, 0.7, 30.0, 2e3, 1e5])
    for d in (3, 10, 512):
        found = mean_length(torch.from_numpy(kappa), d, "vmf").numpy()
        assert ((found > 0) & (found < 1)).all()
        above, below = scipy.special.ive(d / 2, kappa), scipy.special.ive(d / 2 - 1, kappa)
        known = above > 1e-290  # Otherwise scipy underflows.
        np.testing.assert_allclose(found[known], (above / np.where(known, below, 1))[known], rtol=1e-11)


def test_asymvlm_loss_shares_several_matches():
    ll = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    match = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).double()
    rows = [-(ll[i] - ll[i].logsumexp(0))[match[i] > 0].mean() for i in range(3)]
    columns = [-(ll[:, j] - ll[:, j].logsumexp(0))[match[:, j] > 0].mean() for j in range(4)]
    close(asymvlm_loss(ll, match, 1.0), (torch.stack(rows).mean() + torch.stack(columns).mean()) / 2)


def found_inputs(t, dtype=torch.float64):
    names = ("mean", "one_over_alpha", "beta")
    return GeneralisedGaussian(*(t[f"inputs/{name}"].to(dtype).clone().requires_grad_() for name in names))


def released_loss(found, target):
    """As released: a product in place of the power."""
    inverse, beta = found.one_over_alpha + 1e-4, found.beta + 1e-4
    residual = ((found.mean - target).abs() * inverse * beta).clamp(1e-4, 1e3)
    return residual - (inverse * beta).log() + torch.lgamma(1 / beta)


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_parity_probvlm_loss(dtype, rtol):
    _, t = fixture("probvlm")
    inputs, target = found_inputs(t, dtype), t["inputs/target"].to(dtype)
    loss = generalised_gaussian_loss(inputs, target)
    close(loss, t["ours/power/elementwise"].to(dtype), rtol, 1e-13)
    close(loss.mean(), t["ours/power/mean"].to(dtype), rtol)
    loss.mean().backward()
    for name, found in inputs._asdict().items():
        assert torch.isfinite(found.grad).all()
        if dtype == torch.float64:
            close(found.grad, t[f"ours/power/grad/{name}"], rtol, 1e-13)


def test_parity_exact_density():
    _, t = fixture("probvlm")
    inputs, target = found_inputs(t), t["inputs/target"]
    loss = generalised_gaussian_loss(inputs, target).detach()
    inverse, beta = inputs.one_over_alpha.detach() + 1e-4, inputs.beta.detach() + 1e-4
    residual = ((inputs.mean.detach() - target).abs() * inverse) ** beta
    free = (residual > 1e-4) & (residual < 1e3)
    assert free.any() and not free.all()
    close(loss[free] + math.log(2), t["ours/gennorm_nll"][free], atol=1e-13)
    theirs = -scipy.stats.gennorm.logpdf(target, beta, loc=inputs.mean.detach(), scale=1 / inverse)
    np.testing.assert_allclose(t["ours/gennorm_nll"], theirs, rtol=1e-9)


def test_parity_probvlm_combined_losses(monkeypatch):
    """Of one modality and of both, with the released likelihood in place of ours."""
    described, t = fixture("probvlm")
    monkeypatch.setattr(variance_adapters, "generalised_gaussian_loss", released_loss)
    text = GeneralisedGaussian(*(t[f"total/txt_{name}"] for name in ("mean", "one_over_alpha", "beta")))
    target, weights = t["inputs/target"], (variance_adapters.T1, variance_adapters.T2, variance_adapters.CROSS)
    assert weights == tuple(described["cases"]["total"][key] for key in ("T1", "T2", "cross_modal_lambda"))
    close(probvlm_loss(found_inputs(t), text, (target, t["total/txt_target"])), t["total/loss"])
    for t2 in ("0.0001", "0.05"):
        inputs = found_inputs(t)
        for name, value in (("T1", 1.0), ("T2", float(t2)), ("CROSS", 0.0)):
            monkeypatch.setattr(variance_adapters, name, value)
        both = probvlm_loss(inputs, inputs, (target, target)) / 2
        close(both, t[f"comb/1_{t2}/loss"])
        both.backward()
        for name, found in inputs._asdict().items():
            close(found.grad, t[f"comb/1_{t2}/grad/{name}"], atol=1e-13)


def test_parity_probvlm_network():
    described, t = fixture("probvlm")
    weights = {key.removeprefix("net/param/"): x.shape for key, x in t.items() if key.startswith("net/param/")}
    width, head = weights["mod.0.weight"][0], weights["block_mu.0.weight"][0]
    assert width == described["cases"]["net"]["hid_dim"]
    network = loaded(ProbVLMNetwork(weights["mod.0.weight"][1], width=width, head_width=head), t, "net/param/")
    for name, found in zip(("mu", "one_over_alpha", "beta"), network(t["net/x"]), strict=True):
        close(found, t[f"net/softplus/{name}"], atol=1e-14)


def test_parity_probvlm_variance():
    _, t = fixture("probvlm")
    positive = GeneralisedGaussian(torch.zeros(()), t["var/one_over_alpha"][1:, 3:], t["var/beta"][1:, 3:])
    close(generalised_gaussian_variance(positive), t["ours/var"])
    theirs = scipy.stats.gennorm.var(positive.beta, scale=1 / positive.one_over_alpha)
    np.testing.assert_allclose(generalised_gaussian_variance(positive), theirs, rtol=1e-8)
    # The released variance has shifted and clipped parameters.
    inverse = (1 / (t["var/one_over_alpha"] + 1e-5)).clamp(1e-4, 5).reciprocal()
    clipped = GeneralisedGaussian(torch.zeros(()), inverse, (t["var/beta"] + 0.1).clamp(0.1, 5))
    close(generalised_gaussian_variance(clipped), t["var/official"])


def test_the_released_order_of_texts_begins_with_the_most_certain_one():
    _, t = fixture("probvlm")
    close(t["sort/u_img"].mean(1).argsort(descending=True), t["sort/img_order"])
    close(t["sort/u_txt"].mean(1).reciprocal().argsort(descending=True), t["sort/txt_order"])


def test_the_dropped_exponent_forgets_the_shape():
    """At the best alpha the product leaves lgamma(1 / beta) + log E|x|: beta is .684 for any data."""
    beta = 1 / scipy.optimize.minimize_scalar(scipy.special.gammaln, bounds=(1, 2), method="bounded").x
    assert beta == pytest.approx(0.684167, abs=1e-5)
    laplace = torch.distributions.Laplace(0.0, 1.0).icdf((torch.arange(4000).double() + 0.5) / 4000)
    values = 1 / (beta * float(laplace.abs().mean())), beta
    own = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
    found = GeneralisedGaussian(torch.zeros_like(laplace), *own)
    released_loss(found, laplace).mean().backward()
    assert all(abs(float(x.grad)) < 1e-3 for x in own)
    variance = generalised_gaussian_variance(found).detach()
    assert float(variance / laplace.square().mean()) == pytest.approx(2.62, abs=0.01)


def gaussians(t, shift):
    means = [functional.normalize(t[f"inputs/mean_{s}"], dim=1) for s in "it"]
    log_vars = [(t[f"inputs/head_{s}"] + shift).requires_grad_() for s in "it"]
    return [GaussianEmbedding(m, v) for m, v in zip(means, log_vars, strict=True)], log_vars


def test_parity_pfe():
    _, t = fixture("frozen_adapters")
    heads = [t[f"inputs/head_{s}"].clone().requires_grad_() for s in "it"]
    means = [t[f"inputs/mean_{s}"] for s in "it"]
    both = [GaussianEmbedding(m, PFEAdapter.log_variance(h)) for m, h in zip(means, heads, strict=True)]
    loss = pfe_loss(*both)
    close(loss, t["pfe/loss"])
    loss.backward()
    for s, head in zip("it", heads, strict=True):
        close(head.grad, t[f"pfe/grad_head_{s}"], atol=1e-14)
    close(both[1].var.mean(1), t["pfe/uncertainty_t"])


def test_parity_pcmepp():
    described, t = fixture("frozen_adapters")
    match = torch.eye(len(t["inputs/head_i"]), dtype=torch.float64)
    for case in described["cases"]["pcmepp"]["cases"]:
        scale, shift = (torch.tensor(float(x[1:]), dtype=torch.float64, requires_grad=True) for x in case.split("_"))
        both, log_vars = gaussians(t, -3)
        options = PCMEPPOptions(alpha=0.0, beta=0.0)
        loss = pcmepp_loss(*both, match, options, logit_scale=scale, logit_bias=shift).total
        close(loss, t[f"pcmepp/{case}/loss"])
        loss.backward()
        for s, log_var in zip("it", log_vars, strict=True):
            close(log_var.grad, t[f"pcmepp/{case}/grad_log_var_{s}"], atol=1e-14)
        close(scale.grad, t[f"pcmepp/{case}/grad_scale"][0])
        close(shift.grad, t[f"pcmepp/{case}/grad_shift"][0])
    both, _ = gaussians(t, -3)
    module = PCMEPPLoss(PCMEPPOptions(alpha=0.0, beta=0.0)).double()
    close(module(*both, match).total, t["pcmepp/s5.0_b5.0/loss"], rtol=1e-7)


def test_parity_prolip():
    _, t = fixture("frozen_adapters")
    both, log_vars = gaussians(t, -1)
    match = torch.eye(len(log_vars[0]), dtype=torch.float64)
    # On unit means a scale of 1/2 and a bias of 1 on csd are ProLIP's scale 1 and bias 0, at which the released code
    # freezes them; its bottleneck halves the log variances.
    loss = prolip_loss(*both, match, ProLIPOptions(beta=0.0), logit_scale=0.5, logit_bias=1.0).total
    loss = loss + 1e-5 * sum(vib_loss(GaussianEmbedding(x.mean, x.log_var / 2)) for x in both)
    close(loss, t["prolip/loss"])
    loss.backward()
    for s, log_var in zip("it", log_vars, strict=True):
        close(log_var.grad, t[f"prolip/grad_log_var_{s}"], atol=1e-14)


def test_parity_adapter_networks():
    _, t = fixture("frozen_adapters")
    network = loaded_mlp(t, "net/param/")
    close(PFEAdapter.log_variance(network(t["net/x"])).exp(), t["net/pfe_var"])
    mean = functional.normalize(t["net/x"], dim=1)
    close(mean, t["net/pcmepp_mean"])
    close(PCMEPPAdapter.log_variance(network(mean)), t["net/pcmepp_log_var"])


def toy_pairs(n=600, d=8, seed=0, dtype=torch.float32):
    """Pairs whose noise depends on the first entry of the image, which both embeddings show."""
    g = torch.Generator().manual_seed(seed)
    clean = torch.randn(n, d, generator=g)
    noise = torch.where(clean[:, :1] > 0, 1.0, 0.1)
    images, texts = (clean + noise * torch.randn(n, d, generator=g) for _ in range(2))
    for x in (images, texts):
        x[:, 0] = 2 * clean[:, 0].sign()
    return FrozenPairs(images.to(dtype), texts.to(dtype), torch.arange(n).repeat(2, 1).T)


def test_variance_adapters_learn_where_pairs_differ():
    held_out = toy_pairs(seed=1)
    noisy = held_out.images[:, 0] > 0
    for kind in (PFEAdapter, PCMEPPAdapter, ProLIPAdapter, AsymVLM):
        method = kind.fit(toy_pairs(), training=FAST)
        for side in method.sides:
            x = held_out.images if side == "image" else held_out.texts
            u = method.uncertainty(side, x)
            assert torch.isfinite(u).all() and float(u.std()) > 0
            assert kind is not PFEAdapter or u[noisy].mean() > 1.5 * u[~noisy].mean()
            close(method.embed(side, x).var, method.variance(side, x), rtol=1e-5)
            if kind is AsymVLM:
                assert u[noisy].mean() > u[~noisy].mean()
            else:
                close(u, method.variance(side, x).mean(1), rtol=1e-6)


def test_probvlm_learns_the_reconstruction_error(monkeypatch):
    """Trained on itself the error is small; the variance must then be near the squared error of the network."""
    monkeypatch.setattr(variance_adapters, "T2", 1.0)
    pairs = toy_pairs()
    method = ProbVLM.fit(pairs, training=AdapterTraining((32,), 40, 64, 3e-3, "adam", 0.0))
    found = method.distribution("image", pairs.images)
    error = (found.mean - scaled_inputs(pairs.images)).square().mean()
    ratio = float(generalised_gaussian_variance(found).mean() / error)
    assert 0.3 < ratio < 3
    # The same in units of unit embeddings, which the method gives.
    reconstructed = found.mean / math.sqrt(8) - functional.normalize(pairs.images, dim=1)
    assert 0.3 < float(method.variance("image", pairs.images).mean() / reconstructed.square().mean()) < 3
    close(method.embed("image", pairs.images).var, method.variance("image", pairs.images), rtol=1e-5)


def test_learnt_logits_leave_the_variance_its_level():
    """With ProLIP's scale frozen at 1, half the total variance of a pair is log(batch - 1), here 4.8."""
    pairs = toy_pairs()
    learnt = ProLIPAdapter.fit(pairs, training=AdapterTraining((16,), 80, 128, 1e-2))
    assert 0.2 < float(learnt.embed("text", pairs.texts).total_variance.mean()) < 2


def test_first_logits_fit_the_frozen_pairs():
    """Platt scaling by hand: at the maximum of the likelihood the mean of p - y vanishes, also weighted by distance."""
    pairs = toy_pairs(200)
    scale, bias = first_logits(pairs, seed=0)
    cosine = functional.normalize(pairs.images, dim=1).double() @ functional.normalize(pairs.texts, dim=1).double().T
    distance = 2 - 2 * cosine + 2
    error = torch.sigmoid(bias - scale * distance) - torch.eye(200)
    assert abs(float(error.sum())) < 1e-3 and abs(float((error * distance).sum())) < 1e-3
    reversed_pairs = FrozenPairs(pairs.images, -pairs.texts, pairs.pairs)
    assert first_logits(reversed_pairs, seed=0) == (5.0, 5.0)


def test_asymvlm_embeddings():
    pairs = toy_pairs()
    training, unit = AdapterTraining((16,), 2, 64), functional.normalize(pairs.texts, dim=1)
    for density in NAMES.values():
        kinds = [type("Kind", (AsymVLM,), {"density": density, "keep_mean": keep}) for keep in (True, False)]
        kept, learnt = (kind.fit(pairs, training=training) for kind in kinds)
        embedding, image = kept.embed("text", pairs.texts), kept.embed("image", pairs.images)
        close(embedding.mean, unit)
        length = mean_length(1 / kept.uncertainty("text", pairs.texts), 8, density).float()
        close(embedding.total_variance, 1 - length.square(), rtol=1e-4)
        embedding = learnt.embed("text", pairs.texts)
        close(embedding.mean.square().sum(1) + embedding.total_variance, torch.ones(len(unit)), rtol=1e-5)
        assert not torch.allclose(functional.normalize(embedding.mean, dim=1), unit, atol=0.1)
    close(image.mean, functional.normalize(pairs.images, dim=1))
    assert image.total_variance.max() == 0


def test_batches_know_all_matches():
    """Images with several texts and texts with several images, against a loop."""
    g = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randint(0, n, (30,), generator=g) for n in (7, 11)], 1).unique(dim=0)
    pairs = FrozenPairs(torch.randn(7, 3), torch.randn(11, 3), index[torch.randperm(len(index), generator=g)])
    batches, known = PairBatches(pairs), {tuple(row) for row in index.tolist()}
    for rows in torch.randperm(len(batches), generator=g).split(6):
        images, texts, match = batches.items(rows)
        assert images.tolist() == sorted({int(pairs.pairs[r, 0]) for r in rows})
        assert texts.tolist() == sorted({int(pairs.pairs[r, 1]) for r in rows})
        assert match.tolist() == [[float((int(i), int(t)) in known) for t in texts] for i in images]


def test_a_diverging_adapter_is_an_error():
    network, training = mlp(2, (), 1), AdapterTraining((1,), 1, 2)
    given = network.parameters(), lambda rows: network(torch.ones(1, 2)).sum() * math.inf, 4, training
    raises(ArithmeticError, "lower the learning rate", minimise, *given, generator=torch.Generator())
