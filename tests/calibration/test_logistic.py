"""Logistic regression against scikit-learn and against its own optimality conditions."""

import pytest
import torch
from support.raising import raises

from sfumato.calibration.logits import fit_logistic


def data(seed=0, n=400, f=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, f, generator=generator, dtype=torch.float64)
    logit = x @ torch.linspace(-1, 2, f, dtype=torch.float64) - 0.7
    return x, (torch.rand(n, generator=generator) < torch.sigmoid(logit)).double()


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_that_of_scikit_learn(weighted):
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = data()
    weight = torch.rand(len(y), dtype=torch.float64) + 0.1 if weighted else torch.ones(len(y), dtype=torch.float64)
    ours, bias = fit_logistic(x, y, weight=weight, penalty=0.02)
    # scikit-learn: ||w||^2 / 2 + C sum(weight * loss)
    c = 1 / (0.02 * float(weight.sum()))
    theirs = linear_model.LogisticRegression(C=c, tol=1e-10, max_iter=1000).fit(x, y, sample_weight=weight)
    assert ours.tolist() == pytest.approx(theirs.coef_[0].tolist(), abs=1e-6)
    assert bias == pytest.approx(float(theirs.intercept_[0]), abs=1e-6)


def test_the_gradient_vanishes_with_soft_labels():
    x, y = data(1)
    y = 0.8 * y + 0.1
    w, b = fit_logistic(x, y)
    error = torch.sigmoid(x @ w + b) - y
    assert abs(float(error.mean())) < 1e-7 and float((x.T @ error / len(y)).abs().max()) < 1e-7


def test_a_penalty_keeps_separable_rows_finite():
    x = torch.linspace(-1, 1, 50, dtype=torch.float64).unsqueeze(1)
    w, b = fit_logistic(x, (x[:, 0] > 0).double(), penalty=1e-6)
    assert 10 < float(w) < 1e4 and abs(b) < 1


def test_bad_input_is_named():
    zeros = torch.zeros
    raises(ValueError, "expected", fit_logistic, zeros(3), zeros(3))
    raises(ValueError, "expected", fit_logistic, zeros(3, 2), zeros(4))
    raises(ValueError, "add up to 0", fit_logistic, zeros(3, 2), zeros(3), weight=zeros(3))
