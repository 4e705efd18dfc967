"""Calls with segments, soft cap and sinks for the tests of the kernels; Hopper's references."""

import dataclasses
import pathlib
import re
import struct

import ml_dtypes
import numpy as np
import oracle

UNLIMITED = 2**30
SEGMENT_IDS = ("query_segment_ids", "key_value_segment_ids")
PER_BATCH = ("query_seq_lengths", "key_value_seq_lengths", "query_offset")
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of one kernel.

    Attributes:
      kernel: its name without ``sm90_forward_`` or ``sm90_backward_``.
      sizes: B, T, S, N, K, H, Hv.
      masks: as the oracle takes them, lists for arrays.
      scale: one number per batch element.
      sinks: one logit per head.
      gain: queries are multiplied by it.
      stranger: unless 0, all values of segment 1, whose queries have no dout.
    """

    kernel: str
    sizes: tuple[int, int, int, int, int, int, int]
    masks: dict = dataclasses.field(default_factory=dict)
    scale: tuple[float, ...] | None = None
    cap: float | None = None
    sinks: tuple[float, ...] | None = None
    gain: float = 1.0
    stranger: float = 0.0

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.kernel.split("_")[0]]


def packed(*lengths: int) -> list[int]:
    """Ids of packed sequences: 0 lengths[0] times, 1 lengths[1] times, and so on."""
    return [i for i, length in enumerate(lengths) for _ in range(length)]


def shuffled(size: int, count: int, seed: int = 0) -> list[int]:
    """Random ids below ``count``, of which none is at home anywhere."""
    return np.random.default_rng(seed).integers(0, count, size).tolist()


def ids(queries: list[list[int]], keys: list[list[int]] | None = None, **more) -> dict:
    return dict(zip(SEGMENT_IDS, (queries, keys or queries), strict=True)) | more


def inputs(case: Case) -> dict[str, np.ndarray]:
    """query, key, value, dout and dlse, with zeros past each batch element's lengths."""
    B, T, S, N, K, H, Hv = case.sizes
    random = np.random.default_rng(T + S + H)
    arrays = {
        "query": case.gain * random.standard_normal((B, T, N, H)),
        "key": random.standard_normal((B, S, K, H)),
        "value": random.standard_normal((B, S, K, Hv)),
        "dout": random.standard_normal((B, T, N, Hv)),
    }
    if case.stranger:
        queries, keys = (np.array(case.masks[name]) == 1 for name in SEGMENT_IDS)
        arrays["value"][keys] = case.stranger
        arrays["dout"][queries] = 0
    arrays = {name: blank(case, name, x.astype(case.dtype), 0) for name, x in arrays.items()}
    dlse = random.standard_normal((B, T, N)).astype(np.float32)
    return arrays | {"dlse": blank(case, "dlse", dlse, 0)}


def blank(case: Case, name: str, x: np.ndarray, filling: float) -> np.ndarray:
    """x with ``filling`` past each batch element's length.

    (Rows whose segment has nothing on the other side are the caller's to clear:
    fa4_jax/segments.py.)
    """
    side = "key_value" if name in ("key", "value") else "query"
    x = x.copy()
    for b, length in enumerate(case.masks.get(f"{side}_seq_lengths") or ()):
        x[b, length:] = filling
    return x


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
    directory = folder / "sm_90a"
    directory.mkdir()
    (directory / f"{name}.ptx").write_text(ptx)
    return directory
