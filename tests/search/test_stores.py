"""LocalStore, its engines, and the folder of a collection, of which a killed process leaves the old or the new."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from support import stores_contract as contract
from support.processes import Started
from support.raising import raises
from support.stores_contract import assert_holds, assert_nearest, by_id, create_store, open_store, queries, records

from sfumato.calibration.calibrator import Calibration
from sfumato.errors import UserError
from sfumato.search.folder import _digest_of, change_metadata, read_settings, write_settings
from sfumato.search.stores import local, local_files
from sfumato.search.stores.protocol import WORDS, Filter, Records, StoreInUseError


class TestFlat(contract.StoreContract):
    def create(self, tmp_path, dim):
        return create_store(f"file:{tmp_path}/store", dim)


@pytest.mark.usefixtures("needs_faiss")
class TestHnsw(contract.StoreContract):
    """Indexes from so few items on that the contract's galleries are searched by FAISS."""

    def create(self, tmp_path, dim):
        return create_store(f"{tmp_path}/store?exact_below=16&engine=hnsw", dim)


def clustered(n, dim, seed, clusters=50):
    centres = np.random.default_rng(99).standard_normal((clusters, dim), np.float32) * 2
    random = np.random.default_rng(seed)
    vectors = centres[random.integers(clusters, size=n)] + random.standard_normal((n, dim), np.float32)
    payloads = tuple({"tenth": str(i % 10)} for i in range(n))
    return Records(tuple(f"{seed}-{i}" for i in range(n)), vectors, random.random(n, np.float32), payloads)


def recall(store, kept, wanted, k, filter=None):
    ids = [key for key, (_, u, payload) in kept.items() if filter is None or filter.accepts(payload, u)]
    distance = contract.squared_l2(wanted, np.stack([kept[key][0] for key in ids]))
    ground_truth = [{ids[j] for j in row[:k]} for row in np.argsort(distance, axis=1)]
    found = [set(result.ids) for result in store.search(wanted, k, filter)]
    assert all(len(some) == min(k, len(ids)) for some in found)
    return sum(len(a & b) for a, b in zip(ground_truth, found, strict=True)) / sum(map(len, ground_truth))


uses_index = lambda store: store._index is not None
index_files = lambda folder: sorted(folder.glob("index-*"))


def test_recall_at_the_defaults(tmp_path, needs_faiss):
    store = create_store(f"{tmp_path}/store?engine=hnsw&exact_below=500", 24)
    batch, late, wanted = clustered(2400, 24, 1), clustered(100, 24, 2), clustered(100, 24, 3).vectors
    store.upsert(batch)
    store.optimise()
    built = index_files(tmp_path / "store")
    assert [file.suffix for file in built] == [".hnsw"]
    store.upsert(late)
    gone = batch.ids[::8]
    assert store.delete(gone) == 300
    left = {*batch.ids, *late.ids} - {*gone}
    kept = {key: value for key, value in by_id(batch, late).items() if key in left}
    assert recall(store, kept, wanted, 10) >= 0.95 and uses_index(store)
    for filter in (Filter({"tenth": ("1", "2", "3")}), Filter({"tenth": ("4",)}), Filter(max_uncertainty=0.02)):
        assert recall(store, kept, wanted, 10, filter) >= 0.95
    store.optimise()
    assert index_files(tmp_path / "store") == built  # few items have come and gone
    store.delete(late.ids)
    assert store.delete(batch.ids[1::8]) == 300
    left -= {*late.ids, *batch.ids[1::8]}
    kept = {key: value for key, value in kept.items() if key in left}
    store.optimise()
    assert len(index_files(tmp_path / "store")) == 1 and index_files(tmp_path / "store") != built
    assert not set(gone) & set(store.search(batch.vectors[:1], 1500)[0].ids) and recall(store, kept, wanted, 10) >= 0.95
    store.close()
    store = open_store(store.url)
    assert recall(store, kept, wanted, 10) >= 0.95 and uses_index(store)
    if os.path.exists("/proc/self/maps"):  # It is mapped, not read as a whole.
        assert str(index_files(tmp_path / "store")[0]) in Path("/proc/self/maps").read_text()


