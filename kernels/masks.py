"""Which keys a query sees, which tiles that makes necessary, and which of them need a mask.

Key j is visible to query i of the same batch element when all of

    i < query_length,  j < key_length,  i + shift_left <= j <= i + shift_right,
    query_segment_ids[i] == key_value_segment_ids[j]

hold, where the shifts fold ``query_offset`` and the window into one number each. The relation is
symmetric under exchange of queries and keys (:meth:`Visibility.transposed`), so one set of methods
serves a query tile that walks keys (forward) and a key tile that walks queries (backward).

Which tiles segments make necessary cannot be computed from a few numbers as for the other
conditions: ``segment_bounds`` says it, per block of ``abi.SEGMENT_ROWS`` rows. Elements of a tile
that it does not call clear are compared id by id.

Everything here is straight-line code on traced 32-bit integers or on register fragments.
"""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from .abi import SEGMENT_ROWS

# How an absent window side is passed; also the bound that keeps sums of positions in 32 bits.
UNLIMITED = 2**30


@dataclasses.dataclass(frozen=True)
class MaskKind:
    """What a kernel variant compiles in: lengths always, either side of the diagonal on demand.

    Attributes:
      name: as in ``select mask`` of the manifest.
      left: keys before ``i + shift_left`` are hidden.
      right: keys after ``i + shift_right`` are hidden.
      segments: keys of other segments are hidden.
    """

    name: str
    left: bool
    right: bool
    segments: bool = False

    def transposed(self) -> MaskKind:
        """The kind as a key sees its queries."""
        return dataclasses.replace(self, left=self.right, right=self.left)


FULL = MaskKind("full", left=False, right=False)
CAUSAL = MaskKind("causal", left=False, right=True)
WINDOW = MaskKind("window", left=True, right=True)
SEGMENTS = MaskKind("segments", left=True, right=True, segments=True)
KINDS = (FULL, CAUSAL, WINDOW, SEGMENTS)


def load(pointer: cute.Pointer, index: Int32):
    """``pointer[index]`` of global memory."""
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))[index]


@cute.jit
def load_or(pointer: cute.Pointer, index: Int32, default: Int32 | Float32) -> Int32 | Float32:
    """``pointer[index]``, or ``default`` where the pointer is null (an absent operand)."""
    value = default
    if pointer.toint() != 0:
        value = load(pointer, index)
    return value


