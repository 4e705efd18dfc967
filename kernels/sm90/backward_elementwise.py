"""The two memory-bound kernels around the Hopper backward: row statistics before, dQ after.

Preprocess, one CTA per 64 query rows of a head, ``head_dim / 8`` neighbouring lanes a row:

    delta     = rowsum(out * dout) - dlse      float32 [B, N, Tp]
    lse_log2  = lse * log2(e)                  float32 [B, N, Tp]
    dq_accumulator = 0                         float32 [B, N, Tp, Hp]

Rows that see no key or lie past the query length get lse_log2 = +inf and delta = 0: then
P = exp2(S - inf) = 0 and dS = 0 (dP - 0) = 0 without a mask in the main kernel. Their values are
selected, not computed, because padding may hold NaN.

Postprocess, one CTA per 64 query rows of a head:

    dq = scale * dq_accumulator                16 bit  [B, T, N, H]

It undoes the accumulator's order (``backward.py``): 64 rows x 64 columns are one warpgroup
accumulator, [8-column group j][warp][row r < 8][pair c][half][2], holding row
16 warp + r + 8 half, column 8 j + 2 c + (0, 1). So 16 neighbouring floats are 8 columns of two
rows, which one thread turns into two 16-byte stores.

Both move every byte once: at H = 128 and 16 bits, 256 bytes read and 512 + 8 written per row in
the first, 512 read and 256 written in the second.
"""

from __future__ import annotations

import math

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .. import abi
from ..masks import load_or

ROWS = 64
THREADS = 256
LOG2_E = math.log2(math.e)
DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}


def vector(pointer: cute.Pointer, offset, size: int) -> cute.Tensor:
    """``size`` consecutive elements at ``pointer + offset``, known to be 16-byte aligned."""
    address = (pointer + offset).toint()
    aligned = cute.make_ptr(pointer.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(size))


def scalar(pointer: cute.Pointer, offset) -> cute.Tensor:
    return cute.make_tensor(pointer + offset, cute.make_layout(1))


def place(num_rows: Int32, num_heads: Int32) -> tuple[Int32, Int32, Int32]:
    """(batch, head, first row) of this CTA; neighbouring CTAs take neighbouring heads, whose rows
    are neighbours in memory."""
    block, _, _ = cute.arch.block_idx()
    tiles = cute.ceil_div(num_rows, ROWS)
    return (
        block // num_heads // tiles,
        block % num_heads,
        block // num_heads % tiles * ROWS,
    )


class Preprocess:
    """Row statistics and zeroing of the accumulator.

    Args:
      dtype: "bf16" or "f16".
      head_dim: 64 or 128, at least Hv.
    """

    def __init__(self, dtype: str, head_dim: int):
        self.dtype = dtype
        self.head_dim = head_dim
        self.lanes = head_dim // 8  # per row, 16 bytes each

    def declaration(self) -> abi.KernelSpec:
        return abi.KernelSpec(
            name=f"sm90_backward_preprocess_{self.dtype}_h{self.head_dim}",
            architecture="sm_90a",
            operation="backward_preprocess",
            select={"dtype": self.dtype, "head_dim": self.head_dim},
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
        batch, head, first_row = place(padded_queries, num_heads)
        thread, _, _ = cute.arch.thread_idx()
        length = cutlass.min(load_or(query_seq_lengths, batch, num_queries), num_queries)
        padded_row = (Int64(batch) * num_heads + head) * padded_queries + first_row

        zero = cute.make_rmem_tensor(4, Float32)
        zero.fill(0.0)
        for i in cutlass.range(thread, ROWS // 4 * padded_head_dim, THREADS, unroll=4):
            at = padded_row * padded_head_dim + i * 4
            cute.autovec_copy(zero, vector(dq_accumulator, at, 4))

        lane, column = thread % self.lanes, thread % self.lanes * 8
        for step in cutlass.range_constexpr(ROWS * self.lanes // THREADS):
            local = step * (THREADS // self.lanes) + thread // self.lanes
            row = first_row + local
            token = (Int64(batch) * num_queries + row) * num_heads + head
            total = Float32(0.0)
            if row < length and column < value_dim:
                x = vector(out, token * value_dim + column, 8).load().to(Float32)
                y = vector(dout, token * value_dim + column, 8).load().to(Float32)
                for i in cutlass.range_constexpr(8):
                    total += x[i] * y[i]
            total = cute.arch.warp_reduction(total, lambda a, b: a + b, threads_in_group=self.lanes)
            if lane == 0:
                log2_value, delta_value = Float32(math.inf), Float32(0.0)
                if row < length:
                    value = scalar(lse, token)[0]
                    if value != Float32(-math.inf):
                        log2_value = value * LOG2_E
                        delta_value = total
                        if dlse.toint() != 0:
                            delta_value = total - scalar(dlse, token)[0]
                scalar(lse_log2, padded_row + local)[0] = log2_value
                scalar(delta, padded_row + local)[0] = delta_value


class Postprocess:
    """dq from its accumulator.

    Args:
      dtype: "bf16" or "f16".
    """

    def __init__(self, dtype: str):
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]

    def declaration(self) -> abi.KernelSpec:
        return abi.KernelSpec(
            name=f"sm90_backward_postprocess_{self.dtype_name}",
            architecture="sm_90a",
            operation="backward_postprocess",
            select={"dtype": self.dtype_name},
            threads=THREADS,
            grid=(f"T/{ROWS}", "N", "B"),
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
        batch, head, first_row = place(num_queries, num_heads)
        thread, _, _ = cute.arch.thread_idx()
        length = load_or(query_seq_lengths, batch, num_queries)
        factor = scalar(scale, batch)[0]
        padded_row = (Int64(batch) * num_heads + head) * padded_queries + first_row
        groups = padded_head_dim // 8
        for i in cutlass.range(thread, ROWS // 2 * groups, THREADS, unroll=2):
            group, pair = i % groups, i // groups  # 8 columns; rows 16 (pair / 8) + pair % 8 + 0, 8
            at = padded_row * padded_head_dim + group * (8 * ROWS) + pair * 16
            values = cute.make_rmem_tensor(16, Float32)
            cute.autovec_copy(vector(dq_accumulator, at, 16), values)
            for half in cutlass.range_constexpr(2):
                row = first_row + pair // 8 * 16 + pair % 8 + 8 * half
                result = cute.make_rmem_tensor(8, self.dtype)
                for x in cutlass.range_constexpr(8):
                    value = values[x // 2 * 4 + half * 2 + x % 2] * factor
                    value = Float32(cutlass.select_(row < length, value, Float32(0.0)))
                    result[x] = value.to(self.dtype)
                if row < num_queries and group * 8 < head_dim:
                    token = (Int64(batch) * num_queries + row) * num_heads + head
                    cute.autovec_copy(result, vector(dq, token * head_dim + group * 8, 8))


def variants() -> list[Preprocess | Postprocess]:
    return [
        *(Preprocess(dtype, head_dim) for dtype in DTYPES for head_dim in (64, 128)),
        *(Postprocess(dtype) for dtype in DTYPES),
    ]
