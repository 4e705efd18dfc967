"""The Blackwell forward on the emulator: values, schedules, and what its special parts are for.

    kernels/sm100/forward.py ─build (cached)─► PTX ─► launch_kernel, one SM ─► out, lse
                                                │                               │
                                                └─ mutants: must fail           └─ accuracy rule

One SM (two for pairs of CTAs) makes every CTA take several tiles, so that all rings go round. The
race check runs all along.
"""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import oracle
import pytest
from emulator import EmulatorError
from kernel_problems import (
    UNLIMITED,
    Case,
    ForwardResults,
    attention,
    build_kernels,
    check_forward,
    executed,
    float32_literal,
    forward_operands,
    ids,
    launch_forward,
    mutant_of,
    packed,
    shuffled,
    symbols,
)

from fa4_jax import bundle
from kernels import artifacts

pytestmark = [pytest.mark.dsl, pytest.mark.emulator]

PAIR = "sm100_forward_bf16_h128_full_pair"
CAUSAL = "sm100_forward_bf16_h128_causal"
WINDOW = "sm100_forward_bf16_h128_window"
SEGMENTS = "sm100_forward_bf16_h128_segments"
CAPPED = "sm100_forward_f16_h128_window_capped"
CAPPED_SEGMENTS = "sm100_forward_f16_h64_segments_capped"
SM103_SEGMENTS = "sm103_forward_f16_h96_segments"
SM103_CAPPED_SEGMENTS = "sm103_forward_bf16_h128_segments_capped"
NEW = (SEGMENTS, CAPPED, CAPPED_SEGMENTS, SM103_SEGMENTS, SM103_CAPPED_SEGMENTS)
NAMES = (
    PAIR,
    CAUSAL,
    WINDOW,
    *NEW,
    "sm100_forward_f16_h64_full",
    "sm100_forward_f16_h96_window",
    "sm103_forward_bf16_h128_causal",
    "sm103_forward_bf16_h128_full_pair",
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> pathlib.Path:
    """A bundle of this file's kernels."""
    return build_kernels(NAMES, tmp_path_factory.mktemp("sm100"))


def directory_of(kernels: pathlib.Path, case: Case) -> pathlib.Path:
    return kernels / f"sm_{case.kernel[2:5]}a"


def heads_per_tile(T: int, N: int, K: int) -> int:
    """Query heads that the launcher has a tile pack."""
    return max(
        n for n in (1, 2, 4, 8, 16, 32, 64, 128) if N // K % n == 0 and (n == 1 or T * n <= 128)
    )


def run(
    kernels: pathlib.Path,
    case: Case,
    bounds: np.ndarray | None = None,
    hurt: Sequence[int] = (),
    **options,
) -> ForwardResults:
    """Launches the case's kernel of a bundle.

    ``bounds`` replaces the segments' exact bounds, ``hurt`` names a key of each batch element that
    is NaN.
    """
    _, T, _, N, K, _, _ = case.sizes
    operands = forward_operands(case, bounds)
    for b, key in enumerate(hurt):
        operands["key"][b, key] = np.nan
    pack = heads_per_tile(T, N, K)
    return launch_forward(
        directory_of(kernels, case),
        case.kernel,
        operands,
        symbols(case) | {"pack": pack, "packed_N": N // pack},
        num_sms=2 if case.kernel.endswith("_pair") else 1,
        **options,
    )


def check(case: Case, found: ForwardResults) -> None:
    """The accuracy rule; the float32 lse within what its terms' rounding explains."""
    # The polynomial's relative error of 9e-5 is one of the sum, so an absolute one of lse.
    # The tangent's relative error of 1.2e-6, and that of its argument, are those of a logit.
    check_forward(case, found, rtol=3e-6 if case.cap else 1e-6, atol=1e-4)


CORRECTION_WARPS = range(8, 12)
SOFTMAX_WARPS = range(8)
MMA_WARP = 12


# ---- values --------------------------------------------------------------------------------------

CASES = {
    "pair": Case(PAIR, (1, 513, 384, 2, 1, 128, 128)),
    "pair_one_row": Case(PAIR, (2, 1, 1, 1, 1, 104, 8)),
    "pair_lengths": Case(
        PAIR,
        (3, 300, 257, 2, 2, 120, 72),
        dict(query_seq_lengths=[300, 3, 0], key_value_seq_lengths=[77, 257, 200]),
        scale=(0.1, -0.2, 0.1),
    ),
    "pair_no_keys": Case(PAIR, (2, 129, 127, 1, 1, 128, 128), dict(key_value_seq_lengths=[0, 127])),
    "pair_growing": Case(PAIR, (1, 256, 513, 1, 1, 128, 128), gain=8, growth=60),
    "sm103_pair": Case("sm103_forward_bf16_h128_full_pair", (1, 300, 200, 2, 1, 128, 128)),
    "causal": Case(CAUSAL, (1, 513, 513, 4, 2, 128, 128), dict(is_causal=True)),
    "causal_offsets": Case(
        CAUSAL, (2, 200, 384, 2, 1, 128, 64), dict(is_causal=True, query_offset=[184, -150])
    ),
    "causal_far": Case(
        CAUSAL,
        (2, 64, 129, 1, 1, 128, 128),
        dict(is_causal=True, query_offset=[UNLIMITED, -UNLIMITED]),
    ),
    "causal_growing": Case(
        CAUSAL, (1, 384, 384, 1, 1, 128, 128), dict(is_causal=True), gain=8, growth=60
    ),
    "sm103_causal": Case(
        "sm103_forward_bf16_h128_causal",
        (2, 257, 257, 1, 1, 128, 128),
        dict(is_causal=True, key_value_seq_lengths=[257, 130]),
    ),
    "diagonal": Case(WINDOW, (1, 300, 300, 1, 1, 128, 128), dict(local_window_size=(0, 0))),
    "window": Case(
        WINDOW,
        (2, 400, 300, 2, 1, 128, 128),
        dict(
            local_window_size=(30, 60),
            query_offset=[-250, 120],
            query_seq_lengths=[390, 380],
            key_value_seq_lengths=[290, 200],
        ),
        scale=(0.1, -0.1),
    ),
    "right_window": Case(WINDOW, (1, 256, 384, 1, 1, 128, 128), dict(local_window_size=(None, 5))),
    "zero_scale": Case(WINDOW, (1, 130, 200, 1, 1, 128, 128), scale=(0.0,)),
    # Borders on, just before and inside tiles; a segment of one token.
    "packed": Case(
        SEGMENTS,
        (1, 513, 513, 2, 1, 128, 128),
        ids([packed(128, 127, 130, 1, 100, 27)], is_causal=True),
    ),
    # Lengths, window, offset, negative scale and sinks at once; nothing is sorted.
    "unsorted": Case(
        SEGMENTS,
        (2, 200, 384, 4, 2, 128, 128),
        ids(
            [shuffled(200, 3), shuffled(200, 2)],
            [shuffled(384, 3), shuffled(384, 4)],
            local_window_size=(100, 200),
            query_offset=[0, 120],
            query_seq_lengths=[150, 200],
            key_value_seq_lengths=[384, 300],
        ),
        scale=(0.1, -0.1),
        sinks=(1.0, -5.0, 30.0, -np.inf),
    ),
    # Key tiles between those of the two query tiles, which neither needs; queries without keys.
    "gap": Case(
        SEGMENTS,
        (3, 256, 640, 1, 1, 128, 128),
        ids(
            [[0] * 128 + [1] * 128, [1] * 128 + [0] * 128, [9] * 128 + [4] * 128],
            [[0] * 128 + [2] * 384 + [1] * 128] * 2 + [packed(100, 200, 40, 0, 300)],
        ),
        sinks=(2.0,),
    ),
    "sm103_segments": Case(
        SM103_SEGMENTS,
        (1, 300, 257, 2, 1, 96, 96),
        ids([packed(70, 130, 100)], [packed(64, 129, 64)]),
    ),
    "capped": Case(
        CAPPED,
        (2, 200, 384, 2, 1, 128, 128),
        dict(is_causal=True, query_offset=[184, 0], key_value_seq_lengths=[300, 384]),
        scale=(0.1, -0.1),
        cap=20.0,
        gain=8,
    ),
    "barely_capped": Case(CAPPED, (1, 128, 200, 1, 1, 128, 128), cap=1e4, sinks=(-3.0,)),
    "saturated": Case(CAPPED, (1, 129, 300, 1, 1, 128, 128), cap=50.0, gain=1000),
    "capped_zero_scale": Case(CAPPED, (1, 64, 200, 1, 1, 128, 128), cap=1.0, scale=(0.0,)),
    "capped_segments": Case(
        CAPPED_SEGMENTS,
        (2, 300, 300, 2, 2, 64, 64),
        ids([packed(100, 200), shuffled(300, 2)], is_causal=True),
        cap=5.0,
        sinks=(0.5, 2.0),
        gain=4,
    ),
    "sm103_capped_segments": Case(
        SM103_CAPPED_SEGMENTS,
        (1, 400, 256, 1, 1, 128, 128),
        ids([packed(150, 250)], [packed(128, 128)], local_window_size=(200, None)),
        cap=20.0,
        gain=8,
        growth=20,
    ),
    # Eight heads in a tile of 16 positions.
    "decoding": Case(
        SEGMENTS,
        (2, 16, 300, 16, 2, 128, 128),
        ids(
            [packed(0, 0, 10, 6), packed(0, 16)],
            [packed(90, 50, 104, 56), [1] * 300],
            is_causal=True,
            query_offset=[284, 284],
        ),
        sinks=tuple(np.linspace(-3, 3, 16)),
    ),
    "h64": Case("sm100_forward_f16_h64_full", (1, 200, 1500, 2, 1, 64, 64)),
    "h96": Case(
        "sm100_forward_f16_h96_window",
        (1, 257, 513, 1, 1, 96, 88),
        dict(local_window_size=(100, 300)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_right(kernels, name):
    check(CASES[name], run(kernels, CASES[name]))


LENGTHS = (1, 64, 127, 128, 129, 200, 256, 384, 513)


def random_case(kernel: str, T: int, S: int) -> Case:
    """A call with what the kernel can do mixed at random, the same for the same arguments."""
    random = np.random.default_rng([T, S, *kernel.encode()])
    chance = lambda: random.random() < 0.5  # noqa: E731
    B, K, group = 2, int(random.integers(1, 3)), int(random.integers(1, 5))
    H = int(re.search(r"_h(\d+)_", kernel)[1])
    masks = {}
    if "causal" in kernel or ("full" not in kernel and chance()):
        masks["is_causal"] = True
    elif "full" not in kernel:
        sides = [int(random.integers(S)) if chance() else None for _ in range(2)]
        masks["local_window_size"] = tuple(sides)
    if "full" not in kernel and chance():
        masks["query_offset"] = random.integers(-T, S + 1, B).tolist()
    for side, length in (("query", T), ("key_value", S)):
        if chance():
            masks[f"{side}_seq_lengths"] = random.integers(length + 1, size=B).tolist()
    if "segments" in kernel:
        count = int(random.integers(1, 5))
        for side, length in (("query", T), ("key_value", S)):
            # Some ids on one side only; one batch element packed, the other one in any order.
            drawn = random.integers(count + 2 if chance() else count, size=(B, length))
            drawn[0].sort()
            masks[f"{side}_segment_ids"] = drawn.tolist()
    sinks = random.choice([-np.inf, -100.0, -1.0, 0.0, 2.0, 60.0], K * group) if chance() else None
    return Case(
        kernel,
        (B, T, S, K * group, K, H, H - 8 * int(random.integers(3))),
        masks,
        scale=tuple(random.choice([0.2, 0.1, 0.0, -0.1], B)) if chance() else None,
        cap=float(random.choice([1, 20, 50, 1e4])) if "capped" in kernel else None,
        sinks=None if sinks is None else tuple(sinks),
        gain=float(random.choice([1, 8])),
        growth=float(random.choice([0.1, 1, 30])),
    )


@pytest.mark.parametrize(("T", "S"), list(zip(LENGTHS, LENGTHS[4:] + LENGTHS[:4], strict=True)))
@pytest.mark.parametrize("kernel", NEW)
def test_mixtures_are_right(kernels, kernel, T, S):
    case = random_case(kernel, T, S)
    check(case, run(kernels, case))


@pytest.mark.slow
@pytest.mark.parametrize("S", LENGTHS)
@pytest.mark.parametrize("kernel", NAMES)
def test_all_mixtures_are_right(kernels, kernel, S):
    for T in LENGTHS:
        case = random_case(kernel, T, S)
        check(case, run(kernels, case))


@pytest.mark.parametrize("name", ["pair", "causal", "unsorted", "capped", "sm103_causal"])
def test_a_visible_nan_is_seen(kernels, name):
    """By every row that sees it, whichever unit computes its exponential, and by no other row."""
    case = dataclasses.replace(CASES[name], sinks=None)
    hurt = [b * 37 + 34 for b in range(case.sizes[0])]  # of a polynomial where there are any
    found = run(kernels, case, hurt=hurt)
    B, T, S, N = case.sizes[:4]
    seen = oracle.visible_keys((B, N, T, S), **case.masks)
    for b, key in enumerate(hurt):
        sees = seen[b, :, :, key].T
        assert np.isnan(found.out[b].astype(np.float32)).all(-1).tolist() == sees.tolist()
        assert np.isnan(found.lse[b]).tolist() == sees.tolist()
        assert not np.isnan(found.out[b][~sees].astype(np.float32)).any()


SCHEDULED = (
    *("pair_growing", "causal_growing", "window", "sm103_causal"),
    *("packed", "gap", "capped", "capped_segments", "sm103_capped_segments", "decoding"),
)


def same_with_every_schedule(kernels, name: str, seeds: range) -> None:
    case = CASES[name]
    once = run(kernels, case)
    for seed in seeds:
        again = run(kernels, case, seed=seed, trace=True)
        assert again.out.tobytes() == once.out.tobytes()
        assert again.lse.tobytes() == once.lse.tobytes()


@pytest.mark.parametrize("name", SCHEDULED)
def test_every_schedule_gives_the_same(kernels, name):
    same_with_every_schedule(kernels, name, range(1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULED)
def test_a_hundred_schedules_give_the_same(kernels, name):
    same_with_every_schedule(kernels, name, range(3, 103))


# ---- packing of heads ----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 32])
@pytest.mark.parametrize("T", [1, 2, 5, 16])
def test_packs_query_heads(kernels, T, group):
    """Decoding: the tiles and products of a batch element are those of its packs, not its heads."""
    K = 1 if group == 32 else 2
    B, S = 2, 200
    case = Case(
        CAUSAL,
        (B, T, S, K * group, K, 128, 128),
        dict(is_causal=True, query_offset=[S - T, 100], key_value_seq_lengths=[S, 101]),
        sinks=tuple(np.linspace(-2, 2, K * group)),
    )
    found = run(kernels, case)
    check(case, found)
    pack = heads_per_tile(T, group, 1)
    assert pack == min(group & -group, 128 // T if T in (1, 2, 16) else 16)
    key_tiles = 2 + 1  # of the two batch elements
    assert executed(found.trace, [MMA_WARP], "tcgen05.mma") == K * group // pack * key_tiles * 16


@pytest.mark.parametrize("kernel", [PAIR, WINDOW, *NEW])
def test_every_kernel_packs(kernels, kernel):
    for T, S, N, K in ((3, 300, 16, 2), (40, 100, 6, 3)):
        case = random_case(kernel, T, S)
        sinks = None if case.sinks is None else tuple(np.resize(case.sinks, N))
        case = dataclasses.replace(case, sizes=(2, T, S, N, K, *case.sizes[5:]), sinks=sinks)
        check(case, run(kernels, case))


# ---- conditional rescaling and the polynomial ----------------------------------------------------


def test_rescales_only_where_maxima_grow(kernels):
    """tau = 8: exponents that grow by less than that leave O in tensor memory alone."""
    level, growing = (run(kernels, CASES[name]) for name in ("pair", "pair_growing"))
    assert executed(level.trace, CORRECTION_WARPS, "tcgen05.st") == 0
    assert executed(growing.trace, CORRECTION_WARPS, "tcgen05.st") > 0


@pytest.mark.parametrize(("name", "pairs"), [("pair", 12), ("causal", 8), ("sm103_causal", 0)])
def test_share_of_the_polynomial(kernels, name, pairs):
    """Of a row's 64 pairs of exponentials; the rest and one factor a tile are the hardware's."""
    found = run(kernels, CASES[name])
    polynomials = executed(found.trace, SOFTMAX_WARPS, "add.rm.f32x2")
    hardware = executed(found.trace, SOFTMAX_WARPS, "ex2.approx")
    key_tiles = executed(found.trace, SOFTMAX_WARPS, "tcgen05.ld") // 4
    assert (polynomials, hardware) == (pairs * key_tiles, (129 - 2 * pairs) * key_tiles)


LOG2_E = math.log2(math.e)


MUTANTS = {
    "rescale never done": (
        "pair_growing",
        r"vote\.sync\.any\.pred\s+(%p\d+), %p\d+, -1;",
        r"setp.ne.s32 \1, 0, 0;",
    ),
    "coefficient of x^2 left out": (
        "causal",
        float32_literal(0.227564394),
        float32_literal(0.0),
    ),
    "rounded to nearest, not down": ("h64", r"add\.rm\.f32x2", "add.rn.f32x2"),
    "P not waited for": ("causal", r"tcgen05\.wait::st\.sync\.aligned;", ""),
    "no fence after waits": ("causal", r"tcgen05\.fence::after_thread_sync;", ""),
    "no fence before arrivals": ("pair", r"tcgen05\.fence::before_thread_sync;", ""),
    "O read without a commit": (
        "causal",
        r"(?s)(.*)tcgen05\.commit\S*\s+\[\S+\];",
        r"\1",
    ),
    "zeroed rows not published": ("pair_lengths", r"fence\.proxy\.async\.shared::cta;", ""),
    "warps arrive before their lanes": ("causal", r"bar\.warp\.sync\s+-1;", ""),
    "ids not compared": (
        "packed",
        r"(shfl\.sync\.idx\.b32\s+(%r\d+), %r\d+, \d+, 31, -1;\s+setp\.eq\.b32\s+%p\d+, \2), %r\d+",
        r"\1, \2",
    ),
    "sinks not read": (
        "unsorted",
        r"ld\.param\.b64(\s+%rd\d+), \[\S+_param_5\];",
        r"mov.b64\1, 0;",
    ),
    "sinks of base e": (
        "capped_segments",
        rf"(ld\.global\.b32\s+(%r\d+), .*\n\s+mul\.f32\s+%r\d+, \2), {float32_literal(LOG2_E)}",
        rf"\1, {float32_literal(1.0)}",
    ),
    "rows of a pack by head first": (
        "decoding",
        r"(and\.b32\s+(%r\d+), %r\d+, 127;\s+)div(\.s32\s+%r\d+, \2,)",
        r"\1rem\3",
    ),
    "argument of the tangent not limited": (
        "saturated",
        r"min\.NaN\.xorsign\.abs\.f32\s+(%r\d+), (%r\d+), .*;",
        r"mov.b32 \1, \2;",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(kernels, tmp_path, mutant):
    """What the kernel does not need would also pass this file's tests: here it must not."""
    name, pattern, replacement = MUTANTS[mutant]
    case = CASES[name]
    mutant_of(directory_of(kernels, case), tmp_path, case.kernel, pattern, replacement)
    with pytest.raises((AssertionError, EmulatorError)):
        check(case, run(tmp_path, case, instruction_limit=20_000_000))


HUGE = Case(PAIR, (1, 300, 400, 2, 2, 128, 128), gain=1e10)


def check_argmax(found: ForwardResults) -> None:
    """Among logits near 10**11 the largest takes all."""
    np.testing.assert_array_equal(found.out, attention(HUGE)[0][0].out.astype(found.out.dtype))
    assert np.isfinite(found.lse).all()


def test_huge_logits(kernels, tmp_path):
    """Their exponents are rounded by thousands; a mutant that lives with it has 2**1000."""
    check_argmax(run(kernels, HUGE))
    limits = float32_literal(2.0**24), float32_literal(math.inf)
    mutant_of(directory_of(kernels, HUGE), tmp_path, PAIR, *limits)
    with pytest.raises(AssertionError):
        check_argmax(run(tmp_path, HUGE))


def test_bounds_tell_what_to_skip_and_what_to_mask(kernels):
    case = CASES["packed"]
    exact = run(kernels, case)
    B, T, S = case.sizes[:3]
    everything, nothing = [0, S], [0, 0]
    loose = np.broadcast_to(np.array(everything + nothing, np.int32), (B, -(-T // 64), 4)).copy()
    careful = run(kernels, case, bounds=loose)
    assert careful.out.tobytes() == exact.out.tobytes()
    products = [executed(found.trace, [MMA_WARP], "tcgen05.mma") for found in (exact, careful)]
    # Key tiles of the query tiles: 1, 1, 2, 3, 2 against 1, 2, 3, 4, 5; two heads.
    assert products == [2 * 16 * tiles for tiles in (9, 15)]
    compared = [executed(found.trace, SOFTMAX_WARPS, "shfl") for found in (exact, careful)]
    assert 0 < compared[0] < compared[1]
    wrong = loose.copy()
    wrong[..., 2:] = everything
    with pytest.raises(AssertionError):
        check(case, run(kernels, case, bounds=wrong))


# ---- what the file's picture promises ------------------------------------------------------------


def roles_registers(name: str) -> tuple[int, int, int]:
    """Of softmax, correction and other threads."""
    if name.startswith("sm103"):
        return (184, 80, 64) if re.search("segments|capped", name) else (176, 64, 96)
    return (200, 64, 48) if "_h64_" in name else (192, 72, 56)


def check_resources(directory: pathlib.Path, manifest: str) -> None:
    """Registers per role, shared and tensor memory; no spills."""
    fields = dict(line.split(" ", 1) for line in manifest.splitlines())
    name = fields["kernel"]
    assert (fields["threads"], fields["registers"]) == ("512", "128")
    assert 215 * 1024 < int(fields["shared"]) <= 227 * 1024
    assert fields["cluster"] == ("2 1 1" if name.endswith("_pair") else "1 1 1")
    cubin = (directory / fields["architecture"] / f"{name}.cubin").read_bytes()
    assert artifacts.resources(cubin, fields["entry"]) == (128, 0)
    ptx = (directory / fields["architecture"] / f"{name}.ptx").read_text()
    registers = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)
    assert tuple(map(int, registers)) == roles_registers(name)
    # What the assembler needs to honour them.
    assert re.search(r"\.minnctapersm 1\b", ptx)
    (columns,) = re.findall(r"tcgen05\.alloc\.\S+\s+\[\S+\], (\S+);", ptx)
    assert re.search(rf"mov\.b32\s+{columns}, 512;|^512$", ptx if columns[0] == "%" else columns)


@pytest.mark.parametrize("name", NAMES)
def test_resources(kernels, name):
    blocks = (kernels / "manifest.txt").read_text().split("\n\n")
    check_resources(kernels, next(b for b in blocks if b.startswith(f"kernel {name}\n")))


@pytest.mark.usefixtures("built_library")
def test_resources_of_all_variants():
    directory = bundle.directory()
    blocks = (directory / "manifest.txt").read_text().split("\n\n")
    blocks = [b for b in blocks if re.match("kernel sm10[03]_forward", b)]
    if not blocks:
        pytest.skip("the bundle was built without the Blackwell kernels")
    # Two architectures, two types, three head dims, four masks and two of them with a soft cap.
    assert len(blocks) == 2 * 2 * 3 * (4 + 2)
    for block in blocks:
        check_resources(directory, block)


# ---- the user's road -----------------------------------------------------------------------------

SCRIPT = """
import jax, jax.numpy as jnp, fa4_jax

def print_difference(T, S, N, K, **masks):
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [jax.random.normal(key, (1, *shape, 128), jnp.bfloat16)
              for key, shape in zip(keys, ((T, N), (S, K), (S, K)))]
    attend = lambda *x, how: fa4_jax.dot_product_attention(*x, implementation=how, **masks)
    found = attend(*inputs, how="emulated")
    exact = attend(*(x.astype(jnp.float32) for x in inputs), how="xla")
    print(float(jnp.abs(found - exact).max()))

ids = jnp.arange(200)[None] // 70
print_difference(150, 200, 2, 2, is_causal=True)
print_difference(200, 200, 2, 1, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids)
print_difference(2, 200, 8, 1, is_causal=True, query_offset=198, sinks=jnp.arange(8.0))
"""


@pytest.mark.usefixtures("built_library")
def test_through_jax():
    """The typed custom call chooses, fills and runs Blackwell kernels of the built bundle."""
    manifest = bundle.directory() / "manifest.txt"
    if "architecture sm_100a" not in manifest.read_text():
        pytest.skip("the bundle was built before the Blackwell kernels")
    environment = {
        **os.environ,
        "FA4_JAX_EMULATED_ARCH": "sm_100a",
        "FA4_JAX_EMULATED_SMS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    differences = [float(line) for line in process.stdout.split()]
    assert len(differences) == 3 and max(differences) < 0.02
