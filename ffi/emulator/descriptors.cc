// Shared-memory matrix descriptors, operand gathering, tcgen05 instruction descriptors and scale-factor cells.
//
// PTX ISA: see descriptors.h. The canonical layouts are written out in element_address; everything else follows from it.

#include "descriptors.h"

#include <cstring>

namespace emulator {

int span_of(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::kNone: return 16;
    case Swizzle::k32: return 32;
    case Swizzle::k64: return 64;
    default: return 128;
  }
}

uint32_t apply_swizzle(uint32_t address, Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::kNone: return address;
    case Swizzle::k32: return address ^ ((address >> 3) & 0x10);
    case Swizzle::k64: return address ^ ((address >> 3) & 0x30);
    case Swizzle::k128: return address ^ ((address >> 3) & 0x70);
    case Swizzle::k128Atom32: return address ^ ((address >> 2) & 0x60);
    case Swizzle::k128Atom32Flip8: return address ^ ((address >> 2) & 0x60) ^ ((address >> 4) & 0x08);
    case Swizzle::k128Atom64: return address ^ ((address >> 1) & 0x40);
  }
  return address;
}

namespace {

// A field of 14 bits in units of 16 bytes.
uint32_t encoded_bytes(uint64_t bits, int shift) { return static_cast<uint32_t>((bits >> shift) & 0x3fff) << 4; }

// The pattern of a tile that does not begin at a multiple of its repeat starts `base_offset` rows of 128 bytes early.
uint32_t swizzled(const MatrixDescriptor& descriptor, uint32_t address) {
  const uint32_t phase = static_cast<uint32_t>(descriptor.base_offset) << 7;
  return apply_swizzle(address - phase, descriptor.swizzle) + phase;
}

// Logical address of byte `byte` of row `row` in a K-major operand.
uint32_t k_major_address(const MatrixDescriptor& descriptor, uint32_t row, uint32_t byte) {
  const uint32_t group = (row / 8) * descriptor.stride;
  if (descriptor.swizzle == Swizzle::kNone) {
    return descriptor.start + group + (byte / 16) * descriptor.leading + (row % 8) * 16 + byte % 16;
  }
  const uint32_t span = static_cast<uint32_t>(span_of(descriptor.swizzle));
  const uint32_t offset = group + (row % 8) * span;
  if (descriptor.absolute) {
    // K = 48 bytes does not divide the row of 128: what does not fit continues in the second buffer.
    const uint32_t position = (descriptor.start & (span - 1)) + byte;
    if (position >= span) return descriptor.leading + offset + (position - span);
  }
  return descriptor.start + offset + byte;
}

// Logical address of byte `byte` along M or N in column k of an MN-major operand.
uint32_t mn_major_address(const MatrixDescriptor& descriptor, uint32_t byte, uint32_t k) {
  if (descriptor.swizzle == Swizzle::kNone) {
    return descriptor.start + (byte / 16) * descriptor.stride + (k / 8) * descriptor.leading + (k % 8) * 16 + byte % 16;
  }
  const uint32_t span = static_cast<uint32_t>(span_of(descriptor.swizzle));
  // With atoms of 32 bytes the pattern repeats after 4 rows, and so does the tile.
  const uint32_t group = descriptor.swizzle == Swizzle::k128Atom32 ? 4 : 8;
  return descriptor.start + (byte / span) * descriptor.leading + (k / group) * descriptor.stride + (k % group) * span +
         byte % span;
}

}  // namespace

MatrixDescriptor decode_wgmma_descriptor(uint64_t bits) {
  static constexpr Swizzle kModes[4] = {Swizzle::kNone, Swizzle::k128, Swizzle::k64, Swizzle::k32};
  MatrixDescriptor out;
  out.start = encoded_bytes(bits, 0);
  out.leading = encoded_bytes(bits, 16);
  out.stride = encoded_bytes(bits, 32);
  out.base_offset = (bits >> 49) & 7;
  out.swizzle = kModes[bits >> 62];
  return out;
}

bool decode_tcgen05_descriptor(uint64_t bits, MatrixDescriptor* descriptor) {
  MatrixDescriptor out;
  out.start = encoded_bytes(bits, 0);
  out.leading = encoded_bytes(bits, 16);
  out.stride = encoded_bytes(bits, 32);
  out.base_offset = (bits >> 49) & 7;
  out.absolute = (bits >> 52) & 1;
  switch (bits >> 61) {
    case 0: out.swizzle = Swizzle::kNone; break;
    case 1: out.swizzle = Swizzle::k128Atom32; break;
    case 2: out.swizzle = Swizzle::k128; break;
    case 4: out.swizzle = Swizzle::k64; break;
    case 6: out.swizzle = Swizzle::k32; break;
    default: return false;
  }
  *descriptor = out;
  return ((bits >> 46) & 7) == 1;  // the fixed constant 0b001
}

