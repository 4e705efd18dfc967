"""vmap, checkpoint, differentiation orders, donation and threads, on every implementation.

On the CPU, `None` is the kernels' whole transform stack over XLA's implementation of the calls; on
a GPU it is the kernels.
"""

import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close

import fa4_jax

B, T, S, N, K, H = 2, 16, 24, 4, 2, 8


@pytest.fixture(params=["xla", None], ids=["xla", "automatic"])
def implementation(request):
    return request.param


@pytest.fixture
def attention(implementation):
    return functools.partial(
        fa4_jax.dot_product_attention, is_causal=True, implementation=implementation
    )


def problem(*leading, dtype=jnp.bfloat16, seed=0):
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H)]
    keys = jax.random.split(jax.random.key(seed), 3)
    return [
        jax.random.normal(k, (*leading, *shape), dtype)
        for k, shape in zip(keys, shapes, strict=True)
    ]


def segments(*leading, seed=0):
    """Query and key ids, not sorted, some without a partner."""
    random = np.random.default_rng(seed)
    return [
        jnp.asarray(random.integers(low, low + 4, (*leading, B, size)), jnp.int32)
        for low, size in ((0, T), (1, S))
    ]


def gradients(attention, arguments=(0, 1, 2)):
    def loss(*operands):
        out = attention(*operands).astype(jnp.float32)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    return jax.grad(loss, arguments)


# --- vmap -----------------------------------------------------------------------------------------


def loop(function, in_axes, *operands):
    """What vmap means, written as a loop; results stacked on axis 0."""
    size = next(x.shape[a] for x, a in zip(operands, in_axes, strict=True) if a is not None)
    results = [
        function(
            *(x if a is None else jnp.take(x, i, a) for x, a in zip(operands, in_axes, strict=True))
        )
        for i in range(size)
    ]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


@pytest.mark.parametrize(
    "in_axes", [(0, 0, 0), (0, None, None), (None, 0, None), (None, 1, 2), (3, None, 0)], ids=str
)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_vmap_over_any_operands(attention, in_axes, with_gradient):
    function = gradients(attention) if with_gradient else attention
    operands = [
        jnp.moveaxis(x, 0, a) if a is not None else x[0]
        for x, a in zip(problem(3), in_axes, strict=True)
    ]
    actual = jax.jit(jax.vmap(function, in_axes))(*operands)
    assert_close(actual, loop(jax.jit(function), in_axes, *operands))


def test_vmap_over_lengths_alone_and_another_output_axis(attention):
    query, key, value = problem()
    lengths = jnp.array([[1, 24], [7, 0], [24, 24]], jnp.int32)

    def function(lengths):
        return attention(query, key, value, key_value_seq_lengths=lengths)

    actual = jax.vmap(function, out_axes=1)(lengths)
    assert_close(jnp.moveaxis(actual, 1, 0), loop(function, (0,), lengths))


def test_vmap_over_mask_alone():
    query, key, value = problem()
    masks = jax.random.bernoulli(jax.random.key(1), 0.5, (3, B, 1, T, S))

    def function(mask):
        return fa4_jax.dot_product_attention(query, key, value, mask=mask, implementation="xla")

    assert_close(jax.vmap(function)(masks), loop(function, (0,), masks))


def test_vmap_over_segments_and_sinks():
    in_axes = None, 1, 2, 1
    _, key, value = problem()
    arrays = (problem(3)[0], *segments(3), jnp.linspace(-1, 2, 3 * N).reshape(3, N))

    def function(query, query_ids, key_ids, sinks):
        def call(query, key, sinks):
            return fa4_jax.dot_product_attention(
                query,
                key,
                value,
                query_segment_ids=query_ids,
                key_value_segment_ids=key_ids,
                sinks=sinks,
                logits_soft_cap=2.0,
            )

        return gradients(call)(query, key, sinks)

    arrays = [
        jnp.moveaxis(x, 0, a) if a is not None else x[0]
        for x, a in zip(arrays, in_axes, strict=True)
    ]
    function = jax.jit(function)
    assert_close(jax.vmap(function, in_axes)(*arrays), loop(function, in_axes, *arrays))


