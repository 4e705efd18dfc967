"""Online softmax on wgmma accumulators, what may change its logits, and register conversions.

Soft cap c: logits are ``c * tanh(s * scale / c)``. Kernels replace scores by that tanh before they
mask (:func:`cap_scores`); what follows is as without a cap, with c in place of the scale.

Sinks: one more logit in the denominator, which meets the sum at its end (:func:`include_sink`).
"""

from __future__ import annotations

import dataclasses
import math

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.experimental import primitives as prims

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


# Exponents of base 2 are formed by one fused multiply-add with the rounded exponent of the row's
# maximum. Sums and outputs are relative to that rounded exponent, so the rounding cancels, but up
# to here only it cannot carry an exponential out of the range of f16.
FUSED_LIMIT = 2.0**24

# tanh(x) as x P(x**2) / Q(x**2) on [-TANH_LIMIT, TANH_LIMIT], which ends where it reaches 1 within
# the error. Least maximal relative error for these degrees (computed by reweighted least squares).
TANH_LIMIT = 6.9
TANH_P = (246864.47, 30449.373, 568.86694, 1.0)
TANH_Q = (246864.69, 112735.875, 5234.4136, 35.85167)


def pack(low: Float32, high: Float32, dtype: type) -> Int32:
    """Rounds two float32 to 16 bit (bf16 or f16) and packs them, ``low`` in the low half."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return prims.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


def convert(source: cute.Tensor, destination: cute.Tensor, dtype: type) -> None:
    """Rounds a float32 register fragment into a 16-bit one of the same element order."""
    words = cute.recast_tensor(destination, Int32)
    for i in range(cute.size(words)):
        words[i] = pack(source[2 * i], source[2 * i + 1], dtype)


def horner(coefficients: tuple[float, ...], x: Float32) -> Float32:
    """The polynomial with these coefficients, that of the lowest power first."""
    result = Float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + Float32(coefficient)
    return result


def tanh(x: Float32) -> Float32:
    """Hyperbolic tangent: ten float32 instructions and one reciprocal.

    Largest relative error 1.2e-6 (2**-19.7; the hardware's reciprocal adds 2**-23), measured on
    2.1 million float32 numbers from 1e-30 to 12, so within 1.2e-6 of +-1 for all large x and
    infinities; 0 and NaN are themselves. ``tanh.approx`` is 30 times cheaper in accuracy than f16
    probabilities allow: its 2**-11 becomes 2**-11 c in a logit.
    """
    # sign(x) * min(|x|, limit) in one instruction.
    x = cute.arch.fmin(x, Float32(TANH_LIMIT), abs=True, nan=True)
    square = x * x
    return x * horner(TANH_P, square) * cute.arch.rcp_approx(horner(TANH_Q, square))


def logit_scales(scale: Float32, soft_cap: Float32 | None = None) -> tuple[Float32, Float32 | None]:
    """What turns scores into base-2 exponents: (positive factor, factor inside the tanh or None).

    The scores are those of ``|scale|``: a negative scale has negated them. -inf * 0 is NaN, so a
    zero scale becomes a tiny one.
    """
    magnitude = cute.arch.fmax(cute.math.absf(scale), Float32(1e-30))
    if soft_cap is None:
        return magnitude * LOG2_E, None
    return soft_cap * LOG2_E, magnitude * cute.arch.rcp_approx(soft_cap)


def cap_scores(scores: cute.Tensor, factor: Float32) -> None:
    """Replaces raw scores by ``tanh(score * factor)``; the factor is that of `logit_scales`."""
    for i in range(cute.size(scores)):
        scores[i] = tanh(scores[i] * factor)


def include_sink(
    shift_log2: Float32, total: Float32, sink_log2: Float32
) -> tuple[Float32, Float32, Float32]:
    """Adds a sink to a row's sum of exponentials, which is ``total * 2**shift_log2``.

    Args:
      shift_log2: finite, or anything at all if ``total`` is 0.
      total: 0 for a row that saw nothing: it stays so, sink or not.
      sink_log2: the sink's logit times log2(e): any number, infinities included.

    Returns:
      The factor by which outputs that were accumulated relative to the old shift must shrink, and
      the shift and total with the sink.
    """
    gap = shift_log2 - sink_log2
    smaller = cute.math.exp2(-cute.math.absf(gap), fastmath=True)
    one = Float32(1.0)
    factor, weight = (
        cutlass.select_(gap < 0.0, smaller, one),
        cutlass.select_(gap < 0.0, one, smaller),
    )
    some = total != 0.0
    return (
        Float32(cutlass.select_(some, factor, one)),
        Float32(cutlass.select_(some, cute.arch.fmax(shift_log2, sink_log2), shift_log2)),
        Float32(cutlass.select_(some, total * factor + weight, total)),
    )


def quad_reduce(value: Float32, combine) -> Float32:
    """Reduces over the four lanes that hold one accumulator row."""
    for lane in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=lane))
    return value


def row_elements(fragment: cute.Tensor, row: int) -> list[int]:
    """Indices of the accumulator fragment's elements that belong to the thread's row 0 or 1."""
    return [i for i in range(cute.size(fragment)) if (i // 2) % 2 == row]


def multiply_rounded(a: Float32, b: Float32) -> Float32:
    """a * b rounded to float32, never fused with an addition."""
    return prims.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def finite(maximum: Float32) -> Float32:
    """A row's maximum, or 0 where it saw nothing: keeps -inf - (-inf) out of exponents."""
    return Float32(cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum))


