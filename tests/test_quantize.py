"""Block formats and containers, against ml_dtypes and against definitions written out in NumPy."""

import dataclasses
import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from fa4_jax import quantize as qz
from fa4_jax.quantize import Format, elements
from fa4_jax.quantize.containers import SCALE_MULTIPLIERS

quantize = jax.jit(
    qz.quantize, static_argnums=1, static_argnames=("axis", "per_head_scale", "least_squares")
)
PROPERTY = hypothesis.settings(max_examples=40, deadline=None)


def _probes():
    """Every bfloat16 and float16 number, and float32 numbers on and beside every rounding tie."""
    sixteen = np.arange(65536, dtype=np.uint16)
    probes = [sixteen.view(ml_dtypes.bfloat16), sixteen.view(np.float16)]
    with np.errstate(over="ignore"):
        for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
            values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
            values = np.unique(values[np.isfinite(values)])
            ties = (values[1:] + values[:-1]) / 2
            probes += [values, ties, np.nextafter(ties, np.float32(np.inf))]
            probes += [np.nextafter(ties, np.float32(-np.inf))]
    return np.concatenate([p.astype(np.float32) for p in probes])


PROBES = _probes()
FINITE = PROBES[np.isfinite(PROBES)]


# --- Elements -----------------------------------------------------------------------------------


def test_e2m1_exhaustive():
    codes = jax.jit(lambda x: elements.e2m1_codes(elements.round_e2m1(x)))(FINITE)
    expected = FINITE.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(codes, expected)


def test_e2m1_ties_go_to_even_codes():
    ties = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 100.0])
    np.testing.assert_array_equal(elements.round_e2m1(ties), [0, 1, 1, 2, 2, 4, 4, 6])
    np.testing.assert_array_equal(elements.round_e2m1(-ties), [0, -1, -1, -2, -2, -4, -4, -6])


def test_e2m1_codes_and_values_are_inverse():
    codes = jnp.arange(16, dtype=jnp.uint8)
    values = elements.e2m1_decode(codes)
    expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(elements.e2m1_codes(values), codes)


@pytest.mark.parametrize(
    ("convert", "grid", "dtype", "largest"),
    [
        (elements.to_e4m3, elements.round_e4m3, ml_dtypes.float8_e4m3fn, 448),
        (elements.to_e5m2, elements.round_e5m2, ml_dtypes.float8_e5m2, 57344),
    ],
)
def test_fp8_exhaustive(convert, grid, dtype, largest):
    expected = np.clip(FINITE, -largest, largest).astype(dtype)
    actual = np.asarray(jax.jit(convert)(FINITE))
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(jax.jit(grid)(FINITE), expected.astype(np.float32))
    for x, y in ((np.inf, largest), (-np.inf, -largest), (np.nan, np.nan)):
        np.testing.assert_array_equal(np.float32(convert(jnp.float32(x))), np.float32(y))
        np.testing.assert_array_equal(grid(jnp.float32(x)), np.float32(y))


def test_e8m0_exhaustive():
    byte = np.arange(256, dtype=np.uint8)
    expected = byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    actual = np.array(elements.e8m0_decode(jnp.asarray(byte)))
    assert actual[0] == 0  # 2**-127 is subnormal
    np.testing.assert_array_equal(actual[1:], expected[1:])
    assert np.isnan(actual[255])


@PROPERTY
@hypothesis.given(st.floats(2.0**-120, 2.0**120, width=32))
def test_exponents(x):
    mantissa, e = np.frexp(np.float32(x))  # x = mantissa * 2**e, mantissa in [0.5, 1)
    assert elements.exponent(jnp.float32(x)) == e - 1
    assert elements.nearest_exponent(jnp.float32(x)) == (e if mantissa >= 0.75 else e - 1)
    assert elements.exp2_integer(e) == np.ldexp(1.0, e)


@PROPERTY
@hypothesis.given(st.sampled_from([0, 1, 9]).flatmap(lambda n: hnp.arrays(np.uint8, (2, n))))
def test_nibbles_round_trip(packed):
    codes = elements.unpack_nibbles(jnp.asarray(packed))
    assert codes.shape == (packed.shape[0], 2 * packed.shape[1])
    np.testing.assert_array_equal(elements.pack_nibbles(codes), packed)
    np.testing.assert_array_equal(codes[:, 0::2], packed & 15)  # even elements: low nibbles
    np.testing.assert_array_equal(codes[:, 1::2], packed >> 4)