def test_vmap_over_scale_and_its_gradient(attention):
    operands = problem()
    scales = jnp.array([0.3, -0.2, 0.0], jnp.float32)

    def function(scale):
        return gradients(lambda q, s: attention(q, *operands[1:], scale=s), (0, 1))(
            operands[0], scale
        )

    assert_close(jax.jit(jax.vmap(function))(scales), loop(function, (0,), scales))


def test_nested_vmap(attention):
    query, key, value = problem(3)
    function = jax.vmap(jax.vmap(attention, (0, None, None)), (None, 0, 0))
    actual = function(query, key, value)
    outer = functools.partial(loop, attention, (0, None, None), query)
    assert_close(actual, jnp.stack([outer(k, v) for k, v in zip(key, value, strict=True)]))


def test_vmap_over_an_empty_axis(attention):
    query, key, value = problem(0)
    out = jax.vmap(attention)(query, key, value)
    assert out.shape == (0, B, T, N, H)
    dq, dk, dv = jax.vmap(gradients(attention))(query, key, value)
    assert (dq.shape, dk.shape, dv.shape) == (query.shape, key.shape, value.shape)
    tangents = jax.vmap(lambda *xs: jax.jvp(attention, xs, xs)[1])(query, key, value)
    assert tangents.shape == query.shape


def test_jacobian_is_the_gradient_of_every_output(attention):
    query, key, value = (x[:1, :3] for x in problem(dtype=jnp.float16))
    jacobian = jax.jit(jax.jacrev(attention, (0, 1, 2)))(query, key, value)

    def weighted(row, head, channel):
        def loss(*operands):
            return attention(*operands)[0, row, head, channel]

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    for index in [(0, 0, 0), (2, 3, 7), (1, 2, 4)]:
        assert_close([x[(0, *index)] for x in jacobian], weighted(*index), 2**-9)


def test_a_mapped_axis_is_one_kernel_launch():
    operands = problem(3)
    function = functools.partial(fa4_jax.dot_product_attention, implementation="fa4")
    text = cuda_text(jax.vmap(gradients(function)), *operands)
    assert count_calls(text) == (1, 1)


# --- What one program contains --------------------------------------------------------------------


def cuda_text(function, *operands):
    """The program for CUDA, lowered on whatever host this is."""
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def count_calls(text):
    return tuple(
        len(re.findall(rf"custom_call @{re.escape(target)}\(", text))
        for target in ("fa4_jax.forward.v1", "fa4_jax.backward.v1")
    )


KERNELS = functools.partial(fa4_jax.dot_product_attention, is_causal=True, implementation="fa4")


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (jax.checkpoint_policies.save_only_these_names("context"), 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
    ids=["context", "nothing"],
)
def test_remat_recomputes_only_what_the_policy_does_not_save(policy, forwards):
    def layer(query, key, value):
        return jnp.sin(KERNELS(jnp.cos(query), key, value))

    def loss(*operands):
        return jnp.sum(jax.checkpoint(layer, policy=policy)(*operands).astype(jnp.float32))

    assert count_calls(cuda_text(jax.value_and_grad(loss), *problem())) == (forwards, 1)


def test_remat_gives_the_same_gradients(attention):
    operands = problem()
    expected = jax.jit(gradients(attention))(*operands)
    for policy in (
        None,
        jax.checkpoint_policies.save_only_these_names("context"),
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.dots_saveable,
    ):
        function = jax.jit(gradients(jax.checkpoint(attention, policy=policy)))
        assert_close(function(*operands), expected, 0)


def test_an_unused_residual_costs_no_operand():
    """Its symbolic-zero cotangent reaches the backward call as the absent operand, of size 0."""
    operands = problem()
    text = cuda_text(gradients(KERNELS), *operands)
    (call,) = re.findall(r"custom_call @fa4_jax\.backward\.v1.*", text)
    assert "tensor<0x0x0xf32>" in call

    def with_residual(*operands):
        out, lse = KERNELS(*operands, return_residual=True)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    text = cuda_text(jax.grad(with_residual), *operands)
    (call,) = re.findall(r"custom_call @fa4_jax\.backward\.v1.*", text)
    assert "tensor<0x0x0xf32>" not in call


