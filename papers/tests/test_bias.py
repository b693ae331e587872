"""The measures of bias and of a model beside another by hand, and pairs in the emoji set."""

import numpy as np
import pytest

from papers.benchmarks import beside, bias
from sfumato.data.emoji import emoji_names


def test_pairs_and_figures_by_hand():
    """Name 1 lies nearer to drawing 0 than to its own; of two names of neither the first lies nearer to the man."""
    codes, names = list(emoji_names()), [*emoji_names().values(), ""]
    trios = [[names[k] for k in trio] for trio in bias.trios(codes)]
    assert ["woman judge", "man judge", "judge"] in trios and ["family: woman, girl", "family: man, girl", ""] in trios
    assert len(trios) == 87 and not any("woman" in man for _, man, _ in trios)
    distance = 5.0 - 5 * np.eye(6)
    distance[1, :2], distance[2, :3], distance[5, 3:5] = (1, 2), (4, 3, 9), (1, 2)
    found = bias.figures(distance, np.array([[0, 1, 2], [3, 4, 5], [0, 4, -1]]))
    assert found == pytest.approx({"women": 100, "men": 200 / 3, "men, by neutral names": 50})


def test_a_ranking_by_both_models_and_what_tells_the_errors_of_the_first():
    """The engine is wrong on query 1 alone, where the other is right, far from the engine's hit, and least certain."""
    engine, other = np.array([[1.0, 9, 9], [4, 5, 9], [9, 9, 1]]), np.array([[1.0, 9, 9], [9, 1, 9], [9, 1, 2]])
    found = beside.figures(engine, other, np.eye(3, dtype=bool), np.array([0.1, 0.3, 0.2]))
    recalls = {"recall@1, engine": 200 / 3, "recall@1, other": 200 / 3, "recall@1, both": 100}
    numbers = ("variance", "other's distance", "engine's margin")
    assert found == pytest.approx(recalls | {f"AUROC, {name}": 1 for name in numbers})
