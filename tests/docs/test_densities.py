"""Laplace and von Mises-Fisher: samples against scipy and torch, csd by sampling against loops and closed forms."""

import math
from functools import partial

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from densities import Laplace, VonMisesFisher, _quantile_slope, bessel_ratio, sampled_csd, sampled_csd_matrix
from support.largest import LargestTensor
from torch.nn.functional import normalize

from sfumato.distances import csd, csd_matrix
from sfumato.gaussian import GaussianEmbedding

N, M, D = 3, 5, 7


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(n, seed, *, d=D, dtype=torch.float64, kind=GaussianEmbedding):
    generator = seeded(seed)
    mean = 2 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    log_var = 2 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return kind(mean.to(dtype), log_var.to(dtype))


def laplace(n, seed, **options):
    return gaussian(n, seed, kind=Laplace, **options)


def on_sphere(n, seed, *, d=D, dtype=torch.float64):
    """Concentrations from 0.5 to 50."""
    generator = seeded(seed)
    direction = normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1)
    log_concentration = torch.linspace(math.log(0.5), math.log(50), n, dtype=torch.float64)
    return VonMisesFisher(direction.to(dtype), log_concentration.to(dtype))


def sphere(d, kappa, *, dtype=torch.float64):
    direction = normalize(torch.randn(1, d, generator=seeded(9), dtype=dtype), dim=1)
    return VonMisesFisher(direction, torch.tensor([kappa], dtype=dtype).log())


KINDS = {"gaussian": gaussian, "laplace": laplace, "sphere": on_sphere}


# ---------------------------------------------------------------- the Bessel ratio


@pytest.mark.parametrize("d", [2, 3, 8, 64, 1024])
def test_bessel_ratio_is_that_of_scipy_where_it_has_one(d):
    kappa = np.array([1e-3, 0.1, 1.0, 10.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e6])
    upper, lower = (scipy.special.ive(order, kappa) for order in (d / 2, d / 2 - 1))
    known = lower > 1e-290
    assert known.sum() >= (5 if d == 1024 else 9)
    ratio = bessel_ratio(torch.from_numpy(kappa), d).numpy()
    np.testing.assert_allclose(ratio[known], upper[known] / lower[known], rtol=1e-10)


@pytest.mark.parametrize(
    ("d", "kappa", "value"),
    [
        (1024, 0.5, 0.00048828113381166381),
        (1024, 10.0, 0.0097646956694267087),
        (512, 20.0, 0.039003306390924045),
        (1024, 1000.0, 0.61159996862410609),
        (2, 3000.0, 0.9998333194398124),
        (1024, 1e8, 0.99999488501305604),
    ],
)
def test_bessel_ratio_where_bessel_functions_underflow(d, kappa, value):
    """Values of mpmath with 60 digits: besseli(d/2, kappa) / besseli(d/2 - 1, kappa)."""
    ratio = bessel_ratio(torch.tensor([kappa], dtype=torch.float64), d)
    assert ratio.item() == pytest.approx(value, rel=1e-10)
    assert 1 - ratio.item() ** 2 == pytest.approx(1 - value**2, rel=1e-6)


def test_bessel_ratio_at_the_ends():
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    ratio = bessel_ratio(zero, 5)
    (slope,) = torch.autograd.grad(ratio.sum(), zero)
    assert ratio.item() == 0 and slope.item() == pytest.approx(1 / 5)


@pytest.mark.parametrize("d", [2, 3, 1024])
def test_bessel_ratio_solves_its_differential_equation(d):
    """A' = 1 - A^2 - (d - 1) A / kappa, as far as A is right."""
    kappa = torch.tensor([0.3, 5.0, 40.0, 700.0], dtype=torch.float64, requires_grad=True)
    ratio = bessel_ratio(kappa, d)
    (slope,) = torch.autograd.grad(ratio.sum(), kappa)
    torch.testing.assert_close(slope, (1 - ratio**2 - (d - 1) * ratio / kappa).detach(), rtol=1e-7, atol=2e-10)


@pytest.mark.parametrize(("d", "kappa"), [(2, 0.5), (3, 20.0), (10, 5.0), (128, 300.0), (1024, 1e4)])
def test_resultant_length_is_that_of_scipy(d, kappa):
    """From scipy's entropy = -ln C - kappa A and its density at the direction, ln C + kappa."""
    x = sphere(d, kappa)
    theirs = scipy.stats.vonmises_fisher(x.direction[0].numpy(), kappa)
    expected = (kappa - theirs.logpdf(x.direction[0].numpy()) - theirs.entropy()) / kappa
    assert x.resultant_length.item() == pytest.approx(float(expected), rel=1e-9)


