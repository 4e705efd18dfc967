# ruff: noqa: E501 - instructions of PTX are not broken into lines
"""The emulator's barriers, asynchronous engines, schedules and race check on small PTX programs against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from emulator import Emulator, EmulatorError, TensorMap, load_library

pytestmark = pytest.mark.emulator

WAIT = """
{name}:
  mbarrier.try_wait.parity.shared::cta.b64 %p0, [{barrier}], {parity};
  @!%p0 bra {name};"""


def wait(name: str, barrier: str, parity: object = 0) -> str:
    """A loop on mbarrier.try_wait.parity."""
    return WAIT.format(name=name, barrier=barrier, parity=parity)


def kernel(body: str, params: str = "", target: str = "sm_90a") -> str:
    """An entry `k`; params: m for a tensor map, p for a pointer. %t, %warp, %base (dynamic shared memory), %lead."""
    types = {"m": ".param .align 64 .b8 p{}[128]", "p": ".param .u64 p{}"}
    names = ", ".join(types[kind].format(i) for i, kind in enumerate(params))
    loads = "\n".join(
        f"  ld.param.u64 %rd{i}, [p{i}];"
        if kind == "p"
        else f"  mov.b64 %rd{i}, p{i};\n  cvta.param.u64 %rd{i}, %rd{i};"
        for i, kind in enumerate(params)
    )
    return f"""
.version 9.0
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k({names})
{{
  .reg .pred %p<16>;
  .reg .pred %lead;
  .reg .b16 %h<16>;
  .reg .b32 %r<128>;
  .reg .f32 %f<16>;
  .reg .b64 %rd<32>;
  .reg .b32 %t;
  .reg .b32 %lane;
  .reg .b32 %warp;
  .reg .b32 %base;
  mov.u32 %t, %tid.x;
  mov.u32 %lane, %laneid;
  shr.u32 %warp, %t, 5;
  mov.b32 %base, dynamic;
  elect.sync %r0|%lead, -1;
{loads}
{body}
  ret;
}}
"""


def launch(
    body: str, *args: object, params: str = "", target: str = "sm_90a", block: int = 32, **options
):
    """Compiles and runs `body` on one cluster."""
    module = Emulator(kernel(body, params, target))
    cluster = options.get("cluster", 1)
    return module.launch(
        "k",
        options.pop("grid", cluster),
        block,
        args,
        shared=options.pop("shared", 65536),
        **options,
    )


INIT = """
  setp.eq.u32 %p1, %t, 0;
  @%p1 mbarrier.init.shared.b64 [%base], {count};
  fence.mbarrier_init.release.cluster;
  bar.sync 0;"""


# ---- barriers ------------------------------------------------------------------------------------------------------------


def test_named_barriers_hand_over():
    # Warp 0 writes, arrives at barrier 1 and waits at 2; warp 1 reads and answers.
    out = np.zeros(32, np.uint32)
    body = """
  mad.lo.u32 %r1, %lane, 4, %base;
  setp.ne.u32 %p1, %warp, 0;
  @%p1 bra CONSUMER;
  mul.lo.u32 %r2, %lane, 3;
  st.shared.u32 [%r1], %r2;
  bar.arrive 1, 64;
  bar.sync 2, 64;
  ld.shared.u32 %r3, [%r1];
  mad.wide.u32 %rd1, %lane, 4, %rd0;
  st.global.u32 [%rd1], %r3;
  bra.uni END;
CONSUMER:
  bar.sync 1, 64;
  ld.shared.u32 %r2, [%r1];
  add.u32 %r2, %r2, 1;
  st.shared.u32 [%r1], %r2;
  bar.arrive 2, 64;
END:"""
    launch(body, out, params="p", block=64, races=True)
    np.testing.assert_array_equal(out, np.arange(32) * 3 + 1)


def test_barrier_reductions():
    out = np.zeros((3, 64), np.uint32)
    body = """
  setp.lt.u32 %p1, %t, 40;
  bar.red.popc.u32 %r1, 0, %p1;
  bar.red.and.pred %p2, 0, %p1;
  bar.red.or.pred %p3, 0, %p1;
  selp.b32 %r2, 1, 0, %p2;
  selp.b32 %r3, 1, 0, %p3;
  mad.wide.u32 %rd1, %t, 4, %rd0;
  st.global.u32 [%rd1], %r1;
  st.global.u32 [%rd1+256], %r2;
  st.global.u32 [%rd1+512], %r3;"""
    launch(body, out, params="p", block=64)
    np.testing.assert_array_equal(out, np.repeat([[40], [0], [1]], 64, axis=1))


def test_mbarrier_phases_and_states():
    # Parity 1 of a fresh barrier passes; a phase needs all arrivals and all bytes.
    out = np.zeros(8, np.uint32)
    body = (
        INIT.format(count=2)
        + """
  @!%p1 bra END;
  mbarrier.test_wait.parity.shared.b64 %p2, [%base], 1;
  selp.b32 %r1, 1, 0, %p2;
  mbarrier.arrive.shared.b64 %rd1, [%base];
  mbarrier.pending_count.b64 %r2, %rd1;
  mbarrier.arrive.expect_tx.shared.b64 %rd2, [%base], 16;
  mbarrier.test_wait.shared.b64 %p2, [%base], %rd2;
  selp.b32 %r3, 1, 0, %p2;
  mbarrier.complete_tx.relaxed.cta.shared.b64 [%base], 16;
  mbarrier.test_wait.shared.b64 %p2, [%base], %rd2;
  selp.b32 %r4, 1, 0, %p2;
  mbarrier.try_wait.parity.shared.b64 %p2, [%base], 1;
  selp.b32 %r5, 1, 0, %p2;
  mbarrier.inval.shared.b64 [%base];
  st.global.v4.u32 [%rd0], {%r1, %r2, %r3, %r4};
  st.global.u32 [%rd0+16], %r5;
