"""Which module may import which: part by part, and inside each folder module by module. The arrows go one way."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import sfumato

SOURCE = Path(sfumato.__file__).parent

# The parts of the house in order: a part (a top-level module or a folder) may import the parts above it in this list.
ORDER = [
    "__init__", "errors", "files", "ids", "imports", "charts", "arrays", "gaussian", "distances",
    "matching", "metrics", "losses", "calibration", "data", "encoders", "search", "evaluation",
    "models", "training", "workflows", "reports", "adapters", "demo", "serve", "cli", "__main__",
]  # fmt: skip

# What must not be reached, through whatever lies between.
NEVER = {
    "serve": {"training", "reports", "demo", "cli"}, "evaluation": {"training"}, "models": {"training"},
    "search": {"models"},
}  # fmt: skip


def name_of(path: Path) -> str:
    """The dotted name below sfumato; a folder's __init__ is the folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in SOURCE.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """The modules of sfumato that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for inside in (name.removeprefix("sfumato.") for name in names if name.startswith("sfumato.")):
            if inside == "__version__":
                continue
            known = inside if inside in MODULES else inside.rpartition(".")[0]
            assert known in MODULES, f"{path}:{node.lineno}: there is no module sfumato.{inside}"
            found.add(known)
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    """By module the modules that it imports."""
    return {name: imports_of(path) - {name} for name, path in MODULES.items()}


def named_modules(path: Path) -> Iterator[str]:
    """Modules that a file imports, those of other packages too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def part_of(name: str) -> str:
    return name.split(".")[0]


def reached_from(part: str) -> set[str]:
    """The modules of a part and all that they import, directly or through others."""
    reached = {name for name in MODULES if part_of(name) == part}
    while more := {other for name in reached for other in imports()[name]} - reached:
        reached |= more
    return reached


def test_arrows_go_one_way():
    found = {name: list(named_modules(path)) for name, path in MODULES.items()}
    assert not {name for name, modules in found.items() if {"papers", "tests"} & {m.split(".")[0] for m in modules}}
    assert "sfumato.errors" in found["cli"]
    assert {part_of(name) for name in MODULES} == {*ORDER}, "a part without a place in ORDER, or the reverse"
    place = {part: k for k, part in enumerate(ORDER)}
    every = ((name, other) for name, imported in imports().items() for other in imported - {"__init__"})
    assert not [(name, other) for name, other in every if place[part_of(other)] > place[part_of(name)]]
    left = dict(imports())
    while ready := [name for name, imported in left.items() if not imported & set(left)]:
        for name in ready:
            del left[name]
    assert not left, f"a cycle among {sorted(left)}"
    for start, ends in NEVER.items():
        assert not {name for name in reached_from(start) if part_of(name) in ends}, start
