"""Windows, where no test has run: drives, files that are in use, functions and an encoding that it lacks."""

import io
import mmap
import ntpath
import os
import subprocess
import sys
from pathlib import PureWindowsPath
from types import SimpleNamespace

import pytest
from PIL import Image
from support.raising import raises

from sfumato import cli, errors, files
from sfumato.encoders.frozen import _truncate
from sfumato.search.stores.protocol import anchored, scheme


def test_paths_have_drives_commands_double_quotes_and_pipes_utf_8(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", SimpleNamespace(path=ntpath, sep="\\"))
        below = {r"C:\me\a\b.jpg": "a/b.jpg", "c:/me/c.jpg": "c.jpg", r"C:\x.jpg": "../x.jpg", r"D:\y\z": "D:/y/z"}
        assert {path: files.relative_name(path, r"C:\me") for path in below} == below
        patch.setattr(errors, "os", SimpleNamespace(name="nt"))
        assert errors.as_typed(r"C:\my runs\ü", "it's", "-k") == r""""C:\my runs\ü" it's -k"""
    assert [files.is_plain_name(name) for name in ("a.b", "C:a", r"a\b")] == [True, False, False]
    of = {"a?b=1": r"C:\me\a?b=1", r"D:\a": r"D:\a"}
    assert scheme(r"D:\a?b=1") == "file" and {url: anchored(url, PureWindowsPath("C:/me")) for url in of} == of
    for name, given, stays in (("nt", {}, False), ("nt", {"PYTHONIOENCODING": "ascii"}, True), ("posix", {}, True)):
        monkeypatch.setattr(cli, "os", SimpleNamespace(**vars(os) | {"name": name, "environ": given}))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        cli.run(lambda: None, "sfumato", "")
        assert sys.stdout.encoding == ("ascii" if stays else "utf-8")


@pytest.mark.usefixtures("windows")
def test_what_is_open_or_mapped_is_waited_for_and_left_alone(tmp_path, monkeypatch):
    file = tmp_path / "in" / "x"
    file.parent.mkdir()
    files.write_atomically(file, b"rows" * 100)
    readers = [file.open("rb") for _ in range(3)]
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=lambda _: readers.pop().close()))
    files.write_atomically(file, b"rows" * 101)
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=(waits := []).append))
    for change in ((os.unlink, file), (os.replace, file.parent, tmp_path / "out")):
        raises(PermissionError, "used by a process", files.patiently, *change)
    raises(PermissionError, "used by a process", files.write_atomically, file, b"")
    monkeypatch.setattr(files, "IN_USE", ())
    raises(PermissionError, "used by a process", files.patiently, os.unlink, file)
    assert len(waits) == 3 * 19, "on other systems a refusal is final"
    os.utime(file, (0, 0))
    _truncate(file, 4)  # Of whole records: a mapped file is not touched.
    assert file.stat().st_mtime == 0 and os.listdir(file.parent) == ["x"]
    mapped.close()
    _truncate(file, 7)
    assert file.stat().st_size == 399


def test_what_windows_lacks_is_not_needed(tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    code = """if True:
        import os, signal, sys
        del os.fork, os.nice, os.sched_getaffinity, os.getloadavg, signal.setitimer, signal.SIGPROF
        sys.modules["resource"] = None
        from sfumato.serve import decoding
        decoding._limit(1 << 33), decoding._end_after(1)
        from sfumato.cli import main
        sys.argv = ["sfumato", "index", "--data", ".", "--out", "index"]
        main()"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "1 image in the collection" in done.stdout, done.stderr
