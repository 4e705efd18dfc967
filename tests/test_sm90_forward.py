"""The Hopper forward's segments, soft cap and sinks on the emulator.

    kernels/sm90/forward.py ─build (cached)─► PTX ─► launch_kernel, one SM ─► out, lse
                                               │                               │
                                               └─ mutants: must fail           └─ accuracy rule

One SM makes every CTA take several tiles, so that all rings go round. The race check runs all
along. What calls without these features do is in test_emulator_sm90.py.
"""

import pathlib

import numpy as np
import oracle
import pytest
from emulator import EmulatorError
from kernel_problems import (
    H64,
    H128,
    HOPPER_CASES,
    SEGMENT_IDS,
    Case,
    ForwardResults,
    attention,
    build_kernels,
    check_forward,
    executed,
    float32_literal,
    forward_operands,
    ids,
    inputs,
    launch_forward,
    mutant_of,
    packed,
    random_case,
    symbols,
)

pytestmark = [pytest.mark.dsl, pytest.mark.emulator]


def run(
    directory: pathlib.Path,
    case: Case,
    bounds: np.ndarray | None = None,
    query: np.ndarray | None = None,
    **options,
) -> ForwardResults:
    """Launches the case's kernel of a bundle's directory, with NaN in all padding.

    ``bounds`` and ``query`` take the place of `oracle.segment_bounds`'s and the case's own.
    """
    operands = forward_operands(case, bounds)
    if query is not None:
        operands["query"] = query
    name = f"sm90_forward_{case.kernel}"
    options = {"num_sms": 1, **options}
    return launch_forward(directory, name, operands, symbols(case), **options)


def check(case: Case, found: ForwardResults) -> None:
    """The accuracy rule; lse within the tanh's error."""
    check_forward(case, found, rtol=2e-6, atol=4e-6 + 1.5e-6 * (case.cap or 0))


# ---- values --------------------------------------------------------------------------------------

SEGMENTS = (H128, H64, "f16_h96_segments")
CAPPED_SEGMENTS = ("bf16_h64_segments_capped", "f16_h128_segments_capped")
CAPPED = ("bf16_h96_window_capped", "f16_h64_window_capped", "bf16_h128_window_capped")
PLAIN = ("bf16_h128_causal", "f16_h64_full")
NAMES = (*SEGMENTS, *CAPPED_SEGMENTS, *CAPPED, *PLAIN)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> pathlib.Path:
    """The directory of this file's kernels."""
    names = [f"sm90_forward_{name}" for name in NAMES]
    return build_kernels(names, tmp_path_factory.mktemp("sm90")) / "sm_90a"


CASES = HOPPER_CASES | {
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


@pytest.mark.parametrize("seed", range(10))
def test_random_calls(kernels, seed):
    case = random_case(NAMES, seed, most=3)
    check(case, run(kernels, case))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 310, 50))
def test_many_random_calls(kernels, first):
    for seed in range(first, first + 50):
        case = random_case(NAMES, seed, most=3)
        try:
            check(case, run(kernels, case))
        except (AssertionError, EmulatorError) as error:
            raise AssertionError(f"seed {seed}: {case}") from error


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


# ---- who does what -------------------------------------------------------------------------------

UNEVEN = {
    "half the rows are padding": Case(
        "f16_h64_full", (1, 384, 128, 4, 4, 64, 64), {"query_seq_lengths": [192]}
    ),
    "half the rows see twice the keys": Case(
        H64, (1, 384, 384, 4, 4, 64, 64), ids([packed(192, 192)], [packed(128, 256)])
    ),
    "causal": Case("bf16_h128_causal", (1, 512, 512, 1, 1, 128, 128), {"is_causal": True}),
    "causal, known at run time alone": Case(
        "f16_h64_window_capped", (1, 768, 768, 1, 1, 64, 64), {"is_causal": True}, cap=5.0
    ),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_ctas_have_equal_work(kernels, name):
    """Of two CTAs, where the row tiles of a head do not, and there are as many or twice as many."""
    found = run(kernels, UNEVEN[name], num_sms=2)
    check(UNEVEN[name], found)
    assert found.trace["ctas"] == 2
    assert found.trace["mma_flop_of_busiest_cta"] == found.trace["mma_flop"] / 2


# ---- work that segments save ---------------------------------------------------------------------

CONSUMER = [4]  # the first warp of them


def products(found: ForwardResults) -> int:
    """Key tiles of head_dim 128 that the warp's products met: 8 wgmmas for scores, 8 for out."""
    return executed(found.trace, CONSUMER, "wgmma.mma_async") // 16


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
        # Of 32 keys and two rows.
        compared[name] = executed(found.trace, CONSUMER, "ld.global.nc") // 34
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
