// wgmma and mma.sync: fragments held in registers.
//
// PTX ISA: "Matrix Fragments for mma.m16n8k*", "Register Fragments and Shared Memory Matrix Layouts" (wgmma.m64nNk*).
// All fragments follow one scheme: lane l holds row l/4 (+8 in every second register) and, of A and B, 32 bits worth of
// consecutive k at (l%4); of C and D two consecutive columns at 2*(l%4).

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "mma.h"

namespace emulator {
namespace {

// Row and first k of register i of an A fragment (one warp, 16 rows), and column and first k of B (8 columns).
Cell a_cell(int lane, int i, int per_register) {
  return {lane / 4 + 8 * (i % 2), (lane % 4) * per_register + 4 * per_register * (i / 2)};
}
Cell b_cell(int lane, int i, int per_register) {
  return {lane / 4, (lane % 4) * per_register + 4 * per_register * i};
}
// Cell of element i (32-bit) of a C or D fragment.
Cell d_cell(int lane, int i) { return {lane / 4 + 8 * ((i / 2) % 2), 8 * (i / 4) + 2 * (lane % 4) + i % 2}; }

// Visits each element of a fragment: visit(lane, register, shift, row, column).
template <typename Visit>
void for_each_d(int registers, bool packed, Visit&& visit) {
  for (int i = 0; i < registers; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (packed) {
        for (int h = 0; h < 2; ++h) {
          const Cell cell = d_cell(lane, 2 * i + h);
          visit(lane, i, 16 * h, cell.row, cell.column);
        }
      } else {
        const Cell cell = d_cell(lane, i);
        visit(lane, i, 0, cell.row, cell.column);
      }
    }
  }
}

float element_of(Format format, uint32_t word, int shift, int bits) {
  if (bits == 32) return decode(format, word);
  const uint32_t code = (word >> shift) & ((1u << bits) - 1);
  // A 4-bit element sits in the middle of its 8-bit container (mma.sync.kind::f8f6f4).
  return decode(format, format == Format::kE2M1 ? code >> 2 : code);
}

uint32_t narrow_f16(float value) { return encode(Format::kF16, value, {}); }

// Splits a mnemonic at dots and double colons stay together with what precedes them.
std::vector<std::string_view> parts_of(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t dot = text.find('.');
    parts.push_back(text.substr(0, dot));
    if (dot == std::string_view::npos) break;
    text.remove_prefix(dot + 1);
  }
  return parts;
}

bool parse_shape(std::string_view text, int* m, int* n, int* k) {
  int values[3] = {0, 0, 0};
  const char names[3] = {'m', 'n', 'k'};
  for (int i = 0; i < 3; ++i) {
    if (text.empty() || text[0] != names[i]) return false;
    text.remove_prefix(1);
    if (text.empty() || !std::isdigit(static_cast<unsigned char>(text[0]))) return false;
    while (!text.empty() && std::isdigit(static_cast<unsigned char>(text[0]))) {
      values[i] = values[i] * 10 + (text[0] - '0');
      text.remove_prefix(1);
    }
  }
  *m = values[0], *n = values[1], *k = values[2];
  return text.empty();
}

bool parse_format(std::string_view text, Format* format) {
  static constexpr struct { const char* name; Format format; } kNames[] = {
      {"f16", Format::kF16},   {"bf16", Format::kBF16}, {"tf32", Format::kTF32}, {"f32", Format::kF32},
      {"e4m3", Format::kE4M3}, {"e5m2", Format::kE5M2}, {"e3m2", Format::kE3M2}, {"e2m3", Format::kE2M3},
      {"e2m1", Format::kE2M1}, {"s8", Format::kS8},     {"u8", Format::kU8},     {"s32", Format::kS32}};
  for (const auto& entry : kNames) {
    if (text == entry.name) {
      *format = entry.format;
      return true;
    }
  }
  return false;
}

