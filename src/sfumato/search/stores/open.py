"""Store URLs: their kinds and options, and the stores that they open."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from sfumato.errors import UserError
from sfumato.search.stores.protocol import VectorStore


class StoreFactory(Protocol):
    """Makes and opens the stores of one kind. A module with these two functions is one."""

    def create(self, url: str, dim: int, fingerprint: str) -> VectorStore:
        """Make an empty store.

        Args:
            url: store URL; options follow a question mark.
            dim: dimensions e of the vectors.
            fingerprint: a short text about the meaning of the vectors, to be kept with them.

        Returns:
            The store, open.

        Raises:
            UserError: the URL is malformed, the store already exists or cannot be reached, or an extra is not
                installed.
        """
        ...

    def open(self, url: str) -> VectorStore:
        """Open a store that was created before.

        Args:
            url: store URL; its search options replace the options given at creation.

        Returns:
            The store.

        Raises:
            UserError: the URL is malformed, there is no such store, it cannot be reached, or an extra is not installed.
        """
        ...


_SCHEME = "[a-z][a-z0-9+]+"


@dataclass(frozen=True)
class StoreKind:
    """An entry of STORES."""

    factory: StoreFactory | str
    path: str | None = None  # option of the URL that is a relative path, "" for the URL itself
    second: str | None = None  # what names a second store beside one: "path", or an option; None if there cannot be one

    def create(self, url: str, dim: int, fingerprint: str) -> VectorStore:
        """See :meth:`~sfumato.search.stores.open.StoreFactory.create`."""
        return self._loaded().create(url, dim, fingerprint)

    def open(self, url: str) -> VectorStore:
        """See :meth:`~sfumato.search.stores.open.StoreFactory.open`."""
        return self._loaded().open(url)

    def _loaded(self) -> StoreFactory:
        return (
            cast(StoreFactory, importlib.import_module(self.factory)) if isinstance(self.factory, str) else self.factory
        )


STORES: dict[str, StoreKind] = {
    "file": StoreKind("sfumato.search.stores.local", path="", second="path"),
    "milvus": StoreKind("sfumato.search.stores.milvus", path="", second="name"),
    "milvus+http": StoreKind("sfumato.search.stores.milvus", second="path"),
    "milvus+https": StoreKind("sfumato.search.stores.milvus", second="path"),
    "postgresql": StoreKind("sfumato.search.stores.pgvector", second="table"),
    "postgres": StoreKind("sfumato.search.stores.pgvector", second="table"),
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


@dataclass(frozen=True)
class Option:
    """An option of a store URL."""

    what: str  # for messages and docs
    least: int | None = None  # of a whole number; None for a text
    default: str | None = None


Options = Mapping[str, Option]


"""Options by name."""


def options(url: str, known: Options) -> dict[str, str]:
    """The options of a store URL, after its question mark; numbers are checked, and left as they are written."""
    if _malformed(url):
        raise UserError(
            f"store {redacted(url)}: the host or port is malformed; write / ? # @ in a password as %2F %3F %23 %40"
        )
    pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UserError(f"store {redacted(url)}: an option is given twice")
    if unknown := sorted(set(found) - set(known)):
        listed = ", ".join(f"{name} ({option.what})" for name, option in known.items())
        raise UserError(f"store {redacted(url)}: unknown option {unknown[0]!r}; known: {listed or 'none'}")
    check_numbers(f"store {redacted(url)}", found, known)
    return found


def check_numbers(where: str, given: Mapping[str, Any], known: Options) -> None:
    """Check that options are whole numbers, each from its least value."""
    for name, value in given.items():
        least = known[name].least
        if least is not None and not (re.fullmatch("[0-9]{1,12}", str(value)) and int(value) >= least):
            raise UserError(f"{where}: {name} must be a whole number from {least}, got {value!r}")


def check_choice(where: str, name: str, got: str, known: Sequence[str]) -> None:
    """Check that an option is one of a few words."""
    if got not in known:
        raise UserError(f"{where}: {name} must be {', '.join(known[:-1])} or {known[-1]}, got {got!r}")


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


def beside(url: str) -> str | None:
    """The URL of a second store, of texts, beside a store; None for a kind of store that has none."""
    second = STORES[scheme(url)].second
    head, mark, query = url.partition("?")
    if second is None or second == "path":
        return None if second is None else f"{head}_texts{mark}{query}"
    given = dict(parse_qsl(query, keep_blank_values=True))
    return f"{head}?{urlencode(given | {second: given.get(second, 'sfumato') + '_texts'}, safe='/')}"


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
