"""Which module may import which, and what macOS and Windows lack is not used unasked: Linux alone runs the tests."""

import ast
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
NEVER = {"serve": {"training", "reports", "demo", "cli"}, "search": {"models"}}
NEVER |= {"evaluation": {"training"}, "models": {"training"}}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in SOURCE.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
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


def test_arrows_go_one_way():
    part_of = lambda name: name.split(".")[0]
    imports = {name: imports_of(path) - {name} for name, path in MODULES.items()}
    found = {name: set(uses(ast.parse(path.read_text()))) for name, path in MODULES.items()}
    assert not {name for name, modules in found.items() if {"papers", "tests"} & {m.split(".")[0] for m in modules}}
    assert "sfumato.errors" in found["cli"]
    assert {part_of(name) for name in MODULES} == {*ORDER}, "a part without a place in ORDER, or the reverse"
    place = {part: k for k, part in enumerate(ORDER)}
    every = ((name, other) for name, imported in imports.items() for other in imported - {"__init__"})
    assert not [(name, other) for name, other in every if place[part_of(other)] > place[part_of(name)]]
    left = dict(imports)
    while ready := [name for name, imported in left.items() if not imported & set(left)]:
        for name in ready:
            del left[name]
    assert not left, f"a cycle among {sorted(left)}"
    for start, ends in NEVER.items():
        reached = {name for name in MODULES if part_of(name) == start}
        while more := {other for name in reached for other in imports[name]} - reached:
            reached |= more
        assert not ends & set(map(part_of, reached)), start


# Modules and functions that are not everywhere; the value names the files that ask before they use one.
PORTABILITY_MODULES = {"fcntl": "", "pwd": "", "grp": "", "pty": "", "termios": "", "resource": "serve/decoding.py"}
ABSENT = "fork", "rename", "getuid", "mkfifo", "link", "symlink", "killpg", "sendfile", "posix_fallocate"
FUNCTIONS = {f"os.{name}": "" for name in ABSENT}
FUNCTIONS |= {f"signal.{name}": "" for name in ("SIGALRM", "SIGKILL", "SIGHUP", "alarm")}
FUNCTIONS |= {"os.nice": "serve/decoding.py", "os.sched_getaffinity": "files.py", "os.getloadavg": "cli/__init__.py"}


def uses(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def without_encoding(tree):
    """Lines that read or write text in the encoding of the system, which differs between systems."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        reads = name in ("read_text", "write_text") and "utf-8" not in modes
        if reads or (name == "open" and isinstance(node.func, ast.Name) and not modes):
            yield node.lineno


def test_what_is_not_everywhere_is_not_used_unasked_texts_have_an_encoding_and_rules_find_what_breaks_them():
    found = []
    for path in SOURCE.rglob("*.py"):
        text, place = path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix()
        tree, allowed = ast.parse(text), PORTABILITY_MODULES | FUNCTIONS
        found += [f"{place}: {name}" for name in set(uses(tree)) if place not in allowed.get(name, place).split()]
        if "def open(" not in text:  # A store has a function of this name, which opens a URL.
            found += [f"{place}:{line}" for line in without_encoding(tree)]
    assert not found, "guard it and say so here, or name the encoding"
    for name in ("errors.py", "files.py", "data/image_decoding.py"):
        tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
        assert "resource" not in {n for node in tree.body for n in uses(ast.Module([node], []))}, name
    tree = ast.parse("import os, fcntl\nos.rename(a, b)\nfrom os import fork\np.read_text()\nopen(path)\nopen(p, 'rb')")
    assert {"fcntl", "os.rename", "os.fork"} <= set(uses(tree))
    assert list(without_encoding(tree)) == [4, 5]
