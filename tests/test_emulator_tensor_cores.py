# ruff: noqa: E501 - instructions of PTX are not broken into lines
"""Tensor cores in small PTX programs on the emulator: wgmma, tcgen05 and tensor memory."""

import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorError, TensorMap
from ptx_programs import CLUSTER_SYNC, expect, init_barriers, launch, load_tile, wait

pytestmark = pytest.mark.emulator


def operands(rows: int, descriptor: int) -> str:
    """Loads A [rows, 16] and B [16, 16], 16 bits, 32-byte swizzle; descriptors: %rd10, %rd11."""
    return f"""{expect(32 * (rows + 16))}
  mov.b32 %r1, 0;
  add.u32 %r3, %base, 1024;
  add.u32 %r4, %base, {1024 + 32 * rows};
{load_tile("%r3", "%rd0", "%r1", "%r1")}
{load_tile("%r4", "%rd1", "%r1", "%r1")}
{wait("W")}
  shr.u32 %r5, %r3, 4;
  cvt.u64.u32 %rd10, %r5;
  or.b64 %rd10, %rd10, {descriptor};
  shr.u32 %r5, %r4, 4;
  cvt.u64.u32 %rd11, %r5;
  or.b64 %rd11, %rd11, {descriptor};"""


def multiply(body: str, rows: int, seed: int = 0, **options) -> tuple[np.ndarray, np.ndarray]:
    """Runs `body` on random A [rows, 16] and B [16, 16]: the stored D, and A B^T in float64."""
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((n, 16)).astype(ml_dtypes.bfloat16) for n in (rows, 16))
    d = np.zeros((rows, 16), np.float32)
    args = TensorMap(a, (16, rows), 32), TensorMap(b, (16, 16), 32), d
    launch(body, *args, params="mmp", block=128, seed=seed, races=True, **options)
    return d, a.astype(np.float64) @ b.astype(np.float64).T


# --- wgmma ----------------------------------------------------------------------------------------


def wgmma_body(
    a_in_registers: bool = False,
    fence: str = "wgmma.fence.sync.aligned;",
    wait_group: str = "wgmma.wait_group.sync.aligned 0;",
) -> str:
    """64 x 16 x 16, D written by all four warps."""
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
    return f"""{init_barriers(1)}
{operands(64, 3 << 62 | 16 << 32)}
{load}
  {fence}
  wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{d}}}, {a}, %rd11, 0, 1, 1{last};
  wgmma.commit_group.sync.aligned;
  {wait_group}
{stores}"""


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma(a_in_registers, seed):
    actual, expected = multiply(wgmma_body(a_in_registers), 64, seed)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("fence", "before any wgmma.fence"), ("wait_group", "before wgmma.wait_group")],
)
def test_wgmma_register_rules(missing, message):
    with pytest.raises(EmulatorError, match=message):
        multiply(wgmma_body(**{missing: ""}), 64)


# --- matrix fragments -----------------------------------------------------------------------------


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
    for thread, register, byte in np.ndindex(values.shape):
        row = 8 * register + 2 * (thread % 4) + byte % 2
        memory[row, thread // 4 + 8 * (byte // 2)] = values[thread, register, byte]
    for thread, register, byte in np.ndindex(values.shape):
        row = 4 * (thread % 4) + 2 * register + byte % 2
        fragment[thread, register, byte] = memory[row, thread // 4 + 8 * (byte // 2)]
    np.testing.assert_array_equal(stored.view(np.uint8).reshape(16, 16), memory)
    np.testing.assert_array_equal(loaded.view(np.uint8).reshape(32, 2, 4), fragment)


# --- tensor memory --------------------------------------------------------------------------------


def fenced_sync(group: int = 1) -> str:
    """All threads of `group` CTAs wait for each other, and tcgen05 instructions keep to it."""
    return f"""
  tcgen05.fence::before_thread_sync;
  {"bar.sync 0;" if group == 1 else CLUSTER_SYNC}
  tcgen05.fence::after_thread_sync;"""


def allocate(group: int = 1) -> str:
    """64 columns: their address in %r60, that of the warp's own lanes in %r61; warp 0 is %p4."""
    return f"""
  setp.eq.u32 %p4, %warp, 0;
  @!%p4 bra ALLOCATED;
  tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%base+64], 64;
  tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
ALLOCATED:
{fenced_sync(group)}
  ld.shared.u32 %r60, [%base+64];
  shl.b32 %r61, %warp, 21;
  add.u32 %r61, %r61, %r60;"""


def free(group: int = 1) -> str:
    """Ends what `allocate` began."""
    return f"""{fenced_sync(group)}
  @%p4 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r60, 64;"""


@pytest.mark.parametrize("seed", [0, 7])
def test_tensor_memory_round_trip(seed):
    out = np.zeros((128, 2), np.uint32)
    body = f"""{allocate()}
  add.u32 %r1, %t, 1000;
  tcgen05.st.sync.aligned.32x32b.x2.b32 [%r61+4], {{%t, %r1}};
  tcgen05.wait::st.sync.aligned;
  tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r2, %r3}}, [%r61+4];
  tcgen05.wait::ld.sync.aligned;
  mad.wide.u32 %rd1, %t, 8, %rd0;
  st.global.v2.u32 [%rd1], {{%r2, %r3}};
{free()}"""
    launch(body, out, params="p", block=128, target="sm_100a", seed=seed, races=True)
    np.testing.assert_array_equal(out, np.arange(128)[:, None] + [0, 1000])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(
            allocate(), "without having freed tensor memory columns 0..63", id="not freed"
        ),
        pytest.param(
            f"{allocate()}\n  tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r2}}, [%r61];{free()}",
            "which nothing has written",
            id="not written",
        ),
        pytest.param(
            f"{allocate()}\n  tcgen05.st.sync.aligned.32x32b.x1.b32 [%r61+64], {{%t}};{free()}",
            "are not allocated",
            id="not allocated",
        ),
        pytest.param(
            f"{allocate()}\n  tcgen05.st.sync.aligned.32x32b.x1.b32 [%r61+0x200000], {{%t}};{free()}",
            "reaches tensor memory lanes",
            id="another warp's lanes",
        ),
    ],
)
def test_tensor_memory_misuse(body, message):
    with pytest.raises(EmulatorError, match=message):
        launch(body, block=128, target="sm_100a")


