"""Errors that commands print without a traceback: mistakes of the user (exit status 2) and failed runs (1)."""


class UserError(Exception):
    """A mistake of the user, with the way out in its message. Commands print it in one line and exit with status 2."""


class RunFailedError(RuntimeError):
    """A failure while a command was running that its arguments did not cause. Commands exit with status 1."""


def first_line(error: BaseException, most: int = 200) -> str:
    """The message of an error in one line.

    Args:
        error: any.
        most: largest number of characters; a longer line is cut.

    Returns:
        The first line of its message, or the name of its class if it has none.
    """
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= most else line[:most] + " ..."
