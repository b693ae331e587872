"""Estimators of how uncertain a query is, on one interface: queries against a gallery in, one number for each query out.

Higher is less certain, everywhere. No estimator sees a label when it is asked; one that is learnt (:class:`FailurePredictor`) saw labels of
other queries before. Which of them is worth what, is measured by evaluation/trust.py.

Two sources of doubt are told apart by name. *Aleatoric*: the query itself leaves open what is meant, as the text "animal" does.
*Epistemic*: the model does not know, because it was not trained for such a query or the gallery holds no answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.nn import functional

from sfumato.direction import Direction
from sfumato.distances import Distance, get_distance, squared_l2_matrix
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.inclusion import inclusion_test, log_inclusion
from sfumato.matching import match_logit
from sfumato.metrics.relevance import Relevance
from sfumato.search.exact import distance_blocks

NEAREST = 10
"""Number of nearest gallery items of the estimators that look at a few."""

N_SAMPLES = 8
"""Draws of the sampled estimators, as in PCME++'s appendix A.3."""

Kind = Literal["aleatoric", "epistemic", "both"]

_HEAD_FORMAT = "sfumato-miss-head-1"


@dataclass(frozen=True)
class Matching:
    """How queries meet a gallery.

    Attributes:
        distance: name in DISTANCES.
        logit_scale, logit_bias: of the match logits, best those that were calibrated.
        direction: "i2t" if the queries are images, "t2i" if they are texts.
    """

    distance: str = "csd"
    logit_scale: float = 5.0
    logit_bias: float = 5.0
    direction: Direction = "i2t"

    @property
    def oriented_distance(self) -> Distance:
        """The distance of (queries, gallery)."""
        return get_distance(self.distance).for_direction(self.direction)


@dataclass(frozen=True, eq=False)
class Block:
    """A few queries and what one pass over the gallery knows of them; estimators share what is computed.

    Attributes:
        queries: (b, d).
        gallery: (m, d).
        distance: (b, m); infinite for items that are left out.
        matching: scale, bias and name of the distance.
    """

    queries: GaussianEmbedding
    gallery: GaussianEmbedding
    distance: Tensor
    matching: Matching

    @cached_property
    def logit(self) -> Tensor:
        """(b, m) match logits; minus infinity for items that are left out."""
        return match_logit(self.distance, self.matching.logit_scale, self.matching.logit_bias)

    @cached_property
    def nearest(self) -> tuple[Tensor, Tensor]:
        """((b, k) distances ascending, (b, k) positions) of the k = NEAREST closest items, or all m."""
        values, index = self.distance.topk(min(NEAREST, self.distance.shape[1]), dim=1, largest=False)
        return values, index

    @cached_property
    def draws(self) -> Tensor:
        """(b, p) squared distances between all pairs among N_SAMPLES draws of each query.

        The noise is the same for all queries: what differs between two of them is their variances alone, and blocks of any
        size give the same.
        """
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(N_SAMPLES, self.queries.d, generator=generator).to(self.queries.device)
        first, second = torch.triu_indices(N_SAMPLES, N_SAMPLES, 1, device=noise.device)
        distance: Tensor = self.queries.var.float() @ (noise[first] - noise[second]).square().T
        return distance

    def pairs_with_nearest(self, function: Callable[[GaussianEmbedding, GaussianEmbedding], Tensor]) -> Tensor:
        """(b,) mean over dimensions and nearest items of a (n, d) function of item and query, row by row."""
        index = self.nearest[1]
        k = index.shape[1]
        rows = torch.arange(len(index), device=index.device).repeat_interleave(k)
        return function(self.gallery[index.flatten()], self.queries[rows]).mean(1).view(-1, k).mean(1)


@dataclass(frozen=True)
class Estimator:
    """An estimator of uncertainty.

    Attributes:
        name: key in ESTIMATORS.
        estimates: what the number is.
        kind: which doubt it is meant to see.
        cost: beside the distances that a search computes anyway; n queries, m items, d dimensions.
        of_block: a block of b queries -> (b,) numbers, higher is less certain.
        needs_gallery: whether it looks at the gallery at all.
        needs_variance: undefined for points.
    """

    name: str
    estimates: str
    kind: Kind
    cost: str
    of_block: Callable[[Block], Tensor]
    needs_gallery: bool = True
    needs_variance: bool = False

    def __call__(self, queries: GaussianEmbedding, gallery: GaussianEmbedding, matching: Matching) -> np.ndarray:
        """(n,) float64 uncertainties of the queries: :func:`estimate_uncertainty` with this estimator alone."""
        return estimate_uncertainty(queries, gallery, matching, estimators={self.name: self})[self.name]


