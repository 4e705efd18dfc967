// Iteration over the box of a tensor map (the templates that tensor_map.h declares).
//
// PTX ISA: "Tiled Mode", "Bounding Box", "Traversal Stride", "Out of Boundary Access".
#pragma once

#include "tensor_map.h"

namespace emulator {

template <typename Visit>
void for_each_run(const TensorMap& map, const int32_t* coordinates, Visit&& visit) {
  const int bits = bits_of(map.type), shared_bits = shared_bits_of(map.type);
  const uint32_t row_elements = map.box[0];
  const uint32_t row_bytes = row_elements * static_cast<uint32_t>(shared_bits) / 8;
  // The traversal stride applies to every dimension but the innermost.
  uint32_t counts[5] = {1, 1, 1, 1, 1};
  for (int d = 1; d < map.rank; ++d) counts[d] = (map.box[d] + map.element_strides[d] - 1) / map.element_strides[d];

  // Part of a row that exists, in elements from its start.
  const int64_t x = coordinates[0], size = static_cast<int64_t>(map.sizes[0]);
  const int64_t first = x < 0 ? (-x < row_elements ? -x : row_elements) : 0;
  const int64_t last_raw = size - x < row_elements ? size - x : static_cast<int64_t>(row_elements);
  const int64_t last = last_raw < first ? first : last_raw;

  uint32_t index[5] = {0, 0, 0, 0, 0};
  uint32_t shared = 0;
  while (true) {
    bool inside = true;
    uint64_t base = map.base;
    for (int d = 1; d < map.rank; ++d) {
      const int64_t position = coordinates[d] + static_cast<int64_t>(index[d]) * map.element_strides[d];
      inside &= position >= 0 && position < static_cast<int64_t>(map.sizes[d]);
      base += static_cast<uint64_t>(position) * map.strides[d];
    }
    if (!inside || first == last) {
      visit(BoxRun{0, shared, row_bytes, true});
    } else if (bits == shared_bits) {
      const auto bytes = [bits](int64_t elements) { return static_cast<uint32_t>(elements * bits / 8); };
      if (first > 0) visit(BoxRun{0, shared, bytes(first), true});
      visit(BoxRun{base + static_cast<uint64_t>((x + first) * bits / 8), shared + bytes(first), bytes(last - first), false});
      if (last < row_elements) visit(BoxRun{0, shared + bytes(last), row_bytes - bytes(last), true});
    } else {
      // Unpacked types: 16 elements fill the start of 16 bytes. Sizes and coordinates are multiples of 16 here.
      for (uint32_t e = 0; e < row_elements; e += 16) {
        const bool fill = e < first || e >= last;
        const uint64_t global = base + static_cast<uint64_t>((x + e) * bits / 8);
        visit(BoxRun{fill ? 0 : global, shared + e, static_cast<uint32_t>(2 * bits), fill});
      }
    }
    shared += row_bytes;
    int d = 1;
    while (d < map.rank && ++index[d] == counts[d]) index[d++] = 0;
    if (d >= map.rank) return;
  }
}

template <typename Visit>
void for_each_piece(uint32_t address, uint32_t bytes, Swizzle swizzle, Visit&& visit) {
  if (swizzle == Swizzle::kNone) {
    visit(address, 0u, bytes);
    return;
  }
  const uint32_t unit = swizzle == Swizzle::k128Atom32Flip8 ? 8 : 16;
  for (uint32_t done = 0; done < bytes;) {
    const uint32_t to_boundary = unit - (address + done) % unit;
    const uint32_t count = bytes - done < to_boundary ? bytes - done : to_boundary;
    visit(apply_swizzle(address + done, swizzle), done, count);
    done += count;
  }
}

}  // namespace emulator
