// The arithmetic of matrix products.
//
// PTX ISA: see mma.h. Fragments and instructions are in mma_warp.cc (wgmma, mma.sync) and mma_tcgen05.cc.
//
// Choice of accumulation order. The ISA leaves it open. Bit-exact reverse engineering of the tensor cores (MMA-Sim, 2025)
// found one rule for a whole instruction: every product and the accumulator are taken exactly, shifted to the largest
// exponent among them (of a product: the sum of its factors' exponents, unnormalised), truncated toward zero to F
// fraction bits, added exactly, and the sum is truncated to float32 (or rounded to float16). F is 25 on Hopper and
// Blackwell, 13 for Hopper's FP8 wgmma, 35 for FP4 with block scales. It costs about three times an IEEE fma loop and
// buys results that can equal the hardware's, and do not depend on the host.
//
// The fast path works in float32 and int32: an aligned term is below 2^27 in units of the last kept bit, so a product is
// one multiplication, one scaling by a power of two and one truncating conversion, all exact. Elements whose exponents
// leave the range where that holds (and infinities and NaN) are redone in finish_row with doubles.

#include "mma.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace emulator {
namespace {

constexpr int kMaxColumns = 256;
constexpr int kMaxGroups = 6;
constexpr int16_t kNoExponent = -16000;
constexpr int16_t kNotFinite = 8000;  // of infinities and NaN: never regular, whatever they are multiplied with
// Between these, products neither underflow nor overflow float32 where it matters: a product below 2^-126 is below the
// last kept bit, 2^(-100 - 25).
constexpr int kLowestRegular = -100;
constexpr int kHighestRegular = 126;

// A product prepared for the kernels; names as in MmaOperand.
struct FusedProduct {
  int m, n, k;
  const float *a, *b;
  const int16_t *exponent_a, *exponent_b;
  const int16_t *scale_a, *scale_b;
  const uint8_t* zero_row;     // rows of A that hold nothing but zeros
  const int32_t* zero_column;  // columns of B
  float* d;
  bool accumulate;
  int fraction_bits;
  int c_min_exponent;
  Accumulator result;
};

struct ScaledProduct {
  int m, n, k;
  const float *a, *b, *scale_a, *scale_b;
  const int32_t *exponent_a, *exponent_b;
  float* d;
  bool accumulate;
};

// Rounds an exact sum to the accumulator's format.
float round_result(double value, Accumulator result) {
  if (std::isnan(value)) return as_float(kNaN32);
  if (value == 0) return 0.0f;
  if (result == Accumulator::kF16) return decode(Format::kF16, encode(Format::kF16, value, {}));
  if (std::fabs(value) >= 0x1p128) return value > 0 ? INFINITY : -INFINITY;
  EncodeMode toward_zero;
  toward_zero.round = Round::kZero;
  const uint32_t bits = std::fabs(value) >= 0x1p-126
                            ? as_bits(static_cast<float>(as_double(as_bits(value) & ~((1ull << 29) - 1))))
                            : encode(Format::kF32, value, toward_zero);
  return as_float(result == Accumulator::kF32E8M13 ? bits & ~((1u << 10) - 1) : bits);
}

// One element with no restriction on its operands.
float fused_element(const FusedProduct& p, int row, int column) {
  if ((p.scale_a != nullptr && p.scale_a[row] == INT16_MAX) ||
      (p.scale_b != nullptr && p.scale_b[column] == INT16_MAX)) {
    return as_float(kNaN32);
  }
  const int shift = (p.scale_a != nullptr ? p.scale_a[row] : 0) + (p.scale_b != nullptr ? p.scale_b[column] : 0);
  const double c = p.accumulate ? static_cast<double>(p.d[static_cast<size_t>(row) * p.n + column]) : 0.0;
  int largest = c == 0 ? -126 : std::max(std::isfinite(c) ? std::ilogb(c) : 128, p.c_min_exponent);
  double plain = c;
  for (int i = 0; i < p.k; ++i) {
    const double x = p.a[row * p.k + i], y = p.b[i * p.n + column];
    plain += x * y;
    largest = std::max(largest, p.exponent_a[row * p.k + i] + p.exponent_b[i * p.n + column] + shift);
  }
  if (!std::isfinite(plain)) return round_result(plain, p.result);
  double total = std::trunc(std::ldexp(c, p.fraction_bits - largest));
  for (int i = 0; i < p.k; ++i) {
    const double product = static_cast<double>(p.a[row * p.k + i]) * p.b[i * p.n + column];
    total += std::trunc(std::ldexp(product, p.fraction_bits - largest + shift));
  }
  return round_result(std::ldexp(total, largest - p.fraction_bits), p.result);
}

// The condition of fused_columns for one element; `largest` is that of its products, without scales.
bool is_regular(const FusedProduct& p, int row, int column, int largest) {
  const float d = p.accumulate ? p.d[static_cast<size_t>(row) * p.n + column] : 0.0f;
  const int c = d == 0 ? -126 : std::max(static_cast<int>((as_bits(d) >> 23) & 0xff) - 127, p.c_min_exponent);
  const int shift = (p.scale_a != nullptr ? p.scale_a[row] : 0) + (p.scale_b != nullptr ? p.scale_b[column] : 0);
  int e = std::max(largest + shift, c);
  if (p.zero_column[column] != 0) e = d == 0 ? 0 : c;
  const int power = p.fraction_bits - e + shift;
  return e > kLowestRegular && e < kHighestRegular && power > -127 && power < 128 && shift < 512 && shift > -512;
}

// Writes a row whose results wait in `out` (and exactly in `sums` for float16), redoing what the fast path could not do.
void finish_row(const FusedProduct& p, int row, const int16_t* largest, const float* out, const double* sums) {
  float* d = p.d + static_cast<size_t>(row) * p.n;
  for (int j = 0; j < p.n; ++j) {
    if (!is_regular(p, row, j, largest[j])) {
      d[j] = fused_element(p, row, j);
    } else {
      d[j] = p.result == Accumulator::kF16 ? round_result(sums[j], p.result) : out[j];
    }
  }
}

namespace baseline {
#define VECTOR_BYTES 16
#include "mma_kernels.inc"
#undef VECTOR_BYTES
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
namespace avx2 {
#define VECTOR_BYTES 32
#include "mma_kernels.inc"
#undef VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace avx512 {
#define VECTOR_BYTES 64
#include "mma_kernels.inc"
#undef VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options
#endif

struct Kernels {
  void (*fused)(const FusedProduct&) = baseline::fused_rows;
  void (*scaled)(const ScaledProduct&) = baseline::scaled_rows;
};

const Kernels& kernels() {
  static const Kernels chosen = [] {
    Kernels k;
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) k = {avx2::fused_rows, avx2::scaled_rows};
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      k = {avx512::fused_rows, avx512::scaled_rows};
    }
#endif
    return k;
  }();
  return chosen;
}

// Flushes subnormal float results while it lives: they are below the last kept bit, and slow.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8000); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

int16_t exponent_of(float value, int min_exponent) {
  const uint32_t bits = as_bits(value) & 0x7fffffff;
  if (bits == 0) return -126;
  if (bits >= 0x7f800000) return kNotFinite;
  const int exponent = static_cast<int>(bits >> 23) - 127;
  return static_cast<int16_t>(exponent > min_exponent ? exponent : min_exponent);
}

void exponents_of(const float* values, int count, int min_exponent, int16_t* out) {
  for (int i = 0; i < count; ++i) out[i] = exponent_of(values[i], min_exponent);
}

}  // namespace

