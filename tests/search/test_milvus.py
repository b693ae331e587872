"""Milvus Lite, embedded and as a server of its own: the contract of stores, and what happens to them on a bad day."""

import importlib.util
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from search.stores_contract import FINGERPRINT, StoreContract, assert_holds, assert_nearest, by_id, queries, records

from sfumato.errors import UserError
from sfumato.search.stores import milvus
from sfumato.search.stores.base import Filter, Records
from sfumato.search.stores.open import create_store, open_store

if not all(map(importlib.util.find_spec, ("pymilvus", "milvus_lite"))):
    pytest.skip("needs the extra milvus", allow_module_level=True)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Server:
    """`milvus-lite server` on a free loopback port; without --host it would listen to everyone."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.start()

    def start(self):
        command = [sys.executable, "-m", "milvus_lite", "server", "--data-dir", str(self.folder / "data")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)], stdout=log, stderr=log
            )
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError((self.folder / "log").read_text()[-500:])

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def url(self, **options):
        told = "&".join(f"{name}={value}" for name, value in options.items())
        return f"milvus+http://127.0.0.1:{self.port}/c{uuid.uuid4().hex[:12]}{told and '?'}{told}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("milvus"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """An embedded file that is kept open, so that each test has only its own collection to open."""
    path = tmp_path_factory.mktemp("milvus") / "it's one.db"
    keeper = create_store(f"milvus:{path}?name=keeper", 2, FINGERPRINT)
    yield path
    keeper.close()


class TestFile(StoreContract):
    @pytest.fixture(autouse=True)
    def _file(self, file):
        self.file = file

    def create(self, tmp_path, dim):
        return create_store(f"milvus:{self.file}?name=c{uuid.uuid4().hex[:12]}", dim, FINGERPRINT)


class TestServer(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def create(self, tmp_path, dim):
        return create_store(self.server.url(index="HNSW", ef=300), dim, FINGERPRINT)
