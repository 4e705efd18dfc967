"""Backward pass of quantised attention, from what the forward saved.

Nothing of size T x S is kept: scores are recomputed from the saved query and key payloads and
scales, the very bytes the forward multiplied, and probabilities from them and the saved lse. All
five products run on FP8 operands with float32 accumulators:

    P  = E4M3(2**(z - lse * log2(e) + 8))           lift 256
    dP = dO V^T                                     dO in E5M2, V in E4M3, each lifted per head
    dS = E4M3((P / 256) * (dP - delta) * lift_dS)   delta = rowsum(out * dO) - dlse
    dV = P^T dO      dQ = scale * dS K      dK = scale * dS^T Q      from E4M3 K and Q

Each lift is a power of two, applied before a rounding and taken out of the float32 product again,
so that no lift changes what a gradient means. The lift of dO and of dS is chosen per batch and
kv head from |dO| (and, for dS, |V|), shared by the query heads of the group because dK and dV sum
over them.

Source: "Hardware-Aware FP4 FlashAttention-4" (R. Hu, 2026), section 8. Its fixed lift of dS
underflows once |dO| is small; the lift chosen here does not depend on the loss scale.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fa4_jax import quantized_forward as fwd
from fa4_jax.quantize import elements
from fa4_jax.quantize.containers import Quantized
from fa4_jax.spec import AttentionSpec

PROBABILITY_LIFT = 8
# E4M3 spans 2**-9 (smallest) to 448. |dS| is at most about half of |dP - delta|, whose size is
# the norm of a dO row times that of a V row; most of dS is smaller by the number of keys.
DS_TARGET = 10


class Saved(NamedTuple):
    """What the forward keeps for the backward.

    inputs: quantised operands; value in E4M3 serves both directions.
    query8, key8: E4M3 views, the operands of dK and dQ.
    out: [B, T, N, Hv] in the dtype of the call; lse: float32 [B, T, N].
    """

    inputs: fwd.Inputs
    query8: Quantized
    key8: Quantized
    out: jax.Array
    lse: jax.Array


class Gradients(NamedTuple):
    """float32 gradients in the operands' shapes, and how much FP8 lost of dO and dS.

    The fractions count elements that became 0 although they were not 0, among those that were not:
    float32 scalars. `ds_saturated` is the fraction of dS beyond E4M3's largest value.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    scale: jax.Array
    dout_zero: jax.Array
    ds_zero: jax.Array
    ds_saturated: jax.Array


def dout_lift(dout: jax.Array, kv_heads: int) -> jax.Array:
    """Exponent int32 [B, K] that brings a group's largest |dO| into [2**14, 2**15) for E5M2."""
    amax = jnp.max(jnp.abs(dout), axis=(1, 3)).reshape(dout.shape[0], kv_heads, -1).max(-1)
    return jnp.where(amax == 0, 0, jnp.clip(14 - elements.exponent(amax), -126, 126))


def ds_lift(dout: jax.Array, value: jax.Array) -> jax.Array:
    """Exponent int32 [B, K] of the lift of dS, from the longest rows of dO and V.

    dout [B, T, N, Hv], value [B, S, K, Hv].
    """
    B, _, K, _ = value.shape

    def row_norm(x):
        return jnp.sqrt(jnp.max(jnp.sum(x * x, axis=-1), axis=1))

    bound = row_norm(dout).reshape(B, K, -1).max(-1) * row_norm(value)
    return jnp.where(bound == 0, 0, jnp.clip(DS_TARGET - elements.exponent(bound), -126, 126))


