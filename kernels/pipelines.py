"""Shared-memory rings between a TMA producer and its consumers, and scrubbing of padded rows."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental import primitives as prims


@cute.jit
def wait(barrier: cutlass.Pointer, parity: Int32) -> None:
    """Blocks until the mbarrier's phase of the given parity has completed."""
    while not prims.mbarrier_try_wait_parity(barrier, parity):
        pass


class Ring:
    """``num_stages`` buffers, each with a *full* and an *empty* mbarrier.

    Use number k (counting from 0 over the life of the CTA) occupies stage ``k % num_stages``.
    Both sides count k themselves; no other state exists. Construct inside the kernel; one thread
    calls :meth:`init` before a fence and a CTA barrier.

    Args:
      num_stages: buffers in the ring.
      num_consumers: arrivals that free a buffer.
    """

    def __init__(self, num_stages: int, num_consumers: int):
        self.num_stages = num_stages
        self.num_consumers = num_consumers
        smem = cutlass.AddressSpace.smem
        self.full_barriers = cutlass.Array(Int64, num_stages, space=smem, alignment=8)
        self.empty_barriers = cutlass.Array(Int64, num_stages, space=smem, alignment=8)

    def init(self) -> None:
        for stage in range(self.num_stages):
            prims.mbarrier_init(self.full_barriers.data_ptr() + stage, 1)
            prims.mbarrier_init(self.empty_barriers.data_ptr() + stage, self.num_consumers)

    def stage(self, k: Int32) -> Int32:
        return Int32(0) if self.num_stages == 1 else k % self.num_stages

    def full(self, k: Int32) -> cutlass.Pointer:
        return self.full_barriers.data_ptr() + self.stage(k)

    def empty(self, k: Int32) -> cutlass.Pointer:
        return self.empty_barriers.data_ptr() + self.stage(k)

    def acquire(self, k: Int32) -> None:
        """Producer: waits until use k - num_stages has been released."""
        wait(self.empty(k), (k // self.num_stages & 1) ^ 1)

    def wait_full(self, k: Int32) -> None:
        """Consumer: waits until the data of use k has landed."""
        wait(self.full(k), k // self.num_stages & 1)

    @cute.jit
    def release(self, k: Int32) -> None:
        """Consumer warp: its lanes have finished reading the buffer of use k."""
        if prims.elect_sync():
            prims.mbarrier_arrive(self.empty(k))


@cute.jit
def load_boxes(
    destination: cutlass.Pointer,
    tensor_map: cutlass.Pointer,
    barrier: cutlass.Pointer,
    coordinates: tuple,
    num_boxes: cutlass.Constexpr[int],
    box_columns: cutlass.Constexpr[int],
    box_rows: cutlass.Constexpr[int],
) -> None:
    """One elected lane loads a tile as ``num_boxes`` column blocks, one after the other.

    Arrives on ``barrier`` expecting all bytes (whole boxes count, out-of-bounds fill included).

    Args:
      destination: shared memory of 16-bit elements; block i starts at i * box_rows * box_columns.
      tensor_map: TMA descriptor whose box is box_columns x ... = box_rows rows.
      barrier: mbarrier that the bytes complete on.
      coordinates: innermost first; the first one is that of the first block's first column.
    """
    block = box_columns * box_rows
    if prims.elect_sync():
        prims.mbarrier_arrive_expect_tx(barrier, num_boxes * block * 2)
        for i in cutlass.range_constexpr(num_boxes):
            prims.cp_async_bulk_tensor_shared_cta_global(
                destination + i * block,
                tensor_map,
                (coordinates[0] + i * box_columns, *coordinates[1:]),
                barrier,
            )


@cute.jit
def keep_rows(
    tile: cutlass.Pointer,
    begin: Int32,
    end: Int32,
    num_boxes: cutlass.Constexpr[int],
    box_columns: cutlass.Constexpr[int],
    box_rows: cutlass.Constexpr[int],
) -> None:
    """One warp zeroes the rows of a tile outside [begin, end) and publishes it to the MMA.

    Args:
      tile: shared memory in the layout of :func:`load_boxes`. A swizzle permutes 16-byte pieces
        within a row of at most 128 bytes, so whole rows need no address arithmetic of their own.
      begin, end: rows, both within 0..box_rows.
    """
    words = box_columns // 2  # 32-bit words of a row of one block
    lane = cute.arch.lane_idx()
    base = cute.recast_ptr(
        cute.make_ptr(tile.dtype, tile.toint(), cute.AddressSpace.smem), dtype=Int32
    )
    memory = cute.make_tensor(base, cute.make_layout(num_boxes * box_rows * words))
    for box in cutlass.range_constexpr(num_boxes):
        first = box * box_rows * words
        for i in cutlass.range(first + lane, first + begin * words, 32, unroll=1):
            memory[i] = Int32(0)
        for i in cutlass.range(first + end * words + lane, first + box_rows * words, 32, unroll=1):
            memory[i] = Int32(0)
    prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
    cute.arch.sync_warp()
