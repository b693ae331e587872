"""The one error that means "you can fix this": the command line prints it in one line and exits with 2."""


class UserError(Exception):
    """A mistake of the user's with its way out in the message; commands print it without a traceback and exit with 2."""


class RunFailedError(RuntimeError):
    """What went wrong while a command was at work, through no fault of its arguments; exit status 1."""


def first_line(error: BaseException, most: int = 200) -> str:
    """What an error says, in one line of a bearable length."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= most else line[:most] + " ..."
