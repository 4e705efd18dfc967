# ruff: noqa: E501 - instructions of PTX are not broken into lines
"""The emulator's machine on small PTX programs against NumPy: arithmetic, divergence, warp instructions, memory, errors."""

import json

import numpy as np
import pytest
from emulator import Emulator, EmulatorError

pytestmark = pytest.mark.emulator


def kernel(
    body: str, params: int = 0, registers: str = "", target: str = "sm_90a", shared: str = ""
) -> str:
    """A module with one entry `k` whose 64-bit parameters are in %rd0 ... and the thread's index in %t."""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"  ld.param.u64 %rd{i}, [p{i}];" for i in range(params))
    return f"""
.version 9.0
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
{shared}
.visible .entry k({names})
{{
  .reg .pred %p<16>;
  .reg .b16 %h<16>;
  .reg .b32 %r<64>;
  .reg .f32 %f<16>;
  .reg .b64 %rd<32>;
  .reg .b32 %t;
  {registers}
  mov.u32 %t, %tid.x;
{loads}
{body}
  ret;
}}
"""


def run_lanes(
    instructions: str, *inputs: np.ndarray, out: type = np.uint32, **options
) -> np.ndarray:
    """Runs instructions on 32 threads: inputs arrive in %a0, %a1 ... (32 or 64 bits each), the result is %out."""
    registers, loads = [], []
    for i, array in enumerate(inputs):
        bits = array.itemsize * 8
        registers.append(f".reg .b{max(bits, 32)} %a{i};")
        loads.append(
            f"  mad.wide.u32 %rd20, %t, {array.itemsize}, %rd{i};\n  ld.global.b{bits} %a{i}, [%rd20];"
        )
    result = np.zeros(32, out)
    bits = result.itemsize * 8
    registers.append(f".reg .b{bits} %out;")
    n = len(inputs)
    store = (
        f"  mad.wide.u32 %rd20, %t, {result.itemsize}, %rd{n};\n  st.global.b{bits} [%rd20], %out;"
    )
    body = "\n".join([*loads, instructions, store])
    module = Emulator(kernel(body, n + 1, "\n".join(registers)))
    module.launch("k", 1, 32, [*inputs, result], **options)
    return result


def words(seed: int, dtype: type = np.uint32) -> np.ndarray:
    """32 integers with the corner cases first."""
    info = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    values = rng.integers(info.min, info.max, 32, dtype, endpoint=True)
    corners = [0, 1, info.max, info.min, info.max - 1]
    return np.concatenate([np.array(corners, dtype), values])[rng.permutation(32)]


def wrap(values, bits: int) -> np.ndarray:
    """Python integers modulo 2^bits."""
    mask = (1 << bits) - 1
    return np.array([int(v) & mask for v in values], np.uint64 if bits == 64 else np.uint32)


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("name", BINARY)
def test_binary(name, dtype):
    bits = np.dtype(dtype).itemsize * 8
    suffix = (
        "b"
        if name in ("and", "or", "xor")
        else "s"
        if np.issubdtype(dtype, np.signedinteger)
        else "u"
    )
    a, b = words(1, dtype), words(2, dtype)
    out = np.uint64 if bits == 64 else np.uint32
    got = run_lanes(f"  {name}.{suffix}{bits} %out, %a0, %a1;", a, b, out=out)
    want = wrap([BINARY[name](int(x), int(y)) for x, y in zip(a, b, strict=True)], bits)
    np.testing.assert_array_equal(got, want)


def _bfe(a, position, length, signed):
    bits = 32
    position, length = position & 255, length & 255
    if length == 0:
        return 0
    sign = signed and (a >> min(position + length - 1, bits - 1)) & 1
    field = [
        (a >> (position + i)) & 1 if i < length and position + i < bits else sign
        for i in range(bits)
    ]
    return sum(int(bit) << i for i, bit in enumerate(field))


