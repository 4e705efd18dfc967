"""`fa4_jax.flax.attention_fn` inside Flax's modules equals Flax's own attention."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

flax = pytest.importorskip("flax")
from flax import linen, nnx  # noqa: E402

import fa4_jax.flax  # noqa: E402
from fa4_jax.flax import attention_fn  # noqa: E402

B, T, HEADS, FEATURES = 2, 24, 4, 32
xla = functools.partial(attention_fn, implementation="xla")

# Flax computes softmax and products in the activations' dtype; in float32 both sides agree closely.
ALLCLOSE = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def inputs(dtype=jnp.float32, batch=(B,), length=T):
    return jax.random.normal(jax.random.key(0), (*batch, length, FEATURES), dtype)


def padding_mask(batch=(B,)):
    """Every sequence has its own number of valid positions, as float32 zeros and ones."""
    valid = jnp.arange(T) < jnp.linspace(T // 2, T, int(np.prod(batch))).reshape(*batch, 1)
    return nnx.make_attention_mask(jnp.ones((*batch, T)), valid)


def masks(batch=(B,)):
    causal = nnx.make_causal_mask(jnp.ones((*batch, T)))
    return {
        "none": None,
        "causal and padding": nnx.combine_masks(causal, padding_mask(batch)),
        "boolean, per head": jnp.broadcast_to(causal, (*batch, HEADS, T, T)).astype(bool),
    }


def nnx_loss_and_gradients(attention, x, *, call=None, **module_options):
    """Output, loss gradients w.r.t. parameters and input of nnx attention with fixed weights."""
    options = {"num_heads": HEADS, "in_features": FEATURES, "decode": False, **module_options}
    model = nnx.MultiHeadAttention(**options, attention_fn=attention, rngs=nnx.Rngs(1))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x):
        out = nnx.merge(graphdef, params, rest)(x, **(call or {}))
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    return out, jax.tree.map(np.asarray, nnx.to_pure_dict(gradients[0])), gradients[1]


def linen_loss_and_gradients(attention, x, *, call=None, **module_options):
    model = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention, **module_options)
    variables = model.init(jax.random.key(1), x)

    def loss(variables, x):
        out = model.apply(variables, x, **(call or {}))
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, x)
    return out, *gradients


def assert_equal_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(ALLCLOSE, actual, expected)


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("run", [nnx_loss_and_gradients, linen_loss_and_gradients])
def test_masks(run, name):
    own = (
        nnx.dot_product_attention if run is nnx_loss_and_gradients else linen.dot_product_attention
    )
    call = {"mask": masks()[name]}
    assert_equal_trees(run(xla, inputs(), call=call), run(own, inputs(), call=call))


@pytest.mark.parametrize("run", [nnx_loss_and_gradients, linen_loss_and_gradients])
def test_two_batch_axes(run):
    """Flax allows any number of batch axes, fa4_jax one."""
    own = (
        nnx.dot_product_attention if run is nnx_loss_and_gradients else linen.dot_product_attention
    )
    x, call = inputs(batch=(2, 3)), {"mask": masks((2, 3))["causal and padding"]}
    assert_equal_trees(run(xla, x, call=call), run(own, x, call=call))


@pytest.mark.parametrize("shape", [(1, 1, 1, T, T), (3, 1, T, T), (2, 1, 1, 1, T), (HEADS, T, T)])
def test_masks_that_broadcast_over_batch_axes(shape):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 3, T, HEADS, 8))
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, shape).at[..., 0].set(True)
    bias = jax.random.normal(jax.random.key(2), shape)
    actual = xla(query, key, value, bias, mask)
    ALLCLOSE(actual, linen.dot_product_attention(query, key, value, bias, mask))


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0)])
def test_two_batch_axes_of_nothing(rows, keys):
    query, key = jnp.ones((2, 3, rows, HEADS, 8)), jnp.ones((2, 3, keys, HEADS, 8))
    out = xla(query, key, key, mask=jnp.ones((3, 1, rows, keys)))
    np.testing.assert_array_equal(out, np.zeros(query.shape))


def test_no_batch_axis():
    query, key, value = jax.random.normal(jax.random.key(0), (3, T, HEADS, 8))
    mask = nnx.make_causal_mask(jnp.ones(T))
    actual = xla(query, key, value, mask=mask)
    ALLCLOSE(actual, linen.dot_product_attention(query, key, value, mask=mask))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_and_is_causal(kv_heads):
    options = {"num_kv_heads": kv_heads, "call": {"is_causal": True}}
    actual = nnx_loss_and_gradients(xla, inputs(), **options)
    expected = nnx_loss_and_gradients(nnx.dot_product_attention, inputs(), **options)
    assert_equal_trees(actual, expected)


def test_bound_is_causal_equals_causal_mask():
    causal = functools.partial(xla, is_causal=True)
    call = {"mask": nnx.make_causal_mask(jnp.ones((B, T)))}
    actual = linen_loss_and_gradients(causal, inputs())
    assert_equal_trees(actual, linen_loss_and_gradients(xla, inputs(), call=call))


@pytest.mark.parametrize("run", [nnx_loss_and_gradients, linen_loss_and_gradients])
def test_module_dtype(run):
    """bfloat16 activations over float32 parameters: `dtype` reaches the attention."""
    seen = []

    def spy(query, key, value, *, mask=None, dtype=None, precision=None):
        out = xla(query, key, value, mask=mask, dtype=dtype, precision=precision)
        seen.append((jnp.dtype(dtype), out.dtype))
        return out

    def nnx_spy(*args, mask, dtype, precision, **_):
        return spy(*args, mask=mask, dtype=dtype, precision=precision)

    is_nnx = run is nnx_loss_and_gradients
    out, params_gradient, _ = run(nnx_spy if is_nnx else spy, inputs(), dtype=jnp.bfloat16)
    assert set(seen) == {(jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))}
    assert {g.dtype for g in jax.tree.leaves(params_gradient)} == {jnp.dtype(jnp.float32)}
    expected, *_ = run(xla, inputs())
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.03)


@pytest.mark.gpu
def test_kernels_in_a_module():
    """The Hopper kernels in nnx's module, forward and backward."""
    options = {"qkv_features": 64 * HEADS, "num_kv_heads": 2, "dtype": jnp.bfloat16}
    run = functools.partial(
        nnx_loss_and_gradients, x=inputs(length=200), call={"is_causal": True}, **options
    )
    kernels = run(functools.partial(attention_fn, implementation="fa4"))
    expected = run(xla)
    # Of the largest gradient: that of the key bias is 0 but for rounding.
    largest = max(np.abs(np.float32(x)).max() for x in jax.tree.leaves(expected))
    near = functools.partial(np.testing.assert_allclose, rtol=0.02, atol=0.01 * largest)
    jax.tree.map(lambda x, y: near(*map(np.float32, (x, y))), kernels, expected)


