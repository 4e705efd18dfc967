"""FlashAttention forward for Hopper (sm_90a): out and log-sum-exp of one persistent kernel.

One CTA per SM takes query tiles of tile_m rows (64 per consumer warpgroup) one after another and
walks each tile's keys from the last visible one down, tile_n at a time. Variants differ in what of
the mask is compiled in (masks.py), which key tiles it skips or leaves unmasked included, and in
whether logits have a soft cap; sinks are part of the epilogue of all (softmax.py).

    warpgroup 0      producer: its first warp loads Q, K and V by TMA          24-32 registers
    warpgroup 1..W   consumers: 64 query rows each, S = Q K^T, softmax, O += P V   160-240

    ring     buffers  filled by      drained by
    query    1        TMA (producer) consumers, after the last Q K^T of a tile
    key      2        TMA (producer) consumers, after each Q K^T
    value    2        TMA (producer) consumers, after each P V
    out      W        consumers      TMA stores of each consumer's own 64 rows

The producer runs ahead over tile boundaries, so that a tile's epilogue hides the first loads of
the next. A consumer overlaps twice: its softmax of key tile i+1 runs while the tensor cores do
P V of tile i, and the consumers take turns issuing (named barriers), so that one's softmax also
hides behind the other's products.

    consumer:   S(1)=QK | S(2)=QK, O+=P(1)V | softmax S(2) | S(3)=QK, O+=P(2)V | ...

Shared memory, each buffer in blocks of 64 columns (32 if head_dim is no multiple of 64), rows of
128 (64) bytes, swizzled as TMA writes and wgmma reads them:

    query  tile_m x head_dim              key    2 x tile_n x head_dim
    out    W x 64 x head_dim              value  2 x tile_n x head_dim

Registers of a consumer thread: S tile_n/2, P tile_n/4, O head_dim/2, the rest under 40.

Padding: H, Hv and sequence ends inside a tile come as zeros from TMA and are clipped by its
stores. Value rows that no query of the batch element may look at are zeroed by the producer,
because 0 * NaN is NaN; other hidden scores are overwritten with -inf. (Rows of segments that no
query has arrive as zeros: fa4_jax/segments.py.)

Sources: FlashAttention-3 (arXiv 2407.08608) for the two overlaps; PTX ISA 9.7.15 (wgmma).
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.experimental.cuda as cuda
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.experimental import primitives as prims

from .. import abi
from ..masks import (
    KINDS,
    SEGMENTS,
    WINDOW,
    MaskKind,
    Problem,
    Visibility,
    fragment_origin,
    load,
    load_or,
)
from ..pipelines import Ring, keep_rows, load_boxes, wait
from ..schedulers import TileOrder, opaque
from ..softmax import (
    LOG2_E,
    OnlineSoftmax,
    cap_scores,
    convert,
    logit_scales,
    normalise,
    pack,
    rescale,
)

DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}
WARPGROUP = 128
STAGES = 2
# Registers of (producer, consumer) threads by number of consumer warpgroups: the sum over the CTA
# may not exceed what the launch allocates, 65,536 rounded down per thread to a multiple of 8.
REGISTERS = {2: (24, 240), 3: (32, 160)}
# Named barriers; 0 is the CTA's own.
TURN_BARRIER = 1  # + consumer: it may issue its products
OUT_BARRIER = 4  # + consumer: its 64 rows of the output buffer

TensorMap = cutlass.GridConstant[cuda.TensorMap]


@dataclasses.dataclass(frozen=True)
class Call:
    """The kernel's arguments, for the roles."""

    query: TensorMap
    key: TensorMap
    value: TensorMap
    out: TensorMap
    lse: cute.Pointer
    sinks: cute.Pointer
    problem: Problem


