"""Which keys a query sees, which tiles that makes necessary, and which of them need a mask.

Key j is visible to query i of the same batch element when all of

    i < query_length,  j < key_length,  i + shift_left <= j <= i + shift_right

hold, where the shifts fold ``query_offset`` and the window into one number each. The relation is
symmetric under exchange of queries and keys (:meth:`Visibility.transposed`), so one set of methods
serves a query tile that walks keys (forward) and a key tile that walks queries (backward).

Everything here is straight-line code on traced 32-bit integers or on register fragments.
"""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Float32, Int32, cute

# How an absent window side is passed; also the bound that keeps sums of positions in 32 bits.
UNLIMITED = 2**30


@dataclasses.dataclass(frozen=True)
class MaskKind:
    """What a kernel variant compiles in: lengths always, either side of the diagonal on demand.

    Attributes:
      name: as in ``select mask`` of the manifest.
      left: keys before ``i + shift_left`` are hidden.
      right: keys after ``i + shift_right`` are hidden.
    """

    name: str
    left: bool
    right: bool

    def transposed(self) -> MaskKind:
        """The kind as a key sees its queries."""
        return MaskKind(self.name, left=self.right, right=self.left)


FULL = MaskKind("full", left=False, right=False)
CAUSAL = MaskKind("causal", left=False, right=True)
WINDOW = MaskKind("window", left=True, right=True)


