// Running a grid: the instruction loop, divergence, the order of warps and clusters, deadlocks.
//
// PTX ISA: "Independent Thread Scheduling", "Cooperative Thread Arrays". A warp runs until it blocks or its slice ends. By
// default warps take turns in order and asynchronous operations happen at once; under a seed both are random. Clusters are
// handed to host threads in order of their index, and a cluster that only spins is set aside for others.
#include "scheduler.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "engines.h"
#include "memory.h"
#include "trace.h"

namespace emulator {

Cta::Cta() = default;
Cta::~Cta() = default;
Cluster::Cluster() = default;
Cluster::~Cluster() = default;

std::string Cta::name() const { return format("CTA (%u,%u,%u)", id[0], id[1], id[2]); }

uint64_t Cluster::random() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545f4914f6cdd1dull >> 16;
}

uint32_t Cluster::live_warps() const {
  uint32_t count = 0;
  for (auto& cta : ctas) count += cta->live_warps;
  return count;
}

void Cluster::submit(std::unique_ptr<Asynchronous> operation) {
  ++progress;
  pending.push_back(std::move(operation));
  if (!adversarial) drain();
}

void Cluster::drain() {
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t i = 0; i < pending.size(); ++i) {
      while (pending[i] && pending[i]->ready()) {
        moved = true;
        ++progress;
        if (pending[i]->step()) pending[i] = nullptr;
      }
    }
    pending.erase(std::remove(pending.begin(), pending.end(), nullptr), pending.end());
  }
}

// ---- divergence --------------------------------------------------------------------------------------------------------------

void Warp::branch(uint32_t taken, uint32_t target) {
  if (target == pc) return;
  Group group;
  group.pc = target;
  group.mask = taken;
  others.push_back(group);
  mask &= ~taken;
  event = true;
}

