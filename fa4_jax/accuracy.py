"""`python -m fa4_jax accuracy`: how far quantised attention is from exact attention.

Each route against float64 attention of the same inputs: whole-tensor cosine and relative L2 error
of the output, mean and largest error of the log-sum-exp, beside the published figures where the
inputs are the published ones.

Source of grid, seed and figures: "Hardware-Aware FP4 FlashAttention-4" (R. Hu, 2026), section 5.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax import quantize, quantized
from fa4_jax.spec import AttentionSpec, Operands

SEED = 20260814
HEAD_DIM = 128
# (B, S, N) of the published test of record.
GRID = (
    (1, 256, 16),
    (1, 1024, 16),
    (4, 4096, 16),
    (1, 32768, 16),
    (4, 4096, 32),
    (1, 4096, 12),
    (1, 32768, 12),
    (1, 4096, 24),
    (1, 32768, 24),
)
# The part of it that a CPU does in minutes, and with fewer heads: they are alike.
CPU_GRID = ((1, 256, 16), (1, 1024, 4), (1, 4096, 1))
QUERIES_AT_ONCE = 512

ROUTES = {
    **quantize.SHORT_NAMES,
    "fp4 exact 2^x": dataclasses.replace(quantize.FP4, classifier=quantize.EXACT),
    "fp4 no reference": dataclasses.replace(quantize.FP4, row_reference=quantize.NoReference()),
    "nvfp4": quantize.NVFP4_ALL,
}
# Cosine and relative L2 on Gaussian inputs; the paper gives no relative L2 for the last two.
PUBLISHED = {
    "fp4_affine": (0.944, 0.336),
    "fp4_accurate": (0.952, 0.327),
    "nvfp4_fp8": (0.990, None),
    "nvfp4": (0.982, None),
}


class Row(NamedTuple):
    """One line of the report; the errors of lse are in nats."""

    inputs: str
    shape: tuple[int, int, int]
    route: str
    cosine: float
    relative_l2: float
    lse_mean: float
    lse_max: float


def _gaussian(rng: np.random.Generator, shape: tuple[int, int, int]) -> list[np.ndarray]:
    B, S, N = shape
    return [rng.standard_normal((B, S, N, HEAD_DIM), np.float32) for _ in range(3)]


def _channel_outliers(rng: np.random.Generator, shape) -> list[np.ndarray]:
    """Four channels of query and key are ten times as large as the others."""
    q, k, v = _gaussian(rng, shape)
    channels = rng.choice(HEAD_DIM, 4, replace=False)
    q[..., channels] *= 3
    k[..., channels] *= 10
    return [q, k, v]


def _shared_mean(rng: np.random.Generator, shape) -> list[np.ndarray]:
    """All keys of a head share one vector, three times as large as what tells them apart."""
    q, k, v = _gaussian(rng, shape)
    k += 3 * rng.standard_normal((1, 1, *k.shape[2:]), np.float32)
    return [q, k, v]


def _logits(largest: float) -> Callable:
    def shared(rng: np.random.Generator, shape) -> list[np.ndarray]:
        """One outlier channel moves all logits of a row together, up to `largest`."""
        q, k, v = _gaussian(rng, shape)
        channel = np.float32(np.sqrt(largest * HEAD_DIM**0.5))
        k[..., 0] = channel
        q[..., 0] = channel * np.linspace(-1, 1, shape[1], dtype=np.float32)[None, :, None]
        return [q, k, v]

    return shared


def _matched(largest: float) -> Callable:
    def matched(rng: np.random.Generator, shape) -> list[np.ndarray]:
        """Every query is its own key, with a logit up to `largest`."""
        q, _, v = _gaussian(rng, shape)
        q *= np.float32(np.sqrt(largest * HEAD_DIM**0.5 / (q * q).sum(-1).max()))
        return [q, q, v]

    return matched


def _gaussian_logits(largest: float) -> Callable:
    def scaled(rng: np.random.Generator, shape) -> list[np.ndarray]:
        """Independent logits of standard deviation `largest` / 5."""
        q, k, v = _gaussian(rng, shape)
        return [q * np.float32(largest / 5), k, v]

    return scaled


INPUTS: dict[str, Callable] = {
    "gaussian": _gaussian,
    "channel_outliers": _channel_outliers,
    "shared_mean": _shared_mean,
    "shared_logits_200": _logits(200),
    "shared_logits_1000": _logits(1000),
    "matched_logits_1000": _matched(1000),
    "gaussian_logits_200": _gaussian_logits(200),
}


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 attention of [S, N, H] arrays: out [S, N, H] and lse [S, N]."""
    out, lse = np.empty(q.shape), np.empty(q.shape[:2])
    for head in range(q.shape[1]):
        keys, values = (x[:, head].astype(np.float64) for x in (k, v))
        for first in range(0, len(q), QUERIES_AT_ONCE):
            rows = slice(first, first + QUERIES_AT_ONCE)
            z = q[rows, head].astype(np.float64) @ keys.T * HEAD_DIM**-0.5
            m = z.max(-1, keepdims=True)
            p = np.exp(z - m)
            total = p.sum(-1, keepdims=True)
            out[rows, head] = p @ values / total
            lse[rows, head] = (m + np.log(total))[:, 0]
    return out, lse


