// A plain C interface to the numerics of the emulator, for tests/test_emulator_numerics.py only. It is built into a test
// library of its own and never into the installed one.

#include <cstring>
#include <vector>

#include "arithmetic.h"
#include "descriptors.h"
#include "formats.h"
#include "mma.h"
#include "tensor_map.h"
#include "tmem_shapes.h"

using namespace emulator;

namespace {

// Pointers to consecutive registers of 32 words.
std::vector<uint32_t*> registers_at(uint32_t* words, int count) {
  std::vector<uint32_t*> pointers(count);
  for (int i = 0; i < count; ++i) pointers[i] = words + static_cast<size_t>(i) * kLanes;
  return pointers;
}

bool descriptor_of(bool tcgen05, uint64_t bits, MatrixDescriptor* out) {
  if (tcgen05) return decode_tcgen05_descriptor(bits, out);
  *out = decode_wgmma_descriptor(bits);
  return true;
}

}  // namespace

extern "C" {

// ---- formats and cvt -------------------------------------------------------------------------------------------------

void numerics_decode(int format, const uint32_t* codes, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = decode(static_cast<Format>(format), codes[i]);
}

// `sources` are arrays of warps * 32 registers. `generic` bypasses the specialised loops. Returns 0 for an unknown cvt.
int numerics_convert(const char* mnemonic, int generic, int warps, void* d, const void* const* sources, int count) {
  CvtSpec spec;
  if (!parse_cvt(mnemonic, &spec)) return 0;
  const ConvertFunction function = generic ? convert : find_convert(spec);
  for (int w = 0; w < warps; ++w) {
    const void* at[5];
    for (int i = 0; i < count; ++i) {
      const bool data = i < spec.sources();
      at[i] = static_cast<const uint8_t*>(sources[i]) + static_cast<size_t>(w) * kLanes * (data && spec.from_wide() ? 8 : 4);
    }
    function(spec, static_cast<uint8_t*>(d) + static_cast<size_t>(w) * kLanes * (spec.to_wide() ? 8 : 4), at);
  }
  return 1;
}

// ---- arithmetic --------------------------------------------------------------------------------------------------------

// flags: 1 ftz, 2 sat, 4 relu, 8 NaN, 16 xorsign.abs, 32 oob. `stride`: bytes of a lane. Returns 0 where none exists.
int numerics_float(int op, int type, int round, int flags, int inputs, int warps, int stride, void* d, const void* a,
                   const void* b, const void* c) {
  FloatMode mode;
  mode.round = static_cast<Round>(round);
  mode.ftz = flags & 1, mode.sat = flags & 2, mode.relu = flags & 4, mode.propagate_nan = flags & 8;
  mode.xorsign_abs = flags & 16, mode.out_of_bounds_zero = flags & 32;
  mode.inputs = inputs;
  const FloatFunction function = find_float(static_cast<FloatOp>(op), static_cast<FloatType>(type), mode);
  if (function == nullptr) return 0;
  for (int w = 0; w < warps; ++w) {
    const size_t at = static_cast<size_t>(w) * kLanes * stride;
    function(static_cast<uint8_t*>(d) + at, static_cast<const uint8_t*>(a) + at, static_cast<const uint8_t*>(b) + at,
             static_cast<const uint8_t*>(c) + at);
  }
  return 1;
}

uint32_t numerics_compare(int compare, int type, int ftz, const void* a, const void* b) {
  return find_compare(static_cast<Compare>(compare), static_cast<FloatType>(type), ftz != 0)(a, b);
}

// ---- descriptors -------------------------------------------------------------------------------------------------------

uint32_t numerics_swizzle(uint32_t address, int swizzle) { return apply_swizzle(address, static_cast<Swizzle>(swizzle)); }

int numerics_element_address(int tcgen05, uint64_t bits, int major, int row, int k, int element_bits) {
  MatrixDescriptor descriptor;
  if (!descriptor_of(tcgen05 != 0, bits, &descriptor)) return -1;
  return static_cast<int>(element_address(descriptor, static_cast<Major>(major), row, k, element_bits));
}

// Gathers a matrix through its descriptor. Returns the number of chunks, or -1.
int numerics_gather(int tcgen05, uint64_t bits, int major, int format, int element_bits, int rows, int k, int transpose,
                    const uint8_t* shared, float* out) {
  MatrixDescriptor descriptor;
  if (!descriptor_of(tcgen05 != 0, bits, &descriptor)) return -1;
  std::vector<uint32_t> chunks(kMaxMatrixChunks);
  const int count = matrix_chunks(descriptor, static_cast<Major>(major), rows, k, element_bits, chunks.data());
  gather_matrix(shared, chunks.data(), static_cast<Major>(major), static_cast<Format>(format), element_bits, rows, k,
                transpose != 0, out);
  return count;
}

// fields: m n k a b d a_major b_major negate_a negate_b saturate scale scale_a_id scale_b_id. Returns the complaint or null.
const char* numerics_instruction_descriptor(uint32_t bits, int kind, int cta_group, int* fields) {
  InstructionDescriptor d;
  const char* why = decode_instruction_descriptor(bits, static_cast<MmaKind>(kind), cta_group, &d);
  if (why != nullptr) return why;
  const int values[] = {d.m, d.n, d.k, static_cast<int>(d.a), static_cast<int>(d.b), static_cast<int>(d.d),
                        static_cast<int>(d.a_major), static_cast<int>(d.b_major), d.negate_a, d.negate_b, d.saturate,
                        static_cast<int>(d.scale), d.scale_a_id, d.scale_b_id};
  std::memcpy(fields, values, sizeof(values));
  return nullptr;
}

// ---- tensor maps ---------------------------------------------------------------------------------------------------------

int numerics_encode_map(void* out, int type, uint32_t rank, uint64_t address, const uint64_t* sizes,
                        const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                        int swizzle, int promotion, int fill) {
  return encode_tiled(static_cast<TensorMapBits*>(out), type, rank, address, sizes, strides, box, element_strides,
                      interleave, swizzle, promotion, fill);
}

// direction: 0 load, 1 store, 2 + reduction. Returns the bytes that complete_tx counts, or -1.
int numerics_box(const void* map_bytes, const int32_t* coordinates, uint8_t* shared, uint32_t address, int direction) {
  TensorMap map;
  if (!decode_tensor_map(map_bytes, &map)) return -1;
  if (direction == 0) load_box(map, coordinates, shared, address);
  else if (direction == 1) store_box(map, coordinates, shared, address);
  else reduce_box(map, coordinates, shared, address, static_cast<Reduction>(direction - 2));
  return static_cast<int>(map.box_bytes());
}

// ---- tensor memory ---------------------------------------------------------------------------------------------------------

int numerics_tmem(int shape, int num, int half, int half_split, int store, uint32_t* tmem, int lane, int column,
                  uint32_t* registers) {
  const TmemTransfer transfer{static_cast<TmemShape>(shape), num, half != 0, half_split};
  const int count = registers_of(transfer);
  if (registers == nullptr) return count;
  const auto pointers = registers_at(registers, count);
  uint32_t* at = tmem + tmem_index(lane, column);
  if (store) store_tmem(transfer, at, pointers.data());
  else load_tmem(transfer, at, pointers.data());
  return count;
}

int numerics_tmem_copy(int shape, int format, uint64_t bits, const uint8_t* shared, uint32_t* tmem, int column) {
  MatrixDescriptor descriptor;
  if (!decode_tcgen05_descriptor(bits, &descriptor)) return 0;
  const CopyShape s = static_cast<CopyShape>(shape);
  uint32_t chunks[256];
  matrix_chunks(descriptor, Major::kK, copy_rows(s), copy_row_chunks(s) * 16, 8, chunks);
  copy_to_tmem(s, static_cast<CopyFormat>(format), shared, chunks, tmem + tmem_index(0, column));
  return 1;
}

// ---- matrix products ---------------------------------------------------------------------------------------------------------

// `a_registers` null: A comes from shared memory. Registers: warp after warp, 32 words each.
int numerics_wgmma(const char* mnemonic, const uint8_t* shared, uint64_t a_bits, const uint32_t* a_registers,
                   uint64_t b_bits, int a_major, int b_major, int negate_a, int negate_b, int scale_d, uint32_t* d) {
  WgmmaSpec spec;
  if (!parse_wgmma(mnemonic, &spec)) return 0;
  spec.a_major = static_cast<Major>(a_major), spec.b_major = static_cast<Major>(b_major);
  spec.negate_a = negate_a != 0, spec.negate_b = negate_b != 0;
  const int k = spec.k();
  std::vector<float> a(64 * k), b(static_cast<size_t>(k) * spec.n);
  std::vector<uint32_t> chunks(kMaxMatrixChunks);
  if (a_registers != nullptr) {
    const auto pointers = registers_at(const_cast<uint32_t*>(a_registers), 16);
    load_wgmma_a(spec, pointers.data(), a.data());
  } else {
    matrix_chunks(decode_wgmma_descriptor(a_bits), spec.a_major, 64, k, bits_of(spec.a), chunks.data());
    gather_matrix(shared, chunks.data(), spec.a_major, spec.a, bits_of(spec.a), 64, k, false, a.data());
  }
  matrix_chunks(decode_wgmma_descriptor(b_bits), spec.b_major, spec.n, k, bits_of(spec.b), chunks.data());
  gather_matrix(shared, chunks.data(), spec.b_major, spec.b, bits_of(spec.b), spec.n, k, true, b.data());
  const auto pointers = registers_at(d, 4 * spec.d_registers());
  wgmma(spec, a.data(), b.data(), scale_d != 0, pointers.data());
  return 1;
}

int numerics_wgmma_d_cell(const char* mnemonic, int thread, int i) {
  WgmmaSpec spec;
  if (!parse_wgmma(mnemonic, &spec)) return -1;
  const Cell cell = wgmma_d_cell(spec, thread, i);
  return cell.row * 1000 + cell.column;
}

int numerics_mma_sync(const char* mnemonic, uint32_t* d, uint32_t* a, uint32_t* b, uint32_t* c) {
  MmaSyncSpec spec;
  if (!parse_mma_sync(mnemonic, &spec)) return 0;
  const auto pd = registers_at(d, spec.d_registers()), pa = registers_at(a, spec.a_registers()),
             pb = registers_at(b, spec.b_registers()), pc = registers_at(c, spec.c_registers());
  mma_sync(spec, pd.data(), pa.data(), pb.data(), pc.data());
  return 1;
}

struct NumericsTcgen05 {
  uint32_t kind, cta_group, instruction, a_in_tmem, a_tmem, d_tmem, scale_a_tmem, scale_b_tmem, accumulate, scale_input_d;
  uint64_t a, b;
  uint32_t disabled_lanes[8];
};

const char* numerics_tcgen05(const NumericsTcgen05* in, const char* qualifier, const uint8_t* shared0,
                             const uint8_t* shared1, uint32_t* tmem0, uint32_t* tmem1) {
  Tcgen05Mma op;
  const MmaKind kind = static_cast<MmaKind>(in->kind);
  op.cta_group = static_cast<int>(in->cta_group);
  const char* why = decode_instruction_descriptor(in->instruction, kind, op.cta_group, &op.instruction);
  if (why != nullptr) return why;
  if (is_block_scaled(kind)) {
    op.scale_block = scale_block_of(kind, qualifier);
    if (op.scale_block == 0) return "illegal scale vector size";
  }
  op.a_in_tmem = in->a_in_tmem != 0;
  op.a_tmem = in->a_tmem, op.d_tmem = in->d_tmem;
  op.scale_a_tmem = in->scale_a_tmem, op.scale_b_tmem = in->scale_b_tmem;
  op.accumulate = in->accumulate != 0;
  op.scale_input_d = static_cast<int>(in->scale_input_d);
  std::memcpy(op.disabled_lanes, in->disabled_lanes, sizeof(op.disabled_lanes));
  if (!op.a_in_tmem && !decode_tcgen05_descriptor(in->a, &op.a)) return "illegal descriptor of A";
  if (!decode_tcgen05_descriptor(in->b, &op.b)) return "illegal descriptor of B";
  const CtaMemory ctas[2] = {{shared0, tmem0}, {shared1, tmem1}};
  tcgen05_mma(op, ctas);
  return nullptr;
}

int numerics_tcgen05_d_cell(int m, int n, int cta_group, int row, int column) {
  const TmemCell cell = tcgen05_d_cell(m, n, cta_group, row, column);
  return (cell.cta * 128 + cell.lane) * 512 + cell.column;
}

}  // extern "C"
