"""Milvus Lite and a real Milvus server: the contract of stores, and what happens to them on a bad day."""

import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import time
import types
import urllib.request
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import stores_contract as contract
from support.processes import Started
from support.raising import raises
from support.stores_contract import assert_holds, assert_nearest, by_id, create_store, open_store, queries, records

from sfumato import errors
from sfumato.errors import UserError
from sfumato.search.stores import milvus, milvus_place
from sfumato.search.stores import protocol as stores
from sfumato.search.stores.protocol import Filter, Records, without_password

pytestmark = pytest.mark.engine

if not all(map(importlib.util.find_spec, ("pymilvus", "milvus_lite"))):
    pytest.skip("needs the extra milvus", allow_module_level=True)


@pytest.fixture(scope="module")
def milvus_server(tmp_path_factory):
    server = MilvusServer(tmp_path_factory.mktemp("milvus"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("milvus") / "it's one.db"
    keeper = stores.create_store(f"milvus:{path}?name=keeper", 2, "")
    yield path
    keeper.close()


@pytest.fixture
def embedded(file):
    def url(**options):
        told = "".join(f"&{name}={value}" for name, value in options.items())
        return f"milvus:{file}?name=c{uuid.uuid4().hex[:12]}{told}"

    return url


@pytest.fixture(params=["embedded", "milvus_server"])
def url(request):
    place = request.getfixturevalue(request.param)
    return place if request.param == "embedded" else place.url


class TestFile(contract.StoreContract):
    @pytest.fixture(autouse=True)
    def _file(self, embedded):
        self.url = embedded

    def create(self, tmp_path, dim):
        return create_store(self.url(), dim)


@pytest.fixture(scope="module")
def made_ahead(milvus_server):
    """Empty stores for the contract, made at the same time: a server takes two seconds to load one."""
    dims = (3, 3, 5, 6, 6, 7, 17)
    with ThreadPoolExecutor(len(dims)) as threads:
        make = lambda dim: stores.create_store(milvus_server.url(index="HNSW"), dim, contract.FINGERPRINT)
        ahead = list(threads.map(make, dims))
    yield ahead
    for store in ahead:
        store.close()


class TestMilvusServer(contract.StoreBasics):
    """Its language of filters is another one than that of Lite."""

    @pytest.fixture(autouse=True)
    def _stores(self, made_ahead):
        self.stores = made_ahead

    def create(self, tmp_path, dim):
        contract.made.append(self.stores.pop(next(i for i, store in enumerate(self.stores) if store.dim == dim)))
        return contract.made[-1]


def test_the_index_that_was_asked_for_is_the_one_that_is_searched(url):
    wanted = {"FLAT": {}, "HNSW": {"M": 9, "efConstruction": 77}, "IVF_FLAT": {"nlist": 33}, "AUTOINDEX": {}}
    wanted["IVF_FLAT&compress=int8"] = wanted["IVF_FLAT"]
    with ThreadPoolExecutor(len(wanted)) as threads:
        numbered = "m=9&ef_construction=77&nlist=33"
        stores = threads.map(lambda index: create_store(f"{url(index=index)}&{numbered}", 4), wanted)
    for store, (index, numbers) in zip(stores, wanted.items(), strict=True):
        index = index.replace("FLAT&compress=int8", "SQ8")
        told = store._client.describe_index(store._place.name, "vector")
        assert told["index_type"] == index and told["metric_type"] == "L2" and told.get("params", {}) == numbers
        store.close()


HNSW, IVF = {"index": "HNSW", "ef": 1}, {"index": "IVF_FLAT", "nlist": 60, "nprobe": 1}


@pytest.mark.parametrize("options", [HNSW, IVF])
def test_a_narrow_filter_brings_all_that_fit(embedded, options):
    n, dim = 3000, 16
    store, batch = create_store(embedded(**options), dim), records(n, dim, 2)
    batch = Records(batch.ids, batch.vectors, batch.uncertainty, tuple({"rare": str(i % 300)} for i in range(n)))
    store.upsert(batch)
    store.optimise()
    for seconds in (0, 0.5):  # Lite builds the index in the background.
        time.sleep(seconds)
        assert_nearest(open_store(store.url), by_id(batch), queries(5, dim, 3), 10, Filter({"rare": ("7",)}))


def test_compressed_vectors_are_candidates_only(embedded):
    def opened(store):
        time.sleep(1)  # Lite builds the index in the background.
        return open_store(f"{store.url}&overfetch=8")

    contract.assert_candidates_only(create_store(embedded(compress="int8", nlist=8, nprobe=8), 24), opened, 3000)


def test_others_find_a_write_at_once_and_optimise_waits_for_the_index(milvus_server, monkeypatch):
    store = create_store(milvus_server.url(), 2)
    other, session = open_store(store.url), open_store(f"{store.url}?consistency=session")
    for i in range(10):
        writer, reader = (session, session) if i % 2 else (store, other)
        writer.upsert(Records((f"item-{i}",), np.full((1, 2), i, np.float32), np.ones(1), ({},)))
        assert reader.count() == i + 1 and reader.search(np.full((1, 2), 9.0), 1)[0].ids == (f"item-{i}",)
    store = create_store(milvus_server.url(index="HNSW"), 64)
    store.upsert(records(3000, 64, 5))
    store.optimise()
    told = store._client.describe_index(store._place.name, "vector")
    assert (told["indexed_rows"], told["pending_index_rows"]) == (3000, 0)
    loaded = store._client.list_loaded_segments(store._place.name)
    assert sum(segment.num_rows for segment in loaded if segment.index_name) == 3000
    # A segment that the server merges into another during the call: it is asked again.
    listed = store._client.list_persistent_segments
    merged = [milvus.milvus_place.driver().MilvusException(600, "segment not found[segment=7]")]

    def list_segments(*args, **options):
        if merged:
            raise merged.pop()
        return listed(*args, **options)

    monkeypatch.setattr(store._client, "list_persistent_segments", list_segments)
    assert (store._without_index(), store._without_index()) == (1, 0)


def test_a_server_is_waited_for_while_its_index_grows_and_not_for_what_it_never_builds(embedded, monkeypatch, capsys):
    store, pending, looks = create_store(embedded(**HNSW), 3), {"pending_index_rows": 8}, [9, *[8] * 9]
    segment = types.SimpleNamespace(segment_id=1, num_rows=5674, index_name="")
    server = {"describe_index": pending, "list_loaded_segments": [segment], "list_persistent_segments": [segment]}
    monkeypatch.setattr(store, "_call", lambda method, asked=None: server.get(method))
    assert store._without_index() == 5674
    store._options["index"] = "FLAT"
    assert store._without_index() == 0, "every vector is compared"
    left = iter([])
    monkeypatch.setattr(store, "_without_index", lambda: next(left))
    monkeypatch.setattr(store, "_seconds", lambda method: 0.3)
    monkeypatch.setattr(errors, "_PLAIN_SECONDS", 0.1)
    for loaded, told in ((9, True), (0.1, True), (0.1, False)):
        left = iter(looks)
        monkeypatch.setattr(milvus, "_LOADED", loaded)
        pending["pending_index_rows"] = 8 * told
        with warnings.catch_warnings(record=True) as warned:
            store.optimise()
        said = "the server has 8 items without an index, as 0 seconds before"
        assert [said in str(one.message) for one in warned] == [True] * told and next(left) == 8
    assert "waiting for the server's index: 1 of 9" in capsys.readouterr().err


def test_larger_batches_and_what_is_left_out_before_there_is_an_index(embedded, monkeypatch):
    store, batch, wanted = create_store(embedded(), 7), records(200, 7, 4), queries(3, 7, 5)
    store.most_bytes, store.most_rows = 12 * (4 * 7 + 1000), 49
    store.upsert(batch)
    assert_holds(store, by_id(batch))
    for k in (50, 1000):
        assert_nearest(store, by_id(batch), wanted, k)
        assert_nearest(store, by_id(batch), wanted, k, Filter({"colour": ("r", "g")}, max_uncertainty=0.8))
    assert [len(found) for found in store.search(wanted, 20_000)] == [200] * 3
    store.delete(batch.ids)
    assert [len(found) for found in store.search(wanted, 20_000)] == [0] * 3
    store, batch = create_store(embedded(**HNSW), 7), records(200, 7, 4)
    store.upsert(batch)
    found = store._nearest
    monkeypatch.setattr(store, "_nearest", lambda *asked: [rows[::8] for rows in found(*asked)])
    monkeypatch.setattr(store._place, "file", None)
    for filter in (None, Filter({"colour": ("r",)}, max_uncertainty=0.3)):
        assert_nearest(store, by_id(batch), queries(3, 7, 5), 30, filter)


def test_texts_like_expressions_and_bounds_between_two_numbers(url):
    quotes = '"] or id != "', "tab\tr\rn\n", '\\"', "\\", "'"
    texts = *quotes, "\x01\x85\u2028", "{id}", "$meta", "nine".rjust(60_000, "9")
    store, batch = create_store(url(), 3), records(len(texts), 3, 6)
    # Milvus 2.3 does not find a field whose name has a control character, except tabs and ends of lines.
    names = [text[:90].replace("\x01", "") for text in texts]
    payloads = tuple({name: text[:90]} for name, text in zip(names, texts, strict=True))
    store.upsert(Records(texts, batch.vectors, batch.uncertainty, payloads))
    assert sorted(key for part in store.scan(batch=1) for key in part.ids) == sorted(texts)
    for name, text in zip(names, texts, strict=True):
        assert store.get([text, text + "?"]).ids == (text,) and store.count(Filter({name: (text[:90],)})) == 1
    assert store.delete(texts[:2]) == 2 and store.count() == len(texts) - 2
    one = records(1, 3, 7)
    with pytest.raises(UserError, match="an id may have 65,535 bytes, got 65,536: 'éé"):
        store.upsert(Records(("é" * 32768,), one.vectors, one.uncertainty, one.payloads))
    store, bound = create_store(url(), 2), np.float32(0.1)
    uncertainty = np.array([np.nextafter(bound, bound - 1), bound])
    batch = Records(("below", "at"), np.zeros((2, 2), np.float32), uncertainty, ({}, {}))
    store.upsert(batch)
    for limit in (float(bound), 0.1, float("inf"), 0.0, 1e-45, 1e300):
        assert store.count(Filter(max_uncertainty=limit)) == sum(u <= limit for u in uncertainty.tolist()), limit


def test_collections_that_are_not_there_or_not_ours(embedded, file, tmp_path):
    raises(UserError, "there is no collection c", open_store, embedded())
    url = embedded()
    store = create_store(url, 3)
    raises(UserError, "already exists", create_store, url, 3)
    store._client.create_collection("stranger", dimension=4)
    raises(UserError, "stranger was not made by sfumato", open_store, f"milvus:{file}?name=stranger")
    raises(UserError, "there is no file", open_store, f"milvus:{tmp_path}/none.db")
    (tmp_path / "text.db").write_text("not a store")
    raises(UserError, r"text.db: .*Milvus Lite before 3", open_store, f"milvus:{tmp_path}/text.db")


def test_two_stores_of_one_file_and_another_process(tmp_path):
    path = tmp_path / "new folder" / "one.db"
    url = f"milvus:{path}"
    first, batch, second = create_store(url, 3), records(9, 3, 8), open_store(url)
    first.upsert(batch)
    first.close()
    first.close()
    assert_holds(second, by_id(batch))
    second.close()
    raises(UserError, None, second.count)
    with (path / "LOCK").open() as lock:  # as another process holds it that has the file open
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raises(UserError, "another process may have it open", open_store, url)
    assert_holds(open_store(url), by_id(batch))


def test_servers_that_are_not_there_and_passwords(monkeypatch):
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (contract.free_port(), silent.getsockname()[1]):
            with pytest.raises(UserError, match="server unavailable") as caught:
                open_store(f"milvus+http://someone:s3cr%2Ft@127.0.0.1:{port}/name?timeout=1")
            assert "s3cr" not in str(caught.value) and "someone:***@127.0.0.1" in str(caught.value)
    assert time.monotonic() - began < 15
    monkeypatch.setenv("MILVUS_TOKEN", "from the environment")
    assert milvus_place.Place("milvus+https://h:1/n").token == "from the environment"
    assert milvus_place.Place("milvus+https://me:a%40b@h:1/n").token == "me:a@b"
    assert milvus_place.Place("milvus+https://me:a%40b@h:1/n").uri == "https://h:1"
    kept = milvus_place.Place(without_password("milvus+https://me:a%40b@h:1/n"))  # As a collection keeps it.
    assert (kept.token, kept.uri) == ("from the environment", "https://h:1")
    monkeypatch.delenv("MILVUS_TOKEN")
    assert milvus_place.Place("milvus+https://me@h:1/n").token == ""


def test_a_server_that_hangs_is_given_up_and_a_killed_one_loses_nothing(milvus_server):
    store = create_store(milvus_server.url(call_timeout=1), 6)
    store.upsert(records(5, 6, 20))
    milvus_server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        said = "Deadline Exceeded; a call may take 1 seconds, [?]call_timeout=SECONDS"
        raises(UserError, said, store.count)
        raises(UserError, said, store.search, queries(1, 6, 0), 3)
    finally:
        milvus_server.process.send_signal(signal.SIGCONT)
    assert time.monotonic() - began < 10
    store.upsert(records(5, 6, 20))
    assert_holds(store, by_id(records(5, 6, 20)))
    store = create_store(milvus_server.url(index="HNSW"), 3)
    contract.assert_a_killed_server_loses_nothing(store, milvus_server.kill, milvus_server.start, False)


def test_a_killed_process_loses_nothing_of_its_embedded_file(tmp_path):
    url = f"milvus:{tmp_path}/one.db"
    create_store(url, 3).close()
    process = Started(contract.write_at_random, url, 0, False, piped=True)
    said = contract.said_by(process, process.kill)
    process.finish()
    contract.assert_nothing_lost(open_store(url), said)


QUICK = {
    # Milliseconds between ticks, for which reads of what was just written wait: 200 by default.
    "ROOTCOORD_TIMETICKINTERVAL": "5", "PROXY_TIMETICKINTERVAL": "5", "DATANODE_TIMETICK_INTERVAL": "5",
    # Milliseconds until a segment is closed after a write, for which optimise waits: 2000 by default.
    "DATACOORD_SEGMENT_ASSIGNMENTEXPIRATION": "200",
    # Milliseconds between looks at what is to be loaded: 1000, 1000 and 500 by default.
    "QUERYCOORD_CHECKCHANNELINTERVAL": "50", "QUERYCOORD_CHECKSEGMENTINTERVAL": "50",
    "QUERYCOORD_DISTPULLINTERVAL": "50",
    # Milliseconds, seconds and milliseconds between looks for built indexes: 10000, 10 and 1000 by default.
    "QUERYCOORD_CHECKINDEXINTERVAL": "50", "QUERYCOORD_UPDATENEXTTARGETINTERVAL": "1",
    "INDEXCOORD_SCHEDULER_INTERVAL": "50",
    "COMMON_SESSION_TTL": "6",  # Seconds until a started server takes the place of a killed one: 30 by default.
}  # fmt: skip


class MilvusServer:
    """It has its data and its programs, 250 MB, in an empty folder, and takes free ports."""

    def __init__(self, folder):
        milvus = pytest.importorskip("milvus", reason="needs the package milvus, a Milvus server for Linux on x86-64")
        self.folder, self.port, self.health_port = folder, contract.free_port(), contract.free_port()
        milvus.MilvusServerConfig(data_dir=str(folder), proxy_port=self.port).resolve()  # Writes configs/milvus.yaml.
        milvus._initialize_data_files(str(folder))
        client, peer = (f"http://127.0.0.1:{contract.free_port()}" for _ in range(2))
        # Without these, every server takes the ports 2379 and 2380 for its metadata.
        etcd = {"listen-client-urls": client, "advertise-client-urls": client, "listen-peer-urls": peer}
        etcd |= {"initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}"}
        (folder / "etcd.yaml").write_text(json.dumps(etcd))
        self.settings = {
            **{"DEPLOY_MODE": "STANDALONE", "METRICS_PORT": str(self.health_port), "LD_LIBRARY_PATH": "bin"},
            **{"ETCD_CONFIG_PATH": "etcd.yaml", "ETCD_ENDPOINTS": client.removeprefix("http://")},
        }
        try:
            self.start()
        except (OSError, RuntimeError) as error:
            pytest.skip(f"the Milvus server of the package milvus does not start here: {error}")

    def start(self):
        # Not by the package, which refuses a port on which a killed server has had connections.
        with (self.folder / "log").open("ab") as log:
            told = {"cwd": self.folder, "stdout": log, "stderr": log, "env": os.environ | self.settings | QUICK}
            self.process = subprocess.Popen([self.folder / "bin" / "milvus", "run", "standalone"], **told)
        for _ in range(600):
            if self.is_healthy():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.kill()
        raise RuntimeError((self.folder / "log").read_text()[-500:])

    def is_healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/healthz", timeout=5) as answer:
                return b"OK" in answer.read()
        except OSError:
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()

    def url(self, **options):
        told = "&".join(f"{name}={value}" for name, value in options.items())
        return f"milvus+http://127.0.0.1:{self.port}/c{uuid.uuid4().hex[:12]}{told and '?'}{told}"
