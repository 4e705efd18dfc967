// Integer arithmetic, logic, shifts, bit fields, selection, moves and predicates.
//
// PTX ISA: "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic", "Comparison and Selection
// Instructions", "Logic and Shift Instructions", `mov`, `prmt`. The lane loops are compiled for the host's baseline and for
// AVX2, and the better one is chosen when a module is decoded.
#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <unordered_map>

#include "execute_integer.h"
#include "machine.h"

namespace emulator {
namespace {

struct LaneEntry {
  const char* operands;
  Execute execute;
};

namespace baseline {
#include "integer_lanes.inc"
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EMULATOR_HAS_AVX2 1
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,lzcnt,popcnt")
namespace avx2 {
#include "integer_lanes.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif

bool has_avx2() {
#ifdef EMULATOR_HAS_AVX2
  static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  return yes;
#else
  return false;
#endif
}

const LaneEntry* find_lanes(std::string_view opcode) {
#ifdef EMULATOR_HAS_AVX2
  static const auto table = has_avx2() ? avx2::lane_table() : baseline::lane_table();
#else
  static const auto table = baseline::lane_table();
#endif
  auto found = table.find(opcode);
  return found == table.end() ? nullptr : &found->second;
}

CompareFunction find_integer_compare(std::string_view name, std::string_view type) {
#ifdef EMULATOR_HAS_AVX2
  if (has_avx2()) return avx2::find_comparison(name, type);
#endif
  return baseline::find_comparison(name, type);
}

// ---- predicates ------------------------------------------------------------------------------------------------------------

enum class Logic : uint8_t { kAnd, kOr, kXor, kNone };

Logic parse_logic(std::string_view name) {
  return name == "and" ? Logic::kAnd : name == "or" ? Logic::kOr : name == "xor" ? Logic::kXor : Logic::kNone;
}
inline uint32_t combine(Logic logic, uint32_t a, uint32_t b) {
  switch (logic) {
    case Logic::kAnd: return a & b;
    case Logic::kOr: return a | b;
    case Logic::kXor: return a ^ b;
    default: return a;
  }
}

void predicate_logic(Warp& w, const Instruction& in, uint32_t mask) {
  write_predicate(w, in.d, combine(static_cast<Logic>(in.option[0]), read_predicate(w, in.a), read_predicate(w, in.b)), mask);
}
void predicate_not(Warp& w, const Instruction& in, uint32_t mask) { write_predicate(w, in.d, ~read_predicate(w, in.a), mask); }
void predicate_move(Warp& w, const Instruction& in, uint32_t mask) { write_predicate(w, in.d, read_predicate(w, in.a), mask); }

void set_predicate(Warp& w, const Instruction& in, uint32_t mask) {
  write_predicate(w, in.d, in.compare(row<uint8_t>(w, in.a), row<uint8_t>(w, in.b)), mask);
}
void set_predicates(Warp& w, const Instruction& in, uint32_t mask) {  // with a boolean operator or a second result
  uint32_t result = in.compare(row<uint8_t>(w, in.a), row<uint8_t>(w, in.b));
  uint32_t c = in.p == kNoSlot ? kFullMask : read_predicate(w, in.p);
  Logic logic = static_cast<Logic>(in.option[0]);
  uint32_t first = combine(logic, result, c), second = combine(logic, ~result, c);
  write_predicate(w, in.d, first, mask);
  write_predicate(w, in.e, second, mask);
}
void set_value(Warp& w, const Instruction& in, uint32_t mask) {  // set: all ones or 1.0
  uint32_t result = in.compare(row<uint8_t>(w, in.a), row<uint8_t>(w, in.b));
  if (in.p != kNoSlot) result = combine(static_cast<Logic>(in.option[0]), result, read_predicate(w, in.p));
  uint32_t* d = row<uint32_t>(w, in.d);
  for_lanes(mask, [&](int i) { d[i] = result >> i & 1 ? static_cast<uint32_t>(in.immediate) : 0; });
}

CompareFunction find_any_compare(std::string_view name, std::string_view type, bool ftz) {
  if (CompareFunction integer = find_integer_compare(name, type)) return integer;
  static const std::unordered_map<std::string_view, Compare> names = {
      {"eq", Compare::kEq}, {"ne", Compare::kNe}, {"lt", Compare::kLt}, {"le", Compare::kLe}, {"gt", Compare::kGt},
      {"ge", Compare::kGe}, {"equ", Compare::kEqu}, {"neu", Compare::kNeu}, {"ltu", Compare::kLtu}, {"leu", Compare::kLeu},
      {"gtu", Compare::kGtu}, {"geu", Compare::kGeu}, {"num", Compare::kNum}, {"nan", Compare::kNan}};
  static const std::unordered_map<std::string_view, FloatType> types = {
      {"f32", FloatType::kF32}, {"f64", FloatType::kF64}, {"f16", FloatType::kF16}, {"bf16", FloatType::kBF16}};
  auto n = names.find(name);
  auto t = types.find(type);
  return n == names.end() || t == types.end() ? nullptr : find_compare(n->second, t->second, ftz);
}

// setp.lt{.and}{.ftz}.s32 p|q, a, b{, !c}
void decode_setp(Decoder& d) {
  std::string_view type = d.last_part();
  if (type == "f16x2" || type == "bf16x2") return decode_packed_setp(d);
  Logic logic = parse_logic(d.part(2));
  d.in.compare = find_any_compare(d.part(1), type, d.has("ftz"));
  if (!d.in.compare) d.fail("is a comparison not known here");
  int bits = type_bits(type);
  const Parsed& result = d.operand(0);
  bool pair = result.kind == Parsed::kPair;
  d.in.d = d.predicate_destination(pair ? result.elements[0] : result);
  if (pair) d.in.e = d.predicate_destination(result.elements[1]);
  d.in.a = d.source(d.operand(1), bits);
  d.in.b = d.source(d.operand(2), bits);
  d.in.option[0] = static_cast<uint8_t>(logic);
  if (logic != Logic::kNone) d.in.p = d.predicate_source(d.operand(3));
  d.in.execute = pair || logic != Logic::kNone ? set_predicates : set_predicate;
}

void decode_set(Decoder& d) {  // set.lt{.and}{.ftz}.u32.f32 d, a, b{, c}
  std::string_view from = d.last_part(), to = d.part(d.statement.parts.size() - 2);
  if (to != "u32" && to != "s32" && to != "f32") d.fail("is a form not known here");
  Logic logic = parse_logic(d.part(2));
  d.in.compare = find_any_compare(d.part(1), from, d.has("ftz"));
  if (!d.in.compare) d.fail("is a comparison not known here");
  d.in.d = d.destination(d.operand(0), 32);
  d.in.a = d.source(d.operand(1), type_bits(from));
  d.in.b = d.source(d.operand(2), type_bits(from));
  d.in.option[0] = static_cast<uint8_t>(logic);
  if (logic != Logic::kNone) d.in.p = d.predicate_source(d.operand(3));
  d.in.immediate = to == "f32" ? as_bits(1.0f) : kFullMask;
  d.in.execute = set_value;
}

// ---- carries ---------------------------------------------------------------------------------------------------------------

enum : uint8_t { kReadsCarry = 1, kWritesCarry = 2, kSubtracts = 4, kMultiplies = 8, kHigh = 16, kSigned = 32 };

template <class T>
void with_carry(Warp& w, const Instruction& in, uint32_t mask) {
  using Wide = std::conditional_t<sizeof(T) == 8, unsigned __int128, uint64_t>;
  const T *a = row<T>(w, in.a), *b = row<T>(w, in.b), *c = in.c == kNoSlot ? nullptr : row<T>(w, in.c);
  T* d = row<T>(w, in.d);
  uint8_t mode = in.option[0];
  for_lanes(mask, [&](int i) {
    Wide left = a[i], right = b[i], carry = mode & kReadsCarry ? w.carry[i] : 0, result;
    if (mode & kMultiplies) {
      T product = static_cast<T>(left * right);
      if (mode & kHigh) {
        product = static_cast<T>((left * right) >> (8 * sizeof(T)));
        if (mode & kSigned) {
          if (a[i] >> (8 * sizeof(T) - 1)) product -= b[i];
          if (b[i] >> (8 * sizeof(T) - 1)) product -= a[i];
        }
      }
      result = Wide{product} + c[i] + carry;
    } else {
      result = mode & kSubtracts ? left - right - carry : left + right + carry;
    }
    if (mode & kWritesCarry) w.carry[i] = static_cast<uint32_t>(result >> (8 * sizeof(T)) & 1);
    d[i] = static_cast<T>(result);
  });
}

bool decode_carry(Decoder& d) {  // add.cc, addc, addc.cc, sub.cc, subc, mad.lo.cc, madc.hi ...
  std::string_view name = d.part(0);
  bool reads = name == "addc" || name == "subc" || name == "madc";
  if (!reads && !d.has("cc")) return false;
  std::string_view type = d.last_part();
  int bits = type_bits(type);
  uint8_t mode = (reads ? kReadsCarry : 0) | (d.has("cc") ? kWritesCarry : 0);
  if (name[0] == 's') mode |= kSubtracts;
  if (name[0] == 'm') mode |= kMultiplies | (d.has("hi") ? kHigh : 0) | (type[0] == 's' ? kSigned : 0);
  d.in.option[0] = mode;
  d.in.d = d.destination(d.operand(0), bits);
  d.in.a = d.source(d.operand(1), bits);
  d.in.b = d.source(d.operand(2), bits);
  if (mode & kMultiplies) d.in.c = d.source(d.operand(3), bits);
  d.in.execute = bits == 64 ? with_carry<uint64_t> : with_carry<uint32_t>;
  return true;
}

// ---- lop3 with a predicate ---------------------------------------------------------------------------------------------------

// lop3.and.b32 d|p, a, b, c, table, q: the plain one, then a predicate of its result, which may be `_`.
void lop3_predicate(Warp& w, const Instruction& in, uint32_t mask) {
  uint32_t result[kLanes];
  const uint32_t *a = row<uint32_t>(w, in.a), *b = row<uint32_t>(w, in.b), *c = row<uint32_t>(w, in.c);
  uint32_t any = 0;
  for (int i = 0; i < kLanes; ++i) {
    result[i] = 0;
    for (int k = 0; k < 8; ++k) {
      if (in.immediate >> k & 1) result[i] |= (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
    }
    any |= uint32_t{result[i] != 0} << i;
  }
  uint32_t p = combine(static_cast<Logic>(in.option[0]), any, read_predicate(w, in.p));
  if (in.d != kNoSlot) for_lanes(mask, [&](int i) { row<uint32_t>(w, in.d)[i] = result[i]; });
  write_predicate(w, in.e, p, mask);
}

void decode_lop3(Decoder& d) {
  Logic logic = parse_logic(d.part(1));
  if (logic != Logic::kAnd && logic != Logic::kOr) return decode_integer(d);
  const Parsed& result = d.operand(0);
  if (result.kind != Parsed::kPair) d.fail("needs a predicate beside its result");
  d.in.d = d.destination(result.elements[0], 32);
  d.in.e = d.predicate_destination(result.elements[1]);
  d.in.a = d.source(d.operand(1), 32);
  d.in.b = d.source(d.operand(2), 32);
  d.in.c = d.source(d.operand(3), 32);
  d.in.immediate = d.integer(d.operand(4));
  d.in.p = d.predicate_source(d.operand(5));
  d.in.option[0] = static_cast<uint8_t>(logic);
  d.in.execute = lop3_predicate;
}

// ---- decoding ----------------------------------------------------------------------------------------------------------------

}  // namespace

void decode_integer(Decoder& d) {
  if (d.last_part() == "pred") {
    Logic logic = parse_logic(d.part(0));
    d.in.d = d.predicate_destination(d.operand(0));
    d.in.a = d.predicate_source(d.operand(1));
    if (d.part(0) == "not") d.in.execute = predicate_not;
    if (logic != Logic::kNone) {
      d.in.b = d.predicate_source(d.operand(2));
      d.in.option[0] = static_cast<uint8_t>(logic);
      d.in.execute = predicate_logic;
    }
    return;
  }
  if (decode_carry(d)) return;
  if (!decode_lanes(d)) d.fail("is an integer instruction not known here");
}

bool decode_lanes(Decoder& d) {
  const LaneEntry* entry = find_lanes(d.statement.opcode);
  if (!entry) return false;
  Slot* slots[] = {&d.in.d, &d.in.a, &d.in.b, &d.in.c, &d.in.p};
  for (size_t i = 0; entry->operands[i]; ++i) {
    const Parsed& operand = d.operand(i);
    switch (entry->operands[i]) {
      case 'p': d.in.p = d.predicate_source(operand); break;
      case 'i': d.in.immediate = d.integer(operand); break;
      case 'W': d.in.p = d.source(operand, 32); break;
      default: {
        int bits = entry->operands[i] == 'q' ? 64 : entry->operands[i] == 'h' ? 16 : 32;
        *slots[i] = i == 0 ? d.destination(operand, bits) : d.source(operand, bits);
      }
    }
  }
  if (d.operands() != std::strlen(entry->operands)) d.fail("has the wrong number of operands");
  if (d.in.d == kNoSlot) d.fail("has no result");
  d.in.execute = entry->execute;
  return true;
}

void decode_predicate_move(Decoder& d) {
  d.in.d = d.predicate_destination(d.operand(0));
  d.in.a = d.predicate_source(d.operand(1));
  d.in.execute = predicate_move;
}

void register_integer(Families& f) {
  for (auto name : {"mul24", "mad24", "sad", "rem", "popc", "clz", "brev", "bfind", "bfe", "bfi", "bmsk", "szext",
                    "dp4a", "prmt", "shf", "shl", "shr", "and", "or", "xor", "not", "cnot", "selp", "slct", "addc",
                    "subc", "madc"}) {
    f[name] = decode_integer;
  }
  f["lop3"] = decode_lop3;
  f["setp"] = decode_setp;
  f["set"] = decode_set;
}

}  // namespace emulator
