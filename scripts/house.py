"""Figures of the package's layout, the budget of tests/test_budget.py, and the rules of tests/test_house_rules.py.

python scripts/house.py [FOLDER]        the size of the house, and of FOLDER its lines, longest functions and the like
python scripts/house.py --budget        lines by folder, as the table of tests/test_budget.py
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A function or class with where it stands.

    Attributes:
        path: of the module.
        name: with the class before a method.
        node: its syntax tree.
        public: whether neither it nor its class begins with an underscore; False for a signature by `@overload`.
    """

    path: Path
    name: str
    node: Function | ast.ClassDef
    public: bool

    @property
    def place(self) -> str:
        return f"{self.path}:{self.node.lineno} {self.name}"

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""


def definitions(folder: Path) -> Iterator[Definition]:
    """Every function and class of the modules below a folder, methods included, nested functions not."""
    for path in sorted(folder.rglob("*.py")):
        yield from _below(path, ast.parse(path.read_text(encoding="utf-8")), "", True)


def _below(path: Path, tree: ast.Module | ast.ClassDef, owner: str, public: bool) -> Iterator[Definition]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # The signatures of a function with several stand before it, which has the docstring.
            signature = any(ast.unparse(d) == "overload" for d in node.decorator_list)
            known = public and not node.name.startswith("_") and not signature
            yield Definition(path, f"{owner}{node.name}", node, known)
            if isinstance(node, ast.ClassDef):
                yield from _below(path, node, f"{node.name}.", known)


def code_lines(node: ast.AST) -> int:
    """Lines of a definition without its docstring."""
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    doc = node.body[0].end_lineno or 0
    own = (node.end_lineno or 0) - node.lineno + 1
    return own - (doc - node.body[0].lineno + 1) if ast.get_docstring(node) else own


def parameters(node: Function) -> list[str]:
    """Names of the parameters but self and cls."""
    given = node.args
    every = [*given.posonlyargs, *given.args, *([given.vararg] if given.vararg else []), *given.kwonlyargs]
    return [argument.arg for argument in every if argument.arg not in ("self", "cls")]


def missing_parts(definition: Definition) -> list[str]:
    """What the docstring of a public name lacks: a summary, Args, Attributes, Returns or Raises."""
    node, doc = definition.node, definition.doc
    if not doc:
        return ["docstring"]
    if isinstance(node, ast.ClassDef):
        fields = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        is_dataclass = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        public = [name for name in fields if not name.startswith("_")]
        return ["Attributes"] if is_dataclass and public and not re.search("(Attributes|Args):", doc) else []
    if re.search(r"[Ss]ee :(class|func|meth)", doc):
        return []
    missing = []
    is_property = any(ast.unparse(d).endswith("property") for d in node.decorator_list)
    shown = [name for name in parameters(node) if not name.startswith("_")]
    if shown and not is_property:
        _, _, described = doc.partition("Args:")
        missing += [f"Args: {name}" for name in shown if not re.search(rf"\b{name}\b", described)]
    returns = ast.unparse(node.returns) if node.returns else "None"
    if returns not in ("None", "NoReturn", "Self") and not is_property and not re.search("(Returns|Yields):", doc):
        missing.append("Returns")
    raises = any(isinstance(inner, ast.Raise) and inner.exc is not None for inner in ast.walk(node))
    if raises and not is_property and "Raises:" not in doc:
        missing.append("Raises")
    return missing


def count(path: Path) -> tuple[int, int]:
    """Lines that hold code, without blank lines, comments and docstrings; and lines of docstrings."""
    source = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in quiet:
            held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - documented), len(documented)


def budget(root: Path) -> dict[str, int]:
    """Lines of code by folder of the package, of papers and of benchmarks; lines of tests; words of docs."""
    package, papers = root / "src" / "sfumato", root / "papers"
    found: dict[str, int] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        place = f"src/sfumato/{inside[0]}" if len(inside) > 1 else "src/sfumato"
        found[place] = found.get(place, 0) + count(path)[0]
    papers_tests = papers / "tests"
    own = [path for path in sorted(papers.rglob("*.py")) if papers_tests not in path.parents]
    found["papers"] = sum(count(path)[0] for path in own)
    found["papers/tests, lines"] = _lines(papers_tests)
    found["benchmarks"] = sum(count(path)[0] for path in sorted((root / "benchmarks").rglob("*.py")))
    found["tests, lines"] = _lines(root / "tests")
    found["docs, words"] = _words(*(root / "docs").rglob("*.md"))
    found["papers, words"] = _words(*papers.rglob("*.md"))
    found["CHANGELOG.md, words"] = _words(root / "CHANGELOG.md")
    return found


