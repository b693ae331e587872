"""The figures of the papers, as images and in words."""

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.drawing import draw_ellipses, make_plane, write_drawing
from papers.studies import pages
from papers.tables import said
from papers.tables.figure_numbers import Figure
from papers.tables.items import data_sets
from papers.tables.printed import averaged_over
from sfumato.charts import CARD, FAINT, FAMILIES, FIRST, INK, SECOND, SOFT, STYLE, draw_curve, require_matplotlib
from sfumato.files import write_json
from sfumato.reports.report_charts import draw_recall_bins
from sfumato.reports.tables import DIRECTIONS, clipped, digits, in_words, print_wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


COLOURS = (FIRST, SECOND, *FAMILIES)
"""Of the series of a panel, and again from the first."""

_PANEL = (4.4, 3.3)

_PAIRS, _WIDE = 2, 10

_MOSAIC: list[Any] = [["first", "second", "mixup", "plane"], ["erased_first", "erased_second", "cutmix", "plane"]]


def write_figure(figure: Figure, folder: Path) -> list[Path]:
    """Write figure.json, figure.png and figure.svg; the paths."""
    require_matplotlib()
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "figure.json", figure.to_json())
    with matplotlib.rc_context(STYLE | {"font.size": 10}):
        drawing = DRAWN.get(figure.item.draw, _curves)(figure)
        width = int(12.5 * drawing.get_figwidth())
        drawing.suptitle("\n".join(textwrap.wrap(title(figure), width)), x=0.01, ha="left", fontsize=10)
        return [folder / "figure.json", *write_drawing(drawing, folder, "figure")]


def title(figure: Figure) -> str:
    """What a figure shows, and of which data."""
    about = f"{figure.item.id}: {figure.item.about}"
    if not figure.runs:
        return about
    ours = f"{figure.data.title}, split {figure.split}, {averaged_over(figure.n_seeds, figure.n_variants)}"
    return f"{about}. {ours}" if figure.same_data else f"{figure.item.id} on {ours}. In the paper: {figure.item.about}"


def print_figure(figure: Figure) -> None:
    """Print the most telling numbers."""
    for line in figure_lines(figure):
        print_wrapped(line)


def figure_lines(figure: Figure) -> list[str]:
    """The most telling numbers in words, and what a reader has to know."""
    lines = [f"{title(figure)}.", *said.lines(figure.item.draw, figure.numbers)]
    if figure.runs and figure.data.name != figure.item.benchmark:
        lines.append(f"The paper's figure is of other data, {data_sets()[figure.item.benchmark].title}.")
    if figure.data.overrides:
        lines.append(f"Changed in all recipes: {', '.join(figure.data.overrides)}.")
    lines += [f"{reason}." for reason in figure.failed]
    if figure.item.runs and (left := [row for row in figure.item.labels if row not in figure.runs]):
        lines.append(f"Not repeated: {'; '.join(left)}.")
    return lines + ([figure.item.note] if figure.item.note else [])


def _drawing(width: float, height: float) -> "Drawing":
    from matplotlib.figure import Figure as Drawing

    return Drawing(figsize=(width, height), layout="constrained")


