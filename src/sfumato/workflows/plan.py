"""What a gallery of any size needs: memory, disk, time and cost, from measured figures.

scale.json has the figures of stores at several sizes; benchmarks/scale.py measures them and writes the file. Between
these sizes and beyond them memory and disk follow a line, which has what the programs need alone, and times follow the
power of the number of items that fits their logarithms best. All of them grow with the width of the vectors as well.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from sfumato.errors import UserError

TEXT_WIDTH = 384
"""Dimensions of the vectors of the texts."""

FULL, CORES_MEASURED = 0.7, 2
"""Fraction of a machine's memory that may be used, and the cores that the figures were measured on."""

CORE_HOUR, GB_HOUR, HOURS = 0.04, 0.005, 730
"""US dollars for a core and for a GB of memory an hour, about what clouds ask for; hours of a month."""

_SHARDED = ("milvus",)
"""Stores that spread a gallery over machines."""


@dataclass(frozen=True)
class Machine:
    """A machine to plan with."""

    cores: int = 16
    memory: float = 64  # GB

    @property
    def dollars(self) -> float:
        """Order of its cost a month."""
        return HOURS * (CORE_HOUR * self.cores + GB_HOUR * self.memory)


@dataclass(frozen=True)
class Need:
    """What a gallery needs in one store."""

    store: str  # as in the URL of a store
    machines: int  # parts of the gallery, times copies for the queries
    copies: int
    memory_gb: float  # of one copy of the gallery
    disk_gb: float
    build_hours: float  # to store and index one copy
    query_ms: float  # one query alone, median
    dollars: float  # a month
    fits: bool  # whether a part fits into a machine
    beyond: float  # the items of a machine over the largest number measured; above 1 the figures are extrapolated

    @property
    def row(self) -> list[str]:
        """The cells under HEADINGS."""
        sizes = [_number(value) for value in (self.memory_gb, self.disk_gb, self.build_hours, self.query_ms)]
        machines, dollars = (f"{self.machines:,}", _number(self.dollars)) if self.fits else ("too large", "-")
        return [self.store, machines, *sizes, dollars]


HEADINGS = ("store", "machines", "memory, GB", "disk, GB", "build, hours", "query, ms", "$ a month")


def _number(value: float) -> str:
    """Two digits."""
    digits = 1 - math.floor(math.log10(max(value, 0.01)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def words_of(needs: list[Need]) -> list[str]:
    """What a reader of the table has to know."""
    lines = ["memory, disk and hours: of one copy; query: the median of one alone; $: the order, of machines alone"]
    if copied := [f"{need.store} {need.copies}" for need in needs if need.copies > 1]:
        lines.append(f"copies of the gallery, for so many queries: {', '.join(copied)}")
    if any(need.store.startswith(_SHARDED) for need in needs):
        lines.append("milvus builds its graph behind the writes: its hours end when everything is stored")
    if any(not need.fits for need in needs):
        lines.append("too large: what has to be on one machine does not fit into its memory; see --memory")
    if beyond := [need for need in needs if need.beyond > 1]:
        most = max(need.beyond for need in beyond)
        lines.append(f"extrapolated: a machine has up to {_number(most)} times the items that were measured")
    return lines


def measured() -> dict[str, Any]:
    """The figures of scale.json."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("scale.json").read_text("utf-8"))
    return found


def law(points: dict[str, dict[str, float]], name: str) -> Callable[[float], float]:
    """A quantity as a power of the number of items. points: by number of items, the figures by name."""
    n, values = np.array([float(key) for key in points]), np.array([max(own[name], 1e-9) for own in points.values()])
    slope, constant = np.polyfit(np.log(n), np.log(values), 1) if len(n) > 1 else (1.0, np.log(values / n)[0])
    return lambda items: math.exp(constant + slope * math.log(items))


def line(points: dict[str, dict[str, float]], name: str) -> Callable[[float], float]:
    """A quantity as a constant and a part for each item, with the smallest relative errors. points: as for law."""
    n, values = np.array([float(key) for key in points]), np.array([max(own[name], 1e-9) for own in points.values()])
    (constant, each), *_ = np.linalg.lstsq(np.stack([1 / values, n / values], 1), np.ones(len(n)))
    if len(n) == 1 or constant < 0 or each < 0:
        constant, each = 0.0, np.mean(values / n)
    return lambda items: float(constant + each * items)


def plan_gallery(
    items: float, dim: int, queries_per_second: float, machine: Machine, *, texts: bool = False
) -> list[Need]:
    """What a gallery needs in each measured store.

    dim: dimensions of the embeddings. texts: whether the items have texts, whose vectors are in a store of their own.
    """
    for name, value in (("items", items), ("queries_per_second", queries_per_second), ("memory", machine.memory)):
        if not math.isfinite(value):
            raise UserError(f"plan: {name} must be a finite number, got {value}")
    known = measured()
    wide = (dim + 1 + TEXT_WIDTH * texts) / (known["dim"] + 1)
    return [_need(name, points, items, wide, queries_per_second, machine) for name, points in known["stores"].items()]


def _need(
    store: str, points: dict[str, dict[str, float]], items: float, wide: float, rate: float, machine: Machine
) -> Need:
    memory, disk = (line(points, name) for name in ("memory to search, MB", "disk, MB"))
    write, index, single, many = (law(points, name) for name in ("store, s", "index, s", "p50, ms", "queries a second"))
    room, parts = 1000 * FULL * machine.memory, 1
    if store.partition(":")[0].partition("?")[0] in _SHARDED:
        while wide * memory(0) < room < wide * memory(items / parts):
            parts = max(parts + 1, math.ceil(parts * wide * memory(items / parts) / room))
    own, speed = items / parts, machine.cores / CORES_MEASURED
    copies = max(1, math.ceil(rate * wide / (many(own) * speed)))
    machines = parts * copies
    return Need(
        store=store,
        machines=machines,
        copies=copies,
        memory_gb=parts * wide * memory(own) / 1000,
        disk_gb=parts * wide * disk(own) / 1000,
        build_hours=wide * (write(own) + index(own) / speed) / 3600,
        query_ms=wide * single(own),
        dollars=machines * machine.dollars,
        fits=wide * memory(own) <= room,
        beyond=own / max(map(float, points)),
    )
