"""The Blackwell kernels' mbarriers: buffers that TMA fills, and plain hand-overs between warps.

In a pair of CTAs the tensor cores' products are issued by the first one, for both: barriers that
it waits on are its own and take the arrivals of both CTAs.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.experimental.cuda as cuda
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from ..pipelines import wait
from . import tensor_memory as tmem


def barriers(count: int) -> cutlass.Pointer:
    """Shared memory for mbarriers."""
    smem = cutlass.AddressSpace.smem
    return cutlass.Array(Int64, count, space=smem, alignment=8).data_ptr()


def first_of_pair(barrier: cutlass.Pointer) -> cutlass.Pointer:
    """The same barrier in the first CTA of the pair."""
    return prims.mapa(barrier, 0)


class Channel:
    """An mbarrier whose use k is complete when all of its producers have arrived k + 1 times.

    Args:
      producers: arrivals of one use.
      shared: whether the producers are those of both CTAs of a pair; arrivals go to the first.
    """

    def __init__(self, producers: int, shared: bool = False):
        self.producers = producers
        self.shared = shared
        self.barrier = barriers(1)

    def init(self) -> None:
        prims.mbarrier_init(self.barrier, self.producers)

    def wait(self, k: Int32) -> None:
        """Waits until use k is complete."""
        wait(self.barrier, k & 1)

    def wait_free(self, k: Int32) -> None:
        """Waits until use k - 1 is complete."""
        wait(self.barrier, (k & 1) ^ 1)

    @cute.jit
    def arrive(self) -> None:
        """One arrival for a warp; what its lanes did before is ordered before it.

        Between CTAs only tensor memory accesses are, by tcgen05.fence: a release at cluster scope
        would wait for all of the warp's memory accesses to reach the L2 cache.
        """
        cute.arch.sync_warp()
        if prims.elect_sync():
            if cutlass.const_expr(self.shared):
                prims.mbarrier_arrive(first_of_pair(self.barrier), scope=prims.MemScope.CTA)
            else:
                prims.mbarrier_arrive(self.barrier)


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a ring's buffers: which buffer, and the parity of how often it was used before."""

    stage: Int32
    parity: Int32


@dataclasses.dataclass(frozen=True)
class Cursor:
    """A role's place in a ring, in registers: counting up is cheaper than dividing.

    Attributes:
      num_stages: of the ring.
      state: int32 register tensor: stage and parity of the next use.
    """

    num_stages: int
    state: cute.Tensor

    @classmethod
    def start(cls, num_stages: int) -> Cursor:
        state = cute.make_rmem_tensor(2, Int32)
        state.fill(0)
        return cls(num_stages, state)

    def use(self) -> Use:
        """The use that is next."""
        return Use(Int32(0) if self.num_stages == 1 else self.state[0], self.state[1])

    def advance(self) -> Use:
        """Steps on; returns the use that is next now."""
        wraps = Boolean(True)
        if self.num_stages > 1:
            stage = self.state[0] + 1
            wraps = stage == self.num_stages
            self.state[0] = Int32(cutlass.select_(wraps, Int32(0), stage))
        self.state[1] = self.state[1] ^ Int32(wraps)
        return self.use()


class LoadRing:
    """Buffers filled by TMA and freed by a commit, each with a *full* and an *empty* mbarrier.

    In a pair of CTAs each loads its part of a buffer: the full barriers are those of the first CTA
    and take an arrival of each; every CTA has empty barriers of its own.
    """

    def __init__(self, num_stages: int, ctas: int):
        self.num_stages = num_stages
        self.ctas = ctas
        self.full_barriers = barriers(num_stages)
        self.empty_barriers = barriers(num_stages)

    def init(self) -> None:
        for stage in range(self.num_stages):
            prims.mbarrier_init(self.full_barriers + stage, self.ctas)
            prims.mbarrier_init(self.empty_barriers + stage, 1)

    def cursor(self) -> Cursor:
        return Cursor.start(self.num_stages)

    def empty(self, use: Use) -> cutlass.Pointer:
        return self.empty_barriers + use.stage

    def wait_empty(self, use: Use) -> None:
        """Waits until the products of the buffer's previous use have read it."""
        wait(self.empty(use), use.parity ^ 1)

    def wait_full(self, use: Use) -> None:
        """Waits until the data has landed."""
        wait(self.full_barriers + use.stage, use.parity)

    @cute.jit
    def load(
        self,
        use: Use,
        destination: cutlass.Pointer,
        tensor_map: cutlass.GridConstant[cuda.TensorMap],
        coordinates: tuple,
        boxes: cutlass.Constexpr[int],
        rows: cutlass.Constexpr[int],
    ) -> None:
        """One lane loads a tile as blocks of 64 columns, completing the use."""
        elements = rows * tmem.BOX_COLUMNS
        bytes_loaded = boxes * elements * 2
        full = self.full_barriers + use.stage
        if prims.elect_sync():
            if cutlass.const_expr(self.ctas == 1):
                prims.mbarrier_arrive_expect_tx(full, bytes_loaded)
            else:
                prims.mbarrier_arrive_expect_tx(first_of_pair(full), bytes_loaded)
            for i in cutlass.range_constexpr(boxes):
                place = (coordinates[0] + i * tmem.BOX_COLUMNS, *coordinates[1:])
                if cutlass.const_expr(self.ctas == 1):
                    prims.cp_async_bulk_tensor_shared_cta_global(
                        destination + i * elements, tensor_map.get_ptr(), place, full
                    )
                else:  # cta_group::2 has the first CTA count the bytes of both
                    smem = int(cutlass.AddressSpace.smem)
                    barrier = cutlass.Array(full.ir_value(), dtype=Int64, addrspace=smem)
                    prims.cp_async_bulk_tensor_shared_cluster_global(
                        destination + i * elements, tensor_map.get_ptr(), place, barrier, [],
                        group=prims.CTAGroup.CTA_2,
                    )  # fmt: skip

    @cute.jit
    def arrive(self, use: Use) -> None:
        """The load warp has filled its part of a buffer by other means than :meth:`load`."""
        full = self.full_barriers + use.stage
        if prims.elect_sync():
            if cutlass.const_expr(self.ctas == 1):
                prims.mbarrier_arrive(full)
            else:
                prims.mbarrier_arrive(first_of_pair(full))
