"""The page Performance, docs/project/performance.md, from the result files that benchmarks/suite.py writes.

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
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "project" / "performance.md"
ALONE = 0.1
"""Cores that other programs may keep busy during a run whose figures are final."""


@dataclass(frozen=True)
class Row:
    """A line of a table; a bound is something that does less than sfumato, so that no row loses against it."""

    what: str
    ours: str
    reference: str = ""
    ratio: float | None = None
    before: str = ""
    bound: bool = False

    @property
    def loses(self) -> bool:
        return self.ratio is not None and not self.bound and self.ratio > 1

    @property
    def ratio_text(self) -> str:
        """Two digits; a loss is marked."""
        if self.ratio is None:
            return ""
        small = self.ratio < 0.1
        text = f"1/{1 / self.ratio:.0f}" if small else f"{self.ratio:.{2 if self.ratio < 10 else 0}f}"
        return f"**{text}, loses**" if self.loses else text


@dataclass(frozen=True)
class Section:
    """A table: what was measured, where the older figures are from, and how its rows come from a result."""

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


def against(what: str, ours: float, reference: float, of: str, before: str = "", *, bound: bool = False) -> Row:
    """A row of two durations in seconds."""
    return Row(what, duration(ours), f"{duration(reference)}, {of}", ours / reference, before, bound)


def match_loss(result: dict[str, Any]) -> Iterable[Row]:
    forms = result["results"]
    product, loss, broadcast = forms["product"], forms["loss"], forms.get("broadcast")
    yield against("forward and backward", loss["seconds"], product["seconds"], "bare product", "1.4", bound=True)
    pseudo = forms["loss with pseudo-positives"]
    yield against(
        "the same with pseudo-positives", pseudo["seconds"], product["seconds"], "bare product", "1.6", bound=True
    )
    if broadcast:
        yield against("forward and backward", loss["seconds"], broadcast["seconds"], "broadcast form", "1/289")
        memory = megabytes(loss["extra_mb"]), f"{megabytes(broadcast['extra_mb'])}, broadcast form"
        yield Row("extra memory", *memory, loss["extra_mb"] / broadcast["extra_mb"], "43 MB")


def distances(result: dict[str, Any]) -> Iterable[Row]:
    before = {"squared_l2": "1.2", "csd": "2.0", "wasserstein2": "2.5", "kl": "2.6", "wasserstein2_printed": "3.1"}
    before |= {"min_kl": "5.3", "js": "5.6", "elk": "62", "bhattacharyya": "61", "average_l2": "90"}
    for name, figures in sorted(result["results"].items(), key=lambda item: float(item[1]["seconds"])):
        of = "bare product"
        yield against(name, figures["seconds"], result["product_seconds"], of, before.get(name, ""), bound=True)


def evaluation(result: dict[str, Any]) -> Iterable[Row]:
    forms = result["forms"]
    yield against("metrics on top of the distances", result["on_top_seconds"], 1.0, "goal", "1.82 s")
    yield Row("the same, processor time", duration(result["on_top_cpu_seconds"]), before="1.08 s")
    yield Row(
        "peak memory, distances included",
        megabytes(result["peak_mb"]),
        "1,024 MB, goal",
        result["peak_mb"] / 1024,
        "796 MB",
    )
    if official := forms.get("official"):
        scores = forms["scores"]
        yield against("metrics of a score matrix", scores["seconds"], official["seconds"], "eccv_caption", "1.15 s")
        memory = megabytes(scores["peak_mb"]), f"{megabytes(official['peak_mb'])}, eccv_caption"
        yield Row(
            "peak memory of the same, the mapped file included",
            *memory,
            scores["peak_mb"] / official["peak_mb"],
            "1,036 MB",
        )
        gap = f"{result['largest_difference']:.1e}"
        yield Row(f"largest difference of {result['compared']} figures", gap, "eccv_caption", None, "1.4e-17")


def exact_search(result: dict[str, Any]) -> Iterable[Row]:
    before = {1: ("1.48", "0.80"), 20: ("0.17", "0.67"), 256: ("0.60", "0.51")}
    for row in result["rows"]:
        queries = f"{row['batch']} quer{'y' if row['batch'] == 1 else 'ies'}"
        of_faiss, of_product = before.get(row["batch"], ("", ""))
        yield against(queries, row["exact"] / 1000, row["faiss"] / 1000, "FAISS flat", of_faiss)
        product = min(row["q @ g.T"], row["g @ q.T"]) / 1000
        yield against(queries, row["exact"] / 1000, product, "bare product", of_product, bound=True)
    yield Row(
        "first search, which prepares the gallery", duration(result["rows"][0]["first_search_seconds"]), before="2.0 s"
    )


def search(result: dict[str, Any]) -> Iterable[Row]:
    before = {("flat", 10): "1.000, 0.346", ("flat", 50): "1.000, 0.903", ("hnsw", 10): "0.846, 0.333"}
    before |= {("hnsw", 50): "0.997, 0.901", ("ivf", 10): "0.950, 0.349", ("ivf", 50): "0.950, 0.854"}
    before |= {("flat", 200): "1.000, 1.000", ("hnsw", 200): "1.000, 1.000", ("ivf", 200): "0.950, 0.917"}
    for row in result["equal_cost"]:
        engine, candidates, (ours, theirs) = row["engine"], row["candidates"], (row["lifted"], row["means"])
        if (engine, candidates) in before:
            what = f"recall@10, {engine}, {candidates} candidates"
            figures = f"{ours['recall']:.3f}", f"{theirs['recall']:.3f}, means re-ranked"
            yield Row(what, *figures, theirs["recall"] / ours["recall"], before[engine, candidates])
            times = ours["ms_per_query"] / 1000, theirs["ms_per_query"] / 1000
            if candidates == 50:
                yield against(f"time a query, {engine}, {candidates} candidates", *times, "means re-ranked")


def stores(result: dict[str, Any]) -> Iterable[Row]:
    ours, theirs = (result["engines"][name] for name in ("sfumato", "sqlite-faiss"))
    timed = (
        ("storing 100,000 in batches", "fill", "upsert_s", 1.0, "3.6 s"),
        ("first search after opening", "search", "first_ms", 1000.0, "1.41 s"),
        ("1 query", "search", "one_ms", 1000.0, "66 ms"),
        ("20 queries", "search", "twenty_ms", 1000.0, "175 ms"),
        ("1 query with a filter", "search", "filter_one_ms", 1000.0, "164 ms"),
        ("one upsert of one item", "write", "upsert_one_ms", 1000.0, ""),
    )
    for what, step, key, scale, before in timed:
        yield against(what, ours[step][key] / scale, theirs[step][key] / scale, "SQLite with FAISS", before)
    for what, step, key, before in (
        ("memory held while searching", "search", "peak_mb", "230 MB"),
        ("on disk", "fill", "disk_mb", "243 MB"),
    ):
        sizes = ours[step][key], theirs[step][key]
        yield Row(what, megabytes(sizes[0]), f"{megabytes(sizes[1])}, SQLite with FAISS", sizes[0] / sizes[1], before)


def towers(before: dict[str, tuple[str, str]]) -> Callable[[dict[str, Any]], Iterable[Row]]:
    """Rows of one side, with the older ratios of time and memory for each pass."""

    def rows(result: dict[str, Any]) -> Iterable[Row]:
        for what, figures in result["results"].items():
            seconds, peak = figures["seconds"], figures["peak_mb"]
            plain = f"{duration(seconds['plain'])}, plain CLIP tower"
            time, memory = before.get(what, ("", ""))
            yield Row(what, duration(seconds["gaussian"]), plain, figures["ratio"], time, bound=True)
            sizes = megabytes(peak["gaussian"]), f"{megabytes(peak['plain'])}, plain CLIP tower"
            yield Row(f"{what}, peak memory", *sizes, figures["peak_ratio"], memory, bound=True)

    return rows


def ingest(result: dict[str, Any]) -> Iterable[Row]:
    bare = result["results"]["bare"]
    for form, before in (("1 workers", "1.04"), ("2 workers", "1.32")):
        one = result["results"][form]
        workers = form.replace("1 workers", "1 worker")
        rates = f"{one['per_second']:.1f} a second", f"{bare['per_second']:.1f} a second, bare encoder"
        yield Row(f"images, {workers}", *rates, 1 / one["of_bare"], before, bound=True)
    one = result["results"]["1 workers"]
    times = duration(one["cpu_ms"] / 1000), f"{duration(bare['cpu_ms'] / 1000)}, bare encoder"
    yield Row("processor time of an image, 1 worker", *times, one["cpu_ms"] / bare["cpu_ms"], "1.15", bound=True)


def serve(result: dict[str, Any]) -> Iterable[Row]:
    before = {1: "1.33", 2: "0.91", 4: "0.62", 8: "0.37", 16: "0.26", 32: "0.25", 64: "0.21"}
    for row in result["rows"]:
        on, off, clients = row["on"], row["off"], row["clients"]
        what = f"{clients} client{'s' if clients > 1 else ''}"
        rates = f"{on['per_second']:.0f} a second", f"{off['per_second']:.0f} a second, one by one"
        yield Row(f"requests, {what}", *rates, off["per_second"] / on["per_second"], before.get(clients, ""))
        if clients in (1, 64):
            times = on["p95_ms"] / 1000, off["p95_ms"] / 1000
            yield against(f"95 % of the answers within, {what}", *times, "one by one")


def training_step(result: dict[str, Any]) -> Iterable[Row]:
    figures = result["results"]
    for what, key, before in (("step with PCME's loss", "step", "1.77"), ("PCME's loss alone", "loss", "33")):
        seconds, of = figures[key]["seconds"], "PCME++"
        ours, theirs = duration(seconds["pcme"]), f"{duration(seconds['pcmepp'])}, {of}"
        yield Row(what, ours, theirs, figures[key]["ratio"], before, bound=True)
    peak = figures["peak_mb"]
    sizes = megabytes(peak["pcme"]), f"{megabytes(peak['pcmepp'])}, PCME++"
    yield Row("peak memory with PCME's loss", *sizes, figures["peak_ratio"], "1.22", bound=True)


def demo(result: dict[str, Any]) -> Iterable[Row]:
    yield Row("train, evaluate, index, search, write the page", f"{result['seconds']:.0f} s", before="245 s")


SPEED = "[Speed and memory](../experiments/speed-memory.md)"
TOWERS = "[Cost of a tower](../experiments/tower-cost.md), there with a batch of 32"
SECTIONS = {
    "match_loss": Section("PCME++ match loss, 512 pairs, d = 1,024", f"Before: {SPEED}.", match_loss),
    "distances": Section("Distances, 1,000 × 5,000, d = 512", f"Before: {SPEED}.", distances),
    "evaluation": Section(
        "COCO 5K and 1K, CxC and ECCV Caption, 5,000 × 25,000, d = 512",
        "Before: [Evaluation](../experiments/evaluation-speed.md).",
        evaluation,
    ),
    "exact_search": Section(
        "Exact search, 200,000 items, d = 512, top 10",
        "Before: [Exact search by bounds](../experiments/2026-11-22-exact-search.md).",
        exact_search,
    ),
    "search": Section("Approximate search by lifted vectors, 20,000 items, d = 64", f"Before: {SPEED}.", search),
    "stores": Section(
        "The embedded store, 100,000 vectors of 513 dimensions",
        "The reference is a prototype without locks and messages: records in SQLite, all vectors in FAISS's flat\n"
        "index in memory. Before: [Which embedded store](../experiments/2026-11-22-embedded-store.md).",
        stores,
    ),
    "towers_image": Section(
        "Image tower with a Gaussian head, ViT-B/32",
        f"Before: {TOWERS}.",
        towers({"forward": ("1.10", "1.04"), "step": ("1.12", "1.09")}),
    ),
    "towers_text": Section(
        "Text tower with a Gaussian head",
        f"Before: {TOWERS}.",
        towers({"forward": ("1.13", "0.89"), "step": ("1.21", "1.06")}),
    ),
    "ingest": Section(
        "Embedding a folder of JPEG files, EfficientNet-Lite0",
        "Before: [Embedding at scale](../experiments/embedding-speed.md).",
        ingest,
    ),
    "serve": Section(
        "The service, text queries over 10,000 items, clients on the same machine",
        "With micro-batches, against every query alone. Before: [The service](../experiments/service.md).",
        serve,
    ),
    "training_step": Section(
        "A training step, heads on frozen features, batch 128, d = 256",
        "PCME has 8 samples; its paper has 1.33 for CLIP towers on a V100. Before:\n"
        "[PCME's step](../experiments/pcme-step.md).",
        training_step,
    ),
    "demo": Section("The demo", "Before: [make demo](../experiments/demo.md).", demo),
}

HEAD = """\
# Performance

