// tcgen05.mma: operands from shared and tensor memory, the data paths of one and two CTAs, block scales.
//
// PTX ISA: "Matrix Shape", "Data Path Layout Organization" (9.7.16.10.5), "Block Scaling", tcgen05.mma.
//
// Rows of D are lanes of tensor memory, so a product is computed transposed: the vector dimension runs along M, B's rows
// are the outer dimension, and with 128 rows in a CTA the accumulator is updated in place.
//
//   M per CTA  group  D(row, column)                                        A in tensor memory
//   128        1, 2   lane row, column                                      lane row
//   64         1      lane (row / 16) * 32 + row % 16, column               the same lanes
//   64         2      lane row + 64 * (column >= N / 2), column % (N / 2)   lanes row and row + 64 hold the same

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "mma.h"

namespace emulator {
namespace {

int lane_of(uint32_t address) { return static_cast<int>(address >> 16) & 0x7f; }
int column_of(uint32_t address) { return static_cast<int>(address & 0xffff); }

enum class DataPath { kFull, kQuarterHalves, kTwoByTwo };

DataPath path_of(int m, int cta_group) {
  if (m / cta_group == 128) return DataPath::kFull;
  return cta_group == 1 ? DataPath::kQuarterHalves : DataPath::kTwoByTwo;
}

int rows_of(const Tcgen05Mma& op) { return op.instruction.m / op.cta_group; }
int blocks_of(const Tcgen05Mma& op) { return op.instruction.k / op.scale_block; }

// Lane of row `row` of a CTA's part, before the half of the 2x2 path is chosen.
int row_lane(DataPath path, int row) { return path == DataPath::kQuarterHalves ? (row / 16) * 32 + row % 16 : row; }

// Columns of D that one half of the lanes holds.
int part_columns(const Tcgen05Mma& op) {
  return path_of(op.instruction.m, op.cta_group) == DataPath::kTwoByTwo ? op.instruction.n / 2 : op.instruction.n;
}

int lane_ranges(const Tcgen05Mma& op, uint32_t address, int columns, TmemRange* out) {
  const DataPath path = path_of(op.instruction.m, op.cta_group);
  int count = 0;
  for (int cta = 0; cta < op.cta_group; ++cta) {
    if (path == DataPath::kQuarterHalves) {
      for (int q = 0; q < 4; ++q) out[count++] = {cta, lane_of(address) + 32 * q, 16, column_of(address), columns};
    } else {
      out[count++] = {cta, lane_of(address), 128, column_of(address), columns};
    }
  }
  return count;
}

int a_columns(const Tcgen05Mma& op) {
  return op.instruction.k * storage_bits(op.instruction.kind, op.instruction.a) / 32;
}

// Columns that hold the scales of `rows` rows.
int scale_columns(const Tcgen05Mma& op, int rows, int id) {
  return ((rows + 31) / 32) * ((id + blocks_of(op) - 1) / 4 + 1);
}

int scale_ranges(const Tcgen05Mma& op, uint32_t address, int rows, int id, TmemRange* out) {
  for (int cta = 0; cta < op.cta_group; ++cta) {
    out[cta] = {cta, lane_of(address), 128, column_of(address), scale_columns(op, rows, id)};
  }
  return op.cta_group;
}

// A of one CTA as [k][rows]; `half` selects the copy in the 2x2 data path.
void load_a(const Tcgen05Mma& op, const CtaMemory& cta, int half, float* out) {
  const InstructionDescriptor& d = op.instruction;
  const int rows = rows_of(op), bits = storage_bits(d.kind, d.a);
  if (!op.a_in_tmem) {
    thread_local std::vector<uint32_t> chunks(kMaxMatrixChunks);
    matrix_chunks(op.a, d.a_major, rows, d.k, bits, chunks.data());
    gather_matrix(cta.shared, chunks.data(), d.a_major, d.a, bits, rows, d.k, true, out);
    return;
  }
  const DataPath path = path_of(d.m, op.cta_group);
  const int per_word = 32 / bits;
  const int base = lane_of(op.a_tmem) + 64 * half;
  for (int c = 0; c < a_columns(op); ++c) {
    const uint32_t* column = cta.tmem + tmem_index(0, column_of(op.a_tmem) + c);
    for (int e = 0; e < per_word; ++e) {
      float* k_row = out + static_cast<size_t>(c * per_word + e) * rows;
      for (int row = 0; row < rows; ++row) {
        const uint32_t word = column[base + row_lane(path, row)];
        uint32_t code = bits == 32 ? word : (word >> (e * bits)) & ((1u << bits) - 1);
        if (bits == 8 && d.a == Format::kE2M1) code >>= 2;  // the middle of its container
        k_row[row] = decode(d.a, code);
      }
    }
  }
}

// B of the whole group as [n][k]: each CTA holds an equal share of the rows.
void load_b(const Tcgen05Mma& op, const CtaMemory* ctas, float* out) {
  const InstructionDescriptor& d = op.instruction;
  const int rows = d.n / op.cta_group, bits = storage_bits(d.kind, d.b);
  thread_local std::vector<uint32_t> chunks(kMaxMatrixChunks);
  matrix_chunks(op.b, d.b_major, rows, d.k, bits, chunks.data());
  for (int cta = 0; cta < op.cta_group; ++cta) {
    gather_matrix(ctas[cta].shared, chunks.data(), d.b_major, d.b, bits, rows, d.k, false,
                  out + static_cast<size_t>(cta) * rows * d.k);
  }
}

uint8_t scale_byte(const CtaMemory& cta, uint32_t address, const ScaleCell& cell, int quarter) {
  const uint32_t word = cta.tmem[tmem_index(lane_of(address) + quarter * 32 + cell.lane, column_of(address) + cell.column)];
  return static_cast<uint8_t>(word >> (8 * cell.byte));
}

// What a product needs beside A and B for one CTA and one part (half of the lanes of the 2x2 path, or all).
struct Part {
  int cta, half;
  int first_column;  // of D's N
  int columns;
};

// D of a part in plain [columns][rows] order, copied unless it can be used in place.
class Result {
 public:
  Result(const Tcgen05Mma& op, const CtaMemory& cta, const Part& part)
      : op_(op), part_(part), rows_(rows_of(op)), path_(path_of(op.instruction.m, op.cta_group)) {
    first_ = cta.tmem + tmem_index(lane_of(op.d_tmem) + 64 * part.half, column_of(op.d_tmem));
    for (const uint32_t word : op.disabled_lanes) masked_ |= word != 0;
    in_place_ = path_ == DataPath::kFull && !masked_ && op.instruction.d != Format::kF16 && op.scale_input_d == 0;
    if (in_place_) return;
    copy_.resize(static_cast<size_t>(part.columns) * rows_);
    if (!op.accumulate) return;
    const double factor = std::ldexp(1.0, -op.scale_input_d);
    for (int c = 0; c < part.columns; ++c) {
      for (int row = 0; row < rows_; ++row) {
        const uint32_t word = *cell(row, c);
        float value = op.instruction.d == Format::kF16 ? f16_to_float(word & 0xffff) : as_float(word);
        if (op.scale_input_d != 0) value = static_cast<float>(value * factor);
        copy_[static_cast<size_t>(c) * rows_ + row] = as_bits(value);
      }
    }
  }

