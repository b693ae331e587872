"""What filtering prompts by uncertainty is worth: the figures, a table of them, and their files."""

import csv
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sfumato.files import write_atomically, write_json
from sfumato.metrics.selective import Interval


@dataclass(frozen=True)
class Method:
    """A way to make class embeddings, and how often it is right on the reported pictures.

    Attributes:
        name: of the way.
        k: how many prompts of each class it keeps; None where they are weighted.
        top1: share of pictures whose closest class is theirs.
        top5: share with theirs among the five closest; None of five classes or fewer.
        against_all: top1 less that of all prompts, on the same resamples of pictures.
        against_random: top1 less that of as many prompts of each class drawn at random, mean over draws; None where nothing is filtered.
        against_random_order: top1 less that of prompts in a random order, of which K is chosen in the same way, mean over draws: is it the
            uncertainty that helps, or only that something was chosen on labelled pictures?
    """

    name: str
    k: list[int] | None
    top1: Interval | None
    top5: Interval | None
    against_all: Interval | None
    against_random: Interval | None
    against_random_order: Interval | None


@dataclass(frozen=True)
class ZeroShotReport:
    """What :func:`~sfumato.zeroshot.evaluate_zeroshot` found.

    Attributes:
        methods: the rows of the table.
        best_alone: share of pictures that are right at the K that is best for their own class while every class has that K: no
            classifier, as it needs the class to choose; None without the oracle.
        classes: what they are called in prompts.
        templates: with one {}.
        total_variance: of every prompt: a list for each class, in the order of the templates.
        template_top1: share of the reported pictures that each template alone gets right.
        certain_is_right: Spearman over templates of the mean total variance and template_top1; negative where certain templates are the better
            ones, None where either is constant.
        n_images: pictures that are reported on.
        n_chosen_on: pictures that K was chosen on; none of them is reported on.
        n_empty: classes without a picture, which can only be mistaken for others.
        left_out: unusable pictures, each with its reason.
        distance, pooling, seed: how it was done.
    """

    methods: list[Method]
    best_alone: float | None
    classes: list[str]
    templates: list[str]
    total_variance: list[list[float]]
    template_top1: list[float]
    certain_is_right: float | None
    n_images: int
    n_chosen_on: int
    n_empty: int
    left_out: list[str]
    distance: str
    pooling: str
    seed: int

    def verdict(self) -> str:
        """Does each filter help beyond noise, against all prompts and against as many random ones?"""
        said = [
            f"{m.name}: {_points(m.against_all)} points against all prompts, {_judged(m.against_all)};"
            f" {_points(m.against_random_order)} against a random order with K chosen alike, {_judged(m.against_random_order)}."
            for m in self.methods
            if m.against_random is not None
        ]
        return "\n".join(said) or "Nothing was filtered."

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self) | {"verdict": self.verdict()}

    def table(self) -> str:
        """For a person to read; per cent, and points of it, with 95 % intervals."""
        width = max(len(m.name) for m in self.methods)
        chosen = f", K chosen on {self.n_chosen_on} others" if self.n_chosen_on else ""
        lines = [
            f"{self.n_images} pictures of {len(self.classes)} classes{chosen}; by {self.distance}, pooling {self.pooling}",
            f"{'method':<{width}}  {'K':>10}  {'top-1':>17}  {'top-5':>17}  {'against all':>19}"
            f"  {'against random':>19}  {'random order':>19}",
        ]
        for m in self.methods:
            k = "-" if m.k is None else f"{m.k[0]}" if len(set(m.k)) == 1 else f"{min(m.k)} to {max(m.k)}"
            lines.append(
                f"{m.name:<{width}}  {k:>10}  {_share(m.top1):>17}  {_share(m.top5):>17}"
                f"  {_points(m.against_all):>19}  {_points(m.against_random):>19}  {_points(m.against_random_order):>19}"
            )
        if self.best_alone is not None:
            lines.append(
                f"each picture at the K that is best for its own class, which no classifier can: {100 * self.best_alone:.1f}"
            )
        if self.certain_is_right is not None:
            lines.append(
                f"templates: Spearman of mean total variance and top-1 of each alone {self.certain_is_right:+.2f}"
            )
        if self.n_empty:
            lines.append(f"classes without a picture, which others can only be mistaken for: {self.n_empty}")
        if self.left_out:
            lines.append("\n  ".join([f"{len(self.left_out)} left out:", *self.left_out[:10]]))
        return "\n".join([*lines, self.verdict()])

    def write(self, folder: Path) -> None:
        """Write zeroshot.json, and prompts.csv with the total variance of every prompt."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "zeroshot.json", self.to_json())
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["class", "template", "total_variance"])
        for name, row in zip(self.classes, self.total_variance, strict=True):
            writer.writerows([name, template, value] for template, value in zip(self.templates, row, strict=True))
        write_atomically(folder / "prompts.csv", text.getvalue())


def _judged(difference: Interval | None) -> str:
    if difference is None or difference.low is None or difference.high is None:
        return "not measured"
    return "which helps" if difference.low > 0 else "which hurts" if difference.high < 0 else "within noise"


def _share(one: Interval | None, sign: str = "") -> str:
    if one is None or one.value is None:
        return "-"
    low, high = (None if end is None else f"{100 * end:{sign}.1f}" for end in (one.low, one.high))
    return f"{100 * one.value:{sign}.1f}" + (f" [{low}, {high}]" if low and high else "")


def _points(one: Interval | None) -> str:
    return _share(one, "+")
