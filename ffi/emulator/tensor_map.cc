// Encoding, decoding and executing tensor maps.
//
// CUDA driver API: cuTensorMapEncodeTiled. PTX ISA: "Tensors", tensormap.replace, cp.async.bulk.tensor, cp.reduce.async.bulk(.tensor).
//
// The first 64 bytes are the hardware's layout, as far as it is known from maps that compilers build inline:
//   0x00 u64 address | 0x08 u32 flags: 4-6 rank - 1, 7-10 type, 11-12 interleave, 13-14 swizzle
//   0x0c u32[4] strides >> 4 | 0x1c four high bits of each stride | 0x20 u32[5] sizes - 1 | 0x37 u8[5] box - 1
// What it does not (visibly) hold, our encoder keeps behind a mark in the second half, which inline maps leave undefined.

#include "tensor_map.h"

#include <cstring>

#include "arithmetic.h"

namespace emulator {
namespace {

constexpr uint32_t kMark = 0x70616d74;  // "tmap"

// Second half of a map that encode_tiled wrote.
struct Extension {
  uint32_t mark;
  uint8_t type, swizzle, nan_fill, l2_promotion;
  uint8_t element_strides[5];
  uint8_t atomicity;  // of the 128-byte swizzle, as tensormap.replace counts; `swizzle` includes it
  uint8_t unused[2];
};

// The hardware's numbers of the types. Those of u16, bf16 and packed 4-bit were seen in maps built inline; the others
// follow the order of tensormap.replace's .elemtype or are our own choice (tf32 and the unpacked types).
constexpr uint8_t kHardwareType[16] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 14, 15, 11, 12, 13};

bool is_float_type(TensorType type) {
  return type >= TensorType::kF16 && type <= TensorType::kTF32Ftz;
}
bool is_unpacked(TensorType type) { return type == TensorType::k16U4Align16B || type == TensorType::k16U6Align16B; }

Swizzle swizzle_of(int code) { return static_cast<Swizzle>(code); }

uint8_t* at(TensorMapBits* map, int offset) { return reinterpret_cast<uint8_t*>(map) + offset; }

template <typename T>
T read(const void* bytes, int offset) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(bytes) + offset, sizeof(T));
  return value;
}

}  // namespace

int bits_of(TensorType type) {
  switch (type) {
    case TensorType::kU8: return 8;
    case TensorType::kU16:
    case TensorType::kF16:
    case TensorType::kBF16: return 16;
    case TensorType::kU64:
    case TensorType::kS64:
    case TensorType::kF64: return 64;
    case TensorType::k16U4Align8B:
    case TensorType::k16U4Align16B: return 4;
    case TensorType::k16U6Align16B: return 6;
    default: return 32;
  }
}

int shared_bits_of(TensorType type) { return is_unpacked(type) ? 8 : bits_of(type); }

uint32_t TensorMap::box_bytes() const {
  uint32_t elements = box[0];
  for (int d = 1; d < rank; ++d) elements *= (box[d] + element_strides[d] - 1) / element_strides[d];
  return elements * static_cast<uint32_t>(shared_bits_of(type)) / 8;
}

