// The `cvt` instruction.
//
// PTX ISA: "Data Movement and Conversion Instructions: cvt" (9.7.9.21). Every conversion goes through convert_element,
// which is written for clarity; the ones that attention kernels execute most have loops that vectorise, and the tests hold
// the two against each other.

#include <cmath>
#include <utility>

#include "formats.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define EMULATOR_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define EMULATOR_CLONES
#endif

namespace emulator {
namespace {

struct TypeName { const char* name; Format format; int count; };
constexpr TypeName kTypes[] = {
    {"u8", Format::kU8, 1},         {"u16", Format::kU16, 1},       {"u32", Format::kU32, 1},
    {"u64", Format::kU64, 1},       {"s8", Format::kS8, 1},         {"s16", Format::kS16, 1},
    {"s32", Format::kS32, 1},       {"s64", Format::kS64, 1},       {"f16", Format::kF16, 1},
    {"bf16", Format::kBF16, 1},     {"tf32", Format::kTF32, 1},     {"f32", Format::kF32, 1},
    {"f64", Format::kF64, 1},       {"f16x2", Format::kF16, 2},     {"bf16x2", Format::kBF16, 2},
    {"e4m3x2", Format::kE4M3, 2},   {"e5m2x2", Format::kE5M2, 2},   {"e2m3x2", Format::kE2M3, 2},
    {"e3m2x2", Format::kE3M2, 2},   {"e2m1x2", Format::kE2M1, 2},   {"ue8m0x2", Format::kUE8M0, 2},
    {"e4m3x4", Format::kE4M3, 4},   {"e5m2x4", Format::kE5M2, 4},   {"e2m3x4", Format::kE2M3, 4},
    {"e3m2x4", Format::kE3M2, 4},   {"e2m1x4", Format::kE2M1, 4}};

bool is_signed_integer(Format f) { return f >= Format::kS8 && f <= Format::kS64; }
bool is_integer(Format f) { return f <= Format::kS64; }

// Bits between neighbouring elements of a packed register: 6-bit elements are padded to 8.
int stride_of(Format format) { return bits_of(format) == 6 ? 8 : bits_of(format); }

// A value between its two representations: integers as magnitude and sign, floats as double.
struct Value {
  bool integer;
  bool negative;
  uint64_t magnitude;
  double real;
};

Value load_element(Format format, uint64_t bits, bool ftz) {
  Value v{is_integer(format), false, 0, 0};
  if (v.integer) {
    const int width = bits_of(format);
    uint64_t value = width == 64 ? bits : bits & ((uint64_t{1} << width) - 1);
    if (is_signed_integer(format) && (value >> (width - 1)) & 1) {
      v.negative = true;
      value = width == 64 ? ~value + 1 : ((uint64_t{1} << width) - value);
    }
    v.magnitude = value;
  } else if (format == Format::kF64) {
    v.real = as_double(bits);
  } else {
    uint32_t word = static_cast<uint32_t>(bits);
    if (ftz && format == Format::kF32 && (word & 0x7f800000) == 0) word &= 0x80000000;
    v.real = decode(format, word);
  }
  return v;
}

// Rounds to an integral value.
double round_integral(double value, Round round) {
  switch (round) {
    case Round::kZero: return std::trunc(value);
    case Round::kDown: return std::floor(value);
    case Round::kUp: return std::ceil(value);
    default: return std::nearbyint(value);
  }
}

uint64_t to_integer(const CvtSpec& spec, const Value& v) {
  const int width = bits_of(spec.to);
  const bool is_signed = is_signed_integer(spec.to);
  const uint64_t mask = width == 64 ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
  const uint64_t most = is_signed ? mask >> 1 : mask;               // largest value
  const uint64_t least = is_signed ? (mask >> 1) + 1 : 0;           // magnitude of the smallest
  bool negative = v.negative;
  uint64_t magnitude = v.magnitude;
  bool saturate = spec.sat;
  if (!v.integer) {
    // NaN gives 0, but for f64 sources and 64-bit results, which give the top bit.
    if (std::isnan(v.real)) {
      return spec.from == Format::kF64 || width == 64 ? uint64_t{1} << (width - 1) : 0;
    }
    const double rounded = round_integral(v.real, spec.round);
    negative = std::signbit(rounded);
    const double size = std::fabs(rounded);
    magnitude = size >= 0x1p64 ? ~uint64_t{0} : static_cast<uint64_t>(size);
    saturate = true;  // float to integer always saturates
  }
  if (saturate) {
    if (negative && magnitude > least) magnitude = least;
    if (!negative && magnitude > most) magnitude = most;
  }
  return (negative ? ~magnitude + 1 : magnitude) & mask;
}

// Largest double that does not exceed the magnitude, and whether something was lost.
double integer_to_double(uint64_t magnitude, Round round, bool negative) {
  const double nearest = static_cast<double>(magnitude);
  // 2^64 is the one value that does not convert back.
  const bool above = nearest >= 0x1p64 || static_cast<uint64_t>(nearest) > magnitude;
  const bool exact = !above && static_cast<uint64_t>(nearest) == magnitude;
  if (exact || round == Round::kNearestEven) return nearest;
  const bool away = (round == Round::kUp && !negative) || (round == Round::kDown && negative);
  if (away) return above ? nearest : std::nextafter(nearest, INFINITY);
  return above ? std::nextafter(nearest, 0.0) : nearest;
}

uint64_t to_float(const CvtSpec& spec, const Value& v, uint32_t random, int random_bits) {
  double value = v.real;
  if (v.integer) {
    if (spec.to == Format::kF64) {
      const double magnitude = integer_to_double(v.magnitude, spec.round, v.negative);
      return as_bits(v.negative ? -magnitude : magnitude);
    }
    // 53 bits with a sticky last one round correctly to any narrower format.
    const uint64_t m = v.magnitude;
    value = m < (uint64_t{1} << 53) ? static_cast<double>(m)
                                    : static_cast<double>((m >> 11) | ((m & 0x7ff) != 0)) * 2048.0;
    if (v.negative) value = -value;
  }
  if (spec.integer_round) value = round_integral(value, spec.round);
  if (spec.sat) value = std::isnan(value) || value < 0 ? 0.0 : value > 1 ? 1.0 : value;
  if (spec.to == Format::kF64) return std::isnan(value) ? as_bits(as_double(0x7fffffffffffffff)) : as_bits(value);
  EncodeMode mode;
  mode.round = spec.integer_round ? Round::kNearestEven : spec.round;
  mode.satfinite = spec.satfinite;
  mode.relu = spec.relu;
  mode.random = random;
  mode.random_bits = random_bits;
  uint32_t bits = encode(spec.to, value, mode);
  if (spec.ftz && spec.to == Format::kF32 && (bits & 0x7f800000) == 0) bits &= 0x80000000;
  return bits;
}

// The random bits of element `e` (0 is the lowest) and their number.
std::pair<uint32_t, int> random_of(const CvtSpec& spec, int e, uint32_t rbits) {
  if (spec.to == Format::kF16) return {(rbits >> (16 * e)) & 0x1fff, 13};
  if (spec.to == Format::kBF16) return {(rbits >> (16 * e)) & 0xffff, 16};
  // Four results: the upper half of rbits serves a and b, the lower e and f; FP4 takes a byte of each half instead.
  if (spec.to == Format::kE2M1) return {(rbits >> (16 * (e % 2) + 8 * (e / 2))) & 0xff, 8};
  return {(rbits >> (16 * (e / 2))) & 0xffff, 16};
}

uint64_t read_lane(const void* source, bool wide, int lane) {
  return wide ? static_cast<const uint64_t*>(source)[lane] : static_cast<const uint32_t*>(source)[lane];
}

// ---- vectorised conversions -----------------------------------------------------------------------------------------

// Chooses without control flow, which would keep the loops below scalar.
inline __attribute__((always_inline)) uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// f32 to a narrow format, round to nearest even, clamped to kTop: the largest finite code or infinity.
template <int kMantissa, int kBias, uint32_t kTop, uint32_t kNan, int kSign>
inline __attribute__((always_inline)) uint32_t narrow(uint32_t bits, bool relu) {
  constexpr int kShift = 23 - kMantissa;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = ((magnitude + (1u << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1)) >> kShift) -
                          (static_cast<uint32_t>(127 - kBias) << kMantissa);
  // Adding a number whose last place is the format's smallest step rounds a subnormal.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 1 - kBias - kMantissa + 23) << 23;
  const uint32_t subnormal = as_bits(as_float(magnitude) + as_float(kMagic)) - kMagic;
  uint32_t code = select(magnitude < (static_cast<uint32_t>(128 - kBias) << 23), subnormal, normal);
  code = select(code < kTop, code, kTop);
  const uint32_t negative = bits >> 31;
  code = select((negative & static_cast<uint32_t>(relu)) != 0, 0, code | (negative << kSign));
  return select(magnitude > 0x7f800000, kNan, code);
}

#define EMULATOR_NARROW_X2(NAME, MANTISSA, BIAS, TOP, NAN_CODE, SIGN, STRIDE)                          \
  EMULATOR_CLONES void NAME(const CvtSpec& spec, void* d, const void* const* sources) {                \
    const uint32_t* a = static_cast<const uint32_t*>(sources[0]);                                      \
    const uint32_t* b = static_cast<const uint32_t*>(sources[1]);                                      \
    uint32_t* out = static_cast<uint32_t*>(d);                                                         \
    const bool relu = spec.relu;                                                                       \
    for (int lane = 0; lane < kLanes; ++lane) {                                                        \
      out[lane] = (narrow<MANTISSA, BIAS, TOP, NAN_CODE, SIGN>(a[lane], relu) << STRIDE) |             \
                  narrow<MANTISSA, BIAS, TOP, NAN_CODE, SIGN>(b[lane], relu);                          \
    }                                                                                                  \
  }
EMULATOR_NARROW_X2(to_f16x2, 10, 15, 0x7c00, 0x7fff, 15, 16)
EMULATOR_NARROW_X2(to_e4m3x2, 3, 7, 0x7e, 0x7f, 7, 8)
EMULATOR_NARROW_X2(to_e5m2x2, 2, 15, 0x7b, 0x7f, 7, 8)
EMULATOR_NARROW_X2(to_e2m1x2, 1, 1, 0x7, 0x7, 3, 4)
#undef EMULATOR_NARROW_X2

inline __attribute__((always_inline)) uint32_t bf16_of(uint32_t bits, bool relu) {
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t code = select((bits >> 31 & static_cast<uint32_t>(relu)) != 0, 0, rounded);
  return select((bits & 0x7fffffff) > 0x7f800000, kNaN16, code);
}

// f32 magnitudes to powers of two, up or down. 2^(c - 127): code 0 is the subnormal 2^-127, 0x00400000.
inline __attribute__((always_inline)) uint32_t ue8m0_of(uint32_t bits, bool up) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t field = magnitude >> 23;
  const uint32_t more = static_cast<uint32_t>((magnitude & 0x7fffff) != 0) & static_cast<uint32_t>(up);
  uint32_t code = field + more;
  code = select(magnitude <= 0x00400000, 0, code);
  code = select(code < 254, code, 254);
  return select(magnitude > 0x7f800000, 255, code);
}

EMULATOR_CLONES void to_ue8m0x2(const CvtSpec& spec, void* d, const void* const* sources) {
  const uint32_t* a = static_cast<const uint32_t*>(sources[0]);
  const uint32_t* b = static_cast<const uint32_t*>(sources[1]);
  uint32_t* out = static_cast<uint32_t*>(d);
  const bool up = spec.round == Round::kUp;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = (ue8m0_of(a[lane], up) << 8) | ue8m0_of(b[lane], up);
}

// f32 to integers of 32 bits, saturating; NaN gives 0.
template <bool kSigned>
inline __attribute__((always_inline)) uint32_t integer_of(float rounded) {
  constexpr float kLow = kSigned ? -0x1p31f : 0.0f, kHigh = kSigned ? 0x1p31f : 0x1p32f;
  if (!(rounded > kLow)) return rounded == rounded ? (kSigned ? 0x80000000u : 0u) : 0u;
  if (rounded >= kHigh) return kSigned ? 0x7fffffffu : 0xffffffffu;
  return static_cast<uint32_t>(static_cast<int64_t>(rounded));
}

template <bool kSigned>
void to_integer32(const CvtSpec& spec, void* d, const void* const* sources) {
  const float* a = static_cast<const float*>(sources[0]);
  uint32_t* out = static_cast<uint32_t*>(d);
  for (int lane = 0; lane < kLanes; ++lane) {
    out[lane] = integer_of<kSigned>(static_cast<float>(round_integral(static_cast<double>(a[lane]), spec.round)));
  }
}

EMULATOR_CLONES void to_bf16x2(const CvtSpec& spec, void* d, const void* const* sources) {
  const uint32_t* a = static_cast<const uint32_t*>(sources[0]);
  const uint32_t* b = static_cast<const uint32_t*>(sources[1]);
  uint32_t* out = static_cast<uint32_t*>(d);
  const bool relu = spec.relu;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = (bf16_of(a[lane], relu) << 16) | bf16_of(b[lane], relu);
}

EMULATOR_CLONES void to_bf16(const CvtSpec& spec, void* d, const void* const* sources) {
  const uint32_t* a = static_cast<const uint32_t*>(sources[0]);
  uint32_t* out = static_cast<uint32_t*>(d);
  const bool relu = spec.relu;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = bf16_of(a[lane], relu);
}

EMULATOR_CLONES void to_f16(const CvtSpec& spec, void* d, const void* const* sources) {
  const uint32_t* a = static_cast<const uint32_t*>(sources[0]);
  uint32_t* out = static_cast<uint32_t*>(d);
  const bool relu = spec.relu;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = narrow<10, 15, 0x7c00, 0x7fff, 15>(a[lane], relu);
}

EMULATOR_CLONES void bf16_to_f32(const CvtSpec&, void* d, const void* const* sources) {
  const uint32_t* a = static_cast<const uint32_t*>(sources[0]);
  uint32_t* out = static_cast<uint32_t*>(d);
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t bits = a[lane] << 16;
    out[lane] = (bits & 0x7fffffff) > 0x7f800000 ? kNaN32 : bits;
  }
}

