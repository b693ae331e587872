"""Test with the lowest version of every declared dependency: `make lowest`.

Makes an environment with exactly the lower bounds of pyproject.toml, the extras included, and runs a part of the tests
in it. A bound that cannot be installed with the others, or with which a test fails, is false: raise it. pip resolves
what the dependencies need themselves as usual. Test tools come from constraints.txt, and so does torch by default: the
registry has its lowest version only as a build for GPUs, of several gigabytes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

EXTRAS = (
    "faiss", "parquet", "analysis", "report", "benchmarks", "backbones", "offline", "serve",
    "heif", "raw", "video", "referee",
)  # fmt: skip
"""All extras but the clients of database servers and the demo, whose packages are in the others."""

TOOLS = ("pytest", "hypothesis", "scipy", "httpx", "webdataset")
"""What the tests need beside the package."""

TESTS = (
    "tests/test_gaussian.py",
    "tests/test_recipes.py",
    "tests/calibration",
    "tests/data",
    "tests/encoders",
    "tests/losses/test_contrastive.py",
    "tests/metrics",
    "tests/models",
    "tests/workflows",
    "tests/reports",
    "tests/search/test_index.py",
    "tests/serve/test_faults.py",
    "tests/serve/test_service.py",
    "tests/training/test_loop.py",
    "tests/training/test_optim.py",
    "tests/training/test_variance_stage.py",
)
"""Tests of every part of the package that an extra serves."""


def lower_bounds(pyproject: Path, extras: Sequence[str]) -> dict[str, str]:
    """Name -> lowest declared version of the dependencies and of some extras."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    extras = [*extras, "train"] if "train" in optional else extras  # which others name
    declared = [*project["dependencies"], *(d for extra in extras for d in optional[extra] if d != "sfumato[train]")]
    bounds: dict[str, str] = {}
    for dependency in declared:
        found = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?>=([\w.]+)", dependency)
        if found is None:
            raise SystemExit(f"{pyproject}: {dependency!r} has no lower bound of the form name>=version")
        if bounds.setdefault(found[1], found[2]) != found[2]:
            raise SystemExit(f"{pyproject}: {found[1]} has two lower bounds, {bounds[found[1]]} and {found[2]}")
    return bounds


def pinned(constraints: Path) -> dict[str, str]:
    """Name -> version of every line of a constraints file."""
    lines = (line.split("#")[0].strip() for line in constraints.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==") for line in lines if line)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "sfumato-lowest")
    parser.add_argument("--extras", default=",".join(EXTRAS), help="extras, with commas between them")
    parser.add_argument("--current", default="torch", help="dependencies to take from constraints.txt instead")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="tests to run; by default a part of each folder")
    options = parser.parse_args(arguments)
    bounds, current = lower_bounds(ROOT / "pyproject.toml", options.extras.split(",")), pinned(ROOT / "constraints.txt")
    for name in filter(None, options.current.split(",")):
        bounds[name] = current[name]
    python = options.folder / "bin" / "python"
    if not python.exists():
        venv.create(options.folder, with_pip=True)
    wanted = [f"{name}=={version}" for name, version in {**bounds, **{tool: current[tool] for tool in TOOLS}}.items()]
    print("lowest versions:", *wanted, flush=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    if subprocess.run([*install, *wanted]).returncode:
        print("these versions cannot be installed together; raise a bound that pip names above", file=sys.stderr)
        return 1
    subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    tests = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *options.tests]
    return subprocess.run(tests, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
