// Asynchronous copies: cp.async, bulk copies and reductions, tensor copies, st.async and red.async, and cluster launch control.
//
// PTX ISA: "cp.async", "cp.async.bulk", "cp.reduce.async.bulk", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor",
// "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "st.async", "red.async", "tensormap.replace",
// "tensormap.cp_fenceproxy", "clusterlaunchcontrol". A copy is a list of steps (engines.h): read the source, write the
// destination, signal. Bulk groups belong to a thread.
#include <cstring>

#include "bulk.h"
#include "decode.h"
#include "engines.h"
#include "machine.h"
#include "memory.h"
#include "tensor_map.h"

namespace emulator {

std::string issue_text(const Warp& w, const Instruction& in) {
  size_t index = &in - w.program->code.data();
  std::string text(w.program->text[index].substr(0, 120));
  return format("%s, warp %u, PTX line %u: %s", w.cta->name().c_str(), w.index, in.line, text.c_str());
}

LaneBulk& lane_bulk(Warp& w, int lane) {
  auto& bulk = w.bulk[lane];
  if (!bulk) bulk = std::make_unique<LaneBulk>();
  return *bulk;
}

std::shared_ptr<BulkGroup> open_group(Warp& w, int lane) {
  LaneBulk& bulk = lane_bulk(w, lane);
  if (!bulk.open) bulk.open = std::make_shared<BulkGroup>();
  return bulk.open;
}

namespace {

uint64_t lane_address(Warp& w, Slot slot, bool wide, int64_t offset, int lane) {
  return (wide ? row<uint64_t>(w, slot)[lane] : row<uint32_t>(w, slot)[lane]) + static_cast<uint64_t>(offset);
}

// ---- groups --------------------------------------------------------------------------------------------------------------

void commit(Warp& w, const Instruction&, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    LaneBulk& bulk = lane_bulk(w, lane);
    bulk.committed.push_back(bulk.open ? std::move(bulk.open) : std::make_shared<BulkGroup>());
    bulk.open = nullptr;
  });
}

bool lane_done(LaneBulk& bulk, uint64_t newest, bool read) {
  for (size_t i = 0; i + newest < bulk.committed.size(); ++i) {
    const BulkGroup& group = *bulk.committed[i];
    if ((read ? group.reading : group.pending) > 0) return false;
  }
  return true;
}
bool groups_ready(Warp& w, const Wait& wait) {
  bool all = true;
  for_lanes(static_cast<uint32_t>(wait.y), [&](int lane) {
    if (w.bulk[lane]) all &= lane_done(*w.bulk[lane], wait.x, wait.z);
  });
  return all;
}
std::string groups_text(Warp&, const Wait& wait) {
  return format("bulk groups (all but the newest %llu)%s", static_cast<unsigned long long>(wait.x), wait.z ? " to be read" : "");
}

void wait_groups(Warp& w, const Instruction& in, uint32_t mask) {
  Wait reason;
  reason.ready = groups_ready;
  reason.describe = groups_text;
  reason.x = static_cast<uint64_t>(in.immediate);
  reason.y = mask;
  reason.z = in.option[0];
  if (!groups_ready(w, reason)) return w.block(reason, true);
  for_lanes(mask, [&](int lane) {
    if (!w.bulk[lane]) return;
    auto& committed = w.bulk[lane]->committed;
    for (size_t i = 0; i + reason.x < committed.size(); ++i) {
      committed[i]->acknowledged = true;
      acquire_group(w, *committed[i]);
    }
    while (!committed.empty() && committed.front()->acknowledged && committed.front()->pending == 0) committed.pop_front();
  });
}

// ---- non-tensor bulk copies ------------------------------------------------------------------------------------------------

enum class End : uint8_t { kGlobal, kShared };

struct Bulk {
  End from, to;
  bool reduce = false, to_mbarrier = false, multicast = false, remote = false;
  bool has_byte_mask = false;
  Reduction reduction = Reduction::kAdd;
  TensorType type = TensorType::kU8;
  // Operands: destination, source, size, mbarrier, CTA mask, byte mask.
  Slot slots[3] = {kNoSlot, kNoSlot, kNoSlot};
  int64_t offsets[3] = {};
  bool wide[3] = {};
  Slot size = kNoSlot, ctas = kNoSlot, bytes = kNoSlot;
};