EMULATOR_CLONES void s32_to_f32(const CvtSpec&, void* d, const void* const* sources) {
  const int32_t* a = static_cast<const int32_t*>(sources[0]);
  uint32_t* out = static_cast<uint32_t*>(d);
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = as_bits(static_cast<float>(a[lane]));
}

EMULATOR_CLONES void u32_to_f32(const CvtSpec&, void* d, const void* const* sources) {
  const uint32_t* a = static_cast<const uint32_t*>(sources[0]);
  uint32_t* out = static_cast<uint32_t*>(d);
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = as_bits(static_cast<float>(a[lane]));
}

}  // namespace

bool parse_cvt(std::string_view mnemonic, CvtSpec* spec) {
  CvtSpec out;
  int types = 0;
  bool first = true;
  while (!mnemonic.empty()) {
    const size_t dot = mnemonic.find('.');
    const std::string_view part = mnemonic.substr(0, dot);
    mnemonic = dot == std::string_view::npos ? std::string_view() : mnemonic.substr(dot + 1);
    if (first) {
      if (part != "cvt") return false;
      first = false;
      continue;
    }
    if (part == "ftz") out.ftz = true;
    else if (part == "sat") out.sat = true;
    else if (part == "satfinite") out.satfinite = true;
    else if (part == "relu") out.relu = true;
    else if (part == "rna") out.round = Round::kNearestAway;
    else if (part == "rs") out.round = Round::kStochastic;
    else if (part == "rn" || part == "rni") out.round = Round::kNearestEven, out.integer_round = part.size() == 3;
    else if (part == "rz" || part == "rzi") out.round = Round::kZero, out.integer_round = part.size() == 3;
    else if (part == "rm" || part == "rmi") out.round = Round::kDown, out.integer_round = part.size() == 3;
    else if (part == "rp" || part == "rpi") out.round = Round::kUp, out.integer_round = part.size() == 3;
    else {
      const TypeName* found = nullptr;
      for (const TypeName& type : kTypes) {
        if (part == type.name) found = &type;
      }
      if (found == nullptr || types == 2) return false;
      (types == 0 ? out.to : out.from) = found->format;
      (types == 0 ? out.to_count : out.from_count) = found->count;
      ++types;
    }
  }
  if (types != 2 || (out.from_count > 1 && out.from_count != out.to_count)) return false;
  *spec = out;
  return true;
}

