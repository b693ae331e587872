"""The recipes that come with the package."""

import difflib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from sfumato.errors import UserError


def recipe_files() -> dict[str, Traversable]:
    """name -> file of every recipe in the package (or, in a checkout, in its recipes folder), by name."""
    packaged = resources.files("sfumato") / "recipe_files"
    folder: Traversable = packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "recipes"
    return {
        f.name.removesuffix(".toml"): f
        for f in sorted(folder.iterdir(), key=lambda f: f.name)
        if f.name.endswith(".toml")
    }


def find_recipe(name: str) -> Path:
    """The path of a recipe given as a path or as the name of one that comes with the package.

    Raises:
        UserError: there is neither such a file nor such a name.
    """
    if Path(name).is_file():
        return Path(name)
    known = recipe_files()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`sfumato recipes` lists them"
        raise UserError(f"no recipe {name!r}: neither a file nor one that comes with the package; {hint}")
    return Path(str(known[name]))


def recipe_summary(file: Traversable) -> str:
    """The first comment line of a recipe: what it is."""
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").strip()
