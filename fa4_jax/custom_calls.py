"""One thin typed function per FFI target; ffi/forward.cc and ffi/backward.cc are the other side.

Everything is already checked and in canonical form here: no empty dimension, head dims multiples
of 8 up to 128, query heads a multiple of kv heads, windows and offsets within ``+-UNLIMITED``.
The handlers check ranks, dtypes and shapes once more before they use a stride. A typed call has a
fixed number of operands: an array that is None here is passed with its rank and a shape of zeros.

The lowered program names the operation and its static attributes, never an architecture: the
kernel is chosen on the device. For that reason the shapes of scratch results are rounded up to the
largest tile that any kernel uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from fa4_jax import bundle

FORWARD = "fa4_jax.forward.v1"
BACKWARD = "fa4_jax.backward.v1"

TARGETS = (FORWARD, BACKWARD)
"""All FFI targets, for ``jax.export.DisabledSafetyCheck.custom_call``."""

UNLIMITED = 2**30
"""A window side without limit, and the bound of query offsets: their sums stay in int32."""

QUERY_TILE = 128
"""Scratch arrays have T rounded up to this: the largest query tile of any backward kernel."""

HEAD_TILE = 64
"""Scratch arrays have H rounded up to this: the 16-bit columns of one 128-byte swizzle atom."""


def forward(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    query_offset: Array | None,
    query_segment_ids: Array | None,
    key_value_segment_ids: Array | None,
    segment_bounds: Array | None,
    sinks: Array | None,
    *,
    window_left: int,
    window_right: int,
    logits_soft_cap: float,
) -> tuple[Array, Array]:
    """Calls ``fa4_jax.forward.v1``.

    Args:
      query: ``[B, T, N, H]``, bfloat16 or float16.
      key: ``[B, S, K, H]``, query's dtype.
      value: ``[B, S, K, Hv]``, query's dtype.
      scale: float32 ``[B]``.
      query_seq_lengths: int32 ``[B]``, or None: all of T.
      key_value_seq_lengths: int32 ``[B]``, or None: all of S.
      query_offset: int32 ``[B]`` within ``+-UNLIMITED``, or None: 0.
      query_segment_ids: int32 ``[B, T]``, or None: all of one segment.
      key_value_segment_ids: int32 ``[B, S]``, given exactly when query_segment_ids is.
      segment_bounds: int32 ``[B, ceil(T / 64), 4]``, given exactly when the ids are:
        :func:`fa4_jax.segments.bounds` of query and key ids.
      sinks: float32 ``[B, N]``, an extra logit of each head that is neither scaled nor capped, or
        None.
      window_left: keys visible before a query's position, at most ``UNLIMITED``.
      window_right: keys visible after it, at most ``UNLIMITED``.
      logits_soft_cap: scaled logits z become ``cap * tanh(z / cap)``; 0: they stay.

    Returns:
      Output ``[B, T, N, Hv]`` in query's dtype and log-sum-exp, float32 ``[B, T, N]``.

    Raises:
      BundleError: the native part is not built.
    """
    bundle.library()
    results = (
        _like(query, "BTN_", (*query.shape[:3], value.shape[3]), query.dtype),
        _like(query, "BTN", query.shape[:3], jnp.float32),
    )
    out, lse = jax.ffi.ffi_call(FORWARD, results)(
        query,
        key,
        value,
        scale,
        _or_absent(query_seq_lengths, 1, jnp.int32),
        _or_absent(key_value_seq_lengths, 1, jnp.int32),
        _or_absent(query_offset, 1, jnp.int32),
        _or_absent(query_segment_ids, 2, jnp.int32),
        _or_absent(key_value_segment_ids, 2, jnp.int32),
        _or_absent(segment_bounds, 3, jnp.int32),
        _or_absent(sinks, 2, jnp.float32),
        window_left=np.int32(window_left),
        window_right=np.int32(window_right),
        logits_soft_cap=np.float32(logits_soft_cap),
    )
    return out, lse


def backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    scale: Array,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    query_offset: Array | None,
    query_segment_ids: Array | None,
    key_value_segment_ids: Array | None,
    segment_bounds: Array | None,
    *,
    window_left: int,
    window_right: int,
    logits_soft_cap: float,
) -> tuple[Array, Array, Array]:
    """Calls ``fa4_jax.backward.v1``.

    Args:
      query, key, value: as for :func:`forward`.
      out: ``[B, T, N, Hv]`` in query's dtype, of the forward call.
      lse: float32 ``[B, T, N]``, of the forward call; sinks are in it and need no other mention.
      dout: cotangent of ``out``.
      dlse: cotangent of ``lse``, or None: zero.
      scale, query_seq_lengths, key_value_seq_lengths, query_offset, query_segment_ids,
        key_value_segment_ids, window_left, window_right, logits_soft_cap: as for :func:`forward`.
      segment_bounds: int32 ``[B, ceil(S / 64), 4]``: :func:`fa4_jax.segments.bounds` of key and
        query ids, given exactly when the ids are.

    Returns:
      The cotangents of query, key and value, in their shapes and dtype.

    Raises:
      BundleError: the native part is not built.
    """
    bundle.library()
    batch, length, heads, head_dim = query.shape
    padded_length = _round_up(length, QUERY_TILE)
    padded_head_dim = _round_up(head_dim, HEAD_TILE)
    results = (
        _like(query, "BTN_", query.shape, query.dtype),
        _like(key, "BTN_", key.shape, key.dtype),
        _like(value, "BTN_", value.shape, value.dtype),
        # Scratch: the driver's memory is never asked for inside a handler.
        _like(query, "BN__", (batch, heads, padded_length, padded_head_dim), jnp.float32),
        _like(query, "BN_", (batch, heads, padded_length), jnp.float32),
        _like(query, "BN_", (batch, heads, padded_length), jnp.float32),
    )
    dq, dk, dv, *_ = jax.ffi.ffi_call(BACKWARD, results)(
        query,
        key,
        value,
        out,
        lse,
        dout,
        _or_absent(dlse, 3, jnp.float32),
        scale,
        _or_absent(query_seq_lengths, 1, jnp.int32),
        _or_absent(key_value_seq_lengths, 1, jnp.int32),
        _or_absent(query_offset, 1, jnp.int32),
        _or_absent(query_segment_ids, 2, jnp.int32),
        _or_absent(key_value_segment_ids, 2, jnp.int32),
        _or_absent(segment_bounds, 3, jnp.int32),
        window_left=np.int32(window_left),
        window_right=np.int32(window_right),
        logits_soft_cap=np.float32(logits_soft_cap),
    )
    return dq, dk, dv


def _or_absent(x: Array | None, rank: int, dtype: DTypeLike) -> Array:
    return jnp.zeros((0,) * rank, dtype) if x is None else x


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _like(x: Array, axes: str, shape: Sequence[int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a result: x's (with its varying manual axes) of another shape and dtype.

    Args:
      x: an array ``[B, T, N, H]``.
      axes: for each dimension of the result, the dimension of x along which it is sharded like x
        on an Explicit mesh, or ``_``.
      shape: of the result.
      dtype: of the result.
    """
    aval = jax.typeof(x)
    spec = dict(zip("BTNH", aval.sharding.spec, strict=True))
    sharding = aval.sharding.update(spec=PartitionSpec(*(spec.get(axis) for axis in axes)))
    return aval.update(shape=tuple(shape), dtype=jnp.dtype(dtype), sharding=sharding)
