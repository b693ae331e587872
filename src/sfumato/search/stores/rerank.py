"""RerankStore: means in one place, variances by key in another; the candidates nearest by their means are ranked again by both.

The search of PCME++ (Chun, ICLR 2024): the index holds only the means, and of its K nearest the variances are fetched. Lifted
vectors (search/lifting.py) split into a mean and a spread, and squared L2 is the sum of both parts:

    csd            [mean, sqrt(total variance)]    d and 1 coordinates
    wasserstein2   [mean, std]                     d and d

The means lie in a :class:`~sfumato.search.stores.local.LocalStore`, which also has ids, payloads and uncertainties; the spreads
lie in a second, flat one, or in Redis as raw float32. An item is there when its means' record is, and that is written
last and names its spread by a key of its own, never used again: a writer that dies between the two leaves the old item
as it was, and a spread that nobody reads.

Redis must be told to keep what it acknowledges, `appendonly yes` and `appendfsync always`, and `maxmemory-policy noeviction`;
otherwise spreads are lost when it dies, and searches that need them fail and say so.
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
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import UserError, first_line
from sfumato.search.stores import local
from sfumato.search.stores.local_database import LOCAL_OPTIONS
from sfumato.search.stores.nearest import check_queries
from sfumato.search.stores.protocol import Filter, Records
from sfumato.search.stores.store_url import options, redacted, scheme

_OWN = {
    "candidates": "number of items with the nearest means that are ranked again, 100 if left out",
    "mean_dim": "number of leading coordinates that form the mean; all but one if left out, as for csd",
}
_OF_REDIS = {
    "means": "folder of the means",
    "prefix": "prefix of the keys in Redis, sfumato: if left out; two stores in one Redis need different prefixes",
}
_KEY = "\x01spread"
"""Payload field of the means' records that names the spread."""

_GRACE = 30.0
"""Seconds that a replaced spread is kept for searches that have read its record and not yet the spread."""

_OURS = re.compile(rb"[0-9a-f]{16}:\d+")
_BATCH = 1000
Result = TypeVar("Result")


def create(url: str, dim: int, fingerprint: str) -> "RerankStore":
    """Make an empty store.

    Args:
        url: rerank:PATH?OPTIONS or redis://host:port/database?means=PATH&OPTIONS; the options of
            :mod:`~sfumato.search.stores.local_database` concern the means.
        dim: e >= 2, of means and spreads together.
        fingerprint: kept.

    Raises:
        UserError: an option is wrong, something is there already, Redis cannot be reached, or an extra is not installed.
    """
    given, means = _parse(url)
    mean_dim = given.get("mean_dim", dim - 1)
    if not 1 <= mean_dim < dim:
        raise UserError(
            f"store {redacted(url)}: mean_dim must be from 1 to {dim - 1}, got {mean_dim}; both parts need a coordinate"
        )
    about = {
        "dim": dim,
        "candidates": given.get("candidates", 100),
        "fingerprint": fingerprint,
        "key": secrets.token_hex(8),
    }
    told = json.dumps(about, ensure_ascii=False)
    # The means last: without them there is no store.
    spreads = _spreads(url, dim - mean_dim, told)
    try:
        local.create(means, mean_dim, told).close()
    except BaseException:
        spreads.forget()
        raise
    finally:
        spreads.close()
    return open(url)


def open(url: str) -> "RerankStore":
    """Open a store of :func:`create`.

    Args:
        url: as for create; candidates and what concerns searching the means are taken from here if given, others must fit.

    Raises:
        UserError: there is no store, means and spreads do not belong together, Redis cannot be reached, or an extra is missing.
    """
    return RerankStore(url)


