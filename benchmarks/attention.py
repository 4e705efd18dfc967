"""Forward and backward throughput of attention: fa4_jax beside cuDNN, FlashAttention-3 and XLA.

    python benchmarks/attention.py                        # the default grid, table and PNG
    python benchmarks/attention.py --lengths 4096 --masks causal --json result.json

What is measured
  One process measures all peers. For each case, calls of one peer are enqueued back to back and
  waited for once, so that the device never waits for the host; the peers take turns, and the
  median over the turns is reported. Calls cycle through as many sets of random inputs as exceed
  the cache. "backward" is the pullback alone, on residuals saved beforehand; that it does not run
  the forward again is read off the compiled program's custom calls and reported if it does.

TFLOP/s
  Two matrix products forward and five backward, each 2 * B * N * T * S * H operations, half of
  that under the causal mask: the convention of the FlashAttention papers.

Peers
  fa4    fa4_jax.dot_product_attention(implementation="fa4")
  cudnn  jax.nn.dot_product_attention(implementation="cudnn")
  fa3    flash_attn3_jax.flash_mha, from the package flash-attn3-jax where that is installed
  xla    fa4_jax.dot_product_attention(implementation="xla")
  A peer that cannot run a case is shown by the reason. ``error`` is the relative distance of a
  peer's first output from float32 XLA attention on one batch entry and head.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import fa4_jax
from fa4_jax import info

# More than the second-level cache of any GPU of these architectures (126 MB on Blackwell).
CACHE_BYTES = 256 * 2**20
OUTPUT = pathlib.Path(__file__).parent / "output" / "attention.png"
MATRIX_PRODUCTS = {"forward": 2, "backward": 5}


@dataclasses.dataclass(frozen=True)
class Case:
    """Self-attention of ``tokens // length`` sequences, ``width // head_dim`` query heads."""

    head_dim: int
    length: int
    is_causal: bool
    tokens: int
    width: int
    group: int  # query heads per key/value head
    dtype: str

    def __str__(self) -> str:
        return f"H{self.head_dim} S{self.length} {'causal' if self.is_causal else 'full'}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key and value."""
        batch, heads = max(1, self.tokens // self.length), self.width // self.head_dim
        key = (batch, self.length, heads // self.group, self.head_dim)
        return (batch, self.length, heads, self.head_dim), key, key

    def flops(self, direction: str) -> float:
        batch, length, heads, head_dim = self.shapes[0]
        one = 2.0 * batch * heads * length * length * head_dim
        return MATRIX_PRODUCTS[direction] * one * (0.5 if self.is_causal else 1.0)

    def inputs(self) -> list[tuple[jax.Array, ...]]:
        """Sets of (query, key, value, cotangent) that together exceed the cache."""
        shapes = (*self.shapes, self.shapes[0])
        size = sum(map(math.prod, shapes)) * jnp.dtype(self.dtype).itemsize
        keys = jax.random.split(jax.random.key(0), (-(-CACHE_BYTES // size), len(shapes)))
        normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
        return [
            tuple(normal(k, s, self.dtype) for k, s in zip(row, shapes, strict=True))
            for row in keys[: max(2, len(keys))]
        ]


def fa3(query, key, value, *, is_causal):
    from flash_attn3_jax import flash_mha  # pyright: ignore[reportMissingImports]

    return flash_mha(query, key, value, is_causal=is_causal)


def _bind(function, implementation):
    return lambda *qkv, is_causal: function(
        *qkv, is_causal=is_causal, implementation=implementation
    )


PEERS: dict[str, Callable] = {
    "fa4": _bind(fa4_jax.dot_product_attention, "fa4"),
    "cudnn": _bind(jax.nn.dot_product_attention, "cudnn"),
    "fa3": fa3,
    "xla": _bind(fa4_jax.dot_product_attention, "xla"),
}


@dataclasses.dataclass
class Timed:
    """A compiled call and the argument sets that it cycles through."""

    function: Callable
    arguments: list[tuple]
    iterations: int = 1
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> float:
        """Seconds per call of ``iterations`` calls, enqueued together and waited for once."""
        result = None
        started = time.perf_counter()
        for arguments in itertools.islice(itertools.cycle(self.arguments), self.iterations):
            result = self.function(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / self.iterations

    def calibrate(self, seconds: float) -> None:
        """Warms up and chooses ``iterations`` so that one run takes about ``seconds``."""
        self.run()
        self.iterations = len(self.arguments) + 1
        one = self.run()
        self.iterations = max(2, min(1000, round(seconds / one)))


def custom_calls(compiled: jax.stages.Compiled) -> set[str]:
    """The attention kernels that a compiled program runs (cuBLAS's calls are XLA's own)."""
    return set(re.findall(r'custom_call_target="(?!__cublas)([^"]+)"', compiled.as_text() or ""))


def relative_error(out: jax.Array, case: Case, query, key, value) -> float:
    """Distance of ``out`` from float32 attention, on the last batch entry and query head."""
    arrays = (x[-1:, :, -1:].astype(jnp.float32) for x in (query, key, value))
    exact = jax.jit(functools.partial(PEERS["xla"], is_causal=case.is_causal))(*arrays)
    return float(jnp.linalg.norm(out[-1:, :, -1:] - exact) / jnp.linalg.norm(exact))


def prepare(case: Case, peer: str, sets, directions, seconds: float) -> tuple[dict, dict]:
    """Compiles and calibrates a peer; returns its ``Timed`` by direction and facts about it."""

    def attention(query, key, value):
        return PEERS[peer](query, key, value, is_causal=case.is_causal)

    forward = jax.jit(attention)
    timed = {"forward": Timed(forward, [s[:3] for s in sets])}
    facts: dict[str, Any] = {"error": relative_error(forward(*sets[0][:3]), case, *sets[0][:3])}
    if "backward" in directions:
        save = jax.jit(lambda *qkv: jax.vjp(attention, *qkv)[1])
        backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))
        timed["backward"] = Timed(backward, [(save(*s[:3]), s[3]) for s in sets])
        again = custom_calls(forward.lower(*sets[0][:3]).compile()) & custom_calls(
            backward.lower(*timed["backward"].arguments[0]).compile()
        )
        facts["backward_repeats"] = sorted(again)
    timed = {direction: timed[direction] for direction in directions}
    for one in timed.values():
        one.calibrate(seconds)
    return timed, facts


def measure(case: Case, peers, directions, repeats: int, seconds: float) -> list[dict]:
    """One record per peer and direction; a peer that fails has one with its ``reason``."""
    sets = case.inputs()
    records, ready = [], {}
    for peer in peers:
        try:
            ready[peer] = prepare(case, peer, sets, directions, seconds)
        except Exception as error:  # whatever a peer raises must not end the others' run
            reason = " ".join(str(error).split())[:300]
            records.append({"peer": peer, "reason": f"{type(error).__name__}: {reason}"})
    for direction in directions:
        for _ in range(repeats):
            for timed, _ in ready.values():
                timed[direction].seconds.append(timed[direction].run())
        for peer, (timed, facts) in ready.items():
            one = statistics.median(timed[direction].seconds)
            spread = (max(timed[direction].seconds) - min(timed[direction].seconds)) / one
            records.append(
                {
                    "peer": peer,
                    "direction": direction,
                    "milliseconds": 1e3 * one,
                    "tflops": case.flops(direction) / one / 1e12,
                    "spread": spread,
                    "calls": timed[direction].iterations * repeats,
                    **facts,
                }
            )
    return [{**dataclasses.asdict(case), **record} for record in records]


def table(case: Case, records: list[dict], peers, directions) -> str:
    """The case's lines: TFLOP/s of every peer and the first peer's ratio to each other one."""
    lines = []
    for direction in directions:
        rates = {r["peer"]: r["tflops"] for r in records if r.get("direction") == direction}
        cells = [f"{rates[p]:9.1f}" if p in rates else f"{'-':>9}" for p in peers]
        first = rates.get(peers[0], math.nan)
        cells += [f"{first / rates.get(p, math.nan):10.2f}" for p in peers[1:]]
        lines.append(f"{case!s:<20} {direction:<9}" + "".join(cells).replace("nan", "  -"))
    for record in records:
        if "reason" in record:
            lines.append(f"  {record['peer']}: {record['reason']}")
        elif not record["error"] < 0.02:  # NaN included; bfloat16's own is 0.003
            lines.append(f"  {record['peer']}: WRONG, relative error {record['error']:.2g}")
        if record.get("backward_repeats"):
            lines.append(f"  {record['peer']}: backward also ran {record['backward_repeats']}")
    return "\n".join(dict.fromkeys(lines))  # facts are those of both directions


def plot(records: list[dict], peers, directions, machine: str, path: pathlib.Path) -> None:
    """Grouped bars of TFLOP/s, one panel per direction."""
    from matplotlib.figure import Figure

    fields = [f.name for f in dataclasses.fields(Case)]
    cases = list(dict.fromkeys(Case(**{f: r[f] for f in fields}) for r in records))
    size = (3 + len(cases), 3.5 * len(directions))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(directions), squeeze=False)
    for axes, direction in zip(panels[:, 0], directions, strict=True):
        for offset, peer in enumerate(peers):
            rates = {
                Case(**{f: r[f] for f in fields}): r["tflops"]
                for r in records
                if r["peer"] == peer and r.get("direction") == direction
            }
            places = [cases.index(c) + (offset - (len(peers) - 1) / 2) * 0.2 for c in rates]
            axes.bar(places, list(rates.values()), 0.19, label=peer)
        axes.set(ylabel="TFLOP/s", title=direction)
        axes.set_xticks(range(len(cases)), [str(c).replace(" ", "\n") for c in cases])
        axes.grid(axis="y", alpha=0.3)
    panels[0, 0].legend(ncols=len(peers))
    figure.suptitle(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> list[dict]:
    """Measures, prints, plots; returns the records that ``--json`` writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument(
        "--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"]
    )
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length")
    parser.add_argument("--width", type=int, default=2048, help="query heads * head dim")
    parser.add_argument("--group", type=int, default=1, help="query heads per key/value head")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--directions", nargs="+", choices=MATRIX_PRODUCTS, default=list(MATRIX_PRODUCTS)
    )
    parser.add_argument("--repeats", type=int, default=7, help="turns of every peer")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a turn")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    parser.add_argument("--json", type=pathlib.Path, help="also write every record here")
    arguments = parser.parse_args(argv)

    peers, directions = arguments.peers, arguments.directions
    print(info.machine())
    print(f"{arguments.dtype}, {arguments.tokens} tokens, width {arguments.width}, TFLOP/s")
    print(
        f"{'':<30}"
        + "".join(f"{p:>9}" for p in peers)
        + "".join(f"{f'{peers[0]}/{p}':>10}" for p in peers[1:])
    )
    records, printed = [], set()
    for head_dim, length, mask in itertools.product(
        arguments.head_dims, arguments.lengths, arguments.masks
    ):
        case = Case(
            head_dim,
            length,
            mask == "causal",
            arguments.tokens,
            arguments.width,
            arguments.group,
            arguments.dtype,
        )
        found = measure(case, peers, directions, arguments.repeats, arguments.seconds)
        for line in table(case, found, peers, directions).splitlines():
            if line not in printed:  # the same reason in every case
                print(line, flush=True)
            printed.add(line)
        records += found
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": info.machine(), "records": records}, indent=1)
        )
    plot(records, peers, directions, info.machine().splitlines()[0], arguments.output)
    print(f"wrote {arguments.output}")
    return records


if __name__ == "__main__":
    main()
