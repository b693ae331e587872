"""A recipe's header is what results.json, the tables and the experiment say; so is the list of the papers' rows."""

import json
import re
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import Any

from papers import pages
from sfumato.models.recipe import find_recipe, load_recipe, recipe_files

ROOT = Path(__file__).resolve().parents[2]
RESULTS: dict[str, Any] = json.loads((ROOT / "recipes" / "results.json").read_text(encoding="utf-8"))["recipes"]
PAGE = (ROOT / "papers" / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", PAGE)


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
    assert sorted(RESULTS) == sorted(recipe_files())
    for name, result in RESULTS.items():
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
    for code in CODE:
        if code.startswith("sfumato ") and "--" in code:
            words = code.split()
            command = words[1:3] if words[1] == "evaluate" else words[1:2]
            known = sfumato(*command, "--help-all")[1]
            assert all(option in known for option in words if option.startswith("--")), code
    assert not [path.name for path, text in pages.written() if path.read_text(encoding="utf-8") != text]
