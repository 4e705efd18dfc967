// Tensor maps: the 128-byte object that describes a tiled tensor to the TMA unit.
//
// CUDA driver API `cuTensorMapEncodeTiled` (arguments and their rules), PTX ISA "Tensors", "Tiled Mode", "Swizzling
// Modes". The bit layout is the hardware's, because compilers also build maps inline without the driver.
#pragma once

#include <cstdint>

#include "descriptors.h"
#include "formats.h"

namespace emulator {

// Numbered as CUtensorMapDataType.
enum class TensorType : uint8_t {
  kU8, kU16, kU32, kS32, kU64, kS64, kF16, kF32, kF64, kBF16, kF32Ftz, kTF32, kTF32Ftz,
  k16U4Align8B, k16U4Align16B, k16U6Align16B,
};
int bits_of(TensorType type);         // bits of one element in global memory: 4, 6, 8, 16, 32, 64
// In shared memory 16U4_ALIGN16B and 16U6_ALIGN16B take 8 bits a value (16 elements in 16 bytes, the first 8 or 12 used);
// 16U4_ALIGN8B stays packed.
int shared_bits_of(TensorType type);

enum class Interleave : uint8_t { kNone, k16B, k32B };

struct alignas(64) TensorMapBits { uint64_t words[16]; };

struct TensorMap {
  uint64_t base = 0;
  TensorType type = TensorType::kU8;
  int rank = 0;
  uint64_t sizes[5] = {1, 1, 1, 1, 1};    // elements, innermost first
  uint64_t strides[5] = {0, 0, 0, 0, 0};  // bytes; strides[0] is implied by the element size
  uint32_t box[5] = {1, 1, 1, 1, 1};
  uint32_t element_strides[5] = {1, 1, 1, 1, 1};
  Interleave interleave = Interleave::kNone;
  Swizzle swizzle = Swizzle::kNone;
  int l2_promotion = 0;
  bool nan_fill = false;
  uint32_t box_bytes() const;  // bytes in shared memory, what complete_tx counts
};

// Same arguments and answers as cuTensorMapEncodeTiled: 0 (CUDA_SUCCESS), 1 (CUDA_ERROR_INVALID_VALUE), or 801
// (CUDA_ERROR_NOT_SUPPORTED) for interleaved layouts, which are not emulated. `why`, when not null, receives the broken rule.
int encode_tiled(TensorMapBits* out, int data_type, uint32_t rank, uint64_t global_address, const uint64_t* sizes,
                 const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                 int swizzle, int l2_promotion, int oob_fill, const char** why = nullptr);

// What tensormap.replace names. Ordinals: dimensions, innermost first; of strides, from that of the second dimension on.
enum class MapField : uint8_t {
  kGlobalAddress, kRank, kBoxDim, kGlobalDim, kGlobalStride, kElementStride,
  kElementType, kInterleave, kSwizzleMode, kSwizzleAtomicity, kFillMode,
};
// Gives a field of a map's 128 bytes (which may be zeros still) a value as tensormap.replace encodes it. Null, or the broken rule.
const char* replace_field(void* bytes, MapField field, int ordinal, uint64_t value);

// False if the bytes are no tiled map. Accepts maps from encode_tiled and those built inline by compilers.
bool decode_tensor_map(const void* bytes, TensorMap* map);

// A part of a box that is contiguous in global memory and, before swizzling, in shared memory: one row, or less where the
// tensor ends inside it, or 16 elements of the types that are unpacked on the way.
struct BoxRun {
  uint64_t global;   // address of the first byte; meaningless when `fill`
  uint32_t shared;   // offset from the box's shared address, before swizzling
  uint32_t bytes;    // the same on both sides
  bool fill;         // out of bounds: zeros (or NaN) in loads, skipped in stores
};

// Calls visit(const BoxRun&) for each run of the box at `coordinates` (elements, innermost first, may be negative), in
// ascending shared order.
template <typename Visit>
void for_each_run(const TensorMap& map, const int32_t* coordinates, Visit&& visit);

// Splits `bytes` at logical shared address `address` into pieces that stay contiguous under the swizzle:
// visit(physical address, offset from `address`, bytes). A piece is at most 16 bytes unless there is no swizzle.
template <typename Visit>
void for_each_piece(uint32_t address, uint32_t bytes, Swizzle swizzle, Visit&& visit);

// Copies a whole box between global and shared memory. `shared_base` is the start of the CTA's shared window in host
// memory and `address` the window-relative address of the box.
void load_box(const TensorMap& map, const int32_t* coordinates, uint8_t* shared_base, uint32_t address);
void store_box(const TensorMap& map, const int32_t* coordinates, const uint8_t* shared_base, uint32_t address);

enum class Reduction : uint8_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor };
// cp.reduce.async.bulk.tensor: combines the box into global memory with the map's element type.
void reduce_box(const TensorMap& map, const int32_t* coordinates, const uint8_t* shared_base, uint32_t address,
                Reduction reduction);
// cp.reduce.async.bulk: `count` elements of u32, s32, u64, s64, f16, bf16, f32 or f64. Not atomic: the caller serialises.
void reduce_span(TensorType type, Reduction reduction, uint8_t* destination, const uint8_t* source, int count);

}  // namespace emulator

#include "tensor_map_runs.h"
