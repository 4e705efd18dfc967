"""FlashAttention-4 forward for Blackwell (sm_100a, sm_103a): out and log-sum-exp, one kernel.

One persistent CTA per SM takes pairs of 128-row query tiles (stages 0 and 1) one pair after
another and walks their keys from the last visible tile of 128 down. While the tensor cores work
on one stage, the other stage's softmax runs.

                                                         registers:  H = 64  sm_103a  sm_103a*
    warps        role
    0-3, 4-7     softmax of stage 0 and 1, a thread a query row      192     200      176      184
    8-11         correction: rescales O, normalises, writes lse       72      64       64       80
    12           MMA: allocates tensor memory, issues products        56      48       96       64
    13, 14, 15   TMA stores of out; TMA loads; idle                   56      48       96       64
    * with segments, whose bounds the correction warps read, or a soft cap

Per stage s and key tile j (S, P, O are the stage's; -> is an mbarrier):

    MMA          S = Q K(j)'                            -> softmax    scores
    softmax      S = tanh(S / cap), hidden S = -inf (variants and tiles that need it)
                 m = running maximum of S               -> correction factor (not for the first j)
                 P = exp2(S - m), first 96 columns      -> MMA        ready    } both halves of
    correction   O *= factor if any row of a warp moved -> MMA        ready    } `ready`
    softmax      the last 32 columns of P               -> MMA        tail
    MMA          O += P V(j), then S of key tile j - 1
      after the last j:                                 -> correction output
    softmax      sum and exponent of the maximum        -> correction factor (as one more message)
    correction   the sink joins the sum, O / sum        -> store      out ring
                 (O has been read)                      -> MMA        ready of the next first j

    ring     buffers    filled by        drained by
    query    1 a stage  TMA (load warp)  commit of the last S of the stage
    kv       3 to 10    TMA (load warp)  commits of the products; K(j), V(j), K(j-1), ...
    message  1 a stage  softmax          correction
    out      1 a stage  correction       store warp, when TMA has read it

Each stage has its own range of key tiles, so that causal masks waste no products; a tile that
only one stage sees is used by that stage alone. Segments shrink the ranges by the bounds of the
stage's blocks of 64 rows, and only tiles that those do not clear compare ids: each lane of a
softmax warp loads four of the tile's ids and the lanes pass them round.

Packing: where T is short, a tile holds several query heads of one kv head. Row r is position
r // pack of head r % pack. A packed tile holds all T positions (T pack <= 128), so the other tiles
are past the end, and ranges and masks, which count positions, are as without packing.

Shared memory, buffers in blocks of 64 columns (the second half empty at H = 96), rows of 128 bytes,
swizzled as TMA writes and tcgen05 reads them:

    H = 128, 96: query 2 x 32 KiB   out 2 x 32 KiB   kv 3 x 32 KiB (pairs: 6 x 16 KiB)
    H = 64:      query 2 x 16 KiB   out 2 x 16 KiB   kv 10 x 16 KiB
    messages: 2 stages x 2 numbers x 128 rows

Tensor memory, 512 columns of 128 lanes; row i of a query tile is lane i:

    S0 0-127 (P0 64-127)    S1 128-255 (P1 192-255)    O0 256-256+H    O1 after it

P overlays the upper half of its own S, two 16-bit weights a column, and is operand A of P V.

Pairs of CTAs (ctas = 2): the pair takes 512 rows, stage s of CTA r being rows 256 s + 128 r. The
products have M = 256 and are issued by CTA 0 for both. Each CTA holds half of the keys of K(j) and
half of the columns of V(j): half the shared memory traffic of these operands and 6 kv buffers.
Barriers that the MMA warp waits on belong to CTA 0 and take arrivals of both; commits go to both.

Rescaling is conditional (see softmax.py) and the sum relative to the same reference, so results
are exact. A negative scale negates operand A of Q K'. Padding: H, Hv and sequence ends inside a
tile come as zeros from TMA and are clipped by its stores. Value rows that no query of the batch
element may look at are zeroed by the load warp, because 0 * NaN is NaN; other hidden scores are
overwritten with -inf. A NaN that a row does see makes all of the row NaN.

Sources: FlashAttention-4 (arXiv 2603.05451); PTX ISA 9.7.16 (tcgen05).
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.experimental.cuda as cuda
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from .. import abi
from ..masks import (
    FULL,
    KINDS,
    SEGMENTS,
    WINDOW,
    MaskKind,
    Problem,
    Visibility,
    load,
    load_or,
)
from ..pipelines import keep_rows, wait
from ..schedulers import TileOrder
from ..softmax import LOG2_E, logit_scales, pack
from . import tensor_memory as tmem
from .pipelines import Channel, Cursor, LoadRing, Use, barriers
from .softmax import (
    RowMask,
    RowSoftmax,
    add2,
    add_pairs,
    cap_row,
    finish_row,
    maximum,
    row_maximum,
    scale2,
    spread_pairs,
)

DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}
STAGES = 2  # query tiles in flight
TILE = 128  # rows of a query tile, keys of a key tile
WARPS = 16
SOFTMAX_WARPS = 4  # of one stage; as many correct
CORRECTION_WARP, MMA_WARP, STORE_WARP, LOAD_WARP = 8, 12, 13, 14
# P goes out in fragments of 32 columns; the products of all but the last start before it is ready.
FRAGMENT = 32
FRAGMENTS = TILE // FRAGMENT
HEAD_STEPS = (FRAGMENTS - 1) * FRAGMENT // tmem.MMA_K
# Registers of softmax, correction and other threads; 8 a + 4 b + 4 c = 2048 (65,536 / 32).
REGISTERS = (192, 72, 56)
REGISTERS_H64 = (200, 64, 48)
REGISTERS_SM103 = (176, 64, 96)  # no polynomials
REGISTERS_SM103_WIDE = (184, 80, 64)  # segments or a soft cap
SMALL_SHARED = 3072  # bytes for messages and barriers, with the alignment of the buffers
CHUNK = 16  # columns of O that a correction thread holds at a time

TensorMap = cutlass.GridConstant[cuda.TensorMap]


@dataclasses.dataclass(frozen=True)
class Call:
    """The kernel's arguments, for the roles.

    Attributes:
      heads_per_tile: how many query heads of one kv head a tile packs.
    """

    query: TensorMap
    key: TensorMap
    value: TensorMap
    out: TensorMap
    lse: cute.Pointer
    sinks: cute.Pointer
    heads_per_tile: Int32
    problem: Problem

    def packs(self) -> Int32:
        """Packs of query heads in a batch element."""
        return self.problem.num_heads // self.heads_per_tile


@dataclasses.dataclass(frozen=True)
class Work:
    """One CTA's (or pair's) share of a pack of heads: where it is and which key tiles it needs.

    Attributes:
      batch, head: of the queries; the first head of a pack.
      first_rows: per stage, this CTA's first query position.
      visibility: the mask of the batch element.
      begin, end: range of key tiles that any stage needs.
      begins, ends: that of each stage; empty ranges are (0, 0).
    """

    batch: Int32
    head: Int32
    first_rows: tuple[Int32, ...]
    visibility: Visibility
    begin: Int32
    end: Int32
    begins: tuple[Int32, ...]
    ends: tuple[Int32, ...]

    def needs(self, stage: int, tile: Int32) -> Boolean:
        return (self.begins[stage] <= tile) & (tile < self.ends[stage])


class Forward:
    """One variant of the forward kernel.

    Args:
      architecture: "sm_100a" or "sm_103a".
      dtype: "bf16" or "f16".
      head_dim: tile of H and Hv: 64, 96 or 128.
      kind: which parts of the mask are compiled in.
      capped: whether logits have a soft cap.
      ctas: CTAs that share a product, 1 or 2.
      emulated_pairs: how many of a row's 64 pairs of exponentials the FMA units compute.
    """

    def __init__(
        self,
        architecture: str,
        dtype: str,
        head_dim: int,
        kind: MaskKind,
        capped: bool,
        ctas: int,
        emulated_pairs: int,
    ):
        self.architecture = architecture
        self.dtype_name = dtype
        self.dtype = DTYPES[dtype]
        self.head_dim = head_dim
        self.kind = kind
        self.capped = capped
        self.ctas = ctas
        self.group = prims.CTAGroup.CTA_1 if ctas == 1 else prims.CTAGroup.CTA_2
        # The first fragment overlaps the maximum's latency, the last one everybody waits for.
        self.emulated = spread_pairs(emulated_pairs, range(1, FRAGMENTS - 1), FRAGMENT // 2)
        if architecture == "sm_103a":
            self.registers = REGISTERS_SM103_WIDE if kind.segments or capped else REGISTERS_SM103
        else:
            self.registers = REGISTERS_H64 if head_dim == 64 else REGISTERS

        self.query_operand = tmem.OperandTile(TILE)
        self.key_operand = tmem.OperandTile(TILE // ctas)
        self.value_operand = tmem.OperandTile(TILE)
        self.boxes = -(-head_dim // tmem.BOX_COLUMNS)
        self.value_boxes = self.boxes // ctas
        self.query_elements = TILE * self.boxes * tmem.BOX_COLUMNS
        self.kv_elements = self.query_elements // ctas
        free = abi.SHARED_LIMIT - SMALL_SHARED - 2 * (2 * STAGES * self.query_elements)
        self.kv_stages = free // (2 * self.kv_elements)
        self.loads_maxima = architecture == "sm_103a" and not capped  # tcgen05.ld.red

    def declaration(self) -> abi.KernelSpec:
        def tensor_map(operand: str, rows: int, packed: bool = False) -> abi.TensorMap:
            box = (tmem.BOX_COLUMNS, 1, rows, 1)
            return abi.TensorMap(operand, box=box, swizzle=tmem.ROW_BYTES, packed=packed)

        arch = self.architecture.removeprefix("sm_").rstrip("a")
        return abi.KernelSpec(
            name=f"sm{arch}_forward_{self.dtype_name}_h{self.head_dim}_{self.kind.name}"
            + ("_capped" if self.capped else "")
            + ("_pair" if self.ctas == 2 else ""),
            architecture=self.architecture,
            operation="forward",
            select={
                "dtype": self.dtype_name,
                "head_dim": self.head_dim,
                "mask": self.kind.name,
                "logits": "capped" if self.capped else "plain",
            },
            threads=32 * WARPS,
            cluster=(self.ctas, 1, 1),
            grid=(f"T/{self.ctas * STAGES * TILE}", self.ctas, "packed_N", "B"),
            ctas_per_sm=1,
            params=(
                tensor_map("query", TILE, packed=True),
                tensor_map("key", self.key_operand.rows),
                tensor_map("value", TILE),
                tensor_map("out", TILE, packed=True),
                abi.Pointer("lse"),
                abi.Pointer("sinks"),
                abi.S32("pack"),
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
        heads_per_tile: Int32,
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
        call = Call(query, key, value, out, lse, sinks, heads_per_tile, problem)
        self.allocate()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        if warp == MMA_WARP:
            if prims.elect_sync():
                for barrier in self.barriers:
                    barrier.init()
                prims.mbarrier_init(self.scrub_barrier, 1)
            prims.fence_mbarrier_init()
            prims.tcgen05_alloc(self.tmem_address, tmem.COLUMNS, group=self.group)
            prims.tcgen05_relinquish_alloc_permit(group=self.group)
        self.synchronise()
        softmax_registers, correction_registers, other_registers = self.registers
        if warp < CORRECTION_WARP:
            cute.arch.setmaxregister_increase(softmax_registers)
            for stage in cutlass.range_constexpr(STAGES):
                if warp // SOFTMAX_WARPS == stage:
                    self.weigh(call, thread % TILE, stage)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(correction_registers)
            self.correct(call, thread % TILE)
        else:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == MMA_WARP:
                if self.rank() == 0:
                    self.multiply(call)
            elif warp == STORE_WARP:
                self.store(call)
            elif warp == LOAD_WARP:
                self.load(call)
        self.synchronise()  # nobody uses tensor memory, or waits for the peer's arrivals, any more
        if warp == MMA_WARP:
            tmem.fence_after()
            prims.tcgen05_dealloc(
                prims.make_tmem_ptr(Int32(0), Float32), tmem.COLUMNS, group=self.group
            )

    def allocate(self) -> None:
        """Shared memory: large buffers first, on 1024-byte boundaries as swizzling wants."""
        smem = cutlass.AddressSpace.smem

        def buffer(elements: int) -> cutlass.Pointer:
            return cutlass.Array(self.dtype, elements, space=smem, alignment=1024).data_ptr()

        self.query_tiles = buffer(STAGES * self.query_elements)
        self.out_tiles = buffer(STAGES * self.query_elements)
        self.kv_tiles = buffer(self.kv_stages * self.kv_elements)
        self.messages = cutlass.Array(
            Float32, STAGES * 2 * TILE, space=smem, alignment=16
        ).data_ptr()

        pair = self.ctas == 2
        warps = SOFTMAX_WARPS
        self.kv_ring = LoadRing(self.kv_stages, self.ctas)
        self.query_rings = [LoadRing(1, self.ctas) for _ in range(STAGES)]
        self.scores = [Channel(1) for _ in range(STAGES)]
        self.ready = [Channel(2 * warps * self.ctas, pair) for _ in range(STAGES)]
        self.tail = [Channel(warps * self.ctas, pair) for _ in range(STAGES)]
        self.output = [Channel(1) for _ in range(STAGES)]
        self.message = [Channel(warps) for _ in range(STAGES)]
        self.message_read = [Channel(warps) for _ in range(STAGES)]
        self.out_full = [Channel(warps) for _ in range(STAGES)]
        self.out_free = [Channel(1) for _ in range(STAGES)]
        self.barriers = [
            self.kv_ring, *self.query_rings, *self.scores, *self.ready, *self.tail, *self.output,
            *self.message, *self.message_read, *self.out_full, *self.out_free,
        ]  # fmt: skip
        self.scrub_barrier = barriers(1)
        self.tmem_address = cutlass.Array(Int32, 1, space=smem, alignment=4)

    def synchronise(self) -> None:
        """All threads of the CTA, or of both CTAs of a pair."""
        if self.ctas == 1:
            prims.barrier_cta_sync(0)
        else:
            prims.barrier_cluster_arrive()
            prims.barrier_cluster_wait()

    # What all roles compute about their work.

    def rank(self) -> Int32:
        """This CTA's place in its pair."""
        return Int32(0) if self.ctas == 1 else cute.arch.block_idx_in_cluster()

    def order(self, call: Call) -> TileOrder:
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        rows = self.ctas * STAGES * TILE
        row_tiles = (call.problem.num_queries + (rows - 1)) // rows
        packs = call.problem.batch_size * call.packs()
        causal = call.problem.is_causal(self.kind)
        return TileOrder(causal, row_tiles, packs, num_ctas // self.ctas, cta // self.ctas)

    def work(self, call: Call, row_tile: Int32, head_pack: Int32) -> Work:
        packs = call.packs()
        batch, head = head_pack // packs, head_pack % packs * call.heads_per_tile
        visibility = Visibility.of_batch(self.kind, batch, call.problem)
        rows = self.ctas * TILE
        firsts = [row_tile * (STAGES * rows) + stage * rows for stage in range(STAGES)]
        begins, ends = zip(*(visibility.tiles(first, rows, TILE) for first in firsts), strict=True)
        # An empty range, (0, 0), must not stretch that of the other stage.
        begin_0 = cutlass.select_(ends[0] == 0, begins[1], begins[0])
        begin_1 = cutlass.select_(ends[1] == 0, begins[0], begins[1])
        return Work(
            batch,
            head,
            tuple(first + self.rank() * TILE for first in firsts),
            visibility,
            cutlass.min(begin_0, begin_1),
            cutlass.max(*ends),
            begins,
            ends,
        )

    # Load: one warp.

    @cute.jit
    def load(self, call: Call):
        order = self.order(call)
        uses = self.kv_ring.cursor()
        queries = [ring.cursor() for ring in self.query_rings]
        scrubs = Int32(0)  # uses of the scrub barrier
        for step in cutlass.range(order.num_steps(), unroll=1):
            row_tile, head_pack, exists = order.tile(step)
            if exists:
                work = self.work(call, row_tile, head_pack)
                kv_head = work.head // (call.problem.num_heads // call.problem.num_kv_heads)
                seen_begin, seen_end = work.visibility.all_columns()
                rank = self.rank()
                for i in cutlass.range(work.end - work.begin, unroll=1):
                    first = (work.end - 1 - i) * TILE
                    if i == 0:
                        self.load_query(call, work, queries[0], 0)
                    use = uses.use()
                    self.kv_ring.wait_empty(use)
                    key_row = first + rank * self.key_operand.rows
                    self.kv_ring.load(
                        use, self.kv_tile(use), call.key, (0, kv_head, key_row, work.batch),
                        self.boxes, self.key_operand.rows,
                    )  # fmt: skip
                    if i == 0:
                        self.load_query(call, work, queries[1], 1)
                    use = uses.advance()
                    keep_from = cutlass.max(seen_begin - first, Int32(0))
                    keep_to = cutlass.min(seen_end - first, Int32(TILE))
                    hides_end = (keep_to < TILE) & (seen_end < call.problem.num_keys)
                    column = rank * (self.value_boxes * tmem.BOX_COLUMNS)
                    place = (column, kv_head, first, work.batch)
                    self.kv_ring.wait_empty(use)
                    if (keep_from > 0) | hides_end:
                        self.load_scrubbed(
                            call, self.kv_tile(use), place, keep_from, keep_to, scrubs
                        )
                        scrubs += 1
                        self.kv_ring.arrive(use)
                    else:
                        self.kv_ring.load(
                            use, self.kv_tile(use), call.value, place, self.value_boxes, TILE
                        )
                    uses.advance()

    def kv_tile(self, use: Use) -> cutlass.Pointer:
        return self.kv_tiles + use.stage * self.kv_elements

    @cute.jit
    def load_query(self, call: Call, work: Work, uses: Cursor, stage: cutlass.Constexpr[int]):
        if work.begins[stage] < work.ends[stage]:
            ring = self.query_rings[stage]
            ring.wait_empty(uses.use())
            ring.load(
                uses.use(), self.query_tiles + stage * self.query_elements, call.query,
                (0, work.head, work.first_rows[stage], work.batch), self.boxes, TILE,
            )  # fmt: skip
            uses.advance()

    @cute.jit
    def load_scrubbed(self, call: Call, tile, place: tuple, keep_from, keep_to, scrubs):
        """Loads a value tile and zeroes its rows outside [keep_from, keep_to)."""
        elements = TILE * tmem.BOX_COLUMNS
        if prims.elect_sync():
            prims.mbarrier_arrive_expect_tx(self.scrub_barrier, self.value_boxes * elements * 2)
            for i in cutlass.range_constexpr(self.value_boxes):
                prims.cp_async_bulk_tensor_shared_cta_global(
                    tile + i * elements, call.value.get_ptr(),
                    (place[0] + i * tmem.BOX_COLUMNS, *place[1:]), self.scrub_barrier,
                )  # fmt: skip
        wait(self.scrub_barrier, scrubs & 1)
        keep_rows(tile, keep_from, keep_to, self.value_boxes, tmem.BOX_COLUMNS, TILE)

    # MMA: one warp, of the first CTA of a pair.

    @cute.jit
    def multiply(self, call: Call):
        order = self.order(call)
        uses = self.kv_ring.cursor()
        queries = [ring.cursor() for ring in self.query_rings]
        rounds = cute.make_rmem_tensor(STAGES, Int32)  # products P V
        rounds.fill(0)
        for step in cutlass.range(order.num_steps(), unroll=1):
            row_tile, head_pack, exists = order.tile(step)
            if exists:
                work = self.work(call, row_tile, head_pack)
                if work.begin < work.end:
                    scale = load(call.problem.scale, work.batch)
                    sign = Int32(cutlass.select_(scale < 0.0, Int32(tmem.NEGATE_A), Int32(0)))
                    key = uses.use()
                    self.kv_ring.wait_full(key)
                    for stage in cutlass.range_constexpr(STAGES):
                        self.multiply_qk(work, sign, queries[stage], work.end - 1, key, stage)
                    self.release(key)
                    for i in cutlass.range(work.end - work.begin, unroll=1):
                        tile = work.end - 1 - i
                        more = tile > work.begin
                        value = uses.advance()
                        key = uses.advance()  # if there is no more, of the next work
                        self.kv_ring.wait_full(value)
                        self.multiply_pv(work, rounds, tile, value, 0)
                        if more:
                            self.kv_ring.wait_full(key)
                            self.multiply_qk(work, sign, queries[0], tile - 1, key, 0)
                        self.multiply_pv(work, rounds, tile, value, 1)
                        self.release(value)
                        if more:
                            self.multiply_qk(work, sign, queries[1], tile - 1, key, 1)
                            self.release(key)

    @cute.jit
    def multiply_qk(
        self, work: Work, sign, uses: Cursor, tile, use: Use, stage: cutlass.Constexpr[int]
    ):
        """S = Q K' if the stage needs the tile."""
        if work.needs(stage, tile):
            if tile == work.ends[stage] - 1:
                self.query_rings[stage].wait_full(uses.use())
                uses.advance()
            query = self.query_operand.descriptor(
                (self.query_tiles + stage * self.query_elements).toint(), False
            )
            key = self.kv_descriptor(self.key_operand, use, False)
            kind = tmem.instruction(self.dtype, TILE * self.ctas, TILE, False) | sign
            scores = prims.make_tmem_ptr(Int32(self.scores_column(stage)), Float32)
            if prims.elect_sync():
                for step in cutlass.range_constexpr(self.head_dim // tmem.MMA_K):
                    prims.tcgen05_mma(
                        prims.Tcgen05MMAKind.F16, self.group, scores,
                        query.advance_start_address(self.query_operand.step(step, False)),
                        key.advance_start_address(self.key_operand.step(step, False)),
                        kind, step > 0,
                    )  # fmt: skip
                self.commit(self.scores[stage].barrier)
                if tile == work.begins[stage]:
                    self.commit(self.query_rings[stage].empty_barriers)

    @cute.jit
    def multiply_pv(self, work: Work, rounds, tile, use: Use, stage: cutlass.Constexpr[int]):
        """O += P V if the stage needs the tile; the last weights may come later than the rest."""
        if work.needs(stage, tile):
            value = self.kv_descriptor(self.value_operand, use, True)
            kind = tmem.instruction(self.dtype, TILE * self.ctas, self.head_dim, True)
            output = prims.make_tmem_ptr(Int32(self.output_column(stage)), Float32)
            accumulate = tile != work.ends[stage] - 1
            steps = TILE // tmem.MMA_K
            for part in cutlass.range_constexpr(2):
                channel = (self.ready, self.tail)[part][stage]
                channel.wait(rounds[stage])
                tmem.fence_after()
                if prims.elect_sync():
                    for step in cutlass.range_constexpr(
                        *((0, HEAD_STEPS), (HEAD_STEPS, steps))[part]
                    ):
                        column = self.weights_column(stage) + step * tmem.MMA_K // 2
                        prims.tcgen05_mma(
                            prims.Tcgen05MMAKind.F16, self.group, output,
                            prims.make_tmem_ptr(Int32(column), Int32),
                            value.advance_start_address(self.value_operand.step(step, True)),
                            kind, accumulate if step == 0 else True,
                        )  # fmt: skip
                    if cutlass.const_expr(part == 1):
                        if tile == work.begins[stage]:
                            self.commit(self.output[stage].barrier)
            rounds[stage] += 1

    def kv_descriptor(self, operand: tmem.OperandTile, use: Use, transposed: bool):
        first = operand.descriptor(self.kv_tiles.toint(), transposed)
        return first.advance_start_address(use.stage * (2 * self.kv_elements))

    def commit(self, barrier: cutlass.Pointer) -> None:
        """Arrives on the barrier, in both CTAs of a pair, when this lane's products are done."""
        mask = None if self.ctas == 1 else 3
        prims.tcgen05_commit(barrier, multicast_mask=mask, group=self.group)

    @cute.jit
    def release(self, use: Use):
        """Frees a kv buffer when the products so far are done."""
        if prims.elect_sync():
            self.commit(self.kv_ring.empty(use))

    # Columns of tensor memory: as all of it is allocated, the allocation starts at column 0.

    def scores_column(self, stage: int) -> int:
        return stage * TILE

    def weights_column(self, stage: int) -> int:
        return stage * TILE + TILE // 2

    def output_column(self, stage: int) -> int:
        return STAGES * TILE + stage * self.head_dim

    # Softmax: four warps a stage, a thread a row.

    @cute.jit
    def weigh(self, call: Call, row: Int32, stage: cutlass.Constexpr[int]):
        order = self.order(call)
        lanes = row // 32 * tmem.QUARTER
        position = row // call.heads_per_tile
        rounds = Int32(0)  # key tiles
        sent = Int32(0)  # messages
        for step in cutlass.range(order.num_steps(), unroll=1):
            row_tile, head_pack, exists = order.tile(step)
            if exists:
                work = self.work(call, row_tile, head_pack)
                begin, end = work.begins[stage], work.ends[stage]
                rows = self.ctas * TILE
                first_row = work.first_rows[stage]
                clear_begin, clear_end = work.visibility.unmasked_tiles(
                    first_row - self.rank() * TILE, rows, TILE
                )
                mask = RowMask.of(work.visibility, first_row + position)
                scale = load(call.problem.scale, work.batch)
                soft_cap = call.problem.logits_soft_cap if self.capped else None
                scale_log2, cap_factor = logit_scales(scale, soft_cap)
                softmax = RowSoftmax.start(scale_log2)
                for i in cutlass.range(end - begin, unroll=1):
                    tile = end - 1 - i
                    masked = (tile < clear_begin) | (tile >= clear_end)
                    self.scores[stage].wait(rounds)
                    tmem.fence_after()
                    scores, largest = self.read_scores(
                        lanes + self.scores_column(stage), cap_factor, mask, tile, masked,
                        softmax.reference[0],
                    )  # fmt: skip
                    factor = softmax.advance(largest)
                    if i > 0:
                        # The previous message has been read: its reader let these scores come.
                        self.slot(stage, row).store(factor)
                        self.message[stage].arrive()
                        sent += 1
                    shift = softmax.centre(scores)
                    sums = [(softmax.total[0], Float32(0.0)), (Float32(0.0), Float32(0.0))]
                    for fragment in cutlass.range_constexpr(FRAGMENTS):
                        first = fragment * FRAGMENT
                        softmax.exponentials(scores, shift, first, FRAGMENT, self.emulated)
                        words = [
                            pack(scores[j], scores[j + 1], self.dtype)
                            for j in range(first, first + FRAGMENT, 2)
                        ]
                        tmem.store(lanes + (self.weights_column(stage) + first // 2), words)
                        if cutlass.const_expr(fragment >= FRAGMENTS - 2):
                            tmem.wait_stores()
                            tmem.fence_before()
                            last = fragment == FRAGMENTS - 1
                            (self.tail if last else self.ready)[stage].arrive()
                        sums = add_pairs(sums, scores, first, FRAGMENT)
                    low_sum, high_sum = add2(*sums)
                    softmax.total[0] = low_sum + high_sum
                    rounds += 1
                if begin < end:
                    self.message_read[stage].wait_free(sent)
                    self.slot(stage, row).store(softmax.total[0])
                    (self.slot(stage, row) + TILE).store(softmax.shift[0])
                    self.message[stage].arrive()
                    sent += 1

    @cute.jit
    def read_scores(self, column, cap_factor, mask: RowMask, tile, masked, reference):
        """A row of a tile's logits, hidden ones -inf, and the maximum of it and the reference.

        With a soft cap the logits are in units of the cap.
        """
        scores = cute.make_rmem_tensor(TILE, Float32)
        columns = [column + i * FRAGMENT for i in range(FRAGMENTS)]
        if cutlass.const_expr(self.loads_maxima):
            values, maxima = tmem.load_with_maxima(columns, FRAGMENT)
        else:
            values = tmem.load(columns, FRAGMENT)
        for i in cutlass.range_constexpr(TILE):
            scores[i] = values[i]
        largest = Float32(reference)
        if cutlass.const_expr(self.loads_maxima):
            largest = maximum(maximum(*maxima[:3]), maxima[3], reference)
        if cutlass.const_expr(self.capped):
            cap_row(scores, cap_factor)
        if masked:
            mask.apply(scores, tile * TILE)
            if cutlass.const_expr(self.loads_maxima):
                largest = row_maximum(scores, reference)
        if cutlass.const_expr(not self.loads_maxima):
            largest = row_maximum(scores, reference)
        return scores, largest

    def slot(self, stage: int, row: Int32) -> cutlass.Pointer:
        """A row's message: its first number here, the second one TILE further on."""
        return self.messages + (stage * 2 * TILE + row)

    # Correction: four warps, a thread a row of either stage.

    @cute.jit
    def correct(self, call: Call, row: Int32):
        order = self.order(call)
        lanes = row // 32 * tmem.QUARTER
        received = cute.make_rmem_tensor(STAGES, Int32)  # messages
        received.fill(0)
        outputs = cute.make_rmem_tensor(STAGES, Int32)  # finished O
        outputs.fill(0)
        written = Int32(0)  # uses of the out buffers
        for stage in cutlass.range_constexpr(STAGES):  # O may be overwritten
            self.ready[stage].arrive()
        for step in cutlass.range(order.num_steps(), unroll=1):
            row_tile, head_pack, exists = order.tile(step)
            if exists:
                work = self.work(call, row_tile, head_pack)
                for i in cutlass.range(work.end - work.begin, unroll=1):
                    tile = work.end - 1 - i
                    for stage in cutlass.range_constexpr(STAGES):
                        if (work.begins[stage] <= tile) & (tile < work.ends[stage] - 1):
                            self.message[stage].wait(received[stage])
                            factor = self.slot(stage, row).load()
                            self.message_read[stage].arrive()
                            received[stage] += 1
                            if prims.vote_sync(0xFFFFFFFF, factor < 1.0, "any"):
                                tmem.fence_after()
                                self.rescale(lanes + self.output_column(stage), factor)
                                tmem.fence_before()
                            self.ready[stage].arrive()
                for stage in cutlass.range_constexpr(STAGES):
                    self.finish(call, work, row, received, outputs, written, stage)
                written += 1

    def rescale(self, column: Int32, factor: Float32) -> None:
        for first in range(0, self.head_dim, CHUNK):
            values = tmem.load([column + first], CHUNK)
            scaled = []
            for i in range(0, CHUNK, 2):
                scaled += scale2((values[i], values[i + 1]), factor)
            tmem.store(column + first, scaled)
        tmem.wait_stores()

    @cute.jit
    def finish(
        self, call: Call, work: Work, row, received, outputs, written,
        stage: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Normalises a stage's O, writes lse and hands the rows to the store warp."""
        this_row = work.first_rows[stage] + row // call.heads_per_tile
        head = work.head + row % call.heads_per_tile
        lanes = row // 32 * tmem.QUARTER
        inverse, lse = Float32(0.0), -Float32.inf
        some = work.begins[stage] < work.ends[stage]
        if some:
            self.message[stage].wait(received[stage])
            total = self.slot(stage, row).load()
            shift = (self.slot(stage, row) + TILE).load()
            self.message_read[stage].arrive()
            received[stage] += 1
            sink = load_or(call.sinks, work.batch * call.problem.num_heads + head, -Float32.inf)
            inverse, lse = finish_row(shift, total, sink * LOG2_E)
            if this_row >= work.visibility.num_rows:
                inverse, lse = Float32(0.0), -Float32.inf
            self.output[stage].wait(outputs[stage])
            outputs[stage] += 1
            tmem.fence_after()
        if this_row < call.problem.num_queries:
            position = Int64(work.batch) * call.problem.num_queries + this_row
            index = position * call.problem.num_heads + head
            target = cute.make_tensor(call.lse + index, cute.make_layout(1))
            target[0] = lse

        self.out_free[stage].wait_free(written)
        for first in cutlass.range_constexpr(0, self.head_dim, CHUNK):
            values = cute.make_rmem_tensor(CHUNK, Float32)
            values.fill(0.0)
            if some:
                loaded = tmem.load([lanes + (self.output_column(stage) + first)], CHUNK)
                for i in cutlass.range_constexpr(0, CHUNK, 2):
                    values[i], values[i + 1] = scale2((loaded[i], loaded[i + 1]), inverse)
                # Selected, not multiplied: a row that sees nothing may have met NaN values.
                if inverse == 0.0:
                    values.fill(0.0)
            self.write_out(values, row, first, stage)
        if some:
            tmem.fence_before()
            self.ready[stage].arrive()
        prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
        self.out_full[stage].arrive()

    def write_out(self, values, row: Int32, first: int, stage: int) -> None:
        """Rounds consecutive columns of a row into the out buffer, 16 bytes at a time.

        The swizzle XORs the number of a 16-byte piece within its row with the row's modulo 8.
        """
        for piece in range(0, CHUNK, 8):
            box, column = divmod(first + piece, tmem.BOX_COLUMNS)
            words = [
                pack(values[piece + i], values[piece + i + 1], self.dtype) for i in range(0, 8, 2)
            ]
            block = stage * self.query_elements + box * TILE * tmem.BOX_COLUMNS
            offset = block + row * tmem.BOX_COLUMNS + 8 * (row % 8 ^ column // 8)
            vector = cutlass.Vector.from_elements(tuple(words), dtype=Int32)
            target = (self.out_tiles + offset).toint()
            cutlass.inttoptr(target, int(cutlass.AddressSpace.smem), Int32).store(
                vector, alignment=16
            )

    # Store: one warp.

    @cute.jit
    def store(self, call: Call):
        order = self.order(call)
        written = Int32(0)
        for step in cutlass.range(order.num_steps(), unroll=1):
            row_tile, head_pack, exists = order.tile(step)
            if exists:
                work = self.work(call, row_tile, head_pack)
                for stage in cutlass.range_constexpr(STAGES):
                    self.out_full[stage].wait(written)
                    if prims.elect_sync():
                        for box in cutlass.range_constexpr(self.boxes):
                            block = stage * self.boxes + box
                            prims.cp_async_bulk_tensor_global_shared_cta(
                                call.out.get_ptr(),
                                self.out_tiles + block * (TILE * tmem.BOX_COLUMNS),
                                (
                                    box * tmem.BOX_COLUMNS, work.head,
                                    work.first_rows[stage], work.batch,
                                ),
                            )  # fmt: skip
                        prims.cp_async_bulk_commit_group()
                for stage in cutlass.range_constexpr(STAGES):
                    if prims.elect_sync():
                        prims.cp_async_bulk_wait_group(STAGES - 1 - stage, read=True)
                    self.out_free[stage].arrive()
                written += 1
        if prims.elect_sync():
            prims.cp_async_bulk_wait_group(0)


def variants() -> list[Forward]:
    """All forward kernels: pairs of CTAs for H = 128 without a mask, as FlashAttention-4 has them.

    The share of the polynomial is FlashAttention-4's too: 12 pairs of 64 (19 %) with pairs of CTAs,
    8 (12.5 %) else, none on sm_103a, whose special function units are twice as fast.
    """
    return [
        Forward(architecture, dtype, head_dim, kind, capped, ctas, pairs[ctas])
        for architecture, pairs in (("sm_100a", {1: 8, 2: 12}), ("sm_103a", {1: 0, 2: 0}))
        for dtype in DTYPES
        for head_dim in (64, 96, 128)
        for kind, capped in (*((kind, False) for kind in KINDS), (WINDOW, True), (SEGMENTS, True))
        for ctas in [2 if head_dim == 128 and kind is FULL else 1]
    ]