END:"""
    )
    launch(body, out, params="p")
    np.testing.assert_array_equal(out[:5], [1, 2, 0, 1, 0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  mbarrier.arrive.shared.b64 _, [%base+8];", "no mbarrier was initialised"),
        ("  mbarrier.init.shared.b64 [%base], 1;", "already initialised"),
        (
            "  @%p1 mbarrier.arrive.shared.b64 _, [%base], 3;",
            "3 arrivals, but only 1 of 1 are pending",
        ),
        ("  ld.shared.u32 %r1, [%base];", "read of the mbarrier object"),
        ("  st.shared.u32 [%base+4], %t;", "overwrite of the mbarrier object"),
        ("  mbarrier.inval.shared.b64 [%base+4];", "misaligned"),
        (wait("W", "%base"), "deadlock(.|\n)*in phase 0 with 1 of 1 arrivals and 0 bytes pending"),
        (
            "  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 64;" + wait("W", "%base"),
            "0 of 1 arrivals and 64 bytes",
        ),
    ],
)
def test_mbarrier_misuse(body, message):
    with pytest.raises(EmulatorError, match=message):
        launch(INIT.format(count=1) + "\n" + body)


# ---- copies ----------------------------------------------------------------------------------------------------------------


def swizzled(box: np.ndarray, span: int) -> np.ndarray:
    """The bytes of rows of `span` bytes as they lie in shared memory at an aligned address."""
    flat = np.ascontiguousarray(box).view(np.uint8).reshape(-1)
    if span == 0:
        return flat
    address = np.arange(flat.size)
    bits = {128: 7, 64: 3, 32: 1}[span]
    out = np.empty_like(flat)
    out[address ^ ((address >> 7 & bits) << 4)] = flat
    return out


DUMP = """
  mov.b32 %r20, %t;
DUMP:
  mad.lo.u32 %r21, %r20, 4, %base;
  ld.shared.u32 %r22, [%r21+1024];
  mad.wide.u32 %rd20, %r20, 4, %rd1;
  st.global.u32 [%rd20], %r22;
  add.u32 %r20, %r20, 32;
  setp.lt.u32 %p3, %r20, {words};
  @%p3 bra DUMP;"""


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_tensor_loads_swizzle_and_fill(span, seed):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 2**16, (20, 72), np.uint16)
    columns = (span or 128) // 2
    out = np.zeros(16 * columns, np.uint16)
    size = out.nbytes
    body = (
        INIT.format(count=1)
        + f"""
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], {size};
  mov.b32 %r1, 40;
  mov.b32 %r2, -3;
  add.u32 %r3, %base, 1024;
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd0, {{%r1, %r2}}], [%base];
"""
        + wait("W", "%base")
        + DUMP.format(words=size // 4)
    )
    launch(body, TensorMap(array, (columns, 16), span), out, params="mp", seed=seed, races=True)
    padded = np.zeros((60, 200), np.uint16)
    padded[10:30, 10:82] = array
    want = swizzled(padded[7:23, 50 : 50 + columns], span)
    np.testing.assert_array_equal(out.view(np.uint8), want)


FILL = """
  mov.b32 %r20, %t;
FILL:
  mad.lo.u32 %r21, %r20, 4, %base;
  cvt.rn.f32.u32 %f1, %r20;
  st.shared.f32 [%r21+1024], %f1;
  add.u32 %r20, %r20, 32;
  setp.lt.u32 %p3, %r20, {words};
  @%p3 bra FILL;
  {fence}
  bar.warp.sync -1;"""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("reduce", [False, True])
def test_tensor_stores_and_reductions(reduce, seed):
    array = np.full((10, 24), 0.5, np.float32)
    op = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group" if reduce else (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    )  # fmt: skip
    body = (
        FILL.format(words=8 * 32, fence="fence.proxy.async.shared::cta;")
        + f"""
  mov.b32 %r1, 16;
  mov.b32 %r2, 4;
  add.u32 %r3, %base, 1024;
  @%lead {op} [%rd0, {{%r1, %r2}}], [%r3];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;"""
    )
    launch(body, TensorMap(array, (32, 8)), params="m", seed=seed, races=True)
    box = np.arange(256, dtype=np.float32).reshape(8, 32)
    want = np.full((10, 24), 0.5, np.float32)
    want[4:, 16:] = box[:6, :8] + (0.5 if reduce else 0)
    np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("seed", [0, 3])
def test_bulk_copies_and_reductions(seed):
    source = np.arange(64, dtype=np.float32)
    total = np.full(64, 100, np.float32)
    body = (
        INIT.format(count=1)
        + """
  add.u32 %r3, %base, 1024;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 256;
  mov.b32 %r4, 256;
  @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], %r4, [%base];
