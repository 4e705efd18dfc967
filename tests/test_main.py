"""`python -m fa4_jax`: info, check, and the dispatch between them."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import fa4_jax
from fa4_jax import __main__ as program
from fa4_jax import bundle, check, implementations, info

KERNELS = (
    bundle.KernelInfo("f_bf16", "sm_90a", "forward", {"dtype": "bf16"}, 384, 168, 1000),
    bundle.KernelInfo("f_f16", "sm_90a", "forward", {"dtype": "f16"}, 384, 168, 1000),
    bundle.KernelInfo("b_f16", "sm_90a", "backward", {"dtype": "f16"}, 256, 240, 2000),
)
SHAPE = (2, 64, 96, 4, 2, 64)


class Gpu:
    platform = "gpu"
    device_kind = "NVIDIA H200"
    compute_capability = "9.0"


@pytest.fixture
def built(monkeypatch):
    monkeypatch.setattr(bundle, "kernels", lambda: KERNELS)
    monkeypatch.setattr(bundle, "directory", lambda: None)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    return Gpu


@pytest.fixture
def missing(monkeypatch):
    def raise_error():
        raise bundle.BundleError("not built")

    monkeypatch.setattr(bundle, "kernels", raise_error)
    monkeypatch.setattr(bundle, "directory", raise_error)


def test_usage(capsys):
    assert program.main(["--help"]) == 0
    assert "info" in capsys.readouterr().out
    for wrong in ([], ["nonsense"]):
        assert program.main(wrong) == 2
        assert "info" in capsys.readouterr().err


def test_every_command_exists(capsys):
    for name in program.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            program.main([name, "--help"])
        assert stopped.value.code == 0
        assert f"python -m fa4_jax {name}" in capsys.readouterr().out


def test_info_as_a_program():
    run = [sys.executable, "-m", "fa4_jax", "info"]
    printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert f"jax {jax.__version__}" in printed
    assert jax.devices()[0].device_kind in printed
    assert "attention is computed by" in printed


@pytest.mark.usefixtures("built")
def test_bundle_summary_and_table():
    assert info.bundle_summary().splitlines() == [
        "sm_90a forward: 2 kernels (dtype bf16 f16)",
        "sm_90a backward: 1 kernels (dtype f16)",
    ]
    lines = info.kernel_table().splitlines()
    assert [line.split()[0] for line in lines] == ["f_bf16", "f_f16", "b_f16"]
    assert "240 registers" in lines[2]


@pytest.mark.usefixtures("missing")
def test_missing_bundle_is_a_reason(capsys):
    call = info.call(SHAPE, "bfloat16")
    assert "not built" in info.refusals(*call)["fa4"]
    assert "not built" in info.refusals(*call)["emulated"]
    assert info.main(["--kernels"]) == 0
    assert "not built" in capsys.readouterr().out


@pytest.mark.usefixtures("built", "gpu")
def test_kernels_serve_on_a_gpu_of_the_bundle():
    why = info.refusals(*info.call(SHAPE, "bfloat16", is_causal=True))
    assert why["fa4"] == ()
    assert why["xla"] == ()
    assert any("CPU" in reason for reason in why["emulated"])
    name, account = info.explain(*info.call(SHAPE, "float16"))
    assert name == "fa4"
    assert "compute capability 9.0" in account


@pytest.mark.parametrize("capability", ["8.0", "9.1", "10.0"])
@pytest.mark.usefixtures("built")
def test_other_gpu(gpu, monkeypatch, capability):
    monkeypatch.setattr(gpu, "compute_capability", capability)
    name, account = info.explain(*info.call(SHAPE, "bfloat16"))
    assert name == "xla"
    assert f"compute capability {capability}, the bundle holds sm_90a" in account


@pytest.mark.usefixtures("built")
def test_default_choice_on_another_gpu_is_xla(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "compute_capability", "8.0")
    operands = jax.ShapeDtypeStruct((1, 16, 2, 64), jnp.bfloat16)
    with pytest.warns(UserWarning, match=r"compute capability 8\.0"):
        lowered = jax.jit(fa4_jax.dot_product_attention).trace(operands, operands, operands)
    assert "fa4_jax.forward" not in str(lowered.jaxpr)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="this process has a GPU")
@pytest.mark.usefixtures("built")
def test_cpu():
    name, account = info.explain(*info.call(SHAPE, "bfloat16"))
    assert name == "xla"
    assert "the default device is a cpu" in account
    assert info.explain(*info.call(SHAPE, "bfloat16"), "emulated")[0] == "emulated"
    name, account = info.explain(*info.call(SHAPE, "bfloat16"), "fa4")
    assert name is None
    assert account.startswith("implementation='fa4' cannot serve this call\n")


def test_call_is_the_one_that_dot_product_attention_makes(monkeypatch):
    """The flags of `info` describe what the public function hands to `implementations`."""

    B, T, S, N, K, H = SHAPE
    made = []

    def attend(spec, operands, implementation):
        made.append((spec, operands))
        return jnp.zeros((B, T, N, 32)), jnp.zeros((B, T, N))

    monkeypatch.setattr(implementations, "attend", attend)
    fa4_jax.dot_product_attention(
        jnp.ones((B, T, N, H), jnp.bfloat16),
        jnp.ones((B, S, K, H), jnp.bfloat16),
        jnp.ones((B, S, K, 32), jnp.bfloat16),
        bias=jnp.ones((B, N, T, S)),
        mask=jnp.ones((B, 1, T, S), bool),
        is_causal=True,
        local_window_size=(5, 3),
        query_seq_lengths=jnp.ones(B, int),
        key_value_seq_lengths=jnp.ones(B, int),
        query_offset=3,
        query_segment_ids=jnp.ones((B, T), int),
        key_value_segment_ids=jnp.ones((B, S), int),
        sinks=jnp.ones(N),
        logits_soft_cap=2.0,
        deterministic=True,
    )
    spec, operands = info.call(
        SHAPE,
        "bfloat16",
        value_dim=32,
        is_causal=True,
        window=(5, 3),
        logits_soft_cap=2.0,
        deterministic=True,
        arrays=info.ARRAYS,
    )
    ((actual_spec, actual),) = made
    assert spec == actual_spec
    types = jax.tree.map(lambda x: (x.shape, x.dtype), operands)
    assert types == jax.tree.map(lambda x: (x.shape, x.dtype), actual)


def test_info_describes_the_call_of_its_flags(capsys):
    flags = "--shape 1,8,8,2,1,200 --dtype float32 --soft-cap 3 --arrays bias sinks --window 1,0"
    assert info.main(flags.split()) == 0
    printed = capsys.readouterr().out
    for reason in ("bias", "float32", "head dimension 200"):
        assert reason in printed
    for served in ("sinks: ", "soft_cap="):
        assert served not in printed


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--shape", "1,2,3"),
        ("--shape", "1,8,8,3,2,64"),
        ("--shape", "1,8,8,2,0,64"),
        ("--dtype", "int8"),
        ("--quantization", "fp3"),
    ],
)
def test_info_refuses_flags_of_no_call(flag, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        info.main([flag, value])
    assert stopped.value.code == 2
    assert f"argument {flag}" in capsys.readouterr().err


def test_check(monkeypatch, capsys):
    monkeypatch.setattr(
        info, "refusals", lambda *_: {"fa4": ("no GPU",), "xla": (), "emulated": ("no library",)}
    )
    monkeypatch.setattr(implementations, "KERNEL_DTYPES", ("float16",))
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 3
    assert "cannot run here: no GPU" in lines[0]
    for result in check.RESULTS:
        assert f"{result} " in lines[1]
    assert "right" in lines[1]


@pytest.fixture(scope="module")
def results():
    """What `check` computes for one implementation: exact, dense, and found, here by XLA."""
    run, made = check._run, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_run", lambda *args: made.append(run(*args)) or made[-1])
        check.errors("xla", "bfloat16")
    return made


@pytest.mark.parametrize("result", check.RESULTS)
@pytest.mark.parametrize("factor", [0.0, 1.05, float("nan")])
def test_check_finds_a_wrong_result(monkeypatch, capsys, results, result, factor):
    """Each of output and gradients, when it is zero, slightly too large, or not a number."""
    exact, dense, found = results
    wrong = [
        x * factor if name == result else x for name, x in zip(check.RESULTS, found, strict=True)
    ]
    computed = iter([exact, dense, wrong])
    monkeypatch.setattr(check, "_run", lambda *_: next(computed))
    monkeypatch.setattr(info, "refusals", lambda *_: {"xla": ()})
    monkeypatch.setattr(implementations, "KERNEL_DTYPES", ("bfloat16",))
    assert check.main([]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.gpu
def test_check_on_a_gpu(capsys):
    assert check.main([]) == 0
    printed = capsys.readouterr().out
    for dtype in implementations.KERNEL_DTYPES:
        assert f"{'fa4':<9}{dtype:<9} right" in printed
