"""The C++ side below the XLA handlers: manifest parser, kernel choice, launcher, kernel store."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
UNLIMITED = 2**30
HEADER = "fa4_jax-bundle 1\n\n"


def block(name="sm90_forward", **changes):
    """A valid manifest block; a change of None leaves the line out."""
    lines = {
        "architecture": "sm_90a",
        "operation": "forward",
        "entry": f"entry_{name}",
        "threads": "384",
        "cluster": "1 1 1",
        "shared": "1024",
        "registers": "168",
        "grid": "T/128*N*B",
    } | changes
    text = f"kernel {name}\n"
    for key, value in lines.items():
        for item in value if isinstance(value, list) else [value]:
            text += "" if item is None else f"{key} {item}\n"
    return text


@pytest.fixture(scope="session")
def probe(tmp_path_factory):
    """Runs the probe program; returns its output's lines."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("probe") / "ffi_probe"
    sources = [ROOT / "ffi" / name for name in ("operands.cc", "bundle.cc", "launch.cc")]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT / 'ffi'}"]
    flags += ["-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run(
        [compiler, *flags, "-o", program, ROOT / "tests" / "ffi_probe.cc", *sources],
        check=True,
    )

    def run(*arguments, manifest=""):
        done = subprocess.run(
            [program, *map(str, arguments)], input=manifest, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture
def directory(tmp_path):
    """Writes a bundle directory of the given blocks with dummy images."""

    def write(*blocks, image="image"):
        (tmp_path / "manifest.txt").write_text(HEADER + "\n".join(blocks))
        for text in blocks:
            fields = dict(line.split(" ", 1) for line in text.splitlines())
            (tmp_path / fields["architecture"]).mkdir(exist_ok=True)
            path = tmp_path / fields["architecture"] / f"{fields['kernel']}.cubin"
            path.write_text(image)
        return tmp_path

    return write


def test_a_manifest_with_every_kind_of_line_parses(probe):
    text = block(
        select=["dtype bf16", "head_dim 128", "mask causal"],
        grid="T/128*N*2*B limit num_sms*2",
        param=[
            "tensor_map query box 64 1 128 1 swizzle 128",
            "pointer lse",
            "pointer query_offset",
            "s32 window_left",
        ],
    )
    assert probe("parse", manifest=HEADER + text + "\n\n" + block("other")) == ["ok"]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("", "line 1: expected 'fa4_jax-bundle 1', found ''"),
        ("fa4_jax-bundle 2\n", "line 1: expected 'fa4_jax-bundle 1', found 'fa4_jax-bundle 2'"),
        (HEADER, "the manifest holds no kernel"),
        (HEADER + "threads 32\n", "line 3: a block starts with a kernel line, found 'threads 32'"),
        (HEADER + block() + block("b"), "a blank line is missing before a kernel line"),
        (HEADER + block() + "\n" + block(), "a second kernel named sm90_forward"),
        (HEADER + block(grid=["T", "S"]), "a second grid line"),
        (HEADER + block(entry=None), "kernel sm90_forward has no entry line"),
        (HEADER + block(operation="sideways"), "line 5: cannot read 'operation sideways'"),
        (HEADER + block(threads="-32"), "cannot read 'threads -32'"),
        (HEADER + block(threads="384 1"), "cannot read 'threads 384 1'"),
        (HEADER + block(cluster="2 2 1"), "cannot read 'cluster 2 2 1'"),
        (HEADER + block(grid="T/0"), "cannot read 'grid T/0'"),
        (HEADER + block(grid="X*B"), "cannot read 'grid X*B'"),
        (HEADER + block(grid="T limit 4"), "cannot read 'grid T limit 4'"),
        (HEADER + block(select="dtype f64"), "cannot read 'select dtype f64'"),
        (HEADER + block(select="colour red"), "cannot read 'select colour red'"),
        (HEADER + block(param="pointer nothing"), "cannot read 'param pointer nothing'"),
        (HEADER + block(param="f32 scale"), "cannot read 'param f32 scale'"),
        (
            HEADER + block(param="tensor_map query box 64 1 128 swizzle 128"),
            "cannot read 'param tensor_map query box 64 1 128 swizzle 128'",
        ),
        (
            HEADER + block(param="tensor_map query box 64 1 300 1 swizzle 128"),
            "cannot read 'param tensor_map query box 64 1 300 1 swizzle 128'",
        ),
        (
            HEADER + block(param="tensor_map query box 64 1 128 1 swizzle 96"),
            "cannot read 'param tensor_map query box 64 1 128 1 swizzle 96'",
        ),
        (HEADER + block(param=["s32 T"] * 33), "cannot read 'param s32 T'"),
        (HEADER + block() + "colour red\n", "cannot read 'colour red'"),
    ],
)
def test_a_bad_manifest_is_refused_with_the_line(probe, manifest, message):
    (line,) = probe("parse", manifest=manifest)
    assert line.startswith("error: ")
    assert message in line


