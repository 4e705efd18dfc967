// Floating-point arithmetic: f32 and f32x2 (vectorised in arithmetic_lanes.inc), and f64, f16 and bf16, comparisons and
// scalars here.
//
// PTX ISA: see arithmetic.h. Accuracy of the .approx functions, ISA bound and ours:
//   ex2    2^-22 relative                        correctly rounded but for one argument in thousands
//   lg2    2^-22 absolute in (0.5, 2), else relative    from double precision, rounded once
//   rcp, sqrt, rsqrt   1 ulp, 2^-23, 2^-22.9 relative   correctly rounded (rsqrt: from double precision)
//   sin, cos   2^-20.9 absolute in [-pi, pi]     from double precision
//   tanh   2^-11 relative                        from double precision
// The hardware's own tables are not public; results agree with it within its stated error only.

#include "arithmetic.h"

#include <cfenv>
#include <cmath>

namespace emulator {
namespace {

namespace baseline {
#include "arithmetic_lanes.inc"
}

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
namespace avx2 {
#include "arithmetic_lanes.inc"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace avx512 {
#include "arithmetic_lanes.inc"
}
#pragma GCC pop_options
#endif

template <int kCount>
FloatFunction find_single(FloatOp op, const FloatMode& mode) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return avx512::find_single<kCount>(op, mode);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::find_single<kCount>(op, mode);
#endif
  return baseline::find_single<kCount>(op, mode);
}

using baseline::canonical;
using baseline::flushed;
using baseline::saturated;

// ---- scalar f32 functions lifted to lanes --------------------------------------------------------------------------

template <float (*kFunction)(float, bool), bool kFtz>
void unary_lanes(void* d, const void* a, const void*, const void*) {
  const float* x = static_cast<const float*>(a);
  float* out = static_cast<float*>(d);
  for (int i = 0; i < kLanes; ++i) out[i] = kFunction(x[i], kFtz);
}

template <float (*kFunction)(float, bool)>
FloatFunction unary(bool ftz) {
  return ftz ? unary_lanes<kFunction, true> : unary_lanes<kFunction, false>;
}

// ---- directed rounding by the host's unit, for the rare instructions ---------------------------------------------------

// Runs with the host's rounding direction changed; the barriers keep the compiler from moving the arithmetic out.
class HostRounding {
 public:
  explicit HostRounding(Round round) : saved_(std::fegetround()) {
    static constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    std::fesetround(kModes[static_cast<int>(round)]);
  }
  ~HostRounding() { std::fesetround(saved_); }

