"""`dot_product_attention`: the signature, its checks, and the canonical form of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fa4_jax import implementations, quantize
from fa4_jax.spec import POSITION_LIMIT, AttentionSpec, Operands, sum_dtype

Implementation = Literal["fa4", "xla", "emulated"]
_Implementations = Implementation | tuple[Implementation, ...] | None
_Window = int | tuple[int | None, int | None] | None

DTYPES = ("float16", "bfloat16", "float32", "float64")

# Within these, logits / cap and cap * tanh stay inside float32.
_SMALLEST_CAP, _LARGEST_CAP = 1e-30, 1e30


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: _Window = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    quantization: Any = None,
    deterministic: bool | None = None,
    return_residual: Literal[False] = False,
    implementation: _Implementations = None,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: _Window = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    quantization: Any = None,
    deterministic: bool | None = None,
    return_residual: Literal[True],
    implementation: _Implementations = None,
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: _Window = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    quantization: Any = None,
    deterministic: bool | None = None,
    return_residual: bool = False,
    implementation: _Implementations = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Scaled dot-product attention, `softmax(scale * query key^T + bias) value` for each head.

    It takes the arguments of `jax.nn.dot_product_attention`, and some more by keyword. Sums are
    float32 whatever the input dtype, float32 inputs are computed in float32 accuracy, and memory
    is linear in the sequence lengths, forwards and backwards.

    Dimensions: B batch, T queries, S keys, N query heads, K key/value heads, H head dimension of
    query and key, Hv of value. Query head n reads key/value head `n // (N // K)`.

    A query that sees no key at all, by any mixture of masks, lengths, segments and bias = -inf,
    has output 0, residual -inf and no gradient (`jax.nn` returns the mean of the values there).
    What is stored where no query looks, NaN included, reaches no output and no gradient.

    Args:
      query: `[B, T, N, H]`, or `[T, N, H]` without a batch; float16, bfloat16, float32 or float64.
      key: `[B, S, K, H]` or `[S, K, H]`, dtype of query. N must be a multiple of K.
      value: `[B, S, K, Hv]` or `[S, K, Hv]`, dtype of query.
      bias: added to the logits after scale and cap; any float dtype, any shape that broadcasts to
        `[B, N, T, S]`. Its gradient has its own shape and dtype.
      mask: bool, any shape that broadcasts to `[B, N, T, S]`; True where a query sees a key.
      scale: number or traced real scalar, also 0 or negative; `H ** -0.5` by default. A jax array
        is differentiable.
      is_causal: query i sees key j only if `j <= i + query_offset`: aligned top-left, as in
        `jax.nn`.
      query_seq_lengths: `[B]` integers; output rows at and past the length are 0.
      key_value_seq_lengths: `[B]` integers; keys at and past the length are not seen.
      local_window_size: (left, right): query i at position `p = i + query_offset` sees key j only
        if `p - left <= j <= p + right`. Neither may be negative; None is no limit; one integer w
        is `(w, w)`.
      query_segment_ids: `[B, T]` integers, compared as int32; a query sees only keys with its own
        id.
      key_value_segment_ids: `[B, S]` integers; both arrays or neither.
      query_offset: integer or `[B]` integers, possibly negative: the position of query 0 for
        `is_causal` and `local_window_size`. `S - T` aligns bottom-right, for decoding and
        prefilling in chunks.
      logits_soft_cap: c > 0 (1e-30 to 1e30) makes logits `c * tanh(logits / c)`, after scale,
        before bias.
      sinks: `[N]` floats, one more logit in the softmax denominator of each head; differentiable.
      quantization: None for exact attention; "fp4", "fp4_affine", "fp4_accurate", "nvfp4_fp8",
        "fp8" or a `quantize.QuantizationConfig` for attention in these formats. Query, key and
        value may then be `quantize.Quantized`, as `quantized.quantize_operand` makes them.
      deterministic: True asks for outputs and gradients that are bitwise equal from run to run.
      return_residual: also return the log-sum-exp.
      implementation: `"fa4"`, the CUDA kernels; `"xla"`, any backend and every exact call;
        `"emulated"`, the kernels executed on the CPU; a tuple of these in order of preference;
        or None, the kernels where they serve the call and XLA elsewhere, with one warning for each
        reason against the kernels.

    Returns:
      `[B, T, N, Hv]` (`[T, N, Hv]`) in query's dtype. With `return_residual` also the natural
      logarithm of each softmax denominator, sink included: `[B, T, N]` (`[T, N]`), float32
      (float64 for float64 inputs), differentiable.

    Raises:
      ValueError: an argument is wrong; says which, what was given and what is allowed.
      NotImplementedError: no implementation asked for can serve the call; lists every reason. Also
        forward-mode and second-order differentiation of `"fa4"` and `"emulated"`; `"xla"` has
        both, and computes them for None.

    References:
      Dao et al., FlashAttention (2022), https://arxiv.org/abs/2205.14135.
      Ainslie et al., GQA (2023), https://arxiv.org/abs/2305.13245.
      Xiao et al., attention sinks (2023), https://arxiv.org/abs/2309.17453.
    """
    query, key, value, has_batch = _check_qkv(query, key, value)
    B, T, N, _ = query.shape
    S = key.shape[1]

    def integers(name: str, x: ArrayLike | None, **dims: Any) -> jax.Array | None:
        return None if x is None else _check_integers(name, x, dims, has_batch)

    if (query_segment_ids is None) != (key_value_segment_ids is None):
        given, missing = "query_segment_ids", "key_value_segment_ids"
        if query_segment_ids is None:
            given, missing = missing, given
        raise ValueError(f"{given} is given without {missing}: give both or neither")
    left, right = _check_window(local_window_size)
    static_scale, traced_scale = _check_scale(scale, query)
    spec = AttentionSpec(
        left=left,
        right=0 if _check_flag("is_causal", is_causal) else right,
        scale=static_scale,
        logits_soft_cap=_check_soft_cap(logits_soft_cap),
        deterministic=deterministic is not None and _check_flag("deterministic", deterministic),
        quantization=quantize.resolve(quantization),
    )
    if spec.quantization is None and any(
        isinstance(x, quantize.Quantized) for x in (query, key, value)
    ):
        raise ValueError("query, key or value is quantised: say by which quantization=")
    offset = integers("query_offset", query_offset, B=B)
    operands = Operands(
        query=query,
        key=key,
        value=value,
        bias=_check_pairwise("bias", bias, (B, N, T, S)),
        mask=_check_pairwise("mask", mask, (B, N, T, S)),
        query_seq_lengths=integers("query_seq_lengths", query_seq_lengths, B=B),
        key_value_seq_lengths=integers("key_value_seq_lengths", key_value_seq_lengths, B=B),
        # Positions matter to windows only.
        query_offset=offset if spec.has_window else None,
        query_segment_ids=integers("query_segment_ids", query_segment_ids, B=B, T=T),
        key_value_segment_ids=integers("key_value_segment_ids", key_value_segment_ids, B=B, S=S),
        sinks=_check_sinks(sinks, query),
        scale=traced_scale,
    )
    _check_flag("return_residual", return_residual)
    out, lse = implementations.attend(spec, operands, _check_implementation(implementation))
    if not has_batch:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


