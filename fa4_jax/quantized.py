"""Quantised attention: `attend(spec, operands)` for a spec with a quantization config.

The operands are quantised here (unless they come quantised), `quantized_forward` computes the
operator, and `quantized_backward` its gradient where the formats allow training.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fa4_jax import quantized_backward, quantized_forward
from fa4_jax.quantize.config import QuantizationConfig, SampledGuard, resolve
from fa4_jax.quantize.containers import Format, Quantized, quantize
from fa4_jax.quantized_backward import Gradients, Saved
from fa4_jax.quantized_forward import GUARD_KEYS, Inputs
from fa4_jax.spec import AttentionSpec, Operands
from fa4_jax.xla import in_auto_axes

QUERY_KEY_AXIS, VALUE_AXIS = -1, -3


def unsupported(spec: AttentionSpec, operands: Operands) -> tuple[str, ...]:
    """Every argument of the call that a quantised route cannot honour; empty if there is none."""
    found = []
    for name, why in (
        ("bias", "no bias is added to quantised logits"),
        ("mask", "no mask array is read (causal, window and lengths are served)"),
        ("query_segment_ids", "no segment ids are compared"),
        ("sinks", "the denominator comes from the probability codes alone"),
    ):
        if getattr(operands, name) is not None:
            found.append(f"{name}: {why}")
    if spec.logits_soft_cap is not None:
        found.append(f"logits_soft_cap={spec.logits_soft_cap}: codes are formed from linear logits")
    if isinstance(_config(spec).row_reference, SampledGuard):
        if spec.has_window:
            found.append("is_causal or local_window_size: SampledGuard reorders the keys")
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            if getattr(operands, name) is not None:
                found.append(f"{name}: SampledGuard reorders the keys")
        if isinstance(operands.value, Quantized):
            found.append("quantised value: SampledGuard reorders keys inside its blocks")
    return tuple(found)


def attend(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention with the formats of `spec.quantization`, on any backend.

    Query, key and value may be `Quantized` (from `quantize_operand`), each on its own.

    Returns:
      out [B, T, N, Hv] in query's dtype and lse float32 [B, T, N].

    Raises:
      NotImplementedError: an argument that quantised attention does not serve, by name; and, when
        differentiated, the reason why these formats have no gradient.
      ValueError: a quantised operand in another format than the config's.
    """
    reasons = unsupported(spec, operands)
    if reasons:
        raise NotImplementedError("quantised attention cannot serve " + "; ".join(reasons))
    for name in ("query", "key", "value"):
        operand = getattr(operands, name)
        if isinstance(operand, Quantized):
            operand.require(name, *_format_and_axis(_config(spec), name))
    B, T, S, N, _, _, Hv = operands.sizes
    if 0 in (B, T, S):
        out = jnp.zeros((B, T, N, Hv), operands.query.dtype)
        return out, jnp.full((B, T, N), -jnp.inf, jnp.float32)
    return in_auto_axes(_attend, spec, operands)


def quantize_operand(quantization: QuantizationConfig | str, name: str, x: jax.Array) -> Quantized:
    """Quantises one operand as attention with this `quantization` would, to be cached and reused.

    Args:
      quantization: a config or its short name.
      name: "query", "key" or "value": value is blocked along its keys, the others along the head
        dimension.
      x: [B, length, heads, dim]. All of it takes part in the scales of its blocks: replace padding
        by zeros before.
    """
    config = resolve(quantization)
    assert config is not None
    if name not in ("query", "key", "value"):
        raise ValueError(f"name must be 'query', 'key' or 'value', got {name!r}")
    format, axis = _format_and_axis(config, name)
    # E8M0 scales reach further than float32 inputs need; the guard uses that range up.
    per_head = format is not Format.MXFP4_SIX or isinstance(config.row_reference, SampledGuard)
    return quantize(
        x, format, axis=axis, per_head_scale=per_head, least_squares=config.least_squares
    )


def sampled_first(num_keys: int) -> np.ndarray:
    """Order of keys, int32 [S], that puts 128 evenly spaced ones first and keeps the others'."""
    count = min(GUARD_KEYS, num_keys)
    sampled = np.arange(count) * num_keys // count
    return np.concatenate([sampled, np.setdiff1d(np.arange(num_keys), sampled)]).astype(np.int32)


