"""Online softmax on wgmma accumulators, and the register conversions around it."""

from __future__ import annotations

import dataclasses
import math

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


# Exponents of base 2 are formed by one fused multiply-add with the rounded exponent of the row's
# maximum. Up to here its rounding changes a probability by less than 2**-9.
FUSED_LIMIT = 2.0**16


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


def quad_reduce(value: Float32, combine) -> Float32:
    """Reduces over the four lanes that hold one accumulator row."""
    for lane in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=lane))
    return value


def row_elements(fragment: cute.Tensor, row: int) -> list[int]:
    """Indices of the accumulator fragment's elements that belong to the thread's row 0 or 1."""
    return [i for i in range(cute.size(fragment)) if (i // 2) % 2 == row]


@cute.jit
def centre(scores: cute.Tensor, row: cutlass.Constexpr, maximum: Float32, shift: Float32):
    """Gives what is left to subtract from the exponents of a row: ``shift``, or 0.

    Where the exponents are so large that rounding ``shift`` would matter (logits of 45,000 and
    more), the maximum is subtracted here, from the scores.
    """
    if cute.arch.fmax(shift, -shift) > FUSED_LIMIT:
        for i in row_elements(scores, row):
            scores[i] = scores[i] - maximum
        shift = Float32(0.0)
    return shift


@dataclasses.dataclass(frozen=True)
class OnlineSoftmax:
    """Running maximum and sum of the two rows that a thread holds of a 64 x N accumulator.

    Element i of the fragment belongs to row ``(i // 2) % 2``. Maxima are in units of raw scores;
    sums are this thread's share until :meth:`finish` reduces them over the quad.

    Attributes:
      scale_log2: positive factor from raw scores to base-2 exponents.
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

    def update(self, scores: cute.Tensor) -> list[Float32]:
        """Turns a tile of scores into exponentials in place.

        Returns:
          The factor of each row by which everything accumulated before must shrink.
        """
        factors = []
        for row in range(2):
            elements = row_elements(scores, row)
            # Two chains, so that the latency of one maximum hides behind the other.
            chains = [scores[elements[0]], scores[elements[1]]]
            for n, i in enumerate(elements[2:]):
                chains[n % 2] = cute.arch.fmax(chains[n % 2], scores[i])
            old = self.maximum[row]
            new = cute.arch.fmax(old, quad_reduce(cute.arch.fmax(*chains), cute.arch.fmax))
            self.maximum[row] = new
            # A row with nothing visible so far: keep -inf - (-inf) out of the exponent.
            base = Float32(cutlass.select_(new == -Float32.inf, Float32(0.0), new))
            exponent = base * self.scale_log2
            shift = centre(scores, row, base, exponent)
            change = cutlass.select_(
                shift == exponent,
                old * self.scale_log2 - shift,
                (old - base) * self.scale_log2,
            )
            factor = cute.math.exp2(Float32(change), fastmath=True)
            sums = [self.total[row] * factor, Float32(0.0)]
            for n, i in enumerate(elements):
                scores[i] = cute.math.exp2(scores[i] * self.scale_log2 - shift, fastmath=True)
                sums[n % 2] = sums[n % 2] + scores[i]
            self.total[row] = sums[0] + sums[1]
            factors.append(factor)
        return factors

    def finish(self) -> list[tuple[Float32, Float32]]:
        """(1 / sum, natural log of the sum of exponentials) of each row; (0, -inf) if empty."""
        results = []
        for row in range(2):
            total = quad_reduce(self.total[row], lambda a, b: a + b)
            empty = total == 0.0
            inverse = cute.arch.rcp_approx(total)
            lse = (
                self.maximum[row] * self.scale_log2 + cute.math.log2(total, fastmath=True)
            ) * LN_2
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
