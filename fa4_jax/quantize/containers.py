"""Block-quantised arrays: formats, the typed container, and how values become payload and scales.

| format | payload | block | scale | value |
|---|---|---|---|---|
| `NVFP4` | E2M1 | 16 | UE4M3 | `q * SF` |
| `NVFP4_FOLDED` | E2M1 | 16 | UE4M3, blocks b and b+4 of each 128 share one | `q * SF` |
| `MXFP4_OCP` | E2M1 | 32 | E8M0 | `q * 2**(u-127)`, `u-127 = floor(log2 amax) - 2` |
| `MXFP4_SIX` | E2M1 | 32 | E8M0 | `q * 2**(u-127) / 6`, `2**(u-127)` nearest to amax |
| `FP8_E4M3`, `FP8_E5M2` | 8 bit | - | - | `q` |

each times the optional float32 `tensor_scale` of its head. The two MXFP4 conventions store
different payloads and scales for the same numbers, so they are two formats, and every consumer
names the one it reads.

Sources: OCP Microscaling Formats v1.0, section 6.3; PTX ISA, block scaling of `tcgen05.mma`;
"Hardware-Aware FP4 FlashAttention-4" (R. Hu, 2026), sections 2 and 4, for the six convention and
the folded scales.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax.quantize import elements

# Scales of one K64 step of `tcgen05.mma` at vec-16; folding makes the two K64 steps of a 128-wide
# head read the same four.
FOLD_DISTANCE = 4
FOLD_WIDTH = 128
# Candidate NVFP4 scales, as multiples of amax / 6, where the one of least squared error is chosen.
SCALE_MULTIPLIERS = (0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25)


class Format(enum.Enum):
    """What the bytes of a `Quantized` mean (module docstring); compares and hashes by identity."""

    NVFP4 = "nvfp4"
    NVFP4_FOLDED = "nvfp4_folded"
    MXFP4_OCP = "mxfp4_ocp"
    MXFP4_SIX = "mxfp4_six"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def block(self) -> int | None:
        """Elements that share a scale; None for the 8-bit formats."""
        if self in (Format.NVFP4, Format.NVFP4_FOLDED):
            return 16
        return 32 if self in (Format.MXFP4_OCP, Format.MXFP4_SIX) else None

    @property
    def multiple(self) -> int:
        """The blocked axis is padded with zeros to a multiple of this."""
        return FOLD_WIDTH if self is Format.NVFP4_FOLDED else self.block or 1


# A power-of-two tensor scale brings a head's largest element just below 2**full. NVFP4: amax / 6
# just below 448. FP8: just below the largest finite element. MXFP4 needs none for range; 2**24
# keeps products with the smallest probabilities of the sampled guard out of the subnormals.
_FULL = {
    Format.NVFP4: 11,
    Format.NVFP4_FOLDED: 11,
    Format.MXFP4_OCP: 24,
    Format.MXFP4_SIX: 24,
    Format.FP8_E4M3: 8,
    Format.FP8_E5M2: 15,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Quantized:
    """A quantised array: a pytree of payload and scales that remembers its format and axis.

    It has the `shape`, `ndim` and `dtype` of the array it stands for. Payload and scales store the
    blocked `axis` last, the other axes in order: value [B, S, K, H] blocked along its keys
    (axis 1) has payload [B, K, H, S/2], as K-major FP4 operands need.

    Attributes:
      payload: uint8, two E2M1 codes a byte (even element in the low nibble); or float8.
      scales: float8_e4m3fn or float8_e8m0fnu, one a block; None for the 8-bit formats.
      tensor_scale: float32 [B, heads] factor of the decoded values, a power of two as made here;
        None for 1.
      format: what the bytes mean.
      axis: the blocked axis of the logical array, counted from the end (always negative).
      length: logical length of that axis; the payload is padded with zeros to whole blocks.
      dtype: dtype of the logical array.
    """

    payload: jax.Array
    scales: jax.Array | None
    tensor_scale: jax.Array | None
    format: Format = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        return self.payload.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.payload.shape[:-1])
        shape.insert(self.ndim + self.axis, self.length)
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of payload and scales together."""
        leaves = jax.tree.leaves((self.payload, self.scales, self.tensor_scale))
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)

    def codes(self) -> jax.Array:
        """The payload's elements in float32, axis last and padded, without any scale."""
        if self.format.block is None:
            return self.payload.astype(jnp.float32)
        return elements.e2m1_decode(elements.unpack_nibbles(self.payload))

    def dequantize_unscaled(self) -> jax.Array:
        """float32 `q * scale` in the logical layout, without tensor_scale and without the 1/6 of
        the six convention: exactly what a block-scaled MMA multiplies."""
        values = self.codes()
        if self.scales is not None:
            values = _spread(values, self.format.block, decode_scales(self.scales))
        values = values[..., : self.length]
        return jnp.moveaxis(values, -1, self.axis)

    def dequantize(self) -> jax.Array:
        """float32 values in the logical layout."""
        values = self.dequantize_unscaled()
        if self.format is Format.MXFP4_SIX:
            values = values / elements.E2M1_MAX
        if self.tensor_scale is not None:
            values = values * self.tensor_scale[:, None, :, None]
        return values

    def require(self, name: str, format: Format, axis: int) -> None:
        """Raises ValueError unless this is `format` blocked along `axis` (negative)."""
        if self.format is not format:
            raise ValueError(
                f"{name} is quantised as {self.format.value}, but {format.value} is needed here"
            )
        if format.block is not None and self.axis != axis:
            raise ValueError(
                f"{name} ({self.format.value}) is blocked along axis {self.axis}, but blocks "
                f"along axis {axis} are needed here"
            )

    def __repr__(self) -> str:
        def show(x):
            return f"{np.dtype(x.dtype).name}{list(x.shape)}" if hasattr(x, "shape") else repr(x)

        if not hasattr(self.payload, "shape"):  # a tree of something else than arrays
            return f"Quantized[{self.format.value}]({self.payload!r}, {self.scales!r})"
        parts = [f"payload {show(self.payload)}"]
        if self.scales is not None:
            parts.append(f"scales {show(self.scales)}")
        if self.tensor_scale is not None:
            parts.append(f"tensor_scale {show(self.tensor_scale)}")
        along = f" along axis {self.axis}" if self.format.block else ""
        logical = f"{np.dtype(self.dtype).name}{list(self.shape)}"
        return f"Quantized[{self.format.value}]({logical}{along}: {', '.join(parts)})"


