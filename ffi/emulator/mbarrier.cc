// mbarrier objects and their instructions. See mbarrier.h.
#include "mbarrier.h"

#include <algorithm>
#include <vector>

#include "decode.h"
#include "machine.h"
#include "memory.h"

namespace emulator {

namespace {

void advance(const SharedPlace& place, Mbarrier& barrier) {
  ++place.cta->cluster->progress;
  if (barrier.pending == 0 && barrier.bytes == 0) {
    ++barrier.phase;
    barrier.pending = barrier.expected;
    if (Races* races = place.cta->cluster->races.get()) {
      races->barrier_done(*place.cta, place.offset) = races->barrier_clock(*place.cta, place.offset);
    }
  }
}

unsigned where(const SharedPlace& place) { return place.cta->shared_base + place.offset; }

}  // namespace

Mbarrier& find_mbarrier(const SharedPlace& place) {
  auto found = place.cta->mbarriers.find(place.offset);
  if (found == place.cta->mbarriers.end()) {
    throw Fault(format("no mbarrier was initialised at shared address 0x%x (rank %u)", where(place), place.cta->rank));
  }
  return found->second;
}

void mbarrier_arrive(const SharedPlace& place, uint32_t count) {
  Mbarrier& barrier = find_mbarrier(place);
  if (count == 0 || count > barrier.pending) {
    throw Fault(format("mbarrier at 0x%x: %u arrivals, but only %u of %u are pending in this phase", where(place), count,
                       barrier.pending, barrier.expected));
  }
  barrier.pending -= count;
  advance(place, barrier);
}

void mbarrier_expect(const SharedPlace& place, int64_t bytes) {
  Mbarrier& barrier = find_mbarrier(place);
  barrier.bytes += bytes;
  if (barrier.bytes > kMbarrierMaxBytes) throw Fault(format("mbarrier at 0x%x: transaction count overflows", where(place)));
  ++place.cta->cluster->progress;
}

void mbarrier_complete(const SharedPlace& place, int64_t bytes) {
  Mbarrier& barrier = find_mbarrier(place);
  barrier.bytes -= bytes;
  if (barrier.bytes < -kMbarrierMaxBytes) throw Fault(format("mbarrier at 0x%x: transaction count underflows", where(place)));
  advance(place, barrier);
}

namespace {

// in.a address (option[5] wide), in.b count, bytes, state or parity; in.c try_wait's time hint is not needed.
enum : uint8_t { kExpectTx = 1, kDrop = 2, kRemote = 4, kParity = 8, kTry = 16, kRelaxed = 32 };

SharedPlace place_of(Warp& w, const Instruction& in, int lane) {
  uint64_t address = (in.option[5] ? row<uint64_t>(w, in.a)[lane] : row<uint32_t>(w, in.a)[lane]) + in.immediate;
  if (address & 7) throw Fault(format("misaligned mbarrier at 0x%llx", static_cast<unsigned long long>(address)));
  return locate_shared(w, static_cast<uint32_t>(address), 8, in.option[0] & kRemote);
}

void init(Warp& w, const Instruction& in, uint32_t mask) {
  std::vector<uint32_t> made;  // by earlier lanes: some kernels initialise with a whole warp
  for_lanes(mask, [&](int lane) {
    SharedPlace place = place_of(w, in, lane);
    uint32_t count = row<uint32_t>(w, in.b)[lane];
    if (count == 0 || count > kMbarrierMaxCount) throw Fault(format("mbarrier.init with a count of %u", count));
    auto present = place.cta->mbarriers.find(place.offset);
    if (present != place.cta->mbarriers.end()) {
      bool same = present->second.expected == count && std::count(made.begin(), made.end(), place.offset) != 0;
      if (same) return;
      throw Fault(format("mbarrier.init of the object at 0x%x, which is already initialised", where(place)));
    }
    for (auto& other : place.cta->mbarriers) {
      if (other.first < place.offset + 8 && place.offset < other.first + 8) throw Fault("mbarrier objects overlap");
    }
    made.push_back(place.offset);
    Mbarrier& barrier = place.cta->mbarriers[place.offset];
    barrier.expected = barrier.pending = count;
    std::memset(place.state(), kBarrierObject, 8);
    if (Races* races = races_of(w)) races->init_barrier(w, *place.cta, place.offset, &in);
  });
  note_progress(w);
}

void invalidate(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    SharedPlace place = place_of(w, in, lane);
    find_mbarrier(place);
    place.cta->mbarriers.erase(place.offset);
    if (Races* races = races_of(w)) races->write(races->thread(w), *place.cta, place.offset, 8, Races::Proxy::kGeneric, &in);
    std::memset(place.state(), kUnwritten, 8);
  });
  note_progress(w);
}