void convert(const CvtSpec& spec, void* d, const void* const* sources) {
  const int to_stride = stride_of(spec.to), from_stride = stride_of(spec.from);
  const uint64_t from_mask = from_stride == 64 ? ~uint64_t{0} : (uint64_t{1} << from_stride) - 1;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t rbits = spec.has_random() ? static_cast<const uint32_t*>(sources[spec.sources()])[lane] : 0;
    uint64_t result = 0;
    for (int e = 0; e < spec.to_count; ++e) {
      // The first source goes to the highest element.
      const uint64_t bits =
          spec.from_count == 1
              ? read_lane(sources[spec.to_count - 1 - e], spec.from_wide(), lane)
              : (read_lane(sources[0], spec.from_wide(), lane) >> (e * from_stride)) & from_mask;
      const Value value = load_element(spec.from, bits, spec.ftz);
      uint64_t element;
      if (is_integer(spec.to)) {
        element = to_integer(spec, value);
      } else {
        const auto random = spec.has_random() ? random_of(spec, e, rbits) : std::pair<uint32_t, int>{0, 0};
        element = to_float(spec, value, random.first, random.second);
      }
      result |= element << (e * to_stride);
    }
    if (spec.to_wide()) {
      static_cast<uint64_t*>(d)[lane] = result;
    } else {
      static_cast<uint32_t*>(d)[lane] = static_cast<uint32_t>(result);
    }
  }
}

