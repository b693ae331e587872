"""Which guarantees a search may ask for: those that the calibration was fitted for, about the whole gallery."""

from collections.abc import Iterable, Mapping
from typing import Literal

from sfumato.direction import Direction
from sfumato.errors import UserError
from sfumato.search.stores.protocol import Filter

QueryKind = Literal["text", "image"]

NATIVE: dict[Direction, QueryKind] = {"t2i": "text", "i2t": "image"}
"""Kind of the queries that the calibration of each direction was fitted on."""

_OPTIONS = {"max_risk": "max_risk (--abstain)"}
"""Options that the command has under another name."""


class GuaranteeError(UserError):
    """A guarantee that the calibration cannot give to a query."""

    def __init__(self, option: str, reason: str, way_out: str) -> None:
        super().__init__(f"{option} {reason}; {way_out}")
        self.option, self.reason = option, reason


def check_native(wanted: Mapping[str, float | None], direction: Direction, native: Iterable[bool]) -> None:
    """Refuse guarantees for queries of another kind than those that the calibration was fitted on."""
    options = [_OPTIONS.get(name, name) for name, value in wanted.items() if value is not None]
    if options and not all(native):
        kind = NATIVE[direction]
        reason = f"works only with queries by {kind}, on which the calibration was fitted"
        raise GuaranteeError(options[0], reason, f"search by {kind} alone, or leave out {options[0]}")


def check_unfiltered(filter: Filter | None, *, coverage: float | None, max_risk: float | None) -> None:
    """Refuse a guarantee together with a filter."""
    if filter is not None and not (coverage is max_risk is None):
        raise ValueError(
            "search: coverage and max_risk (abstain) are guarantees about the whole gallery, but a filter may remove"
            " the match; leave out the filter, or coverage and max_risk"
        )
