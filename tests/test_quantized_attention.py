"""Quantised attention against float64, against its own definition, and against public bugs.

Inputs whose blocks differ by orders of magnitude: constant ones hide every mistake in scales.
"""

import dataclasses
import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fa4_jax import quantize as qz
from fa4_jax import quantized, quantized_backward, quantized_forward
from fa4_jax.quantize import Format
from fa4_jax.spec import AttentionSpec, Operands

ROUTES = {**qz.SHORT_NAMES, "nvfp4": qz.NVFP4_ALL}
EXACT_FP4 = dataclasses.replace(qz.FP4, classifier=qz.EXACT)


def gaussian(S, N=1, K=1, H=128, B=1, T=None, seed=0, amplitude=1.0):
    """q, k, v in float32; logits have standard deviation amplitude**2."""
    rng = np.random.default_rng(seed)
    shapes = ((B, T or S, N, H), (B, S, K, H), (B, S, K, H))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q * np.float32(amplitude), k * np.float32(amplitude), v


def block_varying(folded=False, seed=0, S=512, H=128):
    """Amplitudes that differ by orders of magnitude between 16-blocks, key tiles and V blocks.

    folded: blocks b and b + 4, which must share a scale then, have like amplitudes.
    """
    rng = np.random.default_rng(seed)
    q, k, v = gaussian(S, N=2, K=1, H=H, seed=seed)
    # q large where k is small, so that every block matters to the logits.
    orders = rng.permutation(np.linspace(-5, 5, H // 16).round())
    orders = np.repeat(np.tile(orders[:4], 2) if folded else orders, 16)
    q *= np.exp2(orders).astype(np.float32)
    k *= np.exp2(-orders).astype(np.float32)
    k *= np.exp2(rng.integers(-2, 2, S // 64)).repeat(64)[None, :, None, None].astype(np.float32)
    blocks = np.exp2(rng.integers(-3, 3, (S // 32, H))).repeat(32, 0)
    return q, k, (v * blocks[:, None]).astype(np.float32)


def float64(q, k, v, dout=None, *, seen=None, scale=None, dlse=None):
    """(out, lse[, dq, dk, dv, dscale]) of dense attention; seen bool [B|1, T, S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide_k, wide_v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("btnh,bsnh->bnts", q, wide_k, optimize=True)
    z = s * scale if seen is None else np.where(seen[:, None], s * scale, -np.inf)
    m = np.where(np.isneginf(z).all(-1, keepdims=True), 0, z.max(-1, keepdims=True))
    p = np.exp(z - m)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0]
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    out = np.einsum("bnts,bsnh->btnh", p, wide_v, optimize=True)
    if dout is None:
        return out, lse.transpose(0, 2, 1)
    dp = np.einsum("btnh,bsnh->bnts", dout, wide_v, optimize=True)
    delta = (out * dout).sum(-1) - (0 if dlse is None else dlse)
    ds = p * (dp - delta.transpose(0, 2, 1)[..., None])

    def grouped(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)

    dq = np.einsum("bnts,bsnh->btnh", ds, wide_k, optimize=True) * scale
    dk = grouped(np.einsum("bnts,btnh->bsnh", ds, q, optimize=True) * scale)
    dv = grouped(np.einsum("bnts,btnh->bsnh", p, dout, optimize=True))
    return out, lse.transpose(0, 2, 1), dq, dk, dv, (ds * s).sum()


def cosine(x, y):
    x, y = (np.asarray(a, np.float64).ravel() for a in (x, y))
    return x @ y / np.sqrt((x @ x) * (y @ y))


def relative(x, y):
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


def make_spec(config, H=128, **options):
    return AttentionSpec(scale=H**-0.5, quantization=config, **options)


@functools.partial(jax.jit, static_argnums=0)
def call(spec, operands):
    """One program for each spec and shapes, shared by the tests."""
    return quantized.attend(spec, operands)


def attend(config, q, k, v, *, scale=None, left=None, right=None, jitted=call, **arrays):
    """`quantized.attend` as float64 NumPy arrays."""
    scale = jnp.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    spec = AttentionSpec(left=left, right=right, quantization=config)
    outputs = jitted(spec, Operands(q, k, v, scale=scale, **arrays))
    return [np.asarray(x, np.float64) for x in outputs]


def causal(T, S, offset=0):
    return (np.arange(S) <= np.arange(T)[:, None] + offset)[None]


# --- Accuracy: the figures of record --------------------------------------------------------------

# cosine and relative L2 of Gaussian inputs, H = 128, not causal: (centre, tolerance), None = any.
FIGURES = {
    "fp4_affine": ((0.944, 0.004), (0.336, 0.012)),
    "fp4_accurate": ((0.952, 0.004), (0.327, 0.012)),
    "nvfp4_fp8": ((0.990, 0.001), (0.140, 0.006)),
    "nvfp4": ((0.982, 0.001), (0.190, 0.008)),
    "fp8": ((0.9987, 0.0004), (0.054, 0.006)),
    "fp4": ((0.972, 0.003), (0.240, 0.010)),
}
# Mean error of lse in nats at S = 1024 and 4096: what the rounding of the codes does to the sum.
LSE_BIAS = {
    "fp4_affine": -0.08,
    "fp4_accurate": -0.17,
    "nvfp4_fp8": 0.0,
    "nvfp4": -0.01,
    "fp8": 0.0,
    "fp4": -0.05,
}


@pytest.mark.parametrize("route", FIGURES)
@pytest.mark.parametrize("S", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_published_figures(route, S):
    q, k, v = gaussian(S)
    expected_out, expected_lse = float64(q, k, v)
    out, lse = attend(ROUTES[route], q, k, v)
    (centre, tolerance), (error, error_tolerance) = FIGURES[route]
    assert abs(cosine(out, expected_out) - centre) <= tolerance
    assert abs(relative(out, expected_out) - error) <= error_tolerance
    bias = np.mean(lse - expected_lse)
    assert abs(bias) < 0.2
    assert abs(bias - LSE_BIAS[route]) < 0.02
    if route == "fp4":
        assert cosine(out, expected_out) >= 0.969


def test_hinge_stays_inside_the_instruction_budget():
    assert len(qz.HINGE.lines) == len(qz.AFFINE_FAST.lines) + 1
    assert qz.HINGE.native_pairs == 0
    assert qz.FP4.classifier is qz.HINGE


@pytest.mark.parametrize("nats", [0.5, 1.0, 2.0, 3.0])
def test_hinge_rounds_as_well_as_the_exponential(nats):
    """Squared error of normalised probabilities, one row of 1024 Gaussian logits at a time."""
    z = np.random.default_rng(1).standard_normal((128, 1024)).astype(np.float32)
    z = z * np.float32(nats * np.log2(np.e))
    p = np.exp2(z.astype(np.float64))
    p /= p.sum(-1, keepdims=True)

    def error(classifier):
        codes = quantized_forward.mx_probabilities(classifier, z, np.zeros(128, np.float32))
        weights = np.asarray(codes.payload_values(), np.float64)
        return np.linalg.norm(weights / weights.sum(-1, keepdims=True) - p)

    assert error(qz.HINGE) < 1.08 * error(qz.EXACT)
    assert error(qz.HINGE) < 0.97 * error(qz.AFFINE_FAST)


def large_logits(kind, largest):
    """q, k, v with logits up to `largest`, as real models make them.

    shared: an outlier channel lifts or lowers all logits of a row together. matched: every query
    resembles one key. (Independent Gaussian logits of this size are beyond any 4-bit query and
    key: their rounding alone moves them by several nats.)
    """
    q, k, v = gaussian(512, seed=5)
    if kind == "shared":
        channel = np.float32(np.sqrt(largest * np.sqrt(128)))
        k[..., 0] = channel
        q[..., 0] = channel * np.linspace(-1, 1, 512, dtype=np.float32)[None, :, None]
    else:
        q *= np.float32(np.sqrt(largest * np.sqrt(128) / (q * q).sum(-1).max()))
        k = q
    return q, k, v


@pytest.mark.parametrize("kind", ["shared", "matched"])
@pytest.mark.parametrize("largest", [200, 1000])
def test_large_logits(kind, largest):
    """A running maximum serves any logit; without a reference (the published fast variant) rows
    silently break beyond 88 nats."""
    q, k, v = large_logits(kind, largest)
    logits = np.einsum("btnh,bsnh->bts", q, k) / np.sqrt(128)
    assert 0.95 * largest < logits.max() < 1.1 * largest
    expected, _ = float64(q, k, v)
    out, lse = attend(qz.FP4, q, k, v)
    assert cosine(out, expected) > 0.9
    assert np.all(np.isfinite(lse))
    broken, _ = attend(dataclasses.replace(qz.FP4, row_reference=qz.NoReference()), q, k, v)
    assert not cosine(broken, expected) > 0.9


# --- The operator, bit by bit ---------------------------------------------------------------------


def numpy_probabilities(z, m, classifier, shift=0):
    """One row's (codes, bytes), written out with Python integers and ml_dtypes."""
    codes, scale_bytes = np.zeros(len(z), np.float32), []
    for first in range(0, len(z), 32):
        quarter = z[first : first + 32]
        peak = quarter.max()
        if np.isneginf(peak):
            scale_bytes.append(0)
            continue
        e = int(np.floor(np.float64(peak) + 1 - np.log2(1.5))) - int(m)
        byte = min(max(e + 127, shift + 1), 254)
        x = (quarter - np.float32(m + byte - 127)) + np.float32(np.log2(6))
        value = np.zeros(32, np.float32)
        for slope, intercept in classifier.lines:
            value = np.maximum(value, np.float32(slope) * x + np.float32(intercept))
        native = np.arange(32) // 2 % 4 < classifier.native_pairs
        value = np.where(native, np.exp2(x), value)
        codes[first : first + 32] = value.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        scale_bytes.append(byte - shift)
    return codes, np.array(scale_bytes)


@pytest.mark.parametrize(
    "classifier", [qz.HINGE, qz.AFFINE_FAST, qz.AFFINE_WAN, qz.ACCURATE, qz.EXACT]
)
@pytest.mark.parametrize("shift", [0, 16])
def test_codes_and_scale_bytes(classifier, shift):
    rng = np.random.default_rng(7)
    amplitude = np.exp2(rng.integers(-3, 7, (64, 4, 1)))
    z = (rng.standard_normal((64, 4, 32)) * amplitude).reshape(64, 128).astype(np.float32)
    # A grid on which every step of the definition but 2**x is exact, and no value is a tie.
    z = np.round(z * 64) / np.float32(64)
    z[3] = -np.inf
    z[4, 32:64] = -np.inf
    z[5, 1:] = -np.inf
    m = np.where(np.isneginf(z.max(-1)), -np.inf, np.ceil(z.max(-1)))
    m += 110.0 if shift else 0.0
    p = jax.jit(quantized_forward.mx_probabilities, static_argnums=(0, 3))(classifier, z, m, shift)
    for row in range(64):
        codes, scale_bytes = numpy_probabilities(z[row], m[row], classifier, shift)
        np.testing.assert_array_equal(p.byte[row], scale_bytes)
        np.testing.assert_array_equal(np.asarray(p.codes[row]).ravel(), codes)
    # The denominator's share is the sum of exactly what PV multiplies.
    lift = 24
    weights = np.asarray(p.codes, np.float64) * np.exp2(np.asarray(p.byte, float) - 127)[..., None]
    expected = weights.sum((1, 2)) / 6 * 2.0**lift
    np.testing.assert_allclose(p.row_sum(lift), expected, rtol=1e-6)
    assert p.row_sum()[3] == 0
    assert np.all(np.asarray(p.byte)[3] == 0)


def test_scale_byte_is_the_nearest_power_of_two():
    z = np.full((4, 128), -np.inf, np.float32)
    z[:, 0] = np.log2([1.49, 1.51, 2.99, 3.01])
    p = quantized_forward.mx_probabilities(qz.EXACT, z, np.zeros(4, np.float32))
    np.testing.assert_array_equal(p.byte[:, 0], [127, 128, 128, 129])
    np.testing.assert_array_equal(p.codes[:, 0, 0], [6, 4, 6, 4])


@pytest.mark.parametrize("route", ["fp4", "fp4_affine", "fp4_accurate"])
def test_operator_from_its_codes(route):
    """out and lse follow from codes and bytes in float64, with 1/36 and no other constant."""
    config = ROUTES[route]
    q, k, v = gaussian(384, seed=3)
    packed = {
        name: quantized.quantize_operand(config, name, jnp.asarray(x))
        for name, x in (("query", q), ("key", k), ("value", v))
    }
    dense = {name: np.asarray(x.dequantize(), np.float64)[0, :, 0] for name, x in packed.items()}
    z = dense["query"] @ dense["key"].T / np.sqrt(128) * np.log2(np.e)
    m = np.ceil(z.max(-1)).astype(np.float32)
    p = quantized_forward.mx_probabilities(config.classifier, z.astype(np.float32), m)
    weights = np.asarray(p.codes, np.float64) * np.exp2(np.asarray(p.byte, float) - 127)[..., None]
    weights = weights.reshape(384, 384) / 6
    total = weights.sum(-1)
    out, lse = attend(config, packed["query"], packed["key"], packed["value"])
    # z in float32 differs by an ulp from the MMA's: a code in thousands falls the other way.
    expected = weights @ dense["value"] / total[:, None]
    assert relative(out[0, :, 0], expected) < 2e-3
    np.testing.assert_allclose(lse[0, :, 0], np.log(2) * (m + np.log2(total)), atol=2e-3)


@pytest.mark.parametrize("route", ["fp4", "fp4_affine", "fp4_accurate"])
def test_row_reference_does_not_change_a_bit(route):
    """An integer reference shifts scale bytes and nothing else, lazily or not."""
    q, k, v = gaussian(640, N=2, seed=2, amplitude=1.5)
    config = ROUTES[route]
    out, lse = attend(config, q, k, v)
    for reference in (qz.RunningMax(slack=0), qz.RunningMax(slack=3), qz.NoReference()):
        other, other_lse = attend(dataclasses.replace(config, row_reference=reference), q, k, v)
        np.testing.assert_array_equal(other, out)
        np.testing.assert_allclose(other_lse, lse, atol=2e-6)


def test_lazy_rescale():
    reference = qz.RunningMax(slack=8)
    m = jnp.array([-jnp.inf, 3.0, 3.0, 3.0, -jnp.inf])
    peak = jnp.array([2.5, -1.0, 11.0, 11.1, -jnp.inf])
    after = quantized_forward.next_reference(reference, m, peak)
    np.testing.assert_array_equal(after, [3, 3, 3, 12, -np.inf])


# --- The sampled guard ----------------------------------------------------------------------------

GUARDED = dataclasses.replace(qz.FP4, row_reference=qz.SampledGuard(110, 16))


def test_guard_order_is_a_permutation():
    for S in (1, 100, 128, 129, 1000):
        order = quantized.sampled_first(S)
        np.testing.assert_array_equal(np.sort(order), np.arange(S))
        sampled = order[:128]
        assert np.all(np.diff(sampled) > 0)
        assert S < 256 or np.ptp(np.diff(sampled)) <= 1  # evenly spaced


@pytest.mark.parametrize(("margin", "shift"), [(110, 16), (112, 14), (60, 20)])
def test_guard_serves_large_logits(margin, shift):
    q, k, v = large_logits("shared", 1000)
    expected, expected_lse = float64(q, k, v)
    config = dataclasses.replace(qz.FP4, row_reference=qz.SampledGuard(margin, shift))
    out, lse = attend(config, q, k, v)
    # With the whole budget spent, only what lies within a few binary orders of the sampled
    # maximum counts: that is the guard's price.
    assert cosine(out, expected) > (0.9 if margin == 60 else 0.8)
    assert abs(np.mean(lse - expected_lse)) < 0.5
    unshifted = dataclasses.replace(qz.FP4, row_reference=qz.NoReference())
    assert not np.isfinite(attend(unshifted, q, k, v)[0]).all()


def test_guard_agrees_with_running_max_on_moderate_logits():
    """With margin + shift small against 126 nothing is lost to the byte's range."""
    q, k, v = gaussian(512, seed=6)
    guard = dataclasses.replace(EXACT_FP4, row_reference=qz.SampledGuard(20, 10))
    expected, expected_lse = float64(q, k, v)
    out, lse = attend(guard, q, k, v)
    plain, _ = attend(EXACT_FP4, q, k, v)
    assert abs(cosine(out, expected) - cosine(plain, expected)) < 2e-3
    assert abs(np.mean(lse - expected_lse)) < 0.1


def test_guard_denominator_order():
    """(amplitude / 6) * sum(q) underflows at byte 1, amplitude * (sum(q) / 6) does not."""
    codes = jnp.zeros((1, 1, 32)).at[0, 0, :4].set(jnp.array([6, 4, 1, 1]))
    p = quantized_forward.MxProbabilities(codes, jnp.array([[1]]))
    assert p.row_sum() > 0
    mutant = jax.jit(lambda p: (p.amplitude() / 6) * p.codes.sum(-1))(p)
    assert mutant == 0  # and out = 0 / 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"right": 0}, "is_causal"),
        ({"left": 3}, "local_window_size"),
        ({"query_seq_lengths": jnp.array([3])}, "query_seq_lengths"),
        ({"key_value_seq_lengths": jnp.array([3])}, "key_value_seq_lengths"),
    ],
)
def test_guard_refuses_masks(options, name):
    q, k, v = gaussian(64, H=64)
    with pytest.raises(NotImplementedError, match=name):
        attend(GUARDED, q, k, v, **options)


# --- Masks, lengths, shapes -----------------------------------------------------------------------


def one_hot_value(S):
    return np.eye(S, dtype=np.float32)[None, :, None, :]


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
    q, v = np.zeros((2, T, 2, 64), np.float32), np.repeat(one_hot_value(S), 2, 0)
    k = np.random.default_rng(0).standard_normal((2, S, 1, 64)).astype(np.float32)
    q_lengths, kv_lengths = np.array([T, 100], np.int32), np.array([170, S], np.int32)
    offsets = None if offset is None else np.array([offset, offset + 3], np.int32)
    arrays = {"query_seq_lengths": q_lengths, "key_value_seq_lengths": kv_lengths}
    if offset is not None:
        arrays["query_offset"] = offsets
    out, lse = attend(ROUTES[route], q, k, v, left=left, right=right, **arrays)
    i, j = np.arange(T)[None, :, None], np.arange(S)
    position = i + (0 if offset is None else offsets[:, None, None])
    seen = (i < q_lengths[:, None, None]) & (j < kv_lengths[:, None, None])
    seen = seen & (True if left is None else j >= position - left)
    seen = seen & (True if right is None else j <= position + right)
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
    seen = causal(133, 201, 30)
    expected, expected_lse = float64(q, k, v, seen=seen)
    offset = np.full(2, 30, np.int32)
    out, lse = attend(ROUTES[route], q, k, v, right=0, query_offset=offset)
    assert out.shape == (2, 133, 6, 40)
    for head in range(6):  # of the wrong kv head, nothing would agree
        assert cosine(out[:, :, head], expected[:, :, head]) > 0.9
    assert abs(np.mean(lse - expected_lse)) < 0.2


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
    expected, _ = float64(q, k, v, scale=-0.125)
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


@pytest.mark.parametrize("route", ["fp4", "fp4_affine", "nvfp4_fp8"])
def test_cached_containers_give_the_same_bits(route):
    q, k, v = gaussian(200, N=2, K=1, H=64, B=2, seed=10)
    config = ROUTES[route]
    expected = attend(config, q, k, v, right=0)
    arrays = {"query": q, "key": k, "value": v}
    packed = {
        n: quantized.quantize_operand(
            route if route in qz.SHORT_NAMES else config, n, jnp.asarray(x)
        )
        for n, x in arrays.items()
    }
    for names in (("key", "value"), ("query", "key", "value")):
        mixed = {**arrays, **{n: packed[n] for n in names}}
        for actual, wanted in zip(attend(config, *mixed.values(), right=0), expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)
    bits = 8 * sum(packed[n].nbytes for n in ("key", "value")) / (k.size + v.size)
    assert bits <= (8.1 if "fp8" in route else 5.0 if route != "fp4_affine" else 7.0)


def test_padding_of_containers_is_not_read():
    q, k, v = gaussian(96, H=64, seed=11)
    k[:, 64:], v[:, 64:] = np.nan, np.nan  # whole blocks
    lengths = np.array([64], np.int32)
    packed = {
        n: quantized.quantize_operand("fp4", n, jnp.asarray(x))
        for n, x in (("key", k), ("value", v))
    }
    with_containers = attend(
        qz.FP4, q, packed["key"], packed["value"], key_value_seq_lengths=lengths
    )
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


# --- Gradients ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def pull_back(spec, operands, cotangents):
    def outputs(query, key, value):
        arrays = dataclasses.replace(operands, query=query, key=key, value=value)
        return quantized.attend(spec, arrays)

    primals = (operands.query, operands.key, operands.value)
    return jax.vjp(outputs, *primals)[1](cotangents)


def gradients(config, q, k, v, dout, *, dlse=None, observe=None, scale=None, **arrays):
    """Causal (dq, dk, dv) of `quantized.attend` as float64 arrays."""
    config = dataclasses.replace(config, observe_gradients=observe)
    scale = jnp.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    dlse = np.zeros(q.shape[:3], np.float32) if dlse is None else dlse
    spec = AttentionSpec(right=0, quantization=config)
    result = pull_back(spec, Operands(q, k, v, scale=scale, **arrays), (dout, dlse))
    jax.effects_barrier()
    return [np.asarray(x, np.float64) for x in result]


def gaussian_dout(q, seed=12):
    return np.random.default_rng(seed).standard_normal(q.shape).astype(np.float32)


def check_gradients(actual, expected, floor=0.98):
    """Direction and length: a factor left in a gradient does not change its cosine."""
    for name, x, y in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert cosine(x, y) >= floor, (name, cosine(x, y))
        assert relative(x, y) < 0.2, (name, relative(x, y))


@pytest.mark.parametrize("route", ["nvfp4_fp8", "fp8"])
@pytest.mark.parametrize("S", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_causal_gradients(route, S):
    q, k, v = gaussian(S)
    dout = gaussian_dout(q)
    expected = float64(q, k, v, dout, seen=causal(S, S))[2:5]
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
    seen = np.arange(192) <= np.arange(160)[None, :, None] + offset[:, None, None]
    expected = float64(q, k, v, dout, seen=seen, dlse=dlse)[2:]
    actual = gradients(qz.NVFP4_FP8, q, k, v, dout, dlse=dlse, query_offset=offset)
    check_gradients(actual, expected[:3])
    without = gradients(qz.NVFP4_FP8, q, k, v, dout, query_offset=offset)
    with pytest.raises(AssertionError):  # the check sees the residual's gradient
        check_gradients(without, expected[:3])

    def loss(scale):
        spec = AttentionSpec(right=0, quantization=qz.NVFP4_FP8)
        operands = Operands(q, k, v, query_offset=offset, scale=scale)
        out, lse = quantized.attend(spec, operands)
        return (out * dout).sum() + (lse * dlse).sum()

    dscale = jax.jit(jax.grad(loss))(jnp.float32(64**-0.5))
    assert abs(dscale / expected[3] - 1) < 0.08
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
    filled = [x.copy() for x in (q, k, v, dout)]
    for x in (q, k, v, dout, *filled):
        fill = np.nan if any(x is f for f in filled) else 0
        if x.shape[1] == 90:
            x[0, 70:] = fill
            if x.shape == dout.shape and (x is dout or x is filled[3]):
                x[1, :20] = fill
        else:
            x[0, 50:] = fill
            x[1, 70:] = fill
    expected = gradients(qz.NVFP4_FP8, q, k, v, dout, **lengths)
    for x, y in zip(gradients(qz.NVFP4_FP8, *filled, **lengths), expected, strict=True):
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
    expected = float64(q, k, v, dout, seen=causal(S, S))[2]
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


# --- Bugs that others shipped ---------------------------------------------------------------------
#
# Each mutant breaks one thing the way a published kernel once did; the checks that hold for the
# real operator must fail for it.


@functools.cache
def block_varying_reference(folded):
    inputs = block_varying(folded)
    return inputs, float64(*inputs)


def check_forward(config, inputs=None, expected=None):
    """The operator is near float64 attention: every group of columns, and the lse of every tile."""
    if inputs is None:
        inputs, expected = block_varying_reference(config.query_key is Format.NVFP4_FOLDED)
    q, k, v = inputs
    expected, expected_lse = expected or float64(q, k, v)
    # Traced anew: a mutant is another program.
    fresh = jax.jit(lambda spec, operands: quantized.attend(spec, operands), static_argnums=0)
    out, lse = attend(config, q, k, v, jitted=fresh)
    tolerance = {Format.FP8_E4M3: 0.27, Format.NVFP4: 0.3, Format.MXFP4_SIX: 0.42}
    limit = tolerance[config.probability_value]
    for head in range(q.shape[2]):
        # Column by column: V's amplitude differs by orders between them.
        for first in range(0, v.shape[-1], 16):
            columns = slice(first, first + 16)
            error = relative(out[:, :, head, columns], expected[:, :, head, columns])
            assert error < limit, (head, first, error)
    assert np.abs(np.mean(lse - expected_lse)) < 0.3
    for tile in range(0, q.shape[1], 128):
        rows = slice(tile, tile + 128)
        assert np.abs(np.mean(lse[:, rows] - expected_lse[:, rows])) < 0.35


def mutate_quantize(monkeypatch, change):
    """Every operand goes through `change(name, x, container)` after it was quantised."""
    original = quantized.quantize_operand

    def mutant(config, name, x):
        return change(name, x, original(config, name, x))

    monkeypatch.setattr(quantized, "quantize_operand", mutant)


def with_scales(packed, change):
    return dataclasses.replace(packed, scales=change(packed.scales))


BOTH = ["fp4", "nvfp4_fp8"]


@pytest.mark.parametrize("route", ROUTES)
def test_check_accepts_the_operator(route):
    check_forward(ROUTES[route])


def amax_instead_of_amax_over_6(monkeypatch):
    from fa4_jax.quantize import containers

    original = containers._nvfp4_scale
    monkeypatch.setattr(
        containers, "_nvfp4_scale", lambda blocks, *options: original(blocks * 6, *options)
    )


def scale_bytes_not_swizzled(monkeypatch):
    """Row-major bytes where the MMA reads a page."""

    def change(name, x, packed):
        if name == "value":
            return packed
        rows = packed.scales.shape[1]
        scales = packed.scales.transpose(0, 2, 1, 3)
        flat = scales.reshape(*scales.shape[:2], rows // 128, -1, 512)
        read = qz.from_pages(flat, rows, scales.shape[-1])
        return dataclasses.replace(packed, scales=read.transpose(0, 2, 1, 3))

    mutate_quantize(monkeypatch, change)


def value_packed_along_head_dim(monkeypatch):
    def change(name, x, packed):
        if name != "value":
            return packed
        along_head = qz.quantize(x, packed.format, axis=-1, per_head_scale=False)
        # The same bytes in the shape that the kernel expects.
        return dataclasses.replace(
            packed,
            payload=along_head.payload.reshape(packed.payload.shape),
            scales=along_head.scales.reshape(packed.scales.shape),
            tensor_scale=None,
        )

    mutate_quantize(monkeypatch, change)


def every_key_tile_reads_the_scales_of_tile_0(monkeypatch):
    def change(name, x, packed):
        if name != "key":
            return packed
        return with_scales(packed, lambda s: jnp.tile(s[:, :128], (1, s.shape[1] // 128, 1, 1)))

    mutate_quantize(monkeypatch, change)


def every_value_tile_reads_the_scales_of_tile_0(monkeypatch):
    def change(name, x, packed):
        if name != "value":
            return packed
        per_tile = 128 // packed.format.block
        tiles = packed.scales.shape[-1] // per_tile
        return with_scales(packed, lambda s: jnp.tile(s[..., :per_tile], (1, 1, 1, tiles)))

    mutate_quantize(monkeypatch, change)


def query_scales_not_copied(monkeypatch):
    """Whatever was in tensor memory before; ones are the kindest of it."""

    def change(name, x, packed):
        return with_scales(packed, jnp.ones_like) if name == "query" else packed

    mutate_quantize(monkeypatch, change)


def value_scales_not_copied(monkeypatch):
    def change(name, x, packed):
        return with_scales(packed, jnp.ones_like) if name == "value" else packed

    mutate_quantize(monkeypatch, change)


def folded_payload_with_unfolded_scales(monkeypatch):
    def change(name, x, packed):
        if name == "value":
            return packed
        return with_scales(packed, lambda s: qz.quantize(x, "nvfp4", per_head_scale=True).scales)

    mutate_quantize(monkeypatch, change)


def unfolded_payload_with_folded_scales(monkeypatch):
    def change(name, x, packed):
        if name == "value":
            return packed
        folded = qz.quantize(x, "nvfp4_folded", per_head_scale=True)
        return with_scales(packed, lambda s: folded.scales)

    mutate_quantize(monkeypatch, change)


def value_scale_page_overwrites_that_of_p(monkeypatch):
    """The tail half of every tile scales P by the bytes that belong to V."""
    original = quantized_forward.mx_probabilities

    def mutant(classifier, z, m, shift=0):
        p = original(classifier, z, m, shift)
        tail = jnp.where(p.byte[..., 2:] == 0, 0, 127)
        return p._replace(byte=p.byte.at[..., 2:].set(tail))

    monkeypatch.setattr(quantized_forward, "mx_probabilities", mutant)
    # The denominator is summed from registers, before the page is overwritten.
    real = quantized_forward._probabilities

    def values(config, z, m):
        p, _ = real(config, z, m)
        return p, original(config.classifier, z, m).row_sum()

    monkeypatch.setattr(quantized_forward, "_probabilities", values)


def p_scale_page_overwrites_that_of_value(monkeypatch):
    def change(name, x, packed):
        if name != "value":
            return packed
        blocks = packed.scales.shape[-1]
        tail = np.arange(blocks) % 4 >= 2
        p_like = jnp.ones_like(packed.scales)
        return with_scales(packed, lambda s: jnp.where(tail, p_like, s))

    mutate_quantize(monkeypatch, change)


def denominator_of_unrounded_probabilities(monkeypatch):
    """Not a constant factor, but one that constant inputs hide: sum of 2**z, not of the codes."""
    real = quantized_forward._probabilities

    def values(config, z, m):
        p, _ = real(config, z, m)
        return p, jnp.sum(jnp.exp2(z - m[..., None] + 1), axis=-1)

    monkeypatch.setattr(quantized_forward, "_probabilities", values)


def constants_left_in_the_lse(monkeypatch):
    monkeypatch.setattr(quantized_forward, "_constant_orders", lambda config: 0)


MUTANTS = [
    (amax_instead_of_amax_over_6, ["nvfp4_fp8", "nvfp4"]),
    (scale_bytes_not_swizzled, BOTH),
    (value_packed_along_head_dim, ["fp4", "nvfp4"]),
    (every_key_tile_reads_the_scales_of_tile_0, BOTH),
    (every_value_tile_reads_the_scales_of_tile_0, ["fp4", "nvfp4"]),
    (query_scales_not_copied, BOTH),
    (value_scales_not_copied, ["fp4", "nvfp4"]),
    (folded_payload_with_unfolded_scales, ["fp4_affine", "fp4_accurate"]),
    (unfolded_payload_with_folded_scales, ["fp4", "nvfp4_fp8"]),
    (value_scale_page_overwrites_that_of_p, ["fp4"]),
    (p_scale_page_overwrites_that_of_value, ["fp4"]),
    (denominator_of_unrounded_probabilities, ["fp4"]),
    (constants_left_in_the_lse, ["nvfp4_fp8", "nvfp4", "fp8"]),
]


@pytest.mark.parametrize(
    ("mutant", "route"),
    [(mutant, route) for mutant, routes in MUTANTS for route in routes],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_check_rejects(mutant, route, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_forward(ROUTES[route])


def test_check_rejects_the_guards_shift_in_the_lse(monkeypatch):
    """LSE off by L * ln 2."""
    guard = dataclasses.replace(EXACT_FP4, row_reference=qz.SampledGuard(20, 16))
    q, k, v = gaussian(256, H=64)
    check_forward(guard, (q, k, v))
    monkeypatch.setattr(
        quantized_forward, "_constant_orders", lambda config: quantized_forward.GUARD_LIFT
    )
    with pytest.raises(AssertionError):
        check_forward(guard, (q, k, v))


def test_constant_inputs_would_hide_them(monkeypatch):
    """Why block_varying exists: with constants, tile 0's scales are everybody's scales."""
    every_key_tile_reads_the_scales_of_tile_0(monkeypatch)
    q, k, v = (np.full((1, 512, 1, 128), 0.75, np.float32) for _ in range(3))
    check_forward(qz.FP4, (q, k, v))


def p_lift_missing_in_dv(x):
    return [x[0], x[1], x[2] * 256]


def p_lift_missing_in_ds(x):
    return [x[0] * 256, x[1] * 256, x[2]]


def ds_lift_left_in_dk(x):
    return [x[0], x[1] * 2.0**3, x[2]]


@pytest.mark.parametrize("mutant", [p_lift_missing_in_dv, p_lift_missing_in_ds, ds_lift_left_in_dk])
def test_gradient_check_rejects(mutant):
    q, k, v = gaussian(256, N=2, H=64, seed=17)
    dout = gaussian_dout(q)
    expected = float64(q, k, v, dout, seen=causal(256, 256))[2:5]
    actual = gradients(qz.NVFP4_FP8, q, k, v, dout)
    check_gradients(actual, expected)
    with pytest.raises(AssertionError):
        check_gradients(mutant(actual), expected)
