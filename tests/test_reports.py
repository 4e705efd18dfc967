"""Faults that people reported of attention libraries, each restated against ours.

The number in a test's name is that of the report. Each runs on every implementation that this
machine has. Where the kernels refuse an argument, that is asserted, and XLA takes the call.
"""

import functools
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fa4_jax

D = fa4_jax.dot_product_attention
ROOT = pathlib.Path(__file__).parents[1]
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def make(query, key, dtype, seed=0, scale=1.0):
    """query, key, value and a cotangent of the output, normally distributed."""
    rng = np.random.default_rng(seed)
    normal = lambda shape: (scale * rng.normal(size=shape)).astype(DTYPES[dtype])  # noqa: E731
    return normal(query), normal(key), normal(key), normal(query)


def choose(implementation, *arrays, **options):
    """The implementation itself, or XLA where the kernels say that they cannot serve the call."""
    if implementation == "fa4":
        try:
            jax.eval_shape(functools.partial(D, implementation="fa4", **options), *arrays)
        except NotImplementedError:
            return "xla"
    return implementation


def refused(implementation, *arrays, **options):
    """As `choose`, for calls that the kernels must refuse."""
    chosen = choose(implementation, *arrays, **options)
    assert chosen == "xla", "the kernels took an argument that they do not serve"
    return chosen


def compute(implementation, q, k, v, w=None, bias=None, **options):
    """(out, {argument: gradient}) in one compilation; without w no gradients."""

    @jax.jit
    def run(floats, w):
        call = lambda floats: D(**floats, **options, implementation=implementation)  # noqa: E731
        if w is None:
            return call(floats), {}
        out, pull = jax.vjp(call, floats)
        return out, pull(w)[0]

    floats = {"query": q, "key": k, "value": v} | ({} if bias is None else {"bias": bias})
    return jax.device_get(run(jax.tree.map(jnp.asarray, floats), w))


def check(results, q, k, v, w=None, bias=None, scale=None, **masks):
    """Output and every gradient against float64, by the accuracy rule."""
    out, gradients = results
    reference = functools.partial(oracle.Attention, q, k, v, bias=bias, scale=scale, masks=masks)
    exact, rounded = reference(), reference(rounding=q.dtype)
    assert out.dtype == q.dtype
    oracle.assert_accurate("out", out, exact.out, rounded.out)
    if w is None:
        return
    want, coarse = exact.gradients(w), rounded.gradients(w)
    for name, gradient in gradients.items():
        oracle.assert_accurate(name, gradient, want[name], coarse[name])


def compute_and_check(implementation, q, k, v, w=None, bias=None, **options):
    results = compute(implementation, q, k, v, w, bias, **options)
    check(results, q, k, v, w, bias, **options)
    return results


