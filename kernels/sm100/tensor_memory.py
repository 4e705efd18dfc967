"""Tensor memory and tcgen05 products: addresses, loads, stores and operand descriptors.

A tensor memory address is ``lane << 16 | column``; a warp reaches only the 32 lanes of its quarter
(warp index modulo 4). With shape 32x32b register i of lane l is column i of lane l (PTX ISA,
tcgen05 data movement), so a thread of a warpgroup owns one row of a 128-row accumulator.
"""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Float32, Int32
from cutlass.experimental import primitives as prims

COLUMNS = 512  # tensor memory of an SM: 128 lanes of 512 32-bit columns
QUARTER = 32 << 16  # address step from one warp's lanes to the next warp's
MMA_K = 16  # reduction dimension of one product of 16-bit operands
BOX_COLUMNS = 64  # of a TMA box: 128 bytes, the widest swizzle
ROW_BYTES = 2 * BOX_COLUMNS


def load(addresses: list[Int32], count: int) -> list[Float32]:
    """Loads ``count`` float32 columns of this thread's row from each address, and waits for them.

    One block of PTX, because the compiler may move uses of a loaded register above a wait that is
    an instruction of its own.
    """
    lines = []
    for i, _ in enumerate(addresses):
        registers = ", ".join(f"{{$w{i * count + j}}}" for j in range(count))
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{registers}}}, [{{$r{i}}}];")
    return _load(lines, addresses, count * len(addresses))


def load_with_maxima(addresses: list[Int32], count: int) -> tuple[list[Float32], list[Float32]]:
    """:func:`load`, and of each address the largest of its columns, NaN ignored (sm_103a)."""
    lines = []
    total = count * len(addresses)
    for i, _ in enumerate(addresses):
        registers = ", ".join(f"{{$w{i * count + j}}}" for j in range(count))
        lines.append(
            f"tcgen05.ld.red.sync.aligned.32x32b.x{count}.max.f32 "
            f"{{{registers}}}, {{$w{total + i}}}, [{{$r{i}}}];"
        )
    values = _load(lines, addresses, total + len(addresses))
    return values[:total], values[total:]


def _load(lines: list[str], addresses: list[Int32], results: int) -> list[Float32]:
    code = "\n".join([*lines, "tcgen05.wait::ld.sync.aligned;"])
    return list(
        prims.inline_ptx(code, write_only_types=[Float32] * results, read_only_args=addresses)
    )


def store(address: Int32, words: list) -> None:
    """Starts storing 32-bit words into consecutive columns of this thread's row."""
    dtype = type(words[0])
    vector = cutlass.Vector.from_elements(tuple(words), dtype=dtype)
    prims.tcgen05_st("32x32b", prims.TmemAddr(address).as_ptr(dtype), vector)


def wait_stores() -> None:
    """Blocks until the stores of this warp are in tensor memory."""
    prims.tcgen05_wait(prims.Tcgen05Wait.STORE)


def fence_before() -> None:
    """Orders this thread's tensor memory accesses before a following arrive."""
    prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)


def fence_after() -> None:
    """Orders a preceding wait before this thread's tensor memory accesses."""
    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)


@dataclasses.dataclass(frozen=True)
class OperandTile:
    """A 16-bit operand in shared memory as TMA wrote it: blocks of 64 columns, 128-byte swizzle.

    Attributes:
      rows: rows of the tile; a block holds all of them.
    """

    rows: int

    @property
    def box_bytes(self) -> int:
        return self.rows * ROW_BYTES

    def descriptor(self, address: Int32, transposed: bool) -> prims.Tcgen05SmemDesc:
        """Descriptor of the tile's first step along the reduction dimension.

        Args:
          address: shared memory address, a multiple of 1024.
          transposed: whether the reduction runs down the rows (MN-major) instead of along them.
        """
        return prims.Tcgen05SmemDesc.build(
            start_address=address,
            # Between blocks of columns when transposed; else the hardware ignores it.
            leading_byte_offset=self.box_bytes if transposed else 16,
            stride_byte_offset=8 * ROW_BYTES,
            layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B,
        )

    def step(self, k: int, transposed: bool) -> int:
        """Bytes from the tile's start to step k (of 16 elements) along the reduction dimension."""
        if transposed:
            return k * MMA_K * ROW_BYTES
        box, column = divmod(k * MMA_K, BOX_COLUMNS)
        return box * self.box_bytes + 2 * column


def instruction(dtype: type, m: int, n: int, b_transposed: bool) -> int:
    """Instruction descriptor of a 16-bit product with float32 accumulator."""
    description = prims.Tcgen05InstrDesc.build(
        c_dtype=Float32, a_dtype=dtype, b_dtype=dtype, b_major=int(b_transposed), m_dim=m, n_dim=n
    )
    return int(description.value)


NEGATE_A = 1 << 13  # bit of the instruction descriptor: multiply by -A
