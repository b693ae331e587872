"""What can be searched, whatever it is kept in: the answer to a Gaussian query, with probabilities and promises.

:class:`Gallery` turns the closest items that its kinds bring (an index in memory, a collection in a vector store) into results.
:class:`Answers` holds what probabilities and promises are computed from. Neither knows where items are kept or how they are found.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.direction import Direction
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.matching import match_probability
from sfumato.search.stores.protocol import Filter


@dataclass(frozen=True)
class SearchHit:
    """One item that a search found.

    Attributes:
        id: of the item.
        rank: 1 is the closest.
        distance: between query and item, smaller is closer.
        match_probability: in [0, 1], by the calibration of the gallery, or its logits.
        uncertainty: total variance of the item.
        payload: what was stored beside the item, e.g. {"path": ...}.
    """

    id: str
    rank: int
    distance: float
    match_probability: float
    uncertainty: float
    payload: dict[str, str]


@dataclass(frozen=True)
class SearchResult:
    """What a search found for one query, closest first; iterates over its hits.

    Attributes:
        uncertainty: total variance of the query.
        hits: as many as were asked for, or all items if there are fewer; with min_probability fewer, perhaps none.
        best_probability: match probability of the closest item, a hit or not; 0 if there is none.
        abstained: whether the closest item is too unlikely a match to be an answer at the risk asked for; None if none was.
        conformal_set: the items within the radius of the coverage asked for, closest first; None if none was.
        conformal_set_cut: whether there may be more of them than max_set let in; then the promise is not kept.
    """

    uncertainty: float
    hits: tuple[SearchHit, ...]
    best_probability: float = 0.0
    abstained: bool | None = None
    conformal_set: tuple[SearchHit, ...] | None = None
    conformal_set_cut: bool = False

    def __iter__(self) -> Iterator[SearchHit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, index: int) -> SearchHit:
        return self.hits[index]


@dataclass(frozen=True, eq=False)
class Items:
    """Some items of a gallery.

    Attributes:
        ids: n ids.
        embeddings: (n, d) float32, with which every distance of the gallery comes out right; where only total variances are kept,
            they are spread evenly over the dimensions.
        payloads: n dictionaries.
    """

    ids: tuple[str, ...]
    embeddings: GaussianEmbedding
    payloads: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, eq=False)
class Found:
    """The closest items of one query: ids, (c,) ascending distances, (c,) total variances, payloads."""

    ids: tuple[str, ...]
    distance: Tensor
    uncertainty: Tensor
    payloads: tuple[Mapping[str, str], ...]

    def first(self, n: int) -> "Found":
        """The n closest of them."""
        return Found(self.ids[:n], self.distance[:n], self.uncertainty[:n], self.payloads[:n])


@dataclass(frozen=True)
class Answers:
    """From distances to probabilities and promises, in galleries of any size.

    Attributes:
        logit_scale, logit_bias: of the match probabilities, without a shift for the size of the gallery.
        calibration: the model's; takes the place of the logits.
        direction: of the queries, "t2i" if they are texts and the items images.
    """

    logit_scale: float
    logit_bias: float
    calibration: Calibration | None = None
    direction: Direction = "t2i"

    def prior_shift(self, n_gallery: int) -> float:
        """What the size of a gallery adds to the logits; nothing if there is no calibration that knows its own."""
        calibration = self.calibration
        if calibration is None or calibration.match_fraction is None or getattr(calibration, self.direction) is None:
            return 0.0
        return calibration.prior_shift(n_gallery=max(1, n_gallery), direction=self.direction)

    def match_probability(self, distance: Tensor, n_gallery: int) -> Tensor:
        """(...) distances -> (...) probabilities that an item of such a gallery, so far from a query, matches it."""
        shift = self.prior_shift(n_gallery)
        if self.calibration is None or self.calibration.knots is None:
            return match_probability(distance, self.logit_scale, self.logit_bias + shift)
        return torch.sigmoid(self.calibration.logit(distance) + shift).to(distance.dtype)

    def radius(self, coverage: float) -> float:
        """Of the set that holds a match with this probability: :meth:`Calibration.conformal_radius`."""
        if not 0 < coverage < 1:
            raise ValueError(f"search: coverage must be between 0 and 1, got {coverage}")
        return self._vouching("coverage").conformal_radius(1 - coverage, direction=self.direction)

    def abstains(self, nearest: Tensor, max_risk: float, n_gallery: int) -> list[bool]:
        """(n,) distances of queries to their closest items, infinite if there is none -> n times whether not to answer."""
        calibration = self._vouching("abstention (max_risk)")
        n = max(1, n_gallery) if calibration.match_fraction is not None else None
        unanswered = calibration.abstains(
            nearest.nan_to_num(posinf=torch.finfo(nearest.dtype).max), max_risk, n_gallery=n, direction=self.direction
        )
        return (unanswered | nearest.isinf()).tolist()

    def _vouching(self, asked: str) -> Calibration:
        if self.calibration is None:
            raise ValueError(
                f"search: {asked} needs a calibration, and this index has none; calibrate the model on held-out pairs (sfumato calibrate"
                " RUN) and build the index again"
            )
        return self.calibration


class Gallery(ABC):
    """Items to search among. What its kinds must bring are the abstract members; the rest is the same for all."""

    distance: str
    """Name in DISTANCES."""

    centre: Tensor
    """(d,) that lifted vectors are relative to."""

    about: dict[str, Any]
    """JSON values of whoever made it."""

    @property
    @abstractmethod
    def answers(self) -> Answers:
        """What probabilities and promises come from."""

    @property
    @abstractmethod
    def d(self) -> int:
        """Dimensions of the embeddings."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def calibrated(self) -> bool:
        """Whether the probabilities of queries of its direction were fitted on held-out pairs."""
        return bool(self.about.get("calibrated", self.answers.calibration is not None))

    @property
    def size(self) -> int:
        """Number of items that probabilities are computed for; unlike len() it may be some seconds old."""
        return len(self)

    @abstractmethod
    def closest(self, queries: GaussianEmbedding, k: int, filter: Filter | None = None) -> list[Found]:
        """At most k items of each query; the queries are checked, float32 and on the CPU, and k is at least 1."""

    @abstractmethod
    def within(self, queries: GaussianEmbedding, radius: float, *, most: int | None = None) -> list[Found]:
        """All items of each query at most so far, or the closest `most` of them."""

    @abstractmethod
    def expected_matches(self, queries: GaussianEmbedding) -> list[float]:
        """Sum of the match probabilities over the gallery for each query: how many items should match."""

    @abstractmethod
    def items(self, ids: Sequence[str]) -> Items:
        """Those of these items that are there, in the order asked for."""

    @abstractmethod
    def sample(self, n: int) -> Items:
        """At most n items, drawn evenly and the same each time."""

    @abstractmethod
    def scan(self, batch: int = 4096) -> Iterator[Items]:
        """All items, each once, in batches."""

    def close(self) -> None:
        """Let go of what it holds open; nothing by default."""
        return None

    @torch.no_grad()
    def search(
        self,
        queries: GaussianEmbedding,
        k: int = 10,
        *,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
        max_set: int | None = None,
        filter: Filter | None = None,
    ) -> list[SearchResult]:
        """The k closest items of each query.

        Args:
            queries: (n, d) embeddings; any floating dtype and device.
            k: number of hits; all items if the gallery is smaller.
            min_probability: leave out hits that are less likely matches. For a wanted precision take that of
                :meth:`Calibration.threshold`.
            coverage: give also the set of all items, however many, that holds a match of the query with at least this
                probability: :meth:`Calibration.conformal_radius`.
            max_risk: say of each query whether it is better not answered, so that at most this share of the answers is wrong:
                :meth:`Calibration.abstain_below`. Hits and set are given all the same.
            max_set: of the set, give at most so many items, and say if there may be more.
            filter: which items may be found. Probabilities stay those of the whole gallery; nothing can be promised of a part of it.

        Returns:
            n results in the order of the queries.

        Raises:
            ValueError: k < 1, another d, NaN in a query, a share outside of (0, 1), or coverage or max_risk with a filter or without
                a calibration that can vouch for it.
        """
        if filter is not None and not (coverage is max_risk is None):
            raise ValueError(
                "search: coverage and max_risk are promises about the whole gallery, a filter may leave the match out; ask for one or the"
                " other"
            )
        if min_probability is not None and not 0 <= min_probability <= 1:
            raise ValueError(f"search: min_probability must be between 0 and 1, got {min_probability}")
        radius = None if coverage is None else self.answers.radius(coverage)
        queries = self.checked(queries, k)
        n = self.size
        found = self.closest(queries, k, filter)
        abstained: list[bool] | list[None] = [None] * queries.n
        if max_risk is not None:
            nearest = torch.tensor([float(f.distance[0]) if f.ids else torch.inf for f in found])
            abstained = self.answers.abstains(nearest, max_risk, n)
        limit = None if max_set is None else max_set + 1
        sets = [None] * queries.n if radius is None else self.within(queries, radius, most=limit)
        results = []
        for i, total_variance in enumerate(queries.total_variance.tolist()):
            hits = self._hits(found[i], n)
            best = hits[0].match_probability if hits else 0.0
            if min_probability is not None:
                hits = tuple(hit for hit in hits if hit.match_probability >= min_probability)
            inside, cut = sets[i], False
            if inside is not None and max_set is not None:
                cut, inside = len(inside.ids) > max_set, inside.first(max_set)
            whole = None if inside is None else self._hits(inside, n)
            results.append(SearchResult(total_variance, hits, best, abstained[i], whole, cut))
        return results

    def match_probability(self, distance: Tensor) -> Tensor:
        """Probability that an item of this gallery at this distance from a query matches it.

        Args:
            distance: any shape, by the distance of the gallery.

        Returns:
            (...) probabilities of the same shape: of the calibration, at the size of this gallery; without one, of the logits.
        """
        return self.answers.match_probability(distance, self.size)

    def checked(self, queries: GaussianEmbedding, k: int = 1) -> GaussianEmbedding:
        """The queries in float32 on the CPU.

        Raises:
            ValueError: k < 1, another d, or a number that is not finite.
        """
        if k < 1:
            raise ValueError(f"search: k must be at least 1, got {k}")
        if queries.d != self.d:
            raise ValueError(
                f"search: queries have {queries.d} dimensions, the index has {self.d}; embed both with one model"
            )
        check_finite(queries, "search")
        return queries.detach().to("cpu").to(torch.float32)

    def _hits(self, found: Found, n_gallery: int) -> tuple[SearchHit, ...]:
        probability = self.answers.match_probability(found.distance, n_gallery)
        columns = (column.tolist() for column in (found.distance, probability, found.uncertainty))
        return tuple(
            SearchHit(i, rank, d, p, u, dict(payload))
            for rank, (i, payload, d, p, u) in enumerate(zip(found.ids, found.payloads, *columns, strict=True), 1)
        )


