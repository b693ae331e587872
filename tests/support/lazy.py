"""Packages that are imported when a test first uses them, so that collecting stays fast."""

import importlib.util

import pytest


class Lazy:
    """A module on its first use; the tests of the file are skipped where it is not installed."""

    def __init__(self, name: str, reason: str) -> None:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(reason, allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("_"):  # pytest looks at every name of a file.
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