int encode_tiled(TensorMapBits* out, int data_type, uint32_t rank, uint64_t global_address, const uint64_t* sizes,
                 const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                 int swizzle, int l2_promotion, int oob_fill, const char** why) {
  constexpr int kNotSupported = 801;
  const auto refuse = [why](const char* reason, int code = 1) {
    if (why != nullptr) *why = reason;
    return code;
  };
  if (out == nullptr || reinterpret_cast<uintptr_t>(out) % 64 != 0) return refuse("the map must be aligned to 64 bytes");
  if (data_type < 0 || data_type > 15) return refuse("unknown data type");
  if (rank < 1 || rank > 5) return refuse("the rank must be 1 to 5");
  if (interleave < 0 || interleave > 2) return refuse("unknown interleave");
  if (interleave != 0) return refuse("interleaved layouts are not emulated", kNotSupported);
  if (swizzle < 0 || swizzle > 6) return refuse("unknown swizzle");
  if (l2_promotion < 0 || l2_promotion > 3) return refuse("unknown L2 promotion");
  if (oob_fill < 0 || oob_fill > 1) return refuse("unknown out-of-bounds fill");
  const TensorType type = static_cast<TensorType>(data_type);
  const bool unpacked = is_unpacked(type);
  const uint64_t alignment = unpacked ? 32 : 16;
  if (oob_fill == 1 && !is_float_type(type)) return refuse("NaN fill needs a floating-point type");
  if (global_address % alignment != 0) return refuse("the global address is not aligned to 16 bytes (32 for unpacked types)");
  if (sizes == nullptr || box == nullptr || element_strides == nullptr || (rank > 1 && strides == nullptr)) {
    return refuse("an array is null");
  }
  for (uint32_t d = 0; d < rank; ++d) {
    if (sizes[d] == 0 || sizes[d] > (uint64_t{1} << 32)) return refuse("a size is not in 1 to 2^32");
    if (box[d] == 0 || box[d] > 256) return refuse("a box dimension is not in 1 to 256");
    if (element_strides[d] == 0 || element_strides[d] > 8) return refuse("an element stride is not in 1 to 8");
  }
  for (uint32_t d = 0; d + 1 < rank; ++d) {
    if (strides[d] % alignment != 0) return refuse("a stride is no multiple of 16 bytes (32 for unpacked types)");
    if (strides[d] >= (uint64_t{1} << 40)) return refuse("a stride is not below 2^40");
  }
  if (type == TensorType::k16U4Align8B && sizes[0] % 2 != 0) return refuse("the inner size of packed 4-bit data must be even");
  if (unpacked && sizes[0] % 128 != 0) return refuse("the inner size of unpacked types must be a multiple of 128");
  if (unpacked && box[0] != 128) return refuse("the inner box dimension of unpacked types must be 128");
  const uint64_t inner_bytes = static_cast<uint64_t>(box[0]) * static_cast<uint64_t>(shared_bits_of(type)) / 8;
  if (static_cast<uint64_t>(box[0]) * static_cast<uint64_t>(shared_bits_of(type)) % 128 != 0) {
    return refuse("the inner box dimension is no multiple of 16 bytes");
  }
  if (swizzle != 0 && inner_bytes > static_cast<uint64_t>(span_of(swizzle_of(swizzle)))) {
    return refuse("the inner box dimension exceeds the swizzle span");
  }
  if (unpacked && (swizzle == 1 || swizzle == 2)) return refuse("unpacked types need no swizzle or a 128-byte one");

  std::memset(out, 0, sizeof(*out));
  std::memcpy(at(out, 0x00), &global_address, 8);
  // The hardware's field has room for the three plain swizzles; the others differ in the atom, kept in the extension.
  const uint32_t flags = ((rank - 1) << 4) | (static_cast<uint32_t>(kHardwareType[data_type]) << 7) |
                         (static_cast<uint32_t>(swizzle > 3 ? 3 : swizzle) << 13);
  std::memcpy(at(out, 0x08), &flags, 4);
  uint32_t high = 0;
  for (uint32_t d = 0; d + 1 < rank; ++d) {
    const uint64_t units = strides[d] >> 4;
    const uint32_t low = static_cast<uint32_t>(units);
    std::memcpy(at(out, 0x0c + 4 * static_cast<int>(d)), &low, 4);
    high |= static_cast<uint32_t>(units >> 32) << (4 * d);
  }
  std::memcpy(at(out, 0x1c), &high, 4);
  Extension extension{};
  extension.mark = kMark;
  extension.type = static_cast<uint8_t>(data_type);
  extension.swizzle = static_cast<uint8_t>(swizzle);
  extension.nan_fill = static_cast<uint8_t>(oob_fill);
  extension.l2_promotion = static_cast<uint8_t>(l2_promotion);
  extension.atomicity = static_cast<uint8_t>(swizzle > 3 ? swizzle - 3 : 0);
  for (uint32_t d = 0; d < 5; ++d) {
    const uint32_t size = d < rank ? static_cast<uint32_t>(sizes[d] - 1) : 0;
    std::memcpy(at(out, 0x20 + 4 * static_cast<int>(d)), &size, 4);
    *at(out, 0x37 + static_cast<int>(d)) = d < rank ? static_cast<uint8_t>(box[d] - 1) : 0;
    extension.element_strides[d] = d < rank && d > 0 ? static_cast<uint8_t>(element_strides[d]) : 1;
  }
  std::memcpy(at(out, 0x40), &extension, sizeof(extension));
  return 0;
}

