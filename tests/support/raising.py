"""A call that must fail, in one line."""

import pytest


def raises(error, message, function, /, *arguments, **options):
    """The call raises this error, whose text has the message, a regular expression."""
    with pytest.raises(error, match=message):
        function(*arguments, **options)
