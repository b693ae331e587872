"""sfumato: image-text search and matching that knows what it does not know.

Every image and every text is a Gaussian instead of a point. The public names are in ``__init__.pyi``; each is imported
on first use.
"""

import lazy_loader

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
