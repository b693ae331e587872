"""Defects of released code that change a published kind of figure: each figure as it is meant and as it was released.

Where another file compares the formulas, this one shows what becomes of AUROC, -S*R^2, NLPD or a variance.
"""

import math

import numpy as np
import pytest
import torch
from posthoc.fixtures import fixture
from posthoc.test_adapters import toy_pairs
from torch.nn import functional

from sfumato.metrics.binned import binned_recall
from sfumato.metrics.selective import auroc
from sfumato.posthoc import AdapterTraining, FrozenPairs, ProbVLM
from sfumato.posthoc.adapter_networks import train
from sfumato.posthoc.laplace import probit_softmax
from sfumato.posthoc.probvlm import GeneralisedGaussian, generalised_gaussian_loss, generalised_gaussian_variance
from sfumato.posthoc.whitened import WhitenedNorm


def score(u, hit):
    return binned_recall(u, hit, binning="count", n_resamples=0).score.value


def queries(n=1000, seed=0):
    """Uncertainties, and hits that are rarer where they are high."""
    random = np.random.default_rng(seed)
    u = random.gamma(2.0, size=n)
    return u, (random.random(n) > u / 8).astype(float)


# ---------------------------------------------------------------- orders
def test_probvlm_sorts_texts_by_the_inverse_variance():
    """AUROC a becomes 1 - a, and -S*R^2 changes its sign: a good method is published as a bad one, or the reverse."""
    pairs = toy_pairs()
    wrong = (pairs.texts[:, 0] > 0).numpy().astype(float)  # Texts with more noise.
    training = AdapterTraining((24,), 30, 64, 3e-3, "adam", 0.0)
    figures = {}
    for order in ("variance", "inverted"):
        method = ProbVLM.fit(pairs, text_order=order, t2=1.0, training=training)
        u = method.uncertainty("text", pairs.texts).double().numpy()
        figures[order] = auroc(u, wrong), score(u, 1 - wrong)
    (meant, s), (released, t) = figures["variance"], figures["inverted"]
    assert meant > 0.6 and released == pytest.approx(1 - meant) and s > 0.1 and t == pytest.approx(-s)


def test_grove_ranks_texts_by_the_variance_of_images():
    _, t = fixture("frozen_adapters")
    ends = t["grove/sort/batch_sizes"].cumsum(0)[:-1]
    mean = {
        side: torch.stack([b.mean() for b in t[f"grove/sort/u_{side}"].tensor_split(ends)]) for side in ("img", "txt")
    }
    assert mean["img"].argsort(descending=True).tolist() == t["grove/sort/txt_order"].tolist()
    assert mean["txt"].argsort(descending=True).tolist() != t["grove/sort/txt_order"].tolist()
    assert len(t["grove/sort/txt_order"]) == 3 < len(t["grove/sort/u_txt"]) == 8  # Batches, not texts.


def test_the_variance_of_the_image_says_nothing_of_a_text():
    u, hit = queries(n=5000)
    of_image = np.random.default_rng(1).gamma(2.0, size=len(u))
    assert auroc(u, 1 - hit) > 0.7 and abs(auroc(of_image, 1 - hit) - 0.5) < 0.05
    assert score(of_image, hit) < score(u, hit) - 0.3


def test_a_ranking_of_batches_hides_what_queries_show():
    """Means over batches of 128 hardly differ: five bins of them leave little of the fall of recall."""
    u, hit = queries(n=128 * 40)

    def falls(u, hit):
        recall = [part.mean() for part in np.array_split(hit[np.argsort(u, kind="stable")], 5)]
        return recall[0] - recall[-1]

    batches = [x.reshape(40, 128).mean(1) for x in (u, hit)]
    assert falls(u, hit) > 0.3 and falls(*batches) < 0.1


