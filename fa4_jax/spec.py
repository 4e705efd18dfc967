"""What one attention call computes: `AttentionSpec` (static) and `Operands` (arrays).

Every implementation is a function `attend(spec, operands) -> (out, lse)` of these two. Dimensions
are named as in `jax.nn`: B batch, T queries, S keys, N query heads, K key/value heads, H head
dimension of query and key, Hv head dimension of value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

# Positions and windows stay below this bound, so that sums and differences of two of them, and of
# a row or key index, fit in int32. Windows at or above it are unlimited.
POSITION_LIMIT = 2**30


def sum_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of sums over arrays of a float dtype, whatever JAX's promotion rules are set to."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static part of a call: hashable, and everything that is not an array.

    Query i of batch b stands at position `i + query_offset[b]`; key j is inside its window when
    `position - left <= j <= position + right`. Causal attention is `right == 0`.

    Attributes:
      left: keys visible before the position, None for all of them.
      right: keys visible after the position, None for all of them.
      scale: factor of the logits, None when it is traced (`Operands.scale`).
      logits_soft_cap: c in `c * tanh(logits / c)`, None for no cap.
      deterministic: gradients must be bitwise equal from run to run.
      quantization: a frozen configuration of a quantised path, None for exact attention.
    """

    left: int | None = None
    right: int | None = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    deterministic: bool = False
    quantization: Hashable | None = None

    @property
    def has_window(self) -> bool:
        """Whether positions restrict which keys are visible (causal included)."""
        return self.left is not None or self.right is not None

    def in_window(self, positions: Array, keys: Array) -> Array:
        """True where key index `keys` lies in the window of `positions`; int32, broadcasting."""
        # Compared as a difference: position + right could leave int32, this cannot.
        ahead = keys - positions
        inside = jnp.ones(ahead.shape, bool)
        if self.left is not None:
            inside &= ahead >= -self.left
        if self.right is not None:
            inside &= ahead <= self.right
        return inside

    def block_in_window(
        self, first_position: Any, last_position: Any, first_key: Any, last_key: Any
    ):
        """Whether any position of a block may see any key of a block (inclusive int bounds)."""
        needed = True
        if self.right is not None:
            needed = needed & (first_key - last_position <= self.right)
        if self.left is not None:
            needed = needed & (last_key - first_position >= -self.left)
        return needed


class Sizes(NamedTuple):
    """The named dimensions of a call. B, T and S may be symbolic under `jax.export`."""

    B: Any
    T: Any
    S: Any
    N: int
    K: int
    H: int
    Hv: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Operands:
    """The arrays of a call, in canonical form; None where an argument was not given.

    Attributes:
      query: [B, T, N, H].
      key: [B, S, K, H], dtype of query; N is a multiple of K and query head n reads n // (N // K).
      value: [B, S, K, Hv], dtype of query.
      bias: [B|1, N|1, T|1, S|1], floating.
      mask: [B|1, N|1, T|1, S|1], bool, True = attend.
      query_seq_lengths: int32 [B]; rows at or past it are padding.
      key_value_seq_lengths: int32 [B]; keys at or past it are invisible.
      query_offset: int32 [B], within +-`POSITION_LIMIT`; the position of query 0.
      query_segment_ids: int32 [B, T].
      key_value_segment_ids: int32 [B, S]; given exactly when query_segment_ids is.
      sinks: [N] or [B, N], floating; an extra logit of each head's softmax denominator.
      scale: [] or [B], float32 (float64 for float64 inputs); given exactly when spec.scale is None.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    mask: Array | None = None
    query_seq_lengths: Array | None = None
    key_value_seq_lengths: Array | None = None
    query_offset: Array | None = None
    query_segment_ids: Array | None = None
    key_value_segment_ids: Array | None = None
    sinks: Array | None = None
    scale: Array | None = None

    @property
    def sizes(self) -> Sizes:
        """The named dimensions, read off query, key and value."""
        B, T, N, H = self.query.shape
        _, S, K, Hv = self.value.shape
        return Sizes(B, T, S, N, K, H, Hv)
