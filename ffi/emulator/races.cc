// Happens-before race detector. See races.h.
#include "races.h"

#include <algorithm>

#include "machine.h"
#include "memory.h"
#include "mma.h"

namespace emulator {
namespace {

constexpr uint32_t kAgentsOfWarp = 5;
constexpr int kTensorRows = 8;  // cells of 16 lanes
constexpr uint32_t kMaxAgents = 65000;

void join_into(std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  uint32_t* a = to.data();
  const uint32_t* b = from.data();
  for (size_t i = 0, n = from.size(); i < n; ++i) a[i] = std::max(a[i], b[i]);
}

void meet_with(std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
  if (a.size() > b.size()) a.resize(b.size());
  for (size_t i = 0; i < a.size(); ++i) a[i] = std::min(a[i], b[i]);
}

void set(std::vector<uint32_t>& clock, uint32_t agent, uint32_t value) {
  if (clock.size() <= agent) clock.resize(agent + 1, 0);
  clock[agent] = value;
}

}  // namespace

void Clock::join(const Clock& other) {
  join_into(order, other.order);
  join_into(proxy, other.proxy);
  join_into(init, other.init);
}

void Clock::meet(const Clock& other) {
  meet_with(order, other.order);
  meet_with(proxy, other.proxy);
  meet_with(init, other.init);
}

Races::Cell& Races::Cell::operator=(const Cell& other) {
  written = other.written;
  reads[0] = other.reads[0], reads[1] = other.reads[1];
  more_reads = other.more_reads ? std::make_unique<std::vector<Access>>(*other.more_reads) : nullptr;
  return *this;
}

Races::Races(Cluster& cluster, bool tensor_fences) : cluster_(cluster), tensor_fences_(tensor_fences) {
  warps_per_cta_ = static_cast<uint32_t>(cluster.ctas[0]->warps.size());
  first_copy_ = static_cast<uint32_t>(cluster.ctas.size()) * warps_per_cta_ * kAgentsOfWarp;
  agents_.resize(first_copy_);
  for (uint32_t i = 0; i < first_copy_; ++i) {
    set(agents_[i].clock.order, i, 1);
    uint32_t warp = i / kAgentsOfWarp;
    const char* kinds[] = {"", "tcgen05.ld of ", "tcgen05.st of ", "the tensor pipe of ", "the wgmma pipe of "};
    agents_[i].text = format("%swarp %u of rank %u", kinds[i % kAgentsOfWarp], warp % warps_per_cta_, warp / warps_per_cta_);
  }
  memories_.resize(cluster.ctas.size());
  for (size_t i = 0; i < memories_.size(); ++i) memories_[i].shared.resize(cluster.ctas[i]->shared.size() / 16 + 1);
}

uint32_t Races::thread(const Warp& w) const { return (w.cta->rank * warps_per_cta_ + w.index) * kAgentsOfWarp; }
uint32_t& Races::own(uint32_t agent) {
  std::vector<uint32_t>& order = agents_[agent].clock.order;
  if (order.size() <= agent) order.resize(agent + 1, 0);
  return order[agent];
}
uint64_t Races::key(const Cta& cta, uint64_t what) { return static_cast<uint64_t>(cta.rank) << 56 | what; }

// A number is used again only by a warp that knows of all its earlier accesses, else they could pass for ordered.
uint32_t Races::start_copy(Warp& w, const Instruction& in, uint32_t lanes) {
  const Clock& known = clock(thread(w));
  uint32_t agent = first_copy_;
  while (agent < agents_.size() && at(known.order, agent) < own(agent)) ++agent;
  if (agent == agents_.size()) {
    if (agent >= kMaxAgents) throw Fault("the race check has run out of numbers for copies that nothing waits for");
    agents_.emplace_back();
  }
  uint32_t epoch = own(agent) + 1;
  agents_[agent].clock = passed_on(w, lanes);
  own(agent) = epoch;
  agents_[agent].text = format("the copy that warp %u of rank %u issued at %s", w.index, w.cta->rank, line(&in).c_str());
  ++own(thread(w));
  return agent;
}

Races::View Races::view(Warp& w) {
  Agent& agent = agents_[thread(w)];
  View result{agent.clock, tensor_fences_ ? agent.tensor : Clock()};
  ++own(thread(w));
  return result;
}

void Races::advance(uint32_t agent, const View& begin) {
  uint32_t epoch = own(agent) + 1;
  agents_[agent].clock.join(begin.clock);
  agents_[agent].tensor.join(begin.tensor);
  own(agent) = epoch;
}

void Races::touch(Warp& w, uint32_t lanes) {
  Agent& agent = agents_[thread(w)];
  agent.touched |= lanes;
  agent.unfenced |= lanes;
}
void Races::sync_lanes(Warp& w) {
  Agent& agent = agents_[thread(w)];
  agent.touched = 0;
  agent.common = own(thread(w))++;
}
void Races::acquire_barrier(Warp& w, const Clock& from) {
  Agent& agent = agents_[thread(w)];
  agent.clock.join(from);
  agent.common = std::max(agent.common, at(from.order, thread(w)));
}
Clock Races::passed_on(const Warp& w, uint32_t lanes) const {
  uint32_t number = thread(w);
  const Agent& agent = agents_[number];
  Clock result = agent.clock;
  if (agent.touched & ~lanes) {
    result.order[number] = agent.common;
    if (number < result.proxy.size()) result.proxy[number] = std::min(result.proxy[number], agent.common);
  }
  return result;
}

void Races::release(Warp& w, Clock& to, uint32_t lanes) {
  if (agents_[thread(w)].touched & ~lanes) to.join(passed_on(w, lanes));
  else to.join(clock(thread(w)));
  ++own(thread(w));
}
void Races::release_relaxed(Warp& w, Clock& to) {
  const Agent& agent = agents_[thread(w)];
  to.join(agent.fenced);
  join_into(to.init, agent.clock.init);
}
void Races::memory_fence(Warp& w) {
  agents_[thread(w)].fenced = clock(thread(w));
  ++own(thread(w));
}
void Races::proxy_fence(Warp& w, uint32_t lanes) {
  uint32_t number = thread(w);
  Agent& agent = agents_[number];
  Clock& c = agent.clock;
  uint32_t before = at(c.proxy, number);
  c.proxy = c.order;
  join_into(c.init, c.order);  // it may know more: relaxed barriers hand on initialisations alone
  agent.unfenced &= ~lanes;
  if (agent.touched & agent.unfenced) c.proxy[number] = std::max(before, agent.common);  // each lane fences its own accesses
  ++own(number);
}
void Races::init_fence(Warp& w) {
  Clock& c = clock(thread(w));
  join_into(c.init, c.order);
  ++own(thread(w));
}
void Races::before_thread_sync(Warp& w) {
  if (tensor_fences_) clock(thread(w)).join(agents_[thread(w)].tensor);
}
void Races::after_thread_sync(Warp& w) {
  if (tensor_fences_) agents_[thread(w)].tensor.join(clock(thread(w)));
}
void Races::wait_stream(Warp& w, uint32_t agent) {
  (tensor_fences_ ? agents_[thread(w)].tensor : clock(thread(w))).join(clock(agent));
}

// ---- messages ------------------------------------------------------------------------------------------------------------

std::string Races::line(const Instruction* in) const {
  const Program& program = *cluster_.grid->program;
  std::string text(program.text[in - program.code.data()].substr(0, 100));
  for (char& c : text) if (c == '\n' || c == '\t') c = ' ';
  return format("PTX line %u: %s", in->line, text.c_str());
}

std::string Races::describe(uint32_t agent) const { return agents_[agent].text; }

void Races::report(const Actor& actor, const Access& before, bool writes, bool wrote, bool fence_missing, uint32_t address) const {
  std::string place = format("%s 0x%x of rank %u", actor.space, address, actor.rank);
  throw Fault(format("race: %s %s %s, which %s %s before\n  now:    %s\n  before: %s\n  %s",
                     actor.exits ? "the CTA exits and gives away" : describe(actor.now.agent).c_str(),
                     actor.exits ? "" : writes ? "writes" : "reads", place.c_str(), describe(before.agent).c_str(), wrote ? "wrote" : "read",
                     line(actor.now.in).c_str(), line(before.in).c_str(),
                     fence_missing ? "The two are ordered, but no proxy fence lies between the generic write and the asynchronous access."
                                   : "Nothing orders the two."));
}

// ---- accesses ------------------------------------------------------------------------------------------------------------

bool Races::knows(const Actor& actor, const Access& access, bool* fence_missing) const {
  *fence_missing = false;
  if (access.epoch == 0 || access.agent == actor.now.agent) return true;
  if (at(actor.clock.order, access.agent) < access.epoch) return false;
  *fence_missing = actor.now.proxy == Proxy::kAsync && access.proxy == Proxy::kGeneric &&
                   at(actor.clock.proxy, access.agent) < access.epoch;
  return !*fence_missing;
}

void Races::check_read(const Actor& actor, Cell& cell, uint32_t address) {
  bool fence_missing;
  if (!knows(actor, cell.written, &fence_missing)) report(actor, cell.written, false, true, fence_missing, address);
  // Take the place of an earlier read that this one knows of: who knows of this one knows of that one.
  auto covered = [&](const Access& read) {
    return read.epoch == 0 || read.agent == actor.now.agent || at(actor.clock.order, read.agent) >= read.epoch;
  };
  for (Access& read : cell.reads) {
    if (covered(read)) {
      read = actor.now;
      return;
    }
  }
  if (!cell.more_reads) cell.more_reads = std::make_unique<std::vector<Access>>();
  for (Access& read : *cell.more_reads) {
    if (covered(read)) {
      read = actor.now;
      return;
    }
  }
  cell.more_reads->push_back(actor.now);
}

void Races::check_write(const Actor& actor, Cell& cell, uint32_t address) {
  bool fence_missing;
  if (!knows(actor, cell.written, &fence_missing)) report(actor, cell.written, true, true, fence_missing, address);
  auto check = [&](Access& read) {
    // A generic read before an asynchronous write needs order, but no proxy fence.
    if (!knows(actor, read, &fence_missing) && !fence_missing) report(actor, read, true, false, false, address);
    read.epoch = 0;
  };
  for (Access& read : cell.reads) if (read.epoch) check(read);
  if (cell.more_reads) {
    for (Access& read : *cell.more_reads) if (read.epoch) check(read);
    cell.more_reads = nullptr;
  }
  cell.written = actor.now;
}

template <bool kWrite>
void Races::access(uint32_t agent, const Clock& known, Cta& cta, uint32_t offset, uint32_t bytes, Proxy proxy,
                   const Instruction* in) {
  std::vector<Chunk>& chunks = memories_[cta.rank].shared;
  const Actor actor{{agent, agents_[agent].clock.order[agent], in, proxy}, known, "shared memory", cta.rank};
  auto check = [&](Cell& cell, uint32_t address) {
    if (kWrite) check_write(actor, cell, address);
    else check_read(actor, cell, address);
  };
  uint32_t end = offset + bytes;
  for (uint32_t address = offset & ~15u; address < end; address += 16) {
    Chunk& chunk = chunks[address / 16];
    bool all = offset <= address && address + 16 <= end;
    if (all) {
      if (chunk.parts) {
        for (uint32_t i = 0; i < 4; ++i) check(chunk.parts[i], address + 4 * i);
        if (kWrite) {
          chunk.whole = chunk.parts[0];
          chunk.parts = nullptr;
        }
      } else {
        check(chunk.whole, address);
      }
      continue;
    }
    if (!chunk.parts) {
      chunk.parts = std::make_unique<Cell[]>(4);
      for (int i = 0; i < 4; ++i) chunk.parts[i] = chunk.whole;
    }
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t cell = address + 4 * i;
      if (cell < end && offset < cell + 4) check(chunk.parts[i], cell);
    }
  }
}