def run_script(script, timeout, **environment):
    """Runs Python in a process of its own; a hang becomes a failure."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_1_masked_row(implementation):
    q, k, v, w = make((2, 128, 4, 64), (2, 128, 2, 64), "bf16")
    mask = np.ones((2, 1, 128, 128), bool)
    mask[0, :, 5] = False
    w[:, 5] = 0
    chosen = refused(implementation, q, k, v, mask=mask)
    out, gradients = compute_and_check(chosen, q, k, v, w, mask=mask)
    assert all(np.isfinite(x).all() for x in (out, *gradients.values()))
    assert (out[0, 5] == 0).all()
    assert (gradients["query"][0, 5] == 0).all()


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
def test_3_rubbish_in_padding(implementation, rubbish):
    q, k, v, w = make((2, 3, 1, 64), (2, 3, 1, 64), "f16")
    q[:] = 0.5
    options = {"key_value_seq_lengths": np.array([1, 3])}
    for x in (k, v):
        x[0, 1:] = 0
    clean = compute_and_check(implementation, q, k, v, w, **options)
    for x in (k, v):
        x[0, 1:] = rubbish
    jax.tree.map(
        np.testing.assert_array_equal, compute(implementation, q, k, v, w, **options), clean
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_6_no_keys(implementation, is_causal):
    q, k, v, w = make((2, 64, 4, 64), (2, 0, 4, 64), "bf16")
    out, gradients = compute(implementation, q, k, v, w, is_causal=is_causal)
    assert out.shape == q.shape
    assert gradients["key"].shape == gradients["value"].shape == (2, 0, 4, 64)
    assert not out.any()
    assert not gradients["query"].any()
    assert not np.asarray(D(q, k, v, implementation=implementation)).any()


def test_8_no_window_is_not_an_empty_window(implementation):
    q, k, v, _ = make((2, 1024, 8, 128), (2, 1024, 8, 128), "bf16")
    out, _ = compute(implementation, q, k, v, is_causal=True)
    # The oracle needs the last queries only: with an offset they are a smaller problem.
    tail = q[:, -64:]
    check((out[:, -64:], {}), tail, k, v, is_causal=True, query_offset=1024 - 64)
    assert out.astype(np.float32).std() > 0.01
    for window in ((-1, 0), (-1, -1)):
        with pytest.raises(ValueError, match="local_window_size"):
            D(q, k, v, local_window_size=window, implementation=implementation)


def test_9_window_without_mask(implementation):
    q, k, v, _ = make((2, 256, 8, 64), (2, 288, 8, 64), "bf16")
    wide, _ = compute_and_check(implementation, q, k, v, local_window_size=(0, 31))
    narrow, _ = compute_and_check(implementation, q, k, v, local_window_size=(0, 0))
    assert (wide != narrow).mean() > 0.5


@pytest.mark.parametrize(("T", "S"), [(1, 16), (3, 128), (129, 257), (257, 129)])
def test_11_causal_is_top_left(implementation, T, S):
    q, k, v, w = make((2, T, 8, 64), (2, S, 2, 64), "bf16")
    out, _ = compute_and_check(implementation, q, k, v, w, is_causal=True)
    np.testing.assert_array_equal(out[:, 0], np.repeat(v[:, 0], 4, axis=1))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_12_lengths_that_no_tile_divides(implementation, dtype):
    lengths = (1, 2, 63, 65, 127, 129, 192, 4092)
    inputs = [make((1, length, 3, 32), (1, length, 3, 32), dtype)[:3] for length in lengths]
    run = jax.jit(lambda inputs: [D(*x, implementation=implementation) for x in inputs])
    first = jax.device_get(run(inputs))
    for (q, k, v), out in zip(inputs, first, strict=True):
        check((out[:, -200:], {}), q[:, -200:], k, v)
    for _ in range(9 if implementation == "fa4" else 2):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run(inputs)), first)


@pytest.mark.parametrize("head_dim", [72, 80, 96])
def test_14_head_dims(implementation, head_dim):
    q, k, v, w = make((2, 200, 4, head_dim), (2, 200, 4, head_dim), "bf16")
    compute_and_check(implementation, q, k, v, w, is_causal=True)


def test_14_head_dims_that_no_kernel_takes():
    for head_dim in (12, 136, 256):
        x = jax.ShapeDtypeStruct((1, 8, 2, head_dim), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match=f"{head_dim}.* multiples of 8 up to 128"):
            jax.eval_shape(functools.partial(D, implementation="fa4"), x, x, x)


def test_17_no_hang(implementation):
    script = f"""
import test_reports as t
for T in (1, 128, 129, 250, 256):
    for N, K in ((4, 4), (16, 8)):
        t.compute_and_check({implementation!r}, *t.make((2, T, N, 64), (2, T, K, 64), "bf16"))
