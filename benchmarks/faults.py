"""Malformed requests by the thousand: the service answers each with a status of its own, never with 500, and lives on.

A tiny model that was never trained and a collection in a temporary folder are served on a free port of 127.0.0.1. Two
kinds of requests:

    by hand   raw bytes over a socket: broken multipart, wrong content types, invalid UTF-8, deep and huge JSON, NaN,
              numbers of a thousand digits, truncated images and decompression bombs, paths that climb, junk in headers,
              lines that are not HTTP
    schema    what schemathesis makes of /openapi.json, valid and invalid

    python benchmarks/faults.py [--json PATH] [--requests 10000] [--schema-share 0.2] [--seed 0]

Exits with 1 if there is a 500, an error that is no problem document, an answer that does not come within ten seconds,
or if the service does not search as before at the end. Some requests get no answer, because they are none, or say that
more will come: counted as "closed".
"""

import contextlib
import json
import platform
import random
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from measuring import command_parser, write_json
from service_world import bomb, in_base64, picture, serving, small_sources

from sfumato.serve.app import create_app
from sfumato.serve.settings import Settings

PATHS = (
    "/v1/search", "/v1/items", "/v1/items/delete", "/v1/items/0", "/v1/info", "/v1/pictures/0", "/", "/healthz",
    "/readyz", "/metrics", "/docs", "/openapi.json", "/page/page.css", "/page/",
)  # fmt: skip
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get")
CLIMBS = (
    "..%2f..%2f..%2fetc%2fpasswd", "../../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd",
    "%2fetc%2fpasswd", "..\\..\\x", "..%5c..%5cx", "0%00.png", "%00", "%ff%fe", "%c0%ae%c0%ae/x", "....//x", "%",
    "%zz", "a" * 5000, "\u00e9", ".", "..", "~root", "%252e%252e%252fetc%252fpasswd", "0;.png", "con", "0/", "//0",
    "file:///etc/passwd", "%E2%80%AE", "0?size=16", "0?size=-1",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, -0.0, 10**18, 10**400, 0.5, 2, "", " ", "a", "\0", "a" * 3000, "\ud800", "\U0001f600",
    "\u202e", [], [[]], {}, [None], {"a": {"b": []}}, float("nan"), float("inf"), "1e999", "images", "texts", "../x",
    "0", in_base64(b"no picture"),
)  # fmt: skip
NAMES = (
    "queries", "text", "image", "id", "gallery", "max_results", "min_probability", "abstain", "coverage", "filter",
    "where", "order", "max_total_variance", "items", "payload", "ids", "q", "n", "size", "__proto__", "", "\ud800",
    "a" * 2000,
)  # fmt: skip
TYPES = (
    "application/json", "application/json; charset=utf-16", "APPLICATION/JSON", "text/plain", "multipart/form-data",
    "", "x", "a/b/c;;;=", "multipart/form-data; boundary=x", "multipart/form-data; boundary=",
    "multipart/form-data; boundary=x; charset=nope", "application/x-www-form-urlencoded",
    "application/json, text/html", "\u00e9", "multipart/form-data; boundary=" + "b" * 300,
)  # fmt: skip
HEADERS = (
    "Content-Length: -1", "Content-Length: abc", "Content-Length: 99999999999999999999", "Transfer-Encoding: chunked",
    "Host:", "Host: \u00e9", "Transfer-Encoding: gzip", "Expect: 100-continue", "If-None-Match: " + '"x",' * 500,
    "Range: bytes=0-99999999999", "Authorization: Bearer", "Authorization: \u00e9", "X-API-Key: \u00ff",
    "Accept: application/xml", "Accept-Encoding: *;q=9", "Cookie: " + "a=b; " * 1000, "Upgrade: websocket",
    "X: " + "y" * 70_000, "Origin: http://x", "Origin: null", "no colon", "Bad Name: x", "X-Forwarded-For: ::::",
    "Connection: upgrade", "\0: x", "Content-Encoding: gzip", "Content-Type: text/html", "If-Modified-Since: never",
)  # fmt: skip


