"""The drift monitor: false alarms and power counted by simulation, the test against scipy, galleries of other sizes."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy
import torch

from sfumato.calibration.drift import DriftMonitor, DriftState, largest_difference, smirnov_p_value
from sfumato.calibration.query_scores import FAR, N_STEPS, QueryScores

M = 50


def scores_of(nearest, *, group=(), n_gallery=M, per_doubling=()):
    """Scores of held-out queries with these distances to their closest item."""
    closest, other = tuple(map(float, nearest)), (math.inf,) * len(nearest)
    return QueryScores(
        n_gallery, 0, 1.0, 0.0, closest, closest, other, (0.0,) * N_STEPS, tuple(group), tuple(per_doubling)
    )


def alarms(rng, draw_held_out, draw_query, *, held_out=20, windows=50, **options):
    """Number of windows with an alarm, and of all: new held-out queries, and new windows for each of them."""
    count = 0
    for _ in range(held_out):
        nearest, group = draw_held_out(rng)
        for _ in range(windows):
            monitor = DriftMonitor(scores_of(nearest, group=group), **options)
            count += len(monitor.add(draw_query(rng, monitor.window), n_gallery=M))
    return count, held_out * windows


def independent(rng):
    return rng.normal(1, 0.2, 400), ()


def in_groups(rng):
    """400 queries of 80 groups of 5, alike within a group to a correlation of .8."""
    group = np.repeat(np.arange(80), 5)
    return 1 + 0.2 * (math.sqrt(0.8) * rng.normal(size=80)[group] + math.sqrt(0.2) * rng.normal(size=400)), group


def same(rng, n):
    return rng.normal(1, 0.2, n)


# ---------------------------------------------------------------- the two-sample test


@pytest.mark.parametrize(("n", "m"), [(200, 400), (200, 1574), (60, 100)])
def test_statistic_and_p_value_are_those_of_scipy(n, m):
    rng = np.random.default_rng(n + m)
    for shift in (0.0, 0.2, 0.4):
        x, y = rng.normal(size=n), rng.normal(shift, 1, m)
        y[:5] = x[:5]  # Ties.
        exact = scipy.stats.ks_2samp(x, y)
        statistic = largest_difference(x, y)
        assert statistic == pytest.approx(exact.statistic)
        ours = smirnov_p_value(statistic, n, m)
        assert ours == pytest.approx(scipy.stats.kstwobign.sf(statistic * math.sqrt(n * m / (n + m))), abs=1e-9)
        assert ours >= 0.95 * exact.pvalue and ours <= 2 * exact.pvalue + 1e-6  # Errs to the side of no alarm.


def test_p_values_at_the_ends():
    assert [smirnov_p_value(d, 200, 400) for d in (-0.1, 0.0, 0.001)] == [1.0] * 3
    assert smirnov_p_value(1.0, 200, 400) < 1e-100


# ---------------------------------------------------------------- false alarms and power


def test_no_more_false_alarms_than_stated():
    """At level .04 without a tolerance: at most .04 of 3,000 windows, with three standard errors of 60 held-out sets.

    Windows of one held-out set share its error, so the standard error is that of means over held-out sets.
    """
    rng, rates = np.random.default_rng(0), []
    for _ in range(60):
        count, n = alarms(rng, independent, same, held_out=1, level=0.04, tolerance=0.0)
        rates.append(count / n)
    rate, error = np.mean(rates), np.std(rates) / math.sqrt(len(rates))
    assert 0.01 < rate <= 0.04 + 3 * error, (rate, error)


def test_captions_of_one_image_count_as_one():
    rng = np.random.default_rng(2)
    grouped, n = alarms(rng, in_groups, same, held_out=40, level=0.04, tolerance=0.0)
    as_if_independent, _ = alarms(rng, lambda r: (in_groups(r)[0], ()), same, held_out=40, level=0.04, tolerance=0.0)
    assert grouped / n <= 0.04
    assert as_if_independent / n > 0.08  # The tempting wrong number of held-out queries.


def test_a_difference_within_the_tolerance_raises_no_alarm():
    """A shift of .1 standard deviations is a difference of .04; without a tolerance large samples would find it."""
    nearest, rng = np.random.default_rng(3).normal(1, 0.2, 20_000), np.random.default_rng(4)
    sides = lambda _: (nearest, ()), lambda rng, n: rng.normal(1.02, 0.2, n)
    options = {"held_out": 1, "windows": 30, "window": 10_000}
    with_, n = alarms(rng, *sides, **options)
    without, _ = alarms(rng, *sides, **options, tolerance=0.0)
    assert with_ == 0 and without >= 0.8 * n


# ---------------------------------------------------------------- state


def test_an_alarm_begins_and_ends_once():
    rng = np.random.default_rng(6)
    monitor = DriftMonitor(scores_of(independent(rng)[0]))
    assert monitor.state == DriftState(0, 0, None, None, False)
    assert monitor.add(same(rng, 199), n_gallery=M) == [] and monitor.state.n_windows == 0
    assert monitor.add(same(rng, 1), n_gallery=M) == [] and monitor.state.n_windows == 1
    (begun,) = monitor.add(rng.normal(1.5, 0.2, 650), n_gallery=M)  # Three windows, one message.
    assert begun.differs and begun.n_windows == 2 and begun.statistic > 0.5 and begun.p_value < 1e-3
    assert monitor.state.differs and monitor.state.n_windows == 4 and monitor.state.n_queries == 850
    (over,) = monitor.add(same(rng, 400), n_gallery=M)
    assert not over.differs and not monitor.state.differs


def test_repeated_queries_and_no_distances_do_not_count():
    rng = np.random.default_rng(7)
    monitor = DriftMonitor(scores_of(independent(rng)[0]))
    assert monitor.add([2.0, 2.0 + 1e-7] * 5000, n_gallery=M, names=["a"] * 10_000) == []
    assert monitor.state.n_queries == 1
    assert monitor.add([math.inf, math.nan], n_gallery=M) == [] and monitor.state.n_queries == 1
    assert monitor.add([1.0] * 3, n_gallery=M) == [] and monitor.state.n_queries == 4  # Equal distances, other queries.
    monitor.add(same(rng, 196), n_gallery=M, names=range(196))
    monitor.add([1.0], n_gallery=M, names=["a"])  # In the next window it counts again.
    assert monitor.state.n_queries == 201 and monitor.state.n_windows == 1


def test_memory_does_not_grow():
    rng = np.random.default_rng(8)
    monitor = DriftMonitor(scores_of(independent(rng)[0]))
    monitor.add(same(rng, 5250), n_gallery=M, names=range(5250))
    assert len(monitor._distances) == len(monitor._seen) == 50 and monitor.state.n_windows == 26


def test_threads_may_share_it():
    rng = np.random.default_rng(9)
    monitor, lists = DriftMonitor(scores_of(independent(rng)[0])), [same(rng, 1000) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda part: [monitor.add([x], n_gallery=M) for x in part], lists))
    assert monitor.state.n_queries == 8000 and monitor.state.n_windows == 40 and not monitor.state.differs


def test_bad_arguments():
    for options, message in (
        ({"window": 19}, "window must be at least 20 queries, got 19"),
        ({"level": 0.0}, "level must be above 0 and below 0.05, got 0.0"),
        ({"level": 0.1}, "level must be above 0 and below 0.05, got 0.1"),
        ({"tolerance": 1.0}, "tolerance must be at least 0 and below 1, got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            DriftMonitor(scores_of([1.0, 2.0]), **options)


# ---------------------------------------------------------------- galleries of another size


def gallery(rng, n_queries, n_items):
    """(q, m) distances: one match each, closer than the others on average, and queries that differ in how close."""
    own = rng.normal(0, 0.3, (n_queries, 1))
    distance = rng.normal(4, 1, (n_queries, n_items)) + own
    distance[:, 0] = rng.normal(1.7, 1, n_queries) + own[:, 0]
    return distance


def measured(rng, n_items=400, n_queries=1000):
    distance = gallery(rng, n_queries, n_items)
    match = torch.zeros(n_queries, n_items)
    match[:, 0] = 1
    scores = QueryScores.fit(torch.from_numpy(distance), match)
    smaller = [(n_items // k, distance[:, : n_items // k].min(1)) for k in (1, 2, 4, 8)]
    return scores, scores.with_smaller(smaller)


@pytest.mark.parametrize("n_items", [100, 1600, 3200])
def test_a_gallery_of_another_size_is_no_drift(n_items):
    rng = np.random.default_rng(n_items)
    plain, scores = measured(rng)
    nearest = gallery(rng, 4000, n_items).min(1)
    moved = largest_difference(nearest, scores.nearest_in(n_items))
    assert moved < 0.08 and moved < largest_difference(nearest, plain.nearest) / 2
    monitor = DriftMonitor(scores)
    assert monitor.add(nearest, n_gallery=n_items) == [] and monitor.state.n_windows >= 19
    (state,) = monitor.add(nearest + 1, n_gallery=n_items)  # Farther ones are one all the same.
    assert state.differs


def test_the_shift_is_that_of_loops():
    rng = np.random.default_rng(10)
    plain, _ = measured(rng, n_items=64, n_queries=60)
    galleries = [(64, rng.random(60)), (32, rng.random(50)), (16, rng.random(30)), (8, rng.random(N_STEPS - 1))]
    got = plain.with_smaller(galleries)
    for j in range(N_STEPS):
        level, above, below = (j + 0.5) / N_STEPS, 0.0, 0.0
        for n, nearest in galleries[1:3]:  # The whole gallery is the origin, and the last has too few queries.
            x = math.log2(n / 64)
            above += len(nearest) * x * (np.quantile(nearest, level) - np.quantile(plain.nearest, level))
            below += len(nearest) * x * x
        assert got.per_doubling[j] == pytest.approx(above / below)
    assert plain.with_smaller(galleries[:1]) == plain
    assert QueryScores.from_json(json.loads(json.dumps(got.to_json()))) == got


def test_sizes_that_are_not_covered_are_left_out():
    rng = np.random.default_rng(11)
    plain, scores = measured(rng, n_items=64)
    assert [plain.covers(n) for n in (0, 50, 52, 64, 80, 81)] == [False, False, True, True, True, False]
    assert FAR == 3 and [scores.covers(n) for n in (0, 7, 8, 512, 513)] == [False, False, True, True, False]
    monitor = DriftMonitor(scores)
    assert monitor.add(rng.normal(9, 1, 400), n_gallery=513) == [] and monitor.state.n_queries == 0
    np.testing.assert_array_equal(plain.nearest_in(80), np.sort(plain.nearest))


def test_a_damaged_shift_is_named():
    _, scores = measured(np.random.default_rng(12), n_items=64)
    with pytest.raises(ValueError, match=f"got 3 shifts of quantiles, expected {N_STEPS}"):
        QueryScores.from_json(scores.to_json() | {"per_doubling": [0.0] * 3})
