// Address spaces: from an address in a register to a place in host memory, with its checks.
//
// PTX ISA: "State Spaces", "Generic Addressing". A global or parameter address is a host address. A shared address is an
// offset in the CTA's window with the CTA's rank in the cluster from bit 24 up (what `mapa` replaces); as a generic address
// it lies in kSharedWindow. Local memory is per lane.
#pragma once

#include <cstring>
#include <mutex>

#include "machine.h"

namespace emulator {

constexpr uint64_t kSharedWindow = uint64_t{1} << 56;
constexpr uint64_t kLocalWindow = uint64_t{1} << 57;

struct SharedPlace {
  Cta* cta;
  uint32_t offset;
  uint8_t* host() const { return cta->shared.data() + offset; }
  uint8_t* state() const { return cta->shared_state.data() + offset; }
};

[[noreturn]] void fail_shared(Warp& w, uint32_t address, uint32_t bytes, const char* what);
SharedPlace locate_remote(Cluster& cluster, uint32_t address, uint32_t bytes);

// A shared::cta address (or, with `cluster`, a shared::cluster one).
inline SharedPlace locate_shared(Warp& w, uint32_t address, uint32_t bytes, bool cluster) {
  uint32_t offset = address - w.cta->shared_base;
  if (offset >= kSharedBase && offset + bytes <= w.cta->shared_end && offset < w.cta->shared_end) return {w.cta, offset};
  if (!cluster) fail_shared(w, address, bytes, "is outside the CTA's shared memory");
  return locate_remote(cluster_of(w), address, bytes);
}

// Throws unless every byte was written and none belongs to an mbarrier.
[[noreturn]] void fail_state(const SharedPlace& place, uint32_t bytes, bool write);
inline bool all_bytes_are(const uint8_t* state, uint32_t bytes, uint8_t value) {
  uint64_t pattern = 0x0101010101010101u * value;
  uint32_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, state + i, 8);
    if (word != pattern) return false;
  }
  for (; i < bytes; ++i) if (state[i] != value) return false;
  return true;
}
inline void require_written(const SharedPlace& place, uint32_t bytes) {
  if (!all_bytes_are(place.state(), bytes, kWritten)) fail_state(place, bytes, false);
}
inline void mark_written(const SharedPlace& place, uint32_t bytes) {
  uint8_t* state = place.state();
  uint8_t seen = 0;
  for (uint32_t i = 0; i < bytes; ++i) seen |= state[i];
  if (seen & kBarrierObject) fail_state(place, bytes, true);
  std::memset(state, kWritten, bytes);
}

// Global memory: the caller's buffers and the kernel's parameters.
uint8_t* check_global(Grid& grid, uint64_t address, uint64_t bytes, bool write);
uint8_t* local_pointer(Warp& w, int lane, uint64_t address, uint32_t bytes);

// Serialises read-modify-write on global memory between host threads.
std::mutex& global_atomics();

}  // namespace emulator
