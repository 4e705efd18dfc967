"""What the tests of the kernels share: calls, their references, and launches on the emulator."""

import dataclasses
import json
import pathlib
import re
import struct
from collections.abc import Collection, Iterable, Sequence

import ml_dtypes
import numpy as np
import oracle
from emulator import launch_kernel

from kernels import build

UNLIMITED = 2**30
SEGMENT_IDS = ("query_segment_ids", "key_value_segment_ids")
PER_BATCH = ("query_seq_lengths", "key_value_seq_lengths", "query_offset")
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of one kernel.

    Attributes:
      kernel: its name, of Hopper's without ``sm90_forward_`` or ``sm90_backward_``.
      sizes: B, T, S, N, K, H, Hv.
      masks: as the oracle takes them, lists for arrays.
      scale: one number per batch element.
      sinks: one logit per head.
      gain: queries are multiplied by it.
      growth: key j is multiplied by growth ** (1 - j / S): at 1 all keys are alike; below, keys
        that are visited first have the larger logits; above, the smaller ones.
      stranger: unless 0, all values of segment 1, whose queries have no dout.
    """

    kernel: str
    sizes: tuple[int, int, int, int, int, int, int]
    masks: dict = dataclasses.field(default_factory=dict)
    scale: tuple[float, ...] | None = None
    cap: float | None = None
    sinks: tuple[float, ...] | None = None
    gain: float = 1.0
    growth: float = 1.0
    stranger: float = 0.0

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[next(part for part in self.kernel.split("_") if part in DTYPES)]


def packed(*lengths: int) -> list[int]:
    """Ids of packed sequences: 0 lengths[0] times, 1 lengths[1] times, and so on."""
    return [i for i, length in enumerate(lengths) for _ in range(length)]


def shuffled(size: int, count: int, seed: int = 0) -> list[int]:
    """Random ids below ``count``, of which none is at home anywhere."""
    return np.random.default_rng(seed).integers(0, count, size).tolist()


def ids(queries: list[list[int]], keys: list[list[int]] | None = None, **more) -> dict:
    return dict(zip(SEGMENT_IDS, (queries, keys or queries), strict=True)) | more


def padded(x: np.ndarray, lengths: Sequence[int] | None, filling: float) -> np.ndarray:
    """x [B, rows, ...] with ``filling`` past each batch element's length.

    (Rows whose segment has nothing on the other side are the caller's to clear:
    fa4_jax/segments.py.)
    """
    x = x.copy()
    for b, length in enumerate(lengths or ()):
        x[b, length:] = filling
    return x


def inputs(case: Case, filling: float = 0) -> dict[str, np.ndarray]:
    """query, key, value, dout and dlse, with ``filling`` past each batch element's lengths."""
    B, T, S, N, K, H, Hv = case.sizes
    random = np.random.default_rng(T + S + H)
    growth = case.growth ** (1 - np.arange(S) / S)
    arrays = {
        "query": case.gain * random.standard_normal((B, T, N, H)),
        "key": random.standard_normal((B, S, K, H)) * growth[:, None, None],
        "value": random.standard_normal((B, S, K, Hv)),
        "dout": random.standard_normal((B, T, N, Hv)),
    }
    if case.stranger:
        queries, keys = (np.array(case.masks[name]) == 1 for name in SEGMENT_IDS)
        arrays["value"][keys] = case.stranger
        arrays["dout"][queries] = 0
    arrays = {name: x.astype(case.dtype) for name, x in arrays.items()}
    arrays["dlse"] = random.standard_normal((B, T, N)).astype(np.float32)
    rows, columns = (case.masks.get(f"{side}_seq_lengths") for side in ("query", "key_value"))
    return {
        name: padded(x, columns if name in ("key", "value") else rows, filling)
        for name, x in arrays.items()
    }


def attention(case: Case) -> tuple[list[oracle.Attention], list[oracle.Attention]]:
    """float64 attention of each batch element of a case, and the same in the inputs' dtype."""
    arrays = inputs(case)
    exact, rounded = [], []
    for b in range(case.sizes[0]):
        masks = {
            key: mask[b : b + 1] if isinstance(mask, list) else mask
            for key, mask in case.masks.items()
        }
        for rounding, results in ((None, exact), (case.dtype, rounded)):
            results.append(
                oracle.Attention(
                    *(arrays[name][b : b + 1] for name in ("query", "key", "value")),
                    scale=case.scale[b] if case.scale else None,
                    logits_soft_cap=case.cap,
                    sinks=None if case.sinks is None else np.array(case.sinks),
                    masks=masks,
                    rounding=rounding,
                )
            )
    return exact, rounded


def integers(case: Case) -> dict[str, np.ndarray | None]:
    """Lengths, offset and segment ids as kernels take them."""
    return {
        name: None if name not in case.masks else np.array(case.masks[name], np.int32)
        for name in (*PER_BATCH, *SEGMENT_IDS)
    }


def symbols(case: Case) -> dict[str, float]:
    """Dimensions and attributes of the call."""
    found = dict(zip(("B", "T", "S", "N", "K", "H", "Hv"), case.sizes, strict=True))
    left, right = case.masks.get("local_window_size", (None, None))
    right = 0 if case.masks.get("is_causal") else right
    for side, width in (("left", left), ("right", right)):
        found[f"window_{side}"] = UNLIMITED if width is None else width
    return found | {"logits_soft_cap": case.cap or 0.0}


def build_kernels(names: Collection[str], folder: pathlib.Path) -> pathlib.Path:
    """A bundle of some kernels, from the build's own cache where they have not changed."""
    variants = [variant for variant in build.find_variants() if variant.name in names]
    assert len(variants) == len(names)
    build.build(variants, folder / "bundle", jobs=1, cache=build.default_cache())
    return folder / "bundle"


