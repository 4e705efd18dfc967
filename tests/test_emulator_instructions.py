"""Single PTX instructions on the emulator, run by a warp, against NumPy models.

What the instructions compute in floating point and where the layouts put things is tested at the
source in test_emulator_formats.py, _layouts.py and _products.py; here are the decoder's way there,
the integer, bit, warp and memory instructions, and control flow.
"""

import emulator
import numerics
import numpy as np
import pytest

LANES = np.arange(32, dtype=np.uint32)
KINDS = {"b32": np.uint32, "b64": np.uint64, "f32": np.float32}


def run(body: str, outputs: dict[str, str], registers: str = "", **inputs: np.ndarray):
    """Runs `body` in one warp. Inputs are arrays of 32 per-lane values, named as registers of
    their width; `outputs` maps registers to b32 or b64. Returns the outputs by name."""
    declared, parameters, loads, stores, results = [], [], [], [], {}
    for name, values in inputs.items():
        width = values.dtype.itemsize * 8
        declared.append(f".reg .b{width} %{name};")
        parameters.append(values)
        index = len(parameters) - 1
        loads.append(
            f"ld.param.u64 %ptr, [p{index}]; mad.wide.u32 %ptr, %lane, {width // 8}, %ptr;"
        )
        loads.append(f"ld.global.b{width} %{name}, [%ptr];")
    for name, kind in outputs.items():
        if f"%{name};" not in registers and f"%{name}," not in registers:
            declared.append(f".reg .{kind} %{name};")
        results[name] = np.zeros(32, KINDS[kind])
        parameters.append(results[name])
        size = results[name].itemsize
        index = len(parameters) - 1
        stores.append(f"ld.param.u64 %ptr, [p{index}]; mad.wide.u32 %ptr, %lane, {size}, %ptr;")
        stores.append(f"st.global.b{size * 8} [%ptr], %{name};")
    signature = ", ".join(f".param .u64 p{i}" for i in range(len(parameters)))
    lines = "\n".join([*declared, registers, "mov.u32 %lane, %laneid;", *loads, body, *stores])
    ptx = f""".version 9.0
.target sm_100a
.address_size 64
.visible .entry k({signature}) {{
.reg .b64 %ptr;
.reg .b32 %lane;
{lines}
ret;
}}
"""
    emulator.Emulator(ptx).launch(None, grid=1, block=32, params=parameters)
    return results


def words(seed: int) -> np.ndarray:
    """32 values that include the extremes."""
    values = np.random.default_rng(seed).integers(0, 2**32, 32, dtype=np.uint32)
    values[:8] = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 31, 33]
    return np.random.default_rng(seed + 100).permutation(values)


A, B, C = words(0), words(1), words(2)
S = {name: v.view(np.int32).astype(np.int64) for name, v in (("a", A), ("b", B), ("c", C))}
U = {name: v.astype(np.int64) for name, v in (("a", A), ("b", B), ("c", C))}


def bits(value):
    return np.array([int(v) % 2**32 for v in value], np.uint32)


def wide_product(a, b):
    return a.astype(object) * b.astype(object)


def shifted(signed, left=False):
    out = []
    for x, n in zip(S["a"] if signed else U["a"], U["b"], strict=True):
        n = min(int(n), 32)
        out.append(int(x) << n if left else int(x) >> n)
    return np.array(out, object)


def by_lane(function, *operands):
    return [function(*(int(x) for x in lane)) for lane in zip(*operands, strict=True)]


def extract(value, position, length, signed):
    position, length = position & 0xFF, length & 0xFF
    top = min(position + length - 1, 31)
    sign = (value >> top & 1) if signed and length else 0
    out = 0
    for i in range(32):
        inside = i < length and position + i <= 31
        out |= (value >> (position + i) & 1 if inside else sign) << i
    return out


def permute(a, b, selector):
    whole = b << 32 | a
    out = 0
    for i in range(4):
        code = selector >> 4 * i & 15
        byte = whole >> 8 * (code & 7) & 255
        out |= (
            (0xFF if byte & 0x80 else 0 if code & 8 else byte) << 8 * i
            if code & 8
            else byte << 8 * i
        )
    return out


def majority_bits(a, b, c):
    return (a & b) | (a & c) | (b & c)


