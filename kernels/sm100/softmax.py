"""Online softmax with one thread per row, exponentials partly on the FMA units.

Sources: FlashAttention-4 (arXiv 2603.05451): conditional rescaling, polynomial 2**x. The range
reduction by a round-down addition is Cody and Waite's.
"""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from ..masks import Visibility
from ..softmax import LN_2

# The running maximum may lag behind the true one by a factor of 2**8 before anything is rescaled:
# exponentials stay below 256, far from the limits of bf16, f16 and the float32 sums.
RESCALE_THRESHOLD = -8.0

# 2**x on [0, 1) as 1 + x (c1 + x (c2 + x c3)): relative error 8.8e-5, a fifth of half an f16 ulp.
EXP2_COEFFICIENTS = (1.0, 0.695146143, 0.227564394, 0.0771190897)
# Added with rounding down, 1.5 * 2**23 leaves floor(x) in the low bits of the sum.
EXP2_MAGIC = 12582912.0
# 2**-127 is the first power without an exponent of its own: it and what is below become 0.
EXP2_LOWEST = -127.0

Pair = tuple[Float32, Float32]
_NEAREST = prims.FPRoundingMode.RN
_DOWN = prims.FPRoundingMode.RM


def maximum3(a: Float32, b: Float32, c: Float32) -> Float32:
    """The largest of three, in one instruction; NaN is ignored."""
    return prims.inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def maximum_nan(a: Float32, b: Float32) -> Float32:
    """The larger of two, or NaN if either is."""
    return prims.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def multiply_rounded(a: Float32, b: Float32) -> Float32:
    """a * b rounded to float32, never fused with an addition."""
    return prims.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def fma2(a: Pair, b: Pair, c: Pair) -> Pair:
    """a * b + c on two elements in one instruction."""
    return prims.fma_packed_f32x2(a, b, c, rnd=_NEAREST)


def add2(a: Pair, b: Pair, rounding: prims.FPRoundingMode = _NEAREST) -> Pair:
    """a + b on two elements in one instruction."""
    return prims.add_packed_f32x2(a, b, rnd=rounding)


def scale2(a: Pair, factor: Float32) -> Pair:
    """a * factor on two elements in one instruction."""
    return prims.mul_packed_f32x2(a, (factor, factor), rnd=_NEAREST)


def exp2_polynomial(x: Pair) -> Pair:
    """2**x for x < 128 without the special function unit; exactly 0 for -inf.

    A NaN comes out as a huge finite number, which 16-bit conversion turns into infinity.
    """
    x = tuple(maximum_nan(element, Float32(EXP2_LOWEST)) for element in x)
    magic = Float32(EXP2_MAGIC)
    shifted = add2(x, (magic, magic), _DOWN)
    whole = add2(shifted, (-magic, -magic))
    minus_one = Float32(-1.0)
    fraction = fma2(whole, (minus_one, minus_one), x)
    coefficients = [Float32(c) for c in EXP2_COEFFICIENTS]
    result = (coefficients[-1],) * 2
    for c in reversed(coefficients[:-1]):
        result = fma2(result, fraction, (c, c))
    # floor(x) goes to the exponent field; the magic number's own bits fall off the left end.
    return tuple(
        (mantissa.bitcast(Int32) + (bits.bitcast(Int32) << 23)).bitcast(Float32)
        for mantissa, bits in zip(result, shifted, strict=True)
    )


def exp2_hardware(x: Pair) -> Pair:
    """2**x on the special function unit."""
    return tuple(cute.math.exp2(element, fastmath=True) for element in x)


def row_maximum(scores: cute.Tensor, start: Float32) -> Float32:
    """The largest of ``start`` and all elements, two elements an instruction; NaN is ignored."""
    count = cute.size(scores)
    # Four chains, so that the latency of one instruction hides behind the others.
    chains = [maximum3(scores[0], scores[1], start)]
    chains += [cute.arch.fmax(scores[2 * i], scores[2 * i + 1]) for i in range(1, 4)]
    for i in range(8, count, 2):
        chain = i // 2 % 4
        chains[chain] = maximum3(chains[chain], scores[i], scores[i + 1])
    return cute.arch.fmax(maximum3(*chains[:3]), chains[3])


def add_pairs(sums: list[Pair], values: cute.Tensor, first: int, count: int) -> list[Pair]:
    """Adds elements ``first + [0, count)`` to pairs of partial sums, two an instruction."""
    sums = list(sums)
    for i in range(first, first + count, 2):
        chain = i // 2 % len(sums)
        sums[chain] = add2(sums[chain], (values[i], values[i + 1]))
    return sums


