"""Conversions and arithmetic of the emulator against ml_dtypes, NumPy and exact fractions."""

import fractions
import itertools
import math

import ml_dtypes
import numerics
import numpy as np
import pytest

# NaN operands and overflow are part of these tests.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning"
)

FTZ, SAT, RELU, NAN, XORSIGN = 1, 2, 4, 8, 16
NARROW = ["f16", "bf16", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]
# NaN, largest finite code, infinity code (None: none) of a float format.
CODES = {
    "f16": (0x7FFF, 0x7BFF, 0x7C00),
    "bf16": (0x7FFF, 0x7F7F, 0x7F80),
    "e4m3": (0x7F, 0x7E, None),
    "e5m2": (0x7F, 0x7B, 0x7C),
    "e2m3": (0x1F, 0x1F, None),  # no NaN: the largest value
    "e3m2": (0x1F, 0x1F, None),
    "e2m1": (0x7, 0x7, None),
}
SPECIAL = np.array(
    [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x40490FDB,
     0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x33800000, 0x34000000, 0x4B000001,
     0x5F000000, 0x7E000000, 0x00400000], np.uint32)  # fmt: skip
SPECIAL = np.concatenate([SPECIAL, SPECIAL | 0x80000000])


def grid(name):
    """Non-negative finite values of a format, by code."""
    return numerics.decode(name, np.arange(CODES[name][1] + 1))


def interesting(name, rng):
    """float32 bit patterns: values of a format, midpoints, and their neighbours; specials."""
    values = grid(name)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] * 1.01]])
    top = values[-1] + (values[-1] - values[-2]) / 2
    points = np.append(points, top).astype(np.float32)
    bits = points[np.isfinite(points)].view(np.uint32)
    bits = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1])
    bits = np.concatenate([bits, SPECIAL, rng.integers(0, 2**31, 2000, dtype=np.uint32)])
    return np.concatenate([bits, bits ^ np.uint32(0x80000000)])


def rounded(name, values, mode, satfinite, relu):
    """The codes that float64 `values` round to, from the sorted list of the format's values."""
    nan, largest, infinity = CODES[name]
    table = grid(name)
    magnitude = np.abs(values)
    with np.errstate(invalid="ignore"):
        low = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, largest)
    step = table[-1] - table[-2]
    # One imaginary value beyond the largest decides about overflow.
    upper = np.append(table, table[-1] + step)[low + 1]
    exact = table[low] == magnitude
    middle = (table[low] + upper) / 2
    negative = np.signbit(values)
    up = {
        "rn": (magnitude > middle) | ((magnitude == middle) & (low % 2 == 1)),
        "rna": magnitude >= middle,
        "rz": np.zeros(values.shape, bool),
        "rp": ~negative & ~exact,
        "rm": negative & ~exact,
    }[mode]
    codes = np.where(exact, low, low + up)
    overflow = largest if satfinite or infinity is None else infinity
    beyond = (codes > largest) | np.isinf(magnitude)
    codes = np.where(beyond, nan if not satfinite and infinity is None else overflow, codes)
    sign = 1 << (numerics.BITS[name] - 1)
    codes = np.where(negative, 0 if relu else codes | sign, codes)
    return np.where(np.isnan(values), nan, codes).astype(np.uint32)


