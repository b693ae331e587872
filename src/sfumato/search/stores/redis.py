"""RedisStore keeps means in one place and deviations in another, and ranks the nearest means again by both.

The search of PCME++ (Chun, ICLR 2024): the index holds only the means, and the variances of its K nearest are fetched.
Lifted vectors (search/exact.py) split into a mean and deviations, and squared L2 is the sum over both parts:

    csd            [mean, sqrt(total variance)]    d and 1 coordinates
    wasserstein2   [mean, std]                     d and d

The means are in a :class:`~sfumato.search.stores.local.LocalStore`, which also has ids, payloads and uncertainties. The
deviations are in Redis (:class:`Deviations`). An item exists if its record among the means exists. That record is
written last and names the key of its deviations; a key is used only once. If a writer dies between the two writes, the
old item stays as it was, and the new deviations are never read.

Redis must be configured not to lose acknowledged writes: `appendonly yes`, `appendfsync always` and `maxmemory-policy
noeviction`. Otherwise deviations are lost when the server dies, and searches that need them raise an error.
"""

import contextlib
import json
import os
import re
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import UserError, first_line, need, refuse_newer
from sfumato.search.stores import local
from sfumato.search.stores.local import LOCAL_OPTIONS
from sfumato.search.stores.protocol import Filter, Option, Records, StoreBase, nearest_of, options, redacted

_KEY_FORMAT = re.compile(rb"[0-9a-f]{16}:\d+")
"""Keys that :class:`RedisStore` makes; another store's keys may have the same prefix."""

_BATCH = 1000
"""Number of keys in one request to Redis."""


