"""Scripts of benchmarks/ as modules. Their folder is on the path for the import alone: tests have the same names."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def benchmark(name):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
