"""Address layouts of the emulator: swizzles, descriptors, tensor memory shapes, tensor maps."""

import ctypes
import itertools

import ml_dtypes
import numerics
import numpy as np
import pytest


@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
def test_swizzle_permutes_rows(swizzle):
    """Chunk c of row r moves within its row as the pictures show, and nothing else moves."""
    lib = numerics.library()
    span = numerics.SPANS[swizzle]
    for row, chunk, byte in itertools.product(range(16), range(span // 16), (0, 5, 15)):
        address = 8192 + row * span + chunk * 16 + byte
        want = 8192 + row * span + numerics.chunk_position(swizzle, row, chunk) * 16 + byte
        assert lib.numerics_swizzle(address, numerics.SWIZZLES[swizzle]) == want


def test_swizzle_atoms():
    lib = numerics.library()
    for row, byte in itertools.product(range(16), range(128)):
        base = 4096 + row * 128
        atom32 = (byte // 32 ^ row % 4) * 32 + byte % 32
        assert lib.numerics_swizzle(base + byte, numerics.SWIZZLES["128a32"]) == base + atom32
        flipped = base + (atom32 ^ 8 * (row % 2))
        assert lib.numerics_swizzle(base + byte, numerics.SWIZZLES["128a32f8"]) == flipped
        atom64 = (byte // 64 ^ row % 2) * 64 + byte % 64
        assert lib.numerics_swizzle(base + byte, numerics.SWIZZLES["128a64"]) == base + atom64
    for name in numerics.SWIZZLES:
        images = {lib.numerics_swizzle(a, numerics.SWIZZLES[name]) for a in range(4096)}
        assert images == set(range(4096)), name


@pytest.mark.parametrize("tcgen05", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("name", ["bf16", "f16", "tf32", "e4m3", "u8"])
@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
def test_gather(swizzle, name, transpose, tcgen05):
    rng = np.random.default_rng(0)
    lib = numerics.library()
    encode = numerics.tcgen05_descriptor if tcgen05 else numerics.wgmma_descriptor
    bits, span = numerics.BITS[name], numerics.SPANS[swizzle]
    k = 256 // bits
    for major, rows in itertools.product(("k", "mn"), (64, 128)):
        shared = rng.integers(0, 256, 1 << 16, dtype=np.uint8)
        codes = numerics.random_codes(name, rng, (rows, k))
        if major == "k":
            data = numerics.to_bytes(name, codes)
            leading, stride = (rows // 8 * 128, 128) if swizzle == "none" else (0, 8 * span)
        else:
            data = numerics.to_bytes(name, np.ascontiguousarray(codes.T))
            groups = k // 8
            if swizzle == "none":
                stride, leading = 128, data.shape[1] // 16 * 128
            else:
                stride, leading = 8 * span, groups * 8 * span
        numerics.place(shared, 2048, data, swizzle, major, leading, stride)
        out = np.zeros((k, rows) if transpose else (rows, k), np.float32)
        descriptor = encode(2048, leading, stride, swizzle)
        count = lib.numerics_gather(
            int(tcgen05), ctypes.c_uint64(descriptor), int(major == "mn"), numerics.FORMATS[name],
            bits, rows, k, int(transpose), numerics.pointer(shared), numerics.pointer(out),
        )  # fmt: skip
        assert count == rows * k * bits // 128
        want = numerics.decode(name, codes)
        np.testing.assert_array_equal(out, want.T if transpose else want)
        # element_address agrees with the placed bytes.
        for r, i in itertools.product(range(0, rows, 7), range(k)):
            at = lib.numerics_element_address(
                int(tcgen05), ctypes.c_uint64(descriptor), int(major == "mn"), r, i, bits
            )
            stored = shared[at : at + bits // 8]
            assert bytes(stored) == int(codes[r, i]).to_bytes(bits // 8, "little")


def test_base_offset():
    """A pattern that starts in the middle of its repeat: the tile's row 0 is the pattern's."""
    lib = numerics.library()
    start = 1024 + 3 * 128
    plain = numerics.wgmma_descriptor(1024, 0, 1024, "128")
    moved = numerics.wgmma_descriptor(start, 0, 1024, "128", base_offset=3)
    for row, k in itertools.product(range(16), range(64)):
        a = lib.numerics_element_address(0, ctypes.c_uint64(plain), 0, row, k, 16)
        b = lib.numerics_element_address(0, ctypes.c_uint64(moved), 0, row, k, 16)
        assert b - start == a - 1024


def test_absolute_leading_dimension():
    """K = 48 bytes: what exceeds the row of 128 bytes continues in the second buffer."""
    lib = numerics.library()
    descriptor = numerics.tcgen05_descriptor(1024 + 96, 16384, 1024, "128", absolute=True)
    for row, chunk in itertools.product(range(16), range(3)):
        at = lib.numerics_element_address(1, ctypes.c_uint64(descriptor), 0, row, chunk * 32, 4)
        base, inner = (1024, 96 + 16 * chunk) if chunk < 2 else (16384, 16 * chunk - 32)
        position = numerics.chunk_position("128", row, inner // 16) * 16
        assert at == base + row // 8 * 1024 + row % 8 * 128 + position


def fields(bits, kind, group):
    out = np.zeros(14, np.int32)
    why = numerics.library().numerics_instruction_descriptor(
        ctypes.c_uint32(bits), numerics.KINDS[kind], group, numerics.pointer(out)
    )
    names = (
        "m", "n", "k", "a", "b", "d", "a_major", "b_major", "negate_a", "negate_b", "saturate",
        "scale", "scale_a_id", "scale_b_id",
    )  # fmt: skip
    return why.decode() if why else dict(zip(names, out.tolist(), strict=True))


def test_instruction_descriptor_fields():
    f = numerics.FORMATS
    # F32 += BF16 x BF16, B MN-major, A negated, 128 x 256.
    got = fields(1 << 4 | 1 << 7 | 1 << 10 | 1 << 13 | 1 << 16 | 32 << 17 | 8 << 24, "f16", 1)
    want = {"m": 128, "n": 256, "k": 16, "a": f["bf16"], "b": f["bf16"], "d": f["f32"]}
    assert (
        got.items() >= (want | {"a_major": 0, "b_major": 1, "negate_a": 1, "negate_b": 0}).items()
    )
    # S32 with saturation.
    got = fields(1 << 3 | 2 << 4 | 0 << 7 | 1 << 10 | 4 << 17 | 4 << 24, "i8", 1)
    assert (
        got.items()
        >= {"m": 64, "n": 32, "k": 32, "a": f["u8"], "b": f["s8"], "saturate": 1}.items()
    )
    # NVFP4, 256 x 128, K = 64 and 96.
    nvfp4 = 1 << 7 | 1 << 10 | 16 << 17 | 16 << 24
    got = fields(nvfp4, "mxf4nvf4", 2)
    assert got.items() >= {"m": 256, "n": 128, "k": 64, "a": f["e2m1"], "scale": f["ue4m3"]}.items()
    assert fields(nvfp4 | 1 << 31, "mxf4nvf4", 2)["k"] == 96
    got = fields(nvfp4 | 1 << 23 | 2 << 29 | 1 << 4, "mxf4nvf4", 2)
    assert got.items() >= {"scale": f["ue8m0"], "scale_a_id": 2, "scale_b_id": 1}.items()


@pytest.mark.parametrize(("bits", "kind", "group", "complaint"), [
    (1 << 4 | 1 << 7 | 1 << 10 | 4 << 17 | 16 << 24, "f16", 1, "illegal M"),
    (1 << 4 | 1 << 7 | 1 << 10 | 3 << 17 | 16 << 24, "f16", 2, "illegal N"),
    (1 << 4 | 2 << 7 | 1 << 10 | 4 << 17 | 8 << 24, "f16", 1, "type of A"),
    (1 << 4 | 1 << 7 | 0 << 10 | 4 << 17 | 8 << 24, "f16", 1, "one type"),
    (0 << 4 | 1 << 7 | 1 << 10 | 4 << 17 | 8 << 24, "f16", 1, "type f16"),
    (0 << 4 | 2 << 7 | 2 << 10 | 4 << 17 | 8 << 24, "tf32", 1, "type of D"),
    (1 << 4 | 5 << 7 | 5 << 10 | 1 << 15 | 4 << 17 | 8 << 24, "f8f6f4", 1, "K-major"),
    (1 << 2 | 1 << 4 | 4 << 17 | 8 << 24, "f16", 1, "sparse"),
    (1 << 4 | 4 << 17 | 8 << 24 | 1 << 30, "f16", 1, "shift"),
    (1 << 7 | 1 << 10 | 4 << 17 | 8 << 24, "mxf4", 1, "UE8M0"),
    (1 << 23 | 4 << 17 | 4 << 24, "mxf8f6f4", 1, "M = 128"),
])  # fmt: skip
def test_instruction_descriptor_refuses(bits, kind, group, complaint):
    assert complaint in fields(bits, kind, group)


def test_tcgen05_descriptor_refuses():
    lib = numerics.library()
    good = numerics.tcgen05_descriptor(1024, 0, 1024, "128")
    bad = [good | 1 << 61, good ^ 1 << 46]  # swizzle code 3; the fixed field
    assert lib.numerics_element_address(1, ctypes.c_uint64(good), 0, 0, 0, 16) == 1024
    for bits in bad:
        assert lib.numerics_element_address(1, ctypes.c_uint64(bits), 0, 0, 0, 16) == -1


# ---- tensor memory ------------------------------------------------------------------------------

SHAPES = ["16x64b", "16x128b", "16x256b", "32x32b", "16x32bx2"]


def fragment(shape, thread, i, split):
    """Lane and column of register i by the ISA's fragment figures."""
    match shape:
        case "16x64b":
            # Pairs of threads hold a lane's two columns; odd threads the lanes 8-15.
            return thread // 4 + 8 * (thread & 1), 2 * i + (thread >> 1 & 1)
        case "16x128b":
            return thread // 4 + 8 * (i & 1), 4 * (i >> 1) + thread % 4
        case "16x256b":
            return thread // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (thread % 4) + (i & 1)
        case "32x32b":
            return thread, i
    return thread % 16, i + (thread // 16) * split


def legal_counts(shape):
    per = {"16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1, "16x32bx2": 1}[shape]
    return [(1 << e, per << e) for e in range(8) if per << e <= 128]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tmem_load_and_store(shape, half):
    rng = np.random.default_rng(0)
    lib = numerics.library()
    code = SHAPES.index(shape)
    for num, count in legal_counts(shape):
        split = 2 * count if shape == "16x32bx2" else 0
        columns = {"16x64b": 2, "16x128b": 4, "16x256b": 8}.get(shape, 1) * num * (1 + half)
        if columns + split > 512:
            continue
        lane, column = (0 if shape == "32x32b" else 16) + 32, 512 - columns - split
        arguments = (code, num, int(half), split)
        assert lib.numerics_tmem(*arguments, 0, None, 0, 0, None) == count
        tmem = rng.integers(0, 2**32, (512, 128), dtype=np.uint32)
        registers = np.zeros((count, 32), np.uint32)
        lib.numerics_tmem(
            *arguments, 0, numerics.pointer(tmem), lane, column, numerics.pointer(registers)
        )
        seen = set()
        for i, thread in np.ndindex(count, 32):
            row, c = fragment(shape, thread, i, 0 if half else split)
            if half:  # a register holds the low halves of two columns
                c = 2 * c + (thread // 16 * split if shape == "16x32bx2" else 0)
                low, high = tmem[column + c : column + c + 2, lane + row] & 0xFFFF
                assert registers[i, thread] == low | high << 16
            else:
                assert registers[i, thread] == tmem[column + c, lane + row]
            seen.add((row, c))
        assert len(seen) == count * 32
        # A store puts the same words back and touches nothing else.
        target = rng.integers(0, 2**32, (512, 128), dtype=np.uint32)
        before = target.copy()
        lib.numerics_tmem(
            *arguments, 1, numerics.pointer(target), lane, column, numerics.pointer(registers)
        )
        for row, c in seen:
            if half:
                for x in (c, c + 1):
                    assert target[column + x, lane + row] == tmem[column + x, lane + row] & 0xFFFF
                    before[column + x, lane + row] = target[column + x, lane + row]
            else:
                assert target[column + c, lane + row] == tmem[column + c, lane + row]
                before[column + c, lane + row] = target[column + c, lane + row]
        np.testing.assert_array_equal(target, before)


COPIES = {
    "128x256b": (128, 2, lambda r: [r]),
    "4x256b": (4, 2, lambda r: [32 * r]),
    "128x128b": (128, 1, lambda r: [r]),
    "64x128b.warpx2::02_13": (64, 1, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 1, lambda r: [r % 32 + 64 * (r // 32) + 32 * i for i in (0, 1)]),
    "32x128b.warpx4": (32, 1, lambda r: [r + 32 * i for i in range(4)]),
}


@pytest.mark.parametrize("decompression", ["none", "b4x16_p64", "b6x16_p32"])
@pytest.mark.parametrize("shape", COPIES)
def test_tmem_copy(shape, decompression):
    rng = np.random.default_rng(1)
    rows, chunks, lanes = COPIES[shape]
    swizzle = "none" if chunks == 1 else "32"
    shared = np.zeros(1 << 15, np.uint8)
    data = rng.integers(0, 256, (rows, 16 * chunks), dtype=np.uint8)
    leading, stride = (4096, 128) if swizzle == "none" else (0, 256)
    numerics.place(shared, 1024, data, swizzle, "k", leading, stride)
    tmem = rng.integers(0, 2**32, (512, 128), dtype=np.uint32)
    want = tmem.copy()
    formats = ["none", "b4x16_p64", "b6x16_p32"]
    known = numerics.library().numerics_tmem_copy(
        list(COPIES).index(shape), formats.index(decompression),
        ctypes.c_uint64(numerics.tcgen05_descriptor(1024, leading, stride, swizzle)),
        numerics.pointer(shared), numerics.pointer(tmem), 40,
    )  # fmt: skip
    assert known

    def expand(chunk):
        whole = int.from_bytes(chunk.tobytes(), "little")
        if decompression == "b4x16_p64":
            return bytes((whole >> 4 * i & 15) << 2 for i in range(16))
        if decompression == "b6x16_p32":
            return bytes(whole >> 6 * i & 63 for i in range(16))
        return chunk.tobytes()

    for row, c in np.ndindex(rows, chunks):
        words = np.frombuffer(expand(data[row, 16 * c : 16 * c + 16]), np.uint32)
        for lane in lanes(row):
            want[40 + 4 * c : 44 + 4 * c, lane] = words
    np.testing.assert_array_equal(tmem, want)


# ---- tensor maps --------------------------------------------------------------------------------

TENSOR_TYPES = {
    "u8": (0, np.uint8), "u16": (1, np.uint16), "u32": (2, np.uint32), "s32": (3, np.int32),
    "u64": (4, np.uint64), "s64": (5, np.int64), "f16": (6, np.float16), "f32": (7, np.float32),
    "f64": (8, np.float64), "bf16": (9, ml_dtypes.bfloat16),
}  # fmt: skip


def make_map(kind, address, sizes, strides, box, *, element_strides=None, interleave=0, swizzle=0,
             promotion=0, fill=0):  # fmt: skip
    rank = len(sizes)
    out = np.zeros(32, np.uint64)
    at = (-out.ctypes.data % 64) // 8
    out = out[at : at + 16]
    code = TENSOR_TYPES[kind][0] if isinstance(kind, str) else kind
    arrays = (
        np.array(sizes, np.uint64),
        np.array([*strides, 0], np.uint64),
        np.array(box, np.uint32),
        np.array(element_strides or [1] * rank, np.uint32),
    )
    result = numerics.library().numerics_encode_map(
        numerics.pointer(out), code, rank, ctypes.c_uint64(address), *map(numerics.pointer, arrays),
        interleave, swizzle, promotion, fill,
    )  # fmt: skip
    return result, out


def aligned(shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    at = -raw.ctypes.data % 128
    return raw[at : at + size].view(dtype).reshape(shape)


def box_of(tensor, start, box, steps, fill):
    """The box as an array [.., inner]; `start`, `box` innermost first, as the map has them."""
    shape = [-(-b // s) for b, s in zip(box, steps, strict=True)][::-1]
    out = np.full(shape, fill, tensor.dtype)
    for index in np.ndindex(*shape):
        at = [p + i * s for p, i, s in zip(start[::-1], index, steps[::-1], strict=True)]
        if all(0 <= a < n for a, n in zip(at, tensor.shape, strict=True)):
            out[index] = tensor[tuple(at)]
    return out


@pytest.mark.parametrize("kind", TENSOR_TYPES)
@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_load_and_store_boxes(rank, kind):
    rng = np.random.default_rng(rank)
    dtype = np.dtype(TENSOR_TYPES[kind][1])
    inner = 64 // dtype.itemsize
    shape = (3, 4, 2, 5, inner + 16 // dtype.itemsize)[-rank:]
    tensor = aligned(shape, dtype)
    tensor[...] = rng.integers(0, 100, shape).astype(dtype)
    sizes = shape[::-1]
    strides = list(tensor.strides[::-1])[1:]
    box = (inner, 3, 2, 2, 2)[:rank]
    lib = numerics.library()
    result, out = make_map(kind, tensor.ctypes.data, sizes, strides, box)
    assert result == 0
    for _ in range(12):
        start = np.array([rng.integers(-3, n + 1) for n in sizes], np.int32)
        shared = rng.integers(0, 256, 4096, dtype=np.uint8)
        count = lib.numerics_box(
            numerics.pointer(out), numerics.pointer(start), numerics.pointer(shared), 128, 0
        )
        want = box_of(tensor, start.tolist(), box, [1] * rank, 0)
        assert count == want.nbytes
        np.testing.assert_array_equal(shared[128 : 128 + count].view(dtype), want.ravel())
        # Store: only what lies inside arrives.
        expected = tensor.copy()
        new = rng.integers(0, 100, want.shape).astype(dtype)
        for index in np.ndindex(*new.shape):
            at = [p + i for p, i in zip(start[::-1], index, strict=True)]
            if all(0 <= a < n for a, n in zip(at, shape, strict=True)):
                expected[tuple(at)] = new[index]
        shared[128 : 128 + count] = np.ascontiguousarray(new).view(np.uint8).ravel()
        lib.numerics_box(
            numerics.pointer(out), numerics.pointer(start), numerics.pointer(shared), 128, 1
        )
        np.testing.assert_array_equal(tensor, expected)


@pytest.mark.parametrize("swizzle", ["32", "64", "128"])
def test_swizzled_boxes(swizzle):
    rng = np.random.default_rng(0)
    span = numerics.SPANS[swizzle]
    tensor = aligned((40, 128), np.uint16)
    tensor[...] = rng.integers(0, 2**16, tensor.shape)
    result, out = make_map("u16", tensor.ctypes.data, (128, 40), (256,), (span // 2, 24),
                           swizzle=numerics.SWIZZLES[swizzle])  # fmt: skip
    assert result == 0
    shared = np.zeros(1 << 13, np.uint8)
    start = np.array([16, 9], np.int32)
    count = numerics.library().numerics_box(
        numerics.pointer(out), numerics.pointer(start), numerics.pointer(shared), 2048, 0
    )
    assert count == 24 * span
    want = np.zeros(1 << 13, np.uint8)
    rows = np.ascontiguousarray(tensor[9:33, 16 : 16 + span // 2]).view(np.uint8)
    numerics.place(want, 2048, rows, swizzle, "k", 0, 8 * span)
    np.testing.assert_array_equal(shared, want)


def test_element_strides_and_nan_fill():
    tensor = aligned((9, 16), np.float32)
    tensor[...] = np.arange(144).reshape(9, 16)
    result, out = make_map(
        "f32", tensor.ctypes.data, (16, 9), (64,), (8, 5), element_strides=[1, 2], fill=1
    )
    assert result == 0
    shared = np.zeros(256, np.uint8)
    start = np.array([12, 5], np.int32)
    count = numerics.library().numerics_box(
        numerics.pointer(out), numerics.pointer(start), numerics.pointer(shared), 0, 0
    )
    want = box_of(tensor, (12, 5), (8, 5), (1, 2), np.nan)
    assert count == want.nbytes
    np.testing.assert_array_equal(shared[:count].view(np.float32), want.ravel())


@pytest.mark.parametrize(("code", "bits"), [(13, 4), (14, 4), (15, 6)])
def test_packed_types(code, bits):
    """16U4_ALIGN8B stays packed; the ALIGN16B types put 16 elements into 16 bytes."""
    rng = np.random.default_rng(code)
    row_bytes = 256 * bits // 8
    tensor = aligned((6, row_bytes), np.uint8)
    tensor[...] = rng.integers(0, 256, tensor.shape)
    unpacked = code != 13
    result, out = make_map(code, tensor.ctypes.data, (256, 6), (row_bytes,), (128, 4), swizzle=0)
    assert result == 0
    shared = np.zeros(1024, np.uint8)
    start = np.array([128, 3], np.int32)
    count = numerics.library().numerics_box(
        numerics.pointer(out), numerics.pointer(start), numerics.pointer(shared), 0, 0
    )
    rows = np.zeros((4, 128 * bits // 8), np.uint8)
    rows[:3] = tensor[3:6, 128 * bits // 8 :]
    if unpacked:
        padded = np.zeros((4, 8, 16), np.uint8)
        padded[..., : 2 * bits] = rows.reshape(4, 8, 2 * bits)
        rows = padded
    assert count == rows.nbytes
    np.testing.assert_array_equal(shared[:count], rows.ravel())


def test_inline_map():
    """A map as compilers build it inline: 64 defined bytes, then anything."""
    tensor = aligned((20, 64), ml_dtypes.bfloat16)
    tensor[...] = np.arange(1280).reshape(20, 64) % 250
    raw = np.full(128, 0xAB, np.uint8)
    raw[:64] = 0
    raw[0:8].view(np.uint64)[0] = tensor.ctypes.data
    raw[8:12].view(np.uint32)[0] = 1 << 4 | 10 << 7 | 3 << 13
    raw[12:16].view(np.uint32)[0] = 128 >> 4
    raw[32:40].view(np.uint32)[:] = 63, 19
    raw[0x37:0x39] = 63, 7
    shared = np.zeros(1024, np.uint8)
    start = np.array([0, 12], np.int32)
    count = numerics.library().numerics_box(
        numerics.pointer(raw), numerics.pointer(start), numerics.pointer(shared), 0, 0
    )
    want = np.zeros(1024, np.uint8)
    rows = np.ascontiguousarray(tensor[12:20]).view(np.uint8)
    numerics.place(want, 0, rows, "128", "k", 0, 1024)
    assert count == 1024
    np.testing.assert_array_equal(shared, want)


GOOD = {
    "kind": 9, "address": 1 << 20, "sizes": (64, 100), "strides": (128,), "box": (64, 8),
}  # fmt: skip


@pytest.mark.parametrize("change", [
    {"address": (1 << 20) + 8}, {"kind": 16}, {"sizes": (64, 0)}, {"strides": (120,)},
    {"strides": (1 << 40,)}, {"box": (64, 257)}, {"box": (64, 0)}, {"box": (4, 8)},
    {"swizzle": 2}, {"swizzle": 7}, {"promotion": 4}, {"fill": 2}, {"fill": 1, "kind": 1},
    {"element_strides": [1, 9]}, {"element_strides": [0, 1]}, {"interleave": 3},
    {"kind": 14, "sizes": (64, 100)}, {"kind": 14, "sizes": (128, 4), "box": (64, 4)},
    {"kind": 14, "sizes": (128, 4), "box": (128, 4), "strides": (16,)},
    {"kind": 13, "sizes": (63, 100), "box": (32, 8)},
    {"sizes": (64,) * 6, "strides": (128,) * 5, "box": (8,) * 6},
], ids=str)  # fmt: skip
def test_encode_refuses(change):
    arguments = GOOD | change
    result, _ = make_map(arguments.pop("kind"), arguments.pop("address"), arguments.pop("sizes"),
                         arguments.pop("strides"), arguments.pop("box"), **arguments)  # fmt: skip
    assert result == 1


def test_encode_accepts_and_refuses_interleave():
    assert make_map(9, 1 << 20, (64, 100), (128,), (64, 8), swizzle=3)[0] == 0
    assert make_map(9, 1 << 20, (64, 100, 2), (128, 12800), (64, 8, 1), interleave=1)[0] == 801


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64", "f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "min", "max"])
def test_reductions(kind, op):
    rng = np.random.default_rng(3)
    dtype = TENSOR_TYPES[kind][1]
    if kind == "f64" and op != "add":
        pytest.skip("the ISA has only add for f64")
    dtype = np.dtype(dtype)
    inner = 32 // dtype.itemsize
    tensor = aligned((6, inner), dtype)
    low = -50 if kind[0] != "u" else 0
    tensor[...] = rng.integers(low, 50, tensor.shape).astype(dtype)
    result, out = make_map(kind, tensor.ctypes.data, tensor.shape[::-1], (32,), (inner, 4))
    assert result == 0
    source = rng.integers(low, 50, (4, inner)).astype(dtype)
    shared = np.ascontiguousarray(source).view(np.uint8).ravel().copy()
    want = tensor.copy()
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[op]
    want[3:] = function(want[3:], source[:3])  # the box's last row is outside
    start = np.array([0, 3], np.int32)
    numerics.library().numerics_box(
        numerics.pointer(out), numerics.pointer(start), numerics.pointer(shared), 0,
        2 + ["add", "min", "max"].index(op),
    )  # fmt: skip
    np.testing.assert_array_equal(tensor, want)


def test_bitwise_and_wrapping_reductions():
    values = np.array([0, 1, 5, 6, 7, 2**32 - 1], np.uint32)
    operand = np.array([5, 5, 5, 5, 5, 5], np.uint32)
    want = {
        3: np.where(values >= operand, 0, values + 1),
        4: np.where((values == 0) | (values > operand), operand, values - 1),
        5: values & operand, 6: values | operand, 7: values ^ operand,
    }  # fmt: skip
    for code, expected in want.items():
        tensor = aligned((8,), np.uint32)
        tensor[:6] = values
        _, out = make_map("u32", tensor.ctypes.data, (6,), (), (8,))
        shared = np.zeros(32, np.uint8)
        shared[:24] = operand.view(np.uint8)
        start = np.array([0], np.int32)
        numerics.library().numerics_box(
            numerics.pointer(out), numerics.pointer(start), numerics.pointer(shared), 0, 2 + code
        )
        np.testing.assert_array_equal(tensor[:6], expected)
