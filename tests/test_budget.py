"""The budget of the house. Its numbers may only fall: a feature enters by making room."""

from pathlib import Path

from house import budget

# Lines of code by folder, lines of tests and words of docs; `python scripts/house.py --budget` counts them.
BUDGET = {
    "src/sfumato": 939,
    "src/sfumato/adapters": 173,
    "src/sfumato/calibration": 1_296,
    "src/sfumato/cli": 1_046,
    "src/sfumato/data": 3_164,
    "src/sfumato/distances": 354,
    "src/sfumato/encoders": 2_728,
    "src/sfumato/evaluation": 2_102,
    "src/sfumato/losses": 993,
    "src/sfumato/metrics": 715,
    "src/sfumato/models": 2_179,
    "src/sfumato/reports": 1_064,
    "src/sfumato/search": 4_399,
    "src/sfumato/serve": 2_724,
    "src/sfumato/training": 1_197,
    "src/sfumato/workflows": 2_126,
    "papers": 8_989,
    "papers/tests, lines": 6_420,
    "benchmarks": 5_870,
    "tests, lines": 26_877,
    "docs, words": 49_794,
    "papers, words": 31_727,
    "CHANGELOG.md, words": 1_178,
}
SLACK = 0.03  # A row that is this much above its number, and more than 60, has to be lowered.


def beside(numbers, held):
    """What is wrong with numbers, in words."""
    for place in sorted(numbers.keys() | held.keys()):
        number, most = numbers.get(place), held.get(place)
        if most is None:
            yield f"{place}: {number} without a row; make room in another folder for it, and move its lines here"
        elif number is None:
            yield f"{place} is gone: take its row away"
        elif number > most:
            yield f"{place}: {number}, and its budget is {most}; a feature enters by making room"
        elif most - number > max(60, SLACK * most):
            yield f"{place}: {number}, and its budget is still {most}; lower the row, so that it stays so"


def test_no_folder_is_above_its_budget():
    assert not list(beside(budget(Path(__file__).resolve().parents[1]), BUDGET))


def test_the_budget_finds_what_breaks_it():
    held = {"a": 100, "b": 1_000, "c": 10_000, "d": 5}
    found = [line.split(":")[0] for line in beside({"a": 101, "b": 930, "c": 9_800, "e": 1}, held)]
    assert found == ["a", "b", "d is gone", "e"]
    assert not list(beside({"a": 41, "b": 941, "c": 9_701, "d": 5}, held))