def any_json(random: random.Random, depth: int = 0) -> Any:
    """Something like a request, and something unlike."""
    if depth > 3 or random.random() < 0.35:
        return random.choice(VALUES)
    if random.random() < 0.4:
        return [any_json(random, depth + 1) for _ in range(random.choice((0, 1, 1, 2, 3, 70)))]
    return {random.choice(NAMES): any_json(random, depth + 1) for _ in range(random.randint(0, 5))}


def nearly(random: random.Random) -> Any:
    """A good request with one value changed."""
    good: Any = random.choice(
        (
            {
                "queries": [{"text": "red"}],
                "max_results": 3,
                "filter": {"where": {"a": ["b"]}, "max_total_variance": 3},
            },
            {"queries": [{"image": in_base64(picture())}, {"id": "0"}], "gallery": "images", "order": "distance"},
            {"gallery": "images", "items": [{"id": "new", "image": in_base64(picture()), "payload": {"a": "b"}}]},
            {"gallery": "images", "ids": ["nobody"]},
        )
    )
    good = place = json.loads(json.dumps(good))
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return good
        key = random.choice(keys)
        if isinstance(place[key], dict | list) and random.random() < 0.7:
            place = place[key]
            continue
        change = random.random()
        if change < 0.6:
            place[key] = random.choice(VALUES)
        elif change < 0.8 and isinstance(place, dict):
            place[random.choice(NAMES)] = place.pop(key)
        elif isinstance(place, list):
            place.extend([place[key]] * random.choice((1, 100)))
        else:
            place[key] = [place[key]]
        return good


def json_bytes(random: random.Random) -> bytes:
    """A body that is JSON, more or less."""
    kind = random.random()
    if kind < 0.45:
        return json.dumps(nearly(random)).encode()
    if kind < 0.7:
        return json.dumps(any_json(random)).encode()
    text = json.dumps(nearly(random)).encode()
    return random.choice(
        (
            text[: random.randrange(len(text))], bytes(b ^ (random.random() < 0.02) for b in text),
            text.replace(b"red", b"\xff\xfe\xc0"), b"\xef\xbb\xbf" + text, text.decode().encode("utf-16"),
            b"[" * random.choice((10, 1000, 100_000)), b'{"queries":' * 5000 + b"1",
            b'{"max_results":' + b"9" * random.choice((20, 400, 5000)) + b',"queries":[{"text":"a"}]}',
            b'{"min_probability":NaN,"queries":[{"text":"a"}]}',
            b'{"min_probability":-Infinity,"queries":[{"text":"a"}]}', b'{"max_total_variance":1e999}',
            b'{"queries":[{"text":"\\ud800"}]}', b'{"queries":[{"text":"a"}],"queries":[{"text":"b"}]}', b"",
            b"\0" * 100, random.randbytes(200), b'{"queries":[{"text":"' + b"a" * 200_000 + b'"}]}',
        )
    )  # fmt: skip


def any_picture(random: random.Random) -> bytes:
    """A picture, or what was one."""
    good = picture(
        format=random.choice(("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")), size=(random.randint(1, 60), 40)
    )
    damaged = bytearray(good)
    for _ in range(random.randint(1, 8)):
        damaged[random.randrange(len(damaged))] = random.randrange(256)
    return random.choice(
        (
            good, bytes(damaged), bytes(damaged), good[: random.randrange(len(good))], bomb(), b"",
            random.randbytes(300), b"<svg/>", b"%!PS",
        )
    )  # fmt: skip


def form_bytes(random: random.Random) -> bytes:
    """A multipart body with boundary x, more or less."""
    parts = []
    for _ in range(random.randint(0, 4)):
        name = random.choice((*NAMES, "image", "image", "id")).encode("utf-8", "replace")
        head = b'Content-Disposition: form-data; name="' + name + b'"'
        if random.random() < 0.5:
            head += b'; filename="' + random.choice((b"a.png", b"", b"../../x", b"\xff", b'"', b"a" * 3000)) + b'"'
        if random.random() < 0.2:
            head = random.choice(
                (
                    b"Content-Disposition: form-data", b"", b"X: y", b"Content-Disposition: x; name",
                    head + b"\r\nX: \xff",
                )
            )  # fmt: skip
        value = any_picture(random) if random.random() < 0.5 else str(random.choice(VALUES)).encode("utf-8", "replace")
        parts.append(b"--x\r\n" + head + b"\r\n\r\n" + value + b"\r\n")
    body = b"".join(parts) + b"--x--\r\n"
    return body if random.random() < 0.7 else body[: random.randrange(len(body))]


