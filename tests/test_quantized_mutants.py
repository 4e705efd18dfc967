"""Bugs that others shipped: each mutant of quantised attention breaks one thing as they did.

The checks that hold for the real operator must fail for it. Inputs whose blocks differ by orders
of magnitude: constant ones hide every mistake in scales.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from quantized_problems import (
    EXACT_FP4,
    ROUTES,
    attend,
    check_gradients,
    gaussian,
    gaussian_dout,
    gradients,
    relative,
)

from fa4_jax import quantize as qz
from fa4_jax import quantized, quantized_forward
from fa4_jax.quantize import Format, containers


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


@functools.cache
def block_varying_reference(folded):
    inputs = block_varying(folded)
    return inputs, oracle.Attention(*inputs)


def check_forward(config, inputs=None):
    """The operator is near float64 attention: every group of columns, and the lse of every tile."""
    if inputs is None:
        inputs, exact = block_varying_reference(config.query_key is Format.NVFP4_FOLDED)
    else:
        exact = oracle.Attention(*inputs)
    q, k, v = inputs
    # Traced anew: a mutant is another program.
    fresh = jax.jit(lambda spec, operands: quantized.attend(spec, operands), static_argnums=0)
    out, lse = attend(config, q, k, v, jitted=fresh)
    tolerance = {Format.FP8_E4M3: 0.27, Format.NVFP4: 0.3, Format.MXFP4_SIX: 0.42}
    limit = tolerance[config.probability_value]
    for head in range(q.shape[2]):
        # Column by column: V's amplitude differs by orders between them.
        for first in range(0, v.shape[-1], 16):
            columns = slice(first, first + 16)
            error = relative(out[:, :, head, columns], exact.out[:, :, head, columns])
            assert error < limit, (head, first, error)
    assert np.abs(np.mean(lse - exact.lse)) < 0.3
    for tile in range(0, q.shape[1], 128):
        rows = slice(tile, tile + 128)
        assert np.abs(np.mean(lse[:, rows] - exact.lse[:, rows])) < 0.35


@pytest.mark.parametrize("route", ROUTES)
def test_check_accepts_the_operator(route):
    check_forward(ROUTES[route])


# --- Mutants of the forward -----------------------------------------------------------------------


def mutate_operands(monkeypatch, names, change):
    """The named operands go through `change(x, container)` after they were quantised."""
    original = quantized.quantize_operand

    def mutant(config, name, x):
        packed = original(config, name, x)
        return change(x, packed) if name in names else packed

    monkeypatch.setattr(quantized, "quantize_operand", mutant)


def mutate_scales(monkeypatch, names, change):
    """The named operands get the scales `change(x, container)`."""
    mutate_operands(
        monkeypatch, names, lambda x, packed: dataclasses.replace(packed, scales=change(x, packed))
    )


def amax_instead_of_amax_over_6(monkeypatch):
    original = containers._nvfp4_scale
    monkeypatch.setattr(
        containers, "_nvfp4_scale", lambda blocks, *options: original(blocks * 6, *options)
    )


def scale_bytes_not_swizzled(monkeypatch):
    """Row-major bytes where the MMA reads a page."""

    def change(x, packed):
        rows = packed.scales.shape[1]
        scales = packed.scales.transpose(0, 2, 1, 3)
        flat = scales.reshape(*scales.shape[:2], rows // 128, -1, 512)
        return qz.from_pages(flat, rows, scales.shape[-1]).transpose(0, 2, 1, 3)

    mutate_scales(monkeypatch, ["query", "key"], change)


def value_packed_along_head_dim(monkeypatch):
    def change(x, packed):
        along_head = qz.quantize(x, packed.format, axis=-1, per_head_scale=False)
        # The same bytes in the shape that the kernel expects.
        return dataclasses.replace(
            packed,
            payload=along_head.payload.reshape(packed.payload.shape),
            scales=along_head.scales.reshape(packed.scales.shape),
            tensor_scale=None,
        )

    mutate_operands(monkeypatch, ["value"], change)


def every_key_tile_reads_the_scales_of_tile_0(monkeypatch):
    def change(x, packed):
        tiles = packed.scales.shape[1] // 128
        return jnp.tile(packed.scales[:, :128], (1, tiles, 1, 1))

    mutate_scales(monkeypatch, ["key"], change)


def every_value_tile_reads_the_scales_of_tile_0(monkeypatch):
    def change(x, packed):
        per_tile = 128 // packed.format.block
        tiles = packed.scales.shape[-1] // per_tile
        return jnp.tile(packed.scales[..., :per_tile], (1, 1, 1, tiles))

    mutate_scales(monkeypatch, ["value"], change)


def query_scales_not_copied(monkeypatch):
    """Whatever was in tensor memory before; ones are the kindest of it."""
    mutate_scales(monkeypatch, ["query"], lambda x, packed: jnp.ones_like(packed.scales))


def value_scales_not_copied(monkeypatch):
    mutate_scales(monkeypatch, ["value"], lambda x, packed: jnp.ones_like(packed.scales))


def folded_payload_with_unfolded_scales(monkeypatch):
    def change(x, packed):
        return qz.quantize(x, "nvfp4", per_head_scale=True).scales

    mutate_scales(monkeypatch, ["query", "key"], change)


def unfolded_payload_with_folded_scales(monkeypatch):
    def change(x, packed):
        return qz.quantize(x, "nvfp4_folded", per_head_scale=True).scales

    mutate_scales(monkeypatch, ["query", "key"], change)


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
    def change(x, packed):
        tail = np.arange(packed.scales.shape[-1]) % 4 >= 2
        return jnp.where(tail, jnp.ones_like(packed.scales), packed.scales)

    mutate_scales(monkeypatch, ["value"], change)


def denominator_of_unrounded_probabilities(monkeypatch):
    """Not a constant factor, but one that constant inputs hide: sum of 2**z, not of the codes."""
    real = quantized_forward._probabilities

    def values(config, z, m):
        p, _ = real(config, z, m)
        return p, jnp.sum(jnp.exp2(z - m[..., None] + 1), axis=-1)

    monkeypatch.setattr(quantized_forward, "_probabilities", values)


def constants_left_in_the_lse(monkeypatch):
    monkeypatch.setattr(quantized_forward, "_constant_orders", lambda config: 0)


BOTH = ["fp4", "nvfp4_fp8"]
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


# --- Mutants of the gradients ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "factors",
    [
        pytest.param((1, 1, 2**8), id="P's lift missing in dv"),
        pytest.param((2**8, 2**8, 1), id="P's lift missing in dS"),
        pytest.param((1, 2**3, 1), id="dS's lift left in dk"),
    ],
)
def test_gradient_check_rejects(factors):
    q, k, v = gaussian(256, N=2, H=64, seed=17)
    dout = gaussian_dout(q)
    expected = oracle.Attention(q, k, v, masks=dict(is_causal=True)).gradients(dout)
    actual = gradients(qz.NVFP4_FP8, q, k, v, dout)
    check_gradients(actual, expected)
    with pytest.raises(AssertionError):
        check_gradients([x * factor for x, factor in zip(actual, factors, strict=True)], expected)
