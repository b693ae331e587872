"""The two sides of a pair and the two directions of retrieval."""

from typing import Literal

Direction = Literal["i2t", "t2i"]
"""Images search among texts, or texts among images."""

Side = Literal["image", "text"]
"""The modality of an item."""

DIRECTIONS: tuple[Direction, ...] = ("i2t", "t2i")

DIRECTION_OF: dict[Side, Direction] = {"image": "i2t", "text": "t2i"}
"""The direction of a search by the side of its queries."""

OTHER_SIDE: dict[Side, Side] = {"image": "text", "text": "image"}
"""The side of the gallery by that of the queries."""