def _lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def _words(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def size(root: Path) -> list[tuple[str, int, int]]:
    """What the house is measured by, its number now, and the number to reach."""
    held, surface = budget(root), _surface()
    package = sorted((root / "src" / "sfumato").rglob("*.py"))
    long = sum(len(path.read_text(encoding="utf-8").splitlines()) > 450 for path in package)
    return [
        ("modules in src", len(package), 150),
        ("lines of code in src", sum(n for place, n in held.items() if place.startswith("src/")), 28_000),
        ("files above 450 lines", long, 0),
        ("lines of tests of the package", held["tests, lines"], 27_000),
        ("lines of code in papers", held["papers"], 9_000),
        ("lines of tests of papers", held["papers/tests, lines"], 6_500),
        ("lines of code in benchmarks", held["benchmarks"], 6_000),
        ("words of docs", held["docs, words"], 50_000),
        ("words of docs of papers", held["papers, words"], 32_000),
        ("words of the changelog", held["CHANGELOG.md, words"], 1_500),
        ("commands", surface["commands"], 17),
        ("flags, rare ones too", surface["flags"], 130),
        ("routes", surface["routes"], 14),
        ("recipe keys", surface["keys"], 220),
        ("exports", surface["exports"], 75),
    ]


def _surface() -> dict[str, int]:
    """Numbers of commands, the options of all their verbs, the service's routes, the recipe's keys and exported names.

    Rare options count, --import does not. Keys count once for each kind of encoder, loss and source that has them.
    """
    import typer.main

    import sfumato
    from sfumato.cli import app

    def verbs(command: Any) -> list[Any]:
        inner = getattr(command, "commands", {}).values()
        return [verb for one in inner for verb in verbs(one)] or [command]

    program: Any = typer.main.get_command(app)
    found = verbs(program)
    options = [{*p.opts} for verb in found for p in verb.params if any(o.startswith("--") for o in p.opts)]
    served = (Path(sfumato.__file__).parent / "serve" / "app.py").read_text(encoding="utf-8")
    return {
        "commands": len(program.commands),
        "flags": sum(not names & {"--help", "--help-all", "--import"} for names in options),
        "routes": len(re.findall(r'@\w+(?:\.\w+)?\(\s*"/', served)),
        "keys": _recipe_keys(),
        "exports": len(dir(sfumato)),
    }


def _recipe_keys() -> int:
    from pydantic import BaseModel

    from sfumato.data.sources import SOURCES
    from sfumato.encoders.registry import ENCODERS
    from sfumato.losses import LOSSES
    from sfumato.models.recipe import Recipe

    def sections(kind: Any) -> list[type[BaseModel]]:
        own = [kind] if isinstance(kind, type) and issubclass(kind, BaseModel) else []
        return own or [section for inner in get_args(kind) for section in sections(inner)]

    def keys(model: type[BaseModel]) -> int:
        return sum(sum(map(keys, sections(field.annotation))) or 1 for field in model.model_fields.values())

    encoders = sum(keys(entry.config) for kinds in ENCODERS.values() for entry in kinds.values())
    losses = sum(len(fields(loss.Options)) for loss in LOSSES.values())
    own = keys(Recipe) - len(ENCODERS)  # The sections of encoders count by kind.
    return own + encoders + losses + sum(keys(source.options) for source in SOURCES.values() if source.options)


def main(folder: Path) -> None:
    """Print the figures."""
    paths, found = sorted(folder.rglob("*.py")), list(definitions(folder))
    functions = [d for d in found if not isinstance(d.node, ast.ClassDef)]
    public = [d for d in found if d.public]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    code, docs = (sum(n) for n in zip(*map(count, paths), strict=True))
    print(f"modules            {len(paths)}, of them {sum(p.name == '__init__.py' for p in paths)} __init__.py")
    print(f"lines              {lines:,}, of code {code:,}, of docstrings {docs:,}")
    print(f"complete docs      {sum(not missing_parts(d) for d in public)} of {len(public)} public names")
    sizes = sorted(((code_lines(d.node), d) for d in functions), key=lambda pair: -pair[0])
    print(f"functions > 60     {sum(n > 60 for n, _ in sizes)}; longest:")
    for n, definition in sizes[:5]:
        print(f"    {n:4} {definition.place}")
    counts = sorted(((len(parameters(d.node)), d) for d in functions), key=lambda pair: -pair[0])  # type: ignore[arg-type]
    print(f"parameters > 12    {sum(n > 12 for n, _ in counts)}; most:")
    for n, definition in counts[:5]:
        print(f"    {n:4} {definition.place}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--budget"]:
        print("".join(f'    "{place}": {number:_},\n' for place, number in budget(Path()).items()), end="")
    else:
        for what, number, goal in size(Path()):
            print(f"{what:<30} {number:>7,}   to reach {goal:>7,}")
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "src/sfumato"))
