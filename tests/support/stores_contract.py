"""What every vector store must do: subclass StoreContract. In small galleries, a thorough approximate one is exact."""

import hashlib
import itertools
import random
import signal
import socket
import threading
import time

import numpy as np
import pytest
import torch

from sfumato.errors import UserError
from sfumato.search.stores import protocol as stores
from sfumato.search.stores.protocol import WORDS, Filter, Records, WordStore
from support.processes import Started
from support.raising import raises

FINGERPRINT = 'csd of model "é", centre 1a2b'
FOLDERS, made = ("", "2019", "2019/may", "2019-b", "20190", "2018/2019"), []
"""Stores of the test that runs; a fixture closes them at its end."""
AWKWARD = (
    *("plain", "with space", "it's", 'double "quotes"', "'; DROP TABLE items; --", "back\\slash", "%wild_card*"),
    *("{brace}[bracket]", "Grüße/日本語/🦊", "line\nbreak", "a" * 200),
)


def quick_vectors(texts):
    """Another vector for each text, without MiniLM."""
    seeds = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") for text in texts]
    rows = [torch.randn(384, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.nn.functional.normalize(torch.stack(rows) if rows else torch.empty(0, 384), dim=1).numpy()


def create_store(url, dim):
    made.append(stores.create_store(url, dim, FINGERPRINT))
    return made[-1]


def open_store(url):
    made.append(stores.open_store(url))
    return made[-1]


def records(n, dim, seed, *, prefix="item"):
    """Random records; payloads repeat every 3 and 5 items, and every seventh item has none."""
    random = np.random.default_rng(seed)
    vectors, uncertainty = random.standard_normal((n, dim), np.float32) * 3 + 1, random.random(n, np.float32)
    some = [{"colour": "rgb"[i % 3], "path": f"{seed}/{i}.jpg", "folder": FOLDERS[i % 6]} for i in range(n)]
    payloads = tuple({} if i % 7 == 0 else payload for i, payload in enumerate(some))
    return Records(tuple(f"{prefix}-{i}" for i in range(n)), vectors, uncertainty, payloads)


queries = lambda n, dim, seed: np.random.default_rng(seed).standard_normal((n, dim), np.float32) * 3 + 1


def squared_l2(wanted, vectors):
    a, b = wanted.astype(np.float64), vectors.astype(np.float64)
    return ((a[:, None] - b[None]) ** 2).sum(-1)


def by_id(*batches):
    return {
        key: (vector, float(uncertainty), dict(payload))
        for b in batches
        for key, vector, uncertainty, payload in zip(b.ids, b.vectors, b.uncertainty, b.payloads, strict=True)
    }


def assert_holds(store, kept):
    assert store.count() == len(kept)
    assert sorted([key for part in store.scan(batch=13) for key in part.ids]) == sorted(kept)
    listed = [""]
    while page := store.ids_after(listed[-1], 7):
        listed += page
        assert len(page) == 7 or not store.ids_after(page[-1], 1)
    assert listed[1:] == sorted(kept, key=str.encode)
    assert_are(store.get(list(kept)), kept, list(kept))


def assert_are(found, kept, ids):
    assert list(found.ids) == list(ids)
    if not ids:
        return
    vectors, uncertainty, payloads = zip(*(kept[key] for key in ids), strict=True)
    np.testing.assert_array_equal(found.vectors, np.stack(vectors), strict=True)
    assert found.uncertainty.tolist() == list(uncertainty)
    assert [dict(payload) for payload in found.payloads] == list(payloads)


def assert_nearest(store, kept, wanted, k, filter=None):
    fitting = [key for key, (_, u, payload) in kept.items() if filter is None or filter.accepts(payload, u)]
    results = store.search(wanted, k, filter)
    assert len(results) == len(wanted)
    ground_truth = np.sort(squared_l2(wanted, np.stack([kept[key][0] for key in fitting]))) if fitting else None
    for i, found in enumerate(results):
        assert len(set(found.ids)) == len(found) == min(k, len(fitting)) and set(found.ids) <= set(fitting)
        if not fitting:
            continue
        assert_are(found, kept, found.ids)
        distance = squared_l2(wanted[i : i + 1], found.vectors)[0]
        np.testing.assert_allclose(distance, ground_truth[i, : len(found)], rtol=1e-5, atol=1e-6)


def assert_candidates_only(store, opened=None, n=300):
    """By their codes two items are the same, and most are nearly the same, but results are in their true order."""
    dim = store.dim
    batch, wanted = records(n, dim, 21), queries(6, dim, 22)
    farther = (wanted[0] + 0.1).astype(np.float16).astype(np.float32)
    twins = np.stack([farther, farther + 1e-5 * (wanted[0] - farther)])
    batch = Records(batch.ids, np.concatenate([twins, batch.vectors[2:]]), batch.uncertainty, batch.payloads)
    np.testing.assert_array_equal(*batch.vectors[:2].astype(np.float16))
    store.upsert(batch)
    store.optimise()
    store = opened(store) if opened else store
    assert_nearest(store, by_id(batch), wanted, 5)
    assert store.search(wanted[:1], 2)[0].ids == ("item-1", "item-0") and len(store.search(wanted, n)[5]) == n


class StoreBasics:
    def create(self, tmp_path, dim):
        """An empty store of this many dimensions, with FINGERPRINT."""
        raise NotImplementedError

    def reopen(self, store):
        store.close()
        return open_store(store.url)

    @pytest.mark.parametrize("n, dim, k", [(1, 3, 2), (41, 7, 1), (83, 17, 10), (83, 6, 200)])
    def test_finds_what_brute_force_finds(self, tmp_path, n, dim, k):
        store, batch = self.create(tmp_path, dim), records(n, dim, n)
        store.upsert(batch)
        kept = by_id(batch)
        assert_nearest(store, kept, queries(4, dim, 1), k)
        store.optimise()
        assert_nearest(store, kept, queries(4, dim, 1), k)
        assert_holds(store, kept)

    def test_upsert_replaces_as_a_whole(self, tmp_path):
        store, first, second = self.create(tmp_path, 6), records(50, 6, 2), records(30, 6, 3)
        second = Records(second.ids, second.vectors, second.uncertainty, tuple({"only": "new"} for _ in range(30)))
        store.upsert(first)
        store.optimise()
        store.upsert(second)
        kept = by_id(first, second)
        assert_holds(store, kept)
        for wanted in (queries(5, 6, 4), first.vectors[:5], second.vectors[:5]):
            assert_nearest(store, kept, wanted, 12)
        store.optimise()
        assert_nearest(store, kept, first.vectors[:5], 12)

    def test_filters_agree_with_the_filter(self, tmp_path):
        store, batch = self.create(tmp_path, 5), records(70, 5, 8)
        store.upsert(batch)
        kept = by_id(batch)
        for _ in range(2):
            for filter in (
                Filter(), Filter({"colour": ("r",)}), Filter({"colour": ("r", "b", "unheard of")}),
                Filter({"colour": ("g",), "path": ("8/1.jpg", "8/4.jpg", "8/5.jpg")}),
                *(Filter({"folder": folders}) for folders in (("2019",), ("2018", "2019/may/"), ("",))),
                Filter({"colour": ()}), Filter({"absent": ("r",)}), Filter({"colour": ("g",)}, max_uncertainty=0.7),
                Filter(max_uncertainty=0.4), Filter(max_uncertainty=0.0),
                Filter(max_uncertainty=float(np.sort(batch.uncertainty)[4])),  # a bound is included
                Filter(ranges={"path": ("8/2.jpg", "8/5.jpg")}),  # the first end is included, the second is not
                Filter(ranges={"colour": ("", "")}),  # every item that has the field
                Filter(ranges={"colour": ("", "g")}), Filter(ranges={"colour": ("h", "")}),
                Filter(ranges={"absent": ("", "")}),
                Filter({"colour": ("g", "b")}, 0.8, {"path": ("8/12", "8/6\U0010ffff"), "colour": ("c", "")}),
            ):  # fmt: skip
                fitting = {key for key, (_, u, payload) in kept.items() if filter.accepts(payload, u)}
                assert store.count(filter) == len(fitting), filter
                scanned = [key for part in store.scan(batch=25, filter=filter) for key in part.ids]
                assert sorted(scanned) == sorted(fitting), filter
                assert_nearest(store, kept, queries(3, 5, 9), 8, filter)
            store.optimise()

    def test_words_find_the_items_that_have_them(self, tmp_path):
        store = self.create(tmp_path, 3)
        if not isinstance(store, WordStore):
            return
        assert store.match_words(["dog"], 5) == []
        own = "dog snow", "dog", "lighthouse or near", "käfer 日本語 run", "x" * 100 + " 12 3e5", None, "dog snow tent"
        batch = records(len(own), 3, 13)
        payloads = [{"n": str(i)} | ({} if words is None else {WORDS: words}) for i, words in enumerate(own)]
        store.upsert(Records(batch.ids, batch.vectors, batch.uncertainty, tuple(payloads)))

        def found(*stems, n=9, **filter):
            return [int(i[5:]) for i in store.match_words(stems, n, Filter(**filter) if filter else None)]

        for _ in range(2):
            assert sorted(found("dog")) == [0, 1, 6] and len(found("dog", n=2)) == 2
            assert found("tent", "dog", "snow")[:2] == [6, 0] and found("lighthouse", "harbour") == [2]
            assert [found(word) for word in ("käfer", "日本語", "x" * 100, "12", "or", "near")] == [
                *([3], [3], [4], [4], [2], [2])
            ]
            assert [found(word) for word in ('"', "' OR 1", "do", "dogs", "%s", "\\", "NOT", "(")] == [[]] * 8
            assert found() == [] and found("dog", where={"n": ("1", "5")}) == [1]
            assert sorted(found("dog", ranges={"n": ("1", "")})) == [1, 6]
            store.optimise()
            store = self.reopen(store)
        store.upsert(Records(batch.ids[:1], batch.vectors[:1], batch.uncertainty[:1], ({WORDS: "cat"},)))
        store.delete(["item-6", "item-5"])
        assert found("dog") == [1] and found("cat") == [0] and found("tent") == []


class StoreContract(StoreBasics):
    def test_ranges_are_in_the_order_of_code_points(self, tmp_path):
        texts = ("A", "B", "a", "Z", "z", "ä", "é", "\uffee", "\U0001f98a", 'b"\\', "a b", "a-b", "ab", "")
        store, batch = self.create(tmp_path, 3), records(len(texts), 3, 12)
        payloads = tuple({"name": text, 'odd "\\ name': text} for text in texts)
        store.upsert(Records(tuple(f"is {t}" for t in texts), batch.vectors, batch.uncertainty, payloads))
        for least in texts:
            for name, below in (("name", ""), ('odd "\\ name', 'b"\\'), ("name", "\uffff")):
                expected = sorted(f"is {t}" for t in texts if t and t >= least and (not below or t < below))
                scanned = store.scan(filter=Filter(ranges={name: (least, below)}))
                assert sorted(i for part in scanned for i in part.ids) == expected, (name, least, below)

    def test_an_empty_store_and_what_it_refuses(self, tmp_path):
        store = self.create(tmp_path, 6)
        assert store.dim == 6 and store.fingerprint == FINGERPRINT and isinstance(store.url, str)
        assert store.count() == 0 and list(store.scan()) == []
        assert [len(found) for found in store.search(queries(3, 6, 0), 4)] == [0, 0, 0]
        assert len(store.get(["item-1"])) == 0 and store.get([]).vectors.shape == (0, 6)
        assert store.delete(["item-1"]) == 0 and store.delete([]) == 0
        store.upsert(Records.none(6))
        store.optimise()
        assert store.count(Filter({"colour": ("r",)})) == 0 and store.search(np.empty((0, 6)), 3) == []
        store.upsert(records(5, 6, 16))
        raises(ValueError, "7", store.upsert, records(5, 7, 17))
        raises(ValueError, "5", store.search, queries(2, 5, 0), 3)
        raises(ValueError, "k must be at least 1, got 0", store.search, queries(2, 6, 0), 0)
        assert_holds(store, by_id(records(5, 6, 16)))

    def test_items_come_and_go_and_stay_over_an_opening(self, tmp_path):
        store, batch, late = self.create(tmp_path, 6), records(60, 6, 5), records(9, 6, 13, prefix="late")
        store.upsert(batch)
        store.optimise()
        store.upsert(late)
        gone = [f"item-{i}" for i in range(0, 60, 2)]
        assert store.delete([*gone, "never there", gone[0]]) == 30 and store.delete(gone) == 0
        kept = {key: value for key, value in by_id(batch, late).items() if key not in gone}
        for _ in range(2):
            assert_holds(store, kept)
            assert_nearest(store, kept, batch.vectors[:6], 9)
            assert len(store.get(gone)) == 0
            store = self.reopen(store)
        assert store.dim == 6 and store.fingerprint == FINGERPRINT
        found = store.get(["item-17", "absent", "late-3", "item-11", "late-3"])
        assert_are(found, kept, ["item-17", "late-3", "item-11"])
        again = batch.take(range(0, 20, 2))
        store.upsert(again)
        kept |= by_id(again)
        store.optimise()
        store = self.reopen(store)
        assert_holds(store, kept)
        assert_nearest(store, kept, batch.vectors[:6], 100)

    def test_awkward_texts_come_back(self, tmp_path):
        store, batch = self.create(tmp_path, 3), records(len(AWKWARD), 3, 11)
        payloads = tuple({"name": text, text: "key"} for text in AWKWARD)
        batch = Records(AWKWARD, batch.vectors, batch.uncertainty, payloads)
        store.upsert(batch)
        assert_holds(store, by_id(batch))
        for i, text in enumerate(AWKWARD):
            for filter in (Filter({"name": (text,)}), Filter({text: ("key",)})):
                assert store.count(filter) == 1, text
                assert store.search(queries(1, 3, 0), 5, filter)[0].ids == (text,)
            assert store.get([text]).ids == (text,) and store.delete([text]) == 1
            assert store.count() == len(AWKWARD) - i - 1

    def test_threads_search_while_one_writes(self, tmp_path):
        dim, wanted = 8, queries(2, 8, 20)
        store, base = self.create(tmp_path, dim), records(30, dim, 21)
        store.upsert(base)
        errors, done = [], threading.Event()

        def search():
            try:
                while not done.is_set():
                    for found in store.search(wanted, 5):
                        assert len(set(found.ids)) == len(found) == 5
                    assert store.get(["item-7"]).ids == ("item-7",)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        late = [records(10, dim, 30 + i, prefix=f"late{i}") for i in range(12)]
        try:
            for i, batch in enumerate(late):
                store.upsert(batch)
                if i % 5 == 4:
                    store.optimise()
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not errors, errors[0]
        kept = by_id(base, *late)
        assert_holds(store, kept)
        assert_nearest(store, kept, wanted, 20)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def write_at_random(url, run, replaces=True):
    """Stores, replaces and deletes items until it is killed, and says what it has done; else it stores new ones."""
    store, chance = open_store(url), random.Random(run)
    print("open", flush=True)
    for step in itertools.count():
        n = chance.randint(1, 60)
        ids = chance.sample(range(500), n) if replaces else range(60 * step, 60 * step + n)
        vectors, note = np.array([[i, run, step] for i in ids], np.float32), {"run": str(run), "step": str(step)}
        store.upsert(Records(tuple(f"i{i}" for i in ids), vectors, np.zeros(n), (note,) * n))
        print("put", run, step, *ids, flush=True)
        if step % 4 == 3:
            gone = chance.sample(range(500), 20) if replaces else ids[:1]
            store.delete([f"i{i}" for i in gone])
            print("gone", run, step, *gone, flush=True)
        if step % 6 == 5:
            store.optimise()


def said_by(process, kill, least=25):
    """What :func:`write_at_random` in a process has said when it is well under way and is killed, or its server is."""
    assert process.stdout.readline() == "open\n", process.finish()
    said = list(itertools.islice(process.stdout, least))
    kill()
    # Not communicate(): it would pass over what has been buffered. The last line may be torn.
    return said + [line for line in process.stdout if line.endswith("\n")]


def assert_nothing_lost(store, said, before=None):
    """What was said is there, and each write as a whole. Returns the (run, step) of each item, also of those before."""
    expected, stored = dict(before or {}), {}
    for kind, run, step, *ids in map(str.split, said):
        expected |= {f"i{i}": (int(run), int(step)) if kind == "put" else None for i in ids}
    for part in store.scan(batch=37):
        for key, vector, payload in zip(part.ids, part.vectors.tolist(), part.payloads, strict=True):
            assert key not in stored
            stored[key] = (int(payload["run"]), int(payload["step"]))
            assert vector == [float(key[1:]), *map(float, stored[key])]
    # The one write that was under way may be there as a whole, or not at all.
    ahead = {key: stored.get(key) for key in stored.keys() | expected if stored.get(key) != expected.get(key)}
    assert len(set(ahead.values())) <= 1, ahead
    late = max(filter(None, expected.values()), default=(-1, 0))
    assert ahead == {} or set(ahead.values()) == {None} or max(ahead.values()) > late
    expected |= ahead
    assert store.count() == len(stored) == len([v for v in expected.values() if v]) > 0
    return expected


def assert_survives_kills(url, runs):
    chance, expected = random.Random(4), {}
    for run in range(runs):
        child = Started(write_at_random, url, run, piped=True)

        def kill(child=child):
            time.sleep(chance.uniform(0, 0.05))  # So that any moment of a write is as likely.
            child.kill()

        said = said_by(child, kill, chance.randint(3, 25))
        assert child.finish() == (-signal.SIGKILL, "")
        child.stdout.close()
        store = open_store(url)
        expected, kept = assert_nothing_lost(store, said, expected), by_id(*store.scan())
        for at in range(0, 500, 50):
            assert_nearest(store, kept, np.array([[float(at), run, 3.0]]), 5)
        store.close()


def assert_others_read(url):
    child = Started(write_at_random, url, 1, piped=True)
    assert child.stdout.readline() == "open\n"
    store, acknowledged, step = open_store(url), {}, 0
    while int(step) < 14:
        kind, _, step, *ids = child.stdout.readline().split()
        acknowledged |= {f"i{i}": int(step) if kind == "put" else None for i in ids}
        there = [key for key, at in acknowledged.items() if at is not None]
        found = store.get(there)
        for key, payload, vector in zip(found.ids, found.payloads, found.vectors.tolist(), strict=True):
            assert int(payload["step"]) >= acknowledged[key] and vector == [float(key[1:]), 1.0, float(payload["step"])]
        for some in store.search(np.array([[250.0, 1.0, int(step)], [7.0, 1.0, 0.0]]), 9, Filter({"run": ("1",)})):
            assert len(set(some.ids)) == len(some) == min(9, len(there)) or len(there) < 60
        scanned = [key for part in store.scan(batch=50) for key in part.ids]
        assert len(scanned) == len(set(scanned))
    assert child.running
    child.kill()
    child.finish()
    child.stdout.close()


def assert_a_killed_server_loses_nothing(store, kill, start, *written):
    process = Started(write_at_random, store.url, 0, *written, piped=True)
    said, began = said_by(process, kill, 7), time.monotonic()
    status, errors = process.finish(60)
    assert status == 1 and "UserError: store " in errors, errors
    raises(UserError, None, store.search, queries(1, 3, 0), 3)
    assert time.monotonic() - began < 30
    start()
    assert_nothing_lost(store, said)
    assert len(store.search(queries(1, 3, 0), 7)[0]) == 7
    store.close()
    assert_nothing_lost(open_store(store.url), said)
