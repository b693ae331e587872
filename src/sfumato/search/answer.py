"""What a search is asked, and its answer: options, queries, hits and verdicts, the same for commands and programs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from sfumato.charts import FIRST, data_url, render_page, shown_probability, styled_axes
from sfumato.data.images import ImageSource, handed_out, thumbnail
from sfumato.errors import UserError
from sfumato.ids import Direction, has_words, plain_text, spelled_numbers
from sfumato.search.languages import AsEnglish
from sfumato.search.stores.protocol import Filter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        for name, choice in (("order", Order), ("target", Target), ("duplicates", Duplicates)):
            if (value := getattr(self, name)) not in get_args(choice):
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
            what = "coverage and max_risk (abstain) are guarantees about the whole gallery"
            way = "leave out the filter, or coverage and max_risk"
            raise ValueError(f"search: {what}, but a filter may remove the match; {way}")
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
    facts: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # names of places and words of dates from the text
    typed: str = ""  # the text with these
    across: AsEnglish | None = field(default=None, compare=False)  # of another language, in place of what models read

    def __post_init__(self) -> None:
        for text in (self.text, *self.also, *self.without):
            if not has_words(text):
                raise UserError(f"a text to search for has no words: {text!r}; write words, or leave it out")

    @property
    def name(self) -> str:
        """The query in words."""
        unwanted = f" without {' and '.join(self.without)}" if self.without else ""
        return " and ".join((self.typed or self.text, *self.also)) + unwanted

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
        """The texts to embed, in one form."""
        return tuple(spelled_numbers(plain_text(text)) for text in (*self.wanted, *self.without))

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


MANY = 7
"""With this many expected matches or more, a search has found many matches, where their number is said."""

LINE = 0.5
"""Probability that the line in a list of hits stands for."""

_CLEAR, _SINGLE, _FEW, _UNSURE = 0.75, 2, 3, 0.25
_FEW_UNJUDGED, _MOST_UNJUDGED = 0.1, 0.7
_LABEL = 32


@dataclass(frozen=True)
class Verdict:
    """An answer in words."""

    kind: Literal["clear", "few", "many", "unsure", "nothing", "abstained", "unfamiliar"]  # one word
    text: str  # one sentence


UNFAMILIAR = Verdict("unfamiliar", "The model hardly knows these words: the results are guesses")


def verdict(
    expected_matches: float, best_probability: float, abstained: bool | None = None, *, empty_set: bool = False
) -> Verdict:
    """Put an answer by target "listed" into words.

    The limits were chosen on validation data; docs/results/probabilities.md has the precision and the recall of
    "many" and "clear".
    """
    if abstained:
        return Verdict("abstained", "No confident match: an answer would exceed the risk that you allow")
    found = f"the first result is right with a probability of {_percent(best_probability)}"
    if empty_set:
        return Verdict("unsure", f"No clear match: the conformal set is empty; {found}")
    if expected_matches >= MANY:
        return Verdict("many", f"Many matches: about {expected_matches:.0f}")
    if best_probability >= _CLEAR and expected_matches < _SINGLE:
        return Verdict("clear", "One clear match")
    if best_probability < _UNSURE:
        return Verdict("unsure", f"No clear match: {found}")
    if expected_matches >= _FEW:
        return Verdict("few", f"A few matches: about {expected_matches:.0f}")
    return Verdict("few", f"A {'likely' if best_probability >= 0.5 else 'possible'} match: {found}")


def fits_verdict(
    probabilities: Sequence[float], expected_matches: float, nothing: float, unjudged: float = 0.0
) -> Verdict:
    """Put an answer by target "fits" into words: the probabilities of its hits, and that of no match at all.

    unjudged: the fraction of the items without texts; if most have none, the expected number is too unsure to be said.
    """
    above, best = [p for p in probabilities if p >= LINE], max(probabilities, default=0.0)
    which = "first" if not probabilities or probabilities[0] == best else "most probable"
    found = f"the {which} result is right with a probability of {_percent(best)}"
    lacking = "no image has captions" if unjudged == 1 else f"{_percent(unjudged)} of the images have no captions"
    if not above and nothing >= LINE and best < _UNSURE:
        if unjudged <= _FEW_UNJUDGED:
            return Verdict("nothing", "Nothing here shows this")
        return Verdict("unsure", f"Nothing sure: no result is likely, and {lacking}")
    if not above and unjudged > _MOST_UNJUDGED:
        return Verdict("unsure", f"Not sure: {lacking}, and without them the numbers are often too low")
    if not above:
        return Verdict("unsure", f"No likely match: {found}")
    right, n, counts = round(sum(above)), len(above), unjudged <= _MOST_UNJUDGED
    alone = expected_matches < _FEW if counts else max((p for p in probabilities if p < LINE), default=0.0) < _UNSURE
    if n == 1 and best >= _CLEAR and alone:
        return Verdict("clear", "One clear match" + (f"; {lacking}" if unjudged > _FEW_UNJUDGED else ""))
    if n == 1 and (alone or not counts):
        return Verdict("few", f"A likely match: {found}")
    of = "both" if right == n == 2 else f"all {n}" if right == n else f"{right} of the {n}"
    line = f"{of} results above {LINE:.0%} should be right"
    if not counts:
        return Verdict("few", f"Likely matches: {line}")
    many = expected_matches >= MANY
    about = f"{'Many' if many else 'A few'} matches: about {max(round(expected_matches), right)}"
    return Verdict("many" if many else "few", about + (f"; {line}" if n > 2 else ""))


def _percent(p: float) -> str:
    return shown_probability(p).replace("<", "less than ").replace(">", "more than ")


@dataclass(frozen=True)
class Hit:
    """One item that a search found.

    Attributes:
        id: id of the item.
        rank: 1 is the first.
        distance: distance between query and item; smaller is closer.
        match_probability: in [0, 1]. Target "fits": that a person would call it right, by distance and texts; "listed":
            by the distance, from the calibration of the gallery, or from its logits if it has none. It means something
            only in a calibrated :class:`Answer`.
        uncertainty: total variance of the item.
        payload: texts stored with the item, e.g. {"path": ...}.
        best_text: the text of the item that has most of the query's words; "" where texts were no evidence.
        duplicates: ids of nearly the same images, where they were folded into this hit. It is the largest of them, and
            has the distance and the probability of the first.
        why: for target "fits" the log odds of match_probability by what they come from: the "image", its "texts", the
            "other results" of the query, the "query" itself and, if it names some, "time and place"; they add up to it.
    """

    id: str
    rank: int
    distance: float
    match_probability: float
    uncertainty: float
    payload: dict[str, str]
    best_text: str = ""
    duplicates: tuple[str, ...] = ()
    why: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        values = f"rank={self.rank}, distance={self.distance:.4f}, match_probability={self.match_probability:.3f}"
        return f"Hit({self.id!r}, {values}, uncertainty={self.uncertainty:.4g})"

    @property
    def name(self) -> str:
        """Its label or text, else its id."""
        return self.payload.get("label") or self.payload.get("text") or self.id


@dataclass(frozen=True)
class Answer:
    """The answer to one query. It iterates over its hits, best first.

    Attributes:
        query: the text, the path or the number of the image, the id of the item, or the number of the embedding.
        distance: name of the distance of the gallery.
        calibrated: whether the probabilities were fitted on held-out pairs of this kind of query. If not, only the
            order and the distances mean something.
        uncertainty: total variance of the query.
        hits: the k closest items, for target "fits" the k most probable ones unless the order is by distance; or all
            items if there are fewer. With min_probability there may be fewer, or none.
        best_probability: match probability of the first hit, also if min_probability left it out; 0 without one.
        best_distance: its distance; infinite for an empty gallery.
        expected_matches: sum of the match probabilities over the whole gallery; None if it was not asked for, or the
            probabilities are not calibrated.
        nothing_probability: probability that no item of the gallery fits; None for target "listed", or not calibrated.
        multiplicity: number of COCO's 123,287 images that people would find relevant, estimated from the text alone;
            None for target "listed", and for fewer than three words.
        hidden: number of items among the k that min_probability left out.
        verdict: the answer in one sentence; None as expected_matches, unless the model hardly knows the words.
        abstained: True if the query should not be answered at the requested risk; None if no risk was requested.
        conformal_set: the items that hold a match with the requested coverage, closest first; None if none was
            requested.
        conformal_set_cut: True if max_set cut the set. The coverage guarantee does not hold for a cut set.
        target: what the probabilities are of. "listed": a pair of the data, by the distance alone. "fits": a person
            would say that the query describes the image, by the distance and the item's texts.
        note: what the kinds of items in the gallery mean for the probabilities; "" if nothing.
        suggestion: the text of the query with misspelt words replaced; None if nothing seems misspelt.
        warning: what the model cannot read of the query, in a sentence; None if there is nothing to say.
        image_of: gives the image of a hit, or None; notebooks show it.
    """

    query: str
    distance: str
    calibrated: bool
    uncertainty: float
    hits: tuple[Hit, ...]
    best_probability: float = 0.0
    best_distance: float = math.inf
    expected_matches: float | None = None
    nothing_probability: float | None = None
    multiplicity: float | None = None
    hidden: int = 0
    verdict: Verdict | None = None
    abstained: bool | None = None
    conformal_set: tuple[Hit, ...] | None = None
    conformal_set_cut: bool = False
    target: Target = "listed"
    note: str = ""
    suggestion: str | None = None
    warning: str | None = None
    image_of: Callable[[Hit], ImageSource | None] = field(default=lambda hit: None, repr=False, compare=False)

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, index: int) -> Hit:
        return self.hits[index]

    def __repr__(self) -> str:
        return "\n".join([f"Answer({self.query!r}: {self.sentence})", *(f"  {self._line(hit)}" for hit in self.hits)])

    @property
    def sentence(self) -> str:
        """The verdict, for target "listed" with the expected number; without calibrated probabilities it says so."""
        if self.verdict is None:
            if self.calibrated:
                return f"the first result is right with a probability of {_percent(self.best_probability)}"
            by = "distance and texts" if self.target == "fits" else "distance"
            return f"by {by}; match probabilities are not calibrated for such queries"
        said = self.target == "fits" or self.verdict.kind == "unfamiliar" or "about" in self.verdict.text
        if said or self.expected_matches is None:
            return self.verdict.text
        return f"{self.verdict.text}; {self.expected_matches:.1f} matches expected"

    def _line(self, hit: Hit) -> str:
        probability = f"{shown_probability(hit.match_probability):>4}  " if self.calibrated else ""
        name = "" if hit.name == hit.id else f"  {hit.name}"
        return f"{probability}{self.distance} {hit.distance:.4f}  {hit.id}{name}"

    def _repr_html_(self) -> str:
        """The hits with small images and bars of their probabilities, for notebooks."""

        def image(hit: Hit) -> str | None:
            source = self.image_of(hit)
            content = None if source is None else thumbnail(source)
            return None if content is None else data_url(content)

        found = {"sentence": self.sentence, "thumbnail": image, "probability": shown_probability, "colour": FIRST}
        return render_page("answer.html.j2", {**vars(self), **found})

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the hits as bars: match probabilities, or distances if the probabilities are not calibrated.

        Args:
            ax: axes of matplotlib to draw on; new ones if None.

        Returns:
            The axes.

        Raises:
            UserError: matplotlib is not installed.
        """
        title = f"{_shortened(self.query)}: {self.sentence}"
        with styled_axes(ax, 5.6, 1.2 + 0.3 * max(1, len(self)), title) as axes:
            values = [hit.match_probability if self.calibrated else hit.distance for hit in self]
            bars = axes.barh(range(len(self)), values, height=0.6, color=FIRST)
            axes.bar_label(bars, [shown_probability(v) if self.calibrated else f"{v:.3f}" for v in values], padding=3)
            axes.set_yticks(range(len(self)), [_shortened(hit.name) for hit in self])
            axes.invert_yaxis()
            if self.calibrated:
                axes.set_xlim(0, 1.12)
                axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
            axes.set_xlabel("match probability" if self.calibrated else f"{self.distance} (smaller is closer)")
            axes.grid(axis="x")
        return axes

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values, without probabilities where they are not calibrated.

        Returns:
            {"query", "target", "distance", "calibrated", "uncertainty", "expected_matches", "nothing_probability",
            "multiplicity", "hidden", "abstained", "note", "verdict" (a sentence), "hits": [{"id", "distance",
            "match_probability", "uncertainty", "best_text" and "why" if there are, and the payload}], "conformal_set"
            (like hits; None without coverage)}. If not calibrated, every match_probability is None.
        """

        def values(hits: tuple[Hit, ...]) -> list[dict[str, Any]]:
            return [
                {
                    "id": hit.id,
                    "distance": hit.distance,
                    "match_probability": hit.match_probability if self.calibrated else None,
                    "uncertainty": hit.uncertainty,
                    **({"best_text": hit.best_text} if hit.best_text else {}),
                    **({"duplicates": list(hit.duplicates)} if hit.duplicates else {}),
                    **({"why": dict(hit.why)} if hit.why and self.calibrated else {}),
                    **handed_out(hit.payload),
                }
                for hit in hits
            ]

        plain = ("query", "target", "distance", "calibrated", "uncertainty", "expected_matches", "nothing_probability")
        also = "multiplicity", "hidden", "abstained", "note", "verdict", "suggestion", "warning"
        return {name: getattr(self, name) for name in (*plain, *also)} | {
            "verdict": None if self.verdict is None else self.verdict.text,
            "hits": values(self.hits),
            "conformal_set": None if self.conformal_set is None else values(self.conformal_set),
        }


def _shortened(text: str) -> str:
    """The beginning of a long text; of a long path the end."""
    if len(text) <= _LABEL:
        return text
    is_path = " " not in text and ("/" in text or "\\" in text)
    return f"…{text[1 - _LABEL :]}" if is_path else f"{text[: _LABEL - 1]}…"
