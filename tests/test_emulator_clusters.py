# ruff: noqa: E501 - instructions of PTX are not broken into lines
"""Clusters in small PTX programs on the emulator: shared memory of others, launch control."""

import numpy as np
import pytest
from emulator import TensorMap
from ptx_programs import CLUSTER_SYNC, dump, expect, init_barriers, launch, wait

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("seed", [0, 6])
def test_distributed_shared_memory(seed):
    # Each CTA writes into the next one of its cluster and signals its mbarrier.
    out = np.zeros((4, 32), np.uint32)
    body = f"""{init_barriers(32)}
{CLUSTER_SYNC}
  mov.u32 %r1, %cluster_ctarank;
  add.u32 %r2, %r1, 1;
  and.b32 %r2, %r2, 3;
  mad.lo.u32 %r3, %t, 4, %base;
  mapa.shared::cluster.u32 %r4, %r3, %r2;
  mad.lo.u32 %r5, %r1, 100, %t;
  st.shared::cluster.u32 [%r4+1024], %r5;
  mapa.shared::cluster.u32 %r6, %base, %r2;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
{wait("W")}
  ld.shared.u32 %r7, [%r3+1024];
  mov.u32 %r8, %ctaid.x;
  mad.lo.u32 %r8, %r8, 32, %t;
  mad.wide.u32 %rd1, %r8, 4, %rd0;
  st.global.u32 [%rd1], %r7;"""
    launch(body, out, params="p", cluster=4, seed=seed, races=True)
    np.testing.assert_array_equal(out, (np.arange(4)[:, None] + 3) % 4 * 100 + np.arange(32))


def test_multicast_loads():
    array = np.arange(1024, dtype=np.uint32)
    out = np.zeros((2, 256), np.uint32)
    body = f"""{init_barriers(1)}
{CLUSTER_SYNC}
{expect(1024)}
  add.u32 %r3, %base, 1024;
  mov.u32 %r1, %cluster_ctarank;
  setp.eq.u32 %p4, %r1, 1;
  and.pred %p4, %p4, %p1;
  mov.b32 %r2, 256;
  mov.b16 %h1, 3;
  @%p4 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r3], [%rd0, {{%r2}}], [%base], %h1;
{wait("W")}
  mul.wide.u32 %rd5, %r1, 1024;
  add.u64 %rd1, %rd1, %rd5;
{dump(256)}"""
    launch(body, TensorMap(array, (256,)), out, params="mp", cluster=2, races=True)
    np.testing.assert_array_equal(out, np.tile(array[256:512], (2, 1)))


def test_cluster_launch_control_takes_the_rest_of_the_grid():
    seen = np.zeros(8, np.uint32)
    body = f"""{init_barriers(1)}
  mov.b32 %r1, 0;
  mov.u32 %r2, %ctaid.x;
  .reg .b128 handle;
NEXT:
  mad.wide.u32 %rd1, %r2, 4, %rd0;
  @%p1 red.global.add.u32 [%rd1], 1;
  add.u32 %r3, %base, 1024;
{expect(16)}
  @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%base];
{wait("W", parity="%r1")}
  xor.b32 %r1, %r1, 1;
  ld.shared.v2.b64 {{%rd5, %rd6}}, [%r3];
  mov.b128 handle, {{%rd5, %rd6}};
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p5, handle;
  @%p5 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r2, _, _, _}}, handle;
  bar.sync 0;
  @%p5 bra NEXT;"""
    launch(body, seen, params="p", grid=8, target="sm_100a", threads=1, races=True)
    np.testing.assert_array_equal(seen, np.ones(8))