 private:
  int saved_;
};

template <typename T>
T opaque(T value) {
  volatile T hidden = value;
  return hidden;
}

template <typename T, FloatOp kOp>
T host_operation(T a, T b, T c) {
  a = opaque(a), b = opaque(b), c = opaque(c);
  switch (kOp) {
    case FloatOp::kAdd: return opaque(a + b);
    case FloatOp::kSub: return opaque(a - b);
    case FloatOp::kMul: return opaque(a * b);
    case FloatOp::kFma: return opaque(std::fma(a, b, c));
    case FloatOp::kDiv: return opaque(a / b);
    case FloatOp::kRcp: return opaque(T(1) / a);
    case FloatOp::kSqrt: return opaque(std::sqrt(a));
    default: return a;
  }
}

template <FloatOp kOp, Round kRound, bool kFtz>
void single_host_lanes(void* d, const void* a, const void* b, const void*) {
  const HostRounding rounding(kRound);
  const float* x = static_cast<const float*>(a);
  const float* y = static_cast<const float*>(b);
  float* out = static_cast<float*>(d);
  for (int i = 0; i < kLanes; ++i) {
    const float p = kFtz ? flushed(x[i]) : x[i];
    const float q = kOp != FloatOp::kDiv ? 0.0f : kFtz ? flushed(y[i]) : y[i];
    const float r = canonical(host_operation<float, kOp>(p, q, 0.0f));
    out[i] = kFtz ? flushed(r) : r;
  }
}

template <FloatOp kOp, Round kRound>
void double_host_lanes(void* d, const void* a, const void* b, const void* c) {
  const HostRounding rounding(kRound);
  const double* x = static_cast<const double*>(a);
  const double* y = static_cast<const double*>(b);
  const double* z = static_cast<const double*>(c);
  double* out = static_cast<double*>(d);
  constexpr bool kBinary = kOp != FloatOp::kRcp && kOp != FloatOp::kSqrt;
  for (int i = 0; i < kLanes; ++i) {
    const double r = host_operation<double, kOp>(x[i], kBinary ? y[i] : 0.0, kOp == FloatOp::kFma ? z[i] : 0.0);
    out[i] = std::isnan(r) ? as_double(0x7fffffffffffffffull) : r;
  }
}

template <FloatOp kOp, bool kFtz>
FloatFunction single_host(Round round) {
  switch (round) {
    case Round::kZero: return single_host_lanes<kOp, Round::kZero, kFtz>;
    case Round::kDown: return single_host_lanes<kOp, Round::kDown, kFtz>;
    case Round::kUp: return single_host_lanes<kOp, Round::kUp, kFtz>;
    default: return single_host_lanes<kOp, Round::kNearestEven, kFtz>;
  }
}

template <FloatOp kOp>
FloatFunction double_host(Round round) {
  switch (round) {
    case Round::kZero: return double_host_lanes<kOp, Round::kZero>;
    case Round::kDown: return double_host_lanes<kOp, Round::kDown>;
    case Round::kUp: return double_host_lanes<kOp, Round::kUp>;
    default: return double_host_lanes<kOp, Round::kNearestEven>;
  }
}

// ---- f64 -----------------------------------------------------------------------------------------------------------------

template <bool kMax>
void double_extremes(void* d, const void* a, const void* b, const void*) {
  const double* x = static_cast<const double*>(a);
  const double* y = static_cast<const double*>(b);
  double* out = static_cast<double*>(d);
  for (int i = 0; i < kLanes; ++i) {
    const double p = x[i], q = y[i];
    double r;
    if (std::isnan(p)) r = std::isnan(q) ? as_double(0x7fffffffffffffffull) : q;
    else if (std::isnan(q)) r = p;
    else if (p == q) r = kMax == std::signbit(p) ? q : p;  // -0 < +0
    else r = kMax == (p > q) ? p : q;
    out[i] = r;
  }
}

template <bool kNegate>
void double_signs(void* d, const void* a, const void*, const void*) {
  const uint64_t* x = static_cast<const uint64_t*>(a);
  uint64_t* out = static_cast<uint64_t*>(d);
  for (int i = 0; i < kLanes; ++i) out[i] = kNegate ? x[i] ^ (1ull << 63) : x[i] & ~(1ull << 63);
}

FloatFunction find_double(FloatOp op, const FloatMode& mode) {
  switch (op) {
    case FloatOp::kAdd: return double_host<FloatOp::kAdd>(mode.round);
    case FloatOp::kSub: return double_host<FloatOp::kSub>(mode.round);
    case FloatOp::kMul: return double_host<FloatOp::kMul>(mode.round);
    case FloatOp::kFma: return double_host<FloatOp::kFma>(mode.round);
    case FloatOp::kDiv: return double_host<FloatOp::kDiv>(mode.round);
    case FloatOp::kRcp: return double_host<FloatOp::kRcp>(mode.round);
    case FloatOp::kSqrt: return double_host<FloatOp::kSqrt>(mode.round);
    case FloatOp::kMin: return double_extremes<false>;
    case FloatOp::kMax: return double_extremes<true>;
    case FloatOp::kAbs: return double_signs<false>;
    case FloatOp::kNeg: return double_signs<true>;
    default: return nullptr;
  }
}

// ---- f16 and bf16 -----------------------------------------------------------------------------------------------------

template <bool kBrain>
float widen(uint32_t bits) {
  return kBrain ? bf16_to_float(bits & 0xffff) : f16_to_float(bits & 0xffff);
}

// Flags of the half-precision instructions, as template arguments to keep the function pointers plain.
template <bool kFtzIn, bool kSatIn, bool kReluIn, bool kOobIn>
struct HalfFlags {
  static constexpr bool kFtz = kFtzIn, kSat = kSatIn, kRelu = kReluIn, kOob = kOobIn;
};

template <bool kBrain, typename Flags>
uint32_t narrowed(double exact) {
  if (std::isnan(exact)) return Flags::kSat ? 0 : kNaN16;
  if (Flags::kSat) exact = exact > 0 ? (exact < 1 ? exact : 1.0) : 0.0;
  if (Flags::kRelu && std::signbit(exact)) return 0;
  uint32_t bits = encode(kBrain ? Format::kBF16 : Format::kF16, exact, {});
  if (Flags::kFtz && !kBrain && (bits & 0x7c00) == 0) bits &= 0x8000;
  return bits;
}

// The exact value of a * b + c with its last bit made sticky: a double holds any product, and the sum needs more than 53
// bits only where the rest cannot decide anything but the direction.
inline double sticky_sum(double product, double addend) {
  const double high = product + addend;
  const double part = high - product;
  const double low = (product - (high - part)) + (addend - part);
  if (!(low != 0) || !std::isfinite(high)) return high;
  uint64_t bits = as_bits(high);
  if ((bits & 1) == 0) bits += (low > 0) == (high > 0) ? 1 : -1;
  return as_double(bits);
}

template <bool kBrain, FloatOp kOp, typename Flags>
uint32_t half_operation(uint32_t a, uint32_t b, uint32_t c) {
  if (Flags::kFtz && !kBrain) {
    const auto flush = [](uint32_t x) { return (x & 0x7c00) == 0 ? x & 0x8000 : x; };
    a = flush(a & 0xffff), b = flush(b & 0xffff), c = flush(c & 0xffff);
  }
  const double x = widen<kBrain>(a), y = widen<kBrain>(b), z = widen<kBrain>(c);
  switch (kOp) {
    case FloatOp::kAdd: return narrowed<kBrain, Flags>(sticky_sum(x, y));
    case FloatOp::kSub: return narrowed<kBrain, Flags>(sticky_sum(x, -y));
    case FloatOp::kMul: return narrowed<kBrain, Flags>(x * y);
    case FloatOp::kFma:
      if (Flags::kOob && (a == 0xffff || b == 0xffff || c == 0xffff)) return 0;
      return narrowed<kBrain, Flags>(sticky_sum(x * y, z));
    default: return 0;
  }
}

template <bool kBrain, FloatOp kOp, typename Flags, bool kPacked>
void half_lanes(void* d, const void* a, const void* b, const void* c) {
  const uint32_t* x = static_cast<const uint32_t*>(a);
  const uint32_t* y = static_cast<const uint32_t*>(b);
  const uint32_t* z = static_cast<const uint32_t*>(c);
  uint32_t* out = static_cast<uint32_t*>(d);
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t w = kOp == FloatOp::kFma ? z[i] : 0;
    uint32_t r = half_operation<kBrain, kOp, Flags>(x[i] & 0xffff, y[i] & 0xffff, w & 0xffff);
    if (kPacked) r |= half_operation<kBrain, kOp, Flags>(x[i] >> 16, y[i] >> 16, w >> 16) << 16;
    out[i] = r;
  }
}

