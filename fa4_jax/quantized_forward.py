"""Forward pass of quantised attention: the operator that an FP4 or FP8 kernel must compute.

One step of the loop is one tile of 128 keys against all queries, in the order a kernel follows:

    S = Q K^T on payloads and scales      (tcgen05 block-scaled or FP8 MMA, float32 accumulators)
    z = S * (log2(e) * scale * q and k tensor scales)          base-2 logits, masked to -inf
    m = row reference                                           (RunningMax: an integer)
    P = codes and scale bytes of 2**(z - m)                     four quarters of 32 keys
    l += sum of exactly these P                                 never of the unrounded ones
    O += P V on payloads and scales

and at the end `out = O / l` and `lse = ln 2 * (m + log2 l)`, with every constant factor that P
carries taken out of both. Block exponents are computed from z itself and not from z - m, so the
codes do not depend on the reference at all.

Source: "Hardware-Aware FP4 FlashAttention-4" (R. Hu, 2026), section 4, for the MXFP4 operator;
SageAttention3 for the two-level NVFP4 probabilities.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fa4_jax.quantize import elements
from fa4_jax.quantize.config import (
    Classifier,
    NoReference,
    QuantizationConfig,
    RunningMax,
    SampledGuard,
)
from fa4_jax.quantize.containers import Format, Quantized
from fa4_jax.spec import AttentionSpec

TILE = 128
QUARTER = 32
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LOG2_6 = math.log2(elements.E2M1_MAX)
# The nearest power of two changes at mantissa 1.5: floor(y + this) is its exponent at 2**y.
NEAREST_POWER = 1.0 - math.log2(1.5)

# Binary orders by which probabilities of at most 1 are raised before rounding. FP8: to just under
# 448. NVFP4: block scales amax * 2**11 / 6 reach 341 of UE4M3's 448.
FP8_PROBABILITY_LIFT = 8
NVFP4_PROBABILITY_LIFT = 11
# The guard's probabilities live around 2**-126; its denominator is raised out of the subnormals.
GUARD_LIFT = 24
GUARD_KEYS = 128


class Inputs(NamedTuple):
    """Quantised operands of one call and what restricts visibility.

    query [B, T, N, H] and key [B, S, K, H] blocked along H, value [B, S, K, Hv] blocked along S;
    scale float32 [] or [B]; lengths and offset int32 [B] or None.
    """

    query: Quantized
    key: Quantized
    value: Quantized
    scale: jax.Array
    query_seq_lengths: jax.Array | None = None
    key_value_seq_lengths: jax.Array | None = None
    query_offset: jax.Array | None = None


def positions(inputs, num_queries: int) -> jax.Array:
    """Position of each query, int32 [1 or B, T]."""
    rows = jnp.arange(num_queries, dtype=jnp.int32)[None]
    return rows if inputs.query_offset is None else rows + inputs.query_offset[:, None]


def visible(spec: AttentionSpec, inputs, num_queries: int, keys: jax.Array) -> jax.Array:
    """Which of `keys` (int32 [tile]) each query may see: bool [1 or B, T, tile]."""
    seen = spec.in_window(positions(inputs, num_queries)[..., None], keys)
    if inputs.key_value_seq_lengths is not None:
        seen &= keys < inputs.key_value_seq_lengths[:, None, None]
    return seen & live_queries(inputs, num_queries)[..., None]


def live_queries(inputs, num_queries: int) -> jax.Array:
    """Queries before the query length: bool [1 or B, T]."""
    rows = jnp.arange(num_queries, dtype=jnp.int32)[None]
    if inputs.query_seq_lengths is None:
        return jnp.ones_like(rows, bool)
    return rows < inputs.query_seq_lengths[:, None]


def live_keys(spec: AttentionSpec, inputs, num_queries: int, num_keys: int) -> jax.Array:
    """Keys that at least one query of the batch element may see: bool [1 or B, S]."""
    keys = jnp.arange(num_keys, dtype=jnp.int32)[None]
    live = jnp.ones_like(keys, bool)
    if inputs.key_value_seq_lengths is not None:
        live &= keys < inputs.key_value_seq_lengths[:, None]
    first = positions(inputs, num_queries)[:, :1]
    last = first + num_queries - 1
    if inputs.query_seq_lengths is not None:
        last = first + inputs.query_seq_lengths[:, None] - 1
    if spec.right is not None:
        live &= keys - last <= spec.right
    if spec.left is not None:
        live &= keys - first >= -spec.left
    return live


def select_rows(x: jax.Array, live: jax.Array) -> jax.Array:
    """`x` [B, L, heads, dim] with rows that are not `live` [1 or B, L] replaced by 0."""
    return jnp.where(live[:, :, None, None], x, jnp.zeros((), x.dtype))


def score_factor(inputs: Inputs, kv_heads: int) -> jax.Array:
    """float32 [B or 1, K, G or 1, 1, 1]: what turns payload products into base-2 logits."""
    factor = jnp.asarray(inputs.scale, jnp.float32).reshape(-1, 1, 1) * jnp.float32(LOG2_E)
    for scale in (inputs.query.tensor_scale, inputs.key.tensor_scale):
        if scale is not None:
            factor = factor * scale.reshape(scale.shape[0], kv_heads, -1)
    return factor[..., None, None]


def by_kv_head(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, L, N, D] to [B, K, N // K, L, D]: query heads beside the kv head that they read."""
    B, L, N, D = x.shape
    return x.reshape(B, L, kv_heads, N // kv_heads, D).transpose(0, 2, 3, 1, 4)


def from_kv_head(x: jax.Array) -> jax.Array:
    """The inverse of `by_kv_head`."""
    B, K, G, L, D = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(B, L, K * G, D)


def key_tiles(x: jax.Array) -> jax.Array:
    """[B, S, K, D] to [S / 128 rounded up, B, K, 128, D], filled up with zeros."""
    B, S, K, D = x.shape
    x = jnp.pad(x, [(0, 0), (0, -S % TILE), (0, 0), (0, 0)])
    return x.reshape(B, -1, TILE, K, D).transpose(1, 0, 3, 2, 4)


def classify(classifier: Classifier, x: jax.Array) -> jax.Array:
    """E2M1 codes, as float32 values, of normalised log-scores x [..., keys]: about 2**x."""
    value = jnp.float32(0)
    for slope, intercept in classifier.lines:
        value = jnp.maximum(value, slope * x + intercept)
    if classifier.native_pairs:
        pair = jnp.arange(x.shape[-1]) // 2
        value = jnp.where(pair % 4 < classifier.native_pairs, jnp.exp2(x), value)
    return elements.round_e2m1(value)


class MxProbabilities(NamedTuple):
    """One tile of MXFP4 probabilities: 2**(byte - 127) * code / 6 each.

    codes: float32 E2M1 values [..., quarters, 32].
    byte: int32 [..., quarters], the stored E8M0 scale; 0 where the quarter is empty.
    """

    codes: jax.Array
    byte: jax.Array

    def amplitude(self, lift: int = 0) -> jax.Array:
        """2**(byte - 127 + lift), float32 [..., quarters]; 0 where empty."""
        power = elements.exp2_integer(self.byte - elements.E8M0_BIAS + lift)
        return jnp.where(self.byte == 0, 0.0, power)

    def payload_values(self) -> jax.Array:
        """What the PV MMA multiplies: amplitude * code, [..., keys]."""
        weights = self.amplitude()[..., None] * self.codes
        return weights.reshape(*weights.shape[:-2], -1)

    def row_sum(self, lift: int = 0) -> jax.Array:
        """The denominator's share, [...]: each quarter as amplitude * (sum of codes / 6).

        In this order: amplitude / 6 is subnormal at byte 1 and would be flushed to 0.
        """
        share = self.amplitude(lift) * (jnp.sum(self.codes, axis=-1) / elements.E2M1_MAX)
        return jnp.sum(share, axis=-1)


def mx_probabilities(
    classifier: Classifier, z: jax.Array, m: jax.Array, shift: int = 0
) -> MxProbabilities:
    """MXFP4 probabilities of base-2 logits z [..., keys] with row reference m [...].

    The working byte is held at or above shift + 1 before the codes are formed, and stored minus
    `shift`; with shift 0 this only keeps the byte from running below 1.
    """
    z = z.reshape(*z.shape[:-1], -1, QUARTER)
    m = jnp.where(jnp.isneginf(m), 0.0, m)[..., None]
    peak = jnp.max(z, axis=-1)
    empty = jnp.isneginf(peak)
    nearest = jnp.floor(peak + NEAREST_POWER)
    byte = jnp.clip(nearest - m + elements.E8M0_BIAS, shift + 1, 254)
    # The integer m + e in one number, so that z is subtracted from once.
    origin = jnp.where(empty, 0.0, m + (byte - elements.E8M0_BIAS))
    codes = classify(classifier, (z - origin[..., None]) + LOG2_6)
    stored = jnp.where(empty, 0, byte - shift)
    return MxProbabilities(codes, stored.astype(jnp.int32))


def fp8_probabilities(z: jax.Array, m: jax.Array) -> jax.Array:
    """E4M3 values of 2**(z - m + 8), float32; z <= m."""
    m = jnp.where(jnp.isneginf(m), 0.0, m)
    return elements.round_e4m3(jnp.exp2(z - m[..., None] + FP8_PROBABILITY_LIFT))


def nvfp4_probabilities(z: jax.Array, m: jax.Array) -> jax.Array:
    """NVFP4 values (code * UE4M3 scale per 16 keys) of 2**(z - m + 11), float32; z <= m."""
    m = jnp.where(jnp.isneginf(m), 0.0, m)
    p = jnp.exp2(z - m[..., None] + NVFP4_PROBABILITY_LIFT)
    blocks = p.reshape(*p.shape[:-1], -1, Format.NVFP4.block)
    scale = elements.round_e4m3(jnp.max(blocks, axis=-1, keepdims=True) / elements.E2M1_MAX)
    codes = elements.round_e2m1(jnp.where(scale == 0, 0.0, blocks / scale))
    return (codes * scale).reshape(p.shape)


def _probabilities(config: QuantizationConfig, z, m):
    """(values that PV multiplies, their row sum) of one tile."""
    if config.probability_value is Format.FP8_E4M3:
        p = fp8_probabilities(z, m)
        return p, jnp.sum(p, axis=-1)
    if config.probability_value is Format.NVFP4:
        p = nvfp4_probabilities(z, m)
        return p, jnp.sum(p, axis=-1)
    guard = config.row_reference
    assert config.classifier is not None
    shift, lift = (guard.shift, GUARD_LIFT) if isinstance(guard, SampledGuard) else (0, 0)
    p = mx_probabilities(config.classifier, z, m, shift)
    return p.payload_values(), p.row_sum(lift)


def _constant_orders(config: QuantizationConfig) -> int:
    """Binary orders by which the accumulated denominator exceeds the sum of 2**(z - m)."""
    if config.probability_value is Format.FP8_E4M3:
        return FP8_PROBABILITY_LIFT
    if config.probability_value is Format.NVFP4:
        return NVFP4_PROBABILITY_LIFT
    guard = config.row_reference
    return GUARD_LIFT - guard.shift if isinstance(guard, SampledGuard) else 0


def next_reference(reference: RunningMax, m: jax.Array, peak: jax.Array) -> jax.Array:
    """The integer row reference after a tile with row maxima `peak`; lazily left as it is."""
    ceiling = jnp.ceil(peak)
    return jnp.where(ceiling > m + reference.slack, ceiling, m)


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Quantised attention; memory is linear in T and S.

    Args:
      spec: window and quantization; the scale is in `inputs`.
      inputs: quantised operands.

    Returns:
      out float32 [B, T, N, Hv] and lse float32 [B, T, N]; 0 and -inf on fully masked rows.
    """
    config = spec.quantization
    assert isinstance(config, QuantizationConfig)
    B, T, N, _ = inputs.query.shape
    S, K, Hv = inputs.value.shape[1:]
    live = live_keys(spec, inputs, T, S)
    query = select_rows(inputs.query.dequantize_unscaled(), live_queries(inputs, T))
    query = by_kv_head(query, K)
    key = key_tiles(select_rows(inputs.key.dequantize_unscaled(), live))
    value = key_tiles(select_rows(inputs.value.dequantize_unscaled(), live))
    factor = score_factor(inputs, K)

    def logits(key_tile, first):
        s = jnp.einsum("bkgth,bksh->bkgts", query, key_tile, precision="highest")
        keys = first + jnp.arange(TILE, dtype=jnp.int32)
        mask = (visible(spec, inputs, T, keys) & (keys < S))[:, None, None]
        return jnp.where(mask, s * factor, -jnp.inf), jnp.any(mask, axis=-1)

    def tile(carry, operand):
        out, denominator, m, seen = carry
        key_tile, value_tile, first = operand
        z, seen_here = logits(key_tile, first)
        if isinstance(config.row_reference, RunningMax):
            new = next_reference(config.row_reference, m, jnp.max(z, axis=-1))
            # A power of two: rescaling rounds nothing.
            fall = jnp.where(new == m, 0.0, jnp.maximum(m - new, -256.0))
            correction = elements.exp2_integer(fall.astype(jnp.int32))
            out, denominator, m = out * correction[..., None], denominator * correction, new
        p, row_sum = _probabilities(config, z, m)
        update = jnp.einsum("bkgts,bksh->bkgth", p, value_tile, precision="highest")
        return (out + update, denominator + row_sum, m, seen | seen_here), None

    rows = (B, K, N // K, T)
    if isinstance(config.row_reference, SampledGuard):
        # Unmasked by contract, so the first tile always has keys.
        m = jnp.ceil(jnp.max(logits(key[0], 0)[0], axis=-1)) + config.row_reference.margin
    elif isinstance(config.row_reference, NoReference):
        m = jnp.zeros(rows, jnp.float32)
    else:
        m = jnp.full(rows, -jnp.inf, jnp.float32)
    zeros = jnp.zeros(rows, jnp.float32)
    start = (jnp.zeros((*rows, Hv), jnp.float32), zeros, m, zeros.astype(bool))
    first_keys = jnp.arange(key.shape[0], dtype=jnp.int32) * TILE
    (out, denominator, m, seen), _ = jax.lax.scan(tile, start, (key, value, first_keys))

    constant = 1.0
    if config.probability_value is Format.MXFP4_SIX:
        constant /= elements.E2M1_MAX**2  # the 1/6 of P and the 1/6 of V
    if isinstance(config.row_reference, SampledGuard):
        constant *= 2.0**GUARD_LIFT  # in the denominator, not in P
    if inputs.value.tensor_scale is not None:
        constant = constant * inputs.value.tensor_scale[:, :, None, None, None]
    # A row with keys but denominator 0 (possible without a running maximum only) becomes NaN.
    seen = seen[..., None]
    out = jnp.where(seen, out / denominator[..., None] * constant, 0.0)
    lse = jnp.float32(LN_2) * (m - _constant_orders(config) + jnp.log2(denominator))
    lse = jnp.where(seen, lse[..., None], -jnp.inf)
    return from_kv_head(out), from_kv_head(lse)[..., 0]