class Deviations:
    """Deviations in Redis: PREFIX + key holds raw float32, PREFIX + "about" holds the metadata of the means."""

    def __init__(self, url: str, prefix: str, metadata: str, new: bool) -> None:
        with need("redis", f"store {redacted(url)}: deviations in Redis need its client"):
            import redis
        self._errors, self._prefix = redis.RedisError, prefix
        address = urlunsplit(urlsplit(url)._replace(query="", fragment=""))
        self.location = redacted(address)
        password = {} if urlsplit(url).password else {"password": os.environ.get("REDIS_PASSWORD")}
        try:
            self._redis = redis.Redis.from_url(address, socket_timeout=60, socket_connect_timeout=10, **password)
        except ValueError as error:
            raise UserError(
                f"store {redacted(url)}: not the address of a Redis server ({error}); write redis://host:6379/0"
            ) from error
        self._metadata_key = f"{prefix}about".encode()
        if new:
            self._create(metadata.encode())
        else:
            self._check(metadata.encode())

    def put(self, keys: Sequence[str], deviations: Tensor) -> None:
        """Store (n, s) float32 deviations under new keys."""
        raw = np.ascontiguousarray(deviations.numpy(), dtype="<f4")
        for start in range(0, len(keys), _BATCH):
            batch = {self._prefix + key: raw[i].tobytes() for i, key in enumerate(keys[start : start + _BATCH], start)}
            with self._reported():
                self._redis.mset(batch)

    def get(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Deviations by key, of those keys that exist: (s,) float32 arrays."""
        found: dict[str, Any] = {}
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            with self._reported():
                values: Any = self._redis.mget([self._prefix + key for key in batch])
            found |= {key: np.frombuffer(v, "<f4") for key, v in zip(batch, values, strict=True) if v is not None}
        return found

    def drop(self, keys: Sequence[str]) -> None:
        """Remove keys."""
        for start in range(0, len(keys), _BATCH):
            with self._reported():
                self._redis.unlink(*(self._prefix + key for key in keys[start : start + _BATCH]))

    def keep(self, keys: set[str]) -> None:
        """Remove all other keys."""
        cut = len(self._prefix.encode())
        pattern = "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in self._prefix) + "*"
        cursor = 0
        while True:
            with self._reported():
                page: Any = self._redis.scan(cursor, match=pattern, count=_BATCH)
            cursor, names = page
            stored = [name[cut:].decode() for name in names if _KEY_FORMAT.fullmatch(name[cut:])]
            self.drop([key for key in stored if key not in keys])
            if not cursor:
                return

    def remove(self) -> None:
        """Undo the creation of this store, which must be empty."""
        with self._reported():
            self._redis.delete(self._metadata_key)

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _create(self, metadata: bytes) -> None:
        self._warn_if_volatile()
        with self._reported():
            created = self._redis.set(self._metadata_key, metadata, nx=True)
        if not created:
            raise UserError(
                f"store {self.location}: the prefix {self._prefix!r} has a store already; open it, or give another"
                " prefix"
            )

    def _check(self, metadata: bytes) -> None:
        with self._reported():
            stored = self._redis.get(self._metadata_key)
        if stored != metadata:
            problem = "has no store" if stored is None else "belongs to other means"
            raise UserError(
                f"store {self.location}: the prefix {self._prefix!r} {problem}; give the right server and prefix, or"
                " restore the data of Redis"
            )

    def _warn_if_volatile(self) -> None:
        try:
            settings: Any = self._redis.config_get("append*")
            settings |= self._redis.config_get("maxmemory*")
        except self._errors:
            return  # A server may hide its settings. The next request shows whether it can be reached.
        required = {"appendonly": "yes", "appendfsync": "always"}
        if settings.get("maxmemory", "0") != "0":
            required["maxmemory-policy"] = "noeviction"
        if wrong := [f"{name} {value}" for name, value in required.items() if settings.get(name) != value]:
            warnings.warn(
                f"store {self.location}: this Redis server may lose stored data when it stops or is full; set"
                f" {', '.join(wrong)}",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Errors of Redis as a UserError."""
        try:
            yield
        except self._errors as error:
            raise UserError(
                f"store {self.location}: Redis: {first_line(error)}; check that the server runs and accepts the"
                " password"
            ) from error


_OPTIONS = {
    "means": Option("folder of the means"),
    "prefix": Option("prefix of the keys in Redis, sfumato: if left out; every store in one Redis needs its own"),
    "candidates": Option("number of nearest means that are ranked again, 100 if left out", 1),
    "mean_dim": Option("number of leading coordinates that are the mean; all but one, as for csd, if left out", 1),
}

FORMAT = 1
"""The version of what is in Redis; stores of earlier versions, which is the same, do not name it."""

_KEY = "\x01spread"
"""Payload field of the means' records that names the key of the deviations."""

_GRACE = 30.0
"""Seconds that replaced deviations are kept for searches that have read the record but not yet the deviations."""

Result = TypeVar("Result")


def create(url: str, dim: int, fingerprint: str) -> "RedisStore":
    """Make an empty store."""
    given, means = _parse(url)
    mean_dim = given.get("mean_dim", dim - 1)
    if not 1 <= mean_dim < dim:
        raise UserError(
            f"store {redacted(url)}: mean_dim must be from 1 to {dim - 1}, got {mean_dim}; means and deviations need at"
            " least one coordinate each"
        )
    fields = {
        "sfumato": FORMAT,
        "dim": dim,
        "candidates": given.get("candidates", 100),
        "fingerprint": fingerprint,
        "key": secrets.token_hex(8),
    }
    local.LocalSettings.of(redacted(url), local.parse_url(means)[1])
    metadata = json.dumps(fields, ensure_ascii=False)
    # The means are created last: a store exists if its means exist.
    deviations = Deviations(url, given["prefix"], metadata, new=True)
    try:
        local.create(means, mean_dim, metadata).close()
    except BaseException:
        deviations.remove()
        raise
    finally:
        deviations.close()
    return open(url)


def open(url: str) -> "RedisStore":
    """Open a store of :func:`create`."""
    return RedisStore(url)


class RedisStore(StoreBase):
    """A :class:`~sfumato.search.stores.protocol.VectorStore` in two parts, from :func:`create` or :func:`open`.

    A search is exact among the candidates. An item whose mean is not among the K nearest is not found, however small
    its deviations are.
    """

    def __init__(self, url: str) -> None:
        given, means = _parse(url)
        self.url = redacted(url)
        self._means = local.open(means)
        self._writer = threading.RLock()
        self._replaced: deque[tuple[float, Sequence[str]]] = deque()
        try:
            try:
                fields = json.loads(self._means.fingerprint)
                refuse_newer(f"store {self.url}", fields.get("sfumato", FORMAT), FORMAT)
                self.dim, self.fingerprint = int(fields["dim"]), str(fields["fingerprint"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"store {self.url}: {means} is a plain store without deviations; give another folder"
                ) from error
            self.candidates = int(given.get("candidates", fields["candidates"]))
            mean_dim = self._means.dim
            if given.get("mean_dim", mean_dim) != mean_dim:
                raise UserError(
                    f"store {self.url}: was created with mean_dim={mean_dim}, not {given['mean_dim']}; leave it out"
                )
            self._deviations = Deviations(url, given["prefix"], self._means.fingerprint, new=False)
        except BaseException:
            self._means.close()
            raise

    def upsert(self, records: Records) -> None:
        """Store records; a record replaces the one with the same id as a whole. If it raises, none are stored."""
        self.check_vectors(records)
        if not len(records):
            return
        mean_dim, run = self._means.dim, secrets.token_hex(8)
        keys = [f"{run}:{i}" for i in range(len(records))]
        payloads = tuple(dict(payload) | {_KEY: key} for payload, key in zip(records.payloads, keys, strict=True))
        means = Records(records.ids, records.vectors[:, :mean_dim].contiguous(), records.uncertainty, payloads)
        with self._writing():
            old = _keys(self._means.get(records.ids))
            self._deviations.put(keys, records.vectors[:, mean_dim:])
            self._means.upsert(means)
            self._drop(old)

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items."""
        with self._writing():
            old = _keys(self._means.get(ids))
            deleted = self._means.delete(ids)
            self._drop(old)
        return deleted

    def get(self, ids: Sequence[str]) -> Records:
        """Records by id."""
        return self._with_retries(lambda: self._joined([self._means.get(ids)])[0])

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        """The k items nearest by mean and deviations among the max(candidates, k) nearest by mean. queries (n, e)."""
        wanted = self.check_queries(queries, k)
        means = wanted[:, : self._means.dim].contiguous()
        candidates = self._with_retries(
            lambda: self._joined(self._means.search(means, max(k, self.candidates), filter))
        )
        return [nearest_of(found, query, k) for query, found in zip(wanted, candidates, strict=True)]

    def count(self, filter: Filter | None = None) -> int:
        """Number of items."""
        return self._means.count(filter)

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items that existed when the scan began, each once; one replaced meanwhile in its old or new form."""
        for part in self._means.scan(batch, filter):
            try:
                yield self._joined([part])[0]
            except _MissingDeviations:
                # An item was replaced or deleted since the scan began. Its present record has deviations.
                yield self.get(part.ids)

    def ids_after(self, after: str, n: int) -> list[str]:
        """The next ids in the order of their UTF-8 bytes."""
        return self._means.ids_after(after, n)

    def optimise(self) -> None:
        """Optimise the means, and remove deviations that no record names."""
        with self._writing():
            self._means.optimise()
            known = {key for part in self._means.scan() for key in _keys(part)}
            self._deviations.keep(known.union(*(keys for _, keys in self._replaced)))

    def begin_writing(self) -> None:
        """Acquire the write lock of the means."""
        self._means.begin_writing()

    def close(self) -> None:
        """Release files, connections and the lock of the writer."""
        with self._writer:
            if self._replaced:
                self._drop([], grace=0)
                self._replaced.clear()
            self._means.close()
            self._deviations.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock both parts for one writer."""
        with self._writer:
            self._means.begin_writing()
            yield

    def _drop(self, keys: Sequence[str], grace: float = _GRACE) -> None:
        """Schedule keys for removal and remove those that are due; optimise removes them if this fails."""
        now = time.monotonic()
        self._replaced.append((now, keys))
        with contextlib.suppress(UserError):
            while self._replaced and self._replaced[0][0] + grace <= now:
                self._deviations.drop(self._replaced.popleft()[1])

    def _joined(self, parts: Sequence[Records]) -> list[Records]:
        """Whole records from those of the means; the deviations of each item are fetched once."""
        ids = {key: i for part in parts for key, i in zip(_keys(part), part.ids, strict=True)}
        stored = self._deviations.get(list(ids))
        if missing := next((i for key, i in ids.items() if key not in stored), None):
            raise _MissingDeviations(missing)
        whole = []
        for part in parts:
            rows = np.array([stored[key] for key in _keys(part)], dtype=np.float32)
            deviations = torch.from_numpy(rows.reshape(len(part), self.dim - self._means.dim))
            payloads = tuple({name: text for name, text in p.items() if name != _KEY} for p in part.payloads)
            vectors = torch.cat([part.vectors, deviations], dim=1)
            whole.append(Records(part.ids, vectors, part.uncertainty, payloads))
        return whole

    def _with_retries(self, read: Callable[[], Result]) -> Result:
        """Read again if an item was replaced between the reading of its record and of its deviations."""
        for _ in range(4):
            try:
                return read()
            except _MissingDeviations as error:
                missing = error.args[0]
        raise UserError(
            f"store {self.url}: the deviations of {missing!r} are missing from {self._deviations.location}; store the"
            " item again, and check that nothing there is evicted or lost (Redis: appendonly yes, appendfsync always,"
            " maxmemory-policy noeviction)"
        )


class _MissingDeviations(Exception):
    """The deviations of an item are not stored; the argument is its id."""


def _keys(records: Records) -> list[str]:
    return [payload[_KEY] for payload in records.payloads]


def _parse(url: str) -> tuple[dict[str, Any], str]:
    """This module's options, numbers as integers, and the URL of the means."""
    # A path may contain a #, which would end the URL for `options`.
    rest: dict[str, Any] = dict(options(url.replace("#", "%23"), _OPTIONS | LOCAL_OPTIONS))
    given = {"prefix": "sfumato:", "means": ""} | {name: rest.pop(name) for name in _OPTIONS if name in rest}
    given |= {name: int(given[name]) for name in ("candidates", "mean_dim") if name in given}
    path = given["means"]
    if not path or "?" in path:
        raise UserError(f"store {redacted(url)}: the folder is missing; write redis://host:6379/0?means=PATH")
    return given, f"file:{path}?{urlencode(rest)}" if rest else f"file:{path}"
