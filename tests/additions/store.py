"""A store in a dictionary of this process: the least that a store must do. Searches compare in float64."""

import numpy as np

from sfumato.errors import UserError
from sfumato.search.stores.protocol import Records


class ToyStore:
    """Records in a dictionary of this process; searches compare every vector in float64."""

    def __init__(self, url, dim, fingerprint):
        self.url, self.dim, self.fingerprint, self.kept = url, dim, fingerprint, {}

    def _records(self, ids):
        rows = [self.kept[i] for i in ids]
        if not rows:
            return Records.none(self.dim)
        vectors, uncertainty, payloads = zip(*rows, strict=True)
        return Records(tuple(ids), np.stack(vectors), np.stack(uncertainty), payloads)

    def _fitting(self, filter):
        rows = list(self.kept.items())
        return [i for i, (_, u, payload) in rows if filter is None or filter.accepts(payload, float(u))]

    def upsert(self, records):
        if records.vectors.shape[1] != self.dim:
            raise ValueError(f"toy: expected {self.dim} dimensions, got {records.vectors.shape[1]}")
        for i, key in enumerate(records.ids):
            self.kept[key] = (records.vectors[i], records.uncertainty[i], dict(records.payloads[i]))

    def delete(self, ids):
        return sum(self.kept.pop(i, None) is not None for i in dict.fromkeys(ids))

    def get(self, ids):
        return self._records([i for i in dict.fromkeys(ids) if i in self.kept])

    def search(self, queries, k, filter=None):
        if queries.shape[1] != self.dim:
            raise ValueError(f"toy: expected {self.dim} dimensions, got {queries.shape[1]}")
        if k < 1:
            raise ValueError(f"toy: k must be at least 1, got {k}")
        fitting = self._records(self._fitting(filter))
        distance = ((queries.astype(np.float64)[:, None] - fitting.vectors) ** 2).sum(2)
        return [fitting.take(row.argsort()[:k].tolist()) for row in distance]

    def count(self, filter=None):
        return len(self._fitting(filter))

    def ids_after(self, after, n):
        return sorted(id for id in self.kept if id > after)[:n]

    def scan(self, batch=4096, filter=None):
        records = self._records(self._fitting(filter))
        for start in range(0, len(records), batch):
            yield records.take(range(start, min(start + batch, len(records))))

    def optimise(self):
        pass

    def close(self):
        pass


_MADE = {}


def create(url, dim, fingerprint):
    """A new store."""
    if url in _MADE:
        raise UserError(f"store {url}: exists already")
    return _MADE.setdefault(url, ToyStore(url, dim, fingerprint))


def open(url):
    """The store of a URL."""
    if url not in _MADE:
        raise UserError(f"store {url}: there is none")
    return _MADE[url]