def dot4(a, b, c, signed):
    total = c
    for i in range(4):
        x, y = a >> 8 * i & 255, b >> 8 * i & 255
        total += (x - 256 * (x >> 7) if signed else x) * (y - 256 * (y >> 7) if signed else y)
    return total


def quotient(a, b):
    """Truncating division; None where the divisor is zero."""
    return [0 if y == 0 else int(abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1)
            for x, y in zip(a.tolist(), b.tolist(), strict=True)]  # fmt: skip


NONZERO = np.where(B == 0, 7, B).astype(np.uint32)
NONZERO_S = NONZERO.view(np.int32).astype(np.int64)
COUNT = (LANES * 3 % 40).astype(np.uint32)

INTEGER = {
    "add.s32 %d, %a, %b;": lambda: U["a"] + U["b"],
    "sub.u32 %d, %a, %b;": lambda: U["a"] - U["b"],
    "mul.lo.s32 %d, %a, %b;": lambda: wide_product(S["a"], S["b"]),
    "mul.hi.s32 %d, %a, %b;": lambda: wide_product(S["a"], S["b"]) >> 32,
    "mul.hi.u32 %d, %a, %b;": lambda: wide_product(U["a"], U["b"]) >> 32,
    "mad.lo.u32 %d, %a, %b, %c;": lambda: wide_product(U["a"], U["b"]) + U["c"],
    "mad.hi.s32 %d, %a, %b, %c;": lambda: (wide_product(S["a"], S["b"]) >> 32) + S["c"],
    "mul24.lo.u32 %d, %a, %b;": lambda: wide_product(U["a"] & 0xFFFFFF, U["b"] & 0xFFFFFF),
    "min.s32 %d, %a, %b;": lambda: np.minimum(S["a"], S["b"]),
    "max.u32 %d, %a, %b;": lambda: np.maximum(U["a"], U["b"]),
    "max.relu.s32 %d, %a, %b;": lambda: np.maximum(np.maximum(S["a"], S["b"]), 0),
    "abs.s32 %d, %a;": lambda: np.abs(S["a"]),
    "neg.s32 %d, %a;": lambda: -S["a"],
    "sad.u32 %d, %a, %b, %c;": lambda: np.abs(U["a"] - U["b"]) + U["c"],
    "and.b32 %d, %a, %b;": lambda: A & B,
    "or.b32 %d, %a, %b;": lambda: A | B,
    "xor.b32 %d, %a, %b;": lambda: A ^ B,
    "not.b32 %d, %a;": lambda: ~A,
    "cnot.b32 %d, %a;": lambda: (A == 0).astype(np.uint32),
    "shl.b32 %d, %a, %b;": lambda: shifted(False, left=True),
    "shr.u32 %d, %a, %b;": lambda: shifted(False),
    "shr.s32 %d, %a, %b;": lambda: shifted(True),
    "popc.b32 %d, %a;": lambda: by_lane(int.bit_count, A),
    "clz.b32 %d, %a;": lambda: by_lane(lambda x: 32 - x.bit_length(), A),
    "bfind.u32 %d, %a;": lambda: by_lane(lambda x: x.bit_length() - 1, A),
    "brev.b32 %d, %a;": lambda: by_lane(lambda x: int(f"{x:032b}"[::-1], 2), A),
    "bfe.u32 %d, %a, %n, 9;": lambda: by_lane(lambda x, n: extract(x, n, 9, False), A, COUNT),
    "bfe.s32 %d, %a, 7, %n;": lambda: by_lane(lambda x, n: extract(x, 7, n, True), A, COUNT),
    "bfi.b32 %d, %a, %b, 5, 11;": lambda: (
        (B & ~np.uint32(0x7FF << 5)) | (A & np.uint32(0x7FF)) << 5
    ),
    "prmt.b32 %d, %a, %b, 0x5410;": lambda: by_lane(lambda x, y: permute(x, y, 0x5410), A, B),
    "prmt.b32 %d, %a, %b, %c;": lambda: by_lane(permute, A, B, C & 0xFFFF),
    "lop3.b32 %d, %a, %b, %c, 0xE8;": lambda: majority_bits(A, B, C),
    "lop3.b32 %d, %a, %b, %c, 0x1B;": lambda: by_lane(
        lambda x, y, z: sum(
            (0x1B >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1) & 1) << i
            for i in range(32)
        ),
        A,
        B,
        C,
    ),
    "shf.l.wrap.b32 %d, %a, %b, %n;": lambda: by_lane(
        lambda x, y, n: (y << 32 | x) << (n & 31) >> 32, A, B, COUNT
    ),
    "shf.r.clamp.b32 %d, %a, %b, %n;": lambda: by_lane(
        lambda x, y, n: (y << 32 | x) >> min(n, 32), A, B, COUNT
    ),
    "dp4a.u32.u32 %d, %a, %b, %c;": lambda: by_lane(lambda *x: dot4(*x, False), A, B, C),
    "dp4a.s32.s32 %d, %a, %b, %c;": lambda: by_lane(lambda *x: dot4(*x, True), A, B, C),
    "div.u32 %d, %a, %z;": lambda: U["a"] // NONZERO,
    "div.s32 %d, %a, %z;": lambda: quotient(S["a"], NONZERO_S),
    "rem.u32 %d, %a, %z;": lambda: U["a"] % NONZERO,
    "rem.s32 %d, %a, %z;": lambda: np.fmod(S["a"], NONZERO_S),
    "selp.b32 %d, %a, %b, %odd;": lambda: np.where(LANES % 2 == 1, A, B),
    "slct.b32.s32 %d, %a, %b, %c;": lambda: np.where(S["c"] >= 0, A, B),
    "set.lt.u32.s32 %d, %a, %b;": lambda: np.where(S["a"] < S["b"], 0xFFFFFFFF, 0),
    "vote.sync.ballot.b32 %d, %odd, -1;": lambda: np.full(32, 0xAAAAAAAA),
    "redux.sync.add.s32 %d, %a, -1;": lambda: np.full(32, S["a"].sum()),
    "redux.sync.min.u32 %d, %a, -1;": lambda: np.full(32, A.min()),
    "redux.sync.or.b32 %d, %a, -1;": lambda: np.full(32, np.bitwise_or.reduce(A)),
    "match.any.sync.b32 %d, %n, -1;": lambda: [
        sum(1 << j for j in range(32) if COUNT[j] == COUNT[i]) for i in range(32)
    ],
    "activemask.b32 %d;": lambda: np.full(32, 0xFFFFFFFF),
    "shfl.sync.idx.b32 %d, %a, %n, 31, -1;": lambda: A[COUNT % 32],
    "shfl.sync.bfly.b32 %d, %a, 5, 31, -1;": lambda: A[LANES ^ 5],
    "shfl.sync.up.b32 %d, %a, 3, 0, -1;": lambda: A[np.where(LANES >= 3, LANES - 3, LANES)],
    "shfl.sync.down.b32 %d, %a, 4, 31, -1;": lambda: A[np.where(LANES + 4 < 32, LANES + 4, LANES)],
    "shfl.sync.bfly.b32 %d, %a, 3, 0x1c1f, -1;": lambda: A[LANES ^ 3],
}


