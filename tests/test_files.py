"""Files are whole or absent; messages for a terminal; ids that no gallery takes."""

import math
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.raising import failing, raises

from sfumato import GaussianCollection, GaussianEmbedding, GaussianIndex
from sfumato.errors import UserError, as_typed, explain_os_error, printable
from sfumato.files import write_atomically, write_json
from sfumato.ids import check_ids, id_error, plain_id


def test_text_bytes_and_json_are_written_whole(tmp_path):
    path = tmp_path / "x"
    write_atomically(path, "Bär\n")
    assert path.read_bytes() == "Bär\n".encode()
    write_atomically(str(path), b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff" and list(tmp_path.iterdir()) == [path]
    write_json(path := tmp_path / "x.json", {"a": [1, "é"]})
    before = path.read_text(encoding="utf-8")
    assert before == '{\n  "a": [\n    1,\n    "é"\n  ]\n}\n'
    for value in (math.nan, math.inf):
        raises(ValueError, "JSON compliant", write_json, path, {"a": value})
    assert path.read_text(encoding="utf-8") == before and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(FileNotFoundError, match=r"cannot write .*x: the folder .*no does not exist; create it first"):
        write_atomically(tmp_path / "no" / "x", b"")


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", failing(OSError("no space left on device")))
    raises(OSError, "no space", write_atomically, path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="permissions and signals are those of POSIX")
def test_permissions_are_ordinary_and_a_process_killed_before_the_rename_leaves_the_old_file(tmp_path):
    path, ordinary = tmp_path / "x", tmp_path / "ordinary"
    write_atomically(path, "old")
    ordinary.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    program = f"""
        import os, signal
        from sfumato.files import write_atomically
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_atomically({str(path)!r}, "new" * 1000)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program)]).returncode == -9
    assert path.read_text() == "old"


def test_links_to_themselves_and_full_disks_are_explained(tmp_path):
    (tmp_path / "a").symlink_to("a")
    refused = explain_os_error(raises(OSError, None, (tmp_path / "a").read_bytes).value)
    assert "a: is a link that leads back to itself" in refused
    message = "here/index: the disk is full; free some space, then run the same command again"
    assert explain_os_error(UserError(message)) == message, "a message of ours keeps its path"
    assert explain_os_error(OSError(28, "No space left on device", "a/b")).startswith("a/b: the disk is full")


def test_what_a_terminal_or_a_shell_would_take_otherwise_is_escaped(sfumato):
    escaped = "a\\x1b[2Jb\\rc\\x00\\u202e\\udce9\\u2028 é ü 中\td\ne"
    assert printable("a\x1b[2Jb\rc\x00\u202e\udce9\u2028 é ü 中\td\ne") == escaped
    assert printable("x" * 30 + "\n" + "y" * 5, most=10) == "x" * 10 + " ...\nyyyyy"
    told = sfumato.refused("train", "\x1b[31mno\r.toml")
    assert "\\x1b[31mno\\r.toml" in told and "\x1b" not in told and "\r" not in told
    words = ["sfumato", "search", Path("my runs/ü"), "it's a dog", "--out=x"]
    assert as_typed(*words) == "sfumato search 'my runs/ü' 'it'\"'\"'s a dog' --out=x"
    printed = subprocess.run(["sh", "-c", f"printf '%s\\n' {as_typed(*words)}"], capture_output=True, check=True).stdout
    assert printed.decode().splitlines() == [str(word) for word in words]


GOOD = ("a", "birds/7 ü.jpg", "...", "a/..b", "/a.jpg", "👩‍🎨", " ", 'it\'s "1"')
BAD = {
    "": "is empty", ".": "names a folder in paths", "a/../b": "names a folder in paths", "./a": "names a folder",
    "a\nb": "holds a line break or another control character", "a\r": "holds a line break",
    "\ttab": "another control character", "nul\0": "another control character", "\x85": "another control character",
    "a\u2028b": "holds a line break", "\ud800": "is not Unicode",
}  # fmt: skip


def test_what_is_an_id():
    assert [id_error(id) for id in GOOD] == [""] * len(GOOD)
    for id, reason in BAD.items():
        assert reason in id_error(id) and repr(id) in id_error(id) and id_error(id).isprintable()
    check_ids(GOOD, "these")
    escaped = {"../a/./b.jpg": "a/b.jpg", "/tmp/a": "tmp/a", "a/..": "a", "http://a/b": "http://a/b", "..": ".."}
    assert {path: plain_id(path) for path in escaped} == escaped
    raises(ValueError, r"^these: row 2: the id 'x\\ny' holds a line break", check_ids, ["a", "b", "x\ny", "."], "these")


@pytest.mark.parametrize("id", [id for id in BAD if id and id.isascii() and "\0" not in id])
def test_every_door_names_the_id_and_its_row(tmp_path, id):
    embeddings, ids = GaussianEmbedding(torch.zeros(3, 4), torch.zeros(3, 4)), ["fine", id, "also fine"]
    told = rf"row 1: the id {id!r} ".replace("\\", "\\\\").replace(".", "\\.")
    raises(ValueError, "GaussianIndex: " + told, GaussianIndex.build, embeddings, ids)
    with GaussianCollection.create(tmp_path / "c", d=4) as made:
        raises(ValueError, "GaussianCollection: " + told, made.upsert, embeddings, ids)
        assert len(made) == 0
