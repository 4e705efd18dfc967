// Tensor-memory transfer shapes: tcgen05.ld, tcgen05.st and tcgen05.cp.
//
// PTX ISA: see tmem_shapes.h. The fragment of each shape is tmem_word; .16x64b, .16x128b and .16x256b repeat their
// pattern every 2, 4 and 8 columns.

#include "tmem_shapes.h"

#include <cstring>

#include "formats.h"

namespace emulator {
namespace {

// 32-bit words of one lane in one repetition, and registers of a thread for it.
struct ShapeInfo { int words, registers, lanes; };

ShapeInfo info_of(TmemShape shape) {
  switch (shape) {
    case TmemShape::k16x64b: return {2, 1, 16};
    case TmemShape::k16x128b: return {4, 2, 16};
    case TmemShape::k16x256b: return {8, 4, 16};
    case TmemShape::k32x32b: return {1, 1, 32};
    case TmemShape::k16x32bx2: return {1, 1, 16};
  }
  return {1, 1, 32};
}

}  // namespace

int registers_of(const TmemTransfer& transfer) { return info_of(transfer.shape).registers * transfer.num; }

int columns_of(const TmemTransfer& transfer) {
  return info_of(transfer.shape).words * transfer.num * (transfer.half ? 2 : 1);
}

int lanes_of(const TmemTransfer& transfer) { return info_of(transfer.shape).lanes; }

TmemWord tmem_word(const TmemTransfer& transfer, int thread, int i) {
  const int spread = transfer.half ? 2 : 1;  // a packed register takes two columns
  switch (transfer.shape) {
    case TmemShape::k16x64b:
      return {thread / 4 + 8 * (thread % 2), (2 * i + (thread / 2) % 2) * spread};
    case TmemShape::k16x128b:
      return {thread / 4 + 8 * (i % 2), (4 * (i / 2) + thread % 4) * spread};
    case TmemShape::k16x256b:
      return {thread / 4 + 8 * ((i / 2) % 2), (8 * (i / 4) + 2 * (thread % 4) + i % 2) * spread};
    case TmemShape::k32x32b:
      return {thread, i * spread};
    case TmemShape::k16x32bx2:
      return {thread % 16, i * spread + (thread / 16) * transfer.half_split};
  }
  return {0, 0};
}

void load_tmem(const TmemTransfer& transfer, const uint32_t* tmem, uint32_t* const* registers) {
  const int count = registers_of(transfer);
  if (transfer.shape == TmemShape::k32x32b && !transfer.half) {
    for (int i = 0; i < count; ++i) std::memcpy(registers[i], tmem + tmem_index(0, i), kLanes * sizeof(uint32_t));
    return;
  }
  for (int i = 0; i < count; ++i) {
    for (int thread = 0; thread < kLanes; ++thread) {
      const TmemWord word = tmem_word(transfer, thread, i);
      const uint32_t* cell = tmem + tmem_index(word.lane, word.column);
      registers[i][thread] = transfer.half ? (cell[0] & 0xffff) | (cell[kTmemLanes] << 16) : cell[0];
    }
  }
}

void store_tmem(const TmemTransfer& transfer, uint32_t* tmem, const uint32_t* const* registers) {
  const int count = registers_of(transfer);
  if (transfer.shape == TmemShape::k32x32b && !transfer.half) {
    for (int i = 0; i < count; ++i) std::memcpy(tmem + tmem_index(0, i), registers[i], kLanes * sizeof(uint32_t));
    return;
  }
  for (int i = 0; i < count; ++i) {
    for (int thread = 0; thread < kLanes; ++thread) {
      const TmemWord word = tmem_word(transfer, thread, i);
      uint32_t* cell = tmem + tmem_index(word.lane, word.column);
      const uint32_t value = registers[i][thread];
      if (transfer.half) {
        cell[0] = value & 0xffff;
        cell[kTmemLanes] = value >> 16;
      } else {
        cell[0] = value;
      }
    }
  }
}

int copy_rows(CopyShape shape) {
  switch (shape) {
    case CopyShape::k128x256b:
    case CopyShape::k128x128b: return 128;
    case CopyShape::k4x256b: return 4;
    case CopyShape::k64x128bWarpx2_02_13:
    case CopyShape::k64x128bWarpx2_01_23: return 64;
    case CopyShape::k32x128bWarpx4: return 32;
  }
  return 0;
}

int copy_row_chunks(CopyShape shape) {
  return shape == CopyShape::k128x256b || shape == CopyShape::k4x256b ? 2 : 1;
}

int copy_lanes(CopyShape shape, int row, int lanes[4]) {
  switch (shape) {
    case CopyShape::k128x256b:
    case CopyShape::k128x128b:
      lanes[0] = row;
      return 1;
    case CopyShape::k4x256b:
      // One lane in each quarter.
      lanes[0] = row * 32;
      return 1;
    case CopyShape::k64x128bWarpx2_02_13:
      lanes[0] = row;
      lanes[1] = row + 64;
      return 2;
    case CopyShape::k64x128bWarpx2_01_23:
      lanes[0] = row % 32 + 64 * (row / 32);
      lanes[1] = lanes[0] + 32;
      return 2;
    case CopyShape::k32x128bWarpx4:
      for (int q = 0; q < 4; ++q) lanes[q] = row + 32 * q;
      return 4;
  }
  return 0;
}

void expand_chunk(CopyFormat format, const uint8_t source[16], uint8_t out[16]) {
  switch (format) {
    case CopyFormat::kNone:
      std::memcpy(out, source, 16);
      return;
    case CopyFormat::kB4x16P64:
      // The nibble goes to bits 2-5 of its byte, where the tensor core expects a 4-bit operand of an 8-bit container.
      for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(((source[i / 2] >> (4 * (i % 2))) & 0xf) << 2);
      return;
    case CopyFormat::kB6x16P32:
      for (int i = 0; i < 16; ++i) {
        const int bit = 6 * i;
        const uint32_t pair = source[bit / 8] | (static_cast<uint32_t>(source[bit / 8 + 1]) << 8);
        out[i] = (pair >> (bit % 8)) & 0x3f;
      }
      return;
  }
}

void copy_to_tmem(CopyShape shape, CopyFormat format, const uint8_t* shared, const uint32_t* chunks, uint32_t* tmem) {
  const int rows = copy_rows(shape), row_chunks = copy_row_chunks(shape);
  for (int row = 0; row < rows; ++row) {
    int lanes[4];
    const int copies = copy_lanes(shape, row, lanes);
    for (int c = 0; c < row_chunks; ++c) {
      uint8_t bytes[16];
      expand_chunk(format, shared + chunks[row * row_chunks + c], bytes);
      for (int word = 0; word < 4; ++word) {
        for (int i = 0; i < copies; ++i) std::memcpy(tmem + tmem_index(lanes[i], 4 * c + word), bytes + 4 * word, 4);
      }
    }
  }
}

}  // namespace emulator
