"""Online softmax with one thread per row, exponentials partly on the FMA units.

Sources: FlashAttention-4 (arXiv 2603.05451): conditional rescaling, polynomial 2**x. The range
reduction by a round-down addition is Cody and Waite's.
"""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.experimental import primitives as prims

from ..masks import Visibility
from ..softmax import (
    FUSED_LIMIT,
    LN_2,
    TANH_LIMIT,
    TANH_P,
    TANH_Q,
    finite,
    include_sink,
    multiply_rounded,
)

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


def maximum(*values: Float32) -> Float32:
    """The largest of two or three in one instruction, or NaN if any of them is."""
    operands = ", ".join(f"{{$r{i}}}" for i in range(len(values)))
    return prims.inline_ptx(
        f"max.NaN.f32 {{$w0}}, {operands};",
        write_only_types=[Float32],
        read_only_args=list(values),
    )


def fma2(a: Pair, b: Pair, c: Pair) -> Pair:
    """a * b + c on two elements in one instruction."""
    return prims.fma_packed_f32x2(a, b, c, rnd=_NEAREST)


def add2(a: Pair, b: Pair, rounding: prims.FPRoundingMode = _NEAREST) -> Pair:
    """a + b on two elements in one instruction."""
    return prims.add_packed_f32x2(a, b, rnd=rounding)


def multiply2(a: Pair, b: Pair) -> Pair:
    """a * b on two elements in one instruction."""
    return prims.mul_packed_f32x2(a, b, rnd=_NEAREST)


def scale2(a: Pair, factor: Float32) -> Pair:
    """a * factor on two elements in one instruction."""
    return multiply2(a, (factor, factor))


def polynomial2(coefficients: tuple[float, ...], x: Pair) -> Pair:
    """The polynomial with these coefficients, that of the lowest power first, on two elements."""
    result = (Float32(coefficients[-1]),) * 2
    for coefficient in reversed(coefficients[:-1]):
        result = fma2(result, x, (Float32(coefficient),) * 2)
    return result


def exp2_polynomial(x: Pair) -> Pair:
    """2**x for x < 128 without the special function unit; exactly 0 for -inf.

    A NaN comes out as a huge finite number; it shows in the row's maximum (:func:`row_maximum`).
    """
    x = tuple(maximum(element, Float32(EXP2_LOWEST)) for element in x)
    magic = Float32(EXP2_MAGIC)
    shifted = add2(x, (magic, magic), _DOWN)
    whole = add2(shifted, (-magic, -magic))
    minus_one = Float32(-1.0)
    fraction = fma2(whole, (minus_one, minus_one), x)
    result = polynomial2(EXP2_COEFFICIENTS, fraction)
    # floor(x) goes to the exponent field; the magic number's own bits fall off the left end.
    return tuple(
        (mantissa.bitcast(Int32) + (bits.bitcast(Int32) << 23)).bitcast(Float32)
        for mantissa, bits in zip(result, shifted, strict=True)
    )


def exp2_hardware(x: Pair) -> Pair:
    """2**x on the special function unit."""
    return tuple(cute.math.exp2(element, fastmath=True) for element in x)


def row_maximum(scores: cute.Tensor, start: Float32) -> Float32:
    """The largest of ``start`` and all elements, two elements an instruction; NaN if any is."""
    count = cute.size(scores)
    # Four chains, so that the latency of one instruction hides behind the others.
    chains = [maximum(scores[0], scores[1], start)]
    chains += [maximum(scores[2 * i], scores[2 * i + 1]) for i in range(1, 4)]
    for i in range(8, count, 2):
        chain = i // 2 % 4
        chains[chain] = maximum(chains[chain], scores[i], scores[i + 1])
    return maximum(maximum(*chains[:3]), chains[3])


def cap_row(scores: cute.Tensor, factor: Float32) -> None:
    """Replaces raw scores by tanh(score * factor), two elements an instruction where possible.

    The approximation is that of :func:`..softmax.tanh`.
    """
    for i in range(0, cute.size(scores), 2):
        scaled = scale2((scores[i], scores[i + 1]), factor)
        limit = Float32(TANH_LIMIT)
        x = tuple(cute.arch.fmin(element, limit, abs=True, nan=True) for element in scaled)
        square = multiply2(x, x)
        numerator = multiply2(x, polynomial2(TANH_P, square))
        denominator = polynomial2(TANH_Q, square)
        inverse = tuple(cute.arch.rcp_approx(element) for element in denominator)
        scores[i], scores[i + 1] = multiply2(numerator, inverse)


def add_pairs(sums: list[Pair], values: cute.Tensor, first: int, count: int) -> list[Pair]:
    """Adds elements ``first + [0, count)`` to pairs of partial sums, two an instruction."""
    sums = list(sums)
    for i in range(first, first + count, 2):
        chain = i // 2 % len(sums)
        sums[chain] = add2(sums[chain], (values[i], values[i + 1]))
    return sums