ConvertFunction find_convert(const CvtSpec& spec) {
  const bool plain = !spec.sat && !spec.ftz && !spec.relu;
  if (plain && spec.from == Format::kF32 && spec.to == Format::kUE8M0 && spec.satfinite) return to_ue8m0x2;
  if (plain && spec.integer_round && spec.from == Format::kF32) {
    if (spec.to == Format::kS32) return to_integer32<true>;
    if (spec.to == Format::kU32) return to_integer32<false>;
  }
  const bool nearest = spec.round == Round::kNearestEven && !spec.integer_round && !spec.sat && !spec.ftz;
  if (nearest && spec.from == Format::kF32 && spec.to_count == 2) {
    if (spec.satfinite) {
      if (spec.to == Format::kE4M3) return to_e4m3x2;
      if (spec.to == Format::kE5M2) return to_e5m2x2;
      if (spec.to == Format::kE2M1) return to_e2m1x2;
    } else {
      if (spec.to == Format::kBF16) return to_bf16x2;
      if (spec.to == Format::kF16) return to_f16x2;
    }
  }
  if (nearest && spec.to_count == 1 && !spec.satfinite) {
    if (spec.from == Format::kF32 && spec.to == Format::kBF16) return to_bf16;
    if (spec.from == Format::kF32 && spec.to == Format::kF16) return to_f16;
    if (spec.from == Format::kBF16 && spec.to == Format::kF32 && !spec.relu) return bf16_to_f32;
    if (spec.from == Format::kS32 && spec.to == Format::kF32) return s32_to_f32;
    if (spec.from == Format::kU32 && spec.to == Format::kF32) return u32_to_f32;
  }
  return convert;
}

}  // namespace emulator