void run_bulk(Warp& w, const Instruction& in, uint32_t mask) {
  const Bulk& op = *static_cast<const Bulk*>(in.extra);
  Cluster& cluster = cluster_of(w);
  for_lanes(mask, [&](int lane) {
    uint32_t size = row<uint32_t>(w, op.size)[lane];
    uint64_t to = lane_address(w, op.slots[0], op.wide[0], op.offsets[0], lane);
    uint64_t from = lane_address(w, op.slots[1], op.wide[1], op.offsets[1], lane);
    if (size % 16 || to % 16 || from % 16) {
      throw Fault(format("bulk copy of %u bytes from 0x%llx to 0x%llx: all must be multiples of 16", size,
                         static_cast<unsigned long long>(from), static_cast<unsigned long long>(to)));
    }
    std::vector<CopyTarget> targets;
    if (op.to == End::kShared) {
      uint32_t barrier = static_cast<uint32_t>(lane_address(w, op.slots[2], op.wide[2], op.offsets[2], lane));
      targets = copy_targets(w, static_cast<uint32_t>(to), size, barrier, op.remote,
                             op.multicast ? row<uint32_t>(w, op.ctas)[lane] : 0, op.multicast, 1);
    }
    auto buffer = std::make_shared<std::vector<uint8_t>>();
    std::shared_ptr<BulkGroup> group;
    if (!op.to_mbarrier) {
      group = open_group(w, lane);
      ++group->reading, ++group->pending;
      group->used = true;
    }
    Agent agent = start_agent(w, in, lane);
    Cta* cta = w.cta;
    uint16_t bytes = op.has_byte_mask ? static_cast<uint16_t>(row<uint32_t>(w, op.bytes)[lane]) : 0xffff;
    auto read = [=, &cluster, &op] {
      const uint8_t* source;
      if (op.from == End::kGlobal) {
        source = check_global(*cluster.grid, from, size, false);
      } else {
        SharedPlace place = shared_place(*cta, static_cast<uint32_t>(from), size);
        require_written(place, size);
        note_read(agent, place, size);
        source = place.host();
      }
      buffer->assign(source, source + size);
      cta->counters.bulk_copied += size;
      if (group) finish_reading(agent, *group);
    };
    auto write = [=, &cluster, &op] {
      if (op.to == End::kGlobal) {
        uint8_t* destination = check_global(*cluster.grid, to, size, true);
        if (op.reduce) {
          std::lock_guard<std::mutex> lock(global_atomics());
          reduce_span(op.type, op.reduction, destination, buffer->data(), static_cast<int>(size * 8 / bits_of(op.type)));
        } else if (op.has_byte_mask) {
          for (uint32_t i = 0; i < size; ++i) if (bytes >> (i % 16) & 1) destination[i] = (*buffer)[i];
        } else {
          std::memcpy(destination, buffer->data(), size);
        }
        return;
      }
      for (const CopyTarget& target : targets) {
        if (op.reduce) {
          require_written(target.place, size);
          reduce_span(op.type, op.reduction, target.place.host(), buffer->data(), static_cast<int>(size * 8 / bits_of(op.type)));
        } else {
          mark_written(target.place, size);
          std::memcpy(target.place.host(), buffer->data(), size);
        }
        note_write(agent, target.place, size);
      }
    };
    auto signal = [=] {
      for (const CopyTarget& target : targets) complete_copy(agent, target.barrier, size);
      if (group) finish_group(agent, *group);
    };
    cluster.submit(std::make_unique<Steps>(issue_text(w, in), std::vector<std::function<void()>>{read, write, signal}));
  });
}

bool parse_reduction(Decoder& d, Reduction* reduction, TensorType* type) {
  static const std::unordered_map<std::string_view, Reduction> reductions = {
      {"add", Reduction::kAdd}, {"min", Reduction::kMin}, {"max", Reduction::kMax}, {"inc", Reduction::kInc},
      {"dec", Reduction::kDec}, {"and", Reduction::kAnd}, {"or", Reduction::kOr}, {"xor", Reduction::kXor}};
  static const std::unordered_map<std::string_view, TensorType> types = {
      {"u8", TensorType::kU8}, {"u16", TensorType::kU16}, {"u32", TensorType::kU32}, {"b32", TensorType::kU32},
      {"s32", TensorType::kS32}, {"u64", TensorType::kU64}, {"b64", TensorType::kU64}, {"s64", TensorType::kS64},
      {"f16", TensorType::kF16}, {"bf16", TensorType::kBF16}, {"f32", TensorType::kF32}, {"f64", TensorType::kF64}};
  bool found = false;
  for (std::string_view part : d.statement.parts) {
    if (auto r = reductions.find(part); r != reductions.end()) *reduction = r->second, found = true;
    if (auto t = types.find(part); type && t != types.end()) *type = t->second;
  }
  return found;
}

