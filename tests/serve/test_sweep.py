"""What killed writes leave is removed at the next start, and nothing that an item names, that is young or in use."""

import contextlib
import os
import time

import pytest
from support.serving import new_item, served, until

from sfumato.data.images import UploadedImages
from sfumato.files import remove_leftovers
from sfumato.search.collection import UPLOADED_IMAGES
from sfumato.serve.settings import open_sources
from sfumato.serve.writing import KEPT, SAFE_AGE, find_orphans, sweep


def aged(path, seconds=2 * SAFE_AGE):
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


@pytest.fixture
def world(collection):
    """(folder, uploads, names of the images of two items); everything is old."""
    with served(open_sources(collection)) as client:
        new = [new_item("a"), new_item("b", "blue")]
        assert client.post("/v1/items", json={"items": new}).status_code == 201
    uploads = UploadedImages(collection / UPLOADED_IMAGES)
    names = sorted(aged(path).name for path in uploads.folder.glob("??/*"))
    assert len(names) == 2
    return collection, uploads, names


@contextlib.contextmanager
def opened(collection):
    with contextlib.closing(open_sources(collection)) as sources:
        yield sources.galleries["images"].gallery


def swept(collection, uploads):
    with opened(collection) as gallery:
        sweep(gallery, uploads, *find_orphans(gallery, uploads, lambda: False))


def held(uploads):
    return sorted(path.name for path in uploads.folder.glob("??/*"))


def test_old_images_that_no_item_names_go_and_others_stay(world):
    collection, uploads, names = world
    old, young = uploads.write("gone", b"old"), uploads.write("coming", b"young")
    aged(uploads.path_of(old))
    (uploads.path_of(old).parent / "notes.txt").write_text("mine")
    aged(uploads.path_of(old).parent / "notes.txt")
    swept(collection, uploads)
    assert held(uploads) == sorted([*names, young, "notes.txt"])
    assert [path.name for path in uploads.orphans.iterdir()] == [old]
    swept(collection, uploads)
    assert (uploads.orphans / old).read_bytes() == b"old"
    aged(uploads.orphans / old, KEPT + 60)
    swept(collection, uploads)
    assert not list(uploads.orphans.iterdir()) and held(uploads) == sorted([*names, young, "notes.txt"])


def test_an_image_that_an_item_names_after_all_comes_back(world):
    collection, uploads, names = world
    uploads.orphans.mkdir()
    aged(uploads.path_of(names[0]), 2 * KEPT).rename(uploads.orphans / names[0])
    swept(collection, uploads)
    assert held(uploads) == names and not list(uploads.orphans.iterdir())


def test_an_image_that_is_written_during_the_sweep_stays(world):
    collection, uploads, names = world
    late, named = uploads.write("late", b"late"), uploads.write("named", b"named")
    for name in (late, named):
        aged(uploads.path_of(name))
    with opened(collection) as gallery:
        orphans, back = find_orphans(gallery, uploads, lambda: False)
        assert orphans == {late, named} and not back
        uploads.write("late", b"late")  # Written anew, its item not stored yet.
        kept = gallery.store.get(["a"])
        gallery.store.upsert(type(kept)(("c",), kept.vectors, kept.uncertainty, ({"_picture": named},)))
        sweep(gallery, uploads, orphans, back)
    assert held(uploads) == sorted([*names, late, named]) and not list(uploads.orphans.iterdir())


def test_a_scan_that_is_given_up_moves_nothing(world):
    collection, uploads, _ = world
    aged(uploads.path_of(uploads.write("gone", b"old")))
    with opened(collection) as gallery:
        assert find_orphans(gallery, uploads, lambda: True) == (set(), set())


def test_temporary_files_of_killed_writes_go(tmp_path):
    old = ".x.json.0123456789ab.tmp", ".manifest.json.a1_b2c3d.tmp", "x.tmp", ".hidden", ".a.tmp"
    for name in (*old, ".young.0123456789ab.tmp"):
        (tmp_path / name).write_text("")
    for name in old:
        aged(tmp_path / name)
    assert remove_leftovers(tmp_path, SAFE_AGE) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.tmp", ".hidden", ".young.0123456789ab.tmp", "x.tmp"]


def test_the_service_sweeps_when_it_starts(world, caplog):
    collection, uploads, names = world
    old = uploads.write("gone", b"old")
    aged(uploads.path_of(old))
    leftovers = [collection / ".manifest.json.0123456789ab.tmp", uploads.path_of(old).with_name(".f.0123456789ab.tmp")]
    for path in leftovers:
        path.write_bytes(b"")
        aged(path)
    caplog.set_level("INFO", logger="sfumato.serve")
    with served(open_sources(collection)) as client:
        until(lambda: held(uploads) == names)
        assert client.get("/v1/pictures/a").status_code == client.get("/v1/pictures/b").status_code == 200
    assert not any(path.exists() for path in leftovers) and (uploads.orphans / old).exists()
    assert "moved 1 images that no item names" in caplog.text
