"""Kernels of other projects, unmodified, on the emulator: see peers/capture.py.

FA4_JAX_PEERS_PYTHON: a Python, this one if unset, with flash-attn-4 (4.0.0b36 was tried),
nvidia-cutlass-dsl[cu13], torch (2.13.0, a build for the CPU), triton and ml_dtypes.
FA4_JAX_CUTE_EXAMPLES: the folder examples/python/CuTeDSL of CUTLASS.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.peers, pytest.mark.emulator, pytest.mark.slow]

_HERE = pathlib.Path(__file__).resolve().parent / "peers"
_PYTHON = os.environ.get("FA4_JAX_PEERS_PYTHON", sys.executable)


# Prints which of its arguments are not installed.
_MISSING = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        print(name)
"""


def _require(*packages: str) -> None:
    """Skips where the Python lacks one of these."""
    command = [_PYTHON, "-c", _MISSING, *packages]
    missing = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if missing:
        pytest.skip(f"{_PYTHON} has no {', '.join(missing)}; set FA4_JAX_PEERS_PYTHON")


class _Server:
    """A script of peers/, which answers requests one by one."""

    def __init__(self, script: str, arguments: list[str], log: pathlib.Path):
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [_PYTHON, str(_HERE / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def ask(self, request: dict) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the program ended:\n{self.log.read_text()[-3000:]}"
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """serve(script, *arguments): a server with a folder of its own, for this module's tests."""
    servers: dict[tuple[str, ...], _Server] = {}

    def get(script: str, *arguments: str) -> _Server:
        key = script, *arguments
        if key not in servers:
            folder = tmp_path_factory.mktemp("peers")
            servers[key] = _Server(script, [*arguments, str(folder)], folder / "log")
        return servers[key]

    yield get
    for server in servers.values():
        server.close()


_DEFAULTS = {
    "batch": 1,
    "query_length": 256,
    "key_length": 256,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 128,
    "causal": False,
    "window": [None, None],
    "deterministic": False,
    "backward": False,
    "pairs": 0,
}
_RUNS = [{}, {"races": True}, {"seed": 1}, {"seed": 2, "races": True}]
_BOTH = {"backward": True}
_UNEQUAL = {"query_length": 384, "key_length": 512}
_CAUSAL = {"query_length": 512, "key_length": 512, "causal": True}
_WINDOW = {**_UNEQUAL, "window": [100, 30]}

# Requests by name, which begins with the architecture. `pairs`: launches of clusters of two CTAs.
_CASES = {
    "sm_100a-h128-full": {**_UNEQUAL, **_BOTH, "pairs": 2},
    "sm_100a-h128-causal": {**_CAUSAL, **_BOTH, "pairs": 1},
    "sm_100a-h128-full-deterministic": {**_UNEQUAL, **_BOTH, "deterministic": True, "pairs": 2},
    "sm_100a-h128-causal-deterministic": {**_CAUSAL, **_BOTH, "deterministic": True, "pairs": 1},
    "sm_100a-h64-full": {**_UNEQUAL, **_BOTH, "head_dim": 64},
    "sm_100a-h64-causal": {**_CAUSAL, **_BOTH, "head_dim": 64},
    "sm_100a-h128-grouped": {**_BOTH, "num_heads": 4, "causal": True, "pairs": 1},
    "sm_100a-h128-window": {**_WINDOW, **_BOTH, "pairs": 1},
    "sm_103a-h128-full": {**_UNEQUAL, "pairs": 1},
    "sm_103a-h128-causal": _CAUSAL,
    "sm_90a-h128-full": {**_UNEQUAL, **_BOTH},
    "sm_90a-h128-causal": {**_CAUSAL, **_BOTH},
    "sm_90a-h64-grouped": {**_BOTH, "num_heads": 4, "head_dim": 64},
    "sm_90a-h128-window": {**_WINDOW, **_BOTH},
}


@pytest.mark.parametrize("case", _CASES)
def test_flash_attention_4(case, serve):
    """Within twice the error of a 16-bit computation, under every schedule, and without a race."""
    _require("flash-attn-4", "nvidia-cutlass-dsl", "torch", "triton")
    request = {**_DEFAULTS, **_CASES[case], "runs": _RUNS}
    runs = serve("attention.py", case.partition("-")[0]).ask(request)["runs"]

    num_kernels = 1 + 3 * request["backward"]
    for run, options in zip(runs, _RUNS, strict=True):
        assert len(run["launches"]) >= num_kernels
        assert sum(launch["cluster"][0] == 2 for launch in run["launches"]) == request["pairs"]
        for name, error in run["errors"].items():
            assert error <= run["bounds"][name], f"{name} of {options}: {error}"
    # What is summed in a fixed order has the same bits under every schedule. Only dq is added up in
    # memory, and dk and dv where several query heads share one key head.
    fixed = ["out"]
    if request["backward"]:
        grouped = request["num_heads"] != request["num_kv_heads"]
        fixed += [] if grouped and not request["deterministic"] else ["dk", "dv"]
        fixed += ["dq"] if request["deterministic"] else []
    for name in fixed:
        assert len({run["digests"][name] for run in runs}) == 1, name


@pytest.mark.parametrize(("tutorial", "cluster"), [("nvfp4_gemm_0", 1), ("nvfp4_gemm_1", 2)])
def test_nvfp4_gemm(tutorial, cluster, serve):
    """The exact product of the quantized values, rounded once: half a unit in the last place."""
    examples = os.environ.get("FA4_JAX_CUTE_EXAMPLES")
    if examples is None:
        pytest.skip("FA4_JAX_CUTE_EXAMPLES is not set")
    _require("nvidia-cutlass-dsl", "torch", "apache-tvm-ffi", "ml_dtypes")
    request = {"m": 512, "n": 512, "k": 512, "runs": _RUNS}
    for run in serve("nvfp4.py", examples, tutorial).ask(request)["runs"]:
        assert [launch["cluster"] for launch in run["launches"]] == [[cluster, 1, 1]]
        assert run["error"] <= 0.51
