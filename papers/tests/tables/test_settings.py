"""The recipes of the papers' own data have the settings that the papers print, e.g. table B.1 of PCME++."""

import functools

import pytest

from papers.tables.items import read_toml
from sfumato.models.recipe import find_recipe, load_recipe

CASES = [(recipe, of) for of in read_toml("settings.toml")["of"] for recipe in of["recipes"]]


@pytest.mark.parametrize(("name", "of"), CASES, ids=[name for name, _ in CASES])
def test_a_recipe_has_the_printed_settings(name, of, shared):
    recipe = load_recipe(find_recipe(name))
    own = {key: functools.reduce(getattr, key.split("."), recipe) for key, _, _ in of["settings"]}
    assert own == {key: tuple(value) if isinstance(value, list) else value for key, value, _ in of["settings"]}
    (paper,) = (shared / "papers").glob(f"{of['paper']}_*.txt")
    text = " ".join(paper.read_text(encoding="utf-8").split())
    assert [words for _, _, words in of["settings"] if words not in text] == []


def test_as_many_settings_are_compared_as_the_list_of_rows_says():
    counts = {name: 0 for name, _ in CASES}
    for name, of in CASES:
        counts[name] += len({key for key, _, _ in of["settings"]})
    assert [counts[f"coco-pcmepp-{size}"] for size in ("b32", "b16", "l14")] == [31] * 3
    assert counts["pretrain-pcmepp-b16"] == 18
