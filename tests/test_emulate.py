"""`python -m fa4_jax emulate`: kernels that are right, and copies of them that are not."""

import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from fa4_jax import bundle, emulate

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("built_library")]

SMALL = "--shape 1,100,100,1,1,64 --architecture sm_90a"
# Runs `main` for each argument in one process.
SCRIPT = """
import sys
from fa4_jax import emulate
for flags in sys.argv[1:]:
    print("status", emulate.main(flags.split()))
"""


def test_seeds_are_numbers_and_ranges():
    assert emulate.seeds("0,7,3-5") == [0, 7, 3, 4, 5]
    for wrong in ("", "a", "1-b", "-3"):
        with pytest.raises(ValueError, match="invalid literal"):
            emulate.seeds(wrong)


@pytest.mark.parametrize("shape", ["1,0,8,1,1,64", "1,8,8,3,2,64", "1,8"])
def test_a_shape_that_is_none_is_refused(shape, capsys):
    with pytest.raises(SystemExit):
        emulate.main(["--shape", shape])
    assert "--shape" in capsys.readouterr().err


def test_a_call_that_no_kernel_serves_is_refused_with_the_reason(capsys):
    assert emulate.main(["--shape", "1,8,8,1,1,200"]) == 1
    assert "head dimension 200" in capsys.readouterr().out


def test_neighbours_with_nearly_the_same_opcodes_have_one_role():
    softmax = {f"op{i}": 2 for i in range(9)}
    found = emulate.roles([{"ld": 1}, softmax, softmax | {"st": 1}, {"ld": 3}])
    assert [warps for warps, _ in found] == [range(1), range(1, 3), range(3, 4)]
    assert found[1][1] == collections.Counter({f"op{i}": 4 for i in range(9)} | {"st": 1})


def test_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("FA4_JAX_EMULATED_SEED", "9")
    monkeypatch.delenv("FA4_JAX_EMULATED_TRACE", raising=False)
    before = dict(os.environ)
    with emulate.environment(SEED=3, TRACE="x", ARCH=None):
        changed = {"FA4_JAX_EMULATED_SEED": "3", "FA4_JAX_EMULATED_TRACE": "x"}
        assert dict(os.environ) == before | changed
    assert dict(os.environ) == before


def test_a_right_kernel_and_its_counts(tmp_path):
    """Forward and backward, two schedules, in the report and in the file."""
    path = tmp_path / "counts.json"
    flags = f"{SMALL} --causal --backward --races --seeds 0,2 --trace {path}"
    run = [sys.executable, "-m", "fa4_jax", "emulate", *flags.split()]
    printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout

    first, second, blank, *roles = printed.splitlines()
    assert first.startswith("seed 0 ")
    assert second.startswith("seed 2 ")
    for line in (first, second):
        assert " right  " in line
        for result in emulate.RESULTS:
            assert f" {result} " in line
    assert blank == ""
    assert roles[0].startswith("sm90_forward_bf16_h64_causal, 1 CTAs, seed 0")
    assert any("warps 4-15 " in line and "max.f32 " in line for line in roles)

    launches = json.loads(path.read_text())
    assert [launch["seed"] for launch in launches] == [0] * 4 + [2] * 4
    operations = [launch["name"].removesuffix("_bf16_h64_causal") for launch in launches[:4]]
    assert operations[0] == "sm90_forward"
    assert operations[2] == "sm90_backward"
    for launch in launches:
        counted = sum(sum(warp.values()) for warp in launch["warps"])
        assert launch["warp_instructions"] == counted > 0
    total = sum(launch["warp_instructions"] for launch in launches[:4])
    assert f" {total:,} warp-instructions in " in first


@pytest.fixture
def broken(tmp_path) -> pathlib.Path:
    """A bundle whose three kernels compute something else, never arrive, and fence nothing."""
    directory = tmp_path / "bundle"
    shutil.copytree(bundle.directory(), directory, ignore=shutil.ignore_patterns("*.cubin"))
    for mask, part, instead in (
        ("full", "ex2.approx.ftz.f32", "lg2.approx.ftz.f32"),
        ("causal", "bar.arrive", "// bar.arrive"),
        ("window", "fence.proxy.async", "// fence.proxy.async"),
    ):
        path = directory / "sm_90a" / f"sm90_forward_bf16_h64_{mask}.ptx"
        text = path.read_text()
        assert part in text
        path.write_text(text.replace(part, instead))
    return directory


def test_broken_kernels_are_reported(broken):
    run = [sys.executable, "-c", SCRIPT, f"{SMALL} --bundle {broken} --seeds 0-1"]
    run += [f"{SMALL} --causal", f"{SMALL} --window 9,9 --races", f"{SMALL} --bundle {broken}"]
    printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    wrong, deadlock, race, late, rest = printed.split("status 1\n")
    assert rest == ""
    lines = wrong.splitlines()
    assert all(f"seed {seed}" in lines[seed] for seed in (0, 1))
    assert all("WRONG  out " in line for line in lines[:2])
    assert "ERROR" in deadlock
    assert "sm90_forward_bf16_h64_causal" in deadlock
    assert "deadlock" in deadlock
    assert "waits" in deadlock
    assert "ERROR" in race
    assert "no proxy fence" in race
    assert "too late" in late


@pytest.mark.parametrize("flags", ["--segments 3 --sinks", "--soft-cap 2 --dtype float16"])
def test_segments_sinks_and_a_soft_cap(flags):
    run = [sys.executable, "-c", SCRIPT, f"{SMALL} --causal {flags}"]
    printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert " right " in printed
    assert ("_segments" if "segments" in flags else "_window_capped") in printed
    assert printed.endswith("status 0\n")
