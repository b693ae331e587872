"""A gallery that the adapters search, and a calibrator of scores."""

import pytest

import sfumato


@pytest.fixture(scope="package")
def index(toy):
    return sfumato.load(toy / "run").index(toy / "data")


@pytest.fixture
def calibrator():
    """Similarities of 40 queries, of which the first hit matches in three of four."""
    lists = [[0.9 - 0.05 * (q % 4), 0.4, 0.35, 0.3, 0.25] for q in range(40)]
    labels, groups = [[q % 4 != 3, 0, 0, 0, 0] for q in range(40)], [[q] * 5 for q in range(40)]
    flat = lambda rows: [value for row in rows for value in row]
    return sfumato.ScoreCalibrator().fit(flat(lists), flat(labels), groups=flat(groups))
