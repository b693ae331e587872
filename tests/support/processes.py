"""Real processes that start quickly: forked from a server that has imported torch and sfumato already."""

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path

import torch

_CONTEXT = multiprocessing.get_context("forkserver")


def short_folder() -> str:
    """Where sockets have a short path: the system allows 107 bytes, and a TMPDIR may have more."""
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 60 else tempfile.gettempdir()


# The socket of the server, in the short folder for all servers of this process.
_before, tempfile.tempdir = tempfile.tempdir, short_folder()
util.get_temp_dir()
tempfile.tempdir = _before
_OURS = "cli", "training.loop", "models.embed", "search.collection", "serve.app", "serve.server"
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.nn", *(f"sfumato.{name}" for name in _OURS), "pytest", "support.processes"]
)


class Started:
    """An importable function in a process of its own; piped, its output is read from `stdout` while it runs."""

    def __init__(
        self, function: Callable[..., None], *arguments: object, env: Mapping[str, str] = {}, piped: bool = False
    ) -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self._output = Path(name)
        into = None
        if piped:
            reading, writing = os.pipe()
            self.stdout, into = os.fdopen(reading, encoding="utf-8"), Connection(writing, readable=False)
        self._process = _CONTEXT.Process(target=_run, args=(function, arguments, {**os.environ, **env}, name, into))
        self._process.start()
        if into is not None:
            into.close()

    def finish(self, seconds: float = 120) -> tuple[int, str]:
        """(exit status, standard error and unless piped output); a process that does not end in time is killed."""
        self._process.join(seconds)
        if self._process.is_alive():
            self.kill()
        text = self._output.read_text(encoding="utf-8")
        self._output.unlink()
        assert self._process.exitcode is not None
        return self._process.exitcode, text

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()


def command(*arguments: object) -> None:
    """``sfumato ARGUMENTS...``"""
    from sfumato.cli import main

    sys.argv = ["sfumato", *map(str, arguments)]
    main()


def process_group(
    size: int, function: Callable[..., None], *arguments: object, env: Mapping[str, str] = {}
) -> list[Started]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), **env}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [Started(function, *arguments, env=shared | own) for own in ranks]


def _run(
    function: Callable[..., None],
    arguments: tuple[object, ...],
    env: Mapping[str, str],
    output: str,
    pipe: Connection | None,
) -> None:
    os.environ.clear()
    os.environ.update(env)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor if pipe is None else pipe.fileno(), 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    torch.set_num_threads(1)
    try:
        function(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
