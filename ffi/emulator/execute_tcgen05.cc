// The tcgen05 family.
//
// PTX ISA: "TensorCore 5th Generation Family Instructions": alloc, dealloc, relinquish_alloc_permit, ld, ld.red, st, wait, cp,
// shift, mma, commit, fence. Weight-stationary and sparse products are not known here. Products, copies and shifts go through the
// pipe of the issuing CTA in order (tensor_core.h); loads and stores of registers are asynchronous until their wait.
#include <cstring>

#include "bulk.h"
#include "decode.h"
#include "engines.h"
#include "machine.h"
#include "memory.h"
#include "tensor_core.h"

namespace emulator {
namespace {

Cta& peer_of(Warp& w) {
  Cluster& cluster = cluster_of(w);
  uint32_t rank = w.cta->rank ^ 1;
  if (rank >= cluster.ctas.size()) throw Fault("cta_group::2 in a cluster without pairs");
  return *cluster.ctas[rank];
}

uint32_t lane_value(Warp& w, Slot slot, int64_t offset, int lane) { return row<uint32_t>(w, slot)[lane] + static_cast<uint32_t>(offset); }

// ---- allocation ----------------------------------------------------------------------------------------------------------

struct AllocationWait {
  static bool ready(Warp& w, const Wait& wait) {
    TensorCore& core = *w.cta->tensor;
    return TensorCore::try_allocate(core, wait.x ? peer_of(w).tensor.get() : nullptr, w.tensor_request);
  }
  static std::string text(Warp& w, const Wait& wait) {
    std::string taken;
    for (auto& a : w.cta->tensor->allocations) taken += format(" %u..%u", a.column, a.column + a.columns - 1);
    return format("tcgen05.alloc of %llu columns%s; allocated:%s", static_cast<unsigned long long>(wait.y),
                  wait.x ? " with the peer CTA" : "", taken.empty() ? " none" : taken.c_str());
  }
};

void allocate(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) throw Fault("tcgen05.alloc needs all lanes of the warp");
  TensorCore& core = *w.cta->tensor;
  if (core.relinquished) throw Fault("tcgen05.alloc after tcgen05.relinquish_alloc_permit");
  uint32_t columns = row<uint32_t>(w, in.b)[0];
  if (columns < 32 || columns > 512 || (columns & (columns - 1))) throw Fault(format("tcgen05.alloc of %u columns", columns));
  uint64_t address = (in.option[5] ? row<uint64_t>(w, in.a)[0] : row<uint32_t>(w, in.a)[0]) + in.immediate;
  auto request = std::make_shared<TensorCore::Request>();
  request->columns = columns;
  request->result = locate_shared(w, static_cast<uint32_t>(address), 4, false);
  request->pair = in.option[0];
  request->warp = &w;
  request->in = &in;
  core.requests.push_back(request);
  w.tensor_request = request;
  note_progress(w);
  Wait reason;
  reason.ready = AllocationWait::ready;
  reason.describe = AllocationWait::text;
  reason.x = in.option[0];
  reason.y = columns;
  if (!AllocationWait::ready(w, reason)) w.block(reason, false);
}

void deallocate(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) throw Fault("tcgen05.dealloc needs all lanes of the warp");
  uint32_t address = row<uint32_t>(w, in.a)[0], columns = row<uint32_t>(w, in.b)[0];
  if (Races* races = races_of(w)) {
    races->write_tensor(races->thread(w), *w.cta, 0, kTmemLanes, static_cast<int>(address & 0xffff), static_cast<int>(columns), &in);
  }
  w.cta->tensor->deallocate(address & 0xffff, columns, in.option[0]);
  // With cta_group::2 the warps of both CTAs must perform it; each gives back its own columns when it does.
}

void relinquish(Warp& w, const Instruction&, uint32_t) { w.cta->tensor->relinquished = true; }

// ---- register transfers ----------------------------------------------------------------------------------------------------

