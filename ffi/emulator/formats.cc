// Encoding and decoding of single numbers.
//
// PTX ISA: "Fundamental Types", "Alternate Floating-Point Data Formats"; the rounding, .satfinite and .relu rules are
// those of `cvt`, which is in convert.cc.

#include "formats.h"

#include <cmath>

namespace emulator {
namespace {

// How the bits of a float format of at most 32 bits are laid out.
struct Layout {
  int mantissa, bias;
  uint32_t max_finite;  // magnitude code
  uint32_t infinity;    // 0: the format has none
  uint32_t nan;         // 0: the format has none
  int sign_bit;         // -1: unsigned
};

constexpr Layout layout_of(Format format) {
  switch (format) {
    case Format::kF16: return {10, 15, 0x7bff, 0x7c00, 0x7fff, 15};
    case Format::kBF16: return {7, 127, 0x7f7f, 0x7f80, 0x7fff, 15};
    case Format::kTF32: return {10, 127, 0x3fbff, 0x3fc00, 0x3ffff, 18};  // the upper 19 bits of an f32
    case Format::kF32: return {23, 127, 0x7f7fffff, 0x7f800000, 0x7fffffff, 31};
    case Format::kE4M3: return {3, 7, 0x7e, 0, 0x7f, 7};
    case Format::kUE4M3: return {3, 7, 0x7e, 0, 0x7f, -1};
    case Format::kE5M2: return {2, 15, 0x7b, 0x7c, 0x7f, 7};
    case Format::kE2M3: return {3, 1, 0x1f, 0, 0, 5};
    case Format::kE3M2: return {2, 3, 0x1f, 0, 0, 5};
    case Format::kE2M1: return {1, 1, 0x07, 0, 0, 3};
    default: return {0, 0, 0, 0, 0, -1};
  }
}

// Exact power of two within the range of normal doubles.
double power_of_two(int exponent) { return as_double(static_cast<uint64_t>(exponent + 1023) << 52); }

uint32_t encode_ue8m0(double value, EncodeMode mode) {
  // The sign is ignored: a scale is a magnitude. Code c means 2^(c - 127).
  if (std::isnan(value)) return 0xff;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return mode.satfinite ? 0xfe : 0xff;
  if (magnitude <= power_of_two(-127)) return 0;
  int exponent = static_cast<int>(as_bits(magnitude) >> 52) - 1023;
  const double floor = power_of_two(exponent);
  if (mode.round == Round::kUp ? magnitude > floor : mode.round == Round::kNearestEven && magnitude >= 1.5 * floor) {
    ++exponent;
  }
  if (exponent > 127) return mode.satfinite ? 0xfe : 0xff;
  return static_cast<uint32_t>(exponent + 127);
}

float decode_layout(const Layout& layout, uint32_t bits) {
  const bool negative = layout.sign_bit >= 0 && ((bits >> layout.sign_bit) & 1);
  const uint32_t magnitude = layout.sign_bit >= 0 ? bits & ((1u << layout.sign_bit) - 1) : bits & 0x7f;
  if (layout.infinity != 0 ? magnitude > layout.infinity : layout.nan != 0 && magnitude == layout.nan) {
    return as_float(kNaN32);
  }
  if (layout.infinity != 0 && magnitude == layout.infinity) return negative ? -INFINITY : INFINITY;
  const int field = static_cast<int>(magnitude >> layout.mantissa);
  const uint32_t fraction = magnitude & ((1u << layout.mantissa) - 1);
  const double significand = field == 0 ? fraction : fraction + (1u << layout.mantissa);
  const double value = significand * power_of_two((field == 0 ? 1 : field) - layout.bias - layout.mantissa);
  return static_cast<float>(negative ? -value : value);
}

// Values of every code of an 8-bit or narrower format.
struct Table {
  float values[256];
  explicit Table(Format format) {
    for (uint32_t code = 0; code < 256; ++code) values[code] = decode_layout(layout_of(format), code);
  }
};

const float* table_of(Format format) {
  static const Table e4m3(Format::kE4M3), e5m2(Format::kE5M2), ue4m3(Format::kUE4M3), e2m3(Format::kE2M3),
      e3m2(Format::kE3M2), e2m1(Format::kE2M1);
  static const Table ue8m0 = [] {
    Table table(Format::kE4M3);
    for (int code = 0; code < 255; ++code) table.values[code] = static_cast<float>(power_of_two(code - 127));
    table.values[255] = as_float(kNaN32);
    return table;
  }();
  switch (format) {
    case Format::kE4M3: return e4m3.values;
    case Format::kE5M2: return e5m2.values;
    case Format::kUE4M3: return ue4m3.values;
    case Format::kE2M3: return e2m3.values;
    case Format::kE3M2: return e3m2.values;
    case Format::kE2M1: return e2m1.values;
    case Format::kUE8M0: return ue8m0.values;
    default: return nullptr;
  }
}

inline float half_to_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000) << 16;
  const uint32_t magnitude = (bits & 0x7fff) << 13;
  // Subnormal: fraction * 2^-24, by letting a float subtraction renormalise.
  const float subnormal = as_float(magnitude + (113u << 23)) - 0x1p-14f;
  const uint32_t normal = magnitude + (112u << 23);
  uint32_t result = magnitude < (1u << 23) ? as_bits(subnormal) : normal;
  result = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000 : result;
  return as_float(result | sign);
}

}  // namespace

