"""Errors that commands print without a traceback: mistakes of the user (exit status 2) and failed runs (1).

Also the small parts that messages share, and what is said on standard error: notes and progress, a bar on a terminal
and plain lines elsewhere. Standard output is for results alone. Of several processes that torchrun has started, only
the first one prints.
"""

import difflib
import errno
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_CAUSES = {
    errno.ENOSPC: "the disk is full; free some space, then run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space, then run the same command again",
    errno.EFBIG: "the file is larger than this system or shell allows (see `ulimit -f`)",
    errno.EROFS: "the disk is read-only; give another place",
    errno.EACCES: "no permission; change the permissions, or give another place",
    errno.EPERM: "not permitted; change the permissions, or give another place",
    errno.ENOTDIR: "a part of this path is a file, not a folder; give another path",
    errno.EISDIR: "is a folder; give the name of a file",
    errno.EEXIST: "exists already; give another name, or remove it",
    errno.ENOENT: "there is no such file or folder; give another path",
    errno.ENAMETOOLONG: "the name is too long; give a shorter one",
    errno.EMFILE: "too many files are open (see `ulimit -n`)",
    errno.ELOOP: "is a link that leads back to itself; give the file it should be",
}
"""What happened and what to do, by the number of the system's error."""

_FULL = re.compile(r"[Nn]o space left|disk is full|os error 28|requested and \d+ written")


def disk_cause(error: BaseException) -> str | None:
    """What happened on the disk and what to do, without the path."""
    full = _FULL.search(str(error))
    return _CAUSES.get(errno.ENOSPC if full else getattr(error, "errno", None) or 0)


def as_typed(*words: object) -> str:
    """A command as a shell takes it: words with spaces are quoted, on Windows in double quotes."""
    return subprocess.list2cmdline(map(str, words)) if os.name == "nt" else shlex.join(map(str, words))


def explain_os_error(error: BaseException) -> str:
    """An error of the operating system in one line: the path, what happened, and what to do."""
    cause, path = disk_cause(error), getattr(error, "filename", None)
    if cause is None or isinstance(error, UserError):  # Whose message has the path already.
        return str(error)
    return f"{path}: {cause}" if path is not None else cause


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun, in the singular for 1."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The question after a name that is like a known one; else another hint."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def expected_columns(found: Sequence[str], expected: Sequence[str]) -> str:
    """The end of a message about a table that lacks a column."""
    others = [name for name in found if name not in expected]
    guesses = []
    for name in expected:
        usual = [other for other in others if other.lower() in _SYNONYMS.get(name, ())]
        if name not in found and (near := usual or difflib.get_close_matches(name, others, n=1, cutoff=0.6)):
            guesses.append(f"is {near[0]!r} {name}?")
            others.remove(near[0])
    guessed = f" ({' '.join(guesses)})" if guesses else ""
    return f"the columns are {', '.join(found) or '(none)'}; expected {' and '.join(expected)} among them{guessed}"


_SYNONYMS = {
    "image": ("file", "filename", "file_name", "filepath", "img", "image_path", "path", "picture"),
    "captions": ("text", "texts", "sentence", "sentences", "raw", "title", "description"),
    "caption": ("text", "texts", "sentence", "sentences", "raw", "title", "description"),
    "text": ("caption", "captions", "sentence", "txt"),
}
"""Names that other tables have for a column."""


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(message: str, most: int = 2000) -> str:
    """A message as a terminal can show it: file names and contents in it may hold anything."""
    escaped = _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
    return "\n".join(line if len(line) <= most else line[:most] + " ..." for line in escaped.split("\n"))


class UserError(Exception):
    """A mistake of the user, with the way out in its message. Commands print it in one line and exit with status 2."""


class RunFailedError(RuntimeError):
    """A failure while a command was running that its arguments did not cause. Commands exit with status 1."""


def first_line(error: BaseException, most: int = 200) -> str:
    """The message of an error in one line."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= most else line[:most] + " ..."


def refuse_newer(where: str, found: object, known: str | int) -> None:
    """Refuse what a later version of sfumato has written. A format is a number, or a name that ends with one."""
    ours, theirs = (re.split(r"(?<!\d)(?=\d+\Z)", str(one)) for one in (known, found))
    if len(theirs) == 2 and theirs[0] == ours[0] and int(theirs[1]) > int(ours[1]):
        way = "Update sfumato (pip install --upgrade sfumato), or use the version that wrote it"
        later = f"has format {found}, written by a later version of sfumato"
        raise UserError(f"{where}: {later}; this version reads up to {known}. {way}")


@contextmanager
def need(extra: str, what: str, instead: str = "") -> Iterator[None]:
    """Around the import of an optional package: says what needs it, how to install it, and what goes without it."""
    try:
        yield
    except ImportError as error:
        raise UserError(f'{what}: pip install "sfumato[{extra}]"{instead}') from error


def need_pyarrow(what: str, instead: str = "") -> Any:
    """The package pyarrow with its module parquet, for what needs it."""
    with need("parquet", what, instead):
        import pyarrow
        import pyarrow.parquet
    return pyarrow


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