def _margin(block: Block) -> Tensor:
    best = block.logit.topk(2, dim=1).values
    return best[:, 1] - best[:, 0]


def _nearest_mean(block: Block) -> Tensor:
    distance = squared_l2_matrix(block.queries, block.gallery)
    return distance.masked_fill(torch.isposinf(block.distance), torch.inf).amin(1)


def _entropy(logit: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(logit.softmax(1)).sum(1)
    return entropy


def _self_mismatch(block: Block) -> Tensor:
    distance = block.draws.sqrt() if block.matching.distance == "average_l2" else block.draws
    return torch.sigmoid(-match_logit(distance.double(), block.matching.logit_scale, block.matching.logit_bias)).mean(1)


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator(
            "total_variance",
            "sum of the query's variances, the paper's uncertainty (Chun 2024, 3.4); under csd what is taken off all its logits",
            "aleatoric",
            "n d",
            lambda block: block.queries.total_variance,
            needs_gallery=False,
        ),
        Estimator(
            "log_det",
            "logarithm of the volume that the query covers (Pishdad et al., 3.3)",
            "aleatoric",
            "n d",
            lambda block: block.queries.log_det,
            needs_gallery=False,
        ),
        Estimator(
            "geometric_std",
            "geometric mean of its deviations (Chun et al. 2021, 3.2.1); orders queries as log_det does",
            "aleatoric",
            "n d",
            lambda block: block.queries.geometric_std,
            needs_gallery=False,
        ),
        Estimator(
            "sample_spread",
            f"mean distance between {N_SAMPLES} draws of the query",
            "aleatoric",
            f"n d {N_SAMPLES * (N_SAMPLES - 1) // 2}, no draw is stored",
            lambda block: block.draws.sqrt().mean(1),
            needs_gallery=False,
        ),
        Estimator(
            "self_mismatch",
            f"probability that two of {N_SAMPLES} draws of the query do not match each other (PCME)",
            "aleatoric",
            "as sample_spread",
            _self_mismatch,
            needs_gallery=False,
        ),
        Estimator(
            "expected_matches",
            "how many items of the gallery should match: the sum of the match probabilities",
            "aleatoric",
            "n m",
            lambda block: torch.sigmoid(block.logit).sum(1, dtype=torch.float64),
        ),
        Estimator(
            "match_entropy",
            "entropy, in nats, of the softmax of the match logits: over how many items is the answer spread, if there is one",
            "both",
            "n m",
            lambda block: _entropy(block.logit),
        ),
        Estimator(
            "match_entropy_top10",
            f"the same among the {NEAREST} best items: do the answers on the page compete",
            "both",
            f"n m for the best {NEAREST}",
            lambda block: _entropy(match_logit(block.nearest[0], block.matching.logit_scale, block.matching.logit_bias)),
        ),
        Estimator(
            "top1_mismatch",
            "probability that the best item does not match; orders queries as the distance to the nearest item does",
            "both",
            "n m",
            lambda block: torch.sigmoid(-block.logit.amax(1).double()),  # In float32 everything hopeless would tie at 1.
        ),
        Estimator(
            "margin",
            "lead of the best logit over the second, negated; a query's own variance plays no part under csd",
            "both",
            "n m",
            _margin,
        ),
        Estimator(
            "knn_distance",
            f"mean distance to the {NEAREST} nearest items",
            "epistemic",
            f"n m for the best {NEAREST}",
            lambda block: block.nearest[0].mean(1),
        ),
        Estimator(
            "nearest_mean",
            "squared distance of the query's mean to the nearest mean of the gallery; variances play no part",
            "epistemic",
            "n m d, a second matrix product",
            _nearest_mean,
        ),
        Estimator(
            "inclusion",
            f"how far the {NEAREST} nearest items are included in the query rather than the query in them (ProLIP's test)",
            "aleatoric",
            f"n d {NEAREST}",
            lambda block: block.pairs_with_nearest(inclusion_test),
            needs_variance=True,
        ),
        Estimator(
            "not_included",
            f"log inclusion of the query in its {NEAREST} nearest items, negated: none of them covers it",
            "epistemic",
            f"n d {NEAREST}",
            lambda block: -block.pairs_with_nearest(lambda item, query: log_inclusion(query, item)),
            needs_variance=True,
        ),
    )
}  # fmt: skip
"""Every estimator by name."""


