"""Every distance in DISTANCES by the same tests: a new one needs only a loop in references.py. And matching."""

import inspect
import math

import pytest
import scipy
import torch
from support import references
from support.largest import LargestTensor
from support.raising import raises
from torch.distributions import Independent, Normal

from sfumato import DISTANCES, GaussianEmbedding, MatchingLogits, get_distance
from sfumato.calibration.logits import fit_logits
from sfumato.distances.distance import seeded_samples
from sfumato.matching import match_probability, match_probability_distance
from sfumato.search.exact import distance_blocks

CLOSED = [name for name, distance in DISTANCES.items() if not distance.sampled]
BLOCKED = [name for name, d in DISTANCES.items() if "memory_mb" in inspect.signature(d.matrix).parameters]
N, M, D = 3, 5, 7


def gaussians(n, seed, *, d=D, dtype=torch.float64, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(n, d, generator=generator, dtype=torch.float64) + offset
    log_var = 3 * torch.rand(n, d, generator=generator, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(d)[:d]
    return GaussianEmbedding(mean.to(dtype), log_var.to(dtype))


def loops(formula, x, y):
    rows = [(m.tolist(), v.tolist()) for m, v in zip(x.mean, x.var, strict=True)]
    columns = [(m.tolist(), v.tolist()) for m, v in zip(y.mean, y.var, strict=True)]
    return torch.tensor([[formula(*a, *b) for b in columns] for a in rows], dtype=torch.float64)


seeded = lambda name: {"generator": torch.Generator().manual_seed(0)} if DISTANCES[name].sampled else {}


@pytest.mark.parametrize("name", DISTANCES)
def test_gradients_are_those_of_the_function_and_finite_at_identical_inputs(name):
    x, y = gaussians(2, 0, d=4), gaussians(3, 1, d=4)
    inputs = [t.requires_grad_() for t in (x.mean, x.log_var, y.mean, y.log_var)]
    for form, other in (("matrix", 3), ("row", 2)):

        def function(a, b, c, d, form=form, other=other):
            sides = GaussianEmbedding(a, b), GaussianEmbedding(c[:other], d[:other])
            return getattr(DISTANCES[name], form)(*sides, **seeded(name))

        assert torch.autograd.gradcheck(function, inputs)
    x = gaussians(3, 0, dtype=torch.float32)
    mean, log_var = x.mean.requires_grad_(), x.log_var.requires_grad_()
    e = GaussianEmbedding(mean, log_var)
    for form in (DISTANCES[name].matrix, DISTANCES[name].row):
        mean.grad = log_var.grad = None
        form(e, e, **seeded(name)).sum().backward()
        assert torch.isfinite(mean.grad).all() and (log_var.grad is None or torch.isfinite(log_var.grad).all())


@pytest.mark.parametrize("name", DISTANCES)
def test_precision_of_sums(name):
    """Half precision, where sums of 300 would be off by per cents; autocast; means near 1000, off by 1 in float32."""
    single = [gaussians(M, k, dtype=torch.float32) for k in (0, 1)]
    far = [gaussians(M, k, dtype=torch.float32, offset=1000) for k in (0, 1)]
    for function in (DISTANCES[name].matrix, DISTANCES[name].row):
        call = lambda sides, dtype=None, function=function: function(
            *(e if dtype is None else e.to(dtype) for e in sides), **seeded(name)
        )
        for dtype in (torch.float16, torch.bfloat16):
            half = [gaussians(M, k, d=300, dtype=dtype) for k in (0, 1)]
            wide = torch.float32 if DISTANCES[name].sampled else torch.float64  # Samples depend on the dtype.
            assert call(half).dtype == torch.float32
            torch.testing.assert_close(call(half), call(half, wide).float(), rtol=2e-4, atol=2e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = call(single)
        assert inside.dtype == torch.float32
        torch.testing.assert_close(inside, call(single), rtol=1e-6, atol=1e-6)
        if name in CLOSED:
            torch.testing.assert_close(call(far).double(), call(far, torch.float64), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["squared_l2", "csd", "wasserstein2"])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_nearly_equal_vectors_within_the_stated_bound(name, offset):
    generator = torch.Generator().manual_seed(0)
    a = torch.nn.functional.normalize(torch.randn(40, 512, generator=generator), dim=1) + offset
    b, log_var = a + 1e-5 * torch.randn(40, 512, generator=generator), torch.randn(40, 512, generator=generator) - 12
    x, y = GaussianEmbedding(a, log_var), GaussianEmbedding(b, log_var)
    result = DISTANCES[name].matrix(x, y)
    assert (result >= 0).all()
    if name == "wasserstein2":
        a, b = torch.cat([a, (log_var / 2).exp()], dim=1), torch.cat([b, (log_var / 2).exp()], dim=1)
    centre = b.mean(0)
    bound = 1e-6 * ((a - centre).square().sum(1).unsqueeze(1) + (b - centre).square().sum(1))
    if name == "csd":
        bound += 1e-6 * (x.total_variance.unsqueeze(1) + y.total_variance)
    exact = DISTANCES[name].matrix(x.to(torch.float64), y.to(torch.float64))
    assert ((result - exact).abs() <= bound).all()
    torch.testing.assert_close(DISTANCES[name].row(x, y).double(), exact.diagonal(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_with_an_uneven_last_one_are_the_whole_with_its_gradients(name):
    x, y = gaussians(7, 0), gaussians(11, 1)
    whole = DISTANCES[name].matrix(x, y, **seeded(name))
    for memory_mb in (1e-4, 1e-3, 3e-3):
        torch.testing.assert_close(DISTANCES[name].matrix(x, y, memory_mb=memory_mb, **seeded(name)), whole)
    raises(ValueError, "memory_mb must be positive", DISTANCES[name].matrix, x, y, memory_mb=0)
    gradients = []
    for memory_mb in (64.0, 1e-3):
        x, y = gaussians(5, 0), gaussians(6, 1)
        leaves = [t.clone().requires_grad_() for t in (x.mean, y.log_var)]
        sides = GaussianEmbedding(leaves[0], x.log_var), GaussianEmbedding(y.mean, leaves[1])
        DISTANCES[name].matrix(*sides, memory_mb=memory_mb, **seeded(name)).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", CLOSED)
def test_matrix_is_the_loops_in_both_directions_with_and_without_gradients(name):
    x, y = gaussians(N, 0), gaussians(M, 1)
    expected = loops(getattr(references, name), x, y)
    torch.testing.assert_close(DISTANCES[name].matrix(x, y), expected, rtol=1e-11, atol=1e-11)
    plain, t2i = get_distance(name), get_distance(name).for_direction("t2i")
    assert (plain.direction, t2i.direction, plain.for_direction("i2t")) == ("i2t", "t2i", plain)
    torch.testing.assert_close(t2i.matrix(y, x), expected.T, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(t2i.row(y[:3], x[:3]), plain.row(x[:3], y[:3]))
    torch.testing.assert_close(t2i.for_direction("i2t").matrix(x, y), plain.matrix(x, y))
    assert torch.allclose(t2i.matrix(y, x), plain.matrix(y, x), rtol=1e-9) == plain.symmetric
    x, y = gaussians(N, 0, dtype=torch.float32), gaussians(M, 1, dtype=torch.float32)
    copies = [t.clone() for t in (x.mean, x.log_var, y.mean, y.log_var)]
    with torch.inference_mode():
        bare = DISTANCES[name].matrix(x, y), DISTANCES[name].row(x, y[:N])
    assert all(torch.equal(a, b) for a, b in zip(copies, (x.mean, x.log_var, y.mean, y.log_var), strict=True))
    x = GaussianEmbedding(x.mean.requires_grad_(), x.log_var.requires_grad_())
    found = DISTANCES[name].matrix(x, y), DISTANCES[name].row(x, y[:N])
    torch.testing.assert_close(bare, found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", DISTANCES)
def test_no_cube_is_ever_held(name):
    x, y = gaussians(120, 0, d=192, dtype=torch.float32), gaussians(130, 1, d=192, dtype=torch.float32)
    mean, budget = x.mean.requires_grad_(), {"memory_mb": 1} if name in BLOCKED else {}
    with LargestTensor() as largest:
        DISTANCES[name].matrix(GaussianEmbedding(mean, x.log_var), y, **budget, **seeded(name)).sum().backward()
    assert 120 * 130 <= largest.numel <= 2**18


@pytest.mark.parametrize("name", DISTANCES)
def test_rows_are_the_diagonal_of_any_size_and_errors_name_the_way_out(name):
    x, y = gaussians(M, 0), gaussians(M, 1)
    rows = DISTANCES[name].row(x, y, **seeded(name))
    assert rows.shape == (M,)
    torch.testing.assert_close(rows, DISTANCES[name].matrix(x, y, **seeded(name)).diagonal(), rtol=1e-10, atol=1e-10)
    for n, m in ((0, 4), (4, 0), (0, 0), (1, 1)):
        assert DISTANCES[name].matrix(gaussians(n, 0), gaussians(m, 1)).shape == (n, m)
        assert DISTANCES[name].row(gaussians(n, 0), gaussians(n, 1)).shape == (n,)
    x = gaussians(N, 0)
    raises(ValueError, r"x is \(., 7\).*y is \(., 6\).*same d", DISTANCES[name].matrix, x, gaussians(M, 1, d=6))
    raises(ValueError, "float64.*float32", DISTANCES[name].matrix, x, gaussians(M, 1, dtype=torch.float32))
    raises(ValueError, r"3 rows and y has 5.*the matrix form", DISTANCES[name].row, x, gaussians(M, 1))
    way_out = "y must be a GaussianEmbedding, got Tensor; wrap means in GaussianEmbedding.point"
    raises(TypeError, way_out, DISTANCES[name].matrix, x, x.mean)


def test_points_give_the_squared_euclidean_distance_or_are_refused():
    x, y = GaussianEmbedding.point(gaussians(N, 0).mean), GaussianEmbedding.point(gaussians(M, 1).mean)
    for name in ("csd", "wasserstein2", "squared_l2"):
        torch.testing.assert_close(DISTANCES[name].matrix(x, y), torch.cdist(x.mean, y.mean).square())
    for name in (n for n in CLOSED if DISTANCES[n].needs_variance):
        raises(ValueError, "needs positive variances", DISTANCES[name].matrix, x, y)
    x = gaussians(N, 0, dtype=torch.float32, d=513)
    assert DISTANCES["bhattacharyya"].matrix(x, x).diagonal().eq(0).all()
    x, point = gaussians(N, 0), GaussianEmbedding.point(gaussians(M, 1).mean)
    log_density = Independent(Normal(x.mean.unsqueeze(1), x.var.sqrt().unsqueeze(1)), 1).log_prob(point.mean)
    torch.testing.assert_close(DISTANCES["elk"].matrix(x, point), -log_density)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_nearest_of_several_is_the_loops_in_both_forms_and_of_one_squared_l2(k):
    x, y, distance = gaussians(N, 0, d=6), gaussians(M, 1, d=6), get_distance(f"nearest_of_{k}")
    expected = loops(lambda *sides: references.nearest(*sides, k), x, y)
    torch.testing.assert_close(distance.matrix(x, y), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(distance.matrix(x, y), distance.matrix(y, x).T)
    torch.testing.assert_close(distance.row(x, y[:N]), expected[:, :N].diagonal())
    whole = DISTANCES["squared_l2"].matrix(x, y)
    assert distance.embeddings == k and torch.allclose(distance.matrix(x, y), whole) == (k == 1)


def test_learnable_logits_that_are_not_positive_are_refused():
    logits, distance = MatchingLogits(3.0, -1.0), torch.rand(2, 3)
    torch.testing.assert_close(logits(distance), -1 - 3 * distance)
    logits(distance).sum().backward()
    torch.testing.assert_close(logits.log_logit_scale.grad, -3 * distance.sum())
    for wrong in (0.0, -2.0, math.inf, math.nan):
        raises(ValueError, "logit_scale must be positive", MatchingLogits, wrong)
    logits = MatchingLogits(5.0, 5.0, free=True)
    logits.constrain()
    logits.free_logit_scale.data.fill_(-0.25)
    raises(ArithmeticError, "free scale of the match logits is -0.25, which reverses all distances", logits.constrain)


@pytest.mark.parametrize("free", [True, False])
def test_a_scale_is_kept_below_its_largest_and_can_come_back(free):
    logits = MatchingLogits(49.0, 0.0, free=free, largest=50.0)
    with torch.no_grad():
        next(logits.parameters()).add_(2.0)
    logits.constrain()
    assert logits.logit_scale.item() == pytest.approx(50, rel=1e-6)
    logits.logit_scale.backward()
    assert next(logits.parameters()).grad != 0
    raises(ValueError, "logit_scale must be at most 50, the largest, got 51", MatchingLogits, 51.0, 0.0, largest=50.0)


def labelled(seed=0, k=4000, scale=4.0, bias=3.0):
    generator = torch.Generator().manual_seed(seed)
    distance = 2 * torch.rand(k, generator=generator)
    return distance, (torch.rand(k, generator=generator) < match_probability(distance, scale, bias)).double()


def test_fit_is_the_maximum_that_another_optimiser_finds_also_of_separable_distances():
    distance, match = labelled()

    def loss(parameters):
        logit = torch.as_tensor(parameters[1]) - parameters[0] * distance.double()
        return torch.nn.functional.binary_cross_entropy_with_logits(logit, match).item()

    exact = {"xatol": 1e-9, "fatol": 1e-14, "maxiter": 4000}
    best = scipy.optimize.minimize(loss, [1.0, 0.0], method="Nelder-Mead", options=exact)
    fitted = fit_logits(distance, match)
    assert loss(fitted) <= best.fun + 1e-9 and fitted == pytest.approx(tuple(best.x), rel=1e-4)
    scale, bias = fit_logits(torch.tensor([0.1, 0.2, 0.9, 1.0]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert 10 < scale < 1e6 and math.isfinite(bias)
    for message, distance, match in (
        ("needs matching and non-matching pairs", [0.1, 0.2], [1.0, 1.0]),
        ("are not closer than non-matches", [0.9, 0.2], [1.0, 0.0]), ("must be finite", [0.9, math.nan], [1.0, 0.0]),
        (r"match must lie in \[0, 1\]", [0.9, 0.1], [2.0, 0.0]), ("got 1 distances and 2 labels", [0.9], [1.0, 0.0]),
    ):  # fmt: skip
        raises(ValueError, message, fit_logits, torch.tensor(distance), torch.tensor(match))


def pair(offset=0.0, d=6):
    generator = torch.Generator().manual_seed(0)
    x = GaussianEmbedding(torch.randn(3, d, generator=generator), torch.randn(3, d, generator=generator))
    return x, GaussianEmbedding(torch.randn(4, d, generator=generator) + offset, torch.randn(4, d, generator=generator))


def test_match_probability_ranks_by_the_mean_sigmoid_and_not_by_the_sigmoid_of_the_mean():
    x, y = pair()
    distance = match_probability_distance(1.5, 2.0, n_samples=5)
    seeded = lambda: torch.Generator().manual_seed(3)
    by_loops = lambda a, b: torch.stack(
        [torch.stack([-torch.sigmoid(2 - 1.5 * torch.cdist(p, q)).mean().log() for q in b]) for p in a]
    )
    generator = seeded()
    expected = by_loops(*(e.sample(5, generator=generator) for e in (x, y)))
    for memory_mb in (64.0, 1e-4):
        found = distance.matrix(x, y, generator=seeded(), memory_mb=memory_mb)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    rows, first = distance.row(x, y[:3], generator=seeded()), distance.matrix(x, y[:3], generator=seeded())
    torch.testing.assert_close(rows, first.diagonal(), rtol=1e-4, atol=1e-5)
    a, b = (seeded_samples(e, 5, seed=0, side=side) for e, side in ((x, "image"), (y, "text")))
    ((_, blocks),) = distance_blocks(x, y, distance)
    torch.testing.assert_close(blocks, by_loops(a, b), rtol=1e-4, atol=1e-5)
    raises(ValueError, "logit_scale > 0 and n_samples >= 1, got -1", match_probability_distance, -1.0, 0.0)


def test_draws_have_the_distances_of_average_l2_and_sampled_probabilities_do_not_underflow():
    x, y = pair(offset=1e4)
    value = match_probability_distance(5.0, 5.0, n_samples=2).matrix(x, y)
    assert torch.isfinite(value).all() and (value > 1e4).all()
    x, y = pair()
    gradients = []
    for memory_mb in (64.0, 1e-4):
        scale, generator = torch.tensor(1.5, requires_grad=True), torch.Generator().manual_seed(3)
        distance = match_probability_distance(scale, 2.0, n_samples=3)
        distance.matrix(x, y, generator=generator, memory_mb=memory_mb).sum().backward()
        gradients.append(scale.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0] > 0
    raises(ValueError, "same d", distance.matrix, x, pair(d=5)[1])
    x, y, generator = gaussians(N, 0), gaussians(M, 1), torch.Generator().manual_seed(5)
    a, b = x.sample(3, generator=generator), y.sample(3, generator=generator)
    expected = torch.stack([torch.stack([torch.cdist(p, q).mean() for q in b]) for p in a])
    found = DISTANCES["average_l2"].matrix(x, y, n_samples=3, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected)
