// Atomics and reductions on shared, distributed shared and global memory.
//
// PTX ISA: `atom`, `red`. Lanes act one after the other in lane order; the ISA leaves the order open. Memory orders and scopes
// matter to the race detector only: the machine executes one instruction of a cluster at a time.
#include <cstring>

#include "decode.h"
#include "machine.h"
#include "memory.h"

namespace emulator {
namespace {

enum class Op : uint8_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor, kExch, kCas };
enum class Type : uint8_t { kU32, kS32, kU64, kS64, kF32, kF64, kF16, kBF16, kF16x2, kBF16x2 };

struct Atomic {
  Op op;
  Type type;
  Space space;
  uint8_t bytes;
};

template <class T>
T integer_op(Op op, T old, T b, T c) {
  switch (op) {
    case Op::kAdd: return static_cast<T>(std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(b));
    case Op::kMin: return old < b ? old : b;
    case Op::kMax: return old < b ? b : old;
    case Op::kInc: return std::make_unsigned_t<T>(old) >= std::make_unsigned_t<T>(b) ? 0 : old + 1;
    case Op::kDec: return old == 0 || std::make_unsigned_t<T>(old) > std::make_unsigned_t<T>(b) ? b : old - 1;
    case Op::kAnd: return old & b;
    case Op::kOr: return old | b;
    case Op::kXor: return old ^ b;
    case Op::kExch: return b;
    case Op::kCas: return old == b ? c : old;
  }
  return old;
}

uint64_t apply(const Atomic& spec, uint64_t old, uint64_t b, uint64_t c) {
  auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
  if (spec.op == Op::kExch) return b;
  if (spec.op == Op::kCas) return old == b ? c : old;
  switch (spec.type) {
    case Type::kU32: return integer_op<uint32_t>(spec.op, low(old), low(b), low(c));
    case Type::kS32: return low(static_cast<uint32_t>(integer_op<int32_t>(spec.op, low(old), low(b), low(c))));
    case Type::kU64: return integer_op<uint64_t>(spec.op, old, b, c);
    case Type::kS64: return integer_op<int64_t>(spec.op, old, b, c);
    case Type::kF32: {
      float x = as_float(low(old)), y = as_float(low(b));
      FloatMode mode;
      mode.ftz = spec.space == Space::kGlobal;  // the ISA: atom.add.f32 on global memory flushes subnormals
      return as_bits(spec.op == Op::kAdd ? add_f32(x, y, mode) : spec.op == Op::kMin ? min_f32(x, y) : max_f32(x, y));
    }
    case Type::kF64: return as_bits(as_double(old) + as_double(b));
    default: {
      Format format = spec.type == Type::kF16 || spec.type == Type::kF16x2 ? Format::kF16 : Format::kBF16;
      uint32_t result = spec.op == Op::kAdd ? add_packed(format, low(old), low(b))
                        : spec.op == Op::kMin ? min_packed(format, low(old), low(b)) : max_packed(format, low(old), low(b));
      return spec.bytes == 2 ? result & 0xffff : result;
    }
  }
}

// in.d or list of results (option[1]: none), in.list operands b (then c); option[5] wide address; count vector elements.
void run_atomic(Warp& w, const Instruction& in, uint32_t mask) {
  const Atomic& spec = *static_cast<const Atomic*>(in.extra);
  const Slot* slots = &w.program->lists[in.list];  // results, operands b, operands c
  bool has_result = in.option[1], has_third = spec.op == Op::kCas;
  int n = in.count;
  const Slot *results = slots, *b = slots + (has_result ? n : 0), *c = b + n;
  auto read = [&](Slot slot, int lane) {
    return spec.bytes == 8 ? row<uint64_t>(w, slot)[lane] : uint64_t{row<uint32_t>(w, slot)[lane]};
  };
  for_lanes(mask, [&](int lane) {
    uint64_t address = (in.option[5] ? row<uint64_t>(w, in.a)[lane] : row<uint32_t>(w, in.a)[lane]) + in.immediate;
    uint32_t total = spec.bytes * n;
    if (address & (total - 1)) throw Fault(format("misaligned atomic at 0x%llx (lane %d)", static_cast<unsigned long long>(address), lane));
    bool shared = spec.space == Space::kShared || spec.space == Space::kSharedCluster ||
                  (spec.space == Space::kGeneric && address >> 32 == kSharedWindow >> 32);
    std::unique_lock<std::mutex> lock;
    uint8_t* host;
    if (shared) {
      SharedPlace place = locate_shared(w, static_cast<uint32_t>(address), total, spec.space != Space::kShared);
      require_written(place, total);
      if (Races* races = races_of(w)) {  // as acquire and release: the machine sees one at a time
        Clock& cell = races->atomic_cell(*place.cta, place.offset & ~3u);
        races->acquire(w, cell);
        races->release(w, cell);
      }
      host = place.host();
    } else {
      host = check_global(grid_of(w), address, total, true);
      lock = std::unique_lock<std::mutex>(global_atomics());
    }
    for (int i = 0; i < n; ++i) {
      uint64_t old = 0;
      std::memcpy(&old, host + i * spec.bytes, spec.bytes);
      uint64_t result = apply(spec, old, read(b[i], lane), has_third ? read(c[i], lane) : 0);
      std::memcpy(host + i * spec.bytes, &result, spec.bytes);
      if (result != old) note_progress(w);
      if (has_result && results[i] != kNoSlot) {
        if (spec.bytes == 8) row<uint64_t>(w, results[i])[lane] = old;
        else row<uint32_t>(w, results[i])[lane] = static_cast<uint32_t>(old);
      }
    }
    (shared ? w.cta->counters.shared_written : w.cta->counters.global_written) += total;
  });
  w.give_way();
}

// atom{.sem}{.scope}{.space}.op{.noftz}{.vec}.type d, [a], b{, c}; red likewise without d.
void decode_atomic(Decoder& d) {
  if (d.has("async")) return decode_store_async(d);
  bool has_result = d.part(0) == "atom";
  d.allow({"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "global", "shared", "shared::cta",
           "shared::cluster", "add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas", "noftz", "v2", "v4", "v8",
           "u32", "s32", "u64", "s64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "b32", "b64", "b16"}, {"L2::"});
  static const std::unordered_map<std::string_view, Op> ops = {
      {"add", Op::kAdd}, {"min", Op::kMin}, {"max", Op::kMax}, {"inc", Op::kInc}, {"dec", Op::kDec}, {"and", Op::kAnd},
      {"or", Op::kOr}, {"xor", Op::kXor}, {"exch", Op::kExch}, {"cas", Op::kCas}};
  static const std::unordered_map<std::string_view, Type> types = {
      {"u32", Type::kU32}, {"b32", Type::kU32}, {"s32", Type::kS32}, {"u64", Type::kU64}, {"b64", Type::kU64},
      {"s64", Type::kS64}, {"f32", Type::kF32}, {"f64", Type::kF64}, {"f16", Type::kF16}, {"bf16", Type::kBF16},
      {"f16x2", Type::kF16x2}, {"bf16x2", Type::kBF16x2}, {"b16", Type::kU32}};
  Atomic spec{};
  bool found = false;
  for (std::string_view part : d.statement.parts) {
    if (auto op = ops.find(part); op != ops.end()) spec.op = op->second, found = true;
  }
  auto type = types.find(d.last_part());
  if (!found || type == types.end()) d.fail("is an atomic not known here");
  spec.type = type->second;
  spec.space = d.has("global") ? Space::kGlobal : d.has("shared") || d.has("shared::cta") ? Space::kShared
               : d.has("shared::cluster") ? Space::kSharedCluster : Space::kGeneric;
  int bits = type_bits(d.last_part());
  spec.bytes = static_cast<uint8_t>(bits / 8);
  size_t at = has_result ? 1 : 0;
  std::vector<Slot> slots;
  if (has_result) slots = d.slots_of(d.operand(0), bits, true);
  std::vector<Slot> b = d.slots_of(d.operand(at + 1), bits, false);
  slots.insert(slots.end(), b.begin(), b.end());
  if (spec.op == Op::kCas) {
    std::vector<Slot> c = d.slots_of(d.operand(at + 2), bits, false);
    slots.insert(slots.end(), c.begin(), c.end());
  }
  d.in.count = static_cast<uint16_t>(b.size());
  d.in.list = d.append(slots);
  d.in.option[1] = has_result;
  d.in.option[5] = d.address(d.operand(at));
  d.in.extra = d.keep(spec);
  d.in.execute = run_atomic;
  bool is_float = spec.type >= Type::kF32;
  if (is_float && spec.op == Op::kAdd && spec.space != Space::kShared) d.program.global_float_atomics = true;
}

}  // namespace

void register_atomics(Families& f) { f["atom"] = f["red"] = decode_atomic; }

}  // namespace emulator
