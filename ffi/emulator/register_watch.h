// Registers that asynchronous instructions still read or write.
//
// PTX ISA: `wgmma.fence` ("must be used to order register accesses"), `wgmma.wait_group`, `tcgen05.wait::ld`. A warp may touch
// the accumulators of a wgmma only after waiting for its group, may not change its A registers before, and needs a wgmma.fence
// between its own accesses of these registers and the wgmma. Registers of a tcgen05.ld are valid after tcgen05.wait::ld. Watched
// when races are checked: the values may come out right without.
#pragma once

#include <cstdint>
#include <vector>

#include "program.h"

namespace emulator {

struct Warp;

class RegisterWatch {
 public:
  explicit RegisterWatch(const Program& program);

  // Before an ordinary instruction: none of its registers may be in flight. Notes that they were accessed.
  void access(const Program& program, const Instruction& in);
  void fence() {
    ++fence_;
    fenced_once_ = true;
  }
  // wgmma number `sequence` (from 0) of the warp with its accumulators and A registers.
  void issue(const Slot* d, int d_count, const Slot* a, int a_count, uint64_t sequence);
  void waited(uint64_t complete) { complete_ = complete; }  // wgmma 0 .. complete - 1
  void load(const Slot* d, int count);  // tcgen05.ld
  void loads_waited() { ++load_wait_; }

 private:
  struct State {
    uint64_t accessed = 0;      // fence count + 1 at the last ordinary access
    uint64_t written_until = 0; // wgmma sequence + 1
    uint64_t read_until = 0;
    uint64_t loaded = 0;        // load wait count + 1
  };
  State& state(Slot slot) { return rows_[slot / 128]; }

  std::vector<State> rows_;
  uint64_t fence_ = 0, complete_ = 0, load_wait_ = 0;
  bool fenced_once_ = false;
};

}  // namespace emulator
