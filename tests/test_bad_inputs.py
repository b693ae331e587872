"""A hundred bad inputs at every entrance, see benchmarks/bad_inputs.py: refused in a clear line, or taken."""

import pytest
from support.scripts import benchmark

ENTRANCES = ("manifest", "shards", "embeddings", "recipe", "collection", "run", "checkpoint")


@pytest.fixture(scope="module")
def bad_inputs():
    pytest.importorskip("fastapi")
    return benchmark("bad_inputs")


@pytest.mark.slow
def test_bad_inputs(bad_inputs, tmp_path):
    assert tuple(bad_inputs.ENTRANCES) == ENTRANCES
    for name in ENTRANCES:
        folder = tmp_path / name
        folder.mkdir()
        found = bad_inputs.try_all(name, folder, 100, seed=11)
        assert found.unexpected == [] and found.inputs == 100, name
        assert found.refused >= 20 and found.accepted >= 5, name


def test_what_is_unexpected_is_seen(bad_inputs):
    def told(raise_it):
        try:
            raise_it()
        except BaseException as error:
            return bad_inputs.unclear(error)

    def too_long():
        raise bad_inputs.TooLongError

    assert "KeyError" in told(lambda: {}["a"]) and "another package" in told(lambda: int("x"))
    assert "no end" in told(too_long)
    assert bad_inputs.unreadable("red \x1b[31m") and bad_inputs.unreadable("x" * 6000)
    assert bad_inputs.unreadable("two\nlines") is None