# ---------------------------------------------------------------- draws


def test_laplace_has_the_distribution_of_torch():
    """Each of 6 coordinates by Kolmogorov and Smirnov: a false alarm in 1 of 10,000 seeds."""
    x = laplace(2, 0, d=3)
    draws = x.sample(20_000, generator=seeded())
    scale = (x.log_var.exp() / 2).sqrt()
    theirs = torch.distributions.Laplace(x.mean, scale)
    torch.testing.assert_close(theirs.variance, x.gaussian().var)
    for i in range(2):
        for k in range(3):
            found = scipy.stats.kstest(
                draws[i, :, k].numpy(), "laplace", args=(x.mean[i, k].item(), scale[i, k].item())
            )
            assert found.pvalue > 1e-4 / 6


def test_laplace_draws_are_finite_in_float32():
    """The inverse distribution function of a uniform number that can be 0 is not: 2^24 values, 20 million samples."""
    x = Laplace(torch.zeros(1, 1000), torch.zeros(1, 1000))
    assert torch.isfinite(x.sample(10_000, generator=seeded())).all()


def marginal(d, kappa):
    """Distribution function of the cosine with the direction, from scipy's quadrature of the angle."""
    peak = math.acos(min(1.0, bessel_ratio(torch.tensor([kappa], dtype=torch.float64), d).item()))

    def density(angle):
        return math.exp(
            kappa * (math.cos(angle) - math.cos(peak)) + (d - 2) * math.log(math.sin(angle) / math.sin(peak))
        )

    width = 12 / math.sqrt(d - 2 + kappa)
    ends = max(1e-12, peak - width), min(math.pi - 1e-12, peak + width)
    grid = np.linspace(*ends, 4001)
    values = np.array([density(a) for a in grid])
    total = scipy.integrate.cumulative_simpson(values, x=grid, initial=0)
    return lambda w: 1 - np.interp(np.arccos(w), grid, total / total[-1])


@pytest.mark.parametrize(
    ("d", "kappa"), [(2, 0.3), (2, 30.0), (3, 2.0), (3, 1e4), (10, 5.0), (200, 1e-3), (200, 150.0)]
)
def test_cosines_have_their_distribution(d, kappa):
    """Kolmogorov and Smirnov against the integrated density: each false in 1 of 10,000 seeds."""
    x = sphere(d, kappa)
    draws = x.sample(5000, generator=seeded())[0]
    torch.testing.assert_close(draws.norm(dim=1), torch.ones(5000, dtype=torch.float64))
    cosines = (draws @ x.direction[0]).clamp(-1, 1).numpy()
    assert scipy.stats.kstest(cosines, marginal(d, kappa)).pvalue > 1e-4


@pytest.mark.parametrize(("d", "kappa"), [(3, 4.0), (10, 20.0)])
def test_draws_are_those_of_scipy(d, kappa):
    """Every coordinate and its square, two samples: 4.5 standard errors each, a false alarm in 1 of 7,000 seeds."""
    x = sphere(d, kappa)
    ours = x.sample(20_000, generator=seeded())[0].numpy()
    theirs = scipy.stats.vonmises_fisher(x.direction[0].numpy(), kappa).rvs(20_000, random_state=0)
    for a, b in ((ours, theirs), (ours**2, theirs**2)):
        error = np.sqrt((a.var(0) + b.var(0)) / 20_000)
        assert (np.abs(a.mean(0) - b.mean(0)) < 4.5 * error).all()


@pytest.mark.parametrize(("d", "kappa"), [(2, 1.0), (3, 1e7), (1024, 10.0), (1024, 1e3), (1024, 1e6)])
def test_mean_length_of_draws_in_float32(d, kappa):
    """Within 4.5 standard errors and float32's rounding."""
    x = sphere(d, kappa, dtype=torch.float32)
    cosines = (x.sample(3000, generator=seeded())[0].double() @ x.direction[0].double()).numpy()
    assert abs(cosines.mean() - x.resultant_length.item()) < 4.5 * cosines.std() / math.sqrt(3000) + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_draw_equally(kind):
    x = KINDS[kind](N, 0)
    assert x.sample(4, generator=seeded(3)).equal(x.sample(4, generator=seeded(3)))
    assert not x.sample(4, generator=seeded(3)).equal(x.sample(4, generator=seeded(4)))
    with pytest.raises(ValueError, match="n_samples must be at least 1, got 0"):
        x.sample(0)


