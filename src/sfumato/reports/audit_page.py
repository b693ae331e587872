"""The output of an audit: two tables, a page with the images, and a short summary for the console."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.data.images import thumbnail
from sfumato.files import write_atomically, write_json
from sfumato.reports.formatting import clipped, percent, probability
from sfumato.reports.page_files import data_url, render_page
from sfumato.studies.audit import Audit, varied

PAIRS, MISSING, PAGE, FIGURES = "pairs.csv", "missing.csv", "audit.html", "audit.json"

_SHOWN_TEXTS = 4


def write_audit(audit: Audit, folder: Path, top: int, version: str) -> dict[str, Any]:
    """Write all pairs to pairs.csv and missing.csv, and the first of each to audit.json and audit.html.

    Args:
        audit: result of the audit.
        folder: where to write; made if it does not exist.
        top: number of pairs of each kind in audit.json and on the page.
        version: of the program, for the page.

    Returns:
        The content of audit.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pairs, missing, figures = audit.pair_rows(), audit.missing_rows(), audit.to_json(top)
    write_atomically(folder / PAIRS, _table(pairs))
    write_atomically(folder / MISSING, _table(missing))
    write_atomically(folder / PAGE, _page(audit, figures, version))
    write_json(folder / FIGURES, figures)
    return figures


def summary(figures: Mapping[str, Any], shown: int = 5) -> str:
    """The figures of an audit as lines for the console.

    Args:
        figures: of :meth:`~sfumato.studies.audit.Audit.to_json`.
        shown: number of pairs of each kind.

    Returns:
        The lines.
    """
    lines = [
        f"{figures['n_pairs']:,} listed pairs of {figures['n_images']:,} images and {figures['n_texts']:,} texts, split"
        f" {figures['split']}, by {figures['distance']} of {figures['model']}"
    ]
    if figures["wrong_share"] is not None:
        lines.append(
            f"estimated fraction of wrong pairs: {percent(figures['wrong_share'])};"
            f" {figures['suspects']:,} pairs are probably wrong"
        )
    lines.append("listed and probably wrong, sorted by their distance minus the distance to the closest unlisted item:")
    lines += [
        f"  {_likely(row['wrong_probability'], 'wrong')}{row['image']}  {clipped(row['text'], 70)!r}"
        f"  (better: {clipped(row['better_text'] or '-', 50)!r})"
        for row in figures["pairs"][:shown]
    ]
    first = (
        "the closest" if all(row["match_probability"] is None for row in figures["missing"]) else "the most probable"
    )
    lines.append(f"not listed and probably a match, {first} of {figures['candidates']:,} candidates first:")
    lines += [
        f"  {_likely(row['match_probability'], 'match')}{row['image']}  {clipped(row['text'], 70)!r}"
        for row in figures["missing"][:shown]
    ]
    return "\n".join([*lines, *figures["notes"]])


def _likely(value: float | None, what: str) -> str:
    """A probability with its label; empty without a calibration."""
    return "" if value is None else f"{probability(value)} {what}  "


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
    read: dict[int, dict[str, Any]] = {}

    def picture(position: int) -> dict[str, Any] | None:
        if position < 0:
            return None
        if position not in read:
            content = thumbnail(data.images[position])
            read[position] = {"src": data_url(content) if content else None, "name": data.image_ids[position]}
        return read[position]

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
    return render_page("audit.html.j2", values)
