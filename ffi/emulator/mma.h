// Matrix products: wgmma, mma.sync and tcgen05.mma on gathered operands.
//
// PTX ISA: "Warp Level Matrix Multiply-Accumulate Instructions" (mma, 9.7.14), "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate" (wgmma, 9.7.15), "TensorCore 5th Generation" (tcgen05.mma, 9.7.16).
//
// Arithmetic. The ISA leaves order and intermediate precision of the accumulation to the hardware. Here a product follows
// what is known of the tensor cores from bit-exact reverse engineering (Xie et al., "MMA-Sim: Bit-Accurate Reference
// Model of Tensor Cores and Matrix Cores", 2025): all K products of one instruction and the accumulator are exact, are
// aligned to the largest exponent among them, truncated to a fixed number of fraction bits, summed exactly, and the sum
// is rounded once. With that the results on sm_90 are meant to equal the device's bit for bit.
#pragma once

#include <cstdint>

#include "descriptors.h"
#include "formats.h"
#include "tmem_shapes.h"

namespace emulator {

enum class Accumulator : uint8_t {
  kF32,       // truncated to float32
  kF32E8M13,  // truncated to 13 mantissa bits: Hopper's FP8 wgmma
  kF16,       // rounded to nearest even
};

struct Accumulation {
  int fraction_bits = 25;  // below the largest exponent
  Accumulator result = Accumulator::kF32;
};

// One operand widened to float: `values` row-major, [rows][k] for A and [k][rows] for B. `min_exponent` is that of the
// format (subnormal operands enter the alignment with it). `scale_exponents`, when not null, holds for each row a power
// of two that multiplies it (kind::mxf8f6f4); INT16_MAX means NaN.
struct MmaOperand {
  const float* values = nullptr;
  int min_exponent = -126;
  const int16_t* scale_exponents = nullptr;
};
int min_exponent_of(Format format);

// d[m][n] = (accumulate ? d : 0) + sum over k of a[m][k] * b[k][n]. n a multiple of 8, k <= 64.
void multiply_accumulate(int m, int n, int k, const MmaOperand& a, const MmaOperand& b, float* d, bool accumulate,
                         Accumulation accumulation);

// FP4 with block scales (kind::mxf4, mxf4nvf4): dot products of 16 elements are exact, then scaled by scale_a[m][k/16] *
// scale_b[k/16][n] (repeat the scale for blocks of 32), aligned and summed with 35 fraction bits. `scale` is UE8M0 or
// UE4M3.
void multiply_accumulate_block_scaled(int m, int n, int k, const float* a, const float* b, const float* scale_a,
                                      const float* scale_b, Format scale, float* d, bool accumulate);

// Integers (kind::i8, mma.s8): exact, wraps unless saturate.
void multiply_accumulate_i32(int m, int n, int k, const int32_t* a, const int32_t* b, int32_t* d, bool accumulate,
                             bool saturate);

// ---- wgmma -----------------------------------------------------------------------------------------------------------

struct WgmmaSpec {
  int n = 8;                          // m = 64
  Format a = Format::kF16, b = Format::kF16;  // F16, BF16, TF32, E4M3, E5M2
  Format d = Format::kF32;            // F32 or F16
  Major a_major = Major::kK, b_major = Major::kK;  // imm-trans-a/b (16-bit types only)
  bool negate_a = false, negate_b = false;         // imm-scale-a/b == -1
  int k() const { return 256 / bits_of(a); }       // 16, 8 (tf32), 32 (8 bits)
  int d_registers() const { return d == Format::kF16 ? n / 4 : n / 2; }
};

// Parses "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"; majorness and negation come from the immediates, which
// the caller sets. False if it is no dense wgmma known here.
bool parse_wgmma(const char* mnemonic, WgmmaSpec* spec);

// Row and column of D held by register i of thread t (0-127) of the warpgroup; F16 results hold two columns (col, col+1).
struct Cell { int row, column; };
Cell wgmma_d_cell(const WgmmaSpec& spec, int thread, int i);

// A from registers: registers[warp * 4 + i] is register i of that warp, uint32_t[32]. out[64][k].
void load_wgmma_a(const WgmmaSpec& spec, const uint32_t* const* registers, float* out);

// D fragments: registers[warp * spec.d_registers() + i] is uint32_t[32]. d is [64][n].
void load_wgmma_d(const WgmmaSpec& spec, const uint32_t* const* registers, float* d);
void store_wgmma_d(const WgmmaSpec& spec, const float* d, uint32_t* const* registers);

// The whole instruction once operands are gathered: a [64][k], b [k][n], d registers in place. scale_d false: d = a*b.
void wgmma(const WgmmaSpec& spec, const float* a, const float* b, bool scale_d, uint32_t* const* d_registers);

// ---- mma.sync ----------------------------------------------------------------------------------------------------------

struct MmaSyncSpec {
  int m = 16, n = 8, k = 16;
  Format a = Format::kF16, b = Format::kF16, c = Format::kF32, d = Format::kF32;  // + S8/U8 with S32
  bool saturate = false;
  int a_registers() const;  // operands narrower than 8 bits take 8
  int b_registers() const;
  int c_registers() const { return m * n * bits_of(c) / 1024; }
  int d_registers() const { return m * n * bits_of(d) / 1024; }
};

// Parses "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" and the .kind::f8f6f4 forms. False if unknown.
bool parse_mma_sync(const char* mnemonic, MmaSyncSpec* spec);
// Each operand is an array of registers, uint32_t[32] each. d may alias c.
void mma_sync(const MmaSyncSpec& spec, uint32_t* const* d, const uint32_t* const* a, const uint32_t* const* b,
              const uint32_t* const* c);

// ---- tcgen05.mma ---------------------------------------------------------------------------------------------------------

// One CTA's memories. Tensor memory is tmem[tmem_index(lane, column)], see tmem_shapes.h.
struct CtaMemory {
  const uint8_t* shared = nullptr;
  uint32_t* tmem = nullptr;
};

struct Tcgen05Mma {
  InstructionDescriptor instruction;
  int cta_group = 1;
  int scale_block = 0;            // elements per scale, 16 or 32; 0 unless block scaled
  bool a_in_tmem = false;
  uint32_t a_tmem = 0;            // tensor-memory addresses: lane << 16 | column
  MatrixDescriptor a, b;          // the same offsets in both CTAs of a pair
  uint32_t d_tmem = 0, scale_a_tmem = 0, scale_b_tmem = 0;
  bool accumulate = false;        // enable-input-d
  int scale_input_d = 0;          // D is multiplied by 2^-scale_input_d first (f16 and tf32 kinds)
  uint32_t disabled_lanes[8] = {};  // disable-output-lane: 4 words for each CTA
};

// The elements per scale that a mnemonic's qualifier means for a kind ("1X", "2X", "4X", "block16", "block32", or "" for
// the default). 0 if the combination is illegal.
int scale_block_of(MmaKind kind, const char* qualifier);

// A rectangle of one CTA's tensor memory (lanes may be several quarters).
struct TmemRange { int cta, lane, lanes, column, columns; };

// Tensor memory touched, for bounds, poison and race checks. Writes the ranges of each operand and returns their number
// (at most 8 each).
int tmem_ranges_d(const Tcgen05Mma& op, TmemRange* out);
int tmem_ranges_a(const Tcgen05Mma& op, TmemRange* out);       // 0 unless a_in_tmem
int tmem_ranges_scale_a(const Tcgen05Mma& op, TmemRange* out);
int tmem_ranges_scale_b(const Tcgen05Mma& op, TmemRange* out);

// Shared-memory chunks (16 bytes each) that one CTA reads for A and B; see matrix_chunks.
int shared_chunks_a(const Tcgen05Mma& op, uint32_t* out);      // 0 if a_in_tmem
int shared_chunks_b(const Tcgen05Mma& op, uint32_t* out);

// Executes the product. ctas[0] is the CTA of even rank in a pair (or the only one), ctas[1] its peer.
void tcgen05_mma(const Tcgen05Mma& op, const CtaMemory* ctas);

// Tensor-memory lane and column of D(row, column), relative to the address's, and the CTA of the group that holds it.
struct TmemCell { int cta, lane, column; };
TmemCell tcgen05_d_cell(int m, int n, int cta_group, int row, int column);

}  // namespace emulator
