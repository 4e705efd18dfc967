"""Attention on several GPUs of one host against one of them, on the same global arrays.

    python benchmarks/scaling.py                        # all devices, batch, heads and positions
    python benchmarks/scaling.py --devices 2 --lengths 16384

Forward and gradients of ``fa4_jax.dot_product_attention`` under ``jax.jit``, the inputs sharded by
batch, by heads, or by query positions (keys and values on every device); XLA and the kernels'
sharding rules do the rest. One process, the device counts take turns, medians. A ratio of the
number of devices is ideal. Positions add up dk and dv over the devices, and split a causal problem
unevenly.
"""

import argparse
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from attention import Case, Timed
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import info

SPECS = {  # of query (and output), of key and value
    "batch": (P("x"), P("x")),
    "heads": (P(None, None, "x"), P(None, None, "x")),
    "positions": (P(None, "x"), P()),
}


def prepare(case: Case, axis: str, devices, implementation: Any, seconds: float) -> Timed:
    """The compiled gradient step on these devices, calibrated."""
    mesh = jax.make_mesh((len(devices),), ("x",), (AxisType.Auto,), devices=devices)
    query, key = (NamedSharding(mesh, spec) for spec in SPECS[axis])
    attention: Any = functools.partial(
        fa4_jax.dot_product_attention, is_causal=case.is_causal, implementation=implementation
    )

    @jax.jit
    def step(query, key, value, dout):
        out, pullback = jax.vjp(attention, query, key, value)
        return out, pullback(dout)

    sets = [jax.device_put(x, (query, key, key, query)) for x in case.inputs()]
    timed = Timed(step, sets)
    timed.calibrate(seconds)
    return timed


def main(argv: list[str] | None = None) -> list[dict]:
    """Measures and prints; returns a record a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=jax.device_count())
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument(
        "--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"]
    )
    parser.add_argument("--tokens", type=int, default=65536, help="batch * length")
    parser.add_argument("--width", type=int, default=2048, help="query heads * head dim")
    parser.add_argument("--axes", nargs="+", choices=SPECS, default=list(SPECS))
    parser.add_argument("--implementation", default="fa4")
    parser.add_argument("--repeats", type=int, default=7, help="turns of either device count")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a turn")
    arguments = parser.parse_args(argv)

    count = arguments.devices
    print(info.machine())
    print(
        f"{'':<28}{'1 device':>12}{f'{count} devices':>12}{'ratio':>8}   (ms, forward + gradients)"
    )
    records = []
    for length in arguments.lengths:
        for mask in arguments.masks:
            case = Case(
                arguments.head_dim, length, mask == "causal", arguments.tokens, arguments.width, 1,
                jnp.bfloat16.__name__,
            )  # fmt: skip
            for axis in arguments.axes:
                timed = {
                    n: prepare(
                        case, axis, jax.devices()[:n], arguments.implementation, arguments.seconds
                    )
                    for n in (1, count)
                }
                for _ in range(arguments.repeats):
                    for one in timed.values():
                        one.seconds.append(one.run())
                times = {n: 1e3 * statistics.median(one.seconds) for n, one in timed.items()}
                ratio = times[1] / times[count]
                label = f"{case} {axis}"
                print(f"{label:<28}{times[1]:12.3f}{times[count]:12.3f}{ratio:8.2f}", flush=True)
                records.append({"case": str(case), "axis": axis, "ratio": ratio, "ms": times})
    return records


if __name__ == "__main__":
    main()
