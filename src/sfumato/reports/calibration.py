"""What `sfumato calibrate` and `sfumato adopt` print, and what verdicts say about an index."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.calibration.fits import N_FOLDS
from sfumato.errors import counted
from sfumato.evaluation.judgements import JudgedFigures
from sfumato.reports.tables import ARROWS, MISSING, compact_interval, percent, print_table, print_wrapped
from sfumato.workflows.judgements import FittedLists, Judged, Refined

if TYPE_CHECKING:
    from sfumato.workflows.adopt import AdoptedModel


def print_calibration(result: dict[str, Any]) -> None:
    """Print the guarantees of a calibration."""
    population = {"planted": "every query has a match", "independent": "some queries have no match"}[result["queries"]]
    pairs = f"{counted(result['pairs'], 'pair')} of the split {result['split']}"
    print_wrapped(f"calibrated by {result['method']} on {pairs}; {result['queries']} queries: {population}")
    for key, name in ARROWS.items():
        if (found := result.get(key)) is None:
            continue
        print()
        sizes = f"{counted(found['n_queries'], 'query', 'queries')}, {counted(found['n_gallery'], 'item')}"
        growth = f"a gallery of twice the size has {2 ** found['growth']:.2f} times as many"
        print_wrapped(f"{name}: {sizes}, {found['matches_per_query']:.2f} matches per query; {growth}", indent=2)
        if (first := found.get("first_hit")) is not None:
            right = f"{first['mean_probability']:.1%} probable on average, right in {first['rate']:.1%}"
            error = f"{first['ece']:.3f}, of perfect probabilities {first['ece_by_chance']:.3f}"
            print_wrapped(f"  first hit: {right}; calibration error {error}", indent=4)
            if first["auroc"] is not None:
                auroc = f"{first['auroc']:.3f}, by the distance alone {first['auroc_of_distance']:.3f}"
                print_wrapped(f"  right against wrong first hits: AUROC {auroc}", indent=4)
        else:
            few = "too few queries for probabilities of hits (about 100 are needed)"
            print_wrapped(f"  {few}: they are those of random pairs, whatever --queries says", indent=4)
        if rows := _guarantees(found):
            print_table("", ["guarantee", "limit of the probability", "what it costs"], rows, running=(1, 2))
        for kind in ("precision", "risk", "coverage"):
            missing = [f"{float(level):.0%}" for level, values in found[kind].items() if _rule(kind, values) is None]
            if missing:
                print_wrapped(f"  {kind} {', '.join(missing)}: cannot be guaranteed from these queries", indent=4)


def _rule(kind: str, values: Any) -> float | None:
    """The threshold, the limit or the radius of a guarantee; None if there is none."""
    return values if kind == "precision" else values["abstain_below" if kind == "risk" else "radius"]


def _guarantees(found: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the guarantees that hold."""
    rows = []
    for level, threshold in found["precision"].items():
        if threshold is not None:
            rows.append([f"precision {float(level):.0%}", f"report above {threshold:.3f}", MISSING])
    for level, values in found["risk"].items():
        if values["abstain_below"] is not None:
            answered = MISSING if values["answered"] is None else f"{values['answered']:.0%} of the queries answered"
            rows.append([f"risk {float(level):.0%}", f"answer above {values['abstain_below']:.3f}", answered])
    for level, values in found["coverage"].items():
        if values["radius"] is not None:
            items = None if values["size"] is None else counted(round(values["size"]), "item")
            size = MISSING if items is None else f"at most {items} for half of them"
            rows.append([f"coverage {float(level):.0%}", f"all within distance {values['radius']:.4f}", size])
    return rows


_ENOUGH = 100
"""Number of images that calibrate, below which an adoption warns."""


def print_adopted(adopted: "AdoptedModel") -> None:
    """Print what an adoption gave, and what its probabilities are worth beside their baselines."""
    from sfumato.workflows.adopt import METHODS  # here, for calibrations without torch

    images, texts = sum(adopted.n_images.values()), sum(adopted.n_texts.values())
    channels = adopted.run.recipe.model.dim
    left_out = f"; {adopted.n_left_out:,} left out, see problems.jsonl" if adopted.n_left_out else ""
    items = f"{counted(images, 'image')} and {counted(texts, 'text')} of {counted(channels, 'channel')}"
    print_wrapped(f"adopted {items} in {adopted.seconds:.0f} s{left_out}")
    n_texts, n_images = adopted.n_texts["val"], adopted.n_images["val"]
    asking = [(adopted.n_queries.get("t2i", 0), n_texts, "text"), (adopted.n_queries.get("i2t", 0), n_images, "image")]
    used = [f"{n:,} of {counted(of, noun)}" for n, of, noun in asking]
    more = "; adopt(max_queries=...) in Python takes more" if any(n < of for n, of, _ in asking) else ""
    print_wrapped(f"the probabilities are fitted on {' and '.join(used)} of the split val{more}")
    if adopted.comparison:
        rows = []
        for name, found in adopted.comparison.items():
            kept = name == adopted.method
            worse = MISSING if kept else compact_interval(found.worse)
            rows.append([f"{name}, kept" if kept else name, f"{found.log_loss:.3f}", worse, METHODS[name]])
        halves = "fitted on half of the calibrating images and measured on the other half"
        title = f"log loss of first hits (lower is better), {halves}; in brackets 95 % intervals"
        print_table(title, ["method", "log loss", "more", "computed from"], rows, running=(3,))
    if (n := adopted.n_images["val"]) < _ENOUGH:
        print_wrapped(f"warning: only {counted(n, 'image')} calibrate; below {_ENOUGH} all of these figures are rough")
    if adopted.retrieval is None:
        print_wrapped("no split 'test': probabilities are not measured; `sfumato trust` measures them on other pairs")
        return
    retrieval = adopted.retrieval
    items = f"{counted(retrieval.n_images, 'other image')} and {counted(retrieval.n_texts, 'text')}"
    print_wrapped(f"on {items}, with the frozen model's own ranking:")
    for key, name in ARROWS.items():
        both = adopted.hits["served"], adopted.hits["distance"]
        served, alone = (next(f for f in found if f.direction == key and f.hits == 1) for found in both)
        recall, chance = getattr(retrieval, key)["recall@1"], retrieval.chance[key]["recall@1"]
        print_wrapped(f"  {name}: recall@1 {recall:.1%}, chance {chance:.2%}")
        first = f"{served.mean_probability:.1%} probable on average, right in {served.rate:.1%}"
        others = f"by the distance alone {alone.ece:.3f}, of perfect probabilities {served.ece_by_chance:.3f}"
        print_wrapped(f"    first hit {first}; calibration error {served.ece:.3f}, {others}", indent=4)


