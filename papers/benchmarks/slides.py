"""What the talk shows and the papers only describe: two tables, two drawings, and the two-dimensional study in motion.

python -m papers.benchmarks.slides negatives             positives of COCO, CxC and ECCV Caption, by the package
python -m papers.benchmarks.slides preference            four rankings: metrics beside what people prefer
python -m papers.benchmarks.slides weights FOLDER        PCME's gradients by pairs of samples (3.2.2, A.2)
python -m papers.benchmarks.slides saturation FOLDER     gradients of matches and of others by their distance
python -m papers.benchmarks.slides toy FILE.gif [METHOD] the samples while they are trained
python -m papers.benchmarks.slides plausible FOLDER INSTANCES IMAGES    PCME's figures C.1 and C.2, of COCO
"""

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from papers.drawing import write_drawing
from papers.shown import markdown
from papers.studies.toy import toy_data, train_toy
from papers.tables.drawn import show_image
from sfumato.charts import FIRST, INK, SECOND, SOFT, new_axes, require_matplotlib
from sfumato.evaluation.benchmark_ground_truths import eccv_caption
from sfumato.files import read_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.pcmepp import PCMEPPOptions, pcmepp_loss
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.reports.tables import Table

RELEVANT = 9
"""Images that match the talk's caption "A train on a train track near many trees"."""

RANKINGS: dict[str, tuple[list[int], float]] = {
    "only the first is right": ([0], 10.66),
    "only the first is wrong": ([*range(1, RELEVANT)], 70.85),
    "only the fifth is right": ([4], 4.89),
    "the first five are wrong": ([*range(5, RELEVANT)], 13.15),
}
"""Ranks from 0 of the images that are found, and people's preference in per cent as printed."""

N_SAMPLES, EVERY, UPDATES = 7, 10, 500
"""Samples of an item, as in PCME; updates between two pictures; updates in all."""


def false_negatives() -> Table:
    """Positives of ECCV Caption's queries by three ground truths, and how many times those of COCO."""
    truths = eccv_caption()
    asked = {side: getattr(truths["eccv"], side).totals > 0 for side in ("t2i", "i2t")}
    counts = {
        name: [int(getattr(truths[key], side).totals[asked[side]].sum()) for side in asked]
        for name, key in (("COCO", "coco_5k"), ("CxC", "cxc"), ("ECCV Caption", "eccv"))
    }
    rows = [
        [name, *(f"{n:,} (×{n / own:.2f})" for n, own in zip(found, counts["COCO"], strict=True))]
        for name, found in counts.items()
    ]
    heads = ["ground truth", *(f"positive {what} of {int(asked[side].sum()):,} queries" for side, what in _WHAT)]
    return Table("Positives", heads, rows)


_WHAT = (("t2i", "images"), ("i2t", "captions"))


def preference() -> Table:
    """Recall and precision of the four rankings beside the preference."""
    rows = []
    for name, (found, liked) in RANKINGS.items():
        ranks = np.array([*found, *range(1000, 1000 + RELEVANT - len(found))])
        relevance = Relevance.from_pairs(np.zeros(RELEVANT, int), np.arange(RELEVANT), n_queries=1, n_gallery=2000)
        figures = per_query_metrics(ranks, relevance, names=("recall@1", "recall@5", "map@r"))
        rows.append([name, *(f"{100 * float(values[0]):.1f}" for values in figures.values()), f"{liked:.2f}"])
    return Table("Rankings", ["ranking", "R@1", "R@5", "mAP@R", "people's preference"], rows)


def sample_weights(logit: Tensor, *, positive: bool) -> dict[str, Tensor]:
    """Weights of the J² pairs of samples in the gradient of PCME's loss, each sums to 1; logit (j, j).

    "printed" is Eq. 5, a softmax of the logits (of their negatives where the pair does not match), "exact" is the
    derivative of -ln mean s(l), or of -ln mean s(-l), divided by 1 - s(±l), and "one instance" that of A.2.
    """
    sign = 1.0 if positive else -1.0
    leaf = (sign * logit.double()).requires_grad_()
    (-functional.logsigmoid(leaf).flatten().logsumexp(0)).backward()
    assert leaf.grad is not None
    best = torch.zeros_like(leaf).flatten()
    best[int(leaf.detach().argmax())] = 1
    return {
        "printed": leaf.detach().flatten().softmax(0).view_as(leaf),
        "exact": -leaf.grad / (1 - leaf.detach().sigmoid()),
        "one instance": best.view_as(leaf),
    }


def draw_weights(folder: Path, *, scale: float = 5.0, bias: float = 5.0) -> list[Path]:
    """The weights by distance, of a match and of a pair that does not match, in 16 dimensions."""
    generator = torch.Generator().manual_seed(0)
    figure: Any = new_axes(9, 3.6, "Weights of pairs of samples in the gradient of PCME").get_figure()
    figure.clear()
    axes = figure.subplots(1, 2, sharey=True)
    for axis, gap, positive in zip(axes, (0.4, 1.2), (True, False), strict=True):
        v, t = (0.2 * torch.randn(N_SAMPLES, 16, generator=generator) for _ in range(2))
        t[:, 0] += gap
        distance = torch.cdist(v, t)
        for (name, weight), mark in zip(
            sample_weights(bias - scale * distance, positive=positive).items(), "ox^", strict=True
        ):
            axis.plot(distance.flatten(), weight.flatten(), mark, label=name, markersize=4, alpha=0.7)
        axis.set_title("match" if positive else "no match", loc="left")
        axis.set_xlabel("distance of the samples")
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_yticks([0, 0.01, 0.1, 1], ["0", "0.01", "0.1", "1"])
        axis.legend()
    axes[0].set_ylabel("weight")
    return write_drawing(figure, folder, "weights")


