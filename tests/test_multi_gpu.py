"""Sharded attention on two real GPUs; the simulated twin is ``test_sharding.py``."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_close

import fa4_jax

pytestmark = pytest.mark.multi_gpu

B, T, S, N, K, H = 4, 512, 512, 8, 4, 64
attention = functools.partial(
    fa4_jax.dot_product_attention, is_causal=True, return_residual=True, implementation="fa4"
)


def problem(seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)]
    query, key, value, dout = (
        jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=False)
    )
    return query, key, value, dout, jax.random.normal(keys[4], (B, T, N), jnp.float32)


def value_and_pullback(query, key, value, dout, dlse):
    results, pullback = jax.vjp(attention, query, key, value)
    return *results, *pullback((dout, dlse))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("query_spec", "kv_spec"),
    [
        (P("x"), P("x")),
        (P(None, None, "x"), P(None, None, "x")),
        (P(None, "x"), P()),
    ],
    ids=["batch", "heads", "positions"],
)
def test_jit(query_spec, kv_spec, axis_type):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
    arguments = problem()
    specs = [query_spec, kv_spec, kv_spec, query_spec, P(*query_spec[:3])]
    sharded = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arguments, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        results = jax.jit(value_and_pullback)(*sharded)
    assert results[0].sharding.device_set == set(jax.devices()[:2])
    assert_close(results, jax.jit(value_and_pullback)(*arguments))


@pytest.mark.parametrize("replicated", [False, True], ids=["split keys", "replicated keys"])
def test_shard_map(replicated):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    query, key, value, _, _ = problem()
    if replicated:
        key, value = key[:1], value[:1]

    def attend(query, key, value):
        rows = query.shape[0]
        key, value = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in (key, value))
        return attention(query, key, value)[0]

    kv_spec = P() if replicated else P("x")
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(P("x"), kv_spec, kv_spec), out_specs=P("x"), check_vma=True
    )

    def gradients(function):
        def loss(*operands):
            return jnp.sum(function(*operands).astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value)

    assert_close(gradients(mapped), gradients(attend))


def test_second_device_first():
    arguments = problem(seed=3)
    expected = None
    for index in (1, 0, 1):
        device = jax.devices()[index]
        results = jax.jit(value_and_pullback)(*jax.device_put(arguments, device))
        assert all(x.devices() == {device} for x in results)
        expected = expected or results
        assert_close(results, expected)


def test_first_calls_from_eight_threads_on_two_devices():
    arguments = problem(seed=4)
    results, barrier = [None] * 8, threading.Barrier(8)

    def call(index):
        operands = jax.device_put(arguments, jax.devices()[index % 2])
        barrier.wait()
        results[index] = jax.jit(lambda *xs: value_and_pullback(*xs))(*operands)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results[1:]:
        assert_close(result, results[0])