namespace {

uint32_t members_of(Warp& w, const Instruction& in, uint32_t mask) {
  if (in.members == kNoSlot) return w.live;
  return row<uint32_t>(w, in.members)[first_lane(mask)] & w.live;
}

bool together(Warp& w, const Wait& wait) { return (static_cast<uint32_t>(wait.x) & w.live & ~static_cast<uint32_t>(wait.y)) == 0; }
std::string together_text(Warp& w, const Wait& wait) {
  return format("lanes 0x%08x to reach the same instruction; only 0x%08x are here", static_cast<uint32_t>(wait.x) & w.live,
                static_cast<uint32_t>(wait.y));
}

// Sets the running group aside.
void park(Warp& w, const Wait& wait) {
  Group group;
  group.pc = w.pc;
  group.mask = w.mask;
  group.wait = wait;
  w.others.push_back(group);
  w.mask = 0;
}

// Chooses the runnable group with the lowest counter, other than the last one when `rotate`, and merges groups that meet.
bool choose(Warp& w, bool rotate) {
  if (w.mask) {
    if (w.others.empty()) return true;
    Wait none;
    park(w, none);
  } else {
    rotate = false;
  }
  size_t last = w.others.size() - 1, best = w.others.size();
  for (size_t i = 0; i < w.others.size(); ++i) {
    Group& group = w.others[i];
    if (group.wait.ready && group.wait.ready(w, group.wait)) {
      group.wait.ready = nullptr;
      if (group.wait.resumed) group.wait.resumed(w, group.wait);
    }
    if (group.wait.ready) continue;
    bool skip = rotate && i == last && best < w.others.size();
    if (!skip && (best == w.others.size() || (rotate && best == last) || group.pc < w.others[best].pc)) best = i;
  }
  if (best == w.others.size()) return false;
  Group chosen = w.others[best];
  w.others.erase(w.others.begin() + best);
  w.pc = chosen.pc;
  w.mask = chosen.mask;
  w.timed_out = chosen.timed_out;
  for (size_t i = 0; i < w.others.size();) {
    Group& group = w.others[i];
    bool parked = group.wait.ready == together;
    if (group.pc == w.pc && (!group.wait.ready || parked)) {
      w.mask |= group.mask;
      w.others.erase(w.others.begin() + i);
    } else {
      ++i;
    }
  }
  return true;
}

bool must_regroup(const Warp& w) {  // the running group met or passed another
  for (const Group& group : w.others) {
    if (group.pc == w.pc || (group.pc < w.pc && !group.wait.ready)) return true;
  }
  return false;
}

enum class Stop { kSliceEnd, kBlocked, kDone, kYield };

// Runs one warp. Updates counts; throws Fault with w.pc behind the faulting instruction.
Stop run(Warp& w, uint64_t slice) {
  const Instruction* code = w.program->code.data();
  if (w.mask == 0 && !choose(w, false)) return Stop::kBlocked;
  uint64_t* counts = w.counts.empty() ? nullptr : w.counts.data();
  RegisterWatch* watch = w.watch.get();
  while (slice-- > 0) {
    const Instruction& in = code[w.pc++];
    uint32_t mask = w.mask;
    if (in.guard != kNoSlot) mask &= read_predicate(w, in.guard);
    ++w.executed;
    if (mask) {
      if (in.converge && mask != w.live) {
        uint32_t members = members_of(w, in, mask);
        if (members & ~w.mask) {
          --w.pc;
          Wait wait;
          wait.ready = together;
          wait.describe = together_text;
          wait.x = members;
          wait.y = w.mask;
          park(w, wait);
          if (!choose(w, false)) return Stop::kBlocked;
          continue;
        }
      }
      if (counts) ++counts[&in - code];
      if (watch) watch->access(*w.program, in);
      in.execute(w, in, mask);
      if (w.event) {
        w.event = false;
        if (w.live == 0) return Stop::kDone;
        if (w.blocked) {
          w.blocked = false;
          park(w, w.wait);
          if (!choose(w, false)) return Stop::kBlocked;
          continue;
        }
        if (w.yield) {
          w.yield = false;
          if (w.others.empty()) return Stop::kYield;
          choose(w, true);
          continue;
        }
        if (!choose(w, false)) return Stop::kBlocked;
        continue;
      }
    }
    if (!w.others.empty() && must_regroup(w) && !choose(w, false)) return Stop::kBlocked;
  }
  return Stop::kSliceEnd;
}

// ---- start of a CTA ------------------------------------------------------------------------------------------------------------

void fill_special(Warp& w, const SpecialRow& special) {
  Cta& cta = *w.cta;
  Cluster& cluster = *cta.cluster;
  const Grid& grid = *cluster.grid;
  const LaunchRequest& request = *grid.request;
  uint32_t* narrow = row<uint32_t>(w, special.slot);
  uint64_t* wide = row<uint64_t>(w, special.slot);
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    uint32_t linear = w.index * kLanes + lane;
    uint64_t value = 0;
    int axis = 0;
    auto is = [&](Special first) {
      axis = static_cast<int>(special.special) - static_cast<int>(first);
      return axis >= 0 && axis < 3;
    };
    uint32_t tid[3] = {linear % request.block[0], linear / request.block[0] % request.block[1],
                       linear / request.block[0] / request.block[1]};
    if (is(Special::kTidX)) value = tid[axis];
    else if (is(Special::kNtidX)) value = request.block[axis];
    else if (is(Special::kCtaidX)) value = cta.id[axis];
    else if (is(Special::kNctaidX)) value = request.grid[axis];
    else if (is(Special::kClusterIdX)) value = cluster.id[axis];
    else if (is(Special::kNclusterIdX)) value = grid.clusters[axis];
    else if (is(Special::kClusterCtaidX)) value = cta.id[axis] % request.cluster[axis];
    else if (is(Special::kClusterNctaidX)) value = request.cluster[axis];
    else switch (special.special) {
      case Special::kLaneId: value = lane; break;
      case Special::kWarpId: value = w.index; break;
      case Special::kNwarpId: value = cta.warps.size(); break;
      case Special::kSmId: value = (cluster.id[0] * cluster.ctas.size() + cta.rank) % request.options.num_sms; break;
      case Special::kNsmId: value = request.options.num_sms; break;
      case Special::kGridId: value = 1; break;
      case Special::kLanemaskEq: value = 1u << lane; break;
      case Special::kLanemaskLe: value = (2u << lane) - 1; break;
      case Special::kLanemaskLt: value = (1u << lane) - 1; break;
      case Special::kLanemaskGe: value = kFullMask << lane; break;
      case Special::kLanemaskGt: value = ~((2u << lane) - 1); break;
      case Special::kClusterCtarank: value = cta.rank; break;
      case Special::kClusterNctarank: value = cluster.ctas.size(); break;
      case Special::kIsExplicitCluster: value = cluster.ctas.size() > 1 ? kFullMask : 0; break;
      case Special::kDynamicSmemSize: value = request.dynamic_shared; break;
      case Special::kTotalSmemSize: value = cta.shared_end - kSharedBase; break;
      case Special::kParamAddress: value = reinterpret_cast<uint64_t>(grid.parameter_base) + special.argument; break;
      case Special::kSharedAddress: value = cta.shared_base + kSharedBase + special.argument; break;
      case Special::kLocalAddress: value = special.argument; break;
      default: break;
    }
    if (special.special == Special::kIsExplicitCluster) {
      row<uint32_t>(w, special.slot)[0] = static_cast<uint32_t>(value);  // a predicate
      return;
    }
    if (special.wide) wide[lane] = value;
    else narrow[lane] = static_cast<uint32_t>(value);
  }
}

