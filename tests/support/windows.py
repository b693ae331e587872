"""Windows on Linux: what this process has open or mapped is neither replaced, moved nor removed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def unless_open(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*paths: str | Path, dir_fd: int | None = None, **options: Any) -> Any:
        opened = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
        opened |= {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text("utf-8").splitlines()}
        above = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        for path in (os.path.realpath(os.path.join(above, path)) for path in paths):
            if any(one == path or one.startswith(f"{path}/") for one in opened):
                raise PermissionError(13, "used by a process", path)
        return function(*paths, **options) if dir_fd is None else function(*paths, dir_fd=dir_fd, **options)

    return call


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs the list of open files of Linux")
    monkeypatch.setattr("sfumato.files.IN_USE", (PermissionError,))
    for name in ("replace", "rename", "unlink", "remove"):
        monkeypatch.setattr(os, name, unless_open(getattr(os, name)))
