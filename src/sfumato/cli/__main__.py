"""python -m sfumato.cli."""

from sfumato.cli import main

main()