template <bool kBrain, FloatOp kOp, bool kPacked>
FloatFunction half_with_flags(const FloatMode& mode) {
  if (mode.out_of_bounds_zero) {
    return mode.relu ? half_lanes<kBrain, kOp, HalfFlags<false, false, true, true>, kPacked>
                     : half_lanes<kBrain, kOp, HalfFlags<false, false, false, true>, kPacked>;
  }
  if (mode.relu) {
    return mode.ftz ? half_lanes<kBrain, kOp, HalfFlags<true, false, true, false>, kPacked>
                    : half_lanes<kBrain, kOp, HalfFlags<false, false, true, false>, kPacked>;
  }
  if (mode.sat) {
    return mode.ftz ? half_lanes<kBrain, kOp, HalfFlags<true, true, false, false>, kPacked>
                    : half_lanes<kBrain, kOp, HalfFlags<false, true, false, false>, kPacked>;
  }
  return mode.ftz ? half_lanes<kBrain, kOp, HalfFlags<true, false, false, false>, kPacked>
                  : half_lanes<kBrain, kOp, HalfFlags<false, false, false, false>, kPacked>;
}

// Minimum and maximum of two narrow numbers.
template <bool kBrain, bool kMax>
uint32_t half_extreme(uint32_t a, uint32_t b) {
  const float x = widen<kBrain>(a), y = widen<kBrain>(b);
  if (x != x) return y != y ? kNaN16 : b & 0xffff;
  if (y != y) return a & 0xffff;
  if (x == y) return (kMax == ((a & 0x8000) != 0) ? b : a) & 0xffff;
  return (kMax == (x > y) ? a : b) & 0xffff;
}