def test_compressed_vectors_are_candidates_only(tmp_path, needs_faiss):
    spread, n = np.repeat(np.array([1, 0.01], np.float32), 48), 1500
    batch, wanted = records(n, 96, 1), queries(60, 96, 2) * spread
    batch, sizes = Records(batch.ids, batch.vectors * spread, batch.uncertainty, batch.payloads), {}
    for compress in ("int8", "none"):
        options = f"engine=hnsw&exact_below=100&compress={compress}&m=16&ef_search=1000"
        store = create_store(f"{tmp_path}/{compress}?{options}", 96)
        store.upsert(batch)
        store.optimise()
        threads = torch.get_num_threads()
        store.search(wanted[:1], 10)
        assert torch.get_num_threads() == threads
        assert recall(store, by_id(batch), wanted, 10) >= 0.98 and uses_index(store)
        for query, found in zip(wanted[:20], store.search(wanted[:20], 10), strict=True):
            distance = contract.squared_l2(found.vectors, query).tolist()
            assert distance == sorted(distance)
            np.testing.assert_array_equal(found.vectors, store.get(found.ids).vectors, strict=True)
        store.close()
        sizes[compress] = index_files(tmp_path / compress)[0].stat().st_size / n
    links = 2 * 16 * 4  # of the lowest layer; the upper ones and the levels are less than as much again
    assert 48 + links < sizes["int8"] < 48 + 2 * links
    assert sizes["none"] - sizes["int8"] == pytest.approx(4 * 96 - 48, rel=0.05)


def test_options_of_searches_come_from_the_url_that_opens(tmp_path, needs_faiss):
    path = f"{tmp_path}/store"
    store = create_store(f"{path}?engine=hnsw&exact_below=100&m=2&ef_construction=4&ef_search=1&overfetch=1", 12)
    batch, wanted = records(2000, 12, 1), queries(100, 12, 2)
    store.upsert(batch)
    store.optimise()
    assert [len(found) for found in store.search(wanted[:4], 1900)] == [1900] * 4
    store.close()
    shares = []
    for url in (path, f"file:{path}?ef_search=100", f"{path}?ef_search=2000&overfetch=9&engine=hnsw"):
        store = open_store(url)
        shares.append(recall(store, by_id(batch), wanted, 3))
        assert uses_index(store)
        store.close()
    assert shares[0] < shares[1] < shares[2]


def test_create_and_open_look_first_and_name_the_extra(tmp_path, monkeypatch):
    url = f"file:{tmp_path}/a#b [c]%20?memory=4"  # As a folder may be called.
    create_store(url, 3).upsert(records(9, 3, 1))
    assert open_store(url).count() == 9 and (tmp_path / "a#b [c]%20/records.sqlite").exists()
    raises(UserError, "there is no .*; create the store first", open_store, f"{tmp_path}/store")
    create_store(f"{tmp_path}/store?engine=flat", 3).close()
    raises(UserError, "is there already; open it, or give a new or empty folder", create_store, f"{tmp_path}/store", 3)
    with pytest.raises(UserError, match="was created with engine=flat, not hnsw; leave the option out"):
        open_store(f"{tmp_path}/store?engine=hnsw")
    (tmp_path / "file").write_text("x")
    raises(UserError, "cannot be created", create_store, f"{tmp_path}/file", 3)
    store = open_store(f"{tmp_path}/store")
    store.close()
    raises(UserError, "is closed; open it again", store.count)
    raises(UserError, "is closed; open it again", store.upsert, records(1, 3, 0))
    assert "faiss" not in {*vars(local), *vars(local_files)}, "it is imported where it is used"
    monkeypatch.setitem(sys.modules, "faiss", None)
    store, batch = create_store(f"{tmp_path}/flat", 2), records(9, 2, 1)
    store.upsert(batch)
    store.optimise()
    assert_nearest(store, by_id(batch), queries(2, 2, 2), 3)
    raises(UserError, r'pip install "sfumato\[faiss\]"', create_store, f"{tmp_path}/hnsw?engine=hnsw", 2)


def test_optimise_gives_space_back(tmp_path):
    store, file, batch = create_store(f"{tmp_path}/store", 50), tmp_path / "store/records.sqlite", records(4500, 50, 1)
    store.upsert(batch)
    store, whole = contract.StoreContract().reopen(store), file.stat().st_size
    store.delete([key for i, key in enumerate(batch.ids) if i < 4200 and i % 3])
    kept = {key: value for i, (key, value) in enumerate(by_id(batch).items()) if i >= 4200 or i % 3 == 0}
    scan = store.scan(batch=10)
    begun = list(next(scan).ids)
    store.optimise()
    assert sorted(begun + [key for part in scan for key in part.ids]) == sorted(kept)  # A scan sees what it began with.
    assert_holds(store, kept)
    assert_nearest(store, kept, queries(5, 50, 2), 9)
    store = contract.StoreContract().reopen(store)
    assert file.stat().st_size < 0.6 * whole
    store.delete(list(kept))
    store.optimise()
    assert store.count() == 0
    store.upsert(batch)
    assert_holds(store, by_id(batch))