@pytest.mark.parametrize("name", [*NARROW, "ue8m0"])
def test_decode_every_code(name):
    codes = np.arange(1 << numerics.BITS[name], dtype=np.uint32)
    out = np.zeros(codes.size, np.float32)
    numerics.library().numerics_decode(
        numerics.FORMATS[name], numerics.pointer(codes), codes.size, numerics.pointer(out)
    )
    np.testing.assert_array_equal(out.astype(np.float64), numerics.decode(name, codes))


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_f32_nearest(name, relu, generic):
    bits = interesting(name, np.random.default_rng(0))
    values = numerics.decode("f32", bits)
    saturating = [True] if numerics.BITS[name] <= 8 else [False, True]
    for satfinite in saturating:
        text = f"cvt.rn{'.satfinite' * satfinite}{relu}.{name}x2.f32"
        # Two different sources tell the halves apart.
        got = numerics.convert(text, bits, bits[::-1].copy(), generic=generic)
        want = rounded(name, values, "rn", satfinite, bool(relu))
        stride = {4: 4, 6: 8, 8: 8, 16: 16}[numerics.BITS[name]]
        np.testing.assert_array_equal(got, (want << stride) | want[::-1])
        if not relu:  # the grid model against ml_dtypes' own rounding
            finite = np.abs(values) <= grid(name)[-1]
            storage = np.uint16 if numerics.BITS[name] == 16 else np.uint8
            other = values[finite].astype(np.float32).astype(numerics.DTYPES[name]).view(storage)
            np.testing.assert_array_equal(want[finite], other.astype(np.uint32))


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_narrow_f32_scalar_and_directed(name, mode):
    bits = interesting(name, np.random.default_rng(1))
    want = rounded(name, numerics.decode("f32", bits), mode, False, False)
    for generic in (False, True):
        got = numerics.convert(f"cvt.{mode}.{name}.f32", bits, generic=generic)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", ["rm", "rp"])
def test_narrow_f16_directed(mode):
    bits = interesting("f16", np.random.default_rng(2))
    want = rounded("f16", numerics.decode("f32", bits), mode, False, False)
    np.testing.assert_array_equal(numerics.convert(f"cvt.{mode}.f16.f32", bits), want)


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(mode):
    rng = np.random.default_rng(3)
    bits = np.concatenate([SPECIAL, rng.integers(0, 2**32, 4000, dtype=np.uint32)])
    bits = np.concatenate([bits, (bits & 0xFFFFE000) | 0x1000, (bits & 0xFFFFE000) | 0x0FFF])
    bits = bits[~np.isnan(bits.view(np.float32))].astype(np.uint64)
    add = {"rna": 0x1000, "rn": 0x0FFF + ((bits >> 13) & 1), "rz": 0}[mode]
    want = ((bits & 0x7FFFFFFF) + add) & 0xFFFFE000 | (bits & 0x80000000)
    got = numerics.convert(f"cvt.{mode}.tf32.f32", bits.astype(np.uint32))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("source", ["f32", "bf16x2"])
def test_ue8m0(mode, source):
    rng = np.random.default_rng(4)
    codes = np.concatenate([np.arange(0, 0x8000), rng.integers(0, 0x7F80, 100)]).astype(np.uint32)
    bits = codes << 16
    if source == "f32":
        bits = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1])
    values = numerics.decode("f32", bits)
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.log2(values)
        exponent = np.where(mode == "rp", np.ceil(power), np.floor(power))
        # log2 of a number next to a power of two rounds to it; repair with exact comparison.
        exponent += (mode == "rp") & (np.exp2(exponent) < values)
        exponent -= (mode == "rz") & (np.exp2(exponent) > values)
        want = np.clip(exponent + 127, 0, 254)
    want = np.where(np.isnan(values), 255, want).astype(np.uint32)
    if source == "f32":
        got = numerics.convert(f"cvt.{mode}.satfinite.ue8m0x2.f32", bits, bits[::-1].copy())
        np.testing.assert_array_equal(got, (want << 8) | want[::-1])
    else:
        packed = (codes << 16) | codes[::-1]
        got = numerics.convert(f"cvt.{mode}.satfinite.ue8m0x2.bf16x2", packed)
        np.testing.assert_array_equal(got, (want << 8) | want[::-1])


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_widen_to_f16x2_exhaustively(name):
    bits = numerics.BITS[name]
    stride = 4 if bits == 4 else 8
    codes = np.arange(1 << (2 * stride), dtype=np.uint32)
    if bits == 6:
        codes &= 0x3F3F
    got = numerics.convert(f"cvt.rn.f16x2.{name}x2", codes)
    with np.errstate(invalid="ignore"):
        half = numerics.decode(name, np.arange(1 << bits)).astype(np.float16).view(np.uint16)
    half = np.where((half & 0x7FFF) > 0x7C00, 0x7FFF, half).astype(np.uint32)
    want = (half[(codes >> stride) & ((1 << bits) - 1)] << 16) | half[codes & ((1 << bits) - 1)]
    np.testing.assert_array_equal(got, want)


