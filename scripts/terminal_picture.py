"""docs/images/terminal.svg: a terminal in which `sfumato` indexes and searches a folder. All that it shows was printed.

    python scripts/terminal_picture.py COCO [--out docs/images/terminal.svg]

COCO is a folder with photographs in val2017 and annotations/captions_val2017.json. The picture in docs has the first 50
photographs of tiny_coco, as files with their five captions in a .txt file beside each. The model is `small`, so that no
network is needed. tests/docs/test_site.py compares what the picture shows with what is printed now.
"""

import argparse
import html
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COMMANDS = (
    "sfumato index small --data pictures --out my-index",
    'sfumato search my-index "street" "a man on a skateboard" "kangaroo" -k 3',
)
WIDTH = 92  # in letters
DARK, LIGHT, GREEN = (29, 33, 41), (222, 226, 233), (126, 200, 140)
THEME = TerminalTheme(DARK, LIGHT, [DARK, LIGHT, GREEN, *[LIGHT] * 5])

# rich's own format without its fonts from the network.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def write_photographs(coco: Path, folder: Path) -> None:
    """Put the photographs that the captions name into a folder, with the captions of each beside it."""
    folder.mkdir()
    known = json.loads((coco / "annotations" / "captions_val2017.json").read_text(encoding="utf-8"))
    for image in known["images"]:
        shutil.copy(coco / "val2017" / image["file_name"], folder)
        captions = [one["caption"].strip() for one in known["annotations"] if one["image_id"] == image["id"]]
        (folder / image["file_name"]).with_suffix(".txt").write_text("\n".join(captions), encoding="utf-8")


def session(coco: Path) -> list[tuple[str, str]]:
    """The commands, and what each printed in a new folder."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "HF_HUB_OFFLINE": "1"}
    printed = []
    with tempfile.TemporaryDirectory() as place:
        write_photographs(coco, Path(place) / "pictures")
        for line in COMMANDS:
            command = [sys.executable, "-m", *shlex.split(line)]
            done = subprocess.run(command, cwd=place, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            printed.append((line, done.stdout))
    return printed


def drawn(printed: list[tuple[str, str]]) -> str:
    """The session as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_terminal=True)
    for i, (command, output) in enumerate(printed):
        console.print(Text.assemble("\n" * (i > 0), ("$ ", "green"), (command, "bold")))
        console.print(Text(output.rstrip("\n")))
    return console.export_svg(title="sfumato", theme=THEME, code_format=FORMAT, unique_id="terminal")


def words(svg: str) -> list[str]:
    """The words that a picture shows."""
    return html.unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))).split()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("coco", type=Path, metavar="COCO")
    parser.add_argument("--out", type=Path, default=Path("docs/images/terminal.svg"))
    arguments = parser.parse_args()
    arguments.out.write_text(drawn(session(arguments.coco)), encoding="utf-8")
