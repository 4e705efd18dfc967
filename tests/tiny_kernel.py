"""A kernel with a parameter of each kind, small enough to compile in a second.

Copies query ``[B, T, N, H]`` rows through shared memory into out, several heads at a time where T
is short, and writes into lse ``query_seq_lengths[0] * T + logits_soft_cap + sinks[b, n] +
query_segment_ids[b, t]``; an absent length reads as 1, an absent sink or id as 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels import abi

ROWS = abi.PACKED_ROWS
COLUMNS = 64


@cute.jit
def load_or(pointer: cute.Pointer, index: cutlass.Int32, default: cutlass.Constexpr):
    value = default
    if pointer.toint() != 0:
        value = (pointer + index).load()
    return value


class Tiny:
    """One CTA copies 128 rows of a pack of heads; ``extra_shared`` only wastes shared memory."""

    def __init__(self, extra_shared=0):
        self.extra_shared = extra_shared

    def declaration(self):
        box = (COLUMNS, 1, ROWS, 1)
        return abi.KernelSpec(
            name="tiny_forward",
            architecture="sm_90a",
            operation="forward",
            select={"dtype": "bf16"},
            threads=ROWS,
            grid=(f"packed_T/{ROWS}", "packed_N", "B"),
            params=(
                abi.TensorMap("query", box=box, packed=True),
                abi.TensorMap("out", box=box, packed=True),
                abi.Pointer("lse"),
                abi.Pointer("query_seq_lengths"),
                abi.Pointer("sinks"),
                abi.Pointer("query_segment_ids"),
                abi.S32("T"),
                abi.S32("N"),
                abi.S32("pack"),
                abi.F32("logits_soft_cap"),
            ),
        )

    @cute.kernel
    def kernel(
        self,
        query: cutlass.GridConstant[cuda.TensorMap],
        out: cutlass.GridConstant[cuda.TensorMap],
        lse: cute.Pointer,
        lengths: cute.Pointer,
        sinks: cute.Pointer,
        segment_ids: cute.Pointer,
        length: cutlass.Int32,
        heads: cutlass.Int32,
        pack: cutlass.Int32,
        logits_soft_cap: cutlass.Float32,
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
        tiles = (length * pack + ROWS - 1) // ROWS
        first_position = block % tiles * (ROWS // pack)
        first_head = block // tiles % (heads // pack) * pack
        batch = block // tiles // (heads // pack)
        if thread == 0:
            prims.mbarrier_init(full, 1)
            waste[0] = cutlass.Int64(0)
        prims.fence_mbarrier_init()
        prims.barrier_cta_sync(0)
        where = (cutlass.Int32(0), first_head, first_position, batch)
        if thread == 0:
            prims.mbarrier_arrive_expect_tx(full, query.global_tx_bytes())
            prims.cp_async_bulk_tensor_shared_cta_global(tile, query.get_ptr(), where, full)
        while not prims.mbarrier_try_wait_parity(full, 0):
            pass
        position = first_position + thread // pack
        head = first_head + thread % pack
        if position < length:
            value = cutlass.Float32(load_or(lengths, 0, cutlass.Int32(1)) * length)
            value += logits_soft_cap
            value += load_or(sinks, batch * heads + head, cutlass.Float32(0))
            value += load_or(segment_ids, batch * length + position, cutlass.Int32(0))
            index = (cutlass.Int64(batch) * length + position) * heads + head
            (lse + index).store(value)
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