"""
        + wait("W", "%base")
        + """
  @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r3], %r4;
  @%p1 cp.async.bulk.commit_group;
  @%p1 cp.async.bulk.wait_group.read 0;"""
    )
    launch(body, source, total, params="pp", seed=seed, races=True)
    np.testing.assert_array_equal(total, source + 100)


@pytest.mark.parametrize("seed", [0, 4])
def test_small_copies(seed):
    source = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    body = """
  mad.lo.u32 %r1, %t, 16, %base;
  mad.wide.u32 %rd2, %t, 16, %rd0;
  setp.lt.u32 %p1, %t, 16;
  selp.b32 %r2, 16, 8, %p1;
  cp.async.cg.shared.global [%r1+1024], [%rd2], 16, %r2;
  cp.async.commit_group;
  cp.async.wait_group 0;
  bar.sync 0;""" + DUMP.format(words=128)
    launch(body, source, out, params="pp", seed=seed, races=True)
    want = source.reshape(32, 4).copy()
    want[16:, 2:] = 0
    np.testing.assert_array_equal(out, want.reshape(-1))


# ---- matrix units ------------------------------------------------------------------------------------------------------------


def wgmma_body(
    a_in_registers: bool = False, fence: str = "wgmma.fence.sync.aligned;", group: bool = True
) -> str:
    """64 x 16 x 16, A and B from TMA in 32-byte swizzle, D written by all four warps."""
    d = ", ".join(f"%f{i}" for i in range(8))
    a = "{%r40, %r41, %r42, %r43}" if a_in_registers else "%rd10"
    last = ", 0" if a_in_registers else ", 0, 0"
    load = (
        """
  and.b32 %r30, %t, 15;
  shr.u32 %r31, %lane, 4;
  mad.lo.u32 %r32, %warp, 16, %r30;
  mul.lo.u32 %r33, %r32, 32;
  mad.lo.u32 %r33, %r31, 16, %r33;
  shr.u32 %r34, %r33, 7;
  and.b32 %r34, %r34, 1;
  shl.b32 %r34, %r34, 4;
  xor.b32 %r33, %r33, %r34;
  add.u32 %r33, %r33, %base;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r40, %r41, %r42, %r43}, [%r33+1024];"""
        if a_in_registers
        else ""
    )
    stores = "".join(
        f"""
  mad.lo.u32 %r50, %warp, 16, {8 * ((i // 2) % 2)};
  shr.u32 %r51, %lane, 2;
  add.u32 %r50, %r50, %r51;
  and.b32 %r52, %lane, 3;
  mad.lo.u32 %r50, %r50, 8, %r52;
  mad.wide.u32 %rd20, %r50, 8, %rd2;
  st.global.f32 [%rd20+{4 * (i % 2) + 32 * (i // 4)}], %f{i};"""
        for i in range(8)
    )
    return (
        INIT.format(count=1)
        + """
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 2560;
  mov.b32 %r1, 0;
  add.u32 %r3, %base, 1024;
  add.u32 %r4, %base, 3072;
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd0, {%r1, %r1}], [%base];
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r4], [%rd1, {%r1, %r1}], [%base];
"""
        + wait("W", "%base")
        + load
        + f"""
  shr.u32 %r5, %r3, 4;
  cvt.u64.u32 %rd10, %r5;
  or.b64 %rd10, %rd10, {3 << 62 | 16 << 32};
  shr.u32 %r5, %r4, 4;
  cvt.u64.u32 %rd11, %r5;
  or.b64 %rd11, %rd11, {3 << 62 | 16 << 32};
  {fence}
  wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{d}}}, {a}, %rd11, 0, 1, 1{last};
  wgmma.commit_group.sync.aligned;
  {"wgmma.wait_group.sync.aligned 0;" if group else ""}"""
        + stores
    )


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma(a_in_registers, seed):
    rng = np.random.default_rng(2)
    a = rng.standard_normal((64, 16)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16)
    d = np.zeros((64, 16), np.float32)
    body = wgmma_body(a_in_registers)
    launch(
        body,
        TensorMap(a, (16, 64), 32),
        TensorMap(b, (16, 16), 32),
        d,
        params="mmp",
        block=128,
        seed=seed,
        races=True,
    )
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64).T, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fence=""), "before any wgmma.fence"),
        (dict(group=False), "before wgmma.wait_group"),
    ],
)
def test_wgmma_register_rules(options, message):
    a, b, d = (
        np.zeros((64, 16), ml_dtypes.bfloat16),
        np.zeros((16, 16), ml_dtypes.bfloat16),
        np.zeros((64, 16), np.float32),
    )
    args = TensorMap(a, (16, 64), 32), TensorMap(b, (16, 16), 32), d
    with pytest.raises(EmulatorError, match=message):
        launch(wgmma_body(**options), *args, params="mmp", block=128, races=True)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrix_fragments_round_trip(trans):
    # stmatrix then ldmatrix with the other transposition gives the transposed 8x8 tiles.
    source = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    body = f"""
  mad.wide.u32 %rd2, %t, 16, %rd0;
  ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd2];
  mad.lo.u32 %r5, %t, 16, %base;
  stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r5], {{%r1, %r2, %r3, %r4}};
  bar.warp.sync -1;
  ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%r1, %r2, %r3, %r4}}, [%r5];
  mad.wide.u32 %rd2, %t, 16, %rd1;
  st.global.v4.u32 [%rd2], {{%r1, %r2, %r3, %r4}};"""
    launch(body, source, out, params="pp", races=True)
    if trans:
        np.testing.assert_array_equal(out, source)
        return
    halves = source.view(np.uint16).reshape(32, 4, 2)
    tiles = halves.transpose(1, 0, 2).reshape(4, 8, 8)  # register, row, column
    want = tiles.transpose(0, 2, 1).reshape(4, 32, 2).transpose(1, 0, 2)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(32, 4, 2), want)


# ---- clusters ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 6])
def test_distributed_shared_memory(seed):
    # Each CTA writes into the next one of its cluster and signals its mbarrier.
    out = np.zeros((4, 32), np.uint32)
    body = (
        INIT.format(count=32)
        + """
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  mov.u32 %r1, %cluster_ctarank;
  add.u32 %r2, %r1, 1;
  and.b32 %r2, %r2, 3;
  mad.lo.u32 %r3, %t, 4, %base;
  mapa.shared::cluster.u32 %r4, %r3, %r2;
  mad.lo.u32 %r5, %r1, 100, %t;
  st.shared::cluster.u32 [%r4+1024], %r5;
  mapa.shared::cluster.u32 %r6, %base, %r2;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
"""
        + wait("W", "%base")
        + """
  ld.shared.u32 %r7, [%r3+1024];
  mov.u32 %r8, %ctaid.x;
  mad.lo.u32 %r8, %r8, 32, %t;
  mad.wide.u32 %rd1, %r8, 4, %rd0;
  st.global.u32 [%rd1], %r7;"""
    )
    launch(body, out, params="p", cluster=4, seed=seed, races=True)
    np.testing.assert_array_equal(out, (np.arange(4)[:, None] + 3) % 4 * 100 + np.arange(32))


def test_multicast_loads():
    array = np.arange(1024, dtype=np.uint32)
    out = np.zeros((2, 256), np.uint32)
    body = (
        INIT.format(count=1)
        + """
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  add.u32 %r3, %base, 1024;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 1024;
  mov.u32 %r1, %cluster_ctarank;
  setp.eq.u32 %p4, %r1, 1;
  and.pred %p4, %p4, %p1;
  mov.b32 %r2, 256;
  mov.b16 %h1, 3;
  @%p4 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r3], """
    )
    body += (
        "[%rd0, {%r2}], [%base], %h1;"
        + wait("W", "%base")
        + """
  mul.wide.u32 %rd5, %r1, 1024;
  add.u64 %rd1, %rd1, %rd5;"""
        + DUMP.format(words=256)
    )
    launch(body, TensorMap(array, (256,)), out, params="mp", cluster=2, races=True)
    np.testing.assert_array_equal(out, np.tile(array[256:512], (2, 1)))