class RerankStore:
    """A :class:`~sfumato.search.stores.protocol.VectorStore` in two parts. Made by :func:`create`, opened by :func:`open`.

    A search is exact among the candidates; an item whose mean is not among the K nearest is not found, however small its spread.
    """

    def __init__(self, url: str) -> None:
        given, means = _parse(url)
        self.url = redacted(url)
        self._means = local.open(means)
        self._writer = threading.RLock()
        self._late: deque[tuple[float, Sequence[str]]] = deque()
        try:
            try:
                about = json.loads(self._means.fingerprint)
                self.dim, self.fingerprint = int(about["dim"]), str(about["fingerprint"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"store {self.url}: {means} is a complete store without separate deviations; give another folder"
                ) from error
            self.candidates = int(given.get("candidates", about["candidates"]))
            mean_dim = self._means.dim
            if given.get("mean_dim", mean_dim) != mean_dim:
                raise UserError(
                    f"store {self.url}: was created with mean_dim={mean_dim}, not {given['mean_dim']}; leave it out"
                )
            self._spreads = _spreads(url, self.dim - mean_dim, self._means.fingerprint, new=False)
        except BaseException:
            self._means.close()
            raise

    def upsert(self, records: Records) -> None:
        """Store records; those whose ids are there already are replaced as a whole. All are stored or, if it raises, none.

        Raises:
            ValueError: vectors of another dimension.
            UserError: another process writes, the disk is full, or Redis cannot be reached.
        """
        if records.vectors.shape[1] != self.dim:
            raise ValueError(
                f"store {self.url}: vectors have {records.vectors.shape[1]} dimensions, the store {self.dim}"
            )
        if not len(records):
            return
        mean_dim, run = self._means.dim, secrets.token_hex(8)
        keys = [f"{run}:{i}" for i in range(len(records))]
        payloads = tuple(dict(payload) | {_KEY: key} for payload, key in zip(records.payloads, keys, strict=True))
        means = Records(records.ids, records.vectors[:, :mean_dim].contiguous(), records.uncertainty, payloads)
        with self._writing():
            old = _keys(self._means.get(records.ids))
            self._spreads.put(keys, records.vectors[:, mean_dim:])
            self._means.upsert(means)
            self._drop(old)

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items.

        Returns:
            How many of these ids were there.

        Raises:
            UserError: another process writes, the disk is full, or Redis cannot be reached.
        """
        with self._writing():
            old = _keys(self._means.get(ids))
            deleted = self._means.delete(ids)
            self._drop(old)
        return deleted

    def get(self, ids: Sequence[str]) -> Records:
        """The records of those of these ids that are there, each once, in the order asked for.

        Raises:
            UserError: a spread is missing; the message names the item.
        """
        return self._until_joined(lambda: self._joined([self._means.get(ids)])[0])

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        """The k nearest, by mean and spread, of the max(candidates, k) items nearest by their means.

        Args:
            queries: (n, e) float32.
            k: at least 1.
            filter: which items may be candidates; all if None.

        Returns:
            For each query k records, nearest first; fewer only if fewer fit the filter.

        Raises:
            ValueError: k or the queries do not fit.
            UserError: a spread is missing; the message names the item.
        """
        wanted = check_queries(self.url, queries, k, self.dim)
        means = wanted[:, : self._means.dim].contiguous()
        candidates = self._until_joined(
            lambda: self._joined(self._means.search(means, max(k, self.candidates), filter))
        )
        results = []
        for query, found in zip(wanted, candidates, strict=True):
            distance = (found.vectors.double() - query.double()).square().sum(1)
            results.append(found.take(distance.sort(stable=True)[1][:k].tolist()))
        return results

    def count(self, filter: Filter | None = None) -> int:
        """Number of items that fit."""
        return self._means.count(filter)

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items that fit, in batches, each once, of those that were there when it began; replaced meanwhile, the old or the new."""
        for part in self._means.scan(batch, filter):
            try:
                yield self._joined([part])[0]
            except _MissingSpread:
                # Replaced or deleted since the scan began: then its present record names a spread that is there.
                yield self.get(part.ids)

    def optimise(self) -> None:
        """Optimise the means, and remove the spreads that killed writers have left."""
        with self._writing():
            self._means.optimise()
            known = {key for part in self._means.scan() for key in _keys(part)}
            self._spreads.keep(known.union(*(keys for _, keys in self._late)))

    def close(self) -> None:
        """Let go of files, connections and the right to write."""
        with self._writer:
            if self._late:
                self._drop([], grace=0)
                self._late.clear()
            self._means.close()
            self._spreads.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer, before anything is written to either part."""
        with self._writer:
            self._means.begin_writing()
            yield

    def _drop(self, keys: Sequence[str], grace: float = _GRACE) -> None:
        """Remove spreads that no record has named for a while, and these when their time has come.

        If that fails, the write is done all the same: optimise removes what is left.
        """
        now = time.monotonic()
        self._late.append((now, keys))
        with contextlib.suppress(UserError):
            while self._late and self._late[0][0] + grace <= now:
                self._spreads.drop(self._late.popleft()[1])

    def _joined(self, parts: Sequence[Records]) -> list[Records]:
        """Whole records from those of the means; each spread is fetched once."""
        named = {key: i for part in parts for key, i in zip(_keys(part), part.ids, strict=True)}
        spread = self._spreads.get(list(named))
        if lost := next((i for key, i in named.items() if key not in spread), None):
            raise _MissingSpread(lost)
        whole = []
        for part in parts:
            rows = np.array([spread[key] for key in _keys(part)], dtype=np.float32)
            spreads = torch.from_numpy(rows.reshape(len(part), self.dim - self._means.dim))
            payloads = tuple({name: text for name, text in p.items() if name != _KEY} for p in part.payloads)
            vectors = torch.cat([part.vectors, spreads], dim=1)
            whole.append(Records(part.ids, vectors, part.uncertainty, payloads))
        return whole

    def _until_joined(self, find: Callable[[], Result]) -> Result:
        """Try again where a spread is gone because its item was replaced between the two readings."""
        for _ in range(4):
            try:
                return find()
            except _MissingSpread as error:
                lost = error.args[0]
        raise UserError(
            f"store {self.url}: the deviation of {lost!r} is missing from {self._spreads.where}; store the item"
            " again, and check that"
            " Redis evicts and loses nothing (appendonly yes, appendfsync always, maxmemory-policy noeviction)"
        )


class _MissingSpread(Exception):
    """Of an item, by its id."""


class _Spreads(Protocol):
    """(s,) float32 by key."""

    where: str

    def put(self, keys: Sequence[str], spreads: Tensor) -> None: ...
    def get(self, keys: Sequence[str]) -> Mapping[str, Any]: ...
    def drop(self, keys: Sequence[str]) -> None: ...
    def keep(self, keys: set[str]) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


class _FileSpreads:
    """In a flat LocalStore, by id."""

    def __init__(self, folder: Path, dim: int, about: str, new: bool) -> None:
        self.where = str(folder)
        self._store = local.create(f"file:{folder}", dim, about) if new else local.open(f"file:{folder}")
        if self._store.fingerprint != about:
            self._store.close()
            raise UserError(f"store {folder}: belongs to other means; put back a copy of the whole folder")

    def put(self, keys: Sequence[str], spreads: Tensor) -> None:
        self._store.upsert(Records(tuple(keys), spreads.contiguous(), torch.zeros(len(keys)), ({},) * len(keys)))

    def get(self, keys: Sequence[str]) -> Mapping[str, Any]:
        found = self._store.get(keys)
        return dict(zip(found.ids, found.vectors.numpy(), strict=True))

    def drop(self, keys: Sequence[str]) -> None:
        if keys:
            self._store.delete(keys)

    def keep(self, keys: set[str]) -> None:
        for part in self._store.scan():
            self.drop([key for key in part.ids if key not in keys])
        self._store.optimise()

    def forget(self) -> None:
        self._store.close()
        for file in Path(self.where).iterdir():
            file.unlink()
        Path(self.where).rmdir()

    def close(self) -> None:
        self._store.close()


class _RedisSpreads:
    """In Redis: PREFIX + key holds raw float32, PREFIX + "about" says which means they belong to."""

    def __init__(self, url: str, prefix: str, about: str, new: bool) -> None:
        try:
            import redis
        except ImportError as error:
            raise UserError(
                f"store {redacted(url)}: deviations in Redis need its client: pip install 'sfumato[redis]'"
            ) from error
        self._errors, self._prefix = redis.RedisError, prefix
        self.where = redacted(urlunsplit(urlsplit(url)._replace(query="", fragment="")))
        password = {} if urlsplit(url).password else {"password": os.environ.get("REDIS_PASSWORD")}
        try:
            address = urlunsplit(urlsplit(url)._replace(query="", fragment=""))
            self._redis = redis.Redis.from_url(address, socket_timeout=60, socket_connect_timeout=10, **password)
        except ValueError as error:
            raise UserError(
                f"store {redacted(url)}: is no address of a Redis ({error}); write redis://host:6379/0"
            ) from error
        self._about = f"{prefix}about".encode()
        if new:
            self._warn_if_forgetful()
            if not self._ask(self._redis.set, self._about, about.encode(), nx=True):
                raise UserError(
                    f"store {self.where}: has a store under the prefix {prefix!r} already; open it, or give another prefix"
                )
        elif (found := self._ask(self._redis.get, self._about)) != about.encode():
            what = "holds nothing" if found is None else "belongs to other means"
            raise UserError(
                f"store {self.where}: the prefix {prefix!r} {what}; give the right Redis and prefix, or restore its data"
            )

    def put(self, keys: Sequence[str], spreads: Tensor) -> None:
        raw = np.ascontiguousarray(spreads.numpy(), dtype="<f4")
        for start in range(0, len(keys), _BATCH):
            some = {self._prefix + key: raw[i].tobytes() for i, key in enumerate(keys[start : start + _BATCH], start)}
            self._ask(self._redis.mset, some)

    def get(self, keys: Sequence[str]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for start in range(0, len(keys), _BATCH):
            some = keys[start : start + _BATCH]
            values = self._ask(self._redis.mget, [self._prefix + key for key in some])
            found |= {key: np.frombuffer(v, "<f4") for key, v in zip(some, values, strict=True) if v is not None}
        return found

    def drop(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _BATCH):
            some = [self._prefix + key for key in keys[start : start + _BATCH]]
            self._ask(self._redis.unlink, *some)

    def keep(self, keys: set[str]) -> None:
        cut = len(self._prefix.encode())
        pattern = "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in self._prefix) + "*"
        cursor = 0
        while True:
            cursor, some = self._ask(self._redis.scan, cursor, match=pattern, count=_BATCH)
            ours = [key[cut:].decode() for key in some if _OURS.fullmatch(key[cut:])]
            self.drop([key for key in ours if key not in keys])
            if not cursor:
                return

    def forget(self) -> None:
        self._ask(self._redis.delete, self._about)

    def close(self) -> None:
        self._redis.close()

    def _warn_if_forgetful(self) -> None:
        try:
            told = self._redis.config_get("append*") | self._redis.config_get("maxmemory*")
        except self._errors:
            return  # A server may keep its settings to itself; the next request tells whether it is there.
        wanted = {"appendonly": "yes", "appendfsync": "always"}
        if told.get("maxmemory", "0") != "0":
            wanted["maxmemory-policy"] = "noeviction"
        if wrong := [f"{name} {value}" for name, value in wanted.items() if told.get(name) != value]:
            warnings.warn(
                f"store {self.where}: this Redis may lose stored items when it stops or is full; set"
                f" {', '.join(wrong)}",
                stacklevel=2,
            )

    def _ask(self, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except self._errors as error:
            raise UserError(
                f"store {self.where}: Redis: {first_line(error)}; check that it runs and accepts your login"
            ) from error


def _spreads(url: str, dim: int, about: str, new: bool = True) -> _Spreads:
    given, means = _parse(url)
    if scheme(url) == "rerank":
        return _FileSpreads(Path(means.removeprefix("file:").partition("?")[0]).with_name("spreads"), dim, about, new)
    return _RedisSpreads(url, given["prefix"], about, new)


def _keys(records: Records) -> list[str]:
    return [payload[_KEY] for payload in records.payloads]


def _parse(url: str) -> tuple[dict[str, Any], str]:
    """This module's options, numbers as numbers, and the URL of the means."""
    apart = scheme(url) != "rerank"
    # A path may have a #, which would end the URL for `options`.
    rest: dict[str, Any] = dict(options(url.replace("#", "%23"), _OWN | (_OF_REDIS if apart else {}) | LOCAL_OPTIONS))
    given = {name: rest.pop(name) for name in (*_OWN, *_OF_REDIS) if name in rest}
    for name in set(given) & set(_OWN):
        if not given[name].isascii() or not given[name].isdigit() or int(given[name]) < 1:
            raise UserError(f"store {redacted(url)}: {name} must be a whole number of at least 1, got {given[name]!r}")
        given[name] = int(given[name])
    if apart:
        given.setdefault("prefix", "sfumato:")
        path = given.get("means", "")
    else:
        path = url.removeprefix("rerank:").partition("?")[0]
        path = path and f"{path}/means"
    if not path or "?" in path:
        raise UserError(f"store {redacted(url)}: names no folder; write rerank:PATH, or redis://host:6379/0?means=PATH")
    return given, f"file:{path}?{urlencode(rest)}" if rest else f"file:{path}"
