"""Items that could not be used: each with its place and reason, counted, listed in a file, and fatal when too many."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sfumato.errors import UserError
from sfumato.files import write_atomically

_FEW = 3


@dataclass(frozen=True)
class Problem:
    """One unusable item.

    Attributes:
        place: where it is: a file, file:line or archive!member.
        reason: what is wrong with it.
    """

    place: str
    reason: str


class Problems:
    """The unusable items of a run, in the order in which they were met."""

    def __init__(self) -> None:
        self.items: list[Problem] = []

    def __len__(self) -> int:
        return len(self.items)

    def add(self, place: str | Path, reason: str) -> None:
        """Note an item that is left out. What is not valid Unicode (a file name, say) is noted with backslashes."""
        self.items.append(
            Problem(*(str(part).encode("utf-8", "backslashreplace").decode() for part in (place, reason)))
        )

    def write(self, path: str | Path) -> None:
        """Write the list as JSONL, one {"place", "reason"} a line; an empty file when there is nothing to tell."""
        write_atomically(path, "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in self.items))

    def summary(self, most: int = 10) -> str:
        """The first items, a line each, and how many more there are."""
        lines = [f"  {p.place}: {p.reason}" for p in self.items[:most]]
        more = len(self.items) - most
        return "\n".join(lines + ([f"  ... and {more} more"] if more > 0 else [])) or "  (no item was unusable)"

    def check(self, total: int, max_share: float, *, setting: str = "data.max_problem_fraction=") -> None:
        """Stop when too many items are unusable; up to three are never too many.

        Args:
            total: number of usable items.
            max_share: largest tolerated share of unusable ones, in [0, 1].
            setting: what the user sets it with, for the message.

        Raises:
            UserError: there are more; the message lists the first ten.
        """
        if len(self) > max(_FEW, max_share * (total + len(self))):
            raise UserError(
                f"{len(self)} of {total + len(self)} items are unusable, more than {setting}{max_share:g}"
                f" allows; mend them, or raise that share:\n{self.summary()}"
            )