struct Transfer {
  TmemTransfer shape;
  bool load;
  // .red: the reduction over each lane's loaded registers
  bool reduce = false, maximum = false, absolute = false, propagate_nan = false, is_float = false, is_signed = false;
  Slot reduced = kNoSlot;
};

struct Region2 {  // the words of a transfer, as at most two rectangles
  int lane, lanes, column, columns;
};

int regions_of(const TmemTransfer& shape, int lane, int column, Region2 out[2]) {
  int lanes = lanes_of(shape), columns = columns_of(shape);
  if (shape.shape == TmemShape::k16x32bx2) {
    out[0] = {lane, 16, column, columns};
    out[1] = {lane, 16, column + shape.half_split, columns};
    return 2;
  }
  out[0] = {lane, lanes, column, columns};
  return 1;
}

// The lane comes from the warp: it reaches only its own quarter. The address may name that quarter or leave it 0.
int first_lane_of(Warp& w, uint32_t address) {
  uint32_t lane = address >> 16, quarter = w.tensor_lane_base();
  if (lane / 32 * 32 != quarter && lane / 32 != 0) {
    throw Fault(format("warp %u reaches tensor memory lanes %u..%u, not lane %u", w.index, quarter, quarter + 31, lane));
  }
  return static_cast<int>(quarter + lane % 32);
}

void run_transfer(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) throw Fault("tensor memory transfers need all lanes of the warp");
  const Transfer& op = *static_cast<const Transfer*>(in.extra);
  uint32_t address = lane_value(w, in.a, in.immediate, 0);
  int lane = first_lane_of(w, address), column = static_cast<int>(address & 0xffff);
  Region2 regions[2];
  int count = regions_of(op.shape, lane, column, regions);
  TensorCore& core = *w.cta->tensor;
  const Slot* slots = &w.program->lists[in.list];
  int registers = in.count;
  uint64_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += uint64_t{4} * regions[i].lanes * regions[i].columns;
  Races* races = races_of(w);
  bool eager = grid_of(w).request->options.eager_tensor_loads;
  if (races) {
    bool as_thread = op.load && eager;
    uint32_t agent = as_thread ? races->thread(w) : op.load ? races->loads(w) : races->stores(w);
    if (!as_thread) races->advance(agent, races->view(w));
    for (int i = 0; i < count; ++i) {
      const Region2& r = regions[i];
      if (op.load) races->read_tensor(agent, *w.cta, r.lane, r.lanes, r.column, r.columns, &in);
      else races->write_tensor(agent, *w.cta, r.lane, r.lanes, r.column, r.columns, &in);
    }
  }
  if (w.watch && op.load && !eager) {
    w.watch->load(slots, registers);
    if (op.reduce) w.watch->load(&op.reduced, 1);
  }
  if (op.load) {
    auto load = [&w, &core, &op, slots, registers, regions, count, lane, column] {
      uint32_t* rows[128];
      for (int i = 0; i < registers; ++i) rows[i] = row<uint32_t>(w, slots[i]);
      for (int i = 0; i < count; ++i) core.check(regions[i].lane, regions[i].lanes, regions[i].column, regions[i].columns, true);
      load_tmem(op.shape, core.memory() + tmem_index(lane, column), rows);
      if (!op.reduce) return;
      FloatMode mode;
      mode.propagate_nan = op.propagate_nan;
      uint32_t* d = row<uint32_t>(w, op.reduced);
      for (int thread = 0; thread < kLanes; ++thread) {
        auto value = [&](int i) { return op.absolute ? rows[i][thread] & 0x7fffffffu : rows[i][thread]; };
        uint32_t result = value(0);
        for (int i = 1; i < registers; ++i) {
          uint32_t x = value(i);
          if (op.is_float) {
            float a = as_float(result), b = as_float(x);
            result = as_bits(op.maximum ? max_f32(a, b, mode) : min_f32(a, b, mode));
          } else {
            bool less = op.is_signed ? static_cast<int32_t>(x) < static_cast<int32_t>(result) : x < result;
            if (less != op.maximum) result = x;
          }
        }
        d[thread] = result;
      }
    };
    w.cta->counters.tensor_read += bytes;
    if (cluster_of(w).adversarial && !eager) {
      for (int i = 0; i < registers; ++i) std::memset(row<uint32_t>(w, slots[i]), 0xff, 4 * kLanes);
      ++w.tensor_loads;
      cluster_of(w).submit(std::make_unique<Steps>(issue_text(w, in), std::vector<std::function<void()>>{[=, &w] {
        load();
        --w.tensor_loads;
      }}));
    } else {
      load();
    }
  } else {
    auto values = std::make_shared<std::vector<uint32_t>>(size_t{kLanes} * registers);
    for (int i = 0; i < registers; ++i) std::memcpy(values->data() + i * kLanes, row<uint32_t>(w, slots[i]), 4 * kLanes);
    for (int i = 0; i < count; ++i) core.check(regions[i].lane, regions[i].lanes, regions[i].column, regions[i].columns, false);
    auto store = [&core, &op, values, registers, regions, count, lane, column] {
      const uint32_t* rows[128];
      for (int i = 0; i < registers; ++i) rows[i] = values->data() + i * kLanes;
      store_tmem(op.shape, core.memory() + tmem_index(lane, column), rows);
      for (int i = 0; i < count; ++i) core.mark(regions[i].lane, regions[i].lanes, regions[i].column, regions[i].columns);
    };
    w.cta->counters.tensor_written += bytes;
    note_progress(w);
    if (cluster_of(w).adversarial) {
      ++w.tensor_stores;
      cluster_of(w).submit(std::make_unique<Steps>(issue_text(w, in), std::vector<std::function<void()>>{[=, &w] {
        store();
        --w.tensor_stores;
      }}));
    } else {
      store();
    }
  }
}