def test_cluster_launch_control_takes_the_rest_of_the_grid():
    seen = np.zeros(8, np.uint32)
    body = (
        INIT.format(count=1)
        + """
  mov.b32 %r1, 0;
  mov.u32 %r2, %ctaid.x;
  .reg .b128 handle;
NEXT:
  mad.wide.u32 %rd1, %r2, 4, %rd0;
  @%p1 red.global.add.u32 [%rd1], 1;
  add.u32 %r3, %base, 1024;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 16;
  @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%base];
"""
        + wait("W", "%base", "%r1")
        + """
  xor.b32 %r1, %r1, 1;
  ld.shared.v2.b64 {%rd5, %rd6}, [%r3];
  mov.b128 handle, {%rd5, %rd6};
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p5, handle;
  @%p5 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r2, _, _, _}, handle;
  bar.sync 0;
  @%p5 bra NEXT;"""
    )
    launch(body, seen, params="p", grid=8, target="sm_100a", threads=1, races=True)
    np.testing.assert_array_equal(seen, np.ones(8))


# ---- tensor memory ---------------------------------------------------------------------------------------------------------

ALLOCATE = """
  setp.ne.u32 %p4, %warp, 0;
  @%p4 bra ALLOCATED;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base+64], 64;
  tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
  tcgen05.fence::before_thread_sync;
  bar.sync 0;
  tcgen05.fence::after_thread_sync;
  ld.shared.u32 %r60, [%base+64];
  shl.b32 %r61, %warp, 21;
  add.u32 %r61, %r61, %r60;"""
FREE = """
  tcgen05.fence::before_thread_sync;
  bar.sync 0;
  tcgen05.fence::after_thread_sync;
  @!%p4 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r60, 64;"""


@pytest.mark.parametrize("seed", [0, 7])
def test_tensor_memory_round_trip(seed):
    out = np.zeros((128, 2), np.uint32)
    body = (
        ALLOCATE
        + """
  add.u32 %r1, %t, 1000;
  tcgen05.st.sync.aligned.32x32b.x2.b32 [%r61+4], {%t, %r1};
  tcgen05.wait::st.sync.aligned;
  tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r2, %r3}, [%r61+4];
  tcgen05.wait::ld.sync.aligned;
  mad.wide.u32 %rd1, %t, 8, %rd0;
  st.global.v2.u32 [%rd1], {%r2, %r3};"""
        + FREE
    )
    launch(body, out, params="p", block=128, target="sm_100a", seed=seed, races=True)
    np.testing.assert_array_equal(out, np.arange(128)[:, None] + [0, 1000])


def tcgen05_body(
    after: str = "tcgen05.fence::after_thread_sync;",
    wait_load: str = "tcgen05.wait::ld.sync.aligned;",
) -> str:
    """128 x 16 x 16 with A and B from TMA in 32-byte swizzle; every thread stores its row of D."""
    descriptor = 6 << 61 | 1 << 46 | 16 << 32
    instruction = 1 << 4 | 1 << 7 | 1 << 10 | (16 >> 3) << 17 | (128 >> 4) << 24
    registers = ", ".join(f"%r{70 + i}" for i in range(16))
    stores = "".join(f"\n  st.global.u32 [%rd20+{4 * i}], %r{70 + i};" for i in range(16))
    return (
        INIT.format(count=1).replace(
            "bar.sync 0;",
            "@%p1 mbarrier.init.shared.b64 [%base+8], 1;\n"
            "  fence.mbarrier_init.release.cluster;\n  bar.sync 0;",
        )
        + ALLOCATE
        + f"""
  @!%p1 bra PRODUCT_DONE;
  mbarrier.arrive.expect_tx.shared.b64 _, [%base], 4608;
  mov.b32 %r1, 0;
  add.u32 %r3, %base, 1024;
  add.u32 %r4, %base, 5120;
  cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd0, {{%r1, %r1}}], [%base];
  cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r4], [%rd1, {{%r1, %r1}}], [%base];
{wait("W", "%base")}
  tcgen05.fence::after_thread_sync;
  shr.u32 %r5, %r3, 4;
  cvt.u64.u32 %rd10, %r5;
  or.b64 %rd10, %rd10, {descriptor};
  shr.u32 %r5, %r4, 4;
  cvt.u64.u32 %rd11, %r5;
  or.b64 %rd11, %rd11, {descriptor};
  mov.b32 %r6, {instruction};
  setp.ne.u32 %p5, %r1, 0;
  tcgen05.mma.cta_group::1.kind::f16 [%r60], %rd10, %rd11, %r6, %p5;
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%base+8];
PRODUCT_DONE:
  bar.warp.sync -1;
{wait("V", "%base+8")}
  {after}
  tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r61];
  {wait_load}
  mad.wide.u32 %rd20, %t, 64, %rd2;{stores}"""
        + FREE
    )


def tcgen05_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    a = rng.standard_normal((128, 16)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16)
    return a, b, np.zeros((128, 16), np.float32)


@pytest.mark.parametrize("seed", [0, 8, 9])
def test_tcgen05_product(seed):
    a, b, d = tcgen05_arrays()
    args = TensorMap(a, (16, 128), 32), TensorMap(b, (16, 16), 32), d
    launch(tcgen05_body(), *args, params="mmp", block=128, target="sm_100a", seed=seed, races=True)
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64).T, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(after=""), "tcgen05.ld of warp .* reads tensor memory(.|\n)*Nothing orders"),
        (dict(wait_load=""), "accessed before tcgen05.wait::ld"),
    ],
)
def test_tcgen05_ordering_rules(options, message):
    a, b, d = tcgen05_arrays()
    args = TensorMap(a, (16, 128), 32), TensorMap(b, (16, 16), 32), d
    body = tcgen05_body(**options)
    with pytest.raises(EmulatorError, match=message):
        launch(body, *args, params="mmp", block=128, target="sm_100a", races=True)
    launch(body, *args, params="mmp", block=128, target="sm_100a", races=True, lenient_tensor=True)


