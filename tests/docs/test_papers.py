"""The page of the papers names recipes, keys, options and tables that exist."""

import re
from pathlib import Path

import pytest

from sfumato.evaluation.published import published_rows
from sfumato.models.recipe import find_recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts" / "papers.md").read_text(encoding="utf-8")
RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
CODE = re.findall(r"`([^`\n]+)`", PAGE)
NAMED = [code.split() for code in CODE if re.match(r"(sfumato ablate )?(coco|cub|flickr8k|pretrain)-", code)]


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_every_recipe_loads_with_its_overrides(words):
    name, *overrides = words[2:] if words[0] == "sfumato" else words
    assert name in RECIPES
    open_ones = [key for key in overrides if key.endswith("=...")]
    recipe = load_recipe(find_recipe(name), [key for key in overrides if key not in open_ones])
    for key in open_ones:
        place = recipe
        for part in key.removesuffix("=...").split("."):
            place = getattr(place, part)


def test_every_option_is_one_of_its_command(sfumato):
    for code in CODE:
        if code.startswith("sfumato ") and "--" in code:
            words = code.split()
            command = words[1:3] if words[1] == "evaluate" else words[1:2]
            known = sfumato(*command, "--help")[1]
            assert all(option in known for option in words if option.startswith("--")), code


def test_every_published_table_named_exists():
    named = re.findall(r'--published-tables "([^"]+)"', PAGE)
    assert named and all(published_rows(table=table) for table in named)
