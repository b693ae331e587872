"""What a search is asked: its options, from the flag to the gallery, and what is known of each query."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sfumato.errors import UserError
from sfumato.ids import Direction
from sfumato.search.stores.protocol import Filter

Target = Literal["listed", "fits"]

Duplicates = Literal["show", "fold"]

Order = Literal["fits", "distance"]

QueryKind = Literal["text", "image"]

NATIVE: dict[Direction, QueryKind] = {"t2i": "text", "i2t": "image"}
"""Kind of the queries that the calibration of each direction was fitted on."""

_OPTIONS = {"max_risk": "max_risk (--abstain)"}
"""Options that the command has under another name."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search; the same for every query of a search.

    Attributes:
        min_probability: leave out hits with a lower match probability.
        coverage: also return the set of items that holds a match with at least this probability.
        max_risk: largest fraction of answers with a wrong first hit; less certain queries are marked.
        max_set: largest number of items in such a set; None: all.
        filter: conditions that an item must fulfil. Not with coverage and max_risk.
        duplicates: "fold" lists an image that is nearly the same as a hit above in :attr:`Hit.duplicates` of that hit,
            and fills the list up to k; "show" lists every image.
        order: of the hits of a text where texts of items are evidence. "fits": the k most probable items;
            "distance": the k closest, with the same probabilities.
        target: what the probabilities of a text's hits are of. "fits": the texts of items are evidence, where they
            have some; "listed": by distance alone.
    """

    min_probability: float | None = None
    coverage: float | None = None
    max_risk: float | None = None
    max_set: int | None = None
    filter: Filter | None = None
    duplicates: Duplicates = "show"
    order: Order = "fits"
    target: Target = "fits"

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, str, Any], ...] = (
            ("order", self.order, Order),
            ("target", self.target, Target),
            ("duplicates", self.duplicates, Duplicates),
        )
        for name, value, choice in choices:
            if value not in get_args(choice):
                raise ValueError(f"search: {name} must be {' or '.join(get_args(choice))}, got {value!r}")

    @property
    def is_guaranteed(self) -> bool:
        """Whether a guarantee about the whole gallery is asked for; such are about distances alone."""
        return self.coverage is not None or self.max_risk is not None

    def check(self, direction: Direction, native: Iterable[bool]) -> None:
        """Refuse what cannot be searched together."""
        wanted = {name: getattr(self, name) for name in ("min_probability", "coverage", "max_risk")}
        check_native(wanted, direction, native)
        if self.filter is not None and self.is_guaranteed:
            raise ValueError(
                "search: coverage and max_risk (abstain) are guarantees about the whole gallery, but a filter may"
                " remove the match; leave out the filter, or coverage and max_risk"
            )
        if self.min_probability is not None and not 0 <= self.min_probability <= 1:
            raise ValueError(f"search: min_probability must be between 0 and 1, got {self.min_probability}")


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


_ONE_TEXT = 12
"""Words that texts may have together to be embedded as one: about as many as a caption."""


@dataclass(frozen=True)
class TextQuery:
    """A text to search for, with further texts that a hit should fit and texts that it should not fit."""

    text: str
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The query in words."""
        unwanted = f" without {' and '.join(self.without)}" if self.without else ""
        return " and ".join((self.text, *self.also)) + unwanted

    @property
    def joined(self) -> str:
        """The texts that a hit should fit, as one."""
        return " ".join((self.text, *self.also))

    @property
    def wanted(self) -> tuple[str, ...]:
        """The texts that a hit should fit: a few words are one text, captions are several."""
        return (self.joined,) if len(self.joined.split()) <= _ONE_TEXT else (self.text, *self.also)

    @property
    def parts(self) -> tuple[str, ...]:
        """The texts to embed."""
        return (*self.wanted, *self.without)

    @property
    def is_one(self) -> bool:
        """Whether it is searched for as one text."""
        return len(self.parts) == 1


@dataclass(frozen=True)
class QueryInfo:
    """What is known of a query beside its embedding."""

    name: str  # in the answer: the text, the path or the number of the image, the id of the item
    text: TextQuery | None = None  # where it is one
    native: bool = True  # whether it is of the kind that the calibration was fitted on
    unfamiliar: bool = False  # whether the model hardly knows its words
    suggestion: str | None = None  # the text with misspelt words replaced
    warning: str | None = None  # what the model cannot read of it

    @classmethod
    def of_texts(cls, texts: "Iterable[str | TextQuery]") -> "list[QueryInfo]":
        """Of texts of the kind that the calibration was fitted on."""
        forms = [TextQuery(one) if isinstance(one, str) else one for one in texts]
        return [cls(one.name, one) for one in forms]