# --- Checks ---------------------------------------------------------------------------------------


def _describe(x: jax.Array) -> str:
    """Dtype and shape, as in "float32 [2, B, 8]"."""
    return f"{x.dtype} [{', '.join(map(str, x.shape))}]"


def _array(name: str, x: Any, convert: Callable = jnp.asarray) -> Any:
    try:
        return convert(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array, got {x!r}") from error


def _check_flag(name: str, flag: Any) -> bool:
    if not isinstance(flag, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False and not traced, got {flag!r}")
    return bool(flag)


def _check_qkv(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array, bool]:
    """Returns them with a batch axis, and whether they came with one."""
    arrays: dict[str, Any] = {
        name: x if isinstance(x, quantize.Quantized) else _array(name, x)
        for name, x in (("query", query), ("key", key), ("value", value))
    }
    given = ", ".join(f"{name} {_describe(x)}" for name, x in arrays.items())
    ranks = {x.ndim for x in arrays.values()}
    if len(ranks) != 1 or not ranks <= {3, 4}:
        raise ValueError(
            "query, key and value must all be 4-D ([B, T, N, H], [B, S, K, H], [B, S, K, Hv]) or "
            f"all be 3-D (without B), got {given}"
        )
    dtypes = {x.dtype.name for x in arrays.values()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise ValueError(
            f"query, key and value must have one dtype of {', '.join(DTYPES)}, got {given}"
        )
    has_batch = ranks == {4}
    if not has_batch and any(isinstance(x, quantize.Quantized) for x in arrays.values()):
        raise ValueError(f"quantised query, key and value must be 4-D, got {given}")
    q, k, v = (x if has_batch else x[None] for x in arrays.values())
    B, _, N, H = q.shape
    S, K = k.shape[1:3]
    for name, x, letters, shape in (
        ("key", k, "B, S, K, H", (B, S, K, H)),
        ("value", v, "B, S, K, Hv", (B, S, K, v.shape[3])),
    ):
        for letter, size, allowed in zip(letters.split(", "), x.shape, shape, strict=True):
            if size != allowed:
                raise ValueError(
                    f"{name} must be [{letters}] with {letter} = {allowed}, got {letter} = {size} "
                    f"in {given}"
                )
    for letter, size in (("N", N), ("K", K), ("H", H), ("Hv", v.shape[3])):
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"{letter} must be a positive constant, got {letter} = {size}: {given}"
            )
    if N % K:
        raise ValueError(
            "the number of query heads N must be a multiple of the number of key/value heads K, "
            f"got N = {N} in query and K = {K} in key: {given}"
        )
    return q, k, v, has_batch


def _check_pairwise(name: str, x: Any, full: tuple[Any, ...]) -> jax.Array | None:
    """bias and mask: brings what broadcasts to [B, N, T, S] to four dimensions."""
    if x is None:
        return None
    x = _array(name, x)
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(
            f"mask must be bool, True where a query sees a key, got {_describe(x)}; what is to be "
            "added to the logits is bias"
        )
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"bias must have a float dtype, got {_describe(x)}; a bool array is mask")
    fits = x.ndim <= 4 and all(
        size == 1 or size == allowed
        for size, allowed in zip(reversed(x.shape), reversed(full), strict=False)
    )
    if not fits:
        allowed = ", ".join(map(str, full))
        raise ValueError(f"{name} must broadcast to [B, N, T, S] = [{allowed}], got {_describe(x)}")
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if name == "bias" and jnp.finfo(x.dtype).bits < 16:
        x = x.astype(jnp.float32)  # JAX does no arithmetic with these
    return x


def _check_integers(name: str, x: Any, dims: dict[str, Any], has_batch: bool) -> jax.Array:
    """Lengths, ids and offsets: int32 of the shape `dims`; 3-D calls may leave out the batch."""
    x = x if isinstance(x, jax.Array) else _array(name, x, np.asarray)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must have an integer dtype, got {_describe(x)}")
    shape = tuple(dims.values())
    one_for_all = name == "query_offset" and x.ndim == 0
    if one_for_all or (not has_batch and x.ndim == len(shape) - 1):
        x = x[None]
    if one_for_all:
        shape = (1,)
    if x.ndim != len(shape) or any(
        size != allowed for size, allowed in zip(x.shape, shape, strict=True)
    ):
        raise ValueError(
            f"{name} must be [{', '.join(dims)}] = [{', '.join(map(str, shape))}], "
            f"got {_describe(x)}"
        )
    if name.endswith("segment_ids"):
        return jnp.asarray(x, jnp.int32)
    # Beyond this no key is any farther, and sums of two stay inside int32. Clipped in its own
    # dtype, before int64 becomes int32.
    own = jnp.iinfo(x.dtype)
    low, high = max(own.min, -POSITION_LIMIT), min(own.max, POSITION_LIMIT)
    x = jnp.asarray(x.clip(low, high), jnp.int32)
    return jnp.broadcast_to(x, tuple(dims.values())) if one_for_all else x


def _check_sinks(sinks: Any, query: jax.Array) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = _array("sinks", sinks)
    num_heads = query.shape[2]
    if sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be [N] = [{num_heads}] of a float dtype, got {_describe(sinks)}"
        )
    return sinks.astype(sum_dtype(query.dtype))