# ---------------------------------------------------------------- training
def test_gradients_that_are_never_zeroed_do_not_converge():
    """GroVE's loop: every step takes the sum of all gradients so far. Ours takes its own."""
    x = 2 * torch.randn(512, 1, generator=torch.Generator().manual_seed(0))
    truth = float(x.square().mean().log())

    def loss(log_var):
        """Negative log-likelihood of a normal distribution, without constants."""
        return (log_var + x.square() / log_var.exp()).mean() / 2

    found = {}
    for zeroed in (True, False):
        log_var = torch.zeros((), requires_grad=True)
        optimiser, path = torch.optim.Adam([log_var], lr=0.05), []
        for _ in range(400):
            if zeroed:
                optimiser.zero_grad()
            loss(log_var).backward()
            optimiser.step()
            path.append(float(log_var.detach()))
        found[zeroed] = max(abs(v - truth) for v in path[-100:])
    assert found[True] < 0.01 and found[False] > 0.3
    own = torch.nn.Parameter(torch.zeros(()))
    training = AdapterTraining((1,), 400, 512, 0.05, "adam", 0.0)
    train([own], lambda rows: loss(own), 512, training, generator=torch.Generator())
    assert float(own.detach()) == pytest.approx(truth, abs=0.01)


def test_the_dropped_exponent_gives_2_62_times_the_variance():
    """By the product beta is .684 for any data, and the variance formula then gives 2.62 times that of the data."""
    noise = torch.distributions.Laplace(0.0, 1.0).icdf((torch.arange(4000).double() + 0.5) / 4000).unsqueeze(1)
    ratio = {}
    for form in ("power", "product"):
        raw = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([raw], max_iter=300, line_search_fn="strong_wolfe")

        def found(raw=raw):
            return GeneralisedGaussian(torch.zeros_like(noise), *raw.exp().expand(len(noise), 2).split(1, 1))

        def closure(optimiser=optimiser, form=form, found=found):
            optimiser.zero_grad()
            value = generalised_gaussian_loss(found(), noise, form=form).mean()
            value.backward()
            return value

        optimiser.step(closure)
        variance = generalised_gaussian_variance(found()).mean()
        ratio[form] = float(variance.detach() / noise.square().mean())
    assert ratio["power"] == pytest.approx(1, abs=0.05) and ratio["product"] == pytest.approx(2.62, abs=0.05)


# ---------------------------------------------------------------- Laplace
def test_siglip_without_its_bias_is_sure_of_matches_that_are_none():
    """Mean probability of a match, and NLPD of sigmoid labels, with the bias and as released without."""
    _, t = fixture("bayesvlm_predict")
    match = torch.eye(*t["siglip/mean"].shape, dtype=torch.float64)
    figures = []
    for mean in (t["ours/siglip/mean_with_bias"], t["siglip/mean"]):
        p = torch.sigmoid(mean * t["siglip/kappa"])
        figures.append((float(p.mean()), float(functional.binary_cross_entropy(p, match))))
    (with_bias, nlpd), (without, released) = figures
    assert float(t["inputs/sl_logit_bias"]) < -3 and with_bias < 0.3 < 0.5 < without and abs(nlpd - released) > 0.1


def test_num_samples_0_scales_a_class_by_the_variance_of_another_item():
    _, t = fixture("bayesvlm_predict")
    released = t["clip/square/softmax_num_samples_0"]
    k = len(released)
    mean, variance = t["clip/mean"][:k, :k], t["clip/var"][:k, :k]
    meant = probit_softmax(mean, variance)
    by_diagonal = (mean / (1 + math.pi / 8 * variance.diagonal()).sqrt()).softmax(1)
    torch.testing.assert_close(released, by_diagonal, rtol=1e-9, atol=0)
    nlpd = [-float(p.diagonal().log().mean()) for p in (meant, released)]
    assert abs(nlpd[0] - nlpd[1]) > 1e-3


# ---------------------------------------------------------------- the whitened norm
def test_eig_of_a_covariance_that_is_nearly_singular_is_no_whitening():
    """The released decomposition is that of any matrix, in float32; the symmetric one in float64 keeps the distance."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=g) @ torch.randn(3, 24, generator=g) + 1e-4 * torch.randn(400, 24, generator=g)
    covariance = torch.cov(x.double().T)
    wanted = (
        (x.double() - x.double().mean(0)) @ torch.linalg.pinv(covariance) * (x.double() - x.double().mean(0))
    ).sum(1)
    pairs = FrozenPairs(x.double(), x.double(), torch.zeros(1, 2, dtype=torch.long))
    ours = WhitenedNorm.fit(pairs, wclip_official=True).uncertainty("image", x.double())
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=0)
    values, vectors = torch.linalg.eig(torch.cov(x.T))
    white = (x - x.mean(0)) @ vectors.real / values.real.clamp_min(1e-12).sqrt()
    released = white.square().sum(1).double()
    assert ((released - wanted).abs() / wanted).median() > 0.05
