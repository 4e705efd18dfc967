"""Asynchronous copies in small PTX programs on the emulator: tensor maps, bulk copies, cp.async."""

import numpy as np
import pytest
from emulator import EmulatorError, TensorMap
from ptx_programs import dump, expect, fill, init_barriers, launch, load_tile, wait

pytestmark = pytest.mark.emulator


def swizzled(box: np.ndarray, span: int) -> np.ndarray:
    """The bytes of rows of `span` bytes as they lie in shared memory at an aligned address."""
    flat = np.ascontiguousarray(box).view(np.uint8).reshape(-1)
    if span == 0:
        return flat
    address = np.arange(flat.size)
    bits = {128: 7, 64: 3, 32: 1}[span]
    out = np.empty_like(flat)
    out[address ^ ((address >> 7 & bits) << 4)] = flat
    return out


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_tensor_loads_swizzle_and_fill(span, seed):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 2**16, (20, 72), np.uint16)
    columns = (span or 128) // 2
    out = np.zeros(16 * columns, np.uint16)
    body = f"""{init_barriers(1)}
{expect(out.nbytes)}
  mov.b32 %r1, 40;
  mov.b32 %r2, -3;
  add.u32 %r3, %base, 1024;
{load_tile("%r3", "%rd0", "%r1", "%r2")}
{wait("W")}
{dump(out.nbytes // 4)}"""
    launch(body, TensorMap(array, (columns, 16), span), out, params="mp", seed=seed, races=True)
    padded = np.zeros((60, 200), np.uint16)
    padded[10:30, 10:82] = array
    want = swizzled(padded[7:23, 50 : 50 + columns], span)
    np.testing.assert_array_equal(out.view(np.uint8), want)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("reduce", [False, True])
def test_tensor_stores_and_reductions(reduce, seed):
    array = np.full((10, 24), 0.5, np.float32)
    op = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group" if reduce else (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    )  # fmt: skip
    body = f"""{fill(8 * 32, fence="fence.proxy.async.shared::cta;")}
  mov.b32 %r1, 16;
  mov.b32 %r2, 4;
  add.u32 %r3, %base, 1024;
  @%lead {op} [%rd0, {{%r1, %r2}}], [%r3];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;"""
    launch(body, TensorMap(array, (32, 8)), params="m", seed=seed, races=True)
    box = np.arange(256, dtype=np.float32).reshape(8, 32)
    want = np.full((10, 24), 0.5, np.float32)
    want[4:, 16:] = box[:6, :8] + (0.5 if reduce else 0)
    np.testing.assert_array_equal(array, want)


def test_exits_with_unread_stores():
    array = np.zeros((8, 32), np.float32)
    store = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd0, {%r1, %r1}], [%r3];"
    body = f"""{fill(256, fence="fence.proxy.async;")}
  mov.b32 %r1, 0;
  add.u32 %r3, %base, 1024;
  @%lead {store}"""
    with pytest.raises(EmulatorError, match="never committed"):
        launch(body, TensorMap(array, (32, 8)), params="m")
    body += "\n  cp.async.bulk.commit_group;"
    with pytest.raises(EmulatorError, match="before its bulk copies have read shared memory"):
        launch(body, TensorMap(array, (32, 8)), params="m")
    launch(body, TensorMap(array, (32, 8)), params="m", strict_exit=False)


@pytest.mark.parametrize("seed", [0, 3])
def test_bulk_copies_and_reductions(seed):
    source = np.arange(64, dtype=np.float32)
    total = np.full(64, 100, np.float32)
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""{init_barriers(1)}
{expect(256)}
  add.u32 %r3, %base, 1024;
  mov.b32 %r4, 256;
  @%p1 {load} [%r3], [%rd0], %r4, [%base];
{wait("W")}
  @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r3], %r4;
  @%p1 cp.async.bulk.commit_group;
  @%p1 cp.async.bulk.wait_group.read 0;"""
    launch(body, source, total, params="pp", seed=seed, races=True)
    np.testing.assert_array_equal(total, source + 100)


@pytest.mark.parametrize("seed", [0, 4])
def test_small_copies(seed):
    source = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    body = f"""
  mad.lo.u32 %r1, %t, 16, %base;
  mad.wide.u32 %rd2, %t, 16, %rd0;
  setp.lt.u32 %p1, %t, 16;
  selp.b32 %r2, 16, 8, %p1;
  cp.async.cg.shared.global [%r1+1024], [%rd2], 16, %r2;
  cp.async.commit_group;
  cp.async.wait_group 0;
  bar.sync 0;
{dump(128)}"""
    launch(body, source, out, params="pp", seed=seed, races=True)
    want = source.reshape(32, 4).copy()
    want[16:, 2:] = 0
    np.testing.assert_array_equal(out, want.reshape(-1))