def backward(spec: AttentionSpec, saved: Saved, dout: jax.Array, dlse: jax.Array) -> Gradients:
    """Gradients of quantised attention; memory is linear in T and S.

    Args:
      spec: window; the scale is in `saved`.
      saved: from the forward.
      dout: [B, T, N, Hv], dlse: [B, T, N]; cotangents.
    """
    inputs = saved.inputs
    B, T = inputs.query.shape[:2]
    S, K, _ = inputs.value.shape[1:]
    live_q, live_k = fwd.live_queries(inputs, T), fwd.live_keys(spec, inputs, T, S)

    def queries(x):
        return fwd.by_kv_head(fwd.select_rows(x, live_q), K)

    def keys(x):
        return fwd.key_tiles(fwd.select_rows(x, live_k))

    def per_head(e):
        return elements.exp2_integer(e)[:, :, None, None, None]

    def tensor_scale(x):
        return x.tensor_scale[:, :, None, None, None]

    query = queries(inputs.query.dequantize_unscaled())
    query8 = queries(saved.query8.dequantize())
    key = keys(inputs.key.dequantize_unscaled())
    key8 = keys(saved.key8.dequantize_unscaled())
    value8 = keys(inputs.value.dequantize_unscaled())
    factor = fwd.score_factor(inputs, K)

    # Rows without keys have lse -inf; +inf makes their probabilities 0.
    has_keys = jnp.isfinite(saved.lse) | jnp.isnan(saved.lse)
    lse2 = jnp.where(has_keys, saved.lse * jnp.float32(fwd.LOG2_E), jnp.inf)
    lse2 = fwd.by_kv_head(lse2[..., None], K)
    live_rows = (live_q[..., None] & has_keys)[..., None]
    dout = jnp.where(live_rows, dout.astype(jnp.float32), 0.0)
    delta = jnp.sum(dout * jnp.where(live_rows, saved.out.astype(jnp.float32), 0.0), axis=-1)
    delta = delta - jnp.where(live_rows[..., 0], dlse.astype(jnp.float32), 0.0)
    delta = fwd.by_kv_head(delta[..., None], K)

    value = fwd.select_rows(inputs.value.dequantize(), live_k)
    e_do, e_ds = dout_lift(dout, K), ds_lift(dout, value)
    dout_rows = fwd.by_kv_head(dout, K)
    dout8 = elements.round_e5m2(dout_rows * per_head(e_do))
    unlift_dp = per_head(-e_do) * tensor_scale(inputs.value)
    unlift_ds = per_head(-e_ds)
    scale = jnp.asarray(inputs.scale, jnp.float32).reshape(-1, 1, 1, 1, 1)

    def tile(carry, operand):
        dquery, dscale, lost, kept, saturated = carry
        key_tile, key8_tile, value8_tile, first = operand
        s = jnp.einsum("bkgth,bksh->bkgts", query, key_tile, precision="highest")
        columns = first + jnp.arange(fwd.TILE, dtype=jnp.int32)
        seen = fwd.visible(spec, inputs, T, columns) & (columns < S)
        z = jnp.where(seen[:, None, None], s * factor, -jnp.inf)
        p8 = elements.round_e4m3(jnp.exp2(z - lse2 + PROBABILITY_LIFT))
        dp = jnp.einsum("bkgth,bksh->bkgts", dout8, value8_tile, precision="highest") * unlift_dp
        ds = jnp.where(seen[:, None, None], p8 * 2.0**-PROBABILITY_LIFT * (dp - delta), 0.0)
        lifted = ds * per_head(e_ds)
        ds8 = elements.round_e4m3(lifted)
        dquery += jnp.einsum("bkgts,bksh->bkgth", ds8, key8_tile, precision="highest")
        dkey = jnp.einsum("bkgts,bkgth->bksh", ds8, query8, precision="highest")
        dvalue = jnp.einsum("bkgts,bkgth->bksh", p8, dout8, precision="highest")
        # The unscaled logit of the traced scale's gradient; s * 0 where masked.
        dscale += jnp.sum(ds * jnp.where(seen[:, None, None], s, 0.0), axis=-1, keepdims=True)
        lost += jnp.sum((ds8 == 0) & (ds != 0))
        kept += jnp.sum(ds != 0)
        saturated += jnp.sum(jnp.abs(lifted) > elements.E4M3_MAX)
        return (dquery, dscale, lost, kept, saturated), (dkey, dvalue)

    first_keys = jnp.arange(key.shape[0], dtype=jnp.int32) * fwd.TILE
    zero = jnp.float32(0)
    start = (jnp.zeros_like(query8), jnp.zeros_like(delta), zero, zero, zero)
    (dquery, dscale, lost, kept, saturated), (dkey, dvalue) = jax.lax.scan(
        tile, start, (key, key8, value8, first_keys)
    )

    def rows(tiles):
        """[tiles, B, K, 128, D] to [B, S, K, D]."""
        x = tiles.transpose(1, 0, 3, 2, 4)
        return x.reshape(B, -1, K, x.shape[-1])[:, :S]

    dquery = dquery * (scale * unlift_ds * tensor_scale(saved.key8))
    dkey = rows(dkey * (scale * unlift_ds)[:, :, 0])
    dvalue = rows(dvalue * (per_head(-e_do)[:, :, 0] * 2.0**-PROBABILITY_LIFT))
    # `s` is in payload units: the tensor scales of query and key are still missing.
    for scales in (inputs.query.tensor_scale, inputs.key.tensor_scale):
        if scales is not None:
            dscale = dscale * scales.reshape(B, K, -1)[..., None, None]
    dscale = jnp.sum(dscale, axis=(1, 2, 3, 4))
    nonzero = jnp.sum(dout != 0)
    return Gradients(
        fwd.from_kv_head(dquery),
        dkey,
        dvalue,
        dscale if jnp.ndim(inputs.scale) else jnp.sum(dscale),
        jnp.sum((dout8 == 0) & (dout_rows != 0)) / jnp.maximum(nonzero, 1),
        lost / jnp.maximum(kept, 1),
        saturated / jnp.maximum(kept, 1),
    )
