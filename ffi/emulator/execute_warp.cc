// Instructions of a whole warp: shuffles, votes, matches, reductions, election.
//
// PTX ISA: `shfl.sync`, `vote.sync`, `match.sync`, `redux.sync`, `elect.sync`, `activemask`. The machine has already brought
// together the lanes of the member mask, so `mask` is who executes.
#include "decode.h"
#include "machine.h"

namespace emulator {
namespace {

enum class Shuffle : uint8_t { kUp, kDown, kBfly, kIdx };

void shuffle(Warp& w, const Instruction& in, uint32_t mask) {  // d|p, a, b (lane), c (clamp and segment mask)
  uint32_t a[kLanes], result[kLanes], valid = 0;
  const uint32_t *source = row<uint32_t>(w, in.a), *b = row<uint32_t>(w, in.b), *c = row<uint32_t>(w, in.c);
  for (int i = 0; i < kLanes; ++i) a[i] = source[i];
  for (int lane = 0; lane < kLanes; ++lane) {
    int value = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
    int max_lane = (lane & segment) | (clamp & ~segment), min_lane = lane & segment;
    int from = lane;
    bool ok = false;
    switch (static_cast<Shuffle>(in.option[0])) {
      case Shuffle::kUp: from = lane - value; ok = from >= max_lane; break;
      case Shuffle::kDown: from = lane + value; ok = from <= max_lane; break;
      case Shuffle::kBfly: from = lane ^ value; ok = from <= max_lane; break;
      case Shuffle::kIdx: from = min_lane | (value & ~segment); ok = from <= max_lane; break;
    }
    if (!ok) from = lane;
    if ((mask >> lane & 1) && !(mask >> from & 1)) {
      throw Fault(format("shfl.sync: lane %d reads lane %d, which does not take part", lane, from));
    }
    result[lane] = a[from];
    valid |= static_cast<uint32_t>(ok) << lane;
  }
  if (in.d != kNoSlot) {
    uint32_t* d = row<uint32_t>(w, in.d);
    for_lanes(mask, [&](int lane) { d[lane] = result[lane]; });
  }
  write_predicate(w, in.e, valid, mask);
}

void decode_shfl(Decoder& d) {
  std::string_view mode = d.part(d.part(1) == "sync" ? 2 : 1);
  d.in.option[0] = static_cast<uint8_t>(mode == "up" ? Shuffle::kUp : mode == "down" ? Shuffle::kDown
                                        : mode == "bfly" ? Shuffle::kBfly : Shuffle::kIdx);
  const Parsed& result = d.operand(0);
  bool pair = result.kind == Parsed::kPair;
  d.in.d = d.destination(pair ? result.elements[0] : result, 32);
  if (pair) d.in.e = d.predicate_destination(result.elements[1]);
  d.in.a = d.source(d.operand(1), 32);
  d.in.b = d.source(d.operand(2), 32);
  d.in.c = d.source(d.operand(3), 32);
  if (d.has("sync")) d.in.members = d.source(d.operand(4), 32);
  d.in.execute = shuffle;
}

enum class Vote : uint8_t { kAll, kAny, kUni, kBallot };

void vote(Warp& w, const Instruction& in, uint32_t mask) {
  uint32_t p = read_predicate(w, in.p) & mask;
  bool result = false;
  switch (static_cast<Vote>(in.option[0])) {
    case Vote::kAll: result = p == mask; break;
    case Vote::kAny: result = p != 0; break;
    case Vote::kUni: result = p == 0 || p == mask; break;
    case Vote::kBallot: {
      uint32_t* d = row<uint32_t>(w, in.d);
      for_lanes(mask, [&](int lane) { d[lane] = p; });
      return;
    }
  }
  write_predicate(w, in.d, result ? kFullMask : 0, mask);
}

void decode_vote(Decoder& d) {
  std::string_view mode = d.part(d.part(1) == "sync" ? 2 : 1);
  Vote what = mode == "all" ? Vote::kAll : mode == "any" ? Vote::kAny : mode == "uni" ? Vote::kUni : Vote::kBallot;
  d.in.option[0] = static_cast<uint8_t>(what);
  d.in.d = what == Vote::kBallot ? d.destination(d.operand(0), 32) : d.predicate_destination(d.operand(0));
  d.in.p = d.predicate_source(d.operand(1));
  if (d.has("sync")) d.in.members = d.source(d.operand(2), 32);
  d.in.execute = vote;
}

template <class T>
void match(Warp& w, const Instruction& in, uint32_t mask) {
  const T* a = row<T>(w, in.a);
  uint32_t result[kLanes] = {};
  for_lanes(mask, [&](int lane) {
    for_lanes(mask, [&](int other) { result[lane] |= static_cast<uint32_t>(a[lane] == a[other]) << other; });
  });
  bool all = result[first_lane(mask)] == mask;
  uint32_t* d = row<uint32_t>(w, in.d);
  for_lanes(mask, [&](int lane) { d[lane] = in.option[0] ? (all ? mask : 0) : result[lane]; });
  write_predicate(w, in.e, all ? kFullMask : 0, mask);
}

void decode_match(Decoder& d) {  // match.any.sync.b32 d, a, members; match.all.sync.b32 d|p, a, members
  const Parsed& result = d.operand(0);
  bool pair = result.kind == Parsed::kPair;
  int bits = type_bits(d.last_part());
  d.in.option[0] = d.has("all");
  d.in.d = d.destination(pair ? result.elements[0] : result, 32);
  if (pair) d.in.e = d.predicate_destination(result.elements[1]);
  d.in.a = d.source(d.operand(1), bits);
  d.in.members = d.source(d.operand(2), 32);
  d.in.execute = bits == 64 ? match<uint64_t> : match<uint32_t>;
}

enum class Reduce : uint8_t { kAdd, kMin, kMax, kAnd, kOr, kXor };

void reduce(Warp& w, const Instruction& in, uint32_t mask) {
  const uint32_t* a = row<uint32_t>(w, in.a);
  uint32_t result = a[first_lane(mask)];
  bool is_signed = in.option[1];
  for_lanes(mask & (mask - 1), [&](int lane) {
    uint32_t x = a[lane];
    bool less = is_signed ? static_cast<int32_t>(x) < static_cast<int32_t>(result) : x < result;
    switch (static_cast<Reduce>(in.option[0])) {
      case Reduce::kAdd: result += x; break;
      case Reduce::kMin: result = less ? x : result; break;
      case Reduce::kMax: result = less ? result : x; break;
      case Reduce::kAnd: result &= x; break;
      case Reduce::kOr: result |= x; break;
      case Reduce::kXor: result ^= x; break;
    }
  });
  uint32_t* d = row<uint32_t>(w, in.d);
  for_lanes(mask, [&](int lane) { d[lane] = result; });
}

void reduce_float(Warp& w, const Instruction& in, uint32_t mask) {  // redux.sync.{min,max}{.abs}{.NaN}.f32
  const uint32_t* a = row<uint32_t>(w, in.a);
  FloatMode mode;
  mode.propagate_nan = in.option[2];
  auto value = [&](int lane) { return as_float(in.option[1] ? a[lane] & 0x7fffffff : a[lane]); };
  float result = value(first_lane(mask));
  for_lanes(mask & (mask - 1), [&](int lane) {
    result = static_cast<Reduce>(in.option[0]) == Reduce::kMin ? min_f32(result, value(lane), mode) : max_f32(result, value(lane), mode);
  });
  uint32_t* d = row<uint32_t>(w, in.d);
  for_lanes(mask, [&](int lane) { d[lane] = as_bits(result); });
}

void decode_redux(Decoder& d) {
  d.allow({"sync", "add", "min", "max", "and", "or", "xor", "abs", "NaN", "u32", "s32", "b32", "f32"});
  std::string_view op = d.part(2), type = d.last_part();
  d.in.option[0] = static_cast<uint8_t>(op == "add" ? Reduce::kAdd : op == "min" ? Reduce::kMin : op == "max" ? Reduce::kMax
                                        : op == "and" ? Reduce::kAnd : op == "or" ? Reduce::kOr : Reduce::kXor);
  d.in.d = d.destination(d.operand(0), 32);
  d.in.a = d.source(d.operand(1), 32);
  d.in.members = d.source(d.operand(2), 32);
  d.in.option[1] = type == "f32" ? d.has("abs") : type == "s32";
  d.in.option[2] = d.has("NaN");
  d.in.execute = type == "f32" ? reduce_float : reduce;
}

void elect(Warp& w, const Instruction& in, uint32_t mask) {  // the lowest lane; the ISA leaves the choice open but stable
  int leader = first_lane(mask);
  if (in.d != kNoSlot) for_lanes(mask, [&](int lane) { row<uint32_t>(w, in.d)[lane] = leader; });
  write_predicate(w, in.e, 1u << leader, mask);
}
void decode_elect(Decoder& d) {
  const Parsed& result = d.operand(0);
  if (result.kind != Parsed::kPair) d.fail("needs d|p");
  d.in.d = d.destination(result.elements[0], 32);
  d.in.e = d.predicate_destination(result.elements[1]);
  d.in.members = d.source(d.operand(1), 32);
  d.in.execute = elect;
}

void active_mask(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(mask, [&](int lane) { row<uint32_t>(w, in.d)[lane] = mask; });
}
void decode_activemask(Decoder& d) {
  d.in.d = d.destination(d.operand(0), 32);
  d.in.execute = active_mask;
}

}  // namespace

void register_warp(Families& f) {
  f["shfl"] = decode_shfl;
  f["vote"] = decode_vote;
  f["match"] = decode_match;
  f["redux"] = decode_redux;
  f["elect"] = decode_elect;
  f["activemask"] = decode_activemask;
}

}  // namespace emulator