def load_within(pointer: cute.Pointer, index: Int32, offset: int, count: Int32) -> Int32:
    """``pointer[index + offset]``, or 0 where that is ``count`` or more.

    One predicated load with an immediate offset: loads at many offsets from one index need no
    address each, in places where registers are short.
    """
    return prims.inline_ptx(
        "{ .reg .pred inside; mov.b32 {$w0}, 0;"
        f" setp.gt.s32 inside, {{$r1}}, {offset};"
        f" @inside ld.global.nc.s32 {{$w0}}, [{{$r0}}+{4 * offset}]; }}",
        write_only_types=[Int32],
        read_only_args=[pointer + index, count - index],
    )


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be computed: the traced arguments of ``abi.PROBLEM``, in its order.

    Pointers are to global memory, of whole operands; those of absent ones are null.
    """

    scale: cute.Pointer
    query_seq_lengths: cute.Pointer
    key_value_seq_lengths: cute.Pointer
    query_offset: cute.Pointer
    query_segment_ids: cute.Pointer
    key_value_segment_ids: cute.Pointer
    segment_bounds: cute.Pointer
    batch_size: Int32
    num_queries: Int32
    num_keys: Int32
    num_heads: Int32
    num_kv_heads: Int32
    window_left: Int32
    window_right: Int32
    logits_soft_cap: Float32

    def is_causal(self, kind: MaskKind) -> bool | Boolean:
        """Whether rows see more keys the later they are; traced if the kind leaves it open."""
        if kind.left:  # causal calls with segments or a soft cap have such a kind
            return (self.window_left >= UNLIMITED) & (self.window_right < UNLIMITED)
        return kind.right


@dataclasses.dataclass(frozen=True)
class Segments:
    """Segment ids of one batch element, and the bounds of the blocks of rows of the operation.

    Attributes:
      row_ids, column_ids: the batch element's ids.
      num_rows, num_columns: how many there are, whatever the sequence lengths.
      bounds: the whole operand; its blocks are of rows, so it serves one orientation only.
    """

    batch: Int32
    row_ids: cute.Pointer
    column_ids: cute.Pointer
    num_rows: Int32
    num_columns: Int32
    bounds: cute.Pointer

    def transposed(self) -> Segments:
        """Rows and columns exchanged. The bounds stay: they are those of the new rows."""
        return Segments(
            self.batch, self.column_ids, self.row_ids, self.num_columns, self.num_rows, self.bounds
        )

    def row_id(self, row: Int32, offset: int = 0) -> Int32:
        """Id of row ``row + offset``; 0 past the last row."""
        return load_within(self.row_ids, row, offset, self.num_rows)

    def column_id(self, column: Int32, offset: int = 0) -> Int32:
        """Id of column ``column + offset``; 0 past the last column."""
        return load_within(self.column_ids, column, offset, self.num_columns)

    def ranges(self, first_row: Int32, rows: int, end_row: Int32) -> tuple[Int32, ...]:
        """(begin, end, clear_begin, clear_end) of the rows ``first_row + [0, rows)``.

        No column outside [begin, end) shares a segment with any of the rows, all columns in
        [clear_begin, clear_end) do with all of them. Blocks from ``end_row`` on do not count. Empty
        ranges have ``end <= begin``.

        Args:
          first_row: a multiple of ``SEGMENT_ROWS``, like ``rows``.
        """
        num_blocks = (self.num_rows + (SEGMENT_ROWS - 1)) // SEGMENT_ROWS
        bounds = self.bounds + Int64(self.batch) * num_blocks * 4
        begin, end = self.num_columns, Int32(0)
        clear_begin, clear_end = Int32(0), self.num_columns
        for block in range(rows // SEGMENT_ROWS):
            row = first_row + block * SEGMENT_ROWS
            index = cutlass.min(row // SEGMENT_ROWS, num_blocks - 1)
            block_begin, block_end, block_clear_begin, block_clear_end = (
                load(bounds, 4 * index + i) for i in range(4)
            )
            counts = row < end_row
            # The range of a block without any must not stretch that of the others.
            some = cutlass.and_(counts, block_begin < block_end)
            begin = cutlass.select_(some, cutlass.min(begin, block_begin), begin)
            end = cutlass.select_(some, cutlass.max(end, block_end), end)
            inner_begin = cutlass.max(clear_begin, block_clear_begin)
            inner_end = cutlass.min(clear_end, block_clear_end)
            clear_begin = cutlass.select_(counts, inner_begin, clear_begin)
            clear_end = cutlass.select_(counts, inner_end, clear_end)
        return begin, end, clear_begin, clear_end


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The mask of one batch element; all numbers are traced Int32.

    Rows are queries and columns keys (or the reverse, after :meth:`transposed`).

    Attributes:
      num_rows, num_columns: those within the sequence lengths.
      shift_left, shift_right: as in the module's docstring.
      segments: None unless the kind has them.
    """

    kind: MaskKind
    num_rows: Int32
    num_columns: Int32
    shift_left: Int32
    shift_right: Int32
    segments: Segments | None

    @classmethod
    def of_batch(cls, kind: MaskKind, batch: Int32, problem: Problem) -> Visibility:
        """Reads the per-batch operands."""
        num_queries, num_keys = problem.num_queries, problem.num_keys
        window_left, window_right = problem.window_left, problem.window_right
        query_length = load_or(problem.query_seq_lengths, batch, num_queries)
        key_length = load_or(problem.key_value_seq_lengths, batch, num_keys)
        shift_left, shift_right = Int32(0), Int32(0)
        if kind.left or kind.right:
            # Window sides are >= 0 and at most UNLIMITED, offsets lie within +-UNLIMITED. The
            # offset's upper end gives way by one so that offset + window stays below 2**31.
            offset = load_or(problem.query_offset, batch, Int32(0))
            offset = cutlass.min(offset, Int32(UNLIMITED - 1))
        if kind.left:
            reach = cutlass.max(offset - window_left, Int32(-UNLIMITED))
            shift_left = cutlass.select_(window_left >= UNLIMITED, Int32(-UNLIMITED), reach)
        if kind.right and not kind.left:  # causal: window_right is 0
            shift_right = offset
        elif kind.right:
            reach = cutlass.min(offset + window_right, Int32(UNLIMITED))
            shift_right = cutlass.select_(window_right >= UNLIMITED, Int32(UNLIMITED), reach)
        segments = None
        if kind.segments:
            segments = Segments(
                batch,
                problem.query_segment_ids + Int64(batch) * num_queries,
                problem.key_value_segment_ids + Int64(batch) * num_keys,
                num_queries,
                num_keys,
                problem.segment_bounds,
            )
        return cls(
            kind,
            cutlass.min(num_queries, cutlass.max(query_length, Int32(0))),
            cutlass.min(num_keys, cutlass.max(key_length, Int32(0))),
            Int32(shift_left),
            Int32(shift_right),
            segments,
        )

    def transposed(self) -> Visibility:
        """The same relation with keys as rows and queries as columns."""
        return Visibility(
            self.kind.transposed(),
            self.num_columns,
            self.num_rows,
            -self.shift_right,
            -self.shift_left,
            None if self.segments is None else self.segments.transposed(),
        )

    def columns(self, first_row: Int32, rows: int | Int32) -> tuple[Int32, Int32]:
        """Half-open range of columns that some row of ``first_row + [0, rows)`` sees.

        Segments are left aside. Rows past ``num_rows`` do not count. An empty range has
        ``end <= begin``.
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
        """Half-open range of columns that any row at all sees: what lies outside may hold NaN.

        (Segments are left aside: columns of a segment without rows arrive as zeros.)
        """
        return self.columns(Int32(0), self.num_rows)

    def tiles(self, first_row: Int32, rows: int, tile: int) -> tuple[Int32, Int32]:
        """Half-open range of ``tile``-column tiles that rows ``first_row + [0, rows)`` need.

        An empty range is returned as (0, 0). With segments, ``first_row`` and ``rows`` are
        multiples of ``SEGMENT_ROWS``.
        """
        begin, end = self.columns(first_row, rows)
        if self.segments is not None:
            shared_begin, shared_end, _, _ = self.segments.ranges(first_row, rows, self.num_rows)
            begin, end = cutlass.max(begin, shared_begin), cutlass.min(end, shared_end)
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
        if self.segments is not None:
            _, _, clear_begin, clear_end = self.segments.ranges(first_row, rows, self.num_rows)
            begin = cutlass.max(begin, (clear_begin + (tile - 1)) // tile)
            end = cutlass.min(end, clear_end // tile)
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
        row_ids, begins, ends = [], [], []
        for half in range(2):
            this_row = row + 8 * half
            end = self.num_columns
            if self.kind.right:
                end = cutlass.min(end, this_row + self.shift_right + 1)
            ends.append(end - column)
            begins.append(this_row + self.shift_left - column)
            if self.segments is not None:
                row_ids.append(self.segments.row_id(row, 8 * half))
        for offset in (8 * n + m for n in range(cute.size(fragment) // 4) for m in range(2)):
            if self.segments is not None:
                column_id = self.segments.column_id(column, offset)
            for half in range(2):
                i = 4 * (offset // 8) + 2 * half + offset % 8
                visible = offset < ends[half]
                if self.kind.left:
                    visible = cutlass.and_(visible, offset >= begins[half])
                if self.segments is not None:
                    visible = cutlass.and_(visible, column_id == row_ids[half])
                fragment[i] = Float32(cutlass.select_(visible, fragment[i], Float32(fill)))


def fragment_origin(thread: Int32) -> tuple[Int32, Int32]:
    """Row and column, in a warpgroup's 64 x N accumulator, of element 0 of ``thread`` (0-127).

    Element i of the thread lies ``8 * ((i // 2) % 2)`` rows and ``8 * (i // 4) + i % 2`` columns
    further on (PTX ISA, wgmma register fragments of D).
    """
    lane = thread % 32
    return 16 * (thread // 32) + lane // 4, 2 * (lane % 4)