template <bool kBrain, bool kMax, bool kPropagate, bool kXorSign>
uint32_t half_extreme_full(uint32_t a, uint32_t b, bool ftz) {
  if (ftz && !kBrain) {
    if ((a & 0x7c00) == 0) a &= 0x8000;
    if ((b & 0x7c00) == 0) b &= 0x8000;
  }
  const uint32_t sign = (a ^ b) & 0x8000;
  if (kXorSign) a &= 0x7fff, b &= 0x7fff;
  uint32_t r = half_extreme<kBrain, kMax>(a, b);
  const uint32_t limit = kBrain ? 0x7f80 : 0x7c00;
  if (kPropagate && ((a & 0x7fff) > limit || (b & 0x7fff) > limit)) r = kNaN16;
  if (kXorSign && (r & 0x7fff) <= limit) r = (r & 0x7fff) | sign;
  return r;
}

template <bool kBrain, bool kMax, bool kPacked, bool kFtz, bool kPropagate, bool kXorSign>
void half_extremes(void* d, const void* a, const void* b, const void*) {
  const uint32_t* x = static_cast<const uint32_t*>(a);
  const uint32_t* y = static_cast<const uint32_t*>(b);
  uint32_t* out = static_cast<uint32_t*>(d);
  for (int i = 0; i < kLanes; ++i) {
    uint32_t r = half_extreme_full<kBrain, kMax, kPropagate, kXorSign>(x[i] & 0xffff, y[i] & 0xffff, kFtz);
    if (kPacked) r |= half_extreme_full<kBrain, kMax, kPropagate, kXorSign>(x[i] >> 16, y[i] >> 16, kFtz) << 16;
    out[i] = r;
  }
}

template <bool kBrain, bool kMax, bool kPacked, bool kFtz>
FloatFunction half_extreme_function(const FloatMode& mode) {
  if (mode.propagate_nan) {
    return mode.xorsign_abs ? half_extremes<kBrain, kMax, kPacked, kFtz, true, true>
                            : half_extremes<kBrain, kMax, kPacked, kFtz, true, false>;
  }
  return mode.xorsign_abs ? half_extremes<kBrain, kMax, kPacked, kFtz, false, true>
                          : half_extremes<kBrain, kMax, kPacked, kFtz, false, false>;
}

template <bool kBrain, bool kPacked, bool kNegate>
void half_signs(void* d, const void* a, const void*, const void*) {
  const uint32_t* x = static_cast<const uint32_t*>(a);
  uint32_t* out = static_cast<uint32_t*>(d);
  const uint32_t mask = kPacked ? 0x80008000 : 0x8000;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = kPacked ? x[i] : x[i] & 0xffff;
    out[i] = kNegate ? bits ^ mask : bits & ~mask;
  }
}

// ex2 and tanh on narrow numbers: computed in float32, rounded to nearest.
template <bool kBrain, bool kPacked, bool kTanh>
void half_approx(void* d, const void* a, const void*, const void*) {
  const uint32_t* x = static_cast<const uint32_t*>(a);
  uint32_t* out = static_cast<uint32_t*>(d);
  const auto one = [](uint32_t bits) {
    const float value = widen<kBrain>(bits);
    const float result = kTanh ? tanh_approx(value) : ex2_approx(value, false);
    return kBrain ? float_to_bf16(result) : float_to_f16(result);
  };
  for (int i = 0; i < kLanes; ++i) {
    uint32_t r = one(x[i] & 0xffff);
    if (kPacked) r |= one(x[i] >> 16) << 16;
    out[i] = r;
  }
}

template <bool kBrain, bool kPacked>
FloatFunction find_half(FloatOp op, const FloatMode& mode) {
  if (op <= FloatOp::kFma && mode.round != Round::kNearestEven) return nullptr;
  switch (op) {
    case FloatOp::kAdd: return half_with_flags<kBrain, FloatOp::kAdd, kPacked>(mode);
    case FloatOp::kSub: return half_with_flags<kBrain, FloatOp::kSub, kPacked>(mode);
    case FloatOp::kMul: return half_with_flags<kBrain, FloatOp::kMul, kPacked>(mode);
    case FloatOp::kFma: return half_with_flags<kBrain, FloatOp::kFma, kPacked>(mode);
    case FloatOp::kMin:
      return mode.ftz ? half_extreme_function<kBrain, false, kPacked, true>(mode)
                      : half_extreme_function<kBrain, false, kPacked, false>(mode);
    case FloatOp::kMax:
      return mode.ftz ? half_extreme_function<kBrain, true, kPacked, true>(mode)
                      : half_extreme_function<kBrain, true, kPacked, false>(mode);
    case FloatOp::kAbs: return half_signs<kBrain, kPacked, false>;
    case FloatOp::kNeg: return half_signs<kBrain, kPacked, true>;
    case FloatOp::kEx2: return half_approx<kBrain, kPacked, false>;
    case FloatOp::kTanh: return half_approx<kBrain, kPacked, true>;
    default: return nullptr;
  }
}

