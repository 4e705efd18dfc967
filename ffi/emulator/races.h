// Happens-before race detector for shared, distributed shared and tensor memory.
//
// PTX ISA: "Memory Consistency Model" (causality order, proxies), "Asynchronous Operations", "Async Proxy", the tcgen05 "Memory
// Consistency Model". Who acts - a warp, its stream of tcgen05 loads, of tcgen05 stores, its tensor pipe, the wgmma pipe of a
// warpgroup, each copy in flight - is an agent with a vector clock; barriers, mbarriers, groups and commits hand clocks on.
// Every cell of memory remembers its last write and the reads since. An access that does not know of a conflicting one is an
// error even when the values came out right.
//
// Three clocks travel together. `order`: what happened before. `proxy`: the generic accesses of those that a proxy fence has
// passed, which is what the asynchronous proxy may rely on. `init`: the mbarrier initialisations that fence.mbarrier_init (or a
// proxy fence) has passed.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulator {

struct Cluster;
struct Cta;
struct Warp;
struct Instruction;
struct SharedPlace;

struct Clock {
  std::vector<uint32_t> order, proxy, init;
  void join(const Clock& other);
  void meet(const Clock& other);  // keeps what both know
};

class Races {
 public:
  Races(Cluster& cluster, bool tensor_fences);

  // ---- agents. Numbers below agents_of_warps belong to warps, the rest to copies.
  uint32_t thread(const Warp& w) const;
  uint32_t loads(const Warp& w) const { return thread(w) + 1; }
  uint32_t stores(const Warp& w) const { return thread(w) + 2; }
  uint32_t pipe(const Warp& w) const { return thread(w) + 3; }
  uint32_t wgmma(const Warp& leader) const { return thread(leader) + 4; }
  Clock& clock(uint32_t agent) { return agents_[agent].clock; }
  // An agent for a copy; it knows what the issuing lane knows.
  uint32_t start_copy(Warp& w, const Instruction& in, uint32_t lanes);
  // What an asynchronous instruction may rely on when it is issued. `tensor`: in tensor memory, if tcgen05.fence matters.
  struct View {
    Clock clock, tensor;
  };
  View view(Warp& w);
  // A new epoch of a stream, which from now on knows `begin` too.
  void advance(uint32_t agent, const View& begin);

  // ---- lanes. They run together here, but what some did in shared memory the others can pass on only after bar.warp.sync
  // or a CTA barrier. (That one lane's wait is the others' too is taken for granted.)
  void touch(Warp& w, uint32_t lanes);  // they have accessed shared memory
  void sync_lanes(Warp& w);

  // ---- hand-over
  void release(Warp& w, Clock& to, uint32_t lanes = ~0u);  // and the warp's next accesses are not covered
  void release_relaxed(Warp& w, Clock& to);  // what earlier fences have released, and mbarrier initialisations
  void acquire(Warp& w, const Clock& from) { clock(thread(w)).join(from); }
  // From an mbarrier, which also hands what a warp's lanes released to it back to each of them.
  void acquire_barrier(Warp& w, const Clock& from);
  void memory_fence(Warp& w);
  void proxy_fence(Warp& w, uint32_t lanes);
  void init_fence(Warp& w);
  void before_thread_sync(Warp& w);
  void after_thread_sync(Warp& w);
  void wait_stream(Warp& w, uint32_t agent);  // tcgen05.wait

  // ---- accesses. `in`: the instruction, for the message.
  enum class Proxy : uint8_t { kGeneric, kAsync };
  void read(uint32_t agent, Cta& cta, uint32_t offset, uint32_t bytes, Proxy proxy, const Instruction* in);
  // The same when the access may rely on less than its agent knows.
  void read(uint32_t agent, const Clock& known, Cta& cta, uint32_t offset, uint32_t bytes, Proxy proxy, const Instruction* in);
  void write(uint32_t agent, Cta& cta, uint32_t offset, uint32_t bytes, Proxy proxy, const Instruction* in);
  void read_tensor(uint32_t agent, Cta& cta, int lane, int lanes, int column, int columns, const Instruction* in);
  void write_tensor(uint32_t agent, Cta& cta, int lane, int lanes, int column, int columns, const Instruction* in);
  // mbarriers: their initialisation must be known to who uses them.
  // The CTA ends and its shared memory is given away: everything in it must have happened before. `w`: the last warp.
  void exit(Warp& w, const Instruction* in);
  void init_barrier(Warp& w, Cta& cta, uint32_t offset, const Instruction* in);
  void use_barrier(uint32_t agent, Cta& cta, uint32_t offset, Proxy proxy, const Instruction* in);

