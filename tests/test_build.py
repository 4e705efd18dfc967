"""The kernels' declarations, what the build checks of compiled code, and the bundle it writes."""

import dataclasses
import os
import pathlib
import subprocess

import pytest

from fa4_jax import bundle
from kernels import abi, artifacts, build

SPEC = abi.KernelSpec(
    name="sm90_forward_bf16_h128_causal",
    architecture="sm_90a",
    operation="forward",
    select={"dtype": "bf16", "head_dim": 128, "mask": "causal", "logits": "plain"},
    threads=384,
    cluster=(2, 1, 1),
    grid=("T/128", "N", "B", 2),
    ctas_per_sm=1,
    params=(
        abi.TensorMap("query", box=(64, 1, 128, 1), swizzle=128),
        abi.Pointer("lse"),
        abi.S32("window_left"),
        abi.F32("logits_soft_cap"),
    ),
)

# --- Declarations ---------------------------------------------------------------------------------


def test_a_packed_map_is_marked_in_the_manifest():
    packed = abi.TensorMap("query", box=(64, 1, 128, 1), swizzle=128, packed=True)
    spec = dataclasses.replace(SPEC, params=(packed,), grid=("packed_T/256", "packed_N", "B"))
    manifest = spec.to_manifest(entry="mangled", registers=168, shared=1024)
    assert "param tensor_map query box 64 1 128 1 swizzle 128 packed\n" in manifest


def test_manifest_block():
    assert SPEC.to_manifest(entry="mangled", registers=168, shared=1024) == (
        "kernel sm90_forward_bf16_h128_causal\n"
        "architecture sm_90a\n"
        "operation forward\n"
        "entry mangled\n"
        "select dtype bf16\n"
        "select head_dim 128\n"
        "select mask causal\n"
        "select logits plain\n"
        "threads 384\n"
        "cluster 2 1 1\n"
        "shared 1024\n"
        "registers 168\n"
        "grid T/128*N*B*2 limit num_sms*1\n"
        "param tensor_map query box 64 1 128 1 swizzle 128\n"
        "param pointer lse\n"
        "param s32 window_left\n"
        "param f32 logits_soft_cap\n"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Forward"}, "name is not"),
        ({"architecture": "hopper"}, "architecture 'hopper'"),
        ({"operation": "sideways"}, "operation 'sideways'"),
        ({"select": {"dtype": "f64"}}, "select dtype has the bad value 'f64'"),
        ({"select": {"mask": "segment"}}, "select mask has the bad value 'segment'"),
        ({"select": {"logits": "soft"}}, "select logits has the bad value 'soft'"),
        ({"select": {"colour": "red"}}, "select key 'colour'"),
        ({"threads": 100}, "threads 100"),
        ({"threads": 2048}, "threads 2048"),
        ({"cluster": (3, 1, 1)}, "cluster"),
        ({"cluster": (1, 2, 1)}, "cluster"),
        ({"grid": ()}, "grid has no factor"),
        ({"grid": ("T%128",)}, "grid factor 'T%128'"),
        ({"grid": ("X",)}, "grid factor 'X'"),
        ({"ctas_per_sm": 0}, "ctas_per_sm 0"),
        ({"shared": abi.SHARED_LIMIT + 1}, "shared 232449 bytes"),
        ({"params": (abi.S32("X"),)}, "unknown symbol 'X'"),
        ({"params": (abi.S32("logits_soft_cap"),)}, "unknown symbol 'logits_soft_cap'"),
        ({"params": (abi.F32("T"),)}, "unknown float32 symbol 'T'"),
        ({"params": (abi.Pointer("dq"),)}, "unknown operand 'dq' of forward"),
        ({"operation": "backward", "params": (abi.Pointer("sinks"),)}, "unknown operand 'sinks'"),
        ({"params": (abi.TensorMap("query", (64, 128)),)}, "needs 4 extents"),
        ({"params": (abi.TensorMap("query", (64, 1, 257, 1)),)}, "needs 4 extents in 1..256"),
        ({"params": (abi.TensorMap("query", (64, 1, 8, 1), 96),)}, "swizzle 96 of query"),
        ({"params": (abi.TensorMap("query", (128, 1, 8, 1), 128),)}, "inner box of query"),
        ({"params": (abi.TensorMap("query", (4, 1, 8, 1)),)}, "not a multiple of 16"),
        ({"select": {}}, "operand query has the call's dtype"),
        *(
            ({"params": (abi.TensorMap(operand, box, packed=True),)}, f"{operand} .* be packed")
            for operand, box in (
                ("key", (64, 1, 128, 1)),
                ("lse", (4, 64, 1)),
                ("query", (64, 1, 64, 1)),
                ("query", (64, 4, 128, 1)),
            )
        ),
    ],
)
def test_a_declaration_that_cannot_be_launched_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"kernel .*: .*{message}"):
        dataclasses.replace(SPEC, **changes)


