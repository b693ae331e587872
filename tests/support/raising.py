"""A call that must fail, in one line, and a function that does."""

import pytest


def raises(error, message, function, /, *arguments, **options):
    """The call raises this error, which is returned; its text has the message, a regular expression."""
    with pytest.raises(error, match=message) as raised:
        function(*arguments, **options)
    return raised


def failing(error):
    def fail(*arguments, **options):
        raise error

    return fail