bool decode_tensor_map(const void* bytes, TensorMap* map) {
  TensorMap out;
  const uint32_t flags = read<uint32_t>(bytes, 0x08);
  out.base = read<uint64_t>(bytes, 0x00);
  out.rank = static_cast<int>((flags >> 4) & 7) + 1;
  if (out.rank > 5 || ((flags >> 11) & 3) != 0) return false;
  const uint32_t hardware_type = (flags >> 7) & 15;
  for (int type = 0; type < 16; ++type) {
    if (kHardwareType[type] == hardware_type) out.type = static_cast<TensorType>(type);
  }
  out.swizzle = swizzle_of(static_cast<int>((flags >> 13) & 3));
  const uint32_t high = read<uint32_t>(bytes, 0x1c);
  for (int d = 0; d < out.rank; ++d) {
    out.sizes[d] = static_cast<uint64_t>(read<uint32_t>(bytes, 0x20 + 4 * d)) + 1;
    out.box[d] = static_cast<uint32_t>(read<uint8_t>(bytes, 0x37 + d)) + 1;
    if (d > 0) {
      const uint64_t low = read<uint32_t>(bytes, 0x0c + 4 * (d - 1));
      out.strides[d] = (low | (static_cast<uint64_t>((high >> (4 * (d - 1))) & 15) << 32)) << 4;
    }
  }
  const Extension extension = read<Extension>(bytes, 0x40);
  if (extension.mark == kMark) {
    out.type = static_cast<TensorType>(extension.type);
    out.swizzle = swizzle_of(extension.swizzle);
    out.nan_fill = extension.nan_fill != 0;
    out.l2_promotion = extension.l2_promotion;
    for (int d = 0; d < 5; ++d) out.element_strides[d] = extension.element_strides[d];
  }
  *map = out;
  return true;
}

