"""Stores by URL: one line says whether an index lives in a folder, in Milvus, in PostgreSQL, or as means and variances apart.

runs/store?engine=hnsw                          a folder here (file:runs/store is the same); engines flat, hnsw, ivf, ivf-pq
milvus:runs/store.db                            Milvus Lite, embedded; milvus+http://host:19530/name for a server or a cluster
postgresql://user@host:5432/database?table=name PostgreSQL with pgvector
rerank:runs/store?candidates=100                means in a folder, variances in another, candidates re-ranked
redis://host:6379/0?means=runs/store            the same with the variances in Redis
"""

import importlib
import re
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from sfumato.errors import UserError
from sfumato.search.stores.protocol import VectorStore

_MODULES = {
    "file": "sfumato.search.stores.local",
    "milvus": "sfumato.search.stores.milvus",
    "milvus+http": "sfumato.search.stores.milvus",
    "milvus+https": "sfumato.search.stores.milvus",
    "postgresql": "sfumato.search.stores.pgvector",
    "postgres": "sfumato.search.stores.pgvector",
    "rerank": "sfumato.search.stores.rerank",
    "redis": "sfumato.search.stores.rerank",
    "rediss": "sfumato.search.stores.rerank",
}
"""Each module has functions `create(url, dim, fingerprint)` and `open(url)`."""


def create_store(url: str, dim: int, fingerprint: str) -> VectorStore:
    """Make an empty store.

    Args:
        url: where, see the module; options follow a question mark.
        dim: of the vectors.
        fingerprint: a short text that says what the vectors mean, kept with them.

    Raises:
        UserError: the URL is not one, the store exists already, cannot be reached, or needs an extra that is not installed.
    """
    return cast(VectorStore, importlib.import_module(_MODULES[scheme(url)]).create(url, dim, fingerprint))


def open_store(url: str) -> VectorStore:
    """Open a store that was created before.

    Raises:
        UserError: the URL is not one, there is no such store, it cannot be reached, or needs an extra that is not installed.
    """
    return cast(VectorStore, importlib.import_module(_MODULES[scheme(url)]).open(url))


def scheme(url: str) -> str:
    """The kind of store that a URL names; a path without a scheme is "file".

    Raises:
        UserError: no store has such a scheme.
    """
    found = re.match(r"([a-z][a-z0-9+]+):", url)
    if found is None:
        return "file"
    if found[1] not in _MODULES:
        raise UserError(f"store {redacted(url)}: unknown kind {found[1]!r}; known: {', '.join(_MODULES)}, or a path")
    return found[1]


def options(url: str, known: dict[str, str]) -> dict[str, str]:
    """What follows the question mark of a URL.

    Args:
        url: of a store.
        known: by name, what each option is, for the message.

    Raises:
        UserError: an option that is not known, or occurs twice.
    """
    if _torn(url):
        raise UserError(
            f"store {redacted(url)}: the host or port is not one; write / ? # @ in a password as %2F %3F %23 %40"
        )
    pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UserError(f"store {redacted(url)}: an option is given twice")
    if unknown := sorted(set(found) - set(known)):
        told = ", ".join(f"{name} ({what})" for name, what in known.items())
        raise UserError(f"store {redacted(url)}: unknown option {unknown[0]!r}; known: {told or 'none'}")
    return found


def anchored(url: str, folder: Path) -> str:
    """The URL with its relative path, if it has one, taken to start at a folder."""
    kind = scheme(url)
    if kind in ("redis", "rediss"):
        parts = urlsplit(url)
        told = dict(parse_qsl(parts.query, keep_blank_values=True))
        if "means" in told:
            told["means"] = str(folder / told["means"])
        return urlunsplit(parts._replace(query=urlencode(told, safe="/")))
    if kind not in ("file", "milvus", "rerank"):
        return url
    head, tail = (url[: len(kind) + 1], url[len(kind) + 1 :]) if url.startswith(f"{kind}:") else ("", url)
    path, mark, query = tail.partition("?")
    return f"{head}{folder / path}{mark}{query}"


def without_password(url: str) -> str:
    """The URL as it may be kept in a file; the password comes from the environment then."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}@{parts.netloc.rpartition('@')[2]}"))


def redacted(url: str) -> str:
    """The URL with its password replaced by ***; with all that follows, where a password splits the URL in a wrong place."""
    if _torn(url):
        return re.sub(r"(://[^:@/?#]*).*", r"\1:***", url, flags=re.DOTALL)
    url = re.sub(r"(?<=[?&])(password|token)=[^&]*", r"\1=***", url)
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))


def _torn(url: str) -> bool:
    """Whether what follows a host is no port, as when a password has a / ? or # that is not written %2F %3F %23."""
    try:
        host = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return True
    return re.fullmatch(r"(\[[0-9a-fA-F:.%]*\]|[^:\[\]]*)(:\d*)?", host) is None
