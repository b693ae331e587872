"""Audit of the pairs of a split with one model, or with models that were each trained on the other parts.

The scores tell how probably listed pairs are wrong and unlisted pairs match. A model should not have been trained on
the pairs that it scores, because a model that has memorised a wrong pair gives it a small distance.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.arrays import joined_rows, some_rows
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.data.splits import images_of_part, shuffle_pairs
from sfumato.errors import UserError, counted, progress_bar, say
from sfumato.evaluation import pair_scores
from sfumato.evaluation.pair_scores import ListedScores, MissingScores
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import RECALLS, beats_chance, chance_metrics, retrieval_metrics
from sfumato.models.embed import PreparedSplit, chosen_split, embed_split, load_splits, prepare_split, say_problems
from sfumato.models.model import Model
from sfumato.models.run import Run, load_run
from sfumato.training.loop import fit

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
            own = {"excess": _number(s.excess[k]), "wrong_probability": _at(self.wrong_probability, k)}
            better = {
                "better_text_id": data.text_ids[text] if text >= 0 else None,
                "better_text": data.texts[text] if text >= 0 else None,
                "better_text_distance": _number(s.better_text_distance[k]),
                "better_image": data.image_ids[image] if image >= 0 else None,
                "better_image_distance": _number(s.better_image_distance[k]),
            }
            rows.append(self._row(s, k, own) | better)
        return rows

    def missing_rows(self, chosen: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Describe candidates for missing matches for a table."""
        every = range(len(self.missing)) if chosen is None else chosen
        return [self._row(self.missing, k, {"match_probability": _at(self.match_probability, k)}) for k in every]

    def to_json(self, top: int) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            **self.metadata, "n_images": len(self.data.image_ids), "n_texts": len(self.data.text_ids),
            "n_pairs": len(self.listed), "wrong_share": self.wrong_fraction,
            "wrong_share_interval": None if self.wrong_interval is None else list(self.wrong_interval),
            "suspects": None if self.wrong_probability is None else int((self.wrong_probability >= 0.5).sum()),
            "candidates": len(self.missing), "pairs": self.pair_rows(varied(self.listed, top)),
            "missing": self.missing_rows(varied(self.missing, top)),
        }  # fmt: skip

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
        retrieval_model = load_run(folder / f"part-{part}", device=getattr(run.model.image, "device", "cpu"))
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
    if split == "train" and config.noise_rate:
        data = shuffle_pairs(data, config.noise_rate)[0]
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


def _recalls(listed: ListedScores, relevance: Relevance) -> dict[str, np.ndarray]:
    """Those of a part, with positions in the part; the closest listed item of a query counts."""
    by_text = np.lexsort((listed.image, listed.text))
    sides = {"i2t": (listed.text_rank, relevance), "t2i": (listed.image_rank[by_text], relevance.transpose())}
    both = {d: (retrieval_metrics(rank, own, names=RECALLS), chance_metrics(own)) for d, (rank, own) in sides.items()}
    return {d: np.array([[of[name] for name in RECALLS] for of in pair]) for d, pair in both.items()}


def _check_above_chance(parts: Sequence[_Part], split: str) -> None:
    """Raise an error if the models rank the listed pairs no better than a random order."""
    weights = [part.n_independent for part in parts]
    means = {d: np.average([part.recalls[d] for part in parts], 0, weights) for d in ("i2t", "t2i")}
    pairs = {d: [dict(zip(RECALLS, row.tolist(), strict=True)) for row in mean] for d, mean in means.items()}
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
    images, texts = images[chosen], texts[kept]
    relevance = data.relevance().select_queries(chosen).select_gallery(kept)
    wording = [data.texts[t] for t in kept]
    with progress_bar("comparing", len(chosen) + len(kept)) as advance:
        listed, missing = pair_scores.audit_pairs(
            images, texts, relevance, distance=retrieval_model.distance, wording=wording, progress=advance
        )
    recalls, n_independent = _recalls(listed, relevance), min(relevance.n_queries, relevance.n_gallery)
    fitted, log_odds, probability = retrieval_model.calibration, None, None
    if fitted is not None:
        log_odds = fitted.logit(listed.distance, match_fraction=0.5)
        t2i, far = fitted.t2i, missing.distance
        probability = fitted.probability(far) if t2i is None else t2i.probability(far, n_gallery=len(chosen))
    whole = {"image": chosen[listed.image], "text": kept[listed.text]}
    whole["better_text"] = np.where(listed.better_text >= 0, kept[listed.better_text], -1)
    whole["better_image"] = np.where(listed.better_image >= 0, chosen[listed.better_image], -1)
    listed = dataclasses.replace(listed, excess=retrieval_model.logit_scale * listed.excess, **whole)
    missing = dataclasses.replace(missing, image=chosen[missing.image], text=kept[missing.text])
    return _Part(listed, log_odds, missing, probability, recalls, n_independent)


def _joined(retrieval_model: Model, data: PairData, parts: Sequence[_Part], about: Mapping[str, Any]) -> Audit:
    """Both lists in their order, with probabilities if all parts have them."""
    _check_above_chance(parts, about["split"])
    listed, missing = joined_rows([p.listed for p in parts]), joined_rows([p.missing for p in parts])
    log_odds = _if_all([p.log_odds for p in parts])
    probability = _if_all([p.match_probability for p in parts])
    fraction = None if log_odds is None else pair_scores.wrong_fraction(log_odds)
    wrong = None if log_odds is None or fraction is None else pair_scores.wrong_probability(log_odds, fraction)
    first = np.argsort(-listed.excess, kind="stable")
    close = np.argsort(missing.distance if probability is None else -probability, kind="stable")
    notes = list(about["notes"])
    if log_odds is None:
        notes.append("The model is not calibrated on held-out pairs, so the audit has no probabilities.")
    return Audit(
        data, some_rows(listed, first), None if wrong is None else wrong[first], fraction,
        None if log_odds is None else pair_scores.wrong_fraction_interval(log_odds), some_rows(missing, close),
        None if probability is None else probability[close],
        {**about, "distance": retrieval_model.distance, "notes": notes},
    )  # fmt: skip


def _if_all(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if len(there) == len(parts) else None


def _at(values: np.ndarray | None, k: int) -> float | None:
    return None if values is None else _number(values[k])


def _number(value: float) -> float | None:
    """A number with six digits for JSON and tables; None if it is infinite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