def saturation(distance: Tensor, *, scale: float = 5.0, bias: float = 5.0) -> dict[str, Tensor]:
    """(k,) derivatives of the match loss by the distance of a match, and of a pair that does not match."""
    found = {}
    for name, label in (("match", 1.0), ("no match", 0.0)):
        leaf = distance.double().sqrt().unsqueeze(1).requires_grad_()
        sides = GaussianEmbedding.point(leaf), GaussianEmbedding.point(torch.zeros_like(leaf[:1]))
        options = PCMEPPOptions(distance="squared_l2", alpha=0.0, beta=0.0)
        match = torch.full((len(leaf), 1), label, dtype=torch.float64)
        loss = pcmepp_loss(*sides, match, options, logit_scale=scale, logit_bias=bias).total * len(leaf) / 2
        (gradient,) = torch.autograd.grad(loss, leaf)
        found[name] = gradient[:, 0] / (2 * leaf.detach()[:, 0])
    return found


def draw_saturation(folder: Path) -> list[Path]:
    """Where a pair stops to teach: matches that are near, others that are far; a false negative is a near other."""
    distance = torch.linspace(0.01, 3, 300)
    axis = new_axes(6, 3.6, "Gradient of the match loss by the distance of a pair, a = b = 5")
    for (name, values), colour in zip(saturation(distance).items(), (FIRST, SECOND), strict=True):
        axis.plot(distance, values, color=colour, label=name)
    axis.axhline(0, color=SOFT, linewidth=0.8)
    axis.set_xlabel("distance")
    axis.legend()
    return write_drawing(axis.get_figure(), folder, "saturation")  # type: ignore[arg-type]


def animate_toy(path: Path, method: str = "csd", *, updates: int = UPDATES) -> list[Path]:
    """Write the samples of the two-dimensional study while they are trained; uncertain ones are dark."""
    from matplotlib.animation import FuncAnimation, PillowWriter

    data, frames = toy_data(torch.Generator().manual_seed(0)), []

    def watch(update: int, samples: GaussianEmbedding) -> None:
        if update % EVERY == 0:
            frames.append((update, samples.mean.clone(), samples.var.mean(1).sqrt()))

    train_toy(data, method, generator=torch.Generator().manual_seed(0), updates=updates, watch=watch)
    axis = new_axes(5, 5)
    reach = max(float(mean.abs().max()) for _, mean, _ in frames)
    colours = [INK if dark else (FIRST, SECOND, SOFT)[k] for k, dark in zip(data.label, data.uncertain, strict=True)]

    def draw(frame: tuple[int, Tensor, Tensor]) -> list[Any]:
        update, mean, deviation = frame
        axis.clear()
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[])
        ratio = float(deviation[data.uncertain].square().mean() / deviation[~data.uncertain].square().mean())
        axis.set_title(f"{method}, update {update}: variance ratio {ratio:.2f}", loc="left")
        return [
            axis.scatter(mean[:, 0], mean[:, 1], s=4 + 12 * deviation.clamp(max=5), c=colours, alpha=0.4, linewidths=0)
        ]

    figure: Any = axis.get_figure()
    FuncAnimation(figure, draw, frames=frames).save(path, PillowWriter(fps=10), dpi=70)
    return [path]


def categories(instances: Path) -> dict[str, set[str]]:
    """The categories in each image that has an object, by its file."""
    loaded, found = read_json(instances), dict[str, set[str]]()
    files = {one["id"]: one["file_name"] for one in loaded["images"]}
    names = {one["id"]: one["name"] for one in loaded["categories"]}
    for one in loaded["annotations"]:
        found.setdefault(files[one["image_id"]], set()).add(names[one["category_id"]])
    return found


def draw_plausible(folder: Path, instances: str, images: str) -> list[Path]:
    """Categories by image, and an image with others that lack or add 0, 1 and 2 of its categories."""
    files, sets = zip(*categories(Path(instances)).items(), strict=True)
    counts, differ = np.array([*map(len, sets)]), np.array([[len(a ^ b) for b in sets] for a in sets])
    np.fill_diagonal(differ, 99)
    query = next(k for k in np.argsort(-counts, kind="stable").tolist() if {0, 1, 2} <= {*differ[k].tolist()})
    titles = ["image", *(f"ζ = {z}: {(differ <= z).sum(1).mean():.2f} others" for z in range(3))]
    figure: Any = new_axes(14, 3, "").get_figure()
    figure.clear()
    first, *others = figure.subplots(1, 5)
    first.bar(*np.unique(counts, return_counts=True))
    first.set(xlabel="categories of an image", ylabel="images", title=f"two or more: {(counts > 1).mean():.0%}")
    for z, (axis, title) in enumerate(zip(others, titles, strict=True)):
        k = int((differ[query] == z - 1).argmax()) if z else query
        show_image(axis, (Path(images) / files[k]).read_bytes(), title)
        axis.set_xlabel(fill(", ".join(sorted(sets[k])), 24))
    return write_drawing(figure, folder, "plausible")


TABLES: dict[str, Callable[[], Table]] = {"negatives": false_negatives, "preference": preference}
DRAWINGS: dict[str, Callable[..., list[Path]]] = {
    "weights": draw_weights,
    "saturation": draw_saturation,
    "toy": animate_toy,
    "plausible": draw_plausible,
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in {**TABLES, **DRAWINGS}:
        sys.exit(__doc__)
    name, *rest = sys.argv[1:]
    if name in TABLES:
        return print(markdown(TABLES[name]()))
    require_matplotlib()
    where = Path(rest[0])
    (where.parent if where.suffix else where).mkdir(parents=True, exist_ok=True)
    for path in DRAWINGS[name](where, *rest[1:]):
        print(path)


if __name__ == "__main__":
    main()
