"""The nginx of deploy/ on free ports of this machine, to be killed and restarted; the tests use it too."""

import contextlib
from pathlib import Path

import httpx
from store_servers import LocalServer

CONF = Path(__file__).resolve().parents[1] / "deploy" / "nginx.conf"


class ProxyServer(LocalServer):
    """nginx with the file of deploy/; only ports, and where it writes, are changed.

    Args:
        folder: of its files and its logs.
        ports: those of the two services.
    """

    def __init__(self, folder: Path, ports: tuple[int, int]) -> None:
        super().__init__(folder)
        changes = {
            "server serve-1:8000": f"server 127.0.0.1:{ports[0]}",
            "server serve-2:8000": f"server 127.0.0.1:{ports[1]}",
            "listen 8080;": f"listen 127.0.0.1:{self.port};",
            "/tmp/nginx.pid": f"{folder}/nginx.pid",
            "/dev/stderr": f"{folder}/errors.log",
            "/dev/stdout": f"{folder}/access.log",
        }
        text = CONF.read_text(encoding="utf-8")
        for before, after in changes.items():
            if text.count(before) != 1:
                raise ValueError(f"{CONF} has {before!r} {text.count(before)} times, expected once")
            text = text.replace(before, after)
        kinds = "client_body", "proxy", "fastcgi", "uwsgi", "scgi"
        bodies = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        (folder / "nginx.conf").write_text(text.replace("http {", f"http {{ {bodies}", 1), encoding="utf-8")

    @property
    def url(self) -> str:
        """The address that clients use."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """See :meth:`LocalServer.start`."""
        files = ["-e", f"{self.folder}/errors.log", "-c", f"{self.folder}/nginx.conf"]
        self._run(["nginx", *files, "-g", "daemon off; user root;"])

        def answers() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                httpx.get(f"{self.url}/healthz", timeout=5, trust_env=False)
                return True
            return False

        self._await(answers)