# ---------------------------------------------------------------- csd by drawing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_samples", [1, 3])
def test_sampled_csd_is_the_loop_over_pairs_of_draws(kind, n_samples):
    x, y = KINDS[kind](N, 0), KINDS[kind](M, 1)
    generator = seeded(5)
    a, b = (torch.cat([z.sample(1, generator=generator) for _ in range(n_samples)], dim=1) for z in (x, y))
    expected = torch.tensor(
        [[np.mean([float(((p - q) ** 2).sum()) for p in i for q in j]) for j in b] for i in a], dtype=torch.float64
    )
    found = sampled_csd_matrix(x, y, n_samples=n_samples, generator=seeded(5))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_diagonal(kind):
    x, y = KINDS[kind](M, 0), KINDS[kind](M, 1)
    rows = sampled_csd(x, y, n_samples=3, generator=seeded())
    matrix = sampled_csd_matrix(x, y, n_samples=3, generator=seeded())
    torch.testing.assert_close(rows, matrix.diagonal(), rtol=1e-9, atol=1e-9)


def by_hand(x, y):
    """E ||X - Y||^2 of one pair, from the textbook moments."""
    if isinstance(x, VonMisesFisher) and isinstance(y, VonMisesFisher):
        return 2 - 2 * float(x.resultant_length * y.resultant_length * (x.direction @ y.direction.T))
    total = 0.0
    means = []
    for z in (x, y):
        if isinstance(z, VonMisesFisher):
            a = scipy.special.iv(z.d / 2, z.log_concentration.exp().item())
            a /= scipy.special.iv(z.d / 2 - 1, z.log_concentration.exp().item())
            means.append(a * z.direction[0])
            total += 1 - a**2
        elif isinstance(z, Laplace):
            means.append(z.mean[0])
            total += 2 * float(((z.log_var[0].exp() / 2).sqrt() ** 2).sum())
        else:
            means.append(z.mean[0])
            total += float(z.log_var[0].exp().sum())
    return total + float(((means[0] - means[1]) ** 2).sum())


def chosen(x, rows):
    fields = ("direction", "log_concentration") if isinstance(x, VonMisesFisher) else ("mean", "log_var")
    return type(x)(*(getattr(x, field)[rows] for field in fields))


def all_by_hand(x, y):
    pairs = [[by_hand(chosen(x, slice(i, i + 1)), chosen(y, slice(j, j + 1))) for j in range(y.n)] for i in range(x.n)]
    return torch.tensor(pairs, dtype=torch.float64)


@pytest.mark.parametrize(
    "pair", [("laplace", "laplace"), ("sphere", "sphere"), ("sphere", "laplace"), ("gaussian", "sphere")]
)
def test_sampled_csd_tends_to_the_closed_form(pair):
    """The mean of 2,000 estimates, all 15 pairs within 4.5 standard errors: a false alarm in 1 of 10,000 seeds."""
    x, y = KINDS[pair[0]](N, 0), KINDS[pair[1]](M, 1)
    i, j = torch.arange(N).repeat_interleave(M), torch.arange(M).repeat(N)
    sides = chosen(x, i.repeat(2000)), chosen(y, j.repeat(2000))
    found = sampled_csd(*sides, n_samples=3, generator=seeded()).unflatten(0, (2000, N, M))
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - all_by_hand(x, y)).abs() < 4.5 * error).all()


@pytest.mark.parametrize("pair", [("laplace", "laplace"), ("sphere", "sphere"), ("sphere", "laplace")])
def test_the_closed_form_is_csd_of_gaussians_with_the_same_moments(pair):
    x, y = KINDS[pair[0]](N, 0), KINDS[pair[1]](M, 1)
    sides = [z if isinstance(z, GaussianEmbedding) else z.gaussian() for z in (x, y)]
    torch.testing.assert_close(csd_matrix(*sides), all_by_hand(x, y), rtol=1e-9, atol=1e-9)