@torch.no_grad()
def estimate_uncertainty(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    matching: Matching,
    *,
    estimators: Mapping[str, Estimator] = ESTIMATORS,
    without: Relevance | None = None,
    memory_mb: float = 32.0,
) -> dict[str, np.ndarray]:
    """Uncertainties of queries by several estimators, in one pass over the gallery.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings, m >= 2 where an estimator looks at it.
        matching: distance and match logits.
        estimators: by name; all if not given.
        without: n queries, m items: items that are left out of the gallery of a query; at least NEAREST must remain.
        memory_mb: size of a block of distances; working memory is about six times that.

    Returns:
        For each estimator (n,) float64, higher is less certain. Points have a log_det of minus infinity.

    Raises:
        ValueError: sizes do not fit, the gallery is too small, or an estimator needs variances and gets points.
    """
    _check(queries, gallery, estimators, without)
    parts: dict[str, list[Tensor]] = {name: [] for name in estimators}
    if any(e.needs_gallery for e in estimators.values()):
        blocks = distance_blocks(queries, gallery, matching.oriented_distance, memory_mb=memory_mb)
    else:
        blocks = iter([(0, queries.mean.new_empty(queries.n, 0))])
    for start, distance in blocks:
        own = queries[start : start + len(distance)]
        if without is not None and distance.shape[1]:
            low, high = without.indptr[start], without.indptr[start + own.n]
            rows = torch.from_numpy(without.query_of_item[low:high] - start)
            distance = distance.clone()
            distance[rows, torch.from_numpy(without.indices[low:high])] = torch.inf
        block = Block(own, gallery, distance, matching)
        for name, estimator in estimators.items():
            parts[name].append(estimator.of_block(block).double().cpu())
    return {name: torch.cat(values).numpy() if values else np.empty(0) for name, values in parts.items()}


def usable_estimators(
    *embeddings: GaussianEmbedding, estimators: Mapping[str, Estimator] = ESTIMATORS
) -> dict[str, Estimator]:
    """Those that are defined for these embeddings: with points, the ones that need no variance."""
    points = any(bool(torch.isneginf(e.log_var).any()) for e in embeddings)
    return {name: e for name, e in estimators.items() if not (points and e.needs_variance)}


