"""Names of the package that documents mention exist, where they say that they are."""

import ast
import importlib
import re
from pathlib import Path

from support.raising import raises

import sfumato

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
CODE = re.compile(r"```(?:python|py)\n(.*?)```|`([^`\n]+)`", re.DOTALL)
DOTTED = re.compile(r"(?<![\w./~@-])sfumato((?:\.[A-Za-z_]\w*)+)(?![\w/-])")
FROM = re.compile(r"from (sfumato\b[\w.]*) import ([\w, ]+)")


def code_of(text):
    """The code of a page: its Python blocks and what stands between backticks."""
    return [block or inline for block, inline in CODE.findall(text)]


def names_of(text):
    """(module, name) of `from MODULE import NAME`, and (sfumato, dotted name) of `sfumato.DOTTED`."""
    found = [(module, name.strip()) for module, names in FROM.findall(text) for name in names.split(",")]
    return found + [("sfumato", name[1:]) for name in DOTTED.findall(text)]


def resolved(module, name):
    """What a dotted name is; an error if there is nothing."""
    if (whole := f"{module}.{name}").startswith("sfumato.adapters."):  # They import packages that may be absent.
        _, _, file, *names = whole.split(".")
        tree = ast.parse((ROOT / "src" / "sfumato" / "adapters" / f"{file}.py").read_text(encoding="utf-8"))
        return [{node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}[one] for one in names]
    thing = importlib.import_module(module)
    for part in name.split("."):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            thing = importlib.import_module(f"{thing.__name__}.{part}")
    return thing


def test_names_exist_and_classes_that_guides_name_are_exported():
    missing, n = [], 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        directives = {("sfumato", d.removeprefix("sfumato.")) for d in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)}
        named = {name for code in code_of(text) for name in names_of(code)} | directives - {("sfumato", "sfumato")}
        n += len(named)
        for module, name in named:
            try:
                if "mine" not in f"{module}.{name}".split("."):  # In CONTRIBUTING it is the name of a new part.
                    resolved(module, name)
            except (AttributeError, ImportError, KeyError, OSError) as error:
                missing.append(f"{page.name}: {error}")
    assert not missing and n > 50
    raises((AttributeError, ImportError), ".", resolved, "sfumato", "data.pears")
    defined = {
        node.name
        for path in (ROOT / "src" / "sfumato").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    wrong = []
    for page in (p for p in PAGES if p.parent.name in ("start", "guides")):
        text = page.read_text(encoding="utf-8")
        imported = {name.rpartition(".")[2] for _, name in names_of(text)}
        named = {word for _, inline in CODE.findall(text) for word in re.findall(r"\b[A-Z][A-Za-z]+[a-z]\w*\b", inline)}
        wrong += [f"{page.name}: {name}" for name in sorted((named & defined) - imported - set(sfumato.__all__))]
    assert not wrong
