"""Attention under jit with sharded inputs, and inside shard_map, equals the unsharded result.

CPU: eight simulated devices, where "fa4" is the kernels' whole transform stack with XLA as the
platform's implementation of the calls (``implementation=None``). On a GPU machine these tests run
where there are eight devices; two real GPUs are ``test_multi_gpu.py``.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_close

import fa4_jax

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
B, T, S, H = 4, 16, 24, 8


@pytest.fixture(params=["xla", None], ids=["xla", "automatic"])
def attention(request):
    return functools.partial(
        fa4_jax.dot_product_attention,
        is_causal=True,
        return_residual=True,
        implementation=request.param,
    )


def problem(num_heads, num_kv_heads):
    keys = jax.random.split(jax.random.key(num_heads), 5)
    shapes = [(B, T, num_heads, H), (B, S, num_kv_heads, H), (B, S, num_kv_heads, H)]
    query, key, value = (
        jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=False)
    )
    dout = jax.random.normal(keys[3], query.shape, jnp.bfloat16)
    dlse = jax.random.normal(keys[4], query.shape[:3], jnp.float32)
    lengths = jnp.array([24, 3, 9, 20], jnp.int32)
    return query, key, value, lengths, dout, dlse


def value_and_pullback(attention):
    def run(query, key, value, lengths, dout, dlse):
        def function(query, key, value):
            return attention(query, key, value, key_value_seq_lengths=lengths)

        results, pullback = jax.vjp(function, query, key, value)
        return *results, *pullback((dout, dlse))

    return run


def count_collectives(compiled):
    text = compiled.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


# name: query heads, kv heads, specs of query and of key and value, and the collectives allowed:
# none, "sum" (dk and dv over shards of the queries) or "gather" (what cannot be sharded).
CASES = {
    "batch, heads": (8, 8, P("x", None, "y"), P("x", None, "y"), "none"),
    "GQA": (8, 4, P("x", None, "y"), P("x", None, "y"), "none"),
    "MQA": (8, 1, P("x", None, "y"), P("x"), "sum"),
    "axis does not divide kv heads": (8, 2, P("x", None, "y"), P("x"), "sum"),
    "query positions": (8, 4, P("x", "y"), P("x"), "sum"),
    "two axes on positions": (8, 4, P(None, ("x", "y")), P(), "sum"),
    "positions and heads": (8, 4, P(None, "y", "x"), P(None, None, "x"), "sum"),
    "key positions too": (8, 4, P("x", "y"), P("x", "y"), "gather"),
    "heads cannot be split": (6, 3, P(None, None, "x"), P(), "gather"),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("case", CASES)
def test_jit_keeps_shardings(attention, case, axis_type, request):
    num_heads, num_kv_heads, query_spec, kv_spec, allowed = CASES[case]
    kernels = "automatic" in request.node.callspec.id
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    arguments = problem(num_heads, num_kv_heads)
    specs = [query_spec, kv_spec, kv_spec, P(*query_spec[:1]), query_spec, P(*query_spec[:3])]
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    run = value_and_pullback(attention)
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*sharded).compile()
        results = compiled(*sharded)
    assert_close(results, jax.jit(run)(*arguments))

    collectives = count_collectives(compiled)
    if allowed == "none":
        assert not collectives
    if allowed == "sum" and kernels:
        assert set(collectives) == {"all-reduce"}
    if allowed != "gather":
        out, lse, dq, _, _ = results
        for x in (out, lse, dq):
            expected = NamedSharding(mesh, P(*query_spec[: x.ndim]))
            assert x.sharding.is_equivalent_to(expected, x.ndim), x.sharding


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [P(None, "x"), P("x"), P("x", "y"), P(None, "x", None, "y")])
def test_vmap_keeps_shardings(spec, axis_type):
    """The mapped axis and the batch are sharded each on its own."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    arguments = [jnp.stack([x, x[::-1]]) for x in problem(8, 4)]
    attention = functools.partial(fa4_jax.dot_product_attention, return_residual=True)
    run = jax.vmap(value_and_pullback(attention))
    sharded = [jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim]))) for x in arguments]
    sharded[3] = jax.device_put(arguments[3], NamedSharding(mesh, P(*spec[:2])))
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*sharded).compile()
        assert not count_collectives(compiled)
        assert_close(compiled(*sharded), jax.jit(run)(*arguments))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_forward_mode_and_second_order(attention, axis_type):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    arguments = [jnp.stack([x, x[::-1]]) for x in problem(8, 4)[:3]]

    @jax.jit
    def run(*arguments):
        def gradient(*arguments):
            out, pullback = jax.vjp(lambda *xs: attention(*xs)[0], *arguments)
            return out, pullback(out)

        return jax.jvp(jax.vmap(gradient), arguments, arguments)

    sharded = [jax.device_put(x, NamedSharding(mesh, P(None, "x", "y"))) for x in arguments]
    with jax.set_mesh(mesh):
        assert_close(run(*sharded), run(*arguments), 2**-6)