def _grid(n: int, size: tuple[float, float] = _PANEL, columns: int = 2) -> "tuple[Drawing, list[Axes]]":
    """A drawing of n panels, row by row."""
    across = min(n, columns)
    down = -(-n // across)
    drawing = _drawing(across * size[0], down * size[1] + 0.5)
    axes = list(drawing.subplots(down, across, squeeze=False).flat)
    for unused in axes[n:]:
        unused.axis("off")
    return drawing, axes[:n]


def _curves(figure: Figure) -> "Drawing":
    from matplotlib.ticker import MaxNLocator

    panels = figure.numbers["panels"]
    drawing, axes = _grid(len(panels))
    colours = _colours(dict.fromkeys(name for panel in panels for name in panel["series"]))
    for ax, panel in zip(axes, panels, strict=True):
        few = max(map(len, panel["series"].values())) <= 12
        for name, points in panel["series"].items():
            draw_curve(ax, points, colours[name], label=name, markers=few)
        if panel["look"] == "logarithmic":
            _logarithmic(ax, panel)
        if panel["look"] == "marked":
            xs = sorted({p["x"] for points in panel["series"].values() for p in points})
            ax.set_xticks(xs, [f"{x:g}" for x in xs])
        elif panel["x"] == "epoch":
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if panel["y"] == "fraction":  # Of two choices: chance is one half.
            ax.set_ylim(0, 1)
            ax.axhline(0.5, color=FAINT, linestyle="--", linewidth=1)
        known = panel["name"] in pages.CORRUPTIONS
        ax.set_xlabel(pages.CORRUPTIONS[panel["name"]][1] if known else panel["x"])
        ax.set_ylabel(f"mean {said.words(panel['y'])}" if known else said.words(panel["y"]))
        ax.set_title(said.PARTS.get(panel["name"], panel["name"]), loc="left")
        ax.grid(axis="y")
        if len(panel["series"]) > 1:
            ax.legend(ncols=2, fontsize=9)
    return drawing


def _logarithmic(ax: "Axes", panel: Mapping[str, Any]) -> None:
    """A logarithmic vertical axis with plain numbers, if the values differ by factors."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    values = [p["value"] for points in panel["series"].values() for p in points]
    if max(values) > 20 * min(values) > 0:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.minorticks_off()


def _colours(names: Iterable[str]) -> dict[str, str]:
    return {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}


def _bars(figure: Figure) -> "Drawing":
    panels = figure.numbers["panels"]
    drawing, axes = _grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        bins = panel["bins"]
        draw_recall_bins(ax, [b["value"] for b in bins], [(b["low"], b["high"]) for b in bins])
        ax.set_xlabel(f"tenths by {in_words(figure.numbers['uncertainty'])}, ascending")
        ax.set_title(f"{panel['row']}, {DIRECTIONS[panel['name']]}", loc="left")
        ax.grid(axis="y")
    for ax in axes:  # One scale, so that a low recall does not look like a high one.
        ax.set_ylim(0, max(other.get_ylim()[1] for other in axes))
    return drawing


def _maps(figure: Figure) -> "Drawing":
    maps = figure.numbers["maps"]
    apart = figure.item.options.get("sides") == "apart"
    panels = [(row, study, side) for row, study in maps.items() for side in (said.SIDES if apart else ("",))]
    drawing, axes = _grid(len(panels), (5.2, 4.6))
    for ax, (row, study, side) in zip(axes, panels, strict=True):
        shown = [item for item in study["items"] if not side or item["side"] == side]
        ellipses, times = pages.map_ellipses({**study, "items": shown})
        make_plane(ax)
        draw_ellipses(ax, ellipses, times)
        name = ", ".join(filter(None, (row, said.SIDES.get(side))))
        meaning = _meaning(study, shown, times)
        dashed = "" if side or meaning == "points" else "; dashed: texts"
        ax.set_title(f"{name}: {meaning}{dashed}", loc="left", fontsize=10)
    families = pages.family_names(next(iter(maps.values())), 30)
    marks = {FIRST: "other images", SECOND: "other texts"} | {FAMILIES[k]: name for k, name in families.items()}
    _legend(drawing, marks, columns=2)
    return drawing


def _meaning(study: Mapping[str, Any], shown: Sequence[Mapping[str, Any]], times: float) -> str:
    """What the ellipses of a map are."""
    if not any(item["total_variance"] for item in shown):
        return "points"
    larger = f" drawn {times:g} times as large" if times != 1 else ""
    return "areas are total variances" if study["method"] == "tsne" else f"one standard deviation{larger}"


def _legend(drawing: "Drawing", marks: Mapping[str, str], *, columns: int) -> None:
    """Colours and what they stand for, below a drawing."""
    from matplotlib.lines import Line2D

    dots = [Line2D([], [], color=colour, marker="o", linestyle="", label=label) for colour, label in marks.items()]
    drawing.legend(handles=dots, loc="outside lower left", ncols=columns, fontsize=9)


def _scatter(figure: Figure) -> "Drawing":
    panels = figure.numbers["panels"]
    drawing, axes = _grid(len(panels))
    colours = _colours(figure.runs)
    for ax, panel in zip(axes, panels, strict=True):
        for k, point in enumerate(panel["points"]):
            x, y = point["x"], point["y"]
            marker, colour = "os^Dv"[k // len(COLOURS)], colours[point["row"]]
            ax.plot(x["value"], y["value"], marker, color=colour, markersize=7, label=point["row"])
            if x["low"] is not None:
                ax.hlines(y["value"], x["low"], x["high"], color=colour, linewidth=1.2)
                ax.vlines(x["value"], y["low"], y["high"], color=colour, linewidth=1.2)
        ax.set(xlabel=said.words(panel["x"]), ylabel=said.words(panel["y"]))
        ax.set_title(DIRECTIONS[panel["name"]], loc="left")
        ax.grid(axis="y")
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=9)
    return drawing


def _matrices(figure: Figure) -> "Drawing":
    matrices = figure.numbers["matrices"]
    drawing, axes = _grid(len(matrices), (3.0, 3.0), columns=3)
    for ax, (name, rows) in zip(axes, matrices.items(), strict=True):
        most = max(abs(value) for row in rows for value in row)
        shown = ax.imshow([[value / most for value in row] for row in rows], cmap="RdBu", vmin=-1, vmax=1)
        ax.set(xticks=[], yticks=[], xlabel="texts", ylabel="images")
        ax.set_title(name, loc="left", fontsize=10)
    drawing.colorbar(shown, ax=axes, shrink=0.7, label="derivative by the distance\n(largest of a loss = 1)")
    return drawing


def _prompts(figure: Figure) -> "Drawing":
    kept = figure.numbers["kept"]
    drawing, (left, right) = _grid(2)
    pages.draw_accuracy_by_k(left, kept)
    pages.draw_best_k(right, kept)
    return drawing


def _sets(figure: Figure) -> "Drawing":
    pairs = figure.numbers["shown"][:_PAIRS]
    drawing = _drawing(_WIDE, 2.6 * len(pairs) + 0.5)
    for rows, pair in zip(drawing.subfigures(len(pairs), 1, squeeze=False).flat, pairs, strict=True):
        axes = rows.subplot_mosaic(_MOSAIC, width_ratios=[1, 1, 1, 3.2])
        pictures = {str(item["name"]): str(item["picture"]) for item in pair["items"]}
        for name, (letter, colour, about) in pages.MADE.items():
            heading = textwrap.fill(f"{letter}: {about}", 24)
            show_image(axes[name], figure.pictures.get(pictures[name]), heading, colour)
            axes[name].title.set_fontsize(8)
        make_plane(axes["plane"])
        ellipses, times = pages.pair_ellipses(pair)
        draw_ellipses(axes["plane"], ellipses, pages.DRAWN_SIGMAS * times)
        larger = f", drawn {times:g} times as large" if times != 1 else ""
        axes["plane"].set_title(f"ellipses of {pages.DRAWN_SIGMAS} standard deviations{larger}", fontsize=9, color=SOFT)
    return drawing


def show_image(ax: "Axes", content: bytes | None, heading: str = "", colour: str = INK) -> None:
    """An image without ticks; an empty frame if there is none."""
    from PIL import Image

    ax.set(xticks=[], yticks=[])
    if content is not None:
        with Image.open(io.BytesIO(content)) as picture:
            ax.imshow(picture.convert("RGB"))
    ax.set_title(heading, color=colour, fontsize=10)


def _word_table(figure: Figure) -> "Drawing":
    sides = figure.numbers["sides"]
    most = max(len(one["words"]) for bins in sides.values() for one in bins)
    drawing = _drawing(12, (0.21 * most + 0.7) * len(sides) + 0.5)
    for ax, (side, bins) in zip(drawing.subplots(len(sides), 1, squeeze=False).flat, sides.items(), strict=True):
        ax.axis("off")
        ax.set(xlim=(0, len(bins)), ylim=(most + 1.2, 0))
        ax.set_title(f"{said.SIDES[side]}, from the most certain tenth to the least", loc="left")
        for k, one in enumerate(bins):
            ax.text(k, 0.6, digits(one["mean"], 3), color=SOFT, fontsize=8, va="center")
            for i, word in enumerate(one["words"]):
                colour = FIRST if side == "image" else SECOND
                ax.text(k, i + 1.6, clipped(word["word"], 14), fontsize=9, va="center", color=colour)
    return drawing


def _examples(figure: Figure) -> "Drawing":
    numbers = figure.numbers
    rows = [one for found in numbers["sides"].values() for one in found]
    across = 1 + max(len(one["results"]) for one in rows)
    drawing = _drawing(1.9 * across, 1.75 * len(rows) + 0.6)
    for axes, one in zip(drawing.subplots(len(rows), across, squeeze=False), rows, strict=True):
        value = f"{in_words(numbers['uncertainty'])} {said.plain(one['uncertainty'])}"
        _item(axes[0], one["query"], figure, INK, value)
        for ax in axes[1 + len(one["results"]) :]:
            ax.axis("off")
        for ax, result in zip(axes[1:], one["results"], strict=False):
            _item(ax, result, figure, FIRST if result["true"] else FAINT)
    _legend(drawing, {INK: "query", FIRST: "result, a match of the data", FAINT: "other result"}, columns=3)
    return drawing


def _item(ax: "Axes", item: Mapping[str, Any], figure: Figure, colour: str, heading: str = "") -> None:
    """A text in its frame, or an image; the id and a caption of one that cannot be read."""
    content = figure.pictures.get(item.get("picture") or "")
    show_image(ax, content, heading, SOFT)
    ax.title.set_fontsize(8)
    for spine in ax.spines.values():
        spine.set(visible=True, color=colour, linewidth=2)
    if content is None:
        ax.set(xlim=(0, 1), ylim=(0, 1), facecolor=CARD)
        ax.set_box_aspect(1)
        text = item["text"] if "text" in item else f"{item['id']}: {item['caption']}"
        size, width = (8, 19) if len(text) > 40 else (12, 12)
        ax.text(0.5, 0.5, textwrap.fill(clipped(text, 110), width), ha="center", va="center", fontsize=size)


def _toy(figure: Figure) -> "Drawing":
    """The samples after training, certain ones over uncertain ones; the area of a dot grows with its deviation."""
    methods = figure.numbers["methods"]
    drawing, axes = _grid(len(methods))
    colours = [
        COLOURS[label + 3 * uncertain]
        for label, uncertain in zip(figure.numbers["label"], figure.numbers["uncertain"], strict=True)
    ]
    order = sorted(range(len(colours)), key=lambda i: not figure.numbers["uncertain"][i])
    for ax, (name, found) in zip(axes, methods.items(), strict=True):
        rows = [found["samples"][i] for i in order]
        ratio = found.get("ratio")
        sizes = [2 * (1.2 + 3.2 * min((u + v) / 2, 25) ** 0.5) if ratio else 4 for _, _, u, v in rows]
        ax.scatter([r[0] for r in rows], [r[1] for r in rows], s=sizes, c=[colours[i] for i in order], alpha=0.4)
        ax.set_title(f"{name}, {f'variance ratio {ratio:.2f}' if ratio else 'points'}", loc="left", fontsize=10)
    return drawing


DRAWN: "dict[str, Callable[[Figure], Drawing]]" = {
    "recall_by_uncertainty": _bars,
    "map": _maps,
    "sets": _sets,
    "words": _word_table,
    "examples": _examples,
    "prompts_kept": _prompts,
    "two_metrics": _scatter,
    "gradients": _matrices,
    "toy": _toy,
}
"""How a kind is drawn; as curves if it is not here."""
