"""The benchmarks: their arithmetic, and tiny runs; a peer that cannot run says why."""

import importlib
import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("matplotlib")

PROGRAM = pathlib.Path(__file__).parent.parent / "benchmarks" / "attention.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("attention_benchmark", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def case(benchmark, **changes):
    facts = {"head_dim": 64, "length": 128, "is_causal": False, "tokens": 256, "width": 128}
    return benchmark.Case(**{**facts, "group": 1, "dtype": "bfloat16", **changes})


def test_flops(benchmark):
    """B=2, N=2, T=S=128, H=64: query key^T and probabilities times value."""
    forward = 2 * (2 * 2 * 128 * 128 * 64) * 2
    assert case(benchmark).flops("forward") == forward
    assert case(benchmark).flops("backward") == 2.5 * forward
    assert case(benchmark, is_causal=True).flops("forward") == forward / 2


def test_inputs_exceed_the_cache(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "CACHE_BYTES", 10**6)
    sets = case(benchmark, group=2).inputs()
    assert sum(x.nbytes for one in sets for x in one) > 10**6
    query, key, value, cotangent = sets[0]
    assert query.shape == cotangent.shape == (2, 128, 2, 64)
    assert key.shape == value.shape == (2, 128, 1, 64)
    assert not jnp.array_equal(query, cotangent)
    assert not jnp.array_equal(query, sets[1][0])


def test_backward_alone_is_timed(benchmark, monkeypatch):
    """A pullback that runs the forward kernel again is reported."""
    monkeypatch.setattr(
        benchmark.jax.stages.Compiled,
        "as_text",
        lambda self: 'custom_call_target="__cublas$gemm" custom_call_target="forward.v1"',
    )
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    assert benchmark.custom_calls(compiled) == {"forward.v1"}
    facts = {"error": 0.0, "backward_repeats": ["forward.v1"]}
    record = {"peer": "fa4", "direction": "backward", "tflops": 1.0, **facts}
    assert "backward also ran" in benchmark.table(case(benchmark), [record], ["fa4"], ["backward"])


def test_wrong_results_are_reported(benchmark):
    record = {"peer": "fa4", "direction": "forward", "tflops": 1.0, "error": float("nan")}
    assert "WRONG" in benchmark.table(case(benchmark), [record], ["fa4"], ["forward"])


def test_tiny_run(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "CACHE_BYTES", 1)
    flags = "--tokens 256 --width 128 --head-dims 64 --lengths 128 --masks causal --repeats 2"
    paths = {"--output": tmp_path / "plot.png", "--json": tmp_path / "result.json"}
    benchmark.main(
        [
            *flags.split(),
            *("--seconds", "0.001", "--peers", "fa3", "xla"),
            *(str(x) for pair in paths.items() for x in pair),
        ]
    )
    printed = capsys.readouterr().out
    assert "fa3: ModuleNotFoundError" in printed
    result = json.loads(paths["--json"].read_text())
    measured = {r["direction"]: r for r in result["records"] if r["peer"] == "xla"}
    assert set(measured) == {"forward", "backward"}
    for record in measured.values():
        assert record["tflops"] > 0
        assert record["error"] < 0.01
        assert record["calls"] >= 4
    assert paths["--output"].read_bytes().startswith(b"\x89PNG")


TINY = "--tokens 256 --width 128 --lengths 128 --repeats 2 --seconds 0.001 --implementation xla"


@pytest.fixture
def program(monkeypatch):
    """Imports a benchmark by name, as its neighbours do; its inputs exceed no cache."""
    monkeypatch.syspath_prepend(PROGRAM.parent)
    monkeypatch.setattr(importlib.import_module("attention"), "CACHE_BYTES", 1)
    return importlib.import_module


def test_features(program, capsys):
    flags = [*TINY.split(), "--masks", "causal", "--head-dims", "64"]
    records = program("features").main(flags)
    assert [r["direction"] for r in records] == ["forward", "backward"]
    assert set(records[0]["ratios"]) == {"window", "segments", "soft cap", "sinks"}
    assert all(ratio > 0 for r in records for ratio in r["ratios"].values())
    assert "soft cap" in capsys.readouterr().out


def test_scaling(program):
    """By batch: simulated devices cannot have several collectives in flight."""
    flags = [*TINY.split(), "--devices", "2", "--head-dim", "64", "--axes", "batch"]
    records = program("scaling").main(flags)
    assert [r["case"] for r in records] == ["H64 S128 full", "H64 S128 causal"]
    assert all(r["ratio"] == r["ms"][1] / r["ms"][2] for r in records)
