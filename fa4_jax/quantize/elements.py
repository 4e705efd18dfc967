"""Element types of the block formats: E2M1, E4M3, E5M2 and E8M0, rounded as the hardware rounds.

Every conversion rounds to nearest, ties to even, and saturates to the largest finite value; a NaN
stays a NaN where the type has one. The arithmetic is exact in float32 on any backend, because
every grid step is a power of two and every representable value is a float32.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4; PTX ISA, `cvt.rn.satfinite`.
"""

import jax
import jax.numpy as jnp
import numpy as np

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E8M0_BIAS = 127
E8M0_NAN = 255

# The sixteen values of E2M1 by code: three magnitude bits, then the sign in bit 3.
E2M1_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


def exponent(x: jax.Array) -> jax.Array:
    """floor(log2 |x|) as int32, read from the bits of float32 `x`; -127 for 0 (and subnormals)."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return ((bits >> 23) & 0xFF) - 127


def nearest_exponent(x: jax.Array) -> jax.Array:
    """Exponent of the power of two nearest to positive float32 `x`: up from a mantissa of 1.5."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return ((bits + (1 << 22)) >> 23) - 127


def exp2_integer(e: jax.Array) -> jax.Array:
    """2**e in float32 for integer `e`, exact; 0 below -126 and 2**127 above 127."""
    e = jnp.asarray(e, jnp.int32)
    bits = jnp.clip(e + 127, 0, 254) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def round_e2m1(x: jax.Array) -> jax.Array:
    """The E2M1 value nearest to `x`, as float32. Ties go to the even code; |x| > 5 becomes 6.

    E2M1 has no NaN: the caller must carry NaN in the block's scale.
    """
    x = x.astype(jnp.float32)
    magnitude = jnp.abs(x)
    # Grid steps: 1/2 below 2, 1 below 4, 2 above. A tie between multiples of the step goes to the
    # even multiple, which is the even code at every boundary of E2M1.
    rounded = jnp.where(
        magnitude < 2,
        jnp.round(magnitude * 2) * 0.5,
        jnp.where(magnitude < 4, jnp.round(magnitude), jnp.round(magnitude * 0.5) * 2),
    )
    return jnp.copysign(jnp.minimum(rounded, E2M1_MAX), x)


def e2m1_codes(values: jax.Array) -> jax.Array:
    """4-bit codes, uint8, of E2M1 `values` (as `round_e2m1` returns them)."""
    magnitude = jnp.abs(values)
    code = jnp.where(magnitude <= 2, magnitude * 2, jnp.where(magnitude == 6, 7, magnitude + 2))
    return code.astype(jnp.uint8) | (jnp.signbit(values).astype(jnp.uint8) << 3)


def e2m1_decode(codes: jax.Array) -> jax.Array:
    """float32 values of 4-bit E2M1 `codes`."""
    return jnp.asarray(E2M1_VALUES)[codes]


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """[..., 2n] 4-bit codes to [..., n] bytes; the even element sits in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"pack_nibbles needs an even last dimension, got shape {codes.shape}")
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """[..., n] bytes to [..., 2n] 4-bit codes, the inverse of `pack_nibbles`."""
    pairs = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def to_e4m3(x: jax.Array) -> jax.Array:
    """float8_e4m3fn nearest to `x`, saturating at 448; NaN stays NaN."""
    return jnp.clip(x.astype(jnp.float32), -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def to_e5m2(x: jax.Array) -> jax.Array:
    """float8_e5m2 nearest to `x`, saturating at 57344 (never Inf); NaN stays NaN."""
    return jnp.clip(x.astype(jnp.float32), -E5M2_MAX, E5M2_MAX).astype(jnp.float8_e5m2)


def _round_to_grid(x, mantissa_bits, smallest_exponent, largest):
    x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    e = jnp.maximum(exponent(x), smallest_exponent) - mantissa_bits
    # Two powers of two: 1/step and step are both normal float32 for either type.
    return jnp.round(x * exp2_integer(-e)) * exp2_integer(e)


def round_e4m3(x: jax.Array) -> jax.Array:
    """The float32 value of `to_e4m3(x)`, computed without an 8-bit array."""
    return _round_to_grid(x, 3, -6, E4M3_MAX)


def round_e5m2(x: jax.Array) -> jax.Array:
    """The float32 value of `to_e5m2(x)`, computed without an 8-bit array."""
    return _round_to_grid(x, 2, -14, E5M2_MAX)


def e8m0_decode(byte: jax.Array) -> jax.Array:
    """2**(byte - 127) in float32; 255 is NaN. Byte 0 (2**-127) reads as 0: it is subnormal, and
    backends flush it."""
    return jnp.where(byte == E8M0_NAN, jnp.nan, exp2_integer(byte.astype(jnp.int32) - E8M0_BIAS))
