"""The HTTP service: a model and its galleries behind routes, with limits, keys and metrics. Needs the extra `serve`."""

import socket

from sfumato.errors import UserError


def check_address(host: str, port: int) -> None:
    """Refuse an address that is not available, before a model is loaded."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # The rest is the address once more.
        raise UserError(f"cannot serve at {host}:{port} ({why}); choose another --host or --port") from error
