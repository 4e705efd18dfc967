// The asynchronous engines of a CTA: bulk copies and their groups, the warpgroup matrix unit, the tensor core.
//
// PTX ISA: "Data Movement and Conversion Instructions: Asynchronous copy", "Asynchronous Warpgroup Level Matrix
// Instructions", "TensorCore 5th Generation Family Instructions".
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"
#include "memory.h"

namespace emulator {

// An operation as a list of steps that the rest of the machine can tell apart.
class Steps : public Asynchronous {
 public:
  Steps(std::string text, std::vector<std::function<void()>> steps) : text_(std::move(text)), steps_(std::move(steps)) {}
  bool step() override {
    steps_[at_]();
    return ++at_ == steps_.size();
  }
  std::string describe() const override { return text_; }

 private:
  std::string text_;
  std::vector<std::function<void()>> steps_;
  size_t at_ = 0;
};

// Where an instruction was issued, for the messages of its asynchronous part.
std::string issue_text(const Warp& w, const Instruction& in);

LaneBulk& lane_bulk(Warp& w, int lane);
// The group that the lane's next bulk operations join.
std::shared_ptr<BulkGroup> open_group(Warp& w, int lane);

// The wgmma pipe of a warpgroup. Its four warps issue an instruction one after the other; the product runs, in order, once
// all four have. A warp waits for the groups that it committed itself.
class WarpgroupQueue {
 public:
  struct Operation {
    const Instruction* in = nullptr;
    uint32_t issued = 0;           // bit of each warp
    uint64_t a = 0, b = 0;         // descriptors
    bool scale_d = true;
    bool done = false;
    uint32_t clock = 0;
  };
  std::deque<Operation> operations;
  uint64_t first = 0;              // sequence number of operations[0]
  uint64_t issued[4] = {};         // per warp: operations issued
  std::vector<uint64_t> groups[4]; // per warp: operations issued when a group was committed
  Warp* warps[4] = {};
  uint64_t completed = 0;          // operations executed (they execute in order)
  bool registers_in_flight(const Warp& w) const { return issued[w.index % 4] > completed; }
};

void start_engines(Cta& cta);
void check_warp_exit(Warp& w);   // nothing of the warp may still be in flight
void check_cta_exit(Warp& last);  // of the CTA
void finish_cluster(Cluster& cluster);  // runs what is left in flight

// TensorCore is defined in tensor_core.h.

}  // namespace emulator