// ---- mixed precision -----------------------------------------------------------------------------------------------------

template <FloatOp kOp, bool kBrain, Round kRound, bool kSat>
void mixed_lanes(void* d, const void* a, const void* b, const void* c) {
  // The narrow operands widen exactly; then it is the f32 instruction.
  float x[kLanes], y[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    x[i] = widen<kBrain>(static_cast<const uint32_t*>(a)[i]);
    y[i] = kOp == FloatOp::kFma ? widen<kBrain>(static_cast<const uint32_t*>(b)[i]) : static_cast<const float*>(b)[i];
  }
  baseline::arithmetic<kOp, kRound, false, kSat, kLanes>(d, x, y, c);
}

template <FloatOp kOp, bool kBrain, bool kSat>
FloatFunction mixed_round(Round round) {
  switch (round) {
    case Round::kZero: return mixed_lanes<kOp, kBrain, Round::kZero, kSat>;
    case Round::kDown: return mixed_lanes<kOp, kBrain, Round::kDown, kSat>;
    case Round::kUp: return mixed_lanes<kOp, kBrain, Round::kUp, kSat>;
    default: return mixed_lanes<kOp, kBrain, Round::kNearestEven, kSat>;
  }
}

template <FloatOp kOp>
FloatFunction mixed_function(Format narrow, const FloatMode& mode) {
  if (narrow == Format::kBF16) {
    return mode.sat ? mixed_round<kOp, true, true>(mode.round) : mixed_round<kOp, true, false>(mode.round);
  }
  return mode.sat ? mixed_round<kOp, false, true>(mode.round) : mixed_round<kOp, false, false>(mode.round);
}

// ---- comparisons ---------------------------------------------------------------------------------------------------------

template <Compare kCompare, typename T>
bool compared(T x, T y) {
  const bool unordered = x != x || y != y;
  switch (kCompare) {
    case Compare::kEq: return x == y;
    case Compare::kNe: return !unordered && x != y;
    case Compare::kLt: return x < y;
    case Compare::kLe: return x <= y;
    case Compare::kGt: return x > y;
    case Compare::kGe: return x >= y;
    case Compare::kEqu: return unordered || x == y;
    case Compare::kNeu: return unordered || x != y;
    case Compare::kLtu: return unordered || x < y;
    case Compare::kLeu: return unordered || x <= y;
    case Compare::kGtu: return unordered || x > y;
    case Compare::kGeu: return unordered || x >= y;
    case Compare::kNum: return !unordered;
    case Compare::kNan: return unordered;
  }
  return false;
}

template <Compare kCompare, FloatType kType, bool kFtz>
uint32_t compare_lanes(const void* a, const void* b) {
  uint32_t result = 0;
  for (int i = 0; i < kLanes; ++i) {
    bool bit;
    if constexpr (kType == FloatType::kF64) {
      bit = compared<kCompare>(static_cast<const double*>(a)[i], static_cast<const double*>(b)[i]);
    } else {
      const uint32_t x = static_cast<const uint32_t*>(a)[i], y = static_cast<const uint32_t*>(b)[i];
      float p, q;
      if constexpr (kType == FloatType::kF32) {
        p = as_float(x), q = as_float(y);
        if (kFtz) p = flushed(p), q = flushed(q);
      } else {
        constexpr bool kBrain = kType == FloatType::kBF16;
        p = widen<kBrain>(x), q = widen<kBrain>(y);
        if (kFtz && !kBrain) {
          if ((x & 0x7c00) == 0) p = 0;
          if ((y & 0x7c00) == 0) q = 0;
        }
      }
      bit = compared<kCompare>(p, q);
    }
    result |= static_cast<uint32_t>(bit) << i;
  }
  return result;
}

