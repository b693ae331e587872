"""PostgreSQL with pgvector: the contract of stores against a real server, and what that server may do to us."""

import json
import os
import signal
import socket
import time

import pytest
from support import stores_contract as contract
from support.postgresql import postgresql
from support.raising import raises
from support.stores_contract import assert_holds, assert_nearest, by_id, create_store, open_store, queries, records

from sfumato.errors import UserError
from sfumato.search.stores import pgvector_connections
from sfumato.search.stores.protocol import WORDS, Filter, Records

pytestmark = pytest.mark.engine
pytest.importorskip("psycopg")
PASSWORD = "s3cr/t?@:#word"
QUOTED = "s3cr%2Ft%3F%40%3A%23word"
OTHERS = "backend_type = 'client backend' AND pid <> pg_backend_pid()"


@pytest.fixture(scope="module")
def server():
    with postgresql() as server:
        # Tables of tests are so small that the planner would leave their indexes aside.
        server.execute("CREATE DATABASE indexed", "ALTER DATABASE indexed SET enable_seqscan = off")
        server.execute("CREATE ROLE guarded LOGIN SUPERUSER PASSWORD '" + PASSWORD + "'")
        yield server


class OnServer:
    options = {}

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def create(self, tmp_path, dim):
        return create_store(self.server.url(**self.options), dim)


class TestExact(OnServer, contract.StoreContract):
    pass


class TestHnsw(OnServer, contract.StoreBasics):
    options = {"database": "indexed", "index": "hnsw", "m": 24, "ef_construction": 200, "ef_search": 200}


class TestIvfflat(OnServer, contract.StoreBasics):
    options = {"database": "indexed", "index": "ivfflat", "lists": 4, "probes": 4}


def plan_of(store, monkeypatch, k=5, filter=None):
    import psycopg

    seen, execute = [], psycopg.Connection.execute

    def explained(connection, query, *arguments, **options):
        if "ORDER BY" in str(query):
            plan = execute(connection, psycopg.sql.SQL("EXPLAIN ") + query, *arguments).fetchall()
            seen.append("\n".join(line for (line,) in plan))
        return execute(connection, query, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "execute", explained)
        store.search(queries(1, store.dim, 0), k, filter)
    return seen


@pytest.mark.parametrize("index", ["hnsw", "ivfflat"])
def test_the_index_is_used_and_none_is_exact(server, monkeypatch, index):
    url = server.url(database="indexed", index=index)
    store = create_store(url, 12)
    store.upsert(records(300, 12, 1))
    assert "Index Scan" not in plan_of(store, monkeypatch)[0]
    store.optimise()
    store.optimise()
    plans = plan_of(store, monkeypatch)
    assert len(plans) == 1 and f"_{index} on" in plans[0]
    assert "Index Scan" not in plan_of(open_store(url.replace(index, "none")), monkeypatch)[0]
    assert open_store(url.replace(f"&index={index}", "")).index == index


@pytest.mark.parametrize("compress", ["none", "binary"])
def test_a_narrow_filter_brings_all_that_fit(server, monkeypatch, compress):
    store = create_store(server.url(database="indexed", index="hnsw", ef_search=5, compress=compress, overfetch=1), 9)
    batch = records(600, 9, 2)
    batch = Records(batch.ids, batch.vectors, batch.uncertainty, tuple({"rare": str(i % 60)} for i in range(600)))
    store.upsert(batch)
    store.optimise()
    assert all(len(found) == 8 for found in store.search(queries(5, 9, 3), 8, Filter({"rare": ("7",)})))
    assert_nearest(store, by_id(batch), queries(5, 9, 3), 20, Filter({"rare": ("7",)}))


@pytest.mark.parametrize("index", ["hnsw", "ivfflat"])
@pytest.mark.parametrize("compress, code", [("half", "halfvec"), ("binary", "binary_quantize")])
def test_compressed_vectors_are_candidates_only(server, monkeypatch, index, compress, code):
    options = {"hnsw": {"ef_search": 400}, "ivfflat": {"lists": 4, "probes": 4}}[index]
    url = server.url(database="indexed", index=index, compress=compress, **options)
    store = create_store(url, 40)
    contract.assert_candidates_only(store)
    (plan,) = plan_of(store, monkeypatch)
    assert f"_{index} on" in plan and code in plan
    assert len(open_store(url.replace("&compress", "&overfetch=1&compress")).search(queries(1, 40, 22), 5)[0]) == 5


