"""Deletes one synchronisation instruction at a time from a kernel and sees who notices.

    python tests/mutants.py sm90_forward_bf16_h128_causal sm90_backward_bf16_h128_causal

Every mbarrier wait, arrival and announcement of bytes, every fence, commit and wait of copies and
products, and every named barrier of the PTX gives a mutant. It runs on small inputs that enter
every loop: with the default schedule under the race check, then, if nothing was found, with seeds.
A mutant is caught by an error of the emulator or by a result that differs from the original's.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import oracle
from emulator import EmulatorError, launch_kernel

BUNDLE = pathlib.Path(__file__).resolve().parent.parent / "fa4_jax" / "_native" / "bundle"
UNLIMITED = 2**30
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}

# A wait loops until a predicate holds: make it hold. All other instructions vanish.
_WAIT = re.compile(r"mbarrier\.try_wait\S*\s+(%p\d+),.*?;")
_EXPECT = re.compile(r"mbarrier\.arrive\.expect_tx(\S*)\s+(%rd\d+), (\[[^]]*\]), [^;]*;")
_DELETED = {
    "arrive.expect_tx": r"mbarrier\.arrive\.expect_tx",
    "expect_tx": r"mbarrier\.expect_tx",
    "arrive": r"mbarrier\.arrive\.(?!expect_tx)",
    "fence.proxy": r"fence\.proxy",
    "fence.mbarrier_init": r"fence\.mbarrier_init",
    "wgmma.fence": r"wgmma\.fence",
    "wgmma.commit": r"wgmma\.commit_group",
    "wgmma.wait": r"wgmma\.wait_group",
    "bulk.commit": r"cp\.async\.bulk\.commit_group",
    "bulk.wait": r"cp\.async\.bulk\.wait_group",
    "barrier.sync": r"(?:bar|barrier)(?:\.cta)?\.sync",
    "barrier.arrive": r"(?:bar|barrier)(?:\.cta)?\.arrive",
    "warp.sync": r"bar\.warp\.sync",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A kernel without one of its instructions: the PTX line (from 1) and what was done to it."""

    kind: str
    line: int
    text: str
    ptx: str
    original: str


def mutants(ptx: str) -> Iterator[Mutant]:
    """Every mutant of a kernel, in the order of its text."""
    lines = ptx.split("\n")

    def replaced(kind: str, i: int, new: str) -> Mutant:
        changed = "\n".join([*lines[:i], new, *lines[i + 1 :]])
        return Mutant(kind, i + 1, lines[i].strip(), changed, ptx)

    for i, line in enumerate(lines):
        if wait := _WAIT.search(line):
            yield replaced("wait", i, f"setp.eq.s32 {wait[1]}, 0, 0;")
        for kind, pattern in _DELETED.items():
            if re.match(rf"\s*{pattern}", line):
                yield replaced(kind, i, "")
        if expect := _EXPECT.search(line):
            # The arrival stays, its bytes are not waited for.
            plain = f"mbarrier.arrive{expect[1]} {expect[2]}, {expect[3]};"
            yield replaced("expect_tx of arrive", i, plain)


