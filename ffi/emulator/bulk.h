// What the kinds of asynchronous copies share: targets, completion, checks of tensor boxes.
#pragma once

#include <memory>
#include <vector>

#include "engines.h"
#include "memory.h"
#include "tensor_map.h"

namespace emulator {

// Identity of an operation in flight for the race detector.
struct Agent {
  Cluster* cluster = nullptr;
  uint32_t number = 0;
  const Instruction* in = nullptr;
  Races::Proxy proxy = Races::Proxy::kAsync;
  Races* races() const { return cluster->races.get(); }
};

// One CTA that receives a copy, and the mbarrier that hears of it.
struct CopyTarget {
  SharedPlace place;
  SharedPlace barrier;
};

// Without multicast: the two addresses as they are (shared::cluster when `remote`). With it: the same offsets in each CTA of
// the mask; with cta_group 2 the signal goes to the CTA of that pair with the parity of the mbarrier's own rank.
std::vector<CopyTarget> copy_targets(Warp& w, uint32_t address, uint32_t bytes, uint32_t barrier, bool remote, uint32_t mask,
                                     bool multicast, int cta_group);
SharedPlace shared_place(Cta& cta, uint32_t address, uint32_t bytes);

std::shared_ptr<BulkGroup> open_small_group(Warp& w, int lane);

// Global memory of the box lies in the launch's buffers.
void check_box(Grid& grid, const TensorMap& map, const int32_t* coordinates, bool write);
// Shared bytes of the box become written, or must have been.
void mark_box(const Agent& agent, const TensorMap& map, const int32_t* coordinates, const SharedPlace& place);
void require_box(const Agent& agent, const TensorMap& map, const int32_t* coordinates, const SharedPlace& place);

// Events of an operation in flight. An agent starts with all that the issuing lane knows.
Agent start_agent(Warp& w, const Instruction& in, int lane, Races::Proxy proxy = Races::Proxy::kAsync);
void note_read(const Agent& agent, const SharedPlace& place, uint32_t bytes);
void note_write(const Agent& agent, const SharedPlace& place, uint32_t bytes);
void complete_copy(const Agent& agent, const SharedPlace& barrier, uint32_t bytes);
void finish_reading(const Agent& agent, BulkGroup& group);
void finish_group(const Agent& agent, BulkGroup& group);
void release_agent(const Agent& agent, const SharedPlace& barrier);  // for an arrival on an mbarrier
void acquire_group(Warp& w, BulkGroup& group);
void arrive_after(const Agent& agent, const std::vector<std::shared_ptr<BulkGroup>>& groups, const SharedPlace& barrier);

}  // namespace emulator