template <Compare kCompare>
CompareFunction compare_function(FloatType type, bool ftz) {
  switch (type) {
    case FloatType::kF32:
      return ftz ? compare_lanes<kCompare, FloatType::kF32, true> : compare_lanes<kCompare, FloatType::kF32, false>;
    case FloatType::kF64: return compare_lanes<kCompare, FloatType::kF64, false>;
    case FloatType::kF16:
      return ftz ? compare_lanes<kCompare, FloatType::kF16, true> : compare_lanes<kCompare, FloatType::kF16, false>;
    case FloatType::kBF16: return compare_lanes<kCompare, FloatType::kBF16, false>;
    default: return nullptr;
  }
}

}  // namespace

// ---- lookup ----------------------------------------------------------------------------------------------------------------

FloatFunction find_float(FloatOp op, FloatType type, FloatMode mode) {
  switch (type) {
    case FloatType::kF32: break;
    case FloatType::kF32x2: return op <= FloatOp::kFma ? find_single<64>(op, mode) : nullptr;
    case FloatType::kF64: return find_double(op, mode);
    case FloatType::kF16: return find_half<false, false>(op, mode);
    case FloatType::kF16x2: return find_half<false, true>(op, mode);
    case FloatType::kBF16: return find_half<true, false>(op, mode);
    case FloatType::kBF16x2: return find_half<true, true>(op, mode);
  }
  switch (op) {
    case FloatOp::kDiv:
      return mode.ftz ? single_host<FloatOp::kDiv, true>(mode.round) : single_host<FloatOp::kDiv, false>(mode.round);
    case FloatOp::kRcp:
      if (mode.approximate) return unary<rcp_approx>(mode.ftz);
      return mode.ftz ? single_host<FloatOp::kRcp, true>(mode.round) : single_host<FloatOp::kRcp, false>(mode.round);
    case FloatOp::kSqrt:
      if (mode.approximate) return unary<sqrt_approx>(mode.ftz);
      return mode.ftz ? single_host<FloatOp::kSqrt, true>(mode.round) : single_host<FloatOp::kSqrt, false>(mode.round);
    case FloatOp::kRsqrt: return unary<rsqrt_approx>(mode.ftz);
    case FloatOp::kLg2: return unary<lg2_approx>(mode.ftz);
    case FloatOp::kSin: return unary<sin_approx>(mode.ftz);
    case FloatOp::kCos: return unary<cos_approx>(mode.ftz);
    default: return find_single<32>(op, mode);
  }
}

FloatFunction find_mixed(FloatOp op, Format narrow, FloatMode mode) {
  switch (op) {
    case FloatOp::kAdd: return mixed_function<FloatOp::kAdd>(narrow, mode);
    case FloatOp::kSub: return mixed_function<FloatOp::kSub>(narrow, mode);
    case FloatOp::kFma: return mixed_function<FloatOp::kFma>(narrow, mode);
    default: return nullptr;
  }
}

CompareFunction find_compare(Compare compare, FloatType type, bool ftz) {
  switch (compare) {
    case Compare::kEq: return compare_function<Compare::kEq>(type, ftz);
    case Compare::kNe: return compare_function<Compare::kNe>(type, ftz);
    case Compare::kLt: return compare_function<Compare::kLt>(type, ftz);
    case Compare::kLe: return compare_function<Compare::kLe>(type, ftz);
    case Compare::kGt: return compare_function<Compare::kGt>(type, ftz);
    case Compare::kGe: return compare_function<Compare::kGe>(type, ftz);
    case Compare::kEqu: return compare_function<Compare::kEqu>(type, ftz);
    case Compare::kNeu: return compare_function<Compare::kNeu>(type, ftz);
    case Compare::kLtu: return compare_function<Compare::kLtu>(type, ftz);
    case Compare::kLeu: return compare_function<Compare::kLeu>(type, ftz);
    case Compare::kGtu: return compare_function<Compare::kGtu>(type, ftz);
    case Compare::kGeu: return compare_function<Compare::kGeu>(type, ftz);
    case Compare::kNum: return compare_function<Compare::kNum>(type, ftz);
    case Compare::kNan: return compare_function<Compare::kNan>(type, ftz);
  }
  return nullptr;
}

