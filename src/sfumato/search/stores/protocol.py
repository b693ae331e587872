"""Vector stores, which keep records under ids and find the nearest vectors by squared L2, and the URLs that name them.

A store does not depend on Gaussians: every item has been lifted to a vector beforehand (search/exact.py), and a
:class:`~sfumato.search.collection.GaussianCollection` recomputes the distances of a store's candidates from the
vectors in their records. So stores differ in the candidates that they return and in the failures that they survive.

Store URLs say where the records of a collection are. The registry STORES maps a scheme to a kind of store.

runs/store?engine=hnsw              a local folder (file:runs/store is the same); engines flat and hnsw
milvus:runs/store.db                Milvus Lite, embedded
milvus+http://host:19530/name       a Milvus server or cluster
postgresql://user@host/db?table=t   PostgreSQL with pgvector

To add a store, write one module with the functions `create(url, dim, fingerprint)` and `open(url)` that return a
:class:`VectorStore`, and register it under a scheme. They raise a UserError where the URL is malformed, the store is
there already or cannot be reached, or an extra is not installed.
"""

import contextlib
import importlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np

from sfumato.arrays import Array, as_numpy, some_rows
from sfumato.errors import UserError
from sfumato.ids import is_text

Row = TypeVar("Row")


class StoreInUseError(UserError):
    """Another process writes to a store that takes one writer at a time. Nothing was stored."""


@dataclass(frozen=True, eq=False)
class Records:
    """A batch of stored items."""

    ids: tuple[str, ...]  # n distinct ids
    vectors: np.ndarray  # (n, e) float32 on the CPU
    uncertainty: np.ndarray  # (n,) float32, total variance of each item
    payloads: tuple[Mapping[str, str], ...]  # n dictionaries of texts that searches return with the items

    def __post_init__(self) -> None:
        n = len(self.ids)
        for name in ("vectors", "uncertainty"):
            object.__setattr__(self, name, as_numpy(getattr(self, name)))
        if self.vectors.ndim != 2 or self.vectors.dtype != np.float32:
            found = f"got {tuple(self.vectors.shape)} {self.vectors.dtype}"
            raise ValueError(f"Records: vectors must be (n, e) float32, {found}")
        if not (len(self.vectors) == len(self.uncertainty) == len(self.payloads) == n):
            others = f"{len(self.uncertainty)} uncertainties and {len(self.payloads)} payloads"
            found = f"{n} ids, {len(self.vectors)} vectors, {others}"
            raise ValueError(f"Records: {found}; expected the same number of each")
        seen: set[str] = set()
        for i in self.ids:
            if not i or not is_text(i) or i in seen:
                raise ValueError(f"Records: ids must be distinct, non-empty Unicode texts without NUL, got {i!r}")
            seen.add(i)
        for i, payload in zip(self.ids, self.payloads, strict=True):
            if not all(is_text(text) for pair in payload.items() for text in pair):
                found = f"got {dict(payload)!r}"
                raise ValueError(f"Records: the payload of {i!r} must be Unicode texts without NUL by name, {found}")
        wrong = ~(np.isfinite(self.vectors).all(1) & np.isfinite(self.uncertainty))
        if wrong.any():
            raise ValueError(f"Records: the vector or uncertainty of {self.ids[int(wrong.argmax())]!r} is not finite")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, positions: Sequence[int]) -> "Records":
        """Select some of the records."""
        return some_rows(self, list(positions))

    @staticmethod
    def none(e: int) -> "Records":
        """An empty batch."""
        return Records((), np.empty((0, e), np.float32), np.empty(0, np.float32), ())


