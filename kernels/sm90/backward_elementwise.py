"""The two memory-bound kernels around the Hopper backward: row statistics before, dQ after.

Preprocess, one CTA per 64 query rows of a head, ``head_dim / 8`` neighbouring lanes a row:

    delta     = rowsum(out * dout) - dlse      float32 [B, N, Tp]
    lse_log2  = lse * log2(e)                  float32 [B, N, Tp]
    dq_accumulator = 0                         float32 [B, N, Tp, Hp]

Rows that see no key or lie past the query length get lse_log2 = +inf and delta = 0: then
P = exp2(S - inf) = 0 and dS = 0 (dP - 0) = 0 without a mask in the main kernel. Their values are
selected, not computed, because padding may hold NaN.

Postprocess, one CTA per 64 query rows (one tile of 80) of a head:

    dq = scale * dq_accumulator                16 bit  [B, T, N, H]

It undoes the accumulator's order (``backward.py``): 64 rows x 64 columns are one warpgroup
accumulator, [8-column group j][warp][row r < 8][pair c][half][2], holding row
16 warp + r + 8 half, column 8 j + 2 c + (0, 1). So 16 neighbouring floats are 8 columns of two
rows, which one thread turns into two 16-byte stores. Tiles of 80 queries hold dQ^T instead; a
warp transposes 8 queries of it through shared memory (stmatrix).

Both move every byte once: at H = 128 and 16 bits, 256 bytes read and 512 + 8 written per row in
the first, 512 read and 256 written in the second.
"""

from __future__ import annotations

import math

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from .. import abi
from ..masks import load_or
from .backward import AccumulatorLayout

ROWS = 64
THREADS = 256
LOG2_E = math.log2(math.e)

# Of a larger lse (logits from 3 million) float32 leaves so little that P = exp2(S - lse) could
# exceed 1 by any factor. It is rounded up by more than its error there: P stays below 1, finite.
LARGE = 2.0**22
LARGE_ROUNDING = 2.0**-22
DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}


def vector(pointer: cute.Pointer, offset, size: int) -> cute.Tensor:
    """``size`` consecutive elements at ``pointer + offset``, known to be 16-byte aligned."""
    address = (pointer + offset).toint()
    aligned = cute.make_ptr(pointer.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(size))


def scalar(pointer: cute.Pointer, offset) -> cute.Tensor:
    return cute.make_tensor(pointer + offset, cute.make_layout(1))


def place(num_rows: Int32, num_heads: Int32, rows: int) -> tuple[Int32, Int32, Int32]:
    """(batch, head, first row) of this CTA; neighbouring CTAs take neighbouring heads, whose rows
    are neighbours in memory."""
    block, _, _ = cute.arch.block_idx()
    tiles = cute.ceil_div(num_rows, rows)
    return (
        block // num_heads // tiles,
        block % num_heads,
        block // num_heads % tiles * rows,
    )