def test_tempting_formulas_differ():
    x, y = on_sphere(N, 0), on_sphere(M, 1)
    right = csd_matrix(x.gaussian(), y.gaussian())
    cosine = x.direction @ y.direction.T
    assert (right - (2 - 2 * cosine)).abs().min() > 1e-3  # of points
    assert (right - (2 - 2 * x.resultant_length.unsqueeze(1) * cosine)).abs().min() > 1e-3  # one side's length
    a, b = laplace(N, 0), laplace(M, 1)
    right = csd_matrix(a.gaussian(), b.gaussian())
    halved = [Laplace(z.mean, z.log_var - math.log(2)).gaussian() for z in (a, b)]
    assert (right - csd_matrix(*halved)).abs().min() > 1e-3  # b^2 for 2 b^2


def test_total_variance_of_concentrated_densities_keeps_its_digits():
    """1 - A^2 = (d - 1)/kappa for large kappa, up to 1/kappa of itself, where float32 cannot tell A from 1."""
    for d, kappa in ((3, 1e7), (10, 1e8)):
        variance = sphere(d, kappa, dtype=torch.float32).gaussian().total_variance.item()
        assert variance == pytest.approx((d - 1) / kappa, rel=1e-4)


# ---------------------------------------------------------------- gradients


def test_gradients_of_laplace_are_those_of_the_function():
    x, y = laplace(2, 0, d=4), laplace(3, 1, d=4)
    inputs = [t.requires_grad_() for t in (x.mean, x.log_var, y.mean, y.log_var)]

    def function(a, b, c, d):
        return sampled_csd_matrix(Laplace(a, b), Laplace(c, d), n_samples=3, generator=seeded())

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize(
    ("d", "kappa"), [(2, 0.4), (2, 50.0), (3, 3.0), (10, 1.0), (10, 200.0), (1024, 10.0), (1024, 2000.0)]
)
def test_angles_move_with_the_concentration_as_their_quantiles_do(d, kappa):
    """Against differences of quantiles that come from quadrature and root finding."""
    peak = math.acos(bessel_ratio(torch.tensor([kappa], dtype=torch.float64), d).item())
    width = 1 / math.sqrt(d - 2 + kappa)

    def cumulative(angle, k):
        def density(a):
            return math.exp(k * (math.cos(a) - math.cos(peak)) + (d - 2) * math.log(math.sin(a) / math.sin(peak)))

        low, high = max(1e-13, peak - 12 * width), min(math.pi - 1e-13, peak + 12 * width)
        options = {"epsabs": 1e-14, "epsrel": 1e-13, "limit": 200}
        below, above = (
            scipy.integrate.quad(density, *ends, points=[p] if ends[0] < p < ends[1] else None, **options)[0]
            for ends in ((low, angle), (angle, high))
            for p in (peak,)
        )
        return below / (below + above)

    for level in (0.02, 0.5, 0.97):
        ends = max(1e-12, peak - 6 * width), min(math.pi - 1e-12, peak + 6 * width)

        def quantile(k, level=level, ends=ends):
            return scipy.optimize.brentq(lambda a: cumulative(a, k) - level, *ends, xtol=1e-14, rtol=1e-14)

        step = 1e-3 * kappa
        expected = (quantile(kappa + step) - quantile(kappa - step)) / (2 * step)
        angle = torch.tensor([quantile(kappa)], dtype=torch.float64)
        slope = _quantile_slope(angle, torch.tensor([kappa], dtype=torch.float64), d)
        assert slope.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("d", [2, 3, 12])
def test_gradients_of_draws_on_the_sphere_have_the_right_mean(d):
    """Of 3,000 estimates at concentrations 0.5, 5 and 50: every component within 4.5 standard errors."""
    x, y = on_sphere(3, 0, d=d), on_sphere(3, 1, d=d)

    def gradients(distance, times, wrap):
        rows = torch.arange(3).repeat(times)
        leaves = [t[rows].requires_grad_() for t in (x.direction, x.log_concentration)]
        total = distance(wrap(VonMisesFisher(*leaves)), wrap(chosen(y, rows))).sum()
        return [g.unflatten(0, (times, 3)) for g in torch.autograd.grad(total, leaves)]

    exact = gradients(csd, 1, VonMisesFisher.gaussian)
    found = gradients(partial(sampled_csd, n_samples=2, generator=seeded()), 3000, lambda z: z)
    for values, (right,) in zip(found, exact, strict=True):
        error = values.std(0) / math.sqrt(len(values))
        assert ((values.mean(0) - right).abs() <= 4.5 * error + 1e-9).all()
        assert right.abs().max() > 10 * error.min()