def excuse(operation: str, mutant: Mutant) -> str:
    """Why nobody can notice that the mutant's instruction is missing; "" if someone should.

    Each reason is checked on the PTX around the instruction, so that it lapses with the code that
    it is about.
    """
    lines = mutant.original.split("\n")
    here = mutant.line - 1

    def find(pattern: str, begin: int, end: int | None = None) -> int:
        for i in range(begin, len(lines) if end is None else end):
            if re.search(pattern, lines[i]):
                return i
        return len(lines)

    def find_back(pattern: str) -> int:
        return next((i for i in range(here - 1, -1, -1) if re.search(pattern, lines[i])), -1)

    def paces(wait: int) -> bool:
        """Whether this is the Hopper backward's wait between dV and dK."""
        if operation != "backward" or "wgmma.wait_group" not in lines[wait]:
            return False
        second = find(r"wgmma\.wait_group", wait + 1)
        between = "\n".join(lines[wait + 1 : second])
        steps = re.findall(r"mbarrier\.arrive|wgmma\.commit_group|\bbar\.|\bst", between)
        last = find(r"wgmma\.wait_group\S*\s+0", second + 1)
        return steps == ["mbarrier.arrive", "wgmma.commit_group"] and last < find(
            r"mbarrier\.arrive", second + 1
        )

    if mutant.kind in ("fence.proxy", "warp.sync"):
        arrival = find(r"mbarrier\.arrive|\b(bar|barrier)\.(sync|arrive)", here)
        same = _DELETED[mutant.kind]
        if find(same, here + 1, arrival) < arrival:
            return (
                "The scrub of a tile's first rows and that of its last rows each end with a fence "
                "and a bar.warp.sync; nothing reads the tile in between, and the second pair "
                "covers the stores before the first."
            )
        loads = sum("arrive.expect_tx" in line for line in lines[:here])
        first_wait = find(r"mbarrier\.try_wait", find(r"setmaxnreg\.inc", 0))
        both_first = find(r"mbarrier\.try_wait", first_wait + 1) < find(r"wgmma\.", first_wait)
        if operation == "backward" and loads == 1 and both_first:
            return (
                "The key tile: consumers touch it only when the value tile has arrived as well, "
                "which the same warp scrubs next, whose fence and bar.warp.sync cover both."
            )
    if mutant.kind == "arrive":
        labels = {m[1] for x in lines[:here] if (m := re.match(r"\s*(\$\w+):", x))}
        after = re.findall(r"\bbra\S*\s+(\$\w+)", "\n".join(lines[here:]))
        if not labels.intersection(after):
            return (
                "A release after the last tile: its warp never goes back, and the producer, which "
                "waits for the use before the previous one, has no more to fill."
            )
    if mutant.kind == "wait" and operation == "backward":
        row = r"mbarrier\.expect_tx"
        if find_back(row) >= 0 and find(row, here) < find(r"try_wait", here + 1):
            return (
                "The dout ring's acquire: every consumer warp frees a stage of it before the same "
                "stage of the query ring, for which the producer has waited already."
            )
    if mutant.kind == "wgmma.fence":
        products = lines[here : find(r"wgmma\.commit_group", here)]
        registers = {x for i in products if "mma_async" in i for x in re.findall(r"%[rf]\d+", i)}
        between = [i for i in lines[find_back(r"wgmma\.fence") : here] if "wgmma" not in i]
        if find_back(r"wgmma\.fence") >= 0 and not registers & set(
            re.findall(r"%[rf]\d+", "\n".join(between))
        ):
            return (
                "Since the wgmma.fence before it no instruction but wgmma has accessed a register "
                "of the products that follow."
            )
    if mutant.kind == "wgmma.wait" and paces(here):
        return (
            "dK waits for dV to pace the tensor cores. The release of the dout ring in between "
            "frees nothing yet: the producer waits for the query ring's first, which comes when "
            "all products are done."
        )
    if mutant.kind == "wgmma.commit":
        # Its products join the next group. `later` groups follow before the wait that ends them.
        later = 0
        for i in range(here + 1, len(lines)):
            later += "wgmma.commit_group" in lines[i]
            wait = re.search(r"wgmma\.wait_group\S*\s+(\d+)", lines[i])
            if wait and int(wait[1]) <= later and not paces(i):
                if int(wait[1]) < later:
                    return "The wait that covers its group covers the next group, which it joins."
                break
    return ""