def test_no_backward_call_where_no_gradient_flows():
    def stopped(query, key, value):
        out = jax.lax.stop_gradient(KERNELS(query, key, value))
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(query.astype(jnp.float32))

    assert count_calls(cuda_text(jax.value_and_grad(stopped), *problem())) == (1, 0)

    def only_lengths(lengths):
        return KERNELS(*problem(), key_value_seq_lengths=lengths.astype(jnp.int32)).sum()

    text = cuda_text(jax.grad(only_lengths), jnp.ones((B,), jnp.float32))
    assert count_calls(text)[1] == 0

    def only_sinks(sinks):
        return KERNELS(*problem(), sinks=sinks).astype(jnp.float32).sum()

    assert count_calls(cuda_text(jax.grad(only_sinks), jnp.ones((N,)))) == (1, 0)


def test_zero_cotangents_give_zero_gradients(attention):
    operands = (*problem(), jnp.ones((N,)))
    out, pullback = jax.vjp(lambda *xs: attention(*xs[:3], sinks=xs[3]), *operands)
    for gradient in pullback(jnp.zeros_like(out)):
        assert not np.any(np.asarray(gradient, np.float32))


# --- Orders and modes of differentiation ----------------------------------------------------------

DERIVATIVES = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jit of jacfwd": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
    "grad of grad": lambda f, x: jax.grad(lambda y: jax.grad(lambda z: f(z).sum())(y).sum())(x),
    "jit of grad of grad": lambda f, x: jax.jit(
        jax.grad(lambda y: jax.grad(lambda z: jax.jit(f)(z).sum())(y).sum())
    )(x),
    "vmap of jvp": lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,)))(x[None]),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_kernels_refuse_forward_mode_and_second_order(name):
    operands = dict(zip(("query", "key", "value"), problem(), strict=True), sinks=jnp.ones((N,)))
    for operand, x in operands.items():

        def derivative(x, operand=operand):
            return DERIVATIVES[name](lambda x: KERNELS(**(operands | {operand: x})), x)

        with pytest.raises(NotImplementedError, match=r'first-order.*implementation="xla" or None'):
            cuda_text(derivative, x)


@pytest.mark.parametrize("name", ["jvp", "linearize", "hessian", "grad of grad", "vmap of jvp"])
def test_every_derivative_where_xla_may_stand_in(name):
    """By XLA from the kernels' output, on every platform."""
    query, key, value = (x[:1, :3] for x in problem(dtype=jnp.float16))

    def derivative(implementation):
        def function(query):
            return fa4_jax.dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                sinks=query[0, 0, :, 0],
                logits_soft_cap=3.0,
                implementation=implementation,
            )

        return jax.jit(lambda x: DERIVATIVES[name](function, x))(query)

    # Each rounds its first derivatives to 16 bits.
    assert_close(derivative(None), derivative("xla"), 2**-7)


@pytest.mark.parametrize("name", ["hessian", "grad of grad"])
def test_second_order_at_a_scale_of_zero_where_xla_may_stand_in(name):
    operands = [x[:1] for x in problem(dtype=jnp.float16)]

    def derivative(implementation):
        def function(scale):
            out = fa4_jax.dot_product_attention(
                *operands, scale=scale, sinks=jnp.ones((N,)), implementation=implementation
            ).astype(jnp.float32)
            return out * jnp.cos(jnp.arange(out.size).reshape(out.shape))

        return jax.jit(lambda x: DERIVATIVES[name](function, x))(jnp.float32(0))

    assert_close(derivative(None), derivative("xla"))


def test_forward_mode_equals_reverse_mode_on_xla():
    query, key, value = (x[:1, :5] for x in problem(dtype=jnp.float32))
    attention = functools.partial(
        fa4_jax.dot_product_attention, key=key, value=value, implementation="xla"
    )
    forward = jax.jit(jax.jacfwd(attention))(query)
    assert_close(forward, jax.jit(jax.jacrev(attention))(query), 1e-5)
    tangent = jnp.cos(query)

    def directional(query):
        return jnp.vdot(jax.grad(lambda q: jnp.sum(jnp.sin(attention(q))))(query), tangent)

    # Central difference of the gradient against grad of grad, in a direction.
    direction = jnp.sin(query)
    second = jnp.vdot(jax.grad(directional)(query), direction)
    step = 1e-2
    difference = directional(query + step * direction) - directional(query - step * direction)
    np.testing.assert_allclose(second, difference / (2 * step), rtol=2e-3)


