"""Answers of a search with their certainty, as objects and as the plain values that `sfumato search --json` prints."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sfumato.data.images import ImageSource, thumbnail
from sfumato.direction import Direction
from sfumato.gaussian import GaussianEmbedding
from sfumato.reports.charts import FIRST, STYLE, new_axes, require_matplotlib
from sfumato.search.gallery import Gallery, SearchRecord, Verdict, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABEL = 32


@dataclass(frozen=True)
class SearchAnswer:
    """The answer to one query. It iterates over its hits, closest first.

    Attributes:
        query: the text, the path or the number of the image, or the id of the item.
        distance: name of the distance of the gallery.
        calibrated: whether the probabilities were fitted on held-out pairs of this kind of query. If not, only the
            order and the distances mean something.
        uncertainty: total variance of the query.
        expected_matches: sum of the match probabilities over the whole gallery; like theirs, its value means nothing
            if they are not calibrated.
        abstained: whether the risk is too high to answer; None if no risk was given.
        verdict: the answer in one sentence.
        hits: the closest items. With min_probability there may be fewer than k, or none.
        conformal_set: the items that hold a match with the requested coverage; None if none was requested.
        image_of: gives the image of a hit, or None; notebooks show it.
    """

    query: str
    distance: str
    calibrated: bool
    uncertainty: float
    expected_matches: float
    abstained: bool | None
    verdict: Verdict
    hits: tuple[SearchRecord, ...]
    conformal_set: tuple[SearchRecord, ...] | None = None
    image_of: Callable[[SearchRecord], ImageSource | None] = field(default=lambda hit: None, repr=False, compare=False)

    def __iter__(self) -> Iterator[SearchRecord]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, index: int) -> SearchRecord:
        return self.hits[index]

    def __repr__(self) -> str:
        return "\n".join([f"SearchAnswer({self.summary})", *(f"  {_line(self, hit)}" for hit in self.hits)])

    @property
    def summary(self) -> str:
        """The query and the verdict in one line."""
        return f"{self.query!r}: {self.sentence}"

    @property
    def sentence(self) -> str:
        """The verdict with the expected number of matches; without calibrated probabilities it says so instead."""
        if self.verdict.kind == "unfamiliar":
            return self.verdict.text
        if not self.calibrated:
            return "by distance; match probabilities are not calibrated for such queries"
        if "about" in self.verdict.text:
            return self.verdict.text
        return f"{self.verdict.text}; {self.expected_matches:.1f} matches expected"

    def with_images(self, image_of: Callable[[SearchRecord], ImageSource | None]) -> "SearchAnswer":
        """The same answer with images.

        Args:
            image_of: see :class:`SearchAnswer`.

        Returns:
            A copy.
        """
        return replace(self, image_of=image_of)

    def _repr_html_(self) -> str:
        """The hits with small images and bars of their probabilities, for notebooks."""
        from sfumato.reports.page_files import data_url, render_page  # Loads what a search alone does not need.

        def image(hit: SearchRecord) -> str | None:
            source = self.image_of(hit)
            content = None if source is None else thumbnail(source)
            return None if content is None else data_url(content)

        found = {"sentence": self.sentence, "thumbnail": image, "colour": FIRST}
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
        require_matplotlib()
        import matplotlib

        if ax is None:
            title = f"{_shortened(self.query)}: {self.sentence}"
            ax = new_axes(5.6, 1.2 + 0.3 * max(1, len(self)), title)
        with matplotlib.rc_context(STYLE):
            values = [hit.match_probability if self.calibrated else hit.distance for hit in self]
            bars = ax.barh(range(len(self)), values, height=0.6, color=FIRST)
            ax.bar_label(bars, ["%.1f%%" % (100 * v) if self.calibrated else f"{v:.3f}" for v in values], padding=3)
            ax.set_yticks(range(len(self)), [_shortened(_name(hit)) for hit in self])
            ax.invert_yaxis()
            if self.calibrated:
                ax.set_xlim(0, 1.12)
                ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
            ax.set_xlabel("match probability" if self.calibrated else f"{self.distance} (smaller is closer)")
            ax.grid(axis="x")
        return ax

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values, without probabilities where they are not calibrated.

        Returns:
            {"query", "distance", "calibrated", "uncertainty", "expected_matches", "abstained", "verdict" (a sentence),
            "hits": [{"id", "distance", "match_probability", "uncertainty", and the payload}], "conformal_set" (like
            hits; None without coverage)}. If not calibrated, expected_matches and every match_probability are None,
            and so is the verdict unless it says that the model hardly knows the words.
        """
        said = self.calibrated or self.verdict.kind == "unfamiliar"
        return {
            "query": self.query,
            "distance": self.distance,
            "calibrated": self.calibrated,
            "uncertainty": self.uncertainty,
            "expected_matches": self.expected_matches if self.calibrated else None,
            "abstained": self.abstained,
            "verdict": self.verdict.text if said else None,
            "hits": [_values(hit, self.calibrated) for hit in self.hits],
            "conformal_set": None
            if self.conformal_set is None
            else [_values(hit, self.calibrated) for hit in self.conformal_set],
        }


def answer_queries(
    gallery: Gallery,
    names: Sequence[str],
    queries: GaussianEmbedding,
    k: int,
    *,
    direction: Direction | None = None,
    min_probability: float | None = None,
    coverage: float | None = None,
    max_risk: float | None = None,
    unfamiliar: Sequence[bool] | None = None,
) -> list[SearchAnswer]:
    """Search a gallery, and describe the certainty of each answer. queries (n, d)."""
    found = gallery.search(queries, k, min_probability=min_probability, coverage=coverage, max_risk=max_risk)
    # The logits were fitted on pairs of an image and a text: within one modality they are not calibrated.
    calibrated = gallery.calibrated and direction == gallery.scorer.direction
    return [
        SearchAnswer(
            name,
            gallery.distance,
            calibrated,
            result.uncertainty,
            expected,
            result.abstained,
            verdict(expected, result.best_probability, result.abstained, unfamiliar=strange),
            result.records,
            result.conformal_set,
        )
        for name, result, expected, strange in zip(
            names, found, gallery.expected_matches(queries), unfamiliar or [False] * len(names), strict=True
        )
    ]


def _values(hit: SearchRecord, calibrated: bool) -> dict[str, Any]:
    return {
        "id": hit.id,
        "distance": hit.distance,
        "match_probability": hit.match_probability if calibrated else None,
        "uncertainty": hit.uncertainty,
        **hit.payload,
    }


def _name(hit: SearchRecord) -> str:
    """What a hit is called: its label or text, else its id."""
    return hit.payload.get("label") or hit.payload.get("text") or hit.id


def _line(answer: SearchAnswer, hit: SearchRecord) -> str:
    probability = f"{hit.match_probability:6.1%}  " if answer.calibrated else ""
    name = _name(hit)
    return f"{probability}{answer.distance} {hit.distance:.4f}  {hit.id}" + ("" if name == hit.id else f"  {name}")


def _shortened(text: str) -> str:
    """The beginning of a long text; of a long path the end."""
    if len(text) <= _LABEL:
        return text
    is_path = " " not in text and ("/" in text or "\\" in text)
    return f"…{text[1 - _LABEL :]}" if is_path else f"{text[: _LABEL - 1]}…"
