"""Records in a collection of Milvus: embedded (Milvus Lite), a server, or a cluster. Needs the extra `milvus`.

    milvus:runs/store.db?name=sfumato            Milvus Lite in this process, one process at a time
    milvus+http://host:19530/name                a server; with a password milvus+https://user:password@host:19530/name

Where the URL has no password, the token comes from MILVUS_TOKEN: user:password, or an API key. Options: OPTIONS.

Other kinds of index are refused, because Lite accepts any name and then searches without an index. Options of the index
that `create_store` is given are kept with the collection; search options given to `open_store` replace them. If a
search of HNSW or IVF_FLAT returns fewer than k results, as under a narrow filter, it is repeated with its most thorough
settings, and on a server completed by a scan. For a filter Lite reads the payload of every item, and it reads every
vector that no segment holds yet, about a second for 20,000; call `optimise` to write segments.

Records that upsert has stored are in Milvus's log, which survives the death of any process. Lite does not force the log
to disk, so a power cut may lose records stored after the last `optimise`. While it is open, Lite listens on a free
loopback port without a password.
"""

import contextlib
import importlib
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sfumato.errors import UserError, progress_bar, refuse_newer
from sfumato.search.stores import milvus_place
from sfumato.search.stores.protocol import Filter, Records, StoreBase, closed_if_it_fails, in_order

_IVF = ("IVF_FLAT", milvus_place.SQ8)
_SEARCHING = ("ef", "nprobe", "overfetch", "consistency")
"""Options that the URL of every opening may set."""
_KEPT = {name: option.default for name, option in milvus_place.OPTIONS.items() if option.default}

_COLUMNS = ["id", "vector", "uncertainty", "payload"]

FORMAT = 1
"""The version of the collection, in its properties."""

_LONGEST_ID = 65_535

_RETRIES = 5
"""Within about four seconds; pymilvus would go on for minutes."""

_LEAST_INDEXED = 1024
"""Rows below which a server builds no index for a segment."""

_LOOK = 0.2
"""Seconds between two looks at what a server has indexed."""

_LOADED = 40
"""Seconds within which a busy server has loaded an index that it has built."""

_LONG = "flush", "load_collection"
"""Methods that wait for the server's own work."""


_one_at_a_time = threading.RLock()
"""Held in every call to an embedded Milvus: Lite's searches may miss items while another thread writes or flushes."""


def create(url: str, dim: int, fingerprint: str) -> "MilvusStore":
    """Make an empty collection."""
    place = milvus_place.Place(url)
    if place.file is not None:
        place.file.parent.mkdir(parents=True, exist_ok=True)
    store = MilvusStore(place, milvus_place.connect(place), {**_KEPT, **place.options}, dim, fingerprint)
    with closed_if_it_fails(store):
        store.make()
    return store


def open(url: str) -> "MilvusStore":
    """Open a collection."""
    place = milvus_place.Place(url)
    if place.file is not None and not place.file.exists():
        raise UserError(f"store {place.url}: there is no file {place.file}")
    store = MilvusStore(place, milvus_place.connect(place), {}, 0, "")
    with closed_if_it_fails(store):
        store.load()
    return store