uint32_t element_address(const MatrixDescriptor& descriptor, Major major, int row, int k, int bits) {
  const uint32_t r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(k), b = static_cast<uint32_t>(bits);
  if (major == Major::kK) return swizzled(descriptor, k_major_address(descriptor, r, c * b / 8));
  return swizzled(descriptor, mn_major_address(descriptor, r * b / 8, c));
}

int matrix_chunks(const MatrixDescriptor& descriptor, Major major, int rows, int k, int bits, uint32_t* out) {
  const uint32_t outer = static_cast<uint32_t>(major == Major::kK ? rows : k);
  const uint32_t inner = static_cast<uint32_t>(major == Major::kK ? k : rows) * static_cast<uint32_t>(bits) / 128;
  uint32_t* next = out;
  for (uint32_t o = 0; o < outer; ++o) {
    for (uint32_t i = 0; i < inner; ++i) {
      const uint32_t logical = major == Major::kK ? k_major_address(descriptor, o, i * 16)
                                                  : mn_major_address(descriptor, i * 16, o);
      *next++ = swizzled(descriptor, logical);
    }
  }
  return static_cast<int>(next - out);
}

namespace {

// Spreads 16 packed 6-bit values (12 bytes, little-endian) over 16 bytes.
void unpack_6bit(const uint8_t* source, uint8_t* out) {
  for (int i = 0; i < 16; ++i) {
    const int bit = i * 6;
    const uint32_t pair = source[bit / 8] | (static_cast<uint32_t>(source[bit / 8 + 1]) << 8);
    out[i] = (pair >> (bit % 8)) & 0x3f;
  }
}

int decode_chunk(Format format, int bits, const uint8_t* chunk, float* out) {
  if (bits == 8 && (format == Format::kE2M3 || format == Format::kE3M2)) {
    uint8_t bytes[16];
    unpack_6bit(chunk, bytes);
    decode_span(format, bytes, 16, out);
    return 16;
  }
  const int count = 128 / bits;
  decode_span(format, chunk, count, out);  // 4-bit elements in 8-bit slots are packed in the first 8 bytes
  return count;
}

}  // namespace

void gather_matrix(const uint8_t* shared, const uint32_t* chunks, Major major, Format format, int bits, int rows, int k,
                   bool transpose, float* out) {
  const int outer = major == Major::kK ? rows : k;
  const int inner = major == Major::kK ? k : rows;
  const int per_chunk = 128 / bits;
  // K-major data is contiguous along k, MN-major along the rows; the copy is direct when that is the order of `out`.
  const bool direct = (major == Major::kK) != transpose;
  float elements[32];
  for (int o = 0; o < outer; ++o) {
    for (int i = 0; i < inner; i += per_chunk) {
      const uint8_t* chunk = shared + *chunks++;
      if (direct) {
        decode_chunk(format, bits, chunk, out + static_cast<size_t>(o) * inner + i);
      } else {
        decode_chunk(format, bits, chunk, elements);
        float* column = out + static_cast<size_t>(i) * outer + o;
        for (int e = 0; e < per_chunk; ++e) column[static_cast<size_t>(e) * outer] = elements[e];
      }
    }
  }
}

int storage_bits(MmaKind kind, Format format) {
  switch (kind) {
    case MmaKind::kF8F6F4:
    case MmaKind::kMXF8F6F4:
    case MmaKind::kI8: return 8;
    case MmaKind::kMXF4:
    case MmaKind::kMXF4NVF4: return 4;
    default: return bits_of(format);
  }
}

namespace {

bool decode_operand_format(MmaKind kind, uint32_t code, Format* format) {
  switch (kind) {
    case MmaKind::kF16:
      if (code > 1) return false;
      *format = code == 0 ? Format::kF16 : Format::kBF16;
      return true;
    case MmaKind::kTF32:
      *format = Format::kTF32;
      return code == 2;
    case MmaKind::kI8:
      if (code > 1) return false;
      *format = code == 0 ? Format::kU8 : Format::kS8;
      return true;
    case MmaKind::kF8F6F4:
    case MmaKind::kMXF8F6F4: {
      static constexpr Format kFormats[6] = {Format::kE4M3, Format::kE5M2, Format::kE4M3,
                                             Format::kE2M3, Format::kE3M2, Format::kE2M1};
      if (code > 5 || code == 2) return false;
      *format = kFormats[code];
      return true;
    }
    case MmaKind::kMXF4:
    case MmaKind::kMXF4NVF4:
      *format = Format::kE2M1;
      return code == 1;
  }
  return false;
}

bool may_be_mn_major(Format format) { return bits_of(format) >= 8; }

int depth_of(MmaKind kind, bool long_k) {
  switch (kind) {
    case MmaKind::kF16: return 16;
    case MmaKind::kTF32: return 8;
    case MmaKind::kMXF4:
    case MmaKind::kMXF4NVF4: return long_k ? 96 : 64;
    default: return 32;
  }
}

}  // namespace

