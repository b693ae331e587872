"""What macOS and Windows lack is not used, or only where the program asks first. Linux alone runs the tests."""

import ast
from pathlib import Path

import sfumato

SOURCE = Path(sfumato.__file__).parent

# Modules and functions that are not everywhere; the value names the files that ask before they use one.
MODULES = {"fcntl": "", "pwd": "", "grp": "", "pty": "", "termios": "", "resource": "serve/decoding.py"}
FUNCTIONS = {
    "os.fork": "", "os.rename": "", "os.getuid": "", "os.mkfifo": "", "os.link": "", "os.symlink": "", "os.killpg": "",
    "os.sendfile": "", "signal.SIGALRM": "", "signal.SIGKILL": "", "signal.SIGHUP": "", "signal.alarm": "",
    "os.nice": "serve/decoding.py",
    "os.posix_fallocate": "", "os.sched_getaffinity": "files.py",
    "os.getloadavg": "cli/__init__.py",
}  # fmt: skip


def uses(tree):
    """The modules that a program imports, and the attributes of modules that it names."""
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


def test_what_is_not_everywhere_is_not_used_unasked_and_texts_have_an_encoding():
    found = []
    for path in SOURCE.rglob("*.py"):
        text, place = path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix()
        tree, allowed = ast.parse(text), MODULES | FUNCTIONS
        found += [f"{place}: {name}" for name in set(uses(tree)) if place not in allowed.get(name, place).split()]
        if "def open(" not in text:  # A store has a function of this name, which opens a URL.
            found += [f"{place}:{line}" for line in without_encoding(tree)]
    assert not found, "guard it and say so here, or name the encoding"
    for name in ("errors.py", "files.py", "data/image_decoding.py"):
        tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
        assert "resource" not in {n for node in tree.body for n in uses(ast.Module([node], []))}, name


def test_the_rules_find_what_breaks_them():
    tree = ast.parse("import os, fcntl\nos.rename(a, b)\nfrom os import fork\np.read_text()\nopen(path)\nopen(p, 'rb')")
    assert {"fcntl", "os.rename", "os.fork"} <= set(uses(tree))
    assert list(without_encoding(tree)) == [4, 5]
