"""Files are whole or absent, whatever happens on the way."""

import math
import os
import stat
import subprocess
import sys
import textwrap

import pytest
from support.raising import raises

from sfumato.files import write_atomically, write_json


def test_text_bytes_and_json_are_written_whole(tmp_path):
    path = tmp_path / "x"
    write_atomically(path, "Bär\n")
    assert path.read_bytes() == "Bär\n".encode()
    write_atomically(str(path), b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff" and list(tmp_path.iterdir()) == [path]
    path = tmp_path / "x.json"
    write_json(path, {"a": [1, "é"]})
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

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
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
