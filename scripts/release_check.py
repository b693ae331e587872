"""Build what a release consists of, and try it as a stranger would: `make release-check`.

Builds the sdist and the wheel into dist/ and a second wheel from the sdist, checks what is in them, renders their
metadata, validates CITATION.cff, and installs the wheel into a new environment outside the tree. There it indexes,
searches and serves pictures without torch, and says how large the environment is and how long each step takes; then it
adds the extra `train`, trains a tiny model on the embedded emoji set, indexes, searches and serves it. uvx and pipx run
the wheel, too. Beside sdist and wheel it writes what was installed with the wheel, as a software bill of materials in
CycloneDX's JSON, and the checksums of all three. Versions come from constraints.txt, but for those of uvx and pipx. It
needs a package index for pip; the tools (build, twine, cffconvert, cyclonedx-bom) get environments of their own.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TOOLS = ("build", "twine", "cffconvert")
"""Packages that build and check a release; nothing else needs them. cffconvert and cyclonedx-bom exclude each other."""

LICENCES = ("LICENSE", "FluentEmoji-MIT", "Noto-Apache-2.0", "Twemoji-CC-BY-4.0", "Unicode-3.0", "emojibase-MIT")
"""Beginnings of the names of the licence files."""

TINY = (
    *("train.epochs=1", "train.threads=1", "model.dim=16", "model.image.size=16", "model.image.width=4"),
    *("model.text.vocabulary=200", "model.text.width=16", "optim.warmup_epochs=0"),
)
"""Changes to the recipe emoji-pixels, so that it trains in seconds."""


def version_of_source(root: Path) -> str:
    """The version in ``sfumato/__init__.py``, the only place that has it."""
    found = re.findall(r'^__version__ = "([^"]+)"$', (root / "src/sfumato/__init__.py").read_text("utf-8"), re.M)
    if len(found) != 1:
        raise SystemExit(f'src/sfumato/__init__.py: expected one line __version__ = "...", found {len(found)}')
    return str(found[0])


def members(archive: Path) -> dict[str, bytes]:
    """Name -> content of the files of a wheel or an sdist; an sdist's names without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        files = {member.name.partition("/")[2]: sdist.extractfile(member) for member in sdist if member.isfile()}
        return {name: file.read() for name, file in files.items() if file}


def expected_in_wheel(root: Path) -> dict[str, bytes]:
    """Name -> content of everything of the source tree that a wheel has to have: the package, and the recipes."""
    package, recipes = root / "src/sfumato", root / "recipes"
    files = {path: f"sfumato/{path.relative_to(package).as_posix()}" for path in package.rglob("*")}
    files |= {path: f"sfumato/recipe_files/{path.relative_to(recipes).as_posix()}" for path in recipes.rglob("*")}
    return {
        name: path.read_bytes()
        for path, name in files.items()
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Names that only one of the two has, or that have another content."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def wrong_in_wheel(found: dict[str, bytes], expected: dict[str, bytes], version: str) -> list[str]:
    """What is the matter with the members of a wheel, a line each."""
    info = f"sfumato-{version}.dist-info/"
    inside = {name: data for name, data in found.items() if not name.startswith(info)}
    wrong = [f"{name}: differs from the source, or is in one of them only" for name in differences(inside, expected)]
    licences = [name.rpartition("/")[2] for name in found if name.startswith(f"{info}licenses/")]
    wrong += [f"licence {name} is missing" for name in LICENCES if not any(own.startswith(name) for own in licences)]
    metadata = found.get(f"{info}METADATA", b"").decode()
    if f"\nVersion: {version}\n" not in metadata:
        wrong.append(f"the metadata do not state version {version}, that of the source")
    entry = found.get(f"{info}entry_points.txt", b"").decode()
    if "sfumato = sfumato.cli:main" not in entry:
        wrong.append("the command sfumato is missing")
    return wrong


def wrong_version(root: Path, version: str) -> list[str]:
    """Other places that state a version of the package."""
    wrong = []
    if re.search(r"^version", (root / "CITATION.cff").read_text("utf-8"), re.M):
        wrong.append("CITATION.cff states a version; src/sfumato/__init__.py alone has it")
    if 'dynamic = ["version"]' not in (root / "pyproject.toml").read_text("utf-8"):
        wrong.append("pyproject.toml states a version; src/sfumato/__init__.py alone has it")
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog(root), re.M):
        wrong.append(f"CHANGELOG.md has no heading {version} with a date")
    return wrong