@pytest.mark.parametrize("instruction", INTEGER)
def test_integer_instructions(instruction):
    body = f"and.b32 %t, %lane, 1; setp.eq.u32 %odd, %t, 1;\n{instruction}"
    got = run(
        body, {"d": "b32"}, ".reg .pred %odd; .reg .b32 %t;", a=A, b=B, c=C, n=COUNT, z=NONZERO
    )
    np.testing.assert_array_equal(got["d"], bits(INTEGER[instruction]()))


@pytest.mark.parametrize("logic", ["and", "or"])
def test_lop3_with_a_predicate(logic):
    body = f"""
    setp.gt.s32 %q, %b, 0;
    mov.b32 %kept, 7;
    setp.lt.u32 %low, %lane, 20;
    lop3.{logic}.b32 %d|%p, %a, %b, %c, 0x80, %q;
    selp.u32 %first, 1, 0, %p;
    @%low lop3.{logic}.b32 _|%p, %a, 0, 0, 0xf0, !%q;
    selp.u32 %second, 1, 0, %p;
    @%low lop3.{logic}.b32 %kept|_, %a, %b, %c, 0x96, %q;
    """
    kinds = dict.fromkeys(("d", "first", "second", "kept"), "b32")
    got = run(body, kinds, ".reg .pred %p, %q, %low;", a=A, b=B, c=C)
    combine = {"and": np.logical_and, "or": np.logical_or}[logic]
    q, low = S["b"] > 0, LANES < 20
    first = combine((A & B & C) != 0, q)
    np.testing.assert_array_equal(got["d"], A & B & C)
    np.testing.assert_array_equal(got["first"], first)
    np.testing.assert_array_equal(got["second"], np.where(low, combine(A != 0, ~q), first))
    np.testing.assert_array_equal(got["kept"], np.where(low, A ^ B ^ C, 7))


