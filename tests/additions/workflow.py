"""How many items a collection has, and the first of them."""

from pathlib import Path

from sfumato.search.collection import GaussianCollection


def peek(index: Path, n: int) -> dict[str, object]:
    """The number of items of a collection, and the first n ids."""
    with GaussianCollection.open(index) as found:
        return {"items": len(found), "first": found.ids_after("", n)}
