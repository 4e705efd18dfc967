"""The emulator's numerics through ctypes (`numerics_abi.cc`), and NumPy models of them."""

import ctypes
import functools
import pathlib

import emulator
import ml_dtypes
import numpy as np

# Enumerations of the headers, in their order.
FORMATS = {
    name: i
    for i, name in enumerate(
        [
            "u8",
            "u16",
            "u32",
            "u64",
            "s8",
            "s16",
            "s32",
            "s64",
            "f16",
            "bf16",
            "tf32",
            "f32",
            "f64",
            "e4m3",
            "e5m2",
            "e2m3",
            "e3m2",
            "e2m1",
            "ue8m0",
            "ue4m3",
        ]
    )
}
BITS = {
    "u8": 8, "s8": 8, "f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "e4m3": 8, "e5m2": 8,
    "e2m3": 6, "e3m2": 6, "e2m1": 4, "ue8m0": 8, "ue4m3": 8,
}  # fmt: skip
ROUNDS = {name: i for i, name in enumerate(["rn", "rz", "rm", "rp", "rna", "rs"])}
FLOAT_TYPES = {
    name: i for i, name in enumerate(["f32", "f64", "f32x2", "f16", "f16x2", "bf16", "bf16x2"])
}
FLOAT_OPS = {
    name: i
    for i, name in enumerate(
        [
            "add",
            "sub",
            "mul",
            "fma",
            "min",
            "max",
            "abs",
            "neg",
            "div",
            "rcp",
            "sqrt",
            "rsqrt",
            "ex2",
            "lg2",
            "sin",
            "cos",
            "tanh",
        ]
    )
}
COMPARES = {
    name: i
    for i, name in enumerate(
        ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    )
}
SWIZZLES = {
    name: i for i, name in enumerate(["none", "32", "64", "128", "128a32", "128a32f8", "128a64"])
}
KINDS = {
    name: i
    for i, name in enumerate(["f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"])
}
DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
    "ue4m3": ml_dtypes.float8_e4m3fn,
}


