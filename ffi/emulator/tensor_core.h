// Tensor memory and the tensor pipe of a CTA.
//
// PTX ISA: "TensorCore 5th Generation Family Instructions": Tensor Memory (addressing, allocation), memory consistency model.
// Tensor memory is 512 columns of 128 lanes of 32-bit words. Products, copies and commits of a CTA (of a pair of CTAs with
// cta_group::2) complete in the order of their issue.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "engines.h"
#include "mma.h"
#include "tmem_shapes.h"

namespace emulator {

struct TensorRequest {  // an alloc that waits for columns, or for the peer CTA
  uint32_t columns;
  SharedPlace result;
  bool pair;
  bool done = false;
  Warp* warp = nullptr;
  const Instruction* in = nullptr;
};

class TensorCore {
 public:
  explicit TensorCore(Cta& cta) : cta_(cta) {}

  struct Allocation {
    uint32_t column, columns;
    bool pair;
  };
  using Request = TensorRequest;

  // Takes columns for the request (in both CTAs of a pair) and writes their address; false: not now.
  static bool try_allocate(TensorCore& core, TensorCore* peer, const std::shared_ptr<Request>& request);
  void deallocate(uint32_t column, uint32_t columns, bool pair);

  // Throws unless the rectangle lies in allocated columns (and, with `read`, was written).
  void check(int lane, int lanes, int column, int columns, bool read);
  void mark(int lane, int lanes, int column, int columns);

  uint32_t* memory() { reserve(); return memory_.data(); }
  uint8_t* state() { reserve(); return state_.data(); }
  Cta& cta() { return cta_; }

  std::vector<Allocation> allocations;
  std::deque<std::shared_ptr<Request>> requests;
  bool relinquished = false;
  // The pipe: sequence numbers of operations issued by this CTA.
  uint64_t issued = 0, completed = 0;
  uint32_t pipe_clock = 0;  // identity for the race detector

 private:
  void reserve() {
    if (memory_.empty()) {
      memory_.assign(kTmemLanes * kTmemColumns, 0xffffffffu);
      state_.assign(kTmemLanes * kTmemColumns, kUnwritten);
    }
  }
  int find_free(uint32_t columns, const TensorCore* peer) const;
  bool is_free(uint32_t column, uint32_t columns) const;

  Cta& cta_;
  std::vector<uint32_t> memory_;
  std::vector<uint8_t> state_;
};

}  // namespace emulator