class Workload:
    """A kernel's launch on small inputs, and what it gave.

    Two batch elements with partial last tiles, the second with shorter lengths, an offset and a
    negative scale; NaN wherever no query may look. Both query heads share one key/value head. Where
    the kernel has segments, they leave some tiles clear.
    """

    def __init__(self, kernel: str, bundle: pathlib.Path = BUNDLE):
        _, self.operation, dtype, head_dim, mask, *capped = kernel.split("_")
        self.directory, self.kernel = bundle / "sm_90a", kernel
        self.ptx = (self.directory / f"{kernel}.ptx").read_text()
        blocks = (bundle / "manifest.txt").read_text().split("\n\n")
        self.manifest = next(b for b in blocks if b.startswith(f"kernel {kernel}\n"))
        self.dtype, H = DTYPES[dtype], int(head_dim[1:])
        B, N, K = 2, 2, 1
        T, S = (300, 300) if self.operation == "forward" else (200, 200)
        if mask == "segments" and self.operation == "forward":
            S = 600  # so many masked key tiles that one is loaded into the stage of another
        # Windows that cut some tiles on the left, some on the right, and some not at all.
        window = (260 if self.operation == "forward" else 130, 130)
        full, causal = (UNLIMITED, UNLIMITED), (UNLIMITED, 0)
        masks = {"full": full, "causal": causal, "window": window, "segments": window}
        left, right = masks[mask]
        self.symbols = dict(B=B, T=T, S=S, N=N, K=K, Tp=-(-T // 128) * 128, Hp=H, Hv=H)
        self.symbols |= dict(window_left=left, window_right=right, num_sms=2)
        self.symbols |= dict(logits_soft_cap=3.0 if capped else 0.0)
        self.random = np.random.default_rng(0)
        # The second element's tiles are whole and partial, of queries and of keys: a fence for the
        # ones must not hide that the others lack theirs.
        queries, keys = np.array([T, T - 60], np.int32), np.array([S, S - 60], np.int32)
        offset = {"full": 0, "causal": 3}.get(mask, left + 10)
        self.operands = {
            "query": self.normal((B, T, N, H), queries),
            "key": self.normal((B, S, K, H), keys),
            "value": self.normal((B, S, K, H), keys),
            "out": np.zeros((B, T, N, H), self.dtype),
            "lse": np.zeros((B, T, N), np.float32),
            "scale": np.array([0.1, -0.1], np.float32),
            "query_seq_lengths": queries,
            "key_value_seq_lengths": keys,
            "query_offset": np.array([0, offset], np.int32),
            "query_segment_ids": None,
            "key_value_segment_ids": None,
            "segment_bounds": None,
            "sinks": self.random.standard_normal((B, N)).astype(np.float32),
        }
        if mask == "segments":
            # The second's clear keys come after unclear ones.
            ids = [
                np.stack([np.arange(n) >= n - 10, self.random.random(n) < share]).astype(np.int32)
                for n, share in ((T, 0), (S, (np.arange(S) < 400) / 2))
            ]
            self.operands["query_segment_ids"], self.operands["key_value_segment_ids"] = ids
            self.operands["segment_bounds"] = oracle.segment_bounds(*ids)
        for name in ("key", "value"):  # before every query's window
            self.operands[name][1, : max(0, offset - left)] = np.nan
        self.results = ("out", "lse")
        if self.operation == "backward":
            self.prepare_backward(dtype, head_dim, "_".join([mask, *capped]), queries)
        self.expected: dict[str, np.ndarray] = {}
        self.limit = 0

    def normal(self, shape: tuple[int, ...], lengths: np.ndarray) -> np.ndarray:
        x = self.random.standard_normal(shape).astype(self.dtype)
        for b, length in enumerate(lengths):
            x[b, length:] = np.nan
        return x

    def prepare_backward(self, dtype: str, head_dim: str, mask: str, queries: np.ndarray) -> None:
        """Runs the forward and the preprocess, whose results the main kernel reads."""
        o, s = self.operands, self.symbols
        o["dout"] = self.normal(o["query"].shape, queries)
        o["dlse"] = self.random.standard_normal(o["lse"].shape).astype(np.float32)
        o["lse_log2"] = np.zeros((s["B"], s["N"], s["Tp"]), np.float32)
        o["delta"] = np.zeros_like(o["lse_log2"])
        o["dq_accumulator"] = np.zeros((*o["delta"].shape, s["Hp"]), np.float32)
        o["dk"], o["dv"] = np.zeros_like(o["key"]), np.zeros_like(o["value"])
        for name in (
            f"forward_{dtype}_{head_dim}_{mask}",
            f"backward_preprocess_{dtype}_{head_dim}",
        ):
            launch_kernel(self.directory, f"sm90_{name}", o, s)
        if o["segment_bounds"] is not None:
            ids = o["key_value_segment_ids"], o["query_segment_ids"]
            o["segment_bounds"] = oracle.segment_bounds(*ids)
        self.results = ("dq_accumulator", "dk", "dv")

    def run(self, directory: pathlib.Path, **options) -> dict[str, np.ndarray]:
        """Launches DIRECTORY/KERNEL.ptx and returns its results."""
        for name in self.results:
            # The accumulator arrives cleared; everything else must be written.
            self.operands[name].fill(0 if name == "dq_accumulator" else np.nan)
        launch_kernel(
            directory,
            self.kernel,
            self.operands,
            self.symbols,
            num_sms=self.symbols["num_sms"],
            threads=1,
            instruction_limit=self.limit,
            **options,
        )
        return {name: self.operands[name].copy() for name in self.results}

    def judge(self, ptx: str, seeds: int) -> str:
        """Who notices that ``ptx`` is not the kernel: a check's name, or "" for nobody."""
        if not self.expected:
            self.expected = self.run(self.directory, races=True)
            assert not any(np.isnan(x.astype(np.float32)).any() for x in self.expected.values())
            self.limit = 2_000_000
        with tempfile.TemporaryDirectory() as name:
            directory = pathlib.Path(name)
            (directory / f"{self.kernel}.ptx").write_text(ptx)
            (directory / f"{self.kernel}.manifest").write_text(self.manifest)
            for seed in range(seeds + 1):
                try:
                    found = self.run(directory, seed=seed, races=True)
                except EmulatorError as error:
                    return classify(str(error)) + (f" (seed {seed})" if seed else "")
                if any(found[key].tobytes() != x.tobytes() for key, x in self.expected.items()):
                    return "result" + (f" (seed {seed})" if seed else "")
        return ""


_MESSAGES = (
    ("no proxy fence", "race check, proxy"),
    ("race:", "race check"),
    ("deadlock", "deadlock"),
    ("livelock", "deadlock"),
    ("instruction limit", "deadlock"),
    ("nothing has written", "unwritten memory"),
    ("exits", "exit check"),
    ("wgmma", "wgmma check"),
    ("barrier completes", "barrier check"),
    ("exits while barrier", "barrier check"),
    ("mbarrier", "mbarrier check"),
)


def classify(message: str) -> str:
    """The check that an emulator's error comes from."""
    for pattern, check in _MESSAGES:
        if pattern in message:
            return check
    return f"other: {message.splitlines()[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="+", metavar="KERNEL")
    parser.add_argument("--bundle", type=pathlib.Path, default=BUNDLE)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    unknown = 0
    for kernel in options.kernels:
        workload = Workload(kernel, options.bundle)
        verdicts = collections.Counter()
        started = time.monotonic()
        for mutant in mutants(workload.ptx):
            verdict = workload.judge(mutant.ptx, options.seeds)
            if not verdict:
                reason = excuse(workload.operation, mutant)
                verdict = f"harmless: {reason}" if reason else "UNKNOWN"
                unknown += not reason
            verdicts[mutant.kind, verdict] += 1
            print(f"{mutant.line:5} {mutant.kind:20} {mutant.text}\n{'':26} {verdict}", flush=True)
        print(f"{kernel}: {sum(verdicts.values())} mutants, {time.monotonic() - started:.0f} s")
        for (kind, verdict), count in sorted(verdicts.items()):
            print(f"{count:5} {kind:20} {verdict}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