def decode_scales(scales: jax.Array) -> jax.Array:
    """float32 values of float8_e4m3fn or float8_e8m0fnu block scales."""
    if scales.dtype == jnp.float8_e8m0fnu:
        return elements.e8m0_decode(jax.lax.bitcast_convert_type(scales, jnp.uint8))
    return scales.astype(jnp.float32)


def _spread(values, block, factors):
    """values [..., n * block] times factors [..., n], each over its block."""
    blocks = values.reshape(*values.shape[:-1], -1, block)
    return (blocks * factors[..., None]).reshape(values.shape)


def _divide(values, scale):
    """values [..., n, block] / scale [..., n]; 0 where the scale is 0."""
    scale = scale[..., None]
    return jnp.where(scale == 0, 0.0, values / jnp.where(scale == 0, 1.0, scale))


def _head_scale(x, full):
    """Power-of-two decode factor [B, heads] that brings amax into [2**(full-1), 2**full)."""
    # A NaN or Inf spoils its own block, not the whole head.
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)
    amax = jnp.max(magnitude, axis=(1, 3), initial=0.0)
    e = elements.exponent(amax) + 1 - full
    # Both the factor and its inverse stay normal; an all-zero head keeps factor 1.
    return jnp.where(amax == 0, 1.0, elements.exp2_integer(jnp.clip(e, -126, 126)))


def _nvfp4_scale(blocks, folded, least_squares):
    """UE4M3 scale values [..., n] for blocks [..., n, 16]."""
    base = jnp.max(jnp.abs(blocks), axis=-1)
    if folded:
        base = _fold(base, jnp.max)
    base = base / elements.E2M1_MAX
    if not (folded or least_squares):
        return elements.round_e4m3(base)

    def better(best, multiplier):
        # The largest multipliers could pass the largest finite scale: round_e4m3 saturates there.
        scale = elements.round_e4m3(base * multiplier)
        error = _squared_error(blocks, scale)
        if folded:
            error = _fold(error, jnp.sum)
        return jax.tree.map(
            lambda new, old: jnp.where(error < best[1], new, old), (scale, error), best
        ), None

    start = (jnp.zeros_like(base), jnp.full_like(base, jnp.inf))
    (scale, _), _ = jax.lax.scan(better, start, jnp.array(SCALE_MULTIPLIERS, jnp.float32))
    return scale


def _fold(per_block, reduce):
    """Reduces [..., n] over the pairs of blocks that share a scale, and gives it to both."""
    pairs = per_block.reshape(*per_block.shape[:-1], -1, 2, FOLD_DISTANCE)
    return jnp.broadcast_to(reduce(pairs, axis=-2, keepdims=True), pairs.shape).reshape(
        per_block.shape
    )


