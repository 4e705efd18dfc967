"""FlashAttention backward for Hopper: one CTA owns 128 keys of one kv head.

It walks the queries that see its keys, head after head of the GQA group, recomputes the
probabilities from ``lse`` and accumulates dK and dV in registers. dQ leaves as float32 partial
sums, added in global memory by the bulk-copy engine (FlashAttention-2, arXiv 2307.08691, section
3.1; warp specialisation after FlashAttention-3, arXiv 2407.08608).

Scores are computed transposed, S^T = K Q^T, so that P^T and dS^T are already the register
fragments that dV += P^T dO and dK += dS^T Q take as operand A. Only dQ = dS K needs dS in shared
memory, because every key contributes to it.

Threads: 3 warpgroups, setmaxnreg 24 / 240 / 240
    warp 0       loads K, V once; Q, lse, dO, delta of every query tile
    warp 1       adds dQ tiles to global memory
    warps 4-7    consumer 0: keys   0-63 of the tile    ┐ S^T, dP^T, dV, dK of their keys;
    warps 8-11   consumer 1: keys 64-127 of the tile    ┘ half of dQ each

One query tile in each consumer; letters are wgmma groups, which run in the order of issue:

    S(i), dP(i) | wait S | P = exp2(S scale - lse) | wait dP | dS = P (dP - delta), to shared
    dV(i) | both consumers meet | dQ(i), dK(i) | wait dV, dQ | dQ to shared for warp 1 | wait dK

With a soft cap, t = tanh(S scale / cap), P = exp2(t cap - lse) and dS = P (1 - t^2) (dP - delta). P
and P (1 - t^2) take S's registers, each rounded to 16 bits, before dP is there; dV(i) then comes
before dS.

With tiles of 80 queries S(i+1) is issued right after dQ(i) has left its registers, behind dK(i).
At 64 queries x head_dim 128 dK(i) is issued when dV(i) is done.

Barriers
    key_full, value_full   producer -> consumers, once
    query ring             2 stages of Q and lse; freed by consumers after dK
    dout ring              2 stages of dO and delta; freed by consumers after dV
    named DS               both consumers: dS of this tile is complete
    named DQ_FULL + w      consumer w -> warp 1: its half of dQ is in shared memory
    named DQ_EMPTY + w     warp 1 -> consumer w: it has been read
    named OUTPUT + w       within consumer w: its dK and dV are in shared memory

Shared memory in KiB (16-bit tiles in 64-column blocks with the 128-byte swizzle):

    head_dim, queries   Q        dO       K    V    dS       dQ   lse, delta   sum
    128, 80 (full)      2 x 20   2 x 20   32   32   2 x 20   40   1.5          225.5
    128, 64             2 x 16   2 x 16   32   32   2 x 16   32   1            193
    64, 128             2 x 16   2 x 16   16   16   2 x 32   32   2            194

    dK and dV leave through K's and V's place.

Registers of a consumer thread: dK and dV head_dim each / 2, S and dP queries / 2 each, dQ 32 or 40
(while S and dP are dead), P and dS rounded queries / 4 each: up to 228 of 240. A soft cap's two
16-bit fragments take the place of S.

dQ accumulator (float32, ``[B, N, Tp, Hp]`` as far as size goes): per head, query tiles one after
the other; a tile is a block for each 64 columns (at head_dim 64: for each 64 queries) that holds
the 64 x n accumulator of one warpgroup as [n/8][thread][4], the order in which the registers lie,
so that a block is one bulk copy. See :class:`AccumulatorLayout`.
"""

from __future__ import annotations

import dataclasses
import math

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from .. import abi, masks, pipelines, softmax
from ..schedulers import longest_first

TILE_KEYS = 128
CONSUMERS = 2  # warpgroups, 64 keys each
STAGES = 2
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
BLOCK = 64  # columns of 16 bits in one 128-byte swizzle span
NAMED_DS = 1
NAMED_DQ_FULL, NAMED_DQ_EMPTY, NAMED_OUTPUT = 2, 4, 6  # one id for each consumer
DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}
MASKS = {kind.name: kind for kind in masks.KINDS}
MN = OperandMajorMode.MN
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class AccumulatorLayout:
    """How query tiles lie in the dQ accumulator; shared with the postprocess.

    Attributes:
      tile: queries of a tile.
      transposed: the warpgroup's accumulator is dQ^T (64 columns of dQ x queries) because the
        tile is no multiple of wgmma's 64 rows.
      split_queries: a tile's two blocks are its query halves instead of its column halves.
    """

    tile: int
    transposed: bool
    split_queries: bool

    @classmethod
    def of(cls, head_dim: int, mask: str | None) -> AccumulatorLayout:
        if head_dim == 64:
            return cls(128, transposed=False, split_queries=True)
        # 80 queries keep the tensor cores just ahead of shared memory; 64 waste less on a diagonal.
        tile = 80 if mask == "full" else 64
        return cls(tile, transposed=tile % 64 != 0, split_queries=False)


