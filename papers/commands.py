"""The commands of `python -m papers`. The module commands of each folder registers its own; main imports them."""

import importlib
import sys

import typer

from sfumato.errors import RunFailedError, UserError, explain_os_error, printable

app = typer.Typer(help="Repeat and study the papers.", no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Makes the commands sub-commands, even of one alone."""


def main() -> None:
    """Run a command; what a user can correct becomes one line and exit status 2."""
    importlib.import_module("papers.posthoc.commands")
    try:
        app()
    except (UserError, ValueError, OSError) as error:
        print(printable(f"papers: {explain_os_error(error)}"), file=sys.stderr)
        sys.exit(2)
    except (RunFailedError, ArithmeticError) as error:
        print(printable(f"papers: {error}"), file=sys.stderr)
        sys.exit(1)
