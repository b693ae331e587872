"""How many small errors the tests find, over mathematics, calibration, search, stores and service. Needs `coverage`.

python scripts/mutants.py map --out FOLDER           which test file runs which line, and the coverage of branches
python scripts/mutants.py run --out FOLDER [--n 200] change one place at a time, run the test files that reach it

Both go on where they stopped. `run` changes files below src/ and restores them: use a clone of its own.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path("src/sfumato")
GROUPS = {
    "mathematics": ["gaussian.py", "inclusion.py", "matching.py", "distances", "losses", "metrics"],
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
LIMIT_S = 150  # of one run of tests; a mutant that takes longer is found


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


def pytest_run(tests: list[str], out: Path | None = None) -> int:
    """Exit status of test files; with a folder, their coverage goes into it."""
    start = [sys.executable, "-m", "coverage", "run", f"--rcfile={out / 'coverage.ini'}"] if out else [sys.executable]
    command = [*start, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
    if out:
        command.remove("-x")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(SOURCE.parent.resolve()), os.environ.get("PYTHONPATH", "")]),
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(None if out else LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return 1


def make_map(out: Path) -> None:
    """Run every test file alone under coverage; write which lines each runs and how long it takes."""
    import coverage

    out.mkdir(parents=True, exist_ok=True)
    for test in sorted(
        map(str, Path("tests").rglob("test_*.py")),
        key=lambda t: not any(f"/{g}/" in t for g in ("losses", "metrics", "calibration", "search", "serve")),
    ):
        written = out / (test.replace("/", "-") + ".json")
        if written.exists():
            continue
        data = out / (test.replace("/", "-") + ".coverage")
        (out / "coverage.ini").write_text(
            f"[run]\nbranch = true\nsource_pkgs = sfumato\nparallel = true\npatch = subprocess\ndata_file = {data}\n"
        )
        start = time.monotonic()
        status = pytest_run([test], out)
        seconds = time.monotonic() - start
        measured = coverage.Coverage(data_file=str(data), config_file=str(out / "coverage.ini"))
        measured.combine([str(out)], keep=False)
        measured.save()
        lines = {
            str(Path(f).relative_to(Path.cwd())): sorted(measured.get_data().lines(f) or [])
            for f in measured.get_data().measured_files()
        }
        written.write_text(json.dumps({"test": test, "seconds": seconds, "status": status, "lines": lines}))
        print(f"{seconds:6.1f} s  {status}  {test}", flush=True)


def run(out: Path, n: int, seed: int) -> None:
    """Sample n changes, the same number from each group, and write whether the tests find each."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("tests-*.json"))]
    reached = [
        (x["test"], x["seconds"], {f: set(lines) for f, lines in x["lines"].items()}) for x in found if x["status"] == 0
    ]
    results = out / "mutants.jsonl"
    done = {json.loads(line)["name"] for line in results.read_text().splitlines()} if results.exists() else set()
    for group in GROUPS:
        pool = [(path, *change) for path in files_of(group) for change in changes(path)]
        for path, start, end, new in random.Random(seed).sample(pool, n // len(GROUPS)):
            source = path.read_bytes()
            line = source[:start].count(b"\n") + 1
            name = f"{path}:{line} [{start}:{end}] {source[start:end].decode()} -> {new}"
            if name in done:
                continue
            tests = sorted((s, t) for t, s, lines in reached if line in lines.get(str(path), ()))
            path.write_bytes(source[:start] + new.encode() + source[end:])
            try:
                status = pytest_run([t for _, t in tests[:8]]) if tests else 0
            finally:
                path.write_bytes(source)
            state = "found" if status else ("missed" if tests else "not reached")
            with results.open("a") as file:
                file.write(json.dumps({"name": name, "group": group, "state": state}) + "\n")
            print(state, name, flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["map", "run"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what == "map":
        make_map(given.out.resolve())
    else:
        run(given.out.resolve(), given.n, given.seed)


if __name__ == "__main__":
    main()