def _squared_error(blocks, step):
    """Squared rounding error [..., n] of blocks [..., n, b] stored with these step sizes."""
    rounded = elements.round_e2m1(_divide(blocks, step)) * step[..., None]
    return jnp.sum((rounded - blocks) ** 2, axis=-1)


def _mxfp4_exponent(blocks, six, least_squares):
    """Exponent int32 [..., n] of the E8M0 scale of blocks [..., n, 32]; -127 for an empty block."""
    amax = jnp.max(jnp.abs(blocks), axis=-1)
    if not six:
        e = elements.exponent(amax) - 2
    else:
        e = elements.nearest_exponent(amax)
        if least_squares:
            candidates = jnp.stack([e - 1, e, e + 1])
            step = elements.exp2_integer(candidates) / elements.E2M1_MAX
            error = jax.vmap(lambda s: _squared_error(blocks, s))(step)
            # Ties keep the nearest power of two: compare it first.
            order = jnp.array([1, 0, 2])
            choice = order[jnp.argmin(error[order], axis=0)]
            e = e - 1 + choice
    return jnp.where(amax == 0, -elements.E8M0_BIAS, jnp.clip(e, -126, 127))


def quantize(
    x: jax.Array,
    format: Format | str,
    *,
    axis: int = -1,
    per_head_scale: bool = False,
    least_squares: bool = False,
) -> Quantized:
    """Quantises `x` in blocks along `axis`.

    A block (or, for the 8-bit formats, an element) that holds NaN or Inf decodes to NaN, so that a
    fault in the data is not hidden by a format without NaN.

    Args:
      x: floating array; [B, length, heads, dim] if per_head_scale.
      format: a `Format` or its value, such as "nvfp4".
      axis: the axis along which the MMA contracts.
      per_head_scale: factor out a float32 power of two per batch and head, so that the range of
        the scales (of the elements, for FP8) fits the head's largest element.
      least_squares: choose each block's scale by squared error: for NVFP4 among
        `SCALE_MULTIPLIERS` of amax / 6 (NVFP4_FOLDED always does), for MXFP4_SIX among the nearest
        power of two and its two neighbours (ties keep the nearest).

    Raises:
      ValueError: an option that the format does not have.
    """
    format = Format(format)
    axis = axis if axis < 0 else axis - x.ndim
    dtype, length = np.dtype(x.dtype), x.shape[axis]
    mx = format in (Format.MXFP4_OCP, Format.MXFP4_SIX)
    if per_head_scale and x.ndim != 4:
        raise ValueError(f"per_head_scale needs [B, length, heads, dim], got {x.ndim} dimensions")
    if least_squares and format not in (Format.NVFP4, Format.NVFP4_FOLDED, Format.MXFP4_SIX):
        raise ValueError(f"{format.value} has no scales that least_squares could choose")
    x = x.astype(jnp.float32)
    tensor_scale = None
    if per_head_scale:
        tensor_scale = _head_scale(x, _FULL[format])
        x = x / tensor_scale[:, None, :, None]
    x = jnp.moveaxis(x, axis, -1)
    if format.block is None:
        convert = elements.to_e4m3 if format is Format.FP8_E4M3 else elements.to_e5m2
        payload = convert(jnp.where(jnp.isfinite(x), x, jnp.nan))
        return Quantized(payload, None, tensor_scale, format, axis, length, dtype)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % format.multiple)])
    blocks = x.reshape(*x.shape[:-1], -1, format.block)
    broken = ~jnp.all(jnp.isfinite(blocks), axis=-1)
    if format is Format.NVFP4_FOLDED:
        broken = _fold(broken, jnp.any)
    blocks = jnp.where(broken[..., None], 0.0, blocks)
    if mx:
        six = format is Format.MXFP4_SIX
        e = _mxfp4_exponent(blocks, six, least_squares)
        byte = jnp.where(broken, elements.E8M0_NAN, e + elements.E8M0_BIAS).astype(jnp.uint8)
        scales = jax.lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu)
        step = elements.exp2_integer(e)
        values = _divide(blocks * (elements.E2M1_MAX if six else 1.0), step)
    else:
        scale = _nvfp4_scale(blocks, format is Format.NVFP4_FOLDED, least_squares)
        scales = jnp.where(broken, jnp.nan, scale).astype(jnp.float8_e4m3fn)
        values = _divide(blocks, scale)
    codes = elements.e2m1_codes(elements.round_e2m1(values)).reshape(x.shape)
    payload = elements.pack_nibbles(codes)
    return Quantized(payload, scales, tensor_scale, format, axis, length, dtype)