def test_nibbles_need_pairs():
    with pytest.raises(ValueError, match=r"even last dimension.*\(2, 3\)"):
        elements.pack_nibbles(jnp.zeros((2, 3), jnp.uint8))


# --- Formats ------------------------------------------------------------------------------------


def varying(shape, seed=0, orders=12, block=16):
    """Gaussian numbers whose amplitude varies from block to block by many binary orders."""
    rng = np.random.default_rng(seed)
    blocks = -(-shape[-1] // block)
    amplitude = np.exp2(rng.integers(-orders, 4, (*shape[:-1], blocks)))
    amplitude = np.repeat(amplitude, block, -1)[..., : shape[-1]]
    return (rng.standard_normal(shape) * amplitude).astype(np.float32)


def reference_nvfp4(x):
    """(codes, scales) of the last axis, by the formula, with ml_dtypes' roundings."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    scale = (np.abs(blocks).max(-1) / np.float32(6)).astype(ml_dtypes.float8_e4m3fn)
    wide = scale.astype(np.float32)[..., None]
    ratio = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide != 0)
    return ratio.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape), scale


def reference_mxfp4(x, six):
    """(codes, E8M0 bytes) of the last axis, by the formula in float64."""
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(np.float64)
    amax = np.abs(blocks).max(-1)
    log = np.log2(np.where(amax == 0, 1, amax))
    e = np.floor(log + 1 - np.log2(1.5)) if six else np.floor(log) - 2
    step = np.exp2(e) / (6 if six else 1)
    codes = (blocks / step[..., None]).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    return codes.view(np.uint8).reshape(x.shape), np.where(amax == 0, 0, e + 127).astype(np.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_bytes(seed):
    x = varying((3, 5, 64), seed, orders=6)
    x[0, 0, :16] = 0
    codes, scale = reference_nvfp4(x)
    packed = quantize(jnp.asarray(x), "nvfp4")
    np.testing.assert_array_equal(elements.unpack_nibbles(packed.payload), codes)
    np.testing.assert_array_equal(np.asarray(packed.scales).view(np.uint8), scale.view(np.uint8))


@pytest.mark.parametrize("six", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_mxfp4_bytes(six, seed):
    x = varying((3, 5, 96), seed, orders=100, block=32)
    x[0, 0, :32] = 0
    codes, byte = reference_mxfp4(x, six)
    packed = quantize(jnp.asarray(x), Format.MXFP4_SIX if six else Format.MXFP4_OCP)
    np.testing.assert_array_equal(np.asarray(packed.scales).view(np.uint8), byte)
    # x * 6 is rounded once before the code is: a tie of codes can fall either way.
    different = np.asarray(elements.unpack_nibbles(packed.payload)) != codes
    assert different.mean() < (1e-2 if six else 1e-9)


def test_the_two_mxfp4_conventions_differ():
    x = jnp.zeros(32).at[:4].set(jnp.array([1.0, 0.5, -0.25, 0.125]))
    ocp, six = quantize(x, "mxfp4_ocp"), quantize(x, "mxfp4_six")
    # OCP: 2**(0 - 2), so 1 is code 4. Six: amplitude 1, so 1 is code 6.
    assert np.asarray(ocp.scales).view(np.uint8)[0] == 125
    assert np.asarray(six.scales).view(np.uint8)[0] == 127
    np.testing.assert_array_equal(ocp.codes()[:4], [4, 2, -1, 0.5])
    np.testing.assert_array_equal(six.codes()[:4], [6, 3, -1.5, 1])
    np.testing.assert_allclose(ocp.dequantize(), x)
    np.testing.assert_allclose(six.dequantize()[:4], [1, 0.5, -0.25, 1 / 6])


floats = st.floats(-1e3, 1e3, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)
# Few shapes, so that few programs are compiled.
arrays = st.sampled_from([1, 33, 70]).flatmap(
    lambda n: hnp.arrays(np.float32, (2, n), elements=floats)
)


@functools.partial(jax.jit, static_argnums=1, static_argnames=("per_head_scale", "least_squares"))
def quantize_and_back(x, format, **options):
    packed = quantize(x, format, **options)
    return packed, packed.dequantize()


@PROPERTY
@hypothesis.given(arrays, st.sampled_from(list(Format)))
def test_shape_dtype_and_error_bound(x, format):
    packed, back = quantize_and_back(x, format)
    assert packed.shape == x.shape
    assert packed.ndim == 2
    assert packed.dtype == np.float32
    error = np.abs(np.asarray(back) - x)
    if format.block is None:
        mantissa, smallest = (3, 2.0**-10) if format is Format.FP8_E4M3 else (2, 2.0**-17)
        largest = 448 if format is Format.FP8_E4M3 else 57344
        bound = np.maximum(np.abs(x) * 2.0 ** -(mantissa + 1), smallest)
        assert np.all(error <= np.where(np.abs(x) > largest, np.abs(x) - largest, bound) + 1e-9)
        return
    amax = np.abs(x).max(-1, keepdims=True)  # at least the block's
    # Half of E2M1's widest step, 1 of 6, or what saturates: OCP scales lose 6..8 of 8, the six
    # convention 6..9 of 9; scales that were chosen by squared error lose less in sum only.
    worst = {"nvfp4": 0.18, "mxfp4_ocp": 0.26, "mxfp4_six": 0.34, "nvfp4_folded": 1.0}
    assert np.all(error <= worst[format.value] * amax + 2.0**-10 * 6)


@PROPERTY
@hypothesis.given(arrays, st.sampled_from(["nvfp4", "mxfp4_ocp", "fp8_e4m3", "fp8_e5m2"]))
def test_requantising_changes_nothing(x, format):
    _, once = quantize_and_back(np.clip(x, -400, 400), format)
    np.testing.assert_array_equal(quantize_and_back(once, format)[1], once)


@PROPERTY
@hypothesis.given(
    st.integers(-20, 20), st.sampled_from(list(Format)), st.booleans(), st.integers(0, 99)
)
def test_powers_of_two_commute(e, format, least_squares, seed):
    if least_squares and format.value not in ("nvfp4", "nvfp4_folded", "mxfp4_six"):
        return
    x = varying((2, 9, 3, 48), seed, orders=4)
    options = {"per_head_scale": True, "least_squares": least_squares}
    one, one_back = quantize_and_back(x, format, **options)
    two, two_back = quantize_and_back(x * np.float32(2.0**e), format, **options)
    np.testing.assert_array_equal(one.payload, two.payload)
    np.testing.assert_array_equal(two.tensor_scale, one.tensor_scale * 2.0**e)
    np.testing.assert_array_equal(two_back, one_back * 2.0**e)


@pytest.mark.parametrize("format", list(Format))
def test_per_head_scale_reaches_every_amplitude(format):
    x = np.random.default_rng(0).standard_normal((2, 33, 3, 32)).astype(np.float32)
    heads = np.float32(2.0) ** np.array([[-90, 0, 80], [60, -70, 3]])
    packed = quantize(jnp.asarray(x * heads[:, None, :, None]), format, per_head_scale=True)
    back = np.asarray(packed.dequantize()) / heads[:, None, :, None]
    assert np.linalg.norm(back - x) < 0.25 * np.linalg.norm(x)
    np.testing.assert_array_equal(np.frexp(packed.tensor_scale)[0], 0.5)  # powers of two
    zero = quantize(jnp.zeros((1, 4, 2, 16)), format, per_head_scale=True)
    np.testing.assert_array_equal(zero.tensor_scale, 1)


def test_value_is_packed_along_keys():
    """[B, S, K, H] along its keys is [B, K, H, S/2]: as the transposed array along its last."""
    v = varying((2, 3, 8, 70), block=32).transpose(0, 3, 1, 2)  # [B=2, S=70, K=3, H=8]
    packed = quantize(jnp.asarray(v), "mxfp4_six", axis=1)
    other = quantize(jnp.asarray(v.transpose(0, 2, 3, 1)), "mxfp4_six")
    assert packed.payload.shape == (2, 3, 8, 96 // 2)
    assert packed.scales.shape == (2, 3, 8, 3)
    assert packed.shape == v.shape
    np.testing.assert_array_equal(packed.payload, other.payload)
    np.testing.assert_array_equal(packed.dequantize(), other.dequantize().transpose(0, 3, 1, 2))


def test_folded_scales():
    x = varying((2, 3, 256), orders=3)
    packed = quantize(jnp.asarray(x), "nvfp4_folded")
    scales = np.asarray(packed.scales).astype(np.float32).reshape(2, 3, 2, 2, 4)
    np.testing.assert_array_equal(scales[..., 0, :], scales[..., 1, :])
    blocks = x.reshape(2, 3, 2, 2, 4, 16)
    amax = np.abs(blocks).max((-1, -3))
    candidates = amax[..., None] / np.float32(6) * np.float32(SCALE_MULTIPLIERS)
    candidates = candidates.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    step = candidates[..., None, :, None, :]  # [2, 3, chunk, half, block, element, candidate]
    rounded = (blocks[..., None] / step).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * step
    error = ((rounded - blocks[..., None]) ** 2).sum((3, 5))
    best = np.take_along_axis(candidates, error.argmin(-1)[..., None], -1)[..., 0]
    np.testing.assert_array_equal(scales[..., 0, :], best)


def test_folding_pads_narrow_heads():
    x = varying((3, 80), orders=2)
    packed = quantize(jnp.asarray(x), "nvfp4_folded")
    assert packed.payload.shape == (3, 64)
    assert packed.shape == (3, 80)
    assert np.linalg.norm(packed.dequantize() - x) < 0.15 * np.linalg.norm(x)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4_six"])
def test_least_squares_is_no_worse(format):
    x = varying((4, 8, 128), 3, orders=4, block=32)
    plain = quantize(jnp.asarray(x), format)
    chosen = quantize(jnp.asarray(x), format, least_squares=True)

    def error(packed):
        difference = (np.asarray(packed.dequantize()) - x).reshape(4, 8, -1, 32)
        return (difference.astype(np.float64) ** 2).sum(-1)

    assert np.all(error(chosen) <= error(plain) * (1 + 1e-6))
    assert error(chosen).sum() < 0.97 * error(plain).sum()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", list(Format))
def test_faults_stay_in_their_block(format, bad):
    x = varying((2, 256), orders=2)
    x[1, 37] = bad
    back = np.asarray(quantize(jnp.asarray(x), format).dequantize())
    assert np.isnan(back[1, 37])
    block = {None: [37], 16: range(32, 48), 32: range(32, 64)}[format.block]
    if format is Format.NVFP4_FOLDED:
        block = [*block, *range(96, 112)]
    assert sorted(np.flatnonzero(np.isnan(back[1]))) == list(block)
    assert not np.isnan(back[0]).any()


# --- Containers ---------------------------------------------------------------------------------


def test_container_is_a_pytree():
    x = jnp.asarray(varying((2, 40, 3, 64), block=32), jnp.bfloat16)
    packed = quantize(x, "mxfp4_six", axis=1, per_head_scale=True)
    leaves, tree = jax.tree.flatten(packed)
    assert len(leaves) == 3
    again = jax.jit(lambda p: p)(jax.tree.unflatten(tree, leaves))
    assert again.shape == x.shape
    assert again.dtype == jnp.bfloat16
    np.testing.assert_array_equal(again.dequantize(), packed.dequantize())
    one = jax.vmap(lambda p: p.dequantize_unscaled())(packed)
    np.testing.assert_array_equal(one, packed.dequantize_unscaled())
    assert packed.nbytes == 2 * 3 * 64 * (32 + 2) + 4 * 2 * 3
    shapes = jax.eval_shape(lambda x: quantize(x, "mxfp4_six", axis=1), x)
    assert shapes.shape == x.shape


def test_container_prints_itself():
    packed = quantize(jnp.zeros((1, 64, 2, 32), jnp.bfloat16), "nvfp4", per_head_scale=True)
    assert repr(packed) == (
        "Quantized[nvfp4](bfloat16[1, 64, 2, 32] along axis -1: payload uint8[1, 64, 2, 16], "
        "scales float8_e4m3fn[1, 64, 2, 2], tensor_scale float32[1, 2])"
    )
    assert "object" in repr(jax.tree.map(lambda x: object(), packed))


def test_container_refuses_by_name():
    packed = quantize(jnp.zeros((1, 64, 2, 32)), "mxfp4_ocp", axis=1)
    with pytest.raises(ValueError, match="value is quantised as mxfp4_ocp, but mxfp4_six"):
        packed.require("value", Format.MXFP4_SIX, -3)
    along_head = quantize(jnp.zeros((1, 64, 2, 32)), "mxfp4_six", axis=-1)
    with pytest.raises(ValueError, match=r"value.*blocked along axis -1.*axis -3 are needed"):
        along_head.require("value", Format.MXFP4_SIX, -3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "nvfp5"}, "nvfp5"),
        ({"format": "nvfp4", "per_head_scale": True}, r"per_head_scale needs \[B, length"),
        ({"format": "fp8_e4m3", "least_squares": True}, "fp8_e4m3 has no scales"),
        ({"format": "mxfp4_ocp", "least_squares": True}, "mxfp4_ocp has no scales"),
    ],
)
def test_quantize_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        qz.quantize(jnp.zeros((2, 32)), **options)


# --- Scale pages --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e8m0fnu])
@pytest.mark.parametrize(("rows", "blocks"), [(128, 8), (130, 3), (256, 4), (1, 1)])
def test_scale_pages(rows, blocks, dtype):
    scales = np.random.default_rng(0).integers(0, 120, (2, rows, blocks)).astype(np.uint8)
    pages = qz.to_pages(jax.lax.bitcast_convert_type(jnp.asarray(scales), dtype))
    assert pages.dtype == dtype
    assert pages.shape == (2, -(-rows // 128), -(-blocks // 4), 512)
    flat = np.asarray(pages).view(np.uint8).reshape(2, pages.shape[1], -1)
    expected = np.zeros_like(flat)
    for m in range(rows):
        for k in range(blocks):
            offset = (m % 32) * 16 + (m // 32 % 4) * 4 + k % 4 + 512 * (k // 4)
            expected[:, m // 128, offset] = scales[:, m, k]
    np.testing.assert_array_equal(flat, expected)
    back = qz.from_pages(pages, rows, blocks)
    np.testing.assert_array_equal(np.asarray(back).view(np.uint8), scales)


# --- Configurations -----------------------------------------------------------------------------


def test_short_names():
    assert set(qz.SHORT_NAMES) == {"fp4", "fp4_affine", "fp4_accurate", "nvfp4_fp8", "fp8"}
    for name, config in qz.SHORT_NAMES.items():
        assert qz.resolve(name) is config
        assert qz.resolve(config) is config
        assert hash(config) == hash(dataclasses.replace(config))
    assert qz.resolve(None) is None
    with pytest.raises(ValueError, match=r"quantization='int8'.*'nvfp4_fp8'"):
        qz.resolve("int8")
    with pytest.raises(ValueError, match="quantization=4"):
        qz.resolve(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qz.SampledGuard(110, 17), r"margin \+ shift <= 126.*110 \+ 17"),
        (lambda: qz.SampledGuard(-1, 0), "margin >= 0"),
        (lambda: qz.Classifier(()), "needs lines"),
        (lambda: qz.Classifier(((1, 1),), 5), "native_pairs must be 0 to 4, got 5"),
        (lambda: dataclasses.replace(qz.FP4, query_key=Format.MXFP4_SIX), "query_key must be"),
        (lambda: dataclasses.replace(qz.FP8, probability_value=Format.MXFP4_OCP), "value must be"),
        (lambda: dataclasses.replace(qz.FP4, classifier=None), "a classifier goes with"),
        (lambda: dataclasses.replace(qz.FP8, classifier=qz.HINGE), "a classifier goes with"),
        (lambda: dataclasses.replace(qz.FP8, least_squares=True), "FP8 has none"),
        (lambda: dataclasses.replace(qz.FP8, row_reference=qz.RunningMax(8)), "slack=0"),
        (lambda: dataclasses.replace(qz.FP8, row_reference=qz.NoReference()), "slack=0"),
    ],
)
def test_configurations_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_guard_limits_are_inclusive():
    assert qz.SampledGuard(110, 16).margin == 110
    assert qz.SampledGuard(112, 14).shift == 14
    assert qz.SampledGuard(126, 0) != qz.SampledGuard(0, 126)
