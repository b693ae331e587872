"""Every result of the site states its origin and stands once, nothing is fetched, and names are those of the code.
A recipe's header is what results.json, the tables and the experiment say; so is the list of the papers' rows."""

import ast
import importlib
import json
import re
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import results_table
import terminal_picture
from support.raising import raises

import sfumato
from papers import pages
from sfumato.models.recipe import find_recipe, load_recipe, recipe_files

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
RESULTS = [page for page in PAGES if page.startswith("results/") and not page.endswith("index.md")]
GUIDES = [page for page in PAGES if page.startswith("guides/") and not page.endswith("index.md")]
FIGURE = re.compile(r"(?<![\d.])\d{3}\.\d ± \d+\.\d")
read = lambda page: (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_pages_answer_their_question_once_fetch_nothing_are_wrapped_and_state_when_not_to_use_a_thing():
    assert re.search(r"^  font: false", CONFIG, flags=re.MULTILINE)
    assert "http" not in re.sub(r"#.*", "", CONFIG)
    wanted = (r"^\*\*Answer\.\*\* ", "```bash", r"\b[0-9a-f]{7,8}\b", r"\b20\d\d-\d\d-\d\d\b")
    for page in RESULTS:
        text = read(page)
        title = text.splitlines()[0].removeprefix("# ")
        assert title.endswith("?") and f"| [{title}]({Path(page).name}) |" in read("results/index.md"), page
        assert not [one for one in wanted if not re.search(one, text, flags=re.MULTILINE)], page
    pages = {page: read(page) for page in PAGES if not page.startswith("project/")}
    found = [(figure, page) for page, text in pages.items() for figure in set(FIGURE.findall(text))]
    places = {figure: [page for one, page in found if one == figure] for figure, _ in found}
    assert {figure: where for figure, where in places.items() if len(where) > 1} == {}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Results")[2].partition("\n## ")[0]
    parts = [line for line in section.splitlines() if "](" in line and line.startswith("|")]
    parts.append(section.partition("Variances do not")[2])
    assert len(parts) > 5
    again = "write it anew: python scripts/results_table.py"
    assert results_table.TABLE.read_text("utf-8") == results_table.table(), again
    for part in parts:
        [page] = re.findall(r"\]\(((?:docs/results|papers/docs)/[\w-]+\.md)\)", part)
        shown, text = re.findall(r"(?<![\w.])\d*\.\d+(?: ± \d*\.\d+)?", part), read(f"../{page}")
        assert shown and [one for one in shown if not re.search(rf"(?<![\d.]){re.escape(one)}(?!\d)", text)] == []
    assert not [page for page in GUIDES if not re.search(r"^## When not to", read(page), flags=re.MULTILINE)]
    unfenced = {page: "".join(read(page).split("\n```")[::2]) for page in PAGES}
    lines = [(page, line) for page, text in unfenced.items() for line in text.splitlines()]
    assert not [(page, line) for page, line in lines if len(line) > 120 and not line.startswith(("|", "    ", "!["))]


def test_the_table_of_results_has_the_numbers_and_the_origins_of_the_pages():
    rows = lambda page, text: [
        [row.get(name) for name in ("row", "value", "date", "seeds")] for row in results_table._of_page(page, text)
    ]
    head, line, half = "| x | y |", "| --- | --- |", "| r | .5 |"
    page = ["*2026-01-02, commit abcdef1.*", "## A", "*2026-01-03, seed 0.*", head, line, half, "## B", head, line]
    assert rows("p", [*page, "| s | 1/205 |"]) == [["r", ".5", "2026-01-03", "0"], ["s", "0.00488", "2026-01-02", ""]]
    runs = ["### A †", head, line, half, "## Runs", "| b | commit | date |", line, "| a † | 0d8+ | 2026-01-04 |"]
    assert rows("speed", runs)[0] == ["r", ".5", "2026-01-04", None]


NAMES_PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
CODE = re.compile(r"```(?:python|py)\n(.*?)```|`([^`\n]+)`", re.DOTALL)
DOTTED = re.compile(r"(?<![\w./~@-])sfumato((?:\.[A-Za-z_]\w*)+)(?![\w/-])")
FROM = re.compile(r"from (sfumato\b[\w.]*) import ([\w, ]+)")
code_of = lambda text: [block or inline for block, inline in CODE.findall(text)]


def names_of(text):
    """(module, name) of `from MODULE import NAME`, and (sfumato, dotted name) of `sfumato.DOTTED`."""
    found = [(module, name.strip()) for module, names in FROM.findall(text) for name in names.split(",")]
    return found + [("sfumato", name[1:]) for name in DOTTED.findall(text)]


def resolved(module, name):
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
    for page in NAMES_PAGES:
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
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src" / "sfumato").rglob("*.py")]
    classes = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    defined = {name for name in classes if not name.startswith("_")}
    wrong = []
    for page in (p for p in NAMES_PAGES if p.parent.name in ("start", "guides")):
        text = page.read_text(encoding="utf-8")
        imported = {name.rpartition(".")[2] for _, name in names_of(text)}
        named = {word for _, inline in CODE.findall(text) for word in re.findall(r"\b[A-Z][A-Za-z]+[a-z]\w*\b", inline)}
        wrong += [f"{page.name}: {name}" for name in sorted((named & defined) - imported - set(sfumato.__all__))]
    assert not wrong


@pytest.mark.slow
def test_the_picture_of_a_terminal_shows_what_is_printed_today(shared):
    shown = terminal_picture.words((ROOT / "docs" / "images" / "terminal.svg").read_text(encoding="utf-8"))
    printed = terminal_picture.session(shared / "data" / "tiny_coco" / "tiny_coco")
    assert shown == terminal_picture.words(terminal_picture.drawn(printed)) and "Nothing" in shown


def has(held, key):
    first, _, rest = key.partition(".")
    return first in held and (not rest or has(held[first], rest))


def test_keys_of_recipes_that_a_guide_names_exist():
    recipes = [sfumato.load_recipe(sfumato.find_recipe(name)).model_dump() for name in ("coco-pcme", "coco-pcmepp-b32")]
    keys = re.findall(r"`((?:data|model|loss|augment|optim|train)\.(?!py)[a-z_.]+)", read("guides/coming-from.md"))
    assert len(keys) > 40 and not [key for key in keys if not any(has(recipe, key) for recipe in recipes)]


RECORDED: dict[str, Any] = json.loads((ROOT / "recipes" / "results.json").read_text(encoding="utf-8"))["recipes"]
LISTED = re.findall(r"`([^`\n]+)`", (ROOT / "papers" / "README.md").read_text(encoding="utf-8"))


def wrapped(label: str, text: str) -> list[str]:
    """Comment lines of at most 120 characters; later ones are indented further than overrides are."""
    whole = f"{label} {text}".replace(" ± ", "\u00a0±\u00a0")
    indents = {"initial_indent": "# ", "subsequent_indent": "#         "}
    lines = textwrap.wrap(whole, 120, **indents, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\u00a0", " ") for line in lines]


def stated(result: dict[str, Any]) -> list[str]:
    run, paper = result["run"], result.get("published_cost")
    if run is None:
        cost = f"not measured; {paper}." if paper else "not measured."
        scores = "not run."
    else:
        minutes = f"{run['minutes']} minutes of training" if run["minutes"] else "minutes not recorded"
        cost = f"{minutes} on {run['machine']}."
        seeds = f"seed {run['seeds'][0]}" if len(run["seeds"]) == 1 else f"mean of {len(run['seeds'])} seeds"
        figures = ", ".join(f"{metric} {value}" for metric, value in run["metrics"].items())
        scores = f"{run['protocol']}, {seeds}, commit {run['commit']}: {figures} ({run['experiment']})."
    return ["#", f"# $ {result['command']}", "#", *wrapped("Cost:", cost), *wrapped("Scores:", scores)]


def test_headers_and_pages_state_what_the_results_file_and_the_tables_have(sfumato):
    assert sorted(RECORDED) == sorted(recipe_files())
    for name, result in RECORDED.items():
        lines = recipe_files()[name].read_text(encoding="utf-8").splitlines()
        header = list(takewhile(lambda line: line.startswith("#"), lines))
        expected = stated(result)
        assert header[1 : 1 + len(expected)] == expected, name
        assert all(len(line) <= 120 for line in header if not re.match(r"#   \S|# \$ ", line)), name
        run, (recipe, *overrides) = result["run"], result["command"].partition("train ")[2].split()
        assert recipe == name
        load_recipe(find_recipe(name), [*overrides, *(run["overrides"].split() if run else ())])
        if run:
            text = (ROOT / run["experiment"]).read_text(encoding="utf-8")
            for value in run["metrics"].values():
                assert re.search(rf"(?<![\d.]){re.escape(value)}(?!\d)", text), (run["experiment"], value)
            assert run["commit"] == "not recorded" or run["commit"] in text, run
    for code in LISTED:
        if code.startswith("sfumato ") and "--" in code:
            words = code.split()
            command = words[1:3] if words[1] == "evaluate" else words[1:2]
            known = sfumato(*command, "--help-all")[1]
            assert all(option in known for option in words if option.startswith("--")), code
    assert not [path.name for path, text in pages.written() if path.read_text(encoding="utf-8") != text]