@cute.jit
def load_or(pointer: cute.Pointer, index: Int32, default: Int32) -> Int32:
    """``pointer[index]``, or ``default`` where the pointer is null (an absent operand)."""
    value = default
    if pointer.toint() != 0:
        value = cute.make_tensor(pointer, cute.make_layout(1 << 30))[index]
    return value


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The mask of one batch element; all numbers are traced Int32.

    Rows are queries and columns keys (or the reverse, after :meth:`transposed`).
    """

    kind: MaskKind
    num_rows: Int32
    num_columns: Int32
    shift_left: Int32
    shift_right: Int32

    @classmethod
    def of_batch(
        cls,
        kind: MaskKind,
        batch: Int32,
        num_queries: Int32,
        num_keys: Int32,
        query_seq_lengths: cute.Pointer,
        key_value_seq_lengths: cute.Pointer,
        query_offset: cute.Pointer,
        window_left: Int32,
        window_right: Int32,
    ) -> Visibility:
        """Reads the (nullable, int32 ``[B]``) per-batch operands."""
        query_length = load_or(query_seq_lengths, batch, num_queries)
        key_length = load_or(key_value_seq_lengths, batch, num_keys)
        shift_left, shift_right = Int32(0), Int32(0)
        if kind.left or kind.right:
            # Window sides are >= 0 and at most UNLIMITED, offsets lie within +-UNLIMITED. The
            # offset's upper end gives way by one so that offset + window stays below 2**31.
            offset = cutlass.min(load_or(query_offset, batch, Int32(0)), Int32(UNLIMITED - 1))
        if kind.left:
            reach = cutlass.max(offset - window_left, Int32(-UNLIMITED))
            shift_left = cutlass.select_(window_left >= UNLIMITED, Int32(-UNLIMITED), reach)
        if kind.right and not kind.left:  # causal: window_right is 0
            shift_right = offset
        elif kind.right:
            reach = cutlass.min(offset + window_right, Int32(UNLIMITED))
            shift_right = cutlass.select_(window_right >= UNLIMITED, Int32(UNLIMITED), reach)
        return cls(
            kind,
            cutlass.min(num_queries, cutlass.max(query_length, Int32(0))),
            cutlass.min(num_keys, cutlass.max(key_length, Int32(0))),
            Int32(shift_left),
            Int32(shift_right),
        )

    def transposed(self) -> Visibility:
        """The same relation with keys as rows and queries as columns."""
        return Visibility(
            self.kind.transposed(),
            self.num_columns,
            self.num_rows,
            -self.shift_right,
            -self.shift_left,
        )

    def columns(self, first_row: Int32, rows: int | Int32) -> tuple[Int32, Int32]:
        """Half-open range of columns that some row of ``first_row + [0, rows)`` sees.

        Rows past ``num_rows`` do not count. An empty range has ``end <= begin``.
        """
        last_row = cutlass.min(first_row + rows, self.num_rows) - 1
        begin, end = Int32(0), self.num_columns
        if self.kind.left:
            begin = cutlass.max(begin, first_row + self.shift_left)
        if self.kind.right:
            end = cutlass.min(end, last_row + self.shift_right + 1)
        # A tile that starts past the last row sees nothing.
        return begin, cutlass.select_(first_row < self.num_rows, end, Int32(0))

    def all_columns(self) -> tuple[Int32, Int32]:
        """Half-open range of columns that any row at all sees: what lies outside may hold NaN."""
        return self.columns(Int32(0), self.num_rows)

    def tiles(self, first_row: Int32, rows: int, tile: int) -> tuple[Int32, Int32]:
        """Half-open range of ``tile``-column tiles that rows ``first_row + [0, rows)`` need.

        An empty range is returned as (0, 0).
        """
        begin, end = self.columns(first_row, rows)
        some = begin < end
        return (
            cutlass.select_(some, begin // tile, Int32(0)),
            cutlass.select_(some, (end + (tile - 1)) // tile, Int32(0)),
        )

    def unmasked_tiles(self, first_row: Int32, rows: int, tile: int) -> tuple[Int32, Int32]:
        """Half-open range of the tiles of :meth:`tiles` that all those rows see entirely.

        Rows past ``num_rows`` are ignored (their results are discarded). The range lies within
        that of :meth:`tiles`; an empty one has ``begin == end``.
        """
        needed_begin, needed_end = self.tiles(first_row, rows, tile)
        begin, end = needed_begin, self.num_columns // tile
        if self.kind.right:
            visible = cutlass.max(first_row + self.shift_right + 1, Int32(0))
            end = cutlass.min(end, visible // tile)
        if self.kind.left:
            last_row = cutlass.min(first_row + rows, self.num_rows) - 1
            hidden = cutlass.max(last_row + self.shift_left, Int32(0))
            begin = cutlass.max(begin, (hidden + (tile - 1)) // tile)
        begin = cutlass.min(begin, needed_end)
        end = cutlass.min(end, needed_end)
        return begin, cutlass.max(begin, end)

    def mask_fragment(
        self, fragment: cute.Tensor, row: Int32, column: Int32, fill: float = -float("inf")
    ) -> None:
        """Sets the hidden elements of a 64 x N wgmma accumulator to ``fill``.

        Args:
          fragment: flat float32 register tensor of N/2 elements in accumulator order.
          row: global row of this thread's element 0 (the thread also holds ``row + 8``).
          column: global column of this thread's element 0.
        """
        for half in range(2):
            this_row = row + 8 * half
            end = self.num_columns
            if self.kind.right:
                end = cutlass.min(end, this_row + self.shift_right + 1)
            end = end - column
            begin = this_row + self.shift_left - column
            for i in range(cute.size(fragment)):
                if (i // 2) % 2 == half:
                    offset = 8 * (i // 4) + i % 2
                    visible = offset < end
                    if self.kind.left:
                        visible = cutlass.and_(visible, offset >= begin)
                    fragment[i] = Float32(cutlass.select_(visible, fragment[i], Float32(fill)))


def fragment_origin(thread: Int32) -> tuple[Int32, Int32]:
    """Row and column, in a warpgroup's 64 x N accumulator, of element 0 of ``thread`` (0-127).

    Element i of the thread lies ``8 * ((i // 2) % 2)`` rows and ``8 * (i // 4) + i % 2`` columns
    further on (PTX ISA, wgmma register fragments of D).
    """
    lane = thread % 32
    return 16 * (thread // 32) + lane // 4, 2 * (lane % 4)
