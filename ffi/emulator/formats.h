// Number formats of the PTX ISA and every conversion between them.
//
// PTX ISA: "Fundamental Types", "Alternate Floating-Point Data Formats", "Packed Data Types", and the instruction
// `cvt` (9.7.9). Scalar codecs come first, then `cvt` as one decoded specification that converts a whole warp.
//
// Register convention shared by all headers of this directory: the 32 lanes of a register are contiguous.
// A register of 8, 16 or 32 bits is uint32_t[32] (narrow values zero-extended), a 64-bit one is uint64_t[32].
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace emulator {

constexpr int kLanes = 32;

enum class Round : uint8_t {
  kNearestEven,  // .rn, .rni
  kZero,         // .rz, .rzi
  kDown,         // .rm, .rmi
  kUp,           // .rp, .rpi
  kNearestAway,  // .rna
  kStochastic,   // .rs: adds random bits below the last place, then truncates
};

// One element. The packed types of `cvt` are an element and a count (see CvtSpec).
enum class Format : uint8_t {
  kU8, kU16, kU32, kU64, kS8, kS16, kS32, kS64,
  kF16, kBF16, kTF32, kF32, kF64,
  kE4M3,   // 8 bits, no infinity, S.1111.111 is NaN
  kE5M2,   // 8 bits, IEEE-like
  kE2M3,   // 6 bits, finite only
  kE3M2,   // 6 bits, finite only
  kE2M1,   // 4 bits, finite only
  kUE8M0,  // 8 bits, 2^(x-127), 255 is NaN
  kUE4M3,  // 7 bits used, E4M3 without a sign (block scales of kind::mxf4nvf4)
};

int bits_of(Format format);  // storage bits of one element: 4, 6, 8, 16, 32 or 64 (TF32: 32)
bool is_float(Format format);

inline float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t as_bits(float value) { uint32_t b; std::memcpy(&b, &value, 4); return b; }
inline double as_double(uint64_t bits) { double f; std::memcpy(&f, &bits, 8); return f; }
inline uint64_t as_bits(double value) { uint64_t b; std::memcpy(&b, &value, 8); return b; }

constexpr uint32_t kNaN32 = 0x7fffffffu;  // the NaN that NVIDIA hardware generates
constexpr uint32_t kNaN16 = 0x7fffu;      // the same for f16 and bf16

// The value of one element whose bits are right-aligned in `bits`. Exact for every format but F64 (use as_double) and
// integers wider than 24 bits. E4M3 NaN and UE8M0 255 give NaN.
float decode(Format format, uint32_t bits);

struct EncodeMode {
  Round round = Round::kNearestEven;
  bool satfinite = false;  // clamp to the largest finite value; NaN becomes the format's NaN, or +max if it has none
  bool relu = false;       // negative values (and NaN, to the canonical NaN) clamp to +0
  uint32_t random = 0;     // .rs: bits to add, right-aligned, `random_bits` of them
  int random_bits = 0;
};

// Rounds `value` once to a float format of at most 32 bits. Without satfinite, overflow gives infinity where the
// format has one, else its NaN. A double argument holds every f32 and the exact product of two.
uint32_t encode(Format format, double value, EncodeMode mode);

// Common cases, inlined by callers' hot loops.
inline float bf16_to_float(uint32_t bits) { return as_float(bits << 16); }
float f16_to_float(uint32_t bits);
uint32_t float_to_bf16(float value);  // .rn; NaN -> 0x7fff
uint32_t float_to_f16(float value);   // .rn; NaN -> 0x7fff

// Widens `count` packed elements starting at `bytes` to float: 32, 16 or 8 bits each (a 6-bit element lies in the low
// bits of a byte), or 4 bits, two in a byte, low nibble first. This loads every matrix operand, so it is vectorised.
void decode_span(Format format, const uint8_t* bytes, int count, float* out);

// ---- cvt ----------------------------------------------------------------------------------------------------------

// A decoded `cvt`: d is to x to_count, a is from x from_count (1, 2 or 4 elements).
//   cvt.rn.bf16x2.f32 d, a, b        : to BF16 x2, from F32 x1; a goes to the high half
//   cvt.rn.f16x2.e2m1x2 d, a         : to F16 x2, from E2M1 x2
//   cvt.rs.satfinite.e2m1x4.f32 d, {a, b, e, f}, rbits : to E2M1 x4, from F32 x1; f goes to the lowest element
struct CvtSpec {
  Format to = Format::kF32;
  Format from = Format::kF32;
  int to_count = 1;
  int from_count = 1;
  Round round = Round::kNearestEven;
  bool integer_round = false;  // .rni .rzi .rmi .rpi: float to a float that is an integer, or to an integer
  bool ftz = false;
  bool sat = false;
  bool satfinite = false;
  bool relu = false;
  int sources() const { return from_count == 1 ? to_count : 1; }  // data operands before rbits
  bool has_random() const { return round == Round::kStochastic; }
  bool to_wide() const { return bits_of(to) * to_count > 32; }        // d is a 64-bit register
  bool from_wide() const { return bits_of(from) * from_count > 32; }  // a is a 64-bit register
};

// Parses "cvt.rn.satfinite.e4m3x2.f32" (mnemonic with all its dotted parts). False if it is not a known cvt.
bool parse_cvt(std::string_view mnemonic, CvtSpec* spec);

// Converts all 32 lanes. `sources` holds spec.sources() registers, then rbits for .rs. Registers
// follow the convention above; results narrower than 32 bits are zero-extended (also signed ones: s8 -1 is 0xff).
// `d` may be one of the sources.
void convert(const CvtSpec& spec, void* d, const void* const* sources);

// The converter of a specification, looked up once when the instruction is decoded; hot conversions are specialised.
using ConvertFunction = void (*)(const CvtSpec& spec, void* d, const void* const* sources);
ConvertFunction find_convert(const CvtSpec& spec);

}  // namespace emulator
