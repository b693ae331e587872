"""Code of a user's own that registers losses, distances, methods, estimators, sources or encoders when it is imported.

It comes from files (``--import mymethod.py``, ``imports`` in a recipe), from modules by their names, or from installed
packages with an entry point in the group ``sfumato``. Nothing that a run folder holds is executed by itself.
"""

import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Collection, Iterable
from importlib.metadata import entry_points
from pathlib import Path

from sfumato.errors import UserError, first_line, say

HOW = "one of your own is made known by --import FILE"
"""The end of messages about an unknown name."""

_digests: dict[str, str] = {}
"""The name of the module of every file that was imported, by the digest of its content."""

_given: dict[str, None] = {}
"""What was imported with --import, in its order: absolute paths, or names of modules."""


_places: dict[tuple[str, str], str] = {}
"""The file that has registered a name, or a module without one, by (what it is, name)."""


def claim_name(what: str, name: str, known: Collection[str], owner: object) -> None:
    """Refuse a name that is none or taken; the module or file that took it may define it again, as in a notebook."""
    if not name.isidentifier():
        raise ValueError(f"register_{what}: {name!r} is not an identifier; use letters, digits and _")
    module = str(getattr(owner, "__module__", ""))
    place = str(getattr(sys.modules.get(module), "__file__", None) or module)  # Imported by its name or as a file.
    if name in known and _places.get((what, name)) != place:
        a = "an" if what[0] in "aeiou" else "a"
        raise ValueError(f"register_{what}: there is {a} {what} {name!r} already; known: {', '.join(known)}")
    _places[what, name] = place


def import_own(names: Iterable[str], folder: Path | None = None) -> None:
    """Import files (a path that ends with .py, relative to the folder) or modules, each once by its content."""
    load_plugins()
    for name in names:
        path = ((folder or Path()) / name).resolve() if name.endswith(".py") else None
        if path is not None and not path.is_file():
            raise UserError(f"cannot import {path}: there is no such file; name it as it is now: --import FILE")
        try:
            importlib.import_module(name) if path is None else _import_file(path)
        except (Exception, SystemExit) as error:  # Whatever a user's code raises.
            raise UserError(_failed(name, path, error)) from error


def _failed(name: str, path: Path | None, error: BaseException) -> str:
    """Where an import has failed, and why."""
    if path is None and isinstance(error, ModuleNotFoundError | TypeError):
        return f"cannot import the module {name!r} ({first_line(error)}); give a file's path, or install its package"
    if isinstance(error, SyntaxError) and (path is None or error.filename == str(path)):
        return f"{error.filename}:{error.lineno}: SyntaxError: {first_line(error)}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if path is None or Path(f.filename) == path]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {type(error).__name__}: {first_line(error)}"


def import_given(names: Iterable[str]) -> None:
    """Import what a command names, and remember it for :func:`given_imports`."""
    known = [str(Path(name).resolve()) if name.endswith(".py") else name for name in names]
    import_own(known)
    _given.update(dict.fromkeys(known))


def given_imports() -> tuple[str, ...]:
    """What this process has imported because a command named it."""
    return tuple(_given)


def _import_file(path: Path) -> None:
    """Execute a file, which may import modules beside it."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest in _digests:
        return
    name = f"sfumato_own_{path.stem}_{digest[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # Dataclasses look their module up.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    _digests[digest] = name


@functools.cache
def load_plugins() -> None:
    """Import the packages that have an entry point in the group ``sfumato``, once."""
    for entry in entry_points(group="sfumato"):
        try:
            entry.load()
        except Exception as error:
            say(f"{entry.value}, an entry point of an installed package, fails: {type(error).__name__}: {error}")
