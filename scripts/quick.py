"""Test files that a change concerns, for `make quick`: those of each changed module, and the rules of the house.

python scripts/quick.py [BASE]    changed since the last commit in common with BASE (default: origin/main)
"""

import ast
import subprocess
import sys
from pathlib import Path

RULES = ("tests/test_layers.py", "tests/test_house_rules.py", "tests/test_public_names.py")
MOST = 4  # test files of one changed module, those that stand nearest first


def git(*words: str) -> list[str]:
    """The words that a git command prints; none where it fails."""
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.split()


def changed(base: str) -> list[Path]:
    """Files that differ from the common commit with BASE, new ones included."""
    common = (git("merge-base", base, "HEAD") or ["HEAD"])[0]
    return [Path(p) for p in git("diff", "--name-only", common) + git("ls-files", "--others", "--exclude-standard")]


def imported(path: Path) -> set[str]:
    """The modules that a test file names in its imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def tests_of(module: Path, tests: dict[Path, set[str]]) -> list[Path]:
    """Test files that import a module of src/ or papers/, those of its own name and folder first."""
    inside = module.relative_to("src") if module.parts[0] == "src" else module
    name = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
    users = [path for path, names in tests.items() if name in names]
    near = [(path.stem != f"test_{module.stem}", path.parent.name != module.parent.name, path) for path in users]
    return [path for *_, path in sorted(near)[:MOST]]


def main(base: str) -> None:
    """Print the test files."""
    tests = {
        path: imported(path)
        for path in [*sorted(Path("tests").rglob("test_*.py")), *sorted(Path("papers/tests").rglob("test_*.py"))]
    }
    chosen = {Path(rule) for rule in RULES}
    for path in changed(base):
        if path in tests:
            chosen.add(path)
        elif path.suffix == ".py" and path.parts[0] in ("src", "papers") and path.exists():
            chosen |= set(tests_of(path, tests))
    print("\n".join(sorted(map(str, chosen))))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "origin/main")
