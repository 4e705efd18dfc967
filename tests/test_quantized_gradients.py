"""Gradients of quantised attention against float64, their lifts, padding, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from quantized_problems import (
    ROUTES,
    check_gradients,
    cosine,
    gaussian,
    gaussian_dout,
    gradients,
    make_spec,
)

from fa4_jax import quantize as qz
from fa4_jax import quantized, quantized_backward
from fa4_jax.spec import AttentionSpec, Operands

CAUSAL = dict(is_causal=True)


@pytest.mark.parametrize("route", ["nvfp4_fp8", "fp8"])
@pytest.mark.parametrize("S", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_causal_gradients(route, S):
    q, k, v = gaussian(S)
    dout = gaussian_dout(q)
    expected = oracle.Attention(q, k, v, masks=CAUSAL).gradients(dout)
    seen = []
    check_gradients(gradients(ROUTES[route], q, k, v, dout, observe=seen.append), expected)
    small = [x / 1e-4 for x in gradients(ROUTES[route], q, k, v, dout * np.float32(1e-4))]
    check_gradients(small, expected, floor=0.985)
    assert len(seen) == 1
    assert set(seen[0]) == {"dout_zero", "ds_zero", "ds_saturated"}
    assert seen[0]["dout_zero"] == 0
    assert 0 < seen[0]["ds_zero"] < 0.1
    assert seen[0]["ds_saturated"] == 0


def test_gradient_of_residual_and_of_scale():
    q, k, v = gaussian(192, N=4, K=2, H=64, B=2, T=160, seed=13)
    dout, dlse = gaussian_dout(q), 20 * gaussian_dout(q)[..., 0]
    offset = np.array([32, 5], np.int32)
    masks = dict(is_causal=True, query_offset=offset)
    expected = oracle.Attention(q, k, v, masks=masks).gradients(dout, dlse)
    actual = gradients(qz.NVFP4_FP8, q, k, v, dout, dlse=dlse, query_offset=offset)
    check_gradients(actual, expected)
    without = gradients(qz.NVFP4_FP8, q, k, v, dout, query_offset=offset)
    with pytest.raises(AssertionError):  # the check sees the residual's gradient
        check_gradients(without, expected)

    def loss(scale):
        spec = AttentionSpec(right=0, quantization=qz.NVFP4_FP8)
        operands = Operands(q, k, v, query_offset=offset, scale=scale)
        out, lse = quantized.attend(spec, operands)
        return (out * dout).sum() + (lse * dlse).sum()

    dscale = jax.jit(jax.grad(loss))(jnp.float32(64**-0.5))
    assert abs(dscale / expected["scale"] - 1) < 0.08
    # A batch of scales (as vmap makes them) has a batch of gradients.
    each = jax.jit(jax.grad(loss))(jnp.full(2, 64**-0.5, jnp.float32))
    assert each.shape == (2,)
    np.testing.assert_allclose(each.sum(), dscale, rtol=1e-4)
    zero = jax.jit(jax.grad(loss))(jnp.float32(0.0))
    assert np.isfinite(zero)


@pytest.mark.parametrize("e", [-40, -13, 30])
def test_lifts_of_dout_leave_no_trace(e):
    """A power of two in dO comes out as the same power of two in every gradient, to the bit."""
    q, k, v = gaussian(200, N=2, H=64, seed=14)
    dout = gaussian_dout(q)
    one = gradients(qz.NVFP4_FP8, q, k, v, dout)
    two = gradients(qz.NVFP4_FP8, q, k, v, dout * np.float32(2.0**e))
    for x, y in zip(one, two, strict=True):
        np.testing.assert_array_equal(y, x * 2.0**e)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("e", [-30, 20])
def test_lifts_of_operands_leave_no_trace(name, e):
    """2**e in one operand (undone by the scale for query and key) moves gradients exactly."""
    q, k, v = gaussian(200, N=2, H=64, seed=15)
    dout = gaussian_dout(q)
    one = dict(zip(("query", "key", "value"), gradients(qz.NVFP4_FP8, q, k, v, dout), strict=True))
    factor = np.float32(2.0**e)
    arrays = {"query": q, "key": k, "value": v}
    arrays[name] = arrays[name] * factor
    scale = 64**-0.5 * (1 if name == "value" else 2.0**-e)
    two = gradients(qz.NVFP4_FP8, *arrays.values(), dout, scale=scale)
    two = dict(zip(arrays, two, strict=True))
    for other, x in one.items():
        if name == "value":  # logits' gradients grow with V
            expected = x if other == "value" else x * 2.0**e
        else:
            expected = x * 2.0**-e if other == name else x
        np.testing.assert_array_equal(two[other], expected)


def test_gradients_of_masked_rows_and_padding():
    q, k, v = gaussian(150, N=2, K=1, H=64, B=2, T=90, seed=16)
    dout = gaussian_dout(q)
    lengths = {
        "query_seq_lengths": np.array([70, 90], np.int32),
        "key_value_seq_lengths": np.array([50, 130], np.int32),
        "query_offset": np.array([0, -20], np.int32),  # 20 rows of batch 1 see nothing
    }

    def filled(fill):
        """The operands with `fill` wherever nothing may be read."""
        arrays = [x.copy() for x in (q, k, v, dout)]
        for x in (arrays[0], arrays[3]):
            x[0, 70:] = fill
        arrays[3][1, :20] = fill
        for x in arrays[1:3]:
            x[0, 50:], x[1, 70:] = fill, fill
        return arrays

    expected = gradients(qz.NVFP4_FP8, *filled(0), **lengths)
    actual = gradients(qz.NVFP4_FP8, *filled(np.nan), **lengths)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(x).all()
    dq, dk, dv = expected
    assert not dq[0, 70:].any()
    assert not dq[1, :20].any()
    assert not dk[0, 50:].any()
    assert not dv[1, 70:].any()
    assert dq[1, 21:].any(-1).all()


def test_gradient_dtypes_and_transforms():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in gaussian(96, N=2, K=1, H=64, B=2))
    spec = make_spec(qz.NVFP4_FP8, 64, right=0)

    def loss(q, k, v, lengths):
        out, lse = quantized.attend(spec, Operands(q, k, v, key_value_seq_lengths=lengths))
        return (out.astype(jnp.float32) ** 2).sum() + lse.sum()

    lengths = jnp.array([96, 40], jnp.int32)
    grad = jax.grad(loss, (0, 1, 2))
    plain = jax.jit(grad)(q, k, v, lengths)
    assert [x.dtype for x in plain] == [jnp.bfloat16] * 3
    remat = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(q, k, v, lengths)
    batched = jax.jit(jax.vmap(lambda *x: grad(*(y[None] for y in x))))(q, k, v, lengths)
    for x, y, z in zip(plain, remat, batched, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z[:, 0])


@pytest.mark.parametrize("route", ["fp4", "fp4_affine", "fp4_accurate", "nvfp4"])
def test_four_bit_probabilities_refuse_gradients(route):
    q, k, v = gaussian(32, H=32)
    dout = gaussian_dout(q)
    with pytest.raises(NotImplementedError, match=r"have no gradient: training with them diverges"):
        gradients(ROUTES[route], q, k, v, dout)
    spec = make_spec(ROUTES[route], 32)

    def loss(q):
        return quantized.attend(spec, Operands(jax.lax.stop_gradient(q), k, v))[0].sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.asarray(q)), 0)


def test_containers_refuse_gradients():
    q, k, v = (jnp.asarray(x) for x in gaussian(32, H=32))
    spec = make_spec(qz.NVFP4_FP8, 32)
    key = quantized.quantize_operand("nvfp4_fp8", "key", k)
    with pytest.raises(NotImplementedError, match="already quantised key"):
        jax.grad(lambda q: quantized.attend(spec, Operands(q, key, v))[0].sum())(q)


@pytest.mark.parametrize("S", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_the_published_fixed_lift_underflows(S, monkeypatch):
    """dS in E4M3 with P's own lift of 2**8 and no other: nearly all of it is 0 at |dO| = 1e-4."""
    q, k, v = gaussian(S)
    dout = gaussian_dout(q) * np.float32(1e-4)
    expected = oracle.Attention(q, k, v, masks=CAUSAL).gradients(dout)["query"]
    seen = []
    chosen = gradients(qz.NVFP4_FP8, q, k, v, dout, observe=seen.append)[0]
    monkeypatch.setattr(
        quantized_backward, "ds_lift", lambda dout, value: jnp.full((1, 1), 8, jnp.int32)
    )
    jax.clear_caches()
    fixed = gradients(qz.NVFP4_FP8, q, k, v, dout, observe=seen.append)[0]
    jax.clear_caches()
    assert seen[0]["ds_zero"] < 0.1
    assert seen[1]["ds_zero"] > (0.98 if S == 4096 else 0.85)
    assert cosine(chosen, expected) > 0.985
    assert cosine(fixed, expected) < (0.9 if S == 4096 else 0.97)
