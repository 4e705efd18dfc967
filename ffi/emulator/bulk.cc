// Targets, completion and checks of asynchronous copies. See bulk.h.
#include "bulk.h"

#include "tensor_core.h"

namespace emulator {

SharedPlace shared_place(Cta& cta, uint32_t address, uint32_t bytes) { return locate_shared(cta.warps[0], address, bytes, false); }

std::vector<CopyTarget> copy_targets(Warp& w, uint32_t address, uint32_t bytes, uint32_t barrier, bool remote, uint32_t mask,
                                     bool multicast, int cta_group) {
  std::vector<CopyTarget> targets;
  if (!multicast) {
    SharedPlace place = locate_shared(w, address, bytes, remote);
    SharedPlace signal = locate_shared(w, barrier, 8, remote || cta_group == 2);
    if (cta_group == 1 && place.cta != signal.cta) {
      throw Fault(format("the mbarrier 0x%x is not in the CTA of the destination 0x%x", barrier, address));
    }
    targets.push_back({place, signal});
  } else {
    Cluster& cluster = cluster_of(w);
    mask &= 0xffff;
    if (mask == 0 || mask >> cluster.ctas.size()) throw Fault(format("multicast to CTAs 0x%x of a cluster of %zu", mask, cluster.ctas.size()));
    uint32_t offset = address & 0xffffff, barrier_offset = barrier & 0xffffff, parity = barrier >> 24 & 1;
    for_lanes(mask, [&](int rank) {
      uint32_t signal = cta_group == 2 ? (static_cast<uint32_t>(rank) & ~1u) | parity : static_cast<uint32_t>(rank);
      targets.push_back({locate_remote(cluster, static_cast<uint32_t>(rank) << 24 | offset, bytes),
                         locate_remote(cluster, signal << 24 | barrier_offset, 8)});
    });
  }
  for (const CopyTarget& target : targets) find_mbarrier(target.barrier);
  return targets;
}

std::shared_ptr<BulkGroup> open_small_group(Warp& w, int lane) {
  LaneBulk& bulk = lane_bulk(w, lane);
  if (!bulk.small_open) bulk.small_open = std::make_shared<BulkGroup>();
  return bulk.small_open;
}

void check_box(Grid& grid, const TensorMap& map, const int32_t* coordinates, bool write) {
  if (grid.regions.empty()) return;
  uint64_t extent = (map.sizes[0] * bits_of(map.type) + 7) / 8;
  for (int i = 1; i < map.rank; ++i) extent += (map.sizes[i] - 1) * map.strides[i];
  for (const Region& region : grid.regions) {
    uint64_t base = reinterpret_cast<uint64_t>(region.base);
    if (map.base >= base && map.base + extent <= base + region.bytes && (!write || region.writable)) return;
  }
  for_each_run(map, coordinates, [&](const BoxRun& run) {
    if (!run.fill) check_global(grid, run.global, (run.bytes * bits_of(map.type) + shared_bits_of(map.type) - 1) / shared_bits_of(map.type), write);
  });
}

namespace {

// True when the swizzled box fills exactly the bytes place ... place + bytes.
bool is_contiguous(const TensorMap& map, const SharedPlace& place, uint32_t bytes) {
  uint32_t atom = map.swizzle == Swizzle::kNone ? 1 : map.swizzle == Swizzle::k32 ? 256 : map.swizzle == Swizzle::k64 ? 512 : 1024;
  return place.offset % atom == 0 && bytes % atom == 0;
}

template <class Visit>
void for_each_piece(const TensorMap& map, const int32_t* coordinates, const SharedPlace& place, bool with_fill, Visit&& visit) {
  for_each_run(map, coordinates, [&](const BoxRun& run) {
    if (run.fill && !with_fill) return;
    for (uint32_t i = 0; i < run.bytes;) {
      uint32_t logical = place.offset + run.shared + i;
      uint32_t length = std::min(run.bytes - i, 16 - logical % 16);
      visit(SharedPlace{place.cta, apply_swizzle(logical, map.swizzle)}, length);
      i += length;
    }
  });
}

}  // namespace

void mark_box(const Agent& agent, const TensorMap& map, const int32_t* coordinates, const SharedPlace& place) {
  uint32_t bytes = map.box_bytes();
  auto mark = [&](const SharedPlace& piece, uint32_t length) {
    mark_written(piece, length);
    note_write(agent, piece, length);
  };
  if (is_contiguous(map, place, bytes)) mark(place, bytes);
  else for_each_piece(map, coordinates, place, true, mark);
}

void require_box(const Agent& agent, const TensorMap& map, const int32_t* coordinates, const SharedPlace& place) {
  uint32_t bytes = map.box_bytes();
  auto require = [&](const SharedPlace& piece, uint32_t length) {
    require_written(piece, length);
    note_read(agent, piece, length);
  };
  if (is_contiguous(map, place, bytes) && all_bytes_are(place.state(), bytes, kWritten)) require(place, bytes);
  else for_each_piece(map, coordinates, place, false, require);  // parts outside the tensor need not be written
}

Agent start_agent(Warp& w, const Instruction& in, int lane, Races::Proxy proxy) {
  Races* races = races_of(w);
  return {&cluster_of(w), races ? races->start_copy(w, in, 1u << lane) : 0, &in, proxy};
}
void note_read(const Agent& agent, const SharedPlace& place, uint32_t bytes) {
  if (Races* races = agent.races()) races->read(agent.number, *place.cta, place.offset, bytes, agent.proxy, agent.in);
}
void note_write(const Agent& agent, const SharedPlace& place, uint32_t bytes) {
  if (Races* races = agent.races()) races->write(agent.number, *place.cta, place.offset, bytes, agent.proxy, agent.in);
}
void release_agent(const Agent& agent, const SharedPlace& barrier) {
  Races* races = agent.races();
  if (!races) return;
  races->use_barrier(agent.number, *barrier.cta, barrier.offset, agent.proxy, agent.in);
  races->barrier_clock(*barrier.cta, barrier.offset).join(races->clock(agent.number));
}
void complete_copy(const Agent& agent, const SharedPlace& barrier, uint32_t bytes) {
  release_agent(agent, barrier);
  mbarrier_complete(barrier, bytes);
}

namespace {
void release_to(const Agent& agent, BulkGroup& group) {
  Races* races = agent.races();
  if (!races) return;
  if (!group.clock) group.clock = std::make_unique<Clock>();
  group.clock->join(races->clock(agent.number));
}
}  // namespace

void finish_reading(const Agent& agent, BulkGroup& group) {
  --group.reading;
  ++agent.cluster->progress;
  release_to(agent, group);
}
void finish_group(const Agent& agent, BulkGroup& group) {
  --group.pending;
  ++agent.cluster->progress;
  release_to(agent, group);
}
void acquire_group(Warp& w, BulkGroup& group) {
  if (Races* races = races_of(w); races && group.clock) races->acquire(w, *group.clock);
}
void arrive_after(const Agent& agent, const std::vector<std::shared_ptr<BulkGroup>>& groups, const SharedPlace& barrier) {
  if (Races* races = agent.races()) {
    for (auto& group : groups) if (group->clock) races->clock(agent.number).join(*group->clock);
  }
  release_agent(agent, barrier);
  mbarrier_arrive(barrier, 1);
}

// ---- the start and the end of CTAs -------------------------------------------------------------------------------------------

void start_engines(Cta& cta) {
  cta.warpgroups.resize((cta.warps.size() + 3) / 4);
  for (size_t g = 0; g < cta.warpgroups.size(); ++g) {
    cta.warpgroups[g] = std::make_unique<WarpgroupQueue>();
    for (size_t i = 0; i < 4 && 4 * g + i < cta.warps.size(); ++i) cta.warpgroups[g]->warps[i] = &cta.warps[4 * g + i];
  }
  if (cta.cluster->grid->program->uses_tensor_memory) cta.tensor = std::make_shared<TensorCore>(cta);
}

void check_cta_exit(Warp& last) {
  Cta& cta = *last.cta;
  if (Races* races = races_of(last); races && cta.cluster->grid->request->options.strict_exit) {
    races->exit(last, &last.program->code[last.pc ? last.pc - 1 : 0]);
  }
  if (cta.tensor && !cta.tensor->allocations.empty()) {
    const TensorCore::Allocation& a = cta.tensor->allocations[0];
    throw Fault(format("the CTA exits without having freed tensor memory columns %u..%u", a.column, a.column + a.columns - 1));
  }
  if (!cta.cluster->grid->request->options.strict_exit) return;
  for (uint32_t id = 0; id < 16; ++id) {
    const NamedBarrier& b = cta.barriers[id];
    if (b.in_use) throw Fault(format("the CTA exits while barrier %u waits: %u of %u threads have arrived", id, b.arrived, b.expected));
  }
}

void check_warp_exit(Warp& w) {
  if (grid_of(w).request->options.strict_exit) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!w.bulk[lane]) continue;
      if (w.bulk[lane]->open) throw Fault(format("warp %u exits with bulk copies that lane %d never committed", w.index, lane));
      for (auto& group : w.bulk[lane]->committed) {
        if (group->used && !group->acknowledged) {
          throw Fault(format("warp %u exits before its bulk copies have read shared memory (lane %d never waited for a group)",
                             w.index, lane));
        }
      }
    }
  }
  for (auto& queue : w.cta->warpgroups) {
    if (queue && queue->warps[w.index % 4] == &w && queue->issued[w.index % 4] > queue->completed && !queue->operations.empty()) {
      throw Fault(format("warp %u exits with wgmma in flight", w.index));
    }
  }
}

void finish_cluster(Cluster& cluster) {
  cluster.drain();
  if (!cluster.pending.empty()) throw Fault("the cluster ended with operations that can never run: " + cluster.pending[0]->describe());
}

}  // namespace emulator