def test_common_dtype_without_module_dtype():
    query, key, value = jax.random.normal(jax.random.key(0), (3, B, T, HEADS, 8))
    key = key.astype(jnp.bfloat16)
    out = xla(query, key, value)
    assert out.dtype == jnp.float32
    ALLCLOSE(out, linen.dot_product_attention(query, key, value))


def test_nnx_decode():
    """Token by token through the cache equals the whole sequence under a causal mask."""
    outs = {}
    for name, attention in ("fa4_jax", xla), ("flax", nnx.dot_product_attention):
        model = nnx.MultiHeadAttention(
            HEADS, FEATURES, num_kv_heads=2, attention_fn=attention, rngs=nnx.Rngs(1)
        )
        model.init_cache((B, 6, FEATURES))
        step = nnx.jit(lambda model, x: model(x, decode=True))
        outs[name] = jnp.concatenate(
            [step(model, x[:, None]) for x in jnp.moveaxis(inputs(length=6), 1, 0)], axis=1
        )
    whole = model(inputs(length=6), decode=False, mask=nnx.make_causal_mask(jnp.ones((B, 6))))
    ALLCLOSE(outs["fa4_jax"], outs["flax"])
    ALLCLOSE(outs["fa4_jax"], whole)


def test_linen_decode():
    x = inputs(length=6)
    model = linen.MultiHeadDotProductAttention(HEADS, decode=True, attention_fn=xla)
    variables = model.init(jax.random.key(1), x)
    cache, outs = variables["cache"], []
    for token in jnp.moveaxis(x, 1, 0):
        state = {"params": variables["params"], "cache": cache}
        out, updated = model.apply(state, token[:, None], mutable=["cache"])
        cache = updated["cache"]
        outs.append(out)
    whole = linen.MultiHeadDotProductAttention(HEADS).apply(
        {"params": variables["params"]}, x, mask=nnx.make_causal_mask(jnp.ones((B, 6)))
    )
    ALLCLOSE(jnp.concatenate(outs, axis=1), whole)


