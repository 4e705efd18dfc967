"""The emulator's race check and its schedules on small PTX programs that lack a synchronisation."""

import numpy as np
import pytest
from emulator import EmulatorError, TensorMap
from ptx_programs import expect, fill, init_barriers, launch, load_tile, wait

pytestmark = pytest.mark.emulator

WORDS = np.arange(256, dtype=np.uint32)
LOAD_WORDS = f"""
  add.u32 %r3, %base, 1024;
  mov.b32 %r2, 0;
{expect(WORDS.nbytes)}
{load_tile("%r3", "%rd0", "%r2")}"""


def launch_on_words(body: str, races: bool = True, **options) -> None:
    """The body's LOAD_WORDS brings 0 ... 255 to %base + 1024."""
    launch(body, TensorMap(WORDS, WORDS.shape), params="m", races=races, **options)


@pytest.mark.parametrize("seed", range(1, 9))
def test_schedules_find_a_missing_wait(seed):
    """Reads before the copy lands: some schedules must show it, each of them reproducibly."""
    body = f"{init_barriers(1)}{LOAD_WORDS}\n  ld.shared.u32 %r4, [%r3];{wait('W')}"
    messages = set()
    for _ in range(2):
        try:
            launch_on_words(body, races=False, seed=seed)
            messages.add("")
        except EmulatorError as error:
            messages.add(str(error))
    assert len(messages) == 1
    assert messages == {""} or "which nothing has written" in messages.pop()


def test_a_missing_barrier_is_a_race_although_the_value_is_right():
    body = """
  mad.lo.u32 %r1, %lane, 4, %base;
  setp.ne.u32 %p1, %warp, 0;
  @!%p1 st.shared.u32 [%r1+1024], %t;
  bar.sync 0;
  @%p1 ld.shared.u32 %r2, [%r1+1024];"""
    launch(body, block=64, races=True)
    body = body.replace("bar.sync 0;", "")
    with pytest.raises(
        EmulatorError,
        match=r"race: warp 1 of rank 0 reads shared memory 0x.*which warp 0(.|\n)*Nothing orders",
    ):
        launch(body, block=64, races=True)
    launch(body, block=64)


def test_four_byte_neighbours_are_no_race():
    body = """
  mad.lo.u32 %r1, %warp, 4, %base;
  @%lead st.shared.u32 [%r1], %t;
  @%lead ld.shared.u32 %r2, [%r1];"""
    launch(body, block=128, races=True)


@pytest.mark.parametrize("where", ["writer", "consumer", "nowhere"])
def test_proxy_fences(where):
    # Generic writes, a barrier, then a TMA store by another warp.
    fence = "fence.proxy.async.shared::cta;"
    store = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd0, {%r1, %r1}], [%r3];"
    array = np.zeros((8, 32), np.float32)
    body = f"""
  setp.eq.u32 %p9, %warp, 0;
  @!%p9 bra WRITTEN;
{fill(256, fence if where == "writer" else "")}
WRITTEN:
  bar.sync 0;
  @%p9 bra END;
  {fence if where == "consumer" else ""}
  mov.b32 %r1, 0;
  add.u32 %r3, %base, 1024;
  @%lead {store}
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
END:"""
    if where == "nowhere":
        with pytest.raises(EmulatorError, match="no proxy fence lies between"):
            launch(body, TensorMap(array, (32, 8)), params="m", block=64, races=True)
    else:
        launch(body, TensorMap(array, (32, 8)), params="m", block=64, races=True)
    np.testing.assert_array_equal(array, np.arange(256).reshape(8, 32) * (where != "nowhere"))


def test_a_buffer_may_not_be_refilled_before_it_is_read():
    sync, arrive = "bar.sync 1, 64;", "bar.arrive 1, 64;"
    body = f"""{init_barriers(1)}
  add.u32 %r3, %base, 1024;
  setp.ne.u32 %p4, %warp, 0;
  @%p4 bra READER;
{LOAD_WORDS}
{wait("W")}
  {sync}
{LOAD_WORDS}
{wait("X", parity=1)}
  bra.uni END;
READER:
{wait("V")}
  ld.shared.u32 %r4, [%r3];
  {arrive}
END:"""
    launch_on_words(body, block=64)
    with pytest.raises(EmulatorError, match=r"race: |deadlock"):
        launch_on_words(body.replace(sync, "").replace(arrive, ""), block=64)


def test_barriers_need_their_initialisation_published():
    body = f"{init_barriers(1)}{LOAD_WORDS}{wait('W')}"
    launch_on_words(body)
    with pytest.raises(EmulatorError, match=r"no fence\.mbarrier_init"):
        launch_on_words(body.replace("fence.mbarrier_init.release.cluster;", ""))


def test_an_exit_gives_shared_memory_away():
    """A copy that lands after the CTA has ended would hit the next one."""
    body = f"{init_barriers(1)}{LOAD_WORDS}"
    with pytest.raises(EmulatorError, match="the CTA exits and gives away"):
        launch_on_words(body)
    launch_on_words(body + wait("W"))
