"""Habits of other projects' kernels that the emulator must bear, each in a small program.

test_peers.py runs the kernels themselves, where their packages are installed.
"""

import numpy as np
import pytest
from emulator import EmulatorError
from ptx_programs import CLUSTER_SYNC, init_barriers, launch, wait

pytestmark = pytest.mark.emulator


def test_a_warp_may_initialise_a_barrier_with_all_its_lanes():
    body = """
  mbarrier.init.shared.b64 [%base], 32;
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
  mbarrier.arrive.shared.b64 %rd1, [%base];"""
    launch(body + wait("W"), races=True)


def test_a_warp_may_wait_at_a_barrier_that_it_has_arrived_at():
    # FlashAttention-4's Hopper forward gives its first warpgroup the first turn like that.
    body = """
  setp.ne.u32 %p1, %warp, 0;
  @%p1 bra SECOND;
  bar.arrive 1, 64;
  bar.sync 1, 64;
  st.shared.u32 [%base], 7;
  bar.arrive 2, 64;
  bra.uni END;
SECOND:
  bar.sync 2, 64;
  ld.shared.u32 %r1, [%base];
  st.global.u32 [%rd0], %r1;
END:"""
    out = np.zeros(1, np.uint32)
    launch(body, out, params="p", block=64, races=True)
    assert out[0] == 7


def test_a_proxy_fence_keeps_what_a_relaxed_cluster_barrier_said_of_barriers():
    body = f"""{init_barriers(1)}
  barrier.cluster.arrive.relaxed.aligned;
  barrier.cluster.wait.aligned;
  fence.proxy.async;
  mov.u32 %r1, %cluster_ctarank;
  xor.b32 %r1, %r1, 1;
  mapa.shared::cluster.u32 %r2, %base, %r1;
  @%p1 mbarrier.arrive.shared::cluster.b64 _, [%r2];
{wait("W")}
{CLUSTER_SYNC}"""
    launch(body, cluster=2, races=True)


@pytest.mark.parametrize("arrivals", [32, 1])
def test_lanes_know_of_each_other_what_a_barrier_of_all_of_them_says(arrivals):
    # All lanes read a buffer and arrive; one that has waited may refill it by a copy. If it alone
    # arrives, the other lanes may still be reading.
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""{init_barriers(arrivals, 1)}
  mad.lo.u32 %r1, %lane, 4, %base;
  st.shared.u32 [%r1+1024], %lane;
  bar.sync 0;
  ld.shared.u32 %r2, [%r1+1024];
  fence.proxy.async.shared::cta;
  setp.lt.u32 %p2, %lane, {arrivals};
  @%p2 mbarrier.arrive.shared.b64 %rd1, [%base];
{wait("W")}
  add.u32 %r3, %base, 8;
  add.u32 %r4, %base, 1024;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r3], 128;
  @!%p1 bra V;
  {load} [%r4], [%rd0], 128, [%r3];
{wait("V", "%r3")}"""
    source = np.arange(32, dtype=np.uint32)
    if arrivals == 32:
        launch(body, source, params="p", races=True)
    else:
        with pytest.raises(EmulatorError, match="race"):
            launch(body, source, params="p", races=True)