bool transfers_ready(Warp& w, const Wait& wait) { return (wait.x ? w.tensor_loads : w.tensor_stores) == 0; }
std::string transfers_text(Warp&, const Wait& wait) { return wait.x ? "tcgen05 loads" : "tcgen05 stores"; }
void wait_transfers(Warp& w, const Instruction& in, uint32_t) {
  Wait reason;
  reason.ready = transfers_ready;
  reason.describe = transfers_text;
  reason.x = in.option[0];
  if (w.watch && in.option[0]) w.watch->loads_waited();
  if (Races* races = races_of(w)) races->wait_stream(w, in.option[0] ? races->loads(w) : races->stores(w));
  if (!transfers_ready(w, reason)) w.block(reason, false);
}

void decode_transfer(Decoder& d) {
  d.allow({"ld", "st", "red", "sync", "aligned", "16x64b", "16x128b", "16x256b", "32x32b", "16x32bx2", "x1", "x2", "x4", "x8", "x16",
           "x32", "x64", "x128", "pack::16b", "unpack::16b", "b32", "min", "max", "abs", "NaN", "f32", "u32", "s32"});
  static const std::unordered_map<std::string_view, TmemShape> shapes = {
      {"16x64b", TmemShape::k16x64b}, {"16x128b", TmemShape::k16x128b}, {"16x256b", TmemShape::k16x256b},
      {"32x32b", TmemShape::k32x32b}, {"16x32bx2", TmemShape::k16x32bx2}};
  Transfer op;
  op.load = d.part(1) == "ld";
  bool found = false;
  for (std::string_view part : d.statement.parts) {
    if (auto s = shapes.find(part); s != shapes.end()) op.shape.shape = s->second, found = true;
    if (part[0] == 'x' && part.size() > 1) op.shape.num = std::atoi(std::string(part.substr(1)).c_str());
  }
  if (!found) d.fail("has no shape");
  op.shape.half = d.has("pack::16b") || d.has("unpack::16b");
  op.reduce = d.has("red");
  size_t at = op.load ? (op.reduce ? 2 : 1) : 0;  // the address
  if (d.address(d.operand(at))) d.fail("needs a 32-bit tensor memory address");
  size_t value = op.load ? 0 : 1;
  if (op.shape.shape == TmemShape::k16x32bx2) {
    op.shape.half_split = static_cast<int>(d.integer(d.operand(at + 1)));
    if (!op.load) value = 2;
  }
  if (op.load) d.destinations(d.operand(value), 32); else d.sources(d.operand(value), 32);
  if (d.in.count != registers_of(op.shape)) d.fail("has the wrong number of registers");
  if (op.reduce) {
    op.maximum = d.has("max");
    op.absolute = d.has("abs");
    op.propagate_nan = d.has("NaN");
    op.is_float = d.last_part() == "f32";
    op.is_signed = d.last_part() == "s32";
    op.reduced = d.destination(d.operand(1), 32);
  }
  d.in.extra = d.keep(op);
  d.in.execute = run_transfer;
}