SHIFT_REGISTERS = ", ".join(f"%r{70 + i}" for i in range(8))


def shift_body(shift: str, waiting: str = wait("V", "%base")) -> str:
    """Every thread stores 8 words in its lane from column 4 on, one shifts, every thread loads its lane."""
    values = "".join(f"\n  mad.lo.u32 %r{70 + i}, %t, 8, {i};" for i in range(8))
    stores = "".join(f"\n  st.global.u32 [%rd20+{4 * i}], %r{70 + i};" for i in range(8))
    return (
        INIT.format(count=1)
        + ALLOCATE
        + f"""{values}
  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r61+4], {{{SHIFT_REGISTERS}}};
  tcgen05.wait::st.sync.aligned;
  tcgen05.fence::before_thread_sync;
  bar.sync 0;
  tcgen05.fence::after_thread_sync;
  @!%p1 bra SHIFTED;
  {shift}
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%base];
SHIFTED:
  bar.warp.sync -1;
{waiting}
  tcgen05.fence::after_thread_sync;
  tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{SHIFT_REGISTERS}}}, [%r61+4];
  tcgen05.wait::ld.sync.aligned;
  mad.wide.u32 %rd20, %t, 32, %rd0;{stores}"""
        + FREE
    )


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(
    ("name", "quarters"), [("shift.cta_group::1.down", [1]), ("shift.down.cta_group::1", [0, 3, 3])]
)
def test_tensor_memory_shift(name, quarters, seed):
    # A quarter's lanes but the last each go to the next lane; its first lane stays.
    shifts = "\n  ".join(f"tcgen05.{name} [%r60+{quarter << 21 | 4}];" for quarter in quarters)
    out = np.zeros((128, 8), np.uint32)
    launch(shift_body(shifts), out, params="p", block=128, target="sm_100a", seed=seed, races=True)
    expected = np.arange(128 * 8).reshape(4, 32, 8)
    for quarter in quarters:
        expected[quarter, 1:] = expected[quarter, :-1].copy()
    np.testing.assert_array_equal(out, expected.reshape(128, 8))


def test_tensor_memory_shift_of_a_pair():
    out = np.zeros((2, 128, 8), np.uint32)
    body = shift_body("@%p6 tcgen05.shift.cta_group::2.down [%r60+4];")
    # The even CTA shifts and signals both; values and results of a CTA are its own.
    body = body.replace("cta_group::1", "cta_group::2").replace(
        "mbarrier::arrive::one.shared::cluster.b64 [%base];",
        "mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%base], %h0;",
    )
    body = body.replace("  @!%p1 bra SHIFTED;", "  @!%p1 bra SHIFTED;\n  @!%p6 bra SHIFTED;")
    sync = "barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;"
    body = body.replace("bar.sync 0;", sync)
    body = f"""
  mov.u32 %r8, %cluster_ctarank;
  setp.eq.u32 %p6, %r8, 0;
  mov.b16 %h0, 3;
  mad.wide.u32 %rd0, %r8, {out[0].nbytes}, %rd0;
  {body}"""
    body = body.replace("%t, 8, ", "%r9, 8, ").replace(
        "  mov.b16 %h0", "  mad.lo.u32 %r9, %r8, 1000, %t;\n  mov.b16 %h0"
    )
    launch(body, out, params="p", block=128, target="sm_100a", cluster=2, races=True)
    expected = 8 * np.add.outer([0, 1000], np.arange(128))[..., None] + np.arange(8)
    expected[:, 1:32] = expected[:, :31].copy()
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("shift", "waiting", "message"),
    [
        ("[%r60+0x100004]", wait("V", "%base"), "lane 16 of the address is no multiple of 32"),
        ("[%r60+60]", wait("V", "%base"), "are not allocated"),
        ("[%r60+8]", wait("V", "%base"), "which nothing has written"),
        ("[%r60+4]", "", "reads tensor memory(.|\n)*Nothing orders"),
    ],
)
def test_tensor_memory_shift_misuse(shift, waiting, message):
    body = shift_body(f"tcgen05.shift.cta_group::1.down {shift};", waiting)
    out = np.zeros((128, 8), np.uint32)
    with pytest.raises(EmulatorError, match=message):
        launch(body, out, params="p", block=128, target="sm_100a", races=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ALLOCATE, "without having freed tensor memory columns 0..63"),
        (ALLOCATE + "\n  tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r61];" + FREE, "which nothing has written"),
        (ALLOCATE + "\n  tcgen05.st.sync.aligned.32x32b.x1.b32 [%r61+64], {%t};" + FREE, "are not allocated"),
        (ALLOCATE + "\n  tcgen05.st.sync.aligned.32x32b.x1.b32 [%r61+0x200000], {%t};" + FREE, "reaches tensor memory lanes"),
        ("  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 48;", "alloc of 48 columns"),
        ("  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 512;\n"
         "  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 32;", "deadlock(.|\n)*allocated: 0..511"),
    ],
)  # fmt: skip
def test_tensor_memory_misuse(body, message):
    with pytest.raises(EmulatorError, match=message):
        launch(body, block=128 if "ALLOCATED" in body else 32, target="sm_100a")


# ---- races ---------------------------------------------------------------------------------------------------------------------

HAND_OVER = """
  mad.lo.u32 %r1, %lane, 4, %base;
  setp.ne.u32 %p1, %warp, 0;
  @!%p1 st.shared.u32 [%r1+1024], %t;
  {barrier}
  @%p1 ld.shared.u32 %r2, [%r1+1024];"""


