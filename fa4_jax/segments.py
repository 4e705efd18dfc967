"""Segment ids for the kernels: which tiles may share a segment, and what nobody looks at.

Ids are compared by sorting those of one side and searching it for those of the other, never all
with all: O((T + S) log) integer operations beside the O(T S) of attention. Everything here also
works at symbolic sizes (``jax.export``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fa4_jax.spec import AttentionSpec, Operands

BLOCK = 64
"""Rows of one entry of :func:`bounds`: every kernel's tile has a multiple of it."""


def bounds(row_ids: Array, column_ids: Array) -> Array:
    """Which columns share a segment with the rows of each block of :data:`BLOCK` rows.

    Args:
      row_ids: int32 ``[B, R]``, of queries (forward) or keys (backward); R > 0.
      column_ids: int32 ``[B, C]``, of the other side; C > 0.

    Returns:
      int32 ``[B, ceil(R / 64), 4]``: begin, end, clear_begin, clear_end. Columns outside
      ``[begin, end)`` share no segment with any row of the block, columns in
      ``[clear_begin, clear_end)`` do with every row. An empty range has ``end <= begin``. The first
      is the smallest such range; the second the largest one if equal ids are neighbours in
      column_ids, and else it may be empty.
    """
    batch, num_rows = row_ids.shape
    num_columns = column_ids.shape[1]
    blocks = -(-num_rows // BLOCK)
    # The last row once more where rows are missing: it adds nothing to its block.
    padding = jnp.broadcast_to(row_ids[:, -1:], (batch, blocks * BLOCK - num_rows))
    rows = jnp.concatenate([row_ids, padding], axis=1).reshape(batch, blocks, BLOCK)

    every_column = (lax.iota(jnp.int32, 2) * num_columns).reshape(1, 1, 1, 2)
    order, ranks = _rank(column_ids, rows[..., None], every_column)
    first_rank, end_rank = ranks[..., 0], ranks[..., 1]
    count = end_rank - first_rank
    first = jnp.where(count > 0, _take(order, first_rank), num_columns)
    end = jnp.where(count > 0, _take(order, end_rank - 1) + 1, 0)
    begin, end = first.min(-1), end.max(-1)
    # All rows have one id, and its columns are neighbours.
    is_clear = (rows == rows[..., :1]).all(-1) & (end - begin == count[..., 0])
    return jnp.stack([begin, end, begin, jnp.where(is_clear, end, begin)], axis=-1)


def seen(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """What takes part in attention, as windows, lengths and segments together allow.

    Args:
      spec: left and right are used.
      operands: lengths, offset and segment ids are used; the ids are there.

    Returns:
      bool ``[B, T]``, whether a query sees any key, and bool ``[B, S]``, whether a key is seen by
      any query. What is stored elsewhere may be NaN.
    """
    query_ids, key_ids = operands.query_segment_ids, operands.key_value_segment_ids
    assert query_ids is not None and key_ids is not None
    query_lengths, key_lengths = operands.query_seq_lengths, operands.key_value_seq_lengths
    offset = 0 if operands.query_offset is None else operands.query_offset[:, None]
    queries = _sees(query_ids, key_ids, query_lengths, key_lengths, offset, spec.left, spec.right)
    # Seen from a key, the window is the mirror image.
    keys = _sees(key_ids, query_ids, key_lengths, query_lengths, -offset, spec.right, spec.left)
    return queries, keys


def _sees(
    ids: Array,
    others: Array,
    length: Array | None,
    others_length: Array | None,
    shift: Any,
    before: int | None,
    after: int | None,
) -> Array:
    """Whether any of ``others`` in the window of row ``r``, around ``r + shift``, has its id."""
    index = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    position = index + shift
    size = others.shape[1]
    begin = jnp.zeros_like(position) if before is None else jnp.maximum(position - before, 0)
    # The smaller position first: the sum might leave int32.
    end = size if after is None else jnp.minimum(position, size - after) + after + 1
    if others_length is not None:
        end = jnp.minimum(end, others_length[:, None])
    window = jnp.stack(jnp.broadcast_arrays(begin, end), axis=-1)
    _, ranks = _rank(others, ids[..., None], window)
    sees = ranks[..., 1] > ranks[..., 0]
    return sees if length is None else sees & (index < length[:, None])


def _rank(columns: Array, ids: Array, bounds: Array) -> tuple[Array, Array]:
    """How many columns come before each pair (id, index), in the order of such pairs.

    Hence ``rank(id, end) - rank(id, begin)`` columns from begin to end have that id.

    Args:
      columns: int32 ``[B, C]``.
      ids, bounds: int32, of one shape ``[B, ...]`` when broadcast.

    Returns:
      The sorted columns' indices ``[B, C]``, and the ranks.
    """
    indices = lax.broadcasted_iota(jnp.int32, columns.shape, 1)
    columns, order = lax.sort((columns, indices), dimension=1, is_stable=True, num_keys=1)
    size = columns.shape[1]
    rank = jnp.zeros_like(ids + bounds)
    # Unrolled, so that XLA can fuse the steps. A symbolic size has as many bits as any.
    for bit in reversed(range(size.bit_length() if isinstance(size, int) else 31)):
        last = rank + (2**bit - 1)
        column = _take(columns, last)
        before = (column < ids) | (column == ids) & (_take(order, last) < bounds)
        rank = jnp.where((last < size) & before, last + 1, rank)
    return order, rank


def _take(x: Array, index: Array) -> Array:
    """``x[b, index[b, ...]]``; an index that is none takes the nearest."""
    return jax.vmap(lambda row, at: jnp.take(row, at, mode="clip"))(x, index)
