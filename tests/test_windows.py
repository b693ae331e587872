"""Windows, where no test has run: paths with drives, files that are in use, functions that it lacks; see support."""

import io
import mmap
import ntpath
import os
import subprocess
import sys
import textwrap
from pathlib import PureWindowsPath
from types import SimpleNamespace

import pytest
from PIL import Image
from support.raising import failing, raises

from sfumato import cli, errors, files
from sfumato.encoders.frozen import _truncate
from sfumato.files import is_plain_name, move, relative_name, write_atomically
from sfumato.search.stores.protocol import anchored, scheme

IN_USE = PermissionError(13, "used by a process")


def test_paths_have_drives_and_names_slashes(monkeypatch):
    monkeypatch.setattr(files, "os", SimpleNamespace(path=ntpath, sep="\\"))
    below = {r"C:\Users\me\a\b.jpg": "a/b.jpg", "C:/Users/me/c.jpg": "c.jpg", r"c:\users\x.jpg": "../x.jpg"}
    assert {path: relative_name(path, r"C:\Users\me") for path in below} == below
    assert relative_name(r"D:\x\y.jpg", r"C:\Users") == "D:/x/y.jpg", "on another drive"
    assert [is_plain_name(name) for name in ("a.b", "C:a", r"a\b")] == [True, False, False]
    of = {"a?b=1": r"C:\me\a?b=1", r"D:\a": r"D:\a"}
    assert scheme(r"D:\a?b=1") == "file" and {url: anchored(url, PureWindowsPath("C:/me")) for url in of} == of


def test_a_command_and_its_output_are_read_by_windows(monkeypatch):
    words = "sfumato", "search", r"C:\my runs\ü", "it's a dog"
    with monkeypatch.context() as patch:
        patch.setattr(errors, "os", SimpleNamespace(name="nt"))
        assert errors.as_typed(*words) == r'''sfumato search "C:\my runs\ü" "it's a dog"'''
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    cli.run(lambda: print("↔ キリン", flush=True), "sfumato", "")
    assert written.getvalue().decode().strip() == "↔ キリン"
    command, old = [sys.executable, "-m", "sfumato", "search", "キリン", "a"], {"PYTHONIOENCODING": "cp1252"}
    assert "キリン" in subprocess.run(command, env=os.environ | old, capture_output=True).stderr.decode()


def test_a_file_is_replaced_when_its_readers_are_done(tmp_path, monkeypatch):
    file, replace, refused = tmp_path / "x", os.replace, []
    write_atomically(file, "old")

    def busy(source, target):
        refused.append(target)
        if len(refused) < 3:
            raise IN_USE
        replace(source, target)

    monkeypatch.setattr(os, "replace", busy)
    write_atomically(file, "new")
    assert file.read_text() == "new" and refused == [file] * 3
    monkeypatch.setattr(os, "replace", failing(IN_USE))
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=lambda _: None))
    raises(PermissionError, "used by a process", write_atomically, file, "newer")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("windows")
def test_the_simulation_holds_what_is_open_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=lambda _: None))
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "x"
    write_atomically(file, b"rows" * 100)
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        raises(PermissionError, "used by a process", file.unlink)
    for change in (file.unlink, lambda: move(file, tmp_path / "y"), lambda: move(file.parent, tmp_path / "z")):
        raises(PermissionError, "used by a process", change)
    os.utime(file, (0, 0))
    _truncate(file, 4)  # Of whole records: a mapped file is not touched.
    assert file.stat().st_mtime == 0
    mapped.close()
    move(file.parent, tmp_path / "z")
    _truncate(tmp_path / "z" / "x", 7)
    assert (tmp_path / "z" / "x").stat().st_size == 399


def test_what_windows_lacks_is_not_needed(tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    lacking = "os.fork, os.nice, os.sched_getaffinity, os.getloadavg, signal.setitimer, signal.SIGPROF"
    code = f"""
        import os, signal, sys
        del {lacking}
        sys.modules["resource"] = None
        from sfumato.serve import decoding
        decoding._limit(1 << 33), decoding._end_after(1)
        from sfumato.cli import main
        sys.argv = ["sfumato", "index", "--data", ".", "--out", "index"]
        main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True)
    assert "1 image in the collection" in done.stdout, done.stderr