MATRIX = HEADER + "\n".join(
    block(
        f"{dtype}_h{head_dim}_{mask}",
        select=[f"dtype {dtype}", f"head_dim {head_dim}", f"mask {mask}"],
    )
    for dtype in ("bf16", "f16")
    for head_dim in (128, 64)
    for mask in ("window", "causal", "full")
    if (dtype, mask) != ("f16", "causal")
)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "left", "right", "name"),
    [
        ("bf16", 8, UNLIMITED, UNLIMITED, "bf16_h64_full"),
        ("bf16", 64, UNLIMITED, 0, "bf16_h64_causal"),
        ("bf16", 72, UNLIMITED, 0, "bf16_h128_causal"),
        ("bf16", 128, 0, UNLIMITED, "bf16_h128_window"),
        ("bf16", 128, 5, 0, "bf16_h128_window"),
        ("bf16", 128, UNLIMITED, 1, "bf16_h128_window"),
        ("f16", 64, UNLIMITED, 0, "f16_h64_window"),  # no causal kernel: the window's serves it
        ("f16", 64, UNLIMITED, UNLIMITED, "f16_h64_full"),
    ],
)
def test_the_smallest_kernel_for_the_mask_is_chosen(probe, dtype, head_dim, left, right, name):
    arguments = ("find", "sm_90a", "forward", dtype, head_dim, left, right)
    assert probe(*arguments, manifest=MATRIX) == [name]


def test_a_kernel_that_selects_on_nothing_serves_everything(probe):
    manifest = HEADER + block("any", operation="backward_preprocess")
    arguments = ("find", "sm_90a", "backward_preprocess", "f16", 96, 3, 0)
    assert probe(*arguments, manifest=manifest) == ["any"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sm_90a", "forward", "bf16", 136, UNLIMITED, 0), "head dim 136, mask causal"),
        (("sm_90a", "backward", "bf16", 64, 1, 1), "the bundle holds none for this operation"),
        (("sm_100a", "forward", "bf16", 64, 1, 1), "no sm_100a kernel for forward of bf16"),
    ],
)
def test_a_missing_kernel_is_an_error_that_says_what_there_is(probe, arguments, message):
    (line,) = probe("find", *arguments, manifest=MATRIX)
    assert line.startswith("error: ")
    assert message in line


def launch(probe, path, *, sms=4, sizes=(2, 300, 200, 4, 2, 72, 64), window=(UNLIMITED, 0)):
    return probe("launch", path, sms, "forward", *sizes, *window)


