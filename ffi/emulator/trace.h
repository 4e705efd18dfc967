// Counts of what a grid did, as JSON. See trace.cc.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "machine.h"

namespace emulator {

class Trace {
 public:
  explicit Trace(const Program& program) : program_(program) {}
  void add(const Cluster& cluster);
  std::string json(double seconds) const;

 private:
  const Program& program_;
  std::vector<std::vector<uint64_t>> warps_;  // [warp of the CTA][instruction], summed over CTAs
  Counters total_;
  uint64_t busiest_ = 0;  // mma_flop of the CTA that has most
  uint64_t ctas_ = 0;
};

}  // namespace emulator
