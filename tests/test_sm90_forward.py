"""The Hopper forward's segments, soft cap and sinks on the emulator.

    kernels/sm90/forward.py ─build (cached)─► PTX ─► launch_kernel, one SM ─► out, lse
                                               │                               │
                                               └─ mutants: must fail           └─ accuracy rule

One SM makes every CTA take several tiles, so that all rings go round. The race check runs all
along. What calls without these features do is in test_emulator_sm90.py.
"""

import dataclasses
import json
import pathlib

import numpy as np
import oracle
import pytest
from emulator import EmulatorError, launch_kernel
from kernel_problems import (
    SEGMENT_IDS,
    Case,
    attention,
    blank,
    float32_literal,
    ids,
    inputs,
    integers,
    mutant_of,
    packed,
    shuffled,
    symbols,
)

from kernels import build

pytestmark = [pytest.mark.dsl, pytest.mark.emulator]


@dataclasses.dataclass
class Outcome:
    out: np.ndarray
    lse: np.ndarray
    trace: dict


def run(
    directory: pathlib.Path,
    case: Case,
    bounds: np.ndarray | None = None,
    query: np.ndarray | None = None,
    **options,
) -> Outcome:
    """Launches the case's kernel of a bundle's directory, with NaN in all padding.

    ``bounds`` and ``query`` take the place of `oracle.segment_bounds`'s and the case's own.
    """
    B, T, _, N, _, H, Hv = case.sizes
    arrays = {name: blank(case, name, x, np.nan) for name, x in inputs(case).items()}
    if query is not None:
        arrays["query"] = query
    operands: dict[str, np.ndarray | None] = {
        **{name: arrays[name] for name in ("query", "key", "value")},
        **integers(case),
        "out": np.full((B, T, N, Hv), np.nan, case.dtype),
        "lse": np.full((B, T, N), np.nan, np.float32),
        "scale": np.array(case.scale or [H**-0.5] * B, np.float32),
        "sinks": None,
        "segment_bounds": None,
    }
    if case.sinks is not None:
        operands["sinks"] = np.broadcast_to(np.array(case.sinks, np.float32), (B, N)).copy()
    if operands[SEGMENT_IDS[0]] is not None:
        tight = oracle.segment_bounds(*(operands[name] for name in SEGMENT_IDS))
        operands["segment_bounds"] = tight if bounds is None else bounds
    result = launch_kernel(
        directory,
        f"sm90_forward_{case.kernel}",
        operands,
        symbols(case),
        num_sms=1,
        **{"races": True, "trace": True, "threads": 1, **options},
    )
    trace = json.loads(result.trace) if result.trace else {}
    return Outcome(operands["out"], operands["lse"], trace)


def check(case: Case, found: Outcome) -> None:
    """The accuracy rule; exact zeros where nothing is seen; lse within the tanh's error."""
    exact, rounded = attention(case)
    outs = [np.concatenate([a.out for a in each]) for each in (exact, rounded)]
    oracle.assert_accurate("out", found.out, *outs)
    lse = np.concatenate([a.lse for a in exact])
    np.testing.assert_array_equal(found.out[lse == -np.inf], 0)
    tolerance = 4e-6 + 1.5e-6 * (case.cap or 0)
    np.testing.assert_allclose(found.lse, lse, rtol=2e-6, atol=tolerance)


# ---- values --------------------------------------------------------------------------------------

H128, H64, H96 = "bf16_h128_segments", "f16_h64_segments", "f16_h96_segments"
CAPPED_SEGMENTS = ("bf16_h64_segments_capped", "f16_h128_segments_capped")
CAPPED = ("bf16_h96_window_capped", "f16_h64_window_capped", "bf16_h128_window_capped")
PLAIN = ("bf16_h128_causal", "f16_h64_full")
NAMES = (H128, H64, H96, *CAPPED_SEGMENTS, *CAPPED, *PLAIN)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> pathlib.Path:
    """This file's kernels, from the build's own cache where they have not changed."""
    names = {f"sm90_forward_{name}" for name in NAMES}
    variants = [variant for variant in build.find_variants() if variant.name in names]
    assert len(variants) == len(NAMES)
    output = tmp_path_factory.mktemp("sm90") / "bundle"
    build.build(variants, output, jobs=1, cache=build.default_cache())
    return output / "sm_90a"