uint32_t registers_at_launch(const Grid& grid, uint32_t threads) {
  if (grid.request->options.registers) return grid.request->options.registers;
  uint32_t fit = 65536 / std::max(threads, 1u) / 8 * 8;
  return std::min(fit, grid.program->max_registers ? grid.program->max_registers : 255u) / 8 * 8;
}

void start_warp(Warp& w, Cta& cta, uint32_t index, uint32_t threads) {
  const Program& program = *cta.cluster->grid->program;
  w.program = &program;
  w.cta = &cta;
  w.index = index;
  uint32_t lanes = std::min<uint32_t>(kLanes, threads - index * kLanes);
  w.live = w.mask = lanes == kLanes ? kFullMask : (1u << lanes) - 1;
  w.storage.assign(program.register_bytes + 64, 0xff);  // poison: NaN in every format
  w.base[0] = w.storage.data() + (64 - reinterpret_cast<uintptr_t>(w.storage.data()) % 64) % 64;
  w.base[1] = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(program.constants.data()));
  w.local.assign(size_t{program.local_bytes} * kLanes, 0xff);
  w.bulk.resize(kLanes);
  if (cta.cluster->grid->request->options.trace) w.counts.assign(program.code.size(), 0);
  if (cta.cluster->grid->request->options.check_races) w.watch = std::make_unique<RegisterWatch>(program);
  for (const SpecialRow& special : program.specials) fill_special(w, special);
}

