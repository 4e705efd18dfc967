"""Attention on the CUDA kernels, as a citizen of every JAX transform.

The typed custom calls of :mod:`fa4_jax.custom_calls` know nothing but arrays. This module wraps
them, from the outside in, in

* ``custom_jvp`` whose rule names output and log-sum-exp "context" for ``jax.checkpoint``, and a
  linear primitive for their tangents, whose transpose is the backward call,
* ``custom_vmap``: a mapped axis becomes one more batch axis of one kernel launch,
* ``custom_partitioning`` with a Shardy rule: batch, head and query-sequence axes stay sharded,
* ``platform_dependent``: one lowered program runs the kernels on CUDA and :mod:`fa4_jax.xla`
  elsewhere, where the caller allows that.

Inside ``shard_map`` the partitioning step lowers to nothing. Forward-mode and second-order
derivatives are XLA's where the caller allows that, on every platform; else they raise
``NotImplementedError``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from fa4_jax import custom_calls, segments, xla
from fa4_jax.spec import AttentionSpec, Operands

_WRONG_PLATFORM = {
    "cuda": (
        'fa4_jax: implementation="fa4" runs on CUDA devices alone, and this program is compiled '
        'for another platform; use implementation="xla", "emulated" (the same kernels on the CPU) '
        "or None (the best for each platform)"
    ),
    "cpu": (
        'fa4_jax: implementation="emulated" runs on CPU devices alone, and this program is '
        'compiled for another platform; use implementation="fa4", "xla" or None'
    ),
}


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static about a pair of custom calls.

    Attributes:
      left, right: the window, None = unlimited.
      logits_soft_cap: None = no cap.
      platform: the only platform that the program is for ("cuda", or "cpu" for the emulator), or
        None: CUDA runs the kernels, every other platform :mod:`fa4_jax.xla`.
    """

    left: int | None
    right: int | None
    logits_soft_cap: float | None
    platform: str | None

    def attributes(self) -> dict[str, Any]:
        left, right = (
            custom_calls.UNLIMITED if side is None else side for side in (self.left, self.right)
        )
        return {
            "window_left": left,
            "window_right": right,
            "logits_soft_cap": self.logits_soft_cap or 0.0,
        }

    def run(self, kernels: Callable, fallback: Callable, *arguments):
        """Lowers to ``kernels`` or ``fallback``, as the platform of the program asks."""
        platform = self.platform
        if platform is None:
            return lax.platform_dependent(*arguments, cuda=kernels, default=fallback)

        def refuse(*arguments):
            leaves = jax.tree.leaves(arguments)
            traced, types = jax.make_jaxpr(kernels, return_shape=True)(*arguments)
            results = _refused_p.bind(
                *leaves, avals=tuple(traced.out_avals), message=_WRONG_PLATFORM[platform]
            )
            return jax.tree.unflatten(jax.tree.structure(types), results)

        return lax.platform_dependent(*arguments, default=refuse, **{platform: kernels})

    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.left, self.right, logits_soft_cap=self.logits_soft_cap)


class _Inputs(NamedTuple):
    """Operands of the forward call, None = absent.

    Every one has the batch axis B first, or several batch axes in its place: those of vmap, then B.
    They stay apart until the kernels are called, so that each may be sharded.
    """

    query: Any  # [B,T,N,H]
    key: Any  # [B,S,K,H]
    value: Any  # [B,S,K,Hv]
    scale: Any  # f32 [B]
    query_seq_lengths: Any = None  # s32 [B]
    key_value_seq_lengths: Any = None
    query_offset: Any = None
    query_segment_ids: Any = None  # s32 [B,T]
    key_value_segment_ids: Any = None  # s32 [B,S]
    sinks: Any = None  # f32 [B,N]; the backward call has none, they are in lse

    def operands(self) -> Operands:
        return Operands(**self._asdict())


class _Saved(NamedTuple):
    """What the backward call needs beside the inputs."""

    out: Any  # [B,T,N,Hv]
    lse: Any  # f32 [B,T,N]
    dout: Any  # [B,T,N,Hv]
    dlse: Any = None  # f32 [B,T,N]