def raw_request(random: random.Random) -> bytes:
    """A request by hand."""
    if random.random() < 0.03:
        return random.choice(
            (
                b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", random.randbytes(100), b"\x16\x03\x01\x02\x00",
                b"GET / x\r\n\r\n",
            )
        )  # fmt: skip
    kind, lines = random.random(), []
    body, content, path = b"", None, random.choice(PATHS)
    method = "POST" if kind < 0.7 else "GET" if random.random() < 0.7 else random.choice(METHODS)
    if kind < 0.4:
        path, body = random.choice(("/v1/search", "/v1/items", "/v1/items/delete")), json_bytes(random)
        content = "application/json"
    elif kind < 0.65:
        path, body = random.choice(("/v1/search", "/v1/items")), form_bytes(random)
        content = "multipart/form-data; boundary=x"
    elif kind < 0.7:
        body = json.dumps(
            {random.choice(("queries", "items")): [{"id": "x", "image": in_base64(any_picture(random))}]}
        ).encode()
        path, content = random.choice(("/v1/search", "/v1/items")), "application/json"
    elif kind < 0.85:
        path = random.choice(("/v1/pictures/", "/v1/items/", "/page/", "/")) + random.choice(CLIMBS)
    else:
        names = [random.choice(NAMES).encode("utf-8", "replace").decode("latin-1") for _ in range(random.randint(0, 4))]
        told = "&".join(f"{name}={random.choice(VALUES)}" for name in names)
        path += "?" + told.encode("utf-8", "replace").decode("latin-1").replace(" ", "%20")
    if random.random() < 0.1:
        content = random.choice(TYPES)
    if content is not None:
        lines.append(f"Content-Type: {content}")
    if random.random() < 0.1:
        lines.append(random.choice(HEADERS))
    if body and random.random() < 0.97:
        lines.append(f"Content-Length: {len(body) + random.choice((0,) * 30 + (-1, 1, 100))}")
    if random.random() < 0.97:
        lines.append("Host: 127.0.0.1")
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "Connection: close"]) + "\r\n\r\n"
    return head.encode("utf-8", "replace") + body


def exchange(port: int, request: bytes, seconds: float = 10.0) -> tuple[int | None, bytes, bytes]:
    """Send bytes, and say that no more will come if nothing is answered for a while.

    Returns:
        (status, or None if there was no answer; headers; body).

    Raises:
        TimeoutError: the connection stays open without an answer.
    """
    answer, half = b"", False
    with socket.create_connection(("127.0.0.1", port), timeout=1.5) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        while True:
            try:
                if not (part := connection.recv(65_536)):
                    break
                answer += part
            except ConnectionResetError:
                break
            except TimeoutError:
                if half:
                    raise
                half = True
                connection.settimeout(seconds)
                connection.shutdown(socket.SHUT_WR)
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):  # Go on; the answer proper comes after it.
        head, _, body = body.partition(b"\r\n\r\n")
    status = head[9:12]
    return (int(status) if status.isdigit() else None), head, body


def wrong_with(status: int | None, head: bytes, body: bytes) -> str | None:
    """What is the matter with an answer."""
    if status is None:
        return None
    if status == 500:
        return "a 500"
    ours = b"x-content-type-options" in head
    if status >= 400 and ours and body:  # uvicorn itself answers what is no HTTP, in plain text.
        if b"application/problem+json" not in head:
            return "an error that is no problem document"
        problem = json.loads(body)
        if problem["status"] != status or not problem["detail"]:
            return "a problem document that does not fit"
    return None