@pytest.mark.parametrize(
    ("columns", "message"),
    [([48], "alloc of 48 columns"), ([512, 32], "deadlock(.|\n)*allocated: 0..511")],
)
def test_tensor_memory_allocation_limits(columns, message):
    body = "".join(
        f"\n  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], {n};"
        for n in columns
    )
    with pytest.raises(EmulatorError, match=message):
        launch(body, target="sm_100a")


def shift_body(shift: str, waiting: str = wait("V"), group: int = 1) -> str:
    """Every thread stores 8 words in its lane from column 4 on, one shifts, all load their lane.

    In a pair of CTAs the even one shifts and signals both; values and results of a CTA are its own.
    """
    registers = ", ".join(f"%r{70 + i}" for i in range(8))
    values = "".join(f"\n  mad.lo.u32 %r{70 + i}, %r9, 8, {i};" for i in range(8))
    stores = "".join(f"\n  st.global.u32 [%rd20+{4 * i}], %r{70 + i};" for i in range(8))
    commit = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    commit += ".b64 [%base];" if group == 1 else ".multicast::cluster.b64 [%base], %h0;"
    return f"""{init_barriers(1)}
{allocate(group)}
  mov.u32 %r8, %cluster_ctarank;
  mov.b16 %h0, 3;
  mad.lo.u32 %r9, %r8, 1000, %t;
{values}
  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r61+4], {{{registers}}};
  tcgen05.wait::st.sync.aligned;
{fenced_sync(group)}
  setp.eq.and.u32 %p6, %r8, 0, %p1;
  @!%p6 bra SHIFTED;
  {shift}
  {commit}
SHIFTED:
  bar.warp.sync -1;
{waiting}
  tcgen05.fence::after_thread_sync;
  tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{registers}}}, [%r61+4];
  tcgen05.wait::ld.sync.aligned;
  mad.lo.u32 %r9, %r8, 128, %t;
  mad.wide.u32 %rd20, %r9, 32, %rd0;
{stores}
{free(group)}"""


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
    body = shift_body("tcgen05.shift.cta_group::2.down [%r60+4];", group=2)
    launch(body, out, params="p", block=128, target="sm_100a", cluster=2, races=True)
    expected = 8 * np.add.outer([0, 1000], np.arange(128))[..., None] + np.arange(8)
    expected[:, 1:32] = expected[:, :31].copy()
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("address", "waiting", "message"),
    [
        ("%r60+0x100004", wait("V"), "lane 16 of the address is no multiple of 32"),
        ("%r60+60", wait("V"), "are not allocated"),
        ("%r60+8", wait("V"), "which nothing has written"),
        ("%r60+4", "", "reads tensor memory(.|\n)*Nothing orders"),
    ],
    ids=["lane", "not allocated", "not written", "no wait"],
)
def test_tensor_memory_shift_misuse(address, waiting, message):
    body = shift_body(f"tcgen05.shift.cta_group::1.down [{address}];", waiting)
    out = np.zeros((128, 8), np.uint32)
    with pytest.raises(EmulatorError, match=message):
        launch(body, out, params="p", block=128, target="sm_100a", races=True)


# --- tcgen05.mma ----------------------------------------------------------------------------------


def tcgen05_body(
    fence: str = "tcgen05.fence::after_thread_sync;",
    wait_load: str = "tcgen05.wait::ld.sync.aligned;",
) -> str:
    """128 x 16 x 16; every thread stores its row of D."""
    instruction = 1 << 4 | 1 << 7 | 1 << 10 | (16 >> 3) << 17 | (128 >> 4) << 24
    registers = ", ".join(f"%r{70 + i}" for i in range(16))
    stores = "".join(f"\n  st.global.u32 [%rd20+{4 * i}], %r{70 + i};" for i in range(16))
    return f"""{init_barriers(1, 1)}
{allocate()}
  @!%p1 bra PRODUCT_DONE;
{operands(128, 6 << 61 | 1 << 46 | 16 << 32)}
  tcgen05.fence::after_thread_sync;
  mov.b32 %r6, {instruction};
  setp.ne.u32 %p5, %r1, 0;
  tcgen05.mma.cta_group::1.kind::f16 [%r60], %rd10, %rd11, %r6, %p5;
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%base+8];
PRODUCT_DONE:
  bar.warp.sync -1;
{wait("V", "%base+8")}
  {fence}
  tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r61];
  {wait_load}
  mad.wide.u32 %rd20, %t, 64, %rd2;
{stores}
{free()}"""


@pytest.mark.parametrize("seed", [0, 8, 9])
def test_tcgen05_product(seed):
    actual, expected = multiply(tcgen05_body(), 128, seed, target="sm_100a")
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("fence", "tcgen05.ld of warp .* reads tensor memory(.|\n)*Nothing orders"),
        ("wait_load", "accessed before tcgen05.wait::ld"),
    ],
)
def test_tcgen05_ordering_rules(missing, message):
    body = tcgen05_body(**{missing: ""})
    with pytest.raises(EmulatorError, match=message):
        multiply(body, 128, target="sm_100a")
    multiply(body, 128, target="sm_100a", lenient_tensor=True)
