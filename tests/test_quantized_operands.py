"""Quantised attention's operands: masks, lengths, shapes, dtypes, containers; which are refused."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from quantized_problems import (
    GUARDED,
    ROUTES,
    attend,
    call,
    cosine,
    gaussian,
    make_spec,
    quantize_operands,
    relative,
)

from fa4_jax import quantize as qz
from fa4_jax import quantized
from fa4_jax.spec import AttentionSpec, Operands

# --- Masks, lengths, shapes -----------------------------------------------------------------------

# One route of each kind of probabilities; masks do not depend on the rest.
KINDS = ["fp4", "nvfp4_fp8", "nvfp4"]


@pytest.mark.parametrize(
    ("route", "left", "right", "offset"),
    [
        ("fp4", None, 0, None),
        ("fp4", None, 0, 37),
        ("fp4", 20, 0, -10),
        ("fp4", 5, 9, None),
        ("fp4", None, 30, -50),
        ("fp4", 0, None, 200),
        ("fp4_accurate", 20, 0, -10),
        ("nvfp4_fp8", None, 0, 37),
        ("nvfp4_fp8", 5, 9, None),
        ("nvfp4", 20, 0, -10),
    ],
)
def test_exactly_the_visible_keys_count(route, left, right, offset):
    """Equal logits and one-hot values: out[i, j] is 1 / visible keys where j is visible, else 0."""
    T, S = 150, 190
    q = np.zeros((2, T, 2, 64), np.float32)
    v = np.tile(np.eye(S, dtype=np.float32)[:, None], (2, 1, 1, 1))
    k = np.random.default_rng(0).standard_normal((2, S, 1, 64)).astype(np.float32)
    masks = {
        "query_seq_lengths": np.array([T, 100], np.int32),
        "key_value_seq_lengths": np.array([170, S], np.int32),
    }
    if offset is not None:
        masks["query_offset"] = np.array([offset, offset + 3], np.int32)
    out, lse = attend(ROUTES[route], q, k, v, left=left, right=right, **masks)
    seen = oracle.visible_keys((2, 1, T, S), local_window_size=(left, right), **masks)[:, 0]
    count = seen.sum(-1, keepdims=True)
    expected = np.where(seen, 1 / np.maximum(count, 1), 0)
    np.testing.assert_array_equal(out[:, :, 0] > 0, seen)
    np.testing.assert_array_equal(out[:, :, 0], out[:, :, 1])
    # NVFP4 stores 1 as 6 times the UE4M3 number nearest to a power of two over 6.
    np.testing.assert_allclose(out[:, :, 0], expected, rtol=0.04 if route == "nvfp4" else 1e-6)
    np.testing.assert_array_equal(np.isneginf(lse[..., 0]), count[..., 0] == 0)


@pytest.mark.parametrize("route", KINDS)
def test_gqa_and_ragged_sizes(route):
    q, k, v = gaussian(201, N=6, K=2, H=72, B=2, T=133, seed=4)
    v = v[..., :40]
    offset = np.full(2, 30, np.int32)
    exact = oracle.Attention(q, k, v, masks=dict(is_causal=True, query_offset=offset))
    out, lse = attend(ROUTES[route], q, k, v, right=0, query_offset=offset)
    assert out.shape == (2, 133, 6, 40)
    for head in range(6):  # of the wrong kv head, nothing would agree
        assert cosine(out[:, :, head], exact.out[:, :, head]) > 0.9
    assert abs(np.mean(lse - exact.lse)) < 0.2


@pytest.mark.parametrize("route", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_padding_never_reaches_an_output(route, bad):
    q, k, v = gaussian(150, N=2, K=1, H=64, B=2, T=90, seed=8)
    lengths = {
        "query_seq_lengths": np.array([70, 90], np.int32),
        "key_value_seq_lengths": np.array([50, 130], np.int32),
    }
    zero, filled = [x.copy() for x in (q, k, v)], [x.copy() for x in (q, k, v)]
    for arrays, fill in ((zero, 0.0), (filled, bad)):
        arrays[0][0, 70:] = fill
        for x in arrays[1:]:
            x[0, 50:] = fill
            x[1, 95:] = fill  # beyond the last causal key of 90 queries
    for expected, actual in zip(
        attend(ROUTES[route], *zero, right=0, **lengths),
        attend(ROUTES[route], *filled, right=0, **lengths),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)
        assert not np.isnan(actual).any()


def test_visible_faults_stay_visible():
    q, k, v = gaussian(200, H=64)
    for name, array, row in (("query", q, 7), ("key", k, 150), ("value", v, 150)):
        arrays = {"query": q, "key": k, "value": v, name: array.copy()}
        arrays[name][0, row] = np.nan
        for route in KINDS:
            out, _ = attend(ROUTES[route], *arrays.values())
            hit = np.isnan(out[0]).any((-2, -1))
            assert hit[row if name == "query" else slice(None)].all(), (route, name)
            assert name != "query" or hit.sum() == 1


@pytest.mark.parametrize("route", KINDS)
def test_scales_of_both_signs_and_zero(route):
    q, k, v = gaussian(128, H=64, seed=9)
    expected = oracle.Attention(q, k, v, scale=-0.125).out
    out, _ = attend(ROUTES[route], q, k, v, scale=-0.125)
    assert cosine(out, expected) > 0.93
    spec = AttentionSpec(scale=-0.125, quantization=ROUTES[route])
    np.testing.assert_array_equal(call(spec, Operands(q, k, v))[0], out)
    uniform, lse = attend(ROUTES[route], q, k, v, scale=0.0)
    assert cosine(uniform, np.broadcast_to(v.mean(1, keepdims=True), v.shape)) > 0.93
    np.testing.assert_allclose(lse, np.log(128), atol=0.04 if route == "nvfp4" else 1e-5)


@pytest.mark.parametrize("sizes", [(0, 7, 5), (2, 0, 5), (2, 7, 0)])
@pytest.mark.parametrize("route", ["fp4", "nvfp4_fp8"])
def test_empty_sizes(route, sizes):
    B, T, S = sizes
    q, k, v = jnp.zeros((B, T, 2, 32)), jnp.zeros((B, S, 1, 32)), jnp.zeros((B, S, 1, 16))
    out, lse = attend(ROUTES[route], q, k, v, right=0)
    assert out.shape == (B, T, 2, 16)
    assert not out.any()
    assert np.all(np.isneginf(lse)) or T == 0 or B == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes(dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in gaussian(64, H=64))
    spec = make_spec(qz.FP4, 64)
    out, lse = jax.eval_shape(lambda *x: quantized.attend(spec, Operands(*x)), q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32


def test_memory_is_linear_in_the_number_of_keys():
    """No intermediate of the forward or backward pass holds one number per query and key."""
    T = S = 1024
    q, k, v = (jax.ShapeDtypeStruct((1, S, 1, 64), jnp.float32) for _ in range(3))
    spec = make_spec(qz.NVFP4_FP8, 64, right=0)

    def loss(*x):
        return quantized.attend(spec, Operands(*x))[0].sum()

    def largest(jaxpr):
        sizes = [0]
        for equation in jaxpr.eqns:
            sizes += [v.aval.size for v in equation.outvars if hasattr(v.aval, "size")]
            for inner in jex.jaxprs_in_params(equation.params):
                sizes.append(largest(inner))
        return max(sizes)

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert largest(jaxpr.jaxpr) <= T * 128 < T * S


@pytest.mark.parametrize("name", ["bias", "mask", "query_segment_ids", "sinks"])
def test_unserved_arrays_are_refused_by_name(name):
    q, k, v = gaussian(16, H=32)
    with pytest.raises(NotImplementedError, match=f"{name}: "):
        attend(qz.FP4, q, k, v, **{name: jnp.zeros((1,))})


def test_soft_cap_is_refused_by_name():
    q, k, v = gaussian(16, H=32)
    spec = make_spec(qz.FP4, 32, logits_soft_cap=30.0)
    with pytest.raises(NotImplementedError, match=r"logits_soft_cap=30\.0"):
        quantized.attend(spec, Operands(q, k, v))


# --- Already quantised operands -------------------------------------------------------------------


# Bits that a number of a key/value cache takes with its scales. The folded format pads H to 128.
CACHE_BITS = {"fp4": 4.65, "fp4_affine": 6.9, "nvfp4_fp8": 6.3}


@pytest.mark.parametrize("route", CACHE_BITS)
def test_cached_containers_give_the_same_bits(route):
    q, k, v = gaussian(200, N=2, K=1, H=64, B=2, seed=10)
    config = ROUTES[route]
    expected = attend(config, q, k, v, right=0)
    arrays = {"query": q, "key": k, "value": v}
    packed = quantize_operands(route, **arrays)
    for names in (("key", "value"), ("query", "key", "value")):
        mixed = {**arrays, **{n: packed[n] for n in names}}
        for actual, wanted in zip(attend(config, *mixed.values(), right=0), expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)
    bits = 8 * sum(packed[n].nbytes for n in ("key", "value")) / (k.size + v.size)
    assert bits <= CACHE_BITS[route]


def test_padding_of_containers_is_not_read():
    q, k, v = gaussian(96, H=64, seed=11)
    k[:, 64:], v[:, 64:] = np.nan, np.nan  # whole blocks
    lengths = np.array([64], np.int32)
    packed = quantize_operands("fp4", key=k, value=v)
    with_containers = attend(qz.FP4, q, *packed.values(), key_value_seq_lengths=lengths)
    plain = attend(qz.FP4, q, k, v, key_value_seq_lengths=lengths)
    assert not np.isnan(with_containers[0]).any()
    # The head scale of a NaN key head is that of its other keys.
    assert relative(with_containers[0], plain[0]) < 1e-6


def test_wrong_containers_are_refused_by_name():
    q, k, v = (jnp.asarray(x) for x in gaussian(64, H=64))
    for name, packed, message in (
        ("value", qz.quantize(v, "mxfp4_six"), "value .*blocked along axis -1.*axis -3"),
        ("value", qz.quantize(v, "mxfp4_ocp", axis=1), "value is quantised as mxfp4_ocp"),
        ("key", qz.quantize(k, "nvfp4_folded"), "key is quantised as nvfp4_folded.*nvfp4 is"),
        ("query", qz.quantize(q, "fp8_e4m3"), "query is quantised as fp8_e4m3"),
    ):
        arrays = {"query": q, "key": k, "value": v, name: packed}
        with pytest.raises(ValueError, match=message):
            attend(qz.FP4, *arrays.values())
    with pytest.raises(ValueError, match="'query', 'key' or 'value', got 'values'"):
        quantized.quantize_operand("fp4", "values", v)
    with pytest.raises(NotImplementedError, match="quantised value: SampledGuard"):
        attend(GUARDED, q, k, quantized.quantize_operand(GUARDED, "value", v))