// ---- the pipe --------------------------------------------------------------------------------------------------------------

class PipeOperation : public Asynchronous {
 public:
  PipeOperation(TensorCore& core, std::string text, std::function<void()> step)
      : core_(core), sequence_(core.issued++), text_(std::move(text)), step_(std::move(step)) {}
  bool ready() const override { return core_.completed == sequence_; }
  bool step() override {
    step_();
    ++core_.completed;
    return true;
  }
  std::string describe() const override { return text_; }

 private:
  TensorCore& core_;
  uint64_t sequence_;
  std::string text_;
  std::function<void()> step_;
};

// `step` runs as the pipe of the issuing warp.
void enqueue(Warp& w, const Instruction& in, std::function<void(const Agent&)> step) {
  Agent agent{&cluster_of(w), 0, &in, Races::Proxy::kAsync};
  std::shared_ptr<Races::View> view;
  if (Races* races = agent.races()) {
    agent.number = races->pipe(w);
    view = std::make_shared<Races::View>(races->view(w));
  }
  cluster_of(w).submit(std::make_unique<PipeOperation>(*w.cta->tensor, issue_text(w, in), [=] {
    if (view) agent.races()->advance(agent.number, *view);
    step(agent);
  }));
}

void check_chunks(const Agent& agent, Cta& cta, const uint32_t* chunks, int count) {
  for (int i = 0; i < count; ++i) {
    if (chunks[i] < kSharedBase || chunks[i] + 16 > cta.shared_end) {
      throw Fault(format("a matrix descriptor leads to shared address 0x%x (rank %u), outside 0x%x..0x%x", chunks[i], cta.rank,
                         kSharedBase, cta.shared_end));
    }
    require_written({&cta, chunks[i]}, 16);
    note_read(agent, {&cta, chunks[i]}, 16);
  }
}

void check_tensor(const Agent& agent, Cta& cta, int lane, int lanes, int column, int columns, bool read, bool write) {
  cta.tensor->check(lane, lanes, column, columns, read);
  Races* races = agent.races();
  if (!races) return;
  if (read) races->read_tensor(agent.number, cta, lane, lanes, column, columns, agent.in);
  if (write) races->write_tensor(agent.number, cta, lane, lanes, column, columns, agent.in);
}

// ---- mma -------------------------------------------------------------------------------------------------------------------

struct Product {
  MmaKind kind = MmaKind::kF16;
  int cta_group = 1, scale_block = 0, scale_input = 0;
  bool a_in_tmem = false;
  Slot d = kNoSlot, a = kNoSlot, b = kNoSlot, descriptor = kNoSlot, scale_a = kNoSlot, scale_b = kNoSlot, accumulate = kNoSlot;
  int64_t d_offset = 0, a_offset = 0, scale_a_offset = 0, scale_b_offset = 0;
  Slot disabled[8];
  int disabled_count = 0;
};

