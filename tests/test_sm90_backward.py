"""The Hopper backward's segments, soft cap and sinks on the emulator.

    kernels/sm90/backward*.py ─build (cached)─► PTX ─► three launches ─► dq, dk, dv
                                                  │                        │
                                                  └─ mutants: must fail    └─ accuracy rule

``out`` and ``lse`` come from `oracle`, sinks included: the backward takes them as given. The race
check runs all along. What calls without these features do is in test_emulator_sm90.py.
"""

import dataclasses
import json
import pathlib

import numpy as np
import oracle
import pytest
from emulator import EmulatorError, launch_kernel
from kernel_problems import (
    DTYPES,
    H64,
    H128,
    HOPPER_CASES,
    SEGMENT_IDS,
    Case,
    attention,
    build_kernels,
    executed,
    ids,
    inputs,
    integers,
    mutant_of,
    packed,
    random_case,
    symbols,
)

pytestmark = [pytest.mark.dsl, pytest.mark.emulator]


@dataclasses.dataclass
class Outcome:
    """Gradients by argument name, and what the main kernel's warps executed."""

    gradients: dict[str, np.ndarray]
    trace: dict


def run(
    directory: pathlib.Path,
    case: Case,
    main: pathlib.Path | None = None,
    bounds: np.ndarray | None = None,
    **options,
) -> Outcome:
    """Launches the three kernels, with NaN in all padding.

    Args:
      directory: holds the kernels' PTX.
      main: holds another main kernel under the same name.
      bounds: in place of `oracle.segment_bounds`'s.
      options: of the main kernel's launch.
    """
    B, T, _, N, _, H, Hv = case.sizes
    arrays = inputs(case, np.nan)
    exact, _ = attention(case)
    Tp, Hp = -(-T // 128) * 128, -(-H // 64) * 64
    operands: dict[str, np.ndarray | None] = {
        **arrays,
        **integers(case),
        "out": np.concatenate([each.out for each in exact]).astype(case.dtype, order="C"),
        "lse": np.concatenate([each.lse for each in exact]).astype(np.float32, order="C"),
        "scale": np.array(case.scale or [H**-0.5] * B, np.float32),
        "segment_bounds": None,
        **{name: np.full((B, N, Tp), np.nan, np.float32) for name in ("lse_log2", "delta")},
        "dq_accumulator": np.full((B, N, Tp, Hp), np.nan, np.float32),
        **{f"d{name[0]}": np.full_like(arrays[name], np.nan) for name in ("query", "key", "value")},
    }
    if operands[SEGMENT_IDS[0]] is not None:  # rows are keys here
        queries, keys = (operands[name] for name in SEGMENT_IDS)
        tight = oracle.segment_bounds(keys, queries)
        operands["segment_bounds"] = tight if bounds is None else bounds
    numbers = symbols(case) | {"Tp": Tp, "Hp": Hp}
    dtype, head_dim = case.kernel.split("_")[:2]

    def launch(where: pathlib.Path, name: str, **more):
        more = {"races": True, "threads": 1, **more}
        return launch_kernel(where, f"sm90_backward_{name}", operands, numbers, **more)

    launch(directory, f"preprocess_{dtype}_{head_dim}")
    result = launch(main or directory, case.kernel, **{"trace": True, **options})
    launch(directory, f"postprocess_{dtype}_h{64 if max(H, Hv) <= 64 else 128}")
    gradients = {name: operands[f"d{name[0]}"] for name in ("query", "key", "value")}
    return Outcome(gradients, json.loads(result.trace) if result.trace else {})


def check(case: Case, found: Outcome) -> None:
    """The accuracy rule for each gradient; exact zeros where nothing is seen."""
    arrays = inputs(case)
    expected = []
    for each in attention(case):
        parts = []
        for b, one in enumerate(each):
            dlse = np.where(one.lse == -np.inf, 0, arrays["dlse"][b : b + 1])
            parts.append(one.gradients(arrays["dout"][b : b + 1], dlse))
        expected.append({n: np.concatenate([part[n] for part in parts]) for n in found.gradients})
    for name, x in found.gradients.items():
        oracle.assert_accurate(f"d{name}", x, *(each[name] for each in expected))
    hidden = np.concatenate([one.lse for one in attention(case)[0]]) == -np.inf
    np.testing.assert_array_equal(found.gradients["query"][hidden], 0)


# ---- values --------------------------------------------------------------------------------------

CAPPED = ("f16_h64_window_capped", "bf16_h128_window_capped", "f16_h128_segments_capped")
NAMES = (H128, H64, *CAPPED)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> pathlib.Path:
    """The directory of this file's kernels, and of those that run before and after them."""
    parts = [f"{part}_{d}_{h}" for part in ("preprocess", "postprocess")
             for d in DTYPES for h in ("h64", "h128")]  # fmt: skip
    names = [f"sm90_backward_{name}" for name in (*NAMES, *parts)]
    return build_kernels(names, tmp_path_factory.mktemp("sm90")) / "sm_90a"


CASES = HOPPER_CASES | {
    name: dataclasses.replace(
        HOPPER_CASES[name], kernel=kernel, sizes=(*HOPPER_CASES[name].sizes[:5], *head_dims)
    )
    for name, kernel, *head_dims in (
        ("packed_short", H64, 64, 64),
        ("strangers", H64, 64, 56),
        ("strangers_sinks", H128, 88, 96),
        ("everything", H64, 48, 64),
        ("packed_capped", "f16_h128_segments_capped", 64, 64),
        ("cap_20", "bf16_h128_window_capped", 96, 96),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(kernels, name):
    check(CASES[name], run(kernels, CASES[name]))


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(kernels, seed):
    case = random_case(NAMES, seed, most=2)
    check(case, run(kernels, case))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, 306, 50))
def test_many_random_calls(kernels, first):
    for seed in range(first, first + 50):
        case = random_case(NAMES, seed, most=2)
        try:
            check(case, run(kernels, case))
        except (AssertionError, EmulatorError) as error:
            raise AssertionError(f"seed {seed}: {case}") from error


def test_hidden_pairs_may_overflow(kernels, tmp_path):
    """dP of queries and keys of different segments may be infinite, unless a mutant keeps it."""
    small, large = (
        Case(
            H128, (1, 250, 129, 1, 1, 128, 128), ids([packed(100, 150)], [packed(70, 59)]),
            stranger=stranger,
        )
        for stranger in (1.0, 1e38)
    )  # fmt: skip
    once = run(kernels, small)
    check(small, once)

    def differs(**where) -> bool:
        found = run(kernels, large, **where).gradients
        return any(found[name].tobytes() != x.tobytes() for name, x in once.gradients.items())

    assert not differs()
    select = r"(setp\.)eq(\.f32\s+%p\d+, %r\d+, )0f00000000"
    assert differs(
        main=mutant_of(kernels, tmp_path, f"sm90_backward_{H128}", select, r"\1lt\g<2>0fFF800000")
    )


SCHEDULED = ("packed_causal", "everything", "everything_capped", "cap_20")


def same_with_every_schedule(kernels, name: str, seeds: range) -> None:
    once = run(kernels, CASES[name])
    for seed in seeds:
        again = run(kernels, CASES[name], seed=seed)
        for argument, x in once.gradients.items():
            assert again.gradients[argument].tobytes() == x.tobytes()


@pytest.mark.parametrize("name", SCHEDULED)
def test_every_schedule_gives_the_same(kernels, name):
    same_with_every_schedule(kernels, name, range(1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULED)
def test_fifty_schedules_give_the_same(kernels, name):
    same_with_every_schedule(kernels, name, range(3, 53))


# ---- work that segments save ---------------------------------------------------------------------

CONSUMER = [4]  # the first warp of them


def products(found: Outcome) -> int:
    """Query tiles of head_dim 128 that the warp's products met.

    Of 32 wgmmas each: 8 for S, dP and dQ, 4 for dV and dK.
    """
    return executed(found.trace, CONSUMER, "wgmma.mma_async") // 32


def test_tiles_of_other_segments_are_skipped(kernels):
    """Four segments of one key tile each, which meets its own two query tiles, not all eight."""
    sizes = (1, 512, 512, 1, 1, 128, 128)
    packed_case = Case(H128, sizes, ids([packed(*[128] * 4)]))
    found = run(kernels, packed_case)
    check(packed_case, found)
    assert products(found) == 4 * 2
    assert products(run(kernels, Case(H128, sizes, ids([[0] * 512])))) == 4 * 8


def test_clear_tiles_compare_no_ids(kernels):
    """Only tiles that share their segment in part read ids: those of 32 queries and two keys."""
    sizes = (1, 512, 128, 1, 1, 128, 128)
    compared = {}
    for name, queries in (("clear", [0] * 512), ("unclear", [0] * 100 + [1] + [0] * 411)):
        found = run(kernels, Case(H128, sizes, ids([queries], [[0] * 128])))
        compared[name] = executed(found.trace, CONSUMER, "ld.global.nc") // 18
    assert compared == {"clear": 0, "unclear": 2}


def test_bounds_are_obeyed(kernels):
    """Bounds that say less cost work and change nothing; wrong ones give wrong results."""
    case = CASES["packed"]
    once = run(kernels, case)
    queries, keys = (case.masks[name] for name in SEGMENT_IDS)
    tight = oracle.segment_bounds(keys, queries)
    T = case.sizes[1]
    loose = np.broadcast_to(np.array([0, T, 0, 0], np.int32), tight.shape).copy()
    more = run(kernels, case, bounds=loose)
    for argument, x in once.gradients.items():
        np.testing.assert_array_equal(more.gradients[argument], x)
    assert products(more) > products(once)
    for column, number in ((0, 128), (3, T)):
        wrong = tight.copy()
        wrong[..., 2] = 0
        wrong[..., column] = number
        with pytest.raises(AssertionError):
            check(case, run(kernels, case, bounds=wrong))


# ---- mutants -------------------------------------------------------------------------------------

MUTANTS = {
    "no ids read": ("packed", r"@inside ld\.global\.nc\.s32 [^;]*;", ""),
    "most query ids not read": ("unsorted", r"(\S+ inside, \S+ )(\d{2,});", r"\1 1000;"),
    "without 1 - t^2": (
        "cap_1",
        r"max\.f32\s+(%r\d+), %r\d+, 0f00000000;",
        r"mov.b32 \1, 0f3F800000;",
    ),
    "1 - t instead of 1 - t^2": (
        "cap_50",
        r"mul\.f32\s+(%r\d+), (%r\d+), \2;(\s+(?:mov\.b32[^;]*;\s+)?sub\.f32[^;]*;\s+max\.f32)",
        r"mov.b32 \1, \2;\3",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(kernels, tmp_path, mutant):
    """What the kernel does not need would also pass this file's tests: here it must not."""
    name, pattern, replacement = MUTANTS[mutant]
    case = CASES[name]
    kernel = f"sm90_backward_{case.kernel}"
    directory = mutant_of(kernels, tmp_path, kernel, pattern, replacement)
    with pytest.raises((AssertionError, EmulatorError)):
        check(case, run(kernels, case, main=directory, instruction_limit=20_000_000))