def measure(
    inputs: str, shape: tuple[int, int, int], routes: Sequence[str], seed: int = SEED
) -> Iterator[Row]:
    """One row for each route; batch by batch, so that memory is that of one batch element."""
    arrays = INPUTS[inputs](np.random.default_rng(seed), shape)
    # As the model would hand them over; exact attention sees the same numbers.
    arrays = [np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in arrays]
    sums = {route: np.zeros(5) for route in routes}
    for b in range(shape[0]):
        element = [x[b] for x in arrays]
        out, lse = exact(*element)
        for route in routes:
            spec = AttentionSpec(scale=HEAD_DIM**-0.5, quantization=ROUTES[route])
            call = jax.jit(lambda q, k, v, spec=spec: quantized.attend(spec, Operands(q, k, v)))
            x, y = (np.asarray(a[0], np.float64) for a in call(*(x[None] for x in element)))
            error = y - lse
            sums[route][:4] += (x * out).sum(), (x * x).sum(), (out * out).sum(), error.sum()
            # np.fmax would hide a NaN.
            sums[route][4] = np.maximum(sums[route][4], np.abs(error).max())
    for route, (dot, own, true, bias, worst) in sums.items():
        with np.errstate(invalid="ignore"):
            difference = np.sqrt(max(own - 2 * dot + true, 0.0) / true)
            cosine = dot / np.sqrt(own * true)
        yield Row(inputs, shape, route, cosine, difference, bias / np.prod(shape), worst)


def table(rows: Sequence[Row]) -> str:
    """The report as Markdown, with the published figures beside Gaussian rows."""
    lines = [
        "| inputs | B, S, N | route | cosine | relative L2 | lse mean | lse max | published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cosine, error = PUBLISHED.get(row.route, (None, None))
        published = "" if cosine is None or row.inputs != "gaussian" else f"{cosine:.3f}"
        if published and error is not None:
            published += f" / {error:.3f}"
        lines.append(
            f"| {row.inputs} | {', '.join(map(str, row.shape))} | {row.route} | {row.cosine:.4f} | "
            f"{row.relative_l2:.4f} | {row.lse_mean:+.4f} | {row.lse_max:.3f} | {published} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: str) -> None:
    """Cosine by inputs and route, published figures as black marks; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys((row.inputs, row.shape) for row in rows))
    routes = list(dict.fromkeys(row.route for row in rows))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.6 * len(groups)), 4.5))
    width = 0.8 / len(routes)
    for i, route in enumerate(routes):
        found = {(row.inputs, row.shape): row.cosine for row in rows if row.route == route}
        places = np.arange(len(groups)) + (i - (len(routes) - 1) / 2) * width
        axes.bar(places, [found.get(group, np.nan) for group in groups], width, label=route)
        if route in PUBLISHED:
            gaussian = [
                x for x, (name, _) in zip(places, groups, strict=True) if name == "gaussian"
            ]
            axes.hlines(
                [PUBLISHED[route][0]] * len(gaussian),
                [x - width / 2 for x in gaussian],
                [x + width / 2 for x in gaussian],
                color="black",
            )
    axes.set_xticks(np.arange(len(groups)))
    axes.set_xticklabels(
        [f"{name}\n{', '.join(map(str, shape))}" for name, shape in groups], fontsize=7
    )
    axes.set_ylim(0.75, 1.0)
    axes.set_ylabel("cosine to float64 attention")
    axes.legend(fontsize=7, ncol=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _shape(text: str) -> tuple[int, int, int]:
    B, S, N = map(int, text.split(","))
    return B, S, N


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, row by row as it is measured; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fa4_jax accuracy", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the nine published shapes")
    parser.add_argument(
        "--shape", action="append", type=_shape, metavar="B,S,N", help="instead; may be repeated"
    )
    parser.add_argument("--inputs", action="append", choices=INPUTS, help="may be repeated")
    parser.add_argument("--route", action="append", choices=ROUTES, help="may be repeated")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--png", metavar="PATH", help="also plot; needs matplotlib")
    arguments = parser.parse_args(argv)
    routes = arguments.route or list(ROUTES)
    shapes = arguments.shape or (GRID if arguments.full else CPU_GRID)
    cases = [(inputs, shape) for inputs in arguments.inputs or ["gaussian"] for shape in shapes]
    if arguments.inputs is None:  # the realistic ones at one shape
        smallest_long = min(shapes, key=lambda shape: (abs(shape[1] - 1024), shape))
        cases += [(inputs, smallest_long) for inputs in INPUTS if inputs != "gaussian"]
    rows: list[Row] = []
    header, rule = table([]).split("\n")
    print(f"{header}\n{rule}")
    for inputs, shape in cases:
        for row in measure(inputs, shape, routes, arguments.seed):
            rows.append(row)
            print(table([row]).split("\n")[-1], flush=True)
    if arguments.png:
        plot(rows, arguments.png)
        print(f"wrote {arguments.png}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
