"""Which part of the package may import which: the arrows of the house go one way."""

import ast
from pathlib import Path

import sfumato

SOURCE = Path(sfumato.__file__).parent

# A part is a top-level module or folder. It may import the parts named here, and itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "progress": set(),
    "gaussian": {"files"},
    "foreign": {"gaussian"},
    "distances": {"gaussian"},
    "densities": {"distances", "gaussian"},
    "matching": {"distances", "gaussian"},
    "losses": {"distances", "gaussian", "matching"},
    "metrics": set(),
    "calibration": {"errors", "files", "matching", "metrics"},
    "search": {"calibration", "distances", "errors", "files", "gaussian", "matching", "metrics"},
    "evaluation": {
        *("data", "distances", "errors", "files", "foreign", "gaussian", "losses", "matching", "metrics", "search"),
    },
    "data": {"errors", "files", "metrics"},
    "encoders": {"calibration", "data", "errors", "files", "gaussian"},
    "recipes": {"errors"},
    "training": {
        "calibration",
        *("data", "distances", "encoders", "errors", "evaluation", "files", "gaussian", "losses", "matching"),
        *("metrics", "progress", "search"),
    },
    "analysis": {
        *("data", "distances", "encoders", "errors", "evaluation", "files", "gaussian", "losses", "metrics"),
        *("progress", "search", "training"),
    },
    "audit": {"data", "errors", "evaluation", "files", "gaussian", "metrics", "progress", "search", "training"},
    "console": {"evaluation", "metrics"},
    "demo": {
        "console",
        "data",
        "evaluation",
        "files",
        "gaussian",
        "matching",
        "metrics",
        "recipes",
        "search",
        "training",
    },
    "serve": {"analysis", "data", "encoders", "errors", "files", "gaussian", "search", "training"},
    "toy": {"files", "gaussian", "losses", "progress"},
    "prompts": {"encoders", "errors", "gaussian", "progress", "search", "training"},
    "zeroshot": {
        *("data", "distances", "errors", "evaluation", "gaussian", "metrics", "progress", "prompts", "training"),
    },
    "cli": {
        "analysis",
        "audit",
        "console",
        "data",
        "demo",
        "errors",
        "evaluation",
        "gaussian",
        "progress",
        "prompts",
        "recipes",
        "search",
        "serve",
        "toy",
        "training",
        "zeroshot",
    },
    "__main__": {"cli"},
    "__init__": {
        "analysis",
        "audit",
        "calibration",
        "data",
        "densities",
        "distances",
        "encoders",
        "evaluation",
        "foreign",
        "gaussian",
        "losses",
        "matching",
        "metrics",
        "prompts",
        "search",
        "training",
        "zeroshot",
    },
}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""]
            if node.module == "sfumato":
                names = [f"sfumato.{alias.name}" for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("sfumato.")}
    return parts


def test_imports_follow_the_table():
    wrong = {}
    for path in SOURCE.rglob("*.py"):
        part = part_of(path)
        assert part in ALLOWED, f"{path}: a new part; give it a row in this table"
        if extra := imports_of(path) - ALLOWED[part] - {part}:
            wrong[str(path.relative_to(SOURCE))] = sorted(extra)
    assert not wrong


def test_the_table_has_no_rows_and_no_arrows_to_spare():
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        found.setdefault(part_of(path), set()).update(imports_of(path) - {part_of(path)})
    assert {
        part: arrows - found.get(part, set()) for part, arrows in ALLOWED.items() if arrows - found.get(part, set())
    } == {}


def test_the_arrows_make_no_ring():
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, arrows in ALLOWED.items() if part not in done and arrows <= done}
        assert ready, f"a ring among {sorted(set(ALLOWED) - done)}"
        done |= ready
