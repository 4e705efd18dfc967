// Registers that asynchronous instructions still read or write. See register_watch.h.
#include "register_watch.h"

namespace emulator {

RegisterWatch::RegisterWatch(const Program& program) : rows_(program.register_bytes / 128 + 2) {}

void RegisterWatch::access(const Program& program, const Instruction& in) {
  const Slot* slots = &program.accesses[in.accesses];
  for (int i = 0; i < in.num_uses + in.num_definitions; ++i) {
    bool writes = i >= in.num_uses;
    State& s = state(slots[i]);
    if (s.written_until > complete_) throw Fault("a register that a wgmma still writes is accessed before wgmma.wait_group");
    if (writes && s.read_until > complete_) throw Fault("a register that a wgmma still reads is changed before wgmma.wait_group");
    if (s.loaded > load_wait_) throw Fault("a register of a tcgen05.ld is accessed before tcgen05.wait::ld");
    s.accessed = fence_ + 1;
  }
}

void RegisterWatch::issue(const Slot* d, int d_count, const Slot* a, int a_count, uint64_t sequence) {
  if (!fenced_once_) throw Fault("the first wgmma of a warp comes before any wgmma.fence");
  auto check = [&](Slot slot) {
    if (state(slot).accessed > fence_) throw Fault("no wgmma.fence between an access of a register and the wgmma that uses it");
    if (state(slot).loaded > load_wait_) throw Fault("a register of a tcgen05.ld is accessed before tcgen05.wait::ld");
  };
  for (int i = 0; i < d_count; ++i) {
    check(d[i]);
    if (state(d[i]).read_until > complete_) throw Fault("a wgmma writes a register that an earlier one still reads as A");
    state(d[i]).written_until = sequence + 1;
  }
  for (int i = 0; i < a_count; ++i) {
    check(a[i]);
    if (state(a[i]).written_until > complete_) throw Fault("a wgmma reads as A a register that an earlier one still writes");
    state(a[i]).read_until = sequence + 1;
  }
}

void RegisterWatch::load(const Slot* d, int count) {
  for (int i = 0; i < count; ++i) if (d[i] != kNoSlot) state(d[i]).loaded = load_wait_ + 1;
}

}  // namespace emulator
