"""The C++ side below the XLA handlers: manifest parser, kernel choice, launcher, kernel store."""

import pathlib
import shutil
import subprocess

import pytest

from kernels import abi

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


def test_the_build_and_the_launcher_know_the_same_names(probe):
    operands = {
        name: f"operand {name} {element} {dimensions}"
        for operation in abi.OPERANDS.values()
        for name, (dimensions, element) in operation.items()
    }
    symbols = [f"s32 {symbol}" for symbol in abi.SYMBOLS]
    symbols += [f"f32 {symbol}" for symbol in abi.F32_SYMBOLS]
    assert sorted(probe("tables")) == sorted([*operands.values(), *symbols])


def test_a_manifest_with_every_kind_of_line_parses(probe):
    text = block(
        select=["dtype bf16", "head_dim 128", "mask causal", "logits plain"],
        grid="packed_T/128*packed_N*2*B limit num_sms*2",
        param=[
            "tensor_map query box 64 1 128 1 swizzle 128 packed",
            "tensor_map key box 64 1 128 1 swizzle 128",
            "pointer lse",
            "pointer segment_bounds",
            "s32 window_left",
            "s32 pack",
            "f32 logits_soft_cap",
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
        (HEADER + block(select="mask segment"), "cannot read 'select mask segment'"),
        (HEADER + block(select="logits soft"), "cannot read 'select logits soft'"),
        (HEADER + block(select="colour red"), "cannot read 'select colour red'"),
        (HEADER + block(param="pointer nothing"), "cannot read 'param pointer nothing'"),
        (HEADER + block(param="f32 scale"), "cannot read 'param f32 scale'"),
        (HEADER + block(param="f32 T"), "cannot read 'param f32 T'"),
        (
            HEADER + block(param="f32 logits_soft_cap 2"),
            "cannot read 'param f32 logits_soft_cap 2'",
        ),
        (HEADER + block(param="s32 logits_soft_cap"), "cannot read 'param s32 logits_soft_cap'"),
        *(
            (HEADER + block(param=f"tensor_map {text}"), f"cannot read 'param tensor_map {text}'")
            for text in (
                "key box 64 1 128 1 swizzle 128 packed",  # not query heads
                "dq_accumulator box 32 64 1 1 swizzle 0 packed",
                "lse box 4 64 1 swizzle 0 packed",
                "query box 64 1 128 1 swizzle 128 folded",
                "query box 64 1 128 1 packed",
            )
        ),
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


def variant(dtype, head_dim, mask, logits):
    name = f"{dtype}_h{head_dim}_{mask}" + ("_capped" if logits == "capped" else "")
    select = [f"dtype {dtype}", f"head_dim {head_dim}", f"mask {mask}", f"logits {logits}"]
    return block(name, select=select)


MASKS = {"plain": ("window", "causal", "full", "segments"), "capped": ("segments", "window")}
MATRIX = HEADER + "\n".join(
    variant(dtype, head_dim, mask, logits)
    for dtype in ("bf16", "f16")
    for head_dim in (128, 64)
    for logits in MASKS
    for mask in MASKS[logits]
    if (dtype, mask) != ("f16", "causal")
)


def find(probe, manifest, *request, segments=0, cap=0):
    return probe("find", *request, segments, cap, manifest=manifest)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "left", "right", "more", "name"),
    [
        ("bf16", 8, UNLIMITED, UNLIMITED, {}, "bf16_h64_full"),
        ("bf16", 64, UNLIMITED, 0, {}, "bf16_h64_causal"),
        ("bf16", 72, UNLIMITED, 0, {}, "bf16_h128_causal"),
        ("bf16", 128, 0, UNLIMITED, {}, "bf16_h128_window"),
        ("bf16", 128, 5, 0, {}, "bf16_h128_window"),
        ("bf16", 128, UNLIMITED, 1, {}, "bf16_h128_window"),
        # There is no causal kernel: the window's serves it.
        ("f16", 64, UNLIMITED, 0, {}, "f16_h64_window"),
        ("f16", 64, UNLIMITED, UNLIMITED, {}, "f16_h64_full"),
        ("bf16", 64, UNLIMITED, UNLIMITED, {"segments": 1}, "bf16_h64_segments"),
        ("bf16", 128, UNLIMITED, 0, {"segments": 1}, "bf16_h128_segments"),
        ("bf16", 64, 5, 0, {"segments": 1}, "bf16_h64_segments"),
        ("bf16", 64, UNLIMITED, UNLIMITED, {"cap": 0.5}, "bf16_h64_window_capped"),
        ("bf16", 64, UNLIMITED, 0, {"cap": 30}, "bf16_h64_window_capped"),
        ("f16", 128, 3, 3, {"cap": 30}, "f16_h128_window_capped"),
        ("f16", 8, UNLIMITED, 0, {"cap": 30, "segments": 1}, "f16_h64_segments_capped"),
    ],
)
def test_the_smallest_kernel_for_the_call_is_chosen(
    probe, dtype, head_dim, left, right, more, name
):
    request = ("sm_90a", "forward", dtype, head_dim, left, right)
    assert find(probe, MATRIX, *request, **more) == [name]


