"""Matrices of labels, dense or sparse: a large batch has few matches, and no room for a number of every pair."""

import torch
from torch import Tensor


def canonical(match: Tensor) -> Tensor:
    """A sparse matrix in the one layout that the functions here read; a dense one as it is. match (n, m)."""
    return match if match.layout == torch.strided else match.to_sparse_coo().coalesce()


def transposed(match: Tensor) -> Tensor:
    """The labels with rows and columns swapped. match (n, m) -> (m, n)."""
    return canonical(match.t())


def label_rows(match: Tensor, rows: slice) -> Tensor:
    """Some rows of a matrix of labels. match (n, m) -> (r, m)."""
    if not match.is_sparse:
        return match[rows]
    indices, values = _within(match, rows)
    size = rows.stop - rows.start, match.shape[1]
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=True, check_invariants=False)


def dense_labels(match: Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
    """A dense part of a matrix of labels. match (n, m) -> (r, c)."""
    if not match.is_sparse:
        return match[rows, columns]
    rows, columns = (slice(*r.indices(size)[:2]) for r, size in zip((rows, columns), match.shape, strict=True))
    (i, j), values = _within(match, rows)
    inside = (j >= columns.start) & (j < columns.stop)
    part = values.new_zeros(rows.stop - rows.start, columns.stop - columns.start)
    part[i[inside], j[inside] - columns.start] = values[inside]
    return part


def matched_rows(match: Tensor) -> Tensor:
    """Which rows have a match. match (n, m) -> (n,)."""
    if not match.is_sparse:
        return match.sum(1) > 0
    found = torch.zeros(match.shape[0], dtype=torch.bool, device=match.device)
    found[match.indices()[0][match.values() > 0]] = True
    return found


def _within(match: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Indices, counted from the first of the rows, and values; the indices of a coalesced matrix are sorted."""
    ends = torch.tensor([rows.start, rows.stop], device=match.device)
    first, last = torch.searchsorted(match.indices()[0].contiguous(), ends).tolist()
    indices = match.indices()[:, first:last].clone()
    indices[0] -= rows.start
    return indices, match.values()[first:last]
