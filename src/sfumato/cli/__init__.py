"""The command line: reads arguments, calls the library, prints. Nothing is computed here.

Results go to standard output, progress to standard error. Exit status: 0 done, 1 the run failed (a diverged loss, a lost
process), 2 the user can mend it. Everything heavy is imported inside the commands, so that --help answers at once.
"""

import os
import sys

# In the order of the help.
from sfumato.cli import embedding, evaluating, searching, studying, trying
from sfumato.cli.common import app
from sfumato.errors import RunFailedError, UserError

__all__ = ["app", "embedding", "evaluating", "main", "searching", "studying", "trying"]

_INTERRUPTED = 130


def main() -> None:
    """Entry point: errors that users can mend become one line and exit status 2."""
    debug = bool(os.environ.get("SFUMATO_DEBUG"))
    try:
        app(standalone_mode=True)
    except (UserError, ValueError, OSError) as error:
        if debug:
            raise
        print(f"sfumato: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as error:
        if error.code == _INTERRUPTED:
            print(
                "sfumato: interrupted. Nothing is half written; train, ablate, embed and audit --cross-fit go on where they were"
                " when they are called again",
                file=sys.stderr,
            )
        raise
    except (RunFailedError, ArithmeticError) as error:
        if debug:
            raise
        print(f"sfumato: {error}", file=sys.stderr)
        sys.exit(1)