def test_pages_in_memory_follow_what_is_written(tmp_path):
    store, other, kept = create_store(f"{tmp_path}/store?memory=1", 8), open_store(f"{tmp_path}/store?memory=0"), {}
    for step in range(10):
        batch = records(1500, 8, step, prefix=f"{step % 4}")
        store.upsert(batch)
        kept |= by_id(batch)
        gone = list(kept)[step :: 90 - 8 * step]
        assert store.delete(gone) == len(gone)
        kept = {key: value for key, value in kept.items() if key not in gone}
        for each in (store, other):
            for filter in (None, Filter({"colour": ("g",)})):
                assert_nearest(each, kept, queries(2, 8, step), 7, filter)
    assert len(store._blocks) == 2 and not other._blocks


def test_damaged_files_are_named(tmp_path, needs_faiss):
    url, folder, batch = f"{tmp_path}/store?engine=hnsw&exact_below=100", tmp_path / "store", records(500, 4, 1)
    store = create_store(url, 4)
    store.upsert(batch)
    store.optimise()
    store.close()
    index = index_files(folder)[0].name

    def damage(name, change, told):
        file = folder / name
        whole = file.read_bytes()
        change(file)
        with pytest.raises(UserError, match=told):
            damaged = open_store(url)
            try:
                damaged.search(batch.vectors[:2], 3)
            finally:
                damaged.close()
        file.write_bytes(whole)

    copy = "put back a copy of the folder, or build it again"
    damage(index, lambda f: os.truncate(f, 100), f"{index} is damaged .*remove this file and optimise")
    damage("records.sqlite", lambda f: f.write_bytes(b"\1" * 16384), f"records.sqlite is damaged .*{copy}")
    damage("records.sqlite", lambda f: os.truncate(f, 3 * 16384), f"records.sqlite is damaged .*{copy}")
    other = "has format 0, this version of sfumato reads 2; build it again"
    damage("records.sqlite", lambda f: os.truncate(f, 0), other)
    damage("records.sqlite", lambda f: f.unlink(), "there is no .*records.sqlite")
    (folder / index).unlink()
    store = open_store(url)
    assert_nearest(store, by_id(batch), queries(3, 4, 3), 5)
    assert not uses_index(store)
    store.optimise()
    assert (folder / index).exists()
    assert_nearest(store, by_id(batch), queries(3, 4, 3), 5)
    assert uses_index(store)
    store.close()
    with sqlite3.connect(folder / "records.sqlite") as connection:
        connection.execute("PRAGMA user_version=7")
    raises(UserError, "has format 7", open_store, url)