# --- Checks of compiled code ----------------------------------------------------------------------

PTX = """\
// Compiler Build ID: 1
.version 9.4
.target sm_90a

.file 1 "/somewhere/else.py"
.visible .entry mangled(
\t.param .align 64 .b8 mangled_param_0[128],
\t.param .u64 .ptr .global .align 16 mangled_param_1,
\t.param .u32 mangled_param_2,
\t.param .f32 mangled_param_3
)
{
\t.loc 1 2 3
\tret; // done
}
"""


def test_normalised_ptx_holds_nothing_of_the_compiling_machine():
    text = artifacts.normalise_ptx(PTX)
    assert "//" not in text
    assert ".loc" not in text
    assert ".file" not in text
    assert text.startswith(".version 9.4\n.target sm_90a\n.visible .entry mangled(\n")
    assert text.endswith("{\n\tret;\n}\n")


def test_parameters_are_held_against_the_declaration():
    assert artifacts.check_parameters(SPEC, PTX) == "mangled"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".u32 mangled_param_2", ".u64 mangled_param_2", "parameter 2 differs"),
        (".f32 mangled_param_3", ".b32 mangled_param_3", "parameter 3 differs.* 'S32'.* 'F32'"),
        (",\n\t.param .f32 mangled_param_3", "", "parameter 3 differs"),
        ("mangled_param_0[128]", "mangled_param_0[64]", "the launcher cannot pass"),
        (".entry", ".func", "0 entries"),
    ],
)
def test_other_parameters_are_refused(old, new, message):
    with pytest.raises(artifacts.CompileError, match=message):
        artifacts.check_parameters(SPEC, PTX.replace(old, new))


# --- The matrix and the cache ---------------------------------------------------------------------


def test_sources_are_the_module_and_all_it_imports():
    names = {path.name for path in build.source_files("sm90.forward")}
    assert {"forward.py", "abi.py"} <= names
    assert "build.py" not in names
    assert "backward.py" not in names


def test_the_cache_key_depends_on_every_input(tmp_path, monkeypatch):
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "forward.py").write_text("from .. import abi\n")
    (tmp_path / "abi.py").write_text("")
    (tmp_path / "compile.py").write_text("")
    monkeypatch.setattr(build, "_PACKAGE_DIRECTORY", tmp_path)
    variant = build.Variant("sm90.forward", "name", "sm_90a")
    keys = {build.cache_key(variant, "1"), build.cache_key(variant, "2")}
    keys.add(build.cache_key(dataclasses.replace(variant, name="other"), "1"))
    keys.add(build.cache_key(dataclasses.replace(variant, architecture="sm_100a"), "1"))
    for source in ("sm90/forward.py", "abi.py", "compile.py"):
        with (tmp_path / source).open("a") as file:
            file.write("# changed\n")
        keys.add(build.cache_key(variant, "1"))
    assert len(keys) == 7
    (tmp_path / "unrelated.py").write_text("")
    assert build.cache_key(variant, "1") in keys


@pytest.fixture
def compiler(monkeypatch):
    """Replaces the compiler; returns the list of kernels that it was asked for."""
    asked = []

    def run(arguments, architecture):
        _, name, directory = arguments
        asked.append(name)
        if "broken" in name:
            return subprocess.CompletedProcess(arguments, 1, "", f"{name} spills")
        spec = dataclasses.replace(SPEC, name=name, architecture=architecture)
        manifest = spec.to_manifest(entry="mangled", registers=1, shared=2)
        for suffix, text in ((".cubin", "cubin"), (".ptx", "ptx"), (".manifest", manifest)):
            (pathlib.Path(directory) / f"{name}{suffix}").write_text(text)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(build, "_run_compiler", run)
    monkeypatch.setattr(build, "compiler_version", lambda: "1")
    return asked


def variants(*names):
    return [build.Variant("sm90.forward", name, "sm_90a") for name in names]


