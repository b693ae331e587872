"""What verdicts say about an index, for a terminal."""

from pathlib import Path

from sfumato.calibration.fits import N_FOLDS
from sfumato.errors import counted
from sfumato.evaluation.judgements import JudgedFigures
from sfumato.metrics.bootstrap import Interval
from sfumato.reports.tables import MISSING, compact_interval, percent, print_table, print_wrapped
from sfumato.workflows.judgements import Judged, Refined

_UNKNOWN = "Hits that nobody judged are unknown and do not count. Intervals: 95 %, over queries."


def _percents(value: Interval) -> str:
    if value.low is None or value.high is None:
        return percent(value.value)
    return f"{percent(value.value)} [{percent(value.low)}, {percent(value.high)}]"


def _calibration_rows(figures: JudgedFigures) -> list[list[str]]:
    by_chance = figures.calibration_error_by_chance
    return [
        ["mean probability", _percents(figures.said)],
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
        [f"precision of hits 1 to {k}", _percents(figures.precision)],
        ["precision of hit 1", _percents(figures.first)],
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
    print_wrapped(
        f"Precision {_percents(found.before.precision)}. {percent(found.judged)} of the first hits are judged."
        f" Before: packaged constants. After: each query with the verdicts on the others. {_UNKNOWN}"
    )
    if found.not_found:
        print_wrapped(f"{counted(found.not_found, 'judged pair')} left out: not among the hits of this collection.")
    if found.changed:
        print_wrapped(f"Refined: {' and '.join(found.changed)}. Searches of {folder} use it from now on.")
    else:
        few = f" Verdicts on {counted(found.n_queries, 'query', 'queries')} are too few; at least {N_FOLDS} are needed."
        print_wrapped(
            "The packaged constants stay, or are used again: no change is clearly better. More verdicts may tell."
            + (few if found.n_queries < N_FOLDS else "")
        )
