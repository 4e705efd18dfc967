"""``python -m fa4_jax check``: is every implementation right on this machine?

Runs one small forward and backward on each implementation that serves it here and compares output
and gradients with XLA attention in float32. The errors allowed are those of the library's rule:
``max|x - ref| <= 2 * max|ref16 - ref| + 1e-5`` with ``ref16`` dense attention in the inputs' own
dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fa4_jax import implementations, info
from fa4_jax.api import dot_product_attention

RESULTS = ("out", "dq", "dk", "dv")
# Batch, queries, keys, query heads, key/value heads, head dim: grouped heads, and lengths that are
# no multiple of a tile. Small, since the emulator runs it too.
SHAPE = (1, 100, 140, 2, 1, 64)


def _run(attention: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Output and gradients of query, key and value as float32 NumPy arrays."""

    @jax.jit
    def run(query, key, value, cotangent):
        out, pullback = jax.vjp(attention, query, key, value)
        return [x.astype(jnp.float32) for x in (out, *pullback(cotangent))]

    return [np.asarray(x) for x in run(*arrays)]


def dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    left: int | None = None,
    right: int | None = 0,
    *,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
) -> jax.Array:
    """Attention as written on paper, probabilities rounded to the inputs' dtype.

    Args:
      query, key, value: ``[B, T, N, H]``, ``[B, S, K, H]`` and ``[B, S, K, Hv]``.
      left, right: keys visible before and after a query's position, None = all; by default causal.
      query_segment_ids, key_value_segment_ids, logits_soft_cap, sinks: as for
        ``dot_product_attention``.

    Returns:
      ``[B, T, N, Hv]``; a row that sees no key is 0.
    """
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    logits = logits * query.shape[-1] ** -0.5
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    distance = jnp.arange(logits.shape[3]) - jnp.arange(logits.shape[2])[:, None]
    visible = jnp.ones(distance.shape, bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if query_segment_ids is not None and key_value_segment_ids is not None:
        ids = jnp.asarray(query_segment_ids), jnp.asarray(key_value_segment_ids)
        visible &= ids[0][:, None, :, None] == ids[1][:, None, None]
    # A finite number for what is masked: rows without a key have gradients too, and they are 0.
    logits = jnp.where(visible, logits, -1e30)
    if sinks is not None:
        one_more = jnp.broadcast_to(jnp.asarray(sinks)[:, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, one_more], axis=-1)
    weights = jax.nn.softmax(logits)[..., : visible.shape[-1]]
    weights = jnp.where(visible, weights, 0).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def inputs(shape: tuple[int, int, int, int, int, int], dtype: str) -> tuple[jax.Array, ...]:
    """Normal query, key, value and cotangent of the output; always the same ones.

    Args:
      shape: batch, queries, keys, query heads, key/value heads, head dimension.
      dtype: of all four.
    """
    _, operands = info.call(shape, dtype)
    like = operands.query, operands.key, operands.value, operands.query
    seeds = jax.random.split(jax.random.key(0), len(like))
    return tuple(
        jax.random.normal(seed, x.shape, dtype) for seed, x in zip(seeds, like, strict=True)
    )


def compare(
    found: Sequence[np.ndarray], rounded: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> dict[str, tuple[float, float]]:
    """For each of :data:`RESULTS` that is there: the largest error and the largest one allowed.

    Args:
      found: the results under test.
      rounded: those of :func:`dense` in the inputs' dtype.
      exact: those of float32 attention.
    """

    def distance(x, y):
        # NumPy's maximum is NaN where one element is; XLA's on the CPU passes over them.
        return float(np.max(np.abs(x - y)))

    return {
        name: (distance(x, ref), 2 * distance(ref16, ref) + 1e-5)
        for name, x, ref16, ref in zip(RESULTS, found, rounded, exact, strict=False)
    }


def verdict(errors: dict[str, tuple[float, float]]) -> tuple[bool, str]:
    """Whether every error is allowed, and that in words."""
    # Written so that NaN is wrong.
    right = all(error <= limit for error, limit in errors.values())
    cells = (f"{name} {error:.1e} (<= {limit:.1e})" for name, (error, limit) in errors.items())
    return right, f"{'right' if right else 'WRONG'}  " + "  ".join(cells)


def errors(implementation: str, dtype: str) -> dict[str, tuple[float, float]]:
    """Errors of one implementation on a causal call of :data:`SHAPE`.

    Args:
      implementation: one of :data:`fa4_jax.implementations.NAMES`, able to serve the call here.
      dtype: ``"bfloat16"`` or ``"float16"``.

    Returns:
      For out, dq, dk and dv: the largest absolute error and the largest one allowed.
    """
    arrays = inputs(SHAPE, dtype)
    wide = tuple(x.astype(jnp.float32) for x in arrays)

    def attention(name):
        return lambda *qkv: dot_product_attention(*qkv, is_causal=True, implementation=name)

    with jax.default_matmul_precision("highest"):
        exact = _run(attention("xla"), wide)
    rounded = _run(dense, arrays)
    return compare(_run(attention(implementation), arrays), rounded, exact)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each implementation and dtype; returns 1 if one is wrong, else 0."""
    argparse.ArgumentParser(
        prog="python -m fa4_jax check",
        description="Compares a small forward and backward of every implementation with XLA "
        "attention in float32.",
    ).parse_args(argv)
    print(info.machine())
    status = 0
    for dtype in implementations.KERNEL_DTYPES:
        call = info.call(SHAPE, dtype, is_causal=True)
        for name, reasons in info.refusals(*call).items():
            if reasons:
                print(f"{name:<9}{dtype:<9} cannot run here: {'; '.join(reasons)}")
                continue
            right, words = verdict(errors(name, dtype))
            print(f"{name:<9}{dtype:<9} {words}")
            status = status if right else 1
    return status