@cute.jit
def centre(scores: cute.Tensor, large: Boolean, maximum0: Float32, maximum1: Float32):
    """Subtracts the maxima of the two rows from their scores if ``large``."""
    if large:
        base0, base1 = finite(maximum0), finite(maximum1)
        for i in row_elements(scores, 0):
            scores[i] = scores[i] - base0
        for i in row_elements(scores, 1):
            scores[i] = scores[i] - base1


@dataclasses.dataclass(frozen=True)
class OnlineSoftmax:
    """Running maximum and sum of the two rows that a thread holds of a 64 x N accumulator.

    Element i of the fragment belongs to row ``(i // 2) % 2``. Maxima are in units of scores (raw or
    capped); sums are this thread's share until :meth:`finish` reduces them over the quad.

    Attributes:
      scale_log2: positive factor from scores to base-2 exponents.
      maximum, total: float32 register tensors of two elements.
    """

    scale_log2: Float32
    maximum: cute.Tensor
    total: cute.Tensor

    @classmethod
    def start(cls, scale_log2: Float32) -> OnlineSoftmax:
        softmax = cls(
            scale_log2, cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        )
        softmax.maximum.fill(-Float32.inf)
        softmax.total.fill(0.0)
        return softmax

    def shift(self, row: int) -> Float32:
        """The exponent of 2 that a row's sums and outputs are relative to."""
        return multiply_rounded(finite(self.maximum[row]), self.scale_log2)

    def update(self, scores: cute.Tensor) -> list[Float32]:
        """Turns a tile of scores into exponentials in place.

        Returns:
          The factor of each row by which everything accumulated before must shrink.
        """
        factors, exponents = [], []
        for row in range(2):
            elements = row_elements(scores, row)
            # Two chains, so that the latency of one maximum hides behind the other.
            chains = [scores[elements[0]], scores[elements[1]]]
            for n, i in enumerate(elements[2:]):
                chains[n % 2] = cute.arch.fmax(chains[n % 2], scores[i])
            old = self.maximum[row]
            new = cute.arch.fmax(old, quad_reduce(cute.arch.fmax(*chains), cute.arch.fmax))
            self.maximum[row] = new
            exponents.append(self.shift(row))
            change = multiply_rounded(old, self.scale_log2) - exponents[row]
            factors.append(cute.math.exp2(change, fastmath=True))
        # One branch for both rows: a branch in each keeps the compiler from interleaving them.
        large = cute.arch.fmax(*(cute.math.absf(x) for x in exponents)) > FUSED_LIMIT
        centre(scores, large, self.maximum[0], self.maximum[1])
        for row in range(2):
            # Computed again rather than kept in a register across the branch.
            shift = Float32(cutlass.select_(large, Float32(0.0), self.shift(row)))
            sums = [self.total[row] * factors[row], Float32(0.0)]
            for n, i in enumerate(row_elements(scores, row)):
                scores[i] = cute.math.exp2(scores[i] * self.scale_log2 - shift, fastmath=True)
                sums[n % 2] = sums[n % 2] + scores[i]
            self.total[row] = sums[0] + sums[1]
        return factors

    def finish(self, sink_log2: Float32) -> list[tuple[Float32, Float32]]:
        """(factor of the output, natural log of the sum) of each row; (0, -inf) if empty.

        Args:
          sink_log2: logit of the sink times log2(e); -inf for none.
        """
        results = []
        for row in range(2):
            total = quad_reduce(self.total[row], lambda a, b: a + b)
            factor, shift, total = include_sink(self.shift(row), total, sink_log2)
            empty = total == 0.0
            inverse = factor * cute.arch.rcp_approx(total)
            lse = (shift + cute.math.log2(total, fastmath=True)) * LN_2
            results.append(
                (
                    Float32(cutlass.select_(empty, Float32(0.0), inverse)),
                    Float32(cutlass.select_(empty, -Float32.inf, lse)),
                )
            )
        return results


def rescale(accumulator: cute.Tensor, factors: list[Float32]) -> None:
    """Multiplies the two rows of a 64 x N accumulator by a factor each."""
    for i in range(cute.size(accumulator)):
        accumulator[i] = accumulator[i] * factors[(i // 2) % 2]


def normalise(accumulator: cute.Tensor, scales: list[Float32]) -> None:
    """Multiplies the two rows of a 64 x N accumulator by a factor each; a factor of 0 selects 0.

    Selected, not multiplied: a row that sees nothing is 0 even where its products met NaN values.
    """
    for i in range(cute.size(accumulator)):
        scale = scales[(i // 2) % 2]
        scaled = accumulator[i] * scale
        accumulator[i] = Float32(cutlass.select_(scale == 0.0, Float32(0.0), scaled))