bool is_integer(Format format) { return format == Format::kS8 || format == Format::kU8; }

// Bits an element takes in a register of mma.sync.
int container_bits(Format format) { return bits_of(format) < 8 ? 8 : bits_of(format); }

}  // namespace

// ---- wgmma -----------------------------------------------------------------------------------------------------------

bool parse_wgmma(const char* mnemonic, WgmmaSpec* spec) {
  const auto parts = parts_of(mnemonic);
  if (parts.size() != 8 || parts[0] != "wgmma" || parts[1] != "mma_async" || parts[2] != "sync" ||
      parts[3] != "aligned") {
    return false;
  }
  WgmmaSpec out;
  int m = 0, k = 0;
  if (!parse_shape(parts[4], &m, &out.n, &k) || !parse_format(parts[5], &out.d) || !parse_format(parts[6], &out.a) ||
      !parse_format(parts[7], &out.b)) {
    return false;
  }
  if (m != 64 || out.n % 8 != 0 || out.n < 8 || out.n > 256 || k != out.k()) return false;
  const bool fp8 = out.a == Format::kE4M3 || out.a == Format::kE5M2;
  const bool fp8_b = out.b == Format::kE4M3 || out.b == Format::kE5M2;
  const bool known = fp8 ? fp8_b
                         : out.a == out.b && (out.a == Format::kF16 || out.a == Format::kBF16 || out.a == Format::kTF32);
  if (!known) return false;
  const bool may_be_f16 = fp8 || out.a == Format::kF16;
  if (out.d != Format::kF32 && !(out.d == Format::kF16 && may_be_f16)) return false;
  *spec = out;
  return true;
}

Cell wgmma_d_cell(const WgmmaSpec& spec, int thread, int i) {
  Cell cell = d_cell(thread % kLanes, spec.d == Format::kF16 ? 2 * i : i);
  cell.row += 16 * (thread / kLanes);
  return cell;
}

void load_wgmma_a(const WgmmaSpec& spec, const uint32_t* const* registers, float* out) {
  const int bits = bits_of(spec.a), per_register = 32 / bits, k = spec.k();
  for (int warp = 0; warp < 4; ++warp) {
    for (int i = 0; i < 4; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const Cell cell = a_cell(lane, i, per_register);
        float* row = out + (16 * warp + cell.row) * k + cell.column;
        const uint32_t word = registers[warp * 4 + i][lane];
        for (int e = 0; e < per_register; ++e) row[e] = element_of(spec.a, word, e * bits, bits);
      }
    }
  }
}

namespace {

// Calls visit(element of D, word of the fragment, bit shift) for each 32-bit element or half of one warp's fragment, row by
// row of four lanes, which is the order of memory.
template <typename Words, typename Visit>
void for_each_wgmma_d(const WgmmaSpec& spec, Words registers, Visit&& visit) {
  const int n = spec.n, columns = n / 8;
  const bool half = spec.d == Format::kF16;
  for (int warp = 0; warp < 4; ++warp) {
    const auto mine = registers + warp * spec.d_registers();
    for (int upper = 0; upper < 2; ++upper) {
      for (int group = 0; group < 8; ++group) {
        const size_t row = static_cast<size_t>(16 * warp + 8 * upper + group) * n;
        for (int c = 0; c < columns; ++c) {
          for (int lane = 0; lane < 4; ++lane) {
            const size_t at = row + 8 * c + 2 * lane;
            if (half) {
              visit(at, mine[2 * c + upper][4 * group + lane], 0);
              visit(at + 1, mine[2 * c + upper][4 * group + lane], 16);
            } else {
              visit(at, mine[4 * c + 2 * upper][4 * group + lane], 0);
              visit(at + 1, mine[4 * c + 2 * upper + 1][4 * group + lane], 0);
            }
          }
        }
      }
    }
  }
}

}  // namespace