def test_a_missing_barrier_is_a_race_although_the_value_is_right():
    launch(HAND_OVER.format(barrier="bar.sync 0;"), block=64, races=True)
    with pytest.raises(
        EmulatorError,
        match=r"race: warp 1 of rank 0 reads shared memory 0x.*which warp 0(.|\n)*Nothing orders",
    ):
        launch(HAND_OVER.format(barrier=""), block=64, races=True)
    launch(HAND_OVER.format(barrier=""), block=64)


def test_four_byte_neighbours_are_no_race():
    body = "  mad.lo.u32 %r1, %warp, 4, %base;\n  @%lead st.shared.u32 [%r1], %t;\n  @%lead ld.shared.u32 %r2, [%r1];"
    launch(body, block=128, races=True)


@pytest.mark.parametrize("where", ["writer", "consumer", "nowhere"])
def test_proxy_fences(where):
    # Generic writes, a barrier, then a TMA store by another warp.
    fence = "fence.proxy.async.shared::cta;"
    array = np.zeros((8, 32), np.float32)
    body = "  setp.eq.u32 %p9, %warp, 0;\n  @!%p9 bra WRITTEN;" + FILL.format(
        words=256, fence=fence if where == "writer" else ""
    )
    body += f"""
WRITTEN:
  bar.sync 0;
  @%p9 bra END;
  {fence if where == "consumer" else ""}
  mov.b32 %r1, 0;
  add.u32 %r3, %base, 1024;
  @%lead cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd0, {{%r1, %r1}}], [%r3];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
END:"""
    if where == "nowhere":
        with pytest.raises(EmulatorError, match="no proxy fence lies between"):
            launch(body, TensorMap(array, (32, 8)), params="m", block=64, races=True)
    else:
        launch(body, TensorMap(array, (32, 8)), params="m", block=64, races=True)
    np.testing.assert_array_equal(array, np.arange(256).reshape(8, 32) * (where != "nowhere"))


def test_a_buffer_may_not_be_refilled_before_it_is_read():
    array = np.arange(512, dtype=np.uint32)
    body = (
        INIT.format(count=1)
        + """
  add.u32 %r3, %base, 1024;
  setp.ne.u32 %p4, %warp, 0;
  @%p4 bra READER;
  mov.b32 %r2, 0;
  @%lead mbarrier.arrive.expect_tx.shared.b64 _, [%base], 1024;
  @%lead cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd0, {%r2}], [%base];
"""
        + wait("W", "%base")
        + """
  SYNC
  @%lead mbarrier.arrive.expect_tx.shared.b64 _, [%base], 1024;
  @%lead cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd0, {%r2}], [%base];
"""
        + wait("X", "%base", 1)
        + """
  bra.uni END;
READER:
"""
        + wait("V", "%base")
        + """
  ld.shared.u32 %r4, [%r3];
  ARRIVE
END:"""
    )
    good = body.replace("SYNC", "bar.sync 1, 64;").replace("ARRIVE", "bar.arrive 1, 64;")
    launch(good, TensorMap(array, (256,)), params="m", block=64, races=True)
    bad = body.replace("SYNC", "").replace("ARRIVE", "")
    with pytest.raises(EmulatorError, match=r"race: |deadlock"):
        launch(bad, TensorMap(array, (256,)), params="m", block=64, races=True)


def test_barriers_need_their_initialisation_published():
    array = np.arange(256, dtype=np.uint32)
    body = (
        INIT.format(count=1)
        + """
  add.u32 %r3, %base, 1024;
  mov.b32 %r2, 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 1024;
  @%p1 cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd0, {%r2}], [%base];
"""
        + wait("W", "%base")
    )
    launch(body, TensorMap(array, (256,)), params="m", races=True)
    with pytest.raises(EmulatorError, match=r"no fence\.mbarrier_init"):
        launch(
            body.replace("fence.mbarrier_init.release.cluster;", ""),
            TensorMap(array, (256,)),
            params="m",
            races=True,
        )


def test_exits_with_unread_stores():
    array = np.zeros((8, 32), np.float32)
    body = (
        FILL.format(words=256, fence="fence.proxy.async;")
        + """
  mov.b32 %r1, 0;
  add.u32 %r3, %base, 1024;
  @%lead cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd0, {%r1, %r1}], [%r3];"""
    )
    with pytest.raises(EmulatorError, match="never committed"):
        launch(body, TensorMap(array, (32, 8)), params="m")
    body += "\n  cp.async.bulk.commit_group;"
    with pytest.raises(EmulatorError, match="before its bulk copies have read shared memory"):
        launch(body, TensorMap(array, (32, 8)), params="m")
    launch(body, TensorMap(array, (32, 8)), params="m", strict_exit=False)


@pytest.mark.parametrize("seed", range(1, 9))
def test_schedules_find_a_missing_wait(seed):
    """Reads before the copy lands: some schedules must show it, each of them reproducibly."""
    array = np.arange(256, dtype=np.uint32)
    body = (
        INIT.format(count=1)
        + """
  add.u32 %r3, %base, 1024;
  mov.b32 %r2, 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 1024;
  @%p1 cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd0, {%r2}], [%base];
  ld.shared.u32 %r4, [%r3];
"""
        + wait("W", "%base")
    )
    messages = set()
    for _ in range(2):
        try:
            launch(body, TensorMap(array, (256,)), params="m", seed=seed)
            messages.add("")
        except EmulatorError as error:
            messages.add(str(error))
    assert len(messages) == 1
    assert messages == {""} or "which nothing has written" in messages.pop()


def test_an_exit_gives_shared_memory_away():
    """A copy that lands after the CTA has ended would hit the next one."""
    array = np.arange(256, dtype=np.uint32)
    body = (
        INIT.format(count=1)
        + """
  add.u32 %r3, %base, 1024;
  mov.b32 %r2, 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 1024;
  @%p1 cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd0, {%r2}], [%base];"""
    )
    with pytest.raises(EmulatorError, match="the CTA exits and gives away"):
        launch(body, TensorMap(array, (256,)), params="m", races=True)
    launch(body + wait("W", "%base"), TensorMap(array, (256,)), params="m", races=True)


