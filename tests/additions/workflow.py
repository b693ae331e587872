"""How many items an index has, and the first of them."""

from pathlib import Path

from sfumato.search.index import GaussianIndex


def peek(index: Path, n: int) -> dict[str, object]:
    """The number of items of an index, and the ids of the first n."""
    found = GaussianIndex.load(index)
    return {"items": len(found), "first": list(found.ids)[:n]}
