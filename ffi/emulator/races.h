// Happens-before race detector (see races.cc).
#pragma once

namespace emulator {

class Races {
 public:
  Races() = default;
};

}  // namespace emulator