int min_exponent_of(Format format) {
  switch (format) {
    case Format::kF16:
    case Format::kE5M2: return -14;
    case Format::kE4M3:
    case Format::kUE4M3: return -6;
    case Format::kE3M2: return -2;
    case Format::kE2M3:
    case Format::kE2M1: return 0;
    case Format::kUE8M0: return -127;
    default: return -126;
  }
}

void multiply_accumulate(int m, int n, int k, const MmaOperand& a, const MmaOperand& b, float* d, bool accumulate,
                         Accumulation accumulation) {
  constexpr int kMultiple = 16;  // the widest vector
  if (n % kMultiple != 0) {
    // Rare and small (mma.sync, odd tile widths): pad the columns with zeros.
    const int padded = (n + kMultiple - 1) / kMultiple * kMultiple;
    std::vector<float> wide_b(static_cast<size_t>(k) * padded), wide_d(static_cast<size_t>(m) * padded);
    std::vector<int16_t> wide_scales(padded);
    for (int i = 0; i < k; ++i) std::copy_n(b.values + static_cast<size_t>(i) * n, n, &wide_b[static_cast<size_t>(i) * padded]);
    for (int i = 0; i < m; ++i) std::copy_n(d + static_cast<size_t>(i) * n, n, &wide_d[static_cast<size_t>(i) * padded]);
    if (b.scale_exponents != nullptr) std::copy_n(b.scale_exponents, n, wide_scales.data());
    const MmaOperand wide{wide_b.data(), b.min_exponent, b.scale_exponents != nullptr ? wide_scales.data() : nullptr};
    multiply_accumulate(m, padded, k, a, wide, wide_d.data(), accumulate, accumulation);
    for (int i = 0; i < m; ++i) std::copy_n(&wide_d[static_cast<size_t>(i) * padded], n, d + static_cast<size_t>(i) * n);
    return;
  }

  thread_local std::vector<int16_t> exponents;
  thread_local std::vector<uint8_t> zero_rows;
  thread_local std::vector<int32_t> zero_columns;
  const size_t a_count = static_cast<size_t>(m) * k, b_count = static_cast<size_t>(k) * n;
  exponents.resize(a_count + b_count);
  zero_rows.assign(m, 0);
  zero_columns.assign(n, 0);
  exponents_of(a.values, static_cast<int>(a_count), a.min_exponent, exponents.data());
  exponents_of(b.values, static_cast<int>(b_count), b.min_exponent, exponents.data() + a_count);

  int16_t highest = 0;
  for (const int16_t e : exponents) highest = e > highest ? e : highest;
  // The product of zero with an infinity, NaN or a NaN scale counts; and FP8 on Hopper truncates the accumulator even when
  // nothing is added.
  if (highest != kNotFinite && a.scale_exponents == nullptr && accumulation.result != Accumulator::kF32E8M13) {
    for (int i = 0; i < m; ++i) {
      uint32_t any = 0;
      for (int x = 0; x < k; ++x) any |= as_bits(a.values[static_cast<size_t>(i) * k + x]) << 1;
      zero_rows[i] = any == 0;
    }
    for (int x = 0; x < k; ++x) {
      const float* row = b.values + static_cast<size_t>(x) * n;
      for (int j = 0; j < n; ++j) zero_columns[j] |= static_cast<int32_t>(as_bits(row[j]) << 1);
    }
    for (int j = 0; j < n; ++j) zero_columns[j] = zero_columns[j] == 0;
  }

  FusedProduct p;
  p.m = m, p.n = n, p.k = k;
  p.a = a.values, p.b = b.values;
  p.exponent_a = exponents.data(), p.exponent_b = exponents.data() + a_count;
  p.scale_a = a.scale_exponents, p.scale_b = b.scale_exponents;
  p.zero_row = zero_rows.data(), p.zero_column = zero_columns.data();
  p.d = d;
  p.accumulate = accumulate;
  p.fraction_bits = accumulation.fraction_bits;
  p.c_min_exponent = accumulation.result == Accumulator::kF16 ? -14 : -126;
  p.result = accumulation.result;
  FlushSubnormals flush;
  kernels().fused(p);
}