  float* data() { return reinterpret_cast<float*>(in_place_ ? first_ : copy_.data()); }

  void finish() {
    if (in_place_) return;
    for (int c = 0; c < part_.columns; ++c) {
      for (int row = 0; row < rows_; ++row) {
        const int lane = lane_of(op_.d_tmem) + 64 * part_.half + row_lane(path_, row);
        if ((op_.disabled_lanes[4 * part_.cta + lane / 32] >> (lane % 32)) & 1) continue;
        const uint32_t bits = copy_[static_cast<size_t>(c) * rows_ + row];
        *cell(row, c) = op_.instruction.d == Format::kF16 ? encode(Format::kF16, as_float(bits), {}) : bits;
      }
    }
  }

 private:
  uint32_t* cell(int row, int column) { return first_ + tmem_index(row_lane(path_, row), column); }

  const Tcgen05Mma& op_;
  Part part_;
  int rows_;
  DataPath path_;
  uint32_t* first_ = nullptr;
  bool masked_ = false, in_place_ = false;
  std::vector<uint32_t> copy_;
};

// kind::f16, tf32, f8f6f4 and mxf8f6f4 (one UE8M0 scale for each row).
void multiply_float(const Tcgen05Mma& op, const CtaMemory& cta, const Part& part, const float* b, const float* a,
                    float* d) {
  const InstructionDescriptor& i = op.instruction;
  const int rows = rows_of(op);
  MmaOperand outer{b, min_exponent_of(i.b), nullptr}, inner{a, min_exponent_of(i.a), nullptr};
  Accumulation accumulation;
  accumulation.result = i.d == Format::kF16 ? Accumulator::kF16 : Accumulator::kF32;
  if (op.scale_block == 0) {
    multiply_accumulate(part.columns, rows, i.k, outer, inner, d, op.accumulate, accumulation);
    return;
  }
  const auto exponent = [](uint8_t code) { return static_cast<int16_t>(code == 255 ? INT16_MAX : code - 127); };
  std::vector<int16_t> scale_a(rows), scale_b(part.columns);
  for (int row = 0; row < rows; ++row) {
    const ScaleCell cell = scale_cell(row, 0, rows, i.scale_a_id);
    scale_a[row] = exponent(scale_byte(cta, op.scale_a_tmem, cell, row / 32 + 2 * part.half));
  }
  for (int c = 0; c < part.columns; ++c) {
    const ScaleCell cell = scale_cell(c, 0, part.columns, i.scale_b_id);
    scale_b[c] = exponent(scale_byte(cta, op.scale_b_tmem, cell, 2 * part.half));
  }
  outer.scale_exponents = scale_b.data();
  inner.scale_exponents = scale_a.data();
  multiply_accumulate(part.columns, rows, i.k, outer, inner, d, op.accumulate, accumulation);
}

// kind::mxf4 and mxf4nvf4. The quarters of the lanes hold copies of B's scales, of which the first is read.
void multiply_fp4(const Tcgen05Mma& op, const CtaMemory& cta, const Part& part, const float* b, const float* a, float* d) {
  const InstructionDescriptor& i = op.instruction;
  const int rows = rows_of(op), groups = i.k / 16, repeat = op.scale_block / 16;
  std::vector<float> scale_a(static_cast<size_t>(groups) * rows), scale_b(static_cast<size_t>(part.columns) * groups);
  for (int g = 0; g < groups; ++g) {
    for (int row = 0; row < rows; ++row) {
      const ScaleCell cell = scale_cell(row, g / repeat, rows, i.scale_a_id);
      scale_a[static_cast<size_t>(g) * rows + row] =
          decode(i.scale, scale_byte(cta, op.scale_a_tmem, cell, row / 32 + 2 * part.half));
    }
    for (int c = 0; c < part.columns; ++c) {
      const ScaleCell cell = scale_cell(c, g / repeat, part.columns, i.scale_b_id);
      scale_b[static_cast<size_t>(c) * groups + g] = decode(i.scale, scale_byte(cta, op.scale_b_tmem, cell, 2 * part.half));
    }
  }
  multiply_accumulate_block_scaled(part.columns, rows, i.k, b, a, scale_b.data(), scale_a.data(), i.scale, d,
                                   op.accumulate);
}

void multiply_integer(const Tcgen05Mma& op, const Part& part, const float* b, const float* a, float* d) {
  const InstructionDescriptor& i = op.instruction;
  const int rows = rows_of(op);
  std::vector<int32_t> bi(static_cast<size_t>(part.columns) * i.k), ai(static_cast<size_t>(i.k) * rows);
  for (size_t x = 0; x < bi.size(); ++x) bi[x] = static_cast<int32_t>(b[x]);
  for (size_t x = 0; x < ai.size(); ++x) ai[x] = static_cast<int32_t>(a[x]);
  multiply_accumulate_i32(part.columns, rows, i.k, bi.data(), ai.data(), reinterpret_cast<int32_t*>(d), op.accumulate,
                          i.saturate);
}

}  // namespace

int scale_block_of(MmaKind kind, const char* qualifier) {
  const bool none = *qualifier == 0;
  const auto is = [qualifier](const char* text) { return std::strcmp(qualifier, text) == 0; };
  switch (kind) {
    case MmaKind::kMXF8F6F4: return none || is("1X") || is("block32") ? 32 : 0;
    case MmaKind::kMXF4: return none || is("2X") || is("block32") ? 32 : 0;
    case MmaKind::kMXF4NVF4: return is("4X") || is("block16") ? 16 : is("2X") || is("block32") ? 32 : 0;
    default: return 0;
  }
}

int tmem_ranges_d(const Tcgen05Mma& op, TmemRange* out) { return lane_ranges(op, op.d_tmem, part_columns(op), out); }

int tmem_ranges_a(const Tcgen05Mma& op, TmemRange* out) {
  return op.a_in_tmem ? lane_ranges(op, op.a_tmem, a_columns(op), out) : 0;
}

int tmem_ranges_scale_a(const Tcgen05Mma& op, TmemRange* out) {
  if (op.scale_block == 0) return 0;
  return scale_ranges(op, op.scale_a_tmem, rows_of(op), op.instruction.scale_a_id, out);
}

int tmem_ranges_scale_b(const Tcgen05Mma& op, TmemRange* out) {
  if (op.scale_block == 0) return 0;
  return scale_ranges(op, op.scale_b_tmem, part_columns(op), op.instruction.scale_b_id, out);
}

int shared_chunks_a(const Tcgen05Mma& op, uint32_t* out) {
  if (op.a_in_tmem) return 0;
  const InstructionDescriptor& d = op.instruction;
  return matrix_chunks(op.a, d.a_major, rows_of(op), d.k, storage_bits(d.kind, d.a), out);
}

int shared_chunks_b(const Tcgen05Mma& op, uint32_t* out) {
  const InstructionDescriptor& d = op.instruction;
  return matrix_chunks(op.b, d.b_major, d.n / op.cta_group, d.k, storage_bits(d.kind, d.b), out);
}

TmemCell tcgen05_d_cell(int m, int n, int cta_group, int row, int column) {
  const DataPath path = path_of(m, cta_group);
  const int rows = m / cta_group;
  const int half = path == DataPath::kTwoByTwo && column >= n / 2 ? 1 : 0;
  return {row / rows, row_lane(path, row % rows) + 64 * half, column - half * (n / 2)};
}

void tcgen05_mma(const Tcgen05Mma& op, const CtaMemory* ctas) {
  const InstructionDescriptor& i = op.instruction;
  const int rows = rows_of(op);
  const bool two_by_two = path_of(i.m, op.cta_group) == DataPath::kTwoByTwo;
  thread_local std::vector<float> a, b;
  a.resize(static_cast<size_t>(i.k) * rows);
  b.resize(static_cast<size_t>(i.n) * i.k);
  load_b(op, ctas, b.data());
  if (i.negate_a != i.negate_b) {
    for (float& value : b) value = -value;
  }
  for (int cta = 0; cta < op.cta_group; ++cta) {
    for (int half = 0; half < (two_by_two ? 2 : 1); ++half) {
      const Part part{cta, half, half * (i.n / 2), part_columns(op)};
      if (half == 0 || op.a_in_tmem) load_a(op, ctas[cta], half, a.data());
      Result d(op, ctas[cta], part);
      const float* part_b = b.data() + static_cast<size_t>(part.first_column) * i.k;
      switch (i.kind) {
        case MmaKind::kI8: multiply_integer(op, part, part_b, a.data(), d.data()); break;
        case MmaKind::kMXF4:
        case MmaKind::kMXF4NVF4: multiply_fp4(op, ctas[cta], part, part_b, a.data(), d.data()); break;
        default: multiply_float(op, ctas[cta], part, part_b, a.data(), d.data()); break;
      }
      d.finish();
    }
  }
}

}  // namespace emulator
