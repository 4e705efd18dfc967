"""A kernel with a parameter of each kind, small enough to compile in a second.

Copies query ``[B, T, N, H]`` rows through shared memory into out and writes ``query_seq_lengths[0]
* T`` into lse; an absent length array reads as 1.
"""

import cutlass
import cutlass.cute as cute
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels import abi

ROWS = 64
COLUMNS = 64


class Tiny:
    """One CTA copies 64 rows of one head; ``extra_shared`` only wastes shared memory."""

    def __init__(self, extra_shared=0):
        self.extra_shared = extra_shared

    def declaration(self):
        box = (COLUMNS, 1, ROWS, 1)
        return abi.KernelSpec(
            name="tiny_forward",
            architecture="sm_90a",
            operation="forward",
            select={"dtype": "bf16"},
            threads=64,
            grid=(f"T/{ROWS}", "N", "B"),
            params=(
                abi.TensorMap("query", box=box),
                abi.TensorMap("out", box=box),
                abi.Pointer("lse"),
                abi.Pointer("query_seq_lengths"),
                abi.S32("T"),
                abi.S32("N"),
            ),
        )

    @cute.kernel
    def kernel(
        self,
        query: cutlass.GridConstant[cuda.TensorMap],
        out: cutlass.GridConstant[cuda.TensorMap],
        lse: cute.Pointer,
        lengths: cute.Pointer,
        length: cutlass.Int32,
        heads: cutlass.Int32,
    ):
        tile = cutlass.Array(
            cutlass.BFloat16, ROWS * COLUMNS, space=cutlass.AddressSpace.smem, alignment=128
        )
        full = cutlass.Array(cutlass.Int64, 1, space=cutlass.AddressSpace.smem, alignment=8)
        waste = cutlass.Array(
            cutlass.Int64, 1 + self.extra_shared // 8, space=cutlass.AddressSpace.smem, alignment=8
        )
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tiles = (length + ROWS - 1) // ROWS
        row = block % tiles * ROWS
        head = block // tiles % heads
        batch = block // tiles // heads
        if thread == 0:
            prims.mbarrier_init(full, 1)
            waste[0] = cutlass.Int64(0)
        prims.fence_mbarrier_init()
        prims.barrier_cta_sync(0)
        where = (cutlass.Int32(0), head, row, batch)
        if thread == 0:
            prims.mbarrier_arrive_expect_tx(full, query.global_tx_bytes())
            prims.cp_async_bulk_tensor_shared_cta_global(tile, query.get_ptr(), where, full)
        while not prims.mbarrier_try_wait_parity(full, 0):
            pass
        factor = cutlass.Int32(1)
        if lengths.toint() != 0:
            factor = lengths.load()
        if row + thread < length:
            index = (cutlass.Int64(batch) * length + row + thread) * heads + head
            (lse + index).store(cutlass.Float32(factor * length))
        if thread == 0:
            prims.cp_async_bulk_tensor_global_shared_cta(out.get_ptr(), tile, where)
            prims.cp_async_bulk_commit_group()
            prims.cp_async_bulk_wait_group(0)


class Spilling:
    """Keeps 96 values across a barrier with at most 64 registers per thread."""

    def declaration(self):
        return abi.KernelSpec(
            name="spilling_forward",
            architecture="sm_90a",
            operation="forward",
            select={},
            threads=1024,
            grid=("B",),
            params=(abi.Pointer("lse"),),
        )

    @cute.kernel
    def kernel(self, lse: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        mine = lse + thread * 96
        values = cute.make_rmem_tensor(96, cutlass.Float32)
        for i in cutlass.range(96, unroll_full=True):
            values[i] = (mine + i).load()
        prims.barrier_cta_sync(0)
        for i in cutlass.range(96, unroll_full=True):
            (mine + i).store(values[95 - i])