def with_margin(k: int) -> int:
    """A few more candidates than asked for: products may have put near ties in the wrong order, the exact distances mend it."""
    return k + max(8, k // 4)


MANY = 10
"""From so many expected matches on, a query could mean many things."""

_UNSURE, _SURE, _ONE = 0.15, 0.5, 1.7


@dataclass(frozen=True)
class Verdict:
    """In one word, and in one sentence."""

    kind: Literal["clear", "few", "many", "unsure", "abstained"]
    text: str


def verdict(expected_matches: float, best_probability: float, abstained: bool | None = None) -> Verdict:
    """Put an answer into words.

    Args:
        expected_matches: sum of the match probabilities over the gallery.
        best_probability: of the closest item; 0 if there is none.
        abstained: whether the query is better not answered at the risk asked for; None if none was.
    """
    if abstained:
        return Verdict("abstained", "No confident match: at the risk you allow, this is better not answered")
    if expected_matches >= MANY:
        return Verdict("many", f"This could mean many things: about {expected_matches:.0f} matches expected")
    if best_probability < _UNSURE:
        return Verdict(
            "unsure", f"Nothing it is sure of: the best hit has a probability of {_percent(best_probability)}"
        )
    if expected_matches < _ONE:
        if best_probability >= _SURE:
            return Verdict("clear", "One clear match")
        return Verdict("unsure", f"Not sure: the best hit has a probability of {_percent(best_probability)}")
    return Verdict("few", f"Few matches: about {expected_matches:.0f} expected")


def _percent(p: float) -> str:
    if p < 0.001:
        return "less than 0.1%"
    return f"{p:.0%}" if p >= 0.1 else f"{p:.1%}"
