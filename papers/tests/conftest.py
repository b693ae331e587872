"""What all tests share, and the command `python -m papers`."""

import pytest
from support.fixtures import *  # noqa: F403
from support.fixtures import Command, _apart_from_the_user  # noqa: F401

from papers.commands import main


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys, "papers", main)
