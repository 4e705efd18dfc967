"""Quantised attention forward: figures of record, the operator bit by bit, the sampled guard."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from quantized_problems import (
    EXACT_FP4,
    GUARDED,
    ROUTES,
    attend,
    cosine,
    gaussian,
    quantize_operands,
    relative,
)

from fa4_jax import quantize as qz
from fa4_jax import quantized, quantized_forward

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
    exact = oracle.Attention(q, k, v)
    out, lse = attend(ROUTES[route], q, k, v)
    (centre, tolerance), (error, error_tolerance) = FIGURES[route]
    assert abs(cosine(out, exact.out) - centre) <= tolerance
    assert abs(relative(out, exact.out) - error) <= error_tolerance
    bias = np.mean(lse - exact.lse)
    assert abs(bias) < 0.2
    assert abs(bias - LSE_BIAS[route]) < 0.02
    if route == "fp4":
        assert cosine(out, exact.out) >= 0.969


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
    expected = oracle.Attention(q, k, v).out
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
    packed = quantize_operands(config, query=q, key=k, value=v)
    dense = {name: np.asarray(x.dequantize(), np.float64)[0, :, 0] for name, x in packed.items()}
    z = dense["query"] @ dense["key"].T / np.sqrt(128) * np.log2(np.e)
    m = np.ceil(z.max(-1)).astype(np.float32)
    p = quantized_forward.mx_probabilities(config.classifier, z.astype(np.float32), m)
    weights = np.asarray(p.codes, np.float64) * np.exp2(np.asarray(p.byte, float) - 127)[..., None]
    weights = weights.reshape(384, 384) / 6
    total = weights.sum(-1)
    out, lse = attend(config, *packed.values())
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
    exact = oracle.Attention(q, k, v)
    config = dataclasses.replace(qz.FP4, row_reference=qz.SampledGuard(margin, shift))
    out, lse = attend(config, q, k, v)
    # With the whole budget spent, only what lies within a few binary orders of the sampled
    # maximum counts: that is the guard's price.
    assert cosine(out, exact.out) > (0.9 if margin == 60 else 0.8)
    assert abs(np.mean(lse - exact.lse)) < 0.5
    unshifted = dataclasses.replace(qz.FP4, row_reference=qz.NoReference())
    assert not np.isfinite(attend(unshifted, q, k, v)[0]).all()


def test_guard_agrees_with_running_max_on_moderate_logits():
    """With margin + shift small against 126 nothing is lost to the byte's range."""
    q, k, v = gaussian(512, seed=6)
    guard = dataclasses.replace(EXACT_FP4, row_reference=qz.SampledGuard(20, 10))
    exact = oracle.Attention(q, k, v)
    out, lse = attend(guard, q, k, v)
    plain, _ = attend(EXACT_FP4, q, k, v)
    assert abs(cosine(out, exact.out) - cosine(plain, exact.out)) < 2e-3
    assert abs(np.mean(lse - exact.lse)) < 0.1


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
