"""`python -m papers captions`: the caption metric."""

from pathlib import Path

import typer

from papers.commands import app
from sfumato.cli.common import AsJson, check_out_file, command, flag, print_result, word, writing
from sfumato.errors import UserError, counted

captions = typer.Typer(help="The caption metric.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(captions, name="captions")


@command(captions)
def score(
    pairs: Path = word(
        ...,
        "File of pairs, one JSON object a line: text, texts (that describe the item), image (path, relative to the"
        " file). texts or image may be missing.",
        "PAIRS",
    ),
    out: Path = flag(..., "File of the results: the same lines with fits, the probability.", metavar="FILE"),
    as_json: AsJson = False,
) -> None:
    """Write the probability that a person would say that each text describes its item.

    The item is given by its texts, its image, or both.
    """
    from papers.captions.score import score_file

    check_out_file(out)
    if out.exists() and pairs.exists() and out.samefile(pairs):
        raise UserError(f"--out {out} is the file of the pairs; give another name")
    with writing(out):
        n = score_file(pairs, out)
    print_result({"out": str(out), "n": n}, as_json, f"{counted(n, 'pair')} scored: {out}")
