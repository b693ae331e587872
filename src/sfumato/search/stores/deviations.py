"""Deviations by key: what a rerank store keeps beside its means, in a folder or in Redis.

The deviations of an item are the coordinates of its lifted vector that follow the mean, (s,) float32.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import UserError, first_line
from sfumato.search.stores import local
from sfumato.search.stores.protocol import Records
from sfumato.search.stores.store_url import redacted

_KEY_FORMAT = re.compile(rb"[0-9a-f]{16}:\d+")
"""Keys that :class:`~sfumato.search.stores.rerank.RerankStore` makes; another store's keys may have the same prefix."""

_BATCH = 1000
"""Number of keys in one request to Redis."""


class Deviations(Protocol):
    """Deviations by key.

    Attributes:
        location: folder or address, without a password, for messages.
    """

    location: str

    def put(self, keys: Sequence[str], deviations: Tensor) -> None:
        """Store deviations.

        Args:
            keys: n new keys.
            deviations: (n, s) float32.
        """
        ...

    def get(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Deviations by key.

        Args:
            keys: wanted keys.

        Returns:
            (s,) float32 arrays of the keys that exist.
        """
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Remove keys.

        Args:
            keys: keys to remove; unknown ones are skipped.
        """
        ...

    def keep(self, keys: set[str]) -> None:
        """Remove all other keys.

        Args:
            keys: keys to keep.
        """
        ...

    def remove(self) -> None:
        """Undo the creation of this store, which must be empty."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...


class FileDeviations:
    """Deviations in a flat local store, which has the keys as ids.

    Args:
        folder: folder of the store.
        dim: number s of deviations of an item.
        metadata: text that the means have as well.
        new: create the store instead of opening it.

    Raises:
        UserError: the store exists already, does not exist, or belongs to other means.
    """

    def __init__(self, folder: Path, dim: int, metadata: str, new: bool) -> None:
        self.location = str(folder)
        self._store = local.create(f"file:{folder}", dim, metadata) if new else local.open(f"file:{folder}")
        if self._store.fingerprint != metadata:
            self._store.close()
            raise UserError(
                f"store {folder}: the deviations belong to other means; restore means and deviations from one copy"
            )

    def put(self, keys: Sequence[str], deviations: Tensor) -> None:
        """See :meth:`Deviations.put`."""
        self._store.upsert(Records(tuple(keys), deviations.contiguous(), torch.zeros(len(keys)), ({},) * len(keys)))

    def get(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """See :meth:`Deviations.get`."""
        found = self._store.get(keys)
        return dict(zip(found.ids, found.vectors.numpy(), strict=True))

    def drop(self, keys: Sequence[str]) -> None:
        """See :meth:`Deviations.drop`."""
        if keys:
            self._store.delete(keys)

    def keep(self, keys: set[str]) -> None:
        """See :meth:`Deviations.keep`."""
        for part in self._store.scan():
            self.drop([key for key in part.ids if key not in keys])
        self._store.optimise()

    def remove(self) -> None:
        """See :meth:`Deviations.remove`."""
        self._store.close()
        for file in Path(self.location).iterdir():
            file.unlink()
        Path(self.location).rmdir()

    def close(self) -> None:
        """See :meth:`Deviations.close`."""
        self._store.close()


class RedisDeviations:
    """Deviations in Redis: PREFIX + key holds raw float32, PREFIX + "about" holds the metadata of the means.

    Args:
        url: redis://host:port/database; what follows a question mark is ignored. Without a password in it, that of the
            environment variable REDIS_PASSWORD is used.
        prefix: prefix of the keys in Redis.
        metadata: text that the means have as well.
        new: create the store instead of opening it.

    Raises:
        UserError: Redis cannot be reached or its client is not installed, or the prefix is taken, empty or of other
            means.
    """

    def __init__(self, url: str, prefix: str, metadata: str, new: bool) -> None:
        try:
            import redis
        except ImportError as error:
            raise UserError(
                f"store {redacted(url)}: deviations in Redis need its client: pip install 'sfumato[redis]'"
            ) from error
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
        """See :meth:`Deviations.put`."""
        raw = np.ascontiguousarray(deviations.numpy(), dtype="<f4")
        for start in range(0, len(keys), _BATCH):
            batch = {self._prefix + key: raw[i].tobytes() for i, key in enumerate(keys[start : start + _BATCH], start)}
            with self._reported():
                self._redis.mset(batch)

    def get(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """See :meth:`Deviations.get`."""
        found: dict[str, Any] = {}
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            with self._reported():
                values: Any = self._redis.mget([self._prefix + key for key in batch])
            found |= {key: np.frombuffer(v, "<f4") for key, v in zip(batch, values, strict=True) if v is not None}
        return found

    def drop(self, keys: Sequence[str]) -> None:
        """See :meth:`Deviations.drop`."""
        for start in range(0, len(keys), _BATCH):
            with self._reported():
                self._redis.unlink(*(self._prefix + key for key in keys[start : start + _BATCH]))

    def keep(self, keys: set[str]) -> None:
        """See :meth:`Deviations.keep`."""
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
        """See :meth:`Deviations.remove`."""
        with self._reported():
            self._redis.delete(self._metadata_key)

    def close(self) -> None:
        """See :meth:`Deviations.close`."""
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