void compare_packed(Compare compare, FloatType type, bool ftz, const uint32_t* a, const uint32_t* b, uint32_t* low,
                    uint32_t* high) {
  const CompareFunction function =
      find_compare(compare, type == FloatType::kBF16x2 ? FloatType::kBF16 : FloatType::kF16, ftz);
  uint32_t x[kLanes], y[kLanes];
  for (int h = 0; h < 2; ++h) {
    for (int i = 0; i < kLanes; ++i) {
      x[i] = (a[i] >> (16 * h)) & 0xffff;
      y[i] = (b[i] >> (16 * h)) & 0xffff;
    }
    *(h == 0 ? low : high) = function(x, y);
  }
}

// ---- scalars ---------------------------------------------------------------------------------------------------------------

namespace {

template <FloatOp kOp>
float scalar(float a, float b, float c, const FloatMode& mode) {
  float x[kLanes] = {a}, y[kLanes] = {b}, z[kLanes] = {c}, d[kLanes];
  find_float(kOp, FloatType::kF32, mode)(d, x, y, z);
  return d[0];
}

template <bool kBrain, typename Operation>
uint32_t both_halves(uint32_t a, uint32_t b, Operation&& operation) {
  return operation(a & 0xffff, b & 0xffff) | (operation(a >> 16, b >> 16) << 16);
}

using PlainHalf = HalfFlags<false, false, false, false>;

}  // namespace

float add_f32(float a, float b, FloatMode mode) {
  if (mode.round == Round::kNearestEven && !mode.ftz && !mode.sat) return canonical(a + b);
  return scalar<FloatOp::kAdd>(a, b, 0, mode);
}
float mul_f32(float a, float b, FloatMode mode) { return scalar<FloatOp::kMul>(a, b, 0, mode); }
float fma_f32(float a, float b, float c, FloatMode mode) { return scalar<FloatOp::kFma>(a, b, c, mode); }
float min_f32(float a, float b, FloatMode mode) { return scalar<FloatOp::kMin>(a, b, 0, mode); }
float max_f32(float a, float b, FloatMode mode) { return scalar<FloatOp::kMax>(a, b, 0, mode); }

uint32_t add_packed(Format format, uint32_t a, uint32_t b) {
  if (format == Format::kBF16) {
    return both_halves<true>(a, b, [](uint32_t x, uint32_t y) {
      return half_operation<true, FloatOp::kAdd, PlainHalf>(x, y, 0);
    });
  }
  return both_halves<false>(a, b, [](uint32_t x, uint32_t y) {
    return half_operation<false, FloatOp::kAdd, PlainHalf>(x, y, 0);
  });
}

uint32_t min_packed(Format format, uint32_t a, uint32_t b) {
  return format == Format::kBF16 ? both_halves<true>(a, b, half_extreme<true, false>)
                                 : both_halves<false>(a, b, half_extreme<false, false>);
}

uint32_t max_packed(Format format, uint32_t a, uint32_t b) {
  return format == Format::kBF16 ? both_halves<true>(a, b, half_extreme<true, true>)
                                 : both_halves<false>(a, b, half_extreme<false, true>);
}

namespace {

// Applies the flushing that .ftz asks for around a function of one argument.
template <typename Function>
float approximated(float x, bool ftz, Function&& function) {
  const float result = canonical(function(ftz ? flushed(x) : x));
  return ftz ? flushed(result) : result;
}

}  // namespace

float ex2_approx(float x, bool ftz) {
  FloatMode mode;
  mode.ftz = ftz;
  return scalar<FloatOp::kEx2>(x, 0, 0, mode);
}
float tanh_approx(float x) { return scalar<FloatOp::kTanh>(x, 0, 0, {}); }
float lg2_approx(float x, bool ftz) {
  return approximated(x, ftz, [](float v) { return static_cast<float>(std::log2(static_cast<double>(v))); });
}
float rcp_approx(float x, bool ftz) {
  return approximated(x, ftz, [](float v) { return 1.0f / v; });
}
float sqrt_approx(float x, bool ftz) {
  return approximated(x, ftz, [](float v) { return std::sqrt(v); });
}
float rsqrt_approx(float x, bool ftz) {
  return approximated(x, ftz, [](float v) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(v))); });
}
float sin_approx(float x, bool ftz) {
  return approximated(x, ftz, [](float v) { return static_cast<float>(std::sin(static_cast<double>(v))); });
}
float cos_approx(float x, bool ftz) {
  return approximated(x, ftz, [](float v) { return static_cast<float>(std::cos(static_cast<double>(v))); });
}

}  // namespace emulator
