"""The rows of the papers and of the talk: every system, table, figure and idea, with its state.

Tables and figures come from the items, the rest from rows.toml. A state is derived from what the data say: a page with
our figure, a test, or a reason.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from papers.tables.items import PaperItem, paper_items, read_toml
from sfumato.reports.tables import print_table, print_wrapped

STATES = {
    "works": "run on real data here with its own method and measure; the figure is on a page",
    "ready": "tested end to end on tiny data of the same shape; the paper's data are not here",
    "published only": "nobody can rebuild it from its paper",
    "missing": "not built",
}
"""The states and what they mean."""

DRAWN = "papers/tests/tables/test_drawn.py::test_every_figure_is_drawn_from_tiny_runs"
REPEATED = "papers/tests/tables/test_paper_tables.py::test_every_table_is_made_from_tiny_runs"
"""The tests of figures and tables that name no other."""


@dataclass(frozen=True)
class Row:
    """A row of the papers. README.md of this folder has the keys of rows.toml."""

    id: str
    paper: str
    title: str
    row: str = ""
    command: str = ""
    needs: str = ""
    results: str = ""
    ran: str = ""
    headline: Sequence[str] = ()  # what, ours, published
    test: str = ""
    reason: str = ""
    published_only: bool = False

    @property
    def state(self) -> str:
        """One of STATES."""
        if self.results and self.headline:
            return "works"
        if self.test:
            return "ready"
        return "published only" if self.published_only else "missing"

    @property
    def figure(self) -> str | None:
        """The headline, if it ran."""
        if self.state != "works":
            return None
        what, ours, published = self.headline
        beside = f" (published {published})" if published else ""
        where = f"on {self.ran}, " if self.ran else ""
        return where + ": ".join(filter(None, (what, ours))) + beside

    def to_json(self) -> dict[str, Any]:
        """What `python -m papers list --json` says of it."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("headline", "published_only")}
        return kept | {"state": self.state, "figure": self.figure}


PAPERS = {"PCME++": "PCME++", "PCME": "PCME", "PVSE++": "Probabilistic VSE++ and VSRN", "talk": "The talk"}
"""The papers as ids begin and as they are called."""


def paper_rows() -> list[Row]:
    """The rows of each paper: tables and figures in its order, then those of rows.toml."""
    others = [Row(paper=row["id"].split()[0], **row) for row in read_toml("rows.toml")["row"]]
    rows = [*map(_of_item, paper_items().values()), *others]
    return [row for paper in PAPERS for row in rows if row.paper == paper]


def _of_item(item: PaperItem) -> Row:
    own = f'python -m papers table "{item.id}"' if item.repeatable else ""
    test = item.test or (DRAWN if item.draw else REPEATED if item.runs else "")
    return Row(
        item.id, item.paper, item.about, item.row, item.command or own, item.needs, item.results, item.ran,
        item.headline, test, item.reason, published_only=not item.repeatable,
    )  # fmt: skip


def print_rows(rows: list[Row]) -> None:
    """Print the list, and how many are in each state."""
    shown = [[row.id, row.title, row.state, row.figure or row.reason or row.needs] for row in rows]
    print_table("", ["id", "title", "state", "figure, reason or what it needs"], shown, left=3, running=(1, 3))
    states = [row.state for row in rows]
    print_wrapped("; ".join(f"{states.count(state)} {state}: {meaning}" for state, meaning in STATES.items()) + ".")
