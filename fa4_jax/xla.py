"""Attention in plain JAX, for any backend: the meaning of the library.

One algorithm, FlashAttention's (Dao et al. 2022, https://arxiv.org/abs/2205.14135, section 3): the
scores are computed a tile at a time with a running maximum, and once more, from the saved
log-sum-exp, for the derivatives. A small problem is a single tile; a large one is two nested scans
over tiles of queries and keys, so memory is linear in both lengths, forwards and backwards.

Derivatives of every order and mode come from one rule, the tangent map. It is linear, so reverse
mode is its transpose: the flash backward pass. It is differentiable too, so second order is right.
Its scan bodies are rematerialised, so no score is ever stored.

Inside, arrays are [B, K, G, ...]: batch, key/value heads, query heads that share one (G = N // K).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from fa4_jax.spec import AttentionSpec, Operands, sum_dtype

# Up to this many scores in all, one tile: no loops, and the scores may be stored.
_SINGLE_TILE_SCORES = 2**24
# Scores of one tile of a larger problem. Bounds the temporaries to a few times 32 MiB.
_TILE_SCORES = 2**23
_TILE_MAX, _TILE_MIN = 1024, 128


def attend(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """Exact attention; every field of spec and operands is honoured but `spec.quantization`.

    Sums are float32 (float64 for float64 inputs). Products of 16-bit inputs are exact in TF32, so
    they use the backend's default matmul precision; those of wider inputs use the highest.

    Returns:
      out [B, T, N, Hv] in query's dtype, and lse [B, T, N], the natural logarithm of the softmax
      denominator, float32 (float64 for float64 inputs). A row that sees no key has 0 and -inf.
    """
    return in_auto_axes(_attend, spec, operands)


def in_auto_axes(attend: Callable, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """`attend(spec, operands)` with Explicit mesh axes made Auto inside, query's on its results.

    Splitting and tiling axes is then the compiler's business.
    """
    query = jax.typeof(jax.tree.leaves(operands.query)[0])  # of a quantised one: the payload
    explicit = query.sharding.mesh.explicit_axes
    if not explicit:
        return attend(spec, operands)
    batch, rows, heads, _ = query.sharding.spec
    mesh = query.sharding.mesh
    out_sharding = tuple(
        NamedSharding(mesh, PartitionSpec(*dims))
        for dims in ((batch, rows, heads, None), (batch, rows, heads))
    )
    auto: Any = jax.sharding.auto_axes(
        functools.partial(attend, spec), axes=explicit, out_sharding=out_sharding
    )
    return auto(operands)


def _attend(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    call = _call(spec, operands)
    out, shift, log_sum = _attention(call, _arrange(operands))
    return _merge_heads(out), _merge_heads(shift + log_sum)


def forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
    """`attend` as one half of a caller's own `custom_vjp`: no rule, no checkpoint names."""
    out, shift, log_sum = _forward(_call(spec, operands), _arrange(operands))
    return _merge_heads(out), _merge_heads(shift + log_sum)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None = None,
) -> Operands:
    """Gradients from what a forward pass saved; the other half of `forward`.

    Args:
      spec, operands: the call.
      out, lse: its results, [B, T, N, Hv] and [B, T, N].
      dout, dlse: their cotangents; dlse None is zero.

    Returns:
      Operands with the gradient of each floating array that the call has (query, key, value, bias,
      sinks, scale), in its shape and dtype, and None elsewhere.
    """
    differentiable = {
        name: x for name in _DIFFERENTIABLE if (x := getattr(operands, name)) is not None
    }
    tangent_map = functools.partial(tangent, spec, operands, out, lse)
    transpose = jax.linear_transpose(tangent_map, differentiable)
    dlse = jnp.zeros_like(lse) if dlse is None else dlse
    (gradients,) = transpose((dout.astype(out.dtype), dlse.astype(lse.dtype)))
    return Operands(**gradients)