@pytest.mark.parametrize("seed", [0, 10])
def test_asynchronous_stores(seed):
    out = np.zeros((2, 32, 2), np.uint32)
    body = (
        INIT.format(count=1)
        + """
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  mov.u32 %r1, %cluster_ctarank;
  xor.b32 %r2, %r1, 1;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 256;
  mad.lo.u32 %r3, %t, 8, %base;
  mapa.shared::cluster.u32 %r4, %r3, %r2;
  mapa.shared::cluster.u32 %r5, %base, %r2;
  mad.lo.u32 %r6, %r1, 100, %t;
  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r4+1024], {%t, %r6}, [%r5];
"""
        + wait("W", "%base")
        + """
  ld.shared.v2.u32 {%r7, %r8}, [%r3+1024];
  mad.lo.u32 %r9, %r1, 32, %t;
  mad.wide.u32 %rd1, %r9, 8, %rd0;
  st.global.v2.u32 [%rd1], {%r7, %r8};
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;"""
    )
    launch(body, out, params="p", cluster=2, seed=seed, races=True)
    lane = np.arange(32)
    want = np.stack([np.stack([lane, lane + 100 * (1 - rank)], -1) for rank in range(2)])
    np.testing.assert_array_equal(out, want)


ELEMENT_TYPES = {
    "uint8": 0,
    "uint32": 2,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 9,
    "bfloat16": 10,
}
UPDATE = "  @%p1 tensormap.replace.tile.{}.shared::cta.b1024.{} [%base+2048], {};\n"


def map_updates(array: np.ndarray, box: tuple[int, ...], swizzle: int, address: str) -> str:
    """PTX that makes a map of `array` out of any map, as the driver would encode it."""
    sizes, strides = array.shape[::-1], array.strides[::-1][1:]
    body = UPDATE.format("global_address", "b64", address)
    body += "".join(
        f"  mov.b32 %r9, {value};\n" + UPDATE.format(field, "b32", f"{i}%r9")
        for field, values in {
            "rank": [("", array.ndim - 1)],
            "box_dim": [(f"{i}, ", value) for i, value in enumerate(box)],
            "global_dim": [(f"{i}, ", value) for i, value in enumerate(sizes)],
            "element_stride": [(f"{i}, ", 1) for i in range(array.ndim)],
        }.items()
        for i, value in values
    )
    for i, stride in enumerate(strides):
        body += f"  mov.b64 %rd9, {stride};\n" + UPDATE.format("global_stride", "b64", f"{i}, %rd9")
    for field, value in {
        "elemtype": ELEMENT_TYPES[array.dtype.name],
        "interleave_layout": 0,
        "swizzle_mode": {0: 0, 32: 1, 64: 2, 128: 3}[swizzle],
        "swizzle_atomicity": 0,
        "fill_mode": 0,
    }.items():
        body += UPDATE.format(field, "b32", value)
    return body


MAP_TO_GLOBAL = """
  bar.warp.sync -1;
  add.u32 %r8, %base, 2048;
  cvt.u64.u32 %rd8, %r8;
  tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%rd8], 128;
  fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
"""
FIRST_MAP = """
  mad.lo.u32 %r8, %t, 4, %base;
  mad.wide.u32 %rd8, %t, 4, %rd0;
  {load};
  st.shared.u32 [%r8+2048], %r9;
  bar.warp.sync -1;
"""


def map_memory() -> np.ndarray:
    """128 bytes aligned as a tensor map is."""
    raw = np.zeros(192, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 128]


@pytest.mark.parametrize("first", ["mov.b32 %r9, 0", "ld.u32 %r9, [%rd8]"])
@pytest.mark.parametrize(
    ("dtype", "shape", "box", "swizzle"),
    [
        ("bfloat16", (40, 72), (64, 8), 128),
        ("float32", (3, 5, 20), (8, 2, 1), 32),
        ("uint8", (96,), (16,), 0),
        ("int64", (2, 3, 4, 5, 6), (2, 1, 1, 2, 2), 0),
    ],
)
def test_a_replaced_tensor_map_is_the_one_that_the_driver_encodes(
    first, dtype, shape, box, swizzle
):
    array, out = np.zeros(shape, dtype), map_memory()
    other = TensorMap(np.zeros(256, np.float16), (32,), 64)
    body = INIT.format(count=1) + FIRST_MAP.format(load=first)
    body += map_updates(array, box, swizzle, "%rd1") + MAP_TO_GLOBAL
    launch(body, other, array, out, params="mpp", races=True)
    encoded = np.frombuffer(TensorMap(array, box, swizzle).encode(load_library()), np.uint8)
    promotion = 0x47  # that of L2: tensormap.replace has no field for it
    np.testing.assert_array_equal(np.delete(out, promotion), np.delete(encoded, promotion))


@pytest.mark.parametrize("seed", [0, 3])
def test_a_copy_through_a_replaced_tensor_map(seed):
    """A map of other memory, shape and type; rows past the end read as zero."""
    array, out = np.arange(10 * 16, dtype=np.float32).reshape(10, 16), np.zeros((4, 8), np.float32)
    memory = map_memory()
    body = INIT.format(count=1) + FIRST_MAP.format(load="ld.u32 %r9, [%rd8]")
    body += map_updates(array, (8, 4), 0, "%rd1") + MAP_TO_GLOBAL
    body += (
        """
  mov.b32 %r1, 8;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 128;
  add.u32 %r3, %base, 1024;
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd2, {%r1, %r1}], [%base];
"""
        + wait("W", "%base")
        + """
  mad.lo.u32 %r3, %t, 4, %base;
  mad.wide.u32 %rd4, %t, 4, %rd3;
  ld.shared.u32 %r4, [%r3+1024];
  st.global.u32 [%rd4], %r4;"""
    )
    other = TensorMap(np.zeros((4, 256), np.float16), (32, 3), 64)
    launch(body, other, array, memory, out, params="mppp", seed=seed, races=True)
    np.testing.assert_array_equal(out, np.vstack([array[8:, 8:], np.zeros((2, 8))]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rank", "%r9", "rank must be 1 to 5"),
        ("box_dim", "0, %r9", "box dimension is not in 1 to 256"),
        ("element_stride", "5, %r9", "ordinal exceeds the rank"),
        ("interleave_layout", "1", "interleaved layouts are not emulated"),
        ("swizzle_mode", "4", "swizzle mode that is not emulated"),
    ],
)
def test_a_field_of_a_tensor_map_has_its_limits(field, value, message):
    body = (
        FIRST_MAP.format(load="mov.b32 %r9, 0") + "  mov.b32 %r9, 999;\n  setp.eq.u32 %p1, %t, 0;\n"
    )
    with pytest.raises(EmulatorError, match=message):
        launch(body + UPDATE.format(field, "b32", value), None, params="p")


