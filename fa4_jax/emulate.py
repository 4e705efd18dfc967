"""``python -m fa4_jax emulate``: the kernels of one call on the emulator, schedule by schedule.

Runs the call of the flags with random inputs, once for each seed, compares the results with XLA
attention in float32 by the rule of :mod:`fa4_jax.check`, and says what the emulator found: wrong
accesses, races, deadlocks, and what each warp executed.

::

    python -m fa4_jax emulate --shape 1,256,256,2,1,64 --causal --races --seeds 0-9
    python -m fa4_jax emulate --backward --sms 2 --trace counts.json

Seed 0 is the deterministic schedule, every other one an adversarial schedule of its own; the
inputs are always the same. See ``ffi/emulator/README.md``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax import bundle, check, implementations, info
from fa4_jax.api import dot_product_attention

RESULTS = ("out", "lse", "dq", "dk", "dv")
# How many opcodes of a role are named, the most frequent first.
NAMED_OPCODES = 6
# Neighbouring warps whose opcodes are the same to this part have one role: the first warp of a
# warpgroup often stores for the others.
SAME_ROLE = 0.8


def seeds(text: str) -> list[int]:
    """Parses ``0,3,10-12`` to ``[0, 3, 10, 11, 12]``."""
    found = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@contextlib.contextmanager
def environment(**settings: object) -> Iterator[None]:
    """Sets ``FA4_JAX_EMULATED_<name>`` for each setting that is not None; ffi/emulated_driver.cc
    says what each means and when it is read."""
    names = {
        f"FA4_JAX_EMULATED_{name}": str(value)
        for name, value in settings.items()
        if value is not None
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def program(attention: Callable, backward: bool) -> Callable:
    """A jitted function of query, key, value and dout.

    Args:
      attention: of query, key and value; returns out and lse.
      backward: whether gradients are wanted.

    Returns:
      A function that returns the first two, or all, of :data:`RESULTS` as float32 arrays.
    """

    @jax.jit
    def run(query, key, value, dout):
        out, pullback, lse = jax.vjp(attention, query, key, value, has_aux=True)
        results = (out, lse, *(pullback(dout) if backward else ()))
        return [x.astype(jnp.float32) for x in results]

    return run


def compare(found: Sequence[np.ndarray], rounded, exact) -> dict[str, tuple[float, float]]:
    """:func:`fa4_jax.check.compare` of what :func:`program` returns, with a rule for lse."""
    values = dict(zip(RESULTS, zip(found, rounded, exact, strict=True), strict=False))
    lse, _, exact_lse = values.pop("lse")
    errors = check.compare(*zip(*values.values(), strict=True))
    # No 16-bit number is on the way to it: a few units in the last place of its float32 terms, and
    # those of the tangent under a soft cap.
    seen = np.isfinite(exact_lse)
    limit = 4e-6 + 3e-6 * float(np.max(np.abs(exact_lse), where=seen, initial=0))
    with np.errstate(invalid="ignore"):
        error = np.max(np.where(lse == exact_lse, 0, np.abs(lse - exact_lse)))
    return {"out": errors.pop("out"), "lse": (float(error), limit), **errors}


def roles(warps: Sequence[dict[str, int]]) -> list[tuple[range, collections.Counter[str]]]:
    """Joins neighbouring warps of a CTA that execute nearly the same opcodes.

    Args:
      warps: how often each opcode was executed, for each warp, summed over CTAs.

    Returns:
      For each role its warps and the sum of their counts.
    """
    found: list[tuple[range, collections.Counter[str]]] = []
    for i, counts in enumerate(warps):
        if i and len(counts.keys() & warps[i - 1].keys()) >= SAME_ROLE * len(
            counts.keys() | warps[i - 1].keys()
        ):
            members, total = found.pop()
            found.append((range(members.start, i + 1), total + collections.Counter(counts)))
        else:
            found.append((range(i, i + 1), collections.Counter(counts)))
    return found


def summary(launch: dict[str, Any]) -> str:
    """The roles of one launch: their warps, warp-instructions and most frequent opcodes."""
    lines = [f"{launch['name']}, {launch['ctas']} CTAs, seed {launch['seed']}"]
    for warps, counts in roles(launch["warps"]):
        name = f"warp {warps[0]}" if len(warps) == 1 else f"warps {warps[0]}-{warps[-1]}"
        total = counts.total()
        shares = (f"{op} {100 * n / total:.0f}%" for op, n in counts.most_common(NAMED_OPCODES))
        lines.append(f"  {name:<12}{total:>12,} instructions: " + ", ".join(shares))
    return "\n".join(lines)


def report(
    emulated: Callable, arrays: tuple, references: tuple, wanted: Sequence[int], races: bool
) -> tuple[bool, list[dict[str, Any]]]:
    """Runs every seed and prints a line for each.

    Args:
      emulated: what :func:`program` returns for the emulator.
      arrays: its arguments.
      references: the results in the inputs' dtype, and exact ones.
      wanted: the seeds.
      races: whether unordered accesses are looked for.

    Returns:
      Whether all were right, and the traces of the launches of seeds without an error.
    """
    all_right, launches = True, []
    for seed in wanted:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "trace.jsonl")
            try:
                with environment(SEED=seed, RACES=int(races), TRACE=path):
                    found = [np.asarray(x) for x in emulated(*arrays)]
            except jax.errors.JaxRuntimeError as error:
                all_right = False
                print(f"seed {seed:<4} ERROR\n    " + str(error).strip().replace("\n", "\n    "))
                continue
            done = [json.loads(line) for line in path.read_text().splitlines()]
        right, words = check.verdict(compare(found, *references))
        all_right &= right
        launches += done
        instructions = sum(launch["warp_instructions"] for launch in done)
        seconds = sum(launch["seconds"] for launch in done)
        print(f"seed {seed:<4} {words}  {instructions:,} warp-instructions in {seconds:.2f} s")
    return all_right, launches


def main(argv: list[str] | None = None) -> int:
    """Prints the report; returns 1 if a seed was wrong or could not run, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m fa4_jax emulate",
        description="Runs the kernels of one call on the PTX emulator and compares with XLA "
        "attention in float32. The exit status is 1 when a result is wrong or the emulator "
        "reports an error.",
    )
    parser.add_argument(
        "--shape",
        type=info.integers(6),
        metavar="B,T,S,N,K,H",
        default=(1, 256, 256, 2, 1, 64),
        help="batch, queries, keys, query heads, key/value heads, head dim (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=implementations.KERNEL_DTYPES, default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=info.integers(2), metavar="LEFT,RIGHT")
    parser.add_argument("--soft-cap", type=float, metavar="C", help="logits_soft_cap")
    parser.add_argument("--sinks", action="store_true", help="a sink for each head")
    parser.add_argument("--segments", type=int, metavar="N", help="N packed sequences")
    parser.add_argument("--backward", action="store_true", help="gradients too")
    parser.add_argument(
        "--architecture", metavar="SM", help="e.g. sm_90a (default: the bundle's first)"
    )
    parser.add_argument("--sms", type=int, metavar="N", help="SMs of the pretended GPU")
    parser.add_argument(
        "--seeds", type=seeds, default=[0], metavar="0,3,10-19", help="schedules (default: 0)"
    )
    parser.add_argument("--races", action="store_true", help="report accesses nothing orders")
    parser.add_argument("--trace", metavar="FILE.json", help="write the counts of every launch")
    parser.add_argument(
        "--bundle", metavar="DIRECTORY", help="another bundle, e.g. a copy with changed PTX"
    )
    arguments = parser.parse_args(argv)
    if 0 in arguments.shape or arguments.shape[3] % arguments.shape[4]:
        parser.error(f"--shape {arguments.shape}: an empty dimension, or N is no multiple of K")

    spec, operands = info.call(
        arguments.shape, arguments.dtype, arguments.causal, window=arguments.window
    )
    sizes = operands.sizes
    options: dict[str, Any] = {"logits_soft_cap": arguments.soft_cap}
    if arguments.sinks:
        options["sinks"] = np.linspace(-1, 2, sizes.N, dtype=np.float32)
    if arguments.segments:
        for name, size in (("query", sizes.T), ("key_value", sizes.S)):
            ids = np.arange(size) * arguments.segments // size
            options[f"{name}_segment_ids"] = np.tile(ids, (sizes.B, 1))
    if why := implementations.refusals("emulated", spec, operands):
        print("cannot run: " + "; ".join(why))
        return 1

    def attention(implementation):
        return lambda *qkv: dot_product_attention(
            *qkv,
            is_causal=arguments.causal,
            local_window_size=arguments.window,
            **options,
            return_residual=True,
            implementation=implementation,
        )

    def dense(query, key, value):
        # Its lse has no use: see `compare`.
        out = check.dense(query, key, value, spec.left, spec.right, **options)
        return out, jnp.zeros(())

    device = environment(ARCH=arguments.architecture, SMS=arguments.sms)
    with device, jax.default_device(jax.devices("cpu")[0]):
        try:
            bundle.library(arguments.bundle)
        except bundle.BundleError as error:
            print(f"cannot run: {error}")
            return 1
        arrays = check.inputs(arguments.shape, arguments.dtype)
        rounded = program(dense, arguments.backward)(*arrays)
        exact = program(attention("xla"), arguments.backward)(
            *(x.astype(jnp.float32) for x in arrays)
        )
        references = tuple([np.asarray(x) for x in results] for results in (rounded, exact))
        emulated = program(attention("emulated"), arguments.backward)
        right, launches = report(emulated, arrays, references, arguments.seeds, arguments.races)
    # The counts of other schedules differ in how often a warp looks at a barrier, no more.
    for launch in launches:
        if launch["seed"] == launches[0]["seed"]:
            print("\n" + summary(launch))
    if arguments.trace:
        pathlib.Path(arguments.trace).write_text(json.dumps(launches, indent=1) + "\n")
    return 0 if right else 1
