"""Named barriers and mbarriers in small PTX programs on the emulator: phases, hand-over, misuse."""

import numpy as np
import pytest
from emulator import EmulatorError
from ptx_programs import expect, init_barriers, launch, wait

pytestmark = pytest.mark.emulator


def test_named_barriers_hand_over():
    # Warp 0 writes, arrives at barrier 1 and waits at 2; warp 1 reads and answers.
    out = np.zeros(32, np.uint32)
    body = """
  mad.lo.u32 %r1, %lane, 4, %base;
  setp.ne.u32 %p1, %warp, 0;
  @%p1 bra CONSUMER;
  mul.lo.u32 %r2, %lane, 3;
  st.shared.u32 [%r1], %r2;
  bar.arrive 1, 64;
  bar.sync 2, 64;
  ld.shared.u32 %r3, [%r1];
  mad.wide.u32 %rd1, %lane, 4, %rd0;
  st.global.u32 [%rd1], %r3;
  bra.uni END;
CONSUMER:
  bar.sync 1, 64;
  ld.shared.u32 %r2, [%r1];
  add.u32 %r2, %r2, 1;
  st.shared.u32 [%r1], %r2;
  bar.arrive 2, 64;
END:"""
    launch(body, out, params="p", block=64, races=True)
    np.testing.assert_array_equal(out, np.arange(32) * 3 + 1)


def test_barrier_reductions():
    out = np.zeros((3, 64), np.uint32)
    body = """
  setp.lt.u32 %p1, %t, 40;
  bar.red.popc.u32 %r1, 0, %p1;
  bar.red.and.pred %p2, 0, %p1;
  bar.red.or.pred %p3, 0, %p1;
  selp.b32 %r2, 1, 0, %p2;
  selp.b32 %r3, 1, 0, %p3;
  mad.wide.u32 %rd1, %t, 4, %rd0;
  st.global.u32 [%rd1], %r1;
  st.global.u32 [%rd1+256], %r2;
  st.global.u32 [%rd1+512], %r3;"""
    launch(body, out, params="p", block=64)
    np.testing.assert_array_equal(out, np.repeat([[40], [0], [1]], 64, axis=1))


def test_mbarrier_phases_and_states():
    # Parity 1 of a fresh barrier passes; a phase needs all arrivals and all bytes.
    out = np.zeros(8, np.uint32)
    body = f"""{init_barriers(2)}
  @!%p1 bra END;
  mbarrier.test_wait.parity.shared.b64 %p2, [%base], 1;
  selp.b32 %r1, 1, 0, %p2;
  mbarrier.arrive.shared.b64 %rd1, [%base];
  mbarrier.pending_count.b64 %r2, %rd1;
  mbarrier.arrive.expect_tx.shared.b64 %rd2, [%base], 16;
  mbarrier.test_wait.shared.b64 %p2, [%base], %rd2;
  selp.b32 %r3, 1, 0, %p2;
  mbarrier.complete_tx.relaxed.cta.shared.b64 [%base], 16;
  mbarrier.test_wait.shared.b64 %p2, [%base], %rd2;
  selp.b32 %r4, 1, 0, %p2;
  mbarrier.try_wait.parity.shared.b64 %p2, [%base], 1;
  selp.b32 %r5, 1, 0, %p2;
  mbarrier.inval.shared.b64 [%base];
  st.global.v4.u32 [%rd0], {{%r1, %r2, %r3, %r4}};
  st.global.u32 [%rd0+16], %r5;
END:"""
    launch(body, out, params="p")
    np.testing.assert_array_equal(out[:5], [1, 2, 0, 1, 0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(
            "mbarrier.arrive.shared.b64 _, [%base+8];",
            "no mbarrier was initialised",
            id="none there",
        ),
        pytest.param(
            "mbarrier.init.shared.b64 [%base], 1;", "already initialised", id="initialised twice"
        ),
        pytest.param(
            "@%p1 mbarrier.arrive.shared.b64 _, [%base], 3;",
            "3 arrivals, but only 1 of 1 are pending",
            id="too many arrivals",
        ),
        pytest.param("ld.shared.u32 %r1, [%base];", "read of the mbarrier object", id="read"),
        pytest.param(
            "st.shared.u32 [%base+4], %t;", "overwrite of the mbarrier object", id="overwritten"
        ),
        pytest.param("mbarrier.inval.shared.b64 [%base+4];", "misaligned", id="misaligned"),
        pytest.param(
            wait("W"),
            "deadlock(.|\n)*in phase 0 with 1 of 1 arrivals and 0 bytes pending",
            id="arrival missing",
        ),
        pytest.param(expect(64) + wait("W"), "0 of 1 arrivals and 64 bytes", id="bytes missing"),
    ],
)
def test_mbarrier_misuse(body, message):
    with pytest.raises(EmulatorError, match=message):
        launch(f"{init_barriers(1)}\n  {body}")
