"""Finding, reading and registering the native part."""

import subprocess
import sys
import textwrap

import pytest

from fa4_jax import bundle

MANIFEST = """\
fa4_jax-bundle 1

kernel sm90_forward_bf16_h128_causal
architecture sm_90a
operation forward
entry mangled
select dtype bf16
select head_dim 128
select mask causal
select logits plain
threads 384
cluster 1 1 1
shared 231424
registers 168
grid T/128*N*B
param tensor_map query box 64 1 128 1 swizzle 128
param pointer lse

kernel sm100_backward_preprocess
architecture sm_100a
operation backward_preprocess
entry other
threads 128
cluster 1 1 1
shared 0
registers 32
grid Tp/128*N*B
"""


@pytest.fixture
def native(monkeypatch, tmp_path):
    """An empty stand-in for the package's _native directory."""
    monkeypatch.setattr(bundle, "_NATIVE", tmp_path)
    monkeypatch.setattr(bundle, "_library", None)
    return tmp_path


@pytest.fixture
def built(native):
    """A stand-in that holds MANIFEST and a library that is none."""
    (native / "bundle").mkdir()
    (native / "bundle" / "manifest.txt").write_text(MANIFEST)
    (native / "libfa4_jax.so").touch()
    return native


def run_python(code):
    """Runs code in a fresh interpreter and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_lists_the_manifest(built):
    forward, preprocess = bundle.kernels()
    assert forward == bundle.KernelInfo(
        name="sm90_forward_bf16_h128_causal",
        architecture="sm_90a",
        operation="forward",
        select={"dtype": "bf16", "head_dim": "128", "mask": "causal", "logits": "plain"},
        threads=384,
        registers=168,
        shared=231424,
    )
    assert preprocess.operation == "backward_preprocess"
    assert preprocess.select == {}
    assert bundle.architectures() == ("sm_90a", "sm_100a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "manifest line 1: expected 'fa4_jax-bundle 1', found ''"),
        ("fa4_jax-bundle 2\n", "found 'fa4_jax-bundle 2'"),
        (MANIFEST.replace("threads 384\n", ""), "line 3: the kernel has no 'threads' line"),
        (MANIFEST.replace("registers 32", "registers few"), "line 19: .*'few'"),
    ],
)
def test_a_bad_manifest_is_refused(text, message):
    with pytest.raises(bundle.BundleError, match=message):
        bundle.parse_manifest(text)


@pytest.mark.parametrize("missing", ["libfa4_jax.so", "bundle/manifest.txt"])
def test_what_is_not_built_is_named_with_the_remedy(built, missing):
    (built / missing).unlink()
    for ask in (bundle.directory, bundle.kernels, bundle.architectures, bundle.library):
        with pytest.raises(bundle.BundleError, match=rf"{missing} does not exist.*`make build`"):
            ask()


def test_import_loads_and_registers_nothing():
    loaded = run_python(
        """
        import jax
        registered = []
        jax.ffi.register_ffi_target = lambda name, *_, **__: registered.append(name)
        import fa4_jax, fa4_jax.custom_calls
        with open("/proc/self/maps") as maps:
            files = {line.split("/")[-1].strip() for line in maps if "/" in line}
        print(registered, sorted(f for f in files if f.startswith(("libfa4", "libcuda"))))
        """
    )
    assert loaded == "[] []"


@pytest.mark.usefixtures("built_library")
def test_eight_threads_register_each_target_once_per_platform():
    registered = run_python(
        """
        import threading
        import jax
        from fa4_jax import bundle
        registered = []
        real = jax.ffi.register_ffi_target
        def register(name, handlers, platform):
            registered.append(f"{name} {platform} {sorted(handlers)}")
            real(name, handlers, platform=platform)
        jax.ffi.register_ffi_target = register
        barrier = threading.Barrier(8)
        libraries = []
        def use():
            barrier.wait()
            libraries.append(bundle.library())
        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(libraries) == 8 and len(set(map(id, libraries))) == 1
        print("\\n".join(registered))
        """
    )
    assert registered.splitlines() == [
        "fa4_jax.forward.v1 CUDA ['execute', 'initialize']",
        "fa4_jax.forward.v1 cpu ['execute']",
        "fa4_jax.backward.v1 CUDA ['execute', 'initialize']",
        "fa4_jax.backward.v1 cpu ['execute']",
    ]


@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize("installed", [True, False])
def test_the_library_says_what_is_wrong_with_a_bundle(tmp_path, installed):
    directory = tmp_path / ("bundle" if installed else "another")
    directory.mkdir()
    (directory / "manifest.txt").write_text(MANIFEST.replace("grid T/128", "grid T/x"))
    error = run_python(
        f"""
        import pathlib, shutil
        from fa4_jax import bundle
        shutil.copy(bundle._NATIVE / "libfa4_jax.so", {str(tmp_path)!r})
        bundle._NATIVE = pathlib.Path({str(tmp_path)!r})
        try:
            bundle.library({None if installed else str(directory)!r})
        except bundle.BundleError as error:
            print(error)
        """
    )
    expected = "manifest line 15: cannot read 'grid T/x*N*B'"
    assert error == f"{directory}/manifest.txt: {expected}"
