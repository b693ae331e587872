"""Unusable items, each with location and reason: they are counted, listed in a file, and raise an error if too many."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sfumato.errors import UserError
from sfumato.files import write_atomically

_FEW = 3


@dataclass(frozen=True)
class Problem:
    """One unusable item.

    Attributes:
        location: a file, file:line or archive!member.
        reason: what is wrong with it.
    """

    location: str
    reason: str

    def to_json(self) -> dict[str, str]:
        """The problem as it stands in files.

        Returns:
            {"place": location, "reason"}.

        Example:
            >>> Problem("a.png", "cut short").to_json()
            {'place': 'a.png', 'reason': 'cut short'}
        """
        return {"place": self.location, "reason": self.reason}

    @classmethod
    def from_json(cls, values: Mapping[str, str]) -> "Problem":
        """The inverse of :meth:`to_json`.

        Args:
            values: {"place", "reason"}.

        Returns:
            The problem.

        Raises:
            KeyError: one of the two is missing.
        """
        return cls(values["place"], values["reason"])


class Problems:
    """The unusable items of a run, in the order in which they were found."""

    def __init__(self) -> None:
        self.items: list[Problem] = []

    def __len__(self) -> int:
        return len(self.items)

    def add(self, location: str | Path, reason: str) -> None:
        """Record an item that is left out. Characters that are not valid Unicode are recorded with backslashes.

        Args:
            location: a file, file:line or archive!member.
            reason: what is wrong with it.
        """
        self.items.append(
            Problem(*(str(part).encode("utf-8", "backslashreplace").decode() for part in (location, reason)))
        )

    def write(self, path: str | Path) -> None:
        """Write the list as JSONL, one {"place", "reason"} a line; an empty file if there are no problems.

        Args:
            path: the file.
        """
        lines = (json.dumps(problem.to_json(), ensure_ascii=False) + "\n" for problem in self.items)
        write_atomically(path, "".join(lines))

    def summary(self, most: int = 10) -> str:
        """The first items, a line each, and how many more there are.

        Args:
            most: number of items to list.

        Returns:
            Lines for a message, indented.
        """
        lines = [f"  {p.location}: {p.reason}" for p in self.items[:most]]
        more = len(self.items) - most
        return "\n".join(lines + ([f"  ... and {more} more"] if more > 0 else [])) or "  (no item was unusable)"

    def check(self, total: int, max_fraction: float, *, setting: str = "data.max_problem_fraction=") -> None:
        """Stop if too many items are unusable; up to three are never too many.

        Args:
            total: number of usable items.
            max_fraction: largest tolerated fraction of unusable ones, in [0, 1].
            setting: name of the setting, for the message.

        Raises:
            UserError: there are more; the message lists the first ten.
        """
        if len(self) > max(_FEW, max_fraction * (total + len(self))):
            raise UserError(
                f"{len(self)} of {total + len(self)} items are unusable, more than {setting}{max_fraction:g}"
                f" allows; correct them, or raise that fraction:\n{self.summary()}"
            )
