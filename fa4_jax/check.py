"""``python -m fa4_jax check``: is every implementation right on this machine?

Runs one small forward and backward on each implementation that serves it here and compares output
and gradients with XLA attention in float32. The errors allowed are those of the library's rule:
``max|x - ref| <= 2 * max|ref16 - ref| + 1e-5`` with ``ref16`` dense attention in the inputs' own
dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

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


def _dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention as written on paper, probabilities rounded to the inputs' dtype."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    visible = jnp.tri(*logits.shape[2:], dtype=bool)
    logits = jnp.where(visible, logits * query.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits).astype(value.dtype), value)


def errors(implementation: str, dtype: str) -> dict[str, tuple[float, float]]:
    """Errors of one implementation on a causal call of :data:`SHAPE`.

    Args:
      implementation: one of :data:`fa4_jax.implementations.NAMES`, able to serve the call here.
      dtype: ``"bfloat16"`` or ``"float16"``.

    Returns:
      For out, dq, dk and dv: the largest absolute error and the largest one allowed.
    """
    _, operands = info.call(SHAPE, dtype)
    like = operands.query, operands.key, operands.value, operands.query
    seeds = jax.random.split(jax.random.key(0), len(like))
    arrays = tuple(
        jax.random.normal(seed, x.shape, dtype) for seed, x in zip(seeds, like, strict=True)
    )
    wide = tuple(x.astype(jnp.float32) for x in arrays)

    def attention(name):
        return lambda *qkv: dot_product_attention(*qkv, is_causal=True, implementation=name)

    with jax.default_matmul_precision("highest"):
        exact = _run(attention("xla"), wide)
    dense = _run(_dense, arrays)
    found = _run(attention(implementation), arrays)

    def distance(x, y):
        # NumPy's maximum is NaN where one element is; XLA's on the CPU passes over them.
        return float(np.max(np.abs(x - y)))

    return {
        name: (distance(x, ref), 2 * distance(ref16, ref) + 1e-5)
        for name, x, ref16, ref in zip(RESULTS, found, dense, exact, strict=True)
    }


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
            found = errors(name, dtype)
            # Written so that NaN is wrong.
            wrong = [result for result, (error, limit) in found.items() if not error <= limit]
            cells = (f"{r} {error:.1e} (<= {limit:.1e})" for r, (error, limit) in found.items())
            print(f"{name:<9}{dtype:<9} {'WRONG' if wrong else 'right'}  " + "  ".join(cells))
            status = 1 if wrong else status
    return status
