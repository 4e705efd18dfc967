# ruff: noqa: E501 - instructions of PTX are not broken into lines
"""tensormap.replace in small PTX programs on the emulator: the map that results, its limits."""

import numpy as np
import pytest
from emulator import EmulatorError, TensorMap, load_library
from ptx_programs import expect, init_barriers, launch, load_tile, wait

pytestmark = pytest.mark.emulator

ELEMENT_TYPES = {
    "uint8": 0,
    "uint32": 2,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 9,
    "bfloat16": 10,
}
UPDATE = "  @%p1 tensormap.replace.tile.{}.shared::cta.b1024.{} [%base+2048], {};\n"


def map_updates(array: np.ndarray, box: tuple[int, ...], swizzle: int, address: str) -> str:
    """PTX that makes a map of `array` out of any map, as the driver would encode it."""
    sizes, strides = array.shape[::-1], array.strides[::-1][1:]
    body = UPDATE.format("global_address", "b64", address)
    body += "".join(
        f"  mov.b32 %r9, {value};\n" + UPDATE.format(field, "b32", f"{i}%r9")
        for field, values in {
            "rank": [("", array.ndim - 1)],
            "box_dim": [(f"{i}, ", value) for i, value in enumerate(box)],
            "global_dim": [(f"{i}, ", value) for i, value in enumerate(sizes)],
            "element_stride": [(f"{i}, ", 1) for i in range(array.ndim)],
        }.items()
        for i, value in values
    )
    for i, stride in enumerate(strides):
        body += f"  mov.b64 %rd9, {stride};\n" + UPDATE.format("global_stride", "b64", f"{i}, %rd9")
    for field, value in {
        "elemtype": ELEMENT_TYPES[array.dtype.name],
        "interleave_layout": 0,
        "swizzle_mode": {0: 0, 32: 1, 64: 2, 128: 3}[swizzle],
        "swizzle_atomicity": 0,
        "fill_mode": 0,
    }.items():
        body += UPDATE.format(field, "b32", value)
    return body


MAP_TO_GLOBAL = """
  bar.warp.sync -1;
  add.u32 %r8, %base, 2048;
  cvt.u64.u32 %rd8, %r8;
  tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%rd8], 128;
  fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
"""
FIRST_MAP = """
  mad.lo.u32 %r8, %t, 4, %base;
  mad.wide.u32 %rd8, %t, 4, %rd0;
  {load};
  st.shared.u32 [%r8+2048], %r9;
  bar.warp.sync -1;
"""


def map_memory() -> np.ndarray:
    """128 bytes aligned as a tensor map is."""
    raw = np.zeros(192, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 128]


@pytest.mark.parametrize("first", ["mov.b32 %r9, 0", "ld.u32 %r9, [%rd8]"])
@pytest.mark.parametrize(
    ("dtype", "shape", "box", "swizzle"),
    [
        ("bfloat16", (40, 72), (64, 8), 128),
        ("float32", (3, 5, 20), (8, 2, 1), 32),
        ("uint8", (96,), (16,), 0),
        ("int64", (2, 3, 4, 5, 6), (2, 1, 1, 2, 2), 0),
    ],
)
def test_a_replaced_tensor_map_is_the_one_that_the_driver_encodes(
    first, dtype, shape, box, swizzle
):
    array, out = np.zeros(shape, dtype), map_memory()
    other = TensorMap(np.zeros(256, np.float16), (32,), 64)
    body = init_barriers(1) + FIRST_MAP.format(load=first)
    body += map_updates(array, box, swizzle, "%rd1") + MAP_TO_GLOBAL
    launch(body, other, array, out, params="mpp", races=True)
    encoded = np.frombuffer(TensorMap(array, box, swizzle).encode(load_library()), np.uint8)
    promotion = 0x47  # that of L2: tensormap.replace has no field for it
    np.testing.assert_array_equal(np.delete(out, promotion), np.delete(encoded, promotion))


@pytest.mark.parametrize("seed", [0, 3])
def test_a_copy_through_a_replaced_tensor_map(seed):
    """A map of other memory, shape and type; rows past the end read as zero."""
    array, out = np.arange(10 * 16, dtype=np.float32).reshape(10, 16), np.zeros((4, 8), np.float32)
    memory = map_memory()
    body = init_barriers(1) + FIRST_MAP.format(load="ld.u32 %r9, [%rd8]")
    body += map_updates(array, (8, 4), 0, "%rd1") + MAP_TO_GLOBAL
    body += f"""
  mov.b32 %r1, 8;
  add.u32 %r3, %base, 1024;
{expect(out.nbytes)}
{load_tile("%r3", "%rd2", "%r1", "%r1")}
{wait("W")}
  mad.lo.u32 %r3, %t, 4, %base;
  mad.wide.u32 %rd4, %t, 4, %rd3;
  ld.shared.u32 %r4, [%r3+1024];
  st.global.u32 [%rd4], %r4;"""
    other = TensorMap(np.zeros((4, 256), np.float16), (32, 3), 64)
    launch(body, other, array, memory, out, params="mppp", seed=seed, races=True)
    np.testing.assert_array_equal(out, np.vstack([array[8:, 8:], np.zeros((2, 8))]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rank", "%r9", "rank must be 1 to 5"),
        ("box_dim", "0, %r9", "box dimension is not in 1 to 256"),
        ("element_stride", "5, %r9", "ordinal exceeds the rank"),
        ("interleave_layout", "1", "interleaved layouts are not emulated"),
        ("swizzle_mode", "4", "swizzle mode that is not emulated"),
    ],
)
def test_a_field_of_a_tensor_map_has_its_limits(field, value, message):
    body = (
        FIRST_MAP.format(load="mov.b32 %r9, 0") + "  mov.b32 %r9, 999;\n  setp.eq.u32 %p1, %t, 0;\n"
    )
    with pytest.raises(EmulatorError, match=message):
        launch(body + UPDATE.format(field, "b32", value), None, params="p")


def test_a_tensor_map_must_be_there_before_a_field_is_replaced():
    body = "  setp.eq.u32 %p1, %t, 0;\n" + UPDATE.format("fill_mode", "b32", 1)
    with pytest.raises(EmulatorError, match="which nothing has written"):
        launch(body)