def test_a_full_disk_takes_nothing_away(tmp_path):
    resource = pytest.importorskip("resource", reason="needs limits of Unix")
    first, second, store = records(100, 50, 1), records(400, 50, 2), create_store(f"{tmp_path}/store", 50)
    store.upsert(first)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (24_000, 100_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            raises(UserError, "check free space", store.upsert, second)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert_holds(store, by_id(first))
    store.upsert(second)
    assert_holds(store, by_id(first, second))


def test_processes_that_are_killed_and_others_that_read(tmp_path, needs_faiss):
    for name, check in (("a", lambda url: contract.assert_survives_kills(url, 3)), ("b", contract.assert_others_read)):
        url = f"{tmp_path}/{name}?engine=hnsw&exact_below=100"
        create_store(url, 3).close()
        check(url)


def write_and_wait(url):
    store = open_store(url)
    store.upsert(records(1, 4, 5))
    print(os.getpid(), flush=True)
    time.sleep(60)


def test_a_second_writer_is_told_who_writes(tmp_path):
    url = f"file:{tmp_path}/store"
    create_store(url, 4).close()
    first, second, writer, store = records(20, 4, 1), records(30, 4, 2), open_store(url), open_store(url)
    writer.upsert(first)
    for write in (lambda: store.upsert(second), store.optimise):
        raises(StoreInUseError, "another opening in this process writes to it; wait until", write)
    assert_holds(store, by_id(first))
    writer.delete(first.ids)
    writer.close()
    process = Started(write_and_wait, url, piped=True)
    pid = int(process.stdout.readline())
    try:
        for write in (lambda: store.upsert(records(2, 4, 6)), lambda: store.delete(["item-0"]), store.optimise):
            raises(StoreInUseError, rf"store\S*: process {pid} on \S+ writes to it; wait until it closes", write)
        assert store.count() == 1
    finally:
        process.kill()
        process.finish()
    store.upsert(records(2, 4, 6))
    assert store.count() == 2


def test_the_log_of_the_database_stays_for_who_may_only_read_the_folder(tmp_path):
    log, store = {"records.sqlite-wal", "records.sqlite-shm"}, create_store(f"file:{tmp_path}/store", 4)
    for _ in range(2):
        assert log <= {path.name for path in (tmp_path / "store").iterdir()}
        store.upsert(records(9, 4, 1))
        store.close()
        assert log <= {path.name for path in (tmp_path / "store").iterdir()}
        store = open_store(store.url)


def test_stores_of_earlier_versions_open(tmp_path):
    store, batch = create_store(f"{tmp_path}/store", 6), records(90, 6, 1)
    store.upsert(batch)
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "records.sqlite")) as connection, connection:
        settings = '{"engine": "ivf-pq", "exact_below": 16, "n_probe": 3, "overfetch": 5}'
        connection.execute("UPDATE meta SET value = ? WHERE name = 'settings'", (settings,))
        connection.execute("INSERT INTO indexes VALUES ('index-90-90.ivf-pq', 7, x'00')")
    (tmp_path / "store" / "index-90-90.ivf-pq").write_text("lists")
    for url in (f"{tmp_path}/store", f"{tmp_path}/store?engine=ivf-pq&n_probe=3&code_size=2"):
        store = open_store(url)
        assert_nearest(store, by_id(batch), queries(3, 6, 2), 9)
        store.close()
    store = open_store(url)
    store.optimise()
    assert index_files(tmp_path / "store") == []
    assert_nearest(store, by_id(batch), queries(3, 6, 2), 9)
    store, batch = create_store(str(tmp_path / "wordless"), 3), records(4, 3, 1)
    url = store.url
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "wordless" / "records.sqlite")) as connection:
        connection.execute("DROP TABLE words")
    store = open_store(url)
    store.upsert(Records(batch.ids, batch.vectors, batch.uncertainty, ({WORDS: "dog"},) * 4))
    assert store.match_words(["dog"], 3) == [] and store.delete(["item-1"]) == 1 and store.count() == 3


@pytest.mark.parametrize("change", ["DELETE FROM meta", "UPDATE meta SET value = '['", "UPDATE meta SET value = '[1]'"])
@pytest.mark.parametrize("name", ["dim", "settings"])
def test_a_store_whose_settings_are_damaged(name, change, tmp_path):
    create_store(str(tmp_path / "store"), 3).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "records.sqlite")) as connection, connection:
        assert connection.execute(f"{change} WHERE name = '{name}'").rowcount == 1
    raises(UserError, r"the settings in .* are damaged .*; build it again", open_store, str(tmp_path / "store"))


SETTINGS = {
    "store": "store", "fingerprint": "csd", "d": 3, "distance": "csd", "logit_scale": 2.0, "logit_bias": 1.0,
    "direction": "t2i", "about": {"content": "old"},
}  # fmt: skip
CENTRE, CALIBRATION = np.arange(3, dtype=np.float32), Calibration(2.0, 1.0, 0.1)
save = lambda path: write_settings(path, SETTINGS, CENTRE, CALIBRATION)
change = lambda path, text: change_metadata(path, lambda now: {"content": text, "before": now["content"]})


def load(path):
    settings, centre, calibration = read_settings(path)
    assert np.array_equal(centre, CENTRE) and centre.dtype == CENTRE.dtype and calibration == CALIBRATION
    assert {**settings, "about": None} == {**SETTINGS, "about": None, "calibration": True}
    return settings["about"]["content"]


def write_until_killed(path, steps, changes):
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


@pytest.mark.parametrize(("file", "change", "message"), [
    ("data-*/centre*", lambda old: old[:-1], r"centre.safetensors: damaged, \d+ bytes where \d+ were written"),
    ("data-*/centre*", lambda old: b"x" + old[1:], "centre.safetensors: damaged, its checksum does not fit"),
    ("data-*/calib*", None, "damaged, calibration.json is missing"),
    ("manifest.json", lambda old: old[:50], "manifest.json: damaged"),
    ("manifest.json", lambda old: old.replace(b'"old"', b'"odd"'), "damaged or edited"),
    ("manifest.json", lambda old: b"\xff\xfe", "manifest.json: damaged"),
    ("manifest.json", lambda old: b"[]", "holds None, expected 'sfumato-collection-1'"),
    ("manifest.json", lambda old: b'{"kind": "other"}', "holds 'other', expected 'sfumato-collection-1'"),
])  # fmt: skip
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