std::unique_ptr<Cluster> start_cluster(Grid& grid, uint64_t index) {
  const LaunchRequest& request = *grid.request;
  auto cluster = std::make_unique<Cluster>();
  cluster->grid = &grid;
  cluster->id[0] = static_cast<uint32_t>(index % grid.clusters[0]);
  cluster->id[1] = static_cast<uint32_t>(index / grid.clusters[0] % grid.clusters[1]);
  cluster->id[2] = static_cast<uint32_t>(index / grid.clusters[0] / grid.clusters[1]);
  cluster->adversarial = request.options.seed != 0;
  cluster->random_state = (request.options.seed + 1) * 0x9e3779b97f4a7c15ull ^ (index + 1) * 0xd1342543de82ef95ull;
  uint32_t size = request.cluster[0] * request.cluster[1] * request.cluster[2];
  uint32_t threads = request.block[0] * request.block[1] * request.block[2];
  for (uint32_t rank = 0; rank < size; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    cta->rank = rank;
    uint32_t within[3] = {rank % request.cluster[0], rank / request.cluster[0] % request.cluster[1],
                          rank / request.cluster[0] / request.cluster[1]};
    for (int i = 0; i < 3; ++i) cta->id[i] = cluster->id[i] * request.cluster[i] + within[i];
    cta->shared_base = rank << 24;
    cta->shared_end = kSharedBase + (request.dynamic_shared ? grid.program->dynamic_offset + request.dynamic_shared
                                                            : grid.program->static_shared);
    cta->shared.assign(cta->shared_end + 16, 0xff);
    cta->shared_state.assign(cta->shared_end + 16, kUnwritten);
    cta->threads = threads;
    cta->warps.resize((threads + kLanes - 1) / kLanes);
    cta->live_warps = static_cast<uint32_t>(cta->warps.size());
    cluster->ctas.push_back(std::move(cta));
  }
  for (auto& cta : cluster->ctas) {
    for (uint32_t i = 0; i < cta->warps.size(); ++i) {
      start_warp(cta->warps[i], *cta, i, threads);
      cta->warps[i].registers = registers_at_launch(grid, threads);
    }
    start_engines(*cta);
  }
  if (request.options.check_races) cluster->races = std::make_unique<Races>(*cluster, request.options.tensor_fences);
  return cluster;
}

// ---- errors --------------------------------------------------------------------------------------------------------------------

std::string instruction_text(const Program& program, uint32_t pc) {
  std::string text(program.text[pc]);
  for (char& c : text) if (c == '\n' || c == '\t') c = ' ';
  if (text.size() > 160) text = text.substr(0, 157) + "...";
  return format("PTX line %u: %s", program.code[pc].line, text.c_str());
}

std::string short_name(const std::string& name) { return name.size() > 80 ? name.substr(0, 77) + "..." : name; }

std::string located(const Warp& w, uint32_t pc, const std::string& message) {
  return format("%s\n  in kernel %s, %s, warp %u, lanes 0x%08x\n  %s", message.c_str(), short_name(w.program->entry).c_str(),
                w.cta->name().c_str(), w.index, w.mask, instruction_text(*w.program, pc).c_str());
}

std::string deadlock_table(Cluster& cluster, const char* what) {
  const Program& program = *cluster.grid->program;
  std::string table = format("%s in kernel %s\n", what, short_name(program.entry).c_str());
  for (auto& cta : cluster.ctas) {
    for (Warp& w : cta->warps) {
      auto line = [&](uint32_t pc, uint32_t mask, const std::string& reason) {
        table += format("  %s warp %u lanes 0x%08x waits for %s\n    %s\n", cta->name().c_str(), w.index, mask, reason.c_str(),
                        instruction_text(program, pc).c_str());
      };
      if (w.done()) continue;
      if (w.mask) line(w.pc, w.mask, "nothing (it runs)");
      for (const Group& group : w.others) {
        line(group.pc, group.mask, group.wait.ready ? group.wait.describe(w, group.wait) : std::string("nothing (it runs)"));
      }
    }
  }
  for (auto& operation : cluster.pending) table += "  pending: " + operation->describe() + "\n";
  return table;
}

// ---- a cluster -----------------------------------------------------------------------------------------------------------------

void retire(Warp& w) {
  Cta& cta = *w.cta;
  --cta.live_warps;
  check_warp_exit(w);
  for (uint32_t id = 0; id < 16; ++id) if (cta.barriers[id].in_use) finish_barrier(cta, id);
  finish_cluster_barrier(*cta.cluster);
  if (cta.live_warps == 0) check_cta_exit(w);
}

// One turn of a warp; true if it ran at all.
bool turn(Warp& w, uint64_t slice, bool* yielded) {
  if (w.done()) return false;
  uint64_t before = w.executed;
  Stop stop;
  try {
    stop = run(w, slice);
    w.cta->cluster->instructions += w.executed - before;
    if (stop == Stop::kDone) retire(w);
  } catch (const Fault& fault) {
    throw Fault(located(w, w.pc ? w.pc - 1 : 0, fault.text));
  }
  *yielded |= stop == Stop::kYield;
  return w.executed != before || stop == Stop::kDone;
}