def test_wide_integers():
    rng = np.random.default_rng(5)
    x, y = (rng.integers(0, 2**64, 32, dtype=np.uint64) for _ in range(2))
    body = """
    mul.wide.s32 %w, %a, %b;
    add.s64 %s, %x, %y;
    mul.hi.u64 %h, %x, %y;
    shl.b64 %l, %x, %n;
    mov.b64 {%lo, %hi}, %x;
    mov.b64 %p, {%hi, %lo};
    cvt.s64.s32 %e, %a;
    """
    kinds = dict.fromkeys(("w", "s", "h", "l", "p", "e"), "b64")
    got = run(body, kinds, ".reg .b32 %lo, %hi;", a=A, b=B, n=COUNT, x=x, y=y)
    big = [int(v) for v in x], [int(v) for v in y]
    modulus = 2**64
    want = {
        "w": [int(p) % modulus for p in wide_product(S["a"], S["b"])],
        "s": [(p + q) % modulus for p, q in zip(*big, strict=True)],
        "h": [p * q >> 64 for p, q in zip(*big, strict=True)],
        "l": [(p << int(n)) % modulus for p, n in zip(big[0], COUNT, strict=True)],
        "p": [(p >> 32) | (p & 0xFFFFFFFF) << 32 for p in big[0]],
        "e": [int(v) % modulus for v in S["a"]],
    }
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], np.array(values, np.uint64), err_msg=name)


def test_carry_chain():
    body = "add.cc.u32 %lo, %a, %b; addc.u32 %hi, %c, 0; sub.cc.u32 %m, %a, %b; subc.u32 %k, %c, 0;"
    got = run(body, dict.fromkeys(("lo", "hi", "m", "k"), "b32"), a=A, b=B, c=C)
    np.testing.assert_array_equal(got["hi"], bits(U["c"] + (U["a"] + U["b"] >> 32)))
    np.testing.assert_array_equal(got["k"], bits(U["c"] - (A < B)))


FLOATS = np.random.default_rng(6).normal(size=(3, 32)).astype(np.float32)


def test_float_instructions_reach_the_numerics():
    x, y, z = FLOATS
    body = """
    add.f32 %d0, %x, %y;
    sub.rn.f32 %d1, %x, %y;
    mul.ftz.f32 %d2, %x, %y;
    fma.rn.f32 %d3, %x, %y, %z;
    max.f32 %d4, %x, %y;
    max.f32 %d5, %x, %y, %z;
    neg.f32 %d6, %x;
    abs.f32 %d7, %x;
    fma.rz.sat.f32 %d8, %x, %y, %z;
    ex2.approx.ftz.f32 %d9, %x;
    rcp.approx.ftz.f32 %d10, %x;
    """
    got = run(body, {f"d{i}": "f32" for i in range(11)}, x=x, y=y, z=z)
    exact = x.astype(np.float64) * y + z
    want = [x + y, x - y, x * y, exact.astype(np.float32), np.maximum(x, y),
            np.maximum(np.maximum(x, y), z), -x, np.abs(x)]  # fmt: skip
    for i, values in enumerate(want):
        np.testing.assert_array_equal(got[f"d{i}"], values, err_msg=str(i))
    assert ((got["d8"] >= 0) & (got["d8"] <= 1)).all()
    np.testing.assert_allclose(got["d9"], np.exp2(x), rtol=2e-7)
    np.testing.assert_allclose(got["d10"], 1 / x, rtol=2e-7)