void arrive(Warp& w, const Instruction& in, uint32_t mask) {
  uint8_t flags = in.option[0];
  for_lanes(mask, [&](int lane) {
    SharedPlace place = place_of(w, in, lane);
    Mbarrier& barrier = find_mbarrier(place);
    uint64_t state = barrier.phase << 20 | barrier.pending;
    uint32_t operand = in.b == kNoSlot ? 1 : row<uint32_t>(w, in.b)[lane];
    if (flags & kDrop) {
      uint32_t dropped = flags & kExpectTx ? 1 : operand;
      if (dropped > barrier.expected) throw Fault("mbarrier.arrive_drop of more than the expected count");
      barrier.expected -= dropped;
    }
    if (Races* races = races_of(w)) {
      races->use_barrier(races->thread(w), *place.cta, place.offset, Races::Proxy::kGeneric, &in);
      Clock& clock = races->barrier_clock(*place.cta, place.offset);
      if (flags & kRelaxed) races->release_relaxed(w, clock);
      else races->release(w, clock, mask);
    }
    if (flags & kExpectTx) mbarrier_expect(place, operand);
    mbarrier_arrive(place, flags & kExpectTx ? 1 : operand);
    if (in.d != kNoSlot) row<uint64_t>(w, in.d)[lane] = state;
  });
}

void expect_tx(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(mask, [&](int lane) { mbarrier_expect(place_of(w, in, lane), row<uint32_t>(w, in.b)[lane]); });
}
void complete_tx(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(mask, [&](int lane) { mbarrier_complete(place_of(w, in, lane), row<uint32_t>(w, in.b)[lane]); });
}

// The phase that a wait names has ended.
bool has_ended(Warp& w, const Instruction& in, int lane) {
  Mbarrier& barrier = find_mbarrier(place_of(w, in, lane));
  if (in.option[0] & kParity) {
    uint32_t parity = row<uint32_t>(w, in.b)[lane];
    if (parity > 1) throw Fault(format("mbarrier wait with a parity of %u", parity));
    return (barrier.phase & 1) != parity;
  }
  return barrier.phase != row<uint64_t>(w, in.b)[lane] >> 20;
}

bool wait_ready(Warp& w, const Wait& wait) {
  const Instruction& in = w.program->code[wait.x];
  bool any = false;
  for_lanes(static_cast<uint32_t>(wait.y), [&](int lane) { any |= has_ended(w, in, lane); });
  return any;
}

std::string wait_text(Warp& w, const Wait& wait) {
  const Instruction& in = w.program->code[wait.x];
  int lane = first_lane(static_cast<uint32_t>(wait.y));
  SharedPlace place = place_of(w, in, lane);
  Mbarrier& barrier = find_mbarrier(place);
  std::string parity = in.option[0] & kParity ? format("the end of a phase of parity %u", row<uint32_t>(w, in.b)[lane])
                                              : std::string("the end of the phase of its state");
  return format("mbarrier 0x%x, %s; it is in phase %llu with %u of %u arrivals and %lld bytes pending", where(place),
                parity.c_str(), static_cast<unsigned long long>(barrier.phase), barrier.pending, barrier.expected,
                static_cast<long long>(barrier.bytes));
}

