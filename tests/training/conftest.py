"""Fixtures of the training tests."""

import pytest

from sfumato.training import saving


@pytest.fixture(autouse=True)
def every_epoch_is_saved(monkeypatch):
    """Epochs of the tests take a fraction of a second, and several tests interrupt a run after one of them."""
    monkeypatch.setattr(saving, "_SECONDS_BETWEEN_SAVES", 0.0)
