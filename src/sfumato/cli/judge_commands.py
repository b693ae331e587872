"""The command judge: a person says which hits are right, in a terminal or line by line."""

import getpass
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sfumato.cli.common import AsJson, check_out_file, command, flag, print_result, rare, word
from sfumato.errors import UserError, counted

if TYPE_CHECKING:
    from sfumato.search.answer import Hit
    from sfumato.search.searcher import Searcher
    from sfumato.workflows.judge import Found, Session

_KEYS = "y yes, n no, s skip, u undo, o open the picture, q quit"


@dataclass(frozen=True)
class AskedAbout:
    """What is judged, and by whom."""

    query: list[str] | None = word(None, "Texts to search for.", "QUERY")
    queries: Path | None = flag(None, "Or a file with one text per line.", metavar="FILE")
    out: Path = flag(..., "File of verdicts, JSON lines; it is continued.", metavar="FILE")
    judge: str | None = flag(None, "Name of the judge. Default: the name of the user.", metavar="NAME")
    n: int = flag(100, "Number of hits to sample.", "-n", min=1)
    k: int = flag(10, "Number of hits per query to sample from.", "-k", min=1)
    seed: int = rare(0, "Seed of the sample.", min=0)

    @property
    def texts(self) -> list[str]:
        """All queries."""
        texts = list(self.query or [])
        if self.queries is not None:
            try:
                texts += self.queries.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"cannot read {self.queries}: {error}; give a file in UTF-8") from error
        return [text.strip() for text in texts if text.strip()]

    @property
    def name(self) -> str:
        """The judge."""
        try:
            return self.judge or getpass.getuser()
        except (KeyError, OSError) as error:
            raise UserError("the system does not know the name of the user; give --judge NAME") from error


@dataclass(frozen=True)
class OtherVerdicts:
    """What is done with verdicts instead of asking."""

    taken: list[Path] | None = flag(
        None, "Merge verdicts into --out: .jsonl, others are TREC qrels; repeatable.", "--import", metavar="FILE"
    )
    export: Path | None = flag(None, "Write the verdicts of --out as TREC qrels.", metavar="FILE")
    agreement: bool = flag(False, "Say how far the judges of --out agree.", "--agreement")


@command()
def judge(
    *,
    folder: Path = word(..., "Folder of an index or a collection.", "INDEX"),
    asked: AskedAbout,
    other: OtherVerdicts,
    run: str | None = flag(None, "Folder or name of the model. Default: where it was for the index.", metavar="MODEL"),
    store: str | None = flag(None, "URL of the store. Default: the one it was built with.", metavar="URL"),
    as_json: AsJson = False,
) -> None:
    """Say which hits of a search are right, and keep the verdicts.

    Hits are sampled with known probabilities, so that few verdicts tell about all. Keys: y yes, n no, s skip, u undo, o
    open the picture, q quit. Every verdict is saved at once, and the same command goes on.
    """
    from sfumato.workflows.index import is_gallery
    from sfumato.workflows.judge import judge_hits

    if not is_gallery(folder):
        raise UserError(f"{folder} holds neither an index nor a collection; make one with sfumato index")
    check_out_file(asked.out)
    if other.taken or other.export or other.agreement:
        if asked.texts:
            raise UserError("--import, --export and --agreement ask nothing; leave the queries out")
        return _without_asking(asked, other, as_json)
    if not asked.texts:
        raise UserError("nothing to judge: give queries, or a file of them with --queries FILE")
    session = judge_hits(
        folder, asked.texts, _ask, out=asked.out, judge=asked.name, n=asked.n, k=asked.k, run=run, store=store,
        seed=asked.seed,
    )  # fmt: skip
    new, own, left = session.n_given, len(session.own), len(session.sample) - session.place
    result = {"out": str(asked.out), "judge": asked.name, "new": new, "verdicts": own, "left": left}
    line = f"{counted(new, 'new verdict')}, {own:,} of {asked.name} in all: {asked.out}"
    print_result(result, as_json, line)


def _without_asking(asked: AskedAbout, other: OtherVerdicts, as_json: bool) -> None:
    from sfumato.evaluation.judgements import IMPORTED, agreement, read_judgements, write_qrels
    from sfumato.workflows.judge import import_verdicts

    result: dict[str, object] = {"out": str(asked.out)}
    lines = []
    if other.taken:
        new, _ = import_verdicts(asked.out, other.taken, asked.judge or IMPORTED)
        result["new"] = new
        lines.append(f"{counted(new, 'new or later verdict')}: {asked.out}")
    verdicts = read_judgements(asked.out)
    if other.export:
        check_out_file(other.export, option="--export")
        result["exported"] = n = write_qrels(other.export, verdicts)
        lines.append(f"{counted(n, 'pair')} as TREC qrels, names percent-encoded: {other.export}")
    if other.agreement:
        result["agreement"] = found = agreement(verdicts)
        names = ", ".join(f"{name} {n:,}" for name, n in found["judges"].items())
        lines.append(f"{counted(found['verdicts'], 'verdict')} on {counted(found['pairs'], 'pair')} ({names})")
        kappa = "none" if found["kappa"] is None else f"{found['kappa']:.2f}"
        lines.append(
            f"{counted(found['pairs_of_several'], 'pair')} with several judges, {found['unanimous']:,} unanimous;"
            f" Fleiss' kappa {kappa} (1: they agree, 0: as by chance)"
        )
    print(json.dumps(result, ensure_ascii=False) if as_json else "\n".join(lines))


def _ask(session: "Session", found: "Found", searcher: "Searcher") -> None:
    """Ask until the end, or until the judge has enough. Questions go to standard error, so that --json is alone."""
    from sfumato.reports.judging import in_blocks, question

    shown = None
    while (hit := session.next) is not None:
        item = found.hit[hit.pair]
        if shown is not hit:
            image = searcher.image_of(item) if sys.stderr.isatty() else None
            print(question(hit, item, session.place + 1, len(session.sample)), file=sys.stderr)
            if image is not None:
                print(in_blocks(image), file=sys.stderr)
            shown = hit
        print(f"Does it fit? ({_KEYS}) ", end="", file=sys.stderr, flush=True)
        key = _key()
        print(key if sys.stdin.isatty() else "", file=sys.stderr)
        if key == "q":
            return
        if key in ("y", "n", "s"):
            session.answer({"y": 1, "n": 0}.get(key))
        elif key == "u":
            if not session.undo():
                print("there is nothing to undo in this round", file=sys.stderr)
        elif key == "o":
            _open(searcher, item)
        else:
            print(f"unknown key {key!r}", file=sys.stderr)


def _key() -> str:
    """A key, or the first letter of a line where no person types; q at the end of the input."""
    if sys.stdin.isatty():
        try:
            return typer.getchar().lower()
        except (EOFError, KeyboardInterrupt):
            return "q"
    line = sys.stdin.readline()
    return line.strip()[:1].lower() if line else "q"


def _open(searcher: "Searcher", item: "Hit") -> None:
    """Show the picture of a hit in the system's viewer."""
    import tempfile

    if (image := searcher.image_of(item)) is None:
        print("there is no picture of this item", file=sys.stderr)
        return
    with tempfile.NamedTemporaryFile(suffix=Path(item.id).suffix or ".jpg", delete=False) as file:
        file.write(image.read_bytes())
    typer.launch(file.name)