@dataclasses.dataclass(frozen=True)
class RowMask:
    """What the query row of a thread sees.

    Attributes:
      begin, end: half-open range of columns, segments left aside.
      segment: the row's segment id (0 without segments).
    """

    visibility: Visibility
    begin: Int32
    end: Int32
    segment: Int32

    @classmethod
    def of(cls, visibility: Visibility, row: Int32) -> RowMask:
        begin, end, segment = Int32(0), visibility.num_columns, Int32(0)
        if visibility.kind.left:
            begin = row + visibility.shift_left
        if visibility.kind.right:
            end = cutlass.min(end, row + visibility.shift_right + 1)
        if visibility.segments is not None:
            segment = visibility.segments.row_id(row)
        return cls(visibility, begin, end, segment)

    def apply(self, scores: cute.Tensor, first: Int32) -> None:
        """Sets the hidden ones of the scores of columns ``first + [0, size)`` to -inf.

        All lanes of a warp take part: each loads every 32nd column's id, and they pass them round.
        """
        begin, end = self.begin - first, self.end - first
        segments = self.visibility.segments
        for i in range(cute.size(scores)):
            visible = i < end
            if self.visibility.kind.left:
                visible = cutlass.and_(visible, i >= begin)
            if segments is not None:
                if i % 32 == 0:
                    of_lane = segments.column_id(first + cute.arch.lane_idx(), i)
                segment = cute.arch.shuffle_sync(of_lane, i % 32)
                visible = cutlass.and_(visible, segment == self.segment)
            scores[i] = Float32(cutlass.select_(visible, scores[i], -Float32.inf))


def is_large(exponent: Float32) -> Boolean:
    """Whether rounding this exponent could carry an exponential out of range."""
    return cute.math.absf(exponent) > FUSED_LIMIT


@cute.jit
def subtract_if(condition: Boolean, scores: cute.Tensor, number: Float32):
    if condition:
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = scores[i] - number


@dataclasses.dataclass(frozen=True)
class RowSoftmax:
    """Running reference maximum and sum of one row, in a thread's registers.

    The reference is a maximum that may lag behind the true one (``RESCALE_THRESHOLD``). Sums and
    outputs are kept relative to 2**shift, where ``shift`` is the reference's exponent as rounded to
    float32, so results depend neither on the lag nor on that rounding.

    Attributes:
      scale_log2: positive factor from scores (raw or capped) to base-2 exponents.
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
        new = multiply_rounded(finite(maximum), self.scale_log2)
        # Among large exponents the difference of two rounded ones may hide that of the maxima.
        exact = (self.reference[0] - finite(maximum)) * self.scale_log2
        change = Float32(cutlass.select_(is_large(new), exact, old - new))
        keep = change >= RESCALE_THRESHOLD
        moved = cute.math.exp2(change, fastmath=True)
        factor = Float32(cutlass.select_(keep, Float32(1.0), moved))
        new = cutlass.select_(nothing, -Float32.inf, new)
        self.reference[0] = Float32(cutlass.select_(keep, self.reference[0], maximum))
        self.shift[0] = Float32(cutlass.select_(keep, old, new))
        self.total[0] = self.total[0] * factor
        return factor

    def centre(self, scores: cute.Tensor) -> Float32:
        """What is to be subtracted from the exponents: the shift, or 0 where it is large.

        Then the reference has been subtracted from the scores.
        """
        shift = finite(self.shift[0])
        large = is_large(shift)
        subtract_if(large, scores, self.reference[0])
        return Float32(cutlass.select_(large, Float32(0.0), shift))

    def exponentials(
        self,
        scores: cute.Tensor,
        shift: Float32,
        first: int,
        count: int,
        emulated: frozenset[int],
    ) -> None:
        """Turns elements ``first + [0, count)`` into exponentials, in place.

        Args:
          scores, shift: the row's scores and what :meth:`centre` gave for them.
          first, count: even numbers.
          emulated: which pairs (2p, 2p + 1) of the row are left to the polynomial.
        """
        scale, shift = self.scale_log2, -shift
        for i in range(first, first + count, 2):
            x = fma2((scores[i], scores[i + 1]), (scale, scale), (shift, shift))
            exp2 = exp2_polynomial if i // 2 in emulated else exp2_hardware
            scores[i], scores[i + 1] = exp2(x)


def finish_row(shift: Float32, total: Float32, sink_log2: Float32) -> tuple[Float32, Float32]:
    """(factor of the output, natural log of the sum) of a row; (0, -inf) if it saw nothing.

    Args:
      sink_log2: logit of the sink times log2(e); -inf for none.
    """
    factor, shift, total = include_sink(shift, total, sink_log2)
    empty = total == 0.0
    inverse = factor * cute.arch.rcp_approx(total)
    lse = (shift + cute.math.log2(total, fastmath=True)) * LN_2
    return (
        Float32(cutlass.select_(empty, Float32(0.0), inverse)),
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
