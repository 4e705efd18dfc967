"""The Blackwell forward on the emulator: values, schedules, and what its special parts are for.

    kernels/sm100/forward.py ─build (cached)─► PTX ─► launch_kernel, one SM ─► out, lse
                                                │                               │
                                                └─ mutants: must fail           └─ accuracy rule

One SM (two for pairs of CTAs) makes every CTA take several tiles, so that all rings go round. The
race check runs all along.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import oracle
import pytest
from emulator import EmulatorError, launch_kernel

from fa4_jax import bundle
from kernels import build

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="building kernels needs the DSL"
    ),
]

UNLIMITED = 2**30
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
PAIR = "sm100_forward_bf16_h128_full_pair"
CAUSAL = "sm100_forward_bf16_h128_causal"
WINDOW = "sm100_forward_bf16_h128_window"
NAMES = (
    PAIR,
    CAUSAL,
    WINDOW,
    "sm100_forward_f16_h64_full",
    "sm100_forward_f16_h96_window",
    "sm103_forward_bf16_h128_causal",
    "sm103_forward_bf16_h128_full_pair",
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> pathlib.Path:
    """A bundle of this file's kernels, from the build's own cache where they have not changed."""
    variants = [variant for variant in build.find_variants() if variant.name in NAMES]
    assert len(variants) == len(NAMES)
    output = tmp_path_factory.mktemp("sm100") / "bundle"
    build.build(variants, output, jobs=1, cache=build._default_cache())
    return output


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: sizes B, T, S, N, K, H, Hv, masks as the oracle takes them, and how logits grow.

    Attributes:
      growth: key j is multiplied by growth ** (1 - j / S): at 1 all keys are alike; below, keys
        that are visited first have the larger logits; above, the smaller ones.
    """

    kernel: str
    sizes: tuple[int, int, int, int, int, int, int]
    masks: dict = dataclasses.field(default_factory=dict)
    scale: tuple[float, ...] | None = None
    gain: float = 1.0
    growth: float = 1.0


@dataclasses.dataclass
class Outcome:
    out: np.ndarray
    lse: np.ndarray
    trace: dict


def inputs(case: Case) -> dict[str, np.ndarray]:
    """query, key, value, with zeros where no query may look."""
    B, T, S, N, K, H, Hv = case.sizes
    random = np.random.default_rng(T + S + H)
    growth = case.growth ** (1 - np.arange(S) / S)
    arrays = {
        "query": case.gain * random.standard_normal((B, T, N, H)),
        "key": random.standard_normal((B, S, K, H)) * growth[:, None, None],
        "value": random.standard_normal((B, S, K, Hv)),
    }
    dtype = DTYPES[case.kernel.split("_")[2]]
    return {name: blank(case, name, x.astype(dtype), 0) for name, x in arrays.items()}


def blank(case: Case, name: str, x: np.ndarray, filling: float) -> np.ndarray:
    """x with ``filling`` past each batch element's length."""
    lengths = case.masks.get(f"{'query' if name == 'query' else 'key_value'}_seq_lengths")
    x = x.copy()
    for b, length in enumerate(lengths or ()):
        x[b, length:] = filling
    return x


def run(kernels: pathlib.Path, case: Case, ptx: str | None = None, **options) -> Outcome:
    """Launches the case's kernel, NaN in all padding, or with ``ptx`` a mutant of it."""
    B, T, S, N, K, H, Hv = case.sizes
    arrays = {name: blank(case, name, x, np.nan) for name, x in inputs(case).items()}
    out = np.full((B, T, N, Hv), np.nan, arrays["query"].dtype)
    lse = np.full((B, T, N), np.nan, np.float32)
    scale = np.array(case.scale or [H**-0.5] * B, np.float32)
    left, right = case.masks.get("local_window_size", (None, None))
    right = 0 if case.masks.get("is_causal") else right
    per_batch = {
        name: None if name not in case.masks else np.array(case.masks[name], np.int32)
        for name in ("query_seq_lengths", "key_value_seq_lengths", "query_offset")
    }
    symbols = dict(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv)
    for side, width in (("left", left), ("right", right)):
        symbols[f"window_{side}"] = UNLIMITED if width is None else width
    directory = kernels / f"sm_{case.kernel[2:5]}a"
    if ptx is not None:
        mutant = kernels.parent / "mutant" / directory.name
        mutant.mkdir(parents=True, exist_ok=True)
        (mutant.parent / "manifest.txt").write_text((kernels / "manifest.txt").read_text())
        (mutant / f"{case.kernel}.ptx").write_text(ptx)
        directory = mutant
    result = launch_kernel(
        directory,
        case.kernel,
        {**arrays, "out": out, "lse": lse, "scale": scale, **per_batch},
        symbols,
        num_sms=2 if case.kernel.endswith("_pair") else 1,
        **{"races": True, "trace": True, "threads": 1, **options},
    )
    return Outcome(out, lse, json.loads(result.trace))


@functools.cache
def expected(name: str) -> tuple[list[oracle.Attention], list[oracle.Attention]]:
    """float64 attention of each batch element of a case, and the same in the inputs' dtype."""
    case = CASES[name]
    arrays = inputs(case)
    H = case.sizes[5]
    exact, rounded = [], []
    for b in range(case.sizes[0]):
        masks = {
            key: mask[b : b + 1] if isinstance(mask, list) else mask
            for key, mask in case.masks.items()
        }
        for rounding, results in ((None, exact), (arrays["query"].dtype, rounded)):
            results.append(
                oracle.Attention(
                    *(x[b : b + 1] for x in arrays.values()),
                    scale=case.scale[b] if case.scale else H**-0.5,
                    masks=masks,
                    rounding=rounding,
                )
            )
    return exact, rounded