void Races::read(uint32_t agent, Cta& cta, uint32_t offset, uint32_t bytes, Proxy proxy, const Instruction* in) {
  access<false>(agent, agents_[agent].clock, cta, offset, bytes, proxy, in);
}
void Races::read(uint32_t agent, const Clock& known, Cta& cta, uint32_t offset, uint32_t bytes, Proxy proxy, const Instruction* in) {
  access<false>(agent, known, cta, offset, bytes, proxy, in);
}
void Races::write(uint32_t agent, Cta& cta, uint32_t offset, uint32_t bytes, Proxy proxy, const Instruction* in) {
  access<true>(agent, agents_[agent].clock, cta, offset, bytes, proxy, in);
}

template <bool kWrite>
void Races::access_tensor(uint32_t agent, Cta& cta, int lane, int lanes, int column, int columns, const Instruction* in) {
  std::vector<Cell>& cells = memories_[cta.rank].tensor;
  if (cells.empty()) cells.resize(kTensorRows * kTmemColumns);
  const Agent& who = agents_[agent];
  const Actor actor{{agent, who.clock.order[agent], in, Proxy::kGeneric}, tensor_fences_ ? who.tensor : who.clock, "tensor memory",
                    cta.rank};
  for (int c = column; c < column + columns; ++c) {
    for (int r = lane / 16; r <= (lane + lanes - 1) / 16; ++r) {
      Cell& cell = cells[c * kTensorRows + r];
      uint32_t address = static_cast<uint32_t>(r * 16) << 16 | static_cast<uint32_t>(c);
      if (kWrite) check_write(actor, cell, address);
      else check_read(actor, cell, address);
    }
  }
}
void Races::read_tensor(uint32_t agent, Cta& cta, int lane, int lanes, int column, int columns, const Instruction* in) {
  access_tensor<false>(agent, cta, lane, lanes, column, columns, in);
}
void Races::write_tensor(uint32_t agent, Cta& cta, int lane, int lanes, int column, int columns, const Instruction* in) {
  access_tensor<true>(agent, cta, lane, lanes, column, columns, in);
}