def by_hand(port: int, n: int, source: random.Random) -> tuple[Counter[str], list[str], float]:
    """Send n requests made by hand, eight at a time.

    Returns:
        (answers that are not wrong by status, what went wrong, seconds of the slowest).
    """
    counts, wrong, slowest = Counter[str](), list[str](), 0.0

    def send(request: bytes) -> tuple[str, str | None, float]:
        began = time.perf_counter()
        try:
            answer = exchange(port, request)
        except (TimeoutError, OSError) as error:
            return "no answer", f"no answer | {error!r}: {request[:300]!r}", time.perf_counter() - began
        told = wrong_with(*answer)
        told = told and f"{told} | {request[:300]!r} -> {answer[2][:300]!r}"
        return str(answer[0] or "closed"), told, time.perf_counter() - began

    with ThreadPoolExecutor(8) as pool:
        for status, told, took in pool.map(send, [raw_request(source) for _ in range(n)]):
            slowest = max(slowest, took)
            if told:
                wrong.append(told)
            else:
                counts[status] += 1
    return counts, wrong, slowest


def from_schema(url: str, n: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Send about n requests that schemathesis makes of the OpenAPI document; returns as :func:`by_hand`."""
    import schemathesis.openapi
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode
    from schemathesis.core.result import Ok

    warnings.filterwarnings("ignore")
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)]
    counts, wrong = Counter[str](), list[str]()
    quiet = settings(
        max_examples=max(1, n // (2 * len(operations))),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )

    def sender(name: str) -> Callable[[Any], None]:
        def send(case: Any) -> None:
            try:
                answer = case.call(timeout=10)
            except Exception as error:  # What the client itself refuses to send.
                counts[f"not sent ({type(error).__name__})"] += 1
                return
            headers = "\r\n".join(f"{k.lower()}: {v[0]}" for k, v in answer.headers.items())
            counts[str(answer.status_code)] += 1
            if told := wrong_with(answer.status_code, headers.encode("utf-8", "replace"), answer.content or b""):
                wrong.append(f"{told}: {name} -> {answer.content[:300]!r}")

        return send

    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            cases = operation.as_strategy(generation_mode=mode)
            try:
                seeded(seed)(quiet(given(cases)(sender(f"{operation.method} {operation.path}"))))()
            except Unsatisfiable:  # A route without parameters cannot be asked wrongly.
                counts["nothing to send"] += 1
    return counts, wrong


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """A service of a small collection; yields (address, port)."""
    app = create_app(small_sources(folder), Settings(max_upload_mb=0.2, max_pixels=1_000_000, timeout=1.0))
    with serving(app) as port:
        url = f"http://127.0.0.1:{port}"
        new = {
            "items": [{"id": "0", "image": in_base64(picture()), "payload": {"first": "yes"}}]
        }  # A picture to look at.
        httpx.post(f"{url}/v1/items", json=new, timeout=20, trust_env=False)
        yield url, port


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--schema-share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    of_schema = int(arguments.requests * arguments.schema_share)
    question = {"queries": [{"text": "red"}], "max_results": 3, "filter": {"where": {"first": ["yes"]}}}
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (url, port):
        before = httpx.post(f"{url}/v1/search", json=question, trust_env=False).json()["answers"][0]["hits"]
        started = time.perf_counter()
        schema, more = from_schema(url, of_schema, arguments.seed) if of_schema else (Counter[str](), [])
        sent = sum(n for status, n in schema.items() if status.isdigit())
        hand, wrong, _ = by_hand(port, arguments.requests - sent, random.Random(arguments.seed))
        seconds = time.perf_counter() - started
        after = httpx.post(f"{url}/v1/search", json=question, trust_env=False).json()["answers"][0]["hits"]
        alike = [(h["id"], h["distance"]) for h in before] == [(h["id"], h["distance"]) for h in after]
    wrong += more
    result = {
        "benchmark": "faults", "python": platform.python_version(), "seed": arguments.seed,
        "seconds": seconds, "by_hand": dict(sorted(hand.items())), "schema": dict(sorted(schema.items())),
        "wrong": wrong[:50], "searches_as_before": alike,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    write_json(arguments.json, result)
    return 1 if wrong or not alike else 0


if __name__ == "__main__":
    sys.exit(main())
