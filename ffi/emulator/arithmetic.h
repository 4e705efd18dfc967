// Floating-point arithmetic of the PTX ISA on whole warps.
//
// PTX ISA: "Floating-Point Instructions" (add, sub, mul, fma, min, max, abs, neg, rcp, sqrt, rsqrt, sin, cos, lg2, ex2,
// tanh; f32, f64, f32x2), "Half-Precision Floating-Point Instructions" (f16, f16x2, bf16, bf16x2) and "Mixed-Precision"
// (add/sub/fma.f32.{f16,bf16}).
//
// An instruction is looked up once, when it is decoded, and the function found runs all 32 lanes: the caller selects
// the active lanes afterwards (nothing here traps). Registers: see formats.h; a .f32x2 or .f64 register is
// uint64_t[32], passed as void*. `d` may alias any operand exactly, but not overlap one partly.
#pragma once

#include <cstdint>

#include "formats.h"

namespace emulator {

enum class FloatType : uint8_t { kF32, kF64, kF32x2, kF16, kF16x2, kBF16, kBF16x2 };

enum class FloatOp : uint8_t {
  kAdd, kSub, kMul,       // d = a op b
  kFma,                   // d = a * b + c, rounded once
  kMin, kMax,             // two inputs, or three when FloatMode.inputs == 3 (sm_100: min/max.f32 d, a, b, c)
  kAbs, kNeg,             // sign bit operations
  kDiv, kRcp, kSqrt,      // correctly rounded (.rn .rz .rm .rp), and .approx/.full, which are the same here within the ISA's bounds
  kRsqrt, kEx2, kLg2, kSin, kCos, kTanh,  // .approx
};

struct FloatMode {
  Round round = Round::kNearestEven;
  bool ftz = false;          // subnormal inputs and results become zeros of the same sign (f32, f32x2; f16/f16x2 too)
  bool sat = false;          // clamp to [0, 1], NaN to +0
  bool relu = false;         // fma/min/max on f16, bf16: clamp to >= 0, NaN to canonical NaN
  bool propagate_nan = false;  // min/max.NaN
  bool xorsign_abs = false;  // min/max.xorsign.abs
  bool out_of_bounds_zero = false;  // fma.oob: a NaN operand of 0xffff ... forces +0 (f16, bf16)
  bool approximate = false;  // .approx: rounded to nearest, without the cost of switching the host's rounding direction
  int inputs = 2;            // min/max only
};

// Unused operands are ignored and may be null.
using FloatFunction = void (*)(void* d, const void* a, const void* b, const void* c);

// Null if the combination does not exist in the ISA.
FloatFunction find_float(FloatOp op, FloatType type, FloatMode mode);

// {add,sub,fma}{.rnd}{.sat}.f32.{f16,bf16} d, a, b, c: `a` (and for fma `b`) narrow, the rest f32.
FloatFunction find_mixed(FloatOp op, Format narrow, FloatMode mode);

// setp/set comparison of floats: result bit i = lane i. NaN rules: eq ne lt le gt ge are false for NaN (ne too),
// the *u forms are true, num = both numbers, nan = either NaN.
enum class Compare : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };
using CompareFunction = uint32_t (*)(const void* a, const void* b);
CompareFunction find_compare(Compare compare, FloatType type, bool ftz);  // kF32, kF64, kF16, kBF16
// Packed halves: bit i of *low and *high for lane i. kF16x2, kBF16x2.
void compare_packed(Compare compare, FloatType type, bool ftz, const uint32_t* a, const uint32_t* b, uint32_t* low,
                    uint32_t* high);

// Scalars, for atomics and reductions. `mode` as above.
float add_f32(float a, float b, FloatMode mode = {});
float mul_f32(float a, float b, FloatMode mode = {});
float fma_f32(float a, float b, float c, FloatMode mode = {});
float min_f32(float a, float b, FloatMode mode = {});
float max_f32(float a, float b, FloatMode mode = {});
uint32_t add_packed(Format format, uint32_t a, uint32_t b);  // kF16 or kBF16, both halves, .rn
uint32_t min_packed(Format format, uint32_t a, uint32_t b);
uint32_t max_packed(Format format, uint32_t a, uint32_t b);

// Scalars of the .approx functions (see transcendental.h for the accuracy that the ISA states and ours).
float ex2_approx(float x, bool ftz);
float lg2_approx(float x, bool ftz);
float rcp_approx(float x, bool ftz);
float rsqrt_approx(float x, bool ftz);
float sqrt_approx(float x, bool ftz);
float sin_approx(float x, bool ftz);
float cos_approx(float x, bool ftz);
float tanh_approx(float x);

}  // namespace emulator