void Races::exit(Warp& w, const Instruction* in) {
  Cta& cta = *w.cta;
  Clock known;
  for (const Warp& other : cta.warps) known.join(clock(thread(other)));
  const Actor actor{{thread(w), known.order[thread(w)], in, Proxy::kGeneric}, known, "shared memory", cta.rank, true};
  std::vector<Chunk>& chunks = memories_[cta.rank].shared;
  for (uint32_t i = 0; i < chunks.size(); ++i) {
    if (!chunks[i].parts) {
      check_write(actor, chunks[i].whole, 16 * i);
    } else {
      for (uint32_t part = 0; part < 4; ++part) check_write(actor, chunks[i].parts[part], 16 * i + 4 * part);
    }
  }
}

void Races::init_barrier(Warp& w, Cta& cta, uint32_t offset, const Instruction* in) {
  write(thread(w), cta, offset, 8, Proxy::kGeneric, in);
  memories_[cta.rank].barriers[offset] = {thread(w), own(thread(w)), in, Proxy::kGeneric};
  objects_.erase(key(cta, uint64_t{1} << 32 | offset));
  objects_.erase(key(cta, uint64_t{2} << 32 | offset));
}

void Races::use_barrier(uint32_t agent, Cta& cta, uint32_t offset, Proxy proxy, const Instruction* in) {
  auto found = memories_[cta.rank].barriers.find(offset);
  if (found == memories_[cta.rank].barriers.end() || found->second.agent == agent) return;
  const Access& init = found->second;
  const Clock& c = agents_[agent].clock;
  bool remote = init.agent / kAgentsOfWarp / warps_per_cta_ != cta.rank || agent / kAgentsOfWarp / warps_per_cta_ != cta.rank;
  bool fenced = at(c.init, init.agent) >= init.epoch;
  if (fenced || (proxy == Proxy::kGeneric && !remote && at(c.order, init.agent) >= init.epoch)) return;
  throw Fault(format("race: %s uses the mbarrier at 0x%x of rank %u, whose initialisation by %s it cannot rely on\n  now:    %s\n"
                     "  before: %s\n  %s", describe(agent).c_str(), offset, cta.rank, describe(init.agent).c_str(), line(in).c_str(),
                     line(init.in).c_str(), at(c.order, init.agent) >= init.epoch
                         ? "The two are ordered, but no fence.mbarrier_init (or proxy fence) follows the initialisation."
                         : "Nothing orders the two."));
}