// cp{.reduce}.async.bulk.dst.src.completion ... [dst], [src], size{, [mbar]}{, mask}{, policy}{, bytes}
void decode_bulk(Decoder& d) {
  d.allow({"reduce", "async", "bulk", "shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "bulk_group",
           "multicast::cluster", "cp_mask", "noftz", "add", "min", "max", "inc", "dec", "and", "or", "xor", "f16", "bf16", "b32",
           "u32", "s32", "b64", "u64", "s64", "f32", "f64", "relaxed", "cluster"}, {"L2::"});
  Bulk op;
  op.reduce = d.part(1) == "reduce";
  size_t first = op.reduce ? 4 : 3;
  std::string_view to = d.part(first), from = d.part(first + 1);
  op.to = to == "global" ? End::kGlobal : End::kShared;
  op.from = from == "global" ? End::kGlobal : End::kShared;
  op.remote = to == "shared::cluster";
  op.to_mbarrier = d.has("mbarrier::complete_tx::bytes");
  op.multicast = d.has("multicast::cluster");
  op.has_byte_mask = d.has("cp_mask");
  if (op.to_mbarrier != (op.to == End::kShared)) d.fail("has the wrong completion mechanism");
  if (op.reduce && !parse_reduction(d, &op.reduction, &op.type)) d.fail("has no reduction");
  op.wide[0] = d.address(d.operand(0), &op.slots[0], &op.offsets[0]);
  op.wide[1] = d.address(d.operand(1), &op.slots[1], &op.offsets[1]);
  op.size = d.source(d.operand(2), 32);
  size_t at = 3;
  if (op.to_mbarrier) op.wide[2] = d.address(d.operand(at++), &op.slots[2], &op.offsets[2]);
  if (op.multicast) op.ctas = d.source(d.operand(at++), 16);
  if (d.has("L2::cache_hint")) ++at;
  if (op.has_byte_mask) op.bytes = d.source(d.operand(at++), 16);
  if (op.reduce && op.to == End::kGlobal && op.type >= TensorType::kF16) d.program.global_float_atomics = true;
  d.in.extra = d.keep(op);
  d.in.execute = run_bulk;
}

// st.async and red.async{...}.shared::cluster.mbarrier::complete_tx::bytes{.op}{.vec}.type [address], value, [mbarrier]: a store
// into, or a relaxed reduction of, memory of a CTA of the cluster that its mbarrier counts. Both belong to the generic proxy.
void run_store_async(Warp& w, const Instruction& in, uint32_t mask) {
  const Bulk& op = *static_cast<const Bulk*>(in.extra);
  for_lanes(mask, [&](int lane) {
    uint32_t size = in.size * in.count;
    uint64_t to = lane_address(w, op.slots[0], op.wide[0], op.offsets[0], lane);
    if (to % size) throw Fault(format("misaligned %s at 0x%llx", op.reduce ? "red.async" : "st.async", static_cast<unsigned long long>(to)));
    uint32_t barrier = static_cast<uint32_t>(lane_address(w, op.slots[2], op.wide[2], op.offsets[2], lane));
    std::vector<CopyTarget> targets = copy_targets(w, static_cast<uint32_t>(to), size, barrier, true, 0, false, 1);
    auto bytes = std::make_shared<std::vector<uint8_t>>(size);
    for (int i = 0; i < in.count; ++i) {
      Slot slot = w.program->lists[in.list + i];
      uint64_t value = in.size == 8 ? row<uint64_t>(w, slot)[lane] : row<uint32_t>(w, slot)[lane];
      std::memcpy(bytes->data() + i * in.size, &value, in.size);
    }
    Agent agent = start_agent(w, in, lane, Races::Proxy::kGeneric);
    CopyTarget target = targets[0];
    auto write = [=, &op] {
      if (op.reduce) {
        require_written(target.place, size);
        if (Races* races = agent.races()) {  // as run_atomic does
          Clock& cell = races->atomic_cell(*target.place.cta, target.place.offset & ~3u);
          races->clock(agent.number).join(cell);
          cell.join(races->clock(agent.number));
        }
        reduce_span(op.type, op.reduction, target.place.host(), bytes->data(), 1);
        return;
      }
      mark_written(target.place, size);
      note_write(agent, target.place, size);
      std::memcpy(target.place.host(), bytes->data(), size);
    };
    auto signal = [=] { complete_copy(agent, target.barrier, size); };
    cluster_of(w).submit(std::make_unique<Steps>(issue_text(w, in), std::vector<std::function<void()>>{write, signal}));
  });
}

// ---- tensor copies -------------------------------------------------------------------------------------------------------------