const char* replace_field(void* bytes, MapField field, int ordinal, uint64_t value) {
  // .elemtype counts otherwise than CUtensorMapDataType.
  constexpr TensorType kElementTypes[16] = {
      TensorType::kU8, TensorType::kU16, TensorType::kU32, TensorType::kS32, TensorType::kU64, TensorType::kS64, TensorType::kF16,
      TensorType::kF32, TensorType::kF32Ftz, TensorType::kF64, TensorType::kBF16, TensorType::kTF32, TensorType::kTF32Ftz,
      TensorType::k16U4Align8B, TensorType::k16U4Align16B, TensorType::k16U6Align16B};
  auto* map = static_cast<TensorMapBits*>(bytes);
  TensorMap now;
  if (!decode_tensor_map(bytes, &now)) return "the bytes are no tiled map";
  Extension extension = read<Extension>(bytes, 0x40);
  if (extension.mark != kMark) {  // a map built inline, or zeros
    extension = {kMark, static_cast<uint8_t>(now.type), static_cast<uint8_t>(now.swizzle), 0, 0, {1, 1, 1, 1, 1}, 0, {}};
  }
  uint32_t flags = read<uint32_t>(bytes, 0x08);
  auto set = [&](int bit, uint32_t mask, uint32_t to) { flags = (flags & ~(mask << bit)) | to << bit; };
  if (ordinal < 0 || ordinal > (field == MapField::kGlobalStride ? 3 : 4)) return "the ordinal exceeds the rank of a tensor";
  const auto number = static_cast<uint32_t>(value);
  switch (field) {
    case MapField::kGlobalAddress:
      if (value % 16 != 0) return "the global address is not aligned to 16 bytes";
      std::memcpy(at(map, 0x00), &value, 8);
      break;
    case MapField::kRank:
      if (number > 4) return "the rank must be 1 to 5";
      set(4, 7, number);
      break;
    case MapField::kBoxDim:
      if (number == 0 || number > 256) return "a box dimension is not in 1 to 256";
      *at(map, 0x37 + ordinal) = static_cast<uint8_t>(number - 1);
      break;
    case MapField::kGlobalDim: {
      if (number == 0) return "a size is 0";
      const uint32_t last = number - 1;
      std::memcpy(at(map, 0x20 + 4 * ordinal), &last, 4);
      break;
    }
    case MapField::kGlobalStride: {
      if (value % 16 != 0 || value >= (uint64_t{1} << 40)) return "a stride is no multiple of 16 bytes below 2^40";
      const uint32_t low = static_cast<uint32_t>(value >> 4), top = static_cast<uint32_t>(value >> 36);
      uint32_t high = read<uint32_t>(bytes, 0x1c);
      high = (high & ~(15u << (4 * ordinal))) | top << (4 * ordinal);
      std::memcpy(at(map, 0x0c + 4 * ordinal), &low, 4);
      std::memcpy(at(map, 0x1c), &high, 4);
      break;
    }
    case MapField::kElementStride:
      if (number == 0 || number > 8) return "an element stride is not in 1 to 8";
      if (ordinal > 0) extension.element_strides[ordinal] = static_cast<uint8_t>(number);  // dense along the innermost one
      break;
    case MapField::kElementType:
      if (number > 15) return "unknown element type";
      extension.type = static_cast<uint8_t>(kElementTypes[number]);
      set(7, 15, kHardwareType[extension.type]);
      break;
    case MapField::kInterleave:
      if (number != 0) return "interleaved layouts are not emulated";
      break;
    case MapField::kSwizzleMode:
      if (number > 3) return "a swizzle mode that is not emulated";
      set(13, 3, number);
      break;
    case MapField::kSwizzleAtomicity:
      if (number > 3) return "unknown swizzle atomicity";
      extension.atomicity = static_cast<uint8_t>(number);
      break;
    case MapField::kFillMode:
      if (number > 1) return "unknown fill mode";
      extension.nan_fill = static_cast<uint8_t>(number);
      break;
  }
  const uint32_t mode = flags >> 13 & 3;
  extension.swizzle = static_cast<uint8_t>(mode == 3 ? 3 + extension.atomicity : mode);
  std::memcpy(at(map, 0x08), &flags, 4);
  std::memcpy(at(map, 0x40), &extension, sizeof(extension));
  return nullptr;
}

namespace {

// Writes the out-of-bounds value.
void fill(const TensorMap& map, uint8_t* out, uint32_t bytes) {
  if (!map.nan_fill) {
    std::memset(out, 0, bytes);
    return;
  }
  // The quiet NaN whose bits are all ones but the sign, in the element's width.
  const uint32_t width = static_cast<uint32_t>(bits_of(map.type)) / 8;
  for (uint32_t i = 0; i < bytes; ++i) out[i] = i % width == width - 1 ? 0x7f : 0xff;
}

}  // namespace

void load_box(const TensorMap& map, const int32_t* coordinates, uint8_t* shared_base, uint32_t address) {
  for_each_run(map, coordinates, [&](const BoxRun& run) {
    const uint8_t* source = reinterpret_cast<const uint8_t*>(run.global);
    for_each_piece(address + run.shared, run.bytes, map.swizzle, [&](uint32_t physical, uint32_t offset, uint32_t bytes) {
      if (run.fill) {
        fill(map, shared_base + physical, bytes);
      } else {
        std::memcpy(shared_base + physical, source + offset, bytes);
      }
    });
  });
}

void store_box(const TensorMap& map, const int32_t* coordinates, const uint8_t* shared_base, uint32_t address) {
  for_each_run(map, coordinates, [&](const BoxRun& run) {
    if (run.fill) return;
    uint8_t* destination = reinterpret_cast<uint8_t*>(run.global);
    for_each_piece(address + run.shared, run.bytes, map.swizzle, [&](uint32_t physical, uint32_t offset, uint32_t bytes) {
      std::memcpy(destination + offset, shared_base + physical, bytes);
    });
  });
}

