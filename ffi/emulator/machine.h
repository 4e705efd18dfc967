// The machine: warps, CTAs, clusters and the grid, with their memories.
//
// PTX ISA: "Programming Model" (CTAs, clusters, grids), "PTX Machine Model", "State Spaces", "Special Registers". A warp is
// a set of groups of lanes, each at a program counter of its own; the group with the lowest counter that can run runs, and
// groups merge when their counters meet. All warps of a cluster run on one host thread, so nothing below needs a lock
// except global memory; clusters run on several host threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "mbarrier.h"
#include "program.h"
#include "races.h"
#include "register_watch.h"

namespace emulator {

struct Cta;
struct Cluster;
struct Grid;
class WarpgroupQueue;
class TensorCore;
struct TensorRequest;

// ---- what a caller asks for ------------------------------------------------------------------------------------------

struct Region {
  std::string name;
  uint8_t* base;
  size_t bytes;
  bool writable;
};

struct Options {
  uint64_t seed = 0;             // 0: the deterministic schedule; else an adversarial one
  int host_threads = 0;          // 0: as many as the machine has (one if the order of CTAs could change results)
  bool check_races = false;
  bool tensor_fences = true;     // the race check wants tcgen05.fence where threads hand over tensor memory
  bool strict_exit = true;       // a CTA that ends with bulk operations in flight is an error
  uint64_t instruction_limit = 0;  // warp instructions of one cluster; 0: none
  uint64_t idle_limit = 4'000'000;  // warp instructions without visible progress that count as a livelock
  int num_sms = 132;             // of the pretended device: clusters resident at once, %nsmid
  uint32_t registers = 0;        // per thread at launch (setmaxnreg accounting); 0: what fits
  bool eager_tensor_loads = false;  // a tcgen05.ld is complete at once, even when a seed would delay it to its wait
  bool trace = false;
};

struct LaunchRequest {
  uint32_t grid[3] = {1, 1, 1}, cluster[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;
  const uint8_t* parameters = nullptr;  // laid out as Program::parameters says
  std::vector<Region> regions;          // global memory the kernel may touch; empty: anything
  Options options;
};

struct LaunchResult {
  std::string error;        // empty: success
  std::string trace;        // JSON when asked for
  uint64_t instructions = 0;  // warp instructions
  double seconds = 0;
};

LaunchResult launch(const Program& program, const LaunchRequest& request);

// ---- waiting -----------------------------------------------------------------------------------------------------------

// Why a group of lanes does not run. `ready` is asked until it says yes; `describe` fills the deadlock table.
struct Wait {
  bool (*ready)(Warp&, const Wait&) = nullptr;
  std::string (*describe)(Warp&, const Wait&) = nullptr;
  uint64_t x = 0, y = 0, z = 0;
  bool can_time_out = false;  // a try_wait may give up
  void (*resumed)(Warp&, const Wait&) = nullptr;  // once, when the wait is over
};

struct Group {
  uint32_t pc = 0;
  uint32_t mask = 0;
  Wait wait;          // ready == null: runnable
  bool timed_out = false;
};

// ---- a warp ------------------------------------------------------------------------------------------------------------

// cp.async.bulk groups are counted for each thread. A group is done reading, then done.
struct BulkGroup {
  int reading = 0, pending = 0;
  bool used = false;          // it holds operations
  bool acknowledged = false;  // its thread has waited for it, at least until it was read
  std::unique_ptr<Clock> clock;  // what its operations hand on, for the race check
};
struct LaneBulk {
  std::shared_ptr<BulkGroup> open;
  std::deque<std::shared_ptr<BulkGroup>> committed;
  std::shared_ptr<BulkGroup> small_open;  // cp.async
  std::deque<std::shared_ptr<BulkGroup>> small_committed;
};

struct Warp {
  uint8_t* base[2] = {nullptr, nullptr};  // register file, constant pool
  const Program* program = nullptr;
  Cta* cta = nullptr;
  uint32_t index = 0;   // in the CTA
  uint32_t live = 0;    // lanes that have not exited

  // The running group; the others wait or have not been chosen.
  uint32_t pc = 0;
  uint32_t mask = 0;
  bool event = false;      // the handler changed groups, blocked, yielded or ended lanes
  bool blocked = false;    // with event: `wait` says why
  bool yield = false;      // with event: let others run
  bool timed_out = false;  // the try_wait that is executed again must answer false
  Wait wait;
  std::vector<Group> others;

  std::vector<uint8_t> storage;
  std::vector<uint8_t> local;
  std::vector<std::unique_ptr<LaneBulk>> bulk;  // per lane, on first use
  uint32_t carry[kLanes] = {};                  // CC.CF of the extended-precision instructions
  uint32_t registers = 0;                       // setmaxnreg
  std::shared_ptr<TensorRequest> tensor_request;  // the last tcgen05.alloc
  int tensor_loads = 0, tensor_stores = 0;        // tcgen05.ld and .st in flight
  uint64_t cluster_arrivals = 0, cluster_waits = 0;  // barrier.cluster
  bool barrier_result_ready = false;            // bar.red waits, then executes again to read its result
  uint64_t executed = 0;
  std::vector<uint64_t> counts;                 // per instruction, when tracing
  std::unique_ptr<RegisterWatch> watch;         // when races are checked
  uint32_t tensor_lane_base() const { return (index % 4) * 32; }