def test_dimensions_and_versions_that_there_are_not(server):
    for options, dim in (({}, 2001), ({"compress": "half"}, 4001)):
        url = server.url(index="hnsw", **options)
        raises(UserError, f"indexes at most 2,000, 4,000 with .* got {dim:,}; index=none", create_store, url, dim)
    raises(UserError, r"stores at most 16,000 dimensions", create_store, server.url(), 16001)
    for options in ({}, {"index": "hnsw", "compress": "binary"}):
        store, batch = create_store(server.url(database="indexed", **options), 4001), records(20, 4001, 6)
        store.upsert(batch)
        store.optimise()
        assert_holds(store, by_id(batch))
        assert_nearest(store, by_id(batch), queries(2, 4001, 7), 5)
    url = server.url(database="early")
    server.execute("CREATE DATABASE early")
    create_store(url, 3).close()
    server.execute("UPDATE pg_extension SET extversion = '0.7.4' WHERE extname = 'vector'", database="early")
    for opened in (lambda: open_store(url), lambda: create_store(server.url(database="early"), 3)):
        raises(UserError, "needs pgvector 0.8 or later, and this database has 0.7.4; install a later one", opened)


def test_a_scan_and_a_batch_are_of_one_state(server):
    store, batch = create_store(server.url(), 3), records(60, 3, 8)
    with pytest.raises(UserError, match="an id may have 2,000 bytes, got 2,001"):
        store.upsert(Records(("é" * 1000 + "x", *batch.ids[1:]), batch.vectors, batch.uncertainty, batch.payloads))
    assert store.count() == 0
    name = "".join(map(chr, range(0x4E00, 0x4E00 + 666)))
    batch = Records((name, *batch.ids[1:]), batch.vectors, batch.uncertainty, batch.payloads)
    store.upsert(batch)
    scan = store.scan(batch=10)
    first = next(scan)
    store.delete(batch.ids[30:])
    store.upsert(records(5, 3, 9, prefix="late"))
    assert sorted([*first.ids, *(key for part in scan for key in part.ids)]) == sorted(batch.ids)
    abandoned = store.scan(batch=10)
    next(abandoned)
    abandoned.close()
    assert store.count() == 35


def indexes(server, table):
    found = server.execute(f"SELECT indexname FROM pg_indexes WHERE tablename = '{table}'", database="indexed")
    return {name for (name,) in found if not name.endswith("_pkey")}


def test_words_have_an_index_as_soon_as_an_item_has_some(server, monkeypatch):
    store, batch = create_store(server.url(database="indexed", table="worded"), 3), records(4, 3, 1)
    store.upsert(batch)
    assert indexes(server, "worded") == set() and store.match_words(["dog"], 3) == []  # As in one of earlier versions.
    for _ in range(2):
        store.upsert(Records(batch.ids[:2], batch.vectors[:2], batch.uncertainty[:2], ({WORDS: "dog"},) * 2))
    (name,) = indexes(server, "worded")
    monkeypatch.setattr(store, "search", lambda *_: store.match_words(["dog", "cat"], 3))
    (plan,) = plan_of(store, monkeypatch)
    assert name in plan and store.match_words(["dog", "cat"], 3) == ["item-0", "item-1"]


@pytest.mark.parametrize("start", ["shared_prefix_" * 3, "é" * 20])
def test_tables_that_begin_alike_keep_their_own_indexes(server, start):
    tables, stores = [f"{start}_of_words_{last}" for last in "ab"], []
    for table in tables:
        stores.append(create_store(server.url(database="indexed", table=table, index="hnsw"), 5))
        stores[-1].upsert(records(20, 5, 17))
        stores[-1].optimise()
    for store in stores:
        store.optimise()
        store.close()
    named = [indexes(server, table) for table in tables]
    assert [len(names) for names in named] == [1, 1] and named[0] != named[1]


def test_options_in_the_comment_of_a_table_are_checked_and_those_of_a_later_version_passed_over(server):
    url = server.url()
    create_store(url, 3).close()
    table = url.rpartition("=")[2]

    def opened(options):
        note = json.dumps({"sfumato": 1, "dim": 3, "fingerprint": "f", "options": options}).replace("'", "''")
        server.execute(f"COMMENT ON TABLE {table} IS '{note}'")
        return open_store(url)

    for options, said in (
        ({"index": "hnsw (embedding vector_l2_ops); DROP TABLE victim; --"}, "index must be none, hnsw or ivfflat"),
        ({"index": "hnsw", "m": "16); DROP TABLE victim; --"}, "m must be a whole number from 1"),
        ({"index": "ivfflat", "lists": ["1"]}, "lists must be a whole number from 1"),
    ):
        raises(UserError, rf"the comment of table {table}: {said}", opened, options)
    store = opened({"index": "hnsw", "new": 7})
    assert (store.dim, store.fingerprint, store.index) == (3, "f", "hnsw")