struct TensorCopy {
  int rank = 0;
  bool load = true, reduce = false, multicast = false, remote = false;
  int cta_group = 1;
  Reduction reduction = Reduction::kAdd;
  Slot map = kNoSlot, shared = kNoSlot, barrier = kNoSlot, ctas = kNoSlot;
  int64_t map_offset = 0, shared_offset = 0, barrier_offset = 0;
  bool map_wide = false, shared_wide = false, barrier_wide = false;
  Slot coordinates[5] = {};
};

void run_tensor(Warp& w, const Instruction& in, uint32_t mask) {
  const TensorCopy& op = *static_cast<const TensorCopy*>(in.extra);
  Cluster& cluster = cluster_of(w);
  for_lanes(mask, [&](int lane) {
    uint64_t map_address = lane_address(w, op.map, op.map_wide, op.map_offset, lane);
    auto map = std::make_shared<TensorMap>();
    if (map_address % 64) throw Fault(format("tensor map at 0x%llx is not aligned to 64 bytes", static_cast<unsigned long long>(map_address)));
    if (!decode_tensor_map(check_global(*cluster.grid, map_address, 128, false), map.get())) throw Fault("the tensor map is malformed");
    if (map->rank != op.rank) throw Fault(format("a %d-dimensional copy with a tensor map of rank %d", op.rank, map->rank));
    std::array<int32_t, 5> at{};
    for (int i = 0; i < op.rank; ++i) at[i] = static_cast<int32_t>(row<uint32_t>(w, op.coordinates[i])[lane]);
    uint32_t bytes = map->box_bytes();
    uint32_t shared = static_cast<uint32_t>(lane_address(w, op.shared, op.shared_wide, op.shared_offset, lane));
    if (shared % 128) throw Fault(format("tensor copy with shared address 0x%x, which is not aligned to 128 bytes", shared));
    Agent agent = start_agent(w, in, lane);
    Cta* cta = w.cta;
    std::vector<std::function<void()>> steps;
    if (op.load) {
      uint32_t barrier = static_cast<uint32_t>(lane_address(w, op.barrier, op.barrier_wide, op.barrier_offset, lane));
      std::vector<CopyTarget> targets = copy_targets(w, shared, bytes, barrier, op.remote,
                                                     op.multicast ? row<uint32_t>(w, op.ctas)[lane] : 0, op.multicast, op.cta_group);
      check_box(*cluster.grid, *map, at.data(), false);
      steps.push_back([=] {
        for (const CopyTarget& target : targets) {
          mark_box(agent, *map, at.data(), target.place);
          load_box(*map, at.data(), target.place.cta->shared.data(), target.place.offset);
          target.place.cta->counters.tma_loaded += bytes;
        }
      });
      steps.push_back([=] { for (const CopyTarget& target : targets) complete_copy(agent, target.barrier, bytes); });
    } else {
      SharedPlace place = locate_shared(w, shared, bytes, false);
      check_box(*cluster.grid, *map, at.data(), true);
      std::shared_ptr<BulkGroup> group = open_group(w, lane);
      ++group->reading, ++group->pending;
      group->used = true;
      // The box as it lies in shared memory, at an address with the same low bits, because swizzling depends on them.
      auto copy = std::make_shared<std::vector<uint8_t>>();
      uint32_t low = place.offset & ~1023u;
      steps.push_back([=] {
        require_box(agent, *map, at.data(), place);
        uint32_t end = std::min<uint32_t>((place.offset + bytes + 1023) & ~1023u, static_cast<uint32_t>(place.cta->shared.size()));
        copy->assign(place.cta->shared.data() + low, place.cta->shared.data() + end);
        cta->counters.tma_stored += bytes;
        finish_reading(agent, *group);
      });
      steps.push_back([=, &op] {
        const uint8_t* base = copy->data();
        if (op.reduce) {
          std::lock_guard<std::mutex> lock(global_atomics());
          reduce_box(*map, at.data(), base, place.offset - low, op.reduction);
        } else {
          store_box(*map, at.data(), base, place.offset - low);
        }
        finish_group(agent, *group);
      });
    }
    cluster.submit(std::make_unique<Steps>(issue_text(w, in), std::move(steps)));
  });
}

