"""Audit of the pairs of a split with one model, or with models that were each trained on the other parts.

The scores tell how probably listed pairs are wrong and unlisted pairs match. A model should not have been trained on
the pairs that it scores, because a model that has memorised a wrong pair gives it a small distance.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.data.splits import apply_noise, images_of_part, noise_of
from sfumato.distances import Distance, get_distance
from sfumato.errors import UserError, counted
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import beats_chance, chance_metrics, relevant_ranks
from sfumato.models.model import Model
from sfumato.models.run import Run, load_run
from sfumato.models.split import PreparedSplit, chosen_split, embed_split, load_splits, prepare_split, say_problems
from sfumato.progress import progress_bar, say
from sfumato.search.exact import distance_blocks
from sfumato.training.loop import fit

NEIGHBOURS = 10
"""Number of closest unlisted items that a pair is compared with."""

Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class ListedScores:
    """The p listed pairs, by image and then by text."""

    image: np.ndarray  # (p,) positions of the images
    text: np.ndarray  # (p,) positions of the texts
    distance: np.ndarray  # (p,) between image and text
    excess: np.ndarray
    text_rank: np.ndarray
    image_rank: np.ndarray  # (p,) number of unlisted images that are closer to the text, likewise
    better_text: np.ndarray  # (p,) closest unlisted text of the image; -1 if all texts are listed
    better_image: np.ndarray  # (p,) closest unlisted image of the text; -1 if all images are listed
    better_text_distance: np.ndarray  # (p,) distance of that text from the image; infinite if there is none
    better_image_distance: np.ndarray  # (p,) distance of that image from the text; infinite if there is none

    def __len__(self) -> int:
        return len(self.image)


@dataclass(frozen=True, eq=False)
class MissingScores:
    """Unlisted pairs that may match, the closest first."""

    image: np.ndarray  # (c,) positions of the images
    text: np.ndarray  # (c,) positions of the texts
    distance: np.ndarray  # (c,) the score; a small distance is suspicious
    text_rank: np.ndarray  # (c,) rank from 0 among the unlisted texts of the image; -1 beyond NEIGHBOURS
    image_rank: np.ndarray  # (c,) rank from 0 among the unlisted images of the text; -1 beyond NEIGHBOURS

    def __len__(self) -> int:
        return len(self.image)


@dataclass(frozen=True, eq=False)
class _Side:
    """One direction: (p,) distances and ranks of the listed pairs, (n, k) closest unlisted items of each query."""

    distance: np.ndarray
    rank: np.ndarray
    near: np.ndarray
    near_distance: np.ndarray

    def reference(self, query: np.ndarray) -> np.ndarray:
        """(p,) mean distance of a pair's query to its closest unlisted items; the pair's distance if there are none."""
        there = np.isfinite(self.near_distance)
        mean = np.where(there, self.near_distance, 0).sum(1) / np.maximum(there.sum(1), 1)
        return np.where(there.any(1)[query], mean[query], self.distance)


@torch.no_grad()
def audit_pairs(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    relevance: Relevance,
    *,
    distance: str = "csd",
    wording: Sequence[str] | None = None,
    memory_mb: float = 64.0,
    progress: Progress | None = None,
) -> tuple[ListedScores, MissingScores]:
    """Score all listed pairs, and the unlisted pairs that are closest.

    Args:
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        relevance: the listed pairs, image -> texts.
        distance: name in DISTANCES.
        wording: (m,) the texts. An unlisted text with the same words as a listed text of the image is not a missing
            match. Among unlisted texts with the same words only the closest is kept. Case and spaces are ignored. None
            compares no words.
        memory_mb: size of a block of distances, in MiB; the working memory is a few times that. All n * m distances are
            never in memory at once.
        progress: called with the number of images and texts just compared, n + m in all.

    Returns:
        (the listed pairs, candidates for missing pairs: at most NEIGHBOURS of each image and each text).

    Raises:
        ValueError: sizes do not fit, nothing is listed, or a distance is NaN.

    Example:
        >>> images = GaussianEmbedding.point(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]]))
        >>> texts = GaussianEmbedding.point(torch.tensor([[0.0, 0.1], [0.0, 2.9], [1.0, 0.1]]))
        >>> listed = Relevance.from_lists([[0], [1], [2]], n_gallery=3)  # The last two are swapped.
        >>> audit_pairs(images, texts, listed)[0].excess > 0
        array([False,  True,  True])
    """
    if (images.n, texts.n) != (relevance.n_queries, relevance.n_gallery):
        raise ValueError(
            f"audit_pairs: {images.n} images and {texts.n} texts, but a list of {relevance.n_queries} by"
            f" {relevance.n_gallery}"
        )
    if wording is not None and len(wording) != texts.n:
        raise ValueError(f"audit_pairs: got {len(wording)} wordings for {texts.n} texts; give one for each")
    if not len(relevance.indices):
        raise ValueError("audit_pairs: no pair is listed; there is nothing to audit")
    image, text = relevance.query_of_item, relevance.indices
    by_text = np.lexsort((image, text))
    of_images = _side(images, texts, relevance, get_distance(distance), memory_mb, progress)
    found = _side(
        texts, images, relevance.transpose(), get_distance(distance).for_direction("t2i"), memory_mb, progress
    )
    back = np.empty_like(by_text)
    back[by_text] = np.arange(len(by_text))
    of_texts = _Side(found.distance[back], found.rank[back], found.near, found.near_distance)
    reference = (of_images.reference(image) + of_texts.reference(text)) / 2
    listed = ListedScores(
        image,
        text,
        of_images.distance,
        of_images.distance - reference,
        of_images.rank,
        of_texts.rank,
        of_images.near[image, 0],
        of_texts.near[text, 0],
        of_images.near_distance[image, 0],
        of_texts.near_distance[text, 0],
    )
    return listed, _missing(of_images, of_texts, relevance, wording)


def wrong_fraction(log_odds: np.ndarray, *, n_steps: int = 1000) -> float:
    """The fraction of wrong pairs among the listed ones, of maximum likelihood, by expectation maximisation.

    The listed pairs are a mixture of right pairs, with the distances of the calibration's matches, and wrong pairs,
    with the distances of its random pairs. Wrong pairs that are as close as right pairs count as right. log_odds (p,)
    = log(p(distance | match) / p(distance | no match)), the calibrated logit at equal fractions.

    Paper: Saerens, Latinne and Decaestecker, "Adjusting the outputs of a classifier to new a priori probabilities",
        2002.
    """
    fraction = 0.5
    for _ in range(n_steps):
        before, fraction = fraction, float(wrong_probability(log_odds, fraction).mean())
        if abs(fraction - before) < 1e-9:
            break
    return fraction


def wrong_fraction_interval(log_odds: np.ndarray) -> tuple[float, float]:
    """The fractions of wrong pairs that the distances do not contradict: an interval of 95 % by the likelihood ratio.

    Returns (low, high).
    """
    fractions = np.linspace(0, 1, 401)
    ratio = np.asarray(log_odds, np.float64)
    with np.errstate(divide="ignore"):
        likelihood = np.array([np.logaddexp(np.log(1 - f) + ratio, np.log(f)).sum() for f in fractions])
    near = fractions[2 * (likelihood.max() - likelihood) <= _CHI_SQUARE]
    return float(near[0]), float(near[-1])


_CHI_SQUARE = 3.841
"""95 % quantile of chi squared with one degree of freedom."""


def wrong_probability(log_odds: np.ndarray, fraction: float) -> np.ndarray:
    """(p,) probabilities that listed pairs are wrong, given the fraction of wrong pairs."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"wrong_probability: fraction must lie in [0, 1], got {fraction}")
    with np.errstate(divide="ignore"):
        prior = np.log(1 - fraction) - np.log(fraction)
    return np.asarray(torch.sigmoid(-torch.from_numpy(np.asarray(log_odds, np.float64) + prior)))


