// Matrix products on registers and shared memory: wgmma and mma.sync.
//
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (`wgmma.mma_async`, `wgmma.fence`,
// `wgmma.commit_group`, `wgmma.wait_group`), "Warp Level Matrix Multiply-Accumulate Instructions" (`mma`).
#include <cstring>

#include "bulk.h"
#include "decode.h"
#include "engines.h"
#include "machine.h"
#include "memory.h"
#include "mma.h"

namespace emulator {
namespace {

struct Wgmma {
  WgmmaSpec spec;
  bool a_in_registers = false;
  Slot a = kNoSlot, b = kNoSlot, scale_d = kNoSlot;  // descriptors (64-bit rows) and a predicate
  uint32_t d_list = 0, a_list = 0;
};

// What the four warps knew when they issued a product. The instruction does not synchronise them: each multiplies 16 rows of A,
// which only it must know to be written, by all of B, which all four must.
struct Issuers {
  const Clock* warps[4];
  Clock all;
};

template <class Known>
void require_chunks(const Agent& agent, Cta& cta, const uint32_t* chunks, int count, Known&& known) {
  for (int i = 0; i < count; ++i) {
    if (chunks[i] < kSharedBase || chunks[i] + 16 > cta.shared_end) {
      throw Fault(format("a matrix descriptor leads to shared address 0x%x, outside 0x%x..0x%x", chunks[i], kSharedBase, cta.shared_end));
    }
    SharedPlace place{&cta, chunks[i]};
    require_written(place, 16);
    if (Races* races = agent.races()) races->read(agent.number, known(i), cta, place.offset, 16, agent.proxy, agent.in);
  }
}

template <class Known>
void gather(const Agent& agent, Cta& cta, uint64_t bits, Major major, Format format, int rows, int k, bool transpose, float* out,
            Known&& known) {
  MatrixDescriptor descriptor = decode_wgmma_descriptor(bits);
  static thread_local uint32_t chunks[kMaxMatrixChunks];
  int count = matrix_chunks(descriptor, major, rows, k, bits_of(format), chunks);
  require_chunks(agent, cta, chunks, count, known);
  gather_matrix(cta.shared.data(), chunks, major, format, bits_of(format), rows, k, transpose, out);
  cta.counters.shared_read += 16u * count;
}

void execute(Cta& cta, WarpgroupQueue& queue, const WarpgroupQueue::Operation& operation, const Agent& agent,
             const Issuers& issuers) {
  const Wgmma& op = *static_cast<const Wgmma*>(operation.in->extra);
  const WgmmaSpec& spec = op.spec;
  alignas(64) static thread_local float a[64 * 64];
  alignas(64) static thread_local float b[64 * 256];
  const uint32_t* a_registers[16];
  uint32_t* d_registers[4 * 128];
  const std::vector<Slot>& lists = cta.cluster->grid->program->lists;
  int a_count = spec.k() * bits_of(spec.a) / 64, d_count = spec.d_registers();
  for (int warp = 0; warp < 4; ++warp) {
    for (int i = 0; i < d_count; ++i) d_registers[warp * d_count + i] = row<uint32_t>(*queue.warps[warp], lists[op.d_list + i]);
    if (op.a_in_registers) {
      for (int i = 0; i < a_count; ++i) a_registers[warp * a_count + i] = row<uint32_t>(*queue.warps[warp], lists[op.a_list + i]);
    }
  }
  if (op.a_in_registers) load_wgmma_a(spec, a_registers, a);
  else gather(agent, cta, operation.a, spec.a_major, spec.a, 64, spec.k(), false, a, [&](int chunk) -> const Clock& {
    // Chunks go along k and then down the rows; or, where A is transposed, along the rows and then down k.
    int along = (spec.a_major == Major::kK ? spec.k() : 64) * bits_of(spec.a) / 128;
    int row = spec.a_major == Major::kK ? chunk / along : chunk % along * 64 / along;
    return *issuers.warps[row / 16];
  });
  gather(agent, cta, operation.b, spec.b_major, spec.b, spec.n, spec.k(), true, b, [&](int) -> const Clock& { return issuers.all; });
  wgmma(spec, a, b, operation.scale_d, d_registers);
  ++cta.counters.wgmma;
  cta.counters.mma_flop += uint64_t{2} * 64 * spec.n * spec.k();
}

// The product of operation `sequence`, once its predecessors are done.
class Product : public Asynchronous {
 public:
  Product(Cta& cta, WarpgroupQueue& queue, uint64_t sequence, std::string text)
      : cta_(cta), queue_(queue), sequence_(sequence), text_(std::move(text)) {}
  bool ready() const override { return queue_.completed == sequence_; }
  bool step() override {
    const WarpgroupQueue::Operation& operation = queue_.operations.front();
    uint32_t warpgroup = queue_.warps[0]->index / 4;
    Agent agent{cta_.cluster, 0, operation.in, Races::Proxy::kAsync};
    Races* races = agent.races();
    Issuers issuers{};
    if (races) {
      agent.number = races->wgmma(*queue_.warps[0]);
      Clock together;
      for (uint32_t i = 0; i < 4; ++i) {
        const Clock& clock = races->wgmma_issue(cta_, 4 * warpgroup + i, sequence_);
        issuers.warps[i] = &clock;
        if (i == 0) together = issuers.all = clock;
        else together.join(clock), issuers.all.meet(clock);
      }
      races->advance(agent.number, {together, Clock()});
    }
    execute(cta_, queue_, operation, agent, issuers);
    if (races) {
      races->wgmma_done(cta_, warpgroup, sequence_) = races->clock(agent.number);
      constexpr uint64_t kRemembered = 1024;  // more than any warp lags behind
      if (sequence_ >= kRemembered) races->forget_wgmma(cta_, warpgroup, sequence_ - kRemembered);
    }
    queue_.operations.pop_front();
    ++queue_.first;
    ++queue_.completed;
    return true;
  }
  std::string describe() const override { return text_; }

 private:
  Cta& cta_;
  WarpgroupQueue& queue_;
  uint64_t sequence_;
  std::string text_;
};

WarpgroupQueue& queue_of(Warp& w) {
  if ((w.index | 3u) >= w.cta->warps.size()) throw Fault("wgmma in an incomplete warpgroup");
  return *w.cta->warpgroups[w.index / 4];
}

uint64_t uniform(Warp& w, Slot slot, const char* what) {
  const uint64_t* values = row<uint64_t>(w, slot);
  for (int i = 1; i < kLanes; ++i) if (values[i] != values[0]) throw Fault(format("wgmma: %s differs between lanes", what));
  return values[0];
}

void issue(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) throw Fault("wgmma needs all lanes of the warp");
  const Wgmma& op = *static_cast<const Wgmma*>(in.extra);
  WarpgroupQueue& queue = queue_of(w);
  uint32_t warp = w.index % 4;
  uint64_t sequence = queue.issued[warp]++;
  if (w.watch) {
    const std::vector<Slot>& lists = w.program->lists;
    w.watch->issue(&lists[op.d_list], op.spec.d_registers(), op.a_in_registers ? &lists[op.a_list] : nullptr,
                   op.a_in_registers ? op.spec.k() * bits_of(op.spec.a) / 64 : 0, sequence);
  }
  bool scale_d = op.scale_d == kNoSlot || (read_predicate(w, op.scale_d) & 1);
  uint64_t a = op.a_in_registers ? 0 : uniform(w, op.a, "the descriptor of A"), b = uniform(w, op.b, "the descriptor of B");
  if (sequence == queue.first + queue.operations.size()) {
    queue.operations.emplace_back();
    WarpgroupQueue::Operation& operation = queue.operations.back();
    operation.in = &in;
    operation.a = a, operation.b = b;
    operation.scale_d = scale_d;
  }
  WarpgroupQueue::Operation& operation = queue.operations[sequence - queue.first];
  if (operation.in != &in || operation.a != a || operation.b != b || operation.scale_d != scale_d) {
    throw Fault("the warps of a warpgroup issue different wgmma instructions or operands");
  }
  operation.issued |= 1u << warp;
  if (Races* races = races_of(w)) races->release(w, races->wgmma_issue(*w.cta, w.index, sequence));
  note_progress(w);
  if (operation.issued == 15) {
    cluster_of(w).submit(std::make_unique<Product>(*w.cta, queue, sequence, issue_text(w, in)));
  }
}

void commit(Warp& w, const Instruction&, uint32_t) {
  WarpgroupQueue& queue = queue_of(w);
  queue.groups[w.index % 4].push_back(queue.issued[w.index % 4]);
}

bool group_ready(Warp& w, const Wait& wait) { return w.cta->warpgroups[w.index / 4]->completed >= wait.x; }
std::string group_text(Warp& w, const Wait& wait) {
  const WarpgroupQueue& queue = *w.cta->warpgroups[w.index / 4];
  return format("wgmma %llu of its warpgroup; %llu are complete, the warps have issued %llu %llu %llu %llu",
                static_cast<unsigned long long>(wait.x), static_cast<unsigned long long>(queue.completed),
                static_cast<unsigned long long>(queue.issued[0]), static_cast<unsigned long long>(queue.issued[1]),
                static_cast<unsigned long long>(queue.issued[2]), static_cast<unsigned long long>(queue.issued[3]));
}

void wait_group(Warp& w, const Instruction& in, uint32_t) {
  WarpgroupQueue& queue = queue_of(w);
  std::vector<uint64_t>& groups = queue.groups[w.index % 4];
  size_t keep = static_cast<size_t>(in.immediate);
  if (groups.size() <= keep) return;
  size_t last = groups.size() - keep - 1;
  Wait reason;
  reason.ready = group_ready;
  reason.describe = group_text;
  reason.x = groups[last];
  if (!group_ready(w, reason)) return w.block(reason, true);
  if (Races* races = races_of(w); races && groups[last] > 0) races->acquire(w, races->wgmma_done(*w.cta, w.index / 4, groups[last] - 1));
  if (w.watch) w.watch->waited(groups[last]);
  groups.erase(groups.begin(), groups.begin() + last + 1);
}

void fence(Warp& w, const Instruction&, uint32_t) {
  if (w.watch) w.watch->fence();
}

void decode_wgmma(Decoder& d) {
  if (d.part(1) == "fence") {
    d.in.execute = fence;
  } else if (d.part(1) == "commit_group") {
    d.in.execute = commit;
  } else if (d.part(1) == "wait_group") {
    d.in.immediate = d.integer(d.operand(0));
    d.in.execute = wait_group;
  } else {
    Wgmma op;
    if (!parse_wgmma(std::string(d.statement.opcode).c_str(), &op.spec)) d.fail("is a wgmma form not known here");
    std::vector<Slot> registers = d.slots_of(d.operand(0), 32, true);
    if (static_cast<int>(registers.size()) != op.spec.d_registers()) d.fail("has the wrong number of result registers");
    op.d_list = d.append(registers);
    op.a_in_registers = d.operand(1).kind == Parsed::kVector;
    if (op.a_in_registers) op.a_list = d.append(d.slots_of(d.operand(1), 32, false));
    else op.a = d.source(d.operand(1), 64);
    op.b = d.source(d.operand(2), 64);
    if (d.operands() > 3) op.scale_d = d.predicate_source(d.operand(3));
    if (d.operands() > 5) {
      op.spec.negate_a = d.integer(d.operand(4)) < 0;
      op.spec.negate_b = d.integer(d.operand(5)) < 0;
    }
    size_t at = 6;
    if (!op.a_in_registers && d.operands() > at) op.spec.a_major = d.integer(d.operand(at++)) ? Major::kMN : Major::kK;
    if (d.operands() > at) op.spec.b_major = d.integer(d.operand(at++)) ? Major::kMN : Major::kK;
    d.uses.clear();  // its registers are accessed later, not by the warp
    d.definitions.clear();
    d.in.extra = d.keep(op);
    d.in.execute = issue;
  }
}

// ---- mma.sync ------------------------------------------------------------------------------------------------------------------

struct MmaSync {
  MmaSyncSpec spec;
  uint32_t d, a, b, c;
};

void run_mma(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) throw Fault("mma.sync needs all lanes of the warp");
  const MmaSync& op = *static_cast<const MmaSync*>(in.extra);
  uint32_t* registers[4][16];
  auto collect = [&](int which, uint32_t list, int count) {
    for (int i = 0; i < count; ++i) registers[which][i] = row<uint32_t>(w, w.program->lists[list + i]);
  };
  collect(0, op.d, op.spec.d_registers());
  collect(1, op.a, op.spec.a_registers());
  collect(2, op.b, op.spec.b_registers());
  collect(3, op.c, op.spec.c_registers());
  mma_sync(op.spec, registers[0], registers[1], registers[2], registers[3]);
  w.cta->counters.mma_flop += uint64_t{2} * op.spec.m * op.spec.n * op.spec.k;
}

void decode_mma(Decoder& d) {
  MmaSync op;
  if (!parse_mma_sync(std::string(d.statement.opcode).c_str(), &op.spec)) d.fail("is an mma form not known here");
  const int counts[] = {op.spec.d_registers(), op.spec.a_registers(), op.spec.b_registers(), op.spec.c_registers()};
  uint32_t* lists[] = {&op.d, &op.a, &op.b, &op.c};
  for (int i = 0; i < 4; ++i) {
    std::vector<Slot> slots = d.slots_of(d.operand(i), 32, i == 0);
    if (static_cast<int>(slots.size()) != counts[i]) d.fail("has the wrong number of registers");
    *lists[i] = d.append(slots);
  }
  d.in.extra = d.keep(op);
  d.in.execute = run_mma;
}

}  // namespace

void register_matrix(Families& f) {
  f["wgmma"] = decode_wgmma;
  f["mma"] = decode_mma;
}

}  // namespace emulator