def test_ue8m0_to_bf16_exhaustively():
    codes = np.arange(1 << 16, dtype=np.uint32)
    scale = numerics.decode("ue8m0", np.arange(256)).astype(ml_dtypes.bfloat16).view(np.uint16)
    scale = np.where((scale & 0x7FFF) > 0x7F80, 0x7FFF, scale).astype(np.uint32)
    got = numerics.convert("cvt.rn.bf16x2.ue8m0x2", codes)
    np.testing.assert_array_equal(got, (scale[codes >> 8] << 16) | scale[codes & 255])


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_f16x2_to_fp8_exhaustively(name, relu):
    codes = np.arange(1 << 16, dtype=np.uint32)
    want = rounded(name, numerics.decode("f16", codes), "rn", True, bool(relu))
    packed = (codes << 16) | codes[::-1]
    got = numerics.convert(f"cvt.rn.satfinite{relu}.{name}x2.f16x2", packed)
    np.testing.assert_array_equal(got, (want << 8) | want[::-1])


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_widen_to_f32_exhaustively(name):
    codes = np.arange(1 << 16, dtype=np.uint32)
    want = numerics.decode(name, codes).astype(np.float32).view(np.uint32)
    want = np.where((want & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, want)
    for generic in (False, True):
        np.testing.assert_array_equal(
            numerics.convert(f"cvt.f32.{name}", codes, generic=generic), want
        )


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s32", "u32", "s8", "u16", "s64", "u64"])
def test_float_to_integer(target, mode):
    rng = np.random.default_rng(5)
    halves = np.arange(-70000, 70000, 1001) / 2
    edges = [
        2.0**p * s + d for p in (7, 8, 15, 16, 31, 32, 63, 64) for s in (1, -1) for d in (-1, 0, 1)
    ]
    values = np.concatenate([halves, edges, [np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -0.5, -0.0]])
    values = np.concatenate([values, rng.normal(size=200) * 1e6]).astype(np.float32)
    width, signed = int(target[1:]), target[0] == "s"
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if signed else (0, 2**width - 1)

    def one(x):
        if math.isnan(x):
            return 1 << 63 if width == 64 else 0
        if math.isinf(x):
            return (high if x > 0 else low) % 2**width
        exact = fractions.Fraction(float(x))
        n = {"rni": round, "rzi": int, "rmi": math.floor, "rpi": math.ceil}[mode](exact)
        return min(max(n, low), high) % 2**width

    want = np.array([one(x) for x in values], np.uint64)
    got = numerics.convert(f"cvt.{mode}.{target}.f32", values.view(np.uint32), wide=width == 64)
    np.testing.assert_array_equal(got.astype(np.uint64), want)


def directed(exact, mode, mantissa=23, emin=-126, emax=127, negative_zero=False):
    """Rounds a Fraction to a binary float with `mantissa` fraction bits, as a Python float."""
    if exact == 0:
        return -0.0 if negative_zero else 0.0
    magnitude = abs(exact)
    exponent = max(math.frexp(float(magnitude))[1] - 1 if magnitude < 2**1000 else 1000, emin)
    while magnitude >= fractions.Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > emin and magnitude < fractions.Fraction(2) ** exponent:
        exponent -= 1
    unit = fractions.Fraction(2) ** (exponent - mantissa)
    steps, rest = divmod(magnitude, unit)
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and steps % 2 == 1),
        "rz": False,
        "rm": exact < 0 and rest > 0,
        "rp": exact > 0 and rest > 0,
    }[mode]
    value = (steps + up) * unit
    largest = (2 - fractions.Fraction(1, 2**mantissa)) * fractions.Fraction(2) ** emax
    if value > largest:
        inward = mode == "rz" or mode == ("rm" if exact > 0 else "rp")
        value = largest if inward else math.inf
    return math.copysign(float(value), -1 if exact < 0 else 1)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(
    ("source", "target"), [("u64", "f32"), ("s64", "f64"), ("s32", "f32"), ("u64", "f16")]
)
def test_integer_to_float(source, target, mode):
    rng = np.random.default_rng(6)
    width = int(source[1:])
    raw = rng.integers(0, 2**64, 300, dtype=np.uint64) >> rng.integers(0, 63, 300, dtype=np.uint64)
    raw = np.concatenate([raw, [2**64 - 1, 2**63, 2**63 - 1, 2**53 + 1, 2**24 + 1, 0]]).astype(
        np.uint64
    )
    raw = raw.astype(np.uint64 if width == 64 else np.uint32)
    values = raw.view(np.int64 if width == 64 else np.int32) if source[0] == "s" else raw
    parameters = {"f32": (23, -126, 127), "f64": (52, -1022, 1023), "f16": (10, -14, 15)}[target]
    want = [directed(fractions.Fraction(int(v)), mode, *parameters) for v in values]
    got = numerics.convert(f"cvt.{mode}.{target}.{source}", raw, wide=target == "f64")
    want_bits = {
        "f32": lambda w: np.array(w, np.float32).view(np.uint32),
        "f64": lambda w: np.array(w, np.float64).view(np.uint64),
        "f16": lambda w: np.array(w, np.float16).view(np.uint16),
    }[target](want)
    np.testing.assert_array_equal(got.astype(np.uint64), want_bits.astype(np.uint64))
    if (source, target, mode) == ("s32", "f32", "rn"):
        np.testing.assert_array_equal(got, numerics.convert("cvt.rn.f32.s32", raw, generic=True))