class Forward:
    """One variant of the forward kernel.

    Args:
      dtype: "bf16" or "f16".
      head_dim: tile of H and Hv, a multiple of 32.
      kind: what of the mask is compiled in.
      capped: whether logits have a soft cap.
      consumers: consumer warpgroups; tile_m is 64 times as many.
      tile_n: keys per tile, a multiple of 16.
    """

    def __init__(
        self,
        dtype: str,
        head_dim: int,
        kind: MaskKind,
        capped: bool,
        consumers: int,
        tile_n: int,
    ):
        self.dtype_name = dtype
        self.dtype = DTYPES[dtype]
        self.head_dim = head_dim
        self.kind = kind
        self.capped = capped
        self.consumers = consumers
        self.tile_m = 64 * consumers
        self.tile_n = tile_n
        self.producer_registers, self.consumer_registers = REGISTERS[consumers]
        self.box_columns = 64 if head_dim % 64 == 0 else 32
        self.boxes = head_dim // self.box_columns
        self.swizzle = 2 * self.box_columns

    def declaration(self) -> abi.KernelSpec:
        def tensor_map(operand: str, rows: int) -> abi.TensorMap:
            box = (self.box_columns, 1, rows, 1)
            return abi.TensorMap(operand, box=box, swizzle=self.swizzle)

        name = f"sm90_forward_{self.dtype_name}_h{self.head_dim}_{self.kind.name}"
        return abi.KernelSpec(
            name=name + "_capped" * self.capped,
            architecture="sm_90a",
            operation="forward",
            select={
                "dtype": self.dtype_name,
                "head_dim": self.head_dim,
                "mask": self.kind.name,
                "logits": "capped" if self.capped else "plain",
            },
            threads=WARPGROUP * (1 + self.consumers),
            grid=(f"T/{self.tile_m}", "N", "B"),
            ctas_per_sm=1,
            params=(
                tensor_map("query", self.tile_m),
                tensor_map("key", self.tile_n),
                tensor_map("value", self.tile_n),
                tensor_map("out", 64),
                abi.Pointer("lse"),
                abi.Pointer("sinks"),
                *abi.PROBLEM,
            ),
        )

    @cute.kernel
    def kernel(
        self,
        query: TensorMap,
        key: TensorMap,
        value: TensorMap,
        out: TensorMap,
        lse: cute.Pointer,
        sinks: cute.Pointer,
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
        problem = Problem(
            scale, query_seq_lengths, key_value_seq_lengths, query_offset,
            query_segment_ids, key_value_segment_ids, segment_bounds,
            batch_size, num_queries, num_keys, num_heads, num_kv_heads,
            window_left, window_right, logits_soft_cap,
        )  # fmt: skip
        call = Call(query, key, value, out, lse, sinks, problem)
        smem = cutlass.memory.SmemAllocator()
        self.query_tile = self.allocate(smem, self.tile_m)
        self.key_tiles = self.allocate(smem, self.tile_n, STAGES)
        self.value_tiles = self.allocate(smem, self.tile_n, STAGES)
        self.out_tiles = self.allocate(smem, 64, self.consumers)
        consumer_warps = 4 * self.consumers
        self.query_ring = Ring(1, consumer_warps)
        self.key_ring = Ring(STAGES, consumer_warps)
        self.value_ring = Ring(STAGES, consumer_warps)
        self.scrub_barrier = cutlass.Array(
            Int64, 1, space=cutlass.AddressSpace.smem, alignment=8
        ).data_ptr()

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        if thread == 0:
            for ring in (self.query_ring, self.key_ring, self.value_ring):
                ring.init()
            prims.mbarrier_init(self.scrub_barrier, 1)
        prims.fence_mbarrier_init()
        prims.barrier_cta_sync(0)

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                self.produce(call)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(call, thread - WARPGROUP, warp // 4 - 1)

    def allocate(
        self, smem: cutlass.memory.SmemAllocator, rows: int, stages: int = 1
    ) -> cute.Tensor:
        """A (rows, head_dim, stages) buffer: column blocks as TMA fills them, swizzled."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW128 if self.swizzle == 128 else kinds.K_SW64
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        layout = cute.tile_to_shape(atom, (rows, self.head_dim, stages), order=(0, 1, 2))
        return smem.allocate_tensor(
            self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )

    def block_pointer(self, tiles: cute.Tensor, rows: int, stage: Int32) -> cute.Pointer:
        """Unswizzled address of one stage of a buffer."""
        base = cute.make_ptr(
            self.dtype, tiles.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024
        )
        return base + stage * (rows * self.head_dim)

    # What both roles compute about a tile.

    def order(self, call: Call) -> TileOrder:
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        problem = call.problem
        row_tiles = (problem.num_queries + (self.tile_m - 1)) // self.tile_m
        num_heads = problem.batch_size * problem.num_heads
        return TileOrder(problem.is_causal(self.kind), row_tiles, num_heads, num_ctas, cta)

    def place(self, call: Call, row_tile: Int32, batch_head: Int32) -> tuple[Int32, ...]:
        """(head, first row, batch element) of a tile of the order."""
        num_heads = call.problem.num_heads
        batch, head = batch_head // num_heads, batch_head % num_heads
        return head, row_tile * self.tile_m, batch

    # Producer: one warp.

    @cute.jit
    def produce(self, call: Call):
        problem = call.problem
        order = self.order(call)
        k = Int32(0)  # uses of the key and value rings so far
        queries = Int32(0)  # uses of the query ring
        scrubs = Int32(0)  # uses of the scrub barrier
        for step in cutlass.range(order.num_steps(), unroll=1):
            row_tile, batch_head, exists = order.tile(step)
            if exists:
                head, first_row, batch = self.place(call, row_tile, batch_head)
                kv_head = head // (problem.num_heads // problem.num_kv_heads)
                visibility = Visibility.of_batch(self.kind, batch, problem)
                begin, end = visibility.tiles(first_row, self.tile_m, self.tile_n)
                seen_begin, seen_end = visibility.all_columns()
                if begin < end:
                    self.query_ring.acquire(queries)
                    self.load(
                        self.query_tile, self.tile_m, Int32(0), call.query,
                        self.query_ring.full(queries), (0, head, first_row, batch),
                    )  # fmt: skip
                    queries += 1
                    for i in cutlass.range(end - begin + 1, unroll=1):
                        tile = end - 1 - i
                        if tile >= begin:
                            self.key_ring.acquire(k)
                            self.load(
                                self.key_tiles, self.tile_n, self.key_ring.stage(k), call.key,
                                self.key_ring.full(k), (0, kv_head, tile * self.tile_n, batch),
                            )  # fmt: skip
                        if i > 0:
                            first = (tile + 1) * self.tile_n
                            keep_from = cutlass.max(seen_begin - first, Int32(0))
                            keep_to = cutlass.min(seen_end - first, Int32(self.tile_n))
                            partial = (keep_from > 0) | (
                                (keep_to < self.tile_n) & (seen_end < problem.num_keys)
                            )
                            previous = k - 1
                            self.value_ring.acquire(previous)
                            full = self.value_ring.full(previous)
                            landing = full
                            if partial:
                                landing = self.scrub_barrier
                            self.load(
                                self.value_tiles, self.tile_n, self.value_ring.stage(previous),
                                call.value, landing, (0, kv_head, first, batch),
                            )  # fmt: skip
                            if partial:
                                wait(self.scrub_barrier, scrubs & 1)
                                scrubs += 1
                                self.scrub(previous, keep_from, keep_to)
                                if prims.elect_sync():
                                    prims.mbarrier_arrive(full)
                        k += 1
                    k -= 1

    def load(self, tiles, rows: int, stage: Int32, tensor_map, barrier, coordinates: tuple):
        load_boxes(
            self.block_pointer(tiles, rows, stage), tensor_map.get_ptr(), barrier, coordinates,
            self.boxes, self.box_columns, rows,
        )  # fmt: skip

    def scrub(self, use: Int32, keep_from: Int32, keep_to: Int32):
        """Zeroes the rows of a value tile outside [keep_from, keep_to)."""
        tile = self.block_pointer(self.value_tiles, self.tile_n, self.value_ring.stage(use))
        keep_rows(tile, keep_from, keep_to, self.boxes, self.box_columns, self.tile_n)

    # Consumers: one warpgroup each.

    def products(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S = Q K^T with both operands in shared memory; O += P V with P in registers."""
        sources = warpgroup.OperandSource
        atoms = (self.consumers, 1, 1)
        qk = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (64, self.tile_n, 16),
            sources.SMEM, OperandMajorMode.K, OperandMajorMode.K,
        )  # fmt: skip
        pv = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (64, self.head_dim, 16),
            sources.RMEM, OperandMajorMode.K, OperandMajorMode.MN,
        )  # fmt: skip
        return cute.make_tiled_mma(qk, atoms), cute.make_tiled_mma(pv, atoms)

    @cute.jit
    def consume(self, call: Call, thread: Int32, consumer: Int32):
        problem = call.problem
        order = self.order(call)
        qk, pv = self.products()
        # Only the thread's warpgroup matters, and this one the compiler knows to be uniform.
        qk_thread, pv_thread = (mma.get_slice(consumer * WARPGROUP) for mma in (qk, pv))
        value_transposed = cute.make_tensor(
            self.value_tiles.iterator, cute.select(self.value_tiles.layout, mode=[1, 0, 2])
        )
        operands = (
            qk.make_fragment_A(qk_thread.partition_A(self.query_tile[None, None, 0])),
            qk.make_fragment_B(qk_thread.partition_B(self.key_tiles)),
            pv.make_fragment_B(pv_thread.partition_B(value_transposed)),
        )
        shape_p = pv_thread.partition_shape_A((self.tile_m, self.tile_n))
        scores = qk.make_fragment_C(qk_thread.partition_shape_C((self.tile_m, self.tile_n)))
        output = pv.make_fragment_C(pv_thread.partition_shape_C((self.tile_m, self.head_dim)))
        weights = cute.make_rmem_tensor(shape_p, self.dtype)
        fragments = (scores, weights, output)

        row, column = fragment_origin(thread % WARPGROUP)
        row += 64 * consumer
        if consumer == self.consumers - 1:
            prims.barrier_cta_arrive_aligned(TURN_BARRIER, 2 * WARPGROUP)

        k = Int32(0)
        queries = Int32(0)
        for step in cutlass.range(order.num_steps(), unroll=1):
            row_tile, batch_head, exists = order.tile(step)
            if exists:
                _, first_row, batch = self.place(call, row_tile, batch_head)
                visibility = Visibility.of_batch(self.kind, batch, problem)
                begin, end = visibility.tiles(first_row, self.tile_m, self.tile_n)
                clear_begin, clear_end = visibility.unmasked_tiles(
                    first_row, self.tile_m, self.tile_n
                )
                scale = load(problem.scale, batch)
                soft_cap = problem.logits_soft_cap if self.capped else None
                scale_log2, cap_factor = logit_scales(scale, soft_cap)
                softmax = OnlineSoftmax.start(scale_log2)
                output.fill(0.0)
                place = (visibility, first_row + row, column)
                work = (operands, fragments, softmax, consumer, cap_factor, place)

                if begin < end:
                    self.query_ring.wait_full(queries)
                    if scale < 0.0:  # logit_scales' factors are positive
                        self.negate_queries(thread % WARPGROUP, consumer)
                    # The last tile, always masked: it is the one that may be partial.
                    self.key_ring.wait_full(k)
                    self.multiply_qk(operands, scores, k)
                    warpgroup.wait_group(0)
                    self.key_ring.release(k)
                    self.transform(work, end - 1, True)
                    softmax.update(scores)
                    convert(scores, weights, self.dtype)

                    clear_end = cutlass.min(clear_end, end - 1)
                    clear_begin = cutlass.min(clear_begin, clear_end)
                    if cutlass.const_expr(self.capped):
                        # One loop: with three, ptxas spills.
                        for tile in cutlass.range(end - 2, begin - 1, -1, unroll=1):
                            masked = (tile < clear_begin) | (tile >= clear_end)
                            self.step(work, k, tile, masked)
                            k += 1
                    else:
                        if cutlass.const_expr(self.kind.right):
                            for tile in cutlass.range(end - 2, clear_end - 1, -1, unroll=1):
                                self.step(work, k, tile, True)
                                k += 1
                        for tile in cutlass.range(clear_end - 1, clear_begin - 1, -1, unroll=1):
                            self.step(work, k, tile, False)
                            k += 1
                        if cutlass.const_expr(self.kind.left):
                            for tile in cutlass.range(clear_begin - 1, begin - 1, -1, unroll=1):
                                self.step(work, k, tile, True)
                                k += 1

                    self.query_ring.release(queries)
                    queries += 1
                    self.value_ring.wait_full(k)
                    self.multiply_pv(operands, fragments, k)
                    warpgroup.wait_group(0)
                    self.value_ring.release(k)
                    k += 1

                # Once more, and not kept in registers through the loops.
                row_tile, batch_head, _ = order.tile(step)
                place = self.place(call, row_tile, batch_head)
                self.epilogue(call, output, softmax, visibility, place, thread, consumer)
        if consumer == 0:  # take back the turn that is left over
            prims.barrier_cta_sync_aligned(TURN_BARRIER, thread_count=2 * WARPGROUP)
        if thread % WARPGROUP == 0:
            prims.cp_async_bulk_wait_group(0)

    @cute.jit
    def step(self, work, k: Int32, tile: Int32, masked):
        """Products S(k+1) and O += P(k) V(k) together; softmax of S(k+1) under the latter."""
        operands, fragments, softmax, consumer, _, _ = work
        scores, weights, output = fragments
        self.key_ring.wait_full(k + 1)
        prims.barrier_cta_sync_aligned(TURN_BARRIER + consumer, thread_count=2 * WARPGROUP)
        self.multiply_qk(operands, scores, k + 1)
        self.value_ring.wait_full(k)
        self.multiply_pv(operands, fragments, k)
        following = cutlass.select_(consumer == self.consumers - 1, Int32(0), consumer + 1)
        prims.barrier_cta_arrive_aligned(TURN_BARRIER + following, 2 * WARPGROUP)
        warpgroup.wait_group(1)
        self.key_ring.release(k + 1)
        early = self.kind.segments and masked is not False
        if cutlass.const_expr(early):  # comparing ids takes the registers of P
            warpgroup.wait_group(0)
        self.transform(work, tile, masked)
        factors = softmax.update(scores)
        if cutlass.const_expr(not early):
            warpgroup.wait_group(0)
        self.value_ring.release(k)
        convert(scores, weights, self.dtype)
        rescale(output, factors)

    def multiply_qk(self, operands, scores, k: Int32):
        self.issue(0, scores, operands[0], operands[1][None, None, None, self.key_ring.stage(k)])

    def multiply_pv(self, operands, fragments, k: Int32):
        _, weights, output = fragments
        value = operands[2][None, None, None, self.value_ring.stage(k)]
        self.issue(1, output, weights, value)

    def issue(self, which: int, accumulator, a, b):
        """Issues and commits one product; S starts at zero, O accumulates."""
        mma = self.products()[which]
        warpgroup.fence()
        for block in range(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, which == 1 or block > 0)
            cute.gemm(mma, accumulator, a[None, None, block], b[None, None, block], accumulator)
        warpgroup.commit_group()

    @cute.jit
    def transform(self, work, tile: Int32, masked):
        """Caps the scores of a key tile, and hides what is masked if ``masked`` (maybe traced)."""
        _, (scores, _, _), _, _, cap_factor, (visibility, row, column) = work
        if cutlass.const_expr(self.capped):
            cap_scores(scores, cap_factor)
        if masked:
            visibility.mask_fragment(scores, row, tile * self.tile_n + column)

    @cute.jit
    def negate_queries(self, thread: Int32, consumer: Int32):
        """Flips the signs of this consumer's 64 query rows in shared memory (negative scale)."""
        words = self.box_columns // 2
        base = cute.recast_ptr(
            self.block_pointer(self.query_tile, self.tile_m, Int32(0)), dtype=Int32
        )
        memory = cute.make_tensor(base, cute.make_layout(self.tile_m * self.head_dim // 2))
        for box in cutlass.range_constexpr(self.boxes):
            first = (box * self.tile_m + consumer * 64) * words
            for i in cutlass.range(thread, 64 * words, WARPGROUP, unroll=1):
                memory[first + i] = memory[first + i] ^ Int32(-0x7FFF8000)
        prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
        prims.barrier_cta_sync_aligned(OUT_BARRIER + consumer, thread_count=WARPGROUP)

    @cute.jit
    def epilogue(self, call: Call, output, softmax, visibility, place, thread, consumer):
        """Normalises, writes lse from registers and out through shared memory and TMA."""
        head, first_row, batch = place
        problem = call.problem
        # All addresses below follow from it.
        thread = opaque(thread % WARPGROUP)
        row, _ = fragment_origin(thread)
        row += first_row + 64 * consumer
        sink = load_or(call.sinks, batch * problem.num_heads + head, -Float32.inf)
        results = softmax.finish(sink * LOG2_E)
        scales = []
        for half in cutlass.range_constexpr(2):
            inverse, lse = results[half]
            this_row = row + 8 * half
            real = this_row < visibility.num_rows
            scales.append(Float32(cutlass.select_(real, inverse, Float32(0.0))))
            if (thread % 4 == 0) & (this_row < problem.num_queries):
                index = (Int64(batch) * problem.num_queries + this_row) * problem.num_heads + head
                target = cute.make_tensor(call.lse + index, cute.make_layout(1))
                target[0] = Float32(cutlass.select_(real, lse, -Float32.inf))
        normalise(output, scales)

        if thread == 0:  # the previous tile's store has read the buffer
            prims.cp_async_bulk_wait_group(0, read=True)
        prims.barrier_cta_sync_aligned(OUT_BARRIER + consumer, thread_count=WARPGROUP)
        self.store_fragment(output, thread, consumer)
        prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
        prims.barrier_cta_sync_aligned(OUT_BARRIER + consumer, thread_count=WARPGROUP)
        if thread == 0:
            source = self.block_pointer(self.out_tiles, 64, consumer)
            for box in cutlass.range_constexpr(self.boxes):
                prims.cp_async_bulk_tensor_global_shared_cta(
                    call.out.get_ptr(),
                    source + box * (64 * self.box_columns),
                    (box * self.box_columns, head, first_row + 64 * consumer, batch),
                )
            prims.cp_async_bulk_commit_group()

    def store_fragment(self, output, thread: Int32, consumer: Int32):
        """Rounds O and writes it to this consumer's output buffer, 16 columns a stmatrix.

        Matrix m of a stmatrix takes rows ``8 * (m % 2)`` and columns ``8 * (m // 2)`` of the 16 x
        16 block; lane l gives the address of row l % 8 of matrix l // 8. The 16-byte piece within
        a row is XORed with the address bits that the swizzle takes (bits 7-9, or 7-8 for 64 B).
        """
        lane = thread % 32
        row = 16 * (thread // 32) + lane % 16
        swizzle = row % 8 if self.swizzle == 128 else row // 2 % 4
        piece = lane // 16 ^ swizzle
        base = self.block_pointer(self.out_tiles, 64, consumer)
        for block in range(self.head_dim // 16):
            box, column = divmod(16 * block, self.box_columns)
            offset = (64 * box + row) * self.box_columns + 8 * (piece ^ column // 8)
            words = [
                pack(output[8 * block + 2 * m], output[8 * block + 2 * m + 1], self.dtype)
                for m in range(4)
            ]
            prims.stmatrix(base + offset, words, prims.MMALayout.ROW)


def variants() -> list[Forward]:
    """All forward kernels, with the tiles that measured best (NOTES.md)."""
    tiles = {64: (3, 128), 96: (3, 96), 128: (2, 128)}
    return [
        Forward(dtype, head_dim, kind, capped, consumers, tile_n)
        for dtype in DTYPES
        for head_dim, (consumers, tile_n) in tiles.items()
        for kind, capped in (
            *((kind, False) for kind in KINDS),
            *((kind, True) for kind in (WINDOW, SEGMENTS)),
        )
    ]