def test_a_tensor_map_must_be_there_before_a_field_is_replaced():
    body = "  setp.eq.u32 %p1, %t, 0;\n" + UPDATE.format("fill_mode", "b32", 1)
    with pytest.raises(EmulatorError, match="which nothing has written"):
        launch(body)


REDUCTIONS = {
    "add.u32": np.add,
    "add.u64": np.add,
    "min.s32": np.minimum,
    "max.u32": np.maximum,
    "xor.b32": np.bitwise_xor,
    "inc.u32": lambda old, limit: np.where(old >= limit, 0, old + 1),
}


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_asynchronous_reductions(name, seed):
    # All threads of both CTAs reduce into the words of CTA 0, two to a word.
    bits = int(name[-2:])
    dtype = np.dtype(f"{'i' if 's32' in name else 'u'}{bits // 8}")
    random = np.random.default_rng(5)
    start = random.integers(3, 100, 32).astype(dtype)
    values = random.integers(90 if "inc" in name else 1, 100, (2, 32)).astype(dtype)
    if dtype.kind == "i":
        values[0] *= -1
    out = np.zeros(32, dtype)
    b = "%rd10" if bits == 64 else "%r10"
    body = (
        INIT.format(count=1)
        + f"""
  mov.u32 %r1, %cluster_ctarank;
  mad.lo.u32 %r3, %t, {dtype.itemsize}, %base;
  mad.wide.u32 %rd3, %t, {dtype.itemsize}, %rd0;
  ld.global.b{bits} {b}, [%rd3];
  st.shared.b{bits} [%r3+1024], {b};
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], {2 * 32 * dtype.itemsize};
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  mov.b32 %r2, 0;
  mapa.shared::cluster.u32 %r4, %r3, %r2;
  mapa.shared::cluster.u32 %r5, %base, %r2;
  mad.lo.u32 %r6, %r1, 32, %t;
  mad.wide.u32 %rd3, %r6, {dtype.itemsize}, %rd1;
  ld.global.b{bits} {b}, [%rd3];
  red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{name} [%r4+1024], {b}, [%r5];
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra DONE;
"""
        + wait("W", "%base")
        + f"""
  ld.shared.b{bits} {b}, [%r3+1024];
  mad.wide.u32 %rd3, %t, {dtype.itemsize}, %rd2;
  st.global.b{bits} [%rd3], {b};
DONE:
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;"""
    )
    # CTA 1 sets its own mbarrier too, but nothing arrives there.
    body = body.replace(
        "@%p1 mbarrier.arrive", "setp.eq.and.u32 %p3, %r1, 0, %p1;\n  @%p3 mbarrier.arrive"
    )
    launch(body, start, values, out, params="ppp", cluster=2, seed=seed, races=True)
    reduce = REDUCTIONS[name]
    first, second = (reduce(reduce(start, values[i]), values[1 - i]) for i in range(2))
    if name == "inc.u32":  # the only one whose order matters
        assert np.all((out == first) | (out == second))
    else:
        np.testing.assert_array_equal(out, first)


def test_asynchronous_stores_need_no_proxy_fence():
    """They are performed in the generic proxy."""
    body = (
        INIT.format(count=1)
        + """
  st.shared.u32 [%base+1024], %t;
  bar.warp.sync -1;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%base], 4;
  @%p1 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%base+1024], %t, [%base];
"""
        + wait("W", "%base")
    )
    launch(body.replace("st.shared.u32", "@%p1 st.shared.u32"), races=True)


def test_eight_bit_fragments_round_trip():
    # stmatrix then ldmatrix of 8-bit elements; the layouts are those of CUTLASS's copy traits.
    source = np.arange(64, dtype=np.uint32) * 0x01030507
    stored = np.zeros(64, np.uint32)
    loaded = np.zeros(64, np.uint32)
    body = """
  mad.wide.u32 %rd3, %t, 8, %rd0;
  ld.global.v2.u32 {%r1, %r2}, [%rd3];
  and.b32 %r9, %t, 15;
  mad.lo.u32 %r5, %r9, 16, %base;
  stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r5], {%r1, %r2};
  bar.warp.sync -1;
  ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r3, %r4}, [%r5];
  mad.lo.u32 %r6, %t, 8, %base;
  ld.shared.v2.u32 {%r7, %r8}, [%r6];
  mad.wide.u32 %rd3, %t, 8, %rd1;
  st.global.v2.u32 [%rd3], {%r7, %r8};
  mad.wide.u32 %rd3, %t, 8, %rd2;
  st.global.v2.u32 [%rd3], {%r3, %r4};"""
    launch(body, source, stored, loaded, params="ppp", races=True)
    values = source.view(np.uint8).reshape(32, 2, 4)
    memory = np.zeros((16, 16), np.uint8)
    fragment = np.zeros((32, 2, 4), np.uint8)
    for thread in range(32):
        for register in range(2):
            for byte in range(4):
                row = 8 * register + 2 * (thread % 4) + byte % 2
                memory[row, thread // 4 + 8 * (byte // 2)] = values[thread, register, byte]
    for thread in range(32):
        for register in range(2):
            for byte in range(4):
                row = 4 * (thread % 4) + 2 * register + byte % 2
                fragment[thread, register, byte] = memory[row, thread // 4 + 8 * (byte // 2)]
    np.testing.assert_array_equal(stored.view(np.uint8).reshape(16, 16), memory)
    np.testing.assert_array_equal(loaded.view(np.uint8).reshape(32, 2, 4), fragment)