@pytest.mark.parametrize("more", [{}, {"segments": 1}, {"cap": 2}])
def test_a_kernel_that_selects_on_nothing_serves_everything(probe, more):
    manifest = HEADER + block("any", operation="backward_preprocess")
    request = ("sm_90a", "backward_preprocess", "f16", 96, 3, 0)
    assert find(probe, manifest, *request, **more) == ["any"]


@pytest.mark.parametrize(
    ("left", "more", "name"),
    [
        (UNLIMITED, {}, "full"),
        (5, {}, "window"),
        (UNLIMITED, {"segments": 1}, "rest"),
        # As the gradients' kernel of a capped full call is the window's: its partner is too.
        (UNLIMITED, {"cap": 2}, "window"),
    ],
)
def test_a_kernel_that_names_the_mask_goes_before_one_that_does_not(probe, left, more, name):
    operation = {"operation": "backward_postprocess"}
    blocks = [block(mask, select=f"mask {mask}", **operation) for mask in ("window", "full")]
    request = ("sm_90a", "backward_postprocess", "bf16", 64, left, UNLIMITED)
    for order in (lambda blocks: blocks, reversed):
        manifest = HEADER + "\n".join(order([*blocks, block("rest", **operation)]))
        assert find(probe, manifest, *request, **more) == [name]


@pytest.mark.parametrize(
    ("request_", "more", "message"),
    [
        (
            ("sm_90a", "forward", "bf16", 136, UNLIMITED, 0),
            {},
            "no sm_90a kernel for forward of bf16, head dim 136, mask causal, logits plain; "
            "the bundle holds bf16_h128_window, bf16_h128_causal, ",
        ),
        (
            ("sm_90a", "backward", "bf16", 64, 1, 1),
            {"segments": 1, "cap": 2},
            "no sm_90a kernel for backward of bf16, head dim 64, mask segments, logits capped; "
            "the bundle holds none for this operation, only for forward",
        ),
    ],
)
def test_a_missing_kernel_is_an_error_that_says_what_there_is(probe, request_, more, message):
    (line,) = find(probe, MATRIX, *request_, **more)
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("mask", "logits", "more"),
    [
        ("window", "plain", {"segments": 1}),  # a window kernel compares no ids
        ("segments", "plain", {}),  # and one that does reads them
        ("window", "plain", {"cap": 2}),
        ("window", "capped", {}),
    ],
)
def test_a_kernel_that_does_something_else_is_not_taken(probe, mask, logits, more):
    manifest = HEADER + variant("bf16", 64, mask, logits)
    (line,) = find(probe, manifest, "sm_90a", "forward", "bf16", 64, 5, 0, **more)
    assert line.startswith("error: no sm_90a kernel for forward")


def test_a_missing_kernel_on_a_device_names_the_device(probe, directory):
    path = directory(variant("f16", 64, "window", "plain"))
    assert launch(probe, path) == [
        "error: Probe 0: no sm_90a kernel for forward of bf16, head dim 72, mask causal, logits "
        "plain; the bundle holds f16_h64_window"
    ]


