// Address spaces and their checks. See memory.h.
#include "memory.h"

#include <algorithm>

namespace emulator {

void fail_shared(Warp& w, uint32_t address, uint32_t bytes, const char* what) {
  throw Fault(format("shared address 0x%x (%u bytes) %s, which is 0x%x..0x%x", address, bytes, what,
                     w.cta->shared_base + kSharedBase, w.cta->shared_base + w.cta->shared_end));
}

SharedPlace locate_remote(Cluster& cluster, uint32_t address, uint32_t bytes) {
  uint32_t rank = address >> 24, offset = address & 0xffffff;
  if (rank >= cluster.ctas.size()) {
    throw Fault(format("shared::cluster address 0x%x names rank %u of a cluster of %zu", address, rank, cluster.ctas.size()));
  }
  Cta& cta = *cluster.ctas[rank];
  if (offset < kSharedBase || offset + bytes > cta.shared_end) {
    throw Fault(format("shared::cluster address 0x%x (%u bytes) is outside the shared memory of rank %u, which is 0x%x..0x%x",
                       address, bytes, rank, cta.shared_base + kSharedBase, cta.shared_base + cta.shared_end));
  }
  if (cta.live_warps == 0) {
    throw Fault(format("shared::cluster address 0x%x: the CTA of rank %u has already exited", address, rank));
  }
  return {&cta, offset};
}

void fail_state(const SharedPlace& place, uint32_t bytes, bool write) {
  for (uint32_t i = 0; i < bytes; ++i) {
    if (place.state()[i] == kBarrierObject) {
      throw Fault(format("%s of the mbarrier object at shared address 0x%x by an ordinary access (mbarrier.inval it first)",
                         write ? "overwrite" : "read", place.cta->shared_base + ((place.offset + i) & ~7u)));
    }
    if (place.state()[i] == kUnwritten) {
      throw Fault(format("read of shared address 0x%x (rank %u), which nothing has written", place.cta->shared_base + place.offset + i,
                         place.cta->rank));
    }
  }
  throw Fault("inconsistent shared memory state");
}

uint8_t* check_global(Grid& grid, uint64_t address, uint64_t bytes, bool write) {
  uint8_t* host = reinterpret_cast<uint8_t*>(address);
  if (grid.regions.empty()) return host;
  auto after = std::upper_bound(grid.regions.begin(), grid.regions.end(), host,
                                [](const uint8_t* p, const Region& r) { return p < r.base; });
  if (after != grid.regions.begin()) {
    const Region& region = *(after - 1);
    if (host + bytes <= region.base + region.bytes) {
      if (write && !region.writable) {
        throw Fault(format("write to '%s', which is read-only, at byte %zu", region.name.c_str(),
                           static_cast<size_t>(host - region.base)));
      }
      return host;
    }
    throw Fault(format("global %s of %llu bytes at %p is out of bounds: %lld bytes after the start of '%s' of %zu bytes",
                       write ? "write" : "read", static_cast<unsigned long long>(bytes), static_cast<void*>(host),
                       static_cast<long long>(host - region.base), region.name.c_str(), region.bytes));
  }
  throw Fault(format("global %s of %llu bytes at %p lies in no buffer of the launch", write ? "write" : "read",
                     static_cast<unsigned long long>(bytes), static_cast<void*>(host)));
}

uint8_t* local_pointer(Warp& w, int lane, uint64_t address, uint32_t bytes) {
  uint64_t offset = address >= kLocalWindow ? address - kLocalWindow : address;
  uint64_t size = w.program->local_bytes;
  if (offset + bytes > size) throw Fault(format("local address 0x%llx is out of bounds", static_cast<unsigned long long>(offset)));
  return w.local.data() + lane * size + offset;
}

std::mutex& global_atomics() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace emulator