def tangent(
    spec: AttentionSpec, operands: Operands, out: Array, lse: Array, tangents: dict[str, Array]
) -> tuple[Array, Array]:
    """Tangents of out and lse from what a forward pass saved; `backward` is the transpose.

    Args:
      spec, operands, out, lse: as for `backward`.
      tangents: of some of the floating operands, by name. Linear in these.

    Returns:
      Arrays like out and lse.
    """
    call = _call(spec, operands)
    # The log-sum-exp as the shift of `_forward`, and nothing remaining.
    sees = lse != -jnp.inf
    shift, log_sum = jnp.where(sees, lse, 0), jnp.where(sees, 0, -jnp.inf).astype(lse.dtype)
    split = functools.partial(_split_heads, kv_heads=call.kv_heads)
    saved = split(out), split(shift), split(log_sum)
    tangents = _arrange_floats(tangents, call.kv_heads)
    out_dot, lse_dot = _tangent(call, _arrange(operands), saved, tangents)
    return _merge_heads(out_dot), _merge_heads(lse_dot)


# --- Canonical arrays -----------------------------------------------------------------------------

_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "scale")


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static: the spec, and how the rows (T) and keys (S) are cut into tiles."""

    spec: AttentionSpec
    dtype: Any  # of query and out
    kv_heads: int
    rows: Any
    keys: Any
    row_tile: Any
    key_tile: Any
    row_tiles: int
    key_tiles: int

    @property
    def wide(self) -> Any:
        """The dtype of sums."""
        return sum_dtype(self.dtype)

    def einsum(self, subscripts: str, *operands: Array) -> Array:
        precision = lax.Precision.HIGHEST if jnp.finfo(self.dtype).bits > 16 else None
        return jnp.einsum(subscripts, *operands, precision=precision)


class _Arrays(NamedTuple):
    """Operands in [B, K, G, ...] layout, floats in the accumulation dtype (bias in its own)."""

    query: Any  # [B, K, G, T, H]
    key: Any  # [B, K, S, H]
    value: Any  # [B, K, S, Hv]
    bias: Any  # [B|1, K|1, G|1, T|1, S|1]
    sinks: Any  # [B|1, K, G]
    scale: Any  # [] or [B, 1, 1, 1, 1]
    mask: Any  # as bias, bool
    query_segment_ids: Any  # [B, T]
    key_value_segment_ids: Any  # [B, S]
    query_seq_lengths: Any  # [B]
    key_value_seq_lengths: Any  # [B]
    query_offset: Any  # [B]


def _call(spec: AttentionSpec, operands: Operands) -> _Call:
    sizes = operands.sizes
    tile_t, tile_s, tiles_t, tiles_s = sizes.T, sizes.S, 1, 1
    # A length known only at run time (jax.export) cannot be cut into a static number of tiles.
    if isinstance(sizes.T, int) and isinstance(sizes.S, int):
        heads = sizes.N * (sizes.B if isinstance(sizes.B, int) else 1)
        if heads * sizes.T * sizes.S > _SINGLE_TILE_SCORES:
            tile = _TILE_MAX
            while tile > _TILE_MIN and heads * tile * tile > _TILE_SCORES:
                tile //= 2
            tile_t, tile_s = min(tile, sizes.T), min(tile, sizes.S)
            tiles_t, tiles_s = -(-sizes.T // tile_t), -(-sizes.S // tile_s)
    return _Call(
        spec=spec,
        dtype=operands.query.dtype,
        kv_heads=sizes.K,
        rows=sizes.T,
        keys=sizes.S,
        row_tile=tile_t,
        key_tile=tile_s,
        row_tiles=tiles_t,
        key_tiles=tiles_s,
    )


def _split_heads(x: Array, kv_heads: int) -> Array:
    """[B, T, N, ...] -> [B, K, G, T, ...]."""
    B, T, N, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, T, kv_heads, N // kv_heads, *rest), 1, 3)


def _merge_heads(x: Array) -> Array:
    """[B, K, G, T, ...] -> [B, T, N, ...]."""
    B, K, G, T, *rest = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(B, T, K * G, *rest)


def _split_head_axis(x: Array, kv_heads: int) -> Array:
    """[b, N|1, t, s] -> [b, K|1, G|1, t, s]."""
    b, n, t, s = x.shape
    return x.reshape(b, *((1, 1) if n == 1 else (kv_heads, n // kv_heads)), t, s)


def _arrange_floats(floats: dict[str, Array], kv_heads: int) -> dict[str, Array]:
    """The differentiable arrays in `_Arrays` layout: linear, so it maps tangents as well."""
    arranged = {}
    for name, x in floats.items():
        wide = sum_dtype(x.dtype)
        if name == "query":
            arranged[name] = _split_heads(x.astype(wide), kv_heads)
        elif name in ("key", "value"):
            arranged[name] = jnp.moveaxis(x.astype(wide), 1, 2)
        elif name == "bias":
            # A full bias is widened a tile at a time. A broadcast one is small, and its gradient
            # is a sum over tiles, which needs the wide type.
            x = x if x.shape[2] != 1 and x.shape[3] != 1 else x.astype(wide)
            arranged[name] = _split_head_axis(x, kv_heads)
        elif name == "sinks":
            arranged[name] = x.astype(wide).reshape(-1, kv_heads, x.shape[-1] // kv_heads)
        else:
            arranged[name] = x.reshape(-1, 1, 1, 1, 1) if x.ndim else x
    return arranged


def _arrange(operands: Operands) -> _Arrays:
    kv_heads = operands.sizes.K
    arrays = {name: getattr(operands, name) for name in _Arrays._fields}
    floats = {name: x for name in _DIFFERENTIABLE if (x := arrays[name]) is not None}
    arrays.update(_arrange_floats(floats, kv_heads))
    if operands.mask is not None:
        arrays["mask"] = _split_head_axis(operands.mask, kv_heads)
    return _Arrays(**arrays)


# --- Tiles ----------------------------------------------------------------------------------------

# Axes of rows and of keys, in `_Arrays` and what is saved. Those of a pair may be broadcast.
_ROW_AXIS = {"query": 3, "shift": 3, "log_sum": 3, "query_segment_ids": 1, "bias": 3, "mask": 3}
_KEY_AXIS = {"key": 2, "value": 2, "key_value_segment_ids": 1, "bias": 4, "mask": 4}
_PAIRS = ("bias", "mask")
# Tangents travel with the primal arrays under the same name with this suffix.
_DOT = "_dot"


def _cut(x: Array, axis: int, tile: Any, tiles: int) -> Array:
    """Cuts an axis into tiles, the last one filled up with zeros, and puts the tile axis first."""
    if tiles == 1:
        return x[None]
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, tiles * tile - x.shape[axis])
    x = jnp.pad(x, padding)
    x = x.reshape(*x.shape[:axis], tiles, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x: Array, call: _Call) -> Array:
    """The inverse for results: [row tiles, B, K, G, tile, ...] -> [B, K, G, T, ...]."""
    if call.row_tiles == 1:
        return x[0]
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, : call.rows]


def _scan(body: Callable, carry: Any, xs: Any, length: int, remat: bool) -> tuple[Any, Any]:
    """`lax.scan` of `body(carry, index, x)`; a single step is a plain call."""
    if length == 1:
        carry, y = body(carry, 0, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda leaf: leaf[None], y)

    def step(carry, x):
        return body(carry, *x)

    if remat:
        # In a scan nothing can be merged with the forward pass, so no barrier is needed.
        step = jax.checkpoint(step, prevent_cse=False)
    return lax.scan(step, carry, (jnp.arange(length, dtype=jnp.int32), xs))


def _over_tiles(
    call: _Call,
    arrays: dict[str, Array],
    start: Callable[[tuple], Any],
    step: Callable[[Any, Any, Any, dict[str, Array]], Any],
    remat: bool = False,
) -> Any:
    """For each tile of rows, folds `step` over the tiles of keys that it may see.

    Linear in every array that `step` is linear in, hence transposable.

    Args:
      call: says how to cut.
      arrays: by name, in the layout of `_Arrays`.
      start: [B, K, G, row tile] -> the carry.
      step: (carry, row tile index, key tile index, the arrays of this tile) -> carry.
      remat: derivatives recompute everything inside a step instead of storing it.

    Returns:
      The last carries, rows joined: leaves [B, K, G, T, ...].
    """
    fixed, by_row, by_key, by_both = {}, {}, {}, {}
    for name, x in arrays.items():
        base = name.removesuffix(_DOT)
        row, key = _ROW_AXIS.get(base, -1), _KEY_AXIS.get(base, -1)
        has_rows = row >= 0 and not (base in _PAIRS and x.shape[row] == 1)
        has_keys = key >= 0 and not (base in _PAIRS and x.shape[key] == 1)
        if has_keys:
            x = _cut(x, key, call.key_tile, call.key_tiles)
        if has_rows:
            x = _cut(x, row + has_keys, call.row_tile, call.row_tiles)
        (fixed, by_row, by_key, by_both)[has_rows + 2 * has_keys][name] = x
    spec = call.spec
    # Offsets differ from batch to batch (and batches may be on other devices): then no tile is
    # skipped for the whole batch.
    skips = call.key_tiles > 1 and spec.has_window and "query_offset" not in arrays

    def row_tile(_, i, rows):
        def key_tile(carry, j, keys):
            def advance(carry):
                return step(carry, i, j, {**fixed, **rows[0], **keys})

            if not skips:
                return advance(carry), None
            first_row, first_key = i * call.row_tile, j * call.key_tile
            needed = spec.block_in_window(
                first_row, first_row + call.row_tile - 1, first_key, first_key + call.key_tile - 1
            )
            return lax.cond(needed, advance, lambda carry: carry, carry), None

        carry = start(rows[0]["query"].shape[:4])
        carry = jax.tree.map(lambda x: _varying_like(x, arrays), carry)
        return None, _scan(key_tile, carry, {**by_key, **rows[1]}, call.key_tiles, remat)[0]

    # by_both leads with its row tiles, then its key tiles.
    _, carries = _scan(row_tile, None, (by_row, by_both), call.row_tiles, remat)
    return jax.tree.map(lambda x: _join(x, call), carries)


def _varying_like(x: Array, arrays: dict[str, Array]) -> Array:
    """x, varying over each manual mesh axis (`shard_map`) that one of the arrays varies over.

    A scan's carry must start as it goes on. `full_like` copies that part of an array's type.
    """
    zeros = (lax.full_like(like, 0, dtype=x.dtype, shape=()) for like in arrays.values())
    return functools.reduce(operator.add, zeros, x)


# --- One tile -------------------------------------------------------------------------------------


def _visible(call: _Call, i: Any, j: Any, tile: dict[str, Array]) -> Array | None:
    """Which keys (last axis) each row sees: bool, broadcasts to [B, K, G, t, s]; None = all."""

    def per_batch(x: Array) -> Array:
        return x.reshape(-1, 1, 1, 1, 1)

    rows = i * call.row_tile + jnp.arange(call.row_tile, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
    keys = j * call.key_tile + jnp.arange(call.key_tile, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    conditions = []
    # What fills up the last tiles neither is seen nor sees, lest a NaN count as seen.
    if call.row_tiles * call.row_tile != call.rows:
        conditions.append(rows < call.rows)
    if call.key_tiles * call.key_tile != call.keys:
        conditions.append(keys < call.keys)
    if "query_seq_lengths" in tile:
        conditions.append(rows < per_batch(tile["query_seq_lengths"]))
    if "key_value_seq_lengths" in tile:
        conditions.append(keys < per_batch(tile["key_value_seq_lengths"]))
    if call.spec.has_window:
        positions = rows
        if "query_offset" in tile:
            positions = positions + per_batch(tile["query_offset"])
        conditions.append(call.spec.in_window(positions, keys))
    if "query_segment_ids" in tile:
        row_ids, key_ids = tile["query_segment_ids"], tile["key_value_segment_ids"]
        conditions.append(row_ids[:, None, None, :, None] == key_ids[:, None, None, None, :])
    if "mask" in tile:
        conditions.append(tile["mask"])
    if "bias" in tile:
        conditions.append(tile["bias"] != -jnp.inf)
    return functools.reduce(operator.and_, conditions) if conditions else None


def _seen_rows(x: Array, visible: Array | None) -> Array:
    """[B, K, G, t, H] with 0 in rows that see no key: what is stored there may be NaN."""
    return x if visible is None else jnp.where(visible.any(-1, keepdims=True), x, 0)


def _seen_keys(x: Array, visible: Array | None) -> Array:
    """[B, K, s, H] with 0 in keys that no row sees: what is stored there may be NaN."""
    return x if visible is None else jnp.where(visible.any((2, 3))[..., None], x, 0)


def _logits(call: _Call, visible: Array | None, tile: dict[str, Array]) -> Array:
    """Scaled, capped, biased and masked logits [B, K, G, t, s]."""
    query = _seen_rows(tile["query"], visible)
    key = _seen_keys(tile["key"], visible)
    logits = call.einsum("bkgth,bksh->bkgts", query, key)
    logits = logits * (tile["scale"] if call.spec.scale is None else call.spec.scale)
    if call.spec.logits_soft_cap is not None:
        logits = call.spec.logits_soft_cap * jnp.tanh(logits / call.spec.logits_soft_cap)
    if "bias" in tile:
        logits = logits + tile["bias"].astype(call.wide)
    return logits if visible is None else jnp.where(visible, logits, -jnp.inf)


# --- Primal and tangent ---------------------------------------------------------------------------


def _present(arrays: _Arrays) -> dict[str, Array]:
    return {name: x for name, x in arrays._asdict().items() if x is not None}


def _forward(call: _Call, arrays: _Arrays) -> tuple[Array, Array, Array]:
    """Returns out [B, K, G, T, Hv] and the log-sum-exp [B, K, G, T] as a shift and a remainder.

    One number is not enough where logits are large: 1e5 + log(2) has lost the log(2) in float32,
    and with it the probabilities that the derivatives recompute.
    """

    def start(shape):
        largest = jnp.full(shape, -jnp.inf, call.wide)
        total = jnp.zeros(shape, call.wide)
        return largest, total, jnp.zeros((*shape, arrays.value.shape[-1]), call.wide)

    def step(carry, i, j, tile):
        largest, total, out = carry
        visible = _visible(call, i, j, tile)
        logits = _logits(call, visible, tile)
        new = jnp.maximum(largest, logits.max(-1, initial=-jnp.inf))
        shift = jnp.where(new == -jnp.inf, 0, new)
        weights = jnp.exp(logits - shift[..., None])
        rescale = jnp.exp(largest - shift)
        total = total * rescale + weights.sum(-1)
        value = _seen_keys(tile["value"], visible)
        out = out * rescale[..., None] + call.einsum("bkgts,bksh->bkgth", weights, value)
        return new, total, out

    largest, total, out = _over_tiles(call, _present(arrays), start, step)
    sees = largest != -jnp.inf
    shift = jnp.where(sees, largest, 0)
    if arrays.sinks is not None:
        sinks = arrays.sinks[..., None]
        with_sink = jnp.where(sees, jnp.maximum(shift, sinks), 0)
        rescale = jnp.exp(shift - with_sink)
        total = total * rescale + jnp.exp(sinks - with_sink)
        out = out * rescale[..., None]
        shift = with_sink
    total = jnp.where(sees, total, 1)
    out = jnp.where(sees[..., None], out / total[..., None], 0).astype(call.dtype)
    return out, shift, jnp.where(sees, jnp.log(total), -jnp.inf)


def _tangent(
    call: _Call,
    arrays: _Arrays,
    saved: tuple[Array, Array, Array],
    tangents: dict[str, Array],
) -> tuple[Array, Array]:
    """Tangents of out and of the log-sum-exp: linear in `tangents`, differentiable in the rest.

    With probabilities p and logits s: lse' = sum_j p_j s'_j (a sink is one more j), and
    out' = sum_j p_j (s'_j v_j + v'_j) - lse' out.
    """
    out, shift, log_sum = saved
    sees = log_sum != -jnp.inf
    log_sum = jnp.where(sees, log_sum, 0)
    named = {**_present(arrays), "shift": shift, "log_sum": log_sum}
    named |= {name + _DOT: x for name, x in tangents.items()}
    moves_logits = not tangents.keys() <= {"value", "sinks"}

    def start(shape):
        return jnp.zeros(shape, call.wide), jnp.zeros((*shape, out.shape[-1]), call.wide)

    def step(carry, i, j, tile):
        lse_dot, out_dot = carry
        visible = _visible(call, i, j, tile)
        of_tile = {name: tile[name + _DOT] for name in tangents if name != "sinks"}
        value_dot = of_tile.pop("value", None)
        logits, logits_dot = jax.jvp(
            lambda floats: _logits(call, visible, {**tile, **floats}),
            ({name: tile[name] for name in of_tile},),
            (of_tile,),
        )
        probs = jnp.exp(logits - tile["shift"][..., None] - tile["log_sum"][..., None])
        if moves_logits:
            probs_dot = probs * logits_dot
            lse_dot += probs_dot.sum(-1)
            value = _seen_keys(tile["value"], visible)
            out_dot += call.einsum("bkgts,bksh->bkgth", probs_dot, value)
        if value_dot is not None:
            value_dot = _seen_keys(value_dot, visible)
            out_dot += call.einsum("bkgts,bksh->bkgth", probs, value_dot)
        return lse_dot, out_dot

    lse_dot, out_dot = _over_tiles(
        call, named, start, step, remat=call.row_tiles * call.key_tiles > 1
    )
    if "sinks" in tangents:
        exponent = jnp.where(sees, arrays.sinks[..., None] - shift - log_sum, -jnp.inf)
        lse_dot += jnp.exp(exponent) * tangents["sinks"][..., None]
    out_dot -= lse_dot[..., None] * out.astype(call.wide)
    # Selected, not multiplied: a cotangent of a row that sees nothing may be NaN.
    out_dot = jnp.where(sees[..., None], out_dot, 0).astype(call.dtype)
    return out_dot, jnp.where(sees, lse_dot, 0)


_attention = jax.custom_jvp(_forward, nondiff_argnums=(0,))


def _attention_jvp(call: _Call, primals, tangents):
    (arrays,), (tangents,) = primals, tangents
    # Named inside the rule: a policy that saves the name spares the backward pass the forward one.
    out, shift, log_sum = (checkpoint_name(x, "context") for x in _attention(call, arrays))
    moving = {
        name: x
        for name in _DIFFERENTIABLE
        if (x := getattr(tangents, name)) is not None and not isinstance(x, SymbolicZero)
    }
    out_dot, lse_dot = _tangent(call, arrays, (out, shift, log_sum), moving)
    # The shift is a constant in that the remainder takes the whole tangent of the sum.
    return (out, shift, log_sum), (out_dot, jnp.zeros_like(shift), lse_dot)


_attention.defjvp(_attention_jvp, symbolic_zeros=True)
