"""Eight simulated CPU devices for every test, and skips with a reason where hardware is missing."""

import importlib.util
import os
import subprocess

# Before jax is imported anywhere. The GPU backend does not look at it.
_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

# References on a GPU must not be computed in TF32.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Several workers share a GPU, so none may take it whole.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest  # noqa: E402


def _num_gpus() -> int:
    """Counts GPUs without touching jax: on a machine without any, its CUDA plugin complains."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def pytest_collection_modifyitems(items):
    num_gpus = _num_gpus()
    reasons = {
        marker: f"needs {needed} NVIDIA GPU(s), found {num_gpus}"
        for marker, needed in (("gpu", 1), ("multi_gpu", 2))
        if num_gpus < needed
    }
    if importlib.util.find_spec("cutlass") is None:
        reasons["dsl"] = "needs nvidia-cutlass-dsl"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["xla", pytest.param("fa4", marks=pytest.mark.gpu)])
def implementation(request) -> str:
    """Each implementation that this machine can run for real."""
    return request.param


@pytest.fixture(params=["single_tile", "tiled"])
def tiling(request, monkeypatch) -> str:
    """Runs `fa4_jax.xla` with one tile, and with many small ones that do not divide the lengths."""
    from fa4_jax import xla

    if request.param == "tiled":
        monkeypatch.setattr(xla, "_SINGLE_TILE_SCORES", 0)
        monkeypatch.setattr(xla, "_TILE_SCORES", 0)
        monkeypatch.setattr(xla, "_TILE_MAX", 16)
        monkeypatch.setattr(xla, "_TILE_MIN", 16)
    return request.param


@pytest.fixture(scope="session")
def built_library():
    """The native library with every target registered; skips where `make build` has not run."""
    from fa4_jax import bundle

    try:
        bundle.directory()
    except bundle.BundleError as error:
        pytest.skip(str(error))
    return bundle.library()