// cp{.reduce}.async.bulk.tensor.Nd.dst.src{.tile}.completion ... loads: [dst], [map, {c}], [mbar]{, mask}{, policy};
// stores: [map, {c}], [src]{, policy}
void decode_tensor_copy(Decoder& d) {
  d.allow({"reduce", "async", "bulk", "tensor", "1d", "2d", "3d", "4d", "5d", "shared::cluster", "shared::cta", "global", "tile",
           "mbarrier::complete_tx::bytes", "bulk_group", "multicast::cluster", "cta_group::1", "cta_group::2", "add", "min", "max",
           "inc", "dec", "and", "or", "xor"}, {"L2::"});
  TensorCopy op;
  op.reduce = d.part(1) == "reduce";
  for (std::string_view part : d.statement.parts) if (part.size() == 2 && part[1] == 'd') op.rank = part[0] - '0';
  op.load = d.has("mbarrier::complete_tx::bytes");
  op.remote = d.has("shared::cluster");
  op.multicast = d.has("multicast::cluster");
  op.cta_group = d.has("cta_group::2") ? 2 : 1;
  if (op.reduce && !parse_reduction(d, &op.reduction, nullptr)) d.fail("has no reduction");
  const Parsed& tensor = d.operand(op.load ? 1 : 0);
  if (tensor.kind != Parsed::kAddress || tensor.elements.size() != 2 ||
      tensor.elements[1].elements.size() != static_cast<size_t>(op.rank)) {
    d.fail("needs [map, {coordinates}]");
  }
  op.map_wide = d.address(tensor, &op.map, &op.map_offset);
  for (int i = 0; i < op.rank; ++i) op.coordinates[i] = d.source(tensor.elements[1].elements[i], 32);
  op.shared_wide = d.address(d.operand(op.load ? 0 : 1), &op.shared, &op.shared_offset);
  if (op.load) {
    op.barrier_wide = d.address(d.operand(2), &op.barrier, &op.barrier_offset);
    if (op.multicast) op.ctas = d.source(d.operand(3), 16);
  } else if (op.reduce) {
    d.program.global_float_atomics = true;  // the element type is in the map
  }
  d.in.extra = d.keep(op);
  d.in.execute = run_tensor;
}

// ---- cp.async --------------------------------------------------------------------------------------------------------------------

// cp.async.{ca,cg}.shared.global [dst], [src], size{, src-size}: in.immediate/in.offset via in.extra.
struct SmallCopy {
  Slot to, from, used = kNoSlot;
  int64_t to_offset, from_offset;
  bool to_wide, from_wide;
  uint32_t size;
  bool ignore = false;  // `used` is a predicate: true reads nothing
};

void run_small(Warp& w, const Instruction& in, uint32_t mask) {
  const SmallCopy& op = *static_cast<const SmallCopy*>(in.extra);
  Cluster& cluster = cluster_of(w);
  for_lanes(mask, [&](int lane) {
    uint32_t to = static_cast<uint32_t>(lane_address(w, op.to, op.to_wide, op.to_offset, lane));
    uint64_t from = lane_address(w, op.from, op.from_wide, op.from_offset, lane);
    uint32_t used = op.size;
    if (op.ignore) used = read_predicate(w, op.used) >> lane & 1 ? 0 : op.size;
    else if (op.used != kNoSlot) used = row<uint32_t>(w, op.used)[lane];
    if (used > op.size || to % op.size || (used && from % op.size)) throw Fault("cp.async: misaligned, or more source than copied bytes");
    SharedPlace place = locate_shared(w, to, op.size, false);
    Agent agent = start_agent(w, in, lane, Races::Proxy::kGeneric);
    // Groups of cp.async are counted apart from bulk groups.
    std::shared_ptr<BulkGroup> group = open_small_group(w, lane);
    ++group->pending;
    auto copy = [=, &cluster, &op] {
      uint8_t bytes[16] = {};
      if (used) std::memcpy(bytes, check_global(*cluster.grid, from, used, false), used);
      mark_written(place, op.size);
      note_write(agent, place, op.size);
      std::memcpy(place.host(), bytes, op.size);
      finish_group(agent, *group);
    };
    cluster.submit(std::make_unique<Steps>(issue_text(w, in), std::vector<std::function<void()>>{copy}));
  });
}

void commit_small(Warp& w, const Instruction&, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    LaneBulk& bulk = lane_bulk(w, lane);
    bulk.small_committed.push_back(bulk.small_open ? std::move(bulk.small_open) : std::make_shared<BulkGroup>());
    bulk.small_open = nullptr;
  });
}

bool small_ready(Warp& w, const Wait& wait) {
  bool all = true;
  for_lanes(static_cast<uint32_t>(wait.y), [&](int lane) {
    if (!w.bulk[lane]) return;
    auto& committed = w.bulk[lane]->small_committed;
    for (size_t i = 0; i + wait.x < committed.size(); ++i) all &= committed[i]->pending == 0;
  });
  return all;
}
std::string small_text(Warp&, const Wait&) { return "cp.async groups"; }