  bool done() const { return live == 0; }
  void block(Wait reason, bool again) {
    wait = reason;
    event = blocked = true;
    if (again) --pc;
  }
  void give_way() { event = yield = true; }
  void branch(uint32_t taken, uint32_t target);  // lanes of `taken` go to target, the rest of the group on
};

template <class T>
inline T* row(Warp& w, Slot slot) {
  return reinterpret_cast<T*>(w.base[slot >> 31] + (slot & kNoSlot));
}
inline uint32_t& predicate(Warp& w, Slot slot) { return *row<uint32_t>(w, slot); }
inline uint32_t read_predicate(Warp& w, Slot slot) {
  return predicate(w, slot) ^ (slot & kNegatedBit ? kFullMask : 0u);
}
inline void write_predicate(Warp& w, Slot slot, uint32_t value, uint32_t mask) {
  if (slot == kNoSlot) return;
  uint32_t& p = predicate(w, slot);
  p = (p & ~mask) | (value & mask);
}

template <class Visit>
inline void for_lanes(uint32_t mask, Visit&& visit) {
  while (mask) {
    int lane = __builtin_ctz(mask);
    mask &= mask - 1;
    visit(lane);
  }
}
inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }

// ---- a CTA -------------------------------------------------------------------------------------------------------------

struct NamedBarrier {
  uint32_t expected = 0;    // threads; 0: all of the CTA
  uint32_t arrived = 0;     // threads
  uint32_t warps = 0;       // bit of each that has arrived
  uint64_t generation = 0;
  bool in_use = false;
  uint32_t reduce_and = kFullMask, reduce_or = 0, reduce_count = 0;  // bar.red
  uint32_t result_and = 0, result_or = 0, result_count = 0;
};

enum : uint8_t { kUnwritten = 0, kWritten = 1, kBarrierObject = 2 };  // state of a shared byte

struct Counters {
  uint64_t global_read = 0, global_written = 0, shared_read = 0, shared_written = 0;
  uint64_t tma_loaded = 0, tma_stored = 0, bulk_copied = 0, tensor_read = 0, tensor_written = 0;
  uint64_t wgmma = 0, tensor_mma = 0, mma_flop = 0;
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;            // in the cluster
  uint32_t id[3] = {0, 0, 0};
  uint32_t shared_base = 0;     // rank << 24
  uint32_t shared_end = 0;      // exclusive, relative to shared_base
  uint32_t threads = 0;
  std::vector<uint8_t> shared, shared_state;  // from address 0 of the window
  std::unordered_map<uint32_t, Mbarrier> mbarriers;  // by offset in the window
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::vector<std::unique_ptr<WarpgroupQueue>> warpgroups;
  std::shared_ptr<TensorCore> tensor;
  uint32_t free_registers = 0;
  uint32_t live_warps = 0;
  Counters counters;
  Cta();
  ~Cta();
  std::string name() const;
};

// ---- asynchronous operations ---------------------------------------------------------------------------------------------

// A copy or a product in flight. Its steps happen at times that the scheduler chooses: at once by default, at random
// moments under a seed. Each step is one thing that the rest of the machine can tell apart (operands read, result
// written, completion signalled).
class Asynchronous {
 public:
  virtual ~Asynchronous() = default;
  virtual bool ready() const { return true; }  // false while an earlier operation of its pipe must go first
  virtual bool step() = 0;                     // true: finished
  virtual std::string describe() const = 0;
};

struct Cluster {
  Grid* grid = nullptr;
  uint32_t id[3] = {0, 0, 0};
  std::vector<std::unique_ptr<Cta>> ctas;
  std::deque<std::unique_ptr<Asynchronous>> pending;
  uint64_t random_state = 0;
  bool adversarial = false;
  uint64_t progress = 0;      // bumped whenever something happens that a waiting warp could notice
  uint64_t instructions = 0;
  // barrier.cluster
  uint64_t barrier_phase = 0;
  std::unique_ptr<Races> races;
  Cluster();
  ~Cluster();
  void submit(std::unique_ptr<Asynchronous> operation);
  void drain();  // run every pending step that is ready
  uint64_t random();
  uint32_t live_warps() const;
};

struct Grid {
  const Program* program = nullptr;
  const LaunchRequest* request = nullptr;
  std::vector<uint8_t> parameters;
  std::vector<Region> regions;  // sorted
  uint32_t clusters[3] = {1, 1, 1};
  uint64_t total_clusters = 1;
  std::atomic<uint64_t> next_cluster{0};
  uint8_t* parameter_base = nullptr;  // in `parameters`, aligned
};

inline Cluster& cluster_of(Warp& w) { return *w.cta->cluster; }
inline Races* races_of(Warp& w) { return w.cta->cluster->races.get(); }
inline Grid& grid_of(Warp& w) { return *w.cta->cluster->grid; }
inline void note_progress(Warp& w) { ++w.cta->cluster->progress; }

}  // namespace emulator