CASES = {
    # Borders inside tiles, at tile borders, and segments shorter than a tile.
    "packed": Case(H128, (1, 513, 513, 2, 1, 128, 128), ids([packed(100, 156, 1, 200, 56)])),
    "packed_tiles": Case(
        H64, (1, 250, 513, 1, 1, 64, 64), ids([packed(192, 58)], [packed(128, 385)])
    ),
    "packed_short": Case(H96, (1, 129, 129, 1, 1, 96, 96), ids([packed(*[10] * 12, 9)])),
    "packed_causal": Case(
        H128, (2, 250, 250, 4, 2, 128, 128), ids([packed(90, 160), packed(250)], is_causal=True)
    ),
    "packed_padded": Case(  # ids of padding are nobody's on the other side
        H64,
        (1, 250, 250, 1, 1, 64, 40),
        ids([[*packed(60, 70), *[-1] * 120]], [[*packed(60, 70), *[-2] * 120]]),
    ),
    "one_segment": Case(H128, (1, 129, 250, 1, 1, 128, 128), ids([[7] * 129], [[7] * 250])),
    "strangers": Case(H96, (1, 64, 127, 1, 1, 88, 96), ids([[1] * 64], [[2] * 127])),
    "strangers_sinks": Case(
        H64, (1, 127, 64, 2, 1, 64, 64), ids([[3] + [1] * 126], [[2] * 63 + [3]]), sinks=(0.0, 99.0)
    ),
    "one_of_each": Case(H128, (1, 1, 1, 1, 1, 8, 8), ids([[2**31 - 1]])),
    "lowest_ids": Case(
        H64, (1, 63, 64, 1, 1, 64, 64), ids([[-(2**31)] * 63], [[0, -(2**31)] * 32])
    ),
    "unsorted": Case(
        H128,
        (2, 250, 513, 2, 1, 128, 72),
        ids(
            [shuffled(250, 3, 0), shuffled(250, 40, 1)], [shuffled(513, 3, 2), shuffled(513, 40, 3)]
        ),
    ),
    "descending": Case(
        H64, (1, 513, 250, 1, 1, 64, 64), ids([packed(300, 213)[::-1]], [packed(129, 121)[::-1]])
    ),
    "everything": Case(
        H96,
        (3, 250, 300, 4, 2, 96, 80),
        ids(
            [packed(100, 150), shuffled(250, 2, 4), packed(250)],
            [packed(120, 180), shuffled(300, 2, 5), packed(10, 290)],
            local_window_size=(70, 40),
            query_offset=[30, -20, 60],
            query_seq_lengths=[250, 199, 64],
            key_value_seq_lengths=[260, 300, 129],
        ),
        scale=(0.2, -0.1, 0.1),
        sinks=(1.0, -3.0, 5.0, 0.0),
    ),
    "everything_capped": Case(
        "f16_h128_segments_capped",
        (2, 250, 300, 4, 2, 128, 128),
        ids(
            [packed(100, 150), shuffled(250, 2, 4)],
            [packed(120, 180), shuffled(300, 2, 5)],
            is_causal=True,
            query_offset=[70, 40],
            key_value_seq_lengths=[260, 300],
        ),
        scale=(0.5, -0.3),
        cap=20.0,
        sinks=(1.0, -3.0, 15.0, 0.0),
    ),
    "packed_capped": Case(
        "bf16_h64_segments_capped",
        (1, 513, 513, 1, 1, 64, 64),
        ids([packed(112, 1, 111, 289)], is_causal=True),
        cap=50.0,
        gain=20.0,
    ),
    "cap_1": Case("f16_h64_window_capped", (1, 250, 250, 2, 1, 64, 64), cap=1.0, gain=3.0),
    "cap_20": Case(
        "bf16_h96_window_capped",
        (1, 250, 129, 1, 1, 96, 96),
        dict(is_causal=True),
        cap=20.0,
        gain=9.0,
    ),
    "cap_50": Case(
        "f16_h64_window_capped",
        (1, 63, 513, 1, 1, 64, 64),
        dict(local_window_size=(5, 300)),
        cap=50.0,
        gain=30.0,
    ),
    "cap_1e4": Case("f16_h64_window_capped", (1, 128, 250, 1, 1, 64, 64), cap=1e4),
    "cap_1e4_reached": Case(
        "bf16_h128_window_capped", (1, 127, 128, 1, 1, 128, 128), cap=1e4, gain=3e3
    ),
    "cap_below_scores": Case(
        "bf16_h128_window_capped", (1, 64, 250, 1, 1, 128, 128), cap=1e-3, gain=1e3
    ),
    "cap_scales": Case(
        "f16_h64_window_capped",
        (3, 129, 200, 1, 1, 64, 64),
        dict(query_seq_lengths=[129, 0, 64], key_value_seq_lengths=[200, 130, 1]),
        scale=(-1.0, 0.3, 0.0),
        cap=5.0,
        sinks=(2.0,),
    ),
    "sinks": Case(
        "bf16_h128_causal",
        (2, 250, 250, 4, 1, 128, 128),
        dict(is_causal=True, query_offset=[0, -30]),
        sinks=(0.5, -1.0, 4.0, -np.inf),
    ),
    "sinks_large": Case(
        "f16_h64_full", (1, 250, 129, 6, 2, 64, 64), sinks=(1e4, -1e4, 1e38, -3e38, 30.0, 88.7)
    ),
    "sinks_among_large_logits": Case(
        "bf16_h128_causal",
        (1, 129, 129, 2, 1, 128, 128),
        dict(is_causal=True),
        sinks=(3e5, -3e5),
        gain=1e5,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_right(kernels, name):
    check(CASES[name], run(kernels, CASES[name]))


def random_case(seed: int) -> Case:
    """One of this file's kernels with any sizes and masks that it takes."""
    random = np.random.default_rng(seed)
    kernel = NAMES[seed % len(NAMES)]
    head_dim = int(kernel.split("_")[1][1:])
    T, S = random.choice([1, 63, 64, 127, 128, 129, 250, 513], 2).tolist()
    B, K, group = random.integers(1, 4, 3).tolist()
    masks: dict = {}
    if "causal" in kernel:
        masks["is_causal"] = True
    elif "full" not in kernel and random.random() < 0.7:
        masks["local_window_size"] = tuple(random.integers(0, 300, 2).tolist())
    if "full" not in kernel and random.random() < 0.5:
        masks["query_offset"] = random.integers(-T, S + 1, B).tolist()
    for name, size in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if random.random() < 0.3:
            masks[name] = random.integers(0, size + 1, B).tolist()
    if "segments" in kernel:
        count = random.choice([1, 2, 5, 50])
        drawn = [[random.integers(0, count, n) for _ in range(B)] for n in (T, S)]
        if random.random() < 0.6:
            drawn = [[np.sort(x) for x in side] for side in drawn]
        masks |= ids(*([x.tolist() for x in side] for side in drawn))
    return Case(
        kernel,
        (B, T, S, group * K, K, head_dim, head_dim - 8 * int(random.integers(3))),
        masks,
        scale=tuple((random.choice([-1, 1], B) * random.choice([0.1, 0.3], B)).tolist()),
        cap=float(random.choice([1, 5, 30])) if "capped" in kernel else None,
        sinks=tuple(random.normal(0, 3, group * K).tolist()) if random.random() < 0.5 else None,
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_calls(kernels, seed):
    check(random_case(seed), run(kernels, random_case(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 310, 50))
def test_many_random_calls(kernels, first):
    for seed in range(first, first + 50):
        try:
            check(random_case(seed), run(kernels, random_case(seed)))
        except (AssertionError, EmulatorError) as error:
            raise AssertionError(f"seed {seed}: {random_case(seed)}") from error


@pytest.mark.parametrize("name", ["packed_causal", "everything", "everything_capped", "cap_20"])
def test_every_schedule_gives_the_same(kernels, name):
    once = run(kernels, CASES[name])
    for seed in range(1, 4):
        again = run(kernels, CASES[name], seed=seed)
        assert again.out.tobytes() == once.out.tobytes()
        assert again.lse.tobytes() == once.lse.tobytes()


def test_visible_nan_stays_visible(kernels):
    """A cap must not turn the NaN of a query into a number, nor carry it to others."""
    case = CASES["cap_20"]
    clean = run(kernels, case)
    poisoned = inputs(case)["query"]
    poisoned[0, 7] = np.nan
    found = run(kernels, case, query=poisoned)
    assert np.isnan(found.out[0, 7].astype(np.float32)).all()
    others = np.delete(np.arange(case.sizes[1]), 7)
    assert found.out[0, others].tobytes() == clean.out[0, others].tobytes()


# ---- work that segments save ---------------------------------------------------------------------

CONSUMER_WARP = 4  # the first one


def executed(found: Outcome, instruction: str) -> int:
    """How often a consumer warp executed instructions whose names start like this."""
    counts = found.trace["warps"][CONSUMER_WARP]
    return sum(n for name, n in counts.items() if name.startswith(instruction))


def products(found: Outcome) -> int:
    """Key tiles of head_dim 128 that the warp's products met: 8 wgmmas for scores, 8 for out."""
    return executed(found, "wgmma.mma_async") // 16


def test_tiles_of_other_segments_are_skipped(kernels):
    """Four segments of one tile each: the row tiles meet one key tile each instead of four."""
    sizes = (1, 512, 512, 1, 1, 128, 128)
    packed_case = Case(H128, sizes, ids([packed(*[128] * 4)]))
    found = run(kernels, packed_case)
    check(packed_case, found)
    assert products(found) == 4
    assert products(run(kernels, Case(H128, sizes, ids([[0] * 512])))) == 16


def test_clear_tiles_compare_no_ids(kernels):
    """Only a row tile's last key tile is compared (it may be partial), and unclear ones."""
    sizes = (1, 128, 512, 1, 1, 128, 128)
    compared = {}
    for name, keys in (("clear", [0] * 512), ("unclear", [0] * 100 + [1] + [0] * 411)):
        found = run(kernels, Case(H128, sizes, ids([[0] * 128], [keys])))
        compared[name] = executed(found, "ld.global.nc") // 34  # 32 keys' ids and two rows'
    assert compared == {"clear": 1, "unclear": 2}


def test_bounds_are_obeyed(kernels):
    """Bounds that say less cost work and change nothing; wrong ones give wrong results."""
    case = CASES["packed"]
    once = run(kernels, case)
    tight = oracle.segment_bounds(*(case.masks[name] for name in SEGMENT_IDS))
    S = case.sizes[2]
    loose = np.broadcast_to(np.array([0, S, 0, 0], np.int32), tight.shape).copy()
    more = run(kernels, case, bounds=loose)
    # A row that skips a tile and one that finds nothing in it do the same to their sums.
    assert more.out.tobytes() == once.out.tobytes()
    assert products(more) > products(once)
    for column, number in ((0, 128), (3, S)):
        wrong = tight.copy()
        wrong[..., 2] = 0
        wrong[..., column] = number
        with pytest.raises(AssertionError):
            check(case, run(kernels, case, bounds=wrong))


# ---- mutants -------------------------------------------------------------------------------------


MUTANTS = {
    "no ids read": ("packed", r"@inside ld\.global\.nc\.s32 [^;]*;", ""),
    "most column ids not read": ("unsorted", r"(\S+ inside, \S+ )(\d{2,});", r"\1 1000;"),
    "output without the sink's factor": (
        "sinks_large",
        r"(rcp\.approx\.ftz\.f32\s+(%r\d+), %r\d+;\s+)mul\.f32\s+(%r\d+), \2, %r\d+;",
        r"\1mov.b32 \3, \2;",
    ),
    "a sink that is always the larger": (
        "sinks",
        r"(setp\.)lt(\.f32\s+%p\d+, %r\d+, 0f00000000;\s+selp\.f32)",
        r"\1neu\2",
    ),
    "tanh without its limit": (
        "cap_1",
        r"min\.NaN\.xorsign\.abs\.f32\s+(%r\d+), (%r\d+), \S+;",
        r"mov.b32 \1, \2;",
    ),
    "a coefficient of tanh left out": (
        "cap_50",
        float32_literal(5234.4136),
        float32_literal(0.0),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(kernels, tmp_path, mutant):
    """What the kernel does not need would also pass this file's tests: here it must not."""
    name, pattern, replacement = MUTANTS[mutant]
    case = CASES[name]
    kernel = f"sm90_forward_{case.kernel}"
    directory = mutant_of(kernels, tmp_path, kernel, pattern, replacement)
    with pytest.raises((AssertionError, EmulatorError)):
        check(case, run(directory, case, instruction_limit=20_000_000))


HUGE = Case("bf16_h128_causal", (1, 250, 250, 2, 1, 128, 128), dict(is_causal=True), gain=1e10)


def test_huge_logits(kernels):
    """Among logits near 10**11 the largest takes all.

    No mutant: the assembler fuses the product and the difference whose rounding matters here, the
    emulator does not. The Blackwell kernels fuse them in PTX.
    """
    found = run(kernels, HUGE)
    np.testing.assert_array_equal(found.out, attention(HUGE)[0][0].out.astype(found.out.dtype))
    assert np.isfinite(found.lse).all()