// ---- clocks of objects -----------------------------------------------------------------------------------------------------

Clock& Races::barrier_clock(const Cta& cta, uint32_t offset) { return objects_[key(cta, uint64_t{1} << 32 | offset)]; }
Clock& Races::barrier_done(const Cta& cta, uint32_t offset) { return objects_[key(cta, uint64_t{2} << 32 | offset)]; }
Clock& Races::named(const Cta& cta, uint32_t id, uint64_t generation) {
  objects_.erase(key(cta, uint64_t{3} << 32 | id << 16 | ((generation + 4) & 7)));
  return objects_[key(cta, uint64_t{3} << 32 | id << 16 | (generation & 7))];
}
Clock& Races::cluster_phase(uint64_t phase) {
  objects_.erase(uint64_t{4} << 32 | ((phase - 4) & 0xffff));
  return objects_[uint64_t{4} << 32 | (phase & 0xffff)];
}
Clock& Races::atomic_cell(const Cta& cta, uint32_t offset) { return objects_[key(cta, uint64_t{5} << 32 | offset)]; }
Clock& Races::wgmma_issue(const Cta& cta, uint32_t warp, uint64_t sequence) {
  return objects_[key(cta, uint64_t{64 + warp} << 48 | (sequence & 0xffffffffffu))];
}
Clock& Races::wgmma_done(const Cta& cta, uint32_t warpgroup, uint64_t sequence) {
  return objects_[key(cta, uint64_t{32 + warpgroup} << 48 | (sequence & 0xffffffffffu))];
}
void Races::forget_wgmma(const Cta& cta, uint32_t warpgroup, uint64_t sequence) {
  for (uint32_t warp = 4 * warpgroup; warp < 4 * warpgroup + 4; ++warp) {
    objects_.erase(key(cta, uint64_t{64 + warp} << 48 | (sequence & 0xffffffffffu)));
  }
  objects_.erase(key(cta, uint64_t{32 + warpgroup} << 48 | (sequence & 0xffffffffffu)));
}

}  // namespace emulator