@dataclass(frozen=True)
class Filter:
    """Which items a search may find.

    Attributes:
        where: by payload field, the values that it may have. All fields must fit; an item without the field is left
            out. A folder stands for those below it, too.
        max_uncertainty: largest total variance of an item; any if None.
        ranges: by payload field, (at least, below) in the order of code points; "" is an open end. All fields must
            fit; an item without the field, or with an empty one, is left out.

    Raises:
        ValueError: max_uncertainty is negative or not a number.
    """

    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    max_uncertainty: float | None = None
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_uncertainty is not None and not self.max_uncertainty >= 0:
            raise ValueError(f"Filter: max_uncertainty must be at least 0, got {self.max_uncertainty}")

    def accepts(self, payload: Mapping[str, str], uncertainty: float) -> bool:
        """Whether an item passes the filter. Stores that filter in a language of their own must agree with this.

        Args:
            payload: texts of the item.
            uncertainty: total variance of the item.

        Returns:
            True if it passes.
        """
        if self.max_uncertainty is not None and uncertainty > self.max_uncertainty:
            return False
        return all(is_among(payload.get(name), values, ranges) for name, values, ranges in self.conditions())

    def conditions(self) -> Iterator[tuple[str, Sequence[str], Sequence[tuple[str, str]]]]:
        """What must all hold of the payload, for stores that filter in a language of their own.

        Returns:
            (field, values, ranges); the field has one of the values, or lies in one of the ranges (at least, below).
        """
        for name, values in self.where.items():
            folders = [value.rstrip("/") for value in values] if name == "folder" else []
            yield name, folders or values, [(f"{one}/", f"{one}0") for one in folders if one]  # "0" follows "/".
        yield from ((name, (), [ends]) for name, ends in self.ranges.items())


def is_among(value: str | None, values: Sequence[str], ranges: Sequence[tuple[str, str]]) -> bool:
    """Whether a field has one of these values, or lies in one of the ranges (at least, below)."""
    within = (value >= least and (not below or value < below) for least, below in ranges) if value else ()
    return value in values or any(within)


_CONDITION = re.compile(r"([^:=<>]+)(:|>=|<=|>|<|=)(.*)", re.DOTALL)
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01])(T\d\d(:\d\d(:\d\d)?)?)?)?)?")
_LAST = "\U0010ffff"
"""Follows every other character: a text with it stands behind all texts that begin with this text."""


def parse_where(texts: Iterable[str]) -> Filter:
    """A filter in words: FIELD=VALUE, FIELD>=VALUE, FIELD<=VALUE, FIELD>VALUE, FIELD<VALUE, or FIELD:VALUE (exact).

    Several values of one field are alternatives, several fields must all fit. A part of a date stands for its whole:
    date=2024-06 and date<=2024-06 accept all of June, date>2024 begins with 2025.
    """
    where, ranges = dict[str, tuple[str, ...]](), dict[str, tuple[str, str]]()
    for text in (unicodedata.normalize("NFC", text) for text in texts):
        found = _CONDITION.fullmatch(text)
        if found is None or not found[1].strip() or not (found[2] == ":" or found[3].strip()):
            raise ValueError(f"where: got {text!r}, expected FIELD=VALUE, e.g. folder=beach or date>=2024-06")
        name, sign, value = found[1].strip(), found[2], found[3].strip()
        if name == "date" and sign != ":":
            value = value.replace(" ", "T")
            if not _DATE.fullmatch(value):
                raise ValueError(f"where: got {text!r}, expected a date such as 2024, 2024-06 or 2024-06-13")
        if sign == ":" or (sign == "=" and name != "date"):
            value = found[3] if sign == ":" else value
            where[name] = (*where.get(name, ()), value)
            continue
        if sign == "=" and name in ranges:
            raise ValueError(f"where: got {text!r} beside another date; give one span, date>=FIRST and date<=LAST")
        least = {">=": value, "=": value, ">": value + _LAST}.get(sign, "")
        below = {"<": value, "<=": value + _LAST, "=": value + _LAST}.get(sign, "")
        before = ranges.get(name, ("", ""))
        ends = [end for end in (before[1], below) if end]
        ranges[name] = max(before[0], least), min(ends, default="")
    return Filter(where, None, ranges)


