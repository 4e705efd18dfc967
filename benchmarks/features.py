"""What segments, soft cap and sinks cost: each beside the same call without it.

    python benchmarks/features.py
    python benchmarks/features.py --head-dims 128 --lengths 4096

Forward and backward of ``fa4_jax.dot_product_attention`` on self-attention, causal and not. One
process, all features of a line in turns; the number is the median time without the feature over
the median time with it, so 1 costs nothing and more than 1 saves work. ``segments`` packs four
sequences of equal length into a row, which is a quarter of the products of a full row; ``window``
is a local window of a quarter of the row on the left.
"""

import argparse
import functools
import itertools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from attention import Case, Timed

import fa4_jax
from fa4_jax import info

SEGMENTS = 4


def arguments_of(case: Case) -> dict[str, dict[str, Any]]:
    """The keyword arguments of each feature."""
    batch, length, heads, _ = case.shapes[0]
    ids = jnp.broadcast_to(jnp.arange(length) * SEGMENTS // length, (batch, length))
    return {
        "plain": {},
        "window": {"local_window_size": (length // SEGMENTS, None)},
        "segments": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "soft cap": {"logits_soft_cap": 30.0},
        "sinks": {"sinks": jnp.zeros(heads)},
    }


def prepare(
    case: Case, keywords: dict[str, Any], sets, implementation: Any, seconds: float
) -> dict[str, Timed]:
    """Forward and pullback, compiled and calibrated."""
    # Arrays are arguments of the compiled functions, the rest is theirs to know.
    arrays = {k: v for k, v in keywords.items() if isinstance(v, jax.Array)}
    attention: Any = functools.partial(
        fa4_jax.dot_product_attention,
        is_causal=case.is_causal,
        implementation=implementation,
        **{k: v for k, v in keywords.items() if k not in arrays},
    )
    forward = jax.jit(attention)
    save = jax.jit(lambda *qkv, **arrays: jax.vjp(functools.partial(attention, **arrays), *qkv)[1])
    backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    timed = {
        "forward": Timed(functools.partial(forward, **arrays), [s[:3] for s in sets]),
        "backward": Timed(backward, [(save(*s[:3], **arrays), s[3]) for s in sets]),
    }
    for one in timed.values():
        one.calibrate(seconds)
    return timed


def main(argv: list[str] | None = None) -> list[dict]:
    """Measures and prints; returns a record a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument(
        "--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"]
    )
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length")
    parser.add_argument("--width", type=int, default=2048, help="query heads * head dim")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--implementation", default="fa4")
    parser.add_argument("--repeats", type=int, default=7, help="turns of every feature")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a turn")
    arguments = parser.parse_args(argv)

    print(info.machine())
    records = []
    for head_dim, length, mask in itertools.product(
        arguments.head_dims, arguments.lengths, arguments.masks
    ):
        is_causal = mask == "causal"
        case = Case(
            head_dim, length, is_causal, arguments.tokens, arguments.width, 1, arguments.dtype
        )
        sets, features = case.inputs(), arguments_of(case)
        if not records:
            print(f"{'':<30}{'ms':>9}" + "".join(f"{name:>10}" for name in list(features)[1:]))
        ready = {
            name: prepare(case, keywords, sets, arguments.implementation, arguments.seconds)
            for name, keywords in features.items()
        }
        for direction in ("forward", "backward"):
            for _ in range(arguments.repeats):
                for timed in ready.values():
                    timed[direction].seconds.append(timed[direction].run())
            times = {n: statistics.median(t[direction].seconds) for n, t in ready.items()}
            ratios = {n: times["plain"] / t for n, t in times.items() if n != "plain"}
            cells = "".join(f"{ratio:10.2f}" for ratio in ratios.values())
            print(f"{case!s:<20} {direction:<9}{1e3 * times['plain']:9.3f}{cells}", flush=True)
            records.append({"case": str(case), "direction": direction, "ratios": ratios})
    return records


if __name__ == "__main__":
    main()