MatrixDescriptor matrix_descriptor(uint64_t bits, const char* name) {
  MatrixDescriptor descriptor;
  if (!decode_tcgen05_descriptor(bits, &descriptor)) {
    throw Fault(format("tcgen05.mma: the shared memory descriptor of %s, 0x%016llx, is malformed", name, static_cast<unsigned long long>(bits)));
  }
  return descriptor;
}

void execute_product(const Agent& agent, const Tcgen05Mma& op, Cta* const* ctas) {
  static thread_local uint32_t chunks[kMaxMatrixChunks];
  int group = op.cta_group;
  CtaMemory memories[2];
  auto check = [&](const TmemRange* ranges, int count, bool read, bool write) {
    for (int i = 0; i < count; ++i) {
      const TmemRange& r = ranges[i];
      check_tensor(agent, *ctas[r.cta], r.lane, r.lanes, r.column, r.columns, read, write);
    }
  };
  TmemRange d[8], ranges[8];
  int d_count = tmem_ranges_d(op, d);
  check(d, d_count, op.accumulate, true);
  check(ranges, tmem_ranges_a(op, ranges), true, false);
  check(ranges, tmem_ranges_scale_a(op, ranges), true, false);
  check(ranges, tmem_ranges_scale_b(op, ranges), true, false);
  for (int i = 0; i < group; ++i) {
    int count = op.a_in_tmem ? 0 : shared_chunks_a(op, chunks);
    check_chunks(agent, *ctas[i], chunks, count);
    ctas[i]->counters.shared_read += 16u * count;
    count = shared_chunks_b(op, chunks);
    check_chunks(agent, *ctas[i], chunks, count);
    ctas[i]->counters.shared_read += 16u * count;
    memories[i] = {ctas[i]->shared.data(), ctas[i]->tensor->memory()};
  }
  tcgen05_mma(op, memories);
  for (int i = 0; i < d_count; ++i) ctas[d[i].cta]->tensor->mark(d[i].lane, d[i].lanes, d[i].column, d[i].columns);
  ++ctas[0]->counters.tensor_mma;
  ctas[0]->counters.mma_flop += uint64_t{2} * op.instruction.m * op.instruction.n * op.instruction.k;
}

void issue_product(Warp& w, const Instruction& in, uint32_t mask) {
  const Product& op = *static_cast<const Product*>(in.extra);
  for_lanes(mask, [&](int lane) {
    auto product = std::make_shared<Tcgen05Mma>();
    uint32_t bits = row<uint32_t>(w, op.descriptor)[lane];
    if (const char* why = decode_instruction_descriptor(bits, op.kind, op.cta_group, &product->instruction)) {
      throw Fault(format("tcgen05.mma: instruction descriptor 0x%08x: %s", bits, why));
    }
    product->cta_group = op.cta_group;
    product->scale_block = op.scale_block;
    product->scale_input_d = op.scale_input;
    product->a_in_tmem = op.a_in_tmem;
    if (op.a_in_tmem) product->a_tmem = lane_value(w, op.a, op.a_offset, lane);
    else product->a = matrix_descriptor(row<uint64_t>(w, op.a)[lane], "A");
    product->b = matrix_descriptor(row<uint64_t>(w, op.b)[lane], "B");
    product->d_tmem = lane_value(w, op.d, op.d_offset, lane);
    if (op.scale_a != kNoSlot) {
      product->scale_a_tmem = lane_value(w, op.scale_a, op.scale_a_offset, lane);
      product->scale_b_tmem = lane_value(w, op.scale_b, op.scale_b_offset, lane);
    }
    product->accumulate = op.accumulate == kNoSlot || (read_predicate(w, op.accumulate) >> lane & 1);
    for (int i = 0; i < op.disabled_count; ++i) product->disabled_lanes[i] = row<uint32_t>(w, op.disabled[i])[lane];
    Cta* first = w.cta;
    Cta* second = nullptr;
    if (op.cta_group == 2) {
      second = &peer_of(w);
      if (w.cta->rank & 1) std::swap(first, second);
    }
    enqueue(w, in, [=](const Agent& agent) {
      Cta* ctas[2] = {first, second};
      execute_product(agent, *product, ctas);
    });
  });
}