def test_jit_without_a_mesh_in_context():
    arguments = problem(8, 4)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = [P("x", None, "y")] * 3 + [P("x"), P("x", None, "y"), P("x", None, "y")]
    sharded = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arguments, specs, strict=True)
    ]
    attention = functools.partial(fa4_jax.dot_product_attention, return_residual=True)
    run = jax.jit(value_and_pullback(attention))
    compiled = run.lower(*sharded).compile()
    assert not count_collectives(compiled)
    assert_close(compiled(*sharded), run(*arguments))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_positions_that_the_mesh_does_not_divide(is_causal, with_lengths):
    """The partitioner fills the last shard up with rows that are no rows."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    query, key, value, _, dout, dlse = problem(8, 4)
    options = {"query_seq_lengths": jnp.array([16, 3, 0, 14])} if with_lengths else {}

    @jax.jit
    def run(query, key, value, dout, dlse):
        def attend(query, key, value):
            return fa4_jax.dot_product_attention(
                query[:, :-3], key, value, is_causal=is_causal, return_residual=True, **options
            )

        results, pullback = jax.vjp(attend, query, key, value)
        return *results, *pullback((dout[:, :-3], dlse[:, :-3]))

    arguments = query, key, value, dout, dlse
    specs = [P("x", "y"), P("x"), P("x"), P("x", "y"), P("x", "y")]
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    assert_close(run(*sharded), run(*arguments))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_without_jit_and_without_a_mesh_in_context(attention, axis_type):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    arguments = problem(8, 4)[:3]
    results = attention(*jax.device_put(arguments, NamedSharding(mesh, P("x", None, "y"))))
    assert all(x.sharding.spec[:3] == ("x", None, "y") for x in results)
    assert_close(results, attention(*arguments))


@pytest.mark.parametrize(
    ("implementation", "query_spec", "sinks_spec", "axis_type"),
    [
        ("xla", P("x", None, "y"), P("y"), AxisType.Auto),
        (None, P("x", None, "y"), P("y"), AxisType.Auto),
        (None, P("x", None, "y"), P(), AxisType.Explicit),
        (None, P(None, "x", "y"), P("x"), AxisType.Explicit),
        ("emulated", P("x", None, "y"), P("y"), AxisType.Auto),
    ],
    ids=str,
)
def test_every_other_operand_follows_the_query(implementation, query_spec, sinks_spec, axis_type):
    """bias and mask where they are served, lengths, segments, sinks and a traced scale."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    query, key, value, lengths, dout, _ = problem(8, 4)
    keys = jax.random.split(jax.random.key(0), 3)
    batch, time, heads = query_spec
    kv_spec = P(batch, None, heads)
    operands = {
        "query": (query, query_spec),
        "key": (key, kv_spec),
        "value": (value, kv_spec),
        "query_seq_lengths": (lengths // 2 + 1, P(batch)),
        "key_value_seq_lengths": (lengths, P(batch)),
        "query_segment_ids": (jnp.arange(B * T).reshape(B, T) % T // 8, P(batch, time)),
        "key_value_segment_ids": (jnp.arange(B * S).reshape(B, S) % S // 8, P(batch)),
        "sinks": (jax.random.normal(keys[2], (8,)), sinks_spec),
        "scale": (jnp.float32(0.4), P()),
    }
    if implementation == "xla":
        operands["bias"] = (jax.random.normal(keys[0], (B, 8, T, S)), P("x", "y"))
        operands["mask"] = (jax.random.bernoulli(keys[1], 0.7, (B, 1, T, S)), P("x"))

    def run(operands, dout):
        floating = {n: x for n, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {n: x for n, x in operands.items() if n not in floating}

        def function(floating):
            return fa4_jax.dot_product_attention(
                **floating, **others, logits_soft_cap=3.0, implementation=implementation
            )

        out, pullback = jax.vjp(function, floating)
        (gradients,) = pullback(dout)
        return out, gradients

    values = {name: x for name, (x, _) in operands.items()}
    sharded = {
        name: jax.device_put(x, NamedSharding(mesh, spec)) for name, (x, spec) in operands.items()
    }
    with jax.set_mesh(mesh):
        dout_sharded = jax.device_put(dout, NamedSharding(mesh, query_spec))
        compiled = jax.jit(run).lower(sharded, dout_sharded).compile()
        # Sums over the batch or the queries: the gradients of sinks and scale, and of keys.
        if sinks_spec == P(heads):
            assert set(count_collectives(compiled)) <= {"all-reduce"}
        if implementation != "xla" and axis_type == AxisType.Auto:

            def without(operands, dout):
                out, gradients = run(operands, dout)
                return out, {name: gradients[name] for name in ("query", "key", "value")}

            assert not count_collectives(jax.jit(without).lower(sharded, dout_sharded).compile())
        if implementation != "emulated":
            assert_close(compiled(sharded, dout_sharded), jax.jit(run)(values, dout))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_inside_scan(attention, check_vma):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    query, key, value = problem(8, 4)[:3]

    def layers(query, key, value):
        def layer(carry, _):
            return attention(carry, key, value)[0], None

        return jax.lax.scan(layer, query, None, length=2)[0]

    spec = P("x", None, "y")
    mapped = jax.shard_map(
        layers, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma
    )

    def gradients(function):
        def loss(*arguments):
            return jnp.sum(function(*arguments).astype(jnp.float32) ** 2)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(query, key, value)

    assert_close(gradients(mapped), gradients(layers))


# Where XLA may stand in for the kernels, its gradients' types hide what the kernels' types say.
@pytest.mark.parametrize("implementation", ["xla", None, "emulated"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_sums_gradients_of_replicated_keys_once(implementation, check_vma, request):
    if implementation == "emulated":
        request.getfixturevalue("built_library")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    query, key, value = problem(8, 4)[:3]
    query = query.reshape(8, B * T // 8, 8, H)

    def attend(query, key, value):
        return fa4_jax.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )

    def one_batch_of_keys(query, key, value):
        keys, values = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
        return attend(query, keys, values)

    mapped = jax.shard_map(
        one_batch_of_keys,
        mesh=mesh,
        in_specs=(P("x"), P(), P()),
        out_specs=P("x"),
        check_vma=check_vma,
    )

    def gradients(function):
        def loss(*arguments):
            return jnp.sum(function(*arguments).astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(query, key[:1], value[:1])

    assert_close(gradients(mapped), gradients(one_batch_of_keys))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_shard_map_over_one_of_two_axes(axis_type):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    arguments = problem(8, 4)[:3]
    mapped = jax.shard_map(
        fa4_jax.dot_product_attention, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )

    def gradients(function):
        def loss(*arguments):
            return jnp.sum(function(*arguments).astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    expected = gradients(fa4_jax.dot_product_attention)(*arguments)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(arguments, NamedSharding(mesh, P("x", None, "y")))
        assert_close(gradients(mapped)(*sharded), expected)


def test_every_device_may_come_first(attention):
    query, key, value = problem(4, 2)[:3]
    expected = attention(query, key, value)
    for device in (jax.devices()[5], jax.devices()[0], jax.devices()[5]):
        results = jax.jit(attention)(*jax.device_put((query, key, value), device))
        assert all(x.devices() == {device} for x in results)
        assert_close(results, expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_quantised_attention(axis_type):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    keys = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(k, (2, 128, 4, 64), jnp.bfloat16) for k in keys]

    @jax.jit
    def run(query, key, value):
        def function(query, key, value):
            return fa4_jax.dot_product_attention(
                query, key, value, quantization="nvfp4_fp8", implementation="xla"
            )

        out, pullback = jax.vjp(function, query, key, value)
        return out, *pullback(out)

    expected = run(*operands)
    sharding = NamedSharding(mesh, P("x", None, "y"))
    with jax.set_mesh(mesh):
        assert_close(run(*jax.device_put(operands, sharding)), expected)
