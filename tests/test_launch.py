"""From a traced kernel to its results: build, manifest, handler, launcher and emulator together.

With a throw-away kernel whose results are plain, so that a failure here is one of the path.
"""

import pathlib
import shutil
import subprocess
import sys

import pytest

from fa4_jax import bundle
from kernels import build

pytestmark = [pytest.mark.dsl, pytest.mark.emulator, pytest.mark.usefixtures("built_library")]

TESTS = pathlib.Path(__file__).parent

COMPILE = """
import pathlib, sys
import tiny_kernel
from kernels import build, compile

output = pathlib.Path(sys.argv[1], "bundle")
(output / "sm_90a").mkdir(parents=True)
cubin, ptx, manifest = compile.compile_kernel(tiny_kernel.Tiny())
(output / "manifest.txt").write_text(build.MANIFEST_HEADER + "\\n\\n" + manifest)
(output / "sm_90a" / "tiny_forward.cubin").write_bytes(cubin)
(output / "sm_90a" / "tiny_forward.ptx").write_text(ptx)
"""

# Prints the largest deviation of out and lse from what the kernel computes, call by call.
CALL = """
import pathlib, sys
import jax
import jax.numpy as jnp
import numpy as np
from fa4_jax import bundle, custom_calls

bundle._NATIVE = pathlib.Path(sys.argv[1])

def call(T, N, K, lengths=None, ids=None, sinks=None, cap=0.0):
    B, S = 2, 50
    query = jax.random.normal(jax.random.key(0), (B, T, N, 64), jnp.bfloat16)
    key = jnp.ones((B, S, K, 64), jnp.bfloat16)
    lengths, ids, sinks = (None if x is None else jnp.asarray(x) for x in (lengths, ids, sinks))
    if ids is not None:
        segments = (ids, jnp.zeros((B, S), jnp.int32), jnp.zeros((B, -(-T // 64), 4), jnp.int32))
    else:
        segments = (None,) * 3

    @jax.jit
    def attend(query, lengths, sinks):
        return custom_calls.forward(
            query, key, key, jnp.ones(B), lengths, None, None, *segments, sinks,
            window_left=2**30, window_right=0, logits_soft_cap=cap
        )

    out, lse = attend(query, lengths, sinks)
    expected = (1 if lengths is None else lengths[0]) * T + cap
    expected = expected + (0 if sinks is None else sinks[:, None, :])
    expected = expected + (0 if ids is None else ids[:, :, None])
    print(bool((out == query).all()), float(abs(lse - expected).max()))
"""

PLAIN = """
call(100, 4, 2)
call(100, 4, 2, lengths=np.int32([3, 5]), cap=0.5)
call(130, 4, 4, ids=np.arange(260, dtype=np.int32).reshape(2, 130))
call(100, 4, 2, sinks=np.float32([[1, 2, 3, 4], [5, 6, 7, 8]]))
"""

PACKED = """
everything = dict(lengths=np.int32([3, 5]), sinks=np.arange(24, dtype=np.float32).reshape(2, 12))
for T in (1, 31, 33, 65):  # packs of 4, 4, 2 and 1 of the 4 heads of a kv head
    call(T, 12, 3, ids=np.arange(2 * T, dtype=np.int32).reshape(2, T), cap=7.0, **everything)
"""


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A _native directory whose bundle holds the throw-away kernel alone."""
    path = tmp_path_factory.mktemp("native")
    shutil.copy(bundle.directory().parent / "libfa4_jax.so", path)
    run(COMPILE, path, CUTE_DSL_ARCH="sm_90a")
    return path


def run(code, path, **environment):
    """Runs code on ``path`` in a process of its own: a library opens one bundle only."""
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        env={
            "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
            "JAX_PLATFORMS": "cpu",
            "PATH": "/usr/bin:/bin",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("environment", [{}, {"FA4_JAX_EMULATED_SEED": "3"}])
@pytest.mark.parametrize("calls", [PLAIN, PACKED])
def test_a_kernel_gets_its_arrays_its_numbers_and_its_grid(native, calls, environment):
    assert run(CALL + calls, native, **environment) == ["True 0.0"] * 4


def test_an_architecture_that_the_bundle_lacks_is_an_error_that_says_so(native):
    line = error_of("call(100, 4, 2)", native, FA4_JAX_EMULATED_ARCH="sm_100a")
    assert "no kernels for" in line
    assert "sm_100a" in line
    assert line.endswith("the bundle holds sm_90a")


def test_an_operation_that_the_bundle_lacks_is_an_error_that_says_so(native):
    line = error_of(
        """
x, rows, scale = jnp.ones((1, 8, 2, 64), jnp.bfloat16), jnp.ones((1, 8, 2)), jnp.ones(1)
bundle.library()
jax.block_until_ready(custom_calls.backward(
    x, x, x, x, rows, x, None, scale, *(None,) * 6,
    window_left=2**30, window_right=0, logits_soft_cap=2.0
))
""",
        native,
        FA4_JAX_EMULATED_ARCH="sm_90a",
    )
    assert line.endswith(
        "fa4_jax: PTX emulator: no sm_90a kernel for backward_preprocess of bf16, head dim 64, "
        "mask window, logits capped; the bundle holds none for this operation, only for forward"
    )


def error_of(calls, native, **environment):
    """The first line of what XLA reports."""
    code = f"""
{CALL}
try:
    exec({calls!r})
except jax.errors.JaxRuntimeError as error:
    print(str(error).splitlines()[0])
"""
    (line,) = run(code, native, **environment)
    return line


def test_the_build_module_writes_the_header_that_both_readers_expect():
    assert build.MANIFEST_HEADER == bundle._MANIFEST_HEADER
