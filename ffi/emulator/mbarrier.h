// mbarrier objects.
//
// PTX ISA: "Parallel Synchronization and Communication Instructions: mbarrier". The 64-bit object in shared memory is
// opaque to programs, so the machine keeps its state beside the memory and marks the eight bytes as not to be touched.
// A phase ends when no arrivals and no transaction bytes are pending; bytes may be completed before they are expected.
#pragma once

#include <cstdint>

namespace emulator {

struct Cluster;
struct SharedPlace;

struct Mbarrier {
  uint32_t expected = 0;    // arrivals of the next phase
  uint32_t pending = 0;     // arrivals still missing in this phase
  int64_t bytes = 0;        // transaction count
  uint64_t phase = 0;       // completed phases
  uint32_t clock = 0;       // identity for the race detector
};

constexpr uint32_t kMbarrierMaxCount = (1u << 20) - 1;
constexpr int64_t kMbarrierMaxBytes = (1 << 20) - 1;

// Throws Fault when there is no object at the place.
Mbarrier& find_mbarrier(const SharedPlace& place);
// Operations of the asynchronous engines; a phase that becomes complete ends at once.
void mbarrier_arrive(const SharedPlace& place, uint32_t count);
void mbarrier_expect(const SharedPlace& place, int64_t bytes);
void mbarrier_complete(const SharedPlace& place, int64_t bytes);

}  // namespace emulator