void wait_small(Warp& w, const Instruction& in, uint32_t mask) {
  if (in.option[0]) commit_small(w, in, mask);  // wait_all
  Wait reason;
  reason.ready = small_ready;
  reason.describe = small_text;
  reason.x = static_cast<uint64_t>(in.immediate);
  reason.y = mask;
  if (!small_ready(w, reason)) return w.block(reason, !in.option[0]);
  for_lanes(mask, [&](int lane) {
    if (!w.bulk[lane]) return;
    auto& committed = w.bulk[lane]->small_committed;
    while (committed.size() > reason.x) {
      acquire_group(w, *committed.front());
      committed.pop_front();
    }
  });
}

// cp.async.mbarrier.arrive{.noinc}: an arrival once all earlier cp.async of the thread are complete.
void arrive_small(Warp& w, const Instruction& in, uint32_t mask) {
  Cluster& cluster = cluster_of(w);
  for_lanes(mask, [&](int lane) {
    SharedPlace place = locate_shared(w, static_cast<uint32_t>(lane_address(w, in.a, in.option[5], in.immediate, lane)), 8, false);
    Mbarrier& barrier = find_mbarrier(place);
    if (!in.option[0]) ++barrier.pending;  // without .noinc the arrival is not among the expected ones
    LaneBulk& bulk = lane_bulk(w, lane);
    std::vector<std::shared_ptr<BulkGroup>> before(bulk.small_committed.begin(), bulk.small_committed.end());
    if (bulk.small_open) before.push_back(bulk.small_open);
    Agent agent = start_agent(w, in, lane, Races::Proxy::kGeneric);
    class Arrival : public Steps {
     public:
      using Steps::Steps;
      std::vector<std::shared_ptr<BulkGroup>> before;
      bool ready() const override {
        for (auto& group : before) if (group->pending) return false;
        return true;
      }
    };
    auto arrival = std::make_unique<Arrival>(issue_text(w, in), std::vector<std::function<void()>>{[=] { arrive_after(agent, before, place); }});
    arrival->before = before;
    cluster.submit(std::move(arrival));
  });
}

void decode_small(Decoder& d) {
  if (d.has("commit_group")) {
    d.in.execute = commit_small;
  } else if (d.has("wait_group") || d.has("wait_all")) {
    d.in.option[0] = d.has("wait_all");
    if (!d.has("wait_all")) d.in.immediate = d.integer(d.operand(0));
    d.in.execute = wait_small;
  } else if (d.has("mbarrier")) {
    d.in.option[0] = d.has("noinc");
    d.in.option[5] = d.address(d.operand(0));
    d.in.execute = arrive_small;
  } else {
    d.allow({"async", "ca", "cg", "shared", "shared::cta", "global"}, {"L2::"});
    SmallCopy op;
    op.to_wide = d.address(d.operand(0), &op.to, &op.to_offset);
    op.from_wide = d.address(d.operand(1), &op.from, &op.from_offset);
    op.size = static_cast<uint32_t>(d.integer(d.operand(2)));
    size_t extras = d.operands() - 3 - d.has("L2::cache_hint");
    if (extras) {
      op.ignore = d.is_predicate(d.operand(3));
      op.used = op.ignore ? d.predicate_source(d.operand(3)) : d.source(d.operand(3), 32);
    }
    if (op.size != 4 && op.size != 8 && op.size != 16) d.fail("copies 4, 8 or 16 bytes");
    d.in.extra = d.keep(op);
    d.in.execute = run_small;
  }
}

void nothing(Warp&, const Instruction&, uint32_t) {}

void decode_cp(Decoder& d) {
  if (d.has("prefetch")) {
    d.in.execute = nothing;
  } else if (!d.has("bulk")) {
    decode_small(d);
  } else if (d.has("commit_group")) {
    d.in.execute = commit;
  } else if (d.has("wait_group")) {
    d.in.immediate = d.integer(d.operand(0));
    d.in.option[0] = d.has("read");
    d.in.execute = wait_groups;
  } else if (d.has("tensor")) {
    decode_tensor_copy(d);
  } else {
    decode_bulk(d);
  }
}

// ---- tensor maps in memory ---------------------------------------------------------------------------------------------------

struct MapUpdate {
  MapField field = MapField::kGlobalAddress;
  int ordinal = 0;
  Slot value = kNoSlot;  // or the immediate
  uint64_t immediate = 0;
  bool wide = false, shared = false, global = false;
};

// The 128 bytes of a map in shared or global memory, as an access of the generic proxy.
uint8_t* map_bytes(Warp& w, const Instruction& in, uint64_t address, bool shared, int lane, bool write) {
  if (address % 64) throw Fault(format("tensor map at 0x%llx is not aligned to 64 bytes", static_cast<unsigned long long>(address)));
  if (!shared) return check_global(grid_of(w), address, sizeof(TensorMapBits), write);
  SharedPlace place = locate_shared(w, static_cast<uint32_t>(address), sizeof(TensorMapBits), false);
  require_written(place, sizeof(TensorMapBits));
  if (Races* races = races_of(w)) {
    if (write) races->write(races->thread(w), *place.cta, place.offset, sizeof(TensorMapBits), Races::Proxy::kGeneric, &in);
    else races->read(races->thread(w), *place.cta, place.offset, sizeof(TensorMapBits), Races::Proxy::kGeneric, &in);
    races->touch(w, 1u << lane);
  }
  return place.host();
}