bool release_timeouts(Cluster& cluster) {
  bool any = false;
  for (auto& cta : cluster.ctas) {
    for (Warp& w : cta->warps) {
      for (Group& group : w.others) {
        if (group.wait.ready && group.wait.can_time_out) {
          group.wait.ready = nullptr;
          group.timed_out = true;
          any = true;
        }
      }
    }
  }
  return any;
}

// How a seed plays: each cluster draws once. Between operations that finish at once and such that wait for everything else,
// between warps that run far ahead and warps that alternate, with or without a warp that is neglected.
struct Mood {
  uint64_t operation_odds;  // a step of an operation in flight is tried once in so many turns
  uint64_t slice_bits;      // warps run up to 2^slice_bits instructions
  size_t neglected;         // a warp that is passed over 15 times in 16; none: beyond the last
};

Mood draw_mood(Cluster& cluster, size_t warps) {
  const uint64_t odds[] = {1, 2, 4, 16, 64, 512};
  return {odds[cluster.random() % 6], cluster.random() % 12, cluster.random() % (2 * warps)};
}

// One step of a random operation that is ready.
bool step_any(Cluster& cluster) {
  std::vector<size_t> ready;
  for (size_t i = 0; i < cluster.pending.size(); ++i) if (cluster.pending[i]->ready()) ready.push_back(i);
  if (ready.empty()) return false;
  size_t i = ready[cluster.random() % ready.size()];
  std::unique_ptr<Asynchronous> operation = std::move(cluster.pending[i]);
  ++cluster.progress;
  try {
    if (operation->step()) cluster.pending.erase(cluster.pending.begin() + i);
    else cluster.pending[i] = std::move(operation);
  } catch (const Fault& fault) {
    throw Fault(fault.text + "\n  in the asynchronous part of " + operation->describe());
  }
  return true;
}

// A turn of a random warp that can run.
bool turn_any(Cluster& cluster, const std::vector<Warp*>& warps, const Mood& mood, bool* yielded) {
  size_t start = cluster.random() % warps.size();
  uint64_t slice = uint64_t{1} << (cluster.random() % (mood.slice_bits + 1));
  for (size_t i = 0; i < warps.size(); ++i) {
    size_t at = (start + i) % warps.size();
    if (at == mood.neglected && cluster.random() % 16) continue;
    if (turn(*warps[at], slice, yielded)) return true;
  }
  return mood.neglected < warps.size() && turn(*warps[mood.neglected], slice, yielded);
}

enum class Outcome { kFinished, kSpinning };
constexpr uint64_t kSlice = 4096;
constexpr int kTimeoutRounds = 8;  // rounds of refused try_waits without any progress before the verdict "deadlock"

// Runs a cluster until it ends or has only been spinning for a while.
Outcome run_cluster(Cluster& cluster) {
  const Options& options = cluster.grid->request->options;
  std::vector<Warp*> warps;
  for (auto& cta : cluster.ctas) for (Warp& w : cta->warps) warps.push_back(&w);
  Mood mood = draw_mood(cluster, warps.size());
  uint64_t progress = cluster.progress, since = cluster.instructions;
  int timeouts = 0;
  while (cluster.live_warps() > 0) {
    bool ran = false, yielded = false;
    if (cluster.adversarial) {
      ran = (cluster.random() % mood.operation_odds == 0 && step_any(cluster)) || turn_any(cluster, warps, mood, &yielded) ||
            step_any(cluster);
    } else {
      for (Warp* w : warps) ran |= turn(*w, kSlice, &yielded);
      if (!ran && !cluster.pending.empty()) {
        uint64_t before = cluster.progress;
        cluster.drain();
        ran = cluster.progress != before;
      }
    }
    if (cluster.progress != progress) {
      progress = cluster.progress;
      since = cluster.instructions;
      timeouts = 0;
    }
    if (!ran) {
      if (++timeouts > kTimeoutRounds || !release_timeouts(cluster)) throw Fault(deadlock_table(cluster, "deadlock"));
      continue;
    }
    if (options.instruction_limit && cluster.instructions > options.instruction_limit) {
      throw Fault(deadlock_table(cluster, "instruction limit reached"));
    }
    if (cluster.instructions - since > (yielded ? options.idle_limit / 64 : options.idle_limit)) return Outcome::kSpinning;
  }
  while (cluster.adversarial && step_any(cluster)) {}
  finish_cluster(cluster);
  return Outcome::kFinished;
}