  // ---- clocks of synchronisation objects
  Clock& barrier_clock(const Cta& cta, uint32_t offset);      // of an mbarrier, accumulating
  Clock& barrier_done(const Cta& cta, uint32_t offset);       // as of its last complete phase
  Clock& named(const Cta& cta, uint32_t id, uint64_t generation);
  Clock& cluster_phase(uint64_t phase);
  Clock& atomic_cell(const Cta& cta, uint32_t offset);        // release and acquire on shared memory
  // Operations of a warpgroup's wgmma pipe by their number: what each warp knew when it issued one, and what is known of
  // its completion.
  Clock& wgmma_issue(const Cta& cta, uint32_t warp, uint64_t sequence);
  Clock& wgmma_done(const Cta& cta, uint32_t warpgroup, uint64_t sequence);
  void forget_wgmma(const Cta& cta, uint32_t warpgroup, uint64_t before);

  bool tensor_fences() const { return tensor_fences_; }

 private:
  struct Access {
    uint32_t agent = 0, epoch = 0;     // epoch 0: none
    const Instruction* in = nullptr;
    Proxy proxy = Proxy::kGeneric;
  };
  struct Cell {
    Access written;
    Access reads[2];
    std::unique_ptr<std::vector<Access>> more_reads;
    Cell() = default;
    Cell(const Cell& other) { *this = other; }
    Cell& operator=(const Cell& other);
  };
  struct Chunk {  // 16 bytes of shared memory: one cell until a part of it is accessed
    Cell whole;
    std::unique_ptr<Cell[]> parts;
  };
  struct Agent {
    Clock clock;
    Clock tensor;      // what it knows of tensor memory, when tcgen05.fence matters
    Clock fenced;      // of a warp: as of its last fence.acq_rel or fence.sc
    uint32_t touched = 0;     // of a warp: lanes with accesses since the lanes last synchronised,
    uint32_t unfenced = 0;    // and since their last proxy fence
    uint32_t common = 0;      // its epoch when the lanes last synchronised
    std::string text;  // of a copy or stream: what it is
  };
  struct Memory {
    std::vector<Chunk> shared;
    std::vector<Cell> tensor;
    std::unordered_map<uint32_t, Access> barriers;  // initialisations
  };

  static uint32_t at(const std::vector<uint32_t>& clock, uint32_t agent) { return agent < clock.size() ? clock[agent] : 0; }
  uint32_t& own(uint32_t agent);
  Clock passed_on(const Warp& w, uint32_t lanes) const;  // by these lanes
  // Who accesses, and the clock that counts for this kind of memory.
  struct Actor {
    Access now;
    const Clock& clock;
    const char* space;
    uint32_t rank;
    bool exits = false;
  };
  bool knows(const Actor& actor, const Access& access, bool* fence_missing) const;
  void check_read(const Actor& actor, Cell& cell, uint32_t address);
  void check_write(const Actor& actor, Cell& cell, uint32_t address);
  template <bool kWrite>
  void access(uint32_t agent, const Clock& known, Cta& cta, uint32_t offset, uint32_t bytes, Proxy proxy, const Instruction* in);
  template <bool kWrite> void access_tensor(uint32_t agent, Cta& cta, int lane, int lanes, int column, int columns, const Instruction* in);
  [[noreturn]] void report(const Actor& actor, const Access& before, bool writes, bool wrote, bool fence_missing, uint32_t address) const;
  std::string describe(uint32_t agent) const;
  std::string line(const Instruction* in) const;
  static uint64_t key(const Cta& cta, uint64_t what);

  Cluster& cluster_;
  bool tensor_fences_;
  uint32_t warps_per_cta_;
  uint32_t first_copy_;
  std::deque<Agent> agents_;  // references stay valid while copies are added
  std::vector<Memory> memories_;
  std::unordered_map<uint64_t, Clock> objects_;
};

}  // namespace emulator
