"""What all tests share, the command `python -m papers`, and pictures with captions."""

from pathlib import Path

import pytest
from support.fixtures import *  # noqa: F403
from support.fixtures import Command, _apart_from_the_user  # noqa: F401

from papers.commands import main
from papers.tests.tables.tiny_figures import make_pictures


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys, "papers", main)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures"))
