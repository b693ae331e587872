"""The folder of a collection: if a process is killed at any disk operation, the old or the new settings are there."""

import json
import os
import shutil
import signal
import stat
import sys

import numpy as np
import pytest
from filelock import FileLock
from support.processes import Started
from support.raising import raises

from sfumato.calibration.calibrator import Calibration
from sfumato.search.folder import _digest_of, change_metadata, read_settings, write_settings

SETTINGS = {
    "store": "store", "fingerprint": "csd", "d": 3, "distance": "csd", "logit_scale": 2.0, "logit_bias": 1.0,
    "direction": "t2i", "about": {"content": "old"},
}  # fmt: skip
CENTRE, CALIBRATION = np.arange(3, dtype=np.float32), Calibration(2.0, 1.0, 0.1)


def save(path):
    write_settings(path, SETTINGS, CENTRE, CALIBRATION)


change = lambda path, text: change_metadata(path, lambda now: {"content": text, "before": now["content"]})


def load(path):
    settings, centre, calibration = read_settings(path)
    assert np.array_equal(centre, CENTRE) and centre.dtype == CENTRE.dtype and calibration == CALIBRATION
    assert {**settings, "about": None} == {**SETTINGS, "about": None, "calibration": True}
    return settings["about"]["content"]


def write_until_killed(path, steps, changes):
    """Writes, and ends with SIGKILL before a step."""
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
        change(path, "new") if changes else save(path)
    print("done")


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("changes", [False, True])
def test_a_writer_killed_before_any_step_leaves_the_old_or_the_new(tmp_path, changes):
    path, seen = tmp_path / "folder", []
    for step in range(1, 60):
        shutil.rmtree(path, ignore_errors=True)
        if changes:
            save(path)
        status, printed = Started(write_until_killed, path, step, changes).finish()
        try:
            seen.append(load(path))
        except FileNotFoundError as error:
            assert not changes and ("first save did not finish" in str(error) or "no folder" in str(error))
            seen.append("nothing")
        if changes and status:  # A killed writer stands in nobody's way.
            assert change(path, "after")["content"] == load(path) == "after"
        if printed == "done\n":
            break
        assert status == -signal.SIGKILL, printed
    assert printed == "done\n" and status == 0 and step > (4 if changes else 8)
    assert set(seen) == ({"old", "new"} if changes else {"nothing", "old"})


def test_everything_is_on_the_disk_before_the_manifest_names_it(tmp_path, monkeypatch):
    steps, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(os.fstat(fd).st_ino), fsync(fd)))
    path = tmp_path / "folder"
    monkeypatch.setattr(
        os, "replace", lambda a, b: (steps.append("manifest" if "manifest" in str(b) else "other"), replace(a, b))
    )
    save(path)
    before, data = steps[: steps.index("manifest")], next(path.glob("data-*"))
    for needed in (*data.iterdir(), data, path, path / "manifest.json"):
        assert needed.stat().st_ino in before, needed.name
    assert steps.count("manifest") == 1 and path.stat().st_ino in steps[steps.index("manifest") :]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("data-*/centre*", lambda old: old[:-1], r"centre.safetensors: damaged, \d+ bytes where \d+ were written"),
        ("data-*/centre*", lambda old: b"x" + old[1:], "centre.safetensors: damaged, its checksum does not fit"),
        ("data-*/calib*", None, "damaged, calibration.json is missing"),
        ("manifest.json", lambda old: old[:50], "manifest.json: damaged"),
        ("manifest.json", lambda old: old.replace(b'"old"', b'"odd"'), "damaged or edited"),
        ("manifest.json", lambda old: b"\xff\xfe", "manifest.json: damaged"),
        ("manifest.json", lambda old: b"[]", "holds None, expected 'sfumato-collection-1'"),
        ("manifest.json", lambda old: b'{"kind": "other"}', "holds 'other', expected 'sfumato-collection-1'"),
    ],
)
def test_damage_is_found_and_named(tmp_path, file, change, message):
    save(tmp_path / "folder")
    (found,) = (tmp_path / "folder").glob(file)
    found.write_bytes(change(found.read_bytes())) if change else found.unlink()
    raises(ValueError, message, read_settings, tmp_path / "folder")


def seal(folder, **changes):
    """Change a manifest and make its checksum fit, as another program could."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest.pop("sha256")
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": _digest_of(manifest)}))
    return manifest


def test_sealed_by_another_program_and_two_writers(tmp_path):
    folder = tmp_path / "folder"
    raises(FileNotFoundError, "there is no folder", read_settings, folder)
    raises(FileNotFoundError, r"no manifest.json here", read_settings, tmp_path)
    save(folder)
    manifest = seal(folder)
    assert load(folder) == "old"
    for name, value, message in (
        ("d", 4, "its settings do not fit together"), ("logit_scale", 0, "its settings do not fit together"),
        ("store", None, "its settings do not fit together"), ("logit_bias", "x", "damaged .TypeError"),
        ("distance", "kl", "not a Euclidean distance"),
    ):  # fmt: skip
        seal(folder, about=manifest["about"] | {name: value})
        raises(ValueError, message, read_settings, folder)
    seal(folder, files=[])
    raises(ValueError, "files and about must be objects", read_settings, folder)
    (folder / manifest["data"]).rename(tmp_path / manifest["data"])
    seal(folder, data=f"../{manifest['data']}", files={"a": {}})
    raises(ValueError, "names files outside its data folder", read_settings, folder)
    save(folder := tmp_path / "two")
    with FileLock(folder / ".lock"):
        raises(BlockingIOError, "another process is saving there", change, folder, "second")
    assert load(folder) == "old" and change(folder, "new") == {"content": "new", "before": "old"}


@pytest.mark.parametrize(("mask", "mode"), [(0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_says_who_may_read_it(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        save(tmp_path / "folder")
    finally:
        os.umask(before)
    files = [*(tmp_path / "folder").glob("data-*/*"), tmp_path / "folder" / "manifest.json"]
    assert len(files) == 3 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}
