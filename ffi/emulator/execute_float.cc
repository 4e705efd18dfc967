// Floating-point arithmetic and conversions: decoding, and the selection of lanes around the whole-warp functions of
// arithmetic.h and formats.h.
//
// PTX ISA: "Floating-Point Instructions", "Half-Precision Floating-Point Instructions", "Mixed Precision", `cvt`.
#include <cstring>

#include "execute_integer.h"
#include "machine.h"

namespace emulator {
namespace {

template <class T>
inline void keep_lanes(T* d, const T* value, uint32_t mask) {
  for (int i = 0; i < kLanes; ++i) d[i] = mask >> i & 1 ? value[i] : d[i];
}

template <class T>
void run_float(Warp& w, const Instruction& in, uint32_t mask) {
  const uint8_t *a = row<uint8_t>(w, in.a), *b = in.b == kNoSlot ? nullptr : row<uint8_t>(w, in.b),
                *c = in.c == kNoSlot ? nullptr : row<uint8_t>(w, in.c);
  if (mask == kFullMask) return in.float_function(row<T>(w, in.d), a, b, c);
  alignas(64) T value[kLanes];
  in.float_function(value, a, b, c);
  keep_lanes(row<T>(w, in.d), value, mask);
}

struct Conversion {
  CvtSpec spec;
  ConvertFunction function;
};

template <class T>
void run_convert(Warp& w, const Instruction& in, uint32_t mask) {
  const Conversion& conversion = *static_cast<const Conversion*>(in.extra);
  const void* sources[8];
  const Slot* slots = &w.program->lists[in.list];
  for (int i = 0; i < in.count; ++i) sources[i] = row<uint8_t>(w, slots[i]);
  if (mask == kFullMask) return conversion.function(conversion.spec, row<T>(w, in.d), sources);
  alignas(64) T value[kLanes];
  conversion.function(conversion.spec, value, sources);
  keep_lanes(row<T>(w, in.d), value, mask);
}

void decode_cvt(Decoder& d) {
  Conversion conversion;
  if (!parse_cvt(d.statement.opcode, &conversion.spec)) d.fail("is a conversion not known here");
  conversion.function = find_convert(conversion.spec);
  if (!conversion.function) d.fail("is a conversion not known here");
  const CvtSpec& spec = conversion.spec;
  std::vector<Slot> slots;
  for (size_t i = 1; i < d.operands(); ++i) {
    // Data operands first, then the random bits of .rs.
    bool data = slots.size() < static_cast<size_t>(spec.sources());
    int bits = data && spec.from_wide() ? 64 : 32;
    for (Slot slot : d.slots_of(d.operand(i), bits, false)) slots.push_back(slot);
  }
  size_t expected = spec.sources() + spec.has_random();
  if (slots.size() != expected) d.fail("has the wrong number of operands");
  d.in.list = d.append(slots);
  d.in.count = static_cast<uint16_t>(slots.size());
  d.in.d = d.destination(d.operand(0), spec.to_wide() ? 64 : 32);
  d.in.extra = d.keep(conversion);
  d.in.execute = spec.to_wide() ? run_convert<uint64_t> : run_convert<uint32_t>;
}

bool parse_float_type(std::string_view name, FloatType* type) {
  static const std::unordered_map<std::string_view, FloatType> types = {
      {"f32", FloatType::kF32}, {"f64", FloatType::kF64}, {"f32x2", FloatType::kF32x2}, {"f16", FloatType::kF16},
      {"f16x2", FloatType::kF16x2}, {"bf16", FloatType::kBF16}, {"bf16x2", FloatType::kBF16x2}};
  auto found = types.find(name);
  if (found == types.end()) return false;
  *type = found->second;
  return true;
}

int bits_of(FloatType type) {
  return type == FloatType::kF64 || type == FloatType::kF32x2 ? 64
         : type == FloatType::kF16 || type == FloatType::kBF16 ? 16 : 32;
}

void decode_float_or_integer(Decoder& d) {
  if (!decode_float(d)) decode_integer(d);
}

enum class Test : uint8_t { kFinite, kInfinite, kNumber, kNotANumber, kNormal, kSubnormal };

template <class T>
void test_property(Warp& w, const Instruction& in, uint32_t mask) {
  constexpr int kFraction = sizeof(T) == 8 ? 52 : 23;
  constexpr T kOnes = sizeof(T) == 8 ? 0x7ff : 0xff;
  const T* a = row<T>(w, in.a);
  uint32_t result = 0;
  for (int i = 0; i < kLanes; ++i) {
    T exponent = a[i] >> kFraction & kOnes, fraction = a[i] & ((T{1} << kFraction) - 1);
    bool yes = false;
    switch (static_cast<Test>(in.option[0])) {
      case Test::kFinite: yes = exponent != kOnes; break;
      case Test::kInfinite: yes = exponent == kOnes && fraction == 0; break;
      case Test::kNumber: yes = exponent != kOnes || fraction == 0; break;
      case Test::kNotANumber: yes = exponent == kOnes && fraction != 0; break;
      case Test::kNormal: yes = exponent != kOnes && exponent != 0; break;
      case Test::kSubnormal: yes = exponent == 0 && fraction != 0; break;
    }
    result |= static_cast<uint32_t>(yes) << i;
  }
  write_predicate(w, in.d, result, mask);
}

void decode_testp(Decoder& d) {
  static const std::unordered_map<std::string_view, Test> tests = {
      {"finite", Test::kFinite}, {"infinite", Test::kInfinite}, {"number", Test::kNumber},
      {"notanumber", Test::kNotANumber}, {"normal", Test::kNormal}, {"subnormal", Test::kSubnormal}};
  auto found = tests.find(d.part(1));
  if (found == tests.end()) d.fail("is a test not known here");
  bool wide = d.last_part() == "f64";
  d.in.option[0] = static_cast<uint8_t>(found->second);
  d.in.d = d.predicate_destination(d.operand(0));
  d.in.a = d.source(d.operand(1), wide ? 64 : 32);
  d.in.execute = wide ? test_property<uint64_t> : test_property<uint32_t>;
}

template <class T>
void copy_sign(Warp& w, const Instruction& in, uint32_t mask) {  // the sign of a on b
  constexpr T kSign = T{1} << (8 * sizeof(T) - 1);
  const T *a = row<T>(w, in.a), *b = row<T>(w, in.b);
  T* d = row<T>(w, in.d);
  for_lanes(mask, [&](int i) { d[i] = (b[i] & ~kSign) | (a[i] & kSign); });
}

void decode_copysign(Decoder& d) {
  bool wide = d.last_part() == "f64";
  d.in.d = d.destination(d.operand(0), wide ? 64 : 32);
  d.in.a = d.source(d.operand(1), wide ? 64 : 32);
  d.in.b = d.source(d.operand(2), wide ? 64 : 32);
  d.in.execute = wide ? copy_sign<uint64_t> : copy_sign<uint32_t>;
}

struct PackedComparison {
  Compare compare;
  FloatType type;
  bool ftz;
};

void set_packed_predicates(Warp& w, const Instruction& in, uint32_t mask) {
  const PackedComparison& spec = *static_cast<const PackedComparison*>(in.extra);
  uint32_t low = 0, high = 0;
  compare_packed(spec.compare, spec.type, spec.ftz, row<uint32_t>(w, in.a), row<uint32_t>(w, in.b), &low, &high);
  if (in.p != kNoSlot) {
    uint32_t c = read_predicate(w, in.p);
    auto combine = [&](uint32_t x) { return in.option[0] == 0 ? x & c : in.option[0] == 1 ? x | c : x ^ c; };
    low = combine(low), high = combine(high);
  }
  write_predicate(w, in.d, low, mask);
  write_predicate(w, in.e, high, mask);
}

}  // namespace

void decode_packed_setp(Decoder& d) {  // setp.lt.and.f16x2 p|q, a, b, c
  static const std::unordered_map<std::string_view, Compare> names = {
      {"eq", Compare::kEq}, {"ne", Compare::kNe}, {"lt", Compare::kLt}, {"le", Compare::kLe}, {"gt", Compare::kGt},
      {"ge", Compare::kGe}, {"equ", Compare::kEqu}, {"neu", Compare::kNeu}, {"ltu", Compare::kLtu}, {"leu", Compare::kLeu},
      {"gtu", Compare::kGtu}, {"geu", Compare::kGeu}, {"num", Compare::kNum}, {"nan", Compare::kNan}};
  auto found = names.find(d.part(1));
  if (found == names.end() || d.operand(0).kind != Parsed::kPair) d.fail("is a comparison not known here");
  PackedComparison spec{found->second, d.last_part() == "f16x2" ? FloatType::kF16x2 : FloatType::kBF16x2, d.has("ftz")};
  d.in.d = d.predicate_destination(d.operand(0).elements[0]);
  d.in.e = d.predicate_destination(d.operand(0).elements[1]);
  d.in.a = d.source(d.operand(1), 32);
  d.in.b = d.source(d.operand(2), 32);
  if (d.operands() > 3) {
    d.in.p = d.predicate_source(d.operand(3));
    d.in.option[0] = d.part(2) == "and" ? 0 : d.part(2) == "or" ? 1 : 2;
  }
  d.in.extra = d.keep(spec);
  d.in.execute = set_packed_predicates;
}

bool decode_float(Decoder& d) {
  FloatType type;
  std::string_view last = d.last_part();
  if (!parse_float_type(last, &type)) return false;
  static const std::unordered_map<std::string_view, FloatOp> ops = {
      {"add", FloatOp::kAdd}, {"sub", FloatOp::kSub}, {"mul", FloatOp::kMul}, {"fma", FloatOp::kFma}, {"mad", FloatOp::kFma},
      {"min", FloatOp::kMin}, {"max", FloatOp::kMax}, {"abs", FloatOp::kAbs}, {"neg", FloatOp::kNeg}, {"div", FloatOp::kDiv},
      {"rcp", FloatOp::kRcp}, {"sqrt", FloatOp::kSqrt}, {"rsqrt", FloatOp::kRsqrt}, {"ex2", FloatOp::kEx2},
      {"lg2", FloatOp::kLg2}, {"sin", FloatOp::kSin}, {"cos", FloatOp::kCos}, {"tanh", FloatOp::kTanh}};
  auto op = ops.find(d.part(0));
  if (op == ops.end()) return false;
  d.allow({"rn", "rz", "rm", "rp", "ftz", "sat", "relu", "NaN", "xorsign", "abs", "oob", "approx", "full", "f32", "f64", "f32x2",
           "f16", "f16x2", "bf16", "bf16x2"});
  FloatMode mode;
  if (d.has("rz")) mode.round = Round::kZero;
  if (d.has("rm")) mode.round = Round::kDown;
  if (d.has("rp")) mode.round = Round::kUp;
  mode.ftz = d.has("ftz");
  mode.sat = d.has("sat");
  mode.relu = d.has("relu");
  mode.propagate_nan = d.has("NaN");
  mode.xorsign_abs = d.has("xorsign");
  mode.out_of_bounds_zero = d.has("oob");
  mode.approximate = d.has("approx") || d.has("full");
  size_t inputs = d.operands() - 1;
  if (op->second == FloatOp::kMin || op->second == FloatOp::kMax) mode.inputs = static_cast<int>(inputs);
  FloatType previous;
  bool mixed = d.statement.parts.size() >= 3 && last != "f32" &&
               parse_float_type(d.part(d.statement.parts.size() - 2), &previous) && previous == FloatType::kF32;
  int bits = mixed ? 32 : bits_of(type);
  if (mixed) {
    Format narrow = type == FloatType::kF16 ? Format::kF16 : Format::kBF16;
    d.in.float_function = find_mixed(op->second, narrow, mode);
  } else {
    d.in.float_function = find_float(op->second, type, mode);
  }
  if (!d.in.float_function) d.fail("is a floating-point form that the ISA does not have");
  if (inputs < 1 || inputs > 3) d.fail("has the wrong number of operands");
  d.in.d = d.destination(d.operand(0), bits);
  Slot* slots[] = {&d.in.a, &d.in.b, &d.in.c};
  for (size_t i = 0; i < inputs; ++i) *slots[i] = d.source(d.operand(i + 1), bits);
  d.in.execute = bits == 64 ? run_float<uint64_t> : run_float<uint32_t>;
  return true;
}

void register_float(Families& f) {
  for (auto name : {"add", "sub", "mul", "div", "min", "max", "abs", "neg", "mad", "fma", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin",
                    "cos", "tanh"}) {
    f[name] = decode_float_or_integer;
  }
  f["cvt"] = decode_cvt;
  f["testp"] = decode_testp;
  f["copysign"] = decode_copysign;
}

}  // namespace emulator
