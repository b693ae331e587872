"""The two directions of retrieval."""

from typing import Literal

Direction = Literal["i2t", "t2i"]
"""Images search among texts, or texts among images."""
