"""compute-sanitizer over every Hopper kernel on a GPU: none touches memory that is not its own."""

import pathlib
import shutil
import subprocess

import pytest

from fa4_jax import bundle

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def memcheck(tmp_path_factory):
    """Runs tests/memcheck.cc under the checker: exit status and output."""
    checker, compiler = shutil.which("compute-sanitizer"), shutil.which("c++")
    if checker is None or compiler is None:
        pytest.skip("no compute-sanitizer or no C++ compiler")
    program = tmp_path_factory.mktemp("memcheck") / "memcheck"
    sources = [
        ROOT / "ffi" / f"{name}.cc" for name in ("operands", "bundle", "launch", "cuda_driver")
    ]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'ffi'}"]
    source = ROOT / "tests" / "memcheck.cc"
    subprocess.run([compiler, *flags, "-o", program, source, *sources, "-ldl"], check=True)

    def run(*arguments):
        done = subprocess.run(
            [checker, "--error-exitcode", "9", program, bundle.directory(), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return done.returncode, done.stdout

    return run


def test_no_kernel_leaves_its_arrays(memcheck):
    status, output = memcheck()
    assert status == 0, output[-4000:]
    assert "ERROR SUMMARY: 0 errors" in output
    # All of the main kernels that the bundle holds for Hopper.
    ran = {line for line in output.splitlines() if line.startswith("sm90_")}
    assert ran == {k.name for k in bundle.kernels() if k.architecture == "sm_90a"}


@pytest.mark.parametrize("operand", ["lse", "delta", "key_value_segment_ids"])
def test_the_checker_notices_an_array_that_is_too_small(memcheck, operand):
    status, output = memcheck(operand)
    assert status != 0
    assert "Invalid __global__" in output
