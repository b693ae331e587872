"""What all tests share: no network, few threads, and the folder of reference data where it exists."""

import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from sfumato import cli

# One thread for each of several test processes.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))

SHARED = Path(os.environ.get("SFUMATO_SHARED", Path(__file__).resolve().parents[2] / "shared"))


ENGINES_REQUIRED = bool(os.environ.get("SFUMATO_REQUIRE_ENGINES"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With SFUMATO_REQUIRE_ENGINES=1, a store or page test that is skipped for want of a server or browser fails."""
    report = yield
    expected = hasattr(report, "wasxfail")
    if ENGINES_REQUIRED and report.skipped and not expected and item.path.parent.name in ("search", "serve"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though SFUMATO_REQUIRE_ENGINES is set: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data; the test is skipped without it."""
    if not SHARED.is_dir():
        pytest.skip(f"no reference data at {SHARED}; set SFUMATO_SHARED to their folder")
    return SHARED


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's feature cache."""
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def sfumato(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; returns (exit status, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sfumato", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run
