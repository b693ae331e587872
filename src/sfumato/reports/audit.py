"""The audit: its page, its tables, and what its command prints."""

import csv
import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sfumato.charts import data_url, render_page
from sfumato.data.images import FileImage, thumbnail
from sfumato.errors import counted
from sfumato.evaluation.pair_scores import NEIGHBOURS
from sfumato.files import write_atomically, write_json
from sfumato.reports.tables import MISSING, clipped, percent, print_table, print_wrapped, probability
from sfumato.workflows.audit import Audit, varied

PAIRS, MISSING_PAIRS, AUDIT_PAGE, AUDIT_FIGURES = "pairs.csv", "missing.csv", "audit.html", "audit.json"

_SHOWN_TEXTS = 4


def write_audit(audit: Audit, folder: Path, top: int, version: str) -> dict[str, Any]:
    """Write all pairs to pairs.csv and missing.csv, and the first of each to the page and audit.json."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs, missing, figures = audit.pair_rows(), audit.missing_rows(), audit.to_json(top)
    sources = zip(audit.data.image_ids, audit.data.images, strict=True)
    files = {name: source.location for name, source in sources if isinstance(source, FileImage)}
    for name, rows in ((PAIRS, pairs), (MISSING_PAIRS, missing)):
        write_atomically(folder / name, _table([row | {"image_file": files.get(row["image"])} for row in rows]))
    write_atomically(folder / AUDIT_PAGE, _page(audit, figures, version))
    write_json(folder / AUDIT_FIGURES, figures)
    return figures


def print_audit(figures: Mapping[str, Any], shown: int = 5) -> None:
    """Print the figures of an audit."""
    nouns = {"images": "image", "texts": "text", "pairs": "listed pair"}
    sizes = [counted(figures[f"n_{name}"], noun) for name, noun in nouns.items()]
    others = [f"--split {name} ({counted(n, 'image')})" for name, n in figures["other_splits"].items()]
    elsewhere = f". Others are checked with {' or '.join(others)}" if others else ""
    checked = f"the split {figures['split']}: {', '.join(sizes)}, by {figures['distance']} of {figures['model']}"
    print_wrapped(f"checked {checked}{elsewhere}")
    for sentence in wrong_pairs(figures):
        print_wrapped(sentence, indent=2)
    print()
    suspects = figures["pairs"][:shown]
    texts = [[row["image"], clipped(row["text"]), clipped(row["better_text"] or MISSING)] for row in suspects]
    rows = [[_suspicion(row["wrong_probability"]), *own] for row, own in zip(suspects, texts, strict=True)]
    of_all = [row["wrong_probability"] for row in figures["pairs"]]
    if of_all and all(p is not None and p < _UNSUSPICIOUS for p in of_all):
        some = figures["n_pairs"] > len(of_all)
        pairs = f"each of the {counted(len(of_all), 'least certain pair')}" if some else "every listed pair"
        below = f"is wrong with a probability below {_UNSUSPICIOUS:.0%}"
        found = f"nothing is suspicious: {pairs} {below}; {PAIRS} has all pairs, the least certain first"
        print_wrapped(found, indent=2)
    else:
        title = f"the most suspicious listed pairs, by distance minus that of the {NEIGHBOURS} closest unlisted items"
        print_table(title, ["wrong", "image", "text", "closest unlisted text"], rows, left=2, running=(2, 3))
    first = "closest" if all(row["match_probability"] is None for row in figures["missing"]) else "most probable"
    missing = figures["missing"][:shown]
    rows = [[probability(row["match_probability"]), row["image"], clipped(row["text"])] for row in missing]
    print()
    title = f"unlisted pairs that may match, the {first} of {counted(figures['candidates'], 'candidate')}"
    print_table(title, ["match", "image", "text"], rows, left=2, running=(2,))
    for note in figures["notes"]:
        print_wrapped(note)


_VAGUE = 0.5
"""Width of the interval of the fraction of wrong pairs from which the fraction is not stated."""


def wrong_pairs(figures: Mapping[str, Any]) -> list[str]:
    """Sentences on how many listed pairs are wrong; none without a calibration.

    The expected number and the number of pairs that are more likely wrong than right differ: a wrong pair that looks
    nearly right has a small probability, and is expected without being named.
    """
    fraction, n = figures["wrong_share"], figures["n_pairs"]
    if fraction is None:
        return []
    low, high = figures["wrong_share_interval"]
    if high - low > _VAGUE:
        between = f"between {percent(low, 0)} and {percent(high, 0)}"
        return [f"how many are wrong cannot be estimated from these pairs: {between}"]
    suspects = figures["suspects"]
    more = f"{suspects:,} of them {'is' if suspects == 1 else 'are'} more likely wrong than right"
    interval = f"95% interval {percent(low)} to {percent(high)}"
    about = f"about {round(fraction * n):,} of {n:,} are wrong: {percent(fraction)} by their distances ({interval})"
    return [about, more if suspects else "no single pair is more likely wrong than right"]


_UNSUSPICIOUS = 0.01
"""Probability of being wrong below which a pair is not called suspicious."""


def _suspicion(value: float | None) -> str:
    """A probability with the digits that rank small ones; a dash without a calibration."""
    if value is None or value >= _UNSUSPICIOUS:
        return probability(value)
    return f"{value:.2%}" if value >= 1e-4 else "<0.01%"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    if rows:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file.getvalue()


def _page(audit: Audit, figures: Mapping[str, Any], version: str) -> str:
    data, listed, missing = audit.data, audit.listed, audit.missing
    relevance = data.relevance()
    of_text = relevance.transpose()

    @cache
    def picture(position: int) -> dict[str, Any] | None:
        if position < 0:
            return None
        content = thumbnail(data.images[position])
        return {"src": data_url(content) if content else None, "name": data.image_ids[position]}

    def texts(image: int, but: int) -> list[str]:
        """The other texts that are listed for an image."""
        own = relevance.indices[relevance.indptr[image] : relevance.indptr[image + 1]]
        return [clipped(data.texts[t]) for t in own if t != but][:_SHOWN_TEXTS]

    wrong, unlisted = [], []
    for k, row in zip(varied(listed, len(figures["pairs"])), figures["pairs"], strict=True):
        image, text = int(listed.image[k]), int(listed.text[k])
        beside = {"picture": picture(image), "better": picture(int(listed.better_image[k]))}
        wrong.append(row | beside | {"others": texts(image, text), "percent": probability(row["wrong_probability"])})
    for k, row in zip(varied(missing, len(figures["missing"])), figures["missing"], strict=True):
        image, text = int(missing.image[k]), int(missing.text[k])
        own = of_text.indices[of_text.indptr[text] : of_text.indptr[text + 1]]
        beside = {"picture": picture(image), "better": picture(int(own[0]) if len(own) else -1)}
        unlisted.append(row | beside | {"others": texts(image, text), "percent": probability(row["match_probability"])})
    values = {"figures": figures, "wrong": wrong, "unlisted": unlisted, "version": version}
    values["wrong_pairs"] = wrong_pairs(figures)
    return render_page("audit.html.j2", values)
