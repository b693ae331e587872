"""Audit of the pairs of a split with one model, or with models that were each trained on the other parts.

audit_scores.py computes the scores. This module determines the listed pairs and the training data of each model.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.data.noise import apply_noise, load_noise, shuffle_pairs
from sfumato.data.pairs import PairData, images_of_part
from sfumato.data.problems import Problems
from sfumato.data.sources import DataConfig
from sfumato.errors import UserError
from sfumato.models.embed import RetrievalModel
from sfumato.models.run import Run, load_run
from sfumato.models.splits import PreparedSplit, embed_split, load_split, load_splits, prepare_split
from sfumato.progress import progress_bar, say
from sfumato.studies.audit_scores import ListedScores, MissingScores, audit_pairs, wrong_fraction, wrong_probability
from sfumato.training.loop import fit

REPEATED = 3
"""An image or a text is shown at most this often in a list; the tables have all pairs."""

Scored = ListedScores | MissingScores


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of an audit. Both lists start with the most suspicious pair.

    Attributes:
        data: the listed pairs.
        listed: scores of all listed pairs.
        wrong_probability: (p,) calibrated under the assumption that a fraction of wrong_fraction is wrong; None without
            a calibration.
        wrong_fraction: estimated fraction of wrong pairs; None without a calibration.
        missing: candidates for missing matches.
        match_probability: (c,) calibrated for a random pair at that distance in a gallery of this size; None without a
            calibration.
        metadata: "split", "model", "distance", "cross_fit" and "notes".
    """

    data: PairData
    listed: ListedScores
    wrong_probability: np.ndarray | None
    wrong_fraction: float | None
    missing: MissingScores
    match_probability: np.ndarray | None
    metadata: Mapping[str, Any]

    def pair_rows(self, chosen: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Describe listed pairs for a table.

        Args:
            chosen: positions in the list; all if None.

        Returns:
            For each pair the ids, the texts, the scores, ranks from 1, and the closest unlisted items of both.
        """
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
        """Describe candidates for missing matches for a table.

        Args:
            chosen: positions in the list; all if None.

        Returns:
            For each pair the ids, the text, the scores, and ranks from 1, which are None beyond the closest few.
        """
        every = range(len(self.missing)) if chosen is None else chosen
        return [self._row(self.missing, k, {"match_probability": _at(self.match_probability, k)}) for k in every]

    def to_json(self, top: int) -> dict[str, Any]:
        """Convert to JSON values.

        Args:
            top: number of pairs of each list. An image or a text occurs at most REPEATED times in a list.

        Returns:
            Plain values: sizes, estimates and the first pairs of both lists.
        """
        return {
            **self.metadata,
            "n_images": len(self.data.image_ids),
            "n_texts": len(self.data.text_ids),
            "n_pairs": len(self.listed),
            "wrong_share": self.wrong_fraction,
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
    """Choose the first pairs in which no image and no text occurs more than REPEATED times.

    Args:
        scores: of ordered pairs.
        most: number of pairs at most.

    Returns:
        Their positions, ascending.
    """
    images, texts, chosen = Counter[int](), Counter[int](), list[int]()
    for k, (image, text) in enumerate(zip(scores.image.tolist(), scores.text.tolist(), strict=True)):
        if len(chosen) >= most:
            break
        if images[image] < REPEATED and texts[text] < REPEATED:
            chosen.append(k)
            images[image] += 1
            texts[text] += 1
    return chosen


def audit_model(
    retrieval_model: RetrievalModel, config: DataConfig, split: str, *, name: str, seen: bool = False
) -> Audit:
    """Audit a split of some data with a model.

    Args:
        retrieval_model: the model.
        config: the data; noise is applied as in training.
        split: name of the split.
        name: of the model.
        seen: whether the model was trained on this split; the notes report it.

    Returns:
        The audit.

    Raises:
        UserError: the data has no such split.
    """
    prepared = prepare_listed(retrieval_model, config, split)
    scored = _score(retrieval_model, prepared, np.arange(len(prepared.data.image_ids)))
    notes = [] if not seen else [
        "The model was trained on these pairs and may have memorised wrong ones;"
        " --cross-fit 2 audits with models that were trained on other pairs."
    ]  # fmt: skip
    return _joined(
        retrieval_model, prepared.data, [scored], {"split": split, "model": name, "cross_fit": 0, "notes": notes}
    )


def cross_fit(run: Run, config: DataConfig, n_parts: int, folder: Path) -> Audit:
    """Audit a training split in parts, each with a model that is trained on the other parts.

    Args:
        run: its recipe is trained; its weights are not used.
        config: the data.
        n_parts: number of parts and of trainings; finished trainings in the folder are not repeated.
        folder: receives the runs part-0, part-1 ...

    Returns:
        The joined lists of all parts; pairs across parts are not candidates for missing matches. Scores are in units of
        each model's logit, so they can be compared.

    Raises:
        UserError: n_parts is below 2, or the data has no split "train" or no pair.
    """
    if n_parts < 2:
        raise UserError(f"--cross-fit must be at least 2 parts, got {n_parts}")
    scored, retrieval_model, data = [], None, None
    for part in range(n_parts):
        own = config.model_copy(update={"leave_out": f"{part}/{n_parts}"})
        say(f"part {part + 1} of {n_parts}: training on the others")
        fit(run.recipe.model_copy(update={"data": own}), folder / f"part-{part}")
        retrieval_model = load_run(folder / f"part-{part}", device=next(run.model.parameters()).device)
        prepared = prepare_listed(retrieval_model, config, "train")
        data = prepared.data
        scored.append(_score(retrieval_model, prepared, images_of_part(data, part, n_parts)))
    assert retrieval_model is not None and data is not None
    about = {"split": "train", "model": run.recipe.name or run.folder.name, "cross_fit": n_parts, "notes": []}
    return _joined(retrieval_model, data, scored, about)


def prepare_listed(retrieval_model: RetrievalModel, config: DataConfig, split: str) -> PreparedSplit:
    """Load a split as it is used in training; "train" is noisy if the data configures noise.

    Args:
        retrieval_model: the model that will embed it.
        config: the data.
        split: name of the split.

    Returns:
        The prepared split.

    Raises:
        UserError: the data has no such split.
    """
    if split != "train" or not (config.noise_rate or config.noise_file):
        return load_split(retrieval_model.model, config, split)
    problems = Problems()
    splits = load_splits(config, problems)
    if "train" not in splits:
        raise UserError(f"the data ({config.source}) has no split 'train'; it has {', '.join(splits)}")
    data = splits["train"]
    if config.noise_file:
        image_of_pair = load_noise(config.noise_file, data)
    else:
        _, image_of_pair = shuffle_pairs(data, config.noise_rate, config.noise_seed)
    return prepare_split(retrieval_model.model, apply_noise(data, image_of_pair), problems, split)


@dataclass(frozen=True, eq=False)
class _Part:
    """Scores of one part; positions are those of the whole split, the excess is in units of the model's logit."""

    listed: ListedScores
    log_odds: np.ndarray | None
    missing: MissingScores
    match_probability: np.ndarray | None


def _score(retrieval_model: RetrievalModel, prepared: PreparedSplit, chosen: np.ndarray) -> _Part:
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
    fitted, log_odds, probability = retrieval_model.calibration, None, None
    if fitted is not None and fitted.match_fraction is not None:
        log_odds = fitted.logit(torch.from_numpy(listed.distance), match_fraction=0.5).numpy()
        size = None if fitted.t2i is None else len(chosen)
        probability = fitted.probability(torch.from_numpy(missing.distance), n_gallery=size).numpy()
    whole = {"image": chosen[listed.image], "text": kept[listed.text]}
    whole["better_text"] = np.where(listed.better_text >= 0, kept[listed.better_text], -1)
    whole["better_image"] = np.where(listed.better_image >= 0, chosen[listed.better_image], -1)
    listed = dataclasses.replace(listed, excess=retrieval_model.logit_scale * listed.excess, **whole)
    missing = dataclasses.replace(missing, image=chosen[missing.image], text=kept[missing.text])
    return _Part(listed, log_odds, missing, probability)


def _joined(retrieval_model: RetrievalModel, data: PairData, parts: Sequence[_Part], about: Mapping[str, Any]) -> Audit:
    """Both lists in their order, with probabilities if all parts have them."""
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
