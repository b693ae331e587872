r"""Whether the queries of a gallery still look like those of its calibration.

Probabilities and guarantees hold for queries like the held-out ones. The monitor compares what every search computes
anyway, the distance of a query to its closest item, with that of the held-out queries: a two-sample test of Kolmogorov
and Smirnov, once for each window of queries. It needs no labels. It sees drift that moves this distance and no other,
and it cannot tell new queries from a gallery of new items.

docs/concepts/calibration.md states what it controls; docs/results/guarantees.md has what it finds.
"""

import itertools
import math
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from sfumato.calibration.query_scores import QueryScores

_OVER = 0.05
"""p-value from which a difference counts as over."""


@dataclass(frozen=True)
class DriftState:
    """The result of the last complete window of queries."""

    n_queries: int = 0  # number of queries that were compared or wait for their window to be complete
    n_windows: int = 0  # number of complete windows
    statistic: float | None = None
    p_value: float | None = None  # of "the difference is at most the tolerance"; None before the first window
    differs: bool = False  # whether the queries differ from those of the calibration


class DriftMonitor:
    """Compares the queries of a gallery with the held-out queries of its calibration, window by window.

    The score of a query is the distance of its closest item. A larger gallery has closer items, so the held-out
    distances are moved to the size of the gallery as they move between the smaller galleries of the calibration
    (:meth:`~sfumato.calibration.query_scores.QueryScores.nearest_in`).

    Each window is tested once, when it is complete, and windows share no query. So for queries like the held-out ones,
    independent of each other, a window alarms with a probability of at most `level`, over held-out sets and windows: at
    .001 and 200 queries one false alarm in 200,000 queries. Distributions that differ by less than `tolerance` count as
    alike; in a gallery of another size that also has to cover the error of the moved distances. Held-out queries of one
    group count as one, which is safe. Equal queries in one window count once, so that a client who repeats itself
    raises no alarm. An alarm lasts until a window has a p-value of at least .05.

    A query costs constant time and a window one sort; memory is that of the held-out distances and one window. Threads
    may share a monitor.

    Paper: Smirnov, "On the estimation of the discrepancy between empirical curves of distribution for two independent
        samples", 1939.
    """

    def __init__(
        self, scores: QueryScores, *, window: int = 200, level: float = 0.001, tolerance: float = 0.05
    ) -> None:
        if window < 20:
            raise ValueError(f"DriftMonitor: window must be at least 20 queries, got {window}")
        if not 0 < level < _OVER:
            raise ValueError(f"DriftMonitor: level must be above 0 and below {_OVER}, got {level}")
        if not 0 <= tolerance < 1:
            raise ValueError(f"DriftMonitor: tolerance must be at least 0 and below 1, got {tolerance}")
        self.scores, self.window, self.level, self.tolerance = scores, window, level, tolerance
        self._n_groups = len(np.unique(scores.groups))
        self._state, self._n_queries = DriftState(), 0
        self._lock = threading.Lock()
        self._begin()

    @property
    def state(self) -> DriftState:
        """The state now."""
        with self._lock:
            return replace(self._state, n_queries=self._n_queries)

    def add(
        self, nearest: Iterable[float], *, n_gallery: int, names: Iterable[Hashable] | None = None
    ) -> list[DriftState]:
        """Add queries."""
        changes: list[DriftState] = []
        if not self.scores.covers(n_gallery):
            return changes
        doublings = math.log2(n_gallery / self.scores.n_gallery)
        keys = itertools.repeat(None) if names is None else map(hash, names)
        with self._lock:
            for distance, key in zip(nearest, keys, strict=False):
                if not math.isfinite(distance) or key in self._seen:
                    continue
                if key is not None:
                    self._seen.add(key)
                self._distances.append(distance)
                self._doublings += doublings
                self._n_queries += 1
                if len(self._distances) == self.window and self._compare():
                    changes.append(self._state)
        return changes

    def _begin(self) -> None:
        self._distances: list[float] = []
        self._seen: set[int] = set()
        self._doublings = 0.0

    def _compare(self) -> bool:
        """Test the complete window and begin the next one; whether `differs` has changed."""
        size = self.scores.n_gallery * 2.0 ** (self._doublings / self.window)
        statistic = largest_difference(np.array(self._distances), self.scores.nearest_in(size))
        p_value = smirnov_p_value(statistic - self.tolerance, self.window, self._n_groups)
        before = self._state.differs
        differs = p_value < (_OVER if before else self.level)
        self._state = DriftState(self._n_queries, self._state.n_windows + 1, statistic, p_value, differs)
        self._begin()
        return differs is not before


def largest_difference(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference of the distribution functions of two samples, the statistic of Kolmogorov and Smirnov.

    x (n,), y (m,).
    """
    both = np.concatenate([x, y])
    below = [np.searchsorted(np.sort(each), both, side="right") / len(each) for each in (x, y)]
    return float(np.abs(below[0] - below[1]).max())


def smirnov_p_value(difference: float, n: int, m: int) -> float:
    """The probability that two samples of one distribution differ at least that much.

        p = 2 sum_k (-1)^(k - 1) exp(-2 k^2 t^2),    t = difference * sqrt(n m / (n + m)),    k = 1, 2, ...

    This is the limit for many values; for few the true probability is as a rule smaller.
    """
    t = difference * math.sqrt(n * m / (n + m))
    if t < 0.2:  # The series needs many terms here, and is 1 to twelve digits.
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * t) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))
