"""ECCV Caption in small: several models propose pairs, people judge them, every model is measured on what they said.

Chun et al., ECCV 2022: of each query the best candidates of several models make a pool, so that no model decides alone
what can be found. The matches of the data stand, and pairs of the pool join them that most people call a match.
"""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from sfumato.data.pairs import PairData
from sfumato.errors import UserError
from sfumato.files import write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import DIRECTIONS
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import load_run
from sfumato.reports.tables import Table
from sfumato.search.exact import rank_relevant, top_k

METRICS = ("map@r", "r_precision", "recall@1")

GRADES = ("100% yes", "weak yes", "weak no", "100% no")
"""Of a judged pair, by the fraction of people who said yes: all, at least half, some, none."""

Pair = tuple[int, int]
"""Positions of an image and a text."""


@dataclass
class Pool:
    """The candidates of several models on one split."""

    data: PairData
    embedded: dict[str, tuple[GaussianEmbedding, GaussianEmbedding, Any]] = field(default_factory=dict)
    proposed: dict[Pair, list[str]] = field(default_factory=dict)  # and by which models

    def add(self, name: str, images: GaussianEmbedding, texts: GaussianEmbedding, distance: Any, k: int) -> None:
        """Add the k best texts of every image and the k best images of every text that the data do not list."""
        self.embedded[name] = images, texts, distance
        own = set(map(tuple, self.data.pairs.tolist()))
        for_images = top_k(images, texts, k, distance.for_direction("i2t"))[1]
        for_texts = top_k(texts, images, k, distance.for_direction("t2i"))[1]
        found = {(i, t) for i, row in enumerate(for_images.tolist()) for t in row}
        found |= {(i, t) for t, row in enumerate(for_texts.tolist()) for i in row}
        for pair in sorted(found - own):
            self.proposed.setdefault(pair, []).append(name)


def read_pool(runs: Sequence[Path], split: str, k: int) -> Pool:
    """Embed the split of every run, which all have to share, and pool the candidates."""
    pool = None
    for folder in runs:
        run = load_run(folder)
        loaded = load_split(run.model, run.recipe.data, split)
        pool = pool or Pool(loaded.data)
        if (loaded.data.image_ids, loaded.data.text_ids) != (pool.data.image_ids, pool.data.text_ids):
            raise UserError(f"{folder}: its split {split} has other images or texts than that of {runs[0]}")
        pool.add(folder.name, *embed_split(run.model, loaded), run.ranking_distance(), k)
    assert pool is not None
    return pool


