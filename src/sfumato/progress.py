"""Progress on standard error: a bar on a terminal, plain lines elsewhere. Standard output is for results alone.

Of several processes that torchrun has started, only the first one prints.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PLAIN_SECONDS = 15.0


def first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Print one plain line on standard error; only the first process does."""
    if first_process():
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a loop."""
    from rich.console import Console  # here, for a fast --help
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_terminal and first_process():
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda n: bar.advance(task, n)
        return
    done, last = 0, time.monotonic()

    def advance(n: int) -> None:
        nonlocal done, last
        done += n
        if time.monotonic() - last > _PLAIN_SECONDS:
            last = time.monotonic()
            say(f"{title}: {done} of {total}")

    yield advance
