"""The store in Redis against brute force of its definition, with a real redis-server that is killed during writes."""

import contextlib
import shutil
import socket
import sys
import threading

import numpy as np
import pytest
import torch
from support.raising import raises
from support.stores_contract import (
    Server,
    StoreContract,
    assert_holds,
    assert_others_read,
    assert_survives_kills,
    by_id,
    create_store,
    open_store,
    queries,
    records,
    squared_l2,
)

from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.collection import GaussianCollection
from sfumato.search.exact import lift_gallery, lift_queries
from sfumato.search.stores.protocol import Filter, Records

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class RedisServer(Server):
    """redis-server, its data in a folder."""

    def __init__(self, folder, *arguments):
        if shutil.which("redis-server") is None:
            pytest.skip("needs redis-server on the path")
        pytest.importorskip("redis", reason="needs the extra redis")
        self.arguments = arguments
        folder.mkdir()
        super().__init__(folder)
        self.address = f"redis://127.0.0.1:{self.port}/0"

    def command(self):
        alone = "redis-server", "--port", self.port, "--bind", "127.0.0.1", "--dir", self.folder, "--save", ""
        return *alone, *self.arguments

    def answers(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))


@pytest.fixture
def redis_server(tmp_path):
    """Starts a server that ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            server = RedisServer(tmp_path / "redis", *arguments)
            stack.callback(server.kill)
            return server

        yield start


@pytest.fixture(scope="module")
def durable(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis") / "data", *DURABLE)
    yield server
    server.kill()


@pytest.fixture
def server(durable):
    """A server that loses nothing, empty."""
    import redis

    redis.Redis(port=durable.port).flushall()
    return durable


class TestInRedis(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.address = server.address

    def create(self, tmp_path, dim):
        return create_store(f"{self.address}?means={tmp_path}/means", dim)


def gaussians(n, d, seed):
    generator = torch.Generator().manual_seed(seed)
    return GaussianEmbedding(torch.randn(n, d, generator=generator), torch.randn(n, d, generator=generator) * 2 - 1)


def of(embeddings, vectors):
    n = len(vectors)
    payloads = tuple({"half": "ab"[i % 2]} for i in range(n))
    return Records(tuple(f"item-{i}" for i in range(n)), vectors, embeddings.total_variance, payloads)


@pytest.mark.parametrize("distance, query", [("csd", "candidates=12"), ("wasserstein2", "candidates=12&mean_dim=7")])
@pytest.mark.parametrize("filter", [None, Filter({"half": ("b",)}, max_uncertainty=9.0)], ids=["all", "filtered"])
def test_the_candidates_nearest_by_mean_are_ranked_again(distance, query, filter, tmp_path, server):
    url = f"{server.address}?means={tmp_path}/means"
    gallery, wanted = gaussians(150, 7, 1), gaussians(20, 7, 2)
    batch, lifted = of(gallery, lift_gallery(gallery, distance)), lift_queries(wanted, distance)
    store = create_store(f"{url}&{query}", lifted.shape[1])
    store.upsert(batch)
    assert store.dim == lifted.shape[1]
    fits = [j for j in range(150) if filter is None or filter.accepts(batch.payloads[j], float(batch.uncertainty[j]))]
    by_mean = squared_l2(wanted.mean, gallery.mean[fits])
    by_both = squared_l2(lifted, batch.vectors[fits])
    differs = moved = 0
    for i, found in enumerate(store.search(lifted, 5, filter)):
        candidates = np.argsort(by_mean[i])[:12]
        best = candidates[np.argsort(by_both[i][candidates])][:5]
        assert list(found.ids) == [f"item-{fits[j]}" for j in best]
        differs += list(best) != list(np.argsort(by_both[i])[:5])
        moved += list(best) != list(candidates[:5])
    # The deviations change the order, and twelve candidates do not always hold the nearest; all items do.
    assert differs > 0 and moved > 10
    store.close()
    store = open_store(f"{url}&candidates=150")
    for i, found in enumerate(store.search(lifted, 5, filter)):
        assert list(found.ids) == [f"item-{fits[j]}" for j in np.argsort(by_both[i])[:5]]
    assert len(store.search(lifted[:1], 200)[0]) == 150


def test_wrong_urls_are_told(tmp_path, server):
    address = server.address
    means = f"{address}?means={tmp_path}/s"
    for url, told in [
        ("redis://127.0.0.1:1/0", "the folder is missing; write redis://host:6379/0[?]means=PATH"),
        (f"{means}&candidates=0", "candidates must be a whole number from 1, got '0'"),
        (f"{means}&mean_dim=4", "mean_dim must be from 1 to 3, got 4"),
        (f"{means}&colour=x", "unknown option 'colour'"),
        (f"{means}&engine=tree", "unknown engine 'tree'"),
    ]:
        raises(UserError, told, create_store, url, 4)
        assert not (tmp_path / "s").exists()
    create_store(means, 4).close()
    raises(UserError, "has a store already", create_store, means, 4)
    open_store(means).close()
    raises(UserError, "was created with mean_dim=3, not 2", open_store, f"{means}&mean_dim=2")
    create_store(f"{tmp_path}/t", 4).close()
    raises(UserError, "is a plain store without deviations", open_store, f"{address}?means={tmp_path}/t")


def test_a_second_writer_leaves_both_parts_alone(tmp_path, server):
    url, batch = f"{server.address}?means={tmp_path}/means", records(30, 4, 1)
    store = create_store(url, 4)
    store.upsert(batch)
    with contextlib.closing(open_store(url)) as other, pytest.raises(UserError, match="wait until it closes"):
        other.upsert(records(30, 4, 2))
    store.optimise()
    assert_holds(store, by_id(batch))


def test_optimise_removes_deviations_that_no_record_names(tmp_path, server):
    batch = records(30, 4, 1)
    store = create_store(f"{server.address}?means={tmp_path}/means&prefix=a[b]*", 4)
    store.upsert(batch)
    store._deviations.put(["0" * 16 + ":7"], torch.zeros(1, 1))
    store.optimise()
    assert store._deviations.get(["0" * 16 + ":7"]) == {}
    assert_holds(store, by_id(batch))


@pytest.mark.filterwarnings("error")  # this server keeps what it has, and is not warned of
def test_stores_in_one_redis_are_apart(tmp_path, server):
    batches = [records(20, 4, seed) for seed in (1, 2)]
    urls = [f"{server.address}?means={tmp_path}/{i}&prefix={prefix}" for i, prefix in enumerate(("s:", "s:s:"))]
    stores = [create_store(url, 4) for url in urls]
    for _ in range(2):
        for store, batch in zip(stores, batches, strict=True):
            store.upsert(batch)
            store.optimise()
    for store, batch in zip(stores, batches, strict=True):
        assert_holds(store, by_id(batch))
        store.close()
    with pytest.raises(UserError, match="the prefix 's:' has a store already"):
        create_store(f"{server.address}?means={tmp_path}/3&prefix=s:", 4)
    with pytest.raises(UserError, match="the prefix 's:' belongs to other means"):
        open_store(f"{server.address}?means={tmp_path}/1&prefix=s:")
    with pytest.raises(UserError, match="the prefix 'none:' has no store"):
        open_store(f"{server.address}?means={tmp_path}/1&prefix=none:")


def test_missing_deviations_name_the_item(tmp_path, server):
    import redis

    batch = records(20, 4, 1)
    store = create_store(f"{server.address}?means={tmp_path}/means&prefix=s:", 4)
    store.upsert(batch)
    key = store._means.get(["item-7"]).payloads[0]["\x01spread"]
    assert np.frombuffer(redis.Redis(port=server.port).get(f"s:{key}"), "<f4") == batch.vectors[7, 3:].numpy()
    redis.Redis(port=server.port).delete(f"s:{key}")
    for ask in (lambda: store.get(["item-7"]), lambda: store.search(queries(1, 4, 0), 3), lambda: list(store.scan())):
        raises(UserError, "the deviations of 'item-7' are missing from redis://.*; store the item again", ask)
    store.upsert(batch.take([7]))
    assert_holds(store, by_id(batch))


def test_the_password_is_used_and_never_shown(tmp_path, redis_server, monkeypatch):
    server = redis_server(*DURABLE, "--requirepass", "hush-hush")
    means = f"means={tmp_path}/means"
    right = f"redis://:hush-hush@127.0.0.1:{server.port}/0?{means}"
    with pytest.raises(UserError, match="Redis: .*(?i:authenticat)") as none:
        create_store(f"{server.address}?{means}", 4)
    with pytest.raises(UserError, match=r":\*\*\*@") as wrong:
        create_store(right.replace("hush-hush", "hush-wrong"), 4)
    assert "hush" not in str(none.value) + str(wrong.value) and not (tmp_path / "means").exists()
    store = create_store(right, 4)
    assert "hush" not in store.url and ":***@" in store.url
    store.close()
    monkeypatch.setenv("REDIS_PASSWORD", "hush-hush")
    open_store(f"{server.address}?{means}").close()
    server.kill()
    with pytest.raises(UserError, match="Redis: .*check that the server runs") as gone:
        open_store(right)
    assert "hush" not in str(gone.value)


@pytest.mark.parametrize("user", ["", "default"])
def test_a_collection_whose_url_had_a_password_opens_with_that_of_the_environment(
    tmp_path, redis_server, monkeypatch, user
):
    server = redis_server(*DURABLE, "--requirepass", "hush/hush")
    url = f"redis://{user}:hush%2Fhush@127.0.0.1:{server.port}/0?means={tmp_path}/means"
    with GaussianCollection.create(tmp_path / "c", url, d=3, logit_scale=1.0, logit_bias=0.0) as made:
        made.upsert(GaussianEmbedding(torch.randn(2, 3), torch.zeros(2, 3)), ["a", "b"])
    assert "hush" not in (tmp_path / "c" / "manifest.json").read_text()
    raises(UserError, "(?i)authenticat|password", GaussianCollection.open, tmp_path / "c")
    monkeypatch.setenv("REDIS_PASSWORD", "hush/hush")
    with GaussianCollection.open(tmp_path / "c") as opened:
        assert opened.search(GaussianEmbedding.point(torch.zeros(1, 3)), k=2)[0]


def test_a_redis_that_forgets_is_warned_of(tmp_path, redis_server):
    server = redis_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.warns(UserWarning, match="set appendonly yes, appendfsync always, maxmemory-policy noeviction"):
        create_store(f"{server.address}?means={tmp_path}/means", 4).close()


def test_without_its_client_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UserError, match=r"pip install 'sfumato\[redis\]'"):
        create_store(f"redis://127.0.0.1:1/0?means={tmp_path}/means", 4)


def test_nothing_acknowledged_is_lost_when_redis_is_killed(tmp_path, redis_server):
    server = redis_server(*DURABLE)
    store = create_store(f"{server.address}?means={tmp_path}/means", 6)
    kept, failures = {}, 0
    for run in range(4):
        killer = threading.Timer(0.05 + 0.07 * run, server.kill)
        killer.start()
        for step in range(10_000):
            batch = records(40, 6, 1000 * run + step, prefix=f"{step % 7}")
            try:
                store.upsert(batch)
            except UserError as error:
                assert "Redis" in str(error)
                failures += 1
                break
            kept |= by_id(batch)
        killer.join()
        server.start()
        # The write that failed has changed nothing.
        assert_holds(store, kept)
        assert kept
    assert failures == 4
    store.close()
    store = open_store(f"{server.address}?means={tmp_path}/means")
    store.optimise()
    assert_holds(store, kept)


def test_processes_that_are_killed_and_others_that_read(tmp_path, server):
    killed = lambda url: assert_survives_kills(url, 2, nearest=False)  # It ranks candidates by their means.
    for name, check in (("a", killed), ("b", assert_others_read)):
        url = f"{server.address}?means={tmp_path}/{name}&prefix={name}:"
        create_store(url, 3).close()
        check(url)