// ---- the grid ------------------------------------------------------------------------------------------------------------------

struct Shared {
  std::mutex mutex;
  std::string error;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> instructions{0};
  std::atomic<uint64_t> finished{0};  // clusters
  std::unique_ptr<Trace> trace;
};

void report(Shared& shared, const std::string& text) {
  std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.error.empty()) shared.error = text;
  shared.stop = true;
}

void work(Grid& grid, Shared& shared, size_t most_resident) {
  std::vector<std::unique_ptr<Cluster>> resident;
  size_t at = 0;
  uint64_t idle_rounds = 0, seen = 0;
  while (!shared.stop) {
    bool all_spin = !resident.empty();
    if (resident.empty() || at >= resident.size()) {
      at = 0;
      // A cluster that spins may wait for one that has not started.
      if (resident.size() < most_resident) {
        uint64_t index = grid.next_cluster.fetch_add(1);
        if (index < grid.total_clusters) {
          resident.push_back(start_cluster(grid, index));
          at = resident.size() - 1;
          all_spin = false;
        }
      }
      if (resident.empty()) return;
    }
    Cluster& cluster = *resident[at];
    uint64_t before = cluster.instructions, progress = cluster.progress;
    Outcome outcome;
    try {
      outcome = run_cluster(cluster);
    } catch (const Fault& fault) {
      return report(shared, fault.text);
    }
    shared.instructions += cluster.instructions - before;
    if (outcome == Outcome::kFinished) {
      {
        std::lock_guard<std::mutex> lock(shared.mutex);
        if (shared.trace) shared.trace->add(cluster);
      }
      ++shared.finished;
      resident.erase(resident.begin() + at);
      idle_rounds = 0;
      continue;
    }
    if (cluster.progress != progress) all_spin = false;
    if (shared.finished != seen) {
      seen = shared.finished;
      all_spin = false;
    }
    idle_rounds = all_spin ? idle_rounds + 1 : 0;
    if (idle_rounds > 4 * resident.size() + 16) return report(shared, deadlock_table(cluster, "livelock: no warp makes progress"));
    ++at;
  }
}

// Sorts, and joins ranges that overlap: one array may be several operands, and an operand may be donated to a result.
void merge_regions(std::vector<Region>& regions) {
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.base < b.base; });
  std::vector<Region> merged;
  for (Region& region : regions) {
    if (!merged.empty() && region.base < merged.back().base + merged.back().bytes) {
      Region& last = merged.back();
      last.bytes = std::max<size_t>(last.bytes, region.base + region.bytes - last.base);
      last.writable |= region.writable;
      if (last.name != region.name) last.name += "/" + region.name;
    } else {
      merged.push_back(std::move(region));
    }
  }
  regions = std::move(merged);
}

std::string check_request(const Program& program, const LaunchRequest& request) {
  uint64_t threads = uint64_t{request.block[0]} * request.block[1] * request.block[2];
  if (threads == 0 || threads > 1024) return format("a block of %llu threads", static_cast<unsigned long long>(threads));
  if (program.required_threads[0]) {
    for (int i = 0; i < 3; ++i) {
      if (program.required_threads[i] != request.block[i]) {
        return format("the kernel requires blocks of (%u,%u,%u) threads, not (%u,%u,%u)", program.required_threads[0],
                      program.required_threads[1], program.required_threads[2], request.block[0], request.block[1],
                      request.block[2]);
      }
    }
  }
  for (int i = 0; i < 3; ++i) {
    if (request.grid[i] == 0 || request.cluster[i] == 0 || request.grid[i] % request.cluster[i]) {
      return format("a grid of (%u,%u,%u) in clusters of (%u,%u,%u)", request.grid[0], request.grid[1], request.grid[2],
                    request.cluster[0], request.cluster[1], request.cluster[2]);
    }
    if (program.required_cluster[0] && program.required_cluster[i] != request.cluster[i]) {
      return format("the kernel requires clusters of (%u,%u,%u)", program.required_cluster[0], program.required_cluster[1],
                    program.required_cluster[2]);
    }
  }
  if (request.cluster[0] * request.cluster[1] * request.cluster[2] > 16) return "a cluster of more than 16 CTAs";
  uint32_t shared = program.dynamic_offset + request.dynamic_shared;
  if (shared > 232448) return format("%u bytes of shared memory; a CTA can have 232448", shared);
  return "";
}

}  // namespace