<!-- Written by benchmarks/performance_page.py from benchmarks/results; do not edit. -->

`make benchmarks` measures this and writes this page. A ratio is below 1 where sfumato is better: time over time, memory
over memory, and the other way round for rates and recalls. Ratios are those of one run. Rows against a bare matrix
product, a plain tower, a bare encoder or another loss of sfumato show what is added to something that does less; they
neither win nor lose. "Before" is the older ratio or figure of the experiment that is named.
"""

LEFT_OUT = """\
## Left out

These take too long for `make benchmarks`, or are no question of time. The experiments have their figures:

- 1,000,000 items, and recall on hard galleries: [Exact search by bounds](../experiments/2026-11-22-exact-search.md)
- Exactness of all stores, and `kill -9`: [exactness](../experiments/store-exactness.md),
  [embedded stores](../experiments/2026-11-22-embedded-store.md)
- One batch over several processes: [processes](../experiments/processes.md)
- Malformed requests: [The service](../experiments/service.md)
- Whole recipes: the table of [experiments](../experiments/index.md)
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
        cells = [[row.what, row.ours, row.reference, row.ratio_text, row.before] for row in rows[name]]
        parts.append(table(("what", "sfumato", "reference", "ratio", "before"), cells, {3}))
        parts.append(f"{section.note}\n")
    parts += ["## Runs\n", runs(results), LEFT_OUT]
    return "\n".join(parts)