@pytest.mark.parametrize("d", [2, 3, 12])
def test_gradients_of_second_moments_have_the_right_mean(d):
    """Second moments, which csd does not see; 20,000 samples, 4.5 standard errors.

    E (c x)^2 = A/kappa ||c||^2 + (1 - d A/kappa) (c direction)^2
    """
    x = on_sphere(3, 0, d=d)
    c = torch.randn(d, generator=seeded(2), dtype=torch.float64)

    def second(direction, log_concentration):
        kappa = log_concentration.exp()
        isotropic = bessel_ratio(kappa, d) / kappa
        return isotropic * c.square().sum() + (1 - d * isotropic) * (normalize(direction, dim=1) @ c).square()

    leaves = [t.detach().requires_grad_() for t in (x.direction, x.log_concentration)]
    exact = torch.autograd.grad(second(*leaves).sum(), leaves)
    leaves = [t.detach().repeat(20_000, *[1] * (t.ndim - 1)).requires_grad_() for t in leaves]
    squares = (VonMisesFisher(*leaves).sample(1, generator=seeded()) @ c).square().flatten()
    values = [squares.detach(), *torch.autograd.grad(squares.sum(), leaves)]
    for found, right in zip(values, (second(x.direction, x.log_concentration), *exact), strict=True):
        found = found.unflatten(0, (20_000, 3))
        error = found.std(0) / math.sqrt(len(found))
        assert ((found.mean(0) - right).abs() <= 4.5 * error + 1e-9).all()


# ---------------------------------------------------------------- sizes, types, errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), [(0, 4), (4, 0), (1, 1)])
def test_empty_and_single(kind, n, m):
    x, y = KINDS[kind](n, 0), KINDS[kind](m, 1)
    assert sampled_csd_matrix(x, y, generator=seeded()).shape == (n, m)
    assert sampled_csd(x, x, generator=seeded()).shape == (n,)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_accumulates_in_float32(kind):
    x, y = KINDS[kind](N, 0, d=300, dtype=torch.bfloat16), KINDS[kind](M, 1, d=300, dtype=torch.bfloat16)
    assert x.sample(2).dtype == torch.bfloat16
    assert sampled_csd_matrix(x, y, n_samples=2).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_neither_a_cube_nor_all_draws_are_held(kind):
    x, y = KINDS[kind](120, 0, d=64, dtype=torch.float32), KINDS[kind](130, 1, d=64, dtype=torch.float32)
    with LargestTensor() as largest:
        sampled_csd_matrix(x, y, n_samples=8, generator=seeded())
    assert 120 * 130 <= largest.numel <= 2 * 130 * 64


def test_points_and_uniform_densities():
    point = Laplace(torch.ones(1, 3), torch.full((1, 3), -torch.inf))
    assert point.sample(2, generator=seeded()).equal(torch.ones(1, 2, 3))
    uniform = VonMisesFisher(torch.eye(3)[:1], torch.tensor([-torch.inf]))
    assert uniform.resultant_length.item() == 0
    assert uniform.gaussian().total_variance.item() == pytest.approx(1)
    assert uniform.sample(4000, generator=seeded())[0].mean(0).norm() < 0.08  # 5 standard deviations of 1/sqrt(4000)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="unit vectors, got lengths from 2 to 2; use torch.nn.functional.normalize"):
        VonMisesFisher(2 * torch.eye(3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"d >= 2 and log_concentration \(n,\), got \(3, 3\) and \(3, 3\)"):
        VonMisesFisher(torch.eye(3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="move one with .to()"):
        VonMisesFisher(torch.eye(3), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(TypeError, match="log_concentration must be a floating point tensor, got float"):
        VonMisesFisher(torch.eye(3), 1.0)
    with pytest.raises(ValueError, match="the same shape"):
        Laplace(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(
        ValueError, match=r"sampled_csd: x is \(3, 7\) and y is \(5, 7\); both must have the same n and d"
    ):
        sampled_csd(laplace(3, 0), laplace(5, 1))
    with pytest.raises(ValueError, match=r"sampled_csd_matrix: x is \(3, 7\) and y is \(3, 4\)"):
        sampled_csd_matrix(laplace(3, 0), laplace(3, 1, d=4))