def _check_scale(scale: Any, query: jax.Array) -> tuple[float | None, jax.Array | None]:
    """Returns a static or a traced scale, the other one None."""
    if scale is None:
        return query.shape[-1] ** -0.5, None
    static = not isinstance(scale, jax.Array)
    scale = _array("scale", scale, np.asarray) if static else scale
    real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    if scale.ndim or not real:
        raise ValueError(f"scale must be a real scalar, got {_describe(scale)}")
    wide = sum_dtype(query.dtype)
    if not static:
        return None, scale.astype(wide)
    if not abs(float(scale)) <= float(jnp.finfo(wide).max):
        raise ValueError(f"scale must be finite in {wide}, got {scale}")
    return float(scale), None


def _check_soft_cap(cap: Any) -> float | None:
    if cap is None:
        return None
    # A traced cap has no place: it decides what is computed.
    is_number = isinstance(cap, (int, float, np.number)) and not isinstance(cap, bool)
    if not (is_number and _SMALLEST_CAP <= cap <= _LARGEST_CAP):
        raise ValueError(
            f"logits_soft_cap must be a positive finite number from {_SMALLEST_CAP} to "
            f"{_LARGEST_CAP} or None, got {cap!r}"
        )
    return float(cap)


def _is_window_side(x: Any) -> bool:
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        return bool(x >= 0)
    return x is None


def _check_window(window: Any) -> tuple[int | None, int | None]:
    """Returns (left, right), None for no limit."""
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) == 2 and all(_is_window_side(x) for x in sides):
        left, right = (None if x is None or x >= POSITION_LIMIT else int(x) for x in sides)
        return left, right
    raise ValueError(
        "local_window_size must be None, an integer or a pair (left, right) of integers or None, "
        f"none of them negative, got {window!r}"
    )


def _check_implementation(implementation: Any) -> Any:
    names = implementation if isinstance(implementation, tuple) else (implementation,)
    if implementation is not None and (
        not names
        or any(not isinstance(name, str) or name not in implementations.NAMES for name in names)
    ):
        raise ValueError(
            f"implementation must be None, one of {', '.join(map(repr, implementations.NAMES))} or "
            f"a tuple of them, got {implementation!r}"
        )
    return implementation