def check(name: str, found: Outcome) -> None:
    """The accuracy rule; the float32 lse within what its terms' rounding explains."""
    exact, rounded = expected(name)
    outs = [np.concatenate([a.out for a in each]) for each in (exact, rounded)]
    oracle.assert_accurate("out", found.out, *outs)
    lse = np.concatenate([a.lse for a in exact])
    # The polynomial's relative error of 9e-5 is one of the sum, so an absolute one of lse.
    np.testing.assert_allclose(found.lse, lse, rtol=1e-6, atol=1e-4)


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
    "h64": Case("sm100_forward_f16_h64_full", (1, 200, 1500, 2, 1, 64, 64)),
    "h96": Case(
        "sm100_forward_f16_h96_window",
        (1, 257, 513, 1, 1, 96, 88),
        dict(local_window_size=(100, 300)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_right(kernels, name):
    check(name, run(kernels, CASES[name]))


@pytest.mark.parametrize("name", ["pair_growing", "causal_growing", "window", "sm103_causal"])
def test_every_schedule_gives_the_same(kernels, name):
    case = CASES[name]
    once = run(kernels, case)
    for seed in range(1, 4):
        again = run(kernels, case, seed=seed, trace=True)
        assert again.out.tobytes() == once.out.tobytes()
        assert again.lse.tobytes() == once.lse.tobytes()


# ---- conditional rescaling and the polynomial ----------------------------------------------------

CORRECTION_WARPS = range(8, 12)
SOFTMAX_WARPS = range(8)


def executed(found: Outcome, warps: range, instruction: str) -> int:
    """How often some warps executed instructions whose names start like this."""
    return sum(
        count
        for warp in warps
        for name, count in found.trace["warps"][warp].items()
        if name.startswith(instruction)
    )


def test_rescales_only_where_maxima_grow(kernels):
    """tau = 8: exponents that grow by less than that leave O in tensor memory alone."""
    level, growing = (run(kernels, CASES[name]) for name in ("pair", "pair_growing"))
    assert executed(level, CORRECTION_WARPS, "tcgen05.st") == 0
    assert executed(growing, CORRECTION_WARPS, "tcgen05.st") > 0


@pytest.mark.parametrize(("name", "pairs"), [("pair", 12), ("causal", 8), ("sm103_causal", 0)])
def test_share_of_the_polynomial(kernels, name, pairs):
    """Of a row's 64 pairs of exponentials; the rest and one factor a tile are the hardware's."""
    found = run(kernels, CASES[name])
    polynomials = executed(found, SOFTMAX_WARPS, "add.rm.f32x2")
    hardware = executed(found, SOFTMAX_WARPS, "ex2.approx")
    key_tiles = executed(found, SOFTMAX_WARPS, "tcgen05.ld") // 4
    assert (polynomials, hardware) == (pairs * key_tiles, (129 - 2 * pairs) * key_tiles)


def float32_literal(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


def edited(ptx: str, pattern: str, replacement: str) -> str:
    changed, count = re.subn(pattern, replacement, ptx)
    assert count > 0, f"nothing like {pattern!r} in the kernel"
    return changed


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
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(kernels, mutant):
    """What the kernel does not need would also pass this file's tests: here it must not."""
    name, pattern, replacement = MUTANTS[mutant]
    case = CASES[name]
    path = kernels / f"sm_{case.kernel[2:5]}a" / f"{case.kernel}.ptx"
    ptx = edited(path.read_text(), pattern, replacement)
    with pytest.raises((AssertionError, EmulatorError)):
        check(name, run(kernels, case, ptx, instruction_limit=20_000_000))


# ---- what the file's picture promises ------------------------------------------------------------

REGISTERS = {"sm100_h64": (200, 64, 48), "sm100": (192, 72, 56), "sm103": (176, 64, 96)}


@pytest.mark.parametrize("name", NAMES)
def test_resources(kernels, name):
    """Registers per role, shared and tensor memory. (A kernel that spills does not build.)"""
    blocks = (kernels / "manifest.txt").read_text().split("\n\n")
    manifest = next(b for b in blocks if b.startswith(f"kernel {name}\n"))
    fields = dict(line.split(" ", 1) for line in manifest.splitlines())
    assert (fields["threads"], fields["registers"]) == ("512", "128")
    assert 215 * 1024 < int(fields["shared"]) <= 227 * 1024
    assert fields["cluster"] == ("2 1 1" if name.endswith("_pair") else "1 1 1")
    ptx = (kernels / fields["architecture"] / f"{name}.ptx").read_text()
    roles = REGISTERS.get("_".join(name.split("_")[:4:3]), REGISTERS[name[:5]])
    assert tuple(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx))) == roles
    # What the assembler needs to honour them.
    assert re.search(r"\.minnctapersm 1\b", ptx)


# ---- the user's road -----------------------------------------------------------------------------

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, fa4_jax
q, k, v = (jax.random.normal(key, (1, n, 2, 128), jnp.bfloat16)
           for key, n in zip(jax.random.split(jax.random.key(0), 3), (150, 200, 200)))
attend = lambda *x, how: fa4_jax.dot_product_attention(*x, is_causal=True, implementation=how)
found = attend(q, k, v, how="emulated")
exact = attend(*(x.astype(jnp.float32) for x in (q, k, v)), how="xla")
print(float(jnp.abs(found - exact).max()))
"""


@pytest.mark.usefixtures("built_library")
def test_through_jax():
    """The typed custom call chooses and runs the Blackwell kernel of the built bundle."""
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
    assert float(process.stdout) < 0.02