void replace_map_field(Warp& w, const Instruction& in, uint32_t mask) {
  const MapUpdate& op = *static_cast<const MapUpdate*>(in.extra);
  for_lanes(mask, [&](int lane) {
    uint64_t address = lane_address(w, in.a, in.option[5], in.immediate, lane);
    bool shared = op.shared || (!op.global && address >> 32 == kSharedWindow >> 32);
    uint64_t value = op.value == kNoSlot ? op.immediate : op.wide ? row<uint64_t>(w, op.value)[lane] : row<uint32_t>(w, op.value)[lane];
    if (const char* why = replace_field(map_bytes(w, in, address, shared, lane, true), op.field, op.ordinal, value)) {
      throw Fault(format("tensormap.replace: %s", why));
    }
  });
  note_progress(w);
}

// tensormap.cp_fenceproxy: a warp copies a map from shared to global memory. Its fence of the tensormap proxy is not modelled.
void copy_map(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) throw Fault("tensormap.cp_fenceproxy needs all lanes of the warp");
  const Bulk& op = *static_cast<const Bulk*>(in.extra);
  const uint8_t* from = map_bytes(w, in, lane_address(w, op.slots[1], op.wide[1], op.offsets[1], 0), true, 0, false);
  std::memcpy(map_bytes(w, in, lane_address(w, op.slots[0], op.wide[0], op.offsets[0], 0), false, 0, true), from, sizeof(TensorMapBits));
  note_progress(w);
}

// tensormap.replace.tile.field{.space}.b1024.type [address], {ordinal,} value
void decode_map_replace(Decoder& d) {
  static const std::unordered_map<std::string_view, MapField> fields = {
      {"global_address", MapField::kGlobalAddress}, {"rank", MapField::kRank}, {"box_dim", MapField::kBoxDim},
      {"global_dim", MapField::kGlobalDim}, {"global_stride", MapField::kGlobalStride},
      {"element_stride", MapField::kElementStride}, {"elemtype", MapField::kElementType},
      {"interleave_layout", MapField::kInterleave}, {"swizzle_mode", MapField::kSwizzleMode},
      {"swizzle_atomicity", MapField::kSwizzleAtomicity}, {"fill_mode", MapField::kFillMode}};
  d.allow({"replace", "tile", d.part(3), "global", "shared::cta", "b1024", "b32", "b64"});
  auto field = fields.find(d.part(3));
  if (d.part(2) != "tile" || field == fields.end()) d.fail("names no field of a tiled map");
  MapUpdate op;
  op.field = field->second;
  op.shared = d.has("shared::cta");
  op.global = d.has("global");
  d.in.option[5] = d.address(d.operand(0));
  size_t at = 1;
  if (op.field >= MapField::kBoxDim && op.field <= MapField::kElementStride) op.ordinal = static_cast<int>(d.integer(d.operand(at++)));
  if (op.field >= MapField::kElementType) {
    op.immediate = static_cast<uint64_t>(d.integer(d.operand(at)));
  } else {
    op.wide = d.last_part() == "b64";
    op.value = d.source(d.operand(at), op.wide ? 64 : 32);
  }
  d.in.extra = d.keep(op);
  d.in.execute = replace_map_field;
}

void decode_map(Decoder& d) {
  if (d.part(1) == "replace") return decode_map_replace(d);
  if (d.part(1) != "cp_fenceproxy") d.fail("is not an instruction known here");
  Bulk op;
  for (int i = 0; i < 2; ++i) op.wide[i] = d.address(d.operand(i), &op.slots[i], &op.offsets[i]);
  if (d.integer(d.operand(2)) != sizeof(TensorMapBits)) d.fail("copies 128 bytes");
  d.in.extra = d.keep(op);
  d.in.execute = copy_map;
}

// ---- cluster launch control ------------------------------------------------------------------------------------------------

