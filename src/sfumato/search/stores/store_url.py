"""Store URLs say where the records of a collection are. The registry STORES maps a scheme to a kind of store.

runs/store?engine=hnsw              a local folder (file:runs/store is the same); engines flat, hnsw, ivf, ivf-pq
milvus:runs/store.db                Milvus Lite, embedded
milvus+http://host:19530/name       a Milvus server or cluster
postgresql://user@host/db?table=t   PostgreSQL with pgvector
redis://host:6379/0?means=runs/s    means in a folder, variances in Redis, candidates re-ranked

To add a store, write one module with the functions `create` and `open` (a
:class:`~sfumato.search.stores.protocol.StoreFactory`) that return a
:class:`~sfumato.search.stores.protocol.VectorStore`, and register it under a scheme.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from sfumato.errors import UserError
from sfumato.search.stores.protocol import StoreFactory, VectorStore

_SCHEME = "[a-z][a-z0-9+]+"


@dataclass(frozen=True)
class StoreKind:
    """An entry of STORES."""

    factory: StoreFactory | str
    path: str | None = None

    def create(self, url: str, dim: int, fingerprint: str) -> VectorStore:
        """See :meth:`~sfumato.search.stores.protocol.StoreFactory.create`."""
        return self._loaded().create(url, dim, fingerprint)

    def open(self, url: str) -> VectorStore:
        """See :meth:`~sfumato.search.stores.protocol.StoreFactory.open`."""
        return self._loaded().open(url)

    def _loaded(self) -> StoreFactory:
        return (
            cast(StoreFactory, importlib.import_module(self.factory)) if isinstance(self.factory, str) else self.factory
        )


STORES: dict[str, StoreKind] = {
    "file": StoreKind("sfumato.search.stores.local", path=""),
    "milvus": StoreKind("sfumato.search.stores.milvus", path=""),
    "milvus+http": StoreKind("sfumato.search.stores.milvus"),
    "milvus+https": StoreKind("sfumato.search.stores.milvus"),
    "postgresql": StoreKind("sfumato.search.stores.pgvector"),
    "postgres": StoreKind("sfumato.search.stores.pgvector"),
    "redis": StoreKind("sfumato.search.stores.redis", path="means"),
    "rediss": StoreKind("sfumato.search.stores.redis", path="means"),
}
"""Kinds of stores by the scheme of their URLs; add to it with :func:`register_store`."""


def register_store(scheme: str, factory: StoreFactory | str, *, path: str | None = None) -> None:
    """Add a kind of store."""
    if not re.fullmatch(_SCHEME, scheme):
        raise ValueError(
            f"register_store: a scheme is two or more lower-case letters, digits and +, letter first, got {scheme!r}"
        )
    if scheme in STORES:
        raise ValueError(f"register_store: scheme {scheme!r} is already registered; choose another")
    STORES[scheme] = StoreKind(factory, path)


def create_store(url: str, dim: int, fingerprint: str) -> VectorStore:
    """Make an empty store."""
    return STORES[scheme(url)].create(url, dim, fingerprint)


def open_store(url: str) -> VectorStore:
    """Open a store that was created before."""
    return STORES[scheme(url)].open(url)


def scheme(url: str) -> str:
    """The scheme of a store URL."""
    found = re.match(f"({_SCHEME}):", url)
    if found is None:
        return "file"
    if found[1] not in STORES:
        raise UserError(f"store {redacted(url)}: unknown kind {found[1]!r}; known: {', '.join(STORES)}, or a path")
    return found[1]


def options(url: str, known: dict[str, str]) -> dict[str, str]:
    """The options of a store URL, after its question mark."""
    if _malformed(url):
        raise UserError(
            f"store {redacted(url)}: the host or port is malformed; write / ? # @ in a password as %2F %3F %23 %40"
        )
    pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UserError(f"store {redacted(url)}: an option is given twice")
    if unknown := sorted(set(found) - set(known)):
        listed = ", ".join(f"{name} ({what})" for name, what in known.items())
        raise UserError(f"store {redacted(url)}: unknown option {unknown[0]!r}; known: {listed or 'none'}")
    return found


def check_numbers(where: str, given: Mapping[str, Any], least: Mapping[str, int]) -> None:
    """Check that options are whole numbers, each from its least value."""
    for name in least.keys() & given.keys():
        if not (re.fullmatch("[0-9]{1,12}", str(given[name])) and int(given[name]) >= least[name]):
            raise UserError(f"{where}: {name} must be a whole number from {least[name]}, got {given[name]!r}")


def anchored(url: str, folder: Path) -> str:
    """Resolve the relative path of a store URL, if it has one, against a folder."""
    kind = scheme(url)
    option = STORES[kind].path
    if option is None:
        return url
    if option:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        if option in given:
            given[option] = str(folder / given[option])
        return urlunsplit(parts._replace(query=urlencode(given, safe="/")))
    head, tail = (url[: len(kind) + 1], url[len(kind) + 1 :]) if url.startswith(f"{kind}:") else ("", url)
    path, mark, query = tail.partition("?")
    return f"{head}{folder / path}{mark}{query}"


def without_password(url: str) -> str:
    """Remove the password, so that the URL can be kept in a file; the password then comes from the environment."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}@{parts.netloc.rpartition('@')[2]}"))


def redacted(url: str) -> str:
    """Replace the password by ***, for messages and logs."""
    if _malformed(url):
        return re.sub(r"(://[^:@/?#]*).*", r"\1:***", url, flags=re.DOTALL)
    url = re.sub(r"(?<=[?&])(password|token)=[^&]*", r"\1=***", url)
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))


def _malformed(url: str) -> bool:
    """Whether the host or port is malformed, as when a password has a / ? or # that is not written %2F %3F %23."""
    try:
        host = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return True
    return re.fullmatch(r"(\[[0-9a-fA-F:.%]*\]|[^:\[\]]*)(:\d*)?", host) is None