def test_bound_options_reach_the_attention():
    query, key, value = jax.random.normal(jax.random.key(0), (3, B, T, HEADS, 8))
    options = {
        "implementation": "xla",
        "local_window_size": (3, 1),
        "logits_soft_cap": 2.0,
        "scale": 0.3,
        "key_value_seq_lengths": jnp.array([5, T]),
    }
    expected = fa4_jax.dot_product_attention(query, key, value, **options)
    np.testing.assert_array_equal(
        functools.partial(attention_fn, **options)(query, key, value), expected
    )
    plain = xla(query, key, value)
    assert not np.allclose(plain, expected, atol=1e-2)
    module = linen.MultiHeadDotProductAttention(
        HEADS, attention_fn=functools.partial(xla, scale=0.0)
    )
    weightless = linen.MultiHeadDotProductAttention(
        HEADS, attention_fn=lambda q, k, v: xla(q, k, v, scale=0.0)
    )
    variables = module.init(jax.random.key(1), inputs())
    np.testing.assert_array_equal(
        module.apply(variables, inputs()), weightless.apply(variables, inputs())
    )


def test_fully_masked_row_is_zero():
    query, key, value = jax.random.normal(jax.random.key(0), (3, B, T, HEADS, 8))
    mask = jnp.ones((B, 1, T, T)).at[:, :, 3].set(0)
    out = xla(query, key, value, mask=mask)
    assert not np.any(out[:, 3])
    assert np.all(np.any(out[:, 4], axis=-1))


REFUSED = {
    "dropout": ({"dropout_rate": 0.1, "deterministic": False}, "dropout_rate=0.1"),
    "sown weights": ({"module": object()}, "sow"),
    "positions": ({"input_positions": jnp.arange(T)}, "input_positions"),
    "replaced einsum": ({"qk_attn_weights_einsum": jnp.einsum}, "einsum"),
    "algorithm": ({"precision": jax.lax.DotAlgorithmPreset.F16_F16_F16}, "precision"),
    "one of a pair": ({"precision": ("highest", "nonsense")}, "precision"),
    "quantised highest": ({"precision": "highest", "quantization": "nvfp4"}, "quantization"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, message = REFUSED[name]
    query = jnp.ones((B, T, HEADS, 8))
    with pytest.raises(NotImplementedError, match=message):
        attention_fn(query, query, query, **options)


def test_refused_values():
    query = jnp.ones((B, T, HEADS, 8))
    with pytest.raises(ValueError, match="return_residual"):
        attention_fn(query, query, query, return_residual=True)
    with pytest.raises(TypeError, match="unheard_of"):
        attention_fn(query, query, query, unheard_of=1)
    # Folded into one axis, these would have the same size.
    rows, keys = jnp.ones((2, 3, T, HEADS, 8)), jnp.ones((3, 2, T, HEADS, 8))
    with pytest.raises(ValueError, match=r"same batch axes.*query \[2, 3,.*key \[3, 2,"):
        attention_fn(rows, keys, rows)
    for batch in ((2, 2), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"mask must broadcast.*batch = \[2, 3\]"):
            attention_fn(rows, rows, rows, mask=jnp.ones((*batch, 1, T, T)))


@pytest.mark.parametrize(
    "precision", [None, "highest", jax.lax.Precision.HIGH, ("default", "highest")]
)
def test_precisions_that_are_met(precision):
    query = jnp.ones((B, T, HEADS, 8))
    np.testing.assert_array_equal(
        xla(query, query, query, precision=precision), xla(query, query, query)
    )


def test_float32_products_are_float32_on_every_backend():
    """What makes precision="highest" honoured: each product asks for it, forward and backward."""
    query = jnp.ones((B, T, HEADS, 8))
    gradient = jax.grad(lambda *qkv: xla(*qkv).sum(), (0, 1, 2))
    text = jax.jit(gradient).lower(query, query, query).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_modules_refuse_dropout_and_sowing():
    x = inputs()
    nnx_module = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=xla, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(1)
    )
    with pytest.raises(NotImplementedError, match="dropout"):
        nnx_module(x, deterministic=False)
    nnx_module(x, deterministic=True)
    with pytest.raises(NotImplementedError, match="sow"):
        nnx_module(x, deterministic=True, sow_weights=True)

    linen_module = linen.MultiHeadDotProductAttention(HEADS, attention_fn=xla, dropout_rate=0.5)
    variables = linen_module.init(jax.random.key(1), x, deterministic=True)
    with pytest.raises(NotImplementedError, match="dropout"):
        linen_module.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(2)})
    with pytest.raises(NotImplementedError, match="sow"):
        linen_module.apply(variables, x, deterministic=True, sow_weights=True)
    einsums = {
        "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }
    with pytest.raises(NotImplementedError, match="einsum"):
        linen.MultiHeadDotProductAttention(HEADS, attention_fn=xla, **einsums).init(
            jax.random.key(1), x
        )


def test_flax_is_not_imported():
    code = "import sys, fa4_jax, fa4_jax.flax; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
