// Loads and stores of registers, and matrix fragments.
//
// PTX ISA: `ld`, `st`, `ldu`, `ld.global.nc`, `prefetch`, `ldmatrix`, `stmatrix`, `movmatrix`, `discard`, `applypriority`.
#include <cstring>

#include "decode.h"
#include "machine.h"
#include "memory.h"

namespace emulator {
namespace {

// Address of lane i of the instruction: base register (32 or 64 bits) plus offset.
struct Addresses {
  const uint32_t* narrow;
  const uint64_t* wide;
  int64_t offset;
  Addresses(Warp& w, const Instruction& in)
      : narrow(in.option[5] ? nullptr : row<uint32_t>(w, in.a)), wide(in.option[5] ? row<uint64_t>(w, in.a) : nullptr),
        offset(in.immediate) {}
  uint64_t operator[](int lane) const { return (wide ? wide[lane] : narrow[lane]) + static_cast<uint64_t>(offset); }
};

// Which kind of memory an access goes to once a generic address is known.
enum class Where : uint8_t { kGlobal, kShared, kLocal };

struct Target {
  uint8_t* host;
  SharedPlace place;  // shared only
  Where where;
};

template <Space kSpace, bool kWrite>
inline Target resolve(Warp& w, int lane, uint64_t address, uint32_t bytes) {
  if (address & (bytes - 1)) {
    throw Fault(format("misaligned address 0x%llx for %u bytes (lane %d)", static_cast<unsigned long long>(address), bytes, lane));
  }
  constexpr bool kGeneric = kSpace == Space::kGeneric;
  if (kSpace == Space::kShared || kSpace == Space::kSharedCluster ||
      (kGeneric && address >> 32 == kSharedWindow >> 32)) {
    SharedPlace place = locate_shared(w, static_cast<uint32_t>(address), bytes, kSpace != Space::kShared);
    return {place.host(), place, Where::kShared};
  }
  if (kSpace == Space::kLocal || (kGeneric && address >> 32 == kLocalWindow >> 32)) {
    return {local_pointer(w, lane, address, bytes), {}, Where::kLocal};
  }
  return {check_global(grid_of(w), address, bytes, kWrite), {}, Where::kGlobal};
}

template <class T>
inline T read_host(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// An access of the race check. Scoped ones (option[1]: acquire, release, relaxed, volatile) synchronise instead.
template <bool kWrite>
void note_shared(Races& races, Warp& w, const Instruction& in, const SharedPlace& place, uint32_t bytes) {
  if (in.option[1]) {
    Clock& cell = races.atomic_cell(*place.cta, place.offset & ~3u);
    if (kWrite) races.release(w, cell);
    else races.acquire(w, cell);
  } else if (kWrite) {
    races.write(races.thread(w), *place.cta, place.offset, bytes, Races::Proxy::kGeneric, &in);
  } else {
    races.read(races.thread(w), *place.cta, place.offset, bytes, Races::Proxy::kGeneric, &in);
  }
}

// T: the type in memory. option[0]: the register is 64 bits wide. in.size = sizeof(T), in.count elements.
template <Space kSpace, class T>
void load(Warp& w, const Instruction& in, uint32_t mask) {
  Addresses addresses(w, in);
  const Slot* slots = &w.program->lists[in.list];
  uint32_t total = static_cast<uint32_t>(sizeof(T) * in.count);
  uint64_t shared = 0, global = 0;
  Races* races = races_of(w);
  for_lanes(mask, [&](int lane) {
    Target target = resolve<kSpace, false>(w, lane, addresses[lane], total);
    if (target.where == Where::kShared) {
      require_written(target.place, total);
      if (races) note_shared<false>(*races, w, in, target.place, total);
      shared += total;
    } else {
      global += total;
    }
    for (int i = 0; i < in.count; ++i) {
      if (slots[i] == kNoSlot) continue;
      T value = read_host<T>(target.host + i * sizeof(T));
      if (in.option[0]) {
        row<uint64_t>(w, slots[i])[lane] = static_cast<uint64_t>(static_cast<int64_t>(value));
      } else {
        row<uint32_t>(w, slots[i])[lane] = static_cast<uint32_t>(static_cast<int32_t>(value));
      }
    }
  });
  if (races && shared) races->touch(w, mask);
  w.cta->counters.shared_read += shared;
  w.cta->counters.global_read += global;
  if (in.option[1]) w.give_way();  // a load that may be spinning
}

template <Space kSpace, class T>
void store(Warp& w, const Instruction& in, uint32_t mask) {
  Addresses addresses(w, in);
  const Slot* slots = &w.program->lists[in.list];
  uint32_t total = static_cast<uint32_t>(sizeof(T) * in.count);
  uint64_t shared = 0, global = 0;
  Races* races = races_of(w);
  for_lanes(mask, [&](int lane) {
    Target target = resolve<kSpace, true>(w, lane, addresses[lane], total);
    if (target.where == Where::kShared) {
      mark_written(target.place, total);
      if (races) note_shared<true>(*races, w, in, target.place, total);
      shared += total;
    } else {
      global += total;
    }
    for (int i = 0; i < in.count; ++i) {
      T value = static_cast<T>(in.option[0] ? row<uint64_t>(w, slots[i])[lane] : row<uint32_t>(w, slots[i])[lane]);
      std::memcpy(target.host + i * sizeof(T), &value, sizeof value);
    }
  });
  if (races && shared) races->touch(w, mask);
  w.cta->counters.shared_written += shared;
  w.cta->counters.global_written += global;
  note_progress(w);
}

template <Space kSpace>
void load128(Warp& w, const Instruction& in, uint32_t mask) {
  Addresses addresses(w, in);
  uint64_t* d = row<uint64_t>(w, w.program->lists[in.list]);
  for_lanes(mask, [&](int lane) {
    Target target = resolve<kSpace, false>(w, lane, addresses[lane], 16);
    if (target.where == Where::kShared) {
      require_written(target.place, 16);
      if (Races* races = races_of(w)) {
        note_shared<false>(*races, w, in, target.place, 16);
        races->touch(w, 1u << lane);
      }
    }
    d[lane] = read_host<uint64_t>(target.host);
    d[kLanes + lane] = read_host<uint64_t>(target.host + 8);
  });
}
template <Space kSpace>
void store128(Warp& w, const Instruction& in, uint32_t mask) {
  Addresses addresses(w, in);
  const uint64_t* d = row<uint64_t>(w, w.program->lists[in.list]);
  for_lanes(mask, [&](int lane) {
    Target target = resolve<kSpace, true>(w, lane, addresses[lane], 16);
    if (target.where == Where::kShared) {
      mark_written(target.place, 16);
      if (Races* races = races_of(w)) {
        note_shared<true>(*races, w, in, target.place, 16);
        races->touch(w, 1u << lane);
      }
    }
    std::memcpy(target.host, &d[lane], 8);
    std::memcpy(target.host + 8, &d[kLanes + lane], 8);
  });
  note_progress(w);
}

template <Space kSpace>
Execute choose(bool is_load, int bytes, bool is_signed) {
  switch (bytes) {
    case 1: return is_load ? (is_signed ? load<kSpace, int8_t> : load<kSpace, uint8_t>) : store<kSpace, uint8_t>;
    case 2: return is_load ? (is_signed ? load<kSpace, int16_t> : load<kSpace, uint16_t>) : store<kSpace, uint16_t>;
    case 4: return is_load ? (is_signed ? load<kSpace, int32_t> : load<kSpace, uint32_t>) : store<kSpace, uint32_t>;
    case 8: return is_load ? load<kSpace, uint64_t> : store<kSpace, uint64_t>;
    case 16: return is_load ? load128<kSpace> : store128<kSpace>;
    default: return nullptr;
  }
}

// ld{.sem}{.scope}{.space}{.cache}{.vec}.type d, [a]{, policy}
void decode_transfer(Decoder& d) {
  if (d.has("async")) return decode_store_async(d);
  bool is_load = d.part(0) != "st";
  d.allow({"weak", "relaxed", "acquire", "release", "volatile", "mmio", "cta", "cluster", "gpu", "sys", "global", "shared",
           "shared::cta", "shared::cluster", "local", "param", "param::entry", "const", "ca", "cg", "cs", "lu", "cv", "wb", "wt",
           "nc", "v2", "v4", "v8", "b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16", "b32", "u32", "s32", "f32", "b64", "u64",
           "s64", "f64", "b128", "unified"},
          {"L1::", "L2::", "level::"});
  Space space = Space::kGeneric;
  if (d.has("global")) space = Space::kGlobal;
  if (d.has("shared") || d.has("shared::cta")) space = Space::kShared;
  if (d.has("shared::cluster")) space = Space::kSharedCluster;
  if (d.has("local")) space = Space::kLocal;
  if (d.has("param") || d.has("param::entry") || d.has("const")) space = Space::kGlobal;
  std::string_view type = d.last_part();
  int bits = type_bits(type);
  int count = d.has("v2") ? 2 : d.has("v4") ? 4 : d.has("v8") ? 8 : 1;
  const Parsed& value = d.operand(is_load ? 0 : 1);
  const Parsed& first = value.kind == Parsed::kVector ? value.elements.at(0) : value;
  // A register may be wider than the type.
  int register_bits = bits == 128 ? 128 : first.kind == Parsed::kRegister && d.is_wide(first) ? 64 : bits == 64 ? 64 : 32;
  if (is_load) d.destinations(value, register_bits);
  else if (register_bits == 32) d.sources(value, bits < 32 ? bits : 32);
  else d.sources(value, register_bits);
  if (d.in.count != count) d.fail("has a vector of the wrong length");
  d.in.option[5] = d.address(d.operand(is_load ? 1 : 0));
  d.in.option[0] = register_bits == 64;
  d.in.option[1] = d.has_any({"acquire", "release", "relaxed", "volatile", "mmio"}) && !d.has("param");
  d.in.size = static_cast<uint8_t>(bits / 8);
  bool is_signed = type[0] == 's';
  switch (space) {
    case Space::kGlobal: d.in.execute = choose<Space::kGlobal>(is_load, bits / 8, is_signed); break;
    case Space::kShared: d.in.execute = choose<Space::kShared>(is_load, bits / 8, is_signed); break;
    case Space::kSharedCluster: d.in.execute = choose<Space::kSharedCluster>(is_load, bits / 8, is_signed); break;
    case Space::kLocal: d.in.execute = choose<Space::kLocal>(is_load, bits / 8, is_signed); break;
    default: d.in.execute = choose<Space::kGeneric>(is_load, bits / 8, is_signed); break;
  }
}

// ---- matrix fragments ------------------------------------------------------------------------------------------------------

// ldmatrix/stmatrix .m8n8.b16: lane 8m + r gives the address of row r (16 bytes) of matrix m. Lane t holds columns 2(t%4),
// 2(t%4)+1 of row t/4, or with .trans the same of the transposed matrix.
template <bool kLoad, bool kTranspose>
void matrix_b16(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) throw Fault("a matrix fragment needs all 32 lanes");
  Addresses addresses(w, in);
  const Slot* slots = &w.program->lists[in.list];
  Races* races = races_of(w);
  if (races) races->touch(w, mask);
  for (int m = 0; m < in.count; ++m) {
    uint32_t* fragment = row<uint32_t>(w, slots[m]);
    uint16_t matrix[8][8];
    SharedPlace rows[8];
    for (int r = 0; r < 8; ++r) {
      uint64_t address = addresses[8 * m + r];
      rows[r] = resolve<Space::kGeneric, !kLoad>(w, 8 * m + r, in.option[5] ? address : address | kSharedWindow, 16).place;
      if (kLoad) {
        require_written(rows[r], 16);
        if (races) races->read(races->thread(w), *rows[r].cta, rows[r].offset, 16, Races::Proxy::kGeneric, &in);
        std::memcpy(matrix[r], rows[r].host(), 16);
      }
    }
    for (int t = 0; t < kLanes; ++t) {
      int major = t / 4, minor = 2 * (t % 4);
      uint16_t *low = kTranspose ? &matrix[minor][major] : &matrix[major][minor],
               *high = kTranspose ? &matrix[minor + 1][major] : &matrix[major][minor + 1];
      if (kLoad) {
        fragment[t] = *low | uint32_t{*high} << 16;
      } else {
        *low = static_cast<uint16_t>(fragment[t]);
        *high = static_cast<uint16_t>(fragment[t] >> 16);
      }
    }
    if (!kLoad) {
      for (int r = 0; r < 8; ++r) {
        mark_written(rows[r], 16);
        if (races) races->write(races->thread(w), *rows[r].cta, rows[r].offset, 16, Races::Proxy::kGeneric, &in);
        std::memcpy(rows[r].host(), matrix[r], 16);
      }
    }
  }
  (kLoad ? w.cta->counters.shared_read : w.cta->counters.shared_written) += 128u * in.count;
  if (!kLoad) note_progress(w);
}

// ldmatrix .m16n16.trans.b8: 16 rows of 16 bytes, row r of matrix m from lane 16m + r, two registers for each matrix; byte
// v + 2w of register i of lane t is row 4(t%4) + 2i + v, column t/4 + 8w. stmatrix .m16n8.trans.b8: 8 rows of 16 bytes from
// lanes 8m + r, one register; byte v + 2w of lane t is row 2(t%4) + v, column t/4 + 8w.
template <bool kLoad>
void matrix_b8(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) throw Fault("a matrix fragment needs all 32 lanes");
  Addresses addresses(w, in);
  const Slot* slots = &w.program->lists[in.list];
  constexpr int kRegisters = kLoad ? 2 : 1, kRows = kLoad ? 16 : 8;
  Races* races = races_of(w);
  for (int m = 0; m < in.count / kRegisters; ++m) {
    uint8_t matrix[16][16];
    SharedPlace rows[16];
    for (int r = 0; r < kRows; ++r) {
      uint64_t address = addresses[kRows * m + r];
      rows[r] = resolve<Space::kGeneric, !kLoad>(w, kRows * m + r, in.option[5] ? address : address | kSharedWindow, 16).place;
      if (!kLoad) continue;
      require_written(rows[r], 16);
      if (races) races->read(races->thread(w), *rows[r].cta, rows[r].offset, 16, Races::Proxy::kGeneric, &in);
      std::memcpy(matrix[r], rows[r].host(), 16);
    }
    for (int i = 0; i < kRegisters; ++i) {
      uint32_t* fragment = row<uint32_t>(w, slots[m * kRegisters + i]);
      for (int t = 0; t < kLanes; ++t) {
        uint32_t value = 0;
        for (int byte = 0; byte < 4; ++byte) {
          int from = (kLoad ? 4 * (t % 4) + 2 * i : 2 * (t % 4)) + byte % 2;
          uint8_t& cell = matrix[from][t / 4 + 8 * (byte / 2)];
          if (kLoad) value |= uint32_t{cell} << (8 * byte);
          else cell = static_cast<uint8_t>(fragment[t] >> (8 * byte));
        }
        if (kLoad) fragment[t] = value;
      }
    }
    for (int r = 0; !kLoad && r < kRows; ++r) {
      mark_written(rows[r], 16);
      if (races) races->write(races->thread(w), *rows[r].cta, rows[r].offset, 16, Races::Proxy::kGeneric, &in);
      std::memcpy(rows[r].host(), matrix[r], 16);
    }
  }
  (kLoad ? w.cta->counters.shared_read : w.cta->counters.shared_written) += 16u * kRows * (in.count / kRegisters);
  if (!kLoad) note_progress(w);
}

void decode_matrix(Decoder& d) {
  bool is_load = d.part(0) == "ldmatrix";
  d.allow({"sync", "aligned", "m8n8", "m16n16", "m16n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16", "b8"});
  bool trans = d.has("trans");
  int matrices = d.has("x4") ? 4 : d.has("x2") ? 2 : 1;
  const Parsed& registers = d.operand(is_load ? 0 : 1);
  if (is_load) d.destinations(registers, 32); else d.sources(registers, 32);
  d.in.option[5] = d.address(d.operand(is_load ? 1 : 0));
  bool bytes = d.has("b8");
  if (d.in.count != matrices * (bytes && is_load ? 2 : 1)) d.fail("has the wrong number of registers");
  if (bytes) {
    if (!trans) d.fail("needs .trans");
    d.in.execute = is_load ? matrix_b8<true> : matrix_b8<false>;
  } else if (is_load) {
    d.in.execute = trans ? matrix_b16<true, true> : matrix_b16<true, false>;
  } else {
    d.in.execute = trans ? matrix_b16<false, true> : matrix_b16<false, false>;
  }
}

void move_matrix(Warp& w, const Instruction& in, uint32_t) {  // movmatrix: transposes an 8x8 fragment of 16-bit elements
  const uint32_t* a = row<uint32_t>(w, in.a);
  uint16_t matrix[8][8];
  for (int t = 0; t < kLanes; ++t) {
    matrix[t / 4][2 * (t % 4)] = static_cast<uint16_t>(a[t]);
    matrix[t / 4][2 * (t % 4) + 1] = static_cast<uint16_t>(a[t] >> 16);
  }
  uint32_t* d = row<uint32_t>(w, in.d);
  for (int t = 0; t < kLanes; ++t) d[t] = matrix[2 * (t % 4)][t / 4] | uint32_t{matrix[2 * (t % 4) + 1][t / 4]} << 16;
}
void decode_movmatrix(Decoder& d) {
  d.in.d = d.destination(d.operand(0), 32);
  d.in.a = d.source(d.operand(1), 32);
  d.in.execute = move_matrix;
}

void nothing(Warp&, const Instruction&, uint32_t) {}
void decode_hint(Decoder& d) { d.in.execute = nothing; }  // caches are not modelled

// createpolicy: an opaque cache policy.
void create_policy(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(mask, [&](int lane) { row<uint64_t>(w, in.d)[lane] = 0; });
}
void decode_createpolicy(Decoder& d) {
  d.in.d = d.destination(d.operand(0), 64);
  d.in.execute = create_policy;
}

}  // namespace

void register_memory(Families& f) {
  f["ld"] = f["ldu"] = f["st"] = decode_transfer;
  f["ldmatrix"] = f["stmatrix"] = decode_matrix;
  f["movmatrix"] = decode_movmatrix;
  f["prefetch"] = f["prefetchu"] = f["applypriority"] = f["discard"] = decode_hint;
  f["createpolicy"] = decode_createpolicy;
  register_atomics(f);
}

}  // namespace emulator
