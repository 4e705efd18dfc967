// Descriptors of matrix operands in shared memory and of tcgen05 instructions, and the addresses that follow from them.
//
// PTX ISA: "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor Format" (wgmma, 9.7.15),
// "Shared Memory Descriptor", "Canonical Layouts", "Instruction Descriptor" and "Scale Factor Layout" (tcgen05, 9.7.16).
#pragma once

#include <cstdint>

#include "formats.h"

namespace emulator {

enum class Swizzle : uint8_t {
  kNone,
  k32,             // address bit 4 ^= bit 7
  k64,             // bits 4-5 ^= bits 7-8
  k128,            // bits 4-6 ^= bits 7-9
  k128Atom32,      // 128B in atoms of 32 bytes: bits 5-6 ^= bits 7-8
  k128Atom32Flip8, // tensor maps only: as k128Atom32, and the 8-byte halves swap in odd rows
  k128Atom64,      // tensor maps only: bit 6 ^= bit 7
};

int span_of(Swizzle swizzle);  // bytes of a swizzle row: 16 (none), 32, 64, 128

// Physical shared address of a logical one. The XOR is on the absolute address after all offsets.
uint32_t apply_swizzle(uint32_t address, Swizzle swizzle);

enum class Major : uint8_t { kK, kMN };

// A decoded matrix descriptor; offsets in bytes.
struct MatrixDescriptor {
  uint32_t start = 0;
  uint32_t leading = 0;  // LBO, or with `absolute` the byte address of the second buffer (K = 48 bytes, sm_103)
  uint32_t stride = 0;   // SBO
  uint8_t base_offset = 0;
  bool absolute = false;
  Swizzle swizzle = Swizzle::kNone;
};

MatrixDescriptor decode_wgmma_descriptor(uint64_t bits);
// False when the swizzle field or the fixed bits are not legal.
bool decode_tcgen05_descriptor(uint64_t bits, MatrixDescriptor* descriptor);

// Byte address in shared memory (swizzled, window-relative) of the element at `row` (the M or N index) and `k`, of
// `bits` bits each (4, 8, 16 or 32; a 4-bit element gives its byte; 6-bit and mixed 4-bit elements of kind::f8f6f4
// occupy 8-bit slots: pass 8). Defined for any row and k.
uint32_t element_address(const MatrixDescriptor& descriptor, Major major, int row, int k, int bits);

// The operand as 16-byte chunks, each contiguous in memory in every layout. K-major: chunk c of row r at
// out[r * chunks_per_row + c] holds elements k = c*128/bits ...; MN-major: chunk c of column k at
// out[k * chunks_per_column + c] holds rows c*128/bits .... Returns the number of chunks. The caller may check these
// addresses (bounds, poison, races) before gather_matrix reads them.
int matrix_chunks(const MatrixDescriptor& descriptor, Major major, int rows, int k, int bits, uint32_t* out);
constexpr int kMaxMatrixChunks = 256 * 8;  // 256 rows of 128 bytes

// Gathers and widens an operand. `shared` is the base of the CTA's shared window, `chunks` from matrix_chunks with the
// same rows, k and bits. 4- and 6-bit formats with bits == 8 (kind::f8f6f4, mxf8f6f4) are packed at the start of each
// chunk: 16 elements in 8 or 12 bytes, the rest is padding.
// transpose = false: out[row * k + i]; true: out[i * rows + row].
void gather_matrix(const uint8_t* shared, const uint32_t* chunks, Major major, Format format, int bits, int rows, int k,
                   bool transpose, float* out);

// ---- tcgen05 instruction descriptors --------------------------------------------------------------------------------

enum class MmaKind : uint8_t { kF16, kTF32, kF8F6F4, kI8, kMXF8F6F4, kMXF4, kMXF4NVF4 };

inline bool is_block_scaled(MmaKind kind) { return kind >= MmaKind::kMXF8F6F4; }

struct InstructionDescriptor {
  MmaKind kind = MmaKind::kF16;
  int m = 0, n = 0, k = 0;      // k in elements, dense
  Format a = Format::kF16, b = Format::kF16, d = Format::kF32;
  Major a_major = Major::kK, b_major = Major::kK;
  bool negate_a = false, negate_b = false, saturate = false;
  Format scale = Format::kUE8M0;  // block-scaled kinds
  int scale_a_id = 0, scale_b_id = 0;  // byte (1X) or halfword (2X) within the 32-bit scale word
};

// Returns an explanation of what is illegal, or null when the descriptor is legal for the CTA group. Sparse and
// weight-stationary (.ws) products are not emulated and count as illegal.
const char* decode_instruction_descriptor(uint32_t bits, MmaKind kind, int cta_group, InstructionDescriptor* out);

// Bits per element of an operand in shared or tensor memory: 8 for every type of the (mx)f8f6f4 kinds, else its own.
int storage_bits(MmaKind kind, Format format);

// ---- scale factors in tensor memory -----------------------------------------------------------------------------------

// Where the scale of (row, block) lies: lane within 0-31 (all four quarters hold a copy, except for B in the 2x2 data
// path, see mma.h), 32-bit column relative to the scale's tensor-memory address, byte in the word. `rows`: rows of the
// operand, which decide where the next word begins when the scales of a row need two (K = 96). `id`: the SF-ID.
struct ScaleCell { int lane, column, byte; };
ScaleCell scale_cell(int row, int block, int rows, int id);

}  // namespace emulator