void decode_product(Decoder& d) {
  d.allow({"mma", "cta_group::1", "cta_group::2", "block_scale", "block16", "block32"}, {"kind::", "collector::", "scale_vec::"});
  static const std::unordered_map<std::string_view, MmaKind> kinds = {
      {"kind::f16", MmaKind::kF16}, {"kind::tf32", MmaKind::kTF32}, {"kind::f8f6f4", MmaKind::kF8F6F4}, {"kind::i8", MmaKind::kI8},
      {"kind::mxf8f6f4", MmaKind::kMXF8F6F4}, {"kind::mxf4", MmaKind::kMXF4}, {"kind::mxf4nvf4", MmaKind::kMXF4NVF4}};
  Product op;
  bool found = false;
  std::string qualifier;
  for (std::string_view part : d.statement.parts) {
    if (auto kind = kinds.find(part); kind != kinds.end()) op.kind = kind->second, found = true;
    if (part.substr(0, 11) == "scale_vec::") qualifier = part.substr(11);
    if (part == "block16" || part == "block32") qualifier = part;
  }
  if (!found) d.fail("has no kind known here");
  op.cta_group = d.has("cta_group::2") ? 2 : 1;
  if (d.address(d.operand(0), &op.d, &op.d_offset)) d.fail("needs 32-bit tensor memory addresses");
  op.a_in_tmem = d.operand(1).kind == Parsed::kAddress;
  if (op.a_in_tmem) d.address(d.operand(1), &op.a, &op.a_offset);
  else op.a = d.source(d.operand(1), 64);
  op.b = d.source(d.operand(2), 64);
  op.descriptor = d.source(d.operand(3), 32);
  size_t at = 4;
  if (is_block_scaled(op.kind)) {
    op.scale_block = scale_block_of(op.kind, qualifier.c_str());
    if (!op.scale_block) d.fail("has an illegal scale vector for its kind");
    d.address(d.operand(at++), &op.scale_a, &op.scale_a_offset);
    d.address(d.operand(at++), &op.scale_b, &op.scale_b_offset);
  } else if (d.operand(at).kind == Parsed::kVector) {
    std::vector<Slot> slots = d.slots_of(d.operand(at++), 32, false);
    if (slots.size() != static_cast<size_t>(4 * op.cta_group)) d.fail("has a disable-output-lane vector of the wrong length");
    op.disabled_count = static_cast<int>(slots.size());
    std::copy(slots.begin(), slots.end(), op.disabled);
  }
  op.accumulate = d.predicate_source(d.operand(at++));
  if (d.operands() > at) op.scale_input = static_cast<int>(d.integer(d.operand(at++)));
  d.in.extra = d.keep(op);
  d.in.execute = issue_product;
}

// ---- cp ----------------------------------------------------------------------------------------------------------------------

struct Copy {
  CopyShape shape = CopyShape::k128x256b;
  CopyFormat format = CopyFormat::kNone;
  int cta_group = 1;
};

void execute_copy(const Agent& agent, const Copy& op, Cta& cta, const MatrixDescriptor& descriptor, uint32_t address) {
  static thread_local uint32_t chunks[kMaxMatrixChunks];
  int count = matrix_chunks(descriptor, Major::kK, copy_rows(op.shape), copy_row_chunks(op.shape) * 16, 8, chunks);
  check_chunks(agent, cta, chunks, count);
  cta.counters.shared_read += 16u * count;
  int column = static_cast<int>(address & 0xffff), base = static_cast<int>(address >> 16), columns = 4 * copy_row_chunks(op.shape);
  TensorCore& core = *cta.tensor;
  for (int r = 0; r < copy_rows(op.shape); ++r) {
    int lanes[4];
    int n = copy_lanes(op.shape, r, lanes);
    for (int i = 0; i < n; ++i) {
      // The race check has cells of 16 lanes.
      if (r % 16 == 0 || copy_rows(op.shape) < 16) check_tensor(agent, cta, base + lanes[i], 1, column, columns, false, true);
      else core.check(base + lanes[i], 1, column, columns, false);
      core.mark(base + lanes[i], 1, column, columns);
    }
  }
  copy_to_tmem(op.shape, op.format, cta.shared.data(), chunks, core.memory() + tmem_index(base, column));
  cta.counters.tensor_written += 16u * count;
}