int bits_of(Format format) {
  switch (format) {
    case Format::kE2M1: return 4;
    case Format::kE2M3:
    case Format::kE3M2: return 6;
    case Format::kU8:
    case Format::kS8:
    case Format::kE4M3:
    case Format::kE5M2:
    case Format::kUE8M0:
    case Format::kUE4M3: return 8;
    case Format::kU16:
    case Format::kS16:
    case Format::kF16:
    case Format::kBF16: return 16;
    case Format::kU64:
    case Format::kS64:
    case Format::kF64: return 64;
    default: return 32;
  }
}

bool is_float(Format format) { return format >= Format::kF16; }

float decode(Format format, uint32_t bits) {
  switch (format) {
    case Format::kF32: return as_float(bits);
    case Format::kTF32: return as_float(bits & 0xffffe000);
    case Format::kF16: return half_to_float(bits);
    case Format::kBF16: return bf16_to_float(bits & 0xffff);
    case Format::kU8: return static_cast<float>(bits & 0xff);
    case Format::kS8: return static_cast<float>(static_cast<int8_t>(bits));
    case Format::kU16: return static_cast<float>(bits & 0xffff);
    case Format::kS16: return static_cast<float>(static_cast<int16_t>(bits));
    case Format::kU32: return static_cast<float>(bits);
    case Format::kS32: return static_cast<float>(static_cast<int32_t>(bits));
    case Format::kE2M1: return table_of(format)[bits & 0xf];
    case Format::kE2M3:
    case Format::kE3M2: return table_of(format)[bits & 0x3f];
    default: return table_of(format)[bits & 0xff];
  }
}

