// Tensor memory: allocation and checks. See tensor_core.h.
#include "tensor_core.h"

#include <algorithm>
#include <cstring>

namespace emulator {

bool TensorCore::is_free(uint32_t column, uint32_t columns) const {
  for (const Allocation& a : allocations) if (a.column < column + columns && column < a.column + a.columns) return false;
  return true;
}

int TensorCore::find_free(uint32_t columns, const TensorCore* peer) const {
  for (uint32_t column = 0; column + columns <= kTmemColumns; column += 32) {
    if (is_free(column, columns) && (!peer || peer->is_free(column, columns))) return static_cast<int>(column);
  }
  return -1;
}

bool TensorCore::try_allocate(TensorCore& core, TensorCore* peer, const std::shared_ptr<Request>& request) {
  if (request->done) return true;
  if (core.requests.empty() || core.requests.front() != request) return false;
  if (peer && peer->requests.empty()) return false;
  if (peer && (peer->requests.front()->columns != request->columns || !peer->requests.front()->pair)) {
    throw Fault("tcgen05.alloc: the two CTAs of a pair ask for different numbers of columns");
  }
  int column = core.find_free(request->columns, peer);
  if (column < 0) return false;
  auto finish = [&](TensorCore& c) {
    std::shared_ptr<Request> r = c.requests.front();
    c.requests.pop_front();
    c.allocations.push_back({static_cast<uint32_t>(column), r->columns, r->pair});
    uint32_t address = static_cast<uint32_t>(column);
    mark_written(r->result, 4);
    if (Races* races = races_of(*r->warp)) {
      races->write(races->thread(*r->warp), *r->result.cta, r->result.offset, 4, Races::Proxy::kGeneric, r->in);
    }
    std::memcpy(r->result.host(), &address, 4);
    r->done = true;
  };
  finish(core);
  if (peer) finish(*peer);
  ++core.cta_.cluster->progress;
  return true;
}

void TensorCore::deallocate(uint32_t column, uint32_t columns, bool pair) {
  for (size_t i = 0; i < allocations.size(); ++i) {
    const Allocation a = allocations[i];
    if (a.column != column || a.columns != columns) continue;
    if (a.pair != pair) throw Fault("tcgen05.dealloc with another cta_group than the alloc");
    allocations.erase(allocations.begin() + i);
    reserve();
    std::memset(&state_[tmem_index(0, static_cast<int>(column))], kUnwritten, size_t{columns} * kTmemLanes);
    ++cta_.cluster->progress;
    return;
  }
  throw Fault(format("tcgen05.dealloc of columns %u..%u, which are no allocation", column, column + columns));
}

void TensorCore::check(int lane, int lanes, int column, int columns, bool read) {
  bool inside = lane >= 0 && lane + lanes <= kTmemLanes && column >= 0 && column + columns <= kTmemColumns;
  if (inside) {
    // Neighbouring allocations may be used as one.
    for (int c = column; c < column + columns;) {
      int next = c;
      for (const Allocation& a : allocations) {
        if (static_cast<int>(a.column) <= c && c < static_cast<int>(a.column + a.columns)) next = static_cast<int>(a.column + a.columns);
      }
      if (next == c) { inside = false; break; }
      c = next;
    }
  }
  if (!inside) {
    throw Fault(format("tensor memory lanes %d..%d, columns %d..%d are not allocated (rank %u)", lane, lane + lanes - 1, column,
                       column + columns - 1, cta_.rank));
  }
  if (!read) return;
  reserve();
  for (int c = column; c < column + columns; ++c) {
    const uint8_t* state = &state_[tmem_index(lane, c)];
    if (all_bytes_are(state, static_cast<uint32_t>(lanes), kWritten)) continue;
    int bad = 0;
    while (state[bad] == kWritten) ++bad;
    throw Fault(format("read of tensor memory lane %d, column %d (rank %u), which nothing has written", lane + bad, c, cta_.rank));
  }
}

void TensorCore::mark(int lane, int lanes, int column, int columns) {
  reserve();
  for (int c = column; c < column + columns; ++c) std::memset(&state_[tmem_index(lane, c)], kWritten, lanes);
}

}  // namespace emulator