def test_packed_floats_and_conversions():
    x, y, z = FLOATS
    body = """
    mov.b64 %p, {%x, %y};
    fma.rn.f32x2 %q, %p, %p, %p;
    add.rm.f32x2 %r, %p, %p;
    cvt.rn.bf16x2.f32 %h, %x, %y;
    cvt.rn.satfinite.e4m3x2.f32 %e, %x, %y;
    mov.b32 %e32, {%e, %e};
    fma.rn.bf16x2 %g, %h, %h, %h;
    cvt.rni.s32.f32 %i, %z;
    """
    got = run(body, {"q": "b64", "r": "b64", "h": "b32", "e32": "b32", "i": "b32"},
              ".reg .b64 %p; .reg .b16 %e; .reg .b32 %g;", x=x, y=y, z=z)  # fmt: skip
    square = np.stack([x, y], 1).astype(np.float64)
    want = (square * square + square).astype(np.float32)
    np.testing.assert_array_equal(got["q"].view(np.float32).reshape(32, 2), want)
    np.testing.assert_array_equal(got["r"].view(np.float32).reshape(32, 2), 2 * np.stack([x, y], 1))
    rounded = lambda v: (v.view(np.uint32) + 0x7FFF + (v.view(np.uint32) >> 16 & 1)) >> 16  # noqa: E731
    np.testing.assert_array_equal(got["h"], rounded(x) << 16 | rounded(y))
    np.testing.assert_array_equal(got["e32"] >> 16, got["e32"] & 0xFFFF)
    np.testing.assert_array_equal(got["i"].view(np.int32), np.rint(z).astype(np.int32))


@pytest.mark.parametrize("compare", ["eq", "ne", "lt", "le", "gt", "ge", "ltu", "num", "nan"])
def test_setp(compare):
    x, y = FLOATS[0].copy(), FLOATS[1].copy()
    x[3], y[4], x[5], y[5], y[6] = np.nan, np.nan, np.nan, np.nan, x[6]
    body = f"setp.{compare}.f32 %p|%q, %x, %y; selp.b32 %d, 1, 0, %p; selp.b32 %e, 1, 0, %q;"
    got = run(body, {"d": "b32", "e": "b32"}, ".reg .pred %p, %q;", x=x, y=y)
    nan = np.isnan(x) | np.isnan(y)
    want = {"eq": x == y, "ne": (x != y) & ~nan, "lt": x < y, "le": x <= y, "gt": x > y,
            "ge": x >= y, "ltu": (x < y) | nan, "num": ~nan, "nan": nan}[compare]  # fmt: skip
    np.testing.assert_array_equal(got["d"], want)
    np.testing.assert_array_equal(got["e"], ~want)


def test_predicates():
    body = """
    setp.lt.s32 %p, %a, %b;
    setp.gt.and.u32 %q, %a, %b, %p;
    xor.pred %r, %p, %q;
    mov.u32 %d, 0;
    @%r add.u32 %d, %d, 5;
    @!%q add.u32 %d, %d, 100;
    vote.sync.any.pred %p, %q, -1;
    selp.u32 %e, 1, 0, %p;
    """
    got = run(body, {"d": "b32", "e": "b32"}, ".reg .pred %p, %q, %r;", a=A, b=B)
    p = S["a"] < S["b"]
    q = (A > B) & p
    np.testing.assert_array_equal(got["d"], 5 * (p ^ q) + 100 * ~q)
    assert (got["e"] == q.any()).all()


def test_divergence():
    """Lanes loop a different number of times, and meet again."""
    body = """
    mov.u32 %d, 0;
    mov.u32 %i, 0;
    loop:
    setp.ge.u32 %p, %i, %n;
    @%p bra done;
    add.u32 %d, %d, %i;
    add.u32 %i, %i, 1;
    bra loop;
    done:
    bar.warp.sync 0xffffffff;
    shfl.sync.bfly.b32 %e, %d, 1, 31, -1;
    """
    got = run(body, {"d": "b32", "e": "b32"}, ".reg .pred %p; .reg .b32 %i;", n=COUNT)
    want = COUNT * (COUNT - 1) // 2
    want = np.where(COUNT == 0, 0, want)
    np.testing.assert_array_equal(got["d"], want)
    np.testing.assert_array_equal(got["e"], want[LANES ^ 1])