class Tcgen05(ctypes.Structure):
    """`NumericsTcgen05` of the ABI."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in (
            "kind", "cta_group", "instruction", "a_in_tmem", "a_tmem", "d_tmem", "scale_a_tmem",
            "scale_b_tmem", "accumulate", "scale_input_d",
        )),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("disabled_lanes", ctypes.c_uint32 * 8),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """The emulator's library with `numerics_abi.cc` in it, built on first use."""
    abi = pathlib.Path(__file__).with_name("numerics_abi.cc")
    loaded = ctypes.CDLL(str(emulator.build_library("numerics", [abi])))
    loaded.numerics_instruction_descriptor.restype = ctypes.c_char_p
    loaded.numerics_tcgen05.restype = ctypes.c_char_p
    loaded.numerics_compare.restype = ctypes.c_uint32
    loaded.numerics_swizzle.restype = ctypes.c_uint32
    return loaded


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    """The data of a contiguous array; keep the array alive."""
    if array is None:
        return ctypes.c_void_p()
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def decode(name: str, codes: np.ndarray) -> np.ndarray:
    """Values of codes by `ml_dtypes`, independent of the library: float64."""
    codes = np.asarray(codes)
    if name == "f32":
        return codes.astype(np.uint32).view(np.float32).astype(np.float64)
    if name == "tf32":
        return (codes.astype(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)
    if name in ("u8", "s8"):
        return codes.astype(np.uint8).view(np.int8 if name == "s8" else np.uint8).astype(np.float64)
    storage = np.uint16 if BITS[name] == 16 else np.uint8
    return codes.astype(storage).view(DTYPES[name]).astype(np.float64)


def convert(mnemonic: str, *sources: np.ndarray, generic: bool = False, wide: bool = False):
    """Runs a `cvt` on arrays of register values (uint32, or uint64 for wide registers)."""
    count = len(sources[0])
    warps = -(-count // 32)
    padded = [np.zeros(warps * 32, s.dtype) for s in sources]
    for p, s in zip(padded, sources, strict=True):
        p[:count] = s
    out = np.zeros(warps * 32, np.uint64 if wide else np.uint32)
    table = (ctypes.c_void_p * len(padded))(*(p.ctypes.data for p in padded))
    known = library().numerics_convert(
        mnemonic.encode(), int(generic), warps, pointer(out), table, len(padded)
    )
    assert known, mnemonic
    return out[:count]


def arithmetic(op: str, kind: str, *operands: np.ndarray, rounding="rn", flags=0, inputs=2):
    """Runs a floating-point instruction on register values; None where the ISA has none."""
    count, dtype = len(operands[0]), operands[0].dtype
    warps = -(-count // 32)
    padded = [np.zeros(warps * 32, dtype) for _ in range(3)]
    for p, s in zip(padded, operands, strict=False):
        p[:count] = s
    out = np.zeros(warps * 32, dtype)
    known = library().numerics_float(
        FLOAT_OPS[op], FLOAT_TYPES[kind], ROUNDS[rounding], flags, inputs, warps, dtype.itemsize,
        pointer(out), *(pointer(p) for p in padded),
    )  # fmt: skip
    return out[:count] if known else None


# ---- shared-memory layouts, written from the canonical layouts' pictures -----------------------

SPANS = {"none": 16, "32": 32, "64": 64, "128": 128, "128a32": 128}


def chunk_position(swizzle: str, row: int, chunk: int) -> int:
    """Where chunk (16 bytes) `chunk` of row `row` of an atom of 8 rows lies in its row."""
    match swizzle:
        case "128":
            return chunk ^ (row % 8)
        case "64":
            return chunk ^ (row // 2 % 4)
        case "32":
            return chunk ^ (row // 4 % 2)
        case "128a32":  # pairs of chunks move together, and the atom has 4 rows
            return (chunk // 2 ^ row % 4) * 2 + chunk % 2
    return chunk


def place(shared, base, rows, swizzle, major, leading, stride):
    """Writes a matrix into shared memory: `rows` is uint8 [mn, k bytes], or MN-major [k, mn bytes].

    The tile may span several swizzle atoms along its contiguous direction; atoms of a K-major
    operand then lie `leading` bytes apart.
    """
    span = SPANS[swizzle]
    group = 4 if swizzle == "128a32" else 8
    for r, row in enumerate(rows):
        for c in range(len(row) // 16):
            if swizzle == "none" and major == "mn":
                at = c * stride + r // 8 * leading + r % 8 * 16
            elif swizzle == "none":
                at = r // 8 * stride + c * leading + r % 8 * 16
            else:
                per_span = span // 16
                inner = chunk_position(swizzle, r % group, c % per_span) * 16
                at = c // per_span * leading + r // group * stride + r % group * span + inner
            shared[base + at : base + at + 16] = row[c * 16 : c * 16 + 16]


def wgmma_descriptor(start, leading, stride, swizzle, base_offset=0):
    mode = {"none": 0, "128": 1, "64": 2, "32": 3}[swizzle]
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base_offset << 49 | mode << 62


def tcgen05_descriptor(start, leading, stride, swizzle, base_offset=0, absolute=False):
    mode = {"none": 0, "128a32": 1, "128": 2, "64": 4, "32": 6}[swizzle]
    fields = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | base_offset << 49
    return fields | int(absolute) << 52 | mode << 61


def to_bytes(name: str, codes: np.ndarray, padded: bool = False) -> np.ndarray:
    """Packs codes [rows, n] into bytes [rows, ...]; `padded`: 16 elements in 16 bytes."""
    bits = BITS[name]
    if bits >= 8:
        return np.ascontiguousarray(codes.astype(f"<u{bits // 8}")).view(np.uint8)
    rows, count = codes.shape
    positions = np.arange(count) * bits
    out = np.zeros((rows, count if padded else count * bits // 8), np.uint8)
    if padded:
        positions = np.arange(count) // 16 * 128 + np.arange(count) % 16 * bits
    for column, position in enumerate(positions):
        for bit in range(bits):
            at = position + bit
            out[:, at // 8] |= ((codes[:, column] >> bit & 1) << at % 8).astype(np.uint8)
    return out


# ---- matrix products: the arithmetic of the tensor cores ---------------------------------------

MIN_EXPONENT = {
    "f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "e2m3": 0, "e3m2": -2,
    "e2m1": 0, "ue4m3": -6, "ue8m0": -127, "f32": -126,
}  # fmt: skip


def exponents(values, minimum):
    with np.errstate(divide="ignore"):
        e = np.floor(np.log2(np.abs(values)))
    return np.where(values == 0, -126, np.maximum(e, minimum)).astype(np.int64)


def truncate(values, mantissa=23):
    """float64 to float32 toward zero, keeping `mantissa` bits."""
    e = exponents(values, -126)
    unit = np.exp2((e - mantissa).astype(np.float64))
    return (np.trunc(values / unit) * unit).astype(np.float32)


def fused(a, b, c, formats, fraction=25, mantissa=23, scales=None, half=False):
    """a [m, k] @ b [k, n] + c: exact products aligned to the largest exponent, then truncated."""
    e = exponents(a, MIN_EXPONENT[formats[0]])[:, :, None]
    e = e + exponents(b, MIN_EXPONENT[formats[1]])[None]
    products = a[:, :, None] * b[None]
    if scales is not None:  # powers of two of each row of A and column of B
        shift = scales[0][:, None] + scales[1][None, :]
        e = e + shift[:, None, :]
        products = products * np.exp2(shift[:, None, :].astype(np.float64))
    c = np.broadcast_to(np.asarray(c, np.float64), products.shape[::2])
    largest = np.maximum(e.max(1), exponents(c, -14 if half else -126))
    unit = np.exp2((largest - fraction).astype(np.float64))
    total = np.trunc(products / unit[:, None]).sum(1) + np.trunc(c / unit)
    return (total * unit).astype(np.float16) if half else truncate(total * unit, mantissa)


def fused_scaled(a, b, c, scale_a, scale_b, scale_format):
    """FP4: exact dot products of 16, times their scales [m, k/16] and [k/16, n]; 35 bits."""
    groups = a.shape[1] // 16
    dots = np.einsum("mgx,gxn->gmn", a.reshape(len(a), groups, 16), b.reshape(groups, 16, -1))
    terms = dots * scale_a.T[:, :, None] * scale_b[:, None, :]
    minimum = MIN_EXPONENT[scale_format]
    e = exponents(scale_a, minimum).T[:, :, None] + exponents(scale_b, minimum)[:, None, :]
    c = np.broadcast_to(np.asarray(c, np.float64), dots.shape[1:])
    unit = np.exp2((np.maximum(e.max(0), exponents(c, -126)) - 35).astype(np.float64))
    return truncate((np.trunc(terms / unit).sum(0) + np.trunc(c / unit)) * unit)


def random_codes(name, rng, shape):
    """Codes of finite numbers of moderate size, zeros and subnormals among them."""
    bits = BITS[name]
    if bits == 4 or name in ("u8", "s8"):
        return rng.integers(0, 1 << bits, shape).astype(np.uint32)
    values = rng.normal(size=shape) * 2.0 ** rng.integers(-2, 2, shape)
    values[rng.random(shape) < 0.05] = 0
    if name in ("f32", "tf32"):
        return values.astype(np.float32).view(np.uint32)
    storage = np.uint16 if bits == 16 else np.uint8
    return values.astype(np.float32).astype(DTYPES[name]).view(storage).astype(np.uint32)