@pytest.mark.parametrize("seed", [0, 10])
def test_asynchronous_stores(seed):
    out = np.zeros((2, 32, 2), np.uint32)
    body = f"""{init_barriers(1)}
{CLUSTER_SYNC}
{expect(256)}
  mov.u32 %r1, %cluster_ctarank;
  xor.b32 %r2, %r1, 1;
  mad.lo.u32 %r3, %t, 8, %base;
  mapa.shared::cluster.u32 %r4, %r3, %r2;
  mapa.shared::cluster.u32 %r5, %base, %r2;
  mad.lo.u32 %r6, %r1, 100, %t;
  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r4+1024], {{%t, %r6}}, [%r5];
{wait("W")}
  ld.shared.v2.u32 {{%r7, %r8}}, [%r3+1024];
  mad.lo.u32 %r9, %r1, 32, %t;
  mad.wide.u32 %rd1, %r9, 8, %rd0;
  st.global.v2.u32 [%rd1], {{%r7, %r8}};
{CLUSTER_SYNC}"""
    launch(body, out, params="p", cluster=2, seed=seed, races=True)
    lane = np.arange(32)
    want = np.stack([np.stack([lane, lane + 100 * (1 - rank)], -1) for rank in range(2)])
    np.testing.assert_array_equal(out, want)


def test_asynchronous_stores_need_no_proxy_fence():
    """They are performed in the generic proxy."""
    body = f"""{init_barriers(1)}
  @%p1 st.shared.u32 [%base+1024], %t;
  bar.warp.sync -1;
{expect(4)}
  @%p1 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%base+1024], %t, [%base];
{wait("W")}"""
    launch(body, races=True)


REDUCTIONS = {
    "add.u32": np.add,
    "add.u64": np.add,
    "min.s32": np.minimum,
    "max.u32": np.maximum,
    "xor.b32": np.bitwise_xor,
    "inc.u32": lambda old, limit: np.where(old >= limit, 0, old + 1),
}


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_asynchronous_reductions(name, seed):
    # All threads of both CTAs reduce into the words of CTA 0, two to a word.
    bits = int(name[-2:])
    dtype = np.dtype(f"{'i' if 's32' in name else 'u'}{bits // 8}")
    random = np.random.default_rng(5)
    start = random.integers(3, 100, 32).astype(dtype)
    values = random.integers(90 if "inc" in name else 1, 100, (2, 32)).astype(dtype)
    if dtype.kind == "i":
        values[0] *= -1
    out = np.zeros(32, dtype)
    b = "%rd10" if bits == 64 else "%r10"
    body = f"""{init_barriers(1)}
  mov.u32 %r1, %cluster_ctarank;
  mad.lo.u32 %r3, %t, {dtype.itemsize}, %base;
  mad.wide.u32 %rd3, %t, {dtype.itemsize}, %rd0;
  ld.global.b{bits} {b}, [%rd3];
  st.shared.b{bits} [%r3+1024], {b};
  setp.eq.and.u32 %p3, %r1, 0, %p1;
{expect(2 * start.nbytes, guard="@%p3")}
{CLUSTER_SYNC}
  mov.b32 %r2, 0;
  mapa.shared::cluster.u32 %r4, %r3, %r2;
  mapa.shared::cluster.u32 %r5, %base, %r2;
  mad.lo.u32 %r6, %r1, 32, %t;
  mad.wide.u32 %rd3, %r6, {dtype.itemsize}, %rd1;
  ld.global.b{bits} {b}, [%rd3];
  red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{name} [%r4+1024], {b}, [%r5];
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra DONE;
{wait("W")}
  ld.shared.b{bits} {b}, [%r3+1024];
  mad.wide.u32 %rd3, %t, {dtype.itemsize}, %rd2;
  st.global.b{bits} [%rd3], {b};
DONE:
{CLUSTER_SYNC}"""
    launch(body, start, values, out, params="ppp", cluster=2, seed=seed, races=True)
    reduce = REDUCTIONS[name]
    first, second = (reduce(reduce(start, values[i]), values[1 - i]) for i in range(2))
    if name == "inc.u32":  # the only one whose order matters
        assert np.all((out == first) | (out == second))
    else:
        np.testing.assert_array_equal(out, first)