const char* decode_instruction_descriptor(uint32_t bits, MmaKind kind, int cta_group, InstructionDescriptor* out) {
  const auto field = [bits](int low, int count) { return (bits >> low) & ((1u << count) - 1); };
  InstructionDescriptor d;
  d.kind = kind;
  const bool scaled = is_block_scaled(kind);
  if (field(2, 1)) return "sparse products are not emulated";
  if (field(0, 2)) return "the sparsity selector of a dense product must be 0";
  if (field(6, 1)) return "bit 6 is reserved";
  if (!decode_operand_format(kind, field(7, 3), &d.a)) return "illegal type of A";
  if (!decode_operand_format(kind, field(10, 3), &d.b)) return "illegal type of B";
  d.negate_a = field(13, 1);
  d.negate_b = field(14, 1);
  if (kind == MmaKind::kI8 && (d.negate_a || d.negate_b)) return "kind::i8 cannot negate";
  d.a_major = field(15, 1) ? Major::kMN : Major::kK;
  d.b_major = field(16, 1) ? Major::kMN : Major::kK;
  if ((d.a_major == Major::kMN && !may_be_mn_major(d.a)) || (d.b_major == Major::kMN && !may_be_mn_major(d.b))) {
    return "operands of 4 and 6 bits must be K-major";
  }
  d.n = static_cast<int>(field(17, 6)) * 8;
  d.m = static_cast<int>(field(24, 5)) * 16;
  if (scaled) {
    d.d = Format::kF32;
    d.scale_b_id = static_cast<int>(field(4, 2));
    d.scale_a_id = static_cast<int>(field(29, 2));
    d.scale = field(23, 1) ? Format::kUE8M0 : Format::kUE4M3;
    if (d.scale == Format::kUE4M3 && kind != MmaKind::kMXF4NVF4) return "this kind takes UE8M0 scales only";
    if (field(3, 1)) return "bit 3 is reserved";
    if (field(31, 1) && kind == MmaKind::kMXF8F6F4) return "kind::mxf8f6f4 has no K = 96";
    d.k = depth_of(kind, field(31, 1));
    if (cta_group == 1 && d.m != 128) return "block-scaled products of one CTA need M = 128";
  } else {
    static constexpr Format kResults[4] = {Format::kF16, Format::kF32, Format::kS32, Format::kF64};
    d.d = kResults[field(4, 2)];
    const bool result_ok = kind == MmaKind::kI8     ? d.d == Format::kS32
                           : kind == MmaKind::kTF32 ? d.d == Format::kF32
                                                    : d.d == Format::kF32 || d.d == Format::kF16;
    if (!result_ok) return "illegal type of D";
    if (kind == MmaKind::kF16 && d.d == Format::kF16 && (d.a != Format::kF16 || d.b != Format::kF16)) {
      return "D of type f16 needs A and B of type f16";
    }
    d.saturate = field(3, 1);
    if (d.saturate && kind != MmaKind::kI8) return "saturation is for integers";
    if (field(23, 1) || field(29, 1)) return "bits 23 and 29 are reserved";
    if (field(30, 2)) return "a maximum shift belongs to .ws products, which are not emulated";
    d.k = depth_of(kind, false);
  }
  if (kind == MmaKind::kF16 && d.a != d.b) return "A and B of kind::f16 must have one type";
  if (cta_group == 1 ? (d.m != 64 && d.m != 128) : (d.m != 128 && d.m != 256)) return "illegal M for this CTA group";
  const int step = cta_group == 1 ? 8 : 16;
  if (d.n < step || d.n > 256 || d.n % step != 0) return "illegal N for this CTA group";
  *out = d;
  return nullptr;
}

ScaleCell scale_cell(int row, int block, int rows, int id) {
  const int index = id + block;
  const int words = (rows + 31) / 32;  // columns that hold the first four scales of every row
  return {row % 32, row / 32 + (index / 4) * words, index % 4};
}

}  // namespace emulator