class VectorStore(Protocol):
    """Records on disk or behind a network.

    Effects of upsert and delete, once they have returned, survive the death of this process and of the store.
    One process writes at a time; any number of its threads may search meanwhile. A UserError says that the store cannot
    be reached or is full, a ValueError that vectors have another dimension or that k < 1.
    """

    @property
    def url(self) -> str:
        """The store URL, without a password. :func:`open_store` opens it again."""

    @property
    def dim(self) -> int:
        """Dimensions e of the vectors."""

    @property
    def fingerprint(self) -> str:
        """The text about the meaning of the vectors; a store must not mix vectors of different meaning."""

    def upsert(self, records: Records) -> None:
        """Store records; a record replaces the one with the same id as a whole.

        If it raises, nothing was stored, or a part that the same call completes.
        """

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items, unknown ids are skipped; returns the number of removed ones."""

    def get(self, ids: Sequence[str]) -> Records:
        """The records of those ids that exist, in the order of `ids`, each once."""

    def search(self, queries: np.ndarray, k: int, filter: Filter | None = None) -> list[Records]:
        """For each query at most k records, nearest first by the store's own distances. queries (n, e) float32.

        There are fewer only if fewer pass the filter or an approximate engine finds no more.
        """

    def count(self, filter: Filter | None = None) -> int:
        """Number of items."""

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items, each once, in any order; as they were when the scan began, if the store can do that."""

    def ids_after(self, after: str, n: int) -> list[str]:
        """The next n ids after one, in the order of their UTF-8 bytes, so that all can be listed page by page."""

    def optimise(self) -> None:
        """Build search structures over all stored items. They make searches fast; searches are correct without."""

    def close(self) -> None:
        """Release files and connections. Closing twice does no harm."""


WORDS = "_words"
"""Payload field of the distinct word stems of an item's texts, with spaces between them."""


@runtime_checkable
class WordStore(Protocol):
    """What a store may have beside :class:`VectorStore`: a search by words. Stores without it find no words."""

    def match_words(self, stems: Sequence[str], n: int, filter: Filter | None = None) -> list[str]:
        """The ids of n items whose field WORDS has the most of some word stems, at least one, best first."""


class StoreBase:
    """What the stores of this package share: the checks of what they are given, and records from rows."""

    url: str
    dim: int
    fingerprint: str
    waits_for_index = True  # whether optimise() waits for a server that builds its index behind

    def begin_writing(self) -> None:
        """Acquire the write lock of a store that has one, as the first write would; it is held until close."""

    def error(self, message: str) -> UserError:
        """An error that says which store it is about."""
        return UserError(f"store {self.url}: {message}")

    def check_vectors(self, records: Records) -> None:
        """Refuse vectors of another dimension."""
        if (e := records.vectors.shape[1]) != self.dim:
            raise ValueError(f"store {self.url}: vectors must have {self.dim} dimensions, got {e}")

    def check_queries(self, queries: Array, k: int) -> np.ndarray:
        """(n, e) float32 queries on the CPU."""
        if k < 1:
            raise ValueError(f"store {self.url}: k must be at least 1, got {k}")
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(f"store {self.url}: queries must be (n, {self.dim}), got {tuple(queries.shape)}")
        wanted = np.ascontiguousarray(as_numpy(queries), np.float32)
        if not np.isfinite(wanted).all():
            raise ValueError(f"store {self.url}: a query has a number that is not finite")
        return wanted

    def records(self, rows: Sequence[tuple[str, float, Mapping[str, str]]], vectors: Any) -> Records:
        """Records of rows (id, uncertainty, payload) with an array of numbers, n * e in all."""
        ids, uncertainty, payloads = zip(*rows, strict=True) if rows else ((), (), ())
        numbers = np.asarray(vectors, np.float32).reshape(len(rows), self.dim)
        return Records(ids, numbers, np.array(uncertainty, np.float32), payloads)