def test_a_bundle_holds_what_was_asked_for_and_is_read_by_the_library(tmp_path, compiler, capsys):
    output, cache = tmp_path / "native" / "bundle", tmp_path / "cache"
    build.build(variants("one", "two"), output, jobs=2, cache=cache)
    build.build(variants("two", "three"), output, jobs=2, cache=cache)
    assert sorted(compiler) == ["one", "three", "two"]  # two is cached
    assert "two: shared 2, registers 1 (cached)" in capsys.readouterr().out
    found = sorted(str(path.relative_to(output)) for path in output.rglob("*.*"))
    assert found == [
        "manifest.txt",
        *("sm_90a/three.cubin", "sm_90a/three.ptx", "sm_90a/two.cubin", "sm_90a/two.ptx"),
    ]
    kernels = bundle.parse_manifest((output / "manifest.txt").read_text())
    assert [kernel.name for kernel in kernels] == ["two", "three"]
    assert [path.name for path in output.parent.iterdir()] == ["bundle"]


def test_every_kernel_that_fails_is_reported_and_the_bundle_stays(tmp_path, compiler):
    output, cache = tmp_path / "bundle", tmp_path / "cache"
    build.build(variants("one"), output, jobs=1, cache=cache)
    before = (output / "manifest.txt").read_text()
    with pytest.raises(build.BuildError, match=r"(?s)broken_\w spills.*broken_\w spills"):
        build.build(variants("broken_a", "two", "broken_b"), output, jobs=2, cache=cache)
    assert (output / "manifest.txt").read_text() == before
    assert not list(cache.glob("*broken*"))


# --- The compiler itself --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """The module of the throw-away kernel, and kernels.compile."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    import tiny_kernel

    from kernels import compile as kernel_compiler

    return tiny_kernel, kernel_compiler


@pytest.mark.dsl
def test_a_kernel_compiles_without_a_gpu(tiny):
    kernels, compiler = tiny
    cubin, ptx, manifest = compiler.compile_kernel(kernels.Tiny())
    (info,) = bundle.parse_manifest(f"{build.MANIFEST_HEADER}\n\n{manifest}")
    assert (info.name, info.threads) == ("tiny_forward", 128)
    assert info.shared == 128 * 64 * 2 + 2 * 8
    assert 0 < info.registers <= 64
    entry = artifacts.check_parameters(kernels.Tiny().declaration(), ptx)
    assert artifacts.resources(cubin, entry) == (info.registers, 0)
    assert f"entry {entry}\n" in manifest
    assert "\nparam tensor_map query box 64 1 128 1 swizzle 0 packed\n" in manifest
    assert manifest.endswith("\nparam f32 logits_soft_cap\n")


@pytest.mark.dsl
def test_the_same_sources_give_the_same_bytes(tiny):
    kernels, compiler = tiny
    assert compiler.compile_kernel(kernels.Tiny()) == compiler.compile_kernel(kernels.Tiny())


@pytest.mark.dsl
def test_a_kernel_that_needs_too_much_shared_memory_is_refused(tiny):
    kernels, compiler = tiny
    with pytest.raises(artifacts.CompileError, match=r"exceed 232448"):
        compiler.compile_kernel(kernels.Tiny(extra_shared=232448))


@pytest.mark.dsl
def test_a_kernel_that_uses_local_memory_is_refused(tiny):
    kernels, compiler = tiny
    with pytest.raises(artifacts.CompileError, match=r"bytes of local memory per thread"):
        compiler.compile_kernel(kernels.Spilling())


@pytest.mark.dsl
def test_the_matrix_has_a_forward_and_a_backward_for_every_call():
    found = build.find_variants()
    architectures = list(dict.fromkeys(variant.architecture for variant in found))
    assert architectures == ["sm_90a", "sm_100a", "sm_103a"]
    names = {variant.name for variant in found}
    plain, capped = ("full", "causal", "window", "segments"), ("window_capped", "segments_capped")
    for dtype in ("bf16", "f16"):
        for served in plain + capped:
            assert f"sm90_forward_{dtype}_h128_{served}" in names
            assert f"sm90_backward_{dtype}_h128_{served}" in names
            for blackwell in ("sm100", "sm103"):
                forward = f"{blackwell}_forward_{dtype}_h128_{served}"
                assert names & {forward, f"{forward}_pair"}