uint32_t encode(Format format, double value, EncodeMode mode) {
  if (format == Format::kUE8M0) return encode_ue8m0(value, mode);
  const Layout layout = layout_of(format);
  const int shift = format == Format::kTF32 ? 13 : 0;  // TF32 lives in the upper bits of its register
  if (std::isnan(value)) {
    if (format == Format::kTF32) return kNaN32;
    return layout.nan != 0 ? layout.nan : layout.max_finite;
  }
  const bool negative = std::signbit(value);
  if (negative && (mode.relu || layout.sign_bit < 0)) return 0;
  const uint32_t sign = negative ? 1u << layout.sign_bit : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign << shift;

  const uint32_t overflow = mode.satfinite ? layout.max_finite
                            : layout.infinity != 0 ? layout.infinity
                            : layout.nan != 0 ? layout.nan : layout.max_finite;
  if (std::isinf(magnitude)) return (overflow | sign) << shift;

  int exponent = static_cast<int>(as_bits(magnitude) >> 52) - 1023;
  if (exponent < 1 - layout.bias) exponent = 1 - layout.bias;
  // Beyond every format's range; clamped so that the code below cannot wrap.
  const bool huge = exponent > 200;
  if (huge) exponent = 200;
  // In units of the last place, exactly: 0 <= steps < 2^(mantissa + 1). A double subnormal is far below any format here.
  const double steps = huge ? 1.0 : magnitude * power_of_two(layout.mantissa - exponent);
  const double floor = std::floor(steps);
  const double fraction = steps - floor;
  bool up = false;
  switch (mode.round) {
    case Round::kNearestEven: up = fraction > 0.5 || (fraction == 0.5 && std::fmod(floor, 2.0) == 1.0); break;
    case Round::kNearestAway: up = fraction >= 0.5; break;
    case Round::kZero: break;
    case Round::kDown: up = negative && fraction > 0; break;
    case Round::kUp: up = !negative && fraction > 0; break;
    case Round::kStochastic: up = fraction + mode.random * power_of_two(-mode.random_bits) >= 1.0; break;
  }
  // At the smallest exponent the code is the step count itself; every further exponent adds 2^mantissa codes.
  const uint32_t code = (static_cast<uint32_t>(exponent - (1 - layout.bias)) << layout.mantissa) +
                        static_cast<uint32_t>(floor) + (up ? 1 : 0);
  if (code <= layout.max_finite) return (code | sign) << shift;
  // Directed rounding never goes beyond the largest finite value on the inner side.
  const bool inward = mode.round == Round::kZero || (mode.round == Round::kDown && !negative) ||
                      (mode.round == Round::kUp && negative);
  return ((inward ? layout.max_finite : overflow) | sign) << shift;
}

float f16_to_float(uint32_t bits) { return half_to_float(bits); }

uint32_t float_to_bf16(float value) {
  const uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return kNaN16;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

uint32_t float_to_f16(float value) { return encode(Format::kF16, value, {}); }

void decode_span(Format format, const uint8_t* bytes, int count, float* out) {
  switch (format) {
    case Format::kBF16:
      for (int i = 0; i < count; ++i) {
        uint16_t half;
        std::memcpy(&half, bytes + 2 * i, 2);
        out[i] = as_float(static_cast<uint32_t>(half) << 16);
      }
      return;
    case Format::kF16:
      for (int i = 0; i < count; ++i) {
        uint16_t half;
        std::memcpy(&half, bytes + 2 * i, 2);
        out[i] = half_to_float(half);
      }
      return;
    case Format::kF32:
    case Format::kTF32: {
      const uint32_t mask = format == Format::kTF32 ? 0xffffe000 : 0xffffffff;
      for (int i = 0; i < count; ++i) {
        uint32_t word;
        std::memcpy(&word, bytes + 4 * i, 4);
        out[i] = as_float(word & mask);
      }
      return;
    }
    case Format::kU8:
      for (int i = 0; i < count; ++i) out[i] = bytes[i];
      return;
    case Format::kS8:
      for (int i = 0; i < count; ++i) out[i] = static_cast<int8_t>(bytes[i]);
      return;
    case Format::kE2M1: {
      const float* table = table_of(format);
      for (int i = 0; i < count; ++i) out[i] = table[(bytes[i / 2] >> (4 * (i % 2))) & 0xf];
      return;
    }
    case Format::kE2M3:
    case Format::kE3M2: {
      const float* table = table_of(format);
      for (int i = 0; i < count; ++i) out[i] = table[bytes[i] & 0x3f];
      return;
    }
    default: {
      const float* table = table_of(format);
      for (int i = 0; i < count; ++i) out[i] = table[bytes[i]];
      return;
    }
  }
}

}  // namespace emulator
