"""The measure of bias by hand, and its pairs in the emoji set."""

import numpy as np
import pytest

from papers.benchmarks import bias
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
