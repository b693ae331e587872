"""Where a Milvus is: the URL, its options and the client; and conditions in its language."""

import logging
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from sfumato.errors import UserError, first_line, need
from sfumato.search.stores.protocol import Filter, Option, check_choice, options, redacted

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def quoted(text: str) -> str:
    """A text literal. Milvus has templates for this, which Lite does not support."""
    return f'"{text.translate(_ESCAPES)}"'


def among(ids: Sequence[str]) -> str:
    """The condition that an item has one of these ids."""
    return f"id in [{', '.join(map(quoted, ids))}]"


def condition_on(filter: Filter | None) -> str:
    """The condition that an item passes a filter."""
    if filter is None:
        return ""
    conditions = []
    if filter.max_uncertainty is not None:
        # Round down to float32, so that the result does not depend on the precision of the engine.
        bound = np.clip(filter.max_uncertainty, np.finfo(np.float32).min, np.finfo(np.float32).max)
        single = np.float32(bound)
        if float(single) > bound:
            single = np.nextafter(single, np.float32(-np.inf))
        conditions.append(f"uncertainty <= {float(single)!r}")
    for name, values, ranges in filter.conditions():
        column = f"payload[{quoted(name)}]"
        # Lite has "in" for fields but not inside JSON. No id is empty.
        fit = [f"{column} == {quoted(value)}" for value in values]
        for least, below in ranges:
            above = f"{column} {'>=' if least else '>'} {quoted(least)}"
            fit.append(f"({above} and {column} < {quoted(below)})" if below else above)
        conditions.append(f"({' or '.join(fit) or 'id == ' + quoted('')})")
    return " and ".join(conditions)


OPTIONS = {
    "index": Option("FLAT, exact; HNSW, IVF_FLAT or AUTOINDEX, which the server chooses: HNSW in Lite", default="FLAT"),
    "compress": Option("int8: IVF_FLAT with a byte for each number, Milvus's IVF_SQ8; or none", default="none"),
    "overfetch": Option("compress=int8: number of candidates for each result", 1, "4"),
    "m": Option("HNSW: links", 1, "16"),
    "ef_construction": Option("HNSW: number of candidates while building", 1, "200"),
    "ef": Option("HNSW: number of candidates while searching; never fewer than the results", 1, "64"),
    "nlist": Option("IVF_FLAT and int8: number of lists", 1, "128"),
    "nprobe": Option("IVF_FLAT and int8: number of lists that a search reads", 1, "16"),
    "consistency": Option("of a server: strong, or session, in which others' writes may appear late", default="strong"),
    "name": Option("name of the collection in an embedded file: sfumato"),
    "database": Option("of a server: its own default"),
    "timeout": Option("seconds for connecting: 5", 1),
    "call_timeout": Option("seconds that a call may take, 60 if left out; optimise and opening ten times as many", 1),
}


_INDEXES, SQ8 = ("FLAT", "HNSW", "IVF_FLAT", "AUTOINDEX"), "IVF_SQ8"

_RECONNECT = {
    "grpc.use_local_subchannel_pool": 1,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
}
"""A server that was restarted is found within a second or so; by default it may take two minutes."""

_embedded: dict[str, int] = {}

_embedded_lock = threading.Lock()


class Place:
    """The location in a URL: a file, or a server with its token."""

    def __init__(self, url: str) -> None:
        self.url, self.options = redacted(url), options(url, OPTIONS)
        head, _, rest = url.partition(":")
        self.file: Path | None = None
        self.token = ""
        if head == "milvus":
            path = rest.partition("?")[0]
            if not path.endswith(".db") or path.startswith("//"):
                server = "a server milvus+http://host:19530/name"
                raise UserError(f"store {self.url}: an embedded Milvus is milvus:PATH.db, {server}")
            self.file, self.uri = Path(path).absolute(), str(Path(path).absolute())
            self.name = self.options.get("name", "sfumato")
        else:
            parts = urlsplit(url)
            self.uri = f"{head.removeprefix('milvus+')}://{parts.netloc.rpartition('@')[2]}"
            self.name = parts.path.removeprefix("/")
            if not parts.hostname:
                raise UserError(f"store {self.url}: expected milvus+http://host:19530/name")
            self.token = os.environ.get("MILVUS_TOKEN", "")
            if parts.password:
                self.token = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", self.name):
            raise UserError(f"store {self.url}: a collection has letters, digits and _ in its name, got {self.name!r}")
        compress, level = self.options.get("compress", "none"), self.options.get("consistency", "strong")
        check_choice(f"store {self.url}", "consistency", level, ("strong", "session"))
        check_choice(f"store {self.url}", "index", self.options.get("index", "FLAT"), _INDEXES)
        check_choice(f"store {self.url}", "compress", compress, ("none", "int8"))
        if compress == "int8" and self.options.setdefault("index", "IVF_FLAT") != "IVF_FLAT":
            found = f"got index={self.options['index']}; leave one of them out"
            raise UserError(f"store {self.url}: compress=int8 goes with index=IVF_FLAT, {found}")

    def release(self) -> None:
        """Stop the embedded server if no other store of this process uses it."""
        if self.file is None:
            return
        from milvus_lite.server_manager import server_manager_instance

        with _embedded_lock:
            _embedded[self.uri] -= 1
            if not _embedded[self.uri]:
                server_manager_instance.release_server(self.uri)


def connect(place: Place) -> Any:
    """A client of the server, or of an embedded one."""
    pymilvus = driver()
    try:
        with _embedded_lock:
            client = pymilvus.MilvusClient(
                place.uri,
                token=place.token,
                db_name=place.options.get("database", ""),
                timeout=int(place.options.get("timeout", 5)),
                dedicated=True,
                grpc_options=_RECONNECT,
            )
            _embedded[place.uri] = _embedded.get(place.uri, 0) + 1
            return client
    except pymilvus.MilvusException as error:
        way_out = "; another process may have it open, or Milvus Lite before 3 wrote it" if place.file else ""
        message = message_of(error)
        if place.token:
            message = message.replace(place.token, "***").replace(place.token.partition(":")[2] or place.token, "***")
        raise UserError(f"store {place.url}: {message}{way_out}") from None


def message_of(error: BaseException) -> str:
    """What an error says, in one line."""
    return first_line(ValueError(getattr(error, "message", "") or error))


def driver() -> Any:
    """The module pymilvus."""
    with need("milvus", "stores in Milvus need pymilvus and milvus-lite"):
        import pymilvus
    # They print a traceback for each error that they also raise.
    for name in ("pymilvus.decorators", "pymilvus.client.connection_manager", "milvus_lite.server_manager"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return pymilvus