def test_elect():
    body = "elect.sync %leader|%p, -1; selp.u32 %d, 1, 0, %p;"
    got = run(body, {"d": "b32", "leader": "b32"}, ".reg .pred %p;")
    assert got["d"].sum() == 1
    assert got["d"][got["leader"][0]] == 1


def test_atomics_in_shared_memory():
    body = """
    .shared .align 16 .b8 cells[64];
    mov.u32 %base, cells;
    setp.eq.u32 %p, %lane, 0;
    @%p st.shared.v4.b32 [%base], {%zero, %zero, %zero, %zero};
    bar.sync 0;
    atom.shared.add.u32 %old, [%base], %lane;
    atom.shared.max.u32 %t, [%base+4], %a;
    red.shared.or.b32 [%base+8], %a;
    atom.shared.inc.u32 %t, [%base+12], 6;
    bar.sync 0;
    ld.shared.v4.b32 {%d0, %d1, %d2, %d3}, [%base];
    """
    got = run(body, {**{f"d{i}": "b32" for i in range(4)}, "old": "b32"},
              ".reg .pred %p; .reg .b32 %base, %t;", a=A, zero=np.zeros(32, np.uint32))  # fmt: skip
    assert (got["d0"] == 496).all()
    assert (got["d1"] == A.max()).all()
    assert (got["d2"] == np.bitwise_or.reduce(A)).all()
    assert (got["d3"] == 32 % 7).all()
    assert sorted(got["old"].tolist())[0] == 0


def test_compare_and_swap():
    body = """
    .shared .align 8 .b8 cell[8];
    mov.u32 %base, cell;
    setp.eq.u32 %p, %lane, 0;
    @%p st.shared.b32 [%base], 7;
    bar.sync 0;
    atom.shared.cas.b32 %d, [%base], 7, %lane;
    """
    got = run(body, {"d": "b32"}, ".reg .pred %p; .reg .b32 %base;")
    assert (got["d"] == 7).sum() >= 1  # the winner saw 7; lane 7 may put it back for others
    assert set(got["d"].tolist()) <= set(range(32))


@pytest.mark.parametrize("transpose", [False, True])
def test_ldmatrix_and_stmatrix(transpose):
    """Row r of matrix m comes from lane 8 m + r; lane l receives two elements of row l / 4."""
    tiles = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8) * 257
    rows = tiles.reshape(32, 8).view(np.uint32).reshape(32, 4)
    suffix = ".trans" if transpose else ""
    body = f"""
    .shared .align 16 .b8 tile[1024];
    mov.u32 %base, tile;
    mad.lo.u32 %row, %lane, 16, %base;
    st.shared.v4.b32 [%row], {{%r0, %r1, %r2, %r3}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%d0, %d1, %d2, %d3}}, [%row];
    stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%row+512], {{%d0, %d1, %d2, %d3}};
    bar.sync 0;
    ld.shared.v4.b32 {{%e0, %e1, %e2, %e3}}, [%row+512];
    """
    names = [f"{x}{i}" for x in "de" for i in range(4)]
    inputs = {f"r{i}": np.ascontiguousarray(rows[:, i]) for i in range(4)}
    got = run(body, dict.fromkeys(names, "b32"), ".reg .b32 %base, %row;", **inputs)
    for m in range(4):
        tile = tiles[m].T if transpose else tiles[m]
        pairs = np.ascontiguousarray(tile).view(np.uint32).reshape(32)
        np.testing.assert_array_equal(got[f"d{m}"], pairs)
        np.testing.assert_array_equal(got[f"e{m}"], rows[:, m])