def test_a_statement_that_takes_too_long_and_a_server_that_hangs_are_given_up(server, monkeypatch):
    import psycopg

    monkeypatch.setattr(pgvector_connections, "_SILENCE", 0.2)
    url = server.url(statement_timeout=1)
    store = create_store(url, 3)
    store.upsert(records(5, 3, 19))
    with psycopg.connect(url.partition("?")[0]) as other:
        other.execute(f"LOCK TABLE {url.partition('table=')[2]} IN ACCESS EXCLUSIVE MODE")
        raises(UserError, r"statement timeout; the limit is 1 seconds, \?statement_timeout=SECONDS", store.count)
    store.optimise()
    backends = [pid for (pid,) in server.execute(f"SELECT pid FROM pg_stat_activity WHERE {OTHERS}")]
    for pid in backends:
        os.kill(pid, signal.SIGSTOP)
    try:
        raises(UserError, r"the server has not answered for 1.2 seconds", store.count)
    finally:
        for pid in backends:
            os.kill(pid, signal.SIGCONT)
    assert store.count() == 5


def test_tables_with_awkward_names_and_those_that_are_not_ours(server):
    server.execute('CREATE SCHEMA IF NOT EXISTS "my schema"')
    for table in ("my%20schema.it's%20%22{x}%22", "T" * 60):
        url = server.url(table=table, index="hnsw")
        store, batch = create_store(url, 3), records(20, 3, 11)
        store.upsert(batch)
        store.optimise()
        store.optimise()
        store.close()
        store = open_store(url)
        assert_holds(store, by_id(batch))
        store.close()
    url = server.url()
    raises(UserError, "there is no table t", open_store, url)
    create_store(url, 3).close()
    raises(UserError, "already exists", create_store, url, 3)
    server.execute("CREATE TABLE IF NOT EXISTS stranger (id int)")
    raises(UserError, "stranger was not made by sfumato", open_store, server.url(table="stranger"))


def test_passwords_open_and_are_never_told(server, monkeypatch):
    url = server.url(user=f"guarded:{QUOTED}")
    store = create_store(url, 3)
    assert PASSWORD not in store.url and QUOTED not in store.url and "guarded:***@" in store.url
    with store._connections.borrow() as connection:  # They have limits by default.
        told = connection.info.get_parameters()
        assert connection.execute("SHOW statement_timeout").fetchone() == ("1min",)
    names = "tcp_user_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count"
    assert [told[name] for name in names] == ["30000", "30", "10", "3"]
    store.close()
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    opened = open_store(url.replace(f":{QUOTED}", ""))
    assert opened.count() == 0
    opened.close()
    monkeypatch.delenv("PGPASSWORD")
    wrong, unescaped = url.replace(QUOTED, "wr0ng%2Fword"), url.replace(QUOTED, PASSWORD)
    missing = url.replace("/postgres?", "/nowhere?")
    for bad in (wrong, unescaped, missing, url + "&password=wr0ng", url.replace("127.0.0.1", "[::bad")):
        caught = raises(UserError, None, open_store, bad)
        assert caught.value.__cause__ is None
        for secret in ("wr0ng", "s3cr", "#word", "2Fword"):
            assert secret not in str(caught.value)


def test_servers_that_are_not_there_and_a_killed_client(server):
    started_at = time.monotonic()
    with pytest.raises(UserError, match=r"store postgresql://someone:\*\*\*@127.0.0.1:\d+/x: .*refused"):
        open_store(f"postgresql://someone:hush@127.0.0.1:{contract.free_port()}/x")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UserError, match="timeout"):
        open_store(f"postgresql://someone@127.0.0.1:{silent.getsockname()[1]}/x?connect_timeout=2")
    assert time.monotonic() - started_at < 10
    contract.assert_survives_kills(create_store(server.url(), 3).url, 2)


def test_a_killed_server_loses_nothing_and_fails_no_call_that_comes_after_it(server):
    store, idle = create_store(server.url(index="hnsw"), 3), create_store(server.url(), 3)
    idle.upsert(records(5, 3, 12))
    scans = [idle.scan(2) for _ in range(3)]
    for parts in scans:
        next(parts)
    for parts in scans:
        parts.close()
    assert len(server.execute(f"SELECT 1 FROM pg_stat_activity WHERE {OTHERS}")) >= 3
    store.optimise()
    assert store.count() == 0

    def start():
        raises(UserError, "connection failed", store.count)
        server.start()
        assert idle.count() == 5
        idle.search(queries(1, 3, 0), 3)

    contract.assert_a_killed_server_loses_nothing(store, server.stop, start)
    parts = idle.scan(2)
    next(parts)
    server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OTHERS}")
    while server.execute(f"SELECT 1 FROM pg_stat_activity WHERE {OTHERS}"):
        time.sleep(0.01)
    raises(UserError, rf"{idle.url.rpartition('=')[2]}: .*(terminat|closed)", next, parts)
    idle.upsert(records(5, 3, 13))
    assert_holds(idle, by_id(records(5, 3, 13)))