"""
    run_script(script, timeout=300)


@pytest.mark.parametrize(("N", "K"), [(3, 2), (33, 2), (2, 4)])
def test_19_heads_that_do_not_divide(implementation, N, K):
    q, k = jnp.ones((1, 8, N, 64), jnp.bfloat16), jnp.ones((1, 8, K, 64), jnp.bfloat16)
    call = functools.partial(D, implementation=implementation)
    for transform in (jax.jit(call), functools.partial(jax.eval_shape, call)):
        with pytest.raises(ValueError, match=rf"N = {N} .*K = {K} "):
            transform(q, k, k)


def test_21_layout_of_the_cotangent(implementation):
    q, k, v, w = make((2, 32, 4, 128), (2, 32, 4, 128), "f16")
    call = functools.partial(D, implementation=implementation)

    @jax.jit
    def gradients(q, k, v, w):
        swapped = lambda *x: (jnp.swapaxes(call(*x), 1, 2) * w).sum(dtype=jnp.float32)  # noqa: E731
        broadcast = lambda *x: call(*x).sum(dtype=jnp.float32)  # noqa: E731
        return jax.grad(swapped, (0, 1, 2))(q, k, v), jax.grad(broadcast, (0, 1, 2))(q, k, v)

    found = gradients(q, k, v, np.swapaxes(w, 1, 2))
    for grads, cotangent in zip(found, (w, np.ones_like(w)), strict=True):
        named = dict(zip(("query", "key", "value"), jax.device_get(grads), strict=True))
        out = oracle.Attention(q, k, v).out.astype(np.float16)
        check((out, named), q, k, v, cotangent)


@pytest.mark.parametrize("shape", [(4, 1, 1, 32), (1, 4, 32, 1), (32, 32)])
def test_23_masks_broadcast(implementation, shape):
    q, k, v, w = make((4, 32, 4, 16), (4, 32, 4, 16), "bf16")
    mask = np.random.default_rng(1).random(shape) < 0.7
    chosen = refused(implementation, q, k, v, mask=mask)
    compute_and_check(chosen, q, k, v, w, mask=mask)


BIAS_SHAPES = [(2, 8, 64, 96), (1, 8, 64, 96), (2, 1, 64, 96), (1, 1, 64, 96)]
BIAS_SHAPES += [(1, 8, 1, 96), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_24_gradient_of_a_broadcast_bias(implementation, shape):
    q, k, v, w = make((2, 64, 8, 16), (2, 96, 4, 16), "bf16")
    bias = np.random.default_rng(1).normal(size=shape).astype(q.dtype)
    chosen = refused(implementation, q, k, v, bias=bias)
    _, gradients = compute_and_check(chosen, q, k, v, w, bias)
    assert gradients["bias"].shape == shape
    assert gradients["bias"].dtype == bias.dtype
    assert np.abs(gradients["bias"].astype(np.float32)).max() > 0


def test_24_vmap_with_an_unmapped_mask(implementation):
    q, k, v, _ = make((3, 2, 16, 4, 16), (3, 2, 16, 4, 16), "bf16")
    mask = np.random.default_rng(1).random((1, 1, 16, 16)) < 0.7
    chosen = refused(implementation, q[0], k[0], v[0], mask=mask)
    call = lambda q, k, m: D(q, k, v[0], mask=m, implementation=chosen)  # noqa: E731
    found = jax.device_get(jax.jit(jax.vmap(call, (0, 0, None)))(q, k, mask))
    for i in range(3):
        check((found[i], {}), q[i], k[i], v[0], mask=mask)


def test_26_smallest_bias_and_zero_cotangent(implementation):
    q, k, v, w = make((2, 32, 4, 16), (2, 32, 4, 16), "f16")
    mask = np.random.default_rng(1).random((2, 1, 32, 32)) < 0.7
    mask[0, :, 3] = False
    bias = np.where(mask, 0, np.finfo(np.float16).min).astype(np.float16)
    chosen = refused(implementation, q, k, v, bias=bias)
    out, gradients = compute(chosen, q, k, v, w, bias)
    assert all(np.isfinite(x).all() for x in (out, *gradients.values()))
    # Elsewhere than in row 3 this is a mask.
    exact = oracle.Attention(q, k, v, masks={"mask": mask})
    keep = np.arange(32) != 3
    np.testing.assert_allclose(out[:, keep], exact.out[:, keep], atol=2e-3)
    _, zeros = compute(chosen, q, k, v, np.zeros_like(w), bias)
    assert all((x == 0).all() for x in zeros.values())


def test_27_jacobian(implementation):
    q, k, v, w = make((2, 4, 16, 32), (2, 4, 16, 32), "f16")
    call = functools.partial(D, implementation=implementation)
    jacobian = jax.device_get(jax.jit(jax.jacobian(call, (0, 1, 2)))(q, k, v))
    contract = lambda x: np.tensordot(w.astype(np.float32), x.astype(np.float32), 4)  # noqa: E731
    named = dict(zip(("query", "key", "value"), map(contract, jacobian), strict=True))
    check((oracle.Attention(q, k, v).out.astype(np.float16), named), q, k, v, w)


def test_27_vmap(implementation):
    q, k, v, w = make((2, 2, 16, 4, 32), (2, 2, 16, 4, 32), "f16")
    lengths = np.array([[16, 3], [0, 9]])
    masks = np.random.default_rng(1).random((2, 2, 1, 16, 16)) < 0.7
    chosen = refused(implementation, q[0], k[0], v[0], mask=masks[0])
    call = functools.partial(D, implementation=implementation)

    @jax.jit
    def run():
        loss = lambda q, k, v, w: (call(q, k, v) * w).sum(dtype=jnp.float32)  # noqa: E731
        return (
            jax.vmap(jax.grad(loss, (0, 1, 2)))(q, k, v, w),
            jax.vmap(lambda k: call(q[0], k, v[0]), out_axes=1)(k),
            jax.vmap(lambda m: D(q[0], k[0], v[0], mask=m, implementation=chosen))(masks),
            jax.vmap(lambda n: call(q[0], k[0], v[0], key_value_seq_lengths=n))(lengths),
        )

    gradients, over_k, over_mask, over_lengths = jax.device_get(run())
    for i in range(2):
        named = {n: g[i] for n, g in zip(("query", "key", "value"), gradients, strict=True)}
        check(
            (oracle.Attention(q[i], k[i], v[i]).out.astype(np.float16), named),
            *(x[i] for x in (q, k, v, w)),
        )
        check((over_k[:, i], {}), q[0], k[i], v[0])
        check((over_mask[i], {}), q[0], k[0], v[0], mask=masks[i])
        check((over_lengths[i], {}), q[0], k[0], v[0], key_value_seq_lengths=lengths[i])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_29_forward_mode_and_second_order(implementation, dtype):
    q, k, v, w = make((1, 8, 2, 64), (1, 8, 2, 64), dtype)
    t = make(q.shape, k.shape, dtype, seed=1)[0]
    chosen = choose(implementation, q, k, v)
    call = functools.partial(D, implementation=chosen)
    loss = lambda q: (call(q, k, v) * w).sum(dtype=jnp.float32)  # noqa: E731
    inner = lambda q: (jax.grad(loss)(q) * t).sum(dtype=jnp.float32)  # noqa: E731
    derivatives = {
        "jvp": lambda q: jax.jvp(lambda q: call(q, k, v), (q,), (t,))[1],
        "jacfwd": jax.jacfwd(lambda q: call(q, k, v)),
        "hessian": jax.hessian(loss),
        "grad of grad": jax.grad(inner),
    }
    if chosen == "fa4":
        for derivative in derivatives.values():
            with pytest.raises(NotImplementedError, match='implementation="xla"'):
                jax.jit(derivative)(jnp.asarray(q))
        return
    found = jax.device_get(jax.jit(lambda q: {n: f(q) for n, f in derivatives.items()})(q))
    found["jacfwd"] = np.tensordot(found["jacfwd"].astype(np.float32), t.astype(np.float32), 4)
    found["hessian"] = np.tensordot(found["hessian"].astype(np.float32), t.astype(np.float32), 4)
    step = 1e-4
    q64, t64 = q.astype(np.float64), t.astype(np.float64)
    ahead, behind = (oracle.Attention(q64 + s * t64, k, v) for s in (step, -step))
    out_dot = (ahead.out - behind.out) / (2 * step)
    second = (ahead.gradients(w)["query"] - behind.gradients(w)["query"]) / (2 * step)
    tolerance = 1e-4 if dtype == "f32" else 0.03
    for name, expected in (
        ("jvp", out_dot),
        ("jacfwd", out_dot),
        ("hessian", second),
        ("grad of grad", second),
    ):
        error = np.abs(found[name].astype(np.float64) - expected).max()
        assert error < tolerance * np.abs(expected).max(), name


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-8])
def test_30_sign_of_the_scale(implementation, scale):
    q, k, v, w = make((2, 130, 4, 64), (2, 130, 2, 64), "bf16")
    static = compute_and_check(implementation, q, k, v, w, scale=scale, is_causal=True)
    traced = jax.jit(lambda s: D(q, k, v, scale=s, is_causal=True, implementation=implementation))
    np.testing.assert_array_equal(traced(scale), static[0])
    if scale == 0:
        assert not static[1]["query"].any()
        assert not static[1]["key"].any()


@pytest.mark.parametrize(
    ("shape", "dtype", "value"), [((1, 1, 1, 64), "bf16", 133120), ((1, 40, 1, 64), "f16", 300)]
)
def test_32_large_logits(implementation, shape, dtype, value):
    x = np.full(shape, value, DTYPES[dtype])
    out, gradients = compute(implementation, x, x, x, np.ones_like(x))
    np.testing.assert_array_equal(out, x)
    assert all(np.isfinite(g).all() for g in gradients.values())


def test_32_peaked_softmax(implementation):
    q, k, v, w = make((1, 64, 2, 64), (1, 64, 2, 64), "bf16")
    compute_and_check(implementation, (q * 100).astype(q.dtype), k, v, w)


def test_35_more_than_2_31_elements_have_shapes():
    q = jax.ShapeDtypeStruct((400, 10496, 4, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((400, 128, 4, 128), jnp.bfloat16)
    loss = lambda *x: D(*x, implementation="xla").sum(dtype=jnp.float32)  # noqa: E731
    gradients = jax.eval_shape(jax.grad(loss, (0, 1, 2)), q, k, k)
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.slow
def test_35_more_than_2_31_elements():
    B, T, S = 400, 10496, 128
    keys = jax.random.split(jax.random.key(0), 4)
    q, w = (jax.random.normal(key, (B, T, 4, 128), jnp.bfloat16) for key in keys[:2])
    k, v = (jax.random.normal(key, (B, S, 4, 128), jnp.bfloat16) for key in keys[2:])

    @jax.jit
    def run(q, k, v, w):
        out, pull = jax.vjp(functools.partial(D, implementation="fa4"), q, k, v)
        return out, *pull(w)

    whole = run(q, k, v, w)
    for b in (0, B - 1):
        part = run(*(x[b : b + 1] for x in (q, k, v, w)))
        for x, y in zip(whole, part, strict=True):
            error = jnp.abs(x[b].astype(jnp.float32) - y[0].astype(jnp.float32)).max()
            assert error <= 1e-2 * jnp.abs(y).max()


def test_37_float32_and_mixed_dtypes(implementation):
    q, k, v, w = make((1, 512, 8, 64), (1, 512, 8, 64), "f32")
    chosen = refused(implementation, q, k, v)
    out, gradients = compute(chosen, q, k, v, w)
    exact = oracle.Attention(q, k, v)
    np.testing.assert_allclose(out, exact.out, atol=1e-5)
    for name, gradient in exact.gradients(w).items():
        if name in gradients:
            np.testing.assert_allclose(gradients[name], gradient, atol=2e-5, err_msg=name)
    call = functools.partial(jax.eval_shape, functools.partial(D, implementation=implementation))
    with pytest.raises(ValueError, match=r"query bfloat16.*key float32"):
        call(q.astype(ml_dtypes.bfloat16), k, v)
    with pytest.raises(ValueError, match="int32"):
        call(*(x.astype(np.int32) for x in (q, k, v)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("xla", "cpu"), pytest.param("fa4", "gpu", marks=pytest.mark.multi_gpu)],
)
def test_39_device_of_the_inputs(name, kind):
    q, k, v, w = make((2, 64, 4, 64), (2, 64, 2, 64), "bf16")

    @jax.jit
    def run(q, k, v, w):
        out, pull = jax.vjp(functools.partial(D, implementation=name), q, k, v)
        return out, dict(zip(("query", "key", "value"), pull(w), strict=True))

    devices = jax.devices(kind)
    for device in (devices[1], devices[0], devices[1]):
        out, gradients = run(*jax.device_put((q, k, v, w), device))
        assert {d for x in (out, *gradients.values()) for d in x.devices()} == {device}
        check(jax.device_get((out, gradients)), q, k, v, w)


def test_41_shard_map_with_checked_types(implementation):
    kind = "gpu" if implementation == "fa4" else "cpu"
    devices = jax.devices(kind)[:2]
    mesh = jax.make_mesh((len(devices),), ("b",), (AxisType.Auto,), devices=devices)
    q, k, v, _ = make((2, 64, 4, 64), (2, 64, 4, 64), "bf16")

    def layers(q, k, v):
        step = lambda carry, _: (D(carry, k, v, implementation=implementation), None)  # noqa: E731
        return jax.lax.scan(step, q, None, length=3)[0]

    sharded = jax.shard_map(layers, mesh=mesh, in_specs=P("b"), out_specs=P("b"), check_vma=True)
    loss = lambda f: lambda *x: jnp.square(f(*x).astype(jnp.float32)).sum()  # noqa: E731
    found, expected = (
        jax.device_get(jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))(q, k, v))
        for f in (sharded, layers)
    )
    assert np.abs(np.float32(found[1][0])).max() > 0
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            np.float32(x), np.float32(y), atol=0.02 * np.abs(np.float32(y)).max()
        ),
        found,
        expected,
    )


def test_43_remat(implementation):
    q, k, v, _ = make((2, 16, 4, 64), (2, 17, 4, 64), "bf16")
    mask = np.random.default_rng(0).random((1, 1, 16, 17)) < 0.7
    chosen = refused(implementation, q, k, v, mask=mask)
    for name, options in ((chosen, {"mask": mask}), (implementation, {"is_causal": True})):
        loss = lambda q, n=name, o=options: D(q, k, v, **o, implementation=n).sum(dtype=jnp.float32)  # noqa: E731
        found, expected = (jax.jit(jax.grad(f))(q) for f in (jax.checkpoint(loss), loss))
        # Two programs: XLA may round each its own way, and the kernels add dq in any order.
        atol = 2**-8 * np.abs(np.asarray(expected, np.float32)).max()
        np.testing.assert_allclose(*np.float32([found, expected]), rtol=0, atol=atol)


def test_45_replayed_graphs_see_new_values(implementation):
    script = f"""