void finish_barrier(Cta& cta, uint32_t id) {
  NamedBarrier& b = cta.barriers[id];
  uint32_t expected = b.expected ? b.expected : cta.live_warps * kLanes;
  if (b.arrived < expected || b.arrived == 0) return;
  if (b.arrived > expected) throw Fault(format("barrier %u: %u threads arrived, %u were expected", id, b.arrived, expected));
  b.result_and = b.reduce_and, b.result_or = b.reduce_or, b.result_count = b.reduce_count;
  b.arrived = b.warps = 0;
  b.in_use = false;
  ++b.generation;
  ++cta.cluster->progress;
}

void finish_cluster_barrier(Cluster& cluster) {
  bool any = false;
  for (auto& cta : cluster.ctas) {
    for (Warp& w : cta->warps) {
      if (w.done()) continue;
      if (w.cluster_arrivals <= cluster.barrier_phase) return;
      any = true;
    }
  }
  if (!any) return;
  ++cluster.barrier_phase;
  ++cluster.progress;
}

LaunchResult launch(const Program& program, const LaunchRequest& request) {
  LaunchResult result;
  result.error = check_request(program, request);
  if (!result.error.empty()) {
    result.error = "launch of " + short_name(program.entry) + ": " + result.error;
    return result;
  }
  auto start = std::chrono::steady_clock::now();
  Grid grid;
  grid.program = &program;
  grid.request = &request;
  // Parameters may hold tensor maps, which are 64-byte aligned.
  grid.parameters.resize(program.parameter_bytes + 128);
  uint8_t* aligned = grid.parameters.data() + (64 - reinterpret_cast<uintptr_t>(grid.parameters.data()) % 64) % 64;
  if (program.parameter_bytes) std::memcpy(aligned, request.parameters, program.parameter_bytes);
  grid.parameter_base = aligned;
  if (!request.regions.empty()) {
    grid.regions = request.regions;
    grid.regions.push_back({"kernel parameters", aligned, program.parameter_bytes, false});
    merge_regions(grid.regions);
  }
  for (int i = 0; i < 3; ++i) grid.clusters[i] = request.grid[i] / request.cluster[i];
  grid.total_clusters = uint64_t{grid.clusters[0]} * grid.clusters[1] * grid.clusters[2];

  Shared shared;
  if (request.options.trace) shared.trace = std::make_unique<Trace>(program);
  int threads = request.options.host_threads;
  if (threads <= 0) threads = program.global_float_atomics || request.options.seed ? 1 : std::max(1u, std::thread::hardware_concurrency());
  threads = static_cast<int>(std::min<uint64_t>(threads, grid.total_clusters));
  uint32_t cluster_size = request.cluster[0] * request.cluster[1] * request.cluster[2];
  size_t most_resident = std::max<size_t>(1, request.options.num_sms / cluster_size / threads);
  std::vector<std::thread> workers;
  for (int i = 1; i < threads; ++i) workers.emplace_back([&] { work(grid, shared, most_resident); });
  work(grid, shared, most_resident);
  for (std::thread& worker : workers) worker.join();
  result.error = shared.error;
  result.instructions = shared.instructions;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (shared.trace) result.trace = shared.trace->json(result.seconds);
  return result;
}

}  // namespace emulator
