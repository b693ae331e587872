"""An extension of griffe for the documentation site: it turns what our docstrings write into what the site can render.

Sphinx roles become code, linked where the site documents the name; ``Example:`` becomes a section of examples; an
argument line for several names (``a, b: text``) becomes one line for each name, so that every name is checked against
the signature. Names that a package only re-exports are documented once, where they are defined.
"""

import re

from griffe import Alias, Extension, GriffeLoader, Module, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc|obj):`(~?)([^`]+)`")
_EXAMPLE = re.compile(r"^Example:$", flags=re.MULTILINE)
_SEVERAL = re.compile(r"^    (\*?\w+(?:, \*?\w+)+): ((?:.*)(?:\n {5,}.*)*)", flags=re.MULTILINE)


def _as_code(match: re.Match[str]) -> str:
    shortened, name = match.groups()
    shown = name.rsplit(".", 1)[-1] if shortened else name
    if not name.startswith("sfumato."):
        return f"`{shown}`"
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'


def _one_line_each(match: re.Match[str]) -> str:
    names, text = match.groups()
    return "\n".join(f"    {name}: {text}" for name in names.split(", "))


class Roles(Extension):
    """Rewrites every docstring of the package once it is loaded."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader) -> None:
        """Walk the package.

        Args:
            pkg: the package that was loaded.
            loader: the loader that loaded it; not used.
        """
        self._rewrite(pkg)

    def _rewrite(self, thing: Object | Alias) -> None:
        if thing.is_alias:
            return
        if isinstance(thing, Module):
            thing.exports = None
        if thing.docstring:
            text = _EXAMPLE.sub("Examples:", thing.docstring.value)
            text = _SEVERAL.sub(_one_line_each, text)
            thing.docstring.value = _ROLE.sub(_as_code, text)
        for member in thing.members.values():
            self._rewrite(member)