// The response is opaque to programs; here it is the first CTA's coordinates and whether there is one.
void try_cancel(Warp& w, const Instruction& in, uint32_t mask) {
  Cluster& cluster = cluster_of(w);
  const Bulk& op = *static_cast<const Bulk*>(in.extra);
  for_lanes(mask, [&](int lane) {
    uint32_t to = static_cast<uint32_t>(lane_address(w, op.slots[0], op.wide[0], op.offsets[0], lane));
    uint32_t barrier = static_cast<uint32_t>(lane_address(w, op.slots[2], op.wide[2], op.offsets[2], lane));
    uint32_t all = op.multicast ? (1u << cluster.ctas.size()) - 1 : 0;
    std::vector<CopyTarget> targets = copy_targets(w, to, 16, barrier, false, all, op.multicast, 1);
    Agent agent = start_agent(w, in, lane);
    auto answer = [=, &cluster] {
      Grid& grid = *cluster.grid;
      uint64_t index = grid.next_cluster.fetch_add(1);
      uint32_t response[4] = {};
      if (index < grid.total_clusters) {
        const uint32_t* size = grid.request->cluster;
        response[0] = static_cast<uint32_t>(index % grid.clusters[0]) * size[0];
        response[1] = static_cast<uint32_t>(index / grid.clusters[0] % grid.clusters[1]) * size[1];
        response[2] = static_cast<uint32_t>(index / grid.clusters[0] / grid.clusters[1]) * size[2];
        response[3] = 1;
      }
      for (const CopyTarget& target : targets) {
        mark_written(target.place, 16);
        note_write(agent, target.place, 16);
        std::memcpy(target.place.host(), response, 16);
      }
    };
    auto signal = [=] { for (const CopyTarget& target : targets) complete_copy(agent, target.barrier, 16); };
    cluster.submit(std::make_unique<Steps>(issue_text(w, in), std::vector<std::function<void()>>{answer, signal}));
  });
}

void query_cancel(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t* handle = row<uint64_t>(w, in.a);
  if (in.option[0] == 4) {
    uint32_t result = 0;
    for_lanes(mask, [&](int lane) { result |= static_cast<uint32_t>(handle[kLanes + lane] >> 32 & 1) << lane; });
    return write_predicate(w, in.d, result, mask);
  }
  const Slot* slots = &w.program->lists[in.list];
  for (int i = 0; i < in.count; ++i) {
    if (slots[i] == kNoSlot) continue;
    int axis = in.count > 1 ? i : in.option[0];
    for_lanes(mask, [&](int lane) {
      uint32_t words[4];
      std::memcpy(words, &handle[lane], 8);
      std::memcpy(words + 2, &handle[kLanes + lane], 8);
      row<uint32_t>(w, slots[i])[lane] = axis < 3 ? words[axis] : 0;
    });
  }
}

void decode_launch_control(Decoder& d) {
  if (d.part(1) == "try_cancel") {
    Bulk op;
    op.multicast = d.has("multicast::cluster::all");
    op.wide[0] = d.address(d.operand(0), &op.slots[0], &op.offsets[0]);
    op.wide[2] = d.address(d.operand(1), &op.slots[2], &op.offsets[2]);
    d.in.extra = d.keep(op);
    d.in.execute = try_cancel;
    return;
  }
  d.in.a = d.source(d.operand(1), 128);
  if (d.has("is_canceled")) {
    d.in.option[0] = 4;
    d.in.d = d.predicate_destination(d.operand(0));
  } else {
    d.in.option[0] = d.has("get_first_ctaid::y") ? 1 : d.has("get_first_ctaid::z") ? 2 : 0;
    d.destinations(d.operand(0), 32);
  }
  d.in.execute = query_cancel;
}

}  // namespace

void decode_store_async(Decoder& d) {
  Bulk op;
  op.reduce = d.part(0) == "red";
  if (op.reduce) {
    d.allow({"async", "relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes", "add", "min", "max", "inc", "dec",
             "and", "or", "xor", "u32", "s32", "u64", "b32"});
    if (!parse_reduction(d, &op.reduction, &op.type)) d.fail("has no reduction");
  } else {
    d.allow({"async", "weak", "relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4", "b32", "u32", "s32",
             "f32", "b64", "u64", "s64", "f64"});
  }
  if (!d.has("mbarrier::complete_tx::bytes")) d.fail("to global memory is not known here");
  op.wide[0] = d.address(d.operand(0), &op.slots[0], &op.offsets[0]);
  op.wide[2] = d.address(d.operand(2), &op.slots[2], &op.offsets[2]);
  int bits = type_bits(d.last_part());
  d.sources(d.operand(1), bits);
  d.in.size = static_cast<uint8_t>(bits / 8);
  d.in.extra = d.keep(op);
  d.in.execute = run_store_async;
}

void register_bulk(Families& f) {
  f["cp"] = decode_cp;
  f["tensormap"] = decode_map;
  f["clusterlaunchcontrol"] = decode_launch_control;
}

}  // namespace emulator