def test_a_launch_passes_what_the_manifest_says(probe, directory):
    path = directory(
        block(
            grid="T/128*N*B",
            cluster="2 1 1",
            param=[],
        )
        + "param tensor_map query box 64 1 128 1 swizzle 128\n"
        + "param tensor_map value box 64 1 128 1 swizzle 128\n"
        + "param pointer lse\nparam pointer query_offset\n"
        + "param s32 T\nparam s32 window_left\nparam s32 num_sms\n"
    )
    assert launch(probe, path) == [
        "map dimensions 72 4 300 2 strides 144 576 172800 box 64 1 128 1 swizzle 128",
        "map dimensions 64 2 200 2 strides 128 256 51200 box 64 1 128 1 swizzle 128",
        f"launch entry_sm90_forward grid {3 * 4 * 2} threads 384 cluster 2 shared 1024",
        f"buffer query {2 * 300 * 4 * 72 * 2}",
        f"buffer key {2 * 200 * 2 * 72 * 2}",
        f"buffer value {2 * 200 * 2 * 64 * 2}",
        "buffer scale 8",
        "buffer query_seq_lengths 8",
        "buffer key_value_seq_lengths 8",
        "buffer query_offset 0",
        f"buffer out {2 * 300 * 4 * 64 * 2} result",
        f"buffer lse {2 * 300 * 4 * 4} result",
        "tensor_map 4096",
        f"tensor_map {3 * 4096}",
        f"pointer {9 * 4096}",
        "pointer 0",
        "s32 300",
        f"s32 {UNLIMITED}",
        "s32 4",
        "ok",
    ]


@pytest.mark.parametrize(
    ("grid", "cluster", "expected"),
    [
        ("T/128*N*B", 1, 3 * 4 * 2),
        ("T/128*N*B limit num_sms*1", 1, 5),
        ("T/128*N*B limit num_sms*2", 4, 8),  # 10, in whole clusters
        ("B limit num_sms*2", 4, 4),  # never less than a cluster
        ("B*3", 2, 6),
    ],
)
def test_grid(probe, directory, grid, cluster, expected):
    path = directory(block(grid=grid, cluster=f"{cluster} 1 1"))
    assert f" grid {expected} " in launch(probe, path, sms=5)[0]


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"grid": "B*3", "cluster": "4 1 1"}, None, "a grid of 6 CTAs is not whole clusters of 4"),
        ({"grid": "T*S"}, (1, 2**16, 2**16, 1, 1, 64, 64), "the grid exceeds 2147483647 CTAs"),
        ({"grid": "Tp"}, None, "a grid factor is 0"),
        ({"param": "s32 T"}, (1, 2**31, 1, 1, 1, 64, 64), "T = 2147483648 does not fit 32 bits"),
        ({"param": "pointer dq"}, None, "this call has no operand dq"),
    ],
)
def test_a_launch_that_cannot_be_is_an_error(probe, directory, changes, sizes, message):
    path = directory(block(**({"grid": "B"} | changes)))
    extra = {} if sizes is None else {"sizes": sizes}
    lines = launch(probe, path, **extra)
    assert lines[-1] == f"error: kernel sm90_forward: {message}"


def test_an_image_that_does_not_load_names_the_kernel(probe, directory):
    path = directory(block(), image="broken")
    assert launch(probe, path) == ["error: kernel sm90_forward: load: broken image"]


def test_a_missing_image_is_named(probe, directory):
    path = directory(block())
    (path / "sm_90a" / "sm90_forward.cubin").unlink()
    assert launch(probe, path) == [f"error: cannot read {path}/sm_90a/sm90_forward.cubin"]


def test_an_unsupported_device_is_named_with_what_the_bundle_holds(probe, directory):
    path = directory(block(architecture="sm_100a"), block("b", architecture="sm_103a"))
    assert launch(probe, path) == [
        "error: this build of fa4_jax has no kernels for Probe 0 (compute capability 9.0, "
        "sm_90a); the bundle holds sm_100a, sm_103a"
    ]


def test_eight_threads_load_each_kernel_once_per_device(probe, directory):
    assert probe("threads", directory(block()), "forward") == ["libraries 2 kernels 2 failures 0"]