def visible_columns(visibility: Visibility, row: Int32) -> tuple[Int32, Int32]:
    """Half-open range of the columns that one row sees."""
    begin, end = Int32(0), visibility.num_columns
    if visibility.kind.left:
        begin = row + visibility.shift_left
    if visibility.kind.right:
        end = cutlass.min(end, row + visibility.shift_right + 1)
    return begin, end


def mask_row(scores: cute.Tensor, begin: Int32, end: Int32, left: bool) -> None:
    """Sets the elements outside [begin, end) to -inf; those before ``begin`` only if ``left``."""
    for i in range(cute.size(scores)):
        visible = i < end
        if left:
            visible = cutlass.and_(visible, i >= begin)
        scores[i] = Float32(cutlass.select_(visible, scores[i], -Float32.inf))


@dataclasses.dataclass(frozen=True)
class RowSoftmax:
    """Running reference maximum and sum of one row, in a thread's registers.

    The reference is a maximum that may lag behind the true one (``RESCALE_THRESHOLD``). Sums and
    outputs are kept relative to 2**shift, where ``shift`` is the reference's exponent as rounded to
    float32, so results depend neither on the lag nor on that rounding.

    Attributes:
      scale_log2: positive factor from raw scores to base-2 exponents.
      reference, shift, total: float32 register tensors of one element; -inf, -inf and 0 for a row
        that has seen nothing.
    """

    scale_log2: Float32
    reference: cute.Tensor
    shift: cute.Tensor
    total: cute.Tensor

    @classmethod
    def start(cls, scale_log2: Float32) -> RowSoftmax:
        softmax = cls(scale_log2, *(cute.make_rmem_tensor(1, Float32) for _ in range(3)))
        softmax.reference[0] = -Float32.inf
        softmax.shift[0] = -Float32.inf
        softmax.total[0] = Float32(0.0)
        return softmax

    def advance(self, maximum: Float32) -> Float32:
        """Takes in the maximum of all scores so far.

        Returns:
          The factor by which everything accumulated before must shrink: 1 unless the reference
          moves. The sum is multiplied by it here.
        """
        old = self.shift[0]
        nothing = maximum == -Float32.inf
        # 0 instead of -inf keeps NaN out of the difference.
        finite = Float32(cutlass.select_(nothing, Float32(0.0), maximum))
        new = multiply_rounded(finite, self.scale_log2)
        change = old - new
        keep = change >= RESCALE_THRESHOLD
        moved = cute.math.exp2(change, fastmath=True)
        factor = Float32(cutlass.select_(keep, Float32(1.0), moved))
        new = cutlass.select_(nothing, -Float32.inf, new)
        self.reference[0] = Float32(cutlass.select_(keep, self.reference[0], maximum))
        self.shift[0] = Float32(cutlass.select_(keep, old, new))
        self.total[0] = self.total[0] * factor
        return factor

    def exponentials(
        self, scores: cute.Tensor, first: int, count: int, emulated: frozenset[int]
    ) -> None:
        """Turns elements ``first + [0, count)`` into exponentials, in place.

        Args:
          scores: the row's scores.
          first, count: even numbers.
          emulated: which pairs (2p, 2p + 1) of the row are left to the polynomial.
        """
        nothing = self.shift[0] == -Float32.inf
        shift = -Float32(cutlass.select_(nothing, Float32(0.0), self.shift[0]))
        for i in range(first, first + count, 2):
            x = fma2((scores[i], scores[i + 1]), (self.scale_log2, self.scale_log2), (shift, shift))
            exp2 = exp2_polynomial if i // 2 in emulated else exp2_hardware
            scores[i], scores[i + 1] = exp2(x)


def finish_row(shift: Float32, total: Float32) -> tuple[Float32, Float32]:
    """(1 / sum, natural log of the sum of exponentials) of a row; (0, -inf) if it saw nothing."""
    empty = total == 0.0
    lse = (shift + cute.math.log2(total, fastmath=True)) * LN_2
    return (
        Float32(cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))),
        Float32(cutlass.select_(empty, -Float32.inf, lse)),
    )


def spread_pairs(share: int, fragments: range, fragment: int) -> frozenset[int]:
    """Spreads the polynomial's ``share`` pairs of a row evenly over some fragments.

    Args:
      share: pairs in all, a multiple of ``len(fragments)``.
      fragments: numbers of the fragments that take part.
      fragment: pairs per fragment.
    """
    each = share // len(fragments) if share else 0
    return frozenset(
        number * fragment + i
        for number in fragments
        for i in range(fragment)
        if (i + 1) * each // fragment > i * each // fragment
    )
