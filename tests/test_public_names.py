"""The inventory of what users may import, and the promise that importing it costs nothing until it is used."""

import ast
import inspect
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import sfumato

SOURCE = Path(sfumato.__file__).parent


def test_neither_an_import_nor_a_mistake_loads_torch(tmp_path):
    (tmp_path / "manifest.json").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mistakes = ["search nowhere x", "serve nowhere", "delete nowhere x", "copy nowhere out"]
        mistakes.append(f"serve {tmp_path} --port {taken.getsockname()[1]}")
        code = f"""import sys
from sfumato.cli import main
for words in {mistakes}:
    sys.argv = ["sfumato", *words.split()]
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 2
sys.exit('torch' in sys.modules)"""
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stderr.count("nowhere holds no collection") == 4, ended.stderr
    assert "(Address already in use)" in ended.stderr


def test_names_are_documented_on_one_page_and_others_are_attribute_errors():
    tree = ast.parse((SOURCE / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    named = {alias.name: node.module for node in imports for alias in node.names}
    assert set(named) == set(sfumato.__all__)
    for name, module in named.items():
        value = getattr(sfumato, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.startswith(f"sfumato.{module}") and inspect.getdoc(value), name
    with pytest.raises(AttributeError, match="No sfumato attribute csd_matrx"):
        sfumato.csd_matrx
    pages = (Path(__file__).resolve().parents[1] / "docs" / "api").glob("*.md")
    lists = re.findall(r"members: \[(.*)\]", "\n".join(page.read_text() for page in pages))
    assert sorted(", ".join(lists).split(", ")) == sorted(sfumato.__all__)