def in_order(ids: Sequence[str], found: Mapping[str, Row]) -> list[Row]:
    """What was found, in the order of the wanted ids, each once."""
    return [found[i] for i in dict.fromkeys(ids) if i in found]


@contextlib.contextmanager
def closed_if_it_fails(opened: Any) -> Iterator[None]:
    """Close a store or a collection unless the block succeeds."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


_SCHEME = "[a-z][a-z0-9+]+"


@dataclass(frozen=True)
class StoreKind:
    """An entry of STORES."""

    factory: Any  # a module with create and open, or its name
    is_path: bool = False  # whether the URL itself is a path, perhaps a relative one
    second: str | None = None  # what names a second store beside one: "path", or an option; None if there cannot be one


STORES: dict[str, StoreKind] = {
    "file": StoreKind("sfumato.search.stores.local", is_path=True, second="path"),
    "milvus": StoreKind("sfumato.search.stores.milvus", is_path=True, second="name"),
    "milvus+http": StoreKind("sfumato.search.stores.milvus", second="path"),
    "milvus+https": StoreKind("sfumato.search.stores.milvus", second="path"),
    "postgresql": StoreKind("sfumato.search.stores.pgvector", second="table"),
    "postgres": StoreKind("sfumato.search.stores.pgvector", second="table"),
}
"""Kinds of stores by the scheme of their URLs; add to it with :func:`register_store`."""


def register_store(scheme: str, factory: Any, *, is_path: bool = False) -> None:
    """Add a kind of store: an object with the functions `create` and `open`, or the name of such a module."""
    if not re.fullmatch(_SCHEME, scheme):
        expected = "two or more lower-case letters, digits and +, letter first"
        raise ValueError(f"register_store: a scheme is {expected}, got {scheme!r}")
    if scheme in STORES:
        raise ValueError(f"register_store: scheme {scheme!r} is already registered; choose another")
    STORES[scheme] = StoreKind(factory, is_path)


def create_store(url: str, dim: int, fingerprint: str) -> VectorStore:
    """Make an empty store of vectors of e dimensions; the fingerprint says what they mean, and is kept with them."""
    return _factory(url).create(url, dim, fingerprint)


def open_store(url: str) -> VectorStore:
    """Open a store that was created before; search options in the URL replace those given at creation."""
    return _factory(url).open(url)


def _factory(url: str) -> Any:
    factory = STORES[scheme(url)].factory
    return importlib.import_module(factory) if isinstance(factory, str) else factory


def scheme(url: str) -> str:
    """The scheme of a store URL."""
    if (found := re.match(f"({_SCHEME}):", url)) is None:
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
        way = "write / ? # @ in a password as %2F %3F %23 %40"
        raise UserError(f"store {redacted(url)}: the host or port is malformed; {way}")
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
    if not STORES[kind].is_path:
        return url
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
    return _with_user(url, "")


def redacted(url: str) -> str:
    """Replace the password by ***, for messages and logs."""
    if _malformed(url):
        return re.sub(r"(://[^:@/?#]*).*", r"\1:***", url, flags=re.DOTALL)
    return _with_user(re.sub(r"(?<=[?&])(password|token)=[^&]*", r"\1=***", url), ":***")


def _with_user(url: str, password: str) -> str:
    """A URL with something in place of its password, if it has one."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}{password}@{parts.netloc.rpartition('@')[2]}"))


def _malformed(url: str) -> bool:
    """Whether the host or port is malformed, as when a password has a / ? or # that is not written %2F %3F %23."""
    try:
        host = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return True
    return re.fullmatch(r"(\[[0-9a-fA-F:.%]*\]|[^:\[\]]*)(:\d*)?", host) is None


def own_or_anchored(store: str) -> str:
    """Convert a store's URL from the command line to the form kept in a collection."""
    path, mark, query = store.removeprefix("file:").partition("?")
    return f"store{mark}{query}" if not path else anchored(store, Path.cwd())