def test_integer_to_integer():
    values = np.array([0, 1, 127, 128, 255, 256, 2**31, 2**32 - 1, 2**32 - 128], np.uint32)
    signed = values.view(np.int32).astype(np.int64)
    got = numerics.convert("cvt.sat.s8.s32", values)
    np.testing.assert_array_equal(got, np.clip(signed, -128, 127).astype(np.uint8))
    np.testing.assert_array_equal(numerics.convert("cvt.u8.s32", values), values & 0xFF)
    np.testing.assert_array_equal(
        numerics.convert("cvt.s64.s32", values, wide=True).view(np.int64), signed
    )


@pytest.mark.parametrize(("name", "bits"), [("f16", 13), ("bf16", 16)])
def test_stochastic_pairs(name, bits):
    """The random bits are added below the last place of the mantissa; a carry rounds up."""
    rng = np.random.default_rng(7)
    # Exponents in the normal range of both formats.
    a, b = ((rng.integers(0, 2**23, 2000) | rng.integers(115, 140, 2000) << 23).astype(np.uint32)
            for _ in range(2))  # fmt: skip
    random = rng.integers(0, 2**32, 2000, dtype=np.uint32)
    mask = (1 << bits) - 1

    def one(x, r):
        total = x.astype(np.uint64) + (r & mask)
        return (total >> bits if name == "bf16" else (total >> 13) - ((127 - 15) << 10)).astype(
            np.uint32
        )

    want = (one(a, random >> 16) << 16) | one(b, random & 0xFFFF)
    np.testing.assert_array_equal(numerics.convert(f"cvt.rs.{name}x2.f32", a, b, random), want)