void multiply_accumulate_block_scaled(int m, int n, int k, const float* a, const float* b, const float* scale_a,
                                      const float* scale_b, Format scale, float* d, bool accumulate) {
  thread_local std::vector<int32_t> exponents;
  const int groups = k / 16;
  const size_t a_count = static_cast<size_t>(m) * groups, b_count = static_cast<size_t>(groups) * n;
  exponents.resize(a_count + b_count);
  const int min_exponent = min_exponent_of(scale);
  const auto exponent = [min_exponent](float value) {
    return value == 0 ? -126 : std::max(static_cast<int>(as_bits(value) >> 23) - 127, min_exponent);
  };
  for (size_t i = 0; i < a_count; ++i) exponents[i] = exponent(scale_a[i]);
  for (size_t i = 0; i < b_count; ++i) exponents[a_count + i] = exponent(scale_b[i]);
  kernels().scaled({m, n, k, a, b, scale_a, scale_b, exponents.data(), exponents.data() + a_count, d, accumulate});
}

void multiply_accumulate_i32(int m, int n, int k, const int32_t* a, const int32_t* b, int32_t* d, bool accumulate,
                             bool saturate) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      int64_t total = accumulate ? d[i * n + j] : 0;
      for (int x = 0; x < k; ++x) total += static_cast<int64_t>(a[i * k + x]) * b[x * n + j];
      if (saturate) total = total > INT32_MAX ? INT32_MAX : total < INT32_MIN ? INT32_MIN : total;
      d[i * n + j] = static_cast<int32_t>(total);
    }
  }
}

}  // namespace emulator