def save_for_backward(
    spec: AttentionSpec, operands: Operands
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    """The forward pass of a trainable route: ((out, lse), what `quantized_backward` needs)."""
    reason = _no_gradient(spec, operands)
    if reason:
        raise NotImplementedError(reason)
    inputs = _inputs(spec, operands)
    out, lse = quantized_forward.forward(spec, inputs)
    out = checkpoint_name(out.astype(operands.query.dtype), "context")
    lse = checkpoint_name(lse, "context")
    live_q, live_k = _live(spec, operands)
    view = functools.partial(quantize, format=Format.FP8_E4M3, per_head_scale=True)
    return (out, lse), Saved(
        inputs,
        view(quantized_forward.select_rows(operands.query, live_q)),
        view(quantized_forward.select_rows(operands.key, live_k)),
        out,
        lse,
    )


def _config(spec) -> QuantizationConfig:
    assert isinstance(spec.quantization, QuantizationConfig)
    return spec.quantization


def _format_and_axis(config, name):
    if name == "value":
        return config.probability_value, VALUE_AXIS
    return config.query_key, QUERY_KEY_AXIS


def _live(spec, operands):
    T, S = operands.query.shape[1], operands.value.shape[1]
    return (
        quantized_forward.live_queries(operands, T),
        quantized_forward.live_keys(spec, operands, T, S),
    )


def _inputs(spec, operands) -> Inputs:
    """Quantises what is not quantised, with everything that no query may look at set to 0."""
    live_q, live_k = _live(spec, operands)
    arrays = {}
    for name, live in (("query", live_q), ("key", live_k), ("value", live_k)):
        x = getattr(operands, name)
        if not isinstance(x, Quantized):
            x = quantized_forward.select_rows(x, live)
            x = quantize_operand(_config(spec), name, x)
        arrays[name] = x
    scale = operands.scale if spec.scale is None else spec.scale
    return Inputs(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        jnp.asarray(scale, jnp.float32),
        operands.query_seq_lengths,
        operands.key_value_seq_lengths,
        operands.query_offset,
    )


def _no_gradient(spec, operands) -> str | None:
    """Why this call has no gradient, or None if it has one."""
    config = _config(spec)
    if config.probability_value is not Format.FP8_E4M3:
        return (
            f"{config.probability_value.value} probabilities and values have no gradient: training "
            "with them diverges (published runs separate from FP8's after about 0.1 billion "
            "tokens). Train with quantization='nvfp4_fp8', or pass query, key and value through "
            "jax.lax.stop_gradient"
        )
    given = [n for n in ("query", "key", "value") if isinstance(getattr(operands, n), Quantized)]
    if given:
        return f"already quantised {', '.join(given)}: training needs the unquantised arrays"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec, operands):
    dtype = operands.query.dtype
    if isinstance(_config(spec).row_reference, SampledGuard):
        order = sampled_first(operands.value.shape[1])
        key = operands.key
        if isinstance(key, Quantized):
            key = jax.tree.map(lambda x: x[:, order] if x.ndim == 4 else x, key)
        else:
            key = key[:, order]
        operands = dataclasses.replace(operands, key=key, value=operands.value[:, order])
    out, lse = quantized_forward.forward(spec, _inputs(spec, operands))
    return checkpoint_name(out.astype(dtype), "context"), checkpoint_name(lse, "context")


def _attend_fwd(spec, operands):
    outputs, saved = save_for_backward(spec, operands)
    # Only for dtypes: a cotangent has its operand's.
    empty = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), operands)
    return outputs, (saved, empty)


def _attend_bwd(spec, residual, cotangents):
    saved, empty = residual
    g: Gradients = quantized_backward.backward(spec, saved, *cotangents)
    observe = _config(spec).observe_gradients
    if observe is not None:
        names = ("dout_zero", "ds_zero", "ds_saturated")
        statistics = {name: getattr(g, name) for name in names}
        jax.debug.callback(observe, statistics)
    nothing = dataclasses.replace(
        jax.tree.map(lambda x: None, empty),
        query=g.query.astype(empty.query.dtype),
        key=g.key.astype(empty.key.dtype),
        value=g.value.astype(empty.value.dtype),
    )
    if empty.scale is not None:
        nothing.scale = g.scale.astype(empty.scale.dtype)
    return (nothing,)


_attend.defvjp(_attend_fwd, _attend_bwd)
