"""The command line: reads arguments, calls the library, prints. Nothing is computed here.

Results go to standard output, progress to standard error. Exit status: 0 done, 1 the run failed (a diverged loss, a
lost process), 2 the user can correct it. Heavy modules are imported inside the commands, so that --help is fast.
"""

import io
import os
import sys
import warnings
from collections.abc import Callable, MutableMapping

from sfumato.cli import evaluate_commands, model_commands, search_commands  # noqa: F401  They register themselves.
from sfumato.cli.common import app
from sfumato.errors import RunFailedError, UserError, explain_os_error, printable
from sfumato.files import available_cores

__all__ = ["app", "available_cores", "main", "run", "set_threads"]

_INTERRUPTED = 130


def set_threads(environment: MutableMapping[str, str], cores: int, load: float) -> None:
    """Set the variables by which torch's threads start; those that are set already stay.

    Threads that spin while they wait for each other slow a busy machine down: with two threads on two cores and a load
    of 11, an adoption took 303 s, with passive waiting 95 s, with one thread 77 s.
    """
    if cores < (os.cpu_count() or 1):
        environment.setdefault("OMP_NUM_THREADS", str(cores))
    if load >= 1:
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main() -> None:
    """Entry point of `sfumato`."""
    goes_on = "demo, train, evaluate table, adopt, index --data or audit --cross-fit"
    run(app, "sfumato", f"The same {goes_on} continues where it stopped.")


def run(commands: Callable[[], None], program: str, after_interrupt: str) -> None:
    """Run the commands of a program: errors that users can correct become one line and exit status 2."""
    set_threads(os.environ, available_cores(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
    warnings.filterwarnings("ignore", module="PIL")  # Of damaged metadata, which are left out.
    code_page = os.name == "nt" and not os.environ.get("PYTHONIOENCODING")  # In UTF-8 mode, this changes nothing.
    for stream in (sys.stdout, sys.stderr):
        if code_page and isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors=stream.errors)
    debug = bool(os.environ.get("SFUMATO_DEBUG"))
    try:
        commands()
    except ModuleNotFoundError as error:
        if debug or error.name not in ("torch", "adamp"):
            raise
        print(f'{program}: this command needs {error.name}: pip install "sfumato[train]"', file=sys.stderr)
        sys.exit(2)
    except (UserError, ValueError, OSError, RunFailedError, ArithmeticError) as error:
        if debug:
            raise
        failed = isinstance(error, RunFailedError | ArithmeticError)
        print(printable(f"{program}: {error if failed else explain_os_error(error)}"), file=sys.stderr)
        sys.exit(1 if failed else 2)
    except SystemExit as error:
        if error.code == _INTERRUPTED:
            print(f"{program}: interrupted. No file is incomplete. {after_interrupt}", file=sys.stderr)
        raise