# --- scale ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, -0.125, 0.0])
def test_traced_scale_equals_static_scale_and_has_a_gradient(attention, scale):
    operands = problem()
    expected = jax.jit(functools.partial(attention, scale=scale))(*operands)
    traced = jax.jit(lambda *xs: attention(*xs[:3], scale=xs[3]))
    assert_close(traced(*operands, jnp.float32(scale)), expected, 2**-8)

    def loss(scale):
        out = attention(*operands, scale=scale).astype(jnp.float32)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    reference = [x.astype(jnp.float32) for x in operands]

    def reference_loss(scale):
        out = fa4_jax.dot_product_attention(
            *reference, is_causal=True, scale=scale, implementation="xla"
        )
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    actual = jax.jit(jax.grad(loss))(jnp.float32(scale))
    np.testing.assert_allclose(actual, jax.grad(reference_loss)(scale), rtol=0.02)
    dq, dk, _ = jax.jit(gradients(functools.partial(attention, scale=scale)))(*operands)
    if scale == 0:
        assert not np.any(np.asarray(dq, np.float32))
        assert not np.any(np.asarray(dk, np.float32))
    also_scale = jax.jit(gradients(lambda q, k, v, s: attention(q, k, v, scale=s), (0, 1, 2, 3)))(
        *operands, jnp.float32(scale)
    )
    assert_close(also_scale[:2], (dq, dk))


def test_a_scale_of_zero_whose_gradient_is_wanted_changes_no_other():
    operands = problem(dtype=jnp.float16)

    def all_gradients(implementation):
        def attend(query, key, value, scale):
            return fa4_jax.dot_product_attention(
                4 * query, key, value, scale=scale, implementation=implementation
            )

        return jax.jit(gradients(attend, (0, 1, 2, 3)))(*operands, jnp.float32(0))

    assert_close(all_gradients(None), all_gradients("xla"), 2**-9)


# --- Buffers, caches and threads ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["xla", None, "emulated"])
def test_calls_outside_of_jit_compile_once(name, caplog, request):
    if name == "emulated":
        request.getfixturevalue("built_library")
    attention = functools.partial(fa4_jax.dot_product_attention, implementation=name)
    functions = attention, gradients(attention), jax.vmap(gradients(attention))

    def run():
        for leading, function in zip(((), (), (3,)), functions, strict=True):
            function(*problem(*leading))

    run()
    with jax.log_compiles():
        run()
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]


def test_donated_operands_and_reused_outputs(attention):
    operands = problem()
    expected = jax.jit(attention)(*operands)
    step = jax.jit(lambda q, k, v: attention(q, k, v), donate_argnums=0)
    assert_close(step(jnp.array(operands[0]), *operands[1:]), expected, 0)
    same = jax.jit(lambda q: attention(q, q, q))
    query = operands[0]
    assert_close(same(query), jax.jit(attention)(query, jnp.array(query), jnp.array(query)), 0)


def test_first_calls_from_eight_threads(attention):
    operands = problem(seed=7)
    expected = attention(*operands)
    results, barrier = [None] * 8, threading.Barrier(8)

    def call(index):
        device = jax.devices()[index % jax.device_count()]
        arguments = jax.device_put(operands, device)
        barrier.wait()
        results[index] = jax.jit(lambda *xs: attention(*xs))(*arguments)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_close(result, expected)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_vmap_of_grad_takes_numpy_arrays(implementation):
    """Closed over by a jitted function, they are constants of its program."""
    arrays = np.random.default_rng(0).standard_normal((4, 2, 2, 16, 4, 32)).astype(np.float16)
    lengths = np.array([[16, 3], [0, 9]], np.int32)

    def loss(query, key, value, weights, lengths):
        out = fa4_jax.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation=implementation
        )
        return (out * weights).sum(dtype=jnp.float32)

    gradient = jax.grad(loss, (0, 1, 2))
    found = jax.jit(lambda: jax.vmap(gradient)(*arrays, lengths))()
    expected = [gradient(*(jnp.asarray(x[i]) for x in (*arrays, lengths))) for i in range(2)]
    assert_close(found, jax.tree.map(lambda *x: jnp.stack(x), *expected))