import functools, jax, numpy as np, test_reports as t
def layers(q, k, v):
    step = lambda c, _: (t.D(c, k, v, is_causal=True, implementation={implementation!r}), None)
    return jax.lax.scan(step, q, None, length=4)[0]
run = jax.jit(layers)
for seed in range(5):
    q, k, v, _ = t.make((2, 128, 4, 64), (2, 128, 2, 64), "bf16", seed=seed)
    found = jax.device_get(run(q, k, v))
    for _ in range(4):
        q = t.oracle.Attention(q, k, v, masks=dict(is_causal=True)).out
    assert np.abs(found.astype(float) - q).max() < 0.05, seed
"""
    flags = os.environ.get("XLA_FLAGS", "")
    if implementation == "fa4":
        flags += " --xla_gpu_graph_min_graph_size=1"
    run_script(script, timeout=300, XLA_FLAGS=flags)


@pytest.mark.parametrize("symbolic", [False, True])
def test_47_export(implementation, symbolic, tmp_path):
    """Window and causal are static attributes that serialise; another process runs the program."""
    platform = "cuda" if implementation == "fa4" else "cpu"
    call = functools.partial(
        D, local_window_size=(64, 0), is_causal=True, implementation=implementation
    )
    batch = export.symbolic_shape("b")[0] if symbolic else 2
    specs = [jax.ShapeDtypeStruct((batch, 96, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    exporter = functools.partial(export.export, jax.jit(call), platforms=[platform])
    if implementation == "fa4":
        with pytest.raises(ValueError, match=r"fa4_jax\.forward\.v1"):
            exporter()(*specs)
    exported = exporter(disabled_checks=fa4_jax.EXPORT_SAFETY_CHECKS)(*specs)
    (tmp_path / "program").write_bytes(exported.serialize(vjp_order=1))
    script = f"""