void load_wgmma_d(const WgmmaSpec& spec, const uint32_t* const* registers, float* d) {
  if (spec.d == Format::kF16) {
    for_each_wgmma_d(spec, registers, [d](size_t at, uint32_t word, int shift) { d[at] = f16_to_float((word >> shift) & 0xffff); });
  } else {
    for_each_wgmma_d(spec, registers, [d](size_t at, uint32_t word, int) { d[at] = as_float(word); });
  }
}

void store_wgmma_d(const WgmmaSpec& spec, const float* d, uint32_t* const* registers) {
  if (spec.d == Format::kF16) {
    for_each_wgmma_d(spec, registers, [d](size_t at, uint32_t& word, int shift) {
      const uint32_t code = narrow_f16(d[at]);
      word = shift == 0 ? code : (word & 0xffff) | (code << 16);
    });
  } else {
    for_each_wgmma_d(spec, registers, [d](size_t at, uint32_t& word, int) { word = as_bits(d[at]); });
  }
}

void wgmma(const WgmmaSpec& spec, const float* a, const float* b, bool scale_d, uint32_t* const* d_registers) {
  thread_local std::vector<float> d, negated;
  d.resize(static_cast<size_t>(64) * spec.n);
  if (scale_d) load_wgmma_d(spec, d_registers, d.data());
  if (spec.negate_a != spec.negate_b) {
    negated.resize(static_cast<size_t>(64) * spec.k());
    for (size_t i = 0; i < negated.size(); ++i) negated[i] = -a[i];
    a = negated.data();
  }
  const bool fp8 = bits_of(spec.a) == 8;
  Accumulation accumulation;
  accumulation.fraction_bits = fp8 ? 13 : 25;
  accumulation.result = spec.d == Format::kF16 ? Accumulator::kF16 : fp8 ? Accumulator::kF32E8M13 : Accumulator::kF32;
  multiply_accumulate(64, spec.n, spec.k(), {a, min_exponent_of(spec.a), nullptr}, {b, min_exponent_of(spec.b), nullptr},
                      d.data(), scale_d, accumulation);
  store_wgmma_d(spec, d.data(), d_registers);
}

// ---- mma.sync ----------------------------------------------------------------------------------------------------------

int MmaSyncSpec::a_registers() const { return m * k * container_bits(a) / 1024; }
int MmaSyncSpec::b_registers() const { return n * k * container_bits(b) / 1024; }

bool parse_mma_sync(const char* mnemonic, MmaSyncSpec* spec) {
  const auto parts = parts_of(mnemonic);
  if (parts.size() < 10 || parts[0] != "mma" || parts[1] != "sync" || parts[2] != "aligned") return false;
  MmaSyncSpec out;
  bool shaped = false;
  std::vector<Format> formats;
  for (size_t i = 3; i < parts.size(); ++i) {
    Format format;
    if (parse_shape(parts[i], &out.m, &out.n, &out.k)) {
      shaped = true;
    } else if (parse_format(parts[i], &format)) {
      formats.push_back(format);
    } else if (parts[i] == "satfinite") {
      out.saturate = true;
    } else if (parts[i] != "row" && parts[i] != "col" && parts[i] != "kind::f8f6f4") {
      return false;
    }
  }
  if (!shaped || formats.size() != 4 || (out.m != 16 && out.m != 8) || out.n != 8) return false;
  out.d = formats[0], out.a = formats[1], out.b = formats[2], out.c = formats[3];
  if (is_integer(out.a) != is_integer(out.b) || is_integer(out.a) != (out.d == Format::kS32) || out.c != out.d) {
    // C and D of different float types exist for f16 only.
    const bool mixed = !is_integer(out.a) && (out.c == Format::kF16 || out.c == Format::kF32) &&
                       (out.d == Format::kF16 || out.d == Format::kF32);
    if (!mixed) return false;
  }
  if (out.m == 8 && !is_integer(out.a)) return false;
  if (container_bits(out.a) != container_bits(out.b)) return false;
  // One or two registers of k for each of the four lanes of a row.
  const int step = 4 * 32 / container_bits(out.a);
  if (out.k != step && out.k != 2 * step) return false;
  *spec = out;
  return true;
}

