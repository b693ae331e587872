"""sfumato: image-text search and matching that knows what it does not know.

Every image and every text is a Gaussian instead of a point. The public names are in ``__init__.pyi``; each is imported
on first use. Losses, training and towers need torch, which the extra `train` installs; the others do not.
"""

from typing import Any

import lazy_loader

__version__ = "0.3.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "adamp"):
            raise ImportError(f'sfumato.{name} needs torch: pip install "sfumato[train]"', name=error.name) from error
        raise