import pathlib, jax, fa4_jax, test_reports as t
if {implementation!r} == "fa4":
    fa4_jax.bundle.library()  # registers the custom calls
program = jax.export.deserialize(pathlib.Path({str(tmp_path / "program")!r}).read_bytes())
q, k, v, w = t.make((2, 96, 4, 64), (2, 96, 2, 64), "bf16")
names = ("query", "key", "value")
def run(q, k, v, w):
    out, pull = jax.vjp(program.call, q, k, v)
    return out, dict(zip(names, pull(w)))
results = jax.device_get(jax.jit(run)(q, k, v, w))
t.check(results, q, k, v, w, local_window_size=(64, 0), is_causal=True)
"""
    run_script(script, timeout=300)


def test_47_export_for_cuda_without_a_gpu():
    call = functools.partial(D, local_window_size=(64, 0), is_causal=True, implementation="xla")
    x = jax.ShapeDtypeStruct((*export.symbolic_shape("b, t"), 4, 64), jnp.bfloat16)
    exported = export.export(jax.jit(call), platforms=["cuda"])(x, x, x)
    assert export.deserialize(exported.serialize()).platforms == ("cuda",)


def test_48_host_without_a_gpu():
    script = """
import warnings
warnings.simplefilter("ignore")  # the bundle need not be built
import jax, jax.numpy as jnp
loaded = lambda: "libcuda.so" in open("/proc/self/maps").read()
x = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
before = loaded()  # by JAX's own plugin, where there is one
import fa4_jax
assert jax.eval_shape(fa4_jax.dot_product_attention, x, x, x).shape == x.shape
traced = jax.jit(fa4_jax.dot_product_attention).trace(x, x, x)
assert traced.lower(lowering_platforms=("cuda",)).as_text()
assert (fa4_jax.dot_product_attention(x, x, x) == 1).all()
assert loaded() == before
"""
    run_script(script, timeout=300, JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")


def test_50_determinism(implementation):
    q, k, v, w = make((2, 1000, 8, 128), (2, 1000, 2, 128), "bf16")

    @jax.jit
    def run(q, k, v, w):
        out, pull = jax.vjp(
            functools.partial(D, is_causal=True, implementation=implementation), q, k, v
        )
        return out, *pull(w)

    first, *others = (
        jax.device_get(run(q, k, v, w)) for _ in range(30 if implementation == "fa4" else 3)
    )
    for other in others:
        for name, x, y in zip(("out", "dq", "dk", "dv"), other, first, strict=True):
            if name != "dq" or implementation == "xla":  # the kernel sums dq in any order
                np.testing.assert_array_equal(x, y, err_msg=name)


def test_54_key_value_lengths_alone(implementation):
    lengths = np.array([24, 125, 53, 28, 77, 96, 13, 114])
    q, k, v, w = make((8, 128, 4, 16), (8, 128, 4, 16), "bf16")
    bias = np.random.default_rng(1).normal(size=(1, 4, 128, 128)).astype(q.dtype)
    options = {"key_value_seq_lengths": lengths}
    compute_and_check(implementation, q, k, v, w, **options)
    compute_and_check(implementation, q, k, v, w, **options, is_causal=True)
    chosen = refused(implementation, q, k, v, bias=bias, **options)
    compute_and_check(chosen, q, k, v, w, bias, **options)


def test_56_an_old_jax_is_named_at_import():
    script = """
import jax
jax.__version__, jax.__version_info__ = "0.9.1", (0, 9, 1)
try:
    import fa4_jax
except ImportError as error:
    print(error)
"""
    assert "needs jax 0.10.2 or newer, this is jax 0.9.1" in run_script(script, timeout=100)
    assert '"jax>=0.10.2"' in (ROOT / "pyproject.toml").read_text()
    assert importlib.metadata.version("jax") >= "0.10.2"
