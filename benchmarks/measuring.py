"""What the benchmarks share: a parser that knows --json, the file of the figures, turns, and processes of their own."""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def command_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows the text of a module, and knows --json."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    return parser


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures, if there is a file for them."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def in_turns(
    forms: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each form, which take turns; the first turn does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(rounds + 1):
        for name, run in forms.items():
            start = clock()
            run()
            seconds[name] += [clock() - start] if turn else []
    return seconds


def of_process(command: Sequence[str], cwd: Path | None = None) -> Any:
    """What a process prints last, which is JSON."""
    done = subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
