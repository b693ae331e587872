"""The command line: reads arguments, calls the library, prints. Nothing is computed here.

Results go to standard output, progress to standard error. Exit status: 0 done, 1 the run failed (a diverged loss, a
lost process), 2 the user can correct it. Heavy modules are imported inside the commands, so that
--help is fast.
"""

import os
import sys

# In the order of the help.
from sfumato.cli import embed_commands, evaluate_commands, search_commands, study_commands, train_commands
from sfumato.cli.common import app
from sfumato.errors import RunFailedError, UserError, explain_os_error

__all__ = [
    "app",
    "embed_commands",
    "evaluate_commands",
    "main",
    "search_commands",
    "study_commands",
    "train_commands",
]

_INTERRUPTED = 130


def main() -> None:
    """Entry point: errors that users can correct become one line and exit status 2."""
    debug = bool(os.environ.get("SFUMATO_DEBUG"))
    try:
        app(standalone_mode=True)
    except (UserError, ValueError, OSError) as error:
        if debug:
            raise
        print(f"sfumato: {explain_os_error(error)}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as error:
        if error.code == _INTERRUPTED:
            print(
                "sfumato: interrupted. No file is incomplete."
                " Run the same train, ablate, embed or audit --cross-fit again to continue.",
                file=sys.stderr,
            )
        raise
    except (RunFailedError, ArithmeticError) as error:
        if debug:
            raise
        print(f"sfumato: {error}", file=sys.stderr)
        sys.exit(1)
