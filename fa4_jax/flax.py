"""``attention_fn`` for Flax: the adapter that Flax's attention modules call.

It serves ``flax.nnx.MultiHeadAttention`` and ``flax.linen.MultiHeadDotProductAttention`` alike and
takes the keyword arguments that they pass. Every one of them is honoured or refused, none dropped::

    nnx.MultiHeadAttention(8, 512, attention_fn=fa4_jax.flax.attention_fn, decode=False, rngs=rngs)

    windowed = functools.partial(fa4_jax.flax.attention_fn, local_window_size=(255, 0))
    linen.MultiHeadDotProductAttention(8, attention_fn=windowed)

A causal *mask* is an array like any other; ``is_causal=True`` (nnx's ``__call__`` takes it, for
linen bind it with ``functools.partial``) lets the kernels skip what the mask would hide.

This module does not import Flax.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from fa4_jax.api import dot_product_attention

# The names of `jax.lax.Precision`. Each bounds how far the products of *float32* operands may be
# rounded: those are computed in float32 accuracy here, which satisfies all, and products of 16-bit
# operands are exact under any. "Lowest" are those that leave room for a quantised path.
_LOWEST_PRECISIONS = (None, "default", "fastest", "bfloat16")
_PRECISIONS = (*_LOWEST_PRECISIONS, "high", "bfloat16_3x", "tensorfloat32", "highest", "float32")


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    input_positions: ArrayLike | None = None,
    force_fp32_for_softmax: bool = True,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    reproducible: bool | None = None,
    **options: Any,
) -> jax.Array:
    """Scaled dot-product attention with the calling convention of Flax's ``attention_fn``.

    The result is that of ``flax.nnx.dot_product_attention`` and
    ``flax.linen.dot_product_attention`` with one exception: a query that may attend to no key at
    all yields zeros (Flax: the mean of all values), as everywhere in ``fa4_jax``.

    Args:
      query: ``[*batch, T, N, H]``, any number of batch axes, none included.
      key: ``[*batch, S, K, H]``; ``N`` must be a multiple of ``K``.
      value: ``[*batch, S, K, Hv]``.
      bias: added to the logits; broadcasts to ``[*batch, N, T, S]``.
      mask: attend where it is true; broadcasts to ``[*batch, N, T, S]``. Any dtype: Flax's own
        mask helpers make float32 zeros and ones.
      broadcast_dropout: shape of the dropout mask, without effect since dropout is refused.
      dropout_rng: likewise.
      dropout_rate: must be 0 unless ``deterministic``.
      deterministic: Flax's switch, "no dropout". Bitwise equal runs are ``reproducible``.
      dtype: ``query``, ``key`` and ``value`` are cast to it, by default to their common dtype.
      precision: None or a ``jax.lax.Precision``, its name, or a pair of those. All are met:
        float32 inputs are computed in float32 accuracy, products of 16-bit inputs are exact.
      module: must be None; modules pass themselves when asked to sow attention weights, which are
        never formed here.
      is_causal: query ``i`` attends to keys ``j <= i`` only.
      input_positions: must be None; rotate ``query`` and ``key`` in a function around this one.
      force_fp32_for_softmax: linen's switch, without effect since the softmax is always float32.
      qk_attn_weights_einsum: must be None (linen's hook for a quantised product).
      attn_weights_value_einsum: must be None, likewise.
      reproducible: ``deterministic`` of :func:`fa4_jax.dot_product_attention`.
      **options: further keyword arguments of :func:`fa4_jax.dot_product_attention`
        (``local_window_size``, ``logits_soft_cap``, ``implementation``, ...), usually bound with
        ``functools.partial``. Batch axes are flattened to one before they apply.

    Returns:
      ``[*batch, T, N, Hv]`` in ``dtype``.

    Raises:
      NotImplementedError: for dropout, sown weights, ``input_positions``, replaced einsums or a
        ``precision`` that is none of the above.
      ValueError: for wrong shapes or options, as :func:`fa4_jax.dot_product_attention`.
    """
    del broadcast_dropout, dropout_rng, force_fp32_for_softmax
    if dropout_rate and not deterministic:
        raise NotImplementedError(
            f"fa4_jax.flax.attention_fn has no dropout, got dropout_rate={dropout_rate} and "
            "deterministic=False; pass deterministic=True or dropout_rate=0."
        )
    if module is not None:
        raise NotImplementedError(
            "fa4_jax.flax.attention_fn never forms the attention weights, so it cannot sow them "
            f"into {type(module).__name__}; pass sow_weights=False."
        )
    if input_positions is not None:
        raise NotImplementedError(
            "fa4_jax.flax.attention_fn does not rotate its inputs, got input_positions; apply the "
            "rotary embedding to query and key in a function that then calls it."
        )
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise NotImplementedError(
            "fa4_jax.flax.attention_fn computes both products itself, got qk_attn_weights_einsum "
            "or attn_weights_value_einsum; leave the module's *_einsum_cls unset."
        )
    _check_precision(precision, options)
    if options.get("return_residual"):
        raise ValueError(
            "return_residual must be False in fa4_jax.flax.attention_fn: Flax expects one array; "
            "call fa4_jax.dot_product_attention for the residual."
        )

    if dtype is None:
        dtype = jnp.result_type(query, key, value)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    bias = None if bias is None else jnp.asarray(bias)
    mask = None if mask is None else jnp.asarray(mask).astype(bool)

    batch = query.shape[:-3]
    if not batch == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "query, key and value must have the same batch axes, got query "
            f"{list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        )
    if len(batch) > 1:
        size = math.prod(batch)
        query, key, value = (x.reshape(size, *x.shape[-3:]) for x in (query, key, value))
        bias, mask = _flatten_batch("bias", bias, batch), _flatten_batch("mask", mask, batch)
    out = dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        deterministic=reproducible,
        **options,
    )
    return out.reshape(*batch, *out.shape[-3:])


def _check_precision(precision: Any, options: dict[str, Any]) -> None:
    """Raises NotImplementedError unless ``precision`` is one that every path satisfies."""
    for one in precision if isinstance(precision, (tuple, list)) else (precision,):
        name = one.name.lower() if isinstance(one, jax.lax.Precision) else one
        if name not in _PRECISIONS:
            raise NotImplementedError(
                f"fa4_jax.flax.attention_fn cannot honour precision={precision!r}; allowed are "
                "None, jax.lax.Precision.DEFAULT, HIGH, HIGHEST, their names, and pairs of those."
            )
        if options.get("quantization") is not None and name not in _LOWEST_PRECISIONS:
            raise NotImplementedError(
                f"precision={precision!r} contradicts quantization={options['quantization']!r}; "
                "give one of the two."
            )


def _flatten_batch(name: str, x: jax.Array | None, batch: tuple[int, ...]) -> jax.Array | None:
    """Folds the batch axes of a bias or mask that broadcasts to ``[*batch, N, T, S]`` into one."""
    if x is None or x.ndim <= 3:
        return x
    own = x.shape[:-3]
    sizes = zip(reversed(own), reversed(batch), strict=False)
    if len(own) > len(batch) or any(size not in (1, whole) for size, whole in sizes):
        raise ValueError(
            f"{name} must broadcast to [*batch, N, T, S] with batch = {list(batch)}, got "
            f"{list(x.shape)}"
        )
    if math.prod(own) == 1:  # broadcasts over the batch, so it need not be stored for each entry
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(math.prod(batch), *x.shape[-3:])
