"""How many small errors the tests find, over mathematics, calibration, search, stores and service.

python scripts/mutants.py --out FILE [--n 200]    change one place at a time, run the tests that stand nearest to it

These are the test files that import the changed module, and those of its folder. A run goes on where it stopped. It
changes files below src/ and restores them: use a clone of its own.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from quick import imported

SOURCE = Path("src/sfumato")
GROUPS = {
    "mathematics": ["gaussian.py", "losses/contrastive.py", "matching.py", "distances", "losses", "metrics"],
    "calibration": ["calibration"],
    "search": ["search"],
    "stores": ["search/stores"],
    "service": ["serve"],
}
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
LIMIT_S = 300  # of one run of tests; a mutant that takes longer is found
MOST = 8  # test files of one mutant


def files_of(group: str) -> list[Path]:
    """Modules of a group; those of stores are not counted as search."""
    found = [
        p
        for name in GROUPS[group]
        for p in ([SOURCE / name] if name.endswith(".py") else (SOURCE / name).rglob("*.py"))
    ]
    return sorted(p for p in found if group != "search" or "stores" not in p.parts)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes whose change is an error of the computation: nothing below annotations, errors, decorators or defaults."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Raise, ast.Assert, ast.arguments, ast.JoinedStr)):
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value:
                yield node.value
                yield from statements(node.value)
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for inner in node.body:
                yield inner
                yield from statements(inner)
            continue
        yield node
        yield from statements(node)


def changes(path: Path) -> Iterator[tuple[int, int, str]]:
    """(start, end, new text) of every change of a module, as places in its bytes."""
    source = path.read_text(encoding="utf-8").encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, operator: ast.AST) -> Iterator[tuple[int, int, str]]:
        old, new = SWAPS.get(type(operator), ("", ""))
        at = source.find(old.encode(), place(left)[1], place(right)[0])
        if old and at >= 0:
            yield at, at + len(old), new

    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield place(node)[0], place(node.operand)[0], ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield *place(node), repr(not node.value if isinstance(node.value, bool) else node.value + 1)


def found_by(tests: list[Path]) -> bool:
    """Whether a test of these files fails, or they take too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *map(str, tests)]
    path = os.pathsep.join([str(SOURCE.parent.resolve()), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(LIMIT_S) != 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return True


def nearest(module: Path, tests: dict[Path, set[str]]) -> list[Path]:
    """Test files that import a module or stand in the folder of its tests, those of its own name first."""
    name = ".".join(module.relative_to("src").with_suffix("").parts).removesuffix(".__init__")
    own = f"test_{name.rpartition('.')[2]}"
    order = []
    for path, names in tests.items():
        imports, beside = name in names, path.parent.name == module.parent.name or path.stem == own
        if imports or beside:
            order.append((path.stem != own, not imports, not beside, path.stat().st_size, path))
    return [path for *_, path in sorted(order)[:MOST]]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tests = {path: imported(path) for path in sorted(Path("tests").rglob("test_*.py"))}
    done = set()
    if given.out.exists():
        done = {json.loads(line)["name"] for line in given.out.read_text().splitlines()}
    for group in GROUPS:
        pool = [(path, *change) for path in files_of(group) for change in changes(path)]
        for path, start, end, new in random.Random(given.seed).sample(pool, given.n // len(GROUPS)):
            source = path.read_bytes()
            line = source[:start].count(b"\n") + 1
            name = f"{path}:{line} [{start}:{end}] {source[start:end].decode()} -> {new}"
            if name in done:
                continue
            path.write_bytes(source[:start] + new.encode() + source[end:])
            try:
                state = "found" if found_by(nearest(path, tests)) else "missed"
            finally:
                path.write_bytes(source)
            with given.out.open("a") as file:
                file.write(json.dumps({"name": name, "group": group, "state": state}) + "\n")
            print(state, name, flush=True)


if __name__ == "__main__":
    main()
