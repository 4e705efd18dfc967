# ruff: noqa: E501 - instructions of PTX are not broken into lines
"""Small PTX programs for the emulator's tests: an entry around a body, and pieces of bodies."""

from emulator import Emulator, Result

CLUSTER_SYNC = """
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;"""


def kernel(body: str, params: str = "", target: str = "sm_90a") -> str:
    """An entry `k`; params: m for a tensor map, p for a pointer, in %rd0 ...

    %t and %warp: the thread and its warp; %lead: one lane of a warp; %base: dynamic shared memory.
    """
    types = {"m": ".param .align 64 .b8 p{}[128]", "p": ".param .u64 p{}"}
    names = ", ".join(types[kind].format(i) for i, kind in enumerate(params))
    loads = "\n".join(
        f"  ld.param.u64 %rd{i}, [p{i}];"
        if kind == "p"
        else f"  mov.b64 %rd{i}, p{i};\n  cvta.param.u64 %rd{i}, %rd{i};"
        for i, kind in enumerate(params)
    )
    return f"""
.version 9.0
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k({names})
{{
  .reg .pred %p<16>;
  .reg .pred %lead;
  .reg .b16 %h<16>;
  .reg .b32 %r<128>;
  .reg .f32 %f<16>;
  .reg .b64 %rd<32>;
  .reg .b32 %t;
  .reg .b32 %lane;
  .reg .b32 %warp;
  .reg .b32 %base;
  mov.u32 %t, %tid.x;
  mov.u32 %lane, %laneid;
  shr.u32 %warp, %t, 5;
  mov.b32 %base, dynamic;
  elect.sync %r0|%lead, -1;
{loads}
{body}
  ret;
}}
"""


def launch(
    body: str,
    *args: object,
    params: str = "",
    target: str = "sm_90a",
    block: int = 32,
    cluster: int = 1,
    grid: int | None = None,
    **options,
) -> Result:
    """Runs `body` on one cluster, or on `grid` CTAs. options: those of Emulator.launch."""
    return Emulator(kernel(body, params, target)).launch(
        "k", grid or cluster, block, args, cluster=cluster, shared=65536, **options
    )


def init_barriers(*counts: int) -> str:
    """mbarriers from %base on that expect so many arrivals, seen by the CTA; %p1: thread 0."""
    inits = "".join(
        f"\n  @%p1 mbarrier.init.shared.b64 [%base+{8 * i}], {count};"
        for i, count in enumerate(counts)
    )
    return f"""
  setp.eq.u32 %p1, %t, 0;{inits}
  fence.mbarrier_init.release.cluster;
  bar.sync 0;"""


def expect(size: int, guard: str = "@%p1") -> str:
    """Arrives at the mbarrier at %base, which then waits for `size` bytes too."""
    return f"\n  {guard} mbarrier.arrive.expect_tx.shared.b64 _, [%base], {size};"


def wait(name: str, barrier: str = "%base", parity: object = 0) -> str:
    """A loop on mbarrier.try_wait.parity."""
    return f"""
{name}:
  mbarrier.try_wait.parity.shared::cta.b64 %p0, [{barrier}], {parity};
  @!%p0 bra {name};"""


def load_tile(shared: str, tensor: str, *coordinates: str, guard: str = "@%p1") -> str:
    """Copies a box of a tensor map to shared memory; its bytes count at the mbarrier at %base."""
    place = f"[{tensor}, {{{', '.join(coordinates)}}}]"
    return f"\n  {guard} cp.async.bulk.tensor.{len(coordinates)}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [{shared}], {place}, [%base];"


def fill(words: int, fence: str = "") -> str:
    """A warp writes 0.0, 1.0 ... to shared memory from %base + 1024 on."""
    return f"""
  mov.b32 %r20, %t;
FILL:
  mad.lo.u32 %r21, %r20, 4, %base;
  cvt.rn.f32.u32 %f1, %r20;
  st.shared.f32 [%r21+1024], %f1;
  add.u32 %r20, %r20, 32;
  setp.lt.u32 %p3, %r20, {words};
  @%p3 bra FILL;
  {fence}
  bar.warp.sync -1;"""


def dump(words: int) -> str:
    """A warp copies shared memory from %base + 1024 on to the array at %rd1."""
    return f"""
  mov.b32 %r20, %t;
DUMP:
  mad.lo.u32 %r21, %r20, 4, %base;
  ld.shared.u32 %r22, [%r21+1024];
  mad.wide.u32 %rd20, %r20, 4, %rd1;
  st.global.u32 [%rd20], %r22;
  add.u32 %r20, %r20, 32;
  setp.lt.u32 %p3, %r20, {words};
  @%p3 bra DUMP;"""
