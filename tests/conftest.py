"""What all tests share: see support/fixtures.py."""

from support.fixtures import *  # noqa: F403
from support.fixtures import _apart_from_the_user  # noqa: F401
