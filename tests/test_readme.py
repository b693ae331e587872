"""The README's blocks run, the commands of README and docs exist, and the paths and tests that they name are there."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import click
import numpy as np
import pytest
import typer
from support.processes import Started, command
from support.serving import Process, ready, until
from support.toy import make_toy
from support.words import folded

from sfumato.cli import app
from sfumato.models.recipe import find_recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
read = lambda document: (ROOT / document).read_text(encoding="utf-8")
blocks = lambda language, text=README: re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def printed_by(function, *arguments):
    process = Started(function, *arguments, piped=True)
    printed = process.stdout.read()
    process.stdout.close()
    status, errors = process.finish()
    assert status == 0, errors
    return printed + errors


def run_block(folder, block):
    os.chdir(folder)
    exec(block, {"__name__": "__main__"})


@pytest.mark.slow
def test_the_blocks_of_guides_run(tmp_path):
    blocks_of = lambda page: blocks("python", read(f"docs/{page}.md"))
    assert len(printed_by(run_block, tmp_path, *blocks_of("start/five-minutes")).splitlines()) >= 3
    printed = printed_by(run_block, tmp_path, *blocks_of("guides/search"))
    assert printed.count("\n") == 3 and printed.count("'colour': 'red'") == 3
    found = [line.split() for line in printed_by(run_block, tmp_path, blocks_of("guides/adopt")[0]).splitlines()]
    assert len(found) == 3 and found[0][0] == "3" and int(found[0][1].rstrip("%")) > 50  # Text 7 is of image 3.


def run_lines(folder, lines):
    os.chdir(folder)
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        assert program == "sfumato", line
        try:
            command(*arguments)
        except SystemExit as end:
            if end.code:
                raise


@pytest.fixture(scope="module")
def visited(tmp_path_factory):
    """A folder in which all commands of the README ran, and what they printed. One process: torch is imported once."""
    folder = tmp_path_factory.mktemp("readme")
    make_toy(folder, n_each=8)
    shutil.move(folder / "data", folder / "pictures")
    (folder / "more").mkdir()
    copies = {"000.png": "more", "001.png": "more", "002.png": "pictures/beach.jpg", "002.txt": "pictures/beach.txt"}
    for name, copy in copies.items():  # The beach is deleted.
        shutil.copy(folder / "pictures" / name, folder / copy)
    images, noise = np.random.default_rng(0).standard_normal((2, 200, 8)).astype(np.float32)
    for name, array in {"images": images, "texts": images + 0.3 * noise, "query": images[7]}.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "pairs.csv").write_text("image,text\n" + "".join(f"{i},{i}\n" for i in range(200)))
    lines = [line for line in "".join(blocks("sh")).splitlines() if line.strip() and not line.startswith("#")]
    return folder, folded(printed_by(run_lines, folder, lines))


@pytest.mark.slow
def test_shell_blocks_run_and_python_blocks_where_they_ran(visited):
    folder, printed = visited
    assert "recall@1" in printed and all(f"{n} images in " in printed for n in (193, 200))
    note = "All images trained the model. The probabilities are for new captions"
    assert printed.count(note) == 1, "of the trained model, not of the adopted one"
    assert printed.count("matches expected") >= 3, "two queries of words and a vector"
    [block], [line] = blocks("python"), re.findall(r"`(sfumato\.load_index.*?)`", README)
    assert "%  csd" in printed_by(run_block, folder, f"import sfumato\nprint({line})\n{block}")
    cited = re.findall(r"^(?:title|  - name): \"?(.*?)\"?$", read("CITATION.cff"), flags=re.MULTILINE)
    assert len(cited) == 2 and all(f"{{{name}}}" in README for name in cited)


@pytest.mark.slow
def test_the_service_of_the_readme_starts(visited):
    folder, _ = visited
    [line] = [line for line in commands("README.md") if " serve " in line]
    process = Process(*shlex.split(line, comments=True)[2:], folder=folder)
    until(lambda: ready(process.client))
    assert process.client.get("/v1/info").json()["galleries"]["images"]["n"] == 194
    assert "<title>" in process.client.get("/").text
    [line] = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("curl ")]
    asked = shlex.split(line.replace("127.0.0.1:8000", str(process.client.base_url).rstrip("/")))
    found = subprocess.run([*asked, "--silent", "--fail"], check=True, capture_output=True, text=True).stdout
    hits = json.loads(found)["answers"][0]["hits"]
    assert len(hits) == 3 and all(process.client.get(hit["picture"]).status_code == 200 for hit in hits)
    assert process.end(signal.SIGTERM)[0] == 0


@pytest.mark.slow
def test_the_commands_of_your_own_images_run(visited):
    folder, _ = visited
    (folder / "pictures" / "old").mkdir()
    shutil.copy(folder / "pictures" / "000.png", folder / "pictures" / "old" / "tree.png")
    elsewhere = "my-dataset", " serve "  # They need a data set or a network; the service starts in another test.
    lines = [line for line in commands("docs/start/your-own-images.md") if not any(one in line for one in elsewhere)]
    printed = folded(printed_by(run_lines, folder, [re.sub("my-index|mine-index", "again", line) for line in lines]))
    assert len(lines) > 12 and "all epochs are done" in printed and "excluded: private 0, *.gif 0" in printed


def commands(document):
    joined = "".join(block.replace("\\\n", " ") for block in blocks("bash", read(document)))
    return [line.strip() for line in joined.splitlines() if re.search(r"\bsfumato [a-z]", line)]


def test_commands_that_are_not_run_and_their_options_exist():
    for line in (line for document in (*DOCUMENTS, *PAGES) for line in commands(document)):
        words = shlex.split(re.split(r"\bsfumato (?=[a-z])", line, maxsplit=1)[1].replace("...", ""), comments=True)
        words = words[: next((k for k, word in enumerate(words) if word in "|>&" or word.endswith(";")), len(words))]
        if words[0] == "train" and "--import" not in words:
            overrides = [word for word in words[2:] if re.match(r"[a-z_.]+=", word) and "$" not in word]
            load_recipe(find_recipe(words[1]), overrides)
        context = click.Context(typer.main.get_command(app))
        while isinstance(context.command, click.Group):
            context = click.Context(context.command.commands[words.pop(0)], parent=context)
        context.command.make_parser(context).parse_args(words)


def test_links_into_pages_name_headings_and_others_are_addresses():
    slug = lambda heading: re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
    for document in {*DOCUMENTS, *PAGES} - {"CHANGELOG.md"}:
        for place, anchor in re.findall(r"\]\(([\w./-]*)#([^)]*)\)", read(document)):
            text = ((ROOT / document).parent / place if place else ROOT / document).read_text(encoding="utf-8")
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)), (document, place, anchor)
        for url in map("".join, re.findall(r"\]\((\w+:[^)]*)\)|<(https?:[^>]*)>", read(document))):
            assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w./?=&%#~+-]*)?(?<![.,;])", url), (document, url)


def test_paths_that_documents_and_code_name_exist_and_none_is_of_one_machine():
    assert len(README.splitlines()) <= 120
    targets = re.findall(r"make (\w+)", "".join(blocks("console", read("docs/start/install.md"))))
    assert targets and all(re.search(rf"^{target}:", read("Makefile"), flags=re.MULTILINE) for target in targets)
    folders = "src|tests|docs|recipes|benchmarks|scripts|losses|search|encoders|training|metrics|evaluation|data"
    folders += "|calibration|models|papers|reports|serve"
    missing = []
    for document in {*DOCUMENTS, *PAGES} - {"CHANGELOG.md"}:
        text = read(document)
        named = re.findall(rf"`((?:{folders})/[\w./-]*)`", text) + re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        places = (ROOT, ROOT / "src" / "sfumato", ROOT / "docs", (ROOT / document).parent)
        named = [path for path in named if "mine" not in Path(path).stem]  # the examples of CONTRIBUTING
        missing += [f"{document}: {path}" for path in named if not any((place / path).exists() for place in places)]
    sources = [p for folder in ("src", "tests", "benchmarks", "scripts", "recipes") for p in (ROOT / folder).rglob("*")]
    for path in sources:
        if path.suffix in {".py", ".toml"} and path != Path(__file__):
            named = re.findall(r"(?<![\w/\"])docs/[\w./-]+\.(?:md|txt|png)", path.read_text(encoding="utf-8"))
            missing += [f"{path.relative_to(ROOT)}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing
    for path in ROOT.rglob("*"):
        ours = path.suffix in {".py", ".md", ".toml", ".yml"} and path != Path(__file__)
        if ours and not {".venv", "runs", ".git", "build"} & set(path.parts):
            assert not re.search(r"(?<![\w.])/(?:work|root|home)/", path.read_text(encoding="utf-8")), path
