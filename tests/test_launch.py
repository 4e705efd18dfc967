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

CALL = """
import pathlib, sys
import jax
import jax.numpy as jnp
from fa4_jax import bundle, custom_calls

bundle._NATIVE = pathlib.Path(sys.argv[1])
query = jax.random.normal(jax.random.key(0), (2, 100, 4, 64), jnp.bfloat16)
key = jnp.ones((2, 50, 2, 64), jnp.bfloat16)

@jax.jit
def call(query, lengths):
    return custom_calls.forward(
        query, key, key, jnp.ones(2), lengths, None, None, window_left=2**30, window_right=0
    )

for lengths in (None, jnp.array([3, 5], jnp.int32)):
    out, lse = call(query, lengths)
    print(bool((out == query).all()), float(lse.min()), float(lse.max()))
"""


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A _native directory whose bundle holds the throw-away kernel alone."""
    pytest.importorskip("cutlass")
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
def test_a_kernel_gets_its_arrays_its_numbers_and_its_grid(native, environment):
    assert run(CALL, native, **environment) == ["True 100.0 100.0", "True 300.0 300.0"]


def test_an_architecture_that_the_bundle_lacks_is_an_error_that_says_so(native):
    code = f"""
import jax
try:
    exec({CALL!r})
except jax.errors.JaxRuntimeError as error:
    print(str(error).splitlines()[0])
"""
    (line,) = run(code, native, FA4_JAX_EMULATED_ARCH="sm_100a")
    assert "no kernels for" in line
    assert "sm_100a" in line
    assert line.endswith("the bundle holds sm_90a")


def test_the_build_module_writes_the_header_that_both_readers_expect():
    assert build.MANIFEST_HEADER == bundle._MANIFEST_HEADER