def print_fitted_lists(found: FittedLists, name: object) -> None:
    """Print what a calibrator of lists was fitted on, and what its probabilities are worth."""
    title = f"{name}: {counted(found.queries, 'query', 'queries')}, {counted(found.judged, 'judged hit')}"
    rows = []
    for one in found.figures:
        figures = [f"{value:.3f}" for value in (one.mean_probability, one.rate, one.ece, one.ece_by_chance)]
        auroc = "undefined" if one.auroc is None else f"{one.auroc:.3f}"
        rows.append(["first hit" if one.hits == 1 else f"first {one.hits} hits", *figures, auroc])
    if found.note:
        print_wrapped(found.note)
    if rows:
        print_table(title, ["", "said", "right", "calibration error", "of perfect probabilities", "AUROC"], rows)
        print_wrapped("Each fifth of the queries by a fit on the others.")
        if found.queries < 30:
            print_wrapped("These queries are few, so figures and probabilities are rough. Judge thirty or more.")
    else:
        print_wrapped(f"{title}. They are too few to measure the probabilities.")
    seem = "Scores of different queries seem comparable, by held-out queries, and are used as such."
    not_so = "Scores of different queries do not seem comparable: only the shape of each list counts."
    print_wrapped(seem if found.comparable else not_so)


_UNKNOWN = "Hits that nobody judged are unknown and do not count. Intervals: 95 %, over queries."


def _calibration_rows(figures: JudgedFigures) -> list[list[str]]:
    by_chance = figures.calibration_error_by_chance
    return [
        ["mean probability", compact_interval(figures.said, percent)],
        ["mean probability minus precision", compact_interval(figures.excess)],
        ["calibration error", compact_interval(figures.calibration_error)],
        ["  of perfect probabilities", MISSING if by_chance is None else f"{by_chance:.3f}"],
    ]


def print_judged(found: Judged, title: str) -> None:
    """Print what verdicts say about the hits of an index."""
    figures, k = found.figures, found.k
    judged = f"{percent(figures.judged)} ({figures.n:,} of {round(figures.n / figures.judged):,} hits)"
    rows = [
        [f"judged fraction of hits 1 to {k}", judged],
        [f"precision of hits 1 to {k}", compact_interval(figures.precision, percent)],
        ["precision of hit 1", compact_interval(figures.first, percent)],
        ["nDCG of judged hits", compact_interval(figures.ndcg)],
        *_calibration_rows(figures),
    ]
    queries, judges = counted(figures.n_queries, "query", "queries"), counted(found.judges, "judge")
    print_table(f"{title}: {queries}, {judges}", ["figure", "value"], rows)
    lost = f" {counted(found.not_found, 'judged pair')} not among these hits." if found.not_found else ""
    print_wrapped(_UNKNOWN + lost)


def print_refined(found: Refined, folder: Path) -> None:
    """Print what a refinement by verdicts changed."""
    columns = zip(_calibration_rows(found.before), _calibration_rows(found.after), strict=True)
    rows = [[name, before, after] for (name, before), (_, after) in columns]
    judged = f"{counted(found.n, 'judged hit')} of {counted(found.n_queries, 'query', 'queries')}"
    print_table(f"{folder}: {judged}", ["figure", "before", "after"], rows)
    precision = compact_interval(found.before.precision, percent)
    first = f"{percent(found.judged)} of the first hits are judged."
    columns_are = "Before: packaged constants. After: each query with the verdicts on the others."
    print_wrapped(f"Precision {precision}. {first} {columns_are} {_UNKNOWN}")
    if found.not_found:
        others = "not among these hits, or of searches in other languages or for a time or place"
        print_wrapped(f"{counted(found.not_found, 'judged pair')} left out: {others}.")
    if found.changed:
        print_wrapped(f"Refined: {' and '.join(found.changed)}. Searches of {folder} use it from now on.")
    else:
        few = f" Verdicts on {counted(found.n_queries, 'query', 'queries')} are too few; at least {N_FOLDS} are needed."
        stay = "The packaged constants stay, or are used again: no change is clearly better. More verdicts may tell."
        print_wrapped(stay + (few if found.n_queries < N_FOLDS else ""))
