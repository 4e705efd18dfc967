// Control flow, barriers, fences and the rest that steers warps.
//
// PTX ISA: "Control Flow Instructions", `bar`/`barrier`, `bar.warp.sync`, `barrier.cluster`, `fence`, `membar`, `setmaxnreg`,
// `nanosleep`, `griddepcontrol`, `trap`.
#include "decode.h"
#include "machine.h"
#include "scheduler.h"

namespace emulator {

void decode_cluster_barrier(Decoder& d);

namespace {

void branch(Warp& w, const Instruction& in, uint32_t mask) {
  uint32_t target = static_cast<uint32_t>(in.immediate);
  if (mask == w.mask) w.pc = target;
  else w.branch(mask, target);
}
void decode_bra(Decoder& d) {
  d.allow({"uni"});
  if (d.operand(0).kind != Parsed::kLabel) d.fail("needs a label");
  d.in.immediate = d.operand(0).value;
  d.in.execute = branch;
}

void leave(Warp& w, const Instruction&, uint32_t mask) {
  w.live &= ~mask;
  w.mask &= ~mask;
  w.event = true;
  note_progress(w);
}
void decode_exit(Decoder& d) { d.in.execute = leave; }

void trap(Warp&, const Instruction&, uint32_t) { throw Fault("the kernel trapped"); }
void decode_trap(Decoder& d) { d.in.execute = trap; }

// ---- named barriers --------------------------------------------------------------------------------------------------------

enum class Barrier : uint8_t { kSync, kArrive, kRedAnd, kRedOr, kRedPopc };

bool barrier_ready(Warp& w, const Wait& wait) { return w.cta->barriers[wait.x].generation != wait.y; }
std::string barrier_text(Warp& w, const Wait& wait) {
  const NamedBarrier& b = w.cta->barriers[wait.x];
  return format("barrier %llu: %u of %u threads have arrived", static_cast<unsigned long long>(wait.x), b.arrived,
                b.expected ? b.expected : w.cta->live_warps * 32);
}

void barrier_resumed(Warp& w, const Wait& wait) {
  if (Races* races = races_of(w)) {
    races->acquire(w, races->named(*w.cta, static_cast<uint32_t>(wait.x), wait.y));
    races->sync_lanes(w);
  }
}

void write_reduction(Warp& w, const Instruction& in, uint32_t mask) {
  const NamedBarrier& b = w.cta->barriers[row<uint32_t>(w, in.a)[first_lane(mask)]];
  switch (static_cast<Barrier>(in.option[0])) {
    case Barrier::kRedAnd: write_predicate(w, in.d, b.result_and ? kFullMask : 0, mask); break;
    case Barrier::kRedOr: write_predicate(w, in.d, b.result_or ? kFullMask : 0, mask); break;
    default: for_lanes(mask, [&](int lane) { row<uint32_t>(w, in.d)[lane] = b.result_count; });
  }
}

// in.a barrier, in.b thread count, in.p and in.d of a reduction. A reduction executes a second time to read its result.
void barrier(Warp& w, const Instruction& in, uint32_t mask) {
  Barrier kind = static_cast<Barrier>(in.option[0]);
  bool reduces = kind >= Barrier::kRedAnd;
  if (reduces && w.barrier_result_ready) {
    w.barrier_result_ready = false;
    return write_reduction(w, in, mask);
  }
  int lane = first_lane(mask);
  uint32_t id = row<uint32_t>(w, in.a)[lane];
  uint32_t count = in.b == kNoSlot ? 0 : row<uint32_t>(w, in.b)[lane];
  if (id >= 16) throw Fault(format("barrier %u does not exist (0-15)", id));
  if (count % 32) throw Fault(format("barrier %u: the thread count %u is no multiple of 32", id, count));
  NamedBarrier& b = w.cta->barriers[id];
  if (!b.in_use) {
    b.in_use = true;
    b.expected = count;
    b.arrived = b.warps = 0;
    b.reduce_and = kFullMask, b.reduce_or = 0, b.reduce_count = 0;
  } else if (b.expected != count) {
    throw Fault(format("barrier %u is used with %u threads while it waits for %u", id, count, b.expected));
  }
  if (reduces) {
    uint32_t p = read_predicate(w, in.p) & mask;
    if (p != mask) b.reduce_and = 0;
    b.reduce_or |= p;
    b.reduce_count += __builtin_popcount(p);
  }
  // A warp that syncs after its own arrive counts twice, as on the hardware: FlashAttention-4's first turn relies on it.
  if (kind == Barrier::kArrive && (b.warps >> w.index & 1)) {
    throw Fault(format("the warp arrives at barrier %u a second time before the barrier completes", id));
  }
  b.warps |= 1u << w.index;
  b.arrived += 32;
  uint64_t generation = b.generation;
  if (Races* races = races_of(w)) races->release(w, races->named(*w.cta, id, generation));
  note_progress(w);
  finish_barrier(*w.cta, id);
  if (kind == Barrier::kArrive) return;
  Wait reason;
  reason.ready = barrier_ready;
  reason.describe = barrier_text;
  reason.x = id;
  reason.y = generation;
  reason.resumed = barrier_resumed;
  w.barrier_result_ready = reduces;
  if (b.generation == generation || reduces) w.block(reason, reduces);
  else barrier_resumed(w, reason);
}

// The machine has brought the lanes together.
void warp_sync(Warp& w, const Instruction&, uint32_t mask) {
  if (Races* races = races_of(w); races && mask == w.live) races->sync_lanes(w);
}

void decode_barrier(Decoder& d) {
  if (d.has("warp")) {
    d.in.members = d.source(d.operand(0), 32);
    d.in.converge = true;
    d.in.execute = warp_sync;
    return;
  }
  if (d.part(1) == "cluster") return decode_cluster_barrier(d);
  d.allow({"cta", "sync", "arrive", "red", "popc", "and", "or", "aligned", "u32", "pred"});
  d.in.converge = true;
  size_t at = 0;
  Barrier kind = d.has("arrive") ? Barrier::kArrive : Barrier::kSync;
  if (d.has("red")) {
    kind = d.has("popc") ? Barrier::kRedPopc : d.has("and") ? Barrier::kRedAnd : Barrier::kRedOr;
    d.in.d = kind == Barrier::kRedPopc ? d.destination(d.operand(0), 32) : d.predicate_destination(d.operand(0));
    d.in.p = d.predicate_source(d.operand(d.operands() - 1));
    at = 1;
  }
  d.in.option[0] = static_cast<uint8_t>(kind);
  d.in.a = d.source(d.operand(at), 32);
  size_t counts = d.operands() - at - (at ? 2 : 1);
  if (counts) d.in.b = d.source(d.operand(at + 1), 32);
  if (kind == Barrier::kArrive && !counts) d.fail("needs a thread count");
  d.in.execute = barrier;
}

// ---- cluster barrier -------------------------------------------------------------------------------------------------------

void cluster_arrive(Warp& w, const Instruction& in, uint32_t) {
  if (w.cluster_arrivals != w.cluster_waits) throw Fault("barrier.cluster.arrive twice without a wait");
  if (Races* races = races_of(w)) {
    Clock& clock = races->cluster_phase(w.cluster_arrivals);
    if (in.option[0]) races->release_relaxed(w, clock);
    else races->release(w, clock);
  }
  ++w.cluster_arrivals;
  note_progress(w);
  finish_cluster_barrier(cluster_of(w));
}
bool cluster_ready(Warp& w, const Wait& wait) { return cluster_of(w).barrier_phase >= wait.x; }
std::string cluster_text(Warp& w, const Wait& wait) {
  int missing = 0;
  for (auto& cta : cluster_of(w).ctas) {
    for (Warp& other : cta->warps) missing += !other.done() && other.cluster_arrivals < wait.x;
  }
  return format("barrier.cluster: %d warps have not arrived", missing);
}
void cluster_resumed(Warp& w, const Wait& wait) {
  if (Races* races = races_of(w)) {
    races->acquire(w, races->cluster_phase(wait.x - 1));
    races->sync_lanes(w);
  }
}
void cluster_wait(Warp& w, const Instruction&, uint32_t) {
  if (w.cluster_arrivals != w.cluster_waits + 1) throw Fault("barrier.cluster.wait without an arrive");
  ++w.cluster_waits;
  Wait reason;
  reason.ready = cluster_ready;
  reason.describe = cluster_text;
  reason.x = w.cluster_waits;
  reason.resumed = cluster_resumed;
  if (!cluster_ready(w, reason)) w.block(reason, false);
  else cluster_resumed(w, reason);
}

// ---- registers ---------------------------------------------------------------------------------------------------------------

bool registers_ready(Warp& w, const Wait& wait) { return w.cta->free_registers >= wait.x; }
std::string registers_text(Warp& w, const Wait& wait) {
  return format("setmaxnreg.inc: needs %llu registers, %u are free", static_cast<unsigned long long>(wait.x), w.cta->free_registers);
}
void set_registers(Warp& w, const Instruction& in, uint32_t) {
  uint32_t wanted = static_cast<uint32_t>(in.immediate);
  bool increase = in.option[0];
  if (increase ? wanted < w.registers : wanted > w.registers) {
    throw Fault(format("setmaxnreg.%s %u, but the warp has %u registers", increase ? "inc" : "dec", wanted, w.registers));
  }
  if (!increase) {
    w.cta->free_registers += (w.registers - wanted) * 32;
    w.registers = wanted;
    note_progress(w);
    return;
  }
  uint32_t needed = (wanted - w.registers) * 32;
  if (w.cta->free_registers < needed) {
    Wait reason;
    reason.ready = registers_ready;
    reason.describe = registers_text;
    reason.x = needed;
    return w.block(reason, true);
  }
  w.cta->free_registers -= needed;
  w.registers = wanted;
  note_progress(w);
}
void decode_setmaxnreg(Decoder& d) {
  d.allow({"inc", "dec", "sync", "aligned", "u32"});
  d.in.immediate = d.integer(d.operand(0));
  if (d.in.immediate < 24 || d.in.immediate > 256 || d.in.immediate % 8) d.fail("needs 24 to 256 registers, a multiple of 8");
  d.in.option[0] = d.has("inc");
  d.in.execute = set_registers;
}

void give_way(Warp& w, const Instruction&, uint32_t) { w.give_way(); }
void decode_nanosleep(Decoder& d) { d.in.execute = give_way; }

void nothing(Warp&, const Instruction&, uint32_t) {}
void decode_nothing(Decoder& d) { d.in.execute = nothing; }

enum class Fence : uint8_t { kNone, kMemory, kProxy, kInit };

void fence(Warp& w, const Instruction& in, uint32_t mask) {
  Races* races = races_of(w);
  if (!races) return;
  switch (static_cast<Fence>(in.option[0])) {
    case Fence::kMemory: return races->memory_fence(w);
    case Fence::kProxy: return races->proxy_fence(w, mask);
    case Fence::kInit: return races->init_fence(w);
    case Fence::kNone: return;
  }
}

void decode_fence(Decoder& d) {
  d.allow({"acq_rel", "sc", "acquire", "release", "cta", "cluster", "gpu", "gl", "sys", "proxy", "async", "alias", "mbarrier_init",
           "async::generic", "tensormap::generic", "global", "shared::cta", "shared::cluster"},
          {"async", "tensormap", "sync_restrict"});
  bool async_proxy = d.has("async") || d.has("async::generic");
  d.in.option[0] = static_cast<uint8_t>(d.has("mbarrier_init") ? Fence::kInit
                                        : async_proxy && !d.has("global") ? Fence::kProxy
                                        : d.has("proxy") ? Fence::kNone : Fence::kMemory);
  d.in.execute = fence;
}

}  // namespace

void decode_cluster_barrier(Decoder& d) {
  d.allow({"cluster", "arrive", "wait", "release", "relaxed", "acquire", "aligned"});
  d.in.converge = true;
  d.in.option[0] = d.has("relaxed");
  d.in.execute = d.has("arrive") ? cluster_arrive : cluster_wait;
}

void register_control(Families& f) {
  f["bra"] = decode_bra;
  f["ret"] = f["exit"] = decode_exit;
  f["trap"] = f["brkpt"] = decode_trap;
  f["bar"] = f["barrier"] = decode_barrier;
  f["fence"] = f["membar"] = decode_fence;
  f["setmaxnreg"] = decode_setmaxnreg;
  f["nanosleep"] = decode_nanosleep;
  f["griddepcontrol"] = f["pmevent"] = decode_nothing;
}

}  // namespace emulator