def launch(
    probe,
    path,
    *,
    sms=4,
    sizes=(2, 300, 200, 4, 2, 72, 64),
    window=(UNLIMITED, 0),
    segments=0,
    cap=0,
):
    return probe("launch", path, sms, "forward", *sizes, *window, segments, cap)


def test_a_launch_passes_what_the_manifest_says(probe, directory):
    path = directory(
        block(
            grid="T/128*N*B",
            cluster="2 1 1",
            param=[],
        )
        + "param tensor_map query box 64 1 128 1 swizzle 128\n"
        + "param tensor_map value box 64 1 128 1 swizzle 128\n"
        + "param pointer lse\nparam pointer query_offset\nparam pointer segment_bounds\n"
        + "param s32 T\nparam s32 window_left\nparam s32 num_sms\n"
        + "param f32 logits_soft_cap\nparam s32 row_blocks\n"
    )
    assert launch(probe, path, segments=1, cap=2.5) == [
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
        f"buffer query_segment_ids {2 * 300 * 4}",
        f"buffer key_value_segment_ids {2 * 200 * 4}",
        f"buffer segment_bounds {2 * 5 * 4 * 4}",
        f"buffer sinks {2 * 4 * 4}",
        f"buffer out {2 * 300 * 4 * 64 * 2} result",
        f"buffer lse {2 * 300 * 4 * 4} result",
        "tensor_map 4096",
        f"tensor_map {3 * 4096}",
        f"pointer {13 * 4096}",
        "pointer 0",
        f"pointer {10 * 4096}",
        "s32 300",
        f"s32 {UNLIMITED}",
        "s32 4",
        "f32 2.5",
        "s32 5",
        "ok",
    ]


def test_absent_segments_are_null_pointers(probe, directory):
    operands = ("query_segment_ids", "key_value_segment_ids", "segment_bounds")
    path = directory(block(param=[f"pointer {name}" for name in operands]))
    lines = launch(probe, path)
    assert [line for line in lines if line.startswith("pointer")] == ["pointer 0"] * 3
    assert [f"buffer {name} 0" for name in operands] == lines[8:11]


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "pack"),
    [
        (1, 8, 1, 8),
        (1, 8, 2, 4),
        (1, 12, 1, 4),  # 12 = 4 * 3
        (1, 6, 2, 1),
        (1, 4, 4, 1),
        (16, 8, 1, 8),
        (17, 8, 1, 4),
        (64, 8, 1, 2),
        (65, 8, 1, 1),
        (300, 8, 1, 1),
        (1, 256, 1, 128),
        (2, 256, 1, 64),
    ],
)
def test_a_packed_map_takes_heads_for_positions(probe, directory, length, heads, kv_heads, pack):
    path = directory(
        block(
            grid="packed_T/128*packed_N*B",
            param=[
                "tensor_map query box 64 1 128 1 swizzle 128 packed",
                "tensor_map out box 64 1 128 1 swizzle 128",
                *("s32 pack", "s32 packed_T", "s32 packed_N", "s32 T", "s32 N"),
            ],
        )
    )
    lines = launch(probe, path, sizes=(3, length, 200, heads, kv_heads, 64, 64))
    assert lines[0].startswith(f"map dimensions 64 {heads} {length} 3 ")
    assert lines[0].endswith(f" box 64 {pack} {128 // pack} 1 swizzle 128")
    assert lines[1].endswith(" box 64 1 128 1 swizzle 128")
    blocks = -(-length * pack // 128) * heads // pack * 3
    assert f" grid {blocks} " in lines[2]
    numbers = [pack, length * pack, heads // pack, length, heads]
    assert lines[-6:] == [*(f"s32 {n}" for n in numbers), "ok"]


@pytest.mark.parametrize("box", ["64 1 96 1", "64 4 128 1"])
def test_a_box_that_cannot_be_packed_is_an_error(probe, directory, box):
    path = directory(block(param=f"tensor_map query box {box} swizzle 128 packed"))
    _, heads, rows, _ = box.split()
    assert launch(probe, path, sizes=(1, 1, 200, 128, 1, 64, 64)) == [
        "error: kernel sm90_forward: tensor map of query: 128 heads cannot be packed into a box of "
        f"{heads} x {rows} heads and positions"
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
        ({"grid": "window_right"}, None, "a grid factor is 0"),
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
