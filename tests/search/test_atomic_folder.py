"""A folder is replaced as a whole: if a process is killed at any disk operation, the old or the new one is there."""

import json
import os
import shutil
import signal
import stat
import sys

import pytest
from support.processes import Started
from support.raising import raises

from sfumato.search.atomic_folder import _digest_of, load_folder, save_folder


def save_until_killed(path, steps, text):
    """Saves, and ends with SIGKILL before a step."""
    left = [steps]

    def deadly(function):
        def call(*arguments, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "mkdir", "chmod", "unlink", "rmdir", "open"):
            patch.setattr(os, name, deadly(getattr(os, name)))
        save(path, text)
    print("done")


def write_texts(text):
    def write(folder):
        (folder / "a").write_text(text * 1000)
        (folder / "b").write_text(text * 1000)

    return write


def read_texts(folder, about):
    texts = [(folder / name).read_text() for name in ("a", "b")]
    assert texts[0] == texts[1] == about["content"] * 1000
    return about["content"]


def load(path):
    return load_folder(path, "test-1", read_texts)


def save(path, text):
    save_folder(path, "test-1", {"content": text}, write_texts(text))


def test_there_and_back_and_replaced(tmp_path):
    path = tmp_path / "deep" / "folder"
    for text in ("old", "new"):
        save(path, text)
        assert load(path) == text
    assert len([p for p in path.iterdir() if p.name.startswith("data-")]) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("exists", [False, True])
def test_a_writer_killed_before_any_step_leaves_the_old_or_the_new(tmp_path, exists):
    path, seen = tmp_path / "folder", []
    for step in range(1, 60):
        if exists:
            save(path, "old")
        status, printed = Started(save_until_killed, path, step, "new").finish()
        if exists or path.is_dir():
            try:
                seen.append(load(path))
            except FileNotFoundError as error:
                assert not exists and "first save did not finish" in str(error)
                seen.append("nothing")
        if printed == "done\n":
            break
        assert status == -signal.SIGKILL, printed
        save(path, "after")  # A killed writer stands in nobody's way, and its leftovers go.
        assert load(path) == "after"
        assert sorted(p.name[:5] for p in path.iterdir()) == [".lock", "data-", "manif"]
        if not exists:
            shutil.rmtree(path)
    assert printed == "done\n" and status == 0 and step > 8
    assert set(seen) == ({"old", "new"} if exists else {"nothing", "new"})


def test_everything_is_on_the_disk_before_the_manifest_names_it(tmp_path, monkeypatch):
    """A power cut, not a killed process, would show this: all files and folders are synced before the one rename."""
    steps, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), replace(a, b)))
    path = tmp_path / "folder"
    save(path, "new")
    before = steps[: steps.index("rename")]
    assert steps.count("rename") == 1
    data = next(path.glob("data-*"))
    for needed in (data / "a", data / "b", data, path, path / "manifest.json"):
        assert needed.stat().st_ino in before, needed.name
    assert path.stat().st_ino in steps[steps.index("rename") :]


def test_a_writer_that_fails_leaves_the_old_and_no_litter(tmp_path):
    path = tmp_path / "folder"
    save(path, "old")

    def write(folder):
        (folder / "a").write_text("half")
        raise OSError("the disk is full")

    before = sorted(p.name for p in path.iterdir())
    raises(OSError, "disk is full", save_folder, path, "test-1", {}, write)
    assert sorted(p.name for p in path.iterdir()) == before and load(path) == "old"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("data-*/b", lambda old: old[:-1], r"b: damaged, 2999 bytes where 3000 were written"),
        ("data-*/b", lambda old: b"x" + old[1:], "b: damaged, its checksum does not fit"),
        ("data-*/b", None, "damaged, b is missing"),
        ("manifest.json", lambda old: old[:50], "manifest.json: damaged"),
        ("manifest.json", lambda old: old.replace(b'"old"', b'"odd"'), "damaged or edited"),
        ("manifest.json", lambda old: b"", "manifest.json: damaged"),
        ("manifest.json", lambda old: b"\xff\xfe", "manifest.json: damaged"),
        ("manifest.json", lambda old: b"[]", "holds None, expected 'test-1'"),
        ("manifest.json", lambda old: b'{"kind": "other"}', "holds 'other', expected 'test-1'"),
    ],
)
def test_damage_is_found_and_named(tmp_path, file, change, message):
    save(tmp_path / "folder", "old")
    (found,) = (tmp_path / "folder").glob(file)
    found.write_bytes(change(found.read_bytes())) if change else found.unlink()
    raises(ValueError, message, load, tmp_path / "folder")


def test_nothing_there_is_named(tmp_path):
    raises(FileNotFoundError, "there is no folder", load, tmp_path / "nowhere")
    raises(FileNotFoundError, r"no manifest.json here", load, tmp_path)


def test_other_peoples_folders_are_left_alone(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"dear")
    raises(ValueError, r"holds something else \(photo.jpg\)", save, tmp_path, "new")
    web = tmp_path / "web"
    (web / "data-0123456789abcdef").mkdir(parents=True)
    (web / "manifest.json").write_text(json.dumps({"name": "a web application"}))
    raises(ValueError, r"holds something else \(manifest.json\)", save, web, "new")
    raises(ValueError, "it is a file", save, tmp_path / "photo.jpg", "new")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["data-0123456789abcdef", "manifest.json", "photo.jpg", "web"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs file locks")
def test_two_writers_do_not_mix(tmp_path):
    path = tmp_path / "folder"

    def write(folder):
        raises(BlockingIOError, "another process is saving there", save, path, "second")
        write_texts("first")(folder)

    save_folder(path, "test-1", {"content": "first"}, write)
    assert load(path) == "first"


def test_a_reader_overtaken_by_a_writer_reads_the_new(tmp_path):
    path = tmp_path / "folder"
    save(path, "old")
    overtaken = []

    def read(folder, about):
        if not overtaken:
            overtaken.append(about["content"])
            save(path, "new")
        return read_texts(folder, about)

    assert load_folder(path, "test-1", read) == "new" and overtaken == ["old"]


def seal(folder, **changes):
    """Change a manifest and make its checksum fit, as another program could."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest.pop("sha256")
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": _digest_of(manifest)}))
    return manifest["data"]


def test_a_manifest_names_no_files_elsewhere(tmp_path):
    save(tmp_path / "folder", "text")
    data = seal(tmp_path / "folder")
    assert load(tmp_path / "folder") == "text"
    seal(tmp_path / "folder", files=[])
    raises(ValueError, "files and about must be objects", load, tmp_path / "folder")
    (tmp_path / "folder" / data).rename(tmp_path / data)
    seal(tmp_path / "folder", data=f"../{data}", files={"a": {}})
    raises(ValueError, "names files outside its data folder", load, tmp_path / "folder")


@pytest.mark.parametrize(("mask", "mode"), [(0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_says_who_may_read_it(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        save(tmp_path / "folder", "text")
    finally:
        os.umask(before)
    files = [*(tmp_path / "folder").glob("data-*/*"), tmp_path / "folder" / "manifest.json"]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == dict.fromkeys(
        ("a", "b", "manifest.json"), mode
    )