@dataclasses.dataclass(frozen=True)
class Work:
    """What one CTA does: the query tiles [tile_begin, tile_begin + tiles) of ``group`` heads.

    In ``seen`` rows are keys and columns are queries.
    """

    batch: Int32
    kv_head: Int32
    group: Int32
    first_key: Int32
    tile_begin: Int32
    tiles: Int32
    seen: masks.Visibility


class Backward:
    """dK, dV and the dQ accumulator for one dtype, head dimension and mask kind.

    Args:
      dtype: "bf16" or "f16".
      head_dim: 64 or 128; serves H, Hv <= head_dim in multiples of 8.
      mask: "full", "causal", "window" or "segments".
      capped: whether logits have a soft cap; "window" and "segments" only.
    """

    def __init__(self, dtype: str, head_dim: int, mask: str, capped: bool):
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]
        self.head_dim = head_dim
        self.mask, self.kind = mask, MASKS[mask]
        self.capped = capped
        self.layout = AccumulatorLayout.of(head_dim, mask)
        self.tile_m = self.layout.tile
        self.row_stride = -(-self.tile_m // 32) * 32  # TMA writes to multiples of 128 bytes
        self.threads = 128 * (1 + CONSUMERS)
        self.blocks = head_dim // BLOCK
        # With a soft cap P is there rounded only, and dV starts before dS is computed.
        self.early_dv = capped
        # dK waits for dV instead of queueing behind it: faster here alone (NOTES.md).
        self.dk_after_dv = head_dim == 128 and self.tile_m == 64 and not capped
        # The next tile's S starts while dK runs. Pays where the tile is large enough; ptxas finds
        # no spill-free code for 80 queries without it, nor unserialised code for more overlap.
        self.prefetch = self.layout.transposed
        # Scores of a thread that become probabilities together. The branch that masks each part
        # keeps ptxas from holding ids or halves of a tanh of more elements than registers allow.
        self.at_once = 16 if capped else 32 if self.kind.segments else self.tile_m // 2
        # Floats of one warpgroup's block of a dQ tile.
        self.dq_rows = 64 if self.layout.split_queries else self.tile_m
        self.dq_block = self.dq_rows * 64

    def declaration(self) -> abi.KernelSpec:
        queries = (BLOCK, 1, self.tile_m, 1)
        keys = (BLOCK, 1, TILE_KEYS, 1)
        return abi.KernelSpec(
            name=f"sm90_backward_{self.dtype_name}_h{self.head_dim}_{self.mask}"
            + "_capped" * self.capped,
            architecture="sm_90a",
            operation="backward",
            select={
                "dtype": self.dtype_name,
                "head_dim": self.head_dim,
                "mask": self.mask,
                "logits": "capped" if self.capped else "plain",
            },
            threads=self.threads,
            grid=(f"S/{TILE_KEYS}", "K", "B"),
            params=(
                abi.TensorMap("query", box=queries, swizzle=128),
                abi.TensorMap("key", box=keys, swizzle=128),
                abi.TensorMap("value", box=keys, swizzle=128),
                abi.TensorMap("dout", box=queries, swizzle=128),
                abi.TensorMap("lse_log2", box=(self.tile_m, 1, 1)),
                abi.TensorMap("delta", box=(self.tile_m, 1, 1)),
                abi.TensorMap("dk", box=(BLOCK, 1, 64, 1), swizzle=128),
                abi.TensorMap("dv", box=(BLOCK, 1, 64, 1), swizzle=128),
                abi.Pointer("dq_accumulator"),
                abi.S32("Tp"),
                abi.S32("Hp"),
                abi.S32("num_sms"),
                *abi.PROBLEM,
            ),
        )

    @cute.kernel
    def kernel(
        self,
        query: cutlass.GridConstant[cuda.TensorMap],
        key: cutlass.GridConstant[cuda.TensorMap],
        value: cutlass.GridConstant[cuda.TensorMap],
        dout: cutlass.GridConstant[cuda.TensorMap],
        lse_log2: cutlass.GridConstant[cuda.TensorMap],
        delta: cutlass.GridConstant[cuda.TensorMap],
        dk: cutlass.GridConstant[cuda.TensorMap],
        dv: cutlass.GridConstant[cuda.TensorMap],
        dq_accumulator: cute.Pointer,
        padded_queries: Int32,
        padded_head_dim: Int32,
        num_sms: Int32,
        scale: cute.Pointer,
        query_seq_lengths: cute.Pointer,
        key_value_seq_lengths: cute.Pointer,
        query_offset: cute.Pointer,
        query_segment_ids: cute.Pointer,
        key_value_segment_ids: cute.Pointer,
        segment_bounds: cute.Pointer,
        batch_size: Int32,
        num_queries: Int32,
        num_keys: Int32,
        num_heads: Int32,
        num_kv_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        logits_soft_cap: Float32,
    ):
        problem = masks.Problem(
            scale,
            query_seq_lengths,
            key_value_seq_lengths,
            query_offset,
            query_segment_ids,
            key_value_segment_ids,
            segment_bounds,
            batch_size,
            num_queries,
            num_keys,
            num_heads,
            num_kv_heads,
            window_left,
            window_right,
            logits_soft_cap,
        )
        self.allocate()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            if prims.elect_sync():
                for barrier in (self.key_full, self.value_full, self.scrub):
                    prims.mbarrier_init(barrier, 1)
                self.query_ring.init()
                self.dout_ring.init()
        prims.fence_mbarrier_init()
        cute.arch.sync_threads()

        block, _, _ = cute.arch.block_idx()
        key_tiles = cute.ceil_div(problem.num_keys, TILE_KEYS)
        head, key_tile = block // key_tiles, block % key_tiles
        if self.kind.right:
            head, key_tile = longest_first(block, key_tiles, batch_size * num_kv_heads, num_sms)
        batch, kv_head = head // problem.num_kv_heads, head % problem.num_kv_heads
        first_key = key_tile * TILE_KEYS
        group = problem.num_heads // problem.num_kv_heads
        visibility = masks.Visibility.of_batch(self.kind, batch, problem)
        seen = visibility.transposed()
        begin, end = seen.tiles(first_key, TILE_KEYS, self.tile_m)
        work = Work(batch, kv_head, group, first_key, begin, end - begin, seen)

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load(
                    work,
                    (query, key, value, dout, lse_log2, delta),
                    visibility.all_columns(),
                    problem.num_queries,
                    problem.num_keys,
                )
            if warp == 1:
                heads = Int64(batch) * problem.num_heads + kv_head * group
                head_size = Int64(padded_queries) * padded_head_dim
                self.reduce_dq(
                    work, dq_accumulator + heads * head_size, padded_queries, padded_head_dim
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(work, problem, dk, dv)

    def allocate(self):
        """Shared memory and barriers."""
        smem = cutlass.memory.SmemAllocator()
        m, h = self.tile_m, self.head_dim
        self.query = smem.allocate_array(self.dtype, STAGES * m * h, byte_alignment=1024)
        self.dout = smem.allocate_array(self.dtype, STAGES * m * h, byte_alignment=1024)
        self.key = smem.allocate_array(self.dtype, TILE_KEYS * h, byte_alignment=1024)
        self.value = smem.allocate_array(self.dtype, TILE_KEYS * h, byte_alignment=1024)
        self.ds = smem.allocate_array(self.dtype, STAGES * m * TILE_KEYS, byte_alignment=1024)
        self.dq = smem.allocate_array(Float32, CONSUMERS * self.dq_block, byte_alignment=128)
        self.lse = smem.allocate_array(Float32, STAGES * self.row_stride, byte_alignment=128)
        self.delta = smem.allocate_array(Float32, STAGES * self.row_stride, byte_alignment=128)
        barriers = cutlass.Array(Int64, 3, space=cutlass.AddressSpace.smem, alignment=8)
        self.key_full, self.value_full, self.scrub = (barriers.data_ptr() + i for i in range(3))
        self.query_ring = pipelines.Ring(STAGES, CONSUMERS * 4)
        self.dout_ring = pipelines.Ring(STAGES, CONSUMERS * 4)

    # ---------------------------------------------------------------- warp 0

    @cute.jit
    def load(self, work: Work, tensor_maps, live_keys, num_queries: Int32, num_keys: Int32):
        """Loads K, V, then Q, lse, dO, delta of every query tile of every head of the group.

        What no query may look at is zeroed on the way, so that a NaN there meets no MMA, and so are
        queries that see no key.
        """
        live_queries = work.seen.all_columns()
        query, key, value, dout, lse_log2, delta = tensor_maps
        size = self.tile_m * self.head_dim
        iterations = work.group * work.tiles
        scrubs = Int32(0)
        if iterations > 0:
            at = (Int32(0), work.kv_head, work.first_key, work.batch)
            bounds = self.bounds_of(live_keys, work.first_key, TILE_KEYS, num_keys)
            scrubs = self.load_tile(self.key, key, at, self.key_full, bounds, scrubs, TILE_KEYS)
            scrubs = self.load_tile(
                self.value, value, at, self.value_full, bounds, scrubs, TILE_KEYS
            )
        for i in cutlass.range(iterations, unroll=1):
            head = work.kv_head * work.group + i // work.tiles
            first_query = (work.tile_begin + i % work.tiles) * self.tile_m
            at = (Int32(0), head, first_query, work.batch)
            at_row = (first_query, head, work.batch)
            bounds = self.bounds_of(live_queries, first_query, self.tile_m, num_queries)
            stage = i % STAGES
            rows = stage * self.row_stride

            self.query_ring.acquire(i)
            self.load_row(self.lse + rows, lse_log2, at_row, self.query_ring.full(i))
            scrubs = self.load_tile(
                self.query + stage * size, query, at, self.query_ring.full(i), bounds, scrubs,
                self.tile_m,
            )  # fmt: skip
            self.dout_ring.acquire(i)
            self.load_row(self.delta + rows, delta, at_row, self.dout_ring.full(i))
            scrubs = self.load_tile(
                self.dout + stage * size, dout, at, self.dout_ring.full(i), bounds, scrubs,
                self.tile_m,
            )  # fmt: skip

    @cute.jit
    def bounds_of(self, live, first: Int32, rows: cutlass.Constexpr[int], num_rows: Int32):
        """(dirty, begin, end) of a tile: its rows [begin, end) are live, the rest may hold NaN.

        Args:
          live: [begin, end) of all rows.
          first: the tile's first row; what lies past ``num_rows`` arrives as zeros.
        """
        begin, end = live[0] - first, live[1] - first
        return begin > 0 or (end < rows and live[1] < num_rows), begin, end

    @cute.jit
    def load_row(self, destination, tensor_map, coordinates, full):
        """Loads tile_m floats; announces their bytes, but leaves the arrival to the tile's load."""
        if prims.elect_sync():
            prims.mbarrier_expect_tx(full, self.tile_m * 4)
            prims.cp_async_bulk_tensor_shared_cta_global(
                destination, tensor_map.get_ptr(), coordinates, full
            )

    @cute.jit
    def load_tile(
        self,
        destination,
        tensor_map,
        coordinates,
        full,
        bounds,
        scrubs: Int32,
        rows: cutlass.Constexpr[int],
    ) -> Int32:
        """Loads ``rows`` rows and arrives on ``full``.

        Args:
          bounds: (dirty, begin, end); if dirty, rows outside [begin, end) are zeroed first.
          scrubs: number of dirty loads so far, which gives the phase of the scrub barrier.

        Returns:
          ``scrubs`` after this load.
        """
        dirty, begin, end = bounds
        boxes = (self.blocks, BLOCK, rows)
        if dirty:
            pipelines.load_boxes(destination, tensor_map.get_ptr(), self.scrub, coordinates, *boxes)
            pipelines.wait(self.scrub, scrubs & 1)
            head = cutlass.max(cutlass.min(begin, Int32(rows)), Int32(0))
            tail = cutlass.max(cutlass.min(end, Int32(rows)), Int32(0))
            pipelines.keep_rows(destination, head, tail, *boxes)
            if prims.elect_sync():
                prims.mbarrier_arrive(full)
            scrubs = scrubs + 1
        else:
            pipelines.load_boxes(destination, tensor_map.get_ptr(), full, coordinates, *boxes)
        return scrubs

    # ---------------------------------------------------------------- warp 1

    @cute.jit
    def reduce_dq(self, work: Work, accumulator, padded_queries: Int32, padded_head_dim: Int32):
        """Adds each consumer's block of each dQ tile to the accumulator of its head."""
        for i in cutlass.range(work.group * work.tiles, unroll=1):
            first_query = (work.tile_begin + i % work.tiles) * self.tile_m
            row = Int64(i // work.tiles) * padded_queries + first_query
            tile = accumulator + row * padded_head_dim
            # The last tile of 80 may reach past the padded length: its blocks are shorter.
            rows = cutlass.min(Int32(self.dq_rows), padded_queries - first_query)
            for w in cutlass.range_constexpr(CONSUMERS):
                cute.arch.cp_async_bulk_wait_group(CONSUMERS - 1 - w, read=True)
                cute.arch.barrier_arrive(barrier_id=NAMED_DQ_EMPTY + w, number_of_threads=128 + 32)
            for w in cutlass.range_constexpr(CONSUMERS):
                cute.arch.barrier(barrier_id=NAMED_DQ_FULL + w, number_of_threads=128 + 32)
                if self.layout.split_queries or w * 64 < padded_head_dim:
                    if prims.elect_sync():
                        prims.cp_reduce_async_bulk_global_shared_cta(
                            tile + w * rows * 64,
                            self.dq + w * self.dq_block,
                            rows * (64 * 4),
                            type=prims.CpReduceType.F32,
                        )
                cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)

    # ---------------------------------------------------------------- consumers

    def tile(self, pointer, rows: int, columns: int, transposed: bool = False) -> cute.Tensor:
        """A rows x columns tile of 64-column blocks as a swizzled tensor."""
        swizzled = cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3), dtype=self.dtype)
        shape, stride = (rows, (BLOCK, columns // BLOCK)), (BLOCK, (1, rows * BLOCK))
        if transposed:
            shape, stride = shape[::-1], stride[::-1]
        return cute.make_tensor(swizzled, cute.make_layout(shape, stride=stride))

    def rows_of(self, w: Int32, pointer, rows: int, columns: int) -> cute.Tensor:
        """Rows [64 w, 64 w + 64) of a tile."""
        tile = self.tile(pointer + w * (64 * BLOCK), rows, columns)
        return cute.local_tile(tile, (64, columns), (0, 0))

    @cute.jit
    def mma(
        self,
        acc,
        a,
        b,
        a_major: cutlass.Constexpr = OperandMajorMode.K,
        b_major: cutlass.Constexpr = OperandMajorMode.K,
        zero: cutlass.Constexpr[bool] = False,
    ):
        """Issues acc (+)= a b^T as one wgmma group of this warpgroup.

        Args:
          acc: accumulator of 64 x N.
          a: 64 x K in shared memory, or a register fragment of it.
          b: N x K in shared memory.
          zero: overwrite the accumulator instead of adding to it.
        """
        in_shared = a.memspace == cute.AddressSpace.smem
        source = warpgroup.OperandSource.SMEM if in_shared else warpgroup.OperandSource.RMEM
        shape = (64, cute.size(b, mode=[0]), 16)
        op = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, a_major, b_major)
        )
        thread = op.get_slice(0)
        if cutlass.const_expr(in_shared):
            a = thread.make_fragment_A(thread.partition_A(a))
        b = thread.make_fragment_B(thread.partition_B(b))
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
            op.set(warpgroup.Field.ACCUMULATE, not zero or k > 0)
            cute.gemm(op, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    def accumulator(self, n: int) -> cute.Tensor:
        """Registers of a 64 x n accumulator."""
        return cute.make_rmem_tensor(
            cute.make_layout(((2, 2, n // 8), 1, 1), stride=((1, 2, 4), 0, 0)), Float32
        )

    def flat(self, fragment: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))

    def operand(self, n: int) -> cute.Tensor:
        """Registers of a 64 x n matrix of 16 bits as operand A, in the order of an accumulator."""
        return cute.make_rmem_tensor(
            cute.make_layout(((2, 2, 2), 1, n // 16), stride=((1, 2, 4), 0, 8)), self.dtype
        )

    def operand_a(self, acc: cute.Tensor) -> cute.Tensor:
        """The accumulator rounded to 16 bits, if it is not yet, as operand A of a following MMA."""
        if acc.element_type is self.dtype:
            return acc
        operand = self.operand(2 * cute.size(acc))
        self.flat(operand).store(self.flat(acc).load().to(self.dtype))
        return operand

    @cute.jit
    def consume(self, work: Work, problem: masks.Problem, dk, dv):
        """The MMAs and the softmax gradient of 64 keys, then their dK and dV."""
        scale = masks.load(problem.scale, work.batch)
        m, h = self.tile_m, self.head_dim
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        w = warp // 4 - 1
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % 128
        row, column = masks.fragment_origin(thread)

        k_rows = self.rows_of(w, self.key, TILE_KEYS, h)
        v_rows = self.rows_of(w, self.value, TILE_KEYS, h)
        acc_s, acc_dp = self.accumulator(m), self.accumulator(m)
        acc_dk, acc_dv = self.accumulator(h), self.accumulator(h)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)

        if cutlass.const_expr(self.capped):
            cap = problem.logits_soft_cap
            scaling = (cap * LOG2_E, Float32(-math.inf), scale * cute.arch.rcp_approx(cap))
        else:
            # Masked scores are set to what exp2 turns into 0, whatever the sign of the scale. A
            # scale of 0 must not make NaN of that infinity; 1e-30 leaves finite scores at 0.
            negative = scale < 0.0
            hidden = Float32(cutlass.select_(negative, Float32(math.inf), Float32(-math.inf)))
            scale_log2 = Float32(cutlass.select_(scale == 0.0, Float32(1e-30), scale * LOG2_E))
            scaling = (scale_log2, hidden, None)

        bounds = work.seen.unmasked_tiles(work.first_key, TILE_KEYS, m)
        origin = (work.first_key + w * 64 + row, column)
        iterations = work.group * work.tiles
        if iterations > 0:
            pipelines.wait(self.key_full, Int32(0))
            pipelines.wait(self.value_full, Int32(0))
            if cutlass.const_expr(self.prefetch):
                self.start_scores(Int32(0), k_rows, acc_s)
                self.start_dp(Int32(0), v_rows, acc_dp)
                warpgroup.wait_group(1)  # S
                self.probabilities(work, Int32(0), acc_s, bounds, scaling, origin)
                warpgroup.wait_group(0)  # dP
                for i in cutlass.range(iterations - 1, unroll=1):
                    self.gradients(work, i, acc_s, acc_s, acc_dp, acc_dk, acc_dv, bounds, origin)
                    self.start_scores(i + 1, k_rows, acc_s)
                    warpgroup.wait_group(1)  # dK
                    self.query_ring.release(i)
                    self.start_dp(i + 1, v_rows, acc_dp)
                    warpgroup.wait_group(1)  # S
                    self.probabilities(work, i + 1, acc_s, bounds, scaling, origin)
                    warpgroup.wait_group(0)  # dP
                last = iterations - 1
                self.gradients(work, last, acc_s, acc_s, acc_dp, acc_dk, acc_dv, bounds, origin)
                warpgroup.wait_group(0)
            else:
                for i in cutlass.range(iterations, unroll=1):
                    self.start_scores(i, k_rows, acc_s)
                    self.start_dp(i, v_rows, acc_dp)
                    warpgroup.wait_group(1)  # S
                    p, weights = self.probabilities(work, i, acc_s, bounds, scaling, origin)
                    warpgroup.wait_group(0)  # dP
                    self.gradients(work, i, p, weights, acc_dp, acc_dk, acc_dv, bounds, origin)
                    warpgroup.wait_group(0)  # dK
                    self.query_ring.release(i)

        # Both warpgroups must be done with K before dK takes its place.
        cute.arch.barrier(barrier_id=NAMED_DS, number_of_threads=CONSUMERS * 128)
        for i in cutlass.range_constexpr(2):
            acc, factor = ((acc_dv, Float32(1.0)), (acc_dk, scale))[i]
            values = self.flat(acc)
            for half in cutlass.range_constexpr(2):
                live = work.first_key + w * 64 + row + 8 * half < work.seen.num_rows
                for x in cutlass.range_constexpr(cute.size(values)):
                    if cutlass.const_expr(x // 2 % 2 == half):
                        values[x] = Float32(cutlass.select_(live, values[x] * factor, Float32(0.0)))
            place = (self.value, self.key)[i] + w * (64 * BLOCK)
            self.store_rows(self.operand_a(acc), place, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=NAMED_OUTPUT + w, number_of_threads=128)
        if warp % 4 == 0:
            if prims.elect_sync():
                for i in cutlass.range_constexpr(2):
                    for block in cutlass.range_constexpr(self.blocks):
                        column, first = Int32(block * BLOCK), work.first_key + w * 64
                        prims.cp_async_bulk_tensor_global_shared_cta(
                            (dv, dk)[i].get_ptr(),
                            (self.value, self.key)[i] + (block * TILE_KEYS + w * 64) * BLOCK,
                            (column, work.kv_head, first, work.batch),
                        )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def start_scores(self, i: Int32, k_rows, acc_s):
        """S^T of iteration i."""
        self.query_ring.wait_full(i)
        q_pointer = self.query + i % STAGES * (self.tile_m * self.head_dim)
        self.mma(acc_s, k_rows, self.tile(q_pointer, self.tile_m, self.head_dim), zero=True)

    @cute.jit
    def start_dp(self, i: Int32, v_rows, acc_dp):
        """dP^T of iteration i."""
        self.dout_ring.wait_full(i)
        do_pointer = self.dout + i % STAGES * (self.tile_m * self.head_dim)
        self.mma(acc_dp, v_rows, self.tile(do_pointer, self.tile_m, self.head_dim), zero=True)

    def row_values(self, buffer, i: Int32, column: Int32) -> cute.Tensor:
        """This thread's (2, m / 8) values of the row statistics of iteration i."""
        return cute.make_tensor(
            buffer + (i % STAGES * self.row_stride + column),
            cute.make_layout((2, self.tile_m // 8), stride=(1, 8)),
        )

    @cute.jit
    def probabilities(self, work: Work, i: Int32, acc_s, bounds, scaling, origin):
        """Turns S^T of iteration i into P^T.

        Returns:
          P^T and dS^T / (dP^T - delta): both are ``acc_s``, or with a soft cap two fragments of
          16-bit numbers.
        """
        scale_log2, hidden, cap_factor = scaling
        tile = work.tile_begin + i % work.tiles
        query = tile * self.tile_m + origin[1]
        masked = tile < bounds[0] or tile >= bounds[1]
        lse = self.row_values(self.lse, i, origin[1])
        p = weights = acc_s
        if cutlass.const_expr(self.capped):
            p, weights = self.operand(self.tile_m), self.operand(self.tile_m)
            p_words, weight_words = (cute.recast_tensor(self.flat(x), Int32) for x in (p, weights))
        scores = self.flat(acc_s)
        for first in cutlass.range_constexpr(0, cute.size(scores), self.at_once):
            part = cute.make_tensor(scores.iterator + first, cute.make_layout(self.at_once))
            if cutlass.const_expr(self.capped):
                softmax.cap_scores(part, cap_factor)
            if cutlass.const_expr(self.kind.left or self.kind.right):
                if masked:
                    work.seen.mask_fragment(part, origin[0], query + 2 * first, hidden)
            if cutlass.const_expr(self.capped):
                for word in cutlass.range_constexpr(first // 2, (first + self.at_once) // 2):
                    pair, weight_pair = [], []
                    for x in (2 * word, 2 * word + 1):
                        t = scores[x]
                        exponent = t * scale_log2 - lse[x % 2, x // 4]
                        pair.append(cute.math.exp2(exponent, fastmath=True))
                        # Where t is -inf, hidden, P is 0: keep 0 * inf out.
                        weight_pair.append(pair[-1] * cute.arch.fmax(1.0 - t * t, 0.0))
                    p_words[word] = softmax.pack(*pair, self.dtype)
                    weight_words[word] = softmax.pack(*weight_pair, self.dtype)
            else:
                for x in cutlass.range_constexpr(first, first + self.at_once):
                    exponent = scores[x] * scale_log2 - lse[x % 2, x // 4]
                    scores[x] = cute.math.exp2(exponent, fastmath=True)
        return p, weights

    @cute.jit
    def gradients(self, work: Work, i: Int32, p, weights, acc_dp, acc_dk, acc_dv, bounds, origin):
        """dV, dS and dQ of iteration i from P^T, ``weights`` and dP^T; dK is left in flight.

        Args:
          p, weights: what :meth:`probabilities` returns; dS^T is weights (dP^T - delta).
        """
        m, h = self.tile_m, self.head_dim
        stage = i % STAGES
        q_columns = self.tile(self.query + stage * (m * h), m, h, transposed=True)
        do_columns = self.tile(self.dout + stage * (m * h), m, h, transposed=True)
        ds_pointer = self.ds + stage * (m * TILE_KEYS)
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % 128
        w = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1

        if cutlass.const_expr(self.early_dv):
            self.mma(acc_dv, self.operand_a(p), do_columns, b_major=MN)
        delta = self.row_values(self.delta, i, origin[1])
        weights, ds = self.flat(weights), self.flat(acc_dp)
        for x in cutlass.range_constexpr(cute.size(ds)):
            ds[x] = weights[x].to(Float32) * (ds[x] - delta[x % 2, x // 4])
        tile = work.tile_begin + i % work.tiles
        if cutlass.const_expr(self.kind.left or self.kind.right):
            if tile < bounds[0] or tile >= bounds[1]:  # a hidden pair's dP may be infinite
                if cutlass.const_expr(self.kind.segments or self.capped):
                    # Its weight is exactly 0: cheaper than reading ids once more.
                    for x in cutlass.range_constexpr(cute.size(ds)):
                        nothing = weights[x].to(Float32) == 0.0
                        ds[x] = Float32(cutlass.select_(nothing, Float32(0.0), ds[x]))
                else:
                    work.seen.mask_fragment(ds, origin[0], tile * m + origin[1], Float32(0.0))
        ds16 = self.operand_a(acc_dp)
        if work.first_key + TILE_KEYS > work.seen.num_rows:
            # The P of a key past the end is garbage. It only spoils the key's own rows of dK and
            # dV, which the epilogue clears; dQ is what must not see it.
            words = cute.recast_tensor(self.flat(ds16), Int32)
            for half in cutlass.range_constexpr(2):
                if origin[0] + 8 * half >= work.seen.num_rows:
                    for x in cutlass.range_constexpr(half, cute.size(words), 2):
                        words[x] = Int32(0)
        self.store_transposed(ds16, ds_pointer + w * (m * BLOCK), thread)
        if cutlass.const_expr(not self.early_dv):
            self.mma(acc_dv, self.operand_a(p), do_columns, b_major=MN)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=NAMED_DS, number_of_threads=CONSUMERS * 128)

        acc_dq = self.accumulator(m if self.layout.transposed else 64)
        ds_rows = self.tile(ds_pointer, m, TILE_KEYS)
        if cutlass.const_expr(self.layout.split_queries):
            ds_rows = self.rows_of(w, ds_pointer, m, TILE_KEYS)
            k_columns = self.tile(self.key, TILE_KEYS, h, transposed=True)
            self.mma(acc_dq, ds_rows, k_columns, b_major=MN, zero=True)
        else:
            k_columns = self.tile(self.key + w * (TILE_KEYS * BLOCK), TILE_KEYS, BLOCK, True)
            if cutlass.const_expr(self.layout.transposed):
                self.mma(acc_dq, k_columns, ds_rows, a_major=MN, zero=True)
            else:
                self.mma(acc_dq, ds_rows, k_columns, b_major=MN, zero=True)
        if cutlass.const_expr(self.dk_after_dv):
            warpgroup.wait_group(1)  # dV
            self.dout_ring.release(i)
        self.mma(acc_dk, ds16, q_columns, b_major=MN)
        warpgroup.wait_group(1)  # dQ, and so dV
        if cutlass.const_expr(not self.dk_after_dv):
            self.dout_ring.release(i)

        cute.arch.barrier(barrier_id=NAMED_DQ_EMPTY + w, number_of_threads=128 + 32)
        place = cute.make_tensor(
            self.dq + (w * self.dq_block + thread * 4),
            cute.make_layout((4, self.dq_block // 512), stride=(1, 512)),
        )
        cute.autovec_copy(cute.make_tensor(acc_dq.iterator, cute.make_layout(place.shape)), place)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=NAMED_DQ_FULL + w, number_of_threads=128 + 32)

    @cute.jit
    def store_transposed(self, operand, place, thread: Int32):
        """dS^T fragment (64 keys x m queries) to rows of queries, 64 keys each, at ``place``.

        Lane l of a warp addresses one row of 8x8 matrix l // 8: queries 8 (l // 16) + l % 8,
        16-byte piece 2 warp + (l // 8) % 2 of the row, swizzled with the row's number modulo 8.
        """
        lane, warp = thread % 32, thread // 32
        piece = (2 * warp + lane // 8 % 2) ^ (lane % 8)
        place = place + ((lane // 16 * 8 + lane % 8) * BLOCK + piece * 8)
        words = cute.recast_tensor(self.flat(operand), Int32)
        for j in cutlass.range_constexpr(self.tile_m // 16):
            prims.stmatrix(
                place + j * (16 * BLOCK), [words[4 * j + x] for x in range(4)], prims.MMALayout.COL
            )

    @cute.jit
    def store_rows(self, operand, place, thread: Int32):
        """64 x h fragment to rows of a K-major tile of TILE_KEYS rows at ``place``.

        Lane l addresses row 16 warp + 8 ((l // 8) % 2) + l % 8, and of each pair of 16-byte
        pieces number l // 16.
        """
        lane, warp = thread % 32, thread // 32
        place = place + (warp * 16 + lane // 8 % 2 * 8 + lane % 8) * BLOCK
        first = (lane // 16) ^ (lane % 8)
        words = cute.recast_tensor(self.flat(operand), Int32)
        for j in cutlass.range_constexpr(self.head_dim // 16):
            offset = (first ^ (2 * j % 8)) * 8 + j // 4 * (TILE_KEYS * BLOCK)
            prims.stmatrix(
                place + offset, [words[4 * j + x] for x in range(4)], prims.MMALayout.ROW
            )


def variants() -> list[Backward]:
    return [
        Backward(dtype, head_dim, mask, capped)
        for dtype in DTYPES
        for head_dim in (64, 128)
        for mask, capped in (
            *((mask, False) for mask in MASKS),
            *((mask, True) for mask in ("window", "segments")),
        )
        # Segments and a soft cap together spill registers at 128 queries a tile. Head dimensions up
        # to 64 take the kernel for 128: at Hp = 64 its dQ accumulator has the same layout.
        if not (head_dim == 64 and mask == "segments" and capped)
    ]