def _side(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    ground_truth: Relevance,
    distance: Distance,
    memory_mb: float,
    progress: Progress | None,
) -> _Side:
    k = min(NEIGHBOURS, gallery.n)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for start, block in distance_blocks(queries, gallery, distance, memory_mb=memory_mb):
        rows = np.arange(start, start + len(block))
        own = ground_truth.select_queries(rows)
        at = tuple(torch.from_numpy(i).to(block.device) for i in (own.query_of_item, own.indices))
        listed = block[at]
        rank = _among_unlisted(relevant_ranks(block, own), own)
        block = block.clone()
        block[at] = torch.inf
        near_distance, near = _closest(block, k)
        parts.append((listed.double().cpu().numpy(), rank, near, near_distance))
        if progress:
            progress(len(block))
    return _Side(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _among_unlisted(rank: np.ndarray, ground_truth: Relevance) -> np.ndarray:
    """Ranks among all items -> ranks among those that are not listed."""
    order = np.lexsort((rank, ground_truth.query_of_item))
    own = np.empty_like(rank)
    own[order] = np.arange(len(rank)) - np.repeat(ground_truth.indptr[:-1], ground_truth.counts)
    unlisted: np.ndarray = rank - own
    return unlisted


def _closest(block: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(b, k) ascending distances, ties by position, and their positions; infinite and -1 beyond the finite ones."""
    found = block.topk(k, dim=1, largest=False)
    value, place = found.values.double().cpu().numpy(), found.indices.cpu().numpy()
    order = np.lexsort((place, value), axis=1)
    value, place = np.take_along_axis(value, order, axis=1), np.take_along_axis(place, order, axis=1)
    return value, np.where(np.isfinite(value), place, -1)


def _missing(of_images: _Side, of_texts: _Side, listed: Relevance, wording: Sequence[str] | None) -> MissingScores:
    """The union of the closest unlisted pairs of both directions."""
    m = len(of_texts.near)
    found = []
    for side in (of_images, of_texts):
        query, rank = np.nonzero(side.near >= 0)
        found.append((query, side.near[query, rank], side.near_distance[query, rank], rank))
    (i, t, d, rank_of_text), (t2, i2, d2, rank_of_image) = found
    key, at = np.unique(np.concatenate([i * m + t, i2 * m + t2]), return_inverse=True)
    distance = np.empty(len(key))
    distance[at] = np.concatenate([d, d2])
    ranks = np.full((2, len(key)), -1)
    ranks[0, at[: len(i)]], ranks[1, at[len(i) :]] = rank_of_text, rank_of_image
    order = np.argsort(distance, kind="stable")
    if wording is not None:
        says = np.unique([" ".join(words.lower().split()) for words in wording], return_inverse=True)[1]
        image, said = key // m, says[key % m]
        new = np.zeros(len(key), bool)
        new[order[np.unique((image * m + said)[order], return_index=True)[1]]] = True
        new &= ~np.isin(image * m + said, listed.query_of_item * m + says[listed.indices])
        order = order[new[order]]
    key = key[order]
    return MissingScores(key // m, key % m, distance[order], ranks[0, order], ranks[1, order])


REPEATED = 3
"""An image or a text is shown at most this often in a list; the tables have all pairs."""

Scored = ListedScores | MissingScores


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of an audit. Both lists start with the most suspicious pair."""

    data: PairData  # the listed pairs
    listed: ListedScores  # scores of all listed pairs
    wrong_probability: np.ndarray | None
    wrong_fraction: float | None  # estimated fraction of wrong pairs; None without a calibration
    wrong_interval: tuple[float, float] | None  # see :func:`wrong_fraction_interval`; None without a calibration
    missing: MissingScores  # candidates for missing matches
    match_probability: np.ndarray | None
    metadata: Mapping[str, Any]

    def pair_rows(self, chosen: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Describe listed pairs for a table."""
        s, data = self.listed, self.data
        rows = []
        for k in range(len(s)) if chosen is None else chosen:
            text, image = int(s.better_text[k]), int(s.better_image[k])
            rows.append(
                self._row(s, k, {"excess": _number(s.excess[k]), "wrong_probability": _at(self.wrong_probability, k)})
                | {
                    "better_text_id": data.text_ids[text] if text >= 0 else None,
                    "better_text": data.texts[text] if text >= 0 else None,
                    "better_text_distance": _number(s.better_text_distance[k]),
                    "better_image": data.image_ids[image] if image >= 0 else None,
                    "better_image_distance": _number(s.better_image_distance[k]),
                }
            )
        return rows

    def missing_rows(self, chosen: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Describe candidates for missing matches for a table."""
        every = range(len(self.missing)) if chosen is None else chosen
        return [self._row(self.missing, k, {"match_probability": _at(self.match_probability, k)}) for k in every]

    def to_json(self, top: int) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            **self.metadata,
            "n_images": len(self.data.image_ids),
            "n_texts": len(self.data.text_ids),
            "n_pairs": len(self.listed),
            "wrong_share": self.wrong_fraction,
            "wrong_share_interval": None if self.wrong_interval is None else list(self.wrong_interval),
            "suspects": None if self.wrong_probability is None else int((self.wrong_probability >= 0.5).sum()),
            "candidates": len(self.missing),
            "pairs": self.pair_rows(varied(self.listed, top)),
            "missing": self.missing_rows(varied(self.missing, top)),
        }

    def _row(self, s: Scored, k: int, scores: Mapping[str, Any]) -> dict[str, Any]:
        data, image, text = self.data, int(s.image[k]), int(s.text[k])
        ranks = {"text_rank": int(s.text_rank[k]) + 1 or None, "image_rank": int(s.image_rank[k]) + 1 or None}
        names = {"image": data.image_ids[image], "text_id": data.text_ids[text], "text": data.texts[text]}
        return names | dict(scores) | {"distance": _number(s.distance[k])} | ranks


def varied(scores: Scored, most: int) -> list[int]:
    """Choose the first pairs in which no image and no text occurs more than REPEATED times."""
    images, texts, chosen = Counter[int](), Counter[int](), list[int]()
    for k, (image, text) in enumerate(zip(scores.image.tolist(), scores.text.tolist(), strict=True)):
        if len(chosen) >= most:
            break
        if images[image] < REPEATED and texts[text] < REPEATED:
            chosen.append(k)
            images[image] += 1
            texts[text] += 1
    return chosen


def audit_model(retrieval_model: Model, config: DataConfig, split: str, *, name: str, seen: bool = False) -> Audit:
    """Audit a split of some data with a model."""
    prepared, others = prepare_listed(retrieval_model, config, split)
    scored = _score(retrieval_model, prepared, np.arange(len(prepared.data.image_ids)))
    notes = [] if not seen else [
        "The model was trained on these pairs and may have memorised wrong ones;"
        " --cross-fit 2 audits with models that were trained on other pairs."
    ]  # fmt: skip
    about = {"split": split, "other_splits": others, "model": name, "cross_fit": 0, "notes": notes}
    return _joined(retrieval_model, prepared.data, [scored], about)


def cross_fit(run: Run, config: DataConfig, n_parts: int, folder: Path) -> Audit:
    """Audit a training split in parts, each with a model that is trained on the other parts."""
    if n_parts < 2:
        raise UserError(f"--cross-fit must be at least 2 parts, got {n_parts}")
    scored, retrieval_model, data, others = [], None, None, dict[str, int]()
    for part in range(n_parts):
        own = config.model_copy(update={"leave_out": f"{part}/{n_parts}"})
        say(f"part {part + 1} of {n_parts}: training on the others")
        fit(run.recipe.model_copy(update={"data": own}), folder / f"part-{part}")
        retrieval_model = load_run(folder / f"part-{part}", device=run.model.image.device)
        prepared, others = prepare_listed(retrieval_model, config, "train")
        data = prepared.data
        scored.append(_score(retrieval_model, prepared, images_of_part(data, part, n_parts)))
    assert retrieval_model is not None and data is not None
    name = run.recipe.name or run.folder.name
    about = {"split": "train", "other_splits": others, "model": name, "cross_fit": n_parts, "notes": []}
    return _joined(retrieval_model, data, scored, about)


def prepare_listed(retrieval_model: Model, config: DataConfig, split: str) -> tuple[PreparedSplit, dict[str, int]]:
    """A split as it is used in training: "train" is noisy if the data configures noise.

    And by name, the numbers of images of the splits that have other images.
    """
    problems = Problems()
    splits = load_splits(config, problems)
    data = chosen_split(splits, split, config)
    others = {name: len(one.image_ids) for name, one in splits.items() if not set(one.image_ids) <= set(data.image_ids)}
    noise = noise_of(data, config.noise_rate, config.noise_seed, config.noise_file) if split == "train" else None
    if noise is not None:
        data = apply_noise(data, noise)
    prepared = prepare_split(retrieval_model.model, data, problems, split)
    say_problems(problems)
    return prepared, others


@dataclass(frozen=True, eq=False)
class _Part:
    """Scores of one part; positions are those of the whole split, the excess is in units of the model's logit."""

    listed: ListedScores
    log_odds: np.ndarray | None
    missing: MissingScores
    match_probability: np.ndarray | None
    recalls: Mapping[str, np.ndarray]  # by direction (2, 3), recall@1, 5 and 10 of the model and of a random order
    n_independent: int  # number of independent queries


_RECALLS = {f"recall@{k}": k for k in (1, 5, 10)}


def _recalls(listed: ListedScores, relevance: Relevance) -> dict[str, np.ndarray]:
    """Those of a part, with positions in the part; the closest listed item of a query counts."""
    found = {}
    for direction, query, rank, own in (
        ("i2t", listed.image, listed.text_rank, relevance),
        ("t2i", listed.text, listed.image_rank, relevance.transpose()),
    ):
        best = np.full(query.max() + 1, np.iinfo(np.int64).max)
        np.minimum.at(best, query, rank)
        asked, chance = best[np.unique(query)], chance_metrics(own)
        found[direction] = np.array([[(asked < k).mean(), chance[name]] for name, k in _RECALLS.items()]).T
    return found


def _check_above_chance(parts: Sequence[_Part], split: str) -> None:
    """Raise an error if the models rank the listed pairs no better than a random order."""
    weights = [part.n_independent for part in parts]
    means = {d: np.average([part.recalls[d] for part in parts], 0, weights) for d in ("i2t", "t2i")}
    pairs = {d: [dict(zip(_RECALLS, row.tolist(), strict=True)) for row in mean] for d, mean in means.items()}
    if not any(beats_chance(found, chance, sum(weights)) for found, chance in pairs.values()):
        found, chance = pairs["t2i"]
        raise UserError(
            f"no audit: the model ranks the listed pairs of {split} no better than chance, by a test over"
            f" {counted(sum(weights), 'independent pair')} (text -> image recall@5 {found['recall@5']:.0%}, of random"
            f" orders {chance['recall@5']:.0%} on average), so it cannot tell wrong pairs from"
            " right ones. Train it further, or take another model; a model that is good on other data means that"
            " most of these pairs are wrong, e.g. shifted by one row"
        )


def _score(retrieval_model: Model, prepared: PreparedSplit, chosen: np.ndarray) -> _Part:
    data = prepared.data
    images, texts = embed_split(retrieval_model.model, prepared)
    kept = np.unique(data.pairs[np.isin(data.pairs[:, 0], chosen), 1])
    if not len(kept):
        raise UserError("the data lists no pair, so there is nothing to audit")
    images, texts = images[torch.from_numpy(chosen)], texts[torch.from_numpy(kept)]
    relevance = data.relevance().select_queries(chosen).select_gallery(kept)
    with progress_bar("comparing", len(chosen) + len(kept)) as advance:
        listed, missing = audit_pairs(
            images,
            texts,
            relevance,
            distance=retrieval_model.distance,
            wording=[data.texts[t] for t in kept],
            progress=advance,
        )
    recalls, n_independent = _recalls(listed, relevance), min(relevance.n_queries, relevance.n_gallery)
    fitted, log_odds, probability = retrieval_model.calibration, None, None
    if fitted is not None:
        log_odds = fitted.logit(torch.from_numpy(listed.distance), match_fraction=0.5).numpy()
        far = torch.from_numpy(missing.distance)
        of_size = None if fitted.t2i is None else fitted.t2i.probability(far, n_gallery=len(chosen))
        probability = (fitted.probability(far) if of_size is None else of_size).numpy()
    whole = {"image": chosen[listed.image], "text": kept[listed.text]}
    whole["better_text"] = np.where(listed.better_text >= 0, kept[listed.better_text], -1)
    whole["better_image"] = np.where(listed.better_image >= 0, chosen[listed.better_image], -1)
    listed = dataclasses.replace(listed, excess=retrieval_model.logit_scale * listed.excess, **whole)
    missing = dataclasses.replace(missing, image=chosen[missing.image], text=kept[missing.text])
    return _Part(listed, log_odds, missing, probability, recalls, n_independent)


def _joined(retrieval_model: Model, data: PairData, parts: Sequence[_Part], about: Mapping[str, Any]) -> Audit:
    """Both lists in their order, with probabilities if all parts have them."""
    _check_above_chance(parts, about["split"])
    listed, missing = _join([p.listed for p in parts]), _join([p.missing for p in parts])
    log_odds = _if_all([p.log_odds for p in parts])
    probability = _if_all([p.match_probability for p in parts])
    fraction = None if log_odds is None else wrong_fraction(log_odds)
    wrong = None if log_odds is None or fraction is None else wrong_probability(log_odds, fraction)
    first = np.argsort(-listed.excess, kind="stable")
    close = np.argsort(missing.distance if probability is None else -probability, kind="stable")
    notes = list(about["notes"])
    if log_odds is None:
        notes.append(
            "The model is not calibrated on held-out pairs, so the audit has ranks and distances but no probabilities."
        )
    return Audit(
        data,
        _take(listed, first),
        None if wrong is None else wrong[first],
        fraction,
        None if log_odds is None else wrong_fraction_interval(log_odds),
        _take(missing, close),
        None if probability is None else probability[close],
        {**about, "distance": retrieval_model.distance, "notes": notes},
    )


def _join(parts: Sequence[Any]) -> Any:
    names = [f.name for f in dataclasses.fields(parts[0])]
    return type(parts[0])(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


def _take(scores: Any, index: np.ndarray) -> Any:
    return type(scores)(*(getattr(scores, f.name)[index] for f in dataclasses.fields(scores)))


def _if_all(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if len(there) == len(parts) else None


def _at(values: np.ndarray | None, k: int) -> float | None:
    return None if values is None else _number(values[k])


def _number(value: float) -> float | None:
    """A number with six digits for JSON and tables; None if it is infinite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
