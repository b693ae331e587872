"""What a command says, compared by its words: never by a line break, a width, or the length of a path."""

from pathlib import Path


def folded(text: str) -> str:
    return " ".join(text.split())


def too_wide(text: str, *paths: Path, width: int = 80) -> list[str]:
    """The lines that are wider than the screen and name none of the paths, however long their folder's name is."""
    named = {word for path in paths for word in str(path).split()}
    return [line for line in text.splitlines() if len(line) > width and not any(word in line for word in named)]