class MilvusStore(StoreBase):
    """A collection (id, vector, uncertainty, payload); its properties hold the fingerprint and the options."""

    def __init__(
        self, place: "milvus_place.Place", client: Any, chosen: Mapping[str, str], dim: int, fingerprint: str
    ) -> None:
        self._place, self._client = place, client
        self._options, self.url, self.dim, self.fingerprint = dict(chosen), place.url, dim, fingerprint
        self._closed = False
        self.most_rows, self.most_bytes = 16_384, 16_000_000

    @property
    def _index(self) -> str:
        """Milvus's name of the index."""
        return self._options["index"] if self._options["compress"] == "none" else milvus_place.SQ8

    def make(self) -> None:
        """Create the collection."""
        types = milvus_place.driver().DataType
        if self._call("has_collection"):
            raise self.error(f"collection {self._place.name} already exists; open it, or give another name")
        note = {"sfumato": FORMAT, "dim": self.dim, "fingerprint": self.fingerprint}
        text = json.dumps({**note, "options": {name: self._options[name] for name in _KEPT}})
        # Lite keeps properties and no description; a server keeps both, unless it takes no properties that it does
        # not know.
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False, description=text)
        schema.add_field("id", types.VARCHAR, is_primary=True, max_length=_LONGEST_ID)
        schema.add_field("vector", types.FLOAT_VECTOR, dim=self.dim)
        schema.add_field("uncertainty", types.FLOAT)
        schema.add_field("payload", types.JSON)
        index = self._client.prepare_index_params()
        numbers = {name: int(value) for name, value in self._options.items() if value.isdigit()}
        built = {
            "HNSW": {"M": numbers["m"], "efConstruction": numbers["ef_construction"]},
            **{name: {"nlist": numbers["nlist"]} for name in _IVF},
        }
        kind = self._index
        # Nested: a server reads these numbers so or flat, as pymilvus would send them; Lite only so, and passes over
        # flat ones.
        index.add_index("vector", index_type=kind, metric_type="L2", params={"params": built.get(kind, {})})
        options = {"schema": schema, "properties": {"sfumato": text}, "consistency_level": "Strong"}
        self._call("create_collection", options)
        self._call("create_index", {"index_params": index, "sync": False})  # nothing to wait for yet
        self._call("load_collection")

    def load(self) -> None:
        """Read the fingerprint and options of the collection, and load it for searching."""
        if not self._call("has_collection"):
            raise self.error(f"there is no collection {self._place.name}")
        described = self._call("describe_collection")
        try:
            note = json.loads(described.get("properties", {}).get("sfumato") or described.get("description") or "")
            refuse_newer(f"store {self.url}: collection {self._place.name}", note["sfumato"], FORMAT)
            self.dim, self.fingerprint = int(note["dim"]), str(note["fingerprint"])
            kept = dict(note["options"])
        except (ValueError, KeyError, TypeError):
            raise self.error(f"collection {self._place.name} was not made by sfumato; give another name") from None
        # Build options stay; search options may change.
        anew = {name: value for name, value in self._place.options.items() if name in _SEARCHING}
        self._options = {**_KEPT, **kept, **anew}
        self._call("load_collection")

    def upsert(self, records: Records) -> None:
        """More than about 16 MB are stored in several steps, each as a whole."""
        self.check_vectors(records)
        for key in records.ids:
            if len(_encoded(self.url, key)) > _LONGEST_ID:
                raise self.error(f"an id may have {_LONGEST_ID:,} bytes, got {len(key.encode()):,}: {key[:40]!r}...")
        columns = records.ids, records.vectors, records.uncertainty.tolist(), map(dict, records.payloads)
        rows = [dict(zip(_COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]
        for row in rows:
            _encoded(self.url, json.dumps(row["payload"], ensure_ascii=False))
        for part in _parts(rows, self._rows_a_message()):
            self._call("upsert", {"data": part})

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items; returns how many were there."""
        there = []
        for part in _parts(list(dict.fromkeys(ids)), 1000):
            wanted = {"filter": milvus_place.among(part), "output_fields": ["id"], "consistency_level": "Strong"}
            if found := [row["id"] for row in self._call("query", wanted)]:
                self._call("delete", {"filter": milvus_place.among(found)})
            there += found
        return len(there)

    def get(self, ids: Sequence[str]) -> Records:
        """Records by id, in the order of the ids."""
        rows: dict[str, dict[str, Any]] = {}
        for part in _parts(list(dict.fromkeys(ids)), min(1000, self._rows_a_message())):
            found = self._query({"filter": milvus_place.among(part), "output_fields": _COLUMNS})
            rows |= {row["id"]: row for row in found}
        return self._records(in_order(ids, rows))

    def search(self, queries: np.ndarray, k: int, filter: Filter | None = None) -> list[Records]:
        """More results than Milvus returns at once are found exactly, by a scan."""
        queries = self.check_queries(queries, k)
        if k > self.most_rows:
            return self._nearest_of_all(queries, k, filter)
        kind, numbers = self._index, {name: int(value) for name, value in self._options.items() if value.isdigit()}
        usual = {"HNSW": {"ef": max(k, numbers["ef"])}} | {name: {"nprobe": numbers["nprobe"]} for name in _IVF}
        utmost = {"HNSW": {"ef": 2 * self.most_rows}} | {name: {"nprobe": numbers["nlist"]} for name in _IVF}
        results = []
        c = min(k * numbers["overfetch"], max(k, self._rows_a_message())) if kind == milvus_place.SQ8 else k
        size = max(1, self._rows_a_message() // c)
        if self._place.file is not None and kind == "FLAT" and not (filter and (filter.where or filter.ranges)):
            size = 1  # Lite's exact search of many queries at once takes seven times as long as one after the other
        for part in _parts(queries, size):
            found = self._nearest(part, c, filter, usual.get(kind, {}))
            short = [i for i, rows in enumerate(found) if len(rows) < k]
            if short and kind in utmost:
                for i, rows in zip(short, self._nearest(part[short], c, filter, utmost[kind]), strict=True):
                    found[i] = rows
            results += found
        records = [self._records(rows) for rows in results]
        if kind == milvus_place.SQ8:
            records = [_nearest_of(found, query, k) for found, query in zip(records, queries, strict=True)]
        if kind != "FLAT" and self._place.file is None:
            self._complete(records, queries, k, filter)
        return records

    def _complete(self, records: list[Records], queries: np.ndarray, k: int, filter: Filter | None) -> None:
        """Scan for the queries that have fewer results than there are items, as before a server has its index.

        Until then, it searches an eighth of the items in temporary lists, whatever the search options say.
        """
        if all(len(found) == k for found in records):
            return
        least = min(k, self.count(filter))
        if short := [i for i, found in enumerate(records) if len(found) < least]:
            for i, found in zip(short, self._nearest_of_all(queries[short], k, filter), strict=True):
                records[i] = found

    def count(self, filter: Filter | None = None) -> int:
        """Number of items."""
        found = self._query({"filter": milvus_place.condition_on(filter), "output_fields": ["count(*)"]})
        return int(found[0]["count(*)"])

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """by id, and changes after the current id are seen."""
        condition, last = milvus_place.condition_on(filter), ""
        limit = min(batch, self._rows_a_message())
        while True:
            if not (rows := self._next(last, limit, _COLUMNS, condition)):
                return
            yield self._records(rows)
            last = rows[-1]["id"]

    def ids_after(self, after: str, n: int) -> list[str]:
        """The next ids in the order of their UTF-8 bytes."""
        found: list[str] = []
        while len(found) < n:
            rows = self._next(found[-1] if found else after, min(n - len(found), self.most_rows), ["id"])
            if not rows:
                break
            found += [row["id"] for row in rows]
        return found

    def _next(self, last: str, limit: int, columns: Sequence[str], condition: str = "") -> list[dict[str, Any]]:
        """Rows after an id, in the order of their ids."""
        after = f"id > {milvus_place.quoted(last)}" + (condition and f" and ({condition})")
        # "iterator" asks for the smallest ids in order. With reduce_stop_for_best, as pymilvus's query_iterator asks,
        # a server brings more than the limit, and refuses a page that becomes too large for it.
        smallest = {"iterator": "True", "reduce_stop_for_best": "False"}
        return self._query({"filter": after, "limit": limit, "output_fields": list(columns), **smallest})

    def _query(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        consistency = {"consistency_level": self._options["consistency"].capitalize()}
        return list(self._call("query", {**arguments, **consistency}))

    def optimise(self) -> None:
        """Write the log into segments, and wait for a server's index while it grows; Lite builds it afterwards."""
        self._call("flush")
        left, since = self._without_index() if self.waits_for_index else 0, time.monotonic()
        with progress_bar("waiting for the server's index", left) as advance:
            while left:
                time.sleep(_LOOK)
                last, left = left, self._without_index()
                advance(last - left)
                since = since if left == last else time.monotonic()
                waited = time.monotonic() - since
                asked = {"index_name": "vector"}
                if waited > _LOADED and not self._call("describe_index", asked)["pending_index_rows"]:
                    return  # The server builds none for these.
                if waited > self._seconds("describe_index"):
                    told = f"the server has {left:,} items without an index, as {waited:.0f} seconds before; searches"
                    way = "are slower until it has them; look at its log, or wait longer by ?call_timeout=SECONDS"
                    return warnings.warn(f"store {self.url}: {told} {way}", stacklevel=2)

    def _without_index(self) -> int:
        """Number of written items that a server does not search by an index yet; 0 for Lite, which does not say."""
        if self._index == "FLAT":  # A server builds none: every vector is compared.
            return 0
        if (loaded := self._call("list_loaded_segments")) is None:
            return 0
        ready = {segment.segment_id for segment in loaded if segment.index_name}
        try:
            written = [s for s in self._call("list_persistent_segments") if s.num_rows >= _LEAST_INDEXED]
        except UserError as error:
            if "segment not found" not in str(error):
                raise
            return 1  # The server has merged it with others during the call; their number is not known yet.
        return sum(segment.num_rows for segment in written if segment.segment_id not in ready)

    def close(self) -> None:
        """Close the connection; the last store of an embedded file closes the file."""
        if not self._closed:
            self._closed = True
            self._client.close()
            self._place.release()

    def _nearest(
        self, vectors: np.ndarray, k: int, filter: Filter | None, thorough: dict[str, int]
    ) -> list[list[dict[str, Any]]]:
        arguments = {
            "data": list(vectors),
            "anns_field": "vector",
            "limit": k,
            "filter": milvus_place.condition_on(filter),
            "output_fields": _COLUMNS,
            "search_params": {"metric_type": "L2", "params": thorough},
            "consistency_level": self._options["consistency"].capitalize(),
        }
        return [[hit["entity"] for hit in hits] for hits in self._call("search", arguments)]

    def _nearest_of_all(self, queries: np.ndarray, k: int, filter: Filter | None) -> list[Records]:
        """The nearest items of each query by a scan; only k ids and distances of each query are kept in memory."""
        ids: list[str] = []
        best = [(np.empty(0), np.empty(0, np.int64))] * len(queries)
        for part in self.scan(filter=filter):
            numbers = np.arange(len(ids), len(ids) + len(part))
            ids += part.ids
            for i, query in enumerate(queries.astype(np.float64)):
                distance = np.concatenate([best[i][0], ((part.vectors - query) ** 2).sum(1)])
                order = distance.argsort(kind="stable")[:k]
                best[i] = distance[order], np.concatenate([best[i][1], numbers])[order]
        return [self.get([ids[j] for j in found.tolist()]) for _, found in best]

    def _records(self, rows: Sequence[Mapping[str, Any]]) -> Records:
        columns = [(row["id"], row["uncertainty"], row["payload"]) for row in rows]
        return self.records(columns, [row["vector"] for row in rows])

    def _rows_a_message(self) -> int:
        return max(1, min(self.most_rows, self.most_bytes // (4 * self.dim + 1000)))

    def _call(self, method: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Call a method of the client on our collection; load it again first if the server was restarted."""
        with _one_at_a_time if self._place.file is not None else contextlib.nullcontext():
            return self._called(method, arguments or {})

    def _seconds(self, method: str) -> int:
        """Seconds that a call may take."""
        return int(self._place.options.get("call_timeout", 60)) * (10 if method in _LONG else 1)

    def _called(self, method: str, arguments: Mapping[str, Any]) -> Any:
        call: Callable[..., Any] = getattr(self._client, method)
        error_type, rpc_error = milvus_place.driver().MilvusException, importlib.import_module("grpc").RpcError
        limit = self._seconds(method)
        limits = {"timeout": limit, "retry_times": _RETRIES}
        try:
            try:
                return call(self._place.name, **arguments, **limits)
            except error_type as error:
                if error.code != 101:  # collection not loaded
                    raise
                loading = self._seconds("load_collection")
                self._client.load_collection(self._place.name, timeout=loading, retry_times=_RETRIES)
                return call(self._place.name, **arguments, **limits)
        except rpc_error as error:
            if method == "list_loaded_segments" and error.code().name == "UNIMPLEMENTED":
                return None  # by Lite
            raise self.error(f"{error.details()}; a call may take {limit} seconds, ?call_timeout=SECONDS") from None
        except Exception as error:
            if not isinstance(error, error_type) and not self._closed:
                raise
            raise self.error(milvus_place.message_of(error)) from None


def _parts(rows: Any, size: int) -> Iterator[Any]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


def _encoded(url: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"store {url}: text that is not Unicode (a lone surrogate): {text[:40]!r}") from None


def _nearest_of(candidates: Records, query: np.ndarray, k: int) -> Records:
    """The k nearest of the candidates of a query, by their full vectors in float64. query (e,)."""
    distance = ((candidates.vectors.astype(np.float64) - query) ** 2).sum(1)
    return candidates.take(distance.argsort(kind="stable")[:k].tolist())