void issue_copy(Warp& w, const Instruction& in, uint32_t mask) {
  const Copy& op = *static_cast<const Copy*>(in.extra);
  for_lanes(mask, [&](int lane) {
    uint32_t address = lane_value(w, in.a, in.immediate, lane);
    MatrixDescriptor descriptor;
    if (!decode_tcgen05_descriptor(row<uint64_t>(w, in.b)[lane], &descriptor)) throw Fault("tcgen05.cp: the shared memory descriptor is malformed");
    Cta* own = w.cta;
    Cta* peer = op.cta_group == 2 ? &peer_of(w) : nullptr;
    enqueue(w, in, [=, &op](const Agent& agent) {
      execute_copy(agent, op, *own, descriptor, address);
      if (peer) execute_copy(agent, op, *peer, descriptor, address);
    });
  });
}

void decode_copy(Decoder& d) {
  d.allow({"cp", "cta_group::1", "cta_group::2", "128x256b", "4x256b", "128x128b", "64x128b", "32x128b", "warpx2::02_13",
           "warpx2::01_23", "warpx4", "b8x16", "b4x16_p64", "b6x16_p32"});
  Copy op;
  op.cta_group = d.has("cta_group::2") ? 2 : 1;
  op.shape = d.has("4x256b") ? CopyShape::k4x256b : d.has("128x128b") ? CopyShape::k128x128b
             : d.has("64x128b") ? (d.has("warpx2::02_13") ? CopyShape::k64x128bWarpx2_02_13 : CopyShape::k64x128bWarpx2_01_23)
             : d.has("32x128b") ? CopyShape::k32x128bWarpx4 : CopyShape::k128x256b;
  op.format = d.has("b4x16_p64") ? CopyFormat::kB4x16P64 : d.has("b6x16_p32") ? CopyFormat::kB6x16P32 : CopyFormat::kNone;
  d.address(d.operand(0));
  d.in.b = d.source(d.operand(1), 64);
  d.in.extra = d.keep(op);
  d.in.execute = issue_copy;
}

// ---- shift -------------------------------------------------------------------------------------------------------------------

// Shape .31x256b of "Data Movement Shape": of a warp's 32 lanes, 8 columns of each but the last move down, to the next lane.
// The text does not say what becomes of the first lane: it is not written.
void execute_shift(const Agent& agent, Cta& cta, uint32_t address) {
  constexpr int kMoved = 31, kColumns = 8;
  int column = static_cast<int>(address & 0xffff), lane = static_cast<int>(address >> 16);
  check_tensor(agent, cta, lane, kMoved, column, kColumns, true, false);
  check_tensor(agent, cta, lane + 1, kMoved, column, kColumns, false, true);
  for (int c = column; c < column + kColumns; ++c) {
    uint32_t* words = cta.tensor->memory() + tmem_index(lane, c);
    std::memmove(words + 1, words, sizeof(uint32_t) * kMoved);
  }
  cta.tensor->mark(lane + 1, kMoved, column, kColumns);
  cta.counters.tensor_read += sizeof(uint32_t) * kMoved * kColumns;
  cta.counters.tensor_written += sizeof(uint32_t) * kMoved * kColumns;
}

