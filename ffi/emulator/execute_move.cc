// Moves between registers, special registers and address spaces.
//
// PTX ISA: `mov`, `cvta`, `isspacep`, `mapa`, `getctarank`, "Special Registers" (clocks). The other special registers are
// rows of the register file.
#include <chrono>

#include "execute_integer.h"
#include "machine.h"
#include "memory.h"

namespace emulator {
namespace {

// mov.b64 d, {a, b}: in.list holds the parts, low first. Parts of in.option[0] bits.
void pack(Warp& w, const Instruction& in, uint32_t mask) {
  const Slot* parts = &w.program->lists[in.list];
  int bits = in.option[0];
  bool wide = in.option[1];
  uint32_t* d32 = row<uint32_t>(w, in.d);
  uint64_t* d64 = row<uint64_t>(w, in.d);
  if (wide && bits == 32 && mask == kFullMask) {
    const uint32_t *low = row<uint32_t>(w, parts[0]), *high = row<uint32_t>(w, parts[1]);
    for (int i = 0; i < kLanes; ++i) d64[i] = uint64_t{high[i]} << 32 | low[i];
    return;
  }
  uint64_t field = (uint64_t{1} << bits) - 1;
  for_lanes(mask, [&](int lane) {
    uint64_t value = 0;
    for (int i = 0; i < in.count; ++i) value |= (row<uint32_t>(w, parts[i])[lane] & field) << (bits * i);
    if (wide) d64[lane] = value; else d32[lane] = static_cast<uint32_t>(value);
  });
}

void unpack(Warp& w, const Instruction& in, uint32_t mask) {
  const Slot* parts = &w.program->lists[in.list];
  int bits = in.option[0];
  const uint64_t* wide = in.option[1] ? row<uint64_t>(w, in.a) : nullptr;
  const uint32_t* narrow = in.option[1] ? nullptr : row<uint32_t>(w, in.a);
  if (wide && bits == 32 && mask == kFullMask) {
    uint64_t value[kLanes];
    for (int i = 0; i < kLanes; ++i) value[i] = wide[i];
    for (int part = 0; part < 2; ++part) {
      if (parts[part] == kNoSlot) continue;
      uint32_t* d = row<uint32_t>(w, parts[part]);
      for (int i = 0; i < kLanes; ++i) d[i] = static_cast<uint32_t>(value[i] >> (32 * part));
    }
    return;
  }
  uint64_t field = (uint64_t{1} << bits) - 1;
  for_lanes(mask, [&](int lane) {
    uint64_t value = wide ? wide[lane] : narrow[lane];
    for (int i = 0; i < in.count; ++i) {
      if (parts[i] != kNoSlot) row<uint32_t>(w, parts[i])[lane] = static_cast<uint32_t>(value >> (bits * i) & field);
    }
  });
}

void pack128(Warp& w, const Instruction& in, uint32_t mask) {
  const Slot* parts = &w.program->lists[in.list];
  uint64_t* d = row<uint64_t>(w, in.d);
  for (int half = 0; half < 2; ++half) {
    const uint64_t* a = row<uint64_t>(w, parts[half]);
    for_lanes(mask, [&](int lane) { d[half * kLanes + lane] = a[lane]; });
  }
}
void unpack128(Warp& w, const Instruction& in, uint32_t mask) {
  const Slot* parts = &w.program->lists[in.list];
  const uint64_t* a = row<uint64_t>(w, in.a);
  for (int half = 0; half < 2; ++half) {
    if (parts[half] == kNoSlot) continue;
    uint64_t* d = row<uint64_t>(w, parts[half]);
    for_lanes(mask, [&](int lane) { d[lane] = a[half * kLanes + lane]; });
  }
}
void move128(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t* a = row<uint64_t>(w, in.a);
  uint64_t* d = row<uint64_t>(w, in.d);
  for_lanes(mask, [&](int lane) { d[lane] = a[lane], d[kLanes + lane] = a[kLanes + lane]; });
}

// Clocks count executed warp instructions of the cluster: reproducible, and they move while a warp spins.
template <class T>
void read_clock(Warp& w, const Instruction& in, uint32_t mask) {
  uint64_t now = cluster_of(w).instructions + w.executed;
  if (in.option[0]) now = std::chrono::steady_clock::now().time_since_epoch().count();
  T* d = row<T>(w, in.d);
  for_lanes(mask, [&](int lane) { d[lane] = static_cast<T>(in.option[1] ? now >> 32 : now); });
}

void decode_mov(Decoder& d) {
  std::string_view type = d.last_part();
  if (type == "pred") return decode_predicate_move(d);
  int bits = type_bits(type);
  const Parsed &to = d.operand(0), &from = d.operand(1);
  if (from.kind == Parsed::kSpecial) {
    static const std::unordered_map<std::string_view, int> clocks = {
        {"%clock", 0}, {"%clock_hi", 2}, {"%clock64", 0}, {"%globaltimer", 1}, {"%globaltimer_lo", 1}, {"%globaltimer_hi", 3}};
    if (auto found = clocks.find(from.name); found != clocks.end()) {
      d.in.option[0] = found->second & 1;
      d.in.option[1] = found->second >> 1;
      d.in.d = d.destination(to, bits);
      d.in.execute = bits == 64 ? read_clock<uint64_t> : read_clock<uint32_t>;
      return;
    }
  }
  if (bits == 128) {
    if (from.kind == Parsed::kVector) {
      d.sources(from, 64);
      d.in.d = d.destination(to, 128);
      d.in.execute = pack128;
    } else if (to.kind == Parsed::kVector) {
      d.destinations(to, 64);
      d.in.a = d.source(from, 128);
      d.in.execute = unpack128;
    } else {
      d.in.d = d.destination(to, 128);
      d.in.a = d.source(from, 128);
      d.in.execute = move128;
    }
    return;
  }
  if (from.kind == Parsed::kVector || to.kind == Parsed::kVector) {
    bool packing = from.kind == Parsed::kVector;
    size_t parts = packing ? from.elements.size() : to.elements.size();
    int part_bits = bits / static_cast<int>(parts);
    if (packing) d.sources(from, part_bits); else d.destinations(to, part_bits);
    d.in.option[0] = static_cast<uint8_t>(part_bits);
    d.in.option[1] = bits == 64;
    if (packing) d.in.d = d.destination(to, bits); else d.in.a = d.source(from, bits);
    d.in.execute = packing ? pack : unpack;
    return;
  }
  if (!decode_lanes(d)) d.fail("is a move not known here");
}

// ---- address spaces ------------------------------------------------------------------------------------------------------

// Shared and local generic addresses are windows above every host pointer; global and parameter addresses are themselves.
template <class D, class A>
void add_window(Warp& w, const Instruction& in, uint32_t mask) {
  const A* a = row<A>(w, in.a);
  D* d = row<D>(w, in.d);
  for_lanes(mask, [&](int lane) { d[lane] = static_cast<D>(a[lane] + static_cast<uint64_t>(in.immediate)); });
}

void decode_cvta(Decoder& d) {  // cvta{.to}.space.u64 d, a
  bool to = d.has("to");
  std::string_view space = d.part(to ? 2 : 1);
  bool shared = space == "shared" || space == "shared::cta" || space == "shared::cluster", local = space == "local";
  if (!shared && !local && space != "global" && space != "const" && space != "param" && space != "param::entry") {
    d.fail("names a space not known here");
  }
  uint64_t window = shared ? kSharedWindow : local ? kLocalWindow : 0;
  d.in.immediate = static_cast<int64_t>(to ? 0 - window : window);
  int bits = type_bits(d.last_part());
  bool wide_source = bits == 64;
  d.in.a = d.source(d.operand(1), bits);
  d.in.d = d.destination(d.operand(0), bits);
  if (bits != 64) d.fail("needs 64-bit addresses");
  d.in.execute = wide_source ? add_window<uint64_t, uint64_t> : nullptr;
}

void test_space(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t* a = row<uint64_t>(w, in.a);
  uint32_t result = 0;
  for_lanes(mask, [&](int lane) {
    bool shared = (a[lane] >> 32) == (kSharedWindow >> 32), local = (a[lane] >> 32) == (kLocalWindow >> 32);
    bool own = shared && static_cast<uint32_t>(a[lane]) >> 24 == w.cta->rank;
    bool yes = in.option[0] == 0 ? own : in.option[0] == 1 ? shared : in.option[0] == 2 ? local : !shared && !local;
    result |= static_cast<uint32_t>(yes) << lane;
  });
  write_predicate(w, in.d, result, mask);
}

void decode_isspacep(Decoder& d) {
  std::string_view space = d.part(1);
  d.in.option[0] = space == "shared" || space == "shared::cta" ? 0 : space == "shared::cluster" ? 1 : space == "local" ? 2 : 3;
  d.in.d = d.predicate_destination(d.operand(0));
  d.in.a = d.source(d.operand(1), 64);
  d.in.execute = test_space;
}

// mapa{.shared::cluster}.u32 d, a, rank: the same offset in another CTA of the cluster.
template <class T>
void map_address(Warp& w, const Instruction& in, uint32_t mask) {
  const T* a = row<T>(w, in.a);
  const uint32_t* rank = row<uint32_t>(w, in.b);
  T* d = row<T>(w, in.d);
  uint32_t ctas = static_cast<uint32_t>(cluster_of(w).ctas.size());
  for_lanes(mask, [&](int lane) {
    if (rank[lane] >= ctas) throw Fault(format("mapa to rank %u of a cluster of %u", rank[lane], ctas));
    d[lane] = (a[lane] & ~T{0xff000000}) | static_cast<T>(rank[lane]) << 24;
  });
}
template <class T>
void get_rank(Warp& w, const Instruction& in, uint32_t mask) {
  const T* a = row<T>(w, in.a);
  uint32_t* d = row<uint32_t>(w, in.d);
  for_lanes(mask, [&](int lane) { d[lane] = static_cast<uint32_t>(a[lane] >> 24 & 0xff); });
}

void decode_mapa(Decoder& d) {
  int bits = type_bits(d.last_part());
  d.in.d = d.destination(d.operand(0), bits);
  d.in.a = d.source(d.operand(1), bits);
  d.in.b = d.source(d.operand(2), 32);
  d.in.execute = bits == 64 ? map_address<uint64_t> : map_address<uint32_t>;
}
void decode_getctarank(Decoder& d) {
  int bits = type_bits(d.last_part());
  d.in.d = d.destination(d.operand(0), 32);
  d.in.a = d.source(d.operand(1), bits);
  d.in.execute = bits == 64 ? get_rank<uint64_t> : get_rank<uint32_t>;
}

}  // namespace

void register_move(Families& f) {
  f["mov"] = decode_mov;
  f["cvta"] = decode_cvta;
  f["isspacep"] = decode_isspacep;
  f["mapa"] = decode_mapa;
  f["getctarank"] = decode_getctarank;
}

}  // namespace emulator
