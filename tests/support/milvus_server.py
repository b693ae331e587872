"""A real Milvus server of the package `milvus`, without containers: to be killed and started again."""

import json
import os
import subprocess
import time
import urllib.request
import uuid

import pytest

from support.stores_contract import free_port

QUICK = {
    # Milliseconds between ticks, for which reads of what was just written wait: 200 by default.
    "ROOTCOORD_TIMETICKINTERVAL": "5",
    "PROXY_TIMETICKINTERVAL": "5",
    "DATANODE_TIMETICK_INTERVAL": "5",
    # Milliseconds until a segment is closed after a write, for which optimise waits: 2000 by default.
    "DATACOORD_SEGMENT_ASSIGNMENTEXPIRATION": "200",
    # Milliseconds between looks at what is to be loaded: 1000, 1000 and 500 by default.
    "QUERYCOORD_CHECKCHANNELINTERVAL": "50",
    "QUERYCOORD_CHECKSEGMENTINTERVAL": "50",
    "QUERYCOORD_DISTPULLINTERVAL": "50",
    # Milliseconds, seconds and milliseconds between looks for built indexes: 10000, 10 and 1000 by default.
    "QUERYCOORD_CHECKINDEXINTERVAL": "50",
    "QUERYCOORD_UPDATENEXTTARGETINTERVAL": "1",
    "INDEXCOORD_SCHEDULER_INTERVAL": "50",
    "COMMON_SESSION_TTL": "6",  # Seconds until a started server takes the place of a killed one: 30 by default.
}


class MilvusServer:
    """It has its data and its programs, 250 MB, in an empty folder, and takes free ports."""

    def __init__(self, folder):
        milvus = pytest.importorskip("milvus", reason="needs the package milvus, a Milvus server for Linux on x86-64")
        self.folder, self.port, self.health_port = folder, free_port(), free_port()
        milvus.MilvusServerConfig(data_dir=str(folder), proxy_port=self.port).resolve()  # Writes configs/milvus.yaml.
        milvus._initialize_data_files(str(folder))
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
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