def test_stochastic_fp8_and_fp4():
    one_and = np.float32(1 + 1 / 32)  # a quarter of the way from 1 to 1.125 in e4m3
    a = np.full(4096, one_and).view(np.uint32)
    random = np.arange(4096, dtype=np.uint32) << 20
    got = numerics.convert("cvt.rs.satfinite.e4m3x4.f32", a, a, a, a, random)
    up = (got >> 24) == 0x39
    np.testing.assert_array_equal(up, (random >> 16) >= 0xC000)
    assert set(np.unique(got >> 24)) == {0x38, 0x39}
    assert (got & 0xFFFF == 0x3838).all()  # the lower half of rbits is 0
    b = np.full(256, 1.125, np.float32).view(np.uint32)  # a quarter of the way from 1 to 1.5
    random = np.arange(256, dtype=np.uint32) * 0x01010101
    got = numerics.convert("cvt.rs.satfinite.e2m1x4.f32", b, b, b, b, random)
    want = np.where(np.arange(256) >= 0xC0, 0x3333, 0x2222)
    np.testing.assert_array_equal(got, want)


def cases(rng, operands):
    """Operands as float32 bits: all combinations of specials, and random ones of close size."""
    few = SPECIAL[[0, 1, 4, 6, 7, 10, 11, 13, 20, 21, 24, 26, 27, 30, 31]]
    every = np.array(list(itertools.product(few, repeat=operands)), np.uint32)[:3500]
    count = 1500
    exponents = rng.integers(100, 150, (count, 1)) + rng.integers(-12, 12, (count, operands))
    random = rng.integers(0, 2**23, (count, operands)) | (exponents << 23)
    random |= rng.integers(0, 2, (count, operands)) << 31
    tiny = rng.integers(0, 2**24, (300, operands)) | (rng.integers(0, 2, (300, operands)) << 31)
    return np.concatenate([every, random.astype(np.uint32), tiny.astype(np.uint32)]).T.copy()