SINGLE = {
    "mul.hi.u32 %out, %a0, %a1": lambda a, b, c: (a * b) >> 32,
    "mad.lo.u32 %out, %a0, %a1, %a2": lambda a, b, c: a * b + c,
    "mad.hi.u32 %out, %a0, %a1, %a2": lambda a, b, c: (a * b >> 32) + c,
    "sad.u32 %out, %a0, %a1, %a2": lambda a, b, c: abs(a - b) + c,
    "not.b32 %out, %a0": lambda a, b, c: ~a,
    "neg.s32 %out, %a0": lambda a, b, c: -a,
    "popc.b32 %out, %a0": lambda a, b, c: a.bit_count(),
    "clz.b32 %out, %a0": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %out, %a0": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %out, %a0": lambda a, b, c: a.bit_length() - 1,
    "shl.b32 %out, %a0, %r1": lambda a, b, c: a << (b % 40) if b % 40 < 32 else 0,
    "shr.u32 %out, %a0, %r1": lambda a, b, c: a >> (b % 40),
    "shr.s32 %out, %a0, %r1": lambda a, b, c: (a - (a >> 31 << 32)) >> (b % 40),
    "shf.l.wrap.b32 %out, %a0, %a1, %a2": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.clamp.b32 %out, %a0, %a1, %r1": lambda a, b, c: (b << 32 | a) >> min(b % 40, 32),
    "bfe.u32 %out, %a0, %r1, %r2": lambda a, b, c: _bfe(a, b % 40, c % 40, False),
    "bfe.s32 %out, %a0, %r1, %r2": lambda a, b, c: _bfe(a, b % 40, c % 40, True),
    "lop3.b32 %out, %a0, %a1, %a2, 0xe8": lambda a, b, c: (a & b) | (a & c) | (b & c),
    "lop3.b32 %out, %a0, %a1, %a2, 0x96": lambda a, b, c: a ^ b ^ c,
    "div.u32 %out, %a0, %r3": lambda a, b, c: a // (b | 1),
    "rem.s32 %out, %a0, 7": lambda a, b, c: int(np.fmod(a - (a >> 31 << 32), 7)),
    "dp4a.u32.u32 %out, %a0, %a1, %a2": lambda a, b, c: (
        c + sum((a >> i & 255) * (b >> i & 255) for i in (0, 8, 16, 24))
    ),
    "prmt.b32 %out, %a0, %a1, 0x6420": lambda a, b, c: (
        (a & 255) | (a >> 16 & 255) << 8 | (b & 255) << 16 | (b >> 16 & 255) << 24
    ),
    "prmt.b32 %out, %a0, %a1, 0x00ab": lambda a, b, c: (
        (255 if a >> 31 else 0)
        | (255 if a >> 23 & 1 else 0) << 8
        | (a & 255) << 16
        | (a & 255) << 24
    ),
    "add.u16x2 %out, %a0, %a1": lambda a, b, c: (
        (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16
    ),
}


@pytest.mark.parametrize("text", list(SINGLE))
def test_single(text):
    a, b, c = words(3), words(4), words(5)
    setup = "  rem.u32 %r1, %a1, 40;\n  rem.u32 %r2, %a2, 40;\n  or.b32 %r3, %a1, 1;\n"
    got = run_lanes(f"{setup}  {text};", a, b, c)
    want = wrap([SINGLE[text](int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)], 32)
    np.testing.assert_array_equal(got, want)


def test_wide_products_and_carries():
    a, b = words(6), words(7)
    got = run_lanes("  mul.wide.u32 %out, %a0, %a1;", a, b, out=np.uint64)
    np.testing.assert_array_equal(got, a.astype(np.uint64) * b)
    text = """
  mov.b64 {%r1, %r2}, %a0;
  mov.b64 {%r3, %r4}, %a1;
  add.cc.u32 %r5, %r1, %r3;
  addc.u32 %r6, %r2, %r4;
  mov.b64 %out, {%r5, %r6};"""
    x, y = words(8, np.uint64), words(9, np.uint64)
    np.testing.assert_array_equal(run_lanes(text, x, y, out=np.uint64), x + y)


@pytest.mark.parametrize("compare", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("type_", ["s32", "u32", "f32"])
def test_setp_selp(compare, type_):
    dtype = {"s32": np.int32, "u32": np.uint32, "f32": np.float32}[type_]
    if type_ == "f32":
        rng = np.random.default_rng(0)
        a, b = (rng.integers(-2, 2, 32).astype(np.float32) for _ in range(2))
        a[3] = b[5] = np.nan
    else:
        a, b = words(10, dtype), words(11, dtype)
        b[::3] = a[::3]
    with np.errstate(invalid="ignore"):
        want = getattr(np, {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
                            "ge": "greater_equal"}[compare])(a, b)  # fmt: skip
        if compare == "ne" and type_ == "f32":
            want &= ~(np.isnan(a) | np.isnan(b))  # ne is ordered, neu is not
    text = f"  setp.{compare}.{type_} %p1, %a0, %a1;\n  selp.b32 %out, 7, 9, %p1;"
    np.testing.assert_array_equal(run_lanes(text, a, b), np.where(want, 7, 9))
    odd = np.arange(32) % 2 == 1
    text = f"""
  and.b32 %r1, %t, 1;
  setp.ne.u32 %p3, %r1, 0;
  setp.{compare}.and.{type_} %p1|%p2, %a0, %a1, !%p3;
  selp.b32 %r2, 1, 0, %p1;
  selp.b32 %r3, 2, 0, %p2;
  or.b32 %out, %r2, %r3;"""
    np.testing.assert_array_equal(run_lanes(text, a, b), (want & ~odd) + 2 * (~want & ~odd))


def test_float_arithmetic_uses_the_rounding_of_the_text():
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(32).astype(np.float32) for _ in range(3))
    np.testing.assert_array_equal(
        run_lanes("  add.rn.f32 %out, %a0, %a1;", a, b, out=np.float32), a + b
    )
    exact = (a.astype(np.float64) * b + c).astype(np.float32)
    got = run_lanes("  fma.rn.f32 %out, %a0, %a1, %a2;", a, b, c, out=np.float32)
    np.testing.assert_array_equal(got, exact)
    got = run_lanes("  max.f32 %out, %a0, %a1;", np.full(32, np.nan, np.float32), b, out=np.float32)
    np.testing.assert_array_equal(got, b)
    got = run_lanes("  cvt.rn.bf16x2.f32 %out, %a0, %a1;", a, b)
    import ml_dtypes

    high, low = (x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for x in (a, b))
    np.testing.assert_array_equal(got, high << 16 | low)


# ---- divergence ----------------------------------------------------------------------------------------------------------


def test_loops_with_different_trip_counts_reconverge():
    # Lane i adds 0 + 1 + ... + i; then all lanes take part in a reduction.
    text = """
  mov.b32 %r1, 0;
  mov.b32 %r2, 0;
LOOP:
  add.u32 %r1, %r1, %r2;
  add.u32 %r2, %r2, 1;
  setp.le.u32 %p1, %r2, %t;
  @%p1 bra LOOP;
  redux.sync.add.u32 %r3, %r1, -1;
  activemask.b32 %r4;
  setp.eq.u32 %p2, %r4, -1;
  selp.b32 %out, %r3, 0, %p2;"""
    lane = np.arange(32)
    np.testing.assert_array_equal(run_lanes(text), np.full(32, (lane * (lane + 1) // 2).sum()))


def test_nested_branches_and_guards():
    text = """
  and.b32 %r1, %t, 3;
  setp.lt.u32 %p1, %r1, 2;
  @%p1 bra LOW;
  setp.eq.u32 %p2, %r1, 2;
  @%p2 mov.b32 %out, 22;
  @!%p2 mov.b32 %out, 33;
  bra.uni JOIN;
LOW:
  setp.eq.u32 %p2, %r1, 0;
  @%p2 bra ZERO;
  mov.b32 %out, 11;
  bra.uni JOIN;
ZERO:
  mov.b32 %out, 0;
JOIN:
  shfl.sync.bfly.b32 %r2, %out, 1, 31, -1;
  mad.lo.u32 %out, %r2, 100, %out;"""
    own = np.array([0, 11, 22, 33] * 8)
    np.testing.assert_array_equal(run_lanes(text), own[np.arange(32) ^ 1] * 100 + own)


def test_scoped_labels_and_registers():
    text = """
  mov.b32 %out, 0;
  {
  .reg .pred P1;
  .reg .b32 t<2>;
  mov.b32 t1, 3;
  AGAIN:
  add.u32 %out, %out, t1;
  sub.u32 t1, t1, 1;
  setp.ne.u32 P1, t1, 0;
  @P1 bra AGAIN;
  }
  {
  .reg .pred P1;
  .reg .b32 t1;
  mov.b32 t1, 2;
  AGAIN:
  add.u32 %out, %out, 100;
  sub.u32 t1, t1, 1;
  setp.ne.u32 P1, t1, 0;
  @P1 bra AGAIN;
  }"""
    np.testing.assert_array_equal(run_lanes(text), np.full(32, 206))


def test_a_spinning_lane_lets_the_others_run():
    # Lane 0 spins at a lower address than the code that releases it.
    text = """
  mov.b32 %r9, dynamic;
  setp.eq.u32 %p1, %t, 0;
  @%p1 st.shared.b32 [%r9], 0;
  bar.warp.sync -1;
  @!%p1 bra WRITE;
SPIN:
  ld.volatile.shared.b32 %r1, [%r9];
  setp.eq.u32 %p2, %r1, 0;
  @%p2 bra SPIN;
  bra.uni JOIN;
WRITE:
  setp.eq.u32 %p3, %t, 31;
  @%p3 st.volatile.shared.b32 [%r9], 5;
JOIN:
  bar.warp.sync -1;
  ld.shared.b32 %out, [%r9];"""
    np.testing.assert_array_equal(run_lanes(text, shared=16), np.full(32, 5))


# ---- warp instructions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode):
    a = words(12)
    lane = np.arange(32)
    clamp = 0 if mode == "up" else 31
    source = {"up": lane - 5, "down": lane + 5, "bfly": lane ^ 5, "idx": np.full(32, 5)}[mode]
    valid = (source >= 0) & (source < 32)
    source = np.where(valid, source, lane)
    text = f"  shfl.sync.{mode}.b32 %out|%p1, %a0, 5, {clamp}, -1;"
    np.testing.assert_array_equal(run_lanes(text, a), a[source])
    got = run_lanes(f"{text}\n  selp.b32 %out, 1, 0, %p1;", a)
    np.testing.assert_array_equal(got, valid)


def test_shuffles_in_segments():
    a = words(13)
    lane = np.arange(32)
    got = run_lanes("  shfl.sync.idx.b32 %out, %a0, 3, 0x181f, -1;", a)  # segments of 8
    np.testing.assert_array_equal(got, a[lane // 8 * 8 + 3])


def test_votes_matches_reductions():
    a = (words(14) % 4).astype(np.uint32)
    bits = sum(int(x == 1) << i for i, x in enumerate(a))
    text = "  setp.eq.u32 %p1, %a0, 1;\n"
    np.testing.assert_array_equal(
        run_lanes(text + "  vote.sync.ballot.b32 %out, %p1, -1;", a), np.full(32, bits)
    )
    for mode, want in (
        ("any", bits != 0),
        ("all", bits == 2**32 - 1),
        ("uni", bits in (0, 2**32 - 1)),
    ):
        got = run_lanes(
            text + f"  vote.sync.{mode}.pred %p2, %p1, -1;\n  selp.b32 %out, 1, 0, %p2;", a
        )
        np.testing.assert_array_equal(got, np.full(32, want))
    got = run_lanes("  match.any.sync.b32 %out, %a0, -1;", a)
    np.testing.assert_array_equal(got, [sum(int(x == y) << i for i, y in enumerate(a)) for x in a])
    for op, function in (("add", np.sum), ("min", np.min), ("max", np.max)):
        got = run_lanes(f"  redux.sync.{op}.u32 %out, %a0, -1;", a)
        np.testing.assert_array_equal(got, np.full(32, function(a)))
    got = run_lanes("  elect.sync %r1|%p1, -1;\n  selp.b32 %out, 1, 0, %p1;", a)
    assert got.sum() == 1


# ---- memory ----------------------------------------------------------------------------------------------------------------


def test_vectors_widths_and_generic_addresses():
    a = words(15, np.uint8)
    text = """
  mov.b32 %r9, dynamic;
  add.u32 %r1, %r9, %t;
  st.shared.b8 [%r1], %a0;
  bar.sync 0;
  and.b32 %r2, %t, 7;
  mad.lo.u32 %r3, %r2, 4, %r9;
  cvt.u64.u32 %rd10, %r3;
  cvta.shared.u64 %rd11, %rd10;
  ld.s8 %r4, [%rd11];
  ld.shared.v2.u16 {%h1, %h2}, [%r3];
  cvt.u32.u16 %r5, %h2;
  shl.b32 %r5, %r5, 16;
  and.b32 %r4, %r4, 0xffff;
  or.b32 %out, %r4, %r5;"""
    got = run_lanes(text, a, shared=64)
    first = np.arange(32) % 8 * 4
    want = (a[first].view(np.int8).astype(np.int16).view(np.uint16)).astype(np.uint32)
    want |= (a[first + 2].astype(np.uint32) << 16) | (a[first + 3].astype(np.uint32) << 24)
    np.testing.assert_array_equal(got, want)


def test_local_memory_is_private():
    text = """
  mov.u64 %rd10, depot;
  mad.lo.u32 %r1, %t, 3, 1;
  st.local.u32 [%rd10+4], %r1;
  cvta.local.u64 %rd11, %rd10;
  ld.u32 %out, [%rd11+4];"""
    np.testing.assert_array_equal(
        run_lanes(".local .align 8 .b8 depot[16];" + text), np.arange(32) * 3 + 1
    )


@pytest.mark.parametrize("space", ["shared", "global"])
def test_atomics(space):
    counter = np.zeros(4, np.uint32)
    address = "mov.u64 %rd10, %rd1;" if space == "global" else "mov.b32 %r9, dynamic;"
    base = "%rd10" if space == "global" else "%r9"
    init = (
        ""
        if space == "global"
        else f"""
  setp.lt.u32 %p1, %t, 4;
  mad.lo.u32 %r8, %t, 4, {base};
  @%p1 st.shared.u32 [%r8], 0;
  bar.sync 0;"""
    )
    body = f"""
  {address}{init}
  atom.{space}.add.u32 %r1, [{base}], 2;
  red.{space}.max.u32 [{base}+4], %t;
  atom.{space}.cas.b32 %r2, [{base}+8], 0, 77;
  red.{space}.or.b32 [{base}+12], %t;
  bar.sync 0;
  mad.wide.u32 %rd12, %t, 4, %rd0;
  st.global.u32 [%rd12], %r1;
  setp.lt.u32 %p1, %t, 4;
  mad.lo.u32 %r8, %t, 4, 0;
  cvt.u64.u32 %rd13, %r8;
  add.u64 %rd13, %rd13, %rd1;
"""
    if space == "shared":
        body += f"  mad.lo.u32 %r8, %t, 4, {base};\n  @%p1 ld.shared.u32 %r3, [%r8];\n  @%p1 st.global.u32 [%rd13], %r3;"
    result = np.zeros(64, np.uint32)
    Emulator(kernel(body, 2)).launch("k", 1, 64, [result, counter], shared=16)
    assert sorted(result) == list(range(0, 128, 2))
    np.testing.assert_array_equal(counter, [128, 63, 77, 63])


def test_grid_is_shared_among_host_threads():
    out = np.zeros(64 * 32, np.uint32)
    body = """
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %nctaid.x;
  mad.lo.u32 %r3, %r1, 32, %t;
  mad.wide.u32 %rd1, %r3, 4, %rd0;
  mad.lo.u32 %r4, %r2, 1000, %r3;
  st.global.u32 [%rd1], %r4;"""
    Emulator(kernel(body, 1)).launch("k", 64, 32, [out], threads=2)
    np.testing.assert_array_equal(out, 64000 + np.arange(64 * 32))


def test_ctas_may_wait_for_each_other_through_global_memory():
    # CTA i waits for CTA i + 1; the last starts the chain. Works with one host thread.
    flags = np.zeros(9, np.uint32)
    body = """
  mov.u32 %r1, %ctaid.x;
  mad.wide.u32 %rd1, %r1, 4, %rd0;
  setp.eq.u32 %p1, %r1, 7;
  @%p1 bra RELEASE;
SPIN:
  ld.acquire.gpu.global.u32 %r2, [%rd1+4];
  setp.eq.u32 %p2, %r2, 0;
  @%p2 bra SPIN;
RELEASE:
  add.u32 %r3, %r1, 1;
  st.release.gpu.global.u32 [%rd1], %r3;"""
    Emulator(kernel(body, 1)).launch("k", 8, 32, [flags], threads=1)
    np.testing.assert_array_equal(flags, [1, 2, 3, 4, 5, 6, 7, 8, 0])


# ---- errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  frobnicate.b32 %r1, %r2;", "PTX line .*frobnicate.*not an instruction"),
        ("  add.u32 %r1, %rd1, 3;", "register of the wrong width"),
        ("  bra NOWHERE;", "no label 'NOWHERE'"),
        ("  setp.eq.u32 %p99, %r1, 0;", "unknown symbol|expects a predicate"),
    ],
)
def test_malformed_text(body, message):
    with pytest.raises(EmulatorError, match=message):
        Emulator(kernel(body))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  mov.b32 %r1, dynamic;\n  ld.shared.u32 %r2, [%r1];", "which nothing has written"),
        ("  mov.b32 %r1, dynamic;\n  st.shared.u32 [%r1+64], 1;", "outside the CTA's shared memory"),
        ("  st.shared.u32 [0], 1;", "outside the CTA's shared memory"),
        ("  mov.b32 %r1, dynamic;\n  st.shared.u32 [%r1+2], 1;", "misaligned"),
        ("  st.global.u32 [%rd0+4096], 1;", "out of bounds.*4096 bytes after the start of 'array 0"),
        ("  st.global.u32 [%rd0-4], 1;", "in no buffer of the launch|out of bounds"),
        ("  bar.sync 0, 64;", "deadlock(.|\n)*barrier 0: 32 of 64 threads"),
        ("  trap;", "trapped"),
        ("  setp.eq.u32 %p1, %t, 0;\n  @%p1 bra L;\n  bar.warp.sync -1;\n  bra.uni M;\nL:\n  shfl.sync.idx.b32 %r1, "
         "%t, 0, 31, -1;\nM:", "deadlock(.|\n)*to reach the same instruction"),
        ("L:\n  bra.uni L;", "livelock"),
    ],
)  # fmt: skip
def test_faults_name_the_place(body, message):
    out = np.zeros(4, np.uint32)
    with pytest.raises(EmulatorError, match=message) as error:
        Emulator(kernel(body, 1)).launch("k", 1, 32, [out], shared=64)
    assert "in kernel k" in str(error.value)
    assert "warp 0" in str(error.value)
    assert "PTX line" in str(error.value)


def test_read_only_operands_stay_so():
    out = np.zeros(4, np.uint32)
    out.flags.writeable = False
    with pytest.raises(EmulatorError, match="read-only"):
        Emulator(kernel("  st.global.u32 [%rd0], 1;", 1)).launch("k", 1, 32, [out])


def test_launch_checks():
    module = Emulator(kernel("  bar.sync 0;"))
    with pytest.raises(EmulatorError, match="2048 threads"):
        module.launch("k", 1, 2048)
    with pytest.raises(EmulatorError, match="a CTA can have 232448"):
        module.launch("k", 1, 32, shared=232449)
    with pytest.raises(EmulatorError, match="in clusters of"):
        module.launch("k", 3, 32, cluster=2)


def test_trace_counts_instructions_and_bytes():
    out = np.zeros(32, np.uint32)
    body = "  mad.wide.u32 %rd1, %t, 4, %rd0;\n  st.global.u32 [%rd1], %t;\n  bra.uni END;\n  trap;\nEND:"
    result = Emulator(kernel(body, 1)).launch("k", 1, 32, [out], trace=True)
    trace = json.loads(result.trace)
    assert trace["global_bytes_written"] == 128
    assert trace["warps"][0]["st.global.u32"] == 1
    assert len(trace["unexecuted_lines"]) == 1
    assert trace["warp_instructions"] == result.instructions == 6
