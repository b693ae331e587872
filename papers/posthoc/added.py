"""Anybody's estimators in the referee: a CSV file says how uncertain each query is, and a contestant looks it up.

A query has one number, whatever the gallery: nothing is known of galleries without its matches or of damaged queries.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from papers.posthoc.contestants import Contestant, contestants
from papers.posthoc.frozen_model import FrozenModel, FrozenSplit
from sfumato.errors import UserError, counted, expected_columns
from sfumato.ids import DIRECTION_OF, DIRECTIONS, Side, id_error

COLUMNS = ("method", "split", "direction", "query", "uncertainty")

_SIDE_OF: dict[str, Side] = {direction: side for side, direction in DIRECTION_OF.items()}

_GUIDE = "papers/docs/referee.md, Add your own estimator, shows the ids"


@dataclass(frozen=True, eq=False)
class AddedMethod:
    """The uncertainties of a method that somebody gives."""

    name: str
    path: Path  # of the file
    line: int  # its first
    # By (split, direction) and the id of the query: the uncertainty, larger is less certain; and its line.
    rows: dict[tuple[str, str], dict[str, tuple[float, int]]] = field(default_factory=dict)

    @property
    def sides(self) -> list[Side]:
        """Sides whose queries have an uncertainty."""
        found = {direction for _, direction in self.rows}
        return [side for direction, side in _SIDE_OF.items() if direction in found]

    def contestants(self, model: FrozenModel) -> dict[str, Contestant]:
        """The method as a contestant for each measured split and validation; refused unless its rows fit."""
        splits = {"val": model.val, **model.tests}
        for (split, direction), known in self.rows.items():
            if split not in splits:
                raise UserError(
                    f"{self.path}:{next(iter(known.values()))[1]}: split {split!r} is not measured; expected"
                    f" {', '.join(splits)}. Leave these rows out, or measure the split with --split"
                )
            self._check(split, splits[split], direction)
        for side in self.sides:
            for split in splits:
                if (split, DIRECTION_OF[side]) not in self.rows:
                    fitted = "on which its probability of a right first hit is fitted"
                    raise UserError(
                        f"{self.path}:{self.line}: method {self.name!r} has no rows of split {split}, direction"
                        f" {DIRECTION_OF[side]}; expected a number for each query of {split},"
                        f" {fitted if split == 'val' else 'which is measured'}. Add them, or leave this direction out"
                    )
        return {split: self._contestant(split) for split in splits}

    def _check(self, name: str, split: FrozenSplit, direction: str) -> None:
        """Refuse ids that a split does not have, and queries without an uncertainty."""
        known, side = self.rows[name, direction], _SIDE_OF[direction]
        ids = split.ids(side)
        if not ids:
            raise UserError(
                f"{self.path}:{self.line}: the {side}s of split {name} have no ids, so that {self.name!r} cannot be"
                f" looked up; make it as FrozenSplit(images, texts, pairs, image_ids=..., text_ids=...)"
            )
        if unknown := known.keys() - set(ids):
            line, query = min((known[query][1], query) for query in unknown)
            near = get_close_matches(query, ids[:10_000], n=1) or ids[:1]
            raise UserError(
                f"{self.path}:{line}: {side} {query!r} is not in split {name}; expected the id of one of its"
                f" {counted(len(ids), side)}, such as {near[0]!r} ({_GUIDE})"
            )
        matches = split.relevance(side).counts
        missing = [query for query, n in zip(ids, matches, strict=True) if n and query not in known]
        if missing:
            raise UserError(
                f"{self.path}:{self.line}: method {self.name!r} lacks {len(missing):,} of"
                f" {counted(int((matches > 0).sum()), 'query', 'queries')} of split {name}, direction {direction};"
                f" expected one row for each {side} with a match. Add them, the first is {missing[0]!r}"
            )

    def _contestant(self, name: str) -> Contestant:
        def uncertainty(split: FrozenSplit, side: Side, absent: np.ndarray | None) -> np.ndarray:
            known = self.rows[name, DIRECTION_OF[side]]
            found = np.array([known.get(query, (math.nan,))[0] for query in split.ids(side)])
            return found if absent is None else found[absent]

        return Contestant(f"uncertainties from {self.path.name}", uncertainty, needs_gallery=False, sides=self.sides)


def read_added(paths: Sequence[Path]) -> list[AddedMethod]:
    """The methods of some CSV files, in their order."""
    found: dict[str, AddedMethod] = {}
    for path in paths:
        for line, row in _rows(path):
            name = row["method"]
            method = found.setdefault(name, AddedMethod(name, path, line))
            if method.path != path:
                raise UserError(
                    f"{path}:{line}: method {name!r} stands in {method.path} already; expected all rows of a method in"
                    " one file. Move them, or take another name"
                )
            known = method.rows.setdefault((row["split"], row["direction"]), {})
            if row["query"] in known:
                raise UserError(
                    f"{path}:{line}: query {row['query']!r} has an uncertainty in line {known[row['query']][1]} already"
                    f" (method {name}, split {row['split']}, direction {row['direction']}); keep one of the rows"
                )
            known[row["query"]] = float(row["uncertainty"]), line
    return list(found.values())


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The checked rows of a file with their lines."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if not set(COLUMNS) <= set(reader.fieldnames or ()):
                raise UserError(f"{path}:1: {expected_columns(list(reader.fieldnames or ()), COLUMNS)}")
            row = None
            for row in reader:
                if wrong := _wrong(row):
                    raise UserError(f"{path}:{reader.line_num}: {wrong}")
                yield reader.line_num, row
            if row is None:
                raise UserError(f"{path}:1: no rows; expected one for each query")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; --add takes a CSV file") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not CSV in UTF-8: {error}") from error


def _wrong(row: Mapping[str | None, str | None]) -> str:
    """What is wrong with a row."""
    values = [row[column] for column in COLUMNS]
    if None in row or None in values:
        return f"{'more' if None in row else 'fewer'} values than columns; quote ids that hold commas"
    name, _, direction, _, uncertainty = (value or "" for value in values)
    if problem := id_error(name):
        return f"the name of the method: {problem}"
    if name in contestants():
        return f"{name!r} is a method of sfumato already; expected another name, for example my_{name}"
    if direction not in DIRECTIONS:
        return f"direction {direction!r}; expected t2i, where texts are the queries, or i2t, where images are"
    with suppress(ValueError):
        if math.isfinite(float(uncertainty)):
            return ""
    return (
        f"uncertainty {uncertainty!r}; expected a finite number, larger is less certain. Where the method knows"
        " nothing, give a number larger than its others"
    )
