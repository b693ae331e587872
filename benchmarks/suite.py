"""Run the benchmarks that matter to a user, one after the other, then write docs/results/speed.md from them.

    python benchmarks/suite.py [NAME ...] [--results FOLDER] [--page PATH] [--page-only]

`make benchmarks` runs all. Each writes FOLDER/NAME.json (benchmarks/results if left out): its figures, the command, the
machine, threads, commit, date, the load average before it, and how many cores other programs kept busy meanwhile. Only
runs without such company are final; the page marks the others. Exits with 1 if a benchmark fails, or takes longer than
its limit.
"""

import argparse
import datetime
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from performance_page import PAGE, RESULTS, write_page

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """A benchmark as the suite runs it: arguments, where the first is the script, and the seconds it may take."""

    name: str
    arguments: str
    threads: int = 1
    limit: int = 600

    @property
    def command(self) -> str:
        """For a shell in the root of the repository."""
        return f"OMP_NUM_THREADS={self.threads} python benchmarks/{self.arguments}"


RUNS = (
    Run("match_loss", "match_loss.py"),
    Run("distances", "distances.py"),
    Run("evaluation", "evaluation.py --threads 2", threads=2, limit=900),
    Run("exact_search", "exact_search.py --items 200000 --threads 1 --rounds 5"),
    Run("stores", "stores.py --items 100000 --engines sqlite-faiss sfumato --steps fill search write"),
    Run("towers_image", "towers.py --side image --batch 8 --repeats 3"),
    Run("towers_text", "towers.py --side text --batch 8 --repeats 3"),
    Run("serve", "serve.py --seconds 2"),
    Run("training_step", "pcme_step.py --towers frozen --batch 128 --dim 256 --repeats 11"),
    Run("demo", "demo.py", threads=2, limit=900),
)


def machine() -> dict[str, Any]:
    """Processor, cores, memory and accelerator."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip


def commit() -> str:
    """The short commit, with a plus sign if tracked files of the package or of the benchmarks differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def busy_seconds() -> float | None:
    """Processor seconds of all programs since the start of the machine, those of its host included; None if unknown."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, path.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds of this process and of all that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(run: Run, results: Path, about: dict[str, Any]) -> str | None:
    """Run one benchmark and write its file; what went wrong, or None."""
    script, *words = run.arguments.split()
    version = commit()
    load, start, busy, own = os.getloadavg()[0], time.perf_counter(), busy_seconds(), own_seconds()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *words, "--json", str(path)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(run.threads)}, start_new_session=True
        )
        try:
            status = process.wait(run.limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"not done in {run.limit} s"
            raise
        if not path.exists():
            return f"exit status {status}, no result"
        result = json.loads(path.read_text(encoding="utf-8"))
    seconds = time.perf_counter() - start
    others = None if busy is None else max(0.0, (busy_seconds() or 0) - busy - own_seconds() + own) / seconds
    record = {
        "benchmark": run.name, "command": run.command, "threads": run.threads,
        "date": datetime.date.today().isoformat(), "commit": version, "machine": about, "load_before": round(load, 2),
        "other_cores": None if others is None else round(others, 2), "seconds": round(seconds, 1),
        "passed": status == 0, "result": result,
    }  # fmt: skip
    (results / f"{run.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return None if status == 0 else f"exit status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [run.name for run in RUNS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names)}; all if left out")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"unknown benchmark {min(unknown)!r}; known: {', '.join(names)}")
    options.results.mkdir(parents=True, exist_ok=True)
    failed, about = {}, machine()
    for run in () if options.page_only else RUNS:
        if not options.names or run.name in options.names:
            print(f"\n$ {run.command}", flush=True)
            if error := measure(run, options.results, about):
                failed[run.name] = error
                print(f"{run.name}: {error}", file=sys.stderr)
    write_page(options.results, options.page)
    for name, error in failed.items():
        print(f"failed: {name}, {error}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that what runs is ended too.
    sys.exit(main())