def _in_auto_axes(function: Callable, types: Any) -> Callable:
    """``function`` of these result types; inside it, Explicit mesh axes are Auto."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if not explicit:
        return function
    shards = jax.tree.map(lambda x: x.sharding.spec, types)
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=shards)


def _flattened(operation: Callable) -> Callable:
    """Lets ``operation(call, inputs, *trees)``, written for one batch axis, take several."""

    @functools.wraps(operation)
    def call_flattened(call: _Call, inputs: _Inputs, *trees):
        axes = inputs.query.shape[:-3]

        def join(x):
            return x.reshape(math.prod(axes), *x.shape[len(axes) :])

        results = operation(call, *jax.tree.map(join, (inputs, *trees)))
        return jax.tree.map(lambda x: x.reshape(*axes, *x.shape[1:]), results)

    return call_flattened


def attend(
    spec: AttentionSpec, operands: Operands, *, platform: str | None
) -> tuple[jax.Array, jax.Array]:
    """Attention through the kernels' custom calls.

    The caller has made sure that :func:`fa4_jax.implementations.reasons` is empty.

    Args:
      spec: what to compute; windows, scale and cap are used.
      operands: bfloat16 or float16 query, key and value, int32 lengths, offsets and segment ids,
        and sinks.
      platform: "cuda" for a program that can be lowered for CUDA alone, "cpu" for one whose kernels
        the emulator runs, None for one that runs the kernels on CUDA and :mod:`fa4_jax.xla`
        anywhere else.

    Returns:
      ``(out, lse)``: query's dtype ``[B,T,N,Hv]`` and float32 ``[B,T,N]``.

    Raises:
      NotImplementedError: for forward-mode or second-order differentiation with a platform.
    """
    scale = spec.scale if operands.scale is None else operands.scale
    spread = functools.partial(_spread, operands.query)
    inputs = _Inputs(
        query=operands.query,
        key=operands.key,
        value=operands.value,
        scale=spread(scale, (0,)),
        query_seq_lengths=operands.query_seq_lengths,
        key_value_seq_lengths=operands.key_value_seq_lengths,
        query_offset=operands.query_offset,
        query_segment_ids=operands.query_segment_ids,
        key_value_segment_ids=operands.key_value_segment_ids,
        sinks=None if operands.sinks is None else spread(operands.sinks, (0, 2)),
    )
    call = _Call(spec.left, spec.right, spec.logits_soft_cap, platform)
    # A NumPy array under a vmap is a constant that custom_jvp refuses. A copy of it is not, and is
    # nothing in a compiled program.
    inputs = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, Tracer) else x, inputs)
    return _attention(call, _equally_varying(inputs))


# Jitted, with query as an operand, because a type alone does not name the devices of its sharding.
@functools.partial(jax.jit, static_argnames="axes", inline=True, keep_unused=True)
def _spread(query: jax.Array, x: Any, axes: tuple[int, ...]) -> jax.Array:
    """Broadcasts x to float32 of the given axes of query, also in how it is sharded."""
    shape = tuple(query.shape[axis] for axis in axes)
    broadcast: Any = functools.partial(jnp.broadcast_to, shape=shape)
    sharding = jax.typeof(query).sharding
    if explicit := sharding.mesh.explicit_axes:
        # Else a gradient of it would be sharded otherwise than itself.
        spec = PartitionSpec(*(sharding.spec[axis] for axis in axes))
        out_sharding = sharding.update(spec=spec)
        broadcast = jax.sharding.auto_axes(broadcast, axes=explicit, out_sharding=out_sharding)
    return broadcast(jnp.asarray(x, jnp.float32))


def _equally_varying(inputs: _Inputs) -> _Inputs:
    """Inside ``shard_map``: marks every array as different on each shard where any of them is.

    Else keys that all shards share would promise a gradient that they share too, and the sum over
    the shards, which is the transpose of this mark, would be missing.
    """

    def varying(x):
        return jax.typeof(x).manual_axis_type.varying

    union = frozenset().union(*(varying(x) for x in jax.tree.leaves(inputs)))

    def mark(x):
        missing = tuple(union - varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, inputs)


# --- Differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(call: _Call, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
    return _forward(call, inputs)


def _attention_jvp(call: _Call, primals, tangents):
    (inputs,), (tangents,) = primals, tangents
    # Both named here, inside the rule: else remat runs the kernel again for the missing one.
    out, lse = checkpoint_name(_attention(call, inputs), "context")
    moving = {
        name: x
        for name in _DIFFERENTIABLE
        if (x := getattr(tangents, name)) is not None and not isinstance(x, SymbolicZero)
    }
    leaves, structure = jax.tree.flatten(((inputs, out, lse), moving))
    return (out, lse), tuple(_tangent_p.bind(*leaves, call=call, structure=structure))


_attention.defjvp(_attention_jvp, symbolic_zeros=True)

_DIFFERENTIABLE = ("query", "key", "value", "scale", "sinks")

_FIRST_ORDER_ONLY = (
    "fa4_jax: the kernels have first-order reverse-mode derivatives only; use "
    'implementation="xla" or None for forward-mode (jvp, jacfwd, linearize) and second-order '
    "(hessian, grad of grad) differentiation"
)


def _refuse(*_, message: str, **__):
    raise NotImplementedError(message)


# A stand-in of any type that can be traced but neither evaluated nor lowered.
_refused_p = Primitive("fa4_refused")
_refused_p.multiple_results = True
_refused_p.def_impl(_refuse)
_refused_p.def_abstract_eval(lambda *_, avals, message: avals)
mlir.register_lowering(_refused_p, lambda _, *args, **params: _refuse(*args, **params))

# The linear map from tangents of inputs to those of out and lse. Reverse mode transposes it, which
# is the backward call. Forward mode evaluates it: XLA can, where the caller lets it stand in.
_tangent_p = Primitive("fa4_tangent")
_tangent_p.multiple_results = True


def _tangent(*leaves, call: _Call, structure):
    if call.platform is not None:
        raise NotImplementedError(_FIRST_ORDER_ONLY)
    (inputs, out, lse), moving = jax.tree.unflatten(structure, leaves)
    by_xla = _in_auto_axes(
        functools.partial(_tangent_by_xla, call), (jax.typeof(out), jax.typeof(lse))
    )
    return by_xla(inputs, out, lse, moving)


@_flattened
def _tangent_by_xla(call: _Call, inputs: _Inputs, out, lse, moving: dict[str, jax.Array]):
    return xla.tangent(call.spec(), inputs.operands(), out, lse, moving)


def _tangent_jvp(primals, tangents, **parameters):
    tangents = tuple(ad.instantiate_zeros(x) for x in tangents)
    return jax.jvp(functools.partial(_tangent, **parameters), primals, tangents)


def _tangent_transpose(cotangents, *leaves, call: _Call, structure):
    (inputs, out, lse), moving = jax.tree.unflatten(structure, leaves)
    dout, dlse = (None if isinstance(ct, ad.Zero) else ct for ct in cotangents)
    if dout is None and dlse is None:
        return [None] * len(leaves)
    dout = jnp.zeros_like(out) if dout is None else dout
    gradients = _gradients(call, frozenset(moving), inputs, _Saved(out, lse, dout, dlse))
    return [None] * (len(leaves) - len(moving)) + jax.tree.leaves(gradients)


def _tangent_batched(leaves, axes, **parameters):
    (size,) = {x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None}
    mapped = (_mapped_first(x, axis, size) for x, axis in zip(leaves, axes, strict=True))
    return _tangent_p.bind(*mapped, **parameters), (0, 0)


def _tangent_types(*leaves, call: _Call, structure):
    (_, out, lse), _ = jax.tree.unflatten(structure, leaves)
    return out, lse


_tangent_p.def_impl(_tangent)
_tangent_p.def_abstract_eval(_tangent_types)
mlir.register_lowering(_tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
ad.primitive_jvps[_tangent_p] = _tangent_jvp
ad.primitive_transposes[_tangent_p] = _tangent_transpose
batching.primitive_batchers[_tangent_p] = _tangent_batched


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(
    call: _Call, wanted: frozenset[str], inputs: _Inputs, saved: _Saved
) -> dict[str, jax.Array]:
    """Gradients of the inputs with the wanted names."""
    out, lse, dout, dlse = saved
    sees = lse != -jnp.inf
    found = {}
    if "sinks" in wanted:
        # With the sink's probability p: d lse / d sink = p and d out / d sink = -p out.
        shared = -jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
        shared = shared if dlse is None else shared + dlse
        # Selected, not multiplied: the cotangent of a row that sees nothing may be NaN.
        dsinks = jnp.where(sees, jnp.exp(inputs.sinks[..., None, :] - lse) * shared, 0)
        found["sinks"] = dsinks.sum(-2)
    if wanted - {"sinks"}:
        query, scale = inputs.query, inputs.scale
        is_zero = (scale == 0)[..., None, None, None]
        if "scale" in wanted:
            # dq is divided by the scale below. Queries of 0 have the logits that a scale of 0 has.
            query, scale = jnp.where(is_zero, 0, query), jnp.where(scale == 0, 1, scale)
        changed = inputs._replace(query=query, scale=scale, sinks=None)
        dq, dk, dv = _backward(call, changed, saved)
        if "scale" in wanted:
            # dq = scale * sum_j dz_j k_j, hence q . dq = scale * sum_j dz_j (q . k_j), where dz is
            # the cotangent of the logits before the cap.
            product = inputs.query.astype(jnp.float32) * dq.astype(jnp.float32)
            product = jnp.where(sees[..., None], product, 0)
            found["scale"] = jnp.sum(product, axis=(-3, -2, -1)) / scale
            dq = jnp.where(is_zero, 0, dq)
        found |= {"query": dq, "key": dk, "value": dv}
    return {name: found[name] for name in wanted}


def _gradients_jvp(call: _Call, wanted: frozenset[str], primals, tangents):
    if call.platform is not None:
        raise NotImplementedError(_FIRST_ORDER_ONLY)

    @_flattened
    def by_xla(call, inputs, saved):
        found = xla.backward(call.spec(), inputs.operands(), *saved)
        return {name: getattr(found, name) for name in wanted}

    inputs, _ = primals
    types = {name: jax.typeof(getattr(inputs, name)) for name in wanted}
    return jax.jvp(_in_auto_axes(functools.partial(by_xla, call), types), primals, tangents)


_gradients.defjvp(_gradients_jvp)


# --- Batching -------------------------------------------------------------------------------------


def _mapped_first(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    """x with its mapped axis in front, repeated where it has none."""
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)


def _mappable(operation: Callable) -> Callable:
    """Gives ``operation(call, *trees)`` a vmap rule: the mapped axis is one more batch axis."""

    @functools.cache
    def mapped(call: _Call):
        mappable = custom_vmap(functools.partial(operation, call))

        @mappable.def_vmap
        def rule(axis_size, in_batched, *trees):
            def first(x, is_mapped):
                return _mapped_first(x, 0 if is_mapped else None, axis_size)

            results = mappable(*jax.tree.map(first, trees, tuple(in_batched)))
            return results, jax.tree.map(lambda _: True, results)

        return mappable

    @functools.wraps(operation)
    def call_mapped(call: _Call, *trees):
        return mapped(call)(*trees)

    return call_mapped


# --- Partitioning ---------------------------------------------------------------------------------


class _Shards(NamedTuple):
    """How one call is split over the mesh axes; each entry is a PartitionSpec entry."""

    batch: tuple  # an entry for each batch axis
    time: Any
    heads: Any
    kv_heads: Any  # equal to heads, or None where every shard gets all kv heads

    def inputs(self, inputs: _Inputs) -> _Inputs:
        """PartitionSpecs of the inputs; None where absent."""
        spec = PartitionSpec
        per_batch = spec(*self.batch)
        specs = _Inputs(
            query=spec(*self.batch, self.time, self.heads, None),
            key=spec(*self.batch, None, self.kv_heads, None),
            value=spec(*self.batch, None, self.kv_heads, None),
            scale=per_batch,
            query_seq_lengths=per_batch,
            key_value_seq_lengths=per_batch,
            query_offset=per_batch,
            query_segment_ids=spec(*self.batch, self.time),
            key_value_segment_ids=spec(*self.batch, None),
            sinks=spec(*self.batch, self.heads),
        )
        return _Inputs(*(None if x is None else s for x, s in zip(inputs, specs, strict=True)))

    def saved(self, saved: _Saved) -> _Saved:
        out = PartitionSpec(*self.batch, self.time, self.heads, None)
        lse = PartitionSpec(*self.batch, self.time, self.heads)
        return _Saved(out, lse, out, None if saved.dlse is None else lse)


def _shards(mesh, inputs: _Inputs) -> _Shards:
    """Follows the query's sharding as far as the mathematics allows."""
    sharding = inputs.query.sharding
    rank = len(inputs.query.shape)
    if not isinstance(sharding, NamedSharding):  # no mesh to name axes with: gather
        return _Shards((None,) * (rank - 3), None, None, None)
    *batch, time, heads, _ = (*sharding.spec, *(None,) * (rank - len(sharding.spec)))
    batch = tuple(batch)
    num_heads, num_kv_heads = inputs.query.shape[-2], inputs.key.shape[-2]
    size = _axes_size(mesh, heads)
    if num_kv_heads % size == 0:
        return _Shards(batch, time, heads, heads)
    group = num_heads // num_kv_heads
    if num_heads % size or group % (num_heads // size):
        return _Shards(batch, time, None, None)
    # Every shard's query heads read one and the same kv head.
    return _Shards(batch, time, heads, None)


def _axes_size(mesh, axes) -> int:
    return math.prod(mesh.shape[name] for name in _axes_names(axes))


def _axes_names(axes) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _localise(shards: _Shards, mesh, call: _Call, inputs: _Inputs, whole: _Inputs):
    """One shard's inputs as an attention problem of its own.

    Args:
      whole: the inputs, or their types, of all shards together.

    Returns:
      The inputs, and the index of the one kv head that they read where ``kv_heads`` is not split.
    """
    length, num_heads = inputs.query.shape[-3:-1]
    if shards.time is not None:
        start = lax.axis_index(_axes_names(shards.time)) * length
        if call.left is not None or call.right is not None:
            offset = 0 if inputs.query_offset is None else inputs.query_offset
            offset = jnp.broadcast_to(offset + start, inputs.scale.shape).astype(jnp.int32)
            inputs = inputs._replace(query_offset=offset)
        rows, lengths = whole.query.shape[-3], inputs.query_seq_lengths
        if lengths is None and rows % _axes_size(mesh, shards.time):
            lengths = jnp.full(inputs.scale.shape, rows, jnp.int32)
        if lengths is not None:
            # Past all rows a shard is filled up with anything.
            lengths = jnp.clip(jnp.minimum(lengths, rows) - start, 0, length)
            inputs = inputs._replace(query_seq_lengths=lengths.astype(jnp.int32))
    kv_head = None
    if shards.heads is not None and shards.kv_heads is None:
        group = whole.query.shape[-2] // whole.key.shape[-2]
        kv_head = lax.axis_index(_axes_names(shards.heads)) * num_heads // group
        key, value = (
            lax.dynamic_slice_in_dim(x, kv_head, 1, axis=-2) for x in (inputs.key, inputs.value)
        )
        inputs = inputs._replace(key=key, value=value)
    return inputs, kv_head


def _sharding_rule(structure, mesh, operand_types, result_types) -> tuple[str, dict[str, Any]]:
    """The Shardy rule of either call.

    Factors: b0, b1, ... batch, t query positions, n query heads, m kv heads where they are fewer,
    s keys, h and v head dimensions. One compound factor (m g) for grouped query heads would let
    Shardy split a mesh axis between m and g, which no PartitionSpec can express; so m stands alone,
    and `_shards` ties the kv heads to the query heads.

    Args:
      structure: of the operands: `_Inputs`, for the backward call also `_Saved`.
    """
    inputs, *saved = jax.tree.unflatten(structure, operand_types)
    kv_heads = "n" if inputs.query.shape[-2] == inputs.key.shape[-2] else "m"
    b = " ".join(f"b{axis}" for axis in range(len(inputs.query.shape) - 3))
    query, lse, out = f"{b} t n h", f"{b} t n", f"{b} t n v"
    key, value = f"{b} s {kv_heads} h", f"{b} s {kv_heads} v"
    factors = [_Inputs(query, key, value, b, b, b, b, f"{b} t", f"{b} s", f"{b} n")]
    factors += [_Saved(out, lse, out, lse)] * len(saved)
    arguments = [
        factor
        for names, types in zip(factors, (inputs, *saved), strict=True)
        for factor, present in zip(names, types, strict=True)
        if present is not None
    ]
    results = [query, key, value] if saved else [out, lse]
    rule = ", ".join(arguments) + " -> " + ", ".join(results)
    return rule, {"need_replication_factors": ("h", "s", "v")}


def _partitioned(operation: Callable, partition: Callable, result_types: Callable) -> Callable:
    """Runs ``operation(call, *trees)`` on each device's shard under jit.

    Args:
      partition: the callback of ``custom_partitioning``, after ``call``.
      result_types: types of the results, shardings included, from the trees.
    """

    @functools.cache
    def partitioned(call: _Call, structure):
        function = custom_partitioning(functools.partial(operation, call))
        function.def_partition(
            partition=functools.partial(partition, call),
            sharding_rule=functools.partial(_sharding_rule, structure),
        )
        return function

    @functools.wraps(operation)
    def call_partitioned(call: _Call, *trees):
        function = partitioned(call, jax.tree.structure(trees))
        # With Explicit axes the result types name their shardings; the partitioner makes them so.
        return _in_auto_axes(function, result_types(*trees))(*trees)

    return call_partitioned


def _named(mesh, specs):
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def _without_mesh(function: Callable) -> Callable:
    """Traces ``function`` as a program for one shard, whose arrays have no shardings.

    The partitioner traces it where the user's mesh may still be in context; with Explicit axes
    the shard's own operations would then be taken for operations on the whole mesh.
    """

    @functools.wraps(function)
    def traced(*arguments):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(*arguments)

    return traced


def _partition_forward(call: _Call, mesh, arguments, results):
    (whole,) = arguments
    shards = _shards(mesh, whole)

    @_without_mesh
    def local(inputs):
        inputs, _ = _localise(shards, mesh, call, inputs, whole)
        return _forward_local(call, inputs)

    result_specs = (
        PartitionSpec(*shards.batch, shards.time, shards.heads, None),
        PartitionSpec(*shards.batch, shards.time, shards.heads),
    )
    return mesh, local, _named(mesh, result_specs), _named(mesh, (shards.inputs(whole),))


def _partition_backward(call: _Call, mesh, arguments, results):
    whole, whole_saved = arguments
    shards = _shards(mesh, whole)
    num_kv_heads = whole.key.shape[-2]

    @_without_mesh
    def local(inputs, saved):
        inputs, kv_head = _localise(shards, mesh, call, inputs, whole)
        dq, dk, dv = _backward_local(call, inputs, saved)
        # Shards of the query positions, and of the query heads of one kv head, each hold a part
        # of the sum over queries.
        summed = _axes_names(shards.time)
        if kv_head is not None:
            summed += _axes_names(shards.heads)

            def place(x):
                every = jnp.zeros((*x.shape[:-2], num_kv_heads, x.shape[-1]), x.dtype)
                return lax.dynamic_update_slice_in_dim(every, x, kv_head, axis=-2)

            dk, dv = place(dk), place(dv)
        if summed:
            dk, dv = (lax.psum(x.astype(jnp.float32), summed).astype(x.dtype) for x in (dk, dv))
        return dq, dk, dv

    query, key, value = shards.inputs(whole)[:3]
    return (
        mesh,
        local,
        _named(mesh, (query, key, value)),
        _named(mesh, (shards.inputs(whole), shards.saved(whole_saved))),
    )


# --- Dispatch -------------------------------------------------------------------------------------


@_flattened
def _forward_local(call: _Call, inputs: _Inputs):
    query, value = inputs.query, inputs.value
    shape = (*query.shape[:3], value.shape[3])
    if _is_empty(inputs):
        return (
            jnp.zeros(shape, query.dtype),
            jnp.full(shape[:3], -jnp.inf, jnp.float32),
        )

    def kernels(inputs):
        bounds = None
        if inputs.query_segment_ids is not None:
            _, keys = segments.seen(call.spec(), inputs.operands())
            inputs = inputs._replace(value=_keep(keys, inputs.value))
            bounds = segments.bounds(inputs.query_segment_ids, inputs.key_value_segment_ids)
        *others, sinks = inputs
        operands: list[Any] = [*others, bounds, sinks]
        return custom_calls.forward(*operands, **call.attributes())

    def fallback(inputs):
        return xla.forward(call.spec(), inputs.operands())

    return call.run(kernels, fallback, inputs)


@_flattened
def _backward_local(call: _Call, inputs: _Inputs, saved: _Saved):
    if _is_empty(inputs):
        return tuple(jnp.zeros_like(x) for x in (inputs.query, inputs.key, inputs.value))

    def kernels(inputs, saved):
        bounds = None
        if inputs.query_segment_ids is not None:
            queries, keys = segments.seen(call.spec(), inputs.operands())
            query, key = _keep(queries, inputs.query), _keep(keys, inputs.key)
            inputs = inputs._replace(query=query, key=key)
            saved = saved._replace(dout=_keep(queries, saved.dout))
            bounds = segments.bounds(inputs.key_value_segment_ids, inputs.query_segment_ids)
        query, key, value, *others, _ = inputs
        operands: list[Any] = [query, key, value, *saved, *others, bounds]
        return custom_calls.backward(*operands, **call.attributes())

    def fallback(inputs, saved):
        gradients = xla.backward(call.spec(), inputs.operands(), *saved)
        return gradients.query, gradients.key, gradients.value

    return call.run(kernels, fallback, inputs, saved)


def _keep(rows: jax.Array, x: jax.Array) -> jax.Array:
    """x [B, R, N, H] with 0 in the other rows, which nobody sees; rows bool [B, R].

    For operands whose hidden rows a kernel multiplies by 0, which makes no 0 of a NaN: values in
    the forward, queries, keys and dout in the backward. Hidden scores and their cotangents it
    overwrites. Rows that lengths and windows hide it clears itself; which ones segments hide, it
    cannot know.
    """
    return jnp.where(rows[:, :, None, None], x, 0)


def _is_empty(inputs: _Inputs) -> bool:
    # Symbolic dimensions (jax.export) are at least 1.
    sizes = (*inputs.query.shape, *inputs.key.shape)
    return any(isinstance(size, int) and size == 0 for size in sizes)


def _forward_types(inputs: _Inputs):
    query = jax.typeof(inputs.query)
    spec = query.sharding.spec
    lse = query.sharding.update(spec=PartitionSpec(*spec[:-1]))
    return (
        query.update(shape=(*query.shape[:-1], inputs.value.shape[-1])),
        query.update(shape=query.shape[:-1], dtype=jnp.dtype(jnp.float32), sharding=lse),
    )


def _backward_types(inputs: _Inputs, saved: _Saved):
    return tuple(jax.typeof(x) for x in (inputs.query, inputs.key, inputs.value))


# Jitted, else every call outside of a jit would compile its program again. Inlined into others: two
# calls of one function would be two kernel launches that read as one.
_jit = functools.partial(jax.jit, static_argnums=0, inline=True)
_forward = _jit(_mappable(_partitioned(_forward_local, _partition_forward, _forward_types)))
_backward = _jit(_mappable(_partitioned(_backward_local, _partition_backward, _backward_types)))