def test_mma_sync_reaches_the_products():
    """A = identity rows 0-7: D is B on its first rows."""
    a = np.zeros((16, 16), np.float16)
    a[:8, :8] = np.eye(8)
    b = np.random.default_rng(7).integers(-4, 5, (16, 8)).astype(np.float16)
    fragment = lambda m: np.ascontiguousarray(m).view(np.uint32)  # noqa: E731
    halves = fragment(a).reshape(16, 8)
    a_registers = [halves[:8, :4], halves[8:, :4], halves[:8, 4:], halves[8:, 4:]]
    columns = fragment(b.T).reshape(8, 8)
    inputs = {f"a{i}": np.ascontiguousarray(r).reshape(32) for i, r in enumerate(a_registers)}
    inputs |= {
        f"b{i}": np.ascontiguousarray(columns[:, 4 * i : 4 * i + 4]).reshape(32) for i in (0, 1)
    }
    inputs["z"] = np.zeros(32, np.float32)
    body = """mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%d0, %d1, %d2, %d3},
    {%a0, %a1, %a2, %a3}, {%b0, %b1}, {%z, %z, %z, %z};"""
    got = run(body, {f"d{i}": "f32" for i in range(4)}, **inputs)
    d = np.zeros((16, 8), np.float32)
    for i in range(4):
        d[LANES // 4 + 8 * (i // 2), 2 * (LANES % 4) + i % 2] = got[f"d{i}"]
    np.testing.assert_array_equal(d, a.astype(np.float32) @ b.astype(np.float32))


def test_vector_memory_and_widths():
    body = """
    .shared .align 16 .b8 buffer[2048];
    mov.u32 %base, buffer;
    mad.lo.u32 %at, %lane, 16, %base;
    st.shared.v2.b64 [%at], {%x, %y};
    ld.shared.u8 %d0, [%at+3];
    ld.shared.s8 %d1, [%at+7];
    ld.shared.s16 %d2, [%at+10];
    ld.shared.v2.u16 {%h0, %h1}, [%at+4];
    mov.b32 %d3, {%h0, %h1};
    """
    rng = np.random.default_rng(8)
    x, y = (rng.integers(0, 2**64, 32, dtype=np.uint64) for _ in range(2))
    got = run(body, {f"d{i}": "b32" for i in range(4)},
              ".reg .b32 %base, %at; .reg .b16 %h0, %h1;", x=x, y=y)  # fmt: skip
    raw = np.stack([x, y], 1).view(np.uint8).reshape(32, 16)
    np.testing.assert_array_equal(got["d0"], raw[:, 3])
    np.testing.assert_array_equal(got["d1"].view(np.int32), raw[:, 7].view(np.int8))
    halves = np.ascontiguousarray(raw[:, 10:12]).view(np.int16)[:, 0]
    np.testing.assert_array_equal(got["d2"].view(np.int32), halves)
    np.testing.assert_array_equal(
        got["d3"], np.ascontiguousarray(raw[:, 4:8]).view(np.uint32)[:, 0]
    )


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"seed": 2}, {"races": True}], ids=str)
def test_tensor_memory_and_product(options):
    """D = A B with A and B in shared memory, then read with three shapes of tcgen05.ld."""
    rng = np.random.default_rng(9)
    a, b = (rng.integers(-4, 5, (rows, 16)).astype(np.float16) for rows in (128, 32))
    out = np.zeros((128, 32), np.float32)
    halves = np.zeros((128, 32), np.uint32)
    # No swizzle: core matrices of 8 rows x 16 bytes; the two along K are 2048 and 512 bytes apart.
    tile = lambda m: np.ascontiguousarray(m.reshape(-1, 8, 2, 8).transpose(2, 0, 1, 3))  # noqa: E731
    operands = np.concatenate([tile(a).ravel(), tile(b).ravel()]).view(np.uint32)
    descriptor = numerics.tcgen05_descriptor
    a_fields = descriptor(0, 2048, 128, "none")
    b_fields = descriptor(0, 512, 128, "none")
    instruction = 1 << 4 | 32 // 8 << 17 | 128 // 16 << 24
    registers = ", ".join(f"%d{i}" for i in range(32))
    stores = "\n".join(f"st.global.b32 [%row+{4 * i}], %d{i};" for i in range(32))
    again = "\n".join(f"st.global.b32 [%other+{4 * i}], %d{i};" for i in range(32))
    ptx = f""".version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 source, .param .u64 result, .param .u64 result2) {{
.reg .b64 %source, %row, %other, %at, %ad, %bd, %x;
.reg .b32 %thr, %warp, %i, %v, %s, %taddr, %addr, %base, %d<32>;
.reg .pred %p, %first, %q;
.shared .align 128 .b8 tiles[8192];
.shared .align 8 .b64 barrier;
.shared .align 8 .b32 where;
mov.u32 %thr, %tid.x;
shr.u32 %warp, %thr, 5;
setp.eq.u32 %first, %thr, 0;
mov.u32 %base, tiles;
ld.param.u64 %source, [source];
mov.u32 %i, %thr;
copy:
mad.wide.u32 %at, %i, 4, %source;
ld.global.b32 %v, [%at];
mad.lo.u32 %s, %i, 4, %base;
st.shared.b32 [%s], %v;
add.u32 %i, %i, 128;
setp.lt.u32 %p, %i, {operands.size};
@%p bra copy;
mov.u32 %s, barrier;
@%first mbarrier.init.shared.b64 [%s], 1;
@%first fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
setp.eq.u32 %q, %warp, 0;
mov.u32 %addr, where;
@%q tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%addr], 64;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 %taddr, [%addr];
shr.u32 %v, %base, 4;
cvt.u64.u32 %x, %v;
or.b64 %ad, %x, {a_fields};
add.u32 %v, %base, 4096;
shr.u32 %v, %v, 4;
cvt.u64.u32 %x, %v;
or.b64 %bd, %x, {b_fields};
setp.ne.u32 %p, %thr, %thr;
@%first tcgen05.mma.cta_group::1.kind::f16 [%taddr], %ad, %bd, {instruction}, %p;
@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%s];
wait:
mbarrier.try_wait.parity.shared.b64 %p, [%s], 0;
@!%p bra wait;
tcgen05.fence::after_thread_sync;
shl.b32 %v, %warp, 21;
add.u32 %addr, %taddr, %v;
tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{registers}}}, [%addr];
tcgen05.wait::ld.sync.aligned;
ld.param.u64 %row, [result];
mad.wide.u32 %row, %thr, 128, %row;
{stores}
tcgen05.ld.sync.aligned.16x32bx2.x16.b32 {{{", ".join(f"%d{i}" for i in range(16))}}}, [%addr], 16;
add.u32 %v, %addr, 1048576;
tcgen05.ld.sync.aligned.16x256b.x4.b32 {{{", ".join(f"%d{16 + i}" for i in range(16))}}}, [%v];
tcgen05.wait::ld.sync.aligned;
ld.param.u64 %other, [result2];
mad.wide.u32 %other, %thr, 128, %other;
{again}
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%q tcgen05.dealloc.cta_group::1.sync.aligned.b32 %taddr, 64;
@%q tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ret;
}}
"""
    emulator.Emulator(ptx).launch(
        None, grid=1, block=128, params=[operands, out, halves], **options
    )
    product = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(out, product)
    for warp in range(4):
        rows = product[32 * warp : 32 * warp + 32]
        mine = halves[32 * warp : 32 * warp + 32].view(np.float32)
        for lane in range(32):
            np.testing.assert_array_equal(
                mine[lane, :16], rows[lane % 16, 16 * (lane // 16) : 16 * (lane // 16) + 16]
            )
            for i in range(16):
                row = 16 + lane // 4 + 8 * (i // 2 % 2)
                assert mine[lane, 16 + i] == rows[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2]


def test_tensor_memory_halves_cover_the_same_lanes():
    """.16x32bx2: lanes 0-15 of two groups of columns; 16x64b then finds either of them written."""
    values = {f"v{i}": words(40 + i) for i in range(2)}
    body = """
mov.u32 %at, where;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%at], 32;
ld.shared.b32 %taddr, [%at];
tcgen05.st.sync.aligned.16x32bx2.x2.b32 [%taddr], 8, {%v0, %v1};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%a, %b}, [%taddr], 8;
add.u32 %second, %taddr, 8;
tcgen05.ld.sync.aligned.16x64b.x1.b32 {%c}, [%second];
tcgen05.wait::ld.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %taddr, 32;
"""
    declared = ".reg .b32 %at, %taddr, %second; .shared .align 4 .b32 where;"
    got = run(body, dict.fromkeys("abc", "b32"), declared, **values)
    np.testing.assert_array_equal(got["a"], values["v0"])
    np.testing.assert_array_equal(got["b"], values["v1"])
    # 16x64b: thread t holds lane t / 4 + 8 * (t % 2), column t % 4 / 2.
    lane, column = LANES // 4 + 8 * (LANES % 2), LANES % 4 // 2
    halves = np.stack([values["v0"][16:], values["v1"][16:]], axis=1)
    np.testing.assert_array_equal(got["c"], halves[lane, column])
