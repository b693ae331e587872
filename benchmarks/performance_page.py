"""The page docs/results/speed.md, from the result files that benchmarks/suite.py writes.

    python benchmarks/performance_page.py

A row compares sfumato with something else in one run. The ratio is below 1 where sfumato is better: time over time,
memory over memory, and the other way round for rates and recalls.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results" / "speed.md"
ALONE = 0.1
"""Cores that other programs may keep busy during a run whose figures are final."""


@dataclass(frozen=True)
class Row:
    """A line of a table; a bound is something that does less than sfumato, so that no row loses against it."""

    what: str
    ours: str
    reference: str = ""
    ratio: float | None = None
    bound: bool = False

    @property
    def loses(self) -> bool:
        return self.ratio is not None and not self.bound and self.ratio > 1

    @property
    def ratio_text(self) -> str:
        """Two digits; a loss is marked."""
        if self.ratio is None:
            return ""
        text = f"1/{1 / self.ratio:.0f}" if self.ratio < 0.1 else f"{self.ratio:.{2 if self.ratio < 10 else 0}f}"
        return f"**{text}, loses**" if self.loses else text


@dataclass(frozen=True)
class Section:
    """A table: what was measured, a note below it, and how its rows come from a result."""

    title: str
    note: str
    rows: Callable[[dict[str, Any]], Iterable[Row]]


def duration(seconds: float) -> str:
    """Three digits, with the unit that fits."""
    powers = {"s": 1.0, "ms": 1e3, "µs": 1e6}
    unit = "s" if seconds >= 1 else "ms" if seconds >= 1e-3 else "µs"
    value = seconds * powers[unit]
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def megabytes(size: float) -> str:
    return f"{size:,.0f} MB"


def against(what: str, ours: float, reference: float, of: str, *, bound: bool = False) -> Row:
    """A row of two durations in seconds."""
    return Row(what, duration(ours), f"{duration(reference)}, {of}", ours / reference, bound)


def match_loss(result: dict[str, Any]) -> Iterable[Row]:
    forms = result["results"]
    product, loss, broadcast = forms["product"], forms["loss"], forms.get("broadcast")
    yield against("forward and backward", loss["seconds"], product["seconds"], "bare product", bound=True)
    pseudo = forms["loss with pseudo-positives"]
    yield against("the same with pseudo-positives", pseudo["seconds"], product["seconds"], "bare product", bound=True)
    if broadcast:
        yield against("forward and backward", loss["seconds"], broadcast["seconds"], "broadcast form")
        memory = megabytes(loss["extra_mb"]), f"{megabytes(broadcast['extra_mb'])}, broadcast form"
        yield Row("extra memory", *memory, loss["extra_mb"] / broadcast["extra_mb"])


def distances(result: dict[str, Any]) -> Iterable[Row]:
    for name, figures in sorted(result["results"].items(), key=lambda item: float(item[1]["seconds"])):
        yield against(name, figures["seconds"], result["product_seconds"], "bare product", bound=True)


def evaluation(result: dict[str, Any]) -> Iterable[Row]:
    forms = result["forms"]
    yield against("metrics on top of the distances", result["on_top_seconds"], 1.0, "goal")
    yield Row("the same, processor time", duration(result["on_top_cpu_seconds"]))
    yield Row(
        "peak memory, distances included", megabytes(result["peak_mb"]), "1,024 MB, goal", result["peak_mb"] / 1024
    )
    if official := forms.get("official"):
        scores = forms["scores"]
        yield against("metrics of a score matrix", scores["seconds"], official["seconds"], "eccv_caption")
        memory = megabytes(scores["peak_mb"]), f"{megabytes(official['peak_mb'])}, eccv_caption"
        yield Row("peak memory of the same, the mapped file included", *memory, scores["peak_mb"] / official["peak_mb"])
        gap = f"{result['largest_difference']:.1e}"
        yield Row(f"largest difference of {result['compared']} figures", gap, "eccv_caption")


def exact_search(result: dict[str, Any]) -> Iterable[Row]:
    for row in result["rows"]:
        queries = f"{row['batch']} quer{'y' if row['batch'] == 1 else 'ies'}"
        yield against(queries, row["exact"] / 1000, row["faiss"] / 1000, "FAISS flat")
        product = min(row["q @ g.T"], row["g @ q.T"]) / 1000
        yield against(queries, row["exact"] / 1000, product, "bare product", bound=True)
    yield Row("first search, which prepares the gallery", duration(result["rows"][0]["first_search_seconds"]))


def stores(result: dict[str, Any]) -> Iterable[Row]:
    ours, theirs = (result["engines"][name] for name in ("sfumato", "sqlite-faiss"))
    timed = (
        ("storing 100,000 in batches", "fill", "upsert_s", 1.0),
        ("first search after opening", "search", "first_ms", 1000.0),
        ("1 query", "search", "one_ms", 1000.0),
        ("20 queries", "search", "twenty_ms", 1000.0),
        ("1 query with a filter", "search", "filter_one_ms", 1000.0),
        ("one upsert of one item", "write", "upsert_one_ms", 1000.0),
    )
    for what, step, key, scale in timed:
        yield against(what, ours[step][key] / scale, theirs[step][key] / scale, "SQLite with FAISS")
    for what, step, key in (("memory held while searching", "search", "peak_mb"), ("on disk", "fill", "disk_mb")):
        sizes = ours[step][key], theirs[step][key]
        yield Row(what, megabytes(sizes[0]), f"{megabytes(sizes[1])}, SQLite with FAISS", sizes[0] / sizes[1])


def towers(result: dict[str, Any]) -> Iterable[Row]:
    for what, figures in result["results"].items():
        seconds, peak = figures["seconds"], figures["peak_mb"]
        plain = f"{duration(seconds['plain'])}, plain CLIP tower"
        yield Row(what, duration(seconds["gaussian"]), plain, figures["ratio"], bound=True)
        sizes = megabytes(peak["gaussian"]), f"{megabytes(peak['plain'])}, plain CLIP tower"
        yield Row(f"{what}, peak memory", *sizes, figures["peak_ratio"], bound=True)


def serve(result: dict[str, Any]) -> Iterable[Row]:
    for row in result["rows"]:
        on, off, clients = row["on"], row["off"], row["clients"]
        what = f"{clients} client{'s' if clients > 1 else ''}"
        rates = f"{on['per_second']:.0f} a second", f"{off['per_second']:.0f} a second, one by one"
        yield Row(f"requests, {what}", *rates, off["per_second"] / on["per_second"])
        if clients in (1, 64):
            times = on["p95_ms"] / 1000, off["p95_ms"] / 1000
            yield against(f"95 % of the answers within, {what}", *times, "one by one")


def training_step(result: dict[str, Any]) -> Iterable[Row]:
    figures = result["results"]
    for what, key in (("step with PCME's loss", "step"), ("PCME's loss alone", "loss")):
        seconds, of = figures[key]["seconds"], "PCME++"
        ours, theirs = duration(seconds["pcme"]), f"{duration(seconds['pcmepp'])}, {of}"
        yield Row(what, ours, theirs, figures[key]["ratio"], bound=True)
    peak = figures["peak_mb"]
    sizes = megabytes(peak["pcme"]), f"{megabytes(peak['pcmepp'])}, PCME++"
    yield Row("peak memory with PCME's loss", *sizes, figures["peak_ratio"], bound=True)


def demo(result: dict[str, Any]) -> Iterable[Row]:
    yield Row("train, evaluate, index, search, write the page", f"{result['seconds']:.0f} s")


SECTIONS = {
    "match_loss": Section("PCME++ match loss, 512 pairs, d = 1,024", "", match_loss),
    "distances": Section("Distances, 1,000 × 5,000, d = 512", "", distances),
    "evaluation": Section("COCO 5K and 1K, CxC and ECCV Caption, 5,000 × 25,000, d = 512", "", evaluation),
    "exact_search": Section("Exact search, 200,000 items, d = 512, top 10", "", exact_search),
    "stores": Section(
        "The embedded store, 100,000 items",
        "Vectors of 513 dimensions. The reference is a prototype without locks and messages: records in SQLite, all\n"
        "vectors in FAISS's flat index in memory.",
        stores,
    ),
    "towers_image": Section("Image tower with a Gaussian head, ViT-B/32", "", towers),
    "towers_text": Section("Text tower with a Gaussian head", "", towers),
    "serve": Section(
        "The service, 10,000 items",
        "Text queries with micro-batches, against every query alone; the clients share the machine.",
        serve,
    ),
    "training_step": Section(
        "A training step, heads on frozen features, batch 128, d = 256",
        "PCME has 8 samples; the paper of PCME++ measured 1.33 for CLIP towers on a V100.",
        training_step,
    ),
    "demo": Section("The demo", "", demo),
}

HEAD = """\
# How fast is it?