def read_judgements(path: Path, data: PairData) -> dict[Pair, float]:
    """Pair -> fraction of people who said yes, of a table with the columns image, caption_id, yes and no.

    A caption is a text id, or IMAGE#K for the K-th text of an image, from 0. Pairs of other splits are left out.
    """
    images, texts = ({one: k for k, one in enumerate(ids)} for ids in (data.image_ids, data.text_ids))
    n_texts = Counter[int]()
    for i, t in data.pairs.tolist():
        texts[f"{data.image_ids[i]}#{n_texts[i]}"] = t
        n_texts[i] += 1
    found = {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if missing := {"image", "caption_id", "yes", "no"} - set(rows.fieldnames or ()):
            raise UserError(f"{path}: no column {min(missing)!r}; expected image, caption_id, yes, no")
        for row in rows:
            try:
                yes, no = int(row["yes"]), int(row["no"])
            except (TypeError, ValueError) as error:
                found_here = f"yes is {row['yes']!r} and no is {row['no']!r}"
                raise UserError(f"{path}:{rows.line_num}: {found_here}; expected whole numbers") from error
            if row["image"] in images and row["caption_id"] in texts and yes + no:
                found[images[row["image"]], texts[row["caption_id"]]] = yes / (yes + no)
    if not found:
        raise UserError(f"{path}: none of its pairs is in this split")
    return found


def grade(fraction: float) -> str:
    """The word for a fraction of yes."""
    return GRADES[0 if fraction == 1 else 1 if fraction >= 0.5 else 2 if fraction else 3]


def measure_pool(pool: Pool, judged: Mapping[Pair, float]) -> dict[str, Any]:
    """Positives, and the figures of each model by the data's own matches and by the verified ones.

    Queries are those of whose candidates people judged one or more, as ECCV Caption's are.
    """
    own = set(map(tuple, pool.data.pairs.tolist()))
    asked = {pair: judged[pair] for pair in pool.proposed if pair in judged}
    verified = {pair for pair, fraction in asked.items() if fraction >= 0.5}
    n = len(pool.data.image_ids), len(pool.data.text_ids)
    figures: dict[str, Any] = {name: {} for name in pool.embedded}
    counts = {}
    for side, direction in enumerate(DIRECTIONS):
        queries = np.array(sorted({pair[side] for pair in asked}))
        for truth, pairs in (("own", own), ("verified", own | verified)):
            rows = np.array(sorted(pairs))
            whole = Relevance.from_pairs(rows[:, side], rows[:, 1 - side], n_queries=n[side], n_gallery=n[1 - side])
            relevance = whole.select_queries(queries)
            counts[f"{direction} {truth}"] = int(relevance.counts.sum())
            for name, (images, texts, distance) in pool.embedded.items():
                sides = (images, texts) if side == 0 else (texts, images)
                ranks = rank_relevant(sides[0][queries], sides[1], relevance, distance.for_direction(direction))
                measured = per_query_metrics(ranks, relevance, names=METRICS)
                figures[name] |= {
                    f"{direction} {truth} {m}": fmean(values[~np.isnan(values)]) for m, values in measured.items()
                }
        counts[f"{direction} queries"] = len(queries)
    grades = {name: sum(grade(fraction) == name for fraction in asked.values()) for name in GRADES}
    return {"proposed": len(pool.proposed), "judged": len(asked), **grades, "positives": counts, "figures": figures}


def write_pool(pool: Pool, judged: Mapping[Pair, float], folder: Path) -> None:
    """Write pool.csv, which people can be asked, and the matches in the layout of ECCV Caption's lists."""
    folder.mkdir(parents=True, exist_ok=True)
    images, texts = pool.data.image_ids, pool.data.text_ids
    lists: tuple[dict[str, list[str]], dict[str, list[str]]] = {}, {}
    with (folder / "pool.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption_id", "text", "proposed_by", "grade"])
        for (i, t), names in sorted(pool.proposed.items()):
            word = grade(judged[i, t]) if (i, t) in judged else ""
            writer.writerow([images[i], texts[t], pool.data.texts[t], " ".join(names), word])
    verified = [pair for pair in sorted(pool.proposed) if judged.get(pair, 0) >= 0.5]
    for i, t in [*map(tuple, pool.data.pairs.tolist()), *verified]:
        lists[0].setdefault(images[i], []).append(texts[t])
        lists[1].setdefault(texts[t], []).append(images[i])
    for name, found in zip(("image_to_caption", "caption_to_image"), lists, strict=True):
        write_json(folder / f"{name}.json", found)


def pool_table(found: Mapping[str, Any]) -> Table:
    """Each model by the verified matches and, in brackets, by the data's own; per cent."""
    keys = [(f"{d} verified {m}", f"{d} own {m}") for d in DIRECTIONS for m in METRICS]
    heads = ["run", *(f"{d} {m}" for d in DIRECTIONS for m in METRICS)]
    rows = [
        [name, *(f"{100 * f[both[0]]:.1f} ({100 * f[both[1]]:.1f})" for both in keys)]
        for name, f in found["figures"].items()
    ]
    words = ", ".join(f"{found[name]:,} {name}" for name in GRADES)
    counts = ", ".join(f"{name} {n:,}" for name, n in found["positives"].items())
    notes = [f"{found['proposed']:,} pairs proposed, {found['judged']:,} judged: {words}", f"positives: {counts}"]
    return Table("Verified matches; the data's own in brackets", heads, rows, notes=notes)
