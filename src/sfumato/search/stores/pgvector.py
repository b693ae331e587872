"""Records in a table of PostgreSQL with the extension pgvector, 0.8 or later. Needs the extra `pgvector`.

    postgresql://user@host:5432/database?table=name&index=hnsw

The password may stand in the URL (special characters as %2F) or in PGPASSWORD, as for psql. Options: _OPTIONS.

A server that does not answer at all, as one that hangs, loses its connection 10 seconds after statement_timeout.
Options given to `create_store` are kept with the table; options given to `open_store` replace them. pgvector indexes at
most 2,000 dimensions of whole vectors, so longer ones (wasserstein2 of more than 1,000) are compressed in the index or
searched exactly. An index of compressed vectors finds candidates, which the full vectors rank. If an index returns
fewer than k results, as under a narrow filter, that query is searched again exactly. A big index is built fast only if
it fits in the server's maintenance_work_mem.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.errors import UserError, first_line, need, refuse_newer
from sfumato.search.stores import protocol
from sfumato.search.stores.pgvector_connections import Connections
from sfumato.search.stores.protocol import WORDS, Filter, Option, Records, StoreBase, in_order, options, redacted

_OPTIONS = {
    "table": Option("name or schema.name", default="sfumato"),
    "index": Option("none, exact; hnsw or ivfflat, built by optimise", default="none"),
    "compress": Option("of the index: half, two bytes for each number; binary, a bit; or none", default="none"),
    "overfetch": Option("compress: number of candidates for each result; half 4, binary 100 if left out", 1),
    "m": Option("hnsw: links, 16 if left out", 1),
    "ef_construction": Option("hnsw: number of candidates while building, 64 if left out", 1),
    "ef_search": Option("hnsw: number of candidates while searching, 64 if left out; never fewer than the results", 1),
    "lists": Option("ivfflat: number of lists, the square root of the number of items if left out", 1),
    "probes": Option("ivfflat: number of lists that a search reads, an eighth and at least 8 if left out", 1),
    "sslmode": Option("as for psql"),
    "sslrootcert": Option("as for psql"),
    "host": Option("as for psql; it may be the folder of a Unix socket"),
    "connect_timeout": Option("seconds, as for psql", 1, "5"),
    "statement_timeout": Option("seconds that a statement may take, 0 for any; optimise may take any", 0, "60"),
    "tcp_user_timeout": Option("seconds until sent data must be acknowledged, 0 for that of the system", 0, "30"),
    "keepalives_idle": Option("seconds until a silent connection is probed", 1, "30"),
    "keepalives_interval": Option("seconds between probes", 1, "10"),
    "keepalives_count": Option("number of probes", 1, "3"),
}
FORMAT = 1
"""The version of the table, in its comment."""

_KEPT = ("index", "compress", "overfetch", "m", "ef_construction", "ef_search", "lists", "probes")
_LIMITS = {name: str(option.default) for name, option in _OPTIONS.items() if (option.default or "").isdigit()}
"""Without them a lost network or a server that hangs would hold a search for as long as it lasts."""
_CONNECTION = ("sslmode", "sslrootcert", "host", *_LIMITS)
_MOST_STORED, _MOST_EF = 16000, 1000


@dataclass(frozen=True)
class _Code:
    """What an index keeps of a vector."""

    expression: str  # of a vector {0} of {1} dimensions
    operator: str
    operators: str  # the operator class
    most: int  # dimensions
    overfetch: int  # candidates for each result, if left out


_CODES = {
    "none": _Code("{0}", "<->", "vector_l2_ops", 2000, 1),
    "half": _Code("({0}::halfvec({1}))", "<->", "halfvec_l2_ops", 4000, 4),
    "binary": _Code("(binary_quantize({0})::bit({1}))", "<~>", "bit_hamming_ops", _MOST_STORED, 100),
}
_LEAST_VERSION = "0.8"
"""The first version of pgvector whose indexes go on until enough results pass a filter."""
_LONGEST_ID = 2000
"""Bytes; the index of the primary key holds no more than 2,704."""
_COLUMNS = "id, embedding, uncertainty, payload"
_WORDS = f"to_tsvector('simple', payload ->> '{WORDS}')"
_HAS_WORDS = f"payload ? '{WORDS}'"


def create(url: str, dim: int, fingerprint: str) -> "PgVectorStore":
    """Make an empty table."""
    store = PgVectorStore(url, _read_options(url), dim, fingerprint)
    if dim > _MOST_STORED or (dim > store.code.most and store.index != "none"):
        most = f"at most {_CODES['none'].most:,}, {_CODES['half'].most:,} with compress=half, all with compress=binary"
        limits = f"pgvector stores at most {_MOST_STORED:,} dimensions and indexes {most}"
        raise UserError(f"store {store.url}: {limits}, got {dim:,}; index=none searches exactly")
    store.make()
    return store


def open(url: str) -> "PgVectorStore":
    """Open a table."""
    given = _read_options(url)
    asking = PgVectorStore(url, given, 0, "")
    note = asking.note()
    asking.close()
    return PgVectorStore(url, {**note["options"], **given}, note["dim"], note["fingerprint"])


class PgVectorStore(StoreBase):
    """A table (id, embedding, uncertainty, payload); its comment holds the fingerprint and the options."""

    def __init__(self, url: str, chosen: Mapping[str, str], dim: int, fingerprint: str) -> None:
        with need("pgvector", "stores in PostgreSQL need psycopg"):
            import psycopg.conninfo
            import psycopg.sql
        self._psycopg: Any = psycopg
        limits = _LIMITS | {name: chosen[name] for name in _CONNECTION if name in chosen}
        self._connections = Connections(self._psycopg, url, limits)
        self._options = {name: chosen[name] for name in _KEPT if name in chosen}
        self.url, self.dim, self.fingerprint = self._connections.url, dim, fingerprint
        self.index, self.code = self._options.get("index", "none"), _CODES[self._options.get("compress", "none")]
        self._name = chosen.get("table", "sfumato")
        self._table = self._psycopg.sql.Identifier(*self._name.split("."))

    def make(self) -> None:
        """Create the table."""
        errors = self._psycopg.errors
        with self._connections.borrow() as connection:
            try:
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            except (errors.FeatureNotSupported, errors.UndefinedFile, errors.InsufficientPrivilege) as error:
                sources = "(package postgresql-NN-pgvector, or an image pgvector/pgvector)"
                way = f"install it on the server {sources}, and let an administrator run CREATE EXTENSION vector"
                raise self.error(f"this database has no pgvector ({first_line(error)}); {way}") from None
            self._check_version(connection)
            columns = 'id text COLLATE "C" PRIMARY KEY, embedding vector({dim}) NOT NULL, uncertainty real NOT NULL'
            create = f"CREATE TABLE {{table}} ({columns}, payload jsonb NOT NULL)"
            try:
                connection.execute(self._sql(create, {"dim": self.dim}))
            except errors.DuplicateTable:
                way = "open it, or give another name: ?table=..."
                raise self.error(f"table {self._name} already exists; {way}") from None
            # Stored in the row if it fits, not in a separate table, because an exact search reads every vector.
            connection.execute(self._sql("ALTER TABLE {table} ALTER COLUMN embedding SET STORAGE MAIN"))
            note = {"sfumato": FORMAT, "dim": self.dim, "fingerprint": self.fingerprint, "options": self._options}
            connection.execute(self._sql("COMMENT ON TABLE {table} IS {note}", {"note": json.dumps(note)}))

    def _check_version(self, connection: Any) -> None:
        """Refuse an early pgvector."""
        asked = "SELECT extversion, string_to_array(extversion, '.')::int[] >= string_to_array(%s, '.')::int[]"
        asked += " FROM pg_extension WHERE extname = 'vector'"
        version, late = connection.execute(asked, [_LEAST_VERSION]).fetchone()
        if not late:
            way = "install a later one on the server and run ALTER EXTENSION vector UPDATE"
            raise self.error(f"needs pgvector {_LEAST_VERSION} or later, and this database has {version}; {way}")

    def _index_words(self, connection: Any) -> None:
        """Make the index of words, unless there is one."""
        name = _index_name(self._name, "words")
        if not self._indexes(connection, name):
            using = f"USING gin ({_WORDS}) WHERE {_HAS_WORDS}"
            parts = {"name": self._psycopg.sql.Identifier(name)}
            connection.execute(self._sql("CREATE INDEX IF NOT EXISTS {name} ON {table} " + using, parts))

    def note(self) -> dict[str, Any]:
        """Read the comment of the table."""
        with self._connections.borrow() as connection:
            found = connection.execute(
                "SELECT obj_description(to_regclass(%s), 'pg_class'), to_regclass(%s) IS NOT NULL",
                [name := self._table.as_string(connection), name],
            ).fetchone()
            if not found[1]:
                raise self.error(f"there is no table {self._name}")
            self._check_version(connection)
        try:
            note = json.loads(found[0] or "")
            refuse_newer(f"store {self.url}: table {self._name}", note["sfumato"], FORMAT)
            kept = {name: str(value) for name, value in dict(note["options"]).items() if name in _KEPT}
            found = {"dim": int(note["dim"]), "fingerprint": str(note["fingerprint"]), "options": kept}
        except (ValueError, KeyError, TypeError):
            raise self.error(f"table {self._name} was not made by sfumato; give another name: ?table=...") from None
        # Whoever may write to the table may have changed its comment, and the options become part of statements.
        _check_options(f"store {self.url}: the comment of table {self._name}", kept)
        return found

    def upsert(self, records: Records) -> None:
        """in one transaction, all or none."""
        self.check_vectors(records)
        if not len(records):
            return
        rows = _binary_rows(self.url, records)
        with self._connections.borrow() as connection:
            if any(WORDS in payload for payload in records.payloads):
                self._index_words(connection)
            connection.execute(self._sql("CREATE TEMP TABLE incoming (LIKE {table}) ON COMMIT DROP"))
            with connection.cursor().copy(f"COPY pg_temp.incoming ({_COLUMNS}) FROM STDIN (FORMAT BINARY)") as copy:
                for row in rows:
                    copy.write(row)
            change = "embedding = excluded.embedding, uncertainty = excluded.uncertainty, payload = excluded.payload"
            added = f"INSERT INTO {{table}} ({_COLUMNS}) SELECT {_COLUMNS} FROM pg_temp.incoming"
            connection.execute(self._sql(f"{added} ON CONFLICT (id) DO UPDATE SET {change}"))

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items; returns how many were there."""
        with self._connections.borrow() as connection:
            return int(connection.execute(self._sql("DELETE FROM {table} WHERE id = ANY(%s)"), [list(ids)]).rowcount)

    def get(self, ids: Sequence[str]) -> Records:
        """Records by id, in the order of the ids."""
        with self._connections.borrow() as connection:
            query = self._sql(f"SELECT {_COLUMNS} FROM {{table}} WHERE id = ANY(%s)")
            found = {row[0]: row for row in connection.execute(query, [list(ids)], binary=True)}
        return self._records(in_order(ids, found))

    def search(self, queries: np.ndarray, k: int, filter: Filter | None = None) -> list[Records]:
        """The nearest items of each query. queries (n, e)."""
        queries = self.check_queries(queries, k)
        condition, values = self._where(filter)
        stored, asked = (self.code.expression.format(vector, self.dim) for vector in ("embedding", "%s::vector"))
        by_index, exact = (
            f"SELECT {_COLUMNS} FROM {{table}} {{where}} ORDER BY {key} LIMIT %s"
            for key in (f"{stored} {self.code.operator} {asked}", "(embedding <-> %s::vector) + 0")  # no index has sums
        )
        by_index = f"SELECT {_COLUMNS} FROM ({by_index}) AS candidates ORDER BY embedding <-> %s::vector LIMIT %s"
        vectors = ["[" + ",".join(map(repr, row)) + "]" for row in queries.tolist()]
        results = []
        with self._connections.borrow() as connection:
            c = self._prepare_index(connection, k)
            ways = [(by_index, [c, k]), (exact, [k])][not c :]
            for vector in vectors:
                for way, limits in ways:
                    given = [*values, *(each for limit in limits for each in (vector, limit))]
                    rows = connection.execute(self._sql(way, {"where": condition}), given, binary=True).fetchall()
                    if len(rows) == k:
                        break
                results.append(self._records(rows))
        return results

    def match_words(self, stems: Sequence[str], n: int, filter: Filter | None = None) -> list[str]:
        """The ids of the items that have the most of some word stems, by ts_rank."""
        if not stems:
            return []
        condition, values = self._where(filter, [f"{_HAS_WORDS} AND {_WORDS} @@ wanted"])
        sql = self._psycopg.sql.SQL
        wanted = sql(" || ").join([sql("plainto_tsquery('simple', %s)")] * len(stems))
        text = f"SELECT id FROM {{table}}, (SELECT {{wanted}} AS wanted) AS w {{where}} ORDER BY ts_rank({_WORDS},"
        query = self._sql(text + " wanted) DESC, id LIMIT %s", {"wanted": wanted, "where": condition})
        with self._connections.borrow() as connection:
            return [id for (id,) in connection.execute(query, [*stems, *values, n]).fetchall()]

    def count(self, filter: Filter | None = None) -> int:
        """Number of items."""
        condition, values = self._where(filter)
        with self._connections.borrow() as connection:
            found = connection.execute(self._sql("SELECT count(*) FROM {table} {where}", {"where": condition}), values)
            return int(found.fetchone()[0])

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """items as they were at the start. It holds a connection until it ends."""
        condition, values = self._where(filter)
        with self._connections.borrow() as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            with connection.cursor("scan", binary=True) as cursor:
                cursor.execute(self._sql(f"SELECT {_COLUMNS} FROM {{table}} {{where}}", {"where": condition}), values)
                while rows := cursor.fetchmany(batch):
                    yield self._records(rows)

    def ids_after(self, after: str, n: int) -> list[str]:
        """The next ids in the order of their UTF-8 bytes."""
        text = "SELECT id FROM {table} WHERE id > %s ORDER BY id LIMIT %s"
        with self._connections.borrow() as connection:
            return [id for (id,) in connection.execute(self._sql(text), [after, n]).fetchall()]

    def optimise(self) -> None:
        """Rebuild the index, if the options name one; meanwhile others can read, and writers wait."""
        identifier = self._psycopg.sql.Identifier
        numbers = {key: int(self._options[key]) for key in ("m", "ef_construction", "lists") if key in self._options}
        with self._connections.borrow(limited=False) as connection:
            connection.execute("SET LOCAL statement_timeout = 0")
            if self.index == "ivfflat":
                rows = connection.execute(self._sql("SELECT count(*) FROM {table}")).fetchone()[0]
                numbers.setdefault("lists", _usual_lists(rows))
            if self.index != "none":
                settings = ", ".join(f"{key} = {number}" for key, number in numbers.items())
                key = self.code.expression.format("embedding", self.dim)
                using = f"USING {self.index} ({key} {self.code.operators})" + (settings and f" WITH ({settings})")
                name = _index_name(self._name, self.index)
                new = identifier(name + "_new")
                connection.execute(self._sql("CREATE INDEX {new} ON {table} " + using, {"new": new}))
                for schema, old in self._indexes(connection, name):
                    connection.execute(self._sql("DROP INDEX {old}", {"old": identifier(schema, old)}))
                [(schema, _)] = self._indexes(connection, name + "_new")
                parts = {"new": identifier(schema, name + "_new"), "name": identifier(name)}
                connection.execute(self._sql("ALTER INDEX {new} RENAME TO {name}", parts))
            connection.execute(self._sql("ANALYZE {table}"))

    def _indexes(self, connection: Any, name: str) -> list[tuple[str, str]]:
        """(schema, name) of the index of this table, and of no other, that has this name."""
        found = connection.execute(
            "SELECT n.nspname, c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n"
            " ON n.oid = c.relnamespace WHERE i.indrelid = to_regclass(%s) AND c.relname = %s",
            [self._table.as_string(connection), name],
        )
        return list(found.fetchall())

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def _sql(self, text: str, parts: Mapping[str, Any] | None = None) -> Any:
        sql = self._psycopg.sql
        wrapped = {
            name: part if isinstance(part, sql.Composable) else sql.Literal(part)
            for name, part in (parts or {}).items()
        }
        return sql.SQL(text).format(table=self._table, **wrapped)

    def _where(self, filter: Filter | None, others: Sequence[str] = ()) -> tuple[Any, list[Any]]:
        conditions = list(others)
        values: list[Any] = []
        if filter is not None and filter.max_uncertainty is not None:
            conditions.append("uncertainty <= %s::float8")
            values.append(filter.max_uncertainty)
        for name, allowed, ranges in filter.conditions() if filter is not None else ():
            fit = ["payload ->> %s = ANY(%s::text[])"]
            values += [name, list(allowed)]
            for least, below in ranges:
                ends = [(">=" if least else ">", least), *([("<", below)] if below else [])]
                fit.append(" AND ".join(f'(payload ->> %s) COLLATE "C" {sign} %s' for sign, _ in ends))
                values += [part for _, end in ends for part in (name, end)]
            conditions.append(f"({' OR '.join(fit)})")
        return self._psycopg.sql.SQL("WHERE " + " AND ".join(conditions) if conditions else ""), values

    def _prepare_index(self, connection: Any, k: int) -> int:
        """Set the index's search options for this transaction; return the number of candidates, 0 for no index."""
        if self.index == "none" or (self.index == "hnsw" and k > _MOST_EF):
            return 0
        c = k if self.code.overfetch == 1 else k * int(self._options.get("overfetch", self.code.overfetch))
        if self.index == "hnsw":
            c = min(c, _MOST_EF)
            ef_search = min(_MOST_EF, max(c, int(self._options.get("ef_search", 64))))
            settings: dict[str, Any] = {"hnsw.ef_search": ef_search}
        else:
            lists = int(self._options.get("lists", 0)) or _usual_lists(self._rows(connection))
            settings = {"ivfflat.probes": int(self._options.get("probes", 0)) or max(8, lists // 8)}
        # An index goes on until k results pass the filter.
        settings[f"{self.index}.iterative_scan"] = "strict_order" if self.index == "hnsw" else "relaxed_order"
        for name, value in settings.items():
            connection.execute("SELECT set_config(%s, %s, true)", [name, str(value)])
        return c

    def _rows(self, connection: Any) -> int:
        """Approximate number of rows, as of the last `optimise`."""
        sql = "SELECT reltuples FROM pg_class WHERE oid = to_regclass(%s)"
        return max(0, int(connection.execute(sql, [self._table.as_string(connection)]).fetchone()[0]))

    def _records(self, rows: list[tuple[str, bytes, float, dict[str, str]]]) -> Records:
        # Four bytes of header, then the numbers in network order.
        numbers = np.frombuffer(b"".join([row[1][4:] for row in rows]), dtype=">f4")
        return self.records([(i, uncertainty, payload) for i, _, uncertainty, payload in rows], numbers)


def _read_options(url: str) -> dict[str, str]:
    given = options(url, _OPTIONS)
    _check_options(f"store {redacted(url)}", given)
    if not re.fullmatch(r"[^.%\0]+(\.[^.%\0]+)?", given.get("table", "sfumato")):
        found = f"got {given['table']!r}"
        raise UserError(f"store {redacted(url)}: table must be a name or schema.name, without %, {found}")
    return given


def _check_options(where: str, given: Mapping[str, str]) -> None:
    """Refuse an unknown index or compression and what is no number."""
    protocol.check_choice(where, "index", given.get("index", "none"), ("none", "hnsw", "ivfflat"))
    protocol.check_choice(where, "compress", compress := given.get("compress", "none"), tuple(_CODES))
    if compress != "none" and given.get("index", "none") == "none":
        raise UserError(f"{where}: compress={compress} is of an index; add index=hnsw or index=ivfflat")
    protocol.check_numbers(where, given, _OPTIONS)


def _index_name(table: str, index: str) -> str:
    """The name of the index of a table; PostgreSQL cuts names after 63 bytes."""
    start = table.rpartition(".")[2].encode()[:24].decode(errors="ignore")
    return f"{start}_{hashlib.sha256(table.encode()).hexdigest()[:16]}_{index}"


def _usual_lists(n: int) -> int:
    return max(1, round(math.sqrt(n)))


def _binary_rows(url: str, records: Records) -> Iterator[bytes]:
    """PostgreSQL's binary COPY format: a header, rows of (length, bytes), a trailer."""
    vectors = records.vectors.astype(">f4")
    head = struct.pack(">HH", vectors.shape[1], 0)
    rows = []
    columns = records.ids, vectors, records.uncertainty.tolist(), records.payloads
    for id, vector, uncertainty, payload in zip(*columns, strict=True):
        key, document = id.encode(), json.dumps(dict(payload), ensure_ascii=False).encode()
        if len(key) > _LONGEST_ID:
            raise UserError(f"store {url}: an id may have {_LONGEST_ID:,} bytes, got {len(key):,}: {id[:40]!r}...")
        fields = (key, head + vector.tobytes(), struct.pack(">f", uncertainty), b"\x01" + document)
        rows.append(b"\0\4" + b"".join(struct.pack(">i", len(part)) + part for part in fields))
    yield b"PGCOPY\n\xff\r\n\0" + bytes(8)
    yield from rows
    yield b"\xff\xff"
