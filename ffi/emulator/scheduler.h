// Who runs next. See scheduler.cc.
#pragma once

#include "machine.h"

namespace emulator {

// Ends the barrier when every expected thread has arrived. Called on arrival and when a warp exits.
void finish_barrier(Cta& cta, uint32_t id);
void finish_cluster_barrier(Cluster& cluster);

}  // namespace emulator