void reduce_box(const TensorMap& map, const int32_t* coordinates, const uint8_t* shared_base, uint32_t address,
                Reduction reduction) {
  for_each_run(map, coordinates, [&](const BoxRun& run) {
    if (run.fill) return;
    uint8_t* destination = reinterpret_cast<uint8_t*>(run.global);
    const uint32_t width = static_cast<uint32_t>(bits_of(map.type)) / 8;
    for_each_piece(address + run.shared, run.bytes, map.swizzle, [&](uint32_t physical, uint32_t offset, uint32_t bytes) {
      reduce_span(map.type, reduction, destination + offset, shared_base + physical, static_cast<int>(bytes / width));
    });
  });
}

namespace {

template <typename T>
T combined(Reduction reduction, T old, T value) {
  switch (reduction) {
    case Reduction::kAdd: return static_cast<T>(old + value);
    case Reduction::kMin: return old < value ? old : value;
    case Reduction::kMax: return old > value ? old : value;
    case Reduction::kInc: return old >= value ? T(0) : static_cast<T>(old + 1);
    case Reduction::kDec: return old == 0 || old > value ? value : static_cast<T>(old - 1);
    case Reduction::kAnd: return static_cast<T>(static_cast<uint64_t>(old) & static_cast<uint64_t>(value));
    case Reduction::kOr: return static_cast<T>(static_cast<uint64_t>(old) | static_cast<uint64_t>(value));
    case Reduction::kXor: return static_cast<T>(static_cast<uint64_t>(old) ^ static_cast<uint64_t>(value));
  }
  return old;
}

template <typename T, typename Combine>
void for_each_element(uint8_t* destination, const uint8_t* source, int count, Combine&& combine) {
  for (int i = 0; i < count; ++i) {
    T old, value;
    std::memcpy(&old, destination + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    std::memcpy(&value, source + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    const T result = combine(old, value);
    std::memcpy(destination + static_cast<size_t>(i) * sizeof(T), &result, sizeof(T));
  }
}

}  // namespace

void reduce_span(TensorType type, Reduction reduction, uint8_t* destination, const uint8_t* source, int count) {
  const auto integers = [&](auto zero) {
    using T = decltype(zero);
    for_each_element<T>(destination, source, count, [&](T a, T b) { return combined<T>(reduction, a, b); });
  };
  switch (type) {
    case TensorType::kU8: integers(uint8_t{}); return;
    case TensorType::kU16: integers(uint16_t{}); return;
    case TensorType::kU32: integers(uint32_t{}); return;
    case TensorType::kS32:
      // Signed addition wraps like the unsigned one.
      if (reduction == Reduction::kAdd) integers(uint32_t{});
      else integers(int32_t{});
      return;
    case TensorType::kU64: integers(uint64_t{}); return;
    case TensorType::kS64:
      if (reduction == Reduction::kAdd) integers(uint64_t{});
      else integers(int64_t{});
      return;
    case TensorType::kF64:
      for_each_element<double>(destination, source, count, [](double a, double b) { return a + b; });
      return;
    case TensorType::kF16:
    case TensorType::kBF16: {
      const Format format = type == TensorType::kF16 ? Format::kF16 : Format::kBF16;
      for_each_element<uint16_t>(destination, source, count, [&](uint16_t a, uint16_t b) {
        const uint32_t r = reduction == Reduction::kMin   ? min_packed(format, a, b)
                           : reduction == Reduction::kMax ? max_packed(format, a, b)
                                                          : add_packed(format, a, b);
        return static_cast<uint16_t>(r);
      });
      return;
    }
    default:  // the f32 kinds
      if (reduction == Reduction::kAdd) {
        for_each_element<float>(destination, source, count, [](float a, float b) { return a + b; });
      } else {
        for_each_element<float>(destination, source, count, [&](float a, float b) {
          return reduction == Reduction::kMin ? min_f32(a, b) : max_f32(a, b);
        });
      }
      return;
  }
}

}  // namespace emulator
