// The emulator behind a plain C interface, for tests and tools that load the library with ctypes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const char* name;
  void* base;
  size_t bytes;
  int writable;
} EmulatorRegion;

typedef struct {
  uint32_t grid[3], cluster[3], block[3];
  uint32_t dynamic_shared;
  const void* const* parameters;  // one pointer for each kernel parameter, to its bytes
  const EmulatorRegion* regions;  // global memory the kernel may touch; none: anything
  size_t num_regions;
  uint64_t seed;                  // 0: the deterministic schedule
  int32_t host_threads;           // 0: chosen
  int32_t check_races, strict_exit, trace;
  uint64_t instruction_limit;     // of a cluster; 0: none
  int32_t num_sms;                // 0: 132
  uint32_t registers;             // for each thread at launch; 0: as many as fit
  int32_t lenient_tensor;         // tcgen05 loads need no wait, and hand-overs of tensor memory no tcgen05.fence
} EmulatorLaunch;

// A module, or null with the reason in emulator_error().
void* emulator_load(const char* ptx, size_t bytes);
void emulator_unload(void* module);
// Names of the entries, one a line; valid until the next call of this thread.
const char* emulator_entries(void* module);
int32_t emulator_parameter_count(void* module, const char* entry);
uint32_t emulator_parameter_size(void* module, const char* entry, int32_t index);
// 0: success; else emulator_error() says what went wrong. `instructions`: warp instructions executed.
int32_t emulator_launch(void* module, const char* entry, const EmulatorLaunch* launch, uint64_t* instructions, double* seconds);
const char* emulator_error(void);  // of this thread's last call
const char* emulator_trace(void);  // JSON of this thread's last launch with `trace`
// cuTensorMapEncodeTiled: 0, or 1 with the broken rule in emulator_error().
int32_t emulator_encode_tiled(void* map, int32_t data_type, uint32_t rank, uint64_t address, const uint64_t* sizes,
                              const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int32_t interleave,
                              int32_t swizzle, int32_t l2_promotion, int32_t fill);

#ifdef __cplusplus
}
#endif