def changelog(root: Path) -> str:
    return (root / "CHANGELOG.md").read_text("utf-8")


def tried(*command: str | Path, cwd: Path = ROOT, answers: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command without the source tree on its path."""
    print(f"$ {' '.join(str(part) for part in command)}", flush=True)
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    parts = [str(part) for part in command]
    return subprocess.run(parts, cwd=cwd, env=own, input=answers, capture_output=True, text=True)


def run(*command: str | Path, cwd: Path = ROOT, answers: str = "") -> str:
    """The same; its output, or the end of the check."""
    done = tried(*command, cwd=cwd, answers=answers)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}"
        raise SystemExit(f"{said}\nthe check failed with exit status {done.returncode}: {' '.join(done.args)}")
    return done.stdout


def environment(folder: Path) -> Path:
    """The folder of commands of a new environment."""
    if not (folder / "pyvenv.cfg").exists():
        venv.create(folder, with_pip=True)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def build(tools: Path, folder: Path) -> tuple[Path, Path, Path]:
    """Build the sdist, the wheel from the tree and the wheel from the sdist; returns the three files."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(tools / "python", "-m", "build", "--sdist", "--wheel", "--outdir", ROOT / "dist", ROOT)
    (sdist,), (wheel,) = (ROOT / "dist").glob("*.tar.gz"), (ROOT / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(tools / "python", "-m", "build", "--wheel", "--outdir", folder / "again", source)
    (again,) = (folder / "again").glob("*.whl")
    return sdist, wheel, again


def check_files(sdist: Path, wheel: Path, again: Path, version: str) -> list[str]:
    """What is the matter with the built files, a line each."""
    found = members(wheel)
    wrong = wrong_version(ROOT, version) + wrong_in_wheel(found, expected_in_wheel(ROOT), version)
    wrong += [f"{name}: the wheel of the sdist differs" for name in differences(members(again), found)]
    needed = (
        "PKG-INFO",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "constraints.txt",
        "tests/conftest.py",
    )
    wrong += [f"the sdist lacks {name}" for name in needed if name not in members(sdist)]
    return wrong


def timed(*command: str | Path, cwd: Path) -> str:
    """Run a command, and say how long it took."""
    start = time.monotonic()
    printed = run(*command, cwd=cwd)
    print(f"  {time.monotonic() - start:.1f} s", flush=True)
    return printed


def try_without_torch(commands: Path, folder: Path) -> None:
    """Index, search and serve pictures in an environment without torch."""
    absent = tried(commands / "python", "-c", "import torch", cwd=folder)
    if absent.returncode == 0:
        raise SystemExit("release-check: the base package has installed torch")
    size = sum(path.lstat().st_size for path in commands.parent.rglob("*") if path.is_file())
    print(f"the environment without torch has {size / 1e6:.0f} MB", flush=True)
    (folder / "pictures").mkdir()
    with zipfile.ZipFile(ROOT / "src/sfumato/data/emoji_set/pictures.zip") as emoji:
        for name in sorted(name for name in emoji.namelist() if not name.endswith("/"))[:60]:
            (folder / "pictures" / Path(name).name).write_bytes(emoji.read(name))
    timed(commands / "sfumato", "index", "--data", "pictures", "--out", "collection", cwd=folder)
    found = timed(commands / "sfumato", "search", "collection", "a face", "-k", "3", "--json", cwd=folder)
    if len(json.loads(found)[0]["hits"]) != 3:
        raise SystemExit(f"release-check: the search without torch found {found}")
    refused = tried(commands / "sfumato", "demo", cwd=folder)
    if refused.returncode != 2 or 'pip install "sfumato[train]"' not in refused.stderr:
        raise SystemExit(f"release-check: the demo without torch says {refused.stderr}")
    try_service(commands, folder, "collection")


def try_runners(tools: Path, wheel: Path, folder: Path, version: str) -> None:
    """Run the command of the wheel by uvx and pipx, which make an environment for it."""
    run(tools / "python", "-m", "pip", "install", "--quiet", "uv", "pipx")
    os.environ |= {"UV_CACHE_DIR": str(folder / "uv"), "PIPX_HOME": str(folder / "pipx")}
    for runner in ((tools / "uvx", "--from", wheel), (tools / "pipx", "run", "--spec", wheel)):
        if version not in timed(*runner, "sfumato", "--version", cwd=folder):
            raise SystemExit(f"release-check: {runner[0].name} does not run the command of the wheel")


def try_commands(commands: Path, folder: Path, version: str) -> None:
    """Train, index and search by the installed commands, in a folder outside of the tree."""
    sfumato = commands / "sfumato"
    where = run(commands / "python", "-c", "import sfumato; print(sfumato.__file__)", cwd=folder)
    if str(ROOT / "src") in where:
        raise SystemExit(f"release-check: the new environment imports {where.strip()}, not the wheel")
    printed = run(commands / "python", "-c", "import sfumato; print(sfumato.__version__)", cwd=folder)
    if printed.strip() != version:
        raise SystemExit(f"release-check: the installed version is {printed.strip()}, expected {version}")
    if version not in run(sfumato, "--version", cwd=folder):
        raise SystemExit(f"release-check: sfumato --version does not print {version}")
    names = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    listed = run(sfumato, "recipes", cwd=folder)
    if absent := sorted(name for name in names if name not in listed):
        raise SystemExit(f"release-check: sfumato recipes does not list {', '.join(absent)}")
    run(sfumato, "train", "emoji-pixels", *TINY, "--out", "run", cwd=folder)
    run(sfumato, "index", "run", "--split", "test", "--out", "index", cwd=folder)
    hits = json.loads(run(sfumato, "search", "index", "a giraffe", "-k", "3", "--json", cwd=folder))
    if "1F" not in json.dumps(hits):
        raise SystemExit(f"release-check: the search found no emoji: {hits}")


@contextlib.contextmanager
def served(commands: Path, folder: Path, index: str = "index") -> Iterator[str]:
    """The address of a service of an index in a folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(commands / "sfumato"), "serve", index, "--port", str(port)]
    print(f"$ {' '.join(command)}", flush=True)
    process = subprocess.Popen(command, cwd=folder)
    try:
        for _ in range(240):
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2).close()
                break
            if process.poll() is not None:
                raise SystemExit("release-check: the service ended before it was ready")
            time.sleep(0.25)
        else:
            raise SystemExit("release-check: the service was not ready after a minute")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def try_service(commands: Path, folder: Path, index: str = "index") -> None:
    """Fetch the page with its files, the documentation and an answer from a service of the wheel."""
    with served(commands, folder, index) as url:
        for path in ("/", "/page/page.js", "/page/page.css", "/docs", "/openapi.json", "/v1/search?q=a+giraffe"):
            with urllib.request.urlopen(url + path, timeout=30) as answer:
                print(f"GET {path}: {answer.status}, {len(answer.read()):,} bytes", flush=True)


def local_places(value: Any) -> list[str]:
    """The strings in a JSON value that name a place on the machine that wrote it."""
    if isinstance(value, dict | list):
        return [place for one in (value.values() if isinstance(value, dict) else value) for place in local_places(one)]
    return [value] if isinstance(value, str) and re.search(r"^[/~]|^[A-Za-z]:\\|\bfile:", value) else []


def bill_of_materials(listed: dict[str, Any], version: str) -> dict[str, Any]:
    """A CycloneDX list of an environment with sfumato as its main component, and without places on this machine."""
    main = [one for one in listed["components"] if one["name"] == "sfumato"]
    if [one["version"] for one in main] != [version]:
        raise SystemExit(f"release-check: the bill of materials does not have sfumato {version} once: {main}")
    main[0]["purl"] = f"pkg:pypi/sfumato@{version}"
    others = [one for one in listed["components"] if one is not main[0]]
    for one in listed["components"]:
        references = [link for link in one.pop("externalReferences", ()) if not local_places(link["url"])]
        one |= {"externalReferences": references} if references else {}
    bill = listed | {"metadata": listed["metadata"] | {"component": main[0]}, "components": others}
    if places := local_places(bill):
        raise SystemExit(f"release-check: the bill of materials names places on this machine: {', '.join(places)}")
    return bill


VALIDATE = """import pathlib, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
sys.exit(JsonStrictValidator(SchemaVersion.V1_6).validate_str(pathlib.Path(sys.argv[1]).read_text("utf-8")))
"""


def write_bill(tools: Path, commands: Path, folder: Path, version: str) -> Path:
    """Write what the environment of the commands consists of into dist/, and validate it."""
    run(tools / "python", "-m", "pip", "install", "--quiet", "cyclonedx-bom")
    listed, target = folder / "environment.json", ROOT / "dist" / f"sfumato-{version}.cdx.json"
    options = ("--output-reproducible", "--short-PURLs", "--spec-version", "1.6", "--output-file", listed)
    run(tools / "cyclonedx-py", "environment", *options, commands / "python")
    bill = bill_of_materials(json.loads(listed.read_text("utf-8")), version)
    target.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n", "utf-8")
    run(tools / "python", "-c", VALIDATE, target)
    print(f"{target.name}: {len(bill['components'])} components beside sfumato {version}", flush=True)
    return target


def checksums(files: Sequence[Path]) -> str:
    """The lines of SHA256SUMS, which `sha256sum -c` reads."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(files))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the environments here, for a next time; else a temporary one")
    options = parser.parse_args(arguments)
    version = version_of_source(ROOT)
    with tempfile.TemporaryDirectory(prefix="sfumato-release-") as temporary:
        folder = Path(temporary)
        kept = options.folder.resolve() if options.folder else folder
        tools = environment(kept / "tools")
        run(tools / "python", "-m", "pip", "install", "--quiet", *TOOLS)
        sdist, wheel, again = build(tools, folder)
        run(tools / "twine", "check", "--strict", sdist, wheel)
        run(tools / "cffconvert", "--validate", "-i", "CITATION.cff")
        if wrong := check_files(sdist, wheel, again, version):
            print("release-check:", *wrong, sep="\n  ", file=sys.stderr)
            return 1
        shutil.rmtree(kept / "installed", ignore_errors=True)
        commands, work = environment(kept / "installed"), folder / "work"
        work.mkdir()
        install = (commands / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
        timed(*install, f"{wheel}[serve]", cwd=ROOT)
        run(commands / "python", "-m", "pip", "check")
        try_without_torch(commands, work)
        try_runners(tools, wheel, folder, version)
        run(*install, f"{wheel}[serve,train]")
        try_commands(commands, work, version)
        try_service(commands, work)
        bill = write_bill(environment(kept / "bill"), commands, folder, version)
        (ROOT / "dist/SHA256SUMS").write_text(checksums([sdist, wheel, bill]), "utf-8")
        run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=ROOT / "dist")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        print(f"release-check: {sdist.name} and {wheel.name} are good; they and {bill.name} lie in {ROOT / 'dist'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
