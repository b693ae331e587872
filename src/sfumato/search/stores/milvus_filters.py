"""Filters in the expression language of Milvus, as far as Milvus Lite understands it."""

from collections.abc import Sequence

import numpy as np

from sfumato.search.stores.protocol import Filter

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def quoted(text: str) -> str:
    """A text literal. Milvus has templates for this, which Lite does not support.

    Args:
        text: any text.

    Returns:
        The literal.
    """
    return f'"{text.translate(_ESCAPES)}"'


def among(ids: Sequence[str]) -> str:
    """The condition that an item has one of these ids.

    Args:
        ids: ids of items.

    Returns:
        The expression.
    """
    return f"id in [{', '.join(map(quoted, ids))}]"


def condition_on(filter: Filter | None) -> str:
    """The condition that an item passes a filter.

    Args:
        filter: the filter; None for all items.

    Returns:
        The expression; "" for all items.
    """
    if filter is None:
        return ""
    conditions = []
    if filter.max_uncertainty is not None:
        # Round down to float32, so that the result does not depend on the precision of the engine.
        bound = np.clip(filter.max_uncertainty, np.finfo(np.float32).min, np.finfo(np.float32).max)
        single = np.float32(bound)
        if float(single) > bound:
            single = np.nextafter(single, np.float32(-np.inf))
        conditions.append(f"uncertainty <= {float(single)!r}")
    for name, values in filter.where.items():
        # Lite has "in" for fields but not inside JSON. No id is empty.
        equal = (f"payload[{quoted(name)}] == {quoted(value)}" for value in values)
        conditions.append(f"({' or '.join(equal) or 'id == ' + quoted('')})")
    return " and ".join(conditions)