void issue_shift(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    uint32_t address = lane_value(w, in.a, in.immediate, lane);
    if (address >> 16 & 31) throw Fault(format("tcgen05.shift: lane %u of the address is no multiple of 32", address >> 16));
    Cta* own = w.cta;
    Cta* peer = in.option[0] ? &peer_of(w) : nullptr;
    enqueue(w, in, [=](const Agent& agent) {
      execute_shift(agent, *own, address);
      if (peer) execute_shift(agent, *peer, address);
    });
  });
}

// ---- commit, fences ------------------------------------------------------------------------------------------------------------

void commit(Warp& w, const Instruction& in, uint32_t mask) {
  Cluster& cluster = cluster_of(w);
  for_lanes(mask, [&](int lane) {
    uint32_t address = static_cast<uint32_t>((in.option[5] ? row<uint64_t>(w, in.a)[lane] : row<uint32_t>(w, in.a)[lane]) + in.immediate);
    std::vector<SharedPlace> barriers;
    if (in.b == kNoSlot) {
      barriers.push_back(locate_shared(w, address, 8, true));
    } else {
      uint32_t ctas = row<uint32_t>(w, in.b)[lane] & 0xffff;
      if (ctas == 0 || ctas >> cluster.ctas.size()) throw Fault(format("tcgen05.commit to CTAs 0x%x of a cluster of %zu", ctas, cluster.ctas.size()));
      for_lanes(ctas, [&](int rank) {
        barriers.push_back(locate_remote(cluster, static_cast<uint32_t>(rank) << 24 | (address & 0xffffff), 8));
      });
    }
    for (const SharedPlace& barrier : barriers) find_mbarrier(barrier);
    enqueue(w, in, [=](const Agent& agent) {
      for (const SharedPlace& barrier : barriers) {
        release_agent(agent, barrier);
        mbarrier_arrive(barrier, 1);
      }
    });
  });
}

void fence(Warp& w, const Instruction& in, uint32_t) {
  Races* races = races_of(w);
  if (!races) return;
  if (in.option[0]) races->before_thread_sync(w);
  else races->after_thread_sync(w);
}

void decode_tensor(Decoder& d) {
  d.program.uses_tensor_memory = true;
  std::string_view op = d.part(1);
  bool pair = d.has("cta_group::2");
  if (op == "ld" || op == "st") return decode_transfer(d);
  if (op == "cp") return decode_copy(d);
  if (op == "mma") {
    if (d.part(2) == "ws" || d.part(2) == "sp") d.fail("is a product not known here");
    return decode_product(d);
  }
  if (op == "alloc") {
    d.in.option[5] = d.address(d.operand(0));
    d.in.b = d.source(d.operand(1), 32);
    d.in.option[0] = pair;
    d.in.execute = allocate;
  } else if (op == "dealloc") {
    d.in.a = d.source(d.operand(0), 32);
    d.in.b = d.source(d.operand(1), 32);
    d.in.option[0] = pair;
    d.in.execute = deallocate;
  } else if (op == "relinquish_alloc_permit") {
    d.in.execute = relinquish;
  } else if (op == "wait::ld" || op == "wait::st") {
    d.in.option[0] = op == "wait::ld";
    d.in.execute = wait_transfers;
  } else if (d.has("shift")) {
    d.allow({"shift", "down", "cta_group::1", "cta_group::2"});
    if (d.address(d.operand(0))) d.fail("needs a 32-bit tensor memory address");
    d.in.option[0] = pair;
    d.in.execute = issue_shift;
  } else if (op == "commit") {
    d.allow({"commit", "cta_group::1", "cta_group::2", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64"});
    d.in.option[5] = d.address(d.operand(0));
    if (d.has("multicast::cluster")) d.in.b = d.source(d.operand(1), 16);
    d.in.execute = commit;
  } else if (op == "fence::before_thread_sync" || op == "fence::after_thread_sync") {
    d.in.option[0] = op == "fence::before_thread_sync";
    d.in.execute = fence;
  }
}

}  // namespace

void register_tensor(Families& f) { f["tcgen05"] = decode_tensor; }

}  // namespace emulator
