"""The wheel: one file for every CPython, complete, importable with nothing but JAX and NumPy."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.package, pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel with this environment's tools; kernels come from the build's cache."""
    for module in ("build", "scikit_build_core", "cutlass"):
        pytest.importorskip(module)
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    output = tmp_path_factory.mktemp("dist")
    tools = pathlib.Path(sys.executable).parent
    done = subprocess.run(
        [tools / "pyproject-build", "--wheel", "--no-isolation", "--outdir", output, ROOT],
        env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (path,) = output.glob("*.whl")
    return path


def test_the_tag_names_no_python_version(wheel):
    assert re.fullmatch(r"fa4_jax_ffi-[\d.]+-py3-none-(many)?linux\w+\.whl", wheel.name)


def test_the_wheel_is_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        manifest = archive.read("fa4_jax/_native/bundle/manifest.txt").decode()
    for kernel, architecture in re.findall(r"^kernel (\w+)\narchitecture (\w+)$", manifest, re.M):
        for suffix in (".cubin", ".ptx"):
            assert f"fa4_jax/_native/bundle/{architecture}/{kernel}{suffix}" in names
    for path in [*(ROOT / "fa4_jax").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        name = str(path.relative_to(ROOT))
        assert re.sub(r"^kernels/", "fa4_jax/kernels/", name) in names
    assert "fa4_jax/_native/libfa4_jax.so" in names
    assert not any("__pycache__" in name for name in names)


def test_the_wheel_works_with_jax_and_numpy_alone(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # What `pip install` would bring, linked from this environment instead of downloaded again.
    for name in ("jax", "jaxlib", "ml_dtypes", "numpy", "numpy.libs", "opt_einsum", "scipy"):
        for path in sys.path:
            installed = pathlib.Path(path) / name
            if path.endswith("site-packages") and installed.is_dir():
                (site / name).symlink_to(installed)
                break
    done = subprocess.run(
        [python, "-c", WITHOUT_THE_DSL],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("sm_90a", "sm_100a", "sm_103a"),
        *("(2,", "16,", "4,", "64)"),
        "fa4_jax.forward.v1",
    ]


WITHOUT_THE_DSL = """
import importlib.util
import re

assert importlib.util.find_spec("cutlass") is None
assert importlib.util.find_spec("flax") is None

import jax
import jax.numpy as jnp
import fa4_jax
from fa4_jax import bundle

x = jnp.ones((2, 16, 4, 64), jnp.bfloat16)
assert "site-packages" in fa4_jax.__file__
attend = jax.jit(lambda x: fa4_jax.dot_product_attention(x, x, x, implementation="fa4"))
text = attend.trace(x).lower(lowering_platforms=("cuda",)).as_text()
print(*bundle.architectures(), jax.eval_shape(attend, x).shape)
print(*set(re.findall("fa4_jax[.]forward[.]v1", text)))
"""