def exact_result(op, values, mode):
    """Correct f32 result of one operation on Python floats."""
    a, b, c = (*values, 0.0)[:3]
    if any(math.isnan(v) or math.isinf(v) for v in values):
        with np.errstate(invalid="ignore"):
            a, b, c = (np.float64(v) for v in (a, b, c))
            return float({"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[op])
    f = [fractions.Fraction(v) for v in (a, b, c)]
    exact = {"add": f[0] + f[1], "sub": f[0] - f[1], "mul": f[0] * f[1], "fma": f[0] * f[1] + f[2]}[
        op
    ]
    sign = lambda v: math.copysign(1, v) < 0  # noqa: E731
    first = sign(a) != sign(b) if op in ("mul", "fma") else sign(a)
    second = {"add": sign(b), "sub": not sign(b), "mul": first, "fma": sign(c)}[op]
    negative_zero = first if first == second else mode == "rm"
    return directed(exact, mode, negative_zero=negative_zero)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_f32_arithmetic(op, mode):
    operands = cases(np.random.default_rng(8), 3 if op == "fma" else 2)
    values = operands.view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        want = np.array([exact_result(op, v, mode) for v in values.T], np.float64).astype(
            np.float32
        )
    want = np.where(np.isnan(want), 0x7FFFFFFF, want.view(np.uint32)).astype(np.uint32)
    np.testing.assert_array_equal(numerics.arithmetic(op, "f32", *operands, rounding=mode), want)
    # Packed: the same numbers two at a time.
    if operands.shape[1] % 2:
        operands, want = operands[:, :-1].copy(), want[:-1]
    pairs = [o.view(np.uint64) for o in operands]
    got = numerics.arithmetic(op, "f32x2", *pairs, rounding=mode)
    np.testing.assert_array_equal(got.view(np.uint32), want)


def flush(bits):
    return np.where((bits & 0x7F800000) == 0, bits & 0x80000000, bits).astype(np.uint32)


@pytest.mark.parametrize("mode", ["rn", "rm"])
def test_f32_flush_and_saturate(mode):
    operands = cases(np.random.default_rng(9), 3)
    plain = numerics.arithmetic("fma", "f32", *(flush(o) for o in operands), rounding=mode)
    got = numerics.arithmetic("fma", "f32", *operands, rounding=mode, flags=FTZ)
    np.testing.assert_array_equal(got, flush(plain))
    got = numerics.arithmetic("fma", "f32", *operands, rounding=mode, flags=FTZ | SAT)
    with np.errstate(invalid="ignore"):
        value = flush(plain).view(np.float32)
        want = np.where(value > 0, np.minimum(value, 1), np.float32(0))
    np.testing.assert_array_equal(got, want.view(np.uint32))


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_half_arithmetic(kind, op):
    rng = np.random.default_rng(10)
    name, parameters = kind[:-2], {"f16x2": (10, -14, 15), "bf16x2": (7, -126, 127)}[kind]
    codes = rng.integers(0, 2**16, (3, 1200)).astype(np.uint32)
    codes[:, :600] = (codes[:, :600] & 0x83FF) | (rng.integers(12, 18, (3, 600)) << 10)
    values = numerics.decode(name, codes)

    def one(a, b, c):
        if not all(map(math.isfinite, (a, b, c))):
            return None
        f = [fractions.Fraction(v) for v in (a, b, c)]
        exact = {
            "add": f[0] + f[1],
            "sub": f[0] - f[1],
            "mul": f[0] * f[1],
            "fma": f[0] * f[1] + f[2],
        }[op]
        return None if exact == 0 else directed(exact, "rn", *parameters)

    want = [one(*v) for v in values.T]
    packed = [(c << 16) | c for c in codes]
    got = numerics.arithmetic(op, kind, *packed)
    np.testing.assert_array_equal(got >> 16, got & 0xFFFF)
    assert sum(w is not None for w in want) > 600
    for w, g in zip(want, numerics.decode(name, got & 0xFFFF), strict=True):
        assert w is None or w == g


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("inputs", [2, 3])
def test_f32_extremes(op, inputs):
    operands = cases(np.random.default_rng(11), inputs)
    values = operands.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = {"min": np.fmin, "max": np.fmax}[op].reduce(values)
    nan = np.isnan(values)
    # Zeros are ordered by sign.
    signs = np.signbit(values) | nan if op == "max" else np.signbit(values) & ~nan
    negative = signs.all(0) if op == "max" else signs.any(0)
    want = np.where(want == 0, np.where(negative, -0.0, 0.0), want).astype(np.float32)
    bits = np.where(np.isnan(want), 0x7FFFFFFF, want.view(np.uint32)).astype(np.uint32)
    np.testing.assert_array_equal(numerics.arithmetic(op, "f32", *operands, inputs=inputs), bits)
    propagated = np.where(nan.any(0), 0x7FFFFFFF, bits)
    got = numerics.arithmetic(op, "f32", *operands, inputs=inputs, flags=NAN)
    np.testing.assert_array_equal(got, propagated)


@pytest.mark.parametrize("op", ["min", "max"])
def test_xorsign_abs(op):
    operands = cases(np.random.default_rng(12), 2)
    got = numerics.arithmetic(op, "f32", *operands, flags=XORSIGN)
    magnitude = numerics.arithmetic(op, "f32", *(operands & 0x7FFFFFFF))
    sign = (operands[0] ^ operands[1]) & 0x80000000
    keep = magnitude != 0x7FFFFFFF
    np.testing.assert_array_equal(got[keep], (magnitude | sign)[keep])


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_half_extremes(kind):
    name = kind[:-2]
    codes = np.random.default_rng(13).integers(0, 2**16, (2, 5000)).astype(np.uint32)
    a, b = numerics.decode(name, codes)
    with np.errstate(invalid="ignore"):
        want = np.fmax(a, b)
    got = numerics.arithmetic("max", kind, *((c << 16) | c for c in codes))
    np.testing.assert_array_equal(numerics.decode(name, got >> 16), want)
    np.testing.assert_array_equal(got >> 16, got & 0xFFFF)


# Largest relative error that the ISA allows, and the reference in float64.
APPROXIMATE = {
    "ex2": (2.0**-22, np.exp2, (-126, 127)),
    "lg2": (2.0**-22, np.log2, (1e-30, 1e30)),
    "rcp": (2.0**-23, np.reciprocal, (1e-30, 1e30)),
    "rsqrt": (2.0**-22.9, lambda x: 1 / np.sqrt(x), (1e-30, 1e30)),
    "sqrt": (2.0**-23, np.sqrt, (1e-30, 1e30)),
    "tanh": (2.0**-11, np.tanh, (-10, 10)),
    "sin": (2.0**-20.9, np.sin, (-math.pi, math.pi)),
    "cos": (2.0**-20.9, np.cos, (-math.pi, math.pi)),
}


@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximate_functions(op):
    bound, reference, (low, high) = APPROXIMATE[op]
    rng = np.random.default_rng(14)
    x = (
        rng.uniform(low, high, 20000)
        if low < 0
        else np.exp(rng.uniform(np.log(low), np.log(high), 20000))
    )
    x = x.astype(np.float32)
    want = reference(x.astype(np.float64))
    got = numerics.arithmetic(op, "f32", x.view(np.uint32)).view(np.float32).astype(np.float64)
    error = np.abs(got - want)
    absolute = op in ("sin", "cos") or (op == "lg2")
    size = (
        np.where((x > 0.5) & (x < 2) | (op != "lg2"), 1.0, np.abs(want))
        if absolute
        else np.abs(want)
    )
    assert (error <= bound * size).all()


def test_approximate_special_values():
    inf, nan = np.inf, np.nan
    table = {
        "ex2": [
            (-inf, 0),
            (inf, inf),
            (nan, nan),
            (0, 1),
            (-0.0, 1),
            (128, inf),
            (-150, 0),
            (3, 8),
        ],
        "lg2": [(0, -inf), (-1, nan), (inf, inf), (1, 0), (8, 3)],
        "rcp": [(0, inf), (-0.0, -inf), (inf, 0), (nan, nan)],
        "rsqrt": [(0, inf), (-0.0, -inf), (inf, 0), (-1, nan)],
        "sqrt": [(0, 0), (-0.0, -0.0), (inf, inf), (-1, nan)],
        "tanh": [(0, 0), (-0.0, -0.0), (inf, 1), (-inf, -1), (nan, nan)],
    }
    for op, pairs in table.items():
        x, want = np.array(pairs, np.float32).T.copy()
        got = numerics.arithmetic(op, "f32", x.view(np.uint32), flags=FTZ if op != "tanh" else 0)
        bits = np.where(np.isnan(want), 0x7FFFFFFF, want.view(np.uint32))
        np.testing.assert_array_equal(got, bits, err_msg=op)
    # ex2.ftz flushes its argument and its result.
    x = np.array([1e-40, -126, -126.5], np.float32).view(np.uint32)
    flushed = numerics.arithmetic("ex2", "f32", x, flags=FTZ).view(np.float32)
    np.testing.assert_array_equal(flushed, np.array([1, 2.0**-126, 0], np.float32))
    kept = numerics.arithmetic("ex2", "f32", x).view(np.float32)
    assert kept[2] > 0


def test_comparisons():
    operands = cases(np.random.default_rng(15), 2)
    count = operands.shape[1] // 32 * 32
    a, b = operands[:, :count].view(np.float32)
    unordered = np.isnan(a) | np.isnan(b)
    with np.errstate(invalid="ignore"):
        ordered = {
            "eq": a == b,
            "ne": (a != b) & ~unordered,
            "lt": a < b,
            "le": a <= b,
            "gt": a > b,
            "ge": a >= b,
        }
    expected = ordered | {f"{k}u": v | unordered for k, v in ordered.items()}
    expected |= {"num": ~unordered, "nan": unordered}
    lib = numerics.library()
    for name, want in expected.items():
        for w in range(0, count, 32):
            x, y = a[w : w + 32].copy(), b[w : w + 32].copy()
            mask = lib.numerics_compare(
                numerics.COMPARES[name], 0, 0, numerics.pointer(x), numerics.pointer(y)
            )
            assert mask == sum(int(v) << i for i, v in enumerate(want[w : w + 32])), name
