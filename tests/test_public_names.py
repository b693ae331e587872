"""The inventory of what users may import, and the promise that importing it costs nothing until it is used."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import sfumato

SOURCE = Path(sfumato.__file__).parent


def test_every_public_name_exists_and_is_documented():
    for name in sfumato.__all__:
        value = getattr(sfumato, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_what_the_type_checker_sees_is_what_is_there():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(sfumato.__all__) == {*sfumato._HOME_OF, "__version__"}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'csd_matrx'"):
        sfumato.csd_matrx


def test_import_does_not_load_torch():
    code = "import sys, sfumato, sfumato.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