def runs(results: dict[str, dict[str, Any]]) -> str:
    """When, where and beside what each benchmark ran."""
    machines = list(dict.fromkeys(machine_text(record["machine"]) for record in results.values()))
    listed = "\n".join(f"Machine {i}: {text}." for i, text in enumerate(machines, 1))
    cells = [
        [
            f"{name}{' †' if busy(record) else ''}",
            str(machines.index(machine_text(record["machine"])) + 1),
            str(record["threads"]),
            record["commit"],
            record["date"],
            f"{record['load_before']:.1f}",
            "unknown" if record["other_cores"] is None else f"{record['other_cores']:.2f}",
            f"{record['seconds']:.0f} s",
            "yes" if record["passed"] else "**no**",
        ]
        for name, record in results.items()
    ]
    header = ("benchmark", "machine", "threads", "commit", "date", "load", "other programs", "took", "goals met")
    note = (
        'Load is the load average before the run; "other programs" is the number of cores that they kept busy during\n'
        "it, and a run with more than 0.1 is marked with †. A plus sign after a commit: with changes beyond it.\n"
    )
    return f"{listed}\n\n{table(header, cells, {1, 2, 5, 6, 7})}\n{note}"


def write_page(results: Path = RESULTS, path: Path = PAGE) -> None:
    """Write the page of a folder of results."""
    path.write_text(page(load_results(results)), encoding="utf-8")


if __name__ == "__main__":
    write_page()
