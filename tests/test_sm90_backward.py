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
    SEGMENT_IDS,
    Case,
    attention,
    blank,
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
    arrays = {name: blank(case, name, x, np.nan) for name, x in inputs(case).items()}
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

H128, H64 = "bf16_h128_segments", "f16_h64_segments"
CAPPED = ("f16_h64_window_capped", "bf16_h128_window_capped", "f16_h128_segments_capped")
NAMES = (H128, H64, *CAPPED)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> pathlib.Path:
    """This file's kernels, from the build's own cache where they have not changed."""
    parts = [f"{part}_{d}_{h}" for part in ("preprocess", "postprocess")
             for d in DTYPES for h in ("h64", "h128")]  # fmt: skip
    names = {f"sm90_backward_{name}" for name in (*NAMES, *parts)}
    variants = [variant for variant in build.find_variants() if variant.name in names]
    assert len(variants) == len(names)
    output = tmp_path_factory.mktemp("sm90") / "bundle"
    build.build(variants, output, jobs=1, cache=build.default_cache())
    return output / "sm_90a"


CASES = {
    # Borders inside tiles, at tile borders, and segments shorter than a tile.
    "packed": Case(H128, (1, 513, 513, 2, 1, 128, 128), ids([packed(100, 156, 1, 200, 56)])),
    "packed_tiles": Case(
        H64, (1, 250, 513, 1, 1, 64, 64), ids([packed(192, 58)], [packed(128, 385)])
    ),
    "packed_short": Case(H64, (1, 129, 129, 1, 1, 64, 64), ids([packed(*[10] * 12, 9)])),
    "packed_causal": Case(
        H128, (2, 250, 250, 4, 2, 128, 128), ids([packed(90, 160), packed(250)], is_causal=True)
    ),
    "packed_padded": Case(  # ids of padding are nobody's on the other side
        H64,
        (1, 250, 250, 1, 1, 64, 40),
        ids([[*packed(60, 70), *[-1] * 120]], [[*packed(60, 70), *[-2] * 120]]),
    ),
    "one_segment": Case(H128, (1, 129, 250, 1, 1, 128, 128), ids([[7] * 129], [[7] * 250])),
    "strangers": Case(H64, (1, 64, 127, 1, 1, 64, 56), ids([[1] * 64], [[2] * 127])),
    "strangers_sinks": Case(
        H128, (1, 127, 64, 2, 1, 88, 96), ids([[3] + [1] * 126], [[2] * 63 + [3]]), sinks=(0.0, 9.0)
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
        H64,
        (3, 250, 300, 4, 2, 48, 64),
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
        "f16_h128_segments_capped",
        (1, 513, 513, 1, 1, 64, 64),
        ids([packed(112, 1, 111, 289)], is_causal=True),
        cap=50.0,
        gain=20.0,
    ),
    "cap_1": Case("f16_h64_window_capped", (1, 250, 250, 2, 1, 64, 64), cap=1.0, gain=3.0),
    "cap_20": Case(
        "bf16_h128_window_capped",
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
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(kernels, name):
    check(CASES[name], run(kernels, CASES[name]))


def random_case(seed: int) -> Case:
    """One of this file's kernels with any sizes and masks that it takes."""
    random = np.random.default_rng(seed)
    kernel = NAMES[seed % len(NAMES)]
    head_dim = int(kernel.split("_")[1][1:])
    T, S = random.choice([1, 63, 64, 127, 128, 129, 250, 513], 2).tolist()
    B, K, group = random.integers(1, 3, 3).tolist()
    masks: dict = {}
    if random.random() < 0.7:
        masks["local_window_size"] = tuple(random.integers(0, 300, 2).tolist())
    if random.random() < 0.5:
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


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(kernels, seed):
    check(random_case(seed), run(kernels, random_case(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, 306, 50))
def test_many_random_calls(kernels, first):
    for seed in range(first, first + 50):
        try:
            check(random_case(seed), run(kernels, random_case(seed)))
        except (AssertionError, EmulatorError) as error:
            raise AssertionError(f"seed {seed}: {random_case(seed)}") from error


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


@pytest.mark.parametrize("name", SCHEDULED)
def test_every_schedule_gives_the_same(kernels, name):
    once = run(kernels, CASES[name])
    for seed in (1, 2):
        again = run(kernels, CASES[name], seed=seed)
        for argument, x in once.gradients.items():
            assert again.gradients[argument].tobytes() == x.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULED)
def test_fifty_schedules_give_the_same(kernels, name):
    once = run(kernels, CASES[name])
    for seed in range(3, 53):
        again = run(kernels, CASES[name], seed=seed)
        for argument, x in once.gradients.items():
            assert again.gradients[argument].tobytes() == x.tobytes()


# ---- work that segments save ---------------------------------------------------------------------

CONSUMER_WARP = 4  # the first one


def executed(found: Outcome, instruction: str) -> int:
    """How often a consumer warp executed instructions whose names start like this."""
    counts = found.trace["warps"][CONSUMER_WARP]
    return sum(n for name, n in counts.items() if name.startswith(instruction))


def products(found: Outcome) -> int:
    """Query tiles of head_dim 128 that the warp's products met.

    Of 32 wgmmas each: 8 for S, dP and dQ, 4 for dV and dK.
    """
    return executed(found, "wgmma.mma_async") // 32


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
        compared[name] = executed(found, "ld.global.nc") // 18
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
