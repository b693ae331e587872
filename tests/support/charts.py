"""Pages without drawings."""

from contextlib import contextmanager

import pytest
from markupsafe import Markup

from sfumato.charts import Chart


@contextmanager
def undrawn():
    """Charts are empty within, or in a function with this decorator; drawing takes most of the time of a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chart, "svg", lambda _: Markup('<svg role="img" aria-label="a chart"></svg>'))
        yield
