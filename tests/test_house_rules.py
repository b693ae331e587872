"""The rules of the house that a program can check: short functions, few parameters, complete docstrings."""

import ast
from collections import Counter
from pathlib import Path

import house

ROOT = Path(__file__).resolve().parents[1]


def test_functions_are_short_documented_and_named_once():
    package = ROOT / "src" / "sfumato"
    found = list(house.definitions(package))
    functions = [d for d in found if not isinstance(d.node, ast.ClassDef)]
    assert not [f"{d.place}: {n}" for d in functions if (n := house.code_lines(d.node)) > 60]
    outside = [d for d in functions if "cli" not in d.path.parts]
    assert not [f"{d.place}: {n}" for d in outside if (n := len(house.parameters(d.node))) > 12]
    assert not [d.place for d in functions if d.public and d.node.args.kwarg is not None]
    tree = ast.parse((package / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {(node.module.replace(".", "/"), alias.name) for node in imports for alias in node.names}
    module = lambda d: d.path.relative_to(package).with_suffix("").as_posix().removesuffix("/__init__")
    documented = [d for d in found if d.public and (module(d), d.name.split(".")[0]) in names]
    assert len(documented) > 150
    assert not [f"{d.place}: {missing}" for d in documented if (missing := house.missing_parts(d))]
    twice = []
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        targets = [ast.unparse(one) for node in assigned for one in getattr(node, "targets", None) or [node.target]]
        names = Counter(name for target in targets for name in target.strip("()").split(", "))
        twice += [f"{path.name}: {name}" for name, count in names.items() if count > 1]
    assert not twice


def unfolded_phrases(tree):
    """Lines that look for several words in what a command printed, where a line may end between them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            where = node.comparators[0]
            printed = getattr(where, "id", getattr(where, "attr", "")) == "out"
            if printed and any(isinstance(x, ast.Constant) and " " in str(x.value) for x in ast.walk(node.left)):
                yield node.lineno


def test_phrases_are_looked_for_in_folded_text():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not list(unfolded_phrases(ast.parse(path.read_text(encoding="utf-8")))), path
    bad = ast.parse("assert 'two words' in out and f'{x} a' not in done.out and 'word' in out and 'a b' in folded(out)")
    assert list(unfolded_phrases(bad)) == [1, 1]
