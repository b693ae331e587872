"""The commands of `python -m papers`. Each folder's commands module registers its own here."""

import sys

import typer

from sfumato.errors import RunFailedError, UserError, explain_os_error, printable

app = typer.Typer(help="Repeat and study the papers.", no_args_is_help=True, add_completion=False)


def main() -> None:
    """Run a command; what a user can correct becomes one line and exit status 2."""
    try:
        app()
    except (UserError, ValueError, OSError) as error:
        print(printable(f"papers: {explain_os_error(error)}"), file=sys.stderr)
        sys.exit(2)
    except (RunFailedError, ArithmeticError) as error:
        print(printable(f"papers: {error}"), file=sys.stderr)
        sys.exit(1)