@dataclass(frozen=True, eq=False)
class FailurePredictor:
    """A loss-prediction head: from a query's embedding, the probability that its best item is wrong.

    A logistic regression on the standardised means and log variances, fitted on queries whose truth is known; it needs no gallery
    when it is asked. The simplest member of the family of Yoo and Kweon, "Learning loss for active learning", CVPR 2019.

    Attributes:
        centre, spread: (f,) of the features; f = d, or 2 d with log variances.
        weight: (f,) of the standardised features.
        bias: its logit at the centre.
        penalty: strength of the squared penalty on the weights that cross-validation chose.
    """

    centre: Tensor
    spread: Tensor
    weight: Tensor
    bias: float
    penalty: float

    @classmethod
    def fit(
        cls,
        queries: GaussianEmbedding,
        missed: np.ndarray,
        *,
        penalties: Sequence[float] = (0.01, 0.1, 1.0, 10.0),
        folds: int = 5,
        seed: int = 0,
    ) -> "FailurePredictor":
        """Fit on queries with known outcome, never on those that are to be judged.

        Args:
            queries: (n, d) embeddings.
            missed: (n,) 1 where the best item was wrong, else 0.
            penalties: to choose from, by the log loss in cross-validation.
            folds: of the cross-validation.
            seed: of the folds.

        Raises:
            ValueError: shapes differ, there are only hits or only misses, or fewer queries than folds.
        """
        target = torch.from_numpy(np.asarray(missed, float))
        if target.shape != (queries.n,):
            raise ValueError(
                f"FailurePredictor: got {tuple(target.shape)} outcomes for {queries.n} queries; give one for each"
            )
        if not ((target == 0) | (target == 1)).all() or target.min() == target.max():
            raise ValueError("FailurePredictor: outcomes must be 0 and 1, and both must occur")
        if not 2 <= folds <= queries.n:
            raise ValueError(
                f"FailurePredictor: folds must be between 2 and the number of queries {queries.n}, got {folds}"
            )
        with_variance = bool(torch.isfinite(queries.log_var).all())
        features = _features(queries, with_variance)
        centre, spread = features.mean(0), features.std(0, correction=0)
        spread = torch.where(spread > 1e-9, spread, torch.ones_like(spread))
        z = (features - centre) / spread
        fold = torch.from_numpy(np.random.default_rng(seed).permutation(queries.n) % folds)
        losses = []
        for penalty in penalties:
            held = torch.empty_like(target)
            for k in range(folds):
                weight, bias = _logistic(z[fold != k], target[fold != k], penalty)
                held[fold == k] = z[fold == k] @ weight + bias
            losses.append(float(functional.binary_cross_entropy_with_logits(held, target)))
        best = penalties[int(np.argmin(losses))]
        weight, bias = _logistic(z, target, best)
        return cls(centre, spread, weight, bias, best)

    def score(self, queries: GaussianEmbedding) -> Tensor:
        """(n,) probabilities in (0, 1) that the best item of each query is wrong.

        Raises:
            ValueError: another number of dimensions, or points where it was fitted on Gaussians.
        """
        with_variance = len(self.weight) == 2 * queries.d
        if not with_variance and len(self.weight) != queries.d:
            raise ValueError(
                f"FailurePredictor: fitted on {len(self.weight)} features, which {queries.d} dimensions do not give; use its own model's embeddings"
            )
        features = _features(queries, with_variance)
        if not torch.isfinite(features).all():
            raise ValueError("FailurePredictor: fitted on Gaussians with variances, got points or NaN")
        device = features.device
        z = (features - self.centre.to(device)) / self.spread.to(device)
        return torch.sigmoid(z @ self.weight.to(device) + self.bias)

    def estimator(self, name: str = "predicted_miss") -> Estimator:
        """This head as an :class:`Estimator`, to stand beside those of ESTIMATORS."""
        return Estimator(
            name,
            "probability of a wrong best item, by a logistic regression on other queries' embeddings and outcomes",
            "both",
            "n d; fitted once, on labelled queries",
            lambda block: self.score(block.queries),
            needs_gallery=False,
        )

    def save(self, path: str | Path) -> None:
        """Write it into one safetensors file, atomically."""
        tensors = {name: getattr(self, name).contiguous() for name in ("centre", "spread", "weight")}
        tensors["numbers"] = torch.tensor([self.bias, self.penalty], dtype=torch.float64)
        write_atomically(path, safetensors_bytes(tensors, {"format": _HEAD_FORMAT}))

    @classmethod
    def load(cls, path: str | Path) -> "FailurePredictor":
        """Read a file of :meth:`save`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not one of ours, or damaged.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no head at {path}; write one with FailurePredictor.save()")
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("format") != _HEAD_FORMAT:
                    raise ValueError(f"{path}: not a head of sfumato (expected format {_HEAD_FORMAT!r})")
                bias, penalty = file.get_tensor("numbers").tolist()
                centre, spread, weight = (file.get_tensor(name) for name in ("centre", "spread", "weight"))
                return cls(centre, spread, weight, bias, penalty)
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged or not a head ({error}); fit and write it again") from error


def _features(queries: GaussianEmbedding, with_variance: bool) -> Tensor:
    return torch.cat([queries.mean, queries.log_var] if with_variance else [queries.mean], dim=1).double()


def _logistic(z: Tensor, target: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Weights and bias of a logistic regression: mean log loss + penalty / 2 ||weight||^2, the bias free."""
    parameters = torch.zeros(z.shape[1] + 1, dtype=torch.float64).requires_grad_()
    optimiser = torch.optim.LBFGS([parameters], max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(z @ parameters[:-1] + parameters[-1], target)
        loss = loss + penalty / 2 * parameters[:-1].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    found = parameters.detach()
    return found[:-1].clone(), float(found[-1])


def _check(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    estimators: Mapping[str, Estimator],
    without: Relevance | None,
) -> None:
    if without is not None and (without.n_queries, without.n_gallery) != (queries.n, gallery.n):
        raise ValueError(
            f"estimate_uncertainty: {queries.n} queries and {gallery.n} items, but `without` is of {without.n_queries} by {without.n_gallery}"
        )
    if without is not None and gallery.n - without.counts.max(initial=0) < NEAREST:
        raise ValueError(
            f"estimate_uncertainty: `without` leaves a query fewer than {NEAREST} items; leave such queries out"
        )
    looking = [name for name, e in estimators.items() if e.needs_gallery]
    if looking and gallery.n < 2:
        raise ValueError(f"estimate_uncertainty: {looking[0]} needs a gallery of at least two items, got {gallery.n}")
    missing = [name for name in estimators if name not in usable_estimators(queries, gallery, estimators=estimators)]
    if missing:
        raise ValueError(
            f"estimate_uncertainty: {', '.join(missing)} need variances, got points; choose with usable_estimators()"
        )
