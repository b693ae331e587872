"""What the tests of the package and of papers share: no network, few threads, and the folder of reference data."""

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread for each of several test processes, and for the programs that they start: set before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from sfumato import cli
from support.windows import windows  # noqa: F401  A fixture.

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))
SHARED = Path(os.environ.get("SFUMATO_SHARED", Path(__file__).resolve().parents[3] / "shared"))
ENGINES_REQUIRED = bool(os.environ.get("SFUMATO_REQUIRE_ENGINES"))


# Files of few tests that take long: taken first by several processes (`make test`), so that all end at about one time.
LONG = (
    "search/test_milvus.py", "training/test_published_recipes.py", "serve/test_page.py", "search/test_stores.py",
    "serve/test_service.py", "metrics/test_parity_metrics.py", "training/test_distributed.py", "test_readme.py",
    "test_demo.py", "reports/test_report.py", "docs/test_demo_page.py", "workflows/test_index.py",
    "workflows/test_own_folder.py", "training/test_loop.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then files of many tests."""
    tests, n_tests = Path(__file__).parents[1], Counter(item.path for item in items)
    places = {tests / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: (places.get(item.path, len(LONG)), -n_tests[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there when the tests are collected stays until the end, so that no search for garbage looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With SFUMATO_REQUIRE_ENGINES=1, a store or page test that is skipped for want of a server or browser fails."""
    report = yield
    expected = hasattr(report, "wasxfail") or "make clients" in str(report.longrepr)  # Generators are no engines.
    if ENGINES_REQUIRED and report.skipped and not expected and item.path.parent.name in ("search", "serve"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though SFUMATO_REQUIRE_ENGINES is set: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"no reference data at {SHARED}; set SFUMATO_SHARED to their folder")
    return SHARED


@pytest.fixture(autouse=True, scope="session")
def _apart_from_the_user(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """No test reads or fills the user's feature cache, or waits for the disk: none cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFUMATO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sfumato.models.recipe import load_recipe
    from sfumato.training.loop import fit
    from support.toy import make_toy

    recipe = make_toy(tmp_path_factory.mktemp("toy"))
    fit(load_recipe(recipe, ["train.epochs=2"]), recipe.parent / "run")
    return recipe.parent


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A manifest of photographs, and the folder of a model of transformers that matches them; to be read, or copied."""
    from support.tiny_models import taught_clip, two_colours

    folder = tmp_path_factory.mktemp("taught")
    manifest = two_colours(folder)
    return manifest, taught_clip(folder / "model", manifest)


class Command:
    """Runs a command in this process; returns (exit status, standard output, standard error)."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        program: str = "sfumato",
        main: Callable[[], None] = cli.main,
    ) -> None:
        self._monkeypatch, self._capsys, self._program, self._main = monkeypatch, capsys, program, main

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", [self._program, *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            self._main()
        captured = self._capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    def printed(self, *arguments: object) -> str:
        status, out, err = self(*arguments)
        assert status == 0, err
        return out

    def json(self, *arguments: object) -> Any:
        return json.loads(self.printed(*arguments, "--json"))

    def refused(self, *arguments: object) -> str:
        """What a command says about a bad input: status 2, nothing on standard output, and no traceback."""
        status, out, err = self(*arguments)
        assert status == 2 and not out, (arguments, out, err)
        assert err.startswith(f"{self._program}: ") and "Traceback" not in err, (arguments, err)
        return err


@pytest.fixture
def sfumato(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)
