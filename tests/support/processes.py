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


def _socket_of_the_server() -> None:
    """In the short folder, for all servers of this process."""
    before, tempfile.tempdir = tempfile.tempdir, short_folder()
    util.get_temp_dir()
    tempfile.tempdir = before


_socket_of_the_server()
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.nn",
        "sfumato.cli",
        "sfumato.training.loop",
        "sfumato.models.embed",
        "sfumato.search.collection",
        "sfumato.serve.app",
        "sfumato.serve.server",
        "pytest",
        "support.processes",
    ]
)


class Started:
    """A function that runs in a process of its own.

    Args:
        function: importable; called with the arguments.
        arguments: of it.
        env: environment variables besides those of this process.
        piped: standard output can be read from `stdout` while it runs, to its end.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: object,
        env: Mapping[str, str] | None = None,
        piped: bool = False,
    ) -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self._output = Path(name)
        into = None
        if piped:
            reading, writing = os.pipe()
            self.stdout, into = os.fdopen(reading, encoding="utf-8"), Connection(writing, readable=False)
        self._process = _CONTEXT.Process(
            target=_run, args=(function, arguments, {**os.environ, **(env or {})}, name, into)
        )
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
        """End it with SIGKILL, which no handler sees."""
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()


def command(*arguments: object) -> None:
    """``sfumato ARGUMENTS...``"""
    from sfumato.cli import main

    sys.argv = ["sfumato", *map(str, arguments)]
    main()


def process_group(
    size: int, function: Callable[..., None], *arguments: object, env: Mapping[str, str] | None = None
) -> list[Started]:
    """The processes of a group, with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), **(env or {})}
    return [
        Started(function, *arguments, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]


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