void mma_sync(const MmaSyncSpec& spec, uint32_t* const* d, const uint32_t* const* a, const uint32_t* const* b,
              const uint32_t* const* c) {
  const int m = spec.m, n = spec.n, k = spec.k;
  const int a_bits = container_bits(spec.a), b_bits = container_bits(spec.b);
  float a_values[16 * 64], b_values[64 * 8], d_values[16 * 8] = {};
  const auto load = [&](auto&& store_a, auto&& store_b) {
    for (int i = 0; i < spec.a_registers(); ++i) {
      // With 8 rows the registers of A run along k only.
      for (int lane = 0; lane < kLanes; ++lane) {
        const Cell cell = m == 8 ? b_cell(lane, i, 32 / a_bits) : a_cell(lane, i, 32 / a_bits);
        for (int e = 0; e < 32 / a_bits; ++e) store_a(cell.row * k + cell.column + e, a[i][lane], e * a_bits);
      }
    }
    for (int i = 0; i < spec.b_registers(); ++i) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const Cell cell = b_cell(lane, i, 32 / b_bits);
        for (int e = 0; e < 32 / b_bits; ++e) store_b((cell.column + e) * n + cell.row, b[i][lane], e * b_bits);
      }
    }
  };
  if (is_integer(spec.a)) {
    int32_t a_integers[16 * 64], b_integers[64 * 8], d_integers[16 * 8];
    const auto integer = [](Format format, uint32_t word, int shift) {
      const uint32_t byte = (word >> shift) & 0xff;
      return format == Format::kS8 ? static_cast<int32_t>(static_cast<int8_t>(byte)) : static_cast<int32_t>(byte);
    };
    load([&](int at, uint32_t word, int shift) { a_integers[at] = integer(spec.a, word, shift); },
         [&](int at, uint32_t word, int shift) { b_integers[at] = integer(spec.b, word, shift); });
    for_each_d(spec.c_registers(), false, [&](int lane, int i, int, int row, int column) {
      d_integers[row * n + column] = static_cast<int32_t>(c[i][lane]);
    });
    multiply_accumulate_i32(m, n, k, a_integers, b_integers, d_integers, true, spec.saturate);
    for_each_d(spec.d_registers(), false, [&](int lane, int i, int, int row, int column) {
      d[i][lane] = static_cast<uint32_t>(d_integers[row * n + column]);
    });
    return;
  }
  load([&](int at, uint32_t word, int shift) { a_values[at] = element_of(spec.a, word, shift, a_bits); },
       [&](int at, uint32_t word, int shift) { b_values[at] = element_of(spec.b, word, shift, b_bits); });
  const bool c_half = spec.c == Format::kF16, d_half = spec.d == Format::kF16;
  for_each_d(spec.c_registers(), c_half, [&](int lane, int i, int shift, int row, int column) {
    d_values[row * n + column] = c_half ? f16_to_float((c[i][lane] >> shift) & 0xffff) : as_float(c[i][lane]);
  });
  Accumulation accumulation;
  accumulation.result = d_half ? Accumulator::kF16 : Accumulator::kF32;
  multiply_accumulate(m, n, k, {a_values, min_exponent_of(spec.a), nullptr}, {b_values, min_exponent_of(spec.b), nullptr},
                      d_values, true, accumulation);
  for_each_d(spec.d_registers(), d_half, [&](int lane, int i, int shift, int row, int column) {
    const float value = d_values[row * n + column];
    if (d_half) {
      const uint32_t code = narrow_f16(value);
      d[i][lane] = shift == 0 ? code : (d[i][lane] & 0xffff) | (code << 16);
    } else {
      d[i][lane] = as_bits(value);
    }
  });
}

}  // namespace emulator