<!-- Written by benchmarks/performance_page.py from benchmarks/results; do not edit. -->

**Answer.** On a processor the loss takes little more time than its matrix product, the metrics of COCO take less than a
second, and an exact search takes less time than the bare product. The first table has what another program does faster.

`make benchmarks` measures this and writes this page; [How large can it get?](scale.md) has what takes longer. A ratio
is below 1 where sfumato is better; it is of one run. Rows against a bare matrix product, a plain tower or another loss
of sfumato show what is added to something that does less, so they neither win nor lose.
"""


def table(header: Iterable[str], rows: Iterable[Iterable[str]], right: set[int]) -> str:
    """A table in Markdown; right has the columns that are aligned to the right."""
    names = list(header)
    lines = [names, ["---:" if i in right else "---" for i in range(len(names))], *map(list, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The result files that have a section, in the order of the sections."""
    paths = {name: folder / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def machine_text(machine: dict[str, Any]) -> str:
    gpu = machine["gpu"] or "no GPU"
    versions = f"Python {machine['python']}, torch {machine['torch']}"
    return f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, {gpu}; {versions}"


def busy(record: dict[str, Any]) -> bool:
    """Whether other programs disturbed the run, or nobody knows."""
    return record["other_cores"] is None or record["other_cores"] > ALONE


def page(results: dict[str, dict[str, Any]]) -> str:
    """The whole page.

    Args:
        results: {name of the benchmark: its record}.

    Returns:
        Markdown.
    """
    rows = {name: list(SECTIONS[name].rows(record["result"])) for name, record in results.items()}
    parts = [HEAD]
    if disturbed := [name for name, record in results.items() if busy(record)]:
        parts.append(
            f"**Not final:** other programs kept the machine busy during {len(disturbed)} of {len(results)} runs, which"
            " are\nmarked with †. Their times say little, their ratios a little more.\n"
        )
    if missing := [name for name in SECTIONS if name not in results]:
        parts.append(f"Not measured yet: {', '.join(missing)}.\n")
    parts.append("## Where sfumato loses\n")
    losses = [(SECTIONS[name].title, row) for name in rows for row in rows[name] if row.loses]
    lost = [[title, row.what, row.ours, row.reference, f"{row.ratio:.2f}"] for title, row in losses]
    header = ("where", "what", "sfumato", "reference", "ratio")
    parts.append(table(header, lost, {4}) if lost else "In none of the rows below.\n")
    parts.append("## Figures\n")
    for name, record in results.items():
        section = SECTIONS[name]
        parts.append(f"### {section.title}{' †' if busy(record) else ''}\n")
        parts.append(f"```bash\n{record['command']}\n```\n")
        parts.append(figures(rows[name]))
        if section.note:
            parts.append(f"{section.note}\n")
    parts += ["## Runs\n", runs(results)]
    return "\n".join(parts)


def figures(rows: list[Row]) -> str:
    """The table of a section; a reference that all rows share is named in the header alone."""
    names = {row.reference.partition(", ")[2] for row in rows if row.reference}
    name = names.pop() if len(names) == 1 else ""
    cells = [[row.what, row.ours, row.reference.removesuffix(f", {name}"), row.ratio_text] for row in rows]
    return table(("what", "sfumato", name or "reference", "ratio"), cells, {3})


def runs(results: dict[str, dict[str, Any]]) -> str:
    """When, where and beside what each benchmark ran."""
    machines = "\n".join(dict.fromkeys(f"{machine_text(record['machine'])}." for record in results.values()))
    cells = [
        [
            f"{name}{' †' if busy(record) else ''}",
            record["commit"],
            record["date"],
            "unknown" if record["other_cores"] is None else f"{record['other_cores']:.2f}",
            "yes" if record["passed"] else "**no**",
        ]
        for name, record in results.items()
    ]
    header = ("benchmark", "commit", "date", "other programs", "goals met")
    note = (
        '"Other programs" is the number of cores that they kept busy during the run; more than 0.1 is marked with †.\n'
        "A plus sign after a commit: with changes beyond it.\n"
    )
    return f"{machines}\n\n{table(header, cells, {3})}\n{note}"


def write_page(results: Path = RESULTS, path: Path = PAGE) -> None:
    """Write the page of a folder of results."""
    path.write_text(page(load_results(results)), encoding="utf-8")


if __name__ == "__main__":
    write_page()
