// Shapes of tensor-memory transfers: which tensor-memory word each thread's register holds.
//
// PTX ISA: "Data Movement Shape" (9.7.16.2.3), tcgen05.ld, tcgen05.st, tcgen05.cp, tcgen05.shift.
#pragma once

#include <cstdint>

namespace emulator {

// Tensor memory of a CTA is uint32_t[kTmemColumns][kTmemLanes]: a column is contiguous, because transfers and products
// touch many lanes of one column at a time.
constexpr int kTmemLanes = 128;
constexpr int kTmemColumns = 512;
inline int tmem_index(int lane, int column) { return column * kTmemLanes + lane; }

enum class TmemShape : uint8_t { k16x64b, k16x128b, k16x256b, k32x32b, k16x32bx2 };

// One transfer of a warp. `num` is the repetition (.x1 ... .x128).
struct TmemTransfer {
  TmemShape shape = TmemShape::k32x32b;
  int num = 1;
  bool half = false;     // .pack::16b (ld) or .unpack::16b (st): a register holds two 16-bit values of adjacent columns
  int half_split = 0;    // .16x32bx2: column offset of the second half (immHalfSplitoff)
};

int registers_of(const TmemTransfer& transfer);  // 32-bit registers per thread
int columns_of(const TmemTransfer& transfer);    // tensor-memory columns covered (of one half for .16x32bx2)
int lanes_of(const TmemTransfer& transfer);      // 16 or 32

// Relative to the address's lane and column. With `half` the second value lies in column + 1, each in the low 16 bits of
// its word, the first in the register's low half.
struct TmemWord { int lane, column; };
TmemWord tmem_word(const TmemTransfer& transfer, int thread, int i);

// The whole transfer. `tmem` points at the word of the transfer's (lane, column), `registers[i]` is uint32_t[32]. Lanes
// and columns must have been checked.
void load_tmem(const TmemTransfer& transfer, const uint32_t* tmem, uint32_t* const* registers);
void store_tmem(const TmemTransfer& transfer, uint32_t* tmem, const uint32_t* const* registers);

// ---- tcgen05.cp ------------------------------------------------------------------------------------------------------

enum class CopyShape : uint8_t {
  k128x256b, k4x256b, k128x128b,
  k64x128bWarpx2_02_13,  // .warpx2::02_13: rows 0-31 to warps 0 and 2, rows 32-63 to warps 1 and 3
  k64x128bWarpx2_01_23,  // .warpx2::01_23: rows 0-31 to warps 0 and 1, rows 32-63 to warps 2 and 3
  k32x128bWarpx4,        // .warpx4: every quarter receives all 32 rows
};
enum class CopyFormat : uint8_t {
  kNone,
  kB4x16P64,  // .b8x16.b4x16_p64: 16 four-bit values in 8 of 16 source bytes become 16 bytes
  kB6x16P32,  // .b8x16.b6x16_p32: 16 six-bit values in 12 of 16 source bytes become 16 bytes
};

int copy_rows(CopyShape shape);         // rows read from shared memory: 128, 4, 64 or 32
int copy_row_chunks(CopyShape shape);   // 16-byte chunks of a row in tensor memory: 2 (256b) or 1 (128b)
// Lanes that row r is written to (up to 4); returns how many.
int copy_lanes(CopyShape shape, int row, int lanes[4]);
// Expands one 16-byte source chunk to the 16 bytes stored.
void expand_chunk(CopyFormat format, const uint8_t source[16], uint8_t out[16]);
// Shared memory is a K-major matrix of copy_rows rows and copy_row_chunks chunks; its addresses come from
// matrix_chunks(descriptor, Major::kK, copy_rows(shape), copy_row_chunks(shape) * 16, 8, chunks).
// `tmem` points at the word of the destination's (lane, column).
void copy_to_tmem(CopyShape shape, CopyFormat format, const uint8_t* shared, const uint32_t* chunks, uint32_t* tmem);

}  // namespace emulator