void wait(Warp& w, const Instruction& in, uint32_t mask) {
  uint32_t result = 0;
  for_lanes(mask, [&](int lane) { result |= static_cast<uint32_t>(has_ended(w, in, lane)) << lane; });
  Cluster& cluster = cluster_of(w);
  bool refuse = cluster.adversarial && result && (in.option[0] & kTry) && cluster.random() % 8 == 0;
  if (refuse) result = 0;  // try_wait may give up at any time
  if (!result && (in.option[0] & kTry) && !w.timed_out && !refuse) {
    Wait reason;
    reason.ready = wait_ready;
    reason.describe = wait_text;
    reason.x = w.pc - 1;
    reason.y = mask;
    reason.can_time_out = true;
    return w.block(reason, true);
  }
  w.timed_out = false;
  if (result != mask) w.give_way();
  if (Races* races = races_of(w)) {
    uint32_t last = 0;
    for_lanes(result, [&](int lane) {
      SharedPlace place = place_of(w, in, lane);
      if (place.offset == last) return;
      last = place.offset;
      races->use_barrier(races->thread(w), *place.cta, place.offset, Races::Proxy::kGeneric, &in);
      races->acquire_barrier(w, races->barrier_done(*place.cta, place.offset));
    });
  }
  write_predicate(w, in.d, result, mask);
}

void pending_count(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    row<uint32_t>(w, in.d)[lane] = static_cast<uint32_t>(row<uint64_t>(w, in.a)[lane] & kMbarrierMaxCount);
  });
}

void decode_mbarrier(Decoder& d) {
  d.allow({"init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count",
           "parity", "noComplete", "release", "acquire", "relaxed", "cta", "cluster", "shared", "shared::cta",
           "shared::cluster", "b64"});
  std::string_view op = d.part(1);
  uint8_t& flags = d.in.option[0];
  if (d.has("shared::cluster")) flags |= kRemote;
  if (d.has("relaxed")) flags |= kRelaxed;
  auto address = [&](size_t i) { d.in.option[5] = d.address(d.operand(i)); };
  if (op == "init") {
    address(0);
    d.in.b = d.source(d.operand(1), 32);
    d.in.execute = init;
  } else if (op == "inval") {
    address(0);
    d.in.execute = invalidate;
  } else if (op == "arrive" || op == "arrive_drop") {
    if (op == "arrive_drop") flags |= kDrop;
    if (d.has("expect_tx")) flags |= kExpectTx;
    size_t at = d.operand(0).kind == Parsed::kAddress ? 0 : 1;
    if (at == 1) d.in.d = d.destination(d.operand(0), 64);
    address(at);
    if (!d.has("shared") && !d.has("shared::cta")) flags |= kRemote;  // a generic address may name another CTA
    if (d.operands() > at + 1) d.in.b = d.source(d.operand(at + 1), 32);
    d.in.execute = arrive;
  } else if (op == "expect_tx" || op == "complete_tx") {
    address(0);
    d.in.b = d.source(d.operand(1), 32);
    d.in.execute = op == "expect_tx" ? expect_tx : complete_tx;
  } else if (op == "test_wait" || op == "try_wait") {
    if (op == "try_wait") flags |= kTry;
    if (d.has("parity")) flags |= kParity;
    d.in.d = d.predicate_destination(d.operand(0));
    address(1);
    d.in.b = d.source(d.operand(2), d.has("parity") ? 32 : 64);
    d.in.execute = wait;
  } else if (op == "pending_count") {
    d.in.d = d.destination(d.operand(0), 32);
    d.in.a = d.source(d.operand(1), 64);
    d.in.execute = pending_count;
  }
}

}  // namespace

void register_mbarrier(Families& f) { f["mbarrier"] = decode_mbarrier; }

}  // namespace emulator