class Preprocess:
    """Row statistics and zeroing of the accumulator.

    Args:
      dtype: "bf16" or "f16".
      head_dim: 64 or 128, at least Hv.
    """

    def __init__(self, dtype: str, head_dim: int):
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]
        self.head_dim = head_dim
        self.lanes = head_dim // 8  # per row, 16 bytes each

    def declaration(self) -> abi.KernelSpec:
        return abi.KernelSpec(
            name=f"sm90_backward_preprocess_{self.dtype_name}_h{self.head_dim}",
            architecture="sm_90a",
            operation="backward_preprocess",
            select={"dtype": self.dtype_name, "head_dim": self.head_dim},
            threads=THREADS,
            grid=(f"Tp/{ROWS}", "N", "B"),
            params=(
                *(abi.Pointer(name) for name in ("out", "dout", "lse", "dlse")),
                *(abi.Pointer(name) for name in ("dq_accumulator", "lse_log2", "delta")),
                abi.Pointer("query_seq_lengths"),
                *(abi.S32(name) for name in ("T", "N", "Hv", "Tp", "Hp")),
            ),
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Pointer,
        dout: cute.Pointer,
        lse: cute.Pointer,
        dlse: cute.Pointer,
        dq_accumulator: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        query_seq_lengths: cute.Pointer,
        num_queries: Int32,
        num_heads: Int32,
        value_dim: Int32,
        padded_queries: Int32,
        padded_head_dim: Int32,
    ):
        batch, head, first_row = place(padded_queries, num_heads, ROWS)
        thread, _, _ = cute.arch.thread_idx()
        length = cutlass.min(load_or(query_seq_lengths, batch, num_queries), num_queries)
        padded_row = (Int64(batch) * num_heads + head) * padded_queries + first_row

        lane, column = thread % self.lanes, thread % self.lanes * 8
        rows_at_once = THREADS // self.lanes
        steps = ROWS // rows_at_once
        # All loads first: memory latency is paid once.
        shape = cute.make_layout((8, steps))
        outs = cute.make_rmem_tensor(shape, self.dtype)
        douts = cute.make_rmem_tensor(shape, self.dtype)
        lses, dlses = cute.make_rmem_tensor(steps, Float32), cute.make_rmem_tensor(steps, Float32)
        for step in cutlass.range_constexpr(steps):
            row = first_row + step * rows_at_once + thread // self.lanes
            token = (Int64(batch) * num_queries + row) * num_heads + head
            outs[None, step].fill(0.0)
            douts[None, step].fill(0.0)
            lses[step], dlses[step] = Float32(-math.inf), Float32(0.0)
            if row < length:
                lses[step] = scalar(lse, token)[0]
                if dlse.toint() != 0:
                    dlses[step] = scalar(dlse, token)[0]
                if column < value_dim:
                    at = token * value_dim + column
                    cute.autovec_copy(vector(out, at, 8), outs[None, step])
                    cute.autovec_copy(vector(dout, at, 8), douts[None, step])

        zero = cute.make_rmem_tensor(4, Float32)
        zero.fill(0.0)
        for i in cutlass.range(thread, ROWS // 4 * padded_head_dim, THREADS, unroll=4):
            at = padded_row * padded_head_dim + i * 4
            cute.autovec_copy(zero, vector(dq_accumulator, at, 4))

        for step in cutlass.range_constexpr(steps):
            total = Float32(0.0)
            for x in cutlass.range_constexpr(8):
                total += outs[x, step].to(Float32) * douts[x, step].to(Float32)
            total = cute.arch.warp_reduction(total, lambda a, b: a + b, threads_in_group=self.lanes)
            if lane == 0:
                at = padded_row + step * rows_at_once + thread // self.lanes
                hidden = lses[step] == Float32(-math.inf)
                log2 = lses[step] * LOG2_E
                size = cute.math.absf(log2)
                log2 = cutlass.select_(size > LARGE, log2 + size * LARGE_ROUNDING, log2)
                scalar(lse_log2, at)[0] = Float32(cutlass.select_(hidden, Float32(math.inf), log2))
                scalar(delta, at)[0] = Float32(
                    cutlass.select_(hidden, Float32(0.0), total - dlses[step])
                )


class Postprocess:
    """dq from its accumulator.

    Args:
      dtype: "bf16" or "f16".
      head_dim: 64 or 128, as in the main kernel.
      mask: "full", whose tiles at head_dim 128 differ, or None for every other mask.
    """

    def __init__(self, dtype: str, head_dim: int, mask: str | None):
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]
        self.head_dim, self.mask = head_dim, mask
        self.layout = AccumulatorLayout.of(head_dim, mask)
        # Tiles of dQ^T: one warp for every 8 queries.
        self.rows = self.layout.tile if self.layout.transposed else ROWS
        self.threads = self.rows * 4 if self.layout.transposed else THREADS

    def declaration(self) -> abi.KernelSpec:
        select = {"dtype": self.dtype_name, "head_dim": self.head_dim}
        name = f"sm90_backward_postprocess_{self.dtype_name}_h{self.head_dim}"
        if self.mask is not None:
            select["mask"] = self.mask
            name += f"_{self.mask}"
        return abi.KernelSpec(
            name=name,
            architecture="sm_90a",
            operation="backward_postprocess",
            select=select,
            threads=self.threads,
            grid=(f"T/{self.rows}", "N", "B"),
            params=(
                *(abi.Pointer(name) for name in ("dq_accumulator", "dq", "scale")),
                abi.Pointer("query_seq_lengths"),
                *(abi.S32(name) for name in ("T", "N", "H", "Tp", "Hp")),
            ),
        )

    @cute.kernel
    def kernel(
        self,
        dq_accumulator: cute.Pointer,
        dq: cute.Pointer,
        scale: cute.Pointer,
        query_seq_lengths: cute.Pointer,
        num_queries: Int32,
        num_heads: Int32,
        head_dim: Int32,
        padded_queries: Int32,
        padded_head_dim: Int32,
    ):
        batch, head, first_row = place(num_queries, num_heads, self.rows)
        length = load_or(query_seq_lengths, batch, num_queries)
        factor = scalar(scale, batch)[0]
        padded_row = (Int64(batch) * num_heads + head) * padded_queries + first_row
        tile = dq_accumulator + padded_row * padded_head_dim
        first_token = (Int64(batch) * num_queries + first_row) * num_heads + head
        target = dq + first_token * head_dim
        pitch = num_heads * head_dim
        rows, live = num_queries - first_row, length - first_row
        if cutlass.const_expr(self.layout.transposed):
            height = cutlass.min(Int32(self.rows), padded_queries - first_row)
            self.columns(tile, target, pitch, factor, rows, live, head_dim, height)
        else:
            self.pairs(tile, target, pitch, factor, rows, live, head_dim, padded_head_dim)

    @cute.jit
    def pairs(
        self, tile, target, pitch, factor, rows: Int32, live: Int32, head_dim, padded_head_dim
    ):
        """Blocks of 64 queries x 64 columns; a thread takes 8 columns of two rows."""
        thread, _, _ = cute.arch.thread_idx()
        groups = padded_head_dim // 8
        items = ROWS // 2 * groups
        steps = ROWS // 2 * (self.head_dim // 8) // THREADS
        values = cute.make_rmem_tensor(cute.make_layout((16, steps)), Float32)
        for step in cutlass.range_constexpr(steps):
            item = thread + step * THREADS
            if item < items:
                at = item % groups * (8 * ROWS) + item // groups * 16
                cute.autovec_copy(vector(tile, at, 16), values[None, step])
        for step in cutlass.range_constexpr(steps):
            item = thread + step * THREADS
            column, pair = item % groups * 8, item // groups
            for half in cutlass.range_constexpr(2):
                row = pair // 8 * 16 + pair % 8 + 8 * half
                result = cute.make_rmem_tensor(8, self.dtype)
                for x in cutlass.range_constexpr(8):
                    value = values[x // 2 * 4 + half * 2 + x % 2, step] * factor
                    value = Float32(cutlass.select_(row < live, value, Float32(0.0)))
                    result[x] = value.to(self.dtype)
                if item < items and row < rows and column < head_dim:
                    cute.autovec_copy(result, vector(target, Int64(row) * pitch + column, 8))

    @cute.jit
    def columns(
        self, tile, target, pitch, factor, rows: Int32, live: Int32, head_dim, height: Int32
    ):
        """Blocks of 64 columns x ``height`` queries; a warp transposes 8 queries of each.

        A piece is 8 columns of a query, 16 bytes. In shared memory a query's 8 pieces are
        swizzled with the query's number, which keeps both stmatrix and the loads conflict-free.
        """
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        blocks = self.head_dim // 64
        smem = cutlass.memory.SmemAllocator()
        size = blocks * 8 * 64
        buffer = smem.allocate_array(self.dtype, self.rows // 8 * size, byte_alignment=128)
        buffer = buffer + warp * size
        values = cute.make_rmem_tensor(cute.make_layout((4, 4, blocks)), Float32)
        values.fill(0.0)
        for block in cutlass.range_constexpr(blocks):
            for quarter in cutlass.range_constexpr(4):
                if warp * 8 < height and block * 64 < head_dim:
                    at = block * 64 * height + warp * 512 + quarter * 128 + lane * 4
                    cute.autovec_copy(vector(tile, at, 4), values[None, quarter, block])
        rounded = cute.make_rmem_tensor(values.layout, self.dtype)
        for x in cutlass.range_constexpr(cute.size(values)):
            rounded[x] = (values[x] * factor).to(self.dtype)
        words = cute.recast_tensor(
            cute.make_tensor(rounded.iterator, cute.make_layout(cute.size(rounded))), Int32
        )
        for block in cutlass.range_constexpr(blocks):
            for half in cutlass.range_constexpr(2):  # of the 8 pieces: one 8x8 matrix each
                query, piece = lane % 8, half * 4 + lane // 8
                prims.stmatrix(
                    buffer + ((block * 8 + query) * 64 + (piece ^ query) * 8),
                    [words[block * 8 + half * 4 + x] for x in range(4)],
                    prims.MMALayout.COL,
                )
        cute.arch.sync_warp()
        for block in cutlass.range_constexpr(blocks):
            for half in cutlass.range_constexpr(2):  # of the 8 queries
                query, piece = half * 4 + lane // 8, lane % 8
                at = buffer + ((block * 8 + query) * 64 + (piece ^ query) * 8)
                at = cute.make_ptr(self.dtype, at.toint(), cute.AddressSpace.smem, assumed_align=16)
                result = cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(8)), result)
                row, column = warp * 8 + query, block * 64 + piece * 8
                if row >= live:
                    result.fill(0.0)
                if row < rows and column < head_dim:
                    cute.autovec_copy(result, vector(target, Int64(row) * pitch + column, 8))


def variants() -> list[Preprocess | Postprocess]:
    return [
        *(Preprocess(dtype, head_dim) for dtype in DTYPES for head_dim in (64, 128)),
        *(Postprocess(dtype, head_dim, None) for dtype in DTYPES for head_dim in (64, 128)),
        *(Postprocess(dtype, 128, "full") for dtype in DTYPES),
    ]
