"""Matrix products of the emulator: wgmma, mma.sync and tcgen05.mma, bit for bit.

The operands are placed in shared memory and registers by the tests' own reading of the layouts.
"""

import ctypes
import itertools

import numerics
import numpy as np
import pytest

K_BYTES = 32  # one instruction's depth, but for FP4 with K = 96


def operand(rng, name, rows, k, shared, base, swizzle, major, step=0, padded=False):
    """Random codes [rows, k] placed in shared memory. Returns codes and (start, leading, stride).

    `step` instructions' worth of depth lie before it in the swizzle atom.
    """
    codes = numerics.random_codes(name, rng, (rows, k))
    span = numerics.SPANS[swizzle]
    if major == "k":
        data = numerics.to_bytes(name, codes, padded)
        width = data.shape[1]
        if swizzle == "none":
            leading, stride, start = -(-rows // 8) * 128, 128, base
            full = data
        else:
            assert (step + 1) * width <= span
            full = rng.integers(0, 256, (rows, span), dtype=np.uint8)
            full[:, step * width : (step + 1) * width] = data
            leading, stride, start = 0, 8 * span, base + step * width
    else:
        full = numerics.to_bytes(name, np.ascontiguousarray(codes.T))
        if swizzle == "none":
            # Chunks along MN every `stride`, groups of eight k every `leading` bytes.
            stride, leading, start = 128, full.shape[1] // 16 * 128, base
        else:
            group = 4 if swizzle == "128a32" else 8
            stride, start = group * span, base
            leading = -(-len(full) // group) * stride
    numerics.place(shared, base, full, swizzle, major, leading, stride)
    return codes, (start, leading, stride)


def accumulator(registers, n, half):
    """D [64, n] from the registers of four warps [4, count, 32], by the ISA's formulas."""
    d = np.zeros((64, n), np.float64)
    for warp, i, lane in np.ndindex(registers.shape):
        word = registers[warp, i, lane]
        row = 16 * warp + lane // 4
        if half:
            pair = np.array([word], np.uint32).view(np.float16)
            column = 8 * (i // 2) + 2 * (lane % 4)
            d[row + 8 * (i % 2), column : column + 2] = pair
        else:
            column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
            d[row + 8 * (i // 2 % 2), column] = np.array([word], np.uint32).view(np.float32)[0]
    return d


def fragments(d, half):
    """The inverse of `accumulator`."""
    n = d.shape[1]
    registers = np.zeros((4, n // 4 if half else n // 2, 32), np.uint32)
    for warp, i, lane in np.ndindex(registers.shape):
        row = 16 * warp + lane // 4
        if half:
            column = 8 * (i // 2) + 2 * (lane % 4)
            pair = d[row + 8 * (i % 2), column : column + 2].astype(np.float16)
            registers[warp, i, lane] = pair.view(np.uint32)[0]
        else:
            column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
            value = d[row + 8 * (i // 2 % 2), column].astype(np.float32)
            registers[warp, i, lane] = value.view(np.uint32)
    return registers


WGMMA = [
    ("f16", "f16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"),
    ("e4m3", "e4m3", "f32"), ("e4m3", "e5m2", "f32"), ("e5m2", "e5m2", "f16"),
]  # fmt: skip


def run_wgmma(rng, a, b, d, n, *, swizzles=("128", "128"), majors=("k", "k"), steps=(0, 0),
              registers=False, scale_d=True, negate=(False, False)):  # fmt: skip
    shared = np.zeros(1 << 17, np.uint8)
    k = 256 // numerics.BITS[a]
    a_codes, a_at = operand(rng, a, 64, k, shared, 4096, swizzles[0], majors[0], steps[0])
    b_codes, b_at = operand(rng, b, n, k, shared, 32768, swizzles[1], majors[1], steps[1])
    a_values, b_values = numerics.decode(a, a_codes), numerics.decode(b, b_codes)
    half = d == "f16"
    c = (rng.normal(size=(64, n)) * 3).astype(np.float16 if half else np.float32)
    d_registers = fragments(c, half)
    a_registers = None
    if registers:
        per = 32 // numerics.BITS[a]
        a_registers = np.zeros((4, 4, 32), np.uint32)
        for warp, i, lane in np.ndindex(4, 4, 32):
            row = 16 * warp + lane // 4 + 8 * (i % 2)
            column = lane % 4 * per + 4 * per * (i // 2)
            for e in range(per):
                code = int(a_codes[row, column + e])
                a_registers[warp, i, lane] |= np.uint32(code << (e * numerics.BITS[a]))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{a}.{b}"
    known = numerics.library().numerics_wgmma(
        name.encode(), numerics.pointer(shared),
        ctypes.c_uint64(numerics.wgmma_descriptor(*a_at, swizzles[0])),
        numerics.pointer(a_registers),
        ctypes.c_uint64(numerics.wgmma_descriptor(*b_at, swizzles[1])),
        *(int(m == "mn") for m in majors), *map(int, negate), int(scale_d),
        numerics.pointer(d_registers),
    )  # fmt: skip
    assert known, name
    fp8 = numerics.BITS[a] == 8
    sign = -1 if negate[0] != negate[1] else 1
    want = numerics.fused(
        sign * a_values, b_values.T, c if scale_d else 0, (a, b), 13 if fp8 else 25,
        13 if fp8 else 23, half=half,
    )  # fmt: skip
    got = accumulator(d_registers, n, half)
    np.testing.assert_array_equal(got, want.astype(np.float64))
    plain = sign * a_values @ b_values.T + (c if scale_d else 0)
    # Rounding: 13 bits in FP8, else that of the result.
    error = np.abs(got - plain).max() / np.abs(plain).max()
    assert error < (2.0**-9 if fp8 or half else 2.0**-20)


@pytest.mark.parametrize("n", [8, 40, 64, 256])
@pytest.mark.parametrize(("a", "b", "d"), WGMMA)
def test_wgmma_types(a, b, d, n):
    rng = np.random.default_rng(n)
    for registers, scale_d in itertools.product((False, True), (False, True)):
        run_wgmma(rng, a, b, d, n, registers=registers, scale_d=scale_d)


@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
@pytest.mark.parametrize("majors", list(itertools.product(("k", "mn"), repeat=2)), ids="-".join)
def test_wgmma_layouts(swizzle, majors):
    rng = np.random.default_rng(0)
    n = numerics.SPANS[swizzle] // 2 * 2
    last = max(numerics.SPANS[swizzle] // K_BYTES - 1, 0)
    steps = tuple(last if major == "k" else 0 for major in majors)
    run_wgmma(
        rng, "bf16", "bf16", "f32", n, swizzles=(swizzle, swizzle), majors=majors, steps=steps
    )


def test_wgmma_negates():
    rng = np.random.default_rng(1)
    for negate in itertools.product((False, True), repeat=2):
        run_wgmma(rng, "f16", "f16", "f32", 16, negate=negate)


def test_wgmma_unusual_numbers():
    """Infinities, NaN, huge and tiny exponents, and rows and columns of zeros."""
    shared = np.zeros(1 << 16, np.uint8)
    a = np.zeros((64, 16), np.float32)
    b = np.zeros((16, 16), np.float32)  # [k, n]
    a[0, :2] = 1, 2
    a[1, 0] = np.inf
    a[2, 0] = np.nan
    a[3, :2] = 2.0**126, -(2.0**126)
    a[4, :2] = 2.0**-120, 2.0**-120
    a[6] = 1
    b[:2, 0] = 1, 1
    b[:2, 1] = 2.0**100, 2.0**100
    b[:2, 2] = 2.0**-100, 2.0**-100
    b[0, 3] = np.inf
    numerics.place(
        shared, 0, numerics.to_bytes("bf16", a.view(np.uint32) >> 16), "none", "k", 1024, 128
    )
    numerics.place(shared, 8192, numerics.to_bytes("bf16", b.T.copy().view(np.uint32) >> 16),
                   "none", "k", 256, 128)  # fmt: skip
    c = np.zeros((64, 16), np.float32)
    c[5] = 2.0**-20  # a row of A that is zero leaves the accumulator alone
    c[7] = 3
    registers = fragments(c, False)
    numerics.library().numerics_wgmma(
        b"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", numerics.pointer(shared),
        ctypes.c_uint64(numerics.wgmma_descriptor(0, 1024, 128, "none")), numerics.pointer(None),
        ctypes.c_uint64(numerics.wgmma_descriptor(8192, 256, 128, "none")), 0, 0, 0, 0, 1,
        numerics.pointer(registers),
    )  # fmt: skip
    got = accumulator(registers, 16, False)
    with np.errstate(all="ignore"):
        want = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)
    # 2^126 * 2^100 twice, of opposite sign, cancel exactly.
    assert got[3, 1] == 0
    np.testing.assert_array_equal(got, want)


MMA_SYNC = [
    ("m16n8k16", "f16", "f16", "f32", "f32"), ("m16n8k8", "f16", "f16", "f32", "f32"),
    ("m16n8k16", "f16", "f16", "f16", "f16"), ("m16n8k16", "bf16", "bf16", "f32", "f32"),
    ("m16n8k8", "bf16", "bf16", "f32", "f32"), ("m16n8k8", "tf32", "tf32", "f32", "f32"),
    ("m16n8k4", "tf32", "tf32", "f32", "f32"), ("m16n8k32", "e4m3", "e5m2", "f32", "f32"),
    ("m16n8k32", "e5m2", "e4m3", "f32", "f32"), ("m16n8k16", "e4m3", "e4m3", "f16", "f16"),
    ("m16n8k32", "s8", "u8", "s32", "s32"), ("m16n8k16", "s8", "s8", "s32", "s32"),
    ("m8n8k16", "u8", "s8", "s32", "s32"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "a", "b", "c", "d"), MMA_SYNC)
def test_mma_sync(shape, a, b, c, d):
    rng = np.random.default_rng(2)
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    a_codes = numerics.random_codes(a, rng, (m, k))
    b_codes = numerics.random_codes(b, rng, (k, n))
    bits, integer = numerics.BITS[a], d == "s32"
    per = 32 // bits
    a_registers = np.zeros((m * k * bits // 1024, 32), np.uint32)
    b_registers = np.zeros((n * k * bits // 1024, 32), np.uint32)
    for i, lane in np.ndindex(a_registers.shape):
        for e in range(per):
            row, column = lane // 4 + 8 * (i % 2), lane % 4 * per + 4 * per * (i // 2) + e
            a_registers[i, lane] |= np.uint32(int(a_codes[row, column]) << (e * bits))
    for i, lane in np.ndindex(b_registers.shape):
        for e in range(per):
            row = lane % 4 * per + 4 * per * i + e
            b_registers[i, lane] |= np.uint32(int(b_codes[row, lane // 4]) << (e * bits))
    if integer:
        values = rng.integers(-1000, 1000, (m, n)).astype(np.int32)
    else:
        values = rng.normal(size=(m, n)).astype(np.float16 if c == "f16" else np.float32)
    half = c == "f16"
    c_registers = np.zeros((m * n // (64 if half else 32), 32), np.uint32)
    d_registers = np.zeros_like(c_registers)

    def cell(i, lane):
        return lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2

    flat = values.view(np.uint16 if half else np.uint32)
    for i, lane in np.ndindex(c_registers.shape):
        if half:
            low, high = (int(flat[cell(2 * i + h, lane)]) for h in (0, 1))
            c_registers[i, lane] = low | high << 16
        else:
            c_registers[i, lane] = flat[cell(i, lane)]
    name = f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{c}"
    arrays = (d_registers, a_registers, b_registers, c_registers)
    assert numerics.library().numerics_mma_sync(name.encode(), *map(numerics.pointer, arrays))
    got = np.zeros_like(flat)
    for i, lane in np.ndindex(d_registers.shape):
        if half:
            for h in (0, 1):
                got[cell(2 * i + h, lane)] = d_registers[i, lane] >> (16 * h) & 0xFFFF
        else:
            got[cell(i, lane)] = d_registers[i, lane]
    x, y = numerics.decode(a, a_codes), numerics.decode(b, b_codes)
    if integer:
        np.testing.assert_array_equal(got.view(np.int32), (x @ y).astype(np.int32) + values)
    else:
        want = numerics.fused(x, y, values, (a, b), half=half)
        np.testing.assert_array_equal(got.view(values.dtype), want)


# ---- tcgen05 -----------------------------------------------------------------------------------

TYPE_CODES = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "i8": {"u8": 0, "s8": 1},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf4": {"e2m1": 1},
}
TYPE_CODES["mxf8f6f4"] = TYPE_CODES["f8f6f4"]
TYPE_CODES["mxf4nvf4"] = TYPE_CODES["mxf4"]


def instruction(kind, m, n, a, b, d="f32", *, majors=("k", "k"), negate=(0, 0), scale="ue8m0",
                ids=(0, 0), long_k=False):  # fmt: skip
    codes = TYPE_CODES[kind]
    bits = codes[a] << 7 | codes[b] << 10 | negate[0] << 13 | negate[1] << 14
    bits |= (majors[0] == "mn") << 15 | (majors[1] == "mn") << 16 | n // 8 << 17 | m // 16 << 24
    if kind.startswith("mx"):
        return bits | ids[1] << 4 | (scale == "ue8m0") << 23 | ids[0] << 29 | int(long_k) << 31
    return bits | {"f16": 0, "f32": 1, "s32": 2}[d] << 4


def d_cell(m, n, group, row, column):
    """CTA, lane and column of D by the ISA's data-path layouts."""
    rows = m // group
    cta, r = divmod(row, rows)
    if rows == 128:
        return cta, r, column
    if group == 1:
        return cta, r // 16 * 32 + r % 16, column
    half = int(column >= n // 2)
    return cta, r + 64 * half, column - half * (n // 2)


def run_tcgen05(rng, kind, m, n, a, b, d="f32", *, group=1, swizzles=("128", "128"),
                majors=("k", "k"), step=0, a_in_tmem=False, accumulate=True, negate=(0, 0),
                scale="ue8m0", qualifier="", ids=(0, 0), scale_input_d=0, disabled=(),
                k=None):  # fmt: skip
    fp4 = kind.startswith("mxf4")
    bits = 4 if fp4 else 8 if "f8f6f4" in kind or kind == "i8" else numerics.BITS[a]
    k = k or 256 // bits
    padded = bits == 8 and numerics.BITS[a] < 8, bits == 8 and numerics.BITS[b] < 8
    shared = [rng.integers(0, 256, 1 << 17, dtype=np.uint8) for _ in range(group)]
    tmem = [rng.integers(0, 2**32, (512, 128), dtype=np.uint32) for _ in range(group)]
    a_parts, b_parts = [], []
    rows = m // group
    d_column, a_column, sa_column, sb_column = 0, 300, 400, 432
    for cta in range(group):
        codes, a_at = operand(
            rng, a, rows, k, shared[cta], 8192, swizzles[0], majors[0], step, padded[0]
        )
        a_parts.append(codes)
        codes, b_at = operand(
            rng, b, n // group, k, shared[cta], 65536, swizzles[1], majors[1], step, padded[1]
        )
        b_parts.append(codes)
        if a_in_tmem:
            per = 32 // bits
            words = np.zeros((rows, k // per), np.uint32)
            for e in range(per):
                part = a_parts[cta][:, e::per]
                words |= part << (e * bits + 2 * (bits == 8 and a == "e2m1"))
            for row, half in itertools.product(
                range(rows), range(2 if group == 2 and rows == 64 else 1)
            ):
                lane = row if rows == 128 or group == 2 else row // 16 * 32 + row % 16
                tmem[cta][a_column : a_column + words.shape[1], lane + 64 * half] = words[row]
    a_values = numerics.decode(a, np.concatenate(a_parts))
    b_values = numerics.decode(b, np.concatenate(b_parts))
    scales = None
    if kind.startswith("mx"):
        block = {"": 32, "1X": 32, "2X": 32, "4X": 16, "block16": 16, "block32": 32}[qualifier]
        blocks = k // block
        low, high = (120, 134) if scale == "ue8m0" else (0x20, 0x48)
        scales = [rng.integers(low, high, (count, blocks)).astype(np.uint32) for count in (m, n)]

        def put(cta, base, codes, first, count, ident, lanes):
            words = -(-count // 32)
            for r, v in np.ndindex(count, blocks):
                index = ident + v
                column = base + r // 32 + index // 4 * words
                for lane in lanes:
                    cell = int(tmem[cta][column, lane + r % 32])
                    shift = 8 * (index % 4)
                    cell = cell & ~(0xFF << shift) | int(codes[first + r, v]) << shift
                    tmem[cta][column, lane + r % 32] = cell

        for cta in range(group):
            put(cta, sa_column, scales[0], cta * rows, rows, ids[0], (0, 32, 64, 96))
            if rows == 64:  # the 2x2 data path: each half of the lanes holds its half of N
                put(cta, sb_column, scales[1], 0, n // 2, ids[1], (0, 32))
                put(cta, sb_column, scales[1], n // 2, n // 2, ids[1], (64, 96))
            else:
                put(cta, sb_column, scales[1], 0, n, ids[1], (0, 32, 64, 96))
        scales = [numerics.decode(scale, s) for s in scales]
    before = [t.copy() for t in tmem]
    initial = np.zeros((m, n), np.float64)
    integer = kind == "i8"
    for row, column in np.ndindex(m, n):
        cta, lane, c = d_cell(m, n, group, row, column)
        value = rng.integers(-9, 9) if integer else np.float32(rng.normal())
        value = np.float16(value) if d == "f16" else value
        initial[row, column] = value
        word = int(np.int32(value).view(np.uint32)) if integer else int(
            value.view(np.uint16) if d == "f16" else value.view(np.uint32))  # fmt: skip
        tmem[cta][d_column + c, lane] = before[cta][d_column + c, lane] = word
    request = numerics.Tcgen05(
        kind=numerics.KINDS[kind], cta_group=group,
        instruction=instruction(kind, m, n, a, b, d, majors=majors, negate=negate, scale=scale,
                                ids=ids, long_k=k == 96),
        a_in_tmem=a_in_tmem, a_tmem=a_column, d_tmem=d_column, scale_a_tmem=sa_column,
        scale_b_tmem=sb_column, accumulate=accumulate, scale_input_d=scale_input_d,
        a=numerics.tcgen05_descriptor(*a_at, swizzles[0]),
        b=numerics.tcgen05_descriptor(*b_at, swizzles[1]),
    )  # fmt: skip
    for lane in disabled:
        request.disabled_lanes[lane // 32] |= 1 << lane % 32
    both = lambda items: (*items, *items)[:2]  # noqa: E731
    why = numerics.library().numerics_tcgen05(
        ctypes.byref(request), qualifier.encode(), *map(numerics.pointer, both(shared)),
        *map(numerics.pointer, both(tmem)),
    )  # fmt: skip
    assert why is None, why
    c = initial * 2.0**-scale_input_d if accumulate else 0
    sign = -1 if negate[0] != negate[1] else 1
    if fp4:
        repeat = block // 16
        want = numerics.fused_scaled(
            sign * a_values, b_values.T, c, np.repeat(scales[0], repeat, 1),
            np.repeat(scales[1], repeat, 1).T, scale,
        )  # fmt: skip
    elif integer:
        want = (a_values @ b_values.T + c).astype(np.int32)
    else:
        powers = None if scales is None else [np.log2(s[:, 0]).astype(np.int64) for s in scales]
        want = numerics.fused(
            sign * a_values, b_values.T, c, (a, b), scales=powers, half=d == "f16"
        )
    got = np.zeros_like(want)
    for row, column in np.ndindex(m, n):
        cta, lane, x = d_cell(m, n, group, row, column)
        word = tmem[cta][d_column + x, lane]
        got[row, column] = np.array([word]).view(want.dtype)[0]
        if cta * 128 + lane in disabled:
            want[row, column] = np.array([before[cta][d_column + x, lane]]).view(want.dtype)[0]
        before[cta][d_column + x, lane] = word
    np.testing.assert_array_equal(got, want)
    for cta in range(group):  # nothing else was written
        np.testing.assert_array_equal(tmem[cta], before[cta])


# M, N and the CTA group: every data path.
SHAPES = [(128, 32, 1), (64, 24, 1), (256, 32, 2), (128, 64, 2)]


@pytest.mark.parametrize("a_in_tmem", [False, True])
@pytest.mark.parametrize(("m", "n", "group"), SHAPES)
@pytest.mark.parametrize(("kind", "a", "b", "d"), [
    ("f16", "f16", "f16", "f32"), ("f16", "bf16", "bf16", "f32"), ("f16", "f16", "f16", "f16"),
    ("tf32", "tf32", "tf32", "f32"), ("f8f6f4", "e4m3", "e5m2", "f32"), ("i8", "s8", "u8", "s32"),
])  # fmt: skip
def test_tcgen05_paths(kind, a, b, d, m, n, group, a_in_tmem):
    rng = np.random.default_rng(3)
    run_tcgen05(rng, kind, m, n, a, b, d, group=group, a_in_tmem=a_in_tmem)


@pytest.mark.parametrize("b", ["e5m2", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("a", ["e4m3", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("kind", ["f8f6f4", "mxf8f6f4"])
def test_tcgen05_mixed_narrow_types(kind, a, b):
    rng = np.random.default_rng(4)
    run_tcgen05(rng, kind, 128, 32, a, b)
    if numerics.BITS[a] != 6:
        run_tcgen05(rng, kind, 128, 32, a, b, a_in_tmem=True)


@pytest.mark.parametrize(("m", "n", "group"), [s for s in SHAPES if s[0] != 64])
@pytest.mark.parametrize(("kind", "qualifier", "scale"), [
    ("mxf8f6f4", "1X", "ue8m0"), ("mxf4", "2X", "ue8m0"), ("mxf4", "block32", "ue8m0"),
    ("mxf4nvf4", "4X", "ue4m3"), ("mxf4nvf4", "2X", "ue8m0"), ("mxf4nvf4", "block16", "ue4m3"),
])  # fmt: skip
def test_tcgen05_block_scales(kind, qualifier, scale, m, n, group):
    rng = np.random.default_rng(5)
    name = "e4m3" if kind == "mxf8f6f4" else "e2m1"
    every = {"1X": (0, 1, 2, 3), "2X": (0, 2), "block32": (0, 2), "4X": (0,), "block16": (0,)}[
        qualifier
    ]
    for ids in ((every[0], every[-1]), (every[-1], every[0])):
        run_tcgen05(
            rng, kind, m, n, name, name, group=group, qualifier=qualifier, scale=scale, ids=ids
        )
    run_tcgen05(
        rng, kind, m, n, name, name, group=group, qualifier=qualifier, scale=scale, a_in_tmem=True
    )


@pytest.mark.parametrize(("kind", "qualifier", "scale", "ids"), [
    ("mxf4nvf4", "block16", "ue4m3", (0, 2)), ("mxf4", "block32", "ue8m0", (0, 3)),
])  # fmt: skip
def test_tcgen05_depth_96(kind, qualifier, scale, ids):
    rng = np.random.default_rng(6)
    run_tcgen05(rng, kind, 128, 64, "e2m1", "e2m1", qualifier=qualifier, scale=scale, ids=ids, k=96)


@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
@pytest.mark.parametrize("majors", list(itertools.product(("k", "mn"), repeat=2)), ids="-".join)
def test_tcgen05_layouts(swizzle, majors):
    rng = np.random.default_rng(7)
    last = max(numerics.SPANS[swizzle] // K_BYTES - 1, 0) if majors == ("k", "k") else 0
    run_tcgen05(
        rng, "f16", 128, 128, "bf16", "bf16", swizzles=(swizzle, swizzle), majors=majors, step=last
    )
    run_tcgen05(
        rng,
        "f8f6f4",
        128,
        128,
        "e4m3",
        "e4m3",
        swizzles=(swizzle, swizzle),
        majors=majors,
        step=last,
    )


def test_tcgen05_atoms_of_32_bytes():
    """The layout of MN-major TF32 operands."""
    rng = np.random.default_rng(8)
    run_tcgen05(
        rng, "tf32", 128, 64, "tf32", "tf32", swizzles=("128a32", "128a32"), majors=("mn", "mn")
    )


def test_tcgen05_options():
    rng = np.random.default_rng(9)
    run_tcgen05(rng, "f16", 128, 16, "bf16", "bf16", accumulate=False)
    run_tcgen05(rng, "f16", 128, 16, "bf16", "bf16", negate=(1, 0))
    run_tcgen05(
        rng, "mxf4nvf4", 128, 16, "e2m1", "e2m1", qualifier="4X", scale="ue4m3", negate=(0, 1)
    )
    run_tcgen05(rng, "f16", 64, 16, "f16", "f16", scale_input_d=3)
    run_tcgen05(rng, "f16", 128, 16, "f16", "f16", disabled=(0, 33, 127))
    run_tcgen05(rng, "f16", 256, 16, "f16", "f16", group=2, disabled=(5, 128 + 7))


def test_tcgen05_d_cells():
    lib = numerics.library()
    for m, n, group in [*SHAPES, (256, 256, 2), (128, 256, 1)]:
        for row, column in itertools.product(range(0, m, 5), range(0, n, 3)):
            cta, lane, x = d_cell(m, n, group, row, column)
            assert (
                lib.numerics_tcgen05_d_cell(m, n, group, row, column)
                == (cta * 128 + lane) * 512 + x
            )
