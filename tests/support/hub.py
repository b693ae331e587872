"""A stand-in of the Hugging Face hub in memory: repositories, revisions, files and downloads in parts."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

ANN, BOB = "hf_token_of_ann", "hf_token_of_bob"
LARGE = (".safetensors",)


@dataclass
class Repository:
    private: bool = False
    commits: list[tuple[str, dict[str, bytes], str]] = field(default_factory=list)  # (hash, files, message), last first

    def commit(self, files: dict[str, bytes], message: str) -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits.insert(0, (sha, files, message))
        return sha

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        return next(((sha, files) for sha, files, _ in self.commits if revision in (sha, "main")), None)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[0][1]


def oid_of(name: str, data: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []  # (method, path, token)
        self.cut: int | None = None
        self.held = threading.Event()  # a download that was cut waits for it before it ends
        self.held.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: Any = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut is not None and "/resolve/" in self.path and len(data) > self.hub.cut:
            self.wfile.write(data[: self.hub.cut])
            self.close_connection = True
            self.hub.held.wait(60)
            return
        self.wfile.write(data)

    def refused(self, status: int, message: str, code: str = "") -> None:
        self.answer(status, {"error": message}, X_Error_Message=message, **({"X_Error_Code": code} if code else {}))

    def user(self) -> str | None:
        return {ANN: "ann", BOB: "bob"}.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and self.user() != name.split("/")[0]):
            self.refused(404 if self.user() else 401, "Repository not found", "RepoNotFound")
            return None
        return found

    def handle_request(self) -> None:
        path, authorization = unquote(urlsplit(self.path).path), self.headers.get("Authorization", "")
        self.hub.requests.append((self.command, path, authorization.removeprefix("Bearer ")))
        if authorization and self.user() is None:
            return self.refused(401, "Invalid credentials in Authorization header")
        match path.strip("/").split("/"):
            case ["api", "models", owner, name, *rest]:
                self.model(f"{owner}/{name}", rest)
            case [owner, name, "resolve", revision, *file]:
                self.resolve(f"{owner}/{name}", revision, "/".join(file))
            case _:
                self.refused(404, f"unknown {path}")

    do_GET = do_HEAD = handle_request

    def model(self, name: str, rest: list[str]) -> None:
        found = self.repository(name)
        if found is None:
            return
        match rest:
            case [] | ["revision", _]:
                at = found.at(rest[1] if rest else "main")
                if at is None:
                    return self.refused(404, f"Invalid rev id: {rest[1]}", "RevisionNotFound")
                siblings = [{"rfilename": file} for file in sorted(at[1])]
                self.answer(200, {"id": name, "sha": at[0], "private": found.private, "siblings": siblings})
            case ["tree", revision]:
                self.answer(200, [_entry(file, data) for file, data in sorted(found.at(revision)[1].items())])
            case _:
                self.refused(404, f"unknown {rest}")

    def resolve(self, name: str, revision: str, file: str) -> None:
        found = self.repository(name)
        if found is None:
            return
        sha, files = found.at(revision) or ("", {})
        if file not in files:
            return self.refused(404, "Entry not found", "EntryNotFound" if sha else "RevisionNotFound")
        data, about = files[file], {"ETag": f'"{oid_of(file, files[file])}"', "X_Repo_Commit": sha}
        if (part := self.headers.get("Range")) is not None:
            start = int(part.removeprefix("bytes=").split("-")[0])
            return self.answer(206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}", **about)
        self.answer(200, data, Accept_Ranges="bytes", **about)


def _entry(file: str, data: bytes) -> dict[str, Any]:
    oid = oid_of(file, data)
    large = {"lfs": {"oid": oid, "size": len(data), "pointerSize": 130}} if file.endswith(LARGE) else {}
    return {"type": "file", "path": file, "size": len(data), "oid": oid, **large}
