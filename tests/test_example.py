"""The example trains: a tiny run in this process."""

import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest

for needed in ("flax", "optax", "matplotlib"):
    pytest.importorskip(needed)

ROOT = pathlib.Path(__file__).parent.parent
SIZE = {"layers": 1, "heads": 2, "kv_heads": 1, "length": 32, "batch": 4, "rate": 0.01}
TINY = [x for name, value in SIZE.items() for x in (f"--{name}", str(value))]


def load(path: pathlib.Path):
    """Imports a program that is no module of the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    return load(ROOT / "examples" / "train_char_lm.py")


def test_loss_falls(example, tmp_path, capsys):
    plot = tmp_path / "new" / "loss.png"
    curves = example.main(
        [*TINY, "--steps", "60", "--implementation", "xla", "--output", str(plot)]
    )
    (losses,) = curves.values()
    assert list(curves) == ["xla"]
    assert losses.shape == (60,)
    assert 5.3 < losses[0] < 5.8  # ln 256 = 5.55: uniform over bytes
    assert losses[-10:].mean() < 3.6
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "attention is computed by 'xla'" in printed
    assert "60/60" in printed
    assert example.PROMPT.decode() in printed


def test_implementation_that_cannot_serve_says_why(example, monkeypatch, tmp_path):
    """Also what --compare does on a machine that cannot run the kernels, before it trains."""
    monkeypatch.setattr(
        example.info, "refusals", lambda *_: {"fa4": ("no such GPU",), "xla": (), "emulated": ()}
    )
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("trains"))
    for chosen in (["--implementation", "fa4"], ["--compare"]):
        with pytest.raises(SystemExit, match="no such GPU"):
            example.main([*TINY, "--steps", "1", *chosen, "--output", str(tmp_path / "p")])


def test_implementation_that_there_is_not(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--implementation", "cudnn"])
    assert "'fa4', 'xla', 'emulated'" in capsys.readouterr().err


def test_a_single_step(example, tmp_path):
    assert losses_on(example, 1, 1, tmp_path / "p", "--implementation", "xla").shape == (1,)


def test_compare(example, monkeypatch, tmp_path, capsys):
    """Two curves from the same seeds. Here XLA stands in for the kernels, so they are equal."""
    attention_fn = example.fa4_jax.flax.attention_fn
    monkeypatch.setattr(
        example.fa4_jax.flax,
        "attention_fn",
        lambda *args, implementation, **kwargs: attention_fn(*args, implementation="xla", **kwargs),
    )
    monkeypatch.setattr(example.info, "explain", lambda *call: (call[-1], f"uses {call[-1]}"))
    plot = tmp_path / "loss.png"
    curves = example.main([*TINY, "--steps", "3", "--compare", "--output", str(plot)])
    assert list(curves) == ["xla", "fa4"]
    np.testing.assert_array_equal(curves["xla"], curves["fa4"])
    assert "largest difference of the losses: 0.0000" in capsys.readouterr().out
    assert plot.exists()


def losses_on(example, devices: int, steps: int, plot: pathlib.Path, *more: str) -> np.ndarray:
    """Of a run whose batch is split over some devices."""
    arguments = [*TINY, "--steps", str(steps), "--devices", str(devices), "--output", str(plot)]
    (losses,) = example.main([*arguments, *more]).values()
    return losses


def test_data_parallel(example, tmp_path):
    """Four devices with a batch entry each; only the order of the sums over the batch differs."""
    one, four = (
        losses_on(example, devices, 8, tmp_path / "p", "--implementation", "xla")
        for devices in (1, 4)
    )
    np.testing.assert_allclose(four, one, atol=0.02)


@pytest.mark.parametrize("devices", [0, 3, 16])
def test_devices_that_cannot_share_the_batch_are_refused(example, devices, tmp_path):
    with pytest.raises(SystemExit, match=f"--devices {devices}"):
        losses_on(example, devices, 1, tmp_path / "p")


@pytest.mark.slow
def test_compare_with_quantization(example, tmp_path):
    """The quantised training route against the exact one, from the same seeds."""
    chosen = ["--steps", "20", "--compare", "--quantization", "nvfp4_fp8"]
    curves = example.main([*TINY, *chosen, "--output", str(tmp_path / "loss.png")])
    exact, quantized = curves.values()
    assert list(curves) == ["xla", "xla nvfp4_fp8"]
    assert (quantized != exact).any()
    assert abs(quantized[-5:].mean() - exact[-5:].mean()) < 0.1


def test_sample_reads_the_bytes_before(example):
    """Each byte follows from the one before it, inside the context and beyond it."""

    def next_letter(tokens):
        return 1e4 * jax.nn.one_hot(tokens + 1, example.VOCABULARY)

    sampled = example.sample(
        jax.tree_util.Partial(next_letter), b"xab", count=9, context=5, key=jax.random.key(0)
    )
    assert sampled == b"xabcdefghijk"


@pytest.mark.gpu
def test_compare_on_a_gpu(example, tmp_path, capsys):
    """The kernels and XLA train alike; rounding moves the losses apart only slowly."""
    curves = example.main(
        [*TINY, "--steps", "40", "--compare", "--output", str(tmp_path / "loss.png")]
    )
    assert "attention is computed by 'fa4': the bundle's cubins" in capsys.readouterr().out
    np.testing.assert_allclose(curves["fa4"][:10], curves["xla"][:10], atol=0.01)
    np.testing.assert_allclose(curves["fa4"], curves["xla"], atol=0.1)


@pytest.mark.multi_gpu
def test_data_parallel_on_two_gpus(example, tmp_path):
    """The kernels in a training step whose batch is split over two GPUs: the losses of one GPU."""
    one, two = (losses_on(example, devices, 40, tmp_path / "p") for devices in (1, 2))
    np.testing.assert_allclose(two[:10], one[:10], atol=0.01)
    np.testing.assert_allclose(two, one, atol=0.1)
