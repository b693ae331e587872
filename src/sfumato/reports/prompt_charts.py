"""Charts of zero-shot classification by the number of prompts kept, as figure C.2 of the PCME++ paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.charts import FIRST, SECOND, STYLE, require_matplotlib, write_drawing
from sfumato.studies.zeroshot import PromptsKept

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_accuracy_by_k(axes: "Axes", kept: PromptsKept) -> None:
    """Top-1 in per cent by the number of prompts that every class keeps, beside prompts in a random order."""
    ks = range(1, len(kept.top1) + 1)
    axes.plot(ks, [100 * value for value in kept.top1], color=FIRST, linewidth=2, label="most certain")
    axes.plot(ks, [100 * value for value in kept.random_top1], color=SECOND, linewidth=2, label="random order")
    axes.set_xlabel("prompts kept")
    axes.set_ylabel("top-1, %")
    axes.legend()


def draw_best_k(axes: "Axes", kept: PromptsKept) -> None:
    """Number of classes by the number of prompts that is best for their own images."""
    from matplotlib.ticker import MaxNLocator

    p = len(kept.top1)
    best = [k for k in kept.best_k if k is not None]
    axes.bar(range(1, p + 1), [best.count(k) for k in range(1, p + 1)], color=FIRST)
    axes.set_xlabel("best number of prompts of a class")
    axes.set_ylabel("classes")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def write_prompt_charts(kept: Sequence[PromptsKept], folder: Path) -> list[Path]:
    """Write prompts_kept-IMAGES.svg and .png for each; a UserError if matplotlib is missing."""
    if not kept:
        return []
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    paths: list[Path] = []
    for one in kept:
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(9, 3.4), layout="constrained")
            left, right = figure.subplots(1, 2)
            draw_accuracy_by_k(left, one)
            draw_best_k(right, one)
        paths += write_drawing(figure, folder, f"prompts_kept-{one.images}")
    return paths