@dataclasses.dataclass
class ForwardResults:
    """What a forward kernel wrote, and what its warps executed."""

    out: np.ndarray
    lse: np.ndarray
    trace: dict


def forward_operands(case: Case, bounds: np.ndarray | None = None) -> dict[str, np.ndarray | None]:
    """What a forward kernel reads and writes, with NaN in all padding.

    ``bounds`` takes the place of `oracle.segment_bounds`'s.
    """
    B, T, _, N, _, H, Hv = case.sizes
    masks = integers(case)
    rows, columns = (masks[name] for name in SEGMENT_IDS)
    if bounds is None and rows is not None:
        bounds = oracle.segment_bounds(rows, columns)
    return {
        **inputs(case, np.nan),
        **masks,
        "out": np.full((B, T, N, Hv), np.nan, case.dtype),
        "lse": np.full((B, T, N), np.nan, np.float32),
        "scale": np.array(case.scale or [H**-0.5] * B, np.float32),
        "sinks": None if case.sinks is None else np.array([case.sinks] * B, np.float32),
        "segment_bounds": bounds,
    }


def launch_forward(
    directory: pathlib.Path, kernel: str, operands: dict, numbers: dict, **options
) -> ForwardResults:
    """options: those of `launch_kernel`."""
    options = {"races": True, "trace": True, "threads": 1, **options}
    result = launch_kernel(directory, kernel, operands, numbers, **options)
    trace = json.loads(result.trace) if result.trace else {}
    return ForwardResults(operands["out"], operands["lse"], trace)


def check_forward(case: Case, found: ForwardResults, rtol: float, atol: float) -> None:
    """The accuracy rule; exact zeros where nothing is seen; lse within the tolerances."""
    exact, rounded = attention(case)
    outs = [np.concatenate([a.out for a in each]) for each in (exact, rounded)]
    oracle.assert_accurate("out", found.out, *outs)
    lse = np.concatenate([a.lse for a in exact])
    np.testing.assert_array_equal(found.out[lse == -np.inf], 0)
    np.testing.assert_allclose(found.lse, lse, rtol=rtol, atol=atol)


def executed(trace: dict, warps: Iterable[int], instruction: str) -> int:
    """How often some warps executed instructions whose names start like this."""
    return sum(
        count
        for warp in warps
        for name, count in trace["warps"][warp].items()
        if name.startswith(instruction)
    )


def float32_literal(value: float) -> str:
    """How PTX writes the number."""
    return "0f" + struct.pack(">f", value).hex().upper()


def mutant_of(
    kernels: pathlib.Path, folder: pathlib.Path, name: str, pattern: str, replacement: str
) -> pathlib.Path:
    """A directory with one kernel whose PTX is changed everywhere that the pattern matches."""
    ptx, count = re.subn(pattern, replacement, (kernels / f"{name}.ptx").read_text())
    assert count > 0, f"nothing like {pattern!r} in the kernel"
    (folder / "manifest.txt").write_text((kernels.parent / "manifest.txt").read_text())
    directory = folder / kernels.name
    directory.mkdir()
    (directory / f"{name}.ptx").write_text(ptx)
    return directory


# ---- calls of Hopper kernels ---------------------------------------------------------------------

H128, H64 = "bf16_h128_segments", "f16_h64_segments"
# With the forward's kernels and head dims; the backward, which has fewer kernels, changes some.
HOPPER_CASES = {
    # Borders inside tiles, at tile borders, and segments shorter than a tile.
    "packed": Case(H128, (1, 513, 513, 2, 1, 128, 128), ids([packed(100, 156, 1, 200, 56)])),
    "packed_tiles": Case(
        H64, (1, 250, 513, 1, 1, 64, 64), ids([packed(192, 58)], [packed(128, 385)])
    ),
    "packed_short": Case(
        "f16_h96_segments", (1, 129, 129, 1, 1, 96, 96), ids([packed(*[10] * 12, 9)])
    ),
    "packed_causal": Case(
        H128, (2, 250, 250, 4, 2, 128, 128), ids([packed(90, 160), packed(250)], is_causal=True)
    ),
    "packed_padded": Case(  # ids of padding are nobody's on the other side
        H64,
        (1, 250, 250, 1, 1, 64, 40),
        ids([[*packed(60, 70), *[-1] * 120]], [[*packed(60, 70), *[-2] * 120]]),
    ),
    "one_segment": Case(H128, (1, 129, 250, 1, 1, 128, 128), ids([[7] * 129], [[7] * 250])),
    "strangers": Case("f16_h96_segments", (1, 64, 127, 1, 1, 88, 96), ids([[1] * 64], [[2] * 127])),
    "strangers_sinks": Case(
        H64,
        (1, 127, 64, 3, 1, 64, 64),
        ids([[3] + [1] * 126], [[2] * 63 + [3]]),
        sinks=(0.0, 9.0, 99.0),
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
        "f16_h96_segments",
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
}


def random_case(kernels: Sequence[str], seed: int, most: int) -> Case:
    """One of some Hopper kernels with any sizes and masks that it takes.

    Up to ``most`` batch elements, key/value heads, and query heads to each of these.
    """
    random = np.random.default_rng(seed)
    kernel = kernels[seed % len(kernels)]
    head_dim = int(kernel.split("_")[1][1:])
    T, S = random.choice([1, 63, 64, 127, 128, 129, 250, 513], 2).tolist()
    B, K, group = random.integers(1, most + 1, 3).tolist()
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
